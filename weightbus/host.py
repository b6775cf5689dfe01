"""Host memory: copy many pieces, and digest each part of the bucket while it is in the core's cache.

The counterpart of `weightbus.gpu` for buckets on the CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import attrs
import torch

from weightbus.digest import LEAF_BYTES, leaf_digests, num_leaves, root, tensor_bytes_view

CACHED_BYTES = 512 << 10  # a multiple of the leaf that stays in a core's cache between copy and digest

_Copies = list[tuple[int, int, int]]  # (address in the bucket, address outside, length)


@attrs.frozen
class Done:
    """A digest that is there at once; see `gpu.Pending`."""

    _value: int

    def ready(self) -> bool:
        return True

    def value(self) -> int:
        return self._value


class Pieces:
    """The segments of one bucket and where each lies outside it; made once, used for every refit of a plan.

    Args:
        bucket: ``[capacity]`` uint8 on the CPU.
        pieces: (offset in the bucket, address outside, length), by rising offset.
    """

    def __init__(self, bucket: torch.Tensor, pieces: Sequence[tuple[int, int, int]]) -> None:
        self.used_bytes = pieces[-1][0] + pieces[-1][2] if pieces else 0
        self._bytes = tensor_bytes_view(bucket)
        self._parts = _parts(bucket.data_ptr(), pieces, self.used_bytes)

    def gather(self, *, digest: bool) -> Done:
        """Fill the bucket from outside."""
        move, leaves = ctypes.memmove, []
        for first, last, end, copies in self._parts:
            for inside, outside, nbytes in copies:
                move(inside, outside, nbytes)
            if digest:
                leaves.append(leaf_digests(self._bytes, first, last, end))
        return Done(root(b"".join(leaves), self.used_bytes) if digest else 0)

    def scatter(self, *, digest: bool) -> Done:
        """Write the bucket's pieces to their places outside."""
        move, leaves = ctypes.memmove, []
        for first, last, end, copies in self._parts:
            for inside, outside, nbytes in copies:
                move(outside, inside, nbytes)
            if digest:
                leaves.append(leaf_digests(self._bytes, first, last, end))
        return Done(root(b"".join(leaves), self.used_bytes) if digest else 0)


def _parts(base: int, pieces: Sequence[tuple[int, int, int]], used: int) -> list[tuple[int, int, int, _Copies]]:
    """The copies of each `CACHED_BYTES` of the bucket: (first leaf, leaf after the last, end in bytes, copies)."""
    parts: list[tuple[int, int, int, _Copies]] = []
    copies: _Copies = []
    start = 0

    def close(end: int) -> None:
        nonlocal copies, start
        parts.append((start // LEAF_BYTES, num_leaves(end), end, copies))
        copies, start = [], end

    for offset, address, nbytes in pieces:
        while nbytes:
            while offset >= start + CACHED_BYTES:
                close(start + CACHED_BYTES)
            step = min(nbytes, start + CACHED_BYTES - offset)
            copies.append((base + offset, address, step))
            offset, address, nbytes = offset + step, address + step, nbytes - step
    while used > start:
        close(min(used, start + CACHED_BYTES))
    return parts


@attrs.frozen
class PieceDigest:
    """The digest of pieces where they lie, as if packed into one bucket with zeros between them; made when asked for."""

    _pieces: Sequence[tuple[int, int, int]]

    def ready(self) -> bool:
        return True

    def value(self) -> int:
        return _pieces_digest(self._pieces)


def _pieces_digest(pieces: Sequence[tuple[int, int, int]]) -> int:
    used = pieces[-1][0] + pieces[-1][2] if pieces else 0
    buffer = torch.zeros(CACHED_BYTES, dtype=torch.uint8)
    view, base = tensor_bytes_view(buffer), buffer.data_ptr()
    leaves = []
    for first, last, end, copies in _parts(0, pieces, used):
        start = first * LEAF_BYTES
        buffer.zero_()
        for offset, address, nbytes in copies:
            ctypes.memmove(base + offset - start, address, nbytes)
        leaves.append(leaf_digests(view, 0, last - first, end - start))
    return root(b"".join(leaves), used)
