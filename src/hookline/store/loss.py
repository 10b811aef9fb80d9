"""What was lost, in words: how many events, of which steps and sites."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hookline.errors import FormatError
from hookline.store import format as layout
from hookline.store import strict_json
from hookline.store.format import BATCH, PORTS, EventLine
from hookline.store.names import site_name

UNREAD = "what it held cannot be read"
_MOST_NAMED = 5


def held(events: Iterable[EventLine]) -> str:
    """What the events of a commit were."""
    return listing([(event.path, event.port, event.step) for event in events])


def listing(places: list[tuple[Any, Any, Any]]) -> str:
    """What a line held: how many events, of which steps and sites, and whether it said what rows are."""
    events = [place for place in places if place[1] != BATCH]
    batches = len(places) - len(events)
    held = [counted(events)] if events or not batches else []
    if batches:
        held.append(f"what the rows of {batches} batch{'es' if batches > 1 else ''} are")
    return f"it held {' and '.join(held)}"


def counted(places: list[tuple[Any, Any, Any]]) -> str:
    """How many events, of which steps and sites."""
    if not places:
        return "no events"
    sites = list(dict.fromkeys(site_name(path, port) for path, port, _ in places))
    more = f" and {len(sites) - _MOST_NAMED} more sites" if len(sites) > _MOST_NAMED else ""
    steps = sorted({step for _, _, step in places})
    span = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    count = f"{len(places)} event{'s' if len(places) > 1 else ''}"
    return f"{count} of {span} at {', '.join(sites[:_MOST_NAMED])}{more}"


def where(place: layout.Line) -> str:
    """Where a line stands, as seen from the recording."""
    return f"{place.manifest.parent.name}/{place.manifest.name}, line {place.number}"


def sites_of(said: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Path and port of each site in the coverage of an ``end.json``, which may hold anything."""
    rows = said.get("coverage")
    for row in rows if type(rows) is list else ():
        if type(row) is list and row and type(row[0]) is str:
            path, _, port = row[0].rpartition(":")
            if port in PORTS:
                yield "" if path == "(root)" else path, port


def guess(text: bytes, named: set[str]) -> str:
    """What a damaged line still says of its events; the shards that it names are added."""
    try:
        entry = strict_json.parse(text.rstrip(b"\n"), "")
        named |= {shard["file"] for shard in entry["shards"] if type(shard["file"]) is str}
        places = [(event["path"], event["port"], event["step"]) for event in entry["events"]]
    except (FormatError, LookupError, TypeError):
        return UNREAD
    if not all(type(path) is type(port) is str and type(step) is int for path, port, step in places):
        return UNREAD
    return f"{listing(places)}, as far as can be told"
