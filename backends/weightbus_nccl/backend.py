"""The collective backend: options, probe and fingerprint. `torch.distributed` is imported by its endpoints only."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from weightbus.backend import Backend, Capabilities, Endpoint, EndpointSpec, Probe
from weightbus.errors import BackendUnavailable, ConfigError

#: Variables that change how NCCL's members speak with each other: members that differ hang or fail without a reason.
DECISIVE = (
    "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_COLLNET_ENABLE", "NCCL_CROSS_NIC", "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE", "NCCL_IB_DISABLE", "NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS", "NCCL_MNNVL_ENABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_NTHREADS", "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_PXN_DISABLE", "NCCL_RUNTIME_CONNECT",
    "NCCL_SHM_DISABLE", "TORCH_NCCL_USE_COMM_NONBLOCKING", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
)  # fmt: skip


def nccl_version() -> str:
    """Version of the NCCL that torch runs with, or ``"absent"``."""
    try:
        nccl: Any = torch.cuda.nccl
        return ".".join(str(part) for part in nccl.version())
    except Exception:
        # A CPU build of torch has no such binding; what it raises differs between releases.
        return "absent"


def settings(device_type: str) -> dict[str, str]:
    """What members of one group must have in common; variables that are not set are left out."""
    release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    if device_type == "cpu":
        return {"torch": release, "collectives": "gloo"}
    found = {name: os.environ[name] for name in DECISIVE if name in os.environ}
    return {"torch": release, "collectives": "nccl", "nccl": nccl_version(), **found}


class NcclBackend(Backend):
    """Broadcast over process groups of its own: the user's process groups are neither needed nor touched.

    Args:
        timeout: seconds that one broadcast may take where core does not say (`GroupChannel.operation_timeout_s`).

    Not promised: that a broadcast can be interrupted on CPU. Gloo ends it by its timeout, so a member that is stopped
    (not killed) delays the others for that long. Bytes on the wire are not encrypted.

    Raises:
        ConfigError: unknown options, or a timeout that is not a positive number.
    """

    name: ClassVar[str] = "nccl"

    def __init__(self, **options: Any) -> None:
        faults = [f"unknown option {key!r} (known: timeout)" for key in options if key != "timeout"]
        timeout = options.get("timeout", 30.0)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            faults.append(f"timeout must be a positive number of seconds, not {timeout!r}")
        if faults:
            raise ConfigError(f"Backend nccl: {'; '.join(faults)}.", advice="Correct backend_options.")
        self.timeout_s = float(timeout)
        self.capabilities = Capabilities(
            devices=frozenset({"cpu", "cuda"}), multicast=True, header_with_bytes=False, in_process_pair=True
        )

    def probe(self) -> Probe:
        """Whether torch has collectives here, and which."""
        import torch.distributed as dist

        if not dist.is_available():
            return Probe(ok=False, reason="This torch has no torch.distributed.", advice="Install torch from PyPI.")
        count = torch.cuda.device_count()
        gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
        facts = {
            "torch": torch.__version__,
            "gloo": "yes" if gloo else "no",
            "nccl": nccl_version(),
            "gpus": f"{count}",
        }
        warnings = []
        if count and not nccl:
            warnings.append("There are GPUs, but this torch has no NCCL: use device='cpu', or install a CUDA torch.")
        if count == 1:
            warnings.append("One GPU: NCCL refuses two ranks on it. Use backend='local' between processes of this GPU.")
        if not gloo and not nccl:
            return Probe(ok=False, reason="Neither Gloo nor NCCL is built in.", advice="Install torch.", facts=facts)
        return Probe(ok=True, facts=facts, warnings=tuple(warnings))

    def endpoint(self, spec: EndpointSpec) -> Endpoint:
        """A new endpoint; a sender's hosts the rendezvous store on a free port of ``spec.host``, or of loopback."""
        import torch.distributed as dist

        kind = spec.device.type
        if kind not in self.capabilities.devices:
            raise BackendUnavailable(f"Backend nccl moves cpu and cuda memory, not {kind}.", advice="Choose device.")
        if not dist.is_available() or not (dist.is_gloo_available() if kind == "cpu" else dist.is_nccl_available()):
            what = f"This torch ({torch.__version__}) has no {'Gloo' if kind == 'cpu' else 'NCCL'}."
            raise BackendUnavailable(what, advice="Install torch from PyPI, on GPU hosts with CUDA.")
        from weightbus_nccl.endpoint import GroupEndpoint

        return GroupEndpoint(spec, self.timeout_s)

    def fingerprint(self) -> dict[str, str]:
        """torch's release, NCCL's version, and every decisive variable that is set."""
        return settings("cuda" if torch.cuda.is_available() else "cpu")
