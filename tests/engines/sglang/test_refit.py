"""A to B to A on every kind of model: tokens, log-probabilities and checksums are those of a fresh server."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engines.sglang.conftest import KINDS, Fresh, Start, measure
from tests.sglang_side import Side, manifest

Trainer = Callable[[str, int], dict[str, torch.Tensor]]


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_again(
    kind: str, start: Start, fresh: Callable[..., Fresh], trainer: Trainer, request: pytest.FixtureRequest
) -> None:
    wanted = fresh(kind, 1)
    server = start(kind)
    first = measure(server)
    assert first.outputs != wanted.outputs
    side = Side(server)
    request.addfinalizer(side.close)
    old, new = trainer(kind, 0), trainer(kind, 1)
    assert side.loader.check([manifest(new)], partial=False) == []
    for version, (weights, expected) in enumerate([(new, wanted), (old, first), (new, wanted)], 1):
        side.refit(weights, version=version)
        outputs = server.outputs()  # before the flush of `measure`: the refit's own must have been enough
        assert outputs == expected.outputs
        assert measure(server) == expected
        assert server.info()["weight_version"] == str(version)


def test_the_names_of_a_trainer_were_really_others(trainer: Trainer) -> None:
    assert "model.layers.0.mlp.experts.gate_up_proj" in trainer("qwen3_moe", 1)
    assert "lm_head.weight" in trainer("qwen3", 1)  # tied there
