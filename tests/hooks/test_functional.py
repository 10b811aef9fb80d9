"""Functions of torch.nn.functional that get the parameters of an observed module."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hookline


class Table(Tensor):
    """A subclass that has a table by function, as libraries of tensor subclasses do."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in NAMES:
            cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Mode(TorchFunctionMode):
    """Notes the functions that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in NAMES:
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


CALLS: dict[str, tuple[nn.Module, Tensor]] = {
    "linear": (nn.Linear(4, 4), torch.ones(2, 4)),
    "embedding": (nn.Embedding(4, 4), torch.tensor([[1, 2]])),
    "conv1d": (nn.Conv1d(4, 4, 1), torch.ones(2, 4, 4)),
    "layer_norm": (nn.LayerNorm(4), torch.ones(2, 4)),
    "group_norm": (nn.GroupNorm(2, 4), torch.ones(2, 4)),
    "batch_norm": (nn.BatchNorm1d(4), torch.ones(2, 4)),
    "prelu": (nn.PReLU(4), torch.ones(2, 4)),
}
NAMES = set(CALLS)
ORIGINALS = {name: getattr(F, name) for name in NAMES}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_subclass_of_tensor_is_given_the_original_function(name: str) -> None:
    module, x = CALLS[name]
    Table.seen.clear()
    with hookline.record(module):
        module(x.as_subclass(Table))
    assert Table.seen[:1] == [ORIGINALS[name]]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_nested_function_modes_are_given_the_original_function(name: str) -> None:
    module, x = CALLS[name]
    outer, inner = Mode(), Mode()
    with hookline.record(module), outer, inner:
        module(x)
    assert set(outer.seen) == set(inner.seen) == {ORIGINALS[name]}


def test_nothing_of_it_stays() -> None:
    script = """
import torch.nn.functional as F
from torch import nn
import hookline

before = dict(vars(F))
with hookline.record(nn.Linear(2, 2)):
    assert vars(F) != before
assert vars(F) == before
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)  # other tests may have models observed


def _coverage_of(module: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor) -> str:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = module

        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    net = Net()
    with hookline.record(net) as rec:
        net(x)
    return rec.coverage["part:output"].status


norm, group, batch = nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4).eval()
table, conv = nn.Embedding(5, 4, padding_idx=1, max_norm=2.0), nn.Conv2d(2, 2, 3, stride=2, padding=1)
image = torch.ones(1, 2, 5, 5)


@pytest.mark.parametrize(
    ("module", "x", "function"),
    [
        (norm, torch.ones(2, 4), lambda x: F.layer_norm(x, [4], norm.weight, norm.bias)),
        (group, torch.ones(2, 4), lambda x: F.group_norm(x, 2, group.weight, group.bias, eps=1e-5)),
        (
            batch,
            torch.ones(2, 4),
            lambda x: F.batch_norm(x, batch.running_mean, batch.running_var, batch.weight, batch.bias),
        ),
        (table, torch.tensor([1]), lambda x: F.embedding(x, table.weight, 1, max_norm=2.0)),
        (table, torch.tensor([1]), lambda x: F.embedding(x, table.weight, -4, max_norm=2.0)),
        (table, torch.tensor([1]), lambda x: F.embedding(x, table.weight, padding_idx=-4, max_norm=2.0)),
        (conv, image, lambda x: F.conv2d(x, conv.weight, conv.bias, [2], padding=[1, 1])),
        (conv, image, lambda x: F.conv2d(x, conv.weight, conv.bias, (2, 2), 1)),
    ],
)
def test_the_settings_of_the_module_make_it_a_call(module: nn.Module, x: Tensor, function: Any) -> None:
    assert torch.equal(function(x), module(x))
    assert _coverage_of(module, function, x) == "captured"


@pytest.mark.parametrize(
    ("module", "x", "function"),
    [
        (norm, torch.ones(2, 4), lambda x: F.layer_norm(x, (4,), norm.weight, norm.bias, eps=0.1)),
        (group, torch.ones(2, 4), lambda x: F.group_norm(x, 4, group.weight, group.bias)),
        (batch, torch.ones(2, 4), lambda x: F.batch_norm(x, None, None, batch.weight, batch.bias, training=True)),
        (
            batch,
            torch.ones(2, 4),
            lambda x: F.batch_norm(x, torch.zeros(4), batch.running_var, batch.weight, batch.bias),
        ),
        (table, torch.tensor([1]), lambda x: F.embedding(x, table.weight)),
        (table, torch.tensor([1]), lambda x: F.embedding(x, table.weight, -1, max_norm=2.0)),
        (conv, image, lambda x: F.conv2d(x, conv.weight, conv.bias, [1, 2], padding=1)),
    ],
)
def test_other_settings_are_no_call(module: nn.Module, x: Tensor, function: Any) -> None:
    assert _coverage_of(module, function, x) == "bypassed"


def test_what_a_caller_has_dropped_is_freed_at_once() -> None:
    """Looking whether a method of a tied module has called must not keep that method's tensors."""
    freed: list[bool] = []

    class Own(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x: Tensor) -> Tensor:
            large = x * 2
            ref = weakref.ref(large)
            y = F.linear(large, self.weight)
            del large
            freed.append(ref() is None)
            return y

    class Keeps(Own):
        def forward(self, x: Tensor) -> Tensor:
            mine = locals()
            y = F.linear(x, self.weight)
            freed.append(set(mine) >= {"self", "x"})
            return y

    class Looks(Own):
        def forward(self, x: Tensor) -> Tensor:
            mine = vars()
            y = F.linear(x, self.weight)
            freed.append(set(mine) >= {"self", "x"})
            return y

    tied = nn.Linear(3, 3, bias=False)
    for cls in (Own, Keeps, Looks):
        own = cls(torch.ones(3, 3))
        own.weight = tied.weight
        net = nn.ModuleList([tied, own])
        with hookline.record(net, "0"), torch.no_grad():
            own(torch.ones(2, 3))
    assert freed == [True, True, True]
