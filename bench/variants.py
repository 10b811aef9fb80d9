"""The ways of looking at a model that are compared. Each is installed, runs, tells what it saw, and is removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from networks import leaves
from torch import nn

import hookline

__all__ = [
    "BACKWARD_HOOKS",
    "BARE",
    "RECORD_BOTH",
    "RECORD_OUTPUTS",
    "STOCK_BACKWARD",
    "TWIN_VARIANTS",
    "VARIANTS",
    "Installed",
    "Variant",
]


class Installed(NamedTuple):
    """Something that is on a model now.

    Attributes:
        remove: Takes it off.
        events: How many values or hook calls there were so far.
    """

    remove: Callable[[], None]
    events: Callable[[], int]


class Variant(NamedTuple):
    """One row of the table.

    Attributes:
        name: What the table calls it.
        install: Puts it on all modules without children.
        fresh: Whether it runs on a copy of the model that nothing was ever installed on.
    """

    name: str
    install: Callable[[nn.Module], Installed]
    fresh: bool = False


def _nothing(model: nn.Module) -> Installed:
    return Installed(lambda: None, lambda: 0)


def _on_leaves(register: Callable[[nn.Module, Any], Any], hook: Callable[[list[Any]], Any]) -> Any:
    """Puts the hook on every leaf; ``hook`` makes it, given the list to keep values in."""

    def install(model: nn.Module) -> Installed:
        kept: list[Any] = []
        handles: list[Any] = []

        def remove() -> None:
            for handle in handles:
                handle.remove()

        try:
            for module in leaves(model):
                handles.append(register(module, hook(kept)))
        except BaseException:
            remove()
            raise
        return Installed(remove, lambda: len(kept))

    return install


def _keep_output(kept: list[Any]) -> Any:
    return lambda module, args, output: kept.append(output)


def _clone_output(kept: list[Any]) -> Any:
    return lambda module, args, output: kept.append(output.detach().clone())


def _keep_gradients(kept: list[Any]) -> Any:
    return lambda module, grad_input, grad_output: kept.append((grad_input, grad_output))


def _record(*ports: str) -> Callable[[nn.Module], Installed]:
    def install(model: nn.Module) -> Installed:
        recorder = hookline.record(model, _is_leaf, ports)
        recording = recorder.__enter__()
        return Installed(lambda: recorder.__exit__(None, None, None), lambda: len(recording))

    return install


def _is_leaf(path: str, module: nn.Module) -> bool:
    return not any(module.children())


def _stock_forward(module: nn.Module, hook: Any) -> Any:
    return module.register_forward_hook(hook)


def _stock_backward(module: nn.Module, hook: Any) -> Any:
    return module.register_full_backward_hook(hook)


BARE = Variant("bare model", _nothing, fresh=True)
REMOVED = Variant("after all of these were removed", _nothing)
STOCK_BACKWARD = Variant("PyTorch full backward hooks", _on_leaves(_stock_backward, _keep_gradients))
RECORD_OUTPUTS = Variant("hookline.record, outputs", _record("output"))
RECORD_BOTH = Variant("hookline.record, outputs and grad_output", _record("output", "grad_output"))
BACKWARD_HOOKS = Variant("hookline backward hooks", _on_leaves(hookline.register_backward_hook, _keep_gradients))

VARIANTS = (
    BARE,
    Variant("PyTorch forward hooks, keep the reference", _on_leaves(_stock_forward, _keep_output)),
    Variant("PyTorch forward hooks, clone", _on_leaves(_stock_forward, _clone_output)),
    STOCK_BACKWARD,
    Variant("hookline forward hooks", _on_leaves(hookline.register_forward_hook, _keep_output)),
    BACKWARD_HOOKS,
    RECORD_OUTPUTS,
    RECORD_BOTH,
    REMOVED,
)
"""In the order of the table."""

TWIN_VARIANTS = (BARE, STOCK_BACKWARD, BACKWARD_HOOKS, RECORD_BOTH, REMOVED)
"""Those of interest on the network on which PyTorch's full backward hooks work."""
