"""What PyTorch's own hooks get wrong and Hookline gets right: each row of the README's table, run both ways."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
import hookline.errors

README = Path(__file__).parents[1] / "README.md"
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}


def case(title: str) -> Callable[[Any], Any]:
    """A function of ``ours: bool`` that returns what hooks gave, and in ``wanted`` what is right."""

    def register(function: Any) -> Any:
        CASES[title] = function
        return function

    return register


def on_forward(module: nn.Module, hook: Callable[..., Any], ours: bool) -> Any:
    return hookline.register_forward_hook(module, hook) if ours else module.register_forward_hook(hook)


def on_backward(module: nn.Module, hook: Callable[..., Any], ours: bool) -> Any:
    return hookline.register_backward_hook(module, hook) if ours else module.register_full_backward_hook(hook)


def leaf(*values: float) -> Tensor:
    return torch.tensor([float(value) for value in values], requires_grad=True)


class Times(nn.Module):
    """Multiplies by two and returns whatever ``make`` makes of that."""

    def __init__(self, make: Callable[[Tensor], Any] = lambda h: h) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.make = make

    def forward(self, x: Tensor, unused: Tensor | None = None) -> Any:
        return self.make(x * self.weight)


@case("an in-place ReLU after the module")
def _(ours: bool) -> tuple[Any, Any]:
    module, seen = Times(), []
    on_backward(module, lambda module, grad_input, grad_output: seen.append(grad_input[0].tolist()), ours)
    module(leaf(1, -1) * 1).relu_().sum().backward()
    return seen, [[2.0, 0.0]]


@case("an output that is kept and then overwritten")
def _(ours: bool) -> tuple[Any, Any]:
    model = nn.Sequential(Times(), nn.ReLU(inplace=True))
    if ours:
        with hookline.record(model, "0") as rec:
            model(leaf(1, -1))
        return rec["0"].output.tolist(), [2.0, -2.0]
    kept: list[Tensor] = []
    on_forward(model[0], lambda module, args, output: kept.append(output.detach()), ours)
    model(leaf(1, -1))
    return kept[0].tolist(), [2.0, -2.0]


@case("an output that is a dict or dataclass")
def _(ours: bool) -> tuple[Any, Any]:
    module, seen = Times(lambda h: {"logits": h}), []
    on_backward(module, lambda module, grad_input, grad_output: seen.append(grad_output[0].tolist()), ours)
    module(leaf(1, -1))["logits"].sum().backward()
    return seen, [[1.0, 1.0]]


@case("a keyword argument")
def _(ours: bool) -> tuple[Any, Any]:
    module, seen = Times(), []
    on_backward(module, lambda module, grad_input, grad_output: seen.append([g.tolist() for g in grad_input]), ours)
    module(x=leaf(1, -1)).sum().backward()
    return seen, [[[2.0, 2.0]]]


@case("the state of an LSTM")
def _(ours: bool) -> tuple[Any, Any]:
    module, seen = nn.LSTM(2, 3), []
    on_backward(module, lambda module, grad_input, grad_output: seen.append(len(grad_output)), ours)
    _, (hidden, _) = module(torch.ones(4, 1, 2, requires_grad=True))
    hidden.sum().backward()
    return seen, [3]


@case("an input that the module does not use")
def _(ours: bool) -> tuple[Any, Any]:
    module, seen = Times(), []
    on_backward(module, lambda module, grad_input, grad_output: seen.append(grad_input[1] is None), ours)
    module(leaf(1), leaf(5)).sum().backward()
    return seen, [True]


@case("gradients of the parameters alone")
def _(ours: bool) -> tuple[Any, Any]:
    module, seen = Times(), []
    on_backward(module, lambda module, grad_input, grad_output: seen.append(grad_output[0].tolist()), ours)
    torch.autograd.grad(module(leaf(1, -1)).sum(), [module.weight])
    return seen, [[1.0, 1.0]]


@case("a hook that writes into the gradient it is shown")
def _(ours: bool) -> tuple[Any, Any]:
    module, x = Times(), leaf(1.0)
    on_backward(module, lambda module, grad_input, grad_output: grad_output[0].mul_(100) and None, ours)
    x1 = x * 1
    total = module(x1) + x1
    try:
        total.sum().backward()
    except hookline.errors.MutationError:
        return "refused", "refused"
    assert x.grad is not None
    return x.grad.tolist(), "refused"


@case("`module.forward(x)` called directly")
def _(ours: bool) -> tuple[Any, Any]:
    module, seen = Times(), []
    on_forward(module, lambda module, args, output: seen.append(output.tolist()), ours)
    module.forward(leaf(1, -1))
    return seen, [[2.0, -2.0]]


@case("a copy of a hooked model")
def _(ours: bool) -> tuple[Any, Any]:
    module, seen = Times(), []
    on_forward(module, lambda module, args, output: seen.append(1), ours)
    copy.deepcopy(module)(leaf(1, -1))
    return seen, []


@case("activation checkpointing")
def _(ours: bool) -> tuple[Any, Any]:
    model = nn.Sequential(Times(), Times(torch.sin))
    if ours:
        with hookline.record(model, "0") as rec:
            checkpoint(model, leaf(1.0), use_reentrant=False).sum().backward()
        return len(rec["0"].calls), 1
    seen: list[int] = []
    on_forward(model[0], lambda module, args, output: seen.append(1), ours)
    checkpoint(model, leaf(1.0), use_reentrant=False).sum().backward()
    return len(seen), 1


@pytest.mark.parametrize("title", CASES)
def test_ours_is_right(title: str) -> None:
    got, wanted = CASES[title](True)
    assert got == wanted


@pytest.mark.filterwarnings("ignore:For backward hooks to be called, module output should be")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
@pytest.mark.parametrize("title", CASES)
def test_stock_is_not(title: str) -> None:
    """The day PyTorch mends one of these, its row goes."""
    try:
        got, wanted = CASES[title](False)
    except RuntimeError as error:
        assert "is a view and is being modified inplace" in str(error)
    else:
        assert got != wanted


def test_the_table_in_the_readme_has_these_rows() -> None:
    table = re.findall(r"^\| (.+?) \|", README.read_text().partition("## What stock hooks get wrong")[2], re.MULTILINE)
    assert [row for row in table if row in CASES] == list(CASES)
