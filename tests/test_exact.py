"""What must arrive exactly: every dtype, shape and stride, at any bucket size, in any order. Receivers are poisoned."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

import weightbus
from tests.harness import poisoned, receiving, same, sender, wait_until, weights
from weightbus import Manifest, TensorSpec, WeightBus
from weightbus.adapter import Batch, EngineLoader, GroupRule, GroupRules, LoadResult
from weightbus.manifest import DTYPES
from weightbus.testing.adapters import RecordingAdapter

BACKENDS = ["loopback", "local"]
Tensors = Mapping[str, torch.Tensor]


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern: NaN payloads, denormals; 0 and 1 for bool."""
    shape = tuple(shape)
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (max(1, count) * dtype.itemsize,), generator=generator, dtype=torch.uint8
    )
    return raw.view(dtype)[:count].reshape(shape)


def raw(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, bytes]:
    """Shape, dtype and row-major bytes: equal for NaNs of equal bits only."""
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1)
    return tensor.shape, tensor.dtype, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def exact(have: Tensors, want: Tensors) -> None:
    assert have.keys() == want.keys()
    assert [n for n in want if raw(have[n]) != raw(want[n])] == []


def zoo(seed: int) -> dict[str, torch.Tensor]:
    """Everything that is awkward, plus a tensor larger than most buckets."""
    tensors = {f"dtype.{name}": noise((3, 5), dtype, seed + i) for i, (name, dtype) in enumerate(DTYPES.items())}
    tensors |= {
        "odd.fp8": noise((7,), torch.float8_e4m3fn, seed + 40),
        "odd.bool": noise((13,), torch.bool, seed + 41),
        "scalar.fp32": noise((), torch.float32, seed + 42),
        "scalar.bf16": noise((), torch.bfloat16, seed + 43),
        "scalar.int64": noise((), torch.int64, seed + 44),
        "empty.1": torch.empty(0, dtype=torch.float16),
        "empty.2": torch.empty(0, 128, dtype=torch.bfloat16),
        "empty.3": torch.empty(4, 0, 8, dtype=torch.float64),
        "transposed": noise((6, 4), torch.float32, seed + 45).t(),
        "strided": noise((5, 8), torch.bfloat16, seed + 46)[:, ::2],
        "expanded": noise((1, 3), torch.float64, seed + 47).expand(4, 3),
        "conjugated": torch.view_as_complex(torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(seed))).conj(),
        "offset": noise((9,), torch.int16, seed + 48)[1:],
        "large": noise((11_003,), torch.uint8, seed + 49),
        "large.strided": noise((70, 90), torch.float32, seed + 50).t(),
        "one": noise((1, 1, 1, 1), torch.float32, seed + 51),
    }
    return tensors


A, B = zoo(0), zoo(1000)


class Holder(torch.nn.Module):
    """A module that holds any tensors as buffers, poisoned, with the strides of `like`."""

    def __init__(self, like: Tensors) -> None:
        super().__init__()
        self.pairs = {name: name.replace(".", "_") for name in like}
        for name, tensor in like.items():
            target = (
                torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                if 0 not in tensor.stride()
                else torch.empty_like(tensor)
            )
            if tensor.numel():
                target.untyped_storage().fill_(0 if tensor.dtype is torch.bool else 0xA5)
            self.register_buffer(self.pairs[name], target)

    def values(self) -> dict[str, torch.Tensor]:
        held = dict(self.named_buffers())
        return {name: held[own] for name, own in self.pairs.items()}


@pytest.mark.parametrize("bucket", [256, 1000, 4096, 1_000_001, "64MiB"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_dtype_shape_and_stride_through_the_torch_adapter(backend: str, bucket: Any) -> None:
    holder = Holder(A)
    renamed = {holder.pairs[name]: name for name in A}
    wire = lambda tensors: {own: tensors[name] for own, name in renamed.items()}
    with sender(receivers=1, bucket_bytes=bucket, backend=backend) as bus:
        with receiving(bus, backend=backend, adapter="torch", adapter_options={"module": holder}) as rx:
            pointers = {n: t.data_ptr() for n, t in holder.values().items()}
            for version, values in enumerate([A, B, A]):
                bus.send(wire(values), version=version, timeout=30)
                exact(holder.values(), values)
                rx.last(version + 1)
            assert {n: t.data_ptr() for n, t in holder.values().items()} == pointers


@pytest.mark.parametrize("bucket", [256, 1000, 1_000_001])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("copy", [True, False])
def test_every_dtype_shape_and_stride_through_the_raw_stream(backend: str, bucket: int, copy: bool) -> None:
    with (
        sender(receivers=1, bucket_bytes=bucket, backend=backend) as bus,
        WeightBus.receiver(bus.address, backend=backend, poison=True) as rx,
    ):
        for version, values in enumerate([A, B, A]):
            handle = bus.isend(values, version=version, timeout=30)
            got = {}
            for name, tensor in rx.recv(timeout=30, copy=copy):
                assert name not in got
                got[name] = tensor if copy else tensor.clone()
            handle.wait(30)
            exact(got, values)


@pytest.mark.parametrize("bucket", [256, 1000, "64MiB"])
def test_every_dtype_shape_and_stride_from_a_bare_generator(bucket: Any) -> None:
    with (
        sender(receivers=1, bucket_bytes=bucket) as bus,
        receiving(bus, adapter=RecordingAdapter(tensors=poison_like(A)), stage="host") as rx,
    ):
        for version, values in enumerate([A, B, A]):
            bus.send((pair for pair in values.items()), version=version, timeout=30)
            exact(rx.engine.weights[0], values)


def poison_like(like: Tensors) -> dict[str, torch.Tensor]:
    made = {}
    for name, tensor in like.items():
        target = torch.empty(tensor.shape, dtype=tensor.dtype)
        if target.numel():
            target.reshape(-1).view(torch.uint8).fill_(0 if tensor.dtype is torch.bool else 0xA5)
        made[name] = target
    return made


def test_mixed_item_sizes_in_all_orders() -> None:
    """An odd tensor before a wider one must not misalign it."""
    parts = [noise((3,), torch.float16, 1), noise((5,), torch.float32, 2), noise((2,), torch.int64, 3),
             noise((7,), torch.float8_e4m3fn, 4), noise((5,), torch.bfloat16, 5)]  # fmt: skip
    with (
        sender(receivers=1, bucket_bytes=256) as bus,
        WeightBus.receiver(bus.address, backend="loopback", poison=True) as rx,
    ):
        for version, order in enumerate(itertools.permutations(range(5))):
            model = {f"t{i}": parts[i] for i in order}
            handle = bus.isend(model, version=version, timeout=30)
            got = dict(rx.recv(timeout=30))
            handle.wait(30)
            exact(got, model)
            assert list(got) == list(model)


@pytest.mark.parametrize("odd", [torch.tensor(1.5), torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(-(2**62)),
                                 torch.empty(0), torch.empty(0, 3, dtype=torch.bfloat16), torch.empty(4, 0, 8)])  # fmt: skip
def test_scalars_and_empty_tensors_anywhere_and_alone(odd: torch.Tensor) -> None:
    a, b = noise((3,), torch.uint8, 1), noise((9,), torch.float64, 2)
    layouts = [
        {"x": odd},
        {"x": odd, "a": a, "b": b},
        {"a": a, "x": odd, "b": b},
        {"a": a, "b": b, "x": odd},
        {"x": odd, "y": odd.clone()},
    ]
    with (
        sender(receivers=1, bucket_bytes=256) as bus,
        WeightBus.receiver(bus.address, backend="loopback", poison=True) as rx,
    ):
        for version, model in enumerate(layouts):
            handle = bus.isend(model, version=version, timeout=20)
            stream = rx.recv(timeout=20)
            got = dict(stream)
            handle.wait(20)
            exact(got, model)
            assert set(got) == set(model), "an empty tensor counts as delivered"


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_around_and_beyond_the_bucket_size(backend: str, place: str) -> None:
    size = 4096
    small = [noise((17,), torch.uint8, 1), noise((5,), torch.float64, 2)]
    with (
        sender(receivers=1, bucket_bytes=size, backend=backend) as bus,
        WeightBus.receiver(bus.address, backend=backend, poison=True) as rx,
    ):
        for version, nbytes in enumerate([size - 17, size - 1, size, size + 1, size + 16, 2 * size, int(3.5 * size)]):
            big = noise((nbytes,), torch.uint8, nbytes)
            parts = {"first": [big, *small], "middle": [small[0], big, small[1]], "last": [*small, big]}[place]
            model = {f"t{i}": t for i, t in enumerate(parts)}
            handle = bus.isend(model, version=version, timeout=20)
            got = dict(rx.recv(timeout=20))
            handle.wait(20)
            exact(got, model)


def test_twenty_thousand_small_tensors() -> None:
    values = noise((20_000, 16), torch.float32, 1)
    model = {f"layer.{i}.scale": row for i, row in enumerate(values)}
    with (
        sender(receivers=1, bucket_bytes="256KiB") as bus,
        WeightBus.receiver(bus.address, backend="loopback", poison=True) as rx,
    ):
        for version in range(2):
            handle = bus.isend(model, version=version, timeout=60)
            stream = rx.recv(timeout=60)
            got = dict(stream)
            report = handle.wait(60)
            assert len(got) == report.tensors == 20_000
            assert torch.equal(torch.stack(list(got.values())).view(torch.int32), values.view(torch.int32))
            assert report.buckets == stream.report.buckets <= 20_000 * 64 / (256 << 10) + 1, "coalesced"
            values += 1


# ---- names and ties


class Tied(torch.nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(5, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        if tie:
            self.head.weight = self.emb.weight


def test_a_tied_weight_reaches_every_name_in_one_copy() -> None:
    model, untied, tied = Tied(), Tied(tie=False), Tied()
    only = RecordingAdapter(tensors={"emb.weight": torch.full((5, 4), float("nan"))})
    for each in (untied, tied):
        torch.nn.init.constant_(each.emb.weight, float("nan"))
        torch.nn.init.constant_(each.head.weight, float("nan"))
    with (
        sender(receivers=3) as bus,
        receiving(bus, "untied", adapter="torch", adapter_options={"module": untied}),
        receiving(bus, "tied", adapter="torch", adapter_options={"module": tied}),
        receiving(bus, "only", adapter=only) as rx,
    ):
        report = bus.send(model, version=1, timeout=20)
        assert report.bytes == 80
        for target in (
            untied.emb.weight,
            untied.head.weight,
            tied.emb.weight,
            tied.head.weight,
            only.engine.weights[0]["emb.weight"],
        ):
            assert torch.equal(target, model.emb.weight)
        assert tied.head.weight is tied.emb.weight
        assert untied.head.weight.data_ptr() != untied.emb.weight.data_ptr()
        assert rx.last(1).skipped == ("head.weight",), "an alias that one side lacks is reported"


def test_equal_shapes_never_change_places() -> None:
    model = {name: torch.full((8, 8), float(i)) for i, name in enumerate(["gate", "up", "down", "q", "k", "v"])}
    adapter = RecordingAdapter(tensors=poisoned(model))
    with sender(receivers=1, bucket_bytes=256) as bus, receiving(bus, adapter=adapter):
        for version, order in enumerate([list(model), list(model)[::-1], sorted(model)]):
            bus.send({name: model[name] for name in order}, version=version, timeout=20)
            assert same(adapter.engine.weights[0], model)


class Kinds(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), value))
        self.register_buffer("bias", torch.full((3,), value + 1))
        self.register_buffer("cache", torch.full((3,), value + 2), persistent=False)


@pytest.mark.parametrize(("buffers", "cache"), [("persistent", -8.0), ("all", 3.0)])
def test_parameters_and_buffers_travel_as_the_manifest_says(buffers: str, cache: float) -> None:
    target = Kinds(-10.0)
    with sender(receivers=1) as bus, receiving(bus, adapter="torch", adapter_options={"module": target}):
        bus.send(Kinds(1.0), version=1, buffers=buffers, timeout=20)
    assert target.weight.tolist() == [1.0] * 3
    assert target.bias.tolist() == [2.0] * 3
    assert target.cache.tolist() == [cache] * 3


# ---- groups


def group_rules() -> GroupRules:
    return GroupRules(
        together=(GroupRule(r"(.*)\.(q|k|v)$", r"\1.qkv"), GroupRule(r"(.*)\.expert\.\d+$", r"\1.experts"))
    )


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("bucket", [256, 4096])
@pytest.mark.parametrize("stage", [None, "host"])
def test_a_fused_group_comes_in_one_call_though_every_bucket_holds_one_tensor(
    bucket: int, ordered: bool, stage: str | None
) -> None:
    rows = [f"l{n}.{part}" for part in ("q", "k", "norm", "v") for n in (0, 1)] + [f"l0.expert.{i}" for i in range(8)]
    model = {name: torch.full((50,), float(i)) for i, name in enumerate(rows)}
    adapter = RecordingAdapter(tensors=poisoned(model), group_rules=group_rules())
    with sender(receivers=1, bucket_bytes=bucket) as bus, receiving(bus, adapter=adapter, stage=stage):
        source = (
            {"source": model}
            if ordered
            else {"source": iter(model.items()), "manifest": [TensorSpec.of(k, v) for k, v in model.items()]}
        )
        bus.send(**source, version=1, timeout=20)
        assert same(adapter.engine.weights[0], model)
    loads = [set(call.split()[1:]) for call in adapter.engine.calls if call.startswith("load")]
    for group in ({f"l{n}.{p}" for p in "qkv"} for n in (0, 1)):
        assert [load & group for load in loads if load & group] == [group]
    experts = {f"l0.expert.{i}" for i in range(8)}
    assert [load & experts for load in loads if load & experts] == [experts]


# ---- several senders, readers, versions


def together(*calls: Any) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as exc:
            results[i] = exc

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive(), "a send hangs"
    return results


def test_ragged_senders_one_of_which_has_nothing_but_empty_tensors() -> None:
    """Equal names, unequal shards: the same steps on all lanes, an empty contribution is legal."""
    sizes = [(3000, 10, 0), (0, 0, 0), (5, 7000, 9)]
    shards = [
        {f"w{i}": noise((n,), torch.float32, 10 * k + i) for i, n in enumerate(row)} for k, row in enumerate(sizes)
    ]
    adapter = RecordingAdapter(tensors=poison_like(shards[0]))
    for rank, shard in enumerate(shards):
        adapter.engine.weights[rank] = poison_like(shard)
    with sender(receivers=3, senders=3, bucket_bytes=4096) as first:
        options: dict[str, Any] = {"backend": "loopback", "bucket_bytes": 4096, "senders": 3}
        others = [WeightBus.sender(address=first.address, rank=k, **options) for k in (1, 2)]
        with receiving(first, adapter=adapter, ranks=3):
            for version in range(2):
                sends = [
                    lambda k=k, b=b: b.send(shards[k], version=version, timeout=20)
                    for k, b in enumerate([first, *others])
                ]
                results = together(*sends)
                assert all(isinstance(r, weightbus.RefitReport) for r in results), results
                assert len({r.buckets for r in results}) == 1
                for rank, shard in enumerate(shards):
                    exact(adapter.engine.weights[rank], shard)
        for each in others:
            each.close()


def test_a_sender_that_steps_slowly_does_not_leave_the_others_behind() -> None:
    """Each iterator is drained to its end, in step or not, though two of three senders feed nobody."""
    values = weights(3, count=20)
    drained: list[list[str]] = [[], [], []]

    def source(rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in values.items():
            if rank == 0:
                time.sleep(0.02)
            drained[rank].append(name)
            yield name, tensor

    manifest = [TensorSpec.of(k, v) for k, v in values.items()]
    adapter = RecordingAdapter(tensors=poisoned(values))
    with sender(receivers=1, senders=3) as first:
        options: dict[str, Any] = {"backend": "loopback", "bucket_bytes": 4096, "senders": 3}
        others = [WeightBus.sender(address=first.address, rank=k, **options) for k in (1, 2)]
        with receiving(first, adapter=adapter):
            sends = [
                lambda k=k, b=b: b.send(source(k), manifest=manifest, version=1, timeout=20)
                for k, b in enumerate([first, *others])
            ]
            assert all(isinstance(r, weightbus.RefitReport) for r in together(*sends))
            assert same(adapter.engine.weights[0], values)
        assert drained == [list(values)] * 3
        for each in others:
            each.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_is_filled_again_only_after_the_slowest_reader(backend: str) -> None:
    """Bucket k holds the value k; the slow reader would see a later one."""
    model = {f"w{k}": torch.full((1000,), float(k)) for k in range(12)}

    class Slow(RecordingAdapter):
        def loader(self, ranks: Sequence[int], device: torch.device | None) -> EngineLoader:
            inner = super().loader(ranks, device)
            load = inner.load

            def late(batches: Sequence[Batch]) -> LoadResult:
                time.sleep(0.05)
                return load(batches)

            inner.load = late  # type: ignore[method-assign]
            return inner

    fast, slow = RecordingAdapter(tensors=poisoned(model)), Slow(tensors=poisoned(model))
    with (
        sender(receivers=2, backend=backend) as bus,
        receiving(bus, "fast", adapter=fast, backend=backend),
        receiving(bus, "slow", adapter=slow, backend=backend),
    ):
        bus.send(model, version=1, timeout=20)
        assert same(slow.engine.weights[0], model)
        assert same(fast.engine.weights[0], model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_caller_s_memory_may_change_once_send_has_returned_in_every_refit(backend: str) -> None:
    """The second refit has a late rank; a barrier that works once would let it read what comes after."""
    model = {f"w{k}": torch.zeros(2000) for k in range(5)}
    adapters = [
        RecordingAdapter(tensors=poisoned(model), stall_at="load:6", stall_s=0.4 if r else 0.0) for r in range(2)
    ]
    for adapter in adapters:
        adapter.engine.driven = False
    with sender(receivers=2, backend=backend) as bus:
        rxs = [receiving(bus, "e0", adapter=adapters[r], rank=r, ranks=2, backend=backend) for r in range(2)]
        try:
            for version in range(3):
                for k, tensor in enumerate(model.values()):
                    tensor.fill_(100 * version + k)
                want = {name: t.clone() for name, t in model.items()}
                bus.send(model, version=version, timeout=20)
                for tensor in model.values():
                    tensor.fill_(-1)
                for r in range(2):
                    assert same(adapters[r].engine.weights[r], want)
                wait_until(lambda version=version: all(rx.bus.version == version for rx in rxs))
        finally:
            for rx in rxs:
                rx.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loader_that_scales_what_it_was_given_never_reaches_the_trainer_s_tensors(backend: str) -> None:
    model = {f"w{k}": torch.full((500,), float(k + 1)) for k in range(4)}
    want = {name: t.clone() for name, t in model.items()}

    class Scaling(RecordingAdapter):
        def loader(self, ranks: Sequence[int], device: torch.device | None) -> EngineLoader:
            inner = super().loader(ranks, device)
            load = inner.load

            def scaled(batches: Sequence[Batch]) -> LoadResult:
                for batch in batches:
                    for _, tensor in batch:
                        tensor.mul_(2)
                return load(batches)

            inner.load = scaled  # type: ignore[method-assign]
            return inner

    adapter = Scaling(tensors=poisoned(model))
    with sender(receivers=1, backend=backend) as bus, receiving(bus, adapter=adapter, backend=backend):
        for version in range(3):
            bus.send(model, version=version, timeout=20)
            assert same(model, want)
            assert same(adapter.engine.weights[0], {name: 2 * t for name, t in want.items()})


def test_nothing_is_loaded_before_the_last_byte_of_its_bucket() -> None:
    faults = [{"kind": "delay", "bucket": 3, "seconds": 0.5}]
    options: dict[str, Any] = {
        "backend": "weightbus.testing.faults:FaultyBackend",
        "backend_options": {"inner": "loopback", "faults": faults},
    }
    model = {f"w{k}": torch.full((1000,), float(k)) for k in range(5)}
    adapter = RecordingAdapter(tensors=poisoned(model))
    with sender(receivers=1, **options) as bus, receiving(bus, adapter=adapter, **options):
        handle = bus.isend(model, version=1, timeout=20)
        wait_until(lambda: "load w2" in adapter.engine.calls)
        time.sleep(0.2)
        assert "load w3" not in adapter.engine.calls
        assert adapter.engine.label == ""
        handle.wait(20)
        assert same(adapter.engine.weights[0], model)


@pytest.mark.parametrize("stage", [None, "host"])
def test_one_rank_s_error_is_raised_by_the_driver_s_recv_and_by_send_and_nobody_serves(stage: str | None) -> None:
    model = {f"w{k}": torch.full((1000,), float(k)) for k in range(5)}
    adapters = [
        RecordingAdapter(tensors=poisoned(model), fail_at="load:2" if r == 1 else "", fail_times=2 if stage else 1)
        for r in range(3)
    ]
    for adapter in adapters:
        adapter.engine.driven = False
    with sender(receivers=3) as bus:
        rxs = [receiving(bus, "e0", adapter=adapters[r], rank=r, ranks=3, stage=stage) for r in range(3)]
        try:
            with pytest.raises(weightbus.PartialRefitError, match="fails in load") as raised:
                bus.send(model, version=1, timeout=20)
            assert raised.value.outcomes == {"e0": "DIRTY"}
            for rx in rxs[:2]:  # the driver's and the failed rank's; the third may have done its part by then
                assert "fails in load" in str(rx.last(1))
            assert [rx.bus.version for rx in rxs] == [-1] * 3
            assert not adapters[0].engine.serving
            bus.send(model, version=2, timeout=20)
            for r in range(3):
                assert same(adapters[r].engine.weights[r], model)
        finally:
            for rx in rxs:
                rx.close()


def test_an_answer_of_the_old_weights_is_never_given_under_the_new_version() -> None:
    """Equal values under a new version too: the version is part of the identity."""
    model = weights(4)
    adapter = RecordingAdapter(tensors=poisoned(model))
    with sender(receivers=1) as bus, receiving(bus, adapter=adapter):
        answers = []
        for version, values in enumerate([model, weights(5), model, model], 1):
            bus.send(values, version=version, timeout=20)
            answers.append(adapter.engine.prompt("hello"))
        assert [label for label, _ in answers] == ["1", "2", "3", "4"]
        digests = [digest for _, digest in answers]
        assert digests[0] == digests[2] == digests[3] != digests[1]


def test_a_missing_name_and_an_uncovered_one_are_both_in_the_error_text() -> None:
    model = weights(6)
    some = {name: t for name, t in model.items() if name != "layer.4.w"}
    adapter = RecordingAdapter(tensors=poisoned(model))
    with sender(receivers=1) as bus, receiving(bus, adapter=adapter):
        with pytest.raises(weightbus.AlignmentError, match=r"1 faults: e0/0: missing 'layer\.4\.w'"):
            bus.send(some, version=1, timeout=20)

    class Forgets(RecordingAdapter):
        def loader(self, ranks: Sequence[int], device: torch.device | None) -> EngineLoader:
            inner = super().loader(ranks, device)
            load = inner.load

            def silent(batches: Sequence[Batch]) -> LoadResult:
                result = load(batches)
                return LoadResult(applied=[n for n in result.applied if n != "layer.2.w"])

            inner.load = silent  # type: ignore[method-assign]
            return inner

    with sender(receivers=1) as bus, receiving(bus, adapter=Forgets(tensors=poisoned(model))) as rx:
        with pytest.raises(weightbus.PartialRefitError, match=r"1 tensors were not applied: layer\.2\.w") as raised:
            bus.send(model, version=1, timeout=20)
        assert raised.value.outcomes == {"e0": "DIRTY"}
        assert not rx.engine.serving


def test_a_manifest_given_in_another_order_is_the_order_on_the_wire() -> None:
    model = weights(7)
    order = list(model)[::-1]
    with sender(receivers=1) as bus, WeightBus.receiver(bus.address, backend="loopback") as rx:
        handle = bus.isend(model, version=1, manifest=Manifest([TensorSpec.of(n, model[n]) for n in order]), timeout=20)
        got = dict(rx.recv(timeout=20))
        handle.wait(20)
        assert list(got) == order
        exact(got, model)
