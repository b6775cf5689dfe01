"""Kills what a process leaves behind: ``watch.py PID``, with a pipe from that process as its input.

Descendants are noted while the process lives, as engines put theirs into sessions of their own and outlive a parent
that was killed. Ends when the pipe does.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys

import psutil

EVERY_S = 1.0


def main(pid: int) -> None:
    parent = psutil.Process(pid)
    seen: set[psutil.Process] = set()
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        with contextlib.suppress(psutil.Error):
            seen.update(parent.children(recursive=True))
    for process in seen.copy():
        with contextlib.suppress(psutil.Error):
            seen.update(process.children(recursive=True))
    for process in seen:
        if process.pid != os.getpid():
            with contextlib.suppress(psutil.Error):  # gone; a number that was given anew is not touched
                process.kill()


if __name__ == "__main__":
    main(int(sys.argv[1]))
