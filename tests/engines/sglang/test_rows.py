"""Llama at tensor parallelism 2: what goes to which rank, requests in flight, every way to fail, then a good refit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engines.sglang.conftest import Fresh, measure
from tests.engines.sglang.server import LONG_PROMPT, PROMPTS, RealServer, sample
from tests.sglang_contract import InFlight
from tests.sglang_side import Side, soon
from weightbus.errors import EngineError

Weights = dict[str, torch.Tensor]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def side(server: RealServer) -> Iterator[Side]:
    made = Side(server)
    yield made
    made.close()


def heals(side: Side, weights: Weights, expected: Fresh) -> bool:
    """A full refit after a failure: everything is as on a fresh server."""
    side.driver.heal(soon())
    side.refit(weights, version=200)
    return measure(side.server) == expected  # type: ignore[arg-type]


def test_one_copy_serves_every_rank(side: Side, weights: list[Weights], old: Fresh, new: Fresh) -> None:
    assert measure(side.server) == old  # type: ignore[arg-type]
    side.refit(weights[1], version=1)
    assert measure(side.server) == new  # type: ignore[arg-type]
    assert set(new.checksums) == {0, 1}
    assert new.checksums[0] != new.checksums[1]


def test_each_rank_loads_its_own_payload(server: RealServer, weights: list[Weights], old: Fresh, new: Fresh) -> None:
    side = Side(server, per_rank=True)
    side.refit(weights[1], weights[0], version=1)  # different on purpose: a transposed list would show
    assert server.checksums() == {0: new.checksums[0], 1: old.checksums[1]}
    side.refit(weights[1], weights[1], version=2)
    assert measure(server) == new
    side.close()


def test_a_request_in_flight_sees_no_mixed_weights(side: Side, weights: list[Weights], old: Fresh, new: Fresh) -> None:
    before = sample(side.server.generate(PROMPTS[0], 250))[0]
    with InFlight(side.server) as running:
        side.refit(weights[1], version=7)
        answer = running.answer()
    tokens, spans = answer["output_ids"], answer["meta_info"]["weight_versions"]
    assert [(span["version"], span["start"]) for span in spans] == [("100", 0), ("7", spans[0]["end"])]
    cut = spans[0]["end"]
    assert 0 < cut < 250 == spans[1]["end"]
    assert tokens[:cut] == before[:cut]
    assert measure(side.server) == new  # type: ignore[arg-type]
    assert tokens[cut:] == sample(side.server.generate(PROMPTS[0] + tokens[:cut], 250 - cut))[0]


def test_no_cached_prefix_is_stale(side: Side, weights: list[Weights], new: Fresh) -> None:
    first = side.server.generate(LONG_PROMPT, 24)
    again = side.server.generate(LONG_PROMPT, 24)
    assert again["meta_info"]["cached_tokens"] >= 100 > first["meta_info"]["cached_tokens"]
    side.refit(weights[1])
    after = side.server.generate(LONG_PROMPT, 24)
    assert after["meta_info"]["cached_tokens"] == 0
    assert sample(after) == new.outputs[1]


def test_the_weights_checker_proves_the_refit(server: RealServer, weights: list[Weights], new: Fresh) -> None:
    side = Side(server, check_weights=True)
    side.refit(weights[1])
    assert measure(server) == new
    part = {name: tensor for name, tensor in weights[1].items() if name != "model.norm.weight"}
    side.begin(3)
    side.load(part)
    with pytest.raises(EngineError, match=r"1 weights were not written by this refit: model\.norm\.weight"):
        side.driver.finish(3, soon())
    side.abort(loaded=True)
    assert heals(side, weights[1], new)
    side.close()


def test_released_memory_comes_back(side: Side, weights: list[Weights], new: Fresh) -> None:
    side.adapter.release_memory(["kv_cache", "weights"])
    side.refit(weights[1])
    assert measure(side.server) == new  # type: ignore[arg-type]


def test_undone_before_the_first_payload(side: Side, old: Fresh) -> None:
    side.begin()
    side.abort(loaded=False)
    assert measure(side.server) == old  # type: ignore[arg-type]
    assert side.server.info()["weight_version"] == "100"


def test_the_transfer_dies_in_mid_stream(side: Side, weights: list[Weights], new: Fresh) -> None:
    side.begin()
    side.load(dict(list(weights[1].items())[:7]))
    side.abort(loaded=True)
    assert side.server.http.get(f"{side.server.url}/ready").status_code == 503
    assert heals(side, weights[1], new)


def test_the_flush_is_refused(server: RealServer, weights: list[Weights], old: Fresh, new: Fresh) -> None:
    side = Side(server, flush_timeout_s=0)
    pause = side.adapter._engine.server.pause

    def meddled(mode: str, deadline: object) -> None:
        pause(mode, deadline)  # type: ignore[arg-type]
        server.post("/continue_generation")  # another client lets requests run again

    side.adapter._engine.server.pause = meddled  # type: ignore[method-assign]
    with InFlight(server) as running:
        with pytest.raises(EngineError, match="Flush cache failed"):
            side.begin()
        side.abort(loaded=False)
        assert len(running.answer()["output_ids"]) == 250
    assert measure(server) == old
    side.adapter._engine.server.pause = pause  # type: ignore[method-assign]
    side.refit(weights[1])
    assert measure(server) == new
    side.close()


def test_begin_twice(side: Side, weights: list[Weights], old: Fresh, new: Fresh) -> None:
    side.begin()
    with pytest.raises(EngineError, match="begin was called twice"):
        side.begin()
    side.abort(loaded=False)
    assert measure(side.server) == old  # type: ignore[arg-type]
    side.refit(weights[1])
    assert measure(side.server) == new  # type: ignore[arg-type]


KILLED = """
import sys, time
from safetensors.torch import load_file
from tests.engines.sglang.server import Client
from tests.sglang_side import Side
server = Client(None, 2)
server.url = sys.argv[1]
side = Side(server)
side.begin(5)
side.load(dict(list(load_file(sys.argv[2]).items())[:7]))
print("loaded", flush=True)
time.sleep(600)
"""


def test_a_session_left_by_a_killed_driver(
    server: RealServer, models: Path, weights: list[Weights], new: Fresh
) -> None:
    file = str(models / "llama-1.trainer")
    with subprocess.Popen([sys.executable, "-c", KILLED, server.url, file], cwd=ROOT, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"loaded\n"
        finally:
            child.kill()
    side = Side(server)  # the driver's process started again
    side.refit(weights[1], version=6)
    assert measure(server) == new
    assert server.info()["weight_version"] == "6"
    side.close()


def test_the_client_times_out(server: RealServer, weights: list[Weights], new: Fresh) -> None:
    side = Side(server, load_timeout_s=0.004)
    side.begin()
    with pytest.raises(EngineError, match="no answer") as caught:
        side.load(weights[1])
    assert not caught.value.dead
    side.abort(loaded=True)
    side.close()
    patient = Side(server)
    assert heals(patient, weights[1], new)
    patient.close()


def test_the_server_is_killed_and_started_again(server: RealServer, weights: list[Weights], new: Fresh) -> None:
    side = Side(server)
    side.begin()
    side.load(dict(list(weights[1].items())[:7]))
    server.kill()
    with pytest.raises(EngineError) as caught:
        side.load(weights[1])
    assert caught.value.dead
    side.close()
    server.start()
    joined = Side(server, hold_traffic=True)  # nothing is answered on weights that are not current
    assert server.http.get(f"{server.url}/ready").status_code == 503
    joined.refit(weights[1], version=9)
    assert measure(server) == new
    joined.close()
