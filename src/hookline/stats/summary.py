"""The statistics of a tensor, how they merge, and how they are written down."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from hookline.errors import FormatError

__all__ = ["COUNTS", "FIELDS", "Row", "Summary", "merge", "of_row", "unknown"]

COUNTS = ("numel", "nan", "inf", "neg_inf", "zeros", "subnormal")
"""The statistics that are whole numbers."""
_NUMBERS = ("mean", "std", "min", "max", "l2")
_NO_NUMBERS = (math.nan,) * 5


@dataclasses.dataclass(frozen=True)
class Summary:
    """Statistics of one tensor; complex elements count by their magnitude, booleans as 0 and 1.

    Attributes:
        numel: Number of elements.
        mean: Mean of the finite elements, in the unit of the tensor; NaN when there is none, as for the next four.
        std: Standard deviation of the finite elements, with their number as the divisor (population).
        min: Smallest finite element.
        max: Largest finite element.
        l2: Square root of the sum of the squared finite elements.
        nan: Number of NaN elements.
        inf: Number of elements that are +inf or -inf.
        neg_inf: Number of those that are -inf.
        zeros: Number of elements equal to zero.
        subnormal: Number of elements below the smallest normal number of their dtype that are not zero.
    """

    numel: int
    mean: float
    std: float
    min: float
    max: float
    l2: float
    nan: int
    inf: int
    neg_inf: int
    zeros: int
    subnormal: int

    @property
    def finite(self) -> bool:
        """Whether no element is known to be NaN or infinite."""
        return self.nan + self.inf == 0

    @property
    def rms(self) -> float:
        """Root mean square of the finite elements."""
        count = self.numel - self.nan - self.inf
        return self.l2 / math.sqrt(count) if count else math.nan

    @property
    def absmax(self) -> float:
        """Largest magnitude of a finite element."""
        return max(abs(self.min), abs(self.max))

    @property
    def all_zero(self) -> bool:
        """Whether there are elements and each is zero."""
        return self.numel > 0 and self.zeros == self.numel

    def to_dict(self) -> dict[str, int | float | str]:
        """The fields for JSON; what JSON has no number for becomes ``"nan"``, ``"inf"`` or ``"-inf"``."""
        return {
            name: value if math.isfinite(value) else str(float(value))
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Summary:
        """Read what ``to_dict`` wrote.

        Raises:
            FormatError: A field is missing, unknown, of the wrong type, or contradicts the others.
        """
        _check_names(fields)
        counts = {name: _count(name, fields[name]) for name in COUNTS}
        if sum(counts[name] for name in ("nan", "inf", "zeros", "subnormal")) > counts["numel"]:
            raise FormatError(f"summary counts more NaN, Inf, zero and subnormal elements than its numel: {counts}")
        if counts["neg_inf"] > counts["inf"]:
            raise FormatError(f"summary counts more -Inf than Inf elements: {counts}")
        return cls(**counts, **{name: _number(name, fields[name]) for name in _NUMBERS})  # type: ignore[arg-type]


FIELDS = tuple(field.name for field in dataclasses.fields(Summary))
"""The statistics in the order in which rows of numbers have them."""

Row = tuple[float, ...]
"""The values of ``FIELDS``, counts as floats too."""


def of_row(row: Row) -> Summary:
    """The summary that a row of numbers stands for."""
    numel, mean, std, low, high, l2, nan, inf, neg_inf, zeros, subnormal = row
    return Summary(int(numel), mean, std, low, high, l2, int(nan), int(inf), int(neg_inf), int(zeros), int(subnormal))


def merge(summaries: Iterable[Summary]) -> Summary:
    """Summary of all elements together, as if the tensors had been one.

    Args:
        summaries: Summaries of disjoint tensors. Those without a finite element add their counts only.
    """
    parts = list(summaries)
    counts = {name: sum(getattr(part, name) for part in parts) for name in COUNTS}
    counted = [(part.numel - part.nan - part.inf, part) for part in parts]
    # a summary read from a file may have a mean that no elements can have
    known = [(count, part) for count, part in counted if count > 0 and math.isfinite(part.mean)]
    if not known:
        return dataclasses.replace(unknown(0), **counts)
    mean, std = _mean_and_std(known)
    low, high = min(part.min for _, part in known), max(part.max for _, part in known)
    l2 = math.hypot(*(part.l2 for _, part in known))
    return Summary(mean=mean, std=std, min=low, max=high, l2=l2, **counts)


def _mean_and_std(known: list[tuple[int, Summary]]) -> tuple[float, float]:
    """Chan's parallel formula with weights of at most 1, and hypot for the squares, so that nothing overflows."""
    if len(known) == 1:
        return known[0][1].mean, known[0][1].std
    total = sum(count for count, _ in known)
    mean = math.fsum(part.mean * (count / total) for count, part in known)
    # Rounding may push the mean of equal means past them, which would give a constant tensor a deviation.
    mean = min(max(mean, min(part.mean for _, part in known)), max(part.mean for _, part in known))
    spread: list[float] = []
    for count, part in known:
        weight = math.sqrt(count / total)
        spread += (part.std * weight, (part.mean - mean) * weight)
    return mean, math.hypot(*spread)


def unknown(numel: int) -> Summary:
    """Of a tensor of which only the size is known."""
    return Summary(numel, *_NO_NUMBERS, nan=0, inf=0, neg_inf=0, zeros=0, subnormal=0)


# ---------------------------------------------------------------- reading


def _check_names(fields: Mapping[str, Any]) -> None:
    if not isinstance(fields, Mapping):
        raise FormatError(f"a summary is an object with named fields; got {type(fields).__name__}")
    wanted = {*COUNTS, *_NUMBERS}
    if set(fields) != wanted:
        missing, unknown = sorted(wanted - set(fields)), sorted(map(str, set(fields) - wanted))
        raise FormatError(f"summary fields do not match: missing {missing}, unknown {unknown}")


def _count(name: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise FormatError(f"summary field {name!r} must be a whole number of at least 0; got {value!r}")
    return value


def _number(name: str, value: object) -> float:
    if value in ("nan", "inf", "-inf"):
        return float(value)
    try:
        number = float(value) if type(value) in (int, float) else math.nan  # type: ignore[arg-type]
    except OverflowError:
        number = math.nan
    if not math.isfinite(number):
        raise FormatError(f"summary field {name!r} must be a number, 'nan', 'inf' or '-inf'; got {value!r}")
    return number
