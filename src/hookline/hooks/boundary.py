"""The two autograd nodes around a call, which see all gradients of its inputs and outputs and nobody else's.

All tensors that go in pass through one node, all that come out through another, so the first runs when this call's
share of the input gradients is complete, and the second when the gradients of all outputs are. Both hand on
``x.detach()``: no view, so in-place operations stay legal; the same memory and version counter, so autograd's own check
of saved tensors still works.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.errors import SharedMemoryError
from hookline.hooks.consumers import input_width, note_parts
from hookline.hooks.identity import compares_identity
from hookline.hooks.nodes import Rebase, through_input_node, through_output_node
from hookline.hooks.overlap import overlapping
from hookline.hooks.purity import is_torchs_own
from hookline.hooks.sharing import watch
from hookline.hooks.torch_private import (
    base_of,
    is_view,
    preserve_version,
    refuses_in_place,
    requires_grad,
    storage_id,
    transforms_active,
)
from hookline.values import Structure, Undo, flatten, flatten_call, rebuild, swap_in

if TYPE_CHECKING:
    from hookline.hooks.call import Call

__all__ = ["Inputs", "close_again", "close_boundary", "histories", "open_boundary", "watch_kept"]


class Inputs:
    """What went into a call.

    Attributes:
        args, kwargs: What ``forward`` is given.
        outer: The caller's tensors that require a gradient.
        inner: What ``forward`` got in their place: aliases, or the very tensors where no input node was asked for.
        nodes: ``grad_fn`` of each inner tensor as the call began.
        plain: The caller's other tensors.
        node: The input node, None where none was asked for.
        wide: Whether the module may use an input more than once.
    """

    __slots__ = ("args", "inner", "kwargs", "node", "nodes", "outer", "plain", "undo", "wide")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.outer: list[Tensor] = []
        self.inner: Sequence[Tensor] = ()
        self.nodes: list[Any] = []
        self.plain: list[Tensor] = []
        self.undo: list[Undo] = []
        self.node: Any = None
        self.wide = False

    def restore(self) -> None:
        """Put the caller's tensors back into the caller's lists and dicts."""
        for put_back in reversed(self.undo):
            put_back()

    def written(self) -> dict[int, tuple[Tensor, Tensor]]:
        """By the id of the inner tensor: (outer, inner) of those that the module has written to in place."""
        found = {
            id(inner): (outer, inner)
            for outer, inner, node in zip(self.outer, self.inner, self.nodes, strict=True)
            if inner.grad_fn is not node and (inner is outer or not is_view(inner))
        }
        found.update((id(t), (t, t)) for t in self.plain if t.requires_grad and not t.is_leaf)
        return found


def open_boundary(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Look at the arguments and, if the call's listeners ask for it, send them through the input node."""
    inputs = Inputs(args, kwargs)
    leaves, call.in_structure = flatten_call(args, kwargs)
    call.in_count = len(leaves)
    index = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if _passes_nodes(leaf):
                index.append(position)
            elif leaf.is_floating_point() or leaf.is_complex():
                inputs.plain.append(leaf)
    if not index or not call.plan.input_node:
        inputs.outer = [leaves[i] for i in index]
        inputs.inner = inputs.outer
        inputs.nodes = [tensor.grad_fn for tensor in inputs.outer]
        return inputs
    _alias_inputs(call, inputs, leaves, index)
    return inputs


def _passes_nodes(tensor: Tensor) -> bool:
    """Whether a tensor has a gradient, and a layout of which autograd can make an alias."""
    return requires_grad(tensor) and not (tensor.is_nested and tensor.layout == torch.strided)


def _alias_inputs(call: Call, inputs: Inputs, leaves: list[Any], index: list[int]) -> None:
    first = _first_places(call, leaves, index)
    call.in_index = [i for i in index if first[i] == i]
    inputs.outer = [leaves[i] for i in call.in_index]
    module = call.module()
    call.groups = _groups(inputs.outer)
    width = 1 if module is None else input_width(module, several_places=bool(call.groups))
    inputs.inner = through_input_node(call, inputs.outer, width)
    inputs.nodes = [alias.grad_fn for alias in inputs.inner]
    inputs.node = inputs.nodes[0]
    inputs.wide = width > 1
    alias_at = dict(zip(call.in_index, inputs.inner, strict=True))
    new = [alias_at[first[i]] if i in first else leaf for i, leaf in enumerate(leaves)]
    inputs.args, inputs.kwargs = swap_in((inputs.args, inputs.kwargs), call.in_structure, new, inputs.undo)


def _groups(tensors: Sequence[Tensor]) -> dict[int, int]:
    """See ``Call.groups``."""
    if len({id(tensor) for tensor in tensors}) == len(tensors):
        return {}
    first: dict[int, int] = {}
    return {place: first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)}


def _first_places(call: Call, leaves: list[Any], index: list[int]) -> dict[int, int]:
    """For each place the one whose alias it gets.

    That is its own, or the first with the same tensor if the module asks ``query is key``, as attention does to choose
    its way of computing.
    """
    if len({id(leaves[i]) for i in index}) == len(index) or not compares_identity(call.module()):
        return {i: i for i in index}
    seen: dict[int, int] = {}
    return {i: seen.setdefault(id(leaves[i]), i) for i in index}


def close_boundary(call: Call, inputs: Inputs, output: Any, flat: tuple[list[Any], Structure]) -> Any:
    """Send the outputs through the output node and give the caller's tensors the history that they would have.

    Args:
        call: The call.
        inputs: What went in.
        output: What ``forward`` returned.
        flat: Its leaves and structure as it returned them.
    """
    written = {} if transforms_active() else inputs.written()
    tensors, result, output_leaves = _seal(call, flat, inputs.node)
    if inputs.wide and tensors and not transforms_active():
        note_parts(call, tensors, inputs.node)
    for outer, inner in zip(inputs.outer, inputs.inner, strict=True):
        if inner is not outer and inner.__dict__:
            outer.__dict__.update(inner.__dict__)
    for key, (outer, inner) in written.items():
        _rebase(call, outer, inner, result.get(key))
        if key in result:
            result[key] = outer
    if not transforms_active():
        _watch_all(call, inputs, tensors, result, written)
    new = [result.get(id(leaf), leaf) for leaf in output_leaves]
    if inputs.undo and any(output is own for own in (*inputs.args, *inputs.kwargs.values())):
        return swap_in(output, call.out_structure, new, [])  # the caller's own list or dict stays the same object
    return rebuild(output, call.out_structure, new)


def close_again(call: Call, output: Any) -> Any:
    """Send an output that a forward hook has put in the place of the module's own through a new output node."""
    _, result, leaves = _seal(call, flatten(output), None)
    return rebuild(output, call.out_structure, [result.get(id(leaf), leaf) for leaf in leaves])


def histories(output: Any) -> list[tuple[int, Any]]:
    """Identity and history of each tensor in an output; another one means that a hook has replaced or written it."""
    return [(id(leaf), leaf.grad_fn) for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]


def _seal(
    call: Call, flat: tuple[list[Any], Structure], input_node: Any
) -> tuple[list[Tensor], dict[int, Tensor], list[Any]]:
    """Apply the output node; returns its tensors, the alias of each by id, and all leaves of the output."""
    leaves, call.out_structure = flat
    call.out_count = len(leaves)
    tracked: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and _passes_nodes(leaf):
            tracked.setdefault(id(leaf), position)
    call.out_index = list(tracked.values())
    call.seals += 1
    tensors = [leaves[i] for i in call.out_index]
    if not tensors:
        return [], {}, leaves
    locked = overlapping(tensors) if len(tensors) > 1 and not transforms_active() else None
    aliases = through_output_node(call, tensors, input_node, locked)
    return tensors, {id(tensor): alias for tensor, alias in zip(tensors, aliases, strict=True)}, leaves


def _rebase(call: Call, outer: Tensor, inner: Tensor, alias: Tensor | None) -> None:
    if alias is None:
        call.side_effect = True
        if outer is inner:
            return
    reshaped = outer.shape != inner.shape or outer.stride() != inner.stride()
    if reshaped and is_view(outer):
        raise SharedMemoryError(
            f"{call.type_name} changed the shape of its input in place, from {tuple(outer.shape)} to "
            f"{tuple(inner.shape)}, as unsqueeze_ and t_ do, and the input is a view. While its gradients are observed "
            "the caller's tensor cannot follow. Use the operation that is not in-place, or leave this module out."
        )
    with preserve_version(outer), torch.no_grad():
        if reshaped:
            outer.as_strided_(inner.size(), inner.stride(), inner.storage_offset())
    with preserve_version(outer):
        Rebase.apply(outer, inner if alias is None else alias)  # type: ignore[no-untyped-call]
    if is_view(outer):
        _ = outer.grad_fn  # autograd notes the version at which it last made a view's history, and now it is another


def _watch_all(
    call: Call,
    inputs: Inputs,
    tensors: Sequence[Tensor],
    result: dict[int, Tensor],
    written: dict[int, tuple[Tensor, Tensor]],
) -> None:
    """Watch what shares memory, and remember what the module may have kept; see ``watch_kept``."""
    shared = {
        storage_id(inner): (outer, inner, node)
        for outer, inner, node in zip(inputs.outer, inputs.inner, inputs.nodes, strict=True)
        if id(inner) not in written and not refuses_in_place(outer)
    }
    module = call.module()
    may_keep = module is None or not is_torchs_own(module)
    for tensor in tensors:
        alias = result[id(tensor)]
        if refuses_in_place(alias):
            continue
        found = shared.get(storage_id(tensor)) if shared else None
        if found is not None and found[0] is not alias:
            outer, inner, node = found
            watch(call, outer, alias.grad_fn if inner is outer else node, alias.grad_fn)
        if may_keep and id(tensor) not in written:
            for own in (tensor, base_of(tensor)):
                if own is not None:
                    call.kept.append((weakref.ref(own), weakref.ref(own), alias.grad_fn))
    if may_keep and call.plan.input_node:
        for outer, inner, node in shared.values():
            call.kept.append((weakref.ref(inner), weakref.ref(outer), node))


def watch_kept(call: Call) -> None:
    """Watch the aliases that still live although the call is over: the module, or a hook, has kept them."""
    for inner, outer, node in call.kept:
        tensor = outer()
        if inner() is not None and tensor is not None:
            watch(call, tensor, node, node)
    call.kept.clear()
