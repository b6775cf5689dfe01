"""The whole way to a server over HTTP: a request in flight, the prefix cache, a server that is killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, drive

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

LONG = 1200


@pytest.fixture(scope="module")
def paths(checkpoints: Path) -> tuple[Path, Path]:
    import tiny

    return tiny.make(checkpoints / "server-0", 0), tiny.make(checkpoints / "server-1", 1)


@pytest.fixture(scope="module")
def fresh(paths: tuple[Path, Path]) -> tuple[Any, Any]:
    """What fresh engines in this process answer on both checkpoints."""
    import rig

    plain: dict[str, Any] = {"weight_transfer_config": None, "worker_extension_cls": "", "max_model_len": 1536}
    return tuple(rig.generate(rig.engine(path, **plain), together=False) for path in paths)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def server(paths: tuple[Path, Path], checkpoints: Path) -> Iterator[Server]:
    made = Server(paths[0], checkpoints / "server.log")
    yield made
    made.kill()


def test_a_server_follows_the_bus_and_forgets_cached_prefixes(server: Server, paths: Any, fresh: Any) -> None:
    import rig

    assert server.generate() == fresh[0]
    again = server.generate()  # the long prompt comes from the prefix cache now, which shows in the last bits
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in fresh[0]]
    with rig.Trainer("local", 1) as trainer, drive(trainer.address, server) as driver:
        for version, which in ((1, 1), (2, 0)):
            trainer.post(paths[which], version)
            driver.drive(timeout=120)
            assert trainer.said()["engines"] == {"e0": f"READY({version})"}
            assert server.generate() == fresh[which]
            assert server.get("/weight_info") == {"weight_version": str(version)}
            assert server.get("/is_paused") == {"is_paused": False}


def test_a_request_in_flight_goes_on_with_the_new_weights(server: Server, paths: Any, fresh: Any) -> None:
    import rig

    prompt = rig.PROMPTS[0]
    with rig.Trainer("local", 1) as trainer, drive(trainer.address, server, pause="keep") as driver:
        trainer.post(paths[0], 3)  # the server is at 2
        driver.drive(timeout=120)
        trainer.said()
        alone: list[int] = []
        server.stream(prompt, LONG, alone)
        tokens: list[int] = []
        request = threading.Thread(target=server.stream, args=(prompt, LONG, tokens), daemon=True)
        request.start()
        while len(tokens) < 5:
            time.sleep(0.005)
        trainer.post(paths[1], 4)
        driver.drive(timeout=120)
        assert trainer.said()["engines"] == {"e0": "READY(4)"}
        request.join(120)
    assert len(tokens) == LONG  # it was not cut
    cut = next((i for i in range(LONG) if tokens[i] != alone[i]), LONG)
    assert 5 <= cut < LONG  # the old model's tokens, until the new weights came while it ran
    after = min(50, LONG - cut)
    assert server.complete(prompt + tokens[:cut], after)[0] == tokens[cut : cut + after]  # then the new model's
    assert server.generate() == fresh[1]


def test_a_killed_server_is_dead_and_its_successor_is_fed(paths: Any, fresh: Any, checkpoints: Path) -> None:
    import rig

    from weightbus import WeightBusError

    first = Server(paths[0], checkpoints / "killed.log")
    try:
        with rig.Trainer("local", 1, stall_timeout=15.0) as trainer:
            with drive(trainer.address, first) as driver:
                trainer.post(paths[1], 1, hold_after=10, hold_s=6.0)
                threading.Timer(3.0, first.kill).start()
                with pytest.raises(WeightBusError):
                    driver.drive(timeout=120)
                answer = trainer.said()
            assert answer["error"] == "PartialRefitError"
            assert not answer["engines"]["e0"].startswith("READY(1)")
            second = Server(paths[0], checkpoints / "successor.log")
            try:
                with drive(trainer.address, second) as driver:
                    trainer.post(paths[1], 1)
                    driver.drive(timeout=120)
                    assert trainer.said()["engines"] == {"e0": "READY(1)"}
                    assert second.generate() == fresh[1]
            finally:
                second.kill()
    finally:
        first.kill()
