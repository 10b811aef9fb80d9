"""Reading a recording: the manifests at once, the tensors when they are asked for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
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
from hookline.store.format import BATCH, END, HEAD, EventLine, ModuleInfo, TensorLine
from hookline.store.manifests import (
    lines,
    lines_from,
    manifest_numbers,
    manifests,
    parse_commit,
    place_of_recording,
    writer_number,
    writers,
)
from hookline.store.names import site_name
from hookline.store.remote import Place, Remote
from hookline.store.remote_shard import RemoteShard, Shards
from hookline.store.shard import Shard, meta_tensor, torch_dtype
from hookline.store.strict_json import fault
from hookline.store.structure import ONE_TENSOR, decode

__all__ = [
    "StoredEvent",
    "StoredParts",
    "Tail",
    "exists",
    "lines",
    "lines_from",
    "manifest_numbers",
    "manifests",
    "open_recording",
    "parse_commit",
    "place_of_recording",
    "stored_events",
    "writers",
]


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
        *("_index", "_place", "_shard", "_structure", "_tensors"),
        *("backward", "batch", "call", "order", "path", "port", "step", "writer"),
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
        self._structure, self._tensors, self._shard = line.structure, line.tensors, shard
        self._place, self._index = place, -1

    def stands_at(self, line: layout.Line, index: int) -> None:
        """Say in which line it stands, and as which event of it, once that is written."""
        self._place, self._index = line, index

    @property
    def _where(self) -> object:
        return self._place if self._index < 0 else f"{self._place}, event {self._index}"

    @property
    def value(self) -> Any:
        """The kept value. Writing into its tensors does not reach the file.

        Raises:
            FormatError: The shard is truncated, damaged or hostile.
        """
        tensors = [self._tensor(line) for line in self._tensors]
        return tensors[0] if self._structure == ONE_TENSOR else decode(self._structure, tensors, self._where)

    def outline(self) -> Any:
        """The value with tensors that have dtype and shape alone, from the manifest."""
        return decode(self._structure, [meta_tensor(line, self._where) for line in self._tensors], self._where)

    def leaves(self) -> list[tuple[str, Tensor]]:
        """Value path and tensor of each tensor of the value, in order."""
        return [(line.path, self._tensor(line)) for line in self._tensors]

    def leaf(self, place: int) -> Tensor:
        """The tensor at a place among the leaves; the others are not touched."""
        return self._tensor(self._tensors[place])

    @property
    def is_far(self) -> bool:
        """Whether its tensors lie on an object store, so that each one that is asked for takes memory."""
        return isinstance(self._shard, RemoteShard)

    def has_data(self, place: int) -> bool:
        """Whether the tensor at a place among the leaves has elements to read, and not dtype and shape alone."""
        return self._shard is not None and self._tensors[place].data

    def shared(self, place: int) -> Tensor:
        """The tensor at a place among the leaves, not to be written, since others may read the same memory."""
        line = self._tensors[place]
        return self._shard.shared(line) if isinstance(self._shard, RemoteShard) and line.data else self._tensor(line)

    def span(self, place: int) -> tuple[npt.NDArray[np.uint8], int] | None:
        """The bytes of the shard that holds the tensor at a place among the leaves, and where in them it begins.

        None where there are no data. The bytes are not to be written.
        """
        line = self._tensors[place]
        return None if self._shard is None or not line.data else self._shard.span(line)

    def layouts(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Value path, dtype and shape of each tensor of the value, from the manifest."""
        place = self._where
        return [(line.path, torch_dtype(line.dtype, place), torch.Size(line.shape)) for line in self._tensors]

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
            return meta_tensor(line, self._where)
        return self._shard.tensor(line)

    def __repr__(self) -> str:
        site = site_name(self.path, self.port)
        return f"<StoredEvent {self.order}: {site}, call {self.call} of step {self.step}>"


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
        events: The events of all writers, in order; of several, step by step, and then writer by writer.
        torn: The manifests with an unfinished last line, which does not count: its writer was killed, or is at it.
        ends: What each writer wrote down at its end, by its number; none of those that are not at their end.
    """

    info: dict[str, Any]
    modules: dict[str, ModuleInfo]
    events: list[StoredEvent]
    torn: tuple[Place, ...] = ()
    ends: tuple[tuple[int, dict[str, Any]], ...] = ()


def open_recording(folder: str | os.PathLike[str] | Remote) -> StoredParts:
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

    def __init__(self, folder: Place, *, number: int | None = None) -> None:
        self._folder = folder
        self._number = number
        self._writers: dict[Place, _Followed] = {}

    def new(self) -> list[StoredEvent]:
        """The events since the last look, in order; those of several writers step by step, and then writer by writer.

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
        if len({event.writer for event in events}) < 2:
            return sorted(events, key=lambda event: (event.order, event.step))
        # what one process counts says nothing of when another did it, and has to give every site the same order
        return sorted(events, key=lambda event: (event.step, event.writer, event.order))

    @property
    def torn(self) -> tuple[Place, ...]:
        """The manifests whose last line was not finished at the last look."""
        return tuple(writer.torn for writer in self._writers.values() if writer.torn is not None)

    def ends(self) -> tuple[tuple[int, dict[str, Any]], ...]:
        """What each writer wrote down at its end, by its number.

        Raises:
            FormatError: Such a file is damaged.
        """
        with _reading(self._folder):
            found = ((writer_number(path), path / END) for path in self._writers)
            return tuple((number, _read_end(place)) for number, place in found if exists(place))


class _Followed(NamedTuple):
    """How far a writer's manifest was read.

    Attributes:
        path: The writer's folder.
        part: Number of the manifest that was read last.
        offset: Bytes of it that were read.
        number: Lines of it that were read.
        seen: Shards that they name.
        batches: Their batches, by order.
        torn: The manifest in which an unfinished line follows.
    """

    path: Place
    part: int = 0
    offset: int = 0
    number: int = 0
    seen: frozenset[str] = frozenset()
    batches: Mapping[int, StoredEvent] = MappingProxyType({})
    torn: Place | None = None

    def look(self) -> tuple[_Followed, list[StoredEvent]]:
        """How far it is read now, and the events since."""
        events: list[StoredEvent] = []
        seen, batches, torn = set(self.seen), dict(self.batches), list[Place]()
        part, offset, number, writer = self.part, self.offset, self.number, writer_number(self.path)
        folder = Shards(self.path)
        for at, place, text in lines_from(manifests(self.path), torn, part, offset, number):
            commit = parse_commit(text, place, seen)
            shards = {shard.file: folder.open(shard.file, shard.nbytes) for shard in commit.shards}
            places = [place._replace(event=index) for index in range(len(commit.events))]
            events += stored_events(commit.events, shards, places, batches, writer)
            part, offset, number = at, len(text) + (offset if at == part else 0), place.number
        reached = _Followed(self.path, part, offset, number, frozenset(seen), batches, torn[0] if torn else None)
        return reached, events


def exists(place: Place) -> bool:
    """Whether a file or folder is there, or an object, or objects in it."""
    if isinstance(place, Remote):
        return place.size() is not None or bool(place.children())
    return os.path.lexists(place)


def _read_end(place: Place) -> dict[str, Any]:
    return layout.parse_end(read_small(place), place)


@contextlib.contextmanager
def _reading(folder: Place) -> Iterator[None]:
    """An OSError as a FormatError that names the folder."""
    try:
        yield
    except OSError as error:
        raise fault(folder, f"it cannot be read ({error})", "Check its permissions and its disk.") from error
