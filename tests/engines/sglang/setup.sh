#!/usr/bin/env bash
# Makes an environment with a real SGLang server for CPUs and with weightbus: setup.sh VENV_DIR
# Does nothing when the environment was made from this very recipe before.
set -euo pipefail
venv=${1:?usage: setup.sh VENV_DIR}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
python=${PYTHON:-python3.11}
sglang_version=0.5.23
recipe=$(cat "$0" "$here/requirements.txt" | sha256sum | cut -d' ' -f1)

if [[ "$(cat "$venv/.recipe" 2>/dev/null)" != "$recipe" ]]; then
  [[ -x "$venv/bin/python" ]] || "$python" -m venv "$venv"
  pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
  "${pip[@]}" torch==2.13.0  # first, so that nothing below brings another build
  "${pip[@]}" -r "$here/requirements.txt" torch==2.13.0
  "${pip[@]}" --no-deps "sglang==$sglang_version" torchvision==0.28.0 compressed-tensors==0.18.0 xgrammar==0.2.7
  "$venv/bin/python" -c 'import torch; torch.version.cuda is None or exit("a CPU build of torch is needed here")'
  echo "$recipe" >"$venv/.recipe"
fi
# weightbus by path: entry points are not needed, and the tree under test is always the one next to this file
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$root" "$root/backends" "$root/adapters" >"$site/weightbus-tree.pth"
