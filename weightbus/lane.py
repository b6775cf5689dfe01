"""One rank's incoming lane: its endpoint, its slots, what has landed and was not taken; and the stage."""

from __future__ import annotations

import os
import threading
from collections import deque

import attrs
import torch

from weightbus import digest as digests
from weightbus.backend import LANE_KEY_BYTES, Arrival, Backend, Channel, Endpoint, EndpointSpec
from weightbus.bucket import Unpacker
from weightbus.buffers import SlotPool
from weightbus.control import messages as m
from weightbus.deadline import Deadline
from weightbus.errors import DigestMismatch, RemoteProtocolError, WeightBusError
from weightbus.header import Header
from weightbus.names import NameRule
from weightbus.onward import Onward
from weightbus.outbound import MAX_OPERATION_S
from weightbus.plan import Plan, single_page


@attrs.frozen(kw_only=True)
class InboundConfig:
    """What the user said of this receiver."""

    stage: str | None = None
    paged_in_place: bool = False
    max_host_bytes: int | None = None
    max_device_bytes: int | None = None
    poison: bool = False
    names: tuple[NameRule, ...] = ()
    host: str | None = None


@attrs.define(eq=False)
class Landed:
    """One bucket that is here: in a slot, or in the stage."""

    index: int
    memory: torch.Tensor
    nbytes: int
    header: Header
    arrival: Arrival | None


class InboundLane:
    """One rank's lane: its endpoint, its slots, what has landed and not been taken."""

    def __init__(self, rank: int, name: str, backend: Backend, device: torch.device, config: InboundConfig) -> None:
        self.rank, self.name = rank, name
        self.id = ""
        self.clean = True  # the last refit has ended in order
        self._taking = False  # a refit is open on it
        self.drained = False  # the writer said that its operations have ended
        self.key = b""
        self.endpoint: Endpoint | None = None
        self.channel: Channel | None = None
        self.pool: SlotPool | None = None
        self.ready: deque[Landed] = deque()
        self.pages: dict[int, m.Page] = {}
        self.page_end: m.PageEnd | None = None
        self.pull: m.Pull | None = None
        self.pull_digest: m.PullDigest | None = None
        self.next_bucket = 0
        self.plan: Plan | None = None
        self.unpacker: Unpacker | None = None
        self.refit = b""
        self.aheads: list[m.HeaderAhead] = []
        self.writer = ""
        self.group = ""  # id of the collective group that was entered last
        self.deadline = Deadline.after(None)  # of the refit
        self.onward = Onward(backend.capabilities)
        self._backend, self._device, self._config = backend, device, config

    @property
    def shares(self) -> bool:
        return self._backend.capabilities.shares_memory

    def open(self) -> Endpoint:
        """This lane's endpoint, made where there is none: at set-up, or after `retire`."""
        if self.endpoint is None:
            spec = EndpointSpec(name=self.name, role="receive", device=self._device, host=self._config.host)
            self.endpoint = self._backend.endpoint(spec)
            self.key = os.urandom(LANE_KEY_BYTES)
        return self.endpoint

    def prepare(self, lane: str, refit: str, slot_bytes: int, slots: int, writer: str) -> None:
        """Be clean and have room for this refit; a lane that may still be written to is replaced.

        Args:
            slot_bytes: 0 where the receiver pulls: nothing is allocated, nobody connects.
            writer: who will connect; the connection of another one cannot be used by it.
        """
        multicast = self._backend.capabilities.multicast
        alive = self.channel is not None and self.channel.error is None if slot_bytes else self.channel is None
        # a group's operation may have ended for its writer while a reader still waits in it
        safe = (self.clean or (self.drained and not multicast)) and alive and self.onward.idle
        safe = safe and writer == self.writer
        if self.pool is not None and not (safe and self._fits(slot_bytes, slots)):
            self.retire()
        endpoint = self.open()
        if self.pool is None:
            limit = self._config.max_host_bytes if self._device.type == "cpu" else self._config.max_device_bytes
            self.pool = SlotPool(endpoint, slots, self._config.poison, limit)
            if not self.shares and slot_bytes:
                self.pool.ensure(slot_bytes)
            if not multicast and slot_bytes:
                self.channel = endpoint.listen(self.key, self.pool.regions)
        self.writer, self._taking = writer, True
        self.id, self.refit, self.clean, self.drained = lane, bytes.fromhex(refit), False, False
        self.ready.clear()
        self.pages.clear()
        self.aheads.clear()
        self.page_end, self.next_bucket = None, 0
        self.pull = self.pull_digest = None
        self.onward.reset()

    def _fits(self, slot_bytes: int, slots: int) -> bool:
        if self.shares or self.pool is None or slot_bytes == 0:
            return True
        return self.pool.count == slots and self.pool.regions[0].nbytes >= slot_bytes

    def retire(self) -> None:
        """Destroy this incarnation, the one fence against late writes. Closing may block: on a thread of its own."""
        endpoint, self.endpoint, self.channel, self.pool = self.endpoint, None, None, None
        self.ready.clear()
        self.onward.forget()
        if self.unpacker is not None:
            self.unpacker = None
        if endpoint is not None:
            threading.Thread(target=endpoint.close, name="weightbus-retire", daemon=True).start()

    def note(self, note: m.LaneNote) -> None:
        """What the sender says of this lane in the refit that is open."""
        if isinstance(note, m.Page):
            self.pages[note.bucket] = note
        elif isinstance(note, m.PageEnd):
            self.page_end = note
        elif isinstance(note, m.Pull):
            self.pull = note
        elif isinstance(note, m.PullDigest):
            self.pull_digest = note
        elif isinstance(note, m.HeaderAhead):
            self.aheads.append(note)
        elif isinstance(note, m.Drained):  # the writer's operations have ended
            self.drained = True

    def poll(self) -> bool:
        """Take what has landed; on the bus thread. Raises what is wrong with the lane."""
        if self.endpoint is None:
            return False
        moved = self.endpoint.progress()
        if self.channel is None:
            return moved
        while self.aheads:
            ahead = self.aheads.pop(0)
            self.channel.operation_timeout_s = max(0.001, self.deadline.remaining_s(MAX_OPERATION_S))
            self.channel.post_recv(ahead.slot, ahead.nbytes, ahead.header)
            moved = True
        wrong: WeightBusError | None = None
        for arrival in self.channel.arrivals():
            moved = True
            try:
                taken = wrong is None and self._accept(Header.unpack(arrival.header), arrival)
            except WeightBusError as exc:
                wrong, taken = exc, False
            if not taken:
                self.channel.release(arrival)
        if wrong is not None:
            raise wrong
        moved |= self.onward.tick()
        if self.channel.error is not None and not self.clean:
            raise self.channel.error
        return moved

    def _accept(self, header: Header, arrival: Arrival) -> bool:
        """Take a bucket; False for one of a refit that is over."""
        if header.lane_key != self.key or header.refit_id != self.refit or not self._taking:
            return False
        if header.bucket != self.next_bucket:
            raise RemoteProtocolError(
                f"bucket {header.bucket} came in place of {self.next_bucket}",
                lane=self.id,
                bucket=header.bucket,
                phase="stream",
                advice="Bytes were lost, doubled or reordered on the way; the refit can be sent again.",
            )
        if header.used_bytes != arrival.nbytes or arrival.nbytes > arrival.region.nbytes:
            raise RemoteProtocolError(
                f"{arrival.nbytes} bytes landed, the header says {header.used_bytes}",
                lane=self.id,
                bucket=header.bucket,
                phase="stream",
                advice="The transfer was cut short; send again.",
            )
        self.onward.take(header, arrival)
        self.ready.append(Landed(header.bucket, arrival.region.tensor, arrival.nbytes, header, arrival))
        self.next_bucket += 1  # last: whoever loads looks at both
        return True

    def expect(self, landed: Landed) -> None:
        """Raises RemoteProtocolError when the layout is not the one agreed, before a byte is used."""
        index, digest = landed.index, landed.header.plan_digest
        if self.plan is not None:
            buckets = self.plan.buckets
            if digest != self.plan.digest or index >= len(buckets) or buckets[index].used_bytes != landed.nbytes:
                raise RemoteProtocolError("a bucket packed by another plan", lane=self.id, bucket=index)
        else:
            page = self.pages[index]
            if digest != single_page(page.specs, page.first_tensor, m.unflat_segments(page.segments)):
                raise RemoteProtocolError("a bucket packed by another page", lane=self.id, bucket=index)

    def release(self, landed: Landed) -> None:
        if landed.arrival is not None and self.channel is not None:
            if self.pool is not None and not self.shares and not self.onward.holds(landed.index):
                self.pool.poison(landed.arrival.slot) if landed.arrival.slot < len(self.pool.regions) else None
            self.channel.release(landed.arrival)
            landed.arrival = None

    def forget(self) -> None:
        """The refit is over here: let go of everything that has landed and is not being read, or will land."""
        self._taking = False
        self.onward.stop()
        while self.ready:
            self.release(self.ready.popleft())

    @property
    def total(self) -> int | None:
        """How many buckets there are; None while that is not known."""
        if self.plan is not None:
            return len(self.plan.buckets)
        return None if self.page_end is None else self.page_end.buckets

    def readable(self) -> bool:
        """The next bucket is here, and its page."""
        return bool(self.ready) and (self.plan is not None or self.ready[0].index in self.pages)


def verify(landed: Landed, memory: torch.Tensor, lane: str) -> None:
    """Raises DigestMismatch when the bytes are not those that were packed."""
    if landed.header.verified:
        compare(landed, digests.digest(memory, landed.nbytes), lane)


def compare(landed: Landed, have: int, lane: str) -> None:
    """Raises DigestMismatch when `have` is not the digest that was sent."""
    if landed.header.verified and have != landed.header.digest:
        raise DigestMismatch(
            f"digest {have:016x}, packed as {landed.header.digest:016x}",
            lane=lane,
            bucket=landed.index,
            phase="stream",
            advice="Memory or transport corrupts data; a full send heals the engine.",
        )


class Stage:
    """The receiver's copy of one refit, kept over refits and reused."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: list[torch.Tensor] = []

    def put(self, k: int, landed: Landed) -> Landed:
        """Copy bucket k of a lane; returns it as landed in the stage."""
        while len(self._memory) <= k:
            self._memory.append(torch.empty(0, dtype=torch.uint8, device=self._device))
        if self._memory[k].numel() < landed.nbytes:
            self._memory[k] = torch.empty(max(landed.nbytes, 16), dtype=torch.uint8, device=self._device)
        self._memory[k][: landed.nbytes].copy_(landed.memory[: landed.nbytes])
        if landed.memory.is_cuda:  # the slot is released next
            torch.cuda.current_stream(landed.memory.device).synchronize()
        return Landed(landed.index, self._memory[k], landed.nbytes, landed.header, None)

    def drop(self) -> None:
        self._memory.clear()
