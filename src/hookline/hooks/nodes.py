"""The autograd nodes before and after a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hookline.hooks.backward import receive_input, receive_output
from hookline.hooks.torch_private import copy_creation_meta, forward_mode, is_view, refuses_in_place, transforms_active

if TYPE_CHECKING:
    from hookline.hooks.call import Call

__all__ = ["InputNode", "OutputNode", "Rebase", "input_node_of", "through_input_node", "through_output_node"]


class OutputNode(torch.autograd.Function):
    """After a call. Runs when the gradients of all outputs are complete."""

    @staticmethod
    def forward(ctx: Any, call: Call, input_node: Any, as_views: Sequence[bool], *tensors: Tensor) -> Any:
        """Hand the outputs on."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.input_node, ctx.seal = call, input_node, call.seals
        ctx.like = _like(tensors) if forward_mode() else ()
        return _aliases(as_views, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Give the gradients to the call's listeners."""
        if ctx.seal != ctx.call.seals:
            return (None, None, None, *grads)  # a forward hook has replaced this output, and another node came after
        return (None, None, None, *receive_output(ctx.call, grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Forward-mode derivative: that of an identity."""
        return _tangents(ctx.like, tangents[3:])


class InputNode(torch.autograd.Function):
    """Before a call. Runs when this call's share of the gradients of all inputs is complete.

    Each tensor is passed ``width`` times and handed on once. The edges let the share be sent on in the parts in which
    it came, so that the producer adds them up in the order, and with the rounding, of the unobserved model.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, width: int, as_views: Sequence[bool], *tensors: Tensor) -> Any:
        """Hand the inputs on."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.width = call, width
        ctx.like = _like(tensors[::width]) if forward_mode() else ()
        return _aliases(as_views, tensors[::width])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Give the gradients to the call's listeners and send them on, in parts where they came in parts."""
        sent: list[Tensor | None] = [None, None, None]
        for parts in receive_input(ctx.call, grads, ctx.width):
            sent += parts
            sent += [None] * (ctx.width - len(parts))
        return tuple(sent)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Forward-mode derivative: that of an identity."""
        return _tangents(ctx.like, tangents[3 :: ctx.width])


class _TransformedOutputNode(torch.autograd.Function):
    """The same in the form that torch.func's transforms ask for; it takes longer to apply."""

    @staticmethod
    def forward(call: Call, input_node: Any, as_views: Sequence[bool], *tensors: Tensor) -> Any:
        return _aliases(as_views, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.seal = inputs[0], inputs[0].seals
        ctx.like = _like(inputs[3:])

    backward = OutputNode.backward
    jvp = OutputNode.jvp

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Call, input_node: Any, as_views: Any, *tensors: Tensor) -> Any:
        tensors, places = _mapped_first(tensors, in_dims[3:])
        return _TransformedOutputNode.apply(call, None, as_views, *tensors), places  # type: ignore[no-untyped-call]


class _TransformedInputNode(torch.autograd.Function):
    """As ``_TransformedOutputNode``, with a width of one."""

    @staticmethod
    def forward(call: Call, width: int, as_views: Sequence[bool], *tensors: Tensor) -> Any:
        return _aliases(as_views, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.width = inputs[0], 1
        ctx.like = _like(inputs[3:])

    backward = InputNode.backward
    jvp = InputNode.jvp

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Call, width: int, as_views: Any, *tensors: Tensor) -> Any:
        tensors, places = _mapped_first(tensors, in_dims[3:])
        return _TransformedInputNode.apply(call, 1, as_views, *tensors), places  # type: ignore[no-untyped-call]


class Rebase(torch.autograd.Function):
    """Makes ``tensor``, which a module has written to through an alias, depend on ``source``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: Tensor) -> Tensor:
        """Mark the tensor as written to."""
        ctx.set_materialize_grads(False)
        ctx.of_view = is_view(tensor)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """All of the gradient goes to the source."""
        # For a view autograd takes None as "no gradient for the rest of the base either", so zeros are returned.
        return (torch.zeros_like(grad) if ctx.of_view and grad is not None else None), grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, source: Tensor | None) -> Tensor | None:
        """Forward-mode derivative: that of the value that was written, in the memory of the old one's."""
        if tangent is None:
            return None if source is None else source.view_as(source)
        return tangent.zero_() if source is None else tangent.copy_(source)


def input_node_of(node: Any) -> Any:
    """The input node of the call that an output node belongs to; None for every other node."""
    return node.input_node if isinstance(node, _OUTPUT_NODE) else None


_OUTPUT_NODE: Any = OutputNode._backward_cls


def _aliases(as_views: Sequence[bool], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t.view_as(t) if v else t.detach() for t, v in zip(tensors, as_views, strict=True))


def _mapped_first(tensors: Sequence[Tensor], dims: Sequence[int | None]) -> tuple[tuple[Tensor, ...], Any]:
    """The tensors with the mapped axis in front, as values are kept, and where it is then."""
    moved = tuple(t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, dims, strict=True))
    return moved, tuple(None if dim is None else 0 for dim in dims)


def _tangents(like: Sequence[tuple[Any, ...]], tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Tangents of aliases; zeros where there is none, which torch does not take from a function of Python."""
    return tuple(
        torch.zeros(shape, dtype=dtype, device=device) if tangent is None else tangent.view_as(tangent)
        for tangent, (shape, dtype, device) in zip(tangents, like, strict=True)
    )


def _like(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


def through_input_node(call: Call, tensors: Sequence[Tensor], width: int) -> tuple[Tensor, ...]:
    """Aliases of the tensors behind one node before the call."""
    if transforms_active():
        plain = (False,) * len(tensors)
        return _TransformedInputNode.apply(call, 1, plain, *tensors)  # type: ignore[no-untyped-call, no-any-return]
    refusing = [refuses_in_place(tensor) for tensor in tensors]
    repeated = tensors if width == 1 else [tensor for tensor in tensors for _ in range(width)]
    aliases = InputNode.apply(call, width, refusing, *repeated)  # type: ignore[no-untyped-call]
    return _dressed(tensors, aliases, refusing)


def through_output_node(
    call: Call, tensors: Sequence[Tensor], input_node: Any, locked: set[int] | None
) -> tuple[Tensor, ...]:
    """Aliases of the tensors behind one node after the call; a write to those at the ``locked`` places will raise."""
    if transforms_active():
        plain = (False,) * len(tensors)
        return _TransformedOutputNode.apply(call, None, plain, *tensors)  # type: ignore[no-untyped-call, no-any-return]
    refusing = [refuses_in_place(tensor) for tensor in tensors]
    views = [place in locked or refuses for place, refuses in enumerate(refusing)] if locked else refusing
    aliases = OutputNode.apply(call, input_node, views, *tensors)  # type: ignore[no-untyped-call]
    return _dressed(tensors, aliases, refusing)


def _dressed(tensors: Sequence[Tensor], aliases: tuple[Tensor, ...], refusing: Sequence[bool]) -> tuple[Tensor, ...]:
    """Give the aliases what the tensors have besides their values: Python attributes, the reason to refuse writes."""
    for tensor, alias, refuses in zip(tensors, aliases, refusing, strict=True):
        if refuses:
            copy_creation_meta(tensor, alias)
        if tensor.__dict__:
            alias.__dict__.update(tensor.__dict__)
    return aliases
