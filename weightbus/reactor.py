"""The one thread of a bus and the one place that waits.

All protocol state is changed on this thread only. Other threads hand in closures (`submit`) and wait on what the thread
changes (`wait`). A protocol that has steps is a script: a generator that yields `Wait(predicate, deadline)` and is
resumed with True when the predicate holds, with False when the deadline has passed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Protocol

import attrs
import zmq

from weightbus.deadline import Deadline
from weightbus.errors import EndpointClosed, LocalProtocolError

log = logging.getLogger("weightbus")

IDLE_POLL_MS = 50
BUSY_SLEEP_S = 30e-6
SPIN_S = 500e-6  # after an event the next is awaited awake: waking a thread costs more than most answers take
SPIN_CORES = 4  # but not where the core is wanted for packing and loading
NEVER = Deadline.after(None)


@attrs.frozen
class Wait:
    """What a script waits for: resumed with True when `predicate()` holds, with False at `deadline`."""

    predicate: Callable[[], bool]
    deadline: Deadline = NEVER


Script = Generator[Wait, bool, None]


class Service(Protocol):
    """Something the thread looks after."""

    def tick(self) -> bool:
        """Do what can be done now; True if anything happened. Never blocks."""

    @property
    def polling(self) -> bool:
        """True while something must be asked again soon and no descriptor will tell."""

    def sources(self) -> list[Any]:
        """ZeroMQ sockets and file descriptors that wake the thread."""


class Reactor:
    """Runs services and scripts on one daemon thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._services: list[Service] = []
        self._scripts: list[tuple[Script, Wait]] = []
        self._stop = False
        self._spin_s = SPIN_S if len(os.sched_getaffinity(0)) >= SPIN_CORES else 0.0
        self._pid = os.getpid()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"weightbus-{name}", daemon=True)
        self._thread.start()

    # ---- other threads

    def check(self) -> None:
        """Raises when the bus cannot be used from here."""
        if os.getpid() != self._pid:
            raise LocalProtocolError(
                f"{self.name} was made in process {self._pid} and is used in its fork {os.getpid()}",
                advice="Make the bus after forking, or start processes by spawn.",
            )
        if self.failure is not None:
            raise LocalProtocolError(f"the thread of {self.name} failed: {self.failure!r}") from self.failure
        if self._stop:
            raise EndpointClosed(f"{self.name} is closed")

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` on the thread, soon. From any thread."""
        self._calls.append(call)
        self.wake()

    def wake(self) -> None:
        if not self._stop:
            os.eventfd_write(self._wake, 1)

    def call(self, fn: Callable[[], Any], timeout_s: float = 30.0) -> Any:
        """Run `fn` on the thread and return its result, or raise what it raised."""
        self.check()
        box: list[Any] = []

        def run() -> None:
            try:
                box.append((fn(), None))
            except BaseException as exc:
                box.append((None, exc))

        self.submit(run)
        if not self.wait(lambda: bool(box), Deadline.after(timeout_s)):
            raise LocalProtocolError(f"the thread of {self.name} did not answer in {timeout_s} s")
        result, exc = box[0]
        if exc is not None:
            raise exc
        return result

    def wait(self, predicate: Callable[[], bool], deadline: Deadline) -> bool:
        """Block until `predicate()` holds (True) or `deadline` passes (False)."""
        with self._changed:
            while not predicate():
                self.check()
                if deadline.expired:
                    return False
                self._changed.wait(deadline.remaining_s(at_most=0.25))
        return True

    def notify(self) -> None:
        """Let waiting threads look again."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread and end the context. Services must have closed their sockets by then."""
        if self._stop or os.getpid() != self._pid:
            return
        self._stop = True
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(10)
        self.context.destroy(linger=200)
        os.close(self._wake)
        self.notify()

    # ---- the thread

    def add(self, service: Service) -> None:
        self._services.append(service)

    def remove(self, service: Service) -> None:
        if service in self._services:
            self._services.remove(service)

    def start(self, script: Script) -> None:
        """Start a script; on the thread."""
        self._advance(script, None)

    def _advance(self, script: Script, answer: bool | None) -> None:
        try:
            wait = next(script) if answer is None else script.send(answer)
        except StopIteration:
            return
        self._scripts.append((script, wait))

    def _step_scripts(self) -> bool:
        moved = False
        scripts, self._scripts = self._scripts, []
        for script, wait in scripts:
            if wait.predicate():
                self._advance(script, True)
                moved = True
            elif wait.deadline.expired:
                self._advance(script, False)
                moved = True
            else:
                self._scripts.append((script, wait))
        return moved

    def _pass(self) -> bool:
        moved = False
        while self._calls:
            self._calls.popleft()()
            moved = True
        for service in list(self._services):
            moved |= service.tick()
        return self._step_scripts() or moved

    def _run(self) -> None:
        poller = zmq.Poller()
        watched: list[Any] = []
        last_s = 0.0
        try:
            while not self._stop:
                moved = self._pass()
                if moved:
                    self.notify()
                sources = [self._wake, *(s for service in self._services for s in service.sources())]
                if sources != watched:
                    poller, watched = zmq.Poller(), sources
                    for source in sources:
                        poller.register(source, zmq.POLLIN)
                polling = any(service.polling for service in self._services)
                if moved or self._calls:
                    last_s = time.monotonic()
                    continue
                awake = time.monotonic() - last_s < self._spin_s
                events = poller.poll(0 if polling or awake else IDLE_POLL_MS)
                if any(source == self._wake for source, _ in events):
                    os.eventfd_read(self._wake)
                elif polling and not events and not awake:
                    time.sleep(BUSY_SLEEP_S)
        except BaseException as exc:
            if not self._stop:
                self.failure = exc
                log.exception("the thread of %s failed", self.name)
            self.notify()
