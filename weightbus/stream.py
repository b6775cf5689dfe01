"""`recv` without an adapter: the raw stream of (name, tensor)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from weightbus.adapter import Adapter, Batch, EngineDriver, EngineLoader, Fault, LoadResult, StepFreeDriver
from weightbus.deadline import Deadline
from weightbus.errors import EndpointClosed, RefitAborted
from weightbus.jobs import Job
from weightbus.manifest import Manifest
from weightbus.report import RefitReport

if TYPE_CHECKING:
    from weightbus.receiver import MemberSide


class StreamLoader(EngineLoader):
    """Accepts every manifest; what would be loaded is yielded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.batch: Sequence[Batch] = ()

    def check(self, manifests: Sequence[Manifest], *, partial: bool) -> list[Fault]:
        return []

    def load(self, batches: Sequence[Batch]) -> LoadResult:
        self.batch = batches
        return LoadResult(applied=tuple(name for name, _ in batches[0]))


class StreamAdapter(Adapter):
    """The adapter behind `RefitStream`."""

    name = "stream"

    def __init__(self) -> None:
        self.stream_loader: StreamLoader | None = None

    def driver(self) -> EngineDriver:
        return StepFreeDriver()

    def loader(self, ranks: Sequence[int], device: torch.device | None) -> EngineLoader:
        self.stream_loader = StreamLoader(device or torch.device("cpu"))
        return self.stream_loader


class RefitStream:
    """One version as (name, tensor), in order. Iterate it once.

    Reaching the end verifies and commits; `close`, leaving its ``with`` block early, the next `recv` or the bus's close
    abort an unfinished one. Each bucket is verified before its first tensor is yielded.

    Args:
        copy: True: tensors are the caller's own. False: views, valid until the next step.

    Attributes:
        report: the account, once the end was reached.
    """

    def __init__(self, side: MemberSide, loader: StreamLoader, deadline: Deadline, copy: bool) -> None:
        self._side, self._loader, self._deadline, self._copy = side, loader, deadline, copy
        self._job: Job | None = None
        self._items: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._over = False
        self.report: RefitReport | None = None
        side.jobs.attached = True

    def __iter__(self) -> RefitStream:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        """Raises StopIteration at the committed end; else what broke the refit."""
        if self._over:
            if self.report is not None:
                raise StopIteration
            raise EndpointClosed("this stream was closed before its end")
        while True:
            for name, tensor in self._items:
                return name, tensor.clone() if self._copy else tensor
            if self._job is None:
                self._job = self._next_job()
            self._step(self._job)

    def _next_job(self) -> Job:
        item = self._side.next_item(self._deadline)
        if isinstance(item, Job):
            return item
        self._end()
        if item.error is not None:
            raise item.error
        self.report = item.report
        raise StopIteration

    def _step(self, job: Job) -> None:
        """The caller is past the views of the last batch: on to the next, or to the job's end."""
        self._loader.batch = ()
        try:
            next(job.steps or iter(()))
        except StopIteration:
            self._job = None
            self._side.jobs.execute(job)
        except Exception as exc:
            self._job = None
            self._side.jobs.finish(job, error=exc)
        else:
            self._items = iter(self._loader.batch[0] if self._loader.batch else ())

    def _end(self) -> None:
        self._over = True
        self._items = iter(())
        self._side.jobs.attached = False

    def close(self) -> None:
        """Abort what is unfinished. Idempotent."""
        if not self._over:
            self._end()
            job, self._job = self._job, None
            if job is not None:
                if job.steps is not None:
                    job.steps.close()
                self._side.jobs.finish(job, error=RefitAborted("the stream was closed before its end", phase="load"))
            self._side.abandon(RefitAborted("the stream was closed before its end", phase="load"))

    def __enter__(self) -> RefitStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
