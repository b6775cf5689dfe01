"""The two directions of a lane.

One bucket is two tagged messages: its header, and its bytes if there are any. The receives of a slot are posted ahead,
the bytes straight into it, so nothing is copied twice and a rendezvous starts at once. The receiver acknowledges what
has landed whole over the lane's `Link`; only then is the sender's Work DONE.

Not detected here: bytes that are fewer than their header says, which only a holder of the lane key can send.
Digests do.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from weightbus.backend import MAX_HEADER_BYTES, Arrival, Channel, Region, State, Work
from weightbus.deadline import Deadline
from weightbus.errors import EndpointClosed, LocalProtocolError, PeerLost, RemoteProtocolError, TransportError
from weightbus_ucx.link import Hello, Kind, Link, Welcome, encode

if TYPE_CHECKING:
    from weightbus_ucx.endpoint import UcxEndpoint

MAX_SLOTS = 1 << 10
_HEADER = struct.Struct("<QQII")  # place in the lane, bytes of the bucket, slot, bytes of core's header
_ACK = struct.Struct("<Q")
_PROBE_TAG, _HEADER_TAG, _BYTES_TAG = 0, 1 << 10, 2 << 10


def lane_tag(lane_key: bytes, nonce: bytes, incarnation: str) -> int:
    """The upper 52 bits of every tag of one connection of one lane; the lower 12 are the kind and the slot."""
    digest = hashlib.blake2b(nonce + incarnation.encode(), key=lane_key, digest_size=8).digest()
    return int.from_bytes(digest, "little") & ~0xFFF


@attrs.define(eq=False)
class _Posted(Work):
    place: int
    requests: list[Any]
    kept: tuple[Any, ...]
    _state: State = State.PENDING
    _error: Exception | None = None

    @property
    def state(self) -> State:
        return self._state

    @property
    def error(self) -> BaseException | None:
        return self._error

    def end(self, error: Exception | None) -> None:
        self._state, self._error = (State.ERROR, error) if error else (State.DONE, None)
        self.requests, self.kept = [], ()


class Peer:
    """A UCX endpoint to one worker. ``ucxx`` crashes when one is closed twice or after an error; this does not."""

    def __init__(self, endpoint: Any) -> None:
        self.endpoint = endpoint
        self._closed = False

    @property
    def alive(self) -> bool:
        return not self._closed and bool(self.endpoint.alive)

    def send(self, message: tuple[Any, Any]) -> Any:
        return self.endpoint.tag_send(*message)

    def close(self) -> None:
        """Force it shut, which takes 0.1 ms; what was posted to it ends in the progress that follows."""
        if not self._closed:
            self._closed = True
            self.endpoint.close_blocking(period=1_000_000_000, max_attempts=1)


class UcxChannel(Channel):
    """What both directions share: a link, a UCX endpoint, an end."""

    def __init__(self, owner: UcxEndpoint) -> None:
        self._owner = owner
        self._link: Link | None = None
        self._peer: Peer | None = None
        self._error: Exception | None = None
        self._peer_name = ""
        self.closed = False

    @property
    def error(self) -> Exception | None:
        return self._error

    def _frames(self, ready: set[int]) -> list[tuple[Kind, bytes]]:
        """New frames of the link; breaks the channel when it has ended."""
        link = self._link
        if link is not None:
            link.flush()
        if link is None or self._error is not None or self.closed or link.fileno() not in ready:
            return []
        try:
            frames = link.frames()
        except RemoteProtocolError as exc:
            self._break(exc)
            return []
        if link.lost:
            self._break(PeerLost(f"The peer died or closed its side: {link.lost}.", peer=self._peer_name))
        return frames

    def _check_alive(self) -> None:
        if self._error is None and not self.closed and self._peer is not None and not self._peer.alive:
            self._break(PeerLost("UCX lost the connection to the peer.", peer=self._peer_name))

    def _break(self, error: Exception) -> None:
        self._error = self._error or error
        self._drop_link()

    def leave(self) -> None:
        """Close the UCX endpoint."""
        if self._peer is not None:
            self._peer.close()

    def _drop_link(self) -> None:
        if self._link is not None:
            self._owner.forget(self._link)
            self._link = None

    def forget(self) -> None:
        """Drop what belongs to the library."""
        if self._peer is not None:
            self._owner.let_go(self._peer)
            self._peer = None


class SendChannel(UcxChannel):
    """Sender side: posts, and counts what the receiver has acknowledged."""

    def __init__(self, owner: UcxEndpoint, link: Link, peer: Peer, welcome: Welcome, tag: int) -> None:
        super().__init__(owner)
        self._link, self._peer, self._peer_name = link, peer, welcome.name
        self._slots, self._tag = welcome.slots, tag
        self._posted: deque[_Posted] = deque()
        self._places = 0
        self._acked = 0
        self._probe = peer.send(owner.message(np.zeros(1, np.uint8), tag | _PROBE_TAG))
        self.ready = False

    def post_send(self, region: Region, nbytes: int, header: bytes, slot: int) -> Work:
        with self._owner.lock:
            peer = self._check(region, nbytes, header, slot)
            head = np.frombuffer(_HEADER.pack(self._places, nbytes, slot, len(header)) + header, np.uint8).copy()
            work = _Posted(self._places, [], (head, region))
            try:
                work.requests.append(peer.send(self._owner.message(head, self._tag | _HEADER_TAG | slot)))
                if nbytes:
                    data = self._owner.message(region.tensor[:nbytes], self._tag | _BYTES_TAG | slot)
                    work.requests.append(peer.send(data))
            except self._owner.library.error as exc:
                self._posted.append(work)  # what was posted of it still ends by itself
                self._break(PeerLost(f"UCX refused the bucket: {exc}", peer=self._peer_name))
                raise PeerLost(f"UCX refused the bucket: {exc}", peer=self._peer_name) from exc
            self._places += 1
            self._posted.append(work)
            return work

    def _check(self, region: Region, nbytes: int, header: bytes, slot: int) -> Peer:
        self._owner.check_open()
        if self.closed or self._peer is None:
            raise EndpointClosed("The channel is closed.", peer=self._peer_name)
        if self._error is not None:
            raise PeerLost("The channel is broken.", peer=self._peer_name) from self._error
        if not 0 <= nbytes <= region.nbytes or len(header) > MAX_HEADER_BYTES:
            raise LocalProtocolError(
                f"Posted {nbytes} bytes of a region of {region.nbytes}, with a header of {len(header)} bytes; "
                f"a header has at most {MAX_HEADER_BYTES}."
            )
        if not 0 <= slot < len(self._slots) or nbytes > self._slots[slot]:
            raise LocalProtocolError(
                f"{nbytes} bytes do not fit slot {slot}: the receiver's slots have {self._slots} bytes.",
                peer=self._peer_name,
            )
        return self._peer

    def step(self, ready: set[int]) -> bool:
        """Take acknowledgements, end operations; True if anything happened."""
        self._check_alive()
        for kind, payload in self._frames(ready):
            self._take(kind, payload)
        before = len(self._posted)
        while self._posted and self._settle(self._posted[0]):
            self._posted.popleft()
        if self.closed and not self._posted:
            self.leave()
        return len(self._posted) != before

    def _take(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.READY:
            self.ready = True
        elif kind is Kind.ACK and len(payload) == _ACK.size and _ACK.unpack(payload)[0] <= self._places:
            self._acked = max(self._acked, _ACK.unpack(payload)[0])
        else:
            self._break(RemoteProtocolError(f"A {kind.name} came that cannot be.", peer=self._peer_name))

    def _settle(self, work: _Posted) -> bool:
        if not all(request.completed for request in work.requests):
            return False
        if work.place < self._acked:
            work.end(None)
        elif self._error is not None:
            work.end(self._error)
        elif self.closed:
            work.end(EndpointClosed("The channel was closed before the bucket was acknowledged."))
        return work.state is not State.PENDING

    def arrivals(self) -> list[Arrival]:
        return []

    def release(self, arrival: Arrival) -> None:
        raise LocalProtocolError("A sending channel has no arrivals.")

    def drain(self, timeout: float) -> bool:
        deadline = Deadline.after(timeout)
        while self._posted:
            if self._owner.is_closed:
                return False
            if not self._owner.progress():
                if deadline.expired:
                    return False
                self._owner.wait(deadline.remaining_s(at_most=0.005))
        return True

    def close(self) -> None:
        with self._owner.lock:
            if not self.closed:
                self.closed = True
                self._drop_link()
                self.step(set())

    @property
    def finished(self) -> bool:
        """Nothing is left to be done for it."""
        return self.closed and not self._posted

    def _break(self, error: Exception) -> None:
        super()._break(error)
        self.leave()

    def forget(self) -> None:
        """Works that have not ended stay PENDING: the receiver may be reading their source."""
        self._owner.settle(lambda: any(not request.completed for work in self._posted for request in work.requests))
        for work in self._posted:
            work.requests = []
        self._probe = None
        super().forget()


@attrs.define(eq=False)
class _Slot:
    index: int
    region: Region
    head: Any
    head_request: Any = None
    bytes_request: Any = None
    arrival: Arrival | None = None

    @property
    def landed(self) -> bool:
        return self.arrival is not None


@attrs.define(eq=False)
class _Candidate:
    """A sender that has the lane key, and whose first UCX message has not come."""

    link: Link
    name: str
    peer: Peer
    tag: int
    probe: Any
    buffer: Any


class ReceiveChannel(UcxChannel):
    """Receiver side: one sender at a time is admitted, one for ever is bound."""

    def __init__(self, owner: UcxEndpoint, lane_key: bytes, slots: Sequence[Region]) -> None:
        super().__init__(owner)
        self.lane_key = lane_key
        size = _HEADER.size + MAX_HEADER_BYTES
        self._slots = [_Slot(index, region, np.empty(size, np.uint8)) for index, region in enumerate(slots)]
        self._candidate: _Candidate | None = None
        self._tag = 0
        self._next = 0
        self._early: dict[int, Arrival] = {}
        self._arrived: list[Arrival] = []

    @property
    def free(self) -> bool:
        """Whether a sender may be admitted. A new attempt displaces one that has not got through."""
        return self._link is None and self._error is None and not self.closed

    def admit(self, link: Link, hello: Hello, nonce: bytes) -> None:
        """Connect back to a sender that has the lane key; it is bound once its first message has come."""
        self._dismiss()
        tag = lane_tag(self.lane_key, nonce, hello.incarnation)
        peer = self._owner.reach(hello.worker, hello.name)
        buffer: Any = np.zeros(1, np.uint8)
        probe = self._owner.worker.tag_recv(*self._owner.message(buffer, tag | _PROBE_TAG))
        self._candidate = _Candidate(link, hello.name, peer, tag, probe, buffer)
        sizes = tuple(slot.region.nbytes for slot in self._slots)
        link.send(
            Kind.WELCOME,
            encode(Welcome(name=self._owner.spec.name, nonce=nonce, worker=self._owner.worker_address, slots=sizes)),
        )

    def _dismiss(self) -> None:
        if self._candidate is not None:
            self._owner.forget(self._candidate.link)
            self._owner.retire(self._candidate.peer, self._candidate.probe, self._candidate.buffer)
            self._candidate = None

    def step(self, ready: set[int]) -> bool:
        """Bind the candidate, collect what has landed; True if anything happened."""
        if self._candidate is not None:
            return self._step_candidate(self._candidate, ready)
        if self._link is None:
            return False
        count = sum(self._collect(slot) for slot in self._slots if not slot.landed and self._error is None)
        self._check_alive()
        if self._frames(ready):
            self._break(RemoteProtocolError("A frame came that a sender does not send.", peer=self._peer_name))
        return count > 0

    def _step_candidate(self, candidate: _Candidate, ready: set[int]) -> bool:
        if candidate.probe.completed:
            self._link, self._peer, self._tag = candidate.link, candidate.peer, candidate.tag
            self._peer_name, self._candidate = candidate.name, None
            for slot in self._slots:
                self._post_head(slot)
                self._post_bytes(slot)
            self._link.send(Kind.READY)
            return True
        if candidate.link.fileno() in ready:
            try:
                unexpected = candidate.link.frames()
            except RemoteProtocolError:
                unexpected = []
            if unexpected or candidate.link.lost:
                self._dismiss()
        return False

    def _post_head(self, slot: _Slot) -> None:
        tag = self._tag | _HEADER_TAG | slot.index
        slot.head_request = self._owner.worker.tag_recv(*self._owner.message(slot.head, tag))

    def _post_bytes(self, slot: _Slot) -> None:
        if slot.region.nbytes:
            tag = self._tag | _BYTES_TAG | slot.index
            slot.bytes_request = self._owner.worker.tag_recv(*self._owner.message(slot.region.tensor, tag))

    def _collect(self, slot: _Slot) -> bool:
        """Whether the bucket of `slot` has landed now."""
        if not slot.head_request.completed:
            return False
        try:
            place, nbytes, index, length = _HEADER.unpack_from(slot.head)
            if index != slot.index or nbytes > slot.region.nbytes or length > MAX_HEADER_BYTES:
                raise RemoteProtocolError(f"A header says {nbytes} bytes for slot {index}, and {length} of its own.")
            if not self._next <= place < self._next + len(self._slots) or place in self._early:
                raise RemoteProtocolError(f"Bucket number {place} came where {self._next} is due.")
            slot.head_request.check_error()
            if nbytes and not slot.bytes_request.completed:
                return False
            if nbytes:
                slot.bytes_request.check_error()
        except RemoteProtocolError as exc:
            self._break(exc)
            return False
        except self._owner.library.error as exc:
            error = TransportError if self._peer is not None and self._peer.alive else PeerLost
            self._break(error(f"UCX could not receive a bucket: {exc}", peer=self._peer_name))
            return False
        header = bytes(slot.head[_HEADER.size : _HEADER.size + length])
        slot.arrival = Arrival(header=header, region=slot.region, slot=index, nbytes=nbytes)
        self._land(place, slot.arrival)
        return True

    def _land(self, place: int, arrival: Arrival) -> None:
        """Hand on in the order of posting, and acknowledge."""
        self._early[place] = arrival
        while self._next in self._early:
            self._arrived.append(self._early.pop(self._next))
            self._next += 1
        if self._link is not None:
            self._link.send(Kind.ACK, _ACK.pack(self._next))

    def arrivals(self) -> list[Arrival]:
        with self._owner.lock:
            arrived, self._arrived = self._arrived, []
        return arrived

    def release(self, arrival: Arrival) -> None:
        with self._owner.lock:
            slot = self._slots[arrival.slot]
            if slot.arrival is not arrival:
                raise LocalProtocolError(f"Slot {arrival.slot} was released before.")
            slot.arrival = None
            if self._link is None:
                return
            self._post_head(slot)
            if arrival.nbytes:
                self._post_bytes(slot)

    def post_send(self, region: Region, nbytes: int, header: bytes, slot: int) -> Work:
        raise LocalProtocolError("A receiving channel cannot send; connect onward for that.")

    def drain(self, timeout: float) -> bool:
        return True

    def close(self) -> None:
        with self._owner.lock:
            if self.closed:
                return
            self.closed = True
            self._dismiss()
            self._owner.settle(self._landing)
            self.leave()
            self._owner.settle(self._landing)
            self._drop_link()  # last: the sender takes it as the end of what could read its memory

    def _landing(self) -> bool:
        """Whether the bytes of some bucket are on their way: its header, which is sent first, has come."""
        heads = [slot for slot in self._slots if slot.head_request and slot.head_request.completed and not slot.landed]
        return any(slot.bytes_request and not slot.bytes_request.completed for slot in heads)

    def forget(self) -> None:
        for slot in self._slots:
            slot.head_request = slot.bytes_request = None
        super().forget()
