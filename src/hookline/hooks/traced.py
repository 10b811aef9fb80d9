"""Calls inside a compiler or tracer, where hooks cannot run as they do in eager mode.

Observers are passed by: they must not stand in the way of ``torch.jit.trace``, ``torch.fx`` or ``torch.export``. A hook
of the user may change values, so that a trace without it would compute something else: it is taken into the exported
program where that is possible, and refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from hookline.errors import HookError
from hookline.hooks.tap import Tap
from hookline.hooks.torch_private import is_tracing
from hookline.hooks.user_hooks import run_post_hook, run_pre_hook
from hookline.values import flatten_call

__all__ = ["NOT_TRACED", "refuse_tracing", "run_traced"]

NOT_TRACED: Any = object()
"""What ``run_traced`` returns where the call runs as any other."""


def run_traced(tap: Tap, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run a call that a tracer looks at.

    Raises:
        HookError: A hook of the user cannot be taken along.
    """
    if torch.compiler.is_compiling():
        if not torch.compiler.is_exporting():
            return forward(module, *args, **kwargs)
        return _exported(tap, forward, module, args, kwargs)
    if is_tracing():
        return _untouched("torch.jit.trace", tap, forward, module, args, kwargs)
    if any(isinstance(leaf, fx.Proxy) for leaf in flatten_call(args, kwargs)[0]):
        return _untouched("torch.fx", tap, forward, module, args, kwargs)
    return NOT_TRACED  # make_fx traces real values


def _untouched(tracer: str, tap: Tap, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    refuse_tracing(tap, module, tracer)
    for observer in tap.observers:
        observer.untraced(tracer)
    return forward(module, *args, **kwargs)


def _exported(tap: Tap, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Take forward hooks into the exported program, as torch.export does with PyTorch's own."""
    plan = tap.plan
    if not torch.compiler.is_dynamo_compiling():
        for observer in tap.observers:
            observer.untraced("torch.export")
    if plan.back or plan.back_pre:
        refuse_tracing(tap, module, "torch.export")
    for entry in plan.pre:
        if entry.alive:
            args, kwargs = run_pre_hook(entry, module, args, kwargs)
    output = forward(module, *args, **kwargs)
    for entry in plan.post:
        if entry.alive:
            output = run_post_hook(entry, module, args, kwargs, output)
    return output


def refuse_tracing(tap: Tap, module: nn.Module, tracer: str) -> None:
    """Refuse a module with hooks of the user.

    Raises:
        HookError: It has some.
    """
    plan = tap.plan
    entries = [entry for entry in (*plan.pre, *plan.post, *plan.back_pre, *plan.back) if entry.alive]
    if entries:
        names = ", ".join(f"{entry.name} at {entry.site}" for entry in entries[:3])
        more = f" and {len(entries) - 3} more" if len(entries) > 3 else ""
        raise HookError(
            f"{tracer} cannot take the hooks of {type(module).__name__} along: {names}{more}. What it makes would run "
            "without them. Remove them first, or hook the module that calls what comes out."
        )
