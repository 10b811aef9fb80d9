"""Backward hooks at the boundary of a module: whatever goes in and comes out, and whatever is written in place."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import hookline

from ..hooks.reference import close, equal, isolated, leaves_of, mapped
from .catalogue import RIGHT, fault

# What torch says of complex parameters, of the projections of an LSTM, and of its own legacy hooks.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning"),
]

DTYPES = {
    "fp32": (torch.float32, 1e-5),
    "fp64": (torch.float64, 1e-12),
    "bf16": (torch.bfloat16, 2e-2),
    "complex": (torch.complex64, 1e-5),
}
REAL = ["fp32", "fp64", "bf16"]
Grads = dict[str, "Tensor | None"]


class Runs(nn.Module):
    """A module that runs a function of its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def weighted(output: Any) -> Tensor:
    """A loss under which every floating leaf of an output gets a gradient of its own."""
    total: Any = 0
    for place, value in enumerate(leaves_of(output)):
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            real = torch.view_as_real(value) if value.is_complex() else value
            total = total + (place + 1) * real.square().sum()
    return total


def only(*places: int) -> Callable[[Any], Tensor]:
    """The same of some leaves alone."""
    return lambda output: weighted([leaf for place, leaf in enumerate(leaves_of(output)) if place in places])


def hooked(module: nn.Module) -> list[tuple[Grads, Grads]]:
    """The events of a module from here on: gradients by value path."""
    seen: list[tuple[Grads, Grads]] = []

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        seen.append((by_path(grad_input), by_path(grad_output)))

    hookline.register_backward_hook(module, hook)
    return seen


def by_path(grads: Any) -> Grads:
    return dict(zip(grads.paths, grads, strict=True))


def trained(module: nn.Module, args: Any, kwargs: Any, loss: Callable[[Any], Tensor]) -> list[Tensor | None]:
    """The gradients of all leaves and parameters after one backward pass."""
    leaves = mapped(lambda t: t.detach().clone().requires_grad_(t.requires_grad), (args, kwargs))
    inner_args, inner_kwargs = mapped(torch.clone, leaves)
    loss(module(*inner_args, **inner_kwargs)).backward()
    grads = [leaf.grad for leaf in leaves_of(leaves) if isinstance(leaf, Tensor)]
    return grads + [parameter.grad for parameter in module.parameters()]


def event_of(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[[Any], Tensor] = weighted,
    rtol: float = 1e-12,
) -> tuple[Grads, Grads]:
    """The one event of a call, checked against clones, and that all leaves train as without a hook."""
    kwargs, bare = kwargs or {}, copy.deepcopy(module)
    expected = isolated(copy.deepcopy(module), args, kwargs, lambda output: loss(mapped(torch.clone, output)))
    seen = hooked(module)
    assert equal(trained(module, args, kwargs, loss), trained(bare, args, kwargs, loss))
    assert len(seen) == 1
    for grads, wanted in zip(seen[0], expected, strict=True):
        assert close(grads.values(), wanted, rtol)
    return seen[0]


def in_all(names: list[str] | None = None) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("dtype", "rtol"), [DTYPES[n] for n in names or DTYPES], ids=names or list(DTYPES))


# ---------------------------------------------------------------- the module, not its last operation


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * torch.tanh(x)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "sequence": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    "one layer": lambda: nn.Linear(3, 2),
    "residual": Gated,
    "nested": lambda: nn.Sequential(Gated(), nn.Sequential(Gated(), nn.Linear(3, 1))),
    "no parameters": lambda: Runs(lambda x: (x * x + 1).sqrt().sum(-1)),
}


@fault(1, RIGHT, "gradients at the boundary of the module, one entry for each input")
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@in_all()
def test_gradients_are_those_of_the_whole_module(make: Any, dtype: torch.dtype, rtol: float) -> None:
    grad_input, grad_output = event_of(make().to(dtype), (drawn(5, 3, dtype=dtype),), rtol=rtol)
    assert list(grad_input) == ["args[0]"] and list(grad_output) == ["output"]


@fault(2, RIGHT, "one entry for each input, however many there are")
@pytest.mark.parametrize("count", [1, 2, 3, 6])
@in_all()
def test_each_of_many_inputs_has_its_gradient(count: int, dtype: torch.dtype, rtol: float) -> None:
    module = Runs(lambda *inputs: sum(x * (place + 2) for place, x in enumerate(inputs)))
    grad_input, _ = event_of(module, tuple(drawn(2, dtype=dtype) for _ in range(count)), rtol=rtol)
    assert list(grad_input) == [f"args[{place}]" for place in range(count)]
    assert all(grad is not None for grad in grad_input.values())


# ---------------------------------------------------------------- in place


def _fill_a_row(y: Tensor) -> Tensor:
    y[0] = 0
    return y


def _multiply_through_a_view(y: Tensor) -> Tensor:
    y[:, 1:].mul_(2)
    return y


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.ReLU(inplace=True),
    "relu6": nn.ReLU6(inplace=True),
    "leaky relu": nn.LeakyReLU(0.1, inplace=True),
    "elu": nn.ELU(inplace=True),
    "silu": nn.SiLU(inplace=True),
    "hardswish": nn.Hardswish(inplace=True),
    "function": F.relu_,
    "method": lambda y: y.mul_(3),
    "clamp": lambda y: y.clamp_(min=0),
    "mask": lambda y: y.masked_fill_(torch.eye(3, dtype=torch.bool), 0),
    "assignment": _fill_a_row,
    "view": _multiply_through_a_view,
}


@fault(3, RIGHT, "the gradient at the output as it left the module, before it was overwritten")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@in_all(REAL)
def test_what_comes_after_may_write_in_place(write: Any, dtype: torch.dtype, rtol: float) -> None:
    event_of(nn.Linear(4, 3).to(dtype), (drawn(3, 4, dtype=dtype),), loss=lambda y: weighted(write(y)), rtol=rtol)


@fault(3, RIGHT, "")
@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm2d(2), lambda: nn.GroupNorm(1, 2)])
def test_convolution_norm_and_activation_in_place(norm: Any) -> None:
    first, x = nn.Sequential(nn.Conv2d(2, 2, 3), norm()).double(), drawn(2, 2, 5, 5)
    event_of(first, (x,), loss=lambda y: weighted(F.relu(y, inplace=True)))


@fault(4, RIGHT, "the gradients of the values before and after the write")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@in_all(REAL)
def test_the_module_may_write_in_place(write: Any, dtype: torch.dtype, rtol: float) -> None:
    module = write if isinstance(write, nn.Module) else Runs(write)
    event_of(module, (drawn(3, 3, dtype=dtype),), rtol=rtol)


@fault(4, RIGHT, "")
@pytest.mark.parametrize("view", [lambda h: h[1:], lambda h: h.t(), lambda h: h.view(-1), lambda h: h[..., ::2]])
def test_the_module_may_write_into_a_view_whose_base_is_used(view: Callable[[Tensor], Tensor]) -> None:
    module, x = nn.ReLU(inplace=True), torch.linspace(-2, 3, 9, dtype=torch.float64).view(3, 3).requires_grad_()
    seen = hooked(module)
    h, factors = x * 5, torch.arange(1.0, 10, dtype=torch.float64).view(3, 3)
    module(view(h))
    (h * factors).sum().backward()
    inside = torch.zeros(3, 3, dtype=torch.bool)
    view(inside).fill_(True)
    passes = (~inside | (x.detach() > 0)).double()
    assert equal(x.grad, 5 * factors * passes)
    assert equal(seen, [({"args[0]": view(factors * passes)}, {"output": view(factors)})])


def _iadd(y: Tensor, x: Tensor) -> Tensor:
    y += x
    return y


def _imul(y: Tensor, x: Tensor) -> Tensor:
    y *= x
    return y


def _add_into_a_part(y: Tensor, x: Tensor) -> Tensor:
    y[1:] += x[1:]
    return y


@fault(5, RIGHT, "the module's own share, without that of the shortcut")
@pytest.mark.parametrize("join", [_iadd, _imul, _add_into_a_part, lambda y, x: y.add_(x, alpha=2).neg_()])
@in_all()
def test_a_shortcut_may_be_added_in_place(join: Any, dtype: torch.dtype, rtol: float) -> None:
    block, x = nn.Linear(3, 3).to(dtype), drawn(2, 3, dtype=dtype)
    shortcut = x.detach() * 2
    event_of(block, (x,), loss=lambda y: weighted(join(y, shortcut)), rtol=rtol)


@fault(5, RIGHT, "")
def test_a_residual_block_of_in_place_operations_gives_each_module_its_share() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.second = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out = self.second(self.act(self.first(x)))
            out += x
            return self.act(out)

    block, x = Block().double(), drawn(2, 3)
    bare = copy.deepcopy(block)
    seen = {name: hooked(module) for name, module in block.named_modules()}
    assert equal(trained(block, (x,), {}, weighted), trained(bare, (x,), {}, weighted))

    first = bare.first(x)
    hidden = first.relu()
    second = bare.second(hidden)
    joined = second + x
    output = joined.relu()
    points = {"first": first, "second": second, "output": output, "joined": joined, "hidden": hidden, "x": x}
    found = dict(zip(points, torch.autograd.grad(weighted(output), points.values()), strict=True))
    wanted = {
        "": [(found["x"], found["output"])],
        "first": [(found["x"] - found["joined"], found["first"])],
        "second": [(found["hidden"], found["second"])],
        "act": [(found["joined"], found["output"]), (found["first"], found["hidden"])],
    }
    for name, events in seen.items():
        got = [(grad_input["args[0]"], grad_output["output"]) for grad_input, grad_output in events]
        assert [close(a, b, 1e-9) for a, b in zip(got, wanted[name], strict=True)] == [True] * len(got), name


# ---------------------------------------------------------------- what comes out


@dataclasses.dataclass
class Result:
    hidden: Any
    logits: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: Any
    logits: Any = None


class Output(collections.OrderedDict[str, Any]):
    """As ``transformers.ModelOutput``: a dict whose items are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclasses.dataclass
class CausalOutput(Output):
    hidden: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Pair(NamedTuple):
    hidden: Any
    logits: Any = None


PlainPair = collections.namedtuple("PlainPair", "hidden logits")


class State(tuple):  # type: ignore[type-arg]
    """Its constructor wants one sequence."""

    def __new__(cls, items: Any) -> State:
        return super().__new__(cls, items)


class Tagged(tuple):  # type: ignore[type-arg]
    """Its constructor wants a tag and two entries, none of which has a default."""

    tag: str

    def __new__(cls, tag: str, hidden: Any, logits: Any) -> Tagged:
        made = super().__new__(cls, (hidden, logits))
        made.tag = tag
        return made


class Closed(tuple):  # type: ignore[type-arg]
    """It has no constructor at all."""

    def __new__(cls, *_: Any) -> Closed:
        raise TypeError("use Closed.of")

    @classmethod
    def of(cls, *items: Any) -> Closed:
        return tuple.__new__(cls, items)


Make = Callable[[Tensor, Tensor], Any]
DICTS: dict[str, tuple[Make, list[str]]] = {
    "dict": (lambda a, b: {"a": a, "b": b}, ["['a']", "['b']"]),
    "ordered": (lambda a, b: collections.OrderedDict(b=a, a=b), ["['b']", "['a']"]),
    "default": (lambda a, b: collections.defaultdict(list, a=a, b=b), ["['a']", "['b']"]),
    "numbers as keys": (lambda a, b: {0: a, 1: b}, ["[0]", "[1]"]),
    "nested": (lambda a, b: {"a": {"b": [a, (b,)]}}, ["['a']['b'][0]", "['a']['b'][1][0]"]),
    "other entries": (lambda a, b: {"name": "x", "a": a, "b": b, "n": 3}, ["['name']", "['a']", "['b']", "['n']"]),
}
CLASSES: dict[str, tuple[Make, list[str]]] = {
    "dataclass": (lambda a, b: Result(a, b), [".hidden", ".logits"]),
    "frozen": (lambda a, b: Frozen(a, b), [".hidden", ".logits"]),
    "a default is None": (lambda a, b: Result(a + b), [".hidden", ".logits"]),
    "nested": (lambda a, b: Result([a], {"b": b}), [".hidden[0]", ".logits['b']"]),
    "model output": (lambda a, b: CausalOutput(a, b), [".hidden", ".logits"]),
    "model output in a tuple": (lambda a, b: (CausalOutput(a), b), ["[0].hidden", "[1]"]),
}
LISTS: dict[str, tuple[Make, list[str]]] = {
    "list": (lambda a, b: [a, b], ["[0]", "[1]"]),
    "of one": (lambda a, b: [a + b], ["[0]"]),
    "nested": (lambda a, b: [[a], [[b]]], ["[0][0]", "[1][0][0]"]),
    "in a tuple": (lambda a, b: ([a], b), ["[0][0]", "[1]"]),
    "None in it": (lambda a, b: [None, a, b], ["[0]", "[1]", "[2]"]),
}
NAMED: dict[str, tuple[Make, list[str]]] = {
    "typing": (lambda a, b: Pair(a, b), [".hidden", ".logits"]),
    "collections": (lambda a, b: PlainPair(a, b), [".hidden", ".logits"]),
    "default": (lambda a, b: Pair(a * b), [".hidden", ".logits"]),
    "nested": (lambda a, b: Pair([a], Pair(b)), [".hidden[0]", ".logits.hidden", ".logits.logits"]),
}
TUPLES: dict[str, tuple[Make, list[str]]] = {
    "one sequence": (lambda a, b: State((a, b)), ["[0]", "[1]"]),
    "more arguments": (lambda a, b: Tagged("t", a, b), ["[0]", "[1]"]),
    "no constructor": (lambda a, b: Closed.of(a, b), ["[0]", "[1]"]),
    "nested": (lambda a, b: State([a, State([b])]), ["[0]", "[1][0]"]),
}


def each_of(table: dict[str, tuple[Make, list[str]]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("make", "paths"), table.values(), ids=table)


def check_output(make: Make, paths: list[str], dtype: torch.dtype, rtol: float) -> None:
    """Every leaf has its gradient, its path, and the container is what it was; also when one leaf alone is used."""
    module = Runs(lambda x: make(x * 2, x * x))
    x = drawn(3, dtype=dtype)
    wanted = [f"output{path}" for path in paths]
    _, grads = event_of(module, (x,), rtol=rtol)
    assert list(grads) == wanted
    last = max(place for place, grad in enumerate(grads.values()) if grad is not None)
    module = Runs(module.function)
    _, grads = event_of(module, (x,), loss=only(last), rtol=rtol)
    assert [name for name, grad in grads.items() if grad is not None] == [wanted[last]]
    bare, output = module.function(x), module(x)
    assert type(output) is type(bare) and equal(leaves_of(output), leaves_of(bare))


@fault(6, RIGHT, "one gradient for each leaf, named by its key")
@each_of(DICTS)
@in_all()
def test_a_dict_comes_out(make: Make, paths: list[str], dtype: torch.dtype, rtol: float) -> None:
    check_output(make, paths, dtype, rtol)


@fault(7, RIGHT, "one gradient for each leaf, named by its field")
@each_of(CLASSES)
@in_all()
def test_a_dataclass_or_model_output_comes_out(make: Make, paths: list[str], dtype: torch.dtype, rtol: float) -> None:
    check_output(make, paths, dtype, rtol)


@fault(7, RIGHT, "")
def test_a_transformers_model_output_comes_out() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    module = Runs(lambda x: outputs.BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x, x * x)))
    _, grads = event_of(module, (drawn(3),))
    assert list(grads) == ["output.last_hidden_state", "output.hidden_states[0]", "output.hidden_states[1]"]


@fault(8, RIGHT, "one gradient for each entry")
@each_of(LISTS)
@in_all()
def test_a_list_comes_out(make: Make, paths: list[str], dtype: torch.dtype, rtol: float) -> None:
    check_output(make, paths, dtype, rtol)


@fault(113, RIGHT, "one gradient for each field, and the output is of the same class")
@each_of(NAMED)
@in_all()
def test_a_named_tuple_comes_out(make: Make, paths: list[str], dtype: torch.dtype, rtol: float) -> None:
    check_output(make, paths, dtype, rtol)


@fault(106, RIGHT, "one gradient for each entry, and the output is of the same class with its attributes")
@each_of(TUPLES)
@in_all()
def test_a_subclass_of_tuple_comes_out(make: Make, paths: list[str], dtype: torch.dtype, rtol: float) -> None:
    check_output(make, paths, dtype, rtol)


@fault(106, RIGHT, "")
def test_a_subclass_of_tuple_keeps_its_attributes_and_goes_in_as_well() -> None:
    module = Runs(lambda state: Tagged(state.tag + "!", *(x * 2 for x in state)))
    seen, a, b = hooked(module), drawn(2), drawn(2)
    output = module(Tagged("t", a, b))
    (output[0] + 3 * output[1]).sum().backward()
    assert type(output) is Tagged and output.tag == "t!"
    ones = torch.ones(2, dtype=torch.float64)
    assert equal(seen, [({"args[0][0]": 2 * ones, "args[0][1]": 6 * ones}, {"output[0]": ones, "output[1]": 3 * ones})])


STRUCTS: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda x: x.max(dim=1),
    "min": lambda x: x.min(dim=0, keepdim=True),
    "topk": lambda x: x.topk(2, dim=-1),
    "sort": lambda x: x.sort(dim=1),
    "median": lambda x: x.median(dim=1),
    "kthvalue": lambda x: x.kthvalue(2, dim=1),
    "cummax": lambda x: x.cummax(dim=1),
    "qr": lambda x: torch.linalg.qr(x),
    "slogdet": lambda x: torch.linalg.slogdet(x),
    "svd": lambda x: torch.linalg.svd(x @ x.t(), full_matrices=False),
    "in a tuple": lambda x: (x, x.max(dim=1)),
}


@fault(23, RIGHT, "one gradient for each field, None for the indices, and the output is of the same class")
@pytest.mark.parametrize("function", STRUCTS.values(), ids=STRUCTS)
@in_all(["fp32", "fp64"])
def test_a_struct_sequence_comes_out(function: Any, dtype: torch.dtype, rtol: float) -> None:
    module, x = Runs(function), drawn(3, 3, dtype=dtype)
    event_of(module, (x,), loss=only(0, 1), rtol=rtol)
    assert type(module(x)) is type(function(x)) and equal(tuple(module(x)), tuple(function(x)))


@fault(23, RIGHT, "")
def test_the_fields_of_a_struct_sequence_are_named() -> None:
    module, x = Runs(lambda x: x.max(dim=1)), torch.tensor([[1.0, 3.0], [5.0, 2.0]]).requires_grad_()
    seen = hooked(module)
    (module(x).values * torch.tensor([10.0, 20.0])).sum().backward()
    arrives = {"output.values": torch.tensor([10.0, 20.0]), "output.indices": None}
    assert equal(seen, [({"args[0]": torch.tensor([[0.0, 10.0], [20.0, 0.0]])}, arrives)])


# ---------------------------------------------------------------- recurrent modules

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(3, 4),
    "GRU": lambda: nn.GRU(3, 4),
    "RNN": lambda: nn.RNN(3, 4),
    "two layers": lambda: nn.LSTM(3, 4, num_layers=2),
    "both directions": lambda: nn.GRU(3, 4, bidirectional=True),
    "batch first": lambda: nn.LSTM(3, 4, batch_first=True),
    "projected": lambda: nn.LSTM(3, 4, proj_size=2),
}


@fault(9, RIGHT, "the gradients of output, `h` and `c`, and of the states that were passed in")
@pytest.mark.parametrize("make", RECURRENT.values(), ids=RECURRENT)
@in_all(["fp32", "fp64"])
def test_the_states_of_recurrent_modules_have_gradients(make: Any, dtype: torch.dtype, rtol: float) -> None:
    _, grads = event_of(make().to(dtype), (drawn(5, 2, 3, dtype=dtype),), rtol=rtol)
    assert all(grad is not None for grad in grads.values())


@fault(9, RIGHT, "")
@pytest.mark.parametrize("cell", [nn.LSTM, nn.LSTMCell])
def test_the_states_that_go_in_have_gradients(cell: Any) -> None:
    steps, layers = ((5,), (1,)) if cell is nn.LSTM else ((), ())
    states = (drawn(*layers, 2, 4), drawn(*layers, 2, 4))
    grad_input, grad_output = event_of(cell(3, 4).double(), (drawn(*steps, 2, 3), states), rtol=1e-9)
    assert list(grad_input) == ["args[0]", "args[1][0]", "args[1][1]"]
    nested = ["output[0]", "output[1][0]", "output[1][1]"]
    assert list(grad_output) == (nested if cell is nn.LSTM else ["output[0]", "output[1]"])


@fault(10, RIGHT, "called, with None for the outputs that the loss does not use")
@pytest.mark.parametrize("leaf", [1, 2])
@pytest.mark.parametrize("inner", [False, True])
@in_all(["fp32", "fp64"])
def test_a_loss_on_one_state_alone(leaf: int, inner: bool, dtype: torch.dtype, rtol: float) -> None:
    module = nn.LSTM(3, 4).to(dtype)
    wrapped = Runs(lambda x: module(x)) if inner else module
    _, grads = event_of(wrapped, (drawn(5, 2, 3, dtype=dtype),), loss=only(leaf), rtol=rtol)
    assert [grad is not None for grad in grads.values()] == [place == leaf for place in range(3)]


@fault(11, RIGHT, "the gradients of `.data` on both sides, and of the states")
@pytest.mark.parametrize("make", [lambda: nn.GRU(3, 4), lambda: nn.LSTM(3, 4, bidirectional=True)], ids=["GRU", "LSTM"])
@pytest.mark.parametrize("lengths", [(5, 3, 3), (2, 5, 4)], ids=["sorted", "unsorted"])
@in_all(["fp32", "fp64"])
def test_packed_sequences_go_in_and_come_out(make: Any, lengths: Any, dtype: torch.dtype, rtol: float) -> None:
    packed = pack_padded_sequence(drawn(5, 3, 3, dtype=dtype), lengths, enforce_sorted=False)
    grad_input, grad_output = event_of(make().to(dtype), (packed,), rtol=rtol)
    assert grad_input["args[0].data"] is not None and grad_output["output[0].data"] is not None
    event_of(make().to(dtype), (packed,), loss=lambda output: weighted(output[0].data), rtol=rtol)


@fault(11, RIGHT, "")
def test_a_packed_sequence_stays_one() -> None:
    module, packed = nn.GRU(3, 4), pack_padded_sequence(torch.randn(5, 2, 3), [5, 3])
    bare = module(packed)
    hooked(module)
    output = module(packed)
    assert type(output[0]) is PackedSequence and equal(leaves_of(output), leaves_of(bare))


# ---------------------------------------------------------------- what goes in


@fault(12, RIGHT, "one entry for each keyword argument too, as `kwargs['name']`")
@in_all()
def test_keyword_arguments_have_gradients(dtype: torch.dtype, rtol: float) -> None:
    module = Runs(lambda x, scale, shift=None: x * scale + shift)
    x, scale, shift = (drawn(3, dtype=dtype) for _ in range(3))
    grads, _ = event_of(module, (x,), {"scale": scale, "shift": shift}, rtol=rtol)
    assert list(grads) == ["args[0]", "kwargs['scale']", "kwargs['shift']"]
    assert all(grad is not None for grad in grads.values())


@fault(12, RIGHT, "")
def test_keyword_arguments_that_are_no_tensors_have_none() -> None:
    module = Runs(lambda x, factor, name, y: x * factor + y)
    grads, _ = event_of(module, (drawn(3),), {"factor": 2.5, "name": "n", "y": drawn(3)})
    assert [name for name, grad in grads.items() if grad is None] == ["kwargs['factor']", "kwargs['name']"]


@fault(13, RIGHT, "the gradients of the keyword arguments, after the module's own backward")
@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2), lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh())])
@in_all()
def test_keyword_arguments_alone(make: Any, dtype: torch.dtype, rtol: float) -> None:
    module, order = make().to(dtype), []
    for parameter in module.parameters():
        parameter.register_hook(lambda grad: order.append("parameter"))
    hookline.register_backward_hook(module, lambda *_: order.append("hook"))
    weighted(module(input=drawn(4, 3, dtype=dtype))).backward()
    assert order == ["parameter", "parameter", "hook"]
    grads, _ = event_of(make().to(dtype), (), {"input": drawn(4, 3, dtype=dtype)}, rtol=rtol)
    assert list(grads) == ["kwargs['input']"] and grads["kwargs['input']"] is not None


NESTED: dict[str, tuple[Callable[[Any], Tensor], Callable[[Tensor, Tensor], Any], list[str]]] = {
    "dict": (lambda d: d["x"] * d["y"], lambda a, b: {"x": a, "y": b}, ["['x']", "['y']"]),
    "list": (lambda v: v[0] * v[1], lambda a, b: [a, b], ["[0]", "[1]"]),
    "tuple": (lambda v: v[0] * v[1], lambda a, b: (a, b), ["[0]", "[1]"]),
    "dataclass": (lambda r: r.hidden * r.logits, lambda a, b: Result(a, b), [".hidden", ".logits"]),
    "named tuple": (lambda r: r.hidden * r.logits, lambda a, b: Pair(a, b), [".hidden", ".logits"]),
    "deep": (lambda v: v[0]["a"][0] * v[1].hidden, lambda a, b: [{"a": (a,)}, Pair(b, 7)], []),
}


@fault(14, RIGHT, "one entry for each leaf, with its value path")
@pytest.mark.parametrize(("function", "nest", "paths"), NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("as_keyword", [False, True])
@in_all()
def test_tensors_nested_in_an_argument_have_gradients(
    function: Any, nest: Any, paths: list[str], as_keyword: bool, dtype: torch.dtype, rtol: float
) -> None:
    nested = nest(drawn(3, dtype=dtype), drawn(3, dtype=dtype))
    args, kwargs = ((), {"value": nested}) if as_keyword else ((nested,), {})
    grads, _ = event_of(Runs(lambda value: function(value)), args, kwargs, rtol=rtol)
    root = "kwargs['value']" if as_keyword else "args[0]"
    paths = paths or ["[0]['a'][0]", "[1].hidden", "[1].logits"]
    assert list(grads) == [root + path for path in paths]
    assert sum(grad is not None for grad in grads.values()) == 2


UNUSED: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Any]]] = {
    "second argument": (lambda x, u: x * 2, lambda x, u: ((x, u), {})),
    "first argument": (lambda u, x: x * 2, lambda x, u: ((u, x), {})),
    "keyword": (lambda x, u=None: x * 2, lambda x, u: ((x,), {"u": u})),
    "in a dict": (lambda d: d["x"] * 2, lambda x, u: (({"x": x, "u": u},), {})),
    "in another output": (lambda x, u: (x * 2, u * 3)[0], lambda x, u: ((x, u), {})),
}


@fault(16, RIGHT, "None, and its `.grad` stays None")
@pytest.mark.parametrize(("function", "arguments"), UNUSED.values(), ids=UNUSED)
@in_all()
def test_an_input_that_is_not_used_has_no_gradient(
    function: Any, arguments: Any, dtype: torch.dtype, rtol: float
) -> None:
    args, kwargs = arguments(x := drawn(2, dtype=dtype), unused := drawn(2, dtype=dtype))
    module = Runs(function)
    grads, _ = event_of(module, args, kwargs, rtol=rtol)
    assert sorted(grad is None for grad in grads.values()) == [False, True]
    weighted(module(*args, **kwargs)).backward()
    assert unused.grad is None and x.grad is not None


@fault(16, RIGHT, "")
def test_an_optimizer_does_not_move_an_input_that_is_not_used() -> None:
    module, x, unused = Runs(lambda x, u: x * 2), drawn(2), drawn(2)
    before = unused.detach().clone()
    hooked(module)
    optimizer = torch.optim.SGD([x, unused], lr=0.1, weight_decay=0.5)
    weighted(module(x, unused)).backward()
    optimizer.step()
    assert equal(unused.detach(), before)


@fault(111, RIGHT, "None, and its `.grad` stays None")
@pytest.mark.parametrize("integer", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("as_keyword", [False, True])
@in_all()
def test_an_integer_input_has_no_gradient(
    integer: torch.dtype, as_keyword: bool, dtype: torch.dtype, rtol: float
) -> None:
    module, mask = Runs(lambda x, mask: x * mask), torch.tensor([1, 0, 1]).to(integer)
    x = drawn(3, dtype=dtype)
    args, kwargs = ((x,), {"mask": mask}) if as_keyword else ((x, mask), {})
    grads, _ = event_of(module, args, kwargs, rtol=rtol)
    assert [grad is None for grad in grads.values()] == [False, True]
    weighted(module(*args, **kwargs)).backward()
    assert mask.grad is None and not mask.requires_grad


@fault(111, RIGHT, "")
def test_indices_next_to_a_table_have_no_gradient() -> None:
    module, table, index = Runs(F.embedding), drawn(5, 2), torch.tensor([[0, 4], [4, 1]])
    grads, _ = event_of(module, (index, table), loss=lambda output: output.sum())
    uses = torch.tensor([1.0, 1, 0, 0, 2], dtype=torch.float64)
    assert grads["args[0]"] is None and equal(grads["args[1]"], uses[:, None].expand(5, 2))


# ---------------------------------------------------------------- one tensor, several arguments


class Asks(nn.Module):
    """Computes in another way where it gets one tensor twice."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        self.same = query is key
        return query * 2 + key * 3


class AsksInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Asks()

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.inner(query, key=key)


class AsksNot(nn.Module):
    """The same the other way round."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        self.same = not (query is not key)
        return query * 2 + key * 3


@fault(
    19, RIGHT, "one tensor stays one where the module asks; the gradient stands at its first place, None at the next"
)
@pytest.mark.parametrize("make", [Asks, AsksInside, AsksNot])
@pytest.mark.parametrize("as_keyword", [False, True])
@in_all()
def test_one_tensor_passed_twice_stays_one(make: Any, as_keyword: bool, dtype: torch.dtype, rtol: float) -> None:
    module, x, other = make(), drawn(2, dtype=dtype), drawn(2, dtype=dtype)
    seen = hooked(module)
    asking = getattr(module, "inner", module)
    hooked(asking)
    output = module(x, key=x) if as_keyword else module(x, x)
    assert asking.same
    output.real.sum().backward()
    assert equal(x.grad, torch.full_like(x, 5))
    assert equal(tuple(seen[0][0].values()), (torch.full_like(x, 5), None))
    module(x, other)
    assert not asking.same


@fault(19, RIGHT, "")
def test_one_tensor_passed_twice_has_a_share_at_each_place_where_the_module_does_not_ask() -> None:
    module, x = Runs(lambda query, key: query * 2 + key * 3), drawn(2)
    seen = hooked(module)
    module(x, x).sum().backward()
    ones = torch.ones(2, dtype=torch.float64)
    assert equal(seen[0][0], {"args[0]": 2 * ones, "args[1]": 3 * ones}) and equal(x.grad, 5 * ones)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm)
        return func(*args, **(kwargs or {}))


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x)[0]
        return output


ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "attention": SelfAttention,
    "batch first": lambda: SelfAttention(batch_first=True),
    "bias": lambda: SelfAttention(add_bias_kv=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    "decoder layer": lambda: Layered(nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0)),
}


class Layered(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x, x.flip(0))
        return output


@fault(20, RIGHT, "the same path: as many matrix products, the same bits forward and backward")
@pytest.mark.parametrize("make", ATTENTION.values(), ids=ATTENTION)
@in_all(REAL)
def test_attention_computes_the_same_bits(make: Any, dtype: torch.dtype, rtol: float) -> None:
    module = make().to(dtype)
    bare, x = copy.deepcopy(module), drawn(3, 5, 4, dtype=dtype)
    for below in module.modules():
        hooked(below)
    with Products() as observed:
        output = module(x)
    with Products() as expected:
        assert equal(output, bare(x))
    assert observed.count == expected.count > 0
    assert equal(trained(module, (x,), {}, weighted), trained(bare, (x,), {}, weighted))


@fault(20, RIGHT, "")
def test_self_attention_has_the_right_gradient_at_the_first_place() -> None:
    attention, x = nn.MultiheadAttention(4, 2).double(), drawn(3, 1, 4)
    (expected,) = torch.autograd.grad(weighted(attention(x, x, x)[0]), x)
    seen = hooked(attention)
    weighted(attention(x, x, x)[0]).backward()
    (grads, _), (first, *others) = seen[0], seen[0][0].values()
    assert len(grads) == 3 and close((first,), (expected,)) and others == [None, None]


# ---------------------------------------------------------------- what hooks return, and kinds of registration

RETURNS: dict[str, tuple[Make, Callable[[Any], Any]]] = {
    "tensor": (lambda a, b: a + b, lambda grads: grads[0] * 10),
    "tuple": (lambda a, b: a + b, lambda grads: (grads[0] * 10,)),
    "list": (lambda a, b: a + b, lambda grads: [grads[0] * 10]),
    "tensor for a tuple of one": (lambda a, b: (a + b,), lambda grads: grads[0] * 10),
    "tuple of two": (lambda a, b: (a, b), lambda grads: (grads[0] * 10, grads[1] * 10)),
    "dict for a dict": (lambda a, b: {"a": a, "b": b}, lambda grads: {"a": grads[0] * 10, "b": grads[1] * 10}),
}


@fault(24, RIGHT, "one tensor, or a tuple, takes the place of the gradient")
@pytest.mark.parametrize(("make", "result"), RETURNS.values(), ids=RETURNS)
@pytest.mark.parametrize("batch", [1, 3])
@in_all()
def test_a_pre_hook_replaces_the_gradient(make: Any, result: Any, batch: int, dtype: torch.dtype, rtol: float) -> None:
    module, x = Runs(lambda x: make(x * 2, x * 3)), drawn(batch, 2, dtype=dtype)
    seen = hooked(module)
    hookline.register_backward_pre_hook(module, lambda module, grad_output: result(grad_output))
    sum(value.real.sum() for value in leaves_of(module(x))).backward()
    assert equal(x.grad, torch.full_like(x, 50))
    assert all(equal(grad, torch.full_like(x, 10)) for grad in seen[0][1].values())


@fault(25, RIGHT, "hooks of every kind can be registered at any time, next to PyTorch's own")
@pytest.mark.parametrize("removed", [True, False])
def test_a_hook_is_registered_after_a_legacy_one(removed: bool) -> None:
    module, x, legacy = nn.Linear(3, 2).double(), drawn(4, 3), []
    handle = module.register_backward_hook(lambda *_: legacy.append(1))
    if removed:
        handle.remove()
    expected = isolated(lambda x: F.linear(x, module.weight, module.bias), (x,), {}, weighted)
    seen = hooked(module)
    weighted(module(x)).backward()
    assert close(seen[0][0].values(), expected[0]) and close(seen[0][1].values(), expected[1])
    assert len(legacy) == (0 if removed else 1)
    handle.remove()


@fault(25, RIGHT, "")
@pytest.mark.parametrize("ours_first", [True, False])
def test_our_hooks_leave_no_mode_behind(ours_first: bool) -> None:
    module, x, theirs = nn.Linear(3, 2), torch.ones(1, 3, requires_grad=True), []
    for _ in range(2):
        hookline.register_backward_hook(module, lambda *_: None).remove()
    if ours_first:
        seen = hooked(module)
    with module.register_full_backward_hook(lambda *_: theirs.append(1)):
        if not ours_first:
            seen = hooked(module)
        module(x).sum().backward()
    assert len(seen) == len(theirs) == 1
