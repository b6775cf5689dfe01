"""Memory of buckets: plain device allocations, pinned host memory."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from weightbus.errors import BackendUnavailable, TransportError


@attrs.define(eq=False)
class Block:
    """One allocation. `owner` keeps it alive, `pinned` is its address when CUDA has it registered."""

    tensor: torch.Tensor
    owner: Any = None
    pinned: int = 0

    def free(self) -> None:
        """Give it back; idempotent. The tensor must not be used afterwards."""
        if self.pinned:
            _cudart().cudaHostUnregister(self.pinned)
            self.pinned = 0
        self.owner = None


def allocate(device: torch.device, nbytes: int) -> Block:
    """`nbytes` uninitialised bytes on `device`.

    Raises:
        TransportError: there is not enough.
        BackendUnavailable: CUDA memory needs CuPy, which is missing.
    """
    try:
        return _on_cuda(device, nbytes) if device.type == "cuda" else _on_host(nbytes)
    except (RuntimeError, MemoryError) as exc:
        text = f"No {nbytes} bytes on {device} for a bucket: {exc}"
        raise TransportError(text, advice="lower bucket_bytes or slots.") from exc


def _on_cuda(device: torch.device, nbytes: int) -> Block:
    """Outside torch's caching allocator, whose segments CUDA IPC may not be able to export."""
    try:
        import cupy
    except ImportError as exc:
        raise BackendUnavailable("CUDA buckets need CuPy.", advice="pip install 'weightbus[cuda]'.") from exc
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        with cupy.cuda.Device(index):
            pointer = cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)
            array = cupy.ndarray((nbytes,), dtype=cupy.uint8, memptr=pointer)
            return Block(torch.as_tensor(array, device=torch.device("cuda", index)), owner=array)
    except cupy.cuda.runtime.CUDARuntimeError as exc:
        raise MemoryError(str(exc)) from exc


def _on_host(nbytes: int) -> Block:
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    if not nbytes or not torch.cuda.is_available():
        return Block(tensor)
    status = _cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0)
    if int(status):
        raise TransportError(
            f"CUDA cannot pin {nbytes} bytes of host memory for a bucket: {status}.",
            advice="raise the limit of locked memory (ulimit -l), or lower bucket_bytes or slots.",
        )
    return Block(tensor, pinned=tensor.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
