"""Filling a bucket and reading one: bytes in, views out. Layout comes from the plan, never from here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from weightbus import digest as digests
from weightbus.digest import LEAF_BYTES
from weightbus.manifest import TensorSpec
from weightbus.plan import Plan, Segment

CACHED_BYTES = 512 << 10  # copied, then digested while still in the core's cache
POISON = 0xA5


@attrs.frozen(kw_only=True)
class Packed:
    """A bucket that is full, or will be once `ready()`.

    Attributes:
        used_bytes: bytes to send.
        ready: True once the device has finished packing; host buckets are ready at once.
        digest: call it when ready.
    """

    used_bytes: int
    ready: Callable[[], bool]
    digest: Callable[[], int]


def plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`'s row-major bytes as ``[nbytes]`` uint8; a copy only where memory is strided or lazily conjugated."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


GatherTables = dict[tuple[int, int], tuple[list[tuple[int, int, int]], Any]]


class Packer:
    """Fills one bucket by rising offset, digesting as it goes.

    A host bucket is copied at `put`. On CUDA pieces of the bucket's own device are gathered in one launch at `finish`,
    on the caller's current stream: their memory must stay until then.

    Args:
        target: ``[capacity]`` uint8, the bucket's memory; written by `put` and until `Packed.ready`.
        verify: compute the digest.
        tables: gather tables of earlier refits, by place; kept by the caller as long as the slots.
        place: key of this bucket in `tables`.
        at_once: copy at `put` on CUDA too, for sources that reuse their memory.
    """

    def __init__(
        self,
        target: torch.Tensor,
        verify: bool,
        tables: GatherTables | None = None,
        place: tuple[int, int] = (0, 0),
        at_once: bool = True,
    ) -> None:
        self._target = target
        self._verify = verify
        self._host = target.device.type == "cpu"
        self._base = target.data_ptr()
        self._bytes = digests.tensor_bytes_view(target) if self._host else memoryview(b"")
        self._end = 0
        self._leaves: list[bytes] = []
        self._hashed = 0  # leaves
        self._tables, self._place, self._at_once = tables, place, at_once
        self._pieces: list[tuple[int, int, int]] = []  # offset, address, length: gathered at `finish`
        self._kept: list[torch.Tensor] = []
        self._mixed = False  # some bytes were copied at `put`: a fused digest would not see them

    def put(self, segment: Segment, tensor: torch.Tensor, source: torch.Tensor | None = None) -> None:
        """Copy one segment. `source` is `plain_bytes(tensor)` where the caller has it already."""
        plain = source is None and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if not plain and source is None:
            source = plain_bytes(tensor)
        address = (tensor if source is None else source).data_ptr() + segment.tensor_offset
        if self._host and tensor.device.type == "cpu":
            self._copy_host(segment, address)
            return
        self._end = segment.offset + segment.nbytes
        if not self._at_once and tensor.device == self._target.device:
            self._pieces.append((segment.offset, address, segment.nbytes))
            self._kept.append(tensor if source is None else source)
            return
        self._mixed = True
        source = plain_bytes(tensor) if source is None else source
        piece = source[segment.tensor_offset : segment.tensor_offset + segment.nbytes]
        self._target[segment.offset : self._end].copy_(piece, non_blocking=not self._host)
        self._digest_to(self._end)

    def _copy_host(self, segment: Segment, source: int) -> None:
        target, left = self._base + segment.offset, segment.nbytes
        while left > 0:
            step = min(left, CACHED_BYTES)
            ctypes.memmove(target, source, step)
            target, source, left = target + step, source + step, left - step
            self._end = target - self._base
            if self._verify and self._end - self._hashed * LEAF_BYTES >= CACHED_BYTES:
                self._digest_to(self._end)
        self._end = segment.offset + segment.nbytes

    def _digest_to(self, end: int) -> None:
        """Digest the leaves that are whole below `end`."""
        last = end // LEAF_BYTES
        if self._verify and self._host and last > self._hashed:
            self._leaves.append(digests.leaf_digests(self._bytes, self._hashed, last, end))
            self._hashed = last

    def finish(self) -> Packed:
        """The bucket is full."""
        used = self._end
        if not self._host:
            return self._finish_device(used)
        value = 0
        if self._verify:
            last = -(-used // LEAF_BYTES)
            if last > self._hashed:
                self._leaves.append(digests.leaf_digests(self._bytes, self._hashed, last, used))
            value = digests.root(b"".join(self._leaves), used)
        return Packed(used_bytes=used, ready=lambda: True, digest=lambda: value)

    def _finish_device(self, used: int) -> Packed:
        from weightbus import gpu  # CuPy, only where there are CUDA buckets

        pending = None
        if self._pieces:
            tables = self._tables if self._tables is not None else {}
            known = tables.get(self._place)
            if known is None or known[0] != self._pieces:
                known = tables[self._place] = (self._pieces, gpu.Pieces.of(self._target, self._pieces))
            pending = known[1].gather(digest=self._verify and not self._mixed)
        if self._verify and pending is None:
            pending = gpu.digest_async(self._target, used)
        if pending is not None:
            return Packed(used_bytes=used, ready=pending.ready, digest=pending.value)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Packed(used_bytes=used, ready=event.query, digest=lambda: 0)


def view_of(spec: TensorSpec, memory: torch.Tensor, offset: int) -> torch.Tensor:
    """`spec`'s tensor as a view of uint8 `memory` from `offset` (a multiple of 16)."""
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=spec.torch_dtype, device=memory.device)
    return memory[offset : offset + spec.nbytes].view(spec.torch_dtype).view(spec.shape)


def warm_up(device: torch.device) -> None:
    """Compile the kernels of a CUDA device now."""
    from weightbus import gpu  # CuPy, only where there is CUDA memory

    gpu.warm_up(device)


def direct_pieces(plan: Plan, tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """(offset, address, length) of each tensor of a direct refit's one virtual bucket."""
    return [(s.offset, tensors[s.tensor].data_ptr(), s.nbytes) for s in plan.buckets[0].segments]


class DirectDigest:
    """The digest of tensors where they lie, as if packed into the plan's one bucket. Its tables are kept."""

    def __init__(self) -> None:
        self._known: tuple[list[tuple[int, int, int]], Any] = ([], None)

    def __call__(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> int:
        """Waits for the device, on the caller's current stream."""
        pieces = direct_pieces(plan, tensors)
        if tensors and tensors[0].is_cuda:
            from weightbus import gpu  # CuPy, only where there is CUDA memory

            if self._known[0] != pieces:
                self._known = (pieces, gpu.PieceDigest(pieces, tensors[0].device))
            return int(self._known[1].start().value())
        return _host_pieces_digest(pieces)


def _host_pieces_digest(pieces: Sequence[tuple[int, int, int]]) -> int:
    buffer = torch.zeros(CACHED_BYTES, dtype=torch.uint8)
    view, base = digests.tensor_bytes_view(buffer), buffer.data_ptr()
    used = pieces[-1][0] + pieces[-1][2] if pieces else 0
    leaves, at = [], 0
    for start in range(0, used, CACHED_BYTES):
        end = min(start + CACHED_BYTES, used)
        buffer.zero_()
        while at < len(pieces) and pieces[at][0] < end:
            offset, address, length = pieces[at]
            low, high = max(offset, start), min(offset + length, end)
            if high > low:
                ctypes.memmove(base + low - start, address + low - offset, high - low)
            if offset + length > end:
                break
            at += 1
        leaves.append(digests.leaf_digests(view, 0, digests.num_leaves(end - start), end - start))
    return digests.root(b"".join(leaves), used)


class Unpacker:
    """Turns landed buckets of one lane into named tensors.

    Args:
        plan: the lane's plan.
        names: the receiver's names of each tensor of the plan, aliases included.
    """

    def __init__(self, plan: Plan, names: Sequence[tuple[str, ...]]) -> None:
        self.plan = plan
        self._names = names
        self._views: dict[tuple[int, int], list[tuple[str, torch.Tensor]]] = {}
        self._assembly: dict[int, torch.Tensor] = {}

    def batch(self, index: int, memory: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """What bucket `index`, landed in `memory`, makes whole. Views of `memory` where that suffices.

        A tensor that came in pieces is a view of a buffer of its own, dropped with the batch.
        """
        plan = self.plan
        if not plan.assembled:
            key = (index, memory.data_ptr())
            batch = self._views.get(key)
            if batch is None:
                batch = self._views[key] = self._direct(index, memory)
            return batch
        self._collect(index, memory)
        at = {s.tensor: s.offset for s in plan.buckets[index].segments}
        batch = []
        for unit in plan.deliveries[index]:
            for i in unit.tensors:
                spec = plan.manifest.tensors[i]
                tensor = (
                    view_of(spec, memory, at[i])
                    if unit.direct
                    else view_of(spec, self._assembly.pop(i), 0)
                    if spec.nbytes
                    else view_of(spec, memory, 0)
                )
                batch.extend((name, tensor) for name in self._names[i])
        return batch

    def _direct(self, index: int, memory: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        specs = self.plan.manifest.tensors
        batch: list[tuple[str, torch.Tensor]] = []
        for s in self.plan.buckets[index].segments:
            tensor = view_of(specs[s.tensor], memory, s.offset)
            batch.extend((name, tensor) for name in self._names[s.tensor])
        return batch

    def _collect(self, index: int, memory: torch.Tensor) -> None:
        for s in self.plan.buckets[index].segments:
            if s.tensor in self.plan.assembled and s.nbytes:
                whole = self._assembly.get(s.tensor)
                if whole is None:
                    nbytes = self.plan.manifest.tensors[s.tensor].nbytes
                    whole = self._assembly[s.tensor] = torch.empty(nbytes, dtype=torch.uint8, device=memory.device)
                whole[s.tensor_offset : s.tensor_offset + s.nbytes].copy_(memory[s.offset : s.offset + s.nbytes])

    def reset(self) -> None:
        """Drop what a refit left half assembled."""
        self._assembly.clear()

    def forget(self) -> None:
        """Let go of all memory: the views too, which would keep slots and stage that are gone."""
        self._assembly.clear()
        self._views.clear()
