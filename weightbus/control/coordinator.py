"""Sender rank 0's control side: who has joined, the one plan, the one decision. Runs on the bus thread.

`Coordinator` outlives refits: members, lanes, what is known of each engine. `RefitRun` is one refit; its script reads as
section 5 of docs/protocol.md. A failed engine is dropped alone: it is told ABORT, its own report makes its outcome.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import attrs

from weightbus.adapter import Outcome
from weightbus.backend import Backend
from weightbus.config import runs
from weightbus.control import messages as m
from weightbus.control.wire import Hub
from weightbus.deadline import Deadline
from weightbus.errors import (
    AlignmentError,
    ConfigError,
    ConnectError,
    EngineError,
    PartialRefitError,
    PeerLost,
    RefitAborted,
    RemoteProtocolError,
    SourceError,
    TransferTimeout,
    VersionError,
    WeightBusError,
    named,
)
from weightbus.manifest import Manifest
from weightbus.names import grouping
from weightbus.plan import MAX_BUCKET_BYTES, Plan, check_names, make_plans, permute
from weightbus.reactor import REPORT_IT, Reactor, Script, Wait, log

REPORT_GRACE_S = 10.0
CONNECT_S = 30.0
ALREADY = "ALREADY"


@attrs.define(eq=False)
class Member:
    """One process that has joined."""

    link: bytes
    join: m.Join

    @property
    def name(self) -> str:
        return self.join.member

    def fate(self, host: str) -> str:
        """Outcome of an engine that lost it: DEAD where its process is gone, which only its own host can tell."""
        dead = self.join.host == host and self.join.pid > 0 and not runs(self.join.pid)
        return Outcome.DEAD.value if dead else Outcome.UNKNOWN.value


@attrs.define(eq=False)
class Engine:
    """One engine: its members, and what it last said it holds."""

    name: str
    world: int
    members: dict[bytes, Member] = attrs.field(factory=dict)
    outcome: str = "READY"
    run_id: str = ""
    version: int = -1

    @property
    def driver(self) -> Member | None:
        """The WeightBus.driver that joined, else the process of rank 0."""
        found = sorted(self.members.values(), key=lambda x: x.join.drives != "yes")
        return next((x for x in found if x.join.drives != "no"), None)

    def serving(self) -> dict[int, Member]:
        return {rank: member for member in self.members.values() for rank in member.join.serves}

    def is_at(self, run_id: str, version: int) -> bool:
        return (self.run_id, self.version) == (run_id, version)

    @property
    def complete(self) -> bool:
        return self.driver is not None and len(self.serving()) == self.world


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


@attrs.frozen(kw_only=True)
class CoordinatorConfig:
    """Settings of rank 0's control side; see `WeightBus.sender`."""

    bind: str
    advertise: str | None
    token: str | None = attrs.field(repr=False)
    run_id: str
    host: str
    backend_name: str
    bucket_bytes: int
    senders: int
    receivers: int | None
    lanes: str
    fanout: str
    slots: int
    cohort: str
    verify: bool
    stall_timeout_s: float
    finish_timeout_s: float


@attrs.define(eq=False)
class RefitRun:
    """One refit as the coordinator sees it."""

    refit: str
    version: int
    partial: bool
    deadline: Deadline
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


class Coordinator:
    """Everything rank 0 knows and decides.

    Args:
        to_local: delivers a message to the sender side of this very process.
    """

    def __init__(
        self,
        reactor: Reactor,
        config: CoordinatorConfig,
        backend: Backend,
        to_local: Callable[[object], None],
        on_engine: Callable[[str, str], None],
    ) -> None:
        self.run_id, self.config = config.run_id, config
        self.engines: dict[str, Engine] = {}
        self.senders: dict[int, Member] = {}
        self.run: RefitRun | None = None
        self.base_version = -1
        self._reactor, self._backend = reactor, backend
        self._to_local, self._on_engine = to_local, on_engine
        self._members: dict[bytes, Member] = {}
        self._plans: dict[Any, tuple[tuple[Plan, ...], tuple[m.PlanWire, ...]]] = {}
        self._incarnation = os.urandom(16).hex()
        self._replaced: set[str] = set()  # incarnations of senders that another process has taken the place of
        self._lane_home: dict[str, tuple[bytes, int]] = {}
        self._early: dict[int, m.SendReady] = {}
        self._manifests: dict[int, Manifest | None] = {}
        self._told_plans: dict[int, int] = {}
        self._connected: dict[str, str] = {}  # lane to the incarnation its sender has a channel to
        self.hub = Hub(reactor, config.bind, config.token, self._on_message, self._on_lost, config.advertise)
        reactor.add(self.hub)

    # ---- members

    def _on_message(self, link: bytes, message: Any) -> None:
        member = self._members.get(link)
        if isinstance(message, m.Join):
            self._join(link, message)
        elif member is None:
            log.debug("a message from a member that has not joined: %s", type(message).__name__)
        elif isinstance(message, m.Leave):
            self._on_lost(link)
        elif member.join.sender_rank >= 0:
            self.on_sender(member.join.sender_rank, message)
        else:
            self._on_engine_message(member, message)

    def _join(self, link: bytes, join: m.Join) -> None:
        if link in self._members:  # it was cut off and is back before that was noticed
            self._on_lost(link)
            self.hub.keep(link)
        error = self._refuse(join)
        if error is not None:
            log.warning("refused %s: %s", join.member, error)
            self.hub.send(link, m.Welcome(run_id=self.run_id, error=m.WireError.of(error)))
            return
        member = Member(link, join)
        self._members[link] = member
        if join.sender_rank >= 0:
            before = self.senders.get(join.sender_rank)
            if before is not None and before.join.incarnation != join.incarnation:
                self._replaced.add(before.join.incarnation)
                if (refusal := self._refuse(before.join)) is not None:
                    self.hub.send(before.link, m.Welcome(run_id=self.run_id, error=m.WireError.of(refusal)))
                self._on_lost(before.link)
            self.senders[join.sender_rank] = member
            self._told_plans.pop(join.sender_rank, None)
        else:
            self._admit(member)
        self.hub.send(link, m.Welcome(run_id=self.run_id, backend=self.config.backend_name))

    def _admit(self, member: Member) -> None:
        join = member.join
        engine = self.engines.setdefault(join.engine, Engine(join.engine, join.world))
        if not engine.members:
            engine.world = join.world
        for other in list(engine.members.values()):
            replaced = set(other.join.serves) & set(join.serves) or (other.join.drives == join.drives == "yes")
            if replaced and other.link != member.link:
                log.info("%s replaces an earlier incarnation", join.member)
                self._on_lost(other.link)
        engine.members[member.link] = member
        if join.drives != "no":
            engine.run_id, engine.version, engine.outcome = join.run_id, join.version, join.state
        self._on_engine(engine.name, "joined")

    def _refuse(self, join: m.Join) -> WeightBusError | None:
        advice = "Run the same weightbus, with the same settings, on all sides."
        if join.protocol != m.PROTOCOL:
            return RemoteProtocolError(
                f"protocol {join.protocol}, this side speaks {m.PROTOCOL}",
                peer=join.member,
                phase="join",
                advice=advice,
            )
        if join.incarnation in self._replaced:
            return ConfigError(
                "another process has taken the place of this one",
                peer=join.member,
                phase="join",
                advice="Make a new bus, once the other one is closed.",
            )
        if join.sender_rank >= 0:
            if join.senders != self.config.senders or not 0 < join.sender_rank < self.config.senders:
                return ConfigError(
                    f"sender {join.sender_rank} of {join.senders} joins a bus of {self.config.senders} senders",
                    peer=join.member,
                    phase="join",
                    advice="Give every sender the same senders=.",
                )
        else:
            engine = self.engines.get(join.engine)
            if engine is not None and engine.members and engine.world != join.world:
                return ConfigError(
                    f"engine {join.engine!r} has {engine.world} ranks, this member says {join.world}",
                    peer=join.member,
                    phase="join",
                    advice="Give every rank of an engine the same ranks=.",
                )
            if join.world < 1 or any(not 0 <= r < join.world for r in join.serves) or not join.engine:
                return ConfigError(f"ranks {join.serves} of {join.world}", peer=join.member, phase="join")
        if join.serves or join.sender_rank >= 0:
            return self._refuse_backend(join)
        return None

    def _refuse_backend(self, join: m.Join) -> WeightBusError | None:
        if join.backend != self.config.backend_name:
            return ConfigError(
                f"backend {join.backend!r} joins a bus on {self.config.backend_name!r}",
                peer=join.member,
                phase="join",
                advice="Give every side the same backend=.",
            )
        mine = self._backend.fingerprint()
        differ = [
            f"{k}: {join.fingerprint.get(k)!r} there, {v!r} here"
            for k, v in mine.items()
            if join.fingerprint.get(k) != v
        ]
        if differ:
            return ConfigError(
                "settings that must be equal differ: " + "; ".join(differ),
                peer=join.member,
                phase="join",
                advice="Make them equal on both sides.",
            )
        if self._backend.capabilities.same_host_only and join.host != self.config.host:
            return ConfigError(
                f"backend {self.config.backend_name!r} works within one host only",
                peer=join.member,
                phase="join",
                advice="Use backend='nixl' or 'ucx' between hosts.",
            )
        return None

    def _on_lost(self, link: bytes) -> None:
        member = self._members.pop(link, None)
        self.hub.forget(link)
        if member is None:
            return
        error = PeerLost(
            f"{member.name} is gone", peer=member.name, advice="It may join again; the next send feeds it."
        )
        if member.join.sender_rank >= 0:
            if self.senders.get(member.join.sender_rank) is member:  # else another process has taken its place
                self.senders.pop(member.join.sender_rank)
                self._early.pop(member.join.sender_rank, None)
                self._sender_lost(member.join.sender_rank, error)
            return
        engine = self.engines.get(member.join.engine)
        if engine is not None:
            engine.members.pop(link, None)
            if not engine.members or member.join.drives == "yes" or len(engine.serving()) < engine.world:
                engine.outcome = member.fate(self.config.host)
        run = self.run
        if run is not None and member.join.engine in run.engines:
            self._engine_lost(run, run.engines[member.join.engine], member, error)
        self._on_engine(member.join.engine, "lost")

    def _engine_lost(self, run: RefitRun, e: EngineRun, member: Member, error: WeightBusError) -> None:
        if member.link == e.driver.link and not e.outcome:
            self.fail(run, e, error)
            e.outcome = member.fate(self.config.host)
        elif member.link in e.links and not e.committed:
            self.fail(run, e, error)

    def _sender_lost(self, rank: int, error: WeightBusError) -> None:
        run = self.run
        if run is None or run.ended or rank not in run.ready:  # not in it yet: another may come in its place
            return
        if not run.streaming:
            run.error = run.error or error
        for e in run.active():
            if not e.complete and any(x.sender == rank and x.engine is e for x in run.lanes.values()):
                self.fail(run, e, error)

    # ---- messages of a refit

    def on_sender(self, rank: int, message: Any) -> None:
        """A message of sender `rank`, this process included."""
        run = self.run
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
                self.hub.send(home[0], message)
            return
        if run is not None and isinstance(message, m.Abort) and message.refit == "":  # before SendPlan
            self.abort(message.error.to_error())
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
                    self.fail(run, e, error)
                run.error = run.error or error
        elif isinstance(message, m.Abort):
            self.abort(message.error.to_error())

    def _on_engine_message(self, member: Member, message: Any) -> None:
        if isinstance(message, m.Quiet):
            for lane in message.lanes:
                self._to_sender_of(lane, m.Quiet(refit=message.refit, lanes=(lane,)))
            return
        run = self.run
        e = run.engines.get(member.join.engine) if run is not None else None
        if isinstance(message, m.Report):
            self._note(member, message)
        if run is None or e is None or message.refit != run.refit:
            return
        e.touch()
        if isinstance(message, m.DriverAnswer):
            e.answered, e.answer = True, message.answer
            if message.error is not None:
                e.error = message.error.to_error()
            self._take_answer(run, e)
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
            self._credit(run, e, message)
        elif isinstance(message, m.Complete):
            e.completes[member.link] = message
        elif isinstance(message, m.RankFailed):
            if not e.committed:
                self.fail(run, e, message.error.to_error())
        elif isinstance(message, m.Report):
            self._on_report(run, e, message)

    def _take_answer(self, run: RefitRun, e: EngineRun) -> None:
        if e.answer == "REFUSED":
            e.outcome = e.engine.outcome
            run.error = run.error or e.error
        elif e.answer == ALREADY:
            e.outcome = Outcome.READY.value
        elif e.answer == "BEHIND":
            e.outcome = Outcome.BEHIND.value
        if e.outcome and any(lane.engine is e for lane in run.lanes.values()):  # OK was assumed: its ranks wait
            error = e.error or RefitAborted(f"its driver answers {e.answer}", peer=e.name, phase="offer")
            self._tell_abort(run, e.links, error)

    def _note(self, member: Member, report: m.Report) -> None:
        engine = self.engines.get(member.join.engine)
        if engine is not None:
            engine.outcome, engine.run_id, engine.version = report.outcome, report.run_id, report.version

    def _on_report(self, run: RefitRun, e: EngineRun, report: m.Report) -> None:
        if e.outcome:
            return
        e.report, e.outcome = report, report.outcome
        if e.answer == "":
            e.answer = "OUTCOME"
        if report.error is not None and e.error is None:
            self.fail(run, e, report.error.to_error(), tell_driver=False)
        elif not self._is_current(run, e) and e.error is None:
            self.fail(run, e, EngineError(f"the engine reports {report.outcome}", peer=e.name), tell_driver=False)

    def _is_current(self, run: RefitRun, e: EngineRun) -> bool:
        if e.answer == ALREADY:
            return True
        r = e.report
        return r is not None and r.outcome == "READY" and (r.run_id, r.version) == (self.run_id, run.version)

    def _credit(self, run: RefitRun, e: EngineRun, credit: m.Credit) -> None:
        lane = run.lanes.get(credit.lane)
        if lane is None or lane.engine is not e:  # nobody frees a slot that another reads
            return
        lane.credited = max(lane.credited, credit.bucket + 1)
        self._to_writer(lane, credit)
        slowest = min((x.credited for x in run.lanes.values() if x.engine.active), default=0)
        if slowest > run.paced:
            run.paced = slowest
            fed = {x.sender for x in run.lanes.values()}
            for rank in range(self.config.senders):
                if rank not in fed:
                    self._to_sender(rank, m.Pace(refit=run.refit, buckets=slowest))

    def _to_sender(self, rank: int, message: object) -> None:
        if rank == 0:
            self._to_local(message)
        elif rank in self.senders:
            self.hub.send(self.senders[rank].link, message)

    def _to_writer(self, lane: LaneRun, message: object) -> None:
        if lane.upstream:
            self.hub.send(self._lane_home[lane.upstream][0], message)
        else:
            self._to_sender(lane.sender, message)

    def _to_sender_of(self, lane: str, message: object) -> None:
        home = self._lane_home.get(lane)
        if home is not None:
            self._to_sender(home[1], message)

    def _to_senders(self, message: object) -> None:
        for rank in range(self.config.senders):
            self._to_sender(rank, message)

    # ---- failing

    def fail(self, run: RefitRun, e: EngineRun, error: WeightBusError, *, tell_driver: bool = True) -> None:
        """Drop one engine from the refit; its driver's report, or the grace, settles its outcome."""
        if e.error is None:
            e.error = error
            run.first_error = run.first_error or error
            log.info("refit %s: engine %s is out: %s", run.refit[:8], e.name, error)
        elif e.give_up is not None:
            return
        e.give_up = Deadline.after(min(REPORT_GRACE_S, self.config.stall_timeout_s))
        self._tell_abort(run, e.links | {e.driver.link} if tell_driver else e.links, error)
        for lane in run.lanes.values():
            if lane.engine is e:
                run.group_waits.discard(lane.id)
                self._to_writer(lane, m.DropLanes(refit=run.refit, lanes=(lane.id,)))
        if not e.complete:
            self._fail_behind(run, e)
        if self.config.cohort == "all":
            for other in run.active():
                if not other.committed:
                    self.fail(run, other, RefitAborted(f"cohort 'all': engine {e.name} failed", peer=e.name))

    def _tell_abort(self, run: RefitRun, links: set[bytes], error: WeightBusError) -> None:
        for link in links:
            self.hub.send(link, m.Abort(refit=run.refit, error=m.WireError.of(error)))

    def _fail_behind(self, run: RefitRun, e: EngineRun) -> None:
        """Those that `e` passes buckets on to get no more."""
        mine = {lane.id for lane in run.lanes.values() if lane.engine is e}
        for lane in run.lanes.values():
            other = lane.engine
            if lane.upstream in mine and other.active and not other.complete and not other.committed:
                error = PeerLost(
                    f"{e.name}, which feeds it, left the chain",
                    peer=e.name,
                    lane=f"{lane.upstream.partition('->')[2]}->{other.name}/{lane.rank}",
                    advice="Send again: the next refit plans the chain without it.",
                )
                self.fail(run, other, error)

    def _fail_lane(self, run: RefitRun, lane_id: str, error: WeightBusError) -> None:
        self._connected.pop(lane_id, None)
        lane = run.lanes.get(lane_id)
        if lane is not None and not lane.engine.committed:
            self.fail(run, lane.engine, error)

    def abort(self, error: WeightBusError) -> None:
        """End the refit for every engine that has not got COMMIT yet."""
        run = self.run
        if run is None:
            return
        run.error = run.error or error
        for e in run.active():
            if not e.committed:
                self.fail(run, e, error)

    # ---- one refit

    def start(self, version: int, partial: bool, timeout_s: float) -> RefitRun:
        """Begin; the sender side of this process has sent, or will send, its SendReady."""
        run = self.run = RefitRun(os.urandom(16).hex(), version, partial, Deadline.after(timeout_s))
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
            self._done(
                run, {e.name: e.outcome or Outcome.UNKNOWN.value for e in run.engines.values()}, self._named(exc)
            )

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
        self._raise(run)
        missing = wanted - set(run.ready)
        if missing:
            raise TransferTimeout(
                f"senders {sorted(missing)} did not call send",
                phase="offer",
                advice="All senders call send with the same version, as in a collective.",
            )
        for rank, ready in run.ready.items():
            if ready.error is not None:
                error = ready.error.to_error()
                error.peer = error.peer or f"sender/{rank}"
                raise error
            if (ready.version, ready.partial) != (run.version, run.partial):
                raise VersionError(
                    f"sender {rank} sends version {ready.version}, sender 0 version {run.version}",
                    peer=f"sender/{rank}",
                    phase="offer",
                )
        run.direct = all(r.direct for r in run.ready.values())
        if any(r.direct for r in run.ready.values()) and not run.direct:
            raise ConfigError(
                "some senders are direct and some are not",
                phase="offer",
                advice="Give direct= on all senders, or on none.",
            )
        run.paged = any(r.paged for r in run.ready.values())
        if run.paged and not all(r.paged for r in run.ready.values()):
            raise AlignmentError(
                "some senders have a manifest and some have none",
                phase="offer",
                advice="Give manifest= on every sender, or on none.",
            )
        first = self.base_version < 0 and self.config.receivers is not None

        def ranks() -> int:
            return sum(e.world for e in self.engines.values() if e.complete)

        need = self.config.receivers if first and self.config.receivers else 1
        yield Wait(lambda: ranks() >= need or run.error is not None, run.deadline)
        self._raise(run)
        if ranks() < need:
            half = [
                f"{e.name} ({len(e.serving())} of {e.world} ranks{'' if e.driver else ', no driver'})"
                for e in self.engines.values()
                if not e.complete
            ]
            raise ConnectError(
                f"{ranks()} of {need} receiver ranks are here after the timeout"
                + (f"; incomplete: {', '.join(half)}" if half else ""),
                phase="offer",
                advice=f"Start receivers with address {self.hub.address}; the token must be the same.",
            )

    def _raise(self, run: RefitRun) -> None:
        if run.error is not None:
            raise run.error

    def _stalled(self, e: EngineRun, phase: str) -> TransferTimeout:
        return TransferTimeout(
            f"no progress for {self.config.stall_timeout_s:g} s",
            peer=e.name,
            phase=phase,
            advice="Its recv must be running; raise stall_timeout if a step of this engine takes longer.",
        )

    def _wait_engines(self, run: RefitRun, settled: Callable[[EngineRun], bool], phase: str) -> Script:
        """Until every active engine is settled; the stall timer drops those that are silent."""
        limit = Deadline.after(self.config.stall_timeout_s).min(run.deadline)
        yield Wait(lambda: run.error is not None or all(settled(e) for e in run.active() or []), limit)
        self._raise(run)
        for e in run.active():
            if not settled(e):
                self.fail(run, e, self._stalled(e, phase) if not run.deadline.expired else self._late(run, phase))

    def _late(self, run: RefitRun, phase: str) -> TransferTimeout:
        return TransferTimeout("the refit did not end within send's timeout", phase=phase, advice="Raise timeout.")

    def _offer(self, run: RefitRun) -> Script:
        """Each engine's driver first: it may be there already."""
        manifest = None if run.paged else self._manifests.get(0)
        tensors, nbytes = (len(manifest), manifest.nbytes) if manifest is not None else (-1, -1)
        for engine in self.engines.values():
            driver = engine.driver
            if driver is None or not engine.complete:
                if engine.outcome in (Outcome.READY.value,):
                    engine.outcome = Outcome.UNKNOWN.value
                continue
            serving = engine.serving()
            staged = all(x.join.stage for x in serving.values())
            e = run.engines[engine.name] = EngineRun(engine, driver, serving, staged)
            fresh = engine.outcome == Outcome.READY.value and not engine.is_at(self.run_id, run.version)
            e.answer = "OK" if fresh and not run.partial else ""
            if len({x.join.stage for x in serving.values()}) > 1:
                raise ConfigError(
                    "the ranks of one engine have different stage=",
                    peer=engine.name,
                    phase="offer",
                    advice="Give every rank of an engine the same stage.",
                )
            self.hub.send(
                driver.link,
                m.OfferDriver(
                    refit=run.refit,
                    run_id=self.run_id,
                    version=run.version,
                    timeout_s=run.deadline.remaining_s() + self.config.stall_timeout_s,
                    finish_timeout_s=self.config.finish_timeout_s,
                    partial=run.partial,
                    staged=staged,
                    base_version=self.base_version,
                    tensors=tensors,
                    nbytes=nbytes,
                ),
            )
        limit = Deadline.after(self.config.stall_timeout_s + self.config.finish_timeout_s).min(run.deadline)
        engines = run.engines.values()
        yield Wait(lambda: run.error is not None or all(e.answer or e.outcome or e.error for e in engines), limit)
        self._raise(run)
        for e in engines:
            if not e.answer and not e.outcome and e.error is None:
                e.answer = "SILENT"
                self.fail(run, e, self._stalled(e, "offer"))
        if self.config.cohort == "all" and any(not e.staged for e in run.active()):
            raise ConfigError(
                "cohort 'all' needs every engine staged",
                phase="offer",
                peer=", ".join(e.name for e in run.active() if not e.staged),
                advice="Give receivers stage='host' or 'device', or use cohort='each'.",
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

    def _plan(self, run: RefitRun) -> tuple[tuple[Plan, ...], tuple[m.PlanWire, ...]]:
        """The one plan, one layout per sender; remembered while nothing it depends on changes."""
        manifests = [self._manifests.get(k) or Manifest(()) for k in range(self.config.senders)]
        rules = [
            (x.join.rules, x.join.names) for e in run.active() for x in {y.link: y for y in e.ranks.values()}.values()
        ]
        reorder = all(run.ready[k].reorderable for k in range(self.config.senders))
        sizes = [self.config.bucket_bytes, *(s.join.bucket_bytes for s in self.senders.values())]
        key = (tuple(x.digest() for x in manifests), tuple(dict.fromkeys(rules)), reorder, min(sizes), run.direct)
        if key not in self._plans:
            check_names(manifests)
            grouped = grouping(manifests[0], list(dict.fromkeys(rules)), reorder=reorder)
            place = {old: new for new, old in enumerate(grouped.order)}
            groups = [tuple(sorted(place[i] for i in g)) for g in grouped.groups]
            if run.direct:  # one virtual bucket: it only says what the digest is made over
                groups, sizes = [], [MAX_BUCKET_BYTES]
            plans = make_plans([permute(x, grouped.order) for x in manifests], groups, min(sizes))
            self._plans = {key: (plans, tuple(m.PlanWire.of(p) for p in plans))}
        return self._plans[key]

    def _offer_ranks(
        self,
        run: RefitRun,
        e: EngineRun,
        plans: Sequence[Plan],
        wires: Sequence[m.PlanWire],
        links: set[bytes],
        full: bool,
    ) -> None:
        for link in links:
            member = e.member(link)
            lanes = []
            for lane in run.lanes.values():
                if lane.engine is e and lane.rank in member.join.serves:
                    plan = plans[lane.sender] if plans else None
                    sender_bytes = (
                        self.config.bucket_bytes if lane.sender == 0 else self.senders[lane.sender].join.bucket_bytes
                    )
                    lanes.append(
                        m.LaneOffer(
                            lane=lane.id,
                            rank=lane.rank,
                            plan_digest=plan.digest if plan else 0,
                            slot_bytes=0 if run.direct else plan.capacity_bytes if plan else sender_bytes // 16 * 16,
                            slots=self.config.slots,
                            writer=self._writer(run, lane),
                            manifest=plan.manifest if plan and full else None,
                            plan=wires[lane.sender] if plan and full else None,
                        )
                    )
            lanes.sort(key=lambda x: x.rank)
            beside = e.driver.link == link
            self.hub.send(
                link,
                m.OfferRanks(
                    refit=run.refit,
                    run_id=self.run_id,
                    version=run.version,
                    timeout_s=run.deadline.remaining_s() + self.config.stall_timeout_s,
                    partial=run.partial,
                    paged=run.paged,
                    verify=self.config.verify,
                    direct=run.direct,
                    driver_address="" if beside else e.driver.join.driver_address,
                    lanes=tuple(lanes),
                ),
            )

    def _writer(self, run: RefitRun, lane: LaneRun) -> str:
        """Names the whole way to `lane`: a rank that gets a new writer makes its lane, and so its way on, anew."""
        if lane.upstream:
            before = run.lanes[lane.upstream]
            return f"{self._writer(run, before)}/{before.engine.ranks[before.rank].join.incarnation}/{before.rank}"
        mine = "" if lane.sender == 0 else self.senders[lane.sender].join.incarnation
        return f"{self._incarnation}/{mine}"

    def _check(self, run: RefitRun) -> Any:
        """Every rank's check; any refusal ends the refit, with one error that lists all faults of all ranks."""
        if not run.active():
            return ((), ())
        plans, wires = ((), ()) if run.paged else self._plan(run)
        self._lanes_of(run)
        for e in run.active():
            self._offer_ranks(run, e, plans, wires, e.links, full=False)

        def settled(e: EngineRun) -> bool:
            return e.answered and e.links <= {k for k, a in e.answers.items() if not a.need_plan}

        def asking() -> list[tuple[EngineRun, bytes]]:
            return [(e, link) for e in run.active() for link, a in e.answers.items() if a.need_plan]

        limit = Deadline.after(self.config.stall_timeout_s).min(run.deadline)
        while True:
            yield Wait(lambda: run.error is not None or bool(asking()) or all(settled(e) for e in run.active()), limit)
            self._raise(run)
            again = asking()
            for e, link in again:
                del e.answers[link]
                if link in e.told_plan:
                    what = "a rank asked for the plan that it has got"
                    self.fail(run, e, RemoteProtocolError(what, peer=e.member(link).name, phase="check"))
                else:
                    e.told_plan.add(link)
                    self._offer_ranks(run, e, plans, wires, {link}, full=True)
            if not again:
                break
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
        for e in run.active():
            wire = next((a.error for a in e.answers.values() if a.error is not None), None)
            if wire is not None:
                self.fail(run, e, wire.to_error())
            elif not settled(e):
                self.fail(run, e, self._stalled(e, "check"))
            elif unreachable := sorted(
                {x.id for x in run.lanes.values() if x.engine is e} - set(self._answers(run, e))
            ):
                what = f"no address came for {', '.join(unreachable)}"
                self.fail(run, e, RemoteProtocolError(what, peer=e.name, phase="check"))
        return plans, wires

    def _answers(self, run: RefitRun, e: EngineRun) -> dict[str, m.LaneAnswer]:
        """Where the lanes of this engine are, by its own word."""
        given = [a for answer in e.answers.values() for a in answer.lanes if a.lane in run.lanes]
        return {a.lane: a for a in given if run.lanes[a.lane].engine is e}

    def _connect(self, run: RefitRun, planned: tuple[Sequence[Plan], Sequence[m.PlanWire]]) -> Script:
        plans, wires = planned
        for e in run.engines.values():
            if not e.active:
                self._fail_behind(run, e)
        answers = {lane: a for e in run.active() for lane, a in self._answers(run, e).items()}
        multicast = self._backend.capabilities.multicast
        for rank in range(self.config.senders):
            mine = [
                answers[x.id] for x in run.lanes.values() if x.sender == rank and x.engine.active and x.id in answers
            ]
            together = (multicast or self.config.fanout == "chain") and mine
            specs = [] if run.direct else [mine] if together else [[a] for a in mine]
            digest = plans[rank].digest if plans else 0
            told = rank > 0 and self._told_plans.get(rank) == digest
            self._told_plans[rank] = digest
            self._to_sender(
                rank,
                m.SendPlan(
                    refit=run.refit,
                    version=run.version,
                    timeout_s=run.deadline.remaining_s(),
                    stall_timeout_s=self.config.stall_timeout_s,
                    plan_digest=digest,
                    manifest=plans[rank].manifest if plans and not told else None,
                    plan=wires[rank] if plans and not told else None,
                    outbound=tuple(self._spec(spec) if multicast else self._chain(run, spec) for spec in specs),
                    direct=tuple(a.lane for a in mine) if run.direct else (),
                ),
            )
        for e in run.active():
            fed = [x.id for x in run.lanes.values() if x.engine is e]
            if run.direct or all(answers[x].incarnation == self._connected.get(x) for x in fed):
                self._send_begin(run, e)
        everyone = set(range(self.config.senders))
        limit = Deadline.after(CONNECT_S + self.config.stall_timeout_s).min(run.deadline)
        yield Wait(lambda: run.error is not None or (everyone <= run.connected and not run.group_waits), limit)
        self._raise(run)
        missing = everyone - run.connected
        for lane in run.lanes.values():
            up = lane.sender not in missing and lane.id not in run.group_waits
            if up and lane.engine.active and lane.id in answers:
                self._connected[lane.id] = answers[lane.id].incarnation
            elif (lane.sender in missing or lane.id in run.group_waits) and lane.engine.active:
                self.fail(run, lane.engine, TransferTimeout("no connection in time", lane=lane.id, phase="connect"))

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
            self.hub.send(
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
            self.hub.send(link, message)

    def _send_begin(self, run: RefitRun, e: EngineRun) -> None:
        if not e.staged and not e.begin_sent:
            e.begin_sent = True
            e.touch()
            self.hub.send(e.driver.link, m.Begin(refit=run.refit))

    def _begin(self, run: RefitRun) -> Script:
        for e in run.active():
            self._send_begin(run, e)
        yield from self._wait_engines(run, lambda e: e.staged or e.begun, "begin")

    def _stream(self, run: RefitRun) -> Script:
        run.streaming = True
        for e in run.active():
            e.touch()
        self._to_senders(m.Go(refit=run.refit))
        while True:
            yield Wait(lambda: self._news(run), Deadline.after(0.1).min(run.deadline))
            self._exclude_stalled(run)
            if run.deadline.expired:
                for e in run.active():
                    if not e.committed:
                        self.fail(run, e, self._late(run, "stream"))
            self._commit_ready(run)
            if not [e for e in run.active() if not e.committed]:
                return

    def _news(self, run: RefitRun) -> bool:
        waiting = [e for e in run.active() if not e.committed]
        enough = all if self.config.cohort == "all" else any
        return not waiting or enough(e.complete for e in waiting)

    def _commit_ready(self, run: RefitRun) -> None:
        waiting = [e for e in run.active() if not e.committed]
        if self.config.cohort == "all" and not all(e.complete for e in waiting):
            return
        for e in waiting:
            if e.complete:
                e.committed = True
                e.give_up = None
                e.touch()
                self.hub.send(e.driver.link, m.Commit(refit=run.refit, finish_timeout_s=self.config.finish_timeout_s))

    def _exclude_stalled(self, run: RefitRun) -> None:
        """Readers that got everything and say nothing. One that blocks a lane is reported by that lane's sender; a direct
        read shows no progress, so only the deadline and the heartbeat end it."""
        for e in run.active():
            fed = all(x.sender in run.source_ends for x in run.lanes.values() if x.engine is e)
            if (
                fed
                and not run.direct
                and not e.complete
                and time.monotonic() - e.progress_s > self.config.stall_timeout_s
            ):
                self.fail(run, e, self._stalled(e, "complete"))

    def _end(self, run: RefitRun) -> Script:
        """Every engine has an outcome: reported, or UNKNOWN after the grace. Then the senders are told."""
        if run.error is not None:
            for e in run.engines.values():
                if e.answer in ("OK", "") and not e.outcome and not e.committed:
                    self.fail(run, e, run.error)
        finish = Deadline.after(self.config.finish_timeout_s + REPORT_GRACE_S)
        while True:
            waiting = [e for e in run.engines.values() if not e.outcome]
            if not waiting:
                break
            limit = min((e.give_up or finish).at_s for e in waiting)
            yield Wait(lambda waiting=waiting: any(e.outcome for e in waiting), Deadline(limit))  # type: ignore[misc]
            for e in waiting:
                if not e.outcome and (e.give_up or finish).expired:
                    e.outcome = Outcome.UNKNOWN.value
                    e.engine.outcome = e.outcome
                    e.error = e.error or TransferTimeout("no report of the driver in time", peer=e.name, phase="finish")
                    run.first_error = run.first_error or e.error
        outcomes = {e.name: self._text(run, e) for e in run.engines.values()}
        current = [e for e in run.engines.values() if self._is_current(run, e)]
        for engine in self.engines.values():
            if engine.name not in run.engines and engine.outcome in ("DEAD", "UNKNOWN"):
                outcomes[engine.name] = engine.outcome
        if current:
            self.base_version = run.version
        error = self._verdict(run, current, outcomes)
        for e in run.engines.values():
            if not self._is_current(run, e):
                self._tell_abort(run, e.links | {e.driver.link}, error or RefitAborted("the refit is over"))
        self._done(run, outcomes, error)

    def _done(self, run: RefitRun, outcomes: dict[str, str], error: WeightBusError | None) -> None:
        run.ended, run.error = True, error
        wire = None if error is None else m.WireError.of(error)
        self._to_senders(m.SendDone(refit=run.refit, outcomes=outcomes, error=wire))

    def _text(self, run: RefitRun, e: EngineRun) -> str:
        if e.answer == ALREADY:
            return ALREADY
        version = e.report.version if e.report is not None else None
        return (
            e.outcome
            if version is None or e.outcome in ("DEAD", "UNKNOWN", "DIRTY")
            else f"{e.outcome}({version if version >= 0 else 'initial'})"
        )

    def _verdict(self, run: RefitRun, current: Sequence[EngineRun], outcomes: dict[str, str]) -> WeightBusError | None:
        if run.error is not None and (not run.streaming or isinstance(run.error, SourceError) or not run.engines):
            return run.error
        failed = [e for e in run.engines.values() if not self._is_current(run, e)]
        if not failed and run.error is None:
            return None
        first = run.first_error or run.error
        what = f"{len(current)} of {len(run.engines)} engines are on version {run.version}: " + ", ".join(
            f"{k} {v}" for k, v in outcomes.items()
        )
        error = PartialRefitError(
            what if first is None else f"{what}. First cause: {first}",
            outcomes=outcomes,
            advice="Send the same version again: it feeds only those that lack it.",
        )
        error.__cause__ = first
        return error

    def behind(self) -> dict[str, str]:
        """Engines that do not hold the last version sent, with what they hold."""
        return {
            e.name: f"{e.outcome}({e.version})"
            for e in self.engines.values()
            if self.base_version >= 0
            and not (e.outcome == "READY" and (e.run_id, e.version) == (self.run_id, self.base_version))
        }

    def close(self) -> None:
        for link in self._members:
            self.hub.send(link, m.Leave(reason="the coordinator closed"))
        self._reactor.remove(self.hub)
        self.hub.close()
