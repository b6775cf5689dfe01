"""The contract of a backend: it moves bytes between registered memory of two processes, and nothing else.

Post and test. Core owns waiting, deadlines, retries and flow control; a backend never sleeps, except in `connect`,
`connect_group`, `drain` and `close`, which core calls on a helper thread with a timeout. Every other method is called
by one thread at a time, the bus thread or the guest it lends its turn to, and returns at once.

One refit over a point-to-point lane, step by step:

1. receiver: ``ep = backend.endpoint(spec)``, N x ``ep.allocate(nbytes)``, ``rx = ep.listen(lane_key, slots)``;
   ``ep.address`` travels to the sender by the control plane.
2. sender: ``tx = ep.connect(address, lane_key, timeout)``.
3. sender, bucket k: ``work = tx.post_send(region, nbytes, header, slot=k % N)``, then ``ep.progress()`` until
   ``work.state`` is DONE or ERROR. DONE: the sender's memory may be changed.
4. receiver: ``ep.progress()``, then ``for a in rx.arrivals()``: all bytes and the header of `a` are here.
   Core loads, then ``rx.release(a)``, and sends the credit over the control plane. Until that credit core posts nothing
   into this slot again. With `shares_memory` the release itself ends the sender's Work, which stands for the credit.

Where `header_with_bytes` is False (collectives) core has delivered the header over the control plane first and the
receiver calls ``rx.post_recv(slot, nbytes, header)``; the arrival follows once the operation has ended.

Late writes: an operation that was posted may land until its Work has ended. A backend must never report DONE or ERROR
for an operation that can still read the source or write the destination; where the library gives no way to stop an
operation, the state stays PENDING, and closing the endpoint that owns the destination must fence it.

Errors: foreign exceptions are translated at the backend's edge (`errors.map_exceptions`) with the cause kept:
`ConnectError`, `TransferTimeout`, `PeerLost`, `EndpointClosed`, `TransportError`.
"""

from __future__ import annotations

import enum
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch

MAX_HEADER_BYTES = 4096
MAX_ADDRESS_BYTES = 1 << 20
LANE_KEY_BYTES = 16


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a backend can do. Declared means tested by the conformance suite; undeclared means skipped, with the reason.

    Attributes:
        devices: torch device types whose memory it moves, such as ``frozenset({"cpu", "cuda"})``.
        multicast: one operation reaches all members: it has `connect_group` instead of `connect`.
        header_with_bytes: the header arrives with the bytes; else core sends it ahead over the control plane.
        pull: it has `export` and `post_read` (direct mode).
        forward: an arrived region may be posted on to the next receiver (chain fan-out).
        in_process_pair: both ends may live in one process, on different endpoints.
        same_host_only: both ends must be on one host.
        shares_memory: the arriving region IS the sender's memory; receivers allocate no slots (`listen` gets none). A
            Work is DONE when the reader has released it.
    """

    devices: frozenset[str] = frozenset({"cpu"})
    multicast: bool = False
    header_with_bytes: bool = True
    pull: bool = False
    forward: bool = False
    in_process_pair: bool = False
    same_host_only: bool = False
    shares_memory: bool = False


@attrs.frozen(kw_only=True)
class Probe:
    """Whether a backend can run here.

    Attributes:
        ok: True when an endpoint can be made.
        reason: why not, or empty.
        advice: what to do about it, or empty.
        facts: what `weightbus doctor` shows: versions, transports, devices. Text to text.
        warnings: things that work but will be slow or fragile, each with its cure.
    """

    ok: bool
    reason: str = ""
    advice: str = ""
    facts: dict[str, str] = attrs.field(factory=dict)
    warnings: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class EndpointSpec:
    """What core asks of an endpoint.

    Attributes:
        name: for error texts and logs, such as ``"sender/0"`` or ``"e0/1"``. Not unique over time.
        role: ``"send"`` (one per sender) or ``"receive"`` (one per lane).
        device: where its buckets live.
        host: the IP address under which other hosts reach this one; None lets the backend choose. Loopback is valid.
    """

    name: str
    role: str = attrs.field(validator=attrs.validators.in_(("send", "receive")))
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    host: str | None = None


class State(enum.Enum):
    """State of a posted operation."""

    PENDING = "pending"
    DONE = "done"
    ERROR = "error"


class Work(ABC):
    """A posted operation. Core polls `state` after `Endpoint.progress`; it never blocks."""

    @property
    @abstractmethod
    def state(self) -> State:
        """DONE and ERROR are final: the operation no longer reads the source nor writes the destination."""

    @property
    def error(self) -> BaseException | None:
        """The cause once `state` is ERROR."""
        return None

    @property
    def digest(self) -> int | None:
        """Of a read that is DONE: the digest of what was read, as if packed into one bucket; None: core makes it."""
        return None


class PostedWork(Work):
    """A Work that its backend ends by hand, once: for backends that learn of the end themselves."""

    def __init__(self) -> None:
        self._state = State.PENDING
        self._error: BaseException | None = None

    @property
    def state(self) -> State:
        return self._state

    @property
    def error(self) -> BaseException | None:
        return self._error

    def end(self, error: BaseException | None = None) -> None:
        """DONE, or ERROR with its cause; only the first call counts."""
        if self._state is State.PENDING:
            self._error = error
            self._state = State.DONE if error is None else State.ERROR


@attrs.define(eq=False)
class Region:
    """Contiguous memory known to one endpoint.

    Attributes:
        tensor: ``[nbytes]`` uint8 view of it, on the endpoint's device. Valid until `Endpoint.free` or `close`.
        handle: the backend's own; core does not look at it.
    """

    tensor: torch.Tensor
    handle: Any = None

    @property
    def nbytes(self) -> int:
        return self.tensor.numel()


@attrs.frozen(kw_only=True, eq=False)
class Arrival:
    """A bucket that has landed whole.

    Attributes:
        header: the bytes given to `post_send`.
        region: where the bytes are; borrowed until `Channel.release`. With `shares_memory` it is the sender's bucket.
        slot: index into the slots given to `listen`; with `shares_memory` the sender's own slot index.
        nbytes: how many bytes of `region` were sent.
    """

    header: bytes
    region: Region
    slot: int
    nbytes: int


class Channel(ABC):
    """One direction of one lane: made by `connect` (sender side), `listen` (receiver side) or `connect_group` (both).

    Attributes:
        operation_timeout_s: seconds that an operation posted from now on may take, where the library needs a bound of
            its own (collectives). Core sets it before each post to what is left of the refit; None: not said.
        link_bytes_per_s: what a backend that tries its link out in `connect` saw, on the sender side: reports give the
            wire's rate as a share of it. Set before `connect` returns, not changed after; None: not measured.
    """

    operation_timeout_s: float | None = None
    link_bytes_per_s: float | None = None

    @abstractmethod
    def post_send(self, region: Region, nbytes: int, header: bytes, slot: int) -> Work:
        """Start to move ``region.tensor[:nbytes]`` and `header` into the peer's slot number `slot`.

        Args:
            region: of the same endpoint (allocated, registered or, with `forward`, arrived there); borrowed until the
                Work has ended.
            nbytes: 0 is allowed: the header alone.
            header: at most 4096 bytes.

        Raises:
            EndpointClosed, PeerLost, TransportError: nothing was posted.
        """

    def post_recv(self, slot: int, nbytes: int, header: bytes) -> None:
        """Receiver side where `header_with_bytes` is False: enter the operation that fills slot `slot`."""
        raise NotImplementedError(f"{type(self).__name__} has no post_recv")

    @abstractmethod
    def arrivals(self) -> list[Arrival]:
        """What has landed since the last call, in order of posting. Empty on the sender side.

        A header or length that does not fit is dropped with a closed connection, never handed on.
        """

    @abstractmethod
    def release(self, arrival: Arrival) -> None:
        """The reader is done with `arrival`. Local, and core sends the credit; with `shares_memory` it ends the Work."""

    @property
    @abstractmethod
    def error(self) -> Exception | None:
        """Why the channel is broken (PeerLost, TransportError), or None. Never resets."""

    @abstractmethod
    def drain(self, timeout: float) -> bool:
        """Block until every posted operation has ended, at most `timeout` seconds. False if some has not."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent. Does not end operations: drain first. The peer sees PeerLost or nothing."""


class Endpoint(ABC):
    """One incarnation of one side: its memory, its registrations, its address. One per lane on receivers, one per sender.

    Closing it must fence late writes: after `close` has returned no operation of a peer changes memory that this
    endpoint's owner reuses (the memory itself may be freed by then).
    """

    def __init__(self, spec: EndpointSpec) -> None:
        self.spec = spec
        self.incarnation = uuid.uuid4().hex

    @property
    @abstractmethod
    def address(self) -> bytes:
        """What `connect` on the other side needs, at most 1 MiB; valid after `listen`."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Region:
        """New registered memory on the spec's device, kept until `free` or `close`. Contents undefined.

        Raises:
            TransportError: out of memory, or memory that cannot be registered: says which, how much, and what to set.
        """

    @abstractmethod
    def register(self, tensor: torch.Tensor) -> Region:
        """Register the caller's contiguous uint8 tensor. The caller keeps it alive until `free`."""

    @abstractmethod
    def free(self, region: Region) -> None:
        """Deregister, and give allocated memory back. The caller has seen every operation on it end."""

    @abstractmethod
    def listen(self, lane_key: bytes, slots: Sequence[Region]) -> Channel:
        """Receiver side: open the lane. A peer without `lane_key` is refused and its connection closed."""

    @abstractmethod
    def connect(self, address: bytes, lane_key: bytes, timeout: float) -> Channel:
        """Sender side: reach a receiver's endpoint. Blocks at most `timeout` seconds; called on a helper thread.

        Raises:
            ConnectError, TransferTimeout: with the peer named.
        """

    def connect_group(self, group: GroupSpec, slots: Sequence[Region], timeout: float) -> Channel:
        """Both sides, `multicast` backends only: every member calls it with the same `group`, then it returns on all.

        Args:
            slots: the receive slots of a receiver; empty for the sender.

        Raises:
            ConnectError, TransferTimeout: names the members that are missing, where that can be known.
        """
        raise NotImplementedError(f"{type(self).__name__} has no connect_group")

    def export(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """`pull`: describe the caller's contiguous tensors so that a peer's `post_read` can reach them.

        Memory is registered once and kept: calling it again with the same tensors is cheap. The caller keeps the
        tensors alive and unchanged until the refit has ended.
        """
        raise NotImplementedError(f"{type(self).__name__} has no export")

    def post_read(self, remote: bytes, local: Sequence[torch.Tensor], *, digest: bool = False) -> Work:
        """`pull`: start to copy the i-th exported tensor into ``local[i]`` (contiguous, same bytes).

        Args:
            digest: the Work's `digest` is wanted; a backend that cannot make it in the same pass ignores this.
        """
        raise NotImplementedError(f"{type(self).__name__} has no post_read")

    @abstractmethod
    def progress(self) -> bool:
        """Advance operations; True if anything happened. Called often; must be cheap when idle."""

    def fds(self) -> list[int]:
        """File descriptors that become readable when `progress` has something to do; empty: core polls."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Idempotent. In order: channels, operations, registrations, memory, library handle. Leaves nothing behind."""


@attrs.frozen(kw_only=True)
class GroupSpec:
    """One collective group, the same on every member.

    Attributes:
        group_id: unique for each regroup.
        lane_key: secret of the group, 16 bytes.
        rank: this member's place; 0 is the sender.
        members: member names in rank order.
        address: rendezvous, made by rank 0 (`Endpoint.address`).
    """

    group_id: str
    lane_key: bytes
    rank: int
    members: tuple[str, ...]
    address: bytes


class Backend(ABC):
    """What an entry point of group ``weightbus.backends`` names.

    ``__init__(**options)`` takes the user's `backend_options`, refuses unknown ones (`ConfigError`, all at once) and
    imports nothing heavy: the wire library is imported by `probe` and `endpoint`.
    """

    name: ClassVar[str]
    capabilities: Capabilities

    @abstractmethod
    def probe(self) -> Probe:
        """Can it run here? Never raises; takes less than a few seconds."""

    @abstractmethod
    def endpoint(self, spec: EndpointSpec) -> Endpoint:
        """A new incarnation.

        Raises:
            BackendUnavailable: the wire library is missing or broken, with what to install or set.
        """

    def fingerprint(self) -> dict[str, str]:
        """Settings that must be equal on both sides (library versions, decisive variables); compared at join."""
        return {}
