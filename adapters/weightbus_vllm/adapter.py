"""What ``adapter="vllm"`` names: the driver of one engine, and the way to make its workers join a bus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightbus.adapter import Adapter, EngineDriver, EngineLoader
from weightbus.deadline import Deadline
from weightbus.errors import ConfigError
from weightbus_vllm.client import Client, call_workers, check_engine, connect
from weightbus_vllm.driver import Pause, VllmDriver

JOIN_TIMEOUT_S = 60.0


class VllmAdapter(Adapter):
    """The driver side of a vLLM engine; its workers are receivers of their own, see `join`.

    Args:
        url: the server, such as ``"http://10.0.0.2:8000"``; or
        llm: an ``LLM``, an ``AsyncLLM``, a Ray handle of one, or a callable ``(method, **arguments)``.
        loop: the running event loop of an ``AsyncLLM``.
        api_key: the server's bearer key; None: ``VLLM_API_KEY``.
        rpc: the engine was started with the worker extension instead of the weight-transfer engine.
        pause: what requests in flight do: abort, wait or keep.
        keep_kv: with ``pause="keep"``: go on with the old KV instead of computing it again.
        join: fields of `JoinInfo`; given, the workers are made to join the bus now, as `join` does.

    Raises:
        ConfigError: options that contradict each other.
        EngineError: the workers could not be made to join.
    """

    name = "vllm"

    def __init__(
        self,
        *,
        url: str | None = None,
        llm: Any = None,
        loop: Any = None,
        api_key: str | None = None,
        rpc: bool = False,
        pause: str = "abort",
        keep_kv: bool = False,
        join: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            self._pause = Pause(mode=pause, keep_kv=keep_kv)
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        self._client = connect(url=url, llm=llm, loop=loop, api_key=api_key, rpc=rpc)
        if join is not None:
            _join(self._client, dict(join), Deadline.after(JOIN_TIMEOUT_S))

    def driver(self) -> EngineDriver:
        return VllmDriver(self._client, self._pause)

    def loader(self, ranks: Sequence[int], device: torch.device | None) -> EngineLoader:
        raise ConfigError(
            "a vLLM engine's ranks live in its workers",
            advice="call weightbus_vllm.join, and use WeightBus.driver here",
        )

    @property
    def world_size(self) -> int | None:
        """Ranks of the engine: TP x PP x DP, what it adds to ``receivers=``; None where it cannot be asked."""
        found = self._client.call("world_size", Deadline.after(JOIN_TIMEOUT_S))
        return None if found is None else int(found)


def join(
    address: str,
    engine: str,
    *,
    url: str | None = None,
    llm: Any = None,
    loop: Any = None,
    api_key: str | None = None,
    rpc: bool = False,
    timeout: float = JOIN_TIMEOUT_S,
    **info: Any,
) -> None:
    """Make every worker of a vLLM engine a receiver rank of the bus at `address`.

    Args:
        address: the sender's control address.
        engine: the engine's name on the bus, the same as its driver's.
        info: further fields of `JoinInfo`: backend, backend_options, token, options, optional, cast.
        timeout: seconds.

    Raises:
        EngineError: the engine refused, or its vLLM is not supported.
    """
    client = connect(url=url, llm=llm, loop=loop, api_key=api_key, rpc=rpc)
    try:
        _join(client, {"address": address, "engine": engine, **info}, Deadline.after(timeout))
    finally:
        client.close()


def _join(client: Client, info: dict[str, Any], deadline: Deadline) -> None:
    check_engine(client, deadline)
    call_workers(client, "init", deadline, init_info=info)
