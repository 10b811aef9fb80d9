"""Appending events to one writer's folder: the shards first, then the manifest line that names them, a commit."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hookline.errors import ArgumentError, QuotaError
from hookline.stats.summary import Summary
from hookline.store import format as layout
from hookline.store.event_like import EventLike
from hookline.store.folders import sync_folder
from hookline.store.format import BATCH, MANIFEST, PORTS, EventLine, Line, ShardLine, TensorLine
from hookline.store.names import prefix_of, unique
from hookline.store.reader import StoredEvent, stored_events
from hookline.store.remote import Place
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

    @property
    def line_size(self) -> int:
        """Bytes that it needs in a line."""
        return sum(map(len, self.texts)) + len(self.texts) + _SHARD_OVERHEAD


class Staged:
    """Events whose shards are on disk while no line of the manifest names them, so that no reader sees them yet.

    Attributes:
        nbytes: Bytes that they take on disk, with their lines.
    """

    def __init__(self) -> None:
        self._names: list[str] = []  # of shards, also of one that is being written
        self._parts: tuple[_Written, ...] = ()
        self._batches: dict[int, StoredEvent] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that they take on disk, with their lines."""
        return sum(part.nbytes for part in self._parts)


class _Written(NamedTuple):
    """A part whose shard is on disk."""

    texts: list[str]
    line_size: int
    events: list[StoredEvent]
    shard: ShardLine | None

    @property
    def nbytes(self) -> int:
        return self.line_size + (0 if self.shard is None else self.shard.nbytes)


class _Complete(NamedTuple):
    """What survives a crash: bytes and lines of the manifest, and what was committed last.

    One object, so that all of it changes at once, whenever Ctrl-C comes.
    """

    length: int
    lines: int
    last: tuple[Staged, ...] = ()


class Appender:
    """Appends to a writer's folder that has an empty manifest.

    Errors of the disk come out as OSError; what a failed append had written is taken back.

    Args:
        folder: The writer's folder.
        quota: Most bytes that shards and manifest may take; None for no limit.
    """

    def __init__(self, folder: Place, *, quota: int | None = None) -> None:
        self._folder: Any = folder
        self._open()
        self._one_at_a_time = threading.Lock()  # autograd runs backward hooks in threads of its own
        self._shards = 0  # numbers that were given away; none is used twice, whatever became of its file
        self._complete = _Complete(0, 0)
        self._quota = quota
        self._used = 0

    def _open(self) -> None:
        self._manifest = open(self._folder / MANIFEST, "r+b", buffering=0)  # noqa: SIM115 (closed by close)

    def append(self, events: Iterable[EventLike]) -> list[StoredEvent]:
        """Write events as one commit; when it returns, they survive a crash of the process and of the machine.

        A reader finds all of them or none. Only when their line would be longer than `format.MAX_LINE` are they
        several commits, of which a crash may leave the first ones.

        Returns:
            The events as they stand on disk, in the same order.

        Raises:
            ArgumentError: An event holds something that cannot be stored.
            QuotaError: They would pass the quota.
            OSError: The disk refused.
        """
        staged = Staged()
        try:
            written = self.stage(staged, events)
            self.commit([staged])
        except BaseException:
            self.discard(staged)
            raise
        return written

    def stage(self, staged: Staged, events: Iterable[EventLike]) -> list[StoredEvent]:
        """Write the shards of more events; `commit` makes them part of the recording. After an error none was added.

        Raises:
            ArgumentError, QuotaError, OSError: As for `append`.
        """
        with self._one_at_a_time:
            names, parts = len(staged._names), [*staged._parts]
            before = len(parts)
            try:
                for batch in _batches(_with_batches(events, {*staged._batches})):
                    self._stage_batch(staged, batch, parts)
                staged._parts = tuple(parts)
            except BaseException:
                staged._parts = staged._parts[:before]
                self._remove(staged._names[names:])
                del staged._names[names:]
                self._used -= sum(part.nbytes for part in parts[before:])
                raise
        return [event for part in parts[before:] for event in part.events if event.port != BATCH]

    def commit(self, several: Sequence[Staged]) -> None:
        """Make what was staged part of the recording, as one commit. After an error it is as before.

        Raises:
            OSError: The disk refused.
        """
        with self._one_at_a_time:
            parts = [part for staged in several for part in staged._parts]
            lines = _lines(parts)
            try:
                if any(staged._names for staged in several):
                    self._settle()
                manifest, first = self._write_lines([line.dump() for line in lines], tuple(several))
            except BaseException:
                self._take_back()
                raise
        for number, line in enumerate(lines):
            place = Line(manifest, first + number)
            for index, event in enumerate(event for part in line.parts for event in part.events):
                event.stands_at(place._replace(event=index))

    def discard(self, staged: Staged) -> None:
        """Delete the shards of what was staged, unless it was committed last."""
        with self._one_at_a_time:
            if staged not in self._complete.last:
                self._remove(staged._names)
                self._used -= staged.nbytes
                staged._names, staged._parts = [], ()

    def close(self) -> None:
        """Close the manifest."""
        self._manifest.close()

    def _stage_batch(self, staged: Staged, batch: list[_Planned], parts: list[_Written]) -> None:
        """Write a batch as one shard; as several where its line would be too long."""
        rest = [batch]
        while rest:
            some = rest.pop()
            name = layout.shard_name(self._shards)
            part = _part(some, name)
            size = part.line_size
            if size + _LINE_OVERHEAD > layout.MAX_LINE:
                rest += reversed(_halves(some, size))
                continue
            self._check_quota(size + sum(planned.nbytes + planned.name_size for planned in some))
            shard = entry = None
            if part.tensors:
                self._shards += 1
                staged._names.append(name)
                entry, shard = self._write_shard(name, part.tensors)
            place = self._folder / MANIFEST
            events = stored_events(
                part.lines, {name: shard} if shard else {}, [place] * len(part.lines), staged._batches
            )
            parts.append(_Written(part.texts, size, events, entry))
            self._used += parts[-1].nbytes

    def _check_quota(self, size: int) -> None:
        if self._quota is not None and self._used + size > self._quota:
            raise QuotaError(
                f"{self._folder.parent}: the quota of {self._quota:,} bytes is reached: {self._used:,} are used and "
                f"{size:,} more are needed. Raise quota=, or record fewer sites or a smaller dtype=."
            )

    def _write_shard(self, name: str, tensors: list[tuple[str, Stored]]) -> tuple[ShardLine, Shard]:
        entry = write_shard(self._folder / name, tensors)
        return entry, Shard(self._folder / name, entry.nbytes)

    def _settle(self) -> None:
        """Wait until the names of the shards are on disk."""
        sync_folder(self._folder)

    def _take_back(self) -> None:
        with contextlib.suppress(OSError):  # an unfinished line is not read
            self._manifest.truncate(self._complete.length)

    def _write_lines(self, lines: list[bytes], several: tuple[Staged, ...]) -> tuple[Place, int]:
        """Write the lines of a commit; the manifest, and the number of the first one in it."""
        manifest, first = self._folder / MANIFEST, self._complete.lines + 1
        if not lines:
            return manifest, first
        here, there = os.fstat(self._manifest.fileno()), os.stat(self._folder / MANIFEST)
        if (here.st_ino, here.st_dev) != (there.st_ino, there.st_dev):
            raise FileNotFoundError(errno.ENOENT, "somebody has exchanged the manifest")
        length, count, _ = self._complete
        # a failed commit may have left a part of a line behind
        self._manifest.truncate(length)
        self._manifest.seek(length)
        for line in lines:
            write_all(self._manifest, line)
        os.fsync(self._manifest.fileno())
        self._complete = _Complete(length + sum(map(len, lines)), count + len(lines), several)
        return manifest, first

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            for path in (self._folder / name, self._folder / layout.draft_name(name)):
                with contextlib.suppress(OSError):  # what stays is not read, since no line names it
                    path.unlink(missing_ok=True)


class _CommitLine(NamedTuple):
    """Parts that share a line."""

    parts: list[_Written]

    def dump(self) -> bytes:
        shards = [part.shard for part in self.parts if part.shard is not None]
        return layout.dump_commit(shards, [text for part in self.parts for text in part.texts])


def _lines(parts: Iterable[_Written]) -> list[_CommitLine]:
    """Parts in as few lines as can hold them."""
    lines: list[_CommitLine] = []
    size = 0
    for part in parts:
        if not lines or size + part.line_size > layout.MAX_LINE:
            lines.append(_CommitLine([]))
            size = _LINE_OVERHEAD
        lines[-1].parts.append(part)
        size += part.line_size
    return lines


def _with_batches(events: Iterable[EventLike], known: set[int]) -> Iterator[EventLike]:
    """The events, and before the first of a batch what its rows are, if that is not known."""
    for event in events:
        if event.batch is not None and event.batch.order not in known:
            known.add(event.batch.order)
            yield event.batch
        yield event


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
    if event.port not in (*PORTS, BATCH):
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
    event, summaries, rows = planned.event, planned.event.summaries(), planned.event.rows()
    entries = tuple(_entry(name, path, kept, summaries.get(path), rows.get(path)) for name, path, kept in tensors)
    used = shard if any(entry.data for entry in entries) else None
    place = event.order, event.step, event.path, event.port, event.call, event.backward
    batch = None if event.batch is None else event.batch.order
    return EventLine(*place, used, planned.structure, entries, batch)


def _entry(name: str, path: str, kept: Stored, summary: Summary | None, rows: str | None) -> TensorLine:
    fields = None if summary is None else vars(summary)
    return TensorLine(name, path, kept.dtype, kept.shape, fields, kept.data is not None, kept.converted_from, rows)
