"""The receiving half of the pipeline: bucket k is loaded while k+1 lands.

`RankSet` is every rank of one engine that this process serves. It answers offers and checks, and fills the stage, on the
bus thread; `load` runs as a job in the caller's thread. Rules: section 5 of docs/protocol.md.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import attrs
import torch

from weightbus import digest as digests
from weightbus.adapter import EngineLoader, Fault, LoadResult
from weightbus.align import Aligner
from weightbus.backend import LANE_KEY_BYTES, Arrival, Backend, Channel, Endpoint, EndpointSpec, GroupSpec
from weightbus.bucket import Unpacker
from weightbus.buffers import SlotPool
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
)
from weightbus.header import Header
from weightbus.jobs import Job, Jobs
from weightbus.manifest import Manifest
from weightbus.names import NameRule, rename
from weightbus.plan import Plan, single_page
from weightbus.reactor import NEVER, Reactor, Script, Wait, log

MAX_REMEMBERED_PLANS = 4


@attrs.frozen(kw_only=True)
class InboundConfig:
    """What the user said of this receiver."""

    stage: str | None = None
    paged_in_place: bool = False
    max_host_bytes: int | None = None
    max_device_bytes: int | None = None
    poison: bool = False
    names: tuple[NameRule, ...] = ()
    host: str | None = None


@attrs.define(eq=False)
class Landed:
    """One bucket that is here: in a slot, or in the stage."""

    index: int
    memory: torch.Tensor
    nbytes: int
    header: Header
    arrival: Arrival | None


_Step = list[tuple["InboundLane", Landed]]  # what one load call takes: one bucket per lane (planned), or one (paged)


class InboundLane:
    """One rank's lane: its endpoint, its slots, what has landed and not been taken."""

    def __init__(self, rank: int, name: str, backend: Backend, device: torch.device, config: InboundConfig) -> None:
        self.rank, self.name = rank, name
        self.id = ""
        self.clean = True  # no refit is open on it
        self.drained = False  # the writer said that its operations have ended
        self.key = b""
        self.endpoint: Endpoint | None = None
        self.channel: Channel | None = None
        self.pool: SlotPool | None = None
        self.ready: deque[Landed] = deque()
        self.pages: dict[int, m.Page] = {}
        self.page_end: m.PageEnd | None = None
        self.next_bucket = 0
        self.taken = 0
        self.plan: Plan | None = None
        self.unpacker: Unpacker | None = None
        self.refit = b""
        self.aheads: list[m.HeaderAhead] = []
        self._backend, self._device, self._config = backend, device, config

    @property
    def shares(self) -> bool:
        return self._backend.capabilities.shares_memory

    def prepare(self, lane: str, refit: str, slot_bytes: int, slots: int) -> None:
        """Be clean and have room for this refit; a lane that may still be written to is replaced."""
        multicast = self._backend.capabilities.multicast
        safe = (self.clean or self.drained) and self.channel is not None and self.channel.error is None
        if self.endpoint is not None and not (safe and self._fits(slot_bytes, slots)):
            self.retire()
        if self.endpoint is None:
            spec = EndpointSpec(name=self.name, role="receive", device=self._device, host=self._config.host)
            self.endpoint = self._backend.endpoint(spec)
            self.key = os.urandom(LANE_KEY_BYTES)
            limit = self._config.max_host_bytes if self._device.type == "cpu" else self._config.max_device_bytes
            self.pool = SlotPool(self.endpoint, slots, self._config.poison, limit)
            if not self.shares:
                self.pool.ensure(slot_bytes)
            if not multicast:
                self.channel = self.endpoint.listen(self.key, self.pool.regions)
        self.id, self.refit, self.clean, self.drained = lane, bytes.fromhex(refit), False, False
        self.ready.clear()
        self.pages.clear()
        self.aheads.clear()
        self.page_end, self.next_bucket, self.taken = None, 0, 0

    def _fits(self, slot_bytes: int, slots: int) -> bool:
        if self.shares or self.pool is None:
            return True
        return self.pool.count == slots and self.pool.regions[0].nbytes >= slot_bytes

    def retire(self) -> None:
        """Destroy this incarnation, the one fence against late writes. Closing may block: on a thread of its own."""
        endpoint, self.endpoint, self.channel, self.pool = self.endpoint, None, None, None
        self.ready.clear()
        if self.unpacker is not None:
            self.unpacker = None
        if endpoint is not None:
            threading.Thread(target=endpoint.close, name="weightbus-retire", daemon=True).start()

    def poll(self) -> bool:
        """Take what has landed; on the bus thread. Raises what is wrong with the lane."""
        if self.endpoint is None or self.channel is None:
            return False
        moved = self.endpoint.progress()
        while self.aheads:
            ahead = self.aheads.pop(0)
            self.channel.post_recv(ahead.slot, ahead.nbytes, ahead.header)
            moved = True
        for arrival in self.channel.arrivals():
            moved = True
            header = Header.unpack(arrival.header)
            if header.lane_key != self.key or header.refit_id != self.refit or self.clean:
                self.channel.release(arrival)  # of a refit that is over
                continue
            self._accept(header, arrival)
        if self.channel.error is not None and not self.clean:
            raise self.channel.error
        return moved

    def _accept(self, header: Header, arrival: Arrival) -> None:
        if header.bucket != self.next_bucket:
            raise RemoteProtocolError(
                f"bucket {header.bucket} came in place of {self.next_bucket}",
                lane=self.id,
                bucket=header.bucket,
                phase="stream",
                advice="Bytes were lost, doubled or reordered on the way; the refit can be sent again.",
            )
        if header.used_bytes != arrival.nbytes or arrival.nbytes > arrival.region.nbytes:
            raise RemoteProtocolError(
                f"{arrival.nbytes} bytes landed, the header says {header.used_bytes}",
                lane=self.id,
                bucket=header.bucket,
                phase="stream",
                advice="The transfer was cut short; send again.",
            )
        self.next_bucket += 1
        self.ready.append(Landed(header.bucket, arrival.region.tensor, arrival.nbytes, header, arrival))

    def expect(self, landed: Landed) -> None:
        """Layout must be the one agreed; raises before a byte is used."""
        if self.plan is not None:
            bucket = self.plan.buckets[landed.index] if landed.index < len(self.plan.buckets) else None
            wrong = landed.header.plan_digest != self.plan.digest or bucket is None
            if wrong or (bucket is not None and bucket.used_bytes != landed.nbytes):
                raise RemoteProtocolError("a bucket packed by another plan", lane=self.id, bucket=landed.index)
        else:
            page = self.pages[landed.index]
            want = single_page(page.specs, page.first_tensor, m.unflat_segments(page.segments))
            if landed.header.plan_digest != want:
                raise RemoteProtocolError("a bucket packed by another page", lane=self.id, bucket=landed.index)

    def release(self, landed: Landed) -> None:
        if landed.arrival is not None and self.channel is not None:
            if self.pool is not None and not self.shares:
                self.pool.poison(landed.arrival.slot) if landed.arrival.slot < len(self.pool.regions) else None
            self.channel.release(landed.arrival)
            landed.arrival = None

    def forget(self) -> None:
        """Let go of everything that has landed and is not being read."""
        while self.ready:
            self.release(self.ready.popleft())

    @property
    def total(self) -> int | None:
        """How many buckets there are; None while that is not known."""
        if self.plan is not None:
            return len(self.plan.buckets)
        return None if self.page_end is None else self.page_end.buckets

    def readable(self) -> bool:
        """The next bucket is here, and its page."""
        return bool(self.ready) and (self.plan is not None or self.ready[0].index in self.pages)


def verify(landed: Landed, memory: torch.Tensor, lane: str) -> None:
    """Raises DigestMismatch when the bytes are not those that were packed."""
    if landed.header.verified:
        have = digests.digest(memory, landed.nbytes)
        if have != landed.header.digest:
            raise DigestMismatch(
                f"digest {have:016x}, packed as {landed.header.digest:016x}",
                lane=lane,
                bucket=landed.index,
                phase="stream",
                advice="Memory or transport corrupts data; a full send heals the engine.",
            )


class Stage:
    """The receiver's copy of one refit, kept over refits and reused."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: list[torch.Tensor] = []

    def put(self, k: int, landed: Landed) -> Landed:
        """Copy bucket k of a lane; returns it as landed in the stage."""
        while len(self._memory) <= k:
            self._memory.append(torch.empty(0, dtype=torch.uint8, device=self._device))
        if self._memory[k].numel() < landed.nbytes:
            self._memory[k] = torch.empty(max(landed.nbytes, 16), dtype=torch.uint8, device=self._device)
        self._memory[k][: landed.nbytes].copy_(landed.memory[: landed.nbytes])
        return Landed(landed.index, self._memory[k], landed.nbytes, landed.header, None)

    def drop(self) -> None:
        self._memory.clear()


class PagedUnpacker:
    """Views of paged buckets: specs come page by page, whole tensors go out in order."""

    def __init__(self) -> None:
        self.specs: list[Any] = []
        self._partial: tuple[int, torch.Tensor, int] | None = None

    def batch(
        self, page: m.Page, memory: torch.Tensor, names: Callable[[Any], tuple[str, ...]]
    ) -> list[tuple[str, torch.Tensor]]:
        from weightbus.bucket import view_of

        if page.first_tensor != len(self.specs):
            raise RemoteProtocolError("pages do not follow each other", bucket=page.bucket)
        self.specs.extend(page.specs)
        batch: list[tuple[str, torch.Tensor]] = []
        for s in m.unflat_segments(page.segments):
            if s.tensor >= len(self.specs) or s.offset + s.nbytes > memory.numel():
                raise RemoteProtocolError("a page beyond its bucket", bucket=page.bucket)
            spec = self.specs[s.tensor]
            if s.nbytes == spec.nbytes:
                tensor = view_of(spec, memory, s.offset)
            else:
                index, whole, have = self._partial or (
                    s.tensor,
                    torch.empty(spec.nbytes, dtype=torch.uint8, device=memory.device),
                    0,
                )
                if index != s.tensor or s.tensor_offset != have:
                    raise RemoteProtocolError("a tensor's pieces do not follow each other", tensor=spec.name)
                whole[have : have + s.nbytes].copy_(memory[s.offset : s.offset + s.nbytes])
                have += s.nbytes
                self._partial = (index, whole, have) if have < spec.nbytes else None
                if self._partial is not None:
                    continue
                tensor = view_of(spec, whole, 0)
            batch.extend((name, tensor) for name in names(spec))
        return batch


@attrs.define(eq=False)
class RankRun:
    """One refit as this process's ranks see it."""

    offer: m.OfferRanks
    deadline: Deadline
    started_s: float = attrs.field(factory=time.monotonic)
    aborted: WeightBusError | None = None
    told: bool = True
    go_load: bool = False
    dropped: bool = False
    published: bool = False
    touched: bool = False
    verified: bool = False
    loaded: bool = False
    applied: set[str] = attrs.field(factory=set)
    skipped: list[str] = attrs.field(factory=list)
    seconds: dict[str, float] = attrs.field(factory=lambda: dict.fromkeys(("verify", "load", "wait"), 0.0))
    buckets: int = 0
    bytes: int = 0
    tensors: int = 0


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
        self.verified_refit = ""
        self.rules = loader.rules()
        self._reactor, self._loader, self._device, self._config = reactor, loader, device, config
        self._backend = backend
        self._jobs, self._tell, self._tell_driver, self._on_end = jobs, tell, tell_driver, on_end
        self._plans: OrderedDict[int, tuple[Plan, Manifest]] = OrderedDict()
        self._unpackers: dict[tuple[int, int], Unpacker] = {}
        self._stage = Stage(torch.device("cpu") if config.stage == "host" else device)
        self._pending: m.OfferRanks | None = None
        self._releasing: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self._reading = False

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

    def drained(self, refit: str, lane: str) -> None:
        for each in self.lanes:
            if each.id == lane and each.refit == bytes.fromhex(refit):
                each.drained = True

    def page(self, page: m.Page | m.PageEnd | m.HeaderAhead) -> None:
        for lane in self.lanes:
            if lane.id == page.lane and lane.refit == bytes.fromhex(page.refit):
                if isinstance(page, m.Page):
                    lane.pages[page.bucket] = page
                elif isinstance(page, m.PageEnd):
                    lane.page_end = page
                else:
                    lane.aheads.append(page)

    def join_group(self, message: m.JoinGroup) -> None:
        """Enter a collective's rendezvous, on a helper thread; answer Connected for each lane."""
        for lane in self.lanes:
            if lane.id in message.ranks and lane.endpoint is not None and lane.pool is not None:
                self._enter(lane, lane.endpoint, lane.pool, message)

    def _enter(self, lane: InboundLane, endpoint: Endpoint, pool: SlotPool, message: m.JoinGroup) -> None:
        lane.key, lane.channel = message.key, None
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
                channel = endpoint.connect_group(group, slots, message.timeout_s)
            except Exception as exc:
                failed[lane.id] = m.WireError.of(exc, lane.name)

            def done() -> None:
                lane.channel = channel
                self._tell(m.Connected(refit=message.refit, lane=lane.id, failed=failed))

            self._reactor.submit(done)

        threading.Thread(target=enter, name="weightbus-connect", daemon=True).start()

    def order(self, order: m.RankOrder) -> None:
        """The driver's word."""
        run = self.run
        if order.order == "state":
            self._say(run, order.refit)
        elif order.order == "published":
            if run is not None and run.offer.refit == order.refit:
                run.published = True
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
                error=None if error is None else m.WireError.of(error, f"{self.engine}/{self.ranks[0]}"),
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

    def tick(self) -> bool:
        moved = False
        for lane in self.lanes:
            try:
                moved |= lane.poll()
            except WeightBusError as exc:
                if self.run is not None and self.run.aborted is None and not self.run.verified:
                    self.abort(self.run.offer.refit, exc, told=False)
                    moved = True
        still = []
        for ready, then in self._releasing:
            if ready():
                then()
                moved = True
            else:
                still.append((ready, then))
        self._releasing = still
        return moved

    @property
    def polling(self) -> bool:
        if self._releasing:
            return True
        return self.run is not None and any(e.endpoint is not None and not e.endpoint.fds() for e in self.lanes)

    def sources(self) -> list[Any]:
        return [fd for lane in self.lanes if lane.endpoint is not None for fd in lane.endpoint.fds()]

    # ---- the script of one refit

    def _script(self, offer: m.OfferRanks) -> Script:
        run = RankRun(offer, Deadline.after(offer.timeout_s))
        plans = self._resolve(offer)
        if plans is None:
            self._tell(m.RanksAnswer(refit=offer.refit, need_plan=True))
            return
        answer = self._check(offer, plans)
        self._tell(answer)
        if answer.faults or answer.error:
            detail = "; ".join(map(str, answer.faults))
            refusal = AlignmentError(f"refused the offer: {detail}", phase="check")
            self._on_end(run, answer.error.to_error() if answer.error else refusal)
            return
        self.run = run
        error: WeightBusError | None = None
        try:
            yield from self._stream(run)
            yield from self._hold(run)
        except WeightBusError as exc:
            error = exc
        yield from self._leave(run, error)

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
                plans.append(self._plans[lane.plan_digest][0])
            else:
                return None
        return plans

    def _remember(self, plan: Plan) -> None:
        renamed, _ = rename(plan.manifest, self._config.names)
        self._plans[plan.digest] = (plan, renamed)
        while len(self._plans) > MAX_REMEMBERED_PLANS:
            old, _ = self._plans.popitem(last=False)
            for key in [k for k in self._unpackers if k[1] == old]:
                del self._unpackers[key]

    def _check(self, offer: m.OfferRanks, plans: Sequence[Plan | None]) -> m.RanksAnswer:
        """Every reason to refuse; then the lanes are made ready and their addresses given."""
        try:
            faults = self._faults(offer, plans)
        except Exception as exc:
            log.warning("check raised", exc_info=exc)
            faults = [Fault("engine", "", f"check raised {type(exc).__name__}: {exc}")]
        if faults:
            return m.RanksAnswer(refit=offer.refit, faults=tuple(faults))
        try:
            answers = []
            for lane, wanted, plan in zip(self.lanes, offer.lanes, plans, strict=True):
                lane.prepare(wanted.lane, offer.refit, wanted.slot_bytes, wanted.slots)
                lane.plan = plan
                lane.unpacker = None if plan is None else self._unpacker(lane.rank, plan)
                if lane.endpoint is None:
                    raise ConfigError("the lane has no endpoint", lane=lane.id)
                address = lane.endpoint.address if lane.channel is not None else b""
                answers.append(
                    m.LaneAnswer(lane=lane.id, incarnation=lane.endpoint.incarnation, address=address, key=lane.key)
                )
            return m.RanksAnswer(refit=offer.refit, lanes=tuple(answers))
        except WeightBusError as exc:
            return m.RanksAnswer(refit=offer.refit, error=m.WireError.of(exc, f"{self.engine}/{self.ranks[0]}"))

    def _unpacker(self, rank: int, plan: Plan) -> Unpacker:
        key = (rank, plan.digest)
        if key not in self._unpackers:
            renamed = self._plans[plan.digest][1]
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
        faults: list[Fault] = []
        manifests = []
        for plan in plans:
            if plan is None:
                continue
            renamed, wrong = rename(plan.manifest, self._config.names)
            faults += wrong
            manifests.append(renamed)
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

    # ---- stream

    def _stream(self, run: RankRun) -> Script:
        staged = bool(self._config.stage)
        copies: list[list[Landed]] = [[] for _ in self.lanes]
        if staged:
            yield from self._fill_stage(run, copies)
            self._check_paged_end(run)
        else:
            feed = _Feed(self, run)
            yield from self._load_stream(run, feed, self._landed_steps(feed), in_place=True)
            self._check_paged_end(run)
            self._prove(run)
        run.verified = True
        self.verified_refit = run.offer.refit
        self._tell(m.Complete(refit=run.offer.refit, seconds=run.seconds, skipped=tuple(run.skipped)))
        self._say(run, run.offer.refit)
        if not staged:
            return
        yield Wait(lambda: run.go_load or run.dropped or run.aborted is not None, run.deadline)
        while not (run.go_load or run.dropped or run.aborted):
            # past the deadline the copy belongs to the driver: ask it, drop only on its word or its death
            self._say(run, run.offer.refit)
            yield Wait(lambda: run.go_load or run.dropped or run.aborted is not None, Deadline.after(1.0))
        run.deadline = NEVER  # roll-forward is the driver's; its order to drop ends it
        if not run.go_load:
            raise run.aborted or RefitAborted("the driver left the refit", phase="commit")
        for attempt in (1, 2):
            try:
                run.applied.clear()
                feed = _Feed(self, run)
                yield from self._load_stream(run, feed, self._staged_steps(feed, copies), in_place=False)
                self._prove(run)
                break
            except (EngineError, WeightBusError) as exc:
                if attempt == 2:
                    raise
                log.warning("load from the copy failed, trying once more: %s", exc)
        run.loaded = True
        self._say(run, run.offer.refit)

    def _fill_stage(self, run: RankRun, copies: list[list[Landed]]) -> Script:
        count = 0
        while not self._all_taken():
            yield Wait(
                lambda: (
                    run.aborted is not None
                    or run.dropped
                    or any(lane.readable() for lane in self.lanes)
                    or self._all_taken()
                ),
                run.deadline,
            )
            self._raise_if_over(run)
            for i, lane in enumerate(self.lanes):
                if lane.readable():
                    landed = lane.ready.popleft()
                    lane.expect(landed)
                    start = time.perf_counter()
                    copy = self._stage.put(count, landed)
                    count += 1
                    verify(copy, copy.memory, lane.id)
                    run.seconds["verify"] += time.perf_counter() - start
                    copies[i].append(copy)
                    self._take(run, lane, landed)

    def _take(self, run: RankRun, lane: InboundLane, landed: Landed) -> None:
        """A bucket's slot is free again."""
        lane.taken += 1
        run.bytes += landed.nbytes
        run.buckets += 1
        lane.release(landed)
        self._tell(m.Credit(refit=run.offer.refit, lane=lane.id, bucket=landed.index))

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

    def _landed_steps(self, feed: _Feed) -> Iterator[_Step | None]:
        """Buckets as they land; None when there is nothing yet."""
        while not self._all_taken():
            step = feed.choose(self.lanes)
            yield None if step is None else [(lane, lane.ready.popleft()) for lane in step]

    def _all_taken(self) -> bool:
        return all(lane.total is not None and lane.next_bucket >= lane.total and not lane.ready for lane in self.lanes)

    def _staged_steps(self, feed: _Feed, copies: list[list[Landed]]) -> Iterator[_Step]:
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

    def _load_stream(self, run: RankRun, feed: _Feed, steps: Iterator[_Step | None], *, in_place: bool) -> Script:
        for step in steps:
            if step is None:
                start = time.monotonic()
                yield Wait(
                    lambda: (
                        run.aborted is not None
                        or run.dropped
                        or feed.choose(self.lanes) is not None
                        or self._all_taken()
                    ),
                    run.deadline,
                )
                run.seconds["wait"] += time.monotonic() - start
                self._raise_if_over(run)
                continue
            for lane, landed in step:
                lane.expect(landed)
            job = yield from self._run_load(run, feed, step, in_place)
            if job.error is not None:
                for lane, landed in step:
                    self._release_later(job, lane, landed, run, credit=False)
                raise self._wrapped(job.error)
            for lane, landed, event in feed.spent(job.result):
                if in_place:
                    self._release_later(event, lane, landed, run, credit=True)
            if in_place:
                self._raise_if_over(run)
        feed.close()

    def _run_load(self, run: RankRun, feed: _Feed, step: _Step, in_place: bool) -> Generator[Wait, bool, Job]:
        self._reading = True
        try:
            return (
                yield from self._jobs.run(
                    "load",
                    lambda: feed.load(step, check=in_place),
                    run.deadline,
                    lambda: run.aborted is not None or run.dropped,
                )
            )
        finally:
            self._reading = False

    @staticmethod
    def _wrapped(error: BaseException) -> WeightBusError:
        if isinstance(error, WeightBusError):
            return error
        wrapped = EngineError(
            f"load raised {type(error).__name__}: {error}",
            phase="load",
            advice="The engine is marked; a full send heals it.",
        )
        wrapped.__cause__ = error
        return wrapped

    def _release_later(self, event: Any, lane: InboundLane, landed: Landed, run: RankRun, *, credit: bool) -> None:
        """Free the slot once the device has read it."""

        def then() -> None:
            if credit:
                self._take(run, lane, landed)
            else:
                lane.release(landed)

        if isinstance(event, torch.cuda.Event) and not event.query():  # type: ignore[no-untyped-call]
            self._releasing.append((event.query, then))
        else:
            then()

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
                [n for spec in self._plans[lane.plan.digest][1] for n in spec.names]
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

    def _hold(self, run: RankRun) -> Script:
        """Verified (in place) or loaded: the outcome is the driver's word, or the end of what can be waited for."""
        self._finish_part(run)
        return
        yield  # pragma: no cover

    def _finish_part(self, run: RankRun) -> None:
        for lane in self.lanes:
            lane.clean = True

    def _leave(self, run: RankRun, error: WeightBusError | None) -> Script:
        refit = run.offer.refit
        if error is not None:
            if run.touched:
                self.verified_refit = ""
            if not (run.aborted is error and run.told):
                self._tell(m.RankFailed(refit=refit, error=m.WireError.of(error, f"{self.engine}/{self.ranks[0]}")))
            if run.touched:
                yield from self._abort_loader(error)
        run.dropped = error is not None and not run.loaded
        self.run = None
        for lane in self.lanes:
            lane.forget()
        if self._config.stage and error is not None:
            self._stage.drop()
        yield Wait(lambda: not self._releasing, Deadline.after(5.0))
        self._tell(m.Quiet(refit=refit, lanes=tuple(lane.id for lane in self.lanes)))
        state = m.RankState(
            refit=refit,
            serves=self.ranks,
            touched=run.touched,
            verified=run.verified and error is None,
            loaded=run.loaded,
            dropped=True,
            error=None if error is None else m.WireError.of(error, f"{self.engine}/{self.ranks[0]}"),
        )
        self._tell_driver(state)
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
                lane.endpoint = lane.channel = None
        self._loader.close()


class _Feed:
    """Turns steps into load calls, in the caller's thread; aligns lanes by name where they are paged."""

    def __init__(self, ranks: RankSet, run: RankRun) -> None:
        self._ranks, self._run = ranks, run
        self.planned = all(lane.plan is not None for lane in ranks.lanes)
        self._aligner = None if self.planned else Aligner(ranks.ranks)
        self._paged = {lane.rank: PagedUnpacker() for lane in ranks.lanes}
        for lane in ranks.lanes:
            if lane.unpacker is not None:
                lane.unpacker.reset()

    def hungry(self, lane: InboundLane) -> bool:
        """At most one outstanding batch per rank: more would be views of slots that fill again."""
        return self._aligner is not None and lane.rank in self._aligner.hungry()

    def choose(self, lanes: Sequence[InboundLane]) -> list[InboundLane] | None:
        """The lanes whose next buckets make the next step, once they are here."""
        if self.planned:
            return list(lanes) if all(lane.readable() for lane in lanes) else None
        lane = next((x for x in lanes if self.hungry(x) and x.readable()), None)
        return None if lane is None else [lane]

    def load(self, step: _Step, *, check: bool) -> Any:
        """Verify and load one step; what was used up and the event after which it may be released."""
        run, loader = self._run, self._ranks._loader
        start = time.perf_counter()
        if check:
            for lane, landed in step:
                verify(landed, landed.memory, lane.id)
        loaded = time.perf_counter()
        run.seconds["verify"] += loaded - start
        spent: list[tuple[InboundLane, Landed]] = []
        if self.planned:
            batches = [
                lane.unpacker.batch(landed.index, landed.memory) for lane, landed in step if lane.unpacker is not None
            ]
            self._call(loader, batches)
            spent = list(step)
        else:
            spent = self._align(loader, step)
        run.seconds["load"] += time.perf_counter() - loaded
        event = None
        if any(landed.memory.is_cuda for _, landed in step):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return [(lane, landed, event) for lane, landed in spent]

    def _call(self, loader: EngineLoader, batches: list[list[tuple[str, torch.Tensor]]]) -> None:
        if batches and batches[0]:
            self._run.touched = True
            result: LoadResult = loader.load(batches)
            self._run.applied.update(result.applied)
            self._run.applied.update(result.skipped)
            self._run.skipped.extend(result.skipped)

    def _align(self, loader: EngineLoader, step: _Step) -> list[tuple[InboundLane, Landed]]:
        aligner = self._aligner
        if aligner is None:
            return []
        for lane, landed in step:

            def names(spec: Any) -> tuple[str, ...]:
                return tuple(n for s in rename(Manifest([spec]), self._ranks._config.names)[0] for n in s.names)

            batch = self._paged[lane.rank].batch(
                lane.pages[landed.index], landed.memory[: max(landed.nbytes, 0)], names
            )
            aligner.feed(lane.rank, batch, (lane, landed))
        spent: list[tuple[InboundLane, Landed]] = []
        while (pulled := aligner.pull()) is not None:
            batches, tokens = pulled
            self._call(loader, [list(b) for b in batches])
            spent.extend(tokens)
        return spent

    def spent(self, result: Any) -> list[tuple[InboundLane, Landed, Any]]:
        return list(result)

    def close(self) -> None:
        if self._aligner is not None:
            for lane in self._ranks.lanes:
                self._aligner.end(lane.rank)
            self._aligner.pull()
