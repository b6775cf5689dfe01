"""Who is let in: tokens, keys, and lanes; and that no secret is written anywhere."""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Any

import pytest
import torch
import zmq
from zmq.utils import z85

import weightbus
from tests.harness import FAST, poisoned, receiving, same, sender, wait_until, weights
from tests.puppets import Raw, join
from weightbus import ConfigError, WeightBus
from weightbus.backend import EndpointSpec
from weightbus.control import messages as m
from weightbus.control import security
from weightbus.registry import load_backend
from weightbus.testing.adapters import RecordingAdapter
from weightbus.testing.peers import ParentLink, Peer

TOKEN, OTHER = security.make_token(), security.make_token()
A = weights(0)


@pytest.fixture(autouse=True)
def _no_token_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(security.TOKEN_VARIABLE, raising=False)


def fake() -> RecordingAdapter:
    return RecordingAdapter(tensors=poisoned(A))


# ---- tokens


def test_tokens_are_fresh_strong_and_accepted() -> None:
    made = {security.make_token() for _ in range(50)}
    assert len(made) == 50
    assert all(security.resolve_token(token) == token and len(token) >= 32 for token in made)


@pytest.mark.parametrize(
    "token", ["", "short", "a" * 64, "0123456789abcdefghijk", "abababababababababababababab", "1234567" * 8]
)
def test_a_weak_token_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(ConfigError, match="the token is weak") as raised:
        security.resolve_token(token)
    assert not token or token not in str(raised.value)
    assert "weightbus token" in str(raised.value)


def test_the_environment_gives_the_token_and_an_argument_goes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert security.resolve_token(None) is None
    monkeypatch.setenv(security.TOKEN_VARIABLE, TOKEN)
    assert security.resolve_token(None) == TOKEN
    assert security.resolve_token(OTHER) == OTHER
    monkeypatch.setenv(security.TOKEN_VARIABLE, "weak")
    with pytest.raises(ConfigError, match="weak"):
        WeightBus.sender("tcp://127.0.0.1:0", backend="loopback")


def test_keys_depend_on_the_token_and_on_the_side_only() -> None:
    keys, again, other = security.derive(TOKEN), security.derive.__wrapped__(TOKEN), security.derive(OTHER)
    fields = ("server_public", "server_secret", "client_public", "client_secret")
    assert [getattr(keys, f) for f in fields] == [getattr(again, f) for f in fields]
    every = {getattr(k, f) for k in (keys, other) for f in fields}
    assert len(every) == 8
    assert zmq.curve_public(keys.server_secret) == keys.server_public
    assert zmq.curve_public(keys.client_secret) == keys.client_public


def test_the_derivation_is_the_one_of_the_protocol() -> None:
    """A second implementation derives the same: scrypt, n=2^14, r=8, p=1."""
    import hashlib

    raw = hashlib.scrypt(TOKEN.encode(), salt=b"weightbus-1-client", n=16384, r=8, p=1, dklen=32)
    assert z85.decode(security.derive(TOKEN).client_secret) == raw


# ---- binds


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://192.0.2.7:0", "tcp://example.invalid:0"])
def test_a_bind_beyond_loopback_needs_a_token(bind: str) -> None:
    with pytest.raises(ConfigError, match="can be reached from other hosts and there is no token"):
        WeightBus.sender(bind, backend="loopback")


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:0", "tcp://127.9.9.9:0", "tcp://localhost:0", "tcp://[::1]:0"])
def test_loopback_may_be_bound_without_one(bind: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        if "::1" in bind:
            pytest.skip("this machine has no IPv6")
    with WeightBus.sender(bind, backend="loopback") as bus:
        assert int(bus.address.rsplit(":", 1)[1]) > 0


@pytest.mark.parametrize(
    ("host", "inside"),
    [("127.0.0.1", True), ("127.255.0.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("localhost.example", False), ("127.0.0.1.example", False), ("", False)],
)  # fmt: skip
def test_what_counts_as_loopback(host: str, inside: bool) -> None:
    assert security.is_loopback(host) is inside


def test_with_a_token_all_interfaces_may_be_bound_and_a_member_gets_in() -> None:
    with sender(receivers=1, token=TOKEN) as probe:
        assert probe.address
    bus = WeightBus.sender(
        "tcp://0.0.0.0:0", advertise="127.0.0.1", token=TOKEN, receivers=1, backend="loopback", **FAST
    )
    with bus, receiving(bus, adapter=fake(), token=TOKEN) as rx:
        assert bus.address.startswith("tcp://127.0.0.1:")
        bus.send(A, version=1, timeout=20)
        assert same(rx.engine.weights[0], A)


# ---- members


@pytest.mark.parametrize(
    ("mine", "theirs"), [(TOKEN, OTHER), (TOKEN, None), (None, TOKEN)], ids=["wrong", "absent", "not wanted"]
)
def test_a_receiver_without_the_right_token_is_refused_and_told_so(mine: str | None, theirs: str | None) -> None:
    with (
        sender(receivers=1, token=mine) as bus,
        WeightBus.receiver(bus.address, backend="loopback", adapter=fake(), token=theirs) as rx,
    ):
        with pytest.raises(
            weightbus.ConnectError, match=f"refuses this member \\({'without' if theirs is None else 'with'} a token\\)"
        ) as raised:
            rx.recv(timeout=15)
        assert security.TOKEN_VARIABLE in str(raised.value)
        assert bus.engines() == {}
        with receiving(bus, "right", adapter=fake(), token=mine) as good:
            bus.send(A, version=1, timeout=20)
            assert same(good.engine.weights[0], A)


@pytest.mark.parametrize("theirs", [OTHER, None], ids=["wrong", "absent"])
def test_a_further_sender_without_the_right_token_is_refused_and_told_so(theirs: str | None) -> None:
    with sender(senders=2, token=TOKEN) as bus:
        with WeightBus.sender(address=bus.address, rank=1, senders=2, backend="loopback", token=theirs) as second:
            with pytest.raises(weightbus.ConnectError, match="refuses this member"):
                second.send(A, version=1, timeout=15)


def test_what_a_stranger_says_without_the_token_never_reaches_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []
    decode = m.decode
    monkeypatch.setattr(m, "decode", lambda frame: (heard.append(frame), decode(frame))[1])
    with sender(receivers=1, token=TOKEN) as bus:
        for token in (None, OTHER):
            with Raw(bus.address, token) as stranger:
                stranger.tell(join())
                assert stranger.hear(0.5) is None
        assert heard == []
        with Raw(bus.address, TOKEN) as member:
            member.tell(join())
            assert member.hear().error is None
        assert heard


def test_the_server_key_alone_lets_nobody_in() -> None:
    """Whoever knows the public key of the hub, but brings a client key of his own, is refused by the gate."""
    with sender(receivers=1, token=TOKEN) as bus:
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        public, secret = zmq.curve_keypair()
        stranger.curve_serverkey = security.derive(TOKEN).server_public
        stranger.curve_publickey, stranger.curve_secretkey = public, secret
        stranger.connect(bus.address)
        stranger.send(m.encode(join()))
        assert not stranger.poll(700)
        assert bus.engines() == {}
        context.destroy(linger=0)


def test_a_receiver_sends_nothing_to_a_hub_that_lacks_the_token() -> None:
    """A stranger on the coordinator's port learns nothing and can offer nothing."""
    context = zmq.Context()
    hub = context.socket(zmq.ROUTER)
    hub.linger = 0
    hub.curve_server = True
    hub.curve_secretkey = security.derive(OTHER).server_secret
    port = hub.bind_to_random_port("tcp://127.0.0.1")
    with WeightBus.receiver(f"tcp://127.0.0.1:{port}", backend="loopback", adapter=fake(), token=TOKEN):
        assert not hub.poll(700)
    context.destroy(linger=0)


def _member(link: ParentLink, address: str, token: str | None) -> None:
    """A receiver in a process of its own; tells how its recv ended."""
    adapter = RecordingAdapter(tensors=poisoned(weights(0)))
    with WeightBus.receiver(address, backend="local", adapter=adapter, token=token) as bus:
        try:
            bus.recv(timeout=20)
            link.send(("ok", all(torch.equal(adapter.engine.weights[0][k], v) for k, v in weights(0).items())))
        except weightbus.WeightBusError as exc:
            link.send((type(exc).__name__, str(exc)))


def test_right_wrong_and_absent_tokens_between_processes() -> None:
    with sender(receivers=1, backend="local", token=TOKEN) as bus:
        target = f"{__file__}:_member"
        with (
            Peer(target, (bus.address, OTHER), method="forkserver") as wrong,
            Peer(target, (bus.address, None), method="forkserver") as absent,
            Peer(target, (bus.address, TOKEN), method="forkserver") as right,
        ):
            for peer in (wrong, absent):
                kind, text = peer.recv(60)
                assert kind == "ConnectError"
                assert "refuses this member" in text
            wait_until(lambda: len(bus.engines()) == 1, 60)
            bus.send(A, version=1, timeout=20)
            assert right.recv(60) == ("ok", True)


# ---- secrets are written nowhere


def test_neither_token_nor_keys_are_in_logs_errors_or_texts_of_objects(caplog: pytest.LogCaptureFixture) -> None:
    keys = security.derive(TOKEN)
    secrets = [
        TOKEN,
        *(getattr(keys, f).decode() for f in ("server_public", "server_secret", "client_public", "client_secret")),
    ]
    texts = [repr(keys), str(keys)]
    with caplog.at_level(logging.DEBUG):
        with sender(receivers=1, token=TOKEN) as bus, receiving(bus, adapter=fake(), token=TOKEN) as rx:
            bus.send(A, version=1, timeout=20)
            with pytest.raises(weightbus.WeightBusError) as raised:
                bus.send({"x": torch.ones(1)}, version=2, timeout=20)
            texts += [
                repr(bus),
                repr(rx.bus),
                str(raised.value),
                repr(raised.value.__cause__),
                bus.address,
                rx.bus.state,
            ]
            texts += [repr(rx.bus._member._config), repr(bus.engines())]
            with WeightBus.receiver(bus.address, backend="loopback", adapter=fake(), token=OTHER) as bad:
                with pytest.raises(weightbus.ConnectError) as refused:
                    bad.recv(timeout=15)
                texts.append(str(refused.value))
    texts += [record.getMessage() for record in caplog.records]
    assert caplog.records, "logging was looked at"
    for secret in secrets:
        assert not [text for text in texts if secret in text]


# ---- the data plane: a lane key is a secret between two ends


@pytest.mark.parametrize("name", ["loopback", "local"])
def test_a_sender_with_another_lane_key_is_refused_and_the_true_one_gets_in(name: str) -> None:
    backend = load_backend(name)
    receiver = backend.endpoint(EndpointSpec(name="e0/0", role="receive"))
    good, bad = (backend.endpoint(EndpointSpec(name=f"sender/{k}", role="send")) for k in range(2))
    slots = [] if backend.capabilities.shares_memory else [receiver.allocate(256)]
    channel = receiver.listen(b"k" * 16, slots)
    stop = threading.Event()

    def turn() -> None:
        while not stop.wait(0.001):
            receiver.progress()

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        for key in (b"x" * 16, b"k" * 15 + b"x", b""):
            region = bad.allocate(256)
            with pytest.raises(weightbus.WeightBusError):
                tx = bad.connect(receiver.address, key, 5.0)
                tx.post_send(region, 256, b"header", 0)
                wait_until(lambda tx=tx: bad.progress() is None or tx.error is not None, 5)
                raise tx.error
            assert channel.arrivals() == []
        tx = good.connect(receiver.address, b"k" * 16, 5.0)
        region = good.allocate(256)
        region.tensor.fill_(7)
        tx.post_send(region, 256, b"header", 0)
        arrived: list[Any] = []

        def landed() -> bool:
            good.progress()
            arrived.extend(channel.arrivals())
            return bool(arrived)

        wait_until(landed)
        assert arrived[0].header == b"header"
        assert arrived[0].region.tensor[:256].tolist() == [7] * 256
        channel.release(arrived[0])
    finally:
        stop.set()
        thread.join()
        for endpoint in (good, bad, receiver):
            endpoint.close()


def test_a_bucket_of_another_lane_or_refit_is_dropped_unread() -> None:
    """A header that was right once, or on another lane, is not taken for this refit."""
    from weightbus.header import Header

    with sender(receivers=1) as bus, receiving(bus, adapter=fake()) as rx:
        bus.send(A, version=1, timeout=20)
        rx.last(1)
        channels = next(iter(bus._sender._channels.values()))
        region = bus._sender._pool.regions[0]
        region.tensor.fill_(9)
        calls = len(rx.engine.calls)
        old = Header(lane_key=channels.key, refit_id=bytes(16), plan_digest=0, bucket=0, total=1, used_bytes=64)
        alien = Header(lane_key=bytes(16), refit_id=bytes(16), plan_digest=0, bucket=0, total=1, used_bytes=64)
        for header in (old, alien):
            bus._reactor.call(lambda header=header: channels.channel.post_send(region, 64, header.pack(), 0))
        time.sleep(0.3)
        assert rx.engine.calls[calls:] == []
        assert same(rx.engine.weights[0], A)
        bus.send(weights(1), version=2, timeout=20)
        assert same(rx.engine.weights[0], weights(1))
