"""Writes verified tensors into the parameters and buffers of a module, in place."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from itertools import chain
from operator import attrgetter, eq, is_
from typing import Any, ClassVar

import attrs
import torch

from weightbus.adapter import Adapter, Batch, EngineDriver, EngineLoader, Fault, LoadResult, StepFreeDriver
from weightbus.errors import ConfigError, EngineError
from weightbus.manifest import Manifest, TensorSpec, dtype_name
from weightbus.names import clean, is_leftover
from weightbus.sources import module_tensors, tie_key

_log = logging.getLogger("weightbus.torch")

#: Below this, one `_foreach_copy_` over all tensors beats a copy each; above it a copy reaches a higher rate.
_FOREACH_BELOW_BYTES = 16 << 20
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


class TorchAdapter(Adapter):
    """Any module: parameters and buffers by their cleaned names (`weightbus.names.clean`).

    Values are copied into the storage that is there, strided and DTensor targets too (each rank keeps its shard of the
    full tensor, without communication); no storage is rebound. A tied tensor is written once. In a refit that fails
    after the first `load` some, all or none of the tensors hold new values.

    Args:
        module: what to update. Its parameters may be rebound between refits as long as names, shapes, dtypes and ties
            stay; non-persistent buffers are written when they come and not missed when they do not.
        cast: convert to the target's dtype where it differs; else that is a fault.
        strict: names missing here or there are faults, and so are two tensors for one tied target. False: unknown
            names are skipped and reported, absent ones keep their values, the last of two tensors wins.

    Raises:
        ConfigError: no module, or one without parameters and buffers, or with names that are equal once cleaned.
    """

    name: ClassVar[str] = "torch"

    def __init__(self, *, module: torch.nn.Module, cast: bool = False, strict: bool = True) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"module is {type(module).__name__}, not a torch.nn.Module", advice="into=model")
        self._loader = _Loader(module, cast=cast, strict=strict)

    @property
    def device(self) -> torch.device:
        """The device of the module's first tensor."""
        return self._loader.device

    def driver(self) -> EngineDriver:
        """A driver without steps: a module serves nobody by itself; the process that holds it does not use it now."""
        return StepFreeDriver()

    def loader(self, ranks: Sequence[int], device: torch.device | None) -> EngineLoader:
        """The loader of the one rank that this module is.

        Args:
            device: where the batches will be; anywhere, copies cross devices.

        Raises:
            ConfigError: more than one rank.
        """
        if len(ranks) != 1:
            raise ConfigError(f"one module serves one rank, not ranks {list(ranks)}", advice="one receiver per module")
        return self._loader


@attrs.frozen(eq=False)
class _Target:
    """One tensor of the module; `names` are all it goes by, `needed` says whether a full refit must bring it."""

    names: list[str]
    tensor: torch.Tensor
    needed: bool
    shape: torch.Size
    dtype: torch.dtype
    sharded: bool  # a DTensor

    @classmethod
    def of(cls, tensor: torch.Tensor, *, needed: bool) -> _Target:
        return cls([], tensor, needed, tensor.shape, tensor.dtype, hasattr(tensor, "full_tensor"))

    @property
    def says(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"

    def like(self, other: _Target) -> bool:
        """The same to the outside, whichever memory it is."""
        return (self.names, self.shape, self.dtype, self.sharded) == (
            other.names,
            other.shape,
            other.dtype,
            other.sharded,
        )

    def obstacle(self) -> str | None:
        """Why nothing can be written into it."""
        if self.tensor.device.type == "meta":
            return "is on the meta device: materialize the module first"
        if self.tensor.layout != torch.strided:
            return f"has layout {self.tensor.layout}, only strided tensors are written"
        overlapping = not self.sharded and any(
            step == 0 and size > 1 for size, step in zip(self.tensor.shape, self.tensor.stride(), strict=True)
        )
        return "is expanded: several of its elements share memory" if overlapping else None


@attrs.frozen(eq=False)
class _Targets:
    """The module as it was captured."""

    entries: _Entries
    originals: list[torch.Tensor]
    pointers: list[int]
    targets: list[_Target]
    by_name: dict[str, _Target]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Targets:
        originals: list[torch.Tensor] = []
        tied: dict[Hashable, _Target] = {}
        by_name: dict[str, _Target] = {}
        twice: list[str] = []
        for raw, tensor, kind in module_tensors(module):
            name = clean(raw)
            needed = kind != "nonpersistent" and not is_leftover(raw)
            target = tied.setdefault(tie_key(tensor), _Target.of(tensor, needed=needed))
            target.names.append(name)
            originals.append(tensor)
            if name in by_name:
                twice.append(name)
            by_name[name] = target
        if twice or not by_name:
            what = f"names that are equal once cleaned: {', '.join(twice)}" if twice else "no parameters and no buffers"
            raise ConfigError(f"the module has {what}")
        entries = _Entries.of(module)
        return cls(entries, originals, list(map(_pointer, originals)), list(tied.values()), by_name)

    def hold(self) -> bool:
        """Whether the module still has the very tensors that were captured, in the same memory."""
        return self.entries.hold() and all(map(eq, map(_pointer, self.originals), self.pointers))


@attrs.frozen(eq=False)
class _Entries:
    """All that a module is made of, compared without walking it: 18,000 experts are as many modules."""

    modules: list[torch.nn.Module]
    dicts: list[dict[str, Any]]
    keys: list[str]
    values: list[Any]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Entries:
        modules = list(module.modules())
        dicts = _dicts(modules)
        return cls(modules, dicts, list(chain.from_iterable(dicts)), list(chain.from_iterable(map(dict.values, dicts))))

    def hold(self) -> bool:
        if not all(map(is_, _dicts(self.modules), self.dicts)) or list(chain.from_iterable(self.dicts)) != self.keys:
            return False
        return all(map(is_, chain.from_iterable(map(dict.values, self.dicts)), self.values))


def _dicts(modules: Sequence[torch.nn.Module]) -> list[dict[str, Any]]:
    return [entries for one in modules for entries in (one._modules, one._parameters, one._buffers)]


def _pointer(tensor: torch.Tensor) -> int:
    return torch.Tensor.data_ptr(tensor) if tensor.layout is torch.strided else 0


@attrs.frozen(eq=False)
class _Writes:
    """How to apply one list of names with these shapes and dtypes; made at its first batch."""

    result: LoadResult
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    many: tuple[list[torch.Tensor], list[int]]  # small targets, and where in the batch their values are
    single: list[tuple[torch.Tensor, int]]
    sharded: list[tuple[torch.Tensor, int]]

    def fit(self, tensors: Sequence[torch.Tensor]) -> bool:
        return all(map(eq, map(_SHAPE, tensors), self.shapes)) and all(map(is_, map(_DTYPE, tensors), self.dtypes))


class _Loader(EngineLoader):
    def __init__(self, module: torch.nn.Module, *, cast: bool, strict: bool) -> None:
        self._module: torch.nn.Module | None = module
        self._cast, self._strict = cast, strict
        self._targets = _Targets.of(module)
        self._fresh = False
        self._checked: tuple[Manifest, bool, list[Fault]] | None = None  # the last question and its answer
        self._foreign: frozenset[str] = frozenset()  # names that are known here only by another name of their tensor
        self._writes: dict[tuple[str, ...], _Writes] = {}
        self._resident: tuple[Manifest, list[torch.Tensor], list[torch.Tensor]] | None = None

    @property
    def device(self) -> torch.device:
        return self._targets.originals[0].device

    def check(self, manifests: Sequence[Manifest], *, partial: bool) -> list[Fault]:
        (manifest,) = manifests
        self._fresh = False
        if self._checked is None or self._checked[0] is not manifest or self._checked[1] is not partial:
            brought_by: dict[int, TensorSpec] = {}
            faults = self._faults(manifest, partial, brought_by)
            self._note(manifest, brought_by)
            self._checked = (manifest, partial, faults)
        return list(self._checked[2])

    def _faults(self, manifest: Manifest, partial: bool, brought_by: dict[int, TensorSpec]) -> list[Fault]:
        """All faults; fills `brought_by` with the spec that brings each target."""
        faults: list[Fault] = []
        for spec in manifest.tensors:
            known = [name for name in spec.names if name in self._targets.by_name]
            if not known and self._strict:
                faults.append(Fault("unexpected", spec.name, f"{spec.dtype} {list(spec.shape)}; the module lacks it"))
            for name in known:
                target = self._targets.by_name[name]
                first = brought_by.setdefault(id(target), spec)
                if first is not spec and self._strict:
                    detail = f"and {first.name!r} are one tensor here, two in the offer"
                    faults.append(Fault("duplicate", name, detail))
                faults += self._compare(name, spec, target)
        if self._strict and not partial:
            faults += [
                Fault("missing", target.names[0], f"the module has it as {target.says}")
                for target in self._targets.targets
                if target.needed and id(target) not in brought_by
            ]
        return faults

    def _note(self, manifest: Manifest, brought_by: dict[int, TensorSpec]) -> None:
        """Names that only one side has for a tensor both have."""
        by_name = self._targets.by_name
        tied = [spec for spec in manifest.tensors if spec.aliases and any(name in by_name for name in spec.names)]
        self._foreign = frozenset(name for spec in tied for name in spec.names if name not in by_name)
        self._writes.clear()
        offered = {name for spec in manifest.tensors for name in spec.names}
        for target in self._targets.targets:
            own = [name for name in target.names if name not in offered]
            if own and id(target) in brought_by:
                _log.info("tied in the module only: %s follows %s", ", ".join(own), brought_by[id(target)].name)

    def _compare(self, name: str, spec: TensorSpec, target: _Target) -> list[Fault]:
        faults: list[Fault] = []
        if target.shape != spec.shape:
            faults.append(Fault("shape", name, f"expected {list(target.shape)}, offered {list(spec.shape)}"))
        if target.dtype != spec.torch_dtype:
            lossy = spec.torch_dtype.is_complex and not target.dtype.is_complex
            if lossy or not self._cast:
                expected = dtype_name(target.dtype)
                hint = "would drop the imaginary part" if lossy else "cast=True converts"
                faults.append(Fault("dtype", name, f"expected {expected}, offered {spec.dtype}; {hint}"))
        obstacle = target.obstacle()
        return [*faults, Fault("engine", name, obstacle)] if obstacle else faults

    def load(self, batches: Sequence[Batch]) -> LoadResult:
        if self._module is None:
            raise EngineError("the torch adapter is closed", phase="stream")
        (batch,) = batches
        if not batch:
            return LoadResult()
        if not self._fresh:
            self._refresh(self._module)
        names: tuple[str, ...]
        tensors: tuple[torch.Tensor, ...]
        names, tensors = zip(*batch, strict=True)
        writes = self._writes.get(names)
        if writes is None or not writes.fit(tensors):
            writes = self._writes[names] = self._plan(names, tensors)
        try:
            with torch.no_grad():
                _apply(writes, tensors)
        except RuntimeError as exc:
            raise EngineError(
                f"copying into the module failed between {names[0]!r} and {names[-1]!r}: {exc}", phase="stream"
            ) from exc
        return writes.result

    def resident(self, manifest: Manifest) -> list[torch.Tensor] | None:
        """The module's own memory, where every tensor is contiguous, unsharded and known by one target."""
        if self._module is None:
            return None
        if not self._fresh:
            self._refresh(self._module)
        if self._resident is None or self._resident[0] is not manifest:
            found = self._find_resident(manifest)
            self._resident = (manifest, found, [tensor.detach() for tensor in found])
        _, tensors, plain = self._resident
        return plain if tensors and all(map(torch.Tensor.is_contiguous, tensors)) else None

    def _find_resident(self, manifest: Manifest) -> list[torch.Tensor]:
        """The one target of each spec; empty where some spec cannot be written as it travels."""
        by_name, found = self._targets.by_name, []
        for spec in manifest.tensors:
            target = by_name.get(spec.name)
            if target is None or any(by_name.get(name) is not target for name in spec.aliases):
                known = [by_name[name] for name in spec.names if name in by_name]
                target = known[0] if known and all(one is known[0] for one in known) else None
            if target is None or target.sharded or target.shape != spec.shape or target.dtype != spec.torch_dtype:
                return []
            if target.tensor.is_conj() or target.tensor.is_neg():
                return []
            found.append(target.tensor)
        return found

    def close(self) -> None:
        self._module = self._resident = None
        self._writes.clear()

    def _refresh(self, module: torch.nn.Module) -> None:
        """Before the first write of a refit: parameters may have been rebound since the last."""
        old = self._targets
        if not old.hold():
            new = _Targets.of(module)
            changed = [a.names[0] for a, b in zip(old.targets, new.targets, strict=False) if not a.like(b)]
            if changed or len(old.targets) != len(new.targets):
                raise EngineError(
                    f"the module has changed since the adapter was made: {', '.join(changed) or 'other tensors'}",
                    phase="stream",
                    advice="make a new receiver for it; an FSDP module must be resharded before it receives",
                )
            self._targets, self._checked, self._resident = new, None, None
            self._writes.clear()
        self._fresh = True

    def _plan(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> _Writes:
        """Decide where each tensor goes. What was not checked before (a paged stream) is checked here."""
        at: dict[int, int] = {}  # target -> the last place in the batch that brings it
        skipped: list[str] = []
        for place, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
            target = self._targets.by_name.get(name)
            if target is not None:
                at[id(target)] = place
                faults = self._compare(name, TensorSpec.of(name, tensor), target)
                if faults:
                    raise EngineError(f"a tensor does not fit: {faults[0]}", tensor=name, phase="stream")
            elif self._strict and name not in self._foreign:
                raise EngineError("a tensor came that the module lacks", tensor=name, phase="stream")
            else:
                skipped.append(name)
        left_out = set(skipped)
        writes = _Writes(
            LoadResult(applied=[name for name in names if name not in left_out], skipped=skipped),
            [tensor.shape for tensor in tensors],
            [tensor.dtype for tensor in tensors],
            ([], []),
            [],
            [],
        )
        for place in sorted(at.values()):
            target = self._targets.by_name[names[place]]
            # half the cost of a parameter, and writable even if made in inference mode
            plain = target.tensor.detach()
            if target.sharded:
                writes.sharded.append((plain, place))
            elif tensors[place].nbytes >= _FOREACH_BELOW_BYTES:
                writes.single.append((plain, place))
            else:
                writes.many[0].append(plain)
                writes.many[1].append(place)
        return writes


def _apply(writes: _Writes, tensors: Sequence[torch.Tensor]) -> None:
    targets, places = writes.many
    if targets:
        values = list(tensors) if len(places) == len(tensors) else [tensors[place] for place in places]
        torch._foreach_copy_(targets, values)
    for target, place in writes.single:
        target.copy_(tensors[place])
    for target, place in writes.sharded:
        _write_shard(target, tensors[place])


def _write_shard(target: Any, whole: torch.Tensor) -> None:
    """Copy this rank's part of `whole` into a DTensor; every rank has all of it, so nothing is communicated."""
    from torch.distributed.tensor import distribute_tensor  # slow to import, and here only if somebody has

    part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(part.to_local())
