"""One engine as its driver and its loader share it, and the two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch

from weightbus.adapter import Batch, EngineDriver, EngineLoader, Fault, GroupRules, LoadResult, Refit
from weightbus.deadline import Deadline
from weightbus.errors import EngineError
from weightbus.manifest import Manifest
from weightbus_sglang.facts import Facts, birth_of
from weightbus_sglang.payload import flatten, serialise
from weightbus_sglang.served import Served
from weightbus_sglang.server import SESSION_OPEN, Server

WEIGHTS, KV_CACHE = "weights", "kv_cache"


@attrs.frozen(kw_only=True)
class Settings:
    """The options that steer a refit; see `SglangAdapter`."""

    pause_mode: str = "retract"
    selector: str = "all"
    timeout_s: float = 60.0
    load_timeout_s: float = 300.0
    flush_timeout_s: float = 10.0
    release_kv_cache: bool = False
    check_weights: bool = False
    check_skips: tuple[str, ...] = ()


@attrs.define(eq=False, kw_only=True)
class Engine:
    """What driver and loader know together.

    Attributes:
        released: tags of memory that this adapter released; no other may be resumed.
        held: paused by the caller before the refit; only a finished refit may continue it.
        session: an update session is open on the server, opened by this driver.
        posted: buckets posted in this session.
        noise: checksums of the weights after they were overwritten, where the refit is to be checked.
        kept: buckets whose reply never came: the server may still read them, until it answers a later call.
        partial: the current refit changes only some names.
        birth: tells one process of the server from the next at the same address.
        users: of driver and loader, how many are not closed yet.
    """

    server: Server
    facts: Facts
    served: Served
    settings: Settings
    birth: str
    released: set[str] = attrs.field(factory=set)
    held: bool = False
    session: bool = False
    posted: int = 0
    noise: dict[tuple[int, str], str] | None = None
    kept: list[torch.Tensor] = attrs.field(factory=list)
    partial: bool = False
    users: int = 0

    def leave(self) -> None:
        self.users -= 1
        if self.users <= 0:
            self.server.close()

    def release_memory(self, tags: Sequence[str], deadline: Deadline) -> None:
        """Pause, flush, and release: the server must be idle for it."""
        tags = [tag for tag in tags if tag not in self.released]
        if not tags:
            return
        self.server.pause(self.settings.pause_mode, deadline)
        self.held = True
        self.server.flush(deadline, self.settings.flush_timeout_s)
        self.server.memory("release", tags, deadline)
        self.released.update(tags)

    def acquire_memory(self, tags: Sequence[str], deadline: Deadline) -> bool:
        """Re-acquire what of `tags` was released; True when there was any."""
        tags = [tag for tag in tags if tag in self.released]
        if tags:
            self.server.memory("resume", tags, deadline)
            self.released.difference_update(tags)
        return bool(tags)


@contextmanager
def _phase(phase: str) -> Iterator[None]:
    """Errors from within say at which step of the refit they came up."""
    try:
        yield
    except EngineError as exc:
        exc.phase = exc.phase or phase
        raise


class SglangDriver(EngineDriver):
    """Pause, flush, begin; end, flush, publish; continue. Each step is remembered so that it can be undone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._undo: list[Callable[[Deadline], None]] = []
        self._begun = self._ended = self._stale = False
        self._label: str | None = None
        self._closed = False

    @_phase("begin")
    def begin(self, refit: Refit, deadline: Deadline) -> None:
        """EngineError: refused or dead; begun twice; nothing to send; a partial refit of other weights."""
        engine, server = self._engine, self._engine.server
        if self._begun:
            raise EngineError("begin was called twice in one refit", advice="finish or abort the first")
        if refit.tensors == 0:
            raise EngineError("a refit of zero tensors changes nothing", advice="send the weights")
        self._begun, self._ended, self._stale = True, False, False
        engine.posted, engine.noise, engine.partial = 0, None, refit.partial
        self._check_server(refit, deadline)
        self._acquire_weights(refit, deadline)
        self._undo.append(self._continue)  # first: a pause that raised may have paused all the same
        server.pause(engine.settings.pause_mode, deadline)
        server.flush(deadline, engine.settings.flush_timeout_s)
        self._open_session(refit, deadline)
        self._undo.append(self._close_session)
        if engine.settings.release_kv_cache and KV_CACHE not in engine.released:
            self._undo.append(lambda end: self._acquire(KV_CACHE, end))
            server.memory("release", [KV_CACHE], deadline)
            engine.released.add(KV_CACHE)

    @_phase("finish")
    def finish(self, version: int, deadline: Deadline) -> None:
        """May be called again after it raised. EngineError: refused or dead; nothing loaded; a weight not written."""
        engine, server = self._engine, self._engine.server
        if not self._begun or not engine.posted:
            raise EngineError("no tensor was loaded in this refit", advice="send the weights again")
        if not self._ended:
            server.close_session(deadline)
            engine.session, self._ended = False, True
        server.flush(deadline, engine.settings.flush_timeout_s)
        self._check_written(deadline)
        server.publish(str(version), deadline)
        self._label = str(version)

    @_phase("resume")
    def resume(self, deadline: Deadline) -> None:
        """May be called again after it raised."""
        self._engine.acquire_memory(sorted(self._engine.released), deadline)
        self._engine.server.resume(deadline)
        self._engine.held = False
        self._reset()

    def abort(self, reason: str, *, loaded: bool, resume: bool, deadline: Deadline) -> None:
        """EngineError: a step of the undoing failed, or old weights cannot be served; the engine may stay paused."""
        engine = self._engine
        undo, self._undo = self._undo, []
        mixed = loaded or engine.posted > 0 or self._stale
        if mixed or not resume or engine.held:
            undo = [step for step in undo if step != self._continue]
        if mixed:
            undo = [self._close_session] if engine.session else []
        errors: list[EngineError] = []
        for step in reversed(undo):
            try:
                step(deadline)
            except EngineError as exc:
                errors.append(exc)
        stale, self._stale = self._stale, False
        self._reset()
        if errors:
            first = errors[0]
            for other in errors[1:]:
                first.add_note(f"also failed: {other}")
            raise first
        if stale and not loaded:
            raise EngineError(
                "another driver left a session open: the weights may be mixed, so the engine stays paused",
                advice="send a full refit",
            )

    @_phase("begin")
    def heal(self, deadline: Deadline) -> None:
        """Take over what a former refit, also of another process, left open; the engine is paused at the return."""
        self._reset()
        self._undo = []
        self._engine.server.pause(self._engine.settings.pause_mode, deadline)
        self._engine.server.close_session(deadline, may_be_closed=True)
        self._engine.session = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.leave()

    def _reset(self) -> None:
        self._begun = self._ended = False
        self._undo = []
        self._engine.posted, self._engine.noise = 0, None

    def _check_server(self, refit: Refit, deadline: Deadline) -> None:
        """A server that was started anew at this address: nothing of it is paused, released or known."""
        engine = self._engine
        info = engine.server.get("/server_info", deadline)
        if (birth := birth_of(info)) != engine.birth:
            engine.birth, engine.held, self._label = birth, False, None
            engine.released.clear()
            for key in ("version", "tp_size", "device", "base_gpu_id", "gpu_id_step"):
                if info.get(key) != (known := getattr(engine.facts, key)):
                    raise EngineError(
                        f"the server was started anew with {key} {info.get(key)!r}, it had {known!r}",
                        advice="join it again with a new adapter",
                    )
            if refit.partial:
                raise EngineError("the server was started anew: it has no base", advice="send a full refit")
        if refit.partial and self._label is not None and (now := engine.server.label(deadline)) != self._label:
            raise EngineError(
                f"a partial refit needs version {self._label!r}, the server holds {now!r}",
                advice="send a full refit: somebody else updated the server",
            )

    def _acquire_weights(self, refit: Refit, deadline: Deadline) -> None:
        if WEIGHTS not in self._engine.released:
            return
        if refit.partial and not self._engine.facts.cpu_backup:
            raise EngineError(
                "the weights' memory was released without a backup, so a partial refit has no base",
                advice="send a full refit, or start the server with --enable-weights-cpu-backup",
            )
        self._engine.acquire_memory([WEIGHTS], deadline)
        self._undo.append(lambda end: self._engine.release_memory([WEIGHTS], end))

    def _check_written(self, deadline: Deadline) -> None:
        if self._engine.noise is None:
            return
        now = self._engine.server.checksums(self._engine.settings.check_skips, deadline)
        stale = sorted({key[1] for key, text in self._engine.noise.items() if now.get(key) == text})
        if stale:
            raise EngineError(
                f"{len(stale)} weights were not written by this refit: {', '.join(stale[:8])}",
                advice="send them too, or name what the engine keeps to itself in check_skips",
            )

    def _acquire(self, tag: str, deadline: Deadline) -> None:
        self._engine.acquire_memory([tag], deadline)

    def _continue(self, deadline: Deadline) -> None:
        self._engine.server.resume(deadline)

    def _open_session(self, refit: Refit, deadline: Deadline) -> None:
        server, selector = self._engine.server, self._engine.settings.selector
        try:
            server.open_session(selector, deadline)
        except EngineError as exc:
            if exc.dead or SESSION_OPEN not in exc.what:
                raise
            self._stale = True  # from a driver that was killed: whatever it had posted is in the weights
            if refit.partial:
                raise
            server.close_session(deadline, may_be_closed=True)
            server.open_session(selector, deadline)
        self._engine.session = True

    def _close_session(self, deadline: Deadline) -> None:
        self._engine.session = False  # also when it fails: the next begin or heal takes it over
        self._engine.server.close_session(deadline)


class SglangLoader(EngineLoader):
    """Posts each batch as one bucket: to every rank the one batch, or ``batches[i]`` to rank i.

    Args:
        engine: shared with the driver.
        num_batches: 1, or the engine's tp_size.
        rank_devices: where the server's ranks need the bucket, None where its own device will do.
    """

    def __init__(self, engine: Engine, num_batches: int, rank_devices: Sequence[torch.device] | None) -> None:
        self._engine = engine
        self._num_batches = num_batches
        self._rank_devices = rank_devices
        self._closed = False

    def rules(self) -> GroupRules:
        return self._engine.served.rules()

    def check(self, manifests: Sequence[Manifest], *, partial: bool) -> list[Fault]:
        if len(manifests) != self._num_batches:
            return [Fault("engine", "", f"{len(manifests)} manifests for {self._num_batches} ranks served")]
        faults: list[Fault] = []
        checked: set[int] = set()
        for rank, manifest in enumerate(manifests):
            if (digest := manifest.digest()) not in checked:
                checked.add(digest)
                where = f" (rank {rank})" if len(manifests) > 1 else ""
                faults += self._engine.served.check(manifest, partial=partial, where=where)
        return faults

    @_phase("stream")
    def load(self, batches: Sequence[Batch]) -> LoadResult:
        """EngineError: refused or dead; or what `check` would have refused, and then nothing was posted."""
        engine, settings = self._engine, self._engine.settings
        if not engine.session:
            raise EngineError("no update session is open", advice="call begin first")
        expanded = [self._expand(batch) for batch in batches]
        if len(batches) != self._num_batches or any(_names(part) != _names(expanded[0]) for part in expanded):
            raise EngineError("the ranks' batches do not hold the same names in one order")
        applied = tuple(name for name, _ in batches[0])
        skipped = engine.served.skipped(applied)
        if not expanded[0]:
            return LoadResult(skipped=skipped)
        flats, payloads = self._payloads(expanded)
        deadline = Deadline.after(settings.load_timeout_s)
        if settings.check_weights and not engine.posted and not engine.partial:
            self._make_noise(deadline)
        engine.posted += 1
        engine.kept += flats
        engine.server.load(payloads, settings.selector, deadline, settings.load_timeout_s)
        engine.kept.clear()  # calls are carried out in order: the reply also ends every earlier one
        left = set(skipped)
        return LoadResult(applied=[name for name in applied if name not in left], skipped=skipped)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.leave()

    def _expand(self, batch: Batch) -> list[tuple[str, torch.Tensor]]:
        try:
            return self._engine.served.expand(batch)
        except ValueError as exc:
            raise EngineError(
                f"nothing was posted: {exc}", advice="compare the sent model with the served one"
            ) from exc

    def _payloads(self, expanded: list[list[tuple[str, torch.Tensor]]]) -> tuple[list[torch.Tensor], list[bytes]]:
        """One payload per rank, and the memory that must live until the reply."""
        flats: list[torch.Tensor] = []
        payloads: list[bytes] = []
        buckets = [flatten(part) for part in expanded]
        for rank in range(self._engine.facts.tp_size):
            flat, items = buckets[rank % len(buckets)]
            if self._rank_devices is not None:
                flat = flat.to(self._rank_devices[rank])
            if flat.is_cuda:
                torch.cuda.current_stream(flat.device).synchronize()  # the reader knows nothing of our streams
            by_value = not flat.is_cuda and flats and flats[-1] is flat
            payloads.append(payloads[-1] if by_value else serialise(flat, items))
            flats.append(flat)
        return flats, payloads

    def _make_noise(self, deadline: Deadline) -> None:
        self._engine.posted += 1  # from here on the old weights are gone
        skips = self._engine.settings.check_skips
        self._engine.server.reset_weights(skips, deadline)
        self._engine.noise = self._engine.server.checksums(skips, deadline)


def _names(batch: Batch) -> list[str]:
    return [name for name, _ in batch]
