"""Reading a recording: the manifests at once, the tensors when they are asked for."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hookline.errors import FormatError
from hookline.stats.summary import Summary
from hookline.store import format as layout
from hookline.store.folders import read_head, read_small
from hookline.store.format import BATCH, END, HEAD, MANIFEST, Commit, EventLine, ModuleInfo, TensorLine
from hookline.store.shard import Shard, meta_tensor, open_regular, torch_dtype
from hookline.store.strict_json import fault
from hookline.store.structure import decode

_OTHER_FOLDER = "Pass a folder that Hookline wrote, such as run.hookline."
_ONE_TENSOR = {"t": 0}


class StoredEvent:
    """One event of a recording on disk. Its tensors are mapped from the file each time they are asked for.

    Attributes:
        order: Number of the event in its recording.
        step: Step.
        path: Path of the module; ``""`` is the root.
        port: ``input``, ``output``, ``grad_input`` or ``grad_output``.
        call: Number of the call of that module in that step.
        backward: Number of the backward pass through that call.
        batch: What its rows are, an event of the port ``batch``; None where that was not said.
        writer: Number of its writer, such as the rank of a process.
    """

    __slots__ = (
        *("_place", "_shard", "_structure", "_tensors", "backward", "batch", "call", "order", "path", "port", "step"),
        "writer",
    )

    def __init__(
        self,
        line: EventLine,
        shard: Shard | None,
        place: object,
        batch: StoredEvent | None = None,
        writer: int = 0,
    ) -> None:
        self.batch, self.writer = batch, writer
        self.order, self.step, self.path, self.port = line.order, line.step, line.path, line.port
        self.call, self.backward = line.call, line.backward
        self._structure, self._tensors, self._shard, self._place = line.structure, line.tensors, shard, place

    def stands_at(self, place: object) -> None:
        """Say where its line stands, once it is written."""
        self._place = place

    @property
    def value(self) -> Any:
        """The kept value. Writing into its tensors does not reach the file.

        Raises:
            FormatError: The shard is truncated, damaged or hostile.
        """
        tensors = [self._tensor(line) for line in self._tensors]
        return tensors[0] if self._structure == _ONE_TENSOR else decode(self._structure, tensors, self._place)

    def outline(self) -> Any:
        """The value with tensors that have dtype and shape alone, from the manifest."""
        return decode(self._structure, [meta_tensor(line, self._place) for line in self._tensors], self._place)

    def leaves(self) -> list[tuple[str, Tensor]]:
        """Value path and tensor of each tensor of the value, in order."""
        return [(line.path, self._tensor(line)) for line in self._tensors]

    def leaf(self, place: int) -> Tensor:
        """The tensor at a place among the leaves; the others are not touched."""
        return self._tensor(self._tensors[place])

    def span(self, place: int) -> tuple[npt.NDArray[np.uint8], int] | None:
        """The bytes of the shard that holds the tensor at a place among the leaves, and where in them it begins.

        None where there are no data. The bytes are not to be written.
        """
        line = self._tensors[place]
        return None if self._shard is None or not line.data else self._shard.span(line)

    def layouts(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Value path, dtype and shape of each tensor of the value, from the manifest."""
        return [(line.path, torch_dtype(line.dtype, self._place), torch.Size(line.shape)) for line in self._tensors]

    def summaries(self) -> dict[str, Summary]:
        """Statistics by value path, from the manifest; the tensors are not touched."""
        return {line.path: Summary(**line.summary) for line in self._tensors if line.summary}  # type: ignore[arg-type]

    def known_summaries(self) -> dict[str, Summary]:
        """The same as ``summaries``."""
        return self.summaries()

    def rows(self) -> dict[str, str]:
        """By value path, which rows of ``batch`` a tensor has: ``samples`` or ``tokens``; the others are left out."""
        return {line.path: line.rows for line in self._tensors if line.rows is not None}

    def conversions(self) -> dict[str, str]:
        """By value path, what was stored in another form: ``sparse_coo``, ``quint8``, ``DTensor``."""
        return {line.path: line.converted_from for line in self._tensors if line.converted_from is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors on disk."""
        return sum(line.nbytes for line in self._tensors)

    def _tensor(self, line: TensorLine) -> Tensor:
        if self._shard is None or not line.data:
            return meta_tensor(line, self._place)
        return self._shard.tensor(line)

    def __repr__(self) -> str:
        return f"<StoredEvent {self.order}: {self.path or '(root)'}:{self.port}, call {self.call} of step {self.step}>"


def stored_events(
    lines: Iterable[EventLine],
    shards: Mapping[str, Shard],
    places: Iterable[object],
    batches: dict[int, StoredEvent],
    writer: int = 0,
) -> list[StoredEvent]:
    """Events of lines, in order.

    Args:
        lines: The lines.
        shards: The shards that they name.
        places: Where each stands.
        batches: Those of earlier lines, by order; those of these lines are added.
        writer: Number of their writer.

    Raises:
        FormatError: A line names a batch that is not there.
    """
    found = []
    for line, place in zip(lines, places, strict=True):
        if line.batch is not None and line.batch not in batches:
            raise no_batch(line.batch, place)
        shard = None if line.shard is None else shards[line.shard]
        batch = None if line.batch is None else batches[line.batch]
        found.append(StoredEvent(line, shard, place, batch, writer))
        if line.port == BATCH:
            batches[line.order] = found[-1]
    return found


def no_batch(order: int, place: object) -> FormatError:
    """The error for an event whose rows nobody knows, though it says who does."""
    return fault(place, f"what its rows are should stand in event {order}, which is not there")


class StoredParts(NamedTuple):
    """What a recording on disk holds.

    Attributes:
        info: What its writer knew about it.
        modules: The modules of the model by path, in the order of the model.
        events: The events of all writers, by order and step.
        torn: The manifests with an unfinished last line, which does not count: its writer was killed, or is at it.
        ends: What each writer wrote down at its end, by its number; none of those that are not at their end.
    """

    info: dict[str, Any]
    modules: dict[str, ModuleInfo]
    events: list[StoredEvent]
    torn: tuple[Path, ...] = ()
    ends: tuple[tuple[int, dict[str, Any]], ...] = ()


def open_recording(folder: str | os.PathLike[str]) -> StoredParts:
    """Open a recording. No code from it is run, and nothing but the JSON files is read yet.

    Args:
        folder: The recording, ``run.hookline``.

    Raises:
        FormatError: It is missing, foreign, of another version, damaged or hostile. The message names the file.
    """
    path = place_of_recording(folder)
    with _reading(path):
        info, modules = layout.parse_head(read_head(path), path / HEAD)
    tail = Tail(path)
    events = tail.new()
    return StoredParts(info, modules, events, tail.torn, tail.ends())


class Tail:
    """Follows a recording that may still be written: each look gives what was committed since the one before.

    Args:
        folder: The recording, an absolute path.
        number: Look only at what the writers of that number wrote; at all by default.
    """

    def __init__(self, folder: Path, *, number: int | None = None) -> None:
        self._folder = folder
        self._number = number
        self._writers: dict[Path, _Followed] = {}

    def new(self) -> list[StoredEvent]:
        """The events since the last look, by order and step.

        Raises:
            FormatError: Something is damaged or hostile. The next look begins where this one began.
        """
        with _reading(self._folder):
            found = [
                (self._writers.get(path) or _Followed(path)).look()
                for path in writers(self._folder)
                if self._number in (None, writer_number(path))
            ]
        self._writers.update((follower.path, follower) for follower, _ in found)
        events = [event for _, some in found for event in some if event.port != BATCH]
        return sorted(events, key=lambda event: (event.order, event.step))

    @property
    def torn(self) -> tuple[Path, ...]:
        """The manifests whose last line was not finished at the last look."""
        return tuple(path / MANIFEST for path, writer in self._writers.items() if writer.torn)

    def ends(self) -> tuple[tuple[int, dict[str, Any]], ...]:
        """What each writer wrote down at its end, by its number.

        Raises:
            FormatError: Such a file is damaged.
        """
        with _reading(self._folder):
            found = ((writer_number(path), path / END) for path in self._writers)
            return tuple((number, _read_end(place)) for number, place in found if os.path.lexists(place))


class _Followed(NamedTuple):
    """How far a writer's manifest was read.

    Attributes:
        path: The writer's folder.
        offset: Bytes that were read.
        number: Lines that were read.
        seen: Shards that they name.
        batches: Their batches, by order.
        torn: Whether an unfinished line follows.
    """

    path: Path
    offset: int = 0
    number: int = 0
    seen: frozenset[str] = frozenset()
    batches: Mapping[int, StoredEvent] = MappingProxyType({})
    torn: bool = False

    def look(self) -> tuple[_Followed, list[StoredEvent]]:
        """How far it is read now, and the events since."""
        events: list[StoredEvent] = []
        seen, batches, torn = set(self.seen), dict(self.batches), list[Path]()
        offset, number, writer = self.offset, self.number, writer_number(self.path)
        for place, text in lines(self.path / MANIFEST, torn, offset, number):
            commit = parse_commit(text, place, seen)
            shards = {shard.file: Shard(self.path / shard.file, shard.nbytes) for shard in commit.shards}
            places = [place._replace(event=index) for index in range(len(commit.events))]
            events += stored_events(commit.events, shards, places, batches, writer)
            offset, number = offset + len(text), place.number
        return _Followed(self.path, offset, number, frozenset(seen), batches, bool(torn)), events


def _read_end(place: Path) -> dict[str, Any]:
    return layout.parse_end(read_small(place), place)


def writer_number(folder: Path) -> int:
    """The number of a writer, which the name of its folder begins with."""
    return int(folder.name[1:].partition("-")[0])


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """An OSError as a FormatError that names the folder."""
    try:
        yield
    except OSError as error:
        raise fault(folder, f"it cannot be read ({error})", "Check its permissions and its disk.") from error


def place_of_recording(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a recording, since its shards may be opened from another working directory.

    Raises:
        FormatError: There is none.
    """
    folder = Path(os.path.abspath(path))
    if not os.path.lexists(folder):
        raise fault(folder, "there is no recording of that name", "Check the path.")
    if folder.name in (HEAD, MANIFEST) or not folder.is_dir():
        raise fault(folder, "this is not a folder, a recording is one", "Pass the folder, such as run.hookline.")
    if not os.path.lexists(folder / HEAD):
        advice = f"Pass its parent, {folder.parent}." if (folder.parent / HEAD).exists() else _OTHER_FOLDER
        raise fault(folder, f"this folder is not a Hookline recording (it has no {HEAD})", advice)
    return folder


def writers(folder: Path) -> Iterator[Path]:
    """The writers' folders that have a manifest, in order; other things in the folder are not ours to judge."""
    for path in sorted(folder.iterdir()):
        if layout.WRITER_NAME.fullmatch(path.name):
            if path.is_symlink() or not path.is_dir():
                raise fault(path, "this is not a plain folder", "Copy the recording with its links resolved: cp -rL.")
            if os.path.lexists(path / MANIFEST):
                yield path


def parse_commit(text: bytes, place: layout.Line, seen: set[str]) -> Commit:
    """Read one line of a manifest, and check all of it that can be checked without its shards.

    Args:
        text: The line.
        place: Where it stands.
        seen: What earlier lines of the manifest have of their own, which this one adds to: their shards, or a digest of
            a line without any.

    Raises:
        FormatError: The line is damaged or hostile, names a shard that another line names, or is there twice.
    """
    commit = layout.parse_commit(text, place)
    for index, line in enumerate(commit.events):
        decode(line.structure, range(len(line.tensors)), place._replace(event=index))
    names = {shard.file for shard in commit.shards}
    if names & seen:
        raise fault(place, f"it names the shard {min(names & seen)}, which an earlier line names")
    if not names:
        names = {hashlib.blake2b(text, digest_size=16).hexdigest()}
        if names & seen:
            raise fault(place, "it is the same as an earlier line, so that its events would be there twice")
    seen |= names
    return commit


def lines(manifest: Path, torn: list[Path], offset: int = 0, number: int = 0) -> Iterator[tuple[layout.Line, bytes]]:
    """The whole lines of a manifest, and where they stand.

    Args:
        manifest: The file.
        torn: Gets the manifest added when its last line has no newline: its writer was killed, or is at it.
        offset: Bytes that are passed over.
        number: Lines in these bytes.

    Raises:
        FormatError: A line is too long, or the file has less than ``offset`` bytes.
    """
    with open_regular(manifest) as file:
        if offset > file.seek(0, os.SEEK_END):
            raise fault(manifest, f"it had {offset} bytes and has become shorter", "Open the recording again.")
        file.seek(offset)
        for count in itertools.count(number + 1):
            line = file.readline(layout.MAX_LINE + 1)
            if len(line) > layout.MAX_LINE:
                raise fault(manifest, f"a line has more than {layout.MAX_LINE} bytes")
            if not line.endswith(b"\n"):
                torn += [manifest] if line else []
                return
            yield layout.Line(manifest, count), line
