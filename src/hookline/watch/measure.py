"""From a tensor to a row."""

from __future__ import annotations

from hookline.stats.compute import row_of as measure
from hookline.stats.summary import FIELDS, Row, Summary, of_row

__all__ = ["INF", "NAN", "NEG_INF", "Row", "counts", "counts_of", "is_finite", "measure", "scaled", "told"]

NAN, INF, NEG_INF = (FIELDS.index(name) for name in ("nan", "inf", "neg_inf"))
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
    return of_row(row).to_dict()


def counts(row: Row) -> str:
    """``"3 NaN and 1 Inf of 64"``."""
    return counts_of(of_row(row))


def counts_of(found: Summary) -> str:
    """The same of a summary."""
    kinds = ((found.nan, "NaN"), (found.inf - found.neg_inf, "Inf"), (found.neg_inf, "-Inf"))
    return f"{' and '.join(f'{count:,} {name}' for count, name in kinds if count)} of {found.numel:,}"
