"""The report of a refit against what the machine can do: shares, what is told as slow, and what never is."""

from __future__ import annotations

import json
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness import poisoned, receiving, same, sender, weights
from weightbus import RefitReport, TensorSpec, WeightBus, calibration, host, loopback, report
from weightbus.calibration import copy_bytes_per_s
from weightbus.testing.adapters import RecordingAdapter

CPU = torch.device("cpu")
A = weights(0)
FAULTY = "weightbus.testing.faults:FaultyBackend"


def gigabyte(**seconds: float) -> RefitReport:
    """10^9 bytes in a second, on a machine that copies 4 GB/s, over a link of 2 GB/s."""
    limits = {"pack": 4e9, "wire": 2e9, "verify": 4e9, "load": 4e9}
    return RefitReport(version=7, bytes=10**9, total_s=1.0, seconds=seconds, limits=limits)


# ---- shares


def test_a_phase_and_the_total_are_given_as_shares_of_their_limits() -> None:
    shown = str(gigabyte(export=0.1, pack=0.5, wire=1.0, load=0.25, finish=0.2))
    rows = {line.split()[0]: line.split()[3:] for line in shown.splitlines()[1:]}
    assert rows == {
        "export": [], "pack": ["2.00", "GB/s", "50.0%"], "wire": ["1.00", "GB/s", "50.0%"],
        "load": ["4.00", "GB/s", "100.0%"], "finish": [],
    }  # fmt: skip
    # 1/4 + 1/2 + 1/4 s for a gigabyte, one after the other
    assert shown.splitlines()[0].endswith("1000.0 ms, 1.00 GB/s, 100.0% of its limit")


def test_a_phase_that_took_no_time_of_its_own_is_no_part_of_the_limit() -> None:
    assert gigabyte(pack=0.5, load=0.5, verify=0.0).limit_gbytes_per_s == 2.0
    assert gigabyte(pack=0.5, load=0.5, verify=0.5).limit_gbytes_per_s == pytest.approx(4 / 3)


def test_without_a_limit_there_is_a_rate_and_no_share() -> None:
    shown = str(RefitReport(version=1, bytes=10**9, total_s=1.0, seconds={"pack": 0.5, "wire": 0.5}))
    assert "%" not in shown
    assert shown.count("2.00 GB/s") == 2


def test_a_report_is_ready_for_json() -> None:
    said = json.loads(json.dumps(gigabyte(pack=40.0).to_dict()))
    assert said["limits"] == {"pack": 4e9, "wire": 2e9, "verify": 4e9, "load": 4e9}
    assert (said["gbytes_per_s"], said["limit_gbytes_per_s"]) == (1.0, 4.0)
    assert len(said["slow"]) == 1


# ---- slow


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ({"pack": 5.1}, ["pack"]), ({"pack": 4.9}, []), ({"wire": 10.1}, ["wire"]), ({"wire": 9.9}, []),
        ({"verify": 6.0, "load": 6.0}, ["verify", "load"]),
        ({"export": 99.0, "credit_wait": 99.0, "wait": 99.0, "begin": 99.0, "finish": 99.0, "pause": 99.0}, []),
    ],
)  # fmt: skip
def test_below_a_twentieth_of_its_limit_a_phase_is_slow(seconds: dict[str, float], slow: list[str]) -> None:
    assert [text.split(":")[0] for text in gigabyte(**seconds).slow] == slow


@pytest.mark.parametrize(
    ("nbytes", "seconds", "slow"),
    [(report.SLOW_BYTES, 1.1, True), (report.SLOW_BYTES - 1, 1.1, False), (report.SLOW_BYTES, 0.9, False)],
)
def test_what_is_small_or_short_is_never_slow(nbytes: int, seconds: float, slow: bool) -> None:
    made = RefitReport(version=1, bytes=nbytes, seconds={"load": seconds}, limits={"load": 4e9})
    assert bool(made.slow) is slow


def test_a_slow_phase_is_told_with_its_rate_its_limit_and_what_to_do() -> None:
    made = gigabyte(load=10.0)
    (text,) = made.slow
    assert text.startswith("load: 0.10 GB/s for 10.0 s, 2.5% of the 4.00 GB/s measured at set-up; likely: the engine's")
    assert str(made).splitlines()[-1] == f"  slow: {text}"
    assert RefitReport(version=1, bytes=10**9, seconds={"load": 10.0}).slow == (), "nothing to compare with"


# ---- refits


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that copies 1 GB/s, and thresholds for refits of a few KB."""
    monkeypatch.setitem(calibration._rates, ("cpu", 0), 1e9)
    monkeypatch.setattr(report, "SLOW_BYTES", 1)
    monkeypatch.setattr(report, "SLOW_S", 0.2)


def test_of_several_slow_refits_in_a_row_the_first_is_told(caplog: pytest.LogCaptureFixture) -> None:
    warning = report.SlowWarning()
    for load_s in (10.0, 10.0, 0.5, 10.0):
        warning.of(gigabyte(load=load_s), "e0/0")
    assert len(caplog.records) == 2


@pytest.mark.parametrize("slow", [True, False])
def test_a_loader_that_sleeps_is_told_on_both_sides(
    slow: bool, lowered: None, caplog: pytest.LogCaptureFixture
) -> None:
    stalls = {"stall_at": "load", "stall_s": 0.3} if slow else {}
    adapter = RecordingAdapter(tensors=poisoned(A), **stalls)
    with sender(receivers=1, backend="local") as bus, receiving(bus, backend="local", adapter=adapter) as rx:
        sent = bus.send(A, version=7, timeout=20)
        got = rx.last(1)
    assert same(rx.engine.weights[0], A)
    for side in (sent, got):
        assert side.limits["load"] == 1e9
        assert [text.split(":")[0] for text in side.slow] == (["load"] if slow else [])
    warned = [r.getMessage() for r in caplog.records if r.name == "weightbus" and r.levelno == logging.WARNING]
    assert sorted(text.split(": load")[0] for text in warned) == (
        ["e0/0: version 7 was slow", "sender/0: version 7 was slow"] if slow else []
    )
    assert sent.limits["pack"] == 1e9
    assert "wire" not in sent.seconds, "readers look into the sender's memory"


@pytest.mark.parametrize("backend", ["local", "loopback"])
def test_waiting_for_a_generator_is_not_slow(backend: str, lowered: None) -> None:
    def generator() -> Any:
        for name, tensor in A.items():
            time.sleep(0.1)
            yield name, tensor

    adapter = RecordingAdapter(tensors=poisoned(A))
    with sender(receivers=1, backend=backend) as bus, receiving(bus, backend=backend, adapter=adapter) as rx:
        manifest = [TensorSpec.of(name, tensor) for name, tensor in A.items()]
        sent = bus.send(generator(), version=2, manifest=manifest, timeout=20)
        got = rx.last(1)
    assert sent.seconds["export"] > 0.5
    assert sent.seconds.get("wire", 0.0) < 0.2, "only while something is under way"
    assert (sent.slow, got.slow) == ((), ())


def test_a_wire_that_delays_is_told(lowered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback._Sender, "link_bytes_per_s", 3e9)
    faults = {"inner": "loopback", "faults": [{"kind": "delay", "bucket": 1, "seconds": 0.3}]}
    adapters = [RecordingAdapter(tensors=poisoned(A)) for _ in range(3)]
    with sender(receivers=3, backend=FAULTY, backend_options=faults) as bus:
        rxs = [
            receiving(bus, f"e{i}", backend=FAULTY, backend_options={"inner": "loopback"}, adapter=adapter)
            for i, adapter in enumerate(adapters)
        ]
        sent = bus.send(A, version=1, timeout=20)
        again = bus.send(A, version=2, timeout=20)
        for rx in rxs:
            rx.close()
            assert same(rx.engine.weights[0], A)
    assert sent.limits["wire"] == 1e9, "three lanes share what leaves the sender"
    assert 0.3 <= sent.seconds["wire"] <= sent.total_s
    assert [text.split(":")[0] for text in sent.slow] == ["wire"]
    assert 0.0 < again.seconds["wire"] < 0.3
    assert again.slow == ()


def test_ranks_of_one_process_tell_the_limit_of_one_lane(lowered: None) -> None:
    adapter = RecordingAdapter(tensors=poisoned(A))
    with sender(receivers=2) as bus, receiving(bus, ranks=2, adapter=adapter) as rx:
        sent = bus.send(A, version=1, timeout=20)
        got = rx.last(1)
    assert (sent.limits["load"], got.limits["load"]) == (5e8, 1e9)
    assert got.bytes == 2 * sent.bytes


@pytest.mark.parametrize(
    ("backend", "direct", "phases"),
    [("local", True, {"verify", "load"}), ("loopback", True, {"verify"}), ("loopback", False, {"verify", "load"})],
)
def test_a_direct_load_has_a_limit_where_it_stays_in_one_memory(
    backend: str, direct: bool, phases: set[str], lowered: None
) -> None:
    options = {"backend": backend, "adapter": "torch", "adapter_options": {"module": torch.nn.Linear(64, 64)}}
    with WeightBus.receiver("tcp://127.0.0.1:9", **options) as bus:
        offer: Any = SimpleNamespace(direct=direct)
        assert bus._member.ranks._limits(offer) == dict.fromkeys(phases, 1e9)


def test_waiting_for_the_senders_digest_is_not_verifying(monkeypatch: pytest.MonkeyPatch) -> None:
    here, value = threading.current_thread(), host.PieceDigest.value

    def slow_here(self: host.PieceDigest) -> int:
        if threading.current_thread() is here:
            time.sleep(0.4)
        return value(self)

    monkeypatch.setattr(host.PieceDigest, "value", slow_here)
    with (
        sender(receivers=1, direct=True) as bus,
        receiving(bus, adapter="torch", adapter_options={"module": torch.nn.Linear(64, 64)}, poison=False) as rx,
    ):
        bus.send(torch.nn.Linear(64, 64), version=1, timeout=20)
        got = rx.last(1)
    assert got.seconds["verify"] < 0.2 < got.seconds["wait"]


# ---- calibration


def test_a_machine_is_measured_once_by_however_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def measure() -> float:
        calls.append(1)
        time.sleep(0.05)
        return 5e9

    monkeypatch.setattr(calibration, "_rates", {})
    monkeypatch.setattr(calibration, "_host", measure)
    rates: list[float | None] = []
    threads = [threading.Thread(target=lambda: rates.append(copy_bytes_per_s(CPU))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (rates, len(calls)) == ([5e9] * 8, 1)


def test_without_memory_to_measure_in_there_is_no_limit_and_a_refit_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure() -> float:
        raise MemoryError

    monkeypatch.setattr(calibration, "_rates", {})
    monkeypatch.setattr(calibration, "_host", measure)
    with sender(receivers=1) as bus, receiving(bus, adapter=RecordingAdapter(tensors=poisoned(A))) as rx:
        sent = bus.send(A, version=1, timeout=20)
    assert same(rx.engine.weights[0], A)
    assert (sent.limits, sent.slow, sent.limit_gbytes_per_s) == ({}, (), 0.0)


def test_the_rate_of_this_machine_is_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_rates", {})
    rate = copy_bytes_per_s(CPU)
    assert rate is not None
    assert 1e8 < rate < 1e12
