"""weightbus moves a model's weights from trainer processes to inference processes: fast, checked, never half-applied."""

from weightbus.bus import Handle, WeightBus, recv, send
from weightbus.errors import (
    AlignmentError,
    AmbiguousPlugin,
    BackendUnavailable,
    ConfigError,
    ConnectError,
    DigestMismatch,
    EndpointBusy,
    EndpointClosed,
    EngineError,
    LocalProtocolError,
    PartialRefitError,
    PeerLost,
    ProtocolError,
    RefitAborted,
    RefitError,
    RemoteProtocolError,
    SourceError,
    TransferTimeout,
    TransportError,
    UnknownPlugin,
    VersionError,
    WeightBusError,
)
from weightbus.manifest import Manifest, TensorSpec
from weightbus.names import NameRule
from weightbus.report import Event, RefitReport
from weightbus.stream import RefitStream

__version__ = "0.1.0"

__all__ = [
    "AlignmentError",
    "AmbiguousPlugin",
    "BackendUnavailable",
    "ConfigError",
    "ConnectError",
    "DigestMismatch",
    "EndpointBusy",
    "EndpointClosed",
    "EngineError",
    "Event",
    "Handle",
    "LocalProtocolError",
    "Manifest",
    "NameRule",
    "PartialRefitError",
    "PeerLost",
    "ProtocolError",
    "RefitAborted",
    "RefitError",
    "RefitReport",
    "RefitStream",
    "RemoteProtocolError",
    "SourceError",
    "TensorSpec",
    "TransferTimeout",
    "TransportError",
    "UnknownPlugin",
    "VersionError",
    "WeightBus",
    "WeightBusError",
    "recv",
    "send",
]
