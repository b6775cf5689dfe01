"""Brings the streams of several ranks of one engine into step: the same names, for all ranks, in every call.

Pure: no clock, no transport. Whoever feeds it watches the deadline, and names the ranks in `Aligner.hungry` if they
stay silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from weightbus.adapter import Batch
from weightbus.errors import AlignmentError, LocalProtocolError
from weightbus.manifest import dtype_name


@attrs.define
class _Stream:
    """One rank: what it has outstanding. `token` stands for the memory under `batch`."""

    rank: int
    batch: Batch = ()
    token: Any = None
    at: int = 0  # how much of the batch is used up
    outstanding: bool = False
    ended: bool = False
    seen: set[str] = attrs.field(factory=set)
    last: str = ""

    @property
    def left(self) -> int:
        return len(self.batch) - self.at


class Aligner:
    """Feeds on one batch per rank at a time and yields their longest common run.

    More than one outstanding batch would mean views of memory that its sender fills again. Until a token comes back
    from `pull`, the batch that came with it must stay valid.

    Args:
        ranks: ranks in the order in which `pull` returns their batches; unique.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        if not ranks or len(set(ranks)) != len(ranks):
            raise LocalProtocolError(f"an aligner needs at least one rank and each rank once, not {list(ranks)}")
        self._streams = {rank: _Stream(rank) for rank in ranks}

    def feed(self, rank: int, batch: Batch, token: Any) -> None:
        """Give the next batch of `rank`; it may be empty.

        Args:
            batch: names and tensors in the rank's order; borrowed until `token` is returned.
            token: returned by `pull` once the batch is used up.

        Raises:
            AlignmentError: a name came twice.
            LocalProtocolError: unknown rank, a batch still outstanding, or a rank that has ended.
        """
        stream = self._stream(rank)
        if stream.ended or stream.outstanding:
            state = "has ended" if stream.ended else "has a batch outstanding"
            raise LocalProtocolError(f"rank {rank} was fed but {state}", phase="stream")
        for name, tensor in batch:
            if name in stream.seen:
                raise AlignmentError(
                    f"rank {rank} sent {name!r} ({dtype_name(tensor.dtype)}) twice", tensor=name, phase="stream"
                )
            stream.seen.add(name)
        stream.batch, stream.token, stream.at, stream.outstanding = batch, token, 0, True

    def end(self, rank: int) -> None:
        """`rank` has fed its last batch."""
        self._stream(rank).ended = True

    def hungry(self) -> list[int]:
        """Ranks without which nothing can be pulled: no batch outstanding, and not ended."""
        return [stream.rank for stream in self._streams.values() if not (stream.outstanding or stream.ended)]

    @property
    def done(self) -> bool:
        """Every rank has ended and every token was returned."""
        return all(stream.ended and not stream.outstanding for stream in self._streams.values())

    def pull(self) -> tuple[list[Batch], list[Any]] | None:
        """The longest run of names that all outstanding batches begin with.

        Returns:
            One batch per rank, and the tokens of the batches that are used up once these are loaded. The batches are
            empty where the only news is a token of an empty batch. None: some rank in `hungry` must be fed first, or
            all is `done`.

        Raises:
            AlignmentError: ranks go on with different names or dtypes, or end at different names.
        """
        streams = list(self._streams.values())
        empty = [stream for stream in streams if stream.outstanding and not stream.left]
        if empty:
            return [[] for _ in streams], [self._finish(stream) for stream in empty]
        self._check_ends(streams)
        if any(not stream.outstanding for stream in streams):
            return None
        run = _common(streams)
        if run == 0:
            raise AlignmentError(f"ranks diverge: {_heads(streams)}", tensor=_head(streams[0])[0], phase="stream")
        batches: list[Batch] = []
        for stream in streams:
            batches.append(stream.batch[stream.at : stream.at + run])
            stream.at += run
            stream.last = batches[-1][-1][0]
        return batches, [self._finish(stream) for stream in streams if not stream.left]

    def _check_ends(self, streams: Sequence[_Stream]) -> None:
        over = [stream for stream in streams if stream.ended and not stream.outstanding]
        going = [stream for stream in streams if stream.outstanding]
        if over and going:
            ends = ", ".join(f"rank {s.rank} after {s.last!r}" if s.last else f"rank {s.rank} empty" for s in over)
            raise AlignmentError(
                f"ranks end differently: {ends}; but {_heads(going)}", tensor=_head(going[0])[0], phase="stream"
            )

    def _finish(self, stream: _Stream) -> Any:
        token, stream.token, stream.batch, stream.at, stream.outstanding = stream.token, None, (), 0, False
        return token

    def _stream(self, rank: int) -> _Stream:
        if rank not in self._streams:
            raise LocalProtocolError(f"rank {rank} is none of {list(self._streams)}", phase="stream")
        return self._streams[rank]


def _head(stream: _Stream) -> tuple[str, torch.Tensor]:
    return stream.batch[stream.at]


def _heads(streams: Sequence[_Stream]) -> str:
    heads = ((stream.rank, *_head(stream)) for stream in streams)
    return ", ".join(f"rank {rank} goes on with {name!r} ({dtype_name(t.dtype)})" for rank, name, t in heads)


def _common(streams: Sequence[_Stream]) -> int:
    """How many leading entries of all remainders agree in name and dtype."""
    first = streams[0]
    run = min(stream.left for stream in streams)
    for offset in range(run):
        name, tensor = first.batch[first.at + offset]
        for other in streams[1:]:
            their_name, their_tensor = other.batch[other.at + offset]
            if their_name != name or their_tensor.dtype != tensor.dtype:
                return offset
    return run
