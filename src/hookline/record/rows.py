"""The rows of one site over all calls, steps and writers, as one array with random access."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookline.errors import ArgumentError, OptionError, SiteError
from hookline.record.columns import arrow_table
from hookline.report.text import plural
from hookline.sites import Site
from hookline.spelling import kind

__all__ = ["RowPlace", "Rows"]

_NONE, _UNKNOWN = -1, -2
_OPEN = 1024
"""Values that are kept at hand; on disk, each is a view of a mapped file."""


class RowPlace(NamedTuple):
    """Where a row comes from.

    Attributes:
        step: Step.
        call: Number of the call of the module in that step.
        backward: Number of the backward pass through that call; 0 for values of the forward.
        row: Index along the first dimension of the value.
    """

    step: int
    call: int
    backward: int
    row: int


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
        self.leaf = _leaf(site, layouts, leaf)
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
                    f"{site}, {self.leaf}: {_where(event)} has {dtype} {list(other)}, {_where(first)} has {self.dtype} "
                    f"{list(shape)}; rows need one dtype, and one shape but for the first dimension. Choose steps with "
                    "rec.select(..., steps=...), or read the values by rec[path].calls."
                )
        self._values = [(event, place) for event, place, _, _ in found]
        counts = [other[0] if other else 1 for _, _, _, other in found]
        self._ends: npt.NDArray[np.int64] = np.cumsum(counts, dtype=np.int64)
        self._begins = self._ends - np.array(counts, dtype=np.int64)
        self.shape = torch.Size((int(self._ends[-1]), *shape[1:]))
        self._forget()

    def _forget(self) -> None:
        # of a function that does not hold us, or only the garbage collector could free the values
        self._value = functools.lru_cache(maxsize=_OPEN)(functools.partial(_read, self._values))
        self._spans: _Spans | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_value", "_spans")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return int(self.shape.numel() * self.dtype.itemsize)

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
        return RowPlace(event.step, event.call, event.backward, row)

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

        Its columns are step, call, backward, row (within the value) and value: a list of fixed size, row by row, whose
        shape stands in the metadata of the schema as ``hookline.shape``.

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

    def _range(self, start: int, stop: int) -> Tensor:
        parts = []
        while start < stop:
            value, row = self._find(start)
            end = min(stop, int(self._ends[value]))
            parts.append(self._value(value)[row : row + end - start])
            start = end
        return torch.cat(parts) if parts else self._value(0)[:0].clone()

    def _numbers(self, index: Any) -> npt.NDArray[np.int64]:
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
        if self._spans is None:
            self._spans = _Spans(self._values)
        spans, starts = self._spans.of(values)
        if (spans < 0).any():
            return torch.stack([self._value(value)[row] for value, row in zip(values, rows, strict=True)])
        size = self.dtype.itemsize * self.shape[1:].numel()
        if not size:
            return torch.empty((numbers.size, *self.shape[1:]), dtype=self.dtype)
        found = self._spans.gather(spans, starts + rows * size, size)
        return torch.from_numpy(found).view(self.dtype).view(numbers.size, *self.shape[1:])


class _Spans:
    """Where the bytes of the values lie: several lie in one file.

    Attributes:
        memory: Pieces of memory, as bytes.
    """

    def __init__(self, values: list[tuple[Any, int]]) -> None:
        self.memory: list[npt.NDArray[np.uint8]] = []
        self._values = values
        self._by_id: dict[int, int] = {}
        self._span = np.full(len(values), _UNKNOWN, dtype=np.int64)
        self._start = np.zeros(len(values), dtype=np.int64)

    def of(self, values: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Number of the piece of memory of each value, -1 where it has none, and where in it the value begins."""
        for value in np.unique(values[self._span[values] == _UNKNOWN]).tolist():
            event, place = self._values[value]
            found = event.span(place)
            self._span[value] = _NONE if found is None else self._number(found[0])
            self._start[value] = 0 if found is None else found[1]
        return self._span[values], self._start[values]

    def gather(self, spans: npt.NDArray[np.int64], begins: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.uint8]:
        """Pieces of ``size`` bytes, one below the other."""
        if (spans == spans[0]).all():
            return self._pieces(int(spans[0]), size)[begins]
        found = np.empty((len(spans), size), dtype=np.uint8)
        order = np.argsort(spans, kind="stable")
        bounds = np.flatnonzero(np.diff(spans[order], prepend=_NONE, append=_NONE))
        for start, stop in itertools.pairwise(bounds.tolist()):
            chosen = order[start:stop]
            found[chosen] = self._pieces(int(spans[chosen[0]]), size)[begins[chosen]]
        return found

    def _pieces(self, span: int, size: int) -> npt.NDArray[np.uint8]:
        """Every piece of so many bytes, by its first byte."""
        memory = self.memory[span]
        return np.ndarray((len(memory) - size + 1, size), np.uint8, buffer=memory, strides=(1, 1))

    def _number(self, memory: npt.NDArray[np.uint8]) -> int:
        number = self._by_id.setdefault(id(memory), len(self.memory))
        if number == len(self.memory):
            self.memory.append(memory)
        return number


def _read(values: list[tuple[Any, int]], value: int) -> Tensor:
    event, place = values[value]
    tensor: Tensor = event.leaf(place)
    return tensor if tensor.dim() else tensor[None]


def _leaf(site: Site, layouts: list[list[tuple[str, torch.dtype, torch.Size]]], wanted: str | None) -> str:
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


def _where(event: Any) -> str:
    return f"call {event.call} of step {event.step}"


def _no_index(site: Site, index: Any) -> str:
    return f"{site}: got {kind(index)} as an index; wanted a row number, a slice, a list of numbers or a mask of bools."
