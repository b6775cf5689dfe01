"""Bad input: one clear error with every fault in it, nothing touched, and the bus works afterwards."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import torch

import weightbus
from tests import puppets
from tests.harness import FAST, Receiving, poisoned, receiving, same, sender, wait_until, weights
from tests.puppets import FakeHub, Puppet, Raw, join
from weightbus import ConfigError, Manifest, TensorSpec, WeightBus
from weightbus.control import messages as m
from weightbus.control import refit_run
from weightbus.control.wire import Link
from weightbus.testing.adapters import RecordingAdapter

A, B = weights(0), weights(1)
GOOD_TOKEN = "0123456789abcdefghijklmn"
LOOPBACK = {"backend": "loopback", "bucket_bytes": 4096}


def fake(like: dict[str, torch.Tensor] = A, **options: Any) -> RecordingAdapter:
    return RecordingAdapter(tensors=poisoned(like), **options)


def bus_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("weightbus")]


def refused(match: str | list[str], call: Any, kind: type[Exception] = ConfigError) -> str:
    """`call` raises `kind` with all of `match` in its text, and leaves no thread."""
    before = len(bus_threads())
    with pytest.raises(kind) as raised:
        call()
    text = str(raised.value)
    for part in [match] if isinstance(match, str) else match:
        assert part in text, text
    wait_until(lambda: len(bus_threads()) <= before)
    return text


# ---- settings

SENDER_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "zero bucket": ({"bucket_bytes": 0}, "bucket_bytes is 0 bytes, it must be 256 to"),
    "small bucket": ({"bucket_bytes": 255}, "bucket_bytes is 255 bytes"),
    "negative bucket": ({"bucket_bytes": -4096}, "bucket_bytes is -4096"),
    "bucket is no size": ({"bucket_bytes": "many"}, "bucket_bytes: 'many' is not a size"),
    "bucket of a bool": ({"bucket_bytes": True}, "bucket_bytes: True is not a size"),
    "huge bucket": ({"bucket_bytes": "2TiB"}, "bucket_bytes is 2199023255552"),
    "over the bound": (
        {"bucket_bytes": "1MiB", "slots": 3, "max_host_bytes": "2MiB"},
        "slots x bucket_bytes is 3145728 bytes, max_host_bytes is 2097152",
    ),
    "bound is no size": ({"max_host_bytes": "x"}, "max_host_bytes: 'x' is not a size"),
    "no slots": ({"slots": 0}, "slots is 0"),
    "text slots": ({"slots": "2"}, "slots is '2'"),
    "no receivers": ({"receivers": 0}, "receivers is 0"),
    "text receivers": ({"receivers": "one"}, "receivers is 'one'"),
    "rank": ({"rank": 2, "senders": 2}, "rank 2 of 2 senders"),
    "negative rank": ({"rank": -1}, "rank -1 of 1 senders"),
    "senders": ({"senders": 0}, "rank 0 of 0 senders"),
    "lanes": ({"lanes": "both"}, "lanes is 'both'"),
    "cohort": ({"cohort": "some"}, "cohort is 'some'"),
    "verify": ({"verify": "maybe"}, "verify is 'maybe'"),
    "stall": ({"stall_timeout": 0}, "stall_timeout is 0"),
    "stall nan": ({"stall_timeout": float("nan")}, "stall_timeout is nan"),
    "stall text": ({"stall_timeout": "soon"}, "stall_timeout is 'soon'"),
    "finish": ({"finish_timeout": -1}, "finish_timeout is -1"),
    "no further address": ({"rank": 1, "senders": 2}, "address: 'None' is not an address"),
    "device": ({"device": "abacus"}, "'abacus' is not a device"),
    "device without memory": ({"device": "meta"}, "meta"),
    "backend": ({"backend": "pigeon"}, "no backend 'pigeon' is installed"),
    "backend option": ({"backend_options": {"speed": 1, "wings": 2}}, "has no option speed, wings"),
    "token": ({"token": "short"}, "the token is weak"),
}


@pytest.mark.parametrize("case", SENDER_FAULTS)
def test_a_wrong_setting_of_a_sender(case: str) -> None:
    options, text = SENDER_FAULTS[case]
    refused(text, lambda: WeightBus.sender("tcp://127.0.0.1:0", **{**LOOPBACK, **options}))


def test_all_wrong_settings_of_a_sender_are_listed_at_once() -> None:
    wrong = {"bucket_bytes": 0, "slots": 0, "lanes": "x", "cohort": "y", "stall_timeout": -1, "receivers": 0}
    refused(
        ["bucket_bytes is 0", "slots is 0", "lanes is 'x'", "cohort is 'y'", "stall_timeout is -1", "receivers is 0",
         "'nowhere' is not an address", "Nothing was bound or allocated"],
        lambda: WeightBus.sender("nowhere", **{**LOOPBACK, **wrong}),
    )  # fmt: skip


def test_settings_token_backend_and_device_are_listed_at_once() -> None:
    text = refused(
        ["slots is 0", "the token is weak", "no backend 'pigeon' is installed", "'abacus' is not a device",
         "Nothing was bound or allocated", "known backends:", "`weightbus token` makes one"],
        lambda: WeightBus.sender("tcp://127.0.0.1:0", slots=0, token="short", backend="pigeon", device="abacus"),
    )  # fmt: skip
    assert text.count("Nothing was bound") == 1


def test_what_a_backend_cannot_do_is_listed_with_the_rest() -> None:
    refused(
        ["slots is 0", "direct=True has no buckets to pass on"],
        lambda: WeightBus.sender("tcp://127.0.0.1:0", **{**LOOPBACK, "slots": 0, "fanout": "chain", "direct": True}),
    )


RECEIVER_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "engine": ({"engine": ""}, "engine '' is no name"),
    "engine with a slash": ({"engine": "a/b"}, "engine 'a/b' is no name"),
    "engine is no text": ({"engine": 7}, "engine 7 is no name"),
    "rank": ({"rank": 4, "ranks": 4}, "rank 4 of 4 ranks"),
    "text rank": ({"rank": "0"}, "rank '0' of 1 ranks"),
    "ranks": ({"ranks": 0}, "rank None of 0 ranks"),
    "stage": ({"stage": "disk"}, "stage is 'disk'"),
    "bound": ({"max_host_bytes": 0}, "max_host_bytes is 0"),
    "adapter": ({"adapter": "steam"}, "no adapter 'steam' is installed"),
    "adapter option": ({"adapter": "torch", "adapter_options": {"colour": 1}}, "unknown option 'colour'"),
    "backend": ({"backend": "pigeon"}, "known backends:"),
    "rule": ({"names": {"(": "x"}}, "pattern '(' is no regular expression"),
    "rule group": ({"names": {"a": r"\3"}}, "has no group 3"),
    "token": ({"token": "a" * 40}, "the token is weak"),
}


@pytest.mark.parametrize("case", RECEIVER_FAULTS)
def test_a_wrong_setting_of_a_receiver(case: str) -> None:
    options, text = RECEIVER_FAULTS[case]
    refused(text, lambda: WeightBus.receiver("tcp://127.0.0.1:9", **{"backend": "loopback", **options}))


def test_all_wrong_settings_of_a_receiver_are_listed_at_once() -> None:
    refused(
        ["address: 'x' is not an address", "engine '' is no name", "rank 3 of 2 ranks", "stage is 'disk'"],
        lambda: WeightBus.receiver("x", engine="", rank=3, ranks=2, stage="disk", backend="loopback"),
    )
    refused(
        ["engine '' is no name", "the token is weak", "no adapter 'steam' is installed", "no backend 'pigeon' is installed",
         "pattern '(' is no regular expression", "'abacus' is not a device"],
        lambda: WeightBus.receiver("tcp://127.0.0.1:9", engine="", token="short", adapter="steam", backend="pigeon",
                                   names={"(": "x"}, device="abacus"),
    )  # fmt: skip
    refused(
        ["rank None of 0 ranks", "the token is weak", "unknown option 'colour'"],
        lambda: WeightBus.driver("tcp://127.0.0.1:9", engine="e0", ranks=0, token="short", adapter="torch",
                                 adapter_options={"colour": 1}),
    )  # fmt: skip


ADDRESSES = ["", "127.0.0.1:5", "tcp://127.0.0.1", "tcp://:5", "tcp://127.0.0.1:port", "tcp://127.0.0.1:70000",
             "udp://127.0.0.1:5", "tcp://127.0.0.1:5/path", "tcp://[::1:5", "tcp://127.0.0.1:-1"]  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_what_is_not_an_address_is_quoted(address: str) -> None:
    refused(repr(address), lambda: WeightBus.sender(address, **LOOPBACK))
    refused(repr(address), lambda: WeightBus.receiver(address, backend="loopback"))


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(
            [f"127.0.0.1:{port}", "in use", "port 0"], lambda: WeightBus.sender(f"tcp://127.0.0.1:{port}", **LOOPBACK)
        )
    with sender() as one, sender() as two:
        assert one.address != two.address
        refused("Another process has this port", lambda: WeightBus.sender(one.address, **LOOPBACK))


@pytest.mark.parametrize("bind", ["tcp://192.0.2.1:0", "tcp://no-such-host.invalid:0"])
def test_an_address_of_another_host_gets_advice_that_is_true(bind: str) -> None:
    text = refused(bind, lambda: WeightBus.sender(bind, token=GOOD_TOKEN, **LOOPBACK))
    assert "Another process has this port" not in text
    assert "0.0.0.0" in text


@pytest.mark.parametrize("version", [-1, 1.0, "1", None, True, 1 << 62])
def test_a_version_that_is_no_integer_from_0(version: Any) -> None:
    with sender(receivers=1) as bus, receiving(bus, adapter=fake()) as rx:
        with pytest.raises(ConfigError, match=r"version is .*; it must be an integer from 0"):
            bus.send(A, version=version, timeout=20)
        assert rx.engine.calls == []


@pytest.mark.parametrize("timeout", [0, -1, None, float("nan"), "soon"])
def test_a_timeout_that_is_none(timeout: Any) -> None:
    with sender() as bus, pytest.raises(ConfigError, match=r"timeout is .*; it must be seconds above 0"):
        bus.send(A, version=1, timeout=timeout)


# ---- what is sent

MISSHAPEN: dict[str, tuple[Any, list[str], dict[str, Any]]] = {
    "nothing": ({}, ["no tensors"], {}),
    "nothing in a list": ([], ["no tensors"], {}),
    "twice": (
        [("a", torch.ones(1)), ("a", torch.ones(1)), ("b", torch.ones(1)), ("b", torch.ones(2))],
        ["'a'", "'b'"],
        {},
    ),
    "not tensors": ({"a": 1, "b": None, "c": torch.ones(1)}, ["'a' is int", "'b' is NoneType"], {}),
    "names": ({1: torch.ones(1)}, ["a name is a text"], {}),
    "meta": ({"m": torch.ones(3, device="meta")}, ["'m' is on the meta device"], {}),
    "sparse": ({"s": torch.eye(3).to_sparse()}, ["'s' has layout torch.sparse_coo"], {}),
    "dtype": (
        {"q": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
        ["'q' has dtype torch.float4_e2m1fn_x2"],
        {},
    ),
    "long name": ({"n" * 1025: torch.ones(1)}, ["1025"], {}),
    "no source": (42, ["int is no source"], {}),
    "a tensor": (torch.ones(3), ["Tensor is no source"], {}),
    "pairs": ([("a", torch.ones(1)), "b"], ["item 1"], {}),
    "cast dtype": (A, ["cast"], {"cast": {".*": "bfloat16"}}),
    "cast pattern": (A, ["cast '('"], {"cast": {"(": torch.bfloat16}}),
    "cast to nothing": (A, ["'nobody' matches no name"], {"cast": {"nobody": torch.bfloat16}}),
    "buffers": (A, ["buffers='some'"], {"buffers": "some"}),
    "manifest": (iter(A.items()), ["manifest"], {"manifest": [1, 2]}),
    "empty manifest": (iter(A.items()), ["names no tensors"], {"manifest": []}),
}


@pytest.mark.parametrize("case", MISSHAPEN)
def test_a_source_that_cannot_be_sent(case: str) -> None:
    source, texts, options = MISSHAPEN[case]
    with sender(receivers=1) as bus, receiving(bus, adapter=fake()) as rx:
        with pytest.raises((ConfigError, weightbus.SourceError)) as raised:
            bus.send(source, version=1, timeout=20, **options)
        for text in texts:
            assert text in str(raised.value)
        assert [c for c in rx.engine.calls if c != "check"] == []
        bus.send(A, version=1, timeout=20)
        assert same(rx.engine.weights[0], A)


def test_every_fault_of_every_engine_is_in_the_one_refusal() -> None:
    offered = {**A, "extra.1": torch.ones(2), "extra.2": torch.ones(2)}
    offered["layer.0.w"] = torch.ones(7)
    offered["layer.1.w"] = A["layer.1.w"].double()
    del offered["layer.2.w"], offered["layer.3.w"]
    small = {"layer.0.w": A["layer.0.w"]}
    with (
        sender(receivers=2) as bus,
        receiving(bus, "x", adapter=fake()) as x,
        receiving(bus, "y", adapter=fake(small)) as y,
    ):
        with pytest.raises(weightbus.AlignmentError) as raised:
            bus.send(offered, version=1, timeout=20)
        text = str(raised.value)
        for fault in (
            "x/0: missing 'layer.2.w'", "x/0: missing 'layer.3.w'", "x/0: unexpected 'extra.1'", "x/0: unexpected 'extra.2'",
            "x/0: shape 'layer.0.w' has (1000,), offered (7,)", "x/0: dtype 'layer.1.w' has float32, offered float64",
            "y/0: shape 'layer.0.w'", "y/0: unexpected 'layer.4.w'", "Nothing was touched",
        ):  # fmt: skip
            assert fault in text, text
        for rx in (x, y):
            assert set(rx.engine.calls) == {"check"}
            assert rx.engine.serving
        assert bus.version == -1


def test_a_rank_that_fits_no_bucket_into_its_bound_refuses_with_both_numbers() -> None:
    with (
        sender(receivers=1, bucket_bytes=8192, slots=3) as bus,
        receiving(bus, adapter=fake(), max_host_bytes=10_000) as rx,
    ):
        with pytest.raises(
            weightbus.AlignmentError, match=r"memory 2\d{4} bytes of host memory are needed, max_host_bytes is 10000"
        ):
            bus.send(A, version=1, timeout=20)
        assert set(rx.engine.calls) == {"check"}


def test_a_bucket_beyond_the_machine_s_memory_is_an_error_with_the_size() -> None:
    """Paged, so that slots of the full size are needed; no engine is begun."""
    with (
        sender(receivers=1, bucket_bytes=1 << 40, poison=False) as bus,
        receiving(bus, adapter=fake(), poison=False, stage="host") as rx,
    ):
        with pytest.raises(weightbus.PartialRefitError, match=str(1 << 40)):
            bus.send((pair for pair in A.items()), version=1, timeout=20)
        assert "begin 1" not in rx.engine.calls
        manifest = [TensorSpec.of(k, v) for k, v in A.items()]
        bus.send(iter(A.items()), version=1, manifest=manifest, timeout=20)
        assert same(rx.engine.weights[0], A)


@pytest.mark.parametrize(
    ("what", "stream"),
    [
        ("name", [("a", torch.ones(4)), ("other", torch.ones(2))]),
        ("order", [("b", torch.ones(2)), ("a", torch.ones(4))]),
        ("shape", [("a", torch.ones(2, 2)), ("b", torch.ones(2))]),
        ("size", [("a", torch.ones(5)), ("b", torch.ones(2))]),
        ("dtype", [("a", torch.ones(4, dtype=torch.float16)), ("b", torch.ones(2))]),
        ("too few", [("a", torch.ones(4))]),
        ("too many", [("a", torch.ones(4)), ("b", torch.ones(2)), ("c", torch.ones(2))]),
    ],
)
def test_a_stream_that_is_not_what_its_manifest_says_is_named_and_never_finished(what: str, stream: Any) -> None:
    manifest = Manifest([TensorSpec("a", (4,), "float32"), TensorSpec("b", (2,), "float32")])
    good = {"a": torch.ones(4), "b": torch.full((2,), 2.0)}
    with sender(receivers=1) as bus, receiving(bus, adapter=fake(good), stage="host") as rx:
        began = time.monotonic()
        with pytest.raises(weightbus.SourceError):
            bus.send(iter(stream), version=1, manifest=manifest, timeout=20)
        assert time.monotonic() - began < 10, "sizes must be compared before posting, not waited for"
        assert not [c for c in rx.engine.calls if c.startswith(("load", "finish"))]
        bus.send(good, version=1, timeout=20)
        assert same(rx.engine.weights[0], good)


def test_two_sides_of_different_bucket_sizes_use_the_sender_s() -> None:
    with sender(receivers=1, senders=2, bucket_bytes=1 << 20) as first:
        options: dict[str, Any] = {**LOOPBACK, "bucket_bytes": 2048}
        with (
            WeightBus.sender(address=first.address, rank=1, senders=2, **options) as second,
            receiving(first, adapter=fake()) as rx,
        ):
            handle = second.isend(A, version=1, timeout=20)
            report = first.send(A, version=1, timeout=20)
            handle.wait(20)
            assert report.buckets >= sum(t.nbytes for t in A.values()) // 2048, "the smallest bound holds for all lanes"
            assert same(rx.engine.weights[0], A)


# ---- who joins

MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "protocol": ({"protocol": m.PROTOCOL + 1}, f"protocol {m.PROTOCOL + 1}, this side speaks {m.PROTOCOL}"),
    "backend": ({"backend": "local"}, "backend 'local' joins a bus on 'loopback'"),
    "rank beyond": ({"serves": (1,)}, "ranks (1,) of 1"),
    "negative rank": ({"serves": (-1,)}, "ranks (-1,) of 1"),
    "no world": ({"world": 0, "serves": (), "drives": "yes"}, "of 0"),
    "negative world": ({"world": -3, "serves": ()}, "of -3"),
    "no engine": ({"engine": ""}, "ranks (0,) of 1"),
    "stray sender": ({"engine": "", "sender_rank": 1, "senders": 2}, "sender 1 of 2 joins a bus of 1 senders"),
    "second coordinator": ({"engine": "", "sender_rank": 0, "senders": 1}, "sender 0 of 1"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_member_that_does_not_fit_is_told_why_and_counts_for_nothing(case: str) -> None:
    changes, text = MISFITS[case]
    with sender(receivers=1) as bus, receiving(bus, adapter=fake()) as rx, Raw(bus.address) as raw:
        raw.tell(join(**changes))
        welcome = raw.hear()
        assert welcome.error is not None, "it was let in"
        assert text in welcome.error.what
        assert "puppet" not in bus.engines()
        bus.send(A, version=1, timeout=20)
        assert same(rx.engine.weights[0], A)


def test_a_receiver_of_another_protocol_version_learns_it_from_recv(monkeypatch: pytest.MonkeyPatch) -> None:
    with sender() as bus:
        spoken = Link.send
        future = lambda message: attrs.evolve(message, protocol=99) if isinstance(message, m.Join) else message
        monkeypatch.setattr(Link, "send", lambda link, message: spoken(link, future(message)))
        with WeightBus.receiver(bus.address, backend="loopback", adapter=fake()) as rx:
            with pytest.raises(weightbus.RemoteProtocolError, match="protocol 99, this side speaks 1"):
                rx.recv(timeout=10)


def test_an_engine_of_another_world_size_is_refused() -> None:
    with sender() as bus, receiving(bus, "e", adapter=fake(), rank=0, ranks=2):
        wait_until(lambda: "e" in bus.engines())
        with WeightBus.receiver(bus.address, engine="e", rank=1, ranks=3, backend="loopback", adapter=fake()) as other:
            with pytest.raises(ConfigError, match="has 2 ranks, this member says 3"):
                other.recv(timeout=10)


# ---- hostile frames


class Touch:
    """Runs on unpickling."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def frame_of(kind: type, **values: Any) -> bytes:
    """A frame of `kind` with any values, past the checks of its class."""
    return bytes([m.KINDS.index(kind)]) + msgspec.msgpack.encode(values)


def ready(*tensors: dict[str, Any]) -> bytes:
    manifest = {"tensors": list(tensors)}
    return frame_of(m.SendReady, version=1, manifest=manifest, paged=False, reorderable=True, partial=False)


def with_field(message: object, field: str, tail: bytes) -> bytes:
    """`message` with one more field, whose msgpack is `tail`."""
    frame = m.encode(message)
    size = int.from_bytes(frame[2:4], "big") if frame[1] == 0xDE else frame[1] & 0x0F
    rest = frame[4:] if frame[1] == 0xDE else frame[2:]
    return frame[:1] + b"\xde" + (size + 1).to_bytes(2, "big") + rest + msgspec.msgpack.encode(field) + tail


def hostile(path: Path) -> dict[str, list[bytes]]:
    whole = m.encode(join())
    return {
        "nothing": [b""],
        "garbage": [bytes(range(256))],
        "unknown kind": [b"\xff" + whole[1:]],
        "truncated": [whole[: len(whole) // 2]],
        "kind alone": [whole[:1]],
        "trailing bytes": [whole + b"\x00"],
        "two frames": [whole, whole],
        "a thousand frames": [b"x"] * 1000,
        "pickle": [pickle.dumps(Touch(path))],
        "pickle in a kind": [whole[:1] + pickle.dumps(Touch(path))],
        "pickle as a field": [with_field(join(), "host", msgspec.msgpack.encode(pickle.dumps(Touch(path))))],
        "array of 2**32-1": [with_field(join(), "serves", b"\xdd\xff\xff\xff\xff")],
        "map of 2**32-1": [whole[:1] + b"\xdf\xff\xff\xff\xff"],
        "text of 2**32-1": [with_field(join(), "host", b"\xdb\xff\xff\xff\xff")],
        "nested 200,000 deep": [with_field(join(), "zz", b"\x91" * 200_000 + b"\x90")],
        "maps nested 200,000 deep": [with_field(join(), "zz", b"\x81\xa1a" * 200_000 + b"\xc0")],
        "no UTF-8": [with_field(join(), "host", b"\xa2\xff\xfe")],
        "wrong type": [with_field(join(), "world", b"\xa1x")],
        "integer of 2**64-1": [with_field(join(), "world", b"\xcf" + b"\xff" * 8)],
        "1 MB name": [ready({"name": "n" * (1 << 20), "shape": [1], "dtype": "float32"})],
        "1 MB member": [with_field(join(), "member", msgspec.msgpack.encode("x" * (1 << 20)))],
        "no such dtype": [ready({"name": "n", "shape": [1], "dtype": "float31"})],
        "negative shape": [ready({"name": "n", "shape": [-4], "dtype": "float32"})],
        "shape of 2**192": [ready({"name": "n", "shape": [1 << 62] * 3, "dtype": "float32"})],
        "duplicate names": [ready(*[{"name": "n", "shape": [1], "dtype": "float32"}] * 2)],
        "bad rule": [with_field(join(), "names", msgspec.msgpack.encode([{"pattern": "(", "replacement": ""}]))],
        "bad reference": [with_field(join(), "names", msgspec.msgpack.encode([{"pattern": "a", "replacement": r"\7"}]))],
        "long header": [frame_of(m.HeaderAhead, refit="r", lane="l", slot=0, nbytes=1, header=bytes(5000))],
        "long key": [frame_of(m.JoinGroup, refit="r", group_id="g", members=[], ranks={}, key=bytes(17), address=b"", timeout_s=1)],
    }  # fmt: skip


FRAMES = sorted(hostile(Path()))


@pytest.mark.parametrize("case", FRAMES)
def test_a_hostile_frame_to_the_coordinator_changes_nothing(case: str, tmp_path: Path) -> None:
    frames = hostile(tmp_path / "touched")[case]
    with sender(receivers=1) as bus, receiving(bus, adapter=fake()) as rx:
        bus.send(A, version=1, timeout=20)
        with Raw(bus.address) as stranger, Puppet(bus.address, engine="member") as member:
            wait_until(lambda: "member" in bus.engines())
            stranger.send(*frames)
            member._raw.send(*frames)  # one that has joined
            time.sleep(0.1)
            report = bus.send(B, version=2, timeout=20)
        assert report.outcomes["e0"] == "READY(2)"
        assert same(rx.engine.weights[0], B)
    assert not (tmp_path / "touched").exists(), "something was unpickled"


@pytest.mark.parametrize("case", FRAMES)
def test_a_hostile_frame_to_a_driver_s_channel_changes_nothing(case: str, tmp_path: Path) -> None:
    frames = hostile(tmp_path / "touched")[case]
    with sender(receivers=2) as bus:
        engines = [fake(), fake()]
        rxs = [receiving(bus, "e0", adapter=engines[r], rank=r, ranks=2) for r in range(2)]
        try:
            bus.send(A, version=1, timeout=20)
            with Raw(rxs[0].bus._member._driver_hub.address) as stranger:
                stranger.send(*frames)
                time.sleep(0.1)
                assert bus.send(B, version=2, timeout=20).outcomes == {"e0": "READY(2)"}
            assert all(same(e.engine.weights[r], B) for r, e in enumerate(engines))
        finally:
            for rx in rxs:
                rx.close()
    assert not (tmp_path / "touched").exists()


def test_hostile_frames_to_a_receiver_do_not_end_it(tmp_path: Path) -> None:
    """From whoever has the coordinator's port. Then the true one comes."""
    with FakeHub() as hub:
        rx = Receiving(hub.address, adapter=fake(), backend="loopback")
        hub.hear(m.Join)
        for frames in hostile(tmp_path / "touched").values():
            hub.send(frames[0])
        offer = {"run_id": "r", "version": 1, "timeout_s": 1.0, "partial": False, "paged": False, "verify": True,
                 "driver_address": "", "lanes": ()}  # fmt: skip
        for refit in ("", "zz", "00" * 17, "é"):
            hub.tell(m.OfferRanks(refit=refit, **offer))
            hub.tell(m.Drained(refit=refit, lane="l"))
            hub.tell(m.PageEnd(refit=refit, lane="l", buckets=1, tensors=1))
            hub.tell(m.Commit(refit=refit, finish_timeout_s=1.0))
            hub.tell(m.Begin(refit=refit))
        hub.tell(m.OfferRanks(refit="00" * 16, **{**offer, "driver_address": "nonsense"}))
        time.sleep(0.5)
    with rx, WeightBus.sender(hub.address, receivers=1, **LOOPBACK, **FAST) as bus:
        bus.send(A, version=1, timeout=20)
        assert same(rx.engine.weights[0], A)
    assert not (tmp_path / "touched").exists()


def test_no_file_of_the_control_plane_can_unpickle() -> None:
    root = Path(weightbus.__file__).parent
    for path in [*root.glob("*.py"), *(root / "control").glob("*.py")]:
        text = path.read_text()
        for word in ("pickle", "recv_pyobj", "send_pyobj", "marshal.load", "torch.load", "eval(", "exec("):
            assert word not in text, f"{path.name} has {word}"


def test_bytes_that_are_no_zeromq_close_their_connection_only() -> None:
    with sender(receivers=1) as bus, receiving(bus, adapter=fake()) as rx:
        port = int(bus.address.rsplit(":", 1)[1])
        raws = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        raws[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        raws[1].sendall(b"\xff" + bytes(8) + b"\x7f\x03" + b"\xff" * 5000)  # a length of 2**64-1 behind the greeting
        bus.send(A, version=1, timeout=20)
        assert same(rx.engine.weights[0], A)
        for raw in raws:
            raw.close()


def test_a_frame_over_the_cap_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightbus.control.wire.MAX_FRAME_BYTES", 1 << 16)
    with sender(receivers=1) as bus, receiving(bus, adapter=fake()) as rx, Raw(bus.address) as raw:
        raw.tell(join(driver_address="x" * (1 << 17)))
        assert raw.hear(0.5) is None
        assert "puppet" not in bus.engines()
        raw.tell(join(driver_address="x"))
        assert raw.hear(5.0).error is None, "the same frame below the cap is read"
        raw.close()
        wait_until(lambda: bus.engines()["puppet"].startswith("UNKNOWN"))
        bus.send(A, version=1, timeout=20)
        assert same(rx.engine.weights[0], A)


# ---- hostile members: they speak the protocol


def test_messages_of_an_old_refit_replayed_change_nothing() -> None:
    """Credits, completes and reports that once were true."""
    said: list[Any] = []

    def spoil(message: Any) -> Any:
        said.append(message)
        return message

    with sender(receivers=2) as bus, receiving(bus, adapter=fake()) as rx, Puppet(bus.address, spoil=spoil) as puppet:
        wait_until(lambda: "puppet" in bus.engines())
        assert bus.send(A, version=1, timeout=20).outcomes["puppet"] == "READY(1)"
        old = [x for x in said if isinstance(x, (m.Credit, m.Complete, m.Begun, m.RanksAnswer, m.DriverAnswer))]
        assert len(old) > len(A)
        puppet._spoil = lambda message: None if isinstance(message, m.Credit) else message
        handle = bus.isend(B, version=2, timeout=20)
        for message in old * 3:
            puppet._raw.tell(message)
        with pytest.raises(weightbus.PartialRefitError) as raised:
            handle.wait(30)
        assert raised.value.outcomes["e0"] == "READY(2)"
        assert raised.value.outcomes["puppet"] != "READY(2)"
        assert same(rx.engine.weights[0], B)


def test_a_member_gives_no_credit_for_the_lane_of_another() -> None:
    """Else one that lies lets the sender write into a slot that another still reads."""
    values = {f"w{i}": torch.full((1000,), float(i)) for i in range(30)}

    def spoil(message: Any) -> Any:
        if not isinstance(message, m.Credit):
            return message
        for bucket in range(30):
            puppet._raw.tell(attrs.evolve(message, lane="sender/0->e0/0", bucket=bucket))
        return message

    slow = fake(values, stall_at="load:1", stall_s=0.5)
    with sender(receivers=2) as bus, receiving(bus, adapter=slow) as rx, Puppet(bus.address, spoil=spoil) as puppet:
        wait_until(lambda: len(bus.engines()) == 2)
        report = bus.send(values, version=1, timeout=20)
        assert report.outcomes == {"e0": "READY(1)", "puppet": "READY(1)"}
        assert same(rx.engine.weights[0], values)


def test_a_member_that_asks_for_the_plan_without_end_is_dropped() -> None:
    def spoil(message: Any) -> Any:
        return m.RanksAnswer(refit=message.refit, need_plan=True) if isinstance(message, m.RanksAnswer) else message

    with (
        sender(receivers=2, stall_timeout=10.0) as bus,
        receiving(bus, adapter=fake()) as rx,
        Puppet(bus.address, spoil=spoil) as puppet,
    ):
        wait_until(lambda: len(bus.engines()) == 2)
        with pytest.raises(weightbus.PartialRefitError, match="asked for the plan that it has got") as raised:
            bus.send(A, version=1, timeout=30)
        assert isinstance(raised.value.__cause__, weightbus.RemoteProtocolError)
        assert "puppet/0" in str(raised.value.__cause__)
        assert len([x for x in puppet.heard if isinstance(x, m.OfferRanks)]) == 2
        assert raised.value.outcomes["e0"] == "READY(1)"
        assert same(rx.engine.weights[0], A)


@pytest.mark.parametrize(
    "answer",
    [
        {"lanes": ()},
        {"lanes": (m.LaneAnswer(lane="other", incarnation="", address=b"", key=b""),)},
        {"lanes": (m.LaneAnswer(lane="sender/0->puppet/0", incarnation="", address=b"nowhere", key=b"k" * 16),)},
        {"lanes": (m.LaneAnswer(lane="sender/0->puppet/0", incarnation="", address=b"", key=b""),)},
        {"lanes": (m.LaneAnswer(lane="sender/0->e0/0", incarnation="", address=b"", key=b""),)},
    ],
    ids=["none", "unknown lane", "bad address", "no address", "another's lane"],
)
def test_a_member_whose_lane_cannot_be_reached_fails_alone(answer: dict[str, Any]) -> None:
    def spoil(message: Any) -> Any:
        return attrs.evolve(message, **answer) if isinstance(message, m.RanksAnswer) and message.lanes else message

    with (
        sender(receivers=2, stall_timeout=1.0) as bus,
        receiving(bus, adapter=fake()) as rx,
        Puppet(bus.address, spoil=spoil),
    ):
        wait_until(lambda: len(bus.engines()) == 2)
        with pytest.raises(weightbus.PartialRefitError, match="puppet") as raised:
            bus.send(A, version=1, timeout=20)
        assert raised.value.outcomes["e0"] == "READY(1)"
        assert same(rx.engine.weights[0], A)


# ---- peers that are dead or silent at each phase


@pytest.mark.parametrize("then", ["silent", "dead"])
@pytest.mark.parametrize("phase", puppets.PHASES)
def test_an_engine_that_stops_answering_is_named_and_the_others_go_on(
    phase: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refit_run, "REPORT_GRACE_S", 0.5)
    with (
        sender(receivers=2, stall_timeout=1.0, finish_timeout=1.0) as bus,
        receiving(bus, adapter=fake()) as rx,
        Puppet(bus.address, until=phase, then=then),
    ):
        wait_until(lambda: len(bus.engines()) == 2)
        began = time.monotonic()
        with pytest.raises(weightbus.PartialRefitError, match="puppet") as raised:
            bus.send(A, version=1, timeout=15)
        assert time.monotonic() - began < 10
        assert raised.value.outcomes == {"e0": "READY(1)", "puppet": "UNKNOWN"}
        cause = raised.value.__cause__
        assert isinstance(cause, weightbus.PeerLost if then == "dead" else weightbus.TransferTimeout), cause
        assert "puppet" in str(cause)
        assert same(rx.engine.weights[0], A)
        assert "puppet" in bus.behind()


@pytest.mark.parametrize("stage", [None, "host"])
@pytest.mark.parametrize("then", ["silent", "dead"])
@pytest.mark.parametrize("phase", ["offer", "begin"])
def test_a_coordinator_that_stops_in_mid_refit_leaves_the_engine_as_it_was(
    phase: str, then: str, stage: str | None
) -> None:
    with FakeHub() as hub:
        rx = Receiving(hub.address, adapter=fake(), stage=stage, backend="loopback")
        try:
            hub.hear(m.Join)
            refit, common = "ab" * 16, {"run_id": "r", "version": 1, "timeout_s": 1.0, "partial": False}
            manifest = Manifest(puppets.specs_of(A))
            plan = weightbus.plan.make_plans([manifest], [], 4096)[0]
            hub.tell(m.OfferDriver(refit=refit, finish_timeout_s=1.0, staged=bool(stage), base_version=-1, tensors=6,
                                   nbytes=manifest.nbytes, **common))  # fmt: skip
            lane = m.LaneOffer(lane="sender/0->e0/0", rank=0, plan_digest=plan.digest, slot_bytes=4096, slots=2,
                               manifest=manifest, plan=m.PlanWire.of(plan))  # fmt: skip
            hub.tell(m.OfferRanks(refit=refit, paged=False, verify=True, driver_address="", lanes=(lane,), **common))
            answer = hub.hear(m.RanksAnswer)
            assert answer.error is None
            assert not answer.faults
            if phase == "begin" and stage is None:
                hub.tell(m.Begin(refit=refit))
                hub.hear(m.Begun)
                assert not rx.engine.serving
            if then == "dead":
                hub.close()
            error = rx.last(1)
            kinds = weightbus.PeerLost if then == "dead" else weightbus.TransferTimeout
            assert isinstance(error, kinds), error
            assert "sender/0" in str(error) or "deadline" in str(error) or "in time" in str(error), error
            assert rx.bus.state.startswith("READY(-1)")
            assert rx.engine.serving
            assert not rx.engine.session
            assert not [c for c in rx.engine.calls if c.startswith("load")]
        finally:
            rx.close()


# ---- misuse


def test_a_closed_bus_says_so_on_every_call() -> None:
    bus = sender()
    rx = WeightBus.receiver(bus.address, backend="loopback", adapter=fake())
    drive = WeightBus.driver(bus.address, engine="d", ranks=1, adapter=fake())
    for each in (drive, rx, bus):
        each.close()
        each.close()
    for call in (
        lambda: bus.send(A, version=1),
        lambda: bus.isend(A, version=1).wait(5),
        lambda: rx.recv(1),
        lambda: rx.irecv(1).wait(5),
        lambda: drive.drive(1),
    ):
        with pytest.raises(weightbus.EndpointClosed, match="is closed"):
            call()
    assert bus_threads() == []


def test_a_second_user_is_refused_and_the_first_goes_on() -> None:
    with sender(receivers=1) as bus:
        handle = bus.isend(A, version=1, timeout=20)
        wait_until(bus._lock.locked)
        with pytest.raises(weightbus.EndpointBusy, match="another thread"):
            bus.send(B, version=2, timeout=5)
        with receiving(bus, adapter=fake()) as rx:
            assert handle.wait(20).version == 1
            assert same(rx.engine.weights[0], A)


def test_closing_under_a_send_and_a_recv_ends_both_with_a_named_error() -> None:
    bus = sender(receivers=1)
    handle = bus.isend(A, version=1, timeout=60)
    rx = WeightBus.receiver(bus.address, backend="loopback", adapter=fake(), rank=0, ranks=2)
    waiting = rx.irecv(timeout=60)
    time.sleep(0.2)
    rx.close()
    bus.close()
    for each in (handle, waiting):
        with pytest.raises(weightbus.WeightBusError) as raised:
            each.wait(10)
        assert str(raised.value)


def test_a_raw_stream_that_was_closed_cannot_be_iterated() -> None:
    with sender(receivers=1) as bus, WeightBus.receiver(bus.address, backend="loopback") as rx:
        handle = bus.isend(A, version=1, timeout=20)
        stream = rx.recv(timeout=20)
        next(stream)
        stream.close()
        with pytest.raises(weightbus.EndpointClosed, match="before its end"):
            next(stream)
        with pytest.raises(weightbus.RefitError):
            handle.wait(20)
