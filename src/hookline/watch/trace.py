"""Follow non-finite values through operations, from where they arise to where they come out.

Each tensor that holds a NaN or an infinity has a source: the operation that made it of finite values, or a parameter
or input that held it before. What is computed from it has the same source. So of several operations that made such
values the one is told whose values came out, and not one whose values ``torch.where`` took away again.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.hooks.operations import Operation, storage_id
from hookline.stats import Summary, summarize
from hookline.watch.frames import NOWHERE, Where, where

__all__ = ["NeedsProcesses", "Source", "Trace", "Value"]

_OVERWRITES = frozenset({
    "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_",
    "log_normal_",
})  # fmt: skip
"""Operations that do not read what they write into."""
_ON_PURPOSE = frozenset({
    "masked_fill", "masked_fill_", "full", "full_like", "new_full", "fill", "fill_", "scalar_tensor", "where",
    "index_fill", "index_fill_", "index_put", "index_put_", "constant_pad_nd", "add", "add_", "sub", "sub_", "rsub",
    "lift_fresh", "clamp_min", "clamp_max",
})  # fmt: skip
"""Operations to which an infinite number is given by somebody who means it."""
_CONSTANTS = frozenset({"lift_fresh", "lift_fresh_copy"})
"""How a tensor comes in that was made of Python's numbers."""
_UNINITIALIZED = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"])
_FUSED_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention")
"""What these return besides their output is not defined for rows that are masked or padded."""


class NeedsProcesses(Exception):
    """An operation would talk to other processes."""


class Value(NamedTuple):
    """A tensor that an operation was given or returned.

    Attributes:
        name: Of the argument, such as ``"self"``, or ``"output"``.
        shape, dtype, device: Of the tensor.
        summary: Its statistics at that moment.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    summary: Summary

    def to_json(self) -> dict[str, Any]:
        """As an object for JSON."""
        return self._asdict() | {"shape": list(self.shape), "summary": self.summary.to_dict()}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where non-finite values come from.

    Attributes:
        kind: ``"fault"``, ``"cause"`` (a value that was there before), ``"given"`` (NaN as a number),
            ``"uninitialized"`` or ``"mask"`` (infinities written on purpose).
        operation: The operation, or the first one that used such a value.
        where: Its line.
        direction: ``"forward"`` or ``"backward"``.
        cause: What held the value before, such as ``"parameter weight"``; for ``"cause"`` and ``"mask"`` alone.
        node: In a backward pass, the autograd node.
        forward_operation: The operation whose backward that is.
        inputs, outputs: Of the operation.
    """

    kind: str
    operation: str
    where: Where
    direction: str
    cause: str = ""
    node: str = ""
    forward_operation: str = ""
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()


class _Signs(NamedTuple):
    """Which non-finite values a tensor holds."""

    nan: bool
    positive: bool
    negative: bool

    def __bool__(self) -> bool:
        return any(self)

    def within(self, others: Iterable[_Signs]) -> bool:
        """Whether there is no NaN, and no infinity of a sign that the others lack."""
        known = list(others)
        return not (
            self.nan
            or (self.positive and not any(one.positive for one in known))
            or (self.negative and not any(one.negative for one in known))
        )


_FINITE = _Signs(False, False, False)


class Trace:
    """Stands around operations.

    Args:
        paths: By the id of each module that may run, its path.
        names: By ``storage_id``, what holds a value that was there before, such as ``"parameter weight"``.
        stop: The frame above which nobody is asked for a line.

    Attributes:
        direction: ``"forward"`` or ``"backward"``; set from outside.
        sources: All that were found, in order.
    """

    def __init__(self, paths: Mapping[int, str], names: Mapping[int, str], stop: FrameType | None) -> None:
        self.direction = "forward"
        self.sources: list[Source] = []
        self._paths, self._names, self._stop = paths, names, stop
        self._origins: dict[int, int] = {}  # by storage, the place in sources
        self._made: dict[int, tuple[str, Where]] = {}  # by the number of an autograd node, the forward operation
        self._thread = threading.get_ident()

    def around(self, operation: Operation, carry_out: Callable[[], Any]) -> Any:
        """Carry an operation out, and look at what it returned."""
        if "c10d" in operation.namespace:
            raise NeedsProcesses(operation.name)
        with torch.no_grad():
            before = _before(operation)
        output = carry_out()
        with torch.no_grad():
            self._note(operation)
            bad = [(name, tensor, found) for name, tensor in _outputs(operation) if (found := _signs(tensor))]
            if bad:
                self._trace(operation, before, bad)
        return output

    def first_source(self, tensors: Iterable[tuple[str, Tensor]]) -> Source | None:
        """The earliest source of the non-finite values in some tensors; masks come last. None when all are finite."""
        places = []
        for name, tensor in tensors:
            if found := _signs(tensor):
                places.append(self._place(name, tensor, found, "", NOWHERE))
        return self.sources[min(places, key=self._rank)] if places else None

    def first_fault(self) -> Source | None:
        """The earliest source that is no mask and no leftover in memory."""
        return next((source for source in self.sources if source.kind in ("fault", "cause", "given")), None)

    def _rank(self, place: int) -> tuple[bool, int]:
        return self.sources[place].kind == "mask", place

    def _note(self, operation: Operation) -> None:
        """Remember which operation of the forward an autograd node belongs to."""
        number = operation.forward_number
        if number >= 0 and number not in self._made and threading.get_ident() == self._thread:
            self._made[number] = operation.name, where(self._paths, self._stop)

    def _trace(self, operation: Operation, before: dict[int, Tensor], bad: list[tuple[str, Tensor, _Signs]]) -> None:
        place, given = self._where(operation), _inputs(operation, before)
        sources = [
            (self._place(name, tensor, found, operation.name, place, original), found)
            for name, tensor, original in given
            if (found := _signs(tensor))
        ]
        kinds = {number: self.sources[number].kind for number, _ in sources}
        real = [number for number, kind in kinds.items() if kind != "mask"]
        if real:
            number = min(real)
        elif sources and all(found.within(one for _, one in sources) for _, _, found in bad):
            number = min(kinds)
        else:
            number = self._add(self._source(operation, place, given, bad))
        for _, tensor, _ in bad:
            self._set_origin(tensor, number)

    def _source(
        self,
        operation: Operation,
        place: Where,
        given: list[tuple[str, Tensor, Tensor]],
        bad: list[tuple[str, Tensor, _Signs]],
    ) -> Source:
        kind = _kind(operation, [found for _, _, found in bad])
        made = self._made.get(operation.node_number, ("", NOWHERE)) if operation.node_name else ("", NOWHERE)
        return Source(
            kind,
            operation.name,
            place,
            self.direction,
            node=operation.node_name,
            forward_operation=made[0],
            inputs=tuple(_value(name, tensor) for name, tensor, _ in given),
            outputs=tuple(_value(name, tensor) for name, tensor in _outputs(operation)),
        )

    def _where(self, operation: Operation) -> Where:
        """Its own line; in a backward pass that runs no code of the user, that of the forward operation."""
        own = where(self._paths, self._stop)
        if not operation.node_name or own.is_users:
            return own
        return self._made.get(operation.node_number, ("", own))[1]

    def _place(
        self, name: str, tensor: Tensor, found: _Signs, operation: str, place: Where, original: Tensor | None = None
    ) -> int:
        """The source of a tensor's non-finite values, by its number."""
        key = storage_id(tensor if original is None else original)
        if key is not None and key in self._origins:
            return self._origins[key]
        what = self._names.get(-1 if key is None else key) or f"a tensor that the module did not make ({name})"
        # -inf that comes in from outside is a mask, of which models are full; in a parameter it is damage.
        on_purpose = found == (False, False, True) and not what.startswith("parameter")
        kind = "mask" if on_purpose else "cause"
        number = self._add(Source(kind, operation, place, self.direction, what, inputs=(_value(what, tensor),)))
        if key is not None:
            self._origins[key] = number
        return number

    def _add(self, source: Source) -> int:
        self.sources.append(source)
        return len(self.sources) - 1

    def _set_origin(self, tensor: Tensor, number: int) -> None:
        if (key := storage_id(tensor)) is not None:
            self._origins[key] = number


def _kind(operation: Operation, found: list[_Signs]) -> str:
    """What an operation is that made non-finite values although no tensor held any."""
    short = operation.name.split(".")[1]
    if short in _UNINITIALIZED:
        return "uninitialized"
    numbers = [leaf for _, leaf in operation.inputs() if type(leaf) is float and not math.isfinite(leaf)]
    if any(map(math.isnan, numbers)):
        return "given"
    signs = [_Signs(False, number > 0, number < 0) for number in numbers]
    if short in _ON_PURPOSE and numbers and all(one.within(signs) for one in found):
        return "mask"
    return "fault"


def _before(operation: Operation) -> dict[int, Tensor]:
    """By id, copies of what the operation is going to write over."""
    return {
        id(value): value.detach().clone()
        for _, value, is_out in operation.written()
        if _can_be_bad(value) and not is_out and operation.name.split(".")[1] not in _OVERWRITES
    }


def _inputs(operation: Operation, before: dict[int, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """Name, value before the operation, and the tensor itself, of all that it has read."""
    short = operation.name.split(".")[1]
    if short in _CONSTANTS:
        return []
    skipped = {id(value) for _, value, _ in operation.written()} - set(before)
    return [
        (name, before.get(id(leaf), leaf), leaf)
        for name, leaf in operation.inputs()
        if _can_be_bad(leaf) and id(leaf) not in skipped
    ]


def _outputs(operation: Operation) -> list[tuple[str, Tensor]]:
    found: dict[int, tuple[str, Tensor]] = {}
    for name, leaf in operation.outputs():
        if _can_be_bad(leaf):
            found.setdefault(id(leaf), (name, leaf))
    if any(part in operation.name for part in _FUSED_ATTENTION) and "backward" not in operation.name:
        found = dict(list(found.items())[:1])
    for name, value, _ in operation.written():
        if _can_be_bad(value):
            found.setdefault(id(value), (name, value))
    return list(found.values())


def _can_be_bad(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _signs(tensor: Tensor) -> _Signs:
    if not _can_be_bad(tensor) or tensor.device.type == "meta":
        return _FINITE
    if tensor.is_complex() and tensor.layout is torch.strided:  # a summary has the magnitudes, without their signs
        tensor = torch.view_as_real(tensor.resolve_conj())
    found = summarize(tensor)
    return _Signs(found.nan > 0, found.inf > found.neg_inf, found.neg_inf > 0)


def _value(name: str, tensor: Tensor) -> Value:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Value(name, tuple(tensor.shape), dtype, str(tensor.device), summarize(tensor))
