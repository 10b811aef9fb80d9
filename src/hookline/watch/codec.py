"""Modules, their attributes and arguments as a JSON tree in which tensors are numbers; no pickle.

==========================================================  ==========================================================
node                                                        value
==========================================================  ==========================================================
``{"v": 1.5}``, ``{"v": {"float": "nan"}}``                 None, a bool, a number, a text
``{"complex": [1.0, 2.0]}``, ``{"bytes": "00ff"}``          a complex number; bytes
``{"t": 0, "grad": true, "parameter": false, ...}``         the first tensor; the same number is the same tensor
``{"tuple": [...]}``, ``list``, ``set``, ``frozenset``      such a container
``{"dict": [[node, node], ...]}``                           a dict
``{"mapping": name, "items": [[node, node], ...]}``         an object of a subclass of dict
``{"named": name, "items": [...]}``                         an object of a subclass of tuple
``{"object": name, "state": [[text, node], ...]}``          a dataclass or SimpleNamespace
``{"enum": [name, member]}``                                a member of an enum
``{"import": name}``                                        a class or function, ``"package.module:Class.method"``
``{"dtype": "float32"}``, ``{"device": "cuda:0"}``          such a thing of torch
``{"size": [2, 3]}``                                        torch.Size
``{"weak": node}``                                          a weak reference to a tensor
``{"m": 3}``                                                the module of that number, which stands elsewhere
``{"module": name, "number": 3, ...}``                      a module
==========================================================  ==========================================================
"""

from __future__ import annotations

import dataclasses
import enum
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hookline.errors import FormatError
from hookline.hooks import original_class
from hookline.hooks.token import TOKEN
from hookline.store.strict_json import decode_scalar, encode_scalar, show

__all__ = ["CannotStore", "Decoder", "Encoder"]

_DEEPEST = 60
_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_HELD = ("_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set")
"""Those of them that are stored, each in its own way."""


class CannotStore(Exception):
    """A value has no form in a bundle."""


class Encoder:
    """Makes nodes of values.

    Args:
        name_of: The import name of a class or function.

    Attributes:
        tensors: All that were met.
        problems: What could not be stored, and why.
    """

    def __init__(self, name_of: Callable[[Any], str]) -> None:
        self.tensors: list[Tensor] = []
        self.problems: list[str] = []
        self._name_of = name_of
        self._numbers: dict[int, int] = {}
        self._modules: dict[int, int] = {}

    def encode(self, value: Any, place: str) -> dict[str, Any]:
        """The node of a value; what has none goes into ``problems`` under its place."""
        try:
            return self._encode(value, place, 0)
        except CannotStore as error:
            self.problems.append(f"{place}: {error}")
            return {"v": None}

    def _encode(self, value: Any, place: str, depth: int) -> dict[str, Any]:
        if depth > _DEEPEST:
            raise CannotStore(f"it is nested deeper than {_DEEPEST} levels")
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value, place, depth)
        if value is None or type(value) in (bool, int, float, str):
            return {"v": encode_scalar(value)}
        plain = _plain(value)
        return self._container(value, place, depth + 1) if plain is None else plain

    def _container(self, value: Any, place: str, depth: int) -> dict[str, Any]:
        def below(children: Any) -> list[Any]:
            return [self._encode(child, f"{place}[{number}]", depth) for number, child in enumerate(children)]

        def pairs(mapping: Any) -> list[Any]:
            return [
                [self._encode(key, place, depth), self._encode(child, f"{place}[{key!r}]", depth)]
                for key, child in mapping.items()
            ]

        kind = type(value)
        if kind in (tuple, list, set, frozenset):
            return {kind.__name__: below(value)}
        if isinstance(value, dict):
            return {"dict": pairs(value)} if kind is dict else {"mapping": self._name_of(kind), "items": pairs(value)}
        if isinstance(value, tuple):
            return {"named": self._name_of(kind), "items": below(value)}
        return self._named(value, place, depth)

    def _named(self, value: Any, place: str, depth: int) -> dict[str, Any]:
        """What has the name of a class or function in its node."""
        kind = type(value)
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            return {"import": self._name_of(value)}
        if isinstance(value, enum.Enum):
            return {"enum": [self._name_of(kind), value.name]}
        if isinstance(value, weakref.ref) and isinstance(value(), Tensor):
            return {"weak": self._tensor(value())}
        if dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
            return {"object": self._name_of(kind), "state": self._state(_fields(value), place, depth)}
        raise CannotStore(f"a {kind.__module__}.{kind.__qualname__} cannot be stored")

    def _state(self, fields: dict[str, Any], place: str, depth: int) -> list[Any]:
        """Each attribute by itself, so that all that cannot be stored is found."""
        found = []
        for name, value in fields.items():
            inner = f"{place}.{name}"
            try:
                found.append([name, self._encode(value, inner, depth)])
            except CannotStore as error:
                self.problems.append(f"{inner}: {error}")
        return found

    def _tensor(self, tensor: Any) -> dict[str, Any]:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_quantized:
            raise CannotStore(f"a {type(tensor).__name__} of layout {tensor.layout} cannot be stored")
        number = self._numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        node = {"t": number, "grad": tensor.requires_grad, "device": str(tensor.device)}
        if type(tensor) is nn.Parameter:
            node["parameter"] = True
        if not tensor.is_contiguous() and torch.empty_like(tensor).stride() == tensor.stride():
            node["stride"] = list(tensor.stride())
        return node

    def _module(self, module: nn.Module, place: str, depth: int) -> dict[str, Any]:
        if id(module) in self._modules:
            return {"m": self._modules[id(module)]}
        number = self._modules[id(module)] = len(self._modules)
        fields = vars(module)
        hooks = [name for name in _OWN if name.endswith("hooks") and fields.get(name)]
        if hooks:
            raise CannotStore(f"it has hooks of its own ({', '.join(sorted(hooks))})")
        attributes = {name: value for name, value in fields.items() if name not in _OWN and name != TOKEN}
        return {
            "module": self._name_of(original_class(module)),
            "number": number,
            "training": module.training,
            "transient": sorted(fields["_non_persistent_buffers_set"]),
            "parameters": self._state(fields["_parameters"], place, depth + 1),
            "buffers": self._state(fields["_buffers"], place, depth + 1),
            "children": self._state(fields["_modules"], place, depth + 1),
            "attributes": self._state(attributes, place, depth + 1),
        }


def _plain(value: Any) -> dict[str, Any] | None:
    """The node of something of torch, or of a scalar with a form of its own."""
    if type(value) is complex:
        return {"complex": [encode_scalar(value.real), encode_scalar(value.imag)]}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    return {"size": list(value)} if type(value) is torch.Size else None


def _fields(value: Any) -> dict[str, Any]:
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}


class Decoder:
    """Makes values of nodes. Classes are made without their ``__init__``.

    Args:
        tensors: By number.
        find: What an import name stands for.
        place: The file, for messages.
    """

    def __init__(self, tensors: list[Tensor], find: Callable[[str], Any], place: object) -> None:
        self._tensors, self._find, self._place = tensors, find, place
        self._made: dict[int, Tensor] = {}
        self._modules: dict[int, nn.Module] = {}

    def decode(self, node: Any) -> Any:
        """The value of a node.

        Raises:
            FormatError: There is no such node.
        """
        if type(node) is not dict or not node:
            raise self._fault(f"a node has to be an object with entries, it is {show(node)}")
        reader = getattr(self, f"_read_{next(iter(node))}", None)
        if reader is None:
            raise self._fault(f"there is no node of the kind {show(next(iter(node)))}")
        try:
            value = reader(node)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise self._fault(f"a node of the kind {show(next(iter(node)))} is damaged ({error})") from error
        return value

    def _fault(self, problem: str) -> FormatError:
        return FormatError(f"{self._place}: {problem}. It was damaged or changed after it was written.")

    def _all(self, nodes: list[Any]) -> Iterator[Any]:
        return (self.decode(node) for node in nodes)

    def _pairs(self, nodes: list[Any]) -> Iterator[tuple[Any, Any]]:
        return ((self.decode(key), self.decode(value)) for key, value in nodes)

    def _named(self, nodes: list[Any]) -> Iterator[tuple[str, Any]]:
        return ((str(name), self.decode(value)) for name, value in nodes)

    def _read_v(self, node: dict[str, Any]) -> Any:
        return decode_scalar(node["v"], self._place)

    def _read_complex(self, node: dict[str, Any]) -> complex:
        return complex(*(decode_scalar(part, self._place) for part in node["complex"]))

    def _read_bytes(self, node: dict[str, Any]) -> bytes:
        return bytes.fromhex(node["bytes"])

    def _read_tuple(self, node: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(self._all(node["tuple"]))

    def _read_list(self, node: dict[str, Any]) -> list[Any]:
        return list(self._all(node["list"]))

    def _read_set(self, node: dict[str, Any]) -> set[Any]:
        return set(self._all(node["set"]))

    def _read_frozenset(self, node: dict[str, Any]) -> frozenset[Any]:
        return frozenset(self._all(node["frozenset"]))

    def _read_dict(self, node: dict[str, Any]) -> dict[Any, Any]:
        return dict(self._pairs(node["dict"]))

    def _read_mapping(self, node: dict[str, Any]) -> Any:
        cls = self._find(node["mapping"])
        items = dict(self._pairs(node["items"]))
        as_names = dataclasses.is_dataclass(cls)  # such as the outputs of transformers
        make: Any = cls
        return make(**items) if as_names else make(items)

    def _read_named(self, node: dict[str, Any]) -> Any:
        cls, items = self._find(node["named"]), tuple(self._all(node["items"]))
        try:
            return tuple.__new__(cls, items)
        except TypeError:  # written in C, such as what torch.max returns
            return cls(items)

    def _read_object(self, node: dict[str, Any]) -> Any:
        cls = self._find(node["object"])
        made = cls.__new__(cls)
        for name, value in self._named(node["state"]):
            object.__setattr__(made, name, value)
        return made

    def _read_enum(self, node: dict[str, Any]) -> Any:
        name, member = node["enum"]
        return self._find(name)[member]

    def _read_import(self, node: dict[str, Any]) -> Any:
        return self._find(node["import"])

    def _read_dtype(self, node: dict[str, Any]) -> torch.dtype:
        found = getattr(torch, node["dtype"], None)
        if not isinstance(found, torch.dtype):
            raise self._fault(f"there is no dtype {show(node['dtype'])}")
        return found

    def _read_device(self, node: dict[str, Any]) -> torch.device:
        return _device(node["device"])

    def _read_size(self, node: dict[str, Any]) -> torch.Size:
        return torch.Size(node["size"])

    def _read_weak(self, node: dict[str, Any]) -> Any:
        return weakref.ref(self.decode(node["weak"]))

    def _read_m(self, node: dict[str, Any]) -> nn.Module:
        return self._modules[node["m"]]

    def _read_t(self, node: dict[str, Any]) -> Tensor:
        number = node["t"]
        if number not in self._made:
            tensor = self._tensors[number].to(_device(node["device"]))
            if "stride" in node:
                laid = torch.empty_strided(tuple(tensor.shape), tuple(node["stride"]), dtype=tensor.dtype)
                tensor = laid.to(tensor.device).copy_(tensor)
            if node.get("parameter"):
                tensor = nn.Parameter(tensor, requires_grad=bool(node["grad"]))
            elif node["grad"]:
                tensor.requires_grad_()
            self._made[number] = tensor
        return self._made[number]

    def _read_module(self, node: dict[str, Any]) -> nn.Module:
        cls = self._find(node["module"])
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise self._fault(f"{node['module']} is no class of modules")
        made: nn.Module = cls.__new__(cls)
        nn.Module.__init__(made)
        self._modules[node["number"]] = made
        held = vars(made)
        held["training"] = bool(node["training"])
        held["_non_persistent_buffers_set"] = set(node["transient"])
        for kind, key in (("_parameters", "parameters"), ("_buffers", "buffers"), ("_modules", "children")):
            held[kind].update(self._named(node[key]))
        for name, value in self._named(node["attributes"]):
            held[name] = value
        return made


def _device(name: str) -> torch.device:
    """The device of that name, or the CPU where there is none."""
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return torch.device("cpu")
    return device
