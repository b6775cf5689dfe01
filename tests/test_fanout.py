"""Any number of senders to any number of ranks, over every backend: values on each rank, groups, chains, skew."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

import weightbus
from tests.bus_peers import filled
from tests.fan_peers import shard
from tests.harness import Receiving, poisoned, same, sender, wait_until, weights
from weightbus import TensorSpec, WeightBus
from weightbus.backend import GroupSpec
from weightbus.loopback import LoopbackEndpoint
from weightbus.registry import known, load_backend
from weightbus.testing.adapters import RecordingAdapter
from weightbus.testing.peers import Peer

SIZES = (1, 2, 3, 4)
# each backend meets each S, each R and both kinds of lanes; loopback meets all of them together
PAIRWISE = {
    "local": [(1, 2, "broadcast"), (2, 3, "paired"), (3, 4, "broadcast"), (4, 1, "paired")],
    "nixl": [(1, 3, "paired"), (2, 2, "broadcast"), (3, 1, "broadcast"), (4, 4, "paired")],
    "ucx": [(1, 4, "broadcast"), (2, 1, "paired"), (3, 3, "paired"), (4, 2, "broadcast")],
    "nccl": [(1, 1, "broadcast"), (2, 4, "paired"), (3, 2, "broadcast"), (4, 3, "paired")],
}
CASES = [("loopback", s, r, lanes) for lanes in ("paired", "broadcast") for s in SIZES for r in SIZES]
CASES += [(name, *case) for name, cases in PAIRWISE.items() for case in cases]
GROUPED = {"backend": "loopback", "backend_options": {"multicast": True}}


def usable(name: str) -> str:
    """The backend, or a skip that says why."""
    if name.partition(":")[0] in PAIRWISE:
        if name not in known("weightbus.backends"):
            pytest.skip(f"backend {name} is not installed")
        probe = load_backend(name, {}).probe()
        if not probe.ok:
            pytest.skip(f"backend {name} cannot run here: {probe.reason}")
    return name


def together(calls: Sequence[Callable[[], Any]], timeout_s: float = 60) -> list[Any]:
    """Run calls at once, as trainer ranks do; results or exceptions."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as exc:
            results[i] = exc

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for t in threads:
        t.start()
    end = time.monotonic() + timeout_s
    for t in threads:
        t.join(max(0.0, end - time.monotonic()))
        assert not t.is_alive(), "a send hangs"
    return results


@contextmanager
def trainers(count: int, **options: Any) -> Iterator[list[WeightBus]]:
    """All sender ranks of one job in this process."""
    with ExitStack() as stack:
        first = stack.enter_context(sender(senders=count, **options))
        mine = {k: v for k, v in options.items() if k in ("backend", "backend_options", "bucket_bytes")}
        settings = {"backend": "loopback", "bucket_bytes": 4096, "poison": True, **mine}
        buses = [first]
        for rank in range(1, count):
            bus = WeightBus.sender(address=first.address, rank=rank, senders=count, **settings)
            buses.append(stack.enter_context(bus))
        yield buses


def send_all(buses: Sequence[WeightBus], shards: Sequence[Any], version: int, timeout: float = 40) -> list[Any]:
    calls = [lambda b=b, s=s: b.send(s, version=version, timeout=timeout) for b, s in zip(buses, shards, strict=True)]
    return together(calls)


def good(results: Sequence[Any]) -> None:
    for result in results:
        assert isinstance(result, weightbus.RefitReport), result


# ---- the matrix


@pytest.mark.parametrize(("backend", "senders", "ranks", "lanes"), CASES)
def test_every_rank_gets_the_stream_of_its_own_sender(backend: str, senders: int, ranks: int, lanes: str) -> None:
    usable(backend)
    grouped = load_backend(backend, {}).capabilities.multicast
    fake = RecordingAdapter(tensors=poisoned(weights(0)))
    with trainers(senders, receivers=ranks, lanes=lanes, backend=backend) as buses:
        with Receiving(buses[0].address, adapter=fake, ranks=ranks, backend=backend, poison=True) as rx:
            for version in (1, 2):
                shards = [weights(10 * version + k) for k in range(senders)]
                results = send_all(buses, shards, version)
                good(results)
                for rank in range(ranks):
                    source = 0 if grouped or lanes == "broadcast" else rank % senders
                    assert same(rx.engine.weights[rank], shards[source]), f"rank {rank}"
                fed = 1 if grouped or lanes == "broadcast" else min(senders, ranks)
                assert sum(r.bytes > 0 for r in results) == fed, "those without a lane only drain"


# ---- collective groups


class Groups:
    """Counts the groups that senders of this process make."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, ...]] = []
        inner = LoopbackEndpoint.connect_group

        def counting(endpoint: LoopbackEndpoint, group: GroupSpec, *args: Any) -> Any:
            if group.rank == 0:
                self.made.append(group.members)
            return inner(endpoint, group, *args)

        monkeypatch.setattr(LoopbackEndpoint, "connect_group", counting)


def fake(like: dict[str, torch.Tensor] | None = None, **options: Any) -> RecordingAdapter:
    return RecordingAdapter(tensors=poisoned(like or weights(0)), **options)


def engine(bus: WeightBus, name: str, adapter: RecordingAdapter, **options: Any) -> Receiving:
    rx = Receiving(bus.address, name, adapter=adapter, poison=True, **options)
    wait_until(lambda: bus.engines().get(name, "").startswith("READY"))
    return rx


def test_joining_and_leaving_cost_one_regroup_each(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch)
    one, two = ("sender/0", "sender/0->e0/0"), ("sender/0", "sender/0->e0/0", "sender/0->e1/0")
    with sender(receivers=1, **GROUPED) as bus, engine(bus, "e0", fake(), **GROUPED) as e0:
        for version in (1, 2):
            bus.send(weights(version), version=version, timeout=20)
            assert same(e0.engine.weights[0], weights(version))
        assert groups.made == [one]
        with engine(bus, "e1", fake(), **GROUPED) as e1:
            for version in (3, 4):
                bus.send(weights(version), version=version, timeout=20)
                for rx in (e0, e1):
                    assert same(rx.engine.weights[0], weights(version))
            assert groups.made == [one, two]
        wait_until(lambda: not bus.engines()["e1"].startswith("READY"))
        for version in (5, 6):
            bus.send(weights(version), version=version, timeout=20)
            assert same(e0.engine.weights[0], weights(version))
        assert groups.made == [one, two, one]


@pytest.mark.parametrize("backend", ["loopback", "nccl"])
def test_a_member_that_fails_breaks_the_group_by_name_and_the_next_refit_heals_all(backend: str) -> None:
    usable(backend)
    options = GROUPED if backend == "loopback" else {"backend": backend}
    with sender(receivers=3, **options) as bus:
        bad = fake(fail_at="load:8")
        with (
            engine(bus, "a", fake(), **options) as a,
            engine(bus, "b", bad, **options),
            engine(bus, "c", fake(), **options) as c,
        ):
            bus.send(weights(1), version=1, timeout=20)
            began = time.monotonic()
            with pytest.raises(weightbus.PartialRefitError, match="fails in load") as raised:
                bus.send(weights(2), version=2, timeout=20)
            assert time.monotonic() - began < 15
            assert raised.value.outcomes == {"a": "DIRTY", "b": "DIRTY", "c": "DIRTY"}
            for rx in (a, c):
                assert "b/0 left the group" in str(rx.last(2)), rx.results
                assert not rx.engine.serving
            assert set(bus.send(weights(3), version=3, timeout=20).outcomes.values()) == {"READY(3)"}
            for each in (a.engine, bad.engine, c.engine):
                assert same(each.weights[0], weights(3))


class Held:
    """A source that stops before item `at` until it is let go: what was sent before it has arrived by then."""

    def __init__(self, values: dict[str, torch.Tensor], at: int) -> None:
        self.manifest = [TensorSpec.of(name, t) for name, t in values.items()]
        self._values, self._at = values, at
        self.reached, self.go = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, item in enumerate(self._values.items()):
            if i == self._at:
                self.reached.set()
                assert self.go.wait(60)
            yield item


def holding(bus: WeightBus, source: Held, version: int, timeout: float = 30) -> tuple[threading.Thread, list[Any]]:
    """A send under way on a thread, with its source held."""
    result: list[Any] = []
    call = lambda: bus.send(iter(source), manifest=source.manifest, version=version, timeout=timeout)
    thread = threading.Thread(target=lambda: result.extend(together([call])), daemon=True)
    thread.start()
    assert source.reached.wait(30)
    return thread, result


def without_the_dead(outcomes: dict[str, str], name: str) -> dict[str, str]:
    """The outcomes of the others. Whether a death is proved before the refit ends depends on the load of the host."""
    assert outcomes[name] in ("DEAD", "UNKNOWN")
    return {k: v for k, v in outcomes.items() if k != name}


def test_a_killed_member_of_a_group_fails_all_by_name_and_those_alive_regroup() -> None:
    usable("nccl")
    with sender(receivers=2, backend="nccl", bucket_bytes=64_000) as bus:
        adapters = [RecordingAdapter(tensors=filled(-1)) for _ in range(2)]
        with engine(bus, "a", adapters[0], backend="nccl") as a, engine(bus, "c", adapters[1], backend="nccl") as c:
            with Peer("tests/bus_peers.py:engine", (bus.address, "b", "nccl", None), method="forkserver") as peer:
                assert peer.recv(60) == "up"
                wait_until(lambda: bus.engines().get("b", "").startswith("READY"), 20)
                bus.send(filled(1), version=1, timeout=20)
                source = Held(filled(2), 6)
                thread, result = holding(bus, source, 2)
                began = time.monotonic()
                peer.kill()
                wait_until(lambda: not bus.engines()["b"].startswith("READY"), 20)
                source.go.set()
                thread.join(30)
                assert time.monotonic() - began < 25
            assert isinstance(result[0], weightbus.PartialRefitError), result
            assert without_the_dead(result[0].outcomes, "b") == {"a": "DIRTY", "c": "DIRTY"}
            for rx in (a, c):
                assert isinstance(rx.last(2), weightbus.PeerLost), rx.results
            again = bus.send(filled(3), version=3, timeout=20).outcomes
            assert without_the_dead(again, "b") == {"a": "READY(3)", "c": "READY(3)"}
            for adapter in adapters:
                assert same(adapter.engine.weights[0], filled(3))


# ---- chains


@pytest.mark.parametrize("stage", [None, "host"])
@pytest.mark.parametrize(
    ("backend", "senders", "ranks"), [("loopback", 1, 4), ("loopback", 2, 5), ("nixl", 1, 3), ("ucx", 1, 3)]
)
def test_a_chain_brings_every_rank_the_stream_of_its_own_sender(
    backend: str, senders: int, ranks: int, stage: str | None
) -> None:
    usable(backend)
    adapter = fake()
    with trainers(senders, receivers=ranks, backend=backend, fanout="chain") as buses:
        with Receiving(buses[0].address, adapter=adapter, ranks=ranks, backend=backend, poison=True, stage=stage) as rx:
            for version in (1, 2):
                shards = [weights(10 * version + k) for k in range(senders)]
                good(send_all(buses, shards, version))
                for rank in range(ranks):
                    assert same(rx.engine.weights[rank], shards[rank % senders]), f"rank {rank}"


class Connections:
    """Counts posts per writer: who really sends to whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pairs: list[tuple[str, str]] = []
        inner = LoopbackEndpoint.connect

        def noting(endpoint: LoopbackEndpoint, address: bytes, *args: Any) -> Any:
            channel = inner(endpoint, address, *args)
            self.pairs.append((endpoint.spec.name, channel._receivers[0].name))
            return channel

        monkeypatch.setattr(LoopbackEndpoint, "connect", noting)


def test_a_chain_is_planned_from_those_alive_and_planned_again_without_one_that_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = Connections(monkeypatch)
    options = {"backend": "loopback"}
    with sender(receivers=3, fanout="chain") as bus, engine(bus, "a", fake(), **options) as a:
        with engine(bus, "b", fake(), **options), engine(bus, "c", fake(), **options) as c:
            for version in (1, 2):
                bus.send(weights(version), version=version, timeout=20)
            assert sorted(links.pairs) == [("a/0", "b/0"), ("b/0", "c/0"), ("sender/0", "a/0")]
            assert same(c.engine.weights[0], weights(2))
            links.pairs.clear()
            with engine(bus, "d", fake(), **options) as d:
                bus.send(weights(3), version=3, timeout=20)
                assert links.pairs == [("c/0", "d/0")]
                assert same(d.engine.weights[0], weights(3))
        wait_until(lambda: not any(bus.engines()[x].startswith("READY") for x in "bcd"))
        links.pairs.clear()
        assert bus.send(weights(4), version=4, timeout=20).outcomes["a"] == "READY(4)"
        assert links.pairs == []
        assert same(a.engine.weights[0], weights(4))


@pytest.mark.parametrize(("where", "outcomes"), [("a", "DDD"), ("b", "RDD"), ("c", "RRD")])
def test_who_fails_in_a_chain_takes_only_those_behind_along(where: str, outcomes: str) -> None:
    words = {"D": "DIRTY", "R": "READY(2)"}
    adapters = {name: fake(fail_at="load:8" if name == where else "") for name in "abc"}
    with sender(receivers=3, fanout="chain") as bus, ExitStack() as stack:
        rxs = {n: stack.enter_context(engine(bus, n, adapters[n], backend="loopback")) for n in "abc"}
        bus.send(weights(1), version=1, timeout=20)
        with pytest.raises(weightbus.PartialRefitError, match="fails in load") as raised:
            bus.send(weights(2), version=2, timeout=20)
        assert raised.value.outcomes == {n: words[w] for n, w in zip("abc", outcomes, strict=True)}
        for name in "abc"["abc".index(where) + 1 :]:
            assert "left the chain" in str(rxs[name].last(2)), rxs[name].results
        for name, word in zip("abc", outcomes, strict=True):
            if word == "R":
                assert same(adapters[name].engine.weights[0], weights(2))
        again = bus.send(weights(3), version=3, timeout=20)
        assert set(again.outcomes.values()) == {"READY(3)"}
        for adapter in adapters.values():
            assert same(adapter.engine.weights[0], weights(3))


def test_a_receiver_passes_on_without_waiting_for_its_loader() -> None:
    """The first loader stands in its first load: the last receiver gets all that the slots of the first can take."""
    values = {f"w{i}": torch.full((1000,), float(i)) for i in range(6)}
    slow, last = RecordingAdapter(tensors=poisoned(values)), RecordingAdapter(tensors=poisoned(values))
    hold, seen = threading.Event(), []
    inner = slow.strike

    def strike(step: str, call: str) -> None:
        if step == "load":
            seen.append(len([c for c in last.engine.calls if c.startswith("load")]))
            assert hold.wait(30)
        inner(step, call)

    slow.strike = strike  # type: ignore[method-assign]
    with sender(receivers=2, fanout="chain", slots=2, stall_timeout=20) as bus:
        with engine(bus, "slow", slow, backend="loopback"), engine(bus, "last", last, backend="loopback"):
            handle = bus.isend(values, version=1, timeout=40)
            loads = lambda: [c for c in last.engine.calls if c.startswith("load")]
            wait_until(lambda: loads() == ["load w0", "load w1"])
            time.sleep(0.2)
            assert loads() == ["load w0", "load w1"], "the slot of a bucket that is not loaded must not be filled again"
            hold.set()
            assert handle.wait(30).outcomes == {"slow": "READY(1)", "last": "READY(1)"}
            for adapter in (slow, last):
                assert same(adapter.engine.weights[0], values)


def test_a_slot_is_not_free_before_its_bucket_was_passed_on() -> None:
    """The last loader stands still: the first one, which has loaded everything it got, is held back by it."""
    values = {f"w{i}": torch.full((1000,), float(i)) for i in range(8)}
    first, last = RecordingAdapter(tensors=poisoned(values)), RecordingAdapter(tensors=poisoned(values))
    hold = threading.Event()
    inner = last.strike

    def strike(step: str, call: str) -> None:
        assert step != "load" or hold.wait(30)
        inner(step, call)

    last.strike = strike  # type: ignore[method-assign]
    with sender(receivers=2, fanout="chain", slots=2, stall_timeout=20) as bus:
        with engine(bus, "first", first, backend="loopback"), engine(bus, "last", last, backend="loopback"):
            handle = bus.isend(values, version=1, timeout=40)
            loads = lambda: [c for c in first.engine.calls if c.startswith("load")]
            wait_until(lambda: len(loads()) == 4)
            time.sleep(0.2)
            assert loads() == ["load w0", "load w1", "load w2", "load w3"], "two slots at the last, two at the first"
            hold.set()
            handle.wait(30)
            for adapter in (first, last):
                assert same(adapter.engine.weights[0], values)


def test_a_paged_stream_goes_through_a_chain() -> None:
    with sender(receivers=2, fanout="chain") as bus:
        with engine(bus, "a", fake(), backend="loopback", stage="host") as a:
            with engine(bus, "b", fake(), backend="loopback", allow_paged_in_place=True) as b:
                bus.send(iter(weights(5).items()), version=1, timeout=20)
                assert same(a.engine.weights[0], weights(5))
                assert same(b.engine.weights[0], weights(5))


@pytest.mark.parametrize("options", [{"backend": "local"}, {"backend": "nccl"}, {**GROUPED}])
def test_a_backend_that_cannot_forward_refuses_a_chain(options: dict[str, Any]) -> None:
    with pytest.raises(weightbus.ConfigError, match="cannot pass buckets on"):
        sender(fanout="chain", **options)


def test_a_chain_in_direct_mode_or_of_another_name_is_refused() -> None:
    with pytest.raises(weightbus.ConfigError, match="no buckets to pass on"):
        sender(fanout="chain", direct=True)
    with pytest.raises(weightbus.ConfigError, match="fanout is 'ring'"):
        sender(fanout="ring")


@pytest.mark.parametrize("backend", ["nixl", "ucx"])
def test_a_killed_link_of_a_chain_fails_those_behind_and_the_next_refit_goes_round_it(backend: str) -> None:
    usable(backend)
    with sender(receivers=2, backend=backend, bucket_bytes=64_000, fanout="chain") as bus:
        adapters = [RecordingAdapter(tensors=filled(-1)) for _ in range(2)]
        with engine(bus, "a", adapters[0], backend=backend):
            with Peer("tests/bus_peers.py:engine", (bus.address, "b", backend, None), method="forkserver") as peer:
                assert peer.recv(60) == "up"
                wait_until(lambda: bus.engines().get("b", "").startswith("READY"), 20)
                with engine(bus, "c", adapters[1], backend=backend) as c:
                    bus.send(filled(1), version=1, timeout=20)
                    for adapter in adapters:
                        assert same(adapter.engine.weights[0], filled(1))
                    source = Held(filled(2), 6)
                    thread, result = holding(bus, source, 2)
                    wait_until(lambda: any(c.startswith("load") for c in adapters[1].engine.calls[-2:]))
                    peer.kill()
                    wait_until(lambda: not bus.engines()["b"].startswith("READY"), 20)
                    source.go.set()
                    thread.join(30)
                    assert isinstance(result[0], weightbus.PartialRefitError), result
                    assert without_the_dead(result[0].outcomes, "b") == {"a": "READY(2)", "c": "DIRTY"}
                    assert same(adapters[0].engine.weights[0], filled(2))
                    assert isinstance(c.last(2), weightbus.WeightBusError)
                    again = bus.send(filled(3), version=3, timeout=20).outcomes
                    assert without_the_dead(again, "b") == {"a": "READY(3)", "c": "READY(3)"}
                    for adapter in adapters:
                        assert same(adapter.engine.weights[0], filled(3))


# ---- senders that wait for each other


class PerRank(RecordingAdapter):
    """Ranks of unequal shapes."""

    def __init__(self, shards: Sequence[dict[str, torch.Tensor]], **options: Any) -> None:
        super().__init__(tensors=poisoned(shards[0]), **options)
        for rank, each in enumerate(shards):
            self.engine.weights[rank] = poisoned(each)


class Counted:
    """A source that says how far it was read, and stops before `at` until `go` is set."""

    def __init__(self, values: dict[str, torch.Tensor], at: int = -1) -> None:
        self.values, self.at, self.read = values, at, 0
        self.go = threading.Event()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for item in self.values.items():
            if self.read == self.at:
                assert self.go.wait(60)
            self.read += 1
            yield item


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sender_that_stands_in_its_source_holds_the_others_back(ranks: int) -> None:
    """Each tensor fills a bucket. Sender 1 feeds rank 1 of the same engine, or has no lane at all and only drains."""
    count, at, slots = 40, 5, 2
    shards = [weights(k, count) for k in range(2)]
    with trainers(2, receivers=ranks, slots=slots, stall_timeout=20) as buses:
        adapter = PerRank(shards[:ranks])
        with Receiving(buses[0].address, adapter=adapter, ranks=ranks, backend="loopback", poison=True) as rx:
            sources = [Counted(shards[0], at), Counted(shards[1])]
            manifests = [[TensorSpec.of(*item) for item in s.items()] for s in shards]
            calls = [
                lambda k=k: buses[k].send(iter(sources[k]), manifest=manifests[k], version=1, timeout=40)
                for k in (0, 1)
            ]
            results: list[Any] = []
            thread = threading.Thread(target=lambda: results.extend(together(calls)), daemon=True)
            thread.start()
            wait_until(lambda: sources[0].read == at and sources[1].read > at)
            time.sleep(0.5)
            assert sources[1].read <= at + 3 * slots + 2, "it ran ahead"
            sources[0].go.set()
            thread.join(60)
            good(results)
            assert [s.read for s in sources] == [count, count]
            for rank in range(ranks):
                assert same(rx.engine.weights[rank], shards[rank])


def coupled(shards: Sequence[dict[str, torch.Tensor]]) -> list[Iterator[tuple[str, torch.Tensor]]]:
    """Sources whose every tensor is a collective: none goes on before all have asked for the same one."""
    barrier = threading.Barrier(len(shards))

    def source(values: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for item in values.items():
            barrier.wait(60)
            yield item

    return [source(values) for values in shards]


def untouched(rx: Receiving) -> None:
    """No name had come on both ranks, so nothing was loaded: the engine serves what it held."""
    rx.last(1)
    assert rx.engine.calls[1:] == ["abort undo resume"]
    assert rx.engine.serving
    assert all(t.isnan().all() for w in rx.engine.weights.values() for t in w.values())


@pytest.mark.parametrize("fanout", ["star", "chain"])
def test_coupled_senders_with_lanes_of_10_to_1_do_not_deadlock_when_planned(fanout: str) -> None:
    shards = [shard(rank, 10, 40) for rank in range(2)]
    manifests = [[TensorSpec.of(*item) for item in s.items()] for s in shards]
    with trainers(2, receivers=2, slots=1, fanout=fanout) as buses:
        with Receiving(buses[0].address, adapter=PerRank(shards), ranks=2, backend="loopback", poison=True) as rx:
            for version in (1, 2):
                sources = coupled(shards)
                calls = [
                    lambda k=k: buses[k].send(sources[k], manifest=manifests[k], version=version, timeout=30)
                    for k in range(2)
                ]
                good(together(calls))
                for rank in range(2):
                    assert same(rx.engine.weights[rank], shards[rank])


def test_coupled_senders_of_engines_of_10_to_1_speed_do_not_deadlock() -> None:
    """One engine loads ten times slower; each has its own sender."""
    shards = [weights(k, 20) for k in range(2)]
    manifests = [[TensorSpec.of(*item) for item in s.items()] for s in shards]
    with trainers(2, receivers=2, slots=1) as buses:
        adapters = [fake(shards[0]), fake(shards[1])]
        inner = adapters[1].strike

        def slowly(step: str, call: str) -> None:
            time.sleep(0.02 if step == "load" else 0)
            inner(step, call)

        adapters[1].strike = slowly  # type: ignore[method-assign]
        with (
            engine(buses[0], "fast", adapters[0], backend="loopback"),
            engine(buses[0], "slow", adapters[1], backend="loopback"),
        ):
            sources = coupled(shards)
            calls = [
                lambda k=k: buses[k].send(sources[k], manifest=manifests[k], version=1, timeout=30) for k in (0, 1)
            ]
            good(together(calls))
            for k in range(2):
                assert same(adapters[k].engine.weights[0], shards[k])


def test_coupled_senders_with_lanes_of_10_to_1_fail_by_name_when_paged() -> None:
    """Sender 0 needs a credit that only comes with a bucket of sender 1, which waits for sender 0's next tensor."""
    shards = [shard(rank, 10, 40) for rank in range(2)]
    with trainers(2, receivers=2, bucket_bytes=20_480) as buses:
        options = {"ranks": 2, "backend": "loopback", "allow_paged_in_place": True}
        with Receiving(buses[0].address, adapter=PerRank(shards), **options) as rx:
            began = time.monotonic()
            sources = coupled(shards)
            results = together([lambda k=k: buses[k].send(sources[k], version=1, timeout=20) for k in range(2)])
            assert time.monotonic() - began < 20
            for result in results:
                assert isinstance(result, weightbus.PartialRefitError), results
                assert "made no progress for" in str(result)
                assert "sender/0->e0/0" in str(result)
            untouched(rx)


@pytest.mark.parametrize("planned", [True, False])
def test_senders_coupled_by_real_collectives(planned: bool, tmp_path: Any) -> None:
    target, store, count = "tests/fan_peers.py:coupled_trainer", str(tmp_path / "store"), 40
    shards = [shard(rank, 10, count) for rank in range(2)]
    with ExitStack() as stack:
        start = lambda *args: stack.enter_context(Peer(target, args, method="forkserver"))
        bind = {"bind": "tcp://127.0.0.1:0", "receivers": 2}
        first = start(0, store, bind, 10, count, planned)
        address = first.recv(60)
        second = start(1, store, {"address": address}, 10, count, planned)
        assert second.recv(60) == address
        options = {"ranks": 2, "backend": "local", "allow_paged_in_place": True}
        rx = stack.enter_context(Receiving(address, adapter=PerRank(shards), **options))
        began = time.monotonic()
        for peer in (first, second):
            peer.send("go")
        answers = [peer.recv(60) for peer in (first, second)]
        assert time.monotonic() - began < 30
        if planned:
            assert answers == [("ok", {"e0": "READY(1)"})] * 2
            for rank in range(2):
                assert same(rx.engine.weights[rank], shards[rank])
        else:
            for kind, text in answers:
                assert kind == "PartialRefitError"
                assert "made no progress for" in text
            untouched(rx)
        for peer in (first, second):
            peer.send("end")
            peer.result(60)


# ---- engines of all kinds in one refit


class Model(torch.nn.Module):
    """`filled` as a Module, poisoned."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, tensor in filled(0).items():
            self.register_parameter(name, torch.nn.Parameter(torch.full_like(tensor, float("nan"), dtype=dtype)))


@pytest.mark.parametrize("backend", ["local", "nixl", "ucx"])
def test_engines_of_all_kinds_in_one_refit_and_one_that_dies(backend: str) -> None:
    """torch with one rank in another dtype, torch with two ranks, other names, and one in a process that is killed."""
    usable(backend)
    single, pair = Model(torch.bfloat16), [Model(), Model()]
    renamed = RecordingAdapter(tensors={f"model.{k}": torch.full_like(t, -1) for k, t in filled(0).items()})

    def current(version: int) -> None:
        for module, dtype in ((single, torch.bfloat16), (pair[0], torch.float32), (pair[1], torch.float32)):
            for name, p in module.named_parameters():
                assert torch.equal(p.data, filled(version)[name].to(dtype)), name
        assert same(renamed.engine.weights[0], {f"model.{k}": t for k, t in filled(version).items()})

    with sender(receivers=4, backend=backend, bucket_bytes=64_000) as bus, ExitStack() as stack:

        def torch_engine(name: str, module: Model, **options: Any) -> None:
            made = {"module": module, "cast": module is single}
            rx = Receiving(bus.address, name, adapter="torch", adapter_options=made, backend=backend, **options)
            stack.enter_context(rx)

        torch_engine("single", single)
        for rank in range(2):
            torch_engine("pair", pair[rank], rank=rank, ranks=2)
        names = {r"(w\d+)": r"model.\1"}
        stack.enter_context(Receiving(bus.address, "renamed", adapter=renamed, backend=backend, names=names))
        peer = stack.enter_context(
            Peer("tests/bus_peers.py:engine", (bus.address, "dies", backend, None), method="forkserver")
        )
        assert peer.recv(60) == "up"
        wait_until(lambda: bus.engines().get("dies", "").startswith("READY"), 20)
        alive = ("single", "pair", "renamed")
        bus.send(filled(1), version=1, timeout=30)
        assert bus.engines() == {**dict.fromkeys(alive, "READY(1)"), "dies": "READY(1)"}
        current(1)
        source = Held(filled(2), 6)
        thread, result = holding(bus, source, 2)
        peer.kill()
        source.go.set()
        thread.join(40)
        assert isinstance(result[0], weightbus.PartialRefitError), result
        assert without_the_dead(result[0].outcomes, "dies") == dict.fromkeys(alive, "READY(2)")
        current(2)


# ---- many at once


def one_job(number: int, backend: str, start: threading.Barrier) -> None:
    """A bus of its own: made, used and closed beside the others."""
    values = [weights(1000 * number + version) for version in range(3)]
    options = {"backend": backend}
    start.wait(60)
    with sender(receivers=1, run_id=f"job{number}", **options) as bus:
        adapter = fake()
        with Receiving(bus.address, adapter=adapter, poison=True, **options):
            for version in range(3):
                report = bus.send(values[version], version=version, timeout=60)
                assert report.outcomes == {"e0": f"READY({version})"}
                assert same(adapter.engine.weights[0], values[version])


def test_eight_jobs_at_once_do_not_meet() -> None:
    names = [usable(name) for name in ("local", "nixl", "ucx", "nccl")] * 2
    start = threading.Barrier(len(names))
    results = together([lambda i=i, n=n: one_job(i, n, start) for i, n in enumerate(names)], 120)
    assert results == [None] * len(names)


@pytest.mark.parametrize("backend", ["local", "nccl"])
def test_two_jobs_of_processes_started_together(backend: str) -> None:
    usable(backend)
    with ExitStack() as stack:
        spawn = lambda what, *args: stack.enter_context(Peer(f"tests/bus_peers.py:{what}", args, method="forkserver"))
        jobs = [spawn("trainer", "tcp://127.0.0.1:0", f"run{k}", backend, 1) for k in range(2)]
        engines = [spawn("engine", job.recv(60), "e0", backend, None) for job in jobs]
        for k, job in enumerate(jobs):
            job.send(10 + k)
        for k, (job, peer) in enumerate(zip(jobs, engines, strict=True)):
            assert job.recv(60) == ("ok", {"e0": f"READY({10 + k})"})
            assert peer.recv(60) == "up"
            assert peer.recv(60) == (f"READY({10 + k})", True, [10.0 + k])


@pytest.mark.parametrize("backend", ["loopback", "nixl", "ucx"])
def test_a_lane_whose_writer_changes_is_made_anew(backend: str) -> None:
    """A link leaves and comes back to its place, then another bus feeds all as a star: nobody writes over old ways."""
    usable(backend)
    options = {"backend": backend}
    with ExitStack() as stack:
        with sender(receivers=3, fanout="chain", **options) as bus:
            address, adapters = bus.address, {name: fake() for name in "abc"}
            first = engine(bus, "a", adapters["a"], **options)
            for name in "bc":
                stack.enter_context(engine(bus, name, adapters[name], **options))
            bus.send(weights(1), version=1, timeout=30)
            first.close()
            wait_until(lambda: not bus.engines()["a"].startswith("READY"))
            bus.send(weights(2), version=2, timeout=30)
            stack.enter_context(engine(bus, "a", adapters["a"], **options))
            bus.send(weights(3), version=3, timeout=30)
            for adapter in adapters.values():
                assert same(adapter.engine.weights[0], weights(3))
        settings = {"receivers": 3, "bucket_bytes": 4096, "stall_timeout": 10.0, **options}
        with WeightBus.sender(address, **settings) as again:
            outcomes = again.send(weights(4), version=1, timeout=30).outcomes
            assert outcomes == dict.fromkeys("abc", "READY(1)")
            for adapter in adapters.values():
                assert same(adapter.engine.weights[0], weights(4))
