"""What a server says of itself, and the reasons to refuse it. All of them come in one error."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from weightbus.errors import ConfigError

OLDEST = (0, 5, 22)
ONLINE_FP8 = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
#: argument of the server: the one value that works, and why no other does
REQUIRED: dict[str, tuple[Any, str]] = {
    "nnodes": (1, "one node per engine: payloads are handles of this host"),
    "dp_size": (1, "the server takes no weights with data parallelism; run one server per replica"),
    "pp_size": (1, "pipeline stages would read one payload index"),
    "ep_size": (1, "expert weights must not be sharded by expert"),
    "moe_dp_size": (1, "expert weights must not be sharded by replica"),
    "dwdp_size": (1, "expert weights must not be sharded by replica"),
    "tokenizer_worker_num": (1, "a racing pause can strand an update with several tokenizer workers"),
    "weight_cache_mode": ("off", "the server refuses weight updates with a weight cache"),
}


@attrs.frozen(kw_only=True)
class Facts:
    """What does not change while a server lives.

    Attributes:
        version: such as ``"0.5.23"``.
        tp_size: tensor-parallel ranks; a payload for each.
        device: ``"cuda"`` or ``"cpu"``.
        base_gpu_id: physical index of rank 0's GPU; rank r has ``base_gpu_id + r * gpu_id_step``.
        model_path: the checkpoint it was started on.
        cpu_backup: weights survive a release of their memory.
        drafts: it has a draft model.
    """

    version: str
    tp_size: int
    device: str
    base_gpu_id: int
    gpu_id_step: int
    model_path: str
    cpu_backup: bool
    drafts: bool

    def gpu(self, rank: int, visible: str | None) -> int:
        """This process's CUDA index of rank `rank`'s GPU.

        Args:
            visible: this process's CUDA_VISIBLE_DEVICES.

        Raises:
            ConfigError: the GPU is not visible here.
        """
        physical = self.base_gpu_id + rank * self.gpu_id_step
        if not visible:
            return physical
        listed = [item.strip() for item in visible.split(",")]
        if str(physical) in listed:
            return listed.index(str(physical))
        raise ConfigError(
            f"rank {rank} of the server runs on GPU {physical}, which CUDA_VISIBLE_DEVICES={visible} hides here",
            advice="show the server's GPUs to the process that owns it, by index, or give rank_devices",
        )


def read_facts(
    info: Mapping[str, Any],
    model: Mapping[str, Any],
    *,
    selector: str | None = None,
    tp_size: int | None = None,
    scheme: str = "",
    others: Sequence[str] = (),
) -> Facts:
    """Facts from ``/server_info`` and ``/model_info``.

    Args:
        selector: the option, None where it was not given.
        tp_size: what the caller believes, None for nothing.
        scheme: the quantisation of the served checkpoint's files, or empty.
        others: reasons found elsewhere, to be told along.

    Raises:
        ConfigError: naming every reason why this server cannot be fed.
    """
    faults = [*others, *(_required(info, key, *rule) for key, rule in REQUIRED.items())]
    faults += [_version(info), _quantised(info, model, scheme), *_modes(info, selector), _tp_size(info, tp_size)]
    kinds = {"tp_size": int, "device": str, "base_gpu_id": int, "gpu_id_step": int, "enable_weights_cpu_backup": bool}
    faults += [
        f"the server does not say its {key}" for key, kind in kinds.items() if not isinstance(info.get(key), kind)
    ]
    if not isinstance(model.get("model_path"), str):
        faults.append("the server does not say its model_path")
    found = [fault for fault in faults if fault]
    if found:
        raise ConfigError("this SGLang server cannot be refitted: " + "; ".join(found))
    return Facts(
        version=info["version"], tp_size=info["tp_size"], device=info["device"], base_gpu_id=info["base_gpu_id"],
        gpu_id_step=info["gpu_id_step"], model_path=model["model_path"], cpu_backup=info["enable_weights_cpu_backup"],
        drafts=info["speculative_algorithm"] is not None,
    )  # fmt: skip


def birth_of(info: Mapping[str, Any]) -> str:
    """Tells one process of a server from its successor: how long its start took, to the microsecond, and its seed."""
    return f"{info.get('startup_time')}/{info.get('random_seed')}"


def _required(info: Mapping[str, Any], key: str, wanted: object, why: str) -> str:
    if key not in info:
        return f"the server does not say its {key}"
    return "" if info[key] == wanted else f"{key} is {info[key]!r}, must be {wanted!r} ({why})"


def _version(info: Mapping[str, Any]) -> str:
    text = info.get("version")
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text) if isinstance(text, str) else None
    if match is None:
        return f"its version {text!r} is not one"
    number = tuple(map(int, match.groups()))
    if number[:2] == OLDEST[:2] and number >= OLDEST:
        return ""
    return f"version {text} is not supported, only 0.5.22 and newer of the 0.5 line (others refit in other steps)"


def _quantised(info: Mapping[str, Any], model: Mapping[str, Any], scheme: str) -> str:
    if "quantization" not in info or "load_format" not in info:
        return "the server does not say its quantization and load_format"
    loaded, load_format = info["quantization"], info["load_format"]
    if (loaded or "", scheme) in (("", ""), ("fp8", "fp8"), ("", "fp8")):
        return ""
    online = loaded == "fp8" and not scheme and load_format == "flash_rl"
    if online and set(model.get("architectures") or ()) <= set(ONLINE_FP8):
        return ""
    return (
        f"quantization {loaded!r} with load_format {load_format!r} on a checkpoint of scheme {scheme!r} "
        "cannot be loaded again by the server (unquantised and fp8 checkpoints can)"
    )


def _modes(info: Mapping[str, Any], selector: str | None) -> list[str]:
    faults = []
    if "disaggregation_mode" not in info or "speculative_algorithm" not in info:
        faults.append("the server does not say its disaggregation_mode and speculative_algorithm")
    if info.get("disaggregation_mode") == "prefill":
        faults.append("a prefill-only server does not retract requests, so it would go on with old keys and values")
    if info.get("speculative_algorithm") is not None and selector is None:
        faults.append("it has a draft model: say by the option selector whether to load target, draft or all")
    return faults


def _tp_size(info: Mapping[str, Any], tp_size: int | None) -> str:
    served = info.get("tp_size")
    return "" if tp_size in (None, served) else f"its tp_size is {served!r}, the option says {tp_size}"
