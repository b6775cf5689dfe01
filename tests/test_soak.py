"""Refit after refit: memory, descriptors, threads and shared memory stay flat, aborted refits included."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import weightbus
from tests.harness import Receiving, poisoned, same, sender, wait_until
from weightbus.testing.adapters import RecordingAdapter
from weightbus.testing.peers import Peer

MIB = 1 << 20
_trim = ctypes.CDLL(None).malloc_trim
COUNT, NUMEL = 3, MIB // 4  # 3 tensors of 1 MiB


def model(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((NUMEL,), value + i) for i in range(COUNT)}


def resident_bytes() -> int:
    """What is in use: freed memory that the C library keeps is given back first."""
    gc.collect()
    _trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len([t for t in threading.enumerate() if t.name.startswith("weightbus")])


def shared_memory() -> int:
    """Mappings of shared memory, which has no name and so shows only here."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:weightbus" in line or "/dev/shm/" in line for line in maps)


def alone(function: Callable[..., None], *args: object) -> None:
    """Run in a process of its own, whose memory no other test has touched; its failure is ours."""
    with Peer(f"{__file__}:{function.__name__}", args, linked=False, method="forkserver") as peer:
        peer.result(300)


class Watch:
    """What this process holds, compared with a moment when all was warm."""

    def __init__(self) -> None:
        gc.collect()  # what lies in cycles is no leak, and goes by chance
        self.rss, self.fds, self.threads, self.shm = resident_bytes(), descriptors(), threads(), shared_memory()

    def flat(self, slack_bytes: int) -> None:
        wait_until(lambda: threads() <= self.threads, 20)
        wait_until(lambda: descriptors() <= self.fds, 20)
        assert shared_memory() <= self.shm
        gc.collect()
        end = time.monotonic() + 5  # what a thread of another test still holds goes, what leaks stays
        while (grown := resident_bytes() - self.rss) >= slack_bytes:
            assert time.monotonic() < end, f"{grown / MIB:.1f} MiB more resident memory"
            time.sleep(0.1)


def _refits(rounds: int, backend: str, stage: str | None) -> None:
    adapter = RecordingAdapter(tensors=poisoned(model(0.0)))
    values = [model(float(10 * k)) for k in range(3)]
    with sender(receivers=1, backend=backend, bucket_bytes=MIB) as bus:
        rx = Receiving(bus.address, adapter=adapter, stage=stage, backend=backend, poison=True)
        try:
            watch: Watch | None = None
            for version in range(rounds):
                bus.send(values[version % 3], version=version, timeout=30)
                assert same(adapter.engine.weights[0], values[version % 3])
                if version == 5:
                    watch = Watch()
            assert watch is not None
            watch.flat(4 * MIB)
        finally:
            rx.close()


@pytest.mark.parametrize("stage", [None, "host"])
@pytest.mark.parametrize("backend", ["loopback", "local"])
def test_thirty_refits_leave_the_process_as_it_was(backend: str, stage: str | None) -> None:
    alone(_refits, 30, backend, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [None, "host"])
@pytest.mark.parametrize("backend", ["loopback", "local"])
def test_two_hundred_refits_leave_the_process_as_it_was(backend: str, stage: str | None) -> None:
    alone(_refits, 200, backend, stage)


def _breaks(values: dict[str, torch.Tensor], after: int) -> Iterator[tuple[str, torch.Tensor]]:
    for k, pair in enumerate(values.items()):
        if k == after:
            raise RuntimeError("as told")
        yield pair


def _aborts(backend: str, stage: str | None) -> None:
    """Every abort retires a lane: its memory, its connection and its threads must go."""
    adapter = RecordingAdapter(tensors=poisoned(model(0.0)))
    values = model(1.0)
    manifest = [weightbus.TensorSpec.of(name, tensor) for name, tensor in values.items()]
    with sender(receivers=1, backend=backend, bucket_bytes=MIB) as bus:
        rx = Receiving(bus.address, adapter=adapter, stage=stage, backend=backend, poison=True)
        try:
            watch: Watch | None = None
            version = 0
            for round_ in range(16):
                with pytest.raises(weightbus.SourceError):
                    bus.send(_breaks(values, round_ % COUNT), manifest=manifest, version=version + 1, timeout=30)
                version += 2
                bus.send(values, version=version, timeout=30)
                assert same(adapter.engine.weights[0], values)
                rx.results.clear()  # errors hold the frames that raised them
                if round_ == 5:
                    watch = Watch()
            assert watch is not None
            watch.flat(4 * MIB)
        finally:
            rx.close()


@pytest.mark.parametrize("stage", [None, "host"])
@pytest.mark.parametrize("backend", ["loopback", "local"])
def test_aborted_refits_leave_nothing_behind_either(backend: str, stage: str | None) -> None:
    alone(_aborts, backend, stage)


def _guests(backend: str) -> None:
    values = model(2.0)
    with sender(backend=backend, bucket_bytes=MIB) as bus:
        watch: Watch | None = None
        for round_ in range(20):
            rx = Receiving(bus.address, "guest", adapter=RecordingAdapter(tensors=poisoned(values)), backend=backend)
            wait_until(lambda: bus.engines().get("guest", "").startswith("READY"))
            assert bus.send(values, version=round_, timeout=30).outcomes == {"guest": f"READY({round_})"}
            rx.close()
            wait_until(lambda: not bus.engines()["guest"].startswith("READY"))
            del rx
            if round_ == 4:
                watch = Watch()
        assert watch is not None
        watch.flat(8 * MIB)


@pytest.mark.parametrize("backend", ["loopback", "local"])
def test_readers_that_come_and_go_leave_nothing_with_the_sender(backend: str) -> None:
    alone(_guests, backend)


def _buses(backend: str) -> None:
    values = model(3.0)
    watch: Watch | None = None
    for round_ in range(44):
        adapter = RecordingAdapter(tensors=poisoned(values))
        with sender(receivers=1, backend=backend, bucket_bytes=MIB) as bus:
            rx = Receiving(bus.address, adapter=adapter, backend=backend)
            bus.send(values, version=0, timeout=30)
            rx.close()
        assert same(adapter.engine.weights[0], values)
        del adapter, rx, bus
        if round_ == 3:
            watch = Watch()
    assert watch is not None
    watch.flat(24 * MIB)  # the allocator swings by as much; buses that stay are more than 40 MiB
    assert threads() == 0


@pytest.mark.parametrize("backend", ["loopback", "local"])
def test_buses_that_come_and_go_leave_nothing(backend: str) -> None:
    alone(_buses, backend)


def _peak(backend: str) -> None:
    """64 MiB of weights through buckets of 1 MiB: neither side holds a second copy."""
    source = {f"w{i}": torch.full((NUMEL,), float(i)) for i in range(64)}
    target = torch.nn.Module()
    for name, tensor in source.items():
        target.register_buffer(name, torch.full_like(tensor, float("nan")))
    with sender(receivers=1, backend=backend, bucket_bytes=MIB) as bus:
        rx = Receiving(bus.address, adapter="torch", adapter_options={"module": target}, backend=backend)
        try:
            before, peak, stop = resident_bytes(), [0], threading.Event()

            def look() -> None:
                while not stop.wait(0.002):
                    peak[0] = max(
                        peak[0], int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                    )

            watcher = threading.Thread(target=look)
            watcher.start()
            for version in range(3):
                bus.send(source, version=version, timeout=30)
                time.sleep(0.01)
            stop.set()
            watcher.join()
            assert all(torch.equal(held, source[name]) for name, held in target.named_buffers())
            assert peak[0] - before < 24 * MIB, f"{(peak[0] - before) / MIB:.1f} MiB more at the peak"
        finally:
            rx.close()


@pytest.mark.parametrize("backend", ["loopback", "local"])
def test_memory_on_each_side_is_buckets_and_a_constant(backend: str) -> None:
    alone(_peak, backend)
