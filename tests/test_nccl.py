"""Backend `nccl` with Gloo: the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from weightbus.testing.conformance import BackendConformance


class TestConformance(BackendConformance):
    options: ClassVar[Mapping[str, Any]] = {"timeout": 4.0}

    @pytest.fixture
    def backend(self) -> str:
        return "weightbus_nccl:NcclBackend"
