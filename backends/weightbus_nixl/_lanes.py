"""Operations and channels of a nixl endpoint. Notifications are numbered, so that none is taken for another."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weightbus.backend import MAX_HEADER_BYTES, Arrival, Channel, Region, State, Work
from weightbus.deadline import Deadline
from weightbus.errors import EndpointClosed, LocalProtocolError, PeerLost, RemoteProtocolError, WeightBusError
from weightbus_nixl._wire import Address, Kind, Note, Place

if TYPE_CHECKING:
    from weightbus_nixl._endpoint import NixlEndpoint

_POLL_S = 0.0002


class NixlWork(Work):
    """A transfer of NIXL, or one that ended when it was posted."""

    def __init__(self, peer: str = "", channel: SendChannel | None = None, slot: int = -1) -> None:
        self.handle: Any = None
        self.peer = peer
        self.channel = channel
        self.slot = slot
        self._state = State.PENDING
        self._error: BaseException | None = None

    @property
    def state(self) -> State:
        return self._state

    @property
    def error(self) -> BaseException | None:
        return self._error

    def end(self, error: WeightBusError | None = None) -> NixlWork:
        """The operation touches no memory any more."""
        self._state, self._error = (State.DONE, None) if error is None else (State.ERROR, error)
        return self


class _Lane(Channel):
    """What both directions share: an endpoint, a peer that may be lost, and a last word."""

    def __init__(self, endpoint: NixlEndpoint, lane_key: bytes) -> None:
        self.endpoint = endpoint
        self.lane_key = lane_key
        self.peer = ""
        self.owner = ""
        self.closed = False
        self._error: Exception | None = None

    @property
    def error(self) -> Exception | None:
        return self._error

    def break_off(self, error: WeightBusError, *, tell: bool = False) -> None:
        """The channel is of no use any more; the first reason stays."""
        if self._error is not None or self.closed:
            return
        self._error = error
        if tell:
            self.say(Kind.BYE, error.what.encode()[:MAX_HEADER_BYTES])

    def say(self, kind: Kind, body: bytes = b"") -> None:
        """Send a notification; a peer that is not there any more breaks the channel."""
        if not self.peer:
            return
        try:
            self.endpoint.notify(self.peer, Note(kind, self.lane_key, body=body), self.owner)
        except WeightBusError as exc:
            if self._error is None and not self.closed:
                self._error = exc if isinstance(exc, PeerLost) else PeerLost(str(exc), peer=self.owner)

    def hear_bye(self, note: Note) -> None:
        reason = note.body.decode(errors="replace") or "It closed its channel."
        self.break_off(PeerLost(f"The peer ended the lane: {reason}", peer=self.owner))

    def release(self, arrival: Arrival) -> None:
        raise LocalProtocolError("A sending channel has no arrivals.")

    def close(self) -> None:
        with self.endpoint.lock:
            if self.closed:
                return
            if self._error is None:
                self.say(Kind.BYE)
            self.closed = True
            self.endpoint.forget(self)


class SendChannel(_Lane):
    """Writes buckets into the slots of one receiver."""

    def __init__(self, endpoint: NixlEndpoint, lane_key: bytes, address: Address) -> None:
        super().__init__(endpoint, lane_key)
        self.address = address
        self.peer, self.owner = address.agent, address.owner
        self.welcome = False
        self._sequence = 0
        self._busy: set[int] = set()

    def target(self, slot: int) -> Place:
        """The peer's memory for `slot`; its scratch memory for -1."""
        if slot == -1 and self.address.scratch is not None:
            return self.address.scratch
        return self.address.slots[slot]

    def post_send(self, region: Region, nbytes: int, header: bytes, slot: int) -> Work:
        with self.endpoint.lock:
            self._check(region, nbytes, header, slot)
            note = Note(Kind.DATA, self.lane_key, self._sequence, slot, nbytes, header)
            try:
                if nbytes:
                    work = self.endpoint.post_write(self, region, nbytes, slot, note.pack())
                else:
                    self.endpoint.notify(self.peer, note, self.owner)
                    work = NixlWork().end()
            except WeightBusError as exc:
                self.break_off(exc)
                raise
            self._sequence += 1
            if work.state is State.PENDING:
                self._busy.add(slot)
            return work

    def _check(self, region: Region, nbytes: int, header: bytes, slot: int) -> None:
        self.endpoint.check_region(region)
        if self.closed:
            raise EndpointClosed(f"The channel to {self.owner} is closed.", peer=self.owner)
        if self._error is not None:
            raise PeerLost(f"The channel is broken: {self._error}", peer=self.owner) from self._error
        if not 0 <= slot < len(self.address.slots):
            raise LocalProtocolError(
                f"There is no slot {slot}; the peer has {len(self.address.slots)}.", peer=self.owner
            )
        if slot in self._busy:
            raise LocalProtocolError(f"The operation on slot {slot} has not ended.", peer=self.owner)
        if not 0 <= nbytes <= min(region.nbytes, self.address.slots[slot].nbytes) or len(header) > MAX_HEADER_BYTES:
            raise LocalProtocolError(
                f"Posted {nbytes} bytes with a header of {len(header)}; the region has {region.nbytes} bytes, slot "
                f"{slot} {self.address.slots[slot].nbytes}, a header at most {MAX_HEADER_BYTES}.",
                peer=self.owner,
            )

    def ended(self, work: NixlWork) -> None:
        """One of this channel's operations has ended."""
        self._busy.discard(work.slot)
        if isinstance(work.error, WeightBusError):
            self.break_off(work.error)

    def hear(self, note: Note) -> None:
        if note.kind is Kind.WELCOME:
            self.welcome = True
        elif note.kind is Kind.BYE:
            self.hear_bye(note)

    def arrivals(self) -> list[Arrival]:
        return []

    def drain(self, timeout: float) -> bool:
        deadline = Deadline.after(timeout)
        while self._busy and not deadline.expired:
            if not self.endpoint.progress():
                time.sleep(deadline.remaining_s(_POLL_S))
        return not self._busy


class ReceiveChannel(_Lane):
    """The slots that one sender writes. The first peer that shows the lane key is the sender; there is no second."""

    def __init__(self, endpoint: NixlEndpoint, lane_key: bytes, slots: Sequence[Region]) -> None:
        super().__init__(endpoint, lane_key)
        self.slots = list(slots)
        self._next = 0
        self._early: dict[int, Note] = {}
        self._landed: list[Arrival] = []
        self._held: set[int] = set()

    def admits(self, agent: str, note: Note) -> bool:
        """Whether a HELLO may bind the lane to `agent`; the same agent may ask again before its first bucket."""
        fits = secrets.compare_digest(self.lane_key, note.lane_key) and not self.closed and self._error is None
        return fits and self._next == 0 and self.peer in ("", agent)

    def hear(self, note: Note) -> None:
        if self._error is not None:
            return
        if not secrets.compare_digest(self.lane_key, note.lane_key):
            self._refuse(f"Its notification {note.sequence} has another lane key")
        elif note.kind is Kind.BYE:
            self.hear_bye(note)
        elif note.kind is Kind.DATA:
            self._bucket(note)

    def _bucket(self, note: Note) -> None:
        late = note.sequence < self._next or note.sequence in self._early
        if late or note.sequence >= self._next + len(self.slots):
            self._refuse(f"Its bucket {note.sequence} came while bucket {self._next} is due")
            return
        self._early[note.sequence] = note
        while (due := self._early.pop(self._next, None)) is not None:
            self._next += 1
            if due.slot >= len(self.slots) or due.nbytes > self.slots[due.slot].nbytes or due.slot in self._held:
                self._refuse(f"Its bucket of {due.nbytes} bytes does not fit slot {due.slot}, or the slot is in use")
                return
            self._held.add(due.slot)
            region = self.slots[due.slot]
            self._landed.append(Arrival(header=due.body, region=region, slot=due.slot, nbytes=due.nbytes))

    def _refuse(self, what: str) -> None:
        self.break_off(RemoteProtocolError(f"{what}; the connection was closed.", peer=self.owner), tell=True)

    def post_send(self, region: Region, nbytes: int, header: bytes, slot: int) -> Work:
        raise LocalProtocolError("A receiving channel cannot send.")

    def arrivals(self) -> list[Arrival]:
        with self.endpoint.lock:
            landed, self._landed = self._landed, []
            return landed

    def release(self, arrival: Arrival) -> None:
        with self.endpoint.lock:
            self._held.discard(arrival.slot)

    def drain(self, timeout: float) -> bool:
        return True
