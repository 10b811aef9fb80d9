"""What a dry pass runs on, and that all of it is afterwards as before: model, gradients, inputs, random state."""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookline.containers import ATOMS
from hookline.errors import ArgumentError, OptionError
from hookline.hooks import add_note
from hookline.hooks.torch_private import version
from hookline.sites import label
from hookline.spelling import kind
from hookline.values import flatten_call, paths_of, rebuild

__all__ = ["Stage", "as_before", "gradients_aside", "leaves_of", "own_inputs", "random_state"]

Memo = dict[int, Any]
"""As for ``copy.deepcopy``: what stands for an object, by its id."""

Undo = tuple[str, Callable[[], None]]
"""What is put back, and how."""


class Stage(NamedTuple):
    """What a pass runs on.

    Attributes:
        model: A copy of the model, or the model itself.
        memo: What stands there for each object of the model, so that an input that is one of them finds its own.
    """

    model: nn.Module
    memo: Memo


# ---------------------------------------------------------------- the model


@contextlib.contextmanager
def as_before(model: nn.Module) -> Iterator[Stage]:
    """A copy to run; the model itself where it cannot be copied, afterwards as before.

    A ``forward`` of an instance would lead back from the copy to the model. The gradients of the model are put back in
    both cases, since a loss may use the model by another name.

    Raises:
        OptionError: A lazy model that cannot be copied.
    """
    stage = _copy_of(model)
    undo: list[Undo] = []
    if stage is None:
        if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
            raise OptionError(
                "this lazy model cannot be copied, and a dry pass would give it shapes; call it once first."
            )
        stage = Stage(model, {id(thing): thing for thing in (*model.modules(), *model.parameters(), *model.buffers())})
        undo = [*_attributes_back(model), *_values_back(model)]
    with _undone(undo), gradients_aside((*model.parameters(), *model.buffers())):
        yield stage


def _copy_of(model: nn.Module) -> Stage | None:
    if any("forward" in vars(module) for module in model.modules()):
        return None
    memo: Memo = {}
    with contextlib.suppress(Exception):  # whatever the model holds: a lock, an open file, a tensor with a graph
        copied = copy.deepcopy(model, memo)
        for parameter in copied.parameters():
            parameter.grad = None
        return Stage(copied, memo)
    return None


@contextlib.contextmanager
def _undone(undo: Iterable[Undo]) -> Iterator[None]:
    """Do all of it at the end, whatever fails; the first error is raised, and its notes tell of the others."""
    first: BaseException | None = None
    try:
        yield
    except BaseException as error:
        first = error
    for what, put_back in undo:
        try:
            put_back()
        except BaseException as error:
            note = f"hookline.plan could not put back {what}"
            if first is None:
                first = error
                add_note(first, note)
            else:
                add_note(first, f"{note}: {error}")
    try:
        if first is not None:
            raise first
    finally:
        del first  # its traceback holds this frame


def _attributes_back(model: nn.Module) -> Iterator[Undo]:
    """The attributes of every module, and what stands in the lists, dicts and sets among them."""
    for path, module in model.named_modules():
        yield f"the attributes of {label(path)}", _filling(vars(module))
        for name, value in vars(module).items():
            if type(value) in _BOXES:
                yield _dotted(path, name), _filling(value)


_BOXES = (list, dict, set, collections.OrderedDict, collections.deque)


def _filling(box: Any) -> Callable[[], None]:
    """Puts back what is in a container now, in the same order."""
    content = _content(box)

    def put_back() -> None:
        now = _content(box)
        if len(now) != len(content) or any(one is not other for one, other in zip(now, content, strict=True)):
            box.clear()
            (box.extend if hasattr(box, "extend") else box.update)(_entries(box, content))

    return put_back


def _content(box: Any) -> list[Any]:
    return [part for item in box.items() for part in item] if isinstance(box, dict) else list(box)


def _entries(box: Any, content: list[Any]) -> Iterable[Any]:
    return zip(content[::2], content[1::2], strict=True) if isinstance(box, dict) else content


def _values_back(model: nn.Module) -> Iterator[Undo]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, tensor in _tensors_of(module):
            if id(tensor) not in seen and not tensor.is_meta:
                seen.add(id(tensor))
                yield _dotted(path, name), _Kept(tensor).put_back


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers, and tensors in attributes and in the containers there."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)
    for name, value in vars(module).items():
        for one in (*_content(value), value) if type(value) in _BOXES else (value,):
            if isinstance(one, Tensor):
                yield name, one


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class _Kept:
    """A tensor of the model, its memory and its value."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.requires_grad = tensor.requires_grad
        self.memory = tensor.detach()  # keeps shape and storage, whatever the pass makes of the tensor's own
        self.version = version(self.memory)
        self.value = self.memory.clone()
        self.is_plain = type(self.memory) is Tensor and tensor.layout is torch.strided
        self.nbytes = self.memory.untyped_storage().nbytes() if self.is_plain else 0

    def put_back(self) -> None:
        if self.is_plain and self.memory.untyped_storage().nbytes() < self.nbytes:
            self.memory.untyped_storage().resize_(self.nbytes)
        if not self._is_unchanged():
            self.memory.copy_(self.value)
        if self.is_plain and not self._is_in_place():
            self.tensor.data = self.memory
        if self.tensor.requires_grad and not self.requires_grad:
            self.tensor.detach_()
        elif self.requires_grad and not self.tensor.requires_grad:
            self.tensor.requires_grad_()

    def _is_unchanged(self) -> bool:
        """To the bit, since a NaN is not equal to itself; what cannot be compared tells by its version."""
        if self.is_plain:
            bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (self.memory, self.value)]
            return torch.equal(*bits)
        try:
            return torch.equal(self.memory, self.value)
        except (NotImplementedError, RuntimeError):
            return version(self.memory) == self.version

    def _is_in_place(self) -> bool:
        return self.tensor.dtype == self.memory.dtype and self.tensor.is_set_to(self.memory)


# ---------------------------------------------------------------- gradients


@contextlib.contextmanager
def gradients_aside(tensors: Iterable[Tensor]) -> Iterator[None]:
    """No gradients at these tensors, and those of before afterwards, which nothing has been added to."""
    kept = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
    with _undone([("a gradient", _giving(tensor, gradient)) for tensor, gradient in kept]):
        for tensor, _ in kept:
            tensor.grad = None
        yield


def _giving(tensor: Tensor, gradient: Tensor | None) -> Callable[[], None]:
    def put_back() -> None:
        tensor.grad = gradient

    return put_back


def leaves_of(root: Tensor) -> list[Tensor]:
    """The tensors to which a backward pass from the root gives gradients."""
    found, waiting, seen = [root] if root.is_leaf else [], [root.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [below for below, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor) and leaf.is_leaf:
                found.append(leaf)
    return found


# ---------------------------------------------------------------- inputs


def own_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, memo: Memo) -> tuple[tuple[Any, ...], Any]:
    """Copies, which the model may write to and backward gives gradients to; what cannot be copied goes in as it is.

    Raises:
        ArgumentError: An iterator that cannot be copied, which the pass would use up.
    """
    given = args, dict(kwargs or {})
    leaves, structure = flatten_call(*given)
    with _OwnTensors():
        for path, leaf in zip(paths_of(structure), leaves, strict=True):
            if type(leaf) is not Tensor and type(leaf) not in ATOMS and not _can_be_copied(leaf, memo):
                if _is_used_up(leaf):
                    raise ArgumentError(_used_up(path, leaf))
                memo[id(leaf)] = leaf
        try:
            return copy.deepcopy(given, memo)
        except Exception:  # a container that refuses, for a key or a method of its own
            return rebuild(given, structure, [copy.deepcopy(leaf, memo) for leaf in leaves])  # type: ignore[no-any-return]


class _OwnTensors(TorchFunctionMode):
    """A deep copy takes each tensor without its graph and its gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor: Tensor = args[0]
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _can_be_copied(leaf: Any, memo: Memo) -> bool:
    try:
        copy.deepcopy(leaf, dict(memo))  # another memo, since one that fails leaves half of the object there
    except Exception:
        return False
    return True


def _is_used_up(leaf: Any) -> bool:
    """Whether it, or what it holds, is read to its end; a file can be read again."""
    within = (leaf, *getattr(leaf, "__dict__", {}).values())
    return any(isinstance(one, Iterator) and not isinstance(one, io.IOBase) for one in within)


def _used_up(path: str, leaf: Any) -> str:
    where = f"example_{path.replace('args', 'inputs', 1)}" if path.startswith("args") else path
    return (
        f"{where}: got {kind(leaf)}, which cannot be copied and which the dry pass would use up; "
        "give a list of its items, or iter(list) where the model wants an iterator."
    )


# ---------------------------------------------------------------- random state


@contextlib.contextmanager
def random_state(model: nn.Module) -> Iterator[None]:
    """The random state of Python, NumPy and torch afterwards as before."""
    devices = {tensor.device.index for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=sorted(index for index in devices if index is not None)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
