"""Computing statistics: right for every dtype, layout and size.

On the CPU the C kernel does it in one read; see ``native``. What follows is for what the kernel does not take, and for
where there is none: plain torch operations, which are also what the kernel is held against.

A tensor is read in chunks. Each is summarized in float64 on the tensor's device, and the summaries are merged by the
parallel formula, so no float64 copy of the whole tensor ever exists. Small tensors of one kind are summarized together,
as the rows of one matrix, with the same result. Very large and very small values are divided by a power of two first:
squares of 1e300 do not overflow, squares of 1e-200 do not vanish.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hookline.errors import ArgumentError
from hookline.stats import native
from hookline.stats.pieces import as_float64, has_memory, pieces
from hookline.stats.summary import COUNTS, Row, Summary, merge, of_row, unknown

__all__ = ["row_of", "summarize", "summarize_all"]

_SMALL = 1 << 12
"""Elements up to which tensors are summarized together: beyond, the operations themselves take the time."""
_TOGETHER = 1 << 16
"""Elements that are summarized together, 512 KiB in float64, which stay in the cache."""
_FAR = 5.0
"""Mean square by variance beyond which the mean is taken off first; below, that loses two bits at most."""


def summarize(tensor: Tensor) -> Summary:
    """Compute the statistics of a tensor without changing or keeping it.

    Args:
        tensor: Any shape, dtype, layout and device. Sparse and nested tensors count as the dense values they stand
            for; of a DTensor the local shard counts, because a collective here could hang the training.

    Returns:
        The summary, computed in float64. When the values cannot be read (meta and fake tensors, sub-byte dtypes), only
        ``numel`` is known: the statistics are NaN and the counts 0.

    Raises:
        ArgumentError: The argument is no tensor.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"summarize takes a torch.Tensor; got {type(tensor).__name__}")
    if (row := native.row_of(tensor)) is not None:
        return of_row(row)
    with torch.no_grad():
        try:
            return _summarize(tensor)
        except NotImplementedError:
            return unknown(tensor.numel())
        except RuntimeError:
            if has_memory(tensor):
                raise
            return unknown(tensor.numel())


def _summarize(tensor: Tensor) -> Summary:
    found = [_repeated(_summarize_piece(piece), times) for piece, times in pieces(tensor)]
    return found[0] if len(found) == 1 else merge(found)


def row_of(tensor: Tensor) -> Row:
    """What ``summarize`` computes as a row of ``FIELDS``, without making a summary of it."""
    row = native.row_of(tensor)
    return dataclasses.astuple(summarize(tensor)) if row is None else row


def summarize_all(tensors: Sequence[Tensor]) -> list[Summary]:
    """The same as ``summarize`` of each, to the bit, in less time where many of them are small.

    Args:
        tensors: As for ``summarize``.

    Raises:
        ArgumentError: One of them is no tensor.
    """
    found: list[Summary | None] = [None] * len(tensors)
    alike: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if type(tensor) is Tensor and _is_small(tensor):
            alike.setdefault((tensor.dtype, tensor.shape), []).append(number)
    for (_, shape), numbers in alike.items():
        if native.takes(tensors[numbers[0]]):
            for number, row in zip(numbers, native.rows_of([tensors[number] for number in numbers]), strict=True):
                found[number] = None if row is None else of_row(row)
            continue
        count = max(1, _TOGETHER // shape.numel())
        for start in range(0, len(numbers), count):
            some = numbers[start : start + count]
            with contextlib.suppress(RuntimeError, NotImplementedError), torch.no_grad():  # each says why below
                rows = torch.stack([tensors[number] for number in some]).view(len(some), -1)
                for number, summary in zip(some, _summarize_rows(rows), strict=True):
                    found[number] = summary
    return [summarize(tensors[n]) if summary is None else summary for n, summary in enumerate(found)]


def _is_small(tensor: Tensor) -> bool:
    """Whether a plain tensor can be a row among others."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_neg())
        and 0 < tensor.numel() <= _SMALL
        and tensor.is_contiguous()
    )


# ---------------------------------------------------------------- one piece


def _summarize_piece(piece: Tensor) -> Summary:
    if piece.numel() == 0 or piece.device.type == "meta":
        return unknown(piece.numel())
    order = sorted(range(piece.dim()), key=piece.stride, reverse=True)  # as it lies in memory, where it has no holes
    flat = piece.permute(order).reshape(1, -1)
    if (row := native.row_of(flat)) is not None:
        return of_row(row)
    return _summarize_rows(flat)[0]


def _summarize_rows(rows: Tensor) -> list[Summary]:
    """Of each row of a matrix; what a row gives does not depend on the others.

    Args:
        rows: (rows, elements) of any dtype, at least one element.
    """
    x = as_float64(rows)
    ends = rows if rows.dtype is torch.float32 else x  # half the bytes, and the same ends
    zeros = _zeros(x, owned=x is not rows)
    size, found, far = x.shape[1], list[Summary](), list[int]()
    smallest = _smallest_normal(rows.dtype)
    for row, (low, high, total, squares) in enumerate(_sums(x, ends)):
        if not _is_plain(low, high):
            found.append(_summarize_any(x[row], zeros[row], smallest))
            continue
        mean = min(max(total / size, low), high)
        variance = max(squares / size - mean * mean, 0.0)
        far += [row] if squares > _FAR * variance * size else []
        small = _subnormal(x[row], smallest)
        found.append(
            Summary(size, mean, math.sqrt(variance), low, high, math.sqrt(squares), 0, 0, 0, zeros[row], small)
        )
    if far:
        moments = _around(x[far] if len(far) < len(found) else x, [found[row].mean for row in far])
        for row, (mean, std) in zip(far, moments, strict=True):
            found[row] = dataclasses.replace(found[row], mean=mean, std=std)
    return found


def _sums(x: Tensor, ends: Tensor) -> list[list[float]]:
    """Smallest and largest element, sum and sum of squares of each row; NaN for both ends where there is one.

    Args:
        x: (rows, elements), float64.
        ends: The same elements, perhaps in another dtype.
    """
    if x.is_cpu and x.shape[1] > _SMALL:  # it is alone, and what is made for one row takes half the time
        flat = x[0]
        return [[part.item() for part in (*torch.aminmax(ends), flat.sum(), torch.dot(flat, flat))]]
    return torch.stack((ends.amin(1).to(x.dtype), ends.amax(1).to(x.dtype), x.sum(1), (x * x).sum(1)), 1).tolist()


def _around(x: Tensor, guesses: list[float]) -> list[tuple[float, float]]:
    """Mean and standard deviation of each row, from a guess at the mean.

    The guess carries the rounding of a long sum, which would show where the mean is far larger than the deviation; the
    mean of the deviations from it corrects both.

    Args:
        x: (rows, elements), float64.
        guesses: Of each row.
    """
    deviation = x - torch.tensor(guesses, dtype=x.dtype, device=x.device)[:, None]
    columns = torch.stack((deviation.sum(1), torch.linalg.vector_norm(deviation, dim=1)), 1).tolist()
    found = []
    for guess, (rest, spread) in zip(guesses, columns, strict=True):
        correction = rest / x.shape[1]
        variance = max(spread * spread / x.shape[1] - correction * correction, 0.0)
        found.append((guess + correction, math.sqrt(variance)))
    return found


def _summarize_any(x: Tensor, zeros: int, smallest: float) -> Summary:
    """Of values that are very large or small, or not finite.

    Args:
        x: (elements,), float64.
        zeros: How many of them are zero.
        smallest: The smallest normal number of the dtype that they had.
    """
    nan, finite = int(torch.count_nonzero(x.isnan())), x[torch.isfinite(x)]
    inf, negative = x.numel() - nan - finite.numel(), int(torch.count_nonzero(x == -math.inf))
    counts = {"numel": x.numel(), "nan": nan, "inf": inf, "neg_inf": negative, "zeros": zeros}
    counts["subnormal"] = _subnormal(x, smallest)
    if not finite.numel():
        return dataclasses.replace(unknown(x.numel()), **counts)
    low, high = torch.stack((finite.min(), finite.max())).tolist()
    scale = _power_of_two(max(abs(low), abs(high)))
    y = finite / scale
    guess = min(max(float(y.sum()) / y.numel(), low / scale), high / scale)
    ((mean, std),) = _around(y[None], [guess])
    l2 = float(torch.linalg.vector_norm(y)) * scale
    return Summary(mean=mean * scale, std=std * scale, min=low, max=high, l2=l2, **counts)


def _zeros(x: Tensor, *, owned: bool) -> list[int]:
    """How many elements of each row are zero.

    Args:
        x: (rows, elements), float64.
        owned: Whether its memory is ours: a pointer to that of others would make a copy-on-write snapshot real.
    """
    if owned and x.shape[0] == 1 and x.is_cpu:
        return [int(np.count_nonzero(x.numpy() == 0))]  # three times as fast
    return [int(count) for count in torch.eq(x, 0, out=torch.empty_like(x)).sum(1).tolist()]


def _smallest_normal(dtype: torch.dtype) -> float:
    """Of a floating or complex dtype; 0 for the others."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    return torch.finfo(dtype).smallest_normal if dtype.is_floating_point else 0.0


def _subnormal(x: Tensor, smallest: float) -> int:
    """How many elements are below the smallest normal number and not zero.

    Args:
        x: (elements,), float64.
        smallest: Of the dtype that they had.
    """
    if not smallest:
        return 0
    small = x.abs() < smallest
    return int(torch.count_nonzero(small & (x != 0))) if bool(small.any()) else 0


def _is_plain(low: float, high: float) -> bool:
    """Whether all is finite, and no square and no sum of squares can leave float64."""
    largest = max(abs(low), abs(high))  # NaN is the result of both ends where there is one
    return low == high == 0.0 or 1e-100 < largest < 1e100


def _power_of_two(magnitude: float) -> float:
    """A scale that divides without rounding; 1 where neither a square nor a sum of squares can leave float64."""
    if magnitude == 0.0 or 1e-100 < magnitude < 1e100:
        return 1.0
    # frexp's exponent less one: 2.0**1024 is no float, and the quotients stay below 2.
    return math.ldexp(1.0, math.frexp(magnitude)[1] - 1)


def _repeated(one: Summary, times: int) -> Summary:
    if times == 1:
        return one
    counts = {name: getattr(one, name) * times for name in COUNTS}
    return dataclasses.replace(one, l2=one.l2 * math.sqrt(times), **counts)
