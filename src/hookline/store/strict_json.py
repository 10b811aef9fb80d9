"""Strict JSON with a checksum, and typed access to what came out of it. Every complaint is a `FormatError`.

JSON has no NaN, no infinity, and many readers cut integers at 64 bits; `encode_scalar` writes those as
``{"float": "nan"}`` and ``{"int": "0x1f"}``.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

from hookline.errors import FormatError

LARGEST = 2**63 - 1
"""Largest count, size and offset that is accepted."""
DAMAGED = "It was damaged or changed after it was written: restore it from a copy, or record again."

_CHECKSUM = re.compile(rb',"crc":"([0-9a-f]{8})"\}$')
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a whole number"}


def fault(place: object, problem: str, advice: str = DAMAGED) -> FormatError:
    """The error for a recording that cannot be used: which file, what is wrong, what to do."""
    return FormatError(f"{place}: {problem}. {advice}")


def show(value: Any) -> str:
    """A parsed value for a message: short, and never by recursion into something hostile."""
    if isinstance(value, (dict, list)):
        return _KINDS[type(value)]
    return "null" if value is None else repr(value)[:60]


# ---------------------------------------------------------------- text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
COMPACT = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
READABLE = json.JSONEncoder(allow_nan=False, indent=1)


def parse(data: bytes, place: object) -> Any:
    """Parse strict JSON.

    Raises:
        FormatError: It is not UTF-8, not JSON, or nested too deeply.
    """
    try:
        return _DECODER.decode(data.decode("utf-8"))
    except RecursionError:
        raise fault(place, "its JSON is nested too deeply") from None
    except ValueError as error:
        raise fault(place, f"it is not valid JSON ({str(error)[:200]})") from None


def seal(text: str) -> bytes:
    """A JSON object as bytes with a newline; its last entry, ``crc``, is the checksum of all that stands before it."""
    body = text[:-1].rstrip().encode("ascii")
    return body + b',"crc":"%08x"}\n' % zlib.crc32(body)


def is_sealed(data: bytes) -> bool:
    """Whether a text ends with a checksum; not whether that is right."""
    return _CHECKSUM.search(data.rstrip(b"\n")) is not None


def unseal(data: bytes, place: object) -> dict[str, Any]:
    """The object in a sealed text; one without a checksum is accepted.

    Raises:
        FormatError: It is not a JSON object, or not the text that was sealed.
    """
    data = data.rstrip(b"\n")
    found = _CHECKSUM.search(data)
    if found and int(found[1], 16) != zlib.crc32(data[: found.start()]):
        raise fault(place, "its checksum is not that of its text", f'{DAMAGED} If you edited it, take out its "crc".')
    parsed = parse(data, place)
    if type(parsed) is not dict:
        raise fault(place, f"a JSON object was expected, it has {show(parsed)}")
    return parsed


# ---------------------------------------------------------------- scalars


def encode_scalar(value: Any) -> Any:
    """None, a bool, a number or a string as strict JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        return {"int": hex(value)}
    return value


def decode_scalar(node: Any, place: object) -> Any:
    """What `encode_scalar` was given.

    Raises:
        FormatError: The node is no scalar.
    """
    if node is None or type(node) in (str, bool, int) or (type(node) is float and math.isfinite(node)):
        return node
    if type(node) is dict and len(node) == 1:
        ((kind, text),) = node.items()
        if kind == "float" and text in ("nan", "inf", "-inf"):
            return float(text)
        if kind == "int" and type(text) is str and re.fullmatch("-?0x[0-9a-f]+", text):
            return int(text, 16)
    raise fault(place, f"a string, number, true, false or null was expected, it has {show(node)}")


# ---------------------------------------------------------------- entries


def get(entry: dict[str, Any], key: str, kind: type, place: object) -> Any:
    """The entry of that key, which has to be of exactly that type."""
    value = entry.get(key)
    if type(value) is not kind:
        found = show(value) if key in entry else "missing"
        raise fault(place, f'"{key}" has to be {_KINDS[kind]}, it is {found}')
    return value


def counts(entry: dict[str, Any], keys: Sequence[str], place: object) -> list[int]:
    """The entries of those keys, whole numbers from 0 to 2**63 - 1."""
    values: list[Any] = [entry.get(key) for key in keys]
    if {*map(type, values)} != {int} or min(values) < 0 or max(values) > LARGEST:
        bad, value = next((key, value) for key, value in zip(keys, values, strict=True) if not _is_count(value))
        found = show(value) if bad in entry else "missing"
        raise fault(place, f'"{bad}" has to be a whole number from 0 to 2**63 - 1, it is {found}')
    return values


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def reals(entry: dict[str, Any], keys: Sequence[str], place: object) -> list[float]:
    """The entries of those keys, numbers as `encode_scalar` writes them."""
    values: list[Any] = [entry.get(key) for key in keys]
    if {*map(type, values)} != {float} or not all(map(math.isfinite, values)):
        values = [_real(key, value, place) for key, value in zip(keys, values, strict=True)]
    return values


def _real(key: str, value: Any, place: object) -> float:
    number = decode_scalar(value, place)
    if type(number) is int and -LARGEST <= number <= LARGEST:
        return float(number)
    if type(number) is not float:
        raise fault(place, f'"{key}" has to be a number, it is {show(value)}')
    return number
