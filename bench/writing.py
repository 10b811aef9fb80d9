"""Writing to disk: `Writer.append` against raw files and against the ways in which tensors are usually saved."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import safetensors.torch
import torch
from measured import Measured, at_least, at_most
from timing import in_turn, ratio, spread, timed
from torch import Tensor

from hookline.record.event import Event
from hookline.store import Writer

__all__ = ["formats", "shards", "small", "write_tensor"]

PIECE = 4 << 20
"""Bytes of a tensor in a large shard."""
SMALL = 2 << 10
"""Bytes of a small tensor."""
MODULES = 100
"""Small tensors of a step."""
FAST, FEW = at_least(0.8), at_most(3)


def shards(quick: bool, folder: Path) -> Iterator[Measured]:
    """Shards of 64 and 256 MiB against one file of the same bytes."""
    for mebibytes, rounds in ((4, 2), (8, 2)) if quick else ((64, 15), (256, 9)):
        events = _events(mebibytes << 20, PIECE, per_step=1)
        ways = {"raw": _raw, **_appending(events)}
        times = in_turn({name: _fresh(folder, way, events) for name, way in ways.items()}, rounds)
        for name in ways:
            if name != "raw":
                speed = (mebibytes << 20) / spread(times[name]).median / 1e9
                what = f"speed of a shard of {mebibytes} MiB, {name}"
                found = ratio(times["raw"], times[name])
                yield Measured(what, "write and fsync of one file", found, FAST, f"{speed:.2f} GB/s")


def small(quick: bool, folder: Path) -> Iterator[Measured]:
    """Very many small tensors in one append against one file with an index."""
    count, rounds = (200, 2) if quick else (20_000, 7)
    events = _events(count * SMALL, SMALL, per_step=MODULES)
    ways = {"raw": _indexed, **_appending(events)}
    times = in_turn({name: _fresh(folder, way, events) for name, way in ways.items()}, rounds)
    raw = 1e6 * spread(times["raw"]).median / count
    for name in ways:
        if name != "raw":
            told = f"{1e6 * spread(times[name]).median / count:.1f} us a tensor, raw {raw:.1f} us"
            what = f"time of {count:,} tensors of 2 KiB, {name}"
            yield Measured(what, "raw append with an index", ratio(times[name], times["raw"]), FEW, told)


def formats(quick: bool, folder: Path) -> Iterator[Measured]:
    """Other files of the same tensors, as ratios to one append."""
    few = ((20 * SMALL, SMALL, 10, 2), (2 * PIECE, PIECE, 1, 2))
    plans = few if quick else ((2000 * SMALL, SMALL, MODULES, 5), (16 * PIECE, PIECE, 4, 9))
    for total, size, per_step, rounds in plans:
        events = _events(total, size, per_step=per_step)
        ways = {"ours": _appending(events)["statistics included"], **OTHERS}
        times = in_turn({name: _fresh(folder, way, events) for name, way in ways.items()}, rounds)
        data = f"{len(events):,} tensors of {size >> 10:,} KiB"
        for name in OTHERS:
            found = f"{spread(times[name]).median * 1e3:.0f} ms, ours {spread(times['ours']).median * 1e3:.0f} ms"
            yield Measured(f"time of {name}, {data}", "one append", ratio(times[name], times["ours"]), None, found)


# ---------------------------------------------------------------- the data


def _events(total: int, size: int, *, per_step: int) -> list[Event]:
    values = torch.randn(total // size, size // 4)
    return [
        Event(order, order // per_step, f"layers.{order % per_step}", "output", 0, 0, value.clone())
        for order, value in enumerate(values)
    ]


def _again(events: Sequence[Event]) -> list[Event]:
    """The same events, without the statistics that the others have made by now."""
    return [Event(e.order, e.step, e.path, e.port, e.call, e.backward, e.value) for e in events]


def _tensors(events: Sequence[Event]) -> Iterator[tuple[str, Tensor]]:
    return ((f"{event.step}.{event.path}", event.value) for event in events)


# ---------------------------------------------------------------- the ways

Way = Callable[[Path, Sequence[Event]], float]
"""Seconds to write events into an empty folder."""


def _fresh(folder: Path, way: Way, events: Sequence[Event]) -> Callable[[], float]:
    def sample() -> float:
        place = Path(tempfile.mkdtemp(dir=folder))
        try:
            return way(place, events)
        finally:
            shutil.rmtree(place)

    return sample


def _appending(events: Sequence[Event]) -> dict[str, Way]:
    """An append of events that come from a recorder, and one of events whose statistics somebody has looked at."""
    looked_at = _again(events)
    for event in looked_at:
        event.summaries()
    return {
        "statistics included": lambda place, _: _appended(place, _again(events)),
        "statistics made before": lambda place, _: _appended(place, looked_at),
    }


def _appended(place: Path, events: Sequence[Event]) -> float:
    with Writer(place / "run.hookline", info={}, modules={}) as writer:
        return timed(lambda: writer.append(events))


def _raw(place: Path, events: Sequence[Event]) -> float:
    def write() -> None:
        with _synced(place / "raw") as file:
            for event in events:
                write_tensor(file.fileno(), event.value)

    return timed(write)


def _indexed(place: Path, events: Sequence[Event]) -> float:
    def write() -> None:
        offset, index = 0, []
        with _synced(place / "raw") as file:
            for name, tensor in _tensors(events):
                length = write_tensor(file.fileno(), tensor)
                index.append((offset, length, name))
                offset += length
        with open(place / "index.jsonl", "w", encoding="ascii") as lines:
            lines.writelines(json.dumps(entry) + "\n" for entry in index)

    return timed(write)


def _torch_save(place: Path, events: Sequence[Event]) -> float:
    return timed(lambda: _each(place, events, torch.save))


def _numpy_save(place: Path, events: Sequence[Event]) -> float:
    return timed(lambda: _each(place, events, lambda tensor, file: np.save(file, tensor.numpy())))


def _each(place: Path, events: Sequence[Event], save: Callable[[Tensor, BinaryIO], None]) -> None:
    for name, tensor in _tensors(events):
        with _synced(place / name) as file:
            save(tensor, file)


def _safetensors(place: Path, events: Sequence[Event]) -> float:
    def write() -> None:
        steps: dict[int, dict[str, Tensor]] = {}
        for event in events:
            steps.setdefault(event.step, {})[event.path] = event.value
        for step, tensors in steps.items():
            path = place / f"{step}.safetensors"
            safetensors.torch.save_file(tensors, path)
            with open(path, "rb") as file:
                os.fsync(file.fileno())

    return timed(write)


OTHERS: dict[str, Way] = {
    "torch.save for each tensor": _torch_save,
    "safetensors for each step": _safetensors,
    "numpy .npy for each tensor": _numpy_save,
}


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    """A new file, of which the disk has everything at the end."""
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_tensor(handle: int, tensor: Tensor) -> int:
    """All bytes of a contiguous tensor to a file; returns how many."""
    rest = memoryview(tensor.numpy()).cast("B")
    length = len(rest)
    while rest:
        rest = rest[os.write(handle, rest) :]
    return length
