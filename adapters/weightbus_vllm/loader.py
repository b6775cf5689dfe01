"""Rank side: check and load inside one vLLM worker. Knows nothing of the bus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weightbus.adapter import Batch, EngineLoader, Fault, GroupRule, GroupRules, LoadResult
from weightbus.errors import EngineError
from weightbus.manifest import Manifest
from weightbus_vllm.layout import Layout
from weightbus_vllm.reload import LayerwiseReload


class VllmLoader(EngineLoader):
    """Feeds one worker's model through vLLM's layerwise reload.

    The engine must be paused from `start` until `finish` or `abort`: the model cannot run in between.
    `check` touches nothing and may be called from another thread at any time.

    Args:
        model: the worker's model.
        vllm_config: the worker's configuration.
        optional: regular expressions of engine parameter names that no checkpoint brings.
        cast: regular expressions of checkpoint names whose dtype may differ from the engine's.

    Raises:
        EngineError: this vLLM is not supported.
    """

    def __init__(
        self, model: torch.nn.Module, vllm_config: Any, *, optional: Sequence[str] = (), cast: Sequence[str] = ()
    ) -> None:
        self._reload = LayerwiseReload(model, vllm_config.model_config)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.device = device
        self._layout = Layout(
            model,
            optional=optional,
            cast=cast,
            tensor_parallel=int(vllm_config.parallel_config.tensor_parallel_size),
            free_bytes=lambda: _free_bytes(device),
        )
        self._skipped: frozenset[str] = frozenset()
        self._started = False
        self._applied = False

    def rules(self) -> GroupRules:
        """A layer's names follow each other, so that vLLM holds one layer's tensors at a time."""
        layer = GroupRule(r"((?:[^.]+\.)*?\d+)\..+", r"\1")
        module = GroupRule(r"((?:[^.\d]+\.)+?)[^.]+", r"\1")
        return GroupRules(adjacent=(layer, module))

    def check(self, manifests: Sequence[Manifest], *, partial: bool) -> list[Fault]:
        (manifest,) = manifests
        verdict = self._layout.probe(manifest, partial=partial)
        if not verdict.faults:
            self._skipped = verdict.skipped
        return list(verdict.faults)

    def start(self) -> None:
        """Open the model: vLLM's start of a weight update."""
        self._started, self._applied = False, False
        self._reload.start()
        self._started = True

    def load(self, batches: Sequence[Batch]) -> LoadResult:
        (batch,) = batches
        if not self._started:
            raise EngineError(
                "tensors arrived while vLLM's update session is closed",
                phase="stream",
                advice="call start_weight_update before update_weights",
            )
        taken = [(name, tensor) for name, tensor in batch if name not in self._skipped]
        skipped = tuple(name for name, _ in batch if name in self._skipped)
        self._applied = True
        try:
            # vLLM keeps what it is given until a module is whole: it gets copies, never the bus's memory.
            self._reload.load((name, tensor.clone()) for name, tensor in taken)
        except Exception as exc:
            raise EngineError(
                f"the model's loader failed: {type(exc).__name__}: {exc}",
                tensor=taken[0][0] if taken else None,
                phase="stream",
                advice="send a full refit; the engine stays paused until then",
            ) from exc
        return LoadResult(applied=[name for name, _ in taken], skipped=skipped)

    def finish(self) -> None:
        """Close the model after everything was loaded, or after nothing was: vLLM's end of a weight update."""
        self._reload.finish()
        self._started = False

    def abort(self, reason: str) -> None:
        """Put back what half-loaded modules held; the model can run again, mixed if a module had been whole."""
        self._started = False
        self._reload.clean()

    def close(self) -> None:
        return None


def _free_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
