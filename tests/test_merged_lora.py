"""The recipe of examples/merged_lora.py: PEFT's merge, without touching the base."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from weightbus.sources import open_source

pytest.importorskip("peft")
PATH = Path(__file__).parent.parent / "examples" / "merged_lora.py"


@pytest.fixture
def recipe() -> Any:
    spec = importlib.util.spec_from_file_location("merged_lora", PATH)
    if spec is None or spec.loader is None:
        pytest.fail(f"{PATH} is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_equals_pefts_merge_and_keeps_every_tensor(recipe: Any) -> None:
    bare, lora = recipe.example_model()
    found = {name: tensor.clone() for name, tensor in recipe.merged(lora)}
    expected = copy.deepcopy(lora).merge_and_unload().state_dict()
    assert list(found) == list(bare.state_dict()), "names and order of the bare model"
    assert set(found) == set(expected)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    changed = [name for name in found if not torch.equal(found[name], bare.state_dict()[name])]
    assert changed == ["0.weight", "1.weight", "3.weight"], "both adapters and the fully trained embedding are in"


def test_an_embeddings_sum_is_rounded_once(recipe: Any) -> None:
    bare, _ = recipe.example_model()
    base = bare[0].weight.detach().clone()
    lora = recipe.get_peft_model(bare, recipe.LoraConfig(r=4, target_modules=["0"]))
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    layer = lora.base_model.model[0]
    delta = (8 / 4) * (layer.lora_embedding_B["default"] @ layer.lora_embedding_A["default"]).T
    assert torch.equal(dict(recipe.merged(lora))["0.weight"], (base.float() + delta).to(torch.bfloat16))


def test_a_hundred_sends_leave_the_base_bit_equal(recipe: Any) -> None:
    _, lora = recipe.example_model()
    before = copy.deepcopy(lora.state_dict())
    first = {name: tensor.clone() for name, tensor in recipe.merged(lora)}
    for _ in range(100):
        last = dict(recipe.merged(lora))
    assert [name for name in before if not torch.equal(before[name], lora.state_dict()[name])] == []
    assert [name for name in first if not torch.equal(first[name], last[name])] == []
    for _ in range(100):
        lora.merge_adapter()
        lora.unmerge_adapter()
    drifted = [name for name in before if not torch.equal(before[name], lora.state_dict()[name])]
    assert drifted, "what the recipe avoids"


def test_the_manifest_fits_the_stream(recipe: Any) -> None:
    _, lora = recipe.example_model()
    source = open_source(recipe.merged(lora), manifest=recipe.merged_manifest(lora))
    assert source.manifest is not None
    assert [tensor.shape for tensor in source.iterate(source.manifest)] == [spec.shape for spec in source.manifest]


def test_a_merged_model_is_refused(recipe: Any) -> None:
    _, lora = recipe.example_model()
    lora.merge_adapter()
    with pytest.raises(ValueError, match="merged already"):
        next(recipe.merged(lora))


def test_dora_is_refused(recipe: Any) -> None:
    bare, _ = recipe.example_model()
    model = recipe.get_peft_model(bare, recipe.LoraConfig(r=2, target_modules=["1"], use_dora=True))
    with pytest.raises(ValueError, match="DoRA"):
        next(recipe.merged(model))


def test_the_example_runs() -> None:
    ran = subprocess.run(
        [sys.executable, str(PATH)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "engine: version 1, equal to PEFT's merge: True" in ran.stdout
    assert "trainer: tensors that drifted: []" in ran.stdout
