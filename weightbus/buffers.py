"""Slots: the N buckets of a sender or of a lane, kept over refits, and the quarantine of those that are not safe yet."""

from __future__ import annotations

from collections.abc import Callable

from weightbus.backend import Endpoint, Region
from weightbus.bucket import POISON
from weightbus.errors import ConfigError


class SlotPool:
    """N regions of one endpoint. Used on the bus thread.

    Args:
        count: number of slots, 2 or more for overlap.
        poison: fill released slots with 0xA5, so that a reader that kept a view reads garbage at once.
        limit_bytes: bound on everything allocated here, quarantine included; None for no bound.
    """

    def __init__(self, endpoint: Endpoint, count: int, poison: bool, limit_bytes: int | None) -> None:
        self.endpoint = endpoint
        self.count = count
        self.regions: list[Region] = []
        self._poison = poison
        self._limit = limit_bytes
        self._quarantine: list[tuple[Region, Callable[[], bool]]] = []

    @property
    def held_bytes(self) -> int:
        return sum(r.nbytes for r in self.regions) + sum(r.nbytes for r, _ in self._quarantine)

    def ensure(self, nbytes: int) -> None:
        """Have `count` slots of at least `nbytes`. No operation may be open on the present ones.

        Raises:
            ConfigError: over the bound. TransportError: the backend has no memory.
        """
        if self.regions and self.regions[0].nbytes >= nbytes:
            return
        self._check(nbytes * self.count)
        for region in self.regions:
            self.endpoint.free(region)
        self.regions = []
        for _ in range(self.count):
            region = self.endpoint.allocate(nbytes)
            self.regions.append(region)
            self.poison(len(self.regions) - 1)

    def _check(self, more: int) -> None:
        held = sum(r.nbytes for r, _ in self._quarantine)
        if self._limit is not None and held + more > self._limit:
            raise ConfigError(
                f"{self.count} buckets need {more} bytes ({held} more are in quarantine), the bound is {self._limit}",
                advice="Lower bucket_bytes or slots, or raise max_host_bytes / max_device_bytes.",
            )

    def poison(self, index: int) -> None:
        if self._poison:
            self.regions[index].tensor.fill_(POISON)

    def replace(self, index: int, safe: Callable[[], bool]) -> None:
        """Put slot `index` aside until `safe()`, and have fresh memory in its place, even beyond the bound: a reader that
        has stopped must not cost the others their refit.

        Raises:
            TransportError: the backend has no memory; the slot is as before.
        """
        old = self.regions[index]
        self.regions[index] = self.endpoint.allocate(old.nbytes)
        self._quarantine.append((old, safe))

    def forget(self) -> None:
        """Let go of all regions; the endpoint is closed."""
        self.regions, self._quarantine = [], []

    def sweep(self) -> bool:
        """Give back what has become safe."""
        kept = []
        for region, safe in self._quarantine:
            if safe():
                self.endpoint.free(region)
            else:
                kept.append((region, safe))
        moved = len(kept) != len(self._quarantine)
        self._quarantine = kept
        return moved
