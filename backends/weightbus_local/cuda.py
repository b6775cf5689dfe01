"""The few calls of the CUDA driver that IPC needs, by ctypes: no library beside the driver and torch is needed.

Every call pushes the device's primary context, the one torch uses, so any thread may call.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from weightbus.errors import BackendUnavailable, RemoteProtocolError, TransportError

_BUFFER_ID, _IPC_CAPABLE = 7, 10  # CUpointer_attribute
_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1
_PAGE = 2 << 20  # smaller allocations may share a page, and a handle gives the page away
_WIRE = struct.Struct("<16s64sQQQ")
EXPANDABLE_ADVICE = (
    "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in the process that owns the tensors, "
    "or use the streamed mode (direct=False)."
)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


@attrs.frozen
class Span:
    """An allocation as it is offered to another process.

    Attributes:
        uuid: of the device, 16 bytes.
        handle: CUDA IPC handle of the allocation, 64 bytes.
        base: its address in the owner's process.
        offset: where the offered bytes begin in it.
        nbytes: how many are offered.
    """

    uuid: bytes
    handle: bytes
    base: int
    offset: int
    nbytes: int

    def pack(self) -> bytes:
        return _WIRE.pack(self.uuid, self.handle, self.base, self.offset, self.nbytes)

    @classmethod
    def unpack(cls, data: bytes) -> Span:
        if len(data) != _WIRE.size:
            raise RemoteProtocolError("The description of a CUDA region has a wrong length.")
        return cls(*_WIRE.unpack(data))


class CudaMemory:
    """Device memory that torch does not own; given back when the last tensor over it has died."""

    def __init__(self, ptr: int, nbytes: int, device: int, give_back: Callable[[], None] | None) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self.device = torch.device("cuda", device)
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "strides": None, "version": 2,
        }  # fmt: skip
        if give_back is not None:
            weakref.finalize(self, _in_process, os.getpid(), give_back).atexit = False

    def tensor(self) -> torch.Tensor:
        """``[nbytes]`` uint8 over it, without a copy."""
        try:
            tensor = torch.as_tensor(self, device=self.device)
        except RuntimeError as exc:
            raise TransportError(
                f"torch cannot wrap memory on {self.device}: {exc}", advice="torch needs numpy for it."
            ) from exc
        if tensor.data_ptr() != self.ptr:
            raise TransportError(f"torch places memory at {self.ptr:#x} on another device than {self.device}.")
        return tensor


def _in_process(pid: int, give_back: Callable[[], None]) -> None:
    if os.getpid() == pid:  # a forked child owns nothing
        try:
            give_back()
        except TransportError:
            pass  # a finalizer has no one to tell; the driver takes it back with the process


class Driver:
    """libcuda, with contexts and errors handled."""

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as exc:
            raise BackendUnavailable(
                "The CUDA driver (libcuda.so.1) cannot be loaded.",
                advice="Install the NVIDIA driver, or use device='cpu'.",
            ) from exc
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", ctypes.c_uint(0))

    def _call(self, name: str, *args: Any, advice: str | None = None) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise TransportError(f"{name} failed: {(text.value or b'unknown').decode()} ({code})", advice=advice)

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """The primary context of torch's device number `device`, current in this thread."""
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(device))
            self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        return device

    @functools.cache  # noqa: B019 -- one Driver per process
    def uuid(self, device: int) -> bytes:
        """Names the GPU under any CUDA_VISIBLE_DEVICES."""
        uuid = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), self._device(device))
        return bytes(uuid)

    def device_of(self, uuid: bytes) -> int:
        """torch's number of the GPU `uuid`.

        Raises:
            TransportError: it is not visible here.
        """
        for device in range(torch.cuda.device_count()):
            if self.uuid(device) == uuid:
                return device
        raise TransportError(
            f"The peer's memory is on GPU {uuid.hex()}, which this process does not see.",
            advice="Let both processes see that GPU (CUDA_VISIBLE_DEVICES), or use the backend 'nccl' or 'nixl'.",
        )

    def allocate(self, device: int, nbytes: int) -> CudaMemory:
        """New memory outside torch's allocator, so that no cache can hand it on while a peer has it open."""
        ptr = ctypes.c_uint64()
        size = -(-max(nbytes, 1) // _PAGE) * _PAGE
        with self.context(device):
            advice = f"{nbytes} bytes were asked for on cuda:{device}: set a smaller bucket_bytes, or fewer slots."
            self._call("cuMemAlloc_v2", ctypes.byref(ptr), ctypes.c_size_t(size), advice=advice)
        return CudaMemory(ptr.value, size, device, functools.partial(self._free, device, ptr.value))

    def _free(self, device: int, ptr: int) -> None:
        with self.context(device):
            self._call("cuMemFree_v2", ctypes.c_uint64(ptr))

    def range_of(self, device: int, ptr: int) -> tuple[int, int]:
        """(base, bytes) of the allocation around `ptr`."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self.context(device):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(ptr))
        return base.value, size.value

    def buffer_ids(self, device: int, pointers: Sequence[int]) -> list[int]:
        """One for each allocation of this process; never the same for two, also at one address."""
        value, found = ctypes.c_ulonglong(), []
        ask, where, what = self._lib.cuPointerGetAttribute, ctypes.byref(value), ctypes.c_int(_BUFFER_ID)
        with self.context(device):
            for ptr in pointers:
                value.value = 0  # no allocation has it
                ask(where, what, ctypes.c_uint64(ptr))
                found.append(value.value)
        return found

    def span(self, device: int, ptr: int, nbytes: int) -> Span:
        """Offer ``[ptr, ptr + nbytes)`` of an allocation of this process.

        Raises:
            TransportError: the allocation cannot be shared (expandable segments), or the bytes are not in one.
        """
        capable = ctypes.c_int()
        handle = _Handle()
        with self.context(device):
            self._call("cuPointerGetAttribute", ctypes.byref(capable), ctypes.c_int(_IPC_CAPABLE), ctypes.c_uint64(ptr))
            if not capable.value:
                raise TransportError(
                    f"Memory at {ptr:#x} on cuda:{device} cannot be shared by CUDA IPC.", advice=EXPANDABLE_ADVICE
                )
            base, size = self.range_of(device, ptr)
            if ptr + nbytes > base + size:
                raise TransportError(f"{nbytes} bytes at {ptr:#x} on cuda:{device} are not in one allocation.")
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return Span(self.uuid(device), bytes(handle), base, ptr - base, nbytes)

    def open(self, span: Span, *, same_process: bool) -> CudaMemory:
        """The offered bytes' whole allocation up to their end, opened here.

        A handle cannot be opened by its own exporter: there the memory is used directly, and the owner keeps it alive.
        """
        device = self.device_of(span.uuid)
        end = max(span.offset + span.nbytes, 1)
        if same_process:
            return CudaMemory(span.base, end, device, None)
        ptr = ctypes.c_uint64()
        with self.context(device):
            self._call(
                "cuIpcOpenMemHandle_v2", ctypes.byref(ptr), _Handle.from_buffer_copy(span.handle),
                ctypes.c_uint(_LAZY_PEER_ACCESS),
                advice="The peer may have died, or containers may not share the GPU's IPC (--ipc=host).",
            )  # fmt: skip
        memory = CudaMemory(ptr.value, end, device, functools.partial(self._close, device, ptr.value))
        base, size = self.range_of(device, ptr.value)
        if ptr.value + end > base + size:
            raise RemoteProtocolError(f"The peer offers {end} bytes of an allocation of {size}.")
        return memory

    def _close(self, device: int, ptr: int) -> None:
        with self.context(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(ptr))


@functools.cache
def driver() -> Driver:
    """The one driver of this process.

    Raises:
        BackendUnavailable: there is none.
    """
    return Driver()
