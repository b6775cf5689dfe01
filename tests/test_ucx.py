"""Backend `ucx`: what the conformance suite cannot ask for."""

from __future__ import annotations

import importlib.util
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

if importlib.util.find_spec("ucxx") is None:  # importing it here would change the environment of the tests
    pytest.skip("ucxx is missing: pip install 'weightbus[ucx]'", allow_module_level=True)

import weightbus_ucx.backend as backend_module
from weightbus.backend import EndpointSpec, State
from weightbus.errors import (
    BackendUnavailable,
    ConfigError,
    ConnectError,
    EndpointClosed,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    WeightBusError,
)
from weightbus.testing.sides import Host, resources
from weightbus_ucx import UcxBackend
from weightbus_ucx.channel import _HEADER, _HEADER_TAG, lane_tag
from weightbus_ucx.library import interface_of, settings_for
from weightbus_ucx.link import Address, Hello, Kind, decode, encode

ROOT = Path(__file__).parent.parent
KEY = b"0123456789abcdef"
TRANSPORTS = [
    pytest.param({}, id="default"),
    pytest.param({"tls": "tcp,self"}, id="tcp"),
    pytest.param({"tls": "posix,tcp,self"}, id="shm"),
]
MIB = 1 << 20


@attrs.define
class Pair:
    """A sender and a receiver of this process, joined."""

    sender: Any
    receiver: Any
    tx: Any
    rx: Any
    slots: list[torch.Tensor]
    taken: list[Any] = attrs.field(factory=list)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.sender.progress()
            self.receiver.progress()
            self.taken += self.rx.arrivals()

    def until(self, condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            self.turn()
            assert time.monotonic() < end, "not in time"

    def region(self, nbytes: int, value: int) -> Any:
        region = self.sender.allocate(nbytes)
        region.tensor.fill_(value)
        return region


def connect(sender: Any, receiver: Any, address: bytes, key: bytes = KEY, timeout_s: float = 10.0) -> Any:
    """Connect on a helper thread while the receiver progresses; the channel, or what `connect` raised."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(sender.connect(address, key, timeout_s))
        except WeightBusError as exc:
            result.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        receiver.progress()
    thread.join()
    return result[0]


@pytest.fixture
def lane() -> Iterator[Callable[..., Pair]]:
    """Opens lanes whose slots are the test's own memory, filled with 0xA5."""
    ends: list[Any] = []

    def open_lane(host: str = "127.0.0.1", slots: int = 2, nbytes: int = 8 * MIB, **options: Any) -> Pair:
        backend = UcxBackend(**options)
        receiver = backend.endpoint(EndpointSpec(name="e0/0", role="receive", host=host))
        sender = backend.endpoint(EndpointSpec(name="sender/0", role="send", host=host))
        ends.extend((sender, receiver))
        memory = [torch.full((nbytes,), 0xA5, dtype=torch.uint8) for _ in range(slots)]
        rx = receiver.listen(KEY, [receiver.register(tensor) for tensor in memory])
        tx = connect(sender, receiver, receiver.address)
        assert not isinstance(tx, Exception), tx
        return Pair(sender, receiver, tx, rx, memory)

    yield open_lane
    for end in ends:
        end.close()


@pytest.fixture
def listening() -> Iterator[Any]:
    """A receiver that nobody has joined, and the address of its socket."""
    end = UcxBackend().endpoint(EndpointSpec(name="e0/0", role="receive", host="127.0.0.1"))
    end.listen(KEY, [end.allocate(4096)])
    yield end
    end.close()


def dial(end: Any) -> socket.socket:
    address = decode(end.address, Address)
    return socket.create_connection((address.host, address.port), timeout=5)


def closed_by_peer(sock: socket.socket, end: Any, within_s: float = 5.0) -> bool:
    sock.setblocking(False)
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        end.progress()
        try:
            return sock.recv(1) == b""
        except BlockingIOError:
            continue
        except ConnectionResetError:
            return True
    return False


def hello(key: bytes = KEY, worker: bytes = b"") -> bytes:
    data = encode(Hello(name="x", incarnation="i", lane_key=key, worker=worker))
    return struct.pack("!BI", Kind.HELLO, len(data)) + data


# Strangers


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(hello(bytes(16)), id="wrong key"),
        pytest.param(hello(KEY[:15]), id="short key"),
        pytest.param(struct.pack("!BI", Kind.HELLO, 0xFFFFFFFF), id="4 GiB frame"),
        pytest.param(struct.pack("!BI", 77, 4) + b"abcd", id="unknown kind"),
        pytest.param(struct.pack("!BI", Kind.HELLO, 4) + b"\x80abc", id="not a hello"),
        pytest.param(struct.pack("!BI", Kind.ACK, 8) + bytes(8), id="an ack first"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
    ],
)
def test_a_stranger_is_closed_and_the_lane_stays_free(listening: Any, data: bytes) -> None:
    with dial(listening) as sock:
        sock.sendall(data)
        assert closed_by_peer(sock, listening)
    sender = UcxBackend().endpoint(EndpointSpec(name="sender/0", role="send", host="127.0.0.1"))
    assert not isinstance(connect(sender, listening, listening.address), Exception)
    sender.close()


def test_a_silent_stranger_is_closed_after_a_while(listening: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightbus_ucx.endpoint._HELLO_S", 0.2)
    with dial(listening) as sock:
        assert closed_by_peer(sock, listening)


def test_strangers_are_bounded(listening: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightbus_ucx.endpoint._MAX_STRANGERS", 2)
    socks = [dial(listening) for _ in range(3)]
    assert closed_by_peer(socks[0], listening)
    assert not closed_by_peer(socks[2], listening, within_s=0.3)
    for sock in socks:
        sock.close()


def test_a_wrong_lane_key_names_the_place_and_what_to_do(listening: Any) -> None:
    sender = UcxBackend().endpoint(EndpointSpec(name="sender/0", role="send", host="127.0.0.1"))
    error = connect(sender, listening, listening.address, key=bytes(16))
    assert isinstance(error, ConnectError)
    assert "closed the connection" in str(error)
    assert "lane key" in str(error)
    sender.close()


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n", struct.pack("!BI", Kind.READY, 0), struct.pack("!BI", Kind.WELCOME, 3) + b"abc"],
    ids=["http", "ready first", "not a welcome"],
)
def test_something_else_at_the_address_is_a_connect_error(answer: bytes) -> None:
    sender = UcxBackend().endpoint(EndpointSpec(name="sender/0", role="send", host="127.0.0.1"))
    before = resources()["fds"]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            sock.sendall(answer)
            sock.recv(1 << 16)
            sock.close()

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        with pytest.raises(ConnectError, match=str(port)):
            sender.connect(encode(Address(host="127.0.0.1", port=port)), KEY, 5.0)
        thread.join()
    assert resources()["fds"] == before
    sender.close()


def test_a_lane_that_is_taken_refuses_a_second_sender(lane: Callable[..., Pair]) -> None:
    pair = lane()
    other = UcxBackend().endpoint(EndpointSpec(name="sender/1", role="send", host="127.0.0.1"))
    assert isinstance(connect(other, pair.receiver, pair.receiver.address), ConnectError)
    work = pair.tx.post_send(pair.region(100, 1), 100, b"h", 0)
    pair.until(lambda: work.state is State.DONE and pair.taken)
    other.close()


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "silent"])
def test_an_attempt_that_does_not_get_through_is_displaced(listening: Any, gone: bool) -> None:
    """It has the lane key and was welcomed, but its first UCX message never comes."""
    sender: Any = UcxBackend().endpoint(EndpointSpec(name="sender/0", role="send", host="127.0.0.1"))
    with dial(listening) as sock:
        sock.sendall(hello(worker=sender.worker_address))
        while not select.select([sock], [], [], 0)[0]:
            listening.progress()
        if gone:
            sock.close()
        assert not isinstance(connect(sender, listening, listening.address), Exception)
    sender.close()


def test_tags_of_lanes_and_incarnations_differ() -> None:
    one = lane_tag(KEY, b"n" * 16, "a")
    assert one & 0xFFF == 0
    assert (
        len({one, lane_tag(bytes(16), b"n" * 16, "a"), lane_tag(KEY, b"m" * 16, "a"), lane_tag(KEY, b"n" * 16, "b")})
        == 4
    )


# Headers that a broken peer could send


@pytest.mark.parametrize(
    "header",
    [
        pytest.param((0, 8 * MIB + 1, 0, 0), id="more bytes than the slot"),
        pytest.param((0, 1 << 62, 0, 0), id="absurd bytes"),
        pytest.param((0, 10, 1, 0), id="another slot"),
        pytest.param((0, 10, 0, 5000), id="header longer than its message"),
        pytest.param((2, 10, 0, 0), id="from the future"),
        pytest.param((1 << 60, 10, 0, 0), id="absurd place"),
    ],
)
def test_a_header_that_does_not_fit_breaks_the_lane(
    lane: Callable[..., Pair], header: tuple[int, int, int, int]
) -> None:
    pair = lane()
    data = np.frombuffer(_HEADER.pack(*header), np.uint8).copy()
    request = pair.tx._peer.send(pair.sender.message(data, pair.tx._tag | _HEADER_TAG | 0))
    pair.until(lambda: pair.rx.error and pair.tx.error)
    assert isinstance(pair.rx.error, RemoteProtocolError)
    assert isinstance(pair.tx.error, PeerLost)
    assert pair.taken == []
    assert request is not None


def test_a_bucket_that_comes_twice_breaks_the_lane(lane: Callable[..., Pair]) -> None:
    pair = lane()
    first = pair.tx.post_send(pair.region(10, 1), 10, b"", 0)
    pair.until(lambda: first.state is State.DONE and pair.taken)
    pair.rx.release(pair.taken[0])
    pair.tx._places = 0
    pair.tx.post_send(pair.region(10, 2), 10, b"", 0)
    pair.until(lambda: pair.rx.error)
    assert isinstance(pair.rx.error, RemoteProtocolError)
    assert len(pair.taken) == 1


def test_arrivals_come_in_the_order_of_posting(lane: Callable[..., Pair]) -> None:
    """The first bucket takes longest to land."""
    pair = lane(slots=4)
    for place, nbytes in enumerate((8 * MIB, 0, 10, 3 * MIB)):
        pair.tx.post_send(pair.region(max(nbytes, 1), place), nbytes, b"%d" % place, place)
    pair.until(lambda: len(pair.taken) == 4)
    assert [(a.header, a.nbytes, a.slot) for a in pair.taken] == [
        (b"0", 8 * MIB, 0), (b"1", 0, 1), (b"2", 10, 2), (b"3", 3 * MIB, 3)
    ]  # fmt: skip
    assert pair.slots[1].eq(0xA5).all(), "a header alone writes nothing"
    assert pair.slots[2][:10].eq(2).all()
    assert pair.slots[2][10:].eq(0xA5).all()
    assert pair.slots[3][: 3 * MIB].eq(3).all()


def test_misuse_is_told_and_posts_nothing(lane: Callable[..., Pair]) -> None:
    pair = lane(nbytes=100)
    region = pair.region(200, 1)
    for nbytes, slot in ((101, 0), (10, 2), (10, -1), (201, 0), (-1, 0)):
        with pytest.raises(LocalProtocolError):
            pair.tx.post_send(region, nbytes, b"h", slot)
    with pytest.raises(LocalProtocolError):
        pair.rx.post_send(region, 1, b"h", 0)
    with pytest.raises(LocalProtocolError):
        pair.receiver.listen(KEY, [])
    with pytest.raises(LocalProtocolError, match="before it listens"):
        _ = pair.sender.address
    with pytest.raises(LocalProtocolError):
        pair.sender.register(torch.zeros(4, 4, dtype=torch.uint8).t())
    work = pair.tx.post_send(region, 100, b"h", 1)
    pair.until(lambda: work.state is State.DONE and pair.taken)
    pair.rx.release(pair.taken[0])
    with pytest.raises(LocalProtocolError, match="released before"):
        pair.rx.release(pair.taken[0])


# Ends


@pytest.mark.parametrize("options", TRANSPORTS)
def test_nothing_lands_after_the_receiver_has_closed_in_mid_bucket(
    lane: Callable[..., Pair], options: dict[str, Any]
) -> None:
    before = resources()
    pair = lane(nbytes=32 * MIB, **options)
    work = pair.tx.post_send(pair.region(32 * MIB, 7), 32 * MIB, b"h", 0)
    pair.turn(2)
    pair.receiver.close()
    pair.slots[0].fill_(0xEE)
    for _ in range(500):
        pair.sender.progress()
    assert pair.slots[0].eq(0xEE).all()
    assert work.state is State.ERROR
    assert isinstance(work.error, PeerLost)
    pair.sender.close()
    assert {**resources(), "shm": 0} == {**before, "shm": 0}


@pytest.mark.parametrize("options", TRANSPORTS)
def test_a_sender_that_closes_in_mid_bucket_leaves_nothing_behind(
    lane: Callable[..., Pair], options: dict[str, Any]
) -> None:
    before = resources()
    pair = lane(nbytes=32 * MIB, **options)
    pair.tx.post_send(pair.region(32 * MIB, 7), 32 * MIB, b"h", 0)
    pair.turn(2)
    pair.sender.close()
    for _ in range(500):
        pair.receiver.progress()
    assert isinstance(pair.rx.error, PeerLost)
    assert pair.rx.arrivals() == []
    pair.receiver.close()
    assert {**resources(), "shm": 0} == {**before, "shm": 0}


def test_an_unread_bucket_is_not_done(lane: Callable[..., Pair]) -> None:
    """A small message leaves the sender at once; DONE waits for the receiver all the same."""
    pair = lane()
    work = pair.tx.post_send(pair.region(10, 1), 10, b"h", 0)
    for _ in range(200):
        pair.sender.progress()
    assert work.state is State.PENDING
    assert pair.tx.drain(0.2) is False
    pair.until(lambda: work.state is State.DONE)
    assert pair.tx.drain(0.2) is True


def test_a_closed_channel_ends_its_bucket_and_refuses_more(lane: Callable[..., Pair]) -> None:
    pair = lane()
    work = pair.tx.post_send(pair.region(10, 1), 10, b"h", 0)
    pair.tx.close()
    for _ in range(100):
        pair.sender.progress()
    assert work.state is State.ERROR
    assert isinstance(work.error, EndpointClosed)
    with pytest.raises(EndpointClosed):
        pair.tx.post_send(pair.region(10, 1), 10, b"h", 1)


def far_pair(options: dict[str, Any], nbytes: int) -> tuple[Host, Any, Any, int, list[int]]:
    """A sender in a peer process and a receiver here with memory of its own."""
    host = Host()
    name = "weightbus_ucx:UcxBackend"
    sender = host.side(name, options, {"name": "sender/0", "role": "send", "host": "127.0.0.1"})
    receiver = UcxBackend(**options).endpoint(EndpointSpec(name="e0/0", role="receive", host="127.0.0.1"))
    return host, sender, receiver, nbytes, sender.allocate(1, nbytes)


@pytest.mark.parametrize("options", TRANSPORTS)
def test_a_sender_stopped_in_mid_bucket_spoils_nothing_later(options: dict[str, Any]) -> None:
    """The receiver closes its endpoint, reuses the memory for another lane, then the stopped sender goes on."""
    host, sender, receiver, nbytes, (bucket,) = far_pair(options, 32 * MIB)
    memory = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
    try:
        receiver.listen(KEY, [receiver.register(memory)])
        attempt = sender.begin_connect(receiver.address, KEY, 20.0)
        while not sender.connected(attempt):
            receiver.progress()
        sender.write(bucket, b"\x07" * nbytes)
        sender.post(0, bucket, nbytes, b"h", 0)
        for _ in range(3):
            receiver.progress()
        host.peer.stop()
        for _ in range(3):
            receiver.progress()
        receiver.close()
        backend = UcxBackend(**options)
        again = backend.endpoint(EndpointSpec(name="e0/0", role="receive", host="127.0.0.1"))
        good = backend.endpoint(EndpointSpec(name="sender/1", role="send", host="127.0.0.1"))
        rx = again.listen(KEY, [again.register(memory)])
        tx = connect(good, again, again.address)
        region = good.allocate(nbytes)
        region.tensor.fill_(0x0B)
        work = tx.post_send(region, nbytes, b"good", 0)
        while work.state is State.PENDING:
            good.progress()
            again.progress()
        assert rx.arrivals()[0].header == b"good"
        host.peer.cont()
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            again.progress()
        assert memory.eq(0x0B).all()
        assert isinstance(sender.error(0), PeerLost)
        for endpoint in (good, again):
            endpoint.close()
        host.end()
    finally:
        receiver.close()
        host.peer.close()


@pytest.mark.parametrize("options", TRANSPORTS[:2])
def test_a_sender_killed_in_mid_bucket_is_lost_at_once(options: dict[str, Any]) -> None:
    host, sender, receiver, nbytes, (bucket,) = far_pair(options, 32 * MIB)
    before = resources()
    try:
        rx = receiver.listen(KEY, [receiver.allocate(nbytes)])
        attempt = sender.begin_connect(receiver.address, KEY, 20.0)
        while not sender.connected(attempt):
            receiver.progress()
        sender.post(0, bucket, nbytes, b"h", 0)
        receiver.progress()
        host.peer.kill()
        end = time.monotonic() + 5.0
        while rx.error is None and time.monotonic() < end:
            receiver.progress()
        assert isinstance(rx.error, PeerLost)
        assert rx.error.peer == "sender/0"
        receiver.close()
        assert resources()["fds"] < before["fds"]
        assert resources()["threads"] < before["threads"]
    finally:
        receiver.close()
        host.peer.close()


# Places


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("options", TRANSPORTS[:2])
def test_both_families(lane: Callable[..., Pair], host: str, options: dict[str, Any]) -> None:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as exc:
        pytest.skip(f"no {host} here: {exc}")
    pair = lane(host=host, **options)
    assert decode(pair.receiver.address, Address).host == host
    work = pair.tx.post_send(pair.region(MIB, 9), MIB, b"h", 1)
    pair.until(lambda: work.state is State.DONE)
    assert pair.slots[1][:MIB].eq(9).all()


def test_the_port_is_the_systems_choice_and_the_bind_is_the_host_asked_for(listening: Any) -> None:
    port = decode(listening.address, Address).port
    assert port > 0
    bound = subprocess.run(["cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout
    assert f" 0100007F:{port:04X} 00000000:0000 0A" in bound, "bound to loopback only"
    other = UcxBackend().endpoint(EndpointSpec(name="e1/0", role="receive", host="127.0.0.1"))
    other.listen(KEY, [])
    assert decode(other.address, Address).port != port
    other.close()


def test_a_host_that_is_not_here_is_named() -> None:
    with pytest.raises(ConfigError, match=r"198\.51\.100\.7"):
        UcxBackend().endpoint(EndpointSpec(name="e0/0", role="receive", host="198.51.100.7"))
    assert interface_of("127.0.0.1") == "lo"


def test_a_descriptor_wakes_the_receiver(lane: Callable[..., Pair]) -> None:
    pair = lane()
    (fd,) = pair.receiver.fds()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    end = time.monotonic() + 10
    while pair.receiver.progress() or poll.poll(0):
        assert time.monotonic() < end, "never idle"
    pair.tx.post_send(pair.region(10, 1), 10, b"h", 0)
    pair.sender.progress()
    assert poll.poll(5000)
    assert UcxBackend(progress="poll").endpoint(EndpointSpec(name="x", role="send")).fds() == []


# Settings


def test_wrong_options_are_told_all_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        UcxBackend(progress="thread", tls=3, config={"UCX_TLS": "tcp"}, link_timeout_s=0, speed="high")
    for text in ("thread", "tls is 3", "without UCX_", "link_timeout_s is 0", "'speed'"):
        assert text in str(raised.value)


def test_settings_that_ucx_refuses_name_the_setting() -> None:
    with pytest.raises(BackendUnavailable, match="NO_SUCH_SETTING"):
        UcxBackend(config={"NO_SUCH_SETTING": "1"}).endpoint(EndpointSpec(name="e0/0", role="receive"))


def test_the_users_environment_wins_over_defaults_and_options_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_RNDV_THRESH", "64K")
    assert "RNDV_THRESH" not in settings_for(None, cuda=False, tls=None, config={})
    assert settings_for(None, cuda=False, tls=None, config={"RNDV_THRESH": "1K"})["RNDV_THRESH"] == "1K"
    monkeypatch.delenv("UCX_RNDV_THRESH")
    assert settings_for(None, cuda=False, tls="tcp", config={})["TLS"] == "tcp"
    assert settings_for("::1", cuda=False, tls=None, config={})["TCP_AF_PRIO"] == "inet6,inet"
    assert settings_for("127.0.0.1", cuda=False, tls=None, config={})["NET_DEVICES"] == "lo"


def test_the_probe_tells_versions_and_transports() -> None:
    probe = UcxBackend().probe()
    assert probe.ok
    assert probe.facts["ucx"].startswith("1.")
    assert "tcp/lo" in probe.facts["transports"]
    only = UcxBackend(tls="posix,self").probe()
    assert any("No transport reaches other hosts" in warning for warning in only.warnings)


def test_the_probe_explains_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "installed", lambda: {"ucxx-cu12": "0.52", "ucxx-cu13": "0.52"})
    both = UcxBackend().probe()
    assert not both.ok
    assert "ucxx-cu12 and ucxx-cu13" in both.reason
    monkeypatch.setattr(backend_module, "installed", lambda: {"ucxx-cu12": "0.52"})
    monkeypatch.setattr(backend_module, "torch_cuda", lambda: "13")
    monkeypatch.setattr(backend_module, "rdma_devices", lambda: ["mlx5_0:1"])
    monkeypatch.setattr(backend_module, "_locked_memory", lambda: "8 MiB")
    monkeypatch.setattr(backend_module, "loaded_libucs", lambda: ["/a/libucs.so.0", "/b/libucs-1.so.0"])
    told = " ".join(UcxBackend().probe().warnings)
    for text in ("install ucxx-cu13", "mlx5_0:1", "8 MiB", "Two copies of UCX", "/b/libucs-1.so.0"):
        assert text in told


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip


TRANSFER = """
import sys, threading
from weightbus.backend import EndpointSpec, State
from weightbus_ucx import UcxBackend
def transfer():
    r, s = (UcxBackend().endpoint(EndpointSpec(name=n, role=n, host="127.0.0.1")) for n in ("receive", "send"))
    rx = r.listen(bytes(16), [r.allocate(100000)])
    got = []
    thread = threading.Thread(target=lambda: got.append(s.connect(r.address, bytes(16), 20)))
    thread.start()
    while thread.is_alive(): r.progress()
    region = s.allocate(100000); region.tensor.fill_(5)
    work = got[0].post_send(region, 100000, b"h", 0)
    while work.state is State.PENDING: s.progress(); r.progress()
    (arrival,) = rx.arrivals()
    assert work.state is State.DONE and int(arrival.region.tensor.sum()) == 500000
    return r, s, got[0], work, arrival
"""


def test_the_environment_stays_as_it_was() -> None:
    """Also as C sees it, which is what another copy of UCX would read."""
    code = """
import ctypes, os
os.environ["UCX_RNDV_THRESH"] = "77K"
getenv = ctypes.CDLL(None).getenv; getenv.restype = ctypes.c_char_p
names = [b"UCX_MEMTYPE_CACHE", b"UCX_RNDV_FRAG_MEM_TYPE", b"UCX_MAX_RNDV_RAILS", b"UCX_RNDV_THRESH"]
before = dict(os.environ), [getenv(name) for name in names]
exec(TRANSFER)
for end in transfer()[:2]: end.close()
assert "ucxx" in sys.modules
after = dict(os.environ), [getenv(name) for name in names]
assert after == before, (after, before)
assert after[1] == [None, None, None, b"77K"]
"""
    done = run_python(f"TRANSFER = {TRANSFER!r}\n{code}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("end", ["for e in kept[:2]: e.close()", "", "import gc; del kept; gc.collect()"])
def test_a_process_ends_with_code_0(end: str) -> None:
    """Closed, left open, or dropped."""
    done = run_python(f"{TRANSFER}\nkept = transfer()\n{end}\nprint('bye')\n")
    assert (done.returncode, done.stdout.strip()) == (0, "bye"), done.stderr
