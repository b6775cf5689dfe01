"""A server that behaves, and refuses, as vLLM's does: for fast tests of the driver, without vLLM.

It keeps vLLM's rules: development routes only, one update at a time, update and finish only after start, a failed
update closes the session on the ranks that failed, a false success inside a 200, replies left unread by an executor
that stops at the first failure.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit


class WorkerError(Exception):
    """What a worker raised."""


class Double:
    """The state behind the server; tests set its attributes and read `calls`.

    Attributes:
        version: what ``GET /version`` says.
        ranks: workers of the engine.
        calls: (path, arguments) in order.
        paused: whether it is.
        active: per rank, whether an update session is open.
        weight_version: label of the weights.
        dev_mode: False: the routes for updates are not there.
        cache_resets: False: the prefix cache refuses to be reset.
        update_s: how long `update_weights` takes.
        failing: method to the ranks on which it raises.
        dead: the engine behind the server is gone.
        before_loaded: paths of the calls that came before `update_weights` had ended.
    """

    def __init__(self, ranks: int = 1, version: str = "0.32.0") -> None:
        self.version, self.ranks = version, ranks
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.paused, self.weight_version = False, "default"
        self.active = [False] * ranks
        self.dev_mode, self.cache_resets, self.dead = True, True, False
        self.update_s = 0.0
        self.before_loaded: list[str] = []
        self.failing: dict[str, set[int]] = {}
        self._unread: list[deque[str | None]] = [deque() for _ in range(ranks)]
        self._lock = threading.Lock()
        self._rpc = threading.Lock()

    @property
    def paths(self) -> list[str]:
        """Paths of the calls, without questions."""
        return [path for path, _ in self.calls if path not in ("/version", "/health", "/get_world_size")]

    def rpc(self, method: str) -> None:
        """One call of all workers; the reply that is read first and is a failure ends the reading."""
        with self._rpc:
            for rank in range(self.ranks):
                self._unread[rank].append(self._work(method, rank))
            if self.dead:
                raise WorkerError("EngineCore encountered an issue")
            for replies in self._unread:
                failure = replies.popleft()
                if failure is not None:
                    raise WorkerError(f"Call to collective_rpc method failed: Worker failed with error '{failure}'")

    def _work(self, method: str, rank: int) -> str | None:
        if rank in self.failing.get(method, ()):
            if method == "update_weights":
                self.active[rank] = False
            return f"{method} failed on rank {rank}"
        if method == "start_weight_update":
            if self.active[rank]:
                return "start_weight_update called while a weight update is already active."
            self.active[rank] = True
        elif method == "update_weights":
            if not self.active[rank]:
                return "start_weight_update must be called before update_weights."
            time.sleep(self.update_s if rank == 0 else 0)
        elif method == "finish_weight_update":
            if not self.active[rank]:
                return "finish_weight_update called without a matching start_weight_update."
            self.active[rank] = False
        return None


class DoubleServer:
    """`Double` behind a port of its own; a context manager."""

    def __init__(self, double: Double) -> None:
        self.double = double
        handler = type("Handler", (_Handler,), {"double": double})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> DoubleServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Handler(BaseHTTPRequestHandler):
    double: ClassVar[Double]
    always: ClassVar = {"/version", "/health"}

    def log_message(self, format: str, *args: Any) -> None:
        return None

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        url = urlsplit(self.path)
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            body = json.loads(raw) if raw else {}
        except ValueError:
            self._send(400, {"error": {"message": "bad JSON"}})
            return
        arguments = {**dict(parse_qsl(url.query)), **body}
        route = getattr(self, f"{method.lower()}_{url.path.strip('/')}", None)
        if route is None or (url.path not in self.always and not self.double.dev_mode):
            self._send(404, {"detail": "Not Found"})
            return
        self.double.calls.append((url.path, arguments))
        try:
            self._send(200, route(arguments))
        except WorkerError as exc:
            self._send(500, {"error": {"message": str(exc), "type": "InternalServerError", "code": 500}})

    def _send(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except BrokenPipeError:  # the client gave up
            pass

    def get_version(self, _: dict[str, Any]) -> object:
        return {"version": self.double.version}

    def get_health(self, _: dict[str, Any]) -> object:
        if self.double.dead:
            raise WorkerError("dead")
        return {}

    def get_get_world_size(self, _: dict[str, Any]) -> object:
        return {"world_size": self.double.ranks}

    def get_weight_info(self, _: dict[str, Any]) -> object:
        return {"weight_version": self.double.weight_version}

    def post_pause(self, arguments: dict[str, Any]) -> object:
        self.double.paused = True
        return {"status": "paused"}

    def post_resume(self, _: dict[str, Any]) -> object:
        self.double.paused = False
        return {"status": "resumed"}

    def post_init_weight_transfer_engine(self, arguments: dict[str, Any]) -> object:
        self.double.rpc("init_weight_transfer_engine")
        return {"message": "Weight transfer initialized"}

    def post_start_weight_update(self, _: dict[str, Any]) -> object:
        self.double.rpc("start_weight_update")
        return {"message": "Weight update started"}

    def post_update_weights(self, arguments: dict[str, Any]) -> object:
        if "update_info" not in arguments:
            raise WorkerError("Field required")
        self.double.rpc("update_weights")
        self.double.before_loaded = self.double.paths
        return {"message": "Weights updated"}

    def post_finish_weight_update(self, arguments: dict[str, Any]) -> object:
        self.double.rpc("finish_weight_update")
        self.double.weight_version = arguments.get("weight_version", self.double.weight_version)
        return {"message": "Weight update finished"}

    def post_update_weight_version(self, arguments: dict[str, Any]) -> object:
        self.double.weight_version = arguments["new_version"]
        return {"success": True}

    def post_collective_rpc(self, arguments: dict[str, Any]) -> object:
        self.double.rpc(arguments["method"])
        return {"results": [None] * self.double.ranks}

    def post_reset_prefix_cache(self, _: dict[str, Any]) -> object:
        return {"success": self.double.cache_resets}
