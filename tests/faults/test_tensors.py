"""Hooks on tensors and parameters: each gets the gradient of one value, in one backward pass, and of nothing else."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import hookline
from hookline.errors import HookError, MutationError, SiteError

from ..threads import in_threads
from .catalogue import REFUSED, RIGHT, fault

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
"""All numbers below are small integers, which each of these holds exactly."""


def full(value: complex, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full(shape, value, dtype=dtype)


def leaf(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values or (1.0, -2.0, 3.0), dtype=dtype).requires_grad_()


def real_sum(tensor: Tensor) -> Tensor:
    total = tensor.sum()
    return total.real if total.is_complex() else total


def same(first: Any, second: Any) -> bool:
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
    if first is None or second is None:
        return first is second
    return first.dtype == second.dtype and torch.equal(first, second)


def linear(dtype: torch.dtype = torch.float64) -> nn.Linear:
    return nn.Linear(3, 2, bias=False, dtype=dtype)


# ---------------------------------------------------------------- 28: writes into the gradient


def set_item(grad: Tensor) -> None:
    grad[0] = 0


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda grad: grad.mul_(0),
    "item": set_item,
    "out": lambda grad: torch.mul(grad, 0, out=grad),
    "copy_": lambda grad: grad.copy_(torch.zeros_like(grad)),
    "detached": lambda grad: grad.detach().zero_(),
    "view": lambda grad: grad.view(-1)[1:].zero_(),
}


class Two(nn.Module):
    """A sum of two branches, which share the gradient of the sum."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.left = Scale(dtype)
        self.right = Scale(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


class Scale(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype))
        self.scaled: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.scaled = self.weight + x
        return self.scaled


def hook_right(model: Two, kind: str, write: Callable[[Tensor], Any]) -> Callable[[], Tensor]:
    """Hook the right branch; returns what computes the sum."""
    x = torch.zeros(3, dtype=model.left.weight.dtype)

    def forward() -> Tensor:
        output = model(x)
        assert isinstance(model.right.scaled, Tensor)
        if kind == "tensor":
            hookline.register_tensor_hook(model.right.scaled, write)
        elif kind == "any of several":
            hookline.register_multi_grad_hook([model.right.scaled], write, mode="any")
        return output

    if kind == "parameter":
        hookline.register_parameter_hook(model, "right.weight", write)
    elif kind == "backward":
        hookline.register_backward_hook(model.right, lambda module, grad_input, grad_output: write(grad_output[0]))
    elif kind == "backward pre":
        hookline.register_backward_pre_hook(model.right, lambda module, grad_output: write(grad_output[0]))
    return forward


KINDS = ["tensor", "parameter", "any of several", "backward", "backward pre"]


@fault(28, REFUSED, "`MutationError` names the hook; it returns a new gradient, which changes its own branch alone")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_writes_into_its_gradient_is_refused(kind: str, write: str) -> None:
    model = Two(torch.float64)
    output = hook_right(model, kind, WRITES[write])()
    arriving = full(7, 3)
    with pytest.raises(MutationError, match="return a new gradient"):
        output.backward(arriving)
    assert same(arriving, full(7, 3)), "the tensor that the pass began with"
    assert model.left.weight.grad is None or same(model.left.weight.grad, full(7, 3))


@fault(28, REFUSED, "")
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_names_the_hook(kind: str) -> None:
    model = Two(torch.float64)
    output = hook_right(model, kind, set_item)()
    with pytest.raises(MutationError, match="hook_right" if kind.startswith("backward") else "set_item"):
        output.backward(full(7, 3))


@fault(28, REFUSED, "")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["tensor", "parameter"])
def test_a_returned_gradient_changes_its_own_branch_alone(kind: str, dtype: torch.dtype) -> None:
    model = Two(dtype)
    hook_right(model, kind, lambda grad: grad * 0)().backward(full(7, 3, dtype=dtype))
    assert same([model.left.weight.grad, model.right.weight.grad], [full(7, 3, dtype=dtype), full(0, 3, dtype=dtype)])


def set_data_item(grad: Tensor) -> None:
    grad.data[0] = 0


UNNOTICED: dict[str, Callable[[Tensor], Any]] = {
    "data": set_data_item,
    "numpy": lambda grad: grad.numpy().fill(0),
}


@fault(28, REFUSED, "")
@pytest.mark.parametrize("write", UNNOTICED)
@pytest.mark.parametrize("kind", ["tensor", "parameter", "backward pre"])
def test_a_write_behind_autograds_back_reaches_no_other_branch(kind: str, write: str) -> None:
    model = Two(torch.float64)
    arriving = full(7, 3)
    hook_right(model, kind, UNNOTICED[write])().backward(arriving)
    assert same([arriving, model.left.weight.grad, model.right.weight.grad], [full(7, 3)] * 3)


@fault(28, REFUSED, "")
def test_a_hook_on_several_tensors_cannot_reach_their_gradients_by_writing() -> None:
    a, b = leaf(), leaf()
    left, right = a * 1, b * 1
    hookline.register_multi_grad_hook([left, right], lambda grads: grads[1].mul_(0))
    arriving = full(7, 3)
    (left + right).backward(arriving)
    assert same([arriving, a.grad, b.grad], [full(7, 3)] * 3)


# ---------------------------------------------------------------- 54: copies


def pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": pickled, "torch.save": saved}


@fault(54, RIGHT, "a copy is not hooked, as all of its parameters are new; `register_parameter_hook` on it works")
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("by", ["parameter", "tensor"])
def test_a_copy_is_not_hooked_and_can_be(by: str, copied: str) -> None:
    model = nn.Sequential(linear(), nn.Tanh())
    seen: list[str] = []
    register(model, by, lambda grad: seen.append("original"))
    other = COPIES[copied](model)
    run(other)
    assert seen == []
    with register(other, "parameter", lambda grad: seen.append("copy")):
        run(other)
        assert seen == ["copy"]
        run(model)
        assert seen == ["copy", "original"]
    run(other)
    assert seen == ["copy", "original"]


def register(model: nn.Sequential, by: str, hook: Callable[[Tensor], Any]) -> hookline.Handle:
    if by == "parameter":
        return hookline.register_parameter_hook(model, "0.weight", hook)
    return hookline.register_tensor_hook(model[0].weight, hook)


def run(model: nn.Module) -> None:
    model(full(1, 1, 3)).sum().backward()


@fault(54, RIGHT, "")
@pytest.mark.parametrize("copied", COPIES)
def test_the_handle_of_the_original_leaves_the_hook_of_the_copy(copied: str) -> None:
    model = nn.Sequential(linear())
    handle = register(model, "parameter", lambda grad: grad * 10)
    other = COPIES[copied](model)
    register(other, "parameter", lambda grad: grad * 100)
    handle.remove()
    run(model)
    run(other)
    assert same([model[0].weight.grad, other[0].weight.grad], [full(1, 2, 3), full(100, 2, 3)])


@fault(54, RIGHT, "")
def test_a_tied_parameter_stays_tied_in_a_copy_and_its_hook_gets_both_uses() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).double()
    model[1].weight = model[0].weight
    seen: list[Tensor] = []
    hookline.register_parameter_hook(model, "0.weight", lambda grad: pytest.fail("the hook of the original"))
    other = copy.deepcopy(model)
    hookline.register_parameter_hook(other, "1.weight", seen.append)
    run(other)
    assert other[0].weight is other[1].weight
    x, weight = full(1, 1, 3), other[0].weight.detach()
    by_hand = weight.T @ full(1, 3, 1) @ x + full(1, 3, 1) @ (x @ weight.T)
    assert len(seen) == 1 and torch.allclose(seen[0], by_hand, rtol=1e-12)


# ---------------------------------------------------------------- 55: another tensor under the same name


def assigned(module: nn.Module) -> None:
    module.load_state_dict({"weight": torch.ones(2, 3, dtype=module.weight.dtype)}, assign=True)


def swapped(module: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def set_data(module: nn.Module) -> None:
    module.weight.data = torch.ones(2, 3, dtype=module.weight.dtype)


def put_into_the_table(module: nn.Module) -> None:
    module._parameters["weight"] = nn.Parameter(torch.ones(2, 3, dtype=module.weight.dtype))


def taken_away_and_registered(module: nn.Module) -> None:
    weight = module.weight.detach().clone()
    del module.weight
    module.register_parameter("weight", nn.Parameter(weight))


def none_for_a_while(module: nn.Module) -> None:
    weight = module.weight.detach().clone()
    module.weight = None
    module.weight = nn.Parameter(weight)


def new_parameter(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.ones(2, 3, dtype=module.weight.dtype))


def frozen_and_back(module: nn.Module) -> None:
    module.requires_grad_(False)
    module(torch.ones(1, 3, dtype=module.weight.dtype))
    module.requires_grad_(True)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "load_state_dict(assign=True)": assigned,
    "load_state_dict": lambda module: module.load_state_dict({"weight": torch.ones(2, 3)}),
    "new parameter": new_parameter,
    "table": put_into_the_table,
    "removed and registered": taken_away_and_registered,
    "None and back": none_for_a_while,
    ".data": set_data,
    "double": lambda module: module.double(),
    "swapped by a conversion": swapped,
    "to_empty": lambda module: nn.init.ones_(module.to_empty(device="cpu").weight),
    "frozen and back": frozen_and_back,
    "twice": lambda module: (assigned(module), assigned(module)),
}


@fault(55, RIGHT, "`register_parameter_hook` goes by the name and follows it to the new tensor")
@pytest.mark.parametrize("change", CHANGES)
def test_the_hook_follows_the_name(change: str) -> None:
    module = linear(torch.float32)
    seen: list[Tensor] = []
    handle = hookline.register_parameter_hook(module, "weight", lambda grad: seen.append(grad) or grad * 10)
    CHANGES[change](module)
    module.zero_grad()
    dtype = module.weight.dtype
    x = torch.tensor([[1.0, 2.0, 3.0]], dtype=dtype)
    (module(x) * torch.tensor([5.0, 7.0], dtype=dtype)).sum().backward()
    by_hand = torch.tensor([[5.0, 10.0, 15.0], [7.0, 14.0, 21.0]], dtype=dtype)
    assert same([*seen, module.weight.grad], [by_hand, by_hand * 10])
    handle.remove()
    module.zero_grad()
    module(x).sum().backward()
    assert len(seen) == 1 and same(module.weight.grad, x.expand(2, 3))


@fault(55, RIGHT, "")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_whole_model_gets_its_parameters_assigned(depth: int, dtype: torch.dtype) -> None:
    model: nn.Module = linear(dtype)
    name = "weight"
    for _ in range(depth):
        model, name = nn.Sequential(model), f"0.{name}"
    seen: list[Tensor] = []
    hookline.register_parameter_hook(model, name, seen.append)
    model.load_state_dict({name: torch.ones(2, 3, dtype=dtype)}, assign=True)
    real_sum(model(full(2, 1, 3, dtype=dtype))).backward()
    assert same(seen, [full(2, 2, 3, dtype=dtype)])


@fault(55, RIGHT, "")
def test_a_model_that_was_made_without_memory_is_filled_by_assigning() -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False, device="meta"), nn.BatchNorm1d(2, device="meta"))
    seen: list[Tensor] = []
    hookline.register_parameter_hook(model, "0.weight", seen.append)
    hookline.register_parameter_hook(model[1], "bias", seen.append)
    filled = nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2))
    model.load_state_dict(filled.state_dict(), assign=True)
    model.eval()(full(2, 4, 3, dtype=torch.float32)).sum().backward()
    assert [tuple(grad.shape) for grad in seen] == [(2,), (2, 3)]
    assert same(seen[0], full(4, 2, dtype=torch.float32))
    assert torch.allclose(seen[1], full(8, 2, 3, dtype=torch.float32) / (1 + 1e-5) ** 0.5)


@fault(55, RIGHT, "")
def test_a_functional_call_with_another_tensor_is_seen() -> None:
    module = linear()
    seen: list[Tensor] = []
    hookline.register_parameter_hook(module, "weight", seen.append)
    other = leaf(1, 2, 3, 4, 5, 6).view(2, 3)
    torch.func.functional_call(module, {"weight": other}, (full(2, 1, 3),)).sum().backward()
    assert same(seen, [full(2, 2, 3)])


@fault(55, RIGHT, "")
def test_two_hooks_on_one_name_both_follow_and_one_can_be_removed() -> None:
    module = linear()
    first = hookline.register_parameter_hook(module, "weight", lambda grad: grad + 1)
    hookline.register_parameter_hook(module, "weight", lambda grad: grad * 10)
    assigned(module)
    run(module)
    assert same(module.weight.grad, full(20, 2, 3))
    first.remove()
    assigned(module)
    run(module)
    assert same(module.weight.grad, full(10, 2, 3))


# ---------------------------------------------------------------- 57: in-place operations on a tensor

IN_PLACE: dict[str, tuple[Callable[[Tensor], Any], float]] = {
    "mul_": (lambda tensor: tensor.mul_(3), 3),
    "imul": (lambda tensor: tensor.__imul__(3), 3),
    "add_": (lambda tensor: tensor.add_(3), 1),
    "neg_": (lambda tensor: tensor.neg_(), -1),
    "zero_": (lambda tensor: tensor.zero_(), 0),
    "square": (lambda tensor: tensor.mul_(tensor.detach().clone()), 2),
    "several": (lambda tensor: tensor.mul_(3).sub_(1).mul_(2), 6),
}
"""What is done to a tensor of twos, and its derivative."""


@fault(57, RIGHT, "`register_tensor_hook` stays with the value it was put on; put one on afterwards for the new value")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", IN_PLACE)
def test_the_hook_gets_the_gradient_of_the_value_it_was_put_on(operation: str, dtype: torch.dtype) -> None:
    write, derivative = IN_PLACE[operation]
    h = leaf(1, 1, dtype=dtype) * 2
    old: list[Tensor] = []
    new: list[Tensor] = []
    hookline.register_tensor_hook(h, old.append)
    h.retain_grad()
    write(h)
    hookline.register_tensor_hook(h, new.append)
    real_sum(h * 5).backward()
    assert same([new, old], [[full(5, 2, dtype=dtype)], [full(5 * derivative, 2, dtype=dtype)]])
    assert same(h.grad, full(5, 2, dtype=dtype)), "retain_grad moves to the new value"


@fault(57, RIGHT, "")
@pytest.mark.parametrize("inplace", [nn.ReLU(inplace=True), nn.Hardtanh(0, 9, inplace=True), nn.Dropout(0.0, True)])
def test_the_output_of_a_module_that_the_next_one_overwrites(inplace: nn.Module) -> None:
    module = linear()
    nn.init.constant_(module.weight, 1.0)
    nn.init.constant_(module.weight[1], -1.0) if not isinstance(inplace, nn.Dropout) else None
    out = module(full(1, 1, 3))
    seen: list[Tensor] = []
    hookline.register_tensor_hook(out, seen.append)
    (inplace(out) * 5).sum().backward()
    passes = torch.tensor([[5.0, 5.0 if isinstance(inplace, nn.Dropout) else 0.0]], dtype=torch.float64)
    assert same(seen, [passes])


@fault(57, RIGHT, "")
def test_what_the_hook_returns_takes_the_place_of_the_old_values_gradient() -> None:
    x = leaf()
    h = x * 2
    hookline.register_tensor_hook(h, lambda grad: grad + 100)
    h.mul_(3)
    h.sum().backward()
    assert same(x.grad, full((3 + 100) * 2, 3))


# ---------------------------------------------------------------- 58, 59: views


Chain = Callable[[Tensor], Tensor]
VIEWS: dict[str, Chain] = {
    "view": lambda base: base.view(3, 2),
    "flatten": lambda base: base.flatten(),
    "transpose": lambda base: base.t(),
    "row": lambda base: base[1],
    "column": lambda base: base[:, 1],
    "step": lambda base: base[:, ::2],
    "unsqueeze": lambda base: base.unsqueeze(0),
    "diagonal": lambda base: base.diagonal(),
    "select of view": lambda base: base.view(3, 2).t()[1],
    "detour": lambda base: base.flatten()[1:5].view(2, 2).t(),
}
REWRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "view": lambda base, view: view.mul_(3),
    "base": lambda base, view: base.mul_(3),
    "view twice": lambda base, view: view.mul_(0.5).mul_(6),
    "item of the view": lambda base, view: view.select(0, 0).mul_(3),
    "zeroed": lambda base, view: view.zero_(),
}


def by_hand(view: Chain, rewrite: str) -> tuple[Tensor, Tensor]:
    """Gradients of the old base and of the old view when the view's entries weigh 1, 2, 3, ... in the loss."""
    factor = torch.ones(2, 3, dtype=torch.float64)
    REWRITES[rewrite](factor, view(factor))
    weight = torch.zeros(2, 3, dtype=torch.float64)
    seen = view(weight)
    seen.copy_(weights_like(seen))
    return weight * factor, view(weight * factor).clone()


def weights_like(tensor: Tensor) -> Tensor:
    return torch.arange(1, tensor.numel() + 1).to(tensor.dtype).reshape(tensor.shape)


def loss_of(view: Tensor) -> Tensor:
    return real_sum(view * weights_like(view))


@fault(58, RIGHT, "`register_tensor_hook` on the view is called with the gradient of the value the view had")
@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hook_on_a_view_outlives_a_write(view: str, rewrite: str, dtype: torch.dtype) -> None:
    base_grad, view_grad = by_hand(VIEWS[view], rewrite)
    x = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    base = x * 1
    viewed = VIEWS[view](base)
    seen: list[Tensor] = []
    hookline.register_tensor_hook(viewed, seen.append)
    REWRITES[rewrite](base, viewed)
    loss_of(viewed).backward()
    assert same([*seen, x.grad], [view_grad.to(dtype), base_grad.to(dtype)])


REINTERPRETED: dict[str, Chain] = {
    "view_as_real": torch.view_as_real,
    "real": lambda base: base.real,
    "imag": lambda base: base.imag,
    "conj": lambda base: base.conj(),
    "real of a row": lambda base: base[1:].real,
    "imag of conj": lambda base: base.conj().imag,
}


@fault(58, RIGHT, "")
@pytest.mark.parametrize("written", ["view", "base"])
@pytest.mark.parametrize("view", REINTERPRETED)
def test_a_hook_on_a_view_of_complex_numbers_outlives_a_write(view: str, written: str) -> None:
    x = torch.ones(3, dtype=torch.complex128, requires_grad=True)
    base = x * (1 + 1j)
    viewed = REINTERPRETED[view](base)
    seen: list[Tensor] = []
    hookline.register_tensor_hook(viewed, seen.append)
    (viewed if written == "view" else base).mul_(3)
    weight = weights_like(viewed) * ((1 + 2j) if viewed.is_complex() else 1)
    real_sum(viewed * weight).backward()
    assert same(seen, [3 * weight.conj().resolve_conj() if viewed.is_complex() else 3 * weight])


@fault(58, RIGHT, "")
@pytest.mark.parametrize("view", VIEWS)
def test_what_a_hook_on_an_overwritten_view_returns_is_used(view: str) -> None:
    base_grad, _ = by_hand(VIEWS[view], "view")
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    base = x * 1
    viewed = VIEWS[view](base)
    hookline.register_tensor_hook(viewed, lambda grad: grad * 10)
    viewed.mul_(3)
    loss_of(viewed).backward()
    assert same(x.grad, base_grad * 10)


class Views(nn.Module):
    """Returns a view of what it computes, as a block with a reshape at its end does."""

    def __init__(self, view: Chain) -> None:
        super().__init__()
        self.view = view
        self.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.view(x * self.weight)


@fault(59, RIGHT, "`register_backward_pre_hook` on the module that returns the view, or `register_tensor_hook` on it")
@pytest.mark.parametrize("rewrite", [name for name in REWRITES if name != "base"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_pre_hook_where_a_module_returns_a_view_outlives_a_write(view: str, rewrite: str) -> None:
    base_grad, view_grad = by_hand(VIEWS[view], rewrite)
    module = Views(VIEWS[view])
    before: list[Tensor] = []
    after: list[Tensor] = []
    at_view: list[Tensor] = []
    hookline.register_backward_pre_hook(module, lambda module, grad_output: before.append(grad_output[0]))
    hookline.register_backward_hook(module, lambda module, grad_input, grad_output: after.append(grad_output[0]))
    out = module(torch.ones(2, 3, dtype=torch.float64, requires_grad=True))
    hookline.register_tensor_hook(out, at_view.append)
    REWRITES[rewrite](out, out)
    loss_of(out).backward()
    assert same([before, after, at_view], [[view_grad]] * 3)
    assert same(module.weight.grad, base_grad)


@fault(59, RIGHT, "")
def test_a_pre_hook_runs_before_the_modules_own_backward_also_after_a_write() -> None:
    module = Views(torch.flatten)
    order: list[str] = []
    hookline.register_backward_pre_hook(module, lambda module, grad_output: order.append("gradient of the output"))
    hookline.register_parameter_hook(module, "weight", lambda grad: order.append("gradient of the weight"))
    out = module(torch.ones(2, 3, dtype=torch.float64))
    out.mul_(3)
    out.sum().backward()
    assert order == ["gradient of the output", "gradient of the weight"]


# ---------------------------------------------------------------- 60: total and share


class Residual(nn.Module):
    def __init__(self, uses: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.uses = uses
        self.twice = nn.Linear(1, 1, bias=False, dtype=dtype)
        nn.init.constant_(self.twice.weight, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return sum((self.twice(x) for _ in range(self.uses)), 5 * x)


@fault(60, RIGHT, "`register_backward_hook`: `grad_input` is the module's own share; a tensor's hook gets the total")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("uses", [1, 3])
def test_a_modules_hook_gets_its_share_and_a_tensors_hook_the_total(uses: int, dtype: torch.dtype) -> None:
    model = Residual(uses, dtype)
    h = leaf(1, dtype=dtype) * 1
    total: list[Tensor] = []
    share: list[Tensor] = []
    hookline.register_tensor_hook(h, total.append)
    hookline.register_backward_hook(model.twice, lambda module, grad_input, _: share.append(grad_input[0]))
    real_sum(model(h)).backward()
    assert same([total, share], [[full(5 + 2 * uses, 1, dtype=dtype)], [full(2, 1, dtype=dtype)] * uses])


@fault(60, RIGHT, "")
def test_two_modules_that_get_one_tensor_each_see_their_own_share() -> None:
    heads = nn.ModuleList(Residual(0, torch.float64).twice for _ in range(3))
    for factor, head in enumerate(heads, 2):
        nn.init.constant_(head.weight, float(factor))
    share: dict[int, Tensor] = {}
    for place, head in enumerate(heads):
        hookline.register_backward_hook(head, lambda _, grads, __, place=place: share.update({place: grads[0]}))
    h = leaf(1) * 1
    total: list[Tensor] = []
    hookline.register_tensor_hook(h, total.append)
    sum(head(h) for head in heads).backward()
    assert same(total, [full(2 + 3 + 4, 1)])
    assert same([share[0], share[1], share[2]], [full(2, 1), full(3, 1), full(4, 1)])


# ---------------------------------------------------------------- 61, 62, 63, 84: several tensors


Events = list[Any]


def hooked(*tensors: Tensor, mode: str = "all") -> Events:
    seen: Events = []
    hookline.register_multi_grad_hook(tensors, seen.append, mode=mode)
    return seen


@fault(61, RIGHT, "`register_multi_grad_hook` is called once a pass, also for leaves under `autograd.grad`")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", ["leaf", "both", "backward"])
def test_a_leaf_under_autograd_grad(wanted: str, dtype: torch.dtype) -> None:
    x = leaf(1, 1, dtype=dtype)
    y = x * 2
    seen = hooked(x, y)
    first = hooked(x, y, mode="any")
    loss = real_sum(y * 3)
    if wanted == "backward":
        loss.backward()
    else:
        torch.autograd.grad(loss, [x, y] if wanted == "both" else x)
    assert same(seen, [(full(6, 2, dtype=dtype), full(3, 2, dtype=dtype))])
    assert same(first, [full(3, 2, dtype=dtype)]), "y comes before x"


@fault(61, RIGHT, "")
def test_parameters_of_a_model_under_autograd_grad() -> None:
    model = nn.Sequential(linear(), nn.Linear(2, 1)).double()
    parameters = list(model.parameters())
    seen = hooked(*parameters)
    found = torch.autograd.grad(model(full(1, 4, 3)).square().sum(), parameters)
    assert same(seen, [tuple(found)])


@fault(61, RIGHT, "")
def test_a_leaf_that_is_not_asked_for_is_none() -> None:
    x, z = leaf(), leaf()
    seen = hooked(x, z)
    torch.autograd.grad((x * 2 + z * 3).sum(), z)
    assert same(seen, [(None, full(3, 3))])


@fault(61, RIGHT, "")
def test_second_derivatives_are_passes_of_their_own() -> None:
    x = leaf(1, 2)
    seen = hooked(x)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    first.sum().backward()
    assert same([[grad.detach() for grad in grads] for grads in seen], [[3 * x.detach() ** 2], [6 * x.detach()]])


class NoGradient(torch.autograd.Function):
    """2a + 3b that says of b that it gets no gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return 2 * a + 3 * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * grad, None


@fault(62, RIGHT, "`register_multi_grad_hook` gives None in its place")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_undefined_gradient_is_none(order: tuple[int, int], dtype: torch.dtype) -> None:
    tensors = leaf(1, dtype=dtype) * 1, leaf(1, dtype=dtype) * 1
    seen = hooked(*(tensors[place] for place in order))
    real_sum(NoGradient.apply(*tensors)).backward()
    grads = full(2, 1, dtype=dtype), None
    assert same(seen, [tuple(grads[place] for place in order)])


UNREACHED: dict[str, Callable[[Tensor], Tensor]] = {
    "unused": lambda b: torch.zeros((), dtype=torch.float64),
    "detached": lambda b: b.detach().sum(),
    "integer": lambda b: b.argmax().double(),
}


@fault(62, RIGHT, "")
@pytest.mark.parametrize("kind", UNREACHED)
@pytest.mark.parametrize("leaves", [True, False])
def test_a_tensor_that_the_pass_does_not_reach_is_none(leaves: bool, kind: str) -> None:
    a, b = (leaf(), leaf()) if leaves else (leaf() * 1, leaf() * 1)
    seen = hooked(a, b)
    ((a * 2).sum() + UNREACHED[kind](b)).backward()
    assert same(seen, [(full(2, 3), None)])


@fault(62, RIGHT, "")
def test_a_pass_that_reaches_none_of_the_tensors_is_no_event() -> None:
    a, b, other = leaf(), leaf(), leaf()
    seen = hooked(a, b)
    (other * 2).sum().backward()
    assert seen == []
    a.sum().backward()
    assert same(seen, [(full(1, 3), None)])


@fault(62, RIGHT, "")
def test_a_tensor_used_by_the_next_pass_alone_is_in_that_passs_event() -> None:
    a, b = leaf(), leaf()
    seen = hooked(a, b)
    (a * 2).sum().backward()
    (b * 3).sum().backward()
    (a * 4 + b * 5).sum().backward()
    assert same(seen, [(full(2, 3), None), (None, full(3, 3)), (full(4, 3), full(5, 3))])


class Meet(torch.autograd.Function):
    """An identity whose backward waits until the other passes have come as far."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, barrier: threading.Barrier) -> Tensor:
        ctx.barrier = barrier
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.barrier.wait(10)
        return grad, None


@fault(63, RIGHT, "`register_multi_grad_hook` tells passes apart, also in several threads: one event each, none mixed")
@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("passes", [2, 4])
def test_passes_that_run_at_once_do_not_mix(passes: int, mode: str) -> None:
    a, b = leaf(1), leaf(1)
    seen = hooked(a, b, mode=mode)
    barrier = threading.Barrier(passes)

    def loss(factor: int) -> Tensor:
        # The gradient of b comes first, then all passes meet, then that of a.
        return (Meet.apply(Meet.apply(a * factor, barrier) * b * 0 + a * factor, barrier) + b * factor * 10).sum()

    losses = [loss(factor) for factor in range(1, passes + 1)]
    in_threads(*(lambda each=each: torch.autograd.grad(each, [a, b]) for each in losses))
    if mode == "any":
        assert len(seen) == passes
        return
    assert sorted((x.item(), y.item()) for x, y in seen) == [(factor, 10 * factor) for factor in range(1, passes + 1)]


@fault(63, RIGHT, "")
def test_two_passes_through_one_graph_at_once() -> None:
    x = leaf(1)
    barrier = threading.Barrier(2)
    h = x * 3
    late = Meet.apply(h, barrier)
    y = late * 5
    seen = hooked(x, h, y)
    in_threads(
        lambda: torch.autograd.grad(y, x, torch.ones(1).double(), retain_graph=True),
        lambda: torch.autograd.grad(y, x, 2 * torch.ones(1).double(), retain_graph=True),
    )
    assert sorted(tuple(grad.item() for grad in grads) for grads in seen) == [(15, 5, 1), (30, 10, 2)]


@fault(63, RIGHT, "")
def test_a_pass_inside_a_hook_of_another_is_told_apart() -> None:
    x = leaf(1)
    h = x * 3
    seen = hooked(x, h)
    inner = (x * 7).sum()
    fired: list[int] = []

    def nested(grad: Tensor) -> None:
        if not fired:
            fired.append(1)
            with torch.enable_grad():
                inner.backward()

    hookline.register_tensor_hook(h, nested)
    (h * 5).sum().backward()
    assert same(seen, [(full(7, 1), None), (full(15, 1), full(5, 1))])


@fault(63, RIGHT, "")
def test_a_pass_that_raises_leaves_nothing_for_the_next() -> None:
    x = leaf(1)
    h = x * 3
    seen = hooked(x, h)

    def fail(grad: Tensor) -> None:
        raise ValueError("stop")

    with hookline.register_tensor_hook(h, fail), pytest.raises(ValueError, match="stop"):
        (h * 5).sum().backward(retain_graph=True)
    (x * 2).sum().backward()
    assert same(seen, [(full(2, 1), None)])


ROOTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[int, int]]] = {
    "backward": (lambda h, y: y.backward(full(1, 2)), (5, 1)),
    "autograd.grad": (lambda h, y: torch.autograd.grad(y, h, full(1, 2)), (5, 1)),
    "both roots": (lambda h, y: torch.autograd.backward([h, y], [full(1, 2), full(1, 2)]), (6, 1)),
    "root twice": (lambda h, y: torch.autograd.backward([y, y], [full(1, 2), full(1, 2)]), (10, 2)),
    "a loss of both": (lambda h, y: (h + y * 2).sum().backward(), (11, 2)),
}


@fault(84, RIGHT, "`register_multi_grad_hook` is called once, with the gradient that the pass began with as an entry")
@pytest.mark.parametrize("root", ROOTS)
def test_a_root_among_the_tensors_is_one_event(root: str) -> None:
    x = leaf(1, 1)
    h = x * 2
    y = h * 5
    seen, first = hooked(h, y), hooked(h, y, mode="any")
    run_pass, (of_h, of_y) = ROOTS[root]
    run_pass(h, y)
    assert same(seen, [(full(of_h, 2), full(of_y, 2))])
    assert len(first) == 1


@fault(84, RIGHT, "")
def test_a_leaf_that_is_the_root_itself() -> None:
    x = leaf(1, 1)
    seen = hooked(x)
    x.backward(full(3, 2))
    assert same(seen, [(full(3, 2),)])


@fault(84, RIGHT, "")
def test_a_scalar_loss_among_the_tensors_and_a_second_pass() -> None:
    x = leaf(1, 1)
    loss = (x * 2).sum()
    seen = hooked(x, loss)
    loss.backward(retain_graph=True)
    loss.backward(torch.tensor(3.0).double())
    one, three = torch.tensor(1.0).double(), torch.tensor(3.0).double()
    assert same(seen, [(full(2, 2), one), (full(6, 2), three)])


@fault(84, RIGHT, "")
def test_one_tensor_named_twice_has_two_entries_and_one_event() -> None:
    x = leaf(1, 1)
    seen = hooked(x, x)
    (x * 2).sum().backward()
    assert same(seen, [(full(2, 2), full(2, 2))])


# ---------------------------------------------------------------- 64, 65, 67: one pass of a parameter


@fault(64, RIGHT, "`register_parameter_hook`: the gradient of this pass, before it is added to `.grad`")
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_micro_batch_gives_its_own_gradient(dtype: torch.dtype) -> None:
    module = linear(dtype)
    seen: list[Tensor] = []
    hookline.register_parameter_hook(module, "weight", seen.append)
    for factor in (2, 3, 4):
        real_sum(module(full(factor, 1, 3, dtype=dtype))).backward()
    assert same(seen, [full(factor, 2, 3, dtype=dtype) for factor in (2, 3, 4)])
    assert same(module.weight.grad, full(9, 2, 3, dtype=dtype))


@fault(64, RIGHT, "")
def test_all_uses_in_one_pass_are_one_gradient() -> None:
    module = linear()
    seen: list[Tensor] = []
    hookline.register_parameter_hook(module, "weight", seen.append)
    x = full(2, 1, 3)
    (module(x) + 3 * module(x) + F.linear(x, module.weight * 5)).sum().backward()
    assert same(seen, [full(18, 2, 3)])


@fault(64, RIGHT, "")
def test_what_the_hook_returns_is_added_to_grad() -> None:
    module = linear()
    hookline.register_parameter_hook(module, "weight", lambda grad: grad.clamp(max=2.5))
    for factor in (2, 3):
        module(full(factor, 1, 3)).sum().backward()
    assert same(module.weight.grad, full(4.5, 2, 3))


@fault(64, RIGHT, "")
def test_two_passes_through_one_graph_are_two_gradients() -> None:
    module = linear()
    seen: list[Tensor] = []
    hookline.register_parameter_hook(module, "weight", seen.append)
    loss = module(full(2, 1, 3)).sum()
    loss.backward(retain_graph=True)
    (loss * 5).backward()
    assert same(seen, [full(2, 2, 3), full(10, 2, 3)])


@fault(65, RIGHT, "`register_parameter_hook` is called by `autograd.grad` too, and what it returns comes out of it")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("create_graph", [False, True])
def test_autograd_grad_calls_the_hook(create_graph: bool, dtype: torch.dtype) -> None:
    module = linear(dtype)
    seen: list[Tensor] = []
    hookline.register_parameter_hook(module, "weight", lambda grad: seen.append(grad.detach()) or grad * 10)
    loss = real_sum(module(full(2, 1, 3, dtype=dtype)))
    (found,) = torch.autograd.grad(loss, module.weight, create_graph=create_graph)
    assert same([*seen, found.detach()], [full(2, 2, 3, dtype=dtype), full(20, 2, 3, dtype=dtype)])
    assert module.weight.grad is None


@fault(65, RIGHT, "")
def test_a_gradient_penalty_calls_the_hook_in_both_passes() -> None:
    module = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(module.weight, 3.0)
    seen: list[Tensor] = []
    hookline.register_parameter_hook(module, "weight", lambda grad: seen.append(grad.detach().clone()))
    (first,) = torch.autograd.grad((module(full(2, 1, 1)) ** 2).sum(), module.weight, create_graph=True)
    first.square().sum().backward()
    # (2w)^2 at w = 3: 8w = 24, and the derivative of (8w)^2 is 128w = 384.
    assert same(seen, [full(24, 1, 1), full(384, 1, 1)])


@fault(65, RIGHT, "")
def test_a_parameter_that_is_not_asked_for_gives_no_event() -> None:
    module = nn.Linear(3, 2).double()
    seen: list[str] = []
    hookline.register_parameter_hook(module, "weight", lambda grad: seen.append("weight"))
    hookline.register_parameter_hook(module, "bias", lambda grad: seen.append("bias"))
    torch.autograd.grad(module(full(1, 1, 3)).sum(), module.bias)
    assert seen == ["bias"]


@fault(67, RIGHT, "`register_parameter_hook` needs no node and goes on for ever")
@pytest.mark.parametrize("kept", ["nothing", "graph", "grad"])
def test_the_hook_outlives_every_graph(kept: str) -> None:
    module = linear()
    seen: list[Tensor] = []
    hookline.register_parameter_hook(module, "weight", seen.append)
    alive: list[Any] = []
    for _ in range(4):
        loss = module(full(2, 1, 3)).sum()
        loss.backward(retain_graph=kept == "graph")
        alive += [loss] if kept == "graph" else []
        module.zero_grad(set_to_none=kept != "grad")
        del loss
        gc.collect()
    assert same(seen, [full(2, 2, 3)] * 4)


@fault(67, RIGHT, "")
def test_the_hook_is_there_when_the_handle_and_every_view_are_gone() -> None:
    module = linear()
    seen: list[Tensor] = []
    view = module.weight.view_as(module.weight)
    handle = hookline.register_parameter_hook(module, "weight", seen.append)
    del handle, view
    gc.collect()
    run(module)
    assert same(seen, [full(1, 2, 3)])


@fault(67, RIGHT, "")
def test_a_hook_that_is_registered_after_the_forward_is_called() -> None:
    module = linear()
    loss = module(full(2, 1, 3)).sum()
    seen: list[Tensor] = []
    hookline.register_parameter_hook(module, "weight", seen.append)
    loss.backward()
    assert same(seen, [full(2, 2, 3)])


# ---------------------------------------------------------------- 68: parametrizations


class Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


class Pair(nn.Module):
    """Computes a weight from two parameters."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight.detach().clone(), torch.ones_like(weight)


def square() -> nn.Linear:
    return nn.Linear(3, 3, bias=False, dtype=torch.float64)


PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "own": lambda: parametrize.register_parametrization(square(), "weight", Exp()),
    "symmetric": lambda: parametrize.register_parametrization(square(), "weight", Symmetric()),
    "two in a row": lambda: parametrize.register_parametrization(
        parametrize.register_parametrization(square(), "weight", Exp()), "weight", Symmetric()
    ),
    "pair": lambda: parametrize.register_parametrization(square(), "weight", Pair()),
    "weight_norm": lambda: parametrizations.weight_norm(square()),
    "orthogonal": lambda: parametrizations.orthogonal(square()),
    "spectral_norm": lambda: parametrizations.spectral_norm(square()).eval(),
}


def computed_weight_gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Of the computed weight and of all parameters, for the loss under which the outputs weigh 1, 2, 3."""
    computed = module.weight
    parameters = dict(module.named_parameters())
    loss = (F.linear(x, computed) * weights_like(x)).sum()
    found = torch.autograd.grad(loss, [computed, *parameters.values()])
    return dict(zip(["weight", *parameters], found, strict=True))


@fault(
    68,
    RIGHT,
    "`register_backward_pre_hook` on the module `parametrizations.weight` gets the gradient of the computed weight, "
    "`register_parameter_hook` that of the parameters behind it",
)
@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_the_computed_weight_and_the_parameters_behind_it(kind: str) -> None:
    module = PARAMETRIZED[kind]()
    x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    expected = computed_weight_gradients(copy.deepcopy(module), x)
    seen: dict[str, Tensor] = {}
    hookline.register_backward_pre_hook(
        module.get_submodule("parametrizations.weight"), lambda _, grads: seen.update(weight=grads[0])
    )
    for name, _ in module.named_parameters():
        hookline.register_parameter_hook(module, name, lambda grad, name=name: seen.update({name: grad}))
    (module(x) * weights_like(x)).sum().backward()
    assert list(expected) == ["weight", *dict(module.named_parameters())]
    assert sorted(seen) == sorted(expected)
    for name, grad in expected.items():
        assert torch.allclose(seen[name], grad, rtol=1e-12), name
    assert same(seen["weight"], torch.outer(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0])).double())


@fault(68, RIGHT, "")
def test_both_gradients_can_be_replaced() -> None:
    module = parametrize.register_parametrization(square(), "weight", Exp())
    nn.init.zeros_(module.parametrizations.weight.original)
    hookline.register_backward_pre_hook(module.parametrizations.weight, lambda _, grads: (grads[0] * 10,))
    hookline.register_parameter_hook(module.parametrizations.weight, "original", lambda grad: grad + 1)
    module(full(2, 1, 3)).sum().backward()
    assert same(module.parametrizations.weight.original.grad, full(21, 3, 3))


@fault(68, RIGHT, "")
@pytest.mark.parametrize("name", ["weight", "0.weight"])
def test_asking_for_the_computed_weight_by_name_says_where_it_is(name: str) -> None:
    model: nn.Module = parametrize.register_parametrization(square(), "weight", Exp())
    model = nn.Sequential(model) if name.startswith("0") else model
    with pytest.raises(SiteError, match="register_backward_pre_hook") as raised:
        hookline.register_parameter_hook(model, name, print)
    path = name.replace("weight", "parametrizations.weight")
    assert f'"{path}"' in str(raised.value) and f'"{path}.original"' in str(raised.value)


@fault(68, RIGHT, "")
def test_the_message_names_parameters_that_are_there() -> None:
    module = parametrizations.weight_norm(square())
    with pytest.raises(SiteError, match=r"parametrizations\.weight\.original0"):
        hookline.register_parameter_hook(module, "weight", print)


@fault(68, RIGHT, "")
def test_record_reads_the_computed_weight_and_its_gradient() -> None:
    module = parametrize.register_parametrization(square(), "weight", Exp())
    with hookline.record(module, "parametrizations.weight", ("output", "grad_output")) as rec:
        module(full(2, 1, 3)).sum().backward()
    assert same(rec["parametrizations.weight"].output, module.parametrizations.weight.original.detach().exp())
    assert same(rec["parametrizations.weight"].grad_output, full(2, 3, 3))


# ---------------------------------------------------------------- 78: lazy parameters


LAZY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "linear": (lambda: nn.LazyLinear(2), (1, 3), "weight"),
    "linear's bias": (lambda: nn.LazyLinear(2), (1, 3), "bias"),
    "conv1d": (lambda: nn.LazyConv1d(2, 1), (1, 3, 4), "weight"),
    "conv2d": (lambda: nn.LazyConv2d(2, 1), (1, 3, 4, 4), "weight"),
    "transposed": (lambda: nn.LazyConvTranspose2d(2, 1), (1, 3, 4, 4), "weight"),
    "batch norm": (lambda: nn.LazyBatchNorm1d(), (4, 3), "weight"),
    "instance norm": (lambda: nn.LazyInstanceNorm1d(affine=True), (1, 3, 4), "bias"),
}


@fault(78, RIGHT, "`register_parameter_hook` waits until the parameter has its shape")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", LAZY)
def test_a_hook_on_a_lazy_parameter_waits_for_its_shape(kind: str, nested: bool) -> None:
    make, shape, name = LAZY[kind]
    module = make().double()
    model = nn.Sequential(module) if nested else module
    seen: list[Tensor] = []
    handle = hookline.register_parameter_hook(
        model, f"0.{name}" if nested else name, lambda grad: seen.append(grad) or grad * 10
    )
    x = torch.randn(shape, dtype=torch.float64)
    model(x).pow(3).sum().backward()
    bare = copy.deepcopy(module)
    bare.zero_grad()
    bare(x).pow(3).sum().backward()
    assert same([*seen, getattr(module, name).grad], [getattr(bare, name).grad, getattr(bare, name).grad * 10])
    handle.remove()
    model(x).sum().backward()
    assert len(seen) == 1


@fault(78, RIGHT, "")
def test_a_hook_on_a_lazy_parameter_can_be_removed_before_it_has_a_shape() -> None:
    module = nn.LazyLinear(2)
    hookline.register_parameter_hook(module, "weight", lambda grad: pytest.fail("it was removed")).remove()
    module(torch.ones(1, 3)).sum().backward()
    assert type(module) is nn.Linear


@fault(78, RIGHT, "")
def test_a_lazy_model_that_gets_its_shape_from_a_file() -> None:
    model = nn.Sequential(nn.LazyLinear(2, bias=False))
    seen: list[Tensor] = []
    hookline.register_parameter_hook(model, "0.weight", seen.append)
    model.load_state_dict({"0.weight": torch.ones(2, 3)})
    model(torch.full((1, 3), 2.0)).sum().backward()
    assert same(seen, [full(2, 2, 3, dtype=torch.float32)])


@fault(78, RIGHT, "")
def test_what_has_no_gradient_or_no_name_is_refused_at_once() -> None:
    module = nn.BatchNorm1d(2)
    with pytest.raises(SiteError, match='"weight"'):
        hookline.register_parameter_hook(module, "wieght", print)
    module.weight.requires_grad_(False)
    with pytest.raises(HookError, match="requires_grad_"):
        hookline.register_parameter_hook(module, "weight", print)
