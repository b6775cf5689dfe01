"""CUDA kernels: copy many pieces in one launch, and the bucket's digest at memory speed, alone or fused with the copy.

Compiled by CuPy (extra ``cuda``) at set-up. The digest is that of `weightbus.digest`: XXH3-64 of each 64 KiB leaf on the
device, the root over the leaf digests on the host. Algorithm: XXH3 for long inputs, seed 0 (xxHash specification 0.8).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import attrs
import torch

from weightbus.digest import LEAF_BYTES, num_leaves, root
from weightbus.errors import BackendUnavailable
from weightbus.plan import aligned

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_COPY_CHUNK_BYTES = 32768
_THREADS = 256


def _words(start: int, count: int) -> str:
    values = (int.from_bytes(_SECRET[start + 8 * i : start + 8 * i + 8], "little") for i in range(count))
    return ", ".join(f"{value:#x}ull" for value in values)


_SOURCE = (
    r"""
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;
"""
    + f"__constant__ u64 KEY[24] = {{{_words(0, 24)}}};\n"
    + f"__constant__ u64 LAST[8] = {{{_words(121, 8)}}};\n"
    + f"__constant__ u64 MERGE[8] = {{{_words(11, 8)}}};\n"
    + r"""
__constant__ u64 INIT[8] = {3266489917ull, 11400714785074694791ull, 14029467366897019727ull, 1609587929392839161ull,
                            9650029242287828579ull, 2246822519ull, 2870177450012600261ull, 2654435761ull};
enum { DIGEST = 0, GATHER = 1, SCATTER = 2, VIRTUAL = 3, PULL = 4 };  // the last two: pieces alone, as if packed

struct Pieces {            // of one bucket, by rising offset; each offset a multiple of 16
  const u64 *off, *len, *ptr;
  u32 count;
  const u64 *to;           // PULL: where each piece is copied to
};

__device__ u32 find(const Pieces &p, u64 at) {   // the last piece that starts at or before `at`
  u32 low = 0, high = p.count;
  while (high - low > 1) { u32 mid = (low + high) / 2; if (p.off[mid] <= at) low = mid; else high = mid; }
  return low;
}

__device__ u64 load_word(const u8 *from, u64 count) {  // up to 8 bytes, the rest zero
  if (count >= 8 && ((u64)from & 7) == 0) return *(const u64 *)from;
  u64 word = 0;
  for (u64 i = 0; i < 8 && i < count; i++) word |= (u64)from[i] << (8 * i);
  return word;
}

__device__ void store_word(u8 *to, u64 word, u64 count) {
  if (count >= 8 && ((u64)to & 7) == 0) { *(u64 *)to = word; return; }
  for (u64 i = 0; i < 8 && i < count; i++) to[i] = (u8)(word >> (8 * i));
}

// Word `at` of the bucket where a block is not one whole aligned piece.
template <int MODE> __device__ u64 odd_word(u8 *bucket, u64 at, u64 used, const Pieces &p) {
  if (at >= used) return 0;
  if (MODE == DIGEST) return load_word(bucket + at, used - at);
  u32 s = find(p, at);
  u64 from = p.off[s], end = from + p.len[s];
  u64 count = at >= from && end > at ? end - at : 0;
  u8 *other = (u8 *)(p.ptr[s] + (at - from));
  if (MODE == VIRTUAL || MODE == PULL) {
    u64 word = count ? load_word(other, count) : 0;
    if (MODE == PULL && count) store_word((u8 *)(p.to[s] + (at - from)), word, count);
    return word;
  }
  if (MODE == GATHER) {
    u64 word = count ? load_word(other, count) : 0;
    store_word(bucket + at, word, used - at);
    return word;
  }
  u64 word = load_word(bucket + at, used - at);
  if (count) store_word(other, word, count);
  return word;
}

// One warp a leaf; a thread has two neighbouring lanes (16 bytes) of stripe `group` and of stripe 8 + `group` of each
// 1 KiB block. Within a block the additions commute, so partial sums are reduced over the groups once a block, then
// scrambled. Two blocks are under way.
template <int MODE> __device__ void leaves(u8 *bucket, u64 used, Pieces p, u64 *out) {
  const u64 leaf = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (leaf >= (used + 65535) / 65536) return;
  const u32 t = threadIdx.x & 31, q = t & 3, group = t >> 2;
  const u64 base = leaf * 65536, mine = group * 64 + q * 16;
  u64 a0 = INIT[2 * q], a1 = INIT[2 * q + 1];
  const u64 k00 = KEY[group + 2 * q], k01 = KEY[group + 2 * q + 1], s0 = KEY[16 + 2 * q], s1 = KEY[17 + 2 * q];
  u64 k10 = KEY[8 + group + 2 * q], k11 = KEY[9 + group + 2 * q];
  u32 piece = MODE == DIGEST ? 0 : find(p, base);
  ulonglong2 word[2][2];
  u8 *to[2];  // where a whole block of GATHER or SCATTER goes, once its words are here

  auto fetch = [&](int block, ulonglong2 *w, u8 *&target) {
    const u64 start = base + block * 1024;
    bool whole = start + 1024 <= used;
    const u8 *from = bucket + start;
    target = 0;
    if (MODE != DIGEST && whole) {
      while (piece + 1 < p.count && p.off[piece + 1] <= start) piece++;
      u64 at = p.off[piece];
      u8 *other = (u8 *)(p.ptr[piece] + (start - at));
      whole = at <= start && at + p.len[piece] >= start + 1024 && ((u64)other & 15) == 0;
      if (MODE != SCATTER) from = other;
      if (whole && MODE == SCATTER) target = other;
      if (whole && MODE == GATHER) target = bucket + start;
      if (whole && MODE == PULL) {
        target = (u8 *)(p.to[piece] + (start - at));
        if ((u64)target & 15) { whole = false; target = 0; }
      }
    }
    if (whole) {
      w[0] = __ldcs((const ulonglong2 *)(from + mine));
      w[1] = __ldcs((const ulonglong2 *)(from + 512 + mine));
    } else {
      for (int i = 0; i < 2; i++) {
        w[i].x = odd_word<MODE>(bucket, start + i * 512 + mine, used, p);
        w[i].y = odd_word<MODE>(bucket, start + i * 512 + mine + 8, used, p);
      }
    }
  };
  fetch(0, word[0], to[0]);
  fetch(1, word[1], to[1]);
  #pragma unroll 1
  for (int pair = 0; pair < 64; pair += 2) {
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int block = pair + i;
      const ulonglong2 x = word[i][0], y = word[i][1];
      u8 *target = to[i];
      if (block < 62) fetch(block + 2, word[i], to[i]);
      if (MODE != DIGEST && MODE != VIRTUAL && target) {
        __stcs((ulonglong2 *)(target + mine), x);
        __stcs((ulonglong2 *)(target + 512 + mine), y);
      }
      if (block == 63 && group == 7) { k10 = LAST[2 * q]; k11 = LAST[2 * q + 1]; }
      const u64 v0 = x.x ^ k00, v1 = x.y ^ k01, w0 = y.x ^ k10, w1 = y.y ^ k11;
      u64 p0 = (v0 & 0xffffffffull) * (v0 >> 32) + x.y + (w0 & 0xffffffffull) * (w0 >> 32) + y.y;
      u64 p1 = (v1 & 0xffffffffull) * (v1 >> 32) + x.x + (w1 & 0xffffffffull) * (w1 >> 32) + y.x;
      #pragma unroll
      for (int far = 4; far < 32; far *= 2) {
        p0 += __shfl_xor_sync(~0u, p0, far);
        p1 += __shfl_xor_sync(~0u, p1, far);
      }
      a0 += p0;
      a1 += p1;
      if (block < 63) {
        a0 ^= a0 >> 47; a0 ^= s0; a0 *= 2654435761ull;
        a1 ^= a1 >> 47; a1 ^= s1; a1 *= 2654435761ull;
      }
    }
  }
  const u64 m0 = a0 ^ MERGE[2 * q], m1 = a1 ^ MERGE[2 * q + 1];
  u64 fold = (m0 * m1) ^ __umul64hi(m0, m1);
  fold += __shfl_xor_sync(~0u, fold, 1);
  fold += __shfl_xor_sync(~0u, fold, 2);
  if (t == 0) {
    u64 h = 65536ull * 11400714785074694791ull + fold;
    h ^= h >> 37; h *= 0x165667919e3779f9ull; h ^= h >> 32;
    out[leaf] = h;
  }
}

extern "C" __global__ void leaf_digests(u8 *bucket, u64 used, u64 *out) {
  Pieces none = {0, 0, 0, 0, 0};
  leaves<DIGEST>(bucket, used, none, out);
}
extern "C" __global__ void gather_digests(u8 *bucket, u64 used, const u64 *table, u32 count, u64 *out) {
  Pieces p = {table, table + count, table + 2 * count, count, 0};
  leaves<GATHER>(bucket, used, p, out);
}
extern "C" __global__ void scatter_digests(u8 *bucket, u64 used, const u64 *table, u32 count, u64 *out) {
  Pieces p = {table, table + count, table + 2 * count, count, 0};
  leaves<SCATTER>(bucket, used, p, out);
}

extern "C" __global__ void piece_digests(u64 used, const u64 *table, u32 count, u64 *out) {
  Pieces p = {table, table + count, table + 2 * count, count, 0};
  leaves<VIRTUAL>(0, used, p, out);
}

extern "C" __global__ void pull_digests(u64 used, const u64 *table, u32 count, u64 *out) {
  Pieces p = {table, table + count, table + 2 * count, count, table + 3 * count};
  leaves<PULL>(0, used, p, out);
}

// table: chunk_prefix[count + 1], src[count], dst[count], len[count]; one block a chunk.
extern "C" __global__ void copy_pieces(const u64 *table, u32 count, u64 chunk_bytes) {
  const u64 *prefix = table, *src = table + count + 1, *dst = src + count, *len = dst + count;
  const u64 chunk = blockIdx.x;
  u32 low = 0, high = count;
  while (high - low > 1) { u32 mid = (low + high) / 2; if (prefix[mid] <= chunk) low = mid; else high = mid; }
  const u64 at = (chunk - prefix[low]) * chunk_bytes;
  const u64 left = len[low] - at, n = left < chunk_bytes ? left : chunk_bytes;
  const u8 *from = (const u8 *)(src[low] + at);
  u8 *to = (u8 *)(dst[low] + at);
  u64 done = 0;
  if ((((u64)from | (u64)to) & 15) == 0) {
    const ulonglong2 *f = (const ulonglong2 *)from;
    ulonglong2 *d = (ulonglong2 *)to;
    const u64 words = n / 16, step = blockDim.x;
    u64 i = threadIdx.x;
    for (; i + 3 * step < words; i += 4 * step) {
      ulonglong2 a = f[i], b = f[i + step], c = f[i + 2 * step], e = f[i + 3 * step];
      d[i] = a; d[i + step] = b; d[i + 2 * step] = c; d[i + 3 * step] = e;
    }
    for (; i < words; i += step) d[i] = f[i];
    done = words * 16;
  } else if ((((u64)from | (u64)to) & 1) == 0) {
    for (u64 i = threadIdx.x; i < n / 2; i += blockDim.x) ((unsigned short *)to)[i] = ((const unsigned short *)from)[i];
    done = n / 2 * 2;
  }
  for (u64 i = done + threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
}
"""
)


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as exc:
        raise BackendUnavailable(
            "CUDA buckets need CuPy", advice="pip install 'weightbus[cuda]' (cupy-cuda13x, or cupy-cuda12x)."
        ) from exc
    return cupy


@lru_cache(maxsize=8)
def _kernels(device: int) -> dict[str, Any]:
    """Compiled kernels of one device; half a second the first time, cached on disk by CuPy."""
    cupy = _cupy()
    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=_SOURCE, options=("--std=c++14",))
        names = ("leaf_digests", "gather_digests", "scatter_digests", "piece_digests", "pull_digests", "copy_pieces")
        return {name: module.get_function(name) for name in names}


def warm_up(device: torch.device) -> None:
    """Compile now, at set-up, so that no refit pays for it."""
    probe = torch.zeros(LEAF_BYTES, dtype=torch.uint8, device=device)
    digest(probe, LEAF_BYTES)


@lru_cache(maxsize=64)
def _stream(device: int, handle: int) -> Any:
    """CuPy's view of a torch stream, which must outlive its use here: streams of torch's pools live for ever."""
    cupy = _cupy()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # its successor takes stream objects, not every torch has them
        return cupy.cuda.ExternalStream(handle, device)


def _launch(name: str, device: torch.device, blocks: int, args: tuple[Any, ...]) -> None:
    cupy = _cupy()
    index = device.index or 0
    with cupy.cuda.Device(index), _stream(index, torch.cuda.current_stream(device).cuda_stream):
        _kernels(index)[name]((blocks,), (_THREADS,), args)


def _upload(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """A table of u64 on the device, ordered on the current stream."""
    host = torch.tensor(values, dtype=torch.uint64).view(torch.int64).pin_memory()
    return host.to(device, non_blocking=True)


@attrs.frozen(eq=False)
class Pending:
    """Work that the device still does, with the digest that it makes, if one was asked for."""

    _event: torch.cuda.Event
    _leaves: torch.Tensor | None = None
    _nbytes: int = 0

    def ready(self) -> bool:
        """True once all work up to here has ended."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def value(self) -> int:
        """The bucket's digest, 0 without one; waits for the device if it is not ready."""
        self._event.synchronize()
        return 0 if self._leaves is None else root(self._leaves.numpy().tobytes(), self._nbytes)


def after(device: torch.device) -> Pending:
    """The end of what the current stream of `device` has been given so far."""
    return Pending(_event(device))


def _event(device: torch.device) -> torch.cuda.Event:
    with torch.cuda.device(device):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return event


def _digested(name: str, device: torch.device, nbytes: int, *args: Any) -> Pending:
    """Launch a kernel of `leaves` over `nbytes`; its last argument, where the leaf digests go, is added here."""
    leaves = torch.empty(num_leaves(nbytes), dtype=torch.int64, device=device)
    if nbytes:
        _launch(name, device, _leaf_blocks(nbytes), (*args, leaves.data_ptr()))
    host = torch.empty(leaves.shape, dtype=torch.int64, pin_memory=True)
    host.copy_(leaves, non_blocking=True)
    return Pending(_event(device), host, nbytes)


def digest_async(t: torch.Tensor, nbytes: int) -> Pending:
    """Start the digest of ``t[:nbytes]`` (contiguous uint8, 16-byte aligned) on the current stream."""
    return _digested("leaf_digests", t.device, nbytes, t.data_ptr(), _u64(nbytes))


def digest(t: torch.Tensor, nbytes: int) -> int:
    """The digest of ``t[:nbytes]``, waited for on the host."""
    return digest_async(t, nbytes).value()


def _u64(value: int) -> Any:
    return _cupy().uint64(value)


def _u32(value: int) -> Any:
    return _cupy().uint32(value)


def _leaf_blocks(nbytes: int) -> int:
    return -(-num_leaves(nbytes) * 32 // _THREADS)


@attrs.frozen(eq=False)
class Pieces:
    """The segments of one bucket and where each lies outside it; upload once, use for every refit of a plan.

    Attributes:
        bucket: ``[capacity]`` uint8 on the device.
        used_bytes: end of the last piece.
    """

    bucket: torch.Tensor
    used_bytes: int
    _fused: torch.Tensor
    _gather: tuple[torch.Tensor, int]
    _scatter: tuple[torch.Tensor, int]
    _count: int

    @classmethod
    def of(cls, bucket: torch.Tensor, pieces: Sequence[tuple[int, int, int]]) -> Pieces:
        """From (offset in the bucket, address outside, length), by rising offset; empty pieces are left out."""
        kept = [piece for piece in pieces if piece[2]]
        offsets, outside, lengths = ([p[i] for p in kept] for i in range(3))
        inside = [bucket.data_ptr() + offset for offset in offsets]
        used = pieces[-1][0] + pieces[-1][2] if pieces else 0
        fused = _upload([*offsets, *lengths, *outside], bucket.device)
        gather = _chunks(inside, outside, lengths, bucket.device)
        scatter = _chunks(outside, inside, lengths, bucket.device)
        return cls(bucket, used, fused, gather, scatter, len(kept))

    def gather(self, *, digest: bool) -> Pending:
        """Fill the bucket from outside, on the current stream; gaps become zero where a digest is made."""
        return self._move("gather_digests", self._gather, digest)

    def scatter(self, *, digest: bool) -> Pending:
        """Write the bucket's pieces to their places outside, on the current stream."""
        return self._move("scatter_digests", self._scatter, digest)

    def _move(self, fused: str, plain: tuple[torch.Tensor, int], digest: bool) -> Pending:
        if not digest:
            _copy(plain, self._count, self.bucket.device)
            return after(self.bucket.device)
        args = (self.bucket.data_ptr(), _u64(self.used_bytes), self._fused.data_ptr(), _u32(self._count))
        return _digested(fused, self.bucket.device, self.used_bytes, *args)


class PieceDigest:
    """The digest of pieces where they lie, as if packed into one bucket; the table is uploaded once."""

    def __init__(self, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        kept = [piece for piece in pieces if piece[2]]
        self._device, self._count = device, len(kept)
        self._used = pieces[-1][0] + pieces[-1][2] if pieces else 0
        self._table = _upload([p[0] for p in kept] + [p[2] for p in kept] + [p[1] for p in kept], device)

    def start(self) -> Pending:
        """Launch on the current stream."""
        args = (_u64(self._used), self._table.data_ptr(), _u32(self._count))
        return _digested("piece_digests", self._device, self._used, *args)


def _chunks(
    dst: Sequence[int], src: Sequence[int], lengths: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, int]:
    prefix = [0]
    for length in lengths:
        prefix.append(prefix[-1] + -(-length // _COPY_CHUNK_BYTES))
    return _upload([*prefix, *src, *dst, *lengths], device), prefix[-1]


def _copy(chunks: tuple[torch.Tensor, int], count: int, device: torch.device) -> None:
    table, blocks = chunks
    if blocks:
        _launch("copy_pieces", device, blocks, (table.data_ptr(), _u32(count), _u64(_COPY_CHUNK_BYTES)))


class CopyPlan:
    """A copy of many pieces whose addresses stay: the tables are uploaded once."""

    def __init__(
        self, dst_ptrs: Sequence[int], src_ptrs: Sequence[int], nbytes: Sequence[int], device: torch.device
    ) -> None:
        kept = [piece for piece in zip(dst_ptrs, src_ptrs, nbytes, strict=True) if piece[2]]
        targets, sources, lengths = ([p[i] for p in kept] for i in range(3))
        offsets = list(accumulate(map(aligned, nbytes), initial=0))
        self._used = offsets[-2] + nbytes[-1] if nbytes else 0
        self._device, self._count = device, len(kept)
        with torch.cuda.device(device):
            self._chunks = _chunks(targets, sources, lengths, device)
            places = [offset for offset, n in zip(offsets, nbytes, strict=False) if n]
            self._fused = _upload([*places, *lengths, *sources, *targets], device)

    def __call__(self, *, digest: bool) -> Pending:
        """Launch on the current stream; the digest is that of the pieces as if packed into one bucket, in order."""
        if not digest:
            _copy(self._chunks, self._count, self._device)
            return after(self._device)
        args = (_u64(self._used), self._fused.data_ptr(), _u32(self._count))
        return _digested("pull_digests", self._device, self._used, *args)
