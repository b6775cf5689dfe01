"""Names: wrapper prefixes taken off, a receiver's renames, and which names belong together. Pure functions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import attrs

from weightbus.adapter import Fault, GroupRule, GroupRules
from weightbus.errors import ConfigError
from weightbus.manifest import MAX_NAME_BYTES, Manifest, TensorSpec

#: Segments that torch.compile, FSDP, activation checkpointing and PEFT put into names, wherever they stand.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"})
_WRAPPED = re.compile(r"_orig_mod|_wrapped_module|base_layer|modules_to_save|^module\.|^base_model\.")
_LEADING = re.compile(r"^(?:module\.|base_model\.model\.)+(?=.)")
_LEFTOVER = re.compile(r"(?:^|\.)(?:lora_[^.]*|original_module|_flat_param(?:_\d+)?)(?:\.|$)")
_REFERENCE = re.compile(r"\\(?:(\d{1,2})|g<(\w+)>|(.))", re.DOTALL)


def clean(name: str) -> str:
    """`name` as the bare model spells it.

    Taken off: the segments of torch.compile, FSDP, activation checkpointing and PEFT's ``base_layer`` wherever they
    stand, leading ``module.`` (DDP) and ``base_model.model.`` (PEFT), and PEFT's ``modules_to_save.default``.
    """
    if not _WRAPPED.search(name):
        return name
    kept: list[str] = []
    segments = iter(name.split("."))
    for segment in segments:
        if segment == "modules_to_save":
            next(segments, None)  # the adapter's name
        elif segment not in _WRAPPERS:
            kept.append(segment)
    return _LEADING.sub("", ".".join(kept)) or name


def is_leftover(name: str) -> bool:
    """Whether a name is a trainer's by-product that no engine holds: LoRA factors, PEFT's originals, flat shards."""
    return _LEFTOVER.search(name) is not None


_Expand = Callable[[re.Match[str]], str]


@lru_cache(maxsize=512)
def _compile(pattern: str, template: str) -> tuple[re.Pattern[str], _Expand]:
    """The compiled pattern and what expands a match of it. `re` itself parses a template anew for each match."""
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError, RecursionError) as exc:
        raise ConfigError(f"pattern {pattern!r} is no regular expression: {exc}") from exc
    text, groups = _template(compiled, template)
    if not groups:
        return compiled, lambda match: text % ()
    if len(groups) == 1:
        return compiled, lambda match: text % (match.group(groups[0]) or "")
    return compiled, lambda match: text % tuple([part or "" for part in match.group(*groups)])


def _template(pattern: re.Pattern[str], template: str) -> tuple[str, tuple[int, ...]]:
    """`template` as a text for the operator %, and the groups to fill in."""
    text, groups, end = "", [], 0
    for found in _REFERENCE.finditer(template):
        text += template[end : found.start()].replace("%", "%%")
        end = found.end()
        reference = found[1] or found[2]
        if reference is None and found[3] != "\\":
            raise ConfigError(f"template {template!r}: unknown escape {found[0]}")
        if reference is None:
            text += "\\"
            continue
        number = int(reference) if reference.isdecimal() else pattern.groupindex.get(reference, -1)
        if not 0 <= number <= pattern.groups:
            raise ConfigError(f"template {template!r}: pattern {pattern.pattern!r} has no group {reference}")
        text += "%s"
        groups.append(number)
    return text + template[end:].replace("%", "%%"), tuple(groups)


@attrs.frozen
class NameRule:
    r"""Names that match `pattern` as a whole become `replacement`.

    Attributes:
        pattern: a regular expression.
        replacement: its expansion, such as ``r"model.\1"``; ``\1``, ``\g<1>``, ``\g<name>`` and ``\\`` are understood.

    Raises:
        ConfigError: not a regular expression, or a reference to a group it lacks.
    """

    pattern: str
    replacement: str = attrs.field()

    @replacement.validator
    def _compiles(self, _: attrs.Attribute[str], value: str) -> None:
        _compile(self.pattern, value)


def parse_rules(names: Mapping[str, str] | Sequence[NameRule | tuple[str, str]] | None) -> tuple[NameRule, ...]:
    """Rename rules as the user writes them: pattern to replacement, first match first.

    Raises:
        ConfigError: lists every rule that is wrong.
    """
    pairs: Iterable[object] = names.items() if isinstance(names, Mapping) else names or ()
    rules: list[NameRule] = []
    faults: list[str] = []
    for item in pairs:
        if isinstance(item, NameRule):
            rules.append(item)
            continue
        if not isinstance(item, (tuple, list)) or len(item) != 2 or not all(isinstance(text, str) for text in item):
            faults.append(f"{item!r} is no pair of pattern and replacement")
            continue
        try:
            rules.append(NameRule(item[0], item[1]))
        except ConfigError as exc:
            faults.append(exc.what)
    if faults:
        raise ConfigError(f"name rules: {'; '.join(faults)}", advice="write names={r'model\\.(.*)': r'\\1'}")
    return tuple(rules)


def rename(manifest: Manifest, rules: Sequence[NameRule]) -> tuple[Manifest, list[Fault]]:
    """The manifest under the receiver's names; order, shapes and dtypes stay.

    Returns:
        The renamed manifest and no faults; or `manifest` itself and one fault of kind ``rename`` for every new name
        that two old names would share or that is no name. The last answer is kept: asking again costs nothing.
    """
    if not rules:
        return manifest, []
    table = _Renamer.of(tuple(rules))
    if table.last is None or table.last[0] is not manifest:
        table.last = (manifest, *_rename(manifest, table))
    return table.last[1], list(table.last[2])


def _rename(manifest: Manifest, table: _Renamer) -> tuple[Manifest, list[Fault]]:
    olds = [name for spec in manifest.tensors for name in spec.names]
    news = table.new_names(olds)
    faults = [Fault("rename", old, f"becomes {new[:64]!r}, which is no name") for old, new in _bad(olds, news)]
    if len(set(news)) < len(news):
        owners: dict[str, list[str]] = defaultdict(list)
        for old, new in zip(olds, news, strict=True):
            owners[new].append(old)
        faults += [
            Fault("rename", new, f"is the new name of {' and '.join(map(repr, same))}; rules must keep names apart")
            for new, same in owners.items()
            if len(same) > 1
        ]
    if faults:
        return manifest, faults
    names = iter(news)
    specs = []
    for spec in manifest.tensors:
        name, *aliases = [next(names) for _ in spec.names]
        specs.append(TensorSpec(name, spec.shape, spec.dtype, aliases, spec.kind))
    return Manifest(specs), []


def _bad(olds: Sequence[str], news: Sequence[str]) -> list[tuple[str, str]]:
    return [(old, new) for old, new in zip(olds, news, strict=True) if not 0 < len(new.encode()) <= MAX_NAME_BYTES]


@attrs.frozen
class Grouping:
    """What belongs together, over all members.

    Attributes:
        order: a permutation of the manifest's indices: the order in which to send.
        groups: groups of at least two indices into the ORIGINAL manifest, each ascending, by first index.
    """

    order: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def grouping(
    manifest: Manifest, members: Sequence[tuple[GroupRules, tuple[NameRule, ...]]], *, reorder: bool
) -> Grouping:
    """The union of all members' group and order rules over `manifest`.

    Args:
        manifest: the sender's names. Rules see each member's renamed names, aliases included.
        members: group rules and rename rules of each member; equal ones cost once.
        reorder: whether the source can yield in another order. True: groups are contiguous in `order`, names of one
            `adjacent` key are too (as far as keys are nested), else by first occurrence. False: the identity.
    """
    distinct = tuple(dict.fromkeys(members))
    if _last_grouping and _last_grouping[0][0] is manifest and _last_grouping[0][1:3] == (distinct, reorder):
        return _last_grouping[0][3]
    listings = {renames: _Listing.of(manifest, renames) for renames in {renames for _, renames in distinct}}
    together = [same for rules, renames in distinct for same in listings[renames].sharing(rules.together)]
    groups = _joined(len(manifest), together)
    order = tuple(range(len(manifest)))
    if reorder:
        adjacent = [same for rules, renames in distinct for same in listings[renames].sharing(rules.adjacent)]
        order = _arrange(len(manifest), [*groups, *sorted(adjacent, key=len)])
    answer = Grouping(order, groups)
    _last_grouping[:] = [(manifest, distinct, reorder, answer)]
    return answer


#: The last question and its answer: a steady sender asks the same again.
_last_grouping: list[tuple[Manifest, tuple[tuple[GroupRules, tuple[NameRule, ...]], ...], bool, Grouping]] = []


@attrs.frozen
class _Listing:
    """All names of a manifest as one receiver spells them, and the tensor each belongs to."""

    names: list[str]
    owners: list[int]

    @classmethod
    def of(cls, manifest: Manifest, renames: tuple[NameRule, ...]) -> _Listing:
        names = [name for spec in manifest.tensors for name in spec.names]
        owners = [index for index, spec in enumerate(manifest.tensors) for _ in spec.names]
        return cls(_Renamer.of(renames).new_names(names) if renames else names, owners)

    def sharing(self, rules: Sequence[GroupRule]) -> list[list[int]]:
        """Lists of at least two tensors that share a key of `rules`."""
        by_key: dict[str, list[int]] = defaultdict(list)
        for rule in rules:
            pattern, key_of = _compile(rule.pattern, rule.key)
            for owner, match in zip(self.owners, map(pattern.fullmatch, self.names), strict=True):
                if match is not None:
                    by_key[key_of(match)].append(owner)
        lists = (same for same in by_key.values() if len(same) > 1)
        return [unique for same in lists if len(unique := list(dict.fromkeys(same))) > 1]


def _arrange(count: int, clusters: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """An order in which each cluster is contiguous, given small clusters before the larger ones that hold them."""
    home = list(range(count))  # index -> first index of the block that holds it
    blocks: dict[int, list[int]] = {}  # by first index; an index alone needs no entry
    for cluster in clusters:
        parts = sorted({home[index] for index in cluster})
        if len(parts) > 1:
            merged = [index for part in parts for index in blocks.pop(part, (part,))]
            blocks[parts[0]] = merged
            for index in merged:
                home[index] = parts[0]
    order: list[int] = []
    for index, first in enumerate(home):
        if index == first:
            order.extend(blocks.get(index, (index,)))
    return tuple(order)


def _joined(count: int, lists: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Lists that share an index become one (union-find); a root is the first index of its set."""
    parent = list(range(count))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    touched: set[int] = set()
    for indices in lists:
        touched.update(indices)
        first = root(indices[0])
        for index in indices[1:]:
            first, other = sorted((first, root(index)))
            parent[other] = first
    found: dict[int, list[int]] = defaultdict(list)
    for index in sorted(touched):
        found[root(index)].append(index)
    return tuple(map(tuple, found.values()))


class _Renamer:
    """Rename rules in order; the first that matches applies."""

    def __init__(self, rules: tuple[NameRule, ...]) -> None:
        self._rules = [_compile(rule.pattern, rule.replacement) for rule in rules]
        self.last: tuple[Manifest, Manifest, list[Fault]] | None = None

    @staticmethod
    @lru_cache(maxsize=64)
    def of(rules: tuple[NameRule, ...]) -> _Renamer:
        return _Renamer(rules)

    def new_names(self, names: Sequence[str]) -> list[str]:
        return [self._new_name(name) for name in names]

    def _new_name(self, name: str) -> str:
        for pattern, expand in self._rules:
            match = pattern.fullmatch(name)
            if match is not None:
                return expand(match)
        return name
