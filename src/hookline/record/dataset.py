"""Batches of rows of a recording, in a shuffled order that a seed repeats, for training on what was recorded."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from hookline.errors import ArgumentError, OptionError
from hookline.record import ranks
from hookline.record.rows import Rows
from hookline.spelling import nearest

__all__ = ["Batches", "check_options"]


def check_options(given: Iterable[str]) -> None:
    """Refuse an option that there is not.

    Raises:
        ArgumentError: With the nearest names.
    """
    options = list(inspect.signature(Batches).parameters)[1:]
    for name in given:
        if name not in options:
            close = nearest(name, options) or options
            raise ArgumentError(f"dataset has no option {name}=; did you mean {' or '.join(close)}?")


class Batches(Dataset[dict[str, Any]]):
    """Batches of the rows of one or several sites; ``rec.dataset(...)`` makes it.

    A batch is ``{"h.3:output": rows, "row": numbers}``, the numbers being those in ``rec.rows(site)``; where they were
    recorded inside ``rec.batch``, also ``id``, ``position`` and ``token`` as ``rows.identity`` gives them. It is a
    map-style dataset of whole batches: ``DataLoader(dataset, batch_size=None, num_workers=4)`` gives them in the same
    order with any number of workers, forked or spawned.

    Shuffling has two levels, so that rows that are read together lie together: the values of the recording are
    permuted, and rows are permuted within windows of values that follow each other then. Every epoch has an order of
    its own, which ``seed`` repeats with the same release of NumPy.

    Attributes:
        rows: The rows, by site.
        batch_size: Rows in a batch; the last one may have less.
        epoch: Number of the epoch, which decides the order.
        first: Number of the first batch that is given, for going on where a training has stopped.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        *,
        batch_size: int = 256,
        shuffle: bool = False,
        seed: int = 0,
        window: int = 65_536,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        for name, number in (("batch_size", batch_size), ("window", window)):
            if type(number) is not int or number < 1:
                raise OptionError(f"{name}: got {number!r}, wanted a whole number from 1 on.")
        self.rows = {str(one.site): one for one in rows}
        self.batch_size = batch_size
        self.epoch = self.first = 0
        self._shuffle, self._seed, self._window, self._drop_last = shuffle, seed, window, drop_last
        self._rank, self._world_size = _share(rank, world_size)
        self._sizes = _common_sizes(list(rows))
        self._first = rows[0]
        self._has_identity = self._first.have_identity
        self._total = int(self._sizes.sum())
        self._order: tuple[int, _Order] | None = None

    def __len__(self) -> int:
        return max(self._count - self.first, 0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A batch.

        Raises:
            IndexError: There is no such batch.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index}: there are {len(self)}")
        if self._order is None or self._order[0] != self.epoch:
            self._order = self.epoch, _Order(self._sizes, self._window, self._seed_of_epoch())
        start = ((self.first + index) * self._world_size + self._rank) * self.batch_size
        numbers = self._order[1].numbers(start, min(start + self.batch_size, self._total))
        found = {site: rows[numbers] for site, rows in self.rows.items()}
        identity = self._first.identity(numbers) if self._has_identity else {}
        return {**found, **identity, "row": torch.from_numpy(numbers)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.__getitem__, range(len(self)))

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch, from its first batch on; call it before the ``DataLoader`` is iterated.

        Workers that persist keep the order of the epoch in which they were started.
        """
        self.epoch, self.first = epoch, 0

    def state_dict(self, batches: int) -> dict[str, int]:
        """What ``load_state_dict`` goes on from, when so many batches of this epoch have been used on this rank."""
        return {"epoch": self.epoch, "batch": self.first + batches, **self._choices}

    @property
    def _choices(self) -> dict[str, int]:
        """What decides which rows are in which batch."""
        return {
            "seed": self._seed,
            "batch_size": self.batch_size,
            "shuffle": self._shuffle,
            "window": self._window,
            "world_size": self._world_size,
            "drop_last": self._drop_last,
            "rows": self._total,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a state was taken.

        Raises:
            OptionError: It was taken with another seed, batch size or the like, or from other rows, so that the batches
                are others.
        """
        for name, value in self._choices.items():
            if state.get(name) != value:
                advice = "Load the recording as it was" if name == "rows" else f"Make the dataset with {name}="
                raise OptionError(
                    f"the state was taken with {name}={state.get(name)!r}, this dataset has {value}: its batches are "
                    f"others. {advice}{'' if name == 'rows' else repr(state.get(name))}."
                )
        self.epoch, self.first = state["epoch"], state["batch"]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}

    def __repr__(self) -> str:
        return f"<{len(self):,} batches of {self.batch_size:,} rows of {', '.join(self.rows)}>"

    # ------------------------------------------------------------ how many, and in which order

    @property
    def _count(self) -> int:
        """Batches of this rank; with ``drop_last`` as many on every rank, all of them full."""
        if self._drop_last:
            return self._total // (self.batch_size * self._world_size)
        batches = -(-self._total // self.batch_size)
        return (batches - self._rank + self._world_size - 1) // self._world_size

    def _seed_of_epoch(self) -> tuple[int, int] | None:
        return (self._seed, self.epoch) if self._shuffle else None


class _Order:
    """The rows of an epoch in their order, worked out window by window.

    Args:
        sizes: Rows of each value.
        window: Rows of a window, at least; a value is in one window.
        seed: What decides the order; None for that of the recording.
    """

    def __init__(self, sizes: npt.NDArray[np.int64], window: int, seed: tuple[int, int] | None) -> None:
        self._seed = seed
        self._sizes = sizes
        self._begins = np.cumsum(sizes) - sizes
        self._values = np.arange(len(sizes)) if seed is None else np.random.default_rng(seed).permutation(len(sizes))
        ends = np.cumsum(sizes[self._values])
        number = (ends - 1) // window  # of the window in which the last row of a value would be
        last = np.flatnonzero(np.diff(number, append=number[-1] + 1))
        self._bounds = np.concatenate(([0], last + 1))  # of windows, in values
        self._ends = ends[last]  # of windows, in rows
        self._made: tuple[int, npt.NDArray[np.int64]] | None = None

    def numbers(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The rows from one place in the order to another."""
        parts = []
        while start < stop:
            window = int(np.searchsorted(self._ends, start, side="right"))
            begin, end = (int(self._ends[window - 1]) if window else 0), int(self._ends[window])
            parts.append(self._rows(window)[start - begin : stop - begin])
            start = min(stop, end)
        return np.concatenate(parts)

    def _rows(self, window: int) -> npt.NDArray[np.int64]:
        if self._made is None or self._made[0] != window:
            values = self._values[self._bounds[window] : self._bounds[window + 1]]
            sizes = self._sizes[values]
            shift = self._begins[values] - (np.cumsum(sizes) - sizes)
            rows = np.arange(sizes.sum(), dtype=np.int64) + np.repeat(shift, sizes)
            if self._seed is not None:
                rows = np.random.default_rng((*self._seed, window)).permutation(rows)
            self._made = window, rows
        return self._made[1]


def _share(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Which of how many processes this is: as given, or as torchrun says."""
    if (rank is None) != (world_size is None):
        raise OptionError("rank and world_size go together; give both, or neither to take them from torchrun.")
    if rank is None or world_size is None:
        rank, world_size = ranks.rank(), ranks.world_size()
    if not 0 <= rank < world_size:
        raise OptionError(f"rank has to be from 0 to world_size - 1, got rank={rank}, world_size={world_size}.")
    return rank, world_size


def _common_sizes(rows: list[Rows]) -> npt.NDArray[np.int64]:
    """Rows of each value; the sites must have the same ones, or a batch would mix up what does not belong together."""
    first = [*zip(rows[0].writers(), rows[0].origins(), strict=True)]
    for other in rows[1:]:
        found = [*zip(other.writers(), other.origins(), strict=True)]
        if first != found:
            pairs = zip([*first, None], [*found, None], strict=False)
            one, two = next((one, two) for one, two in pairs if one != two)
            raise OptionError(
                f"{rows[0].site} and {other.site} have no rows in common order: {_told(one)} of the first stands "
                f"against {_told(two)} of the second. Choose sites that ran equally often on the same batches."
            )
    return np.array([count for _, (*_, count) in first], dtype=np.int64)


def _told(value: tuple[int, tuple[int, int, int, int]] | None) -> str:
    if value is None:
        return "the end"
    writer, (step, call, _, count) = value
    return f"call {call} of step {step}{f' of process {writer}' if writer else ''} with {count} rows"
