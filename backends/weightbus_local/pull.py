"""Direct mode: one process describes its tensors, another copies them. The reader owns the operation.

Host memory is read by process_vm_readv, in batches, so that no call of `advance` takes long. CUDA memory is opened by
IPC once and copied on a stream of its own. Host memory cannot be pulled into CUDA tensors.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from operator import attrgetter
from typing import NoReturn

import attrs
import msgspec
import torch

from weightbus import gpu
from weightbus.backend import State, Work
from weightbus.errors import EndpointClosed, LocalProtocolError, PeerLost, RemoteProtocolError, TransportError
from weightbus.resident import Pending
from weightbus_local.cuda import Span, driver
from weightbus_local.host import RemoteRead, process_space, start_time

_HOST = -1


@attrs.frozen
class Export:
    """What `export` hands out.

    Attributes:
        space: process space of the exporter.
        pid: of the exporter, in that space.
        started: when it was started.
        spans: packed CUDA allocations.
        tensors: (index of its span, offset, bytes) each; index -1: host memory, offset is its address.
    """

    space: str
    pid: int
    started: int
    spans: tuple[bytes, ...]
    tensors: tuple[tuple[int, int, int], ...]


def _extents(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """(address, bytes) of each.

    Raises:
        LocalProtocolError: bytes in memory are not the values in order.
    """
    lies = all(map(_IS_CONTIGUOUS, tensors)) and not any(map(_IS_CONJ, tensors)) and not any(map(_IS_NEG, tensors))
    if not lies:
        _refuse(next(i for i, t in enumerate(tensors) if not t.is_contiguous() or t.is_conj() or t.is_neg()), tensors)
    return list(zip(map(_ADDRESS, tensors), map(_NBYTES, tensors), strict=True))


# a call each, in C: there may be tens of thousands of tensors in every refit
_IS_CONTIGUOUS, _IS_CONJ, _IS_NEG = torch.Tensor.is_contiguous, torch.Tensor.is_conj, torch.Tensor.is_neg
_ADDRESS, _NBYTES = torch.Tensor.data_ptr, attrgetter("nbytes")


def _check_devices(tensors: Sequence[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.device.type not in ("cpu", "cuda"):
            _refuse(index, tensors)


def _refuse(index: int, tensors: Sequence[torch.Tensor]) -> NoReturn:
    t = tensors[index]
    raise LocalProtocolError(
        f"Tensor {index} (shape {tuple(t.shape)}, stride {t.stride()}, {t.device}) cannot move.",
        advice="Pass contiguous tensors on cpu or cuda, or use the streamed mode (direct=False).",
    )


class Exporter:
    """Describes tensors of this process. Repeated for the same tensors it only looks at their addresses."""

    def __init__(self) -> None:
        self._extents: list[tuple[int, int]] | None = None
        self._buffers: dict[int, dict[int, int]] = {}  # device: base: buffer id
        self._data = b""

    def export(self, tensors: Sequence[torch.Tensor]) -> bytes:
        extents = _extents(tensors)
        if extents != self._extents or not self._unchanged():
            self._extents = None
            self._data = self._describe(tensors, extents)
            self._extents = extents
        return self._data

    def _unchanged(self) -> bool:
        """False when an allocation was freed and another one came to its address."""
        return all(
            driver().buffer_ids(device, list(known)) == list(known.values()) for device, known in self._buffers.items()
        )

    def _describe(self, tensors: Sequence[torch.Tensor], extents: Sequence[tuple[int, int]]) -> bytes:
        _check_devices(tensors)
        self._buffers.clear()
        spans: list[Span] = []
        by_base: list[tuple[int, int]] = []  # (base, index of span), sorted
        entries: list[tuple[int, int, int]] = []
        for tensor, (address, nbytes) in zip(tensors, extents, strict=True):
            if tensor.device.type == "cpu" or nbytes == 0:
                entries.append((_HOST, address, nbytes))
                continue
            at = bisect.bisect_right(by_base, (address, len(spans))) - 1
            if at < 0 or address + nbytes > by_base[at][0] + spans[by_base[at][1]].nbytes:
                bisect.insort(by_base, self._add_span(spans, tensor.device.index, address, nbytes))
                at = bisect.bisect_right(by_base, (address, len(spans))) - 1
            base, index = by_base[at]
            entries.append((index, address - base, nbytes))
        packed = tuple(span.pack() for span in spans)
        return msgspec.msgpack.encode(
            Export(process_space(), os.getpid(), start_time(os.getpid()), packed, tuple(entries))
        )

    def _add_span(self, spans: list[Span], device: int, address: int, nbytes: int) -> tuple[int, int]:
        whole = driver().span(device, address, nbytes)
        base, size = driver().range_of(device, address)
        spans.append(attrs.evolve(whole, offset=0, nbytes=size))
        self._buffers.setdefault(device, {})[base] = driver().buffer_ids(device, [base])[0]
        return base, len(spans) - 1


def _check_bounds(export: Export) -> None:
    sizes = {_HOST: 1 << 64} | {index: Span.unpack(packed).nbytes for index, packed in enumerate(export.spans)}
    for span, offset, nbytes in export.tensors:
        if min(offset, nbytes) < 0 or offset + nbytes > sizes.get(span, -1):
            raise RemoteProtocolError("An export points outside its memory.")


class Pull(Work):
    """One `post_read`."""

    def __init__(self, host: RemoteRead, owner: tuple[int, int], copy: Pending | None, digest: bool) -> None:
        self._host = host
        self._owner = owner
        self._copy = copy
        self._digest = digest
        self._next = 0
        self._state = State.PENDING
        self._error: TransportError | None = None

    @property
    def state(self) -> State:
        return self._state

    @property
    def error(self) -> BaseException | None:
        return self._error

    @property
    def digest(self) -> int | None:
        return self._copy.value() if self._digest and self._copy is not None else None

    def advance(self) -> bool:
        """One step; False if there was nothing to do but wait."""
        if self._error is None and self._next < len(self._host):
            try:
                self._host.run(self._next)
                self._next += 1
                if self._next == len(self._host):
                    self._check_owner()
            except TransportError as exc:
                self._error = exc
            return True
        if not self._event_ended():
            return False
        self._state = State.DONE if self._error is None else State.ERROR
        return True

    def _check_owner(self) -> None:
        pid, started = self._owner
        if start_time(pid) != started:
            raise PeerLost(f"Process {pid} ended while its memory was read.")

    def _event_ended(self) -> bool:
        try:
            return self._copy is None or self._copy.ready()
        except RuntimeError as exc:
            self._error = TransportError(f"The copy on the GPU failed: {exc}")
            self._error.__cause__ = exc
            return True

    def abandon(self) -> None:
        """End it now: the endpoint closes. Blocks until a copy on the GPU has ended."""
        if self._copy is not None:
            self._copy.value()
        if self._state is State.PENDING:
            self._error = self._error or EndpointClosed("The endpoint was closed by this side.")
            self._state = State.ERROR


@attrs.define
class _Plan:
    """What one export means for one list of local tensors; holds addresses, no tensors.

    Attributes:
        extents: of the local tensors.
        host: copies within host memory.
        cuda: indices of tensors whose source is CUDA memory.
        copy: the batched copy of those, once it was made: its table stays on the device.
    """

    extents: list[tuple[int, int]]
    host: RemoteRead
    cuda: list[int]
    copy: gpu.CopyPlan | None = None


def _plan(export: Export, local: Sequence[torch.Tensor], extents: list[tuple[int, int]]) -> _Plan:
    if [nbytes for _, nbytes in extents] != [nbytes for _, _, nbytes in export.tensors]:
        raise RemoteProtocolError("The exported tensors have other sizes than those they are to be read into.")
    _check_devices(local)
    host: list[tuple[int, int, int]] = []
    cuda: list[int] = []
    for index, ((span, offset, nbytes), (address, _)) in enumerate(zip(export.tensors, extents, strict=True)):
        if nbytes == 0:
            continue
        if span != _HOST:
            cuda.append(index)
        elif local[index].device.type == "cpu":
            host.append((offset, address, nbytes))
        else:
            raise TransportError(
                f"Tensor {index} lies in host memory and cannot be pulled into {local[index].device}.",
                advice="Use the streamed mode (direct=False).",
            )
    return _Plan(extents, RemoteRead(export.pid, host), cuda)


class Puller:
    """The reading side of an endpoint. Allocations of exporters stay open until they export something else."""

    def __init__(self) -> None:
        self._opened: dict[bytes, torch.Tensor] = {}
        self._last: tuple[bytes, Export] | None = None
        self._plan: _Plan | None = None
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._pending: list[Pull] = []

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def post(self, remote: bytes, local: Sequence[torch.Tensor], *, digest: bool) -> Work:
        export = self._decode(remote)
        extents = _extents(local)
        if self._plan is None or self._plan.extents != extents:
            self._plan = _plan(export, local, extents)
        plan = self._plan
        digest = digest and not len(plan.host) and all(local[i].is_cuda for i in plan.cuda)
        copy = self._launch(export, local, plan, digest) if plan.cuda else None
        pull = Pull(plan.host, (export.pid, export.started), copy, digest)
        self._pending.append(pull)
        return pull

    def _decode(self, remote: bytes) -> Export:
        if self._last is None or self._last[0] != remote:
            try:
                export = msgspec.msgpack.decode(remote, type=Export)
            except (msgspec.DecodeError, ValueError) as exc:
                raise RemoteProtocolError(f"This is no export of the backend local: {exc}") from exc
            _check_bounds(export)
            self._forget_all_but(export)
            self._last, self._plan = (remote, export), None
        export = self._last[1]
        if export.space != process_space():
            raise TransportError(
                "The exporter is on another host, or in another PID namespace.",
                advice="Use the backend 'nixl' or 'ucx', or let containers share PIDs (--pid=host).",
            )
        if start_time(export.pid) != export.started:
            raise PeerLost(f"The exporting process {export.pid} has ended.")
        return export

    def _forget_all_but(self, export: Export) -> None:
        if not self._pending:
            for packed in set(self._opened) - set(export.spans):
                del self._opened[packed]

    def _open(self, export: Export, packed: bytes) -> torch.Tensor:
        if packed not in self._opened:
            memory = driver().open(Span.unpack(packed), same_process=export.pid == os.getpid())
            self._opened[packed] = memory.tensor()
        return self._opened[packed]

    def _launch(self, export: Export, local: Sequence[torch.Tensor], plan: _Plan, digest: bool) -> Pending:
        """Start all copies on one stream, after what the current stream has been given."""
        bases = [self._open(export, packed) for packed in export.spans]
        device = next((local[i].device for i in plan.cuda if local[i].is_cuda), bases[0].device)
        current = torch.cuda.current_stream(device)
        if device.index not in self._streams:
            self._streams[device.index] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device.index]
        stream.wait_stream(current)
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.inference_mode():  # parameters of engines too
            if all(local[i].is_cuda for i in plan.cuda):
                if plan.copy is None:
                    parts = [export.tensors[i] for i in plan.cuda]
                    targets = [plan.extents[i][0] for i in plan.cuda]
                    sources = [bases[span].data_ptr() + offset for span, offset, _ in parts]
                    plan.copy = gpu.CopyPlan(targets, sources, [nbytes for _, _, nbytes in parts], device)
                return plan.copy(digest=digest)
            views = [bases[s][offset : offset + n] for s, offset, n in (export.tensors[i] for i in plan.cuda)]
            torch._foreach_copy_([local[i].detach().view(-1).view(torch.uint8) for i in plan.cuda], views)
            return gpu.after(device)

    def progress(self) -> bool:
        did = False
        for pull in tuple(self._pending):
            did = pull.advance() or did
            if pull.state is not State.PENDING:
                self._pending.remove(pull)
        return did

    def close(self) -> None:
        for pull in self._pending:
            pull.abandon()
        self._pending.clear()
        self._opened.clear()
        self._streams.clear()
