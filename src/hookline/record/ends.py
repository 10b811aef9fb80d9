"""What the writers of a recording said at their ends, taken together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hookline.record.coverage import CAPTURED, Coverage, Fate

__all__ = ["at_the_end"]


def at_the_end(ends: Iterable[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """What the writers said at their ends, taken together: a site that one of them captured is captured."""
    said = [end for _, end in ends]
    found: dict[str, Fate] = {}
    for end in said:
        for site, fate in Coverage.from_json(end.get("coverage")).items():
            before = found.setdefault(site, fate)
            if before is not fate and fate.status == CAPTURED:
                both = before.status == CAPTURED
                found[site] = before._replace(calls=before.calls + fate.calls) if both else fate
    numbers = {
        name: sum(end[name] for end in said if type(end.get(name)) in (int, float)) for name in ("waits", "waited_s")
    }
    return {"coverage": Coverage(found.values()).to_json(), **numbers}
