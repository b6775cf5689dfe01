"""Filling a bucket and reading one: bytes in, views out. Layout comes from the plan, never from here."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import attrs
import torch

from weightbus import digest as digests
from weightbus import gpu
from weightbus.digest import LEAF_BYTES
from weightbus.host import CACHED_BYTES, Done
from weightbus.manifest import TensorSpec
from weightbus.plan import Plan, Segment
from weightbus.resident import Pending

POISON = 0xA5


@attrs.frozen
class Packed:
    """A bucket that is full, or will be once `pending.ready()`; then `pending.value()` is its digest."""

    used_bytes: int
    pending: Pending


def plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`'s row-major bytes as ``[nbytes]`` uint8; a copy only where memory is strided or lazily conjugated."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


class Packer:
    """Fills one bucket by rising offset from tensors that are valid only while they are put (see `resident` for others).

    Everything is copied at `put`, on CUDA on the caller's current stream; host memory is digested on the way.

    Args:
        target: ``[capacity]`` uint8, the bucket's memory; written by `put` and until the end is `ready`.
        verify: compute the digest.

    Attributes:
        crossed: something was copied from another device.
    """

    def __init__(self, target: torch.Tensor, verify: bool) -> None:
        self._target = target
        self._verify = verify
        self.crossed = False
        self._host = target.device.type == "cpu"
        self._base = target.data_ptr()
        self._bytes = digests.tensor_bytes_view(target) if self._host else memoryview(b"")
        self._end = 0
        self._leaves: list[bytes] = []
        self._hashed = 0  # leaves

    def put(self, segment: Segment, tensor: torch.Tensor, source: torch.Tensor | None = None) -> None:
        """Copy one segment. `source` is `plain_bytes(tensor)` where the caller has it already."""
        if source is None and (not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()):
            source = plain_bytes(tensor)
        if self._host and tensor.device.type == "cpu":
            address = (tensor if source is None else source).data_ptr() + segment.tensor_offset
            self._copy_host(segment, address)
            return
        self._end = segment.offset + segment.nbytes
        source = plain_bytes(tensor) if source is None else source
        self.crossed = self.crossed or source.device != self._target.device
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
            return Packed(
                used, gpu.digest_async(self._target, used) if self._verify else gpu.after(self._target.device)
            )
        value = 0
        if self._verify:
            last = digests.num_leaves(used)
            if last > self._hashed:
                self._leaves.append(digests.leaf_digests(self._bytes, self._hashed, last, used))
            value = digests.root(b"".join(self._leaves), used)
        return Packed(used, Done(value))


def view_of(spec: TensorSpec, memory: torch.Tensor, offset: int) -> torch.Tensor:
    """`spec`'s tensor as a view of uint8 `memory` from `offset` (a multiple of 16)."""
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=spec.torch_dtype, device=memory.device)
    return memory[offset : offset + spec.nbytes].view(spec.torch_dtype).view(spec.shape)


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
        for i in plan.deliveries[index]:
            spec = plan.manifest.tensors[i]
            if i in plan.assembled and spec.nbytes:
                tensor = view_of(spec, self._assembly.pop(i), 0)
            else:
                tensor = view_of(spec, memory, at.get(i, 0))
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
