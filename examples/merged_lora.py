"""Send a LoRA model (PEFT) merged, without merging it: the base weights stay bit-equal.

PEFT's own ``merge_adapter`` and ``unmerge_adapter`` add and subtract in the weight's dtype, so a bf16 base drifts with
every cycle. `merged` computes each merged weight into a new tensor, one layer at a time, while it is being sent;
each sum is rounded once.

Run it: ``python examples/merged_lora.py``. It trains nothing: it sends a small model from one process to another and
compares what arrived with PEFT's merge of a copy.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

import weightbus
from weightbus.manifest import Manifest, TensorSpec
from weightbus.names import clean, is_leftover


def merged(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the bare model, by its own name, with active LoRA adapters merged in.

    Fully trained modules (``modules_to_save``) come in place of their originals. A merged weight is the generator's own
    and valid until the next step; other tensors are the model's. On a sharded model each weight is gathered in turn, so
    all ranks must iterate alike.

    Raises:
        ValueError: the model is merged already, or an adapter is more than a difference of weights (DoRA, a bias).
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    for name, layer in layers.items():
        _check(name, layer)
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner = name.removesuffix(".base_layer.weight")
        if is_leftover(name):
            continue
        with torch.no_grad():
            value = _whole(tensor)
            if owner != name and owner in layers:
                value = value.clone()
                for adapter in layers[owner].active_adapters:
                    if adapter in layers[owner].scaling:
                        value += _whole(layers[owner].get_delta_weight(adapter))
        yield clean(name), value


def merged_manifest(model: nn.Module) -> Manifest:
    """What `merged` will yield: metadata only. With it no page of names is sent ahead."""
    named = model.state_dict(keep_vars=True).items()
    return Manifest(tuple(TensorSpec.of(clean(name), tensor) for name, tensor in named if not is_leftover(name)))


def _check(name: str, layer: Any) -> None:
    if layer.merged:
        raise ValueError(f"{name} is merged already; call unmerge_adapter first")
    if any(layer.use_dora.values()) or any(layer.lora_bias.values()):
        raise ValueError(f"{name} has DoRA or a LoRA bias; send a merged copy of the model in place of it")


def _whole(tensor: Any) -> torch.Tensor:
    value: torch.Tensor = tensor.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def example_model() -> tuple[nn.Module, Any]:
    """A bare model, and the same with LoRA on two layers, adapters set to something, the embedding fully trained."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).to(torch.bfloat16)
    lora = get_peft_model(copy.deepcopy(bare), LoraConfig(r=4, target_modules=["1", "3"], modules_to_save=["0"]))
    with torch.no_grad():
        for parameter in lora.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return bare, lora


def engine(address: str) -> None:
    """The inference process: its own module, filled by the bus."""
    module, lora = example_model()
    report = weightbus.recv(address, into=module, timeout=60)
    expected = lora.merge_and_unload().state_dict()
    same = all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())
    print(f"engine: version {report.version}, equal to PEFT's merge: {same}")


def main() -> None:
    _, lora = example_model()
    before = copy.deepcopy(lora.state_dict())
    with weightbus.WeightBus.sender(bind="tcp://127.0.0.1:0", receivers=1) as bus:
        process = multiprocessing.get_context("spawn").Process(target=engine, args=(bus.address,))
        process.start()
        bus.send(merged(lora), manifest=merged_manifest(lora), version=1, timeout=60)
        process.join()
    drifted = [name for name, tensor in lora.state_dict().items() if not torch.equal(tensor, before[name])]
    print(f"trainer: tensors that drifted: {drifted}")


if __name__ == "__main__":
    main()
