"""The weight-transfer engine that vLLM builds in every worker started with backend ``weightbus``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from weightbus_vllm.worker import JoinInfo, UpdateInfo, WorkerRank


class WeightbusTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """A rank of the bus behind vLLM's weight-transfer calls. The draft model of speculative decoding is not updated."""

    init_info_cls: ClassVar[type[JoinInfo]] = JoinInfo
    update_info_cls: ClassVar[type[UpdateInfo]] = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._rank = WorkerRank(model, vllm_config, int(vllm_config.parallel_config.rank))

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        self._rank.join(init_info)

    def start_weight_update(self) -> None:
        self._rank.start()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._rank.receive(update_info)

    def finish_weight_update(self) -> None:
        self._rank.finish()

    def shutdown(self) -> None:
        self._rank.leave()
