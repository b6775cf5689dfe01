"""Refits of the double through the whole bus: one copy for all ranks, a stream per rank, staged and in place."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.sglang.server import PROMPTS, free_port
from tests.engines.sglang_double import SglangDouble, digest_of, layers, write_checkpoint
from tests.harness import FAST, Receiving
from weightbus import AlignmentError, SourceError, WeightBus
from weightbus_sglang import SglangAdapter

Weights = dict[str, torch.Tensor]


@pytest.fixture
def double(tmp_path: Path) -> Iterator[SglangDouble]:
    torch.manual_seed(0)
    server = SglangDouble(write_checkpoint(tmp_path / "model", layers()), tp=2).start()
    yield server
    server.stop()


@pytest.fixture
def weights() -> Weights:
    torch.manual_seed(1)
    return layers()


@pytest.fixture
def join(double: SglangDouble) -> Iterator[Callable[..., tuple[Any, Receiving]]]:
    opened: list[Any] = []

    def make(receivers: int = 1, sender: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Receiving]:
        options = {"backend": "loopback", "adapter": SglangAdapter(url=double.url), **options}
        bus = WeightBus.sender("tcp://127.0.0.1:0", receivers=receivers, backend="loopback", **FAST, **(sender or {}))
        receiving = Receiving(bus.address, **options)
        opened.extend([receiving, bus])
        return bus, receiving

    yield make
    for side in opened:
        side.close()


def holds(server: SglangDouble, weights: Weights) -> bool:
    return digest_of(server.ranks) == digest_of([weights] * server.tp)


@pytest.mark.parametrize("stage", [None, "host"])
def test_one_copy_for_all_ranks(
    double: SglangDouble, weights: Weights, join: Callable[..., Any], stage: str | None
) -> None:
    bus, receiving = join(stage=stage, sender={"bucket_bytes": 2048})
    report = bus.send(weights, version=3, timeout=30)
    assert report.outcomes == {"e0": "READY(3)"}
    assert holds(double, weights)
    assert double.calls.count("/update_weights_from_tensor") == report.buckets > 1
    assert (double.version, double.paused, double.session) == ("3", False, False)
    assert receiving.last(1).version == 3
    bus.send({name: tensor + 1 for name, tensor in weights.items()}, version=4, timeout=30)
    assert holds(double, {name: tensor + 1 for name, tensor in weights.items()})


def test_a_stream_for_each_rank_with_boundaries_of_its_own(
    double: SglangDouble, weights: Weights, join: Callable[..., Any]
) -> None:
    bus, _ = join(
        2, {"bucket_bytes": 1024, "senders": 2}, ranks=2, allow_paged_in_place=True,
    )  # fmt: skip
    other = WeightBus.sender(
        address=bus.address, rank=1, senders=2, backend="loopback", bucket_bytes=3000, **FAST
    )  # fmt: skip
    reports: list[Any] = []
    thread = threading.Thread(target=lambda: reports.append(other.send(iter(weights.items()), version=1, timeout=30)))
    thread.start()
    reports.append(bus.send(iter(weights.items()), version=1, timeout=30))
    thread.join(30)
    other.close()
    assert len({report.buckets for report in reports}) == 2, "equal bucket counts: the aligner had nothing to do"
    assert holds(double, weights)


def test_a_wrong_model_is_refused_before_the_server_hears_of_it(
    double: SglangDouble, weights: Weights, join: Callable[..., Any]
) -> None:
    bus, _ = join()
    weights["model.norm.weight"] = torch.zeros(9)
    weights["trainer.lm_head.weight"] = weights.pop("lm_head.weight")
    with pytest.raises(AlignmentError) as caught:
        bus.send(weights, version=1, timeout=30)
    for told in ("model.norm.weight", "trainer.lm_head.weight", "'lm_head.weight'"):
        assert told in str(caught.value)
    assert double.calls == []


def slow(
    weights: Weights, at: int, seconds: float, error: Exception | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    for i, item in enumerate(weights.items()):
        if i == at:
            time.sleep(seconds)
            if error is not None:
                raise error
        yield item


def test_staged_the_server_answers_while_bytes_move(
    double: SglangDouble, weights: Weights, join: Callable[..., Any]
) -> None:
    bus, _ = join(stage="host", sender={"bucket_bytes": 1024})
    handle = threading.Thread(target=lambda: bus.send(slow(weights, 9, 1.0), version=1, timeout=30))
    handle.start()
    time.sleep(0.4)
    answer = double.generate(PROMPTS[0], 4)  # from the middle of the transfer
    assert answer["meta_info"]["weight_version"] == "default"
    assert double.calls == ["/generate"]
    handle.join(30)
    assert holds(double, weights)


@pytest.mark.parametrize(("stage", "state"), [("host", "READY"), (None, "DIRTY")])
def test_a_source_that_breaks_off(
    double: SglangDouble, weights: Weights, join: Callable[..., Any], stage: str | None, state: str
) -> None:
    before = digest_of(double.ranks)
    bus, receiving = join(stage=stage, allow_paged_in_place=True, sender={"bucket_bytes": 512})
    with pytest.raises(SourceError):
        bus.send(slow(weights, 12, 0.5, OSError("disk")), version=1, timeout=30)
    receiving.last(1)
    assert receiving.bus.state.startswith(state)
    assert double.paused == (state == "DIRTY")
    assert not double.session
    assert (digest_of(double.ranks) == before) == (state == "READY")
    bus.send(weights, version=2, timeout=30)
    assert holds(double, weights)
    assert not double.paused


def test_the_example_runs(double: SglangDouble, weights: Weights, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "new", weights)
    root = Path(__file__).parents[1]
    run = [sys.executable, str(root / "examples" / "sglang_refit.py")]
    both = ["--address", f"tcp://127.0.0.1:{free_port()}", "--backend", "local"]
    path = os.pathsep.join(str(root / part) for part in ("", "backends", "adapters"))
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([*run, "receive", *both, "--url", double.url], env=environment) as receiver:
        try:
            done = subprocess.run(
                [*run, "send", *both, "--weights", str(checkpoint), "--version", "5"],
                env=environment, capture_output=True, text=True, timeout=100,
            )  # fmt: skip
        finally:
            receiver.kill()
    assert done.returncode == 0, done.stderr
    assert "version 5" in done.stdout
    assert "READY(5)" in done.stdout
    assert holds(double, weights)
