"""One engine member: its link to the coordinator, its driver, its ranks, and the loop behind `recv` and `drive`."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from weightbus.adapter import Adapter, Outcome
from weightbus.backend import Backend
from weightbus.control import messages as m
from weightbus.control import security
from weightbus.control.wire import Hub, Link
from weightbus.deadline import Deadline
from weightbus.errors import EngineError, PeerLost, RefitAborted, RemoteProtocolError, TransferTimeout, WeightBusError
from weightbus.feed import RankRun
from weightbus.inbound import RankSet
from weightbus.jobs import End, Jobs
from weightbus.lane import InboundConfig
from weightbus.reactor import Reactor, log
from weightbus.refit import Driver, DriverRun, Held
from weightbus.report import Event, EventHandler, RefitReport, SlowWarning


@attrs.frozen(kw_only=True)
class MemberConfig:
    """Settings of one engine member; see `WeightBus.receiver` and `WeightBus.driver`."""

    address: str
    engine: str
    world: int
    serves: tuple[int, ...]
    drives: str
    token: str | None = attrs.field(repr=False)
    device: torch.device
    inbound: InboundConfig
    backend_name: str
    host: str
    bind_host: str | None


def local_host_towards(address: str) -> str:
    """The local IP address that packets to `address` leave from."""
    host, port = security.split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port or 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if family == socket.AF_INET6 else "127.0.0.1"


class MemberSide:
    """The receiving half of a bus: driver, ranks, or both.

    Args:
        adapter: the engine's adapter.
    """

    def __init__(
        self, reactor: Reactor, config: MemberConfig, backend: Backend, adapter: Adapter, events: EventHandler | None
    ) -> None:
        self._reactor, self._config, self._backend, self._events = reactor, config, backend, events
        self._adapter = adapter
        self.jobs = Jobs(reactor)
        self.ranks: RankSet | None = None
        self.driver: Driver | None = None
        self.refused: WeightBusError | None = None
        self.run_id = ""
        self.known = Held()
        self._incarnation = uuid.uuid4().hex
        self._driver_link: Link | None = None
        self._driver_hub: Hub | None = None
        self._rank_links: dict[bytes, tuple[int, ...]] = {}
        self._unsaid: m.RankState | None = None
        self._slow_warning = SlowWarning()
        self.name = f"{config.engine}/{'+'.join(map(str, config.serves)) if config.serves else 'driver'}"
        reactor.on_broken = self._ranks_broke
        if config.drives != "no":
            self._make_driver(adapter)
        if config.serves:
            self._make_ranks(adapter)
        self._link = Link(
            reactor,
            config.address,
            config.token,
            self._incarnation.encode(),
            self._on_message,
            self._on_up,
            self._on_down,
        )
        reactor.add(self._link, first=True)

    def _make_driver(self, adapter: Adapter) -> None:
        config = self._config
        self.driver = Driver(
            self._reactor,
            config.engine,
            config.world,
            adapter.driver,
            self.jobs,
            self._tell,
            self._order,
            self._driver_end,
            beside=len(config.serves) == config.world,
        )
        if len(config.serves) < config.world:
            host = config.bind_host or local_host_towards(config.address)
            bind = f"tcp://{f'[{host}]' if ':' in host else host}:0"
            self._driver_hub = Hub(self._reactor, bind, config.token, self._on_rank_message, self._on_rank_lost)
            self._reactor.add(self._driver_hub, first=True)

    def _make_ranks(self, adapter: Adapter) -> None:
        config = self._config
        loader = adapter.loader(config.serves, config.device)
        self.ranks = RankSet(
            self._reactor,
            config.engine,
            config.serves,
            self._backend,
            loader,
            config.device,
            config.inbound,
            self.jobs,
            self._tell,
            self._tell_driver,
            self._rank_end,
        )
        self._reactor.add(self.ranks)

    # ---- the coordinator

    @property
    def held(self) -> Held:
        """What the engine holds, as far as this process knows."""
        return self.driver.held if self.driver is not None and self._drives_now else self.known

    _drives_now = True

    def _on_up(self) -> None:
        config, held = self._config, self.held
        rules, names = (self.ranks.rules, config.inbound.names) if self.ranks is not None else (None, ())
        join = m.Join(
            protocol=m.PROTOCOL,
            member=self.name,
            incarnation=self._incarnation,
            host=config.host,
            pid=os.getpid(),
            backend=config.backend_name,
            fingerprint=self._backend.fingerprint(),
            engine=config.engine,
            world=config.world,
            serves=config.serves,
            drives=config.drives,
            driver_address=self._driver_hub.address if self._driver_hub is not None else "",
            names=names,
            stage=config.inbound.stage or "",
            run_id=held.run_id,
            version=held.version,
            state=held.outcome.value,
        )
        self._link.send(join if rules is None else attrs.evolve(join, rules=rules))

    def _on_down(self) -> None:
        log.info("%s: the coordinator is gone", self.name)
        if self.driver is not None:
            self.driver.lost()
        if self.ranks is not None:
            self.ranks.lost()

    def _tell(self, message: object) -> bool:
        return self._link.send(message)

    def _on_message(self, message: Any) -> None:
        if isinstance(message, m.Welcome):
            self.run_id = message.run_id
            self.refused = None if message.error is None else message.error.to_error()
        elif isinstance(message, m.Leave):
            log.info("%s: the coordinator closed", self.name)
        elif isinstance(message, m.OfferDriver) and self.driver is not None:
            self._drives_now = True
            self.driver.offer(message)
        elif isinstance(message, m.Begin) and self.driver is not None:
            self.driver.begin(message.refit)
        elif isinstance(message, m.Commit) and self.driver is not None:
            self.driver.commit(message)
        elif isinstance(message, m.Abort):
            self._abort(message)
        elif self.ranks is not None:
            self._rank_message(self.ranks, message)

    def _abort(self, message: m.Abort) -> None:
        error = message.error.to_error()
        if self.driver is not None and self._drives_now:
            self.driver.abort(message.refit, error)
        if self.ranks is not None:
            self.ranks.abort(message.refit, error)

    def _rank_message(self, ranks: RankSet, message: Any) -> None:
        if isinstance(message, m.OfferRanks):
            self._drives_now = message.driver_address == ""
            if message.driver_address:
                self._reach_driver(message.driver_address)
            ranks.offer(message)
        elif isinstance(message, m.JoinGroup):
            ranks.join_group(message)
        elif isinstance(message, m.LaneNote):
            ranks.note(message)
        elif isinstance(message, (m.Forward, m.Credit, m.DropLanes)):
            ranks.chain(message)

    def _ranks_broke(self, error: WeightBusError) -> None:
        """To leave a refit raised, which scripts do not handle: it is over all the same."""
        if self.ranks is not None and self.ranks.run is not None:
            run, self.ranks.run = self.ranks.run, None
            self._rank_end(run, error)

    # ---- driver and ranks

    def _order(self, order: m.RankOrder) -> None:
        """The driver to all its ranks."""
        if self.ranks is not None:
            self.ranks.order(order)
        if self._driver_hub is not None:
            for link in list(self._rank_links):
                self._driver_hub.send(link, order)

    def _on_rank_message(self, link: bytes, message: Any) -> None:
        if isinstance(message, m.RankHello) and message.engine == self._config.engine:
            self._rank_links[link] = message.serves
        elif isinstance(message, m.RankState) and link in self._rank_links and self.driver is not None:
            self.driver.rank_state(message)
        else:
            raise RemoteProtocolError(f"{type(message).__name__} from a stranger on the driver's channel")

    def _on_rank_lost(self, link: bytes) -> None:
        serves = self._rank_links.pop(link, None)
        if serves is not None and self.driver is not None:
            self.driver.rank_lost(serves)

    def _reach_driver(self, address: str) -> None:
        if self._driver_link is not None and self._driver_link.address == address:
            return
        if self._driver_link is not None:
            self._reactor.remove(self._driver_link)
            self._driver_link.close()
        self._driver_link = Link(
            self._reactor,
            address,
            self._config.token,
            self._incarnation.encode(),
            self._on_driver_message,
            self._on_driver_up,
            self._on_driver_down,
        )
        self._reactor.add(self._driver_link, first=True)

    def _on_driver_up(self) -> None:
        if self._driver_link is not None:
            self._driver_link.send(
                m.RankHello(engine=self._config.engine, serves=self._config.serves, incarnation=self._incarnation)
            )
            if self._unsaid is not None:
                self._driver_link.send(self._unsaid)

    def _on_driver_down(self) -> None:
        """A rank's copy belongs to its driver; without one it is dropped."""
        run = self.ranks.run if self.ranks is not None else None
        if self.ranks is not None and run is not None:
            self.ranks.abort(
                run.offer.refit, PeerLost("the engine's driver is gone", peer=f"{self._config.engine}/driver")
            )

    def _on_driver_message(self, message: Any) -> None:
        if isinstance(message, m.RankOrder) and self.ranks is not None:
            if message.order == "published":
                self.known = Held(Outcome.READY, message.run_id, message.version)
            self.ranks.order(message)

    def _tell_driver(self, state: m.RankState) -> None:
        if self._drives_now and self.driver is not None:
            self.driver.rank_state(state)
        elif self._driver_link is not None:
            self._unsaid = state
            self._driver_link.send(state)

    # ---- the end of a refit

    def _driver_end(self, report: m.Report, run: DriverRun | None) -> None:
        if self._events is not None:
            self._events(Event(kind="ended", engine=self._config.engine, version=report.version, text=report.outcome))
        error = report.error.to_error() if report.error is not None else None
        offered = run.offer.version if run is not None else report.version
        if error is None and not (report.outcome == "READY" and report.version == offered):
            error = EngineError(f"the engine is {report.outcome}({report.version})", peer=self._config.engine)
        seconds = dict(run.seconds) if run is not None else {}
        rank_run = self.ranks.last if self.ranks is not None else None
        if rank_run is None or run is None or rank_run.offer.refit != run.offer.refit:
            rank_run = None
        self.jobs.end(
            End(
                self._report(
                    report.version, rank_run, seconds, {self._config.engine: f"{report.outcome}({report.version})"}
                ),
                error,
            )
        )

    def _rank_end(self, run: RankRun, error: WeightBusError | None) -> None:
        if self._drives_now and self.driver is not None:
            return  # the driver's end is the engine's
        self.jobs.end(End(self._report(run.offer.version, run, {}, {}), error))

    def _report(
        self, version: int, run: RankRun | None, seconds: dict[str, float], outcomes: dict[str, str]
    ) -> RefitReport:
        if run is None:
            return RefitReport(version=version, seconds=seconds, outcomes=outcomes)
        return RefitReport(
            version=version,
            bytes=run.bytes,
            tensors=run.tensors,
            buckets=run.buckets,
            total_s=time.monotonic() - run.started_s,
            seconds={**run.seconds, **seconds},
            limits=run.limits,
            outcomes=outcomes,
            skipped=tuple(run.skipped),
        )

    # ---- the caller's thread

    def run_jobs(self, deadline: Deadline, cancelled: Callable[[], bool] = lambda: False) -> RefitReport:
        """Be there for the bus thread until one refit has ended."""
        self.jobs.attached = True
        try:
            while True:
                item = self._take(deadline, cancelled)
                if isinstance(item, End):
                    if item.error is not None:
                        raise item.error
                    report: RefitReport = item.report
                    self._slow_warning.of(report, self.name)
                    return report
                self.jobs.execute(item)
        finally:
            self.jobs.attached = False

    def next_item(self, deadline: Deadline) -> Any:
        """The raw stream's next job or end."""
        return self._take(deadline, lambda: False)

    def wait_offer(self, deadline: Deadline) -> None:
        """Until a refit has been offered to this process."""
        self.jobs.attached = True
        while not self._reactor.wait(self.jobs.waiting, deadline.min(Deadline.after(0.25))):
            self._raise_refused()
            if deadline.expired:
                raise self._give_up(False)

    def abandon(self, error: WeightBusError) -> None:
        """The raw stream was closed early: end its refit here and everywhere."""
        self._put_in_order(error)

    def _take(self, deadline: Deadline, cancelled: Callable[[], bool]) -> Any:
        while True:
            item = self.jobs.take(deadline.min(Deadline.after(0.25)))
            if item is not None:
                return item
            self._raise_refused()
            if cancelled() or deadline.expired:
                raise self._give_up(cancelled())

    def _raise_refused(self) -> None:
        refused = self.refused or self._link.refused
        if refused is not None:
            raise refused

    def _give_up(self, cancelled: bool) -> WeightBusError:
        """Leave a refit that runs; its engine is put in order first, in this thread."""
        ranks = self.ranks
        error: WeightBusError = TransferTimeout(
            "no offer came" if not self._link.up or (ranks is None or ranks.run is None) else "the refit did not end",
            phase="recv",
            peer="sender/0",
            advice="Is the sender running, with this address and token?"
            if not self._link.up
            else "Raise recv's timeout, or send more often.",
        )
        if cancelled:
            error = RefitAborted("recv was cancelled", phase="recv")
        self._put_in_order(error)
        return error

    def _put_in_order(self, error: WeightBusError) -> None:
        """Abort the refit that runs, and run the jobs that this takes."""
        ranks, driver = self.ranks, self.driver

        def leave() -> None:
            refit = ranks.run.offer.refit if ranks is not None and ranks.run is not None else ""
            if driver is not None and driver.run is not None:
                refit = driver.run.offer.refit
                if driver.run.commit is None:
                    driver.abort(refit, error)
            if ranks is not None and refit:
                ranks.abort(refit, error)
                self._tell(m.RankFailed(refit=refit, error=m.WireError.of(error, self.name)))

        self._reactor.call(leave)
        limit = Deadline.after(30.0)

        def busy() -> bool:
            return (ranks is not None and ranks.run is not None) or (driver is not None and driver.run is not None)

        while busy() and not limit.expired:
            item = self.jobs.take(Deadline.after(0.05))
            if item is not None and not isinstance(item, End):
                self.jobs.execute(item)

    def leave(self) -> None:
        """On the bus thread: say good-bye and let go of sockets."""
        self._link.send(m.Leave(reason="closed"))
        services: Sequence[Any] = [x for x in (self._link, self._driver_link, self._driver_hub) if x is not None]
        for each in services:
            self._reactor.remove(each)
            each.close()
        if self.ranks is not None:
            self._reactor.remove(self.ranks)

    def close(self) -> None:
        """On the closing thread."""
        if self.ranks is not None:
            self.ranks.close()
        if self.driver is not None:
            self.driver.close()
