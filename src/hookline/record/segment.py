"""Activation checkpointing: which call of the forward does a call inside a backward pass repeat?

Reentrant checkpointing (``use_reentrant=True``, and DeepSpeed's and Megatron's own) is an autograd Function: its
``forward`` runs a segment without a graph, its ``backward`` runs it again with one, and that is where the gradients
arrive. Both have the same ``ctx`` in their frames, so a call finds its segment by looking up the stack. Below one
``ctx`` the calls of a module come in the same order each time, whatever else has run in between.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.autograd.function import FunctionCtx

from hookline.hooks.torch_private import graph_task_id

if TYPE_CHECKING:
    from hookline.record.batch import Batch

__all__ = ["Mark", "Segments"]

Mark = tuple[int, int, "Batch | None"]
"""Step, number of the call in that step, and what its rows are."""


class _Segment:
    """The calls of one module below one ``ctx``, and how many of them the current backward pass has repeated."""

    __slots__ = ("marks", "repeated", "task")

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.task = -1
        self.repeated = 0

    def next_mark(self) -> Mark | None:
        if self.task != graph_task_id():  # a new pass, as with retain_graph=True, begins at the first call again
            self.task, self.repeated = graph_task_id(), 0
        self.repeated += 1
        return self.marks[self.repeated - 1] if self.repeated <= len(self.marks) else None


class Segments:
    """The segments in which one module was called; each is forgotten when its graph is freed."""

    def __init__(self) -> None:
        self._by_ctx: weakref.WeakKeyDictionary[Any, _Segment] = weakref.WeakKeyDictionary()

    def note(self, mark: Mark) -> None:
        """A call begins without a graph: remember it in every segment that it stands in."""
        for name, ctx in _functions_above():
            if name == "backward":
                return
            if ctx not in self._by_ctx:
                self._by_ctx[ctx] = _Segment()
            self._by_ctx[ctx].marks.append(mark)

    def original(self) -> Mark | None:
        """The call that the one which begins now repeats; None when that one was not seen."""
        for name, ctx in _functions_above():
            if name == "backward":
                segment = self._by_ctx.get(ctx)
                return None if segment is None else segment.next_mark()
        return None


def _functions_above() -> Iterator[tuple[str, Any]]:
    """``forward`` or ``backward``, and the ``ctx``, of the autograd Functions on the stack, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals["ctx"]
            if isinstance(ctx, FunctionCtx):
                yield code.co_name, ctx
        frame = frame.f_back  # type: ignore[assignment]
