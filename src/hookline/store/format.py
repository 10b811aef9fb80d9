"""The format of a recording on disk: names, contents of the JSON files, and their validation. No torch in here.

::

    run.hookline/
      recording.json           what was recorded: info and modules; written first
      w00000-a1b2c3/           one folder for each writer, so that none waits for another
        end.json               what its writer knew at its end
        manifest.jsonl         one line for each commit, written after the shards that hold its tensors
        000000.safetensors     tensors of one commit, readable with the safetensors library alone

``docs/format.md`` says it all.
"""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from hookline.errors import ArgumentError
from hookline.store import strict_json
from hookline.store.dtypes import STORAGE, parse_shape
from hookline.store.remote import Place
from hookline.store.strict_json import counts, fault, get, show

FORMAT = "hookline"
VERSION = 3
HEAD = "recording.json"
MANIFEST = "manifest.jsonl"
END = "end.json"
WRITER_NAME = re.compile(r"w[0-9]{5,}-[0-9a-f]{6}")
SHARD_NAME = re.compile(r"[0-9]{6,}\.safetensors")
LATER_MANIFEST = re.compile(r"manifest-([0-9]{6,})\.jsonl")  # on object stores, when the one before is long
DRAFT_NAME = re.compile(rf"\.{SHARD_NAME.pattern}\.tmp")
"""Of a shard that is being written; nobody reads it."""
PORTS = ("input", "output", "grad_input", "grad_output")
BATCH = "batch"
"""In the place of a port: no value of the model, but what the rows of other events are."""
ROWS = SAMPLES, TOKENS = "samples", "tokens"
"""What the rows of a tensor may be: one for each sample of its batch, or one for each chosen token."""
MAX_HEAD = 1 << 28
"""Largest ``recording.json`` that is read, in bytes: some 1,500,000 modules."""
MAX_LINE = 1 << 26
"""Longest manifest line that is written and read, in bytes: events with some 200,000 tensors."""

_CRC32C = re.compile(r"[0-9a-f]{8}")
_PLACE = ("order", "step", "call", "backward")
_WHOLE = ("numel", "nan", "inf", "neg_inf", "zeros", "subnormal")
_REAL = ("mean", "std", "min", "max", "l2")


def writer_name(writer: int) -> str:
    """A new name for a writer's folder, ``w00000-a1b2c3``: no two writers share one, whatever their numbers."""
    return writer_prefix(writer) + secrets.token_hex(3)


def writer_prefix(writer: int) -> str:
    """How the names of all folders of that writer begin: ``w00000-``."""
    return f"w{writer:05d}-"


def shard_name(number: int) -> str:
    """Name of a shard: ``000000.safetensors``."""
    return f"{number:06d}.safetensors"


def manifest_name(number: int) -> str:
    """Name of a manifest of a writer: ``manifest.jsonl``, then ``manifest-000001.jsonl`` and so on."""
    return MANIFEST if number == 0 else f"manifest-{number:06d}.jsonl"


def draft_name(shard: str) -> str:
    """Name of a shard until it is complete: ``.000000.safetensors.tmp``."""
    return f".{shard}.tmp"


# ---------------------------------------------------------------- what the files say


@dataclasses.dataclass(frozen=True)
class ModuleInfo:
    """One module of the recorded model.

    Attributes:
        type_name: Name of its class.
        parameters: Number of its parameters' elements, those of its children included.
        aliases: Other paths of the same module.
    """

    type_name: str
    parameters: int
    aliases: tuple[str, ...] = ()


class TensorLine(NamedTuple):
    """One tensor of an event, as the manifest has it.

    Attributes:
        name: Name in the shard.
        path: Value path: ``output[1][0]``.
        dtype: True dtype, without ``torch.``: ``bfloat16``.
        shape: Shape.
        summary: Fields of its ``Summary``; None when there is none.
        data: False when only shape and dtype were kept.
        converted_from: What the tensor was before it was made plain: ``sparse_coo``, ``quint8``, ``DTensor``.
        rows: One of `ROWS` when its rows are those of the event's batch.
    """

    name: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    summary: dict[str, int | float] | None
    data: bool = True
    converted_from: str | None = None
    rows: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the shard."""
        return math.prod(self.shape) * STORAGE[self.dtype].itemsize if self.data else 0


class EventLine(NamedTuple):
    """One event of a commit; ``structure`` is the tree that `hookline.store.structure` reads.

    ``batch`` is the order of the `BATCH` event that says what its rows are.
    """

    order: int
    step: int
    path: str
    port: str
    call: int
    backward: int
    shard: str | None
    structure: Any
    tensors: tuple[TensorLine, ...]
    batch: int | None = None


class ShardLine(NamedTuple):
    """One shard of a commit.

    Attributes:
        file: Its name in the writer's folder.
        nbytes: Size of the file.
        crc32c: CRC-32C of the whole file.
    """

    file: str
    nbytes: int
    crc32c: int


class Commit(NamedTuple):
    """One line of a manifest: what was appended at once, with the shards that hold its tensors."""

    shards: tuple[ShardLine, ...]
    events: tuple[EventLine, ...]


class Line(NamedTuple):
    """A line of a manifest or an event in it, counted from 0, as messages name them."""

    manifest: Place
    number: int
    event: int | None = None

    def __str__(self) -> str:
        line = f"{self.manifest}, line {self.number}"
        return line if self.event is None else f"{line}, event {self.event}"


# ---------------------------------------------------------------- recording.json


def dump_head(info: Mapping[str, Any], modules: Mapping[str, ModuleInfo]) -> bytes:
    """The text of ``recording.json``.

    Raises:
        ArgumentError: ``info`` holds something that strict JSON has no form for.
    """
    _check_json(info, "info")
    listed = [{"path": path, **dataclasses.asdict(module)} for path, module in modules.items()]
    return strict_json.seal(
        strict_json.READABLE.encode({"format": FORMAT, "version": VERSION, "info": dict(info), "modules": listed})
    )


def _check_json(said: Mapping[str, Any], name: str) -> None:
    for key, value in said.items():
        try:
            strict_json.READABLE.encode({key: value})
        except (TypeError, ValueError, RecursionError) as error:
            advice = "Pass strings, finite numbers, true, false, None, and lists and dicts of them."
            raise ArgumentError(f"{name}[{key!r}] cannot be written as JSON: {error}. {advice}") from error


def dump_end(said: Mapping[str, Any]) -> bytes:
    """The text of an ``end.json``.

    Raises:
        ArgumentError: It holds something that strict JSON has no form for.
    """
    _check_json(said, "end")
    return strict_json.seal(strict_json.READABLE.encode(dict(said)))


def parse_end(data: bytes, place: object) -> dict[str, Any]:
    """What an ``end.json`` says.

    Raises:
        FormatError: It is damaged.
    """
    return strict_json.unseal(data, place)


def parse_head(data: bytes, place: object) -> tuple[dict[str, Any], dict[str, ModuleInfo]]:
    """Info and modules of a ``recording.json``.

    Raises:
        FormatError: It is not one, is damaged, or comes from another version of Hookline.
    """
    head = strict_json.unseal(data, place)
    _check_version(head, place)
    modules = {}
    for number, entry in enumerate(get(head, "modules", list, place)):
        spot = f"{place}, module {number}"
        if type(entry) is not dict:
            raise fault(spot, f"an object was expected, it has {show(entry)}")
        modules[get(entry, "path", str, spot)] = _module(entry, spot)
    if len(modules) != len(head["modules"]):
        raise fault(place, "two modules have the same path")
    return get(head, "info", dict, place), modules


def _check_version(head: dict[str, Any], place: object) -> None:
    if head.get("format") != FORMAT:
        found = show(head.get("format"))
        raise fault(place, f'no Hookline recording: its "format" is {found}', "Pass a folder that Hookline wrote.")
    (version,) = counts(head, ("version",), place)
    if version > VERSION:
        found = f"the recording has format version {version}, this Hookline reads up to {VERSION}"
        raise fault(place, found, "Update Hookline: pip install --upgrade hookline.")
    if version < VERSION:
        found = f"the recording has the old format version {version}, this Hookline reads {VERSION}"
        raise fault(place, found, "Record again, under another name or after you have deleted this one.")


def _module(entry: dict[str, Any], place: object) -> ModuleInfo:
    aliases = get(entry, "aliases", list, place)
    (parameters,) = counts(entry, ("parameters",), place)
    if not all(type(alias) is str for alias in aliases):
        raise fault(place, '"aliases" has to be a list of strings')
    return ModuleInfo(get(entry, "type_name", str, place), parameters, tuple(aliases))


# ---------------------------------------------------------------- manifest lines


def parse_commit(data: bytes, place: Line) -> Commit:
    """Read one manifest line; everything is checked but the inside of ``structure``.

    Raises:
        FormatError: The line is damaged or hostile.
    """
    entry = strict_json.unseal(data, place)
    shards = tuple([_parse_shard(shard, place) for shard in get(entry, "shards", list, place)])
    listed = enumerate(get(entry, "events", list, place))
    events = tuple([_parse_event(event, place._replace(event=number)) for number, event in listed])
    _check_shards(shards, events, place)
    return Commit(shards, events)


def _check_shards(shards: tuple[ShardLine, ...], events: tuple[EventLine, ...], place: Line) -> None:
    sizes = {shard.file: shard.nbytes for shard in shards}
    if len(sizes) != len(shards):
        raise fault(place, "it names a shard twice")
    needed: Counter[str] = Counter()
    for number, event in enumerate(events):
        if event.shard is not None and event.shard not in sizes:
            raise fault(place._replace(event=number), f"its shard {show(event.shard)} is none of those of its line")
        if event.shard is not None:
            needed[event.shard] += sum(tensor.nbytes for tensor in event.tensors)
    for name, nbytes in needed.items():
        if sizes[name] < nbytes:
            raise fault(place, f"its shard {name} has {sizes[name]} bytes, its tensors need {nbytes}")


def _parse_shard(entry: Any, place: Line) -> ShardLine:
    if type(entry) is not dict:
        raise fault(place, f'"shards" has to be a list of objects, it has {show(entry)}')
    file, crc32c = _shard_name(entry, "file", place), entry.get("crc32c")
    (nbytes,) = counts(entry, ("bytes",), place)
    if type(crc32c) is not str or not _CRC32C.fullmatch(crc32c):
        raise fault(place, f'"crc32c" has to be 8 hexadecimal digits, it is {show(crc32c)}')
    return ShardLine(file, nbytes, int(crc32c, 16))


def _shard_name(entry: dict[str, Any], key: str, place: Line) -> str:
    """A bare name: whatever could lead out of the writer's folder does not match."""
    name = entry.get(key)
    if type(name) is not str or not SHARD_NAME.fullmatch(name):
        raise fault(place, f'"{key}" has to be a name like {shard_name(0)}, it is {show(name)}')
    return name


def _parse_event(entry: Any, place: Line) -> EventLine:
    if type(entry) is not dict:
        raise fault(place, f"an object was expected, it has {show(entry)}")
    port = get(entry, "port", str, place)
    if port not in (*PORTS, BATCH):
        raise fault(place, f'"port" has to be one of {", ".join(PORTS)}, it is {show(port)}')
    if "structure" not in entry:
        raise fault(place, '"structure" is missing')
    tensors = tuple([_parse_tensor(tensor, place) for tensor in get(entry, "tensors", list, place)])
    order, step, call, backward = counts(entry, _PLACE, place)
    path, shard = get(entry, "path", str, place), _shard_of(entry, tensors, place)
    batch = counts(entry, ("batch",), place)[0] if "batch" in entry else None
    return EventLine(order, step, path, port, call, backward, shard, entry["structure"], tensors, batch)


def _shard_of(entry: dict[str, Any], tensors: tuple[TensorLine, ...], place: Line) -> str | None:
    if entry.get("shard") is not None:
        return _shard_name(entry, "shard", place)
    if any(tensor.data for tensor in tensors):
        raise fault(place, 'it has tensors with data, but no "shard"')
    return None


def _parse_tensor(entry: Any, place: object) -> TensorLine:
    if type(entry) is not dict:
        raise fault(place, f'"tensors" has to be a list of objects, it has {show(entry)}')
    dtype = get(entry, "dtype", str, place)
    if dtype not in STORAGE:
        raise fault(place, f"unknown dtype {show(dtype)}", "Update Hookline: pip install --upgrade hookline.")
    data, origin = entry.get("data", True), entry.get("converted_from")
    if type(data) is not bool or not (origin is None or type(origin) is str):
        raise fault(place, '"data" has to be true or false, and "converted_from" a string')
    rows = entry.get("rows")
    if rows is not None and rows not in ROWS:
        raise fault(place, f'"rows" has to be one of {", ".join(ROWS)}, it is {show(rows)}')
    name, path = get(entry, "name", str, place), get(entry, "path", str, place)
    shape = parse_shape(entry.get("shape"), STORAGE[dtype].itemsize, place)
    summary = _parse_summary(entry.get("summary"), place)
    return TensorLine(name, path, dtype, shape, summary, data, origin, rows)


def _parse_summary(entry: Any, place: object) -> dict[str, int | float] | None:
    if entry is None:
        return None
    if type(entry) is not dict:
        raise fault(place, f'"summary" has to be an object or null, it is {show(entry)}')
    whole, real = counts(entry, _WHOLE, place), strict_json.reals(entry, _REAL, place)
    numel, nan, inf, negative, zeros, subnormal = whole
    if nan + inf + zeros + subnormal > numel:
        raise fault(
            place, f'"summary" counts more NaN, infinite, zero and subnormal elements than {numel}, its "numel"'
        )
    if negative > inf:
        raise fault(place, f'"summary" counts more -inf than infinite elements, {negative} and {inf}')
    return {**dict(zip(_WHOLE, whole, strict=True)), **dict(zip(_REAL, real, strict=True))}
