"""What the peers of test_testing.py run; imports nothing heavy, so that they start fast."""

import atexit
import os
import time
from pathlib import Path
from typing import Any


def add(a: int, b: int = 0) -> int:
    return a + b


def fail(marker: str) -> None:
    """Once the other peer runs."""
    while not Path(marker).exists():
        time.sleep(0.01)
    raise ValueError("a text from over there")


def leave(code: int) -> None:
    os._exit(code)


def leave_late() -> str:
    atexit.register(os._exit, 7)
    return "done"


def sleep(marker: str) -> None:
    part = Path(marker + ".part")
    part.write_text(str(os.getpid()))
    part.rename(marker)
    time.sleep(200)


def echo(link: Any, extra: int) -> str:
    while (message := link.recv()) != "end":
        link.send((message, extra))
    return "ended"
