"""From what a user hands over to plain arrays, with errors that say what would have been right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.errors import ArgumentError, OptionError
from hookline.fp8 import dequantize
from hookline.report.text import plural, shape_text
from hookline.stats.pieces import as_float64
from hookline.values import walk

__all__ = ["Array", "indices", "one_tensor", "to_array"]

Array = np.ndarray[Any, np.dtype[np.float64]]


def one_tensor(value: Any, caller: str) -> Tensor:
    """The tensor to draw: the value itself, its ``.output``, or the only tensor inside it.

    Raises:
        ArgumentError: There is no tensor, or more than one.
    """
    if not isinstance(value, Tensor) and hasattr(value, "output"):
        value = value.output
    tensors = [(path, leaf) for path, leaf in walk(dequantize(value), "value") if isinstance(leaf, Tensor)]
    if len(tensors) == 1:
        return tensors[0][1]
    if not tensors:
        raise ArgumentError(f"{caller} takes a torch.Tensor, or a call with an output; got {type(value).__name__}")
    names = ", ".join(f"{path} ({shape_text(tensor)})" for path, tensor in tensors[:6])
    raise ArgumentError(f"{caller} draws one tensor; got {plural(len(tensors), 'tensor')}: {names}; pass one of them")


def to_array(tensor: Tensor) -> Array:
    """Values as float64 on the CPU; complex ones as magnitudes.

    Raises:
        OptionError: The tensor has no values that can be read.
    """
    try:
        with torch.no_grad():
            dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
            dense = dense.dequantize() if dense.is_quantized else dense
            return as_float64(dense).cpu().resolve_neg().numpy()
    except (RuntimeError, NotImplementedError) as error:
        where = f"dtype {tensor.dtype} on {tensor.device}"
        raise OptionError(f"the values of a tensor with {where} cannot be read, so there is nothing to draw") from error


def indices(name: str, wanted: int | Sequence[int] | None, size: int) -> list[int]:
    """Which of ``size`` things to draw: the first n for a number, those named for a sequence, all for None.

    Raises:
        ArgumentError: Neither a number nor a sequence of numbers.
        OptionError: Out of range, or nothing.
    """
    if wanted is None:
        return list(range(size))
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        if wanted < 1:
            raise OptionError(f"{name} must be at least 1, or a list of numbers; got {wanted}")
        return list(range(min(wanted, size)))
    if isinstance(wanted, (str, bool)) or not hasattr(wanted, "__iter__"):
        raise ArgumentError(f"{name} must be a number or a list of numbers; got {type(wanted).__name__}")
    chosen = [index_of(name, one, size) for one in wanted]
    if not chosen:
        raise OptionError(f"{name} must name at least one of 0 to {size - 1}; got an empty list")
    return chosen


def index_of(name: str, index: Any, size: int) -> int:
    """One index, counted from the end when negative.

    Raises:
        ArgumentError: Not a whole number.
        OptionError: Out of range.
    """
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise ArgumentError(f"{name} must be whole numbers; got {index!r}")
    number = int(index)
    if not -size <= number < size:
        raise OptionError(f"{name} {number} is out of range: there are {size}, so 0 to {size - 1} or -{size} to -1")
    return number % size
