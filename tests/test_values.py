"""Values: how they are taken apart, named, put together again, and kept."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import pickle
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree

from hookline.values import (
    Arguments,
    Fields,
    Opaque,
    container_of,
    flatten,
    flatten_call,
    gradients,
    keep,
    paths_of,
    rebuild,
    swap_in,
    walk,
)


class Pair(NamedTuple):
    first: Any
    second: Any


class Triple(tuple):
    pass


class Strict(tuple):
    """Its constructor wants two numbers, so that it cannot be called with a sequence."""

    def __new__(cls, one: Any, two: Any) -> Strict:
        made = super().__new__(cls, (one, two))
        made.note = "kept"
        return made


@dataclasses.dataclass
class State:
    hidden: Any
    step: int = 3


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Any


@dataclasses.dataclass
class Slotted:
    __slots__ = ("hidden",)
    hidden: Any


class ModelOutput(collections.OrderedDict):
    """As in transformers: a dict whose items are attributes, and which names itself so."""


@dataclasses.dataclass
class Logits(ModelOutput):
    logits: Any = None
    extra: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Attrs:
    """What the attrs library makes of a class, as far as it can be seen."""

    __attrs_attrs__ = (types.SimpleNamespace(name="one"), types.SimpleNamespace(name="two"))

    def __init__(self, one: Any, two: Any) -> None:
        self.one, self.two, self._cache = one, two, "no field"


class Registered:
    """A class of somebody's own, told to torch's pytree."""

    def __init__(self, one: Any, two: Any) -> None:
        self.one, self.two = one, two


_pytree.register_pytree_node(Registered, lambda r: ([r.one, r.two], None), lambda parts, _: Registered(*parts))


class Colour(enum.IntEnum):
    RED = 5


def t(number: float = 0.0) -> Tensor:
    return torch.tensor([float(number)])


def doubled(value: Any) -> Any:
    leaves, structure = flatten(value)
    return rebuild(value, structure, [leaf * 2 if isinstance(leaf, Tensor) else leaf for leaf in leaves])


# ---------------------------------------------------------------- taking apart, putting together

CONTAINERS = [
    ("tuple", lambda a, b: (a, b), ["output[0]", "output[1]"]),
    ("list", lambda a, b: [a, b], ["output[0]", "output[1]"]),
    ("deque", lambda a, b: collections.deque([a, b], maxlen=5), ["output[0]", "output[1]"]),
    ("dict", lambda a, b: {"x": a, 2: b}, ["output['x']", "output[2]"]),
    ("OrderedDict", lambda a, b: collections.OrderedDict(x=a, y=b), ["output['x']", "output['y']"]),
    ("defaultdict", lambda a, b: collections.defaultdict(list, x=a, y=b), ["output['x']", "output['y']"]),
    ("UserDict", lambda a, b: collections.UserDict(x=a, y=b), ["output['x']", "output['y']"]),
    ("namedtuple", Pair, ["output.first", "output.second"]),
    ("tuple subclass", lambda a, b: Triple((a, b)), ["output[0]", "output[1]"]),
    ("tuple subclass of its own mind", Strict, ["output[0]", "output[1]"]),
    ("structseq", lambda a, b: torch.return_types.max((a, b)), ["output.values", "output.indices"]),
    ("dataclass", lambda a, b: State(a, b), ["output.hidden", "output.step"]),
    ("frozen dataclass", lambda a, b: Frozen((a, b)), ["output.hidden[0]", "output.hidden[1]"]),
    ("slots", lambda a, b: Slotted([a, b]), ["output.hidden[0]", "output.hidden[1]"]),
    ("ModelOutput", lambda a, b: Logits(a, b), ["output.logits", "output.extra"]),
    ("namespace", lambda a, b: types.SimpleNamespace(one=a, two=b), ["output.one", "output.two"]),
    ("attrs", Attrs, ["output.one", "output.two"]),
    ("registered", Registered, ["output[0]", "output[1]"]),
    ("nested", lambda a, b: ({"h": [a]}, Pair(None, (b,))), ["output[0]['h'][0]", "output[1].second[0]"]),
]


@pytest.mark.parametrize(("make", "paths"), [pytest.param(m, p, id=name) for name, m, p in CONTAINERS])
def test_every_container_gives_its_tensors_a_path_and_takes_others_back(make: Any, paths: list[str]) -> None:
    one, two = t(1), t(2)
    value = make(one, two)
    leaves, structure = flatten(value)
    assert [path for path, leaf in zip(paths_of(structure), leaves, strict=True) if isinstance(leaf, Tensor)] == paths
    new = doubled(value)
    assert type(new) is type(value)
    found = [leaf.item() for leaf in flatten(new)[0] if isinstance(leaf, Tensor)]
    assert found == [2.0, 4.0]
    assert [leaf.item() for leaf in flatten(value)[0] if isinstance(leaf, Tensor)] == [1.0, 2.0], "the old one changed"


@pytest.mark.parametrize("make", [pytest.param(m, id=name) for name, m, _ in CONTAINERS])
def test_nothing_is_copied_when_nothing_changes(make: Any) -> None:
    value = make(t(1), t(2))
    leaves, structure = flatten(value)
    assert rebuild(value, structure, leaves) is value


@pytest.mark.parametrize("make", [pytest.param(m, id=name) for name, m, _ in CONTAINERS])
def test_a_kept_value_has_the_paths_of_the_value(make: Any) -> None:
    """What ``walk`` says of the kept value is what ``paths_of`` said of the original, but for ``registered``."""
    value = make(t(1), t(2))
    leaves, structure = flatten(value)
    kept = keep(structure, leaves)
    expected = [path.replace("output[", "output.").rstrip("]") for path in paths_of(structure)]
    if not isinstance(value, Registered):
        expected = list(paths_of(structure))
    assert [path for path, _ in walk(kept)] == expected
    assert all(a is b for (_, a), b in zip(walk(kept), leaves, strict=True) if isinstance(b, Tensor))


def test_attributes_beside_the_items_survive() -> None:
    new = doubled(Strict(t(1), t(2)))
    assert type(new) is Strict and new.note == "kept"
    queue = doubled(collections.deque([t(1)], maxlen=5))
    assert queue.maxlen == 5
    default = doubled(collections.defaultdict(list, x=t(1)))
    assert default["missing"] == []


def test_a_model_output_keeps_items_and_attributes_in_step() -> None:
    new = doubled(Logits(t(1)))
    assert new["logits"].item() == new.logits.item() == 2.0
    assert list(new) == ["logits"] and new.extra is None


def test_packed_sequence() -> None:
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    leaves, structure = flatten(packed)
    assert paths_of(structure) == (
        "output.data",
        "output.batch_sizes",
        "output.sorted_indices",
        "output.unsorted_indices",
    )
    new = rebuild(packed, structure, [leaves[0] + 1, *leaves[1:]])
    assert type(new) is PackedSequence
    assert new.data.tolist() == [1.0, 1.0, 2.0, 2.0, 3.0]
    kept = keep(structure, leaves)
    assert kept.type_name == "PackedSequence" and kept.batch_sizes.tolist() == [2, 2, 1]


def test_torch_size_is_a_tuple_of_numbers() -> None:
    size = torch.Size([2, 3])
    leaves, structure = flatten(size)
    assert leaves == [2, 3] and keep(structure, leaves) == (2, 3)
    assert type(rebuild(size, structure, [4, 5])) is torch.Size


LEAVES = [None, 1, 1.5, True, "text", b"x", torch.float32, np.zeros(2), {1, 2}, nn.Linear(1, 1), State, object()]


@pytest.mark.parametrize("leaf", LEAVES)
def test_what_has_no_parts_is_a_leaf(leaf: Any) -> None:
    leaves, structure = flatten(leaf)
    assert structure is None and len(leaves) == 1 and leaves[0] is leaf
    assert paths_of(structure) == ("output",)
    assert rebuild(leaf, structure, ["other"]) == "other"


def test_a_parameter_and_a_tensor_subclass_are_leaves() -> None:
    class Marked(Tensor):
        pass

    marked = torch.zeros(2).as_subclass(Marked)
    assert flatten(marked) == ([marked], None)
    parameter = nn.Parameter(torch.zeros(2))
    assert flatten([parameter])[0][0] is parameter


def test_a_class_that_is_registered_later_is_seen() -> None:
    class Late:
        def __init__(self, one: Any) -> None:
            self.one = one

    assert container_of(Registered(1, 2)) is not None
    _pytree.register_pytree_node(Late, lambda r: ([r.one], None), lambda parts, _: Late(*parts))
    assert flatten(Late(5))[0] == [5]


def test_a_dataclass_with_a_field_that_was_never_set() -> None:
    @dataclasses.dataclass
    class Partly:
        a: Any
        b: Any = dataclasses.field(init=False)

    _, structure = flatten(Partly(t(1)))
    assert paths_of(structure) == ("output.a",)
    assert doubled(Partly(t(1))).a.item() == 2.0


def test_containers_that_contain_themselves_end() -> None:
    """Parents that know their children, who know their parents: every walk along them must end, and soon."""

    @dataclasses.dataclass
    class Node:
        value: Any
        parent: Any = None
        children: list[Any] = dataclasses.field(default_factory=list)

    root = Node(t(0))
    root.children = [Node(t(number), root) for number in range(1, 30)]
    leaves, structure = flatten(root)
    assert [leaf.item() for leaf in leaves if isinstance(leaf, Tensor)] == list(map(float, range(30)))
    assert sum(leaf is root for leaf in leaves) == 29
    kept = keep(structure, leaves)
    assert kept.children[0].parent == Opaque("Node")
    twice: list[Any] = []
    twice += [twice, twice]
    assert flatten(twice)[0] == [twice, twice]


def test_keys_that_are_equal_have_their_own_paths() -> None:
    """1 == True == 1.0, and a cache by structure would take one for the other."""
    assert [paths_of(flatten({key: t()})[1]) for key in (1, True, 1.0)] == [
        ("output[1]",), ("output[True]",), ("output[1.0]",),
    ]  # fmt: skip


def test_very_deep_nesting_ends_in_one_leaf() -> None:
    value: Any = t(1)
    for _ in range(500):
        value = [value]
    leaves, structure = flatten(value)
    assert len(leaves) == 1 and isinstance(leaves[0], list)
    assert isinstance(keep(structure, leaves), list)


def test_one_tensor_in_two_places_is_two_leaves() -> None:
    one = t(1)
    assert flatten([one, one])[0][0] is flatten([one, one])[0][1]
    assert len(flatten([one, one])[0]) == 2


# ---------------------------------------------------------------- arguments


def test_arguments_are_named_by_position_and_keyword() -> None:
    one, two, three = t(1), t(2), t(3)
    leaves, structure = flatten_call((one, [two]), {"mask": three, "flag": True})
    assert paths_of(structure, "args") == ("args[0]", "args[1][0]", "kwargs['mask']", "kwargs['flag']")
    kept = keep(structure, leaves)
    assert isinstance(kept, Arguments)
    assert kept.args[0] is one and kept.args[1][0] is two and kept.kwargs == {"mask": three, "flag": True}
    assert [path for path, _ in walk(kept)] == list(paths_of(structure, "args"))


@pytest.mark.parametrize("args", [(), (1,), (None,), ((1, 2),)])
def test_calls_with_few_arguments(args: tuple[Any, ...]) -> None:
    leaves, structure = flatten_call(args, {})
    assert keep(structure, leaves) == Arguments(args, {})
    assert rebuild((args, {}), structure, leaves) == (args, {})


def test_the_fast_way_for_one_tensor_is_the_plain_way() -> None:
    one = t(1)
    fast, fast_structure = flatten_call((one,), {})
    slow, slow_structure = flatten_call(([one],), {})
    assert fast[0] is slow[0] is one
    assert paths_of(fast_structure, "args") == ("args[0]",)
    assert paths_of(slow_structure, "args") == ("args[0][0]",)
    assert rebuild(((one,), {}), fast_structure, ["new"]) == (("new",), {})


# ---------------------------------------------------------------- swapping in place


def test_swapping_keeps_the_callers_containers_and_puts_the_leaves_back() -> None:
    one, two, three = t(1), t(2), t(3)
    inner, state = {"x": two}, State(three)
    args = ([one, inner], state)
    _, structure = flatten(args)
    undo: list[Any] = []
    new = swap_in(args, structure, ["a", "b", "c", 3], undo)
    assert new[0] is args[0] and new[1] is state and args[0][1] is inner
    assert args[0][0] == "a" and inner["x"] == "b" and state.hidden == "c"
    for put_back in reversed(undo):
        put_back()
    assert args[0][0] is one and inner["x"] is two and state.hidden is three


def test_what_the_module_wrote_into_a_container_stays() -> None:
    box = {"x": t(1), "gone": t(2)}
    undo: list[Any] = []
    swap_in(box, flatten(box)[1], ["a", "b"], undo)
    box["x"] = "written by the module"
    del box["gone"]
    for put_back in undo:
        put_back()
    assert box == {"x": "written by the module"}


def test_frozen_and_tuple_values_are_swapped_as_well() -> None:
    frozen = Frozen(t(1))
    undo: list[Any] = []
    assert swap_in(frozen, flatten(frozen)[1], ["a"], undo) is frozen and frozen.hidden == "a"
    undo[0]()
    assert isinstance(frozen.hidden, Tensor)
    pair = Pair(t(1), t(2))
    assert swap_in(pair, flatten(pair)[1], ["a", "b"], []) == Pair("a", "b")


def test_a_registered_class_is_passed_on_as_it_is() -> None:
    """Such as a key-value cache, which the module writes to and the caller goes on using."""
    value = Registered(t(1), t(2))
    undo: list[Any] = []
    assert swap_in(value, flatten(value)[1], ["a", "b"], undo) is value
    assert isinstance(value.one, Tensor) and not undo


# ---------------------------------------------------------------- kept values


def test_scalars_are_kept_as_plain_ones_and_other_objects_by_name() -> None:
    value = (1, 1.5, True, None, "x", Colour.RED, np.float64(2.5), np.int64(3), b"x", torch.float32, object())
    leaves, structure = flatten(value)
    kept = keep(structure, leaves)
    assert kept == (
        1, 1.5, True, None, "x", 5, 2.5, Opaque("int64"), Opaque("bytes"), Opaque("dtype"), Opaque("object"),
    )  # fmt: skip
    assert [type(part) for part in kept[:7]] == [int, float, bool, type(None), str, int, float]


def test_keys_that_are_no_scalars_are_kept_as_text() -> None:
    value = {(1, 2): t(1), "a": t(2), 3: t(3), 1.5: t(4), None: t(5)}
    leaves, structure = flatten(value)
    assert list(keep(structure, leaves)) == ["(1, 2)", "a", 3, 1.5, None]


def test_fields_read_by_key_and_by_name() -> None:
    fields = Fields("Output", {"logits": 1, "loss": 2})
    assert fields.logits == fields["logits"] == 1 and fields.type_name == "Output"
    assert list(fields) == ["logits", "loss"] and fields == {"logits": 1, "loss": 2}
    assert repr(fields) == "Output(logits=1, loss=2)"
    with pytest.raises(AttributeError, match=r"Output has no field 'logit'; it has: logits, loss"):
        _ = fields.logit
    with pytest.raises(AttributeError, match="Empty has no field 'x'; it has: none"):
        _ = Fields("Empty").x


def test_a_field_wins_over_the_method_of_dict_of_the_same_name() -> None:
    """torch.topk returns ``values`` and ``indices``; the first is a method of every dict."""
    result = torch.topk(torch.tensor([3.0, 1.0, 2.0]), 2)
    leaves, structure = flatten(result)
    kept = keep(structure, leaves)
    assert kept.values.tolist() == [3.0, 2.0] and kept.indices.tolist() == [0, 2]
    assert [path for path, _ in walk(kept)] == ["output.values", "output.indices"]
    again = Fields("x", {"copy": 1, "items": 2, "type_name": 3})
    assert again.copy == 1 and dict(again.items()) == {"copy": 1, "items": 2, "type_name": 3}
    assert again.type_name == "x" and again["type_name"] == 3


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_kept_values_can_be_copied(copied: Any) -> None:
    value = Fields("Output", {"values": 1, "state": Fields("State", {"h": 2})})
    again = copied(value)
    assert type(again) is Fields and again == value and again.type_name == "Output" and again.state.type_name == "State"


def test_an_opaque_value_is_one_leaf() -> None:
    assert list(walk((Opaque("Cache"), 1))) == [("output[0]", Opaque("Cache")), ("output[1]", 1)]


def test_walk_names_the_root_as_it_is_told() -> None:
    assert [path for path, _ in walk((1, {"a": 2}), "value")] == ["value[0]", "value[1]['a']"]
    assert list(walk(5, "value")) == [("value", 5)]
    assert list(walk(())) == []


def test_gradients_know_their_paths() -> None:
    _, structure = flatten_call((t(1),), {"mask": t(2)})
    made = gradients([None, t(1)], structure, "args")
    assert made.paths == ("args[0]", "kwargs['mask']") and isinstance(made, tuple) and len(made) == 2


def test_a_structure_holds_no_tensor_and_can_be_a_key() -> None:
    big = torch.zeros(4)
    _, structure = flatten({"x": [big, Pair(big, 1)]})
    assert {structure: 1}[flatten({"x": [t(1), Pair(t(2), 3)]})[1]] == 1
    assert "tensor" not in repr(structure)


# ---------------------------------------------------------------- for any value

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False), st.text(max_size=3))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(State, inner, st.integers()),
    ),
    max_leaves=12,
)


def plainly(value: Any, path: str) -> list[tuple[str, Any]]:
    """Paths and leaves written down without the code under test."""
    if isinstance(value, Pair):
        return plainly(value.first, f"{path}.first") + plainly(value.second, f"{path}.second")
    if isinstance(value, State):
        return plainly(value.hidden, f"{path}.hidden") + plainly(value.step, f"{path}.step")
    if isinstance(value, (list, tuple)):
        return [found for index, part in enumerate(value) for found in plainly(part, f"{path}[{index}]")]
    if isinstance(value, dict):
        return [found for key, part in value.items() for found in plainly(part, f"{path}[{key!r}]")]
    return [(path, value)]


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_any_value_goes_apart_and_together(value: Any) -> None:
    expected = plainly(value, "output")
    leaves, structure = flatten(value)
    assert list(zip(paths_of(structure), leaves, strict=True)) == expected
    assert rebuild(value, structure, leaves) is value
    marked = rebuild(value, structure, [f"<{path}>" for path in paths_of(structure)])
    assert plainly(marked, "output") == [(path, f"<{path}>") for path, _ in expected]
    assert list(walk(keep(structure, leaves))) == expected


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_any_value_is_the_same_after_a_swap_and_its_undo(value: Any) -> None:
    before = plainly(value, "output")
    _, structure = flatten(value)
    undo: list[Any] = []
    swapped = swap_in(value, structure, [f"<{path}>" for path, _ in before], undo)
    assert plainly(swapped, "output") == [(path, f"<{path}>") for path, _ in before]
    for put_back in reversed(undo):
        put_back()
    assert plainly(value, "output") == before
