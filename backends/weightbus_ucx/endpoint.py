"""An endpoint: one UCX context and worker, the socket where lanes are opened, and the memory."""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from weightbus.backend import LANE_KEY_BYTES, Channel, Endpoint, EndpointSpec, Region
from weightbus.deadline import Deadline
from weightbus.errors import (
    BackendUnavailable,
    ConnectError,
    EndpointClosed,
    LocalProtocolError,
    RemoteProtocolError,
    TransferTimeout,
    TransportError,
    map_exceptions,
)
from weightbus_ucx.channel import MAX_SLOTS, Peer, ReceiveChannel, SendChannel, UcxChannel, lane_tag
from weightbus_ucx.library import Library, environment_kept, settings_for
from weightbus_ucx.link import VERSION, Address, Hello, Kind, Link, Welcome, decode, encode
from weightbus_ucx.memory import Block, allocate

_MAX_STRANGERS = 64
_HELLO_S = 10.0
_STEP_S = 0.002
_FENCE_S = 5.0
_IDLE_S = 0.1
_IDLE_CALLS = 1000  # time alone would count that of other processes
_WAIT_S = 0.005


@attrs.frozen(kw_only=True)
class Options:
    """`backend_options`.

    Attributes:
        tls: UCX's list of transports for this backend; None leaves it to ``UCX_TLS`` or UCX.
        progress: ``"event"`` wakes the bus thread by a descriptor, ``"poll"`` has it ask all the time.
        config: further UCX settings without the prefix ``UCX_``; they reach this backend's contexts only.
        link_timeout_s: seconds of silence of the peer's host after which it is lost. A stopped process is not silence.
    """

    tls: str | None = None
    progress: str = "event"
    config: dict[str, str] = attrs.field(factory=dict)
    link_timeout_s: float = 10.0


class UcxEndpoint(Endpoint):
    """See `weightbus.backend.Endpoint`. CUDA memory must be ready (its stream synchronised) when it is posted.

    UCX progresses inside `progress` only; there is no thread of ours. `lock` is held by whoever uses the worker.
    """

    def __init__(self, spec: EndpointSpec, library: Library, options: Options) -> None:
        super().__init__(spec)
        self.library, self._options = library, options
        self.lock = threading.RLock()
        self.is_closed = False
        self.worker: Any = None
        self.worker_address = b""
        self._context: Any = None
        self._epoll = select.epoll()
        self._listener: socket.socket | None = None
        self._address = b""
        self._receiving: ReceiveChannel | None = None
        self._sending: list[SendChannel] = []
        self._strangers: dict[Link, float] = {}
        self._retired: list[tuple[Peer, Any]] = []
        self._blocks: dict[Region, Block] = {}
        self._threads: set[int] = set()
        self._device_index = spec.device.index
        if spec.device.type == "cuda" and self._device_index is None:
            self._device_index = torch.cuda.current_device()
        if spec.role == "receive" or spec.host is not None:
            self._open(spec.host or "")

    # Library

    def _open(self, near: str) -> None:
        """Make context and worker, once; `near` is an address of the family to be spoken."""
        if self.worker is not None:
            return
        self._enter_device()
        cuda = self.spec.device.type == "cuda"
        settings = settings_for(self.spec.host, cuda=cuda, tls=self._options.tls, config=self._options.config)
        if ":" in near:
            settings.setdefault("TCP_AF_PRIO", "inet6,inet")
        advice = f"look at UCX's own message above, and at UCX_TLS={os.environ.get('UCX_TLS', '(unset)')}, {settings}."
        with map_exceptions({self.library.error: BackendUnavailable}, advice=advice), environment_kept():
            api = self.library.api
            self._context = api.UCXContext(settings, feature_flags=(api.Feature.TAG, api.Feature.WAKEUP))
            self.worker = api.UCXWorker(self._context)
        if cuda and not self._context.cuda_support:
            raise BackendUnavailable("This libucx has no CUDA support.", advice="install libucx for torch's CUDA.")
        self.worker_address = bytes(self.worker.address)
        if self._options.progress == "event":
            self.worker.init_blocking_progress_mode()
            self._epoll.register(self.worker.epoll_file_descriptor, select.EPOLLIN)

    def _enter_device(self) -> None:
        """UCX needs the CUDA context to be current on the thread that calls it."""
        if self.spec.device.type == "cuda" and threading.get_ident() not in self._threads:
            torch.cuda.set_device(self._device_index)
            self._threads.add(threading.get_ident())

    def message(self, buffer: Any, tag: int) -> tuple[Any, Any]:
        """The arguments of ``tag_send`` and ``tag_recv``."""
        if isinstance(buffer, torch.Tensor) and not buffer.is_cuda:
            buffer = buffer.numpy()
        return self.library.array(buffer), self.library.api.UCXXTag(tag)

    def reach(self, worker: bytes, peer: str) -> Peer:
        """A UCX endpoint to the worker with this address.

        Raises:
            ConnectError: no transport reaches it.
        """
        advice = "both sides need a common transport: compare UCX_TLS, the option tls, and the hosts' addresses."
        with map_exceptions({self.library.error: ConnectError, ValueError: ConnectError}, peer=peer, advice=advice):
            address = self.library.api.UCXAddress.create_from_buffer(worker)
            return Peer(self.library.api.UCXEndpoint.create_from_worker_address(self.worker, address, True))

    def retire(self, peer: Peer, *kept: Any) -> None:
        """Close a UCX endpoint that got no lane; `kept` lives until the worker goes."""
        peer.close()
        self._retired.append((peer, kept))

    def let_go(self, peer: Peer) -> None:
        """Close a UCX endpoint, and have ``ucxx`` drop what was posted to it and has ended."""
        peer.close()
        self.worker.cancel_inflight_requests()
        self.library.let_go(peer.endpoint)

    def forget(self, link: Link) -> None:
        """Close a link."""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(link.fileno())
        link.close()

    def check_open(self) -> None:
        if self.is_closed:
            raise EndpointClosed(f"The endpoint of {self.spec.name} is closed.")

    # Memory

    @property
    def address(self) -> bytes:
        if not self._address:
            raise LocalProtocolError(f"{self.spec.name} has no address before it listens.")
        return self._address

    def allocate(self, nbytes: int) -> Region:
        self.check_open()
        block = allocate(self.spec.device, nbytes)
        region = Region(block.tensor)
        self._blocks[region] = block
        return region

    def register(self, tensor: torch.Tensor) -> Region:
        self.check_open()
        if tensor.dtype != torch.uint8 or not tensor.is_contiguous() or tensor.device.type != self.spec.device.type:
            raise LocalProtocolError(
                f"A region is contiguous uint8 on {self.spec.device}, not {tensor.dtype} with strides "
                f"{tensor.stride()} on {tensor.device}."
            )
        return Region(tensor.view(-1))

    def free(self, region: Region) -> None:
        block = self._blocks.pop(region, None)
        if block is not None:
            block.free()

    # Receiver side

    def listen(self, lane_key: bytes, slots: Sequence[Region]) -> Channel:
        with self.lock:
            self.check_open()
            if self._receiving is not None or len(lane_key) != LANE_KEY_BYTES or len(slots) > MAX_SLOTS:
                raise LocalProtocolError(
                    f"{self.spec.name}: one lane an endpoint, a key of {LANE_KEY_BYTES} bytes, {MAX_SLOTS} slots."
                )
            self._open(self.spec.host or "")
            host = self.spec.host or _address_of_this_host()
            with map_exceptions({OSError: TransportError}, advice=f"is {host} an address of this host?"):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._listener = socket.create_server((host, 0), family=family, backlog=_MAX_STRANGERS)
            self._listener.setblocking(False)
            self._epoll.register(self._listener, select.EPOLLIN)
            self._address = encode(Address(host=host, port=self._listener.getsockname()[1]))
            self._receiving = ReceiveChannel(self, lane_key, slots)
            return self._receiving

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            link = Link(sock, self._options.link_timeout_s)
            self._epoll.register(link.fileno(), select.EPOLLIN)
            self._strangers[link] = time.monotonic() + _HELLO_S
            if len(self._strangers) > _MAX_STRANGERS:
                self._refuse(next(iter(self._strangers)))

    def _refuse(self, link: Link) -> None:
        self._strangers.pop(link, None)
        self.forget(link)

    def _meet(self, link: Link) -> None:
        """Take the first frame of a stranger: admit it, or close its connection."""
        try:
            frames = link.frames()
            if not frames and not link.lost:
                return
            hello = decode(frames[0][1], Hello) if frames and frames[0][0] is Kind.HELLO else None
            known = hello is not None and self._knows(hello)
            if hello is None or not known or self._receiving is None:
                raise RemoteProtocolError("Not a sender of this lane.")
            del self._strangers[link]
            self._receiving.admit(link, hello, os.urandom(16))
        except (RemoteProtocolError, ConnectError):
            self._refuse(link)

    def _knows(self, hello: Hello) -> bool:
        lane = self._receiving
        same = lane is not None and hmac.compare_digest(lane.lane_key, hello.lane_key)
        return same and lane is not None and lane.free and hello.version == VERSION

    # Sender side

    def connect(self, address: bytes, lane_key: bytes, timeout: float) -> Channel:
        deadline = Deadline.after(timeout)
        self.check_open()
        try:
            target = decode(address, Address)
        except RemoteProtocolError as exc:
            raise ConnectError("The address is not one of backend ucx.", phase="connect") from exc
        if target.version != VERSION:
            raise ConnectError(f"The peer speaks version {target.version}, this side {VERSION}.", phase="connect")
        link = Link(_dial(target, deadline), self._options.link_timeout_s)
        with self.lock:
            self.check_open()
            self._open(target.host)
            self._epoll.register(link.fileno(), select.EPOLLIN)
        try:
            return self._introduce(link, target, lane_key, deadline)
        except RemoteProtocolError as exc:
            self.forget(link)
            raise ConnectError(f"{target.host}:{target.port} is no receiver of ucx: {exc}", phase="connect") from exc
        except BaseException:
            self.forget(link)
            raise

    def _introduce(self, link: Link, target: Address, lane_key: bytes, deadline: Deadline) -> SendChannel:
        where = f"{target.host}:{target.port}"
        hello = Hello(name=self.spec.name, incarnation=self.incarnation, lane_key=lane_key, worker=self.worker_address)
        link.send(Kind.HELLO, encode(hello))
        frames: list[tuple[Kind, bytes]] = []
        while not frames:
            self._await(deadline, where, "did not answer", link.lost)
            frames = link.frames()
        if frames[0][0] is not Kind.WELCOME:
            raise ConnectError(f"{where} answered with a {frames[0][0].name}.", phase="connect")
        welcome = decode(frames[0][1], Welcome)
        with self.lock:
            self.check_open()
            tag = lane_tag(lane_key, welcome.nonce, self.incarnation)
            channel = SendChannel(self, link, self.reach(welcome.worker, welcome.name), welcome, tag)
            self._sending.append(channel)
        try:
            while not channel.ready:
                lost = str(channel.error or "")
                self._await(deadline, where, f"({welcome.name}) got no UCX message from this side", lost)
        except BaseException:
            channel.close()
            raise
        return channel

    def _await(self, deadline: Deadline, where: str, what: str, lost: str) -> None:
        """One turn of waiting inside `connect`."""
        self.check_open()
        if lost:
            advice = "the lane key may be another's, the lane taken, or its receiver closed."
            raise ConnectError(f"{where} closed the connection: {lost}.", phase="connect", advice=advice)
        if deadline.expired:
            advice = "is its process alive, and do both sides have a common UCX transport (UCX_TLS)?"
            raise TransferTimeout(f"{where} {what} in time.", phase="connect", advice=advice)
        if not self.progress():
            self.wait(deadline.remaining_s(at_most=_WAIT_S))

    # Both

    def progress(self) -> bool:
        with self.lock:
            if self.is_closed or self.worker is None:
                return False
            self._enter_device()
            moved = self._advance()
            ready = {fd for fd, _ in self._epoll.poll(0)}
            if self._listener is not None and self._listener.fileno() in ready:
                self._accept()
            for link in [link for link in self._strangers if link.fileno() in ready]:
                self._meet(link)
            for link in [link for link, until in self._strangers.items() if time.monotonic() > until]:
                self._refuse(link)
            for channel in self._channels():
                moved |= channel.step(ready)
            for channel in [channel for channel in self._sending if channel.finished]:
                channel.forget()
                self._sending.remove(channel)
            if not moved and self._options.progress == "event":
                moved = not self.worker.arm()
            return moved

    def _advance(self) -> bool:
        """Let UCX work, but not for ever: a fast peer could keep it busy for a whole refit."""
        moved, until = False, time.monotonic() + _STEP_S
        while self.worker.progress_once():
            moved = True
            if time.monotonic() > until:
                break
        return moved

    def settle(self, busy: Callable[[], bool]) -> None:
        """Let UCX work until nothing is `busy`, or until it has had nothing to do for a while.

        A copy must not be cut short: UCX aborts the process when a worker goes that has one in hand.
        """
        until = time.monotonic() + _FENCE_S
        idle_until, misses = time.monotonic() + _IDLE_S, 0
        while busy() and time.monotonic() < until:
            if self.worker.progress_once():
                idle_until, misses = time.monotonic() + _IDLE_S, 0
            misses += 1
            if misses > _IDLE_CALLS and time.monotonic() > idle_until:
                return

    def _channels(self) -> list[SendChannel | ReceiveChannel]:
        return [*self._sending, *([self._receiving] if self._receiving is not None else [])]

    def wait(self, timeout_s: float) -> None:
        """Block until `progress` has something to do, or `timeout_s` has passed. Not on the bus thread."""
        with contextlib.suppress(ValueError, OSError):
            self._epoll.poll(timeout_s if self._options.progress == "event" else 0)

    def fds(self) -> list[int]:
        return [self._epoll.fileno()] if self._options.progress == "event" and not self.is_closed else []

    def close(self) -> None:
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            channels: list[UcxChannel] = [*self._channels()]
            for channel in channels:
                channel.close()
            for link in list(self._strangers):
                self._refuse(link)
            if self._listener is not None:
                self._listener.close()
            self._end_worker(channels)
            self._epoll.close()
            for block in self._blocks.values():
                block.free()
            self._blocks.clear()

    def _end_worker(self, channels: Sequence[UcxChannel]) -> None:
        """After this nothing of UCX reads or writes memory for this endpoint."""
        if self.worker is not None:
            for channel in channels:
                channel.leave()
        for channel in channels:
            channel.forget()
        for peer, _ in self._retired:
            self.let_go(peer)
        self._retired.clear()
        self._sending, self._receiving = [], None
        self.worker = self._context = None


def _dial(target: Address, deadline: Deadline) -> socket.socket:
    where = f"{target.host}:{target.port}"
    try:
        return socket.create_connection((target.host, target.port), timeout=max(deadline.remaining_s(), 0.001))
    except TimeoutError as exc:
        raise TransferTimeout(f"{where} did not answer in time.", phase="connect") from exc
    except (OSError, OverflowError, UnicodeError) as exc:
        advice = "is the receiver alive, and its host reachable from here?"
        raise ConnectError(f"{where} cannot be reached: {exc}", phase="connect", advice=advice) from exc


def _address_of_this_host() -> str:
    """The address from which packets to other hosts leave; loopback without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("10.255.255.255", 9))  # a datagram socket sends nothing by this
            return str(sock.getsockname()[0])
        except OSError:
            return "127.0.0.1"
