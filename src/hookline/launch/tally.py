"""What stands in the place of the sink when a run is only planned: it counts and keeps nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hookline.launch.messages import Messages
from hookline.record.segment import Mark
from hookline.sites import Site
from hookline.store import ModuleInfo

__all__ = ["Tally"]


class Tally:
    """Counts bytes by site.

    Attributes:
        nbytes: Bytes of the values, by site.
        exists: Whether there is something to tell.
    """

    is_open = True

    def __init__(self, messages: Messages) -> None:
        self.nbytes: Counter[str] = Counter()
        self.exists = False
        self._messages = messages

    def describe(self, info: Mapping[str, Any], modules: Mapping[str, ModuleInfo]) -> None:
        """A root has turned up."""
        self.exists = True

    def has_room(self, site: Site, size: int) -> bool:
        """Count the bytes."""
        self.nbytes[str(site)] += size
        return True

    def put(self, site: Site, mark: Mark, backward: int, value: Any) -> None:
        """Drop the value."""

    def flush(self) -> None:
        """There is nothing to write."""

    def stop(self, why: str) -> None:
        """Say what went wrong."""
        self._messages.warn(why)

    def close(self) -> None:
        """There is nothing to close."""
