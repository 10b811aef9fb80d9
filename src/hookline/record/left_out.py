"""Values that the store refuses: they are left out, and the rest goes on."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

from hookline.errors import ArgumentError

__all__ = ["LeftOut"]


class LeftOut:
    """Takes what the store refuses, and tells the first value of each site.

    Args:
        tell: Gets what is to be told; ``warn`` tells it by default.
    """

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self._untold = deque[str]()
        self._tell = self._untold.append if tell is None else tell
        self._sites: set[tuple[str, str]] = set()
        self._now: list[Any] = []

    def __call__(self, event: Any, error: ArgumentError) -> None:
        """The store refuses an event."""
        self._now.append(event)
        if (event.path, event.port) not in self._sites:
            self._sites.add((event.path, event.port))
            self._tell(f"a value is left out: {error}")

    def warn(self) -> None:
        """Tell what was left out meanwhile, on the thread that calls: a filter may make errors of warnings."""
        while self._untold:
            with contextlib.suppress(IndexError):  # another thread tells it
                warnings.warn(self._untold.popleft(), RuntimeWarning, stacklevel=3)

    def forget(self) -> dict[int, Any]:
        """The events that were refused since the last time, by their id."""
        refused, self._now = self._now, []
        return {id(event): event for event in refused}
