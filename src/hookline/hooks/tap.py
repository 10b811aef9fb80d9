"""What listens at one module: user hooks in their order, and observers behind them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from hookline.hooks.call import Call

__all__ = ["KINDS", "Entry", "Observer", "Plan", "Tap"]

KINDS = ("forward_pre", "forward", "backward_pre", "backward", "observer")


class Entry:
    """A user's hook as it stands at a module; ``name`` is how messages call it."""

    __slots__ = ("alive", "always_call", "hook", "name", "site", "with_kwargs")

    def __init__(
        self, hook: Callable[..., Any], *, site: str, with_kwargs: bool = False, always_call: bool = False
    ) -> None:
        self.hook = hook
        self.site = site
        self.with_kwargs = with_kwargs
        self.always_call = always_call
        self.alive = True
        self.name = str(getattr(hook, "__qualname__", None) or f"{hook!r:.80}")


class Observer:
    """Looks on at one module and changes nothing; it sees what the hooks have left, in both directions.

    The class attributes say what is looked at: an output alone installs no autograd node, ``grad_output`` installs one
    after the call, ``grad_input`` one before and one after.
    """

    sees_input = False
    sees_output = False
    sees_grad_output = False
    sees_grad_input = False
    alive = True

    def let_go(self) -> None:
        """It was taken away: forget whom it tells, since a graph remembers its observers."""

    def begin(self, call: Call) -> None:
        """A call begins."""

    def on_input(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The arguments as ``forward`` gets them."""

    def on_output(self, call: Call, output: Any) -> None:
        """The output as the caller gets it."""

    def on_failure(self, call: Call, error: BaseException) -> None:
        """``forward`` or a hook raised."""

    def on_parameter(self, name: str, value: Any) -> None:
        """The module has got another parameter under this name."""

    def passed_by(self, function: str, user: nn.Module | None) -> None:
        """A function used a parameter of the module without calling it, inside ``user`` if that one is observed."""

    def plain_path(self, fused: str) -> None:
        """A module above runs its plain path, since this one is observed; ``fused`` names what it would have run."""

    def untraced(self, tracer: str) -> None:
        """A call went by without being looked at, because of a tracer or compiler."""

    def on_grad_output(self, call: Call, grads: tuple[Any, ...]) -> None:
        """Gradients of the leaves of the output."""

    def on_grad_input(self, call: Call, grads: tuple[Any, ...]) -> None:
        """Gradients of the leaves of the arguments, this call's share."""


class Plan(NamedTuple):
    """Everything a call needs to know about its listeners, as they were when it began."""

    pre: tuple[Entry, ...]
    post: tuple[Entry, ...]
    back_pre: tuple[Entry, ...]
    back: tuple[Entry, ...]
    observers: tuple[Observer, ...]
    see_input: tuple[Observer, ...]
    see_output: tuple[Observer, ...]
    see_grad_output: tuple[Observer, ...]
    see_grad_input: tuple[Observer, ...]
    input_node: bool
    output_node: bool


class Tap:
    """The listeners of one module; lies in the module's ``__dict__`` while there are any."""

    __slots__ = ("__weakref__", "listeners", "module", "plan")

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.listeners: dict[str, tuple[Any, ...]] = dict.fromkeys(KINDS, ())
        self.plan = _plan(self.listeners)

    def add(self, kind: str, listener: Entry | Observer, prepend: bool) -> None:
        """Add a listener behind, or before, those of its kind."""
        old = self.listeners[kind]
        self.listeners[kind] = (listener, *old) if prepend else (*old, listener)
        self.plan = _plan(self.listeners)

    def discard(self, kind: str, listener: Entry | Observer) -> None:
        """Take a listener away."""
        self.listeners[kind] = tuple(other for other in self.listeners[kind] if other is not listener)
        self.plan = _plan(self.listeners)

    @property
    def observers(self) -> list[Observer]:
        """Those that look on now; one that was removed may still stand in the plan of a running call."""
        return [observer for observer in self.plan.observers if observer.alive]

    @property
    def idle(self) -> bool:
        """Whether nothing listens any more."""
        return not any(self.listeners.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _plan(listeners: dict[str, tuple[Any, ...]]) -> Plan:
    pre, post, back_pre, back, observers = (listeners[kind] for kind in KINDS)
    see_input, see_output, see_grad_output, see_grad_input = (
        tuple(o for o in observers if getattr(o, flag))
        for flag in ("sees_input", "sees_output", "sees_grad_output", "sees_grad_input")
    )
    input_node = bool(back or see_grad_input)
    return Plan(
        pre,
        post,
        back_pre,
        back,
        observers,
        see_input,
        see_output,
        see_grad_output,
        see_grad_input,
        input_node,
        bool(input_node or back_pre or see_grad_output),
    )
