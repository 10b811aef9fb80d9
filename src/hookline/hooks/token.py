"""What marks an observed module and its class."""

from __future__ import annotations

from torch import nn

__all__ = ["ORIGINAL", "TOKEN", "original", "original_class"]

TOKEN = "_hookline_tap"
"""Key in the module's ``__dict__`` under which its tap lies."""

ORIGINAL = "__hookline_original__"
"""Attribute of a tapped class that holds the module's own class."""


def original_class(module: nn.Module) -> type:
    """The class that the module has without Hookline."""
    return original(type(module))


def original(cls: type) -> type:
    """The class for which a tapped class stands; any other class itself."""
    found: type = cls.__dict__.get(ORIGINAL, cls)
    return found
