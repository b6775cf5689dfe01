"""Backend `local`: endpoints, their memory and their addresses.

A bucket lives in memory of the sender that every reader maps; a post is one short message, and no byte is copied. So
with this backend a bucket may be changed only after the reader's credit, and receivers need no slots.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import msgspec
import torch

from weightbus.backend import (
    LANE_KEY_BYTES,
    MAX_ADDRESS_BYTES,
    Backend,
    Capabilities,
    Channel,
    Endpoint,
    EndpointSpec,
    Probe,
    Region,
    Work,
)
from weightbus.deadline import Deadline
from weightbus.errors import (
    BackendUnavailable,
    ConfigError,
    ConnectError,
    EndpointBusy,
    EndpointClosed,
    LocalProtocolError,
    TransferTimeout,
    TransportError,
    WeightBusError,
)
from weightbus_local.channel import Offer, ReceiveChannel, SendChannel, sweep
from weightbus_local.cuda import EXPANDABLE_ADVICE, driver
from weightbus_local.host import HostMemory, boot_id, network_namespace, ptrace_scope
from weightbus_local.pull import Exporter, Puller
from weightbus_local.wire import VERSION, Frame, Kind, Link, Poller, peer_of

_CLOSE_S = 0.5
_REMOTE_ADVICE = "Use the backend 'nixl' or 'ucx' between hosts."
_live: weakref.WeakSet[LocalEndpoint] = weakref.WeakSet()


@attrs.frozen
class Address:
    """Where a receiver listens.

    Attributes:
        version: of the protocol.
        boot: boot id of its kernel.
        network: its network namespace.
        socket_name: abstract, starting with a zero byte.
        name: for error texts.
        pid: for error texts.
    """

    version: int
    boot: str
    network: int
    socket_name: bytes
    name: str
    pid: int

    @classmethod
    def unpack(cls, data: bytes) -> Address:
        try:
            address = msgspec.msgpack.decode(data[:MAX_ADDRESS_BYTES], type=cls)
        except (msgspec.DecodeError, ValueError) as exc:
            raise ConnectError(f"This is no address of the backend local: {exc}") from exc
        if address.version != VERSION:
            raise ConnectError(f"The receiver speaks version {address.version} of this protocol, we speak {VERSION}.")
        return address

    def check_reachable(self) -> None:
        if self.boot != boot_id():
            raise ConnectError("The receiver is on another host.", peer=self.name, advice=_REMOTE_ADVICE)
        if self.network != network_namespace():
            raise ConnectError(
                "The receiver is on this host, but in another network namespace.",
                peer=self.name,
                advice="Run both containers in one network namespace (--network=host), or use 'nixl' or 'ucx'.",
            )


def _dial(address: Address, deadline: Deadline) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(address.socket_name)
                break
            except BlockingIOError as exc:
                if deadline.expired:
                    raise TransferTimeout("The receiver accepts no connection in time.", peer=address.name) from exc
                time.sleep(0.002)
        if peer_of(sock)[1] != os.getuid():
            raise ConnectError("The socket belongs to another user.", peer=address.name)
    except OSError as exc:
        sock.close()
        if isinstance(exc, WeightBusError):
            raise
        raise ConnectError(
            f"Nobody listens at the receiver's address (its pid was {address.pid}): {exc}",
            peer=address.name,
            advice="The receiver has closed, restarted, or is taken by another sender; ask it for a new address.",
        ) from exc
    except WeightBusError:
        sock.close()
        raise
    return sock


class LocalEndpoint(Endpoint):
    """One side. See `weightbus.backend.Endpoint`."""

    def __init__(self, spec: EndpointSpec) -> None:
        super().__init__(spec)
        self._device = spec.device
        if spec.device.type == "cuda" and spec.device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._poller = Poller()
        self._busy = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # always readable
        self._offers: dict[int, Offer] = {}
        self._regions = 0
        self._senders: list[SendChannel] = []
        self._receiver: ReceiveChannel | None = None
        self._exporter, self._puller = Exporter(), Puller()
        self._closed = False
        _live.add(self)
        sweep()

    def _check_open(self) -> None:
        if self._closed:
            raise EndpointClosed(f"The endpoint {self.spec.name} is closed.")

    @property
    def address(self) -> bytes:
        if self._receiver is None:
            raise LocalProtocolError(f"The endpoint {self.spec.name} has no address before it listens.")
        return msgspec.msgpack.encode(
            Address(
                VERSION, boot_id(), network_namespace(), self._receiver.socket_name, self.spec.name[:256], os.getpid()
            )
        )

    def allocate(self, nbytes: int) -> Region:
        """New memory that peers can map: populated now, so that the first refit does not pay for it."""
        self._check_open()
        if nbytes < 0:
            raise LocalProtocolError(f"{nbytes} bytes cannot be allocated.")
        if self._device.type == "cpu":
            host = HostMemory(nbytes)
            return self._offer(host.tensor, Kind.MAP_HOST, host, fd=host.fd)
        sweep()
        memory = driver().allocate(self._device.index, nbytes)
        span = driver().span(self._device.index, memory.ptr, nbytes)
        return self._offer(memory.tensor()[:nbytes], Kind.MAP_CUDA, memory, tail=span.pack())

    def register(self, tensor: torch.Tensor) -> Region:
        """Register the caller's CUDA tensor, of an allocator without expandable segments.

        Raises:
            TransportError: host memory that was not allocated here: another process cannot map it.
        """
        self._check_open()
        if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.numel():
            raise LocalProtocolError("A region is a contiguous uint8 tensor of one dimension that is not empty.")
        if not tensor.is_cuda:
            raise TransportError("Host memory of a caller cannot be mapped by a peer.", advice="Use allocate().")
        span = driver().span(tensor.device.index, tensor.data_ptr(), tensor.numel())
        return self._offer(tensor, Kind.MAP_CUDA, tensor, tail=span.pack())

    def _offer(self, tensor: torch.Tensor, kind: Kind, owner: Any, *, tail: bytes = b"", fd: int = -1) -> Region:
        self._regions += 1
        offer = Offer(Frame(kind, self._regions, 0, tensor.numel(), tail, fd), owner)
        self._offers[self._regions] = offer
        return Region(tensor, offer)

    def _owns(self, region: Region) -> bool:
        return isinstance(region.handle, Offer) and self._offers.get(region.handle.frame.region) is region.handle

    def free(self, region: Region) -> None:
        """Give a region back. CUDA memory goes back to the device once every reader has closed it or died."""
        if not self._owns(region):
            raise LocalProtocolError(f"The region is not one of the endpoint {self.spec.name}, or was freed before.")
        del self._offers[region.handle.frame.region]
        for channel in self._senders:
            channel.withdraw(region.handle)

    def listen(self, lane_key: bytes, slots: Sequence[Region]) -> Channel:
        """Receiver side: open the lane. `slots` are not used: what arrives is the sender's own memory."""
        self._check_open()
        if self._receiver is not None:
            raise EndpointBusy(f"The endpoint {self.spec.name} listens already.")
        self._receiver = ReceiveChannel(self._poller, lane_key, self.spec.name)
        return self._receiver

    def connect(self, address: bytes, lane_key: bytes, timeout: float) -> Channel:
        """Sender side: reach a receiver, and offer it all regions there are. A wrong lane key shows as PeerLost."""
        self._check_open()
        if len(lane_key) != LANE_KEY_BYTES:
            raise LocalProtocolError(f"A lane key has {LANE_KEY_BYTES} bytes, this has {len(lane_key)}.")
        where = Address.unpack(address)
        where.check_reachable()
        sock = _dial(where, Deadline.after(timeout))
        channel = SendChannel(Link(sock, self._poller, where.name), lane_key, self._owns)
        for offer in tuple(self._offers.values()):
            channel.offer(offer)
        for broken in [sender for sender in self._senders if sender.error is not None]:
            broken.close()
            self._senders.remove(broken)
        self._senders.append(channel)
        return channel

    def export(self, tensors: Sequence[torch.Tensor]) -> bytes:
        self._check_open()
        return self._exporter.export(tensors)

    def post_read(self, remote: bytes, local: Sequence[torch.Tensor], *, digest: bool = False) -> Work:
        self._check_open()
        return self._puller.post(remote, local, digest=digest)

    def progress(self) -> bool:
        if self._closed:
            return False
        moved = self._poller.run()
        return self._puller.progress() or moved if self._puller.pending else moved

    def fds(self) -> list[int]:
        if self._closed:
            return []
        return [self._poller.fileno(), *([self._busy] if self._puller.pending else [])]

    def close(self) -> None:
        """Close in order. Waits half a second at most for readers of CUDA memory; it is never freed under them."""
        if self._closed:
            return
        self._closed = True
        self._puller.close()
        for channel in self._senders:
            channel.close()
        if self._receiver is not None:
            self._receiver.close()
        self._senders.clear()
        self._offers.clear()
        self._poller.close()
        os.close(self._busy)
        sweep(_CLOSE_S)

    def abandon(self) -> None:
        """In a forked child: drop inherited sockets without a word, so that peers see the parent's death."""
        self._closed = True
        for channel in self._senders:
            channel.abandon()
        if self._receiver is not None:
            self._receiver.abandon()


def _abandon_all() -> None:
    for endpoint in list(_live):
        endpoint.abandon()


os.register_at_fork(after_in_child=_abandon_all)


class LocalBackend(Backend):
    """Shared memory of one host: a memfd for the CPU, CUDA IPC for a GPU. Takes no options."""

    name: ClassVar[str] = "local"
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        header_with_bytes=True,
        pull=True,
        in_process_pair=True,
        same_host_only=True,
        shares_memory=True,
    )

    def __init__(self, **options: Any) -> None:
        if options:
            raise ConfigError(f"The backend local takes no options; these are unknown: {', '.join(sorted(options))}.")

    def probe(self) -> Probe:
        reason = _unsupported()
        if reason:
            return Probe(ok=False, reason=reason, advice="Use the backend 'nixl' or 'ucx'.")
        facts = {"boot id": boot_id(), "network namespace": str(network_namespace()), "CUDA": "none"}
        warnings = []
        if ptrace_scope():
            warnings.append(
                f"kernel.yama.ptrace_scope is {ptrace_scope()}: direct mode cannot read host memory. "
                "Cure: sysctl kernel.yama.ptrace_scope=0, or the streamed mode."
            )
        try:
            if torch.cuda.is_available():
                gpus = range(torch.cuda.device_count())
                facts["CUDA"] = ", ".join(f"{torch.cuda.get_device_name(i)} {driver().uuid(i).hex()}" for i in gpus)
                warnings += _cuda_warnings()
        except (RuntimeError, WeightBusError) as exc:
            warnings.append(f"CUDA is present but does not work: {exc}")
        return Probe(ok=True, facts=facts, warnings=tuple(warnings))

    def endpoint(self, spec: EndpointSpec) -> LocalEndpoint:
        reason = _unsupported()
        if reason:
            raise BackendUnavailable(reason, advice="Use the backend 'nixl' or 'ucx'.")
        if spec.device.type not in self.capabilities.devices:
            raise BackendUnavailable(f"The backend local moves no memory of {spec.device}.")
        if spec.device.type == "cuda":
            if not torch.cuda.is_available():
                raise BackendUnavailable("torch sees no CUDA device.", advice="Use device='cpu', or a CUDA build.")
            driver()
        return LocalEndpoint(spec)

    def fingerprint(self) -> dict[str, str]:
        return {"protocol": str(VERSION)}


def _unsupported() -> str:
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "The backend local needs Linux with memfd_create."
    return ""


def _cuda_warnings() -> list[str]:
    warnings = []
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:True" in settings:
        warnings.append(f"torch allocates expandable segments: direct mode is refused. Cure: {EXPANDABLE_ADVICE}")
    try:
        import cupy  # noqa: F401
    except Exception:  # a broken installation raises anything
        warnings.append(
            "CuPy is missing: direct mode copies by torch, about a quarter slower. Cure: pip install 'weightbus[cuda]'"
        )
    return warnings
