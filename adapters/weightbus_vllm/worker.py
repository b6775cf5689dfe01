"""One vLLM worker as a rank of the bus: what the weight-transfer engine and the worker extension share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weightbus.adapter import Adapter, EngineDriver, EngineLoader
from weightbus.errors import ConfigError, EngineError
from weightbus_vllm.loader import VllmLoader

log = logging.getLogger("weightbus.vllm")
DEFAULT_RECV_S = 86_400.0


@dataclass
class JoinInfo:
    """What `init_weight_transfer_engine` carries; vLLM builds it from a dict and refuses unknown keys.

    Attributes:
        address: the sender's control address, such as ``"tcp://10.0.0.1:29600"``.
        engine: this engine's name on the bus.
        backend: name of the backend.
        backend_options: its options.
        token: shared secret; None: the worker's environment variable ``WEIGHTBUS_TOKEN``.
        options: further arguments of `WeightBus.receiver`, such as ``{"stage": "host"}``.
        optional: regular expressions of engine parameter names that no checkpoint brings.
        cast: regular expressions of checkpoint names whose dtype may differ from the engine's.
    """

    address: str = ""
    engine: str = ""
    backend: str = "local"
    backend_options: dict[str, Any] = field(default_factory=dict)
    token: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    optional: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        missing = [name for name in ("address", "engine") if not getattr(self, name)]
        if missing:
            raise ConfigError(f"init_info lacks {' and '.join(missing)}")


@dataclass
class UpdateInfo:
    """What `update_weights` carries.

    Attributes:
        timeout_s: how long a worker waits for the refit and loads it; None: a day.
    """

    timeout_s: float | None = None


class RankAdapter(Adapter):
    """The adapter of one worker's receiver; its engine's steps run elsewhere, in a ``WeightBus.driver``."""

    name = "vllm-rank"
    steps_engine = False

    def __init__(self, loader: VllmLoader) -> None:
        self._loader = loader

    def driver(self) -> EngineDriver:
        raise EngineError("a worker does not drive its engine", advice="run WeightBus.driver(..., adapter='vllm')")

    def loader(self, ranks: Sequence[int], device: torch.device | None) -> EngineLoader:
        if len(ranks) != 1:
            raise ConfigError(f"a vLLM worker serves one rank, not {list(ranks)}")
        return self._loader

    @property
    def device(self) -> torch.device:
        return self._loader.device


class WorkerRank:
    """The receiver inside one worker.

    Its bus thread answers offers and checks, and fills the stage, between vLLM's calls; `receive` is the one call in
    which tensors are loaded.

    A refit that fails is told over the bus, and `receive` returns: a worker call that raises is answered by vLLM's
    multiprocess executor without reading the other workers' replies, which then answer later calls (seen on 0.32),
    and it closes the update on the ranks that raised only, so that vLLM refuses the next one.

    Args:
        model: the worker's model.
        vllm_config: the worker's configuration.
        rank: the worker's rank within its data-parallel replica.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, rank: int) -> None:
        parallel = vllm_config.parallel_config
        self.rank = rank_on_bus(parallel, rank)
        self.ranks = int(parallel.world_size_across_dp)
        self._model = model
        self._vllm_config = vllm_config
        self._loader: VllmLoader | None = None
        self._bus: Any = None
        self._whole = False

    def join(self, info: JoinInfo) -> None:
        """Become a receiver of the bus at ``info.address``, leaving another one first."""
        self.leave()
        loader = VllmLoader(self._model, self._vllm_config, optional=info.optional, cast=info.cast)
        self._bus = _receiver(info, self.rank, self.ranks, loader)
        self._loader = loader

    def start(self) -> None:
        """vLLM's start of an update: from here until `finish` or a failed `receive` the model cannot run."""
        self._whole = False
        self._joined.start()

    def receive(self, info: UpdateInfo) -> None:
        """Load one refit. After a failure the model can run again, but may hold a mixture."""
        loader = self._joined
        try:
            with _on(loader.device):
                self._bus.recv(timeout=info.timeout_s or DEFAULT_RECV_S)
        except Exception as exc:
            log.error("rank %d: the refit failed: %s", self.rank, exc)
            loader.abort(str(exc))
        else:
            self._whole = True

    def finish(self) -> None:
        """vLLM's end of an update: what was loaded whole is processed, anything else is put back."""
        if self._whole:
            self._joined.finish()
        else:
            self._joined.abort("the update was ended before it was whole")
        self._whole = False

    def leave(self) -> None:
        """Close the receiver. Idempotent."""
        bus, self._bus, self._loader = self._bus, None, None
        if bus is not None:
            bus.close()

    @property
    def _joined(self) -> VllmLoader:
        if self._loader is None:
            raise EngineError(
                f"worker {self.rank} has not joined a bus",
                phase="begin",
                advice="call init_weight_transfer_engine, or weightbus_vllm.join, before the first send",
            )
        return self._loader


def rank_on_bus(parallel: Any, rank: int) -> int:
    """``data_parallel_index * (TP * PP) + rank``. The index, as vLLM sets ``data_parallel_rank`` to 0 in some modes."""
    return int(parallel.data_parallel_index) * int(parallel.world_size) + rank


def _receiver(info: JoinInfo, rank: int, ranks: int, loader: VllmLoader) -> Any:
    from weightbus import WeightBus

    return WeightBus.receiver(
        info.address,
        engine=info.engine,
        rank=rank,
        ranks=ranks,
        backend=info.backend,
        backend_options=info.backend_options,
        adapter=RankAdapter(loader),
        token=info.token,
        **info.options,
    )


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The current CUDA device belongs to a thread, and an in-process engine is called from another one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
