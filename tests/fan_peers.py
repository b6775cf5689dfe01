"""What the peer processes of test_fanout and test_refit_backends run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import weightbus
from tests.bus_peers import SETTINGS
from weightbus import TensorSpec
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
