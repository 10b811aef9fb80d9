"""Call a user's hook: say whose it was when it raises, check what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hookline.errors import ArgumentError, HookError, MutationError
from hookline.hooks.snapshot import alike
from hookline.hooks.tap import Entry
from hookline.hooks.torch_private import version
from hookline.values import Gradients, Structure, gradients

__all__ = [
    "ShownGradients",
    "add_note",
    "call_hook",
    "check_callable",
    "replaced_gradients",
    "run_post_hook",
    "run_pre_hook",
]


def check_callable(hook: Any) -> None:
    """Refuse a hook that is no function.

    Raises:
        ArgumentError: It cannot be called.
    """
    if not callable(hook):
        raise ArgumentError(f"a hook is a function, got {type(hook).__name__}: {hook!r:.60}")


def call_hook(entry: Entry, role: str, *args: Any) -> Any:
    """Call the hook; an exception of its own passes on, with a note that names hook and site."""
    try:
        return entry.hook(*args)
    except Exception as error:
        add_note(error, f"Raised by the {role} {entry.name} at {entry.site}.")
        raise


def add_note(error: BaseException, note: str) -> None:
    """``BaseException.add_note``, which Python 3.10 has not: there the note lies in ``__notes__`` alone."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]


def run_pre_hook(
    entry: Entry, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments after a forward pre-hook."""
    shown = (args, kwargs) if entry.with_kwargs else (args,)
    result = call_hook(entry, "forward pre-hook", module, *shown)
    if result is None:
        return args, kwargs
    if not entry.with_kwargs:
        return (result if isinstance(result, tuple) else (result,)), kwargs
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], tuple) and isinstance(result[1], dict):
        return result
    raise HookError(
        f"the forward pre-hook {entry.name} at {entry.site} was registered with with_kwargs=True and returned "
        f"{brief(result)}; it must return None or the pair (args: tuple, kwargs: dict)."
    )


def run_post_hook(entry: Entry, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """The output after a forward hook."""
    shown = (args, kwargs, output) if entry.with_kwargs else (args, output)
    result = call_hook(entry, "forward hook", module, *shown)
    return output if result is None else result


class ShownGradients:
    """Gradients as a hook is shown them: it may keep them, a write into them is caught and reaches nobody else."""

    def __init__(self, grads: Sequence[Tensor | None], structure: Structure, root: str) -> None:
        self.grads = grads
        self.shown: Gradients = gradients([None if g is None else alike(g) for g in grads], structure, root)
        self.versions = [None if g is None else version(g) for g in self.shown]

    def check(self, entry: Entry, role: str, port: str) -> None:
        """Raise where the hook has written into what it was shown."""
        for index, (shown, before) in enumerate(zip(self.shown, self.versions, strict=True)):
            if shown is not None and version(shown) != before:
                raise MutationError(
                    f"the {role} {entry.name} at {entry.site} wrote into {port}[{index}] in place. Gradients are "
                    "shared with other branches of the graph, so a hook must not modify them: return a new gradient "
                    f"instead, for example `return tuple(g * 2 for g in {port})`."
                )


def replaced_gradients(
    entry: Entry, role: str, port: str, result: Any, shown: ShownGradients
) -> Sequence[Tensor | None]:
    """The gradients after a hook has returned ``result`` in the place of those it was shown."""
    where = f"the {role} {entry.name} at {entry.site}"
    old = shown.grads
    new = _as_sequence(result, old, shown.shown.structure, where, port)
    made: list[Tensor | None] = []
    for index, (before, after) in enumerate(zip(old, new, strict=True)):
        made.append(before if after is shown.shown[index] else _checked(before, after, where, f"{port}[{index}]"))
    return made


def _as_sequence(result: Any, old: Sequence[Any], structure: Structure, where: str, port: str) -> Sequence[Any]:
    if isinstance(result, Tensor):
        if len(old) == 1:
            return [result]
        raise HookError(
            f"{where} returned one tensor for {port}, which has {len(old)} entries; return a tuple of {len(old)}, "
            "None where there is no gradient."
        )
    if isinstance(result, dict) and structure is not None:
        return _in_key_order(result, structure, old, where)
    if not isinstance(result, (tuple, list)):
        raise HookError(f"{where} returned {brief(result)}; it must return None or a tuple in the place of {port}.")
    if len(result) != len(old):
        raise HookError(
            f"{where} returned {len(result)} gradients for {port}, which has {len(old)} entries; return one for each, "
            "None where there is no gradient."
        )
    return result


def _in_key_order(result: dict[Any, Any], structure: Structure, old: Sequence[Any], where: str) -> Sequence[Any]:
    """Gradients given by name, for a dict output: ``{'logits': g}``."""
    _, keys, children, _ = structure
    unknown = [key for key in result if key not in keys]
    if unknown or any(child is not None for child in children):
        raise HookError(f"{where} returned a dict with the keys {list(result)}; wanted keys are {list(keys)}.")
    return [result.get(key, grad) for key, grad in zip(keys, old, strict=True)]


def _checked(before: Tensor | None, after: Any, where: str, name: str) -> Tensor | None:
    if after is None or after is before:
        return after
    if not isinstance(after, Tensor):
        raise HookError(f"{where} returned {brief(after)} for {name}; wanted a tensor or None.")
    if before is None:
        raise HookError(f"{where} returned a gradient for {name}, where no gradient flows; wanted None.")
    if after.shape != before.shape or after.dtype != before.dtype or after.device != before.device:
        raise HookError(
            f"{where} returned {_kind(after)} for {name}; wanted {_kind(before)}, like the gradient that it replaces."
        )
    return after


def _kind(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"


def brief(value: Any) -> str:
    """A value in a few characters, for a message."""
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 60 else text[:57] + "..."
