"""Frames over a Unix socket of packets: whole frames in and out, never blocking, descriptors beside them."""

from __future__ import annotations

import array
import enum
import errno
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

import attrs

from weightbus.backend import MAX_HEADER_BYTES
from weightbus.errors import PeerLost, ProtocolError, RemoteProtocolError, TransportError, WeightBusError

VERSION = 2
_FRAME = struct.Struct("<BIIQ")
_MAX_FRAME = _FRAME.size + MAX_HEADER_BYTES
_MAX_FDS = 4
_TRUNCATED = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_RIGHTS_BYTES = socket.CMSG_SPACE(_MAX_FDS * 4)
_CREDENTIALS = struct.Struct("3i")


class Kind(enum.IntEnum):
    """What a frame says. DROPPED and RELEASED go from the receiver to the sender, all others the other way."""

    HELLO = 1  # tail: lane key; region: protocol version
    MAP_HOST = 2  # a memfd goes with it
    MAP_CUDA = 3  # tail: a packed Span
    POST = 4  # tail: the header
    UNMAP = 5
    DROPPED = 6  # the receiver has unmapped this region
    RELEASED = 7  # it no longer reads post number `nbytes`, counted from 0


@attrs.frozen
class Frame:
    """One message.

    Attributes:
        kind: what it says.
        region: number of a region, given by the sender.
        slot: of a post.
        nbytes: of a region or a post; of RELEASED the number of the post.
        tail: see `Kind`.
        fd: descriptor that goes with it, or -1; owned by the link until it is handed on.
    """

    kind: Kind
    region: int = 0
    slot: int = 0
    nbytes: int = 0
    tail: bytes = b""
    fd: int = -1

    def pack(self) -> bytes:
        return _FRAME.pack(self.kind, self.region, self.slot, self.nbytes) + self.tail

    @classmethod
    def unpack(cls, data: bytes, fd: int) -> Frame:
        try:
            kind, region, slot, nbytes = _FRAME.unpack_from(data)
            return cls(Kind(kind), region, slot, nbytes, data[_FRAME.size :], fd)
        except (struct.error, ValueError) as exc:
            raise RemoteProtocolError(f"A frame of {len(data)} bytes is not of this protocol.") from exc


class Poller:
    """The sockets of an endpoint behind one descriptor that is readable when any of them needs attention."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ready: dict[int, Callable[[], None]] = {}
        self._writing: set[int] = set()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add(self, fd: int, ready: Callable[[], None]) -> None:
        """Have `ready` called when `fd` is readable; in place of another one that was added for it."""
        if fd not in self._ready:
            self._epoll.register(fd, select.EPOLLIN)
        self._ready[fd] = ready

    def want_write(self, fd: int, wanted: bool) -> None:
        if fd in self._ready and wanted != (fd in self._writing):
            (self._writing.add if wanted else self._writing.discard)(fd)
            self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def remove(self, fd: int) -> None:
        if self._ready.pop(fd, None) is not None:
            self._writing.discard(fd)
            self._epoll.unregister(fd)

    def run(self) -> bool:
        """Serve what is ready; False if nothing was."""
        events = self._epoll.poll(0)
        for fd, _ in events:
            ready = self._ready.get(fd)  # an earlier one may have removed it
            if ready is not None:
                ready()
        return bool(events)

    def close(self) -> None:
        self._epoll.close()


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, by the kernel's word."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


class Link:
    """A connected socket.

    Attributes:
        error: why it ended, or None. Never resets.
    """

    def __init__(self, sock: socket.socket, poller: Poller, peer: str) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.pid, _ = peer_of(sock)
        self.peer = peer
        self.error: WeightBusError | None = None
        self._poller = poller
        self._fd = sock.fileno()
        self._queue: deque[Frame] = deque()
        self._lock = threading.Lock()  # drain and progress may meet

    def watch(self, ready: Callable[[], None]) -> None:
        """Have `ready` called by the poller when there is something to receive or to flush."""
        if self.error is None:
            self._poller.add(self._fd, ready)

    def send(self, frame: Frame) -> None:
        """Send a frame, without blocking: it is queued where it does not go at once."""
        if self.error is not None:
            return
        with self._lock:
            if (self._queue or not self._send_one(frame)) and self.error is None:
                self._queue.append(frame)
                self._poller.want_write(self._fd, True)

    def flush(self) -> None:
        """Send what goes without blocking."""
        if not self._queue:
            return
        with self._lock:
            while self._queue and self.error is None and self._send_one(self._queue[0]):
                self._queue.popleft()
            if self.error is None:
                self._poller.want_write(self._fd, bool(self._queue))

    def _send_one(self, frame: Frame) -> bool:
        try:
            if frame.fd >= 0:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [frame.fd]))]
                self.sock.sendmsg([frame.pack()], rights, socket.MSG_NOSIGNAL)
            else:
                self.sock.send(frame.pack(), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            self.fail(PeerLost("The peer closed the connection or died.", peer=self.peer))
            return False
        except OSError as exc:
            if exc.errno in (errno.ENOBUFS, errno.ETOOMANYREFS):
                return False
            self.fail(TransportError(f"Sending failed: {exc}", peer=self.peer))
            return False
        return True

    def receive(self) -> Frame | None:
        """The next frame, if one is here; sets `error` at the end of the connection. The caller owns its descriptor."""
        if self.error is not None:
            return None
        try:
            frame = self._receive_one()
        except (BlockingIOError, ConnectionResetError):
            return None  # a reset is said once, by a peer that left frames unread; its own frames follow
        except OSError as exc:
            self.fail(TransportError(f"Receiving failed: {exc}", peer=self.peer))
            return None
        except ProtocolError as exc:
            self.fail(exc)
            return None
        if frame is None:
            self.fail(PeerLost("The peer closed the connection or died.", peer=self.peer))
        return frame

    def _receive_one(self) -> Frame | None:
        data, rights, flags, _ = self.sock.recvmsg(_MAX_FRAME, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
        if data and not rights and not flags & _TRUNCATED:
            return self._unpack(data, -1)
        fds = array.array("i")
        for level, kind, passed in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(passed[: len(passed) - len(passed) % 4])
        if not data and not fds:
            return None
        try:
            if flags & _TRUNCATED or len(fds) > 1:
                raise RemoteProtocolError("A frame is larger than this protocol allows.", peer=self.peer)
            return self._unpack(data, fds[0] if fds else -1)
        except RemoteProtocolError:
            for fd in fds:
                os.close(fd)
            raise

    def _unpack(self, data: bytes, fd: int) -> Frame:
        frame = Frame.unpack(data, fd)
        if (fd >= 0) != (frame.kind is Kind.MAP_HOST):
            raise RemoteProtocolError("A descriptor is missing, or was not asked for.", peer=self.peer)
        return frame

    def fail(self, error: WeightBusError) -> None:
        """End the connection's use. The socket stays open until `close`."""
        if self.error is None:
            self.error = error.with_traceback(None)  # its frames would keep mappings alive
            self._poller.remove(self._fd)
            self._queue.clear()

    def close(self, error: WeightBusError) -> None:
        self.fail(error)
        self.sock.close()
