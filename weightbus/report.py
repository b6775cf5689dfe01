"""What a refit did: bytes, seconds per phase, the outcome of every engine; and the events told while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import attrs

#: A phase is told as slow that moved so much, took so long, and reached less than this share of its limit. So wide that a
#: first refit on a busy machine is not told: it also makes memory resident, at about a tenth of a copy.
SLOW_BYTES = 64 << 20
SLOW_S = 1.0
SLOW_SHARE = 0.05

_RATED = ("pack", "wire", "verify", "load")
_MEASURABLE_S = 1e-6
_CAUSES = {
    "pack": "this process waits for a core, or packs many small or strided tensors: send contiguous ones",
    "wire": "the network is shared or loses packets, or another transport is used than when it connected",
    "verify": "this process waits for a core; verify='off' shows what it costs",
    "load": "the engine's load rules, or its process waits for a core: fewer, larger batches (bucket_bytes)",
}


@attrs.frozen(kw_only=True)
class RefitReport:
    """The account of one refit, from this process's side.

    The limit of a phase is what this machine reached when it was tried out (`calibration.copy_bytes_per_s` at set-up, the
    link at connect): pack and load are one copy each, verify is one read and is taken as a copy, direct load is one copy
    from the sender's memory; wire is what the link moved, divided by the links that share a sender. A copy between two
    devices has no limit, nor has a wire whose backend does not measure it. On CUDA pack and load are the time to enqueue
    the work, so that their shares may be above 100 %: there the total counts.

    Attributes:
        version: the caller's integer.
        bytes: payload bytes packed (sender) or received (receiver), padding included.
        tensors: tensors of the manifest.
        buckets: buckets of this side's lanes.
        total_s: wall seconds from entering the call to its end.
        seconds: phase to seconds. Sender: export, pack, credit_wait, wire (operations under way; not where readers look
            into the sender's memory). Receiver: wait, verify, load. Engine: begin, finish, pause. A sender has those of
            its slowest receiver and engine too. Phases overlap: they do not add up to `total_s`.
        limits: phase to bytes per second, for those that have a limit. A sender has its receivers' as they told them.
        outcomes: engine to outcome text; empty on a rank without a driver beside it.
        skipped: names that an engine legitimately does not hold.
    """

    version: int
    bytes: int = 0
    tensors: int = 0
    buckets: int = 0
    total_s: float = 0.0
    seconds: dict[str, float] = attrs.field(factory=dict)
    limits: dict[str, float] = attrs.field(factory=dict)
    outcomes: dict[str, str] = attrs.field(factory=dict)
    skipped: tuple[str, ...] = ()

    @property
    def slow(self) -> tuple[str, ...]:
        """Phases that ran far below their limit (`SLOW_SHARE`), in words, each with what is likely and what to do.

        Waiting for others (export, credit_wait, wait, an engine's steps) never counts. An empty tuple does not promise
        that all is well: nothing is said of phases without a limit, nor of what took less than `SLOW_S`.
        """
        if self.bytes < SLOW_BYTES:
            return ()
        return tuple(
            f"{phase}: {self.bytes / self.seconds[phase] / 1e9:.2f} GB/s for {self.seconds[phase]:.1f} s, "
            f"{share:.1%} of the {self.limits[phase] / 1e9:.2f} GB/s measured at set-up; likely: {_CAUSES[phase]}"
            for phase in _RATED
            if (share := self._share(phase)) is not None and share < SLOW_SHARE and self.seconds[phase] >= SLOW_S
        )

    def _share(self, phase: str) -> float | None:
        """Of its limit, what `phase` reached; None where either is unknown."""
        seconds, limit = self.seconds.get(phase, 0.0), self.limits.get(phase)
        return self.bytes / seconds / limit if limit and seconds > _MEASURABLE_S else None

    @property
    def limit_gbytes_per_s(self) -> float:
        """What the phases that have a limit would reach one after the other; 0 where none has.

        Where they overlap (two hosts, or a core for each) a refit may be faster. A receiver knows only its own phases.
        """
        limits = [self.limits[phase] for phase in _RATED if self._share(phase) is not None]
        return 1e-9 / sum(1 / limit for limit in limits) if limits else 0.0

    @property
    def gbytes_per_s(self) -> float:
        """10^9 payload bytes per second of the whole call."""
        return self.bytes / self.total_s / 1e9 if self.total_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        rates = {"gbytes_per_s": self.gbytes_per_s, "limit_gbytes_per_s": self.limit_gbytes_per_s}
        return {**attrs.asdict(self), **rates, "slow": self.slow}

    def __str__(self) -> str:
        head = (
            f"version {self.version}: {self.tensors} tensors, {self.bytes / 1e6:.1f} MB in {self.buckets} buckets, "
            f"{self.total_s * 1e3:.1f} ms, {self.gbytes_per_s:.2f} GB/s"
        )
        if self.limit_gbytes_per_s:
            head += f", {self.gbytes_per_s / self.limit_gbytes_per_s:.1%} of its limit"
        rows = [f"  {phase:<12} {s * 1e3:9.1f} ms{self._rate(phase)}" for phase, s in self.seconds.items()]
        ends = [f"  {engine:<12} {outcome}" for engine, outcome in self.outcomes.items()]
        return "\n".join([head, *rows, *ends, *(f"  slow: {text}" for text in self.slow)])

    def _rate(self, phase: str) -> str:
        seconds, share = self.seconds[phase], self._share(phase)
        if phase not in _RATED or seconds <= _MEASURABLE_S:
            return ""
        return f" {self.bytes / seconds / 1e9:8.2f} GB/s" + ("" if share is None else f" {share:7.1%}")


class SlowWarning:
    """Warns on logger ``weightbus`` of the first slow refit of one end, and again after one that was not."""

    def __init__(self) -> None:
        self._told = False

    def of(self, report: RefitReport, who: str) -> None:
        slow = report.slow
        if slow and not self._told:
            text = "; ".join(slow)
            logging.getLogger("weightbus").warning("%s: version %d was slow: %s", who, report.version, text)
        self._told = bool(slow)


@attrs.frozen(kw_only=True)
class Event:
    """One step, told to the `events` callback and to logger ``weightbus``, from the bus thread or its guest: return at once.

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
