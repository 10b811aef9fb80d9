"""One value at one site in one call of one step."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from hookline.stats.compute import summarize
from hookline.stats.summary import Summary
from hookline.values import walk

__all__ = ["Event"]


@dataclasses.dataclass(slots=True)
class Event:
    """One value at one site in one call of one step.

    Attributes:
        order: Place in the whole recording, from 0.
        step: Number of the root's forward, from 0.
        path: The module; ``""`` is the root.
        port: ``input``, ``output``, ``grad_input`` or ``grad_output``.
        call: How often the module had run before in this step.
        backward: For gradients, how many backward passes had come through this call before.
        value: Tensors in plain containers.
        batch: What its rows are, where ``rec.batch`` said so.
        kinds: For each tensor of the value which rows of the batch it has: ``samples``, ``tokens`` or None.
        writer: Number of the process, 0 in memory.
    """

    order: int
    step: int
    path: str
    port: str
    call: int
    backward: int
    value: Any
    _summaries: dict[str, Summary] | None = dataclasses.field(default=None, repr=False, compare=False)
    batch: Any = None
    kinds: tuple[str | None, ...] = ()
    writer: int = 0

    def leaves(self) -> list[tuple[str, Tensor]]:
        """Value path and tensor of each tensor in the value."""
        root = "args" if self.port in ("input", "grad_input") else "output"
        if type(self.value) is Tensor:
            return [(root, self.value)]
        return [(path, leaf) for path, leaf in walk(self.value, root) if isinstance(leaf, Tensor)]

    def leaf(self, place: int) -> Tensor:
        """The tensor at a place among the leaves."""
        return self.leaves()[place][1]

    def span(self, place: int) -> None:
        """None: to hand out a pointer to a tensor's memory would make a copy-on-write snapshot real."""

    @property
    def is_far(self) -> bool:
        """False: its tensors are in memory."""
        return False

    def shared(self, place: int) -> Tensor:
        """The same as ``leaf``."""
        return self.leaf(place)

    def layouts(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Value path, dtype and shape of each tensor in the value."""
        return [(path, leaf.dtype, leaf.shape) for path, leaf in self.leaves()]

    def outline(self) -> Any:
        """The value, of whose tensors only dtype and shape are to be looked at."""
        return self.value

    def known_summaries(self) -> dict[str, Summary] | None:
        """Statistics by value path, if somebody has asked for them."""
        return self._summaries

    def summaries(self) -> dict[str, Summary]:
        """Statistics of each tensor as it is kept, by value path; with ``dtype="fp8"`` of data and of scale."""
        if self._summaries is None:
            self._summaries = {path: summarize(leaf) for path, leaf in self.leaves()}
        return self._summaries

    def rows(self) -> dict[str, str]:
        """By value path, which rows of ``batch`` a tensor has: ``samples`` or ``tokens``; the others are left out."""
        if not any(self.kinds):
            return {}
        pairs = zip(self.leaves(), self.kinds, strict=True)
        return {path: kind for (path, _), kind in pairs if kind is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, whether or not their memory is shared with the model; 0 on the meta device."""
        return sum(leaf.numel() * leaf.element_size() for _, leaf in self.leaves() if not leaf.is_meta)
