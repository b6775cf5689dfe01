"""From landed buckets to load calls, in the caller's thread.

Three ways, chosen once per refit: views handed to `EngineLoader.load`; whole tensors aligned by name over ranks where the
stream is paged; and a bucket written into the engine's resident memory and digested in one pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property

import attrs
import torch

from weightbus import gpu
from weightbus.adapter import EngineLoader, Fault, LoadResult
from weightbus.align import Aligner
from weightbus.bucket import view_of
from weightbus.control import messages as m
from weightbus.deadline import Deadline
from weightbus.errors import RemoteProtocolError, WeightBusError
from weightbus.lane import InboundLane, Landed, compare, verify
from weightbus.manifest import Manifest, TensorSpec
from weightbus.names import NameRule, rename
from weightbus.plan import Plan
from weightbus.resident import Tables

Step = list[tuple[InboundLane, Landed]]  # what one load call takes: one bucket per lane (planned), or one (paged)
Named = list[tuple[str, torch.Tensor]]


@attrs.frozen(eq=False, slots=False)
class Offered:
    """A plan and what this receiver calls its tensors.

    Attributes:
        manifest: the plan's, by this receiver's names.
        faults: names that its rules cannot give.
    """

    plan: Plan
    manifest: Manifest
    faults: tuple[Fault, ...]

    @cached_property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """Per bucket, all names that it makes whole, aliases included."""
        specs = self.manifest.tensors
        return tuple(tuple(n for i in here for n in specs[i].names) for here in self.plan.deliveries)


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
    limits: dict[str, float] = attrs.field(factory=dict)
    buckets: int = 0
    bytes: int = 0
    tensors: int = 0

    @property
    def over(self) -> bool:
        """Nothing more is to be waited for."""
        return self.aborted is not None or self.dropped


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
            if not 0 <= s.tensor < len(self.specs) or min(s.tensor_offset, s.offset, s.nbytes) < 0:
                raise RemoteProtocolError("a page names a place that cannot be", bucket=page.bucket)
            spec = self.specs[s.tensor]
            if s.offset + s.nbytes > memory.numel() or s.tensor_offset + s.nbytes > spec.nbytes:
                raise RemoteProtocolError("a page beyond its bucket", bucket=page.bucket)
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


class Feed:
    """Turns the steps of one refit into load calls.

    Args:
        names: this receiver's rename rules.
        tables: the lane's, where core may write resident memory itself.
    """

    def __init__(
        self,
        lanes: Sequence[InboundLane],
        run: RankRun,
        loader: EngineLoader,
        names: Sequence[NameRule],
        offered: Offered | None,
        tables: Tables,
    ) -> None:
        self._run, self._loader, self._names = run, loader, names
        self.planned = all(lane.plan is not None for lane in lanes)
        self._lanes = lanes
        self._aligner = None if self.planned else Aligner([lane.rank for lane in lanes])
        self._paged = {lane.rank: PagedUnpacker() for lane in lanes}
        self._tables, self._offered = tables, offered
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
        for lane, landed in step:
            lane.expect(landed)
        self.prepare(step[0][1].memory.device)
        return self._write(step, check) if self._resident else self._hand_on(step, check)

    def prepare(self, device: torch.device) -> None:
        """Find out whether buckets on `device` are written to the engine's memory by core itself."""
        if self._resident is None:
            self._resident = False
            if len(self._lanes) == 1 and self._offered is not None:
                tensors = self._loader.resident(self._offered.manifest)
                self._resident = tensors is not None and self._tables.fit(self._offered.plan, tensors, device)

    def _hand_on(self, step: Step, check: bool) -> list[Spent]:
        """Views of what was verified go to the loader."""
        start = time.perf_counter()
        if check:
            for lane, landed in step:
                verify(landed, landed.memory, lane.id)
            self._run.seconds["verify"] += time.perf_counter() - start
            start = time.perf_counter()
        used_up = self._plain(step) if self.planned else self._align(step)
        self._run.seconds["load"] += time.perf_counter() - start
        ready = current_event([landed.memory for _, landed in step])
        return [Spent(lane, landed, ready, _nothing) for lane, landed in used_up]

    def _write(self, step: Step, check: bool) -> list[Spent]:
        """Write a bucket to where it belongs and digest it in the same pass."""
        start = time.perf_counter()
        ((lane, landed),) = step
        offered = self._offered
        if offered is None:
            raise RemoteProtocolError("only planned buckets are written", lane=lane.id)
        digest = check and landed.header.verified
        if digest and not self._run.touched and not landed.memory.is_cuda:
            verify(landed, landed.memory, lane.id)  # before anything was loaded a bad bucket costs the engine nothing
            digest = False
        self._run.touched = True
        pending = self._tables.bucket(offered.plan, landed.index, landed.memory).scatter(digest=digest)
        self._run.applied.update(offered.names[landed.index])
        wrong = (lambda: compare(landed, pending.value(), lane.id)) if digest else _nothing
        self._run.seconds["load"] += time.perf_counter() - start
        return [Spent(lane, landed, pending.ready, wrong)]

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
    return _true if cuda is None else gpu.after(cuda).ready
