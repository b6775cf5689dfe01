"""The command ``weightbus``: demo, doctor, bench, token."""

from weightbus.cli.app import app, main

__all__ = ["app", "main"]
