"""What a watch remembers of a call while it runs and until its gradients have come."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import Tensor, nn

from hookline.hooks.torch_private import version
from hookline.values import flatten_call, rebuild
from hookline.watch.surroundings import Autocast, autocast_state

__all__ = ["Running", "Stack"]


class Running:
    """One call of a watched module.

    Attributes:
        path: The module's path.
        number: Of the call in its step.
        module: A weak reference to it.
        parent: The watched call around it.
        args, kwargs: What it was called with, until it has returned.
        held: Aliases of the tensors among them and the versions that these had, until its gradients are known to be
            finite; None before and after.
        grads: Gradients that have arrived at its output, by the number of the leaf.
        arrived: Whether one has, and whether all that came were finite.
        autocast: What autocast did when it began.
        rng: State of the CPU's random numbers when it began, where it may use them.
    """

    __slots__ = (
        "__weakref__", "args", "arrived", "autocast", "finite_grads", "grads", "held", "kwargs", "module",
        "number", "parent", "path", "rng", "step", "type_name", "versions",
    )  # fmt: skip

    def __init__(self, path: str, number: int, step: int, module: nn.Module, parent: Running | None) -> None:
        self.path, self.number, self.step = path, number, step
        self.module = weakref.ref(module)
        self.type_name = ""
        self.parent = parent
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.versions: list[int | None] = []
        self.held: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.grads: dict[int, Tensor] = {}
        self.arrived = False
        self.finite_grads = True
        self.rng: Tensor | None = None
        self.autocast: tuple[Autocast, ...] | None = None

    def called_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Remember the arguments; returns their leaves."""
        self.args, self.kwargs = args, kwargs
        self.autocast = autocast_state()
        leaves, _ = flatten_call(args, kwargs)
        self.versions = [version(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        return leaves

    def overwritten(self) -> bool:
        """Whether an argument has been written to since the call began."""
        leaves, _ = flatten_call(*(self.held or (self.args, self.kwargs)))
        return any(
            isinstance(leaf, Tensor) and version(leaf) != before
            for leaf, before in zip(leaves, self.versions, strict=True)
        )

    def hold(self) -> None:
        """The call is over and may get gradients: keep aliases of the arguments, outside of any graph."""
        leaves, structure = flatten_call(self.args, self.kwargs)
        aliases = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        self.held = rebuild((self.args, self.kwargs), structure, aliases)

    def let_go(self) -> None:
        """Forget every tensor."""
        self.args, self.kwargs = (), {}
        self.held = None
        self.grads = {}
        self.rng = None


class Stack(threading.local):
    """The watched calls that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[Running] = []
