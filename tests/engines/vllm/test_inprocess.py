"""The adapter against a real engine in this process: bits, refusals, failures and what heals them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

Q = "model.layers.0.self_attn.q_proj.weight"


class Pair(NamedTuple):
    """An engine that started on A, its refits, and what fresh engines on A and B answer."""

    llm: Any
    refits: Any
    a: Path
    b: Path
    out_a: Any
    out_b: Any


def make_pair(checkpoints: Path, kind: str, **variant: bool) -> Pair:
    import rig
    import tiny

    folder = "-".join([kind, *(name for name, on in variant.items() if on)])
    a, b = (tiny.make(checkpoints / f"{folder}-{seed}", seed, kind, **variant) for seed in (0, 1))
    out_b = rig.generate(rig.engine(b))
    llm = rig.engine(a)
    out_a = rig.generate(llm)
    assert all(x[0] != y[0] for x, y in zip(out_a, out_b, strict=True))
    return Pair(llm, rig.Refits(checkpoints / f"{folder}-orders", llm=llm), a, b, out_a, out_b)


@pytest.fixture(scope="module", params=["packed", "plain"])
def packing(request: pytest.FixtureRequest) -> Iterator[str]:
    """With and without the one-DNN packing of CPU builds; plain is what a GPU holds."""
    import vllm._custom_ops as ops

    before = ops._supports_onednn
    ops._supports_onednn = before and request.param == "packed"
    yield request.param
    ops._supports_onednn = before


@pytest.fixture(scope="module", params=["untied", "tied"])
def llama(request: pytest.FixtureRequest, packing: str, checkpoints: Path) -> Pair:
    return make_pair(checkpoints, "llama", tied=request.param == "tied")


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_refit_equals_a_fresh_engine_bit_for_bit_and_back(llama: Pair, chunk: int) -> None:
    import rig

    for path, want in ((llama.b, llama.out_b), (llama.a, llama.out_a)):
        version = llama.refits.run(path, chunk=chunk)
        assert rig.generate(llama.llm) == want
        assert llama.llm.get_weight_version() == str(version)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ({"only": "q_proj"}, ["group", "qkv_proj.weight", "8192 of 16384", "q_proj, k_proj, v_proj"]),
        ({"only": "gate_proj|down_proj"}, ["group", "gate_up_proj.weight", "8192 of 16384"]),
        ({"rename": "model.norm.weight"}, ["unexpected", "model.gnorm.weight"]),
        ({"reshape": Q}, ["shape", Q, "127, 64"]),
    ],
)
def test_a_refused_manifest_leaves_the_engine_as_it_was(llama: Pair, order: dict[str, Any], says: list[str]) -> None:
    import rig

    llama.refits.run(llama.a)
    error = llama.refits.fail(llama.b, loaded=False, **order)
    assert all(word in str(error) for word in says), error
    assert rig.generate(llama.llm) == llama.out_a


@pytest.mark.parametrize(
    "order",
    [
        {"fail_after": 1, "chunk": 1},
        {"fail_after": 3},
        {"unchecked": True, "reshape": Q},
        {"unchecked": True, "rename": "model.norm.weight"},
        {"unchecked": True, "reshape": Q, "chunk": 100},
    ],
    ids=["cut in a fused module", "cut between", "wrong shape", "unknown name", "wrong shape in one batch"],
)
def test_a_full_refit_heals_whatever_a_failed_load_left(llama: Pair, order: dict[str, Any]) -> None:
    import rig

    llama.refits.run(llama.a)
    llama.refits.fail(llama.b, loaded=True, **order)
    llama.refits.heal(llama.b)
    assert rig.generate(llama.llm) == llama.out_b


def test_an_update_that_loaded_nothing_gives_the_old_weights_back(llama: Pair) -> None:
    import rig

    llama.refits.run(llama.a)
    llama.refits.fail(llama.b, loaded=False, fail_after=0)
    assert rig.generate(llama.llm) == llama.out_a


def test_whole_modules_may_come_alone(llama: Pair) -> None:
    import rig

    llama.refits.run(llama.a)
    llama.refits.run(llama.b, only=r"mlp\.")
    assert rig.generate(llama.llm) not in (llama.out_a, llama.out_b)
    llama.refits.run(llama.b, only=r"^(?!.*mlp\.)")
    assert rig.generate(llama.llm) == llama.out_b


def faults_of(pair: Pair, *, partial: bool = False, **changed: Any) -> list[tuple[str, str]]:
    """What the worker's loader finds wrong with B's manifest; a changed tensor of None is left out."""
    import tiny

    from weightbus.manifest import Manifest, TensorSpec

    tensors = {name: changed.get(name, tensor) for name, tensor in tiny.weights(pair.b).items()}
    loader = pair.llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine._rank._loader
    manifest = Manifest([TensorSpec.of(name, tensor) for name, tensor in tensors.items() if tensor is not None])
    return [(fault.kind, fault.name) for fault in loader.check([manifest], partial=partial)]


def test_a_manifest_without_the_head_is_refused(llama: Pair) -> None:
    """Also a tied one: CPU builds keep a packed copy of it, which only its own name refreshes."""
    assert faults_of(llama) == []
    assert faults_of(llama, **{"lm_head.weight": None}) == [("missing", "lm_head.weight")]
    assert faults_of(llama, partial=True, **{"lm_head.weight": None}) == []


def test_what_vllm_would_cut_or_convert_in_silence_is_refused(llama: Pair) -> None:
    import torch

    assert faults_of(llama, **{Q: torch.zeros(256, 64)}) == [("shape", Q)]  # vLLM takes the first 128 rows
    assert faults_of(llama, **{Q: torch.zeros(128, 64, dtype=torch.bfloat16)}) == [("dtype", Q)]


def test_all_faults_are_listed_at_once(llama: Pair) -> None:
    import torch

    k, norm = Q.replace("q_proj", "k_proj"), "model.norm.weight"
    wrong = {Q: torch.zeros(127, 64), k: torch.zeros(64, 64, dtype=torch.float16), norm: torch.zeros(65)}
    assert sorted(faults_of(llama, **wrong)) == [("dtype", k), ("shape", Q), ("shape", norm)]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_other_families_go_a_b_a(checkpoints: Path, kind: str) -> None:
    import rig

    pair = make_pair(checkpoints, kind)
    for path, want in ((pair.b, pair.out_b), (pair.a, pair.out_a)):
        pair.refits.run(path, chunk=2)
        assert rig.generate(pair.llm) == want
