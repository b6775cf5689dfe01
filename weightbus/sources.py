"""What a sender sends: a module, a mapping, or an iterable of ``(name, tensor)``, as manifest and stream from ONE list.

A manifest is read from metadata: nothing is gathered, copied or iterated before `Source.iterate`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, ItemsView, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, eq, is_
from typing import Any

import attrs
import torch

from weightbus.errors import ConfigError, LocalProtocolError, SourceError
from weightbus.manifest import DTYPES, Manifest, TensorSpec, dtype_name
from weightbus.names import clean, is_leftover

Cast = tuple[tuple[re.Pattern[str], torch.dtype], ...]
_Row = tuple[str, tuple[int, ...], str, tuple[str, ...], str]  # what a TensorSpec is made of
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


class Source(ABC):
    """One source of one send: used once, in the caller's thread.

    Attributes:
        manifest: what will be yielded; None for a bare iterable, which must be paged.
        reorderable: `iterate` accepts a permutation of `manifest` (module, mapping).
        started: the first tensor was asked for: from here on collectives may be under way.
        leftovers: names left out because a trainer holds them, not an engine (merged LoRA factors, PEFT's originals).
        errors: what went wrong in `drain`.
    """

    manifest: Manifest | None = None
    reorderable: bool = False
    leftovers: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.started = False
        self.errors: list[Exception] = []

    def resident(self, manifest: Manifest) -> list[torch.Tensor] | None:
        """The tensor of each spec, where all are there and lie in memory as they travel: contiguous, with nothing to
        gather or cast. None: iterate. Nothing is started, so nothing has to be drained."""
        return None

    @abstractmethod
    def iterate(self, manifest: Manifest) -> Iterator[torch.Tensor]:
        """Yield the tensor of each spec, in order, detached; strides are the source's own.

        A DTensor is gathered when its turn comes: a collective, so all ranks must be asked in one order. A tensor is
        valid until the next is asked for. That an iterable yields too much shows only at the end: exhaust it before
        the last bucket goes.

        Args:
            manifest: `self.manifest`, or a permutation of it where `reorderable`.

        Raises:
            SourceError: from the iterator: the source raised, or did not yield what the manifest says.
        """

    def iterate_paged(self) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Yield what comes, with its spec. Only where `manifest` is None; else as `iterate`."""
        raise LocalProtocolError("this source has a manifest: iterate it, do not page it")

    @abstractmethod
    def drain(self) -> None:
        """Consume what an open iteration has left, so that collectives stay matched on all ranks; its errors go to
        `errors`. Nothing happens where no iteration was opened, or it has ended."""


class SourceCache:
    """What one bus remembers of modules and mappings: a source that has not changed is only compared, not read again.

    It holds names, shapes and addresses, never tensors.
    """

    def __init__(self) -> None:
        self.catalogs: dict[bool, _Catalog] = {}  # by partial
        self.order: tuple[Manifest, Manifest, list[int]] | None = None  # of one, in terms of the other


def open_source(
    source: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    *,
    manifest: Manifest | Sequence[TensorSpec] | None = None,
    remembered: Manifest | None = None,
    partial: bool = False,
    cast: Mapping[str, torch.dtype] | None = None,
    buffers: str = "persistent",
    cache: SourceCache | None = None,
) -> Source:
    """Read the metadata of `source`. Names are cleaned of wrappers (`names.clean`); tied tensors become aliases.

    Args:
        source: a module (parameters and persistent buffers), a mapping, or an iterable of pairs. Lists of pairs and
            ``dict.items()`` are read at once; other iterables need `manifest` or `remembered`, or are paged.
        manifest: what the caller says will come. For a module or mapping: names to select, with `partial`; else it must
            name everything, and its order is taken.
        remembered: the manifest of the previous send; a bare iterable is checked against it, unless `partial`.
        partial: only some names change.
        cast: regular expression (whole name) to dtype on the wire; the first match applies.
        buffers: ``"persistent"``, or ``"all"`` for non-persistent ones too.
        cache: kept by the bus between sends.

    Raises:
        SourceError: no tensors, duplicate names, tensors that cannot travel, a manifest that does not fit: all faults.
        ConfigError: a wrong argument.
    """
    if buffers not in ("persistent", "all"):
        raise ConfigError(f"buffers={buffers!r}; known: 'persistent', 'all'")
    casts = _parse_cast(cast)
    given = _given(manifest)
    columns = _columns(source, nonpersistent=buffers == "all" or given is not None)
    if columns is None:
        if isinstance(source, (str, bytes, torch.Tensor, Mapping)) or not isinstance(source, Iterable):
            raise ConfigError(
                f"{type(source).__name__} is no source", advice="send a Module, a mapping or (name, tensor) pairs"
            )
        expected = given or (None if partial else remembered)
        _check_casts(casts, expected, partial)
        return _Stream(source, expected, casts)
    request = _Request(casts, buffers, partial, given)
    merged = _merged_layers(source) if isinstance(source, torch.nn.Module) else frozenset()
    resident = _Resident(columns, request, merged, cache or SourceCache())
    resident.reorderable = isinstance(source, (torch.nn.Module, Mapping))
    return resident


def _parse_cast(cast: Mapping[str, torch.dtype] | None) -> Cast:
    found: list[tuple[re.Pattern[str], torch.dtype]] = []
    for pattern, dtype in (cast or {}).items():
        if not isinstance(dtype, torch.dtype) or dtype_name(dtype) not in DTYPES:
            raise ConfigError(f"cast {pattern!r}: {dtype!r} is no dtype that can travel", advice=", ".join(DTYPES))
        try:
            found.append((re.compile(pattern), dtype))
        except (re.error, TypeError) as exc:
            raise ConfigError(f"cast {pattern!r} is no regular expression: {exc}") from exc
    return tuple(found)


def _check_casts(casts: Cast, manifest: Manifest | None, partial: bool) -> None:
    if manifest is None or partial:
        return
    idle = [p.pattern for p, _ in casts if not any(p.fullmatch(name) for spec in manifest for name in spec.names)]
    if idle:
        raise ConfigError(f"cast: {', '.join(map(repr, idle))} matches no name", advice="patterns match whole names")


def _given(manifest: Manifest | Sequence[TensorSpec] | None) -> Manifest | None:
    if manifest is None:
        return None
    try:
        whole = manifest if isinstance(manifest, Manifest) else Manifest(tuple(manifest))
        if not len(whole):
            raise SourceError("the manifest names no tensors", phase="offer")
        if all(clean(name) == name for spec in whole.tensors for name in spec.names):
            return whole
        return Manifest(
            tuple(attrs.evolve(s, name=clean(s.name), aliases=tuple(map(clean, s.aliases))) for s in whole.tensors)
        )
    except (ValueError, TypeError, AttributeError) as exc:
        raise ConfigError(f"manifest: {exc}", advice="a Manifest or a list of TensorSpec with unique names") from exc


# ---- metadata


@attrs.frozen(eq=False)
class _Columns:
    """Raw names, tensors (not checked yet) and kinds of all that a source holds. Columns: rows would feed the gc."""

    names: list[str]
    tensors: list[Any]
    kinds: list[str]


def _columns(source: object, *, nonpersistent: bool) -> _Columns | None:
    """What `source` holds; None where only iterating would tell."""
    if isinstance(source, torch.nn.Module):
        return _module_columns(source, nonpersistent)
    if isinstance(source, Mapping):
        return _Columns(list(source), list(source.values()), ["tensor"] * len(source))
    if isinstance(source, (list, tuple, ItemsView)):
        pairs = [_pair(item, index) for index, item in enumerate(source)]
        return _Columns([name for name, _ in pairs], [tensor for _, tensor in pairs], ["tensor"] * len(pairs))
    return None


def module_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Name (as the module spells it), tensor and kind of every parameter and buffer, tied ones under each name."""
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter, "parameter"
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield prefix + name, buffer, "nonpersistent" if name in owner._non_persistent_buffers_set else "buffer"


def tie_key(tensor: torch.Tensor) -> Hashable:
    """Equal for one tensor under two names: same memory, same view.

    A DTensor goes by identity: its local shard may be empty on one rank and not on another, and all must agree.
    """
    has_memory = tensor.numel() and tensor.layout is torch.strided and not tensor.is_meta
    if hasattr(tensor, "full_tensor") or not has_memory:
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _module_columns(module: torch.nn.Module, nonpersistent: bool) -> _Columns:
    columns = _Columns([], [], [])
    for name, tensor, kind in module_tensors(module):
        if nonpersistent or kind != "nonpersistent":
            columns.names.append(name)
            columns.tensors.append(tensor)
            columns.kinds.append(kind)
    return columns


def _merged_layers(module: torch.nn.Module) -> frozenset[str]:
    """Paths of adapter layers (PEFT) whose factors are merged into the base weight just now."""
    return frozenset(path for path, layer in module.named_modules() if getattr(layer, "merged", False) is True)


def _pair(item: object, index: int) -> tuple[str, torch.Tensor]:
    if (
        isinstance(item, (tuple, list))
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], torch.Tensor)
    ):
        return item[0], item[1]
    raise SourceError(f"item {index} of the source is {type(item).__name__}, not a pair (name, tensor)", phase="export")


def _refusal(name: object, tensor: object) -> str | None:
    """Why an entry cannot travel."""
    if not isinstance(name, str):
        return f"{name!r}: a name is a text, not {type(name).__name__}"
    if not isinstance(tensor, torch.Tensor):
        return f"{name!r} is {type(tensor).__name__}, not a tensor"
    if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "full_tensor"):
        return f"{name!r} is a {type(tensor).__name__}: send its inner tensors, or dequantize it"
    if tensor.layout != torch.strided:
        return f"{name!r} has layout {tensor.layout}, only strided tensors travel"
    if tensor.device.type == "meta":
        return f"{name!r} is on the meta device: it has no values"
    if dtype_name(tensor.dtype) not in DTYPES:
        return f"{name!r} has dtype {tensor.dtype}, which cannot travel"
    return None


def _wire_dtype(name: str, dtype: torch.dtype, casts: Cast) -> torch.dtype:
    for pattern, to in casts:
        if pattern.fullmatch(name):
            if dtype.is_complex and not to.is_complex:
                raise SourceError(f"cast would drop the imaginary part of {name!r}", tensor=name, phase="export")
            return to
    return dtype


@attrs.frozen
class _Request:
    casts: Cast
    buffers: str
    partial: bool
    given: Manifest | None


@attrs.frozen(eq=False)
class _Facts:
    """All on which a catalog rests."""

    names: list[str]
    kinds: list[str]
    types: list[type]
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    pointers: list[int]

    @classmethod
    def of(cls, columns: _Columns) -> _Facts:
        read = (type, _SHAPE, _DTYPE, torch.Tensor.data_ptr)
        return cls(columns.names, columns.kinds, *(list(map(one, columns.tensors)) for one in read))

    def hold(self, columns: _Columns) -> bool:
        """Whether they are still so; new memory is noted, where nothing was or is tied.

        No object is kept on the way: 20,000 live ones more would wake the garbage collector.
        """
        tensors = columns.tensors
        if columns.names != self.names or columns.kinds != self.kinds:
            return False
        if not all(map(is_, map(type, tensors), self.types)):
            return False
        try:
            pointers = list(map(torch.Tensor.data_ptr, tensors))
        except (RuntimeError, NotImplementedError):  # a tensor without an address, such as a sparse one
            return False
        if pointers != self.pointers and not (_all_apart(pointers) and _all_apart(self.pointers)):
            return False
        if not all(map(is_, map(_DTYPE, tensors), self.dtypes)) or not all(map(eq, map(_SHAPE, tensors), self.shapes)):
            return False
        self.pointers[:] = pointers
        return True


def _all_apart(pointers: list[int]) -> bool:
    """Every tensor has an address (it is strided, with values) of its own (nothing is tied)."""
    return 0 not in pointers and len(set(pointers)) == len(pointers)


@attrs.frozen(eq=False)
class _Catalog:
    """What was found in a module or mapping."""

    request: _Request
    merged: frozenset[str]
    facts: _Facts
    manifest: Manifest
    rows: list[_Row]
    picks: list[int]
    leftovers: tuple[str, ...]
    plain: bool  # nothing is gathered and nothing is cast


class _Survey:
    """Reads entries into rows of a manifest, with every fault on the way."""

    def __init__(self, request: _Request, merged: frozenset[str]) -> None:
        self._request, self._merged = request, merged
        self.faults: list[str] = []
        self.leftovers: list[str] = []
        self.rows: list[_Row] = []
        self.picks: list[int] = []
        self._raw_of: dict[str, str] = {}
        self._tied: dict[tuple[Hashable, str], int] = {}  # what a row stands for, to its position

    def read(self, columns: _Columns) -> None:
        rows = zip(columns.names, columns.tensors, columns.kinds, strict=True)
        for index, (raw, tensor, kind) in enumerate(rows):
            refusal = _refusal(raw, tensor)
            name = raw if refusal else clean(raw)
            if self._request.given is None and not refusal and self._set_aside(raw):
                continue
            if refusal is None and name in self._raw_of:
                refusal = f"{name!r} comes twice, as {self._raw_of[name]!r} and {raw!r}"
            if refusal:
                self.faults.append(refusal)
                continue
            self._raw_of[name] = raw
            self._add(index, name, tensor, kind)
        if not self.rows and not self.faults:
            self.faults.append(f"the source has no tensors{' but leftovers' if self.leftovers else ''}")
        if self._request.given is not None:
            self._select(self._request.given)

    def _set_aside(self, raw: str) -> bool:
        if not is_leftover(raw):
            return False
        layer = re.split(r"\.?lora_", raw, maxsplit=1)[0]
        if "original_module" in raw.split(".") or layer in self._merged:
            self.leftovers.append(raw)
        elif "_flat_param" in raw:
            self.faults.append(f"{raw!r} is an FSDP1 flat shard: use fully_shard (FSDP2) or send a state_dict")
        else:
            self.faults.append(f"{raw!r} is an adapter that is not merged: merge it, or name what to send in manifest=")
        return True

    def _add(self, index: int, name: str, tensor: torch.Tensor, kind: str) -> None:
        try:
            dtype = dtype_name(_wire_dtype(name, tensor.dtype, self._request.casts))
        except SourceError as exc:
            self.faults.append(exc.what)
            return
        position = self._tied.setdefault((tie_key(tensor), dtype), len(self.rows))
        if position < len(self.rows):
            row = self.rows[position]
            self.rows[position] = (*row[:3], (*row[3], name), row[4])
        else:
            self.rows.append((name, tuple(tensor.shape), dtype, (), kind))
            self.picks.append(index)

    def _select(self, given: Manifest) -> None:
        """Keep what `given` names, in its order, with all aliases: a tied weight changes under all its names."""
        at = {name: position for position, row in enumerate(self.rows) for name in (row[0], *row[3])}
        chosen: dict[int, None] = {}
        for spec in given.tensors:
            positions = {at.get(name, -1) for name in spec.names}
            for name in spec.names:
                if name not in at:
                    self.faults.append(f"{name!r} is in the manifest, not in the source")
            if len(positions) > 1 and -1 not in positions:
                self.faults.append(f"{' and '.join(map(repr, spec.names))} are one in the manifest, not in the source")
            for position in positions - {-1}:
                row = self.rows[position]
                if (row[1], row[2]) != (spec.shape, spec.dtype):
                    self.faults.append(
                        f"{spec.name!r} is {row[2]} {list(row[1])}, the manifest says {spec.dtype} {list(spec.shape)}"
                    )
                chosen[position] = None
        if not self._request.partial:
            self.faults += [
                f"{row[0]!r} is not in the manifest (partial=True sends a part)"
                for position, row in enumerate(self.rows)
                if position not in chosen and not self._optional(row)
            ]
        self.rows, self.picks = [self.rows[p] for p in chosen], [self.picks[p] for p in chosen]

    def _optional(self, row: _Row) -> bool:
        return is_leftover(self._raw_of[row[0]]) or (row[4] == "nonpersistent" and self._request.buffers != "all")


# ---- modules and mappings


class _Resident(Source):
    """Tensors that are all there: a module's, a mapping's, a list's."""

    def __init__(self, columns: _Columns, request: _Request, merged: frozenset[str], cache: SourceCache) -> None:
        super().__init__()
        self._tensors: list[torch.Tensor] = columns.tensors
        self._cache = cache
        self._rest: Iterator[tuple[TensorSpec, int]] | None = None
        known = cache.catalogs.get(request.partial)
        if known is None or (known.request, known.merged) != (request, merged) or not known.facts.hold(columns):
            known = cache.catalogs[request.partial] = _read(columns, request, merged, known)
        self._catalog = known
        self.manifest = known.manifest
        self.leftovers = known.leftovers

    def resident(self, manifest: Manifest) -> list[torch.Tensor] | None:
        if not self._catalog.plain:
            return None
        tensors = list(map(self._tensors.__getitem__, self._order(manifest)))
        lies = all(map(torch.Tensor.is_contiguous, tensors))
        lazy = any(map(torch.Tensor.is_conj, tensors)) or any(map(torch.Tensor.is_neg, tensors))
        return tensors if lies and not lazy else None

    def iterate(self, manifest: Manifest) -> Iterator[torch.Tensor]:
        if self._rest is not None:
            raise LocalProtocolError("a source is iterated once")
        self._rest = zip(manifest.tensors, self._order(manifest), strict=True)
        return self._walk(self._rest)

    def _walk(self, rest: Iterator[tuple[TensorSpec, int]]) -> Iterator[torch.Tensor]:
        tensors, plain = self._tensors, _PLAIN
        self.started = True
        for spec, index in rest:
            tensor = tensors[index]
            if type(tensor) not in plain:
                tensor = _gathered(spec.name, tensor)
            if tensor.requires_grad:
                tensor = tensor.detach()
            if tensor.dtype is not DTYPES[spec.dtype]:
                tensor = self._cast(spec, tensor)
            if tensor.shape != spec.shape:
                raise _mismatch(spec, spec.name, tensor)
            yield tensor

    def _cast(self, spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
        if _wire_dtype(spec.name, tensor.dtype, self._catalog.request.casts) is not spec.torch_dtype:
            raise _mismatch(spec, spec.name, tensor)
        return tensor.to(spec.torch_dtype)

    def _order(self, manifest: Manifest) -> list[int]:
        own, picks = self._catalog.manifest, self._catalog.picks
        if manifest is own or manifest == own:
            return picks
        order = self._cache.order
        if order is None or order[0] is not own or order[1] is not manifest:
            specs = {spec.name: (spec, pick) for spec, pick in zip(own.tensors, picks, strict=True)}
            found = [specs.get(spec.name) for spec in manifest.tensors]
            if len(found) != len(own) or not self.reorderable:
                raise SourceError("asked for other tensors than the source's manifest has", phase="export")
            for spec, entry in zip(manifest.tensors, found, strict=True):
                if entry is None or entry[0] != spec:
                    raise SourceError(f"asked for {spec}, the source has {entry and entry[0]}", phase="export")
            order = self._cache.order = (own, manifest, [entry[1] for entry in found if entry])
        return order[2]

    def drain(self) -> None:
        for spec, index in self._rest or ():
            if type(self._tensors[index]) not in _PLAIN:
                try:
                    _gathered(spec.name, self._tensors[index])
                except SourceError as exc:
                    self.errors.append(exc)


def _read(columns: _Columns, request: _Request, merged: frozenset[str], before: _Catalog | None) -> _Catalog:
    survey = _Survey(request, merged)
    survey.read(columns)
    if survey.faults:
        raise SourceError(f"the source cannot be sent: {'; '.join(survey.faults)}", phase="offer")
    if before is not None and before.rows == survey.rows:  # new memory, same tensors: whoever knows it sees the same
        manifest = before.manifest
    else:
        try:
            manifest = Manifest(tuple(TensorSpec(*row) for row in survey.rows))
        except ValueError as exc:
            raise SourceError(f"the source cannot be sent: {exc}", phase="offer") from exc
    _check_casts(request.casts, manifest, request.partial)
    facts = _Facts.of(columns)
    plain = _PLAIN.issuperset(facts.types[i] for i in survey.picks)
    plain = plain and [facts.dtypes[i] for i in survey.picks] == [DTYPES[row[2]] for row in survey.rows]
    return _Catalog(request, merged, facts, manifest, survey.rows, survey.picks, tuple(survey.leftovers), plain)


def _gathered(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, on every rank of its mesh (a collective); any other tensor as it is."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    try:
        with torch.no_grad():
            return tensor.detach().full_tensor()  # type: ignore[no-any-return,attr-defined]
    except Exception as exc:
        raise SourceError(
            f"gathering failed: {type(exc).__name__}: {exc}",
            tensor=name,
            phase="export",
            advice="every rank of the tensor's mesh must send the same version at the same time",
        ) from exc


def _mismatch(spec: TensorSpec, name: str, tensor: torch.Tensor) -> SourceError:
    return SourceError(
        f"the source yields {name!r}, {dtype_name(tensor.dtype)} {list(tensor.shape)}, where the manifest says "
        f"{spec.name!r}, {spec.dtype} {list(spec.shape)}",
        tensor=spec.name,
        phase="export",
        advice="yield in the manifest's order, or pass the manifest of what you yield",
    )


# ---- iterables


class _Stream(Source):
    """Tensors that only iterating brings forth."""

    def __init__(self, source: Iterable[tuple[str, torch.Tensor]], manifest: Manifest | None, casts: Cast) -> None:
        super().__init__()
        self.manifest = manifest
        self._source, self._casts = source, casts
        self._rest: Iterator[object] | None = None
        self._count = 0

    def iterate(self, manifest: Manifest) -> Iterator[torch.Tensor]:
        if self.manifest is None or (manifest is not self.manifest and manifest != self.manifest):
            raise LocalProtocolError("an iterable is iterated by its own manifest, or paged")
        self._open()
        return self._walk(manifest)

    def iterate_paged(self) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        if self.manifest is not None:
            return super().iterate_paged()
        self._open()
        return self._walk_paged()

    def drain(self) -> None:
        while self._rest is not None:
            try:
                self._next()
            except SourceError as exc:
                self.errors.append(exc)

    def _open(self) -> None:
        if self._rest is not None or self._count:
            raise LocalProtocolError("a source is iterated once")
        try:
            self._rest = iter(self._source)
        except Exception as exc:
            raise SourceError(f"the source raised {type(exc).__name__}: {exc}", phase="export") from exc

    def _walk(self, manifest: Manifest) -> Iterator[torch.Tensor]:
        for spec in manifest.tensors:
            item = self._next()
            if item is None:
                raise SourceError(
                    f"the source ended after {self._count} of {len(manifest)} tensors; {spec.name!r} should come next",
                    tensor=spec.name,
                    phase="export",
                )
            name, tensor = item
            if name != spec.name or tensor.shape != spec.shape or tensor.dtype is not spec.torch_dtype:
                raise _mismatch(spec, name, tensor)
            yield tensor
        item = self._next()
        if item is not None:
            raise SourceError(
                f"the source yields {item[0]!r} after all {len(manifest)} tensors of its manifest",
                tensor=item[0],
                phase="export",
            )

    def _walk_paged(self) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        seen: set[str] = set()
        while (item := self._next()) is not None:
            name, tensor = item
            if name in seen:
                raise SourceError(f"the source yields {name!r} twice", tensor=name, phase="export")
            if is_leftover(name):
                raise SourceError(f"{name!r} is a trainer's own: merge it or leave it out", tensor=name, phase="export")
            seen.add(name)
            try:
                spec = TensorSpec.of(name, tensor)
            except ValueError as exc:
                raise SourceError(f"the source yields {name[:64]!r}: {exc}", phase="export") from exc
            yield spec, tensor
        if not seen:
            raise SourceError("the source has no tensors", phase="export")

    def _next(self) -> tuple[str, torch.Tensor] | None:
        """The next item, named and gathered; None at the end. A SourceError about one item leaves the rest to come."""
        if self._rest is None:
            return None
        self.started = True
        try:
            item = next(self._rest)
        except StopIteration:
            self._rest = None
            self._count = self._count or -1
            return None
        except Exception as exc:
            self._rest = None
            raise SourceError(
                f"the source raised {type(exc).__name__} after {self._count} tensors: {exc}", phase="export"
            ) from exc
        index, self._count = self._count, self._count + 1
        raw, tensor = _pair(item, index)
        whole = _gathered(raw, tensor)
        refusal = _refusal(raw, whole)
        if refusal:
            raise SourceError(f"the source cannot be sent: {refusal}", phase="export")
        name = clean(raw)
        return name, whole.detach().to(_wire_dtype(name, whole.dtype, self._casts))
