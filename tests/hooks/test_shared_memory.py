"""Memory that two tensors share around an observed call: right gradients or a loud error, and no false alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline
from hookline.errors import SharedMemoryError

from .reference import Computes, equal, leaf, vector

# Each program gets a function that makes observed modules, computes something, and returns the tensors to compare.
Observe = Callable[[nn.Module], nn.Module]
Program = Callable[[Observe], Any]


_alive: list[nn.Module] = []


@pytest.fixture(autouse=True)
def _modules_live_until_the_end_of_the_test() -> Iterator[None]:
    yield
    _alive.clear()


def bare(module: nn.Module) -> nn.Module:
    return module


def observed(module: nn.Module) -> nn.Module:
    hookline.register_backward_hook(module, lambda *_: None)
    _alive.append(module)
    return module


def half_observed(module: nn.Module) -> nn.Module:
    """Only a node after the call, none before it."""
    hookline.register_backward_pre_hook(module, lambda *_: None)
    _alive.append(module)
    return module


def keeps_output(view: Callable[[Tensor], Tensor] = lambda t: t) -> nn.Module:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x * vector(0.5, -1.0, 2.0)
            return view(self.kept)

    return Keeps()


def keeps_input() -> nn.Module:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x
            return x * 3

    return Keeps()


def backward(x: Tensor, loss: Tensor) -> Tensor | None:
    loss.sum().backward()
    return x.grad


# ---------------------------------------------------------------- what autograd cannot follow through an alias

TANGLED: dict[str, Program] = {}
HARMLESS: dict[str, Program] = {}


def tangled(program: Program) -> Program:
    TANGLED[program.__name__] = program
    return program


def harmless(program: Program) -> Program:
    HARMLESS[program.__name__] = program
    return program


@tangled
def output_of_identity_written_then_both_used(observe: Observe) -> Any:
    x = leaf()
    h = x * 1
    y = observe(nn.Identity())(h)
    y.mul_(2)
    return backward(x, y + h)


@tangled
def output_of_identity_written_then_only_the_input_used(observe: Observe) -> Any:
    x = leaf()
    h = x * 1
    y = observe(nn.Identity())(h)
    y.mul_(2)
    return backward(x, h * 5)


@tangled
def input_of_identity_written_then_only_the_output_used(observe: Observe) -> Any:
    x = leaf()
    h = x * 1
    y = observe(nn.Identity())(h)
    h.mul_(2)
    return backward(x, y * 5)


@tangled
def input_of_identity_written_then_both_used(observe: Observe) -> Any:
    x = leaf()
    h = x * 1
    y = observe(nn.Dropout(0.5).eval())(h)
    h.mul_(2)
    return backward(x, y * 5 + h)


@tangled
def two_identities_of_one_tensor(observe: Observe) -> Any:
    x = leaf()
    h = x * 1
    y, z = observe(nn.Identity())(h), observe(nn.Identity())(h)
    z.mul_(2)
    return backward(x, y * 5)


@tangled
def a_chain_of_identities_whose_end_is_written(observe: Observe) -> Any:
    x = leaf()
    y = observe(nn.Identity())(x * 1)
    z = observe(nn.Identity())(y)
    z.mul_(2)
    return backward(x, y * 5)


@tangled
def input_that_is_a_view_written_then_the_output_used(observe: Observe) -> Any:
    x = leaf()
    h = (x * 1).view(3, 1)
    y = observe(nn.Flatten(0))(h)
    h.mul_(2)
    return backward(x, y * 5)


@tangled
def whole_written_of_which_the_input_is_a_part(observe: Observe) -> Any:
    x = leaf()
    h = x * 1
    y = observe(nn.Identity())(h[:2])
    h.mul_(2)
    return backward(x, y * 5)


@tangled
def view_of_the_input_written_then_the_input_used(observe: Observe) -> Any:
    x = leaf()
    h = x * 1
    y = observe(nn.Unflatten(0, (3, 1)))(h)
    y.mul_(2)
    return backward(x, h * 5)


@tangled
def output_that_the_module_keeps_written_then_the_kept_one_used(observe: Observe) -> Any:
    x = leaf()
    module = observe(keeps_output())
    y = module(x * 1)
    y.relu_()
    return backward(x, module.kept * 2)


@tangled
def output_that_the_module_keeps_written_then_both_used(observe: Observe) -> Any:
    x = leaf()
    module = observe(keeps_output())
    y = module(x * 1)
    y.relu_()
    return backward(x, module.kept * 2 + y)


@tangled
def view_of_what_the_module_keeps_written(observe: Observe) -> Any:
    x = leaf()
    module = observe(keeps_output(lambda kept: kept[:2]))
    y = module(x * 1)
    y.mul_(3)
    return backward(x, module.kept * 5)


@tangled
def kept_output_written_then_the_returned_one_used(observe: Observe) -> Any:
    x = leaf()
    module = observe(keeps_output())
    y = module(x * 1)
    module.kept.relu_()
    return backward(x, y * 2)


@tangled
def input_that_the_module_keeps_written_by_the_caller(observe: Observe) -> Any:
    x = leaf()
    h = x * 1
    module = observe(keeps_input())
    y = module(h)
    h.relu_()
    return backward(x, module.kept * 2 + y)


@pytest.mark.parametrize("name", TANGLED)
@pytest.mark.parametrize("observe", [observed, half_observed])
def test_a_write_through_an_alias_gives_right_gradients_or_an_error(name: str, observe: Observe) -> None:
    expected = TANGLED[name](bare)
    try:
        found = TANGLED[name](observe)
    except SharedMemoryError as error:
        assert "shares memory" in str(error) and "clone" in str(error)
    else:
        assert equal(found, expected)


# ---------------------------------------------------------------- what must work as without hooks


@harmless
def identity_and_its_output_is_written(observe: Observe) -> Any:
    x = leaf()
    y = observe(nn.Identity())(x * 1)
    y.mul_(2)
    return backward(x, y * 5)


@harmless
def identity_of_something_used_before_and_not_after(observe: Observe) -> Any:
    x = leaf()
    h = x * 1
    before = h * 7
    y = observe(nn.Identity())(h)
    return backward(x, y * 5 + before)


@harmless
def dropout_in_evaluation_in_a_residual(observe: Observe) -> Any:
    x = leaf()
    h = x * 1
    return backward(x, observe(nn.Dropout(0.5).eval())(h) * 2 + h)


@harmless
def a_write_without_gradients_to_what_an_identity_returned(observe: Observe) -> Any:
    x = leaf()
    h = x * 1
    y = observe(nn.Identity())(h)
    with torch.no_grad():
        y.mul_(2)
    return y.detach(), h.detach(), backward(x, y * 5)


@harmless
def input_written_and_the_output_not_used(observe: Observe) -> Any:
    x = leaf()
    h = x * 1
    observe(nn.Identity())(h)
    h.mul_(2)
    return backward(x, h * 5)


@harmless
def kept_output_used_and_nothing_written(observe: Observe) -> Any:
    x = leaf()
    module = observe(keeps_output())
    y = module(x * 1)
    return backward(x, module.kept * 2 + y)


@harmless
def kept_output_and_the_returned_one_written(observe: Observe) -> Any:
    x = leaf()
    module = observe(keeps_output())
    y = module(x * 1)
    y.relu_()
    return backward(x, y * 2)


@harmless
def kept_input_of_a_step_before(observe: Observe) -> Any:
    x = leaf()
    module = observe(keeps_input())
    for _ in range(3):
        h = x * 1
        y = module(h)
        h += 1
    return backward(x, y)


@harmless
def nan_after_a_write(observe: Observe) -> Any:
    x = leaf()
    y = observe(nn.Identity())(x * 1)
    y.mul_(2)
    return backward(x, y * vector(float("nan"), float("inf"), 1))


@harmless
def views_of_one_tensor_through_modules_of_their_own(observe: Observe) -> Any:
    x = leaf()
    h = x * 1
    first, rest = observe(nn.Identity())(h[:1]), observe(nn.Identity())(h[1:])
    return backward(x, torch.cat([first * 2, rest * 3]))


@harmless
def halves_of_one_tensor_written_by_modules_of_their_own(observe: Observe) -> Any:
    x = leaf()
    h = x * 1
    module = observe(Computes(lambda weight, x: x.mul_(5)))
    first, rest = module(h[:1]), module(h[1:])
    return backward(x, torch.cat([first * 2, rest * 3]))


@harmless
def flatten_then_relu_in_place(observe: Observe) -> Any:
    x = leaf()
    model = nn.Sequential(*map(observe, (nn.Unflatten(0, (3, 1)), nn.Flatten(0), nn.ReLU(inplace=True))))
    return backward(x, observe(model)(x * 1) * 2)


@harmless
def relu_in_place_after_dropout_in_evaluation(observe: Observe) -> Any:
    x = leaf()
    model = nn.Sequential(*map(observe, (nn.Linear(3, 3).double(), nn.Dropout(0.5).eval(), nn.ReLU(inplace=True))))
    return backward(x, observe(model)(x) * 2)


@harmless
def residual_added_in_place_to_the_branch(observe: Observe) -> Any:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = observe(nn.Linear(3, 3).double()), observe(nn.Dropout(0.5).eval())

        def forward(self, x: Tensor) -> Tensor:
            y = self.drop(self.linear(x))
            y += x
            return F.relu(y, inplace=True)

    x = leaf()
    return backward(x, observe(nn.Sequential(observe(Block()), observe(Block())))(x * 1))


@harmless
def branch_added_in_place_to_the_residual(observe: Observe) -> Any:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.linear = observe(nn.Dropout(0.5).eval()), observe(nn.Linear(3, 3).double())

        def forward(self, x: Tensor) -> Tensor:
            branch = self.linear(x * 1)
            x = x * 1
            x += self.drop(branch)
            return x

    x = leaf()
    return backward(x, observe(nn.Sequential(observe(Block()), observe(Block())))(x * 1))


@harmless
def accumulation_into_the_input_of_an_identity(observe: Observe) -> Any:
    """As in ``x = drop(x); x += y``: the sum passes the gradient on as it is."""
    x = leaf()
    h = x * 1
    y = observe(nn.Dropout(0.5).eval())(h)
    y += x.detach()
    return backward(x, y * 3)


@harmless
def chunks_that_a_module_returns(observe: Observe) -> Any:
    x = leaf()
    first, second, third = observe(Computes(lambda weight, x: (x * weight).chunk(3)))(x * 1)
    return backward(x, first * 2 + second * 3 + third)


@harmless
def disjoint_parts_that_a_module_returns_are_written(observe: Observe) -> Any:
    x = leaf()
    first, rest = observe(Computes(lambda weight, x: (lambda h: (h[:1], h[1:]))(x * weight)))(x * 1)
    first.mul_(2)
    rest.mul_(3)
    return backward(x, torch.cat([first, rest]))


@harmless
def the_last_step_of_a_sequence_next_to_the_sequence(observe: Observe) -> Any:
    x = leaf()
    whole, last = observe(Computes(lambda weight, x: (lambda h: (h, h[-1]))(x * weight)))(x * 1)
    return backward(x, whole * 2 + last)


@harmless
def a_state_that_is_written_each_step(observe: Observe) -> Any:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", vector(0, 0, 0))

        def forward(self, x: Tensor) -> Tensor:
            self.state.mul_(0.9).add_(x.detach())
            return x + self.state

    x = leaf()
    module = observe(Memory())
    return module.state, backward(x, module(module(x)))


@harmless
def weight_handed_out_by_a_module(observe: Observe) -> Any:
    module = observe(Computes(lambda weight, x: weight))
    x = leaf()
    (module(x) * x).sum().backward()
    return module.weight.grad, x.grad


@harmless
def row_of_a_weight_handed_out_by_a_module(observe: Observe) -> Any:
    module = observe(Computes(lambda weight, x: weight[:2]))
    (module(leaf()) * 3).sum().backward()
    return module.weight.grad


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("observe", [observed, half_observed])
def test_no_false_alarm_and_the_same_bits(name: str, observe: Observe) -> None:
    torch.manual_seed(0)
    expected = HARMLESS[name](bare)
    torch.manual_seed(0)
    assert equal(HARMLESS[name](observe), expected)


def test_two_outputs_that_are_one_memory_refuse_a_write_instead_of_losing_its_gradient() -> None:
    module = observed(Computes(lambda weight, x: (lambda h: (h, h.view(3, 1)))(x * weight)))
    first, second = module(leaf() * 1)
    before = first.detach().clone()
    with pytest.raises(RuntimeError, match="modified inplace"):
        second.relu_()
    assert equal(first.detach(), before)


def test_a_forward_observer_needs_no_alias_so_every_program_keeps_its_bits() -> None:
    for name, program in (TANGLED | HARMLESS).items():

        def look(module: nn.Module) -> nn.Module:
            hookline.register_forward_hook(module, lambda *_: None)
            hookline.register_forward_pre_hook(module, lambda *_: None)
            return module

        torch.manual_seed(0)
        expected = program(bare)
        torch.manual_seed(0)
        assert equal(program(look), expected), name
