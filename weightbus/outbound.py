"""The sending half of the pipeline: pack bucket k+1 while k is on the wire and k-1 is being loaded.

Threads: `SendRun.stream` and `Packer` run in the caller's thread; posting, testing and credits on the bus thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import attrs
import torch

from weightbus.backend import Capabilities, Channel, Region, State, Work
from weightbus.bucket import Packed, Packer, plain_bytes
from weightbus.buffers import SlotPool
from weightbus.deadline import Deadline
from weightbus.errors import PeerLost, SourceError, TransferTimeout, TransportError, WeightBusError
from weightbus.header import Header
from weightbus.manifest import TensorSpec
from weightbus.plan import Plan, Segment, aligned, single_page
from weightbus.reactor import Reactor, log
from weightbus.resident import Pending, Tables
from weightbus.sources import Source

MAX_OPERATION_S = 86400.0  # libraries do not take infinity


@attrs.define(eq=False)
class Post:
    """One bucket on its way to one channel."""

    bucket: int
    slot: int
    region: Region
    nbytes: int
    digest: int
    plan_digest: int
    total: int


@attrs.define(eq=False)
class Channels:
    """What a sender keeps of one lane (or group) over refits."""

    lanes: tuple[str, ...]
    incarnations: tuple[str, ...]
    channel: Channel
    key: bytes


class Outbound:
    """One channel of one refit: bucket k waits for the credit of the bucket that last used its slot.

    Args:
        stall_timeout_s: a lane with something outstanding that has not moved for so long is given up.
        released: told that a lane's reader has released a bucket, where that is the end of its operation.
        header_ahead: called before posting where the backend cannot carry headers.
        deadline: of the refit; what is left of it bounds each operation.
        behind: lanes that get these buckets from a reader of this channel.
    """

    def __init__(
        self,
        refit: str,
        link: Channels,
        slots: int,
        capabilities: Capabilities,
        verify: bool,
        stall_timeout_s: float,
        released: Callable[[str, int], None],
        header_ahead: Callable[[str, int, int, bytes], None],
        deadline: Deadline,
        behind: tuple[str, ...] = (),
    ) -> None:
        self.refit, self.link, self.slots = refit, link, slots
        self._refit_id = bytes.fromhex(refit)
        self.behind, self._deadline = behind, deadline
        self._left: tuple[str, ...] = ()  # members of the group that others of it wait for in vain
        self._stall_s, self._released = stall_timeout_s, released
        self._moved_s = time.monotonic()
        self.lanes = set(link.lanes)
        self.works: dict[int, Work] = {}
        self.posted = 0
        self.error: WeightBusError | None = None
        self._shares = capabilities.shares_memory
        self._ahead = None if capabilities.header_with_bytes else header_ahead
        self._verify = verify
        self._queue: deque[Post] = deque()
        self._enqueued = 0
        self._credits: dict[str, set[int]] = {lane: set() for lane in link.lanes}

    def enqueue(self, post: Post) -> None:
        if self.lanes:
            self._queue.append(post)
            self._enqueued = post.bucket + 1

    def credit(self, lane: str, bucket: int) -> None:
        if lane in self._credits:
            self._credits[lane].add(bucket)
            self._moved_s = time.monotonic()

    def credited(self, bucket: int) -> bool:
        """All living readers have released `bucket`."""
        return bucket < 0 or all(bucket in self._credits[lane] for lane in self.lanes)

    def drop(self, lanes: Sequence[str]) -> None:
        """These readers have left; without readers nothing more is posted."""
        left = self.lanes.intersection(lanes)
        self.lanes -= left
        if not self.lanes:
            self._queue.clear()
        elif left:
            self._left = (*self._left, *left)

    def busy(self, bucket: int) -> bool:
        """The sender's memory of `bucket` is still needed here. From any thread."""
        queued = self.posted <= bucket < self._enqueued and self.error is None and bool(self.lanes)
        return queued or bucket in self.works

    def held_by_leavers(self, bucket: int) -> bool:
        """A reader that was dropped, or an operation towards it, may still touch the memory of `bucket`."""
        work = self.works.get(bucket)
        return len(self.lanes) < len(self.link.lanes) and work is not None and work.state is State.PENDING

    @property
    def moves(self) -> bool:
        """Bytes go over a wire; else readers look into the sender's memory."""
        return not self._shares

    @property
    def idle(self) -> bool:
        """No operation of this refit moves bytes any more."""
        return self._shares or not self.works

    def tick(self) -> bool:
        moved = False
        for bucket, work in tuple(self.works.items()):
            state = work.state
            if state is not State.PENDING:
                del self.works[bucket]
                moved = True
                if state is State.ERROR and self.error is None:
                    self._fail(work.error, bucket)
                elif self._shares:
                    for lane in self.lanes:
                        self.credit(lane, bucket)
                        self._released(lane, bucket)
        if self.error is None and self.link.channel.error is not None and self.lanes:
            self._fail(self.link.channel.error, None)
            moved = True
        if self._left and self.error is None and (self._queue or self.works):
            self._fail(self._broken_group(), None)
            moved = True
        while self._queue and self.error is None and self.credited(self._queue[0].bucket - self.slots):
            self._post(self._queue.popleft())
            moved = True
        if moved:
            self._moved_s = time.monotonic()
        elif self._outstanding and self.error is None and time.monotonic() - self._moved_s > self._stall_s:
            self._fail(
                TransferTimeout(
                    f"{'+'.join(self._behind())} made no progress for {self._stall_s:g} s",
                    advice="Its recv must be running; raise stall_timeout if one load call takes longer.",
                ),
                None,
            )
            moved = True
        return moved

    def _behind(self) -> list[str]:
        """The readers that hold up the others."""
        return sorted(lane for lane in self.lanes if self.posted - 1 not in self._credits[lane])

    def _broken_group(self) -> PeerLost:
        names = ", ".join(lane.partition("->")[2] for lane in self._left)
        return PeerLost(
            f"{names} left the group, and a collective needs all of its members",
            peer=names,
            advice="Send again: the next refit regroups those that are alive.",
        )

    @property
    def _outstanding(self) -> bool:
        """Something was posted that its readers have not released."""
        return bool(self.lanes) and self.posted > 0 and not self.credited(self.posted - 1)

    def _post(self, post: Post) -> None:
        header = Header(
            lane_key=self.link.key,
            refit_id=self._refit_id,
            plan_digest=post.plan_digest,
            bucket=post.bucket,
            total=post.total,
            used_bytes=post.nbytes,
            digest=post.digest,
            verified=self._verify,
        ).pack()
        slot = post.bucket % self.slots
        try:
            if self._ahead is not None:
                for lane in self.lanes:
                    self._ahead(lane, slot, post.nbytes, header)
            self.link.channel.operation_timeout_s = max(0.001, self._deadline.remaining_s(MAX_OPERATION_S))
            work = self.link.channel.post_send(post.region, post.nbytes, header, slot)
            if work.state is not State.DONE:
                self.works[post.bucket] = work
            self.posted = post.bucket + 1
        except WeightBusError as exc:
            self._fail(exc, post.bucket)

    def _fail(self, cause: BaseException | None, bucket: int | None) -> None:
        lane = "+".join(self.link.lanes)
        if isinstance(cause, WeightBusError):
            cause.lane, cause.phase = cause.lane or lane, cause.phase or "stream"
            cause.bucket = bucket if cause.bucket is None else cause.bucket
            self.error = cause
        else:
            self.error = PeerLost(f"the transfer ended in error: {cause}", lane=lane, bucket=bucket, phase="stream")
            self.error.__cause__ = cause
        self._queue.clear()


@attrs.frozen
class _Slot:
    """Sender's slot i: which bucket is in it."""

    bucket: int = -1


def _let_go(outbounds: Sequence[Outbound], bucket: int) -> bool:
    return not any(o.held_by_leavers(bucket) for o in outbounds)


@attrs.frozen
class PageOut:
    """What a paged bucket holds, for the readers."""

    bucket: int
    first_tensor: int
    specs: tuple[TensorSpec, ...]
    segments: tuple[Segment, ...]


def pack_resident(tables: Tables, plan: Plan, index: int, target: torch.Tensor, verify: bool) -> Packed:
    """Fill bucket `index` in `target` from the tensors that `tables` fit."""
    pieces = tables.bucket(plan, index, target)
    return Packed(pieces.used_bytes, pieces.gather(digest=verify))


@attrs.frozen(eq=False)
class Early:
    """The first bucket, packed while the offer was being answered, from the tensors that `Tables.fit` has seen last."""

    plan: Plan
    region: Region
    packed: Packed
    seconds: float


class SendRun:
    """One refit on one sender: the slots, the channels, and the loop that fills them.

    Args:
        plan: None when paged.
        on_page: called on the bus thread before a paged bucket is posted.
        pace: on a sender without a lane: how many buckets the slowest lane has released.
    """

    def __init__(
        self,
        refit: str,
        reactor: Reactor,
        pool: SlotPool,
        outbounds: Sequence[Outbound],
        plan: Plan | None,
        bucket_bytes: int,
        verify: bool,
        deadline: Deadline,
        on_page: Callable[[PageOut], None],
        tables: Tables,
    ) -> None:
        self.refit, self.plan, self.outbounds = refit, plan, list(outbounds)
        self.deadline = deadline
        self.buckets = 0
        self.bytes = 0
        self.ended = False
        self.go = False  # packing may begin before; posting not
        self.pace = 0
        self.error: BaseException | None = None
        self.crossed = False  # something was packed from another device than the buckets'
        self.seconds = dict.fromkeys(("export", "pack", "credit_wait"), 0.0)
        if any(outbound.moves for outbound in self.outbounds):
            self.seconds["wire"] = 0.0
        self._on_wire_s: float | None = None  # up to when `wire` was counted, while something is under way
        self.manifest_out: list[TensorSpec] = []
        self._reactor, self._pool = reactor, pool
        self._verify, self._on_page = verify, on_page
        self._capacity = bucket_bytes // 16 * 16
        self._tables = tables
        self._slots = [_Slot() for _ in range(pool.count)]
        self._waiting: deque[tuple[Post, Pending, PageOut | None]] = deque()
        self._enqueued = 0
        self.changed = False  # a message came in since the last tick

    # ---- the caller's thread

    def stream(self, source: Source, early: Early | None = None) -> None:
        """Pack everything; returns when the last bucket is handed over, or the refit has ended and the source is empty.

        Raises:
            SourceError: the source raised or did not yield what its manifest says. The rest was drained.
        """
        try:
            if self.plan is not None:
                self._stream_plan(self.plan, source, early)
            else:
                self._stream_paged(source)
        except WeightBusError as exc:
            self.error = exc
            source.drain()
            raise
        except Exception as exc:
            self.error = SourceError(
                f"the source raised {type(exc).__name__}: {exc}",
                phase="export",
                bucket=self.buckets,
                advice="See the cause; engines keep or discard as their failure row says.",
            )
            source.drain()
            raise self.error from exc

    def _timed(self, tensors: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        while True:
            start = time.perf_counter()
            try:
                tensor = next(tensors)
            except StopIteration:
                return
            finally:
                self.seconds["export"] += time.perf_counter() - start
            yield tensor

    def _stream_plan(self, plan: Plan, source: Source, early: Early | None) -> None:
        if early is not None and early.plan is plan and early.region is self._pool.regions[0]:
            self._stream_resident(plan, early)
            return
        device = self._pool.regions[0].tensor.device
        start = time.perf_counter()
        tensors = source.resident(plan.manifest)
        resident = tensors is not None and self._tables.fit(plan, tensors, device)
        self.seconds["export"] += time.perf_counter() - start
        if resident:
            self._stream_resident(plan, None)
        else:
            self._stream_each(plan, source)

    def _stream_resident(self, plan: Plan, early: Early | None) -> None:
        """One call a bucket: what lies where is known."""
        for index in range(len(plan.buckets)):
            target = self._acquire(index)
            if target is None:
                break
            start = time.perf_counter()
            if index == 0 and early is not None:
                packed, start = early.packed, start - early.seconds
            else:
                packed = pack_resident(self._tables, plan, index, target, self._verify)
            self.seconds["pack"] += time.perf_counter() - start
            self._hand_over(index, packed, plan.digest, len(plan.buckets))
        self.buckets = len(plan.buckets)  # also where nobody reads

    def _stream_each(self, plan: Plan, source: Source) -> None:
        placed = plan.placed
        packer: Packer | None = None
        current = -1
        for i, tensor in enumerate(self._timed(source.iterate(plan.manifest))):
            segments = placed[i]
            flat = plain_bytes(tensor) if len(segments) > 1 and not tensor.is_contiguous() else None
            for index, segment in segments:
                while current < index:
                    self._finish(current, packer, plan.digest, len(plan.buckets))
                    current += 1
                    packer = self._packer(current)
                if packer is not None:
                    start = time.perf_counter()
                    packer.put(segment, tensor, flat)
                    self.seconds["pack"] += time.perf_counter() - start
        while current < len(plan.buckets):
            self._finish(current, packer, plan.digest, len(plan.buckets))
            current += 1
            packer = self._packer(current) if current < len(plan.buckets) else None

    def _stream_paged(self, source: Source) -> None:
        packer = self._packer(0)
        specs: list[TensorSpec] = []
        segments: list[Segment] = []
        current = first = end = count = 0

        def flush() -> None:
            nonlocal packer, current, first, specs, segments, end
            page = PageOut(current, first, tuple(specs), tuple(segments))
            self._finish(current, packer, single_page(specs, first, segments), 0, page)
            current, first, specs, segments, end = current + 1, first + len(specs), [], [], 0
            packer = self._packer(current)

        for spec, tensor in source.iterate_paged():
            self.manifest_out.append(spec)
            if segments and end + spec.nbytes > self._capacity and aligned(spec.nbytes) <= self._capacity:
                flush()
            specs.append(spec)
            flat, offset = None, 0
            while True:
                if end >= self._capacity and offset < spec.nbytes:
                    flush()
                piece = min(spec.nbytes - offset, self._capacity - end)
                segment = Segment(count, offset, end, piece)
                if packer is not None:
                    flat = plain_bytes(tensor) if flat is None and piece < spec.nbytes else flat
                    packer.put(segment, tensor, flat)
                segments.append(segment)
                offset, end = offset + piece, aligned(end + piece)
                if offset >= spec.nbytes:
                    break
            count += 1
        if segments:
            flush()

    def _packer(self, bucket: int) -> Packer | None:
        target = self._acquire(bucket)
        return None if target is None else Packer(target, self._verify)

    def _acquire(self, bucket: int) -> torch.Tensor | None:
        """Wait until the slot of `bucket` may be written; None when nobody reads any more (drain only)."""
        start = time.perf_counter()
        slot = bucket % self._pool.count
        free = self._reactor.wait(lambda: self.ended or (self._free(slot) and self._in_pace(bucket)), self.deadline)
        self.seconds["credit_wait"] += time.perf_counter() - start
        if not free or self.ended or not any(o.lanes for o in self.outbounds):
            return None
        self._slots[slot] = _Slot(bucket)
        return self._pool.regions[slot].tensor

    def _in_pace(self, bucket: int) -> bool:
        return any(o.lanes for o in self.outbounds) or bucket < self.pace + 2 * self._pool.count

    def _free(self, index: int) -> bool:
        bucket = self._slots[index].bucket
        return bucket < 0 or (bucket < self._enqueued and not any(o.busy(bucket) for o in self.outbounds))

    def _finish(
        self, bucket: int, packer: Packer | None, plan_digest: int, total: int, page: PageOut | None = None
    ) -> None:
        if bucket < 0:
            return
        self.buckets = bucket + 1
        if packer is not None:
            start = time.perf_counter()
            packed = packer.finish()
            self.seconds["pack"] += time.perf_counter() - start
            self.crossed = self.crossed or packer.crossed
            self._hand_over(bucket, packed, plan_digest, total, page)

    def _hand_over(
        self, bucket: int, packed: Packed, plan_digest: int, total: int, page: PageOut | None = None
    ) -> None:
        self.bytes += packed.used_bytes
        slot = bucket % self._pool.count
        post = Post(bucket, slot, self._pool.regions[slot], packed.used_bytes, 0, plan_digest, total)
        self._waiting.append((post, packed.pending, page))
        self._reactor.turn()

    # ---- the bus thread

    def credit(self, lane: str, bucket: int) -> None:
        self.changed = True
        for outbound in self.outbounds:
            outbound.credit(lane, bucket)

    def tick(self) -> bool:
        moved, self.changed = self.changed, False
        while self.go and self._waiting and self._waiting[0][1].ready():
            post, pending, page = self._waiting.popleft()
            post.digest = pending.value()
            if page is not None:
                self._on_page(page)
            for outbound in self.outbounds:
                outbound.enqueue(post)
            self._enqueued = post.bucket + 1
            moved = True
        return (self._tick_wire() if "wire" in self.seconds else self._tick_outbounds()) or moved

    def _tick_outbounds(self) -> bool:
        moved = False
        for outbound in self.outbounds:
            moved |= outbound.tick()
        return moved

    def _tick_wire(self) -> bool:
        """Post and test; the time while any operation is under way, its posting included, is the wire's."""
        start = self._on_wire_s or time.perf_counter()
        posted = sum(outbound.posted for outbound in self.outbounds)
        moved = self._tick_outbounds()
        now = time.perf_counter()
        if self._on_wire_s or posted != sum(o.posted for o in self.outbounds):
            self.seconds["wire"] += now - start
        self._on_wire_s = now if any(outbound.works for outbound in self.outbounds) else None
        return moved

    def drop(self, lanes: Sequence[str]) -> None:
        """These readers are out; `settle` follows, so that the others go on."""
        for outbound in self.outbounds:
            leaving = outbound.lanes.intersection(lanes)
            if leaving:
                outbound.drop(tuple(leaving))

    @property
    def unsafe(self) -> bool:
        """A reader who has left may still touch some slot."""
        return any(o.held_by_leavers(slot.bucket) for slot in self._slots if slot.bucket >= 0 for o in self.outbounds)

    @property
    def polling(self) -> bool:
        return self.changed or (self.go and bool(self._waiting)) or any(o.moves and o.works for o in self.outbounds)

    def end(self) -> None:
        """The refit is over: nothing more is posted, the caller only drains."""
        self.ended = True
        self._waiting.clear()
        for outbound in self.outbounds:
            outbound.drop(tuple(outbound.lanes))

    def settle(self) -> None:
        """Put every slot aside that a reader who has left, or an operation towards one, may still touch."""
        for index, slot in enumerate(self._slots):
            bucket = slot.bucket
            if 0 <= bucket < self._enqueued:
                stuck = [o for o in self.outbounds if o.held_by_leavers(bucket)]
                if stuck:
                    try:
                        self._pool.replace(index, partial(_let_go, stuck, bucket))
                    except TransportError as exc:
                        log.warning("slot %d waits for a reader that has left: %s", index, exc)
                    else:
                        self._slots[index] = _Slot()
