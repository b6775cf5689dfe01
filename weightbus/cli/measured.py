"""The processes of `weightbus bench`: a trainer and an engine that refit, and the stages of a refit measured alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import attrs
import torch

import weightbus
from weightbus.backend import Backend, EndpointSpec, Region, State
from weightbus.cli.baselines import resident, synchronize
from weightbus.cli.shapes import filled, fingerprint, module_of, specs_of, touch
from weightbus.deadline import Deadline
from weightbus.manifest import Manifest
from weightbus.plan import Plan, make_plans
from weightbus.registry import load_adapter, load_backend
from weightbus.resident import Tables

TIMEOUT_S = 300.0
LANE_KEY = bytes(16)


@attrs.frozen(kw_only=True)
class Case:
    """One line of weightbus in the table."""

    model: str
    backend: str
    bucket_bytes: int
    slots: int
    digest: bool
    device: str
    rounds: int
    direct: bool = False


def trainer(case: Case, conn: Connection[Any, Any]) -> Any:
    """Send `rounds` + 1 versions; the report of each, and a digest of the last."""
    torch.set_num_threads(1)
    tensors = filled(specs_of(case.model), case.device, seed=1)
    reports = []
    with weightbus.WeightBus.sender(
        "tcp://127.0.0.1:0",
        receivers=1,
        backend=case.backend,
        bucket_bytes=case.bucket_bytes,
        slots=case.slots,
        verify=case.digest,
        device=case.device,
        direct=case.direct,
    ) as bus:
        conn.send(bus.address)
        for version in range(case.rounds + 1):
            touch(tensors, version)
            synchronize(case.device)
            conn.recv()
            reports.append(bus.send(tensors, version=version, timeout=TIMEOUT_S).to_dict())
    return reports, fingerprint(tensors)


def engine(case: Case, conn: Connection[Any, Any]) -> Any:
    """Receive them into resident parameters; a digest of what is there at the end, and this side's reports."""
    torch.set_num_threads(1)
    tensors = resident(specs_of(case.model), case.device)
    reports = []
    options = {"module": module_of(tensors)}
    with weightbus.WeightBus.receiver(
        conn.recv(), backend=case.backend, adapter="torch", adapter_options=options, device=case.device
    ) as bus:
        for _ in range(case.rounds + 1):
            conn.send("ready")
            reports.append(bus.recv(timeout=TIMEOUT_S).to_dict())
    return reports, fingerprint(tensors)


# ---- stages alone


def _plan(case: Case) -> Plan:
    (plan,) = make_plans([Manifest(specs_of(case.model))], [], case.bucket_bytes)
    return plan


def _buckets(plan: Plan, case: Case) -> list[torch.Tensor]:
    return [torch.zeros(plan.capacity_bytes, dtype=torch.uint8, device=case.device) for _ in range(case.slots)]


def _tables(plan: Plan, tensors: Sequence[torch.Tensor], buckets: Sequence[torch.Tensor]) -> Tables:
    tables = Tables()
    if not tables.fit(plan, tensors, buckets[0].device):
        raise weightbus.ConfigError("the stages can only be measured where all tensors and buckets are on one device")
    return tables


def _median(case: Case, once: Any) -> float:
    """Median seconds of `once`, after one that warms up."""
    times = []
    for _ in range(case.rounds + 1):
        synchronize(case.device)
        start = time.perf_counter()
        once()
        synchronize(case.device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[len(times[1:]) // 2]


def stages(case: Case) -> dict[str, float]:
    """Seconds of pack and of load of the whole model, each with its digest, one after the other, in one process."""
    torch.set_num_threads(1)
    plan, tensors = _plan(case), filled(specs_of(case.model), case.device, seed=1)
    buckets = _buckets(plan, case)
    sources = _tables(plan, [tensors[spec.name] for spec in plan.manifest], buckets)

    def move(tables: Tables, scatter: bool, with_digest: bool) -> None:
        for bucket in plan.buckets:
            pieces = tables.bucket(plan, bucket.index, buckets[bucket.index % case.slots])
            pending = (pieces.scatter if scatter else pieces.gather)(digest=with_digest)
            while not pending.ready():
                pass
            pending.value()

    engine = load_adapter("torch", {"module": module_of(resident(specs_of(case.model), case.device))})
    loader = engine.loader((0,), torch.device(case.device))
    loader.check([plan.manifest], partial=False)
    targets = _tables(plan, loader.resident(plan.manifest) or [], buckets)

    return {
        "pack": _median(case, lambda: move(sources, False, case.digest)),
        "load": _median(case, lambda: move(targets, True, case.digest)),
    }


def wire_send(case: Case, conn: Connection[Any, Any]) -> float:
    """Seconds in which the backend alone moves all buckets into the peer's slots; 0 where memory is shared."""
    torch.set_num_threads(1)
    backend, plan = load_backend(case.backend), _plan(case)
    if not _has_wire(backend):
        return 0.0
    endpoint = _endpoint(backend, case, "send")
    regions = [endpoint.allocate(plan.capacity_bytes) for _ in range(case.slots)]
    for region in regions:
        region.tensor.fill_(1)
    channel = endpoint.connect(conn.recv(), LANE_KEY, 60.0)

    def once() -> None:
        for bucket in plan.buckets:
            slot = bucket.index % case.slots
            work = channel.post_send(regions[slot], bucket.used_bytes, b"bench", slot)
            limit = Deadline.after(TIMEOUT_S)
            while work.state is State.PENDING and not limit.expired:
                endpoint.progress()
            if work.state is not State.DONE:
                raise weightbus.TransportError(f"a bucket ended as {work.state}: {work.error}")
            conn.recv()

    try:
        return _median(case, once)
    finally:
        conn.send("end")
        channel.close()
        endpoint.close()


def wire_recv(case: Case, conn: Connection[Any, Any]) -> None:
    """The other end: releases every bucket as it lands."""
    torch.set_num_threads(1)
    backend, plan = load_backend(case.backend), _plan(case)
    if not _has_wire(backend):
        return
    endpoint = _endpoint(backend, case, "receive")
    regions: list[Region] = [endpoint.allocate(plan.capacity_bytes) for _ in range(case.slots)]
    channel = endpoint.listen(LANE_KEY, regions)
    conn.send(endpoint.address)
    try:
        while not conn.poll():
            endpoint.progress()
            for arrival in channel.arrivals():
                channel.release(arrival)
                conn.send("landed")
    finally:
        channel.close()
        endpoint.close()


def _has_wire(backend: Backend) -> bool:
    """Collectives have one too, but no lane of two that could be opened here."""
    return not (backend.capabilities.shares_memory or backend.capabilities.multicast)


def _endpoint(backend: Backend, case: Case, role: str) -> Any:
    spec = EndpointSpec(name=f"bench/{role}", role=role, device=torch.device(case.device), host="127.0.0.1")
    return backend.endpoint(spec)
