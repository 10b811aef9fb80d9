"""Change values on the way, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline.errors import ArgumentError, HookError, OptionError
from hookline.hooks import Entry, Handle, attach, unreachable
from hookline.record.places import modules_at, sites_of
from hookline.sites import Pattern, Site
from hookline.values import Arguments, Gradients

__all__ = ["Edits", "edit"]

Change = Callable[[Any], Any]
_KINDS = {"input": "forward_pre", "output": "forward", "grad_input": "backward", "grad_output": "backward_pre"}


def edit(model: nn.Module, changes: Mapping[Any, Change]) -> Edits:
    """Change values at places of a model while a with-block runs.

    Args:
        model: The module whose sub-modules are edited.
        changes: From a site or pattern, as in ``hookline.record``, to a function of the value. A text may name its
            port, as in ``"encoder.layer.5:grad_output"``; without one it is the output. The function gets what
            ``CallRecord`` gives for that port: the output as the module returned it; the only argument, the tuple
            of positional ones, or ``(args, kwargs)``; the gradient, or a tuple of gradients where there are
            several leaves. It returns the value to go on with, or None to leave it. Changes at one site run in the
            order of the dict.

    Returns:
        The edits; ``with edit(...) as edits`` installs them, ``edits.counts`` says how often each site was changed.

    Raises:
        SiteError: A pattern names nothing in the model.
        ArgumentError, OptionError: An argument cannot be used.
    """
    if not isinstance(changes, Mapping):
        raise ArgumentError(f"changes is a dict from site to function, got {type(changes).__name__}.")
    if not changes:
        raise OptionError('there is nothing to change: pass {"site": function}.')
    planned: list[tuple[Site, Change]] = []
    for pattern, change in changes.items():
        if not callable(change):
            raise ArgumentError(
                f"the change at {pattern!r} is a function of the value, got {type(change).__name__}; "
                "for a constant pass `lambda value: constant`."
            )
        found = sites_of(model, _as_pattern(pattern), ("output",))
        modules = modules_at(model, found)
        planned += [(site, change) for site in found if not unreachable(modules[site.path])]
    return Edits(model, planned)


def _as_pattern(pattern: Any) -> Pattern:
    return str(pattern) if isinstance(pattern, Site) else list(pattern) if isinstance(pattern, tuple) else pattern


class Edits:
    """Installs at ``__enter__``, removes at ``__exit__``; see ``edit``.

    Attributes:
        counts: For each site how often a change has replaced its value.
    """

    def __init__(self, model: nn.Module, planned: list[tuple[Site, Change]]) -> None:
        self._model: nn.Module | None = model
        self._planned = planned
        self._handles: list[Handle] = []
        self.counts: dict[str, int] = {str(site): 0 for site, _ in planned}

    def __enter__(self) -> Edits:
        if self._model is None or self._handles:
            raise OptionError("edits are used once; call hookline.edit(...) again.")
        modules = modules_at(self._model, [site for site, _ in self._planned])
        try:
            for site, change in self._planned:
                self._handles.append(self._attach(modules[site.path], site, change))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything from the model; harmless a second time."""
        handles, self._handles = self._handles, []
        for handle in reversed(handles):
            handle.remove()
        self._model = None

    def _attach(self, module: nn.Module, site: Site, change: Change) -> Handle:
        hook = _HOOKS[site.port](site, self._counting(site, change))
        hook.__qualname__ = getattr(change, "__qualname__", repr(change))
        with_kwargs = site.port in ("input", "output")
        return attach(module, _KINDS[site.port], Entry(hook, site=str(site), with_kwargs=with_kwargs))

    def _counting(self, site: Site, change: Change) -> Change:
        def changed(value: Any) -> Any:
            new = change(value)
            if new is not None and not torch.compiler.is_compiling():
                self.counts[str(site)] += 1
            return new

        return changed


# ---------------------------------------------------------------- hooks that show a change what CallRecord would


def _at_input(site: Site, change: Change) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs:
            new = change(Arguments(args, kwargs))
            return None if new is None else _checked_call(site, new)
        if len(args) == 1:
            new = change(args[0])
            return None if new is None else ((new,), kwargs)
        new = change(args)
        return None if new is None else (_checked_args(site, new), kwargs)

    return hook


def _checked_call(site: Site, new: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(new, tuple) and len(new) == 2 and isinstance(new[0], (tuple, list)) and isinstance(new[1], dict):
        return tuple(new[0]), new[1]
    raise HookError(
        f"the change at {site} returned {type(new).__name__}; the call has keyword arguments, so it must return None "
        "or the pair (args: tuple, kwargs: dict), like the value it was given."
    )


def _checked_args(site: Site, new: Any) -> tuple[Any, ...]:
    if isinstance(new, (tuple, list)):
        return tuple(new)
    raise HookError(
        f"the change at {site} returned {type(new).__name__}; the call has several arguments, so it must return None "
        "or a tuple of all of them, like the value it was given."
    )


def _at_output(site: Site, change: Change) -> Callable[..., Any]:
    return lambda module, args, kwargs, output: change(output)


def _at_grad_output(site: Site, change: Change) -> Callable[..., Any]:
    return lambda module, grad_output: _changed_gradients(change, grad_output)


def _at_grad_input(site: Site, change: Change) -> Callable[..., Any]:
    return lambda module, grad_input, grad_output: _changed_gradients(change, grad_input)


def _changed_gradients(change: Change, grads: Gradients) -> Any:
    if all(grad is None for grad in grads):
        return None
    new = change(grads[0] if len(grads) == 1 else grads)
    return (new,) if isinstance(new, Tensor) and len(grads) == 1 else new


_HOOKS: dict[str, Callable[[Site, Change], Callable[..., Any]]] = {
    "input": _at_input,
    "output": _at_output,
    "grad_input": _at_grad_input,
    "grad_output": _at_grad_output,
}
