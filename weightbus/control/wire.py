"""The two ends of the control plane: `Hub` binds (coordinator, driver), `Link` connects (members, ranks).

Liveness is ZeroMQ's heartbeat, answered outside Python. A hub learns of a lost link when a send to it is refused by the
router; a link learns of a lost hub from its socket's monitor, and says Join again on every new connection.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from weightbus.control import messages, security
from weightbus.control.messages import MAX_FRAME_BYTES
from weightbus.errors import ConfigError, ConnectError, RemoteProtocolError
from weightbus.reactor import Reactor, log

HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 10_000
PING_S = 0.25
BURST = 256


def _tune(socket: zmq.Socket[bytes], host: str) -> None:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    if ":" in host:
        socket.ipv6 = True


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class Hub:
    """Binds a ROUTER. Handlers run on the bus thread.

    Args:
        bind: ``tcp://host:port``; port 0 is bound and then known by `address`.
        advertise: host that others shall use, when it is not the one bound.
    """

    def __init__(
        self,
        reactor: Reactor,
        bind: str,
        token: str | None,
        on_message: Callable[[bytes, Any], None],
        on_lost: Callable[[bytes], None],
        advertise: str | None = None,
    ) -> None:
        host, port = security.split_address(bind)
        self._on_message, self._on_lost = on_message, on_lost
        self._links: set[bytes] = set()
        self._next_ping = 0.0
        self._socket = reactor.context.socket(zmq.ROUTER)
        self._gate: security.Gate | None = None
        try:
            _tune(self._socket, host)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            keys = security.secure_server(self._socket, bind, token)
            if keys is not None:
                self._gate = security.Gate(reactor.context, keys)
            self._socket.bind(f"tcp://{_bracket(host)}:{port or '*'}")
        except zmq.ZMQError as exc:
            self.close()
            taken = exc.errno == zmq.EADDRINUSE
            advice = (
                "Another process has this port: use port 0, or a free one."
                if taken
                else "Bind an address of this host, or 0.0.0.0 for all of them with advertise= for the others."
            )
            raise ConfigError(f"cannot bind {bind}: {exc}", advice=advice) from exc
        except ConfigError:
            self.close()
            raise
        bound = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        port = int(bound.rsplit(":", 1)[1])
        self.address = f"tcp://{_bracket(advertise or host)}:{port}"

    polling = False

    def sources(self) -> list[Any]:
        return [self._socket, *([self._gate.socket] if self._gate else [])]

    def send(self, link: bytes, message: object) -> bool:
        """Queue a message; False when that link is gone."""
        return self._send_frame(link, messages.encode(message))

    def _send_frame(self, link: bytes, frame: bytes) -> bool:
        try:
            self._socket.send_multipart([link, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def keep(self, link: bytes) -> None:
        """Watch a link that was lost and has spoken again."""
        self._links.add(link)

    def forget(self, link: bytes) -> None:
        self._links.discard(link)

    def tick(self, fired: Collection[Any]) -> bool:
        if self._gate is not None and self._gate.socket in fired:
            self._gate.serve()
        moved = self._socket in fired and self._receive()
        now = time.monotonic()
        if now >= self._next_ping:
            self._next_ping = now + PING_S
            for link in list(self._links):
                if not self._send_frame(link, b""):
                    self._lose(link)
        return moved

    def _receive(self) -> bool:
        moved = False
        for _ in range(BURST):
            try:
                link, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            moved = True
            self._links.add(link)
            try:
                if len(frames) != 1:
                    raise RemoteProtocolError(f"a message of {len(frames)} frames")
                self._on_message(link, messages.decode(frames[0]))
            except RemoteProtocolError as exc:
                log.warning("dropped a member that breaks the protocol: %s", exc)
                self._lose(link)
            except Exception as exc:  # what one member says must not end the thread that serves all
                log.exception("dropped a member whose message broke this side", exc_info=exc)
                self._lose(link)
        return moved

    def _lose(self, link: bytes) -> None:
        self._links.discard(link)
        self._on_lost(link)

    def close(self) -> None:
        if self._gate is not None:
            self._gate.close()
        self._socket.close(200)


_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_DOWN = zmq.EVENT_DISCONNECTED
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Link:
    """Connects a DEALER to a hub, and again after every loss. Handlers run on the bus thread.

    Attributes:
        up: a connection stands.
        refused: the last handshake's failure, for `ConnectError`.
    """

    def __init__(
        self,
        reactor: Reactor,
        address: str,
        token: str | None,
        identity: bytes,
        on_message: Callable[[Any], None],
        on_up: Callable[[], None],
        on_down: Callable[[], None],
    ) -> None:
        host, port = security.split_address(address)
        self.address = address
        self._on_message, self._on_up, self._on_down = on_message, on_up, on_down
        self.up = False
        self.refused: ConnectError | None = None
        self._socket = reactor.context.socket(zmq.DEALER)
        _tune(self._socket, host)
        self._socket.routing_id = identity
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        security.secure_client(self._socket, token)
        self._has_token = token is not None
        self._monitor = self._socket.get_monitor_socket(_UP | _DOWN | _REFUSED)
        try:
            self._socket.connect(f"tcp://{_bracket(host)}:{port}")
        except zmq.ZMQError as exc:
            self.close()
            raise ConfigError(f"cannot connect to {address}: {exc}", advice="Check host and port.") from exc

    polling = False

    def sources(self) -> list[Any]:
        return [self._socket, self._monitor]

    def send(self, message: object) -> bool:
        """Queue a message; False when no connection stands."""
        if not self.up:
            return False
        try:
            self._socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def tick(self, fired: Collection[Any]) -> bool:
        moved = self._monitor in fired and self._watch()
        return (self._socket in fired and self._receive()) or moved

    def _receive(self) -> bool:
        moved = False
        for _ in range(BURST):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if frame:
                moved = True
                try:
                    self._on_message(messages.decode(frame))
                except RemoteProtocolError as exc:
                    log.warning("dropped a control message: %s", exc)
                except Exception as exc:
                    log.exception("dropped a control message that broke this side", exc_info=exc)
        return moved

    def _watch(self) -> bool:
        moved = False
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            moved = True
            if event == _UP:
                self.up, self.refused = True, None
                self._on_up()
            elif event == _DOWN:
                was, self.up = self.up, False
                if was:
                    self._on_down()
            else:
                with_token = "with" if self._has_token else "without"
                self.refused = ConnectError(
                    f"{self.address} refuses this member ({with_token} a token)",
                    phase="join",
                    advice=f"{security.TOKEN_VARIABLE} must be the same on both sides, or absent on both.",
                )
        return moved

    def close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(200)
