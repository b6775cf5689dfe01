"""What users hold: `WeightBus`, and `send` and `recv` for one refit."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from weightbus.adapter import Adapter
from weightbus.backend import Backend, Capabilities
from weightbus.config import (
    Faults,
    SizeLike,
    check_receiver,
    check_sender,
    default_bucket_bytes,
    device_of,
    host_id,
    parse_bytes,
)
from weightbus.control import messages as m
from weightbus.control import security
from weightbus.control.coordinator import Coordinator
from weightbus.control.roster import CoordinatorConfig
from weightbus.control.wire import Link
from weightbus.deadline import Deadline
from weightbus.errors import ConfigError, EndpointBusy, LocalProtocolError, TransferTimeout, WeightBusError
from weightbus.lane import InboundConfig
from weightbus.manifest import Manifest, TensorSpec
from weightbus.names import NameRule, parse_rules
from weightbus.reactor import Reactor
from weightbus.receiver import MemberConfig, MemberSide, local_host_towards
from weightbus.registry import load_adapter, load_backend
from weightbus.report import Event, EventHandler, RefitReport, SlowWarning, guarded
from weightbus.sender import SenderConfig, SenderSide
from weightbus.stream import RefitStream, StreamAdapter

Source = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
Names = Mapping[str, str] | Sequence[NameRule | tuple[str, str]] | None
DEFAULT_TIMEOUT_S = 600.0


class Handle:
    """A send or a recv under way on a worker thread. Errors surface in `wait`."""

    def __init__(self, call: Callable[[], RefitReport], cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._result: RefitReport | None = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._result = call()
            except BaseException as exc:
                self._error = exc

        self._thread = threading.Thread(target=run, name="weightbus-call", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """It has ended, in success or in error."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> RefitReport:
        """Its report.

        Args:
            timeout: seconds to wait here; the call goes on after a TransferTimeout of this wait.

        Raises:
            TransferTimeout: not ended yet. Or what the call itself raised.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TransferTimeout(f"not ended after {timeout} s", phase="wait", advice="wait again, or cancel().")
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise LocalProtocolError("a call ended without a result")
        return self._result

    def cancel(self) -> None:
        """Ask the call to end; `wait` then raises. Returns at once."""
        self._cancel()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.done():
            self.cancel()
            self._thread.join(60)


class WeightBus:
    """One end of a bus, long-lived: buffers, registrations and connections persist over refits.

    Made by `sender`, `receiver` or `driver`; used by one thread at a time; closed by `close` or as a context manager.
    Every call blocks to the point its docstring states, with a timeout in seconds.
    """

    def __init__(self, reactor: Reactor, lends_on: torch.device | None) -> None:
        self._reactor, self._lends_on = reactor, lends_on
        self._closers: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._sender: SenderSide | None = None
        self._coordinator: Coordinator | None = None
        self._member: MemberSide | None = None
        self._stream_adapter: StreamAdapter | None = None
        self._stream: RefitStream | None = None
        self._slow_warning = SlowWarning()
        self._address = ""
        self._lost: WeightBusError | None = None
        self._cancelled = threading.Event()

    # ---- making one

    @classmethod
    def sender(
        cls,
        bind: str | None = None,
        *,
        address: str | None = None,
        receivers: int | None = None,
        rank: int = 0,
        senders: int = 1,
        backend: str = "local",
        backend_options: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        bucket_bytes: SizeLike | None = None,
        slots: int = 2,
        lanes: str = "paired",
        fanout: str = "star",
        cohort: str = "each",
        verify: str | bool = True,
        poison: bool = False,
        direct: bool = False,
        max_host_bytes: SizeLike | None = None,
        max_device_bytes: SizeLike | None = None,
        token: str | None = None,
        advertise: str | None = None,
        run_id: str | None = None,
        stall_timeout: float = 30.0,
        finish_timeout: float = 300.0,
        events: EventHandler | None = None,
    ) -> WeightBus:
        """The trainer's end.

        Args:
            bind: rank 0: ``tcp://host:port``; port 0 is bound and then known by `address`.
            address: further ranks: rank 0's `address`.
            receivers: rank 0: receiver ranks that must be here, with their drivers, before the first send; None: any.
            rank: this sender's place; rank 0 coordinates.
            senders: how many there are; all call `send` with the same version, as in a collective.
            backend: entry-point name, or ``"module:Class"``.
            backend_options: for the backend's constructor.
            device: where buckets live; default the CPU.
            bucket_bytes: size of a bucket, bytes or text such as ``"512MiB"``; default 4 MiB with
                `local`, else 32 MiB; on CUDA 1 GiB.
            slots: buckets per side; 2 overlaps packing, transfer and load.
            lanes: ``"paired"``: receiver r is fed by sender r mod S; ``"broadcast"``: sender 0 feeds all.
            fanout: rank 0: ``"star"``: a sender feeds each of its ranks itself; ``"chain"``: it feeds the first, and
                each passes buckets on to the next as they arrive. A rank that leaves takes those behind it out of
                this refit. Needs a backend that can forward (nixl, ucx).
            cohort: ``"each"``: healthy engines go on; ``"all"``: all or none, needs staging everywhere.
            verify: False or ``"off"``: no digests.
            poison: fill released slots with 0xA5.
            direct: receivers read this side's tensors where they lie, into their engine's memory: one pass, no buckets.
                Needs a backend that can pull, Modules or mappings of contiguous tensors on `device`, adapters with
                resident memory (torch), no stage. The tensors must not change until `send` has returned.
            max_host_bytes: bound on this side's buckets in host memory.
            max_device_bytes: the same for device memory.
            token: shared secret; default ``WEIGHTBUS_TOKEN``. Without one only loopback binds are accepted.
            advertise: host that others shall use, when it is not the one bound.
            run_id: names the run that versions count in; random by default.
            stall_timeout: seconds without progress after which a peer is excluded.
            finish_timeout: seconds an engine may take from COMMIT to serving.
            events: called with `Event`, on the bus thread or in this end's own waiting caller.

        Raises:
            ConfigError: all wrong settings at once; nothing was bound or allocated.
        """
        faults = Faults()
        cpu = torch.device("cpu")
        where = faults.get(lambda: device_of(device), cpu)
        loaded = faults.get(lambda: load_backend(backend, backend_options), NO_BACKEND)
        default = default_bucket_bytes(where.type, shared=loaded.capabilities.shares_memory)
        size = faults.get(
            lambda: check_sender(
                bind=bind,
                address=address,
                rank=rank,
                senders=senders,
                receivers=receivers,
                slots=slots,
                lanes=lanes,
                fanout=fanout,
                cohort=cohort,
                verify=verify,
                bucket_bytes=default if bucket_bytes is None else bucket_bytes,
                device=where,
                stall_timeout=stall_timeout,
                finish_timeout=finish_timeout,
                max_host_bytes=max_host_bytes,
                max_device_bytes=max_device_bytes,
            ),
            0,
        )
        token = faults.get(lambda: security.resolve_token(token), None)
        faults.get(lambda: _check_backend(loaded, backend, where, direct=direct, chain=fanout == "chain"), None)
        faults.refuse()
        config = SenderConfig(
            address=str(bind if rank == 0 else address),
            token=token,
            backend_name=backend,
            direct=direct,
            rank=rank,
            senders=senders,
            device=where,
            bucket_bytes=size,
            slots=slots,
            verify=verify not in (False, "off"),
            poison=poison,
            max_host_bytes=parse_bytes(max_host_bytes),
            max_device_bytes=parse_bytes(max_device_bytes),
            host=_data_host(bind or address, advertise),
            finish_timeout_s=finish_timeout,
        )
        coordination = CoordinatorConfig(
            bind=config.address,
            advertise=advertise,
            token=token,
            run_id=run_id or secrets.token_hex(8),
            host=host_id(),
            backend_name=backend,
            bucket_bytes=size,
            senders=senders,
            receivers=receivers,
            lanes=lanes,
            fanout=fanout,
            slots=slots,
            cohort=cohort,
            verify=config.verify,
            stall_timeout_s=stall_timeout,
            finish_timeout_s=finish_timeout,
        )
        bus = cls(Reactor(f"sender/{rank}"), _lends_on(loaded, where))
        if rank == 0:
            bus._make(lambda: bus._coordinate(coordination, config, loaded, guarded(events)))
        else:
            bus._make(lambda: bus._follow(config, loaded, guarded(events)))
        return bus

    def _make(self, make: Callable[[], None]) -> None:
        try:
            self._reactor.call(make)
        except BaseException:
            self._reactor.close()
            raise

    def _coordinate(
        self, coordination: CoordinatorConfig, config: SenderConfig, backend: Backend, events: EventHandler | None
    ) -> None:
        reactor = self._reactor

        def changed(engine: str, kind: str) -> None:
            if events is not None:
                events(Event(kind=kind, engine=engine))

        coordinator = Coordinator(reactor, coordination, backend, lambda message: side.handle(message), changed)

        def tell(message: object) -> bool:
            coordinator.on_sender(0, message)
            return True

        try:
            side = SenderSide(reactor, backend, config, tell, coordinator.join_group, events)
        except BaseException:
            coordinator.close()
            raise
        self._coordinator, self._sender, self._address = coordinator, side, coordinator.roster.hub.address
        self._closers += [lambda: reactor.remove(side), coordinator.close]

    def _follow(self, config: SenderConfig, backend: Backend, events: EventHandler | None) -> None:
        reactor, identity = self._reactor, secrets.token_hex(16)

        def up() -> None:
            link.send(
                m.Join(
                    protocol=m.PROTOCOL,
                    member=f"sender/{config.rank}",
                    incarnation=identity,
                    host=host_id(),
                    pid=os.getpid(),
                    backend=config.backend_name,
                    fingerprint=backend.fingerprint(),
                    sender_rank=config.rank,
                    senders=config.senders,
                    bucket_bytes=config.bucket_bytes,
                )
            )

        def handle(message: Any) -> None:
            if isinstance(message, m.Welcome) and message.error is None:
                self._lost = None
                side.rejoined()
            elif isinstance(message, m.Welcome) and message.error is not None:
                self._lost = message.error.to_error()
                side.lost(self._lost)
            else:
                side.handle(message)

        def refused() -> WeightBusError | None:
            return self._lost or link.refused

        link = Link(reactor, config.address, config.token, identity.encode(), handle, up, lambda: side.lost())
        side = SenderSide(reactor, backend, config, link.send, link.send, events, refused)
        reactor.add(link, first=True)
        self._sender, self._address = side, config.address

        def leave() -> None:
            reactor.remove(side)
            link.send(m.Leave(reason="closed"))
            reactor.remove(link)
            link.close()

        self._closers.append(leave)

    @classmethod
    def receiver(
        cls,
        address: str,
        *,
        engine: str = "engine",
        rank: int | None = None,
        ranks: int = 1,
        backend: str = "local",
        backend_options: Mapping[str, Any] | None = None,
        adapter: str | Adapter | None = None,
        adapter_options: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        names: Names = None,
        stage: str | None = None,
        allow_paged_in_place: bool = False,
        poison: bool = False,
        max_host_bytes: SizeLike | None = None,
        max_device_bytes: SizeLike | None = None,
        token: str | None = None,
        advertise: str | None = None,
        events: EventHandler | None = None,
    ) -> WeightBus:
        """An inference process's end. It returns before the sender is there.

        Args:
            address: the sender's `address`.
            engine: the engine this process belongs to; unique on the bus.
            rank: this process's rank; None: driver and all `ranks` in one object. The process of rank 0 also drives the
                engine, where its adapter can, unless a `driver` has joined.
            ranks: how many ranks the engine has.
            backend: as on the sender.
            backend_options: for the backend's constructor.
            adapter: entry-point name, ``"module:Class"`` or an Adapter; None: `recv` returns the raw stream.
            adapter_options: for the adapter's constructor.
            device: where buckets land; default the adapter's device.
            names: rules from sent names to this engine's: mapping of regular expression to replacement.
            stage: ``"host"`` or ``"device"``: keep a verified copy of the whole refit, then load; None: load as it lands.
            allow_paged_in_place: accept a bare generator without `stage`; missing names then show only at its end.
            poison: fill released slots with 0xA5.
            max_host_bytes: bound on slots, stage and assembly in host memory.
            max_device_bytes: the same for device memory.
            token: shared secret; default ``WEIGHTBUS_TOKEN``.
            advertise: IP address under which senders reach this host's data plane; None: found by the route.
            events: called with `Event`, on the bus thread or in this end's own waiting caller.

        Raises:
            ConfigError: all wrong settings at once.
        """
        faults = Faults()
        faults.get(
            lambda: check_receiver(
                address=address,
                engine=engine,
                rank=rank,
                ranks=ranks,
                stage=stage,
                max_host_bytes=max_host_bytes,
                max_device_bytes=max_device_bytes,
            ),
            None,
        )
        rules = faults.get(lambda: parse_rules(names), ())
        token = faults.get(lambda: security.resolve_token(token), None)
        feeds = faults.get(lambda: _adapter(adapter, adapter_options), StreamAdapter())
        where = faults.get(lambda: feeds.device if device is None else device_of(device), torch.device("cpu"))
        loaded = faults.get(lambda: load_backend(backend, backend_options), NO_BACKEND)
        faults.get(lambda: _check_backend(loaded, backend, where), None)
        faults.refuse()
        serves = tuple(range(ranks)) if rank is None else (rank,)
        config = MemberConfig(
            address=address,
            engine=engine,
            world=ranks,
            serves=serves,
            drives="fallback" if 0 in serves and feeds.steps_engine else "no",
            token=token,
            device=where,
            inbound=InboundConfig(
                stage=stage,
                paged_in_place=allow_paged_in_place,
                poison=poison,
                names=rules,
                max_host_bytes=parse_bytes(max_host_bytes),
                max_device_bytes=parse_bytes(max_device_bytes),
                host=_data_host(address, advertise),
            ),
            backend_name=backend,
            host=host_id(),
            bind_host=advertise,
        )
        return cls._member_bus(config, loaded, feeds, events)

    @classmethod
    def driver(
        cls,
        address: str,
        *,
        engine: str,
        ranks: int,
        adapter: str | Adapter,
        adapter_options: Mapping[str, Any] | None = None,
        token: str | None = None,
        bind_host: str | None = None,
        events: EventHandler | None = None,
    ) -> WeightBus:
        """The driver of an engine whose ranks are receivers in other processes. It has no lane.

        Args:
            address: the sender's `address`.
            engine: the engine to drive.
            ranks: how many ranks it has.
            adapter: entry-point name, ``"module:Class"`` or an Adapter.
            adapter_options: for the adapter's constructor.
            token: shared secret; default ``WEIGHTBUS_TOKEN``.
            bind_host: local address for the channel to the ranks; None: found by the route to `address`.
            events: called with `Event`, on the bus thread or in this end's own waiting caller.
        """
        faults = Faults()
        faults.get(lambda: check_receiver(address=address, engine=engine, ranks=ranks), None)
        token = faults.get(lambda: security.resolve_token(token), None)
        steps = faults.get(lambda: _adapter(adapter, adapter_options), StreamAdapter())
        faults.refuse()
        config = MemberConfig(
            address=address,
            engine=engine,
            world=ranks,
            serves=(),
            drives="yes",
            token=token,
            device=torch.device("cpu"),
            inbound=InboundConfig(),
            backend_name="",
            host=host_id(),
            bind_host=bind_host,
        )
        return cls._member_bus(config, NO_BACKEND, steps, events)

    @classmethod
    def _member_bus(
        cls, config: MemberConfig, backend: Backend, adapter: Adapter, events: EventHandler | None
    ) -> WeightBus:
        name = f"{config.engine}/{config.serves[0] if config.serves else 'driver'}"
        bus = cls(Reactor(name), _lends_on(backend, config.device))

        def make() -> None:
            member = MemberSide(bus._reactor, config, backend, adapter, guarded(events))
            bus._member, bus._address = member, config.address
            bus._stream_adapter = adapter if isinstance(adapter, StreamAdapter) else None
            bus._closers.append(member.leave)

        bus._make(make)
        return bus

    # ---- the sender's end

    def send(
        self,
        source: Source,
        *,
        version: int,
        manifest: Manifest | Sequence[TensorSpec] | None = None,
        partial: bool = False,
        cast: Mapping[str, torch.dtype] | None = None,
        buffers: str = "persistent",
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> RefitReport:
        """Bring every engine to `version`; returns when each has reported, and the caller's memory may change again.

        Sending the same version again feeds only engines that lack it.

        Args:
            source: a Module, a mapping, or an iterable of (name, tensor).
            version: rises within a run.
            manifest: what an iterable will yield; without it the previous send's is remembered, and a first send of a
                bare generator is paged.
            partial: only these names change; engines on another version than the last are BEHIND and skipped.
            cast: pattern of names to the dtype on the wire.
            buffers: of a Module: ``"persistent"``, or ``"all"`` for non-persistent ones too.
            timeout: seconds for the refit; engines may finish after it within `finish_timeout`.

        Raises:
            AlignmentError: engines refuse what is offered: all faults of all ranks; nothing was touched.
            PartialRefitError: some engine is not on `version`; carries every outcome, and the first cause.
            SourceError, VersionError, ConnectError, ConfigError: as they say. Engines hold what the error says.
        """
        with self._use():
            side, coordinator = self._sender, self._coordinator
            if side is None:
                raise LocalProtocolError("this bus receives; it cannot send", advice="Make one with WeightBus.sender.")
            if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < 1 << 62:
                raise ConfigError(f"version is {version!r}; it must be an integer from 0")
            if not isinstance(timeout, (int, float)) or not timeout > 0:
                raise ConfigError(f"timeout is {timeout!r}; it must be seconds above 0")

            def start() -> None:
                if coordinator is not None:
                    coordinator.start(version, partial, timeout)

            engine_seconds: dict[str, float] = {}
            engine_limits: dict[str, float] = {}

            def finish(done: m.SendDone) -> WeightBusError | None:
                run = coordinator.run if coordinator is not None else None
                if run is not None and run.refit == done.refit:
                    for e in run.engines.values():
                        parts = [(c.seconds, c.limits) for c in e.completes.values()]
                        for seconds, limits in [*parts, (e.report.seconds if e.report else {}, {})]:
                            for phase, s in seconds.items():
                                if s >= engine_seconds.get(phase, 0.0):
                                    engine_seconds[phase] = s
                                    engine_limits[phase] = limits.get(phase, 0.0)
                    return run.error
                return None

            report = side.send(
                source,
                version=version,
                manifest=manifest,
                partial=partial,
                cast=cast,
                buffers=buffers,
                timeout_s=timeout,
                start=start,
                finish=finish,
            )
            report.seconds.update(engine_seconds)
            report.limits.update({phase: limit for phase, limit in engine_limits.items() if limit > 0})
            self._slow_warning.of(report, side.name)
            return report

    def isend(self, source: Source, *, version: int, **options: Any) -> Handle:
        """`send` on a worker thread, for Modules and mappings of plain tensors, unchanged until `wait` has returned."""
        if not isinstance(source, (torch.nn.Module, Mapping)):
            raise ConfigError("isend takes a Module or a mapping of plain tensors", advice="Use send for iterables.")
        values = source.values() if isinstance(source, Mapping) else source.parameters()
        if any(type(t).__name__ == "DTensor" for t in values):
            raise ConfigError(
                "isend cannot gather DTensors: a collective belongs to the caller's thread", advice="Use send."
            )
        if self._sender is None:
            raise LocalProtocolError("this bus receives; it cannot send", advice="Make one with WeightBus.sender.")
        return Handle(lambda: self.send(source, version=version, **options), self._sender.cancel)

    def engines(self) -> dict[str, str]:
        """Every engine seen, with what it last said it holds."""
        if self._coordinator is None:
            return {}
        return {e.name: f"{e.outcome}({e.version})" for e in self._coordinator.roster.engines.values()}

    def behind(self) -> dict[str, str]:
        """Engines that do not hold the last version sent, with what they hold. Keep traffic off them."""
        return {} if self._coordinator is None else self._coordinator.behind()

    # ---- the receiver's end

    def recv(self, timeout: float = DEFAULT_TIMEOUT_S, *, copy: bool = True) -> Any:
        """The next version.

        With an adapter: load it and return a `RefitReport`; on a rank without a driver beside it, return once the rank
        has verified (or, staged, loaded) its part. Without an adapter: a `RefitStream`.

        Args:
            timeout: seconds for waiting for an offer and for the refit.
            copy: raw stream only: yield owned copies; False: views, valid until the next step.

        Raises:
            TransferTimeout: no offer, or no end, in time. An engine that had begun is put in order first.
            Otherwise what broke the refit: `bus.state` says what is held.
        """
        with self._use():
            member = self._member
            if member is None or member.ranks is None:
                raise LocalProtocolError("this bus does not receive", advice="Make one with WeightBus.receiver.")
            deadline = Deadline.after(timeout)
            if self._stream is not None:
                self._stream.close()
                self._stream = None
            if self._stream_adapter is not None and self._stream_adapter.stream_loader is not None:
                member.wait_offer(deadline)
                self._stream = RefitStream(member, self._stream_adapter.stream_loader, deadline, copy)
                return self._stream
            self._cancelled.clear()
            return member.run_jobs(deadline, self._cancelled.is_set)

    def irecv(self, timeout: float = DEFAULT_TIMEOUT_S) -> Handle:
        """`recv` on a worker thread, which loads there. Needs an adapter."""
        if self._stream_adapter is not None:
            raise ConfigError("irecv needs an adapter", advice="Without one, iterate recv().")
        return Handle(lambda: self.recv(timeout), self._cancelled.set)

    def drive(self, timeout: float = DEFAULT_TIMEOUT_S) -> RefitReport:
        """Run begin, finish and resume of the next refit of this driver's engine."""
        with self._use():
            if self._member is None or self._member.driver is None:
                raise LocalProtocolError("this bus drives no engine", advice="Make one with WeightBus.driver.")
            self._cancelled.clear()
            return self._member.run_jobs(Deadline.after(timeout), self._cancelled.is_set)

    @property
    def version(self) -> int:
        """The version this end holds: last sent, or last published by the engine's driver; -1 before the first."""
        if self._coordinator is not None:
            return self._coordinator.base_version
        return self._member.held.version if self._member is not None else -1

    @property
    def state(self) -> str:
        """Receiver and driver: what the engine holds, such as ``READY(7)`` or ``DIRTY(-1): reason``."""
        if self._member is None:
            return ""
        held = self._member.held
        return f"{held.outcome.value}({held.version})" + (f": {held.reason}" if held.reason else "")

    # ---- both

    @property
    def address(self) -> str:
        """Where members connect, ``tcp://host:port``; publish it."""
        return self._address

    def _lends(self) -> bool:
        """Whether the calling thread may do the bus thread's work: for torch it must be in the same state."""
        device = self._lends_on
        if device is None or torch.is_inference_mode_enabled() or torch.get_default_device().type != "cpu":
            return False
        return device.type == "cpu" or device.index == torch.cuda.current_device()

    def _use(self) -> _Use:
        return _Use(self)

    def close(self) -> None:
        """Let go of everything. Idempotent; a peer's refit under way fails with a named error. Not from a fork."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._stream is not None:
            self._stream.close()
        if self._sender is not None:
            self._sender.cancel()

        def stop() -> None:
            for closer in self._closers:
                closer()

        try:
            self._reactor.call(stop)
        finally:
            self._reactor.close()
            for side in (self._sender, self._member):
                if side is not None:
                    side.close()

    def __enter__(self) -> WeightBus:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Use:
    """One user at a time, alive, not in a fork."""

    def __init__(self, bus: WeightBus) -> None:
        self._bus = bus

    def __enter__(self) -> None:
        self._bus._reactor.check()
        if not self._bus._lock.acquire(blocking=False):
            raise EndpointBusy("this bus is in use by another thread", advice="Use one bus from one thread at a time.")
        if self._bus._lends():
            self._bus._reactor.attach()

    def __exit__(self, *_: object) -> None:
        self._bus._reactor.detach()
        self._bus._lock.release()


class _NoBackend(Backend):
    """Of a driver, which has no lane."""

    name = ""
    capabilities = Capabilities()

    def probe(self) -> Any:
        raise LocalProtocolError("a driver has no backend")

    def endpoint(self, spec: Any) -> Any:
        raise LocalProtocolError("a driver has no backend")


NO_BACKEND = _NoBackend()


def _adapter(adapter: str | Adapter | None, options: Mapping[str, Any] | None) -> Adapter:
    if adapter is None:
        return StreamAdapter()
    return adapter if isinstance(adapter, Adapter) else load_adapter(adapter, options)


def _check_backend(
    backend: Backend, name: str, device: torch.device, *, direct: bool = False, chain: bool = False
) -> None:
    """Refuse what this backend cannot do, all at once."""
    if backend is NO_BACKEND:  # it could not be loaded, which was said
        return
    able, wrong, advice = backend.capabilities, [], []
    if device.type not in able.devices:
        wrong.append(f"backend {name!r} does not move {device.type} memory")
        advice.append(f"It moves: {', '.join(sorted(able.devices))}.")
    if chain and (direct or not able.forward):
        what = "direct=True has no buckets to pass on" if direct else f"backend {name!r} cannot pass buckets on"
        wrong.append(f"fanout='chain': {what}")
        advice.append("Use fanout='star'; 'nixl' and 'ucx' can do both.")
    if direct and not able.pull:
        wrong.append(f"backend {name!r} cannot pull")
        advice.append("direct=True needs 'local' or 'nixl'.")
    if wrong:
        raise ConfigError("; ".join(wrong), advice=" ".join(advice))


def _lends_on(backend: Backend, device: torch.device) -> torch.device | None:
    """The device of a bus whose waiting caller may post and test: where that is cheap, as the CPU moves no bytes in it."""
    able = backend.capabilities
    return device if (able.shares_memory or device.type == "cuda") and not able.multicast else None


def _data_host(address: str | None, advertise: str | None) -> str | None:
    """The IP address of this host's data plane: as advertised, or the one packets towards the other side leave from."""
    if advertise is not None:
        return advertise
    if address is None:
        return None
    host, _ = security.split_address(address)
    return None if host in ("0.0.0.0", "::") else local_host_towards(address)


def send(
    source: Source, bind: str, *, version: int, timeout: float = DEFAULT_TIMEOUT_S, receivers: int = 1, **options: Any
) -> RefitReport:
    """One refit from a bus that is made and closed here; blocks until every engine has reported.

    Args:
        source: as `WeightBus.send`.
        bind: ``tcp://host:port``.
        version: the caller's integer.
        timeout: seconds.
        receivers: ranks to wait for.
        options: of `WeightBus.sender`, and `manifest`, `partial`, `cast`, `buffers` of `WeightBus.send`.
    """
    own = {key: options.pop(key) for key in ("manifest", "partial", "cast", "buffers") if key in options}
    with WeightBus.sender(bind=bind, receivers=receivers, **options) as bus:
        return bus.send(source, version=version, timeout=timeout, **own)


def recv(
    address: str, *, into: torch.nn.Module | None = None, timeout: float = DEFAULT_TIMEOUT_S, **options: Any
) -> Any:
    """One refit into a bus that is made and closed here.

    Args:
        address: the sender's.
        into: a Module to load into (adapter ``torch``); then a `RefitReport` is returned.
        timeout: seconds.
        options: of `WeightBus.receiver`.

    Returns:
        A RefitReport with `into` or an adapter; else an iterator of (name, tensor), owned copies, which closes the bus
        at its end.
    """
    if into is not None:
        options |= {"adapter": "torch", "adapter_options": {"module": into, **options.get("adapter_options", {})}}
    bus = WeightBus.receiver(address, **options)
    if options.get("adapter") is None:
        return _closing(bus, timeout)
    with bus:
        return bus.recv(timeout)


def _closing(bus: WeightBus, timeout: float) -> Iterator[tuple[str, torch.Tensor]]:
    with bus:
        yield from bus.recv(timeout)
