"""Put listeners at modules and take them away again."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from hookline.errors import ArgumentError
from hookline.hooks.fused import tap_begins, tap_ends
from hookline.hooks.handle import Handle
from hookline.hooks.swap import swap, unswap
from hookline.hooks.tap import Entry, Observer, Tap
from hookline.hooks.token import TOKEN
from hookline.hooks.torch_private import is_scripted

__all__ = ["attach", "check_module"]

_lock = threading.RLock()


def attach(module: nn.Module, kind: str, listener: Entry | Observer, *, prepend: bool = False) -> Handle:
    """Put a listener at a module.

    Raises:
        ArgumentError: What was given is no module, or one that runs outside Python.
    """
    check_module(module)
    with _lock:
        tap = module.__dict__.get(TOKEN)
        if tap is None or tap.module() is not module:
            tap = Tap(module)
            tap_begins(tap)
        swap(module, tap)
        tap.add(kind, listener, prepend)
    return Handle(lambda: _detach(tap, kind, listener))


def _detach(tap: Tap, kind: str, listener: Entry | Observer) -> None:
    listener.alive = False
    if isinstance(listener, Entry):
        listener.hook = _removed  # a graph that is still alive must not keep the user's function
    with _lock:
        tap.discard(kind, listener)
        module = tap.module()
        if module is not None and tap.idle and module.__dict__.get(TOKEN) is tap:
            unswap(module)
        if tap.idle:
            tap_ends(tap)


def _removed(*args: Any) -> None:
    """Stands where a hook was."""


def check_module(module: Any) -> None:
    """Refuse what cannot be hooked."""
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"a hook is put on a torch.nn.Module, got {type(module).__name__}: {module!r:.60}")
    if is_scripted(module):
        raise ArgumentError(
            f"{getattr(module, 'original_name', type(module).__name__)} is a TorchScript module: it runs outside "
            "Python, so no hook can see its calls. Hook the Python model before torch.jit.script or trace, "
            "or the module that calls this one."
        )
