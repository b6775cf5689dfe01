"""One side of a lane, driven step by step by a test: in this process, or with the same methods in a peer process.

Memory is written and read by its address, past the backend under test, so that a bug in sending cannot hide behind one
in reporting.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs
import torch

from weightbus.backend import Arrival, Backend, Channel, EndpointSpec, GroupSpec, Region, Work
from weightbus.errors import WeightBusError
from weightbus.testing.peers import ParentLink, Peer, PeerFailed, resolve

POISON = 0xA5
ANSWER_S = 60.0


def make_backend(name: str, options: Mapping[str, Any]) -> Backend:
    """A backend by its registered name, ``"module:Class"`` or ``"path/to/file.py:Class"``."""
    if ".py:" in name:
        return cast(Backend, resolve(name)(**options))
    from weightbus.registry import load_backend

    return load_backend(name, options)


def read_memory(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor, read by address."""
    host = tensor.detach().cpu()
    return ctypes.string_at(host.data_ptr(), host.nbytes) if host.nbytes else b""


def write_memory(tensor: torch.Tensor, data: bytes) -> None:
    """Overwrite the first bytes of a contiguous tensor, by address on the host."""
    if not data:
        return
    if tensor.is_cuda:
        flat = tensor.view(-1).view(torch.uint8)
        flat[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        torch.cuda.synchronize(tensor.device)
    else:
        ctypes.memmove(tensor.data_ptr(), data, len(data))


def resources() -> dict[str, int]:
    """How much this process holds that could leak: descriptors, threads, shared maps."""
    with open("/proc/self/maps") as maps:
        shared = sum(" rw-s " in line for line in maps)
    fds = sum(_is_open(int(fd)) for fd in os.listdir("/proc/self/fd"))
    return {"fds": fds, "threads": len(os.listdir("/proc/self/task")), "shared_maps": shared}


def shared_names() -> set[str]:
    """Names in /dev/shm that this process has mapped or open now."""
    with open("/proc/self/maps") as maps:
        paths = [line[line.index("/") :].strip() for line in maps if "/dev/shm/" in line]
    for fd in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the descriptor of the listing itself
            continue
    return {path.removeprefix("/dev/shm/") for path in paths if path.startswith("/dev/shm/")}


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@attrs.frozen(kw_only=True)
class Landed:
    """An arrival as plain data: `data` was read from the arrived region when it was handed on."""

    channel: int
    header: bytes
    slot: int
    nbytes: int
    data: bytes


@attrs.define
class _Connecting:
    thread: threading.Thread
    started_s: float
    took_s: float | None = None
    channel: Channel | None = None
    error: BaseException | None = None


class Side:
    """An endpoint with its memory, channels and operations, each named by its index. Arguments and results are plain.

    Args:
        backend: see `make_backend`.
        options: of the backend.
        spec: ``name``, ``role``, ``device`` (text) and ``host`` of the `EndpointSpec`.
    """

    def __init__(self, backend: str, options: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
        device = torch.device(str(spec.get("device", "cpu")))
        self.backend = make_backend(backend, options)
        self.endpoint = self.backend.endpoint(EndpointSpec(**{**spec, "device": device}))
        self.device = device
        self.paused = False
        self.closed = False
        self._regions: list[Region] = []
        self._owned: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []
        self._channels: list[Channel] = []
        self._works: list[Work] = []
        self._connecting: list[_Connecting] = []
        self._held: list[tuple[int, Arrival]] = []
        self._landed: list[Landed] = []

    def pump(self) -> None:
        """One turn of a bus thread: progress, then collect what has landed. Nothing while `pause` is on."""
        if self.paused or self.closed:
            return
        self.endpoint.progress()
        for index, channel in enumerate(self._channels):
            for arrival in channel.arrivals():
                self._held.append((index, arrival))
                data = read_memory(arrival.region.tensor[: arrival.nbytes])
                landed = Landed(
                    channel=index, header=arrival.header, slot=arrival.slot, nbytes=arrival.nbytes, data=data
                )
                self._landed.append(landed)

    def pause(self, on: bool) -> None:
        """Stop or go on calling `progress` and `arrivals`, as a slow process would."""
        self.paused = on

    # Memory

    def allocate(self, count: int, nbytes: int) -> list[int]:
        """`count` new regions, filled with `POISON`."""
        return [self._add(self.endpoint.allocate(nbytes)) for _ in range(count)]

    def adopt(self, count: int, nbytes: int) -> list[int]:
        """`count` tensors of this test's own, registered; their memory outlives the endpoint."""
        self._owned += [torch.zeros(nbytes, dtype=torch.uint8, device=self.device) for _ in range(count)]
        return [self._add(self.endpoint.register(tensor)) for tensor in self._owned[-count:]]

    def _add(self, region: Region) -> int:
        write_memory(region.tensor, bytes([POISON]) * region.nbytes)
        self._regions.append(region)
        return len(self._regions) - 1

    def free(self, region: int) -> None:
        self.endpoint.free(self._regions[region])

    def write(self, region: int, data: bytes) -> None:
        write_memory(self._regions[region].tensor, data)

    def read(self, region: int) -> bytes:
        return read_memory(self._regions[region].tensor)

    def read_owned(self, index: int) -> bytes:
        """Memory of `adopt`, also once the endpoint is closed."""
        return read_memory(self._owned[index])

    def write_owned(self, index: int, data: bytes) -> None:
        write_memory(self._owned[index], data)

    def facts(self, region: int) -> dict[str, Any]:
        """Of one region: its tensor's address, dtype, shape, device type and contiguity."""
        tensor = self._regions[region].tensor
        return {
            "ptr": tensor.data_ptr(), "dtype": str(tensor.dtype), "shape": tuple(tensor.shape),
            "device": tensor.device.type, "contiguous": tensor.is_contiguous(), "nbytes": self._regions[region].nbytes,
        }  # fmt: skip

    # Lanes

    def incarnation(self) -> str:
        return self.endpoint.incarnation

    def address(self) -> bytes:
        return self.endpoint.address

    def listen(self, lane_key: bytes, slots: Sequence[int]) -> bytes:
        """Open the lane as its channel number ``len(channels)``; the address."""
        self._channels.append(self.endpoint.listen(lane_key, [self._regions[slot] for slot in slots]))
        return self.endpoint.address

    def begin_connect(self, address: bytes, lane_key: bytes, timeout: float) -> int:
        """Call `connect` on a helper thread, as core does; ask `connected`."""
        return self._begin(lambda: self.endpoint.connect(address, lane_key, timeout))

    def begin_group(self, group: Mapping[str, Any], slots: Sequence[int], timeout: float) -> int:
        """Call `connect_group` on a helper thread; `group` has the fields of `GroupSpec`."""
        regions = [self._regions[slot] for slot in slots]
        return self._begin(lambda: self.endpoint.connect_group(GroupSpec(**group), regions, timeout))

    def _begin(self, connect: Callable[[], Channel]) -> int:
        attempt = _Connecting(
            threading.Thread(target=lambda: self._connect(attempt, connect), daemon=True), time.monotonic()
        )
        self._connecting.append(attempt)
        attempt.thread.start()
        return len(self._connecting) - 1

    @staticmethod
    def _connect(attempt: _Connecting, connect: Callable[[], Channel]) -> None:
        try:
            attempt.channel = connect()
        except BaseException as exc:
            attempt.error = exc
        attempt.took_s = time.monotonic() - attempt.started_s

    def connected(self, attempt: int) -> tuple[float, int] | None:
        """None while it runs; else the seconds it took and the channel's number.

        Raises:
            what `connect` raised, with the seconds as a note.
        """
        connecting = self._connecting[attempt]
        if connecting.took_s is None:
            return None
        connecting.thread.join()
        if connecting.error is not None:
            raise connecting.error
        if connecting.channel is not None:
            self._channels.append(connecting.channel)
            connecting.channel = None
        return connecting.took_s, len(self._channels) - 1

    def post(self, channel: int, region: int, nbytes: int, header: bytes, slot: int) -> int:
        self._works.append(self._channels[channel].post_send(self._regions[region], nbytes, header, slot))
        return len(self._works) - 1

    def post_arrived(self, channel: int, index: int, slot: int) -> int:
        """`forward`: post the arrival number `index` on."""
        arrival = self._held[index][1]
        self._works.append(self._channels[channel].post_send(arrival.region, arrival.nbytes, arrival.header, slot))
        return len(self._works) - 1

    def post_recv(self, channel: int, slot: int, nbytes: int, header: bytes) -> None:
        self._channels[channel].post_recv(slot, nbytes, header)

    def state(self, work: int) -> str:
        return self._works[work].state.value

    def work_error(self, work: int) -> BaseException | None:
        return self._works[work].error

    def error(self, channel: int) -> Exception | None:
        return self._channels[channel].error

    def landed(self) -> list[Landed]:
        """What has arrived since the last call."""
        landed, self._landed = self._landed, []
        return landed

    def release(self) -> None:
        """Release every arrival not released so far."""
        for channel, arrival in self._held:
            self._channels[channel].release(arrival)
        self._held.clear()

    def drain(self, channel: int, timeout: float) -> tuple[bool, float]:
        """What `drain` says, and the seconds it took."""
        started = time.monotonic()
        return self._channels[channel].drain(timeout), time.monotonic() - started

    def close_channel(self, channel: int) -> None:
        self._channels[channel].close()

    def close(self) -> float:
        """Close the endpoint; the seconds it took. The memory of `adopt` stays."""
        for attempt in self._connecting:
            attempt.thread.join(ANSWER_S)
        self._held.clear()
        started = time.monotonic()
        self.closed = True
        self.endpoint.close()
        return time.monotonic() - started

    # Pull

    def make_tensors(self, specs: Sequence[tuple[tuple[int, ...], str]], fill: int) -> None:
        """Contiguous tensors of (shape, dtype), whose bytes are `fill`; they replace those before."""
        self._tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device=self.device) for shape, dtype in specs]
        for tensor in self._tensors:
            write_memory(tensor, bytes([fill]) * tensor.nbytes)

    def write_tensor(self, index: int, data: bytes) -> None:
        write_memory(self._tensors[index], data)

    def read_tensor(self, index: int) -> bytes:
        return read_memory(self._tensors[index])

    def export(self) -> bytes:
        return self.endpoint.export(self._tensors)

    def post_read(self, remote: bytes) -> int:
        self._works.append(self.endpoint.post_read(remote, self._tensors))
        return len(self._works) - 1


def host(link: ParentLink, environment: Mapping[str, str]) -> None:
    """The function of a peer process that serves sides: carries out commands, and pumps between them."""
    os.environ.clear()
    os.environ.update(environment)
    sides: dict[int, Side] = {}
    while True:
        for side in sides.values():
            side.pump()
        if not link.poll(0.0002):
            continue
        command, key, args = link.recv()
        try:
            answer: tuple[str, Any] = ("value", _carry_out(sides, command, key, args))
        except WeightBusError as exc:
            answer = ("raised", exc)
        except Exception:
            answer = ("foreign", traceback.format_exc())
        link.send(answer)
        if command == "end":
            return


def _carry_out(sides: dict[int, Side], command: str, key: int, args: Sequence[Any]) -> Any:
    if command == "end":
        return None
    if command == "resources":
        return resources()
    if command == "shared_names":
        return shared_names()
    if command == "side":
        sides[key] = Side(*args)
        return None
    if command == "forget":
        return sides.pop(key).close()
    return getattr(sides[key], command)(*args)


class Host:
    """A peer process in which sides live."""

    def __init__(self) -> None:
        self.peer = Peer("weightbus.testing.sides:host", (dict(os.environ),), method="forkserver")
        self._count = 0
        self._forgotten: set[int] = set()

    def side(self, backend: str, options: Mapping[str, Any], spec: Mapping[str, Any]) -> Side:
        """A `Side` over there. Its errors are raised here, with their type; foreign ones as `PeerFailed`."""
        self._count += 1
        self.call("side", self._count, backend, dict(options), dict(spec))
        return cast(Side, _FarSide(self, self._count))

    def resources(self) -> dict[str, int]:
        """What `resources` says over there."""
        return cast(dict[str, int], self.call("resources", 0))

    def shared_names(self) -> set[str]:
        """What `shared_names` says over there."""
        return cast(set[str], self.call("shared_names", 0))

    def forget(self) -> None:
        """Close every side over there and drop all references to it."""
        for key in range(1, self._count + 1):
            if key not in self._forgotten:
                self.call("forget", key)
                self._forgotten.add(key)

    def call(self, command: str, key: int, *args: Any) -> Any:
        self.peer.send((command, key, args))
        kind, value = self.peer.recv(ANSWER_S)
        if kind == "raised":
            raise value
        if kind == "foreign":
            raise PeerFailed(f"Peer process {self.peer.pid} raised an error that is not weightbus's own:\n{value}")
        return value

    def end(self) -> None:
        """Let the process end by itself, with exit code 0. Idempotent; a killed one is just put away."""
        try:
            if self.peer.alive:
                self.call("end", 0)
                self.peer.result(ANSWER_S)
        finally:
            self.peer.close()


class _FarSide:
    """Looks like a `Side`; every call goes to the peer process, which pumps by itself."""

    def __init__(self, owner: Host, key: int) -> None:
        self._owner, self._key = owner, key

    def pump(self) -> None:
        return

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self._owner.call(name, self._key, *args)
