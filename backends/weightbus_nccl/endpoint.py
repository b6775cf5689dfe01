"""Endpoint and channel of a collective group."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from weightbus.backend import (
    LANE_KEY_BYTES,
    MAX_HEADER_BYTES,
    Arrival,
    Channel,
    Endpoint,
    EndpointSpec,
    GroupSpec,
    Region,
    State,
    Work,
)
from weightbus.deadline import Deadline
from weightbus.errors import EndpointBusy, EndpointClosed, LocalProtocolError, PeerLost, TransferTimeout, TransportError
from weightbus_nccl.backend import settings
from weightbus_nccl.collective import Collective, GlooCollective, NcclCollective, Operation
from weightbus_nccl.rendezvous import Meeting, bounded, host_store, own_host

_CLOSE_S = 1.0  # how long closing waits for a group that has nothing in progress
_LOST = ("connection", "broken pipe", "reset by peer", "socket", "remote", "nccl", "econn")


def translate(exc: BaseException, group: GroupSpec) -> TransportError:
    """Our error for what a library raised in an operation of `group`."""
    others = [name for rank, name in enumerate(group.members) if rank != group.rank]
    text = str(exc).lower()
    if isinstance(exc, TransferTimeout) or "timed out" in text or "timeout" in text:
        kind: type[TransportError] = TransferTimeout
        what = "a broadcast did not end in time"
    elif isinstance(exc, PeerLost) or any(word in text for word in _LOST):
        kind, what = PeerLost, "a member was lost in a broadcast"
    else:
        kind, what = TransportError, "a broadcast failed"
    error = kind(
        f"Group {group.group_id} ({', '.join(group.members)}): {what}: {exc}",
        peer=others[0] if len(others) == 1 else None,
        advice="Regroup with the members that are alive.",
    )
    error.__cause__ = exc
    return error


class Posted(Work):
    """A broadcast as the channel sees it, sent or received."""

    def __init__(self, region: Region, nbytes: int, header: bytes, slot: int, operation: Operation | None) -> None:
        self.region = region
        self.nbytes = nbytes
        self.header = header
        self.slot = slot
        self.operation = operation
        self._state = State.DONE if operation is None else State.PENDING
        self._error: BaseException | None = None

    @property
    def state(self) -> State:
        return self._state

    @property
    def error(self) -> BaseException | None:
        return self._error

    def end(self, error: BaseException | None) -> None:
        """The operation has left the memory."""
        self._error = error
        self._state = State.DONE if error is None else State.ERROR
        self.operation = None


class GroupChannel(Channel):
    """One member's side of a group.

    After a failure `error` is set, nothing more can be posted, and as soon as the last operation has ended the group is
    given up, which breaks the others' connections: they learn of it without waiting for their own timeouts.

    Attributes:
        operation_timeout_s: seconds given to each broadcast posted from now on; core may set it.
    """

    def __init__(self, collective: Collective, group: GroupSpec, slots: Sequence[Region], timeout_s: float) -> None:
        self.operation_timeout_s: float = timeout_s
        self.group = group
        self._collective = collective
        self._slots = tuple(slots)
        self._leased: set[int] = set()
        self._pending: list[Posted] = []
        self._receives: deque[Posted] = deque()
        self._lock = threading.Lock()  # `drain` and `close` run on another thread than the rest
        self._error: TransportError | None = None
        self._closed = False

    def post_send(self, region: Region, nbytes: int, header: bytes, slot: int) -> Work:
        if self.group.rank != 0:
            raise LocalProtocolError("Only rank 0 of a group sends.")
        return self._post(region, nbytes, header, slot)

    def post_recv(self, slot: int, nbytes: int, header: bytes) -> None:
        """Enter the broadcast that fills slot `slot`; `nbytes` is what the sender posts, 0: no broadcast.

        Raises:
            LocalProtocolError: no such slot, too many bytes for it, or it has not been released. Nothing was posted.
        """
        if self.group.rank == 0:
            raise LocalProtocolError("Rank 0 of a group does not receive.")
        if not 0 <= slot < len(self._slots):
            raise LocalProtocolError(f"There is no slot {slot}; this lane has {len(self._slots)}.")
        if slot in self._leased:
            raise LocalProtocolError(f"Slot {slot} has not been released.")
        posted = self._post(self._slots[slot], nbytes, header, slot)
        self._leased.add(slot)
        self._receives.append(posted)

    def _post(self, region: Region, nbytes: int, header: bytes, slot: int) -> Posted:
        if not 0 <= nbytes <= region.nbytes:
            raise LocalProtocolError(f"{nbytes} bytes do not fit a region of {region.nbytes}.")
        if len(header) > MAX_HEADER_BYTES:
            raise LocalProtocolError(f"A header has at most {MAX_HEADER_BYTES} bytes, this has {len(header)}.")
        with self._lock:
            if self._closed:
                raise EndpointClosed(f"The channel of group {self.group.group_id} is closed.")
            if self._error is not None:
                raise self._error
            operation = self._enter(region.tensor[:nbytes]) if nbytes else None
            posted = Posted(region, nbytes, header, slot, operation)
            if operation is not None:
                self._pending.append(posted)
            return posted

    def _enter(self, tensor: torch.Tensor) -> Operation:
        try:
            return self._collective.broadcast(tensor, self.operation_timeout_s)
        except RuntimeError as exc:
            self._error = translate(exc, self.group)
            self._collective.abort(self._error)
            raise self._error from exc

    def poll(self) -> bool:
        """Look after operations; True if one has ended."""
        with self._lock:
            ended = [posted for posted in self._pending if posted.operation is not None and posted.operation.poll()]
            for posted in ended:
                self._end(posted)
            if ended:
                self._pending = [posted for posted in self._pending if posted.state is State.PENDING]
            if self._error is not None and not self._pending:
                self._collective.close()
        return bool(ended)

    def _end(self, posted: Posted) -> None:
        cause = posted.operation.error if posted.operation is not None else None
        if cause is None:
            posted.end(None)
            return
        error = translate(cause, self.group)
        posted.end(error)
        if self._error is None:
            self._error = error
            self._collective.abort(error)

    def arrivals(self) -> list[Arrival]:
        arrived = []
        while self._receives and self._receives[0].state is State.DONE:
            posted = self._receives.popleft()
            arrived.append(Arrival(header=posted.header, region=posted.region, slot=posted.slot, nbytes=posted.nbytes))
        return arrived

    def release(self, arrival: Arrival) -> None:
        self._leased.discard(arrival.slot)

    @property
    def error(self) -> Exception | None:
        return self._error

    def drain(self, timeout: float) -> bool:
        deadline = Deadline.after(timeout)
        while True:
            self.poll()
            if not self._pending:
                return True
            if deadline.expired:
                return False
            time.sleep(deadline.remaining_s(0.002))

    def uses(self, region: Region) -> bool:
        """Whether an operation on `region` is in progress."""
        return any(posted.region is region for posted in self._pending)

    def close(self) -> None:
        """Give the group up. On CUDA what is in progress is aborted; on CPU it ends by its timeout, off this thread."""
        self.poll()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._pending:
                self._collective.abort(EndpointClosed("The channel was closed."))
            self._collective.close(0.0 if self._pending else _CLOSE_S)


class GroupEndpoint(Endpoint):
    """One member. A sender's endpoint hosts the store, on loopback unless the spec names a host.

    Closing: memory that this endpoint allocated stays alive, unused, until the operations on it have ended. For memory
    that the caller registered, `close` waits for them: at most the longest timeout they were given.
    """

    def __init__(self, spec: EndpointSpec, timeout_s: float) -> None:
        super().__init__(spec)
        self._timeout_s = timeout_s
        self._device = spec.device
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._regions: list[Region] = []
        self._channels: list[GroupChannel] = []
        self._closed = False
        self._store: Any
        self._store, self._address = None, self.incarnation.encode()
        if spec.role == "send":
            self._store, self._address = host_store(spec.host or "127.0.0.1")

    @property
    def address(self) -> bytes:
        """The store's ``host:port``; a receiver, which nobody connects to, gives its incarnation."""
        return self._address

    def allocate(self, nbytes: int) -> Region:
        self._check_open()
        try:
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as exc:
            raise TransportError(
                f"{self.spec.name}: no {nbytes} bytes on {self._device}: {exc}", advice="Lower bucket_bytes or slots."
            ) from exc
        return self._add(tensor, "allocated")

    def register(self, tensor: torch.Tensor) -> Region:
        self._check_open()
        flat = tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()
        if not flat or tensor.device != self._device:
            raise LocalProtocolError(
                f"{self.spec.name} registers contiguous [nbytes] uint8 tensors on {self._device}, "
                f"not {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}."
            )
        return self._add(tensor, "registered")

    def _add(self, tensor: torch.Tensor, handle: str) -> Region:
        region = Region(tensor, handle)
        self._regions.append(region)
        return region

    def free(self, region: Region) -> None:
        if any(channel.uses(region) for channel in self._channels):
            raise EndpointBusy("An operation on this region is in progress.", advice="Drain the channel first.")
        self._regions = [known for known in self._regions if known is not region]

    def listen(self, lane_key: bytes, slots: Sequence[Region]) -> Channel:
        raise self._multicast_only("listen")

    def connect(self, address: bytes, lane_key: bytes, timeout: float) -> Channel:
        raise self._multicast_only("connect")

    def _multicast_only(self, method: str) -> LocalProtocolError:
        return LocalProtocolError(
            f"Backend nccl has no point-to-point lanes: {method} is not offered.",
            advice="Use connect_group; for one receiver a group of two members.",
        )

    def connect_group(self, group: GroupSpec, slots: Sequence[Region], timeout: float) -> GroupChannel:
        """Meet the members and build the group; see `Endpoint.connect_group`. Every wait is bounded.

        On CUDA it includes the first, empty broadcast, so that the communicator is there before the first bucket. A
        call into torch that does not come back by the deadline is left behind on a daemon thread.
        """
        self._check_open()
        self._check_group(group, slots)
        margin = min(0.25, timeout / 10)  # so that the error that names the missing comes before the one that cannot
        deadline = Deadline.after(timeout - margin)
        collective = bounded(
            lambda: self._build(group, deadline), Deadline.after(timeout), f"Group {group.group_id}", Collective.close
        )
        channel = GroupChannel(collective, group, slots, self._timeout_s)
        self._channels = [known for known in self._channels if not known._closed]
        self._channels.append(channel)
        if self._closed:
            channel.close()
            self._check_open()
        return channel

    def _check_group(self, group: GroupSpec, slots: Sequence[Region]) -> None:
        faults = []
        if len(group.members) < 2 or len(set(group.members)) != len(group.members):
            faults.append(f"members must be two or more different names, not {group.members}")
        if not 0 <= group.rank < len(group.members):
            faults.append(f"rank {group.rank} is none of {len(group.members)} members")
        if (group.rank == 0) != (self.spec.role == "send"):
            faults.append(f"an endpoint with role {self.spec.role!r} cannot be rank {group.rank}: rank 0 is the sender")
        if len(group.lane_key) != LANE_KEY_BYTES:
            faults.append(f"lane_key must have {LANE_KEY_BYTES} bytes, not {len(group.lane_key)}")
        if any(all(slot is not known for known in self._regions) for slot in slots):
            faults.append("a slot is not a region of this endpoint")
        if faults:
            raise LocalProtocolError(f"{self.spec.name}: {'; '.join(faults)}.")

    def _build(self, group: GroupSpec, deadline: Deadline) -> Collective:
        facts: dict[str, Any] = {"settings": settings(self._device.type)}
        if self._device.type == "cuda":
            facts["gpu"] = str(torch.cuda.get_device_properties(self._device).uuid)
        store = Meeting(group, facts, deadline, lambda: self._closed).hold()
        try:
            if self._device.type == "cuda":
                return NcclCollective(store, group, self._device, deadline)
            return GlooCollective(store, group, self.spec.host or own_host(group.address), deadline)
        except RuntimeError as exc:
            raise translate(exc, group) from exc

    def progress(self) -> bool:
        return any([channel.poll() for channel in self._channels])

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for channel in self._channels:
            channel.close()
        registered = [region for region in self._regions if region.handle == "registered"]
        while any(channel.uses(region) for channel in self._channels for region in registered):
            self.progress()
            time.sleep(0.002)
        self._channels.clear()
        self._regions.clear()
        self._store = None

    def _check_open(self) -> None:
        if self._closed:
            raise EndpointClosed(f"Endpoint {self.spec.name} is closed.")
