"""The two ends of a lane. The sender offers its regions once and then posts short messages about them."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import attrs
import torch

from weightbus.backend import LANE_KEY_BYTES, MAX_HEADER_BYTES, Arrival, Channel, PostedWork, Region, Work
from weightbus.deadline import Deadline
from weightbus.errors import EndpointClosed, LocalProtocolError, RemoteProtocolError, TransportError, WeightBusError
from weightbus_local.cuda import Span, driver
from weightbus_local.host import map_received
from weightbus_local.wire import VERSION, Frame, Kind, Link, Poller, peer_of

_MAX_REGIONS = 4096
_MAX_LEASES = 4096
_MAX_STRANGERS = 16
_CLOSED = "The channel was closed by this side."


@attrs.define(eq=False)
class Offer:
    """A sender's region as it is offered to readers.

    Attributes:
        frame: the MAP frame.
        owner: keeps the memory alive. Each channel that offered it holds it until its reader has unmapped or died.
    """

    frame: Frame
    owner: Any


#: CUDA memory of closed channels whose importer still lives, with the socket that tells of its end.
_lingering: list[tuple[socket.socket, list[Offer]]] = []
_lock = threading.Lock()


def sweep(timeout_s: float = 0.0) -> None:
    """Give back CUDA memory of closed channels once its importers have closed or died; wait at most `timeout_s`."""
    deadline = Deadline.after(timeout_s)
    while _lingering:
        with _lock:
            for entry in tuple(_lingering):
                if _ended(entry[0]):
                    entry[0].close()
                    _lingering.remove(entry)
        if deadline.expired:
            break
        time.sleep(0.001)


def _ended(sock: socket.socket) -> bool:
    try:
        while sock.recv(MAX_HEADER_BYTES):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class SendChannel(Channel):
    """The sender's end, connected."""

    def __init__(self, link: Link, lane_key: bytes, owns: Callable[[Region], bool]) -> None:
        self._link = link
        self._owns = owns
        self._offers: dict[int, Offer] = {}
        self._reading: dict[int, PostedWork] = {}  # by the number of the post
        self._posts = 0
        link.watch(self._ready)
        link.send(Frame(Kind.HELLO, region=VERSION, tail=lane_key))

    def offer(self, offer: Offer) -> None:
        """Have the reader map a region, once."""
        if offer.frame.region not in self._offers and self._link.error is None:
            self._offers[offer.frame.region] = offer
            self._link.send(offer.frame)

    def withdraw(self, offer: Offer) -> None:
        """Have the reader unmap a region; its memory is kept until it has."""
        if offer.frame.region in self._offers:
            self._link.send(Frame(Kind.UNMAP, region=offer.frame.region))

    def post_send(self, region: Region, nbytes: int, header: bytes, slot: int) -> Work:
        if self._link.error is not None:
            raise _again(self._link.error)
        if not self._owns(region) or not 0 <= nbytes <= region.nbytes:
            raise LocalProtocolError(f"{nbytes} bytes of a region of {region.nbytes} cannot be posted here.")
        if len(header) > MAX_HEADER_BYTES or not 0 <= slot < 1 << 32:
            raise LocalProtocolError(f"A header of {len(header)} bytes for slot {slot} cannot be posted.")
        self.offer(region.handle)
        work = self._reading[self._posts] = PostedWork()
        self._posts += 1
        self._link.send(Frame(Kind.POST, region.handle.frame.region, slot, nbytes, header))
        self._end_if_lost()
        return work

    def _ready(self) -> None:
        self._link.flush()
        frame = self._link.receive()
        if frame is not None:
            _drop_fd(frame)
            if frame.kind is Kind.RELEASED and frame.nbytes in self._reading:
                self._reading.pop(frame.nbytes).end()
            elif frame.kind is not Kind.DROPPED or self._offers.pop(frame.region, None) is None:
                self._link.fail(
                    RemoteProtocolError("The receiver sent what cannot be said by it now.", peer=self._link.peer)
                )
        if self._link.error is not None:
            self.close()

    def _end_if_lost(self) -> None:
        """Nothing that was posted is released once the link has ended."""
        if self._link.error is not None:
            for work in self._reading.values():
                work.end(self._link.error)
            self._reading.clear()

    def arrivals(self) -> list[Arrival]:
        return []

    def release(self, arrival: Arrival) -> None:
        raise LocalProtocolError("A sender has no arrivals to release.")

    @property
    def error(self) -> Exception | None:
        return self._link.error

    def drain(self, timeout: float) -> bool:
        deadline = Deadline.after(timeout)
        while self._reading and not deadline.expired:
            time.sleep(0.001)
            self._ready()
        return not self._reading

    def close(self) -> None:
        self._link.fail(EndpointClosed(_CLOSED, peer=self._link.peer))
        self._end_if_lost()
        cuda = [offer for offer in self._offers.values() if offer.frame.kind is Kind.MAP_CUDA]
        self._offers.clear()
        if cuda and self._link.sock.fileno() >= 0:
            with suppress(OSError):  # the reader has gone already
                self._link.sock.shutdown(socket.SHUT_WR)
                _lingering.append((self._link.sock.dup(), cuda))
        self._link.sock.close()
        sweep()

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptor; the connection is the parent's."""
        self._link.sock.close()


@attrs.define(eq=False)
class _Mapping:
    """A sender's region as it is seen here.

    Attributes:
        region: what arrivals carry.
        leases: arrivals on it that were not released.
        retired: the sender asked to unmap it.
    """

    region: Region
    leases: int = 0
    retired: bool = False


class ReceiveChannel(Channel):
    """The receiver's end: listens on an abstract socket and serves the one sender that has the lane key."""

    def __init__(self, poller: Poller, lane_key: bytes, name: str) -> None:
        if len(lane_key) != LANE_KEY_BYTES:
            raise LocalProtocolError(f"A lane key has {LANE_KEY_BYTES} bytes, this has {len(lane_key)}.")
        self.socket_name = b"\0weightbus-" + secrets.token_hex(16).encode()
        self._poller = poller
        self._lane_key = lane_key
        self._name = name
        self._strangers: list[Link] = []
        self._link: Link | None = None
        self._error: WeightBusError | None = None
        self._mappings: dict[int, _Mapping] = {}
        self._arrived: list[Arrival] = []
        self._leased: dict[Arrival, tuple[int, _Mapping]] = {}  # with the number of the post
        self._posts = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        try:
            self._listener.bind(self.socket_name)
            self._listener.listen(_MAX_STRANGERS)
        except OSError as exc:
            self._listener.close()
            raise TransportError(f"Listening on an abstract socket failed: {exc}") from exc
        poller.add(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it left again, or no descriptor is free: the poller asks again
        pid, uid = peer_of(sock)
        if uid != os.getuid():
            sock.close()
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._strangers.pop(0).close(EndpointClosed("Too many connections that say nothing."))
        link = Link(sock, self._poller, f"the sender of {self._name} (pid {pid})")
        self._strangers.append(link)
        link.watch(lambda: self._greet(link))

    def _greet(self, link: Link) -> None:
        """The first frame of a connection must show the lane key; nothing else is looked at before."""
        first = link.receive()
        if first is None and link.error is None:
            return
        self._strangers.remove(link)
        if (
            first is not None
            and (first.kind, first.region) == (Kind.HELLO, VERSION)
            and hmac.compare_digest(first.tail, self._lane_key)
        ):
            self._link = link
            self._stop_listening()
            link.watch(self._ready)
        else:
            if first is not None:
                _drop_fd(first)
            link.close(RemoteProtocolError("The connection did not show the lane key.", peer=link.peer))

    def _ready(self) -> None:
        """Apply the next frame; a wrong one ends the connection."""
        link = self._link
        if link is None:
            return
        link.flush()
        frame = link.receive()
        if frame is not None:
            try:
                self._apply(link, frame)
            except WeightBusError as exc:
                link.fail(exc)
        if link.error is not None:
            self._end(link.error)

    def _apply(self, link: Link, frame: Frame) -> None:
        if frame.kind in (Kind.MAP_HOST, Kind.MAP_CUDA):
            try:
                if frame.region in self._mappings or len(self._mappings) >= _MAX_REGIONS:
                    raise RemoteProtocolError(f"Region {frame.region} is offered twice, or is one too many.")
                self._mappings[frame.region] = _map(frame, link.pid)
            finally:
                _drop_fd(frame)
            return
        mapping = self._mappings.get(frame.region)
        if mapping is None or mapping.retired:
            raise RemoteProtocolError(f"Region {frame.region} was not offered.", peer=link.peer)
        if frame.kind is Kind.POST:
            self._arrive(mapping, frame)
        elif frame.kind is Kind.UNMAP:
            mapping.retired = True
            self._unmap_if_free(frame.region, mapping)
        else:
            raise RemoteProtocolError(f"A {frame.kind.name} frame is out of place.", peer=link.peer)

    def _arrive(self, mapping: _Mapping, frame: Frame) -> None:
        if frame.nbytes > mapping.region.nbytes or len(self._leased) >= _MAX_LEASES:
            raise RemoteProtocolError(
                f"A post of {frame.nbytes} bytes does not fit a region of {mapping.region.nbytes}, or is one too many."
            )
        arrival = Arrival(header=frame.tail, region=mapping.region, slot=frame.slot, nbytes=frame.nbytes)
        mapping.leases += 1
        self._leased[arrival] = (self._posts, mapping)
        self._posts += 1
        self._arrived.append(arrival)

    def _unmap_if_free(self, number: int, mapping: _Mapping) -> None:
        if mapping.retired and mapping.leases == 0:
            del self._mappings[number]
            if self._link is not None:
                self._link.send(Frame(Kind.DROPPED, region=number))

    def _end(self, error: WeightBusError) -> None:
        """The connection is over. Mappings stay while arrivals on them are held; then the socket tells the sender."""
        if self._error is None:
            self._error = error
            self._stop_listening()
        if not self._leased:
            self._mappings.clear()
            if self._link is not None:
                self._link.close(error)
        elif self._link is not None and self._link.sock.fileno() >= 0:
            self._link.fail(error)
            with suppress(OSError):
                self._link.sock.shutdown(socket.SHUT_RD)  # the sender notices now, and keeps what is held

    def _stop_listening(self) -> None:
        if self._listener.fileno() >= 0:
            self._poller.remove(self._listener.fileno())
            self._listener.close()
        for link in self._strangers:
            link.close(EndpointClosed(_CLOSED))
        self._strangers.clear()

    def post_send(self, region: Region, nbytes: int, header: bytes, slot: int) -> Work:
        raise LocalProtocolError("A receiver cannot post.")

    def arrivals(self) -> list[Arrival]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def release(self, arrival: Arrival) -> None:
        if arrival not in self._leased:
            return
        post, mapping = self._leased.pop(arrival)
        mapping.leases -= 1
        if self._error is not None:
            self._end(self._error)
            return
        if self._link is not None:
            self._link.send(Frame(Kind.RELEASED, nbytes=post))
        if mapping.retired:
            number = next(key for key, value in self._mappings.items() if value is mapping)
            self._unmap_if_free(number, mapping)

    @property
    def error(self) -> Exception | None:
        return self._error

    def drain(self, timeout: float) -> bool:
        return True

    def close(self) -> None:
        if any(mapping.region.tensor.is_cuda for mapping in self._mappings.values()):
            torch.cuda.synchronize()  # no kernel may read what is unmapped
        self._arrived.clear()
        self._leased.clear()
        self._end(EndpointClosed(_CLOSED))

    def abandon(self) -> None:
        """In a forked child: close inherited descriptors; the connections are the parent's."""
        for sock in (self._listener, *(link.sock for link in self._strangers)):
            sock.close()
        if self._link is not None:
            self._link.sock.close()


def _map(frame: Frame, pid: int) -> _Mapping:
    """Make a sender's region visible here."""
    if frame.kind is Kind.MAP_HOST:
        return _Mapping(Region(map_received(frame.fd, frame.nbytes)))
    span = Span.unpack(frame.tail)
    if span.nbytes != frame.nbytes:
        raise RemoteProtocolError(f"A CUDA region of {span.nbytes} bytes is offered as {frame.nbytes}.")
    memory = driver().open(span, same_process=pid == os.getpid())
    return _Mapping(Region(memory.tensor()[span.offset : span.offset + frame.nbytes], memory))


def _drop_fd(frame: Frame) -> None:
    if frame.fd >= 0:
        os.close(frame.fd)


def _again(error: WeightBusError) -> WeightBusError:
    """A fresh error for each post, so that tracebacks do not pile up on a shared one."""
    kind = type(error) if isinstance(error, TransportError) else TransportError
    raised = kind(error.what, peer=error.peer, advice=error.advice)
    raised.__cause__ = error
    return raised
