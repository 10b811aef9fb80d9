"""From a tensor to a row."""

from __future__ import annotations

import math

from hookline.stats import Summary
from hookline.stats.compute import row_of as measure
from hookline.watch.series import FIELDS

__all__ = ["INF", "NAN", "NEG_INF", "Row", "counts", "counts_of", "is_finite", "measure", "scaled", "told"]

Row = tuple[float, ...]
"""The columns of ``FIELDS``."""

NAN, INF, NEG_INF = (FIELDS.index(name) for name in ("nan", "inf", "neg_inf"))
_COUNTS = ("numel", "nan", "inf", "neg_inf", "zeros", "subnormal")
_UNITS = tuple(FIELDS.index(name) for name in ("mean", "std", "min", "max", "l2"))


def is_finite(row: Row) -> bool:
    """Whether it counts no NaN and no Inf."""
    return not (row[NAN] or row[INF])


def scaled(row: Row, factor: float) -> Row:
    """The row of the tensor times a positive factor."""
    if factor == 1.0:
        return row
    return tuple(value * factor if place in _UNITS else value for place, value in enumerate(row))


def told(row: Row) -> dict[str, int | float | str]:
    """The row as fields for JSON."""
    fields = {name: int(value) if name in _COUNTS else float(value) for name, value in zip(FIELDS, row, strict=True)}
    return {name: value if math.isfinite(value) else str(value) for name, value in fields.items()}


def counts(row: Row) -> str:
    """``"3 NaN and 1 Inf of 64"``."""
    nan, inf, negative = (int(row[place]) for place in (NAN, INF, NEG_INF))
    return _spelled(nan, inf - negative, negative, int(row[0]))


def counts_of(found: Summary) -> str:
    """The same of a summary."""
    return _spelled(found.nan, found.inf - found.neg_inf, found.neg_inf, found.numel)


def _spelled(nan: int, positive: int, negative: int, numel: int) -> str:
    parts = [f"{count:,} {name}" for count, name in ((nan, "NaN"), (positive, "Inf"), (negative, "-Inf")) if count]
    return f"{' and '.join(parts)} of {numel:,}"
