"""A double of an SGLang 0.5.23 server: refuses what the real one refuses, in its words, and dies of what it dies of.

`tests/sglang_contract.py` holds the promises that are tested against both.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import pickle
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
from safetensors.torch import load_file, save_file

from tests.engines.sglang.server import Client

INFO: dict[str, Any] = {
    "version": "0.5.23", "nnodes": 1, "dp_size": 1, "pp_size": 1, "ep_size": 1, "moe_dp_size": 1, "dwdp_size": 1,
    "tokenizer_worker_num": 1, "weight_cache_mode": "off", "quantization": None, "load_format": "auto",
    "disaggregation_mode": "null", "speculative_algorithm": None, "device": "cpu", "base_gpu_id": 0, "gpu_id_step": 1,
    "enable_weights_cpu_backup": False,
}  # fmt: skip
CLOSED = "no weight-update session is open; call begin_weight_update() first"
OPEN = "a weight-update session is already open; call end_weight_update() first"
OUTSIDE = "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
ABSENT = object()
MODULES = {"builtins", "torch", "torch._utils", "torch.storage", "collections"}
TOKEN_S = 0.002


class _Death(Exception):
    """The scheduler raised: the real server goes down as a whole."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in MODULES or (module, name) == ("types", "SimpleNamespace"):
            return super().find_class(module, name)
        raise _Death(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")


def layers(num_layers: int = 2, hidden: int = 8, heads: int = 2, experts: int = 0) -> dict[str, torch.Tensor]:
    """Weights of a tiny model with a checkpoint's names, from torch's current seed."""
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32, hidden)}
    for i in range(num_layers):
        layer = f"model.layers.{i}"
        for part, rows in (("q", hidden), ("k", hidden // heads), ("v", hidden // heads), ("o", hidden)):
            sizes[f"{layer}.self_attn.{part}_proj.weight"] = (rows, hidden)
        mlps = [f"{layer}.mlp.experts.{e}" for e in range(experts)] or [f"{layer}.mlp"]
        for mlp in mlps:
            sizes |= {f"{mlp}.{part}_proj.weight": (12, hidden) for part in ("gate", "up")}
            sizes[f"{mlp}.down_proj.weight"] = (hidden, 12)
        if experts:
            sizes[f"{layer}.mlp.gate.weight"] = (experts, hidden)
            sizes[f"{layer}.mlp.gate.e_score_correction_bias"] = (experts,)
        sizes[f"{layer}.input_layernorm.weight"] = (hidden,)
    sizes |= {"model.norm.weight": (hidden,), "lm_head.weight": (32, hidden)}
    return {name: torch.randn(shape) for name, shape in sizes.items()}


def write_checkpoint(folder: Path, weights: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """A folder as a server is started on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False, **config}))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


class _Request:
    """A running generation: it holds keys and values of the weights under which its prompt was read."""

    def __init__(self, prompt: list[int], tokens: int) -> None:
        self.prompt, self.tokens = prompt, tokens
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[dict[str, Any]] = []
        self.context: str | None = None
        self.retractions = 0
        self.aborted = False


class SglangDouble(Client):
    """The double, in a thread of this process.

    Args:
        model: folder of the checkpoint.
        tp: ranks; each holds a copy of all weights, so that a payload on the wrong rank shows.
        info: entries of ``/server_info`` to change; `ABSENT` takes one away.

    Attributes:
        ranks: per rank name to tensor.
        calls: paths of POSTs in order.
        bodies: their JSON bodies.
        refuse: path to (status, body) of its next answer.
        delay: path to seconds before its answers.
        drop: paths whose next call is carried out but whose connection is then cut.
        deaf: names whose tensors are dropped without a word.
        on_call: called with the path before a POST is carried out.
    """

    def __init__(self, model: Path, tp: int = 1, info: Mapping[str, Any] | None = None) -> None:
        super().__init__(model, tp)
        self.info_body = {**INFO, "tp_size": tp, **(info or {})}
        self.info_body = {key: value for key, value in self.info_body.items() if value is not ABSENT}
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.refuse: dict[str, tuple[int, dict[str, Any]]] = {}
        self.delay: dict[str, float] = {}
        self.drop: set[str] = set()
        self.deaf: set[str] = set()
        self.on_call: Any = None
        self.api_key: str | None = None
        self._start_state()

    def _start_state(self) -> None:
        weights = load_file(self.model / "model.safetensors")
        self.ranks = [{name: tensor.clone() for name, tensor in weights.items()} for _ in range(self.tp)]
        self.paused, self.retracting, self.session = False, False, False
        self.version, self.dead = "default", False
        self.info_body["startup_time"] = {"total_s": time.time()}
        self.released: set[str] = set()
        self.running: list[_Request] = []
        self.cache: dict[tuple[int, ...], str] = {}
        self.lock = threading.Condition(threading.RLock())

    def start(self, port: int = 0) -> SglangDouble:
        double = self

        class Handler(_Handler):
            server_state = double

        self.httpd = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.httpd.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.httpd.server_address[1]}"
        self.thread = threading.Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        return self

    @property
    def alive(self) -> bool:
        return not self.dead

    def kill(self) -> None:
        """As SIGKILL: the port is closed, requests in flight lose their connection."""
        with self.lock:
            if self.dead:
                return
            self.dead = True
            self.lock.notify_all()
        self.httpd.shutdown()
        self.httpd.server_close()

    def restart(self) -> SglangDouble:
        """A new process on the same address and checkpoint."""
        port = int(self.url.rpartition(":")[2])
        self.kill()
        self._start_state()
        return self.start(port)

    def stop(self) -> None:
        self.kill()
        self.http.close()

    def digest(self) -> str:
        return digest_of(self.ranks)

    def carry_out(self, path: str, body: Any, query: Mapping[str, list[str]]) -> tuple[int, Any]:
        """The answer to one POST: status and JSON."""
        name = path.strip("/")
        if name == "generate":
            return self._generate(body)
        with self.lock:
            step = getattr(self, f"_{name}", None)
            return step(body, query) if step else (404, {"detail": "Not Found"})

    def _pause_generation(self, body: dict[str, Any], _: object) -> tuple[int, Any]:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return 400, {"object": "error", "message": f"mode {mode}"}
        self.paused = True
        if mode == "abort":
            self._abort_all()
        self.retracting = mode == "retract" or self.retracting
        if mode == "retract":
            for request in self.running:
                request.context = None
                request.retractions += 1
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _abort_all(self) -> None:
        for request in self.running:
            request.aborted = True
        self.lock.notify_all()
        while self.running:
            self.lock.wait(0.1)

    def _continue_generation(self, _: object, __: object) -> tuple[int, Any]:
        self.paused = self.retracting = False
        self.lock.notify_all()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def _flush_cache(self, _: object, query: Mapping[str, list[str]]) -> tuple[int, Any]:
        wait_s = float(query.get("timeout", ["0"])[0])
        end = time.monotonic() + wait_s
        while self.running and wait_s:  # a flush that waits does so for retracted requests too
            if time.monotonic() >= end:
                return 400, "Timed out waiting for idle state."
            self.lock.wait(0.01)
        if [r for r in self.running if not (self.paused and r.context is None)]:
            return 400, "Flush cache failed.\n"
        self.cache.clear()
        return 200, "Cache flushed.\n"

    def _begin_weight_update(self, _: object, __: object) -> tuple[int, Any]:
        if self.session:
            return 400, {"success": False, "message": OPEN}
        self.session = True
        return 200, {"success": True, "message": "Success"}

    def _end_weight_update(self, _: object, __: object) -> tuple[int, Any]:
        if not self.session:
            return 400, {"success": False, "message": CLOSED}
        self.session = False
        return 200, {"success": True, "message": "Success"}

    def _update_weights_from_tensor(self, body: dict[str, Any], _: object) -> tuple[int, Any]:
        texts = body.get("serialized_named_tensors")
        if not isinstance(texts, list):
            return 400, {"object": "error", "message": "serialized_named_tensors: Field required"}
        try:
            payloads = [base64.b64decode(text, validate=True) for text in texts]
        except (binascii.Error, ValueError):
            return 400, {"object": "error", "message": "serialized_named_tensors: invalid base64"}
        if not self.session:
            return 400, {"success": False, "message": OUTSIDE}
        if len(payloads) < self.tp:
            raise _Death("list index out of range")
        for rank in range(self.tp):
            self._load(rank, payloads[rank], body.get("load_format"))
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]
        if body.get("flush_cache", True) and self.running:
            return 400, {"success": False, "message": "Weights were updated, but the cache was not flushed"}
        return 200, {"success": True, "message": "Success"}

    def _load(self, rank: int, payload: bytes, load_format: str | None) -> None:
        try:
            content = _Unpickler(io.BytesIO(payload)).load()
            if load_format == "flattened_bucket":
                named = [
                    (m.name, content["flattened_tensor"][m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape))
                    for m in content["metadata"]
                ]
            elif load_format is None:
                named = content
            else:
                raise _Death(f"Unknown load_format={load_format}")
            for name, tensor in named:
                if name not in self.deaf and (mine := self.ranks[rank].get(name)) is not None:
                    if mine.shape != tensor.shape:
                        raise _Death(f"shape of {name}")
                    mine.copy_(tensor)
        except _Death:
            raise
        except Exception as exc:
            raise _Death(str(exc)) from exc

    def _update_weight_version(self, body: dict[str, Any], _: object) -> tuple[int, Any]:
        if "new_version" not in body:
            return 400, {"object": "error", "message": "new_version: Field required"}
        if body.get("abort_all_requests", True):
            self._abort_all()
        self.version = body["new_version"]
        return 200, {"success": True, "message": "Weight version updated", "new_version": self.version}

    def _release_memory_occupation(self, body: dict[str, Any], _: object) -> tuple[int, Any]:
        if [r for r in self.running if not (self.paused and r.context is None)]:
            raise _Death("release_memory_occupation should be called only when server is idle.")
        self.released |= set(body["tags"])
        if "weights" in body["tags"]:
            self._reset(())
        return 200, None

    def _resume_memory_occupation(self, body: dict[str, Any], _: object) -> tuple[int, Any]:
        if not set(body["tags"]) <= self.released:
            raise _Death("KeyError")
        self.released -= set(body["tags"])
        return 200, None

    def _reset(self, skips: tuple[str, ...]) -> None:
        for weights in self.ranks:
            for name, tensor in weights.items():
                if not any(skip in name for skip in skips):
                    tensor.copy_(torch.randn(tensor.shape))

    def _weights_checker(self, body: dict[str, Any], _: object) -> tuple[int, Any]:
        skips = tuple(body.get("skip_tensor_list") or ())
        if body.get("action", "checksum") == "reset_tensors":
            self._reset(skips)
            return 200, {"success": True, "message": "Success."}
        ranks = [
            {
                "checksums": {n: _sha(t) for n, t in weights.items() if not any(s in n for s in skips)},
                "parallelism_info": [{"role": "target", "tp_rank": rank}],
            }
            for rank, weights in enumerate(self.ranks)
        ]
        return 200, {"success": True, "message": "Success.", "ranks": ranks}

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        request = _Request(body["input_ids"], body["sampling_params"]["max_new_tokens"])
        with self.lock:
            while self.paused and not self.dead:
                self.lock.wait(0.05)
            self.running.append(request)
        try:
            while len(request.ids) < request.tokens and not request.aborted and not self.dead:
                time.sleep(TOKEN_S)
                with self.lock:
                    if not (self.paused and self.retracting):
                        self._step(request)
        finally:
            with self.lock:
                self.running.remove(request)
                self.lock.notify_all()
        return 200, {
            "output_ids": request.ids,
            "meta_info": {
                "output_token_logprobs": [[p, i, None] for p, i in zip(request.logprobs, request.ids, strict=True)],
                "finish_reason": {"type": "abort" if request.aborted else "length"},
                "weight_version": self.version, "weight_versions": request.spans,
                "num_retractions": request.retractions,
            },
        }  # fmt: skip

    def _step(self, request: _Request) -> None:
        now = self.digest()
        if request.context is None:
            request.context = self.cache.setdefault(tuple(request.prompt), now)
        seed = f"{now}{request.context}{request.prompt}{len(request.ids)}"
        number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:6], "big")
        request.ids.append(number % 500)
        request.logprobs.append(-(number % 9973) / 1000)
        if not request.spans or request.spans[-1]["version"] != self.version:
            request.spans.append({"version": self.version, "start": len(request.ids) - 1, "end": len(request.ids)})
        request.spans[-1]["end"] = len(request.ids)


def digest_of(ranks: list[dict[str, torch.Tensor]]) -> str:
    whole = hashlib.sha256()
    for weights in ranks:
        for name in sorted(weights):
            whole.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def _sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


class _Handler(BaseHTTPRequestHandler):
    server_state: SglangDouble
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        state, path = self.server_state, urlparse(self.path).path
        if state.dead:
            self.close_connection = True
            return
        bodies: dict[str, Any] = {
            "/server_info": state.info_body, "/ping": None, "/health": None,
            "/model_info": {
                "model_path": str(state.model), "weight_version": state.version, "architectures": ["LlamaForCausalLM"],
            },
            "/ready": None,
        }  # fmt: skip
        if path not in bodies:
            self._answer(404, {"detail": "Not Found"})
        else:
            self._answer(503 if path == "/ready" and state.paused else 200, bodies[path])

    def do_POST(self) -> None:
        state, url = self.server_state, urlparse(self.path)
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if state.api_key and self.headers.get("Authorization") != f"Bearer {state.api_key}":
            self._answer(401, {"error": "Unauthorized"})
            return
        if not raw and url.path not in ("/weights_checker", "/flush_cache"):
            self._answer(400, {"object": "error", "message": "body: Field required"})
            return
        body = json.loads(raw or b"{}")
        state.calls.append(url.path)
        state.bodies.append(body)
        if state.on_call is not None:
            state.on_call(url.path)
        if state.dead:
            self.close_connection = True
            return
        time.sleep(state.delay.get(url.path, 0))
        if refusal := state.refuse.pop(url.path, None):
            self._answer(*refusal)
            return
        try:
            status, reply = state.carry_out(url.path, body, parse_qs(url.query))
        except _Death:
            threading.Thread(target=state.kill).start()
            state.wait_dead(5)
            self.close_connection = True
            return
        if state.dead or url.path in state.drop:
            state.drop.discard(url.path)
            self.close_connection = True
            return
        self._answer(status, reply)

    def _answer(self, status: int, body: Any) -> None:
        text = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        try:
            self.wfile.write(text)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
