"""The tensors inside args, kwargs and outputs: find them, name them, put others in their place.

A *structure* is the shape of a nested value without its leaves: ``None`` for a leaf, otherwise ``(container, keys,
children, type name)``. It is hashable and holds no tensor, so a call may remember it for as long as its graph lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from hookline.containers import (
    ATOMS,
    CALL,
    Arguments,
    Container,
    Fields,
    Opaque,
    Scaled,
    container_of,
)

__all__ = [
    "Arguments",
    "Fields",
    "Gradients",
    "Opaque",
    "Scaled",
    "flatten",
    "flatten_call",
    "keep",
    "paths_of",
    "rebuild",
    "swap_in",
    "walk",
]

Structure = Any
"""``None`` for a leaf, else ``(Container, keys, child structures, type name)``."""

_DEEPEST = 100
"""Levels of nesting that are searched; what lies deeper counts as one leaf."""


# ---------------------------------------------------------------- gradients


class Gradients(tuple["Tensor | None", ...]):
    """Gradients of the leaves of a value, in order; None where the leaf is no tensor or no gradient reached it."""

    structure: Structure
    root: str

    @property
    def paths(self) -> tuple[str, ...]:
        """Value path of each entry, such as ``args[0]``, ``kwargs['mask']`` or ``output[1][0]``."""
        return paths_of(self.structure, self.root)


def gradients(values: Iterable[Tensor | None], structure: Structure, root: str) -> Gradients:
    """Make a named gradient tuple; ``root`` is ``args`` for inputs and ``output`` for outputs."""
    made = Gradients(values)
    made.structure = structure
    made.root = root
    return made


# ---------------------------------------------------------------- flatten and rebuild


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Leaves of a nested value, in order, and its structure."""
    if type(value) in ATOMS:
        return [value], None
    leaves: list[Any] = []
    return leaves, _flatten_into(value, leaves, [])


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Structure]:
    """Leaves and structure of a module's arguments."""
    leaves: list[Any] = []
    if not kwargs and len(args) == 1 and type(args[0]) in ATOMS:
        return [args[0]], _ONE_ARGUMENT
    children = tuple(_flatten_into(value, leaves, []) for value in args)
    if kwargs:
        children += tuple(_flatten_into(value, leaves, []) for value in kwargs.values())
    return leaves, (CALL, (*range(len(args)), *kwargs), children, "call")


_ONE_ARGUMENT: Structure = (CALL, (0,), (None,), "call")


def _flatten_into(value: Any, leaves: list[Any], above: list[int]) -> Structure:
    # A container inside itself is a leaf: a tree whose nodes know their parents has no end otherwise.
    container = None if type(value) in ATOMS else container_of(value)
    if container is None or id(value) in above or len(above) > _DEEPEST:
        leaves.append(value)
        return None
    above.append(id(value))
    children = tuple(_flatten_into(child, leaves, above) for child in container.children(value))
    above.pop()
    return container, container.keys(value), children, type(value).__name__


def rebuild(value: Any, structure: Structure, leaves: Iterable[Any]) -> Any:
    """The value with other leaves; containers in which nothing changed stay the very same object."""
    return _rebuild(value, structure, iter(leaves))


def _rebuild(value: Any, structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return next(leaves)
    container, _, children, _ = structure
    old = container.children(value)
    new = [_rebuild(child, below, leaves) for child, below in zip(old, children, strict=True)]
    if all(a is b for a, b in zip(old, new, strict=True)):
        return value
    return container.rebuild(value, new)


Undo = Callable[[], None]


def swap_in(value: Any, structure: Structure, leaves: Iterable[Any], undo: list[Undo]) -> Any:
    """Like ``rebuild``, but lists, dicts and dataclasses stay the same object and get the new leaves inside.

    A module may write into a list or dict that it was given, and its caller sees that, so a copy will not do.

    Args:
        value: What to change.
        structure: Its structure.
        leaves: The new leaves.
        undo: Gets one function for each exchanged entry, which puts the old leaf back unless the entry was written to.
    """
    return _swap_in(value, structure, iter(leaves), undo)


def _swap_in(value: Any, structure: Structure, leaves: Iterator[Any], undo: list[Undo]) -> Any:
    if structure is None:
        return next(leaves)
    container, keys, children, _ = structure
    old = container.children(value)
    new = [_swap_in(child, below, leaves, undo) for child, below in zip(old, children, strict=True)]
    if container.as_it_is or all(a is b for a, b in zip(old, new, strict=True)):
        return value
    if not container.in_place:
        return container.rebuild(value, new)
    for key, before, after in zip(keys, old, new, strict=True):
        if before is not after:
            container.put(value, key, after)
            undo.append(_putting_back(container, value, key, before, after))
    return value


def _putting_back(container: Container, value: Any, key: Any, before: Any, after: Any) -> Undo:
    def put_back() -> None:
        try:
            if container.get(value, key) is after:
                container.put(value, key, before)
        except (LookupError, AttributeError):
            pass  # the module took the entry out

    return put_back


def paths_of(structure: Structure, root: str = "output") -> tuple[str, ...]:
    """Value paths of the leaves of a structure; ``root`` does not appear in the paths of a call's arguments."""
    if structure is None:
        return (root,)
    container, keys, children, _ = structure
    start = "" if container.is_call else root
    found: list[str] = []
    for key, child in zip(keys, children, strict=True):
        found += paths_of(child, start + container.suffix(key))
    return tuple(found)


# ---------------------------------------------------------------- keeping


def keep(structure: Structure, leaves: Iterable[Any]) -> Any:
    """A value as a recording keeps it: plain containers, the given leaves, ``Opaque`` for other objects."""
    return kept_leaf(next(iter(leaves))) if structure is None else _keep(structure, iter(leaves))


def _keep(structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return kept_leaf(next(leaves))
    container, keys, children, type_name = structure
    return container.kept(type_name, keys, [_keep(child, leaves) for child in children])


def kept_leaf(leaf: Any) -> Any:
    """A leaf as it is kept: tensors and plain scalars as they are, `Scaled` as fields, ``Opaque`` for the rest."""
    if leaf is None or isinstance(leaf, Tensor) or type(leaf) in (int, float, bool, str):
        return leaf
    if type(leaf) is Scaled:
        return Fields("fp8", leaf._asdict())
    for plain in (bool, int, float, str):
        if isinstance(leaf, plain):
            return plain(leaf)
    return Opaque(type(leaf).__name__)


def walk(value: Any, root: str = "output") -> Iterator[tuple[str, Any]]:
    """Value path and leaf of everything in a kept value, in order.

    Args:
        value: A kept value.
        root: Name of the value itself; not used for ``Arguments``, whose paths begin with ``args`` and ``kwargs``.
    """
    leaves, structure = flatten_call(*value) if isinstance(value, Arguments) else flatten(value)
    return zip(paths_of(structure, root), leaves, strict=True)
