"""A trainer that feeds a vLLM server. Start the server first:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "weightbus"}'
    python examples/vllm_refit.py MODEL http://127.0.0.1:8000

MODEL is a checkpoint folder; the "training" scales every weight a little at each step. weightbus must be installed in
both environments: in the server's `pip install --no-deps weightbus`, plus attrs, msgspec, pyzmq and xxhash.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import torch
from safetensors import safe_open

import weightbus
from weightbus_vllm import VllmAdapter


def train(weights: dict[str, torch.Tensor], steps: int) -> Iterator[int]:
    for step in range(1, steps + 1):
        for tensor in weights.values():
            tensor.mul_(1 + 1e-3 * step)
        yield step


def load(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            weights.update({name: tensors.get_tensor(name) for name in tensors.keys()})  # noqa: SIM118
    if "lm_head.weight" not in weights and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # a tied head goes under its own name too
    return weights


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("url")
    arguments.add_argument("--steps", type=int, default=3)
    arguments.add_argument("--backend", default="local", help="nixl or ucx where the server is on another host")
    arguments.add_argument("--stage", choices=["host", "device"], help="serve on while the bytes move")
    given = arguments.parse_args()

    ranks = VllmAdapter(url=given.url).world_size or 1
    with weightbus.WeightBus.sender("tcp://127.0.0.1:0", receivers=ranks, backend=given.backend) as bus:
        join = {"address": bus.address, "engine": "e0", "backend": given.backend, "options": {"stage": given.stage}}
        with weightbus.WeightBus.driver(
            bus.address, engine="e0", ranks=ranks, adapter="vllm", adapter_options={"url": given.url, "join": join}
        ) as driver:
            weights = load(given.model)
            for step in train(weights, given.steps):
                driving = threading.Thread(target=driver.drive)  # where the driver runs is free: here, or beside vLLM
                driving.start()
                print(bus.send(weights, version=step))
                driving.join()
                print("server holds", httpx.get(f"{given.url}/weight_info").json()["weight_version"])


if __name__ == "__main__":
    main()
