"""A value in a few lines of text, for a look from inside a hook."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hookline.report.text import (
    dtype_text,
    first_values,
    number,
    plural,
    printable,
    shape_text,
    size_text,
    trouble_text,
    values_text,
)
from hookline.stats.compute import summarize
from hookline.stats.pieces import CHUNK
from hookline.stats.summary import Summary
from hookline.values import Opaque, walk

__all__ = ["describe"]

_MOST_LEAVES = 40
_LONGEST_TEXT = 60


def describe(value: Any, name: str = "value") -> str:
    """What a value is, in a few lines per tensor: kind, shape, dtype, device, first values and statistics.

    Args:
        value: A tensor, or anything that holds tensors, such as a module's arguments or output.
        name: What to call it; each tensor inside is called by its value path, such as ``value[1][0]``.

    Returns:
        Lines without a line break at the end. The value is only read; gradients, RNG and grad mode stay as they are.
    """
    leaves = list(walk(value, name))
    lines = [line for path, leaf in leaves[:_MOST_LEAVES] for line in _lines(printable(path), leaf)]
    if len(leaves) > _MOST_LEAVES:
        lines.append(f"... and {plural(len(leaves) - _MOST_LEAVES, 'value')} more")
    return "\n".join(lines) or f"{name}: empty {type(value).__name__}"


def _lines(path: str, leaf: Any) -> Iterator[str]:
    if not isinstance(leaf, Tensor):
        yield f"{path}: {_other(leaf)}"
        return
    yield f"{path}: {_tensor(leaf)}"
    first = first_values(leaf)
    if first:
        yield f"  {values_text(first, more=leaf.numel() > len(first))}"
    summary = summarize(leaf)
    yield f"  {_statistics(summary)}"
    if not summary.finite:
        yield f"  ! {trouble_text(summary)} of {summary.numel}{_first_place(leaf)}"


def _tensor(tensor: Tensor) -> str:
    notes = [f"{_kind(tensor)} {dtype_text(tensor.dtype)} {shape_text(tensor)}", str(tensor.device)]
    if tensor.layout is not torch.strided:
        notes.append(str(tensor.layout).removeprefix("torch."))
    elif not tensor.is_nested and not tensor.is_contiguous():
        notes.append(f"strides {'x'.join(map(str, tensor.stride()))}")
    if tensor.requires_grad:
        notes.append(f"requires grad{f' ({tensor.grad_fn.name()})' if tensor.grad_fn is not None else ''}")
    notes.append(size_text(tensor.numel() * tensor.element_size()))
    return ", ".join(notes)


def _kind(tensor: Tensor) -> str:
    return "tensor" if type(tensor) is Tensor else type(tensor).__name__


def _statistics(summary: Summary) -> str:
    if not summary.numel:
        return "no elements"
    if math.isnan(summary.mean):
        return "no finite element" if summary.nan + summary.inf else "values cannot be read"
    fields = (f"{name} {number(getattr(summary, name))}" for name in ("mean", "std", "min", "max", "l2"))
    zeros = f"  zeros {summary.zeros} of {summary.numel}" if summary.zeros else ""
    return "  ".join(fields) + zeros


def _first_place(tensor: Tensor) -> str:
    """Index of the first non-finite element, which often tells the sample or the token that is to blame."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or not tensor.dim():
        return ""
    with torch.no_grad():
        bad = ~torch.isfinite(tensor.detach()).reshape(-1)
        start = 0
        for part in torch.split(bad, CHUNK):  # nonzero needs eight bytes for each element that it finds
            if part.any():
                break
            start += part.numel()
        where = torch.unravel_index(start + torch.nonzero(part)[0, 0], tensor.shape)
    return f", the first at [{', '.join(str(int(index)) for index in where)}]"


def _other(leaf: Any) -> str:
    if isinstance(leaf, Opaque):
        return f"{leaf.type_name} (not kept)"
    if leaf is None or type(leaf) in (bool, int, float, complex):
        return repr(leaf)
    if isinstance(leaf, str):
        return repr(leaf) if len(leaf) <= _LONGEST_TEXT else f"{leaf[:_LONGEST_TEXT]!r}... ({len(leaf)} characters)"
    return type(leaf).__name__
