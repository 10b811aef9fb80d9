"""The last steps as arrays, which rules look at."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from hookline.stats.summary import COUNTS
from hookline.watch.series import FIELDS, Frame, Series, absmax, rms

__all__ = ["Window"]

_Array = TypeVar("_Array", bound=npt.NDArray[Any])

_STORED = {name: place for place, name in enumerate((*FIELDS, "rms", "absmax"))}
_COLUMN = {name: place for place, name in enumerate(FIELDS)}
_COUNTS = [_COLUMN[name] for name in COUNTS]


class Window:
    """The last steps, the calls of each step merged.

    Arrays that it gives are read-only views, which hold until the next ``add``: each step is written twice, ``size``
    places apart, so that the last ones always lie one after the other.

    Args:
        size: How many steps are kept.

    Attributes:
        series: All series so far; those that a step does not have are NaN there.
        count: How many steps were taken in so far.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.series: list[Series] = []
        self.count = 0
        self._steps = np.zeros(2 * size, np.int64)
        self._data = np.full((len(_STORED), 2 * size, 0), np.nan)
        self._extra: list[dict[str, Any]] = []
        self._known: dict[Hashable, object] = {}

    def add(self, frame: Frame, series: list[Series]) -> None:
        """Take in a step; the oldest one goes.

        Args:
            frame: The step.
            series: All series so far, to which ``frame.series`` points; it only ever grows.
        """
        if len(series) > len(self.series):
            more = np.full((len(_STORED), 2 * self.size, len(series) - len(self.series)), np.nan)
            self._data = np.concatenate((self._data, more), axis=2)
            self.series = list(series)
            self._known.clear()
        merged = _merged(frame, len(self.series))
        columns = np.concatenate((merged.T, rms(merged)[None], absmax(merged)[None]))
        for place in (self.count % self.size, self.count % self.size + self.size):
            self._steps[place] = frame.step
            self._data[:, place] = columns
        self._extra = [*self._extra[-(self.size - 1) :], frame.extra] if self.size > 1 else [frame.extra]
        self.count += 1

    def __len__(self) -> int:
        return min(self.count, self.size)

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Numbers of the steps, oldest first, shape (steps,)."""
        return _read_only(self._steps[self._last(None)])

    def values(self, last: int | None = None) -> npt.NDArray[np.float64]:
        """Rows of the last steps, oldest first, shape (steps, series, fields)."""
        return _read_only(np.moveaxis(self._data[: len(FIELDS), self._last(last)], 0, 2))

    def field(self, name: str, last: int | None = None) -> npt.NDArray[np.float64]:
        """One field, or ``"rms"`` or ``"absmax"``, of the last steps, oldest first, shape (steps, series)."""
        return _read_only(self._data[_STORED[name], self._last(last)])

    def extra(self, last: int | None = None) -> list[dict[str, Any]]:
        """What else is known of the last steps, oldest first."""
        return self._extra[max(0, len(self) - last) :] if last is not None else list(self._extra)

    def at(self, ports: tuple[str, ...], types: frozenset[str] | None = None) -> npt.NDArray[np.int64]:
        """Numbers of the series at these ports, of modules of these classes if given; ascending."""
        return self.chosen((ports, types), lambda one: one.port in ports and (types is None or one.type_name in types))

    def chosen(self, key: Hashable, wanted: Callable[[Series], bool]) -> npt.NDArray[np.int64]:
        """Numbers of the series that a function wants; it is asked once for each key, until there are more series."""
        return self.known(key, lambda: np.array([n for n, one in enumerate(self.series) if wanted(one)], np.int64))

    def known(self, key: Hashable, make: Callable[[], _Array]) -> _Array:
        """What a function makes of the series; it is asked once for each key, until there are more series."""
        if key not in self._known:
            self._known[key] = make()
        return cast(_Array, self._known[key])

    def partners(self, ports: tuple[str, ...], port: str) -> npt.NDArray[np.int64]:
        """For each series of ``at(ports)`` the one of the same path and place at another port; -1 if there is none."""

        def find() -> npt.NDArray[np.int64]:
            places = {(one.path, one.place): n for n, one in enumerate(self.series) if one.port == port}
            own = (self.series[n] for n in self.at(ports).tolist())
            return np.array([places.get((one.path, one.place), -1) for one in own], np.int64)

        return self.known(("partners", ports, port), find)

    def _last(self, last: int | None) -> slice:
        end = (self.count - 1) % self.size + self.size + 1
        return slice(end - min(len(self), len(self) if last is None else last), end)


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


def _merged(frame: Frame, count: int) -> npt.NDArray[np.float64]:
    """One row for each series: counts are sums, moments those of all elements together."""
    merged = np.full((count, len(FIELDS)), np.nan)
    if not len(frame.series):
        return merged
    order = np.argsort(frame.series, kind="stable")
    series, rows = frame.series[order], frame.values[order]
    starts = np.flatnonzero(np.r_[True, series[1:] != series[:-1]])
    there, sizes = series[starts], np.diff(np.r_[starts, len(series)])
    if len(there) == len(series):
        merged[there] = rows
        return merged
    merged[there[:, None], _COUNTS] = np.add.reduceat(rows[:, _COUNTS], starts)
    merged[there, _COLUMN["min"]] = np.fmin.reduceat(rows[:, _COLUMN["min"]], starts)
    merged[there, _COLUMN["max"]] = np.fmax.reduceat(rows[:, _COLUMN["max"]], starts)
    finite = rows[:, _COLUMN["numel"]] - rows[:, _COLUMN["nan"]] - rows[:, _COLUMN["inf"]]
    known = finite > 0
    total = np.add.reduceat(finite, starts)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        share = np.where(known, finite / np.repeat(total, sizes), 0.0)
        mean = np.where(known, rows[:, _COLUMN["mean"]], 0.0)
        merged_mean = np.add.reduceat(mean * share, starts)
        away = mean - np.repeat(merged_mean, sizes)
        std = np.where(known, rows[:, _COLUMN["std"]], 0.0)
        variance = np.add.reduceat(share * (std * std + away * away), starts)
        l2 = np.where(known, rows[:, _COLUMN["l2"]], 0.0)
        largest = np.maximum.reduceat(l2, starts)  # divided by it, no square leaves float64
        scale = np.where(largest > 0, largest, 1.0)
        l2 = np.sqrt(np.add.reduceat((l2 / np.repeat(scale, sizes)) ** 2, starts)) * scale
    merged[there, _COLUMN["mean"]] = np.where(total > 0, merged_mean, np.nan)
    merged[there, _COLUMN["std"]] = np.where(total > 0, np.sqrt(variance), np.nan)
    merged[there, _COLUMN["l2"]] = np.where(total > 0, l2, np.nan)
    return merged
