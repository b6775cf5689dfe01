"""The receiving half of the pipeline: bucket k is loaded while k+1 lands.

`RankSet` is every rank of one engine that this process serves. It answers offers and checks, and fills the stage, on the
bus thread; `load` runs as a job in the caller's thread. Rules: section 5 of docs/protocol.md.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from weightbus import gpu
from weightbus.adapter import EngineLoader, Fault
from weightbus.backend import Backend, Channel, Endpoint, GroupSpec, State
from weightbus.bucket import Unpacker
from weightbus.buffers import SlotPool
from weightbus.calibration import copy_bytes_per_s
from weightbus.control import messages as m
from weightbus.deadline import Deadline
from weightbus.errors import (
    AlignmentError,
    ConfigError,
    DigestMismatch,
    EngineError,
    PeerLost,
    RefitAborted,
    RemoteProtocolError,
    TransferTimeout,
    WeightBusError,
    named,
)
from weightbus.feed import Feed, Offered, RankRun, Spent, Step, current_event
from weightbus.jobs import Job, Jobs, Loads
from weightbus.lane import InboundConfig, InboundLane, Landed, Stage, verify
from weightbus.manifest import Manifest
from weightbus.names import rename
from weightbus.plan import Plan
from weightbus.reactor import NEVER, REPORT_IT, Reactor, Script, Wait, log
from weightbus.resident import Tables

MAX_REMEMBERED_PLANS = 4
LINGER_S = 2e-3  # a load job waits so long for the next bucket; then its caller looks at recv's own timeout


def _give_back(step: Step) -> None:
    for lane, landed in step:
        lane.release(landed)


def _load_error(error: BaseException) -> WeightBusError:
    return named(error, EngineError, "load", phase="load", advice="The engine is marked; a full send heals it.")


class RankSet:
    """All ranks of one engine that live in this process.

    Args:
        tell: sends a message to the coordinator; False when it is not there.
        tell_driver: sends a RankState to the driver, beside it or in another process.
    """

    def __init__(
        self,
        reactor: Reactor,
        engine: str,
        ranks: Sequence[int],
        backend: Backend,
        loader: EngineLoader,
        device: torch.device,
        config: InboundConfig,
        jobs: Jobs,
        tell: Callable[[object], bool],
        tell_driver: Callable[[m.RankState], None],
        on_end: Callable[[RankRun, WeightBusError | None], None],
    ) -> None:
        self.engine, self.ranks = engine, tuple(ranks)
        self.lanes = [InboundLane(r, f"{engine}/{r}", backend, device, config) for r in ranks]
        self.run: RankRun | None = None
        self.last: RankRun | None = None  # the newest refit that was accepted
        self.verified_refit = ""
        self.rules = loader.rules()
        self._reactor, self._loader, self._device, self._config = reactor, loader, device, config
        self._backend = backend
        self._jobs, self._tell, self._tell_driver, self._on_end = jobs, tell, tell_driver, on_end
        self._plans: OrderedDict[int, Offered] = OrderedDict()
        self._unpackers: dict[tuple[int, int], Unpacker] = {}
        self._stage = Stage(torch.device("cpu") if config.stage == "host" else device)
        self._pending: m.OfferRanks | None = None
        if device.type == "cuda":
            gpu.warm_up(device)
        self._copy_rate = copy_bytes_per_s(device)
        for lane in self.lanes:  # a backend's start-up belongs to set-up, not to the first refit
            lane.open()
        self._releasing: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self._tables = Tables()

    # ---- messages

    def offer(self, offer: m.OfferRanks) -> None:
        """A new offer; one that still runs is over, for its coordinator has moved on."""
        if self.run is not None:
            self.abort(self.run.offer.refit, RefitAborted("another refit was offered", phase="stream"))
            self._pending = offer
        else:
            self._reactor.start(self._script(offer))

    def abort(self, refit: str, error: WeightBusError, *, told: bool = True) -> None:
        """The refit is over for these ranks. `told`: the coordinator knows."""
        if self.run is not None and self.run.offer.refit == refit and self.run.aborted is None:
            self.run.aborted, self.run.told = error, told

    def lost(self) -> None:
        """The coordinator is gone: its writes are over or will be fenced; a staged, verified copy stays its driver's."""
        if self.run is not None and not self.run.verified:
            self.abort(self.run.offer.refit, PeerLost("the coordinator is gone", peer="sender/0", phase="stream"))

    def note(self, note: m.LaneNote) -> None:
        """What a sender says of one lane, beside the bytes."""
        for lane in self.lanes:
            if lane.id == note.lane and lane.refit == bytes.fromhex(note.refit):
                lane.note(note)

    def join_group(self, message: m.JoinGroup) -> None:
        """Enter a collective's rendezvous, on a helper thread; answer Connected for each lane."""
        for lane in self.lanes:
            if lane.id in message.ranks and lane.endpoint is not None and lane.pool is not None:
                self._enter(lane, lane.endpoint, lane.pool, message)

    def _enter(self, lane: InboundLane, endpoint: Endpoint, pool: SlotPool, message: m.JoinGroup) -> None:
        old, lane.channel = lane.channel, None
        lane.key, lane.group = message.key, message.group_id
        group = GroupSpec(
            group_id=message.group_id,
            lane_key=message.key,
            rank=message.ranks[lane.id],
            members=message.members,
            address=message.address,
        )
        slots = list(pool.regions)

        def enter() -> None:
            failed: dict[str, m.WireError] = {}
            channel: Channel | None = None
            try:
                if old is not None:
                    old.close()
                channel = endpoint.connect_group(group, slots, message.timeout_s)
            except Exception as exc:
                failed[lane.id] = m.WireError.of(exc, lane.name)

            def done() -> None:
                if lane.endpoint is endpoint and lane.group == message.group_id:
                    lane.channel = channel
                self._tell(m.Connected(refit=message.refit, lane=lane.id, failed=failed))

            self._reactor.submit(done)

        threading.Thread(target=enter, name="weightbus-connect", daemon=True).start()

    def chain(self, message: m.Forward | m.Credit | m.DropLanes) -> None:
        """What concerns the next receiver behind one of these lanes."""
        for lane in self.lanes:
            if self.run is None or lane.refit != bytes.fromhex(message.refit) or lane.endpoint is None:
                continue
            if isinstance(message, m.Credit):
                lane.onward.credit(message.lane, message.bucket)
            elif isinstance(message, m.DropLanes):
                lane.onward.drop(message.lanes)
            elif lane.id == message.lane:
                verify = self.run.offer.verify
                lane.onward.start(self._reactor, lane.endpoint, message, verify, lane.deadline, self._tell)

    def order(self, order: m.RankOrder) -> None:
        """The driver's word."""
        run = self.run
        stranger = self.last is None or self.last.offer.refit != order.refit  # refused, or never offered here
        if order.order == "state" or (order.order == "drop" and stranger):
            self._say(run, order.refit)
        elif run is not None and run.offer.refit == order.refit:
            if order.order == "load":
                run.go_load = True
            elif order.order == "drop":
                run.dropped = True

    def _say(self, run: RankRun | None, refit: str, error: WeightBusError | None = None) -> None:
        if run is not None and run.offer.refit == refit:
            state = m.RankState(
                refit=refit,
                serves=self.ranks,
                touched=run.touched,
                verified=run.verified,
                loaded=run.loaded,
                dropped=run.dropped,
                error=None if error is None else self._wire(error),
            )
        else:
            state = m.RankState(
                refit=refit,
                serves=self.ranks,
                verified=self.verified_refit == refit,
                touched=self.verified_refit == refit,
                dropped=True,
            )
        self._tell_driver(state)

    # ---- the bus thread's turn

    def tick(self, fired: Collection[Any]) -> bool:
        moved = False
        for lane in self.lanes:
            try:
                moved |= lane.poll()
            except WeightBusError as exc:
                if self.run is not None and self.run.aborted is None and not self.run.verified:
                    self.abort(self.run.offer.refit, exc, told=False)
                    moved = True
        pending, self._releasing = self._releasing, []
        for ready, then in pending:
            if ready():
                then()
                moved = True
            else:
                self._releasing.append((ready, then))
        return moved

    @property
    def polling(self) -> bool:
        if self._releasing or not all(lane.onward.idle for lane in self.lanes):
            return True
        return self.run is not None and any(e.endpoint is not None and not e.endpoint.fds() for e in self.lanes)

    def sources(self) -> list[Any]:
        return [fd for lane in self.lanes if lane.endpoint is not None for fd in lane.endpoint.fds()]

    # ---- the script of one refit

    def _script(self, offer: m.OfferRanks) -> Script:
        run = RankRun(offer, Deadline.after(offer.timeout_s), limits=self._limits(offer))
        for lane in self.lanes:
            lane.deadline = run.deadline
        try:
            answer = self._answer(offer)
        except Exception as exc:
            answer = m.RanksAnswer(refit=offer.refit, error=self._wire(self._unforeseen(exc)))
        self._tell(answer)
        if answer.need_plan:
            return
        if answer.faults or answer.error:
            detail = "; ".join(map(str, answer.faults))
            refusal = AlignmentError(f"refused the offer: {detail}", phase="check")
            self._on_end(run, answer.error.to_error() if answer.error else refusal)
            return
        self.run = self.last = run
        error: WeightBusError | None = None
        try:
            yield from self._stream(run)
            for lane in self.lanes:
                lane.clean = True
        except Exception as exc:
            error = self._unforeseen(exc)
        yield from self._leave(run, error)

    def _unforeseen(self, exc: Exception) -> WeightBusError:
        if not isinstance(exc, WeightBusError):
            log.exception("a refit of the ranks of %s was broken off", self.engine, exc_info=exc)
        return named(exc, RefitAborted, "the ranks' script", advice=REPORT_IT)

    def _wire(self, error: WeightBusError) -> m.WireError:
        return m.WireError.of(error, f"{self.engine}/{self.ranks[0]}")

    def _resolve(self, offer: m.OfferRanks) -> list[Plan | None] | None:
        """The lanes' plans, from the offer or from memory; None when some is unknown here."""
        plans: list[Plan | None] = []
        for lane in offer.lanes:
            if offer.paged:
                plans.append(None)
            elif lane.manifest is not None and lane.plan is not None:
                plan = lane.plan.to_plan(lane.manifest)
                self._remember(plan)
                plans.append(plan)
            elif lane.plan_digest in self._plans:
                self._plans.move_to_end(lane.plan_digest)
                plans.append(self._plans[lane.plan_digest].plan)
            else:
                return None
        return plans

    def _remember(self, plan: Plan) -> None:
        renamed, wrong = rename(plan.manifest, self._config.names)
        self._plans[plan.digest] = Offered(plan, renamed, tuple(wrong))
        while len(self._plans) > MAX_REMEMBERED_PLANS:
            old, _ = self._plans.popitem(last=False)
            for key in [k for k in self._unpackers if k[1] == old]:
                del self._unpackers[key]

    def _answer(self, offer: m.OfferRanks) -> m.RanksAnswer:
        """Every reason to refuse; then the lanes are made ready and their addresses given."""
        plans = self._resolve(offer)
        if plans is None:
            return m.RanksAnswer(refit=offer.refit, need_plan=True)
        try:
            faults = self._faults(offer, plans)
        except Exception as exc:
            log.warning("check raised", exc_info=exc)
            faults = [Fault("engine", "", f"check raised {type(exc).__name__}: {exc}")]
        if faults:
            return m.RanksAnswer(refit=offer.refit, faults=tuple(faults))
        answers = []
        for lane, wanted, plan in zip(self.lanes, offer.lanes, plans, strict=True):
            before = lane.endpoint
            lane.prepare(wanted.lane, offer.refit, wanted.slot_bytes, wanted.slots, wanted.writer)
            if lane.endpoint is not before:
                self._forget_memory(lane.rank)
            if before is not None and lane.endpoint is not before:
                self._forget_views()
            lane.plan = plan
            lane.unpacker = None if plan is None else self._unpacker(lane.rank, plan)
            if lane.endpoint is None:
                raise ConfigError("the lane has no endpoint", lane=lane.id)
            address = lane.endpoint.address if lane.channel is not None else b""
            answers.append(
                m.LaneAnswer(lane=lane.id, incarnation=lane.endpoint.incarnation, address=address, key=lane.key)
            )
        return m.RanksAnswer(refit=offer.refit, lanes=tuple(answers))

    def _forget_views(self) -> None:
        """Lanes are about to be replaced: no view of old slots may keep them."""
        for unpacker in self._unpackers.values():
            unpacker.forget()
        self._tables.clear()

    def _forget_memory(self, rank: int) -> None:
        """The lane has new memory: views and tables of the old would keep it alive."""
        for key in [key for key in self._unpackers if key[0] == rank]:
            del self._unpackers[key]
        self._tables.clear()

    def _unpacker(self, rank: int, plan: Plan) -> Unpacker:
        key = (rank, plan.digest)
        if key not in self._unpackers:
            renamed = self._plans[plan.digest].manifest
            self._unpackers[key] = Unpacker(plan, [spec.names for spec in renamed])
        self._unpackers[key].reset()
        return self._unpackers[key]

    def _faults(self, offer: m.OfferRanks, plans: Sequence[Plan | None]) -> list[Fault]:
        if [lane.rank for lane in offer.lanes] != list(self.ranks):
            return [
                Fault("engine", "", f"this process serves ranks {self.ranks}, offered {[x.rank for x in offer.lanes]}")
            ]
        if offer.paged:
            return self._paged_faults()
        if offer.direct and (len(self.lanes) > 1 or self._config.stage or not self._backend.capabilities.pull):
            return [
                Fault("engine", "", "direct mode needs one rank per process, no stage, and a backend that can pull")
            ]
        faults: list[Fault] = []
        manifests = []
        for plan in plans:
            if plan is not None:
                offered = self._plans[plan.digest]
                faults += offered.faults
                manifests.append(offered.manifest)
        if not any(len(x) for x in manifests):
            faults.append(Fault("missing", "", "the offer has no tensor at all"))
        if not faults:
            faults += self._loader.check(manifests, partial=offer.partial)
        faults += self._memory_faults(offer, [p for p in plans if p is not None])
        return list(dict.fromkeys(faults))

    def _paged_faults(self) -> list[Fault]:
        if self._config.stage or self._config.paged_in_place:
            if not self._config.stage and self.rules.together:
                return [
                    Fault(
                        "group",
                        "",
                        "a paged stream cannot keep groups together in place: use stage, or send a manifest",
                    )
                ]
            return []
        return [
            Fault(
                "missing",
                "",
                "a bare generator has no manifest, so missing names would show only at its end: "
                "give manifest=, or set stage, or allow_paged_in_place=True on this receiver",
            )
        ]

    def _memory_faults(self, offer: m.OfferRanks, plans: Sequence[Plan]) -> list[Fault]:
        need = {"host": 0, "device": 0}
        here = "host" if self._device.type == "cpu" else "device"
        for wanted, plan in zip(offer.lanes, plans, strict=True):
            if not self._backend.capabilities.shares_memory:
                need[here] += wanted.slot_bytes * wanted.slots
            need[here] += plan.assembly_bytes
            if self._config.stage:
                need["host" if self._config.stage == "host" else here] += plan.wire_bytes
        bounds = {"host": self._config.max_host_bytes, "device": self._config.max_device_bytes}
        return [
            Fault(
                "memory",
                "",
                f"{need[kind]} bytes of {kind} memory are needed, max_{kind}_bytes is {bound}: "
                "lower the sender's bucket_bytes or slots, or raise the bound",
            )
            for kind, bound in bounds.items()
            if bound is not None and need[kind] > bound
        ]

    def _limits(self, offer: m.OfferRanks) -> dict[str, float]:
        """Of verify and load, where they stay within the memory that was calibrated."""
        away = self._config.stage == "host" and self._device.type != "cpu"
        if self._copy_rate is None or away:
            return {}
        over_wire = offer.direct and not self._backend.capabilities.shares_memory
        return dict.fromkeys(("verify",) if over_wire else ("verify", "load"), self._copy_rate)

    # ---- stream

    def _stream(self, run: RankRun) -> Script:
        staged = bool(self._config.stage)
        copies: list[list[Landed]] = [[] for _ in self.lanes]
        if run.offer.direct:
            yield from self._pull(run)
            self._prove(run)
        elif staged:
            yield from self._fill_stage(run, copies)
            yield from self._released(run)
            self._check_paged_end(run)
        else:
            yield from self._load_landed(run)
            self._check_paged_end(run)
            self._prove(run)
        run.verified = True
        self.verified_refit = run.offer.refit
        limits = {phase: rate / len(self.lanes) for phase, rate in run.limits.items()}
        self._tell(m.Complete(refit=run.offer.refit, seconds=run.seconds, skipped=tuple(run.skipped), limits=limits))
        self._say(run, run.offer.refit)
        if not staged:
            return
        yield Wait(lambda: run.go_load or run.over, run.deadline)
        while not (run.go_load or run.over):
            # past the deadline the copy belongs to the driver: ask it, drop only on its word or its death
            self._say(run, run.offer.refit)
            yield Wait(lambda: run.go_load or run.over, Deadline.after(1.0))
        run.deadline = NEVER  # roll-forward is the driver's; its order to drop ends it
        if not run.go_load:
            raise run.aborted or RefitAborted("the driver left the refit", phase="commit")
        for attempt in (1, 2):
            try:
                run.applied.clear()
                feed = self._feed(run)
                steps = self._staged_steps(feed, copies)
                yield from self._run_load(run, steps=self._loads(run, feed, steps, in_place=False))
                feed.close()
                self._prove(run)
                break
            except (EngineError, WeightBusError) as exc:
                if attempt == 2:
                    raise
                log.warning("load from the copy failed, trying once more: %s", exc)
        run.loaded = True
        self._say(run, run.offer.refit)

    def _pull(self, run: RankRun) -> Script:
        """Direct mode: read the sender's memory into the engine's, in one pass. Who owns the memory owns the operation."""
        (lane,) = self.lanes
        plan, endpoint = lane.plan, lane.endpoint
        if plan is None or endpoint is None:
            raise RemoteProtocolError("direct mode without a plan", lane=lane.id, phase="stream")
        offered = self._plans[plan.digest]

        def find() -> tuple[list[torch.Tensor], Callable[[], bool]]:
            tensors = self._loader.resident(offered.manifest)
            if tensors is None:
                raise EngineError(
                    "the engine has no resident memory for these tensors",
                    phase="load",
                    advice="Send without direct=True.",
                )
            if not self._tables.fit(plan, tensors, tensors[0].device) and run.offer.verify:
                raise EngineError(
                    "the engine's tensors lie on several devices: no digest can be made of them",
                    phase="load",
                    advice="Send without direct=True, or with verify='off'.",
                )
            return tensors, current_event(tensors)

        tensors, ready = yield from self._run_load(run, find)
        yield Wait(lambda: (lane.pull is not None and ready()) or run.over, run.deadline)
        self._raise_if_over(run)
        pull = lane.pull
        if pull is None:
            raise TransferTimeout("nothing was exported in time", lane=lane.id, phase="stream")
        run.touched = True
        start = time.monotonic()
        work = endpoint.post_read(pull.remote, tensors, digest=run.offer.verify)
        yield Wait(lambda: work.state is not State.PENDING)  # its target is ours: it must end before anything else
        run.seconds["load"] += time.monotonic() - start
        if work.state is State.ERROR:
            raise _load_error(work.error or PeerLost("the read ended in error", lane=lane.id))
        run.buckets, run.bytes = len(plan.buckets), plan.wire_bytes
        if run.offer.verify:
            yield from self._verify_pull(run, lane, plan, work.digest)
        run.applied.update(*offered.names)

    def _verify_pull(self, run: RankRun, lane: InboundLane, plan: Plan, have: int | None) -> Script:
        start = time.monotonic()
        if have is None:
            job = yield from self._jobs.run("load", lambda: self._tables.digest(plan).value(), run.deadline)
            if job.error is not None:
                raise _load_error(job.error)
            have = job.result
        digested = time.monotonic()
        run.seconds["verify"] += digested - start
        yield Wait(lambda: lane.pull_digest is not None or run.aborted is not None, run.deadline)
        run.seconds["wait"] += time.monotonic() - digested
        self._raise_if_over(run)
        if lane.pull_digest is None or lane.pull_digest.digest != have:
            raise DigestMismatch(
                "what was read is not what was exported",
                lane=lane.id,
                phase="stream",
                advice="Did the source change during the send? A full send heals the engine.",
            )

    def _fill_stage(self, run: RankRun, copies: list[list[Landed]]) -> Script:
        count = 0
        while not self._all_taken():
            yield Wait(
                lambda: run.over or any(lane.readable() for lane in self.lanes) or self._all_taken(), run.deadline
            )
            self._raise_if_over(run)
            for i, lane in enumerate(self.lanes):
                if lane.readable():
                    landed = lane.ready.popleft()
                    start = time.perf_counter()
                    try:
                        lane.expect(landed)
                        copy = self._stage.put(count, landed)
                        verify(copy, copy.memory, lane.id)
                    except Exception:
                        lane.release(landed)
                        raise
                    count += 1
                    run.seconds["verify"] += time.perf_counter() - start
                    copies[i].append(copy)
                    self._take(run, lane, landed)

    def _take(self, run: RankRun, lane: InboundLane, landed: Landed) -> None:
        """A bucket is used up here: its slot is free, once it has been passed on too."""
        run.bytes += landed.nbytes
        run.buckets += 1
        channel = lane.channel

        def free() -> None:
            if lane.channel is channel:
                lane.release(landed)
                if not lane.shares:
                    self._tell(m.Credit(refit=run.offer.refit, lane=lane.id, bucket=landed.index))

        if lane.onward.holds(landed.index):
            self._releasing.append((lambda: not lane.onward.holds(landed.index), free))
        else:
            free()

    def _released(self, run: RankRun) -> Script:
        """Until every slot is free."""
        yield Wait(lambda: not self._releasing or run.aborted is not None, run.deadline)
        self._raise_if_over(run)

    def _raise_if_over(self, run: RankRun) -> None:
        if run.aborted is not None:
            raise run.aborted
        if run.dropped:
            raise RefitAborted("the driver left the refit", phase="stream")
        if run.deadline.expired:
            raise TransferTimeout(
                "the refit did not end in time",
                phase="stream",
                advice="Raise send's timeout, or look for the stalled side in its log.",
            )

    def _all_taken(self) -> bool:
        return all(lane.total is not None and lane.next_bucket >= lane.total and not lane.ready for lane in self.lanes)

    def _staged_steps(self, feed: Feed, copies: list[list[Landed]]) -> Iterator[Step]:
        at = dict.fromkeys(self.lanes, 0)
        rows = dict(zip(self.lanes, copies, strict=True))
        if feed.planned:
            yield from (list(zip(self.lanes, row, strict=True)) for row in zip(*copies, strict=True))
            return
        while any(at[lane] < len(rows[lane]) for lane in self.lanes):
            lane = next((x for x in self.lanes if feed.hungry(x) and at[x] < len(rows[x])), None)
            if lane is None:
                feed.close()  # raises where the ranks' streams end differently
                return
            at[lane] += 1
            yield [(lane, rows[lane][at[lane] - 1])]

    def _load_landed(self, run: RankRun) -> Script:
        """Load in place: one job for as long as buckets keep coming, and this script waits for more."""
        feed = self._feed(run)
        if feed.planned:  # while the first bucket is on its way
            yield from self._run_load(run, lambda: feed.prepare(self._device))
        while not self._all_taken():
            start = time.monotonic()
            yield Wait(lambda: self._moves_on(run, feed), run.deadline)
            run.seconds["wait"] += time.monotonic() - start
            self._raise_if_over(run)
            steps = self._landed_steps(run, feed)
            yield from self._run_load(run, steps=self._loads(run, feed, steps, in_place=True))
            self._raise_if_over(run)
        feed.close()
        yield from self._released(run)

    def _moves_on(self, run: RankRun, feed: Feed) -> bool:
        """There is something to load, or nothing to wait for."""
        return feed.choose(self.lanes) is not None or run.over or self._all_taken()

    # ---- in the caller's thread

    def _landed_steps(self, run: RankRun, feed: Feed) -> Iterator[Step]:
        """Buckets as they land, until for a while nothing does."""
        while not (run.over or run.deadline.expired):
            chosen = feed.choose(self.lanes)
            if chosen is None and not self._all_taken():
                start = time.monotonic()
                self._reactor.wait(lambda: self._moves_on(run, feed), run.deadline.min(Deadline.after(LINGER_S)))
                run.seconds["wait"] += time.monotonic() - start
                chosen = feed.choose(self.lanes)
            if chosen is None:
                return
            yield [(lane, lane.ready.popleft()) for lane in chosen]

    def _loads(self, run: RankRun, feed: Feed, steps: Iterator[Step], *, in_place: bool) -> Loads:
        """One load call after another; after each a yield, up to which its views may be used."""
        for step in steps:
            try:
                used_up = feed.load(step, check=in_place)
                yield
            except BaseException:
                self._reactor.submit(partial(_give_back, step))
                raise
            if in_place:
                self._reactor.submit(partial(self._release_soon, used_up, run), steps=1)

    # ---- on the bus thread again

    def _feed(self, run: RankRun) -> Feed:
        plan = self.lanes[0].plan
        offered = None if plan is None else self._plans[plan.digest]
        return Feed(self.lanes, run, self._loader, self._config.names, offered, self._tables)

    def _run_load(
        self, run: RankRun, call: Callable[[], Any] = lambda: None, steps: Loads | None = None
    ) -> Generator[Wait, bool, Any]:
        """What `call` returns in the caller's thread, after `steps`; raises what they raise, as one of ours."""
        job = yield from self._jobs.run("load", call, run.deadline, lambda: run.over, steps)
        return self._result(run, job)

    def _result(self, run: RankRun, job: Job) -> Any:
        if run.aborted is not None and isinstance(job.error, TransferTimeout):
            raise run.aborted  # nobody came because it was over
        if job.error is not None:
            raise _load_error(job.error)
        return job.result

    def _release_soon(self, used_up: Sequence[Spent], run: RankRun) -> None:
        """Free each slot once the device has read it, and its digest is right."""
        for spent in used_up:
            if spent.ready():
                self._release(spent, run)
            else:
                self._releasing.append((spent.ready, partial(self._release, spent, run)))

    def _release(self, spent: Spent, run: RankRun) -> None:
        try:
            spent.check()
        except WeightBusError as exc:
            spent.lane.release(spent.landed)
            self.abort(run.offer.refit, exc, told=False)
        else:
            self._take(run, spent.lane, spent.landed)

    def _check_paged_end(self, run: RankRun) -> None:
        """A paged refit knows its names only now."""
        if not run.offer.paged:
            return
        manifests, faults = [], []
        for lane in self.lanes:
            specs = [spec for k in sorted(lane.pages) for spec in lane.pages[k].specs]
            if lane.page_end is None or len(specs) != lane.page_end.tensors:
                raise RemoteProtocolError("pages are missing", lane=lane.id, phase="complete")
            renamed, wrong = rename(Manifest(specs), self._config.names)
            manifests.append(renamed)
            faults += wrong
        faults += [] if faults else self._loader.check(manifests, partial=run.offer.partial)
        if not any(len(x) for x in manifests):
            faults.append(Fault("missing", "", "the stream had no tensor at all"))
        if faults:
            raise AlignmentError("; ".join(map(str, faults)), phase="complete", peer=self.engine)

    def _prove(self, run: RankRun) -> None:
        """Coverage: every name was applied or skipped for a reason."""
        for lane in self.lanes:
            names = (
                [n for names in self._plans[lane.plan.digest].names for n in names]
                if lane.plan is not None
                else [
                    n
                    for k in sorted(lane.pages)
                    for spec in rename(Manifest(lane.pages[k].specs), self._config.names)[0]
                    for n in spec.names
                ]
            )
            run.tensors = max(run.tensors, len(names))
            lost = [n for n in names if n not in run.applied]
            if lost:
                raise AlignmentError(
                    f"{len(lost)} tensors were not applied: {', '.join(lost[:10])}",
                    phase="complete",
                    peer=f"{self.engine}/{lane.rank}",
                )

    def _leave(self, run: RankRun, error: WeightBusError | None) -> Script:
        refit = run.offer.refit
        if error is not None:
            if run.touched:
                self.verified_refit = ""
            if not run.dropped and not (run.aborted is error and run.told):  # who ordered the drop reports
                self._tell(m.RankFailed(refit=refit, error=self._wire(error)))
            if run.touched:
                yield from self._abort_loader(error)
        run.dropped = error is not None and not run.loaded
        for lane in self.lanes:
            lane.forget()
        if error is not None:
            self._forget_views()
            self._stage.drop()
        yield Wait(lambda: not self._releasing, Deadline.after(5.0))
        if run.offer.direct:
            self._tell(m.Quiet(refit=refit, lanes=tuple(lane.id for lane in self.lanes)))
        state = m.RankState(
            refit=refit,
            serves=self.ranks,
            touched=run.touched,
            verified=run.verified and error is None,
            loaded=run.loaded,
            dropped=True,
            error=None if error is None else self._wire(error),
        )
        self._tell_driver(state)
        self.run = None  # only now: an offer that comes while slots are being freed has to wait
        self._on_end(run, error)
        if self._pending is not None:
            offer, self._pending = self._pending, None
            self._reactor.start(self._script(offer))

    def _abort_loader(self, error: WeightBusError) -> Script:
        job = yield from self._jobs.run("abort", lambda: self._loader.abort(str(error)), Deadline.after(2.0))
        if job.error is not None and not isinstance(job.error, TransferTimeout):
            log.warning("the loader's abort raised: %s", job.error)

    def close(self) -> None:
        """On the closing thread, after the bus thread has let go."""
        for lane in self.lanes:
            if lane.endpoint is not None:
                lane.endpoint.close()
                lane.endpoint = lane.channel = lane.pool = None
        self._forget_views()
        self._unpackers.clear()
        self._stage.drop()
        self._loader.close()
