"""Backend `ucx` on a real GPU: buckets between two processes, bit-exact, with rates beside a raw ``ucxx`` loop.

Run from the repository: ``PYTHONPATH=.:backends python tests/gpu/check_ucx.py [--settings]``. Needs one CUDA device and
CuPy. Ends with "all good" and code 0. With ``--settings`` it compares UCX settings instead.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from weightbus.backend import EndpointSpec, State
from weightbus_ucx import UcxBackend
from weightbus_ucx.library import environment_kept, load, settings_for
from weightbus_ucx.memory import allocate

KEY = bytes(range(16))
MIB = 1 << 20
ROUNDS = 8
PAIRS = (("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda"))
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "get-zcopy off": {"config": {"CUDA_IPC_ENABLE_GET_ZCOPY": "n"}},
    "put": {"config": {"RNDV_SCHEME": "put_zcopy"}},
    "get": {"config": {"RNDV_SCHEME": "get_zcopy"}},
    "fragments in host memory": {"config": {"RNDV_FRAG_MEM_TYPE": "host"}},
    "two rails": {"config": {"MAX_RNDV_RAILS": "2"}},
    "pipeline with errors": {"config": {"RNDV_PIPELINE_ERROR_HANDLING": "y"}},
    "without cma": {"tls": "^cma"},
}


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def device_of(kind: str) -> torch.device:
    return torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")


def until(done: Callable[[], Any], *endpoints: Any, timeout_s: float = 120.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (value := done()):
        if time.monotonic() > end:
            raise TimeoutError("it did not happen in time")
        for one in endpoints:
            one.progress()
    return value


def synchronise(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def receive(pipe: Any, credits_: Any, kind: str, nbytes: int, options: dict[str, Any]) -> None:
    """Two slots; the first and the last bucket are compared in full, outside the time."""
    end = UcxBackend(**options).endpoint(
        EndpointSpec(name="receive", role="receive", device=device_of(kind), host="127.0.0.1")
    )
    regions = [end.allocate(nbytes) for _ in range(2)]
    for region in regions:
        region.tensor.fill_(0xA5)
    synchronise(kind)
    channel = end.listen(KEY, regions)
    pipe.send(end.address)
    landed: list[Any] = []
    for place in range(ROUNDS + 2):
        landed = landed or until(channel.arrivals, end)
        arrival = landed.pop(0)
        if place in (0, ROUNDS + 1):
            used = arrival.region.tensor[: arrival.nbytes].cpu()
            good = torch.equal(used, pattern(nbytes, place % 2)[: arrival.nbytes])
            rest = bool((arrival.region.tensor[arrival.nbytes :] == 0xA5).all()) or place > 1
            pipe.send(("same", good and rest and arrival.header == b"%d" % place))
        channel.release(arrival)
        credits_.send(place)
    pipe.recv()
    end.close()


def send(pipe: Any, credits_: Any, kind: str, nbytes: int, options: dict[str, Any]) -> None:
    end = UcxBackend(**options).endpoint(
        EndpointSpec(name="send", role="send", device=device_of(kind), host="127.0.0.1")
    )
    regions = [end.allocate(nbytes) for _ in range(2)]
    for seed, region in enumerate(regions):
        region.tensor.copy_(pattern(nbytes, seed))
    synchronise(kind)
    started = time.perf_counter()
    channel = end.connect(pipe.recv(), KEY, 60)
    connect_s = time.perf_counter() - started
    works: list[Any] = []
    marks: list[float] = []
    for place in range(ROUNDS + 2):
        if place >= 2:
            until(lambda: credits_.poll(0), end)
            credits_.recv()
        marks.append(time.perf_counter())
        used = nbytes - 1 if place in (0, ROUNDS + 1) else nbytes
        works.append(channel.post_send(regions[place % 2], used, b"%d" % place, place % 2))
    until(lambda: all(work.state is not State.PENDING for work in works), end)
    failed = [work.error for work in works if work.state is not State.DONE]
    spans = [later - earlier for earlier, later in itertools.pairwise(marks[2:])]
    pipe.send((connect_s, spans, repr(failed) if failed else ""))
    pipe.recv()
    end.close()


def raw(pipe: Any, _: Any, sends: bool, kind: str, nbytes: int, options: dict[str, Any]) -> None:
    """The same library moving the same bucket between two buffers, an acknowledgement after each."""
    library = load()
    api = library.api
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    block = allocate(device_of(kind), nbytes)
    tls, config = options.get("tls"), options.get("config", {})
    with environment_kept():
        settings = settings_for("127.0.0.1", cuda=kind == "cuda", tls=tls, config=config)
        context = api.UCXContext(settings, feature_flags=(api.Feature.TAG, api.Feature.WAKEUP))
        worker = api.UCXWorker(context)
    pipe.send(bytes(worker.address))
    peer = api.UCXEndpoint.create_from_worker_address(worker, api.UCXAddress.create_from_buffer(pipe.recv()), True)
    buffer = library.array(block.tensor if kind == "cuda" else block.tensor.numpy())
    ack = library.array(bytearray(1))

    def wait(request: Any) -> None:
        while not request.completed:
            worker.progress_once()
        request.check_error()

    spans = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        if sends:
            wait(peer.tag_send(buffer, api.UCXXTag(1)))
            wait(worker.tag_recv(ack, api.UCXXTag(2)))
        else:
            wait(worker.tag_recv(buffer, api.UCXXTag(1)))
            wait(peer.tag_send(ack, api.UCXXTag(2)))
        spans.append(time.perf_counter() - started)
    pipe.send((0.0, spans, ""))
    pipe.recv()


def run(name: str, targets: list[tuple[Any, ...]], nbytes: int, exchange: Callable[[Any, Any], Any]) -> bool:
    context = multiprocessing.get_context("spawn")
    pipes, processes, credit = [], [], context.Pipe()
    for (target, *args), between in zip(targets, credit, strict=True):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=target, args=(theirs, between, *args), daemon=True))
        processes[-1].start()
        theirs.close()
        between.close()
        pipes.append(mine)
    good, text = False, "no answer"
    try:
        connect_s, spans, failed, same = exchange(*pipes)
        rates = sorted(nbytes / span / 1e9 for span in spans[1:])
        text = f"median {statistics.median(rates):8.2f}  {rates[0]:8.2f} to {rates[-1]:8.2f} GB/s"
        text += f"  connect {connect_s * 1e3:.0f} ms" if connect_s else ""
        for pipe in pipes:
            pipe.send("end")
        for process in processes:
            process.join(30)
        codes = [process.exitcode for process in processes]
        good = not failed and same and codes == [0, 0]
        text += f"  {failed}" if failed else ""
        text += "" if good else f"  FAILED: same {same}, exit codes {codes}"
    except (EOFError, TimeoutError, OSError) as exc:
        text = f"FAILED: {exc!r}"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    print(f"{'ok  ' if good else 'FAIL'} {name:48s} {nbytes // MIB:5d} MiB  {text}", flush=True)
    return good


def pass_on(receiver: Any, sender: Any) -> tuple[float, list[float], str, bool]:
    """Pass the address on, then take what both say."""
    sender.send(receiver.recv())
    connect_s, spans, failed = sender.recv()
    return connect_s, spans, failed, receiver.recv()[1] and receiver.recv()[1]


def swap(receiver: Any, sender: Any) -> tuple[float, list[float], str, bool]:
    ours, theirs = receiver.recv(), sender.recv()
    receiver.send(theirs)
    sender.send(ours)
    receiver.recv()
    return (*sender.recv(), True)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 1
    print(torch.cuda.get_device_name(0), torch.__version__, UcxBackend().probe())
    settings = "--settings" in sys.argv
    good = True
    for source, target in PAIRS:
        sizes = [256 * MIB] if settings else [64 * MIB, 256 * MIB, 1024 * MIB]
        if "cpu" in (source, target):  # a slow path
            sizes = sizes[:1]
        for name, options in VARIANTS.items() if settings else [("default", {})]:
            for nbytes in sizes:
                label = f"{source} to {target}, {name}"
                receiver = (receive, target, nbytes, options)
                good &= run(label, [receiver, (send, source, nbytes, options)], nbytes, pass_on) or settings
                two = [(raw, False, target, nbytes, options), (raw, True, source, nbytes, options)]
                good &= run(f"{label}, raw ucxx", two, nbytes, swap) or settings
    print("all good" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
