"""Resident memory, descriptors, threads and shared memory of both sides over many refits: they must stay flat.

python examples/bench_memory.py [refits] [backend]
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import weightbus

WARM_UP = 20
SLACK_MB = 4.0


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(16)))


def used() -> dict[str, float]:
    """What this process holds now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "resident MB": int(status["VmRSS"].split()[0]) / 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "shared maps": sum(" rw-s " in line for line in maps),
        "shared MB": int(status["RssShmem"].split()[0]) / 1024,
    }


def inference(address: str, backend: str, refits: int, pipe: Connection[Any, Any]) -> None:
    options = {"module": make_model()}
    seen = []
    with weightbus.WeightBus.receiver(address, backend=backend, adapter="torch", adapter_options=options) as bus:
        for _ in range(refits):
            bus.recv(timeout=120)
            seen.append(used())
    pipe.send(seen)


def grown(side: str, seen: list[dict[str, float]]) -> bool:
    """Print the first refit after the warm-up beside the last; True if anything has grown."""
    first, last = seen[min(WARM_UP, len(seen) - 1)], seen[-1]
    worse = [key for key in first if last[key] > first[key] + (SLACK_MB if key.endswith("MB") else 0)]
    row = ", ".join(f"{key} {first[key]:.0f} -> {last[key]:.0f}" for key in first)
    print(f"{side}: {row}; grown: {', '.join(worse) or 'nothing'}")
    return bool(worse)


def main() -> int:
    torch.set_num_threads(1)
    refits = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    backend = sys.argv[2] if len(sys.argv) > 2 else "local"
    model, seen = make_model(), []
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    with weightbus.WeightBus.sender("tcp://127.0.0.1:0", receivers=1, backend=backend, bucket_bytes="4MiB") as bus:
        arguments = (bus.address, backend, refits, theirs)
        process = multiprocessing.get_context("spawn").Process(target=inference, args=arguments)
        process.start()
        for version in range(refits):
            bus.send(model, version=version, timeout=120)
            seen.append(used())
    other = mine.recv()
    process.join()
    print(f"{refits} refits over {backend}, {sum(p.nbytes for p in model.parameters()) / 1e6:.1f} MB each")
    return int(any([grown("trainer", seen), grown("inference", other)]))


if __name__ == "__main__":
    sys.exit(main())
