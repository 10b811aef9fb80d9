"""The fate of sites as text: what ``print(rec.coverage)`` shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from hookline.report.text import plural, printable, size_text

__all__ = ["BYPASSED", "CAPTURED", "NOT_REACHED", "render", "sizes"]

CAPTURED = "captured"
NOT_REACHED = "not reached"
BYPASSED = "bypassed"


class FateLike(Protocol):
    """What a row needs to know."""

    @property
    def site(self) -> str:
        """Path and port."""
        ...

    @property
    def status(self) -> str:
        """One of the three words above."""
        ...

    @property
    def calls(self) -> int:
        """Calls that were captured."""
        ...

    @property
    def reason(self) -> str:
        """Why it was not captured, or what else has to be known."""
        ...


class SizedFate(FateLike, Protocol):
    """A fate with the size of its values."""

    @property
    def nbytes(self) -> int:
        """Bytes of a step."""
        ...


def render(fates: Iterable[FateLike], *, most: int | None = None) -> str:
    """One line with the counts, then one for each reason, ports of a module together; captured ones only with a reason.

    Args:
        fates: In the order of the model.
        most: How many reasons to list; all by default.
    """
    every = list(fates)
    counts = {status: [fate for fate in every if fate.status == status] for status in (CAPTURED, NOT_REACHED, BYPASSED)}
    calls = plural(sum(fate.calls for fate in counts[CAPTURED]), "call")
    lines = [
        f"coverage of {plural(len(every), 'site')}: {len(counts[CAPTURED])} captured ({calls}), "
        f"{len(counts[NOT_REACHED])} not reached, {len(counts[BYPASSED])} bypassed"
    ]
    for status in (NOT_REACHED, BYPASSED, CAPTURED):
        rows: dict[tuple[str, str], list[str]] = {}
        for fate in counts[status]:
            path, _, port = fate.site.rpartition(":")
            if status != CAPTURED or fate.reason:
                rows.setdefault((path, fate.reason), []).append(port)
        lines += [
            printable(f"  {status:<11}  {path}:{','.join(ports)}{'  ' * bool(reason)}{reason}")
            for (path, reason), ports in rows.items()
        ]
    if most is not None and len(lines) > most + 1:
        lines[most + 1 :] = [f"  and {len(lines) - most - 1} lines more: hookline show --coverage"]
    return "\n".join(lines)


def sizes(sites: Iterable[SizedFate]) -> str:
    """The captured sites with calls and bytes, in columns, and their sum."""
    rows = [(site.site, plural(site.calls, "call"), site.nbytes) for site in sites if site.status == CAPTURED]
    wide = max((len(name) for name, _, _ in rows), default=0)
    narrow = max((len(calls) for _, calls, _ in rows), default=0)
    lines = [f"  {name:<{wide}}  {calls:>{narrow}}  {size_text(nbytes):>10}" for name, calls, nbytes in rows]
    total = sum(nbytes for _, _, nbytes in rows)
    return "\n".join(map(printable, [*lines, f"a step records {size_text(total)} ({total:,} bytes)"]))
