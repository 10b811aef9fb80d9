"""The numbers of steps and calls."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from hookline.hooks import Call, Observer

__all__ = ["Step", "StepObserver", "Steps"]


_RUNNING, _ENDED, _EARLY = "running", "ended", "early"
"""A thread's step: its forward of the root has begun; it is over; one has begun before the forward of the root."""


class Step:
    """One forward of the root, and everything that is called until the next one in the same thread."""

    __slots__ = ("_counts", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._counts: dict[str, itertools.count[int]] = {}

    @property
    def has_calls(self) -> bool:
        """Whether anything was called."""
        return bool(self._counts)

    def next_call(self, path: str) -> int:
        """Number of a module's call that begins now. ``setdefault`` and ``next`` need no lock."""
        return next(self._counts.setdefault(path, itertools.count()))


class Steps:
    """Counts the root's forwards. Threads that run the same model have each their own current step.

    Args:
        first: Number of the first step.
        by_hand: Whether forwards of the root do not count, but only ``end`` does.

    Attributes:
        first: Number of the first step.
        by_hand: Whether only ``end`` counts.
        latest: Number of the root's newest forward in any thread, ``first - 1`` before the first.
    """

    def __init__(self, first: int = 0, *, by_hand: bool = False) -> None:
        self.by_hand = by_hand
        self._own = threading.local()
        self._lock = threading.Lock()
        self.start_at(first)

    def start_at(self, first: int) -> None:
        """Say the number of the first step, before anything runs."""
        self.first = first
        self.latest = first - 1
        self._newest = Step(first)

    def begin(self) -> int:
        """A forward of the root begins in this thread; returns the number of the step before, -1 where none began.

        What was called before the first forward of the root, or between ``end`` and the next one, belongs to the step
        of that forward.
        """
        state, self._own.state = self._state, _RUNNING
        if state == _EARLY or (self.by_hand and state != _ENDED and self.latest >= self.first):
            self._own.step = self.current
            return -1
        return self._begin()

    def end(self) -> int:
        """End this thread's step: its next call begins another one. A step in which nothing was called goes on.

        Returns the number of the step.
        """
        if self._state == _ENDED or (self.own is None and not self.current.has_calls):
            return self.current.number
        self._own.step, self._own.state = self.current, _ENDED
        with self._lock:
            self.latest = max(self.latest, self.current.number)
        return self.current.number

    def _begin(self) -> int:
        with self._lock:
            before, self.latest = self.latest, self.latest + 1
            if self.latest > self.first:
                self._newest = Step(self.latest)
            self._own.step = self._newest
        return before

    @property
    def _state(self) -> str:
        return getattr(self._own, "state", _RUNNING)

    @property
    def own(self) -> Step | None:
        """The step that this thread has begun."""
        return getattr(self._own, "step", None)

    @property
    def current(self) -> Step:
        """The step that this thread is in; the newest one for a thread that has not run the root."""
        return getattr(self._own, "step", self._newest)

    @property
    def called(self) -> Step:
        """The step of a call that begins in this thread now."""
        if self._state == _ENDED:
            self._begin()
            self._own.state = _EARLY
        return self.current


class StepObserver(Observer):
    """Stands at the root: each of its forwards that is not inside another one begins a step."""

    sees_output = True

    def __init__(self, begin_step: Callable[[], bool]) -> None:
        self._begin_step: Callable[[], bool] | None = begin_step
        self._depth = threading.local()

    def let_go(self) -> None:
        """Forget the recorder, as ``ModuleObserver.let_go`` does."""
        self._begin_step = None

    @property
    def is_running(self) -> bool:
        """Whether this thread is in a forward of the root."""
        return bool(getattr(self._depth, "value", 0))

    def begin(self, call: Call) -> None:
        """A forward of the root begins."""
        begin_step = self._begin_step
        if call.recomputed or begin_step is None:
            return
        depth = getattr(self._depth, "value", 0)
        if depth == 0 and not begin_step():
            return
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


class StepEnd(Observer):
    """Stands at the root behind all others, which have seen its output when a forward is said to be over."""

    sees_output = True

    def __init__(self, begins: StepObserver, end_step: Callable[[], None]) -> None:
        self._begins = begins
        self._end_step: Callable[[], None] | None = end_step

    def let_go(self) -> None:
        """Forget the recorder."""
        self._end_step = None

    def on_output(self, call: Call, output: object) -> None:
        """A forward has ended."""
        if self._end_step is not None and not self._begins.is_running:
            self._end_step()

    def on_failure(self, call: Call, error: BaseException) -> None:
        """It has raised."""
        self.on_output(call, None)
