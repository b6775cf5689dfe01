"""Worker extension: ``--worker-extension-cls weightbus_vllm.extension.WeightbusExtension``.

For engines driven by ``collective_rpc`` instead of vLLM's weight-transfer calls; the driver's option is ``rpc=True``.
Every name begins with ``weightbus_``, as vLLM refuses an extension that hides an attribute of the worker.
"""

from __future__ import annotations

import json
from typing import Any

from weightbus.errors import EngineError
from weightbus_vllm.worker import JoinInfo, UpdateInfo, WorkerRank


class WeightbusExtension:
    """Mixed into vLLM's worker. Arguments are JSON texts: ``/collective_rpc`` carries nothing else."""

    def weightbus_join(self, info: str) -> int:
        """Become a rank of the bus; `info` holds the fields of `JoinInfo`. Returns the rank."""
        worker: Any = self
        rank = WorkerRank(worker.model_runner.get_model(), worker.vllm_config, int(worker.rank))
        self.weightbus_leave()
        rank.join(JoinInfo(**json.loads(info)))
        worker.__dict__["_weightbus_rank"] = rank
        return rank.rank

    def weightbus_start(self) -> None:
        """Open the model; the engine must be paused."""
        with _config(self):
            _rank(self).start()

    def weightbus_update(self, info: str) -> None:
        """Load one refit; `info` holds the fields of `UpdateInfo`. A refit that fails is told over the bus."""
        with _config(self):
            _rank(self).receive(UpdateInfo(**json.loads(info)))

    def weightbus_finish(self) -> None:
        """Close the model; without an update that is open it does nothing."""
        with _config(self):
            _rank(self).finish()
        worker: Any = self
        worker.model_runner.reset_lora_state()

    def weightbus_leave(self) -> None:
        """Leave the bus. Idempotent."""
        rank = self.__dict__.pop("_weightbus_rank", None)
        if rank is not None:
            rank.leave()


def _rank(worker: Any) -> WorkerRank:
    rank = worker.__dict__.get("_weightbus_rank")
    if not isinstance(rank, WorkerRank):
        raise EngineError("this worker has not joined a bus", phase="begin", advice="call weightbus_join first")
    return rank


def _config(worker: Any) -> Any:
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(worker.vllm_config)
