"""The rows of a site as columns: Arrow tables, Parquet files and Zarr groups, a bounded part of them at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hookline.errors import OptionError
from hookline.extras import extra, pip_line
from hookline.record.exact import check_bf16, convert, refuse, target_of
from hookline.record.spans import groups

if TYPE_CHECKING:
    from hookline.record.rows import Rows

__all__ = ["Part", "arrow_table", "write_parquet", "write_zarr"]

_EVERY_CHUNK = {"write_empty_chunks": True}
"""zarr leaves out chunks that equal 0, and takes -0.0 for that where it is complex."""
PART_BYTES = 32 << 20
"""Bytes of rows that are in memory at once: a row group of Parquet, a chunk of Zarr."""
_PLACE = ("step", "call", "backward", "row", "writer")
_IDENTITY = ("id", "position", "token")
_MOST = 2**31 - 1
"""Longest list that Arrow's fixed-size lists can hold."""


class Part(NamedTuple):
    """Rows that follow each other.

    Attributes:
        start: Number of the first.
        place: Step, call, backward pass, row within its value and writer, each of the length of the rows.
        told: Of the columns that say what rows are, the entries, and which of them are known.
        value: The rows, shape (rows, *shape of a row), in the dtype that is written.
    """

    start: int
    place: dict[str, npt.NDArray[np.int64]]
    told: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]
    value: npt.NDArray[Any]


class Told(NamedTuple):
    """A column that says what rows are.

    Attributes:
        text: Whether it holds strings; whole numbers otherwise.
        everywhere: Whether it is known of each row.
    """

    text: bool
    everywhere: bool


def told(rows: Rows) -> dict[str, Told]:
    """The columns that say what the rows are: id, position and token, as far as they are known.

    Raises:
        OptionError: The ids are numbers in some values and strings in others, or strings that are no text.
    """
    kinds: dict[str, list[bool]] = {name: [] for name in _IDENTITY}
    values = [value for value, (*_, count) in enumerate(rows.origins()) if count]
    for value in values:
        for name, column in rows.told(value).items():
            kinds[name].append(_is_text(rows, name, column))
    for name, found in kinds.items():
        if len(set(found)) > 1:
            raise OptionError(
                f"{rows.site}, {rows.leaf}: {name} is a number in some steps and a string in others, which no column "
                "can be. Choose steps with rec.select(..., steps=...)."
            )
    return {name: Told(found[0], len(found) == len(values)) for name, found in kinds.items() if found}


def _is_text(rows: Rows, name: str, column: npt.NDArray[Any]) -> bool:
    if column.dtype == np.int64:
        return False
    try:
        "".join(column).encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise OptionError(
            f"{rows.site}, {rows.leaf}: {name} has to hold int64 or strings of Unicode ({error}). Record with other "
            'ids, or pass to="npz".'
        ) from error
    return True


def target(rows: Rows, to: str, bf16: str | None) -> str:
    """The dtype in which the rows are written.

    Raises:
        OptionError: The format has no exact form of theirs.
    """
    dtype = _name(rows)
    found = target_of(dtype, to, bf16)
    if found is None:
        raise refuse(f"{rows.site}, {rows.leaf}", dtype, to)
    return found


def parts(rows: Rows, to: str, bf16: str | None) -> Iterator[Part]:
    """The rows in order, some at a time."""
    dtype, wanted, count, said = _name(rows), target(rows, to, bf16), part_rows(rows), told(rows)
    writers = np.array(rows.writers(), dtype=np.int64)
    origins = np.array(rows.origins(), dtype=np.int64).reshape(-1, 4)
    ends = np.cumsum(origins[:, 3])
    for start in range(0, len(rows), count):
        numbers = np.arange(start, min(start + count, len(rows)), dtype=np.int64)
        values = np.searchsorted(ends, numbers, side="right")
        step, call, backward, _ = origins[values].T
        row = numbers - (ends - origins[:, 3])[values]
        place = dict(zip(_PLACE, (step, call, backward, row, writers[values]), strict=True))
        identity = _identity(rows, said, values, row)
        yield Part(start, place, identity, _array(convert(rows[start : start + count], dtype, wanted)))


def _identity(
    rows: Rows, said: dict[str, Told], values: npt.NDArray[np.int64], row: npt.NDArray[np.int64]
) -> dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]:
    """What some rows are, given by the numbers of their values and their places in these."""
    count = len(values)
    found: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]] = {}
    for name, column in said.items():
        entries: npt.NDArray[Any] = np.full(count, "", dtype=object) if column.text else np.zeros(count, np.int64)
        found[name] = entries, np.zeros(count, np.bool_)
    for value, here in groups(values) if said else ():
        for name, told_column in rows.told(value).items():
            entries, known = found[name]
            entries[here], known[here] = told_column[row[here]], True
    return found


def part_rows(rows: Rows) -> int:
    """How many rows make a part."""
    return max(1, PART_BYTES // max(1, int(rows.dtype.itemsize) * math.prod(rows.shape[1:])))


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = tensor.cpu().contiguous().numpy()
    return found


def _name(rows: Rows) -> str:
    return str(rows.dtype).removeprefix("torch.")


# ---------------------------------------------------------------- Arrow


def arrow_table(rows: Rows, bf16: str | None) -> Any:
    """The rows as a ``pyarrow.Table``; see ``Rows.to_arrow``."""
    check_bf16(bf16)
    arrow = extra("pyarrow", "parquet", "a table of Arrow")
    schema = _schema(arrow, rows, bf16)
    return arrow.Table.from_batches(_batches(arrow, schema, rows, bf16), schema)


def write_parquet(path: Path, rows: Rows, bf16: str | None) -> None:
    """Write the rows as one file, a part as a row group."""
    arrow, parquet = (extra(name, "parquet", 'to="parquet"') for name in ("pyarrow", "pyarrow.parquet"))
    schema = _schema(arrow, rows, bf16)
    with parquet.ParquetWriter(os.fspath(path), schema, use_dictionary=[*_PLACE, *_IDENTITY]) as writer:
        for batch in _batches(arrow, schema, rows, bf16):
            writer.write_batch(batch, row_group_size=len(batch))


def check_parquet(rows: Rows, bf16: str | None) -> None:
    """Complain about rows that Parquet cannot hold, before anything is written."""
    extra("pyarrow.parquet", "parquet", 'to="parquet"')
    target(rows, "parquet", bf16)
    told(rows)
    size = math.prod(rows.shape[1:])
    if not 0 < size <= _MOST:
        raise OptionError(
            f"{rows.site}, {rows.leaf}: its rows have {size} elements, a list in Parquet has 1 to {_MOST}. Leave the "
            'site out, or pass to="npz" or to="zarr".'
        )


def _schema(arrow: Any, rows: Rows, bf16: str | None) -> Any:
    element = arrow.from_numpy_dtype(np.dtype(target(rows, "parquet", bf16)))
    about = {"site": str(rows.site), "leaf": rows.leaf, "dtype": _name(rows), "shape": json.dumps([*rows.shape[1:]])}
    fields = [arrow.field(name, arrow.int64(), nullable=False) for name in _PLACE]
    for name, column in told(rows).items():
        kind = arrow.string() if column.text else arrow.int64()
        fields.append(arrow.field(name, kind, nullable=not column.everywhere))
    value = arrow.field("value", arrow.list_(element, math.prod(rows.shape[1:])))
    return arrow.schema([*fields, value], {f"hookline.{key}": _utf8(text) for key, text in about.items()})


def _batches(arrow: Any, schema: Any, rows: Rows, bf16: str | None) -> Iterator[Any]:
    kind = schema.field("value").type
    for part in parts(rows, "parquet", bf16):
        if kind.list_size:
            value = arrow.FixedSizeListArray.from_arrays(arrow.array(part.value.reshape(-1)), type=kind)
        else:  # from_arrays could not tell how many empty lists there are
            value = arrow.array([[]] * len(part.value), type=kind)
        identity = [
            arrow.array(entries, type=schema.field(name).type, mask=~known)
            for name, (entries, known) in part.told.items()
        ]
        yield arrow.RecordBatch.from_arrays([*map(arrow.array, part.place.values()), *identity, value], schema=schema)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


# ---------------------------------------------------------------- Zarr


def need_zarr() -> Any:
    """The package, of a version that writes format 3."""
    zarr = extra("zarr", "zarr", 'to="zarr"')
    if int(zarr.__version__.partition(".")[0]) < 3:
        raise OptionError(
            f'to="zarr" needs zarr 3, this is {zarr.__version__}; with Python 3.11 or newer run: {pip_line("zarr")}'
        )
    return zarr


def open_zarr(folder: Path) -> Any:
    """A new group, of format 3."""
    return need_zarr().open_group(os.fspath(folder), mode="w", zarr_format=3)


def write_zarr(group: Any, name: str, rows: Rows, bf16: str | None) -> None:
    """Write the rows as a group with the arrays ``value``, ``step``, ``call``, ``backward``, ``row`` and ``writer``.

    Where it is known what rows are there are ``id``, ``position`` and ``token`` too; where it is known of some only,
    ``id_known`` and so on say of which.
    """
    about = {"site": str(rows.site), "leaf": rows.leaf, "dtype": _name(rows)}
    made = group.create_group(name, attributes={key: _utf8(text).decode() for key, text in about.items()})
    count, dtype = part_rows(rows), np.dtype(target(rows, "zarr", bf16))
    value = made.create_array(
        "value", shape=tuple(rows.shape), dtype=dtype, chunks=_chunks(count, rows.shape), config=_EVERY_CHUNK
    )
    said = told(rows)
    kinds: dict[str, Any] = dict.fromkeys(_PLACE, np.int64)
    kinds |= {key: str if column.text else np.int64 for key, column in said.items()}
    kinds |= {f"{key}_known": np.bool_ for key, column in said.items() if not column.everywhere}
    arrays = {
        key: made.create_array(
            key, shape=(len(rows),), dtype=kind, chunks=_chunks(count, rows.shape[:1]), config=_EVERY_CHUNK
        )
        for key, kind in kinds.items()
    }
    for part in parts(rows, "zarr", bf16):
        span = slice(part.start, part.start + len(part.value))
        whole = {key: entries for key, (entries, _) in part.told.items()}
        whole |= {f"{key}_known": known for key, (_, known) in part.told.items()}
        for key, array in arrays.items():
            array[span] = part.place[key] if key in part.place else whole[key]
        if part.value.size:
            value[span] = part.value


def _chunks(count: int, shape: Sequence[int]) -> tuple[int, ...]:
    """A part is one chunk, so that none is written twice."""
    return (min(count, max(1, shape[0])), *(max(1, size) for size in shape[1:]))
