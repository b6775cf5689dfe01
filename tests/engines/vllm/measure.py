"""Seconds per phase and of pause, staged and in place, against the bare cost of vLLM's own loader. Prints tables.

``.venv-vllm/bin/python tests/engines/vllm/measure.py [FOLDER] [--json FILE]``, on a quiet machine. A Llama of 62 MB in
this process, the trainer in another one; medians of nine after a warm-up. Then the same in vLLM's server, with short
requests, one after the other: "answered" counts those that it answered while the source stood still for 4 s in
mid-stream.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.engines.vllm.environment import ENVIRONMENT

os.environ.update(ENVIRONMENT, VLLM_LOGGING_LEVEL="ERROR")

import httpx
import rig
import serving
import tiny

from tests.engines.figures import Row, medians, show

ROUNDS = 9
HOLD_S = 4.0


def bare(llm: Any, path: Path) -> Row:
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
    return {"total": statistics.median(times[1:])}


def refits(trainer: rig.Trainer, driver: Any, path: Path) -> Row:
    seconds: list[Row] = []
    for version in range(1, ROUNDS + 2):
        trainer.post(path, version)
        driver.drive(timeout=120)
        answer = trainer.said()
        seconds.append({"total": answer["total_s"], **answer["seconds"]})
    return medians(seconds)


def in_process(llm: Any, path: Path, backend: str, stage: str | None) -> Row:
    from weightbus import WeightBus

    with rig.Trainer(backend, 1, bucket_bytes="8MiB", poison=False) as trainer:
        join = {"address": trainer.address, "engine": "e0", "backend": backend, "options": {"stage": stage}}
        options = {"llm": llm, "join": join}
        with WeightBus.driver(trainer.address, engine="e0", ranks=1, adapter="vllm", adapter_options=options) as driver:
            return refits(trainer, driver, path)


def in_server(server: serving.Server, path: Path, backend: str, stage: str | None) -> Row:
    with rig.Trainer(backend, 1, bucket_bytes="8MiB", poison=False) as trainer:
        join = {"address": trainer.address, "engine": "e0", "backend": backend, "options": {"stage": stage}}
        with serving.drive(trainer.address, server, join=join, pause="keep") as driver:
            row = refits(trainer, driver, path)
            with answered(server) as times:
                begun = time.monotonic()
                trainer.post(path, ROUNDS + 2, hold_after=20, hold_s=HOLD_S)
                driver.drive(timeout=120)
                ended = time.monotonic()
                trainer.said()
    return {**row, "answered": sum(begun < at < ended for at in times)}


@contextlib.contextmanager
def answered(server: serving.Server) -> Any:
    """When each of the requests was answered that are sent meanwhile."""
    times: list[float] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            with contextlib.suppress(httpx.HTTPError):
                server.complete(rig.PROMPTS[0], 2)
                times.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield times
    finally:
        stop.set()
        thread.join(120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    path = tiny.make(folder / "wide", 0, "llama-wide")
    llm = rig.engine(path, weight_transfer_config={"backend": "weightbus"}, worker_extension_cls="")
    variants = [(backend, stage) for backend in ("local", "nixl") for stage in (None, "host")]
    rows = {"vLLM's own loader": bare(llm, path)}
    for backend, stage in variants:
        rows[f"in process, {backend}, {stage or 'in place'}"] = in_process(llm, path, backend, stage)
    server = serving.Server(path, folder / "server.log")
    try:
        for backend, stage in variants:
            rows[f"server, {backend}, {stage or 'in place'}"] = in_server(server, path, backend, stage)
    finally:
        server.kill()
    show(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
