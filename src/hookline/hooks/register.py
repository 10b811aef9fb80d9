"""The primitives: PyTorch's registration functions, right in every case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hookline.hooks.attach import attach, check_module
from hookline.hooks.handle import Handle
from hookline.hooks.tap import Entry
from hookline.hooks.user_hooks import check_callable

__all__ = [
    "register_backward_hook",
    "register_backward_pre_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
]


def register_forward_pre_hook(
    module: nn.Module, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
) -> Handle:
    """Call ``hook(module, args)`` every time before ``module`` computes.

    Args:
        module: Any module that runs in Python. Both ``module(x)`` and ``module.forward(x)`` are seen.
        hook: Returns None, or new arguments: a tuple, or one value that becomes the only argument.
        prepend: Run before the hooks that are there already.
        with_kwargs: Call ``hook(module, args, kwargs)``, which returns None or the pair ``(args, kwargs)``.

    Returns:
        A handle; ``handle.remove()`` takes the hook away.

    Raises:
        ArgumentError: The module is none or runs outside Python, or the hook cannot be called.
    """
    check_hook(module, hook)
    entry = Entry(hook, site=_site(module, "input"), with_kwargs=with_kwargs)
    return attach(module, "forward_pre", entry, prepend=prepend)


def register_forward_hook(
    module: nn.Module,
    hook: Callable[..., Any],
    *,
    prepend: bool = False,
    with_kwargs: bool = False,
    always_call: bool = False,
) -> Handle:
    """Call ``hook(module, args, output)`` every time after ``module`` has computed an output.

    ``args`` hold the values that the module was called with, also when it has written over them. Changing them has no
    effect on the forward that just ran.

    Args:
        module: Any module that runs in Python. Both ``module(x)`` and ``module.forward(x)`` are seen.
        hook: Returns None, or a value that takes the place of the output.
        prepend: Run before the hooks that are there already.
        with_kwargs: Call ``hook(module, args, kwargs, output)``.
        always_call: Call the hook also when the module raises; ``output`` is None then.

    Returns:
        A handle; ``handle.remove()`` takes the hook away.

    Raises:
        ArgumentError: The module is none or runs outside Python, or the hook cannot be called.
    """
    check_hook(module, hook)
    entry = Entry(hook, site=_site(module, "output"), with_kwargs=with_kwargs, always_call=always_call)
    return attach(module, "forward", entry, prepend=prepend)


def register_backward_pre_hook(module: nn.Module, hook: Callable[..., Any], *, prepend: bool = False) -> Handle:
    """Call ``hook(module, grad_output)`` every time the gradients of the module's outputs are complete.

    Args:
        module: Any module that runs in Python.
        hook: Returns None, or gradients that take the place of ``grad_output``: a tuple of the same length, or one
            tensor where there is one entry. It must not write into its argument.
        prepend: Run before the hooks that are there already.

    Returns:
        A handle; ``handle.remove()`` takes the hook away.

    Raises:
        ArgumentError: The module is none or runs outside Python, or the hook cannot be called.
    """
    check_hook(module, hook)
    return attach(module, "backward_pre", Entry(hook, site=_site(module, "grad_output")), prepend=prepend)


def register_backward_hook(module: nn.Module, hook: Callable[..., Any], *, prepend: bool = False) -> Handle:
    """Call ``hook(module, grad_input, grad_output)`` every time the gradients of the module's inputs are computed.

    Both are tuples with one entry for each leaf of (args, kwargs) and of the output, in order: None where the leaf is
    no tensor or no gradient reaches it. ``.paths`` names the entries. ``grad_output`` is what arrives at the values as
    they leave the call, ``grad_input`` this call's share alone, through all of the operations of the module. When the
    pass does not reach the inputs, as with gradients of parameters only, the hook is called at the end of the pass.

    Args:
        module: Any module that runs in Python.
        hook: Returns None, or gradients that are used in the place of ``grad_input`` from there on: a tuple of the
            same length, or one tensor where there is one entry. It must not write into its arguments.
        prepend: Run before the hooks that are there already.

    Returns:
        A handle; ``handle.remove()`` takes the hook away.

    Raises:
        ArgumentError: The module is none or runs outside Python, or the hook cannot be called.
    """
    check_hook(module, hook)
    return attach(module, "backward", Entry(hook, site=_site(module, "grad_input")), prepend=prepend)


def check_hook(module: Any, hook: Any) -> None:
    """Refuse a module or hook that cannot be used, before anything is installed."""
    check_module(module)
    check_callable(hook)


def _site(module: nn.Module, port: str) -> str:
    return f"{type(module).__name__}:{port}"
