"""The whole way: a trainer's process, the bus, a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

Q = "model.layers.0.self_attn.q_proj.weight"


class Line:
    """A trainer, an engine in this process, and its driver."""

    def __init__(self, backend: str, stage: str | None, llm: Any, *, rpc: bool = False) -> None:
        import rig

        from weightbus import WeightBus

        self.trainer = rig.Trainer(backend, 1)
        options = {"stage": stage, "poison": True}
        join = {"address": self.trainer.address, "engine": "e0", "backend": backend, "options": options}
        self.driver = WeightBus.driver(
            self.trainer.address,
            engine="e0",
            ranks=1,
            adapter="vllm",
            adapter_options={"llm": llm, "join": join, "rpc": rpc},
        )
        self.llm = llm
        self.version = 0

    def send(self, path: Path, version: int, **order: Any) -> dict[str, Any]:
        """Drive one refit here while the trainer sends; its answer."""
        from weightbus import WeightBusError

        self.trainer.post(path, version, **order)
        try:
            self.driver.drive(timeout=90)
        except WeightBusError as exc:
            self.error: WeightBusError = exc
        return self.trainer.said()

    def close(self) -> None:
        self.driver.close()
        self.trainer.kill()


@pytest.fixture(scope="module")
def llm(checkpoints: Path) -> Any:
    import rig
    import tiny

    a, b = (tiny.make(checkpoints / f"bus-{seed}", seed) for seed in (0, 1))
    out_b = rig.generate(rig.engine(b))
    llm = rig.engine(a, weight_transfer_config={"backend": "weightbus"}, worker_extension_cls="")
    return llm, a, b, rig.generate(llm), out_b


@pytest.mark.parametrize("backend", ["local", "nixl"])
@pytest.mark.parametrize("stage", [None, "host"])
def test_through_the_bus_and_back(llm: Any, backend: str, stage: str | None) -> None:
    import rig

    engine, a, b, out_a, out_b = llm
    line = Line(backend, stage, engine)
    try:
        for version, path, want in ((1, b, out_b), (2, a, out_a)):
            answer = line.send(path, version)
            assert answer["engines"] == {"e0": f"READY({version})"}, answer
            assert rig.generate(engine) == want
            assert engine.get_weight_version() == str(version)
    finally:
        line.close()


@pytest.fixture(scope="module")
def in_place(llm: Any) -> Iterator[Line]:
    made = Line("local", None, llm[0])
    yield made
    made.close()


def ready(line: Line, path: Path) -> None:
    line.version += 1
    answer = line.send(path, line.version)
    assert answer["engines"] == {"e0": f"READY({line.version})"}, answer


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ({"only": "q_proj", "partial": True}, "qkv_proj"),
        ({"drop": "model.layers.1.mlp.up_proj.weight"}, "gate_up_proj"),
        ({"drop": "lm_head.weight"}, "lm_head"),
        ({"rename": "model.norm.weight"}, "model.gnorm.weight"),
        ({"reshape": Q}, Q),
    ],
    ids=["part of a fused layer", "half of gate and up", "no head", "unknown name", "wrong shape"],
)
def test_what_does_not_fit_is_refused_before_the_pause(in_place: Line, llm: Any, order: Any, says: str) -> None:
    import rig

    engine, a, b, out_a, _ = llm
    ready(in_place, a)
    in_place.trainer.post(b, in_place.version + 1, **order)
    answer = in_place.trainer.said()
    assert answer["error"] == "AlignmentError"
    assert says in answer["text"]
    assert answer["engines"] == {"e0": f"READY({in_place.version})"}
    assert rig.generate(engine) == out_a


@pytest.mark.parametrize(
    "order", [{"raise_after": 12}, {"hold_after": 12, "hold_s": 8.0, "timeout": 4.0}], ids=["source raises", "timeout"]
)
def test_a_refit_that_ends_in_mid_stream_is_healed_by_the_next_full_one(in_place: Line, llm: Any, order: Any) -> None:
    import rig

    engine, a, b, _, out_b = llm
    ready(in_place, a)
    in_place.version += 1
    answer = in_place.send(b, in_place.version, **order)
    assert answer["engines"]["e0"].startswith("DIRTY"), answer
    ready(in_place, b)
    assert rig.generate(engine) == out_b


def test_a_staged_refit_that_ends_in_mid_stream_leaves_the_engine_serving(llm: Any) -> None:
    import rig

    engine, a, b, out_a, out_b = llm
    line = Line("local", "host", engine)
    try:
        assert line.send(a, 1)["engines"] == {"e0": "READY(1)"}
        answer = line.send(b, 2, raise_after=12)
        assert answer["error"] and answer["engines"] == {"e0": "READY(1)"}
        assert rig.generate(engine) == out_a
        assert line.send(b, 3)["engines"] == {"e0": "READY(3)"}
        assert rig.generate(engine) == out_b
    finally:
        line.close()


def test_the_worker_extension_does_the_same_without_a_weight_transfer_engine(llm: Any) -> None:
    import rig

    _, a, b, out_a, out_b = llm
    engine = rig.engine(
        a, weight_transfer_config=None, worker_extension_cls="weightbus_vllm.extension.WeightbusExtension"
    )
    line = Line("local", None, engine, rpc=True)
    try:
        for version, path, want in ((1, b, out_b), (2, a, out_a)):
            answer = line.send(path, version)
            assert answer["engines"] == {"e0": f"READY({version})"}, answer
            assert rig.generate(engine) == want
            assert engine.get_weight_version() == str(version)
        assert line.send(b, 3, raise_after=12)["engines"]["e0"].startswith("DIRTY")
        assert line.send(b, 4)["engines"] == {"e0": "READY(4)"}
        assert rig.generate(engine) == out_b
    finally:
        line.close()


def test_a_worker_joins_the_bus_of_the_next_trainer(llm: Any) -> None:
    """Reloads leave vLLM's wrappers in the model; the check must see through them."""
    import rig

    engine, a, b, _, out_b = llm
    for path in (a, b):
        line = Line("local", None, engine)
        try:
            assert line.send(path, 1)["engines"] == {"e0": "READY(1)"}
        finally:
            line.close()
    assert rig.generate(engine) == out_b
