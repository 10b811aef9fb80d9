"""What is measured while a model trains, step by step."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.hooks.torch_private import version
from hookline.watch.cases import Case
from hookline.watch.incident import Incident
from hookline.watch.measure import Row, is_finite, measure, scaled
from hookline.watch.origin import Origins
from hookline.watch.running import Running, Stack
from hookline.watch.series import FIELDS, Frame, Series

__all__ = ["Session"]


class Session:
    """The step that is under way: its calls, its rows, its first non-finite value.

    Args:
        tell: Gets each incident.
        holds_inputs: Whether the inputs of calls are held until their gradients have come, for replays.

    Attributes:
        step: Number of the step.
        measures: Whether it is measured.
        stack: The watched calls that the thread is in.
        series: Everything that was ever measured; rows point into it.
    """

    def __init__(self, tell: Callable[[Incident, Case | None], None], *, holds_inputs: bool = True) -> None:
        self.step = 0
        self.measures = True
        self.begun = False
        self.holds_inputs = holds_inputs
        self.stack = Stack()
        self.series: list[Series] = []
        self.origins = Origins(self, tell)
        self._places: dict[tuple[str, str, str, torch.dtype], int] = {}
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._rows: list[tuple[int, int, Row]] = []
        self._counts: dict[str, itertools.count[int]] = {}
        self._users: dict[tuple[int, int], list[Running]] = {}
        self._makers: dict[tuple[int, int], list[Running]] = {}
        self._awaiting: list[Running] = []
        self._last_by_thread = threading.local()
        self.origins.begin()

    # ------------------------------------------------------------ calls

    def next_call(self, path: str) -> int:
        """Number of a module's call that begins now. ``setdefault`` and ``next`` need no lock."""
        return next(self._counts.setdefault(path, itertools.count()))

    def leave(self, running: Running) -> None:
        """A call is over."""
        calls = self.stack.calls
        while calls and calls.pop() is not running:
            pass

    def used(self, key: tuple[int, int], running: Running) -> None:
        """A call has got the value that an operation made."""
        self._users.setdefault(key, []).append(running)

    def users(self, key: tuple[int, int]) -> list[Running]:
        """The calls that got a value, in the order in which they began."""
        return self._users.get(key, [])

    def is_new(self, key: tuple[int, int], running: Running) -> bool:
        """Whether no call has returned this value before, as a block does with that of its last layer."""
        makers = self._makers.setdefault(key, [])
        makers.append(running)
        return len(makers) == 1

    def await_gradients(self, running: Running) -> None:
        """Gradients may come to a call; what it holds is let go at the end of the step."""
        self._awaiting.append(running)

    # ------------------------------------------------------------ values

    def output(self, running: Running, place: str, tensor: Tensor) -> None:
        """A call has returned a tensor. The very one that an inner call has returned is not measured twice."""
        now = version(tensor)
        last: tuple[Any, int | None] = getattr(self._last_by_thread, "value", (None, -1))
        if last[0] is not None and last[0]() is tensor and last[1] == now:
            return
        self._last_by_thread.value = weakref.ref(tensor), now
        row = measure(tensor)
        self.add(running, "output", place, tensor.dtype, row)
        if not is_finite(row):
            self.origins.forward(running, place, tensor, row)

    def gradient(self, running: Running, place: str, key: Any, number: int, grad: Tensor) -> None:
        """A gradient has arrived at the output of a call."""
        if running.step != self.step or not self.measures:
            return
        row = measure(grad)
        self.add(running, "grad_output", place, grad.dtype, row)
        finite = is_finite(row)
        for maker in self._makers.get(key, (running,)):
            maker.arrived = True
            maker.finite_grads &= finite
            if self.holds_inputs and maker.held is not None:
                maker.grads[number] = grad.detach()
        if not finite:
            self.origins.backward(running, place, key, row)
            return
        for user in self.users(key) if key is not None else ():
            if user.arrived and user.finite_grads:
                user.let_go()  # what it sent on is finite: nothing went wrong in it

    def add(self, running: Running, port: str, place: str, dtype: torch.dtype, row: Row) -> None:
        """Add a row."""
        series = self.series_of(running.path, port, place, running.type_name, dtype)
        self._rows.append((series, running.number, row))

    def add_row(self, series: int, row: Row, call: int = 0) -> None:
        """Add a row that is not of a call."""
        self._rows.append((series, call, row))

    def series_of(self, path: str, port: str, place: str, type_name: str, dtype: torch.dtype) -> int:
        """The index of a series, a new one where it is new."""
        key = path, port, place, dtype
        found = self._places.get(key)
        if found is None:
            with self._lock:
                found = self._places.setdefault(key, len(self.series))
                if found == len(self.series):
                    name = str(dtype).removeprefix("torch.")
                    self.series.append(Series(path, port, place, type_name, name))
        return found

    # ------------------------------------------------------------ steps

    def end(self, extra: dict[str, Any], *, gradient_factor: float = 1.0) -> Frame:
        """The step is over; returns what it gave, and begins the next one.

        Args:
            extra: For the frame.
            gradient_factor: What the gradients of outputs have to be multiplied with.
        """
        rows = self._rows
        if gradient_factor != 1.0:
            port = [series.port for series in self.series]
            rows = [
                (index, call, scaled(row, gradient_factor) if port[index] == "grad_output" else row)
                for index, call, row in rows
            ]
        frame = Frame(
            self.step,
            time.time(),
            np.array([row[0] for row in rows], np.int32),
            np.array([row[1] for row in rows], np.int32),
            np.array([row[2] for row in rows], np.float64).reshape(len(rows), len(FIELDS)),
            extra,
        )
        self.drop()
        self.step += 1
        self._begin()
        return frame

    def drop(self) -> None:
        """Let go what is held for gradients that have not come."""
        for running in self._awaiting:
            running.let_go()

    @property
    def has_rows(self) -> bool:
        """Whether anything was measured in this step."""
        return bool(self._rows)
