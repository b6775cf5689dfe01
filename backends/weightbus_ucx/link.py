"""The connection beside a lane: it says who is there, carries acknowledgements, and ends when its process does.

Bytes of buckets never take this way. UCX's own connections know no lane key and tell of a dead peer only after their
keep-alive; the kernel closes a socket at once.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
from typing import TypeVar

import attrs
import msgspec

from weightbus.errors import RemoteProtocolError

VERSION = 1
MAX_FRAME_BYTES = 1 << 16
_HEAD = struct.Struct("!BI")
_READ_BYTES = 1 << 16
T = TypeVar("T")


class Kind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    READY = 3
    ACK = 4


@attrs.frozen(kw_only=True)
class Address:
    """What a receiver publishes."""

    host: str
    port: int
    version: int = VERSION


@attrs.frozen(kw_only=True)
class Hello:
    """First frame of a sender; `worker` is its UCX address."""

    name: str
    incarnation: str
    lane_key: bytes
    worker: bytes
    version: int = VERSION


@attrs.frozen(kw_only=True)
class Welcome:
    """Answer of the receiver to a sender that has the lane key."""

    name: str
    nonce: bytes
    worker: bytes
    slots: tuple[int, ...]


def encode(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """A message of the type `kind`.

    Raises:
        RemoteProtocolError: it is not one.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError) as exc:
        raise RemoteProtocolError(f"What came is no {kind.__name__}: {exc}") from exc


class Link:
    """Frames over a connected socket, never blocking.

    Attributes:
        lost: why it is at its end, or empty.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._in = bytearray()
        self._out = bytearray()
        self.lost = ""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, max(1, int(timeout_s / 4))),
            (socket.TCP_KEEPINTVL, max(1, int(timeout_s / 4))),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, int(timeout_s * 1000)),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        self._out += _HEAD.pack(kind, len(payload)) + payload
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes now."""
        while self._out and not self.lost:
            try:
                del self._out[: self._sock.send(self._out)]
            except BlockingIOError:
                return
            except OSError as exc:
                self.lost = str(exc)

    def frames(self) -> list[tuple[Kind, bytes]]:
        """Whole frames that have come.

        Raises:
            RemoteProtocolError: a length beyond 64 KiB or an unknown kind; nothing of that size was allocated.
        """
        self._read()
        found = []
        while len(self._in) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._in)
            if length > MAX_FRAME_BYTES or kind not in set(Kind):
                raise RemoteProtocolError(f"A frame of kind {kind} and {length} bytes came.")
            if len(self._in) < _HEAD.size + length:
                break
            found.append((Kind(kind), bytes(self._in[_HEAD.size : _HEAD.size + length])))
            del self._in[: _HEAD.size + length]
        return found

    def _read(self) -> None:
        while not self.lost and len(self._in) <= MAX_FRAME_BYTES + _HEAD.size:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as exc:
                self.lost = str(exc)
                return
            if not data:
                self.lost = "the connection was closed"
            self._in += data

    def close(self) -> None:
        self.lost = self.lost or "closed by this side"
        with contextlib.suppress(OSError):
            self._sock.close()
