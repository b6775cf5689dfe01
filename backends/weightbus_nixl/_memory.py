"""Buckets' memory: plain device allocations, pinned host memory, and what range a tensor's allocation spans."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import torch

from weightbus.errors import TransportError

# CUpointer_attribute, see cuda.h
_BUFFER_ID, _LEGACY_IPC, _RANGE_START, _RANGE_SIZE = 7, 10, 11, 12


@attrs.frozen
class Span:
    """A whole allocation.

    Attributes:
        start: its address.
        nbytes: its size.
        identity: differs for two allocations that stood at the same address one after the other.
        keep: holds host memory while it is registered; None for CUDA, whose identity tells a new allocation.
    """

    start: int
    nbytes: int
    identity: int
    keep: Any = attrs.field(default=None, eq=False, hash=False, repr=False)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *args: Any) -> None:
    code = getattr(_driver(), function)(*args)
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise TransportError(f"{function} failed with {(text.value or b'?').decode()} ({code}).")


def span_of(tensor: torch.Tensor) -> Span:
    """The allocation that holds `tensor`: the storage on the host, the caching allocator's segment on CUDA."""
    if not tensor.is_cuda:
        storage = tensor.untyped_storage()
        return Span(storage.data_ptr(), storage.nbytes(), 0, storage)
    values = []
    for attribute in (_RANGE_START, _RANGE_SIZE, _BUFFER_ID):
        value = ctypes.c_uint64()
        _call("cuPointerGetAttribute", ctypes.byref(value), attribute, ctypes.c_uint64(tensor.data_ptr()))
        values.append(value.value)
    return Span(*values)


def can_share(tensor: torch.Tensor) -> bool:
    """False for CUDA memory that has no IPC handle, as that of expandable segments."""
    flag = ctypes.c_int()
    _call("cuPointerGetAttribute", ctypes.byref(flag), _LEGACY_IPC, ctypes.c_uint64(tensor.data_ptr()))
    return bool(flag.value)


class _DeviceArray:
    """Lets torch see a raw device allocation."""

    def __init__(self, at: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (at, False), "version": 3}


def allocate(nbytes: int, device: torch.device) -> tuple[torch.Tensor, Callable[[], None]]:
    """``[nbytes]`` uint8 on `device`, and the function that gives it back.

    Device memory is allocated past torch's caching allocator: a segment of its own, which has an IPC handle even under
    expandable segments. Host memory is page-locked where this process uses CUDA.

    Raises:
        TransportError: out of memory, or it cannot be page-locked.
    """
    try:
        return _device(nbytes, device) if device.type == "cuda" else _host(nbytes)
    except (RuntimeError, MemoryError, OSError, TransportError) as exc:
        what = f"No {nbytes} bytes on {device} for a bucket: {exc}"
        raise TransportError(what, advice="lower bucket_bytes or slots, or free memory there.") from exc


def _device(nbytes: int, device: torch.device) -> tuple[torch.Tensor, Callable[[], None]]:
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the primary context current in this thread
        at = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(max(nbytes, 1)))
        tensor = torch.as_tensor(_DeviceArray(at.value, nbytes), device=device)

    def give_back() -> None:
        with torch.cuda.device(device):
            _call("cuMemFree_v2", at)

    return tensor, give_back


def _host(nbytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    if not nbytes or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return tensor, lambda: None
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(tensor.data_ptr(), nbytes, 0))
    if code != 0:
        raise TransportError(f"cudaHostRegister failed with code {code}; is `ulimit -l` large enough?")

    def give_back(keep: torch.Tensor = tensor) -> None:
        runtime.cudaHostUnregister(keep.data_ptr())

    return tensor, give_back
