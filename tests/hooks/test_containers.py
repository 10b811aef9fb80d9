"""Every way in which tensors are handed in and out: what the hooks see is what the clone-isolated reference sees."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree

import hookline

from .reference import Computes, close, equal, isolated, leaf, leaves_of, vector

WEIGHT = vector(0.5, -1.0, 2.0)


@dataclasses.dataclass
class Pair:
    first: Tensor
    second: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenPair:
    first: Tensor
    second: Any = None


class ModelOutput(collections.OrderedDict[str, Any]):
    """As in transformers: a dict whose items are attributes as well."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclasses.dataclass
class CausalOutput(ModelOutput):
    logits: Any = None
    states: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self[field.name] = getattr(self, field.name)


class Named(NamedTuple):
    first: Tensor
    second: Any


class Sizes(tuple):  # type: ignore[type-arg]
    """A tuple without names, with a constructor of its own."""

    def __new__(cls, first: Any, second: Any) -> Sizes:
        return super().__new__(cls, (first, second))


class Config(dict):  # type: ignore[type-arg]
    pass


class Registered:
    """A class that is registered with torch's pytree, such as a key-value cache."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    _pytree.register_pytree_node(
        Registered, lambda r: ([r.first, r.second], None), lambda children, _: Registered(*children)
    )


def _hooked(module: nn.Module) -> list[tuple[Any, Any]]:
    seen: list[tuple[Any, Any]] = []
    hookline.register_backward_hook(module, lambda module, *grads: seen.append(grads))
    return seen


# ---------------------------------------------------------------- outputs

OUTPUTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[str]]] = {
    "tensor": (lambda a, b: a, ["output"]),
    "tuple": (lambda a, b: (a, b), ["output[0]", "output[1]"]),
    "tuple of one": (lambda a, b: (a,), ["output[0]"]),
    "list": (lambda a, b: [a, b], ["output[0]", "output[1]"]),
    "dict": (lambda a, b: {"x": a, 7: b}, ["output['x']", "output[7]"]),
    "dict subclass": (lambda a, b: Config(x=a, y=b), ["output['x']", "output['y']"]),
    "ordered dict": (lambda a, b: collections.OrderedDict(x=a, y=b), ["output['x']", "output['y']"]),
    "default dict": (lambda a, b: collections.defaultdict(list, x=a, y=b), ["output['x']", "output['y']"]),
    "user dict": (lambda a, b: collections.UserDict(x=a, y=b), ["output['x']", "output['y']"]),
    "deque": (lambda a, b: collections.deque([a, b]), ["output[0]", "output[1]"]),
    "dataclass": (lambda a, b: Pair(a, b), ["output.first", "output.second"]),
    "frozen dataclass": (lambda a, b: FrozenPair(a, b), ["output.first", "output.second"]),
    "model output": (lambda a, b: CausalOutput(a, (b,)), ["output.logits", "output.states[0]"]),
    "named tuple": (lambda a, b: Named(a, [b]), ["output.first", "output.second[0]"]),
    "tuple subclass": (lambda a, b: Sizes(a, b), ["output[0]", "output[1]"]),
    "registered class": (lambda a, b: Registered(a, b), ["output[0]", "output[1]"]),
    "nested": (
        lambda a, b: {"x": [(a, None)], "y": Pair({"z": b}, "text")},
        ["output['x'][0][0]", "output['x'][0][1]", "output['y'].first['z']", "output['y'].second"],
    ),
    "twice the same": (lambda a, b: (a, a, b), ["output[0]", "output[1]", "output[2]"]),
    "empty parts": (lambda a, b: ((), a, [], {}, None), ["output[1]", "output[4]"]),
}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Registered):
        value = (value.first, value.second)
    if isinstance(value, (collections.UserDict, collections.deque)):
        value = dict(value) if isinstance(value, collections.UserDict) else list(value)
    return [t for t in leaves_of(value) if isinstance(t, Tensor)]


def weighted_sum(value: Any) -> Tensor:
    """A loss in which every tensor of the value has a factor of its own."""
    return torch.stack([(i + 2) * t.sum() for i, t in enumerate(tensors_in(value))]).sum()


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_gradients_of_every_leaf_of_an_output_are_seen(name: str) -> None:
    make, paths = OUTPUTS[name]
    module, x = Computes(lambda weight, x: make(x * weight, x * 3)), leaf()
    seen = _hooked(module)
    output = module(x * 1)
    weighted_sum(output).backward()
    ((grad_input, grad_output),) = seen
    assert list(grad_output.paths) == paths
    # By hand: the factor of a tensor arrives at each of its entries, and its own slope times that at the input.
    slopes = {"a": WEIGHT, "b": vector(3, 3, 3)}
    letters = {"tuple of one": "a", "tensor": "a", "empty parts": "a", "twice the same": "aab"}.get(name, "ab")
    expected = sum(((i + 2) * slopes[letter] for i, letter in enumerate(letters)), vector(0, 0, 0))
    assert close(grad_input, [expected])
    assert equal(x.grad, grad_input[0])
    if name != "twice the same":
        arriving = [g for g in grad_output if g is not None]
        assert equal(arriving, [vector(f, f, f) for f in range(2, 2 + len(letters))])


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_keeps_its_type_and_its_values(name: str) -> None:
    make, _ = OUTPUTS[name]
    module = Computes(lambda weight, x: make(x * weight, x * 3))
    bare = module(leaf() * 1)
    _hooked(module)
    observed = module(leaf() * 1)
    assert type(observed) is type(bare)
    assert equal(tensors_in(observed), tensors_in(bare))
    assert all(t.requires_grad for t in tensors_in(observed))


def test_one_object_at_two_places_of_an_output_stays_one_object() -> None:
    module = Computes(lambda weight, x: (lambda y: (y, [y]))(x * weight))
    seen = _hooked(module)
    first, (second,) = module(leaf())
    assert first is second
    (first + second * 2).sum().backward()
    ((_, grad_output),) = seen
    assert equal(tuple(grad_output), (vector(3, 3, 3), None)), "the whole gradient stands at the first place"


def test_named_fields_of_a_dataclass_survive_that_are_no_tensors() -> None:
    module = Computes(lambda weight, x: Pair(x * weight, {"note": "kept", "n": 3}))
    seen = _hooked(module)
    output = module(leaf())
    output.first.sum().backward()
    assert output.second == {"note": "kept", "n": 3}
    assert tuple(seen[0][1])[1:] == (None, None)


def test_attributes_of_a_model_output_and_its_items_are_the_same_tensor() -> None:
    module = Computes(lambda weight, x: CausalOutput(x * weight))
    _hooked(module)
    output = module(leaf())
    assert output.logits is output["logits"] and output.logits.grad_fn is not None


def test_what_torch_returns_by_name_is_seen() -> None:
    module = Computes(lambda weight, x: torch.max(x * weight, dim=0))
    seen = _hooked(module)
    output = module(leaf(1, 2, 3) * 1)
    assert type(output) is torch.return_types.max
    output.values.backward()
    ((grad_input, grad_output),) = seen
    assert grad_output.paths == ("output.values", "output.indices")
    assert equal(tuple(grad_input), (vector(0, 0, 2),)) and grad_output[1] is None


def test_a_packed_sequence_is_seen_on_both_sides() -> None:
    lstm = nn.LSTM(3, 4, batch_first=True).double()
    lengths = torch.tensor([2, 1])
    x = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)

    def run(module: nn.Module) -> tuple[Tensor, Tensor | None]:
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        output, (hidden, cell) = module(packed)
        assert isinstance(output, PackedSequence)
        loss = (output.data * 2).sum() + hidden.sum() + cell.sum() * 3
        return loss, torch.autograd.grad(loss, x)[0]

    bare = run(lstm)
    seen = _hooked(lstm)
    assert equal(run(lstm), bare)
    ((grad_input, grad_output),) = seen
    assert grad_output.paths[0] == "output[0].data" and grad_input.paths[0] == "args[0].data"
    expected_in, expected_out = isolated(
        lambda data, sizes: lstm(PackedSequence(data, sizes)),
        tuple(pack_padded_sequence(x, lengths, batch_first=True)[:2]),
        {},
        lambda output: (output[0].data * 2).sum() + output[1][0].sum() + output[1][1].sum() * 3,
    )
    assert close([grad_input[0]], [expected_in[0]])
    assert close([g for g in grad_output if g is not None], [g for g in expected_out if g is not None])


# ---------------------------------------------------------------- inputs


def _total(weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return sum(((i + 1) * weight * t for i, t in enumerate(tensors_in((*args, kwargs)))), weight * 0)


INPUTS: dict[str, tuple[Callable[[Tensor, Tensor], tuple[tuple[Any, ...], dict[str, Any]]], list[str]]] = {
    "two arguments": (lambda a, b: ((a, b), {}), ["args[0]", "args[1]"]),
    "keywords only": (lambda a, b: ((), {"x": a, "y": b}), ["kwargs['x']", "kwargs['y']"]),
    "list": (lambda a, b: (([a, b],), {}), ["args[0][0]", "args[0][1]"]),
    "tuple in keyword": (lambda a, b: ((a,), {"states": (b,)}), ["args[0]", "kwargs['states'][0]"]),
    "dict": (lambda a, b: (({"x": a, "y": b},), {}), ["args[0]['x']", "args[0]['y']"]),
    "dataclass": (lambda a, b: ((Pair(a, b),), {}), ["args[0].first", "args[0].second"]),
    "frozen dataclass": (lambda a, b: ((FrozenPair(a, b),), {}), ["args[0].first", "args[0].second"]),
    "model output": (lambda a, b: ((CausalOutput(a, b),), {}), ["args[0].logits", "args[0].states"]),
    "named tuple": (lambda a, b: ((Named(a, b),), {}), ["args[0].first", "args[0].second"]),
    "nested": (
        lambda a, b: (({"x": [{"y": (a,)}]}, 3, None), {"z": Pair(b)}),
        ["args[0]['x'][0]['y'][0]", "args[1]", "args[2]", "kwargs['z'].first", "kwargs['z'].second"],
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_this_calls_share_of_every_leaf_of_the_arguments_is_seen(name: str) -> None:
    make, paths = INPUTS[name]
    module, a, b = Computes(_total), leaf(), leaf()
    seen = _hooked(module)
    h, k = a * 1, b * 1
    args, kwargs = make(h, k)
    (module(*args, **kwargs).sum() + (h * 100 + k * 1000).sum()).backward()
    ((grad_input, _),) = seen
    assert list(grad_input.paths) == paths
    assert equal([g for g in grad_input if g is not None], [WEIGHT, 2 * WEIGHT])
    assert equal([a.grad, b.grad], [100 + WEIGHT, 1000 + 2 * WEIGHT])


@pytest.mark.parametrize("name", INPUTS)
def test_the_callers_containers_hold_the_callers_tensors_again(name: str) -> None:
    make, _ = INPUTS[name]
    module, a, b = Computes(_total), leaf(), leaf()
    _hooked(module)
    args, kwargs = make(a, b)
    module(*args, **kwargs)
    found = tensors_in((*args, kwargs))
    assert found[0] is a and found[1] is b


def test_the_callers_containers_hold_the_callers_tensors_again_after_an_exception() -> None:
    def failing(weight: Tensor, values: list[Tensor]) -> None:
        assert values[0] is not x, "inside the call another tensor stands there"
        raise KeyError("inside")

    module, x = Computes(failing), leaf()
    _hooked(module)
    values = [x]
    with pytest.raises(KeyError):
        module(values)
    assert values[0] is x


def test_what_a_module_writes_into_a_list_or_dict_reaches_the_caller() -> None:
    def function(weight: Tensor, values: list[Any], cache: dict[str, Any]) -> Tensor:
        values.append(values[0] * 2)
        cache["new"] = cache["old"] * 3
        del cache["gone"]
        cache["old"] = cache["old"] + 1
        return values[0] * weight

    module, x, old = Computes(function), leaf() * 1, leaf() * 1
    _hooked(module)
    values, cache = [x], {"old": old, "gone": old}
    module(values, cache)
    assert values[0] is x and equal(values[1], x * 2)
    assert list(cache) == ["old", "new"]
    assert equal(cache["old"], old + 1) and equal(cache["new"], old * 3)


def test_gradients_through_what_a_module_put_into_a_list_are_whole() -> None:
    def function(weight: Tensor, x: Tensor, values: list[Any]) -> Tensor:
        values.append(x * 4)
        return x * weight

    def run(hooked: bool) -> Tensor | None:
        module, x, values = Computes(function), leaf(), []
        if hooked:
            _hooked(module)
        y = module(x * 1, values)
        (y + values[0]).sum().backward()
        return x.grad

    assert equal(run(hooked=True), run(hooked=False))


def test_a_registered_class_is_handed_on_as_it_is_so_that_the_module_can_write_into_it() -> None:
    def function(weight: Tensor, cache: Registered) -> Tensor:
        assert cache is given
        cache.second = cache.first * 2
        return cache.second * weight

    module, x = Computes(function), leaf()
    given = Registered(x, None)
    _hooked(module)
    module(given).sum().backward()
    assert equal(given.second, x * 2) and equal(x.grad, 2 * WEIGHT)


def test_a_list_that_contains_itself_does_no_harm() -> None:
    values: list[Any] = [leaf()]
    values.append(values)
    module = Computes(lambda weight, values: values[0] * weight)
    seen = _hooked(module)
    module(values).sum().backward()
    assert equal(seen[0][0][0], WEIGHT)


def test_attributes_of_an_input_tensor_reach_the_module_and_those_of_an_output_the_caller() -> None:
    def function(weight: Tensor, x: Tensor) -> Tensor:
        y = x * weight
        y.label = x.label + " out"  # type: ignore[attr-defined]
        return y

    module, x = Computes(function), leaf() * 1
    x.label = "in"  # type: ignore[attr-defined]
    _hooked(module)
    assert module(x).label == "in out"


# ---------------------------------------------------------------- kinds of tensors


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_gradients_have_the_dtype_and_the_bits_of_a_run_without_hooks(dtype: torch.dtype) -> None:
    def run(hooked: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        module = nn.Linear(3, 3).to(dtype)
        seen = _hooked(module) if hooked else []
        x = torch.randn(2, 3, dtype=dtype, requires_grad=True)
        y = module(x)
        (y.abs() if dtype.is_complex else y).float().sum().backward()
        return y.detach(), x.grad, module.weight.grad, *(tuple(g) for pair in seen for g in pair)

    bare, observed = run(hooked=False), run(hooked=True)
    assert equal(observed[:3], bare)
    (grad_input,), (grad_output,) = observed[3:]
    assert grad_input.dtype == grad_output.dtype == dtype and equal(grad_input, bare[1])


@pytest.mark.parametrize("plain", [torch.tensor([2]), torch.tensor([True]), torch.tensor(2.0), 2, None, "text"])
def test_an_input_that_takes_no_gradient_has_none(plain: Any) -> None:
    module = Computes(lambda weight, plain, x: x * weight)
    seen = _hooked(module)
    module(plain, leaf()).sum().backward()
    assert equal(tuple(seen[0][0]), (None, WEIGHT))


def test_tensors_without_elements_and_without_axes_are_seen() -> None:
    module = Computes(lambda weight, empty, scalar: (empty * 2, scalar * 3))
    seen = _hooked(module)
    empty = torch.zeros(0, 3, requires_grad=True)
    scalar = torch.tensor(1.0, requires_grad=True)
    first, second = module(empty, scalar)
    (first.sum() + second).backward()
    assert equal(tuple(seen[0][0]), (torch.zeros(0, 3), torch.tensor(3.0)))


def test_tensors_on_the_meta_device_are_seen() -> None:
    module = nn.Linear(3, 4, device="meta")
    seen = _hooked(module)
    hookline.register_forward_hook(module, lambda *_: None)
    module(torch.ones(2, 3, device="meta", requires_grad=True)).sum().backward()
    ((grad_input, grad_output),) = seen
    assert grad_input[0].shape == (2, 3) and grad_output[0].shape == (2, 4) and grad_input[0].is_meta


def test_sparse_gradients_of_a_weight_stay_sparse() -> None:
    def run(hooked: bool) -> Tensor:
        torch.manual_seed(0)
        module = nn.Embedding(10, 3, sparse=True)
        seen = _hooked(module) if hooked else []
        module(torch.tensor([1, 1, 4])).sum().backward()
        assert len(seen) == hooked
        assert module.weight.grad is not None and module.weight.grad.is_sparse
        return module.weight.grad.to_dense()

    assert equal(run(hooked=True), run(hooked=False))


@pytest.mark.parametrize("is_leaf", [True, False])
def test_sparse_inputs_and_sparse_gradients_are_seen(is_leaf: bool) -> None:
    module = Computes(lambda weight, x, y: torch.sparse.mm(x, y))
    seen = _hooked(module)
    x = torch.eye(3, dtype=torch.float64).to_sparse().requires_grad_()
    y = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    module(x if is_leaf else x * 2, y).sum().backward()
    ((grad_input, _),) = seen
    assert equal(grad_input[1], torch.full((3, 2), 1.0 if is_leaf else 2.0, dtype=torch.float64))
    assert x.grad is not None
    assert equal(grad_input[0].to_dense() * (1 if is_leaf else 2), x.grad.to_dense())


def test_a_subclass_of_tensor_stays_one() -> None:
    class Tagged(Tensor):
        pass

    kinds = []
    module = Computes(lambda weight, x: (kinds.append(type(x)), x * 2)[1])
    seen = _hooked(module)
    x = torch.ones(3).as_subclass(Tagged).requires_grad_()
    y = module(x)
    y.sum().backward()
    assert kinds == [Tagged] and type(y) is Tagged and equal(torch.Tensor(seen[0][0][0]), torch.full((3,), 2.0))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_seen(layout: torch.layout) -> None:
    module = nn.Linear(3, 2)
    seen = _hooked(module)
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout, requires_grad=True)
    module(x).to_padded_tensor(0).sum().backward()
    assert x.grad is not None
    if layout == torch.strided:  # one of the limits: autograd can make no alias of such a tensor
        assert not seen
        return
    ((grad_input, _),) = seen
    assert grad_input[0].is_nested
    assert equal(grad_input[0].to_padded_tensor(0), x.grad.to_padded_tensor(0))
