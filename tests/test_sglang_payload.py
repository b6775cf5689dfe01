"""The payload: the server's unpickler reads what was given, whatever its dtypes, shapes, strides and offsets."""

from __future__ import annotations

import base64
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing import reductions

import weightbus_sglang.payload as payload_module
from weightbus_sglang.payload import ALIGNMENT, STORAGE_DEVICE, cuda_handle, flatten, serialise

#: what a server since 0.5.21 lets a payload by value name, as far as one of ours needs it
ALLOWED = {
    ("types", "SimpleNamespace"), ("torch", "Size"), ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"), ("collections", "OrderedDict"),
}  # fmt: skip
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.bool,
    torch.int64, torch.complex64,
]  # fmt: skip


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED or (module == "torch" and isinstance(getattr(torch, name), torch.dtype)):
            return super().find_class(module, name)
        raise AssertionError(f"the server would die of {module}.{name}")


def decode(text: bytes) -> dict[str, torch.Tensor]:
    """As the server reads a flattened bucket."""
    content = Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
    flat = content["flattened_tensor"]
    assert flat.dtype == torch.uint8
    assert flat.untyped_storage().nbytes() == flat.numel()  # nothing else travels along
    for item in content["metadata"]:
        assert item.start_idx % ALIGNMENT == 0
        assert item.end_idx - item.start_idx == item.numel
    return {m.name: flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape) for m in content["metadata"]}


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return (
        left.contiguous().reshape(-1).view(torch.uint8).tolist()
        == right.contiguous().reshape(-1).view(torch.uint8).tolist()
    )


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = dtype.itemsize * int(torch.Size(shape).numel())
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


tensors = st.builds(
    random_tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3).map(tuple), st.integers(0, 999)
)


@settings(deadline=None, max_examples=60)
@given(st.lists(tensors, min_size=1, max_size=8), st.booleans())
def test_any_tensors_arrive_as_they_were(values: list[torch.Tensor], transposed: bool) -> None:
    values = [value.mT if transposed and value.dim() >= 2 else value for value in values]
    batch = [(f"t{i}", value) for i, value in enumerate(values)]
    arrived = decode(serialise(*flatten(batch)))
    assert list(arrived) == [name for name, _ in batch]
    assert all(same_bytes(arrived[name], value) for name, value in batch)


@settings(deadline=None, max_examples=60)
@given(st.lists(tensors, min_size=1, max_size=8), st.integers(0, 3), st.sampled_from([16, 64, 8]))
def test_views_of_one_bucket_arrive_as_they_were(values: list[torch.Tensor], first: int, gap: int) -> None:
    bucket = torch.full((sum(value.nbytes + 80 for value in values) + 4096,), 0xA5, dtype=torch.uint8)
    batch, start = [], first * 16
    for i, value in enumerate(values):
        view = bucket[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
        view.copy_(value)
        batch.append((f"t{i}", view))
        start += -(-value.nbytes // gap) * gap
        start = -(-start // 16) * 16 if gap >= 16 else start
    arrived = decode(serialise(*flatten(batch)))
    assert all(same_bytes(arrived[name], value) for (name, _), value in zip(batch, values, strict=True))


def test_one_bucket_costs_one_copy_with_its_own_offsets() -> None:
    bucket = torch.arange(256, dtype=torch.uint8)
    batch = [("b", bucket[96:112].view(torch.float32)), ("a", bucket[32:36])]
    flat, items = flatten(batch)
    assert flat.tolist() == list(range(32, 112))
    assert [(item.name, item.start_idx, item.end_idx) for item in items] == [("b", 64, 80), ("a", 0, 4)]


def test_the_payload_is_a_copy() -> None:
    bucket = torch.zeros(64, dtype=torch.uint8)
    flat, _ = flatten([("a", bucket[16:32])])
    bucket.fill_(0xA5)
    assert flat.tolist() == [0] * 16


def test_few_bytes_of_a_large_bucket_do_not_drag_it_along() -> None:
    bucket = torch.zeros(1 << 20, dtype=torch.uint8)
    flat, _ = flatten([("a", bucket[:16]), ("z", bucket[-16:])])
    assert flat.numel() == 32


def test_aliases_share_their_bytes() -> None:
    weight = torch.arange(8.0)
    arrived = decode(serialise(*flatten([("a", weight), ("b", weight)])))
    assert arrived["a"].tolist() == arrived["b"].tolist() == weight.tolist()


def test_a_gpu_handle_names_the_gpu_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[STORAGE_DEVICE] == "storage_device"
    shared = tuple(range(100, 100 + len(names)))
    monkeypatch.setattr(payload_module.reductions, "reduce_tensor", lambda _: (reductions.rebuild_cuda_tensor, shared))
    rebuild, arguments = cuda_handle(torch.zeros(1), "uuid-of-it")
    assert rebuild is reductions.rebuild_cuda_tensor
    assert arguments == (*shared[:6], "uuid-of-it", *shared[7:])
