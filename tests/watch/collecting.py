"""Frames of a training by torch's own hooks, a slow and plain way that is independent of the watch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hookline.stats import summarize
from hookline.watch.series import FIELDS, Frame, Series

from .healthy import Training


def row(tensor: Tensor) -> list[float]:
    """One row of a frame, in the order of ``FIELDS``."""
    tensor = tensor.detach()
    summary = summarize(tensor)
    tiny = torch.finfo(tensor.dtype).smallest_normal if tensor.is_floating_point() else 0.0
    with_double = tensor.double()
    subnormal = int(((with_double != 0) & (with_double.abs() < tiny)).sum())
    fields = {
        name: getattr(summary, name) for name in ("numel", "mean", "std", "min", "max", "l2", "nan", "inf", "zeros")
    }
    fields |= {"neg_inf": int(torch.isneginf(with_double).sum()), "subnormal": subnormal}
    return [float(fields[name]) for name in FIELDS]


ABSENT = [0.0, *[float("nan")] * 5, *[0.0] * 5]
"""The row of a gradient that is None."""


class Collector:
    """Gathers what one step gives; ``frame`` ends the step."""

    def __init__(self) -> None:
        self.series: list[Series] = []
        self._numbers: dict[tuple[str, str, str], int] = {}
        self._rows: list[tuple[int, int, list[float]]] = []
        self._calls: dict[int, int] = {}
        self._step = 0

    def put(self, path: str, port: str, place: str, type_name: str, tensor: Tensor | None, dtype: str) -> None:
        number = self._numbers.setdefault((path, port, place), len(self._numbers))
        if number == len(self.series):
            self.series.append(Series(path, port, place, type_name, dtype))
        call = self._calls[number] = self._calls.get(number, -1) + 1
        self._rows.append((number, call, ABSENT if tensor is None else row(tensor)))

    def frame(self, loss: Tensor, **extra: Any) -> Frame:
        self.put("", "loss", "", "", loss, _name(loss))
        frame = Frame(
            self._step,
            time.time(),
            np.array([number for number, _, _ in self._rows], np.int32),
            np.array([call for _, call, _ in self._rows], np.int32),
            np.array([values for _, _, values in self._rows]),
            extra,
        )
        self._rows, self._calls, self._step = [], {}, self._step + 1
        return frame


@contextmanager
def collecting(training: Training) -> Iterator[Collector]:
    """Hooks at all modules and optimizers of a training, gone at the end."""
    collector = Collector()
    names = {module: name for name, module in training.model.named_modules()}
    owners = {
        parameter: (names[module], own, type(module).__name__)
        for module in training.model.modules()
        for own, parameter in module.named_parameters(recurse=False)
    }
    with ExitStack() as stack:
        for module, path in names.items():
            if path and (not any(True for _ in module.children()) or isinstance(module, nn.LSTM)):
                stack.enter_context(module.register_forward_hook(_at_module(collector, path)))
        for optimizer in training.optimizers:
            before, after = _at_optimizer(collector, owners)
            stack.enter_context(optimizer.register_step_pre_hook(before))
            stack.enter_context(optimizer.register_step_post_hook(after))
        yield collector


def frames(training: Training, steps: int | None = None) -> Iterator[tuple[Frame, list[Series]]]:
    """Run the training; after each step its frame and all series so far."""
    with collecting(training) as collector:
        for number in range(training.steps if steps is None else steps):
            yield collector.frame(training.step(number)), collector.series


def _at_module(collector: Collector, path: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for place, tensor in _tensors(output):
            collector.put(path, "output", place, type(module).__name__, tensor, _name(tensor))
            if tensor.requires_grad:
                tensor.register_hook(
                    lambda grad, place=place: collector.put(
                        path, "grad_output", place, type(module).__name__, grad, _name(grad)
                    )
                )

    return hook


def _tensors(output: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        yield "", output
    elif isinstance(output, tuple):
        for number, part in enumerate(output):
            yield from ((f"[{number}]{place}", tensor) for place, tensor in _tensors(part))


def _at_optimizer(collector: Collector, owners: dict[nn.Parameter, tuple[str, str, str]]) -> tuple[Any, Any]:
    old: dict[nn.Parameter, Tensor] = {}

    def parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        return [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for one in parameters(optimizer):
            old[one] = one.detach().clone()
            path, own, kind = owners[one]
            collector.put(path, "parameter_grad", own, kind, one.grad, _name(one))

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for one in parameters(optimizer):
            path, own, kind = owners[one]
            collector.put(path, "parameter", own, kind, one, _name(one))
            collector.put(path, "update", own, kind, one.detach() - old.pop(one), _name(one))

    return before, after


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
