"""SGLang payloads by CUDA IPC, read as the server's ranks read them: in processes of their own, bit-exact, with rates.

Run from the repository: ``PYTHONPATH=.:backends:adapters python tests/gpu/check_sglang.py``. Needs one CUDA device, and
uses a second one where there is one. Ends with "all good" and code 0.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import time
import types
from contextlib import ExitStack

import torch

if importlib.util.find_spec("httpx") is None:  # the payload needs none
    sys.modules["httpx"] = types.ModuleType("httpx")

from weightbus_sglang.payload import flatten, serialise

Batch = list[tuple[str, torch.Tensor]]
#: a rank of the server: torch's rebuild is made to take a uuid for the device's index, then the bucket is cut
RANK = """
import base64, hashlib, pickle, sys
import torch
from torch.multiprocessing import reductions
torch.zeros(1, device="cuda")
original = reductions.rebuild_cuda_tensor
def rebuild(*args):
    args = list(args)
    if isinstance(args[6], str):
        uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        args[6] = uuids.index(args[6])
    return original(*args)
reductions.rebuild_cuda_tensor = rebuild
print("up", flush=True)
for line in sys.stdin:
    content = pickle.loads(base64.b64decode(line))
    flat = content["flattened_tensor"]
    for m in content["metadata"]:
        tensor = flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape)
        data = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        print(m.name, tuple(m.shape), m.dtype, tensor.device, hashlib.sha256(data).hexdigest())
    del content, flat, tensor
    print("end", flush=True)
"""


class Rank:
    """A process with its own CUDA context."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines("up\n")

    def _lines(self, last: str) -> list[str]:
        lines = []
        for line in self.process.stdout or ():
            if line == last:
                return lines
            lines.append(line.strip())
        raise RuntimeError("the rank died")

    def read(self, payload: bytes) -> list[str]:
        """What it finds in `payload`, a line per tensor."""
        if self.process.stdin is None:
            raise RuntimeError("no pipe")
        self.process.stdin.write(payload.decode() + "\n")
        self.process.stdin.flush()
        return self._lines("end\n")

    def close(self) -> None:
        self.process.communicate(timeout=60)


def expected(batch: Batch) -> list[str]:
    lines = []
    for name, tensor in batch:
        data = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        lines.append(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.device} {hashlib.sha256(data).hexdigest()}")
    return lines


def batch_of(seed: int, device: str = "cuda:0") -> Batch:
    torch.manual_seed(seed)
    weight = torch.randn(300, 70, device=device)
    return [
        ("float32", weight), ("bfloat16", weight.bfloat16()), ("fp8", weight.to(torch.float8_e4m3fn)),
        ("strided", weight.t()), ("scalar", weight[0, 0]), ("empty", weight[:0]), ("bool", weight > 0),
    ]  # fmt: skip


def check(name: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise SystemExit(f"{name}: FAILED\n  found  {found}\n  wanted {wanted}")
    print(f"{name}: good")


def one_bucket_for_all(ranks: list[Rank]) -> None:
    for seed in (0, 1):  # twice: the second bucket may lie in the memory of the first
        batch = batch_of(seed)
        flat, items = flatten(batch)
        torch.cuda.synchronize()
        payloads = [serialise(flat, items) for _ in ranks]
        check("each rank has a handle of its own", payloads[0] != payloads[1], True)
        for rank, payload in zip(ranks, payloads, strict=True):
            check(f"one bucket, round {seed}", rank.read(payload), expected(batch))


def own_buckets(ranks: list[Rank]) -> None:
    batches = [batch_of(2), batch_of(3)]
    buckets = [flatten(batch) for batch in batches]
    torch.cuda.synchronize()
    found = [rank.read(serialise(*bucket)) for rank, bucket in zip(ranks, buckets, strict=True)]
    check("a bucket for each rank", found, [expected(batch) for batch in batches])


def refilled_slot(ranks: list[Rank]) -> None:
    slot = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    view = slot[4096:8192].view(torch.float32).reshape(32, 32)
    view.normal_()
    wanted = expected([("view", view)])
    flat, items = flatten([("view", view)])
    slot.fill_(0xA5)
    torch.cuda.synchronize()
    check("only the bytes in use", flat.numel(), 4096)
    check("a slot that is filled again", ranks[0].read(serialise(flat, items)), wanted)


def second_gpu(ranks: list[Rank]) -> None:
    if torch.cuda.device_count() < 2:
        print("second GPU: there is none here")
        return
    batch = batch_of(4, "cuda:1")
    flat, items = flatten(batch)
    torch.cuda.synchronize(1)
    check("a bucket on the second GPU", ranks[0].read(serialise(flat, items)), expected(batch))


def rates() -> None:
    slot = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    batch = [(f"w{i}", slot[i << 22 : (i + 1) << 22].view(torch.bfloat16)) for i in range(256)]
    for step in range(3):
        start = time.perf_counter()
        flat, items = flatten(batch)
        torch.cuda.synchronize()
        copied = time.perf_counter()
        size = len(serialise(flat, items))
        ended = time.perf_counter()
        print(
            f"1 GiB in 256 tensors, {step}: copy {1e3 * (copied - start):.2f} ms, "
            f"handle {1e3 * (ended - copied):.2f} ms, payload {size} bytes"
        )


def main() -> None:
    with ExitStack() as stack:
        ranks = [Rank(), Rank()]
        for rank in ranks:
            stack.callback(rank.close)
        for step in (one_bucket_for_all, own_buckets, refilled_slot, second_gpu):
            step(ranks)
    rates()
    print("all good")


if __name__ == "__main__":
    main()
