"""Runs in the environment made by setup.sh: ``.venv-vllm/bin/python -m pytest -m engine tests/engines/vllm``."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.engines.vllm.environment import ENVIRONMENT

HERE = Path(__file__).parent
AVAILABLE = importlib.util.find_spec("vllm") is not None

if AVAILABLE:
    sys.path.insert(0, str(HERE))  # tiny, rig and fileengine, here and in every engine process
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    os.environ.update(ENVIRONMENT)
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def multiprocess(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines made in the test have a core process and workers of their own."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
