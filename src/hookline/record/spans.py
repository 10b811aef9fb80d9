"""Rows that are copied straight from the memory in which several values lie, such as a mapped file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Spans", "groups"]

_NONE, _UNKNOWN = -1, -2


class Spans:
    """Where the bytes of the values lie: several lie in one file.

    Attributes:
        memory: Pieces of memory, as bytes.
    """

    def __init__(self, values: list[tuple[Any, int]]) -> None:
        self.memory: list[npt.NDArray[np.uint8]] = []
        self._values = values
        self._by_id: dict[int, int] = {}
        self._span = np.full(len(values), _UNKNOWN, dtype=np.int64)
        self._start = np.zeros(len(values), dtype=np.int64)

    def of(self, values: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Number of the piece of memory of each value, -1 where it has none, and where in it the value begins."""
        for value in np.unique(values[self._span[values] == _UNKNOWN]).tolist():
            event, place = self._values[value]
            found = event.span(place)
            self._span[value] = _NONE if found is None else self._number(found[0])
            self._start[value] = 0 if found is None else found[1]
        return self._span[values], self._start[values]

    def gather(self, spans: npt.NDArray[np.int64], begins: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.uint8]:
        """Pieces of ``size`` bytes, one behind the other."""
        if (spans == spans[0]).all():
            return self._pieces(int(spans[0]), size)[begins].view(np.uint8)
        found = np.empty(len(spans), np.dtype((np.void, size)))
        for span, chosen in groups(spans):
            found[chosen] = self._pieces(span, size)[begins[chosen]]
        return found.view(np.uint8)

    def seen(
        self,
        spans: npt.NDArray[np.int64],
        begins: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        *,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """Pieces of any size as one view; None where they do not lie one behind the other, or askew."""
        begin = int(begins[0])
        if _apart(spans, begins, sizes).any() or begin % dtype.itemsize:
            return None
        return torch.from_numpy(self.memory[int(spans[0])][begin : begin + int(sizes.sum())]).view(dtype)

    def joined(
        self, spans: npt.NDArray[np.int64], begins: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
    ) -> Tensor:
        """Pieces of any size, one behind the other, as bytes; what lies so already is copied at once."""
        apart = _apart(spans, begins, sizes)
        firsts = np.concatenate(([0], np.flatnonzero(apart) + 1))
        found, used = torch.empty(int(sizes.sum()), dtype=torch.uint8), 0
        lengths = np.add.reduceat(sizes, firsts)
        for span, begin, length in zip(spans[firsts].tolist(), begins[firsts].tolist(), lengths.tolist(), strict=True):
            found[used : used + length].copy_(torch.from_numpy(self.memory[span][begin : begin + length]))
            used += length
        return found

    def _pieces(self, span: int, size: int) -> npt.NDArray[np.void]:
        """Every piece of so many bytes, by its first byte; as one element each, which NumPy copies at once."""
        memory = self.memory[span]
        return np.ndarray((len(memory) - size + 1,), np.dtype((np.void, size)), buffer=memory, strides=(1,))

    def _number(self, memory: npt.NDArray[np.uint8]) -> int:
        number = self._by_id.setdefault(id(memory), len(self.memory))
        if number == len(self.memory):
            self.memory.append(memory)
        return number


def _apart(
    spans: npt.NDArray[np.int64], begins: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Of each piece but the first, whether it does not lie right behind the one before."""
    found: npt.NDArray[np.bool_] = (np.diff(spans) != 0) | (begins[1:] != begins[:-1] + sizes[:-1])
    return found


def groups(keys: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Each key, from 0 on, and the places where it stands."""
    order = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[order], prepend=_NONE, append=_NONE))
    for start, stop in itertools.pairwise(bounds.tolist()):
        places = order[start:stop]
        yield int(keys[places[0]]), places
