"""What one worker's model takes from a checkpoint, found out with the model's own loaders on the meta device.

A twin of the model is made once: the same modules, their parameters as they were before vLLM processed them, without
memory. Loading a manifest of meta tensors into the twin shows, before anything is touched, which names the model
does not know, which shapes its loaders refuse, and which modules would be left with a part of their elements.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from weightbus.adapter import Fault
from weightbus.manifest import Manifest, TensorSpec, dtype_name

MAX_FAULTS = 64


@attrs.define(eq=False)
class _Slot:
    """One parameter or buffer of the twin."""

    path: str
    module: torch.nn.Module
    tensor: torch.Tensor
    required: int  #: elements a complete checkpoint brings; 0 for what no checkpoint must bring
    dtypes: frozenset[torch.dtype]
    shares: frozenset[int]  #: how many times more elements a tensor may have than this rank keeps of it
    loaded: int = 0


@attrs.define(eq=False)
class _Module:
    path: str
    slots: list[_Slot]
    held_bytes: int = 0  #: vLLM holds whole, uncut tensors of a module until it is complete


@attrs.frozen(kw_only=True)
class Verdict:
    """What loading a manifest would do.

    Attributes:
        faults: every reason to refuse it.
        skipped: names that this rank legitimately does not hold.
        largest: the module for which vLLM would hold most.
        held_bytes: how much that is: whole, uncut tensors until the module is complete.
    """

    faults: tuple[Fault, ...] = ()
    skipped: frozenset[str] = frozenset()
    largest: str = ""
    held_bytes: int = 0


class Layout:
    """The twin of one worker's model.

    Args:
        model: the worker's model, loaded.
        optional: regular expressions of engine parameter names that no checkpoint brings.
        cast: regular expressions of checkpoint names whose dtype may differ from the engine's.
        tensor_parallel: the engine's TP size.
        free_bytes: memory that a reload may take, asked at each probe; None: not bounded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        optional: Sequence[str] = (),
        cast: Sequence[str] = (),
        tensor_parallel: int = 1,
        free_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._optional = [re.compile(pattern) for pattern in optional]
        self._cast = [re.compile(pattern) for pattern in cast]
        self._tensor_parallel = tensor_parallel
        self._free_bytes = free_bytes
        self._packed: dict[str, list[str]] = dict(getattr(model, "packed_modules_mapping", None) or {})
        self._counting = True
        self._depth = 0
        self._name: str | None = None
        self._touched: set[str] = set()
        self._faults: list[Fault] = []
        self._twin: Any = _twin_of(model, {})
        self._modules = [m for path, module in self._twin.named_modules() if (m := self._watch(path, module)).slots]
        self._verdicts: dict[tuple[int, bool], Verdict] = {}

    def probe(self, manifest: Manifest, *, partial: bool) -> Verdict:
        """Load `manifest` into the twin. Touches no memory of the model; remembers its last answers."""
        key = (manifest.digest(), partial)
        if key not in self._verdicts:
            if len(self._verdicts) >= 4:
                self._verdicts.clear()
            self._verdicts[key] = self._probe(manifest, partial)
        verdict = self._verdicts[key]
        free = self._free_bytes()
        if free is None or verdict.held_bytes <= free:
            return verdict
        detail = f"vLLM holds the module's {verdict.held_bytes} bytes until it is complete; {free} are free"
        return attrs.evolve(verdict, faults=(*verdict.faults, Fault("memory", verdict.largest, detail)))

    def _probe(self, manifest: Manifest, partial: bool) -> Verdict:
        self._faults, self._touched, self._name = [], set(), None
        for module in self._modules:
            module.held_bytes = 0
            for slot in module.slots:
                slot.loaded = 0
        items = [(name, spec) for spec in manifest for name in spec.names]
        with torch.no_grad():
            self._feed(items)
            silent = [(name, spec) for name, spec in items if name not in self._touched]
            if silent and not self._faults:
                self._settle(silent)
        if not self._faults:
            self._coverage(partial)
        skipped = frozenset(name for name, _ in items if name not in self._touched)
        largest = max(self._modules, key=lambda module: module.held_bytes)
        return Verdict(
            faults=tuple(self._faults[:MAX_FAULTS]),
            skipped=skipped,
            largest=largest.path,
            held_bytes=largest.held_bytes,
        )

    def _feed(self, items: list[tuple[str, TensorSpec]]) -> None:
        """Load `items`; after a name that is refused, go on behind it, so that all faults are listed at once."""
        position = 0
        while position < len(items) and len(self._faults) < MAX_FAULTS:
            stream = _Stream(items[position:], self._enter)
            try:
                self._twin.load_weights(iter(stream))
            except Exception as exc:  # the model's own code: anything may come out of it
                name, spec = items[position + max(stream.taken - 1, 0)]
                self._faults.append(_refusal(name, spec, exc))
                position += max(stream.taken, 1)
            else:
                return

    def _settle(self, silent: list[tuple[str, TensorSpec]]) -> None:
        """Names that no loader was called for are skipped, unless the model gathers names before it loads them."""
        self._counting = False
        try:
            before = len(self._touched)
            self._feed(silent)
            if len(self._touched) > before:
                for item in silent:
                    self._feed([item])
        finally:
            self._counting = True
            self._faults.clear()  # a name alone may be refused where it was accepted among the others

    def _enter(self, name: str) -> None:
        self._name = name

    def _watch(self, path: str, module: torch.nn.Module) -> _Module:
        """Put a counting loader before the loader of every tensor of `module`."""
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        attention = isinstance(module, AttentionLayerBase)  # brings its own scales; a checkpoint need not
        tensors = {**module._parameters, **module._buffers}
        record = _Module(path, [])
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            full = f"{path}.{name}" if path else name
            free = attention or name in module._buffers or any(p.fullmatch(full) for p in self._optional)
            slot = _Slot(
                path=full,
                module=module,
                tensor=tensor,
                required=0 if free else _elements(module, tensor),
                dtypes=_dtypes(module, name, tensor),
                shares=_shares(module, self._tensor_parallel),
            )
            record.slots.append(slot)
            self._wrap(record, slot)
        return record

    def _wrap(self, module: _Module, slot: _Slot) -> None:
        from vllm.model_executor.model_loader.reload.meta import get_numel_loaded
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        original = getattr(slot.tensor, "weight_loader", default_weight_loader)
        while original.__name__ == "online_process_loader":  # vLLM leaves its wrapper there after a reload
            original = original.__wrapped__
        signature = inspect.signature(original)

        def counting(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self._depth += 1
            try:
                count, result = get_numel_loaded(original, bound)
            except RuntimeError as exc:
                if "meta tensor" not in str(exc):
                    raise
                count, result = min(_offered(bound).numel(), slot.tensor.numel()), None  # it looked at a scalar's value
            finally:
                self._depth -= 1
            if self._depth == 0:
                self._record(module, slot, _offered(bound), count)
            return result

        slot.tensor.weight_loader = counting  # type: ignore[attr-defined]

    def _record(self, module: _Module, slot: _Slot, offered: torch.Tensor, count: int) -> None:
        name = self._name or slot.path
        self._touched.add(name)
        if not self._counting:
            return
        slot.loaded += count
        module.held_bytes += offered.nbytes
        if offered.dtype not in slot.dtypes and not any(p.fullmatch(name) for p in self._cast):
            held = " or ".join(sorted(dtype_name(d) for d in slot.dtypes))
            self._fault("dtype", name, f"the engine holds {held}, offered {dtype_name(offered.dtype)}")
        if count and not _vocabulary(slot.module) and offered.numel() not in {count * n for n in slot.shares}:
            self._fault(
                "shape",
                name,
                f"{tuple(offered.shape)} has {offered.numel()} elements, {count} of them would be kept in {slot.path}",
            )

    def _fault(self, kind: str, name: str, detail: str) -> None:
        self._faults.append(Fault(kind, name, detail))

    def _coverage(self, partial: bool) -> None:
        """No module may get a part of its elements; without `partial` none may get nothing."""
        for module in self._modules:
            slots = [slot for slot in module.slots if slot.required]
            started = any(slot.loaded for slot in module.slots)
            for slot in slots:
                if slot.loaded > slot.required and slot.required > 16:  # tiny counters may come once per shard
                    self._fault("duplicate", slot.path, f"{slot.loaded} elements are sent for {slot.required}")
                elif slot.loaded < slot.required and started:
                    self._fault(
                        "group",
                        slot.path,
                        f"{slot.loaded} of {slot.required} elements are sent{self._parts(module.path)}; vLLM would "
                        "fill the rest of its module with undefined memory: send the module whole or not at all",
                    )
                elif not slot.loaded and not partial:
                    self._fault("missing", slot.path, f"nothing is sent for it{self._parts(module.path)}")

    def _parts(self, path: str) -> str:
        parts = self._packed.get(path.rpartition(".")[2])
        if path.endswith("lm_head"):
            return " (a tied head is sent under its own name too: on some platforms vLLM keeps a copy of it)"
        return f" (it is made of {', '.join(parts)})" if parts else ""


class _Stream:
    """Yields meta tensors and says how many were taken."""

    def __init__(self, items: list[tuple[str, TensorSpec]], enter: Callable[[str], None]) -> None:
        self._items = items
        self._enter = enter
        self.taken = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in self._items:
            self.taken += 1
            self._enter(name)
            yield name, torch.empty(spec.shape, dtype=spec.torch_dtype, device="meta")


def _twin_of(module: torch.nn.Module, memo: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """A module like `module` with meta tensors in load format; the original is only read."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    if id(module) in memo:
        return memo[id(module)]
    twin = module.__class__.__new__(module.__class__)
    memo[id(module)] = twin
    twin.__dict__.update(module.__dict__)
    parameters, buffers = get_layerwise_info(module).restore_metadata
    kept = {
        kind: {n: t for n, t in getattr(module, kind).items() if t is not None and n in SKIP_TENSORS}
        for kind in ("_parameters", "_buffers")
    }
    for kind, saved in (("_parameters", parameters), ("_buffers", buffers)):
        tensors = {**saved, **kept[kind]}
        twin.__dict__[kind] = {n: restore_layer_refs(to_meta_tensor(t), twin) for n, t in tensors.items()}
    twin.__dict__["_modules"] = {n: m and _twin_of(m, memo) for n, m in module._modules.items()}
    return twin


def _elements(module: torch.nn.Module, tensor: torch.Tensor) -> int:
    """Elements a checkpoint brings for this rank: without the padding that vLLM adds."""
    if _vocabulary(module) and tensor.dim():
        rows = int(module.shard_indices.num_org_elements)  # type: ignore[union-attr,arg-type]
        return rows * (tensor.numel() // tensor.shape[0])
    return int(getattr(tensor, "weight_loader_numel", tensor.numel()))


def _vocabulary(module: torch.nn.Module) -> bool:
    return hasattr(module, "shard_indices")


def _shares(module: torch.nn.Module, tensor_parallel: int) -> frozenset[int]:
    tp = int(getattr(module, "tp_size", None) or tensor_parallel)
    return frozenset({1, tp, tensor_parallel, tp // int(getattr(module, "num_kv_head_replicas", 1) or 1)})


def _dtypes(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> frozenset[torch.dtype]:
    """What may be loaded into `tensor`; a bias is known as processed only, so its module's float types count too."""
    if name != "bias":
        return frozenset({tensor.dtype})
    return frozenset({tensor.dtype, *(p.dtype for p in module._parameters.values() if p is not None)})


def _offered(bound: inspect.BoundArguments) -> torch.Tensor:
    """The tensor given to a weight loader, whose first argument is the parameter."""
    arguments = bound.arguments
    found = arguments.get("loaded_weight")
    if not isinstance(found, torch.Tensor):
        found = [value for value in arguments.values() if isinstance(value, torch.Tensor)][-1]
    return found


def _refusal(name: str, spec: TensorSpec, exc: Exception) -> Fault:
    text = " ".join(str(exc).split())[:200]
    if isinstance(exc, (ValueError, KeyError)) and not isinstance(exc, (AssertionError, RuntimeError)):
        unknown = "no module or parameter" in text or isinstance(exc, KeyError)
        if unknown:
            return Fault("unexpected", name, f"the model does not know it: {text}")
    return Fault("shape", name, f"the model's loader refuses {list(spec.shape)}: {type(exc).__name__} {text}".rstrip())
