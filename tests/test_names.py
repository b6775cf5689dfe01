"""Cleaning, renaming and grouping of names."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbus.adapter import GroupRule, GroupRules
from weightbus.errors import ConfigError
from weightbus.manifest import Manifest, TensorSpec
from weightbus.names import Grouping, NameRule, clean, grouping, is_leftover, parse_rules, rename


def manifest(*names: str | tuple[str, ...]) -> Manifest:
    pairs = [(name, ()) if isinstance(name, str) else (name[0], name[1:]) for name in names]
    return Manifest([TensorSpec(name, (2,), "float32", aliases) for name, aliases in pairs])


@pytest.mark.parametrize(
    ("raw", "bare"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("module.layers.0.weight", "layers.0.weight"),
        ("module.module.w", "w"),
        ("_orig_mod.layers.0.w", "layers.0.w"),
        ("_orig_mod.module.layers.0.w", "layers.0.w"),
        ("module._orig_mod.layers.0.w", "layers.0.w"),
        ("layers.0._orig_mod.w", "layers.0.w"),
        ("layers.0._checkpoint_wrapped_module.attn.w", "layers.0.attn.w"),
        ("_fsdp_wrapped_module.layers.1._fsdp_wrapped_module._checkpoint_wrapped_module.w", "layers.1.w"),
        ("base_model.model.model.layers.0.q.base_layer.weight", "model.layers.0.q.weight"),
        ("module.base_model.model.w", "w"),
        ("base_model.model.head.modules_to_save.default.weight", "head.weight"),
        ("vision.module.w", "vision.module.w"),
        ("base_model.weight", "base_model.weight"),
        ("module", "module"),
        ("_orig_mod", "_orig_mod"),
        ("my_orig_mod.w", "my_orig_mod.w"),
        ("q.base_layer_norm.w", "q.base_layer_norm.w"),
    ],
)
def test_clean(raw: str, bare: str) -> None:
    assert clean(raw) == bare
    assert clean(bare) == bare


@pytest.mark.parametrize(
    ("name", "leftover"),
    [
        ("q.lora_A.default.weight", True),
        ("q.lora_magnitude_vector.default.weight", True),
        ("head.original_module.weight", True),
        ("layers.0._flat_param", True),
        ("_flat_param_3", True),
        ("head.modules_to_save.default.weight", False),
        ("q.base_layer.weight", False),
        ("explora_A.weight", False),
    ],
)
def test_leftovers(name: str, leftover: bool) -> None:
    assert is_leftover(name) is leftover


def test_the_first_rule_that_matches_the_whole_name_applies_to_aliases_too() -> None:
    rules = parse_rules({r"model\.(.*)": r"language_model.\1", r"model\.head.*": "never", r"head": r"lm_head"})
    renamed, faults = rename(manifest("model.a", ("model.head", "head"), "xmodel.b"), rules)
    assert faults == []
    assert [spec.names for spec in renamed] == [
        ("language_model.a",),
        ("language_model.head", "lm_head"),
        ("xmodel.b",),
    ]
    assert [(spec.shape, spec.dtype) for spec in renamed] == [((2,), "float32")] * 3


def test_no_rules_change_nothing() -> None:
    given_manifest = manifest("a")
    assert rename(given_manifest, ()) == (given_manifest, [])


def test_collisions_are_faults_that_name_both() -> None:
    offered = manifest("a.x", "b.x", "c")
    kept, faults = rename(offered, parse_rules({r"[ab]\.x": "y", "c": "c"}))
    assert kept is offered
    assert [(f.kind, f.name) for f in faults] == [("rename", "y")]
    assert "'a.x' and 'b.x'" in faults[0].detail


def test_a_rename_onto_an_existing_name_and_a_merge_of_ties_are_faults() -> None:
    _, faults = rename(manifest("a", "b"), parse_rules({"a": "b"}))
    assert [f.name for f in faults] == ["b"]
    _, faults = rename(manifest(("emb", "head")), parse_rules({"emb|head": "tied"}))
    assert [f.name for f in faults] == ["tied"]


def test_a_name_that_vanishes_is_a_fault() -> None:
    _, faults = rename(manifest("drop", "keep"), parse_rules({"drop": ""}))
    assert [(f.kind, f.name) for f in faults] == [("rename", "drop")]


def test_a_swap_is_fine() -> None:
    renamed, faults = rename(manifest("a", "b"), parse_rules({"a": "b", "b": "a"}))
    assert faults == []
    assert [spec.name for spec in renamed] == ["b", "a"]


def test_faults_are_not_shared_between_answers() -> None:
    offered, rules = manifest("a", "b"), parse_rules({"[ab]": "c"})
    rename(offered, rules)[1].clear()
    assert len(rename(offered, rules)[1]) == 1


def test_bad_rules_are_listed_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rules([("(", "x"), ("a", r"\2"), ("b", r"\g<no>"), ("c", r"\q"), ("ok", "fine"), 7])  # type: ignore[list-item]
    text = str(caught.value)
    for part in ("'('", "no group 2", "no group no", r"unknown escape \q", "7 is no pair"):
        assert part in text
    assert "fine" not in text


@settings(max_examples=80, deadline=None)
@given(
    pattern=st.sampled_from([r"(.*)", r"(a+)?(b*)c?", r"(?P<x>[ab%{}]+)(.*)", r"(a)|(b)"]),
    template=st.sampled_from([r"\1", r"x\g<1>y", r"100%\1{}", r"\\\1", r"%s\1%d", r"\g<1>\g<1>"]),
    name=st.text("abc%{}.", min_size=1, max_size=8),
)
def test_templates_expand_as_re_does(pattern: str, template: str, name: str) -> None:
    renamed, faults = rename(manifest(name), [NameRule(pattern, template)])
    match = re.fullmatch(pattern, name)
    expected = match.expand(template) if match else name
    assert ([spec.name for spec in renamed] == [expected]) if expected else faults


QKV = GroupRule(r"(.*)\.(q|k|v)\.(w|b)", r"\1.qkv.\3")
SCALE = GroupRule(r"(.*)\.(w|scale)", r"\1.w")
LAYER = GroupRule(r"(layer\d+)\..*", r"\1")


def test_groups_are_united_over_members_and_rules() -> None:
    offered = manifest("l.q.w", "x", "l.k.w", "l.q.scale", "l.v.w", "l.v.b", "y.w")
    both = [(GroupRules(together=[QKV]), ()), (GroupRules(together=[SCALE]), ())]
    assert grouping(offered, both, reorder=False) == Grouping(tuple(range(7)), ((0, 2, 3, 4),))
    assert grouping(offered, both[1:], reorder=False).groups == ((0, 3),)
    assert grouping(offered, [], reorder=True) == Grouping(tuple(range(7)), ())


def test_groups_see_each_members_own_names() -> None:
    offered = manifest("a.1", "a.2", "a.3")
    rules = GroupRules(together=[QKV])
    renames = parse_rules({r"a\.1": "l.q.w", r"a\.3": "l.k.w"})
    assert grouping(offered, [(rules, ())], reorder=False).groups == ()
    assert grouping(offered, [(rules, renames)], reorder=False).groups == ((0, 2),)


def test_an_alias_joins_its_tensor_to_a_group() -> None:
    offered = manifest(("emb", "l.q.w"), "z", "l.k.w")
    assert grouping(offered, [(GroupRules(together=[QKV]), ())], reorder=True) == Grouping((0, 2, 1), ((0, 2),))


def test_aliases_of_one_tensor_alone_are_no_group() -> None:
    assert grouping(manifest(("l.q.w", "l.k.w")), [(GroupRules(together=[QKV]), ())], reorder=True).groups == ()


def test_order_is_stable_and_nests_groups_in_layers() -> None:
    offered = manifest("layer1.q.w", "emb", "layer0.q.w", "layer1.n", "layer0.n", "layer1.k.w", "layer0.v.w", "norm")
    rules = GroupRules(together=[QKV], adjacent=[LAYER])
    found = grouping(offered, [(rules, ())], reorder=True)
    assert [offered.tensors[i].name for i in found.order] == [
        "layer1.q.w", "layer1.k.w", "layer1.n", "emb", "layer0.q.w", "layer0.v.w", "layer0.n", "norm",
    ]  # fmt: skip
    assert found.groups == ((0, 5), (2, 6))
    assert grouping(offered, [(rules, ())], reorder=False) == Grouping(tuple(range(8)), ((0, 5), (2, 6)))


def test_the_same_question_about_other_rules_gets_another_answer() -> None:
    offered = manifest("layer0.a", "x", "layer0.b")
    with_layer = [(GroupRules(adjacent=[LAYER]), ())]
    assert grouping(offered, with_layer, reorder=True).order == (0, 2, 1)
    assert grouping(offered, with_layer, reorder=False).order == (0, 1, 2)
    assert grouping(offered, [(GroupRules(), ())], reorder=True).order == (0, 1, 2)
    assert grouping(manifest("x", "layer0.a", "layer0.b"), with_layer, reorder=True).order == (0, 1, 2)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from("qkvn")), unique=True, max_size=30),
    st.booleans(),
)
def test_order_is_a_permutation_with_every_key_contiguous(
    places: list[tuple[int, int, str]], with_modules: bool
) -> None:
    offered = manifest(*(f"layer{a}.m{b}.{c}.w" for a, b, c in places)) if places else Manifest([])
    modules = (GroupRule(r"(layer\d+\.m\d+)\..*", r"\1"),) if with_modules else ()
    found = grouping(offered, [(GroupRules(together=[QKV], adjacent=(LAYER, *modules)), ())], reorder=True)
    assert sorted(found.order) == list(range(len(places)))
    position = {index: at for at, index in enumerate(found.order)}
    expected: dict[object, list[int]] = {}
    for index, (layer, module, leaf) in enumerate(places):
        expected.setdefault(layer, []).append(index)
        if with_modules:
            expected.setdefault((layer, module), []).append(index)
        if leaf != "n":
            expected.setdefault((layer, module, "qkv"), []).append(index)
    for same in expected.values():
        at = sorted(position[index] for index in same)
        assert at == list(range(at[0], at[0] + len(at)))
    qkv = [tuple(same) for key, same in expected.items() if isinstance(key, tuple) and len(key) == 3 and len(same) > 1]
    assert set(found.groups) == set(qkv)
