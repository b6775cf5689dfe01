"""Who is on the bus, where to reach them, and what each engine last said it holds. Runs on the bus thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from weightbus.adapter import Outcome
from weightbus.backend import Backend
from weightbus.config import runs
from weightbus.control import messages as m
from weightbus.control.wire import Hub
from weightbus.errors import ConfigError, RemoteProtocolError, WeightBusError
from weightbus.reactor import Reactor, log


@attrs.define(eq=False)
class Member:
    """One process that has joined."""

    link: bytes
    join: m.Join

    @property
    def name(self) -> str:
        return self.join.member

    def fate(self, host: str) -> str:
        """Outcome of an engine that lost it: DEAD where its process is gone, which only its own host can tell."""
        dead = self.join.host == host and self.join.pid > 0 and not runs(self.join.pid)
        return Outcome.DEAD.value if dead else Outcome.UNKNOWN.value


@attrs.define(eq=False)
class Engine:
    """One engine: its members, and what it last said it holds."""

    name: str
    world: int
    members: dict[bytes, Member] = attrs.field(factory=dict)
    outcome: str = "READY"
    run_id: str = ""
    version: int = -1

    @property
    def driver(self) -> Member | None:
        """The WeightBus.driver that joined, else the process of rank 0."""
        found = sorted(self.members.values(), key=lambda x: x.join.drives != "yes")
        return next((x for x in found if x.join.drives != "no"), None)

    def serving(self) -> dict[int, Member]:
        return {rank: member for member in self.members.values() for rank in member.join.serves}

    def is_at(self, run_id: str, version: int) -> bool:
        return (self.run_id, self.version) == (run_id, version)

    @property
    def complete(self) -> bool:
        return self.driver is not None and len(self.serving()) == self.world


@attrs.frozen(kw_only=True)
class CoordinatorConfig:
    """Settings of rank 0's control side; see `WeightBus.sender`."""

    bind: str
    advertise: str | None
    token: str | None = attrs.field(repr=False)
    run_id: str
    host: str
    backend_name: str
    bucket_bytes: int
    senders: int
    receivers: int | None
    lanes: str
    fanout: str
    slots: int
    cohort: str
    verify: bool
    stall_timeout_s: float
    finish_timeout_s: float


class Roster:
    """Admits, refuses and loses members. It knows no refit.

    Args:
        to_local: delivers a message to the sender side of this very process.
        on_message: what a member says that has joined, beyond Join and Leave.
        on_lost: a member is gone, and no other has taken its place.
        on_engine: an engine's name, and "joined" or "lost".
    """

    def __init__(
        self,
        reactor: Reactor,
        config: CoordinatorConfig,
        backend: Backend,
        to_local: Callable[[object], None],
        on_message: Callable[[Member, Any], None],
        on_lost: Callable[[Member], None],
        on_engine: Callable[[str, str], None],
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self.senders: dict[int, Member] = {}
        self._reactor, self._config, self._backend = reactor, config, backend
        self._to_local, self._on_message, self._on_lost, self._on_engine = to_local, on_message, on_lost, on_engine
        self._members: dict[bytes, Member] = {}
        self._replaced: set[str] = set()  # incarnations of senders that another process has taken the place of
        self.hub = Hub(reactor, config.bind, config.token, self._hear, self._lose, config.advertise)
        reactor.add(self.hub, first=True)

    def to_sender(self, rank: int, message: object) -> None:
        if rank == 0:
            self._to_local(message)
        elif rank in self.senders:
            self.hub.send(self.senders[rank].link, message)

    def to_senders(self, message: object) -> None:
        for rank in range(self._config.senders):
            self.to_sender(rank, message)

    def bucket_bytes(self, rank: int) -> int:
        """What sender `rank` asks for."""
        return self._config.bucket_bytes if rank == 0 else self.senders[rank].join.bucket_bytes

    def note(self, member: Member, report: m.Report) -> None:
        """A driver's word on its engine."""
        engine = self.engines.get(member.join.engine)
        if engine is not None:
            engine.outcome, engine.run_id, engine.version = report.outcome, report.run_id, report.version

    def _hear(self, link: bytes, message: Any) -> None:
        member = self._members.get(link)
        if isinstance(message, m.Join):
            self._join(link, message)
        elif member is None:
            log.debug("a message from a member that has not joined: %s", type(message).__name__)
        elif isinstance(message, m.Leave):
            self._lose(link)
        else:
            self._on_message(member, message)

    def _join(self, link: bytes, join: m.Join) -> None:
        if link in self._members:  # it was cut off and is back before that was noticed
            self._lose(link)
            self.hub.keep(link)
        error = self._refuse(join)
        if error is not None:
            log.warning("refused %s: %s", join.member, error)
            self._welcome(link, error)
            return
        member = self._members[link] = Member(link, join)
        if join.sender_rank >= 0:
            self._seat(member)
        else:
            self._admit(member)
        self._welcome(link)

    def _welcome(self, link: bytes, error: WeightBusError | None = None) -> None:
        wire = None if error is None else m.WireError.of(error)
        self.hub.send(link, m.Welcome(run_id=self._config.run_id, error=wire))

    def _seat(self, member: Member) -> None:
        rank = member.join.sender_rank
        before = self.senders.get(rank)
        if before is not None and before.join.incarnation != member.join.incarnation:
            self._replaced.add(before.join.incarnation)
            self._welcome(before.link, self._refuse(before.join))
            self._lose(before.link)
        self.senders[rank] = member

    def _admit(self, member: Member) -> None:
        join = member.join
        engine = self.engines.setdefault(join.engine, Engine(join.engine, join.world))
        if not engine.members:
            engine.world = join.world
        for other in list(engine.members.values()):
            replaced = set(other.join.serves) & set(join.serves) or (other.join.drives == join.drives == "yes")
            if replaced and other.link != member.link:
                log.info("%s replaces an earlier incarnation", join.member)
                self._lose(other.link)
        engine.members[member.link] = member
        if join.drives != "no":
            engine.run_id, engine.version, engine.outcome = join.run_id, join.version, join.state
        self._on_engine(engine.name, "joined")

    def _refuse(self, join: m.Join) -> WeightBusError | None:
        advice = "Run the same weightbus, with the same settings, on all sides."
        if join.protocol != m.PROTOCOL:
            return RemoteProtocolError(
                f"protocol {join.protocol}, this side speaks {m.PROTOCOL}",
                peer=join.member,
                phase="join",
                advice=advice,
            )
        if join.incarnation in self._replaced:
            return ConfigError(
                "another process has taken the place of this one",
                peer=join.member,
                phase="join",
                advice="Make a new bus, once the other one is closed.",
            )
        if join.sender_rank >= 0:
            if join.senders != self._config.senders or not 0 < join.sender_rank < self._config.senders:
                return ConfigError(
                    f"sender {join.sender_rank} of {join.senders} joins a bus of {self._config.senders} senders",
                    peer=join.member,
                    phase="join",
                    advice="Give every sender the same senders=.",
                )
        else:
            engine = self.engines.get(join.engine)
            if engine is not None and engine.members and engine.world != join.world:
                return ConfigError(
                    f"engine {join.engine!r} has {engine.world} ranks, this member says {join.world}",
                    peer=join.member,
                    phase="join",
                    advice="Give every rank of an engine the same ranks=.",
                )
            if join.world < 1 or any(not 0 <= r < join.world for r in join.serves) or not join.engine:
                return ConfigError(f"ranks {join.serves} of {join.world}", peer=join.member, phase="join")
        if join.serves or join.sender_rank >= 0:
            return self._refuse_backend(join)
        return None

    def _refuse_backend(self, join: m.Join) -> WeightBusError | None:
        if join.backend != self._config.backend_name:
            return ConfigError(
                f"backend {join.backend!r} joins a bus on {self._config.backend_name!r}",
                peer=join.member,
                phase="join",
                advice="Give every side the same backend=.",
            )
        mine = self._backend.fingerprint()
        differ = [
            f"{k}: {join.fingerprint.get(k)!r} there, {v!r} here"
            for k, v in mine.items()
            if join.fingerprint.get(k) != v
        ]
        if differ:
            return ConfigError(
                "settings that must be equal differ: " + "; ".join(differ),
                peer=join.member,
                phase="join",
                advice="Make them equal on both sides.",
            )
        if self._backend.capabilities.same_host_only and join.host != self._config.host:
            return ConfigError(
                f"backend {self._config.backend_name!r} works within one host only",
                peer=join.member,
                phase="join",
                advice="Use backend='nixl' or 'ucx' between hosts.",
            )
        return None

    def _lose(self, link: bytes) -> None:
        member = self._members.pop(link, None)
        self.hub.forget(link)
        if member is None:
            return
        join = member.join
        if join.sender_rank >= 0:
            if self.senders.get(join.sender_rank) is member:  # else another process has taken its place
                del self.senders[join.sender_rank]
                self._on_lost(member)
            return
        engine = self.engines.get(join.engine)
        if engine is not None:
            engine.members.pop(link, None)
            if not engine.members or join.drives == "yes" or len(engine.serving()) < engine.world:
                engine.outcome = member.fate(self._config.host)
        self._on_lost(member)
        self._on_engine(join.engine, "lost")

    def close(self) -> None:
        for link in self._members:
            self.hub.send(link, m.Leave(reason="the coordinator closed"))
        self._reactor.remove(self.hub)
        self.hub.close()
