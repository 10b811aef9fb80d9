"""Looking for damage: every byte of a recording is read and compared with its checksums and its manifests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from hookline.errors import FormatError
from hookline.store import format as layout
from hookline.store import reader
from hookline.store.crc32c import crc32c
from hookline.store.folders import names_in, read_head, read_small
from hookline.store.format import BATCH, END, HEAD, MANIFEST, Commit, ShardLine
from hookline.store.remote import Place, Remote
from hookline.store.remote_shard import Shards
from hookline.store.shard import open_regular
from hookline.store.strict_json import fault, is_sealed

_PIECE = 8 << 20
"""Bytes of a shard that are in memory at once."""


class Report(NamedTuple):
    """What is in a recording, and what is wrong with it.

    Attributes:
        folders: Folders of writers: one for each attempt of each writer.
        events: Events of all commits that can be read; what their rows are is none.
        shards: Shards that they name.
        nbytes: Bytes of these shards, as their manifests say.
        problems: One line for each thing that is wrong.
        torn: The manifests with an unfinished last line: an append was cut off or is under way; that is no damage.
    """

    folders: int
    events: int
    shards: int
    nbytes: int
    problems: list[str]
    torn: list[Place]


def verify(folder: str | os.PathLike[str] | Remote) -> Report:
    """Read all of a recording and say what is wrong with it. The first problem does not end the search.

    Every checksum, the size of every shard, and dtype and shape of every tensor are compared. Files that no manifest
    names are not looked at.

    Args:
        folder: The recording, ``run.hookline``.

    Raises:
        FormatError: There is no recording of that name.
    """
    path = reader.place_of_recording(folder)
    search = Search()
    with search.noting(path):
        _check_head(path)
    writers: list[Place] = []
    with search.noting(path):
        writers += reader.writers(path)
        search.problems += _orphans(path, writers)
    for writer in writers:
        with search.noting(writer / MANIFEST):
            search.look_at(writer)
        with search.noting(writer / END):
            _check_end(writer / END)
    return Report(len(writers), search.events, search.shards, search.nbytes, search.problems, search.torn)


def _check_head(folder: Place) -> None:
    text, place = read_head(folder), folder / HEAD
    layout.parse_head(text, place)
    _check_sealed(text, place)


def _check_end(place: Place) -> None:
    if reader.exists(place):
        text = read_small(place)
        layout.parse_end(text, place)
        _check_sealed(text, place)


def _check_sealed(text: bytes, place: object) -> None:
    if not is_sealed(text):
        raise fault(place, "it has no checksum, so nobody can tell whether it is as it was written")


def _orphans(folder: Place, writers: list[Place]) -> Iterator[str]:
    """Complaints about writers' folders that lost their manifest; one that was made just now has no shards either."""
    for path in [folder / name for name in sorted(names_in(folder))]:
        lost = layout.WRITER_NAME.fullmatch(path.name) and path not in writers
        if lost and any(map(layout.SHARD_NAME.fullmatch, names_in(path))):
            yield str(fault(path / MANIFEST, "this part of the recording is missing, its shards are there"))


class Search:
    """What was found so far.

    Attributes:
        problems: As of `Report`.
        torn: As of `Report`.
        events: As of `Report`.
        shards: As of `Report`.
        nbytes: As of `Report`.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.torn: list[Place] = []
        self.events = self.shards = self.nbytes = 0

    @contextlib.contextmanager
    def noting(self, place: Place) -> Iterator[None]:
        """Note an error as a problem and go on behind the with-block."""
        try:
            yield
        except FormatError as error:
            self.problems.append(str(error))
        except OSError as error:
            self.problems.append(str(fault(place, f"it cannot be read ({error})", "Check its permissions and disk.")))

    def look_at(self, writer: Place) -> None:
        """Search a writer's folder."""
        manifest = writer / MANIFEST
        seen: set[str] = set()
        batches: set[int] = set()
        for _, place, text in reader.lines_from(reader.manifests(writer), self.torn):
            with self.noting(manifest):
                commit = reader.parse_commit(text, place, seen)
                self.events += sum(event.port != BATCH for event in commit.events)
                with self.noting(manifest):
                    _check_batches(commit, place, batches)
                for shard in commit.shards:
                    self.check_shard(writer, shard, commit)
                _check_sealed(text, place)

    def check_shard(self, writer: Place, entry: ShardLine, commit: Commit) -> None:
        """Read all of a shard, and compare it with the line that names it."""
        with self.noting(writer / entry.file):
            self._check_shard(writer, entry, commit)

    def _check_shard(self, writer: Place, entry: ShardLine, commit: Commit) -> None:
        self.shards, self.nbytes = self.shards + 1, self.nbytes + entry.nbytes
        shard = Shards(writer).open(entry.file, entry.nbytes)
        with self.noting(shard.path):
            _check_sum(shard.path, entry)
        shard.contents  # noqa: B018 (raises once what each tensor would raise)
        tensors = (tensor for event in commit.events if event.shard == entry.file for tensor in event.tensors)
        for tensor in tensors:
            if tensor.data:
                with self.noting(shard.path):
                    shard.find(tensor)


def _check_batches(commit: Commit, place: layout.Line, known: set[int]) -> None:
    """Complain about an event that says what its rows are by something that does not stand before it."""
    missing: FormatError | None = None
    for number, event in enumerate(commit.events):
        if event.batch is not None and event.batch not in known:
            missing = missing or reader.no_batch(event.batch, place._replace(event=number))
        if event.port == BATCH:
            known.add(event.order)
    if missing is not None:
        raise missing


def _check_sum(path: Place, entry: ShardLine) -> None:
    found = 0
    with open_regular(path) as file:
        while piece := file.read(_PIECE):
            found = crc32c(piece, found)
    if found != entry.crc32c:
        raise fault(path, f"its checksum is {found:08x}, its manifest says {entry.crc32c:08x}")
