"""The double keeps the promises of `sglang_contract`; tests/engines/sglang runs the same against a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

from tests.engines.sglang_double import SglangDouble, layers, write_checkpoint
from tests.sglang_contract import DEATHS, ServerContract, Weights


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def double(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SglangDouble]:
    torch.manual_seed(0)
    server = SglangDouble(write_checkpoint(tmp_path / "model", layers()), tp=request.param).start()
    yield server
    server.stop()


@pytest.fixture(name="weights")
def other_weights() -> Weights:
    torch.manual_seed(1)
    return layers()


class TestDouble(ServerContract):
    @pytest.fixture
    def server(self, double: SglangDouble) -> SglangDouble:  # type: ignore[override]
        return double

    @pytest.fixture
    def weights(self) -> Weights:
        torch.manual_seed(1)
        return layers()


@pytest.mark.parametrize("deadly", DEATHS, ids=lambda deadly: deadly.__name__)
def test_what_kills_the_server(
    double: SglangDouble, weights: Weights, deadly: Callable[[SglangDouble, Weights], None]
) -> None:
    double.post("/begin_weight_update")
    with pytest.raises(httpx.HTTPError):
        deadly(double, weights)
    assert double.wait_dead(5)
    with pytest.raises(httpx.HTTPError):
        double.http.get(f"{double.url}/ping")
