"""Processes of the engine tests: servers and peers; none outlives the test's process, however that one ends."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

#: Of every server that was started: the tests' conftest shows the ends of these with a failure.
logs: list[Path] = []


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@functools.cache
def leave_nothing() -> subprocess.Popen[bytes]:
    """From now on this process's descendants end when it does, also by SIGKILL."""
    command = [sys.executable, str(Path(__file__).with_name("watch.py")), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def start_group(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a server in a process group of its own, for `end_group`.

    Not in a session of its own: Linux shares the cores among sessions, and an engine that spins in another one was seen
    to keep this process from running for seconds.
    """
    leave_nothing()
    logs.append(log)
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, process_group=0,
            env={**os.environ, **environment},
        )  # fmt: skip


def end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to every process of the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def tail(log: Path, lines: int = 60) -> str:
    """The end of a log, for an error message."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


class Peer:
    """A process that answers and takes orders in lines of JSON; it must end when its input does.

    Args:
        command: the program and its arguments, run in the project's root.
    """

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def tell(self, **order: Any) -> None:
        if self.process.stdin is None:
            raise RuntimeError("no pipe")
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def said(self, timeout_s: float = 120) -> dict[str, Any]:
        """Its next line; ``{"error": "died"}`` when it has ended."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"{self.process.args!r} said nothing for {timeout_s} s") from None
        return dict(json.loads(line)) if line else {"error": "died"}

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        """End its input, and it."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()
