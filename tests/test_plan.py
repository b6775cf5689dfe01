"""Properties of the plan: every byte once, in bounds, aligned; groups whole; lanes of several senders in step."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weightbus.control import messages as m
from weightbus.errors import AlignmentError, ConfigError, RemoteProtocolError
from weightbus.manifest import Manifest, TensorSpec
from weightbus.plan import ALIGN_BYTES, Bucket, Plan, Segment, aligned, check_names, make_plans, permute

QUICK = settings(max_examples=50, deadline=None)
CAPACITIES = st.sampled_from([256, 257, 271, 272, 512, 1000, 4096, 1 << 20])
SIZES = st.one_of(st.integers(0, 3), st.integers(0, 300), st.sampled_from([255, 256, 257, 511, 512, 896, 5000]))


def manifest_of(sizes: list[int]) -> Manifest:
    return Manifest([TensorSpec(f"t{i}", (n,), "uint8") for i, n in enumerate(sizes)])


@st.composite
def lane_manifests(draw: st.DrawFn) -> list[Manifest]:
    """Senders of equal names and unequal sizes."""
    count = draw(st.integers(0, 12))
    lanes = draw(st.integers(1, 3))
    return [manifest_of(draw(st.lists(SIZES, min_size=count, max_size=count))) for _ in range(lanes)]


@st.composite
def disjoint_groups(draw: st.DrawFn, count: int) -> list[tuple[int, ...]]:
    """Some of them contiguous, some scattered over the manifest."""
    owner = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    groups = [tuple(i for i in range(count) if owner[i] == k) for k in range(1, 4)]
    return [g for g in groups if len(g) >= 2]


@st.composite
def planned(draw: st.DrawFn) -> tuple[list[Manifest], list[tuple[int, ...]], int, tuple[Plan, ...]]:
    manifests = draw(lane_manifests())
    groups = draw(disjoint_groups(len(manifests[0])))
    capacity = draw(CAPACITIES)
    return manifests, groups, capacity, make_plans(manifests, groups, capacity)


@QUICK
@given(planned())
def test_every_byte_is_placed_once_in_order_aligned_and_within_capacity(case: object) -> None:
    manifests, _, capacity, plans = case  # type: ignore[misc]
    for manifest, plan in zip(manifests, plans, strict=True):
        covered: Counter[tuple[int, int]] = Counter()
        for index, bucket in enumerate(plan.buckets):
            assert bucket.index == index
            taken: set[int] = set()
            for s in bucket.segments:
                assert s.offset % ALIGN_BYTES == 0
                here = set(range(s.offset, s.offset + s.nbytes))
                assert not taken & here, "segments overlap"
                taken |= here
                covered.update((s.tensor, b) for b in range(s.tensor_offset, s.tensor_offset + s.nbytes))
            assert bucket.used_bytes <= capacity
            assert not taken or max(taken) < bucket.used_bytes
        assert covered == Counter((i, b) for i, spec in enumerate(manifest) for b in range(spec.nbytes))
        assert {s.tensor for b in plan.buckets for s in b.segments} == set(range(len(manifest))), "an empty one is lost"
        assert plan.capacity_bytes <= max(capacity, ALIGN_BYTES)
        plan.validate(capacity)


@QUICK
@given(planned())
def test_each_tensor_is_delivered_once_and_a_group_in_one_call(case: object) -> None:
    _, groups, _, plans = case  # type: ignore[misc]
    for plan in plans:
        assert sorted(i for at in plan.deliveries for i in at) == list(range(len(plan.manifest)))
        units = {i: group for group in groups for i in group}
        for at, here in enumerate(plan.deliveries):
            for i in here:
                unit = units.get(i, (i,))
                place = here.index(unit[0])
                assert here[place : place + len(unit)] == unit, "a group is not in one piece"
                buckets = {k for member in unit for k, _ in plan.placed[member]}
                assert max(buckets) == at, "delivered before its last byte, or later than needed"
                assert (i in plan.assembled) == (buckets != {at})


@QUICK
@given(planned())
def test_lanes_of_unequal_shards_have_equal_steps_with_the_same_tensors(case: object) -> None:
    _, _, _, plans = case  # type: ignore[misc]
    for plan in plans[1:]:
        assert len(plan.buckets) == len(plans[0].buckets)
        for bucket in range(len(plan.buckets)):
            assert plan.deliveries[bucket] == plans[0].deliveries[bucket]


@QUICK
@given(st.lists(st.integers(0, 256), min_size=1, max_size=12), st.data())
def test_a_contiguous_group_that_fits_a_bucket_is_never_cut(sizes: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(sizes) - 1))
    stop = data.draw(st.integers(start + 1, len(sizes)))
    group = tuple(range(start, stop))
    need = sum(aligned(sizes[i]) for i in group)
    assume(len(group) >= 2)
    (plan,) = make_plans([manifest_of(sizes)], [group], max(256, need))
    assert len({k for i in group for k, _ in plan.placed[i]}) == 1
    assert not plan.assembled & set(group)


@QUICK
@given(planned())
def test_the_memory_for_assembly_is_what_unpacking_holds_at_most(case: object) -> None:
    _, _, _, plans = case  # type: ignore[misc]
    for plan in plans:
        first = {i: plan.placed[i][0][0] for i in plan.assembled}
        at = {i: k for k, here in enumerate(plan.deliveries) for i in here}
        peak = max(
            (
                sum(plan.manifest.tensors[i].nbytes for i in plan.assembled if first[i] <= k <= at[i])
                for k in range(len(plan.buckets))
            ),
            default=0,
        )
        assert plan.assembly_bytes == peak


@QUICK
@given(planned())
def test_a_plan_survives_the_wire_and_its_digest_tells_layouts_apart(case: object) -> None:
    _, _, _, plans = case  # type: ignore[misc]
    for plan in plans:
        sent = m.SendPlan(
            refit="r", version=1, timeout_s=1.0, stall_timeout_s=1.0, plan_digest=plan.digest, manifest=plan.manifest,
            plan=m.PlanWire.of(plan), outbound=(),
        )  # fmt: skip
        got = m.decode(m.encode(sent))
        again = got.plan.to_plan(got.manifest)
        assert again.buckets == plan.buckets
        assert again.manifest == plan.manifest
        assert again.digest == plan.digest == got.plan_digest
        others = {p.digest for p in make_plans([plan.manifest], plan.groups, 1 << 20)}
        merged = make_plans([plan.manifest], plan.groups, 1 << 20)[0]
        assert (plan.digest in others) == (merged.buckets == plan.buckets)


def _flat(plan: Plan) -> list[tuple[int, int]]:
    return [(k, j) for k, b in enumerate(plan.buckets) for j in range(len(b.segments))]


def _with(plan: Plan, k: int, segments: list[Segment]) -> Plan:
    buckets = list(plan.buckets)
    buckets[k] = Bucket(k, tuple(segments))
    return Plan(plan.manifest, plan.groups, tuple(buckets))


MUTATIONS = {
    "a segment is left out": lambda s, j: [x for i, x in enumerate(s) if i != j],
    "a segment comes twice": lambda s, j: [*s[: j + 1], *s[j:]],
    "one byte less": lambda s, j: [*s[:j], s[j]._replace(nbytes=s[j].nbytes - 1), *s[j + 1 :]],
    "one byte more": lambda s, j: [*s[:j], s[j]._replace(nbytes=s[j].nbytes + 1), *s[j + 1 :]],
    "a negative length": lambda s, j: [*s[:j], s[j]._replace(nbytes=-s[j].nbytes - 1), *s[j + 1 :]],
    "an unaligned offset": lambda s, j: [*s[:j], s[j]._replace(offset=s[j].offset + 1), *s[j + 1 :]],
    "a negative offset": lambda s, j: [*s[:j], s[j]._replace(offset=-16), *s[j + 1 :]],
    "an overlap": lambda s, j: [*s[:j], s[j]._replace(offset=s[j].offset - 16), *s[j + 1 :]] if j else [],
    "a shifted source": lambda s, j: [*s[:j], s[j]._replace(tensor_offset=s[j].tensor_offset + 1), *s[j + 1 :]],
    "no such tensor": lambda s, j: [*s[:j], s[j]._replace(tensor=999), *s[j + 1 :]],
    "a negative tensor": lambda s, j: [*s[:j], s[j]._replace(tensor=-1), *s[j + 1 :]],
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@QUICK
@given(sizes=st.lists(st.integers(17, 700), min_size=2, max_size=8), capacity=CAPACITIES, data=st.data())
def test_a_plan_from_outside_that_is_not_exact_is_refused(
    mutation: str, sizes: list[int], capacity: int, data: st.DataObject
) -> None:
    (plan,) = make_plans([manifest_of(sizes)], [], capacity)
    k, j = data.draw(st.sampled_from(_flat(plan)))
    wrong = _with(plan, k, MUTATIONS[mutation](list(plan.buckets[k].segments), j))
    with pytest.raises(RemoteProtocolError, match="plan"):
        wrong.validate()


@QUICK
@given(st.lists(st.integers(17, 300), min_size=2, max_size=6), st.data())
def test_buckets_in_another_order_or_too_large_are_refused(sizes: list[int], data: st.DataObject) -> None:
    (plan,) = make_plans([manifest_of(sizes)], [], 256)
    assume(len(plan.buckets) > 1)
    with pytest.raises(RemoteProtocolError, match="calls itself"):
        Plan(plan.manifest, (), plan.buckets[::-1]).validate()
    renumbered = tuple(Bucket(k, b.segments) for k, b in enumerate(plan.buckets[::-1]))
    pieces = any(len(p) > 1 for p in plan.placed)
    if pieces:
        with pytest.raises(RemoteProtocolError, match="out of place"):
            Plan(plan.manifest, (), renumbered).validate()
    largest = max(b.used_bytes for b in plan.buckets)
    with pytest.raises(RemoteProtocolError, match="at most"):
        plan.validate(largest - 1)
    plan.validate(largest)


@pytest.mark.parametrize("groups", [((0, 1), (1, 2)), ((0, 0),), ((0, 99),), ((-1, 0),)])
def test_groups_that_overlap_or_name_no_tensor_are_refused(groups: tuple[tuple[int, ...], ...]) -> None:
    (plan,) = make_plans([manifest_of([20, 20, 20])], [], 256)
    with pytest.raises(RemoteProtocolError, match="groups"):
        Plan(plan.manifest, groups, plan.buckets).validate()


@pytest.mark.parametrize("flat", [[0], [0, 0, 0], [0, 0, 0, 20, 1]])
def test_segments_that_are_not_quadruples_are_refused(flat: list[int]) -> None:
    with pytest.raises(RemoteProtocolError, match="quadruples"):
        m.PlanWire(groups=[], buckets=[flat]).to_plan(manifest_of([20]))


@pytest.mark.parametrize("size", [-1, 0, 1, 255, (1 << 40) + 1])
def test_a_bucket_size_that_cannot_work_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="must be 256 to"):
        make_plans([manifest_of([4])], [], size)


def test_nothing_to_send_is_one_empty_bucket() -> None:
    (plan,) = make_plans([manifest_of([])], [], 256)
    assert [b.used_bytes for b in plan.buckets] == [0]
    (plan,) = make_plans([manifest_of([0, 0])], [], 256)
    assert [[s.tensor for s in b.segments] for b in plan.buckets] == [[0, 1]]
    assert plan.wire_bytes == 0


@QUICK
@given(st.permutations(range(6)))
def test_a_permuted_manifest_has_the_tensors_in_that_order(order: list[int]) -> None:
    manifest = manifest_of([1, 2, 3, 4, 5, 6])
    assert [s.name for s in permute(manifest, order)] == [f"t{i}" for i in order]


def test_senders_of_other_names_or_order_are_named() -> None:
    a = manifest_of([1, 2, 3])
    check_names([a, manifest_of([9, 9, 9])])
    with pytest.raises(AlignmentError, match=r"senders 0 and 1 .* only on one of them: t3"):
        check_names([a, manifest_of([1, 2, 3, 4])])
    with pytest.raises(AlignmentError, match="same order"):
        check_names([a, Manifest(a.tensors[::-1])])
