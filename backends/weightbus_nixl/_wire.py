"""What NIXL endpoints say to each other: addresses, exports, and the notifications that carry headers."""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import Annotated, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from weightbus.backend import LANE_KEY_BYTES, MAX_ADDRESS_BYTES, MAX_HEADER_BYTES
from weightbus.errors import RemoteProtocolError
from weightbus.manifest import MAX_TENSORS

MAX_EXPORT_BYTES = 64 * MAX_TENSORS
_NOTE = struct.Struct("<4sB16sQIQ")
_MAGIC = b"WBn1"

_Unsigned = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 63) - 1)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Kind(enum.IntEnum):
    """What a notification is for. HELLO and WELCOME prove the link, DATA follows a bucket, BYE closes a channel."""

    HELLO = 1
    WELCOME = 2
    DATA = 3
    PING = 4
    BYE = 5


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Registered memory of an agent: address, bytes, and the CUDA ordinal there (0 for host memory)."""

    at: _Unsigned
    nbytes: _Unsigned
    ordinal: Annotated[int, msgspec.Meta(ge=0, lt=4096)]


class Address(msgspec.Struct, frozen=True):
    """What `connect` needs: the agent, where its slots are, and scratch memory for the link measurement."""

    owner: _Name
    agent: _Name
    metadata: bytes
    memory: Annotated[str, msgspec.Meta(pattern="^(DRAM|VRAM)$")]
    host: str
    slots: Annotated[list[Place], msgspec.Meta(max_length=4096)]
    scratch: Place | None = None


class Export(msgspec.Struct, frozen=True):
    """What `post_read` needs: (address, bytes) of every tensor and of the registered segments that hold them."""

    owner: _Name
    agent: _Name
    metadata: bytes
    memory: Annotated[str, msgspec.Meta(pattern="^(DRAM|VRAM)$")]
    ordinal: Annotated[int, msgspec.Meta(ge=0, lt=4096)]
    tensors: bytes
    segments: bytes


class Note(msgspec.Struct, frozen=True):
    """One notification. `sequence` counts the buckets of a lane from 0; a stale or repeated one does not fit."""

    kind: Kind
    lane_key: bytes
    sequence: int = 0
    slot: int = 0
    nbytes: int = 0
    body: bytes = b""

    def pack(self) -> bytes:
        return _NOTE.pack(_MAGIC, self.kind, self.lane_key, self.sequence, self.slot, self.nbytes) + self.body

    @classmethod
    def unpack(cls, data: bytes) -> Note:
        """Raises RemoteProtocolError when `data` is not a notification of this version."""
        limit = MAX_ADDRESS_BYTES if data[4:5] == bytes([Kind.HELLO]) else MAX_HEADER_BYTES
        if not _NOTE.size <= len(data) <= _NOTE.size + limit:
            raise RemoteProtocolError(f"A notification of {len(data)} bytes came.")
        magic, kind, key, sequence, slot, nbytes = _NOTE.unpack_from(data)
        if magic != _MAGIC or kind not in Kind.__members__.values():
            raise RemoteProtocolError("A notification came that is not one of weightbus.")
        return cls(Kind(kind), key, sequence, slot, nbytes, data[_NOTE.size :])


_Message = TypeVar("_Message", Address, Export)


def encode(message: Address | Export) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[_Message]) -> _Message:
    """Decode against the type; raises RemoteProtocolError when `data` is too large or something else."""
    limit = MAX_ADDRESS_BYTES if kind is Address else MAX_EXPORT_BYTES
    if len(data) > limit:
        raise RemoteProtocolError(
            f"An {kind.__name__.lower()} of {len(data)} bytes came; at most {limit} are accepted."
        )
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as exc:
        raise RemoteProtocolError(
            f"This is not the {kind.__name__.lower()} of a nixl endpoint: {exc}.",
            advice="use the same backend and the same version of weightbus on both sides.",
        ) from exc


Table: TypeAlias = npt.NDArray[np.uint64]


def table_of(data: bytes) -> Table:
    """``[n, 2]`` (address, bytes); raises RemoteProtocolError when they cannot be memory."""
    if len(data) % 16:
        raise RemoteProtocolError(f"A table of {len(data)} bytes has no whole rows.")
    table = np.frombuffer(data, dtype="<u8").reshape(-1, 2).astype(np.uint64)
    if table.size and int(table.max()) >= 1 << 63:
        raise RemoteProtocolError("A table names memory that no process can have.")
    return table


def digest(data: bytes) -> bytes:
    """Names metadata, so that it is loaded once and again only when it has changed."""
    return hashlib.blake2b(data, digest_size=16).digest()


def check_lane_key(lane_key: bytes) -> None:
    if len(lane_key) != LANE_KEY_BYTES:
        raise ValueError(f"a lane key has {LANE_KEY_BYTES} bytes, this has {len(lane_key)}")
