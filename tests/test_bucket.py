"""Properties of packing and unpacking: bytes equal a reference, whatever the specs, the bucket size or the slot's past."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbus import digest as digests
from weightbus.bucket import POISON, Packer, Unpacker, plain_bytes
from weightbus.control import messages as m
from weightbus.errors import RemoteProtocolError
from weightbus.feed import PagedUnpacker
from weightbus.header import Header
from weightbus.manifest import DTYPES, Manifest, TensorSpec
from weightbus.plan import MAX_BUCKET_BYTES, Plan, make_plans
from weightbus.resident import Tables

QUICK = settings(max_examples=40, deadline=None)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
LAYOUTS = ("plain", "transposed", "strided", "expanded", "offset")


def reference_bytes(tensor: torch.Tensor) -> bytes:
    """Row-major bytes, element by element: shares no code with the packer."""
    if tensor.numel() == 0:
        return b""
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    for index in (
        torch.cartesian_prod(*[torch.arange(n) for n in tensor.shape]).reshape(tensor.numel(), -1).tolist()
        if tensor.dim()
        else [()]
    ):
        out[tuple(index)] = tensor[tuple(index)]
    return (
        bytes(out.view(-1).view(torch.uint8).tolist())
        if tensor.dim()
        else bytes(out.reshape(1).view(torch.uint8).tolist())
    )


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern; only 0 and 1 for bool."""
    count = dtype.itemsize * max(1, int(torch.tensor(shape).prod())) if shape else dtype.itemsize
    if any(n == 0 for n in shape):
        return torch.empty(shape, dtype=dtype)
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    return raw.view(dtype).reshape(shape)


def laid_out(shape: tuple[int, ...], dtype: torch.dtype, seed: int, layout: str) -> torch.Tensor:
    """A tensor of this shape whose memory is laid out so."""
    if layout == "transposed":
        return (
            noise(shape[::-1], dtype, seed).permute(*range(len(shape) - 1, -1, -1))
            if shape
            else noise(shape, dtype, seed)
        )
    if layout == "strided" and shape:
        return noise((*shape[:-1], 2 * shape[-1]), dtype, seed)[..., ::2]
    if layout == "expanded" and shape and shape[0]:
        return noise((1, *shape[1:]), dtype, seed).expand(shape)
    if layout == "offset" and shape and shape[0]:
        return noise((shape[0] + 1, *shape[1:]), dtype, seed)[1:]
    return noise(shape, dtype, seed)


@st.composite
def models(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    count = draw(st.integers(1, 7))
    return {
        f"t{i}": laid_out(
            draw(SHAPES), DTYPES[draw(st.sampled_from(sorted(DTYPES)))], i, draw(st.sampled_from(LAYOUTS))
        )
        for i in range(count)
    }


def manifest_of(model: dict[str, torch.Tensor]) -> Manifest:
    return Manifest([TensorSpec.of(name, tensor) for name, tensor in model.items()])


def resident_digest(plan: Plan, tensors: list[torch.Tensor]) -> int:
    tables = Tables()
    assert tables.fit(plan, tensors, torch.device("cpu"))
    return tables.digest(plan).value()


def pack(
    plan: Plan, model: dict[str, torch.Tensor], *, verify: bool = True, past: int = POISON
) -> list[tuple[torch.Tensor, Any]]:
    tensors = list(model.values())
    packed = []
    for bucket in plan.buckets:
        memory = torch.full((plan.capacity_bytes,), past, dtype=torch.uint8)
        packer = Packer(memory, verify)
        for s in bucket.segments:
            packer.put(s, tensors[s.tensor])
        packed.append((memory, packer.finish()))
    return packed


@QUICK
@given(models(), st.sampled_from([256, 272, 1000, 1 << 16]))
def test_packed_bytes_equal_the_reference_and_nothing_else_is_written(
    model: dict[str, torch.Tensor], size: int
) -> None:
    (plan,) = make_plans([manifest_of(model)], [], size)
    whole = [reference_bytes(t) for t in model.values()]
    for bucket, (memory, packed) in zip(plan.buckets, pack(plan, model), strict=True):
        want = bytearray([POISON]) * plan.capacity_bytes
        for s in bucket.segments:
            want[s.offset : s.offset + s.nbytes] = whole[s.tensor][s.tensor_offset : s.tensor_offset + s.nbytes]
        assert bytes(memory.tolist()) == bytes(want)
        assert packed.used_bytes == bucket.used_bytes
        assert packed.pending.ready()


@QUICK
@given(models(), st.sampled_from([256, 1000, 1 << 16]), st.booleans())
def test_unpacked_tensors_equal_what_was_packed(model: dict[str, torch.Tensor], size: int, together: bool) -> None:
    groups = [tuple(range(len(model)))] if together and len(model) > 1 else []
    manifest = manifest_of(model)
    (plan,) = make_plans([manifest], groups, size)
    unpacker = Unpacker(plan, [spec.names for spec in manifest])
    for _ in range(2):  # views and assembly are used again
        got: dict[str, tuple[Any, ...]] = {}
        for k, (memory, _) in enumerate(pack(plan, model)):
            batch = unpacker.batch(k, memory)
            assert not {n for n, _ in batch} & set(got), "delivered twice"
            got |= {name: (t.shape, t.dtype, reference_bytes(t)) for name, t in batch}
            if together and batch:
                assert len(batch) == len(model), "a group was split"
        assert got == {name: (t.shape, t.dtype, reference_bytes(t)) for name, t in model.items()}


@QUICK
@given(models(), st.sampled_from([256, 1000, 1 << 16]))
def test_the_digest_made_while_packing_is_that_of_the_bucket(model: dict[str, torch.Tensor], size: int) -> None:
    (plan,) = make_plans([manifest_of(model)], [], size)
    for memory, packed in pack(plan, model):
        assert packed.pending.value() == digests.host_digest(digests.tensor_bytes_view(memory), packed.used_bytes)


@pytest.mark.parametrize("numel", [1, (512 << 10) - 1, 512 << 10, (512 << 10) + 1, (3 << 20) + 5])
def test_the_digest_of_buckets_larger_than_the_cache_block(numel: int) -> None:
    model = {
        "odd": noise((3,), torch.uint8, 1),
        "big": noise((numel,), torch.uint8, 2),
        "end": noise((5,), torch.float64, 3),
    }
    (plan,) = make_plans([manifest_of(model)], [], 8 << 20)
    ((memory, packed),) = pack(plan, model, past=0)
    assert packed.pending.value() == digests.digest(memory, packed.used_bytes)
    flipped = memory.clone()
    flipped[packed.used_bytes - 1] ^= 1
    assert digests.digest(flipped, packed.used_bytes) != packed.pending.value()


@QUICK
@given(models())
def test_a_digest_where_tensors_lie_equals_that_of_a_zeroed_bucket(model: dict[str, torch.Tensor]) -> None:
    plain = {name: t.contiguous() for name, t in model.items()}
    (plan,) = make_plans([manifest_of(plain)], [], MAX_BUCKET_BYTES)
    ((memory, packed),) = pack(plan, plain, past=0)
    assert resident_digest(plan, list(plain.values())) == digests.digest(memory, packed.used_bytes)


def test_without_verify_there_is_no_digest() -> None:
    model = {"a": torch.ones(4)}
    (plan,) = make_plans([manifest_of(model)], [], 256)
    assert [packed.pending.value() for _, packed in pack(plan, model, verify=False)] == [0]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_lazily_conjugated_and_negated_memory_travels_as_its_values(dtype: torch.dtype) -> None:
    base = torch.tensor([[1 + 2j, 3 - 4j], [8 + 5j, -6 - 7j]], dtype=dtype)
    for lazy in (base.conj(), base.conj().t(), base.conj().imag, base.imag, torch._neg_view(base)):
        model = {"c": lazy}
        assert reference_bytes(lazy) == bytes(plain_bytes(lazy).tolist())
        (plan,) = make_plans([manifest_of(model)], [], 256)
        ((memory, _),) = pack(plan, model)
        ((_, got),) = Unpacker(plan, [("c",)]).batch(0, memory)
        assert torch.equal(got, lazy.clone())
        assert not got.is_conj()


def test_a_half_assembled_refit_leaves_nothing_for_the_next() -> None:
    model = {"big": noise((1000,), torch.uint8, 1)}
    (plan,) = make_plans([manifest_of(model)], [], 256)
    unpacker = Unpacker(plan, [("big",)])
    stale = pack(plan, {"big": noise((1000,), torch.uint8, 2)})
    assert unpacker.batch(0, stale[0][0]) == []
    unpacker.reset()
    assert not unpacker._assembly, "its memory is kept"
    got = [item for k, (memory, _) in enumerate(pack(plan, model)) for item in unpacker.batch(k, memory)]
    assert [name for name, _ in got] == ["big"]
    assert torch.equal(got[0][1], model["big"])


# ---- the header of a bucket

U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
HEADERS = st.builds(
    Header, lane_key=st.binary(min_size=16, max_size=16), refit_id=st.binary(min_size=16, max_size=16), plan_digest=U64,
    bucket=U32, total=U32, used_bytes=U64, digest=U64, verified=st.booleans(),
)  # fmt: skip


@QUICK
@given(HEADERS)
def test_a_header_survives_the_wire(header: Header) -> None:
    assert len(header.pack()) == 80
    assert Header.unpack(header.pack()) == header


@QUICK
@given(HEADERS, st.integers(0, 160))
def test_a_header_of_another_length_is_refused(header: Header, length: int) -> None:
    data = (header.pack() + bytes(80))[:length]
    if length != 80:
        with pytest.raises(RemoteProtocolError, match="80 bytes"):
            Header.unpack(data)


@QUICK
@given(HEADERS, st.binary(min_size=4, max_size=4).filter(lambda magic: magic != b"WB01"))
def test_a_header_of_another_protocol_is_refused(header: Header, magic: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not a weightbus header"):
        Header.unpack(magic + header.pack()[4:])


@QUICK
@given(st.binary(max_size=200))
def test_garbage_is_no_header(data: bytes) -> None:
    try:
        header = Header.unpack(data)
    except RemoteProtocolError:
        return
    assert header.pack()[:4] == data[:4] == b"WB01"


@pytest.mark.parametrize(
    "segment", [(-1, 0, 0, 4), (1, 0, 0, 4), (0, -4, 0, 4), (0, 0, -16, 4), (0, 0, 0, -4), (0, 4, 0, 4), (0, 0, 64, 4)]
)
def test_a_page_that_names_what_cannot_be_is_refused(segment: tuple[int, int, int, int]) -> None:
    page = m.Page(
        refit="00" * 16, lane="a->b", bucket=0, first_tensor=0, specs=(TensorSpec("a", (1,), "float32"),),
        segments=list(segment),
    )  # fmt: skip
    with pytest.raises(RemoteProtocolError, match="a page"):
        PagedUnpacker().batch(page, torch.zeros(64, dtype=torch.uint8), lambda spec: (spec.name,))
