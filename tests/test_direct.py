"""Direct mode: the receiver reads the sender's memory into the engine's, in one pass, on host memory here."""

from __future__ import annotations

import pytest
import torch

import weightbus
from tests.harness import FAST, Receiving, wait_until
from weightbus import WeightBus
from weightbus.bucket import Packer
from weightbus.plan import MAX_BUCKET_BYTES, Manifest, make_plans
from weightbus.registry import load_backend
from weightbus.resident import Tables
from weightbus.testing.peers import Peer

BACKENDS = [name for name in ("loopback", "local", "nixl") if load_backend(name).probe().ok]


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Embedding(1000, 33), torch.nn.Linear(33, 17), torch.nn.LayerNorm(17))
    layers.register_buffer("scale", torch.tensor(float(seed)))
    return layers.requires_grad_(False)


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def blank() -> torch.nn.Module:
    module = model(0)
    for p in module.parameters():
        p.fill_(float("nan"))
    return module


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "local"])
def test_values_are_read_where_they_lie(backend: str, verify: bool) -> None:
    with WeightBus.sender("tcp://127.0.0.1:0", receivers=1, backend=backend, direct=True, verify=verify, **FAST) as bus:
        target = blank()
        memory = [p.data_ptr() for p in target.parameters()]
        options = {"backend": backend, "adapter_options": {"module": target}}
        with Receiving(bus.address, "e0", adapter="torch", **options) as rx:
            source = model(1)
            for version in range(3):
                with torch.no_grad():
                    for p in source.parameters():
                        p.add_(1)
                report = bus.send(source, version=version, timeout=30)
                assert report.outcomes == {"e0": f"READY({version})"}
                assert same(target, source)
                assert rx.last(version + 1).bytes >= sum(p.nbytes for p in source.parameters())
            assert [p.data_ptr() for p in target.parameters()] == memory


def puller(address: str, backend: str) -> float:
    """In a process of its own: one refit; the sum of what arrived."""
    target = blank()
    with WeightBus.receiver(address, backend=backend, adapter="torch", adapter_options={"module": target}) as bus:
        bus.recv(timeout=60)
    return float(sum(p.double().sum() for p in target.parameters()))


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "loopback"])
def test_between_processes(backend: str) -> None:
    source = model(5)
    with (
        WeightBus.sender("tcp://127.0.0.1:0", receivers=1, backend=backend, direct=True, **FAST) as bus,
        Peer("tests/test_direct.py:puller", (bus.address, backend), linked=False) as peer,
    ):
        bus.send(source, version=1, timeout=60)
        assert peer.result(60) == float(sum(p.double().sum() for p in source.parameters()))


def test_what_direct_mode_cannot_read_is_refused_by_name() -> None:
    with WeightBus.sender("tcp://127.0.0.1:0", receivers=1, backend="loopback", direct=True, **FAST) as bus:
        with pytest.raises(weightbus.ConfigError, match="iterable"):
            bus.send(iter([("a", torch.zeros(2))]), version=1, timeout=5)
        target = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(3, 4))})
        with Receiving(
            bus.address, "e0", adapter="torch", backend="loopback", adapter_options={"module": target}
        ) as rx:
            with pytest.raises(weightbus.SourceError, match="a: not contiguous"):
                bus.send({"a": torch.randn(4, 3).t()}, version=1, timeout=10)
            wait_until(lambda: rx.bus.state.startswith("READY(-1)"))
            assert not target["a"].any()
    with pytest.raises(weightbus.ConfigError, match="cannot pull"):
        WeightBus.sender("tcp://127.0.0.1:0", backend="nccl", direct=True)


def test_the_digest_of_tensors_where_they_lie_is_that_of_one_bucket() -> None:
    source = {k: v for k, v in model(3).state_dict().items()} | {"big": torch.randn(300_001), "empty": torch.zeros(0)}
    (plan,) = make_plans([Manifest([weightbus.TensorSpec.of(k, v) for k, v in source.items()])], [], MAX_BUCKET_BYTES)
    bucket = torch.zeros(plan.capacity_bytes, dtype=torch.uint8)
    packer = Packer(bucket, verify=True)
    for segment in plan.buckets[0].segments:
        packer.put(segment, list(source.values())[segment.tensor])
    tables = Tables()
    assert tables.fit(plan, list(source.values()), torch.device("cpu"))
    assert tables.digest(plan).value() == packer.finish().pending.value()
