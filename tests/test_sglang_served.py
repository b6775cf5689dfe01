"""The check against the served checkpoint, and how other layouts are cut into its tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.engines.sglang_double import layers, write_checkpoint
from weightbus.errors import ConfigError
from weightbus.manifest import Manifest, TensorSpec
from weightbus_sglang.served import Served


def manifest(weights: Mapping[str, torch.Tensor]) -> Manifest:
    return Manifest([TensorSpec.of(name, tensor) for name, tensor in weights.items()])


def served(weights: Mapping[str, torch.Tensor], *, tied: bool = False) -> Served:
    return Served(
        tensors={
            name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in weights.items()
        },
        tied=tied,
    )


def faults(checkpoint: Served, weights: Mapping[str, torch.Tensor], partial: bool = False) -> set[tuple[str, str]]:
    return {(fault.kind, fault.name) for fault in checkpoint.check(manifest(weights), partial=partial)}


def test_headers_are_read_from_one_file_and_from_an_index(tmp_path: Path) -> None:
    weights = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros((), dtype=torch.bfloat16),
        "c": torch.zeros(0, dtype=torch.int8),
    }
    expected = {"a": ((2, 3), "float32"), "b": ((), "bfloat16"), "c": ((0,), "int8")}
    one = Served.read(str(write_checkpoint(tmp_path / "one", weights, tie_word_embeddings=True)))
    assert (dict(one.tensors), one.tied, one.quantisation) == (expected, True, "")
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    save_file({"a": weights["a"]}, folder / "m-1.safetensors")
    save_file({"b": weights["b"], "c": weights["c"]}, folder / "m-2.safetensors")
    save_file({"not": weights["a"]}, folder / "other.safetensors")
    weight_map = {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    two = Served.read(str(folder))
    assert (dict(two.tensors), two.tied, two.quantisation) == (expected, False, "fp8")


@pytest.mark.parametrize("spoil", ["no folder", "no config", "no tensors", "broken header"])
def test_an_unreadable_checkpoint_says_what_to_give(tmp_path: Path, spoil: str) -> None:
    folder = tmp_path / "model"
    if spoil != "no folder":
        write_checkpoint(folder, {"a": torch.zeros(2)})
    if spoil == "no config":
        (folder / "config.json").unlink()
    if spoil == "no tensors":
        (folder / "model.safetensors").unlink()
    if spoil == "broken header":
        (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="model_path") as caught:
        Served.read(str(folder))
    assert str(folder) in str(caught.value)


def test_the_checkpoints_own_names_are_taken() -> None:
    weights = layers(experts=2)
    assert faults(served(weights), weights) == set()
    assert [name for name, _ in served(weights).expand(list(weights.items()))] == list(weights)


def test_every_fault_of_a_manifest_is_named() -> None:
    weights = layers()
    offered = dict(weights)
    del offered["model.norm.weight"]
    offered["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(8, 9)
    offered["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(8, 8, dtype=torch.bfloat16)
    offered["base_model.model.norm.weight"] = torch.zeros(8)
    offered["model.layers.0.self_attn.qkv_proj.weight"] = torch.zeros(16, 8)
    attention = "model.layers.0.self_attn"
    assert faults(served(weights), offered) == {
        ("missing", "model.norm.weight"),
        ("shape", f"{attention}.o_proj.weight"),
        ("dtype", "model.layers.1.self_attn.o_proj.weight"),
        ("unexpected", "base_model.model.norm.weight"),
        ("duplicate", f"{attention}.q_proj.weight"),
        ("duplicate", f"{attention}.k_proj.weight"),
        ("duplicate", f"{attention}.v_proj.weight"),
    }


def test_a_partial_manifest_may_lack_names_but_not_invent_them() -> None:
    weights = layers()
    assert faults(served(weights), {"model.norm.weight": torch.zeros(8)}, partial=True) == set()
    assert faults(served(weights), {"model.nor.weight": torch.zeros(8)}, partial=True) == {
        ("unexpected", "model.nor.weight")
    }


def test_an_empty_manifest_is_a_fault() -> None:
    assert [str(fault) for fault in served({}).check(Manifest([]), partial=True)] == ["missing the manifest is empty"]


def test_a_tied_head_may_come_or_not_and_is_left_to_the_engine() -> None:
    weights = layers()
    head = weights.pop("lm_head.weight")
    tied = served(weights, tied=True)
    assert faults(tied, weights) == set()
    assert faults(tied, {**weights, "lm_head.weight": head}) == set()
    assert tied.expand([("lm_head.weight", head), ("model.norm.weight", weights["model.norm.weight"])])[0][0] == (
        "model.norm.weight"
    )
    assert tied.skipped(["lm_head.weight", "model.norm.weight"]) == ("lm_head.weight",)
    untied = served({**weights, "lm_head.weight": head})
    assert faults(untied, weights) == {("missing", "lm_head.weight")}
    shared = Manifest(
        [
            TensorSpec.of(n, t, ["lm_head.weight"] if n == "model.embed_tokens.weight" else [])
            for n, t in weights.items()
        ]
    )
    assert untied.check(shared, partial=False) == []


def test_rotary_buffers_are_left_to_the_engine() -> None:
    weights = layers()
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert faults(served(weights), {**weights, buffer: torch.zeros(4)}) == set()
    assert faults(served({**weights, buffer: torch.zeros(4)}), weights) == set()
    assert served(weights).expand([(buffer, torch.zeros(4))]) == []


def test_fused_attention_and_mlp_are_cut_by_the_served_rows() -> None:
    weights = layers()
    offered = dict(weights)
    attention, mlp = "model.layers.0.self_attn.", "model.layers.1.mlp."
    qkv = torch.cat([offered.pop(f"{attention}{part}_proj.weight") for part in "qkv"])
    offered[f"{attention}qkv_proj.weight"] = qkv
    gate_up = torch.cat([offered.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up")])
    offered[f"{mlp}gate_up_proj.weight"] = gate_up
    checkpoint = served(weights)
    assert faults(checkpoint, offered) == set()
    expanded = dict(checkpoint.expand(list(offered.items())))
    assert expanded.keys() == weights.keys()
    for name, tensor in expanded.items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0)
    offered[f"{attention}qkv_proj.weight"] = torch.cat([qkv, qkv[:1]])
    assert faults(checkpoint, offered) == {("shape", f"{attention}qkv_proj.weight")}
    fused = served({f"{attention}qkv_proj.weight": qkv})
    assert faults(fused, {f"{attention}qkv_proj.weight": qkv}) == set()  # where the checkpoint itself is fused


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_stacked_experts_are_cut_into_the_served_ones(suffix: str) -> None:
    weights = layers(experts=3)
    offered = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer in ("model.layers.0.mlp.experts.", "model.layers.1.mlp.experts."):
        gate_up = [
            torch.cat([weights[f"{layer}{e}.gate_proj.weight"], weights[f"{layer}{e}.up_proj.weight"]])
            for e in range(3)
        ]
        offered[f"{layer}gate_up_proj{suffix}"] = torch.stack(gate_up)
        offered[f"{layer}down_proj{suffix}"] = torch.stack([weights[f"{layer}{e}.down_proj.weight"] for e in range(3)])
    checkpoint = served(weights)
    assert faults(checkpoint, offered) == set()
    expanded = dict(checkpoint.expand(list(offered.items())))
    assert expanded.keys() == weights.keys()
    for name, tensor in expanded.items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0)
    stacked = f"model.layers.0.mlp.experts.down_proj{suffix}"
    offered[stacked] = offered[stacked][:2]
    assert ("unexpected", stacked) in faults(checkpoint, offered)


def test_a_router_bias_is_a_weight_like_any() -> None:
    weights = layers(experts=2)
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    assert faults(served(weights), {name: t for name, t in weights.items() if name != bias}) == {("missing", bias)}


def test_a_weight_and_its_scale_are_one_group() -> None:
    weights = {"a.q_proj.weight": torch.zeros(4, 4), "a.q_proj.weight_scale_inv": torch.zeros(1, 1)}
    checkpoint = served(weights)
    assert faults(checkpoint, {"a.q_proj.weight": torch.zeros(4, 4)}, partial=True) == {
        ("group", "a.q_proj.weight_scale_inv")
    }
    (rule,) = checkpoint.rules().together
    assert key_of(rule, "a.q_proj.weight") == key_of(rule, "a.q_proj.weight_scale_inv") == "a.q_proj"
    assert served({"a.q_proj.weight": torch.zeros(4, 4)}).rules().together == ()


def test_low_rank_attention_inputs_are_one_group() -> None:
    names = ["m.0.q_a_proj.weight", "m.0.kv_a_proj_with_mqa.weight", "m.0.q_a_proj.weight_scale_inv"]
    rules = served({name: torch.zeros(2, 2) for name in names}).rules().together
    keys = {key_of(rule, name) for name in names for rule in rules}
    assert keys - {None} == {"m.0.a_proj"}


def key_of(rule: object, name: str) -> str | None:
    match = re.fullmatch(rule.pattern, name)  # type: ignore[attr-defined]
    return match.expand(rule.key) if match else None  # type: ignore[attr-defined]


class Counting(dict[str, tuple[tuple[int, ...], str]]):
    """Counts look-ups and steps of iterations."""

    count = 0

    def __getitem__(self, key: str) -> tuple[tuple[int, ...], str]:
        self.count += 1
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.count += 1
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self.count += 1
            yield key


def test_18432_expert_tensors_cost_a_few_lookups_each() -> None:
    parts = {"gate": (4, 2), "up": (4, 2), "down": (2, 4)}
    tensors = Counting(
        {
            f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight": (shape, "float32")
            for i in range(48) for e in range(128) for part, shape in parts.items()
        }
    )  # fmt: skip
    checkpoint = Served(tensors=tensors)
    stacked = {"gate_up": (128, 8, 2), "down": (128, 2, 4)}
    offered = Manifest(
        [
            TensorSpec(f"model.layers.{i}.mlp.experts.{part}_proj", shape, "float32")
            for i in range(48) for part, shape in stacked.items()
        ]
    )  # fmt: skip
    assert checkpoint.check(offered, partial=False) == []
    assert len(tensors) == 18432
    assert tensors.count < 12 * 18432
