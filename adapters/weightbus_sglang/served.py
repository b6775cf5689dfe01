"""The served checkpoint: which names, shapes and dtypes the engine takes, and how other layouts are cut into them.

The server answers success to a name that it does not know, and dies of a shape that does not fit. So everything is
compared with the files it was started on, before anything is posted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from weightbus.adapter import Batch, Fault, GroupRule, GroupRules
from weightbus.errors import ConfigError
from weightbus.manifest import Manifest, TensorSpec, dtype_name

Shape = tuple[int, ...]
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip
_MAX_HEADER_BYTES = 256 << 20
_FUSED = re.compile(r"(.+\.)(qkv_proj|gate_up_proj)(\.[^.]+)")
_FUSED_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_STACKED = re.compile(r"(.+\.experts\.)(gate_up_proj|down_proj)(?:\.weight)?")
_STACKED_PARTS = {  # names of an expert's parts in the two families of checkpoints
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.")
_DERIVED = re.compile(r".*rotary_emb\.(inv_freq|cos_cached|sin_cached|cos_sin_cache)")
_A_PROJ = r"(.*\.)(?:q_a_proj|kv_a_proj_with_mqa)\..*"
_SCALED = r"((?:(?!q_a_proj|kv_a_proj_with_mqa).)*)\.weight(?:_scale|_scale_inv)?"
_SCALE_SUFFIXES = (".weight_scale", ".weight_scale_inv")


@attrs.frozen
class Cut:
    """One served tensor inside an offered one: ``offered[expert][start:stop]``, parts of it None for all."""

    name: str
    expert: int | None = None
    start: int | None = None
    stop: int | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of `tensor`."""
        if self.expert is not None:
            tensor = tensor[self.expert]
        return tensor if self.start is None else tensor[self.start : self.stop]

    def shape(self, offered: Shape) -> Shape:
        """What `of` would have of a tensor of shape `offered`."""
        if self.expert is not None:
            offered = offered[1:]
        if self.start is None or self.stop is None:
            return offered
        return (self.stop - self.start, *offered[1:])


@attrs.frozen(kw_only=True)
class Served:
    """A checkpoint folder, by its headers.

    Attributes:
        tensors: name to shape and dtype.
        tied: the output head is the embedding.
        quantisation: the checkpoint's own scheme, or empty.
        experts: prefix of a layer's experts to their number.
    """

    tensors: Mapping[str, tuple[Shape, str]]
    tied: bool = False
    quantisation: str = ""
    experts: Mapping[str, int] = attrs.field(init=False)

    @experts.default
    def _count_experts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for name in self.tensors:
            if match := _EXPERT.match(name):
                counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
        return counts

    @classmethod
    def read(cls, folder: str) -> Served:
        """Read ``config.json`` and the safetensors headers in `folder`; no weights.

        Raises:
            ConfigError: not a readable checkpoint folder.
        """
        path = Path(folder)
        try:
            config = json.loads((path / "config.json").read_text())
            tensors = {name: entry for file in _files(path) for name, entry in _header(file)}
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise ConfigError(
                f"the served checkpoint {folder!r} cannot be read: {type(exc).__name__}: {exc}",
                advice="give model_path, a folder on this host with the served config.json and safetensors files",
            ) from exc
        text = config.get("text_config") or {}
        tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
        scheme = config.get("quantization_config") or {}
        return cls(tensors=tensors, tied=tied, quantisation=str(scheme.get("quant_method", "")))

    def cuts(self, name: str, shape: Shape) -> tuple[Cut, ...] | None:
        """How the offered tensor `name` becomes served ones: () for what the engine derives itself, None if unknown."""
        if name in self.tensors:
            return () if self._derived(name) else (Cut(name),)
        if self._derived(name):
            return ()
        if match := _STACKED.fullmatch(name):
            return self._stacked(match, shape)
        if match := _FUSED.fullmatch(name):
            parts = [f"{match[1]}{part}{match[3]}" for part in _FUSED_PARTS[match[2]]]
            return self._rows(parts, None)
        return None

    def _derived(self, name: str) -> bool:
        return (self.tied and name == "lm_head.weight") or ("rotary" in name and _DERIVED.fullmatch(name) is not None)

    def _stacked(self, match: re.Match[str], shape: Shape) -> tuple[Cut, ...] | None:
        count = self.experts.get(match[1], 0)
        for family in _STACKED_PARTS[match[2]]:
            if f"{match[1]}0.{family[0]}.weight" in self.tensors and shape[:1] == (count,):
                cuts = (
                    self._rows([f"{match[1]}{expert}.{part}.weight" for part in family], expert)
                    for expert in range(count)
                )
                return tuple(cut for part in cuts for cut in part or ())
        return None

    def _rows(self, names: Sequence[str], expert: int | None) -> tuple[Cut, ...] | None:
        """Cuts of a tensor whose first dimension is that of `names`, one after the other."""
        if any(name not in self.tensors or not self.tensors[name][0] for name in names):
            return None
        if len(names) == 1:
            return (Cut(names[0], expert),)
        cuts, start = [], 0
        for name in names:
            stop = start + self.tensors[name][0][0]
            cuts.append(Cut(name, expert, start, stop))
            start = stop
        return tuple(cuts)

    def check(self, manifest: Manifest, *, partial: bool, where: str = "") -> list[Fault]:
        """Every reason why the engine could not take `manifest`."""
        faults: list[Fault] = []
        seen: dict[str, str] = {}
        for spec in manifest:
            for name in spec.names:
                faults += self._check_tensor(name, spec, seen)
        if not len(manifest):
            faults.append(Fault("missing", "", "the manifest is empty"))
        elif not partial:
            absent = (name for name in self.tensors if name not in seen and not self._derived(name))
            faults += [Fault("missing", name, "is in the served checkpoint") for name in absent]
        else:
            faults += [Fault("group", name, "weight and scale change together") for name in self._half_groups(seen)]
        return [attrs.evolve(fault, detail=f"{fault.detail}{where}") for fault in faults] if where else faults

    def _check_tensor(self, name: str, spec: TensorSpec, seen: dict[str, str]) -> Iterator[Fault]:
        cuts = self.cuts(name, spec.shape)
        if cuts is None:
            yield Fault("unexpected", name, "is not in the served checkpoint")
            return
        for cut in cuts:
            shape, dtype = self.tensors[cut.name]
            if cut.name in seen:
                yield Fault("duplicate", cut.name, f"comes from {seen[cut.name]!r} and from {name!r}")
            seen[cut.name] = name
            if cut.shape(spec.shape) != shape:
                yield Fault("shape", name, f"is {spec.shape}, of which {cut.name} needs {shape}")
            if spec.dtype != dtype:
                yield Fault("dtype", name, f"is {spec.dtype}, served {cut.name} is {dtype}")
        if cuts and (rows := cuts[-1].stop) is not None:
            offered = spec.shape if cuts[-1].expert is None else spec.shape[1:]
            if offered[:1] != (rows,):
                yield Fault("shape", name, f"is {spec.shape}, its parts need {rows} rows")

    def _half_groups(self, seen: Mapping[str, str]) -> Iterator[str]:
        for name in self.tensors:
            for suffix in _SCALE_SUFFIXES:
                if name.endswith(suffix) and (name in seen) != (name.removesuffix(suffix) + ".weight" in seen):
                    yield name

    def expand(self, batch: Batch) -> list[tuple[str, torch.Tensor]]:
        """What to post of `batch`, as views.

        Raises:
            ValueError: a tensor that `check` would have refused: it came unchecked, as in a paged stream in place.
        """
        wanted: list[tuple[str, torch.Tensor]] = []
        for name, tensor in batch:
            offered = tuple(tensor.shape)
            cuts = self.cuts(name, offered)
            if cuts is None:
                raise ValueError(f"{name!r} is not in the served checkpoint")
            for cut in cuts:
                shape, dtype = self.tensors[cut.name]
                if cut.shape(offered) != shape or dtype_name(tensor.dtype) != dtype:
                    raise ValueError(f"{name!r} is {offered} {tensor.dtype}, served {cut.name!r} is {shape} {dtype}")
                wanted.append((cut.name, cut.of(tensor)))
        return wanted

    def skipped(self, names: Iterable[str]) -> tuple[str, ...]:
        """Which of `names` the engine derives itself."""
        return tuple(name for name in names if self._derived(name))

    def rules(self) -> GroupRules:
        """Names that the engine's loaders keep only within one call."""
        rules = []
        if any("kv_a_proj_with_mqa" in name for name in self.tensors):
            rules.append(GroupRule(_A_PROJ, r"\1a_proj"))
        if any(name.endswith(_SCALE_SUFFIXES) for name in self.tensors):
            rules.append(GroupRule(_SCALED, r"\1"))
        return GroupRules(together=rules)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not files:
        raise ValueError("no safetensors files")
    return files


def _header(file: Path) -> Iterator[tuple[str, tuple[Shape, str]]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(_MAX_HEADER_BYTES, file.stat().st_size):
            raise ValueError(f"{file.name} has no safetensors header")
        header: dict[str, Any] = json.loads(stream.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, (tuple(entry["shape"]), _DTYPES.get(entry["dtype"], str(entry["dtype"])))
