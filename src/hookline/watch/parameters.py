"""Parameters, their gradients, and how far an optimizer moves them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from hookline.hooks import original_class
from hookline.watch.measure import is_finite, measure

if TYPE_CHECKING:
    from hookline.watch.session import Session

__all__ = ["SAMPLE", "Parameters"]

SAMPLE = 1 << 16
"""Elements of a parameter from which its update is computed; of a larger one this many, evenly spread."""


_NONE = measure(torch.empty(0, device="cpu"))
"""The row of a gradient that is not there."""


class _Named(NamedTuple):
    path: str
    name: str
    type_name: str
    parameter: Tensor


class Parameters:
    """The parameters of some modules.

    Args:
        modules: By path; a parameter that several modules share belongs to the first.
        ports: Which of ``parameter``, ``parameter_grad`` and ``update`` are measured.
    """

    def __init__(self, modules: dict[str, nn.Module], ports: Iterable[str]) -> None:
        self._modules = modules
        self._ports = frozenset(ports)
        self._before: dict[int, Tensor] = {}
        self._stepping: list[_Named] = []

    def _of(self, optimizer: torch.optim.Optimizer) -> list[_Named]:
        wanted = {id(one) for group in optimizer.param_groups for one in group["params"]}
        found: dict[int, _Named] = {}
        for path, module in self._modules.items():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in wanted and not nn.parameter.is_lazy(parameter):
                    named = _Named(path, name, original_class(module).__name__, parameter)
                    found.setdefault(id(parameter), named)
        return list(found.values())

    def before_update(self, session: Session, optimizer: torch.optim.Optimizer, *, updates: bool) -> None:
        """An optimizer is about to step: measure the gradients that it sees, and remember the parameters."""
        self._before, self._stepping = {}, self._of(optimizer)
        for path, name, type_name, parameter in self._stepping:
            if "parameter_grad" in self._ports and parameter.requires_grad:
                if parameter.grad is None:
                    session.add_row(session.series_of(path, "parameter_grad", name, type_name, parameter.dtype), _NONE)
                    continue
                row = measure(parameter.grad)
                index = session.series_of(path, "parameter_grad", name, type_name, parameter.grad.dtype)
                session.add_row(index, row)
                if not is_finite(row):
                    session.origins.parameter(path, name, type_name, parameter.grad.dtype, row)
            if updates and "update" in self._ports and parameter.requires_grad:
                self._before[id(parameter)] = _sample(parameter).clone()

    def after_update(self, session: Session, *, updates: bool) -> None:
        """The same optimizer has stepped: measure the parameters and what has changed."""
        before, self._before = self._before, {}
        stepping, self._stepping = self._stepping, []
        if not updates:
            return
        for path, name, type_name, parameter in stepping:
            if "parameter" in self._ports:
                index = session.series_of(path, "parameter", name, type_name, parameter.dtype)
                session.add_row(index, measure(parameter.detach()))
            old = before.get(id(parameter))
            if old is not None:
                index = session.series_of(path, "update", name, type_name, parameter.dtype)
                session.add_row(index, measure(_sample(parameter) - old))


def _sample(parameter: Tensor) -> Tensor:
    """Elements of a parameter, all of a small one: shape (at most ``SAMPLE``,)."""
    tensor = parameter.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    flat = tensor.reshape(-1)
    return flat if flat.numel() <= SAMPLE else flat[:: -(-flat.numel() // SAMPLE)]
