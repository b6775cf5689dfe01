"""The adapter against engines with processes of their own: tensor parallelism, experts, a worker that dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

Q = "model.layers.0.self_attn.q_proj.weight"
ROWS: list[dict[str, Any]] = [
    {"fail_after": 2, "chunk": 1},
    {"fail_after": 2, "chunk": 1, "rank": 1},
    {"unchecked": True, "reshape": Q},
    {"unchecked": True, "rename": "model.norm.weight"},
]


@pytest.fixture(scope="module")
def environment() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # two workers on one NUMA node
        yield patch


@pytest.fixture(scope="module")
def two(environment: pytest.MonkeyPatch, checkpoints: Path) -> Iterator[Any]:
    """A Llama at TP 2 that started on A, its refits, both checkpoints and what fresh engines at TP 2 answer."""
    import rig
    import tiny

    a, b = (tiny.make(checkpoints / f"two-{seed}", seed) for seed in (0, 1))
    fresh = rig.engine(b, tensor_parallel_size=2)
    out_b = rig.generate(fresh)
    rig.stop(fresh)
    llm = rig.engine(a, tensor_parallel_size=2)
    out_a = rig.generate(llm)
    assert all(x[0] != y[0] for x, y in zip(out_a, out_b, strict=True))
    yield llm, rig.Refits(checkpoints / "two-orders", llm=llm), a, b, out_a, out_b
    rig.stop(llm)


def test_both_ranks_equal_a_fresh_engine_bit_for_bit_and_back(two: Any) -> None:
    import rig

    llm, refits, a, b, out_a, out_b = two
    for path, want, chunk in ((b, out_b, 1), (a, out_a, 3), (b, out_b, 100)):
        version = refits.run(path, chunk=chunk)
        assert rig.generate(llm) == want
        assert llm.get_weight_version() == str(version)


@pytest.mark.parametrize("order", ROWS, ids=["both ranks cut", "rank 1 cut", "wrong shape", "unknown name"])
def test_a_full_refit_heals_whatever_a_failed_load_left_on_either_rank(two: Any, order: dict[str, Any]) -> None:
    import rig

    llm, refits, a, b, _, out_b = two
    refits.run(a)
    refits.fail(b, loaded=True, **order)
    refits.heal(b)
    assert rig.generate(llm) == out_b


@pytest.mark.parametrize(
    ("order", "says"),
    [({"only": "q_proj"}, "qkv_proj"), ({"rename": "model.norm.weight"}, "gnorm"), ({"reshape": Q}, "127, 64")],
)
def test_a_refused_manifest_leaves_both_ranks_as_they_were(two: Any, order: dict[str, Any], says: str) -> None:
    import rig

    llm, refits, a, b, out_a, _ = two
    refits.run(a)
    assert says in str(refits.fail(b, loaded=False, **order))
    assert rig.generate(llm) == out_a


def test_a_call_that_fails_on_both_ranks_does_not_answer_the_next_one(two: Any) -> None:
    """vLLM's executor stops reading replies at the first failure; the adapter reads the others away."""
    import rig

    from weightbus.deadline import Deadline
    from weightbus.errors import EngineError
    from weightbus_vllm.client import ObjectClient, call_workers

    llm, refits, _, b, _, out_b = two
    with pytest.raises(EngineError, match="without a matching start"):
        call_workers(ObjectClient(llm), "finish", Deadline.after(60))
    refits.run(b)
    assert rig.generate(llm) == out_b


def test_a_worker_killed_in_mid_update_is_a_dead_engine(two: Any) -> None:
    """The last test of this engine. Its successor is fed in the tests of the server."""
    _, refits, a, b, _, _ = two
    refits.run(a)
    error = refits.fail(b, loaded=True, timeout_s=15.0, fail_after=2, chunk=1, rank=1, kill=True)
    assert error.dead


def test_experts_go_a_b_a(multiprocess: None, checkpoints: Path) -> None:
    """Outputs too: CPU builds pack experts at their first load only, which the adapter makes good."""
    import rig
    import tiny

    a, b = (tiny.make(checkpoints / f"moe-{seed}", seed, "qwen3moe") for seed in (0, 1))
    fresh = rig.engine(b)
    out_b, held_b = rig.generate(fresh), fresh.collective_rpc("test_parameters")
    rig.stop(fresh)
    llm = rig.engine(a)
    out_a, held_a = rig.generate(llm), llm.collective_rpc("test_parameters")
    assert any("experts" in name for name in held_a[0])
    assert all(held_a[0][name] != held_b[0][name] for name in held_a[0] if "experts" in name)
    refits = rig.Refits(checkpoints / "moe-orders", llm=llm)
    for path, out, held in ((b, out_b, held_b), (a, out_a, held_a)):
        refits.run(path, chunk=5)
        assert llm.collective_rpc("test_parameters") == held
        assert rig.generate(llm) == out
    error = refits.fail(b, loaded=False, only=r"layers\.0\.mlp\.experts\.[012]\.")
    assert "group" in str(error) and "experts" in str(error)
    assert rig.generate(llm) == out_a
    refits.fail(b, loaded=True, fail_after=3, chunk=5)
    refits.heal(b)
    assert rig.generate(llm) == out_b
    rig.stop(llm)
