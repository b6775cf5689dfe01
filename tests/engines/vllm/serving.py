"""vLLM's own server over HTTP, and a driver of it."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import rig

from tests.engines.peer import end_group, free_port, start_group, tail

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
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._process = start_group(
            [sys.executable, *COMMAND, "--model", str(path), "--port", str(port), *options],
            log,
            {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )
        try:
            self._wait(log)
        except BaseException:
            self.kill()
            raise

    def _wait(self, log: Path) -> None:
        end = time.monotonic() + UP_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{tail(log)}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"the server did not come up in {UP_S:.0f} s:\n{tail(log)}")

    def generate(self) -> Any:
        """As `rig.generate`, over HTTP."""
        return [self.complete(prompt, rig.TOKENS) for prompt in rig.PROMPTS]

    def complete(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        """Greedy tokens and their logprobs."""
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
        end_group(self._process)


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
