"""A recording, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from hookline.errors import SiteError

if TYPE_CHECKING:
    from hookline.record.recording import Recording

__all__ = ["StepParts", "check_there", "numbers_of"]


def numbers_of(given: int | Iterable[int] | None) -> set[int] | None:
    """One number or several as a set; None for all."""
    return None if given is None else {given} if isinstance(given, int) else set(given)


def check_there(name: str, wanted: set[int] | None, there: list[int]) -> None:
    """Refuse numbers of steps or writers of which none was recorded.

    Raises:
        SiteError: There are values of others only.
    """
    if not wanted or not wanted.isdisjoint(there):
        return
    shown = ", ".join(map(str, there[:8])) + (f" and {len(there) - 8} more" if len(there) > 8 else "")
    got = ", ".join(sorted(map(str, wanted))[:8])
    raise SiteError(
        f"{name}: got {got}, of which there are no values; there are {shown or 'none'}. `rec.{name}` lists them."
    )


class StepParts(Mapping[int, "Recording"]):
    """The steps of a recording: a mapping from numbers to the part of each."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._numbers = sorted({event.step for event in recording.events})

    def __getitem__(self, step: int) -> Recording:
        if step not in self._numbers:
            near = sorted(self._numbers, key=lambda other: abs(other - step))[:3] if isinstance(step, int) else []
            shown = ", ".join(map(str, sorted(near))) or "none"
            raise SiteError(f"there are no values of step {step!r}; nearest of the recorded steps: {shown}.")
        return self._recording.select(steps=step)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __eq__(self, other: object) -> bool:
        return list(self) == other if isinstance(other, list) else super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._numbers)
