"""Work that must run in the caller's thread: what `recv` and `drive` do between waiting.

The bus thread queues jobs (begin, load, finish, resume, abort); whoever is in `recv` takes and runs them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import attrs

from weightbus.deadline import Deadline
from weightbus.errors import TransferTimeout
from weightbus.reactor import NEVER, Reactor, Wait, log

Loads = Generator[None, None, None]


@attrs.define(eq=False)
class Job:
    """One call for the caller's thread.

    Attributes:
        kind: begin, load, finish, resume or abort.
        run: the call.
        steps: to be gone through before it; a raw stream does so step by step.
        done: it has ended, with `result` or with `error`.
    """

    kind: str
    run: Callable[[], Any]
    steps: Loads | None = None
    started: bool = False
    done: bool = False
    result: Any = None
    error: BaseException | None = None


@attrs.frozen
class End:
    """A refit has ended for this process: its report, or its error."""

    report: Any = None
    error: BaseException | None = None


class Jobs:
    """The queue between the bus thread and the one consumer."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._queue: deque[Job | End] = deque()
        self._lock = threading.Lock()
        self.attached = False

    # ---- the bus thread

    def run(
        self,
        kind: str,
        call: Callable[[], Any],
        deadline: Deadline = NEVER,
        give_up: Callable[[], bool] = lambda: False,
        steps: Loads | None = None,
    ) -> Generator[Wait, bool, Job]:
        """Script step: have `call` run in the caller's thread; returns the ended job.

        A job that nobody has taken by `deadline`, or when `give_up()` holds, ends with TransferTimeout. One that runs
        cannot be interrupted; the script waits for it.
        """
        job = Job(kind, call, steps)
        self._queue.append(job)
        yield Wait(lambda: job.done or (not job.started and give_up()), deadline)
        if not job.done and self._withdraw(job):
            job.error = TransferTimeout(
                f"nobody came to run {job.kind!r}",
                phase=job.kind,
                advice="Call recv() (or drive()) in a loop; without stage it must be waiting when an update comes.",
            )
        elif not job.done:
            yield Wait(lambda: job.done)
        return job

    def _withdraw(self, job: Job) -> bool:
        with self._lock:
            if job.started:
                return False
            self._queue.remove(job)
            job.done = True
            return True

    def end(self, end: End) -> None:
        """Tell the consumer that its refit is over; without a consumer it is only logged."""
        if self.attached:
            self._queue.append(end)
        elif end.error is not None:
            log.info("a refit ended while nobody was in recv: %s", end.error)

    # ---- the consumer

    def waiting(self) -> bool:
        """Something is there to be taken."""
        return bool(self._queue)

    def take(self, deadline: Deadline) -> Job | End | None:
        """The next job or end; None at the deadline."""
        while self._reactor.wait(lambda: bool(self._queue), deadline):
            with self._lock:
                if self._queue:
                    item = self._queue.popleft()
                    if isinstance(item, Job):
                        item.started = True
                    return item
        return None

    def finish(self, job: Job, result: Any = None, error: BaseException | None = None) -> None:
        """The consumer has run `job`."""
        job.result, job.error = result, error
        job.done = True
        self._reactor.turn()

    def execute(self, job: Job) -> None:
        """Run a job to its end; its exception goes to the bus thread, not to the caller."""
        try:
            for _ in job.steps or ():
                pass
            result = job.run()
        except Exception as exc:
            self.finish(job, error=exc)
        else:
            self.finish(job, result)
