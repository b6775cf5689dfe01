"""The shapes that `weightbus bench` moves, made from public configurations, and memory to fill them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import xxhash
from torch import nn

from weightbus.digest import tensor_bytes_view
from weightbus.errors import ConfigError
from weightbus.manifest import TensorSpec

_SLAB_BYTES = 16 << 20
_TOUCHED = 64


def qwen3(*, hidden: int, layers: int, inner: int, heads: int, kv_heads: int, vocab: int) -> Iterator[TensorSpec]:
    """A dense Qwen3 of head size 128 in bf16, input and output embedding tied."""

    def weight(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(f"model.{name}.weight", shape, "bfloat16", kind="parameter")

    yield weight("embed_tokens", vocab, hidden)
    for i in range(layers):
        at = f"layers.{i}"
        yield weight(f"{at}.self_attn.q_proj", heads * 128, hidden)
        yield weight(f"{at}.self_attn.k_proj", kv_heads * 128, hidden)
        yield weight(f"{at}.self_attn.v_proj", kv_heads * 128, hidden)
        yield weight(f"{at}.self_attn.o_proj", hidden, heads * 128)
        yield weight(f"{at}.self_attn.q_norm", 128)
        yield weight(f"{at}.self_attn.k_norm", 128)
        yield weight(f"{at}.mlp.gate_proj", inner, hidden)
        yield weight(f"{at}.mlp.up_proj", inner, hidden)
        yield weight(f"{at}.mlp.down_proj", hidden, inner)
        yield weight(f"{at}.input_layernorm", hidden)
        yield weight(f"{at}.post_attention_layernorm", hidden)
    yield weight("norm", hidden)


def experts(*, layers: int, count: int, hidden: int, inner: int) -> Iterator[TensorSpec]:
    """Gate, up and down matrices of every expert in bf16, a tensor each."""
    for i in range(layers):
        for k in range(count):
            for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                at = f"model.layers.{i}.mlp.experts.{k}.{name}_proj.weight"
                yield TensorSpec(at, shape, "bfloat16", kind="parameter")


def tiny(count: int) -> Iterator[TensorSpec]:
    """Tensors of 64 bytes."""
    for i in range(count):
        yield TensorSpec(f"layers.{i // 100}.w{i % 100}", (16,), "float32", kind="parameter")


def minilm() -> Iterator[TensorSpec]:
    """The tensors of the trained sentence encoder."""
    from weightbus.cli.minilm import weights

    for name, tensor in weights().items():
        yield TensorSpec.of(name, tensor, kind="parameter")


#: name -> its tensors. qwen3-8b has no lm_head of its own; moe-18000 has the expert count of a 30B model (48 layers of
#: 128 experts) at a quarter of its width, so that two copies fit one GPU or a host of 16 GB.
MODELS: dict[str, Callable[[], Iterator[TensorSpec]]] = {
    "minilm": minilm,
    "qwen3-0.6b": lambda: qwen3(hidden=1024, layers=28, inner=3072, heads=16, kv_heads=8, vocab=151936),
    "qwen3-8b": lambda: qwen3(hidden=4096, layers=36, inner=12288, heads=32, kv_heads=8, vocab=151936),
    "moe-18000": lambda: experts(layers=48, count=128, hidden=512, inner=192),
    "tiny-20000": lambda: tiny(20_000),
    "tiny-200": lambda: tiny(200),
}


def specs_of(model: str) -> list[TensorSpec]:
    """The tensors of a model by name.

    Raises:
        ConfigError: no such model, or its package is not installed.
    """
    if model not in MODELS:
        raise ConfigError(f"no model {model!r}", advice=f"known: {', '.join(MODELS)}")
    return list(MODELS[model]())


def filled(specs: Sequence[TensorSpec], device: str, seed: int) -> dict[str, torch.Tensor]:
    """A tensor of its own for each spec, with bytes that depend on `seed` and on the place."""
    generator = torch.Generator().manual_seed(seed)
    slab = torch.randint(0, 256, (_SLAB_BYTES,), dtype=torch.uint8, generator=generator).to(device)
    tensors, at = {}, 0
    for spec in specs:
        tensor = torch.empty(spec.shape, dtype=spec.torch_dtype, device=device)
        flat, done = tensor.view(-1).view(torch.uint8), 0
        while done < spec.nbytes:
            step = min(spec.nbytes - done, _SLAB_BYTES - at)
            flat[done : done + step].copy_(slab[at : at + step])
            done, at = done + step, (at + step) % (_SLAB_BYTES - 4097) if at + step < _SLAB_BYTES else 0
        tensors[spec.name] = tensor
    return tensors


def touch(tensors: dict[str, torch.Tensor], version: int) -> None:
    """Change a few bytes in many tensors, so that each version differs."""
    names = list(tensors)
    for name in names[:: max(1, len(names) // _TOUCHED)]:
        tensors[name].view(-1).view(torch.uint8)[:1].fill_(version % 251)


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """A digest of names and bytes."""
    h = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        h.update(name.encode())
        h.update(tensor_bytes_view(tensor.detach().view(-1).view(torch.uint8).cpu()))
    return h.hexdigest()


def module_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module that has these tensors as parameters, under their dotted names."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def pieces(specs: Sequence[TensorSpec], limit_bytes: int) -> list[list[tuple[str, int, int, int]]]:
    """Cut the tensors into packs of at most `limit_bytes`: (name, first byte, offset in the pack, length)."""
    packs: list[list[tuple[str, int, int, int]]] = [[]]
    end = 0
    for spec in specs:
        done = 0
        while done < spec.nbytes:
            if end >= limit_bytes:
                packs.append([])
                end = 0
            step = min(spec.nbytes - done, limit_bytes - end)
            packs[-1].append((spec.name, done, end, step))
            done, end = done + step, end + step
    return packs
