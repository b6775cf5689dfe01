"""Start a real SGLang server on a CPU: ``python launch.py --model-path ...`` with the server's own arguments.

The top level runs again in every child that the server spawns, so what must precede ``import sglang`` stands there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent / "stubs"))

import torch

# torchvision's own operators do not load beside a CPU torch; its Python side only insists that these two exist.
TORCHVISION = torch.library.Library("torchvision", "DEF")
for _schema in (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
):
    TORCHVISION.define(_schema)


def install_triton_stub() -> None:
    """Let sglang use the stand-in for triton that it ships for another platform; triton itself is 1 GB."""
    if importlib.util.find_spec("triton") is not None:
        return
    sglang = importlib.util.find_spec("sglang")
    if sglang is None or not sglang.submodule_search_locations:
        raise RuntimeError("sglang is not installed; run setup.sh")
    path = Path(sglang.submodule_search_locations[0]) / "_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{path} cannot be loaded")
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    stubs.sys = types.SimpleNamespace(platform="darwin", modules=sys.modules, meta_path=sys.meta_path)  # type: ignore[attr-defined]
    stubs.platform = types.SimpleNamespace(machine=lambda: "arm64")  # type: ignore[attr-defined]
    stubs._patch_non_blocking = lambda: None  # type: ignore[attr-defined]
    available = torch.backends.mps.is_available
    torch.backends.mps.is_available = lambda: True
    try:
        stubs.install_platform_stubs()
    finally:
        torch.backends.mps.is_available = available


install_triton_stub()

if __name__ == "__main__":
    from sglang.launch_server import run_server  # type: ignore[import-not-found]
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found]

    run_server(prepare_server_args(sys.argv[1:]))
