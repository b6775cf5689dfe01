"""The rules of one engine's driver, message by message, on a reactor without a thread."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weightbus import PeerLost, RefitAborted
from weightbus.adapter import EngineDriver, Outcome, StepFreeDriver
from weightbus.control import messages as m
from weightbus.jobs import Jobs
from weightbus.reactor import Reactor
from weightbus.refit import Driver, Held
from weightbus.testing.adapters import RecordingAdapter

RUN = "run"
HELD = Held(Outcome.HELD, RUN, 1, "the coordinator was lost", "refit1")


class ByHand(Reactor):
    """Scripts go on when `step` is called."""

    def __init__(self) -> None:
        self.name = "by hand"
        self._scripts = []
        self.errors: list[Exception] = []
        self.on_broken = self.errors.append

    def turn(self) -> None:
        pass

    def step(self) -> None:
        while self._step_scripts():
            pass


class Rig:
    """One driver of an engine of `world` ranks; jobs wait until `work`."""

    def __init__(self, held: Held, world: int = 1, make: Any = None, beside: bool = True) -> None:
        self.fake = RecordingAdapter(tensors={"w": torch.zeros(1)})
        self.fake.engine.driven = True
        self.fake.engine.session = held.outcome is Outcome.HELD
        self.reactor = ByHand()
        self.jobs = Jobs(self.reactor)
        self.told: list[Any] = []
        self.orders: list[str] = []
        self.ends: list[m.Report] = []
        self.driver = Driver(
            self.reactor, "e0", world, make or self.fake.driver, self.jobs, self._tell,
            lambda order: self.orders.append(order.order), lambda report, run: self.ends.append(report),
            beside=beside,
        )  # fmt: skip
        self.driver.held = held

    def _tell(self, message: object) -> bool:
        self.told.append(message)
        return True

    def offer(self, version: int, **changes: Any) -> str:
        """Offer a version; the refit's id."""
        facts: dict[str, Any] = {
            "refit": f"refit{version}", "run_id": RUN, "version": version, "timeout_s": 60.0, "finish_timeout_s": 60.0,
            "partial": False, "staged": False, "base_version": -1, "tensors": 1, "nbytes": 4,
        }  # fmt: skip
        offer = m.OfferDriver(**{**facts, **changes})
        self.driver.offer(offer)
        self.reactor.step()
        return offer.refit

    def state(self, refit: str, *serves: int, **facts: bool) -> None:
        self.driver.rank_state(m.RankState(refit=refit, serves=serves, **facts))

    def work(self) -> list[str]:
        """Run the jobs that wait, and those that follow; their kinds."""
        kinds = []
        self.reactor.step()
        while self.jobs._queue:
            job = self.jobs._queue.popleft()
            kinds.append(job.kind)
            job.started = True
            self.jobs.execute(job)
            self.reactor.step()
        return kinds

    def begun(self, version: int) -> str:
        """Go to the stream of an in-place refit."""
        refit = self.offer(version)
        self.driver.begin(refit)
        assert self.work() == ["begin"]
        return refit

    def answers(self) -> list[str]:
        return [x.answer for x in self.told if isinstance(x, m.DriverAnswer)]

    def reports(self) -> list[tuple[str, str]]:
        return [(x.refit, x.outcome) for x in self.told if isinstance(x, m.Report)]


def test_an_offer_that_comes_while_what_was_held_is_finished_waits_its_turn() -> None:
    rig = Rig(HELD)
    rig.offer(1)
    rig.state("refit1", 0, verified=True)
    rig.reactor.step()
    assert [job.kind for job in rig.jobs._queue] == ["finish"]  # slow: nobody has taken it yet
    refit = rig.offer(2)
    rig.driver.begin(refit)
    rig.reactor.step()
    assert rig.answers() == []
    assert [job.kind for job in rig.jobs._queue] == ["finish"]
    assert rig.work() == ["finish"]
    assert rig.driver.held == Held(Outcome.READY, RUN, 1)
    assert rig.answers() == ["OK"]
    assert rig.driver.run is not None
    assert rig.driver.run.offer.version == 2


def test_a_rank_that_is_lost_takes_with_it_what_the_engine_was_ready_with() -> None:
    rig = Rig(Held(Outcome.READY, RUN, 1))
    rig.driver.rank_lost((0,))
    assert rig.driver.held.outcome is Outcome.DIRTY
    rig.offer(1)
    assert rig.answers() == ["OK"], "its new process has other weights"


@pytest.mark.parametrize("lost_first", [False, True])
def test_a_rank_that_is_lost_as_commit_comes_leaves_the_engine_dirty(lost_first: bool) -> None:
    rig = Rig(Held(Outcome.READY, RUN, 1))
    refit = rig.begun(2)
    rig.state(refit, 0, touched=True, verified=True, dropped=True)
    commit = m.Commit(refit=refit, finish_timeout_s=60.0)
    both = [lambda: rig.driver.commit(commit), lambda: rig.driver.rank_lost((0,))]
    for happens in reversed(both) if lost_first else both:
        happens()
    assert rig.work() == ["abort"]
    assert rig.driver.held.outcome is Outcome.DIRTY
    assert not rig.fake.engine.serving
    assert rig.reports() == [(refit, "DIRTY")]


def test_an_offer_that_waits_is_taken_back_by_its_abort() -> None:
    rig = Rig(HELD)
    rig.offer(1)
    rig.state("refit1", 0, verified=True)
    rig.reactor.step()
    refit = rig.offer(2)
    rig.driver.abort(refit, RefitAborted("cancelled"))
    assert rig.reports() == [(refit, "HELD")]
    assert rig.work() == ["finish"]
    assert rig.answers() == []
    assert rig.driver.run is None


def test_an_offer_that_waits_is_gone_with_its_coordinator() -> None:
    rig = Rig(HELD)
    rig.offer(1)
    rig.state("refit1", 0, verified=True)
    rig.reactor.step()
    rig.offer(2)
    rig.driver.lost()
    assert rig.work() == ["finish"]
    assert rig.answers() == []
    assert rig.driver.run is None


def test_a_rank_that_says_verified_after_the_coordinator_is_lost_makes_held() -> None:
    rig = Rig(Held(Outcome.READY, RUN, 1), world=2)
    refit = rig.begun(2)
    rig.state(refit, 0, touched=True, verified=True, dropped=True)
    rig.driver.lost()
    rig.reactor.step()
    assert "drop" not in rig.orders
    rig.state(refit, 1, touched=True, verified=True, dropped=True)
    assert rig.work() == []
    assert rig.driver.held.outcome is Outcome.HELD
    assert rig.driver.held.version == 2


def test_a_rank_that_dropped_after_the_coordinator_was_lost_makes_dirty_at_once() -> None:
    rig = Rig(Held(Outcome.READY, RUN, 1), world=2)
    refit = rig.begun(2)
    rig.state(refit, 0, touched=True, verified=True, dropped=True)
    rig.driver.lost()
    rig.state(refit, 1, touched=True, dropped=True)
    assert rig.work() == ["abort"]
    assert rig.driver.held.outcome is Outcome.DIRTY


def test_an_abort_that_comes_while_ranks_are_asked_is_no_held() -> None:
    rig = Rig(Held(Outcome.READY, RUN, 1), world=2)
    refit = rig.begun(2)
    rig.driver.lost()
    rig.reactor.step()
    rig.driver.abort(refit, PeerLost("a reader died"))
    for rank in range(2):
        rig.state(refit, rank, touched=True, verified=True, dropped=True)
    assert rig.work() == ["abort"]
    assert rig.driver.held.outcome is Outcome.DIRTY


def test_an_adapter_that_cannot_make_its_driver_fails_begin_by_name() -> None:
    def make() -> EngineDriver:
        raise RuntimeError("no engine answers")

    rig = Rig(Held(), make=make)
    refit = rig.offer(1)
    rig.driver.begin(refit)
    rig.work()
    (report,) = rig.ends
    assert report.error is not None
    assert "begin raised RuntimeError: no engine answers" in str(report.error.to_error())
    assert rig.reactor.errors == []
    assert rig.driver.run is None
    rig.offer(2)
    assert rig.answers() == ["OK", "OK"], "the next refit is not held up"


def test_a_script_that_raises_after_begin_closes_the_engine_s_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a fault of ours")

    rig = Rig(Held(Outcome.READY, RUN, 1))
    refit = rig.begun(2)
    monkeypatch.setattr(rig.driver, "_finish", broken)
    rig.driver.commit(m.Commit(refit=refit, finish_timeout_s=60.0))
    assert rig.work() == ["abort"]
    assert not rig.fake.engine.session
    assert rig.driver.held.outcome is Outcome.DIRTY
    (report,) = rig.ends
    assert "KeyError" in str(report.error and report.error.to_error())
    assert rig.reactor.errors == []
    monkeypatch.undo()
    rig.begun(3)


@pytest.mark.parametrize(("beside", "told"), [(True, ["DriverAnswer", "Begun"]), (False, ["DriverAnswer"])])
def test_a_driver_with_nothing_to_begin_says_begun_with_its_ok_where_all_ranks_are_beside_it(
    beside: bool, told: list[str]
) -> None:
    rig = Rig(Held(Outcome.READY, RUN, 1), make=StepFreeDriver, beside=beside)
    rig.offer(2)
    assert [type(x).__name__ for x in rig.told] == told


@pytest.mark.parametrize(("touched", "outcome"), [(False, Outcome.READY), (True, Outcome.DIRTY)])
def test_what_it_holds_after_a_refusal_elsewhere_is_what_its_ranks_say(touched: bool, outcome: Outcome) -> None:
    rig = Rig(Held(Outcome.READY, RUN, 1), make=StepFreeDriver)
    refit = rig.offer(2)
    rig.driver.abort(refit, RefitAborted("another engine refused"))
    rig.reactor.step()
    assert rig.orders == ["drop"]
    rig.state(refit, 0, touched=touched, dropped=True)
    rig.reactor.step()
    assert rig.driver.held.outcome is outcome
    assert rig.reports() == [(refit, outcome.value)]
