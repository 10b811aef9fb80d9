"""What the rows of stored values are, as ``rec.batch`` was told."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookline.errors import FormatError, SiteError
from hookline.record.spans import groups
from hookline.sites import Site
from hookline.store.format import SAMPLES

__all__ = ["Told", "gathered", "identity_of", "where"]

_AT_HAND = 32 << 20
"""Bytes of columns that are kept at hand."""
_EACH = 700
"""Bytes of Python objects for the columns of one value."""


class Told:
    """What is known of the rows of each value; the last ones that were read are kept at hand.

    Args:
        values: Events, and the place of the tensor in each.
        leaf: Its value path.
    """

    def __init__(self, values: list[tuple[Any, int]], leaf: str) -> None:
        self._values, self._leaf = values, leaf
        self._kept: OrderedDict[int, dict[str, npt.NDArray[Any]]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def __call__(self, value: int) -> dict[str, npt.NDArray[Any]]:
        """The columns of one value."""
        found = self._kept.get(value)
        if found is not None:
            return found
        found = identity_of(self._values, self._leaf, value)
        with self._lock:
            if value not in self._kept:
                self._kept[value] = found
                self._nbytes += _nbytes(found)
            while self._nbytes > _AT_HAND and len(self._kept) > 1:
                self._nbytes -= _nbytes(self._kept.popitem(last=False)[1])
        return found


def _nbytes(columns: dict[str, npt.NDArray[Any]]) -> int:
    """Bytes of some columns, with what Python needs for them; a string counts as 64."""
    held = sum(column.size * (64 if column.dtype.kind == "O" else column.itemsize) for column in columns.values())
    return _EACH + held


def gathered(
    site: str,
    values: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    told: Callable[[int], dict[str, npt.NDArray[Any]]],
) -> dict[str, Any]:
    """What some rows are: int64 tensors, and lists of strings.

    Args:
        site: For messages.
        values: Number of the value of each row.
        rows: Number of each row in its value.
        told: Gives what is known of the rows of a value, by name.

    Raises:
        SiteError: More is known of some rows than of others.
    """
    parts: dict[str, Any] = {}
    if not len(values):
        parts = {name: column[:0] for name, column in told(0).items()}
    for value, here in groups(values):
        found = told(value)
        if parts and found.keys() != parts.keys():
            raise SiteError(
                f"{site}: of some rows {', '.join(parts)} are known, of others {', '.join(found)}. Choose steps with "
                "rec.select(..., steps=...)."
            )
        for name, column in found.items():
            if name in parts and (parts[name].dtype.kind == "i") != (column.dtype.kind == "i"):
                raise SiteError(
                    f"{site}: {name} is a number in some steps and a string in others. Choose steps with "
                    "rec.select(..., steps=...)."
                )
            dtype = column.dtype if column.dtype.kind == "i" else object
            parts.setdefault(name, np.zeros(len(values), dtype=dtype))[here] = column[rows[here]]
    return {name: torch.from_numpy(c) if c.dtype.kind == "i" else c.tolist() for name, c in parts.items()}


def identity_of(values: list[tuple[Any, int]], leaf: str, value: int) -> dict[str, npt.NDArray[Any]]:
    """Of the rows of a value: ids, and for tokens their positions and numbers."""
    event = values[value][0]
    place = f"{Site(event.path, event.port)}, {leaf}, {where(event)}"
    try:
        told = {name: _column(column) for name, column in event.batch.value.items()}
        found = {"id": told["ids"]}
        if event.rows()[leaf] != SAMPLES:
            found = {"id": told["ids"][told["sample"]]}
            found |= {name: told[name] for name in ("position", "token") if name in told}
    except (AttributeError, LookupError, TypeError) as error:
        raise FormatError(f"{place}: what its rows are is damaged ({error!r}). Record again.") from error
    count = dict((path, shape[:1]) for path, _, shape in event.layouts())[leaf]
    if any(column.shape != count for column in found.values()):
        raise FormatError(f"{place}: what its rows are is told of another number of them. Record again.")
    return found


def _column(column: Any) -> npt.NDArray[Any]:
    if isinstance(column, Tensor):
        return np.asarray(column.numpy())
    found = np.empty(len(column), dtype=object)
    found[:] = column
    return found


def where(event: Any) -> str:
    """A value as messages name it."""
    return f"call {event.call} of step {event.step}"
