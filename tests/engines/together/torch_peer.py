"""The torch module of the test in a process of its own: ``python -m tests.engines.together.torch_peer ADDRESS MODEL``.

Speaks JSON lines: says when it has joined; ``{"do": "refit"}`` takes one version, ``{"do": "generate"}`` answers the
prompts; ends when its input does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from tests.engines.vllm.rig import PROMPTS, TOKENS, Output
from weightbus import WeightBus


def load(checkpoint: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(model: Any) -> Output:
    """Tokens and their log-probabilities by the module's own forward, without a cache."""
    answers = []
    for prompt in PROMPTS:
        tokens, logprobs = list(prompt), []
        for _ in range(TOKENS):
            scores = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)
            tokens.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
        answers.append((tokens[len(prompt) :], logprobs))
    return answers


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main(address: str, checkpoint: str) -> None:
    model = load(Path(checkpoint))
    with WeightBus.receiver(address, engine="torch", adapter="torch", adapter_options={"module": model}) as bus:
        say(joined=True)
        for line in sys.stdin:
            if json.loads(line)["do"] == "refit":
                bus.recv(timeout=120)
                say(version=str(bus.version))
            else:
                say(outputs=greedy(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
