"""What a review found: each of these failed before."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch

import weightbus
from tests.harness import FAST, Receiving, poisoned, receiving, same, sender, wait_until, weights
from tests.puppets import Puppet
from weightbus import EngineError, Manifest, RefitAborted, RemoteProtocolError, TensorSpec, WeightBus
from weightbus.backend import Arrival, Region
from weightbus.config import runs
from weightbus.control import messages as m
from weightbus.control.coordinator import Coordinator
from weightbus.control.refit_run import RefitRun
from weightbus.header import Header
from weightbus.inbound import RankSet
from weightbus.lane import InboundConfig, InboundLane, Stage
from weightbus.loopback import LoopbackBackend, LoopbackEndpoint
from weightbus.plan import make_plans
from weightbus.reactor import Reactor, Script, Wait
from weightbus.sender import SenderSide
from weightbus.sources import Source
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
        assert len(bus._coordinator.roster.hub._links) == 1


def test_an_old_incarnation_of_a_sender_takes_nothing_with_it() -> None:
    with sender(receivers=1, senders=2) as first:
        options = {"address": first.address, "rank": 1, "senders": 2, "backend": "loopback"}
        old = WeightBus.sender(**options)
        wait_until(lambda: 1 in first._coordinator.roster.senders)
        with WeightBus.sender(**options):
            time.sleep(0.3)
            old.close()
            time.sleep(0.5)
            assert 1 in first._coordinator.roster.senders


# ---- scripts that raise


def test_a_script_that_raises_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    reactor = Reactor("test")
    seen: list[Any] = []
    go = threading.Event()
    reactor.on_broken = seen.append

    def broken() -> Script:
        yield Wait(lambda: True)
        raise KeyError("lost")

    def asks() -> Script:
        try:
            yield Wait(lambda: bool(1 / 0))
        except ZeroDivisionError as exc:
            seen.append(exc)

    def good() -> Script:
        yield Wait(go.is_set)
        seen.append("good")

    try:
        for script in (broken(), asks(), good()):
            reactor.call(lambda script=script: reactor.start(script))
        wait_until(lambda: len(seen) == 2)
        go.set()
        reactor.wake()
        wait_until(lambda: "good" in seen)
        (error,) = [x for x in seen if isinstance(x, RefitAborted)]
        assert isinstance(error.__cause__, KeyError)
        assert any(isinstance(x, ZeroDivisionError) for x in seen)
        assert "KeyError: 'lost'" in caplog.text
    finally:
        reactor.close()


def breaks(*_: object, **__: object) -> Any:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("stage", "what", "name"),
    [("host", Stage, "put"), (None, InboundLane, "expect"), ("host", RankSet, "_resolve")],
    ids=["staged", "in place", "before the refit"],
)
@pytest.mark.parametrize("beside", [True, False])
def test_a_receiver_whose_script_raises_is_named_and_goes_on(
    beside: bool, stage: str | None, what: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = RecordingAdapter(tensors=poisoned(OLD))
    with sender(receivers=1) as bus:
        driver = None if beside else Receiving(bus.address, "e0", adapter=fake, drive=True, ranks=1)
        with receiving(bus, adapter=fake, stage=stage, rank=None if beside else 0) as rx:
            wait_until(
                lambda: beside or bool(bus._coordinator.roster.engines and bus._coordinator.roster.engines["e0"].driver)
            )
            assert bus.send(OLD, version=1, timeout=20).outcomes == {"e0": "READY(1)"}
            rx.last(1)
            with monkeypatch.context() as patch:
                patch.setattr(what, name, breaks)
                with pytest.raises(weightbus.PartialRefitError, match="RuntimeError: out of memory"):
                    bus.send(NEW, version=2, timeout=20)
                assert "RuntimeError: out of memory" in str(rx.last(2))
            assert bus.send(NEW, version=3, timeout=20).outcomes == {"e0": "READY(3)"}
            assert same(fake.engine.weights[0], NEW)
            assert fake.engine.serving
        if driver is not None:
            driver.close()


def test_a_sender_that_cannot_make_ready_says_why_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with sender(receivers=1) as bus, receiving(bus, adapter=RecordingAdapter(tensors=poisoned(OLD))) as rx:
        with monkeypatch.context() as patch:
            patch.setattr(SenderSide, "_plan_of", breaks)
            with pytest.raises(RefitAborted, match="RuntimeError: out of memory") as raised:
                bus.send(OLD, version=1, timeout=20)
        assert isinstance(raised.value.__cause__, RuntimeError)
        assert bus.send(OLD, version=1, timeout=20).outcomes == {"e0": "READY(1)"}
        assert same(rx.adapter.engine.weights[0], OLD)


def test_a_further_sender_that_cannot_make_ready_ends_the_send_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of = SenderSide._plan_of

    def breaks_on_1(self: SenderSide, message: m.SendPlan) -> Any:
        return breaks() if self.name == "sender/1" else plan_of(self, message)

    with sender(receivers=1, senders=2) as first:
        with WeightBus.sender(address=first.address, rank=1, senders=2, backend="loopback") as second:
            with receiving(first, adapter=RecordingAdapter(tensors=poisoned(OLD))):
                with monkeypatch.context() as patch:
                    patch.setattr(SenderSide, "_plan_of", breaks_on_1)
                    other = second.isend(OLD, version=1, timeout=20)
                    with pytest.raises(weightbus.WeightBusError, match="RuntimeError: out of memory"):
                        first.send(OLD, version=1, timeout=20)
                    with pytest.raises(RefitAborted, match="RuntimeError: out of memory"):
                        other.wait(20)
                other = second.isend(OLD, version=2, timeout=20)
                assert first.send(OLD, version=2, timeout=20).outcomes == {"e0": "READY(2)"}
                other.wait(20)


@pytest.mark.parametrize(("owner", "step"), [(Coordinator, "_plan"), (Coordinator, "_begin"), (RefitRun, "verdict")])
def test_a_coordinator_whose_script_raises_says_why_and_goes_on(
    owner: type, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sender(receivers=1) as bus, receiving(bus, adapter=RecordingAdapter(tensors=poisoned(OLD))) as rx:
        with monkeypatch.context() as patch:
            patch.setattr(owner, step, breaks)
            with pytest.raises(RefitAborted, match="RuntimeError: out of memory") as raised:
                bus.send(OLD, version=1, timeout=20)
        assert isinstance(raised.value.__cause__, RuntimeError)
        assert bus.send(NEW, version=2, timeout=20).outcomes == {"e0": "READY(2)"}
        assert same(rx.adapter.engine.weights[0], NEW)


# ---- the rest


def test_ranks_are_told_at_once_when_their_driver_says_already() -> None:
    """The coordinator has taken OK for granted, and has offered to them."""

    def spoil(message: Any) -> Any:
        if isinstance(message, m.RanksAnswer):  # only now its driver speaks
            return m.DriverAnswer(refit=message.refit, answer="ALREADY")
        return None if isinstance(message, m.DriverAnswer) else message

    with sender(receivers=1) as bus, Puppet(bus.address, spoil=spoil) as puppet:
        wait_until(lambda: "puppet" in bus.engines())
        assert bus.send(OLD, version=1, timeout=20).outcomes == {"puppet": "ALREADY"}
        wait_until(lambda: any(isinstance(x, m.Abort) for x in puppet.heard))


def test_an_engine_known_to_be_dead_is_so_on_the_other_side() -> None:
    error = EngineError("the server is gone", dead=True, peer="e0")
    wire = m.decode(m.encode(m.RankFailed(refit="ab", error=m.WireError.of(error)))).error
    assert wire.to_error().dead
    assert not m.WireError.of(EngineError("it refused")).to_error().dead


def test_a_killed_child_that_nobody_has_waited_for_is_dead() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert runs(child.pid)
        child.kill()
        wait_until(lambda: not runs(child.pid))
    finally:
        child.wait()
    assert not runs(child.pid)


class Landing:
    """A channel on which buckets land; it notes what is released."""

    def __init__(self) -> None:
        self.landed: list[Arrival] = []
        self.released: list[Arrival] = []
        self.error = None

    def arrivals(self) -> list[Arrival]:
        landed, self.landed = self.landed, []
        return landed

    def release(self, arrival: Arrival) -> None:
        self.released.append(arrival)


@pytest.fixture
def lane() -> InboundLane:
    plan = make_plans([MANIFEST], [], 4096)[0]
    lane = InboundLane(0, "e0/0", LoopbackBackend(), torch.device("cpu"), InboundConfig())
    lane.prepare("sender/0->e0/0", "ab" * 16, 4096, 2, "writer")
    lane.plan, lane.channel = plan, Landing()  # type: ignore[assignment]
    return lane


def lands(lane: InboundLane, index: int, **changes: Any) -> Arrival:
    """Bucket `index` has come to `lane`, with `changes` in its header."""
    assert lane.plan is not None
    used = lane.plan.buckets[index].used_bytes
    header = Header(lane_key=lane.key, refit_id=lane.refit, plan_digest=lane.plan.digest, bucket=index, total=6,
                    used_bytes=used, digest=0, verified=False)  # fmt: skip
    region = Region(tensor=torch.zeros(4096, dtype=torch.uint8))
    arrival = Arrival(header=attrs.evolve(header, **changes).pack(), region=region, slot=index % 2, nbytes=used)
    lane.channel.landed.append(arrival)  # type: ignore[union-attr]
    return arrival


@pytest.mark.parametrize("changes", [{"bucket": 3}, {"used_bytes": 7}])
def test_what_a_lane_refuses_is_released_and_so_is_what_came_with_it(
    lane: InboundLane, changes: dict[str, Any]
) -> None:
    good, bad, after = lands(lane, 0), lands(lane, 1, **changes), lands(lane, 1)
    with pytest.raises(RemoteProtocolError):
        lane.poll()
    assert lane.channel.released == [bad, after]  # type: ignore[union-attr]
    assert [x.arrival for x in lane.ready] == [good]


def test_a_header_that_is_none_releases_its_bucket(lane: InboundLane) -> None:
    bad = attrs.evolve(lands(lane, 0), header=b"nonsense")
    lane.channel.landed[:] = [bad]  # type: ignore[union-attr]
    with pytest.raises(RemoteProtocolError):
        lane.poll()
    assert lane.channel.released == [bad]  # type: ignore[union-attr]


def test_a_bucket_of_another_plan_is_refused(lane: InboundLane) -> None:
    lands(lane, 0, plan_digest=7)
    lane.poll()
    with pytest.raises(RemoteProtocolError, match="another plan"):
        lane.expect(lane.ready.popleft())


def test_a_bucket_that_lands_after_the_end_of_its_refit_is_released(lane: InboundLane) -> None:
    first = lands(lane, 0)
    lane.poll()
    lane.forget()
    late = lands(lane, 1)
    lane.poll()
    assert lane.channel.released == [first, late]  # type: ignore[union-attr]
    assert not lane.ready


class Breaking(Source):
    """Yields one tensor, then raises."""

    def __init__(self, inner: Source) -> None:
        super().__init__()
        self.manifest, self.reorderable = inner.manifest, inner.reorderable
        self.drained = 0

    def iterate(self, manifest: Manifest) -> Iterator[torch.Tensor]:
        self.started = True
        yield OLD[manifest.tensors[0].name]
        raise RuntimeError("the gather broke")

    def drain(self) -> None:
        self.drained += 1


def test_a_direct_source_that_raises_is_drained_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightbus import sender as module

    opened: list[Breaking] = []
    open_source = module.open_source

    def opens(*args: Any, **options: Any) -> Source:
        opened.append(Breaking(open_source(*args, **options)))
        return opened[-1]

    target = torch.nn.Linear(3, 2).requires_grad_(False)
    options = {"receivers": 1, "backend": "loopback", "direct": True, **FAST}
    with WeightBus.sender("tcp://127.0.0.1:0", **options) as bus:
        with Receiving(bus.address, "e0", adapter="torch", backend="loopback", adapter_options={"module": target}):
            source = dict(torch.nn.Linear(3, 2).requires_grad_(False).state_dict())
            monkeypatch.setitem(OLD, "weight", source["weight"])
            with monkeypatch.context() as patch:
                patch.setattr(module, "open_source", opens)
                with pytest.raises(weightbus.SourceError, match="RuntimeError: the gather broke") as raised:
                    bus.send(source, version=1, timeout=20)
            assert isinstance(raised.value.__cause__, RuntimeError)
            assert [x.drained for x in opened] == [1]
            assert bus.send(source, version=2, timeout=20).outcomes == {"e0": "READY(2)"}
            assert torch.equal(target.weight, source["weight"])
