"""What a review found: each of these failed before."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

import weightbus
from tests.harness import Receiving, poisoned, receiving, same, sender, wait_until, weights
from weightbus import Manifest, RefitAborted, TensorSpec, WeightBus
from weightbus.loopback import LoopbackEndpoint
from weightbus.testing.adapters import RecordingAdapter

OLD, NEW = weights(0), weights(1)
MANIFEST = Manifest([TensorSpec.of(name, tensor) for name, tensor in OLD.items()])


def test_a_sender_that_came_too_late_is_fed_by_the_next_send() -> None:
    with sender(receivers=1, senders=2) as first:
        fake = RecordingAdapter(tensors=poisoned(OLD))
        with receiving(first, adapter=fake):
            with pytest.raises(weightbus.TransferTimeout, match=r"senders \[1\]"):
                first.send(OLD, version=1, timeout=1)
            with WeightBus.sender(
                address=first.address, rank=1, senders=2, backend="loopback", bucket_bytes=4096
            ) as second:
                other = second.isend(OLD, version=1, timeout=20)
                assert first.send(OLD, version=1, timeout=20).outcomes == {"e0": "READY(1)"}
                other.wait(20)
            assert same(fake.engine.weights[0], OLD)


def test_a_failed_staged_refit_is_told_once() -> None:
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(OLD.items())[:2]
        raise RuntimeError("broken")

    with (
        sender(receivers=1) as bus,
        receiving(bus, adapter=RecordingAdapter(tensors=poisoned(OLD)), stage="host") as rx,
    ):
        for version in range(5):
            with pytest.raises(weightbus.SourceError):
                bus.send(source(), version=version, manifest=MANIFEST, timeout=20)
            wait_until(lambda version=version: len(rx.results) > version)
            time.sleep(0.05)
        assert len(rx.results) == 5


def test_a_rank_that_was_restarted_gets_the_next_refit() -> None:
    with sender(receivers=2) as bus:
        fakes = [RecordingAdapter(tensors=poisoned(OLD)) for _ in range(3)]
        with Receiving(bus.address, "e0", adapter=RecordingAdapter(tensors=OLD), drive=True, ranks=2):
            one = receiving(bus, adapter=fakes[0], rank=0, ranks=2)
            two = receiving(bus, adapter=fakes[1], rank=1, ranks=2)
            assert bus.send(OLD, version=1, timeout=20).outcomes == {"e0": "READY(1)"}
            two.close()
            time.sleep(0.6)
            two = receiving(bus, adapter=fakes[2], rank=1, ranks=2)
            time.sleep(0.3)
            assert bus.send(NEW, version=2, timeout=20).outcomes == {"e0": "READY(2)"}
            assert same(fakes[0].engine.weights[0], NEW)
            assert same(fakes[2].engine.weights[1], NEW)
            one.close()
            two.close()


def test_a_callback_that_raises_does_no_harm() -> None:
    def broken(event: weightbus.Event) -> None:
        raise ValueError("the user's")

    with sender(receivers=1, events=broken) as bus:
        with receiving(bus, adapter=RecordingAdapter(tensors=poisoned(OLD)), events=broken):
            assert bus.send(OLD, version=1, timeout=20).outcomes == {"e0": "READY(1)"}


def test_a_send_that_waits_for_receivers_can_be_cancelled() -> None:
    with sender(receivers=1) as bus:
        handle = bus.isend(OLD, version=1, timeout=60)
        time.sleep(0.3)
        handle.cancel()
        with pytest.raises(RefitAborted, match="cancelled"):
            handle.wait(5)


def test_a_part_is_not_remembered_as_the_whole() -> None:
    with sender(receivers=1) as bus, receiving(bus, adapter=RecordingAdapter(tensors=poisoned(OLD))) as rx:
        bus.send(iter(OLD.items()), version=1, manifest=MANIFEST, timeout=20)
        part = Manifest([TensorSpec.of("layer.1.w", NEW["layer.1.w"])])
        bus.send(iter([("layer.1.w", NEW["layer.1.w"])]), version=2, manifest=part, partial=True, timeout=20)
        bus.send(iter(NEW.items()), version=3, timeout=20)
        assert same(rx.adapter.engine.weights[0], NEW)


def test_memory_of_a_retired_lane_is_let_go() -> None:
    with sender(receivers=1) as bus, receiving(bus, adapter=RecordingAdapter(tensors=poisoned(OLD))) as rx:
        counts = []
        for version in range(4):
            bus.send(OLD, version=version, timeout=20)
            ranks = rx.bus._member.ranks
            counts.append(sum(len(unpacker._views) for unpacker in ranks._unpackers.values()))
            ranks.lanes[0].clean = ranks.lanes[0].drained = False  # as after an abort without DRAINED
        assert counts[-1] == counts[0]


def test_every_sender_drains_when_one_could_not_connect_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = LoopbackEndpoint.connect

    def slow(self: LoopbackEndpoint, address: bytes, lane_key: bytes, timeout: float) -> object:
        if self.spec.name == "sender/1":
            time.sleep(3)
        return connect(self, address, lane_key, timeout)

    monkeypatch.setattr(LoopbackEndpoint, "connect", slow)
    together = threading.Barrier(2)

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in OLD.items():
            together.wait(20)  # a collective per tensor
            yield name, tensor

    def sending(bus: WeightBus) -> None:
        with pytest.raises(weightbus.PartialRefitError):
            bus.send(source(), version=1, manifest=MANIFEST, timeout=1.5)

    with sender(receivers=2, senders=2) as first:
        with WeightBus.sender(
            address=first.address, rank=1, senders=2, backend="loopback", bucket_bytes=4096
        ) as second:
            fakes = [RecordingAdapter(tensors=poisoned(OLD)) for _ in range(2)]
            with receiving(first, "e0", adapter=fakes[0]), receiving(first, "e1", adapter=fakes[1]):
                thread = threading.Thread(target=sending, args=(second,))
                thread.start()
                sending(first)
                thread.join(20)
                assert not thread.is_alive()
                assert not together.broken


def test_a_member_that_said_join_twice_is_still_watched() -> None:
    with sender(receivers=1) as bus, receiving(bus, adapter=RecordingAdapter(tensors=poisoned(OLD))) as rx:
        bus.send(OLD, version=1, timeout=20)
        member = rx.bus._member
        rx.bus._reactor.call(member._on_up)  # what a link does that was cut off for a moment
        time.sleep(0.3)
        assert len(bus._coordinator.hub._links) == 1


def test_an_old_incarnation_of_a_sender_takes_nothing_with_it() -> None:
    with sender(receivers=1, senders=2) as first:
        options = {"address": first.address, "rank": 1, "senders": 2, "backend": "loopback"}
        old = WeightBus.sender(**options)
        wait_until(lambda: 1 in first._coordinator.senders)
        with WeightBus.sender(**options):
            time.sleep(0.3)
            old.close()
            time.sleep(0.5)
            assert 1 in first._coordinator.senders
