"""Loading NIXL, making agents, and its codes in our words. Imports the wire library only when asked."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import torch

from weightbus.errors import BackendUnavailable, ConnectError, PeerLost, TransportError, WeightBusError

logger = logging.getLogger(__name__)

# Settings of our agents alone. A connection attempt that blocks would hold the bus for minutes when a host is cut off;
# without get-zcopy READ between processes on a GPU without NVLink is a thousand times slower than it could be.
_UCX = ("TCP_CONN_NB=y", "CUDA_IPC_ENABLE_GET_ZCOPY=y")
_NETWORK = re.compile(r"(all|tcp|ib|srd|(rc|ud|dc|gga)(_\w+)?)(:.*)?")

_NOT_FOUND = (
    "NIXL has one code for three causes: a range that leaves its registered memory, memory that was not registered "
    "when the metadata was exchanged, or a peer that is not known (any more); connect anew, export anew."
)
_CODES: dict[str, tuple[type[TransportError], str]] = {
    "nixlNotFoundError": (TransportError, _NOT_FOUND),
    "nixlInvalidParamError": (TransportError, "both sides must name equally many ranges of equal lengths."),
    "nixlRemoteDisconnectError": (PeerLost, "the peer's process ended or its link broke: see the peer's log."),
    "nixlNotAllowedError": (ConnectError, "an older agent of that name is still known here; make a new endpoint."),
    "nixlBackendError": (TransportError, "UCX failed: set UCX_LOG_LEVEL=info to see which transport, and why."),
}


class translated:
    """Turn what NIXL raises into ours, keeping the cause.

    The cause loses its traceback: its frames hold a handle, the handle holds the agent, and an agent that is held by an
    error somebody keeps cannot be ended, which is the fence against late writes.
    """

    def __init__(self, doing: str, peer: str | None = None) -> None:
        self._doing, self._peer = doing, peer

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        del trace
        if isinstance(exc, Exception) and not isinstance(exc, WeightBusError):
            ours, advice = _CODES.get(type(exc).__name__, (TransportError, ""))
            what = f"{self._doing} failed: {type(exc).__name__}: {exc}."
            raise ours(what, peer=self._peer, advice=advice or None) from exc.with_traceback(None)


def cuda_major() -> str:
    """Which wheel of NIXL fits: the CUDA major of torch, 12 where torch has no CUDA."""
    return (torch.version.cuda or "12").partition(".")[0]


def load() -> ModuleType:
    """The module ``nixl_cu{major}``.

    Raises:
        BackendUnavailable: it is missing, is for another CUDA, or does not load; says what to install.
    """
    name = f"nixl_cu{cuda_major()}"
    raises = logging.raiseExceptions
    try:
        module = importlib.import_module(f"{name}._api")
    except ImportError as exc:
        raise BackendUnavailable(
            f"Backend nixl cannot import {name}: {exc}.", advice=_import_advice(name, exc)
        ) from exc
    finally:
        logging.raiseExceptions = raises  # the import turns it off for the whole process
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # at INFO it prints to stdout for each agent
    return module


def _import_advice(name: str, exc: ImportError) -> str:
    install = f"pip install 'weightbus[nixl]', or {name.replace('_', '-')} alone."
    if "libssl" in str(exc) or "libcrypto" in str(exc):
        return "NIXL needs OpenSSL 3 (libssl.so.3, libcrypto.so.3): install libssl3 (Debian) or openssl-libs (RHEL)."
    if isinstance(exc, ModuleNotFoundError) and exc.name == name:
        others = [f"nixl_cu{major}" for major in ("12", "13") if importlib.util.find_spec(f"nixl_cu{major}")]
        if others:
            cuda = torch.version.cuda or "no CUDA"
            return f"{', '.join(others)} is installed, but torch is built for {cuda} and needs {name}: {install}"
        return install
    return (
        f"{name} is there but does not load: a shared library that it needs is missing or too old; reinstall: {install}"
    )


def has_gpu() -> bool:
    """Whether this host shows an NVIDIA driver; asks no CUDA."""
    return Path("/dev/nvidiactl").exists()


def version() -> str:
    try:
        return importlib.metadata.version(f"nixl-cu{cuda_major()}")
    except importlib.metadata.PackageNotFoundError:
        return "missing"


@attrs.frozen(kw_only=True)
class AgentOptions:
    """How agents are made.

    Attributes:
        plugin: NIXL's own backend: UCX, LIBFABRIC, ...
        plugin_params: its init parameters, text to text, passed on as they are.
        devices: network devices for UCX, such as ``("mlx5_0:1",)``; empty lets UCX choose.
        threads: NIXL's worker threads for one agent; 0 for none.
        progress_thread: let NIXL spin a thread for each agent; off, as core polls.
    """

    plugin: str = "UCX"
    plugin_params: Mapping[str, str] = attrs.field(factory=dict)
    devices: tuple[str, ...] = ()
    threads: int = 0
    progress_thread: bool = False

    def params(self) -> dict[str, str]:
        """The init parameters of the plugin."""
        params: dict[str, str] = {}
        if self.plugin == "UCX":
            params["ucx_error_handling_mode"] = "peer"
            if self.devices:
                params["ucx_devices"] = ",".join(self.devices)
        if self.threads:
            params["num_threads"] = str(self.threads)
        params |= self.plugin_params
        if self.plugin == "UCX":  # NIXL lets the user's UCX_ variables win over these
            params["engine_config"] = ",".join(filter(None, [*_UCX, params.get("engine_config")]))
        return params


def make_agent(name: str, options: AgentOptions) -> Any:
    """A new agent with the plugin running.

    Raises:
        BackendUnavailable: NIXL or the plugin does not start, tried twice; says what to set.
    """
    api = load()
    try:
        return _start(api, name, options)
    except Exception as first:
        logger.warning("NIXL's plugin %s did not start (%s); trying once more", options.plugin, first)
        try:
            agent = _start(api, name, options)
        except Exception as exc:
            what = f"NIXL's plugin {options.plugin} did not start, twice: {type(exc).__name__}: {exc}."
            raise BackendUnavailable(what, advice=_start_advice(options)) from exc
        logger.warning("NIXL's plugin %s started at the second attempt", options.plugin)
        return agent


def _start(api: ModuleType, name: str, options: AgentOptions) -> Any:
    config = api.nixl_agent_config(
        enable_prog_thread=options.progress_thread,
        backends=[],
        sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    agent = api.nixl_agent(name, config)
    plugins = agent.get_plugin_list()
    if options.plugin not in plugins:
        raise LookupError(f"NIXL has no plugin {options.plugin}; it has {', '.join(plugins)}")
    agent.create_backend(options.plugin, options.params())
    return agent


def ucx_tls(options: AgentOptions) -> str:
    """The transports that UCX was told to use; empty for its own choice."""
    tls = os.environ.get("UCX_TLS", "")
    for pair in options.plugin_params.get("engine_config", "").split(","):
        if pair.startswith("TLS=") and not tls:  # the environment wins, as in NIXL
            tls = pair.removeprefix("TLS=")
    return tls


def tls_fault(options: AgentOptions) -> str:
    """What is wrong with the transports that UCX was told to use, and what to set; empty if nothing."""
    tls = ucx_tls(options)
    names = tls.lstrip("^").split(",")
    if not tls or options.plugin != "UCX":
        return ""
    if not tls.startswith("^") and not any(_NETWORK.fullmatch(name) for name in names):
        return f"UCX_TLS={tls} has no network-capable transport, which NIXL needs even on one node: add tcp."
    cuda = any(name in ("all", "cuda", "cuda_copy") for name in names) != tls.startswith("^")
    if has_gpu() and not cuda:
        return f"UCX_TLS={tls} leaves out CUDA memory although a GPU is here: add cuda_copy,cuda_ipc."
    return ""


def _start_advice(options: AgentOptions) -> str:
    return tls_fault(options) or (
        "set UCX_LOG_LEVEL=info NIXL_LOG_LEVEL=DEBUG to see why; check UCX_TLS, UCX_NET_DEVICES, "
        f"the locked-memory limit (`ulimit -l`) and the parameters {options.params()}."
    )
