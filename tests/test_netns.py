"""Two network namespaces joined by veth, over TCP: buckets cross, a cut ends in time, new lanes work after repair.

The namespaces are made and removed by the test; where that is not permitted it is skipped with the reason.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import attrs
import pytest

from weightbus.control.security import make_token
from weightbus.errors import ConnectError, TransferTimeout
from weightbus.registry import known, load_backend
from weightbus.testing.peers import ParentLink, Peer, target_of
from weightbus.testing.sides import Host, Side, host

KEY = bytes(range(16))
NBYTES = 32 << 20
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x20000
MS_REC, MS_SLAVE = 0x4000, 0x80000
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def enter(namespace: str) -> None:
    """Move this thread into a network namespace, with a /sys of its own: UCX finds its devices in /sys/class/net."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as handle:
        steps = (
            lambda: libc.setns(handle.fileno(), CLONE_NEWNET),
            lambda: libc.unshare(CLONE_NEWNS),
            lambda: libc.mount(None, b"/", None, MS_REC | MS_SLAVE, None),
            lambda: libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None),
        )
        for step in steps:
            if step():
                raise OSError(ctypes.get_errno(), f"entering {namespace}")


def host_in(link: ParentLink, namespace: str, environment: Mapping[str, str]) -> None:
    """Serve sides from inside a network namespace; wire libraries are loaded there."""
    enter(namespace)
    host(link, environment)


class HostIn(Host):
    """A peer process in a network namespace, its UCX on TCP."""

    def __init__(self, namespace: str) -> None:
        environment = {**os.environ, "UCX_TLS": "tcp"}
        self.peer = Peer(target_of(host_in), (namespace, environment), method="forkserver")
        self._count = 0
        self._forgotten = set()


@attrs.frozen
class Net:
    """Two namespaces and the ways to cut what joins them."""

    names: tuple[str, str]

    def cut(self, how: str) -> None:
        if how == "link down":
            command("ip", "-n", self.names[0], "link", "set", "veth0", "down")
            return
        for rule in ("add table inet cut", "add chain inet cut drops { type filter hook input priority 0; }",
                     "add rule inet cut drops drop"):  # fmt: skip
            command("ip", "netns", "exec", self.names[0], "nft", rule)

    def repair(self, how: str) -> None:
        if how == "link down":
            command("ip", "-n", self.names[0], "link", "set", "veth0", "up")
        else:
            command("ip", "netns", "exec", self.names[0], "nft", "delete table inet cut")


def link_state(namespace: str, index: int) -> str:
    shown = subprocess.run(
        ["ip", "-n", namespace, "link", "show", f"veth{index}"], capture_output=True, text=True, timeout=20, check=True
    )
    return shown.stdout


@pytest.fixture
def net() -> Iterator[Net]:
    if missing := [tool for tool in ("ip", "nft") if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    names = (f"wb{os.getpid()}a", f"wb{os.getpid()}b")
    try:
        try:
            for name in names:
                command("ip", "netns", "add", name)
            ends = ("veth0", "netns", names[0], "type", "veth", "peer", "name", "veth1", "netns", names[1])
            command("ip", "link", "add", *ends)
            for index, name in enumerate(names):
                command("ip", "-n", name, "addr", "add", f"{ADDRESSES[index]}/24", "dev", f"veth{index}")
                command("ip", "-n", name, "link", "set", f"veth{index}", "up")
                command("ip", "-n", name, "link", "set", "lo", "up")
        except OSError as exc:
            pytest.skip(f"no network namespaces here: {exc}")
        for index, name in enumerate(names):  # the kernel tells of new links at most once a second
            until(lambda name=name, index=index: "state UP" in link_state(name, index))  # type: ignore[misc]
        yield Net(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)


@pytest.fixture
def hosts(net: Net) -> Iterator[list[Host]]:
    made: list[Host] = [HostIn(name) for name in net.names]
    yield made
    for each in made:
        each.peer.close()


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)
    return value


@attrs.frozen
class Lane:
    """A sender in one namespace, a receiver in the other."""

    sender: Side
    receiver: Side
    channel: int
    bucket: int

    def post(self, value: int) -> int:
        self.sender.write(self.bucket, bytes([value]) * NBYTES)
        return self.sender.post(self.channel, self.bucket, NBYTES, b"%d" % value, 0)

    def take(self) -> Any:
        landed = until(self.receiver.landed)[0]
        self.receiver.release()
        return landed


def lane(name: str, hosts: list[Host]) -> Lane:
    sides = [
        hosts[index].side(name, {}, {"name": role, "role": role, "host": ADDRESSES[index]})
        for index, role in enumerate(("send", "receive"))
    ]
    sender, receiver = sides
    address = receiver.listen(KEY, receiver.allocate(1, NBYTES))
    attempt = sender.begin_connect(address, KEY, 20.0)
    _, channel = until(lambda: sender.connected(attempt))
    return Lane(sender, receiver, channel, sender.allocate(1, NBYTES)[0])


@pytest.fixture(params=["nixl", "ucx"])
def name(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name not in known("weightbus.backends"):
        pytest.skip(f"backend {name} is not installed")
    probe = load_backend(name, {}).probe()
    if not probe.ok:
        pytest.skip(f"backend {name} cannot run here: {probe.reason}")
    return name


@pytest.mark.parametrize("how", ["link down", "packets dropped"])
def test_a_cut_link_ends_in_time_and_new_lanes_work_after_repair(
    net: Net, hosts: list[Host], name: str, how: str
) -> None:
    first = lane(name, hosts)
    work = first.post(1)
    assert first.take().data == b"\x01" * NBYTES
    until(lambda: first.sender.state(work) == "done")

    first.receiver.pause(True)  # the bucket is under way when the link is cut
    work = first.post(2)
    net.cut(how)
    first.receiver.pause(False)
    ended, took = first.sender.drain(first.channel, 2.0)
    assert took < 4.0
    state = first.sender.state(work)
    assert state != "done", "no bucket has crossed a link that is cut"
    assert ended is (state == "error")
    assert first.receiver.landed() == []
    assert first.sender.close() < 10.0
    assert first.receiver.close() < 10.0

    net.repair(how)
    second = lane(name, hosts)
    work = second.post(3)
    landed = second.take()
    assert (landed.header, landed.data == b"\x03" * NBYTES) == (b"3", True)
    until(lambda: second.sender.state(work) == "done")


@pytest.mark.parametrize("how", ["link down", "packets dropped"])
def test_connecting_over_a_cut_link_keeps_its_timeout(net: Net, hosts: list[Host], name: str, how: str) -> None:
    sender = hosts[0].side(name, {}, {"name": "send", "role": "send", "host": ADDRESSES[0]})
    receiver = hosts[1].side(name, {}, {"name": "receive", "role": "receive", "host": ADDRESSES[1]})
    address = receiver.listen(KEY, receiver.allocate(1, 4096))
    net.cut(how)
    started = time.monotonic()
    attempt = sender.begin_connect(address, KEY, 2.0)
    with pytest.raises((ConnectError, TransferTimeout)):
        until(lambda: sender.connected(attempt), 10.0)
    assert time.monotonic() - started < 5.0


# ---- a whole refit through the bus


def trainer_in(link: ParentLink, namespace: str, environment: Mapping[str, str], backend: str) -> None:
    """`bus_peers.trainer` in a namespace."""
    enter(namespace)
    os.environ.update(environment)
    from tests.bus_peers import trainer

    trainer(link, f"tcp://{ADDRESSES[0]}:0", "run", backend, 1)


def engine_in(link: ParentLink, namespace: str, environment: Mapping[str, str], backend: str, address: str) -> None:
    """An engine in a namespace; in the middle of version 2 it tells the test, and waits for its word."""
    enter(namespace)
    os.environ.update(environment)
    import weightbus
    from tests.bus_peers import filled, versions_in
    from weightbus.testing.adapters import RecordingAdapter

    adapter = RecordingAdapter(tensors=filled(-1))
    inner = adapter.strike

    def strike(step: str, call: str) -> None:
        inner(step, call)
        if call == "load w5" and "begin 2" in adapter.engine.calls and "begin 3" not in adapter.engine.calls:
            link.send("middle")
            link.recv(60)

    adapter.strike = strike  # type: ignore[method-assign]
    with weightbus.WeightBus.receiver(address, engine="e0", backend=backend, adapter=adapter, poison=True) as bus:
        link.send("up")
        while True:
            try:
                bus.recv(timeout=300)
                error = ""
            except weightbus.WeightBusError as exc:
                error = type(exc).__name__
            link.send((bus.state.partition(":")[0], error, sorted(versions_in(adapter.engine.weights[0]))))


@pytest.mark.parametrize("how", ["link down", "packets dropped"])
def test_a_refit_crosses_and_one_whose_link_is_cut_ends_by_name_until_repair(net: Net, name: str, how: str) -> None:
    environment = {"UCX_TLS": "tcp", "WEIGHTBUS_TOKEN": make_token()}
    with ExitStack() as stack:
        start = lambda what, *args: stack.enter_context(Peer(target_of(what), args, method="forkserver"))
        trainer = start(trainer_in, net.names[0], environment, name)
        address = trainer.recv(60)
        assert address.startswith(f"tcp://{ADDRESSES[0]}:")
        engine = start(engine_in, net.names[1], environment, name, address)
        assert engine.recv(60) == "up"
        trainer.send(1)
        assert trainer.recv(60) == ("ok", {"e0": "READY(1)"})
        assert engine.recv(60) == ("READY(1)", "", [1.0])

        trainer.send(2)
        assert engine.recv(60) == "middle"
        net.cut(how)
        began = time.monotonic()
        engine.send("go on")
        kind, text = trainer.recv(60)
        assert time.monotonic() - began < 40.0, "the deadline is 30 s"
        assert (kind, "e0" in text) == ("PartialRefitError", True), text
        state, error, held = engine.recv(60)
        assert (state, held[-1]) == ("DIRTY(-1)", 2.0)
        assert error in ("PeerLost", "TransferTimeout", "RefitAborted", "TransportError")

        net.repair(how)
        for _ in range(4):  # the control plane may notice only now that its old connection is gone: send again
            trainer.send(3)
            if (answer := trainer.recv(60))[0] == "ok":
                break
        assert answer == ("ok", {"e0": "READY(3)"})
        while (last := engine.recv(60))[1]:
            assert last[0].startswith("DIRTY"), "what is mixed is not served"
        assert last == ("READY(3)", "", [3.0])
