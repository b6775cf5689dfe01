"""What a refit moves: names, shapes, dtypes, in one order. Pure data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property

import attrs
import torch
import xxhash

#: dtypes that may travel, by the name that goes on the wire.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}
KINDS = ("parameter", "buffer", "nonpersistent", "tensor")
MAX_NAME_BYTES = 1024
MAX_TENSORS = 4_000_000
MAX_TENSOR_BYTES = 1 << 48


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of a dtype, such as ``"bfloat16"``."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _check_name(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not value or len(value.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"{attribute.name}: a name has 1 to {MAX_NAME_BYTES} bytes, this has {len(value.encode())}")


def _check_shape(_: object, __: attrs.Attribute[tuple[int, ...]], value: tuple[int, ...]) -> None:
    if len(value) > 64 or any(n < 0 for n in value):
        raise ValueError(f"shape {value} is not a tensor's shape")


def _check_dtype(_: object, __: attrs.Attribute[str], value: str) -> None:
    if value not in DTYPES:
        raise ValueError(f"dtype {value!r} cannot travel; known: {', '.join(DTYPES)}")


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _texts(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


def _specs(values: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(values)


@attrs.frozen
class TensorSpec:
    """One tensor as it travels: contiguous, row-major.

    Attributes:
        name: unique within its manifest, at most 1024 bytes of UTF-8.
        shape: global shape; ``()`` for a scalar.
        dtype: wire name, a key of `DTYPES`.
        aliases: further names of the same tensor (tied weights); they share the one copy on the wire.
        kind: parameter, buffer (persistent), nonpersistent (buffer) or tensor (from a mapping or iterable).
    """

    name: str = attrs.field(validator=_check_name)
    shape: tuple[int, ...] = attrs.field(converter=_ints, validator=_check_shape)
    dtype: str = attrs.field(validator=_check_dtype)
    aliases: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    kind: str = attrs.field(default="tensor", validator=attrs.validators.in_(KINDS))

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, aliases: Iterable[str] = (), kind: str = "tensor") -> TensorSpec:
        """The spec of `tensor`, by its global shape if it is a DTensor. Reads metadata only."""
        return cls(name, tuple(tensor.shape), dtype_name(tensor.dtype), tuple(aliases), kind)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, without padding."""
        return self.numel * DTYPES[self.dtype].itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """The name and its aliases."""
        return (self.name, *self.aliases)


@attrs.frozen
class Manifest:
    """The ordered list of what moves. Order is the order in which the source yields.

    Attributes:
        tensors: specs with unique names, aliases included.
    """

    tensors: tuple[TensorSpec, ...] = attrs.field(converter=_specs)

    @tensors.validator
    def _unique(self, _: attrs.Attribute[tuple[TensorSpec, ...]], value: tuple[TensorSpec, ...]) -> None:
        if len(value) > MAX_TENSORS:
            raise ValueError(f"{len(value)} tensors; at most {MAX_TENSORS} are supported")
        seen: set[str] = set()
        twice: list[str] = []
        for spec in value:
            for name in spec.names:
                if name in seen:
                    twice.append(name)
                seen.add(name)
            if spec.nbytes > MAX_TENSOR_BYTES:
                raise ValueError(f"{spec.name}: {spec.nbytes} bytes is beyond any tensor")
        if twice:
            raise ValueError(f"duplicate names: {', '.join(sorted(set(twice)))}")

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Sum of the tensors' bytes, without padding."""
        return sum(spec.nbytes for spec in self.tensors)

    def digest(self) -> int:
        """64-bit digest of everything above; equal manifests have equal digests in every process."""
        return self._digest

    @cached_property
    def _digest(self) -> int:
        h = xxhash.xxh3_64()
        for s in self.tensors:
            h.update(f"{s.name}\0{s.shape}\0{s.dtype}\0{s.aliases}\0{s.kind}\n".encode())
        return int(h.intdigest())
