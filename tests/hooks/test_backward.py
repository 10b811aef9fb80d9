"""What a backward pass may do: stop, raise, come again, run in two threads, be of second order, be recomputed."""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.errors import HookError, MutationError

from .reference import Computes, equal, leaf, vector

WEIGHT = vector(0.5, -1.0, 2.0)
ONES = vector(1, 1, 1)


def scaled() -> Computes:
    return Computes(lambda weight, x: x * weight)


def hooked(module: nn.Module) -> list[tuple[Any, Any]]:
    seen: list[tuple[Any, Any]] = []
    hookline.register_backward_hook(module, lambda module, *grads: seen.append(tuple(map(tuple, grads))))
    return seen


# ---------------------------------------------------------------- a hook must not write into gradients


def write_into(which: int) -> Callable[..., None]:
    def writing(module: nn.Module, *grads: Any) -> None:
        grads[which][0].mul_(100)

    return writing


@pytest.mark.parametrize(
    ("register", "which", "port"),
    [
        (hookline.register_backward_hook, 0, "grad_input"),
        (hookline.register_backward_hook, 1, "grad_output"),
        (hookline.register_backward_pre_hook, 0, "grad_output"),
    ],
)
def test_a_hook_that_writes_into_a_gradient_is_told_so(register: Callable[..., Any], which: int, port: str) -> None:
    module = scaled()
    register(module, write_into(which))
    with pytest.raises(MutationError) as caught:
        (module(leaf() * 1) * 1).sum().backward()
    message = str(caught.value)
    assert "write_into.<locals>.writing at Computes:" in message
    assert f"wrote into {port}[0] in place" in message
    assert f"return tuple(g * 2 for g in {port})" in message
    assert isinstance(caught.value, HookError)


@pytest.mark.parametrize("register", [hookline.register_backward_hook, hookline.register_backward_pre_hook])
@pytest.mark.parametrize("sibling_first", [True, False])
def test_a_write_that_cannot_be_noticed_reaches_nobody(register: Callable[..., Any], sibling_first: bool) -> None:
    """Addition hands one gradient tensor to both of its branches; ``.data`` counts no write."""

    def writing(module: nn.Module, *grads: Any) -> None:
        for grad in (*grads[0], *grads[-1]):
            grad.data.mul_(100)

    module, x, other = scaled(), leaf(), leaf()
    register(module, writing)
    parts = [other * 1, module(x * 1)]
    total = parts[0] + parts[1] if sibling_first else parts[1] + parts[0]
    (total * 1).sum().backward()
    assert equal(x.grad, WEIGHT) and equal(other.grad, ONES) and equal(module.weight.grad, x.detach())


def test_gradients_that_were_kept_do_not_change_when_autograd_adds_to_them() -> None:
    module, x, kept = scaled(), leaf(), []
    hookline.register_backward_hook(module, lambda module, grads, outs: kept.extend((grads[0], outs[0])))
    h = x * 1
    (module(h) + h).sum().backward()
    (module(x)).sum().backward()
    x.grad.mul_(0)
    assert equal(kept, [WEIGHT, ONES, WEIGHT, ONES])


# ---------------------------------------------------------------- exceptions of hooks


class Failure(Exception):
    pass


def failing(*_: Any) -> None:
    raise Failure("of the user")


@pytest.mark.parametrize(
    ("register", "site"),
    [
        (hookline.register_forward_pre_hook, "forward pre-hook failing at Computes:input"),
        (hookline.register_forward_hook, "forward hook failing at Computes:output"),
        (hookline.register_backward_pre_hook, "backward pre-hook failing at Computes:grad_output"),
        (hookline.register_backward_hook, "backward hook failing at Computes:grad_input"),
    ],
)
@pytest.mark.parametrize("input_grad", [True, False])
def test_an_exception_of_a_hook_reaches_the_user_with_a_note_of_hook_and_site(
    register: Callable[..., Any], site: str, input_grad: bool
) -> None:
    module = scaled()
    register(module, failing)
    with pytest.raises(Failure, match="of the user") as caught:
        module(leaf().detach().requires_grad_(input_grad)).sum().backward()
    assert caught.value.__notes__ == [f"Raised by the {site}."]
    assert "failing" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_after_an_exception_of_a_hook_the_next_step_is_as_ever() -> None:
    module, x = scaled(), leaf()
    with hookline.register_backward_hook(module, failing), pytest.raises(Failure):
        module(x).sum().backward()
    seen = hooked(module)
    x.grad = None
    module(x).sum().backward()
    assert equal(seen, [((WEIGHT,), (ONES,))]) and equal(x.grad, WEIGHT)


def test_a_backward_that_raises_further_down_leaves_no_state() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise Failure

    module, grads = Computes(lambda weight, x: Breaks.apply(x) * weight), []
    seen = hooked(module)
    hookline.register_backward_pre_hook(module, lambda module, g: grads.append(weakref.ref(g[0])))
    for _ in range(3):
        y = module(leaf() * 1)
        with pytest.raises(Failure):
            y.sum().backward()
        del y
    assert not seen, "the call's inputs were never reached"
    assert [ref() for ref in grads] == [None, None, None]


def test_a_pass_that_stops_before_the_inputs_and_one_that_raises_do_not_mix() -> None:
    module, x = scaled(), leaf()
    seen = hooked(module)
    y = module(x * 1)
    y.register_hook(lambda grad: failing() if grad[0] == 7 else None)
    with pytest.raises(Failure):
        (y * 7).sum().backward(retain_graph=True)
    torch.autograd.grad(y.sum(), module.weight, retain_graph=True)
    (y * 2).sum().backward()
    assert equal(seen, [((None,), (ONES,)), ((2 * WEIGHT,), (vector(2, 2, 2),))])


# ---------------------------------------------------------------- several passes


def test_each_pass_over_a_retained_graph_is_an_event_of_its_own() -> None:
    module, x = scaled(), leaf()
    seen = hooked(module)
    y = module(x * 1)
    for factor in (1, 2, 5):
        (y * factor).sum().backward(retain_graph=True)
    assert equal(seen, [((f * WEIGHT,), (f * ONES,)) for f in (1, 2, 5)])


def test_a_graph_that_was_freed_is_still_an_error_of_autograd() -> None:
    module = Computes(lambda weight, x: x * x * weight)
    hooked(module)
    y = module(leaf() * 1)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_two_losses_that_share_a_call_are_two_events() -> None:
    module, x = Computes(lambda weight, x: (x * weight, x * 3)), leaf()
    seen = hooked(module)
    first, second = module(x * 1)
    first.sum().backward(retain_graph=True)
    second.sum().backward()
    assert equal(seen, [((WEIGHT,), (ONES, None)), ((3 * ONES,), (None, ONES))])


def test_a_backward_inside_a_hook_is_a_pass_of_its_own() -> None:
    """The outer pass must still find its own gradients afterwards."""
    outer, inner, x, seen = scaled(), scaled(), leaf(), []
    hookline.register_backward_hook(inner, lambda module, grads, _: seen.append(("inner", grads[0])))

    def nested(module: nn.Module, grad_output: Any) -> None:
        with torch.enable_grad():
            inner(leaf()).sum().backward()

    hookline.register_backward_pre_hook(outer, nested)
    hookline.register_backward_hook(outer, lambda module, grads, _: seen.append(("outer", grads[0])))
    (outer(x * 1) * 3).sum().backward()
    assert [name for name, _ in seen] == ["inner", "outer"]
    assert equal([grad for _, grad in seen], [WEIGHT, 3 * WEIGHT])


def test_two_threads_go_backward_through_one_graph() -> None:
    barrier = threading.Barrier(2)

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            barrier.wait(10)
            return grad

    module, x = Computes(lambda weight, x: Waits.apply(x) * weight), leaf()
    seen = hooked(module)
    y = module(x)
    factors = (1.0, 10.0)
    threads = [
        threading.Thread(target=lambda f=f: torch.autograd.grad(y, x, f * ONES, retain_graph=True)) for f in factors
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen.sort(key=lambda event: float(event[1][0][0]))
    assert equal(seen, [((f * WEIGHT,), (f * ONES,)) for f in factors])


def test_two_threads_train_two_models_that_share_a_module() -> None:
    module, wrong = scaled(), []

    def check(_: nn.Module, grads: Any, outs: Any) -> None:
        if not equal(grads[0], outs[0] * WEIGHT):
            wrong.append((grads, outs))

    hookline.register_backward_hook(module, check)

    def train(factor: float) -> None:
        for _ in range(30):
            x = leaf()
            torch.autograd.grad((module(x) * factor).sum(), x)

    threads = [threading.Thread(target=train, args=(factor,)) for factor in (1.0, 2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---------------------------------------------------------------- second order


def test_a_gradient_penalty_has_the_bits_of_a_run_without_hooks() -> None:
    def run(observed: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        if observed:
            for module in model.modules():
                hooked(module)
        x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        output = model(x).sum()
        (grad,) = torch.autograd.grad(output, x, create_graph=True)
        (output + (grad.norm(dim=1) - 1).pow(2).mean()).backward()
        return x.grad, *(parameter.grad for parameter in model.parameters())

    assert equal(run(observed=True), run(observed=False))


def test_the_second_order_pass_is_no_event_and_right() -> None:
    module, x = Computes(lambda weight, x: x**3), leaf()
    seen = hooked(module)
    (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    value = x.detach()
    assert equal(first.detach(), 3 * value**2) and equal(second.detach(), 6 * value) and equal(third, 6 * ONES)
    assert len(seen) == 1 and equal(seen[0][0][0].detach(), 3 * value**2)


def test_a_hook_may_build_a_loss_of_a_gradient_under_create_graph() -> None:
    module, x, penalty = Computes(lambda weight, x: x**3), leaf(), []
    hookline.register_backward_hook(module, lambda module, grads, _: penalty.append((grads[0] ** 2).sum()))
    torch.autograd.grad(module(x).sum(), x, create_graph=True)
    penalty[0].backward()  # d/dx (3 x^2)^2 = 36 x^3
    assert torch.allclose(x.grad, 36 * x.detach() ** 3)


def test_gradcheck_and_gradgradcheck_hold_through_hooks() -> None:
    module = Computes(lambda weight, x: (x * weight).sin())
    hooked(module)
    hookline.register_backward_pre_hook(module, lambda *_: None)
    x = leaf()
    assert torch.autograd.gradcheck(module, (x,)) and torch.autograd.gradgradcheck(module, (x,))


# ---------------------------------------------------------------- recomputation


@pytest.mark.parametrize("reentrant", [True, False])
def test_hooks_in_a_checkpoint_see_right_gradients_and_train_to_the_same_bits(reentrant: bool) -> None:
    def run(observed: bool) -> tuple[Any, list[Any]]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(3, 3)).double()
        seen = [hooked(module) for module in block.modules()] if observed else []
        x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
        y = checkpoint(block, x * 1, use_reentrant=reentrant)
        y.sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in block.parameters())], seen

    bare, _ = run(observed=False)
    observed, seen = run(observed=True)
    assert equal(observed, bare)
    assert [len(events) for events in seen] == [1] * 5
    ((block_in,), (block_out,)), ((first_in,), _) = seen[0][0], seen[1][0]
    assert equal(block_in, bare[1]) and equal(first_in, bare[1]) and equal(block_out, torch.ones(4, 3).double())


def test_always_called_hooks_are_not_disturbed_by_a_recomputation_that_stops_early() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.tanh(self.linear(x)))

    module, shapes = Block(), []
    hookline.register_forward_hook(
        module, lambda module, args, output: shapes.append(None if output is None else output.shape), always_call=True
    )
    checkpoint(module, torch.ones(1, 2, requires_grad=True), use_reentrant=False).sum().backward()
    assert shapes == [(1, 2)]


# ---------------------------------------------------------------- what is reached


def test_the_input_gradient_is_none_where_the_input_needs_none() -> None:
    module = scaled()
    seen = hooked(module)
    module(leaf().detach()).sum().backward()
    assert equal(seen, [((None,), (ONES,))])


def test_the_hook_of_a_call_whose_inputs_are_not_reached_runs_after_the_backward_of_the_call() -> None:
    module, order = scaled(), []
    module.weight.register_hook(lambda grad: order.append("weight"))
    hookline.register_backward_hook(module, lambda *_: order.append("hook"))
    module(leaf().detach()).sum().backward()
    assert order == ["weight", "hook"]


def test_an_output_that_nobody_uses_gives_no_event() -> None:
    module, x = scaled(), leaf()
    seen = hooked(module)
    module(x)
    x.sum().backward()
    assert not seen


def test_gradients_with_respect_to_an_intermediate_tensor() -> None:
    module, x = scaled(), leaf()
    seen = hooked(module)
    h = x * 1
    (grad,) = torch.autograd.grad(module(h * 2).sum(), h)
    assert equal(grad, 2 * WEIGHT) and equal(seen, [((WEIGHT,), (ONES,))])


def test_nan_and_inf_pass_through() -> None:
    module, x = scaled(), leaf()
    seen = hooked(module)
    (module(x) * vector(float("nan"), float("inf"), 1)).sum().backward()
    assert torch.isnan(seen[0][0][0][0]) and torch.isinf(seen[0][0][0][1]) and equal(x.grad, seen[0][0][0])


def test_a_module_that_is_freed_before_its_backward_warns() -> None:
    module, x = scaled(), leaf()
    seen = hooked(module)
    y = module(x)
    del module
    with pytest.warns(RuntimeWarning, match="the module at Computes:grad_input was freed before its backward"):
        y.sum().backward()
    assert not seen and equal(x.grad, WEIGHT)


@pytest.mark.parametrize("mutation", [lambda x: x.unsqueeze_(0), lambda x: x.t_(), lambda x: x.squeeze_(0)])
def test_a_module_may_change_the_shape_of_its_input_in_place(mutation: Callable[[Tensor], Tensor]) -> None:
    def run(observed: bool) -> tuple[Any, ...]:
        module, x = Computes(lambda weight, x: mutation(x).sum(-1) * 2), torch.ones(1, 3).requires_grad_()
        if observed:
            hooked(module)
        h = x * 1
        y = module(h)
        (y.sum() + h.sum()).backward()
        return tuple(h.shape), x.grad

    assert equal(run(observed=True), run(observed=False))


def test_a_module_may_ask_for_the_gradient_of_its_own_input() -> None:
    def run(observed: bool) -> Any:
        module, x = Computes(lambda weight, x: x.requires_grad_()), torch.ones(3)
        if observed:
            hooked(module)
        (module(x) * 3).sum().backward()
        return x.grad

    assert equal(run(observed=True), run(observed=False))


def test_a_module_may_write_into_a_leaf_without_gradients() -> None:
    def function(weight: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.clamp_(min=0)
        return x * weight

    def run(observed: bool) -> tuple[Any, ...]:
        module, x = Computes(function), leaf()
        if observed:
            hooked(module)
        module(x).sum().backward()
        return x.detach(), x.grad, module.weight.grad

    assert equal(run(observed=True), run(observed=False))


def test_a_plain_tensor_that_the_module_fills_carries_the_gradient() -> None:
    module, x, buffer = Computes(lambda weight, x, buffer: [buffer.copy_(x * 2), None][1]), leaf(), vector(0, 0, 0)
    seen = hooked(module)
    module(x * 1, buffer)
    buffer.sum().backward()
    assert equal(x.grad, 2 * ONES)
    assert equal(seen, [((2 * ONES, None), (None,))])
