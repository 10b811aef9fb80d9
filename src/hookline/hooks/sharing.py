"""Aliases that share memory with a tensor somebody else can reach: what autograd cannot follow must be an error.

Without hooks the input of an identity *is* its output, and a tensor that a module keeps on itself *is* what it
returned: a write to one is a write to the other and autograd knows. Around an observed call the two are aliases with
histories of their own. That is right as long as nobody writes to the one and then uses the other. A watch stands where
both histories meet and compares what arrives there with what came through the alias: once the memory was written to,
a gradient from elsewhere may be wrong, and is an error instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.errors import SharedMemoryError
from hookline.hooks.torch_private import base_of, graph_task_id, version, version_probe

if TYPE_CHECKING:
    from hookline.hooks.call import Call

__all__ = ["watch"]

_FURTHEST = 8
"""Nodes between an alias and the tensor that it is a view of, at most."""

Grads = tuple["Tensor | None", ...]


def watch(call: Call, outer: Tensor, last: Any, alias_node: Any) -> None:
    """Watch a pair of tensors that share memory.

    Args:
        call: The call that made the alias; when its graph is gone, so is the watch.
        outer: The tensor upstream: the caller's input, or what the module computed.
        last: The node through which gradients of the alias reach ``outer``, or one further down the same way.
        alias_node: The node that made the alias.
    """
    if outer.grad_fn is None:
        return
    state = _Shared(call.type_name, outer)
    base = base_of(outer)
    meetings = [(outer.grad_fn, outer.output_nr, _last_before(last, outer.grad_fn))]
    if base is not None and base.grad_fn is not None:
        meetings.append((base.grad_fn, base.output_nr, _last_before(outer.grad_fn, base.grad_fn)))
    for node, output_nr, before in meetings:
        if before is not None:
            _meet(call, state, node, output_nr, before)
    owner = outer if base is None else base
    if owner.grad_fn is not None:
        call.watches.append(_Removed(alias_node.register_prehook(_writes(state, weakref.ref(owner), owner.grad_fn))))


class _Removed:
    """Takes a node's hook away when the call that put it there is gone."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __del__(self) -> None:
        self.handle.remove()


class _Shared:
    """Whether shared memory was written to since the call. Refers to no node, since nodes refer to it."""

    def __init__(self, type_name: str, outer: Tensor) -> None:
        self.type_name = type_name
        self.probe = version_probe(outer)
        self.version = version(self.probe)

    @property
    def written(self) -> bool:
        return version(self.probe) != self.version

    def error(self) -> SharedMemoryError:
        return SharedMemoryError(
            f"a tensor that {self.type_name} returned, was given or kept shares memory with another one (as with an "
            "identity, dropout in evaluation, a view, or an output that is also kept on the module); one of the two "
            "was modified in place and the other was used as well. While the module is observed autograd cannot "
            "follow that. Use an operation that is not in-place, clone the tensor in the model, or leave this module "
            "out."
        )


def _meet(call: Call, state: _Shared, node: Any, output_nr: int, before: Any) -> None:
    """At ``node``, compare what arrives with what ``before`` has sent in the same pass."""
    places = [i for i, edge in enumerate(before.next_functions) if edge == (node, output_nr)]
    sent: dict[int, list[Tensor]] = {}

    def note(grad_inputs: Grads, grad_outputs: Grads) -> None:
        if state.written:
            sent.clear()
            sent[graph_task_id()] = [grad for i in places if (grad := grad_inputs[i]) is not None]

    def compare(grads: Grads) -> None:
        if state.written:
            parts = sent.pop(graph_task_id(), [])
            total = grads[output_nr]
            if total is not None and not _is_sum(total, parts):
                raise state.error()

    call.watches.append(_Removed(before.register_hook(note)))
    call.watches.append(_Removed(node.register_prehook(compare)))


def _writes(state: _Shared, owner: weakref.ref[Tensor], node: Any) -> Callable[[Grads], None]:
    """At the alias: raise if the tensor upstream was written to along its own history, which the alias has not."""

    def check(grads: Grads) -> None:
        tensor = owner()
        if tensor is None or not state.written or all(grad is None for grad in grads):
            return
        now = tensor.grad_fn
        if now is not node and any(map(_changes_gradient, _history(now, node))):
            raise state.error()

    return check


def _is_sum(total: Tensor, parts: list[Tensor]) -> bool:
    if not parts:
        return False
    return total is parts[0] if len(parts) == 1 else torch.equal(total, sum(parts[1:], parts[0]))


def _last_before(node: Any, end: Any) -> Any:
    """The node on the way down from ``node`` that comes right before ``end``."""
    for _ in range(_FURTHEST):
        if node is None:
            return None
        below = [edge[0] for edge in node.next_functions]
        if any(other is end for other in below):
            return node
        node = below[0] if below else None
    return None


def _history(node: Any, end: Any) -> Iterator[Any]:
    for _ in range(_FURTHEST):
        if node is None or node is end:
            return
        yield node
        node = node.next_functions[0][0] if node.next_functions else None


def _changes_gradient(node: Any) -> bool:
    """Whether an in-place write gives the old value another gradient, or gives one to something else as well."""
    if node.name() not in ("AddBackward0", "SubBackward0"):
        return True
    return any(edge[0] is not None for edge in node.next_functions[1:])
