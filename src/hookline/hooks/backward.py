"""What happens at the two nodes of a call when a backward pass comes by.

What must be remembered between the output node and the input node belongs to one backward pass. It hangs on that
pass's own end-of-pass callback and on nothing else, so it is gone when the pass ends or raises, and two threads that go
backward through the same graph do not see each other's.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hookline.errors import HookError
from hookline.hooks.tap import Entry
from hookline.hooks.torch_private import at_end_of_backward, graph_task_id
from hookline.hooks.user_hooks import ShownGradients, call_hook, replaced_gradients

if TYPE_CHECKING:
    from hookline.hooks.call import Call

__all__ = ["note_part", "receive_input", "receive_output"]

Grads = Sequence["Tensor | None"]


class _Pass:
    """One call's part of one backward pass."""

    __slots__ = ("done", "grad_output")

    def __init__(self, grad_output: Grads) -> None:
        self.grad_output = grad_output
        self.done = False


class _Backward:
    """One backward pass, as far as observed calls take part in it."""

    __slots__ = ("__weakref__", "parts", "passes")

    def __init__(self) -> None:
        self.passes: dict[Call, _Pass] = {}
        self.parts: dict[Call, list[tuple[int, Tensor]]] = {}

    def finish(self) -> None:
        """Run the hooks of the calls whose inputs this pass did not reach."""
        for call, part in reversed(self.passes.items()):  # inner calls before those that they stand in
            if not part.done:
                part.done = True
                _run_hooks(call, [None] * call.in_count, part.grad_output, reached=False)


_running: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()


def _current() -> _Backward:
    task = graph_task_id()
    backward = _running.get(task)
    if backward is None:
        backward = _Backward()
        _running[task] = backward
        at_end_of_backward(backward.finish)
    return backward


def receive_output(call: Call, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of a call's outputs are complete.

    Args:
        call: The call.
        grads: One for each tensor that went through the output node; None where no gradient arrived.

    Returns:
        The gradients to pass on into the call.
    """
    plan = call.plan
    full = _spread(grads, call.out_index, call.out_count)
    for entry in plan.back_pre:
        if entry.alive:
            full = _run_backward_pre_hook(entry, call, full)
    for observer in plan.see_grad_output:
        if observer.alive:
            observer.on_grad_output(call, tuple(full))
    call.backwards += 1
    if plan.input_node:
        _current().passes[call] = _Pass(full)
    return tuple(full[i] for i in call.out_index)


def receive_input(call: Call, grads: tuple[Tensor | None, ...], width: int) -> list[list[Tensor | None]]:
    """This call's share of its inputs' gradients is complete.

    Args:
        call: The call.
        grads: One for each tensor that went through the input node.
        width: In how many parts each may be sent on, at most.

    Returns:
        For each tensor the gradients to pass on to its producer, one after the other.
    """
    part = _part_of_current(call)
    full = _spread(grads, call.in_index, call.in_count)
    if part is not None:
        part.done = True
        grad_output, part.grad_output = part.grad_output, ()  # or it would live until the end of the pass
        full = _run_hooks(call, full, grad_output, reached=True)
    new = [full[i] for i in call.in_index]
    if width == 1:
        return [[grad] for grad in new]
    return _sent_on(call, grads, new, _take_parts(call), width)


def note_part(call: Call, place: int, grad: Tensor) -> None:
    """An operation inside the call sends a gradient to one of its inputs."""
    _current().parts.setdefault(call, []).append((place, grad))


def _take_parts(call: Call) -> list[tuple[int, Tensor]]:
    backward = _running.get(graph_task_id())
    return [] if backward is None else backward.parts.pop(call, [])


def _sent_on(
    call: Call, old: Grads, new: Grads, parts: list[tuple[int, Tensor]], width: int
) -> list[list[Tensor | None]]:
    """For each place what is sent on; one tensor at several places gets its parts in the order of their coming."""
    at: list[list[Tensor]] = [[] for _ in old]
    for place, part in parts:
        at[place].append(part)
    sent = [_in_parts(before, grad, own, width) for before, grad, own in zip(old, new, at, strict=True)]
    for first in set(call.groups.values()):
        places = [place for place, group in call.groups.items() if group == first]
        ordered = [part for place, part in parts if call.groups[place] == first]
        if 1 < len(ordered) <= width * len(places) and all(_are_those_of(at[i], sent[i]) for i in places):
            for number, place in enumerate(places):
                some: list[Tensor | None] = [*ordered[number * width : (number + 1) * width]]
                sent[place] = some or [None]
    return sent


def _are_those_of(parts: Sequence[Tensor], sent: Sequence[Tensor | None]) -> bool:
    """Whether the parts of a place are what is sent on from there, so that their order may change."""
    if not parts:
        return sent == [None]
    return len(parts) == len(sent) and all(
        part is one or (one is not None and torch.equal(part, one)) for part, one in zip(parts, sent, strict=True)
    )


def _in_parts(old: Tensor | None, new: Tensor | None, parts: Sequence[Tensor], width: int) -> list[Tensor | None]:
    """The parts, if they are all of the gradient and no hook has replaced it; else the gradient in one."""
    if old is None or new is not old or not 1 < len(parts) <= width:
        return [new]
    with torch.no_grad():
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total = total + part
        return list(parts) if torch.equal(total, old) else [new]


def _part_of_current(call: Call) -> _Pass | None:
    """None when this pass did not come through the call's outputs, so that the gradient is not this call's."""
    backward = _running.get(graph_task_id())
    part = None if backward is None else backward.passes.get(call)
    if part is None and call.side_effect:
        part = _current().passes[call] = _Pass([None] * call.out_count)
    return part


def _spread(grads: Grads, index: list[int], count: int) -> Grads:
    if len(index) == count:
        return grads
    full: list[Tensor | None] = [None] * count
    for position, grad in zip(index, grads, strict=True):
        full[position] = grad
    return full


def _run_backward_pre_hook(entry: Entry, call: Call, grads: Grads) -> Grads:
    module = call.module()
    if module is None:
        _warn_of_dead_module(entry)
        return grads
    shown = ShownGradients(grads, call.out_structure, "output")
    result = call_hook(entry, "backward pre-hook", module, shown.shown)
    shown.check(entry, "backward pre-hook", "grad_output")
    if result is None:
        return grads
    return replaced_gradients(entry, "backward pre-hook", "grad_output", result, shown)


def _run_hooks(call: Call, grad_input: Grads, grad_output: Grads, *, reached: bool) -> Grads:
    """Run the backward hooks, then the observers, and return what stands in the place of ``grad_input``."""
    if any(entry.alive for entry in call.plan.back):
        outputs = ShownGradients(grad_output, call.out_structure, "output")
        for entry in call.plan.back:
            if not entry.alive:
                continue  # removed by one before it
            grad_input = _run_backward_hook(entry, call, grad_input, outputs, reached)
    for observer in call.plan.see_grad_input:
        if observer.alive:
            observer.on_grad_input(call, tuple(grad_input))
    return grad_input


def _run_backward_hook(entry: Entry, call: Call, grad_input: Grads, outputs: ShownGradients, reached: bool) -> Grads:
    module = call.module()
    if module is None:
        _warn_of_dead_module(entry)
        return grad_input
    inputs = ShownGradients(grad_input, call.in_structure, "args")
    result = call_hook(entry, "backward hook", module, inputs.shown, outputs.shown)
    inputs.check(entry, "backward hook", "grad_input")
    outputs.check(entry, "backward hook", "grad_output")
    if result is None:
        return grad_input
    new = replaced_gradients(entry, "backward hook", "grad_input", result, inputs)
    if not reached and any(grad is not None for grad in new):
        raise HookError(
            f"the backward hook {entry.name} at {entry.site} returned a gradient, but none is needed there."
        )
    return new


def _warn_of_dead_module(entry: Entry) -> None:
    warnings.warn(
        f"the module at {entry.site} was freed before its backward, so the hook {entry.name} was not called; "
        "keep a reference to the module until the backward is done.",
        RuntimeWarning,
        stacklevel=2,
    )
