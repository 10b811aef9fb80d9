"""The statistics of a tensor, in plain torch operations: right for every dtype, layout and size.

A tensor is read in chunks. Each is summarized in float64 on the tensor's device, and the summaries are merged by the
parallel formula, so no float64 copy of the whole tensor ever exists. Very large and very small values are divided by a
power of two first: squares of 1e300 do not overflow, squares of 1e-200 do not vanish.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.errors import ArgumentError, FormatError

__all__ = ["Summary", "as_float64", "merge", "pieces", "summarize"]

CHUNK = 1 << 22
"""Elements of an accelerator's tensor that are upcast at a time: 32 MiB in float64."""

CPU_CHUNK = 1 << 16
"""The same on the CPU: 512 KiB, which stay in the cache between the passes."""

_COUNTS = ("numel", "nan", "inf", "zeros")
_NUMBERS = ("mean", "std", "min", "max", "l2")
_NO_NUMBERS = (math.nan,) * 5


@dataclasses.dataclass(frozen=True)
class Summary:
    """Statistics of one tensor; complex elements count by their magnitude, booleans as 0 and 1.

    Attributes:
        numel: Number of elements.
        mean: Mean of the finite elements, in the unit of the tensor; NaN when there is none, as for the next four.
        std: Standard deviation of the finite elements, with their number as the divisor (population).
        min: Smallest finite element.
        max: Largest finite element.
        l2: Square root of the sum of the squared finite elements.
        nan: Number of NaN elements.
        inf: Number of elements that are +inf or -inf.
        zeros: Number of elements equal to zero.
    """

    numel: int
    mean: float
    std: float
    min: float
    max: float
    l2: float
    nan: int
    inf: int
    zeros: int

    @property
    def finite(self) -> bool:
        """Whether no element is known to be NaN or infinite."""
        return self.nan + self.inf == 0

    @property
    def all_zero(self) -> bool:
        """Whether there are elements and each is zero."""
        return self.numel > 0 and self.zeros == self.numel

    def to_dict(self) -> dict[str, int | float | str]:
        """The fields for JSON; what JSON has no number for becomes ``"nan"``, ``"inf"`` or ``"-inf"``."""
        return {
            name: value if math.isfinite(value) else str(float(value))
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Summary:
        """Read what ``to_dict`` wrote.

        Raises:
            FormatError: A field is missing, unknown, of the wrong type, or contradicts the others.
        """
        _check_names(fields)
        counts = {name: _count(name, fields[name]) for name in _COUNTS}
        if counts["nan"] + counts["inf"] + counts["zeros"] > counts["numel"]:
            raise FormatError(f"summary counts more NaN, Inf and zero elements than its numel: {counts}")
        return cls(**counts, **{name: _number(name, fields[name]) for name in _NUMBERS})  # type: ignore[arg-type]


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
    with torch.no_grad():
        try:
            return merge(_repeated(_summarize_piece(piece), times) for piece, times in pieces(tensor))
        except NotImplementedError:
            return _unknown(tensor.numel())
        except RuntimeError:
            if _has_memory(tensor):
                raise
            return _unknown(tensor.numel())


def merge(summaries: Iterable[Summary]) -> Summary:
    """Summary of all elements together, as if the tensors had been one.

    Args:
        summaries: Summaries of disjoint tensors. Those without a finite element add their counts only.
    """
    parts = list(summaries)
    numel, nan, inf, zeros = (sum(getattr(part, name) for part in parts) for name in _COUNTS)
    counted = [(part.numel - part.nan - part.inf, part) for part in parts]
    # a summary read from a file may have a mean that no elements can have
    known = [(count, part) for count, part in counted if count > 0 and math.isfinite(part.mean)]
    if not known:
        return Summary(numel, *_NO_NUMBERS, nan=nan, inf=inf, zeros=zeros)
    mean, std = _mean_and_std(known)
    low, high = min(part.min for _, part in known), max(part.max for _, part in known)
    return Summary(numel, mean, std, low, high, math.hypot(*(part.l2 for _, part in known)), nan, inf, zeros)


def _mean_and_std(known: list[tuple[int, Summary]]) -> tuple[float, float]:
    """Chan's parallel formula with weights of at most 1, and hypot for the squares, so that nothing overflows."""
    if len(known) == 1:
        return known[0][1].mean, known[0][1].std
    total = sum(count for count, _ in known)
    mean = math.fsum(part.mean * (count / total) for count, part in known)
    # Rounding may push the mean of equal means past them, which would give a constant tensor a deviation.
    mean = min(max(mean, min(part.mean for _, part in known)), max(part.mean for _, part in known))
    spread: list[float] = []
    for count, part in known:
        weight = math.sqrt(count / total)
        spread += (part.std * weight, (part.mean - mean) * weight)
    return mean, math.hypot(*spread)


# ---------------------------------------------------------------- pieces


def pieces(tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
    """The values of a tensor in strided tensors of a bounded size, and how many times each one counts.

    They are views where that is possible. The zeros that a sparse tensor does not store come as one zero and their
    number: a sparse shape can stand for more elements than fit in any memory.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_nested:
        for part in tensor.unbind():
            yield from pieces(part)
    elif tensor.layout is torch.strided:
        yield from _split(tensor.dequantize() if tensor.is_quantized else tensor)
    else:
        yield from _sparse_pieces(tensor)


def _sparse_pieces(tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
    if tensor.layout is torch.sparse_coo:
        values = tensor.coalesce().values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        values = tensor.values()
    else:
        values = tensor.to_dense()
    yield from _split(values)
    absent = tensor.numel() - values.numel()
    if absent:
        yield torch.zeros(1, dtype=values.dtype, device=values.device), absent


def _split(tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
    size = CPU_CHUNK if tensor.device.type == "cpu" else CHUNK
    if tensor.numel() <= size:
        yield tensor, 1
        return
    # Cut across the largest stride: each part is then one run of memory, whatever the order of the dimensions.
    outer = max(range(tensor.dim()), key=lambda dim: (tensor.shape[dim] > 1, tensor.stride(dim)))
    rows = max(1, tensor.shape[outer] * size // tensor.numel())
    for part in torch.split(tensor, rows, dim=outer):
        yield from _split(part)


# ---------------------------------------------------------------- one piece


def _summarize_piece(piece: Tensor) -> Summary:
    if piece.numel() == 0 or piece.device.type == "meta":
        return _unknown(piece.numel())
    x = as_float64(piece)
    zeros = x.numel() - int(torch.count_nonzero(x))
    low, high = _range(x)
    if math.isfinite(low) and math.isfinite(high):
        return Summary(x.numel(), *_moments(x, low, high), nan=0, inf=0, zeros=zeros)
    nan, finite = int(torch.count_nonzero(x.isnan())), x[torch.isfinite(x)]
    moments = _moments(finite, *_range(finite)) if finite.numel() else _NO_NUMBERS
    return Summary(x.numel(), *moments, nan=nan, inf=x.numel() - nan - finite.numel(), zeros=zeros)


def _range(x: Tensor) -> tuple[float, float]:
    """Smallest and largest element; NaN for both when there is one, so two finite ends say that all are finite."""
    low, high = torch.stack(torch.aminmax(x)).tolist()
    return low, high


def _moments(x: Tensor, low: float, high: float) -> tuple[float, float, float, float, float]:
    """Mean, standard deviation, both ends and norm of finite values, shape any, float64; in the order of the fields.

    The first mean carries the rounding of a long sum, which would show where the mean is far larger than the deviation;
    the mean of the deviations from it corrects both.
    """
    scale = _power_of_two(max(abs(low), abs(high)))
    y = x if scale == 1.0 else x / scale
    guess = (y.sum() / y.numel()).clamp(low / scale, high / scale)
    deviation = y - guess
    parts = (guess, deviation.sum(), torch.linalg.vector_norm(deviation), torch.linalg.vector_norm(y))
    middle, rest, spread, norm = torch.stack(parts).tolist()
    correction = rest / y.numel()
    variance = max(spread * spread / y.numel() - correction * correction, 0.0)
    return (middle + correction) * scale, math.sqrt(variance) * scale, low, high, norm * scale


def _power_of_two(magnitude: float) -> float:
    """A scale that divides without rounding; 1 where neither a square nor a sum of squares can leave float64."""
    if magnitude == 0.0 or 1e-100 < magnitude < 1e100:
        return 1.0
    # frexp's exponent less one: 2.0**1024 is no float, and the quotients stay below 2.
    return math.ldexp(1.0, math.frexp(magnitude)[1] - 1)


def as_float64(tensor: Tensor) -> Tensor:
    """Real values in float64 on the tensor's device, or on the CPU where the device has no float64."""
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    return tensor.to(torch.complex128).abs() if tensor.is_complex() else tensor.to(torch.float64)


def _repeated(one: Summary, times: int) -> Summary:
    if times == 1:
        return one
    counts = {name: getattr(one, name) * times for name in _COUNTS}
    return dataclasses.replace(one, l2=one.l2 * math.sqrt(times), **counts)


def _unknown(numel: int) -> Summary:
    return Summary(numel, *_NO_NUMBERS, nan=0, inf=0, zeros=0)


def _has_memory(tensor: Tensor) -> bool:
    """Whether there are values to read: not under a fake mode or inside vmap, where every read fails."""
    try:
        return tensor.untyped_storage().device.type != "meta"
    except (RuntimeError, NotImplementedError):
        return False


# ---------------------------------------------------------------- reading


def _check_names(fields: Mapping[str, Any]) -> None:
    if not isinstance(fields, Mapping):
        raise FormatError(f"a summary is an object with named fields; got {type(fields).__name__}")
    wanted = {*_COUNTS, *_NUMBERS}
    if set(fields) != wanted:
        missing, unknown = sorted(wanted - set(fields)), sorted(map(str, set(fields) - wanted))
        raise FormatError(f"summary fields do not match: missing {missing}, unknown {unknown}")


def _count(name: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise FormatError(f"summary field {name!r} must be a whole number of at least 0; got {value!r}")
    return value


def _number(name: str, value: object) -> float:
    if value in ("nan", "inf", "-inf"):
        return float(value)
    try:
        number = float(value) if type(value) in (int, float) else math.nan  # type: ignore[arg-type]
    except OverflowError:
        number = math.nan
    if not math.isfinite(number):
        raise FormatError(f"summary field {name!r} must be a number, 'nan', 'inf' or '-inf'; got {value!r}")
    return number
