"""Chain fan-out: a receiver passes each bucket on to the next receiver as it arrives, never waiting for its own loader."""

from __future__ import annotations

import threading
from collections.abc import Callable

from weightbus.backend import Arrival, Capabilities, Endpoint
from weightbus.control import messages as m
from weightbus.deadline import Deadline
from weightbus.errors import ConnectError, WeightBusError
from weightbus.header import Header
from weightbus.outbound import Channels, Outbound, Post
from weightbus.reactor import Reactor

CONNECT_S = 30.0


class Onward:
    """The next hop of one lane. On the bus thread; it connects on a helper thread.

    A slot of the lane is free when its bucket is loaded and `holds` says no.
    """

    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        self._link: Channels | None = None
        self._outbound: Outbound | None = None
        self._refit = ""
        self._tell: Callable[[object], object] = lambda message: None

    def start(
        self,
        reactor: Reactor,
        endpoint: Endpoint,
        message: m.Forward,
        verify: bool,
        deadline: Deadline,
        tell: Callable[[object], object],
    ) -> None:
        """Reach the next receiver, if it is not reached yet; then tell the coordinator Connected for its lane."""
        self._tell, self._refit = tell, message.refit
        spec = message.spec

        def ready(link: Channels | None, failed: dict[str, m.WireError]) -> None:
            if self._refit != message.refit:  # it took too long: another refit has begun, or the lane was retired
                if link is not None:
                    threading.Thread(target=link.channel.close, name="weightbus-retire", daemon=True).start()
                return
            self._link = link
            if link is not None:
                self._outbound = Outbound(
                    message.refit,
                    link,
                    spec.slots,
                    self._capabilities,
                    verify,
                    message.stall_timeout_s,
                    lambda lane, bucket: None,
                    lambda lane, slot, nbytes, header: None,
                    deadline,
                )
            tell(m.Connected(refit=message.refit, lane=spec.lanes[0], failed=failed))

        old = self._link
        if old is not None and old.incarnations == spec.incarnations and old.channel.error is None:
            ready(old, {})
            return

        def connect() -> None:
            link, failed = None, {}
            try:
                if old is not None:
                    old.channel.close()
                channel = endpoint.connect(spec.addresses[0], spec.keys[0], deadline.remaining_s(at_most=CONNECT_S))
                link = Channels(spec.lanes, spec.incarnations, channel, spec.keys[0])
            except Exception as exc:
                error = exc if isinstance(exc, WeightBusError) else ConnectError(f"{type(exc).__name__}: {exc}")
                error.lane, error.phase = spec.lanes[0], error.phase or "connect"
                failed = {spec.lanes[0]: m.WireError.of(error)}
            reactor.submit(lambda: ready(link, failed))

        threading.Thread(target=connect, name="weightbus-connect", daemon=True).start()

    def take(self, header: Header, arrival: Arrival) -> None:
        """A bucket has arrived: it goes on under the next lane's key, in the slot of the same number."""
        if self._outbound is not None:
            self._outbound.enqueue(
                Post(
                    bucket=header.bucket,
                    slot=arrival.slot,
                    region=arrival.region,
                    nbytes=arrival.nbytes,
                    digest=header.digest,
                    plan_digest=header.plan_digest,
                    total=header.total,
                )
            )

    def credit(self, lane: str, bucket: int) -> None:
        if self._outbound is not None:
            self._outbound.credit(lane, bucket)

    def drop(self, lanes: tuple[str, ...]) -> None:
        """The next receiver is out."""
        if self._outbound is not None:
            self._outbound.drop(lanes)

    def stop(self) -> None:
        """This lane's refit is over: what was not posted stays here."""
        if self._outbound is not None:
            self._outbound.drop(tuple(self._outbound.lanes))

    def holds(self, bucket: int) -> bool:
        """The memory of `bucket` is still needed to pass it on."""
        return self._outbound is not None and self._outbound.busy(bucket)

    @property
    def idle(self) -> bool:
        """No operation reads this lane's slots."""
        return self._outbound is None or self._outbound.idle

    def tick(self) -> bool:
        outbound = self._outbound
        if outbound is None:
            return False
        moved = outbound.tick()
        if outbound.error is not None and outbound.lanes:
            (lane,) = outbound.lanes
            outbound.drop((lane,))
            self._tell(m.LaneFailed(refit=outbound.refit, lane=lane, error=m.WireError.of(outbound.error)))
            moved = True
        return moved

    def reset(self) -> None:
        """Another refit begins; the connection is kept."""
        self._outbound, self._refit = None, ""

    def forget(self) -> None:
        """The lane's endpoint is being closed, and the connection with it."""
        self._outbound, self._link, self._refit = None, None, ""
