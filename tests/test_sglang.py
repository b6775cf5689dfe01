"""The SGLang adapter against the double: the envelope, its undoing, sick servers, and what reaches which rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engines.sglang.server import PROMPTS, sample
from tests.engines.sglang_double import ABSENT, SglangDouble, digest_of, layers, write_checkpoint
from tests.sglang_contract import InFlight
from tests.sglang_side import Side, soon
from weightbus.adapter import Outcome, Refit
from weightbus.deadline import Deadline
from weightbus.errors import ConfigError, EngineError
from weightbus.manifest import Manifest, TensorSpec
from weightbus_sglang import SglangAdapter
from weightbus_sglang.facts import Facts
from weightbus_sglang.served import Served
from weightbus_sglang.server import Server

Weights = dict[str, torch.Tensor]
UPDATE = "/update_weights_from_tensor"
BEGIN = ["/pause_generation", "/flush_cache", "/begin_weight_update"]
FINISH = ["/end_weight_update", "/flush_cache", "/update_weight_version"]


@pytest.fixture(autouse=True)
def no_open_sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Closes every adapter's connection at the end of its test."""
    made: list[Server] = []

    def init(server: Server, *args: Any, **kwargs: Any) -> None:
        original(server, *args, **kwargs)
        made.append(server)

    original = Server.__init__
    monkeypatch.setattr(Server, "__init__", init)
    yield
    for server in made:
        server.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., SglangDouble]]:
    started: list[SglangDouble] = []

    def make(tp: int = 1, weights: Weights | None = None, info: Mapping[str, Any] | None = None, **config: Any) -> Any:
        torch.manual_seed(0)
        folder = write_checkpoint(tmp_path / f"model{len(started)}", weights or layers(), **config)
        started.append(SglangDouble(folder, tp, info).start())
        return started[-1]

    yield make
    for server in started:
        server.stop()


@pytest.fixture
def weights() -> Weights:
    torch.manual_seed(1)
    return layers()


@pytest.fixture
def side(start: Callable[..., SglangDouble]) -> Side:
    return Side(start(tp=2))


def holds(server: SglangDouble, *weights: Weights) -> bool:
    """True when rank i has exactly ``weights[i]``, or every rank the one."""
    wanted = weights * (server.tp // len(weights))
    return digest_of(server.ranks) == digest_of(list(wanted))


def serves(server: SglangDouble) -> bool:
    return not server.paused and not server.session and len(server.generate(PROMPTS[0], 2)["output_ids"]) == 2


def test_a_refit_changes_every_rank_and_labels_once(side: Side, weights: Weights) -> None:
    side.refit(weights, version=7)
    assert holds(side.server, weights)
    posts = -(-len(weights) // 5)
    assert side.server.calls == [*BEGIN, *[UPDATE] * posts, *FINISH, "/continue_generation"]
    assert side.server.info()["weight_version"] == "7"
    updates = [body for path, body in zip(side.server.calls, side.server.bodies, strict=True) if path == UPDATE]
    assert all(body["flush_cache"] is False and "weight_version" not in body for body in updates)
    assert {"new_version": "7", "abort_all_requests": False} in side.server.bodies
    assert serves(side.server)


def test_there_and_back_again(side: Side, weights: Weights) -> None:
    torch.manual_seed(0)
    first = layers()
    side.refit(weights, version=1)
    assert holds(side.server, weights)
    side.refit(first, version=2)
    assert holds(side.server, first)


def test_each_rank_gets_its_own_batch(start: Callable[..., SglangDouble], weights: Weights) -> None:
    server = start(tp=2)
    side = Side(server, per_rank=True)
    other = layers()
    side.refit(weights, other)
    assert holds(server, weights, other)
    assert not holds(server, other, weights)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5), size=st.integers(1, 5))
def test_unequal_shards_reach_their_ranks(wide: Side, rows: list[tuple[int, int]], size: int) -> None:
    names = [f"w{i}" for i in range(len(rows))]
    parts = [{name: torch.randn(row[rank], 3) for name, row in zip(names, rows, strict=True)} for rank in (0, 1)]
    wide.server.ranks = [{name: torch.full_like(part[name], torch.nan) for name in names} for part in parts]
    wide.begin()
    wide.load(*parts, size=size)
    assert holds(wide.server, *parts)
    wide.abort(loaded=True)


@pytest.fixture
def wide(start: Callable[..., SglangDouble], monkeypatch: pytest.MonkeyPatch) -> Side:
    side = Side(start(tp=2, weights={f"w{i}": torch.zeros(1) for i in range(5)}), per_rank=True)
    monkeypatch.setattr(Served, "expand", lambda _, batch: list(batch))  # a checkpoint has one shape for all ranks
    return side


def test_batches_that_differ_in_names_are_not_posted(start: Callable[..., SglangDouble], weights: Weights) -> None:
    side = Side(start(tp=2), per_rank=True)
    side.begin()
    name, other = list(weights)[:2]
    with pytest.raises(EngineError, match="same names"):
        side.loader.load([[(name, weights[name])], [(other, weights[other])]])
    with pytest.raises(EngineError, match="same names"):
        side.loader.load([[(name, weights[name])]])
    assert UPDATE not in side.server.calls


def test_stacked_experts_and_a_tied_head(start: Callable[..., SglangDouble]) -> None:
    torch.manual_seed(3)
    weights = layers(experts=2)
    head = weights.pop("lm_head.weight")
    server = start(
        weights={name: torch.zeros_like(tensor) for name, tensor in weights.items()}, tie_word_embeddings=True
    )
    side = Side(server)
    offered = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for i in range(2):
        prefix = f"model.layers.{i}.mlp.experts."
        gate_up = [torch.cat([weights[f"{prefix}{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(2)]
        offered[f"{prefix}gate_up_proj"] = torch.stack(gate_up)
        offered[f"{prefix}down_proj"] = torch.stack([weights[f"{prefix}{e}.down_proj.weight"] for e in range(2)])
    offered["lm_head.weight"] = head
    manifest = Manifest([TensorSpec.of(name, tensor) for name, tensor in offered.items()])
    assert side.loader.check([manifest], partial=False) == []
    side.begin()
    results = [side.loader.load([[item]]) for item in offered.items()]
    assert [name for result in results for name in result.applied] == [n for n in offered if n != "lm_head.weight"]
    assert [name for result in results for name in result.skipped] == ["lm_head.weight"]
    assert holds(server, weights)


def test_what_was_not_checked_is_not_posted(side: Side) -> None:
    side.begin()
    for name, tensor, told in [
        ("module.norm.weight", torch.zeros(8), "not in the served"),
        ("model.norm.weight", torch.zeros(9), r"\(9,\)"),
        ("model.norm.weight", torch.zeros(8, dtype=torch.bfloat16), "bfloat16"),
        ("model.layers.0.self_attn.qkv_proj.weight", torch.zeros(16, 7), "16, 7"),
    ]:
        with pytest.raises(EngineError, match=told) as caught:
            side.loader.load([[(name, tensor)]])
        assert "nothing was posted" in str(caught.value)
    assert UPDATE not in side.server.calls


def test_check_counts_manifests_and_names_the_rank(start: Callable[..., SglangDouble], weights: Weights) -> None:
    side = Side(start(tp=2), per_rank=True)
    good = Manifest([TensorSpec.of(name, tensor) for name, tensor in weights.items()])
    bad = Manifest([spec for spec in good if spec.name != "model.norm.weight"])
    assert side.loader.check([good, good], partial=False) == []
    (fault,) = side.loader.check([good, bad], partial=False)
    assert (fault.kind, fault.name) == ("missing", "model.norm.weight")
    assert "rank 1" in fault.detail
    assert [fault.kind for fault in side.loader.check([good], partial=False)] == ["engine"]


# --- requests in flight


def test_a_retracted_request_goes_on_under_the_new_label(side: Side, weights: Weights) -> None:
    with InFlight(side.server) as running:
        side.refit(weights, version=2)
        answer = running.answer()
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "2"]
    assert spans[-1]["end"] == len(answer["output_ids"]) == 250


def test_an_aborted_request_ends(start: Callable[..., SglangDouble], weights: Weights) -> None:
    side = Side(start(), pause_mode="abort")
    with InFlight(side.server) as running:
        side.refit(weights)
        assert running.answer()["meta_info"]["finish_reason"]["type"] == "abort"
    assert holds(side.server, weights)


def test_no_cached_prefix_is_stale(side: Side, weights: Weights, start: Callable[..., SglangDouble]) -> None:
    fresh = start(tp=2, weights=weights)
    side.server.outputs()
    side.refit(weights)
    assert side.server.outputs() == fresh.outputs()


# --- before the first payload: undone in reverse


@pytest.mark.parametrize("refused", BEGIN)
@pytest.mark.parametrize(
    "answer", [(400, {"success": False, "message": "no"}), (200, {"success": False, "message": "no"})]
)
def test_a_refused_begin_is_undone(side: Side, weights: Weights, refused: str, answer: tuple[int, Any]) -> None:
    before = side.server.outputs()
    side.server.calls.clear()
    side.server.refuse[refused] = answer
    with pytest.raises(EngineError, match="no") as caught:
        side.begin()
    assert (caught.value.phase, caught.value.dead) == ("begin", False)
    assert refused in str(caught.value)
    side.abort(loaded=False)
    done = BEGIN[: BEGIN.index(refused) + 1]
    assert side.server.calls == [*done, "/continue_generation"]  # continue also when the pause itself raised
    assert side.server.outputs() == before
    side.refit(weights, version=2)
    assert holds(side.server, weights)


def test_a_begun_refit_is_undone_in_reverse(side: Side) -> None:
    before = side.server.outputs()
    side.begin()
    side.server.calls.clear()
    side.abort(loaded=False)
    assert side.server.calls == ["/end_weight_update", "/continue_generation"]
    assert side.server.outputs() == before
    assert side.server.info()["weight_version"] == "default"


def test_undoing_leaves_a_dirty_engine_paused(side: Side) -> None:
    side.driver.heal(soon())
    side.begin()
    side.abort(loaded=False, resume=False)
    assert side.server.paused
    assert not side.server.session


def test_all_errors_of_the_undoing_are_told(side: Side) -> None:
    side.begin()
    side.server.refuse["/end_weight_update"] = (400, {"success": False, "message": "first"})
    side.server.refuse["/continue_generation"] = (400, {"success": False, "message": "second"})
    with pytest.raises(EngineError, match="first") as caught:
        side.abort(loaded=False)
    assert any("second" in note for note in caught.value.__notes__)


def test_a_flush_that_waits_too_long_is_refused(start: Callable[..., SglangDouble]) -> None:
    side = Side(start(), flush_timeout_s=0)

    def meddle(path: str) -> None:
        if path == "/flush_cache":  # another client lets requests run again
            side.server.paused = False
            side.server.running[0].context = "running"

    with InFlight(side.server) as running:
        side.server.on_call = meddle
        with pytest.raises(EngineError, match="Flush cache failed"):
            side.begin()
        side.abort(loaded=False)
        assert len(running.answer()["output_ids"]) == 250


def test_zero_tensors_are_an_error(side: Side) -> None:
    with pytest.raises(EngineError, match="zero tensors"):
        side.begin(tensors=0)
    assert side.server.calls == []
    side.begin()
    with pytest.raises(EngineError, match="no tensor was loaded"):
        side.driver.finish(1, soon())
    assert "/update_weight_version" not in side.server.calls


def test_steps_out_of_order_are_refused_here(side: Side, weights: Weights) -> None:
    with pytest.raises(EngineError, match="begin first"):
        side.load(weights)
    side.begin()
    with pytest.raises(EngineError, match="begin was called twice"):
        side.begin()
    side.abort(loaded=False)
    assert serves(side.server)


# --- after the first payload: closed, paused, healed by the next


@pytest.mark.parametrize(
    "answer", [(400, {"success": False, "message": "no"}), (200, {"success": False, "message": "no"})]
)
def test_a_refused_bucket_leaves_the_engine_closed_and_paused(
    side: Side, weights: Weights, answer: tuple[int, Any]
) -> None:
    side.begin()
    side.load({"model.norm.weight": weights["model.norm.weight"]})
    side.server.refuse[UPDATE] = answer
    with pytest.raises(EngineError, match="no") as caught:
        side.load(weights)
    assert caught.value.phase == "stream"
    side.abort(loaded=True)
    assert side.server.paused
    assert not side.server.session
    assert "/continue_generation" not in side.server.calls
    side.driver.heal(soon())
    side.refit(weights, version=2, previous=Outcome.DIRTY)
    assert holds(side.server, weights)
    assert serves(side.server)


def test_what_was_posted_is_never_undone_even_when_told_so(side: Side, weights: Weights) -> None:
    side.begin()
    side.load(weights)
    side.abort(loaded=False)
    assert side.server.paused


@pytest.mark.parametrize("failing", FINISH)
def test_finish_can_be_called_again(side: Side, weights: Weights, failing: str) -> None:
    side.begin()
    side.load(weights)
    side.server.refuse[failing] = (400, {"success": False, "message": "no"})
    with pytest.raises(EngineError, match="no") as caught:
        side.driver.finish(1, soon())
    assert caught.value.phase == "finish"
    assert side.server.info()["weight_version"] == "default"
    side.driver.finish(1, soon())
    side.driver.resume(soon())
    assert side.server.info()["weight_version"] == "1"
    assert serves(side.server)


def test_resume_can_be_called_again(side: Side, weights: Weights) -> None:
    side.begin()
    side.load(weights)
    side.driver.finish(1, soon())
    side.server.refuse["/continue_generation"] = (500, {"message": "no"})
    with pytest.raises(EngineError, match="no") as caught:
        side.driver.resume(soon())
    assert caught.value.phase == "resume"
    side.driver.resume(soon())
    assert serves(side.server)


# --- sessions that others left


def test_a_session_of_a_killed_driver_is_taken_over(side: Side, weights: Weights) -> None:
    side.begin()
    side.load({"model.norm.weight": weights["model.norm.weight"]})
    fresh = Side(side.server)  # the killed driver's process started again; it knows of nothing
    fresh.refit(weights, version=2)
    assert holds(side.server, weights)
    assert serves(side.server)


def test_a_stale_session_is_no_ground_for_undoing(side: Side, weights: Weights) -> None:
    side.begin()
    side.load({"model.norm.weight": weights["model.norm.weight"]})
    fresh = Side(side.server)
    fresh.begin()
    with pytest.raises(EngineError, match="mixed"):
        fresh.abort(loaded=False)
    assert side.server.paused
    assert not side.server.session


def test_a_stale_session_refuses_a_partial_refit(side: Side) -> None:
    side.server.session = True
    with pytest.raises(EngineError, match="already open"):
        side.begin(partial=True)
    with pytest.raises(EngineError, match="mixed"):
        side.abort(loaded=False)
    assert side.server.paused


def test_heal_takes_over_with_and_without_a_session(side: Side, weights: Weights) -> None:
    side.server.session = True
    side.driver.heal(soon())
    assert side.server.paused
    assert not side.server.session
    side.driver.heal(soon())
    side.refit(weights)
    assert holds(side.server, weights)


# --- slow, dying and restarted servers


@pytest.mark.parametrize("during", ["begin", "load", "finish", "resume"])
def test_a_killed_server_is_dead_and_its_successor_is_refitted(side: Side, weights: Weights, during: str) -> None:
    steps: dict[str, Callable[[], None]] = {
        "begin": side.begin, "load": lambda: side.load(weights),
        "finish": lambda: side.driver.finish(1, soon()), "resume": lambda: side.driver.resume(soon()),
    }  # fmt: skip
    for name, step in steps.items():
        if name == during:
            break
        step()
    side.server.kill()
    with pytest.raises(EngineError) as caught:
        steps[during]()
    assert caught.value.dead
    with contextlib.suppress(EngineError):
        side.abort(loaded=during != "begin")
    side.server.restart()
    side.driver.heal(soon())
    side.refit(weights, version=2)
    assert holds(side.server, weights)


def test_a_bucket_that_kills_the_server_is_told_as_its_death(side: Side, weights: Weights) -> None:
    side.begin()
    side.server.ranks[1]["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(EngineError) as caught:
        side.load(weights)
    assert caught.value.dead
    assert "started again" in str(caught.value)


def test_a_cut_connection_to_a_living_server_is_no_death(side: Side, weights: Weights) -> None:
    side.begin()
    side.server.drop.add(UPDATE)
    with pytest.raises(EngineError) as caught:
        side.load(weights)
    assert not caught.value.dead
    side.abort(loaded=True)
    side.driver.heal(soon())
    side.refit(weights)
    assert holds(side.server, weights)


def test_a_bucket_without_an_answer_is_kept_until_the_server_answers_again(
    start: Callable[..., SglangDouble], weights: Weights
) -> None:
    side = Side(start(), load_timeout_s=0.2)
    side.server.delay[UPDATE] = 0.6
    side.begin()
    with pytest.raises(EngineError, match=r"no answer in 0\.2 s") as caught:
        side.load(weights)
    assert not caught.value.dead
    kept = side.adapter._engine.kept
    assert [tensor.nbytes > 0 for tensor in kept] == [True]
    side.abort(loaded=True)
    side.server.delay.clear()
    side.driver.heal(soon())
    side.refit(weights, version=3)
    assert kept == []
    assert holds(side.server, weights)


def test_a_step_after_the_deadline_is_not_sent(side: Side) -> None:
    with pytest.raises(EngineError, match="deadline"):
        side.driver.begin(Refit(refit_id="r", version=1, tensors=1), Deadline.after(0))
    assert side.server.calls == []


def test_another_server_at_the_address_is_found_out(side: Side) -> None:
    side.server.restart()
    side.server.info_body["tp_size"] = 4
    with pytest.raises(EngineError, match="tp_size 4, it had 2"):
        side.begin()
    assert side.server.calls == []


def test_a_partial_refit_needs_its_base(side: Side, weights: Weights) -> None:
    side.refit(weights, version=4)
    side.refit({"model.norm.weight": torch.ones(8)}, version=5, partial=True)
    assert holds(side.server, {**weights, "model.norm.weight": torch.ones(8)})
    side.server.version = "another's"
    with pytest.raises(EngineError, match="needs version '5', the server holds \"another's\""):
        side.begin(6, partial=True)
    side.abort(loaded=False)
    assert serves(side.server)
    side.server.restart()
    with pytest.raises(EngineError, match="no base"):
        side.begin(6, partial=True)
    side.abort(loaded=False)
    assert serves(side.server)


# --- memory


def test_released_memory_comes_back_in_order(side: Side, weights: Weights) -> None:
    side.adapter.release_memory(["kv_cache", "weights"])
    assert side.server.released == {"kv_cache", "weights"}
    side.server.calls.clear()
    side.server.bodies.clear()
    side.refit(weights)
    resumed = [body["tags"] for body in side.server.bodies if "tags" in body]
    assert resumed == [["weights"], ["kv_cache"]]
    assert side.server.calls[0] == "/resume_memory_occupation"
    assert side.server.calls[-2:] == ["/resume_memory_occupation", "/continue_generation"]
    assert side.server.released == set()
    assert holds(side.server, weights)
    assert serves(side.server)


def test_a_server_started_anew_has_released_nothing(side: Side, weights: Weights) -> None:
    side.adapter.release_memory(["kv_cache", "weights"])
    side.server.restart()
    side.refit(weights)  # to resume what the new one holds would kill it
    assert holds(side.server, weights)
    assert serves(side.server)


def test_undoing_gives_the_memory_back_and_stays_paused(side: Side) -> None:
    side.adapter.release_memory(["weights"])
    side.begin()
    side.abort(loaded=False)
    assert side.server.released == {"weights"}
    assert side.server.paused  # as it was before the refit


def test_a_partial_refit_of_released_weights_is_refused(side: Side, start: Callable[..., SglangDouble]) -> None:
    side.adapter.release_memory(["weights"])
    with pytest.raises(EngineError, match="no base"):
        side.begin(partial=True)
    backed = Side(start(info={"enable_weights_cpu_backup": True}))
    backed.adapter.release_memory(["weights"])
    backed.begin(partial=True)


def test_memory_that_was_not_released_is_never_resumed(side: Side, weights: Weights) -> None:
    side.refit(weights)
    assert "/resume_memory_occupation" not in side.server.calls


def test_the_cache_can_be_released_for_the_refit(start: Callable[..., SglangDouble], weights: Weights) -> None:
    side = Side(start(), release_kv_cache=True)
    side.begin()
    assert side.server.released == {"kv_cache"}
    side.abort(loaded=False)
    assert side.server.released == set()
    assert serves(side.server)
    side.begin()
    side.load({"model.norm.weight": weights["model.norm.weight"]})
    side.abort(loaded=True)
    side.driver.heal(soon())
    side.refit(weights)
    assert side.server.released == set()
    assert serves(side.server)


def test_traffic_can_be_held_until_the_first_refit(start: Callable[..., SglangDouble], weights: Weights) -> None:
    side = Side(start(), hold_traffic=True)
    assert side.server.paused
    side.begin()
    side.abort(loaded=False)
    assert side.server.paused
    side.refit(weights)
    assert serves(side.server)


# --- the optional check


def test_the_check_names_what_was_not_written(start: Callable[..., SglangDouble], weights: Weights) -> None:
    side = Side(start(tp=2), check_weights=True)
    side.refit(weights)
    assert holds(side.server, weights)
    side.server.deaf = {"model.norm.weight"}
    side.begin(2)
    side.load(weights)
    with pytest.raises(EngineError, match=r"1 weights were not written by this refit: model\.norm\.weight"):
        side.driver.finish(2, soon())
    assert side.server.info()["weight_version"] == "1"


def test_the_check_can_leave_names_alone(start: Callable[..., SglangDouble], weights: Weights) -> None:
    side = Side(start(), check_weights=True, check_skips=["norm"])
    side.server.deaf = {"model.norm.weight"}
    side.refit(weights)


def test_noise_is_not_made_before_the_first_bucket_nor_for_a_part(
    start: Callable[..., SglangDouble], weights: Weights
) -> None:
    side = Side(start(), check_weights=True)
    before = side.server.outputs()
    side.begin()
    side.abort(loaded=False)
    assert side.server.outputs() == before
    side.refit({"model.norm.weight": weights["model.norm.weight"]}, partial=True)
    assert "/weights_checker" not in side.server.calls


# --- set-up


def test_every_reason_against_a_server_comes_in_one_error(start: Callable[..., SglangDouble]) -> None:
    wrong: dict[str, Any] = {
        "version": "0.5.21", "nnodes": 2, "dp_size": 2, "pp_size": 2, "ep_size": 2, "moe_dp_size": 2, "dwdp_size": 2,
        "tokenizer_worker_num": 2, "weight_cache_mode": "on", "quantization": "awq", "disaggregation_mode": "prefill",
        "speculative_algorithm": "EAGLE",
    }  # fmt: skip
    server = start(info=wrong)
    with pytest.raises(ConfigError) as caught:
        SglangAdapter(url=server.url, tp_size=4, pause_mode="in_place", timeout_s=0, turbo=True)
    text = str(caught.value)
    reasons = [
        "0.5.21", "nnodes is 2", "dp_size is 2", "pp_size is 2", "ep_size is 2", "moe_dp_size is 2", "dwdp_size is 2",
        "tokenizer_worker_num is 2", "weight_cache_mode is 'on'", "'awq'", "prefill-only", "draft model",
        "tp_size is 1, the option says 4", "in_place", "timeout_s is 0", "no option turbo",
    ]  # fmt: skip
    assert [reason for reason in reasons if reason not in text] == []
    assert server.calls == []


def test_what_a_server_does_not_say_is_no_default(start: Callable[..., SglangDouble]) -> None:
    keys = ["version", "nnodes", "dp_size", "pp_size", "ep_size", "tp_size", "quantization", "device", "base_gpu_id"]
    server = start(info=dict.fromkeys(keys, ABSENT))
    with pytest.raises(ConfigError) as caught:
        SglangAdapter(url=server.url)
    assert [key for key in keys if key not in str(caught.value)] == []


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23", "0.5.23.post1", "0.5.104"])
def test_supported_versions(start: Callable[..., SglangDouble], version: str) -> None:
    assert SglangAdapter(url=start(info={"version": version}).url).facts.version == version


@pytest.mark.parametrize("version", ["0.4.9", "0.5.9", "0.5.21.post3", "0.6.0", "1.5.22", "main"])
def test_unsupported_versions(start: Callable[..., SglangDouble], version: str) -> None:
    with pytest.raises(ConfigError, match="version"):
        SglangAdapter(url=start(info={"version": version}).url)


@pytest.mark.parametrize(
    ("info", "config", "good"),
    [
        ({"quantization": "fp8"}, {"quantization_config": {"quant_method": "fp8"}}, True),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, True),
        ({"quantization": "fp8", "load_format": "flash_rl"}, {}, False),  # not for a Llama
        ({"quantization": "fp8"}, {}, False),
        ({}, {"quantization_config": {"quant_method": "gptq"}}, False),
    ],
)
def test_quantised_servers(
    start: Callable[..., SglangDouble], info: dict[str, Any], config: dict[str, Any], good: bool
) -> None:
    server = start(info=info, **config)
    if good:
        SglangAdapter(url=server.url)
    else:
        with pytest.raises(ConfigError, match="cannot be loaded again"):
            SglangAdapter(url=server.url)


def test_a_checkpoint_elsewhere_is_named_by_the_option(start: Callable[..., SglangDouble], tmp_path: Path) -> None:
    server = start()
    real, server.model = server.model, tmp_path / "on-another-host"
    with pytest.raises(ConfigError, match=r"on-another-host.*model_path"):
        SglangAdapter(url=server.url)
    assert SglangAdapter(url=server.url, model_path=str(real)).device == torch.device("cpu")


def test_a_key_is_sent_and_its_lack_explained(start: Callable[..., SglangDouble], weights: Weights) -> None:
    server = start()
    server.api_key = "secret"
    side = Side(server)
    with pytest.raises(EngineError, match="api_key"):
        side.begin()
    side = Side(server, api_key="secret")
    side.refit(weights)
    assert holds(server, weights)


def test_a_server_that_is_not_there_is_dead() -> None:
    with pytest.raises(EngineError) as caught:
        SglangAdapter(url="http://127.0.0.1:9")
    assert caught.value.dead


def test_ranks_are_one_or_all(start: Callable[..., SglangDouble]) -> None:
    adapter = SglangAdapter(url=start(tp=4).url)
    for ranks in ([0, 1], [1, 0, 2, 3], [], [0, 1, 2, 3, 4]):
        with pytest.raises(ConfigError, match="tp_size 4"):
            adapter.loader(ranks, None)
    adapter.loader([0, 1, 2, 3], None).close()


def test_a_gpu_is_found_among_the_visible_ones() -> None:
    facts = Facts(
        version="0.5.23", tp_size=2, device="cuda", base_gpu_id=4, gpu_id_step=2, model_path="", cpu_backup=False,
        drafts=False,
    )  # fmt: skip
    assert [facts.gpu(rank, None) for rank in (0, 1)] == [4, 6]
    assert [facts.gpu(rank, "6, 5,4") for rank in (0, 1)] == [2, 0]
    with pytest.raises(ConfigError, match="GPU 6"):
        facts.gpu(1, "4,5")


def test_the_last_of_driver_and_loader_closes_the_connection(side: Side) -> None:
    side.driver.close()
    side.driver.close()
    assert side.adapter._engine.server.label(soon()) == "default"
    side.loader.close()
    with pytest.raises(EngineError, match="closed"):
        side.adapter._engine.server.label(soon())


def test_outputs_of_the_double_tell_weights_apart(start: Callable[..., SglangDouble], weights: Weights) -> None:
    assert sample(start().generate(PROMPTS[0], 4)) != sample(start(weights=weights).generate(PROMPTS[0], 4))
