"""The kinds of container that values are nested in, and the plain ones in which they are kept."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

__all__ = ["ATOMS", "CALL", "Arguments", "Container", "Fields", "Opaque", "Scaled", "container_of"]


# ---------------------------------------------------------------- kept values


_METHODS_AS_FIELDS = frozenset(vars(dict)) - {"items", "keys"}
"""Methods of dict that give way to a field of their name, such as ``values`` of what torch.topk returns."""


class Fields(dict[str, Any]):
    """A named structure (dataclass, ModelOutput, namedtuple) as it is kept: keys are attributes too.

    A field that is called ``items``, ``keys`` or ``type_name`` is read by its key alone.

    Attributes:
        type_name: Name of the class that the value had in the model.
    """

    def __init__(self, type_name: str, items: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__(items)
        self.__dict__["type_name"] = type_name

    def __getattribute__(self, name: str) -> Any:
        if name in _METHODS_AS_FIELDS and name in self:
            return self[name]
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(self) or "none"
            raise AttributeError(f"{self.type_name} has no field {name!r}; it has: {known}") from None

    def __repr__(self) -> str:
        return f"{self.type_name}({', '.join(f'{key}={value!r}' for key, value in self.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Fields, (self.type_name, dict(self))


class Arguments(NamedTuple):
    """What a module was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Opaque:
    """Stands for an object that is not kept: neither a tensor nor a plain scalar."""

    type_name: str


class Scaled(NamedTuple):
    """A leaf that is kept as two tensors.

    Attributes:
        data: Its elements, each divided by the scale of its row; (..., n).
        scale: (..., 1).
    """

    data: Tensor
    scale: Tensor


# ---------------------------------------------------------------- containers


class Container:
    """How one kind of container is taken apart and put together again."""

    in_place = False
    """Whether the entries of the very object can be exchanged, so that the callee may still write into it."""

    as_it_is = False
    """Whether such an object, as an argument, is passed on untouched."""

    is_call = False
    """Whether this is the pair (args, kwargs) of a call."""

    def keys(self, value: Any) -> tuple[Any, ...]:
        """Names of the entries: indices, keys or fields."""
        return tuple(range(len(value)))

    def children(self, value: Any) -> Sequence[Any]:
        """The entries."""
        return tuple(value)

    def suffix(self, key: Any) -> str:
        """What a value path says of an entry."""
        return f"[{key!r}]"

    def rebuild(self, value: Any, children: Sequence[Any]) -> Any:
        """A container of the same kind with other entries."""
        return tuple(children)

    def put(self, value: Any, key: Any, child: Any) -> None:
        """Exchange an entry of the very object."""
        value[key] = child

    def get(self, value: Any, key: Any) -> Any:
        """An entry."""
        return value[key]

    def kept(self, type_name: str, keys: Sequence[Any], children: Sequence[Any]) -> Any:
        """The container as a recording keeps it."""
        return tuple(children)


class _List(Container):
    in_place = True

    def rebuild(self, value: Any, children: Sequence[Any]) -> Any:
        made = copy.copy(value)
        for index, child in enumerate(children):
            made[index] = child
        return made

    def kept(self, type_name: str, keys: Sequence[Any], children: Sequence[Any]) -> Any:
        return list(children)


class _TupleSubclass(Container):
    """Subclasses without names. Their constructors may want other things, so they are made by ``tuple.__new__``."""

    def rebuild(self, value: Any, children: Sequence[Any]) -> Any:
        try:
            made = tuple.__new__(type(value), children)
        except TypeError:  # a class written in C, such as torch.Size
            return type(value)(children)
        if getattr(value, "__dict__", None):
            made.__dict__.update(value.__dict__)
        return made


class _StructSequence(Container):
    """What torch.max and its kin return; its constructor takes one sequence."""

    def keys(self, value: Any) -> tuple[Any, ...]:
        return tuple(type(value).__match_args__)

    def suffix(self, key: Any) -> str:
        return f".{key}"

    def rebuild(self, value: Any, children: Sequence[Any]) -> Any:
        return type(value)(children)

    def kept(self, type_name: str, keys: Sequence[Any], children: Sequence[Any]) -> Any:
        return Fields(type_name, zip(keys, children, strict=True))


class _NamedTuple(_TupleSubclass):
    """Also PackedSequence, whose constructor computes."""

    def keys(self, value: Any) -> tuple[Any, ...]:
        return tuple(value._fields)

    def suffix(self, key: Any) -> str:
        return f".{key}"

    def kept(self, type_name: str, keys: Sequence[Any], children: Sequence[Any]) -> Any:
        return Fields(type_name, zip(keys, children, strict=True))


class _Dict(Container):
    in_place = True

    def keys(self, value: Any) -> tuple[Any, ...]:
        return tuple(value)

    def children(self, value: Any) -> Sequence[Any]:
        return tuple(child for _, child in value.items())

    def rebuild(self, value: Any, children: Sequence[Any]) -> Any:
        made = copy.copy(value)
        for key, child in zip(value, children, strict=True):
            made[key] = child
        return made

    def kept(self, type_name: str, keys: Sequence[Any], children: Sequence[Any]) -> Any:
        return {_plain_key(key): child for key, child in zip(keys, children, strict=True)}


class _ModelOutput(_Dict):
    """A dict whose items are attributes as well, as in transformers."""

    def suffix(self, key: Any) -> str:
        return f".{key}"

    def kept(self, type_name: str, keys: Sequence[Any], children: Sequence[Any]) -> Any:
        return Fields(type_name, zip(map(str, keys), children, strict=True))


class _Dataclass(Container):
    in_place = True

    def keys(self, value: Any) -> tuple[Any, ...]:
        return tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))

    def children(self, value: Any) -> Sequence[Any]:
        return tuple(getattr(value, name) for name in self.keys(value))

    def suffix(self, key: Any) -> str:
        return f".{key}"

    def put(self, value: Any, key: Any, child: Any) -> None:
        object.__setattr__(value, key, child)

    def get(self, value: Any, key: Any) -> Any:
        return getattr(value, key)

    def rebuild(self, value: Any, children: Sequence[Any]) -> Any:
        made = copy.copy(value)
        for key, child in zip(self.keys(value), children, strict=True):
            object.__setattr__(made, key, child)
        return made

    def kept(self, type_name: str, keys: Sequence[Any], children: Sequence[Any]) -> Any:
        return Fields(type_name, zip(keys, children, strict=True))


class _Namespace(_Dataclass):
    """types.SimpleNamespace, and classes made with attrs."""

    def keys(self, value: Any) -> tuple[Any, ...]:
        fields = getattr(type(value), "__attrs_attrs__", None)
        names = vars(value) if fields is None else [field.name for field in fields]
        return tuple(name for name in names if hasattr(value, name))


class _Registered(Container):
    """A class that somebody registered with torch's pytree, such as a key-value cache.

    Such an object is often written to by the module that gets it, so as an input it is passed on as it is.
    """

    as_it_is = True

    def keys(self, value: Any) -> tuple[Any, ...]:
        return tuple(range(len(self.children(value))))

    def children(self, value: Any) -> Sequence[Any]:
        return tuple(_pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0])

    def rebuild(self, value: Any, children: Sequence[Any]) -> Any:
        node = _pytree.SUPPORTED_NODES[type(value)]
        return node.unflatten_fn(list(children), node.flatten_fn(value)[1])

    def kept(self, type_name: str, keys: Sequence[Any], children: Sequence[Any]) -> Any:
        return Fields(type_name, zip(map(str, keys), children, strict=True))


class _Call(Container):
    """The pair (args, kwargs) of a call."""

    is_call = True

    def keys(self, value: Any) -> tuple[Any, ...]:
        return (*range(len(value[0])), *value[1])

    def children(self, value: Any) -> Sequence[Any]:
        return (*value[0], *value[1].values())

    def suffix(self, key: Any) -> str:
        return f"args[{key}]" if isinstance(key, int) else f"kwargs[{key!r}]"

    def rebuild(self, value: Any, children: Sequence[Any]) -> Any:
        count = len(value[0])
        return tuple(children[:count]), dict(zip(value[1], children[count:], strict=True))

    def kept(self, type_name: str, keys: Sequence[Any], children: Sequence[Any]) -> Any:
        names = [key for key in keys if isinstance(key, str)]
        count = len(children) - len(names)
        return Arguments(tuple(children[:count]), dict(zip(names, children[count:], strict=True)))


TUPLE, LIST, DICT, CALL = Container(), _List(), _Dict(), _Call()
_STRUCT, _NAMED, _TUPLE_SUBCLASS = _StructSequence(), _NamedTuple(), _TupleSubclass()
_MODEL_OUTPUT, _DATACLASS, _NAMESPACE, _REGISTERED = _ModelOutput(), _Dataclass(), _Namespace(), _Registered()
ATOMS = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, bytes, type(None), torch.dtype, torch.device})
_BY_TYPE: dict[type, Container | None] = {tuple: TUPLE, list: LIST, dict: DICT}


def container_of(value: Any) -> Container | None:
    """The container kind of a value, None when it is a leaf."""
    kind = type(value)
    if kind in ATOMS:
        return None
    try:
        return _BY_TYPE[kind]
    except KeyError:
        found = _classify(kind)
        if not isinstance(found, _Registered) and kind.__module__ != "__main__":
            _BY_TYPE[kind] = found
        return found


def _classify(kind: type) -> Container | None:
    if issubclass(kind, (Tensor, torch.nn.Module, type, Opaque)):
        return None
    if issubclass(kind, tuple):
        return _classify_tuple(kind)
    if issubclass(kind, (dict, collections.UserDict)):
        return _MODEL_OUTPUT if dataclasses.is_dataclass(kind) or _reads_items_as_fields(kind) else DICT
    if issubclass(kind, (list, collections.deque)):
        return LIST
    if dataclasses.is_dataclass(kind):
        return _DATACLASS
    if issubclass(kind, types.SimpleNamespace) or hasattr(kind, "__attrs_attrs__"):
        return _NAMESPACE
    return _REGISTERED if kind in _pytree.SUPPORTED_NODES else None


def _classify_tuple(kind: type) -> Container:
    if hasattr(kind, "_fields"):
        return _NAMED
    return _STRUCT if hasattr(kind, "n_sequence_fields") else _TUPLE_SUBCLASS


def _reads_items_as_fields(kind: type) -> bool:
    return issubclass(kind, Fields) or any(base.__name__ == "ModelOutput" for base in kind.__mro__)


def _plain_key(key: Any) -> Any:
    return key if key is None or type(key) in (str, int, float, bool) else repr(key)
