"""From a manifest to buckets of segments. Pure: no clock, no transport.

Placement is first-fit in travel order. A group stays in one bucket unless it is larger than one; then it runs on over as
many buckets as it needs and receivers assemble it. With several senders of equal names and unequal sizes all lanes are
cut at the same tensors and have the same number of buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import attrs
import xxhash

from weightbus.errors import AlignmentError, ConfigError, RemoteProtocolError
from weightbus.manifest import Manifest, TensorSpec

ALIGN_BYTES = 16
MIN_BUCKET_BYTES = 256
MAX_BUCKET_BYTES = 1 << 40


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of segments."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


class Segment(NamedTuple):  # not attrs: a model of many experts makes tens of thousands of them
    """A byte range of one tensor in one bucket.

    Attributes:
        tensor: index into the plan's manifest.
        tensor_offset: first byte within the tensor's row-major bytes.
        offset: first byte within the bucket, a multiple of 16.
        nbytes: length, 0 for an empty tensor.
    """

    tensor: int
    tensor_offset: int
    offset: int
    nbytes: int


@attrs.frozen
class Bucket:
    """One bucket of a lane.

    Attributes:
        index: place within the lane, from 0.
        segments: by rising offset.
        used_bytes: bytes that travel.
    """

    index: int
    segments: tuple[Segment, ...]

    @property
    def used_bytes(self) -> int:
        return self.segments[-1].offset + self.segments[-1].nbytes if self.segments else 0


@attrs.frozen(eq=False, slots=False)
class Plan:
    """The layout of one lane, made once by the coordinator.

    Attributes:
        manifest: in travel order.
        groups: tensors that must reach the loader in one call, two or more indices each.
        buckets: all buckets of the lane.
    """

    manifest: Manifest
    groups: tuple[tuple[int, ...], ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def capacity_bytes(self) -> int:
        """What a slot must hold: the largest bucket, at least 16 bytes."""
        return max([aligned(b.used_bytes) for b in self.buckets] + [ALIGN_BYTES])

    @cached_property
    def wire_bytes(self) -> int:
        return sum(b.used_bytes for b in self.buckets)

    @cached_property
    def digest(self) -> int:
        """64 bits over manifest, groups and segments."""
        h = xxhash.xxh3_64(self.manifest.digest().to_bytes(8, "little"))
        h.update(repr(self.groups).encode())
        for b in self.buckets:
            h.update(repr(list(map(tuple, b.segments))).encode())
        return int(h.intdigest())

    @cached_property
    def deliveries(self) -> tuple[tuple[int, ...], ...]:
        """Per bucket, the tensors that are handed to the loader once it has landed; groups whole and together."""
        _, last = self._spans
        group_of = {i: group for group in self.groups for i in group}
        per_bucket: list[list[int]] = [[] for _ in self.buckets]
        done: set[int] = set()
        for i, at in enumerate(last):
            if i not in group_of:
                per_bucket[at].append(i)
            elif i not in done:
                members = group_of[i]
                done.update(members)
                per_bucket[max(last[m] for m in members)].extend(members)
        return tuple(map(tuple, per_bucket))

    @cached_property
    def placed(self) -> tuple[tuple[tuple[int, Segment], ...], ...]:
        """Per tensor, its segments with their bucket's index, in order."""
        found: list[list[tuple[int, Segment]]] = [[] for _ in self.manifest]
        for bucket in self.buckets:
            for segment in bucket.segments:
                found[segment.tensor].append((bucket.index, segment))
        return tuple(map(tuple, found))

    @cached_property
    def assembled(self) -> frozenset[int]:
        """Tensors that are not delivered as views of one bucket: those in pieces, and groups over several buckets."""
        first, last = self._spans
        split = {i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b}
        for group in self.groups:
            if len({first[i] for i in group} | {last[i] for i in group}) > 1:
                split.update(group)
        return frozenset(split)

    @cached_property
    def assembly_bytes(self) -> int:
        """The most memory that assembling needs at one time."""
        if not self.assembled:
            return 0
        first, _ = self._spans
        change = [0] * (len(self.buckets) + 1)
        for at, tensors in enumerate(self.deliveries):
            for i in self.assembled.intersection(tensors):
                change[first[i]] += self.manifest.tensors[i].nbytes
                change[at + 1] -= self.manifest.tensors[i].nbytes
        peak = now = 0
        for step in change:
            now += step
            peak = max(peak, now)
        return peak

    @cached_property
    def _spans(self) -> tuple[list[int], list[int]]:
        first = [-1] * len(self.manifest)
        last = [-1] * len(self.manifest)
        for b in self.buckets:
            for s in b.segments:
                if first[s.tensor] < 0:
                    first[s.tensor] = b.index
                last[s.tensor] = b.index
        return first, last

    def validate(self, max_bytes: int = MAX_BUCKET_BYTES) -> None:
        """Refuse a plan that came from outside and is not exact: every byte of every tensor once, in bounds.

        Raises:
            RemoteProtocolError: with the first fault.
        """
        position = [0] * len(self.manifest)
        met = bytearray(len(self.manifest))
        for k, b in enumerate(self.buckets):
            end = 0
            if b.index != k:
                raise RemoteProtocolError(f"plan: bucket {k} calls itself {b.index}", bucket=k)
            for s in b.segments:
                if not 0 <= s.tensor < len(position):
                    raise RemoteProtocolError(f"plan: no tensor {s.tensor}", bucket=k)
                if s.offset % ALIGN_BYTES or s.offset < end or s.nbytes < 0 or s.tensor_offset != position[s.tensor]:
                    raise RemoteProtocolError(f"plan: segment {s} is out of place", bucket=k)
                position[s.tensor] += s.nbytes
                met[s.tensor] = 1
                end = s.offset + s.nbytes
            if end > max_bytes:
                raise RemoteProtocolError(f"plan: bucket of {end} bytes, at most {max_bytes}", bucket=k)
        for i, spec in enumerate(self.manifest):
            if position[i] != spec.nbytes or not met[i]:
                raise RemoteProtocolError(f"plan: {position[i]} of {spec.nbytes} bytes", tensor=spec.name)
        grouped = [i for group in self.groups for i in group]
        if len(set(grouped)) != len(grouped) or any(not 0 <= i < len(position) for i in grouped):
            raise RemoteProtocolError("plan: groups overlap or name tensors that are not there")


def check_bucket_bytes(bucket_bytes: int) -> None:
    """Raises ConfigError for a size that cannot work."""
    if not MIN_BUCKET_BYTES <= bucket_bytes <= MAX_BUCKET_BYTES:
        raise ConfigError(
            f"bucket_bytes is {bucket_bytes}; it must be {MIN_BUCKET_BYTES} to {MAX_BUCKET_BYTES}",
            advice="32MiB suits host memory, 1GiB a GPU.",
        )


def permute(manifest: Manifest, order: Sequence[int]) -> Manifest:
    """The manifest with its tensors in `order`."""
    return manifest if list(order) == list(range(len(manifest))) else Manifest([manifest.tensors[i] for i in order])


class _LaneBuilder:
    """Fills one lane's buckets; all lanes of a plan are driven in step."""

    def __init__(self, manifest: Manifest, capacity: int) -> None:
        self.sizes = [spec.nbytes for spec in manifest]
        self.rooms = list(map(aligned, self.sizes))
        self.capacity = capacity
        self.buckets: list[Bucket] = []
        self.segments: list[Segment] = []
        self.end = 0

    def need(self, unit: Sequence[int]) -> int:
        return self.rooms[unit[0]] if len(unit) == 1 else sum(self.rooms[i] for i in unit)

    def whole(self, unit: Sequence[int]) -> None:
        """Place a unit that fits."""
        for i in unit:
            self.put(i, 0, self.sizes[i])

    def put(self, tensor: int, tensor_offset: int, nbytes: int) -> None:
        self.segments.append(Segment(tensor, tensor_offset, self.end, nbytes))
        self.end += aligned(nbytes)

    def close(self) -> None:
        self.buckets.append(Bucket(len(self.buckets), tuple(self.segments)))
        self.segments, self.end = [], 0

    def pour(self, rest: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Place as much of `rest` ((tensor, offset) still to go) as fits; what is left over."""
        while rest:
            tensor, offset = rest[0]
            left = self.sizes[tensor] - offset
            room = self.capacity - self.end
            if room <= 0 and left:
                break
            piece = min(left, room)
            self.put(tensor, offset, piece)
            rest = rest[1:] if piece == left else [(tensor, offset + piece), *rest[1:]]
        return rest


def make_plans(manifests: Sequence[Manifest], groups: Sequence[Sequence[int]], bucket_bytes: int) -> tuple[Plan, ...]:
    """One plan per sender, all cut at the same tensors.

    Args:
        manifests: in travel order, with equal names in equal order (`check_names`); sizes may differ.
        groups: index tuples; members that do not follow each other are assembled by receivers.
        bucket_bytes: the smallest of the lanes' bucket sizes.

    Raises:
        ConfigError: `bucket_bytes` cannot work.
    """
    check_bucket_bytes(bucket_bytes)
    lanes = [_LaneBuilder(m, bucket_bytes // ALIGN_BYTES * ALIGN_BYTES) for m in manifests]
    for unit in _placement_units(len(manifests[0]), groups):
        needs = [lane.need(unit) for lane in lanes]
        if all(lane.end + need <= lane.capacity for lane, need in zip(lanes, needs, strict=True)):
            for lane in lanes:
                lane.whole(unit)
            continue
        crowded = any(lane.segments for lane in lanes)
        if crowded and all(need <= lane.capacity for lane, need in zip(lanes, needs, strict=True)):
            for lane in lanes:
                lane.close()
        rests = [[(i, 0) for i in unit] for _ in lanes]
        early: set[int] = set()
        while True:
            rests = [lane.pour(rest) for lane, rest in zip(lanes, rests, strict=True)]
            if not any(rests):
                break
            early = {k for k, rest in enumerate(rests) if not rest}
            for lane in lanes:
                lane.close()
        for k in early:  # delivered on all lanes in the same step
            lanes[k].put(unit[-1], lanes[k].sizes[unit[-1]], 0)
    if any(lane.segments for lane in lanes) or not lanes[0].buckets:
        for lane in lanes:
            lane.close()
    frozen = tuple(tuple(g) for g in groups)
    plans = [Plan(m, frozen, tuple(lane.buckets)) for m, lane in zip(manifests, lanes, strict=True)]
    return tuple(plans)


def _placement_units(count: int, groups: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Groups whose members follow each other, and single tensors."""
    starts = {g[0]: tuple(g) for g in groups if list(g) == list(range(g[0], g[0] + len(g)))}
    units: list[tuple[int, ...]] = []
    i = 0
    while i < count:
        unit = starts.get(i, (i,))
        units.append(unit)
        i += len(unit)
    return units


def check_names(manifests: Sequence[Manifest]) -> None:
    """Raises AlignmentError where senders do not offer the same names in the same order."""
    want = [spec.names for spec in manifests[0]]
    for rank, manifest in enumerate(manifests[1:], 1):
        have = [spec.names for spec in manifest]
        if have != want:
            only = sorted({n for t in have for n in t} ^ {n for t in want for n in t})
            raise AlignmentError(
                f"senders 0 and {rank} do not offer the same names in the same order"
                + (f"; only on one of them: {', '.join(only[:20])}" if only else ""),
                peer=f"sender/{rank}",
                phase="offer",
            )


def single_page(specs: Sequence[TensorSpec], first: int, segments: Sequence[Segment]) -> int:
    """Digest of one page of a paged refit: its new specs, the index of the first of them, its segments."""
    h = xxhash.xxh3_64(Manifest(specs).digest().to_bytes(8, "little"))
    h.update(repr((first, list(map(tuple, segments)))).encode())
    return int(h.intdigest())
