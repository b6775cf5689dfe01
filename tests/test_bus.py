"""The bus as users meet it: versions, engines, senders, ranks, sources. Values are compared, targets are poisoned."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import weightbus
from tests.harness import FAST, Receiving, poisoned, receiving, same, sender, wait_until, weights
from weightbus import Manifest, TensorSpec, WeightBus
from weightbus.testing.adapters import RecordingAdapter

A, B = weights(0), weights(1)


def fake(like: dict[str, torch.Tensor] = A, **options: Any) -> RecordingAdapter:
    return RecordingAdapter(tensors=poisoned(like), **options)


def together(*calls: Any) -> list[Any]:
    """Run calls at once, as trainer ranks do; results or exceptions."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as exc:
            results[i] = exc

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive(), "a send hangs"
    return results


# ---- versions


def test_a_then_b_then_a_gives_exactly_a() -> None:
    with sender(receivers=1) as bus, receiving(bus, adapter=fake()) as rx:
        for version, values in enumerate([A, B, A]):
            bus.send(values, version=version, timeout=20)
            assert same(rx.engine.weights[0], values)
            assert rx.bus.version == bus.version == version


def test_sending_a_version_again_feeds_only_those_that_lack_it() -> None:
    with sender(receivers=1) as bus, receiving(bus, "e0", adapter=fake()) as first:
        bus.send(A, version=1, timeout=20)
        calls = len(first.engine.calls)
        with receiving(bus, "late", adapter=fake()) as late:
            wait_until(lambda: "late" in bus.engines())
            assert bus.behind() == {"late": "READY(-1)"}
            report = bus.send(A, version=1, timeout=20)
            assert report.outcomes == {"e0": "ALREADY", "late": "READY(1)"}
            assert first.engine.calls[calls:] == []
            assert same(late.engine.weights[0], A)
            assert bus.behind() == {}


def test_a_version_below_the_one_held_is_refused_untouched() -> None:
    with sender(receivers=1) as bus, receiving(bus, adapter=fake()) as rx:
        bus.send(A, version=5, timeout=20)
        with pytest.raises(weightbus.VersionError, match="version 4 is below 5"):
            bus.send(B, version=4, timeout=20)
        assert same(rx.engine.weights[0], A)
        assert rx.engine.serving


def test_a_new_run_may_start_anywhere() -> None:
    with sender(receivers=1) as bus:
        address = bus.address
        rx = receiving(bus, adapter=fake())
        bus.send(A, version=9, timeout=20)
    with rx, WeightBus.sender(address, receivers=1, backend="loopback", bucket_bytes=4096, **FAST) as again:
        again.send(B, version=1, timeout=20)
        assert rx.bus.state == "READY(1)"
        assert same(rx.engine.weights[0], B)


def test_a_partial_refit_changes_only_its_names_and_skips_engines_without_the_base() -> None:
    part = {"layer.2.w": B["layer.2.w"]}
    with sender(receivers=1) as bus, receiving(bus, "e0", adapter=fake()) as rx:
        bus.send(A, version=1, timeout=20)
        with receiving(bus, "late", adapter=fake()) as late:
            wait_until(lambda: "late" in bus.engines())
            with pytest.raises(weightbus.PartialRefitError) as raised:
                bus.send(part, version=2, partial=True, timeout=20)
            assert raised.value.outcomes == {"e0": "READY(2)", "late": "BEHIND"}
            assert same(rx.engine.weights[0], {**A, **part})
            assert "load" not in " ".join(late.engine.calls)
            bus.send({**A, **part}, version=2, timeout=20)
            assert same(late.engine.weights[0], {**A, **part})


# ---- engines


@pytest.mark.parametrize("cohort", ["each", "all"])
def test_one_engine_that_fails(cohort: str) -> None:
    with (
        sender(receivers=2, cohort=cohort) as bus,
        receiving(bus, "good", adapter=fake(), stage="host") as good,
        receiving(bus, "bad", adapter=fake(fail_at="check:1"), stage="host"),
    ):
        bus.send(A, version=1, timeout=20)
        with pytest.raises(weightbus.AlignmentError, match="fails in check"):
            bus.send(B, version=2, timeout=20)
        assert same(good.engine.weights[0], A)


def test_cohort_each_lets_healthy_engines_go_on() -> None:
    with (
        sender(receivers=2) as bus,
        receiving(bus, "good", adapter=fake()) as good,
        receiving(bus, "bad", adapter=fake(fail_at="load:8")) as bad,
    ):
        bus.send(A, version=1, timeout=20)
        with pytest.raises(weightbus.PartialRefitError) as raised:
            bus.send(B, version=2, timeout=20)
        assert raised.value.outcomes == {"good": "READY(2)", "bad": "DIRTY"}
        assert same(good.engine.weights[0], B)
        assert good.engine.serving
        assert not bad.engine.serving
        assert set(bus.behind()) == {"bad"}
        assert bus.send(B, version=2, timeout=20).outcomes == {"good": "ALREADY", "bad": "READY(2)"}
        assert same(bad.engine.weights[0], B)


def test_cohort_all_keeps_everybody_on_the_old_version() -> None:
    faults = [{"kind": "corrupt", "bucket": len(A) + 3, "channel": 0}]
    options = {
        "backend": "weightbus.testing.faults:FaultyBackend",
        "backend_options": {"inner": "loopback", "faults": faults},
    }
    with (
        sender(receivers=2, cohort="all", **options) as bus,
        receiving(bus, "x", adapter=fake(), stage="host", **options) as x,
        receiving(bus, "y", adapter=fake(), stage="host", **options) as y,
    ):
        bus.send(A, version=1, timeout=20)
        with pytest.raises(weightbus.PartialRefitError) as raised:
            bus.send(B, version=2, timeout=20)
        assert raised.value.outcomes == {"x": "READY(1)", "y": "READY(1)"}
        assert same(x.engine.weights[0], A)
        assert same(y.engine.weights[0], A)
        bus.send(B, version=2, timeout=20)
        assert same(x.engine.weights[0], B)
        assert same(y.engine.weights[0], B)


def test_cohort_all_needs_staging_everywhere() -> None:
    with sender(receivers=1, cohort="all") as bus, receiving(bus, adapter=fake()) as rx:
        with pytest.raises(weightbus.ConfigError, match="needs every engine staged"):
            bus.send(A, version=1, timeout=20)
        assert rx.engine.calls == []


def test_engines_of_other_names_and_dtypes_share_one_refit() -> None:
    renamed = {name.replace("layer.", "model.layers."): t for name, t in A.items()}
    with (
        sender(receivers=2) as bus,
        receiving(bus, "plain", adapter=fake()) as plain,
        receiving(bus, "other", adapter=fake(renamed), names={r"layer\.(.*)": r"model.layers.\1"}) as other,
    ):
        bus.send(A, version=1, timeout=20)
        assert same(plain.engine.weights[0], A)
        assert same(other.engine.weights[0], renamed)


def test_cast_changes_the_dtype_on_the_wire() -> None:
    half = {name: t.to(torch.bfloat16) for name, t in A.items()}
    with sender(receivers=1) as bus, receiving(bus, adapter=fake(half)) as rx:
        bus.send(A, version=1, cast={".*": torch.bfloat16}, timeout=20)
        assert same(rx.engine.weights[0], half)


def test_a_colliding_rename_is_refused_before_anything_is_touched() -> None:
    with sender(receivers=1) as bus, receiving(bus, adapter=fake(), names={r"layer\..*": "same"}) as rx:
        with pytest.raises(weightbus.AlignmentError, match="rename"):
            bus.send(A, version=1, timeout=20)
        assert rx.engine.calls == []


# ---- senders and ranks


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (1, 3), (4, 1), (3, 2), (2, 2), (2, 4)])
@pytest.mark.parametrize("lanes", ["paired", "broadcast"])
def test_any_number_of_senders_feeds_any_number_of_ranks(senders: int, receivers: int, lanes: str) -> None:
    with sender(receivers=receivers, senders=senders, lanes=lanes) as first:
        others = [
            WeightBus.sender(address=first.address, rank=k, senders=senders, backend="loopback", bucket_bytes=4096)
            for k in range(1, senders)
        ]
        rxs = [receiving(first, f"e{r}", adapter=fake()) for r in range(receivers)]
        try:
            for version, values in enumerate([A, B]):
                results = together(*[lambda b=b: b.send(values, version=version, timeout=20) for b in [first, *others]])
                for result in results:
                    assert isinstance(result, weightbus.RefitReport), result
                for rx in rxs:
                    assert same(rx.engine.weights[0], values)
            fed = [r.bytes > 0 for r in results]
            want = 1 if lanes == "broadcast" else min(senders, receivers)
            assert sum(fed) == want, "load is spread over the senders that have a lane, others only drain"
        finally:
            for each in [*rxs, *others]:
                each.close()


def test_ranks_get_each_the_stream_of_their_own_sender() -> None:
    """A transposed rank list would pass every name check: values tell."""
    shards = [weights(10 + k) for k in range(3)]
    with sender(receivers=3, senders=3) as first:
        others = [
            WeightBus.sender(address=first.address, rank=k, senders=3, backend="loopback", bucket_bytes=4096)
            for k in (1, 2)
        ]
        with receiving(first, adapter=fake(), ranks=3) as rx:
            results = together(
                *[lambda k=k, b=b: b.send(shards[k], version=1, timeout=20) for k, b in enumerate([first, *others])]
            )
            assert all(isinstance(r, weightbus.RefitReport) for r in results), results
            for k in range(3):
                assert same(rx.engine.weights[k], shards[k])
        for each in others:
            each.close()


def test_unequal_shards_are_cut_at_the_same_tensors() -> None:
    shards = [{f"w{i}": torch.full((n * (i + 1),), float(10 * n + i)) for i in range(5)} for n in (100, 900)]
    with sender(receivers=2, senders=2) as first:
        with WeightBus.sender(
            address=first.address, rank=1, senders=2, backend="loopback", bucket_bytes=4096
        ) as second:
            adapter = _PerRank(shards)
            with receiving(first, adapter=adapter, ranks=2) as rx:
                results = together(
                    *[lambda k=k, b=b: b.send(shards[k], version=1, timeout=20) for k, b in enumerate([first, second])]
                )
                assert all(isinstance(r, weightbus.RefitReport) for r in results), results
                assert results[0].buckets == results[1].buckets
                for k in range(2):
                    assert same(rx.engine.weights[k], shards[k])


class _PerRank(RecordingAdapter):
    """Ranks of unequal shapes."""

    def __init__(self, shards: list[dict[str, torch.Tensor]]) -> None:
        super().__init__(tensors=poisoned(shards[0]))
        for rank, shard in enumerate(shards):
            self.engine.weights[rank] = poisoned(shard)


def test_ranks_in_processes_of_their_own_with_rank_0_driving() -> None:
    with sender(receivers=2) as bus:
        engines = [fake(), fake()]
        rxs = [receiving(bus, "e0", adapter=engines[r], rank=r, ranks=2) for r in range(2)]
        try:
            for version, values in enumerate([A, B]):
                report = bus.send(values, version=version, timeout=20)
                assert report.outcomes == {"e0": f"READY({version})"}
                for r in range(2):
                    assert same(engines[r].engine.weights[r], values)
                wait_until(lambda: all(rx.bus.version == version for rx in rxs))
        finally:
            for rx in rxs:
                rx.close()


@pytest.mark.parametrize("stage", [None, "host"])
def test_a_driver_in_a_process_of_its_own(stage: str | None) -> None:
    with sender(receivers=2) as bus:
        drive = fake()
        engines = [fake(), fake()]
        driver = Receiving(bus.address, "e0", adapter=drive, drive=True, ranks=2)
        rxs = [receiving(bus, "e0", adapter=engines[r], rank=r, ranks=2, stage=stage) for r in range(2)]
        try:
            for version, values in enumerate([A, B]):
                assert bus.send(values, version=version, timeout=20).outcomes == {"e0": f"READY({version})"}
                for r in range(2):
                    assert same({k: v for k, v in engines[r].engine.weights[r].items()}, values)
                assert [c for c in drive.engine.calls if not c.startswith("check")][-3:] == [
                    f"begin {version}",
                    f"finish {version}",
                    "resume",
                ]
                wait_until(lambda: all(rx.bus.version == version for rx in rxs))
        finally:
            for each in [driver, *rxs]:
                each.close()


class RanksOnly(RecordingAdapter):
    """Its processes load; they cannot step the engine."""

    steps_engine = False

    def driver(self) -> Any:
        raise AssertionError("asked for a driver that it does not have")


def test_an_engine_whose_ranks_cannot_step_it_waits_for_its_driver() -> None:
    ranks, drive = RanksOnly(tensors=poisoned(A)), fake()
    with sender(receivers=1) as bus, receiving(bus, "e0", adapter=ranks):
        wait_until(lambda: "e0" in bus.engines())
        with pytest.raises(weightbus.ConnectError, match=r"e0 \(1 of 1 ranks, no driver\)"):
            bus.send(A, version=0, timeout=0.5)
        assert ranks.engine.calls == []
        sending = threading.Thread(target=lambda: bus.send(A, version=1, timeout=20))
        sending.start()
        with Receiving(bus.address, "e0", adapter=drive, drive=True, ranks=1) as driver:
            assert driver.last(1).outcomes == {"e0": "READY(1)"}
            sending.join(20)
        assert same(ranks.engine.weights[0], A)
        assert "begin 1" in drive.engine.calls


def test_a_staged_rank_serves_while_bytes_move_and_its_load_error_reaches_all() -> None:
    with sender(receivers=2) as bus:
        engines = [fake(), fake(fail_at="load:6", fail_times=2)]
        for e in engines:
            e.engine.driven = False
        rxs = [receiving(bus, "e0", adapter=engines[r], rank=r, ranks=2, stage="host") for r in range(2)]
        try:
            bus.send(A, version=1, timeout=20)
            with pytest.raises(weightbus.PartialRefitError, match="fails in load") as raised:
                bus.send(B, version=2, timeout=20)
            assert raised.value.outcomes == {"e0": "DIRTY"}
            assert bus.send(B, version=3, timeout=20).outcomes == {"e0": "READY(3)"}
            for r in range(2):
                assert same(engines[r].engine.weights[r], B)
        finally:
            for rx in rxs:
                rx.close()


def test_a_sender_that_does_not_come_is_named() -> None:
    with sender(receivers=1, senders=2) as first, receiving(first, adapter=fake()) as rx:
        with pytest.raises(weightbus.TransferTimeout, match=r"senders \[1\] did not call send"):
            first.send(A, version=1, timeout=1)
        assert rx.engine.calls == []


def test_senders_that_offer_different_names_are_refused_on_all() -> None:
    with (
        sender(receivers=1, senders=2) as first,
        WeightBus.sender(address=first.address, rank=1, senders=2, backend="loopback", bucket_bytes=4096) as second,
        receiving(first, adapter=fake()),
    ):
        results = together(
            lambda: first.send(A, version=1, timeout=10),
            lambda: second.send({**A, "more": torch.zeros(2)}, version=1, timeout=10),
        )
        assert all(isinstance(r, weightbus.AlignmentError) and "more" in str(r) for r in results), results


def test_an_error_in_one_senders_source_ends_the_send_of_all() -> None:
    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(A.items())[:2]
        raise RuntimeError("rank 1 broke")

    manifest = [TensorSpec.of(k, v) for k, v in A.items()]
    with (
        sender(receivers=2, senders=2) as first,
        WeightBus.sender(address=first.address, rank=1, senders=2, backend="loopback", bucket_bytes=4096) as second,
        receiving(first, "x", adapter=fake()),
        receiving(first, "y", adapter=fake()),
    ):
        results = together(
            lambda: first.send(iter(A.items()), manifest=manifest, version=1, timeout=10),
            lambda: second.send(breaks(), manifest=manifest, version=1, timeout=10),
        )
        assert isinstance(results[1], weightbus.SourceError)
        assert isinstance(results[0], weightbus.WeightBusError)
        assert "rank 1 broke" in str(results[0])


# ---- paged


def generator(values: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from values.items()


def test_a_bare_generator_needs_stage_or_consent() -> None:
    with sender(receivers=1) as bus, receiving(bus, adapter=fake()) as rx:
        with pytest.raises(weightbus.AlignmentError, match="allow_paged_in_place"):
            bus.send(generator(A), version=1, timeout=20)
        assert rx.engine.calls == []


@pytest.mark.parametrize("options", [{"stage": "host"}, {"allow_paged_in_place": True}])
def test_a_bare_generator_is_paged_once_then_remembered(options: dict[str, Any]) -> None:
    big = {**A, "big": torch.randn(10_000), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    with sender(receivers=1) as bus, receiving(bus, adapter=fake(big), **options) as rx:
        bus.send(generator(big), version=1, timeout=20)
        assert same(rx.engine.weights[0], big)
        other = {k: v + 1 for k, v in big.items()}
        bus.send(generator(other), version=2, timeout=20)
        assert same(rx.engine.weights[0], other)
        with pytest.raises(weightbus.SourceError):
            bus.send(generator({k: v for k, v in big.items() if k != "layer.1.w"}), version=3, timeout=20)


def test_missing_names_of_a_paged_refit_end_it_with_nothing_loaded() -> None:
    with sender(receivers=1) as bus, receiving(bus, adapter=fake(), stage="host") as rx:
        some = {k: v for k, v in B.items() if k != "layer.3.w"}
        with pytest.raises(weightbus.PartialRefitError, match=r"missing 'layer\.3\.w'") as raised:
            bus.send(generator(some), version=2, timeout=20)
        assert raised.value.outcomes == {"e0": "READY(initial)"}
        assert "load" not in " ".join(rx.engine.calls)
        assert rx.engine.serving


def test_paged_lanes_of_unequal_buckets_are_aligned_by_name() -> None:
    shards = [weights(20), weights(21)]
    with (
        sender(receivers=2, senders=2, bucket_bytes=9000) as first,
        WeightBus.sender(address=first.address, rank=1, senders=2, backend="loopback", bucket_bytes=20000) as second,
        receiving(first, adapter=fake(), ranks=2, allow_paged_in_place=True) as rx,
    ):
        results = together(
            *[
                lambda k=k, b=b: b.send(generator(shards[k]), version=1, timeout=20)
                for k, b in enumerate([first, second])
            ]
        )
        assert all(isinstance(r, weightbus.RefitReport) for r in results), results
        assert results[0].buckets != results[1].buckets, "boundaries must diverge for this test to mean anything"
        for k in range(2):
            assert same(rx.engine.weights[k], shards[k])


def test_paged_ranks_that_diverge_are_named() -> None:
    with (
        sender(receivers=2, senders=2) as first,
        WeightBus.sender(address=first.address, rank=1, senders=2, backend="loopback", bucket_bytes=4096) as second,
        receiving(first, adapter=fake(), ranks=2, allow_paged_in_place=True),
    ):
        swapped = dict(reversed(list(A.items())))
        results = together(
            lambda: first.send(generator(A), version=1, timeout=20),
            lambda: second.send(generator(swapped), version=1, timeout=20),
        )
        assert all(isinstance(r, weightbus.PartialRefitError) and "diverge" in str(r) for r in results), results


# ---- the raw stream


def test_the_raw_stream_yields_owned_copies_and_commits_at_its_end() -> None:
    with sender(receivers=1) as bus, WeightBus.receiver(bus.address, backend="loopback", poison=True) as rx:
        handle = bus.isend(A, version=3, timeout=20)
        stream = rx.recv(timeout=20)
        kept = dict(stream)
        assert handle.wait(20).outcomes == {"engine": "READY(3)"}
        assert same(kept, A), "copies stay valid when slots are reused and poisoned"
        assert stream.report.version == 3
        assert rx.version == 3


def test_views_of_the_raw_stream_are_poisoned_after_the_next_step() -> None:
    with sender(receivers=1) as bus, WeightBus.receiver(bus.address, backend="loopback", poison=True) as rx:
        handle = bus.isend(A, version=1, timeout=20)
        views = []
        for name, tensor in rx.recv(timeout=20, copy=False):
            assert torch.equal(tensor, A[name])
            views.append(tensor)
        handle.wait(20)
        assert not any(torch.equal(v, A[n]) for v, n in zip(views, A, strict=True))


def test_a_raw_stream_closed_early_aborts_the_refit() -> None:
    with sender(receivers=1) as bus, WeightBus.receiver(bus.address, backend="loopback") as rx:
        handle = bus.isend(A, version=1, timeout=20)
        with rx.recv(timeout=20) as stream:
            next(stream)
        with pytest.raises(weightbus.PartialRefitError, match="closed before its end"):
            handle.wait(20)
        assert rx.state.startswith("DIRTY")
        handle = bus.isend(A, version=1, timeout=20)
        assert same(dict(rx.recv(timeout=20)), A)
        handle.wait(20)


def test_send_and_recv_in_one_call_each() -> None:
    bus = WeightBus.sender("tcp://127.0.0.1:0", backend="loopback")
    address = bus.address
    bus.close()
    module = torch.nn.Linear(4, 3)
    target = torch.nn.Linear(4, 3)
    results = together(
        lambda: weightbus.send(module, address, version=7, backend="loopback", timeout=20),
        lambda: weightbus.recv(address, into=target, backend="loopback", timeout=20),
    )
    assert all(isinstance(r, weightbus.RefitReport) and r.version == 7 for r in results), results
    assert torch.equal(target.weight, module.weight)
    results = together(
        lambda: weightbus.send(module, address, version=8, backend="loopback", timeout=20),
        lambda: dict(weightbus.recv(address, backend="loopback", timeout=20)),
    )
    assert torch.equal(results[1]["bias"], module.bias)


# ---- handles, misuse


def test_irecv_loads_on_a_worker_thread_and_a_cancelled_one_ends() -> None:
    with sender(receivers=1) as bus, WeightBus.receiver(bus.address, backend="loopback", adapter=fake()) as rx:
        handle = rx.irecv(timeout=20)
        bus.send(A, version=1, timeout=20)
        assert handle.wait(20).version == 1
        handle = rx.irecv(timeout=20)
        time.sleep(0.1)
        assert not handle.done()
        handle.cancel()
        with pytest.raises(weightbus.RefitAborted):
            handle.wait(20)


def test_a_cancelled_send_leaves_no_engine_half_way() -> None:
    with sender(receivers=1) as bus, receiving(bus, adapter=fake(stall_at="load:7", stall_s=1.0), stage="host") as rx:
        bus.send(A, version=1, timeout=20)
        with receiving(bus, "slow", adapter=fake(stall_at="load:1", stall_s=1.5)) as slow:
            wait_until(lambda: "slow" in bus.engines())
            handle = bus.isend(B, version=2, timeout=20)
            wait_until(lambda: any(c.startswith("load") for c in slow.engine.calls))
            handle.cancel()
            with pytest.raises(weightbus.RefitError, match="cancelled"):
                handle.wait(20)
            assert same(rx.engine.weights[0], A)
            assert rx.engine.serving
            assert slow.bus.state.startswith("DIRTY")


def test_two_users_at_once_use_after_close_and_wrong_ends_are_refused() -> None:
    with sender(receivers=1) as bus, WeightBus.receiver(bus.address, backend="loopback", adapter=fake()) as rx:
        with pytest.raises(weightbus.LocalProtocolError, match="cannot send"):
            rx.send(A, version=1)
        handle = rx.irecv(timeout=20)
        time.sleep(0.1)
        with pytest.raises(weightbus.EndpointBusy):
            rx.recv(timeout=1)
        with pytest.raises(weightbus.LocalProtocolError, match="does not receive"):
            bus.recv()
        handle.cancel()
    for call in (lambda: bus.send(A, version=1), lambda: rx.recv(timeout=1)):
        with pytest.raises(weightbus.EndpointClosed):
            call()
    bus.close()


def test_recv_times_out_with_advice() -> None:
    with sender(receivers=1) as bus, WeightBus.receiver(bus.address, backend="loopback", adapter=fake()) as rx:
        with pytest.raises(weightbus.TransferTimeout, match="no offer"):
            rx.recv(timeout=0.3)
        handle = rx.irecv(timeout=20)
        bus.send(A, version=1, timeout=20)
        assert handle.wait(20).version == 1


def test_a_send_without_receivers_says_who_is_missing() -> None:
    with sender(receivers=2) as bus, receiving(bus, "half", adapter=fake(), rank=0, ranks=2):
        with pytest.raises(weightbus.ConnectError, match="half"):
            bus.send(A, version=1, timeout=1)


def test_events_are_told() -> None:
    seen: list[weightbus.Event] = []
    with sender(receivers=1, events=seen.append) as bus, receiving(bus, adapter=fake()):
        bus.send(A, version=1, timeout=20)
    assert [e for e in seen if e.kind == "joined"]
    assert max(e.done for e in seen if e.kind == "bucket") == len(A)


def test_manifest_given_by_the_caller_for_a_generator() -> None:
    manifest = Manifest([TensorSpec.of(k, v) for k, v in A.items()])
    with sender(receivers=1) as bus, receiving(bus, adapter=fake()) as rx:
        bus.send(generator(A), version=1, manifest=manifest, timeout=20)
        assert same(rx.engine.weights[0], A)


def test_a_module_sent_between_does_not_change_what_is_remembered_of_a_generator() -> None:
    with sender(receivers=1) as bus, receiving(bus, adapter=fake(), stage="host") as rx:
        bus.send(generator(A), version=1, timeout=20)
        bus.send(dict(reversed(list(B.items()))), version=2, timeout=20)
        assert same(rx.engine.weights[0], B)
        bus.send(generator(A), version=3, timeout=20)
        assert same(rx.engine.weights[0], A)


def test_a_module_that_has_said_begun_is_as_it_was_when_another_engine_refuses() -> None:
    class Holding(torch.nn.Module):
        def __init__(self, **tensors: torch.Tensor) -> None:
            super().__init__()
            for name, tensor in tensors.items():
                self.register_buffer(name, tensor)

    wide, narrow = Holding(a=torch.zeros(8), b=torch.zeros(8)), Holding(a=torch.zeros(8))
    first, second = {"a": torch.ones(8)}, {"a": torch.ones(8), "b": torch.ones(8)}
    with (
        sender(receivers=2) as bus,
        receiving(bus, "wide", adapter="torch", adapter_options={"module": wide, "strict": False}) as one,
        receiving(bus, "narrow", adapter="torch", adapter_options={"module": narrow}) as two,
    ):
        bus.send(first, version=1)
        with pytest.raises(weightbus.AlignmentError, match=r"narrow/0.*'?b'?"):
            bus.send(second, version=2)
        wait_until(lambda: one.bus.state == two.bus.state == "READY(1)", 3)
        assert bus.engines() == {"wide": "READY(1)", "narrow": "READY(1)"}
        assert torch.equal(wide.b, torch.zeros(8))
        assert bus.send({"a": torch.full((8,), 3.0)}, version=2).outcomes == {"wide": "READY(2)", "narrow": "READY(2)"}
        assert wide.a[0] == narrow.a[0] == 3
