"""What the peer processes of test_processes.py run."""

from __future__ import annotations

import os

import torch

import weightbus
from weightbus.testing.adapters import RecordingAdapter
from weightbus.testing.peers import ParentLink

COUNT, NUMEL = 12, 40_000
SETTINGS = {"bucket_bytes": 64_000, "stall_timeout": 3.0, "finish_timeout": 20.0}


def filled(version: int) -> dict[str, torch.Tensor]:
    """A model all of whose values are its version: any mixture shows."""
    return {f"w{i}": torch.full((NUMEL,), float(version)) for i in range(COUNT)}


def versions_in(tensors: dict[str, torch.Tensor]) -> set[float]:
    return {v for t in tensors.values() for v in (t.min().item(), t.max().item())}


def trainer(link: ParentLink, bind: str, run_id: str, backend: str, receivers: int) -> None:
    """Send what the test asks for; answer with outcomes or with the error."""
    with weightbus.WeightBus.sender(bind, receivers=receivers, run_id=run_id, backend=backend, **SETTINGS) as bus:
        link.send(bus.address)
        while (version := link.recv(120)) is not None:
            try:
                link.send(("ok", bus.send(filled(version), version=version, timeout=30).outcomes))
            except weightbus.WeightBusError as exc:
                link.send((type(exc).__name__, str(exc)))


def engine(link: ParentLink, address: str, name: str, backend: str, stage: str | None) -> None:
    """Receive until told to stop; tells each result."""
    adapter = RecordingAdapter(tensors=filled(-1))
    with weightbus.WeightBus.receiver(address, engine=name, backend=backend, adapter=adapter, stage=stage) as bus:
        link.send("up")
        while not link.poll():
            try:
                bus.recv(timeout=8)
            except weightbus.WeightBusError:
                pass
            link.send((bus.state, adapter.engine.serving, sorted(versions_in(adapter.engine.weights[0]))))


def leaves_cleanly(address: str, backend: str) -> list[str]:
    """One refit, an ordinary end; what is left of threads and descriptors."""
    import threading

    before = len(os.listdir("/proc/self/fd"))
    adapter = RecordingAdapter(tensors=filled(-1))
    with weightbus.WeightBus.receiver(address, backend=backend, adapter=adapter) as bus:
        bus.recv(timeout=60)
    after = len(os.listdir("/proc/self/fd"))
    names = [t.name for t in threading.enumerate() if t.name.startswith("weightbus")]
    return [*names, *([f"{after - before} descriptors"] if after > before + 2 else [])]
