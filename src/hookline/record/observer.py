"""What a recorder puts at a module: it numbers the calls and hands the values on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hookline.hooks import Call, Observer
from hookline.record.evidence import Evidence
from hookline.record.segment import Segments
from hookline.sites import Site
from hookline.values import Structure, flatten, flatten_call

if TYPE_CHECKING:
    from hookline.record.recorder import Recorder

__all__ = ["ModuleObserver"]


class ModuleObserver(Observer):
    """Hands the values of one module to a recorder.

    A call that runs again inside a backward pass (activation checkpointing) is not counted again, and its gradients
    belong to the call that it repeats.
    """

    def __init__(self, recorder: Recorder, path: str, sites: Iterable[Site], evidence: Evidence) -> None:
        self._recorder: Recorder | None = recorder
        self._path = path
        self._sites = {site.port: site for site in sites}
        self.sees_input = "input" in self._sites
        self.sees_grad_input = "grad_input" in self._sites
        self.sees_grad_output = "grad_output" in self._sites
        # For gradients also where no output is kept: it tells whether a gradient can come.
        self.sees_output = "output" in self._sites or self.sees_grad_input or self.sees_grad_output
        self.evidence = evidence
        self._segments = Segments() if self.sees_grad_input or self.sees_grad_output else None

    def let_go(self) -> None:
        """Forget the recorder: a graph remembers its observers, and must not keep a recording alive."""
        self._recorder = None

    def begin(self, call: Call) -> None:
        """Give the call its number, or that of the call that it repeats."""
        recorder = self._recorder
        if recorder is None or (not call.recomputed and recorder.passes_over):
            return
        if call.recomputed:
            mark = None if self._segments is None else self._segments.original()
        else:
            step = recorder.steps.called
            mark = step.number, step.next_call(self._path), recorder.batch
            if recorder.wanted(step.number):
                self.evidence.begin()
        if mark is None:
            return
        call.marks[self] = mark
        if self._segments is not None and not call.with_grad:
            self._segments.note(mark)

    def on_input(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hand on the arguments."""
        if not call.recomputed:
            leaves, structure = flatten_call(args, kwargs)
            self._hand_on(call, "input", structure, leaves)

    def on_output(self, call: Call, output: Any) -> None:
        """Hand on the output."""
        if call.recomputed or self not in call.marks:
            return
        if call.with_grad and self._segments is not None:
            self.evidence.ended(bool(call.out_index), bool(call.in_index))
        if "output" in self._sites:
            leaves, structure = flatten(output)
            self._hand_on(call, "output", structure, leaves)

    def on_failure(self, call: Call, error: BaseException) -> None:
        """Note it."""
        if not call.recomputed and self in call.marks:
            self.evidence.fail(error)

    def passed_by(self, function: str, user: nn.Module | None) -> None:
        """Note it."""
        if self._recorder is not None:
            self.evidence.use(function, self._recorder.name_of(user))

    def plain_path(self, fused: str) -> None:
        """Note it."""
        self.evidence.fused = fused

    def untraced(self, tracer: str) -> None:
        """Note it."""
        self.evidence.tracer = tracer

    def on_grad_output(self, call: Call, grads: tuple[Any, ...]) -> None:
        """Hand on the gradients of the output."""
        self._hand_on(call, "grad_output", call.out_structure, grads, call.backwards)

    def on_grad_input(self, call: Call, grads: tuple[Any, ...]) -> None:
        """Hand on this call's share of the gradients of the arguments."""
        self._hand_on(call, "grad_input", call.in_structure, grads, max(call.backwards - 1, 0))

    def _hand_on(self, call: Call, port: str, structure: Structure, leaves: Iterable[Any], backward: int = 0) -> None:
        recorder, mark = self._recorder, call.marks.get(self)
        if recorder is None or mark is None:
            return
        leaves = list(leaves)
        if not recorder.put(self._sites[port], mark, backward, structure, leaves):
            if recorder.wanted(mark[0]):
                self.evidence.refused.add(port)
        elif not backward:
            self.evidence.keep(port, empty=not any(isinstance(leaf, Tensor) for leaf in leaves))
