"""The rows of a site that was recorded with ``dtype="fp8"``, as float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.fp8 import restored, scaled_places
from hookline.record.rows import RowPlace, Rows, leaf_of
from hookline.sites import Site

__all__ = ["ScaledRows", "rows_of", "tensors_of"]


def rows_of(site: Site, events: Sequence[Any], leaf: str | None = None) -> Rows:
    """The rows of a tensor of a site, as float32 where it was kept as data and scale.

    Args:
        site: The site.
        events: Its events.
        leaf: Value path of the tensor as the model had it, or of a tensor as it is kept; the only one by default.

    Raises:
        SiteError: There is no tensor at ``leaf``.
        OptionError: ``leaf`` is needed, or the values do not fit together.
    """
    layouts = [event.layouts() for event in events]
    found = [scaled_places(event, layout) for event, layout in zip(events, layouts, strict=True)]
    if not any(found) or leaf in {path for layout in layouts for path, _, _ in layout}:
        return Rows(site, events, leaf)
    tensors = [tensors_of(places, layout) for places, layout in zip(found, layouts, strict=True)]
    leaf = leaf_of(site, [[tensor[1:] for tensor in some] for some in tensors], leaf)
    kept = {
        place in places for places, some in zip(found, tensors, strict=True) for place, path, *_ in some if path == leaf
    }
    if kept == {False}:
        return Rows(site, events, leaf)
    if len(kept) > 1:
        raise OptionError(
            f"{site}, {leaf}: some of its values are kept in eight bits and others, such as numbers without a "
            "dimension, are not; rows need one shape. Choose steps with rec.select(..., steps=...)."
        )
    return ScaledRows(site, events, leaf)


def tensors_of(
    places: Mapping[int, str], layout: Sequence[tuple[str, torch.dtype, torch.Size]]
) -> list[tuple[int, str, torch.dtype, torch.Size]]:
    """Place, value path, dtype and shape of each tensor of a value, as rows have it.

    Args:
        places: What `scaled_places` says of it.
        layout: What it is kept as.
    """
    return [
        (place, places.get(place, path), torch.float32 if place in places else dtype, shape)
        for place, (path, dtype, shape) in enumerate(layout)
        if place - 1 not in places
    ]


class ScaledRows(Rows):
    """Rows whose elements are multiplied by their scales when they are read; see ``Rows``."""

    def __init__(self, site: Site, events: Sequence[Any], leaf: str) -> None:
        self._data, self._scale = (Rows(site, events, f"{leaf}.{part}") for part in ("data", "scale"))
        self.site, self.leaf = site, leaf
        self.shape, self.dtype = self._data.shape, torch.float32

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def origins(self) -> list[tuple[int, int, int, int]]:
        """Step, call, backward pass and number of rows of each value, in order."""
        return self._data.origins()

    def writers(self) -> list[int]:
        """Number of the process of each value, in order."""
        return self._data.writers()

    def told(self, value: int) -> dict[str, npt.NDArray[Any]]:
        """What is known of the rows of one of the values; nothing where that was not said."""
        return self._data.told(value)

    def place(self, index: int) -> RowPlace:
        """Where a row comes from.

        Raises:
            IndexError: There is no such row.
        """
        return self._data.place(index)

    @property
    def have_identity(self) -> bool:
        """Whether ``identity`` can tell what each row is."""
        return self._data.have_identity

    def identity(self, index: Any = slice(None)) -> dict[str, Any]:
        """What rows are, as ``rec.batch`` was told; see ``Rows.identity``."""
        return self._data.identity(index)

    def __getitem__(self, index: Any) -> Tensor:  # type: ignore[override]
        """One row for a number; several for a slice, numbers or a mask of bools.

        Raises:
            IndexError: There is no such row, or a mask has another length.
            ArgumentError: Something else.
        """
        data = self._data[index]
        if len(self.shape) > 1:
            return restored(data, self._scale[index])
        # a value with one dimension has one scale for all of its rows
        scale = self._scale[self._values_of(index)]
        return restored(data, scale if data.dim() else scale[0])

    def _values_of(self, index: Any) -> npt.NDArray[np.int64]:
        """Number of the value of each row."""
        if isinstance(index, slice):
            numbers = np.arange(*index.indices(len(self)), dtype=np.int64)
        else:
            numbers = self._data._numbers([index] if isinstance(index, (int, np.integer)) else index)
        return np.searchsorted(self._data._ends, numbers, side="right")

    def _seen(self, start: int, stop: int) -> Tensor:
        return self[start:stop]

    def __iter__(self) -> Iterator[Tensor]:
        start = 0
        for *_, count in self.origins():
            yield from self[start : start + count]
            start += count

    def __dlpack_device__(self) -> tuple[Any, int]:
        """Where ``__dlpack__`` puts the rows."""
        return self[:0].__dlpack_device__()
