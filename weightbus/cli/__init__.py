"""The command ``weightbus``: demo, doctor, bench, token."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point; our own errors end in one line on standard error and exit code 1."""
    from weightbus.cli.app import start  # processes of the demo and the bench import this package without a terminal

    start()
