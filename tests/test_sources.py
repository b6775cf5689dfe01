"""Sources: manifest and stream from one list, by value, from every kind of source; and every fault at once."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weightbus.errors import ConfigError, LocalProtocolError, SourceError
from weightbus.manifest import Manifest, TensorSpec
from weightbus.sources import Source, SourceCache, open_source

ROOT = Path(__file__).parent.parent


class Tied(nn.Module):
    """A parameter under two names, buffers of both kinds, a 0-dim, an empty and a strided parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_parameter("absent", None)
        self.register_buffer("void", None)


def manifest_of(source: Source) -> Manifest:
    assert source.manifest is not None
    return source.manifest


def values(source: Source, manifest: Manifest | None = None) -> dict[str, object]:
    chosen = manifest or manifest_of(source)
    return {s.name: t.tolist() for s, t in zip(chosen, source.iterate(chosen), strict=True)}


def pairs(**tensors: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield from tensors.items()


# ---- modules


def test_a_module_states_kinds_ties_shapes_and_dtypes() -> None:
    source = open_source(Tied())
    assert [(s.name, s.shape, s.dtype, s.aliases, s.kind) for s in manifest_of(source)] == [
        ("scale", (), "float32", (), "parameter"),
        ("none", (0, 4), "float32", (), "parameter"),
        ("turned", (3, 2), "float32", (), "parameter"),
        ("kept", (3,), "int64", (), "buffer"),
        ("emb.weight", (3, 2), "float32", ("head.weight",), "parameter"),
    ]
    assert source.reorderable and not source.started


def test_all_buffers_on_request() -> None:
    kinds = {s.name: s.kind for s in manifest_of(open_source(Tied(), buffers="all"))}
    assert kinds["cache"] == "nonpersistent" and kinds["kept"] == "buffer"
    with pytest.raises(ConfigError, match="'persistent', 'all'"):
        open_source(Tied(), buffers="none")


def test_a_modules_tensors_come_detached_as_they_lie() -> None:
    module = Tied()
    source = open_source(module)
    tensors = dict(zip((s.name for s in manifest_of(source)), source.iterate(manifest_of(source)), strict=True))
    assert not any(t.requires_grad for t in tensors.values())
    assert tensors["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert tensors["turned"].data_ptr() == module.turned.data_ptr() and not tensors["turned"].is_contiguous()
    assert tensors["scale"].shape == () and tensors["scale"].item() == 1.5


def test_views_of_one_memory_are_one_tensor_only_if_they_are_the_same_view() -> None:
    base = torch.arange(4.0).view(2, 2)
    source = open_source(
        {"a": base, "same": base.view(2, 2), "turned": base.t(), "part": base[0], "copy": base.clone()}
    )
    assert [s.names for s in manifest_of(source)] == [("a", "same"), ("turned",), ("part",), ("copy",)]


def test_empty_tensors_are_not_tied_to_each_other() -> None:
    source = open_source({"a": torch.empty(0), "b": torch.empty(0)})
    assert [s.names for s in manifest_of(source)] == [("a",), ("b",)]


def test_wrappers_are_cleaned_off_and_collisions_are_refused() -> None:
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": nn.Linear(1, 1)})})
    assert [s.name for s in manifest_of(open_source(wrapped))] == ["weight", "bias"]
    with pytest.raises(SourceError, match=r"'w' comes twice, as 'w' and 'module\.w'"):
        open_source({"w": torch.zeros(1), "module.w": torch.ones(1)})


class Adapted(nn.Module):
    """A layer as PEFT makes it."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.base_layer = nn.Linear(2, 2, bias=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 1, bias=False)})
        self.merged = merged


def test_adapters_go_when_merged_and_are_errors_when_not() -> None:
    model = nn.ModuleDict({"q": Adapted(True)})
    source = open_source(model)
    assert [s.name for s in manifest_of(source)] == ["q.weight"]
    assert source.leftovers == ("q.lora_A.default.weight",)
    cache = SourceCache()
    open_source(model, cache=cache)
    model["q"].merged = False
    with pytest.raises(SourceError, match=r"'q\.lora_A\.default\.weight' is an adapter that is not merged"):
        open_source(model, cache=cache)


def test_fully_trained_modules_of_an_adapter_are_sent_and_their_originals_are_not() -> None:
    source = open_source(
        {"head.original_module.weight": torch.zeros(2), "head.modules_to_save.default.weight": torch.ones(2)}
    )
    assert values(source) == {"head.weight": [1, 1]}
    assert source.leftovers == ("head.original_module.weight",)


def test_adapters_can_be_sent_by_name() -> None:
    spec = TensorSpec("q.lora_A.default.weight", (1,), "float32")
    assert values(open_source({spec.name: torch.ones(1)}, manifest=[spec])) == {spec.name: [1]}


# ---- faults


def test_all_faults_of_a_mapping_are_listed_at_once() -> None:
    with pytest.raises(SourceError) as caught:
        open_source(
            {
                "ok": torch.zeros(1),
                "meta": torch.empty(1, device="meta"),
                "sparse": torch.eye(2).to_sparse(),
                "text": "x",  # type: ignore[dict-item]
                7: torch.zeros(1),  # type: ignore[dict-item]
                "flat._flat_param": torch.zeros(1),
            }
        )
    for part in ("'meta' is on the meta", "'sparse' has layout", "'text' is str", "7: a name", "FSDP1"):
        assert part in str(caught.value)


@pytest.mark.parametrize("source", [{}, [], nn.Identity(), {"h.original_module.w": torch.zeros(1)}])
def test_nothing_to_send_is_an_error(source: object) -> None:
    with pytest.raises(SourceError, match="no tensors"):
        open_source(source)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [torch.zeros(3), "text", 7, None])
def test_what_is_no_source_is_refused(source: object) -> None:
    with pytest.raises(ConfigError, match="is no source"):
        open_source(source)  # type: ignore[arg-type]


def test_an_unfit_name_is_an_error_of_the_source() -> None:
    with pytest.raises(SourceError, match="1 to 1024 bytes"):
        open_source({"n" * 2000: torch.zeros(1)})


# ---- a manifest that is given


def test_partial_selects_in_the_given_order_and_keeps_ties() -> None:
    chosen = [TensorSpec("head.weight", (3, 2), "float32"), TensorSpec("scale", (), "float32")]
    source = open_source(Tied(), manifest=chosen, partial=True)
    assert [s.names for s in manifest_of(source)] == [("emb.weight", "head.weight"), ("scale",)]
    assert [s.kind for s in manifest_of(source)] == ["parameter", "parameter"]


def test_a_given_manifest_must_fit_in_every_way() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2), "extra": torch.zeros(1)}
    wrong = [TensorSpec("a", (3,), "float32"), TensorSpec("b", (2,), "float16"), TensorSpec("c", (1,), "float32")]
    with pytest.raises(SourceError) as caught:
        open_source(tensors, manifest=wrong)
    for part in (
        "'a' is float32 [2], the manifest says float32 [3]",
        "'b' is float32 [2], the manifest says float16 [2]",
        "'c' is in the manifest, not in the source",
        "'extra' is not in the manifest",
    ):
        assert part in str(caught.value)


def test_a_given_manifest_cannot_tie_what_is_apart() -> None:
    with pytest.raises(SourceError, match="'a' and 'b' are one in the manifest"):
        open_source({"a": torch.zeros(1), "b": torch.ones(1)}, manifest=[TensorSpec("a", (1,), "float32", ("b",))])


def test_a_given_manifest_orders_a_whole_mapping_and_may_use_raw_names() -> None:
    given_manifest = [TensorSpec("module.b", (1,), "int64"), TensorSpec("module.a", (1,), "int64")]
    source = open_source({"a": torch.tensor([1]), "b": torch.tensor([2])}, manifest=given_manifest)
    assert list(values(source).items()) == [("b", [2]), ("a", [1])]


def test_a_given_non_persistent_buffer_is_sent_and_not_asked_for_otherwise() -> None:
    module = nn.Module()
    module.register_buffer("a", torch.zeros(1))
    module.register_buffer("n", torch.ones(1), persistent=False)
    spec = TensorSpec("a", (1,), "float32")
    assert values(open_source(module, manifest=[spec])) == {"a": [0]}
    assert values(open_source(module, manifest=[spec, TensorSpec("n", (1,), "float32")])) == {"a": [0], "n": [1]}


@pytest.mark.parametrize("wrong", [7, ["a"], [TensorSpec("a", (1,), "float32")] * 2])
def test_a_manifest_that_is_none_is_a_setting_gone_wrong(wrong: object) -> None:
    with pytest.raises(ConfigError, match="manifest"):
        open_source({"a": torch.zeros(1)}, manifest=wrong)  # type: ignore[arg-type]


def test_an_empty_manifest_is_an_error() -> None:
    with pytest.raises(SourceError, match="names no tensors"):
        open_source({"a": torch.zeros(1)}, manifest=[], partial=True)


# ---- cast


def test_cast_takes_the_first_pattern_and_shows_in_the_manifest() -> None:
    source = open_source(
        {"router.w": torch.tensor([1.0009765625]), "x.w": torch.tensor([1.0009765625])},
        cast={r"router\..*": torch.float32, r".*": torch.bfloat16},
    )
    assert [s.dtype for s in manifest_of(source)] == ["float32", "bfloat16"]
    got = list(source.iterate(manifest_of(source)))
    assert [t.dtype for t in got] == [torch.float32, torch.bfloat16]
    assert [t.item() for t in got] == [1.0009765625, 1.0]


def test_names_that_are_cast_apart_are_no_tie() -> None:
    shared = torch.ones(1)
    source = open_source({"a": shared, "b": shared}, cast={"b": torch.float16})
    assert [(s.names, s.dtype) for s in manifest_of(source)] == [(("a",), "float32"), (("b",), "float16")]


def test_cast_applies_to_iterables() -> None:
    spec = TensorSpec("a", (1,), "float16")
    source = open_source(pairs(a=torch.ones(1)), manifest=[spec], cast={"a": torch.float16})
    assert [t.dtype for t in source.iterate(manifest_of(source))] == [torch.float16]
    paged = open_source(pairs(a=torch.ones(1)), cast={"a": torch.float16})
    assert [(s.dtype, t.dtype) for s, t in paged.iterate_paged()] == [("float16", torch.float16)]


@pytest.mark.parametrize(
    ("cast", "text"),
    [
        ({"b": torch.float16}, "'b' matches no name"),
        ({"(": torch.float16}, "no regular expression"),
        ({"a": "float16"}, "no dtype that can travel"),
        ({"a": torch.qint8}, "no dtype that can travel"),
    ],
)
def test_a_wrong_cast_is_refused(cast: dict[str, torch.dtype], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        open_source({"a": torch.zeros(1)}, cast=cast)


def test_an_imaginary_part_is_never_dropped() -> None:
    with pytest.raises(SourceError, match="imaginary part of 'a'"):
        open_source({"a": torch.zeros(1, dtype=torch.complex64)}, cast={"a": torch.float32})


# ---- order


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(6)))
def test_a_mapping_yields_in_any_order_asked_for(order: list[int]) -> None:
    cache = SourceCache()
    for base in (0, 10):  # twice through the cache, with new values and new memory
        tensors = {f"t{i}": torch.tensor([base + i]) for i in range(6)}
        own = manifest_of(open_source(tensors, cache=cache))
        asked = Manifest([own.tensors[i] for i in order])
        got = [t.item() for t in open_source(tensors, cache=cache).iterate(asked)]
        assert got == [base + i for i in order]


def test_another_set_of_tensors_is_refused() -> None:
    own = {"a": torch.zeros(1), "b": torch.zeros(1)}
    for asked in (
        [TensorSpec("a", (1,), "float32")],
        [TensorSpec("a", (1,), "float32"), TensorSpec("c", (1,), "float32")],
        [TensorSpec("b", (1,), "float32"), TensorSpec("a", (2,), "float32")],
    ):
        with pytest.raises(SourceError, match="asked for"):
            open_source(own).iterate(Manifest(asked))


def test_a_source_is_used_once() -> None:
    source = open_source({"a": torch.zeros(1)})
    source.iterate(manifest_of(source))
    with pytest.raises(LocalProtocolError, match="once"):
        source.iterate(manifest_of(source))
    with pytest.raises(LocalProtocolError, match="do not page"):
        source.iterate_paged()


# ---- the cache


def test_an_unchanged_source_keeps_its_manifest_object() -> None:
    cache, tensors = SourceCache(), {"a": torch.zeros(2), "b": torch.ones(2)}
    first = manifest_of(open_source(tensors, cache=cache))
    assert manifest_of(open_source(tensors, cache=cache)) is first
    moved = {name: t.clone() for name, t in tensors.items()}
    source = open_source(moved, cache=cache)
    assert manifest_of(source) is first
    moved["b"].fill_(5)
    assert values(source) == {"a": [0, 0], "b": [5, 5]}


@pytest.mark.parametrize("change", ["shape", "dtype", "tie", "untie", "name", "drop", "meta", "sparse", "kind"])
def test_a_changed_source_is_read_again(change: str) -> None:
    cache, shared = SourceCache(), torch.zeros(2)
    tensors: dict[str, torch.Tensor] = {"a": shared, "b": torch.ones(2), "c": shared}
    first = manifest_of(open_source(tensors, cache=cache))
    assert [s.names for s in first] == [("a", "c"), ("b",)]
    if change == "shape":
        tensors["b"].data = torch.ones(3)
    elif change == "dtype":
        tensors["b"].data = torch.ones(2, dtype=torch.int64)
    elif change == "tie":
        tensors["b"] = shared
    elif change == "untie":
        tensors["c"] = torch.full((2,), 9.0)
    elif change == "name":
        tensors = {"a": shared, "x": tensors["b"], "c": shared}
    elif change == "drop":
        del tensors["b"]
    elif change == "kind":
        module = nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        assert manifest_of(open_source(module, cache=cache)) != first
        return
    elif change in ("meta", "sparse"):
        tensors["b"] = torch.empty(2, device="meta") if change == "meta" else torch.ones(2).to_sparse()
        with pytest.raises(SourceError, match="'b'"):
            open_source(tensors, cache=cache)
        return
    source = open_source(tensors, cache=cache)
    assert manifest_of(source) == manifest_of(open_source(tensors)) != first
    assert values(source) == {s.name: tensors[s.name].tolist() for s in manifest_of(source)}


@pytest.mark.parametrize("new", [torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(2, 1)])
def test_new_memory_of_another_shape_or_dtype_is_seen_where_nothing_is_tied(new: torch.Tensor) -> None:
    cache = SourceCache()
    open_source({"a": torch.zeros(2), "b": torch.zeros(2)}, cache=cache)
    source = open_source({"a": torch.zeros(2), "b": new}, cache=cache)
    assert manifest_of(source).tensors[1] == TensorSpec.of("b", new)
    assert values(source)["b"] == new.tolist()


def test_two_orders_of_one_source_are_not_mixed_up() -> None:
    cache, tensors = SourceCache(), {name: torch.tensor([i]) for i, name in enumerate("abc")}
    own = manifest_of(open_source(tensors, cache=cache))
    for order in ([2, 0, 1], [1, 2, 0], [2, 0, 1]):
        source = open_source(tensors, cache=cache)
        assert manifest_of(source) is own
        assert [t.item() for t in source.iterate(Manifest([own.tensors[i] for i in order]))] == order


def test_another_question_about_the_same_source_is_not_answered_from_the_cache() -> None:
    cache, tensors = SourceCache(), {"a": torch.ones(1)}
    open_source(tensors, cache=cache)
    assert manifest_of(open_source(tensors, cache=cache, cast={"a": torch.float16})).tensors[0].dtype == "float16"
    assert manifest_of(open_source(tensors, cache=cache)).tensors[0].dtype == "float32"


def test_a_tensor_that_changes_after_the_offer_is_an_error() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2)}
    source = open_source(tensors)
    tensors["b"].data = torch.zeros(3)
    with pytest.raises(SourceError, match=r"yields 'b', float32 \[3\], where the manifest says 'b', float32 \[2\]"):
        list(source.iterate(manifest_of(source)))
    source = open_source(tensors)
    tensors["a"].data = torch.zeros(2, dtype=torch.float16)
    with pytest.raises(SourceError, match="float16"):
        list(source.iterate(manifest_of(source)))


# ---- iterables


def test_lists_and_items_have_a_manifest_of_their_own() -> None:
    tensors = {"a": torch.tensor([1]), "b": torch.tensor([2])}
    for source in (open_source(list(tensors.items())), open_source(tensors.items())):
        assert values(source) == {"a": [1], "b": [2]}
        assert not source.reorderable
    with pytest.raises(SourceError, match="item 1 of the source is int"):
        open_source([("a", torch.zeros(1)), 7])  # type: ignore[list-item]
    with pytest.raises(SourceError, match="'a' comes twice"):
        open_source([("a", torch.zeros(1))] * 2)


def test_a_list_is_not_reordered() -> None:
    source = open_source([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    with pytest.raises(SourceError, match="asked for other tensors"):
        source.iterate(Manifest(reversed(manifest_of(source).tensors)))


def test_a_bare_generator_is_paged_and_remembered() -> None:
    first = open_source(pairs(a=torch.tensor([1]), **{"module.b": torch.tensor(2.5)}))
    assert first.manifest is None and not first.started
    paged = list(first.iterate_paged())
    assert first.started
    assert [(s.name, s.shape, s.dtype, t.tolist()) for s, t in paged] == [
        ("a", (1,), "int64", [1]),
        ("b", (), "float32", 2.5),
    ]
    again = open_source(pairs(a=torch.tensor([3]), b=torch.tensor(4.5)), remembered=Manifest([s for s, _ in paged]))
    assert values(again) == {"a": [3], "b": 4.5}


def test_a_part_is_not_checked_against_what_was_sent_whole() -> None:
    source = open_source(pairs(b=torch.tensor([5.0])), remembered=ABC, partial=True)
    assert source.manifest is None
    assert [(s.name, t.tolist()) for s, t in source.iterate_paged()] == [("b", [5])]


ABC = Manifest([TensorSpec(name, (1,), "float32") for name in "abc"])


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ({"a": torch.zeros(1), "b": torch.zeros(1)}, "ended after 2 of 3 tensors; 'c' should come next"),
        (dict.fromkeys("abcd", torch.zeros(1)), "yields 'd' after all 3 tensors"),
        (dict.fromkeys("acb", torch.zeros(1)), r"yields 'c', float32 \[1\], where the manifest says 'b'"),
        ({"a": torch.zeros(1), "b": torch.zeros(2)}, r"yields 'b', float32 \[2\], where"),
        ({"a": torch.zeros(1), "b": torch.zeros(1).half()}, r"yields 'b', float16 \[1\], where"),
        ({"a": torch.zeros(1), "b": torch.empty(1, device="meta")}, "'b' is on the meta device"),
        ({"a": 7}, "item 0 of the source is tuple, not a pair"),
    ],
)
def test_an_iterable_that_breaks_its_promise(items: dict[str, torch.Tensor], text: str) -> None:
    source = open_source(pairs(**items), remembered=ABC)
    with pytest.raises(SourceError, match=text):
        list(source.iterate(ABC))


def test_a_source_that_raises_says_where_and_keeps_the_cause() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(1)
        raise KeyError("optimizer")

    source = open_source(broken(), remembered=ABC)
    with pytest.raises(SourceError, match=r"KeyError after 1 tensors.*optimizer") as caught:
        list(source.iterate(ABC))
    assert isinstance(caught.value.__cause__, KeyError)
    source.drain()
    assert source.errors == []


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([("a", torch.zeros(1)), ("module.a", torch.zeros(1))], "yields 'a' twice"),
        ([], "no tensors"),
        ([("q.lora_A.x", torch.zeros(1))], "trainer's own"),
        ([("n" * 2000, torch.zeros(1))], "1 to 1024 bytes"),
    ],
)
def test_faults_of_a_paged_source(items: list[tuple[str, torch.Tensor]], text: str) -> None:
    with pytest.raises(SourceError, match=text):
        list(open_source(iter(items)).iterate_paged())


def test_an_iterable_goes_by_its_own_manifest_only() -> None:
    with pytest.raises(LocalProtocolError, match="own manifest"):
        open_source(pairs(a=torch.zeros(1)), remembered=ABC).iterate(Manifest(ABC.tensors[:1]))
    with pytest.raises(LocalProtocolError, match="do not page"):
        open_source(pairs(a=torch.zeros(1)), remembered=ABC).iterate_paged()


# ---- drain


def test_drain_consumes_what_is_left_and_remembers_what_went_wrong() -> None:
    taken: list[str] = []

    def source_items() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "axc":
            taken.append(name)
            yield name, torch.zeros(1)
        taken.append("end")
        raise ValueError("late")

    source = open_source(source_items(), remembered=ABC)
    source.drain()
    assert taken == [] and not source.started  # nothing was opened
    with pytest.raises(SourceError, match="yields 'x'"):
        list(source.iterate(ABC))
    assert taken == ["a", "x"]
    source.drain()
    assert taken == ["a", "x", "c", "end"]
    assert [str(e) for e in source.errors] == ["the source raised ValueError after 3 tensors: late [phase export]"]
    source.drain()
    assert len(source.errors) == 1


def test_drain_goes_on_after_an_item_that_is_no_pair() -> None:
    items: list[object] = [("a", torch.zeros(1)), 7, ("c", torch.zeros(1))]
    rest = iter(items)
    source = open_source(rest, remembered=ABC)  # type: ignore[arg-type]
    opened = source.iterate(ABC)
    next(opened)
    opened.close()  # type: ignore[attr-defined]
    source.drain()
    assert list(rest) == []
    assert ["item 1" in str(e) for e in source.errors] == [True]


def test_drain_of_an_iteration_that_was_opened_and_never_advanced_takes_it_all() -> None:
    rest = pairs(a=torch.zeros(1), b=torch.zeros(1), c=torch.zeros(1))
    source = open_source(rest, remembered=ABC)
    source.iterate(ABC)
    assert not source.started
    source.drain()
    assert list(rest) == [] and source.errors == []


class Sharded(torch.Tensor):
    """Stands for a DTensor: gathering is counted, and may fail."""

    def full_tensor(self) -> torch.Tensor:
        name, value = self.label  # type: ignore[attr-defined]
        GATHERED.append(name)
        if value is None:
            raise RuntimeError("peer is gone")
        return torch.full((2,), value)


GATHERED: list[str] = []


def sharded(name: str, value: float | None) -> Sharded:
    tensor = torch.zeros(2).as_subclass(Sharded)
    tensor.label = (name, value)  # type: ignore[attr-defined]
    tensor.detach = lambda: tensor  # type: ignore[method-assign]
    return tensor


def test_gathering_happens_in_turn_and_drain_gathers_the_rest() -> None:
    GATHERED.clear()
    tensors = {"a": sharded("a", 1.0), "plain": torch.zeros(2), "b": sharded("b", None), "c": sharded("c", 3.0)}
    source = open_source(tensors)
    manifest = manifest_of(source)
    assert GATHERED == []
    opened = source.iterate(manifest)
    assert next(opened).tolist() == [1, 1]
    assert GATHERED == ["a"]
    opened.close()  # type: ignore[attr-defined]
    source.drain()
    assert GATHERED == ["a", "b", "c"]
    assert ["gathering failed: RuntimeError: peer is gone" in str(e) for e in source.errors] == [True]


def test_a_stream_gathers_before_it_complains() -> None:
    GATHERED.clear()
    source = open_source(pairs(x=sharded("x", 1.0)), remembered=ABC)  # type: ignore[arg-type]
    with pytest.raises(SourceError, match="yields 'x'"):
        list(source.iterate(ABC))
    assert GATHERED == ["x"]


def fsdp_rank(rank: int, store: str) -> None:
    """One of two ranks: real FSDP2 modules over Gloo, mixed with plain tensors, ties, an uneven shard."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    whole = Tied()
    del whole.scale, whole.none, whole.turned  # FSDP2 takes no scalar and no strided parameters
    whole.add_module("odd", nn.Linear(4, 1))  # dim 0 is 1: rank 1 holds nothing of it
    expected = {name: t.tolist() for name, t in whole.state_dict().items()}
    model = fully_shard(whole, mesh=init_device_mesh("cpu", (2,)))
    cache = SourceCache()
    for _ in range(2):
        source = open_source(model, cache=cache)
        manifest = manifest_of(source)
        specs = {s.name: s for s in manifest}
        assert specs["emb.weight"].shape == (3, 2) and specs["emb.weight"].aliases == ("head.weight",)
        assert specs["odd.weight"].shape == (1, 4)
        got = values(source, Manifest(reversed(manifest.tensors)))
        assert got == {name: expected[name] for name in specs}, (rank, got)
    source = open_source(model)  # rank 0 stops after one tensor and drains; the other goes on: nobody hangs
    opened = source.iterate(manifest_of(source))
    for _ in range(1 if rank == 0 else 3):
        next(opened)
    source.drain()
    assert source.errors == []
    dist.barrier()
    dist.destroy_process_group()


def test_fsdp2_is_gathered_on_two_ranks(tmp_path: Path) -> None:
    path = [str(ROOT / part) for part in (".", "backends", "adapters")]
    code = (
        f"import sys, runpy; sys.path[:0] = {path!r}\n"
        f"runpy.run_path({__file__!r})['fsdp_rank'](int(sys.argv[1]), {str(tmp_path / 'store')!r})\n"
        "import os; os._exit(0)"  # torch's own threads now and then abort an orderly exit
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
