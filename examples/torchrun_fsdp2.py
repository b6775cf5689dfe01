"""Trainer ranks under torchrun, sharded by FSDP2 on Gloo, feed inference processes of two engines.

    torchrun --nproc-per-node 2 examples/torchrun_fsdp2.py

weightbus launches nothing. Here trainer rank 0 starts the two inference processes, so that the example is one command;
elsewhere they are started by whoever serves, and get the address by a file, an environment variable or a store. The
trainers' process group stays the trainers': weightbus neither needs nor touches it.
"""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import weightbus

VERSIONS = 3
ENGINES = ("e0", "e1")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))


def inference(address: str, engine: str, answers: Any) -> None:
    """One engine: a plain, unsharded model, filled by the bus; says what it computes."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    options = {"module": model}
    with weightbus.WeightBus.receiver(address, engine=engine, adapter="torch", adapter_options=options) as bus:
        for _ in range(VERSIONS):
            version = bus.recv(timeout=120).version
            with torch.no_grad():
                answers.put((engine, version, model(torch.ones(1, 64)).sum().item()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.ones(1, 64)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    bus, address = None, [""]
    if rank == 0:  # coordinates: binds a free port and publishes it
        bus = weightbus.WeightBus.sender("tcp://127.0.0.1:0", senders=world, receivers=len(ENGINES))
        address[0] = bus.address
    dist.broadcast_object_list(address)
    if bus is None:
        bus = weightbus.WeightBus.sender(address=address[0], rank=rank, senders=world)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    engines = [context.Process(target=inference, args=(address[0], e, answers)) for e in ENGINES if rank == 0]
    for process in engines:
        process.start()

    with bus:
        for version in range(1, VERSIONS + 1):
            train(model, optimizer)
            report = bus.send(model, version=version, timeout=120)  # every rank, like a collective
            with torch.no_grad():
                ours = model(torch.ones(1, 64)).sum().item()
            for _ in engines:
                engine, held, theirs = answers.get(timeout=60)
                close = abs(theirs - ours) < 1e-4
                print(
                    f"version {held}: {engine} computes {theirs:.4f}, the trainer {ours:.4f}, same: {close}", flush=True
                )
        for process in engines:
            process.join()
    if rank == 0:
        print(report, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
