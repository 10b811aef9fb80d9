"""Appending events to one writer's folder: the shards first, then the manifest line that names them, a commit."""

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
from hookline.store import format as layout
from hookline.store.folders import sync_folder
from hookline.store.format import MANIFEST, PORTS, EventLine, Line, ShardLine, TensorLine
from hookline.store.names import prefix_of, unique
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
_LINE_OVERHEAD, _SHARD_OVERHEAD = 100, 200
"""More bytes of a manifest line than the line itself, and each of its shards, need apart from the events."""


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
        return [(unique(self.prefix + path, taken), path, kept) for path, kept in self.tensors]

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for _, kept in self.tensors)

    @property
    def name_size(self) -> int:
        return sum(len(self.prefix) + len(path) + _NAME_OVERHEAD for path, _ in self.tensors)


class _Part(NamedTuple):
    """Events of a commit as they stand in its line, with the one shard that holds their tensors, if they have any."""

    texts: list[str]
    lines: list[EventLine]
    tensors: list[tuple[str, Stored]]


class _Commit:
    """A commit that is being put together; ``size`` is that of its line, in bytes."""

    def __init__(self) -> None:
        self.size = _LINE_OVERHEAD
        self.shards: list[ShardLine] = []
        self.texts: list[str] = []
        self.events: list[tuple[EventLine, Shard | None]] = []


class _Complete(NamedTuple):
    """What survives a crash: bytes and lines of the manifest, and how many numbers of shards were given away by then.

    One object, so that all of it changes at once, whenever Ctrl-C comes.
    """

    length: int
    lines: int
    shards: int


class Appender:
    """Appends to a writer's folder that has an empty manifest.

    Errors of the disk come out as OSError; what a failed append had written is taken back.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manifest = open(folder / MANIFEST, "r+b", buffering=0)  # noqa: SIM115 (closed by close)
        self._one_at_a_time = threading.Lock()  # autograd runs backward hooks in threads of its own
        self._shards = 0  # numbers that were given away; none is used twice, whatever became of its file
        self._complete = _Complete(0, 0, 0)

    def append(self, events: Iterable[EventLike]) -> list[StoredEvent]:
        """Write events as one commit; when it returns, they survive a crash of the process and of the machine.

        A reader finds all of them or none. Only when their line would be longer than `format.MAX_LINE` are they
        several commits, of which a crash may leave the first ones.

        Returns:
            The events as they stand on disk, in the same order.

        Raises:
            ArgumentError: An event holds something that cannot be stored.
            OSError: The disk refused.
        """
        with self._one_at_a_time:
            first = self._complete.lines + 1
            try:
                commits = self._write_shards(events)
                if self._shards > self._complete.shards:
                    sync_folder(self._folder)
                self._write_lines([layout.dump_commit(commit.shards, commit.texts) for commit in commits])
            except BaseException:
                self._take_back()
                raise
        places = [Line(self._folder / MANIFEST, first + number) for number in range(len(commits))]
        return [
            StoredEvent(line, shard, place._replace(event=index))
            for commit, place in zip(commits, places, strict=True)
            for index, (line, shard) in enumerate(commit.events)
        ]

    def close(self) -> None:
        """Close the manifest."""
        self._manifest.close()

    def _write_shards(self, events: Iterable[EventLike]) -> list[_Commit]:
        commits: list[_Commit] = []
        for batch in _batches(events):
            rest = [batch]
            while rest:
                some = rest.pop()
                name = layout.shard_name(self._shards)
                part = _part(some, name)
                size = sum(map(len, part.texts)) + len(part.texts) + _SHARD_OVERHEAD
                if size + _LINE_OVERHEAD > layout.MAX_LINE:
                    rest += reversed(_halves(some, size))
                    continue
                if not commits or commits[-1].size + size > layout.MAX_LINE:
                    commits.append(_Commit())
                self._write_part(part, name, commits[-1])
                commits[-1].size += size
        return commits

    def _write_part(self, part: _Part, name: str, commit: _Commit) -> None:
        shard = None
        if part.tensors:
            self._shards += 1
            entry = write_shard(self._folder / name, part.tensors)
            shard = Shard(self._folder / name, entry.nbytes)
            commit.shards.append(entry)
        commit.texts += part.texts
        commit.events += [(line, shard if line.shard else None) for line in part.lines]

    def _write_lines(self, lines: list[bytes]) -> None:
        if not lines:
            return
        length, count, _ = self._complete
        # a failed append may have left a part of a line behind
        self._manifest.truncate(length)
        self._manifest.seek(length)
        for line in lines:
            write_all(self._manifest, line)
        os.fsync(self._manifest.fileno())
        self._complete = _Complete(length + sum(map(len, lines)), count + len(lines), self._shards)

    def _take_back(self) -> None:
        """Remove what is not complete: lines before shards, so that none ever names a shard that is gone."""
        with contextlib.suppress(OSError):  # what stays is not read: an unfinished line, a shard that no line names
            self._manifest.truncate(self._complete.length)
            for name in map(layout.shard_name, range(self._complete.shards, self._shards)):
                (self._folder / name).unlink(missing_ok=True)
                (self._folder / layout.draft_name(name)).unlink(missing_ok=True)


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
    return _Planned(event, structure, list(zip(paths, kept, strict=True)), prefix_of(event))


def _check_place(event: EventLike) -> None:
    numbers = {"order": event.order, "step": event.step, "call": event.call, "backward": event.backward}
    if event.port not in PORTS:
        raise ArgumentError(f"{event.port!r} is no port. Give one of {', '.join(PORTS)}.")
    for name, number in numbers.items():
        if type(number) is not int or not 0 <= number <= LARGEST:
            raise ArgumentError(f"{name} is {number!r}. Give an int from 0 to 2**63 - 1.")


def _part(batch: list[_Planned], shard: str) -> _Part:
    """Events that share a shard of that name, if they need one."""
    taken: set[str] = set()
    named = [planned.named(taken) for planned in batch]
    lines = [_line(planned, shard, tensors) for planned, tensors in zip(batch, named, strict=True)]
    data = [(name, kept) for tensors in named for name, _, kept in tensors if kept.data is not None]
    return _Part([*map(layout.dump_event, lines)], lines, data)


def _halves(batch: list[_Planned], size: int) -> list[list[_Planned]]:
    """Two groups of events, of a group that needs too long a line."""
    middle = len(batch) // 2
    if middle:
        return [batch[:middle], batch[middle:]]
    (planned,) = batch
    found = f"{planned.prefix}: its {len(planned.tensors)} tensors need a manifest line of {size} bytes"
    raise ArgumentError(f"{found}, at most {layout.MAX_LINE} are possible. Record inner modules instead.")


def _line(planned: _Planned, shard: str, tensors: list[tuple[str, str, Stored]]) -> EventLine:
    event, summaries = planned.event, planned.event.summaries()
    entries = tuple(_entry(name, path, kept, summaries.get(path)) for name, path, kept in tensors)
    used = shard if any(entry.data for entry in entries) else None
    place = event.order, event.step, event.path, event.port, event.call, event.backward
    return EventLine(*place, used, planned.structure, entries)


def _entry(name: str, path: str, kept: Stored, summary: Summary | None) -> TensorLine:
    fields = None if summary is None else vars(summary)
    return TensorLine(name, path, kept.dtype, kept.shape, fields, kept.data is not None, kept.converted_from)
