"""Independent references for the tests of the engine: gradients worked out on clones."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Grads = tuple["Tensor | None", ...]


class Computes(nn.Module):
    """A module that runs ``function(weight, *args, **kwargs)`` with a weight of its own, (0.5, -1, 2)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(vector(0.5, -1.0, 2.0))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def leaf(*values: float) -> Tensor:
    """A leaf that requires a gradient: (1, -2, 3) unless said otherwise."""
    return vector(*(values or (1.0, -2.0, 3.0))).requires_grad_()


# ---------------------------------------------------------------- nested values, without hookline's own flattening


def leaves_of(value: Any) -> list[Any]:
    """The leaves of nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, (tuple, list)):
        return [leaf for child in value for leaf in leaves_of(child)]
    if isinstance(value, dict):
        return [leaf for child in value.values() for leaf in leaves_of(child)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [leaf for field in dataclasses.fields(value) for leaf in leaves_of(getattr(value, field.name))]
    return [value]


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A copy of a nested value with ``function`` applied to its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        children = [mapped(function, child) for child in value]
        return type(value)(*children) if hasattr(value, "_fields") else tuple(children)
    if isinstance(value, list):
        return [mapped(function, child) for child in value]
    if isinstance(value, dict):
        return {key: mapped(function, child) for key, child in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: mapped(function, getattr(value, name)) for name in names})
    return value


# ---------------------------------------------------------------- gradients of one call, or of every call


def isolated(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor]
) -> tuple[Grads, Grads]:
    """(grad_input, grad_output) of one call, one entry a leaf.

    Every input tensor is cloned on its way in and every output on its way out, so no other use of them reaches in.
    """
    call = _ClonedCall(function, args, kwargs)
    return call.gradients_of(loss(call.output))


class _ClonedCall:
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inside = mapped(torch.clone, (args, kwargs))
        self.inputs = leaves_of(inside)
        # A second clone: the module may write into what it gets, and the first must stay what the gradient is of.
        inner_args, inner_kwargs = mapped(torch.clone, inside)
        self.output = mapped(torch.clone, function(*inner_args, **inner_kwargs))
        self.outputs = leaves_of(self.output)

    def wanted(self) -> list[Tensor]:
        return [leaf for leaf in (*self.inputs, *self.outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def gradients_of(self, loss: Tensor) -> tuple[Grads, Grads]:
        wanted = self.wanted()
        return self.pick(dict(zip(map(id, wanted), _gradients(loss, wanted), strict=True)))

    def pick(self, grads: dict[int, Tensor | None]) -> tuple[Grads, Grads]:
        return tuple(grads.get(id(leaf)) for leaf in self.inputs), tuple(grads.get(id(leaf)) for leaf in self.outputs)


def _gradients(loss: Tensor, wanted: list[Tensor]) -> Grads:
    return torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()


def isolated_calls(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> dict[str, list[tuple[Grads, Grads]]]:
    """(grad_input, grad_output) of every call of every module of ``model`` under the loss ``run(model)``, by path."""
    model = copy.deepcopy(model)
    calls: list[tuple[str, _ClonedCall]] = []

    def isolating(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def cloned(*args: Any, **kwargs: Any) -> Any:
            place = len(calls)
            calls.append(None)  # type: ignore[arg-type]
            calls[place] = (path, _ClonedCall(forward, args, kwargs))
            return calls[place][1].output

        return cloned

    for path, module in model.named_modules():
        module.forward = isolating(path, module.forward)
    loss = run(model)
    wanted = [leaf for _, call in calls for leaf in call.wanted()]
    grads = dict(zip(map(id, wanted), _gradients(loss, wanted), strict=True))
    found: dict[str, list[tuple[Grads, Grads]]] = {path: [] for path, _ in model.named_modules()}
    for path, call in calls:
        found[path].append(call.pick(grads))
    return found


# ---------------------------------------------------------------- comparing


def equal(first: Any, second: Any) -> bool:
    """Same bits, NaN included; None only equals None."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        return torch.equal(first, second) or torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    return not isinstance(first, Tensor) and not isinstance(second, Tensor) and bool(first == second)


def close(first: Iterable[Tensor | None], second: Iterable[Tensor | None], rtol: float = 1e-9) -> bool:
    """Equal up to the order of float64 sums; None only equals None."""
    first, second = tuple(first), tuple(second)
    return len(first) == len(second) and all(
        a is b if a is None or b is None else a.shape == b.shape and torch.allclose(a, b, rtol=rtol, atol=1e-12)
        for a, b in zip(first, second, strict=True)
    )
