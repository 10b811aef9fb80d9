"""A small recording on disk, for the tests of the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hookline import store
from hookline.record.event import Event
from hookline.store import ModuleInfo

NAME = "0/a:output/0/output"
WRITER = "w00000-a1b2c3"
HEAD, MANIFEST, SHARD = "recording.json", f"{WRITER}/manifest.jsonl", f"{WRITER}/000000.safetensors"
MODULES = {"a": ModuleInfo("Linear", 3, ("b",))}


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
