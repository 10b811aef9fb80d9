"""Events on their way to a writer's folder: what is written of each, and what the manifest says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hookline.errors import ArgumentError
from hookline.stats.compute import summarize_all
from hookline.stats.summary import Summary
from hookline.store import format as layout
from hookline.store.dump import dump_event
from hookline.store.event_like import EventLike
from hookline.store.format import BATCH, PORTS, EventLine, TensorLine
from hookline.store.names import prefix_of, site_name, unique
from hookline.store.strict_json import LARGEST
from hookline.store.structure import encode
from hookline.store.tensors import Stored, stored

__all__ = ["Draft", "Part", "Refused", "drafts", "halves", "refuse", "with_batches"]

SHARD_BYTES = 256 << 20
"""Bytes of tensor data after which a flush begins another shard."""
SHARD_NAMES = 32 << 20
"""Characters of tensor names after which it does; the safetensors library reads headers up to 100 MB."""
_LARGE, _LARGE_EACH = 8 << 20, 64 << 10
"""Bytes of a shard, and of each tensor in it on average, that make it large."""
_TOGETHER = 1024
"""Events whose lines are written together."""
_NAME_OVERHEAD = 100
_SHARD_OVERHEAD = 200
"""Bytes of a shard in a manifest line, and more."""


Refused = Callable[[EventLike, ArgumentError], None]
"""Gets an event that cannot be stored, which is left out."""


class _Planned(NamedTuple):
    """An event that is ready to be written.

    Attributes:
        event: The event.
        structure: How its value is nested.
        leaves: Value path and tensor of each tensor, as they are.
        tensors: Their stored forms.
        names: Their names in the shard; none before it has one.
    """

    event: EventLike
    structure: Any
    leaves: Sequence[tuple[str, Tensor]]
    tensors: list[Stored]
    names: Sequence[str] = ()


class Draft:
    """Events that will share a shard, if any of them needs one.

    Attributes:
        events: The events.
        data: Name and stored form of each tensor that the shard will hold.
        nbytes: Bytes of these.
        name_size: Bytes of their names and of what goes with them, about.

    Args:
        shard: Name of the shard.
    """

    def __init__(self, shard: str) -> None:
        self.shard = shard
        self.events: list[EventLike] = []
        self.data: list[tuple[str, Stored]] = []
        self.nbytes = self.name_size = 0
        self._taken: set[str] = set()
        self._waiting: list[_Planned] = []  # whose lines are not written yet
        self._texts: list[str] = []
        self._lines: list[EventLine] = []

    @property
    def is_large(self) -> bool:
        """Whether it is worth a thread to write the shard while statistics are computed.

        With smaller tensors, both would wait for the interpreter's lock most of the time.
        """
        return self.nbytes >= max(_LARGE, _LARGE_EACH * len(self.data))

    def add(self, planned: _Planned) -> bool:
        """Take one more event; False when it should begin another shard, and then the draft is complete."""
        prefix = prefix_of(planned.event)
        names = [unique(prefix + path, self._taken) for path, _ in planned.leaves]
        nbytes, name_size = self.nbytes, self.name_size
        for name, kept in zip(names, planned.tensors, strict=True):
            name_size += len(name) + _NAME_OVERHEAD
            nbytes += kept.nbytes
        if self.events and (nbytes > SHARD_BYTES or name_size > SHARD_NAMES):
            return False
        self.nbytes, self.name_size = nbytes, name_size
        self.events.append(planned.event)
        self._waiting.append(planned._replace(names=names))
        together = zip(names, planned.tensors, strict=True)
        self.data += [(name, kept) for name, kept in together if kept.data is not None]
        if len(self._waiting) >= _TOGETHER and not self.is_large:
            self._write_lines()  # while they are in the cache
        return True

    def part(self) -> Part:
        """What a manifest line says of the events; statistics are computed where they are not known."""
        self._write_lines()
        return Part(self._texts, self._lines)

    def _write_lines(self) -> None:
        for planned, summaries in zip(self._waiting, _summaries(self._waiting), strict=True):
            line = _line(planned, self.shard, summaries)
            self._lines.append(line)
            self._texts.append(dump_event(line))
        self._waiting.clear()


class Part(NamedTuple):
    """Events of a commit as they stand in its line, and the same as text."""

    texts: list[str]
    lines: list[EventLine]

    @property
    def line_size(self) -> int:
        """Bytes that it needs in a line."""
        return sum(map(len, self.texts)) + len(self.texts) + _SHARD_OVERHEAD


def with_batches(events: Iterable[EventLike], known: set[int]) -> Iterator[EventLike]:
    """The events, and before the first of a batch what its rows are, if that is not known."""
    for event in events:
        if event.batch is not None and event.batch.order not in known:
            known.add(event.batch.order)
            yield event.batch
        yield event


def refuse(event: EventLike, error: ArgumentError, refused: Refused | None) -> None:
    """Hand on an event that cannot be stored; never what the rows of others are, which would then name nothing.

    Raises:
        ArgumentError: The given one, where nobody takes it.
    """
    if refused is None or event.port == BATCH:
        raise error
    refused(event, error)


def drafts(events: Iterable[EventLike], refused: Refused | None, name: Callable[[], str]) -> Iterator[Draft]:
    """Events in groups that fill a shard each.

    Args:
        events: The events.
        refused: Gets those that cannot be stored.
        name: Gives the name of the next shard; asked when the draft before was written.

    Raises:
        ArgumentError: An event cannot be stored, and ``refused`` is None.
    """
    draft = Draft(name())
    for event in events:
        try:
            planned = _plan(event)
        except ArgumentError as error:
            refuse(event, error, refused)
            continue
        if not draft.add(planned):
            yield draft
            draft = Draft(name())
            draft.add(planned)
    if draft.events:
        yield draft


def _plan(event: EventLike) -> _Planned:
    tensors: list[Tensor] = []
    try:
        _check_place(event)
        structure = encode(event.value, tensors)
        kept = [stored(tensor) for tensor in tensors]
    except ArgumentError as error:
        raise ArgumentError(
            f"{site_name(event.path, event.port)}, call {event.call} of step {event.step}: {error}"
        ) from error
    leaves = event.leaves()
    if len(leaves) != len(kept):
        found = (
            f"{site_name(event.path, event.port)}: its value has {len(kept)} tensors, its leaves() are {len(leaves)}"
        )
        raise ArgumentError(f"{found}. Make {type(event).__name__}.leaves() give the tensors of its value.")
    return _Planned(event, structure, leaves, kept)


def _check_place(event: EventLike) -> None:
    if event.port not in (*PORTS, BATCH):
        raise ArgumentError(f"{event.port!r} is no port. Give one of {', '.join(PORTS)}.")
    numbers = event.order, event.step, event.call, event.backward
    if {*map(type, numbers)} == {int} and min(numbers) >= 0 and max(numbers) <= LARGEST:
        return
    for name, number in zip(("order", "step", "call", "backward"), numbers, strict=True):
        if type(number) is not int or not 0 <= number <= LARGEST:
            raise ArgumentError(f"{name} is {number!r}. Give an int from 0 to 2**63 - 1.")


def _summaries(batch: list[_Planned]) -> list[Mapping[str, Summary]]:
    """Statistics of each event by value path; those that nobody has asked for yet are computed together."""
    known = [planned.event.known_summaries() for planned in batch]
    missing = [planned.leaves for planned, some in zip(batch, known, strict=True) if some is None]
    made = iter(summarize_all([leaf for leaves in missing for _, leaf in leaves]))
    return [
        {path: next(made) for path, _ in planned.leaves} if some is None else some
        for planned, some in zip(batch, known, strict=True)
    ]


def halves(draft: Draft, size: int) -> list[list[EventLike]]:
    """The events in two groups, where their line would have so many bytes.

    Raises:
        ArgumentError: There is one event alone.
    """
    middle = len(draft.events) // 2
    if middle:
        return [draft.events[:middle], draft.events[middle:]]
    (event,) = draft.events
    found = f"{prefix_of(event)}: its {len(event.leaves())} tensors need a manifest line of {size} bytes"
    raise ArgumentError(f"{found}, at most {layout.MAX_LINE} are possible. Record inner modules instead.")


def _line(planned: _Planned, shard: str, summaries: Mapping[str, Summary]) -> EventLine:
    event, rows = planned.event, planned.event.rows()
    together = zip(planned.names, planned.leaves, planned.tensors, strict=True)
    entries = tuple(
        [_entry(name, path, kept, summaries.get(path), rows.get(path)) for name, (path, _), kept in together]
    )
    used = shard if any(entry.data for entry in entries) else None
    place = event.order, event.step, event.path, event.port, event.call, event.backward
    batch = None if event.batch is None else event.batch.order
    return EventLine(*place, used, planned.structure, entries, batch)


def _entry(name: str, path: str, kept: Stored, summary: Summary | None, rows: str | None) -> TensorLine:
    fields = None if summary is None else vars(summary)
    return TensorLine(name, path, kept.dtype, kept.shape, fields, kept.data is not None, kept.converted_from, rows)
