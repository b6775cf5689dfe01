"""Driver side: the steps of one vLLM engine, in the process of the trainer's controller or wherever it is run.

begin: pause, start, and `update` posted on a thread of its own, as it ends only when the workers have loaded.
finish: the reply of `update`, finish with the version, reset of the prefix cache. resume: resume.
"""

from __future__ import annotations

import enum
import threading
from typing import Any

import attrs

from weightbus.adapter import EngineDriver, Refit
from weightbus.deadline import Deadline
from weightbus.errors import EngineError
from weightbus_vllm.client import Client, call_workers, check_engine

_NO_SESSION = "matching"  # vLLM: "finish_weight_update called without a matching start_weight_update"


class _Stage(enum.Enum):
    """How far the engine may have been brought."""

    UNKNOWN = "unknown"
    SERVING = "serving"
    PAUSED = "paused"
    STARTED = "started"
    FINISHED = "finished"


@attrs.frozen(kw_only=True)
class Pause:
    """How requests in flight fare.

    Attributes:
        mode: abort (they end with what they have), wait (they are finished first) or keep (they go on afterwards).
        keep_kv: with mode keep: what was computed with the old weights stays, also in the prefix cache; else it is
            computed again.
    """

    mode: str = attrs.field(default="abort", validator=attrs.validators.in_(("abort", "wait", "keep")))
    keep_kv: bool = attrs.field(default=False)

    @keep_kv.validator
    def _only_kept(self, _: Any, value: bool) -> None:
        if value and self.mode != "keep":
            raise ValueError("keep_kv needs mode 'keep'")


class VllmDriver(EngineDriver):
    """Steps one engine through a refit; see `EngineDriver` for the order of calls.

    Args:
        client: reaches the engine.
        pause: how requests in flight fare.
    """

    def __init__(self, client: Client, pause: Pause) -> None:
        self._client = client
        self._pause = pause
        self._stage = _Stage.UNKNOWN  # another driver may have left an update open
        self._update: _Update | None = None

    def begin(self, refit: Refit, deadline: Deadline) -> None:
        self._update = None
        self._stage = _Stage.SERVING
        check_engine(self._client, deadline)  # a server may have been replaced since
        self._stage = _Stage.PAUSED  # before the call: one that fails may have been carried out all the same
        self._do("pause", deadline, mode=self._pause.mode, clear_cache=not self._pause.keep_kv)
        self._stage = _Stage.STARTED
        self._do("start", deadline)
        self._update = _Update(self._client, deadline)

    def poll(self) -> None:
        """Between begin and finish: raise what `update` has already failed with. Cheap."""
        if self._update is not None and self._update.done and self._update.error is not None:
            raise _phase(self._update.error, "stream")

    def finish(self, version: int, deadline: Deadline) -> None:
        if self._update is not None:
            self._await_update(deadline)
        if self._stage is not _Stage.FINISHED:  # a retry after a cache that could not be reset
            self._do("finish", deadline, weight_version=str(version))
            self._stage = _Stage.FINISHED
        self._reset(deadline)

    def resume(self, deadline: Deadline) -> None:
        self._do("resume", deadline)
        self._stage = _Stage.SERVING

    def abort(self, reason: str, *, loaded: bool, resume: bool, deadline: Deadline) -> None:
        if self._update is not None and not self._update.wait(deadline):
            raise EngineError(
                "update_weights is still running in the engine's workers",
                phase="abort",
                advice="wait for its end, or restart the engine",
            )
        update, self._update = self._update, None
        if self._stage is _Stage.STARTED:
            if update is not None and isinstance(update.error, EngineError) and update.error.dead:
                raise update.error
            self._close_session(deadline)
        if self._stage is not _Stage.SERVING:
            self._stage = _Stage.PAUSED
            if resume and not loaded:
                self.resume(deadline)

    def heal(self, deadline: Deadline) -> None:
        self._do("pause", deadline, mode=self._pause.mode, clear_cache=not self._pause.keep_kv)
        if self._stage in (_Stage.UNKNOWN, _Stage.STARTED):
            self._close_session(deadline)
        self._stage, self._update = _Stage.PAUSED, None

    def close(self) -> None:
        self._client.close()

    def _await_update(self, deadline: Deadline) -> None:
        update = self._update
        if update is None or not update.wait(deadline):
            raise EngineError(
                "every rank has loaded, yet update_weights has not returned",
                phase="finish",
                advice="raise finish_timeout, or look at the engine's log",
            )
        if update.error is not None:
            raise _phase(update.error, "finish")

    def _close_session(self, deadline: Deadline) -> None:
        """End an update that may be open on some ranks: those without one say so, and that is what is wanted."""
        try:
            self._do("finish", deadline)
        except EngineError as exc:
            if _NO_SESSION not in str(exc):
                raise

    def _reset(self, deadline: Deadline) -> None:
        if self._pause.keep_kv:
            return
        done = self._do("reset", deadline, reset_running_requests=True)
        if done is False:
            raise EngineError(
                "the prefix cache could not be reset: requests would be served from the old weights",
                phase="finish",
                advice="use pause mode 'abort', or disable prefix caching",
            )

    def _do(self, step: str, deadline: Deadline, **arguments: Any) -> Any:
        try:
            run = call_workers if step in ("start", "finish") else type(self._client).call
            return run(self._client, step, deadline, **arguments)
        except EngineError as exc:
            raise _phase(exc, step) from exc.__cause__


class _Update:
    """`update_weights` on a daemon thread."""

    def __init__(self, client: Client, deadline: Deadline) -> None:
        self.error: EngineError | None = None
        self._client = client
        self._deadline = deadline
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="weightbus-vllm-update", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, deadline: Deadline) -> bool:
        left = deadline.remaining_s()
        return self._ended.wait(None if left == float("inf") else left)

    def _run(self) -> None:
        left = self._deadline.remaining_s()
        info = {"timeout_s": None if left == float("inf") else left}
        try:
            call_workers(self._client, "update", self._deadline, update_info=info)
        except EngineError as exc:
            self.error = exc
        except BaseException as exc:
            self.error = EngineError(f"update_weights: {type(exc).__name__}: {exc}")
            self.error.__cause__ = exc
        finally:
            self._ended.set()


def _phase(error: EngineError, phase: str) -> EngineError:
    error.phase = error.phase or phase
    return error
