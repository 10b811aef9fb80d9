"""Forward hooks, and what they reach: values of the moment, every call, parameters used without their module."""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline
from hookline.errors import ArgumentError, SiteError

from ..hooks.reference import Computes, equal, leaf, vector
from .catalogue import BY_DEFINITION, REFUSED, RIGHT, fault

Register = Callable[..., hookline.Handle]

REGISTER: dict[str, Register] = {
    "forward pre": hookline.register_forward_pre_hook,
    "forward": hookline.register_forward_hook,
    "backward pre": hookline.register_backward_pre_hook,
    "backward": hookline.register_backward_hook,
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
PORTS = ("input", "output", "grad_input", "grad_output")
WEIGHT = vector(0.5, -1.0, 2.0)
Pair = namedtuple("Pair", ["first", "second"])


class Failure(Exception):
    pass


def fail(*_: Any, **__: Any) -> None:
    raise Failure("as planned")


def noting(log: list[Any], name: Any = 1) -> Callable[..., None]:
    return lambda *_: log.append(name)


def keeping(log: list[Any]) -> Callable[..., None]:
    """A hook that keeps a clone of the output."""
    return lambda module, args, output: log.append(output.clone())


def double() -> Computes:
    return Computes(lambda weight, x: x * 2)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of both signs that every floating dtype has."""
    return (torch.arange(math.prod(shape)).reshape(shape) - 2).to(dtype) / 2


# ---------------------------------------------------------------- 26: forward called directly


class Calls(nn.Module):
    """Calls its child's ``forward`` and not the child."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Any:
        return self.child.forward(x)


class Inherits(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def with_own_forward() -> nn.Module:
    module = nn.Linear(3, 3)
    plain = module.forward
    module.forward = lambda x: plain(x) + 1
    return module


CALLED: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Linear(3, 3),
    "forward that calls super": lambda: Inherits(3, 3),
    "forward of the instance": with_own_forward,
    "nested": lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()),
}


@fault(26, RIGHT, "`module.forward(x)` runs the hooks as `module(x)` does, once, and `record` counts it as a call")
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("name", CALLED)
def test_forward_called_directly_runs_each_hook_once(name: str, kind: str) -> None:
    module, log = CALLED[name](), []
    with REGISTER[kind](module, noting(log)):
        module.forward(torch.ones(2, 3, requires_grad=True)).sum().backward()
        assert len(log) == 1
        module(torch.ones(2, 3, requires_grad=True)).sum().backward()
        assert len(log) == 2
        type(module).forward(module, torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert len(log) == 3


@fault(26, RIGHT, "")
def test_forward_called_directly_shows_and_replaces_the_same_values() -> None:
    module, x, shown = nn.Linear(3, 2), torch.randn(4, 3), []
    expected = F.linear(x * 2, module.weight, module.bias)
    hookline.register_forward_pre_hook(module, lambda module, args: (args[0] * 2,))
    hookline.register_forward_hook(module, lambda module, args, output: (shown.append(output.clone()), output + 1)[1])
    assert equal(module.forward(x), expected + 1)
    assert equal(shown, [expected])


@fault(26, RIGHT, "")
def test_a_recording_has_the_calls_of_forward_also_those_of_the_root() -> None:
    model, x = Calls(nn.Linear(3, 2)), torch.randn(4, 3)
    expected = F.linear(x, model.child.weight, model.child.bias)
    with hookline.record(model) as rec:
        model(x)
        model.forward(x * 2)
    assert [call.step for call in rec["child"].calls] == [call.step for call in rec[""].calls] == [0, 1]
    assert equal(rec["child"].calls[0].output, expected)
    assert equal(rec[""].calls[1].output, F.linear(x * 2, model.child.weight, model.child.bias))


# ---------------------------------------------------------------- 29, 104: a value that is written over later


class Writes(nn.Module):
    """Keeps what its child returns in ``returned``, then writes over it."""

    def __init__(self, child: nn.Module, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.child, self.write = child, write

    def forward(self, x: Tensor) -> Any:
        output = self.child(x)
        for tensor in tensors_of(output):
            self.write(tensor)
        return output


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for child in children for tensor in tensors_of(child)]


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in-place function": lambda y: y.mul_(3),
    "+=": lambda y: y.__iadd__(1),
    "-=": lambda y: y.__isub__(y.clone()),
    "slice": lambda y: y[:, 1:].zero_(),
    "item": lambda y: y.__setitem__((0, 0), 9.0),
    "view": lambda y: y.view(-1).fill_(7),
    "transpose": lambda y: y.t().copy_(torch.zeros_like(y.t())),
    "detach": lambda y: y.detach().zero_(),
    ".data": lambda y: y.data.add_(5),
    "out=": lambda y: torch.mul(y.detach(), 2, out=y.detach()),
}
CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, y * 2),
    "list": lambda y: [y, [y * 2]],
    "dict": lambda y: {"y": y, "more": (y * 2,)},
    "named tuple": lambda y: Pair(y, y * 2),
}


@fault(
    29,
    RIGHT,
    "`record` keeps the value of that moment, copied only when it is written over; a hook is shown the live tensor",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_a_recorded_output_stays_when_it_is_written_over(write: str, dtype: torch.dtype) -> None:
    model = Writes(Computes(lambda _, x: x * 2), WRITES[write])
    x = numbers(2, 3, dtype=dtype)
    expected, plain = x.clone() * 2, model(x.clone())
    assert not equal(plain, expected)
    with hookline.record(model, "child", ("input", "output")) as rec:
        output = model(x)
    assert equal(output, plain)
    assert equal(rec["child"].output, expected) and equal(rec["child"].input, numbers(2, 3, dtype=dtype))


@fault(29, RIGHT, "")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("container", CONTAINERS)
def test_every_tensor_of_a_recorded_output_stays(container: str, grad: bool) -> None:
    make = CONTAINERS[container]
    model = Writes(Computes(lambda _, x: make(x * 3)), torch.relu_)
    x = numbers(2, 3).requires_grad_(grad)
    expected = make(numbers(2, 3) * 3)
    with hookline.record(model, "child", ("output", "grad_output") if grad else "output") as rec:
        output = model(x)
    assert equal(tensors_of(rec["child"].output), tensors_of(expected))
    assert equal(tensors_of(output), [tensor.relu() for tensor in tensors_of(expected)])


@fault(29, RIGHT, "")
def test_layers_that_work_in_place_leave_every_recorded_output_alone() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4),
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
        nn.Hardtanh(-0.5, 0.5, inplace=True),
        nn.Dropout(0.5, inplace=True),
    )
    x = torch.randn(5, 3)
    with torch.no_grad():
        wanted = [F.linear(x, model[0].weight, model[0].bias)]
        wanted += [wanted[0].relu()]
        wanted += [F.linear(wanted[1], model[2].weight, model[2].bias)]
        wanted += [wanted[2].clamp(-0.5, 0.5)]
    with hookline.record(model, "*") as rec:
        model(x)
    assert equal([rec[str(place)].output for place in range(4)], wanted)


@fault(29, RIGHT, "")
def test_a_recorded_value_stays_after_the_block_as_well() -> None:
    module, x = nn.Linear(3, 3), torch.randn(2, 3)
    expected = F.linear(x, module.weight, module.bias).detach()
    with torch.no_grad(), hookline.record(module, ports=("input", "output")) as rec:
        output = module(x)
        before = x.clone()
    output.zero_()
    x.zero_()
    assert equal(rec[""].output, expected) and equal(rec[""].input, before)


@fault(29, RIGHT, "")
def test_a_hook_is_shown_the_live_output() -> None:
    module, shown = double(), []
    hookline.register_forward_hook(module, lambda module, args, output: shown.append(output))
    output = module(leaf())
    assert shown[0] is output
    with torch.no_grad():
        output.zero_()
    assert equal(shown[0].detach(), vector(0, 0, 0))


RETURN_THEIR_INPUT: dict[str, Callable[[], nn.Module]] = {
    "Identity": nn.Identity,
    "Dropout in evaluation": lambda: nn.Dropout(0.5).eval(),
    "AlphaDropout in evaluation": lambda: nn.AlphaDropout(0.5).eval(),
    "Flatten of a matrix": nn.Flatten,
    "an empty Sequential": nn.Sequential,
    "a view": lambda: Computes(lambda _, x: x.view(-1)),
    "the input in a tuple": lambda: Computes(lambda _, x: (x,)),
}


@fault(104, RIGHT, "`record` keeps the value of that moment; a hook is shown the live tensor, which is the input")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RETURN_THEIR_INPUT)
def test_the_output_of_a_module_that_returns_its_input_stays(name: str, dtype: torch.dtype) -> None:
    module, x = RETURN_THEIR_INPUT[name](), numbers(2, 3, dtype=dtype)
    with hookline.record(module, "", ("input", "output")) as rec:
        (output,) = tensors_of(module(x))
        assert output.data_ptr() == x.data_ptr()
        x.mul_(-4)
    assert equal(rec[""].input, numbers(2, 3, dtype=dtype))
    assert equal(tensors_of(rec[""].output)[0].flatten(), numbers(6, dtype=dtype))
    assert equal(output.flatten(), numbers(6, dtype=dtype) * -4)


@fault(104, RIGHT, "")
@pytest.mark.parametrize("place", ["before an in-place ReLU", "after an in-place ReLU"])
def test_an_identity_next_to_an_in_place_relu_keeps_what_stood_there(place: str) -> None:
    relu = nn.ReLU(inplace=True)
    model = nn.Sequential(nn.Identity(), relu) if place.startswith("before") else nn.Sequential(relu, nn.Identity())
    spot = "0" if place.startswith("before") else "1"
    x = numbers(2, 3)
    with hookline.record(model, spot) as rec:
        model(x)
    x.fill_(-1)
    assert equal(rec[spot].output, numbers(2, 3) if spot == "0" else numbers(2, 3).relu())


@fault(104, RIGHT, "")
def test_a_hook_on_an_identity_is_shown_the_input_itself() -> None:
    module, x, shown = nn.Identity(), numbers(2, 3), []
    hookline.register_forward_hook(module, lambda module, args, output: shown.append((args[0], output)))
    assert module(x) is x
    assert shown[0][0] is x and shown[0][1] is x


# ---------------------------------------------------------------- 30: an input that the module writes over


def writes_input(write: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def forward(weight: Tensor, x: Any, **kwargs: Any) -> Tensor:
        for tensor in tensors_of([x, kwargs]):
            write(tensor)
        return tensors_of(x)[0] * 1

    return forward


@fault(30, RIGHT, "a forward hook gets the values that were passed; `record` keeps them too")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("write", [name for name in WRITES if name not in (".data", "detach", "out=")])
def test_a_forward_hook_gets_the_input_as_it_was_passed(write: str, dtype: torch.dtype) -> None:
    module, x, shown = Computes(writes_input(WRITES[write])), numbers(2, 3, dtype=dtype), []
    written = numbers(2, 3, dtype=dtype)
    WRITES[write](written)
    hookline.register_forward_hook(module, lambda module, args, output: shown.append(args[0]))
    with hookline.record(module, "", "input") as rec:
        output = module(x)
    assert equal(shown, [numbers(2, 3, dtype=dtype)])
    assert equal(rec[""].input, numbers(2, 3, dtype=dtype))
    assert equal([x, output], [written, written])


@fault(30, RIGHT, "")
@pytest.mark.parametrize("write", WRITES)
def test_a_recorded_input_is_as_it_was_passed_however_it_is_written_over(write: str) -> None:
    module, x = Computes(writes_input(WRITES[write])), numbers(2, 3)
    with hookline.record(module, "", "input") as rec:
        module(x)
    assert not equal(x, numbers(2, 3))
    assert equal(rec[""].input, numbers(2, 3))


@fault(30, RIGHT, "")
@pytest.mark.parametrize("container", CONTAINERS)
def test_nested_and_named_inputs_are_as_they_were_passed(container: str) -> None:
    make, shown = CONTAINERS[container], []
    module = Computes(writes_input(torch.relu_))
    hookline.register_forward_hook(
        module, lambda module, args, kwargs, output: shown.append((args, kwargs)), with_kwargs=True
    )
    value, named = make(numbers(2, 3)), make(numbers(3))
    with hookline.record(module, "", "input") as rec:
        module(value, named=named)
    ((args, kwargs),) = shown
    assert type(args[0]) is type(value) and type(kwargs["named"]) is type(named)
    assert equal(tensors_of(args[0]), tensors_of(make(numbers(2, 3))))
    assert equal(tensors_of(kwargs), tensors_of(make(numbers(3))))
    assert equal(tensors_of(rec[""].args), tensors_of(args)) and equal(tensors_of(rec[""].kwargs), tensors_of(kwargs))
    assert equal(tensors_of([value, named]), [t.relu() for t in tensors_of([make(numbers(2, 3)), make(numbers(3))])])


@fault(30, RIGHT, "")
@pytest.mark.parametrize("module", [nn.ReLU(inplace=True), nn.Hardswish(inplace=True), nn.SELU(inplace=True)])
def test_an_in_place_activation_shows_input_and_output_as_they_were(module: nn.Module) -> None:
    shown: list[Any] = []
    x, function = numbers(2, 3), getattr(F, type(module).__name__.lower())
    with hookline.register_forward_hook(module, lambda module, args, output: shown.extend([args[0], output.clone()])):
        assert module(x) is x
    assert equal(shown, [numbers(2, 3), function(numbers(2, 3))])


@fault(30, RIGHT, "")
def test_a_hook_that_is_always_called_gets_the_input_as_it_was_passed() -> None:
    def forward(weight: Tensor, x: Tensor) -> None:
        fail(x.zero_())

    module, x, shown = Computes(forward), vector(1, 2), []
    hookline.register_forward_hook(module, lambda module, args, output: shown.append(args[0]), always_call=True)
    with pytest.raises(Failure):
        module(x)
    assert equal(shown, [vector(1, 2)]) and equal(x, vector(0, 0))


# ---------------------------------------------------------------- 31: keyword arguments


@fault(
    31,
    BY_DEFINITION,
    "PyTorch's signature has none: `with_kwargs=True` gives them, and so does the input that `record` keeps",
)
@pytest.mark.parametrize("always_call", [False, True])
def test_keyword_arguments_are_shown_where_they_are_asked_for(always_call: bool) -> None:
    module, x, scale, shown = Computes(lambda weight, x, scale: x * scale), leaf(), vector(2, 2, 2), {}
    hookline.register_forward_hook(module, lambda *seen: shown.update(plain=seen), always_call=always_call)
    hookline.register_forward_hook(
        module, lambda *seen: shown.update(named=seen), with_kwargs=True, always_call=always_call
    )
    hookline.register_forward_pre_hook(module, lambda *seen: shown.update(pre=seen))
    hookline.register_forward_pre_hook(module, lambda *seen: shown.update(named_pre=seen), with_kwargs=True)
    output = module(x, scale=scale)
    assert {name: len(seen) for name, seen in shown.items()} == {"plain": 3, "named": 4, "pre": 2, "named_pre": 3}
    assert shown["plain"][1] == shown["pre"][1] == (x,) and shown["plain"][2] is output
    assert shown["named"][2] == {"scale": scale} and shown["named"][2]["scale"] is scale
    assert shown["named_pre"][2]["scale"] is scale and shown["named"][3] is output


@fault(31, BY_DEFINITION, "")
def test_a_recorded_input_has_the_keyword_arguments() -> None:
    module = Computes(lambda weight, x, *, scale, masks: x * scale + masks["a"][0])
    x, scale, mask = leaf(), leaf(2, 2, 2), leaf(0, 1, 0)
    with hookline.record(module, "", ("input", "grad_input")) as rec:
        module(x, scale=scale, masks={"a": [mask]}).sum().backward()
    assert equal(rec[""].args, (x.detach(),))
    assert equal(rec[""].kwargs, {"scale": scale.detach(), "masks": {"a": [mask.detach()]}})
    grads = rec[""].grad_input
    assert equal(grads.kwargs["scale"], vector(1, -2, 3)) and equal(grads.kwargs["masks"]["a"][0], vector(1, 1, 1))


# ---------------------------------------------------------------- 32, 33: a return value that nobody meant


@fault(
    32,
    BY_DEFINITION,
    "a return value other than None replaces the output; `record` cannot change a value, `edit` is the verb that does",
)
def test_a_hook_that_returns_a_value_replaces_the_output() -> None:
    module, x, kept = nn.Linear(3, 2), torch.randn(4, 3), {}
    hookline.register_forward_hook(module, lambda module, args, output: kept.setdefault("output", output.detach()))
    output = module(x)
    assert not output.requires_grad and output is kept["output"]


@fault(32, BY_DEFINITION, "")
@pytest.mark.parametrize("ports", ["output", PORTS])
@pytest.mark.parametrize("reduce", [None, lambda t: t * 0, lambda t: 3.0])
def test_no_recorder_can_replace_a_value(reduce: Callable[[Tensor], Any] | None, ports: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    plain, x = copy.deepcopy(model), torch.randn(4, 3)
    with hookline.record(model, "**", ports, reduce=reduce) as rec:
        output = model(x)
        for event in rec:
            for tensor in tensors_of(event.value):
                tensor.zero_()
        output.square().sum().backward()
    expected = plain(x)
    expected.square().sum().backward()
    assert equal(output, expected)
    assert equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@fault(32, BY_DEFINITION, "")
def test_edit_changes_the_output_and_keeps_the_graph() -> None:
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.randn(4, 3)
    with hookline.edit(model, {"0:output": lambda value: value * 2}) as edits:
        output = model(x)
    output.sum().backward()
    weight = model[0].weight.detach().requires_grad_()
    expected = (F.linear(x, weight, model[0].bias.detach()) * 2).tanh()
    assert equal(output, expected) and edits.counts == {"0:output": 1}
    assert equal(model[0].weight.grad, *torch.autograd.grad(expected.sum(), [weight]))


@fault(32, BY_DEFINITION, "")
def test_a_change_that_returns_nothing_changes_nothing() -> None:
    module, x, seen = nn.Linear(3, 2), torch.randn(4, 3), []
    with hookline.edit(module, {"": lambda value: seen.append(value)}) as edits:
        output = module(x)
    assert seen[0] is output and edits.counts == {"(root):output": 0}
    assert equal(output, F.linear(x, module.weight, module.bias))


@fault(
    33,
    BY_DEFINITION,
    "a return value replaces the output of every call; `record` keeps each call's own value and returns nothing",
)
def test_a_capturing_hook_that_returns_its_first_capture_replaces_every_later_output() -> None:
    module, kept = double(), {}
    with hookline.register_forward_hook(module, lambda module, args, output: kept.setdefault("output", output)):
        first, second = module(vector(1, 2)), module(vector(3, 4))
    assert equal([first, second], [vector(2, 4), vector(2, 4)])


@fault(33, BY_DEFINITION, "")
@pytest.mark.parametrize("keep", ["all", "last"])
def test_a_recorder_keeps_each_calls_own_value_and_the_model_computes_it(keep: str) -> None:
    module = double()
    with hookline.record(module, keep=keep) as rec:
        outputs = [module(vector(number, 2 * number)) for number in range(4)]
    wanted = [vector(2 * number, 4 * number) for number in range(4)]
    assert equal(outputs, wanted)
    assert equal([call.output for call in rec[""].calls], wanted if keep == "all" else wanted[-1:])


# ---------------------------------------------------------------- 34: a list from a pre-hook


@fault(
    34,
    BY_DEFINITION,
    "a value that is no tuple becomes the only argument, since a list can be one; return a tuple, or use `edit`",
)
@pytest.mark.parametrize("value", [[vector(1), vector(2)], {"a": vector(1)}, vector(3), "text", 5], ids=repr)
def test_what_is_no_tuple_becomes_the_only_argument(value: Any) -> None:
    module = Computes(lambda weight, x: x)
    hookline.register_forward_pre_hook(module, lambda module, args: value)
    assert module(leaf()) is value


@fault(34, BY_DEFINITION, "")
def test_a_tuple_from_a_pre_hook_is_all_arguments() -> None:
    module, x, y = nn.Bilinear(3, 3, 2), torch.randn(4, 3), torch.randn(4, 3)
    with hookline.register_forward_pre_hook(module, lambda module, args: tuple(value * 2 for value in args)):
        output = module(x, y)
    assert equal(output, F.bilinear(x * 2, y * 2, module.weight, module.bias))
    with hookline.register_forward_pre_hook(module, lambda module, args: [value * 2 for value in args]):  # noqa: SIM117
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            module(x, y)


@fault(34, BY_DEFINITION, "")
@pytest.mark.parametrize("container", [tuple, list])
def test_an_edit_of_several_arguments_may_return_a_list_or_a_tuple(container: type) -> None:
    module, x, y = nn.Bilinear(3, 3, 2), torch.randn(4, 3), torch.randn(4, 3)
    with hookline.edit(module, {":input": lambda args: container(value * 2 for value in args)}):
        output = module(x, y)
    assert equal(output, F.bilinear(x * 2, y * 2, module.weight, module.bias))


@fault(34, BY_DEFINITION, "")
def test_an_edit_of_one_argument_gives_that_argument() -> None:
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    expected = F.linear(x * 2, module.weight, module.bias)
    with hookline.edit(module, {":input": lambda value: value * 2}):
        assert equal(module(x), expected)
    summing = Computes(lambda weight, values: sum(values))
    with hookline.edit(summing, {":input": lambda values: [value * 2 for value in values]}):
        assert equal(summing([vector(1), vector(2)]), vector(6))


# ---------------------------------------------------------------- 35: MultiheadAttention.out_proj


def attended(mha: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What attention hands to the output projection, from the formula; (sequence * batch, width) in float64."""
    size, heads = mha.embed_dim, mha.num_heads
    if mha.in_proj_weight is None:
        weights = mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight
    else:
        weights = mha.in_proj_weight.chunk(3)
    biases = (0.0, 0.0, 0.0) if mha.in_proj_bias is None else mha.in_proj_bias.chunk(3)
    parts = []
    for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
        x = x.transpose(0, 1) if mha.batch_first else x
        parts.append((x @ weight.T + bias).unflatten(-1, (heads, size // heads)).permute(1, 2, 0, 3))
    q, k, v = parts
    found = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(size // heads), -1) @ v
    return found.permute(2, 0, 1, 3).reshape(-1, size)


ATTENTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "self-attention": ({}, {}),
    "without weights": ({}, {"need_weights": False}),
    "batch first": ({"batch_first": True}, {}),
    "batch first, without weights": ({"batch_first": True}, {"need_weights": False}),
    "no bias": ({"bias": False}, {}),
    "other widths": ({"kdim": 6, "vdim": 5}, {}),
    "weights of each head": ({}, {"average_attn_weights": False}),
}


def attention(name: str) -> tuple[nn.MultiheadAttention, tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    options, how = ATTENTIONS[name]
    mha = nn.MultiheadAttention(8, 2, dtype=torch.float64, **options)
    with torch.no_grad():
        for bias in (mha.in_proj_bias, mha.out_proj.bias):
            if bias is not None:
                bias.normal_()
    query = torch.randn(3, 4, 8, dtype=torch.float64)
    if "kdim" not in options:
        return mha, (query, query, query), how
    return mha, (query, torch.randn(3, 4, 6, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)), how


@fault(
    35,
    RIGHT,
    "the use of its weight is a call of `out_proj`, for hooks and `record`, forward and backward, with the same bits",
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_output_projection_of_attention_is_recorded_as_a_call(name: str, training: bool) -> None:
    mha, inputs, how = attention(name)
    mha.train(training)
    plain, factor = copy.deepcopy(mha), torch.randn(3, 4, 8, dtype=torch.float64)
    expected = plain(*inputs, **how)
    (expected[0] * factor).sum().backward()
    with hookline.record(mha, "out_proj", PORTS) as rec:
        output = mha(*inputs, **how)
        (output[0] * factor).sum().backward()
    assert equal(output, expected)
    assert equal([p.grad for p in mha.parameters()], [p.grad for p in plain.parameters()])
    weight, bias = mha.out_proj.weight.detach(), 0 if mha.out_proj.bias is None else mha.out_proj.bias.detach()
    into = attended(mha, *inputs).detach()
    grad = (factor.transpose(0, 1) if mha.batch_first else factor).reshape(-1, 8)
    found = rec["out_proj"]
    assert len(found.calls) == 1
    for got, wanted in [
        (found.input, into),
        (found.output, into @ weight.T + bias),
        (found.grad_output, grad),
        (found.grad_input, grad @ weight),
    ]:
        torch.testing.assert_close(got.reshape(-1, 8), wanted)


@fault(35, RIGHT, "")
@pytest.mark.parametrize("name", ["self-attention", "without weights", "no bias"])
def test_hooks_of_every_kind_run_on_the_output_projection(name: str) -> None:
    mha, inputs, how = attention(name)
    plain, log = copy.deepcopy(mha), []
    for kind, register in REGISTER.items():
        register(mha.out_proj, lambda module, *_, kind=kind: log.append((kind, module is mha.out_proj)))
    output, expected = mha(*inputs, **how), plain(*inputs, **how)
    output[0].square().sum().backward()
    expected[0].square().sum().backward()
    assert log == [(kind, True) for kind in REGISTER]
    assert equal(output, expected)
    assert equal([p.grad for p in mha.parameters()], [p.grad for p in plain.parameters()])


@fault(35, RIGHT, "")
def test_hooks_replace_what_goes_through_the_output_projection() -> None:
    mha, inputs, how = attention("self-attention")
    weight, bias = mha.out_proj.weight.detach(), mha.out_proj.bias.detach()
    with hookline.register_forward_pre_hook(mha.out_proj, lambda module, args: (args[0] * 2,)):
        doubled = mha(*inputs, **how)[0]
    torch.testing.assert_close(doubled.reshape(-1, 8), attended(mha, *inputs) * 2 @ weight.T + bias)
    with hookline.edit(mha, {"out_proj:output": lambda value: value * 0 + 1}):
        assert equal(mha(*inputs, **how)[0].detach(), torch.ones(3, 4, 8, dtype=torch.float64))


@fault(35, RIGHT, "")
@pytest.mark.parametrize("name", ["self-attention", "batch first", "batch first, without weights"])
def test_the_output_projection_is_seen_in_evaluation_without_gradients(name: str) -> None:
    mha, inputs, how = attention(name)
    mha.eval()
    with torch.no_grad(), hookline.record(mha, "**") as rec:
        output = mha(*inputs, **how)[0]
    assert len(rec["out_proj"].calls) == 1
    weight, bias = mha.out_proj.weight.detach(), mha.out_proj.bias.detach()
    wanted = attended(mha, *inputs).detach() @ weight.T + bias
    torch.testing.assert_close(rec["out_proj"].output.reshape(-1, 8), wanted)
    torch.testing.assert_close((output.transpose(0, 1) if mha.batch_first else output).reshape(-1, 8), wanted)


# ---------------------------------------------------------------- 36, 37, 38: the fused encoder


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options).eval()


def encoder(**options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(encoder_layer(), 2, **options).eval()


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each run of the fused kernel of a whole layer."""
    runs: list[int] = []
    fused = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: (runs.append(1), fused(*args))[1])
    return runs


MASK = torch.tensor([[False, False, False, False], [False, False, True, True]])
BELOW_A_LAYER = ["self_attn", "linear1", "dropout", "linear2", "norm1", "norm2", "dropout1", "dropout2"]


@fault(36, RIGHT, "what is observed inside runs on plain tensors; values as with `enable_nested_tensor=False`")
@pytest.mark.parametrize("path", ["layers.0", "layers.1", "layers.0.linear1", "layers.1.norm2", "layers.1.self_attn"])
def test_a_hook_in_an_encoder_gets_plain_tensors_under_a_mask(path: str) -> None:
    model, x, shown, wanted = encoder(enable_nested_tensor=True), torch.randn(2, 4, 8), [], []

    def first(output: Any) -> Tensor:
        return output[0] if isinstance(output, tuple) else output

    with torch.no_grad(), unfused():
        taken = model.get_submodule(path).register_forward_hook(lambda m, a, o: wanted.append(first(o)))
        expected = model(x, src_key_padding_mask=MASK)
        taken.remove()
    hookline.register_forward_hook(model.get_submodule(path), lambda m, a, o: shown.append(first(o)))
    with torch.no_grad():
        output = model(x, src_key_padding_mask=MASK)
    assert len(shown) == 1 and not shown[0].is_nested and shown[0].shape == wanted[0].shape
    torch.testing.assert_close(shown[0][~MASK], wanted[0][~MASK])
    torch.testing.assert_close(output[~MASK], expected[~MASK])


@fault(36, RIGHT, "")
def test_a_recorded_encoder_has_plain_values_everywhere_under_a_mask() -> None:
    model, x = encoder(enable_nested_tensor=True), torch.randn(2, 4, 8)
    with torch.no_grad(), hookline.record(model, ports=("input", "output")) as rec:
        model(x, src_key_padding_mask=MASK)
    tensors = [tensor for event in rec for _, tensor in event.leaves()]
    assert len(tensors) > 2 * 2 * len(BELOW_A_LAYER)
    assert not any(tensor.is_nested for tensor in tensors)
    assert rec["layers.1.norm2"].output.shape == rec["layers.0.linear2"].output.shape == (2, 4, 8)


@fault(36, RIGHT, "")
def test_a_hook_on_the_encoder_itself_leaves_its_bits_alone_under_a_mask() -> None:
    model, x, shown = encoder(enable_nested_tensor=True), torch.randn(2, 4, 8), []
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=MASK)
        with hookline.register_forward_hook(model, keeping(shown)):
            output = model(x, src_key_padding_mask=MASK)
    assert not shown[0].is_nested and equal([output, shown[0]], [expected, expected])


def called_without_fusing(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """Paths of the modules that run once the fused kernel is switched off, by hooks of PyTorch."""
    names, called = {module: name for name, module in model.named_modules()}, []
    taken = [m.register_forward_hook(lambda m, a, o: called.append(names[m])) for m in model.modules()]
    with torch.no_grad(), unfused():
        model(*args, **kwargs)
    for one in taken:
        one.remove()
    return called


@fault(37, RIGHT, "`record` sees every sub-module: the fused path is off for a layer with something observed below it")
@pytest.mark.parametrize("mask", [None, MASK], ids=["no mask", "mask"])
@pytest.mark.parametrize("name", ["layer", "encoder", "norm first", "gelu"])
def test_a_recording_of_an_encoder_has_every_module(name: str, mask: Tensor | None) -> None:
    model = {
        "layer": encoder_layer,
        "encoder": encoder,
        "norm first": lambda: encoder_layer(norm_first=True),
        "gelu": lambda: encoder_layer(activation="gelu"),
    }[name]()
    x = torch.randn(2, 4, 8)
    called = called_without_fusing(model, x, src_key_padding_mask=mask)
    with torch.no_grad(), hookline.record(model) as rec:
        output = model(x, src_key_padding_mask=mask)
    with torch.no_grad(), unfused():
        expected = model(x, src_key_padding_mask=mask)
    # PyTorch's hooks cannot see the output projection, which is called by its weight.
    assert [event.path for event in rec if not event.path.endswith("out_proj")] == called
    projections = [name for name, module in model.named_modules() if name.endswith("out_proj")]
    assert [event.path for event in rec if event.path.endswith("out_proj")] == projections
    assert equal(output, expected)


@fault(37, RIGHT, "")
def test_only_what_is_observed_leaves_the_fused_path(kernel: list[int]) -> None:
    model, x = nn.Sequential(encoder_layer(), encoder_layer(), encoder_layer()), torch.randn(2, 4, 8)
    with torch.no_grad():
        expected = model(x)
        assert len(kernel) == 3
        kernel.clear()
        with hookline.record(model, ["0", "1.linear1", "2"]) as rec:
            output = model(x)
        assert len(kernel) == 2
        kernel.clear()
        assert equal(model(x), expected) and len(kernel) == 3
    assert rec.paths == ["0", "1.linear1", "2"] and len(rec) == 3
    torch.testing.assert_close(output, expected)


@fault(38, RIGHT, "a hook on any sub-module is called, and after its removal the fused path is back")
@pytest.mark.parametrize("kind", ["forward pre", "forward"])
@pytest.mark.parametrize("path", BELOW_A_LAYER)
def test_a_hook_on_a_sub_module_of_a_fused_layer_is_called(kernel: list[int], path: str, kind: str) -> None:
    model, x, log = encoder_layer(), torch.randn(2, 4, 8), []
    with torch.no_grad():
        expected = model(x)
        with REGISTER[kind](model.get_submodule(path), noting(log)):
            hooked = model(x)
        after = model(x)
    assert log == [1] and len(kernel) == 2
    assert equal(after, expected)
    torch.testing.assert_close(hooked, expected)


@fault(38, RIGHT, "")
@pytest.mark.parametrize("path", ["self_attn.out_proj", "self_attn"])
def test_attention_inside_a_fused_layer_is_called(path: str) -> None:
    model, x, log = encoder_layer(), torch.randn(2, 4, 8), []
    hookline.register_forward_hook(model.get_submodule(path), noting(log))
    with torch.no_grad():
        model(x)
    assert log == [1]


@fault(38, RIGHT, "")
def test_backward_hooks_below_a_layer_in_evaluation_run() -> None:
    model, x, log = encoder_layer(), torch.randn(2, 4, 8), []
    for path in BELOW_A_LAYER:
        hookline.register_backward_hook(model.get_submodule(path), noting(log, path))
    plain = copy.deepcopy(model)
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert sorted(log) == sorted(BELOW_A_LAYER)
    assert equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


# ---------------------------------------------------------------- 39: parameters used without their module


class Borrows(nn.Module):
    """Uses the parameters of ``owner`` and never calls it."""

    def __init__(self, owner: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.owner, self.use = owner, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.owner, x)


IDS = torch.tensor([[0, 2], [1, 2]])
BORROWED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor], Tensor]] = {
    "linear": (lambda: nn.Linear(3, 2), lambda m, x: F.linear(x, m.weight, m.bias), torch.ones(4, 3)),
    "linear without bias": (lambda: nn.Linear(3, 2, bias=False), lambda m, x: F.linear(x, m.weight), torch.ones(4, 3)),
    "linear, names": (lambda: nn.Linear(3, 2), lambda m, x: F.linear(x, bias=m.bias, weight=m.weight), torch.ones(3)),
    "linear, all names": (
        lambda: nn.Linear(3, 2),
        lambda m, x: F.linear(input=x, weight=m.weight, bias=m.bias),
        torch.ones(4, 3),
    ),
    "embedding": (lambda: nn.Embedding(3, 4), lambda m, x: F.embedding(x, m.weight), IDS),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3), lambda m, x: F.conv1d(x, m.weight, m.bias), torch.ones(1, 2, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3), lambda m, x: F.conv2d(x, m.weight, m.bias), torch.ones(1, 2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 3), lambda m, x: F.conv3d(x, m.weight, m.bias), torch.ones(1, 2, 3, 3, 3)),
    "layer norm": (lambda: nn.LayerNorm(3), lambda m, x: F.layer_norm(x, (3,), m.weight, m.bias), numbers(2, 3)),
}


@fault(
    39,
    RIGHT,
    "`F.linear(x, layer.weight, layer.bias)` is a call of `layer`; the coverage names any other use, with the reason",
)
@pytest.mark.parametrize("name", BORROWED)
def test_a_function_that_takes_the_parameters_of_a_module_is_a_call_of_it(name: str) -> None:
    make, use, x = BORROWED[name]
    model, log = Borrows(make(), use), []
    plain = copy.deepcopy(model)
    hookline.register_forward_hook(model.owner, keeping(log))
    with hookline.record(model, "owner", ("input", "output", "grad_output")) as rec:
        output = model(x)
        output.square().sum().backward()
    expected = plain(x)
    expected.square().sum().backward()
    assert len(rec["owner"].calls) == len(log) == 1
    assert equal([output, log[0].detach(), rec["owner"].output], [expected, expected.detach(), expected.detach()])
    assert equal(rec["owner"].input, x) and equal(rec["owner"].grad_output, 2 * expected.detach())
    assert equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@fault(39, RIGHT, "")
def test_backward_hooks_run_for_a_weight_that_is_used_by_a_function() -> None:
    model = Borrows(nn.Linear(3, 3, bias=False), lambda m, x: F.linear(x, m.weight) + x)
    x, seen = torch.randn(2, 3, requires_grad=True), []
    hookline.register_backward_hook(model.owner, lambda module, *grads: seen.append((grads[0][0], grads[1][0])))
    model(x).sum().backward()
    assert equal(seen, [(torch.ones(2, 3) @ model.owner.weight.detach(), torch.ones(2, 3))])
    assert torch.allclose(x.grad, seen[0][0] + 1)


@fault(39, RIGHT, "")
def test_the_module_that_owns_the_weight_counts_its_own_calls_once() -> None:
    model = Borrows(nn.Linear(3, 3), lambda m, x: F.linear(m(x), m.weight, m.bias))
    x = torch.randn(2, 3)
    with hookline.record(model, "owner") as rec:
        model(x)
    first = F.linear(x, model.owner.weight, model.owner.bias)
    second = F.linear(first, model.owner.weight, model.owner.bias)
    assert equal([call.output for call in rec["owner"].calls], [first.detach(), second.detach()])


class Tied(nn.Module):
    """Reads a table by its module, or not, and computes logits with the same weight."""

    def __init__(self, *, called: bool, head: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.called = called
        if head:
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) if self.called else F.one_hot(ids, 3).float()
        return self.head(x) if hasattr(self, "head") else F.linear(x, self.table.weight)


@fault(39, RIGHT, "")
def test_a_tied_embedding_that_only_another_operation_uses_is_named_in_the_coverage() -> None:
    model = Tied(called=False, head=False)
    with hookline.record(model) as rec:
        model(IDS)
    fate = rec.coverage["table:output"]
    assert fate.status == "bypassed" and fate.calls == 0
    assert "linear" in fate.reason
    assert [str(fate.site) for fate in rec.coverage.bypassed] == ["table:output"]
    assert rec.coverage["(root):output"].status == "captured"


@fault(39, RIGHT, "")
@pytest.mark.parametrize("sites", ["**", "table"])
@pytest.mark.parametrize("head", [True, False])
def test_a_tied_embedding_that_is_called_has_its_own_calls_alone(sites: str, head: bool) -> None:
    model = Tied(called=True, head=head)
    with hookline.record(model, sites) as rec:
        output = model(IDS)
    found, weight = F.embedding(IDS, model.table.weight.detach()), model.table.weight.detach()
    assert equal([call.output for call in rec["table"].calls], [found])
    assert rec.coverage["table:output"].status == "captured" and rec.coverage["table:output"].calls == 1
    assert equal(output.detach(), F.linear(found, weight))
    if head and sites == "**":
        assert equal([call.output for call in rec["head"].calls], [F.linear(found, weight)])


@fault(39, RIGHT, "")
@pytest.mark.parametrize("sites", ["**", "0"])
def test_the_call_of_another_layer_with_the_same_weight_is_no_call_of_this_one(sites: str) -> None:
    model, x, log = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)), torch.randn(2, 3), []
    model[1].weight = model[0].weight
    hookline.register_forward_hook(model[0], keeping(log))
    with hookline.record(model, sites) as rec:
        model(x)
    first = (x @ model[0].weight.T).detach()
    assert equal([call.output for call in rec["0"].calls], [first])
    assert equal([value.detach() for value in log], [first])


@fault(39, RIGHT, "")
def test_a_weight_that_is_computed_from_is_no_call_of_its_module() -> None:
    model = Borrows(nn.Linear(3, 2), lambda m, x: F.linear(x, m.weight * 2, m.bias) + F.linear(x, m.weight, None))
    with hookline.record(model) as rec:
        model(torch.ones(4, 3))
    assert len(rec["owner"].calls) == 0 and rec.coverage["owner:output"].status != "captured"


# ---------------------------------------------------------------- 40: containers that are never called


def layers() -> dict[str, nn.Module]:
    return {"left": nn.Linear(2, 2), "right": nn.Tanh()}


NEVER_CALLED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "ModuleList": (lambda: nn.ModuleList(layers().values()), ("0", "1")),
    "ModuleDict": (lambda: nn.ModuleDict(layers()), ("left", "right")),
    "ParameterList": (lambda: nn.ParameterList([torch.ones(2), torch.ones(2)]), ()),
    "ParameterDict": (lambda: nn.ParameterDict({"scale": torch.ones(2)}), ()),
    "a subclass": (lambda: type("Blocks", (nn.ModuleList,), {})(layers().values()), ("0", "1")),
    "empty": (nn.ModuleList, ()),
}


class Holds(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.children():
            x = block(x)
        return x


@fault(40, REFUSED, "an error that names the children to hook in its place")
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("name", NEVER_CALLED)
def test_a_hook_on_a_container_that_is_never_called_is_refused(name: str, kind: str) -> None:
    make, children = NEVER_CALLED[name]
    container = make()
    before = dict(vars(container))
    with pytest.raises(ArgumentError) as caught:
        REGISTER[kind](container, fail)
    message = str(caught.value)
    assert type(container).__name__ in message
    assert all(child in message.partition(type(container).__name__)[2] for child in children), message
    assert dict(vars(container)) == before


@fault(40, REFUSED, "")
@pytest.mark.parametrize("name", ["ModuleList", "ModuleDict", "a subclass"])
def test_a_recording_of_such_a_container_is_refused_by_its_path(name: str) -> None:
    make, children = NEVER_CALLED[name]
    model = Holds(make())
    with pytest.raises(SiteError, match=r'"blocks": a \w+ .* never called.*"blocks\.\*"'):
        hookline.record(model, "blocks")
    with hookline.record(model, "blocks.*") as rec:
        model(torch.randn(3, 2))
    assert [event.path for event in rec] == [f"blocks.{child}" for child in children]


@fault(40, REFUSED, "")
@pytest.mark.parametrize("name", ["ModuleList", "ModuleDict"])
def test_a_wildcard_takes_the_children_and_names_the_container_in_the_coverage(name: str) -> None:
    make, children = NEVER_CALLED[name]
    model, x = Holds(make()), torch.randn(3, 2)
    with hookline.record(model) as rec:
        output = model(x)
    assert rec.coverage["blocks:output"].status == "bypassed" and rec.coverage["blocks:output"].reason
    assert [rec.coverage[f"blocks.{child}:output"].status for child in children] == ["captured", "captured"]
    assert equal(rec[f"blocks.{children[-1]}"].output, output.detach())


@fault(40, REFUSED, "")
def test_a_container_with_a_forward_of_its_own_is_hooked_like_any_module() -> None:
    class Runs(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                x = block(x)
            return x

    module, x, log = Runs(layers().values()), torch.randn(3, 2), []
    with hookline.register_forward_hook(module, keeping(log)), hookline.record(Calls(module), "child") as rec:
        module(x)
    expected = F.linear(x, module[0].weight, module[0].bias).tanh()
    assert equal([log[0], rec["child"].output], [expected, expected.detach()])


# ---------------------------------------------------------------- 41: a module that is called several times


@fault(41, RIGHT, "`.calls` of `record` has every call in order, under each of the module's names")
def test_a_shared_module_has_all_of_its_calls_under_each_of_its_names() -> None:
    relu = nn.ReLU(inplace=True)
    model, x = nn.Sequential(nn.Linear(3, 3), relu, nn.Linear(3, 3), relu), torch.randn(2, 3)
    with torch.no_grad():
        first = F.linear(x, model[0].weight, model[0].bias)
        second = F.linear(first.relu(), model[2].weight, model[2].bias)
    with hookline.record(model, ports=("input", "output")) as rec:
        model(x)
    assert equal([call.output for call in rec["1"].calls], [first.relu(), second.relu()])
    assert equal([call.input for call in rec["1"].calls], [first, second])
    assert equal([call.output for call in rec["3"].calls], [first.relu(), second.relu()])
    assert "3" in rec and "3" in rec.modules["1"].aliases
    with pytest.raises(SiteError, match=r"1 has 2 calls with a recorded output; say which: \.calls\[0\]"):
        _ = rec["1"].output


@fault(41, RIGHT, "")
def test_a_module_may_be_asked_for_by_any_of_its_names() -> None:
    shared = nn.Linear(3, 3)
    model, x = nn.Sequential(nn.Sequential(shared), nn.Tanh(), shared), torch.randn(2, 3)
    with hookline.record(model, "2") as rec:
        model(x)
    first = F.linear(x, shared.weight, shared.bias)
    wanted = [first.detach(), F.linear(first.tanh(), shared.weight, shared.bias).detach()]
    assert equal([call.output for call in rec["2"].calls], wanted)
    assert equal([call.output for call in rec["0.0"].calls], wanted)


@fault(41, RIGHT, "")
@pytest.mark.parametrize("steps", [1, 3])
def test_calls_are_numbered_in_each_step_with_their_own_gradients(steps: int) -> None:
    cell = Computes(lambda weight, x: x * weight)

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(5):
                x = self.cell(x)
            return x

    model = Loop()
    with hookline.record(model, "cell", PORTS) as rec:
        for _ in range(steps):
            model(leaf()).sum().backward()
    x = leaf().detach()
    assert [(call.step, call.index) for call in rec["cell"].calls] == [(s, i) for s in range(steps) for i in range(5)]
    for call in rec["cell"].calls:
        assert equal(call.output, x * WEIGHT ** (call.index + 1))
        assert equal(call.grad_output, WEIGHT ** (4 - call.index))
        assert equal(call.grad_input, WEIGHT ** (5 - call.index))


@fault(41, RIGHT, "")
def test_a_hook_runs_at_every_call_of_a_shared_module() -> None:
    shared, log = Computes(lambda weight, x: x + weight), []
    model = nn.ModuleDict({"a": shared, "b": shared})
    hookline.register_forward_hook(model["b"], keeping(log))
    model["b"](model["a"](vector(0, 0, 0)))
    assert equal([value.detach() for value in log], [WEIGHT, 2 * WEIGHT])


# ---------------------------------------------------------------- 43, 44, 46: calls that raise


RAISING = ["module", "pre-hook", "hook", "child"]


def raising(where: str) -> nn.Module:
    if where == "child":
        return nn.Sequential(nn.Identity(), Computes(fail))
    module = Computes(fail) if where == "module" else double()
    if where == "pre-hook":
        hookline.register_forward_pre_hook(module, fail)
    return module


@fault(
    43,
    BY_DEFINITION,
    "a forward hook has no output to be shown then; with `always_call=True` it is called, with None",
)
@pytest.mark.parametrize("where", RAISING)
def test_only_a_hook_that_is_always_called_closes_what_a_pre_hook_opened(where: str) -> None:
    opened: list[str] = []
    closed: list[tuple[str, Any]] = []
    module = raising(where) if where == "pre-hook" else None
    if module is None:
        module = raising(where)
        hookline.register_forward_pre_hook(module, noting(opened, "open"))
    else:
        hookline.register_forward_pre_hook(module, noting(opened, "open"), prepend=True)
    if where == "hook":
        hookline.register_forward_hook(module, fail)
    hookline.register_forward_hook(module, lambda module, args, output: closed.append(("plain", output)))
    hookline.register_forward_hook(
        module, lambda module, args, output: closed.append(("always", output)), always_call=True
    )
    with pytest.raises(Failure, match="as planned"):
        module(leaf())
    assert opened == ["open"] and closed == [("always", None)]


@fault(43, BY_DEFINITION, "")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, Failure])
def test_always_call_holds_for_every_kind_of_exception(error: type[BaseException]) -> None:
    def stop(*_: Any) -> None:
        raise error

    module, log = Computes(stop), []
    hookline.register_forward_hook(module, noting(log), always_call=True)
    with pytest.raises(error):
        module(leaf())
    assert log == [1]


@fault(43, BY_DEFINITION, "")
def test_the_result_of_an_always_called_hook_does_not_hide_the_exception() -> None:
    module = Computes(fail)
    hookline.register_forward_hook(module, lambda *_: vector(0), always_call=True)
    with pytest.raises(Failure):
        module(leaf())


@fault(43, BY_DEFINITION, "")
def test_a_recording_of_a_call_that_raises_has_its_input_and_says_that_there_is_no_output() -> None:
    model = nn.Sequential(double(), Computes(fail), double())
    with pytest.raises(Failure), hookline.record(model, ports=("input", "output")) as rec:
        model(leaf())
    assert equal(rec["0"].output, vector(2, -4, 6)) and equal(rec["1"].input, vector(2, -4, 6))
    with pytest.raises(SiteError, match="1 has no output: the call did not get that far"):
        _ = rec["1"].output
    with pytest.raises(SiteError, match="2 has no output: it did not run"):
        _ = rec["2"].output


@fault(44, RIGHT, "it gets module, args, kwargs and output, whether the module raises or not")
@pytest.mark.parametrize("where", [*RAISING, "nowhere"])
def test_an_always_called_hook_with_keywords_gets_four_arguments(where: str) -> None:
    def forward(weight: Tensor, x: Tensor, *, scale: float) -> Tensor:
        return fail() if where in ("module", "child") else x * scale

    module, seen, x = Computes(forward), [], leaf()
    if where == "pre-hook":
        hookline.register_forward_pre_hook(module, fail)
    if where == "hook":
        hookline.register_forward_hook(module, fail)
    hookline.register_forward_hook(module, lambda *got: seen.append(got), with_kwargs=True, always_call=True)
    hookline.register_forward_hook(module, lambda *got: seen.append(got), always_call=True)
    with pytest.raises(Failure) if where != "nowhere" else contextlib.nullcontext():
        output = module(x, scale=3.0)
    result = output if where == "nowhere" else None
    assert [len(got) for got in seen] == [4, 3]
    assert seen[0][0] is seen[1][0] is module and seen[0][1][0] is seen[1][1][0] is x
    assert seen[0][2] == {"scale": 3.0}
    assert seen[0][3] is seen[1][2] is result


@fault(46, RIGHT, "the exception of the module reaches the caller, with a note of what each such hook raised")
@pytest.mark.parametrize("where", RAISING)
@pytest.mark.parametrize("with_kwargs", [False, True])
def test_the_failure_of_an_always_called_hook_is_noted_at_the_exception(where: str, with_kwargs: bool) -> None:
    def needs_output(*got: Any) -> None:
        got[-1].shape  # noqa: B018

    def needs_key(*_: Any) -> None:
        raise KeyError("missing")

    module = raising(where)
    if where == "hook":
        hookline.register_forward_hook(module, fail)
    hookline.register_forward_hook(module, needs_output, always_call=True, with_kwargs=with_kwargs)
    hookline.register_forward_hook(module, needs_key, always_call=True, with_kwargs=with_kwargs)
    with pytest.raises(Failure, match="as planned") as caught:
        module(leaf())
    notes = "\n".join(caught.value.__notes__)
    assert "needs_output raised as well: AttributeError" in notes and "'shape'" in notes
    assert "needs_key raised as well: KeyError" in notes and "missing" in notes


@fault(46, RIGHT, "")
def test_an_always_called_hook_that_fails_by_itself_raises() -> None:
    module = double()
    hookline.register_forward_hook(module, fail, always_call=True)
    with pytest.raises(Failure, match="as planned") as caught:
        module(leaf())
    assert "fail at Computes:output" in "\n".join(caught.value.__notes__)


# ---------------------------------------------------------------- 48, 49: hooks that come and go during a call


@fault(48, RIGHT, "it is not called, also when it is removed during the forward or the backward pass")
@pytest.mark.parametrize("prepend", [False, True])
@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_that_an_earlier_hook_of_the_call_removes_is_not_called(kind: str, prepend: bool) -> None:
    module, log, handles = double(), [], []

    def remove(*_: Any) -> None:
        log.append("remove")
        handles[0].remove()

    if prepend:
        handles.append(REGISTER[kind](module, noting(log, "removed")))
        REGISTER[kind](module, remove, prepend=True)
    else:
        REGISTER[kind](module, remove)
        handles.append(REGISTER[kind](module, noting(log, "removed")))
    REGISTER[kind](module, noting(log, "stays"))
    module(leaf()).sum().backward()
    assert log == ["remove", "stays"]


@fault(48, RIGHT, "")
@pytest.mark.parametrize("kind", ["forward", "backward pre", "backward"])
def test_a_hook_that_the_forward_removes_is_not_called_for_it(kind: str) -> None:
    log, handles = [], []
    module = Computes(lambda weight, x: (handles[0].remove(), x * weight)[1])
    handles.append(REGISTER[kind](module, noting(log)))
    module(leaf()).sum().backward()
    assert log == []


@fault(48, RIGHT, "")
def test_a_hook_of_a_module_around_it_may_remove_a_hook_that_is_to_come() -> None:
    inner, log = double(), []
    outer = nn.Sequential(inner)
    handle = hookline.register_forward_hook(inner, noting(log, "inner"))
    hookline.register_forward_pre_hook(outer, lambda *_: handle.remove())
    assert equal(outer(leaf()), leaf() * 2) and log == []


@fault(48, RIGHT, "")
def test_a_hook_that_runs_already_may_remove_itself_and_its_result_counts() -> None:
    module, handles = double(), []

    def once(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        handles[0].remove()
        return output + 1

    handles.append(hookline.register_forward_hook(module, once))
    assert equal([module(leaf()), module(leaf())], [leaf() * 2 + 1, leaf() * 2])


@fault(49, BY_DEFINITION, "a hook takes effect from the next call on, always, whether another hook is there or not")
@pytest.mark.parametrize("other", ["no other hook", *REGISTER, "recorder"])
@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_that_is_registered_during_the_call_is_called_from_the_next_one_on(kind: str, other: str) -> None:
    log: list[int] = []
    registered: list[hookline.Handle] = []

    def forward(weight: Tensor, x: Tensor) -> Tensor:
        if not registered:
            registered.append(REGISTER[kind](module, noting(log)))
        return x * weight

    module = Computes(forward)
    with contextlib.ExitStack() as stack:
        if other == "recorder":
            stack.enter_context(hookline.record(module, ports=PORTS))
        elif other != "no other hook":
            stack.enter_context(REGISTER[other](module, lambda *_: None))
        module(leaf()).sum().backward()
        first = len(log)
        module(leaf()).sum().backward()
    assert (first, len(log)) == (0, 1)


@fault(49, BY_DEFINITION, "")
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("by", ["forward pre", "forward"])
def test_a_hook_that_a_hook_of_the_same_call_registers_is_called_from_the_next_one_on(by: str, kind: str) -> None:
    module, log, registered = double(), [], []

    def register(module: nn.Module, *_: Any) -> None:
        if not registered:
            registered.append(REGISTER[kind](module, noting(log)))

    REGISTER[by](module, register)
    module(leaf()).sum().backward()
    assert log == []
    module(leaf()).sum().backward()
    assert log == [1]


@fault(49, BY_DEFINITION, "")
def test_a_hook_on_a_module_whose_call_is_still_to_come_is_called() -> None:
    model, log = nn.Sequential(double(), double()), []
    hookline.register_forward_hook(model[0], lambda *_: hookline.register_forward_hook(model[1], noting(log)) and None)
    model(leaf())
    assert log == [1]


# ---------------------------------------------------------------- 56: a kept value and its graph


def graph_of(module: nn.Module, work: Callable[[Tensor], Any]) -> weakref.ref[Tensor]:
    """A weak reference to a tensor that the graph of ``work(module's input)`` holds on to."""
    x = (torch.randn(2, 3) * module.weight.sum()).exp()
    work(module(x))
    return weakref.ref(x)


@fault(56, RIGHT, "`record` keeps detached values, so the graph goes with the loss; `detach=False` asks for it")
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("ports", ["output", "input", "grad_output", PORTS])
def test_a_recording_keeps_no_graph_alive(ports: Any, backward: bool) -> None:
    module = nn.Linear(3, 3)
    with hookline.record(module, ports=ports) as rec:
        held = graph_of(module, lambda output: output.square().sum().backward() if backward else None)
        assert held() is None
    assert len(rec) > 0 or ports == "grad_output"
    assert not any(tensor.requires_grad or tensor.grad_fn for event in rec for tensor in tensors_of(event.value))


@fault(56, RIGHT, "")
def test_a_recording_with_the_graph_keeps_it_until_it_goes() -> None:
    module = nn.Linear(3, 3)
    with hookline.record(module, detach=False) as rec:
        held = graph_of(module, lambda output: None)
    assert held() is not None
    rec[""].output.sum().backward()
    assert module.weight.grad is not None
    del rec
    assert held() is None


@fault(56, RIGHT, "")
@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_alone_keep_no_graph_alive(kind: str) -> None:
    module, log = nn.Linear(3, 3), []
    REGISTER[kind](module, noting(log))
    held = graph_of(module, lambda output: output.sum().backward())
    assert log == [1] and held() is None


@fault(56, RIGHT, "")
def test_a_hook_that_keeps_the_output_keeps_its_graph() -> None:
    module, kept = nn.Linear(3, 3), []
    hookline.register_forward_hook(module, lambda module, args, output: kept.append(output))
    held = graph_of(module, lambda output: None)
    assert held() is not None and kept[0].grad_fn is not None
    kept.clear()
    assert held() is None


# ---------------------------------------------------------------- 79: lazy modules


LAZY: dict[str, tuple[Callable[[], nn.Module], type, Tensor]] = {
    "LazyLinear": (lambda: nn.LazyLinear(2), nn.Linear, torch.ones(1, 3)),
    "LazyConv1d": (lambda: nn.LazyConv1d(2, 3), nn.Conv1d, torch.ones(1, 4, 5)),
    "LazyConv2d": (lambda: nn.LazyConv2d(2, 3), nn.Conv2d, torch.ones(1, 4, 5, 5)),
    "LazyConvTranspose2d": (lambda: nn.LazyConvTranspose2d(2, 3), nn.ConvTranspose2d, torch.ones(1, 4, 5, 5)),
    "LazyBatchNorm1d": (nn.LazyBatchNorm1d, nn.BatchNorm1d, torch.arange(6.0).reshape(2, 3)),
}


@fault(79, RIGHT, "it is called from the first call on, with the parameters in place")
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("name", LAZY)
def test_a_hook_on_a_lazy_module_is_called_from_the_first_call_on(name: str, kind: str) -> None:
    make, plain, x = LAZY[name]
    module, shapes = make(), []
    handle = REGISTER[kind](module, lambda module, *_: shapes.append(tuple(module.weight.shape)))
    for _ in range(2):
        module(x.clone().requires_grad_()).sum().backward()
    assert shapes == [tuple(module.weight.shape)] * 2 and 0 not in shapes[0]
    assert isinstance(module, plain)
    handle.remove()
    assert type(module) is plain


@fault(79, RIGHT, "")
@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_module_computes_the_same_bits_with_a_pre_hook(name: str) -> None:
    make, _, x = LAZY[name]
    module, bare, shown = make(), make(), []
    hookline.register_forward_pre_hook(module, lambda module, args: shown.append(args[0]))
    outputs = []
    for one in (module, bare):
        torch.manual_seed(1)
        outputs.append(one(x))
    assert equal(*outputs) and len(shown) == 1 and shown[0] is x
    assert list(module.state_dict()) == list(bare.state_dict())


@fault(79, RIGHT, "")
def test_a_recording_has_the_first_call_of_a_lazy_module() -> None:
    model, x = nn.Sequential(nn.LazyLinear(4), nn.ReLU(inplace=True), nn.LazyLinear(2)), torch.randn(5, 3)
    with hookline.record(model, ports=PORTS) as rec:
        model(x).sum().backward()
    first = F.linear(x, model[0].weight, model[0].bias).detach()
    assert equal(rec["0"].input, x) and equal(rec["0"].output, first)
    assert equal(rec["2"].output, F.linear(first.relu(), model[2].weight, model[2].bias).detach())
    assert equal(rec["2"].grad_output, torch.ones(5, 2))
    assert [type(module) for module in model] == [nn.Linear, nn.ReLU, nn.Linear]
