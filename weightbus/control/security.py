"""Tokens, CURVE keys and who is let in.

Both key pairs derive from one token by scrypt, so a member needs nothing but the token. The derived public keys are
secrets too (whoever has them can connect) and are never logged. Source of the protocol: CurveZMQ, RFC 26; ZAP, RFC 27.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
from functools import lru_cache
from urllib.parse import urlsplit

import attrs
import zmq
import zmq.auth
from zmq.utils import z85

from weightbus.errors import ConfigError

TOKEN_VARIABLE = "WEIGHTBUS_TOKEN"
MIN_TOKEN_CHARS = 22  # 128 bits in base64


def make_token() -> str:
    """A fresh token of 192 bits."""
    return secrets.token_urlsafe(24)


def resolve_token(token: str | None) -> str | None:
    """The token given, or that of the environment; None when there is none.

    Raises:
        ConfigError: too short to hold 128 bits.
    """
    token = os.environ.get(TOKEN_VARIABLE) if token is None else token
    if token is None:
        return None
    if len(token) < MIN_TOKEN_CHARS or len(set(token)) < 8:
        raise ConfigError(
            f"the token is weak: {len(token)} characters, {len(set(token))} different ones",
            advice=f"`weightbus token` makes one of 192 bits; at least {MIN_TOKEN_CHARS} characters are needed.",
        )
    return token


@attrs.frozen(repr=False)
class Keys:
    """CURVE key pairs of one token, Z85. `server` binds, `client` connects."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


@lru_cache(maxsize=4)
def derive(token: str) -> Keys:
    """Key pairs from a token: scrypt (n=2^14, r=8, p=1), one salt per side."""

    def pair(side: bytes) -> tuple[bytes, bytes]:
        raw = hashlib.scrypt(token.encode(), salt=b"weightbus-1-" + side, n=1 << 14, r=8, p=1, dklen=32)
        secret = z85.encode(raw)
        return zmq.curve_public(secret), secret

    server, client = pair(b"server"), pair(b"client")
    return Keys(server[0], server[1], client[0], client[1])


class Gate:
    """The ZAP handler of one context: admits the one derived client key. Polled by the bus thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._allowed = z85.decode(keys.client_public)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def serve(self) -> None:
        """Answer every request that waits."""
        while self.socket.poll(0):
            frames = self.socket.recv_multipart()
            if len(frames) < 7:
                continue
            good = frames[5] == b"CURVE" and secrets.compare_digest(frames[6], self._allowed)
            status = (b"200", b"OK") if good else (b"400", b"unknown key")
            self.socket.send_multipart([b"1.0", frames[1], *status, b"member" if good else b"", b""])

    def close(self) -> None:
        self.socket.close(0)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``; IPv6 hosts stand in brackets.

    Raises:
        ConfigError: anything else.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise ConfigError(f"{address!r} is not an address: {exc}", advice="Write tcp://HOST:PORT.") from exc
    if parts.scheme != "tcp" or not host or port is None or parts.path:
        raise ConfigError(f"{address!r} is not an address", advice="Write tcp://HOST:PORT, such as tcp://10.0.0.1:0.")
    return host, port


def is_loopback(host: str) -> bool:
    """True for addresses that other hosts cannot reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def secure_server(socket: zmq.Socket[bytes], address: str, token: str | None) -> Keys | None:
    """Prepare a socket that binds.

    Raises:
        ConfigError: a bind beyond loopback without a token.
    """
    host, _ = split_address(address)
    if token is None:
        if not is_loopback(host):
            raise ConfigError(
                f"{address} can be reached from other hosts and there is no token",
                advice=f"Set {TOKEN_VARIABLE} on all sides (`weightbus token` makes one), or bind 127.0.0.1.",
            )
        return None
    keys = derive(token)
    socket.curve_server = True
    socket.curve_secretkey = keys.server_secret
    socket.zap_domain = b"weightbus"
    return keys


def secure_client(socket: zmq.Socket[bytes], token: str | None) -> None:
    """Prepare a socket that connects."""
    if token is not None:
        keys = derive(token)
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey = keys.client_public
        socket.curve_secretkey = keys.client_secret
