"""The torch adapter: values land in the storage that is there; every fault before, every name after."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from weightbus.adapter import EngineLoader, Refit
from weightbus.deadline import Deadline
from weightbus.errors import ConfigError, EngineError
from weightbus.manifest import Manifest, TensorSpec
from weightbus.registry import load_adapter
from weightbus_torch import TorchAdapter

ROOT = Path(__file__).parent.parent
POISON = 0xA5


class Model(nn.Module):
    """Tied, 0-dim, empty and strided parameters, and both kinds of buffers; all poisoned."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(0.0))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.zeros(2, 3).t())
        self.register_buffer("kept", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                tensor.fill_(POISON)


def batch(**changes: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    tensors = {
        "scale": torch.tensor(1.5),
        "none": torch.empty(0, 4),
        "turned": torch.arange(6.0).view(3, 2),
        "kept": torch.tensor([1, 2, 3]),
        "emb.weight": torch.arange(6.0).view(3, 2) + 10,
    }
    tensors.update({name.replace("__", "."): tensor for name, tensor in changes.items()})
    return list(tensors.items())


def offer(tensors: list[tuple[str, torch.Tensor]], **aliases: tuple[str, ...]) -> Manifest:
    return Manifest([TensorSpec.of(n, t, aliases.get(n.replace(".", "__"), ())) for n, t in tensors])


def loader_of(module: nn.Module, **options: bool) -> EngineLoader:
    return TorchAdapter(module=module, **options).loader([0], None)


def faults(loader: EngineLoader, manifest: Manifest, *, partial: bool = False) -> list[tuple[str, str]]:
    return [(fault.kind, fault.name) for fault in loader.check([manifest], partial=partial)]


def test_values_land_in_place_and_nothing_is_rebound() -> None:
    module = Model()
    before = {name: (t.data_ptr(), t.stride()) for name, t in module.state_dict(keep_vars=True).items()}
    loader = loader_of(module)
    tensors = batch()
    assert faults(loader, offer(tensors)) == []
    result = loader.load([tensors])
    assert result.applied == tuple(name for name, _ in tensors) and result.skipped == ()
    for name, tensor in tensors:
        assert torch.equal(module.state_dict()[name], tensor), name
    assert module.head.weight is module.emb.weight
    assert module.cache.tolist() == [POISON, POISON]
    assert {name: (t.data_ptr(), t.stride()) for name, t in module.state_dict(keep_vars=True).items()} == before
    assert all(p.requires_grad and p.grad_fn is None for p in module.parameters())


def test_a_b_a_through_several_loads_and_refits() -> None:
    module = Model()
    loader = loader_of(module)
    for value in (1.0, 2.0, 1.0):
        tensors = [(name, torch.full_like(t, value)) for name, t in batch()]
        assert faults(loader, offer(tensors)) == []
        loader.load([tensors[:2]])
        loader.load([tensors[2:]])
        for name, tensor in tensors:
            assert torch.equal(module.state_dict()[name], tensor)


def test_what_was_loaded_does_not_alias_what_was_given() -> None:
    module = Model()
    loader = loader_of(module)
    tensors = batch()
    loader.load([tensors])
    for _, tensor in tensors:
        tensor.fill_(7)
    assert module.scale.item() == 1.5 and module.kept.tolist() == [1, 2, 3]


def test_large_tensors_are_copied_too() -> None:
    module = nn.Module()
    module.big = nn.Parameter(torch.full((5 << 20,), float(POISON)))
    module.small = nn.Parameter(torch.full((3,), float(POISON)))
    tensors = [("small", torch.arange(3.0)), ("big", torch.arange(float(5 << 20)))]
    loader = loader_of(module)
    assert faults(loader, offer(tensors)) == []
    loader.load([tensors])
    assert torch.equal(module.big, tensors[1][1]) and torch.equal(module.small, tensors[0][1])


def test_every_fault_is_listed_at_once_and_nothing_is_touched() -> None:
    module = Model()
    tensors = batch(kept=torch.zeros(4, dtype=torch.int32), unknown=torch.zeros(1), other__name=torch.zeros(1))
    manifest = offer([(name, t) for name, t in tensors if name not in ("scale", "emb.weight")])
    found = loader_of(module).check([manifest], partial=False)
    assert [(f.kind, f.name) for f in found] == [
        ("shape", "kept"), ("dtype", "kept"), ("unexpected", "unknown"), ("unexpected", "other.name"),
        ("missing", "scale"), ("missing", "emb.weight"),
    ]  # fmt: skip
    assert [f.detail for f in found[:2]] == [
        "expected [3], offered [4]",
        "expected int64, offered int32; cast=True converts",
    ]
    assert all(bool((t == POISON).all()) for t in module.state_dict().values())


def test_partial_asks_for_no_more_than_it_brings() -> None:
    loader = loader_of(Model())
    only = [("scale", torch.tensor(2.0))]
    assert faults(loader, offer(only), partial=True) == []
    assert faults(loader, offer(only)) == [("missing", name) for name in ("none", "turned", "kept", "emb.weight")]
    assert faults(loader, offer([("nope", torch.zeros(1))]), partial=True) == [("unexpected", "nope")]


def test_the_answer_depends_on_the_offer_not_on_the_last_one() -> None:
    loader = loader_of(Model())
    bad = offer(batch(extra=torch.zeros(1)))
    assert faults(loader, bad) == faults(loader, bad) == [("unexpected", "extra")]
    loader.check([bad], partial=False).clear()
    assert faults(loader, bad) == [("unexpected", "extra")]
    assert faults(loader, offer(batch())) == []


# ---- ties


def test_a_tie_known_to_both_sides_is_written_once() -> None:
    module = Model()
    loader = loader_of(module)
    weight = torch.arange(6.0).view(3, 2)
    others = [(n, t) for n, t in batch() if n != "emb.weight"]
    assert faults(loader, offer([*others, ("emb.weight", weight)], emb__weight=("head.weight",))) == []
    version = module.emb.weight._version
    result = loader.load([[("emb.weight", weight), ("head.weight", weight)]])
    assert result.applied == ("emb.weight", "head.weight")
    assert module.emb.weight._version == version + 1
    assert torch.equal(module.head.weight, weight)


def test_a_tie_of_the_sender_fills_untied_targets() -> None:
    module = Model()
    module.head.weight = nn.Parameter(torch.full((3, 2), float(POISON)))
    loader = loader_of(module)
    weight = torch.arange(6.0).view(3, 2)
    others = [(n, t) for n, t in batch() if n != "emb.weight"]
    assert faults(loader, offer([*others, ("emb.weight", weight)], emb__weight=("head.weight",))) == []
    loader.load([[("emb.weight", weight), ("head.weight", weight)]])
    assert torch.equal(module.head.weight, weight) and torch.equal(module.emb.weight, weight)
    assert module.head.weight.data_ptr() != module.emb.weight.data_ptr()


def test_an_alias_that_only_the_sender_knows_is_reported_as_skipped() -> None:
    module = nn.Module()
    module.emb = nn.Embedding(3, 2)
    loader = loader_of(module)
    weight = torch.ones(3, 2)
    assert faults(loader, offer([("old.name", weight)], old__name=("emb.weight",))) == []
    result = loader.load([[("old.name", weight), ("emb.weight", weight)]])
    assert (result.applied, result.skipped) == (("emb.weight",), ("old.name",))
    assert torch.equal(module.emb.weight, weight)


def test_an_alias_that_only_the_module_knows_is_covered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    module = Model()
    with caplog.at_level(logging.INFO, logger="weightbus.torch"):
        assert faults(loader_of(module), offer(batch())) == []
    assert [r.getMessage() for r in caplog.records] == ["tied in the module only: head.weight follows emb.weight"]


def test_two_tensors_for_one_target_are_refused_and_the_last_wins_unless_strict() -> None:
    module = Model()
    tensors = [*batch(), ("head.weight", torch.full((3, 2), 9.0))]
    assert faults(loader_of(module), offer(tensors)) == [("duplicate", "head.weight")]
    loader = loader_of(module, strict=False)
    assert faults(loader, offer(tensors)) == []
    loader.load([tensors])
    assert torch.equal(module.emb.weight, torch.full((3, 2), 9.0))


# ---- options


def test_unknown_and_missing_names_pass_without_strict_and_are_reported() -> None:
    module = Model()
    loader = loader_of(module, strict=False)
    tensors = [("scale", torch.tensor(3.0)), ("unknown", torch.zeros(9))]
    assert faults(loader, offer(tensors)) == []
    result = loader.load([tensors])
    assert (result.applied, result.skipped) == (("scale",), ("unknown",))
    assert module.scale.item() == 3.0 and module.kept.tolist() == [POISON] * 3


def test_shapes_and_dtypes_are_faults_even_without_strict() -> None:
    loader = loader_of(Model(), strict=False)
    wrong = [("scale", torch.zeros(1)), ("kept", torch.zeros(3))]
    assert faults(loader, offer(wrong)) == [("shape", "scale"), ("dtype", "kept")]


def test_cast_converts_but_drops_no_imaginary_part() -> None:
    module = Model()
    loader = loader_of(module, cast=True)
    tensors = batch(scale=torch.tensor(1.5, dtype=torch.bfloat16), kept=torch.tensor([4, 5, 6], dtype=torch.int32))
    assert faults(loader, offer(tensors)) == []
    loader.load([tensors])
    assert (module.scale.item(), module.scale.dtype) == (1.5, torch.float32)
    assert (module.kept.tolist(), module.kept.dtype) == ([4, 5, 6], torch.int64)
    assert faults(loader, offer([("scale", torch.zeros((), dtype=torch.complex64))]), partial=True) == [
        ("dtype", "scale")
    ]


def test_a_non_persistent_buffer_is_written_when_it_comes() -> None:
    module = Model()
    loader = loader_of(module)
    tensors = batch(cache=torch.tensor([1.0, 2.0]))
    assert faults(loader, offer(tensors)) == []
    loader.load([tensors])
    assert module.cache.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.complex64, torch.uint16])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_dtypes_and_shapes_arrive_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    value = torch.empty(shape, dtype=dtype)
    value.view(-1).view(torch.uint8)[:] = raw
    module = nn.Module()
    module.register_buffer("t", torch.empty(shape, dtype=dtype))
    module.t.view(-1).view(torch.uint8).fill_(POISON)
    loader = loader_of(module)
    assert faults(loader, offer([("t", value)])) == []
    loader.load([[("t", value)]])
    assert torch.equal(module.t.view(-1).view(torch.uint8), raw)


def test_strided_and_expanded_sources_arrive_as_they_read() -> None:
    module = nn.Module()
    module.register_buffer("a", torch.full((4, 3), float(POISON)))
    module.register_buffer("b", torch.full((4, 3), float(POISON)))
    a, b = torch.arange(12.0).view(3, 4).t(), torch.arange(3.0).expand(4, 3)
    loader_of(module).load([[("a", a), ("b", b)]])
    assert torch.equal(module.a, a) and torch.equal(module.b, b)


def test_inference_tensors_are_written() -> None:
    with torch.inference_mode():
        module = nn.Linear(2, 2, bias=False)
        loader_of(module).load([[("weight", torch.ones(2, 2))]])
    loader = loader_of(module)
    loader.load([[("weight", torch.full((2, 2), 3.0))]])
    assert module.weight.tolist() == [[3, 3], [3, 3]]


def test_wrapped_targets_go_by_their_bare_names() -> None:
    module = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": nn.Linear(1, 1, bias=False)})})
    loader = loader_of(module)
    assert faults(loader, offer([("weight", torch.zeros(1, 1))])) == []
    loader.load([[("weight", torch.full((1, 1), 4.0))]])
    assert module["module"]["_orig_mod"].weight.item() == 4


# ---- things that cannot be


def test_targets_that_cannot_be_written_are_faults() -> None:
    module = nn.Module()
    module.register_buffer("meta", torch.empty(2, device="meta"))
    module.register_buffer("wide", torch.zeros(1).expand(2))
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    tensors = [("meta", torch.zeros(2)), ("wide", torch.zeros(2)), ("sparse", torch.zeros(2, 2))]
    found = loader_of(module).check([offer(tensors)], partial=False)
    assert [(f.kind, f.name) for f in found] == [("engine", "meta"), ("engine", "wide"), ("engine", "sparse")]


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([("scale", torch.zeros(())), ("nope", torch.zeros(1))], "that the module lacks.*nope"),
        ([("turned", torch.zeros(2))], r"does not fit: shape 'turned' expected \[3, 2\], offered \[2\]"),
        ([("kept", torch.zeros(3))], "does not fit: dtype 'kept' expected int64, offered float32"),
    ],
)
def test_load_without_a_check_refuses_what_does_not_fit_before_it_writes(
    tensors: list[tuple[str, torch.Tensor]], text: str
) -> None:
    module = Model()
    with pytest.raises(EngineError, match=text):
        loader_of(module).load([tensors])
    assert module.scale.item() == POISON and module.kept.tolist() == [POISON] * 3


def test_load_never_broadcasts_into_names_it_has_seen() -> None:
    module = Model()
    loader = loader_of(module)
    loader.load([[("turned", torch.ones(3, 2))]])
    with pytest.raises(EngineError, match="does not fit"):
        loader.load([[("turned", torch.zeros(2))]])
    assert torch.equal(module.turned, torch.ones(3, 2))


def test_an_empty_batch_is_nothing() -> None:
    assert loader_of(Model()).load([[]]).applied == ()


def test_rebound_parameters_are_found_again() -> None:
    module = Model()
    loader = loader_of(module)
    tensors = batch()
    for rebind in ("data", "object"):
        assert faults(loader, offer(tensors)) == []
        loader.load([tensors])
        if rebind == "data":
            module.scale.data = torch.tensor(float(POISON))
        else:
            module.scale = nn.Parameter(torch.tensor(float(POISON)))
        assert faults(loader, offer(tensors)) == []
        loader.load([tensors])
        assert module.scale.item() == 1.5


@pytest.mark.parametrize("change", ["shape", "data_shape", "untie", "new"])
def test_a_module_that_became_another_is_an_error_before_a_write(change: str) -> None:
    module = Model()
    loader = loader_of(module)
    assert faults(loader, offer(batch())) == []
    if change == "shape":
        module.kept = torch.full((4,), POISON)
    elif change == "data_shape":
        module.kept.data = torch.full((4,), POISON)
    elif change == "untie":
        module.head.weight = nn.Parameter(torch.zeros(3, 2))
    else:
        module.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(EngineError, match="the module has changed"):
        loader.load([batch()])
    assert module.scale.item() == POISON


def test_use_after_close_is_an_error_and_closing_twice_is_not() -> None:
    loader = loader_of(Model())
    loader.close()
    loader.close()
    with pytest.raises(EngineError, match="closed"):
        loader.load([batch()])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "option 'module' is required"),
        ({"module": 7}, "module is int"),
        ({"module": nn.Identity()}, "no parameters and no buffers"),
        ({"module": nn.Linear(1, 1), "fast": True}, "unknown option 'fast'.*module, cast, strict"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_adapter("torch", options)


def test_names_that_are_equal_once_cleaned_are_refused() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(1))
    module.module = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="equal once cleaned: weight"):
        TorchAdapter(module=module)


def test_one_module_is_one_rank() -> None:
    adapter = TorchAdapter(module=Model())
    assert adapter.device == torch.device("cpu")
    with pytest.raises(ConfigError, match="one rank"):
        adapter.loader([0, 1], None)


def test_the_driver_has_no_steps() -> None:
    driver, never = TorchAdapter(module=Model()).driver(), Deadline.after(None)
    driver.begin(Refit(refit_id="r", version=1), never)
    driver.finish(1, never)
    driver.resume(never)
    driver.abort("why", loaded=True, resume=False, deadline=never)
    driver.heal(never)
    driver.close()


def sharded_rank(rank: int, store: str) -> None:
    """One of two ranks: full tensors into FSDP2 shards (uneven, tied), each rank by itself, beside plain buffers."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    module = Model()
    del module.scale, module.none, module.turned
    module.add_module("odd", nn.Linear(4, 1, bias=False))
    model = fully_shard(module, mesh=mesh)
    for name, placement in (("cols", Shard(1)), ("whole", Replicate())):
        model.register_buffer(name, distribute_tensor(torch.full((2, 3), float(POISON)), mesh, [placement]))
    tensors = [
        ("kept", torch.tensor([7, 8, 9])),
        ("cols", torch.arange(6.0).view(2, 3)),
        ("whole", torch.arange(6.0).view(2, 3) + 50),
        ("emb.weight", torch.arange(6.0).view(3, 2) + 100),
        ("odd.weight", torch.arange(4.0).view(1, 4) + 200),
    ]
    local = model.emb.weight.to_local().data_ptr()
    loader = loader_of(model)
    manifest = offer(tensors, emb__weight=("head.weight",))
    assert faults(loader, manifest) == []
    if rank == 0:  # alone: no collective is needed to load
        loader.load([tensors])
    dist.barrier()
    if rank == 1:
        loader.load([tensors])
    dist.barrier()
    assert model.emb.weight.to_local().data_ptr() == local and model.head.weight is model.emb.weight
    rows = tensors[3][1][:2] if rank == 0 else tensors[3][1][2:]
    assert torch.equal(model.emb.weight.to_local()[: len(rows)], rows)
    for name, tensor in tensors:
        held = model.state_dict(keep_vars=True)[name].detach()
        full = held.full_tensor() if isinstance(held, DTensor) else held
        assert torch.equal(full, tensor), (rank, name, full)
    dist.destroy_process_group()


def test_sharded_targets_take_their_part_without_communication(tmp_path: Path) -> None:
    path = [str(ROOT / part) for part in (".", "backends", "adapters")]
    code = (
        f"import sys, runpy; sys.path[:0] = {path!r}\n"
        f"runpy.run_path({__file__!r})['sharded_rank'](int(sys.argv[1]), {str(tmp_path / 'store')!r})\n"
        "import os; os._exit(0)"  # torch's own threads now and then abort an orderly exit
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
