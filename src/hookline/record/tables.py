"""Every tensor of every event as one line of a data frame."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from hookline.extras import extra
from hookline.stats.summary import FIELDS, Summary

__all__ = ["to_pandas", "to_polars"]

_TYPES = {
    **dict.fromkeys(("order", "step"), "int"),
    **dict.fromkeys(("path", "port"), "text"),
    **dict.fromkeys(("call", "backward"), "int"),
    "writer": "int",
    **dict.fromkeys(("leaf", "dtype", "shape"), "text"),
    "numel": "int",
    **dict.fromkeys(("mean", "std", "min", "max", "l2"), "float"),
    **dict.fromkeys(("nan", "inf", "neg_inf", "zeros", "subnormal"), "count"),
    "nbytes": "int",
}
"""The columns, and what stands in them; a count is missing where no statistics were recorded."""

_STATISTICS = FIELDS[1:]  # without numel, which is known where nothing else is


def to_pandas(events: Iterable[Any]) -> Any:
    """A ``pandas.DataFrame``; see ``Recording.to_pandas``."""
    pandas = extra("pandas", "pandas", "to_pandas()")
    dtypes = {"int": "int64", "float": "float64", "count": "Int64", "text": "str"}
    columns = _columns(events)
    return pandas.DataFrame({name: pandas.Series(columns[name], dtype=dtypes[kind]) for name, kind in _TYPES.items()})


def to_polars(events: Iterable[Any]) -> Any:
    """A ``polars.DataFrame``; see ``Recording.to_polars``."""
    polars = extra("polars", "polars", "to_polars()")
    dtypes = {"int": polars.Int64, "float": polars.Float64, "count": polars.Int64, "text": polars.String}
    return polars.DataFrame(_columns(events), schema={name: dtypes[kind] for name, kind in _TYPES.items()})


def _columns(events: Iterable[Any]) -> dict[str, list[Any]]:
    lines = [line for event in events for line in _lines(event)]
    listed = list(zip(*lines, strict=True)) or [()] * len(_TYPES)
    return dict(zip(_TYPES, map(list, listed), strict=True))


def _lines(event: Any) -> Iterator[tuple[Any, ...]]:
    layouts, summaries = _layouts(event), event.summaries()
    sizes = _sizes(event, layouts)
    for (path, dtype, shape, numel), nbytes in zip(layouts, sizes, strict=True):
        text = "nested" if shape is None else "x".join(map(str, shape)) or "scalar"
        place = event.order, event.step, _clean(event.path), event.port, event.call, event.backward, event.writer
        yield (
            *place,
            _clean(path),
            str(dtype).removeprefix("torch."),
            text,
            numel,
            *_statistics(summaries.get(path)),
            nbytes,
        )


def _statistics(found: Summary | None) -> tuple[Any, ...]:
    if found is None:
        return (None,) * len(_STATISTICS)
    return tuple(getattr(found, name) for name in _STATISTICS)


def _layouts(event: Any) -> list[tuple[str, Any, Any, int]]:
    try:
        return [(path, dtype, shape, math.prod(shape)) for path, dtype, shape in event.layouts()]
    except RuntimeError:  # a nested tensor has no shape
        return [(path, leaf.dtype, _shape(leaf), leaf.numel()) for path, leaf in event.leaves()]


def _shape(tensor: Any) -> Any:
    return None if tensor.is_nested else tensor.shape


def _sizes(event: Any, layouts: list[tuple[str, Any, Any, int]]) -> list[int]:
    """Bytes of each tensor; the tensors are only touched where some of an event have data and others have none."""
    full = [numel * dtype.itemsize for _, dtype, _, numel in layouts]
    if event.nbytes in (0, sum(full)):
        return full if event.nbytes else [0] * len(full)
    return [0 if event.leaf(place).is_meta else size for place, size in enumerate(full)]


def _clean(text: str) -> str:
    """What UTF-8 cannot hold as an escape, as in the names of a file."""
    return text.encode("utf-8", "backslashreplace").decode()
