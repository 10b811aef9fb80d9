"""One row per site and tensor of a recording: its statistics over all calls, whatever holds the recording."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from hookline.report.text import dtype_text, first_values, shape_text, values_text
from hookline.sites import PORTS, Pattern, label, match_paths
from hookline.stats.summary import Summary, merge

__all__ = ["Row", "Sighting", "choose", "collect", "select_events"]

Key = tuple[str, str]
"""Path and port."""


@dataclasses.dataclass(frozen=True)
class Sighting:
    """One tensor of one event; ``tensor`` is None where only the statistics were recorded."""

    order: int
    step: int
    value_path: str
    shape: str
    dtype: str
    summary: Summary
    values: str


@dataclasses.dataclass(frozen=True)
class Row:
    """All sightings of one tensor of a site.

    Attributes:
        path: Path of the module; empty for the root.
        port: Where the value stood.
        type_name: Class of the module, empty when the recording does not know the module.
        value_path: Place of the tensor inside the value; empty when the value has one tensor.
        events: Number of calls seen, with or without a tensor.
        sightings: The tensors in the order in which they were recorded.
        summary: Statistics over all of them together.
    """

    path: str
    port: str
    type_name: str
    value_path: str
    events: int
    sightings: tuple[Sighting, ...]
    summary: Summary

    @property
    def name(self) -> str:
        """The path as it is shown, with the value path where a value has several tensors."""
        return f"{label(self.path)} {self.value_path}".rstrip()

    @property
    def unreadable(self) -> bool:
        """Whether there are elements of which nothing is known, as on the meta device."""
        return math.isnan(self.summary.mean) and self.summary.nan + self.summary.inf < self.summary.numel

    @property
    def shape(self) -> str:
        """Shape of the first sighting, with a mark when others differ."""
        return _first_of(sighting.shape for sighting in self.sightings)

    @property
    def dtype(self) -> str:
        """Dtype of the first sighting, with a mark when others differ."""
        return _first_of(sighting.dtype for sighting in self.sightings)


def collect(events: Iterable[Any], modules: Mapping[str, Any], values: bool = False) -> list[Row]:
    """The rows of some events in model order, then in the order of the ports and of the value.

    Args:
        events: What was recorded.
        modules: Modules of the recording by path, in model order.
        values: Whether to read the first values of each tensor too.
    """
    groups: dict[Key, list[list[Sighting]]] = {}
    for event in events:
        groups.setdefault((event.path, event.port), []).append(_sightings(event, values))
    return [row for key in _in_model_order(groups, modules) for row in _rows(key, groups[key], modules)]


def select_events(recording: Any, site: Pattern | None) -> list[Any]:
    """Events of a recording whose site a pattern names; all of them for None.

    Raises:
        SiteError: The pattern names nothing that the recording has.
    """
    if site is None:
        return list(recording.events)
    paths = list(dict.fromkeys([*recording.modules, *(event.path for event in recording.events)]))
    chosen = choose(site, paths)
    return [event for event in recording.events if (event.path, event.port) in chosen]


def choose(pattern: Pattern, paths: list[str]) -> set[Key]:
    """The sites that a pattern names. ``match_paths`` tells paths only, so the elements are asked one by one.

    Raises:
        SiteError: It names none of the paths.
    """
    match_paths(pattern, paths)  # the errors for the pattern as a whole
    included: set[Key] = set()
    excluded: set[Key] = set()
    elements = _flat(pattern)
    for element in elements:
        excludes = element.startswith("!") and element not in paths
        (excluded if excludes else included).update(_sites_of(element[1:] if excludes else element, paths))
    everything = {(path, port) for path in paths for port in PORTS}
    return (included or everything) - excluded


def _flat(pattern: Any) -> list[str]:
    return [pattern] if isinstance(pattern, str) else [text for part in pattern for text in _flat(part)]


def _sites_of(element: str, paths: list[str]) -> list[Key]:
    tail = element.rpartition(":")[2]
    has_port = tail in PORTS and element != f"re:{tail}" and element not in paths
    ports = (tail,) if has_port else PORTS
    return [(path, port) for path in match_paths(element, paths) for port in ports]


# ---------------------------------------------------------------- one event


def _sightings(event: Any, values: bool) -> list[Sighting]:
    tensors, summaries = dict(event.leaves()), event.summaries()
    paths = dict.fromkeys([*tensors, *summaries])
    return [_sighting(event, path, tensors.get(path), summaries[path], values) for path in paths if path in summaries]


def _sighting(event: Any, path: str, tensor: Tensor | None, summary: Summary, values: bool) -> Sighting:
    if tensor is None:
        return Sighting(event.order, event.step, path, "", "", summary, "")
    first = first_values(tensor) if values else []
    text = values_text(first, more=summary.numel > len(first)) if first else ""
    return Sighting(event.order, event.step, path, shape_text(tensor), dtype_text(tensor.dtype), summary, text)


# ---------------------------------------------------------------- one site


def _in_model_order(keys: Iterable[Key], modules: Mapping[str, Any]) -> list[Key]:
    """Paths that the recording has no module for come last, in the order in which they were seen."""
    keys = list(keys)
    places = {path: place for place, path in enumerate(dict.fromkeys([*modules, *(path for path, _ in keys)]))}
    return sorted(keys, key=lambda key: (places[key[0]], PORTS.index(key[1])))


def _rows(key: Key, events: list[list[Sighting]], modules: Mapping[str, Any]) -> list[Row]:
    several = any(len(sightings) > 1 for sightings in events)
    tensors: dict[str, list[Sighting]] = {}
    for sighting in (sighting for sightings in events for sighting in sightings):
        tensors.setdefault(sighting.value_path if several else "", []).append(sighting)
    if not tensors:
        return [_row(key, "", len(events), [], modules)]
    return [_row(key, path, len(seen), seen, modules) for path, seen in tensors.items()]


def _row(key: Key, value_path: str, events: int, sightings: list[Sighting], modules: Mapping[str, Any]) -> Row:
    module = modules.get(key[0])
    type_name = module.type_name if module else ""
    summary = merge(sighting.summary for sighting in sightings)
    return Row(*key, type_name, value_path, events, tuple(sightings), summary)


def _first_of(texts: Iterable[str]) -> str:
    different = list(dict.fromkeys(texts))
    return " \u2026".join(different[:1] + [""] * (len(different) > 1))
