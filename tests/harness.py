"""Buses of several sides in one process: senders in the test's thread, receivers in threads of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import weightbus
from weightbus.testing.adapters import RecordingAdapter

FAST = {"stall_timeout": 3.0, "finish_timeout": 10.0}


def weights(seed: int, count: int = 6, numel: int = 1000) -> dict[str, torch.Tensor]:
    """Distinct values per name and seed."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}.w": torch.randn(numel + i, generator=generator) for i in range(count)}


def poisoned(like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(t, float("nan")) for name, t in like.items()}


class Receiving:
    """A receiver that is always in recv, and what came of it.

    Attributes:
        results: reports and errors, in order.
    """

    def __init__(
        self, address: str, engine: str = "e0", *, adapter: Any = None, drive: bool = False, **options: Any
    ) -> None:
        self.adapter = adapter
        self.engine = adapter.engine if isinstance(adapter, RecordingAdapter) else None
        make = weightbus.WeightBus.driver if drive else weightbus.WeightBus.receiver
        self.bus = make(address, engine=engine, adapter=adapter, **options)
        self.results: list[Any] = []
        self._call = self.bus.drive if drive else self.bus.recv
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            try:
                self.results.append(self._call(timeout=60))
            except (weightbus.EndpointClosed, weightbus.LocalProtocolError):
                return
            except weightbus.WeightBusError as exc:
                self.results.append(exc)

    def last(self, count: int, timeout_s: float = 15) -> Any:
        """The `count`-th result, waited for."""
        wait_until(lambda: len(self.results) >= count, timeout_s)
        return self.results[count - 1]

    def close(self) -> None:
        self._stop = True
        self.bus.close()
        self._thread.join(20)
        assert not self._thread.is_alive(), "recv did not end when its bus was closed"

    def __enter__(self) -> Receiving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_until(holds: Callable[[], bool], timeout_s: float = 15) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def sender(**options: Any) -> weightbus.WeightBus:
    settings = {"backend": "loopback", "bucket_bytes": 4096, "poison": True, **FAST, **options}
    return weightbus.WeightBus.sender("tcp://127.0.0.1:0", **settings)


def receiving(bus: weightbus.WeightBus, engine: str = "e0", **options: Any) -> Receiving:
    settings = {"backend": "loopback", "poison": True, **options}
    return Receiving(bus.address, engine, **settings)


def same(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return have.keys() == want.keys() and all(torch.equal(have[name], want[name]) for name in want)
