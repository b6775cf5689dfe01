"""Backend `loopback`: the contract of `weightbus.backend` inside one process. The reference, and a double for tests.

A post waits in its channel until the sender's `Endpoint.progress` copies it into the receiver's slot, one bucket
a call, so PENDING is really seen. Receivers of one process are found by their address in a table guarded by a lock.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch

from weightbus.backend import (
    MAX_HEADER_BYTES,
    Arrival,
    Backend,
    Capabilities,
    Channel,
    Endpoint,
    EndpointSpec,
    GroupSpec,
    PostedWork,
    Probe,
    Region,
    Work,
)
from weightbus.deadline import Deadline
from weightbus.errors import (
    ConfigError,
    ConnectError,
    EndpointClosed,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    TransferTimeout,
    TransportError,
    WeightBusError,
)

_lock = threading.Lock()
_endpoints: dict[bytes, LoopbackEndpoint] = {}
_exports: dict[bytes, tuple[torch.Tensor, ...]] = {}
_groups: dict[tuple[bytes, str], _Group] = {}


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, and wait for the copy: an operation that has ended no longer touches memory."""
    target.copy_(source)
    if target.is_cuda or source.is_cuda:
        torch.cuda.current_stream(target.device if target.is_cuda else source.device).synchronize()


@attrs.frozen(kw_only=True, eq=False)
class _Post:
    source: torch.Tensor
    header: bytes
    slot: int
    work: PostedWork = attrs.field(factory=PostedWork)

    @property
    def nbytes(self) -> int:
        return self.source.numel()


class _Receiver(Channel):
    """Receiver side: slots that senders of this process write. `lock` guards all of it against closing."""

    def __init__(self, name: str, lane_key: bytes, slots: Sequence[Region]) -> None:
        self.name, self.lane_key, self.slots = name, lane_key, list(slots)
        self.lock = threading.Lock()
        self.closed = False
        self.entered: deque[tuple[int, int, bytes]] = deque()
        self._landed: deque[Arrival] = deque()
        self._error: Exception | None = None

    def land(self, post: _Post) -> WeightBusError | None:
        """Copy `post` into its slot; the sender's error if that cannot be."""
        with self.lock:
            if self.closed:
                return PeerLost("The receiver closed its endpoint.", peer=self.name)
            if not 0 <= post.slot < len(self.slots) or post.nbytes > self.slots[post.slot].nbytes:
                what = f"A bucket of {post.nbytes} bytes for slot {post.slot} does not fit the {len(self.slots)} slots"
                self._error = self._error or RemoteProtocolError(f"{what} of {self.name}; its connection is closed.")
                return PeerLost(f"{what}; the receiver closed the connection.", peer=self.name)
            region = self.slots[post.slot]
            _copy(region.tensor[: post.nbytes], post.source)
            self._landed.append(Arrival(header=post.header, region=region, slot=post.slot, nbytes=post.nbytes))
        return None

    def lose(self, peer: str) -> None:
        """A sender has gone."""
        with self.lock:
            if not self.closed:
                self._error = self._error or PeerLost("The sender closed its channel.", peer=peer)

    def post_send(self, region: Region, nbytes: int, header: bytes, slot: int) -> Work:
        raise LocalProtocolError("A receiving channel cannot send.")

    def post_recv(self, slot: int, nbytes: int, header: bytes) -> None:
        if self.closed:
            raise EndpointClosed(f"The channel of {self.name} is closed.")
        if not 0 <= slot < len(self.slots) or nbytes > self.slots[slot].nbytes or len(header) > MAX_HEADER_BYTES:
            raise LocalProtocolError(f"{nbytes} bytes do not fit slot {slot} of {self.name}.")
        with self.lock:
            self.entered.append((slot, nbytes, header))

    def arrivals(self) -> list[Arrival]:
        with self.lock:
            landed = list(self._landed)
            self._landed.clear()
        return landed

    @property
    def waiting(self) -> bool:
        return bool(self._landed)

    def release(self, arrival: Arrival) -> None:
        return

    @property
    def error(self) -> Exception | None:
        return self._error

    def drain(self, timeout: float) -> bool:
        return True

    def close(self) -> None:
        with self.lock:  # waits for a copy in progress: afterwards nothing writes the slots
            self.closed = True
            self._landed.clear()


class _Sender(Channel):
    """Sender side: posts in order; one receiver, or all members of a group."""

    def __init__(self, endpoint: LoopbackEndpoint, receivers: Sequence[_Receiver], *, grouped: bool) -> None:
        self._endpoint, self._receivers, self._grouped = endpoint, list(receivers), grouped
        self._posts: deque[_Post] = deque()
        self._error: Exception | None = None
        self.closed = False

    def post_send(self, region: Region, nbytes: int, header: bytes, slot: int) -> Work:
        if self.closed:
            raise EndpointClosed(f"The channel of {self._endpoint.spec.name} is closed.")
        if self._error is not None:
            raise PeerLost("The channel is broken.", peer=self._receivers[0].name) from self._error
        self._endpoint.check_region(region)
        if not 0 <= nbytes <= region.nbytes or len(header) > MAX_HEADER_BYTES:
            raise LocalProtocolError(
                f"Posted {nbytes} bytes and a header of {len(header)} bytes; the region has {region.nbytes} bytes, "
                f"a header at most {MAX_HEADER_BYTES}."
            )
        post = _Post(source=region.tensor[:nbytes], header=header, slot=slot)
        self._posts.append(post)
        return post.work

    def progress(self) -> bool:
        """Move the oldest post."""
        if not self._posts and self._error is None and any(receiver.closed for receiver in self._receivers):
            self._fail(PeerLost("The receiver closed its endpoint.", peer=self._receivers[0].name))
            return True
        if not self._posts or (self._grouped and not self._all_entered()):
            return False
        post = self._posts[0]
        for receiver in self._receivers:
            error = receiver.land(self._as_entered(receiver, post) if self._grouped else post)
            if error is not None:
                self._fail(error)
                return True
        self._posts.popleft().work.end()
        return True

    def _all_entered(self) -> bool:
        return all(receiver.entered or receiver.closed for receiver in self._receivers)

    @staticmethod
    def _as_entered(receiver: _Receiver, post: _Post) -> _Post:
        if not receiver.entered:
            return post
        slot, nbytes, header = receiver.entered.popleft()
        # A length other than the sender's must not land: slot -1 fits nowhere.
        return attrs.evolve(post, slot=slot if nbytes == post.nbytes else -1, header=header)

    def _fail(self, error: WeightBusError) -> None:
        self._error = self._error or error
        while self._posts:
            self._posts.popleft().work.end(error)

    def arrivals(self) -> list[Arrival]:
        return []

    def release(self, arrival: Arrival) -> None:
        raise LocalProtocolError("A sending channel has no arrivals.")

    @property
    def error(self) -> Exception | None:
        return self._error

    def drain(self, timeout: float) -> bool:
        """Move what can be moved; nothing else could end a post, so there is nothing to wait for."""
        while self.progress():
            continue
        return not self._posts

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._fail(EndpointClosed(f"{self._endpoint.spec.name} closed the channel with the bucket still waiting."))
            for receiver in self._receivers:
                receiver.lose(self._endpoint.spec.name)


class LoopbackEndpoint(Endpoint):
    """An endpoint whose peers are in the same process."""

    def __init__(self, spec: EndpointSpec, capabilities: Capabilities) -> None:
        super().__init__(spec)
        self._capabilities = capabilities
        self._address = f"loopback:{os.getpid()}:{self.incarnation}".encode()
        self._regions: set[Region] = set()
        self._senders: list[_Sender] = []
        self._exported: dict[tuple[tuple[int, int], ...], bytes] = {}
        self._reads: deque[tuple[PostedWork, bytes, tuple[torch.Tensor, ...]]] = deque()
        self._closed = False
        self.receiver: _Receiver | None = None
        with _lock:
            _endpoints[self._address] = self

    @property
    def address(self) -> bytes:
        return self._address

    def allocate(self, nbytes: int) -> Region:
        self._check_open()
        try:
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.spec.device)
        except (RuntimeError, MemoryError) as exc:
            advice = "lower bucket_bytes or slots."
            raise TransportError(f"No {nbytes} bytes on {self.spec.device} for a bucket.", advice=advice) from exc
        return self._know(Region(tensor))

    def register(self, tensor: torch.Tensor) -> Region:
        self._check_open()
        if tensor.dtype != torch.uint8 or not tensor.is_contiguous():
            raise LocalProtocolError(
                f"A region is contiguous uint8, not {tensor.dtype} with strides {tensor.stride()}."
            )
        return self._know(Region(tensor.view(-1)))

    def _know(self, region: Region) -> Region:
        self._regions.add(region)
        return region

    def free(self, region: Region) -> None:
        self.check_region(region)
        self._regions.discard(region)

    def check_region(self, region: Region) -> None:
        """Refuse memory of another endpoint, or freed memory."""
        self._check_open()
        if region not in self._regions:
            raise LocalProtocolError(f"The region of {region.nbytes} bytes is not one of {self.spec.name}.")

    def listen(self, lane_key: bytes, slots: Sequence[Region]) -> Channel:
        self._check_open()
        if self.receiver is not None:
            raise LocalProtocolError(f"{self.spec.name} listens already; a new lane needs a new endpoint.")
        self.receiver = _Receiver(self.spec.name, lane_key, slots)
        return self.receiver

    def connect(self, address: bytes, lane_key: bytes, timeout: float) -> Channel:
        self._check_open()
        if self._capabilities.multicast:
            raise LocalProtocolError("A multicast backend has connect_group in place of connect.")
        with _lock:
            peer = _endpoints.get(address)
        if peer is None or peer.receiver is None or peer.receiver.closed:
            advice = "loopback reaches endpoints of its own process only; use backend 'local' between processes."
            raise ConnectError(f"Nobody listens at {address[:80]!r}.", advice=advice)
        if not secrets.compare_digest(peer.receiver.lane_key, lane_key):
            raise ConnectError("The receiver refused the lane key.", peer=peer.spec.name)
        return self._send_to([peer.receiver], grouped=False)

    def connect_group(self, group: GroupSpec, slots: Sequence[Region], timeout: float) -> Channel:
        if not self._capabilities.multicast:
            return super().connect_group(group, slots, timeout)
        self._check_open()
        with _lock:
            if group.address not in _endpoints:
                raise ConnectError(f"Nobody is at {group.address[:80]!r}.", peer=group.members[0])
            key = (group.address, group.group_id)
            meeting = _groups.setdefault(key, _Group(group.lane_key, group.members))
        self.receiver = None if group.rank == 0 else _Receiver(self.spec.name, group.lane_key, slots)
        receivers = meeting.meet(group, self.receiver, Deadline.after(timeout))
        return self.receiver or self._send_to(receivers, grouped=True)

    def _send_to(self, receivers: Sequence[_Receiver], *, grouped: bool) -> Channel:
        channel = _Sender(self, receivers, grouped=grouped)
        self._senders = [sender for sender in self._senders if not sender.closed]
        self._senders.append(channel)
        return channel

    def export(self, tensors: Sequence[torch.Tensor]) -> bytes:
        self._check_open()
        key = tuple((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
        if key not in self._exported:
            self._exported[key] = self._address + f":{len(self._exported)}".encode()
            with _lock:
                _exports[self._exported[key]] = tuple(tensors)
        return self._exported[key]

    def post_read(self, remote: bytes, local: Sequence[torch.Tensor], *, digest: bool = False) -> Work:
        self._check_open()
        work = PostedWork()
        self._reads.append((work, remote, tuple(local)))
        return work

    def progress(self) -> bool:
        moved = [channel.progress() for channel in self._senders]
        read = self._progress_read()
        return any(moved) or read or (self.receiver is not None and self.receiver.waiting)

    def _progress_read(self) -> bool:
        if not self._reads:
            return False
        work, remote, local = self._reads.popleft()
        with _lock:  # held over the copy, so that an exporter that has closed is no longer read
            source = _exports.get(remote)
            if source is None:
                work.end(PeerLost("The exporter has closed its endpoint."))
            elif [t.nbytes for t in source] != [t.nbytes for t in local]:
                work.end(TransportError("The tensors to fill have other sizes than the exported ones."))
            else:
                for mine, theirs in zip(local, source, strict=True):
                    _copy(mine.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8))
                work.end()
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with _lock:
            _endpoints.pop(self._address, None)
            for token in self._exported.values():
                _exports.pop(token, None)
            for key in [key for key in _groups if key[0] == self._address]:
                del _groups[key]
        for channel in self._senders:
            channel.close()
        if self.receiver is not None:
            self.receiver.close()
        for work, _, _ in self._reads:
            work.end(EndpointClosed(f"{self.spec.name} was closed."))
        self._regions.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise EndpointClosed(f"The endpoint of {self.spec.name} is closed.")


class _Group:
    """A meeting of all members of one collective group."""

    def __init__(self, lane_key: bytes, members: Sequence[str]) -> None:
        self._lane_key, self._members = lane_key, tuple(members)
        self._present: dict[int, _Receiver | None] = {}
        self._changed = threading.Condition()

    def meet(self, group: GroupSpec, receiver: _Receiver | None, deadline: Deadline) -> list[_Receiver]:
        """Wait until all are here; the receivers in rank order."""
        if not secrets.compare_digest(self._lane_key, group.lane_key):
            raise ConnectError("The group refused the lane key.", peer=group.members[group.rank])
        with self._changed:
            self._present[group.rank] = receiver
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(self._present) == len(self._members), _finite(deadline)):
                missing = [name for rank, name in enumerate(self._members) if rank not in self._present]
                raise TransferTimeout(f"Group {group.group_id} still lacks {', '.join(missing)}.", phase="connect")
            return [self._present[rank] for rank in sorted(self._present) if self._present[rank] is not None]  # type: ignore[misc]


def _finite(deadline: Deadline) -> float:
    return deadline.remaining_s(threading.TIMEOUT_MAX)


@attrs.frozen(kw_only=True)
class LoopbackCapabilities(Capabilities):
    """`Capabilities`, and the limit that no other backend has.

    Attributes:
        same_process_only: both ends must be in one process.
    """

    same_process_only: bool = True


class LoopbackBackend(Backend):
    """Moves buckets between endpoints of one process.

    Args:
        multicast: behave like a backend of collectives: `connect_group`, and headers sent ahead by core.

    Raises:
        ConfigError: an option it does not have.
    """

    name: ClassVar[str] = "loopback"

    def __init__(self, *, multicast: bool = False, **unknown: Any) -> None:
        if unknown:
            raise ConfigError(f"Backend loopback has no option {', '.join(sorted(unknown))}; it has: multicast.")
        self.capabilities = LoopbackCapabilities(
            devices=frozenset({"cpu", "cuda"}),
            multicast=multicast,
            header_with_bytes=not multicast,
            pull=not multicast,
            forward=not multicast,
            in_process_pair=True,
            same_host_only=True,
        )

    def probe(self) -> Probe:
        return Probe(ok=True, facts={"process": str(os.getpid()), "torch": torch.__version__})

    def endpoint(self, spec: EndpointSpec) -> Endpoint:
        return LoopbackEndpoint(spec, self.capabilities)
