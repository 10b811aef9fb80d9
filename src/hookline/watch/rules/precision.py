"""Rules about the range of the dtype: values near its largest number, gradients below its smallest normal one."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from hookline.watch.rules.rule import Finding, Rule
from hookline.watch.series import Series
from hookline.watch.window import Window

__all__ = ["overflow_risk", "underflow_risk"]


def overflow_risk(window: Window, rule: Rule) -> Iterable[Finding]:
    """Largest magnitude beyond a part of the dtype's largest number.

    The lowest number itself is passed over: it is how attention scores are masked.
    """
    numbers = window.chosen(("low", rule.ports), lambda one: one.port in rule.ports and _is_narrow(one.dtype))
    if not len(numbers):
        return
    largest = window.known(
        ("largest", rule.ports),
        lambda: np.array([_range(window.series[number].dtype)[0] for number in numbers.tolist()]),
    )
    low, high = window.field("min", 1)[0, numbers], window.field("max", 1)[0, numbers]
    low = np.where(low <= -largest, 0.0, low)
    part = np.maximum(-low, high) / largest
    for place in np.flatnonzero(part > rule.limit).tolist():
        number = int(numbers[place])
        absmax, dtype = float(part[place] * largest[place]), window.series[number].dtype
        yield Finding(
            number,
            f"absmax {absmax:.4g} is {part[place]:.0%} of the largest number of {dtype}, {largest[place]:.4g}",
            {"absmax": absmax, "largest": float(largest[place])},
        )


def underflow_risk(window: Window, rule: Rule) -> Iterable[Finding]:
    """Most of the elements that are not zero are subnormal, through the whole window."""
    if len(window) < rule.window:
        return
    numbers = window.chosen(("tiny", rule.ports), lambda one: one.port in rule.ports and _has_short_exponent(one))
    numbers = numbers[_subnormal_part(window, numbers, 1)[0] > rule.limit]
    if not len(numbers):
        return
    part = _subnormal_part(window, numbers, rule.window)
    for place in np.flatnonzero(np.all(part > rule.limit, axis=0)).tolist():
        number = int(numbers[place])
        dtype, now = window.series[number].dtype, float(part[-1, place])
        zeros = float(window.field("zeros", 1)[0, number] / window.field("numel", 1)[0, number])
        yield Finding(
            number,
            f"{now:.0%} of the elements that are not zero are below {_range(dtype)[1]:.3g}, the smallest normal number "
            f"of {dtype}, and {zeros:.0%} of all are zero",
            {"subnormal": now, "zeros": zeros, "smallest_normal": _range(dtype)[1], "steps": rule.window},
        )


def _subnormal_part(window: Window, numbers: npt.NDArray[np.int64], last: int) -> npt.NDArray[np.float64]:
    """Subnormal elements of those that are not zero, shape (steps, series); 0 where there are none."""
    subnormal = window.field("subnormal", last)[:, numbers]
    others = window.field("numel", last)[:, numbers] - window.field("zeros", last)[:, numbers]
    return np.divide(subnormal, others, out=np.zeros_like(others), where=others > 0)


@functools.cache
def _range(dtype: str) -> tuple[float, float]:
    """Largest and smallest normal number of a dtype by its name."""
    info = torch.finfo(getattr(torch, dtype))
    return float(info.max), float(info.smallest_normal)


@functools.cache
def _is_narrow(dtype: str) -> bool:
    """Whether it is a floating dtype of at most 16 bits."""
    found = getattr(torch, dtype, None) if dtype else None
    return isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize <= 2


def _has_short_exponent(one: Series) -> bool:
    """float16 and eight bits; bfloat16 has the exponents of float32."""
    return _is_narrow(one.dtype) and one.dtype != "bfloat16"
