"""The conformance suite of backends: one small test per promise of `weightbus.backend`.

A subclass gives one fixture::

    class TestFoo(BackendConformance):
        @pytest.fixture
        def backend(self) -> str:
            return "foo"        # a registered name, "module:Class", or a Backend made without options

A promise that belongs to a capability the backend does not declare is skipped, with the reason.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import pytest
import torch

from weightbus.backend import (
    LANE_KEY_BYTES,
    MAX_ADDRESS_BYTES,
    MAX_HEADER_BYTES,
    Backend,
    Capabilities,
    Endpoint,
    EndpointSpec,
    Probe,
)
from weightbus.errors import (
    ConfigError,
    ConnectError,
    EndpointClosed,
    PeerLost,
    TransferTimeout,
    TransportError,
    WeightBusError,
)
from weightbus.registry import load_backend
from weightbus.testing.peers import target_of
from weightbus.testing.sides import POISON, Host, Landed, Side, make_backend

KEY = bytes(range(LANE_KEY_BYTES))
WRONG_KEY = bytes(reversed(KEY))
CAPACITY = 8192
WAIT_S = 30.0
SLACK_S = 8.0
CPU = ("cpu", "cpu")
DEVICES = [
    pytest.param(CPU, id="cpu"),
    *(
        pytest.param((source, target), id=f"{source}-{target}", marks=pytest.mark.gpu)
        for source, target in (("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda"))
        if torch.cuda.is_available()
    ),
]
PLACES = ["in_process", "processes"]
_WORLDS = pytest.StashKey[dict[str, "World"]]()


def pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that differ for every seed and position."""
    return random.Random(seed).randbytes(nbytes)


def until(condition: Callable[[], Any], *sides: Side, what: str, timeout_s: float = WAIT_S) -> Any:
    """Pump `sides` until `condition` is true; what it said."""
    end = time.monotonic() + timeout_s
    while True:
        for side in sides:
            side.pump()
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(0.0002)


@attrs.define
class Lane:
    """A sender joined to receivers, as core would join them."""

    capabilities: Capabilities
    sender: Side
    receivers: list[Side]
    buckets: list[int]
    slots: list[list[int]]
    tx: int
    rx: list[int]

    @property
    def receiver(self) -> Side:
        return self.receivers[0]

    @property
    def sides(self) -> list[Side]:
        return [self.sender, *self.receivers]

    def post(self, bucket: int, nbytes: int, header: bytes = b"h") -> int:
        """Post bucket number `bucket` into the slot of the same number."""
        if not self.capabilities.header_with_bytes:
            for side, channel in zip(self.receivers, self.rx, strict=True):
                side.post_recv(channel, bucket, nbytes, header)
        return self.sender.post(self.tx, self.buckets[bucket], nbytes, header, bucket)

    def finish(self, work: int) -> None:
        """Progress until `work` is DONE."""
        until(lambda: self.sender.state(work) != "pending", *self.sides, what="the post ends")
        assert self.sender.state(work) == "done", self.sender.work_error(work)

    def take(self, count: int, receiver: int = 0) -> list[Landed]:
        """Progress until `count` buckets have arrived at one receiver."""
        landed: list[Landed] = []

        def enough() -> bool:
            landed.extend(self.receivers[receiver].landed())
            return len(landed) >= count

        until(enough, *self.sides, what=f"{count} buckets arrive, {len(landed)} did")
        assert len(landed) == count
        return landed

    def send(self, bucket: int, data: bytes, header: bytes = b"h") -> Landed:
        """Move `data` through one bucket, to the end, and release it."""
        self.sender.write(self.buckets[bucket], data)
        work = self.post(bucket, len(data), header)
        landed = self.take(1)[0]
        self.receiver.release()
        self.finish(work)
        return landed


class World:
    """Makes sides, here or in peer processes, and ends what it made."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.options = name, dict(options)
        self._hosts: dict[str, Host] = {}
        self._here: list[Side] = []
        self._groups = itertools.count()

    def host(self, name: str) -> Host:
        """The peer process `name`; a new one if that was killed."""
        if name not in self._hosts or not self._hosts[name].peer.alive:
            if name in self._hosts:
                self._hosts[name].peer.close()
            self._hosts[name] = Host()
        return self._hosts[name]

    def side(self, where: str | None, role: str, device: str = "cpu") -> Side:
        """A new endpoint in the peer process `where`, or in this one if None."""
        spec = {"name": f"{role}/{where or 'here'}", "role": role, "device": device, "host": "127.0.0.1"}
        if where is not None:
            return self.host(where).side(self.name, self.options, spec)
        self._here.append(Side(self.name, self.options, spec))
        return self._here[-1]

    def sweep(self) -> None:
        """Close all endpoints of one test; the peer processes stay for the next."""
        for side in self._here:
            side.close()
        self._here.clear()
        for host in self._hosts.values():
            if host.peer.alive:
                host.forget()

    def end(self) -> None:
        """End the peer processes, each by itself: a backend must let its process exit with code 0."""
        self.sweep()
        for host in self._hosts.values():
            host.end()

    def join(
        self,
        sender: Side,
        receivers: Sequence[Side],
        *,
        capabilities: Capabilities,
        slots: int = 2,
        nbytes: int = CAPACITY,
        adopt: bool = False,
    ) -> Lane:
        """Allocate, listen and connect, in the order in which core does it."""
        buckets = sender.allocate(slots, nbytes)
        theirs: list[list[int]] = []
        for side in receivers:
            count = 0 if capabilities.shares_memory else slots
            theirs.append(side.adopt(count, nbytes) if adopt else side.allocate(count, nbytes))
        if capabilities.multicast:
            tx, *rx = self.connect_group(sender, receivers, theirs)
        else:
            address = receivers[0].listen(KEY, theirs[0])
            tx, rx = self.connect(sender, receivers[0], address), [0]
        return Lane(capabilities, sender, list(receivers), buckets, theirs, tx, rx)

    @staticmethod
    def connect(sender: Side, receiver: Side, address: bytes, key: bytes = KEY, timeout_s: float = WAIT_S) -> int:
        """Connect while the receiver goes on with its life; the channel's number."""
        attempt = sender.begin_connect(address, key, timeout_s)
        done = until(lambda: sender.connected(attempt), receiver, what="connect ends", timeout_s=timeout_s + SLACK_S)
        return int(done[1])

    def connect_group(
        self, sender: Side, receivers: Sequence[Side], slots: Sequence[Sequence[int]], keys: Sequence[bytes] = ()
    ) -> list[int]:
        """`connect_group` on all members at once; their channels' numbers in rank order."""
        sides = [sender, *receivers]
        members = tuple(f"m{rank}" for rank in range(len(sides)))
        group = {"group_id": f"group{next(self._groups)}", "members": members, "address": sender.address()}
        attempts = []
        for rank, side in enumerate(sides):
            mine = {**group, "rank": rank, "lane_key": keys[rank] if keys else KEY}
            attempts.append((side, side.begin_group(mine, slots[rank - 1] if rank else [], WAIT_S)))
        until(
            lambda: all(side.connected(attempt) for side, attempt in attempts), *sides, what="connect_group ends on all"
        )
        return [int((side.connected(attempt) or (0.0, 0))[1]) for side, attempt in attempts]


class StandardSuite:
    """Base of the suites: a subclass of a suite that changes one of its tests must say why.

    It sets ``test_name.reason = "why"`` on its own function; for the tests that fit, nothing is asked.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        suite = next((base for base in cls.__mro__[1:] if StandardSuite in base.__bases__), object)
        for name in (name for name in vars(suite) if name.startswith("test_")):
            mine = getattr(cls, name, None)
            if mine is not vars(suite)[name] and not getattr(mine, "reason", ""):
                raise TypeError(f"{cls.__name__} overrides {name} without a reason; set {name}.reason = 'why'.")


class BackendConformance(StandardSuite):
    """Subclass it, and give the fixture `backend`.

    Class attributes that a subclass may set:
        options: `backend_options`, used here and in peer processes.
        lost_within_s: seconds within which a sender that goes on posting must learn of a killed peer.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    lost_within_s: ClassVar[float] = 15.0

    # Fixtures

    @pytest.fixture
    def backend(self) -> str | Backend:
        """The backend under test: its name, ``"module:Class"``, or an object made without options."""
        raise NotImplementedError("give a fixture `backend`")

    @pytest.fixture
    def backend_options(self) -> Mapping[str, Any]:
        """Options for making it by its name, here and in peer processes."""
        return self.options

    @pytest.fixture
    def made(self, backend: str | Backend, backend_options: Mapping[str, Any]) -> Backend:
        """The backend as an object, once it is known to run here."""
        made = make_backend(backend, backend_options) if isinstance(backend, str) else backend
        probe = made.probe()
        if not probe.ok:
            pytest.skip(f"{made.name} cannot run here: {probe.reason}")
        return made

    @pytest.fixture
    def world(
        self, request: pytest.FixtureRequest, backend: str | Backend, backend_options: Mapping[str, Any], made: Backend
    ) -> Iterator[World]:
        """Makes sides; its peer processes serve all tests of the class."""
        name = backend if isinstance(backend, str) else target_of(type(backend))
        node = request.node.getparent(pytest.Class)
        worlds = node.stash.setdefault(_WORLDS, {})
        if name not in worlds:
            worlds[name] = World(name, backend_options)
            node.addfinalizer(worlds[name].end)
        world = worlds[name]
        yield world
        world.sweep()

    @pytest.fixture
    def endpoint(self, made: Backend) -> Iterator[Endpoint]:
        endpoint = made.endpoint(EndpointSpec(name="e0/0", role="receive", host="127.0.0.1"))
        yield endpoint
        endpoint.close()

    @pytest.fixture(params=PLACES)
    def place(self, request: pytest.FixtureRequest, made: Backend) -> str:
        """Where receivers are."""
        place = str(request.param)
        if place == "in_process":
            need(made, "in_process_pair")
        elif one_process(made):
            pytest.skip(f"{made.name} works inside one process only")
        return place

    @pytest.fixture(params=DEVICES)
    def devices(self, request: pytest.FixtureRequest, made: Backend) -> tuple[str, str]:
        """Device types of sender and receiver."""
        source, target = request.param
        for device in (source, target):
            if device not in made.capabilities.devices:
                pytest.skip(f"{made.name} does not declare device {device}")
        if source != target and (made.capabilities.shares_memory or made.capabilities.multicast):
            pytest.skip(f"{made.name} has one device on both sides")
        return source, target

    @pytest.fixture
    def lane(self, world: World, made: Backend, place: str, devices: tuple[str, str]) -> Callable[..., Lane]:
        """Opens lanes: ``lane(receivers=1, slots=2, nbytes=8192, adopt=False)``."""

        def open_lane(receivers: int = 1, **kwargs: Any) -> Lane:
            names = [None if place == "in_process" else f"r{index}" for index in range(receivers)]
            sides = [world.side(name, "receive", devices[1]) for name in names]
            sender = world.side(None, "send", devices[0])
            return world.join(sender, sides, capabilities=made.capabilities, **kwargs)

        return open_lane

    # What it says of itself

    def test_probe_tells_in_text(self, made: Backend) -> None:
        probe = made.probe()
        assert isinstance(probe, Probe)
        assert all(isinstance(text, str) for item in probe.facts.items() for text in item)
        assert all(isinstance(warning, str) for warning in probe.warnings)

    def test_fingerprint_is_text(self, made: Backend) -> None:
        assert all(isinstance(text, str) for item in made.fingerprint().items() for text in item)
        assert made.fingerprint() == made.fingerprint()

    def test_unknown_options_are_refused_all_at_once(self, made: Backend) -> None:
        cls = type(made)
        with pytest.raises(ConfigError) as raised:
            load_backend(f"{cls.__module__}:{cls.__qualname__}", {"no_such_option": 1, "nor_this_one": 2})
        assert "no_such_option" in str(raised.value)
        assert "nor_this_one" in str(raised.value)

    def test_undeclared_methods_are_refused(self, made: Backend, endpoint: Endpoint) -> None:
        can = made.capabilities
        overridden = {name: getattr(type(endpoint), name) is not getattr(Endpoint, name) for name in vars(Endpoint)
                      if name in ("connect_group", "export", "post_read")}  # fmt: skip
        for name, declared in (("connect_group", can.multicast), ("export", can.pull), ("post_read", can.pull)):
            assert overridden[name] or not declared, f"declared, but {name} is missing"
        assert can.same_host_only or not can.shares_memory
        assert can.devices

    def test_incarnations_are_unique(self, made: Backend) -> None:
        ends = [made.endpoint(EndpointSpec(name="e0/0", role="receive", host="127.0.0.1")) for _ in range(3)]
        assert len({end.incarnation for end in ends}) == 3
        for end in ends:
            end.close()

    def test_address_is_short_bytes(self, made: Backend, endpoint: Endpoint) -> None:
        if not made.capabilities.multicast:
            shares = made.capabilities.shares_memory
            endpoint.listen(KEY, [] if shares else [endpoint.allocate(CAPACITY) for _ in range(4)])
        assert type(endpoint.address) is bytes
        assert 0 < len(endpoint.address) <= MAX_ADDRESS_BYTES

    # Memory

    @pytest.mark.parametrize("nbytes", [1, 4097, 1 << 20])
    def test_allocated_memory_is_flat_bytes(self, world: World, made: Backend, nbytes: int) -> None:
        for device in sorted(made.capabilities.devices & ({"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"})):
            side = world.side(None, "receive", device)
            one, two = side.allocate(2, nbytes)
            for facts in (side.facts(one), side.facts(two)):
                assert facts["dtype"] == "torch.uint8"
                assert facts["shape"] == (nbytes,)
                assert facts["nbytes"] == nbytes
                assert facts["contiguous"]
                assert facts["device"] == device
            side.write(one, pattern(1, nbytes))
            assert side.read(two) == bytes([POISON]) * nbytes
            assert side.read(one) == pattern(1, nbytes)

    def test_memory_can_be_freed_and_had_again(self, world: World, made: Backend) -> None:
        side = world.side(None, "receive")
        for _ in range(3):
            (region,) = side.allocate(1, CAPACITY)
            side.free(region)
        (region,) = side.allocate(1, CAPACITY)
        side.write(region, pattern(3, CAPACITY))
        assert side.read(region) == pattern(3, CAPACITY)

    def test_memory_that_is_not_there_is_an_error(self, made: Backend, endpoint: Endpoint) -> None:
        with pytest.raises(TransportError) as raised:
            endpoint.allocate(1 << 52)
        assert str(1 << 52) in str(raised.value), "the error says how much"

    def test_registered_memory_stays_where_it_is(self, made: Backend, endpoint: Endpoint) -> None:
        if made.capabilities.shares_memory:
            pytest.skip(f"{made.name} shares memory it has allocated itself")
        mine = torch.full((4096,), 7, dtype=torch.uint8)
        region = endpoint.register(mine)
        assert region.tensor.data_ptr() == mine.data_ptr()
        assert region.nbytes == 4096
        endpoint.free(region)
        assert bytes(mine.tolist()) == b"\7" * 4096

    # One lane

    @pytest.mark.parametrize("nbytes", [0, 1, 4097, CAPACITY])
    def test_used_bytes_arrive_and_no_more(self, lane: Callable[..., Lane], nbytes: int) -> None:
        pair = lane()
        landed = pair.send(1, pattern(nbytes, nbytes), b"head")
        assert (landed.slot, landed.nbytes, landed.header) == (1, nbytes, b"head")
        assert landed.data == pattern(nbytes, nbytes)
        if not pair.capabilities.shares_memory:
            assert pair.receiver.read(pair.slots[0][1]) == pattern(nbytes, nbytes) + bytes([POISON]) * (
                CAPACITY - nbytes
            )
            assert pair.receiver.read(pair.slots[0][0]) == bytes([POISON]) * CAPACITY

    def test_a_large_odd_bucket_arrives(self, lane: Callable[..., Lane]) -> None:
        nbytes = (4 << 20) + 3
        pair = lane(nbytes=(4 << 20) + 4096)
        assert pair.send(0, pattern(5, nbytes)).data == pattern(5, nbytes)

    @pytest.mark.parametrize("length", [1, 100, MAX_HEADER_BYTES])
    def test_headers_arrive_unchanged(self, lane: Callable[..., Lane], length: int) -> None:
        pair = lane()
        for nbytes in (64, 0):
            landed = pair.send(0, pattern(1, nbytes), pattern(length, length))
            assert landed.header == pattern(length, length)
            assert landed.data == pattern(1, nbytes)

    def test_a_header_too_long_is_refused(self, lane: Callable[..., Lane], made: Backend) -> None:
        if not made.capabilities.header_with_bytes:
            pytest.skip(f"{made.name} moves no headers")
        pair = lane()
        with pytest.raises(WeightBusError):
            pair.sender.post(pair.tx, pair.buckets[0], 8, b"x" * (MAX_HEADER_BYTES + 1), 0)
        assert pair.send(0, b"still here").data == b"still here"

    def test_more_bytes_than_the_region_has_are_refused(self, lane: Callable[..., Lane]) -> None:
        pair = lane()
        with pytest.raises(WeightBusError):
            pair.sender.post(pair.tx, pair.buckets[0], CAPACITY + 1, b"h", 0)

    def test_a_slot_that_is_not_there_is_never_written(self, lane: Callable[..., Lane], made: Backend) -> None:
        if made.capabilities.shares_memory or not made.capabilities.header_with_bytes:
            pytest.skip(f"{made.name} has no slots that a sender names")
        pair = lane()
        pair.sender.write(pair.buckets[0], pattern(1, 64))
        try:
            work = pair.sender.post(pair.tx, pair.buckets[0], 64, b"h", 7)
            until(
                lambda: pair.sender.state(work) != "pending" or pair.receiver.error(pair.rx[0]),
                *pair.sides,
                what="the post ends, or the receiver closes the connection",
            )
            for _ in range(50):
                pair.sender.pump()
                pair.receiver.pump()
        except WeightBusError:
            pass
        assert pair.receiver.landed() == []
        for slot in pair.slots[0]:
            assert pair.receiver.read(slot) == bytes([POISON]) * CAPACITY

    def test_changed_values_through_the_slots_again_and_again(self, lane: Callable[..., Lane]) -> None:
        pair = lane()
        for k in range(6):
            landed = pair.send(k % 2, pattern(k, CAPACITY - k), b"%d" % k)
            assert (landed.header, landed.slot) == (b"%d" % k, k % 2)
            assert landed.data == pattern(k, CAPACITY - k)

    def test_many_slots(self, lane: Callable[..., Lane]) -> None:
        pair = lane(slots=16, nbytes=512)
        works = []
        for k in range(16):
            pair.sender.write(pair.buckets[k], pattern(k, 500 + k % 12))
            works.append(pair.post(k, 500 + k % 12, b"%d" % k))
        landed = pair.take(16)
        pair.receiver.release()
        for work in works:
            pair.finish(work)
        assert [item.header for item in landed] == [b"%d" % k for k in range(16)], "in order of posting"
        assert [item.slot for item in landed] == list(range(16))
        assert all(item.data == pattern(k, 500 + k % 12) for k, item in enumerate(landed))

    def test_a_slow_receiver_loses_nothing(self, lane: Callable[..., Lane]) -> None:
        pair = lane(slots=4)
        pair.receiver.pause(True)
        for k in range(4):
            pair.sender.write(pair.buckets[k], pattern(k, 4096))
            pair.post(k, 4096, b"%d" % k)
        for _ in range(200):
            pair.sender.pump()
        assert pair.receiver.landed() == []
        pair.receiver.pause(False)
        assert [(item.header, item.data) for item in pair.take(4)] == [(b"%d" % k, pattern(k, 4096)) for k in range(4)]

    @pytest.mark.parametrize("nbytes", [64, 1 << 20])
    def test_done_gives_the_source_back(self, lane: Callable[..., Lane], made: Backend, nbytes: int) -> None:
        if made.capabilities.shares_memory:
            pytest.skip(f"{made.name} shares the sender's memory until the reader's release")
        pair = lane(nbytes=1 << 20)
        pair.sender.write(pair.buckets[0], pattern(1, nbytes))
        work = pair.post(0, nbytes)
        if pair.sender.state(work) == "pending":  # asked before any progress: DONE must be true at once, too
            pair.finish(work)
        pair.sender.write(pair.buckets[0], bytes(nbytes))
        assert pair.take(1)[0].data == pattern(1, nbytes)
        assert pair.sender.state(work) == "done", "DONE is final"

    def test_shared_memory_is_the_senders_own(self, lane: Callable[..., Lane], made: Backend) -> None:
        need(made, "shares_memory")
        pair = lane()
        pair.sender.write(pair.buckets[1], pattern(1, 64))
        pair.post(1, 64)
        assert pair.take(1)[0].slot == 1
        pair.sender.write(pair.buckets[1], pattern(2, 64))
        pair.post(1, 64)
        assert pair.take(1)[0].data == pattern(2, 64)

    def test_shared_memory_is_the_readers_until_its_release(self, lane: Callable[..., Lane], made: Backend) -> None:
        need(made, "shares_memory")
        pair = lane()
        works = [pair.post(bucket, 64) for bucket in (0, 1)]
        pair.take(2)
        for _ in range(100):
            pair.sender.pump()
        assert [pair.sender.state(work) for work in works] == ["pending", "pending"]
        pair.receiver.release()
        for work in works:
            pair.finish(work)

    def test_a_reader_that_closes_ends_what_it_has_not_released(self, lane: Callable[..., Lane], made: Backend) -> None:
        need(made, "shares_memory")
        pair = lane()
        work = pair.post(0, 64)
        pair.take(1)
        pair.receiver.close()
        until(lambda: pair.sender.state(work) == "error", pair.sender, what="the work ends")

    def test_callers_memory_can_be_sent(self, lane: Callable[..., Lane], made: Backend) -> None:
        if made.capabilities.shares_memory:
            pytest.skip(f"{made.name} sends memory it has allocated itself")
        pair = lane()
        (region,) = pair.sender.adopt(1, 1000)
        pair.sender.write_owned(0, pattern(9, 1000))
        pair.buckets[0] = region
        pair.finish(pair.post(0, 1000))
        assert pair.take(1)[0].data == pattern(9, 1000)

    def test_a_healthy_channel_has_no_error(self, lane: Callable[..., Lane]) -> None:
        pair = lane()
        pair.send(0, b"x")
        assert pair.sender.error(pair.tx) is None
        assert pair.receiver.error(pair.rx[0]) is None

    def test_drain_is_true_when_all_has_ended(self, lane: Callable[..., Lane]) -> None:
        pair = lane()
        pair.send(0, b"x")
        assert pair.sender.drain(pair.tx, 5.0)[0] is True
        assert pair.receiver.drain(pair.rx[0], 5.0)[0] is True

    # Several lanes

    def test_two_lanes_of_one_sender_do_not_mix(self, world: World, made: Backend, place: str) -> None:
        if made.capabilities.multicast:
            pytest.skip(f"{made.name} has groups in place of lanes")
        sender = world.side(None, "send")
        names = [None if place == "in_process" else f"r{index}" for index in range(2)]
        lanes = [world.join(sender, [world.side(name, "receive")], capabilities=made.capabilities) for name in names]
        works = []
        for index, pair in enumerate(lanes):
            sender.write(pair.buckets[0], pattern(index, 2000))
            works.append(pair.post(0, 2000, b"%d" % index))
        for index, pair in enumerate(lanes):
            landed = pair.take(1)[0]
            pair.receiver.release()
            pair.finish(works[index])
            assert (landed.header, landed.data) == (b"%d" % index, pattern(index, 2000))

    def test_a_wrong_lane_key_gets_nothing_in(self, world: World, made: Backend, place: str) -> None:
        if made.capabilities.multicast:
            pytest.skip(f"{made.name} has groups: see test_a_wrong_group_key_is_refused")
        receiver = world.side(None if place == "in_process" else "r0", "receive")
        slots = receiver.allocate(0 if made.capabilities.shares_memory else 2, CAPACITY)
        address = receiver.listen(KEY, slots)
        sender = world.side(None, "send")
        (bucket,) = sender.allocate(1, CAPACITY)
        sender.write(bucket, pattern(1, CAPACITY))
        refused = False
        try:
            channel = world.connect(sender, receiver, address, WRONG_KEY, timeout_s=4.0)
            work = sender.post(channel, bucket, 64, b"h", 0)
            refused = bool(
                until(
                    lambda: sender.error(channel) or sender.state(work) == "error" or receiver.error(0),
                    sender,
                    receiver,
                    what="the stranger's connection is closed",
                )
            )
        except TransportError:
            refused = True
        assert refused
        assert receiver.landed() == []
        for slot in slots:
            assert receiver.read(slot) == bytes([POISON]) * CAPACITY

    def test_a_new_receiver_can_be_reached_after_one_has_closed(
        self, world: World, made: Backend, lane: Callable[..., Lane], place: str, devices: tuple[str, str]
    ) -> None:
        pair = lane()
        pair.send(0, b"first")
        pair.receiver.close()
        again = world.side(None if place == "in_process" else "r0", "receive", devices[1])
        second = world.join(pair.sender, [again], capabilities=made.capabilities)
        assert second.send(0, b"second").data == b"second"
        assert pair.receiver.incarnation() != again.incarnation()

    # Ends

    def test_closing_twice_is_one_closing(self, lane: Callable[..., Lane]) -> None:
        pair = lane()
        pair.send(0, b"x")
        for _ in range(2):
            pair.sender.close_channel(pair.tx)
            pair.receiver.close_channel(pair.rx[0])
        for _ in range(2):
            pair.sender.close()
            pair.receiver.close()

    def test_use_after_close_is_refused(self, lane: Callable[..., Lane]) -> None:
        pair = lane()
        pair.sender.close()
        with pytest.raises(EndpointClosed):
            pair.sender.post(pair.tx, pair.buckets[0], 1, b"h", 0)
        with pytest.raises(EndpointClosed):
            pair.sender.allocate(1, 64)
        pair.receiver.close()
        with pytest.raises(EndpointClosed):
            pair.receiver.allocate(1, 64)

    def test_send_on_a_closed_channel_is_refused(self, lane: Callable[..., Lane]) -> None:
        pair = lane()
        pair.sender.close_channel(pair.tx)
        with pytest.raises(EndpointClosed):
            pair.sender.post(pair.tx, pair.buckets[0], 1, b"h", 0)

    def test_nothing_lands_after_the_receiver_has_closed(self, lane: Callable[..., Lane], made: Backend) -> None:
        if made.capabilities.shares_memory:
            pytest.skip(f"{made.name} writes no memory of the receiver")
        pair = lane(adopt=True, slots=4)
        pair.receiver.pause(True)
        for k in range(4):
            pair.sender.write(pair.buckets[k], pattern(k, CAPACITY))
            pair.post(k, CAPACITY)
        pair.receiver.close()
        later = pattern(99, CAPACITY)
        for k in range(4):
            pair.receiver.write_owned(k, later)
        for _ in range(300):
            pair.sender.pump()
        pair.sender.close()
        assert [pair.receiver.read_owned(k) == later for k in range(4)] == [True] * 4

    def test_a_dead_address_is_an_error_in_time(self, world: World, made: Backend, place: str) -> None:
        if made.capabilities.multicast:
            pytest.skip(f"{made.name} has connect_group in place of connect")
        receiver = world.side(None if place == "in_process" else "victim", "receive")
        address = receiver.listen(KEY, receiver.allocate(0 if made.capabilities.shares_memory else 1, 64))
        if place == "in_process":
            receiver.close()
        else:
            world.host("victim").peer.kill()
        refused_in_time(world.side(None, "send"), address)

    def test_an_address_of_garbage_is_refused(self, world: World, made: Backend) -> None:
        if made.capabilities.multicast:
            pytest.skip(f"{made.name} has connect_group in place of connect")
        for address in (b"", b"\xff" * 64, pattern(1, 5000)):
            refused_in_time(world.side(None, "send"), address)

    # Peers that die or stand still

    def test_a_killed_receiver_is_lost_in_time(self, world: World, made: Backend) -> None:
        need_processes(made)
        receiver = world.side("victim", "receive")
        sender = world.side(None, "send")
        pair = world.join(sender, [receiver], capabilities=made.capabilities, nbytes=1 << 20)
        pair.send(0, b"alive")
        receiver.pause(True)
        pair.sender.write(pair.buckets[1], pattern(1, 1 << 20))
        pair.post(1, 1 << 20)
        world.host("victim").peer.kill()
        errors: list[BaseException] = []

        def lost() -> bool:
            try:
                work = sender.post(pair.tx, pair.buckets[0], 64, b"h", 0)
            except WeightBusError as exc:
                errors.append(exc)
                return True
            sender.pump()
            errors.extend(error for error in (sender.error(pair.tx), sender.work_error(work)) if error)
            time.sleep(0.05)
            return bool(errors)

        until(lost, sender, what="the sender learns that its receiver was killed", timeout_s=self.lost_within_s)
        assert all(isinstance(error, PeerLost) for error in errors), errors
        assert sender.close() < SLACK_S

    def test_the_sender_outlives_a_killed_receiver(self, world: World, made: Backend) -> None:
        need_processes(made)
        sender = world.side(None, "send")
        pair = world.join(sender, [world.side("victim", "receive")], capabilities=made.capabilities)
        pair.send(0, b"first")
        world.host("victim").peer.kill()
        again = world.join(sender, [world.side("victim", "receive")], capabilities=made.capabilities)
        assert again.send(0, pattern(7, CAPACITY)).data == pattern(7, CAPACITY)

    def test_a_killed_sender_leaves_no_half_bucket(self, world: World, made: Backend) -> None:
        need_processes(made)
        sender = world.side("victim", "send")
        receiver = world.side(None, "receive")
        pair = world.join(sender, [receiver], capabilities=made.capabilities, nbytes=1 << 20)
        assert pair.send(0, b"whole").data == b"whole"
        sender.write(pair.buckets[1], pattern(1, 1 << 20))
        pair.post(1, 1 << 20)
        world.host("victim").peer.kill()
        end = time.monotonic() + 1.0
        while time.monotonic() < end and receiver.error(pair.rx[0]) is None:
            receiver.pump()
        assert all(item.data == pattern(1, 1 << 20) for item in receiver.landed())
        error = receiver.error(pair.rx[0])
        assert error is None or isinstance(error, TransportError)
        assert receiver.close() < SLACK_S

    def test_timeouts_hold_against_a_stopped_peer(self, world: World, made: Backend) -> None:
        need_processes(made)
        receiver = world.side("r0", "receive")
        sender = world.side(None, "send")
        pair = world.join(sender, [receiver], capabilities=made.capabilities, nbytes=1 << 20)
        pair.send(0, b"runs")
        peer = world.host("r0").peer
        peer.stop()
        try:
            if made.capabilities.header_with_bytes:
                pair.post(0, 1 << 20)
            _, took = sender.drain(pair.tx, 1.0)
            assert took < 1.0 + SLACK_S
        finally:
            peer.cont()
        if made.capabilities.header_with_bytes:
            assert pair.take(1)[0].nbytes == 1 << 20

    def test_connect_to_a_stopped_peer_ends_in_time(self, world: World, made: Backend) -> None:
        need_processes(made)
        if made.capabilities.multicast:
            pytest.skip(f"{made.name} has connect_group in place of connect")
        receiver = world.side("r0", "receive")
        address = receiver.listen(KEY, receiver.allocate(0 if made.capabilities.shares_memory else 1, 64))
        sender = world.side(None, "send")
        peer = world.host("r0").peer
        peer.stop()
        try:
            attempt = sender.begin_connect(address, KEY, 1.0)
            until(lambda: ended(sender, attempt), sender, what="connect keeps its timeout", timeout_s=1.0 + SLACK_S)
        finally:
            peer.cont()

    def test_nothing_leaks(self, world: World, made: Backend, place: str) -> None:
        """Descriptors, threads and shared memory are the same after each of three lives of a lane."""
        counts = []
        hosts = ["r0"] if place == "in_process" else ["r0", "r1"]
        for _ in range(4):
            receiver, sender = world.side(hosts[-1], "receive"), world.side(hosts[0], "send")
            pair = world.join(sender, [receiver], capabilities=made.capabilities)
            pair.send(0, b"x")
            pair.send(1, pattern(1, CAPACITY))
            names = set().union(*(world.host(name).shared_names() for name in hosts))
            for name in hosts:
                world.host(name).forget()
            counts.append([settled(world.host(name)) for name in hosts])
            assert not names & set(os.listdir("/dev/shm")), "names of shared memory are left"
        assert counts[3] == counts[1], "after the second life nothing grows"

    # Capabilities

    def test_forward_posts_an_arrival_on(self, world: World, made: Backend, place: str) -> None:
        need(made, "forward")
        names = [None, None] if place == "in_process" else ["r0", "r1"]
        middle, last = (world.side(name, "receive") for name in names)
        first = world.join(world.side(None, "send"), [middle], capabilities=made.capabilities)
        slots = last.allocate(2, CAPACITY)
        onward = world.connect(middle, last, last.listen(KEY, slots))
        for k in range(3):
            first.sender.write(first.buckets[k % 2], pattern(k, 5000))
            first.finish(first.post(k % 2, 5000, b"%d" % k))
            first.take(1)
            work = middle.post_arrived(onward, 0, k % 2)
            until(lambda: middle.state(work) == "done", middle, last, what="the middle's post ends")  # noqa: B023
            landed = until(last.landed, middle, last, what="the last one gets it")[0]
            assert (landed.header, landed.data) == (b"%d" % k, pattern(k, 5000))
            assert last.read(slots[k % 2])[5000:] == bytes([POISON]) * (CAPACITY - 5000)
            middle.release()
            last.release()

    def test_pull_copies_the_exported_tensors(
        self, world: World, made: Backend, place: str, devices: tuple[str, str]
    ) -> None:
        need(made, "pull")
        specs = [((3, 5), "bfloat16"), ((), "float32"), ((0, 4), "float16"), ((7,), "uint8"), ((1000,), "float64")]
        reader = world.side(None if place == "in_process" else "r0", "receive", devices[1])
        owner = world.side(None, "send", devices[0])
        owner.make_tensors(specs, 0)
        reader.make_tensors(specs, POISON)
        remote = owner.export()
        assert owner.export() == remote, "exporting the same tensors again changes nothing"
        for turn in range(2):
            data = [pattern(10 * turn + i, n) for i, n in enumerate((30, 4, 0, 7, 8000))]
            for index, item in enumerate(data):
                owner.write_tensor(index, item)
            work = reader.post_read(remote)
            until(lambda: reader.state(work) != "pending", owner, reader, what="the read ends")  # noqa: B023
            assert reader.state(work) == "done", reader.work_error(work)
            assert [reader.read_tensor(index) for index in range(len(specs))] == data

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_multicast_reaches_every_receiver(self, lane: Callable[..., Lane], made: Backend, count: int) -> None:
        need(made, "multicast")
        group = lane(receivers=count)
        for k, nbytes in enumerate((CAPACITY, 1, 0, 4097)):
            group.sender.write(group.buckets[k % 2], pattern(k, nbytes))
            group.finish(group.post(k % 2, nbytes, b"%d" % k))
            for index in range(count):
                landed = group.take(1, index)[0]
                assert (landed.slot, landed.header, landed.data) == (k % 2, b"%d" % k, pattern(k, nbytes))
                group.receivers[index].release()

    def test_a_missing_member_is_named_in_time(self, world: World, made: Backend) -> None:
        need(made, "multicast")
        sender = world.side(None, "send")
        group = {"group_id": "lonely", "lane_key": KEY, "rank": 0, "members": ("sender/0", "e7/0")}
        attempt = sender.begin_group({**group, "address": sender.address()}, [], 1.0)
        with pytest.raises((ConnectError, TransferTimeout)) as raised:
            until(lambda: sender.connected(attempt), sender, what="it gives up", timeout_s=1.0 + SLACK_S)
        assert "e7/0" in str(raised.value)

    def test_a_wrong_group_key_is_refused(self, world: World, made: Backend, place: str) -> None:
        need(made, "multicast")
        receiver = world.side(None if place == "in_process" else "r0", "receive")
        sender = world.side(None, "send")
        slots = receiver.allocate(1, CAPACITY)
        group = {"group_id": "keys", "members": ("sender/0", "e0/0"), "address": sender.address()}
        mine = sender.begin_group({**group, "rank": 0, "lane_key": KEY}, [], 4.0)
        theirs = receiver.begin_group({**group, "rank": 1, "lane_key": WRONG_KEY}, slots, 4.0)
        with pytest.raises(TransportError):
            until(lambda: receiver.connected(theirs), sender, receiver, what="it is refused")
        until(lambda: ended(sender, mine), sender, what="the sender gives up too")
        assert receiver.read(slots[0]) == bytes([POISON]) * CAPACITY


def need(backend: Backend, capability: str) -> None:
    """Skip unless `capability` is declared."""
    if not getattr(backend.capabilities, capability):
        pytest.skip(f"{backend.name} does not declare {capability}")


def one_process(backend: Backend) -> bool:
    """Whether the backend cannot leave its process."""
    return bool(getattr(backend.capabilities, "same_process_only", False))


def need_processes(backend: Backend) -> None:
    """Skip a backend that cannot leave its process."""
    if one_process(backend):
        pytest.skip(f"{backend.name} works inside one process only")


def ended(side: Side, attempt: int) -> bool:
    """Whether a connect has ended, well or with one of the errors it may raise."""
    try:
        return side.connected(attempt) is not None
    except (ConnectError, TransferTimeout, PeerLost):
        return True


def refused_in_time(sender: Side, address: bytes) -> None:
    """Connecting to `address` ends in ConnectError or TransferTimeout within its timeout."""
    attempt = sender.begin_connect(address, KEY, 2.0)
    with pytest.raises((ConnectError, TransferTimeout)):
        until(lambda: sender.connected(attempt), sender, what="connect keeps its timeout", timeout_s=2.0 + SLACK_S)


def settled(host: Host) -> dict[str, int]:
    """Resources of a host once they have stood still for a moment: threads may take a little to end."""
    counts = host.resources()
    for _ in range(20):
        time.sleep(0.05)
        counts, before = host.resources(), counts
        if counts == before:
            break
    return counts
