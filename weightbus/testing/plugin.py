"""The pytest plugin of `weightbus.testing.suite`: its options and the marker ``gpu``. Loaded by ``-p`` only."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weightbus")
    group.addoption("--weightbus-backend", metavar="NAME", help="the backend to test: its name, or module:Class")
    group.addoption("--weightbus-options", metavar="JSON", default="{}", help="backend_options, a JSON object")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
