"""Timing several ways of doing one thing side by side, so that a busy machine is unfair to all of them alike."""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

__all__ = ["Spread", "in_turn", "ratio", "spread", "threads", "timed", "without_collector"]


class Spread(NamedTuple):
    """Median and quartiles of several measurements."""

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    """The middle half of some numbers; all of them when there are too few for quarters."""
    if len(values) < 4:
        return Spread(statistics.median(values), min(values), max(values))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratio(times: list[float], bare: list[float]) -> Spread:
    """Each time by the bare one of its own round, so that what slows a whole round down falls out."""
    return spread([mine / theirs for mine, theirs in zip(times, bare, strict=True)])


def in_turn(samples: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Take every sample once a round, each round in another order; seconds by name, one for each round."""
    order = list(samples)
    times: dict[str, list[float]] = {name: [] for name in order}
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(samples[name]())
    return times


def timed(run: Callable[[], object]) -> float:
    """Seconds of one run, with garbage collected before and not during it."""
    gc.collect()
    with without_collector():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
