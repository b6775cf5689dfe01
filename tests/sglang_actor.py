"""A Ray actor that owns an SGLang server and the receiver beside it, as an RL framework would write it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.engines.sglang.server import Client
from weightbus import WeightBus
from weightbus_sglang import SglangAdapter


class InferenceActor:
    """Plain methods only: with one coroutine among them Ray would run the others on an event loop.

    Args:
        address: the trainer's bus.
        ranks: 1 stream for all of the server's ranks, or one for each.
    """

    def __init__(self, address: str, server: Client, ranks: int) -> None:
        self.server = server
        self.adapter = SglangAdapter(url=server.url)
        self.bus = WeightBus.receiver(address, adapter=self.adapter, ranks=ranks)

    def refit(self, timeout: float) -> tuple[str, int]:
        """Take the next version: what the engine then holds, and in which process."""
        self.bus.recv(timeout=timeout)
        return self.bus.state, os.getpid()

    def checksums(self) -> dict[int, dict[str, str]]:
        return self.server.checksums()

    def close(self) -> None:
        self.bus.close()
        self.server.stop()  # type: ignore[attr-defined]


class DoubleActor(InferenceActor):
    """Its server is the double, on a checkpoint of random weights."""

    def __init__(self, address: str, folder: str, ranks: int) -> None:
        from tests.engines.sglang_double import SglangDouble, layers, write_checkpoint

        torch.manual_seed(0)
        server = SglangDouble(write_checkpoint(Path(folder), layers()), tp=2).start()
        super().__init__(address, server, ranks)


class RealActor(InferenceActor):
    """Its server is a real one, in a process group of its own."""

    def __init__(self, address: str, model: str, log: str, ranks: int, tp: int = 1) -> None:
        from tests.engines.sglang.server import RealServer

        super().__init__(address, RealServer(Path(model), Path(log), tp=tp).start(), ranks)


def trained(seed: int) -> dict[str, Any]:
    """Weights for the double's checkpoint."""
    from tests.engines.sglang_double import layers

    torch.manual_seed(seed)
    return layers()
