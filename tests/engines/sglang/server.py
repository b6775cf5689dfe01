"""Real servers for the tests: started in their own process group, never inside the test process, and always ended."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.engines.peer import Peer, end_group, free_port, start_group, tail

HERE = Path(__file__).parent
ARGUMENTS = (
    "--host", "127.0.0.1", "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--grammar-backend", "none", "--disable-cuda-graph", "--skip-server-warmup", "--dtype", "float32",
    "--max-total-tokens", "4096", "--max-running-requests", "8", "--context-length", "512",
    "--mem-fraction-static", "0.3", "--disable-overlap-schedule", "--sleep-on-idle",
)  # fmt: skip
LONG_PROMPT = [3 + (7 * i) % 500 for i in range(150)]  # longer than any block of the prefix cache
PROMPTS = ([1, 10, 20, 30, 40], LONG_PROMPT)


class Client:
    """What tests ask of a server, a real one or the double.

    Attributes:
        url: where it listens.
        model: folder of the checkpoint that it serves.
        tp: its tensor-parallel size.
    """

    def __init__(self, model: Path, tp: int) -> None:
        self.model, self.tp, self.url = model, tp, ""
        self.http = httpx.Client(timeout=120, trust_env=False)

    @property
    def alive(self) -> bool:
        raise NotImplementedError

    def wait_dead(self, timeout_s: float = 60) -> bool:
        """True once it is gone, False when it still lives after `timeout_s`."""
        end = time.monotonic() + timeout_s
        while self.alive and time.monotonic() < end:
            time.sleep(0.05)
        return not self.alive

    def post(self, path: str, body: Mapping[str, Any] | None = None, **params: Any) -> httpx.Response:
        return self.http.post(f"{self.url}{path}", json=dict(body or {}), params=params)

    def generate(self, prompt: list[int], tokens: int = 24) -> dict[str, Any]:
        """Greedy tokens with log-probabilities."""
        answer = self.post("/generate", request(prompt, tokens))
        answer.raise_for_status()
        return dict(answer.json())

    def outputs(self) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities of all prompts: equal weights give exactly equal ones."""
        return [sample(self.generate(prompt)) for prompt in PROMPTS]

    def checksums(self) -> dict[int, dict[str, str]]:
        """Per tensor-parallel rank: the engine's own names to checksums of its shards."""
        ranks = self.post("/weights_checker", {"action": "checksum"}).json()["ranks"]
        return {rank["parallelism_info"][0]["tp_rank"]: rank["checksums"] for rank in ranks}

    def info(self) -> dict[str, Any]:
        return dict(self.http.get(f"{self.url}/model_info").json())


class RealServer(Client):
    """One server process. `start` returns when it answers; `stop` kills its whole group.

    Args:
        model: folder of the checkpoint to serve.
        log: file of its output.
        tp: tensor-parallel size.
        python: of SGLang's environment.
    """

    def __init__(self, model: Path, log: Path, *, tp: int = 1, python: str = sys.executable) -> None:
        super().__init__(model, tp)
        self.log, self.python = log, python
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start the process; `wait` waits until it answers."""
        self.kill()  # a server that died of itself may have left children
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        threads = "|".join(str(i) for i in range(self.tp))
        self.process = start_group(
            [self.python, str(HERE / "launch.py"), "--model-path", str(self.model), "--port", str(port),
             "--tp-size", str(self.tp), *ARGUMENTS],
            self.log, {"SGLANG_CPU_OMP_THREADS_BIND": threads} if self.tp > 1 else {},
        )  # fmt: skip

    def wait(self, timeout_s: float = 400) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.process is None or self.process.poll() is not None:
                break
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.3)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{tail(self.log)}")

    def start(self) -> RealServer:
        self.launch()
        self.wait()
        return self

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL to every process of the server."""
        if self.process is not None:
            end_group(self.process)

    def stop(self) -> None:
        self.kill()
        self.http.close()
        self.http = httpx.Client(timeout=120, trust_env=False)


class Receiver(Peer):
    """A receiver beside a server, in a process of its own: `receive.py`."""

    def __init__(self, address: str, url: str, python: str = sys.executable, **options: Any) -> None:
        arguments = {"adapter_options": {}, **options, "address": address, "url": url}
        super().__init__(python, "-m", "tests.engines.sglang.receive", json.dumps(arguments))
        self.said()


class Traffic:
    """One short request after the other; remembers when each was answered, and under which label."""

    def __init__(self, server: RealServer) -> None:
        self.answers: list[tuple[float, str]] = []
        self._server, self._stop = server, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            label = self._server.generate(PROMPTS[0], 2)["meta_info"]["weight_version"]
            self.answers.append((time.monotonic(), label))

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)


def request(prompt: list[int], tokens: int) -> dict[str, Any]:
    return {
        "input_ids": prompt, "return_logprob": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }  # fmt: skip


def sample(answer: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
