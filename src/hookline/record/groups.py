"""The steps of one ``rec.batch``, which are over together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Groups"]


class _Group:
    """Steps of which some go on or some are over, and the batches that they belong to."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.over: list[int] = []
        self.batches: set[int] = set()

    def take_over(self) -> list[int]:
        """Its steps, once all of them and all of its batches are over."""
        if self.open or self.batches:
            return []
        found, self.over = self.over, []
        return found


class Groups:
    """Tells when steps are over: those of a batch not before all of them, and the batch itself, are.

    Otherwise a crash could leave the first steps of a batch, and a run that goes on would take it for recorded.

    Args:
        over: Gets the numbers of steps that are over.
    """

    def __init__(self, over: Callable[..., None]) -> None:
        self._over = over
        self._lock = threading.Lock()
        self._of_step: dict[int, _Group] = {}
        self._of_batch: dict[int, _Group] = {}

    def begin(self, batch: Any, step: int) -> None:
        """A call of a step runs in a batch; None for none."""
        if batch is None:
            return
        with self._lock:
            group = self._of_batch.setdefault(id(batch), _Group())
            other = self._of_step.get(step)
            if other is not None and other is not group:  # a step that began in another batch
                group.open |= other.open
                group.over += other.over
                group.batches |= other.batches
                self._of_step |= dict.fromkeys(other.open, group)
                self._of_batch |= dict.fromkeys(other.batches, group)
            group.open.add(step)
            group.batches.add(id(batch))
            self._of_step[step] = group

    def step_over(self, step: int) -> None:
        """Nothing more of a step is expected."""
        with self._lock:
            group = self._of_step.pop(step, None)
            found = [step]
            if group is not None:
                group.open.discard(step)
                group.over.append(step)
                found = group.take_over()
        if found:
            self._over(*found)

    def batch_over(self, batch: Any) -> None:
        """The with-block of a batch has ended."""
        with self._lock:
            group = self._of_batch.pop(id(batch), None)
            if group is None:
                return
            group.batches.discard(id(batch))
            found = group.take_over()
        if found:
            self._over(*found)
