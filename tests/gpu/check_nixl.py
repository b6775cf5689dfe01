"""Backend `nixl` on a real GPU: buckets and pulls between two processes, bit-exact, with rates beside raw NIXL.

    PYTHONPATH=.:backends python tests/gpu/check_nixl.py          # one CUDA device, two processes on it
    PYTHONPATH=.:backends python tests/gpu/check_nixl.py --cpu    # the same on host memory, small

Prints a line for each check, writes ``nixl.json`` into ``$OUT`` if that is set; ends with "all good" and code 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weightbus.backend import EndpointSpec, Region, State
from weightbus.errors import TransportError
from weightbus.testing.peers import ParentLink, Peer
from weightbus_nixl import NixlBackend

KEY = bytes(range(16))
MIB = 1 << 20
POISON = 0xA5
TAIL = 4096
ROUNDS = 12
SHAPES = [(2048, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (1024,), (128,)]
results: list[dict[str, Any]] = []


def check(what: str, good: bool, **facts: Any) -> None:
    text = " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in facts.items()
    )
    print(f"{'ok  ' if good else 'FAIL'} {what} {text}", flush=True)
    results.append({"check": what, "good": good, **facts})


def endpoint(role: str, device: str) -> Any:
    return NixlBackend().endpoint(EndpointSpec(name=role, role=role, device=torch.device(device)))


def until(done: Callable[[], Any], pump: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (value := done()):
        if time.monotonic() > end:
            raise TimeoutError("it did not happen in time")
        pump()
    return value


def fill(tensor: torch.Tensor, seed: int) -> None:
    """The same bytes on every device."""
    words = tensor.view(-1).view(torch.uint8)
    words = words[: words.numel() // 4 * 4].view(torch.int32)
    torch.arange(words.numel(), dtype=torch.int32, device=tensor.device, out=words)
    words.mul_(1103515245).add_(seed)
    synchronize(tensor.device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def same(tensor: torch.Tensor, seed: int) -> bool:
    expected = torch.empty_like(tensor)
    fill(expected, seed)
    return torch.equal(tensor.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


# The receiver's process


def receive(link: ParentLink, device: str, nbytes: int) -> None:
    """Give the address of two slots, then credit each arrival until told to end."""
    ep = endpoint("receive", device)
    slots = [ep.allocate(nbytes) for _ in range(2)]
    for slot in slots:
        slot.tensor.fill_(POISON)
    synchronize(torch.device(device))
    rx = ep.listen(KEY, slots)
    link.send(ep.address)
    while True:
        ep.progress()
        for arrival in rx.arrivals():
            seed = int(arrival.header)
            good = seed < 0 or (
                same(arrival.region.tensor[: arrival.nbytes], seed)
                and bool((arrival.region.tensor[arrival.nbytes :] == POISON).all())
            )
            rx.release(arrival)
            link.send(good)
        if link.poll() and link.recv() == "end":
            break
    ep.close()


def write(source: str, target: str, nbytes: int) -> None:
    """Buckets from a device to another: bits, then rates of the contract and of NIXL alone."""
    with Peer("tests/gpu/check_nixl.py:receive", (target, nbytes)) as peer:
        address = peer.recv()
        ep = endpoint("send", source)
        started = time.perf_counter()
        tx = ep.connect(address, KEY, 60.0)
        connect_s = time.perf_counter() - started
        regions = [ep.allocate(nbytes) for _ in range(2)]

        def move(seeds: list[int], used: int) -> tuple[float, bool]:
            """Double buffered, each slot credited before it is used again."""
            begun, good = time.perf_counter(), []
            for index, seed in enumerate(seeds):
                if index >= 2:
                    until(peer.pipe.poll, ep.progress)
                    good.append(peer.recv())
                work = tx.post_send(regions[index % 2], used, str(seed).encode(), index % 2)
                until(lambda: work.state is not State.PENDING, ep.progress)
                if work.state is not State.DONE:
                    raise RuntimeError(str(work.error))
            while len(good) < len(seeds):
                until(peer.pipe.poll, ep.progress)
                good.append(peer.recv())
            return time.perf_counter() - begun, all(good)

        fill(regions[0].tensor[: nbytes - TAIL], 7)
        _, first = move([7], nbytes - TAIL)
        fill(regions[0].tensor[: nbytes - TAIL], 8)
        fill(regions[1].tensor[: nbytes - TAIL], 9)
        _, second = move([8, 9], nbytes - TAIL)
        seconds = [move([-1] * ROUNDS, nbytes)[0] / ROUNDS for _ in range(5)]
        rate = nbytes / statistics.median(seconds) / 1e9
        raw = nbytes / raw_write(ep, tx, regions[0], nbytes) / 1e9
        check(
            f"WRITE {source} -> {target} {nbytes // MIB} MiB", first and second, gbps=rate, raw_gbps=raw,
            share=rate / raw, measured_at_connect=tx.link_bytes_per_s / 1e9, connect_s=connect_s,
        )  # fmt: skip
        peer.send("end")
        ep.close()
        peer.result()


def raw_write(ep: Any, tx: Any, region: Region, nbytes: int) -> float:
    """Seconds of one WRITE of NIXL, a prepared handle posted again and again."""
    agent, target = ep._agent, tx.target(0)
    local = agent.get_xfer_descs([(region.tensor.data_ptr(), nbytes, ep._ordinal)], ep._kind)
    remote = agent.get_xfer_descs([(target.at, nbytes, target.ordinal)], tx.address.memory)
    handle = agent.initialize_xfer("WRITE", local, remote, tx.peer)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds.append(time.perf_counter() - started)
    handle.release()
    return statistics.median(seconds)


# Pull


def model(device: str, arena: bool) -> list[torch.Tensor]:
    """300 tensors on a GPU, a few on the host."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES] * (50 if device != "cpu" else 2)
    if not arena:
        return [torch.empty(n, dtype=torch.bfloat16, device=device) for n in sizes]
    return list(torch.empty(sum(sizes), dtype=torch.bfloat16, device=device).split(sizes))


def own(link: ParentLink, device: str, arena: bool) -> None:
    """Export tensors with seeds 0, 1, ... plus what the test sends, until told to end."""
    ep = endpoint("send", device)
    tensors = model(device, arena)
    while True:
        until(link.poll, ep.progress)
        seed = link.recv()
        if seed == "end":
            break
        for index, tensor in enumerate(tensors):
            fill(tensor, seed + index)
        started = time.perf_counter()
        link.send((ep.export(tensors), time.perf_counter() - started))
    ep.close()


def pull(source: str, target: str, arena: bool) -> float:
    with Peer("tests/gpu/check_nixl.py:own", (source, arena)) as peer:
        ep = endpoint("receive", target)
        tensors = model(target, arena)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        good, seconds = True, []
        for turn in range(5):
            for tensor in tensors:
                tensor.fill_(float("nan"))
            synchronize(torch.device(target))
            peer.send(turn * 1000)
            remote, export_s = peer.recv()
            started = time.perf_counter()
            work = ep.post_read(remote, tensors)
            until(lambda: work.state is not State.PENDING, ep.progress)
            seconds.append(time.perf_counter() - started)
            if work.state is not State.DONE:
                raise RuntimeError(str(work.error))
            good = good and all(same(tensor, turn * 1000 + index) for index, tensor in enumerate(tensors))
        rate = nbytes / statistics.median(seconds[1:]) / 1e9
        check(
            f"READ {source} -> {target} {len(tensors)} tensors, {'one arena' if arena else 'apart'}", good, gbps=rate,
            mib=nbytes / MIB, first_ms=seconds[0] * 1e3, median_ms=statistics.median(seconds[1:]) * 1e3,
            export_again_ms=export_s * 1e3, segments=len(ep._spans),
        )  # fmt: skip
        peer.send("end")
        ep.close()
        peer.result()
        return rate


EXPANDABLE = """
import torch
from weightbus.backend import EndpointSpec
from weightbus.errors import TransportError
from weightbus_nixl import NixlBackend
ep = NixlBackend().endpoint(EndpointSpec(name="s", role="send", device=torch.device("cuda", 0)))
ep.allocate(1 << 20)
print(NixlBackend().probe().warnings)
try:
    ep.export([torch.zeros(1024, device="cuda")])
except TransportError as exc:
    print(exc)
    assert "expandable_segments" in str(exc)
else:
    raise SystemExit("an expandable segment was exported")
ep.close()
"""


def expandable() -> None:
    """Our own buckets work under expandable segments; torch's tensors are refused with the reason."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    check("expandable segments", done.returncode == 0, text=(done.stdout + done.stderr)[-600:].replace("\n", " | "))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    cpu = parser.parse_args().cpu
    if not cpu:
        torch.cuda.init()
    probe = NixlBackend().probe()
    check("probe", probe.ok, reason=probe.reason, facts=probe.facts, warnings=probe.warnings)
    device = "cpu" if cpu else "cuda:0"
    pairs = {(device, device): (16, 64) if cpu else (64, 256, 1024)}
    if not cpu:
        pairs |= {(device, "cpu"): (256,), ("cpu", device): (256,)}
    for (source, target), sizes in pairs.items():
        for size in sizes:
            attempt(lambda s=source, t=target, n=size: write(s, t, n * MIB), f"WRITE {source} -> {target} {size} MiB")
    for arena in (True, False):
        attempt(lambda a=arena: pull(device, device, a), f"READ arena={arena}")
    if not cpu:
        attempt(expandable, "expandable segments")
    if out := os.environ.get("OUT"):
        (Path(out) / "nixl.json").write_text(json.dumps(results, indent=1, default=str))
    if not all(result["good"] for result in results):
        sys.exit(1)
    print("all good")


def attempt(step: Callable[[], Any], what: str) -> None:
    """Go on with the other checks when one fails."""
    try:
        step()
    except (TransportError, RuntimeError, OSError, TimeoutError, subprocess.SubprocessError) as exc:
        check(what, False, error=f"{type(exc).__name__}: {exc}")
    except Exception as exc:
        check(what, False, error=f"{type(exc).__name__}: {exc}"[-3000:])


if __name__ == "__main__":
    main()
