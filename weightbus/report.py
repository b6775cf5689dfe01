"""What a refit did: bytes, seconds per phase, the outcome of every engine; and the events told while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class RefitReport:
    """The account of one refit, from this process's side.

    Attributes:
        version: the caller's integer.
        bytes: payload bytes packed (sender) or received (receiver), padding included.
        tensors: tensors of the manifest.
        buckets: buckets of this side's lanes.
        total_s: wall seconds from entering the call to its end.
        seconds: phase to seconds. Sender: export, pack, credit_wait. Receiver: wait, verify, load. Engine: begin,
            finish, pause. Phases overlap: they do not add up to `total_s`.
        outcomes: engine to outcome text; empty on a rank without a driver beside it.
        skipped: names that an engine legitimately does not hold.
    """

    version: int
    bytes: int = 0
    tensors: int = 0
    buckets: int = 0
    total_s: float = 0.0
    seconds: dict[str, float] = attrs.field(factory=dict)
    outcomes: dict[str, str] = attrs.field(factory=dict)
    skipped: tuple[str, ...] = ()

    @property
    def gbytes_per_s(self) -> float:
        """10^9 payload bytes per second of the whole call."""
        return self.bytes / self.total_s / 1e9 if self.total_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**attrs.asdict(self), "gbytes_per_s": self.gbytes_per_s}

    def __str__(self) -> str:
        head = (
            f"version {self.version}: {self.tensors} tensors, {self.bytes / 1e6:.1f} MB in {self.buckets} buckets, "
            f"{self.total_s * 1e3:.1f} ms, {self.gbytes_per_s:.2f} GB/s"
        )
        rows = [
            f"  {phase:<12} {s * 1e3:9.1f} ms"
            + (f" {self.bytes / s / 1e9:8.2f} GB/s" if s > 1e-6 and phase in _RATED else "")
            for phase, s in self.seconds.items()
        ]
        ends = [f"  {engine:<12} {outcome}" for engine, outcome in self.outcomes.items()]
        return "\n".join([head, *rows, *ends])


_RATED = ("pack", "wire", "verify", "load")


@attrs.frozen(kw_only=True)
class Event:
    """One step, told to the `events` callback and to logger ``weightbus``, from the bus thread: return at once.

    Attributes:
        kind: joined, lost, started, bucket, ended.
        engine: the engine concerned, or empty.
        version: the version under way, or -1.
        done: buckets finished so far.
        total: buckets in all, 0 when unknown.
        text: in words.
    """

    kind: str
    engine: str = ""
    version: int = -1
    done: int = 0
    total: int = 0
    text: str = ""


EventHandler = Callable[[Event], None]


def guarded(events: EventHandler | None) -> EventHandler | None:
    """`events`, whose exceptions are logged: they must not end the bus thread."""
    if events is None:
        return None

    def tell(event: Event) -> None:
        try:
            events(event)
        except Exception:
            logging.getLogger("weightbus").exception("the events callback raised")

    return tell
