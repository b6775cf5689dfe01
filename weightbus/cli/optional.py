"""Libraries that only this command line uses, and only where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from weightbus.errors import ConfigError


def library(name: str, install: str, purpose: str) -> Any:
    """An optional module by name.

    Raises:
        ConfigError: it cannot be imported; says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise ConfigError(f"{purpose} needs {name}, which cannot be imported: {exc}", advice=install) from exc


def present(name: str) -> bool:
    """Whether a top-level module is installed; imports nothing."""
    return importlib.util.find_spec(name) is not None
