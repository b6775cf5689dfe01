"""How long a refit of a real server takes, and how much of it is transfer: ``python -m tests.engines.sglang.speed``.

One server on a CPU at tensor parallelism 2, 64 MiB of weights, by-value payloads; on a quiet machine. Prints tables and,
with ``--json FILE``, writes the figures. "bare" posts the same buckets from this process: no bus, no second process.
Medians of `--rounds` after one more. "answered": short requests, one after the other, that the server answered from the
send to its end while the source took `--source-s` seconds to yield its tensors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.engines.figures import Row, medians, show
from tests.engines.sglang.server import HERE, RealServer, Receiver, Traffic
from tests.sglang_side import Side, soon
from weightbus import WeightBus
from weightbus.manifest import Manifest, TensorSpec

KIND = "llama_64mib"
TP = 2
HAND_OFFS = {"one copy": 1, "per rank": TP}  # wire copies for the server's ranks
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


def bare(server: RealServer, weights: list[Weights], bucket_bytes: int, rounds: int, ranks: int) -> Row:
    side = Side(server, per_rank=ranks > 1)
    seconds: list[Row] = []
    for version in range(rounds + 1):
        marks = [time.perf_counter()]
        side.begin(version)
        marks.append(time.perf_counter())
        for batch in batches(weights[version % 2], bucket_bytes):
            side.loader.load([list(batch.items())] * ranks)
        marks.append(time.perf_counter())
        side.driver.finish(version, soon())
        side.driver.resume(soon())
        marks.append(time.perf_counter())
        begin, load, finish = (b - a for a, b in itertools.pairwise(marks))
        total = marks[-1] - marks[0]
        seconds.append({"total": total, "begin": begin, "load": load, "finish": finish, "pause": total})
    side.close()
    return medians(seconds)


def spread(weights: Weights, seconds: float) -> Iterator[tuple[str, torch.Tensor]]:
    """A source that takes `seconds` to yield all."""
    for item in weights.items():
        time.sleep(seconds / len(weights))
        yield item


def through_bus(
    server: RealServer,
    weights: list[Weights],
    arguments: argparse.Namespace,
    backend: str,
    stage: str | None,
    ranks: int,
) -> Row:
    manifest = Manifest([TensorSpec.of(name, tensor) for name, tensor in weights[0].items()])
    size, rounds = arguments.bucket_mib << 20, arguments.rounds
    with WeightBus.sender("tcp://127.0.0.1:0", receivers=ranks, backend=backend, bucket_bytes=size) as bus:
        receiver = Receiver(bus.address, server.url, backend=backend, stage=stage, ranks=ranks)
        seconds: list[Row] = []
        for version in range(rounds + 1):
            start = time.perf_counter()
            bus.send(weights[version % 2], version=version, timeout=300)
            seconds.append({"total": time.perf_counter() - start, **receiver.said()["seconds"]})
        with Traffic(server) as traffic:
            start = time.monotonic()
            bus.send(spread(weights[0], arguments.source_s), manifest=manifest, version=rounds + 1, timeout=300)
            end = time.monotonic()
        receiver.said()
        receiver.close()
    return {**medians(seconds), "answered": sum(start < at < end for at, _ in traffic.answers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=8)
    parser.add_argument("--source-s", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        subprocess.run([sys.executable, HERE / "models.py", out, f"{KIND}:0", f"{KIND}:1"], check=True)
        weights = [load_file(out / f"{KIND}-{seed}.trainer") for seed in (0, 1)]
        server = RealServer(out / f"{KIND}-0", out / "server.log", tp=TP).start()
        rows: dict[str, Row] = {}
        try:
            size, rounds = arguments.bucket_mib << 20, arguments.rounds
            for hand_off, ranks in HAND_OFFS.items():
                rows[f"bare, {hand_off}"] = bare(server, weights, size, rounds, ranks)
                for backend in ("local", "nixl"):
                    for stage in (None, "host"):
                        row = through_bus(server, weights, arguments, backend, stage, ranks)
                        rows[f"{backend}, {hand_off}, {stage or 'in place'}"] = row
        finally:
            server.stop()
    show(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
