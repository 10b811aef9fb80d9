"""The C kernel: which tensors it takes, and what it gives.

It is a plain shared library beside this file, built with the wheel where there was a C compiler. Without it everything
is computed in torch operations, which give the same numbers more slowly.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline.hooks.torch_private import address, openmp_parallel, storage_bytes
from hookline.stats.summary import FIELDS, Row

__all__ = ["available", "row_of", "rows_of", "takes"]

LIBRARY = Path(__file__).with_name("_kernel.so")
_ALONE = 1 << 16
"""Elements up to which one thread is faster, and the interpreter is not let go."""

_KINDS: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int16: 4,
    torch.uint16: 5,
    torch.int32: 6,
    torch.uint32: 7,
    torch.int64: 8,
    torch.uint64: 9,
}
_ONE_BYTE = 16
"""Kind of a dtype of one byte, whose values the kernel gets as a table."""


def _float_of(byte: int, *, mantissa: int, bias: int, nan: Container[int], infinite: int = 256) -> float:
    """The value of a byte as a float with a sign, ``7 - mantissa`` bits of exponent and ``mantissa`` more."""
    if byte in nan:
        return math.nan
    magnitude, sign = byte & 0x7F, -1.0 if byte & 0x80 else 1.0
    exponent, fraction = magnitude >> mantissa, magnitude & ((1 << mantissa) - 1)
    if magnitude == infinite:
        return sign * math.inf
    whole = (1 << mantissa) + fraction if exponent else fraction
    return sign * math.ldexp(whole, max(exponent, 1) - bias - mantissa)


def _e8m0(byte: int) -> float:
    return math.nan if byte == 255 else math.ldexp(1.0, byte - 127)


_E4M3FN = functools.partial(_float_of, mantissa=3, bias=7, nan=(0x7F, 0xFF))
_E4M3FNUZ = functools.partial(_float_of, mantissa=3, bias=8, nan=(0x80,))
_E5M2 = functools.partial(_float_of, mantissa=2, bias=15, nan=(0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), infinite=0x7C)
_E5M2FNUZ = functools.partial(_float_of, mantissa=2, bias=16, nan=(0x80,))

_OF_ONE_BYTE: dict[str, tuple[Callable[[int], float], float]] = {
    "float8_e4m3fn": (_E4M3FN, 2.0**-6),
    "float8_e4m3fnuz": (_E4M3FNUZ, 2.0**-7),
    "float8_e5m2": (_E5M2, 2.0**-14),
    "float8_e5m2fnuz": (_E5M2FNUZ, 2.0**-15),
    "float8_e8m0fnu": (_e8m0, 0.0),
    "int8": (lambda byte: float(byte - 256 * (byte > 127)), 0.0),
    "uint8": (float, 0.0),
    "bool": (lambda byte: float(byte != 0), 0.0),
}
"""What each byte means, and the smallest normal number; 0 where nothing is subnormal. No torch operation computes them:
this runs at import, perhaps inside somebody's device or fake mode."""

_ONE_BYTE_DTYPES = {getattr(torch, name): of for name, of in _OF_ONE_BYTE.items() if hasattr(torch, name)}

_ROW: Any = ctypes.c_double * len(FIELDS)
"""What the kernel writes of one tensor."""


class _Kernel:
    """The library, its functions with and without the interpreter's lock, and tables for dtypes of one byte."""

    def __init__(self, path: Path) -> None:
        free, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        one = (pointer, number, ctypes.c_int, pointer, ctypes.c_double, pointer, ctypes.c_int, ctypes.c_int, pointer)
        many = (pointer, pointer, number, ctypes.c_int, pointer, ctypes.c_double, pointer, ctypes.c_int)
        for library in (free, held):
            library.hookline_summarize.argtypes = one
            library.hookline_summarize_many.argtypes = many
            library.hookline_summarize_many.restype = None
        self.large, self.small = free.hookline_summarize, held.hookline_summarize
        self.many = free.hookline_summarize_many
        self.level = free.hookline_levels() - 1
        self.parallel = openmp_parallel()
        self.tables = {dtype: _table(*of) for dtype, of in _ONE_BYTE_DTYPES.items()}

    def kind(self, dtype: torch.dtype) -> tuple[int, Any, float]:
        """Number of a dtype, its table and its smallest normal number."""
        found = _KINDS.get(dtype)
        if found is not None:
            return found, None, 0.0
        table, smallest = self.tables[dtype]
        return _ONE_BYTE, table, smallest


def _table(value: Callable[[int], float], smallest: float) -> tuple[Any, float]:
    """The value of each byte for C, and the smallest normal number."""
    return (ctypes.c_double * 256)(*map(value, range(256))), smallest


def _load() -> _Kernel | None:
    if os.environ.get("HOOKLINE_KERNEL", "1") == "0" or not LIBRARY.exists():
        return None
    try:
        return _Kernel(LIBRARY)
    except (OSError, AttributeError):  # built for another machine, or of another release
        return None


_kernel = _load()
_forked = False


def _after_fork() -> None:
    """The child of a fork has none of the threads of its parent's OpenMP, which would wait for them forever."""
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def available() -> bool:
    """Whether the kernel is there."""
    return _kernel is not None


def takes(tensor: Tensor) -> bool:
    """Whether the kernel can read a tensor: a plain one on the CPU, one run of memory."""
    return (
        _kernel is not None
        and (type(tensor) is Tensor or type(tensor) is torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and (tensor.dtype in _KINDS or tensor.dtype in _kernel.tables)
        and not (tensor.is_nested or tensor.is_neg())
        and (tensor.is_contiguous() or _is_one_run(tensor))
    )


def _is_one_run(tensor: Tensor) -> bool:
    """Whether the elements lie in one run of memory in another order, such as channels last."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _readable(tensor: Tensor) -> int | None:
    """Where a tensor lies; None where the kernel must not look: no memory, too little of it, or not aligned."""
    where, size, width = address(tensor), tensor.numel(), tensor.element_size()
    if where is None or where % width or (size and not where):
        return None
    has = storage_bytes(tensor)  # a storage that was resized may be smaller than what it should hold
    return None if has is None or (int(tensor.storage_offset()) + size) * width > has else where


def row_of(tensor: Tensor) -> Row | None:
    """``FIELDS`` of a tensor; None where they have to be computed otherwise."""
    kernel = _kernel
    if kernel is None or not takes(tensor):
        return None
    where, size = _readable(tensor), tensor.numel()
    if where is None:
        return None
    kind, table, smallest = kernel.kind(tensor.dtype)
    row = _ROW()  # a signal handler may come in between, so each call has its own
    if size <= _ALONE:
        failed = kernel.small(where, size, kind, table, smallest, row, kernel.level, 1, None)
    else:
        threads = 1 if _forked else torch.get_num_threads()
        failed = kernel.large(where, size, kind, table, smallest, row, kernel.level, threads, kernel.parallel)
    found = tuple(row)
    return None if failed or (kind == 1 and _leaves_doubles(found)) else found


def rows_of(tensors: Sequence[Tensor]) -> list[Row | None]:
    """The same for tensors of one dtype and at most 32,768 elements each that the kernel takes, in one call."""
    kernel = _kernel
    if kernel is None:
        return [None] * len(tensors)
    places = [_readable(tensor) or 0 for tensor in tensors]
    sizes = [tensor.numel() for tensor in tensors]
    if not all(places):
        return [row_of(tensor) for tensor in tensors]
    count, width = len(tensors), len(FIELDS)
    kind, table, smallest = kernel.kind(tensors[0].dtype)
    rows = (ctypes.c_double * (width * count))()
    addresses = (ctypes.c_uint64 * count)(*places)
    kernel.many(addresses, (ctypes.c_int64 * count)(*sizes), count, kind, table, smallest, rows, kernel.level)
    found = [tuple(rows[start : start + width]) for start in range(0, width * count, width)]
    return [None if kind == 1 and _leaves_doubles(row) else row for row in found]


def _leaves_doubles(row: Row) -> bool:
    """Whether squares of the elements are too large or too small for float64."""
    largest = max(abs(row[3]), abs(row[4]))
    return not (1e-100 < largest < 1e100) and largest != 0.0 and largest == largest
