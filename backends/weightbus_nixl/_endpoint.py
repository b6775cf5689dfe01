"""An endpoint of backend `nixl`: one agent with its memory, its lanes and its reads."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import torch

from weightbus.backend import Channel, Endpoint, EndpointSpec, Region, State, Work
from weightbus.calibration import copy_bytes_per_s
from weightbus.deadline import Deadline
from weightbus.errors import (
    ConnectError,
    EndpointClosed,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    TransferTimeout,
    TransportError,
    WeightBusError,
)
from weightbus_nixl import _memory, _wire
from weightbus_nixl._lanes import NixlWork, ReceiveChannel, SendChannel
from weightbus_nixl._library import AgentOptions, make_agent, translated, ucx_tls
from weightbus_nixl._wire import Address, Export, Kind, Note, Place

logger = logging.getLogger(__name__)

_PING_S = 0.5
_POLL_S = 0.0002
_MEASURED_BYTES = (64 << 10, 64 << 10, 512 << 10, 4 << 20, 4 << 20)
_SCRATCH_BYTES = _MEASURED_BYTES[-1]
_MEASURE_S = 0.05
_KEPT_LISTS = 8


def host_id() -> str:
    """Equal in all processes of one host, containers included."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@attrs.define(eq=False)
class _Memory:
    """Handle of a region: its registration and the way to give it back."""

    registration: Any
    give_back: Callable[[], None]


@attrs.define(eq=False)
class _Kept:
    """One remembered list of tensors: the memory it needs, and its export."""

    blob: bytes
    spans: frozenset[_memory.Span]


class NixlEndpoint(Endpoint):
    """One NIXL agent. Closing it destroys the agent: the one fence that stops a peer's writes.

    A WRITE over shared memory or CMA is copied by `post_send` itself, which then takes as long as the copy (the GIL is
    free meanwhile); over TCP, RDMA and CUDA IPC it returns at once.
    """

    def __init__(self, spec: EndpointSpec, options: AgentOptions) -> None:
        super().__init__(spec)
        self.lock = threading.RLock()  # connect runs on a helper thread, all else on the bus thread
        self._options = options
        self._cuda = spec.device.type == "cuda"
        self._kind = "VRAM" if self._cuda else "DRAM"
        self._ordinal = spec.device.index or 0 if self._cuda else 0
        self._name = f"weightbus-{self.incarnation}"
        self._threads: set[int] = set()
        with self._on_device():
            self._agent = make_agent(self._name, options)
        self._regions: dict[Region, _Memory] = {}
        self._spans: dict[_memory.Span, Any] = {}
        self._kept: OrderedDict[tuple[tuple[int, int], ...], _Kept] = OrderedDict()
        self._loaded: dict[str, set[bytes]] = {}
        self._works: list[NixlWork] = []
        self._senders: dict[str, SendChannel] = {}
        self._receiver: ReceiveChannel | None = None
        self._scratch: Region | None = None
        self._ping_at = 0.0
        self._closed = False

    @property
    def _label(self) -> str:
        return self.spec.name

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make the device's context current in this thread, where UCX looks for it."""
        if not self._cuda:
            yield
            return
        with torch.cuda.device(self.spec.device):
            if threading.get_ident() not in self._threads:
                torch.cuda.current_stream().synchronize()  # a thread has no context before its first call
                self._threads.add(threading.get_ident())
            yield

    # Memory

    def allocate(self, nbytes: int) -> Region:
        with self.lock:
            self._check_open()
            tensor, give_back = _memory.allocate(nbytes, self.spec.device)
            try:
                return self._adopt(tensor, give_back)
            except BaseException:
                give_back()
                raise

    def register(self, tensor: torch.Tensor) -> Region:
        with self.lock:
            self._check_open()
            if tensor.dtype != torch.uint8 or not tensor.is_contiguous() or tensor.device.type != self.spec.device.type:
                raise LocalProtocolError(
                    f"A region is contiguous uint8 on {self.spec.device}, not {tensor.dtype} on {tensor.device} with "
                    f"strides {tensor.stride()}."
                )
            if self._cuda and tensor.numel() and not _memory.can_share(tensor):
                raise TransportError(f"{tensor.nbytes} bytes on {tensor.device} cannot be shared.", advice=_EXPANDABLE)
            return self._adopt(tensor.view(-1), lambda: None)

    def _adopt(self, tensor: torch.Tensor, give_back: Callable[[], None]) -> Region:
        region = Region(tensor)
        region.handle = _Memory(self._register([(tensor.data_ptr(), tensor.numel())]), give_back)
        self._regions[region] = region.handle
        return region

    def _register(self, ranges: Sequence[tuple[int, int]]) -> Any:
        """NIXL's registration of (address, bytes); None if no byte is in them."""
        rows = [(at, nbytes, self._ordinal, "") for at, nbytes in ranges if nbytes]
        if not rows:
            return None
        total = sum(row[1] for row in rows)
        try:
            with self._on_device():
                return self._agent.register_memory(rows, self._kind)
        except Exception as exc:
            raise TransportError(
                f"{self._label}: {total} bytes on {self.spec.device} from address {rows[0][0]:#x} cannot be registered "
                f"with {self._options.plugin}: {type(exc).__name__}: {exc}.",
                advice=_EXPANDABLE if self._cuda else "raise the locked-memory limit (`ulimit -l unlimited`).",
            ) from exc

    def _deregister(self, registration: Any) -> None:
        if registration is not None:
            with translated(f"{self._label}: deregistering memory"):
                self._agent.deregister_memory(registration)

    def free(self, region: Region) -> None:
        with self.lock:
            self.check_region(region)
            memory = self._regions.pop(region)
            self._deregister(memory.registration)
            memory.give_back()

    def check_region(self, region: Region) -> None:
        """Refuse memory of another endpoint, or freed memory."""
        self._check_open()
        if region not in self._regions:
            raise LocalProtocolError(f"The region of {region.nbytes} bytes is not one of {self._label}.")

    def _place(self, region: Region) -> Place:
        return Place(region.tensor.data_ptr(), region.nbytes, self._ordinal)

    def _get_scratch(self) -> Region:
        if self._scratch is None:
            self._scratch = self.allocate(_SCRATCH_BYTES)
        return self._scratch

    # Lanes

    @property
    def address(self) -> bytes:
        with self.lock:
            self._check_open()
            slots = self._receiver.slots if self._receiver is not None else []
            lent = [*slots, *([self._scratch] if self._scratch is not None else [])]
            address = Address(
                owner=self._label,
                agent=self._name,
                metadata=self._metadata([self._regions[region].registration for region in lent]),
                memory=self._kind,
                host=host_id(),
                slots=[self._place(region) for region in slots],
                scratch=self._place(self._scratch) if self._scratch is not None else None,
            )
            return _wire.encode(address)

    def _metadata(self, registrations: Sequence[Any]) -> bytes:
        """How to reach this agent, and only those registrations."""
        with translated(f"{self._label}: describing its memory"):
            merged = self._agent.get_reg_descs([(0, 0, 0, "")], self._kind)
            merged.clear()
            for registration in registrations:
                for index in range(registration.descCount() if registration is not None else 0):
                    merged.addDesc(registration[index])
            blob = self._agent.get_partial_agent_metadata(merged, True)
        return bytes(blob)

    def listen(self, lane_key: bytes, slots: Sequence[Region]) -> Channel:
        with self.lock:
            _wire.check_lane_key(lane_key)
            if self._receiver is not None:
                raise LocalProtocolError(f"{self._label} listens already; a new lane needs a new endpoint.")
            for region in slots:
                self.check_region(region)
            self._get_scratch()
            self._receiver = ReceiveChannel(self, lane_key, slots)
            return self._receiver

    def connect(self, address: bytes, lane_key: bytes, timeout: float) -> Channel:
        deadline = Deadline.after(timeout)
        _wire.check_lane_key(lane_key)
        self._check_open()
        try:
            peer = _wire.decode(address, Address)
            self._load(peer.agent, peer.metadata, peer.owner)
        except RemoteProtocolError as exc:
            raise ConnectError(exc.what, peer=exc.peer, advice=exc.advice) from exc
        with self.lock:
            channel = SendChannel(self, lane_key, peer)
            self._senders[peer.agent] = channel
        try:
            self._greet(channel, deadline)
            self._measure(channel, deadline)
        except BaseException:
            channel.close()
            raise
        return channel

    def _load(self, agent: str, metadata: bytes, owner: str) -> None:
        """Make `agent` known to NIXL; again only when it describes new memory."""
        name = _wire.digest(metadata)
        if name in self._loaded.get(agent, ()):
            return
        try:
            with self.lock, self._on_device():
                known = self._agent.add_remote_agent(metadata)
        except Exception as exc:
            advice = (
                f"both sides need the same NIXL; UCX_TLS and the plugin ({self._options.plugin}) must reach each other."
            )
            raise ConnectError(
                f"{owner} cannot be added: {type(exc).__name__}: {exc}.", peer=owner, advice=advice
            ) from exc
        known = known.decode() if isinstance(known, bytes) else known
        if known != agent:
            raise RemoteProtocolError(f"{owner} calls its agent {agent}, its metadata calls it {known}.", peer=owner)
        self._loaded.setdefault(agent, set()).add(name)

    def _greet(self, channel: SendChannel, deadline: Deadline) -> None:
        """HELLO and WELCOME: both directions work, and the other side knows the lane key."""
        hello = msgspec.msgpack.encode((self._label, self._metadata([])))
        try:
            self.notify(channel.peer, Note(Kind.HELLO, channel.lane_key, body=hello), channel.owner)
        except PeerLost as exc:
            raise ConnectError(f"{channel.owner} cannot be reached: {exc.what}", peer=channel.owner) from exc
        while not channel.welcome:
            if channel.error is not None:
                raise ConnectError(f"{channel.owner} broke off: {channel.error}", peer=channel.owner) from channel.error
            if deadline.expired:
                raise TransferTimeout(
                    f"{channel.owner} did not answer in time.", peer=channel.owner, phase="connect",
                    advice="it may hold another lane key, be fed already, have closed that endpoint, or no network of "
                    f"this host reaches it (UCX_TLS={ucx_tls(self._options) or 'default'}; UCX_NET_DEVICES chooses).",
                )  # fmt: skip
            if not self.progress():
                time.sleep(deadline.remaining_s(_POLL_S))

    def _measure(self, channel: SendChannel, deadline: Deadline) -> None:
        """Write scratch memory a few times, and warn of a link that is far slower than its path should be."""
        target = channel.address.scratch
        if target is None or target.nbytes < _SCRATCH_BYTES:
            return
        with self.lock:
            source = self._get_scratch()
        until, best = Deadline.after(_MEASURE_S), 0.0
        for round_, nbytes in enumerate(_MEASURED_BYTES):
            started = time.perf_counter()
            with self.lock:
                self._check_open()
                work = self.post_write(channel, source, nbytes, -1, b"")
            while work.state is State.PENDING:
                if deadline.expired:
                    raise TransferTimeout(f"{channel.owner}: the first bytes did not arrive.", peer=channel.owner)
                self.progress()
            if work.error is not None:
                raise ConnectError(f"{channel.owner}: a WRITE failed: {work.error}", peer=channel.owner) from work.error
            if round_:  # the first one sets the path up
                best = max(best, nbytes / (time.perf_counter() - started))
                if until.expired:
                    break
        channel.link_bytes_per_s = best
        self._judge(channel, best / 1e9)

    def _judge(self, channel: SendChannel, gbps: float) -> None:
        peer = channel.address
        near = bool(peer.host) and peer.host == host_id()
        tls = ucx_tls(self._options)
        cuda = self._cuda and peer.memory == "VRAM"
        copy = copy_bytes_per_s(torch.device("cpu")) if near and not cuda else None
        text = slow_link(gbps, near=near, cuda=cuda, tls=tls, copy_gbps=(copy or 0.0) / 1e9)
        if text:
            logger.warning("%s -> %s: %.2f GB/s at connect. %s", self._label, peer.owner, gbps, text)
        else:
            logger.info("%s -> %s: %.2f GB/s at connect", self._label, peer.owner, gbps)

    def notify(self, agent: str, note: Note, owner: str) -> None:
        """Send a notification without bytes."""
        with self.lock, self._on_device(), translated(f"{self._label}: a notification", peer=owner):
            self._check_open()
            self._agent.send_notif(agent, note.pack())

    def forget(self, channel: Channel) -> None:
        """Disconnect from the peer of a closed channel, unless something else still needs it."""
        peer = channel.peer if isinstance(channel, SendChannel | ReceiveChannel) else ""
        if self._senders.get(peer) is channel and not any(work.channel is channel for work in self._works):
            del self._senders[peer]
        receiver = self._receiver
        bound = receiver is not None and not receiver.closed and receiver.peer == peer
        if bound or peer in self._senders or any(work.peer == peer for work in self._works):
            return
        if self._loaded.pop(peer, None) is None:
            return
        try:
            self._agent.remove_remote_agent(peer)
        except Exception as exc:
            logger.debug("%s: removing a peer: %s", self._label, exc)

    # Operations

    def post_write(self, channel: SendChannel, region: Region, nbytes: int, slot: int, note: bytes) -> NixlWork:
        """WRITE the first bytes of `region`. Making the two lists anew costs 10 µs, and so only used bytes move.

        Args:
            slot: of the peer; -1 is its scratch memory.
        """
        target = channel.target(slot)
        with translated(f"{self._label}: a WRITE of {nbytes} bytes", peer=channel.owner):
            local = self._agent.get_xfer_descs([(region.tensor.data_ptr(), nbytes, self._ordinal)], self._kind)
            remote = self._agent.get_xfer_descs([(target.at, nbytes, target.ordinal)], channel.address.memory)
            return self._post("WRITE", local, remote, NixlWork(channel.peer, channel, slot), note)

    def _post(self, operation: str, local: Any, remote: Any, work: NixlWork, note: bytes = b"") -> NixlWork:
        with self._on_device():
            work.handle = self._agent.initialize_xfer(operation, local, remote, work.peer, note)
            try:
                state = self._agent.transfer(work.handle)
            except BaseException:
                work.handle.release()
                raise
        self._works.append(work)
        self._settle(work, state)
        return work

    def progress(self) -> bool:
        with self.lock, self._on_device():
            if self._closed:
                return False
            moved = self._hear()
            for work in [work for work in self._works if work.handle is not None]:
                moved = self._test(work) or moved
            self._ping()
            return moved

    def _test(self, work: NixlWork) -> bool:
        try:
            with translated(f"{self._label}: a transfer", peer=work.channel.owner if work.channel else None):
                state = self._agent.check_xfer_state(work.handle)
        except WeightBusError as exc:
            return self._settle(work, "ERR", exc)
        return self._settle(work, state)

    def _settle(self, work: NixlWork, state: str, error: WeightBusError | None = None) -> bool:
        """End `work` if NIXL has ended it; a handle that NIXL will not give up is still in progress."""
        if state == "PROC":
            return False
        try:
            work.handle.release()
        except Exception as exc:
            logger.debug("%s: a transfer is not released yet: %s", self._label, exc)
            return False
        work.handle = None
        self._works.remove(work)
        if state != "DONE" and error is None:
            error = TransportError(f"{self._label}: NIXL reports a failed transfer.")
        work.end(error)
        if work.channel is not None:
            work.channel.ended(work)
            if work.channel.closed:
                self.forget(work.channel)  # what its close left for the last operation
        elif self._cuda and error is None:
            torch.cuda.synchronize(self.spec.device)  # a READ that is DONE has been seen with copies still running
        return True

    def _hear(self) -> bool:
        with translated(f"{self._label}: reading notifications"):
            news: dict[Any, list[bytes]] = self._agent.get_new_notifs()
        for name, notes in news.items():
            agent = name.decode() if isinstance(name, bytes) else name
            for data in notes:
                try:
                    self._dispatch(agent, Note.unpack(data))
                except WeightBusError as exc:
                    self._violation(agent, exc)
        return bool(news)

    def _violation(self, agent: str, error: WeightBusError) -> None:
        receiver = self._receiver
        if receiver is not None and receiver.peer == agent:
            receiver.break_off(RemoteProtocolError(error.what, peer=receiver.owner), tell=True)
        else:
            logger.warning("%s: dropped a notification of %s: %s", self._label, agent, error)

    def _dispatch(self, agent: str, note: Note) -> None:
        receiver, sender = self._receiver, self._senders.get(agent)
        if note.kind is Kind.HELLO:
            if receiver is None or not receiver.admits(agent, note):
                raise RemoteProtocolError("A HELLO with another lane key, or for a lane that is taken.")
            self._welcome(receiver, agent, note)
        elif sender is not None and sender.lane_key == note.lane_key:
            sender.hear(note)
        elif receiver is not None and receiver.peer == agent:
            receiver.hear(note)
        elif note.kind is Kind.DATA:
            raise RemoteProtocolError("It is not the sender of this lane.")

    def _welcome(self, receiver: ReceiveChannel, agent: str, note: Note) -> None:
        try:
            owner, metadata = msgspec.msgpack.decode(note.body, type=tuple[str, bytes])
        except msgspec.MsgspecError as exc:
            raise RemoteProtocolError(f"A HELLO that cannot be read: {exc}.") from exc
        self._load(agent, metadata, owner)
        receiver.peer, receiver.owner = agent, owner
        receiver.say(Kind.WELCOME)

    def _ping(self) -> None:
        """Ask whether peers are there: NIXL tells of a death only when it is used."""
        now = time.monotonic()
        if now < self._ping_at:
            return
        self._ping_at = now + _PING_S
        for channel in [*self._senders.values(), *([self._receiver] if self._receiver is not None else [])]:
            if channel.error is None and not channel.closed:
                channel.say(Kind.PING)

    # Pull

    def export(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """See `Endpoint.export`. Whole allocations are registered, each once.

        The last 8 lists of tensors are remembered; host memory of theirs stays referenced until then or `close`.
        """
        with self.lock:
            self._check_open()
            key = tuple((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
            spans = self._cover(tensors)
            kept = self._kept.get(key)
            if kept is None or not kept.blob or kept.spans != spans:
                kept = _Kept(self._describe(key, sorted(spans, key=lambda span: span.start)), spans)
            self._keep(key, kept)
            return kept.blob

    def _describe(self, key: Sequence[tuple[int, int]], spans: Sequence[_memory.Span]) -> bytes:
        return _wire.encode(
            Export(
                owner=self._label,
                agent=self._name,
                metadata=self._metadata([self._spans[span] for span in spans]),
                memory=self._kind,
                ordinal=self._ordinal,
                tensors=np.array(key, dtype="<u8").tobytes(),
                segments=np.array([(span.start, span.nbytes) for span in spans], dtype="<u8").tobytes(),
            )
        )

    def _cover(self, tensors: Sequence[torch.Tensor]) -> frozenset[_memory.Span]:
        """Register the allocations of `tensors` that are not registered yet."""
        spans: set[_memory.Span] = set()
        starts: dict[int, _memory.Span] = {}
        for tensor in tensors:
            if tensor.device.type != self.spec.device.type or not tensor.is_contiguous():
                raise LocalProtocolError(f"Tensors are contiguous on {self.spec.device}, one is on {tensor.device}.")
            if not tensor.nbytes:
                continue
            last = starts.get(tensor.untyped_storage().data_ptr())
            span = last or _memory.span_of(tensor)
            starts[tensor.untyped_storage().data_ptr()] = span
            spans.add(span)
            if self._cuda and last is None and span not in self._spans and not _memory.can_share(tensor):
                raise TransportError(f"A tensor on {tensor.device} cannot be shared.", advice=_EXPANDABLE)
        for span in spans - self._spans.keys():
            self._spans[span] = self._register([(span.start, span.nbytes)])
        return frozenset(spans)

    def _keep(self, key: tuple[tuple[int, int], ...], kept: _Kept) -> None:
        """Remember the last few lists of tensors; deregister what none of them needs."""
        self._kept[key] = kept
        self._kept.move_to_end(key)
        if len(self._kept) <= _KEPT_LISTS or self._works:
            return
        while len(self._kept) > _KEPT_LISTS:
            self._kept.popitem(last=False)
        needed = frozenset[_memory.Span]().union(*(kept.spans for kept in self._kept.values()))
        for span in self._spans.keys() - needed:
            self._deregister(self._spans.pop(span))

    def post_read(self, remote: bytes, local: Sequence[torch.Tensor], *, digest: bool = False) -> Work:
        with self.lock:
            self._check_open()
            export = _wire.decode(remote, Export)
            theirs, segments = _wire.table_of(export.tensors), _wire.table_of(export.segments)
            key = tuple((tensor.data_ptr(), tensor.nbytes) for tensor in local)
            mine = np.array(key, dtype=np.uint64).reshape(-1, 2)
            if theirs.shape != mine.shape or not bool((theirs[:, 1] == mine[:, 1]).all()):
                return NixlWork().end(TransportError("The tensors to fill have other sizes than the exported ones."))
            spans = self._cover(local)
            known = self._kept.get(key)
            self._keep(key, known if known is not None and known.spans == spans else _Kept(b"", spans))
            own = np.array(sorted((span.start, span.nbytes) for span in spans), dtype=np.uint64).reshape(-1, 2)
            here, there = merge(mine, theirs, own, segments)
            if not len(here):
                return NixlWork().end()
            return self._read(export, here, there)

    def _read(self, export: Export, here: _wire.Table, there: _wire.Table) -> Work:
        rows = [
            np.column_stack([table, np.full(len(table), ordinal, dtype=np.uint64)])
            for table, ordinal in ((here, self._ordinal), (there, export.ordinal))
        ]
        self._load(export.agent, export.metadata, export.owner)
        with translated(f"{self._label}: a READ of {len(here)} ranges", peer=export.owner):
            local = self._agent.get_xfer_descs(rows[0], self._kind)
            remote = self._agent.get_xfer_descs(rows[1], export.memory)
            return self._post("READ", local, remote, NixlWork(export.agent))

    # End

    def close(self) -> None:
        with self.lock, self._on_device():
            if self._closed:
                return
            for channel in [*self._senders.values(), *([self._receiver] if self._receiver is not None else [])]:
                channel.close()
            self._flush()
            self._closed = True
            self._end_agent()
            for memory in self._regions.values():
                memory.give_back()
            for work in self._works:
                work.end(EndpointClosed(f"{self._label} was closed with the operation under way."))
            for owner in (self._regions, self._spans, self._kept, self._works, self._senders, self._loaded):
                owner.clear()

    def _flush(self) -> None:
        """Give last words a moment to leave."""
        for _ in range(10):
            self.progress()

    def _end_agent(self) -> None:
        """Handles, registrations, agent. What fails here cannot be helped: the agent's end frees it."""
        for release in [
            *(work.handle.release for work in self._works if work.handle is not None),
            *(lambda r=memory.registration: self._deregister(r) for memory in self._regions.values()),
            *(lambda r=registration: self._deregister(r) for registration in self._spans.values()),
        ]:
            try:
                release()
            except Exception as exc:
                logger.debug("%s: closing: %s", self._label, exc)
        for work in self._works:
            work.handle = None
        for memory in self._regions.values():
            memory.registration = None
        self._spans.clear()
        self._agent.agent = None  # the last reference to the library's own object: destroys it now
        self._agent = None

    def _check_open(self) -> None:
        if self._closed:
            raise EndpointClosed(f"The endpoint of {self._label} is closed.")


_EXPANDABLE = (
    "memory of expandable segments has no IPC handle: start without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, "
    "or let weightbus allocate the buckets; else set UCX_LOG_LEVEL=info to see UCX's reason."
)


def merge(
    mine: _wire.Table, theirs: _wire.Table, own: _wire.Table, segments: _wire.Table
) -> tuple[_wire.Table, _wire.Table]:
    """Join neighbours: rows that follow on from each other on both sides, inside one registration on both sides.

    Args:
        mine, theirs: ``[n, 2]`` (address, bytes), equal lengths row by row; rows without bytes are dropped.
        own, segments: the registered ranges of either side, sorted by address.
    """
    filled = mine[:, 1] > 0
    mine, theirs = mine[filled], theirs[filled]
    if not len(mine):
        return mine, theirs
    if not len(segments) or not len(own):
        raise RemoteProtocolError("An export names tensors without the memory that holds them.")
    joins: Any = np.ones(len(mine) - 1, dtype=bool)
    for table, ranges in ((mine, own), (theirs, segments)):
        place: Any = np.searchsorted(ranges[:, 0], table[:, 0], side="right")
        joins &= (table[:-1, 0] + table[:-1, 1] == table[1:, 0]) & (place[:-1] == place[1:])
    first = np.flatnonzero(np.concatenate([[True], ~joins]))
    lengths = np.add.reduceat(mine[:, 1], first)
    return np.column_stack([mine[first, 0], lengths]), np.column_stack([theirs[first, 0], lengths])


def slow_link(gbps: float, *, near: bool, cuda: bool, tls: str, copy_gbps: float) -> str:
    """What makes a link slow and what to do; empty when the rate is what its path should give.

    Args:
        copy_gbps: this host's calibrated copy. A path through host memory should give a fortieth: the few MiB of the
            measurement are new to it, and the host may be busy. On GPUs their latency rules, so that a constant serves.
    """
    only_tcp = bool(tls) and not tls.startswith("^") and set(tls.split(",")) <= {"tcp", "self"}
    if cuda and only_tcp:
        return (
            f"UCX_TLS={tls} moves device memory over TCP: unset it, or add cuda_copy,cuda_ipc and the RDMA transports."
        )
    if near and only_tcp:
        return f"UCX_TLS={tls} uses TCP on one host: unset it, or add shm and cma."
    floor = (5.0 if cuda else copy_gbps / 40) if near else (1.0 if cuda else 0.1)
    if gbps >= floor:
        return ""
    if cuda and near:
        cause = "device memory is copied through the host: give both processes the same CUDA devices and IPC namespace"
    elif near:
        cause = "shared memory and CMA do not work between these processes (ptrace scope, PID namespace, /dev/shm)"
    else:
        cause = "the network is slow, or UCX took a slow device: set UCX_NET_DEVICES or the option devices"
    return f"At least {floor:.1f} GB/s is usual here; likely: {cause}; or the host was busy."
