"""Values that the store refuses: they are left out, and the rest goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hookline.errors import ArgumentError

__all__ = ["LeftOut"]


class LeftOut:
    """Takes what the store refuses, and tells the first value of each site.

    Args:
        tell: Gets what is to be told.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._sites: set[tuple[str, str]] = set()
        self._now: list[Any] = []

    def __call__(self, event: Any, error: ArgumentError) -> None:
        """The store refuses an event."""
        self._now.append(event)
        if (event.path, event.port) not in self._sites:
            self._sites.add((event.path, event.port))
            self._tell(f"a value is left out: {error}")

    def without(self, events: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Events that were given to the store: those that it took, and those refused since the last time."""
        refused, self._now = self._now, []
        ids = {id(event) for event in refused}
        return [event for event in events if id(event) not in ids], refused
