"""How numbers, shapes, dtypes and names are written, the same in tables, plots and descriptions.

Only characters that the usual 8-bit terminals also have are used, so that printing to a redirected file cannot fail.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from rich.cells import cell_len
from torch import Tensor

from hookline.stats.pieces import as_float64, pieces
from hookline.stats.summary import Summary

__all__ = [
    "ABSENT",
    "dtype_text",
    "first_values",
    "number",
    "plural",
    "printable",
    "shape_text",
    "shorten",
    "size_text",
    "trouble_text",
    "values_text",
]

ABSENT = "\u2013"
"""Stands in a cell where there is nothing to say."""

_DTYPES = ((r"^bfloat", "bf"), (r"float", "f"), (r"uint", "u"), (r"int", "i"), (r"^complex", "c"), (r"_", ""))


def number(value: float) -> str:
    """Four significant digits; whole numbers below ten million in full; a dash for NaN, which means unknown here."""
    if math.isnan(value):
        return ABSENT
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    text = f"{value:#.4g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.3e}"
    mantissa, _, exponent = text.rstrip(".").partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def plural(count: int, noun: str) -> str:
    """``1 step``, ``3 steps``, with thousands marked."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size_text(count: float) -> str:
    """Bytes in decimal units, as budgets are given: ``1.2 MB``."""
    if count < 1000:
        return plural(int(count), "byte")
    units = ["kB", "MB", "GB", "TB", "PB"]
    while (count := count / 1000) >= 999.95 and len(units) > 1:
        units.pop(0)
    return f"{count:.1f}".removesuffix(".0") + f" {units[0]}"


def shape_text(tensor: Tensor) -> str:
    """``1x64x112x112``; ``scalar`` without dimensions, ``nested`` where there is no common shape."""
    try:
        sizes = tuple(tensor.shape)
    except RuntimeError:
        return "nested"
    return "x".join(map(str, sizes)) if sizes else "scalar"


def dtype_text(dtype: torch.dtype) -> str:
    """``f32``, ``bf16``, ``i64``, ``f8e4m3fn``, ``bool``."""
    text = str(dtype).removeprefix("torch.")
    for pattern, short in _DTYPES:
        text = re.sub(pattern, short, text)
    return text


def trouble_text(summary: Summary) -> str:
    """``NaN 12 Inf 3``, or an empty text when every element is finite."""
    counts = (("NaN", summary.nan), ("Inf", summary.inf))
    return " ".join(f"{name} {count}" for name, count in counts if count)


# ---------------------------------------------------------------- names


def printable(text: str) -> str:
    """A name on one line: line breaks, escape sequences and lone surrogates are written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def shorten(text: str, width: int) -> str:
    """A text in at most ``width`` terminal cells, cut in the middle; names differ at the end, so more of it stays.

    A path is cut at a dot where that is possible: ``10.query`` must not end up as ``0.query``.
    """
    if cell_len(text) <= width:
        return text
    if width < 3:
        return "\u2026"[: max(width, 0)]
    end = _end_of_path(text, width - 4) or _start(text[::-1], (width - 1) * 3 // 5)[::-1]
    return f"{_start(text, width - 1 - cell_len(end))}\u2026{end}"


def _end_of_path(text: str, width: int) -> str:
    """The longest end of a path that begins with a whole level and fits; empty when there is none."""
    levels = text.split(".")
    ends = (".".join(levels[start:]) for start in range(1, len(levels)))
    return next((end for end in ends if cell_len(end) <= width), "")


def _start(text: str, width: int) -> str:
    """As many characters as fit in ``width`` cells; a wide character takes two."""
    end = 0
    while end < len(text) and cell_len(text[: end + 1]) <= width:
        end += 1
    return text[:end]


# ---------------------------------------------------------------- values


def first_values(tensor: Tensor, count: int = 6) -> list[Any]:
    """The first elements in row-major order as Python numbers; empty when they cannot be read.

    Args:
        tensor: Any shape, dtype, layout and device.
        count: How many at most.
    """
    try:
        with torch.no_grad():
            start = _start_of(tensor, count)
            # Sub-byte floats and float8 have no tolist of their own.
            return list((as_float64(start) if start.is_floating_point() else start).tolist())
    except (RuntimeError, NotImplementedError, StopIteration):
        return []


def _start_of(tensor: Tensor, count: int) -> Tensor:
    """Walks down the first entries, because flattening a non-contiguous tensor would copy all of it."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        tensor = next(piece for piece, _ in pieces(tensor) if piece.numel())
    tensor = tensor.detach()
    while tensor.dim() > 1 and tensor.shape[0] and tensor[0].numel() >= count:
        tensor = tensor[0]
    return tensor[:count].reshape(-1)[:count] if tensor.dim() else tensor.reshape(1)


def values_text(values: Sequence[Any], more: bool) -> str:
    """``[0.1230, -1.200, 3, ...]``.

    Args:
        values: Python numbers.
        more: Whether the tensor has further elements.
    """
    shown: Iterable[str] = map(_value_text, values)
    return f"[{', '.join([*shown, '...'] if more else shown)}]"


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, complex):
        imaginary = _value_text(value.imag)
        return f"{_value_text(value.real)}{imaginary if imaginary[0] == '-' else '+' + imaginary}j"
    return "nan" if math.isnan(value) else number(value)
