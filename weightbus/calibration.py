"""How fast this machine copies within one memory: what reports and links are judged against."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time

import torch

_HOST_BYTES = 32 << 20
_CUDA_BYTES = 128 << 20
_ROUNDS = 3

_lock = threading.Lock()
_rates: dict[tuple[str, int], float | None] = {}


def copy_bytes_per_s(device: torch.device) -> float | None:
    """Bytes per second that a copy from `device`'s memory to itself moves: on the CPU by one thread, on CUDA by the GPU.

    Measured by the first call for a device in a process, about 20 ms; remembered after that. Buses call it when they are
    made, so that no refit pays for it. For that time it holds 64 MiB of host memory, or 256 MiB on the GPU, which stay in
    PyTorch's cache. From any thread.

    Not promised: a machine that is busy meanwhile calibrates low, and then what is judged looks better than it is. Copies
    between two memories (host to device, another socket) are not measured.

    Returns:
        None where there was no memory for it.
    """
    key = device.type, device.index or 0
    with _lock:  # two at once would share what is being measured
        if key not in _rates:
            try:
                _rates[key] = _cuda(device) if device.type == "cuda" else _host()
            except (OSError, MemoryError, torch.OutOfMemoryError):
                _rates[key] = None
        return _rates[key]


def _host() -> float:
    memory = mmap.mmap(-1, 2 * _HOST_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)  # else most of the time goes to making pages resident
    source = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    ctypes.memset(source, 1, 2 * _HOST_BYTES)
    best_s = float("inf")
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        ctypes.memmove(source + _HOST_BYTES, source, _HOST_BYTES)
        best_s = min(best_s, time.perf_counter() - start)
    return _HOST_BYTES / best_s


def _cuda(device: torch.device) -> float:
    with torch.cuda.device(device):
        source, target = torch.empty(2, _CUDA_BYTES, dtype=torch.uint8, device=device)
        best_ms = float("inf")
        for _ in range(_ROUNDS + 1):  # the first one warms up
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            best_ms = min(best_ms, start.elapsed_time(end))
    return _CUDA_BYTES / best_ms * 1e3
