"""Seconds per phase and of pause, staged and in place, against the bare cost of vLLM's own loader. Prints a table.

``.venv-vllm/bin/python tests/engines/vllm/measure.py [FOLDER]``, on a quiet machine. A Llama of 62 MB in this process,
the trainer in another one, backend local; medians of five after a warm-up.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    TORCHDYNAMO_DISABLE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

import rig
import tiny

ROUNDS = 5


def bare(llm: Any, path: Path) -> list[float]:
    """vLLM's layerwise reload from memory: what no transport can undercut."""
    from vllm.config import set_current_vllm_config

    from weightbus_vllm.reload import LayerwiseReload

    worker = llm.llm_engine.model_executor.driver_worker.worker
    tensors = list(tiny.weights(path).items())
    reload = LayerwiseReload(worker.model_runner.model, worker.model_config)
    times = []
    for _ in range(ROUNDS + 1):
        begun = time.perf_counter()
        with set_current_vllm_config(worker.vllm_config):
            reload.start()
            reload.load(tensors)
            reload.finish()
        times.append(time.perf_counter() - begun)
    return times[1:]


def through_the_bus(llm: Any, path: Path, stage: str | None) -> dict[str, float]:
    from weightbus import WeightBus

    with rig.Trainer("local", 1, bucket_bytes="8MiB", poison=False) as trainer:
        join = {"address": trainer.address, "engine": "e0", "options": {"stage": stage}}
        options = {"llm": llm, "join": join}
        seconds: list[dict[str, float]] = []
        with WeightBus.driver(trainer.address, engine="e0", ranks=1, adapter="vllm", adapter_options=options) as driver:
            for version in range(1, ROUNDS + 2):
                trainer.post(path, version)
                driver.drive(timeout=120)
                answer = trainer.answer()
                seconds.append({**answer["seconds"], "total": answer["total_s"]})
    return {phase: statistics.median(s.get(phase, 0.0) for s in seconds[1:]) for phase in seconds[-1]}


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    path = tiny.make(folder / "wide", 0, "llama-wide")
    llm = rig.engine(path, weight_transfer_config={"backend": "weightbus"}, worker_extension_cls="")
    own = bare(llm, path)
    print(f"vLLM's own loader from memory: {statistics.median(own):.3f} s ({min(own):.3f} to {max(own):.3f})")
    for stage in (None, "host"):
        seconds = through_the_bus(llm, path, stage)
        print(f"stage={stage}: " + ", ".join(f"{phase} {value:.3f}" for phase, value in sorted(seconds.items())))


if __name__ == "__main__":
    main()
