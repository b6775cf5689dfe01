"""Engines, prompts and orders of the real tests."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.engines.peer import Peer, leave_nothing
from weightbus.adapter import Refit
from weightbus.deadline import Deadline
from weightbus.errors import EngineError
from weightbus_vllm import VllmAdapter

PROMPTS = [
    [1, 5, 9, 77, 300],
    [1, *((i * 37) % 500 + 4 for i in range(70))],  # longer than two blocks of 32: the prefix cache has it
]
TOKENS = 12
Output = list[tuple[list[int], list[float]]]

_alive: list[Any] = []  # vLLM tears down the process groups of all engines of a process when one is collected


def engine(path: Path, **options: Any) -> Any:
    """An `LLM` on the checkpoint at `path`, with the file bus as its weight-transfer engine unless told otherwise."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": True,
        "worker_extension_cls": "fileengine.Extension",
        "weight_transfer_config": {"backend": "weightbus_file"},
    }
    leave_nothing()
    llm = LLM(model=str(path), **{**settings, **options})
    _alive.append(llm)
    return llm


def generate(llm: Any, *, together: bool = True) -> Output:
    """Greedy tokens and their logprobs, to be compared with ``==``; prompts of one batch share its last bits."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    batches = [prompts] if together else [[prompt] for prompt in prompts]
    done = [answer for batch in batches for answer in llm.generate(batch, sampling, use_tqdm=False)]
    first = [request.outputs[0] for request in done]
    return [(list(o.token_ids), [at[t].logprob for t, at in zip(o.token_ids, o.logprobs, strict=True)]) for o in first]


def stop(llm: Any) -> None:
    """End the processes of a multiprocess engine."""
    llm.llm_engine.engine_core.shutdown()


class Refits:
    """Drives one engine through refits in the order that core keeps.

    Args:
        folder: where the file bus finds its orders.
        options: of `VllmAdapter`.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._order = folder / "order.json"
        adapter = VllmAdapter(join={"address": str(folder), "engine": "e0"}, **options)
        self.driver = adapter.driver()
        self._ranks = adapter.world_size
        self.version = 0

    def order(self, path: Path, **order: Any) -> None:
        for outcome in self._folder.glob("outcome-*"):
            outcome.unlink()
        self._order.write_text(json.dumps({"path": str(path), **order}))

    def _loaded(self, deadline: Deadline) -> None:
        """Wait for every rank's outcome, as core does."""
        while len(outcomes := list(self._folder.glob("outcome-*"))) < self._ranks:
            self.driver.poll()
            if deadline.expired:
                raise EngineError("the ranks did not load in time")
            time.sleep(0.02)
        time.sleep(0.02)  # a file is there before its text
        failed = [text for text in (path.read_text() for path in outcomes) if text != "loaded"]
        if failed:
            raise EngineError("; ".join(failed))

    def run(self, path: Path, timeout_s: float = 60.0, **order: Any) -> int:
        """One refit that must go through; returns its version."""
        deadline = Deadline.after(timeout_s)
        self.order(path, **order)
        self.version += 1
        self.driver.begin(Refit(refit_id=f"r{self.version}", version=self.version, tensors=1), deadline)
        self._loaded(deadline)
        self.driver.finish(self.version, deadline)
        self.driver.resume(deadline)
        return self.version

    def fail(self, path: Path, *, loaded: bool, timeout_s: float = 60.0, **order: Any) -> EngineError:
        """One refit that must fail; with `loaded` the engine stays paused, else it serves again."""
        try:
            self.run(path, timeout_s, **order)
        except EngineError as exc:
            return exc if exc.dead else self._undo(exc, loaded)
        raise AssertionError("the refit went through")

    def _undo(self, error: EngineError, loaded: bool) -> EngineError:
        """The error of the refit, or that of its undo if it says that the engine is dead."""
        try:
            self.driver.abort(str(error), loaded=loaded, resume=not loaded, deadline=Deadline.after(60))
        except EngineError as worse:
            if worse.dead:
                return worse
            raise
        return error

    def heal(self, path: Path) -> int:
        """A full refit of an engine that a failed one left dirty."""
        self.driver.heal(Deadline.after(60))
        return self.run(path)


class Trainer(Peer):
    """`trainer.py` in a process of its own; a context manager."""

    def __init__(self, backend: str, receivers: int, **options: Any) -> None:
        program = str(Path(__file__).with_name("trainer.py"))
        super().__init__(sys.executable, program, backend, str(receivers), json.dumps(options))
        self.address: str = self.said()["address"]

    def post(self, path: Path, version: int, **order: Any) -> None:
        """Start to send; `said` waits for the end."""
        self.tell(path=str(path), version=version, **order)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
