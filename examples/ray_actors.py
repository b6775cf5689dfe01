"""Ray actors on both sides: synchronous, the address passed by Ray, an engine killed and restarted between refits.

    python examples/ray_actors.py

A bus lives in its actor as an ordinary attribute: no class of weightbus has coroutines, so the actors stay synchronous.
On several hosts bind the node's address and set WEIGHTBUS_TOKEN in the runtime environment: docs/multi-node.md.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import ray
import torch
from torch import nn

import weightbus


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


@ray.remote(num_cpus=0.1)
class Trainer:
    """Holds the model that is trained, and the sender's end."""

    def __init__(self, engines: int) -> None:
        torch.manual_seed(0)
        self.model = make_model()
        self.bus = weightbus.WeightBus.sender("tcp://127.0.0.1:0", receivers=engines)

    def address(self) -> str:
        return self.bus.address

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.5)

    def publish(self, version: int) -> dict[str, str]:
        """Blocks until every engine has reported; a version sent again feeds only engines that lack it."""
        return self.bus.send(self.model, version=version, timeout=120).outcomes

    def answer(self) -> float:
        with torch.no_grad():
            return float(self.model(torch.ones(1, 32)).sum())


@ray.remote(num_cpus=0.1, max_restarts=1)
class Engine:
    """Holds the model that answers, and the receiver's end."""

    def __init__(self, name: str, address: str) -> None:
        self.model = make_model()
        options = {"module": self.model}
        self.bus = weightbus.WeightBus.receiver(address, engine=name, adapter="torch", adapter_options=options)

    def refit(self) -> int:
        """Take the next version."""
        version: int = self.bus.recv(timeout=120).version
        return version

    def answer(self) -> float:
        with torch.no_grad():
            return float(self.model(torch.ones(1, 32)).sum())

    def pid(self) -> int:
        return os.getpid()


def main() -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    runtime = {"env_vars": {"PYTHONPATH": paths}}  # only for a checkout: an installed weightbus needs none
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=runtime)
    try:
        trainer: Any = Trainer.remote(2)  # type: ignore[attr-defined]
        address = ray.get(trainer.address.remote())
        engines = [Engine.remote(name, address) for name in ("e0", "e1")]  # type: ignore[attr-defined]
        refit(trainer, engines, 1, engines)

        killed = ray.get(engines[1].pid.remote())
        ray.kill(engines[1], no_restart=False)
        print(f"killed e1 (pid {killed}); Ray has started it again as pid {restarted(engines[1], killed)}")
        refit(trainer, engines, 1, engines[1:])  # the same version: only the newcomer takes it
        ray.get(trainer.step.remote())
        refit(trainer, engines, 2, engines)
    finally:
        ray.shutdown()


def restarted(actor: Any, killed: int) -> int:
    """The process that Ray has put in the place of `killed`, once it answers."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            pid: int = ray.get(actor.pid.remote())
        except ray.exceptions.RayActorError:  # being restarted
            pid = killed
        if pid != killed:
            return pid
        time.sleep(0.1)
    raise TimeoutError("Ray has not restarted the actor")


def refit(trainer: Any, engines: list[Any], version: int, lacking: list[Any]) -> None:
    """Send `version`; the engines that lack it receive at the same time."""
    receiving = [engine.refit.remote() for engine in lacking]
    outcomes = ray.get(trainer.publish.remote(version))
    ray.get(receiving)
    answers = ray.get([actor.answer.remote() for actor in (trainer, *engines)])
    print(f"version {version}: {outcomes}, answers equal: {len(set(answers)) == 1}")


if __name__ == "__main__":
    main()
