"""The fate of every site that was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hookline.errors import CoverageError
from hookline.hooks import NEVER_CALLED
from hookline.report.fates import BYPASSED, CAPTURED, NOT_REACHED, render
from hookline.report.text import plural

__all__ = ["BYPASSED", "CAPTURED", "NOT_REACHED", "Coverage", "Fate"]

_SHOWN = 10


class Fate(NamedTuple):
    """What became of one site.

    Attributes:
        site: The site, such as ``"layer1.0.conv1:output"``.
        status: ``"captured"``; ``"not reached"``: the module never ran; or ``"bypassed"``: it took part and could not
            be seen there.
        calls: How many calls were captured.
        reason: Why it was not captured; for a captured site, what else has to be known of it; may be empty.
    """

    site: str
    status: str
    calls: int = 0
    reason: str = ""

    def __str__(self) -> str:
        what = f"{self.status} ({plural(self.calls, 'call')})" if self.status == CAPTURED else self.status
        return f"{self.site}: {what}{': ' * bool(self.reason)}{self.reason}"


class Coverage(Mapping[str, Fate]):
    """What became of every site that was asked for, by site: ``rec.coverage["layer1.0.conv1:output"]``.

    ``print(rec.coverage)`` lists what was not captured, with the reasons.
    """

    def __init__(self, fates: Iterable[Fate]) -> None:
        self._fates = {fate.site: fate for fate in fates}

    def __getitem__(self, site: str) -> Fate:
        return self._fates[str(site)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fates)

    def __len__(self) -> int:
        return len(self._fates)

    @property
    def captured(self) -> list[Fate]:
        """Sites of which there is at least one value."""
        return self._with(CAPTURED)

    @property
    def not_reached(self) -> list[Fate]:
        """Sites whose module never ran."""
        return self._with(NOT_REACHED)

    @property
    def bypassed(self) -> list[Fate]:
        """Sites that something passed by, with the reason."""
        return self._with(BYPASSED)

    @property
    def complete(self) -> bool:
        """Whether every site was captured."""
        return all(fate.status == CAPTURED for fate in self.values())

    def check(self) -> None:
        """Raise where a site was not captured; a container, which nothing calls, is told by its children's sites.

        Raises:
            CoverageError: It names the sites and the reasons.
        """
        missing = [fate for fate in self.values() if fate.status != CAPTURED and not fate.reason.endswith(NEVER_CALLED)]
        if missing:
            shown = "; ".join(map(str, missing[:_SHOWN]))
            more = f"; and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            count = f"{len(missing)} of {plural(len(self), 'site')}"
            raise CoverageError(
                f"{count} were not captured: {shown}{more}. Leave them out of sites=, or record without strict=True "
                "and read rec.coverage.",
                self,
            )

    def select(self, sites: Iterable[str]) -> Coverage:
        """The part at some sites."""
        wanted = set(sites)
        return Coverage(fate for fate in self.values() if fate.site in wanted)

    def to_json(self) -> list[list[Any]]:
        """What ``from_json`` reads."""
        return [list(fate) for fate in self.values()]

    @classmethod
    def from_json(cls, value: Any) -> Coverage:
        """Read what a file says; what is no fate is left out, since a file may hold anything."""
        rows = value if isinstance(value, list) else []
        return cls(Fate(*row) for row in rows if _is_fate(row))

    def _with(self, status: str) -> list[Fate]:
        return [fate for fate in self.values() if fate.status == status]

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(self._with(status))} {status}" for status in (CAPTURED, NOT_REACHED, BYPASSED))
        return f"<Coverage of {plural(len(self), 'site')}: {counts}>"

    def __str__(self) -> str:
        return render(self.values())


def _is_fate(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 4
        and all(isinstance(row[place], str) for place in (0, 1, 3))
        and row[1] in (CAPTURED, NOT_REACHED, BYPASSED)
        and type(row[2]) is int
    )
