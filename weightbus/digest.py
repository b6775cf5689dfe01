"""The digest of a bucket: XXH3-64 of each 64 KiB leaf, then XXH3-64 over the leaf digests and the length.

Sensitive to order, computable in parallel, equal on CPU and CUDA. It finds corruption, not forgery.
"""

from __future__ import annotations

import ctypes
import struct

import torch
import xxhash

from weightbus.errors import ConfigError

LEAF_BYTES = 65536


def leaf_digests(buffer: memoryview, first: int, last: int, nbytes: int) -> bytes:
    """Digests of leaves [`first`, `last`) of ``buffer[:nbytes]``, each as little-endian u64.

    Args:
        buffer: bytes (format ``B``), at least `nbytes` of them.
        first: index of the first leaf; leaf i holds bytes [i * 65536, (i + 1) * 65536).
        last: index after the last leaf, at most ``num_leaves(nbytes)``. The final leaf is zero-padded to 64 KiB.
        nbytes: used bytes of the bucket.
    """
    one = xxhash.xxh3_64_intdigest
    whole = min(last, nbytes // LEAF_BYTES)
    values = [one(buffer[at : at + LEAF_BYTES]) for at in range(first * LEAF_BYTES, whole * LEAF_BYTES, LEAF_BYTES)]
    if last > whole and first <= whole and nbytes % LEAF_BYTES:
        values.append(one(bytes(buffer[whole * LEAF_BYTES : nbytes]).ljust(LEAF_BYTES, b"\0")))
    return struct.pack(f"<{len(values)}Q", *values)


def num_leaves(nbytes: int) -> int:
    """How many leaves `nbytes` used bytes have."""
    return -(-nbytes // LEAF_BYTES)


def root(leaves: bytes, nbytes: int) -> int:
    """The digest of `nbytes` bytes from the digests of all their leaves, in order."""
    return int(xxhash.xxh3_64_intdigest(leaves + struct.pack("<Q", nbytes)))


def host_digest(buffer: memoryview, nbytes: int) -> int:
    """The digest of ``buffer[:nbytes]``."""
    return root(leaf_digests(buffer, 0, num_leaves(nbytes), nbytes), nbytes)


def tensor_bytes_view(t: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host uint8 tensor, writable, without a copy. The view keeps the tensor alive."""
    if t.device.type != "cpu" or t.dtype != torch.uint8 or not t.is_contiguous():
        raise ConfigError(f"a byte view needs a contiguous uint8 tensor on the CPU, not {t.dtype} on {t.device}")
    if t.numel() == 0:
        return memoryview(bytearray())
    array = (ctypes.c_char * t.numel()).from_address(t.data_ptr())
    array.owner = t  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def digest(t: torch.Tensor, nbytes: int) -> int:
    """The digest of ``t[:nbytes]``.

    Args:
        t: contiguous uint8, on the CPU or a CUDA device (there it waits for the device's result).
        nbytes: used bytes, at most ``t.numel()``.

    Raises:
        ConfigError: a device without a digest.
    """
    if t.device.type == "cpu":
        return host_digest(tensor_bytes_view(t), nbytes)
    if t.device.type == "cuda":
        from weightbus import gpu  # imports the run-time compiler: only where there is a device

        return int(gpu.digest(t, nbytes))
    raise ConfigError(f"no digest for memory on {t.device}", advice="use the CPU or CUDA, or verify='off'")
