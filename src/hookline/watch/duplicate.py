"""A copy of a module and its arguments that can be run without anybody noticing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline.hooks import original_class, snapshot
from hookline.hooks.operations import storage_id
from hookline.values import flatten, flatten_call, paths_of

__all__ = ["CannotCopy", "Duplicate", "duplicate", "own_tensors"]


class CannotCopy(Exception):
    """Why a module cannot be run apart."""


class Duplicate(NamedTuple):
    """A module with its arguments, none of whose memory belongs to anybody else.

    Attributes:
        module: In the mode that the original is in, with its own hooks, and none of Hookline's.
        args, kwargs: What to call it with.
        leaves: Of which gradients can be asked: arguments, then parameters.
        names: What each memory is, by ``storage_id``: ``"parameter 0.weight"``, ``"buffer mask"``, ``"input args[0]"``.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Tensor]
    names: dict[int, str]


def duplicate(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], limit: int) -> Duplicate:
    """Copy a module and its arguments.

    Args:
        module: Any module that needs no other process.
        args: Its arguments.
        kwargs: Those with a name.
        limit: Most bytes that are copied.

    Raises:
        CannotCopy: It is too large, needs other processes, or refuses.
    """
    _refuse_processes(module)
    leaves, structure = flatten_call(args, kwargs)
    inputs = [(path, leaf) for path, leaf in zip(paths_of(structure), leaves, strict=True) if isinstance(leaf, Tensor)]
    _refuse_size(module, [leaf for _, leaf in inputs], limit)
    memo: dict[int, Any] = {}
    asked = [_copy_input(leaf, memo) for _, leaf in inputs]
    for own in own_tensors(module):
        if id(own) not in memo and (made := _copied(own)) is not None:
            memo[id(own)] = made
    try:
        made_module, made_args, made_kwargs = copy.deepcopy((module, args, kwargs), memo)
    except Exception as error:
        text = " ".join(str(error).split())
        raise CannotCopy(f"it cannot be copied: {type(error).__name__}: {text:.200}") from error
    found = Duplicate(made_module, made_args, made_kwargs, [one for one in asked if one is not None], {})
    found.leaves.extend(one for one in made_module.parameters() if one.requires_grad)
    _name(found, [(path, memo[id(leaf)]) for path, leaf in inputs])
    return found


def _name(made: Duplicate, inputs: list[tuple[str, Tensor]]) -> None:
    kinds = (
        ("input", inputs), ("buffer", made.module.named_buffers()), ("parameter", made.module.named_parameters())
    )  # fmt: skip
    for kind, named in kinds:
        for name, tensor in named:
            if (key := storage_id(tensor)) is not None:
                made.names[key] = f"{kind} {name}"


def own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that lie on a module and those in it: parameters, buffers and plain attributes."""
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, nn.Module):
                continue
            yield from (leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor))


def _copied(tensor: Tensor) -> Tensor | None:
    """None for what deepcopy copies by itself, such as buffers and parameters of other classes."""
    if type(tensor) is nn.Parameter:
        return nn.Parameter(snapshot(tensor), requires_grad=tensor.requires_grad)
    return snapshot(tensor) if type(tensor) is Tensor and not tensor.is_leaf else None


def _copy_input(tensor: Tensor, memo: dict[int, Any]) -> Tensor | None:
    """Put a copy into the memo; returns the leaf of which its gradient can be asked."""
    if id(tensor) in memo:
        return None
    made = snapshot(tensor)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        memo[id(tensor)] = made
        return None
    made.requires_grad_()
    memo[id(tensor)] = made.clone()  # the module may write into it, which a leaf refuses
    return made


def _refuse_processes(module: nn.Module) -> None:
    for name, part in module.named_modules():
        cls = original_class(part)
        whose = next((base for base in cls.__mro__ if base.__module__.startswith("torch.distributed")), None)
        if whose is not None or isinstance(part, nn.parallel.DistributedDataParallel):
            raise CannotCopy(f"{name or 'it'} is a {cls.__name__}, which other processes take part in")
    for name, parameter in module.named_parameters():
        if type(parameter.data) is not Tensor:
            raise CannotCopy(f"the parameter {name} is a {type(parameter.data).__name__}")


def _refuse_size(module: nn.Module, inputs: list[Tensor], limit: int) -> None:
    tensors = {id(one): one for one in (*own_tensors(module), *inputs)}.values()
    size = sum(one.numel() * one.element_size() for one in tensors if not nn.parameter.is_lazy(one))
    if size > limit:
        raise CannotCopy(f"its parameters and arguments have {size:,} bytes, more than the limit of {limit:,}")
