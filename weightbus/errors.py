"""The one tree of errors. Each says what happened, where, and what to do.

WeightBusError
├── ConfigError (ValueError)
│   ├── UnknownPlugin          lists the known names
│   ├── AmbiguousPlugin        names both distributions
│   └── BackendUnavailable     says which extra to install, keeps the cause
├── AlignmentError             missing, unexpected and mismatched names, of all receivers
├── RefitError
│   ├── PartialRefitError      some engines are not on the new version; carries every outcome
│   ├── RefitAborted           ended by a peer, a deadline, a cancel or a fault of weightbus
│   ├── SourceError            the sender's source raised, or did not yield what its manifest says
│   ├── DigestMismatch         bytes that arrived are not the bytes that were sent
│   └── VersionError           a version that must not follow the one held
├── TransportError
│   ├── ConnectError
│   ├── TransferTimeout (TimeoutError)
│   ├── PeerLost               broken by the other side
│   ├── EndpointClosed         closed by this side
│   └── EndpointBusy           two users at once
├── ProtocolError
│   ├── LocalProtocolError     this side broke the rules
│   └── RemoteProtocolError    the other side did
└── EngineError                an engine refused or died; says what it holds now
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class WeightBusError(Exception):
    """Base of all errors of weightbus.

    Args:
        what: what happened, one sentence.
        peer: the other side's member name, such as ``"e0/1"`` (engine e0, rank 1) or ``"sender/0"``.
        lane: the lane, ``"sender/0->e0/1"``.
        bucket: index of the bucket in its refit.
        tensor: name of the tensor.
        phase: the step of the refit: offer, check, connect, begin, stream, complete, commit, finish, resume.
        advice: what to do, true for the configuration that raised.
    """

    def __init__(
        self,
        what: str,
        *,
        peer: str | None = None,
        lane: str | None = None,
        bucket: int | None = None,
        tensor: str | None = None,
        phase: str | None = None,
        advice: str | None = None,
    ) -> None:
        self.what = what
        self.peer = peer
        self.lane = lane
        self.bucket = bucket
        self.tensor = tensor
        self.phase = phase
        self.advice = advice
        super().__init__(what)

    def __str__(self) -> str:
        places = {
            "peer": self.peer,
            "lane": self.lane,
            "bucket": self.bucket,
            "tensor": self.tensor,
            "phase": self.phase,
        }
        where = ", ".join(f"{key} {value}" for key, value in places.items() if value is not None)
        text = f"{self.what} [{where}]" if where else self.what
        return f"{text} Advice: {self.advice}" if self.advice else text


class ConfigError(WeightBusError, ValueError):
    """A setting is wrong; nothing was touched."""


class UnknownPlugin(ConfigError):
    """No backend or adapter of this name is installed."""


class AmbiguousPlugin(ConfigError):
    """Two distributions offer a plugin of the same name."""


class BackendUnavailable(ConfigError):
    """A plugin is known but cannot be imported or cannot run here."""


class AlignmentError(WeightBusError):
    """What the sender offers is not what receivers hold; nothing was touched."""


class RefitError(WeightBusError):
    """A refit did not bring every engine to the new version."""


class PartialRefitError(RefitError):
    """Some engines are not on the new version.

    Attributes:
        outcomes: engine name to its outcome's text, for every engine of the refit.
    """

    def __init__(
        self,
        what: str,
        *,
        outcomes: Mapping[str, str] | None = None,
        phase: str | None = None,
        peer: str | None = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(what, phase=phase, peer=peer, advice=advice)
        self.outcomes = dict(outcomes or {})


class RefitAborted(RefitError):
    """The refit was ended by a peer, a deadline, a cancel or a fault of weightbus."""


class SourceError(RefitError):
    """The source raised, or did not yield what its manifest promised."""


class DigestMismatch(RefitError):
    """Bytes that arrived are not the bytes that were sent."""


class VersionError(RefitError):
    """The version offered must not follow the one that is held."""


class TransportError(WeightBusError):
    """Bytes could not be moved."""


class ConnectError(TransportError):
    """No connection to a peer could be made."""


class TransferTimeout(TransportError, TimeoutError):
    """A deadline passed."""


class PeerLost(TransportError):
    """The other side died, closed or stopped answering."""


class EndpointClosed(TransportError):
    """This side was closed before."""


class EndpointBusy(TransportError):
    """Two users of one object at once."""


class ProtocolError(WeightBusError):
    """The rules between two sides were broken."""


class LocalProtocolError(ProtocolError):
    """This side broke the rules."""


class RemoteProtocolError(ProtocolError):
    """The other side broke the rules."""


class EngineError(WeightBusError):
    """An engine refused a step or died.

    Attributes:
        dead: True when the engine's process is known to be gone.
    """

    def __init__(
        self,
        what: str,
        *,
        dead: bool = False,
        peer: str | None = None,
        tensor: str | None = None,
        phase: str | None = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(what, peer=peer, tensor=tensor, phase=phase, advice=advice)
        self.dead = dead


def named(
    exc: BaseException,
    kind: type[WeightBusError],
    doing: str,
    *,
    peer: str | None = None,
    phase: str | None = None,
    advice: str | None = None,
) -> WeightBusError:
    """`exc` itself where it is one of ours; else a `kind` that says what was being done, with `exc` as its cause."""
    if isinstance(exc, WeightBusError):
        return exc
    error = kind(f"{doing} raised {type(exc).__name__}: {exc}", peer=peer, phase=phase, advice=advice)
    error.__cause__ = exc
    return error


@contextmanager
def map_exceptions(
    table: Mapping[type[BaseException], type[WeightBusError]],
    *,
    peer: str | None = None,
    lane: str | None = None,
    phase: str | None = None,
    advice: str | None = None,
) -> Iterator[None]:
    """Translate foreign exceptions at a backend's edge, keeping the cause.

    Args:
        table: foreign class to ours; the first match in order of insertion wins. Our own errors pass untouched.
    """
    try:
        yield
    except WeightBusError:
        raise
    except tuple(table) as exc:
        for foreign, ours in table.items():
            if isinstance(exc, foreign):
                text = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
                raise ours(text, peer=peer, lane=lane, phase=phase, advice=advice) from exc
        raise
