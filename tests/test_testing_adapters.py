"""RecordingAdapter keeps the contract of adapters, refuses what an engine refuses, and fails as told."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from weightbus.adapter import Refit
from weightbus.deadline import Deadline
from weightbus.errors import ConfigError, EngineError
from weightbus.manifest import TensorSpec
from weightbus.testing.adapters import AdapterConformance, RecordingAdapter

NOW = Deadline.after(None)


def engine_tensors() -> dict[str, torch.Tensor]:
    tied = torch.zeros(4, 3)
    return {
        "embed": tied,
        "head": tied,
        "strided": torch.zeros(5, 6, dtype=torch.bfloat16).t(),
        "scalar": torch.zeros((), dtype=torch.float64),
        "empty": torch.zeros(0, 7, dtype=torch.float16),
        "flags": torch.zeros(9, dtype=torch.bool),
        "fp8": torch.zeros(11, dtype=torch.float8_e4m3fn),
    }


class TestRecordingAdapter(AdapterConformance):
    @pytest.fixture
    def adapter(self) -> RecordingAdapter:
        return RecordingAdapter(tensors=engine_tensors())

    @pytest.fixture
    def fitting(self) -> Sequence[TensorSpec]:
        tensors = engine_tensors()
        del tensors["head"]
        return [TensorSpec.of(name, tensor, ["head"] if name == "embed" else []) for name, tensor in tensors.items()]

    @pytest.fixture
    def read_engine(self, adapter: RecordingAdapter) -> Callable[[], Mapping[str, torch.Tensor]]:
        return lambda: adapter.engine.weights[0]


def make(**options: Any) -> tuple[RecordingAdapter, Any, Any]:
    adapter = RecordingAdapter(shapes={"w": ([2], "float32")}, **options)
    return adapter, adapter.driver(), adapter.loader([0], None)


def refit(version: int) -> Refit:
    return Refit(refit_id=str(version), version=version, tensors=1, nbytes=8)


BATCH = [[("w", torch.tensor([1.0, 2.0]))]]


def test_steps_at_the_wrong_time_are_refused() -> None:
    _, driver, loader = make()
    with pytest.raises(EngineError, match="load without begin"):
        loader.load(BATCH)
    with pytest.raises(EngineError, match="finish without begin"):
        driver.finish(1, NOW)
    driver.begin(refit(1), NOW)
    with pytest.raises(EngineError, match="begin while a session is open"):
        driver.begin(refit(2), NOW)
    with pytest.raises(EngineError, match="resume before finish"):
        driver.resume(NOW)
    loader.load(BATCH)
    driver.finish(1, NOW)
    with pytest.raises(EngineError, match="or twice"):
        driver.finish(1, NOW)


def test_a_refit_without_tensors_is_refused() -> None:
    _, driver, _ = make()
    with pytest.raises(EngineError, match="without tensors"):
        driver.begin(Refit(refit_id="x", version=1), NOW)


def test_calls_are_written_down_and_the_label_is_published_by_finish() -> None:
    adapter, driver, loader = make()
    driver.begin(refit(7), NOW)
    loader.load(BATCH)
    assert (adapter.engine.label, adapter.engine.serving) == ("", False)
    driver.finish(7, NOW)
    driver.resume(NOW)
    assert adapter.engine.calls == ["begin 7", "load w", "finish 7", "resume"]
    assert (adapter.engine.label, adapter.engine.serving) == ("7", True)


def test_an_answer_is_cached_until_the_next_version() -> None:
    adapter, driver, loader = make()
    old = adapter.engine.prompt("hello")
    adapter.engine.weights[0]["w"].fill_(9)
    assert adapter.engine.prompt("hello") == old, "a stale answer: nobody flushed"
    driver.begin(refit(2), NOW)
    with pytest.raises(EngineError, match="paused"):
        adapter.engine.prompt("hello")
    loader.load(BATCH)
    driver.finish(2, NOW)
    driver.resume(NOW)
    label, digest = adapter.engine.prompt("hello")
    assert label == "2"
    assert digest != old[1]


@pytest.mark.parametrize(("loaded", "serving"), [(False, True), (True, False)])
def test_abort_resumes_only_what_was_not_loaded(loaded: bool, serving: bool) -> None:
    adapter, driver, _ = make()
    driver.begin(refit(1), NOW)
    driver.abort("why", loaded=loaded, resume=True, deadline=NOW)
    assert adapter.engine.serving is serving
    assert adapter.engine.session is False


def test_it_fails_at_the_told_call_as_often_as_told() -> None:
    adapter, driver, loader = make(fail_at="load:1", fail_times=2)
    driver.begin(refit(1), NOW)
    loader.load(BATCH)
    for _ in range(2):
        with pytest.raises(EngineError, match="fails in load"):
            loader.load(BATCH)
    loader.load(BATCH)
    assert adapter.engine.weights[0]["w"].tolist() == [1.0, 2.0]


def test_it_stalls_at_the_told_call() -> None:
    _, driver, _ = make(stall_at="begin", stall_s=0.3)
    started = time.monotonic()
    driver.begin(refit(1), NOW)
    assert time.monotonic() - started >= 0.3


def test_two_ranks_hold_their_own_values() -> None:
    adapter = RecordingAdapter(shapes={"w": ([2], "float32")})
    loader = adapter.loader([0, 3], None)
    loader.load([[("w", torch.tensor([1.0, 2.0]))], [("w", torch.tensor([3.0, 4.0]))]])
    assert adapter.engine.weights[0]["w"].tolist() == [1.0, 2.0]
    assert adapter.engine.weights[3]["w"].tolist() == [3.0, 4.0]


def test_a_step_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="explode"):
        RecordingAdapter(fail_at="explode")
