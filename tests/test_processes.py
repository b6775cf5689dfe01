"""Processes that are killed or stopped at random points: nothing mixed is served, nobody hangs, nothing stays behind."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import weightbus
from tests.bus_peers import SETTINGS, filled, versions_in
from tests.harness import Receiving, wait_until
from weightbus.testing.adapters import RecordingAdapter
from weightbus.testing.peers import Peer

PEERS = "tests/bus_peers.py"
KILLS = 6
BACKEND = "local"


class Watched:
    """An engine in this process whose weights are looked at all the time while it serves."""

    def __init__(self, address: str, stage: str | None) -> None:
        self.fake = RecordingAdapter(tensors=filled(-1))
        self.rx = Receiving(address, "e0", adapter=self.fake, stage=stage, backend=BACKEND)
        self.mixed: list[Any] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.003):
            engine = self.fake.engine
            calls = len(engine.calls)
            if engine.serving:
                seen = versions_in(engine.weights[0])
                if len(seen) > 1 and len(engine.calls) == calls:  # no refit began, or was over, meanwhile
                    self.mixed.append(seen)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.rx.close()


def left_behind() -> set[str]:
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    shm, fds = left_behind(), len(os.listdir("/proc/self/fd"))
    yield
    assert left_behind() <= shm, "shared memory was left behind"
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("weightbus")], 10)
    assert len(os.listdir("/proc/self/fd")) <= fds + 6


@pytest.mark.parametrize("stage", [None, "host"])
def test_a_trainer_killed_at_random_points(stage: str | None) -> None:
    rng = random.Random(7 if stage else 8)
    run_id, bind, watched, states = "run", "tcp://127.0.0.1:0", None, []
    try:
        version = 0
        for _ in range(KILLS):
            with Peer(f"{PEERS}:trainer", (bind, run_id, BACKEND, 1), method="forkserver") as peer:
                bind = peer.recv(60)
                watched = watched or Watched(bind, stage)
                version += 1
                peer.send(version)
                status, outcomes = peer.recv(60)
                assert status == "ok", outcomes
                assert versions_in(watched.fake.engine.weights[0]) == {float(version)}
                version += 1
                peer.send(version)
                time.sleep(rng.uniform(0, 0.12))
                peer.kill()
            wait_until(lambda: watched.rx.bus._member.driver.run is None, 20)
            state = watched.rx.bus.state
            states.append(state)
            if stage:
                assert state.startswith(("READY", "PAUSED")), state
                assert len(versions_in(watched.fake.engine.weights[0])) == 1
            else:
                assert state.startswith(("READY", "DIRTY", "HELD", "PAUSED")), state
        assert watched.mixed == [], "mixed weights were served"
    finally:
        if watched is not None:
            watched.close()
    assert len(states) == KILLS


@pytest.mark.parametrize("stage", [None, "host"])
def test_an_engine_killed_at_random_points_never_makes_the_sender_unusable(stage: str | None) -> None:
    rng = random.Random(3)
    with weightbus.WeightBus.sender("tcp://127.0.0.1:0", receivers=1, backend=BACKEND, **SETTINGS) as bus:
        survivor = Receiving(
            bus.address, "survivor", adapter=RecordingAdapter(tensors=filled(-1)), stage=stage, backend=BACKEND
        )
        try:
            for round_ in range(1, KILLS + 1):
                with Peer(f"{PEERS}:engine", (bus.address, "victim", BACKEND, stage), method="forkserver") as peer:
                    assert peer.recv(60) == "up"
                    wait_until(lambda: bus.engines().get("victim", "").startswith("READY"), 20)
                    began = time.monotonic()
                    handle = bus.isend(filled(round_), version=round_, timeout=30)
                    time.sleep(rng.uniform(0, 0.12))
                    peer.kill()
                    try:
                        outcomes = handle.wait(60).outcomes
                    except weightbus.PartialRefitError as exc:
                        outcomes = exc.outcomes
                        assert outcomes["victim"] in ("DEAD", "UNKNOWN"), outcomes
                    assert outcomes["survivor"] == f"READY({round_})"
                    assert versions_in(survivor.engine.weights[0]) == {float(round_)}
                    assert time.monotonic() - began < SETTINGS["stall_timeout"] + 15
                    wait_until(lambda: not bus.engines()["victim"].startswith("READY"), 20)
            with Peer(f"{PEERS}:engine", (bus.address, "victim", BACKEND, stage), method="forkserver") as peer:
                assert peer.recv(60) == "up"
                wait_until(lambda: bus.engines()["victim"].startswith("READY"), 20)
                assert bus.send(filled(99), version=99, timeout=30).outcomes == {
                    "survivor": "READY(99)",
                    "victim": "READY(99)",
                }
        finally:
            survivor.close()


@pytest.mark.parametrize("stage", [None, "host"])
def test_an_engine_that_is_stopped_is_excluded_and_comes_back(stage: str | None) -> None:
    with weightbus.WeightBus.sender("tcp://127.0.0.1:0", receivers=2, backend=BACKEND, poison=True, **SETTINGS) as bus:
        healthy = Receiving(
            bus.address, "healthy", adapter=RecordingAdapter(tensors=filled(-1)), stage=stage, backend=BACKEND
        )
        try:
            with Peer(f"{PEERS}:engine", (bus.address, "stopped", BACKEND, stage), method="forkserver") as peer:
                assert peer.recv(60) == "up"
                bus.send(filled(1), version=1, timeout=30)
                handle = bus.isend(filled(2), version=2, timeout=60)
                time.sleep(0.03)
                peer.stop()
                try:
                    outcomes = handle.wait(60).outcomes
                except weightbus.PartialRefitError as exc:
                    outcomes = exc.outcomes
                assert outcomes["healthy"] == "READY(2)"
                assert versions_in(healthy.engine.weights[0]) == {2.0}
                peer.cont()
                end = time.monotonic() + 40
                while True:
                    try:
                        outcomes = bus.send(filled(3), version=3, timeout=30).outcomes
                        if outcomes.get("stopped") in ("READY(3)", "ALREADY"):
                            break
                    except weightbus.WeightBusError:
                        if time.monotonic() > end:
                            raise
                    time.sleep(0.2)
                values: Any = None
                end = time.monotonic() + 20
                while values != [3.0] and time.monotonic() < end:
                    _, _, values = peer.recv(20)
                assert values == [3.0]
        finally:
            healthy.close()


def test_a_trainer_that_is_stopped_before_the_decision() -> None:
    """The heartbeat, answered outside Python, ends the wait; a staged engine keeps serving the old version."""
    with Peer(f"{PEERS}:trainer", ("tcp://127.0.0.1:0", "run", BACKEND, 1), method="forkserver") as peer:
        address = peer.recv(60)
        watched = Watched(address, "host")
        try:
            peer.send(1)
            assert peer.recv(60)[0] == "ok"
            peer.send(2)
            time.sleep(0.02)
            peer.stop()
            wait_until(lambda: watched.rx.bus._member.driver.run is None, 40)
            assert watched.rx.bus.state in ("READY(1)", "READY(2)")
            peer.cont()
            assert peer.recv(60)[0] in ("ok", "PartialRefitError")
            peer.send(3)
            assert peer.recv(60) == ("ok", {"e0": "READY(3)"})
            assert versions_in(watched.fake.engine.weights[0]) == {3.0}
            assert watched.mixed == []
        finally:
            watched.close()


@pytest.mark.parametrize("backend", ["local"])
def test_a_process_that_ends_in_order_leaves_nothing_and_exits_with_0(backend: str) -> None:
    with (
        weightbus.WeightBus.sender("tcp://127.0.0.1:0", receivers=1, backend=backend, **SETTINGS) as bus,
        Peer(f"{PEERS}:leaves_cleanly", (bus.address, backend), linked=False) as peer,
    ):
        bus.send(filled(1), version=1, timeout=60)
        assert peer.result(60) == []


def test_a_bus_is_not_used_from_a_fork() -> None:
    with weightbus.WeightBus.sender("tcp://127.0.0.1:0", receivers=1, backend="loopback") as bus:
        model = filled(1)  # before the fork: torch's own threads do not survive it
        pid = os.fork()
        if pid == 0:
            try:
                bus.send(model, version=1, timeout=1)
            except weightbus.LocalProtocolError as exc:
                os._exit(0 if "fork" in str(exc) else 2)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
