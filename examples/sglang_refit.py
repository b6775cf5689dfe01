"""Refit a running SGLang server from a checkpoint, or from any process that has its weights.

Start a server, then in two terminals on its host:

    python examples/sglang_refit.py receive --url http://127.0.0.1:30000
    python examples/sglang_refit.py send --weights NEW_CHECKPOINT_DIR --version 1

`receive` stays and takes every version that comes; `send` is what a trainer does after a step.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from safetensors.torch import load_file

from weightbus import WeightBus, WeightBusError


def receive(address: str, url: str, ranks: int, stage: str | None, backend: str) -> None:
    """Beside the server: one stream for all its ranks, or with `ranks` = tp_size one for each."""
    with WeightBus.receiver(
        address,
        engine="sglang",
        ranks=ranks,
        adapter="sglang",
        adapter_options={"url": url},
        stage=stage,
        backend=backend,
    ) as bus:
        while True:
            try:
                print(bus.recv(timeout=86400))
            except WeightBusError as exc:
                print(f"{type(exc).__name__}: {exc}\nthe engine is {bus.state}")


def send(address: str, weights: str, version: int, receivers: int, backend: str) -> None:
    """On the trainer: names as in the served checkpoint."""
    tensors = {
        name: tensor for file in sorted(Path(weights).glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    with WeightBus.sender(address, receivers=receivers, backend=backend) as bus:
        print(bus.send(tensors, version=version))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("receive", "send"))
    parser.add_argument("--address", default="tcp://127.0.0.1:29600", help="of the sender")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--ranks", type=int, default=1, help="1, or the server's tp_size for a stream per rank")
    parser.add_argument("--stage", choices=("host", "device"), help="serve on while bytes move, pause only to load")
    parser.add_argument("--backend", default="local", help="local, nixl, ucx or nccl; the same on both sides")
    parser.add_argument("--weights", help="folder of safetensors files")
    parser.add_argument("--version", type=int, default=1, help="must rise from send to send")
    arguments = parser.parse_args()
    if arguments.side == "receive":
        receive(arguments.address, arguments.url, arguments.ranks, arguments.stage, arguments.backend)
    else:
        send(arguments.address, arguments.weights, arguments.version, arguments.ranks, arguments.backend)


if __name__ == "__main__":
    main()
