"""A small recording on disk, and events that are no `Event`, for tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hookline import store
from hookline.record.event import Event
from hookline.stats import Summary, summarize
from hookline.store import EventLike, ModuleInfo
from hookline.values import walk

NAME = "0/a:output/0/output"
WRITER = "w00000-a1b2c3"
HEAD, MANIFEST, SHARD = "recording.json", f"{WRITER}/manifest.jsonl", f"{WRITER}/000000.safetensors"
MODULES = {"a": ModuleInfo("Linear", 3, ("b",))}


@dataclasses.dataclass
class PlainEvent:
    """What the store and the reports need of an event, and nothing more."""

    path: str
    value: Any
    port: str = "output"
    step: int = 0
    order: int = 0
    call: int = 0
    backward: int = 0
    batch: EventLike | None = None
    writer: int = 0

    def leaves(self) -> list[tuple[str, Tensor]]:
        return self._tensors()

    def _tensors(self) -> list[tuple[str, Tensor]]:
        root = "args" if self.port in ("input", "grad_input") else "output"
        return [(where, leaf) for where, leaf in walk(self.value, root) if isinstance(leaf, Tensor)]

    def summaries(self) -> dict[str, Summary]:
        return {where: summarize(leaf) for where, leaf in self._tensors()}

    def rows(self) -> dict[str, str]:
        return {}

    @property
    def nbytes(self) -> int:
        return sum(leaf.numel() * leaf.element_size() for _, leaf in self._tensors())


def three_events(folder: Path) -> Path:
    """Three events of one commit, in a writer's folder with a name that is known."""
    events = [Event(order, 0, "a", "output", 0, 0, torch.arange(6.0).view(2, 3) + order) for order in range(3)]
    store.save(folder, info={"a": 1}, modules=MODULES, events=events)
    return _named(folder)


def line_by_line(folder: Path) -> Path:
    """The same recording, appended to event by event."""
    events = store.open_recording(folder).events
    place = folder.with_name("lines") / "run"
    with store.Writer(place, info={"a": 1}, modules=MODULES) as writer:
        for event in events:
            writer.append([event])
    return _named(place)


def read_all(folder: Path) -> list[Any]:
    """Everything that can be read of each event."""
    return [
        (event.value, event.leaves(), event.summaries(), event.nbytes) for event in store.open_recording(folder).events
    ]


def _named(folder: Path) -> Path:
    (made,) = folder.glob("w*")
    made.rename(folder / WRITER)
    return folder
