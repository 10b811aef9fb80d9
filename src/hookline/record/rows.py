"""The rows of one site over all calls, steps and writers, as one array with random access."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookline.errors import ArgumentError, OptionError, SiteError
from hookline.record.columns import arrow_table
from hookline.record.identity import Told, gathered, where
from hookline.record.spans import Spans, groups
from hookline.report.text import plural
from hookline.sites import Site
from hookline.spelling import kind

__all__ = ["RowPlace", "Rows", "leaf_of"]

_OPEN = 1024
"""Values that are kept at hand; on disk, each is a view of a mapped file. None of an object store is."""
_LARGEST_ITEM = 2**31 - 1
"""Bytes of the largest element that every release of NumPy has."""


class RowPlace(NamedTuple):
    """Where a row comes from.

    Attributes:
        step: Step.
        call: Number of the call of the module in that step.
        backward: Number of the backward pass through that call; 0 for values of the forward.
        row: Index along the first dimension of the value.
        writer: Number of the process, such as its rank.
    """

    step: int
    call: int
    backward: int
    row: int
    writer: int = 0


class Rows(Sequence[Tensor]):
    """All rows of a site, in the order in which they were recorded; ``rec.rows("h.3:output")`` gives it.

    The values are laid one behind the other along their first dimension; a value without dimensions is one row.
    ``rows[7]`` is a row, ``rows[10:20]``, ``rows[[3, 1, 4]]`` and ``rows[mask]`` are tensors of rows. Of a recording on
    disk, only the bytes of these rows are read. What is returned is memory of its own.

    Attributes:
        site: The site.
        leaf: Value path of the tensor, such as ``"output"`` or ``"output[0]"``.
        shape: Number of rows, then the shape of each.
        dtype: Their dtype.
    """

    def __init__(self, site: Site, events: Sequence[Any], leaf: str | None = None) -> None:
        layouts = [event.layouts() for event in events]
        self.site = site
        self.leaf = leaf_of(site, layouts, leaf)
        found = [
            (event, place, dtype, shape)
            for event, layout in zip(events, layouts, strict=True)
            for place, (path, dtype, shape) in enumerate(layout)
            if path == self.leaf
        ]
        first, self.dtype, shape = found[0][0], found[0][2], found[0][3]
        for event, _, dtype, other in found:
            if dtype != self.dtype or other[1:] != shape[1:] or bool(other) != bool(shape):
                raise OptionError(
                    f"{site}, {self.leaf}: {where(event)} has {dtype} {list(other)}, {where(first)} has {self.dtype} "
                    f"{list(shape)}; rows need one dtype, and one shape but for the first dimension. Choose steps with "
                    "rec.select(..., steps=...), or read the values by rec[path].calls."
                )
        self._values = [(event, place) for event, place, _, _ in found]
        counts = [other[0] if other else 1 for _, _, _, other in found]
        self._ends: npt.NDArray[np.int64] = np.cumsum(counts, dtype=np.int64)
        self._begins = self._ends - np.array(counts, dtype=np.int64)
        self.shape = torch.Size((int(self._ends[-1]), *shape[1:]))
        self._row_size = self.dtype.itemsize * self.shape[1:].numel()
        self._forget()

    def _forget(self) -> None:
        # of a function that does not hold us, or only the garbage collector could free the values
        read = functools.partial(_read, self._values)
        far = any(event.is_far for event, _ in self._values)
        self._value = read if far else functools.lru_cache(maxsize=_OPEN)(read)  # the store keeps the last ones
        self._identity = Told(self._values, self.leaf)
        self._spans = Spans(self._values)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_value", "_identity", "_spans")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return int(self.shape.numel() * self.dtype.itemsize)

    def writers(self) -> list[int]:
        """Number of the process of each value, in order."""
        return [event.writer for event, _ in self._values]

    def origins(self) -> list[tuple[int, int, int, int]]:
        """Step, call, backward pass and number of rows of each value, in order."""
        counts = (self._ends - self._begins).tolist()
        return [
            (event.step, event.call, event.backward, count)
            for (event, _), count in zip(self._values, counts, strict=True)
        ]

    def place(self, index: int) -> RowPlace:
        """Where a row comes from.

        Raises:
            IndexError: There is no such row.
        """
        value, row = self._find(index)
        event = self._values[value][0]
        return RowPlace(event.step, event.call, event.backward, row, event.writer)

    @functools.cached_property
    def have_identity(self) -> bool:
        """Whether ``identity`` can tell what each row is."""
        return all(self.leaf in event.rows() for event, _ in self._values)

    def told(self, value: int) -> dict[str, npt.NDArray[Any]]:
        """What is known of the rows of one of the values that ``origins`` lists; nothing where that was not said."""
        return self._identity(value) if self.leaf in self._values[value][0].rows() else {}

    def identity(self, index: Any = slice(None)) -> dict[str, Any]:
        """What rows are, as ``rec.batch`` was told.

        Args:
            index: As for ``rows[index]``; all rows by default.

        Returns:
            ``id``, the sample of each row: int64, or a list of strings. For rows of tokens ``position`` as well, its
            place in the sample, and ``token``, its token id, where that was given; int64, one for each row.

        Raises:
            SiteError: It was not recorded inside ``rec.batch``, or its values do not have rows of samples or tokens.
        """
        if not self.have_identity:
            event, place = next(found for found in self._values if self.leaf not in found[0].rows())
            if event.batch is not None:
                shape, ids = list(event.layouts()[place][2]), len(event.batch.value["ids"])
                raise SiteError(
                    f"{self.site}, {self.leaf}: {where(event)} has the shape {shape}, its batch was told of "
                    f"{plural(ids, 'id')}; rows are those of the ids where the first dimension is as long as they are."
                )
            raise SiteError(
                f"{self.site}, {self.leaf}: what the rows of {where(event)} are is not known. Record inside `with "
                "rec.batch(ids=...)`; values whose first dimension is that of the ids, or of the tokens, get them."
            )
        if isinstance(index, slice):
            chosen = np.arange(*index.indices(len(self)), dtype=np.int64)
        else:
            chosen = self._numbers([index] if isinstance(index, (int, np.integer)) else index)
        values = np.searchsorted(self._ends, chosen, side="right")
        rows = chosen - self._begins[values]
        return gathered(f"{self.site}, {self.leaf}", values, rows, self._identity)

    def __getitem__(self, index: Any) -> Tensor:  # type: ignore[override]
        """One row for a number; several for a slice, numbers or a mask of bools.

        Raises:
            IndexError: There is no such row, or a mask has another length.
            ArgumentError: Something else.
        """
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            value, row = self._find(int(index))
            return self._value(value)[row].clone()
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self._range(start, max(start, stop))
            return self._gather(np.arange(start, stop, step, dtype=np.int64))
        return self._gather(self._numbers(index))

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Several rows for a ``DataLoader``, which collates them."""
        return list(self[indices])

    def __iter__(self) -> Iterator[Tensor]:
        for value in range(len(self._values)):
            yield from self._value(value).clone()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """All rows as a NumPy array.

        Raises:
            ArgumentError: NumPy has no such dtype, or a copy is forbidden.
        """
        if copy is False:
            raise ArgumentError(f"{self.site}: rows of several values are always copied; leave copy=False out.")
        try:
            found: npt.NDArray[Any] = self[:].cpu().numpy()
        except TypeError as error:
            raise ArgumentError(
                f"{self.site}: NumPy has no {self.dtype}. Convert first: rows[:].float().numpy(), or keep the bits: "
                "rows[:].view(torch.uint16).numpy()."
            ) from error
        return found if dtype is None else found.astype(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """All rows for another library, such as ``jax.dlpack.from_dlpack(rows)``.

        Raises:
            BufferError: A copy is forbidden.
        """
        if options.get("copy") is False:
            raise BufferError(f"{self.site}: rows of several values are always copied; leave copy=False out.")
        return self[:].detach().resolve_conj().resolve_neg().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, int]:
        """Where ``__dlpack__`` puts the rows."""
        return self._value(0).__dlpack_device__()

    def to_arrow(self, *, bf16: str | None = None) -> Any:
        """All rows as a ``pyarrow.Table``.

        Its columns are step, call, backward, row (within the value), writer; where ``rec.batch`` said what rows are,
        id, position and token as ``identity`` has them, null where that is not known; and value: a list of fixed size,
        row by row, whose shape stands in the metadata of the schema as ``hookline.shape``.

        Args:
            bf16: What bfloat16 becomes, which Arrow does not have: ``"float32"`` or its bits, ``"uint16"``.

        Raises:
            OptionError: Arrow has no exact type for the rows.
            HooklineError: pyarrow is not installed.
        """
        return arrow_table(self, bf16)

    def __repr__(self) -> str:
        return f"<{plural(len(self), 'row')} of {self.site}, {self.leaf}: {self.dtype} {list(self.shape[1:])} each>"

    # ------------------------------------------------------------ reading

    def _find(self, index: int) -> tuple[int, int]:
        """Number of the value, and the row in it."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {self.site}: there are {plural(len(self), 'row')}")
        index %= len(self)
        value = int(np.searchsorted(self._ends, index, side="right"))
        return value, index - int(self._begins[value])

    def split(self, size: int) -> Iterator[Tensor]:
        """All rows in order, so many at a time, the fastest way to read them; the last tensor may be smaller.

        As with ``torch.split``, rows that lie in one piece are not copied: do not write into them, and clone what you
        change. ``rows[start:stop]`` gives a copy.

        Args:
            size: Rows of each tensor, from 1 on.

        Raises:
            ArgumentError: It is no such number.
        """
        if type(size) is not int or size < 1:
            raise ArgumentError(f"{self.site}: split takes a whole number of rows from 1 on, got {size!r}.")
        for start in range(0, len(self), size):
            yield self._seen(start, min(start + size, len(self)))

    def _seen(self, start: int, stop: int) -> Tensor:
        """Some rows, at least one, as a view where that is possible."""
        value, row = self._find(start)
        if stop <= self._ends[value]:
            return self._value(value)[row : row + stop - start]
        pieces = self._pieces(start, stop)
        found = None if pieces is None else self._spans.seen(*pieces, dtype=self.dtype)
        return self._range(start, stop) if found is None else found.view(stop - start, *self.shape[1:])

    def _range(self, start: int, stop: int) -> Tensor:
        pieces = self._pieces(start, stop)
        if pieces is not None:
            return self._spans.joined(*pieces).view(self.dtype).view(stop - start, *self.shape[1:])
        parts = []
        while start < stop:
            value, row = self._find(start)
            end = min(stop, int(self._ends[value]))
            parts.append(self._value(value)[row : row + end - start])
            start = end
        return torch.cat(parts) if parts else self._value(0)[:0].clone()

    def _pieces(
        self, start: int, stop: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """Where the rows of several values lie, with their sizes in bytes; None for one value or no data."""
        if start >= stop:
            return None
        first, last = self._find(start)[0], self._find(stop - 1)[0] + 1
        if last - first == 1:
            return None
        spans, begins = self._spans.of(np.arange(first, last))
        if (spans < 0).any():
            return None
        size = self._row_size
        skipped = np.maximum(start - self._begins[first:last], 0)
        counts = np.minimum(self._ends[first:last], stop) - self._begins[first:last] - skipped
        return spans, begins + skipped * size, counts * size

    def _numbers(self, index: Any) -> npt.NDArray[np.int64]:
        if isinstance(index, tuple):
            raise ArgumentError(
                f"{self.site}: rows have one index, got {len(index)}. For several rows write rows[[3, 1, 4]], for a "
                "part of each rows[10:20][:, 0]."
            )
        try:
            numbers = np.asarray(index.cpu() if isinstance(index, Tensor) else index)
        except (TypeError, ValueError) as error:
            raise ArgumentError(_no_index(self.site, index)) from error
        if numbers.dtype == np.bool_ and numbers.ndim == 1:
            if len(numbers) != len(self):
                raise IndexError(f"{self.site}: the mask has {len(numbers)} entries for {plural(len(self), 'row')}")
            return np.flatnonzero(numbers)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise ArgumentError(_no_index(self.site, index))
        numbers = numbers.astype(np.int64)
        wrong = numbers[(numbers < -len(self)) | (numbers >= len(self))]
        if wrong.size:
            raise IndexError(f"row {wrong[0]} of {self.site}: there are {plural(len(self), 'row')}")
        return np.where(numbers < 0, numbers + len(self), numbers)

    def _gather(self, numbers: npt.NDArray[np.int64]) -> Tensor:
        """Rows in the order of the numbers, each value being opened once."""
        if not numbers.size:
            return self._range(0, 0)
        values = np.searchsorted(self._ends, numbers, side="right")
        rows = numbers - self._begins[values]
        spans, starts = self._spans.of(values)
        size = self._row_size
        if (spans < 0).any() or size > _LARGEST_ITEM:
            return self._indexed(values, torch.from_numpy(rows))
        if not size:
            return torch.empty((numbers.size, *self.shape[1:]), dtype=self.dtype)
        found = self._spans.gather(spans, starts + rows * size, size)
        return torch.from_numpy(found).view(self.dtype).view(numbers.size, *self.shape[1:])

    def _indexed(self, values: npt.NDArray[np.int64], rows: Tensor) -> Tensor:
        """A row of each of the values, by indexing: no pointer to their memory is handed out."""
        first = self._value(int(values[0]))
        found = torch.empty((len(values), *self.shape[1:]), dtype=self.dtype, device=first.device)
        for value, here in groups(values):
            places = torch.from_numpy(here)
            found[places.to(found.device)] = self._value(value)[rows[places].to(found.device)]
        return found


def _read(values: list[tuple[Any, int]], value: int) -> Tensor:
    event, place = values[value]
    tensor: Tensor = event.shared(place)
    return tensor if tensor.dim() else tensor[None]


def leaf_of(site: Site, layouts: list[list[tuple[str, torch.dtype, torch.Size]]], wanted: str | None) -> str:
    """The value path that is wanted, or the only one there is."""
    paths = list(dict.fromkeys(path for layout in layouts for path, _, _ in layout))
    if wanted is not None and not isinstance(wanted, str):
        raise ArgumentError(f'leaf: got {kind(wanted)}, wanted a value path such as "output[0]".')
    if wanted in paths or (wanted is None and len(paths) == 1):
        return wanted or paths[0]
    if not paths:
        raise SiteError(f"{site}: none of its values holds a tensor, so there are no rows.")
    shown = ", ".join(f'"{path}"' for path in paths[:8]) + (", ..." if len(paths) > 8 else "")
    if wanted is None:
        raise OptionError(f"{site}: its values hold several tensors; say which by leaf=, one of {shown}.")
    raise SiteError(f'{site} has no tensor at "{wanted}"; there are {shown}.')


def _no_index(site: Site, index: Any) -> str:
    return f"{site}: got {kind(index)} as an index; wanted a row number, a slice, a list of numbers or a mask of bools."
