"""Which observed modules a thread is in."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookline.hooks.tap import Tap

__all__ = ["running"]


class _Own(threading.local):
    def __init__(self) -> None:
        self.taps: list[Tap] = []


_own = _Own()


def running() -> list[Tap]:
    """The taps whose calls this thread is in, the innermost last; ``run`` adds and removes."""
    return _own.taps
