"""Deadlines: made once from a timeout, handed down, never re-made."""

from __future__ import annotations

import math
import time

import attrs


@attrs.frozen
class Deadline:
    """A point in monotonic time.

    Attributes:
        at_s: seconds on ``time.monotonic``'s clock; infinity for none.
    """

    at_s: float

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline:
        """The deadline `timeout_s` seconds from now; None never ends."""
        return cls(math.inf if timeout_s is None else time.monotonic() + timeout_s)

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at_s

    def remaining_s(self, at_most: float = math.inf) -> float:
        """Seconds left, never negative, at most `at_most`."""
        return max(0.0, min(self.at_s - time.monotonic(), at_most))

    def min(self, other: Deadline) -> Deadline:
        return self if self.at_s <= other.at_s else other
