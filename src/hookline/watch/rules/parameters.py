"""Rules about parameters: those that get no gradient, do not move, or move by too much or too little."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hookline.watch.rules.rule import Finding, Rule
from hookline.watch.window import Window

__all__ = ["frozen", "no_gradient", "update_ratio"]

_SMALLEST = 1e-2
"""Root mean square that a parameter counts as at least: a bias that begins at zero moves by more than it is."""
_NOISE = 1e-5
"""Share of the largest gradient below which a gradient may be rounding alone, as that of a bias before a norm."""


def no_gradient(window: Window, rule: Rule) -> Iterable[Finding]:
    """Gradient all zero or absent through the whole window, though the module ran.

    A gradient that is None is a row without elements. Whether a module ran is known where its output is watched.
    """
    if len(window) < rule.window:
        return
    numbers = window.at(rule.ports)
    zeros, numel = window.field("zeros", rule.window), window.field("numel", rule.window)
    numbers = numbers[zeros[-1, numbers] == numel[-1, numbers]]
    numbers = numbers[np.all(zeros[:, numbers] == numel[:, numbers], axis=0)]
    if not len(numbers):
        return
    ran = {window.series[number].path for number in window.at(("output",)).tolist() if not np.isnan(numel[-1, number])}
    for number in numbers.tolist():
        if window.series[number].path in ran:
            absent = bool(numel[-1, number] == 0)
            how = "had no gradient" if absent else "had a gradient of zeros alone"
            message = f"the parameter {how} in each of the last {rule.window} steps, though its module ran"
            yield Finding(number, message, {"absent": absent, "steps": rule.window})


def frozen(window: Window, rule: Rule) -> Iterable[Finding]:
    """Update exactly zero through the whole window, though a gradient is there."""
    if len(window) < rule.window:
        return
    numbers, gradients = window.at(rule.ports), window.partners(rule.ports, "parameter_grad")
    zeros, numel = window.field("zeros", rule.window), window.field("numel", rule.window)
    still = np.flatnonzero((zeros[-1, numbers] == numel[-1, numbers]) & (numel[-1, numbers] > 0))
    still = still[np.all(zeros[:, numbers[still]] == numel[:, numbers[still]], axis=0)]
    numbers, gradients = numbers[still], gradients[still]
    rms = window.field("rms", rule.window)
    for number, gradient in zip(numbers.tolist(), gradients.tolist(), strict=True):
        if gradient >= 0 and np.all(rms[:, gradient] > 0):
            now = float(rms[-1, gradient])
            message = f"the parameter did not move in {rule.window} steps, with a gradient of rms {now:.3g}"
            yield Finding(number, message, {"grad_rms": now, "steps": rule.window})


def update_ratio(window: Window, rule: Rule) -> Iterable[Finding]:
    """Root mean square of the update over that of the parameter, out of the range through the whole window."""
    if len(window) < rule.window:
        return
    numbers = window.at(rule.ports)
    parameters, gradients = (window.partners(rule.ports, port) for port in ("parameter", "parameter_grad"))
    together = (parameters >= 0) & (gradients >= 0)
    numbers, parameters, gradients = numbers[together], parameters[together], gradients[together]
    low, high = rule.threshold if isinstance(rule.threshold, tuple) else (0.0, rule.threshold)
    rms = window.field("rms", rule.window)
    newest = _ratios(rms[-1:], numbers, parameters)[0]
    with np.errstate(invalid="ignore"):
        some = np.flatnonzero((newest > high) | ((newest < low) & (newest > 0)))
    if not len(some):
        return
    ratios = _ratios(rms, numbers[some], parameters[some])
    meant = rms[-1, gradients[some]] > _NOISE * np.fmax.reduce(rms[-1, gradients], initial=0.0)
    too_high = np.all(ratios > high, axis=0)
    too_low = np.all((ratios < low) & (ratios > 0), axis=0) & meant
    for place in np.flatnonzero(too_high | too_low).tolist():
        ratio, number = float(ratios[-1, place]), int(numbers[some[place]])
        side = f"above {high:.2g}" if too_high[place] else f"below {low:.2g}"
        message = f"update / parameter, by rms, was {side} for {rule.window} steps, now {ratio:.3g}"
        evidence = {
            "ratio": ratio,
            "update_rms": float(rms[-1, number]),
            "parameter_rms": float(rms[-1, parameters[some[place]]]),
        }
        yield Finding(number, message, evidence)


def _ratios(
    rms: npt.NDArray[np.float64], updates: npt.NDArray[np.int64], parameters: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    return rms[:, updates] / np.maximum(rms[:, parameters], _SMALLEST)
