"""Backend nixl beyond the suite: start-up, numbering, late writes, pull, clean ends. Real NIXL, host memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weightbus.backend import Channel, EndpointSpec, Region, State, Work
from weightbus.errors import (
    BackendUnavailable,
    ConfigError,
    ConnectError,
    EndpointClosed,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    TransferTimeout,
    TransportError,
)
from weightbus.testing.sides import Host
from weightbus_nixl import NixlBackend, _library, _probe, _wire
from weightbus_nixl._endpoint import NixlEndpoint, merge, slow_link
from weightbus_nixl._library import AgentOptions

try:
    _library.load()
except BackendUnavailable as exc:
    pytest.skip(str(exc), allow_module_level=True)

KEY = bytes(range(16))
POISON = 0xA5
TCP = {"plugin_params": {"engine_config": "TLS=tcp"}}
ROOT = Path(__file__).parent.parent


def until(condition: Callable[[], Any], *endpoints: NixlEndpoint, timeout_s: float = 20.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, "not in time"
        for endpoint in endpoints:
            endpoint.progress()
        time.sleep(0.0001)
    return value


class Maker:
    """Makes endpoints and lanes, and closes them all."""

    def __init__(self) -> None:
        self.made: list[NixlEndpoint] = []

    def endpoint(self, role: str = "send", name: str = "", **options: Any) -> NixlEndpoint:
        endpoint = NixlBackend(**options).endpoint(EndpointSpec(name=name or f"{role}/0", role=role))
        assert isinstance(endpoint, NixlEndpoint)
        self.made.append(endpoint)
        return endpoint

    def connect(self, sender: NixlEndpoint, receiver: NixlEndpoint, key: bytes = KEY, timeout: float = 20.0) -> Channel:
        found: list[Any] = []

        def call() -> None:
            try:
                found.append(sender.connect(receiver.address, key, timeout))
            except Exception as exc:
                found.append(exc)

        thread = threading.Thread(target=call)
        thread.start()
        until(lambda: found, receiver, timeout_s=timeout + 5)
        thread.join()
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def lane(self, nbytes: int = 4096, slots: int = 2, **options: Any) -> Lane:
        receiver, sender = self.endpoint("receive", **options), self.endpoint("send", **options)
        regions = [receiver.allocate(nbytes) for _ in range(slots)]
        for region in regions:
            region.tensor.fill_(POISON)
        rx = receiver.listen(KEY, regions)
        source = sender.allocate(nbytes)
        return Lane(receiver, sender, rx, self.connect(sender, receiver), source, regions)


class Lane:
    def __init__(self, receiver: NixlEndpoint, sender: NixlEndpoint, rx: Channel, tx: Channel, source: Region,
                 slots: list[Region]) -> None:  # fmt: skip
        self.receiver, self.sender, self.rx, self.tx, self.source, self.slots = receiver, sender, rx, tx, source, slots

    def send(self, value: int, nbytes: int, slot: int = 0, header: bytes = b"h") -> Work:
        self.source.tensor.fill_(value)
        work = self.tx.post_send(self.source, nbytes, header, slot)
        until(lambda: work.state is not State.PENDING, self.sender, self.receiver)
        return work

    def pump(self, seconds: float = 0.3) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.sender.progress()
            self.receiver.progress()


@pytest.fixture
def maker() -> Iterator[Maker]:
    maker = Maker()
    yield maker
    for endpoint in maker.made:
        endpoint.close()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.peer.close()


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends"), str(ROOT / "tests")])
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


# Options and start-up


def test_wrong_options_are_refused_all_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        NixlBackend(speed=1, threads=-1, devices="mlx5_0", plugin_params={"num_workers": 2}, plugin="")
    for word in ("speed is not an option", "threads", "devices", "num_workers", "plugin is a name", "progress_thread"):
        assert word in str(raised.value)


def test_params_reach_the_plugin() -> None:
    mine = {"num_workers": "2", "engine_config": "TLS=tcp"}
    options = AgentOptions(devices=("mlx5_0:1", "eth0"), threads=3, plugin_params=mine)
    assert options.params() == {
        "ucx_error_handling_mode": "peer",
        "ucx_devices": "mlx5_0:1,eth0",
        "num_threads": "3",
        "num_workers": "2",
        "engine_config": "TCP_CONN_NB=y,CUDA_IPC_ENABLE_GET_ZCOPY=y,TLS=tcp",
    }
    assert AgentOptions(plugin="LIBFABRIC").params() == {}


def test_the_import_is_lazy_and_leaves_logging_alone() -> None:
    done = run_python(
        "import sys, weightbus_nixl; weightbus_nixl.NixlBackend(); "
        "early = any(name.startswith('nixl_cu') for name in sys.modules); "
        "import logging, weightbus_nixl._library as library; library.load(); "
        "print(early, logging.raiseExceptions, logging.getLogger('nixl').level == logging.WARNING)"
    )
    assert done.stdout.split() == ["False", "True", "True"], done.stderr


def test_an_agent_leaves_the_environment_alone(maker: Maker) -> None:
    before = dict(os.environ)
    maker.endpoint()
    assert dict(os.environ) == before


def test_probe_tells_what_runs() -> None:
    probe = NixlBackend().probe()
    assert probe.ok, probe.reason
    assert probe.facts["wheel"].startswith("nixl-cu")
    assert "UCX" in probe.facts["plugins"]
    assert probe.facts["registers cpu memory"] == "yes"


def test_an_unknown_plugin_names_those_that_are_there() -> None:
    with pytest.raises(BackendUnavailable, match=r"no plugin NOPE; it has .*UCX"):
        NixlBackend(plugin="NOPE").endpoint(EndpointSpec(name="s", role="send"))


@pytest.mark.parametrize(
    ("tls", "gpu", "word"),
    [
        ("shm,cma", False, "add tcp"), ("cma", False, "add tcp"), ("tcp,cma", True, "cuda_copy"),
        ("all", True, ""), ("^tcp", True, ""), ("tcp,cuda", True, ""), ("rc_x,self", False, ""), ("", True, ""),
    ],
)  # fmt: skip
def test_transports_that_cannot_work_are_named(tls: str, gpu: bool, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    monkeypatch.setattr(_library, "has_gpu", lambda: gpu)
    fault = _library.tls_fault(AgentOptions())
    assert word in fault if word else fault == ""


def test_ucx_tls_without_a_network_says_what_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "shm,cma,self")
    with pytest.raises(BackendUnavailable, match="add tcp") as raised:
        NixlBackend().endpoint(EndpointSpec(name="s", role="send"))
    assert "NIXL_ERR_BACKEND" in str(raised.value)
    probe = NixlBackend().probe()
    assert not probe.ok
    assert "add tcp" in probe.advice


def test_a_start_that_fails_once_is_tried_again_and_told(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, calls = _library._start, []

    def flaky(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("first time unlucky")
        return start(*args)

    monkeypatch.setattr(_library, "_start", flaky)
    maker.endpoint()
    assert len(calls) == 2
    assert "first time unlucky" in caplog.text
    assert "second attempt" in caplog.text


@pytest.mark.parametrize(
    ("cause", "other", "words"),
    [
        (ModuleNotFoundError("No module named 'nixl_cu12'", name="nixl_cu12"), None, ["weightbus[nixl]", "nixl-cu12"]),
        (ModuleNotFoundError("No module named 'nixl_cu12'", name="nixl_cu12"), "nixl_cu13", ["nixl_cu13 is installed"]),
        (ImportError("libssl.so.3: cannot open shared object file"), None, ["OpenSSL 3"]),
        (ImportError("libfoo.so.1: cannot open shared object file"), None, ["libfoo.so.1", "does not load"]),
    ],
)
def test_an_import_that_fails_says_what_to_install(
    cause: ImportError, other: str | None, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> Any:
        raise cause

    monkeypatch.setattr(_library, "cuda_major", lambda: "12")
    monkeypatch.setattr(_library.importlib, "import_module", fail)
    monkeypatch.setattr(_library.importlib.util, "find_spec", lambda name: name if name == other else None)
    with pytest.raises(BackendUnavailable) as raised:
        _library.load()
    monkeypatch.undo()
    assert raised.value.__cause__ is cause
    for word in words:
        assert word in str(raised.value)


def test_two_copies_of_ucx_are_seen() -> None:
    line = "7f00-7f01 r-xp 00000000 00:1b 123    /site packages/{}/libucs{}.so.0.0.0\n"
    one = line.format("nixl_cu12.libs", "-14c218c5") * 2 + "7f00-7f01 r-xp 0 00:1b 5  /x/libucsomething/libc.so\n"
    assert _probe.two_libucs(one) == ""
    text = _probe.two_libucs(one + line.format("libucx/lib", ""))
    assert "/site packages/nixl_cu12.libs/libucs-14c218c5.so.0.0.0" in text
    assert "/site packages/libucx/lib/libucs.so.0.0.0" in text


def test_the_environment_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    assert "direct mode" in _probe.expandable_segments()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert _probe.expandable_segments() == ""
    monkeypatch.setattr(_probe, "has_gpu", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "Ray" in _probe.hidden_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert _probe.hidden_gpus() == ""
    monkeypatch.setattr(_probe, "devices", lambda: "mlx5_0")
    monkeypatch.setattr(_probe.resource, "getrlimit", lambda _: (65536, 65536))
    assert "65536" in _probe.locked_memory()
    monkeypatch.setattr(_probe.resource, "getrlimit", lambda _: (_probe.resource.RLIM_INFINITY,) * 2)
    assert _probe.locked_memory() == ""


# Codes


def test_not_found_is_explained(maker: Maker) -> None:
    lane = maker.lane()
    lane.tx.address = _wire.msgspec.structs.replace(lane.tx.address, slots=[_wire.Place(4096, 4096, 0)])
    with pytest.raises(TransportError, match="three causes") as raised:
        lane.send(1, 4096)
    assert type(raised.value.__cause__).__name__ == "nixlNotFoundError"


def test_codes_become_our_errors(maker: Maker) -> None:
    lane = maker.lane()
    agent = lane.sender._agent
    two = agent.get_xfer_descs([(lane.source.tensor.data_ptr(), 8, 0)] * 2, "DRAM")
    one = agent.get_xfer_descs([(lane.slots[0].tensor.data_ptr(), 8, 0)], "DRAM")
    with pytest.raises(TransportError, match="equally many ranges"), _library.translated("x"):
        agent.initialize_xfer("WRITE", two, one, lane.tx.peer)

    again = maker.endpoint("receive")
    again._agent.agent = None
    again._agent = _library.make_agent(lane.receiver._name, AgentOptions())
    with pytest.raises(ConnectError, match="older agent of that name"), _library.translated("x"):
        agent.add_remote_agent(again._agent.get_agent_metadata())


@pytest.mark.parametrize(
    ("name", "ours"),
    [("nixlRemoteDisconnectError", PeerLost), ("nixlBackendError", TransportError), ("Odd", TransportError)],
)
def test_a_foreign_error_keeps_its_cause(name: str, ours: type[Exception]) -> None:
    foreign = type(name, (RuntimeError,), {})("CODE")
    with pytest.raises(ours, match="CODE") as raised, _library.translated("a WRITE", peer="e0/0"):
        raise foreign
    assert raised.value.__cause__ is foreign
    assert type(raised.value) is ours
    assert "e0/0" in str(raised.value)


# Numbering of notifications


def test_buckets_that_overtake_each_other_arrive_in_order(maker: Maker) -> None:
    lane = maker.lane()
    lane.tx._sequence = 1
    lane.send(2, 100, slot=1, header=b"second")
    lane.pump(0.2)
    assert lane.rx.arrivals() == []
    lane.tx._sequence = 0
    lane.send(1, 50, slot=0, header=b"first")
    arrived: list[Any] = []
    until(lambda: arrived.extend(lane.rx.arrivals()) or len(arrived) == 2, lane.receiver, lane.sender)
    assert [(a.header, a.slot, a.nbytes) for a in arrived] == [(b"first", 0, 50), (b"second", 1, 100)]
    assert arrived[1].region.tensor[:101].tolist() == [2] * 100 + [POISON]
    assert lane.rx.error is None


@pytest.mark.parametrize("case", ["repeated", "too far", "another key", "slot in use", "no slot", "too long"])
def test_a_wrong_notification_breaks_the_channel_and_is_never_handed_on(maker: Maker, case: str) -> None:
    lane = maker.lane()
    lane.send(1, 64, header=b"good")
    until(lambda: lane.rx.arrivals(), lane.receiver, lane.sender)
    note = _wire.Note(_wire.Kind.DATA, KEY, 1, 1, 64, b"bad")
    changes: dict[str, dict[str, Any]] = {
        "repeated": {"sequence": 0},
        "too far": {"sequence": 3},
        "another key": {"lane_key": bytes(16)},
        "slot in use": {"slot": 0},
        "no slot": {"slot": 2},
        "too long": {"nbytes": 4097},
    }
    lane.sender.notify(lane.tx.peer, _wire.msgspec.structs.replace(note, **changes[case]), "x")
    until(lambda: lane.rx.error and lane.tx.error, lane.receiver, lane.sender)
    assert isinstance(lane.rx.error, RemoteProtocolError)
    assert isinstance(lane.tx.error, PeerLost)
    assert lane.rx.arrivals() == []
    with pytest.raises(PeerLost):
        lane.tx.post_send(lane.source, 1, b"h", 1)


def test_garbage_from_the_sender_breaks_its_channel(maker: Maker) -> None:
    lane = maker.lane()
    lane.sender._agent.send_notif(lane.tx.peer, b"no weightbus")
    until(lambda: lane.rx.error, lane.receiver, lane.sender)
    assert isinstance(lane.rx.error, RemoteProtocolError)


def test_a_stranger_disturbs_no_lane(maker: Maker, caplog: pytest.LogCaptureFixture) -> None:
    lane = maker.lane()
    stranger = maker.endpoint(name="stranger")
    with pytest.raises(TransferTimeout, match="another lane key"):
        maker.connect(stranger, lane.receiver, bytes(16), timeout=0.5)
    with pytest.raises(TransferTimeout):
        maker.connect(stranger, lane.receiver, KEY, timeout=0.5)  # the right key, but the lane has its sender
    stranger._load(lane.receiver._name, lane.tx.address.metadata, "r")
    stranger.notify(lane.receiver._name, _wire.Note(_wire.Kind.DATA, KEY, 0, 0, 64, b"forged"), "r")
    until(lambda: "not the sender of this lane" in caplog.text, lane.receiver, stranger)
    assert lane.rx.error is None
    assert lane.rx.arrivals() == []
    lane.send(7, 64, header=b"good")
    (arrival,) = until(lambda: lane.rx.arrivals(), lane.receiver, lane.sender)
    assert (arrival.header, arrival.region.tensor[63].item()) == (b"good", 7)


def test_a_slot_is_not_written_twice_at_once(maker: Maker) -> None:
    lane = maker.lane(64 << 20, **TCP)
    work = lane.tx.post_send(lane.source, lane.source.nbytes, b"h", 0)
    assert work.state is State.PENDING
    with pytest.raises(LocalProtocolError, match="not ended"):
        lane.tx.post_send(lane.source, 1, b"h", 0)
    assert not lane.tx.drain(0.0)
    until(lambda: work.state is State.DONE, lane.sender, lane.receiver)
    assert lane.tx.drain(0.0)


# Late writes and ends


@pytest.mark.parametrize("fenced", [True, False])
def test_a_stopped_sender_cannot_spoil_a_later_model(maker: Maker, host: Host, fenced: bool) -> None:
    """In mid-WRITE the sender stands still; its receiver gives up, reuses the memory for a model of another sender.

    Without the fence (the control) the late bytes do land, so this test can see them.
    """
    nbytes = 64 << 20
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    late = host.side("weightbus_nixl:NixlBackend", TCP, {"name": "late", "role": "send"})
    first = maker.endpoint("receive", **TCP)
    first.listen(KEY, [first.register(memory)])
    attempt = late.begin_connect(first.address, KEY, 20.0)
    _, channel = until(lambda: late.connected(attempt), first)
    (bucket,) = late.allocate(1, nbytes)
    late.write(bucket, b"\x11" * nbytes)
    late.pause(True)  # what its sockets hold goes out, and no more
    work = late.post(channel, bucket, nbytes, b"late", 0)
    until(lambda: memory[0] == 0x11, first)
    host.peer.stop()
    for _ in range(2000):
        first.progress()
    assert memory[-1] == 0, "it stands in mid-WRITE"
    if fenced:
        first.close()
    second, good = maker.endpoint("receive"), maker.endpoint("send", name="good")
    rx = second.listen(KEY, [second.register(memory)])
    tx = maker.connect(good, second)
    model = good.allocate(nbytes)
    model.tensor.fill_(0x22)
    tx.post_send(model, nbytes, b"good", 0)
    (arrival,) = until(rx.arrivals, good, second)
    assert arrival.header == b"good"
    host.peer.cont()
    late.pause(False)
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        for endpoint in [second] if fenced else [first, second]:
            endpoint.progress()
    spoilt = not torch.equal(memory, torch.full_like(memory, 0x22))
    assert spoilt is not fenced
    if fenced:
        until(lambda: late.state(work) == "error", second)
        assert isinstance(late.work_error(work), PeerLost)


def test_closing_with_an_operation_under_way_ends_it(maker: Maker) -> None:
    lane = maker.lane(64 << 20, **TCP)
    work = lane.tx.post_send(lane.source, lane.source.nbytes, b"h", 0)
    started = time.monotonic()
    lane.sender.close()
    assert time.monotonic() - started < 5
    assert work.state is State.ERROR
    assert isinstance(work.error, EndpointClosed)
    until(lambda: lane.rx.error, lane.receiver)
    assert lane.rx.arrivals() == []


def test_an_error_that_is_kept_does_not_keep_the_agent(maker: Maker, host: Host) -> None:
    """The fence is the agent's end; a traceback that holds a handle would hold the agent."""
    far = host.side("weightbus_nixl:NixlBackend", TCP, {"name": "far", "role": "receive"})
    address = far.listen(KEY, far.allocate(1, 64 << 20))
    before = len(os.listdir("/proc/self/fd"))
    sender = maker.endpoint("send", **TCP)
    tx = sender.connect(address, KEY, 20.0)
    source = sender.allocate(64 << 20)
    work = tx.post_send(source, source.nbytes, b"h", 0)
    far.pause(True)
    host.peer.kill()
    until(lambda: work.state is State.ERROR, sender)
    errors = [work.error, tx.error]
    assert all(isinstance(error, PeerLost) for error in errors)
    assert len(os.listdir("/proc/self/fd")) > before
    sender.close()
    assert len(os.listdir("/proc/self/fd")) == before
    del errors


def test_a_closed_channel_lets_its_peer_go_and_no_other(maker: Maker) -> None:
    lane = maker.lane()
    other = maker.endpoint("receive", name="receive/1")
    rx = other.listen(KEY, [other.allocate(4096)])
    tx = maker.connect(lane.sender, other)
    lane.tx.close()
    agent = lane.sender._agent
    assert [agent.check_remote_metadata(peer) for peer in (lane.tx.peer, tx.peer)] == [False, True]
    tx.post_send(lane.source, 64, b"still here", 0)
    (arrival,) = until(rx.arrivals, lane.sender, other)
    assert arrival.header == b"still here"


def test_a_peer_that_closes_is_told(maker: Maker) -> None:
    lane = maker.lane()
    lane.sender.close()
    until(lambda: lane.rx.error, lane.receiver)
    assert isinstance(lane.rx.error, PeerLost)
    assert "closed its channel" in str(lane.rx.error)


PAIR = """
import threading, torch
from weightbus.backend import EndpointSpec, State
from weightbus_nixl import NixlBackend
r = NixlBackend().endpoint(EndpointSpec(name="r", role="receive"))
s = NixlBackend().endpoint(EndpointSpec(name="s", role="send"))
rx = r.listen(b"k" * 16, [r.allocate(1 << 20)])
made = []
t = threading.Thread(target=lambda: made.append(s.connect(r.address, b"k" * 16, 20.0)))
t.start()
while t.is_alive():
    r.progress()
region = s.allocate(1 << 20)
region.tensor.fill_(3)
work = made[0].post_send(region, 1 << 20, b"h", 0)
got = []
while not got or work.state is State.PENDING:
    s.progress(); r.progress(); got += rx.arrivals()
assert int(got[0].region.tensor.sum()) == 3 << 20
"""


@pytest.mark.parametrize("end", ["s.close(); r.close()", "r.close(); s.close()", ""])
def test_a_process_ends_with_exit_code_0(end: str) -> None:
    done = run_python(PAIR + end)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def test_ucxx_in_the_same_process_changes_nothing() -> None:
    pytest.importorskip("ucxx")
    done = run_python(
        "import weightbus_nixl._library as l; l.load()\n"
        "import ucxx\n" + PAIR + "s.close(); r.close()\n"
        "from weightbus_nixl._probe import two_libucs; assert 'Two copies of UCX' in two_libucs()"
    )
    assert done.returncode == 0, done.stderr


# The link


def test_the_link_is_measured_and_tcp_on_one_host_is_told(maker: Maker, caplog: pytest.LogCaptureFixture) -> None:
    lane = maker.lane(**TCP)
    assert lane.tx.link_bytes_per_s > 1e7
    assert lane.rx.link_bytes_per_s is None
    assert "UCX_TLS=tcp uses TCP on one host" in caplog.text
    assert [slot.tensor.unique().tolist() for slot in lane.slots] == [[POISON]] * 2, "no slot is used for it"


@pytest.mark.parametrize(
    ("gbps", "near", "cuda", "tls", "word"),
    [
        (2.0, True, False, "", ""), (0.01, True, False, "", "ptrace"), (9.0, True, False, "tcp", "add shm"),
        (9.0, True, False, "tcp,shm,cma", ""), (2.0, True, True, "", "IPC namespace"), (90.0, True, True, "", ""),
        (90.0, False, True, "tcp", "device memory over TCP"), (0.05, False, False, "", "UCX_NET_DEVICES"),
        (0.5, False, False, "", ""),
    ],
)  # fmt: skip
def test_a_slow_link_names_its_cause(gbps: float, near: bool, cuda: bool, tls: str, word: str) -> None:
    text = slow_link(gbps, near=near, cuda=cuda, tls=tls, copy_gbps=12.0)
    assert word in text if word else text == ""


@pytest.mark.parametrize(("copy_gbps", "told"), [(12.0, False), (40.0, True), (0.0, False)])
def test_a_link_through_host_memory_is_judged_by_the_host(copy_gbps: float, told: bool) -> None:
    text = slow_link(0.5, near=True, cuda=False, tls="", copy_gbps=copy_gbps)
    assert text.startswith("At least 1.0 GB/s is usual here") if told else text == ""
    assert slow_link(0.5, near=False, cuda=False, tls="", copy_gbps=copy_gbps) == "", "a network is no memory"


# Addresses


def test_an_address_is_checked_against_its_type() -> None:
    good = _wire.Address(owner="r", agent="a", metadata=b"m", memory="DRAM", host="h", slots=[_wire.Place(8, 8, 0)])
    assert _wire.decode(_wire.encode(good), _wire.Address) == good
    replace = _wire.msgspec.structs.replace
    for bad in (
        replace(good, memory="FILE"), replace(good, owner=""), replace(good, slots=[_wire.Place(-1, 8, 0)]),
        replace(good, slots=[_wire.Place(8, 1 << 63, 0)]), replace(good, slots=[_wire.Place(8, 8, 0)] * 5000),
    ):  # fmt: skip
        with pytest.raises(RemoteProtocolError):
            _wire.decode(_wire.encode(bad), _wire.Address)
    with pytest.raises(RemoteProtocolError, match="at most"):
        _wire.decode(bytes((1 << 20) + 1), _wire.Address)


def test_nothing_of_ours_is_pickled() -> None:
    for path in (ROOT / "backends" / "weightbus_nixl").glob("*.py"):
        text = path.read_text()
        assert "pickle" not in text
        assert "serialized_descs" not in text


# Pull


def test_merging_joins_neighbours_only() -> None:
    def table(*rows: tuple[int, int]) -> Any:
        return np.array(rows, dtype=np.uint64)

    mine = table((100, 10), (110, 20), (0, 0), (130, 5), (200, 5), (205, 5), (210, 5))
    theirs = table((500, 10), (510, 20), (0, 0), (530, 5), (535, 5), (540, 5), (545, 5))
    here, there = merge(mine, theirs, table((100, 1000)), table((500, 45), (545, 100)))
    assert here.tolist() == [[100, 35], [200, 10], [210, 5]]
    assert there.tolist() == [[500, 35], [535, 10], [545, 5]]
    empty, _ = merge(table((0, 0)), table((0, 0)), table((1, 1)), table((1, 1)))
    assert len(empty) == 0


def read(
    maker: Maker, source: list[torch.Tensor], target: list[torch.Tensor]
) -> tuple[NixlEndpoint, NixlEndpoint, Work]:
    owner, reader = maker.endpoint("send"), maker.endpoint("receive")
    work = reader.post_read(owner.export(source), target)
    until(lambda: work.state is not State.PENDING, owner, reader)
    return owner, reader, work


def test_many_small_tensors_of_one_arena_are_one_range(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 20_000
    arena, landing = torch.arange(count * 16, dtype=torch.int32), torch.zeros(count * 16, dtype=torch.int32)
    ranges: list[int] = []
    original = NixlEndpoint._read
    monkeypatch.setattr(NixlEndpoint, "_read", lambda *a: (ranges.append(len(a[2])), original(*a))[1])
    owner, _, work = read(maker, list(arena.split(16)), list(landing.split(16)))
    assert work.state is State.DONE, work.error
    assert torch.equal(arena, landing)
    assert ranges == [1]
    assert len(owner._spans) == 1


def test_exports_are_remembered_and_old_memory_is_let_go(maker: Maker) -> None:
    owner = maker.endpoint()
    kept = [torch.zeros(64), torch.zeros(0), torch.zeros(())]
    blob = owner.export(kept)
    registrations = [id(registration) for registration in owner._spans.values()]
    assert owner.export(kept) == blob
    assert [id(registration) for registration in owner._spans.values()] == registrations
    for _ in range(20):
        owner.export([torch.zeros(128)])
    assert len(owner._kept) == 8
    assert len(owner._spans) == 8


def test_tensors_moved_later_are_reached_by_a_new_export(maker: Maker) -> None:
    target = [torch.zeros(1000)]
    owner, reader, work = read(maker, [torch.full((1000,), 1.0)], target)
    assert work.state is State.DONE
    again = reader.post_read(owner.export([torch.full((1000,), 2.0)]), target)
    until(lambda: again.state is not State.PENDING, owner, reader)
    assert (again.error, target[0].unique().tolist()) == (None, [2.0])


def test_a_read_of_other_sizes_moves_nothing(maker: Maker) -> None:
    target = [torch.full((9,), -1.0)]
    _, _, work = read(maker, [torch.zeros(8)], target)
    assert work.state is State.ERROR
    assert isinstance(work.error, TransportError)
    assert target[0].tolist() == [-1.0] * 9


def test_a_forged_export_is_an_error(maker: Maker) -> None:
    owner, reader = maker.endpoint("send"), maker.endpoint("receive")
    export = _wire.decode(owner.export([torch.zeros(8)]), _wire.Export)
    forged = _wire.msgspec.structs.replace(export, tensors=np.array([(4096, 32)], dtype="<u8").tobytes())
    with pytest.raises(TransportError, match="three causes"):
        reader.post_read(_wire.encode(forged), [torch.zeros(8)])
    with pytest.raises(RemoteProtocolError, match="whole rows"):
        reader.post_read(_wire.encode(_wire.msgspec.structs.replace(export, tensors=b"x" * 17)), [torch.zeros(8)])


def test_a_read_from_a_dead_owner_is_an_error(maker: Maker, host: Host) -> None:
    far = host.side("weightbus_nixl:NixlBackend", {}, {"name": "far", "role": "send"})
    far.make_tensors([((1024,), "float32")], 7)
    remote = far.export()
    reader, target = maker.endpoint("receive"), [torch.zeros(1024)]
    work = reader.post_read(remote, target)
    until(lambda: work.state is not State.PENDING, reader)
    assert (work.state, bytes(target[0].view(torch.uint8).numpy())) == (State.DONE, b"\x07" * 4096)
    host.peer.kill()

    def fails() -> bool:
        try:
            late = reader.post_read(remote, target)
        except TransportError:
            return True
        until(lambda: late.state is not State.PENDING, reader)
        return late.state is State.ERROR

    assert until(fails, reader)
