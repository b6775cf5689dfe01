"""A Ray actor owns a real server and the receiver beside it; the trainer sends from outside."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.engines.sglang.conftest import Fresh, Start
from tests.sglang_actor import RealActor
from weightbus import WeightBus

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_actor_owns_a_real_server(
    start: Start, models: Path, fresh: Callable[..., Fresh], trainer: Callable[[str, int], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:  # fmt: skip
    wanted = fresh("llama", 1)
    path = os.pathsep.join(str(ROOT / part) for part in ("", "backends", "adapters"))
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )  # fmt: skip
    try:
        with WeightBus.sender("tcp://127.0.0.1:0", receivers=1) as bus:
            actor: Any = ray.remote(num_cpus=0)(RealActor).remote(
                bus.address, str(models / "llama-0"), str(tmp_path / "log"), 1
            )
            taken = actor.refit.remote(400)
            bus.send(trainer("llama", 1), version=1, timeout=400)
            state, process = ray.get(taken, timeout=60)
            assert state.startswith("READY(1)")
            assert process != os.getpid()
            assert ray.get(actor.checksums.remote(), timeout=60) == wanted.checksums
            ray.get(actor.close.remote(), timeout=60)
    finally:
        ray.shutdown()
