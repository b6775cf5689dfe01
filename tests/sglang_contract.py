"""What the adapter relies on in a server: one set of tests, run against the double and against a real SGLang.

A subclass gives the fixture `server`, fresh enough that its weights are those of its checkpoint, and `weights`, others
of the same names and shapes.
"""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engines.sglang.server import PROMPTS, Client, request

Weights = dict[str, torch.Tensor]


def payload(weights: Weights, gap: int = 0, shift: int = 0) -> str:
    """A bucket by value, as anyone could write it: `gap` bytes between tensors, the first at offset `shift`."""
    items, parts, start = [], [torch.zeros(shift, dtype=torch.uint8)], shift
    for name, tensor in weights.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        items.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=start + data.numel(),
                numel=data.numel(),
            )
        )  # fmt: skip
        parts += [data, torch.zeros(gap, dtype=torch.uint8)]
        start += data.numel() + gap
    content = {"flattened_tensor": torch.cat(parts), "metadata": items}
    return base64.b64encode(pickle.dumps(content, protocol=4)).decode()


def update(server: Client, *texts: str, **fields: Any) -> Any:
    body = {"load_format": "flattened_bucket", "flush_cache": False, **fields}
    return server.post("/update_weights_from_tensor", {"serialized_named_tensors": list(texts), **body})


def load(server: Client, weights: Weights, **kwargs: int) -> Any:
    return update(server, *[payload(weights, **kwargs)] * server.tp)


def restore(server: Client) -> None:
    """Old weights, open for traffic, whatever a test left."""
    from safetensors.torch import load_file

    server.post("/pause_generation", {"mode": "retract"})
    server.post("/end_weight_update")
    assert server.post("/begin_weight_update").status_code == 200
    assert load(server, load_file(server.model / "model.safetensors")).status_code == 200
    assert server.post("/end_weight_update").status_code == 200
    assert server.post("/flush_cache").status_code == 200
    server.post("/update_weight_version", {"new_version": "default", "abort_all_requests": False})
    server.post("/continue_generation")


class InFlight:
    """A request in another thread, long enough to be still running when a test acts."""

    def __init__(self, server: Client, prompt: list[int] = PROMPTS[0], tokens: int = 250) -> None:
        self.server = server
        self.pool = ThreadPoolExecutor(1)
        self.future: Future[Any] = self.pool.submit(server.post, "/generate", request(prompt, tokens))

    def __enter__(self) -> InFlight:
        time.sleep(0.15)
        assert not self.future.done(), "the request ended before the test could act"
        return self

    def answer(self, timeout_s: float = 60) -> dict[str, Any]:
        return dict(self.future.result(timeout_s).json())

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=False)


class ServerContract:
    @pytest.fixture
    def server(self) -> Iterator[Client]:
        raise NotImplementedError

    @pytest.fixture
    def weights(self) -> Weights:
        raise NotImplementedError

    def test_sessions_are_refused_out_of_order(self, server: Client, weights: Weights) -> None:
        ended = server.post("/end_weight_update")
        assert (ended.status_code, ended.json()["success"]) == (400, False)
        assert "no weight-update session is open" in ended.json()["message"]
        outside = load(server, weights)
        assert outside.status_code == 400
        assert "must run between begin_weight_update() and end_weight_update()" in outside.json()["message"]
        assert server.post("/begin_weight_update").json() == {"success": True, "message": "Success"}
        again = server.post("/begin_weight_update")
        assert again.status_code == 400
        assert "a weight-update session is already open" in again.json()["message"]
        assert server.post("/end_weight_update").status_code == 200

    def test_bad_requests_are_refused_and_harmless(self, server: Client) -> None:
        before = server.checksums()
        assert server.http.post(f"{server.url}/begin_weight_update").status_code == 400  # a body is required
        assert server.http.post(f"{server.url}/end_weight_update").status_code == 400
        assert server.post("/begin_weight_update").status_code == 200
        assert update(server, "!!").status_code == 400
        assert server.post("/update_weights_from_tensor", {}).status_code == 400
        assert server.post("/update_weight_version", {}).status_code == 400
        assert server.post("/pause_generation", {"mode": "bogus"}).status_code == 400
        assert server.post("/end_weight_update").status_code == 200
        assert server.checksums() == before

    def test_a_bucket_by_value_with_gaps_is_loaded(self, server: Client, weights: Weights) -> None:
        before = server.checksums()
        server.post("/begin_weight_update")
        assert load(server, weights, gap=48, shift=32).status_code == 200
        server.post("/end_weight_update")
        after = server.checksums()
        assert set(after) == set(range(server.tp))
        assert all(after[rank][name] != before[rank][name] for rank in after for name in after[rank])

    def test_unknown_names_are_success_and_change_nothing(self, server: Client) -> None:
        before = server.checksums()
        server.post("/begin_weight_update")
        answer = load(server, {"model.layers.0.nothing.weight": torch.ones(4)})
        assert (answer.status_code, answer.json()["success"]) == (200, True)
        server.post("/end_weight_update")
        assert server.checksums() == before

    def test_more_payloads_than_ranks_are_accepted(self, server: Client, weights: Weights) -> None:
        server.post("/begin_weight_update")
        assert update(server, *[payload(weights)] * (server.tp + 1)).status_code == 200
        server.post("/end_weight_update")

    def test_the_noise_of_the_weights_checker_reaches_every_weight(self, server: Client) -> None:
        before = server.checksums()
        assert server.post("/weights_checker", {"action": "reset_tensors"}).json()["success"]
        noise = server.checksums()
        assert all(noise[rank][name] != before[rank][name] for rank in before for name in before[rank])
        kept = {"action": "reset_tensors", "skip_tensor_list": ["norm"]}
        assert server.post("/weights_checker", kept).json()["success"]
        again = server.checksums()
        assert all((again[0][name] == noise[0][name]) == ("norm" in name) for name in noise[0])

    def test_a_running_request_refuses_the_flush(self, server: Client) -> None:
        with InFlight(server) as running:
            assert server.post("/flush_cache", timeout=0).status_code == 400
            assert len(running.answer()["output_ids"]) == 250
        assert server.post("/flush_cache", timeout=10).status_code == 200

    def test_a_flush_that_waits_does_so_for_retracted_requests_too(self, server: Client) -> None:
        with InFlight(server) as running:
            server.post("/pause_generation", {"mode": "retract"})
            assert server.post("/flush_cache", timeout=0.3).status_code == 400
            assert server.post("/flush_cache").status_code == 200
            server.post("/continue_generation")
            assert len(running.answer()["output_ids"]) == 250

    def test_retract_lets_the_flush_through_and_the_request_finish(self, server: Client, weights: Weights) -> None:
        with InFlight(server) as running:
            server.post("/pause_generation", {"mode": "retract"})
            assert server.post("/flush_cache", timeout=0).status_code == 200
            server.post("/begin_weight_update")
            assert load(server, weights).status_code == 200
            server.post("/end_weight_update")
            server.post("/flush_cache")
            server.post("/update_weight_version", {"new_version": "9", "abort_all_requests": False})
            assert not running.future.done()
            server.post("/continue_generation")
            answer = running.answer()
        assert len(answer["output_ids"]) == 250
        spans = answer["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["default", "9"]
        assert spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == 250

    def test_abort_ends_the_request_with_what_it_has(self, server: Client) -> None:
        with InFlight(server) as running:
            server.post("/pause_generation", {"mode": "abort"})
            answer = running.answer()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < 250
        server.post("/continue_generation")

    def test_a_paused_server_holds_new_requests_back(self, server: Client) -> None:
        server.post("/pause_generation", {"mode": "retract"})
        assert server.http.get(f"{server.url}/ready").status_code == 503
        assert server.http.get(f"{server.url}/ping").status_code == 200
        with InFlight(server, tokens=4) as waiting:
            server.post("/continue_generation")
            assert len(waiting.answer()["output_ids"]) == 4
        assert server.http.get(f"{server.url}/ready").status_code == 200

    def test_the_label_moves_only_when_told(self, server: Client, weights: Weights) -> None:
        server.post("/begin_weight_update")
        load(server, weights)
        server.post("/end_weight_update")
        assert server.info()["weight_version"] == "default"
        told = server.post("/update_weight_version", {"new_version": "3", "abort_all_requests": False})
        assert told.json()["success"] is True
        assert server.info()["weight_version"] == "3"

    def test_labelling_aborts_running_requests_by_default(self, server: Client) -> None:
        with InFlight(server) as running:
            server.post("/update_weight_version", {"new_version": "4", "abort_all_requests": False})
            time.sleep(0.05)
            assert not running.future.done()
            server.post("/update_weight_version", {"new_version": "5"})
            assert running.answer()["meta_info"]["finish_reason"]["type"] == "abort"

    def test_the_prefix_cache_outlives_an_update_without_a_flush(self, server: Client, weights: Weights) -> None:
        server.generate(PROMPTS[1], 4)
        server.post("/begin_weight_update")
        load(server, weights)
        server.post("/end_weight_update")
        stale = server.generate(PROMPTS[1], 8)
        server.post("/flush_cache")
        assert (
            server.generate(PROMPTS[1], 8)["meta_info"]["output_token_logprobs"]
            != (stale["meta_info"]["output_token_logprobs"])
        )


def short_list(server: Client, weights: Weights) -> None:
    update(server, *[payload(weights)] * (server.tp - 1))


def wrong_shape(server: Client, weights: Weights) -> None:
    load(server, {"model.norm.weight": torch.ones(weights["model.norm.weight"].numel() + 1)})


def misaligned(server: Client, weights: Weights) -> None:
    load(server, {"model.norm.weight": weights["model.norm.weight"]}, shift=2)


def foreign_class(server: Client, _: Weights) -> None:
    text = base64.b64encode(pickle.dumps({"flattened_tensor": time.sleep, "metadata": []})).decode()
    update(server, *[text] * server.tp)


def unknown_format(server: Client, weights: Weights) -> None:
    update(server, *[payload(weights)] * server.tp, load_format="bogus")


def resume_what_is_held(server: Client, _: Weights) -> None:
    server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})


DEATHS = [short_list, wrong_shape, misaligned, foreign_class, unknown_format, resume_what_is_held]
