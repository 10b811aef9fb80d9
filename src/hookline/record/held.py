"""What waits for the disk, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from hookline.report.text import plural
from hookline.store import Staged

__all__ = ["Held", "Pressure", "Together", "Waiting", "complete", "sharing", "unwritten"]

Together = Mapping[int, frozenset[int]]
"""By step, the steps that are committed together with it or not at all; only of those that have such."""


class Pressure(NamedTuple):
    """How often, and how many seconds in all, the model has waited for the disk."""

    waits: int
    seconds: float


class Waiting(NamedTuple):
    """An event in memory, with the bytes set aside for it, what has to come before, and how many came before."""

    event: Any
    nbytes: int
    after: Any
    number: int


class Held:
    """What is held of one step.

    Attributes:
        step: Its number.
        oldest: Number of the first event of it that is not committed.
        events: Those in memory.
        nbytes: Bytes set aside for these.
        staged: Its shards that are written; small steps share one.
        stored: Its events in these.
    """

    def __init__(self, step: int, oldest: int) -> None:
        self.step, self.oldest = step, oldest
        self.events: list[Waiting] = []
        self.nbytes = 0
        self.staged = Staged()
        self.stored: list[Any] = []


def sharing(over: list[Held], together: Together, target: int) -> Iterator[list[Held]]:
    """Steps that share a shard: small ones, of which nothing is written yet.

    Args:
        over: Steps that are over, in order.
        together: See `Together`; no cut is made between such.
        target: Bytes of a shard, about.
    """
    some: list[Held] = []
    nbytes = 0
    for held in over:
        if held.staged.nbytes:
            if some:
                yield some
            yield [held]
            some, nbytes = [], 0
            continue
        if some and nbytes + held.nbytes > target and held.step not in together.get(some[-1].step, ()):
            yield some
            some, nbytes = [], 0
        some.append(held)
        nbytes += held.nbytes
    if some:
        yield some


def complete(written: list[Held], together: Together, held: Set[int]) -> list[Held]:
    """Without the steps that are committed with others of which one could not be written, and what shares with these.

    Args:
        written: Steps that could be.
        together: See `Together`.
        held: All steps that are not committed.
    """
    missing = held - {one.step for one in written}
    torn = {id(one.staged) for one in written if not missing.isdisjoint(together.get(one.step, ()))}
    return [one for one in written if id(one.staged) not in torn]


def unwritten(steps: Iterable[Held]) -> str:
    """What becomes of values that cannot be written, as sentences; nothing where there are none."""
    several = list(steps)
    waiting, dropped = sum(len(held.events) for held in several), sum(len(held.stored) for held in several)
    found = f" Not written, and in memory alone: {plural(waiting, 'value')}." if waiting else ""
    return found + (f" Dropped, of steps that are not whole: {plural(dropped, 'value')}." if dropped else "")
