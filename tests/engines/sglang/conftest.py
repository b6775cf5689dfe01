"""Tiny models, real servers on them, and what fresh servers answer. Run in the environment that setup.sh makes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file

from tests.engines.sglang.server import HERE, RealServer
from tests.sglang_side import Side, soon

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")
Start = Callable[..., RealServer]


ORDER = ("test_contract.py", "test_rows.py", "test_bus.py")  # these share a server, and come before the others


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
    items.sort(key=lambda item: ORDER.index(item.path.name) if item.path.name in ORDER else len(ORDER))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the checkpoints KIND-SEED, seeds 0 (the old weights) and 1 (the new ones)."""
    out = tmp_path_factory.mktemp("models")
    wanted = [f"{kind}:{seed}" for kind in KINDS for seed in (0, 1)]
    done = subprocess.run(
        [sys.executable, str(HERE / "models.py"), str(out), *wanted], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return out


@pytest.fixture(scope="session")
def trainer(models: Path) -> Callable[[str, int], dict[str, torch.Tensor]]:
    """Weights by (kind, seed), under a trainer's names: experts stacked, tied tensors twice."""
    return lambda kind, seed: load_file(models / f"{kind}-{seed}.trainer")


@attrs.frozen
class Fresh:
    """What a server started on the weights answers."""

    outputs: list[tuple[list[int], list[float]]]
    checksums: dict[int, dict[str, str]]


def measure(server: RealServer) -> Fresh:
    # a server that is not idle yet refuses, and a prefix from the cache makes log-probabilities differ in the last bits
    server.post("/flush_cache", timeout=20).raise_for_status()
    return Fresh(server.outputs(), server.checksums())


@pytest.fixture(scope="session")
def fresh(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Fresh]:
    """By (kind, seed, tp) what a server started on those weights answers; each is started once, and stopped."""
    known: dict[Any, Fresh] = {}

    def make(kind: str, seed: int, tp: int = 1) -> Fresh:
        if (kind, seed, tp) not in known:
            log = tmp_path_factory.mktemp("log") / f"fresh-{kind}-{seed}-tp{tp}.log"
            server = RealServer(models / f"{kind}-{seed}", log, tp=tp)
            try:
                known[kind, seed, tp] = measure(server.start())
            finally:
                server.stop()
        return known[kind, seed, tp]

    return make


class Pair:
    """Llama at two ranks, shared by all rows: a server that is started when a test needs it.

    Attributes:
        old: what it answered when it was fresh.
    """

    def __init__(self, server: RealServer) -> None:
        self.server = server
        self.old: Fresh | None = None

    def running(self) -> RealServer:
        if not self.server.alive:
            self.server.start()
            if self.old is None:
                self.old = measure(self.server)
        return self.server


@pytest.fixture(scope="session")
def pair(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    server = RealServer(models / "llama-0", tmp_path_factory.mktemp("log") / "llama-0-tp2.log", tp=2)
    yield Pair(server)
    server.stop()


@pytest.fixture(scope="session")
def weights(trainer: Callable[[str, int], dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Llama's old and new weights."""
    return [trainer("llama", 0), trainer("llama", 1)]


@pytest.fixture(scope="session")
def new(fresh: Callable[..., Fresh]) -> Fresh:
    """What a fresh Llama server at two ranks answers on the new weights."""
    return fresh("llama", 1, 2)


@pytest.fixture(scope="session")
def old(pair: Pair) -> Fresh:
    """What it answers on the old ones."""
    pair.running()
    if pair.old is None:
        raise RuntimeError("the server was never fresh")
    return pair.old


@pytest.fixture
def server(pair: Pair, weights: list[dict[str, torch.Tensor]], new: Fresh) -> RealServer:
    """Llama at two ranks on the old weights, serving, whatever the test before left."""
    running = pair.running()
    side = Side(running)
    side.driver.heal(soon())
    side.refit(weights[0], version=100)
    side.close()
    return running


@pytest.fixture
def start(pair: Pair, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a server on (kind, seed) for one test; two cores are not enough for the shared one beside it."""
    pair.server.stop()
    started: list[RealServer] = []

    def make(kind: str, seed: int = 0, tp: int = 1) -> RealServer:
        log = tmp_path_factory.mktemp("log") / f"{kind}-{seed}-tp{tp}.log"
        started.append(RealServer(models / f"{kind}-{seed}", log, tp=tp))
        return started[-1].start()

    yield make
    for server in started:
        server.stop()
