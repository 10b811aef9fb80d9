"""Forty ways in which a module can be called, each with the gradients at its boundary worked out by hand.

``grad_output`` is what arrives at a value as it leaves the call, ``grad_input`` this call's share alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.errors import SharedMemoryError

from .reference import Computes, equal, leaf, vector

WEIGHT = vector(0.5, -1.0, 2.0)
ONES, TWOS, THREES = vector(1, 1, 1), vector(2, 2, 2), vector(3, 3, 3)
Grads = dict[str, "Tensor | None"]


@dataclasses.dataclass
class Expected:
    """What a scenario must give: (grad_input, grad_output) of each event, and the gradients of leaves."""

    events: list[tuple[Grads, Grads]]
    leaves: list[tuple[Tensor, Tensor | None]]


class Caller:
    """Calls modules, with or without a backward hook of ours on them."""

    def __init__(self, hooked: bool) -> None:
        self.hooked = hooked
        self.events: list[tuple[Grads, Grads]] = []
        self.replace: Callable[[Tensor], Tensor] | None = None
        self._handles: dict[nn.Module, Any] = {}

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.hooked and module not in self._handles:
            self._handles[module] = hookline.register_backward_hook(module, self._hook)
        return module(*args, **kwargs)

    def _hook(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        self.events.append(
            (
                dict(zip(grad_input.paths, grad_input, strict=True)),
                dict(zip(grad_output.paths, grad_output, strict=True)),
            )
        )
        if self.replace is not None:
            return tuple(None if grad is None else self.replace(grad) for grad in grad_input)
        return None


Scenario = Callable[[Caller], Expected]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def scaled(weight: Tensor, x: Tensor) -> Tensor:
    return x * weight


def one(grad_input: Tensor | None, grad_output: Tensor | None) -> tuple[Grads, Grads]:
    """The event of a module with one argument and one output."""
    return {"args[0]": grad_input}, {"output": grad_output}


# ---------------------------------------------------------------- one input, one output


@scenario
def plain(call: Caller) -> Expected:
    x = leaf()
    (call(Computes(scaled), x * 1) * 3).sum().backward()
    return Expected([one(3 * WEIGHT, THREES)], [(x, 3 * WEIGHT)])


@scenario
def residual(call: Caller) -> Expected:
    x = leaf()
    h = x * 1
    (h * 5 + call(Computes(scaled), h)).sum().backward()
    return Expected([one(WEIGHT, ONES)], [(x, 5 + WEIGHT)])


@scenario
def residual_around_a_leaf(call: Caller) -> Expected:
    x = leaf()
    (x * 5 + call(Computes(scaled), x)).sum().backward()
    return Expected([one(WEIGHT, ONES)], [(x, 5 + WEIGHT)])


@scenario
def shared_module_called_twice(call: Caller) -> Expected:
    x, module = leaf(), Computes(scaled)
    call(module, call(module, x * 1)).sum().backward()
    return Expected([one(WEIGHT, ONES), one(WEIGHT * WEIGHT, WEIGHT)], [(x, WEIGHT * WEIGHT)])


@scenario
def hook_replaces_the_gradient(call: Caller) -> Expected:
    x = leaf()
    h = x * 1
    call.replace = lambda grad: grad * 10
    (h * 5 + call(Computes(lambda weight, x: x * weight + x * 2), h)).sum().backward()
    own = WEIGHT + 2
    without = 5 + own  # what the leaf gets when nobody replaces
    return Expected([one(own, ONES)], [(x, 5 + 10 * own if call.hooked else without)])


# ---------------------------------------------------------------- in-place operations


@scenario
def module_writes_into_its_input(call: Caller) -> Expected:
    x = leaf()
    (call(Computes(lambda weight, x: x.relu_()), x * 1) * 3).sum().backward()
    return Expected([one(vector(3, 0, 3), THREES)], [(x, vector(3, 0, 3))])


@scenario
def module_writes_into_its_input_and_the_caller_uses_that(call: Caller) -> Expected:
    x = leaf()
    h = x * 1
    call(Computes(lambda weight, x: x.relu_()), h)
    (h * 3).sum().backward()
    return Expected([one(vector(3, 0, 3), THREES)], [(x, vector(3, 0, 3))])


@scenario
def module_writes_into_a_view(call: Caller) -> Expected:
    table = torch.tensor([[1.0, -2.0, 3.0], [1.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    rows = table * 1
    call(Computes(lambda weight, x: x.relu_()), rows[0])
    (rows * 3).sum().backward()
    return Expected([one(vector(3, 0, 3), THREES)], [(table, torch.stack([vector(3, 0, 3), THREES]))])


@scenario
def module_writes_twice_into_an_input_that_it_used_before(call: Caller) -> Expected:
    def function(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        before = x * 4
        x.mul_(2)
        x.add_(before.detach() * 0 + 1)
        return before, x

    x = leaf()
    before, after = call(Computes(function), x * 1)
    (before + after * 3).sum().backward()
    tens = vector(10, 10, 10)  # 4 along the first output, 3 * 2 along the second
    return Expected([({"args[0]": tens}, {"output[0]": ONES, "output[1]": THREES})], [(x, tens)])


@scenario
def module_writes_into_its_input_and_returns_something_else(call: Caller) -> Expected:
    def function(weight: Tensor, x: Tensor) -> Tensor:
        x.mul_(3)
        return x.sum().detach()

    x = leaf()
    h = x * 1
    call(Computes(function), h)
    (h * 2).sum().backward()
    return Expected([one(vector(6, 6, 6), None)], [(x, vector(6, 6, 6))])


@scenario
def inner_module_of_a_hooked_one_writes_into_its_input(call: Caller) -> Expected:
    x, inner = leaf(), Computes(lambda weight, x: x.relu_())
    outer = Computes(lambda weight, x: call(inner, x * weight) * 2)
    call(outer, x * 1).sum().backward()  # x * weight = (0.5, 2, 6) is positive, so relu passes everything
    return Expected([one(TWOS, TWOS), one(2 * WEIGHT, ONES)], [(x, 2 * WEIGHT)])


@scenario
def output_is_written_into(call: Caller) -> Expected:
    x = leaf()
    y = call(Computes(scaled), x * 1)
    y.relu_()
    (y * 3).sum().backward()
    return Expected([one(3 * WEIGHT, THREES)], [(x, 3 * WEIGHT)])


@scenario
def output_that_is_a_view_is_written_into(call: Caller) -> Expected:
    x = leaf(1, -2, -3)
    y = call(Computes(lambda weight, x: (x * weight).view(3, 1)), x * 1)
    y.relu_()  # (0.5, 2, -6)
    (y * 3).sum().backward()
    arriving = vector(3, 3, 0)
    return Expected([one(arriving * WEIGHT, arriving.view(3, 1))], [(x, arriving * WEIGHT)])


@scenario
def output_of_a_pure_view_module_is_written_into(call: Caller) -> Expected:
    x = leaf()
    y = call(Computes(lambda weight, x: x.view(3, 1)), x * 1)
    y.relu_()
    (y * 3).sum().backward()
    arriving = vector(3, 0, 3)
    return Expected([one(arriving, arriving.view(3, 1))], [(x, arriving)])


# ---------------------------------------------------------------- modules that hand on their input


@scenario
def identity_in_a_residual(call: Caller) -> Expected:
    x = leaf()
    h = x * 1
    (h * 5 + call(Computes(lambda weight, x: x), h)).sum().backward()
    return Expected([one(ONES, ONES)], [(x, vector(6, 6, 6))])


@scenario
def identity_and_its_output_is_written_into(call: Caller) -> Expected:
    x = leaf()
    y = F.relu(call(Computes(lambda weight, x: x), x * 1), inplace=True)
    (y * 3).sum().backward()
    return Expected([one(vector(3, 0, 3), vector(3, 0, 3))], [(x, vector(3, 0, 3))])


@scenario
def identity_of_a_squeezed_view_and_its_output_is_written_into(call: Caller) -> Expected:
    x = leaf()
    y = call(Computes(lambda weight, x: x), (x * 1).view(1, 3).squeeze(0))
    y.relu_()
    (y * 3).sum().backward()
    return Expected([one(vector(3, 0, 3), vector(3, 0, 3))], [(x, vector(3, 0, 3))])


@scenario
def identity_of_a_row_whose_table_is_used_as_well(call: Caller) -> Expected:
    table = torch.tensor([[1.0, -2.0, 3.0], [1.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    rows = table * 1
    row = rows[0]
    y = call(Computes(lambda weight, x: x), row)
    (y.sum() * 2 + row.sum() + rows.sum()).backward()
    return Expected([one(TWOS, TWOS)], [(table, torch.stack([vector(4, 4, 4), ONES]))])


@scenario
def part_of_the_input_in_a_residual(call: Caller) -> Expected:
    x = leaf()
    h = x * 1
    y = call(Computes(lambda weight, x: x[:1]), h)
    (y.sum() * 2 + h.sum()).backward()
    return Expected([one(vector(2, 0, 0), vector(2))], [(x, vector(3, 1, 1))])


def identity_then_write_then_use_of_the_input(call: Caller) -> Expected:
    """The one scenario that autograd cannot follow through two histories: right gradients, or a loud error."""
    x = leaf()
    h = x * 1
    y = call(Computes(lambda weight, x: x), h)
    y.relu_()
    (y + h).sum().backward()
    return Expected([], [(x, vector(2, 0, 2))])


# ---------------------------------------------------------------- several inputs, several outputs


@scenario
def second_output_depends_on_the_first_as_in_an_lstm_cell(call: Caller) -> Expected:
    def function(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        cell = x * weight
        return cell * 2, cell

    x = leaf()
    hidden, cell = call(Computes(function), x * 1)
    (hidden * 3 + cell * 7).sum().backward()
    sevens = vector(7, 7, 7)
    return Expected([({"args[0]": 13 * WEIGHT}, {"output[0]": THREES, "output[1]": sevens})], [(x, 13 * WEIGHT)])


@scenario
def dict_output(call: Caller) -> Expected:
    x = leaf()
    output = call(Computes(lambda weight, x: {"a": x * weight, "b": [x * 2]}), x * 1)
    (output["a"] * 3 + output["b"][0] * 4).sum().backward()
    arriving: Grads = {"output['a']": THREES, "output['b'][0]": vector(4, 4, 4)}
    return Expected([({"args[0]": 3 * WEIGHT + 8}, arriving)], [(x, 3 * WEIGHT + 8)])


@scenario
def nested_tuple_output(call: Caller) -> Expected:
    x = leaf()
    output, (hidden, cell) = call(Computes(lambda weight, x: (x * weight, (x * 4, x * 5))), x * 1)
    (output + hidden * 2 + cell * 3).sum().backward()
    arriving: Grads = {"output[0]": ONES, "output[1][0]": TWOS, "output[1][1]": THREES}
    return Expected([({"args[0]": WEIGHT + 23}, arriving)], [(x, WEIGHT + 23)])


@scenario
def only_the_second_output_is_used(call: Caller) -> Expected:
    x = leaf()
    _, second = call(Computes(lambda weight, x: (x * weight, x * 4)), x * 1)
    second.sum().backward()
    fours = vector(4, 4, 4)
    return Expected([({"args[0]": fours}, {"output[0]": None, "output[1]": ONES})], [(x, fours)])


@scenario
def output_of_whole_numbers_has_no_gradient(call: Caller) -> Expected:
    x = leaf()
    y, _ = call(Computes(lambda weight, x: (x * weight, x.argmax())), x * 1)
    y.sum().backward()
    return Expected([({"args[0]": WEIGHT}, {"output[0]": ONES, "output[1]": None})], [(x, WEIGHT)])


@scenario
def keyword_input(call: Caller) -> Expected:
    x, mask = leaf(), leaf()
    call(Computes(lambda weight, x, mask: x * weight + mask * 2), x * 1, mask=mask * 1).sum().backward()
    return Expected([({"args[0]": WEIGHT, "kwargs['mask']": TWOS}, {"output": ONES})], [(x, WEIGHT), (mask, TWOS)])


@scenario
def same_tensor_twice(call: Caller) -> Expected:
    x = leaf()
    h = x * 1
    call(Computes(lambda weight, a, b: a * 2 + b * 3), h, h).sum().backward()
    return Expected([({"args[0]": TWOS, "args[1]": THREES}, {"output": ONES})], [(x, vector(5, 5, 5))])


@scenario
def unused_input_has_no_gradient(call: Caller) -> Expected:
    x, unused = leaf(), leaf()
    call(Computes(lambda weight, x, unused: x * weight), x, unused).sum().backward()
    return Expected([({"args[0]": WEIGHT, "args[1]": None}, {"output": ONES})], [(x, WEIGHT), (unused, None)])


@scenario
def input_of_whole_numbers_has_no_gradient(call: Caller) -> Expected:
    x, index = leaf(), torch.tensor([0, 1, 2])
    call(Computes(lambda weight, index, x: x[index] * weight), index, x * 1).sum().backward()
    return Expected([({"args[0]": None, "args[1]": WEIGHT}, {"output": ONES})], [(x, WEIGHT)])


# ---------------------------------------------------------------- what a pass reaches


@scenario
def no_input_requires_a_gradient(call: Caller) -> Expected:
    x, module = leaf().detach(), Computes(scaled)
    call(module, x).sum().backward()
    return Expected([one(None, ONES)], [(module.weight, x)])


@scenario
def gradients_of_parameters_only(call: Caller) -> Expected:
    x, module = leaf(), Computes(scaled)
    y = call(module, x * 1)
    (module.weight.grad,) = torch.autograd.grad(y.sum(), [module.weight])
    return Expected([one(None, ONES)], [(module.weight, x.detach()), (x, None)])


@scenario
def gradient_of_a_leaf_input_only(call: Caller) -> Expected:
    x = leaf()
    (x.grad,) = torch.autograd.grad(call(Computes(scaled), x).sum(), [x])
    return Expected([one(WEIGHT, ONES)], [(x, WEIGHT)])


@scenario
def a_pass_through_the_parameters_leaves_nothing_for_the_next(call: Caller) -> Expected:
    kept = {}

    def function(weight: Tensor, x: Tensor) -> Tensor:
        kept["side"] = (x * 5).sum()
        return x * weight

    x, module = leaf(), Computes(function)
    y = call(module, x * 1)
    torch.autograd.grad((y * 7).sum(), module.weight, retain_graph=True)
    kept["side"].backward()  # reaches the input, but not through the output: no event of this call
    return Expected([one(None, vector(7, 7, 7))], [(x, vector(5, 5, 5))])


@scenario
def two_passes_over_a_retained_graph(call: Caller) -> Expected:
    x = leaf()
    y = call(Computes(scaled), x * 1)
    y.sum().backward(retain_graph=True)
    (y * 2).sum().backward()
    return Expected([one(WEIGHT, ONES), one(2 * WEIGHT, TWOS)], [(x, 3 * WEIGHT)])


@scenario
def second_order_pass_is_no_second_event(call: Caller) -> Expected:
    x = leaf()
    h = x * 1
    (grad,) = torch.autograd.grad(call(Computes(lambda weight, x: x**3), h).sum(), h, create_graph=True)
    (grad**2).sum().backward()  # d/dx (3 x^2)^2 = 36 x^3
    value = x.detach()
    return Expected([one(3 * value**2, ONES)], [(x, 36 * value**3)])


def _checkpointed(call: Caller, reentrant: bool) -> Expected:
    x, module = leaf(), Computes(lambda weight, x: (x * weight).sin())
    checkpoint(lambda x: call(module, x * 1) * 3, x, use_reentrant=reentrant).sum().backward()
    own = 3 * torch.cos(x.detach() * WEIGHT) * WEIGHT
    return Expected([one(own, THREES)], [(x, own)])


@scenario
def checkpoint_without_reentry(call: Caller) -> Expected:
    return _checkpointed(call, reentrant=False)


@scenario
def checkpoint_with_reentry(call: Caller) -> Expected:
    return _checkpointed(call, reentrant=True)


# ---------------------------------------------------------------- the tests


def run(function: Scenario, hooked: bool) -> tuple[Caller, Expected]:
    torch.manual_seed(0)
    call = Caller(hooked)
    return call, function(call)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_hook_sees_this_calls_own_gradients(name: str) -> None:
    call, expected = run(SCENARIOS[name], hooked=True)
    torch.testing.assert_close(call.events, expected.events, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_gradients_of_the_leaves_are_right(name: str) -> None:
    _, expected = run(SCENARIOS[name], hooked=True)
    for tensor, grad in expected.leaves:
        torch.testing.assert_close(tensor.grad, grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", sorted(SCENARIOS.keys() - {"hook_replaces_the_gradient"}))
def test_the_gradients_of_the_leaves_have_the_bits_of_a_run_without_hooks(name: str) -> None:
    _, bare = run(SCENARIOS[name], hooked=False)
    _, hooked = run(SCENARIOS[name], hooked=True)
    assert bare.leaves
    for (tensor, _), (other, _) in zip(bare.leaves, hooked.leaves, strict=True):
        assert equal(tensor.grad, other.grad)


def test_a_write_that_autograd_cannot_follow_is_an_error_or_comes_out_right() -> None:
    try:
        _, expected = run(identity_then_write_then_use_of_the_input, hooked=True)
    except SharedMemoryError as error:
        assert "Computes" in str(error) and "shares memory" in str(error) and "modified in place" in str(error)
        return
    for tensor, grad in expected.leaves:
        assert equal(tensor.grad, grad)


def test_a_write_that_autograd_cannot_follow_needs_no_hook_to_be_legal() -> None:
    _, expected = run(identity_then_write_then_use_of_the_input, hooked=False)
    for tensor, grad in expected.leaves:
        assert equal(tensor.grad, grad)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_saved_output_that_is_written_into_is_still_autograds_error(hooked: bool) -> None:
    y = Caller(hooked)(Computes(lambda weight, x: x.sigmoid()), leaf() * 1)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_module_that_writes_into_a_leaf_is_still_an_error_and_the_leaf_is_untouched(hooked: bool) -> None:
    x = leaf()
    with pytest.raises(RuntimeError, match=r"in-?place"):
        Caller(hooked)(Computes(lambda weight, x: x.relu_()), x)
    assert equal(x.detach(), vector(1, -2, 3))


@pytest.mark.parametrize("hooked", [False, True])
def test_a_write_into_a_leaf_behind_an_identity_is_still_an_error_and_the_leaf_is_untouched(hooked: bool) -> None:
    x = leaf()
    y = Caller(hooked)(Computes(lambda weight, x: x), x)
    with pytest.raises(RuntimeError, match=r"in-?place"):
        y.relu_()
    assert equal(x.detach(), vector(1, -2, 3))


def test_there_are_forty() -> None:
    raising = 3  # a saved output, a leaf, a leaf behind an identity
    unfollowed = 1
    assert len(SCENARIOS) + raising + unfollowed == 40
