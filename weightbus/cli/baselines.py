"""What else could move the same bytes: each method measured in two processes like a refit, in the same run.

A method is a pair of generators. The first `next` sets up; every further one moves one version. The clock of a round
runs in the sender's process from the call until the receiver has said over a pipe that it is done.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.multiprocessing  # teaches pipes to hand tensors over

from weightbus.cli import raw
from weightbus.cli.optional import library
from weightbus.cli.shapes import filled, fingerprint, pieces, specs_of, touch
from weightbus.manifest import TensorSpec

PACK_BYTES = 256 << 20
Tensors = dict[str, torch.Tensor]
#: One round per step; yields what to compare at the end, None for the tensors themselves.
Steps = Generator[Tensors | None, None, None]


@attrs.frozen(kw_only=True)
class Method:
    """One baseline.

    Attributes:
        covers: what its clock covers.
        send: in the sender's process.
        recv: in the receiver's; None: `send` does both.
        needs: top-level modules, any one of them.
        devices: kinds of memory.
        max_tensors: more are not tried.
    """

    covers: str
    send: Callable[[Tensors, Connection[Any, Any]], Steps]
    recv: Callable[[Tensors, Connection[Any, Any]], Steps] | None
    needs: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    max_tensors: int = 1 << 30


def sender(name: str, model: str, device: str, rounds: int, conn: Connection[Any, Any]) -> Any:
    """Seconds of each round, and a digest of what was sent."""
    method, times = METHODS[name], []
    torch.set_num_threads(1)
    tensors = filled(specs_of(model), device, seed=1)
    steps = method.send(tensors, conn)
    kept = next(steps)
    for version in range(rounds + 1):
        touch(tensors, version)
        synchronize(device)
        if method.recv is not None:
            conn.recv()
        start = time.perf_counter()
        kept = next(steps)
        synchronize(device)
        if method.recv is not None:
            conn.recv()
        times.append(time.perf_counter() - start)
    digest = fingerprint(tensors if kept is None or method.recv is None else kept)
    held = fingerprint(kept) if method.recv is None and kept is not None else None
    steps.close()
    return times, digest, held


def receiver(name: str, model: str, device: str, rounds: int, conn: Connection[Any, Any]) -> Any:
    """A digest of what arrived."""
    recv = METHODS[name].recv
    if recv is None:
        return None
    torch.set_num_threads(1)
    tensors = resident(specs_of(model), device)
    steps = recv(tensors, conn)
    kept = next(steps)
    for _ in range(rounds + 1):
        conn.send("ready")
        kept = next(steps)
        synchronize(device)
        conn.send("done")
    return fingerprint(tensors if kept is None else kept)


def resident(specs: list[TensorSpec], device: str) -> Tensors:
    """The receiver's parameters: existing memory, written once, with other bytes than the sender's."""
    tensors = {}
    for spec in specs:
        tensors[spec.name] = torch.empty(spec.shape, dtype=spec.torch_dtype, device=device)
        tensors[spec.name].view(-1).view(torch.uint8).fill_(0xA5)
    return tensors


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def specs(tensors: Tensors) -> list[TensorSpec]:
    return [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]


# ---- one copy


def _copy(step_bytes: int) -> Callable[[Tensors, Connection[Any, Any]], Steps]:
    def steps(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
        source = torch.cat([flat(tensor) for tensor in tensors.values()])
        target = torch.empty_like(source).fill_(0xA5)
        total = source.numel()
        yield None
        while True:
            for at in range(0, total, step_bytes):
                length = min(step_bytes, total - at)
                if source.is_cuda:
                    target[at : at + length].copy_(source[at : at + length])
                else:
                    ctypes.memmove(target.data_ptr() + at, source.data_ptr() + at, length)
            yield tensors if torch.equal(source[-4096:], target[-4096:]) else {}

    return steps


# ---- Gloo


def _gloo(conn: Connection[Any, Any], rank: int) -> Any:
    """A group of two of its own, on a port that the system chooses."""
    dist = library("torch.distributed", "install torch from PyPI", "The Gloo baseline")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        conn.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", conn.recv(), 2, False)
    return dist.ProcessGroupGloo(store, rank, 2)


def _gloo_each(rank: int) -> Callable[[Tensors, Connection[Any, Any]], Steps]:
    def steps(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
        group = _gloo(conn, rank)
        yield None
        while True:
            for tensor in tensors.values():
                group.broadcast(tensor, 0).wait()
            yield None

    return steps


def _gloo_packed(rank: int) -> Callable[[Tensors, Connection[Any, Any]], Steps]:
    def steps(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
        group, bucket = _gloo(conn, rank), torch.empty(PACK_BYTES, dtype=torch.uint8).fill_(0)
        packs = pieces(specs(tensors), PACK_BYTES)
        yield None
        while True:
            for pack in packs:
                used = pack[-1][2] + pack[-1][3]
                if rank == 0:
                    move(tensors, pack, bucket, out=True)
                group.broadcast(bucket[:used], 0).wait()
                if rank == 1:
                    move(tensors, pack, bucket, out=False)
            yield None

    return steps


def move(tensors: Tensors, pack: list[tuple[str, int, int, int]], bucket: torch.Tensor, *, out: bool) -> None:
    """Copy pieces of tensors into the bucket, or out of it."""
    for name, first, at, length in pack:
        mine, theirs = flat(tensors[name])[first : first + length], bucket[at : at + length]
        (theirs if out else mine).copy_(mine if out else theirs)


# ---- files in memory


def _file_send(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    save = library("safetensors.torch", "pip install safetensors", "The safetensors baseline").save_file
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="weightbus-bench-") as folder:
        path = str(Path(folder) / "w.safetensors")
        yield None
        while True:
            save(tensors, path)
            conn.send(path)
            yield None


def _file_recv(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    load = library("safetensors.torch", "pip install safetensors", "The safetensors baseline").load_file
    yield None
    while True:
        for name, value in load(conn.recv()).items():
            tensors[name].copy_(value)
        yield None


# ---- Ray


def _ray(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    ray = library("ray", "pip install ray", "The Ray baseline")
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR", "num_cpus": 2}
    paths = os.pathsep.join(path for path in sys.path if path)
    runtime_env = {"env_vars": {"PYTHONPATH": paths}}
    ray.init(address="local", object_store_memory=3 * nbytes + (256 << 20), runtime_env=runtime_env, **quiet)
    try:
        actor = ray.remote(RayHolder).remote(specs(tensors))
        ray.get(actor.load.remote({}))
        yield None
        while True:
            values = {name: flat(tensor).numpy() for name, tensor in tensors.items()}
            same = ray.get(actor.load.remote(ray.put(values)))
            yield tensors if same == fingerprint_tail(tensors) else {}
    finally:
        ray.shutdown()


class RayHolder:
    """The actor of the Ray baseline: resident parameters."""

    def __init__(self, specs: list[TensorSpec]) -> None:
        self._tensors = resident(specs, "cpu")

    def load(self, values: dict[str, Any]) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the store's arrays cannot be written; they are only read
            for name, array in values.items():
                flat(self._tensors[name]).copy_(torch.from_numpy(array))
        return fingerprint_tail(self._tensors)


def fingerprint_tail(tensors: Tensors) -> str:
    """Of the first and last tensor only: cheap enough to stay within the clock."""
    names = list(tensors)
    return fingerprint({name: flat(tensors[name])[:4096] for name in (names[0], names[-1])})


# ---- torch.multiprocessing


def _handles_send(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    yield None
    while True:
        for item in tensors.items():
            conn.send(item)
        yield None


def _handles_recv(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    yield None
    while True:
        for _ in tensors:
            name, value = conn.recv()
            tensors[name].copy_(value)
        yield None


def _flattened_send(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    first = next(iter(tensors.values()))
    packs = pieces(specs(tensors), PACK_BYTES)
    size = max(pack[-1][2] + pack[-1][3] for pack in packs)
    buckets = [torch.zeros(size, dtype=torch.uint8, device=first.device) for _ in range(2)]
    yield None
    while True:
        for i, pack in enumerate(packs):
            if i >= len(buckets):
                conn.recv()
            move(tensors, pack, buckets[i % 2], out=True)
            synchronize(first.device.type)
            conn.send(buckets[i % 2])
        for _ in range(min(len(packs), len(buckets))):
            conn.recv()
        yield None


def _flattened_recv(tensors: Tensors, conn: Connection[Any, Any]) -> Steps:
    device = next(iter(tensors.values())).device.type
    packs = pieces(specs(tensors), PACK_BYTES)
    yield None
    while True:
        for pack in packs:
            move(tensors, pack, conn.recv(), out=False)
            synchronize(device)
            conn.send("free")
        yield None


_BOTH = ("cpu", "cuda")
#: name -> method.
METHODS: dict[str, Method] = {
    "copy": Method(
        covers="the bytes copied between two existing buffers of one process, one thread, 64 MiB a call",
        send=_copy(64 << 20),
        recv=None,
        devices=_BOTH,
    ),
    "copy-flat": Method(
        covers="the same in one call, for which the C library may write past the cache",
        send=_copy(1 << 60),
        recv=None,
        devices=_BOTH,
    ),
    "gloo": Method(
        covers="torch.distributed broadcast of each tensor into resident parameters",
        send=_gloo_each(0),
        recv=_gloo_each(1),
    ),
    "gloo-packed": Method(
        covers="pack into 256 MiB, broadcast, unpack into resident parameters",
        send=_gloo_packed(0),
        recv=_gloo_packed(1),
    ),
    "safetensors": Method(
        covers="save_file to /dev/shm, load_file, copy into resident parameters",
        send=_file_send,
        recv=_file_recv,
        needs=("safetensors",),
    ),
    "ray": Method(
        covers="ray.put of a dict of uint8 arrays, an actor's copy into resident parameters",
        send=_ray,
        recv=None,
        needs=("ray",),
    ),
    "mp-tensors": Method(
        covers="torch.multiprocessing: a handle per tensor (parameters stay in shared memory), copy into parameters",
        send=_handles_send,
        recv=_handles_recv,
        devices=_BOTH,
        max_tensors=1000,  # a descriptor each
    ),
    "mp-flattened": Method(
        covers="pack into 2 x 256 MiB shared buckets, a handle per bucket, unpack into resident parameters",
        send=_flattened_send,
        recv=_flattened_recv,
        devices=_BOTH,
    ),
    "nixl-raw": Method(
        covers="NIXL WRITE of the same number of bytes, 256 MiB a time; no pack, no load",
        send=raw.nixl_send,
        recv=raw.nixl_recv,
        needs=("nixl_cu12", "nixl_cu13"),
        devices=_BOTH,
    ),
    "ucxx-raw": Method(
        covers="UCXX tag send of the same number of bytes, 256 MiB a time; no pack, no load",
        send=raw.ucxx_send,
        recv=raw.ucxx_recv,
        needs=("ucxx",),
        devices=_BOTH,
    ),
    "cuda-ipc": Method(
        covers="the receiver's copy of each tensor out of the sender's memory, handles opened before",
        send=raw.ipc_send,
        recv=raw.ipc_recv,
        devices=("cuda",),
    ),
    "cuda-ipc-flat": Method(
        covers="the receiver's one copy of all bytes out of the sender's memory, handle opened before",
        send=raw.ipc_flat_send,
        recv=raw.ipc_flat_recv,
        devices=("cuda",),
    ),
}
