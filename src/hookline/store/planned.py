"""Events on their way to a writer's folder: what is written of each, and what the manifest says of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hookline.errors import ArgumentError
from hookline.stats.compute import summarize_all
from hookline.stats.summary import Summary
from hookline.store import format as layout
from hookline.store.dump import dump_event
from hookline.store.event_like import EventLike
from hookline.store.format import BATCH, PORTS, EventLine, TensorLine
from hookline.store.names import prefix_of, unique
from hookline.store.strict_json import LARGEST
from hookline.store.structure import encode
from hookline.store.tensors import Stored, stored

__all__ = ["Part", "Planned", "data_of", "halves", "in_shards", "names_of", "part_of", "with_batches"]

SHARD_BYTES = 256 << 20
"""Bytes of tensor data after which a flush begins another shard."""
SHARD_NAMES = 32 << 20
"""Characters of tensor names after which it does; the safetensors library reads headers up to 100 MB."""
_NAME_OVERHEAD = 100
_SHARD_OVERHEAD = 200
"""Bytes of a shard in a manifest line, and more."""


class Planned(NamedTuple):
    """An event that is ready to be written.

    Attributes:
        event: The event.
        structure: How its value is nested.
        leaves: Value path and tensor of each tensor, as they are.
        tensors: Their stored forms.
        prefix: How their names begin.
        nbytes: Bytes of their data.
        name_size: Bytes of their entries in the header of the shard, about.
    """

    event: EventLike
    structure: Any
    leaves: Sequence[tuple[str, Tensor]]
    tensors: list[Stored]
    prefix: str
    nbytes: int
    name_size: int

    def named(self, taken: set[str]) -> list[str]:
        """Name in the shard of each tensor; they are added to those taken."""
        return [unique(self.prefix + path, taken) for path, _ in self.leaves]


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


def in_shards(events: Iterable[EventLike]) -> Iterator[list[Planned]]:
    """Events in groups that fill a shard each."""
    batch: list[Planned] = []
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


def _plan(event: EventLike) -> Planned:
    tensors: list[Tensor] = []
    site = f"{event.path or '(root)'}:{event.port}"
    try:
        _check_place(event)
        structure = encode(event.value, tensors)
        kept = [stored(tensor) for tensor in tensors]
    except ArgumentError as error:
        raise ArgumentError(f"{site}, call {event.call} of step {event.step}: {error}") from error
    leaves = event.leaves()
    if len(leaves) != len(kept):
        found = f"{site}: its value has {len(kept)} tensors, its leaves() are {len(leaves)}"
        raise ArgumentError(f"{found}. Make {type(event).__name__}.leaves() give the tensors of its value.")
    prefix, nbytes = prefix_of(event), sum(one.nbytes for one in kept)
    name_size = sum(len(path) for path, _ in leaves) + (len(prefix) + _NAME_OVERHEAD) * len(leaves)
    return Planned(event, structure, leaves, kept, prefix, nbytes, name_size)


def _check_place(event: EventLike) -> None:
    if event.port not in (*PORTS, BATCH):
        raise ArgumentError(f"{event.port!r} is no port. Give one of {', '.join(PORTS)}.")
    for name in ("order", "step", "call", "backward"):
        number = getattr(event, name)
        if type(number) is not int or not 0 <= number <= LARGEST:
            raise ArgumentError(f"{name} is {number!r}. Give an int from 0 to 2**63 - 1.")


def names_of(batch: list[Planned]) -> list[list[str]]:
    """Name in their shard of each tensor of each event."""
    taken: set[str] = set()
    return [planned.named(taken) for planned in batch]


def data_of(batch: list[Planned], names: list[list[str]]) -> list[tuple[str, Stored]]:
    """What their shard is to hold."""
    return [
        (name, kept)
        for planned, some in zip(batch, names, strict=True)
        for name, kept in zip(some, planned.tensors, strict=True)
        if kept.data is not None
    ]


def part_of(batch: list[Planned], names: list[list[str]], shard: str) -> Part:
    """The lines of events that share a shard of that name, if they need one."""
    together = zip(batch, names, _summaries(batch), strict=True)
    lines = [_line(planned, shard, some, summaries) for planned, some, summaries in together]
    return Part([*map(dump_event, lines)], lines)


def _summaries(batch: list[Planned]) -> list[Mapping[str, Summary]]:
    """Statistics of each event by value path; those that nobody has asked for yet are computed together."""
    known = [planned.event.known_summaries() for planned in batch]
    missing = [planned.leaves for planned, some in zip(batch, known, strict=True) if some is None]
    made = iter(summarize_all([leaf for leaves in missing for _, leaf in leaves]))
    return [
        {path: next(made) for path, _ in planned.leaves} if some is None else some
        for planned, some in zip(batch, known, strict=True)
    ]


def halves(batch: list[Planned], size: int) -> list[list[Planned]]:
    """Two groups of events, of a group that needs too long a line."""
    middle = len(batch) // 2
    if middle:
        return [batch[:middle], batch[middle:]]
    (planned,) = batch
    found = f"{planned.prefix}: its {len(planned.tensors)} tensors need a manifest line of {size} bytes"
    raise ArgumentError(f"{found}, at most {layout.MAX_LINE} are possible. Record inner modules instead.")


def _line(planned: Planned, shard: str, names: list[str], summaries: Mapping[str, Summary]) -> EventLine:
    event, rows = planned.event, planned.event.rows()
    together = zip(names, planned.leaves, planned.tensors, strict=True)
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
