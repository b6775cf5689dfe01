"""The tools of weightbus.testing themselves: peer processes and injected faults."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from weightbus.backend import Backend, EndpointSpec, Region, State
from weightbus.errors import ConfigError, PeerLost, WeightBusError
from weightbus.loopback import LoopbackBackend
from weightbus.testing.conformance import BackendConformance
from weightbus.testing.faults import KINDS, FaultyBackend
from weightbus.testing.peers import Peer, PeerFailed, PeerTimeout, resolve, run_peers, target_of

FUNCTIONS = str(Path(__file__).resolve().with_name("peer_functions.py"))
HERE = str(Path(__file__).resolve())
KEY = bytes(16)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# Peers


def test_peers_return_their_results_in_order() -> None:
    results = run_peers(
        (f"{FUNCTIONS}:add", (1,)), (f"{FUNCTIONS}:add", (2,), {"b": 40}), ("math:gcd", (12, 18)), timeout_s=100
    )
    assert results == [1, 42, 6]


def test_a_failing_peer_is_told_with_its_traceback_and_ends_the_others(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    started = time.monotonic()
    with pytest.raises(PeerFailed, match="ValueError: a text from over there") as raised:
        run_peers((f"{FUNCTIONS}:sleep", (str(marker),)), (f"{FUNCTIONS}:fail", (str(marker),)), timeout_s=100)
    assert "in fail" in str(raised.value)
    assert time.monotonic() - started < 90, "it did not wait for the sleeper"
    assert gone(int(marker.read_text()))


def test_hanging_peers_are_killed_at_the_timeout_and_named(tmp_path: Path) -> None:
    before = multiprocessing.active_children()
    calls = [(f"{FUNCTIONS}:sleep", (str(tmp_path / f"pid{index}"),)) for index in range(2)]
    with pytest.raises(PeerTimeout, match=r"sleep \(call 0\).*sleep \(call 1\)"):
        run_peers(*calls, timeout_s=5)
    assert multiprocessing.active_children() == before
    assert all(gone(int(marker.read_text())) for marker in tmp_path.glob("pid?"))


@pytest.mark.parametrize(("call", "text"), [("leave", "died with exit code 3"), ("leave_late", "exit code 7")])
def test_a_wrong_exit_code_is_a_failure(call: str, text: str) -> None:
    with pytest.raises(PeerFailed, match=text):
        run_peers((f"{FUNCTIONS}:{call}", (3,) if call == "leave" else ()), timeout_s=100)


def test_a_linked_peer_talks_stands_goes_on_and_dies() -> None:
    with Peer(f"{FUNCTIONS}:echo", (5,)) as peer:
        peer.send("one")
        assert peer.recv(100) == ("one", 5)
        peer.stop()
        peer.send("two")
        with pytest.raises(PeerTimeout):
            peer.recv(0.5)
        peer.cont()
        assert peer.recv(100) == ("two", 5)
        peer.kill()
        assert peer.exitcode == -signal.SIGKILL
        with pytest.raises(PeerFailed, match="died with exit code -9"):
            peer.recv(5)


def test_a_linked_peer_returns_a_result() -> None:
    with Peer(f"{FUNCTIONS}:echo", (5,)) as peer:
        peer.send("end")
        assert peer.result() == "ended"
        pid = peer.pid
    assert gone(pid)


def test_targets_name_what_they_mean() -> None:
    assert target_of(LoopbackBackend) == "weightbus.loopback:LoopbackBackend"
    assert resolve(target_of(LoopbackBackend)) is LoopbackBackend
    assert target_of(Wire) == f"{HERE}:Wire"
    assert resolve(f"{FUNCTIONS}:add")(20, 22) == 42
    assert resolve("weightbus.loopback:LoopbackBackend.endpoint") is LoopbackBackend.endpoint


# Faults


class Wire:
    """A faulty sender and a loopback receiver with two slots of 64 bytes; the poison is 0xA5."""

    def __init__(self, *faults: dict[str, Any]) -> None:
        self.backend = FaultyBackend("loopback", {}, faults)
        self.rx_end = self.backend.endpoint(EndpointSpec(name="e0/0", role="receive"))
        self.tx_end = self.backend.endpoint(EndpointSpec(name="sender/0", role="send"))
        self.slots = [self._poisoned(self.rx_end.allocate(64)) for _ in range(4)]
        self.rx = self.rx_end.listen(KEY, self.slots)
        self.tx = self.tx_end.connect(self.rx_end.address, KEY, 1.0)
        self.works: list[Any] = []

    @staticmethod
    def _poisoned(region: Region) -> Region:
        region.tensor.fill_(0xA5)
        return region

    def post(self, *fills: int) -> None:
        for fill in fills:
            region = self.tx_end.allocate(64)
            region.tensor.fill_(fill)
            self.works.append(self.tx.post_send(region, 40, b"%d" % fill, len(self.works)))

    def turn(self, seconds: float = 0.0) -> list[tuple[bytes, int, bytes]]:
        """Progress; what has arrived as (header, nbytes, bytes)."""
        end = time.monotonic() + seconds
        landed = []
        for _ in range(10):
            self.tx_end.progress()
        while True:
            self.tx_end.progress()
            landed += [(a.header, a.nbytes, bytes(a.region.tensor.tolist())) for a in self.rx.arrivals()]
            if time.monotonic() >= end:
                return landed

    @property
    def states(self) -> list[State]:
        return [work.state for work in self.works]


def whole(fill: int) -> tuple[bytes, int, bytes]:
    return b"%d" % fill, 40, bytes([fill]) * 40 + b"\xa5" * 24


def test_without_faults_all_passes() -> None:
    wire = Wire()
    wire.post(1, 2)
    assert wire.turn() == [whole(1), whole(2)]
    assert wire.states == [State.DONE] * 2
    assert wire.backend.fired == []


def test_drop_says_done_and_sends_nothing() -> None:
    wire = Wire({"kind": "drop", "bucket": 1})
    wire.post(1, 2, 3)
    assert wire.turn() == [whole(1), whole(3)]
    assert wire.states == [State.DONE] * 3
    assert wire.slots[1].tensor.tolist() == [0xA5] * 64


def test_delay_holds_its_post_and_those_behind_it() -> None:
    wire = Wire({"kind": "delay", "bucket": 1, "seconds": 0.5})
    wire.post(1, 2, 3)
    assert wire.turn() == [whole(1)]
    assert wire.states == [State.DONE, State.PENDING, State.PENDING]
    assert wire.turn(0.6) == [whole(2), whole(3)]


def test_reorder_swaps_a_post_with_the_next() -> None:
    wire = Wire({"kind": "reorder", "bucket": 0})
    wire.post(1)
    assert wire.turn() == []
    wire.post(2, 3)
    assert wire.turn() == [whole(2), whole(1), whole(3)]


def test_reorder_of_the_last_post_ends_at_drain() -> None:
    wire = Wire({"kind": "reorder", "bucket": 0})
    wire.post(1)
    assert wire.states == [State.PENDING]
    assert wire.tx.drain(5.0) is True
    assert wire.turn() == [whole(1)]


def test_duplicate_sends_twice() -> None:
    wire = Wire({"kind": "duplicate", "bucket": 0})
    wire.post(1, 2)
    assert sorted(wire.turn()) == sorted([whole(1), whole(1), whole(2)])
    assert wire.states == [State.DONE] * 2


def test_corrupt_flips_one_bit_on_the_way_only() -> None:
    wire = Wire({"kind": "corrupt", "bucket": 0, "offset": 41})
    region = wire.tx_end.allocate(64)
    region.tensor.fill_(8)
    wire.tx.post_send(region, 40, b"8", 0)
    header, nbytes, data = wire.turn()[0]
    assert (header, nbytes) == (b"8", 40)
    assert data == bytes([8, 9]) + bytes([8]) * 38 + b"\xa5" * 24
    assert region.tensor.tolist() == [8] * 64, "the sender's memory is as it was"


def test_corrupt_of_a_bare_header_flips_the_header() -> None:
    wire = Wire({"kind": "corrupt", "bucket": 0})
    wire.tx.post_send(wire.tx_end.allocate(64), 0, b"head", 0)
    assert [landed[:2] for landed in wire.turn()] == [(b"iead", 0)]


def test_truncate_sends_half_under_the_same_header() -> None:
    wire = Wire({"kind": "truncate", "bucket": 0})
    wire.post(1)
    assert wire.turn() == [(b"1", 20, bytes([1]) * 20 + b"\xa5" * 44)]


def test_stall_stays_pending_until_released() -> None:
    wire = Wire({"kind": "stall", "bucket": 1})
    wire.post(1, 2, 3)
    assert wire.turn(0.05) == [whole(1)]
    assert wire.tx.drain(0.05) is False
    assert wire.states == [State.DONE, State.PENDING, State.PENDING]
    wire.backend.release()
    assert wire.turn() == [whole(2), whole(3)]
    assert wire.states == [State.DONE] * 3


def test_kill_breaks_the_channel_on_both_sides() -> None:
    wire = Wire({"kind": "kill", "bucket": 1})
    wire.post(1, 2)
    assert wire.turn() == []
    assert wire.states[1] is State.ERROR
    assert isinstance(wire.works[1].error, PeerLost)
    assert isinstance(wire.tx.error, PeerLost)
    assert isinstance(wire.rx.error, PeerLost)
    with pytest.raises(PeerLost):
        wire.post(3)


def test_a_fault_strikes_once_and_is_written_down() -> None:
    wire = Wire({"kind": "drop", "bucket": 0}, {"kind": "drop", "bucket": 0, "channel": 1})
    wire.post(1)
    assert [fault.channel for fault in wire.backend.fired] == [None]
    other = wire.tx_end.connect(wire.rx_end.address, KEY, 1.0)
    other.post_send(wire.tx_end.allocate(64), 0, b"x", 3)
    assert [fault.channel for fault in wire.backend.fired] == [None, 1]
    other.post_send(wire.tx_end.allocate(64), 0, b"y", 3)
    assert [header for header, _, _ in wire.turn()] == [b"y"]


@pytest.mark.parametrize("fault", [{"kind": "explode", "bucket": 0}, {"kind": "drop"}, {"kind": "drop", "when": 1}])
def test_a_fault_that_is_none_is_refused(fault: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="corrupt"):
        FaultyBackend("loopback", {}, [fault])


def test_every_kind_is_known() -> None:
    assert [FaultyBackend("loopback", {}, [{"kind": kind, "bucket": 0}]).fired for kind in KINDS] == [[]] * 8


class TestFaultyWithoutFaults(BackendConformance):
    """The wrapper itself keeps every promise."""

    @pytest.fixture
    def backend(self) -> Backend:
        return FaultyBackend()


def test_peer_errors_belong_to_the_tree() -> None:
    assert issubclass(PeerFailed, WeightBusError)
    assert issubclass(PeerTimeout, TimeoutError)
