"""What the peer processes of test_fanout and test_refit_backends run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import weightbus
from tests.bus_peers import SETTINGS
from tests.bus_peers import filled as one_value
from weightbus import TensorSpec
from weightbus.cli.shapes import filled, fingerprint, module_of
from weightbus.testing.peers import ParentLink


def shard(rank: int, skew: int, count: int = 12) -> dict[str, torch.Tensor]:
    """Rank 0 has `skew` times the bytes of rank 1."""
    numel = 500 * (skew if rank == 0 else 1)
    return {f"w{i}": torch.full((numel,), float(100 * rank + i)) for i in range(count)}


def coupled_trainer(
    link: ParentLink, rank: int, store: str, bus: dict[str, Any], skew: int, count: int, planned: bool
) -> None:
    """One of two trainer ranks whose source runs a real Gloo collective for each tensor."""
    import torch.distributed as dist

    values = shard(rank, skew, count)

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in values.items():
            total = torch.ones(1)
            dist.all_reduce(total)
            if total.item() != 2:
                raise RuntimeError("the collective of another tensor")
            yield name, tensor

    options = {**SETTINGS, "senders": 2, "rank": rank, "backend": "local", "bucket_bytes": 20_480}
    with weightbus.WeightBus.sender(**options, **bus) as sender:
        link.send(sender.address)
        link.recv(60)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        manifest = [TensorSpec.of(k, v) for k, v in values.items()] if planned else None
        try:
            link.send(("ok", sender.send(source(), manifest=manifest, version=1, timeout=20).outcomes))
        except weightbus.WeightBusError as exc:
            link.send((type(exc).__name__, str(exc)))
        link.recv(60)
        dist.destroy_process_group()


def minilm_specs() -> list[TensorSpec]:
    """Names and shapes of a sentence encoder of 22.7 million parameters."""
    hidden, inner = 384, 1536
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word": (30522, hidden),
        "embeddings.position": (512, hidden),
        "embeddings.kind": (2, hidden),
        "embeddings.norm.weight": (hidden,),
        "embeddings.norm.bias": (hidden,),
    }
    for layer in range(6):
        linears = {name: (hidden, hidden) for name in ("query", "key", "value", "output")}
        for name, shape in {**linears, "up": (inner, hidden), "down": (hidden, inner)}.items():
            shapes[f"layer.{layer}.{name}.weight"] = shape
            shapes[f"layer.{layer}.{name}.bias"] = shape[:1]
        for norm in ("norm1", "norm2"):
            shapes |= {f"layer.{layer}.{norm}.{part}": (hidden,) for part in ("weight", "bias")}
    return [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]


def rss_mib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / (1 << 20)


def module_engine(link: ParentLink, address: str, name: str, backend: str, options: dict[str, Any]) -> None:
    """An engine that is a Module; after each refit it tells state, fingerprint and memory, until it is killed."""
    module = module_of(filled(minilm_specs(), "cpu", 999))
    made = {"adapter": "torch", "adapter_options": {"module": module}, **options}
    with weightbus.WeightBus.receiver(address, engine=name, backend=backend, poison=True, **made) as bus:
        link.send("up")
        while True:
            try:
                bus.recv(timeout=300)
            except weightbus.WeightBusError as exc:
                link.send((type(exc).__name__, str(exc), bus.state))
                continue
            link.send((bus.state, fingerprint(dict(module.named_parameters())), rss_mib()))


def second_trainer(link: ParentLink, address: str, backend: str) -> None:
    """Sender rank 1 of 2: sends what the test asks for; answers with outcomes or with the error."""
    options = {"senders": 2, "rank": 1, "backend": backend, "bucket_bytes": 64_000}
    with weightbus.WeightBus.sender(address=address, **options) as bus:
        link.send("up")
        while (version := link.recv(120)) is not None:
            try:
                link.send(("ok", bus.send(one_value(version), version=version, timeout=30).outcomes))
            except weightbus.WeightBusError as exc:
                link.send((type(exc).__name__, str(exc)))
