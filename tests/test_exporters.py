"""Sources from real trainers: FSDP2, DDP, torch.compile, tensor parallelism; each equal to the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from weightbus.sources import open_source
from weightbus.testing.peers import run_peers

HERE = str(Path(__file__).resolve())
dist: Any = torch.distributed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, x + self.down(torch.relu(self.up(x))))


class Tiny(nn.Module):
    """Sizes that two, three and four ranks cannot share evenly; a bf16 parameter, buffers of both kinds, a tie."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.randn(5).to(torch.bfloat16))
        self.head = nn.Linear(6, 11, bias=False)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return cast(torch.Tensor, self.head(x) * self.scale.float().mean())


def tiny(*, tied: bool = False) -> Tiny:
    torch.manual_seed(5)
    return Tiny(tied=tied)


def change(model: nn.Module) -> None:
    """A step of training that is exact in every layout."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2)


def exported(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a sender would put on the wire, under every name; buffers are cloned, as the source only lends them."""
    source = open_source(model)
    assert source.manifest is not None
    found = {}
    for spec, tensor in zip(source.manifest, source.iterate(source.manifest), strict=True):
        assert not isinstance(tensor, DTensor)
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.torch_dtype)
        found.update({name: tensor.clone() for name in spec.names})
    return found


def differences(model: nn.Module, reference: nn.Module) -> list[str]:
    """Names that are missing, unexpected or not bit-equal."""
    ours, theirs = exported(model), reference.state_dict()
    wrong = [name for name in {*ours, *theirs} if name not in ours or name not in theirs]
    return sorted(wrong + [name for name in ours if name in theirs and not torch.equal(ours[name], theirs[name])])


def sharded(model: nn.Module) -> int:
    return sum(isinstance(parameter, DTensor) for parameter in model.parameters())


def member(rank: int, size: int, store: str, wraps: list[str]) -> list[dict[str, Any]]:
    """One trainer rank: for each way to wrap a model, differences before and after a change of its shards."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    found = [findings(wrap, size) for wrap in wraps]
    dist.destroy_process_group()
    return found


def findings(wrap: str, size: int) -> dict[str, Any]:
    reference = tiny(tied=wrap == "fsdp2_tied")
    model = WRAPPERS[wrap](copy.deepcopy(reference), size)
    before = differences(model, reference)
    change(model)
    change(reference)
    after = differences(model, reference)
    manifest = open_source(model).manifest
    assert manifest is not None
    aliases = [spec.names for spec in manifest if spec.aliases]
    return {
        "before": before,
        "after": after,
        "digest": manifest.digest(),
        "sharded": sharded(model),
        "aliases": aliases,
    }


def fsdp2(model: Any, size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return cast(nn.Module, model)


def tensor_parallel(model: Any, size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return cast(nn.Module, model)


def both(model: Any, size: int) -> nn.Module:
    """FSDP2 over tensor parallelism: DTensors on a mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return cast(nn.Module, model)


def compiled_parts(model: Any, size: int) -> nn.Module:
    """As trainers do: every layer compiled by itself, then sharded."""
    mesh = init_device_mesh("cpu", (size,))
    for index, layer in enumerate(model.layers):
        compiled: Any = torch.compile(layer)
        model.layers[index] = fully_shard(compiled, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return cast(nn.Module, model)


WRAPPERS: dict[str, Callable[[Any, int], nn.Module]] = {
    "fsdp2": fsdp2,
    "fsdp2_tied": fsdp2,
    "ddp": lambda model, _: DistributedDataParallel(model),
    "tensor_parallel": tensor_parallel,
    "fsdp2_tensor_parallel": both,
    "compiled_fsdp2": compiled_parts,
}


@pytest.mark.parametrize(
    ("size", "num_sharded"),
    [
        (2, {"fsdp2": 11, "ddp": 0, "tensor_parallel": 8, "compiled_fsdp2": 11}),
        (3, {"fsdp2": 11}),
        (4, {"fsdp2_tied": 10, "fsdp2_tensor_parallel": 11}),
    ],
)
def test_every_rank_exports_the_unsharded_model(size: int, num_sharded: dict[str, int], tmp_path: Path) -> None:
    wraps = list(num_sharded)
    calls = [(f"{HERE}:member", (rank, size, str(tmp_path / "store"), wraps)) for rank in range(size)]
    ranks = run_peers(*calls, timeout_s=240)
    for found, wrap in ((one, wrap) for rank in ranks for one, wrap in zip(rank, wraps, strict=True)):
        assert (found["before"], found["after"]) == ([], []), wrap
        assert found["sharded"] == num_sharded[wrap], f"{wrap}: the model was really sharded"
        assert found["aliases"] == ([("emb.weight", "head.weight")] if wrap == "fsdp2_tied" else [])
    assert all(rank == ranks[0] for rank in ranks), "one manifest on all ranks"


def test_a_compiled_model_goes_by_its_own_names() -> None:
    reference = tiny()
    compiled: Any = torch.compile(copy.deepcopy(reference))
    assert any("_orig_mod" in name for name, _ in compiled.named_parameters())
    assert differences(compiled, reference) == []


def test_a_difference_would_be_seen() -> None:
    model = tiny()
    with torch.no_grad():
        model.layers[1].up.bias[3] += 1  # type: ignore[index,union-attr,operator]
    assert differences(model, tiny()) == ["layers.1.up.bias"]
