"""The backend: its options, and whether it can run here."""

from __future__ import annotations

import os
import resource
from typing import Any, ClassVar

import attrs

from weightbus.backend import Backend, Capabilities, Endpoint, EndpointSpec, Probe
from weightbus.errors import BackendUnavailable, ConfigError, WeightBusError
from weightbus_ucx.endpoint import Options, UcxEndpoint
from weightbus_ucx.library import install_advice, installed, load, loaded_libucs, rdma_devices, settings_for, torch_cuda

_PROGRESS = ("event", "poll")


class UcxBackend(Backend):
    """Buckets as tagged messages of UCX, by ``ucxx``.

    Args:
        tls: UCX's list of transports, such as ``"tcp,self"``; by default ``UCX_TLS``, else UCX's choice.
        progress: ``"event"`` (default) or ``"poll"``.
        config: further UCX settings, such as ``{"RNDV_SCHEME": "auto"}``; nothing goes into the environment.
        link_timeout_s: seconds after which a silent host is lost, 10 by default.
    """

    name: ClassVar[str] = "ucx"

    def __init__(self, **options: Any) -> None:
        self.capabilities = Capabilities(devices=frozenset({"cpu", "cuda"}), forward=True, in_process_pair=True)
        self._options = _read_options(options)

    def probe(self) -> Probe:
        found = installed()
        facts = {name: version for name, version in found.items()}
        if len(found) > 1:
            text = f"{' and '.join(found)} are both installed; they are the same import package."
            return Probe(ok=False, reason=text, advice="uninstall all of them, install one.", facts=facts)
        try:
            library = load()
            facts |= self._facts(library)
        except WeightBusError as exc:
            return Probe(ok=False, reason=exc.what, advice=exc.advice or install_advice(), facts=facts)
        except Exception as exc:
            return Probe(ok=False, reason=f"{type(exc).__name__}: {exc}", advice=install_advice(), facts=facts)
        return Probe(ok=True, facts=facts, warnings=tuple(_warnings(found, facts)))

    def _facts(self, library: Any) -> dict[str, str]:
        settings = settings_for(None, cuda=False, tls=self._options.tls, config=self._options.config)
        context = library.api.UCXContext(settings, feature_flags=(library.api.Feature.TAG, library.api.Feature.WAKEUP))
        resources = [line.rsplit(None, 1)[1] for line in context.info.splitlines() if "resource" in line]
        return {
            "ucx": ".".join(map(str, library.api.get_ucx_version())),
            "transports": ", ".join(resources),
            "settings": ", ".join(f"{key}={value}" for key, value in sorted(settings.items())),
            "libucs": ", ".join(loaded_libucs()),
            "rdma": ", ".join(rdma_devices()) or "none",
            "locked memory": _locked_memory(),
        }

    def endpoint(self, spec: EndpointSpec) -> Endpoint:
        if spec.device.type not in self.capabilities.devices:
            raise ConfigError(f"Backend ucx has no device {spec.device}.", advice="use cpu or cuda.")
        return UcxEndpoint(spec, load(), self._options)

    def fingerprint(self) -> dict[str, str]:
        try:
            major, minor, _ = load().api.get_ucx_version()
        except BackendUnavailable:
            return {}
        return {"ucx": f"{major}.{minor}"}


def _read_options(options: dict[str, Any]) -> Options:
    """Raises ConfigError with all that is wrong."""
    known = {field.name for field in attrs.fields(Options)}
    faults = [f"unknown option {name!r}" for name in options if name not in known]
    chosen = Options(**{name: value for name, value in options.items() if name in known})
    if chosen.progress not in _PROGRESS:
        faults.append(f"progress is {chosen.progress!r}, not one of {_PROGRESS}")
    if not isinstance(chosen.config, dict) or not all(
        isinstance(x, str) for pair in chosen.config.items() for x in pair
    ):
        faults.append(f"config is {chosen.config!r}, not a dict of text to text")
    elif any(key.startswith("UCX_") for key in chosen.config):
        faults.append("keys of config come without UCX_")
    if chosen.tls is not None and not isinstance(chosen.tls, str):
        faults.append(f"tls is {chosen.tls!r}, not text")
    if not isinstance(chosen.link_timeout_s, int | float) or chosen.link_timeout_s < 1:
        faults.append(f"link_timeout_s is {chosen.link_timeout_s!r}, not at least 1")
    if faults:
        raise ConfigError(f"Backend ucx: {'; '.join(faults)}.", advice=f"options are {', '.join(sorted(known))}.")
    return chosen


def _locked_memory() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 20} MiB"


def _warnings(found: dict[str, str], facts: dict[str, str]) -> list[str]:
    cuda = torch_cuda()
    told = []
    if cuda and f"ucxx-cu{cuda}" not in found and any(name.startswith("ucxx-cu") for name in found):
        told.append(
            f"torch has CUDA {cuda}, but {next(iter(found))} is installed: install ucxx-cu{cuda} for CUDA memory."
        )
    if len(facts["libucs"].split(", ")) > 1:
        told.append(
            f"Two copies of UCX are loaded ({facts['libucs']}): ucxx with nixl is tested on host memory; with CUDA memory "
            "ucxx has crashed as it closed a lane in use. Use one wire backend per process there."
        )
    network = [name for name in facts["transports"].split(", ") if not name.endswith("/memory")]
    if not network:
        told.append(f"No transport reaches other hosts (UCX_TLS={os.environ.get('UCX_TLS', '')}): add tcp.")
    if facts["rdma"] != "none" and all(name.startswith("tcp/") for name in network):
        told.append(
            f"RDMA devices are here ({facts['rdma']}), but this libucx has only TCP (the wheels have no verbs): "
            "install a UCX with verbs and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true."
        )
    if facts["rdma"] != "none" and facts["locked memory"] != "unlimited":
        told.append(f"Only {facts['locked memory']} may be locked for RDMA: raise ulimit -l.")
    return told
