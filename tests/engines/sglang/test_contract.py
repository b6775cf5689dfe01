"""The real server keeps the promises that the double was built on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from tests.engines.sglang.conftest import Pair
from tests.engines.sglang.server import RealServer
from tests.sglang_contract import DEATHS, ServerContract, Weights, restore, wrong_shape


class TestRealServer(ServerContract):
    @pytest.fixture
    def server(self, pair: Pair) -> Iterator[RealServer]:  # type: ignore[override]
        restore(pair.running())
        yield pair.server
        restore(pair.server)

    @pytest.fixture
    def weights(self, models: Path) -> Weights:
        return load_file(models / "llama-1" / "model.safetensors")


@pytest.mark.parametrize(
    "deadly", [pytest.param(d, marks=[] if d is wrong_shape else [pytest.mark.slow], id=d.__name__) for d in DEATHS]
)
def test_what_kills_the_server(pair: Pair, models: Path, deadly: Callable[[RealServer, Weights], None]) -> None:
    server = pair.running()
    weights = load_file(models / "llama-1" / "model.safetensors")
    server.post("/begin_weight_update")
    with pytest.raises(httpx.HTTPError):
        deadly(server, weights)
    assert server.wait_dead(60)
