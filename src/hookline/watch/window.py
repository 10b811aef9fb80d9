"""The last steps as arrays, which rules look at."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hookline.watch.series import FIELDS, Frame, Series, absmax, rms

__all__ = ["Window"]

_COLUMN = {name: place for place, name in enumerate(FIELDS)}
_COUNTS = [_COLUMN[name] for name in ("numel", "nan", "inf", "neg_inf", "zeros", "subnormal")]


class Window:
    """The last steps, the calls of each step merged.

    Args:
        size: How many steps are kept.

    Attributes:
        series: All series so far; those that a step does not have are NaN there.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.series: list[Series] = []
        self._steps = np.zeros(size, np.int64)
        self._values = np.full((size, 0, len(FIELDS)), np.nan)
        self._count = 0

    def add(self, frame: Frame, series: list[Series]) -> None:
        """Take in a step; the oldest one goes.

        Args:
            frame: The step.
            series: All series so far, to which ``frame.series`` points; it only ever grows.
        """
        if len(series) > len(self.series):
            more = np.full((self.size, len(series) - len(self.series), len(FIELDS)), np.nan)
            self._values = np.concatenate((self._values, more), axis=1)
            self.series = list(series)
        place = self._count % self.size
        self._steps[place] = frame.step
        self._values[place] = _merged(frame, len(self.series))
        self._count += 1

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Numbers of the steps, oldest first, shape (steps,)."""
        return self._steps[self._places()]

    def values(self, last: int | None = None) -> npt.NDArray[np.float64]:
        """Rows of the last steps, oldest first, shape (steps, series, fields)."""
        places = self._places()
        return self._values[places if last is None else places[max(0, len(places) - last) :]]

    def field(self, name: str, last: int | None = None) -> npt.NDArray[np.float64]:
        """One field, or ``"rms"`` or ``"absmax"``, shape (steps, series)."""
        values = self.values(last)
        if name == "rms":
            return rms(values)
        return absmax(values) if name == "absmax" else values[..., _COLUMN[name]]

    def _places(self) -> npt.NDArray[np.int64]:
        first = max(0, self._count - self.size)
        return np.arange(first, self._count) % self.size


def _merged(frame: Frame, count: int) -> npt.NDArray[np.float64]:
    """One row for each series: counts are sums, moments those of all elements together."""
    merged = np.full((count, len(FIELDS)), np.nan)
    if not len(frame.series):
        return merged
    order = np.argsort(frame.series, kind="stable")
    series, rows = frame.series[order], frame.values[order]
    starts = np.flatnonzero(np.r_[True, series[1:] != series[:-1]])
    there = series[starts]
    if len(there) == len(series):
        merged[there] = rows
        return merged
    merged[np.ix_(there, _COUNTS)] = np.add.reduceat(rows[:, _COUNTS], starts)
    merged[there, _COLUMN["min"]] = np.fmin.reduceat(rows[:, _COLUMN["min"]], starts)
    merged[there, _COLUMN["max"]] = np.fmax.reduceat(rows[:, _COLUMN["max"]], starts)
    finite = rows[:, _COLUMN["numel"]] - rows[:, _COLUMN["nan"]] - rows[:, _COLUMN["inf"]]
    known = finite > 0
    total = np.add.reduceat(finite, starts)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        share = np.where(known, finite / np.repeat(total, np.diff(np.r_[starts, len(series)])), 0.0)
        mean = np.where(known, rows[:, _COLUMN["mean"]], 0.0)
        merged_mean = np.add.reduceat(mean * share, starts)
        away = mean - np.repeat(merged_mean, np.diff(np.r_[starts, len(series)]))
        std = np.where(known, rows[:, _COLUMN["std"]], 0.0)
        variance = np.add.reduceat(share * (std * std + away * away), starts)
        l2 = np.sqrt(np.add.reduceat(np.where(known, rows[:, _COLUMN["l2"]], 0.0) ** 2, starts))
    merged[there, _COLUMN["mean"]] = np.where(total > 0, merged_mean, np.nan)
    merged[there, _COLUMN["std"]] = np.where(total > 0, np.sqrt(variance), np.nan)
    merged[there, _COLUMN["l2"]] = np.where(total > 0, l2, np.nan)
    return merged
