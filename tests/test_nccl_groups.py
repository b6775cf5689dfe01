"""Backend `nccl` with Gloo: groups that lose members, meet strangers, share a process, and are given up."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import weightbus_nccl.endpoint
from weightbus.backend import Channel, Endpoint, EndpointSpec, GroupSpec, State
from weightbus.deadline import Deadline
from weightbus.errors import (
    BackendUnavailable,
    ConfigError,
    ConnectError,
    EndpointBusy,
    EndpointClosed,
    LocalProtocolError,
    PeerLost,
    TransferTimeout,
    TransportError,
)
from weightbus.testing.peers import run_peers
from weightbus.testing.sides import POISON, Host, Side
from weightbus_nccl import NcclBackend
from weightbus_nccl.collective import NcclOperation
from weightbus_nccl.rendezvous import Meeting, host_store

dist: Any = torch.distributed
KEY = bytes(range(16))
BIG = 24 << 20  # more than the socket buffers of a connection hold
TIMEOUT_S = 3.0
NAME = "weightbus_nccl:NcclBackend"
HERE = str(Path(__file__).resolve())


def bytes_of(seed: int, nbytes: int) -> bytes:
    return bytes((seed + i) % 251 for i in range(min(nbytes, 4096))).ljust(nbytes, bytes([seed % 251]))


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
    deadline = Deadline.after(timeout_s)
    while not (value := condition()):
        assert not deadline.expired, f"not within {timeout_s} s: {what}"
        time.sleep(0.002)
    return value


# Groups of threads in this process


def join(endpoints: list[Endpoint], group_id: str = "g", slots: int = 2, nbytes: int = 4096) -> list[Any]:
    """All of them in one group; what each call gave or raised."""
    members = tuple(f"m{i}" for i in range(len(endpoints)))
    results: list[Any] = [None] * len(endpoints)

    def run(rank: int) -> None:
        endpoint = endpoints[rank]
        mine = [endpoint.allocate(nbytes) for _ in range(slots if rank else 0)]
        for region in mine:
            region.tensor.fill_(POISON)
        address = endpoints[0].address
        spec = GroupSpec(group_id=group_id, lane_key=KEY, rank=rank, members=members, address=address)
        try:
            results[rank] = endpoint.connect_group(spec, mine, 10.0)
        except Exception as exc:
            results[rank] = exc

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(endpoints))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def endpoints() -> Iterator[list[Endpoint]]:
    backend = NcclBackend(timeout=TIMEOUT_S)
    made = [backend.endpoint(EndpointSpec(name="s", role="send"))]
    made += [backend.endpoint(EndpointSpec(name=f"r{i}", role="receive")) for i in range(2)]
    yield made
    for endpoint in reversed(made):
        endpoint.close()


@pytest.fixture
def pair(endpoints: list[Endpoint]) -> tuple[Endpoint, Endpoint, Channel, Channel]:
    tx, rx = join(endpoints[:2])
    return endpoints[0], endpoints[1], tx, rx


def test_unknown_and_bad_options_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"'tiemout'.*timeout must be a positive number of seconds, not -1"):
        NcclBackend(tiemout=3, timeout=-1)
    assert NcclBackend().timeout_s == 30.0


def test_a_device_it_cannot_move_and_nccl_without_a_gpu_are_unavailable() -> None:
    with pytest.raises(BackendUnavailable, match="not meta"):
        NcclBackend().endpoint(EndpointSpec(name="r", role="receive", device=torch.device("meta")))
    if not dist.is_nccl_available():
        with pytest.raises(BackendUnavailable, match="no NCCL"):
            NcclBackend().endpoint(EndpointSpec(name="r", role="receive", device=torch.device("cuda", 0)))


def test_there_are_no_lanes_from_point_to_point(endpoints: list[Endpoint]) -> None:
    with pytest.raises(LocalProtocolError, match="connect_group"):
        endpoints[0].connect(b"127.0.0.1:1", KEY, 1.0)
    with pytest.raises(LocalProtocolError, match="connect_group"):
        endpoints[1].listen(KEY, [])


def test_buckets_of_no_bytes_keep_their_place(pair: tuple[Endpoint, Endpoint, Channel, Channel]) -> None:
    sender, receiver, tx, rx = pair
    bucket = sender.allocate(4096)
    bucket.tensor.fill_(7)
    rx.post_recv(0, 4096, b"full")
    rx.post_recv(1, 0, b"empty")
    assert rx.arrivals() == []
    empty = tx.post_send(bucket, 0, b"empty", 1)
    assert empty.state is State.DONE
    assert rx.arrivals() == [], "the empty one waits for the full one before it"
    full = tx.post_send(bucket, 4096, b"full", 0)
    wait_for(lambda: sender.progress() or full.state is State.DONE, "sent")
    wait_for(receiver.progress, "received")
    first, second = rx.arrivals()
    assert (first.header, first.slot, first.nbytes, first.region.tensor.sum().item()) == (b"full", 0, 4096, 7 * 4096)
    assert (second.header, second.slot, second.nbytes) == (b"empty", 1, 0)
    assert second.region.tensor.eq(POISON).all()


def test_what_does_not_fit_is_refused_before_it_is_posted(pair: tuple[Endpoint, Endpoint, Channel, Channel]) -> None:
    sender, _, tx, rx = pair
    bucket = sender.allocate(16)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: tx.post_send(bucket, 17, b"", 0), "17 bytes do not fit a region of 16"),
        (lambda: tx.post_send(bucket, 1, bytes(4097), 0), "at most 4096"),
        (lambda: tx.post_recv(0, 1, b""), "does not receive"),
        (lambda: rx.post_send(bucket, 1, b"", 0), "Only rank 0"),
        (lambda: rx.post_recv(2, 1, b""), "no slot 2"),
        (lambda: rx.post_recv(0, 4097, b""), "do not fit"),
    ]
    for call, text in refused:
        with pytest.raises(LocalProtocolError, match=text):
            call()
    assert tx.drain(0.0)
    assert rx.drain(0.0)


def test_a_slot_is_filled_again_only_once_it_was_released(pair: tuple[Endpoint, Endpoint, Channel, Channel]) -> None:
    _, _, _, rx = pair
    rx.post_recv(0, 0, b"a")
    with pytest.raises(LocalProtocolError, match="not been released"):
        rx.post_recv(0, 0, b"b")
    rx.release(rx.arrivals()[0])
    rx.post_recv(0, 0, b"b")
    assert [a.header for a in rx.arrivals()] == [b"b"]


def test_a_timeout_leaves_pending_memory_alone_and_breaks_the_group(
    pair: tuple[Endpoint, Endpoint, Channel, Channel],
) -> None:
    _, receiver, _, rx = pair
    rx.operation_timeout_s = 0.5  # type: ignore[attr-defined]
    rx.post_recv(0, 4096, b"never")
    started = time.monotonic()
    assert not rx.drain(0.1)
    assert rx.error is None
    wait_for(lambda: receiver.progress() or rx.error, "the receive ends")
    assert 0.3 < time.monotonic() - started < 3.0
    assert isinstance(rx.error, TransferTimeout)
    assert isinstance(rx.error, TimeoutError)
    assert rx.error.peer == "m0"
    assert rx.drain(0.0)
    assert rx.arrivals() == []
    with pytest.raises(TransferTimeout):
        rx.post_recv(1, 1, b"")


def test_one_members_failure_reaches_all_without_their_own_timeouts(endpoints: list[Endpoint]) -> None:
    sender, failing, waiting = endpoints
    tx, rx, other = join(endpoints)
    for channel in (tx, other):
        channel.operation_timeout_s = 60.0
    rx.operation_timeout_s = 0.3
    rx.post_recv(0, 4096, b"h")
    other.post_recv(0, 4096, b"h")
    other.post_recv(1, 4096, b"h")
    wait_for(lambda: failing.progress() or rx.error, "one receiver gives up")
    work = tx.post_send(sender.allocate(4096), 4096, b"h", 0)
    wait_for(lambda: sender.progress() or work.state is not State.PENDING, "the sender learns it", 5)
    assert work.state is State.ERROR
    assert isinstance(tx.error, PeerLost)
    wait_for(lambda: waiting.progress() or other.error, "the other receiver learns it", 5)
    assert isinstance(other.error, PeerLost)
    with pytest.raises(PeerLost):
        tx.post_send(sender.allocate(4096), 0, b"h", 1)


def test_a_region_in_use_is_not_freed(pair: tuple[Endpoint, Endpoint, Channel, Channel]) -> None:
    sender, receiver, tx, rx = pair
    slot = rx._slots[0]  # type: ignore[attr-defined]
    rx.post_recv(0, 4096, b"h")
    with pytest.raises(EndpointBusy):
        receiver.free(slot)
    work = tx.post_send(sender.allocate(4096), 4096, b"h", 0)
    wait_for(lambda: receiver.progress() or slot not in receiver._regions or rx.drain(0), "ended")  # type: ignore[attr-defined]
    receiver.free(slot)
    wait_for(lambda: sender.progress() or work.state is State.DONE, "sent")


def test_closing_waits_for_registered_memory_only(endpoints: list[Endpoint]) -> None:
    sender, allocating, registering = endpoints
    mine = torch.full((4096,), POISON, dtype=torch.uint8)
    results: list[Any] = [None, None, None]
    members = ("s", "a", "r")

    def run(rank: int, endpoint: Endpoint) -> None:
        slots = [[], [endpoint.allocate(4096)], [endpoint.register(mine)]][rank] if rank else []
        spec = GroupSpec(group_id="g", lane_key=KEY, rank=rank, members=members, address=sender.address)
        results[rank] = endpoint.connect_group(spec, slots, 10.0)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(endpoints)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for channel in results[1:]:
        channel.operation_timeout_s = 1.0
        channel.post_recv(0, 4096, b"never")
    started = time.monotonic()
    allocating.close()
    assert time.monotonic() - started < 0.5
    registering.close()
    assert 0.5 < time.monotonic() - started < 3.0
    mine.fill_(1)
    tx = results[0]
    bucket = sender.allocate(4096)
    bucket.tensor.fill_(9)
    try:
        tx.post_send(bucket, 4096, b"late", 0)
        tx.drain(1.0)
    except TransportError:
        pass
    assert mine.eq(1).all(), "nothing lands once close has returned"
    wait_for(lambda: not any("weightbus-nccl" in t.name for t in threading.enumerate()), "no thread is left", 4)


def test_regrouping_on_the_same_endpoints(endpoints: list[Endpoint]) -> None:
    sender = endpoints[0]
    bucket = sender.allocate(4096)
    for turn in range(3):
        alive = endpoints[: 3 - turn % 2]
        channels = join(alive, f"turn {turn}")
        bucket.tensor.fill_(turn + 1)
        for rx in channels[1:]:
            rx.post_recv(1, 100 + turn, b"h")
        work = channels[0].post_send(bucket, 100 + turn, b"h", 1)
        wait_for(lambda: sender.progress() or work.state is State.DONE, "sent")
        for rx in channels[1:]:
            assert rx.drain(5)
            (arrival,) = rx.arrivals()
            assert arrival.region.tensor[: 100 + turn].eq(turn + 1).all()
            assert arrival.region.tensor[100 + turn :].eq(POISON).all(), "exactly the used bytes moved"
        for channel in channels:
            channel.close()
            channel.close()
            with pytest.raises(EndpointClosed):
                channel.post_send(bucket, 1, b"", 0) if channel is channels[0] else channel.post_recv(0, 1, b"")


def test_bad_groups_are_refused_at_once(endpoints: list[Endpoint]) -> None:
    group = GroupSpec(group_id="g", lane_key=b"short", rank=1, members=("a", "a"), address=endpoints[0].address)
    foreign = endpoints[1].allocate(16)
    with pytest.raises(LocalProtocolError) as raised:
        endpoints[0].connect_group(group, [foreign], 1.0)
    for text in ("different names", "cannot be rank 1", "16 bytes, not 5", "not a region of this endpoint"):
        assert text in str(raised.value)


def test_settings_that_differ_are_named_on_both_sides(
    endpoints: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter(["Ring", "Tree"])
    monkeypatch.setattr(weightbus_nccl.endpoint, "settings", lambda _: {"torch": "2.13", "NCCL_ALGO": next(values)})
    for error in join(endpoints[:2]):
        assert isinstance(error, ConnectError)
        assert "NCCL_ALGO" in str(error)
        assert "Ring" in str(error)
        assert "Tree" in str(error)
        assert "torch:" not in str(error), "what is equal is not listed"


def test_the_fingerprint_has_versions_and_decisive_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightbus_nccl.backend import settings

    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    found = settings("cuda")
    assert found["NCCL_ALGO"] == "Ring"
    assert "NCCL_DEBUG" not in found
    assert torch.__version__.startswith(found["torch"])
    assert settings("cpu") == {"torch": found["torch"], "collectives": "gloo"}


# Meetings


def meet(
    facts: list[dict[str, Any]], keys: list[bytes], present: int | None = None, timeout_s: float = 5.0
) -> list[Any]:
    """Meetings of as many members as there are facts, of which the first `present` come."""
    store, address = host_store("127.0.0.1")
    members = tuple(f"m{i}" for i in range(len(facts)))
    results: list[Any] = [None] * len(facts)

    def run(rank: int) -> None:
        group = GroupSpec(group_id="g", lane_key=keys[rank], rank=rank, members=members, address=address)
        try:
            results[rank] = Meeting(group, facts[rank], Deadline.after(timeout_s), lambda: False).hold()
        except Exception as exc:
            results[rank] = exc

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(present or len(facts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del store
    return results


def test_two_members_on_one_gpu_are_refused_by_uuid() -> None:
    facts: list[dict[str, Any]] = [{"settings": {}, "gpu": uuid} for uuid in ("GPU-a", "GPU-b", "GPU-a")]
    for error in meet(facts, [KEY] * 3):
        assert isinstance(error, ConnectError)
        assert "m0 and m2 are both on GPU GPU-a" in str(error)
        assert "backend='local'" in str(error)
    assert not any(isinstance(r, Exception) for r in meet(facts[:2], [KEY] * 2))


def test_one_wrong_key_is_named_by_those_who_have_the_right_one() -> None:
    results = meet([{"settings": {}}] * 3, [KEY, bytes(16), KEY])
    for error in (results[0], results[2]):
        assert isinstance(error, ConnectError)
        assert "lane key of m1 differs" in str(error)
        assert error.peer == "m1"
    assert isinstance(results[1], ConnectError)
    assert "lane key of m0, m2 differs from that of m1" in str(results[1])


def test_the_missing_are_named() -> None:
    results = meet([{"settings": {}}] * 4, [KEY] * 4, present=2, timeout_s=0.5)
    for error in results[:2]:
        assert isinstance(error, TransferTimeout)
        assert "m2, m3 did not come" in str(error)


def test_a_stranger_cannot_take_a_members_place(endpoints: list[Endpoint]) -> None:
    host, port = endpoints[0].address.decode().split(":")
    stranger = dist.TCPStore(host, int(port), None, False, timedelta(seconds=5), wait_for_workers=False)
    for kind in ("nonce", "proof"):
        stranger.set(f"g/{kind}/1", secrets.token_bytes(80))
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(secrets.token_bytes(4096))
        group = GroupSpec(group_id="g", lane_key=KEY, rank=0, members=("m0", "m1"), address=endpoints[0].address)
        with pytest.raises(ConnectError, match="lane key of m1 differs"):
            endpoints[0].connect_group(group, [], 5.0)
        assert not any(isinstance(r, Exception) for r in join(endpoints[:2], "another")), (
            "the port still serves members"
        )


def test_the_store_listens_on_its_host_only(endpoints: list[Endpoint]) -> None:
    port = int(endpoints[0].address.decode().split(":")[1])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=2)
    with pytest.raises(TransportError, match=r"192\.0\.2\.1"):
        NcclBackend().endpoint(EndpointSpec(name="s", role="send", host="192.0.2.1"))


@pytest.mark.parametrize("address", [b"", b"\xff" * 40, b"nowhere", b"127.0.0.1:0", b"127.0.0.1:99999"])
def test_garbage_for_an_address_is_refused(endpoints: list[Endpoint], address: bytes) -> None:
    group = GroupSpec(group_id="g", lane_key=KEY, rank=1, members=("m0", "m1"), address=address)
    with pytest.raises(ConnectError, match="not the address"):
        endpoints[1].connect_group(group, [endpoints[1].allocate(1)], 2.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_closing_an_endpoint_ends_its_wait_for_members(endpoints: list[Endpoint], rank: int) -> None:
    mine = endpoints[rank]
    group = GroupSpec(group_id="g", lane_key=KEY, rank=rank, members=("m0", "m1"), address=endpoints[0].address)
    slots = [mine.allocate(1) for _ in range(rank)]
    threading.Timer(0.3, mine.close).start()
    started = time.monotonic()
    with pytest.raises((EndpointClosed, ConnectError)):
        mine.connect_group(group, slots, 20.0)
    assert time.monotonic() - started < 10.0


# NCCL's operations, by doubles: an abort is the only way to end them, and memory is free only when the event says so


class Fake:
    """Work, event and group of an operation at once."""

    def __init__(self) -> None:
        self.event, self.completed, self.raised = False, False, None
        self.broken: BaseException | None = None

    def query(self) -> bool:
        return self.event

    def is_completed(self) -> bool:
        return self.completed

    def wait(self) -> None:
        if self.raised is not None:
            raise self.raised

    def abort(self, reason: BaseException) -> None:
        self.broken = self.broken or reason


def nccl_operation(timeout_s: float) -> tuple[Fake, NcclOperation]:
    fake = Fake()
    return fake, NcclOperation(fake, fake, fake, torch.zeros(1), Deadline.after(timeout_s))  # type: ignore[arg-type]


def test_nccl_ends_by_its_event() -> None:
    fake, operation = nccl_operation(60)
    fake.completed = True
    assert not operation.poll(), "NCCL may say so a little before the event"
    assert fake.broken is None
    fake.event = True
    assert operation.poll()
    assert operation.error is None


def test_nccl_timeout_aborts_and_stays_pending_until_the_kernel_has_gone() -> None:
    fake, operation = nccl_operation(0.0)
    assert not operation.poll()
    assert isinstance(fake.broken, TransferTimeout)
    fake.completed = True
    assert not operation.poll()
    fake.event = True
    assert operation.poll()
    assert operation.error is fake.broken


def test_nccl_error_aborts() -> None:
    fake, operation = nccl_operation(60)
    fake.completed = True
    wait_for(lambda: operation.poll() or fake.broken, "it is aborted")
    assert isinstance(fake.broken, PeerLost)
    assert not operation.poll()


def test_nccl_error_seen_only_at_the_end() -> None:
    fake, operation = nccl_operation(60)
    fake.event = fake.completed = True
    fake.raised = RuntimeError("NCCL error: remote process exited")  # type: ignore[assignment]
    assert operation.poll()
    assert operation.error is fake.raised
    assert fake.broken is fake.raised


# Real processes that are killed and stopped


class World:
    """A sender and receivers, each in a process of its own."""

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = hosts
        self.sides: list[Side] = []
        for rank, host in enumerate(self.hosts):
            spec = {"name": f"m{rank}", "role": "receive" if rank else "send", "device": "cpu", "host": "127.0.0.1"}
            self.sides.append(host.side(NAME, {"timeout": TIMEOUT_S}, spec))
            self.sides[rank].allocate(2, BIG)

    def group(self, group_id: str, ranks: list[int], address_of: int = 0) -> dict[int, int]:
        """The channel of each rank's side."""
        members, address = tuple(f"m{rank}" for rank in ranks), self.sides[address_of].address()
        attempts = {}
        for place, rank in enumerate(ranks):
            spec = {"group_id": group_id, "lane_key": KEY, "rank": place, "members": members, "address": address}
            attempts[rank] = self.sides[rank].begin_group(spec, [0, 1] if place else [], 10.0)
        return {r: wait_for(lambda r=r, a=a: self.sides[r].connected(a), "connected")[1] for r, a in attempts.items()}  # type: ignore[misc]

    def outcome(self, rank: int, channel: int) -> Exception | None:
        """Wait until nothing is in progress on `rank`; its error."""
        drained, took = self.sides[rank].drain(channel, 3 * TIMEOUT_S)
        assert drained
        assert took < TIMEOUT_S + 2.0
        return self.sides[rank].error(channel)

    def broadcast(self, channels: dict[int, int], seed: int, nbytes: int) -> None:
        """One whole bucket, with its bytes compared at every receiver."""
        sender, *receivers = channels
        data = bytes_of(seed, nbytes)
        for rank in receivers:
            self.sides[rank].landed()
            self.sides[rank].post_recv(channels[rank], 1, nbytes, b"h")
        self.sides[sender].write(0, data)
        work = self.sides[sender].post(channels[sender], 0, nbytes, b"h", 1)
        wait_for(lambda: self.sides[sender].state(work) == "done", "sent")
        for rank in receivers:
            (landed,) = wait_for(self.sides[rank].landed, "landed")
            assert landed.data == data


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    hosts = [Host() for _ in range(4)]
    yield hosts
    for host in hosts:
        host.end()


@pytest.fixture
def world(hosts: list[Host]) -> Iterator[World]:
    yield World(hosts)
    for place, host in enumerate(hosts):
        if host.peer.alive:
            host.forget()
        else:
            host.end()
            hosts[place] = Host()


def test_a_member_killed_in_mid_broadcast(world: World) -> None:
    channels = world.group("first", [0, 1, 2, 3])
    world.broadcast(channels, 5, 1000)
    for side in world.sides[1:]:
        side.release()
    for rank in (1, 3):
        world.sides[rank].post_recv(channels[rank], 0, BIG, b"h")
    world.sides[0].write(0, bytes_of(8, BIG))
    work = world.sides[0].post(channels[0], 0, BIG, b"h", 0)
    time.sleep(0.3)
    assert world.sides[0].state(work) == "pending", "it cannot end while member 2 does not take part"
    world.hosts[2].peer.kill()
    errors = {rank: world.outcome(rank, channels[rank]) for rank in (0, 1, 3)}
    assert world.sides[0].state(work) == "error"
    assert isinstance(errors[0], PeerLost)
    for rank in (1, 3):
        landed = world.sides[rank].landed()
        assert isinstance(errors[rank], PeerLost) or landed[0].data == bytes_of(8, BIG)
        assert bool(landed) == (errors[rank] is None)
    for rank in (0, 1, 3):
        world.sides[rank].close_channel(channels[rank])
    world.broadcast(world.group("second", [0, 1, 3]), 9, BIG)


def test_a_receiver_stopped_in_mid_broadcast(world: World) -> None:
    channels = world.group("first", [0, 1, 2, 3])
    for rank in (1, 2, 3):
        world.sides[rank].post_recv(channels[rank], 0, BIG, b"h")
    world.hosts[2].peer.stop()
    try:
        world.sides[0].write(0, bytes_of(8, BIG))
        work = world.sides[0].post(channels[0], 0, BIG, b"h", 0)
        errors = {rank: world.outcome(rank, channels[rank]) for rank in (0, 1, 3)}
        assert world.sides[0].state(work) == "error"
        assert isinstance(errors[0], TransferTimeout)
        assert errors[1] is None or isinstance(errors[1], TransferTimeout | PeerLost)
        assert errors[3] is None or isinstance(errors[3], TransferTimeout | PeerLost)
        for rank in (0, 1, 3):
            world.sides[rank].close_channel(channels[rank])
        world.broadcast(world.group("second", [0, 1, 3]), 9, BIG)
    finally:
        world.hosts[2].peer.cont()
    error = world.outcome(2, channels[2])
    assert isinstance(error, TransferTimeout | PeerLost)


def test_bytes_of_a_stopped_sender_never_land_late(world: World) -> None:
    channels = world.group("first", [0, 1])
    world.sides[0].write(0, bytes_of(8, BIG))
    world.sides[1].post_recv(channels[1], 0, BIG, b"h")
    world.hosts[0].peer.stop()
    try:
        error = world.outcome(1, channels[1])
        assert isinstance(error, TransferTimeout)
        assert "m0" in str(error)
        world.sides[1].write(0, bytes([0x5A]) * BIG)
    finally:
        world.hosts[0].peer.cont()
    try:
        world.sides[0].post(channels[0], 0, BIG, b"h", 0)
        world.outcome(0, channels[0])
    except PeerLost:
        pass
    assert world.sides[1].read(0) == bytes([0x5A]) * BIG
    assert world.sides[1].landed() == []


def test_a_stopped_sender_does_not_hold_up_those_who_come(world: World) -> None:
    address = world.sides[0].address()
    spec = {"group_id": "g", "lane_key": KEY, "rank": 1, "members": ("m0", "m1"), "address": address}
    world.hosts[0].peer.stop()
    try:
        attempt = world.sides[1].begin_group(spec, [0, 1], 1.0)
        started = time.monotonic()
        with pytest.raises((TransferTimeout, ConnectError)):
            wait_for(lambda: world.sides[1].connected(attempt), "it gives up", 10)
        assert time.monotonic() - started < 3.0
    finally:
        world.hosts[0].peer.cont()


# Beside the user's own collectives


def beside_a_users_group(rank: int, path: str, ports: list[str]) -> list[float]:
    """Two buses' groups and the user's default group, in turns."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    default = dist.group.WORLD
    sums = []

    def reduce(value: float) -> None:
        tensor = torch.tensor([value + rank])
        dist.all_reduce(tensor)
        sums.append(float(tensor))

    reduce(1.0)
    backend = NcclBackend(timeout=TIMEOUT_S)
    buses = [backend.endpoint(EndpointSpec(name="x", role="receive" if rank else "send")) for _ in range(2)]
    addresses: list[Any] = [[bus.address for bus in buses]]
    dist.broadcast_object_list(addresses, src=0)
    channels = []
    for index, bus in enumerate(buses):
        spec = GroupSpec(group_id="same name", lane_key=KEY, rank=rank, members=("s", "r"), address=addresses[0][index])
        channels.append(bus.connect_group(spec, [bus.allocate(64)] if rank else [], 20.0))
    reduce(2.0)
    for index, (bus, channel) in enumerate(zip(buses, channels, strict=True)):
        if rank:
            channel.post_recv(0, 64, b"h")
        else:
            bucket = bus.allocate(64)
            bucket.tensor.fill_(40 + index)
            channel.post_send(bucket, 64, b"h", 0)
        reduce(3.0)
        assert channel.drain(10.0)
        sums.extend(float(a.region.tensor[63]) for a in channel.arrivals())
    for bus in buses:
        bus.close()
    reduce(4.0)
    assert dist.is_initialized()
    assert dist.group.WORLD is default
    dist.destroy_process_group()
    assert not dist.is_initialized()
    return sums


def test_the_users_process_group_is_not_touched(tmp_path: Path) -> None:
    target = f"{HERE}:beside_a_users_group"
    sender, receiver = run_peers(
        (target, (0, str(tmp_path / "store"), [])), (target, (1, str(tmp_path / "store"), [])), timeout_s=60
    )
    assert sender == [3.0, 5.0, 7.0, 7.0, 9.0]
    assert receiver == [3.0, 5.0, 7.0, 40.0, 7.0, 41.0, 9.0]


def test_no_default_group_is_made(pair: tuple[Endpoint, Endpoint, Channel, Channel]) -> None:
    assert not dist.is_initialized()
    assert "MASTER_PORT" not in os.environ


def leave_with_a_receive_in_progress() -> str:
    """End the process without closing anything, while a receive waits."""
    backend = NcclBackend(timeout=1.0)
    sender = backend.endpoint(EndpointSpec(name="s", role="send"))
    receiver = backend.endpoint(EndpointSpec(name="r", role="receive"))
    channels = join([sender, receiver])
    channels[1].post_recv(0, 4096, b"never")
    receiver.close()
    return "left"


def test_a_process_ends_cleanly_with_a_receive_in_progress() -> None:
    assert run_peers((f"{HERE}:leave_with_a_receive_in_progress",), timeout_s=60) == ["left"]


def test_eight_groups_that_start_together() -> None:
    backend = NcclBackend(timeout=TIMEOUT_S)
    pairs = [
        [backend.endpoint(EndpointSpec(name=f"{role}{i}", role=role)) for role in ("send", "receive")] for i in range(8)
    ]
    results: list[Any] = [None] * 8

    def run(index: int) -> None:
        sender, receiver = pairs[index]
        tx, rx = join([sender, receiver])
        rx.post_recv(0, 4096, b"h")
        bucket = sender.allocate(4096)
        bucket.tensor.fill_(index)
        tx.post_send(bucket, 4096, b"h", 0)
        assert tx.drain(10)
        assert rx.drain(10)
        results[index] = rx.arrivals()[0].region.tensor.unique().tolist()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for endpoint in (e for pair in pairs for e in reversed(pair)):
        endpoint.close()
    assert results == [[i] for i in range(8)]
    assert len({pair[0].address for pair in pairs}) == 8
