"""Peer processes for tests: spawned, ended by a hard timeout, failing with the remote traceback, never by a hang."""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from weightbus.config import process_stat
from weightbus.deadline import Deadline
from weightbus.errors import WeightBusError

_EXIT_S = 30.0


class PeerFailed(WeightBusError):
    """A peer process raised, died or ended with another exit code than 0; the text has its traceback."""


class PeerTimeout(PeerFailed, TimeoutError):
    """A peer process did not answer in time; its stacks went to its standard error."""


def resolve(target: str) -> Any:
    """The object that ``"module:name"`` or ``"path/to/file.py:name"`` means; `name` may have dots."""
    where, _, name = target.rpartition(":")
    value: Any = _module_of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def target_of(value: Any) -> str:
    """A text that `resolve` turns into the function or class `value` in another process.

    A module that cannot be imported by its name (a test file under pytest's importlib mode) is named by its file.
    """
    module = sys.modules[value.__module__]
    try:
        importable = importlib.util.find_spec(module.__name__) is not None and not _is_test_file(module)
    except (ImportError, ValueError):
        importable = False
    where = module.__name__ if importable else str(Path(str(module.__file__)).resolve())
    return f"{where}:{value.__qualname__}"


def _is_test_file(module: ModuleType) -> bool:
    return Path(module.__file__ or "").stem.startswith("test_") or module.__name__ == "__main__"


def _module_of_file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"_weightbus_peer_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise PeerFailed(f"{path} is not a Python file.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


class ParentLink:
    """What the function of a linked `Peer` gets as its first argument: a pipe to the test."""

    def __init__(self, pipe: multiprocessing.connection.Connection) -> None:
        self._pipe = pipe

    def send(self, message: Any) -> None:
        """Send a picklable message to the test, which reads it with `Peer.recv`."""
        self._pipe.send(("message", message))

    def poll(self, timeout_s: float = 0.0) -> bool:
        """True when `recv` would return at once."""
        return self._pipe.poll(timeout_s)

    def recv(self, timeout_s: float = 60.0) -> Any:
        """The next message of the test.

        Raises:
            PeerTimeout: none came in time.
            EOFError: the test has gone.
        """
        if not self._pipe.poll(timeout_s):
            raise PeerTimeout(f"The test sent nothing for {timeout_s} s.")
        return self._pipe.recv()


def _main(
    pipe: multiprocessing.connection.Connection,
    target: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    linked: bool,
) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        link = (ParentLink(pipe),) if linked else ()
        pipe.send(("result", resolve(target)(*link, *args, **kwargs)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        sys.exit(1)


class Peer:
    """One spawned process that runs ``function(link, *args, **kwargs)``.

    Args:
        target: ``"module:function"`` or ``"path/to/file.py:function"``.
        args: picklable.
        kwargs: picklable.
        linked: whether the function gets a `ParentLink` first.
        method: ``"spawn"``, or ``"forkserver"``: forked from a server that has imported torch and nothing that uses a
            device or has threads; starts in a tenth of the time, with the environment the server was started with.

    It is a context manager; leaving it kills the process. `sys.path` is inherited.
    """

    def __init__(
        self,
        target: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        linked: bool = True,
        method: str = "spawn",
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["torch", "weightbus.testing.sides"])
        self.target = target
        theirs: multiprocessing.connection.Connection
        self.pipe: multiprocessing.connection.Connection
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, target, tuple(args), dict(kwargs or {}), linked)
        self._process = context.Process(target=_main, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    @property
    def exitcode(self) -> int | None:
        """None while it lives; negative: the signal that ended it."""
        code: int | None = self._process.exitcode
        return code

    def send(self, message: Any) -> None:
        """Send a picklable message to the function."""
        try:
            self.pipe.send(message)
        except (BrokenPipeError, ConnectionResetError) as exc:
            raise PeerFailed(f"{self._name} has gone.") from exc

    def recv(self, timeout_s: float = 60.0) -> Any:
        """The next message of the function.

        Raises:
            PeerFailed: it raised (its traceback is in the text), returned, or died.
            PeerTimeout: no message in time.
        """
        kind, value = self._next(timeout_s)
        if kind != "message":
            raise PeerFailed(f"{self._name} returned {value!r} where a message was expected.")
        return value

    def result(self, timeout_s: float = 60.0) -> Any:
        """What the function returned, once its process has ended with exit code 0; messages before it are dropped.

        Raises:
            PeerFailed: as for `recv`, or another exit code.
            PeerTimeout: it has not returned, or its process has not ended, in time.
        """
        deadline = Deadline.after(timeout_s)
        kind, value = self._next(deadline.remaining_s())
        while kind != "result":
            kind, value = self._next(deadline.remaining_s())
        self._process.join(min(_EXIT_S, max(1.0, deadline.remaining_s())))
        if self._process.exitcode is None:
            self._dump_stacks()
            raise PeerTimeout(f"{self._name} returned, but its process does not end.")
        if self._process.exitcode != 0:
            raise PeerFailed(f"{self._name} returned, then its process ended with exit code {self._process.exitcode}.")
        return value

    def stop(self) -> None:
        """SIGSTOP, and wait until it stands."""
        os.kill(self.pid, signal.SIGSTOP)
        while self.alive and process_stat(self.pid)[0] not in "Tt":
            time.sleep(0.001)

    def cont(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """Kill the process if it lives and close the pipe. Idempotent."""
        if self._process.is_alive():
            self.kill()
        self.pipe.close()

    @property
    def _name(self) -> str:
        return f"Peer {self.target} (pid {self.pid})"

    def _next(self, timeout_s: float) -> tuple[str, Any]:
        try:
            if not self.pipe.poll(timeout_s):
                self._dump_stacks()
                raise PeerTimeout(f"{self._name} did not answer within {timeout_s:.1f} s.")
            kind, value = self.pipe.recv()
        except (EOFError, ConnectionResetError) as exc:
            self._process.join(_EXIT_S)
            raise PeerFailed(f"{self._name} died with exit code {self._process.exitcode}.") from exc
        if kind == "failed":
            raise PeerFailed(f"{self._name} raised:\n{value}")
        return kind, value

    def _dump_stacks(self) -> None:
        """Let a hanging process print its stacks before it is killed."""
        if self.alive:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.2)


def run_peers(*calls: tuple[Any, ...], timeout_s: float) -> list[Any]:
    """Run functions in spawned processes, all at once.

    Args:
        calls: ``(target,)``, ``(target, args)`` or ``(target, args, kwargs)``, see `Peer`.
        timeout_s: seconds for all of them together; then all are killed.

    Returns:
        What each returned, in order of `calls`. Every exit code was 0 and no process is left.

    Raises:
        PeerFailed: the first that raised or died, with its traceback; the others are killed.
        PeerTimeout: names those that had not ended.
    """
    deadline = Deadline.after(timeout_s)
    peers = [Peer(*call, linked=False) for call in calls]
    results: dict[int, Any] = {}
    try:
        while len(results) < len(peers):
            waiting = {peer.pipe: index for index, peer in enumerate(peers) if index not in results}
            ready = multiprocessing.connection.wait(list(waiting), deadline.remaining_s())
            if not ready:
                for index in waiting.values():
                    peers[index]._dump_stacks()
                names = ", ".join(f"{peers[index].target} (call {index})" for index in waiting.values())
                raise PeerTimeout(f"Not ended within {timeout_s} s: {names}.")
            for pipe in ready:
                index = next(i for p, i in waiting.items() if p is pipe)
                results[index] = peers[index].result(max(1.0, deadline.remaining_s()))
    finally:
        for peer in peers:
            peer.close()
    return [results[index] for index in range(len(peers))]
