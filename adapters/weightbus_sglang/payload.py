"""What `/update_weights_from_tensor` takes: one flat bucket of bytes with a list of what lies where, pickled.

The pickle names only builtins, `types.SimpleNamespace` and torch: a class of ours would kill the server.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from weightbus.adapter import Batch
from weightbus.errors import EngineError

ALIGNMENT = 16
STORAGE_DEVICE = 6  # position of the device in the arguments of torch's rebuild_cuda_tensor


def flatten(batch: Batch) -> tuple[torch.Tensor, list[SimpleNamespace]]:
    """A bucket of all tensors of `batch`, copied, and what lies where.

    One copy where the tensors are views of one bucket with aligned offsets, else one per tensor.

    Returns:
        ``[nbytes]`` uint8 in memory of its own on the batch's device, and per tensor the attributes that the server
        reads: name, shape, dtype, and start_idx, end_idx, numel in bytes.
    """
    sizes = [int(tensor.nbytes) for _, tensor in batch]
    starts, region = _one_region(batch, sizes)
    if region is None:
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += -(-size // ALIGNMENT) * ALIGNMENT
        flat = torch.empty(max(total, 1), dtype=torch.uint8, device=batch[0][1].device)
        for start, size, (_, tensor) in zip(starts, sizes, batch, strict=True):
            flat[start : start + size].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
    else:
        flat = region.clone()
    items = [
        SimpleNamespace(
            name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=start + size, numel=size
        )
        for start, size, (name, tensor) in zip(starts, sizes, batch, strict=True)
    ]
    return flat, items


def _one_region(batch: Batch, sizes: Sequence[int]) -> tuple[list[int], torch.Tensor | None]:
    """Offsets and bytes of the region that holds all tensors, or None where they need copies one by one."""
    first = batch[0][1]
    storage = first.untyped_storage()
    offsets = []
    for _, tensor in batch:
        offset = tensor.storage_offset() * tensor.itemsize
        if tensor.untyped_storage().data_ptr() != storage.data_ptr() or not tensor.is_contiguous():
            return [], None
        if offset % ALIGNMENT:
            return [], None
        offsets.append(offset)
    start = min(offsets)
    length = max(offset + size for offset, size in zip(offsets, sizes, strict=True)) - start
    if not length or length > 2 * sum(sizes) + 4096:  # mostly others' bytes
        return [], None
    region = torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, start, (length,), (1,))
    return [int(offset - start) for offset in offsets], region


def serialise(flat: torch.Tensor, items: list[SimpleNamespace]) -> bytes:
    """Base64 of the pickled bucket: by value from host memory, by an IPC handle of `flat` from a GPU.

    A handle is for ONE reader, and `flat` must live until that reader has answered.

    Raises:
        EngineError: the memory cannot be shared with another process.
    """
    out = io.BytesIO()
    try:
        _Pickler(out, protocol=4).dump({"flattened_tensor": flat, "metadata": items})
    except RuntimeError as exc:
        raise EngineError(
            f"the bucket on {flat.device} cannot be shared with the server: {exc}",
            advice="unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF, and run in a container with IPC rights",
        ) from exc
    return base64.b64encode(out.getbuffer())


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            return cuda_handle(obj, str(torch.cuda.get_device_properties(obj.device).uuid))
        return NotImplemented


def cuda_handle(tensor: torch.Tensor, uuid: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """torch's IPC handle of `tensor`, with the GPU named by `uuid`: indices differ from process to process."""
    _, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    named = (*arguments[:STORAGE_DEVICE], uuid, *arguments[STORAGE_DEVICE + 1 :])
    return reductions.rebuild_cuda_tensor, named
