"""Driver and loader of one server, called as core would call them."""

from __future__ import annotations

from typing import Any

import torch

from tests.engines.sglang.server import Client
from weightbus.adapter import Refit
from weightbus.deadline import Deadline
from weightbus.manifest import Manifest, TensorSpec
from weightbus_sglang import SglangAdapter

Weights = dict[str, torch.Tensor]


def soon() -> Deadline:
    return Deadline.after(60)


def manifest(weights: Weights) -> Manifest:
    return Manifest([TensorSpec.of(name, tensor) for name, tensor in weights.items()])


class Side:
    """The adapter of `server` with one driver and one loader, and a refit through both."""

    def __init__(self, server: Client, *, per_rank: bool = False, **options: Any) -> None:
        self.server = server
        self.adapter = SglangAdapter(url=server.url, **options)
        self.driver = self.adapter.driver()
        self.loader = self.adapter.loader(list(range(server.tp)) if per_rank else [0], None)

    def begin(self, version: int = 1, **fields: Any) -> None:
        self.driver.begin(Refit(refit_id="r", version=version, **{"tensors": 1, **fields}), soon())

    def load(self, *weights: Weights, size: int = 5) -> None:
        names = list(weights[0])
        for i in range(0, len(names), size):
            self.loader.load([[(name, part[name]) for name in names[i : i + size]] for part in weights])

    def refit(self, *weights: Weights, version: int = 1, **fields: Any) -> None:
        self.begin(version, **fields)
        self.load(*weights)
        self.driver.finish(version, soon())
        self.driver.resume(soon())

    def abort(self, *, loaded: bool, resume: bool = True) -> None:
        self.driver.abort("test", loaded=loaded, resume=resume, deadline=soon())

    def close(self) -> None:
        self.driver.close()
        self.loader.close()
