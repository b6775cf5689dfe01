"""Whole refits over the wire backends between processes: a model of real size, death in mid-bucket, late writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import weightbus
from tests.bus_peers import filled as one_value
from tests.bus_peers import versions_in
from tests.fan_peers import minilm_specs, rss_mib
from tests.harness import Receiving, sender, wait_until
from weightbus import WeightBus
from weightbus.cli.shapes import filled, fingerprint
from weightbus.registry import known, load_backend
from weightbus.testing.adapters import RecordingAdapter
from weightbus.testing.peers import Peer

REFITS = 20
FLAT_MIB = 24.0  # less than one bucket of the model's refits


@pytest.fixture(params=["nixl", "ucx"])
def backend(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name not in known("weightbus.backends"):
        pytest.skip(f"backend {name} is not installed")
    probe = load_backend(name, {}).probe()
    if not probe.ok:
        pytest.skip(f"backend {name} cannot run here: {probe.reason}")
    return name


def peer_engine(stack: ExitStack, bus: WeightBus, name: str, backend: str, **options: Any) -> Peer:
    args = (bus.address, name, backend, options)
    peer = stack.enter_context(Peer("tests/fan_peers.py:module_engine", args, method="forkserver"))
    assert peer.recv(60) == "up"
    wait_until(lambda: bus.engines().get(name, "").startswith("READY"), 20)
    return peer


def wanted(seed: int) -> dict[str, torch.Tensor]:
    return filled(minilm_specs(), "cpu", seed)


@pytest.mark.parametrize("fanout", ["star", "chain"])
def test_a_module_of_real_size_in_three_processes(backend: str, fanout: str) -> None:
    options = {"backend": backend, "bucket_bytes": "16MiB", "fanout": fanout, "stall_timeout": 20}
    with ExitStack() as stack:
        bus = stack.enter_context(sender(receivers=2, **options))
        peers = [peer_engine(stack, bus, name, backend) for name in ("e0", "e1")]
        for version in (1, 2):
            values = wanted(version)
            report = bus.send(values, version=version, timeout=60)
            assert report.bytes >= sum(t.nbytes for t in values.values())
            for peer in peers:
                state, have, _ = peer.recv(60)
                assert (state, have) == (f"READY({version})", fingerprint(values))


def test_memory_stays_flat_over_refits_in_two_processes(backend: str) -> None:
    models = [wanted(seed) for seed in (1, 2)]
    marks = [fingerprint(model) for model in models]
    with ExitStack() as stack:
        bus = stack.enter_context(sender(receivers=1, backend=backend, bucket_bytes="32MiB", stall_timeout=20))
        peer = peer_engine(stack, bus, "e0", backend)
        mine, theirs = [], []
        for version in range(REFITS):
            bus.send(models[version % 2], version=version, timeout=60)
            state, have, memory = peer.recv(60)
            assert (state, have) == (f"READY({version})", marks[version % 2])
            mine.append(rss_mib())
            theirs.append(memory)
        for used in (mine, theirs):
            assert used[-1] - used[4] < FLAT_MIB, used


def test_a_receiver_killed_in_mid_bucket_is_named_and_its_successor_is_fed(backend: str) -> None:
    """Stopped first, so that the bucket that is posted then is surely under way when the process dies."""
    first, second = wanted(1), wanted(2)
    specs = minilm_specs()
    reached, go = threading.Event(), threading.Event()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for i, item in enumerate(second.items()):
            if i == len(second) // 2:
                reached.set()
                assert go.wait(60)
            yield item

    options = {"backend": backend, "bucket_bytes": "4MiB", "stall_timeout": 20}
    with ExitStack() as stack:
        bus = stack.enter_context(sender(receivers=1, **options))
        peer = peer_engine(stack, bus, "e0", backend)
        bus.send(first, version=1, timeout=60)
        assert peer.recv(60)[0] == "READY(1)"
        errors: list[Any] = []

        def send() -> None:
            try:
                bus.send(source(), manifest=specs, version=2, timeout=60)
            except weightbus.WeightBusError as exc:
                errors.append(exc)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        assert reached.wait(60)
        peer.stop()
        go.set()
        time.sleep(0.5)
        assert errors == [], "a stopped reader is no dead reader"
        began = time.monotonic()
        peer.kill()
        thread.join(60)
        assert time.monotonic() - began < 20
        assert isinstance(errors[0], weightbus.PartialRefitError), errors
        assert errors[0].outcomes in ({"e0": "DEAD"}, {"e0": "UNKNOWN"})
        assert "e0/0" in str(errors[0])
        again = peer_engine(stack, bus, "e0", backend)
        assert bus.send(second, version=2, timeout=60).outcomes == {"e0": "READY(2)"}
        assert again.recv(60)[:2] == ("READY(2)", fingerprint(second))


def test_a_sender_that_stood_still_past_the_deadline_changes_nothing_later(backend: str) -> None:
    """Sender 1 is stopped with buckets under way; its successor is feeding the same rank when it wakes up."""
    fake = RecordingAdapter(tensors=one_value(-1))
    hooks: dict[str, Callable[[], None]] = {}
    inner = fake.strike

    def strike(step: str, call: str) -> None:
        inner(step, call)
        if step == "load" and hooks:
            hooks.popitem()[1]()

    fake.strike = strike  # type: ignore[method-assign]

    def values() -> set[float]:
        return {v for rank in range(2) for v in versions_in(fake.engine.weights[rank])}

    second = "tests/fan_peers.py:second_trainer"
    with ExitStack() as stack:
        bus = stack.enter_context(sender(senders=2, receivers=2, backend=backend, bucket_bytes=64_000))
        old = stack.enter_context(Peer(second, (bus.address, backend), method="forkserver"))
        assert old.recv(60) == "up"
        rx = stack.enter_context(Receiving(bus.address, adapter=fake, ranks=2, backend=backend, poison=True))
        old.send(1)
        bus.send(one_value(1), version=1, timeout=30)
        assert old.recv(60) == ("ok", {"e0": "READY(1)"})
        assert values() == {1.0}

        hooks["stop"] = old.stop
        old.send(2)
        with pytest.raises(weightbus.PartialRefitError) as raised:
            bus.send(one_value(2), version=2, timeout=6)
        assert raised.value.outcomes == {"e0": "DIRTY"}
        assert not hooks

        new = stack.enter_context(Peer(second, (bus.address, backend), method="forkserver"))
        assert new.recv(60) == "up"
        rx.last(2)
        hooks["cont"] = old.cont
        new.send(3)
        assert bus.send(one_value(3), version=3, timeout=30).outcomes == {"e0": "READY(3)"}
        assert new.recv(60) == ("ok", {"e0": "READY(3)"})
        assert not hooks
        assert old.recv(60)[0] in ("ConfigError", "PeerLost", "PartialRefitError"), "it learns that its refit is over"
        time.sleep(1.0)
        assert values() == {3.0}
        old.send(4)
        kind, text = old.recv(60)
        assert (kind, "taken the place" in text) == ("ConfigError", True)
        new.send(4)
        assert bus.send(one_value(4), version=4, timeout=30).outcomes == {"e0": "READY(4)"}
        assert values() == {4.0}
