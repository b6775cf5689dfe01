"""Backend `nixl`: NVIDIA NIXL writes buckets into the receiver's slots over RDMA, NVLink, shared memory or TCP.

NIXL is imported when an endpoint or a probe needs it, as ``nixl_cu{major}`` of the CUDA that torch is built for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from weightbus.backend import Backend, Capabilities, Endpoint, EndpointSpec, Probe
from weightbus.errors import ConfigError
from weightbus_nixl._library import AgentOptions

__all__ = ["NixlBackend"]

_OPTIONS = "plugin, plugin_params, devices, threads, progress_thread"


class NixlBackend(Backend):
    """Moves buckets with NIXL.

    Args:
        plugin: NIXL's own backend: UCX (default), LIBFABRIC, ...
        plugin_params: its init parameters, text to text, passed on untouched. For UCX ``{"engine_config": "TLS=tcp"}``
            sets UCX for these agents only; NIXL cuts it at commas, so that a list of transports needs UCX_TLS.
        devices: network devices for UCX, such as ``["mlx5_0:1"]``; None lets UCX choose.
        threads: NIXL's worker threads of each agent; 0 for none.
        progress_thread: let NIXL spin a thread for each agent. Off: core polls, and a spinning thread takes a core.

    The address of `EndpointSpec.host` is not used: UCX publishes all its devices; choose with `devices`.

    Raises:
        ConfigError: unknown or wrong options, all of them.
    """

    name: ClassVar[str] = "nixl"

    def __init__(
        self,
        *,
        plugin: str = "UCX",
        plugin_params: Mapping[str, str] | None = None,
        devices: Sequence[str] | None = None,
        threads: int = 0,
        progress_thread: bool = False,
        **unknown: Any,
    ) -> None:
        params = dict(plugin_params or {})
        faults = [f"{name} is not an option" for name in sorted(unknown)]
        if not plugin or not isinstance(plugin, str):
            faults.append(f"plugin is a name, not {plugin!r}")
        faults += [f"plugin_params[{k!r}] is text, not {v!r}" for k, v in params.items() if not isinstance(v, str)]
        if isinstance(devices, str) or not all(isinstance(device, str) for device in devices or ()):
            faults.append(f"devices is a list of names, not {devices!r}")
        if type(threads) is not int or threads < 0:
            faults.append(f"threads is a number from 0, not {threads!r}")
        if faults:
            raise ConfigError(f"Backend nixl: {'; '.join(faults)}. It has: {_OPTIONS}.")
        self._options = AgentOptions(
            plugin=plugin, plugin_params=params, devices=tuple(devices or ()), threads=threads,
            progress_thread=bool(progress_thread),
        )  # fmt: skip
        self.capabilities = Capabilities(
            devices=frozenset({"cpu", "cuda"}), pull=True, forward=True, in_process_pair=True
        )

    def probe(self) -> Probe:
        from weightbus_nixl._probe import probe

        return probe(self._options)

    def endpoint(self, spec: EndpointSpec) -> Endpoint:
        from weightbus_nixl._endpoint import NixlEndpoint

        return NixlEndpoint(spec, self._options)

    def fingerprint(self) -> dict[str, str]:
        from weightbus_nixl._library import version

        return {"nixl.version": version(), "nixl.plugin": self._options.plugin}
