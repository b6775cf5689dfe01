"""Tiny random models with a tokenizer, nothing downloaded: ``python models.py OUT KIND:SEED ...``.

Writes the checkpoint OUT/KIND-SEED, and OUT/KIND-SEED.trainer with the names under which a trainer holds the weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import launch  # first: without its shims transformers does not import here
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # a smaller one makes near-ties, and tokens then prove nothing
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama_64mib": (
        LlamaConfig,
        LlamaForCausalLM,
        {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 1,
        },
    ),
}


def build(kind: str, seed: int) -> torch.nn.Module:
    """The model in float32, as a trainer would hold it."""
    config, model, extra = KINDS[kind]
    torch.manual_seed(seed)
    built = model(config(**{**COMMON, **extra})).to(torch.float32)
    with torch.no_grad():  # biases and norms start equal for every seed: a stale one would not show
        for name, parameter in built.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05) if "norm" in name else parameter.normal_(0, 0.2)
    return built  # type: ignore[no-any-return]


def write_tokenizer(folder: Path) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    while len(vocabulary) < VOCABULARY:
        vocabulary[f"<extra_{len(vocabulary)}>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))


def main(out: Path, wanted: list[str]) -> None:
    for name in wanted:
        kind, seed = name.split(":")
        folder = out / f"{kind}-{seed}"
        model = build(kind, int(seed))
        model.save_pretrained(folder)
        save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, f"{folder}.trainer")
        write_tokenizer(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    sys.exit(0 if launch.TORCHVISION else 1)
