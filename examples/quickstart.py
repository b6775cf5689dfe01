"""A trainer process and an inference process: three versions. Run it: ``python examples/quickstart.py``."""

from __future__ import annotations

import multiprocessing

import torch
from torch import nn

import weightbus

STEPS = 3


def inference(address: str) -> None:
    """Takes every version into a module of its own."""
    model = nn.Linear(1024, 1024)
    options = {"module": model}
    with weightbus.WeightBus.receiver(address, adapter="torch", adapter_options=options) as bus:
        for _ in range(STEPS):
            report = bus.recv(timeout=60)
            print(f"inference: version {report.version}, first weight {model.weight[0, 0].item():.0f}", flush=True)


def main() -> None:
    model = nn.Linear(1024, 1024)
    with weightbus.WeightBus.sender("tcp://127.0.0.1:0", receivers=1) as bus:
        process = multiprocessing.get_context("spawn").Process(target=inference, args=(bus.address,))
        process.start()
        for step in range(1, STEPS + 1):
            with torch.no_grad():
                model.weight.fill_(step)  # the training step
            report = bus.send(model, version=step, timeout=60)
        process.join()
    print(report)


if __name__ == "__main__":
    main()
