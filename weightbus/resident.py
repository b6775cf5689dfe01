"""Memory that stays where it is, a trainer's or an engine's: buckets are filled from it and written to it in one pass.

One table per bucket says what lies where; it is made once and serves while plan, slots and addresses stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from weightbus import gpu, host
from weightbus.plan import Plan


class Pending(Protocol):
    """A copy under way, with the bucket's digest where one was asked for."""

    def ready(self) -> bool:
        """True once the copy has ended."""

    def value(self) -> int:
        """The digest of the bucket's used bytes; 0 without one. Waits for the device if it is not ready."""


class Pieces(Protocol):
    """A bucket's table: `host.Pieces` or `gpu.Pieces`."""

    @property
    def used_bytes(self) -> int:
        """End of the last piece."""

    def gather(self, *, digest: bool) -> Pending:
        """Fill the bucket, on the caller's current stream."""

    def scatter(self, *, digest: bool) -> Pending:
        """Write what is in the bucket to its places, on the caller's current stream."""


class Tables:
    """The tables of one side. They hold addresses and slots, never the tensors outside."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._device: torch.device | None = None
        self._addresses: list[int] = []
        self._pieces: dict[int, tuple[int, Pieces]] = {}  # by bucket, with the slot's address
        self._digest: gpu.PieceDigest | None = None

    def fit(self, plan: Plan, tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
        """Be the tables of these tensors; False when some of them lie on another device than the buckets.

        Args:
            tensors: contiguous, one per spec of the plan's manifest, of its shape and dtype.
        """
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if plan is not self._plan or device != self._device or addresses != self._addresses:
            self.clear()
            if any(t.device != device for t in tensors):
                return False
            self._plan, self._device, self._addresses = plan, device, addresses
        return True

    def clear(self) -> None:
        """Let go of the slots."""
        self._plan, self._device, self._addresses = None, None, []
        self._pieces.clear()
        self._digest = None

    def bucket(self, plan: Plan, index: int, memory: torch.Tensor) -> Pieces:
        """The table of bucket `index` in `memory` (uint8, on the device of `fit`)."""
        known = self._pieces.get(index)
        if known is None or known[0] != memory.data_ptr():
            addresses = self._addresses
            segments = plan.buckets[index].segments
            pieces = [(s.offset, addresses[s.tensor] + s.tensor_offset, s.nbytes) for s in segments]
            known = self._pieces[index] = (memory.data_ptr(), _table(memory, pieces))
        return known[1]

    def digest(self, plan: Plan) -> Pending:
        """Digest the tensors where they lie, as if packed into the plan's one bucket (direct mode).

        On CUDA it is started on the caller's current stream.
        """
        pieces = [(s.offset, self._addresses[s.tensor], s.nbytes) for s in plan.buckets[0].segments]
        if self._device is None or self._device.type == "cpu":
            return host.PieceDigest(pieces)
        if self._digest is None:
            self._digest = gpu.PieceDigest(pieces, self._device)
        return self._digest.start()


def _table(memory: torch.Tensor, pieces: Sequence[tuple[int, int, int]]) -> Pieces:
    if memory.device.type == "cpu":
        return host.Pieces(memory, pieces)
    return gpu.Pieces.of(memory, pieces)
