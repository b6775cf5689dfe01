"""Peers made of bare sockets: they say what a test tells them to, and nothing else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import zmq

from weightbus.backend import Channel, EndpointSpec
from weightbus.config import host_id
from weightbus.control import messages as m
from weightbus.control import security
from weightbus.loopback import LoopbackBackend
from weightbus.manifest import TensorSpec

PHASES = ("offer", "check", "begin", "stream", "complete", "finish")


class Raw:
    """A DEALER of its own context, connected to a hub."""

    def __init__(self, address: str, token: str | None = None, identity: bytes | None = None) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 500
        if identity is not None:
            self.socket.routing_id = identity
        security.secure_client(self.socket, token)
        self.socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def tell(self, message: object) -> None:
        self.send(m.encode(message))

    def hear(self, timeout_s: float = 10.0) -> Any:
        """The next message that is no heartbeat; None when there is none in time."""
        end = time.monotonic() + timeout_s
        while self.socket.poll(max(0, int((end - time.monotonic()) * 1000))):
            frame = self.socket.recv()
            if frame:
                return m.decode(frame)
        return None

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.context.destroy(linger=500)


def join(engine: str = "puppet", **changes: Any) -> m.Join:
    """What an engine of one rank says first."""
    facts: dict[str, Any] = {
        "protocol": m.PROTOCOL, "member": f"{engine}/0", "incarnation": "i", "host": host_id(),
        "pid": os.getpid(), "backend": "loopback", "engine": engine, "world": 1, "serves": (0,), "drives": "fallback",
    }  # fmt: skip
    return m.Join(**{**facts, **changes})


class Puppet:
    """An engine of one rank on backend loopback that goes through refits up to `until`, then does `then`.

    Args:
        until: a phase of `PHASES`: the answer of this phase is the first that is not given; None: all are.
        then: ``"silent"``: says nothing more; ``"dead"``: its socket closes.
        spoil: changes what it says; None instead of a message: not said.
    """

    def __init__(
        self,
        address: str,
        until: str | None = None,
        then: str = "silent",
        spoil: Callable[[Any], Any] = lambda message: message,
        **changes: Any,
    ) -> None:
        self.heard: list[Any] = []
        self._raw = Raw(address)
        self._until, self._then, self._spoil = until, then, spoil
        self._endpoint = LoopbackBackend().endpoint(EndpointSpec(name="puppet/0", role="receive"))
        self._channel: Channel | None = None
        self._refit = self._lane = ""
        self._count = self._buckets = 0
        self._stop = threading.Event()
        self._raw.tell(join(**changes))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            message = self._raw.hear(0.01)
            if message is not None:
                self.heard.append(message)
                self._answer(message)
            self._endpoint.progress()
            for arrival in self._channel.arrivals() if self._channel is not None else []:
                self._channel.release(arrival)
                self._say("stream", m.Credit(refit=self._refit, lane=self._lane, bucket=self._count))
                self._count += 1
                if self._count == self._buckets:
                    self._say("complete", m.Complete(refit=self._refit))

    def _answer(self, message: Any) -> None:
        if isinstance(message, m.OfferDriver):
            self._run_id, self._version = message.run_id, message.version
            self._say("offer", m.DriverAnswer(refit=message.refit, answer="OK"))
        elif isinstance(message, m.OfferRanks):
            self._offered(message)
        elif isinstance(message, m.Begin):
            self._say("begin", m.Begun(refit=message.refit))
        elif isinstance(message, m.Commit):
            report = m.Report(refit=message.refit, outcome="READY", run_id=self._run_id, version=self._version)
            self._say("finish", report)

    def _offered(self, offer: m.OfferRanks) -> None:
        (lane,) = offer.lanes
        self._refit, self._lane, self._count = offer.refit, lane.lane, 0
        if lane.plan is None:
            self._say("check", m.RanksAnswer(refit=offer.refit, need_plan=True))
            return
        self._buckets = len(lane.plan.buckets)
        if self._channel is None:
            slots = [self._endpoint.allocate(lane.slot_bytes) for _ in range(lane.slots)]
            self._channel = self._endpoint.listen(b"k" * 16, slots)
        answer = m.LaneAnswer(
            lane=lane.lane, incarnation=self._endpoint.incarnation, address=self._endpoint.address, key=b"k" * 16
        )
        self._say("check", m.RanksAnswer(refit=offer.refit, lanes=(answer,)))

    def _say(self, phase: str, message: Any) -> None:
        if self._until is not None and PHASES.index(phase) >= PHASES.index(self._until):
            if self._then == "dead":
                self._raw.close()
                self._stop.set()
            return
        message = self._spoil(message)
        if message is not None:
            self._raw.tell(message)

    def __enter__(self) -> Puppet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(10)
        self._raw.close()
        self._endpoint.close()


class FakeHub:
    """A ROUTER where receivers expect their coordinator."""

    def __init__(self, port: int = 0) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 500
        self.socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.member = b""

    def hear(self, kind: type, timeout_s: float = 10.0) -> Any:
        """The next message of this kind."""
        end = time.monotonic() + timeout_s
        while self.socket.poll(max(0, int((end - time.monotonic()) * 1000))):
            self.member, frame = self.socket.recv_multipart()
            message = m.decode(frame)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def send(self, frame: bytes) -> None:
        self.socket.send_multipart([self.member, frame])

    def tell(self, message: object) -> None:
        self.send(m.encode(message))

    def __enter__(self) -> FakeHub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.context.destroy(linger=500)


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]
