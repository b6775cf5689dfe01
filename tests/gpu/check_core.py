"""CUDA paths of the core on one GPU, run by hand: kernels bit-exact, then refits between two processes, with figures.

    python tests/gpu/check_core.py [--backends local,nixl,ucx] [--models 0.6b,8b] [--rounds 6]

It prints one line a case and exits with 1 when a value is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), *(str(Path(__file__).parents[2] / d) for d in ("backends", "adapters"))]

import torch  # noqa: E402

import weightbus  # noqa: E402
from weightbus import digest as digests  # noqa: E402
from weightbus.testing.peers import ParentLink, Peer  # noqa: E402

HERE = str(Path(__file__).resolve())
DEVICE = torch.device("cuda:0")


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Qwen3 checkpoint shapes."""
    hidden, layers, inter, heads, kv = {"0.6b": (1024, 28, 3072, 16, 8), "8b": (4096, 36, 12288, 32, 8)}[model]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (151936, hidden), "model.norm.weight": (hidden,)}
    if model == "8b":
        found["lm_head.weight"] = (151936, hidden)
    for i in range(layers):
        at = f"model.layers.{i}."
        found |= {
            at + "self_attn.q_proj.weight": (heads * 128, hidden),
            at + "self_attn.k_proj.weight": (kv * 128, hidden),
            at + "self_attn.v_proj.weight": (kv * 128, hidden),
            at + "self_attn.o_proj.weight": (hidden, heads * 128),
            at + "self_attn.q_norm.weight": (128,),
            at + "self_attn.k_norm.weight": (128,),
            at + "mlp.gate_proj.weight": (inter, hidden),
            at + "mlp.up_proj.weight": (inter, hidden),
            at + "mlp.down_proj.weight": (hidden, inter),
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
        }
    return found


class Flat(torch.nn.Module):
    """Parameters by dotted names."""

    def __init__(self, wanted: dict[str, tuple[int, ...]], fill: float | None) -> None:
        super().__init__()
        for name, shape in wanted.items():
            value = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
            value.normal_() if fill is None else value.fill_(fill)
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(value, requires_grad=False))


def checksum(module: torch.nn.Module) -> int:
    """Sum of all parameters' bits as int64: exact, order-free within a tensor, weighted by its place."""
    total = 0
    for i, p in enumerate(module.parameters()):
        total += (i + 1) * int(p.view(torch.int16).sum(dtype=torch.int64))
    return total


def engine(link: ParentLink, address: str, model: str, backend: str) -> None:
    target = Flat(shapes(model), float("nan"))
    with weightbus.WeightBus.receiver(
        address,
        backend=backend,
        device=DEVICE,
        adapter="weightbus_torch:TorchAdapter",
        adapter_options={"module": target},
    ) as bus:
        link.send("up")
        while True:
            report = bus.recv(timeout=120)
            torch.cuda.synchronize()
            link.send(report.seconds)
            if link.recv(120) == "check":
                link.send(checksum(target))
                if link.recv(120) == "end":
                    return


def ipc_reader(link: ParentLink, handles: list[Any], shape_list: list[tuple[int, ...]]) -> None:
    """The baseline: maps the sender's tensors once, copies them with one foreach and with one loop."""
    del shape_list
    sources = [fn(*args) for fn, args in handles]
    mine = [torch.empty_like(s) for s in sources]
    link.send("up")
    while (how := link.recv(120)) != "end":
        torch.cuda.synchronize()
        start = time.perf_counter()
        if how == "foreach":
            torch._foreach_copy_(mine, sources)
        else:
            for m, s in zip(mine, sources, strict=True):
                m.copy_(s)
        torch.cuda.synchronize()
        link.send(time.perf_counter() - start)


def ipc_baseline(source: torch.nn.Module) -> float:
    """Seconds of the faster of two ways to copy all tensors out of another process's memory."""
    from torch.multiprocessing.reductions import reduce_tensor

    handles = [reduce_tensor(p.detach()) for p in source.parameters()]
    with Peer(f"{HERE}:ipc_reader", (handles, [])) as peer:
        peer.recv(120)
        best = []
        for how in ("foreach", "loop"):
            times = []
            for _ in range(6):
                peer.send(how)
                times.append(peer.recv(120))
            best.append(statistics.median(times[1:]))
        peer.send("end")
    return min(best)


def refits(
    model: str, backend: str, direct: bool, verify: bool, bucket: str, rounds: int, slots: int
) -> tuple[float, float, dict[str, float], int]:
    """Cold seconds, median steady seconds, phases of the last, payload bytes."""
    source = Flat(shapes(model), None)
    nbytes = sum(p.nbytes for p in source.parameters())
    with (
        weightbus.WeightBus.sender(
            "tcp://127.0.0.1:0",
            receivers=1,
            backend=backend,
            device=DEVICE,
            direct=direct,
            verify=verify,
            bucket_bytes=bucket,
            slots=slots,
        ) as bus,
        Peer(f"{HERE}:engine", (bus.address, model, backend)) as peer,
    ):
        peer.recv(180)
        times, report = [], None
        for version in range(rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            report = bus.send(source, version=version, timeout=100)
            times.append(time.perf_counter() - start)
            theirs = peer.recv(120)
            if version in (0, rounds - 1):
                peer.send("check")
                got, want = peer.recv(120), checksum(source)
                if got != want:
                    raise SystemExit(f"WRONG VALUES: {model} {backend} direct={direct} verify={verify}")
                peer.send("end" if version == rounds - 1 else "go")
            else:
                peer.send("go")
            with torch.no_grad():
                for p in source.parameters():
                    p.add_(1)
    phases = {**(report.seconds if report else {}), **{f"rx_{k}": v for k, v in theirs.items()}}
    return times[0], statistics.median(times[1:]), phases, nbytes


def kernels() -> None:
    from weightbus import gpu

    gpu.warm_up(DEVICE)
    for n in (1, 7, 16, 65535, 65536, 65537, 1 << 20, (1 << 24) + 13):
        t = torch.randint(0, 256, (n + 64,), dtype=torch.uint8, device=DEVICE)
        assert gpu.digest(t, n) == digests.digest(t.cpu(), n), f"digest of {n} bytes"
    pieces_cpu, offset, pieces = [], 0, []
    for n in (3, 64, 1, 100_000, 5, 1_000_003, 16, 70_000, 2):
        src = torch.randint(0, 256, (n + 1,), dtype=torch.uint8, device=DEVICE)
        view = src[1:] if n % 2 and n > 100 else src[:n]
        pieces_cpu.append((offset, view))
        pieces.append((offset, view.data_ptr(), n))
        offset += -(-n // 16) * 16
    for with_digest in (True, False):
        bucket = torch.full((offset,), 0, dtype=torch.uint8, device=DEVICE)
        table = gpu.Pieces.of(bucket, pieces)
        pending = table.gather(digest=with_digest)
        torch.cuda.synchronize()
        for at, view in pieces_cpu:
            assert torch.equal(bucket[at : at + view.numel()], view), f"gather at {at}, digest {with_digest}"
        if with_digest:
            assert pending.value() == digests.digest(bucket.cpu(), table.used_bytes), "fused gather digest"
        keep = [v.clone() for _, v in pieces_cpu]
        for _, v in pieces_cpu:
            v.fill_(0xA5)
        pending = table.scatter(digest=with_digest)
        torch.cuda.synchronize()
        for k, (_, v) in zip(keep, pieces_cpu, strict=True):
            assert torch.equal(k, v), f"scatter, digest {with_digest}"
        if with_digest:
            assert pending.value() == digests.digest(bucket.cpu(), table.used_bytes), "fused scatter digest"
    virtual = gpu.PieceDigest(pieces, DEVICE).start().value()
    assert virtual == digests.digest(bucket.cpu(), table.used_bytes), "digest of pieces where they lie"
    into = [torch.zeros_like(v) for _, v in pieces_cpu]
    odd = [torch.zeros(v.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:] for _, v in pieces_cpu]
    for targets in (into, odd):
        sources = [v for _, v in pieces_cpu]
        copy = gpu.CopyPlan(
            [t.data_ptr() for t in targets], [s.data_ptr() for s in sources], [s.numel() for s in sources], DEVICE
        )
        assert copy(digest=True).value() == virtual, "digest of a pull"
        assert all(torch.equal(t, s) for t, s in zip(targets, sources, strict=True)), "a pull with its digest"
    print("kernels: bit-exact")
    big = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device=DEVICE)
    other = torch.empty_like(big)
    whole = [(0, other.data_ptr(), 1 << 30)]
    for mib in (64, 256, 1024):
        n = mib << 20
        table = gpu.Pieces.of(big[:n], [(0, other.data_ptr(), n)])
        rates = {
            "digest": _rate(
                lambda n=n: gpu._launch(
                    "leaf_digests", DEVICE, gpu._leaf_blocks(n), (big.data_ptr(), gpu._u64(n), other.data_ptr())
                ),
                n,
            ),
            "copy_": _rate(lambda n=n: other[:n].copy_(big[:n]), n),
            "gather": _rate(lambda t=table: t.gather(digest=False), n),
            "gather+digest": _rate(lambda t=table: t.gather(digest=True), n),
            "scatter+digest": _rate(lambda t=table: t.scatter(digest=True), n),
            "sum (read rate)": _rate(lambda n=n: big[:n].view(torch.int64).max(), n),
        }
        print(f"{mib:5d} MiB " + "  ".join(f"{k} {v:7.0f} GB/s" for k, v in rates.items()))
    del whole


def _rate(call: Any, nbytes: int) -> float:
    for _ in range(3):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        call()
    end.record()
    torch.cuda.synchronize()
    return nbytes * 10 / start.elapsed_time(end) / 1e6


def slow_producer() -> None:
    """A kernel that still writes the source when send is called: the receiver gets what it writes."""
    source = {"w": torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)}
    target = torch.nn.ParameterDict(
        {"w": torch.nn.Parameter(torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE), requires_grad=False)}
    )
    import threading

    for backend, direct in (("loopback", False), ("loopback", True)):
        with weightbus.WeightBus.sender(
            "tcp://127.0.0.1:0", receivers=1, backend=backend, device=DEVICE, direct=direct, bucket_bytes="16MiB"
        ) as bus:
            with weightbus.WeightBus.receiver(
                bus.address,
                backend=backend,
                device=DEVICE,
                adapter="weightbus_torch:TorchAdapter",
                adapter_options={"module": target},
            ) as rx:
                thread = threading.Thread(target=rx.recv, kwargs={"timeout": 60})
                thread.start()
                side = torch.cuda.Stream()
                with torch.cuda.stream(side):
                    torch.cuda._sleep(400_000_000)
                    source["w"].fill_(7)
                    bus.send(source, version=1, timeout=60)
                thread.join()
                assert bool((target["w"] == 7).all()), (
                    f"sent before the producer's stream was done ({backend}, direct={direct})"
                )
        source["w"].zero_()
    print("a slow producer kernel is waited for")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backends", default="local")
    parser.add_argument("--models", default="0.6b,8b")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--buckets", default="1GiB")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--modes", default="direct,streamed")
    parser.add_argument("--skip-kernels", action="store_true")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    if not args.skip_kernels:
        kernels()
        slow_producer()
    for model in args.models.split(","):
        base = ipc_baseline(Flat(shapes(model), None))
        print(f"{model}: torch CUDA IPC copy {base * 1e3:.2f} ms")
        torch.cuda.empty_cache()
        for backend in args.backends.split(","):
            for direct in (True, False) if backend in ("local", "nixl") else (False,):
                if ("direct" if direct else "streamed") not in args.modes.split(","):
                    continue
                for verify in (False, True):
                    for bucket in ["1GiB"] if direct else args.buckets.split(","):
                        try:
                            cold, steady, phases, nbytes = refits(
                                model, backend, direct, verify, bucket, args.rounds, args.slots
                            )
                        except Exception as exc:
                            print(
                                f"{model} {backend} direct={direct} verify={verify} {bucket}: FAILED {type(exc).__name__}: {str(exc)[:600]}"
                            )
                            continue
                        text = " ".join(f"{k}={v * 1e3:.1f}" for k, v in phases.items())
                        print(
                            f"{model} {backend} {'direct' if direct else 'streamed ' + bucket} digest={'on' if verify else 'off'}: cold {cold * 1e3:.1f} ms, steady {steady * 1e3:.2f} ms, {nbytes / steady / 1e9:.0f} GB/s, {steady / base:.2f} x ipc | {text}",
                            flush=True,
                        )
                        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
