"""Refits of a real server from end to end: a sender here, the receiver in a process of its own, Llama at two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.engines.sglang.conftest import Fresh, measure
from tests.engines.sglang.server import PROMPTS, RealServer, Receiver, Traffic
from weightbus import PartialRefitError, SourceError, WeightBus

Weights = dict[str, torch.Tensor]


@pytest.fixture
def join(server: RealServer) -> Iterator[Callable[..., tuple[WeightBus, Receiver]]]:
    opened: list[Any] = []

    def make(sender: dict[str, Any] | None = None, **options: Any) -> tuple[WeightBus, Receiver]:
        backend = options.setdefault("backend", "local")
        lanes = options.get("ranks", 1)
        fields = {"receivers": lanes, "backend": backend, "stall_timeout": 60.0, **(sender or {})}
        bus = WeightBus.sender("tcp://127.0.0.1:0", **fields)
        opened.append(bus)
        receiver = Receiver(bus.address, server.url, **options)
        opened.append(receiver)
        return bus, receiver

    yield make
    for side in reversed(opened):
        side.close()


@pytest.mark.parametrize("stage", [None, "host"])
@pytest.mark.parametrize("backend", ["local", "nixl"])
def test_there_and_back_again(
    server: RealServer,
    weights: list[Weights],
    old: Fresh,
    new: Fresh,
    join: Callable[..., Any],
    backend: str,
    stage: Any,
) -> None:
    bus, receiver = join({"bucket_bytes": 128 << 10}, backend=backend, stage=stage)
    for version, (source, expected) in enumerate([(weights[1], new), (weights[0], old), (weights[1], new)], 1):
        report = bus.send(source, version=version, timeout=120)
        assert report.buckets > 3
        assert report.outcomes == {"engine": f"READY({version})"}
        assert server.outputs() == expected.outputs
        assert measure(server) == expected
        assert server.info()["weight_version"] == str(version)
        assert receiver.said()["state"].startswith(f"READY({version})")


@pytest.mark.parametrize("backend", ["local", "nixl"])
def test_a_stream_for_each_rank_with_boundaries_of_its_own(
    server: RealServer, weights: list[Weights], new: Fresh, join: Callable[..., Any], backend: str
) -> None:
    bus, _ = join({"senders": 2, "bucket_bytes": 96 << 10}, ranks=2, allow_paged_in_place=True, backend=backend)
    with (
        WeightBus.sender(address=bus.address, rank=1, senders=2, backend=backend, bucket_bytes=200_000) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        second = pool.submit(other.send, iter(weights[1].items()), version=1, timeout=120)
        first = bus.send(iter(weights[1].items()), version=1, timeout=120)
        counts = {first.buckets, second.result(120).buckets}
    assert len(counts) == 2, "equal bucket counts: the aligner had nothing to do"
    assert measure(server) == new


def slow(weights: Weights, pause_s: float, fail_at: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    for i, item in enumerate(weights.items()):
        time.sleep(pause_s)
        if i == fail_at:
            raise OSError("the trainer's disk")
        yield item


@pytest.mark.parametrize("stage", ["host", None])
def test_who_answers_while_bytes_move(
    server: RealServer, weights: list[Weights], new: Fresh, join: Callable[..., Any], stage: str | None
) -> None:
    bus, receiver = join({"bucket_bytes": 64 << 10}, stage=stage, allow_paged_in_place=True)
    moved: list[float] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for item in slow(weights[1], 0.15):
            moved.append(time.monotonic())
            yield item

    with Traffic(server) as traffic:
        bus.send(source(), version=1, timeout=120)
        after = server.generate(PROMPTS[0], 2)["meta_info"]["weight_version"]
    middle = [label for at, label in traffic.answers if moved[5] < at < moved[-1]]
    assert after == "1"
    assert measure(server) == new
    assert "pause" in receiver.said()["seconds"]
    if stage:
        assert len(middle) >= 3, "a staged engine goes on serving"
        assert set(middle) == {"100"}
    else:
        assert middle == [], "an engine that loads in place answers nothing"


@pytest.mark.parametrize(("stage", "state"), [("host", "READY"), (None, "DIRTY")])
def test_a_source_that_breaks_off(
    server: RealServer, weights: list[Weights], old: Fresh, new: Fresh, join: Callable[..., Any], stage: Any, state: str
) -> None:
    bus, receiver = join({"bucket_bytes": 64 << 10}, stage=stage, allow_paged_in_place=True)
    with pytest.raises(SourceError, match="disk"):
        bus.send(slow(weights[1], 0.05, fail_at=15), version=1, timeout=120)
    assert receiver.said()["state"].startswith(state)
    ready = server.http.get(f"{server.url}/ready").status_code == 200
    assert ready == (state == "READY")
    if ready:
        assert measure(server) == old
    bus.send(weights[1], version=2, timeout=120)
    assert measure(server) == new


def test_a_killed_receiver_and_its_successor(
    server: RealServer, weights: list[Weights], new: Fresh, join: Callable[..., Any]
) -> None:
    bus, receiver = join({"bucket_bytes": 64 << 10}, allow_paged_in_place=True)

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for i, item in enumerate(slow(weights[1], 0.05)):
            if i == 16:
                receiver.kill()
            yield item

    with pytest.raises(PartialRefitError):
        bus.send(source(), version=1, timeout=60)
    successor = Receiver(bus.address, server.url, adapter_options={"hold_traffic": True})
    try:
        report = bus.send(weights[1], version=2, timeout=120)
        assert report.outcomes["engine"] == "READY(2)"
        assert measure(server) == new
    finally:
        successor.close()


@pytest.mark.slow
def test_a_killed_server_and_its_successor(
    server: RealServer, weights: list[Weights], new: Fresh, join: Callable[..., Any]
) -> None:
    bus, receiver = join({"bucket_bytes": 64 << 10}, allow_paged_in_place=True)

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for i, item in enumerate(slow(weights[1], 0.05)):
            if i == 16:
                server.kill()
            yield item

    with pytest.raises(PartialRefitError) as caught:
        bus.send(source(), version=1, timeout=60)
    assert "DEAD" in str(caught.value.outcomes)
    receiver.close()
    server.start()
    successor = Receiver(bus.address, server.url, adapter_options={"hold_traffic": True})
    try:
        bus.send(weights[1], version=2, timeout=120)
        assert measure(server) == new
    finally:
        successor.close()
