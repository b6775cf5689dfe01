"""Backend `local` on a real GPU: buckets and pulls between processes, bit-exact, with rates. Needs one CUDA device.

Run from the repository: ``PYTHONPATH=.:backends python tests/gpu/check_local.py``. Ends with "all good" and code 0.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from weightbus.backend import EndpointSpec, State
from weightbus.errors import PeerLost, TransportError
from weightbus_local import LocalBackend
from weightbus_local.cuda import driver

KEY = bytes(range(16))
MIB = 1 << 20
CUDA = torch.device("cuda", 0)
SHAPES = [(151936, 1024)] + [(2048, 1024), (1024, 1024), (1024, 2048), (3072, 1024), (1024,), (128,), (1024, 3072)] * 43


def check(what: str, good: bool) -> None:
    print(f"{'ok  ' if good else 'FAIL'} {what}", flush=True)
    if not good:
        sys.exit(1)


def endpoint(role: str) -> Any:
    return LocalBackend().endpoint(EndpointSpec(name=role, role=role, device=CUDA))


def until(done: Callable[[], Any], *endpoints: Any, timeout_s: float = 60.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (value := done()):
        if time.monotonic() > end:
            raise TimeoutError("it did not happen in time")
        for one in endpoints:
            one.progress()
    return value


def noise(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device=CUDA).manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=CUDA, generator=generator)


def model(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(device=CUDA).manual_seed(seed)
    return [torch.randn(shape, dtype=torch.bfloat16, device=CUDA, generator=generator) for shape in SHAPES]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.to(b.device).view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


# ---- buckets


def bucket_sender(pipe: Any, address: bytes, nbytes: int, rounds: int) -> None:
    sender = endpoint("send")
    regions = [sender.allocate(nbytes) for _ in range(2)]
    tx = sender.connect(address, KEY, 10)
    for k in range(rounds):
        regions[k % 2].tensor.copy_(noise(nbytes, k))
        event = torch.cuda.Event()
        event.record()
        until(event.query)
        work = tx.post_send(regions[k % 2], nbytes, f"{k}".encode(), k % 2)
        until(lambda work=work: work.state is State.DONE, sender)
        if k:
            pipe.recv()  # the credit of the bucket before
    pipe.recv()
    sender.free(regions.pop())
    pipe.send("freed")
    until(pipe.poll, sender)
    pipe.recv()
    gc.collect()
    free_before = torch.cuda.mem_get_info()[0]
    sender.close()
    regions.clear()
    gc.collect()
    pipe.send(torch.cuda.mem_get_info()[0] - free_before)


def check_buckets(nbytes: int = 256 * MIB, rounds: int = 6) -> None:
    receiver = endpoint("receive")
    rx = receiver.listen(KEY, [])
    with Child(bucket_sender, receiver.address, nbytes, rounds) as child:
        local, rates, addresses = torch.empty(nbytes, dtype=torch.uint8, device=CUDA), [], set()
        for k in range(rounds):
            (arrival,) = until(rx.arrivals, receiver)
            torch.cuda.synchronize()
            start = time.perf_counter()
            local.copy_(arrival.region.tensor[: arrival.nbytes])
            torch.cuda.synchronize()
            rates.append(nbytes / (time.perf_counter() - start) / 1e9)
            addresses.add(arrival.region.tensor.data_ptr())
            if arrival.header != f"{k}".encode() or not torch.equal(local, noise(nbytes, k)):
                check(f"bucket {k} is bit-exact", False)
            rx.release(arrival)
            child.send("credit")
        check(f"{rounds} buckets of {nbytes // MIB} MiB, GPU to GPU, bit-exact, 2 mappings", len(addresses) == 2)
        print(f"     copy out of the sender's bucket: median {statistics.median(rates):.0f} GB/s")
        del arrival
        child.recv()
        until(lambda: len(rx._mappings) == 1, receiver)
        child.send("close")
        check("the freed region was unmapped by the reader", True)
        until(lambda: rx.error, receiver)
        check("the closed sender is PeerLost at the reader", isinstance(rx.error, PeerLost))
        given_back = child.recv()
        check(f"the sender's close gave {given_back // MIB} MiB back", given_back >= nbytes)
    receiver.close()


def holding_receiver(pipe: Any, nbytes: int) -> None:
    receiver = endpoint("receive")
    rx = receiver.listen(KEY, [])
    pipe.send(receiver.address)
    (arrival,) = until(rx.arrivals, receiver)
    pipe.send("held")
    pipe.recv()
    until(lambda: rx.error, receiver)
    pipe.send(bool(torch.equal(arrival.region.tensor, noise(nbytes, 5))))
    pipe.recv()


def check_held_memory(nbytes: int = 64 * MIB) -> None:
    sender = endpoint("send")
    region = sender.allocate(nbytes)
    region.tensor.copy_(noise(nbytes, 5))
    torch.cuda.synchronize()
    with Child(holding_receiver, nbytes) as child:
        tx = sender.connect(child.recv(), KEY, 10)
        tx.post_send(region, nbytes, b"", 0)
        check("a reader holds a bucket", child.recv() == "held")
        memory = weakref.ref(region.handle.owner)
        sender.close()
        del region, tx
        gc.collect()
        check("closing does not free what a reader holds", memory() is not None)
        child.send("look")
        check("the held bucket is intact after the sender's close", child.recv() is True)
        child.kill()
    before = torch.cuda.mem_get_info()[0]
    endpoint("send").close()
    freed = torch.cuda.mem_get_info()[0] - before
    check(f"{freed // MIB} MiB are freed once the reader has died", memory() is None and freed >= nbytes)


def check_in_process(nbytes: int = 16 * MIB) -> None:
    sender, receiver = endpoint("send"), endpoint("receive")
    rx = receiver.listen(KEY, [])
    tx = sender.connect(receiver.address, KEY, 10)
    region = sender.allocate(nbytes)
    region.tensor.copy_(noise(nbytes, 1))
    torch.cuda.synchronize()
    tx.post_send(region, nbytes, b"", 0)
    (arrival,) = until(rx.arrivals, receiver, sender)
    check("in one process the very memory arrives", arrival.region.tensor.data_ptr() == region.tensor.data_ptr())
    rx.release(arrival)
    mine = noise(4 * MIB, 2)[1 * MIB : 3 * MIB]
    tx.post_send(sender.register(mine), mine.numel(), b"", 1)
    (arrival,) = until(rx.arrivals, receiver, sender)
    check("a registered slice of a torch tensor arrives", torch.equal(arrival.region.tensor, mine))
    sources, local = model(3)[:20], [torch.zeros_like(t) for t in model(3)[:20]]
    work = receiver.post_read(sender.export(sources), local)
    until(lambda: work.state is not State.PENDING, receiver)
    check("a pull in one process is bit-exact", work.state is State.DONE and same(sources, local))
    sender.close()
    receiver.close()


# ---- pulls


def exporter(pipe: Any) -> None:
    sender = endpoint("send")
    tensors = model(1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    pipe.send(sender.export(tensors))
    first_s = time.perf_counter() - start
    start = time.perf_counter()
    sender.export(tensors)
    pipe.send((first_s, time.perf_counter() - start))
    pipe.recv()
    for tensor, new in zip(tensors, model(2), strict=True):
        tensor.copy_(new)
    torch.cuda.synchronize()
    pipe.send(sender.export(tensors))
    pipe.recv()


def pull(receiver: Any, remote: bytes, local: list[torch.Tensor]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work = receiver.post_read(remote, local)
    until(lambda: work.state is not State.PENDING, receiver)
    if work.state is not State.DONE:
        raise work.error or RuntimeError("the pull failed")
    return time.perf_counter() - start


def check_pull() -> None:
    receiver = endpoint("receive")
    local = [torch.full(shape, float("nan"), dtype=torch.bfloat16, device=CUDA) for shape in SHAPES]
    nbytes = sum(t.nbytes for t in local)
    with Child(exporter) as child:
        remote = child.recv()
        first_s, again_s = child.recv()
        cold_s = pull(receiver, remote, local)
        check(f"a pull of {len(local)} tensors, {nbytes / 1e9:.2f} GB, is bit-exact", same(local, model(1)))
        child.send("change")
        check("the export of unmoved tensors is unchanged", child.recv() == remote)
        times = [pull(receiver, remote, local) for _ in range(7)]
        check("changed values are pulled through the same mapping", same(local, model(2)))
        host = [torch.zeros(shape, dtype=torch.bfloat16) for shape in SHAPES]
        pull(receiver, remote, host)
        check("a pull into host memory is bit-exact", same(host, local))
        median_s = statistics.median(times)
        print(f"     export {first_s * 1e3:.1f} ms, again {again_s * 1e3:.2f} ms; {len(remote)} bytes described")
        print(
            f"     pull: first {cold_s * 1e3:.1f} ms, then {median_s * 1e3:.2f} ms = {nbytes / median_s / 1e9:.0f} GB/s"
        )
        child.send("end")
    try:
        receiver.post_read(receiver.export([torch.zeros(4)]), [torch.zeros(4, device=CUDA)])
        check("host memory into CUDA is refused", False)
    except TransportError as exc:
        check("host memory into CUDA is refused", "direct=False" in str(exc))
    receiver.close()


def expandable(pipe: Any) -> None:
    probe = LocalBackend().probe()
    try:
        endpoint("send").export([torch.zeros(8 * MIB, device=CUDA)])
        pipe.send("exported")
    except TransportError as exc:
        pipe.send(f"{exc} // {probe.warnings}")


def check_expandable() -> None:
    with Child(expandable, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) as child:
        text = child.recv()
        print(f"     {text}")
        check("expandable segments are refused with advice, and warned of", text.count("expandable_segments") >= 1)


# ---- processes


class Child:
    """A spawned process with a pipe."""

    def __init__(self, function: Callable[..., None], *args: Any, env: dict[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(function.__name__, theirs, args), daemon=True)
        os.environ.update(env or {})
        self._process.start()
        for name in env or {}:
            del os.environ[name]
        theirs.close()

    def send(self, value: Any) -> None:
        self._pipe.send(value)

    def recv(self) -> Any:
        if not self._pipe.poll(120):
            raise TimeoutError("the child said nothing for 120 s")
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *failed: object) -> None:
        self._process.join(0 if failed[0] else 30)
        if self._process.exitcode not in (0, -9):
            self._process.kill()
            print(f"FAIL a child ended with {self._process.exitcode}")
            os._exit(1)


def _run(name: str, pipe: Any, args: tuple[Any, ...]) -> None:
    globals()[name](pipe, *args)


def main() -> None:
    probe = LocalBackend().probe()
    print(probe.facts, probe.warnings)
    check("the driver names the GPU", len(driver().uuid(0)) == 16 and driver().device_of(driver().uuid(0)) == 0)
    check_in_process()
    check_buckets()
    check_held_memory()
    check_pull()
    check_expandable()
    print("all good")


if __name__ == "__main__":
    main()
