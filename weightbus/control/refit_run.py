"""One refit as the coordinator sees it: its engines, its lanes, and what becomes of those that fail."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import attrs

from weightbus.adapter import Outcome
from weightbus.control import messages as m
from weightbus.control.roster import CoordinatorConfig, Engine, Member, Roster
from weightbus.deadline import Deadline
from weightbus.errors import (
    AlignmentError,
    ConfigError,
    EngineError,
    PartialRefitError,
    PeerLost,
    RefitAborted,
    SourceError,
    TransferTimeout,
    VersionError,
    WeightBusError,
)
from weightbus.reactor import Script, Wait, log

REPORT_GRACE_S = 10.0
ALREADY = "ALREADY"


@attrs.define(eq=False)
class EngineRun:
    """One engine in one refit."""

    engine: Engine
    driver: Member
    ranks: dict[int, Member]
    staged: bool
    answer: str = ""  # OK, ALREADY, BEHIND, REFUSED, OUTCOME
    answered: bool = False  # False: OK is assumed from what the engine said last; its driver's word is under way
    begin_sent: bool = False
    answers: dict[bytes, m.RanksAnswer] = attrs.field(factory=dict)
    told_plan: set[bytes] = attrs.field(factory=set)  # links that have got the plan in full
    begun: bool = False
    completes: dict[bytes, m.Complete] = attrs.field(factory=dict)
    committed: bool = False
    report: m.Report | None = None
    outcome: str = ""
    error: WeightBusError | None = None
    give_up: Deadline | None = None
    progress_s: float = attrs.field(factory=time.monotonic)

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def links(self) -> set[bytes]:
        return {member.link for member in self.ranks.values()}

    def member(self, link: bytes) -> Member:
        """The process behind one of `links`."""
        return next(x for x in self.ranks.values() if x.link == link)

    @property
    def active(self) -> bool:
        """Still on its way to the new version."""
        return self.answer == "OK" and self.error is None and not self.outcome

    @property
    def complete(self) -> bool:
        return self.links <= set(self.completes)

    @property
    def checked(self) -> bool:
        """Its driver and all its ranks have answered the offer."""
        return self.answered and self.links <= {link for link, a in self.answers.items() if not a.need_plan}

    @property
    def waiting(self) -> bool:
        """Still to be committed."""
        return self.active and not self.committed

    def touch(self) -> None:
        self.progress_s = time.monotonic()


@attrs.define(eq=False)
class LaneRun:
    """One lane in one refit."""

    id: str
    engine: EngineRun
    rank: int
    sender: int
    upstream: str = ""  # the lane whose reader feeds this one, in a chain
    credited: int = 0


@attrs.define(eq=False)
class RefitRun:
    """One refit: what senders and engines have said in it. A failed engine is dropped alone."""

    roster: Roster
    config: CoordinatorConfig
    version: int
    partial: bool
    deadline: Deadline
    refit: str = attrs.field(factory=lambda: os.urandom(16).hex())
    ready: dict[int, m.SendReady] = attrs.field(factory=dict)
    engines: dict[str, EngineRun] = attrs.field(factory=dict)
    lanes: dict[str, LaneRun] = attrs.field(factory=dict)
    connected: set[int] = attrs.field(factory=set)
    group_waits: set[str] = attrs.field(factory=set)
    source_ends: dict[int, m.SourceEnd] = attrs.field(factory=dict)
    error: WeightBusError | None = None
    first_error: WeightBusError | None = None
    paged: bool = False
    direct: bool = False
    streaming: bool = False
    ended: bool = False
    paced: int = 0

    def active(self) -> list[EngineRun]:
        return [e for e in self.engines.values() if e.active]

    def waiting(self) -> list[EngineRun]:
        return [e for e in self.engines.values() if e.waiting]

    def lanes_of(self, e: EngineRun) -> list[LaneRun]:
        return [lane for lane in self.lanes.values() if lane.engine is e]

    def check(self) -> None:
        """Raise what has ended this refit."""
        if self.error is not None:
            raise self.error

    def agree(self) -> None:
        """Raise what the senders disagree about; take in what they agree on."""
        missing = sorted(set(range(self.config.senders)) - set(self.ready))
        if missing:
            raise TransferTimeout(
                f"senders {missing} did not call send",
                phase="offer",
                advice="All senders call send with the same version, as in a collective.",
            )
        for rank, ready in self.ready.items():
            if ready.error is not None:
                error = ready.error.to_error()
                error.peer = error.peer or f"sender/{rank}"
                raise error
            if (ready.version, ready.partial) != (self.version, self.partial):
                raise VersionError(
                    f"sender {rank} sends version {ready.version}, sender 0 version {self.version}",
                    peer=f"sender/{rank}",
                    phase="offer",
                )
        if len({r.direct for r in self.ready.values()}) > 1:
            raise ConfigError(
                "some senders are direct and some are not",
                phase="offer",
                advice="Give direct= on all senders, or on none.",
            )
        if len({r.paged for r in self.ready.values()}) > 1:
            raise AlignmentError(
                "some senders have a manifest and some have none",
                phase="offer",
                advice="Give manifest= on every sender, or on none.",
            )
        self.direct, self.paged = self.ready[0].direct, self.ready[0].paged

    # ---- what engines say

    def answered(self, e: EngineRun, message: m.DriverAnswer) -> None:
        """Its driver's answer to the offer."""
        e.answered, e.answer = True, message.answer
        if message.error is not None:
            e.error = message.error.to_error()
        if e.answer == "REFUSED":
            e.outcome = e.engine.outcome
            self.error = self.error or e.error
        elif e.answer == ALREADY:
            e.outcome = Outcome.READY.value
        elif e.answer == "BEHIND":
            e.outcome = Outcome.BEHIND.value
        if e.outcome and self.lanes_of(e):  # OK was assumed: its ranks wait
            error = e.error or RefitAborted(f"its driver answers {e.answer}", peer=e.name, phase="offer")
            self.tell_abort(e.links, error)

    def reported(self, e: EngineRun, report: m.Report) -> None:
        """Its driver's word, which makes its outcome."""
        if e.outcome:
            return
        e.report, e.outcome = report, report.outcome
        if e.answer == "":
            e.answer = "OUTCOME"
        if e.error is not None:
            return
        if report.error is not None:
            self.fail(e, report.error.to_error(), tell_driver=False)
        elif not self.is_current(e):
            self.fail(e, EngineError(f"the engine reports {report.outcome}", peer=e.name), tell_driver=False)

    def credit(self, e: EngineRun, credit: m.Credit) -> None:
        lane = self.lanes.get(credit.lane)
        if lane is None or lane.engine is not e:  # nobody frees a slot that another reads
            return
        self._to_writer(lane, credit)
        self.released(credit)

    def released(self, credit: m.Credit) -> None:
        """A lane's reader has released a bucket: its engine is alive, and senders without a lane may go on."""
        lane = self.lanes.get(credit.lane)
        if lane is None:
            return
        lane.engine.touch()
        lane.credited = max(lane.credited, credit.bucket + 1)
        if self.config.senders > 1:
            self._pace()

    def _pace(self) -> None:
        slowest = min((x.credited for x in self.lanes.values() if x.engine.active), default=0)
        if slowest > self.paced:
            self.paced = slowest
            for rank in set(range(self.config.senders)) - {x.sender for x in self.lanes.values()}:
                self.roster.to_sender(rank, m.Pace(refit=self.refit, buckets=slowest))

    def _to_writer(self, lane: LaneRun, message: object) -> None:
        if lane.upstream:
            before = self.lanes[lane.upstream]
            self.roster.hub.send(before.engine.ranks[before.rank].link, message)
        else:
            self.roster.to_sender(lane.sender, message)

    # ---- failing

    def fail(self, e: EngineRun, error: WeightBusError, *, tell_driver: bool = True) -> None:
        """Drop one engine from the refit; its driver's report, or the grace, settles its outcome."""
        if e.error is None:
            e.error = error
            self.first_error = self.first_error or error
            log.info("refit %s: engine %s is out: %s", self.refit[:8], e.name, error)
        elif e.give_up is not None:
            return
        e.give_up = Deadline.after(min(REPORT_GRACE_S, self.config.stall_timeout_s))
        self.tell_abort(e.links | {e.driver.link} if tell_driver else e.links, error)
        for lane in self.lanes_of(e):
            self.group_waits.discard(lane.id)
            self._to_writer(lane, m.DropLanes(refit=self.refit, lanes=(lane.id,)))
        if not e.complete:
            self.fail_behind(e)
        if self.config.cohort == "all":
            for other in self.waiting():
                self.fail(other, RefitAborted(f"cohort 'all': engine {e.name} failed", peer=e.name))

    def fail_behind(self, e: EngineRun) -> None:
        """Those that `e` passes buckets on to get no more."""
        mine = {lane.id for lane in self.lanes_of(e)}
        for lane in self.lanes.values():
            other = lane.engine
            if lane.upstream in mine and other.waiting and not other.complete:
                error = PeerLost(
                    f"{e.name}, which feeds it, left the chain",
                    peer=e.name,
                    lane=f"{lane.upstream.partition('->')[2]}->{other.name}/{lane.rank}",
                    advice="Send again: the next refit plans the chain without it.",
                )
                self.fail(other, error)

    def fail_lane(self, lane_id: str, error: WeightBusError) -> None:
        lane = self.lanes.get(lane_id)
        if lane is not None and not lane.engine.committed:
            self.fail(lane.engine, error)

    def abort(self, error: WeightBusError) -> None:
        """End the refit for every engine that has not got COMMIT yet."""
        self.error = self.error or error
        for e in self.waiting():
            self.fail(e, error)

    def tell_abort(self, links: set[bytes], error: WeightBusError) -> None:
        for link in links:
            self.roster.hub.send(link, m.Abort(refit=self.refit, error=m.WireError.of(error)))

    def member_lost(self, member: Member, error: WeightBusError) -> None:
        e = self.engines.get(member.join.engine)
        if e is None:
            return
        if member.link == e.driver.link and not e.outcome:
            self.fail(e, error)
            e.outcome = member.fate(self.config.host)
        elif member.link in e.links and not e.committed:
            self.fail(e, error)

    def sender_lost(self, rank: int, error: WeightBusError) -> None:
        if self.ended or rank not in self.ready:  # not in it yet: another may come in its place
            return
        if not self.streaming:
            self.error = self.error or error
        for e in self.active():
            if not e.complete and any(lane.sender == rank for lane in self.lanes_of(e)):
                self.fail(e, error)

    def fail_stalled(self, e: EngineRun, phase: str) -> None:
        error = TransferTimeout(
            f"no progress for {self.config.stall_timeout_s:g} s",
            peer=e.name,
            phase=phase,
            advice="Its recv must be running; raise stall_timeout if a step of this engine takes longer.",
        )
        self.fail(e, error)

    def fail_late(self, e: EngineRun, phase: str) -> None:
        what = "the refit did not end within send's timeout"
        self.fail(e, TransferTimeout(what, phase=phase, advice="Raise timeout."))

    # ---- the end

    def settle(self) -> Script:
        """Until every engine has an outcome: reported, or UNKNOWN after the grace."""
        finish = Deadline.after(self.config.finish_timeout_s + REPORT_GRACE_S)
        while waiting := [e for e in self.engines.values() if not e.outcome]:
            limit = min((e.give_up or finish).at_s for e in waiting)
            yield Wait(lambda waiting=waiting: any(e.outcome for e in waiting), Deadline(limit))  # type: ignore[misc]
            for e in waiting:
                if not e.outcome and (e.give_up or finish).expired:
                    e.outcome = e.engine.outcome = Outcome.UNKNOWN.value
                    e.error = e.error or TransferTimeout("no report of the driver in time", peer=e.name, phase="finish")
                    self.first_error = self.first_error or e.error

    def is_current(self, e: EngineRun) -> bool:
        """By its own word it holds the version that was sent."""
        r = e.report
        told = r is not None and (r.outcome, r.run_id, r.version) == ("READY", self.config.run_id, self.version)
        return e.answer == ALREADY or told

    def outcomes(self) -> dict[str, str]:
        """Of every engine, and of those that could not be offered to because they are lost."""
        said = {e.name: self._text(e) for e in self.engines.values()}
        others = [x for x in self.roster.engines.values() if x.name not in said]
        return said | {x.name: x.outcome for x in others if x.outcome in ("DEAD", "UNKNOWN")}

    def _text(self, e: EngineRun) -> str:
        if e.answer == ALREADY:
            return ALREADY
        if e.report is None or e.outcome in ("DEAD", "UNKNOWN", "DIRTY"):
            return e.outcome
        return f"{e.outcome}({e.report.version if e.report.version >= 0 else 'initial'})"

    def verdict(self, current: Sequence[EngineRun], outcomes: dict[str, str]) -> WeightBusError | None:
        """What `send` raises; None: every engine that was offered to is `current`."""
        if self.error is not None and (not self.streaming or isinstance(self.error, SourceError) or not self.engines):
            return self.error
        if len(current) == len(self.engines) and self.error is None:
            return None
        first = self.first_error or self.error
        what = f"{len(current)} of {len(self.engines)} engines are on version {self.version}: " + ", ".join(
            f"{k} {v}" for k, v in outcomes.items()
        )
        error = PartialRefitError(
            what if first is None else f"{what}. First cause: {first}",
            outcomes=outcomes,
            advice="Send the same version again: it feeds only those that lack it.",
        )
        error.__cause__ = first
        return error

    def done(self, outcomes: dict[str, str], error: WeightBusError | None) -> None:
        """Tell the senders."""
        self.ended, self.error = True, error
        wire = None if error is None else m.WireError.of(error)
        self.roster.to_senders(m.SendDone(refit=self.refit, outcomes=outcomes, error=wire))
