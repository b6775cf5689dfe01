"""The one thread of a bus and the one place that waits.

All protocol state is changed on the bus thread only, or by the guest that it lends its turn to: a caller in send, recv or
drive that waits does the work itself, so that nobody has to be woken. Other threads hand in closures (`submit`) and wait on
what these change (`wait`). A protocol that has steps is a script: a generator that yields `Wait(predicate, deadline)` and is
resumed with True when the predicate holds, with False when the deadline has passed. A script that raises ends alone.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator
from typing import Any, Protocol

import attrs
import zmq

from weightbus.deadline import Deadline
from weightbus.errors import EndpointClosed, LocalProtocolError, RefitAborted, WeightBusError, named

log = logging.getLogger("weightbus")

IDLE_POLL_S = 0.05
STEPS = 8
AWAY_S = 5e-3  # a guest that packs or loads for longer is stood in for
STARVE_S = 5e-3  # messages are looked at so often at least, however busy the lanes keep a guest
RECENT_S = 0.1
ASK_AGAIN_S = (30e-6, 1e-3)  # at least, at most: what has been quiet for long is asked less often
SPIN_S = 500e-6  # after an event the next is awaited awake: waking a thread costs more than most answers take
SPIN_CORES = 4  # but not where the core is wanted for packing and loading
NEVER = Deadline.after(None)
REPORT_IT = "This is a fault of weightbus or of a plugin: please report it with the log."


@attrs.frozen
class Wait:
    """What a script waits for: resumed with True when `predicate()` holds, with False at `deadline`."""

    predicate: Callable[[], bool]
    deadline: Deadline = NEVER


Script = Generator[Wait, bool, None]


class Service(Protocol):
    """Something the thread looks after."""

    def tick(self, fired: Collection[Any]) -> bool:
        """Do what can be done now; True if anything happened. Never blocks.

        Args:
            fired: the sources, of all services, that are ready.
        """

    @property
    def polling(self) -> bool:
        """True while there is something to do, or to ask again soon, that no source will tell of."""

    def sources(self) -> list[Any]:
        """ZeroMQ sockets and file descriptors that wake the thread."""


@attrs.frozen(eq=False)
class _Waiter:
    """A thread in `Reactor.wait`; `gate` is locked while it sleeps."""

    predicate: Callable[[], bool]
    gate: threading.Lock = attrs.field(factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        self.gate.acquire()

    def holds(self) -> bool:
        try:
            return self.predicate()
        except Exception:  # the waiting thread meets it itself
            return True


class Reactor:
    """Runs services and scripts on one daemon thread.

    Attributes:
        failure: what ended the thread.
        on_broken: told when a script has ended by an exception that it did not handle itself.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._waiters: list[_Waiter] = []
        self._services: list[Service] = []
        self._scripts: list[tuple[Script, Wait]] = []
        self._stop = False
        self._spin_s = SPIN_S if len(os.sched_getaffinity(0)) >= SPIN_CORES else 0.0
        self._pid = os.getpid()
        self.failure: BaseException | None = None
        self.on_broken: Callable[[WeightBusError], None] = lambda error: None
        self._guest = 0  # the thread that may take the turn
        self._turn = threading.Lock()  # whoever has it does the work; the bus thread's by default
        self._wanted = self._inside = self._again = False  # the guest wants the turn; it has it and waits
        self._left_s = self._last_s = self._polled_s = 0.0
        self._recall = threading.Event()
        self._poller, self._watched = zmq.Poller(), list[Any]()
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

    def submit(self, call: Callable[[], None], *, steps: int = STEPS) -> None:
        """Run `call` on the thread, soon; at once where the calling thread has its turn. From any thread.

        Args:
            steps: see `turn`.
        """
        self._calls.append(call)
        self.turn(steps)

    def wake(self) -> None:
        with self._wake_lock:  # else the descriptor could be closed, and be another's, by the time it is written to
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
        """Block until `predicate()` holds (True) or `deadline` passes (False).

        The bus thread looks at the predicate too, and wakes this one only when it holds: it must be cheap and pure.
        """
        if self._guest == threading.get_ident():
            return self._wait_turning(predicate, deadline)
        waiter = _Waiter(predicate)
        self._waiters.append(waiter)
        try:
            while not predicate():
                self.check()
                if deadline.expired:
                    return False
                waiter.gate.acquire(timeout=deadline.remaining_s(at_most=0.25))
        finally:
            self._waiters.remove(waiter)
        return True

    def notify(self) -> None:
        """Wake those whose predicate holds; on the thread, or when it has ended."""
        for waiter in list(self._waiters):
            if waiter.gate.locked() and (self._over or waiter.holds()):
                waiter.gate.release()

    def close(self) -> None:
        """Stop the thread and end the context. Services must have closed their sockets by then."""
        if self._stop or os.getpid() != self._pid:
            return
        with self._wake_lock:
            self._stop = True
            os.eventfd_write(self._wake, 1)
        self._recall.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(10)
        self._turn.acquire(timeout=10)  # the guest may be polling
        self.context.destroy(linger=200)
        os.close(self._wake)
        self.notify()

    # ---- the guest

    def attach(self) -> None:
        """Lend the turn to the calling thread until `detach`: it does the work whenever it waits.

        An exception of a signal handler (KeyboardInterrupt) that comes while the guest waits leaves the bus as it is; in the
        midst of a step it ends it.
        """
        self._recall.clear()
        self._left_s = time.monotonic()
        self._guest = threading.get_ident()

    def detach(self) -> None:
        if self._guest == threading.get_ident():
            self._guest = 0
            self._recall.set()

    def turn(self, steps: int = 1) -> None:
        """Act on what was just handed in: here, where the calling thread may; else soon.

        Args:
            steps: how often at most, as long as scripts go on: what one has done, another may wait for. With more than one
                the turn is waited for.
        """
        may = self._guest == threading.get_ident()
        if may and (self._take_turn() if steps > 1 else self._turn.acquire(blocking=False)):
            try:
                for _ in range(steps):
                    if time.monotonic() - self._polled_s < STARVE_S:
                        self._act(())
                    else:
                        self._once(0)
                    if not self._again or self._over:
                        break
            finally:
                self._left()
        else:
            self.wake()

    def _wait_turning(self, predicate: Callable[[], bool], deadline: Deadline) -> bool:
        while not predicate():
            self.check()
            if deadline.expired:
                return False
            if self._take_turn():
                try:
                    self._inside = True
                    while not (predicate() or self._over or deadline.expired):
                        self._once(deadline.remaining_s(at_most=IDLE_POLL_S))
                finally:
                    self._left()
        return True

    @property
    def _over(self) -> bool:
        return self._stop or self.failure is not None

    def _take_turn(self) -> bool:
        if self._turn.acquire(blocking=False):
            return True
        self._wanted = True
        try:
            self.wake()
            return self._turn.acquire(timeout=0.25)
        finally:
            self._wanted = False

    def _left(self) -> None:
        self._inside, self._left_s = False, time.monotonic()
        self._turn.release()

    def _lend(self) -> None:
        """The bus thread stands aside while the guest keeps coming."""
        self._turn.release()
        while self._guest and not self._over:
            busy = time.monotonic() - self._left_s < RECENT_S
            self._recall.wait(AWAY_S if busy else IDLE_POLL_S)
            if not self._inside and time.monotonic() - self._left_s > AWAY_S and not self._wanted:
                break
        self._turn.acquire()

    # ---- the thread

    def add(self, service: Service, *, first: bool = False) -> None:
        """Look after `service`. `first`: it brings messages, so that the others act on them in the same pass."""
        self._services.insert(0 if first else len(self._services), service)

    def remove(self, service: Service) -> None:
        if service in self._services:
            self._services.remove(service)

    def start(self, script: Script) -> None:
        """Start a script; on the thread."""
        self._advance(script, lambda: next(script))

    def _advance(self, script: Script, step: Callable[[], Wait]) -> None:
        try:
            self._scripts.append((script, step()))
        except StopIteration:
            return
        except Exception as exc:  # others share the thread
            log.exception("a script of %s raised", self.name)
            self.on_broken(named(exc, RefitAborted, f"a script of {self.name}", advice=REPORT_IT))

    def _step_scripts(self) -> bool:
        moved = False
        for waiting in tuple(self._scripts):
            step = self._due(*waiting)
            if step is not None:
                self._scripts.remove(waiting)
                self._advance(waiting[0], step)
                moved = True
        return moved

    @staticmethod
    def _due(script: Script, wait: Wait) -> Callable[[], Wait] | None:
        """How to go on with a script; None while it has to wait."""
        try:
            answer = wait.predicate()
        except Exception as exc:
            raised = exc
            return lambda: script.throw(raised)  # to the script that asked
        return (lambda: script.send(answer)) if answer or wait.deadline.expired else None

    def _pass(self, fired: Collection[Any]) -> tuple[bool, bool]:
        """One turn of everything: whether anything happened, and whether services may have to act on it."""
        moved = bool(self._calls)
        while self._calls:
            self._calls.popleft()()
        for service in tuple(self._services):
            moved |= service.tick(fired)
        stepped = self._step_scripts()
        return moved or stepped, stepped

    def _once(self, limit_s: float) -> None:
        """Wait for something, `limit_s` at most, and act on it; by whoever has the turn."""
        sources = [self._wake, *(s for service in self._services for s in service.sources())]
        if sources != self._watched:
            self._poller, self._watched = zmq.Poller(), sources
            for source in sources:
                self._poller.register(source, zmq.POLLIN)
        polling = any(service.polling for service in self._services)
        # a caller that was woken, or packs, or loads, wants the interpreter for itself
        asleep = self._inside or (bool(self._waiters) and all(w.gate.locked() for w in tuple(self._waiters)))
        awake = asleep and time.monotonic() - self._last_s < self._spin_s
        now = self._again or polling or awake or bool(self._calls)
        self._polled_s = time.monotonic()
        try:
            fired = {source for source, _ in self._poller.poll(0 if now else math.ceil(limit_s * 1e3))}
        except Exception as exc:
            self._fail(exc)
            return
        if self._wake in fired:
            os.eventfd_read(self._wake)
            if self._wanted and not self._inside:
                self._again = True  # the guest does it all, at once: what woke this thread may be told by nothing else
                return
        elif polling and limit_s and not (fired or awake or self._again):
            quiet_s = time.monotonic() - self._last_s
            time.sleep(min(max(quiet_s / 50, ASK_AGAIN_S[0]), ASK_AGAIN_S[1]))
        self._act(fired)

    def _act(self, fired: Collection[Any]) -> None:
        try:
            moved, self._again = self._pass(fired)
            if moved:
                self._last_s = time.monotonic()
                self.notify()
        except BaseException as exc:
            self._fail(exc)
            if not isinstance(exc, Exception):
                raise

    def _fail(self, exc: BaseException) -> None:
        if not self._over:
            self.failure = exc
            log.exception("the thread of %s failed", self.name, exc_info=exc)
        self.notify()

    def _run(self) -> None:
        with self._turn:
            try:
                while not self._over:
                    if self._wanted or (self._guest and time.monotonic() - self._left_s < AWAY_S):
                        self._lend()
                    else:
                        self._once(IDLE_POLL_S)
            except BaseException as exc:
                self._fail(exc)
