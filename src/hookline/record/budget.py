"""A limit in bytes for what is kept."""

from __future__ import annotations

import threading
from collections import Counter

from hookline.errors import BudgetError
from hookline.report.text import size_text
from hookline.sites import Site

__all__ = ["Budget"]


class Budget:
    """Counts the bytes kept at each site, for all threads together.

    Args:
        limit: Most bytes to keep.
        last_only: Whether the next value of a site takes the place of the one before.
    """

    def __init__(self, limit: int, *, last_only: bool) -> None:
        self.limit = limit
        self.last_only = last_only
        self._by_site: Counter[Site] = Counter()
        self._used = 0
        self._lock = threading.Lock()

    def spend(self, site: Site, size: int) -> None:
        """Reserve the bytes of one value.

        Raises:
            BudgetError: It does not fit. Nothing is reserved then.
        """
        with self._lock:
            replaced = self._by_site[site] if self.last_only else 0
            if self._used - replaced + size > self.limit:
                raise BudgetError(self._message(site, size))
            self._add(site, size)

    def give_back(self, site: Site, size: int) -> None:
        """Free the bytes of a value that is not kept after all."""
        with self._lock:
            self._add(site, -size)

    def _add(self, site: Site, size: int) -> None:
        self._used += size
        self._by_site[site] += size

    def _message(self, site: Site, size: int) -> str:
        largest = ", ".join(f"{place} {size_text(count)}" for place, count in self._by_site.most_common(3) if count)
        return (
            f"the budget of {size_text(self.limit)} is full: {size_text(self._used)} are kept, {site} would add "
            f"{size_text(size)}. Largest sites: {largest or 'none yet'}. Record fewer sites, pass reduce=, dtype= or "
            'keep="last", or raise budget=.'
        )
