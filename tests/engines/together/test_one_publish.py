"""One publish feeds a vLLM engine, an SGLang server and a torch module, each in the environment it needs.

Runs in weightbus's own environment, which is the trainer's and the module's: ``.venv/bin/python -m pytest -m engine
tests/engines/together``, with WEIGHTBUS_SGLANG_PYTHON and WEIGHTBUS_VLLM_PYTHON if those are not in the usual places.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.peer import ROOT, Peer
from tests.engines.sglang.server import RealServer, Receiver, sample
from tests.engines.together import torch_peer
from tests.engines.vllm import tiny
from tests.engines.vllm.rig import PROMPTS, TOKENS, Output
from weightbus import WeightBus

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

SGLANG = os.environ.get("WEIGHTBUS_SGLANG_PYTHON", str(ROOT / ".venv-sglang/bin/python"))
VLLM = os.environ.get("WEIGHTBUS_VLLM_PYTHON", str(ROOT / ".venv-vllm/bin/python"))
UP_S = 400.0


class Three:
    """The bus and the engines that have joined it, all on the old weights."""

    def __init__(self, old: Path, log: Path) -> None:
        self._ends: list[Any] = []
        try:
            self._join(old, log)
        except BaseException:
            self.close()
            raise

    def _join(self, old: Path, log: Path) -> None:
        self.bus = WeightBus.sender("tcp://127.0.0.1:0", receivers=3, bucket_bytes="64KiB", stall_timeout=60.0)
        self._ends.append(self.bus)
        self.server = RealServer(old, log, python=SGLANG)
        self._ends.append(self.server)
        self.server.launch()
        self.peers = {
            "vllm": self._peer(VLLM, "vllm_peer", old),
            "torch": self._peer(sys.executable, "torch_peer", old),
        }
        self.server.wait(UP_S)
        self.owner = Receiver(self.bus.address, self.server.url, SGLANG, engine="sglang", stage="host")
        self._ends.append(self.owner)
        for peer in self.peers.values():
            assert peer.said(UP_S) == {"joined": True}

    def _peer(self, python: str, module: str, old: Path) -> Peer:
        peer = Peer(python, "-m", f"tests.engines.together.{module}", self.bus.address, str(old))
        self._ends.append(peer)
        return peer

    def publish(self, weights: Any, version: int) -> dict[str, str]:
        """One send; what the sender says of every engine."""
        for peer in self.peers.values():
            peer.tell(do="refit")
        return dict(self.bus.send(weights, version=version, timeout=120).outcomes)

    def versions(self) -> dict[str, str]:
        """After a refit: what each engine itself says it holds."""
        said = {name: peer.said()["version"] for name, peer in self.peers.items()}
        return {**said, "sglang": self.server.info()["weight_version"]}

    def outputs(self) -> dict[str, Output]:
        for peer in self.peers.values():
            peer.tell(do="generate")
        out = {"sglang": [sample(self.server.generate(prompt, TOKENS)) for prompt in PROMPTS]}
        for name, peer in self.peers.items():
            out[name] = [(tokens, logprobs) for tokens, logprobs in peer.said()["outputs"]]
        return out

    def close(self) -> None:
        for end in reversed(self._ends):
            end.stop() if isinstance(end, RealServer) else end.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints of the old and of the new weights."""
    out = tmp_path_factory.mktemp("models")
    return tiny.make(out / "old", 0), tiny.make(out / "new", 1)


@pytest.fixture
def three(models: tuple[Path, Path], tmp_path: Path) -> Iterator[Three]:
    made = Three(models[0], tmp_path / "sglang.log")
    yield made
    made.close()


def test_one_publish_feeds_them_all(three: Three, models: tuple[Path, Path]) -> None:
    old, new = models
    wanted = {path: torch_peer.greedy(torch_peer.load(path)) for path in models}
    assert all(a[0] != b[0] for a, b in zip(wanted[old], wanted[new], strict=True))
    before = three.outputs()
    assert before["torch"] == wanted[old]
    for version, path in ((1, new), (2, old), (3, new)):
        assert three.publish(tiny.weights(path), version) == dict.fromkeys(before, f"READY({version})")
        assert three.versions() == dict.fromkeys(before, str(version))
        after = three.outputs()
        assert after["torch"] == wanted[path]  # the same code on the same values: equal to the last bit
        for engine in after:
            for (tokens, logprobs), (right, near) in zip(after[engine], wanted[path], strict=True):
                assert tokens == right, engine
                assert logprobs == pytest.approx(near, abs=1e-4), engine  # kernels differ in the last bits
        if path == old:
            assert after == before  # each engine on its own earlier answers: equal to the last bit
