"""Floating values in eight bits with one scale per row, and back: ``dtype="fp8"``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.values import Arguments, Fields, Scaled, walk

__all__ = [
    "FP8",
    "can_scale",
    "dequantize",
    "has_scaled",
    "nbytes_of",
    "restored",
    "scaled",
    "scaled_places",
    "whole_leaves",
]

FP8 = "fp8"
"""The option, and the type name of the two tensors as they are kept."""

_DATA = torch.float8_e4m3fn
_LARGEST = 448.0
"""The largest number of ``float8_e4m3fn``, which has 3 mantissa bits and no infinity."""
_SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: a smaller scale would have few bits, and none where denormals are flushed to zero."""
_WIDEST = _LARGEST * torch.finfo(torch.float32).max
"""The largest number that a float32 scale can reach."""


# ---------------------------------------------------------------- to eight bits


def can_scale(tensor: Tensor) -> bool:
    """Whether a tensor is kept in eight bits: floating, wider than that, with a dimension, dense and plain."""
    return (
        tensor.is_floating_point()
        and tensor.dtype.itemsize > 1
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.dim() > 0
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor that `can_scale`, in eight bits: one for each element and four for each row."""
    shape = tensor.shape
    return shape.numel() + 4 * shape[:-1].numel()


def scaled(tensor: Tensor) -> Scaled:
    """A floating tensor as ``float8_e4m3fn`` data and a float32 scale for each row along its last dimension.

    The scale is the largest magnitude among the finite elements of the row, by 448, at least 2**-126; 1 for a row
    without any or of zeros. What is not finite becomes NaN.

    Args:
        tensor: (..., n), any floating dtype that is wider, without a graph.

    Returns:
        data (..., n), scale (..., 1), on its device.

    Raises:
        OptionError: A finite number is too large for any float32 scale, which only float64 has.
    """
    wide = tensor.as_subclass(Tensor).to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    largest = _largest(wide)
    if wide.device.type != "cpu" or not largest.isfinite().all():  # elsewhere, to ask would wait for the device
        finite = wide.isfinite()
        largest = _largest(torch.where(finite, wide, 0))
        wide = torch.where(finite, wide, torch.nan)  # some releases cast an infinity to 448
    if wide.dtype == torch.float64 and not wide.is_meta and bool((largest > _WIDEST).any()):
        raise OptionError(
            f'dtype="fp8" reaches numbers up to {_WIDEST:.3g}, a tensor of shape {list(tensor.shape)} has '
            f"{largest.max().item():.3g}. Record it with dtype=torch.float64, or leave dtype= out."
        )
    scale = torch.where(largest == 0, 1.0, (largest / _LARGEST).clamp(min=_SMALLEST_SCALE)).to(torch.float32)
    return Scaled((wide / scale).to(torch.float32).to(_DATA), scale)


def _largest(wide: Tensor) -> Tensor:
    """The largest magnitude of each row."""
    return wide.abs().amax(-1, keepdim=True) if wide.shape[-1] else wide.new_zeros((*wide.shape[:-1], 1))


# ---------------------------------------------------------------- and back


def dequantize(value: Any) -> Any:
    """What was kept with ``dtype="fp8"`` as float32 tensors.

    Args:
        value: A kept value, such as ``rec["h.3"].output``; also a tuple, list or dict of such.

    Returns:
        The value with ``data.float() * scale`` in the place of each pair of data and scale. Everything else, such as
        whole numbers and tensors without a dimension, stays as it is.
    """
    if is_scaled(value):
        return restored(value["data"], value["scale"])
    if isinstance(value, Fields):
        return Fields(value.type_name, {key: dequantize(child) for key, child in dict.items(value)})
    if type(value) is dict:
        return {key: dequantize(child) for key, child in value.items()}
    if isinstance(value, Arguments):
        return Arguments(*map(dequantize, value))
    return type(value)(map(dequantize, value)) if type(value) in (tuple, list) else value


def restored(data: Tensor, scale: Tensor) -> Tensor:
    """The float32 tensor of data and a scale that fits in shape."""
    return data.to(torch.float32) * scale


def is_scaled(value: Any) -> bool:
    """Whether a value is a tensor that is kept in eight bits: data and scale."""
    return (
        isinstance(value, Fields)
        and value.type_name == FP8
        and tuple(value) == Scaled._fields
        and all(isinstance(part, Tensor) for part in dict.values(value))
        and _fit(value["data"], value["scale"])
    )


def _fit(data: Tensor, scale: Tensor) -> bool:
    dtypes = data.dtype, scale.dtype
    return dtypes == (_DATA, torch.float32) and data.dim() > 0 and scale.shape == (*data.shape[:-1], 1)


# ---------------------------------------------------------------- in an event


def scaled_places(event: Any, layout: Sequence[tuple[str, torch.dtype, torch.Size]]) -> dict[int, str]:
    """The places of the data among the leaves of an event, and the value path of each tensor that they were.

    The scale has the place behind.
    """
    if not any(dtype == _DATA for _, dtype, _ in layout):
        return {}
    places = enumerate(_are_data(event.outline()))
    return {place: layout[place][0].removesuffix(".data") for place, is_data in places if is_data}


def has_scaled(value: Any) -> bool:
    """Whether any tensor of a kept value is kept in eight bits."""
    return any(_are_data(value))


def whole_leaves(event: Any) -> list[tuple[str, Tensor]]:
    """Value path and tensor of each tensor that an event had in the model; float32 where eight bits are kept."""
    root = "args" if event.port in ("input", "grad_input") else "output"
    return [(path, leaf) for path, leaf in walk(dequantize(event.value), root) if isinstance(leaf, Tensor)]


def _are_data(value: Any) -> Iterator[bool]:
    """For each tensor of a value, in order, whether it is data that the next one scales."""
    if is_scaled(value):
        yield from (True, False)
    elif isinstance(value, Tensor):
        yield False
    elif isinstance(value, (dict, tuple, list)):
        for child in dict.values(value) if isinstance(value, dict) else value:
            yield from _are_data(child)
