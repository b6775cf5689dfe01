"""One sender rank: what persists over sends (memory, channels, remembered manifests), and `send` itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import torch

from weightbus import gpu
from weightbus.backend import Backend, Endpoint, EndpointSpec, GroupSpec
from weightbus.buffers import SlotPool
from weightbus.calibration import copy_bytes_per_s
from weightbus.control import messages as m
from weightbus.deadline import Deadline
from weightbus.errors import (
    ConfigError,
    ConnectError,
    LocalProtocolError,
    PartialRefitError,
    PeerLost,
    RefitAborted,
    SourceError,
    TransferTimeout,
    WeightBusError,
    named,
)
from weightbus.feed import current_event
from weightbus.manifest import Manifest
from weightbus.outbound import Channels, Early, Outbound, PageOut, SendRun, pack_resident
from weightbus.plan import Plan
from weightbus.reactor import REPORT_IT, Reactor, Script, Wait, log
from weightbus.report import Event, EventHandler, RefitReport
from weightbus.resident import Pending, Tables
from weightbus.sources import Source, SourceCache, open_source

QUIET_S = 1.0
DIRECT_QUIET_S = 10.0
CONNECT_S = 30.0
MARGIN_S = 60.0


@attrs.frozen(kw_only=True)
class SenderConfig:
    """Settings of one sender rank; see `WeightBus.sender`."""

    address: str  # rank 0's; on rank 0 what is bound
    token: str | None = attrs.field(repr=False)
    backend_name: str
    rank: int
    senders: int
    device: torch.device
    bucket_bytes: int
    slots: int
    verify: bool
    poison: bool
    max_host_bytes: int | None
    max_device_bytes: int | None
    host: str | None
    direct: bool
    finish_timeout_s: float


@attrs.frozen(eq=False)
class _Live:
    """Direct mode: what receivers may read, and its digest; as good as the plan is."""

    plan: Plan
    tensors: list[torch.Tensor]
    ready: Callable[[], bool]
    digest: Pending | None
    remote: bytes


@attrs.define(eq=False)
class _Send:
    """One `send` call as the bus thread sees it."""

    version: int
    partial: bool = False
    ready: Callable[[], None] | None = None
    plan_message: m.SendPlan | None = None
    run: SendRun | None = None
    done: m.SendDone | None = None
    lost: WeightBusError | None = None
    unready: WeightBusError | None = None
    live: _Live | None = None
    early: Early | None = None

    @property
    def over(self) -> bool:
        return self.done is not None or self.lost is not None


class SenderSide:
    """The sending half of a bus.

    Args:
        tell: delivers a message to the coordinator, in this process or over a link; False when it is not there.
        refused: why the coordinator does not let this sender in, if so.
    """

    def __init__(
        self,
        reactor: Reactor,
        backend: Backend,
        config: SenderConfig,
        tell: Callable[[object], bool],
        join_group: Callable[[m.JoinGroup], object],
        events: EventHandler | None,
        refused: Callable[[], WeightBusError | None] = lambda: None,
    ) -> None:
        self._refused = refused
        self._reactor, self._backend, self._config = reactor, backend, config
        self._tell, self._join_group, self._events = tell, join_group, events
        self.name = f"sender/{config.rank}"
        spec = EndpointSpec(name=self.name, role="send", device=config.device, host=config.host)
        self.endpoint: Endpoint = backend.endpoint(spec)
        limit = config.max_host_bytes if config.device.type == "cpu" else config.max_device_bytes
        self._pool = SlotPool(self.endpoint, config.slots, config.poison, limit)
        self._channels: dict[tuple[str, ...], Channels] = {}
        self._draining: list[Outbound] = []
        self._quiet: dict[str, str] = {}
        self._send: _Send | None = None
        self._connecting = False
        self._in_order = False  # the last send ended so that nobody reads its slots any more
        self._plan: tuple[int, Plan | None] = (0, None)
        self._tables = Tables()
        self._remembered: Manifest | None = None
        self._told: int | None = None
        self._cache = SourceCache()
        self._groups = 0
        if config.device.type == "cuda":  # kernels and buckets at set-up: the first refit does not pay for them
            gpu.warm_up(config.device)
            if not config.direct:
                self._pool.ensure(config.bucket_bytes // 16 * 16)
        self._copy_rate = copy_bytes_per_s(config.device)
        reactor.add(self)

    # ---- the caller's thread

    def send(
        self,
        source: Any,
        *,
        version: int,
        manifest: Any,
        partial: bool,
        cast: Mapping[str, torch.dtype] | None,
        buffers: str,
        timeout_s: float,
        start: Callable[[], None],
        finish: Callable[[m.SendDone], WeightBusError | None],
    ) -> RefitReport:
        """Offer, stream, wait for every engine's outcome.

        Args:
            start: called on the bus thread before the offer.
            finish: called at the end; the error to raise, where this process has the original.
        """
        began = time.perf_counter()
        deadline = Deadline.after(timeout_s + MARGIN_S)
        opened, bad = self._open(source, manifest, partial, cast, buffers)
        bad = bad or self._check_direct(opened)
        call = _Send(version, partial)

        def offer() -> None:
            self._send = call
            start()
            call.ready = lambda: self._tell_ready(opened, bad, version, partial)
            call.ready()

        self._reactor.call(offer)
        try:
            if self._config.direct:
                call.live = self._expose_early(opened, deadline)
            else:
                call.early = self._pack_early(opened)
            self._reactor.wait(lambda: call.run is not None or call.over or self._refused() is not None, deadline)
            refused = self._refused()
            if refused is not None:
                raise refused
            if self._config.senders > 1 and call.plan_message is not None:  # others may be in a collective by now
                self._reactor.wait(lambda: call.run is not None or call.unready is not None, deadline)
            self._stream(call, opened, deadline)
            end = Deadline.after(deadline.remaining_s() + self._config.finish_timeout_s)
            if not self._reactor.wait(lambda: call.over, end) and call.lost is None:
                raise TransferTimeout(
                    "sender 0 never ended this refit",
                    peer="sender/0",
                    phase="commit" if call.plan_message is not None else "offer",
                    advice="All senders call send with the same version, as in a collective.",
                )
        finally:
            if self._send is not None:
                self._reactor.call(self._close_send)
        return self._conclude(call, opened, bad, time.perf_counter() - began, finish)

    def _open(
        self, source: Any, manifest: Any, partial: bool, cast: Any, buffers: str
    ) -> tuple[Source | None, WeightBusError | None]:
        try:
            return open_source(
                source,
                manifest=manifest,
                remembered=self._remembered,
                partial=partial,
                cast=cast,
                buffers=buffers,
                cache=self._cache,
            ), None
        except WeightBusError as exc:
            return None, exc

    def rejoined(self) -> None:
        """The connection to the coordinator stands (again): it knows nothing of this sender."""
        self._told = None
        call = self._send
        if call is not None and call.plan_message is None and not call.over and call.ready is not None:
            call.ready()

    def _tell_ready(self, opened: Source | None, bad: WeightBusError | None, version: int, partial: bool) -> None:
        manifest = opened.manifest if opened is not None else None
        known = manifest is not None and self._told == manifest.digest()
        if manifest is not None:
            self._told = manifest.digest()
        self._tell(
            m.SendReady(
                version=version,
                manifest=None if known else manifest,
                paged=bad is None and manifest is None,
                reorderable=opened is not None and opened.reorderable,
                direct=self._config.direct,
                partial=partial,
                error=None if bad is None else m.WireError.of(bad, self.name),
            )
        )

    def _stream(self, call: _Send, opened: Source | None, deadline: Deadline) -> None:
        run = call.run
        if opened is None or run is None:
            return
        try:
            if self._config.direct:
                self._expose(call, run, opened)
            else:
                run.stream(opened, call.early)
        except Exception as exc:
            error = named(exc, RefitAborted, "send", phase="export", advice=REPORT_IT)
            if isinstance(error, SourceError):
                self._remembered = None
            self._reactor.call(lambda: self._tell(m.SourceEnd(refit=run.refit, error=m.WireError.of(error, self.name))))
            self._reactor.wait(lambda: call.over, deadline)
            raise error from error.__cause__
        if not self._config.direct:
            self._reactor.submit(lambda: self._source_end(run))

    def _expose(self, call: _Send, run: SendRun, opened: Source) -> None:
        """Direct mode: let the receivers read the source's own memory; it stays as it is until they are done."""
        plan, message = run.plan, call.plan_message
        if plan is None or message is None:
            raise LocalProtocolError("direct mode needs a manifest", phase="offer")
        live = call.live
        if live is None or live.plan is not plan:
            try:
                tensors = self._live_tensors(plan, opened)
            except Exception as exc:
                opened.drain()
                error = named(exc, SourceError, "the source", phase="export")
                raise error from error.__cause__
            live = self._live(plan, tensors, run.deadline)
        self._reactor.wait(lambda: (run.go and live.ready()) or call.over, run.deadline)
        if call.over:
            return

        def pull() -> None:
            for lane in message.direct:
                self._tell(m.Pull(refit=run.refit, lane=lane, remote=live.remote))

        self._reactor.submit(pull)
        run.buckets, run.bytes = len(plan.buckets), plan.wire_bytes
        if live.digest is not None:
            start = time.perf_counter()
            value = live.digest.value()
            run.seconds["pack"] += time.perf_counter() - start

            def tell() -> None:
                for lane in message.direct:
                    self._tell(m.PullDigest(refit=run.refit, lane=lane, digest=value))

            self._reactor.call(tell)
        self._reactor.call(lambda: self._tell(m.SourceEnd(refit=run.refit, buckets=run.buckets, seconds=run.seconds)))
        self._reactor.wait(lambda: call.over, run.deadline)

        def quiet() -> bool:
            return all(self._quiet.get(lane) == run.refit for lane in message.direct)

        self._reactor.wait(quiet, Deadline.after(DIRECT_QUIET_S))

    def _live(self, plan: Plan, tensors: list[torch.Tensor], deadline: Deadline) -> _Live:
        ready = current_event(tensors)
        digest = self._tables.digest(plan) if self._config.verify else None
        limit_s = max(1.0, deadline.remaining_s(at_most=600))
        remote = self._reactor.call(lambda: self.endpoint.export(tensors), timeout_s=limit_s)
        return _Live(plan, tensors, ready, digest, remote)

    def _expose_early(self, opened: Source | None, deadline: Deadline) -> _Live | None:
        """While the offer is being answered."""
        found = self._likely(opened)
        try:
            return None if found is None else self._live(*found, deadline)
        except WeightBusError as exc:
            log.debug("will be tried again, with the plan: %s", exc)
            return None

    def _pack_early(self, opened: Source | None) -> Early | None:
        """The first bucket, while the offer is being answered; not where a reader of the last refit may be late."""
        if not self._in_order or not self._pool.regions:
            return None
        start = time.perf_counter()
        found = self._likely(opened)
        if found is None:
            return None
        plan, region = found[0], self._pool.regions[0]
        packed = pack_resident(self._tables, plan, 0, region.tensor, self._config.verify)
        return Early(plan, region, packed, time.perf_counter() - start)

    def _likely(self, opened: Source | None) -> tuple[Plan, list[torch.Tensor]] | None:
        """The last plan, which is likely to hold again, and the tensors where they lie."""
        plan = self._plan[1]
        if plan is None or opened is None or opened.manifest is None:
            return None
        if plan.manifest.digest() != opened.manifest.digest():
            return None
        tensors = opened.resident(plan.manifest)
        if tensors is None or not self._tables.fit(plan, tensors, self._config.device):
            return None
        return plan, tensors

    def _live_tensors(self, plan: Plan, opened: Source) -> list[torch.Tensor]:
        tensors = opened.resident(plan.manifest)
        if tensors is None:
            tensors = list(opened.iterate(plan.manifest))
        if not self._tables.fit(plan, tensors, self._config.device) or opened.started:
            self._refuse_strided(plan, tensors)
        return tensors

    def _check_direct(self, opened: Source | None) -> WeightBusError | None:
        """Direct mode reads live memory: what is sent must be all there."""
        if not self._config.direct or opened is None or opened.reorderable:
            return None
        return ConfigError("direct mode cannot read an iterable", advice="Send a Module or a mapping.")

    def _refuse_strided(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> None:
        wrong = []
        for spec, tensor in zip(plan.manifest, tensors, strict=True):
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                wrong.append(f"{spec.name}: not contiguous")
            elif tensor.device != self._config.device:
                wrong.append(f"{spec.name}: on {tensor.device}, the bus is on {self._config.device}")
        if wrong:
            raise SourceError(
                f"direct mode cannot read {len(wrong)} tensors: {'; '.join(wrong[:10])}",
                phase="export",
                advice="Send them without direct=True.",
            )

    def _source_end(self, run: SendRun) -> None:
        if run.plan is None:
            for outbound in run.outbounds:
                for lane in (*outbound.link.lanes, *outbound.behind):
                    self._tell(
                        m.PageEnd(refit=run.refit, lane=lane, buckets=run.buckets, tensors=len(run.manifest_out))
                    )
        self._tell(m.SourceEnd(refit=run.refit, buckets=run.buckets, seconds=run.seconds))

    def _conclude(
        self,
        call: _Send,
        opened: Source | None,
        bad: WeightBusError | None,
        total_s: float,
        finish: Callable[[m.SendDone], WeightBusError | None],
    ) -> RefitReport:
        if call.lost is not None:
            raise call.lost
        done, run = call.done, call.run
        if done is None:
            raise LocalProtocolError("a send without an end")
        ended = run is not None and run.error is None and done.error is None
        if ended and run is not None and opened is not None and not opened.reorderable and not call.partial:
            self._remembered = Manifest(run.manifest_out) if run.plan is None else run.plan.manifest
        local = finish(done)
        bad = bad or call.unready
        if bad is not None:
            raise bad
        if local is not None:
            raise local
        if done.error is not None:
            error = done.error.to_error()
            if isinstance(error, PartialRefitError):
                error.outcomes = dict(done.outcomes)
            raise error
        manifest = run.plan.manifest if run is not None and run.plan is not None else None
        return RefitReport(
            version=call.version,
            bytes=run.bytes if run else 0,
            buckets=run.buckets if run else 0,
            tensors=len(manifest) if manifest is not None else len(run.manifest_out) if run else 0,
            total_s=total_s,
            seconds=dict(run.seconds) if run else {},
            limits=self._limits(run) if run else {},
            outcomes=dict(done.outcomes),
        )

    def _limits(self, run: SendRun) -> dict[str, float]:
        limits = {} if self._copy_rate is None or run.crossed else {"pack": self._copy_rate}
        links = [outbound.link.channel.link_bytes_per_s for outbound in run.outbounds]
        known = [rate for rate in links if rate is not None]
        if known and len(known) == len(links):
            limits["wire"] = min(known) / len(known)  # of one lane's bytes, where all leave by one network
        return limits

    def cancel(self) -> None:
        """End the send under way; from any thread."""
        call = self._send
        if call is not None:
            refit = call.plan_message.refit if call.plan_message is not None else ""
            error = RefitAborted("cancelled by the sender", phase="stream")

            def tell() -> None:
                self._tell(m.Abort(refit=refit, error=m.WireError.of(error, self.name)))

            self._reactor.submit(tell)

    # ---- messages, on the bus thread

    def handle(self, message: Any) -> None:
        call = self._send
        if isinstance(message, m.Quiet):
            for lane in message.lanes:
                self._quiet[lane] = message.refit
            return
        if call is None or call.over:
            return
        if isinstance(message, m.SendPlan):
            call.plan_message = message
            self._reactor.start(self._prepare(call, message))
        elif isinstance(message, m.SendDone):
            if call.plan_message is not None and call.plan_message.refit != message.refit:
                return  # of a send that gave up before
            call.done = message
            if call.run is not None:
                call.run.end()
            if message.error is None:
                self._close_send()
        elif call.run is not None and message.refit == call.run.refit:
            self._handle_run(call, call.run, message)

    def _handle_run(self, call: _Send, run: SendRun, message: Any) -> None:
        if isinstance(message, m.Go):
            run.go = run.changed = True
        elif isinstance(message, m.Credit):
            run.credit(message.lane, message.bucket)
            self._emit("bucket", run, message.bucket + 1)
        elif isinstance(message, m.Pace):
            run.pace = message.buckets
        elif isinstance(message, m.DropLanes):
            run.drop(message.lanes)
            self._reactor.start(self._settle(run))

    def _emit(self, kind: str, run: SendRun, done: int) -> None:
        if self._events is not None:
            total = len(run.plan.buckets) if run.plan is not None else 0
            version = self._send.version if self._send is not None else -1
            self._events(Event(kind=kind, version=version, done=done, total=total))

    def lost(self, error: WeightBusError | None = None) -> None:
        """The coordinator is gone (further senders only)."""
        self._told = None
        self._plan = (0, None)
        call = self._send
        if call is not None and not call.over:
            call.lost = error or PeerLost(
                "the coordinator (sender rank 0) is gone",
                peer="sender/0",
                phase="stream",
                advice="Start it again; engines keep or discard as their failure row says.",
            )
            if call.run is not None:
                call.run.end()

    def _settle(self, run: SendRun) -> Script:
        """Readers that left get a moment to say so; then what they hold is put aside."""
        yield Wait(lambda: not run.unsafe, Deadline.after(QUIET_S))
        run.settle()

    # ---- before the stream

    def _prepare(self, call: _Send, message: m.SendPlan) -> Script:
        try:
            yield from self._make_run(call, message)
        except Exception as exc:
            log.exception("%s could not make ready to send", self.name)
            error = named(exc, RefitAborted, "making ready to send", phase="connect", advice=REPORT_IT)
            call.unready = error
            self._tell(m.SourceEnd(refit=message.refit, error=m.WireError.of(error, self.name)))

    def _make_run(self, call: _Send, message: m.SendPlan) -> Script:
        yield Wait(lambda: not self._draining, Deadline.after(QUIET_S))
        for outbound in self._draining:  # its own operation will not end: the lane is retired without DRAINED
            self._give_up(outbound)
        failed: dict[str, WeightBusError] = {}
        plan = self._plan_of(message)
        need = plan.capacity_bytes if plan is not None else self._config.bucket_bytes // 16 * 16
        try:
            if not self._config.direct:
                self._pool.ensure(need)
        except WeightBusError as exc:
            failed = {lane: exc for spec in message.outbound for lane in spec.lanes}
        fresh = [spec for spec in message.outbound if not failed and not self._have(spec)]
        if fresh:
            limit = min(CONNECT_S, message.timeout_s)
            if self._backend.capabilities.multicast:  # nothing wakes a rendezvous that waits for the dead
                limit = min(limit, message.stall_timeout_s)
            yield from self._connect(fresh, Deadline.after(limit), failed)
        if call.over and self._config.senders == 1:
            return
        outbounds = [
            Outbound(
                message.refit,
                self._channels[spec.lanes],
                spec.slots,
                self._backend.capabilities,
                self._config.verify,
                message.stall_timeout_s,
                self._released(message.refit),
                self._header_ahead(message.refit),
                Deadline.after(message.timeout_s),
                spec.behind,
            )
            for spec in message.outbound
            if not failed.keys() & set(spec.lanes)
        ]
        call.run = SendRun(
            message.refit,
            self._reactor,
            self._pool,
            outbounds,
            plan,
            self._config.bucket_bytes,
            self._config.verify,
            Deadline.after(message.timeout_s + MARGIN_S),
            self._page_out(message.refit, outbounds),
            self._tables,
        )
        if call.over:  # its source is drained all the same
            call.run.end()
            return
        self._emit("started", call.run, 0)
        self._tell(m.Connected(refit=message.refit, failed={k: m.WireError.of(e) for k, e in failed.items()}))

    def _plan_of(self, message: m.SendPlan) -> Plan | None:
        if message.plan_digest == 0:
            return None
        if self._plan[0] != message.plan_digest or self._plan[1] is None:
            if message.manifest is None or message.plan is None:
                raise LocalProtocolError("a plan that this sender does not know", phase="offer")
            self._plan = (message.plan_digest, message.plan.to_plan(message.manifest))
        return self._plan[1]

    def _released(self, refit: str) -> Callable[[str, int], None]:
        def released(lane: str, bucket: int) -> None:
            self._tell(m.Credit(refit=refit, lane=lane, bucket=bucket))
            if self._send is not None and self._send.run is not None:
                self._emit("bucket", self._send.run, bucket + 1)

        return released

    def _header_ahead(self, refit: str) -> Callable[[str, int, int, bytes], None]:
        def ahead(lane: str, slot: int, nbytes: int, header: bytes) -> None:
            self._tell(m.HeaderAhead(refit=refit, lane=lane, slot=slot, nbytes=nbytes, header=header))

        return ahead

    def _page_out(self, refit: str, outbounds: list[Outbound]) -> Callable[[PageOut], None]:
        def out(page: PageOut) -> None:
            for outbound in outbounds:
                for lane in (*outbound.lanes, *(outbound.behind if outbound.lanes else ())):
                    self._tell(
                        m.Page(
                            refit=refit,
                            lane=lane,
                            bucket=page.bucket,
                            first_tensor=page.first_tensor,
                            specs=page.specs,
                            segments=m.flat_segments(page.segments),
                        )
                    )

        return out

    def _have(self, spec: m.LaneSpec) -> bool:
        known = self._channels.get(spec.lanes)
        return known is not None and known.incarnations == spec.incarnations and known.channel.error is None

    def _connect(self, specs: list[m.LaneSpec], deadline: Deadline, failed: dict[str, WeightBusError]) -> Script:
        """Connect on a helper thread: only there may a backend block."""
        finished: list[bool] = []
        lanes = {lane for spec in specs for lane in spec.lanes}
        stale = [self._channels.pop(key) for key in list(self._channels) if lanes.intersection(key)]
        groups = (
            [self._group(spec, deadline) for spec in specs]
            if self._backend.capabilities.multicast
            else [None] * len(specs)
        )

        def close_stale() -> None:
            for old in stale:
                old.channel.close()

        def connect() -> None:
            if not any(groups):
                close_stale()
            for spec, group in zip(specs, groups, strict=True):
                try:
                    if group is not None:
                        channel = self.endpoint.connect_group(group, (), deadline.remaining_s())
                        key = group.lane_key
                    else:
                        channel = self.endpoint.connect(spec.addresses[0], spec.keys[0], deadline.remaining_s())
                        key = spec.keys[0]
                    self._channels[spec.lanes] = Channels(spec.lanes, spec.incarnations, channel, key)
                except Exception as exc:
                    error = exc if isinstance(exc, WeightBusError) else ConnectError(f"{type(exc).__name__}: {exc}")
                    error.lane, error.phase = error.lane or "+".join(spec.lanes), error.phase or "connect"
                    failed.update(dict.fromkeys(spec.lanes, error))
            if any(groups):  # not before: a reader that has not left the old group yet would take it for a loss
                close_stale()
            finished.append(True)
            self._reactor.wake()

        self._connecting = True
        threading.Thread(target=connect, name="weightbus-connect", daemon=True).start()
        yield Wait(lambda: bool(finished), Deadline.after(deadline.remaining_s() + 5.0))
        self._connecting = not finished
        if not finished:
            failed.update(
                {
                    lane: TransferTimeout("connecting did not end", lane=lane, phase="connect")
                    for s in specs
                    for lane in s.lanes
                }
            )

    def _group(self, spec: m.LaneSpec, deadline: Deadline) -> GroupSpec:
        self._groups += 1
        members = (self.name, *spec.lanes)
        group = GroupSpec(
            group_id=f"{self.endpoint.incarnation}-{self._groups}",
            lane_key=spec.keys[0],
            rank=0,
            members=members,
            address=self.endpoint.address,
        )
        self._join_group(
            m.JoinGroup(
                refit=self._send.plan_message.refit if self._send and self._send.plan_message else "",
                group_id=group.group_id,
                members=members,
                ranks={lane: i + 1 for i, lane in enumerate(spec.lanes)},
                key=group.lane_key,
                address=group.address,
                timeout_s=deadline.remaining_s(),
            )
        )
        return group

    # ---- the bus thread's turn

    def tick(self, fired: Collection[Any]) -> bool:
        moved = False
        if not self._connecting:
            moved |= self.endpoint.progress()
        call = self._send
        if call is not None and call.run is not None:
            moved |= call.run.tick()
            for outbound in call.run.outbounds:
                if outbound.error is not None and outbound.lanes:
                    lanes = tuple(outbound.lanes)
                    outbound.drop(lanes)
                    for lane in lanes:
                        self._tell(m.LaneFailed(refit=call.run.refit, lane=lane, error=m.WireError.of(outbound.error)))
                    moved = True
        if self._draining:
            for outbound in self._draining:
                moved |= outbound.tick()
            for outbound in [o for o in self._draining if o.idle]:
                for lane in outbound.link.lanes:
                    self._tell(m.Drained(refit=outbound.refit, lane=lane))
                self._draining.remove(outbound)
                if self._backend.capabilities.multicast:
                    self._give_up(outbound)  # its readers may be in operations that will not come
        return moved | self._pool.sweep()

    def _give_up(self, outbound: Outbound) -> None:
        known = self._channels.get(outbound.link.lanes)
        if known is outbound.link:
            del self._channels[outbound.link.lanes]
            if self._backend.capabilities.multicast:
                threading.Thread(target=known.channel.close, name="weightbus-retire", daemon=True).start()

    @property
    def polling(self) -> bool:
        call = self._send
        busy = bool(self._draining) or (call is not None and call.run is not None and call.run.polling)
        return busy and not self._connecting

    def sources(self) -> list[Any]:
        return [] if self._connecting else list(self.endpoint.fds())

    def _close_send(self) -> None:
        call, self._send = self._send, None
        run = call.run if call is not None else None
        if run is not None:
            complete = call is not None and call.done is not None and call.done.error is None
            self._in_order = complete and (bool(run.outbounds) or self._in_order)
            run.end()
            if not complete:
                self._draining.extend(run.outbounds)
                self._reactor.start(self._settle(run))

    def close(self) -> None:
        """On the closing thread, after the bus thread has let go."""
        for known in self._channels.values():
            known.channel.drain(QUIET_S)
            known.channel.close()
        self.endpoint.close()
        self._pool.forget()  # memory goes now, not with the garbage collector
        self._channels.clear()
        self._tables.clear()
        log.debug("%s closed", self.name)
