"""What the store needs of an event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from hookline.stats.summary import Summary


class EventLike(Protocol):
    """What the store needs of an event; live events and those read back both have it."""

    @property
    def order(self) -> int:
        """Number of the event in its recording, from 0."""
        ...

    @property
    def step(self) -> int:
        """Step, from 0."""
        ...

    @property
    def path(self) -> str:
        """Path of the module; ``""`` is the root."""
        ...

    @property
    def port(self) -> str:
        """``input``, ``output``, ``grad_input`` or ``grad_output``."""
        ...

    @property
    def call(self) -> int:
        """Number of the call of that module in that step."""
        ...

    @property
    def backward(self) -> int:
        """Number of the backward pass through that call."""
        ...

    @property
    def batch(self) -> EventLike | None:
        """What its rows are: an event of the port ``batch`` and an order of its own; None where that is not known."""
        ...

    @property
    def writer(self) -> int:
        """Number of the process, such as its rank; 0 in memory."""
        ...

    @property
    def value(self) -> Any:
        """The kept value."""
        ...

    def leaves(self) -> Sequence[tuple[str, Tensor]]:
        """Value path and tensor of each tensor of the value, in order."""
        ...

    def known_summaries(self) -> Mapping[str, Summary] | None:
        """Statistics by value path, if they are known; None where the store is to compute them, many at once."""
        ...

    def rows(self) -> Mapping[str, str]:
        """By value path, which rows of the batch a tensor has: ``samples`` or ``tokens``; the others are left out."""
        ...
