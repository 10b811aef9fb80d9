"""Appending events to one writer's folder: the shards first, then the manifest line that names them, a commit."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hookline.errors import ArgumentError, QuotaError
from hookline.store import format as layout
from hookline.store.background import Background
from hookline.store.dump import dump_commit
from hookline.store.event_like import EventLike
from hookline.store.folders import sync_folder
from hookline.store.format import BATCH, MANIFEST, Line, ShardLine
from hookline.store.manifests import writer_number
from hookline.store.planned import Draft, Refused, drafts, halves, refuse, with_batches
from hookline.store.reader import StoredEvent, stored_events
from hookline.store.remote import Place
from hookline.store.shard import Shard, write_shard
from hookline.store.tensors import Stored, write_all

_LINE_OVERHEAD = 100
"""Bytes of a manifest line apart from its events and shards, and more."""


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
        quota: Most bytes that shards and manifests may take; None for no limit.
        used: Bytes of it that are taken already.
    """

    def __init__(self, folder: Place, *, quota: int | None = None, used: int = 0) -> None:
        self._folder: Any = folder
        self._number = writer_number(folder)
        self._open()
        self._one_at_a_time = threading.Lock()  # autograd runs backward hooks in threads of its own
        self._shards = 0  # numbers that were given away; none is used twice, whatever became of its file
        self._complete = _Complete(0, 0)
        self._quota = quota
        self._used = self._earlier = used

    def _open(self) -> None:
        self._manifest = open(self._folder / MANIFEST, "r+b", buffering=0)  # noqa: SIM115 (closed by close)

    def append(self, events: Iterable[EventLike], refused: Refused | None = None) -> list[StoredEvent]:
        """Write events as one commit; when it returns, they survive a crash of the process and of the machine.

        A reader finds all of them or none. Only when their line would be longer than `format.MAX_LINE` are they
        several commits, of which a crash may leave the first ones.

        Returns:
            The events as they stand on disk, in the same order, without those that were refused.

        Raises:
            ArgumentError: An event holds something that cannot be stored, and ``refused`` is None.
            QuotaError: They would pass the quota.
            OSError: The disk refused.
        """
        staged = Staged()
        try:
            written = self.stage(staged, events, refused)
            self.commit([staged])
        except BaseException:
            self.discard(staged)
            raise
        return written

    def stage(self, staged: Staged, events: Iterable[EventLike], refused: Refused | None = None) -> list[StoredEvent]:
        """Write the shards of more events; `commit` makes them part of the recording. After an error none was added.

        Raises:
            ArgumentError, QuotaError, OSError: As for `append`.
        """
        with self._one_at_a_time:
            names, parts = len(staged._names), [*staged._parts]
            before, batches = len(parts), {**staged._batches}
            try:
                self._stage_events(staged, with_batches(events, {*staged._batches}), parts, refused)
                staged._parts = tuple(parts)
            except BaseException:
                staged._parts, staged._batches = staged._parts[:before], batches
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
                event.stands_at(place, index)

    def discard(self, staged: Staged) -> None:
        """Delete the shards of what was staged, unless it was committed last."""
        with self._one_at_a_time:
            if staged not in self._complete.last:
                self._remove(staged._names)
                self._used -= staged.nbytes
                staged._names, staged._parts = [], ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was committed."""
        return self._complete.lines == 0

    def close(self) -> None:
        """Close the manifest."""
        self._manifest.close()

    def _next_name(self) -> str:
        return layout.shard_name(self._shards)

    def _stage_events(
        self, staged: Staged, events: Iterable[EventLike], parts: list[_Written], refused: Refused | None
    ) -> None:
        """Write events as shards; where the line of one would be too long, each half of its events again."""
        for draft in drafts(events, refused, self._next_name):
            size = self._stage_draft(staged, draft, parts)
            if size + _LINE_OVERHEAD <= layout.MAX_LINE:
                continue
            try:
                again = halves(draft, size)
            except ArgumentError as error:
                refuse(draft.events[0], error, refused)
                continue
            for some in again:
                self._stage_events(staged, some, parts, refused)

    def _stage_draft(self, staged: Staged, draft: Draft, parts: list[_Written]) -> int:
        """Write a shard, which is deleted again where its line would be too long; the size of the line."""
        data = draft.nbytes + draft.name_size
        self._check_quota(data)
        with self._shard(staged, draft) as written:
            part = draft.part()
            size = part.line_size
            if size + _LINE_OVERHEAD <= layout.MAX_LINE:
                self._check_quota(size + data)
            entry, shard = written()
        if size + _LINE_OVERHEAD > layout.MAX_LINE:
            self._remove([draft.shard])
            return size
        place = self._folder / MANIFEST
        shards, places = {} if shard is None else {draft.shard: shard}, [place] * len(part.lines)
        events = stored_events(part.lines, shards, places, staged._batches, self._number)
        parts.append(_Written(part.texts, size, events, entry))
        self._used += parts[-1].nbytes
        return size

    @contextlib.contextmanager
    def _shard(self, staged: Staged, draft: Draft) -> Iterator[Callable[[], tuple[ShardLine | None, Shard | None]]]:
        """Write a shard, a large one meanwhile; gives what waits for it and returns it, None without tensors."""
        if not draft.data:
            yield lambda: (None, None)
            return
        self._shards += 1
        staged._names.append(draft.shard)
        write = functools.partial(self._write_shard, draft.shard, draft.data)
        if not draft.is_large:
            yield write
            return
        beside = Background(write, one_core=True)
        try:
            yield beside.result
        finally:
            beside.wait()

    def _check_quota(self, size: int) -> None:
        if self._quota is not None and self._used + size > self._quota:
            used = f"{self._used:,} are used" + (f", {self._earlier:,} of them by earlier runs," * bool(self._earlier))
            other = "record into another folder" if self._earlier else "record fewer sites or a smaller dtype="
            raise QuotaError(
                f"{self._folder.parent}: the quota of {self._quota:,} bytes is reached: {used} and {size:,} more are "
                f"needed. Raise quota=, or {other}."
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
        return dump_commit(shards, [text for part in self.parts for text in part.texts])


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
