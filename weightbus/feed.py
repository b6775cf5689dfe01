"""From landed buckets to load calls, in the caller's thread.

Three ways, chosen once per refit: views handed to `EngineLoader.load`; whole tensors aligned by name over ranks where the
stream is paged; and, on CUDA, one kernel that writes a bucket into the engine's resident memory while it digests it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from weightbus.adapter import EngineLoader, LoadResult
from weightbus.align import Aligner
from weightbus.bucket import view_of
from weightbus.control import messages as m
from weightbus.deadline import Deadline
from weightbus.errors import RemoteProtocolError, WeightBusError
from weightbus.lane import InboundLane, Landed, compare, verify
from weightbus.manifest import Manifest, TensorSpec
from weightbus.names import NameRule, rename

Step = list[tuple[InboundLane, Landed]]  # what one load call takes: one bucket per lane (planned), or one (paged)
Named = list[tuple[str, torch.Tensor]]


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
    touched: bool = False
    verified: bool = False
    loaded: bool = False
    applied: set[str] = attrs.field(factory=set)
    skipped: list[str] = attrs.field(factory=list)
    seconds: dict[str, float] = attrs.field(factory=lambda: dict.fromkeys(("verify", "load", "wait"), 0.0))
    buckets: int = 0
    bytes: int = 0
    tensors: int = 0


class PagedUnpacker:
    """Views of paged buckets: specs come page by page, whole tensors go out in order."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self._partial: tuple[int, torch.Tensor, int] | None = None

    def batch(
        self, page: m.Page, memory: torch.Tensor, names: Callable[[TensorSpec], tuple[str, ...]]
    ) -> list[tuple[str, torch.Tensor]]:
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


@attrs.frozen
class Spent:
    """A bucket whose tensors were handed on.

    Attributes:
        ready: True once the device has read it.
        check: raises DigestMismatch; called when ready, where the digest was made together with the load.
    """

    lane: InboundLane
    landed: Landed
    ready: Callable[[], bool]
    check: Callable[[], None]


def _nothing() -> None:
    pass


def _true() -> bool:
    return True


class Scatter:
    """Tables to write one lane's buckets into resident memory; kept while plan, slots and addresses stay."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._tables: dict[tuple[int, int, int], Any] = {}

    def clear(self) -> None:
        self._tables.clear()

    def target(self, tensors: Sequence[torch.Tensor]) -> None:
        addresses = [t.data_ptr() for t in tensors]
        if addresses != self._addresses:
            self._addresses = addresses
            self._tables.clear()

    def write(self, lane: InboundLane, landed: Landed, digest: bool) -> Any:
        """Write one bucket, on the current stream; the pending digest, if one is made."""
        from weightbus import gpu  # CuPy, only where there are CUDA buckets

        if lane.plan is None:
            raise RemoteProtocolError("only planned buckets are scattered", lane=lane.id)
        key = (lane.plan.digest, landed.index, landed.memory.data_ptr())
        if key not in self._tables:
            segments = lane.plan.buckets[landed.index].segments
            pieces = [(s.offset, self._addresses[s.tensor] + s.tensor_offset, s.nbytes) for s in segments]
            self._tables[key] = gpu.Pieces.of(landed.memory, pieces)
        return self._tables[key].scatter(digest=digest)


class Feed:
    """Turns the steps of one refit into load calls.

    Args:
        names: this receiver's rename rules.
        scatter: the lane's tables, where core may write resident memory itself.
    """

    def __init__(
        self,
        lanes: Sequence[InboundLane],
        run: RankRun,
        loader: EngineLoader,
        names: Sequence[NameRule],
        renamed: Manifest | None,
        scatter: Scatter,
    ) -> None:
        self._run, self._loader, self._names = run, loader, names
        self.planned = all(lane.plan is not None for lane in lanes)
        self._lanes = lanes
        self._aligner = None if self.planned else Aligner([lane.rank for lane in lanes])
        self._paged = {lane.rank: PagedUnpacker() for lane in lanes}
        self._scatter, self._renamed = scatter, renamed
        self._resident: bool | None = None
        for lane in lanes:
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

    def load(self, step: Step, *, check: bool) -> list[Spent]:
        """Verify (where `check`) and load one step; the buckets that are used up by it."""
        start = time.perf_counter()
        try:
            if self._use_resident(step):
                return [self._write(lane, landed, check) for lane, landed in step]
            if check:
                for lane, landed in step:
                    verify(landed, landed.memory, lane.id)
        finally:
            self._run.seconds["verify"] += time.perf_counter() - start
        start = time.perf_counter()
        spent = self._plain(step) if self.planned else self._align(step)
        self._run.seconds["load"] += time.perf_counter() - start
        ready = _event() if any(landed.memory.is_cuda for _, landed in step) else _true
        return [Spent(lane, landed, ready, _nothing) for lane, landed in spent]

    def _use_resident(self, step: Step) -> bool:
        if self._resident is None:
            cuda = len(self._lanes) == 1 and self._renamed is not None and all(x.memory.is_cuda for _, x in step)
            tensors = self._loader.resident(self._renamed) if cuda and self._renamed is not None else None
            device = step[0][1].memory.device
            self._resident = tensors is not None and all(t.device == device for t in tensors)
            if self._resident and tensors is not None:
                self._scatter.target(tensors)
        return self._resident

    def _write(self, lane: InboundLane, landed: Landed, check: bool) -> Spent:
        self._run.touched = True
        pending = self._scatter.write(lane, landed, check and landed.header.verified)
        if self._renamed is not None and lane.plan is not None:
            done = (i for unit in lane.plan.deliveries[landed.index] for i in unit.tensors)
            self._run.applied.update(name for i in done for name in self._renamed.tensors[i].names)
        if pending is None:
            return Spent(lane, landed, _event(), _nothing)
        return Spent(lane, landed, pending.ready, lambda: compare(landed, pending.value(), lane.id))

    def _plain(self, step: Step) -> Step:
        self._call([lane.unpacker.batch(x.index, x.memory) for lane, x in step if lane.unpacker is not None])
        return step

    def _call(self, batches: Sequence[Named]) -> None:
        if batches and batches[0]:
            self._run.touched = True
            result: LoadResult = self._loader.load(batches)
            self._run.applied.update(result.applied)
            self._run.applied.update(result.skipped)
            self._run.skipped.extend(result.skipped)

    def _align(self, step: Step) -> Step:
        aligner = self._aligner
        if aligner is None:
            return []
        for lane, landed in step:
            batch = self._paged[lane.rank].batch(lane.pages[landed.index], landed.memory[: landed.nbytes], self._local)
            aligner.feed(lane.rank, batch, (lane, landed))
        spent: Step = []
        while (pulled := aligner.pull()) is not None:
            batches, tokens = pulled
            self._call([list(b) for b in batches])
            spent.extend(tokens)
        return spent

    def _local(self, spec: TensorSpec) -> tuple[str, ...]:
        """This receiver's names of a paged tensor."""
        return tuple(name for s in rename(Manifest([spec]), self._names)[0] for name in s.names)

    def close(self) -> None:
        """Every lane has ended; raises where their streams end differently."""
        if self._aligner is not None:
            for lane in self._lanes:
                self._aligner.end(lane.rank)
            self._aligner.pull()


def current_event(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """True once what the current stream has enqueued on the tensors' device so far has ended."""
    cuda = next((t.device for t in tensors if t.is_cuda), None)
    if cuda is None:
        return _true
    with torch.cuda.device(cuda):
        return _event()


def _event() -> Callable[[], bool]:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.query
