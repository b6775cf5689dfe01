"""The state of one engine, and the failure table: what an engine holds after each way a refit can end.

`Driver` is the only place that changes an engine's state. Its script is the refit as the engine sees it; the rows of the
failure table in docs/protocol.md are the branches of `_settle`, `_roll_forward` and `_finish`. The rules were model
checked (docs/model/refit.pml).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

import attrs

from weightbus.adapter import EngineDriver, Outcome, Refit, StepFreeDriver
from weightbus.control import messages as m
from weightbus.deadline import Deadline
from weightbus.errors import EngineError, PeerLost, RefitAborted, TransferTimeout, VersionError, WeightBusError, named
from weightbus.jobs import Job, Jobs
from weightbus.reactor import REPORT_IT, Reactor, Script, Wait, log

ABORT_S = 30.0
ASK_S = 5.0


@attrs.frozen
class Held:
    """What an engine holds.

    Attributes:
        outcome: READY, PAUSED, HELD or DIRTY (DEAD once its process is known to be gone).
        run_id: the sender's run that `version` counts in.
        version: last version published by `finish`; for HELD the version that waits to be finished; -1: none yet.
        reason: why it is not READY.
        refit: for HELD, the refit that loaded it.
    """

    outcome: Outcome = Outcome.READY
    run_id: str = ""
    version: int = -1
    reason: str = ""
    refit: str = ""

    def is_at(self, run_id: str, version: int) -> bool:
        return (self.run_id, self.version) == (run_id, version)


@attrs.define(eq=False)
class DriverRun:
    """One refit as the driver sees it."""

    offer: m.OfferDriver
    deadline: Deadline
    previous: Held
    begin: bool = False
    commit: m.Commit | None = None
    aborted: WeightBusError | None = None
    lost: bool = False
    failed: WeightBusError | None = None
    begun: bool = False
    superseded: bool = False
    states: dict[tuple[int, ...], m.RankState] = attrs.field(factory=dict)
    seconds: dict[str, float] = attrs.field(factory=dict)
    paused_at_s: float = 0.0


class Driver:
    """Steps one engine through refits. On the bus thread; the engine's own steps run as jobs of the caller's thread.

    Args:
        world: number of ranks of the engine.
        driver: makes the adapter's driver side; called once, in the caller's thread.
        tell: sends a message to the coordinator; False when it is not there.
        order: sends a RankOrder to every rank process, this one included.
        on_end: the refit is over for this process, with its report.
        beside: all ranks live in this process.
    """

    def __init__(
        self,
        reactor: Reactor,
        engine: str,
        world: int,
        driver: Callable[[], EngineDriver],
        jobs: Jobs,
        tell: Callable[[object], bool],
        order: Callable[[m.RankOrder], None],
        on_end: Callable[[m.Report, DriverRun | None], None],
        *,
        beside: bool,
    ) -> None:
        self.held = Held()
        self.run: DriverRun | None = None
        self.engine, self.world = engine, world
        self._reactor, self._make, self._jobs, self._beside = reactor, driver, jobs, beside
        self._made: EngineDriver | None = None
        self._tell, self._order, self._on_end = tell, order, on_end
        self._next: m.OfferDriver | None = None
        self._busy = False
        self._asked: dict[tuple[int, ...], m.RankState] = {}
        self._dead_ranks: set[tuple[int, ...]] = set()

    @property
    def _driver(self) -> EngineDriver:
        """Made when it is first needed: rank 0 of an engine with a driver of its own never needs it."""
        if self._made is None:
            self._made = self._make()
        return self._made

    # ---- messages

    def offer(self, offer: m.OfferDriver) -> None:
        if self.run is not None:
            self.run.superseded = self.run.lost = True
        if self._busy:
            self._next = offer
        else:
            self._busy = True
            self._reactor.start(self._script(offer))

    def begin(self, refit: str) -> None:
        if self.run is not None and self.run.offer.refit == refit:
            self.run.begin = True

    def commit(self, message: m.Commit) -> None:
        """A driver that has left the refit refuses COMMIT with its state."""
        if self.run is not None and self.run.offer.refit == message.refit:
            self.run.commit = message
        else:
            self._report(message.refit, None)

    def abort(self, refit: str, error: WeightBusError) -> None:
        if self.run is not None and self.run.offer.refit == refit:
            if self.run.aborted is None:
                self.run.aborted = error
            return
        if self._next is not None and self._next.refit == refit:
            self._next = None
        self._report(refit, None)

    def lost(self) -> None:
        """The coordinator is gone, and with it what it has offered."""
        self._next = None
        if self.run is not None:
            self.run.lost = True

    def rank_state(self, state: m.RankState) -> None:
        self._dead_ranks.discard(state.serves)
        if self.run is not None and self.run.offer.refit == state.refit:
            self.run.states[state.serves] = state
        elif self.held.outcome is Outcome.HELD and state.refit == self.held.refit:
            self._asked[state.serves] = state
        elif not state.dropped:
            self._order(m.RankOrder(refit=state.refit, order="drop"))  # it holds what this driver has left

    def rank_lost(self, serves: tuple[int, ...]) -> None:
        """Its process may come back with other weights: what the engine held no longer counts."""
        self._dead_ranks.add(serves)
        if self.run is None and self.held.outcome in (Outcome.READY, Outcome.PAUSED) and self.held.version >= 0:
            self.held = Held(Outcome.DIRTY, self.held.run_id, -1, f"ranks {list(serves)} were lost")

    # ---- facts

    def _covered(self, run: DriverRun, fact: Callable[[m.RankState], bool]) -> bool:
        """Every rank of the engine says so."""
        ranks = {r for state in run.states.values() if fact(state) for r in state.serves}
        return len(ranks) == self.world

    def _any_touched(self, run: DriverRun) -> bool:
        """Some rank loaded a byte, or may have: a dead or silent one counts once bytes could flow."""
        return any(s.touched for s in run.states.values()) or bool(self._dead_ranks)

    def _failed(self, run: DriverRun) -> bool:
        """What the engine does in the background (an update call under way) has failed."""
        if run.begun and run.failed is None:
            try:
                self._driver.poll()
            except Exception as exc:
                run.failed = self._placed(exc, "load")
        return run.failed is not None

    def _rank_error(self, run: DriverRun) -> WeightBusError | None:
        if self._failed(run):
            return run.failed
        for state in run.states.values():
            if state.error is not None:
                return state.error.to_error()
        if self._dead_ranks:
            return PeerLost(f"ranks {sorted(self._dead_ranks)} of the engine are gone", peer=self.engine)
        return None

    # ---- the script

    def _script(self, offer: m.OfferDriver) -> Script:
        self._dead_ranks.clear()  # an offer comes only when every rank is here (again)
        try:
            if not (yield from self._answer(offer)):
                run = self.run = DriverRun(offer, Deadline.after(offer.timeout_s), self.held)
                self._tell(m.DriverAnswer(refit=offer.refit, answer="OK"))
                error = yield from self._refit(run)
                self._leave(run, error)
        except Exception as exc:
            error = self._unforeseen(exc)
            if self.run is not None:
                self._leave(self.run, error)
            else:
                self._report(offer.refit, error, end=True)
        self._go_on()

    def _refit(self, run: DriverRun) -> Generator[Wait, bool, WeightBusError | None]:
        """Why the engine is not on the new version, if so."""
        try:
            return (yield from self._staged_refit(run) if run.offer.staged else self._in_place_refit(run))
        except Exception as exc:
            error = self._unforeseen(exc)
        if run.begun and self.held is run.previous:
            self.held = Held(Outcome.DIRTY, run.previous.run_id, -1, str(error))  # should its abort raise too
            yield from self._engine_abort(run, error, loaded=True)
        return error

    def _unforeseen(self, exc: Exception) -> WeightBusError:
        log.exception("a refit of %s was broken off", self.engine, exc_info=exc)
        return named(exc, RefitAborted, "the refit's script", peer=self.engine, advice=REPORT_IT)

    def _answer(self, offer: m.OfferDriver) -> Generator[Wait, bool, bool]:
        """Answer an offer that needs no bytes; True if that was all."""
        held = self.held
        at = held.is_at(offer.run_id, offer.version)
        if at and held.outcome is Outcome.READY:
            self._tell(m.DriverAnswer(refit=offer.refit, answer="ALREADY"))
            return True
        if at and held.outcome is Outcome.PAUSED:
            yield from self._resume(Deadline.after(offer.finish_timeout_s))
            self._report(offer.refit, None, end=True)
            return True
        if at and held.outcome is Outcome.HELD:
            done = yield from self._finish_held(offer)
            if done:
                self._report(offer.refit, None, end=True)
                return True
        if held.run_id == offer.run_id and held.outcome is not Outcome.HELD and offer.version < held.version:
            error = VersionError(
                f"version {offer.version} is below {held.version}, which this engine holds",
                peer=self.engine,
                phase="offer",
                advice="Versions rise within a run; begin a new run (a new sender) to count anew.",
            )
            self._tell(m.DriverAnswer(refit=offer.refit, answer="REFUSED", error=m.WireError.of(error, self.engine)))
            return True
        if offer.partial and not (held.outcome is Outcome.READY and held.is_at(offer.run_id, offer.base_version)):
            self._tell(m.DriverAnswer(refit=offer.refit, answer="BEHIND"))
            return True
        return False

    def _finish_held(self, offer: m.OfferDriver) -> Generator[Wait, bool, bool]:
        """HELD(v): whoever finishes it asks all ranks first."""
        held = self.held
        self._asked = {}
        self._order(m.RankOrder(refit=held.refit, order="state"))

        def ranks() -> set[int]:
            return {r for s in self._asked.values() if s.verified for r in s.serves}

        yield Wait(lambda: len(ranks()) == self.world or bool(self._dead_ranks), Deadline.after(ASK_S))
        if len(ranks()) != self.world:
            self.held = attrs.evolve(held, outcome=Outcome.DIRTY, reason="a rank lost what it held", version=-1)
            return False
        yield from self._finish(held.refit, offer.run_id, offer.version, Deadline.after(offer.finish_timeout_s))
        return True

    def _out(self, run: DriverRun) -> bool:
        return run.aborted is not None or run.lost

    def _staged_refit(self, run: DriverRun) -> Generator[Wait, bool, WeightBusError | None]:
        """Nothing is touched before the one decision; then roll forward without the coordinator."""
        yield Wait(lambda: run.commit is not None or self._out(run), run.deadline)
        if run.commit is None or run.aborted is not None:
            return self._why(run)
        deadline = Deadline.after(run.commit.finish_timeout_s)
        error = yield from self._begin(run, deadline)
        if error is not None:
            return error
        return (yield from self._roll_forward(run, deadline))

    def _roll_forward(self, run: DriverRun, deadline: Deadline) -> Generator[Wait, bool, WeightBusError | None]:
        offer = run.offer
        self._order(m.RankOrder(refit=offer.refit, order="load"))

        def all_loaded() -> bool:
            return self._covered(run, lambda s: s.loaded)

        yield Wait(lambda: all_loaded() or self._rank_error(run) is not None, deadline)
        if not all_loaded() or self._dead_ranks:
            error = self._rank_error(run) or TransferTimeout(
                "ranks did not load in time",
                peer=self.engine,
                phase="load",
                advice="Raise finish_timeout; every rank must be in recv.",
            )
            yield from self._engine_abort(run, error, loaded=True)
            return error
        return (yield from self._finish(offer.refit, offer.run_id, offer.version, deadline, run))

    def _in_place_refit(self, run: DriverRun) -> Generator[Wait, bool, WeightBusError | None]:
        begins = self._nothing_to_begin()  # at once: one round trip less, and nothing that a refusal would have to undo
        yield Wait(lambda: begins or run.begin or self._out(run), run.deadline)
        if not (begins or run.begin) or self._out(run):
            return self._why(run)
        error = yield from self._begin(run, run.deadline)
        if error is not None:
            return error
        self._tell(m.Begun(refit=run.offer.refit))
        yield Wait(
            lambda: run.commit is not None or self._out(run) or bool(self._dead_ranks) or self._failed(run),
            run.deadline,
        )
        if run.commit is not None and run.aborted is None and run.failed is None and not self._dead_ranks:
            deadline = Deadline.after(run.commit.finish_timeout_s)
            return (yield from self._finish(run.offer.refit, run.offer.run_id, run.offer.version, deadline, run))
        return (yield from self._settle(run))

    def _nothing_to_begin(self) -> bool:
        try:
            return self._beside and isinstance(self._driver, StepFreeDriver)
        except Exception:  # the adapter cannot make its driver: said when it is to begin
            return False

    def _settle(self, run: DriverRun) -> Generator[Wait, bool, WeightBusError | None]:
        """Begun, in place, and no COMMIT: HELD if verified everywhere and only the coordinator is lost; undone if no byte
        was loaded; else DIRTY."""
        error = self._why(run)

        def broken() -> bool:
            return run.aborted is not None or bool(self._dead_ranks) or self._failed(run)

        def said() -> bool:
            return self._covered(run, lambda s: s.dropped or s.verified)

        # that a rank has verified may be on its way
        yield Wait(lambda: broken() or run.superseded or said(), Deadline.after(ASK_S))
        if not broken() and self._covered(run, lambda s: s.verified):
            self.held = Held(Outcome.HELD, run.offer.run_id, run.offer.version, str(error), run.offer.refit)
            return error
        self._order(m.RankOrder(refit=run.offer.refit, order="drop"))
        yield Wait(lambda: said() or bool(self._dead_ranks), Deadline.after(ASK_S))
        yield from self._engine_abort(run, error, loaded=not said() or self._any_touched(run))
        return error

    def _why(self, run: DriverRun) -> WeightBusError:
        if run.aborted is not None:
            return run.aborted
        if run.failed is not None:
            return run.failed
        if run.superseded:
            return RefitAborted("another refit was offered", peer="sender/0", phase="stream")
        if run.lost:
            return PeerLost("the coordinator is gone", peer="sender/0", phase="stream")
        return self._rank_error(run) or TransferTimeout(
            "no decision came in time",
            peer="sender/0",
            phase="commit",
            advice="Raise send's timeout, or look for the stalled side in its log.",
        )

    # ---- the engine's own steps

    def _job(self, kind: str, call: Callable[[], Any], deadline: Deadline) -> Generator[Wait, bool, Job]:
        try:
            instant = self._driver.instant
        except Exception as exc:  # the adapter cannot make its driver
            return Job(kind, call, started=True, done=True, error=self._placed(exc, kind))
        if instant:
            job = Job(kind, call, started=True)
            self._jobs.execute(job)
        else:
            job = yield from self._jobs.run(kind, call, deadline)
        job.error = self._placed(job.error, kind)
        return job

    def _placed(self, error: BaseException | None, kind: str) -> WeightBusError | None:
        """The error as one of ours that says where it was raised."""
        if error is None:
            return None
        placed = named(error, EngineError, kind)
        placed.phase, placed.peer = placed.phase or kind, placed.peer or self.engine
        return placed

    def _begin(self, run: DriverRun, deadline: Deadline) -> Generator[Wait, bool, WeightBusError | None]:
        offer, held = run.offer, self.held
        refit = Refit(
            refit_id=offer.refit,
            version=offer.version,
            partial=offer.partial,
            staged=offer.staged,
            previous=held.outcome,
            tensors=offer.tensors,
            nbytes=offer.nbytes,
        )

        def call() -> None:
            if held.outcome is not Outcome.READY:
                self._driver.heal(deadline)
            self._driver.begin(refit, deadline)

        run.paused_at_s = time.monotonic()
        job = yield from self._job("begin", call, deadline)
        run.seconds["begin"] = time.monotonic() - run.paused_at_s
        if job.error is not None:
            if job.started and isinstance(job.error, WeightBusError):
                yield from self._engine_abort(run, job.error, loaded=False)
            return job.error if isinstance(job.error, WeightBusError) else None
        run.begun = True
        return None

    def _engine_abort(self, run: DriverRun, error: WeightBusError, *, loaded: bool) -> Script:
        """Undo, or close the session and stay paused. READY(old) in the table means the state before the offer."""
        previous = run.previous
        resume = previous.outcome is Outcome.READY
        deadline = Deadline.after(ABORT_S)
        job = yield from self._job(
            "abort", lambda: self._driver.abort(str(error), loaded=loaded, resume=resume, deadline=deadline), deadline
        )
        if job.error is not None:
            error.add_note(f"while cleaning up: {job.error}")
        dead = any(isinstance(e, EngineError) and e.dead for e in (error, job.error))
        if dead:
            self.held = Held(Outcome.DEAD, reason=str(error))
        elif loaded or (job.error is not None and resume):
            self.held = Held(Outcome.DIRTY, previous.run_id, -1, str(error))
        else:
            self.held = previous

    def _finish(
        self, refit: str, run_id: str, version: int, deadline: Deadline, run: DriverRun | None = None
    ) -> Generator[Wait, bool, WeightBusError | None]:
        start = time.monotonic()
        job = yield from self._job("finish", lambda: self._finish_and_resume(version, deadline), deadline)
        if (
            isinstance(job.error, WeightBusError)
            and run is not None
            and run.offer.staged
            and job.started
            and not getattr(job.error, "dead", False)
        ):
            log.warning("finish failed, trying once more: %s", job.error)
            job = yield from self._job("finish", lambda: self._finish_and_resume(version, deadline), deadline)
        if run is not None:
            run.seconds["finish"] = time.monotonic() - start
        if isinstance(job.error, WeightBusError):
            if run is not None:
                yield from self._engine_abort(run, job.error, loaded=True)
            else:
                self.held = Held(Outcome.DIRTY, run_id, -1, str(job.error))
            return job.error
        self.held = Held(Outcome.PAUSED, run_id, version, "not resumed yet")
        error = yield from self._resume(deadline, job)
        if run is not None:
            run.seconds["pause"] = time.monotonic() - run.paused_at_s
        self._order(m.RankOrder(refit=refit, order="published", run_id=run_id, version=version))
        return error

    def _finish_and_resume(self, version: int, deadline: Deadline) -> Exception | None:
        """In one job: what resume raised is returned, for the version is finished all the same."""
        self._driver.finish(version, deadline)
        try:
            self._driver.resume(deadline)
        except Exception as exc:
            return exc
        return None

    def _resume(self, deadline: Deadline, tried: Job | None = None) -> Generator[Wait, bool, WeightBusError | None]:
        """Resume, twice at most; `tried` is the job that has done it once."""
        for attempt in (1, 2):
            if tried is not None and attempt == 1:
                job = Job("resume", lambda: None, done=True, error=self._placed(tried.result, "resume"))
            else:
                job = yield from self._job("resume", lambda: self._driver.resume(deadline), deadline)
            if not isinstance(job.error, WeightBusError):
                self.held = Held(Outcome.READY, self.held.run_id, self.held.version)
                return None
            log.warning("resume failed (attempt %d): %s", attempt, job.error)
            self.held = attrs.evolve(self.held, reason=str(job.error))
        return job.error if isinstance(job.error, WeightBusError) else None

    # ---- the end

    def _leave(self, run: DriverRun, error: WeightBusError | None) -> None:
        self.run = None
        if self.held.outcome is not Outcome.HELD and not self.held.is_at(run.offer.run_id, run.offer.version):
            self._order(m.RankOrder(refit=run.offer.refit, order="drop"))
        self._report(run.offer.refit, error, end=True, run=run)

    def _go_on(self) -> None:
        """One script at a time: an offer that came meanwhile is next."""
        offer, self._next = self._next, None
        self._busy = offer is not None
        if offer is not None:
            self._reactor.start(self._script(offer))

    def _report(
        self, refit: str, error: WeightBusError | None, *, end: bool = False, run: DriverRun | None = None
    ) -> None:
        held = self.held
        report = m.Report(
            refit=refit,
            outcome=held.outcome.value,
            run_id=held.run_id,
            version=held.version,
            error=m.WireError.of(error, self.engine) if error is not None else None,
            seconds={} if run is None else run.seconds,
        )
        self._tell(report)
        if end:
            self._on_end(report, run)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
