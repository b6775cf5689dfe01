"""Broadcasts on process-group objects of our own: one class per library, with one face.

They are built directly on a store: no default group, no global name, no registry of torch.distributed is used.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from weightbus.backend import GroupSpec
from weightbus.deadline import Deadline
from weightbus.errors import PeerLost, TransferTimeout

dist: Any = torch.distributed
cuda: Any = torch.cuda
_LAG_S = 0.1  # NCCL says that it has ended before our event does: longer than this is an error of the communicator
_environment = threading.Lock()


class Operation(ABC):
    """One broadcast in progress. It keeps its tensor alive until it has ended."""

    error: BaseException | None = None

    @abstractmethod
    def poll(self) -> bool:
        """True once it neither reads nor writes its tensor any more; `error` says whether it failed."""


class Collective(ABC):
    """A group that broadcasts from rank 0."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, timeout_s: float) -> Operation:
        """Enter the next broadcast; all members do so in the same order with the same size."""

    @abstractmethod
    def abort(self, reason: BaseException) -> None:
        """End what is in progress where the library can; returns at once."""

    @abstractmethod
    def close(self, wait_s: float = 0.0) -> None:
        """Give the group up; what is in progress ends first, off this thread, which waits `wait_s` seconds for it."""


def _options(timeout_s: float) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timedelta(seconds=max(0.001, timeout_s))
    options.asyncOp = True
    return options


class GlooOperation(Operation):
    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def poll(self) -> bool:
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError as exc:
            self.error = exc.with_traceback(None)  # its frames refer to this work, which keeps the connections open
        return True


class GlooCollective(Collective):
    """Gloo over TCP. An operation cannot be interrupted: it ends by its own timeout, or when its connection breaks."""

    def __init__(self, store: Any, group: GroupSpec, host: str, deadline: Deadline) -> None:
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._threads = 2
        options._timeout = timedelta(seconds=max(0.001, deadline.remaining_s(86400.0)))
        self._holder = [gloo(store, group.rank, len(group.members), options)]

    def broadcast(self, tensor: torch.Tensor, timeout_s: float) -> Operation:
        return GlooOperation(self._holder[0].broadcast([tensor], _options(timeout_s)), tensor)

    def abort(self, reason: BaseException) -> None:
        pass

    def close(self, wait_s: float = 0.0) -> None:
        # Its destructor waits for operations in progress. Not a daemon: the interpreter must not end inside it.
        if self._holder:
            thread = threading.Thread(target=self._holder.pop, name="weightbus-nccl-close")
            thread.start()
            thread.join(wait_s)


class NcclOperation(Operation):
    def __init__(self, group: NcclCollective, work: Any, event: Any, tensor: torch.Tensor, deadline: Deadline) -> None:
        self._group = group
        self._work = work
        self._event = event
        self._tensor = tensor
        self._deadline = deadline
        self._lag: Deadline | None = None

    def poll(self) -> bool:
        try:
            ended = bool(self._event.query())
            if self._group.broken is not None:
                self.error = self._group.broken  # what ended after the abort is not to be trusted
            elif ended and self._work.is_completed():
                self._work.wait()  # raises what NCCL noticed meanwhile; does not block any more
            elif not ended:
                self._watch()
            return ended
        except RuntimeError as exc:  # of NCCL, or a CUDA context that is broken: nothing runs in it
            self.error = exc.with_traceback(None)
            self._group.abort(exc)
            return True

    def _watch(self) -> None:
        if self._deadline.expired:
            self._group.abort(TransferTimeout("it did not end in time, and its communicator was aborted"))
        elif self._work.is_completed():
            self._lag = self._lag or Deadline.after(_LAG_S)
            if self._lag.expired:
                self._group.abort(PeerLost("NCCL reported an error, and its communicator was aborted"))


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """torch's watchdog ends the whole process when a collective fails; a group built in blocking-wait mode has none.

    We never wait for an operation that has not ended, so that mode changes nothing else. It can be chosen by the
    environment only.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    with _environment:
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


class NcclCollective(Collective):
    """NCCL on one GPU: broadcasts run on the group's own stream, after what is enqueued on the current one.

    Attributes:
        broken: why the communicator was aborted, or None.
    """

    def __init__(self, store: Any, group: GroupSpec, device: torch.device, deadline: Deadline) -> None:
        nccl = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=max(1.0, deadline.remaining_s(86400.0)))
        options.group_name = f"weightbus/{group.group_id}"
        options.global_ranks_in_group = list(range(len(group.members)))
        self.broken: BaseException | None = None
        self._device = device
        with cuda.device(device), _without_watchdog():
            self._group: Any = nccl(store, group.rank, len(group.members), options)
        self._side = cuda.Stream(device)
        self._connect(deadline)

    def _connect(self, deadline: Deadline) -> None:
        """The first broadcast makes the communicator, which blocks: it is not left to the first bucket."""
        first = torch.zeros(1, dtype=torch.uint8, device=self._device)
        operation = self.broadcast(first, max(1.0, deadline.remaining_s(86400.0)))
        while not operation.poll():
            time.sleep(0.0005)
        if operation.error is not None:
            self.close()
            raise operation.error

    def broadcast(self, tensor: torch.Tensor, timeout_s: float) -> Operation:
        with cuda.device(self._device):
            work = self._group.broadcast([tensor], _options(timeout_s))
            with cuda.stream(self._side):
                work.synchronize()  # the side stream waits, not the host
                event = cuda.Event()
                event.record(self._side)
        return NcclOperation(self, work, event, tensor, Deadline.after(timeout_s))

    def abort(self, reason: BaseException) -> None:
        self.broken = self.broken or reason
        self.close()

    def close(self, wait_s: float = 0.0) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            # NCCL gives no bound for an abort, so the interpreter must not wait for it.
            thread = threading.Thread(target=_abort_group, args=(group,), name="weightbus-nccl-close", daemon=True)
            thread.start()
            thread.join(wait_s)


def _abort_group(group: Any) -> None:
    try:
        group.abort()
    except RuntimeError:
        pass  # it gave up waiting for NCCL; nobody uses this communicator any more
