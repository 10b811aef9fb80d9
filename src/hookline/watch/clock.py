"""When a step ends: optimizers, and what a gradient scaler does to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hookline.hooks import Handle, see_steps

__all__ = ["Clock", "Scaler"]


class Clock:
    """Tells of the steps of some optimizers.

    Args:
        optimizers: The step of the watch ends with that of the last one.
        before, after: Called around the step of each.
        end: Called when the step of the watch is over; with True where a gradient scaler has left the update out.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        before: Callable[[torch.optim.Optimizer], None],
        after: Callable[[torch.optim.Optimizer], None],
        end: Callable[[bool], None],
    ) -> None:
        self._optimizers = optimizers
        self._before, self._after, self._end = before, after, end
        self._handles: list[Handle] = []

    def start(self) -> None:
        """Put hooks at the optimizers."""
        for optimizer in self._optimizers:
            self._handles.append(see_steps(optimizer, self._before, self._stepped))

    def stop(self) -> None:
        """Take them away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._after(optimizer)
        if optimizer is self._optimizers[-1]:
            self._end(False)


class Scaler:
    """A gradient scaler of the user: its scale, and the updates that it leaves out.

    Such a step calls no optimizer, so that only ``scaler.update()`` tells that it is over.

    Args:
        scaler: A ``torch.amp.GradScaler``; None for a scale of 1.
        updated: Called after ``scaler.update()``.
    """

    def __init__(self, scaler: Any, updated: Callable[[], None]) -> None:
        self._scaler = scaler
        self._updated = updated
        self._handle: Handle | None = None

    @property
    def scale(self) -> float:
        """The factor that the gradients have."""
        return 1.0 if self._scaler is None or not self._scaler.is_enabled() else float(self._scaler.get_scale())

    @property
    def is_on(self) -> bool:
        """Whether gradients are scaled."""
        return self._scaler is not None and bool(self._scaler.is_enabled())

    def start(self) -> None:
        """Listen."""
        if self._scaler is None:
            return
        scaler, original = self._scaler, self._scaler.update

        @functools.wraps(original)
        def update(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._updated()
            return result

        scaler.update = update
        self._handle = Handle(lambda: _take_back(scaler, update))

    def stop(self) -> None:
        """Listen no more."""
        if self._handle is not None:
            self._handle.remove()


def _take_back(scaler: Any, update: Any) -> None:
    if scaler.__dict__.get("update") is update:
        del scaler.update
