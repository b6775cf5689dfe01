"""A backend that does wrong on purpose: it wraps any other, and spoils chosen posts of the sender side.

By name, also in child processes: backend ``"weightbus.testing.faults:FaultyBackend"`` with `backend_options`
``{"inner": "loopback", "inner_options": {}, "faults": [{"kind": "corrupt", "bucket": 3}]}``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch

from weightbus.backend import Arrival, Backend, Channel, Endpoint, EndpointSpec, GroupSpec, Probe, Region, State, Work
from weightbus.deadline import Deadline
from weightbus.errors import ConfigError, PeerLost, WeightBusError
from weightbus.registry import load_backend

KINDS = ("drop", "delay", "reorder", "duplicate", "corrupt", "truncate", "stall", "kill")


@attrs.frozen(kw_only=True)
class Fault:
    """One fault. It strikes once in the life of its backend.

    Attributes:
        kind: what happens to the post:
            drop: it says DONE, nothing was sent.
            delay: it is sent after `seconds`, and all later posts of its channel after it.
            reorder: it is sent after the next post of its channel (or at `drain`).
            duplicate: it is sent twice, the second time after the first has ended.
            corrupt: one bit of byte `offset` is flipped on the way, of the header where no bytes are sent.
            truncate: only half of the bytes are sent, under the header of the whole.
            stall: it is not sent, and stays PENDING until `FaultyBackend.release`; nor are later posts of its channel.
            kill: the channel breaks with PeerLost, here and for the peer.
        bucket: strikes the post of this number, counted from 0 in each channel.
        channel: only in the channel of this number, counted from 0 in each endpoint as they connect; None: in any.
        seconds: of a delay.
        offset: of the byte to flip, counted modulo the bytes sent.
    """

    kind: str = attrs.field(validator=attrs.validators.in_(KINDS))
    bucket: int
    channel: int | None = None
    seconds: float = 0.5
    offset: int = 0


class _FaultyWork(Work):
    """A post that may not have been handed to the inner backend yet."""

    def __init__(self, region: Region, nbytes: int, header: bytes, slot: int) -> None:
        self.region, self.nbytes, self.header, self.slot = region, nbytes, header, slot
        self.not_before_s = 0.0
        self.stalled = False
        self.again = False
        self.inner: Work | None = None
        self.final: State | None = None
        self.cause: BaseException | None = None

    @property
    def state(self) -> State:
        if self.final is not None:
            return self.final
        return State.PENDING if self.inner is None or self.again else self.inner.state

    @property
    def error(self) -> BaseException | None:
        return self.cause if self.inner is None else self.cause or self.inner.error

    def end(self, cause: BaseException | None = None) -> None:
        self.final, self.cause = State.DONE if cause is None else State.ERROR, cause


class _FaultyChannel(Channel):
    def __init__(self, inner: Channel, number: int, endpoint: _FaultyEndpoint) -> None:
        self._inner, self._number, self._endpoint = inner, number, endpoint
        self.link_bytes_per_s = inner.link_bytes_per_s
        self._count = 0
        self._waiting: deque[_FaultyWork] = deque()
        self._sent: list[_FaultyWork] = []
        self._behind: _FaultyWork | None = None
        self._error: PeerLost | None = None

    def post_send(self, region: Region, nbytes: int, header: bytes, slot: int) -> Work:
        if self._error is not None:
            raise self._error
        work = _FaultyWork(region, nbytes, header, slot)
        fault = self._endpoint.backend.strike(self._number, self._count)
        self._count += 1
        behind, self._behind = self._behind, None
        if fault is not None and fault.kind == "reorder":
            self._behind = work
        elif fault is None or self._spoil(work, fault):
            self._waiting.append(work)
        if behind is not None:
            self._waiting.append(behind)
        self.advance()
        if work.cause is not None and fault is None and isinstance(work.cause, WeightBusError):
            raise work.cause
        return work

    def _spoil(self, work: _FaultyWork, fault: Fault) -> bool:
        """Apply `fault`; True if `work` is to be sent at all."""
        if fault.kind == "drop":
            work.end()
        elif fault.kind == "kill":
            self._error = PeerLost("The peer was lost, as the fault plan wants it.", bucket=fault.bucket)
            self._inner.close()
            for lost in (work, *self._waiting):
                lost.end(self._error)
            self._waiting.clear()
        elif fault.kind == "delay":
            work.not_before_s = time.monotonic() + fault.seconds
        elif fault.kind == "stall":
            work.stalled = True
        elif fault.kind == "truncate":
            work.nbytes //= 2
        elif fault.kind == "duplicate":
            work.again = True
        elif fault.kind == "corrupt":
            self._corrupt(work, fault.offset)
        return work.final is None

    def _corrupt(self, work: _FaultyWork, offset: int) -> None:
        if work.nbytes == 0:
            header = bytearray(work.header)
            header[offset % len(header)] ^= 1
            work.header = bytes(header)
            return
        spoiled = self._endpoint.inner.allocate(work.region.nbytes)
        spoiled.tensor[: work.nbytes].copy_(work.region.tensor[: work.nbytes])
        spoiled.tensor[offset % work.nbytes] ^= 1
        if spoiled.tensor.is_cuda:
            torch.cuda.synchronize(spoiled.tensor.device)
        work.region = spoiled  # kept until the endpoint closes: with `shares_memory` the reader maps it after DONE

    def advance(self) -> bool:
        """Hand on what may be handed on."""
        before = len(self._waiting)
        while self._waiting and not self._waiting[0].stalled and time.monotonic() >= self._waiting[0].not_before_s:
            self._hand_on(self._waiting.popleft())
        for work in self._sent:
            if work.again and work.inner is not None and work.inner.state is State.DONE:
                work.again = False
                self._hand_on(work)
        self._sent = [work for work in self._sent if work.again or work.state is State.PENDING]
        return len(self._waiting) != before

    def _hand_on(self, work: _FaultyWork) -> None:
        try:
            work.inner = self._inner.post_send(work.region, work.nbytes, work.header, work.slot)
        except WeightBusError as exc:
            work.end(exc)
        else:
            if work not in self._sent:
                self._sent.append(work)

    def release(self, arrival: Arrival) -> None:
        self._inner.release(arrival)

    def unstall(self) -> None:
        for work in self._waiting:
            work.stalled = False

    def post_recv(self, slot: int, nbytes: int, header: bytes) -> None:
        self._inner.post_recv(slot, nbytes, header)

    def arrivals(self) -> list[Arrival]:
        return self._inner.arrivals()

    @property
    def error(self) -> Exception | None:
        return self._error or self._inner.error

    def drain(self, timeout: float) -> bool:
        deadline = Deadline.after(timeout)
        if self._behind is not None:
            self._waiting.append(self._behind)
            self._behind = None
        while True:
            self.advance()
            if self._inner.drain(deadline.remaining_s(0.05)) and not self._waiting and not self._sent:
                return True
            if deadline.expired:
                return False
            time.sleep(0.001)

    def close(self) -> None:
        self._inner.close()


class _FaultyEndpoint(Endpoint):
    """Delegates all of memory and connecting; its channels spoil."""

    def __init__(self, spec: EndpointSpec, inner: Endpoint, backend: FaultyBackend) -> None:
        super().__init__(spec)
        self.incarnation = inner.incarnation
        self.inner, self.backend = inner, backend
        self._channels: list[_FaultyChannel] = []

    @property
    def address(self) -> bytes:
        return self.inner.address

    def allocate(self, nbytes: int) -> Region:
        return self.inner.allocate(nbytes)

    def register(self, tensor: torch.Tensor) -> Region:
        return self.inner.register(tensor)

    def free(self, region: Region) -> None:
        self.inner.free(region)

    def listen(self, lane_key: bytes, slots: Sequence[Region]) -> Channel:
        return self.inner.listen(lane_key, slots)

    def connect(self, address: bytes, lane_key: bytes, timeout: float) -> Channel:
        return self._wrap(self.inner.connect(address, lane_key, timeout))

    def connect_group(self, group: GroupSpec, slots: Sequence[Region], timeout: float) -> Channel:
        channel = self.inner.connect_group(group, slots, timeout)
        return self._wrap(channel) if group.rank == 0 else channel

    def _wrap(self, channel: Channel) -> Channel:
        self._channels.append(_FaultyChannel(channel, len(self._channels), self))
        return self._channels[-1]

    def export(self, tensors: Sequence[torch.Tensor]) -> bytes:
        return self.inner.export(tensors)

    def post_read(self, remote: bytes, local: Sequence[torch.Tensor], *, digest: bool = False) -> Work:
        return self.inner.post_read(remote, local, digest=digest)

    def progress(self) -> bool:
        moved = [channel.advance() for channel in self._channels]
        return self.inner.progress() or any(moved)

    def fds(self) -> list[int]:
        waits = any(channel._waiting or channel._sent for channel in self._channels)
        return [] if waits else self.inner.fds()

    def close(self) -> None:
        self.inner.close()

    def unstall(self) -> None:
        for channel in self._channels:
            channel.unstall()


class FaultyBackend(Backend):
    """Any backend, with faults.

    Args:
        inner: the backend to wrap, or its name.
        inner_options: its options, where it is a name.
        faults: `Fault` objects, or mappings of their fields.

    Attributes:
        fired: the faults that have struck, in order; a test looks here whether it tested anything.

    Raises:
        ConfigError: a fault that is none.
    """

    name: ClassVar[str] = "faulty"

    def __init__(
        self,
        inner: str | Backend = "loopback",
        inner_options: Mapping[str, Any] | None = None,
        faults: Iterable[Fault | Mapping[str, Any]] = (),
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ConfigError(
                f"FaultyBackend has no option {', '.join(sorted(unknown))}; it has: inner, inner_options, faults."
            )
        try:
            self._plan = [fault if isinstance(fault, Fault) else Fault(**fault) for fault in faults]
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"Not a fault: {exc}", advice=f"kinds are {', '.join(KINDS)}.") from exc
        self._inner = load_backend(inner, inner_options) if isinstance(inner, str) else inner
        self._endpoints: list[_FaultyEndpoint] = []
        self.capabilities = self._inner.capabilities
        self.fired: list[Fault] = []

    def strike(self, channel: int, bucket: int) -> Fault | None:
        """The fault for this post, which is used up by it."""
        for fault in self._plan:
            if fault not in self.fired and fault.bucket == bucket and fault.channel in (None, channel):
                self.fired.append(fault)
                return fault
        return None

    def release(self) -> None:
        """Let every stalled post go on."""
        for endpoint in self._endpoints:
            endpoint.unstall()

    def probe(self) -> Probe:
        return self._inner.probe()

    def endpoint(self, spec: EndpointSpec) -> Endpoint:
        self._endpoints.append(_FaultyEndpoint(spec, self._inner.endpoint(spec), self))
        return self._endpoints[-1]

    def fingerprint(self) -> dict[str, str]:
        return self._inner.fingerprint()
