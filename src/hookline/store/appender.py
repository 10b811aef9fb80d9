"""Appending events to one writer's folder: shards first, then the manifest lines that name them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hookline.errors import ArgumentError
from hookline.stats.summary import Summary
from hookline.store.folders import sync_folder
from hookline.store.format import MANIFEST, MAX_LINE, PORTS, EventLine, Line, TensorLine, dump_event, shard_name
from hookline.store.reader import StoredEvent
from hookline.store.shard import Shard, write_shard
from hookline.store.strict_json import LARGEST
from hookline.store.structure import encode
from hookline.store.tensors import Stored, stored, write_all

SHARD_BYTES = 256 << 20
"""Bytes of tensor data after which a flush begins another shard."""
SHARD_NAMES = 32 << 20
"""Characters of tensor names after which it does; the safetensors library reads headers up to 100 MB."""
_NAME_OVERHEAD = 100


class EventLike(Protocol):
    """What the store needs of an event; live events and those read back both have it."""

    @property
    def order(self) -> int:
        """Number of the event in its recording, from 0."""
        ...

    @property
    def step(self) -> int:
        """Step, from 0."""
        ...

    @property
    def path(self) -> str:
        """Path of the module; ``""`` is the root."""
        ...

    @property
    def port(self) -> str:
        """``input``, ``output``, ``grad_input`` or ``grad_output``."""
        ...

    @property
    def call(self) -> int:
        """Number of the call of that module in that step."""
        ...

    @property
    def backward(self) -> int:
        """Number of the backward pass through that call."""
        ...

    @property
    def value(self) -> Any:
        """The kept value."""
        ...

    def leaves(self) -> Sequence[tuple[str, Tensor]]:
        """Value path and tensor of each tensor of the value, in order."""
        ...

    def summaries(self) -> Mapping[str, Summary]:
        """Statistics by value path."""
        ...


class _Planned(NamedTuple):
    """An event that is ready to be written: the place of a tensor is (value path, stored form)."""

    event: EventLike
    structure: Any
    tensors: list[tuple[str, Stored]]
    prefix: str

    def named(self, taken: set[str]) -> list[tuple[str, str, Stored]]:
        """Name in the shard, value path and form of each tensor; the names are added to those taken."""
        return [(_unique(self.prefix + path, taken), path, kept) for path, kept in self.tensors]

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for _, kept in self.tensors)

    @property
    def name_size(self) -> int:
        return sum(len(self.prefix) + len(path) + _NAME_OVERHEAD for path, _ in self.tensors)


class Appender:
    """Appends to a writer's folder that has an empty manifest.

    Errors of the disk come out as OSError; what a failed append had written is taken back.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manifest = open(folder / MANIFEST, "r+b", buffering=0)  # noqa: SIM115 (closed by close)
        self._one_at_a_time = threading.Lock()  # autograd runs backward hooks in threads of its own
        self._shards = self._lines = 0
        self._complete = (0, 0)  # length of the manifest and number of shards; one name, so that both change at once

    def append(self, events: Iterable[EventLike]) -> list[StoredEvent]:
        """Write events; when it returns, they survive a crash of the process and of the machine.

        Returns:
            The events as they stand on disk, in the same order.

        Raises:
            ArgumentError: An event holds something that cannot be stored.
            OSError: The disk refused.
        """
        lines = bytearray()
        written: list[tuple[EventLine, Shard | None]] = []
        with self._one_at_a_time:
            try:
                for batch in _batches(events):
                    for text, line, shard in self._write_batch(batch):
                        lines += text
                        written.append((line, shard))
                if self._shards > self._complete[1]:
                    sync_folder(self._folder)
                self._write_lines(lines)
            except BaseException:
                self._take_back()
                raise
            first = self._lines + 1
            self._lines += len(written)
        places = (Line(self._folder / MANIFEST, number) for number in range(first, first + len(written)))
        return [StoredEvent(line, shard, place) for (line, shard), place in zip(written, places, strict=True)]

    def close(self) -> None:
        """Close the manifest."""
        self._manifest.close()

    def _write_batch(self, batch: list[_Planned]) -> Iterator[tuple[bytes, EventLine, Shard | None]]:
        names: set[str] = set()
        named = [planned.named(names) for planned in batch]
        data = [(name, kept) for tensors in named for name, _, kept in tensors if kept.data is not None]
        shard = shard_name(self._shards) if data else None
        if shard is not None:
            write_shard(self._folder / shard, data)
            self._shards += 1
        opened = None if shard is None else Shard(self._folder / shard)
        for planned, tensors in zip(batch, named, strict=True):
            text, line = _line(planned, shard, tensors)
            yield text, line, opened if line.shard else None

    def _write_lines(self, lines: bytearray) -> None:
        length, _ = self._complete
        # a failed append may have left a part of a line behind
        self._manifest.truncate(length)
        self._manifest.seek(length)
        write_all(self._manifest, memoryview(lines))
        os.fsync(self._manifest.fileno())
        self._complete = length + len(lines), self._shards

    def _take_back(self) -> None:
        """Remove what is not complete: lines first, so that none ever names a shard that is gone."""
        length, shards = self._complete
        with contextlib.suppress(OSError):  # what stays is not read: an unfinished line, a shard that no line names
            self._manifest.truncate(length)
            for number in range(shards, self._shards + 1):
                (self._folder / shard_name(number)).unlink(missing_ok=True)
        self._shards = shards


def _batches(events: Iterable[EventLike]) -> Iterator[list[_Planned]]:
    """Events in groups that fill a shard each."""
    batch: list[_Planned] = []
    nbytes = names = 0
    for event in events:
        planned = _plan(event)
        nbytes, names = nbytes + planned.nbytes, names + planned.name_size
        if batch and (nbytes > SHARD_BYTES or names > SHARD_NAMES):
            yield batch
            batch, nbytes, names = [], planned.nbytes, planned.name_size
        batch.append(planned)
    if batch:
        yield batch


def _plan(event: EventLike) -> _Planned:
    tensors: list[Tensor] = []
    site = f"{event.path or '(root)'}:{event.port}"
    try:
        _check_place(event)
        structure = encode(event.value, tensors)
        kept = [stored(tensor) for tensor in tensors]
    except ArgumentError as error:
        raise ArgumentError(f"{site}, call {event.call} of step {event.step}: {error}") from error
    paths = [path for path, _ in event.leaves()]
    if len(paths) != len(kept):
        found = f"{site}: its value has {len(kept)} tensors, its leaves() are {len(paths)}"
        raise ArgumentError(f"{found}. Make {type(event).__name__}.leaves() give the tensors of its value.")
    call = f"{event.call}.b{event.backward}" if event.backward else f"{event.call}"
    return _Planned(event, structure, list(zip(paths, kept, strict=True)), f"{event.step}/{site}/{call}/")


def _check_place(event: EventLike) -> None:
    numbers = {"order": event.order, "step": event.step, "call": event.call, "backward": event.backward}
    if event.port not in PORTS:
        raise ArgumentError(f"{event.port!r} is no port. Give one of {', '.join(PORTS)}.")
    for name, number in numbers.items():
        if type(number) is not int or not 0 <= number <= LARGEST:
            raise ArgumentError(f"{name} is {number!r}. Give an int from 0 to 2**63 - 1.")


def _unique(name: str, names: set[str]) -> str:
    """A name that is not taken in the shard; what UTF-8 cannot hold is written as an escape."""
    name = found = name.encode("utf-8", "backslashreplace").decode()
    number = 1
    while found in names:
        number += 1
        found = f"{name}~{number}"
    names.add(found)
    return found


def _line(planned: _Planned, shard: str | None, tensors: list[tuple[str, str, Stored]]) -> tuple[bytes, EventLine]:
    event, summaries = planned.event, planned.event.summaries()
    entries = tuple(_entry(name, path, kept, summaries.get(path)) for name, path, kept in tensors)
    used = shard if any(entry.data for entry in entries) else None
    place = event.order, event.step, event.path, event.port, event.call, event.backward
    line = EventLine(*place, used, planned.structure, entries)
    text = dump_event(line)
    if len(text) > MAX_LINE:
        found = f"{planned.prefix}: its {len(entries)} tensors need a manifest line of {len(text)} bytes"
        raise ArgumentError(f"{found}, at most {MAX_LINE} are possible. Record inner modules instead.")
    return text, line


def _entry(name: str, path: str, kept: Stored, summary: Summary | None) -> TensorLine:
    fields = None if summary is None else vars(summary)
    return TensorLine(name, path, kept.dtype, kept.shape, fields, kept.data is not None, kept.converted_from)
