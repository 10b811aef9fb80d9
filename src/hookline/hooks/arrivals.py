"""Look at gradients as they arrive at tensors, without an autograd node of our own: for statistics, cheaply."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from hookline.hooks.tensor import register_tensor_hook
from hookline.hooks.torch_private import base_of, sequence_number

__all__ = ["origin_key", "when_gradients_arrive"]


def when_gradients_arrive(tensors: Iterable[tuple[int, Tensor]], look: Callable[[int, Tensor], None]) -> None:
    """Call ``look(number, gradient)`` in each backward pass, when the gradient of a tensor is complete.

    It is the gradient of the value that the tensor has now. Where several modules return the very same tensor it is
    the gradient of all of them: there is one value. The look must change nothing. It ends with the graph.

    Args:
        tensors: Numbers for ``look``, and tensors that require a gradient.
        look: What to call.
    """
    by_node: dict[Any, list[tuple[int, int]]] = {}
    for number, tensor in tensors:
        node = tensor.grad_fn
        base = base_of(tensor)
        if node is None or (base is not None and base.grad_fn is not None):
            register_tensor_hook(tensor, functools.partial(look, number))
        else:
            by_node.setdefault(node, []).append((tensor.output_nr, number))
    for node, places in by_node.items():
        node.register_prehook(_Look(places, look))


class _Look:
    """Stands before a node; its gradients come as a tuple."""

    __slots__ = ("look", "places")

    def __init__(self, places: list[tuple[int, int]], look: Callable[[int, Tensor], None]) -> None:
        self.places, self.look = places, look

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        for place, number in self.places:
            grad = grads[place]
            if grad is not None:
                self.look(number, grad)


def origin_key(tensor: Tensor) -> tuple[int, int] | None:
    """What two tensors share when one operation made both as the same output; None without a graph."""
    node = tensor.grad_fn
    return None if node is None else (sequence_number(node), tensor.output_nr)
