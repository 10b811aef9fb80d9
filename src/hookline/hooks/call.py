"""One call of a tapped module, from its arguments to its output."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hookline.hooks.boundary import close_again, close_boundary, histories, open_boundary, watch_kept
from hookline.hooks.purity import may_write_inputs
from hookline.hooks.running import running
from hookline.hooks.snapshot import alike
from hookline.hooks.tap import Entry, Plan, Tap
from hookline.hooks.torch_private import graph_task_id, is_early_stop, is_symbolic_trace, is_tracing, version
from hookline.hooks.traced import NOT_TRACED, run_traced
from hookline.hooks.user_hooks import add_note, run_post_hook, run_pre_hook
from hookline.values import Structure, flatten, flatten_call, rebuild

__all__ = ["Call", "run"]

is_compiling = torch.compiler.is_compiling


class Call:
    """What is remembered of a call for its backward: no tensor, so that it keeps no memory alive.

    Attributes:
        plan: The listeners when the call began.
        in_structure, out_structure: How arguments and output are nested.
        in_count, out_count: Number of their leaves.
        in_index, out_index: Which of these leaves pass through the node before and after the call.
        groups: For a place among the input node's tensors, the first place where the same tensor stands; empty
            unless one stands at several.
        side_effect: Whether the module wrote into an input that it did not return, so that gradients may reach
            the inputs without coming through the outputs.
        backwards: Backward passes that have come through the output so far.
        recomputed: Whether this is a recomputation inside a backward pass (activation checkpointing).
        with_grad: Whether gradients were enabled when the call began.
        seals: How many output nodes the call has had; the last one counts.
        kept: Aliases that the module may have kept, until the call is over.
        watches: Hooks on nodes that go away with this call.
        bounded: Whether the call runs between autograd nodes of ours.
        marks: Room for observers, by observer.
    """

    __slots__ = (
        "__weakref__",
        "backwards",
        "bounded",
        "groups",
        "in_count",
        "in_index",
        "in_structure",
        "kept",
        "marks",
        "module",
        "out_count",
        "out_index",
        "out_structure",
        "plan",
        "recomputed",
        "seals",
        "side_effect",
        "type_name",
        "watches",
        "with_grad",
    )

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self.module = weakref.ref(module)
        self.type_name = type(module).__name__
        self.plan = plan
        self.in_structure: Structure = None
        self.out_structure: Structure = None
        self.in_count = 0
        self.out_count = 0
        self.in_index: list[int] = []
        self.out_index: list[int] = []
        self.seals = 0
        self.kept: list[tuple[Any, Any, Any]] = []
        self.watches: list[Any] = []
        self.groups: dict[int, int] = {}
        self.side_effect = False
        self.backwards = 0
        self.recomputed = graph_task_id() != -1
        self.with_grad = torch.is_grad_enabled()
        self.bounded = self.with_grad and plan.output_node
        self.marks: dict[Any, Any] = {}


def run(tap: Tap, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``forward`` of a tapped module with everything that listens there."""
    is_traced = is_compiling() or is_tracing() or is_symbolic_trace()
    if is_traced and (traced := run_traced(tap, forward, module, args, kwargs)) is not NOT_TRACED:
        return traced
    call = Call(module, tap.plan)
    inside = running()
    inside.append(tap)
    try:
        result = _observed(call, forward, module, args, kwargs)
    except BaseException as error:
        for observer in call.plan.observers:
            if observer.alive:
                observer.on_failure(call, error)
        raise
    finally:
        inside.pop()
    if call.kept:
        watch_kept(call)
    return result


def _observed(call: Call, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    plan = call.plan
    for observer in plan.observers:
        if observer.alive:
            observer.begin(call)
    if plan.pre or plan.post:
        output = _hooked(call, forward, module, args, kwargs)
    else:
        output = _bounded(call, forward, module, args, kwargs)
    for observer in plan.see_output:
        if observer.alive:
            observer.on_output(call, output)
    return output


def _bounded(call: Call, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run ``forward`` between the nodes that the listeners ask for."""
    for observer in call.plan.see_input:
        if observer.alive:
            observer.on_input(call, args, kwargs)
    if not call.bounded:
        return forward(module, *args, **kwargs)
    boundary = open_boundary(call, args, kwargs)
    try:
        output = forward(module, *boundary.args, **boundary.kwargs)
        # Before the caller's lists get their own tensors back, since the module may have returned one of them.
        flat = flatten(output)
    finally:
        boundary.restore()
    return close_boundary(call, boundary, output, flat)


def _hooked(call: Call, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The same with the user's forward hooks before and after."""
    plan = call.plan
    done: list[Entry] = []
    before: _Arguments | None = None
    try:
        for entry in plan.pre:
            if entry.alive:
                args, kwargs = run_pre_hook(entry, module, args, kwargs)
        before = _Arguments(args, kwargs) if plan.post and may_write_inputs(module) else None
        output = _bounded(call, forward, module, args, kwargs)
        if not plan.post:
            return output
        if before is not None:
            args, kwargs = before.as_passed()
        first = histories(output) if call.bounded else None
        for entry in plan.post:
            if entry.alive:
                done.append(entry)
                output = run_post_hook(entry, module, args, kwargs, output)
    except BaseException as error:
        if before is not None:
            args, kwargs = before.as_passed()
        if not is_early_stop(error):
            _run_always_called(call, module, args, kwargs, done, error)
        raise
    return output if first is None or histories(output) == first else close_again(call, output)


def _run_always_called(
    call: Call, module: nn.Module, args: Any, kwargs: Any, done: list[Entry], error: BaseException
) -> None:
    """Run the ``always_call`` hooks that have not run yet, with None as the output; their failures become notes."""
    for entry in call.plan.post:
        if entry.always_call and entry.alive and entry not in done:
            try:
                run_post_hook(entry, module, args, kwargs, None)
            except Exception as second:
                add_note(error, f"The always_call hook {entry.name} raised as well: {type(second).__name__}: {second}")


class _Arguments:
    """The arguments as they were passed, also when the module writes over them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.leaves, self.structure = flatten_call(args, kwargs)
        self.kept = [
            (version(leaf), alike(leaf)) if isinstance(leaf, Tensor) and not leaf.is_inference() else None
            for leaf in self.leaves
        ]

    def as_passed(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The very same objects; a stand-in with the old value for each tensor that was written to since."""
        if not self._written():
            return self.args, self.kwargs
        leaves = [
            leaf if kept is None or version(leaf) == kept[0] else kept[1]
            for leaf, kept in zip(self.leaves, self.kept, strict=True)
        ]
        try:
            return rebuild((self.args, self.kwargs), self.structure, leaves)  # type: ignore[no-any-return]
        except ValueError:  # the module also added to a list or dict that it was given
            return self.args, self.kwargs

    def _written(self) -> bool:
        return any(
            kept is not None and version(leaf) != kept[0] for leaf, kept in zip(self.leaves, self.kept, strict=True)
        )
