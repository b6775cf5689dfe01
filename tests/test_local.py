"""Backend `local` beyond the conformance suite: whose memory it is, what is left behind, and hostile peers."""

import array
import fcntl
import gc
import os
import resource
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import msgspec
import pytest
import torch

import weightbus_local.channel as channel_module
from weightbus.backend import Arrival, Channel, EndpointSpec, State
from weightbus.errors import (
    BackendUnavailable,
    ConfigError,
    ConnectError,
    EndpointBusy,
    EndpointClosed,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    TransferTimeout,
    TransportError,
)
from weightbus.testing.peers import ParentLink, Peer
from weightbus_local import LocalBackend
from weightbus_local.channel import Offer
from weightbus_local.cuda import Span
from weightbus_local.endpoint import Address, LocalEndpoint
from weightbus_local.host import start_time
from weightbus_local.wire import VERSION, Frame, Kind

HERE = str(Path(__file__).resolve())
KEY = bytes(range(16))
MIB = 1 << 20
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def make(role: str = "send", name: str = "") -> LocalEndpoint:
    return LocalBackend().endpoint(EndpointSpec(name=name or role, role=role))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:weightbus")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_names() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "weightbus" in name]


def is_listening(address: bytes) -> bool:
    return Address.unpack(address).socket_name[1:].decode() in Path("/proc/net/unix").read_text()


def until(done: Callable[[], Any], *endpoints: LocalEndpoint, timeout_s: float = 10.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (value := done()):
        assert time.monotonic() < end, "it did not happen in time"
        for endpoint in endpoints:
            endpoint.progress()
    return value


def next_arrival(rx: Channel, *endpoints: LocalEndpoint) -> Arrival:
    return until(rx.arrivals, *endpoints)[0]


@pytest.fixture
def pair() -> Iterator[SimpleNamespace]:
    sender, receiver = make("send"), make("receive")
    rx = receiver.listen(KEY, [])
    tx = sender.connect(receiver.address, KEY, 5.0)
    yield SimpleNamespace(sender=sender, receiver=receiver, tx=tx, rx=rx)
    sender.close()
    receiver.close()


# ---- whose memory it is


def test_the_arriving_region_is_the_senders_memory(pair: SimpleNamespace) -> None:
    region = pair.sender.allocate(4097)
    region.tensor.fill_(7)
    work = pair.tx.post_send(region, 4097, b"h", 5)
    arrival = next_arrival(pair.rx, pair.sender, pair.receiver)
    assert (arrival.slot, arrival.nbytes, arrival.header) == (5, 4097, b"h")
    assert arrival.region.tensor.data_ptr() != region.tensor.data_ptr()
    assert arrival.region.tensor.tolist() == [7] * 4097
    region.tensor[4096] = 9
    assert arrival.region.tensor[4096] == 9
    pair.sender.progress()
    assert work.state is State.PENDING
    pair.rx.release(arrival)
    until(lambda: work.state is State.DONE, pair.sender)


def test_posts_end_as_they_are_released_in_any_order(pair: SimpleNamespace) -> None:
    region = pair.sender.allocate(64)
    works = [pair.tx.post_send(region, 64, b"%d" % k, 0) for k in range(3)]
    got: list[Arrival] = []
    until(lambda: got.extend(pair.rx.arrivals()) or len(got) == 3, pair.receiver, pair.sender)
    for k in (1, 0, 2):
        assert works[k].state is State.PENDING
        pair.rx.release(got[k])
        pair.rx.release(got[k])  # said once
        until(lambda k=k: works[k].state is State.DONE, pair.sender)
    assert pair.tx.error is None


def test_a_receiver_that_releases_what_it_was_not_sent_is_cut_off(pair: SimpleNamespace) -> None:
    work = pair.tx.post_send(pair.sender.allocate(64), 64, b"", 0)
    next_arrival(pair.rx, pair.sender, pair.receiver)
    pair.rx._link.send(Frame(Kind.RELEASED, nbytes=1))
    until(lambda: pair.tx.error is not None, pair.sender)
    assert isinstance(pair.tx.error, RemoteProtocolError)
    assert work.state is State.ERROR and work.error is pair.tx.error


def test_a_region_is_mapped_once_and_its_reader_keeps_no_descriptor(pair: SimpleNamespace) -> None:
    region = pair.sender.allocate(64)
    before = (mappings(), descriptors())
    for value in range(5):
        region.tensor.fill_(value)
        pair.tx.post_send(region, 64, b"", 0)
        arrival = next_arrival(pair.rx, pair.sender, pair.receiver)
        assert arrival.region.tensor.tolist() == [value] * 64
        pair.rx.release(arrival)
    assert mappings() == before[0] + 1
    assert descriptors() - before[1] in (0, 1)  # the accepted connection


def test_memory_can_neither_shrink_nor_grow_and_is_populated() -> None:
    sender = make()
    region = sender.allocate(MIB)
    fd = region.handle.frame.fd
    for size in (MIB - 1, MIB + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    assert os.fstat(fd).st_blocks * 512 >= MIB
    sender.close()


def test_a_freed_region_is_unmapped_by_the_reader_after_its_last_release(pair: SimpleNamespace) -> None:
    base = mappings()
    region = pair.sender.allocate(MIB)
    region.tensor.fill_(3)
    pair.tx.post_send(region, MIB, b"", 0)
    arrival = next_arrival(pair.rx, pair.sender, pair.receiver)
    pair.sender.free(region)
    del region
    for _ in range(5):
        pair.receiver.progress()
        pair.sender.progress()
    assert arrival.region.tensor[MIB - 1] == 3
    assert mappings() == base + 2
    pair.rx.release(arrival)
    del arrival
    until(lambda: mappings() == base, pair.sender, pair.receiver)
    assert pair.rx.error is None and pair.tx.error is None


def test_a_view_outlives_the_endpoints(pair: SimpleNamespace) -> None:
    region = pair.sender.allocate(4096)
    region.tensor.fill_(8)
    pair.tx.post_send(region, 4096, b"", 0)
    theirs = next_arrival(pair.rx, pair.sender, pair.receiver).region.tensor
    ours = region.tensor
    pair.sender.close()
    pair.receiver.close()
    del region
    ours[0] = 1
    assert theirs.tolist() == [1] + [8] * 4095


def test_more_memory_than_there_is_is_refused_before_it_is_touched() -> None:
    sender = make()
    with pytest.raises(TransportError, match=r"are free.*bucket_bytes"):
        sender.allocate(1 << 50)
    with pytest.raises(LocalProtocolError):
        sender.allocate(-1)
    sender.close()


def test_running_out_of_descriptors_is_said() -> None:
    sender = make()
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 5, old[1]))
    try:
        with pytest.raises(TransportError, match="ulimit -n"):
            [sender.allocate(1) for _ in range(100)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)
        sender.close()


def test_host_memory_of_the_caller_is_refused_with_advice() -> None:
    sender = make()
    with pytest.raises(TransportError, match="allocate"):
        sender.register(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(LocalProtocolError):
        sender.register(torch.zeros(8))
    sender.close()


# ---- posting


def test_a_full_socket_keeps_posts_pending_and_loses_none(pair: SimpleNamespace) -> None:
    region = pair.sender.allocate(16)
    headers = [bytes([k % 251]) * 4096 for k in range(400)]
    works = [pair.tx.post_send(region, k % 17, header, k) for k, header in enumerate(headers)]
    assert not pair.tx.drain(0.05)
    got: list[Arrival] = []
    until(lambda: got.extend(pair.rx.arrivals()) or len(got) == 400, pair.receiver, pair.sender)
    assert [(a.header, a.slot, a.nbytes) for a in got] == [(h, k, k % 17) for k, h in enumerate(headers)]
    assert {work.state for work in works} == {State.PENDING}
    for arrival in got:
        pair.rx.release(arrival)
    until(lambda: all(work.state is State.DONE for work in works), pair.sender, pair.receiver)
    assert pair.tx.drain(0.0)


def test_the_endpoints_descriptor_wakes_for_posts_and_for_room(pair: SimpleNamespace) -> None:
    import select

    def ready(endpoint: LocalEndpoint) -> bool:
        return bool(select.select(endpoint.fds(), [], [], 0)[0])

    until(lambda: not ready(pair.receiver), pair.receiver)
    assert not ready(pair.sender)
    region = pair.sender.allocate(16)
    works = [pair.tx.post_send(region, 0, b"x" * 4096, 0) for _ in range(100)]
    assert ready(pair.receiver)
    assert works[-1].state is State.PENDING
    assert not ready(pair.sender)
    while ready(pair.receiver):
        pair.receiver.progress()
    assert ready(pair.sender)


def test_misuse_is_refused(pair: SimpleNamespace) -> None:
    region, foreign = pair.sender.allocate(16), pair.receiver.allocate(16)
    for args in ((foreign, 1, b"", 0), (region, 17, b"", 0), (region, -1, b"", 0), (region, 1, b"x" * 4097, 0)):
        with pytest.raises(LocalProtocolError):
            pair.tx.post_send(*args)
    with pytest.raises(LocalProtocolError):
        pair.rx.post_send(foreign, 1, b"", 0)
    with pytest.raises(EndpointBusy):
        pair.receiver.listen(KEY, [])
    with pytest.raises(LocalProtocolError):
        pair.sender.address  # noqa: B018
    pair.sender.free(region)
    with pytest.raises(LocalProtocolError):
        pair.sender.free(region)
    with pytest.raises(LocalProtocolError):
        pair.tx.post_send(region, 1, b"", 0)
    pair.sender.close()
    with pytest.raises(EndpointClosed):
        pair.sender.allocate(1)
    with pytest.raises(EndpointClosed):
        pair.tx.post_send(region, 1, b"", 0)


def test_posts_before_the_senders_end_arrive_though_its_inbox_was_not_read(pair: SimpleNamespace) -> None:
    old, new = pair.sender.allocate(8), pair.sender.allocate(8)
    pair.tx.post_send(old, 8, b"1", 0)
    pair.rx.release(next_arrival(pair.rx, pair.receiver))
    pair.sender.free(old)
    until(lambda: not pair.receiver.progress(), pair.receiver)  # the answer lies in the sender's inbox, unread
    new.tensor.fill_(6)
    pair.tx.post_send(new, 8, b"2", 1)
    pair.sender.close()
    arrival = next_arrival(pair.rx, pair.receiver)
    assert (arrival.header, arrival.region.tensor.tolist()) == (b"2", [6] * 8)
    assert isinstance(until(lambda: pair.rx.error, pair.receiver), PeerLost)


# ---- connecting


def altered(address: bytes, **change: Any) -> bytes:
    return msgspec.msgpack.encode(attrs.evolve(Address.unpack(address), **change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"boot": "another"}, "another host.*nixl"),
        ({"network": 1}, "network namespace.*--network=host"),
        ({"version": 99}, "version 99"),
        ({"socket_name": b"\0weightbus-nobody"}, "Nobody listens"),
        ({"socket_name": b"\0" + b"x" * 300}, "Nobody listens"),
    ],
)
def test_an_address_that_cannot_be_reached_says_why(pair: SimpleNamespace, change: dict[str, Any], text: str) -> None:
    waiting = make("receive")
    waiting.listen(KEY, [])
    before = descriptors()
    with pytest.raises(ConnectError, match=text):
        pair.sender.connect(altered(waiting.address, **change), KEY, 1.0)
    assert descriptors() == before
    waiting.close()


@pytest.mark.parametrize("junk", [b"", b"\xc1", b"\x93\x01\x02\x03", os.urandom(100)])
def test_a_broken_address_is_a_connect_error(pair: SimpleNamespace, junk: bytes) -> None:
    with pytest.raises(ConnectError):
        pair.sender.connect(junk, KEY, 1.0)


def test_a_listener_that_never_accepts_ends_in_a_timeout() -> None:
    sender, receiver = make("send"), make("receive")
    receiver.listen(KEY, [])
    with pytest.raises(TransferTimeout, match="receive"):
        [sender.connect(receiver.address, KEY, 0.1) for _ in range(64)]
    sender.close()
    receiver.close()


def test_silent_strangers_do_not_keep_the_sender_out() -> None:
    sender, receiver = make("send"), make("receive")
    rx = receiver.listen(KEY, [])
    strangers = []
    for _ in range(40):
        strangers.append(raw_socket(receiver))
        receiver.progress()
    assert is_closed(strangers[0])
    tx = sender.connect(receiver.address, KEY, 1.0)
    tx.post_send(sender.allocate(4), 4, b"mine", 0)
    assert next_arrival(rx, receiver).header == b"mine"
    for stranger in strangers:
        stranger.close()
    sender.close()
    receiver.close()


# ---- hostile peers


def raw_socket(receiver: LocalEndpoint) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(5)
    sock.connect(Address.unpack(receiver.address).socket_name)
    return sock


def hello(key: bytes = KEY, version: int = VERSION) -> tuple[bytes, list[int]]:
    return Frame(Kind.HELLO, region=version, tail=key).pack(), []


def memfd(size: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def offered(number: int = 1, size: int = 64, claim: int | None = None, seals: int = fcntl.F_SEAL_SHRINK) -> Any:
    claim = size if claim is None else claim
    return Frame(Kind.MAP_HOST, number, 0, claim).pack(), [memfd(size, seals)]


SPAN = Span(b"u" * 16, b"h" * 64, 0, 0, 64)
HOSTILE: dict[str, Callable[[], list[tuple[bytes, list[int]]]]] = {
    "truncated": lambda: [(b"\x04\0\0", [])],
    "unknown kind": lambda: [(b"\xff" + Frame(Kind.POST).pack()[1:], [])],
    "oversized": lambda: [offered(), (Frame(Kind.POST, 1, 0, 1).pack() + b"x" * 4097, [])],
    "post without a region": lambda: [(Frame(Kind.POST, 1, 0, 0).pack(), [])],
    "post beyond the region": lambda: [offered(), (Frame(Kind.POST, 1, 0, 65).pack(), [])],
    "post of 2**63 bytes": lambda: [offered(), (Frame(Kind.POST, 1, 0, 1 << 63).pack(), [])],
    "post after unmap": lambda: [offered(), (Frame(Kind.UNMAP, 1).pack(), []), (Frame(Kind.POST, 1).pack(), [])],
    "unmap of nothing": lambda: [(Frame(Kind.UNMAP, 1).pack(), [])],
    "region twice": lambda: [offered(), offered()],
    "memory that can shrink": lambda: [offered(seals=0)],
    "memory smaller than said": lambda: [offered(claim=65)],
    "memory of 2**63 bytes": lambda: [offered(claim=1 << 63)],
    "not memory": lambda: [(Frame(Kind.MAP_HOST, 1, 0, 64).pack(), [os.open("/dev/zero", os.O_RDWR)])],
    "map without a descriptor": lambda: [(Frame(Kind.MAP_HOST, 1, 0, 64).pack(), [])],
    "two descriptors": lambda: [(Frame(Kind.MAP_HOST, 1, 0, 64).pack(), [memfd(64), memfd(64)])],
    "many descriptors": lambda: [(Frame(Kind.MAP_HOST, 1, 0, 64).pack(), [memfd(64) for _ in range(100)])],
    "descriptor with a post": lambda: [(Frame(Kind.POST, 1).pack(), [memfd(64)])],
    "descriptors after a wrong frame": lambda: [(Frame(Kind.UNMAP, 1).pack(), []), offered(), offered(2)],
    "hello again": lambda: [hello()],
    "what a receiver says": lambda: [offered(), (Frame(Kind.DROPPED, 1).pack(), [])],
    "cuda region of another size": lambda: [(Frame(Kind.MAP_CUDA, 1, 0, 65, SPAN.pack()).pack(), [])],
    "cuda region cut short": lambda: [(Frame(Kind.MAP_CUDA, 1, 0, 64, SPAN.pack()[:-1]).pack(), [])],
}


def send_raw(sock: socket.socket, messages: list[tuple[bytes, list[int]]]) -> None:
    for data, fds in messages:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sock.sendmsg([data], rights)
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_sender_ends_the_channel_and_leaves_nothing(attack: str) -> None:
    receiver = make("receive")
    rx = receiver.listen(KEY, [])
    before = (descriptors() - 1, mappings(), Path("/proc/self/maps").read_text().count("memfd:hostile"))
    sock = raw_socket(receiver)
    send_raw(sock, [hello(), *HOSTILE[attack]()])
    error = until(lambda: rx.error, receiver)
    assert type(error) is RemoteProtocolError
    assert rx.arrivals() == []
    assert is_closed(sock)
    sock.close()
    now = (descriptors(), mappings(), Path("/proc/self/maps").read_text().count("memfd:hostile"))
    assert now == before  # the listening socket has gone with the channel
    receiver.close()


@pytest.mark.parametrize("bad", [[b"bad"], [Frame(Kind.UNMAP, 1).pack(), Frame(Kind.POST, 1).pack()]])
def test_arrivals_before_a_hostile_frame_stay_valid_until_released(bad: list[bytes]) -> None:
    receiver = make("receive")
    rx = receiver.listen(KEY, [])
    sock = raw_socket(receiver)
    send_raw(sock, [hello(), offered(), (Frame(Kind.POST, 1, 3, 64, b"good").pack(), [])])
    send_raw(sock, [(frame, []) for frame in bad])
    until(lambda: rx.error, receiver)
    (arrival,) = rx.arrivals()
    assert (arrival.header, arrival.slot, arrival.region.tensor.tolist()) == (b"good", 3, [0] * 64)
    with pytest.raises(BrokenPipeError):
        sock.send(b"more")
    rx.release(arrival)
    rx.release(arrival)
    assert is_closed(sock)
    sock.close()
    receiver.close()


def is_closed(sock: socket.socket) -> bool:
    """Whether the other side closes within the socket's timeout; what it said before is skipped."""
    try:
        while sock.recv(100):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("first", [hello(b"\0" * 16), hello(KEY[:15]), hello(KEY, VERSION + 1), offered, (b"\x04", [])])
def test_without_the_lane_key_nothing_is_looked_at_and_the_lane_stays_open(first: Any) -> None:
    sender, receiver = make("send"), make("receive")
    rx = receiver.listen(KEY, [])
    before = mappings()
    sock = raw_socket(receiver)
    send_raw(sock, [first() if callable(first) else first, offered(), (Frame(Kind.POST, 1, 0, 1).pack(), [])])
    for _ in range(3):
        receiver.progress()
    assert is_closed(sock)
    assert (rx.error, rx.arrivals(), mappings()) == (None, [], before)
    tx = sender.connect(receiver.address, KEY, 1.0)
    tx.post_send(sender.allocate(4), 4, b"mine", 0)
    assert next_arrival(rx, receiver).header == b"mine"
    sock.close()
    sender.close()
    receiver.close()


def test_a_second_sender_is_refused(pair: SimpleNamespace) -> None:
    other, address = make("send"), pair.receiver.address
    until(lambda: not pair.receiver.progress(), pair.receiver)
    with pytest.raises(ConnectError, match="taken by another sender"):
        other.connect(address, KEY, 1.0)
    other.close()


@pytest.mark.parametrize("frame", [Frame(Kind.POST, 1), Frame(Kind.DROPPED, 77)])
def test_a_hostile_receiver_ends_the_senders_channel(frame: Frame) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"\0weightbus-test-" + os.urandom(8).hex().encode())
    listener.listen()
    receiver, sender = make("receive"), make("send")
    receiver.listen(KEY, [])
    tx = sender.connect(altered(receiver.address, socket_name=listener.getsockname()), KEY, 1.0)
    sock, _ = listener.accept()
    sock.send(frame.pack())
    assert isinstance(until(lambda: tx.error, sender), RemoteProtocolError)
    for thing in (sock, listener, receiver, sender):
        thing.close()


def connect_as_another_user(link: ParentLink, address: bytes) -> None:
    os.setuid(65534)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(20)
    sock.connect(Address.unpack(address).socket_name)
    send_raw(sock, [hello(), offered(), (Frame(Kind.POST, 1, 0, 1).pack(), [])])
    link.send("sent")
    link.recv()
    link.send(is_closed(sock))


@root_only
def test_another_user_is_refused_even_with_the_lane_key() -> None:
    receiver = make("receive")
    rx = receiver.listen(KEY, [])
    with Peer(f"{HERE}:connect_as_another_user", (receiver.address,)) as peer:
        assert peer.recv() == "sent"
        until(receiver.progress)
        peer.send("look")
        assert peer.recv() is True
    assert (rx.error, rx.arrivals()) == (None, [])
    receiver.close()


def listen_as_another_user(link: ParentLink) -> None:
    os.setuid(65534)
    receiver = make("receive")
    receiver.listen(KEY, [])
    link.send(receiver.address)
    link.recv()


@root_only
def test_a_sender_gives_nothing_to_another_user() -> None:
    sender = make("send")
    with Peer(f"{HERE}:listen_as_another_user") as peer, pytest.raises(ConnectError, match="another user"):
        sender.connect(peer.recv(), KEY, 1.0)
    sender.close()


# ---- death and what is left


def sending_peer(link: ParentLink, address: bytes, fork: bool) -> None:
    sender = make("send")
    tx = sender.connect(address, KEY, 5.0)
    region = sender.allocate(MIB)
    region.tensor.fill_(42)
    tx.post_send(region, MIB, b"last words", 0)
    child = os.fork() if fork else 0
    if fork and not child:
        time.sleep(60)
    link.send(child)
    link.recv()


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a forked child"])
def test_a_killed_sender_is_noticed_and_leaves_only_what_is_held(fork: bool) -> None:
    base = mappings()
    receiver = make("receive")
    rx = receiver.listen(KEY, [])
    address = receiver.address
    assert is_listening(address)
    with Peer(f"{HERE}:sending_peer", (address, fork)) as peer:
        child = peer.recv()
        peer.kill()
        try:
            assert isinstance(until(lambda: rx.error, receiver), PeerLost)
            (arrival,) = rx.arrivals()
            assert arrival.region.tensor[MIB - 1] == 42
            rx.release(arrival)
            del arrival
            assert mappings() == base
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
    assert not is_listening(address)
    receiver.close()


def receiving_peer(link: ParentLink) -> None:
    receiver = make("receive")
    rx = receiver.listen(KEY, [])
    link.send(receiver.address)
    arrival = next_arrival(rx, receiver)
    link.send(arrival.header)
    link.recv()


def test_a_killed_receiver_is_noticed_and_the_sender_lives_on() -> None:
    base = mappings()
    sender = make("send")
    region = sender.allocate(MIB)
    with Peer(f"{HERE}:receiving_peer") as peer:
        address = peer.recv()
        tx = sender.connect(address, KEY, 5.0)
        tx.post_send(region, MIB, b"hello", 0)
        assert peer.recv() == b"hello"
        peer.kill()
        until(lambda tx=tx: tx.error is not None, sender)
        assert isinstance(tx.error, PeerLost)
    with pytest.raises(PeerLost):
        tx.post_send(region, 1, b"", 0)
    receiver = make("receive")
    rx = receiver.listen(KEY, [])
    tx = sender.connect(receiver.address, KEY, 5.0)
    tx.post_send(region, MIB, b"again", 0)
    assert next_arrival(rx, receiver).header == b"again"
    receiver.close()
    sender.close()
    del region, tx, rx
    gc.collect()
    assert (is_listening(address), mappings()) == (False, base)


def test_a_closed_endpoint_leaves_no_socket_memory_or_descriptor() -> None:
    gc.collect()
    base = (descriptors(), mappings(), shared_names())
    for _ in range(3):
        sender, receiver = make("send"), make("receive")
        rx = receiver.listen(KEY, [])
        address = receiver.address
        assert is_listening(address)
        tx = sender.connect(receiver.address, KEY, 5.0)
        regions = [sender.allocate(4096) for _ in range(3)]
        for region in regions:
            tx.post_send(region, 1, b"", 0)
        arrivals = until(rx.arrivals, receiver)
        receiver.close()
        sender.close()
        del sender, receiver, rx, tx, regions, region, arrivals
        gc.collect()
        assert (descriptors(), mappings(), shared_names()) == base
        assert not is_listening(address)


# ---- CUDA rules that need no GPU


class FakeDriver:
    """Opens "CUDA" spans as host memory."""

    def open(self, span: Span, *, same_process: bool) -> Any:
        return SimpleNamespace(tensor=lambda: torch.zeros(span.offset + span.nbytes, dtype=torch.uint8))


class Owner:
    pass


def test_cuda_memory_lives_until_its_importer_has_let_go(pair: SimpleNamespace, monkeypatch: Any) -> None:
    monkeypatch.setattr(channel_module, "driver", FakeDriver)
    owner = Owner()
    alive = weakref.ref(owner)
    offer = Offer(Frame(Kind.MAP_CUDA, 9, 0, 64, SPAN.pack()), owner)
    del owner
    pair.tx.offer(offer)
    pair.tx._link.send(Frame(Kind.POST, 9, 0, 64, b"held"))
    del offer
    arrival = next_arrival(pair.rx, pair.receiver)
    pair.sender.close()
    until(lambda: pair.rx.error, pair.receiver)
    channel_module.sweep()
    assert alive() is not None
    pair.rx.release(arrival)
    channel_module.sweep()
    assert alive() is None


def test_a_freed_cuda_region_waits_for_the_importers_word(pair: SimpleNamespace, monkeypatch: Any) -> None:
    monkeypatch.setattr(channel_module, "driver", FakeDriver)
    region = pair.sender._offer(torch.zeros(64, dtype=torch.uint8), Kind.MAP_CUDA, Owner(), tail=SPAN.pack())
    alive = weakref.ref(region.handle.owner)
    pair.tx.post_send(region, 64, b"", 0)
    arrival = next_arrival(pair.rx, pair.receiver)
    pair.sender.free(region)
    del region
    for _ in range(3):
        pair.receiver.progress()
        pair.sender.progress()
    assert alive() is not None
    pair.rx.release(arrival)
    until(lambda: alive() is None, pair.sender, pair.receiver)
    assert pair.tx.error is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_cuda_is_unavailable() -> None:
    with pytest.raises(BackendUnavailable, match="device='cpu'"):
        LocalBackend().endpoint(EndpointSpec(name="x", role="send", device=torch.device("cuda", 0)))
    probe = LocalBackend().probe()
    assert (probe.ok, probe.facts["CUDA"]) == (True, "none")


def test_unknown_options_are_refused_all_at_once() -> None:
    with pytest.raises(ConfigError, match="colour, shape"):
        LocalBackend(shape=1, colour=2)


def test_a_process_that_has_ended_and_was_not_waited_for_counts_as_ended() -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert start_time(child.pid) > 0
    child.kill()
    end = time.monotonic() + 10
    while start_time(child.pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert start_time(child.pid) == 0
    child.wait(10)
