"""How the driver reaches an engine: a server over HTTP, or an object with vLLM's methods. Never imports vllm.

A client knows one verb, `call(step, deadline, **arguments)`; `HttpClient` and `ObjectClient` differ in what it does.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import attrs

from weightbus.deadline import Deadline
from weightbus.errors import ConfigError, EngineError
from weightbus_vllm.versions import check_version

PROBE_S = 5.0
LATE_REPLIES = 8  #: more failed calls than an engine is likely to see in its life
_DEV_MODE = 'start the server with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "weightbus"}\''


class Client(ABC):
    """The steps of one engine.

    Steps: version, world_size, is_paused, init, pause, start, update, finish, reset, resume, weight_version.
    """

    @abstractmethod
    def call(self, step: str, deadline: Deadline, **arguments: Any) -> Any:
        """Run `step` and wait for its end, at most until `deadline` where that can be kept.

        Raises:
            EngineError: refused, failed, or no answer in time; ``dead`` is set when the engine is known to be gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


@attrs.frozen
class _Route:
    method: str
    path: str
    query: tuple[str, ...] = ()  #: arguments that travel in the query; the others make the JSON body


_ROUTES = {
    "version": _Route("GET", "/version"),
    "world_size": _Route("GET", "/get_world_size"),
    "is_paused": _Route("GET", "/is_paused"),
    "weight_version": _Route("GET", "/weight_info"),
    "init": _Route("POST", "/init_weight_transfer_engine"),
    "pause": _Route("POST", "/pause", ("mode", "clear_cache")),
    "start": _Route("POST", "/start_weight_update"),
    "update": _Route("POST", "/update_weights"),
    "finish": _Route("POST", "/finish_weight_update"),
    "set_version": _Route("POST", "/update_weight_version"),
    "rpc": _Route("POST", "/collective_rpc"),
    "reset": _Route("POST", "/reset_prefix_cache", ("reset_running_requests",)),
    "resume": _Route("POST", "/resume"),
}
_REPLY = {
    "version": "version",
    "world_size": "world_size",
    "is_paused": "is_paused",
    "reset": "success",
    "weight_version": "weight_version",
}


class HttpClient(Client):
    """A vLLM server in development mode.

    Args:
        url: such as ``"http://10.0.0.2:8000"``.
        api_key: bearer key; None: ``VLLM_API_KEY``.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        import httpx

        key = api_key or os.environ.get("VLLM_API_KEY")
        self._url = url.rstrip("/")
        self._httpx = httpx
        self._http = httpx.Client(
            base_url=self._url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    def call(self, step: str, deadline: Deadline, **arguments: Any) -> Any:
        route = _ROUTES[step]
        query = {name: _text(arguments.pop(name)) for name in route.query if name in arguments}
        try:
            reply = self._http.request(
                route.method,
                route.path,
                params=query,
                json=arguments if arguments else None,
                timeout=self._timeout(deadline),
            )
        except self._httpx.TransportError as exc:
            raise self._unanswered(route, exc) from exc
        if reply.status_code != 200:
            raise self._refused(step, route, reply)
        return self._value(step, route, reply)

    def close(self) -> None:
        self._http.close()

    def alive(self) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            return bool(self._http.get("/health", timeout=PROBE_S).status_code == 200)
        except self._httpx.TransportError:
            return False

    def _timeout(self, deadline: Deadline) -> Any:
        left = deadline.remaining_s()
        return self._httpx.Timeout(None if left == float("inf") else max(left, 0.001), connect=min(left, 10.0))

    def _unanswered(self, route: _Route, exc: Exception) -> EngineError:
        if isinstance(exc, (self._httpx.ReadTimeout, self._httpx.WriteTimeout, self._httpx.PoolTimeout)):
            return EngineError(
                f"{self._url}{route.path} did not answer in time",
                advice="raise the timeout, or look at the server's log",
            )
        return EngineError(
            f"{self._url}{route.path}: {type(exc).__name__}: {exc}",
            dead=not self.alive(),
            advice="if the server is gone, start it again; it joins as a new engine",
        )

    def _refused(self, step: str, route: _Route, reply: Any) -> EngineError:
        gone = reply.status_code >= 500 and not self.alive()
        advice = _DEV_MODE if reply.status_code == 404 else None
        return EngineError(
            f"{self._url}{route.path} answered {reply.status_code}: {_message(reply)}",
            dead=gone,
            phase=step,
            advice=advice,
        )

    def _value(self, step: str, route: _Route, reply: Any) -> Any:
        if step not in _REPLY:
            return None
        try:
            return reply.json()[_REPLY[step]]
        except (ValueError, KeyError, TypeError) as exc:
            raise EngineError(f"{self._url}{route.path} answered without {_REPLY[step]!r}: {reply.text[:200]}") from exc


class ObjectClient(Client):
    """An object with vLLM's Python methods: ``LLM``, ``AsyncLLM``, a Ray handle of either, or a callable.

    Args:
        llm: the object, or a callable ``(method, **arguments)`` that runs the method of that name of an ``AsyncLLM``.
        loop: the running event loop of an ``AsyncLLM``; it must not be the thread that calls `call`.

    A blocking method of an ``LLM`` in this process cannot be interrupted: its deadline is not kept.
    """

    def __init__(self, llm: Any, loop: Any = None) -> None:
        self._llm = llm
        self._loop = loop
        self._by_name = callable(llm) and not hasattr(llm, "start_weight_update") and not hasattr(llm, "collective_rpc")
        self._sync = not self._by_name and not hasattr(llm, "pause_generation")  # LLM pauses by sleeping at level 0

    def call(self, step: str, deadline: Deadline, **arguments: Any) -> Any:
        if step in ("version", "world_size"):
            return self._fact(step)
        method, given = self._translate(step, arguments)
        try:
            return self._result(self._invoke(method, given), deadline)
        except EngineError:
            raise
        except TimeoutError as exc:
            raise EngineError(f"{method} did not end in time", phase=step, advice="raise the timeout") from exc
        except Exception as exc:
            name = type(exc).__name__
            dead = name in ("EngineDeadError", "RayActorError", "ActorDiedError", "ActorUnavailableError")
            raise EngineError(f"{method}: {name}: {exc}", dead=dead, phase=step) from exc

    def close(self) -> None:
        return None

    def _translate(self, step: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """vLLM's method and its arguments for `step`."""
        if step == "pause" and self._sync:
            return "sleep", {"level": 0, "mode": arguments["mode"]}
        if step == "resume" and self._sync:
            return "wake_up", {"tags": ["scheduling"]}
        if step == "rpc":
            return "collective_rpc", {"method": arguments["method"], "args": tuple(arguments["args"])}
        if step in ("init", "update"):
            return _METHODS[step], {"request": SimpleNamespace(**arguments)}
        return _METHODS[step], arguments

    def _invoke(self, method: str, arguments: dict[str, Any]) -> Any:
        if self._by_name:
            return self._llm(method, **arguments)
        try:
            function = getattr(self._llm, method)
        except AttributeError as exc:
            raise EngineError(
                f"{type(self._llm).__name__} has no {method}", advice="give an LLM, an AsyncLLM or a handle of one"
            ) from exc
        remote = getattr(function, "remote", None)
        return function(**arguments) if remote is None else remote(**arguments)

    def _result(self, value: Any, deadline: Deadline) -> Any:
        left = deadline.remaining_s()
        timeout = None if left == float("inf") else left
        if inspect.isawaitable(value) and not type(value).__module__.startswith("ray."):
            if self._loop is None:
                if inspect.iscoroutine(value):
                    value.close()
                raise EngineError("the engine's methods are coroutines", advice="pass its event loop: loop=...")
            import asyncio

            future = asyncio.run_coroutine_threadsafe(_await(value), self._loop)
            return future.result(timeout)
        ray = sys.modules.get("ray")
        if ray is not None and isinstance(value, ray.ObjectRef):
            return ray.get(value, timeout=timeout)
        return value

    def _fact(self, step: str) -> Any:
        if step == "version":  # the workers look at theirs too, when they join
            return getattr(sys.modules.get("vllm"), "__version__", None)
        config = getattr(self._llm, "vllm_config", None) or getattr(
            getattr(self._llm, "llm_engine", None), "vllm_config", None
        )
        return None if config is None else config.parallel_config.world_size_across_dp


_METHODS = {
    "is_paused": "is_paused",
    "weight_version": "get_weight_version",
    "init": "init_weight_transfer_engine",
    "pause": "pause_generation",
    "start": "start_weight_update",
    "update": "update_weights",
    "finish": "finish_weight_update",
    "set_version": "update_weight_version",
    "reset": "reset_prefix_cache",
    "resume": "resume_generation",
}


class RpcClient(Client):
    """Another client whose update steps go to the worker extension by ``collective_rpc``."""

    def __init__(self, inner: Client) -> None:
        self._inner = inner

    def call(self, step: str, deadline: Deadline, **arguments: Any) -> Any:
        if step == "init":
            return self._rpc("weightbus_join", deadline, json.dumps(arguments["init_info"]))
        if step == "start":
            return self._rpc("weightbus_start", deadline)
        if step == "update":
            return self._rpc("weightbus_update", deadline, json.dumps(arguments["update_info"]))
        if step == "finish":
            self._rpc("weightbus_finish", deadline)
            label = arguments.get("weight_version")
            return label and self._inner.call("set_version", deadline, new_version=label)
        return self._inner.call(step, deadline, **arguments)

    def close(self) -> None:
        self._inner.close()

    def _rpc(self, method: str, deadline: Deadline, *args: str) -> Any:
        return self._inner.call("rpc", deadline, method=method, args=list(args))


def connect(
    *, url: str | None = None, llm: Any = None, loop: Any = None, api_key: str | None = None, rpc: bool = False
) -> Client:
    """The client for `url` or `llm`, of which exactly one is given.

    Raises:
        ConfigError: both or neither.
    """
    if (url is None) == (llm is None):
        raise ConfigError("give the engine by url= (a server) or by llm= (an object or a callable), not by both")
    client: Client = HttpClient(url, api_key) if url is not None else ObjectClient(llm, loop)
    return RpcClient(client) if rpc else client


def call_workers(client: Client, step: str, deadline: Deadline, **arguments: Any) -> Any:
    """A step that runs in every worker.

    When one raises, vLLM's multiprocess executor leaves the other workers' replies unread (seen on 0.32): from then on
    these workers' replies come some calls late, and a failure among them fails a call that went well. So they are read
    away here, with a call that does nothing.
    """
    try:
        return client.call(step, deadline, **arguments)
    except EngineError as exc:
        if not exc.dead:
            _read_away(client, deadline)
        raise


def _read_away(client: Client, deadline: Deadline) -> None:
    """Until so many calls in a row went well that no failure can be left, as far behind as a worker may be."""
    try:
        behind = int(client.call("world_size", deadline) or 1) - 1
    except EngineError:
        return
    well, needed = 0, 0 if behind == 0 else LATE_REPLIES + behind
    for _ in range(4 * needed):
        if well == needed or deadline.expired:
            return
        try:
            client.call("rpc", deadline, method="check_health", args=[])
            well += 1
        except EngineError as exc:
            if exc.dead:
                return
            well = 0


def check_engine(client: Client, deadline: Deadline) -> None:
    """Refuse an engine whose vLLM is not supported, where its version can be asked for.

    Raises:
        EngineError: not supported, or no answer.
    """
    version = client.call("version", deadline)
    if version is not None:
        check_version(str(version))


async def _await(value: Any) -> Any:
    return await value


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _message(reply: Any) -> str:
    try:
        body = reply.json()
    except ValueError:
        return str(reply.text[:300])
    found = body.get("error", body.get("detail", body)) if isinstance(body, Mapping) else body
    return str(found.get("message", found) if isinstance(found, Mapping) else found)[:600]
