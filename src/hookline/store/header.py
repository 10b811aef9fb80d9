"""The header of a safetensors file, written and read without trusting a byte of it. No torch in here.

A file is: 8 bytes with the length of the header (little-endian), the header (JSON, padded with spaces), the data.
The data of the tensors fill the rest of the file without a hole.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

from hookline.store.dtypes import CODE_SIZE, parse_shape
from hookline.store.strict_json import DAMAGED, LARGEST, fault, parse, show

MAX_HEADER = 100_000_000
"""Longest header that the safetensors library reads, in bytes."""
_text = json.encoder.encode_basestring
_ALIGNMENT = 64
"""Where the data begin, in bytes: safetensors asks for 8, complex128 in torch for 16, a cache line has 64."""


class Entry(NamedTuple):
    """One tensor in a shard.

    Attributes:
        code: dtype as safetensors calls it.
        shape: Shape in elements of that dtype.
        begin: First byte, counted from the start of the data.
        end: One behind its last byte.
    """

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """What a shard holds; ``start`` is the place of its data in the file, in bytes."""

    entries: dict[str, Entry]
    start: int


def build(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], place: object, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Length and header of a file with the given (name, code, shape), whose data follow in the same order.

    Raises:
        FormatError: The header would be longer than the safetensors library reads.
    """
    entries = [f'"__metadata__":{json.dumps({"format": "pt", **(metadata or {})}, separators=(",", ":"))}']
    end = 0
    for name, code, shape in tensors:
        begin, end = end, end + math.prod(shape) * CODE_SIZE[code]
        sizes = ",".join(map(str, shape))
        entries.append(f'{_text(name)}:{{"dtype":"{code}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}')
    text = f"{{{','.join(entries)}}}".encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        found = f"its header would have {len(text)} bytes, a safetensors file may have {MAX_HEADER}"
        raise fault(place, found, "Record inner modules instead of one value with so many tensors.")
    return len(text).to_bytes(8, "little") + text


def read(file: BinaryIO, size: int, place: object) -> Header:
    """The header of an open file of ``size`` bytes, every entry checked against the size of the file.

    Raises:
        FormatError: It is no safetensors file, or is truncated, damaged or hostile.
    """
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
        raise fault(place, f"its header should have {length} bytes, the file has {size}", f"It is truncated. {DAMAGED}")
    text = file.read(length)
    if len(text) != length:
        raise fault(place, "it became shorter while it was read")
    parsed = parse(text, place)
    if type(parsed) is not dict:
        raise fault(place, f"its header has to be an object, it has {show(parsed)}")
    parsed.pop("__metadata__", None)
    entries = {name: _entry(entry, _Place(place, name)) for name, entry in parsed.items()}
    _check_cover(entries.values(), size - 8 - length, place)
    return Header(entries, 8 + length)


class _Place(NamedTuple):
    """A tensor as messages name it; as text only where there is one."""

    file: object
    name: str

    def __str__(self) -> str:
        return f"{self.file}, tensor {show(self.name)}"


def _entry(entry: Any, place: _Place) -> Entry:
    if type(entry) is not dict:
        raise fault(place, f"an object was expected, it has {show(entry)}")
    code, offsets = entry.get("dtype"), entry.get("data_offsets")
    if type(code) is not str or code not in CODE_SIZE:
        raise fault(place, f"unknown dtype {show(code)}", "Update Hookline: pip install --upgrade hookline.")
    if type(offsets) is not list or [*map(type, offsets)] != [int, int]:
        raise fault(place, '"data_offsets" has to be a pair of whole numbers')
    shape, (begin, end) = parse_shape(entry.get("shape"), CODE_SIZE[code], place), offsets
    wanted = math.prod(shape) * CODE_SIZE[code]
    if not 0 <= begin <= end <= LARGEST or end - begin != wanted:
        raise fault(place, f"its shape and dtype need {wanted} bytes, its offsets are {begin} and {end}")
    return Entry(code, shape, begin, end)


def _check_cover(entries: Iterable[Entry], size: int, place: object) -> None:
    """The data lie one behind the other, without a hole, up to the end of the file."""
    reached = 0
    for begin, end in sorted((entry.begin, entry.end) for entry in entries):
        if begin != reached:
            raise fault(place, f"two tensors overlap or leave a hole at byte {reached} of the data")
        reached = end
    if reached != size:
        found = f"its tensors need {reached} bytes, the file has {size}"
        raise fault(place, found, f"It is truncated. {DAMAGED}" if size < reached else DAMAGED)
