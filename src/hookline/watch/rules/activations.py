"""Rules about activation functions: dead and saturated ones, as far as the statistics of their outputs can tell.

They know a module by the name of its class. A function such as ``F.relu`` inside a module's forward is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from hookline.watch.rules.rule import Finding, Rule
from hookline.watch.window import Window

__all__ = ["dead", "saturated"]

_RECTIFIERS = frozenset({"ReLU", "ReLU6", "Threshold", "Hardswish", "GELU", "SiLU", "Softshrink", "Hardshrink"})
_SQUASHING = frozenset({"Sigmoid", "Hardsigmoid", "Tanh", "Hardtanh", "Softmax", "Softmax2d"})


def dead(window: Window, rule: Rule) -> Iterable[Finding]:
    """Nothing but zeros through the whole window; or, where it is known, in most channels."""
    if len(window) < rule.window:
        return
    yield from _dead_layers(window, rule)
    yield from _dead_channels(window, rule)


def _dead_layers(window: Window, rule: Rule) -> Iterable[Finding]:
    numbers = window.at(rule.ports, _RECTIFIERS)
    zeros, numel = window.field("zeros", rule.window), window.field("numel", rule.window)
    numbers = numbers[(zeros[-1, numbers] == numel[-1, numbers]) & (numel[-1, numbers] > 0)]
    lasting = np.all(zeros[:, numbers] == numel[:, numbers], axis=0)
    for number in numbers[lasting].tolist():
        elements = int(numel[-1, number])
        message = f"all {elements} elements were zero in each of the last {rule.window} steps"
        yield Finding(number, message, {"fraction": 1.0, "steps": rule.window, "elements": elements})


def _dead_channels(window: Window, rule: Rule) -> Iterable[Finding]:
    """By ``extra["dead_channels"]``: fraction of channels with nothing but zeros, for each series."""
    given: list[Mapping[int, float]] = [extra.get("dead_channels", {}) for extra in window.extra(rule.window)]
    for number, fraction in given[-1].items():
        least = min(float(one.get(number, 0.0)) for one in given)
        if least > rule.limit and fraction < 1.0:
            message = f"{least:.0%} of the channels or more were zero in each of the last {rule.window} steps"
            yield Finding(int(number), message, {"fraction": least, "steps": rule.window})


def saturated(window: Window, rule: Rule) -> Iterable[Finding]:
    """Mean slope of a sigmoid, tanh or softmax nearly zero through the whole window.

    Each has a slope that its own output tells: y(1-y), 1-y² and, added up over a row, 1-sum(y²). The mean of these
    follows from mean and mean square. Where it is s of the largest slope, at most s/0.36 of a sigmoid's elements lie
    between 0.1 and 0.9, by Markov's inequality.
    """
    numbers = window.at(rule.ports, _SQUASHING)
    if len(window) < rule.window or not len(numbers):
        return
    newest = _slopes(window, numbers, 1)[-1]
    numbers = numbers[newest < rule.limit]
    if not len(numbers):
        return
    slopes = _slopes(window, numbers, rule.window)
    for place in np.flatnonzero(np.all(slopes < rule.limit, axis=0)).tolist():
        number, slope = int(numbers[place]), float(slopes[-1, place])
        evidence = {"slope": slope, "steps": rule.window} | {
            name: float(window.field(name, 1)[0, number]) for name in ("mean", "std", "min", "max")
        }
        kind = window.series[number].type_name
        message = f"the mean slope of {kind} was below {rule.limit:.2g} of its largest for {rule.window} steps"
        yield Finding(number, f"{message}, now {slope:.2g}", evidence)


def _slopes(window: Window, numbers: npt.NDArray[np.int64], last: int) -> npt.NDArray[np.float64]:
    """Mean slope of each as a part of the largest one, shape (steps, series); NaN where it cannot be told."""
    mean, std = window.field("mean", last)[:, numbers], window.field("std", last)[:, numbers]
    spread = window.field("max", last)[:, numbers] - window.field("min", last)[:, numbers]
    square = mean * mean + std * std
    kinds = [window.series[number].type_name for number in numbers.tolist()]
    softmax = np.array([kind.startswith("Softmax") for kind in kinds])
    tanh = np.array([kind in ("Tanh", "Hardtanh") for kind in kinds])
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.where(softmax, 1.0 - square / mean, np.where(tanh, 1.0 - square, 4.0 * (mean - square)))
    # A softmax over one element is always 1, and says nothing.
    return np.where(softmax & (spread == 0), np.nan, np.maximum(slopes, 0.0))
