"""The whole way to a server over HTTP: a request in flight, the prefix cache, a server that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

LONG = 1200
UP_S = 400.0
COMMAND = [
    "-m",
    "vllm.entrypoints.openai.api_server",
    "--served-model-name",
    "m",
    "--host",
    "127.0.0.1",
    "--enforce-eager",
    "--dtype",
    "float32",
    "--max-model-len",
    "1536",
    "--max-num-seqs",
    "8",
    "--block-size",
    "32",
    "--weight-transfer-config",
    '{"backend": "weightbus"}',
]


class Server:
    """vLLM's own server in a process group of its own: a worker that dies takes its parents along."""

    def __init__(self, path: Path, log: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log.open("ab")
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, *COMMAND, "--model", str(path), "--port", str(port), *options],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )
        self._wait(log)

    def _wait(self, log: Path) -> None:
        end = time.monotonic() + UP_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended: {log.read_text()[-2000:]}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError("the server did not come up")

    def generate(self) -> Any:
        """As `rig.generate`, over HTTP."""
        import rig

        return [self._complete(prompt, 12) for prompt in rig.PROMPTS]

    def _complete(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        reply = httpx.post(f"{self.url}/v1/completions", json=_request(prompt, tokens), timeout=120).raise_for_status()
        logprobs = reply.json()["choices"][0]["logprobs"]
        return [int(t.removeprefix("token_id:")) for t in logprobs["tokens"]], logprobs["token_logprobs"]

    def stream(self, prompt: list[int], tokens: int, into: list[int]) -> None:
        """Collect tokens as they come."""
        body = {**_request(prompt, tokens), "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    found = json.loads(line.removeprefix("data: "))["choices"][0]["logprobs"]["tokens"]
                    into.extend(int(token.removeprefix("token_id:")) for token in found)

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=30).raise_for_status().json()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._log.close()


def _request(prompt: list[int], tokens: int) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }


def drive(address: str, server: Server, **options: Any) -> Any:
    from weightbus import WeightBus

    join = {"address": address, "engine": "e0"}
    adapter_options = {"url": server.url, "join": join, **options}
    return WeightBus.driver(address, engine="e0", ranks=1, adapter="vllm", adapter_options=adapter_options)


@pytest.fixture(scope="module")
def paths(checkpoints: Path) -> tuple[Path, Path]:
    import tiny

    return tiny.make(checkpoints / "server-0", 0), tiny.make(checkpoints / "server-1", 1)


@pytest.fixture(scope="module")
def fresh(paths: tuple[Path, Path]) -> tuple[Any, Any]:
    """What fresh engines in this process answer on both checkpoints."""
    import rig

    plain: dict[str, Any] = {"weight_transfer_config": None, "worker_extension_cls": "", "max_model_len": 1536}
    return tuple(rig.generate(rig.engine(path, **plain), together=False) for path in paths)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def server(paths: tuple[Path, Path], checkpoints: Path) -> Iterator[Server]:
    made = Server(paths[0], checkpoints / "server.log")
    yield made
    made.kill()


def test_a_server_follows_the_bus_and_forgets_cached_prefixes(server: Server, paths: Any, fresh: Any) -> None:
    import rig

    assert server.generate() == fresh[0]
    again = server.generate()  # the long prompt comes from the prefix cache now, which shows in the last bits
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in fresh[0]]
    with rig.Trainer("local", 1) as trainer, drive(trainer.address, server) as driver:
        for version, which in ((1, 1), (2, 0)):
            trainer.post(paths[which], version)
            driver.drive(timeout=120)
            assert trainer.answer()["engines"] == {"e0": f"READY({version})"}
            assert server.generate() == fresh[which]
            assert server.get("/weight_info") == {"weight_version": str(version)}
            assert server.get("/is_paused") == {"is_paused": False}


def test_a_request_in_flight_goes_on_with_the_new_weights(server: Server, paths: Any, fresh: Any) -> None:
    import rig

    prompt = rig.PROMPTS[0]
    with rig.Trainer("local", 1) as trainer, drive(trainer.address, server, pause="keep") as driver:
        trainer.post(paths[0], 1)
        driver.drive(timeout=120)
        trainer.answer()
        alone: list[int] = []
        server.stream(prompt, LONG, alone)
        tokens: list[int] = []
        request = threading.Thread(target=server.stream, args=(prompt, LONG, tokens), daemon=True)
        request.start()
        while len(tokens) < 5:
            time.sleep(0.005)
        trainer.post(paths[1], 2)
        driver.drive(timeout=120)
        between = len(tokens)
        assert trainer.answer()["engines"] == {"e0": "READY(2)"}
        request.join(120)
    assert 5 <= between < LONG == len(tokens)  # it was running when the new weights came, and was not cut
    same = next(i for i in range(LONG) if tokens[i] != alone[i])
    assert 5 <= same <= between + 5  # the old model's tokens up to the pause, then others
    assert server.generate() == fresh[1]


def test_a_killed_server_is_dead_and_its_successor_is_fed(paths: Any, fresh: Any, checkpoints: Path) -> None:
    import rig

    from weightbus import WeightBusError

    first = Server(paths[0], checkpoints / "killed.log")
    try:
        with rig.Trainer("local", 1, stall_timeout=15.0) as trainer:
            with drive(trainer.address, first) as driver:
                trainer.post(paths[1], 1, hold_after=10, hold_s=6.0)
                threading.Timer(3.0, first.kill).start()
                with pytest.raises(WeightBusError):
                    driver.drive(timeout=120)
                answer = trainer.answer()
            assert answer["error"] == "PartialRefitError"
            assert not answer["engines"]["e0"].startswith("READY(1)")
            second = Server(paths[0], checkpoints / "successor.log")
            try:
                with drive(trainer.address, second) as driver:
                    trainer.post(paths[1], 1)
                    driver.drive(timeout=120)
                    assert trainer.answer()["engines"] == {"e0": "READY(1)"}
                    assert second.generate() == fresh[1]
            finally:
                second.kill()
    finally:
        first.kill()
