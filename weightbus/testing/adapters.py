"""The conformance suite of adapters, and `RecordingAdapter`: a fake engine that refuses what a real one refuses."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import pytest
import torch
import xxhash

from weightbus.adapter import Adapter, Batch, EngineDriver, EngineLoader, Fault, GroupRules, LoadResult, Outcome, Refit
from weightbus.deadline import Deadline
from weightbus.errors import ConfigError, EngineError
from weightbus.manifest import DTYPES, Manifest, TensorSpec, dtype_name
from weightbus.registry import load_adapter
from weightbus.testing.conformance import StandardSuite, pattern
from weightbus.testing.sides import POISON, read_memory, write_memory

STEPS = ("check", "begin", "load", "finish", "resume", "abort", "heal")
WAIT_S = 60.0


@attrs.define(eq=False)
class FakeEngine:
    """An engine made of dicts: weights per rank, a label, a session, and a cache of answers.

    Attributes:
        weights: rank to name to tensor; read and written freely by tests.
        label: the version it publishes.
        serving: False while paused.
        session: True between begin and finish (or abort).
        calls: the steps it was asked for, such as ``"begin 7"``, ``"load a b"``, ``"abort loaded"``.
    """

    weights: dict[int, dict[str, torch.Tensor]] = attrs.field(factory=dict)
    label: str = ""
    serving: bool = True
    session: bool = False
    driven: bool = False
    calls: list[str] = attrs.field(factory=list)
    _cache: dict[str, tuple[str, int]] = attrs.field(factory=dict)

    def prompt(self, text: str) -> tuple[str, int]:
        """The label and a digest of all weights under which `text` was answered: at once, or earlier, from the cache.

        Raises:
            EngineError: it is paused.
        """
        if not self.serving:
            raise EngineError("The engine is paused.", phase="prompt")
        if text not in self._cache:
            data = [read_memory(t.contiguous()) for rank in sorted(self.weights) for t in self.weights[rank].values()]
            self._cache[text] = (self.label, int(xxhash.xxh3_64_intdigest(b"".join((text.encode(), *data)))))
        return self._cache[text]

    def flush(self) -> None:
        """Forget cached answers."""
        self._cache.clear()

    def demand(self, condition: bool, what: str, step: str) -> None:
        """Refuse a step that comes at the wrong time."""
        if not condition:
            raise EngineError(what, phase=step)


class _Loader(EngineLoader):
    def __init__(self, owner: RecordingAdapter, ranks: Sequence[int]) -> None:
        self._owner, self._engine, self._ranks = owner, owner.engine, list(ranks)

    def rules(self) -> GroupRules:
        return self._owner.group_rules

    def check(self, manifests: Sequence[Manifest], *, partial: bool) -> list[Fault]:
        self._owner.strike("check", "check")
        faults: list[Fault] = []
        for rank, manifest in zip(self._ranks, manifests, strict=True):
            faults += self._check_rank(self._engine.weights[rank], manifest, partial)
        return faults

    @staticmethod
    def _check_rank(weights: Mapping[str, torch.Tensor], manifest: Manifest, partial: bool) -> list[Fault]:
        offered = {name: spec for spec in manifest for name in spec.names}
        faults = [] if partial else [Fault("missing", name) for name in weights if name not in offered]
        for spec in manifest:
            known = [name for name in spec.names if name in weights]
            faults += [] if known else [Fault("unexpected", spec.name)]
            for name in known:
                mine = weights[name]
                if tuple(mine.shape) != spec.shape:
                    faults.append(Fault("shape", name, f"has {tuple(mine.shape)}, offered {spec.shape}"))
                if dtype_name(mine.dtype) != spec.dtype:
                    faults.append(Fault("dtype", name, f"has {dtype_name(mine.dtype)}, offered {spec.dtype}"))
        return faults

    def load(self, batches: Sequence[Batch]) -> LoadResult:
        names = [name for name, _ in batches[0]]
        self._owner.strike("load", f"load {' '.join(names)}")
        if self._engine.driven:
            self._engine.demand(self._engine.session, "load without begin", "load")
        skipped = [name for name in names if name not in self._engine.weights[self._ranks[0]]]
        for rank, batch in zip(self._ranks, batches, strict=True):
            for name, tensor in batch:
                if name not in skipped:
                    self._engine.weights[rank][name].copy_(tensor)
        return LoadResult(applied=[name for name in names if name not in skipped], skipped=skipped)

    def abort(self, reason: str) -> None:
        self._engine.calls.append("loader abort")


class _Driver(EngineDriver):
    def __init__(self, owner: RecordingAdapter) -> None:
        self._owner, self._engine = owner, owner.engine

    def begin(self, refit: Refit, deadline: Deadline) -> None:
        self._engine.demand(not self._engine.session, "begin while a session is open", "begin")
        self._engine.demand(refit.tensors != 0, "begin of a refit without tensors", "begin")
        self._engine.serving = False
        self._owner.strike("begin", f"begin {refit.label}")
        self._engine.session = True
        self._engine.flush()

    def finish(self, version: int, deadline: Deadline) -> None:
        self._engine.demand(self._engine.session, "finish without begin, or twice", "finish")
        self._owner.strike("finish", f"finish {version}")
        self._engine.session = False
        self._engine.flush()
        self._engine.label = str(version)

    def resume(self, deadline: Deadline) -> None:
        self._engine.demand(not self._engine.session, "resume before finish", "resume")
        self._owner.strike("resume", "resume")
        self._engine.serving = True

    def abort(self, reason: str, *, loaded: bool, resume: bool, deadline: Deadline) -> None:
        self._owner.strike("abort", f"abort {'loaded' if loaded else 'undo'}{' resume' if resume else ''}")
        self._engine.session = False
        self._engine.serving = self._engine.serving or (resume and not loaded)

    def heal(self, deadline: Deadline) -> None:
        self._owner.strike("heal", "heal")
        self._engine.session = False


class RecordingAdapter(Adapter):
    """A fake engine behind the contract of adapters.

    By name: adapter ``"weightbus.testing.adapters:RecordingAdapter"`` with `adapter_options`
    ``{"shapes": {"w": [[2, 3], "float32"]}, "fail_at": "finish"}``.

    Args:
        tensors: what each rank holds at first; copied.
        shapes: in place of `tensors`: name to (shape, dtype name), filled with zeros.
        fail_at: a step of `STEPS`, or ``"load:2"`` for its third call, that raises EngineError.
        fail_times: how many calls from there on raise.
        stall_at: as `fail_at`: that call takes `stall_s` seconds.
        stall_s: seconds.
        group_rules: what `EngineLoader.rules` says.
        engine: an engine that outlives the adapter, as a server would.

    Raises:
        ConfigError: unknown options, or a step that is none.
    """

    name: ClassVar[str] = "recording"

    def __init__(
        self,
        *,
        tensors: Mapping[str, torch.Tensor] | None = None,
        shapes: Mapping[str, tuple[Sequence[int], str]] | None = None,
        fail_at: str = "",
        fail_times: int = 1,
        stall_at: str = "",
        stall_s: float = 3600.0,
        group_rules: GroupRules | None = None,
        engine: FakeEngine | None = None,
        **unknown: Any,
    ) -> None:
        wrong = [step for step in (fail_at, stall_at) if step and step.partition(":")[0] not in STEPS]
        if unknown or wrong:
            raise ConfigError(f"RecordingAdapter has no {', '.join([*sorted(unknown), *wrong])}.")
        made = {name: torch.zeros(tuple(shape), dtype=DTYPES[dtype]) for name, (shape, dtype) in (shapes or {}).items()}
        self._tensors = {**made, **(tensors or {})}
        self._fail_at, self._fail_times = _step(fail_at), fail_times
        self._stall_at, self._stall_s = _step(stall_at), stall_s
        self._counts: Counter[str] = Counter()
        self.group_rules = group_rules or GroupRules()
        self.engine = engine or FakeEngine()

    def strike(self, step: str, call: str) -> None:
        """Write down a call, then stall or fail as told."""
        self.engine.calls.append(call)
        count = self._counts[step]
        self._counts[step] += 1
        if (step, count) == self._stall_at:
            time.sleep(self._stall_s)
        first = self._fail_at[1]
        if step == self._fail_at[0] and first <= count < first + self._fail_times:
            raise EngineError(f"The fake engine fails in {step}, as told.", phase=step)

    def driver(self) -> EngineDriver:
        self.engine.driven = True
        return _Driver(self)

    def loader(self, ranks: Sequence[int], device: torch.device | None) -> EngineLoader:
        for rank in ranks:
            if rank not in self.engine.weights:
                self.engine.weights[rank] = _copies(self._tensors)
        return _Loader(self, ranks)


def _step(text: str) -> tuple[str, int]:
    step, _, count = text.partition(":")
    return step, int(count or 0)


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies that keep strides, and ties: one tensor under two names stays one."""
    seen: dict[int, torch.Tensor] = {}
    return {name: seen.setdefault(id(tensor), tensor.detach().clone()) for name, tensor in tensors.items()}


class Arena:
    """A batch as core makes it: views of one piece of memory, which is used again after `load`."""

    def __init__(self, manifest: Manifest, seed: int, device: torch.device) -> None:
        offsets, end = [], 0
        for spec in manifest:
            offsets.append(end)
            end += -(-spec.nbytes // 16) * 16
        self.memory = torch.full((end,), POISON, dtype=torch.uint8, device=device)
        self.values: dict[str, bytes] = {}
        self.batch: list[tuple[str, torch.Tensor]] = []
        for index, (spec, offset) in enumerate(zip(manifest, offsets, strict=True)):
            view = self.memory[offset : offset + spec.nbytes].view(spec.torch_dtype).view(spec.shape)
            self._fill(view, seed + index)
            for name in spec.names:
                self.batch.append((name, view))
                self.values[name] = read_memory(view)

    @staticmethod
    def _fill(view: torch.Tensor, seed: int) -> None:
        """Small whole numbers, other ones for every seed."""
        numbers = [byte % (2 if view.dtype == torch.bool else 8) for byte in pattern(seed, view.numel())]
        source = torch.tensor(numbers, dtype=torch.float32).reshape(view.shape)
        write_memory(view, read_memory(source.to(view.dtype).contiguous()))

    def poison(self) -> None:
        """Use the memory again."""
        self.memory.fill_(POISON)


class AdapterConformance(StandardSuite):
    """Subclass it, and give the fixtures `adapter`, `fitting` and `read_engine`; `ties` where the engine has some.

    The engine that `adapter` reaches is fresh for each test, has one rank, and needs nothing outside the test.
    """

    @pytest.fixture
    def adapter(self) -> Adapter:
        """The adapter under test."""
        raise NotImplementedError("give a fixture `adapter`")

    @pytest.fixture
    def fitting(self) -> Sequence[TensorSpec]:
        """All tensors that the engine takes, at least four, with 0-dim and empty ones if it can have them."""
        raise NotImplementedError("give a fixture `fitting`")

    @pytest.fixture
    def read_engine(self) -> Callable[[], Mapping[str, torch.Tensor]]:
        """Reads the engine's tensors by their offered names, aliases included, past the adapter."""
        raise NotImplementedError("give a fixture `read_engine`")

    @pytest.fixture
    def manifest(self, fitting: Sequence[TensorSpec]) -> Manifest:
        return Manifest(fitting)

    @pytest.fixture
    def loader(self, adapter: Adapter) -> EngineLoader:
        return adapter.loader([0], None)

    @pytest.fixture
    def driver(self, adapter: Adapter) -> EngineDriver:
        return adapter.driver()

    @pytest.fixture
    def values(
        self, loader: EngineLoader, read_engine: Callable[[], Mapping[str, torch.Tensor]]
    ) -> Callable[[], dict[str, bytes]]:
        """The bytes of each of the engine's tensors."""
        return lambda: {name: read_memory(tensor.detach().contiguous()) for name, tensor in read_engine().items()}

    @pytest.fixture
    def arena(self, adapter: Adapter, manifest: Manifest) -> Callable[[int], Arena]:
        """Makes batches of the whole manifest, other values for every seed."""
        return lambda seed: Arena(manifest, 1000 * seed, adapter.device)

    # check

    def test_what_fits_is_accepted(self, loader: EngineLoader, manifest: Manifest) -> None:
        assert loader.check([manifest], partial=False) == []

    def test_all_faults_are_listed_at_once_and_nothing_is_touched(
        self, loader: EngineLoader, fitting: Sequence[TensorSpec], values: Callable[[], dict[str, bytes]]
    ) -> None:
        before = values()
        missing, shape, dtype, *rest = sorted(fitting, key=lambda spec: len(spec.shape) == 0)
        other = "float64" if dtype.dtype != "float64" else "float32"
        offered = [
            attrs.evolve(shape, shape=(*shape.shape, 3)),
            attrs.evolve(dtype, dtype=other),
            TensorSpec("no.such.tensor", (2,), "float32"),
            *rest,
        ]
        found = {(fault.kind, fault.name) for fault in loader.check([Manifest(offered)], partial=False)}
        expected = {("missing", missing.name), ("shape", shape.name), ("dtype", dtype.name)}
        assert found >= expected | {("unexpected", "no.such.tensor")}
        assert not {name for _, name in found} & {spec.name for spec in rest}
        assert values() == before

    def test_only_a_partial_refit_may_miss_names(self, loader: EngineLoader, fitting: Sequence[TensorSpec]) -> None:
        few = Manifest(_closed(fitting, loader.rules())[0])
        assert loader.check([few], partial=True) == []
        assert {fault.kind for fault in loader.check([few], partial=False)} == {"missing"}

    def test_rules_are_the_same_when_read_again(self, loader: EngineLoader) -> None:
        assert isinstance(loader.rules(), GroupRules)
        assert loader.rules() == loader.rules()

    # load

    def test_values_arrive_exactly_version_after_version(
        self,
        loader: EngineLoader,
        driver: EngineDriver,
        manifest: Manifest,
        arena: Callable[[int], Arena],
        values: Callable[[], dict[str, bytes]],
    ) -> None:
        for version, seed in enumerate((1, 2, 1), start=1):
            mine = arena(seed)
            refit(loader, driver, manifest, mine, version)
            assert values() == mine.values

    def test_nothing_of_a_batch_is_kept(
        self,
        loader: EngineLoader,
        driver: EngineDriver,
        manifest: Manifest,
        arena: Callable[[int], Arena],
        values: Callable[[], dict[str, bytes]],
    ) -> None:
        mine = arena(3)
        begin(loader, driver, manifest, 1)
        for batch in _batches(mine.batch, loader.rules()):
            loader.load([batch])
        mine.poison()
        driver.finish(1, Deadline.after(WAIT_S))
        driver.resume(Deadline.after(WAIT_S))
        assert values() == mine.values

    def test_every_name_is_accounted_for(
        self, loader: EngineLoader, driver: EngineDriver, manifest: Manifest, arena: Callable[[int], Arena]
    ) -> None:
        begin(loader, driver, manifest, 1)
        for batch in _batches(arena(4).batch, loader.rules()):
            result = loader.load([batch])
            assert sorted((*result.applied, *result.skipped)) == sorted(name for name, _ in batch)
        driver.finish(1, Deadline.after(WAIT_S))
        driver.resume(Deadline.after(WAIT_S))

    # Failures

    def test_begin_can_be_undone(
        self,
        loader: EngineLoader,
        driver: EngineDriver,
        manifest: Manifest,
        arena: Callable[[int], Arena],
        values: Callable[[], dict[str, bytes]],
    ) -> None:
        first = arena(5)
        refit(loader, driver, manifest, first, 1)
        begin(loader, driver, manifest, 2)
        driver.abort("a test", loaded=False, resume=True, deadline=Deadline.after(WAIT_S))
        assert values() == first.values
        refit(loader, driver, manifest, arena(6), 3)
        assert values() == arena(6).values

    def test_a_full_refit_heals_a_half_loaded_engine(
        self,
        loader: EngineLoader,
        driver: EngineDriver,
        manifest: Manifest,
        arena: Callable[[int], Arena],
        values: Callable[[], dict[str, bytes]],
    ) -> None:
        refit(loader, driver, manifest, arena(5), 1)
        begin(loader, driver, manifest, 2)
        loader.load([_batches(arena(6).batch, loader.rules())[0]])
        loader.abort("a test")
        driver.abort("a test", loaded=True, resume=False, deadline=Deadline.after(WAIT_S))
        driver.heal(Deadline.after(WAIT_S))
        refit(loader, driver, manifest, arena(7), 3, previous=Outcome.DIRTY)
        assert values() == arena(7).values

    def test_closing_twice_is_one_closing(self, loader: EngineLoader, driver: EngineDriver) -> None:
        for _ in range(2):
            loader.close()
            driver.close()

    def test_unknown_options_are_refused_all_at_once(self, adapter: Adapter) -> None:
        cls = type(adapter)
        with pytest.raises(ConfigError) as raised:
            load_adapter(f"{cls.__module__}:{cls.__qualname__}", {"no_such_option": 1, "nor_this_one": 2})
        assert "no_such_option" in str(raised.value)
        assert "nor_this_one" in str(raised.value)


def begin(
    loader: EngineLoader, driver: EngineDriver, manifest: Manifest, version: int, previous: Outcome = Outcome.READY
) -> None:
    """Check and begin, as core does."""
    assert loader.check([manifest], partial=False) == []
    facts = {"previous": previous, "tensors": len(manifest), "nbytes": manifest.nbytes}
    driver.begin(Refit(refit_id=f"refit{version}", version=version, **facts), Deadline.after(WAIT_S))  # type: ignore[arg-type]


def refit(
    loader: EngineLoader,
    driver: EngineDriver,
    manifest: Manifest,
    arena: Arena,
    version: int,
    previous: Outcome = Outcome.READY,
) -> None:
    """One refit from check to resume."""
    begin(loader, driver, manifest, version, previous)
    for batch in _batches(arena.batch, loader.rules()):
        loader.load([batch])
    driver.finish(version, Deadline.after(WAIT_S))
    driver.resume(Deadline.after(WAIT_S))


def _key(name: str, rules: GroupRules) -> str | None:
    """What names of one `load` call share."""
    for rule in rules.together:
        match = re.fullmatch(rule.pattern, name)
        if match:
            return match.expand(rule.key)
    return None


def _batches(batch: Batch, rules: GroupRules) -> list[Batch]:
    """The smallest batches that the rules allow: one tensor with its aliases, or one group."""
    groups: dict[object, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in batch:
        groups.setdefault(_key(name, rules) or id(tensor), []).append((name, tensor))
    return list(groups.values())


def _closed(specs: Sequence[TensorSpec], rules: GroupRules) -> list[list[TensorSpec]]:
    """`specs` cut into groups of the rules."""
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault(_key(spec.name, rules) or f"\0{spec.name}", []).append(spec)
    return list(groups.values())
