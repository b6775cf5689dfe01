"""How long a refit of a real server takes, and how much of it is transfer: ``python -m tests.engines.sglang.speed``.

One server on a CPU, 64 MiB of weights, by-value payloads. Prints a table and, with ``--json FILE``, writes the figures.
"bare" posts the same buckets from this process: no bus, no second process. Medians of `--rounds`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.engines.sglang.server import HERE, RealServer
from tests.engines.sglang.test_bus import Receiver
from tests.sglang_side import Side, soon
from weightbus import WeightBus

KIND = "llama_64mib"
Weights = dict[str, torch.Tensor]


def batches(weights: Weights, bucket_bytes: int) -> list[Weights]:
    """Cut as the bus cuts: whole tensors, up to `bucket_bytes`."""
    out: list[Weights] = [{}]
    size = 0
    for name, tensor in weights.items():
        if size + tensor.nbytes > bucket_bytes and out[-1]:
            out.append({})
            size = 0
        out[-1][name] = tensor
        size += tensor.nbytes
    return out


def bare(server: RealServer, weights: list[Weights], bucket_bytes: int, rounds: int) -> dict[str, float]:
    side = Side(server)
    times, pauses = [], []
    for version in range(rounds + 1):
        start = time.perf_counter()
        side.begin(version)
        for batch in batches(weights[version % 2], bucket_bytes):
            side.loader.load([list(batch.items())])
        times.append(time.perf_counter() - start)
        side.driver.finish(version, soon())
        side.driver.resume(soon())
        pauses.append(time.perf_counter() - start)
    side.close()
    return {"total": statistics.median(times[1:]), "pause": statistics.median(pauses[1:])}


def through_bus(
    server: RealServer, weights: list[Weights], bucket_bytes: int, rounds: int, backend: str, stage: str | None
) -> dict[str, float]:
    with WeightBus.sender("tcp://127.0.0.1:0", receivers=1, backend=backend, bucket_bytes=bucket_bytes) as bus:
        receiver = Receiver(bus.address, server.url, backend=backend, stage=stage)
        totals, phases = [], []
        for version in range(rounds + 1):
            start = time.perf_counter()
            bus.send(weights[version % 2], version=version, timeout=300)
            totals.append(time.perf_counter() - start)
            phases.append(receiver.said()["seconds"])
        receiver.close()
    medians = {name: statistics.median(p.get(name, 0.0) for p in phases[1:]) for name in phases[-1]}
    return {"total": statistics.median(totals[1:]), **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        subprocess.run([sys.executable, HERE / "models.py", out, f"{KIND}:0", f"{KIND}:1"], check=True)
        weights = [load_file(out / f"{KIND}-{seed}.trainer") for seed in (0, 1)]
        server = RealServer(out / f"{KIND}-0", out / "server.log").start()
        try:
            size, rounds = arguments.bucket_mib << 20, arguments.rounds
            rows = {"bare": bare(server, weights, size, rounds)}
            for backend in ("local", "nixl"):
                for stage in (None, "host"):
                    rows[f"{backend}, stage={stage}"] = through_bus(server, weights, size, rounds, backend, stage)
        finally:
            server.stop()
    names = sorted({name for row in rows.values() for name in row}, key=lambda name: (name != "total", name))
    print(f"{'seconds':<20}" + "".join(f"{name:>12}" for name in names))
    for title, row in rows.items():
        print(f"{title:<20}" + "".join(f"{row[name]:>12.3f}" if name in row else f"{'':>12}" for name in names))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
