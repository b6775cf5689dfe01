"""Every row of the failure table, staged and in place: what the engine holds, what send and recv say, and the heal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import weightbus
from tests.harness import FAST, Receiving, poisoned, receiving, same, sender, wait_until, weights
from weightbus import Manifest, PartialRefitError, TensorSpec
from weightbus.testing.adapters import RecordingAdapter

STAGES = [None, "host"]
OLD, NEW = weights(0), weights(1)
SENT = len(OLD)  # buckets of version 1: one tensor each
FAULTY = "weightbus.testing.faults:FaultyBackend"


class Row:
    """One sender, one engine that holds version 1 exactly; then something fails in version 2."""

    def __init__(self, stage: str | None, faults: list[dict[str, Any]] | None = None, **adapter: Any) -> None:
        options: dict[str, Any] = {"backend": FAULTY, "backend_options": {"inner": "loopback", "faults": faults or []}}
        self.bus = sender(receivers=1, **options)
        self.fake = RecordingAdapter(tensors=poisoned(OLD), **adapter)
        self.rx: Receiving = receiving(self.bus, adapter=self.fake, stage=stage, **options)
        self.stage = stage

    def __enter__(self) -> Row:
        report = self.bus.send(OLD, version=1, timeout=20)
        assert report.outcomes == {"e0": "READY(1)"}
        assert same(self.held, OLD)
        self.rx.last(1)
        self.fake.engine.calls.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self.rx.close()
        self.bus.close()

    @property
    def held(self) -> dict[str, torch.Tensor]:
        return self.fake.engine.weights[0]

    def fails(self, source: Any = None, version: int = 2, **options: Any) -> PartialRefitError:
        with pytest.raises(PartialRefitError) as raised:
            self.bus.send(
                NEW if source is None else source, version=version, timeout=options.pop("timeout", 20), **options
            )
        return raised.value

    def is_old(self) -> None:
        """READY(old): nothing of the new version, serving."""
        assert same(self.held, OLD)
        assert self.fake.engine.serving
        assert not self.fake.engine.session
        assert self.rx.bus.state == "READY(1)"
        self.heals()

    def is_dirty(self) -> None:
        """Mixed or not known: closed session, never resumed."""
        assert not self.fake.engine.serving
        assert not self.fake.engine.session
        assert self.rx.bus.state.startswith("DIRTY")
        assert self.bus.behind()
        self.heals()

    def heals(self) -> None:
        """The next full refit brings the engine to exactly the new weights, in the same process."""
        report = self.bus.send(NEW, version=3, timeout=20)
        assert report.outcomes == {"e0": "READY(3)"}
        assert same(self.held, NEW)
        assert self.fake.engine.serving
        assert self.fake.engine.label == "3"
        assert self.bus.behind() == {}


@pytest.mark.parametrize("stage", STAGES)
def test_refused_in_check_touches_nothing(stage: str | None) -> None:
    wrong = {**NEW, "extra": torch.zeros(3), "layer.0.w": torch.zeros(7)}
    del wrong["layer.1.w"]
    with Row(stage) as row:
        with pytest.raises(weightbus.AlignmentError) as raised:
            row.bus.send(wrong, version=2, timeout=20)
        for part in ("missing 'layer.1.w'", "unexpected 'extra'", "shape 'layer.0.w'", "e0/0"):
            assert part in str(raised.value)
        assert isinstance(row.rx.last(2), weightbus.AlignmentError)
        assert set(row.fake.engine.calls) == {"check"}
        row.is_old()


@pytest.mark.parametrize("stage", STAGES)
def test_a_begin_that_fails_is_undone(stage: str | None) -> None:
    with Row(stage, fail_at="begin:1") as row:
        error = row.fails()
        assert "fails in begin" in str(error)
        assert error.outcomes == {"e0": "READY(1)"}
        assert row.fake.engine.calls[-1] == "abort undo resume"
        row.is_old()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("at", [0, 4])
def test_a_source_that_raises(stage: str | None, at: int) -> None:
    drained: list[str] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(NEW.items()):
            if i == at:
                if at:
                    wait_until(lambda: stage is not None or any(c.startswith("load") for c in row.fake.engine.calls))
                raise RuntimeError("the trainer's gather broke")
            drained.append(name)
            yield name, tensor

    manifest = Manifest([TensorSpec.of(k, v) for k, v in NEW.items()])
    with Row(stage) as row:
        with pytest.raises(weightbus.SourceError, match="gather broke") as raised:
            row.bus.send(source(), version=2, manifest=manifest, timeout=20)
        assert isinstance(raised.value.__cause__, RuntimeError)
        wait_until(lambda: len(row.rx.results) >= 2)
        row.is_dirty() if at and stage is None else row.is_old()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("bucket", [0, 2])
def test_corrupted_bytes_are_never_loaded(stage: str | None, bucket: int) -> None:
    with Row(stage, faults=[{"kind": "corrupt", "bucket": SENT + bucket}]) as row:
        error = row.fails()
        assert "digest" in str(error)
        assert f"bucket {bucket}" in str(error)
        row.is_dirty() if bucket and stage is None else row.is_old()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["kill", "truncate", "duplicate", "reorder"])
def test_a_broken_transport(stage: str | None, kind: str) -> None:
    with Row(stage, faults=[{"kind": kind, "bucket": SENT + 2}]) as row:
        row.fails()
        if stage is None:
            assert row.rx.bus.state.startswith(("DIRTY", "READY(1)"))
            row.heals()
        else:
            row.is_old()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["stall", "drop"])
def test_a_stalled_transport_ends_in_time(stage: str | None, kind: str) -> None:
    with Row(stage, faults=[{"kind": kind, "bucket": SENT + 1}]) as row:
        began = time.monotonic()
        error = row.fails()
        assert time.monotonic() - began < FAST["stall_timeout"] + 12
        assert ("no progress" if kind == "stall" else "in place of 1") in str(error)
        row.is_dirty() if stage is None else row.is_old()


@pytest.mark.parametrize(("stage", "times", "dirty"), [(None, 1, True), ("host", 1, False), ("host", 2, True)])
def test_a_load_that_fails(stage: str | None, times: int, dirty: bool) -> None:
    with Row(stage, fail_at="load:7", fail_times=times) as row:
        if dirty:
            assert "fails in load" in str(row.fails())
            row.is_dirty()
        else:  # rolled forward from the copy
            assert row.bus.send(NEW, version=2, timeout=20).outcomes == {"e0": "READY(2)"}
            assert same(row.held, NEW)


@pytest.mark.parametrize(("stage", "times", "dirty"), [(None, 1, True), ("host", 1, False), ("host", 2, True)])
def test_a_finish_that_fails(stage: str | None, times: int, dirty: bool) -> None:
    with Row(stage, fail_at="finish:1", fail_times=times) as row:
        if dirty:
            assert "fails in finish" in str(row.fails())
            row.is_dirty()
        else:
            assert row.bus.send(NEW, version=2, timeout=20).outcomes == {"e0": "READY(2)"}
            assert same(row.held, NEW)


@pytest.mark.parametrize("stage", STAGES)
def test_a_resume_is_tried_twice_then_reported_and_resumed_by_the_next_offer(stage: str | None) -> None:
    with Row(stage, fail_at="resume:1", fail_times=2) as row:
        error = row.fails()
        assert error.outcomes == {"e0": "PAUSED(2)"}
        assert same(row.held, NEW)
        assert not row.fake.engine.serving
        assert row.rx.bus.state.startswith("PAUSED(2)")
        loads = len(row.fake.engine.calls)
        assert row.bus.send(NEW, version=2, timeout=20).outcomes == {"e0": "READY(2)"}
        assert row.fake.engine.calls[loads:] == ["resume"], "no byte moves to an engine that only needs to resume"
        assert row.fake.engine.serving


@pytest.mark.parametrize("stage", STAGES)
def test_one_failed_resume_is_no_failure(stage: str | None) -> None:
    with Row(stage, fail_at="resume:1", fail_times=1) as row:
        assert row.bus.send(NEW, version=2, timeout=20).outcomes == {"e0": "READY(2)"}


@pytest.mark.parametrize("stage", STAGES)
def test_the_coordinator_is_lost_between_complete_and_commit(
    stage: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightbus.control.coordinator import Coordinator

    with Row(stage) as row:
        run_id = row.bus._coordinator.config.run_id
        address = row.bus.address

        def cut(self: Coordinator, run: Any) -> None:
            if any(e.complete for e in run.active()):
                self._reactor.remove(self.roster.hub)
                self.roster.hub.close()
                raise weightbus.LocalProtocolError("cut for the test")

        with monkeypatch.context() as patch:
            patch.setattr(Coordinator, "_commit_ready", cut)
            with pytest.raises(weightbus.WeightBusError):
                row.bus.send(NEW, version=2, timeout=3)
        wait_until(lambda: row.rx.bus.state.startswith("READY(1)" if stage else "HELD(2)"))
        row.bus._closers.clear()
        row.bus.close()
        calls = len(row.fake.engine.calls)
        row.bus = weightbus.WeightBus.sender(
            address,
            receivers=1,
            run_id=run_id,
            bucket_bytes=4096,
            backend=FAULTY,
            backend_options={"inner": "loopback", "faults": []},
            **FAST,
        )
        assert row.bus.send(NEW, version=2, timeout=20).outcomes == {"e0": "READY(2)"}
        if stage is None:
            assert row.fake.engine.calls[calls:] == ["finish 2", "resume"], (
                "HELD is finished by the next contact, without bytes"
            )
        assert same(row.held, NEW)


@pytest.mark.parametrize("stage", STAGES)
def test_the_refit_deadline_ends_everything(stage: str | None) -> None:
    with Row(stage, faults=[{"kind": "stall", "bucket": SENT + 3}]) as row:
        error = row.fails(timeout=1.5)
        assert "timeout" in str(error)
        row.is_dirty() if stage is None else row.is_old()


def test_abort_of_an_engine_that_was_dirty_does_not_resume_it() -> None:
    with Row(None, fail_at="load:7", fail_times=1) as row:
        row.fails()
        assert not row.fake.engine.serving
        with pytest.raises(weightbus.SourceError):
            row.bus.send(_breaks(), version=2, manifest=[TensorSpec.of(k, v) for k, v in NEW.items()], timeout=20)
        assert row.rx.bus.state.startswith("DIRTY")
        assert not row.fake.engine.serving
        row.heals()


def _breaks() -> Iterator[tuple[str, torch.Tensor]]:
    raise RuntimeError("at once")
    yield  # pragma: no cover


def test_an_update_that_fails_in_the_background_ends_the_refit_at_once() -> None:
    """As an engine's own reply does that comes before its ranks have loaded anything."""
    with Row(None, stall_at="load:8", stall_s=1.0) as row:
        driver = row.rx.bus._member.driver._driver

        def poll() -> None:
            if any(call.startswith("load") for call in row.fake.engine.calls):
                raise weightbus.EngineError("the update was refused")

        driver.poll = poll  # type: ignore[method-assign]
        error = row.fails()
        assert "the update was refused" in str(error)
        del driver.poll
        row.is_dirty()
