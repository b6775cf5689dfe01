"""The weight-transfer engine with a bus of files: what arrives, and what goes wrong, is written down in one JSON file.

Imported in every worker by ``worker_extension_cls``; registers backend ``weightbus_file``. ``order.json`` in the
folder named by `address` holds: path (a checkpoint), and optionally only (regular expression of names), chunk (tensors
a load call), unchecked, fail_after (chunks), rank (the one that fails; the others go on), reshape (a name that comes
with a wrong shape), rename (a name that comes wrong), hang_s, kill (the failing rank dies).
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import tiny
import torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from weightbus.errors import AlignmentError, RefitAborted
from weightbus.manifest import Manifest, TensorSpec
from weightbus_vllm.engine import WeightbusTransferEngine
from weightbus_vllm.loader import VllmLoader
from weightbus_vllm.worker import JoinInfo, WorkerRank


class Extension:
    """Nothing of its own; names for the tests' look into the worker."""

    def test_parameters(self) -> dict[str, str]:
        """xxh3 of every parameter's bytes, by engine name."""
        import xxhash

        worker: Any = self
        return {
            name: xxhash.xxh3_64_hexdigest(p.detach().contiguous().view(torch.uint8).numpy().tobytes())
            for name, p in worker.model_runner.get_model().named_parameters()
        }


class FileBus:
    """Stands where a bus receiver does; its memory is reused after every load, filled with poison."""

    def __init__(self, folder: str, rank: int, loader: VllmLoader) -> None:
        self._folder, self._rank, self._loader = Path(folder), rank, loader

    def recv(self, timeout: float | None) -> None:
        """Load as ordered, and say how it went in ``outcome-RANK``, as a rank of the real bus tells its driver."""
        outcome = self._folder / f"outcome-{self._rank}"
        try:
            self._recv()
        except Exception as exc:
            outcome.write_text(str(exc))
            raise
        outcome.write_text("loaded")

    def _recv(self) -> None:
        order = json.loads((self._folder / "order.json").read_text())
        items = self._items(order)
        if not order.get("unchecked"):
            manifest = Manifest([TensorSpec.of(name, tensor) for name, tensor in items])
            faults = self._loader.check([manifest], partial="only" in order)
            if faults:
                raise AlignmentError("; ".join(str(fault) for fault in faults))
        chunk = order.get("chunk", 3)
        for index, start in enumerate(range(0, len(items), chunk)):
            if index == order.get("fail_after") and order.get("rank", self._rank) == self._rank:
                time.sleep(order.get("hang_s", 0))
                if order.get("kill"):
                    os._exit(17)
                raise RefitAborted("the test ends it here")
            leased = [(name, tensor.clone()) for name, tensor in items[start : start + chunk]]
            self._loader.load([leased])
            for _, tensor in leased:
                tensor.fill_(float("nan"))

    def close(self) -> None:
        return None

    @staticmethod
    def _items(order: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        items = list(tiny.weights(Path(order["path"])).items())
        if "only" in order:
            items = [(name, tensor) for name, tensor in items if re.search(order["only"], name)]
        if "reshape" in order:
            items = [(n, t[:-1].contiguous() if n == order["reshape"] else t) for n, t in items]
        if "rename" in order:
            items = [(n.replace("norm", "gnorm") if n == order["rename"] else n, t) for n, t in items]
        return items


class FileRank(WorkerRank):
    def join(self, info: JoinInfo) -> None:
        loader = VllmLoader(self._model, self._vllm_config, optional=info.optional, cast=info.cast)
        self._loader, self._bus = loader, FileBus(info.address, self.rank, loader)


class FileEngine(WeightbusTransferEngine):
    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._rank = FileRank(model, vllm_config, int(vllm_config.parallel_config.rank))


if "weightbus_file" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("weightbus_file", FileEngine)
