"""The structure of a kept value as a JSON tree, in which tensors are numbers.

====================================================  =======================================
node                                                  value
====================================================  =======================================
``{"t": 0}``                                          the first tensor of the event
``{"v": 1.5}``, ``{"v": {"float": "nan"}}``           a scalar or None
``{"tuple": [node, ...]}``, ``{"list": [...]}``       a tuple, a list
``{"dict": [[key, node], ...]}``                      a dict; the keys are scalars and keep their types
``{"fields": type_name, "items": [[key, node], ...]}``  `Fields`
``{"args": [...], "kwargs": [[key, node], ...]}``     `Arguments`
``{"opaque": type_name}``                             `Opaque`
====================================================  =======================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from hookline.errors import ArgumentError
from hookline.store.strict_json import decode_scalar, encode_scalar, fault, get, show
from hookline.values import Arguments, Fields, Opaque

ONE_TENSOR: dict[str, Any] = {"t": 0}
"""The tree of a value that is a tensor, as most are."""
DEEPEST = 128
"""Levels of nesting that are written and read; `hookline.values` keeps 101."""

_T = TypeVar("_T")


def encode(value: Any, tensors: list[Tensor], depth: int = 0) -> dict[str, Any]:
    """The tree of a kept value; its tensors are appended to ``tensors``.

    Raises:
        ArgumentError: The value is nested too deeply, or holds something that is not part of kept values.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"t": len(tensors) - 1} if depth or len(tensors) > 1 else ONE_TENSOR
    if depth > DEEPEST:
        raise ArgumentError(f"a value is nested deeper than {DEEPEST} levels. Record a part of it, or an inner module.")
    if isinstance(value, Opaque):
        return {"opaque": value.type_name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"v": encode_scalar(value)}
    return _encode_container(value, tensors, depth + 1)


def _encode_container(value: Any, tensors: list[Tensor], depth: int) -> dict[str, Any]:
    def below(children: Sequence[Any]) -> list[Any]:
        return [encode(child, tensors, depth) for child in children]

    def pairs(entries: dict[Any, Any]) -> list[Any]:
        return [[_encode_key(key), encode(child, tensors, depth)] for key, child in entries.items()]

    if isinstance(value, Fields):
        return {"fields": value.type_name, "items": pairs(value)}
    if isinstance(value, Arguments):
        return {"args": below(value.args), "kwargs": pairs(value.kwargs)}
    if isinstance(value, tuple):
        return {"tuple": below(value)}
    if isinstance(value, list):
        return {"list": below(value)}
    if isinstance(value, dict):
        return {"dict": pairs(value)}
    advice = "Put hookline.values.Opaque in its place; tensors, tuples, lists, dicts, strings, numbers and None can be."
    raise ArgumentError(f"a {type(value).__name__} cannot be stored. {advice}")


def _encode_key(key: Any) -> Any:
    if key is None or isinstance(key, (bool, int, float, str)):
        return encode_scalar(key)
    raise ArgumentError(f"a dict key of type {type(key).__name__} cannot be stored. Use strings, numbers or None.")


def decode(node: Any, tensors: Sequence[_T], place: object) -> Any:
    """The kept value of a tree, with the given things in the place of the tensors.

    Raises:
        FormatError: The tree is damaged or hostile, or does not use each of ``tensors`` exactly once.
    """
    left = dict(enumerate(tensors))
    value = _decode(node, left, place, 0)
    if left:
        raise fault(place, f'its "structure" has no place for tensor {min(left)}')
    return value


def _decode(node: Any, left: dict[int, _T], place: object, depth: int) -> Any:
    if depth > DEEPEST:
        raise fault(place, f'its "structure" is nested deeper than {DEEPEST} levels')
    if type(node) is not dict or not node:
        raise fault(place, f'a node of "structure" has to be an object with entries, it is {show(node)}')
    kind = next(iter(node))
    if kind not in _READERS:
        raise fault(place, f'its "structure" has a node of the unknown kind {show(kind)}')
    return _READERS[kind](node, left, place, depth + 1)


def _read_tensor(node: dict[str, Any], left: dict[int, _T], place: object, depth: int) -> _T:
    index = node["t"]
    if type(index) is not int or index not in left:
        raise fault(place, f'its "structure" names tensor {show(index)}, which is not there or is used twice')
    return left.pop(index)


def _read_scalar(node: dict[str, Any], left: dict[int, Any], place: object, depth: int) -> Any:
    return decode_scalar(node["v"], place)


def _read_opaque(node: dict[str, Any], left: dict[int, Any], place: object, depth: int) -> Opaque:
    return Opaque(get(node, "opaque", str, place))


def _read_tuple(node: dict[str, Any], left: dict[int, Any], place: object, depth: int) -> tuple[Any, ...]:
    return tuple(_below(node, "tuple", left, place, depth))


def _read_list(node: dict[str, Any], left: dict[int, Any], place: object, depth: int) -> list[Any]:
    return _below(node, "list", left, place, depth)


def _read_dict(node: dict[str, Any], left: dict[int, Any], place: object, depth: int) -> dict[Any, Any]:
    return _pairs(node, "dict", left, place, depth)


def _read_fields(node: dict[str, Any], left: dict[int, Any], place: object, depth: int) -> Fields:
    return Fields(get(node, "fields", str, place), _names(_pairs(node, "items", left, place, depth), place))


def _read_arguments(node: dict[str, Any], left: dict[int, Any], place: object, depth: int) -> Arguments:
    args = tuple(_below(node, "args", left, place, depth))
    return Arguments(args, _names(_pairs(node, "kwargs", left, place, depth), place))


_READERS: dict[str, Callable[[dict[str, Any], dict[int, Any], object, int], Any]] = {
    "t": _read_tensor,
    "v": _read_scalar,
    "opaque": _read_opaque,
    "tuple": _read_tuple,
    "list": _read_list,
    "dict": _read_dict,
    "fields": _read_fields,
    "args": _read_arguments,
}


def _below(node: dict[str, Any], key: str, left: dict[int, Any], place: object, depth: int) -> list[Any]:
    return [_decode(child, left, place, depth) for child in get(node, key, list, place)]


def _pairs(node: dict[str, Any], key: str, left: dict[int, Any], place: object, depth: int) -> dict[Any, Any]:
    found = {}
    entries = get(node, key, list, place)
    for entry in entries:
        if type(entry) is not list or len(entry) != 2:
            raise fault(place, f'"{key}" of a structure has to hold pairs of key and node, it has {show(entry)}')
        found[decode_scalar(entry[0], place)] = _decode(entry[1], left, place, depth)
    if len(found) != len(entries):
        raise fault(place, f'"{key}" of a structure has a key twice')
    return found


def _names(entries: dict[Any, Any], place: object) -> dict[str, Any]:
    if not all(type(key) is str for key in entries):
        raise fault(place, "the names of fields and keyword arguments have to be strings")
    return entries
