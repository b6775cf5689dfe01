"""The conformance suite of the backend that the command line names.

``pytest -p weightbus.testing.plugin --pyargs weightbus.testing.suite --weightbus-backend foo``
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from weightbus.backend import Backend
from weightbus.testing.conformance import BackendConformance
from weightbus.testing.sides import make_backend


class TestBackend(BackendConformance):
    """All promises, and that the backend can run here at all."""

    @pytest.fixture
    def backend(self, request: pytest.FixtureRequest) -> str | Backend:
        name = request.config.getoption("--weightbus-backend", default=None)
        if not name:
            raise pytest.UsageError("Add: -p weightbus.testing.plugin --weightbus-backend NAME")
        return str(name)

    @pytest.fixture
    def backend_options(self, request: pytest.FixtureRequest) -> Mapping[str, Any]:
        options: Mapping[str, Any] = json.loads(request.config.getoption("--weightbus-options"))
        return options

    def test_it_can_run_here(self, backend: str, backend_options: Mapping[str, Any]) -> None:
        probe = make_backend(backend, backend_options).probe()
        assert probe.ok, f"{probe.reason} {probe.advice}"
