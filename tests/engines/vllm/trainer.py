"""A trainer in a process of its own: ``trainer.py BACKEND RECEIVERS [OPTIONS_JSON]``. Speaks JSON lines.

First it answers its address. An order ``{"path", "version"}`` sends a checkpoint; further keys: partial, only (regular
expression of names), drop, rename and reshape (a name), timeout, and of the source after so many tensors: raise_after,
die_after, hold_after with hold_s. The answer holds what every engine says, or the error.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny
import torch

import weightbus
from weightbus.manifest import Manifest, TensorSpec


def main() -> None:
    backend, receivers = sys.argv[1], int(sys.argv[2])
    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    settings = {"bucket_bytes": "64KiB", "poison": True, "stall_timeout": 20.0, **options}
    with weightbus.WeightBus.sender("tcp://127.0.0.1:0", receivers=receivers, backend=backend, **settings) as bus:
        _say({"address": bus.address})
        for line in sys.stdin:
            _say(_send(bus, json.loads(line)))


def _send(bus: weightbus.WeightBus, order: dict[str, Any]) -> dict[str, Any]:
    tensors = tiny.weights(Path(order["path"]))
    if "only" in order:
        tensors = {name: tensor for name, tensor in tensors.items() if re.search(order["only"], name)}
    if "drop" in order:
        del tensors[order["drop"]]
    if "rename" in order:
        tensors = {n.replace("norm", "gnorm") if n == order["rename"] else n: t for n, t in tensors.items()}
    if "reshape" in order:
        tensors[order["reshape"]] = tensors[order["reshape"]][:-1].contiguous()
    source: Any = tensors
    extra: dict[str, Any] = {}
    if any(key.endswith("_after") for key in order):
        source = _failing(tensors, order)
        extra["manifest"] = Manifest([TensorSpec.of(name, tensor) for name, tensor in tensors.items()])
    try:
        report = bus.send(
            source,
            version=order["version"],
            partial=order.get("partial", False),
            timeout=order.get("timeout", 90),
            **extra,
        )
    except weightbus.WeightBusError as exc:
        return {"error": type(exc).__name__, "text": str(exc), "engines": bus.engines()}
    return {
        "outcomes": dict(report.outcomes),
        "seconds": dict(report.seconds),
        "total_s": report.total_s,
        "engines": bus.engines(),
    }


def _failing(tensors: dict[str, torch.Tensor], order: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, item in enumerate(tensors.items()):
        if index == order.get("die_after"):
            os._exit(17)
        if index == order.get("hold_after"):
            time.sleep(order["hold_s"])
        if index == order.get("raise_after"):
            raise RuntimeError("the test ends the source here")
        yield item


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
