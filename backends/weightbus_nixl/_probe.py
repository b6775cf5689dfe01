"""What `weightbus doctor` shows of NIXL, and what it warns of."""

from __future__ import annotations

import os
import resource
import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from weightbus.backend import Probe
from weightbus.errors import WeightBusError
from weightbus_nixl._library import AgentOptions, cuda_major, has_gpu, make_agent, tls_fault, ucx_tls, version

_INFINIBAND = Path("/sys/class/infiniband")


def probe(options: AgentOptions) -> Probe:
    """Start an agent and register 4 KiB; on CUDA too where this process uses it already. Never raises."""
    facts = {"wheel": f"nixl-cu{cuda_major()}", "plugin": options.plugin, "plugin_params": str(options.params())}
    facts |= {"UCX_TLS": ucx_tls(options) or "default", "devices": ",".join(options.devices) or devices() or "no RDMA"}
    warnings: tuple[str, ...] = ()
    try:
        _try(options, facts)
        warnings = tuple(text for check in _CHECKS if (text := check()))
    except WeightBusError as exc:
        advice = exc.advice or ""
        if fault := tls_fault(options):
            advice = fault
        return Probe(ok=False, reason=exc.what, advice=advice, facts=facts, warnings=warnings)
    except Exception as exc:
        return Probe(ok=False, reason=f"NIXL failed: {type(exc).__name__}: {exc}", facts=facts, warnings=warnings)
    return Probe(ok=True, facts=facts, warnings=warnings)


def _try(options: AgentOptions, facts: dict[str, str]) -> None:
    agent = make_agent(f"weightbus-probe-{uuid.uuid4().hex}", options)
    facts["version"] = version()
    facts["plugins"] = ", ".join(agent.get_plugin_list())
    tensors = [torch.zeros(4096, dtype=torch.uint8)]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors.append(torch.zeros(4096, dtype=torch.uint8, device="cuda"))
    for tensor in tensors:
        agent.deregister_memory(agent.register_memory(tensor))
        facts[f"registers {tensor.device.type} memory"] = "yes"


def devices() -> str:
    """RDMA devices of this host."""
    return ", ".join(sorted(path.name for path in _INFINIBAND.iterdir())) if _INFINIBAND.is_dir() else ""


def two_libucs(maps: str | None = None) -> str:
    """A warning when this process has loaded UCX twice."""
    text = Path("/proc/self/maps").read_text() if maps is None else maps
    mapped = {line.split(maxsplit=5)[-1] for line in text.splitlines()}
    paths = {path for path in mapped if path.rpartition("/")[2].startswith(("libucs.", "libucs-"))}
    if len(paths) < 2:
        return ""
    listed = ", ".join(sorted(paths))
    return f"Two copies of UCX are loaded ({listed}): hangs were seen; use one UCX library per process."


def locked_memory() -> str:
    """A warning when RDMA registration will hit the limit of locked memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or not devices():
        return ""
    return f"Locked memory is limited to {soft} bytes and RDMA pins buckets: set `ulimit -l unlimited`."


def expandable_segments() -> str:
    """A warning when torch's own CUDA memory has no IPC handles."""
    setting = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + "," + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:true" not in setting.lower().replace(" ", ""):
        return ""
    return (
        "expandable_segments is on: buckets are allocated apart and not concerned, but torch's own tensors cannot be "
        "registered, so direct mode needs it off."
    )


def hidden_gpus() -> str:
    """A warning when Ray has hidden the GPUs from this process."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset") not in ("", "-1") or not has_gpu():
        return ""
    return (
        "CUDA_VISIBLE_DEVICES is empty: Ray does this to actors without GPUs; give the actor num_gpus, or set "
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 to leave the variable alone."
    )


_CHECKS: tuple[Callable[[], str], ...] = (two_libucs, locked_memory, expandable_segments, hidden_gpus)
