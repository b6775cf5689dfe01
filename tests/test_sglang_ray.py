"""Under Ray: an actor owns the server and the receiver, and the trainer sends from outside."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray._private.async_compat import has_async_methods

from tests.sglang_actor import DoubleActor, RealActor, trained
from weightbus import WeightBus
from weightbus_sglang import SglangAdapter

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    path = os.pathsep.join(str(ROOT / part) for part in ("", "backends", "adapters"))
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.mark.parametrize("kind", [DoubleActor, RealActor, SglangAdapter, WeightBus])
def test_ray_sees_no_coroutine(kind: type) -> None:
    assert not has_async_methods(kind)


def test_the_actors_module_shadows_nothing() -> None:
    for name in ("weightbus", "weightbus_sglang", "ray", "torch"):
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        assert "tests" not in Path(found.origin).parts[len(ROOT.parts) :][:1]


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_actor_takes_versions(cluster: None, tmp_path: Path, ranks: int) -> None:
    with WeightBus.sender("tcp://127.0.0.1:0", receivers=ranks) as bus:
        actor: Any = ray.remote(num_cpus=0)(DoubleActor).remote(bus.address, str(tmp_path / "model"), ranks)
        for version in (1, 2):
            weights = trained(version)
            taken = actor.refit.remote(120)
            assert bus.send(weights, version=version, timeout=120).outcomes == {"engine": f"READY({version})"}
            state, process = ray.get(taken, timeout=120)
            assert state.startswith(f"READY({version})")
            assert process != os.getpid()
            wanted = {name: sha(tensor) for name, tensor in weights.items()}
            assert ray.get(actor.checksums.remote(), timeout=60) == {0: wanted, 1: wanted}
        ray.get(actor.close.remote(), timeout=60)
        ray.kill(actor)
