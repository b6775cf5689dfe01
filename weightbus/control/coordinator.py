"""Sender rank 0's control side: the one plan, the one decision, and the script of a refit. Runs on the bus thread.

`Coordinator` outlives refits: plans, manifests, what each sender was told and is connected to. Its script reads as section 5
of docs/protocol.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from weightbus.adapter import Outcome
from weightbus.backend import Backend
from weightbus.control import messages as m
from weightbus.control.refit_run import EngineRun, LaneRun, RefitRun
from weightbus.control.roster import CoordinatorConfig, Engine, Member, Roster
from weightbus.deadline import Deadline
from weightbus.errors import (
    AlignmentError,
    ConfigError,
    ConnectError,
    PeerLost,
    RefitAborted,
    RemoteProtocolError,
    TransferTimeout,
    WeightBusError,
    named,
)
from weightbus.manifest import Manifest
from weightbus.names import grouping
from weightbus.plan import MAX_BUCKET_BYTES, Plan, check_names, make_plans, permute
from weightbus.reactor import REPORT_IT, Reactor, Script, Wait, log

CONNECT_S = 30.0
Planned = Sequence[tuple[Plan, m.PlanWire]]  # per sender; empty: paged


class Coordinator:
    """Everything rank 0 decides.

    Args:
        to_local: delivers a message to the sender side of this very process.
        on_engine: an engine's name, and "joined" or "lost".
    """

    def __init__(
        self,
        reactor: Reactor,
        config: CoordinatorConfig,
        backend: Backend,
        to_local: Callable[[object], None],
        on_engine: Callable[[str, str], None],
    ) -> None:
        self.config = config
        self.roster = Roster(reactor, config, backend, to_local, self._on_message, self._on_lost, on_engine)
        self.run: RefitRun | None = None
        self.base_version = -1
        self._reactor, self._backend = reactor, backend
        self._plans: dict[Any, Planned] = {}
        self._incarnation = os.urandom(16).hex()
        self._lane_home: dict[str, tuple[bytes, int]] = {}
        self._early: dict[int, m.SendReady] = {}
        self._manifests: dict[int, Manifest | None] = {}
        self._told_plans: dict[int, tuple[Member | None, int]] = {}  # to which process of that rank, and the digest
        self._connected: dict[str, str] = {}  # lane to the incarnation its sender has a channel to

    # ---- messages

    def _on_message(self, member: Member, message: Any) -> None:
        if member.join.sender_rank >= 0:
            self.on_sender(member.join.sender_rank, message)
        else:
            self._on_engine_message(member, message)

    def _on_lost(self, member: Member) -> None:
        rank = member.join.sender_rank
        self._early.pop(rank, None)
        if self.run is None:
            return
        error = PeerLost(
            f"{member.name} is gone", peer=member.name, advice="It may join again; the next send feeds it."
        )
        if rank >= 0:
            self.run.sender_lost(rank, error)
        else:
            self.run.member_lost(member, error)

    def on_sender(self, rank: int, message: Any) -> None:
        """A message of sender `rank`, this process included."""
        run = self.run
        if isinstance(message, m.Credit):  # the most frequent by far
            if run is not None and message.refit == run.refit:
                run.released(message)
            return
        if isinstance(message, m.SendReady):
            if message.manifest is not None:  # now: this send may fail before it is gathered, and it is told once
                self._manifests[rank] = message.manifest
            going = run if run is not None and not run.ended else None
            if going is not None and rank not in going.ready:
                going.ready[rank] = message
            elif going is not None and not going.streaming and going.ready[rank].version == message.version:
                log.debug("sender %d said twice that it is ready: its connection came up meanwhile", rank)
            else:
                self._early[rank] = message
            return
        if isinstance(message, m.LaneNote):
            home = self._lane_home.get(message.lane)
            if home is not None:
                self.roster.hub.send(home[0], message)
            return
        if run is not None and isinstance(message, m.Abort) and message.refit == "":  # before SendPlan
            run.abort(message.error.to_error())
            return
        if run is None or message.refit != run.refit:
            return
        if isinstance(message, m.Connected):
            for lane, wire in message.failed.items():
                self._fail_lane(run, lane, wire.to_error())
            run.connected.add(rank)
        elif isinstance(message, m.LaneFailed):
            self._fail_lane(run, message.lane, message.error.to_error())
        elif isinstance(message, m.SourceEnd):
            run.source_ends[rank] = message
            if message.error is not None:
                self._told_plans.pop(rank, None)  # it may not have taken it in
                error = message.error.to_error()
                for e in run.active():
                    run.fail(e, error)
                run.error = run.error or error
        elif isinstance(message, m.Abort):
            run.abort(message.error.to_error())

    def _on_engine_message(self, member: Member, message: Any) -> None:
        if isinstance(message, m.Quiet):
            for lane in message.lanes:
                self._to_sender_of(lane, m.Quiet(refit=message.refit, lanes=(lane,)))
            return
        run = self.run
        e = run.engines.get(member.join.engine) if run is not None else None
        if isinstance(message, m.Report):
            self.roster.note(member, message)
        if run is None or e is None or message.refit != run.refit:
            return
        e.touch()
        if isinstance(message, m.DriverAnswer):
            run.answered(e, message)
        elif isinstance(message, m.RanksAnswer):
            e.answers[member.link] = message
        elif isinstance(message, m.Connected):
            run.group_waits.discard(message.lane)
            for lane, wire in message.failed.items():
                self._fail_lane(run, lane, wire.to_error())
        elif isinstance(message, m.LaneFailed):
            self._fail_lane(run, message.lane, message.error.to_error())
        elif isinstance(message, m.Begun):
            e.begun = True
        elif isinstance(message, m.Credit):
            run.credit(e, message)
        elif isinstance(message, m.Complete):
            e.completes[member.link] = message
        elif isinstance(message, m.RankFailed):
            if not e.committed:
                run.fail(e, message.error.to_error())
        elif isinstance(message, m.Report):
            run.reported(e, message)

    def _to_sender_of(self, lane: str, message: object) -> None:
        home = self._lane_home.get(lane)
        if home is not None:
            self.roster.to_sender(home[1], message)

    def _fail_lane(self, run: RefitRun, lane_id: str, error: WeightBusError) -> None:
        self._connected.pop(lane_id, None)
        run.fail_lane(lane_id, error)

    # ---- one refit

    def start(self, version: int, partial: bool, timeout_s: float) -> RefitRun:
        """Begin; the sender side of this process has sent, or will send, its SendReady."""
        run = self.run = RefitRun(self.roster, self.config, version, partial, Deadline.after(timeout_s))
        run.ready, self._early = self._early, {}
        self._reactor.start(self._script(run))
        return run

    def _script(self, run: RefitRun) -> Script:
        try:
            yield from self._steps(run)
        except Exception as exc:
            run.error = run.error or self._named(exc)
        try:
            yield from self._end(run)
        except Exception as exc:
            run.done({e.name: e.outcome or Outcome.UNKNOWN.value for e in run.engines.values()}, self._named(exc))

    def _named(self, exc: Exception) -> WeightBusError:
        if not isinstance(exc, WeightBusError):
            log.exception("the coordinator's script raised", exc_info=exc)
        return named(exc, RefitAborted, "the coordinator's script", peer="sender/0", advice=REPORT_IT)

    def _steps(self, run: RefitRun) -> Script:
        yield from self._gather(run)
        yield from self._offer(run)
        plans = yield from self._check(run)
        if run.active():
            yield from self._connect(run, plans)
            yield from self._begin(run)
            yield from self._stream(run)

    def _gather(self, run: RefitRun) -> Script:
        """All senders are in `send` with one version; the engines asked for are here."""
        wanted = set(range(self.config.senders))
        yield Wait(lambda: wanted <= set(run.ready) or run.error is not None, run.deadline)
        run.check()
        run.agree()
        engines = self.roster.engines
        need = (self.config.receivers if self.base_version < 0 else None) or 1

        def ranks() -> int:
            return sum(e.world for e in engines.values() if e.complete)

        yield Wait(lambda: ranks() >= need or run.error is not None, run.deadline)
        run.check()
        if ranks() < need:
            half = ", ".join(
                f"{e.name} ({len(e.serving())} of {e.world} ranks{'' if e.driver else ', no driver'})"
                for e in engines.values()
                if not e.complete
            )
            raise ConnectError(
                f"{ranks()} of {need} receiver ranks are here after the timeout"
                + (f"; incomplete: {half}" if half else ""),
                phase="offer",
                advice=f"Start receivers with address {self.roster.hub.address}; the token must be the same.",
            )

    def _wait_engines(self, run: RefitRun, settled: Callable[[EngineRun], bool], phase: str) -> Script:
        """Until every active engine is settled; the stall timer drops those that are silent."""
        limit = Deadline.after(self.config.stall_timeout_s).min(run.deadline)
        yield Wait(lambda: run.error is not None or all(settled(e) for e in run.active()), limit)
        run.check()
        for e in run.active():
            if not settled(e):
                (run.fail_late if run.deadline.expired else run.fail_stalled)(e, phase)

    def _offer(self, run: RefitRun) -> Script:
        """Each engine's driver first: it may be there already."""
        for engine in self.roster.engines.values():
            driver = engine.driver
            if driver is not None and engine.complete:
                self._offer_driver(run, engine, driver)
            elif engine.outcome == Outcome.READY.value:
                engine.outcome = Outcome.UNKNOWN.value
        limit = Deadline.after(self.config.stall_timeout_s + self.config.finish_timeout_s).min(run.deadline)
        engines = run.engines.values()
        yield Wait(lambda: run.error is not None or all(e.answer or e.outcome or e.error for e in engines), limit)
        run.check()
        for e in engines:
            if not e.answer and not e.outcome and e.error is None:
                e.answer = "SILENT"
                run.fail_stalled(e, "offer")
        unstaged = [e.name for e in run.active() if not e.staged]
        if self.config.cohort == "all" and unstaged:
            raise ConfigError(
                "cohort 'all' needs every engine staged",
                phase="offer",
                peer=", ".join(unstaged),
                advice="Give receivers stage='host' or 'device', or use cohort='each'.",
            )

    def _offer_driver(self, run: RefitRun, engine: Engine, driver: Member) -> None:
        serving = engine.serving()
        stages = {x.join.stage for x in serving.values()}
        e = run.engines[engine.name] = EngineRun(engine, driver, serving, staged="" not in stages)
        fresh = engine.outcome == Outcome.READY.value and not engine.is_at(self.config.run_id, run.version)
        e.answer = "OK" if fresh and not run.partial else ""
        if len(stages) > 1:
            raise ConfigError(
                "the ranks of one engine have different stage=",
                peer=engine.name,
                phase="offer",
                advice="Give every rank of an engine the same stage.",
            )
        manifest = None if run.paged else self._manifests.get(0)
        self.roster.hub.send(
            driver.link,
            m.OfferDriver(
                refit=run.refit,
                run_id=self.config.run_id,
                version=run.version,
                timeout_s=run.deadline.remaining_s() + self.config.stall_timeout_s,
                finish_timeout_s=self.config.finish_timeout_s,
                partial=run.partial,
                staged=e.staged,
                base_version=self.base_version,
                tensors=-1 if manifest is None else len(manifest),
                nbytes=-1 if manifest is None else manifest.nbytes,
            ),
        )

    def _lanes_of(self, run: RefitRun) -> None:
        multicast = self._backend.capabilities.multicast or self.config.lanes == "broadcast"
        index = 0
        last: dict[int, str] = {}
        for e in run.engines.values():
            if not e.active:  # it keeps its places: who feeds whom does not depend on who is skipped
                index += e.engine.world
                continue
            for rank in range(e.engine.world):
                sender = 0 if multicast else index % self.config.senders
                upstream = last.get(sender, "") if self.config.fanout == "chain" else ""
                lane = LaneRun(f"sender/{sender}->{e.name}/{rank}", e, rank, sender, upstream)
                last[sender] = lane.id
                run.lanes[lane.id] = lane
                self._lane_home[lane.id] = (e.ranks[rank].link, sender)
                index += 1

    def _plan(self, run: RefitRun) -> Planned:
        """The one plan, one layout per sender; remembered while nothing it depends on changes."""
        manifests = [self._manifests.get(k) or Manifest(()) for k in range(self.config.senders)]
        rules = [
            (x.join.rules, x.join.names) for e in run.active() for x in {y.link: y for y in e.ranks.values()}.values()
        ]
        reorder = all(run.ready[k].reorderable for k in range(self.config.senders))
        sizes = [self.config.bucket_bytes, *(s.join.bucket_bytes for s in self.roster.senders.values())]
        key = (tuple(x.digest() for x in manifests), tuple(dict.fromkeys(rules)), reorder, min(sizes), run.direct)
        if key not in self._plans:
            check_names(manifests)
            grouped = grouping(manifests[0], list(dict.fromkeys(rules)), reorder=reorder)
            place = {old: new for new, old in enumerate(grouped.order)}
            groups = [tuple(sorted(place[i] for i in g)) for g in grouped.groups]
            if run.direct:  # one virtual bucket: it only says what the digest is made over
                groups, sizes = [], [MAX_BUCKET_BYTES]
            plans = make_plans([permute(x, grouped.order) for x in manifests], groups, min(sizes))
            self._plans = {key: [(p, m.PlanWire.of(p)) for p in plans]}
        return self._plans[key]

    def _offer_ranks(self, run: RefitRun, e: EngineRun, planned: Planned, links: set[bytes], *, full: bool) -> None:
        for link in links:
            serves = e.member(link).join.serves
            lanes = sorted((x for x in run.lanes_of(e) if x.rank in serves), key=lambda x: x.rank)
            beside = e.driver.link == link
            self.roster.hub.send(
                link,
                m.OfferRanks(
                    refit=run.refit,
                    run_id=self.config.run_id,
                    version=run.version,
                    timeout_s=run.deadline.remaining_s() + self.config.stall_timeout_s,
                    partial=run.partial,
                    paged=run.paged,
                    verify=self.config.verify,
                    direct=run.direct,
                    driver_address="" if beside else e.driver.join.driver_address,
                    lanes=tuple(self._lane_offer(run, lane, planned, full) for lane in lanes),
                ),
            )

    def _lane_offer(self, run: RefitRun, lane: LaneRun, planned: Planned, full: bool) -> m.LaneOffer:
        plan, wire = planned[lane.sender] if planned else (None, None)
        nbytes = plan.capacity_bytes if plan else self.roster.bucket_bytes(lane.sender) // 16 * 16
        return m.LaneOffer(
            lane=lane.id,
            rank=lane.rank,
            plan_digest=plan.digest if plan else 0,
            slot_bytes=0 if run.direct else nbytes,
            slots=self.config.slots,
            writer=self._writer(run, lane),
            manifest=plan.manifest if plan and full else None,
            plan=wire if full else None,
        )

    def _writer(self, run: RefitRun, lane: LaneRun) -> str:
        """Names the whole way to `lane`: a rank that gets a new writer makes its lane, and so its way on, anew."""
        if lane.upstream:
            before = run.lanes[lane.upstream]
            return f"{self._writer(run, before)}/{before.engine.ranks[before.rank].join.incarnation}/{before.rank}"
        mine = "" if lane.sender == 0 else self.roster.senders[lane.sender].join.incarnation
        return f"{self._incarnation}/{mine}"

    def _check(self, run: RefitRun) -> Any:
        """Every rank's check; any refusal ends the refit, with one error that lists all faults of all ranks."""
        planned: Planned = ()
        if run.active():
            planned = () if run.paged else self._plan(run)
            self._lanes_of(run)
            for e in run.active():
                self._offer_ranks(run, e, planned, e.links, full=False)
            yield from self._wait_answers(run, planned)
            self._refuse_faults(run)
            for e in run.active():
                self._fail_unfit(run, e)
        return planned

    def _wait_answers(self, run: RefitRun, planned: Planned) -> Script:
        """Until all ranks have answered; who asks for the plan gets it, once."""

        def asking() -> list[tuple[EngineRun, bytes]]:
            return [(e, link) for e in run.active() for link, a in e.answers.items() if a.need_plan]

        limit = Deadline.after(self.config.stall_timeout_s).min(run.deadline)
        while True:
            yield Wait(lambda: run.error is not None or bool(asking()) or all(e.checked for e in run.active()), limit)
            run.check()
            again = asking()
            for e, link in again:
                del e.answers[link]
                if link in e.told_plan:
                    what = "a rank asked for the plan that it has got"
                    run.fail(e, RemoteProtocolError(what, peer=e.member(link).name, phase="check"))
                else:
                    e.told_plan.add(link)
                    self._offer_ranks(run, e, planned, {link}, full=True)
            if not again:
                return

    def _refuse_faults(self, run: RefitRun) -> None:
        faults = [
            f"{e.name}/{'+'.join(str(r) for r, x in e.ranks.items() if x.link == link)}: {fault}"
            for e in run.engines.values()
            for link, a in e.answers.items()
            for fault in a.faults
        ]
        if faults:
            raise AlignmentError(
                f"{len(faults)} faults: " + "; ".join(faults),
                phase="check",
                advice="Nothing was touched. Use names= rules, cast= or partial=True where the difference is meant.",
            )

    def _fail_unfit(self, run: RefitRun, e: EngineRun) -> None:
        wire = next((a.error for a in e.answers.values() if a.error is not None), None)
        if wire is not None:
            run.fail(e, wire.to_error())
        elif not e.checked:
            run.fail_stalled(e, "check")
        elif unreachable := sorted({x.id for x in run.lanes_of(e)} - set(self._answers(run, e))):
            what = f"no address came for {', '.join(unreachable)}"
            run.fail(e, RemoteProtocolError(what, peer=e.name, phase="check"))

    def _answers(self, run: RefitRun, e: EngineRun) -> dict[str, m.LaneAnswer]:
        """Where the lanes of this engine are, by its own word."""
        given = [a for answer in e.answers.values() for a in answer.lanes if a.lane in run.lanes]
        return {a.lane: a for a in given if run.lanes[a.lane].engine is e}

    def _connect(self, run: RefitRun, planned: Planned) -> Script:
        for e in run.engines.values():
            if not e.active:
                run.fail_behind(e)
        answers = {lane: a for e in run.active() for lane, a in self._answers(run, e).items()}
        for rank in range(self.config.senders):
            self._send_plan(run, rank, planned, answers)
        for e in run.active():
            fed = [x.id for x in run.lanes_of(e)]
            if run.direct or all(answers[x].incarnation == self._connected.get(x) for x in fed):
                self._send_begin(run, e)
        everyone = set(range(self.config.senders))
        limit = Deadline.after(CONNECT_S + self.config.stall_timeout_s).min(run.deadline)
        yield Wait(lambda: run.error is not None or (everyone <= run.connected and not run.group_waits), limit)
        run.check()
        for lane in run.lanes.values():
            if not lane.engine.active:
                continue
            if lane.sender not in run.connected or lane.id in run.group_waits:
                run.fail(lane.engine, TransferTimeout("no connection in time", lane=lane.id, phase="connect"))
            elif lane.id in answers:
                self._connected[lane.id] = answers[lane.id].incarnation

    def _send_plan(self, run: RefitRun, rank: int, planned: Planned, answers: dict[str, m.LaneAnswer]) -> None:
        multicast = self._backend.capabilities.multicast
        mine = [answers[x.id] for x in run.lanes.values() if x.sender == rank and x.engine.active and x.id in answers]
        together = (multicast or self.config.fanout == "chain") and mine
        specs = [] if run.direct else [mine] if together else [[a] for a in mine]
        plan, wire = planned[rank] if planned else (None, None)
        digest = plan.digest if plan else 0
        now = (self.roster.senders.get(rank), digest)
        told = rank > 0 and self._told_plans.get(rank) == now
        self._told_plans[rank] = now
        self.roster.to_sender(
            rank,
            m.SendPlan(
                refit=run.refit,
                version=run.version,
                timeout_s=run.deadline.remaining_s(),
                stall_timeout_s=self.config.stall_timeout_s,
                plan_digest=digest,
                manifest=plan.manifest if plan and not told else None,
                plan=None if told else wire,
                outbound=tuple(self._spec(spec) if multicast else self._chain(run, spec) for spec in specs),
                direct=tuple(a.lane for a in mine) if run.direct else (),
            ),
        )

    def _spec(self, answers: Sequence[m.LaneAnswer], behind: Sequence[m.LaneAnswer] = ()) -> m.LaneSpec:
        return m.LaneSpec(
            lanes=tuple(a.lane for a in answers),
            keys=tuple(a.key for a in answers),
            incarnations=tuple(a.incarnation for a in answers),
            addresses=tuple(a.address for a in answers),
            slots=self.config.slots,
            behind=tuple(a.lane for a in behind),
        )

    def _chain(self, run: RefitRun, answers: Sequence[m.LaneAnswer]) -> m.LaneSpec:
        """The first lane is the sender's; each of the others hangs behind the one before it."""
        for hop, (before, after) in enumerate(pairwise(answers), start=1):
            run.group_waits.add(after.lane)
            self.roster.hub.send(
                self._lane_home[before.lane][0],
                m.Forward(
                    refit=run.refit,
                    lane=before.lane,
                    spec=self._spec([after]),
                    # the hop nearest to a reader that has stopped shall be the first to give up
                    stall_timeout_s=self.config.stall_timeout_s * (1 - 0.5 * hop / len(answers)),
                ),
            )
        return self._spec(answers[:1], answers[1:])

    def join_group(self, message: m.JoinGroup) -> None:
        """From the sender of a collective: its readers shall enter the rendezvous now."""
        run = self.run
        if run is None:
            return
        lanes = [lane for lane in message.members[1:] if lane in run.lanes]
        run.group_waits.update(lanes)
        for link in {self._lane_home[lane][0] for lane in lanes}:  # once a process, whatever it serves
            self.roster.hub.send(link, message)

    def _send_begin(self, run: RefitRun, e: EngineRun) -> None:
        if not (e.staged or e.begin_sent or e.begun):
            e.begin_sent = True
            e.touch()
            self.roster.hub.send(e.driver.link, m.Begin(refit=run.refit))

    def _begin(self, run: RefitRun) -> Script:
        for e in run.active():
            self._send_begin(run, e)
        yield from self._wait_engines(run, lambda e: e.staged or e.begun, "begin")

    def _stream(self, run: RefitRun) -> Script:
        run.streaming = True
        for e in run.active():
            e.touch()
        self.roster.to_senders(m.Go(refit=run.refit))
        while True:
            yield Wait(lambda: self._news(run), Deadline.after(0.1).min(run.deadline))
            self._exclude_stalled(run)
            if run.deadline.expired:
                for e in run.waiting():
                    run.fail_late(e, "stream")
            self._commit_ready(run)
            if not run.waiting():
                return

    def _news(self, run: RefitRun) -> bool:
        waiting = run.waiting()
        enough = all if self.config.cohort == "all" else any
        return not waiting or enough(e.complete for e in waiting)

    def _commit_ready(self, run: RefitRun) -> None:
        waiting = run.waiting()
        if self.config.cohort == "all" and not all(e.complete for e in waiting):
            return
        for e in waiting:
            if e.complete:
                e.committed = True
                e.give_up = None
                e.touch()
                self.roster.hub.send(
                    e.driver.link, m.Commit(refit=run.refit, finish_timeout_s=self.config.finish_timeout_s)
                )

    def _exclude_stalled(self, run: RefitRun) -> None:
        """Readers that got everything and say nothing. One that blocks a lane is reported by that lane's sender; a direct
        read shows no progress, so only the deadline and the heartbeat end it."""
        for e in run.active():
            fed = all(lane.sender in run.source_ends for lane in run.lanes_of(e))
            silent = time.monotonic() - e.progress_s > self.config.stall_timeout_s
            if fed and silent and not run.direct and not e.complete:
                run.fail_stalled(e, "complete")

    def _end(self, run: RefitRun) -> Script:
        """Every engine has an outcome: reported, or UNKNOWN after the grace. Then the senders are told."""
        if run.error is not None:
            for e in run.engines.values():
                if e.answer in ("OK", "") and not e.outcome and not e.committed:
                    run.fail(e, run.error)
        yield from run.settle()
        current = [e for e in run.engines.values() if run.is_current(e)]
        if current:
            self.base_version = run.version
        outcomes = run.outcomes()
        error = run.verdict(current, outcomes)
        for e in run.engines.values():
            if e not in current:
                run.tell_abort(e.links | {e.driver.link}, error or RefitAborted("the refit is over"))
        run.done(outcomes, error)

    def behind(self) -> dict[str, str]:
        """Engines that do not hold the last version sent, with what they hold."""
        return {
            e.name: f"{e.outcome}({e.version})"
            for e in self.roster.engines.values()
            if self.base_version >= 0 and not (e.outcome == "READY" and e.is_at(self.config.run_id, self.base_version))
        }

    def close(self) -> None:
        self.roster.close()
