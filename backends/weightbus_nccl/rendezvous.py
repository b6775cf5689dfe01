"""How the members of a group meet: a store hosted by the sender, and a proof of the lane key before anything is built.

Every member, in order:

1. writes a nonce, then waits until each member has;
2. writes its facts (settings, GPU) under an HMAC by the lane key over all nonces, then waits until each member has;
3. checks every proof and compares the facts; all members see the same, so all of them raise or none;
4. takes the part of the store whose prefix only holders of the lane key can derive, and builds the process group there.

A stranger on the port can disturb a meeting, which then fails by name; it cannot take a member's place.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed

from weightbus.backend import GroupSpec
from weightbus.deadline import Deadline
from weightbus.errors import ConnectError, EndpointClosed, TransferTimeout, TransportError, WeightBusError

dist: Any = torch.distributed
_T = TypeVar("_T")
_MAC_BYTES = 32
_MAX_FACTS_BYTES = 1 << 16
_POLL_S = (0.002, 0.05)  # between two looks into the store: first, at most


def host_store(host: str) -> tuple[Any, bytes]:
    """A store that listens on a free port of `host`, and its address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # torch itself would listen on every interface; it keeps the socket that it is given.
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host, port, None, True, timedelta(seconds=10), wait_for_workers=False, master_listen_fd=listener.detach()
        )
    except (OSError, RuntimeError) as exc:
        raise TransportError(
            f"No rendezvous store could be opened on {host}: {exc}",
            advice="Give the IP address of an interface of this host.",
        ) from exc
    return store, f"{host}:{port}".encode()


def parse_address(address: bytes) -> tuple[str, int]:
    """Host and port of a store's address."""
    host, _, port = address.decode("ascii", "replace").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConnectError(f"{address[:64]!r} is not the address of a rendezvous store.")
    return host, int(port)


def own_host(address: bytes) -> str:
    """The IP address of this host's interface that leads to the store."""
    host, port = parse_address(address)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing: asks for the route
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise ConnectError(f"No route to the rendezvous store {host}:{port}: {exc}") from exc


def bounded(function: Callable[[], _T], deadline: Deadline, what: str, discard: Callable[[_T], None]) -> _T:
    """Run `function` on a thread until `deadline`: calls into torch's store and into NCCL's set-up take no timeout.

    A call that comes back late has its result given to `discard`; its daemon thread lives until then.
    """
    lock, done = threading.Lock(), threading.Event()
    results: list[_T] = []
    errors: list[BaseException] = []
    late = False

    def run() -> None:
        try:
            value = function()
        except BaseException as exc:
            errors.append(exc)
        else:
            with lock:
                (discard if late else results.append)(value)
        done.set()

    threading.Thread(target=run, name="weightbus-nccl-connect", daemon=True).start()
    done.wait(None if deadline.at_s == float("inf") else deadline.remaining_s())
    with lock:
        late = not results
    if errors:
        raise errors[0]
    if late:
        raise TransferTimeout(f"{what} did not end in time; the sender's store or a member does not answer.")
    return results[0]


class Meeting:
    """One meeting of the members of `group`.

    Args:
        facts: compared between members: ``settings`` (text to text, must be equal) and ``gpu`` (must differ).
        deadline: of the whole meeting.
        cancelled: asked while waiting; True ends the meeting.
    """

    def __init__(
        self, group: GroupSpec, facts: dict[str, Any], deadline: Deadline, cancelled: Callable[[], bool]
    ) -> None:
        self._group = group
        self._facts = facts
        self._deadline = deadline
        self._cancelled = cancelled
        self._store = self._client()

    def hold(self) -> Any:
        """Meet, and return the store on which the process group is to be built.

        Raises:
            ConnectError: the store is unreachable, a member holds another key, settings differ, or two share a GPU.
            TransferTimeout: names the members that did not come.
        """
        try:
            nonces = self._exchange("nonce", secrets.token_bytes(16))
            transcript = _digest(self._group.group_id.encode(), *map(str.encode, self._group.members), *nonces)
            body = json.dumps(self._facts, sort_keys=True).encode()
            proofs = self._exchange("proof", self._mac(transcript, self._group.rank, body) + body)
            self._compare([json.loads(p[_MAC_BYTES:]) for p in self._verified(transcript, proofs)])
            secret = hmac.digest(self._group.lane_key, b"prefix" + transcript, "sha256").hex()
            self._store.set_timeout(timedelta(seconds=max(0.001, self._deadline.remaining_s(86400.0))))
            return dist.PrefixStore(f"{self._group.group_id}/{secret}", self._store)
        except WeightBusError:
            raise
        except (RuntimeError, ValueError) as exc:
            where = self._group.address.decode("ascii", "replace")
            raise ConnectError(
                f"The rendezvous of group {self._group.group_id} at {where} failed: {exc}", peer=self._group.members[0]
            ) from exc

    def _client(self) -> Any:
        host, port = parse_address(self._group.address)
        timeout = timedelta(seconds=max(0.001, self._deadline.remaining_s(86400.0)))
        try:
            return dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
        except RuntimeError as exc:
            raise ConnectError(
                f"No connection to the rendezvous store {host}:{port}: {exc}",
                peer=self._group.members[0],
                advice="See that the sender lives, and that its host (sender's `advertise`) can be reached from here.",
            ) from exc

    def _exchange(self, kind: str, mine: bytes) -> list[bytes]:
        """Write this member's value and read those of all, in order of rank."""
        group = self._group
        keys = [f"{group.group_id}/{kind}/{rank}" for rank in range(len(group.members))]
        self._store.set(keys[group.rank], mine)
        pause = _POLL_S[0]
        while not self._store.check(keys):
            if self._cancelled():
                raise EndpointClosed(f"The endpoint was closed while group {group.group_id} met.")
            if self._deadline.expired:
                missing = [m for m, key in zip(group.members, keys, strict=True) if not self._store.check([key])]
                raise TransferTimeout(
                    f"Group {group.group_id} is not complete: {', '.join(missing)} did not come ({kind}).",
                    peer=missing[0] if len(missing) == 1 else None, phase="connect",
                    advice="Regroup without the missing members, or see why they do not call connect_group.",
                )  # fmt: skip
            time.sleep(self._deadline.remaining_s(pause))
            pause = min(2 * pause, _POLL_S[1])
        return [bytes(self._store.get(key)) for key in keys]

    def _mac(self, transcript: bytes, rank: int, body: bytes) -> bytes:
        return hmac.digest(self._group.lane_key, _digest(b"proof", transcript, str(rank).encode(), body), "sha256")

    def _verified(self, transcript: bytes, proofs: list[bytes]) -> list[bytes]:
        group = self._group
        strangers = [
            member
            for rank, (member, proof) in enumerate(zip(group.members, proofs, strict=True))
            if len(proof) > _MAX_FACTS_BYTES
            or not hmac.compare_digest(proof[:_MAC_BYTES], self._mac(transcript, rank, proof[_MAC_BYTES:]))
        ]
        if strangers:
            raise self._refusal(
                f"the lane key of {', '.join(strangers)} differs from that of {group.members[group.rank]}.",
                strangers,
                "Give all members the key of this group. If they have it, another process answered in their place.",
            )
        return proofs

    def _compare(self, facts: list[dict[str, Any]]) -> None:
        members = self._group.members
        first = facts[0]["settings"]
        holders: dict[str, str] = {}
        for member, fact in zip(members, facts, strict=True):
            other, gpu = fact["settings"], fact.get("gpu") or member
            keys = sorted(key for key in {*first, *other} if first.get(key) != other.get(key))
            if keys:
                pairs = ((key, first.get(key, "unset"), other.get(key, "unset")) for key in keys)
                text = "; ".join(f"{key}: {members[0]} has {a}, {member} has {b}" for key, a, b in pairs)
                raise self._refusal(
                    f"settings that must be equal differ: {text}.",
                    [member],
                    "Set the variables alike, and use one release of torch and of NCCL on all members.",
                )
            if gpu in holders:
                raise self._refusal(
                    f"{holders[gpu]} and {member} are both on GPU {gpu}; NCCL needs one GPU for each member.",
                    [member],
                    "Give them different GPUs, or use backend='local' between processes of one GPU.",
                )
            holders[gpu] = member

    def _refusal(self, what: str, members: list[str], advice: str) -> ConnectError:
        peer = members[0] if len(members) == 1 else None
        return ConnectError(f"Group {self._group.group_id}: {what}", peer=peer, phase="connect", advice=advice)


def _digest(*parts: bytes) -> bytes:
    h = hashlib.sha256()
    for part in parts:
        h.update(len(part).to_bytes(8, "little") + part)
    return h.digest()
