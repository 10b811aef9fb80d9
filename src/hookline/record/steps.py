"""The numbers of steps and calls."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from hookline.hooks import Call, Observer

__all__ = ["Step", "StepObserver", "Steps"]


class Step:
    """One forward of the root, and everything that is called until the next one in the same thread."""

    __slots__ = ("_counts", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._counts: dict[str, itertools.count[int]] = {}

    def next_call(self, path: str) -> int:
        """Number of a module's call that begins now. ``setdefault`` and ``next`` need no lock."""
        return next(self._counts.setdefault(path, itertools.count()))


class Steps:
    """Counts the root's forwards. Threads that run the same model have each their own current step.

    Attributes:
        latest: Number of the root's newest forward in any thread, -1 before the first.
    """

    def __init__(self) -> None:
        self.latest = -1
        self._newest = Step(0)
        self._own = threading.local()
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Begin a step in this thread; returns the number of the one before it, -1 for the first.

        What was called before the first forward of the root belongs to step 0 as well.
        """
        with self._lock:
            before, self.latest = self.latest, self.latest + 1
            if self.latest > 0:
                self._newest = Step(self.latest)
            self._own.step = self._newest
        return before

    @property
    def current(self) -> Step:
        """The step that this thread is in; the newest one for a thread that has not run the root."""
        return getattr(self._own, "step", self._newest)


class StepObserver(Observer):
    """Stands at the root: each of its forwards that is not inside another one begins a step."""

    sees_output = True

    def __init__(self, begin_step: Callable[[], None]) -> None:
        self._begin_step: Callable[[], None] | None = begin_step
        self._depth = threading.local()

    def let_go(self) -> None:
        """Forget the recorder, as ``ModuleObserver.let_go`` does."""
        self._begin_step = None

    def begin(self, call: Call) -> None:
        """A forward of the root begins."""
        begin_step = self._begin_step
        if call.recomputed or begin_step is None:
            return
        depth = getattr(self._depth, "value", 0)
        if depth == 0:
            begin_step()
        call.marks[self] = self._depth.value = depth + 1

    def on_output(self, call: Call, output: object) -> None:
        """It has ended."""
        self._leave(call)

    def on_failure(self, call: Call, error: BaseException) -> None:
        """It has raised."""
        self._leave(call)

    def _leave(self, call: Call) -> None:
        if call.marks.pop(self, None):
            self._depth.value -= 1
