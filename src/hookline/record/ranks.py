"""Which of several processes this one is, as torchrun says it in the environment."""

from __future__ import annotations

import os

from hookline.errors import OptionError

__all__ = ["rank", "world_size"]


def rank() -> int:
    """Number of this process, ``RANK``; 0 where there is none.

    Raises:
        OptionError: It is no such number.
    """
    return _number("RANK", 0)


def world_size() -> int:
    """How many processes there are, ``WORLD_SIZE``; 1 where that is not said.

    Raises:
        OptionError: It is no such number.
    """
    return _number("WORLD_SIZE", 1)


def _number(name: str, least: int) -> int:
    text = os.environ.get(name, str(least))
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise OptionError(f"the environment has {name}={text!r}; wanted a whole number from {least} on.")
    return int(text)
