"""Every message of the control plane: attrs classes in msgpack, decoded against their types.

A frame is one byte of kind and the msgpack of the class. Sizes are capped by the socket before a frame is read; values
are checked by the classes themselves. docs/protocol.md lists who sends what, when.
"""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from weightbus import errors
from weightbus.adapter import Fault, GroupRules
from weightbus.backend import LANE_KEY_BYTES, MAX_ADDRESS_BYTES, MAX_HEADER_BYTES
from weightbus.errors import RemoteProtocolError, WeightBusError
from weightbus.manifest import Manifest, TensorSpec
from weightbus.names import NameRule
from weightbus.plan import Bucket, Plan, Segment

PROTOCOL = 1
MAX_FRAME_BYTES = 1 << 28
MAX_TEXT = 64 << 10


def _short(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if len(value) > MAX_TEXT:
        raise ValueError(f"{attribute.name} is longer than {MAX_TEXT} characters")


def _key(_: object, __: attrs.Attribute[bytes], value: bytes) -> None:
    if len(value) not in (0, LANE_KEY_BYTES):
        raise ValueError(f"a lane key has {LANE_KEY_BYTES} bytes")


def _address(_: object, __: attrs.Attribute[bytes], value: bytes) -> None:
    if len(value) > MAX_ADDRESS_BYTES:
        raise ValueError(f"an address has at most {MAX_ADDRESS_BYTES} bytes")


def _cut(text: str) -> str:
    return text[:MAX_TEXT]


@attrs.frozen(kw_only=True)
class WireError:
    """A WeightBusError that crosses processes: its class by name, its places."""

    kind: str = attrs.field(validator=_short)
    what: str = attrs.field(converter=_cut, validator=_short)
    peer: str | None = None
    lane: str | None = None
    bucket: int | None = None
    tensor: str | None = None
    phase: str | None = None
    advice: str | None = None
    dead: bool = False

    @classmethod
    def of(cls, exc: BaseException, peer: str | None = None) -> WireError:
        if not isinstance(exc, WeightBusError):
            return cls(kind="RefitAborted", what=f"{type(exc).__name__}: {exc}", peer=peer)
        return cls(
            kind=type(exc).__name__,
            what=exc.what,
            peer=exc.peer or peer,
            lane=exc.lane,
            bucket=exc.bucket,
            tensor=exc.tensor,
            phase=exc.phase,
            advice=exc.advice,
            dead=isinstance(exc, errors.EngineError) and exc.dead,
        )

    def to_error(self) -> WeightBusError:
        found = getattr(errors, self.kind, None)
        kind = found if isinstance(found, type) and issubclass(found, WeightBusError) else errors.RefitAborted
        exc = kind.__new__(kind)
        WeightBusError.__init__(
            exc,
            self.what,
            peer=self.peer,
            lane=self.lane,
            bucket=self.bucket,
            tensor=self.tensor,
            phase=self.phase,
            advice=self.advice,
        )
        if isinstance(exc, errors.PartialRefitError):
            exc.outcomes = {}
        if isinstance(exc, errors.EngineError):
            exc.dead = self.dead
        return exc


@attrs.frozen(kw_only=True)
class PlanWire:
    """A plan without its manifest: index groups, and per bucket the segments as flat quadruples."""

    groups: list[tuple[int, ...]]
    buckets: list[list[int]]

    @classmethod
    def of(cls, plan: Plan) -> PlanWire:
        return cls(groups=list(plan.groups), buckets=[flat_segments(b.segments) for b in plan.buckets])

    def to_plan(self, manifest: Manifest) -> Plan:
        """Raises RemoteProtocolError when it is not an exact plan of `manifest`."""
        buckets = tuple(Bucket(k, unflat_segments(flat)) for k, flat in enumerate(self.buckets))
        plan = Plan(manifest, tuple(self.groups), buckets)
        plan.validate()
        return plan


def flat_segments(segments: tuple[Segment, ...]) -> list[int]:
    return [v for s in segments for v in s]


def unflat_segments(flat: list[int]) -> tuple[Segment, ...]:
    if len(flat) % 4:
        raise RemoteProtocolError("segments come as quadruples")
    quadruple = [iter(flat)] * 4
    return tuple(map(Segment._make, zip(*quadruple, strict=True)))


# ---- joining


@attrs.frozen(kw_only=True)
class Join:
    """Member to coordinator, on every connection. Engine members: `engine` set; further senders: `sender_rank` set."""

    protocol: int
    member: str = attrs.field(validator=_short)
    incarnation: str = attrs.field(validator=_short)
    host: str = ""
    pid: int = 0
    backend: str = ""
    fingerprint: dict[str, str] = attrs.field(factory=dict)
    sender_rank: int = -1
    senders: int = 0
    bucket_bytes: int = 0
    engine: str = ""
    world: int = 0
    serves: tuple[int, ...] = ()
    drives: str = "no"  # no, fallback, yes
    driver_address: str = ""
    rules: GroupRules = attrs.field(factory=GroupRules)
    names: tuple[NameRule, ...] = ()
    stage: str = ""
    run_id: str = ""
    version: int = -1
    state: str = "READY"


@attrs.frozen(kw_only=True)
class Welcome:
    """Coordinator to member: admitted, or refused with the reason."""

    run_id: str
    error: WireError | None = None


@attrs.frozen(kw_only=True)
class Leave:
    """Member to coordinator: closing in order. Coordinator to members: the bus is closed."""

    reason: str = ""


# ---- a refit: coordinator to senders, senders to coordinator


@attrs.frozen(kw_only=True)
class SendReady:
    """Sender k entered `send`: what it offers."""

    version: int
    manifest: Manifest | None  # None: paged, or the one told before on this connection
    paged: bool
    reorderable: bool
    partial: bool
    direct: bool = False
    error: WireError | None = None


@attrs.frozen(kw_only=True)
class LaneSpec:
    """One outgoing lane, or one collective group with several reader lanes."""

    lanes: tuple[str, ...]
    keys: tuple[bytes, ...]
    incarnations: tuple[str, ...]
    addresses: tuple[bytes, ...]
    slots: int
    behind: tuple[str, ...] = ()  # lanes that get the same buckets from a reader of this one (chain)


@attrs.frozen(kw_only=True)
class SendPlan:
    """Coordinator to sender k: agreed; connect these lanes. Manifest and plan are in travel order."""

    refit: str
    version: int
    timeout_s: float
    stall_timeout_s: float
    plan_digest: int  # 0: paged
    manifest: Manifest | None  # None: as told before
    plan: PlanWire | None
    outbound: tuple[LaneSpec, ...]
    direct: tuple[str, ...] = ()  # lanes that pull from this sender


@attrs.frozen(kw_only=True)
class Connected:
    """Sender k to coordinator: lanes are up, or not. A reader of a collective says it of its `lane`."""

    refit: str
    lane: str = ""
    failed: dict[str, WireError] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Go:
    """Coordinator to senders: stream now. Every in-place engine has begun."""

    refit: str


@attrs.frozen(kw_only=True)
class Pace:
    """Coordinator to senders without a lane: the slowest lane has released this many buckets."""

    refit: str
    buckets: int


@attrs.frozen(kw_only=True)
class SourceEnd:
    """Sender k to coordinator: its source is drained; `buckets` were packed; or it raised."""

    refit: str
    buckets: int = 0
    error: WireError | None = None
    seconds: dict[str, float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class LaneFailed:
    """Sender k to coordinator: an operation or a connection of this lane ended in error."""

    refit: str
    lane: str
    error: WireError


@attrs.frozen(kw_only=True)
class DropLanes:
    """Coordinator to sender k: send no more on these lanes."""

    refit: str
    lanes: tuple[str, ...]


@attrs.frozen(kw_only=True)
class SendDone:
    """Coordinator to sender k: the refit has ended so."""

    refit: str
    outcomes: dict[str, str]
    error: WireError | None = None


# ---- a refit: coordinator to engines, engines to coordinator


@attrs.frozen(kw_only=True)
class OfferDriver:
    refit: str
    run_id: str
    version: int
    timeout_s: float
    finish_timeout_s: float
    partial: bool
    staged: bool
    base_version: int
    tensors: int
    nbytes: int


@attrs.frozen(kw_only=True)
class LaneOffer:
    """One rank's lane within an offer."""

    lane: str
    rank: int
    plan_digest: int
    slot_bytes: int
    slots: int
    writer: str = ""  # who will write into the slots: a lane is bound to one
    manifest: Manifest | None = None  # None: as remembered under plan_digest, or paged
    plan: PlanWire | None = None


@attrs.frozen(kw_only=True)
class OfferRanks:
    refit: str
    run_id: str
    version: int
    timeout_s: float
    partial: bool
    paged: bool
    verify: bool
    driver_address: str
    lanes: tuple[LaneOffer, ...]
    direct: bool = False


@attrs.frozen(kw_only=True)
class DriverAnswer:
    """OK, ALREADY, BEHIND, or the outcome of what an offer of the held version finished."""

    refit: str
    answer: str
    error: WireError | None = None


@attrs.frozen(kw_only=True)
class LaneAnswer:
    lane: str
    incarnation: str
    address: bytes = attrs.field(validator=_address)
    key: bytes = attrs.field(validator=_key)


@attrs.frozen(kw_only=True)
class RanksAnswer:
    """Faults refuse the refit for all; `need_plan` asks for manifest and plan in full; else the lanes' addresses."""

    refit: str
    faults: tuple[Fault, ...] = ()
    need_plan: bool = False
    lanes: tuple[LaneAnswer, ...] = ()
    error: WireError | None = None


@attrs.frozen(kw_only=True)
class Begin:
    refit: str


@attrs.frozen(kw_only=True)
class Begun:
    refit: str


@attrs.frozen(kw_only=True)
class JoinGroup:
    """Coordinator to the readers of a collective lane: enter the rendezvous, then answer Connected."""

    refit: str
    group_id: str
    members: tuple[str, ...]
    ranks: dict[str, int]
    key: bytes = attrs.field(validator=_key)
    address: bytes = attrs.field(validator=_address)
    timeout_s: float


@attrs.frozen(kw_only=True)
class Forward:
    """Coordinator to a rank: pass on what arrives on `lane`, to `spec`; then answer Connected for the lane of `spec`.

    Credits and DropLanes of that lane come to this rank.
    """

    refit: str
    lane: str
    spec: LaneSpec
    stall_timeout_s: float


@attrs.frozen(kw_only=True)
class LaneNote:
    """What a sender tells the rank at the end of one of its lanes; the coordinator passes it on unread."""

    refit: str
    lane: str


@attrs.frozen(kw_only=True)
class HeaderAhead(LaneNote):
    """This operation is about to be posted."""

    slot: int
    nbytes: int
    header: bytes = attrs.field()

    @header.validator
    def _size(self, _: attrs.Attribute[bytes], value: bytes) -> None:
        if len(value) > MAX_HEADER_BYTES:
            raise ValueError(f"a header has at most {MAX_HEADER_BYTES} bytes")


@attrs.frozen(kw_only=True)
class Pull(LaneNote):
    """The exported memory is complete; read it now."""

    remote: bytes


@attrs.frozen(kw_only=True)
class PullDigest(LaneNote):
    """The digest of what was exported, as of one bucket in the plan's layout."""

    digest: int


@attrs.frozen(kw_only=True)
class Page(LaneNote):
    """What bucket `bucket` of a paged refit holds."""

    bucket: int
    first_tensor: int
    specs: tuple[TensorSpec, ...]
    segments: list[int]


@attrs.frozen(kw_only=True)
class PageEnd(LaneNote):
    buckets: int
    tensors: int


@attrs.frozen(kw_only=True)
class Credit:
    """A reader has released bucket `bucket` of `lane`."""

    refit: str
    lane: str
    bucket: int


@attrs.frozen(kw_only=True)
class Complete:
    """A rank process: every tensor of its lanes complete exactly once, bytes and digests right."""

    refit: str
    seconds: dict[str, float] = attrs.field(factory=dict)
    skipped: tuple[str, ...] = ()
    limits: dict[str, float] = attrs.field(factory=dict)  # phase to bytes/s of one lane, where its limit is known


@attrs.frozen(kw_only=True)
class RankFailed:
    refit: str
    error: WireError


@attrs.frozen(kw_only=True)
class Commit:
    """In place: finish and resume. Staged: the one decision; begin, load, finish, resume."""

    refit: str
    finish_timeout_s: float


@attrs.frozen(kw_only=True)
class Abort:
    refit: str
    error: WireError


@attrs.frozen(kw_only=True)
class Drained(LaneNote):
    """No operation of this refit on this lane can touch memory any more."""


@attrs.frozen(kw_only=True)
class Quiet:
    """Direct mode: no reader of this process touches the sender's memory any more. From the readers."""

    refit: str
    lanes: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Report:
    """The driver's own word on its engine; the only thing that makes an outcome."""

    refit: str
    outcome: str
    run_id: str
    version: int
    error: WireError | None = None
    seconds: dict[str, float] = attrs.field(factory=dict)


# ---- between a driver and its ranks


@attrs.frozen(kw_only=True)
class RankHello:
    engine: str
    serves: tuple[int, ...]
    incarnation: str


@attrs.frozen(kw_only=True)
class RankState:
    """A rank process to its driver: where it stands in `refit`.

    touched: some byte was loaded; verified: coverage proved; loaded: loaded from the copy; dropped: it has left.
    """

    refit: str
    serves: tuple[int, ...]
    touched: bool = False
    verified: bool = False
    loaded: bool = False
    dropped: bool = False
    error: WireError | None = None


@attrs.frozen(kw_only=True)
class RankOrder:
    """A driver to its ranks: load the copy, drop it, say your state, or take note of a published version."""

    refit: str
    order: str
    run_id: str = ""
    version: int = -1


KINDS: tuple[type[Any], ...] = (
    Join,
    Welcome,
    Leave,
    SendReady,
    SendPlan,
    Connected,
    Go,
    Pace,
    SourceEnd,
    LaneFailed,
    DropLanes,
    SendDone,
    OfferDriver,
    OfferRanks,
    DriverAnswer,
    RanksAnswer,
    Begin,
    Begun,
    JoinGroup,
    HeaderAhead,
    Page,
    PageEnd,
    Pull,
    PullDigest,
    Credit,
    Complete,
    RankFailed,
    Commit,
    Abort,
    Drained,
    Quiet,
    Report,
    RankHello,
    RankState,
    RankOrder,
    Forward,
)
_CODE = {cls: code for code, cls in enumerate(KINDS)}
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: object) -> bytes:
    """One frame."""
    return bytes([_CODE[type(message)]]) + _encoder.encode(message)


def decode(frame: bytes) -> Any:
    """The message of a frame.

    Raises:
        RemoteProtocolError: not a frame of this protocol, or values out of bounds.
    """
    if not frame or frame[0] >= len(KINDS):
        raise RemoteProtocolError("a control frame of unknown kind", advice="Run the same weightbus on both sides.")
    decoder = _decoders.get(frame[0])
    if decoder is None:
        decoder = _decoders[frame[0]] = msgspec.msgpack.Decoder(KINDS[frame[0]])
    try:
        return decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as exc:
        raise RemoteProtocolError(
            f"a malformed {KINDS[frame[0]].__name__}: {exc}", advice="Run the same weightbus on both sides."
        ) from exc
