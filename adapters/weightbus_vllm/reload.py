"""vLLM's layerwise reload of one worker's model, with the clean-up that vLLM lacks.

From `start` until `finish` or `clean` the model's parameters are on the meta device: the engine must be paused.
vLLM keeps loaded tensors by reference per module until the module is whole, so only owned copies go in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from weightbus.errors import EngineError
from weightbus_vllm.versions import check_version


class LayerwiseReload:
    """One model's reload; not safe to use from two threads at once.

    Args:
        model: the worker's model.
        model_config: vLLM's configuration of that model.

    Raises:
        EngineError: this vLLM is not supported, or lacks what a failed update is cleaned up with.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        import vllm

        check_version(str(vllm.__version__))
        try:
            from vllm.model_executor.model_loader.reload import layerwise

            self._initialize = layerwise.initialize_layerwise_reload
            self._finalize = layerwise.finalize_layerwise_reload
            self._info = layerwise.get_layerwise_info
            self._place_back = layerwise._place_kernel_tensors  # private: the one way to undo a half-loaded module
        except (ImportError, AttributeError) as exc:
            raise EngineError(
                f"vLLM {vllm.__version__} has no layerwise reload as known here: {exc}",
                phase="check",
                advice="use vLLM 0.27 to 0.33 as released",
            ) from exc
        self._model = model
        self._model_config = model_config

    def start(self) -> None:
        """Open the model for loading, after cleaning up what a failed update may have left."""
        self.clean()
        self._initialize(self._model)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Feed whole tensors under checkpoint names; vLLM keeps them, so they must be the model's own."""
        self._model.load_weights(tensors)  # type: ignore[operator]

    def finish(self) -> None:
        """Process what is left and close the model. Modules that were sent nothing keep their old weights."""
        experts = [module for module in self._model.modules() if self._reloaded(module) and _cpu_experts(module)]
        self._finalize(self._model, self._model_config)
        for module in experts:
            _cpu_experts(module).process_weights_after_loading(module)

    def _reloaded(self, module: torch.nn.Module) -> bool:
        info = self._info(module)
        return not info.can_load() or info.load_numel > 0

    def clean(self) -> bool:
        """Give every module that is still open its held tensors back.

        The model can run afterwards: with its old weights if no module had been whole, else with a mixture.

        Returns:
            True if a module was open.
        """
        opened = False
        for module in self._model.modules():
            info = self._info(module)
            if not info.can_load():
                continue
            opened = True
            if info.kernel_tensors is not None:
                self._place_back(module, info)
            info.reset()
        return opened


def _cpu_experts(module: torch.nn.Module) -> Any:
    """The kernel of an MoE layer on a CPU, or None: vLLM packs its weights at the first load only (seen on 0.32)."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    on_cpu = all(parameter.device.type in ("cpu", "meta") for parameter in module.parameters(recurse=False))
    return experts if on_cpu and hasattr(experts, "process_weights_after_loading") else None
