"""The contract of an adapter: it hands verified tensors to one engine, and steps that engine through a refit.

Two sides, in one process or in several:

* `EngineDriver`: begin, finish, resume, abort; exactly one per engine, each step at most once per refit.
* `EngineLoader`: check and load; one per process that holds ranks of the engine.

Order of calls in one refit (driver side marked D, loader side L)::

    L.check -> D.begin -> L.load, L.load, ... -> D.finish -> D.resume           in place and staged alike
    L.check -> D.begin -> (raises) -> D.abort(loaded=False)                     nothing was loaded: undo, in reverse
    ... L.load -> (anything fails) -> L.abort, D.abort(loaded=True)             close the session, stay paused
    the next refit on an engine that is DIRTY, HELD or PAUSED: D.heal -> D.begin -> ...

`check` is pure over facts captured at construction and runs on the bus thread. Everything else runs in the thread that
called `recv` or `drive`. All raise `EngineError`; whatever else they raise is wrapped into it.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

import attrs
import torch

from weightbus.deadline import Deadline
from weightbus.manifest import Manifest

Batch = Sequence[tuple[str, torch.Tensor]]


class Outcome(enum.Enum):
    """What an engine holds after a refit of version v; the one list of them."""

    READY = "READY"  #: serves; the version says whether v or the one before
    PAUSED = "PAUSED"  #: holds v, finished, but could not be resumed
    HELD = "HELD"  #: v is loaded and verified on every rank, not finished: its coordinator was lost
    DIRTY = "DIRTY"  #: mixed weights; paused until the next full refit
    DEAD = "DEAD"  #: its process is gone
    BEHIND = "BEHIND"  #: skipped: it lacks the base version of a partial refit
    UNKNOWN = "UNKNOWN"  #: no report of its driver by the deadline; the next offer settles it


def _texts(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


def _rules(values: Iterable[GroupRule]) -> tuple[GroupRule, ...]:
    return tuple(values)


@attrs.frozen
class Fault:
    """One reason to refuse a manifest.

    Attributes:
        kind: missing, unexpected, duplicate, shape, dtype, group, memory, version, engine or rename.
        name: the tensor, or empty.
        detail: expected against offered, in words.
    """

    kind: str
    name: str
    detail: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.kind, repr(self.name) if self.name else "", self.detail) if part)


@attrs.frozen
class GroupRule:
    r"""Names that match `pattern` and expand `key` to the same text belong together.

    Attributes:
        pattern: a regular expression that must match the whole name.
        key: expansion template, such as ``r"\\1.qkv.\\3"``.
    """

    pattern: str
    key: str


@attrs.frozen(kw_only=True)
class GroupRules:
    """What a loader needs of the order of names. It travels in JOIN; the plan is the union over all members.

    Attributes:
        together: names of one key arrive in ONE `load` call.
        adjacent: names of one key follow each other where the source can be reordered (a module, a layer).
    """

    together: tuple[GroupRule, ...] = attrs.field(default=(), converter=_rules)
    adjacent: tuple[GroupRule, ...] = attrs.field(default=(), converter=_rules)


@attrs.frozen(kw_only=True)
class Refit:
    """What the driver is told of a refit.

    Attributes:
        refit_id: never reused.
        version: the caller's integer; the engine's label of it is ``str(version)``.
        partial: only some names change.
        staged: loaded from a verified copy.
        previous: the engine's state before; undo resumes only READY.
        tensors: how many tensors will be loaded; never 0; -1 while it is not known (paged).
        nbytes: their bytes; -1 likewise.
    """

    refit_id: str
    version: int
    partial: bool = False
    staged: bool = False
    previous: Outcome = Outcome.READY
    tensors: int = 0
    nbytes: int = 0

    @property
    def label(self) -> str:
        return str(self.version)


@attrs.frozen(kw_only=True)
class LoadResult:
    """What one `load` call did.

    Attributes:
        applied: names written (aliases included).
        skipped: names the engine legitimately does not hold, each reported to the user.
    """

    applied: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    skipped: tuple[str, ...] = attrs.field(default=(), converter=_texts)


class EngineLoader(ABC):
    """Rank side. One object serves `ranks` of its engine, in one process."""

    def rules(self) -> GroupRules:
        """Names that belong together. Read once, at join."""
        return GroupRules()

    @abstractmethod
    def check(self, manifests: Sequence[Manifest], *, partial: bool) -> list[Fault]:
        """Every reason to refuse, before anything is touched; one manifest per rank served, receiver's names.

        Args:
            partial: True when names may be missing because they do not change.
        """

    @abstractmethod
    def load(self, batches: Sequence[Batch]) -> LoadResult:
        """Apply whole, verified tensors; ``batches[i]`` is for the i-th rank served, all with the same names in order.

        The tensors are borrowed until `load` returns (or views of the engine's memory bus): keep copies, never views.
        A tied tensor appears under each of its names, adjacent, sharing memory. On CUDA the tensors are ready on the
        current stream, and core waits for what `load` enqueued on it before the memory is used again.
        """

    def resident(self, manifest: Manifest) -> list[torch.Tensor] | None:
        """Memory of the engine that core may write itself in place of `load`, one tensor per spec of `manifest`.

        Called in the caller's thread before the first byte of a refit, and maybe before `begin`; the tensors are
        contiguous, of the spec's shape and dtype, and stay where they are until the refit ends. None (the default):
        `load` is called. What core writes counts as loaded: a failure after it is the row "in place" of the failure table.
        """
        return None

    def abort(self, reason: str) -> None:  # noqa: B027 (optional step)
        """The refit failed after `load` was called; drop whatever is kept of it."""

    def close(self) -> None:  # noqa: B027 (optional step)
        """The bus closes. Idempotent."""


class EngineDriver(ABC):
    """Driver side: the engine's steps, each at most once per refit.

    Attributes:
        instant: True: all steps return at once and never wait for anything, so core runs them on its own thread.
    """

    instant: ClassVar[bool] = False

    @abstractmethod
    def begin(self, refit: Refit, deadline: Deadline) -> None:
        """Pause, flush, open the update session. If it raises, `abort(loaded=False)` follows."""

    def poll(self) -> None:  # noqa: B027 (optional step)
        """Raise what a step that works on in the background has failed with. Called on the bus thread, often, between
        `begin` and the decision; it returns at once."""

    @abstractmethod
    def finish(self, version: int, deadline: Deadline) -> None:
        """Close the update session, flush, publish ``str(version)``. Every rank has loaded everything."""

    @abstractmethod
    def resume(self, deadline: Deadline) -> None:
        """Serve again."""

    @abstractmethod
    def abort(self, reason: str, *, loaded: bool, resume: bool, deadline: Deadline) -> None:
        """The refit failed.

        Args:
            loaded: False: undo `begin` in reverse, as far as it came; True: close the session, stay paused.
            resume: with ``loaded=False``: serve again (the engine was READY before).
        """

    def heal(self, deadline: Deadline) -> None:  # noqa: B027 (optional step)
        """Before `begin` on an engine that is DIRTY, HELD or PAUSED: take over what a former refit left open."""

    def close(self) -> None:  # noqa: B027 (optional step)
        """The bus closes. Idempotent."""


class StepFreeDriver(EngineDriver):
    """For what serves nobody by itself (a module, a raw stream): every step succeeds at once."""

    instant = True

    def begin(self, refit: Refit, deadline: Deadline) -> None:
        pass

    def finish(self, version: int, deadline: Deadline) -> None:
        pass

    def resume(self, deadline: Deadline) -> None:
        pass

    def abort(self, reason: str, *, loaded: bool, resume: bool, deadline: Deadline) -> None:
        pass


class Adapter(ABC):
    """What an entry point of group ``weightbus.adapters`` names.

    ``__init__(**options)`` takes `adapter_options`, refuses bad ones (`ConfigError`, all at once), and may talk to the
    engine to learn its facts.
    """

    name: ClassVar[str]
    steps_engine: ClassVar[bool] = True  #: False: of ranks only; the engine is complete once a `WeightBus.driver` joins

    @abstractmethod
    def driver(self) -> EngineDriver:
        """The driver side; called at most once, and never where `steps_engine` is False."""

    @abstractmethod
    def loader(self, ranks: Sequence[int], device: torch.device | None) -> EngineLoader:
        """The loader for `ranks` of the engine in this process; called at most once.

        Args:
            device: where the batches will be; None: the adapter says by its loader's `device`.
        """

    @property
    def device(self) -> torch.device:
        """Where batches should be by default."""
        return torch.device("cpu")
