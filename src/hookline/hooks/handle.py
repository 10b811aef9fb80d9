"""What a registration returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

__all__ = ["Handle"]

_ids = itertools.count()


class Handle:
    """Removes what was registered; removing twice is harmless. Also a context manager that removes at its end.

    A hook that was removed is not called any more, also in a call or backward that is running already. A copy or a
    pickle of a handle removes nothing, since a copy of a hooked module has no hooks.

    Attributes:
        id: A number that no other handle of this process has.
    """

    def __init__(self, undo: Callable[[], None] | None) -> None:
        self._undo = undo
        self.id = next(_ids)

    def remove(self) -> None:
        """Remove the hook."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle, (None,)
