"""Rules about how large values are: exploding, vanishing, spikes.

Each looks at the newest step first, and at the history of those series only that can be a finding at all.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hookline.watch.rules.rule import Finding, Rule
from hookline.watch.window import Window

__all__ = ["exploding", "loss_spike", "spike", "vanishing"]

Numbers = npt.NDArray[np.int64]
Array = npt.NDArray[np.float64]

_FLOOR = {"output": 1e-3, "parameter": 1e-2, "update": 1e-2, "grad_output": 1e-6, "parameter_grad": 1e-5}
"""What a history counts as at least: growing from nothing, as after an initialization with zeros, is no explosion."""
_EARLIER = 20
"""Steps with a value that a robust deviation needs."""
_LEAST_DEVIATION = 0.1
"""Of a logarithm, as the median absolute deviation: a series may be constant by chance."""
_JUMP = np.log(8.0)
"""How far a spike is above the largest value of the window: heavy tails reach twice or thrice that."""
_SHARE = 1e-4
"""What a share of the gradient must fall to, of what it was, to have vanished."""
_LASTING = 3
"""Steps over which it has to last."""


def exploding(window: Window, rule: Rule) -> Iterable[Finding]:
    """Root mean square beyond a multiple of the median of its own history."""
    numbers, floor = window.at(rule.ports), _floors(window, rule.ports)
    rms = window.field("rms", rule.window)
    if not len(numbers) or len(rms) < 2:
        return
    above = np.flatnonzero(rms[-1, numbers] > rule.limit * floor)
    above = above[rms[-1, numbers[above]] > rule.limit * np.fmin.reduce(rms[:-1])[numbers[above]]]
    numbers, floor = numbers[above], floor[above]
    if not len(numbers):
        return
    usual = _median(rms[:-1, numbers])
    ratio = rms[-1, numbers] / np.maximum(usual, floor)
    flagged = ratio > rule.limit  # NaN where there is no history
    for port_numbers, place in _by_port(window, numbers, flagged):
        now, before = float(rms[-1, numbers[place]]), float(usual[place])
        yield Finding(
            int(numbers[place]),
            f"rms {now:.3g} is {ratio[place]:.3g} times its median of {before:.3g} over the last steps",
            {"rms": now, "median": before, "ratio": float(ratio[place])},
            others=port_numbers,
        )


def vanishing(window: Window, rule: Rule) -> Iterable[Finding]:
    """Gradient that is nothing beside the largest of its port, by depth or against its own history."""
    for port in rule.ports:
        numbers = window.at((port,))
        if not len(numbers) or len(window) < _LASTING:
            continue
        last = window.field("rms", _LASTING)[:, numbers]
        share = _shares(last, np.fmax.reduce(last, axis=1, initial=0.0))
        candidates = np.flatnonzero((share.max(0) < max(_SHARE, rule.limit)) & (last[-1] > 0))
        if not len(candidates):
            continue
        history = window.field("rms", rule.window)[:, numbers]
        yield from _vanished(rule, numbers, candidates, history, by_depth=port == "grad_output")


def _vanished(
    rule: Rule, numbers: Numbers, candidates: Numbers, history: Array, *, by_depth: bool
) -> Iterable[Finding]:
    largest = np.fmax.reduce(history, axis=1, initial=0.0)
    share, half = _shares(history[:, candidates], largest), len(history) // 2
    recent = np.max(share[-_LASTING:], axis=0)
    highest = np.fmax.reduce(share[:half], axis=0, initial=0.0)
    possible = (recent < rule.limit) | (recent < _SHARE * highest)
    if not possible.any():
        return
    candidates, share, recent = candidates[possible], share[:, possible], recent[possible]
    usual = _median(share[:half]) if half >= _LASTING else np.full(len(candidates), np.nan)
    known = np.count_nonzero(~np.isnan(share), axis=0) >= min(rule.window, _EARLIER) // 2
    deep = known & (recent < rule.limit) if by_depth else np.zeros(len(candidates), bool)
    fell = known & (recent < usual * _SHARE)
    for flagged, text in ((deep, "of the largest gradient of the step"), (fell & ~deep, "")):
        places = np.flatnonzero(flagged)
        if not len(places):
            continue
        first, others = int(places[0]), tuple(numbers[candidates[places[1:]]].tolist())
        now, before = float(share[-1, first]), float(usual[first])
        text = text or f"of the largest gradient of the step, and was {before:.2g} of it before"
        rms = float(history[-1, candidates[first]])
        evidence = {"rms": rms, "share": now} | ({"share_before": before} if before == before else {})
        yield Finding(int(numbers[candidates[first]]), f"rms {rms:.3g} is {now:.2g} {text}", evidence, others=others)


def spike(window: Window, rule: Rule) -> Iterable[Finding]:
    """Robust deviation of log rms from the median of the window, for the newest step alone."""
    numbers = window.at(rule.ports)
    rms = window.field("rms", rule.window)
    if len(rms) <= _EARLIER or not len(numbers):
        return
    largest = np.fmax.reduce(rms[:-1], axis=0)[numbers]
    above = np.flatnonzero(rms[-1, numbers] > largest * np.exp(_JUMP))
    numbers = numbers[above[largest[above] > 0]]
    if not len(numbers):
        return
    with np.errstate(divide="ignore"):
        logs = np.log(rms[:, numbers])
    logs[np.isneginf(logs)] = np.nan
    usual, deviation = _robust(logs[:-1])
    enough = np.count_nonzero(~np.isnan(logs[:-1]), axis=0) >= _EARLIER
    score = (logs[-1] - usual) / np.maximum(deviation, _LEAST_DEVIATION)
    for others, place in _by_port(window, numbers, enough & (score > rule.limit)):
        now, before = float(rms[-1, numbers[place]]), float(np.exp(usual[place]))
        yield Finding(
            int(numbers[place]),
            f"rms jumped to {now:.3g} from a median of {before:.3g} (deviation {score[place]:.3g})",
            {"rms": now, "median": before, "deviation": float(score[place])},
            others=others,
        )


def loss_spike(window: Window, rule: Rule) -> Iterable[Finding]:
    """Robust deviation of the loss itself, which may be negative."""
    for number in window.at(rule.ports).tolist():
        values = window.field("mean", rule.window)[:, number]
        now, before = float(values[-1]), values[:-1][~np.isnan(values[:-1])]
        if np.isnan(now) or len(before) < _EARLIER or now <= (highest := float(before.max())):
            continue
        usual = float(np.median(before))
        deviation = 1.4826 * float(np.median(np.abs(before - usual)))
        scale = max(deviation, (highest - usual) / 3, 0.05 * abs(usual))
        if scale > 0 and now - usual > rule.limit * scale:
            score = (now - usual) / scale
            yield Finding(
                number,
                f"loss jumped to {now:.4g} from a median of {usual:.4g} (deviation {score:.3g})",
                {"loss": now, "median": usual, "highest": highest, "deviation": score},
            )


def _floors(window: Window, ports: tuple[str, ...]) -> Array:
    def find() -> Array:
        return np.array([_FLOOR.get(window.series[number].port, 1e-3) for number in window.at(ports).tolist()])

    return window.known(("floors", ports), find)


def _shares(rms: Array, largest: Array) -> Array:
    """Of each step's largest value, shape (steps, series); NaN where the step has none."""
    shares: Array = np.divide(rms, largest[:, None], out=np.full_like(rms, np.nan), where=largest[:, None] > 0)
    return shares


def _median(values: Array) -> Array:
    """Over the first axis without the NaN; NaN where there is nothing else."""
    ordered = np.sort(values, axis=0)  # NaN last
    count = np.count_nonzero(~np.isnan(values), axis=0)
    columns = np.arange(values.shape[1])
    low, high = np.maximum(count - 1, 0) // 2, count // 2
    both = ordered[low, columns] + ordered[np.minimum(high, len(values) - 1), columns]
    middle: Array = both / 2
    return middle  # NaN where there is none, since what is sorted begins with NaN


def _robust(values: Array) -> tuple[Array, Array]:
    """Median, and median absolute deviation in units of a standard deviation."""
    middle = _median(values)
    return middle, 1.4826 * _median(np.abs(values - middle))


def _by_port(window: Window, numbers: Numbers, flagged: npt.NDArray[np.bool_]) -> Iterable[tuple[tuple[int, ...], int]]:
    """For each port the first flagged series, as a place in ``numbers``, and the numbers of the others."""
    ports: dict[str, list[int]] = {}
    for place in np.flatnonzero(flagged).tolist():
        ports.setdefault(window.series[numbers[place]].port, []).append(place)
    for first, *others in ports.values():
        yield tuple(int(numbers[place]) for place in others), first
