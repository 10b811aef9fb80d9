"""Put listeners at modules and take them away again."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from hookline.errors import ArgumentError
from hookline.hooks.handle import Handle
from hookline.hooks.presence import tap_begins, tap_ends
from hookline.hooks.swap import swap, unswap
from hookline.hooks.tap import Entry, Observer, Tap
from hookline.hooks.token import TOKEN, original_class
from hookline.hooks.torch_private import is_scripted

__all__ = ["NEVER_CALLED", "Attached", "attach", "check_module", "unreachable"]

NEVER_CALLED = "holds others and is never called"
"""Why no call of a container can be seen."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

_lock = threading.RLock()


def attach(module: nn.Module, kind: str, listener: Entry | Observer, *, prepend: bool = False) -> Handle:
    """Put a listener at a module.

    Raises:
        ArgumentError: What was given is no module, or one whose calls cannot be seen.
    """
    check_module(module)
    with _lock:
        tap = module.__dict__.get(TOKEN)
        if tap is None or tap.module() is not module:
            tap = Tap(module)
            tap_begins(tap, module)
        swap(module, tap)
        tap.add(kind, listener, prepend)
    return Handle(lambda: _detach(tap, kind, listener))


class Attached:
    """Observers that stand at modules together, and are taken away together."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._handles: list[Handle] = []

    def __bool__(self) -> bool:
        return bool(self._handles)

    def add(self, module: nn.Module, observer: Observer) -> None:
        """Put one more at a module.

        Raises:
            ArgumentError: As for ``attach``.
        """
        self._observers.append(observer)
        self._handles.append(attach(module, "observer", observer))

    def remove(self) -> bool:
        """Take all away, the last one first; says whether there were any."""
        handles, self._handles = self._handles, []
        for handle in reversed(handles):
            handle.remove()
        for observer in self._observers:
            observer.let_go()
        self._observers.clear()
        return bool(handles)


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
    """Refuse what cannot be hooked.

    Raises:
        ArgumentError: It is no module, TorchScript runs it, or it is a container that is never called.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"a hook is put on a torch.nn.Module, got {type(module).__name__}: {module!r:.60}")
    if is_scripted(module):
        raise ArgumentError(
            f"{getattr(module, 'original_name', type(module).__name__)} is a TorchScript module: it runs outside "
            "Python, so no hook can see its calls. Hook the Python model before torch.jit.script or trace, "
            "or the module that calls this one."
        )
    if _only_holds(module):
        raise ArgumentError(
            f"a {type(module).__name__} is never called, so that a hook on it would never run. {_instead_of(module)}"
        )


def _instead_of(container: nn.Module) -> str:
    children = [f"{name} ({type(child).__name__})" for name, child in container.named_children()]
    if children:
        more = f" and {len(children) - 3} more" if len(children) > 3 else ""
        return f"Hook what it holds: {', '.join(children[:3])}{more}, or the module that runs them."
    if container._parameters:
        return "For the gradients of what it holds call register_parameter_hook on the module that uses them."
    return "It holds nothing yet."


def unreachable(module: nn.Module) -> str:
    """Why no call of the module can ever be seen; empty where one can."""
    if is_scripted(module):
        return "TorchScript runs it outside Python"
    if _only_holds(module):
        return f"a {type(module).__name__} {NEVER_CALLED}"
    return ""


def _only_holds(module: nn.Module) -> bool:
    """Whether it is one of torch's containers, without a ``forward`` of its own."""
    if not isinstance(module, _CONTAINERS) or "forward" in module.__dict__:
        return False
    forward: Any = getattr(original_class(module), "forward", None)
    return forward is nn.Module.forward
