"""What marks an observed module and its class."""

from __future__ import annotations

from torch import nn

__all__ = ["ORIGINAL", "TOKEN", "original_class"]

TOKEN = "_hookline_tap"
"""Key in the module's ``__dict__`` under which its tap lies."""

ORIGINAL = "__hookline_original__"
"""Attribute of a tapped class that holds the module's own class."""


def original_class(module: nn.Module) -> type:
    """The class that the module has without Hookline."""
    found: type = type(module).__dict__.get(ORIGINAL, type(module))
    return found
