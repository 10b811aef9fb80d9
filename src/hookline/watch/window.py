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
    raise NotImplementedError
