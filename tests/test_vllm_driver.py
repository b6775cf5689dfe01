"""The driver of a vLLM engine against a double that refuses what vLLM refuses; no vLLM here."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.vllm_double import Double, DoubleServer
from weightbus.adapter import Refit
from weightbus.deadline import Deadline
from weightbus.errors import ConfigError, EngineError
from weightbus_vllm import VllmAdapter, join
from weightbus_vllm.driver import VllmDriver
from weightbus_vllm.loader import VllmLoader
from weightbus_vllm.worker import JoinInfo, rank_on_bus

REFIT = Refit(refit_id="r1", version=7, tensors=3, nbytes=12)


@pytest.fixture
def double() -> Iterator[Double]:
    double = Double()
    with DoubleServer(double) as server:
        double.url = server.url  # type: ignore[attr-defined]
        yield double


@pytest.fixture
def pair() -> Iterator[Double]:
    """An engine of two workers."""
    double = Double(ranks=2)
    with DoubleServer(double) as server:
        double.url = server.url  # type: ignore[attr-defined]
        yield double


def driver_of(double: Any, **options: Any) -> VllmDriver:
    made = VllmAdapter(url=double.url, **options).driver()
    assert isinstance(made, VllmDriver)
    return made


def soon(seconds: float = 10.0) -> Deadline:
    return Deadline.after(seconds)


def test_one_refit_is_seven_calls_in_order_with_the_version_at_finish(double: Any) -> None:
    driver = driver_of(double)
    driver.begin(REFIT, soon())
    driver.finish(7, soon())
    assert double.paused
    driver.resume(soon())
    assert double.paths == [
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/resume",
    ]
    arguments = dict(double.calls)
    assert arguments["/pause"] == {"mode": "abort", "clear_cache": "true"}
    assert 0 < arguments["/update_weights"]["update_info"]["timeout_s"] <= 10
    assert arguments["/finish_weight_update"] == {"weight_version": "7"}
    assert (double.weight_version, double.paused, double.active) == ("7", False, [False])


def test_begin_returns_while_the_workers_load_and_finish_waits_for_them(double: Any) -> None:
    double.update_s = 0.4
    driver = driver_of(double)
    driver.begin(REFIT, soon())
    driver.poll()
    driver.finish(7, soon())
    assert double.before_loaded == ["/pause", "/start_weight_update", "/update_weights"]
    assert double.weight_version == "7"


def test_an_update_that_failed_is_not_finished(double: Any) -> None:
    double.failing["update_weights"] = {0}
    driver = driver_of(double)
    driver.begin(REFIT, soon())
    with pytest.raises(EngineError, match="update_weights failed on rank 0"):
        driver.finish(7, soon())
    assert "/finish_weight_update" not in double.paths


@pytest.mark.parametrize("version", ["0.26.1", "0.34.0", "1.0.0", "nightly"])
def test_another_vllm_is_refused_before_the_pause(double: Any, version: str) -> None:
    double.version = version
    with pytest.raises(EngineError, match=r"not supported.*0\.27 to 0\.33"):
        driver_of(double).begin(REFIT, soon())
    assert double.paths == []


@pytest.mark.parametrize("version", ["0.27.0", "0.33.2", "0.32.0+cpu", "v0.30.1.dev3"])
def test_supported_versions(double: Any, version: str) -> None:
    double.version = version
    driver_of(double).begin(REFIT, soon())


def test_a_server_without_development_mode_says_how_to_start_it(double: Any) -> None:
    double.dev_mode = False
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1") as caught:
        driver_of(double).begin(REFIT, soon())
    assert not caught.value.dead


def test_false_success_inside_a_200_is_a_failure_and_a_retry_does_not_finish_twice(double: Any) -> None:
    driver = driver_of(double)
    double.cache_resets = False
    driver.begin(REFIT, soon())
    with pytest.raises(EngineError, match="prefix cache"):
        driver.finish(7, soon())
    double.cache_resets = True
    driver.finish(7, soon())
    assert double.paths.count("/finish_weight_update") == 1
    assert double.paths[-1] == "/reset_prefix_cache"


def test_an_early_error_reply_shows_in_poll_and_the_undo_serves_again(double: Any) -> None:
    double.failing["update_weights"] = {0}
    driver = driver_of(double)
    driver.begin(REFIT, soon())
    with pytest.raises(EngineError, match="update_weights failed on rank 0"):
        _until_raises(driver)
    double.failing.clear()
    driver.abort("early", loaded=False, resume=True, deadline=soon())
    assert (double.paused, double.active, double.weight_version) == (False, [False], "default")


@pytest.mark.parametrize(("resume", "paused"), [(True, False), (False, True)])
def test_undo_before_a_byte_ends_the_update_with_nothing_sent(double: Any, resume: bool, paused: bool) -> None:
    driver = driver_of(double)
    driver.begin(REFIT, soon())
    driver.abort("a peer left", loaded=False, resume=resume, deadline=soon())
    assert (double.paused, double.active, double.weight_version) == (paused, [False], "default")


def test_a_failed_load_closes_the_session_and_stays_paused(double: Any) -> None:
    driver = driver_of(double)
    driver.begin(REFIT, soon())
    driver.abort("digest", loaded=True, resume=True, deadline=soon())
    assert (double.paused, double.active, double.weight_version) == (True, [False], "default")


def test_a_start_that_is_refused_is_undone_to_serving(double: Any) -> None:
    double.failing["start_weight_update"] = {0}
    driver = driver_of(double)
    with pytest.raises(EngineError, match="start_weight_update failed"):
        driver.begin(REFIT, soon())
    driver.abort("begin failed", loaded=False, resume=True, deadline=soon())
    assert not double.paused


def test_a_new_driver_heals_what_a_dead_one_left_open(pair: Any) -> None:
    driver_of(pair).begin(REFIT, soon())
    later = driver_of(pair)
    with pytest.raises(EngineError, match="already active"):
        later.begin(REFIT, soon())
    later = driver_of(pair)
    later.heal(soon())
    assert (pair.paused, pair.active) == (True, [False, False])
    later.begin(REFIT, soon())
    later.finish(7, soon())
    later.resume(soon())
    assert (pair.paused, pair.weight_version) == (False, "7")


def test_heal_of_an_engine_without_an_open_update_leaves_no_reply_behind(pair: Any) -> None:
    """Both workers say that nothing is open; the second one's reply must not answer the next start."""
    driver = driver_of(pair)
    driver.heal(soon())
    driver.begin(REFIT, soon())
    driver.finish(7, soon())
    assert pair.weight_version == "7"


def test_a_rank_that_alone_closed_its_session_is_put_right(pair: Any) -> None:
    pair.failing["update_weights"] = {1}
    driver = driver_of(pair)
    driver.begin(REFIT, soon())
    with pytest.raises(EngineError, match="rank 1"):
        _until_raises(driver)
    assert pair.active == [True, False]
    driver.abort("rank 1", loaded=True, resume=False, deadline=soon())
    pair.failing.clear()
    driver.heal(soon())
    driver.begin(REFIT, soon())
    driver.finish(7, soon())
    assert (pair.active, pair.weight_version) == ([False, False], "7")


def test_a_dead_engine_behind_a_live_server_is_dead(double: Any) -> None:
    driver = driver_of(double)
    driver.begin(REFIT, soon())
    double.dead = True
    with pytest.raises(EngineError) as caught:
        driver.finish(7, soon())
    assert caught.value.dead


def test_a_server_that_is_gone_is_dead() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EngineError, match=r"127\.0\.0\.1") as caught:
        VllmAdapter(url=url).driver().begin(REFIT, soon())
    assert caught.value.dead


def test_no_answer_in_time_is_said_and_is_not_death(double: Any) -> None:
    double.update_s = 1.5
    driver = driver_of(double)
    driver.begin(REFIT, soon(0.5))
    with pytest.raises(EngineError, match=r"has not returned|in time") as caught:
        driver.finish(7, soon(0.1))
    assert not caught.value.dead
    assert double.weight_version == "default"
    driver.abort("late", loaded=True, resume=False, deadline=soon())
    assert (double.paused, double.active) == (True, [False])


def test_keep_with_the_old_kv_clears_no_cache(double: Any) -> None:
    driver = driver_of(double, pause="keep", keep_kv=True)
    driver.begin(REFIT, soon())
    driver.finish(7, soon())
    assert dict(double.calls)["/pause"] == {"mode": "keep", "clear_cache": "false"}
    assert "/reset_prefix_cache" not in double.paths


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"url": "http://x", "llm": object()},
        {"url": "http://x", "pause": "stop"},
        {"url": "http://x", "keep_kv": True},
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        VllmAdapter(**options)


def test_join_sends_the_workers_to_the_bus(double: Any) -> None:
    join("tcp://10.0.0.1:5", "e3", url=double.url, backend="nixl", options={"stage": "host"})
    info = dict(double.calls)["/init_weight_transfer_engine"]["init_info"]
    assert info == {"address": "tcp://10.0.0.1:5", "engine": "e3", "backend": "nixl", "options": {"stage": "host"}}
    assert JoinInfo(**info).backend == "nixl"
    assert VllmAdapter(url=double.url).world_size == 1


def test_the_worker_extension_is_driven_by_collective_rpc(double: Any) -> None:
    driver = driver_of(double, rpc=True, join={"address": "tcp://127.0.0.1:5", "engine": "e0"})
    driver.begin(REFIT, soon())
    driver.finish(7, soon())
    driver.resume(soon())
    methods = [arguments["method"] for path, arguments in double.calls if path == "/collective_rpc"]
    assert methods == ["weightbus_join", "weightbus_start", "weightbus_update", "weightbus_finish"]
    joined = next(arguments for path, arguments in double.calls if path == "/collective_rpc")
    assert json.loads(joined["args"][0]) == {"address": "tcp://127.0.0.1:5", "engine": "e0"}
    assert double.weight_version == "7"


class FakeLLM:
    """The methods of vLLM's `LLM` that the driver uses."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size_across_dp=4))

    def _see(self, name: str, value: Any = None) -> None:
        self.seen.append((name, value))

    def sleep(self, level: int, mode: str) -> None:
        self._see("sleep", (level, mode))

    def wake_up(self, tags: list[str]) -> None:
        self._see("wake_up", tags)

    def start_weight_update(self) -> None:
        self._see("start")

    def update_weights(self, request: Any) -> None:
        self._see("update", request.update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._see("finish", weight_version)

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        self._see("reset")
        return True


class FakeAsyncLLM(FakeLLM):
    """The same as coroutines, with a real pause; `update_weights` hangs until released."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self._see("pause", (mode, clear_cache))

    async def resume_generation(self) -> None:
        self._see("resume")

    async def start_weight_update(self) -> None:  # type: ignore[override]
        self._see("start")

    async def update_weights(self, request: Any) -> None:  # type: ignore[override]
        while not self.release.is_set():
            await asyncio.sleep(0.01)
        self._see("update", request.update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:  # type: ignore[override]
        self._see("finish", weight_version)

    async def reset_prefix_cache(self, reset_running_requests: bool) -> bool:  # type: ignore[override]
        self._see("reset")
        return False


def test_an_llm_object_is_driven_by_its_methods() -> None:
    llm = FakeLLM()
    adapter = VllmAdapter(llm=llm)
    driver = adapter.driver()
    driver.begin(REFIT, Deadline.after(None))
    driver.finish(7, soon())
    driver.resume(soon())
    assert adapter.world_size == 4
    assert llm.seen == [
        ("sleep", (0, "abort")),
        ("start", None),
        ("update", {"timeout_s": None}),
        ("finish", "7"),
        ("reset", None),
        ("wake_up", ["scheduling"]),
    ]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


def test_an_async_llm_runs_on_its_own_loop(loop: asyncio.AbstractEventLoop) -> None:
    llm = FakeAsyncLLM()
    driver = VllmAdapter(llm=llm, loop=loop, pause="keep").driver()
    driver.begin(REFIT, soon())
    assert [name for name, _ in llm.seen] == ["pause", "start"]
    llm.release.set()
    with pytest.raises(EngineError, match="prefix cache"):
        driver.finish(7, soon())
    assert [name for name, _ in llm.seen] == ["pause", "start", "update", "finish", "reset"]


def test_an_async_llm_without_its_loop_is_refused() -> None:
    with pytest.raises(EngineError, match="loop"):
        VllmAdapter(llm=FakeAsyncLLM()).driver().begin(REFIT, soon())


def test_a_callable_gets_the_method_by_name() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    def call(method: str, **arguments: Any) -> Any:
        seen.append((method, arguments))
        return True

    driver = VllmAdapter(llm=call).driver()
    driver.begin(REFIT, soon())
    driver.finish(7, soon())
    driver.resume(soon())
    assert [method for method, _ in seen] == [
        "pause_generation",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "reset_prefix_cache",
        "resume_generation",
    ]
    assert seen[3][1] == {"weight_version": "7"}


@pytest.mark.parametrize(
    ("dp", "stage_size", "rank", "want"), [(0, 1, 0, 0), (0, 4, 3, 3), (1, 4, 0, 4), (2, 8, 5, 21)]
)
def test_ranks_count_data_parallel_replicas_first(dp: int, stage_size: int, rank: int, want: int) -> None:
    parallel = SimpleNamespace(data_parallel_index=dp, data_parallel_rank=0, world_size=stage_size)
    assert rank_on_bus(parallel, rank) == want


def test_join_info_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="address and engine"):
        JoinInfo()
    with pytest.raises(TypeError, match="adress"):
        JoinInfo(adress="tcp://127.0.0.1:5", engine="e0")  # type: ignore[call-arg]


def test_importing_the_package_brings_neither_vllm_nor_httpx() -> None:
    code = "import sys, weightbus_vllm, weightbus_vllm.plugin as p; print({'vllm', 'httpx'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": ".:backends:adapters", "PATH": ""},
    )
    assert done.stdout.strip() == "set()"


def test_the_extension_hides_nothing_of_a_worker() -> None:
    from weightbus_vllm.extension import WeightbusExtension

    names = [name for name in dir(WeightbusExtension) if not name.startswith("__")]
    assert names
    assert all(name.startswith("weightbus_") for name in names)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3"),
        ("visual.blocks.11.norm.bias", "visual.blocks.11"),
        ("model.embed_tokens.weight", "model.embed_tokens."),
        ("lm_head.weight", "lm_head."),
    ],
)
def test_names_of_a_layer_and_of_a_module_follow_each_other(name: str, key: str) -> None:
    rules = VllmLoader.rules(object.__new__(VllmLoader))
    keys = [m.expand(rule.key) for rule in rules.adjacent if (m := re.fullmatch(rule.pattern, name))]
    assert keys == [key]
    assert rules.together == ()


def _until_raises(driver: VllmDriver) -> None:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        driver.poll()
        time.sleep(0.01)
