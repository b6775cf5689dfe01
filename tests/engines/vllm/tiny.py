"""Tiny random checkpoints with a tokenizer, made on the spot: seed 0 is the old model, seed 1 the new one."""

from __future__ import annotations

from pathlib import Path

import torch

COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "initializer_range": 0.2,  # peaked logits: with 0.02 near-ties flip the argmax and token tests lie
}


def make(folder: Path, seed: int, kind: str = "llama", *, tied: bool = False) -> Path:
    """Write a float32 checkpoint of `kind` into `folder` unless it is there.

    Args:
        kind: llama, qwen2, qwen3, qwen3moe, or llama-wide (62 MB). vLLM on CPU wants a head size of 32.
    """
    import transformers as tf

    if (folder / "tokenizer.json").exists():
        return folder
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    build = {
        "llama-wide": lambda c: tf.LlamaForCausalLM(tf.LlamaConfig(**{**c, **heads, **wide})),
        "llama": lambda c: tf.LlamaForCausalLM(tf.LlamaConfig(**c, **heads)),
        "qwen2": lambda c: tf.Qwen2ForCausalLM(tf.Qwen2Config(**c, num_attention_heads=2, num_key_value_heads=1)),
        "qwen3": lambda c: tf.Qwen3ForCausalLM(tf.Qwen3Config(**c, **heads)),
        "qwen3moe": lambda c: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**c, **heads, **experts)),
    }[kind]
    torch.manual_seed(seed)
    model = build({**COMMON, "tie_word_embeddings": tied})
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", ".bias")):  # else equal in every seed, and a skipped one would not show
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> object:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "<pad>", *(f"w{i}" for i in range(508))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors in the order of its layers; a tied head under its own name too."""
    import json

    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    if json.loads((folder / "config.json").read_text())["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return dict(sorted(tensors.items()))
