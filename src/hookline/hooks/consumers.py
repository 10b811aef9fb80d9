"""The operations of a call that use its inputs, so that their gradients can be sent on one by one.

A tensor that is used three times in a module and once beside it gets ``((r + c3) + c2) + c1`` in the plain model. A
node before the module has added up ``(c3 + c2) + c1`` already, and ``r`` plus that is rounded in another way. So the
parts are noted where they arise, and sent on in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hookline.hooks.backward import note_part
from hookline.hooks.nodes import input_node_of
from hookline.hooks.token import original_class
from hookline.hooks.torch_private import sequence_number

if TYPE_CHECKING:
    from hookline.hooks.call import Call

__all__ = ["input_width", "note_parts"]

_USE_ONCE = frozenset(
    getattr(nn, name)
    for name in [
        "Linear",
        "Conv1d",
        "Conv2d",
        "Conv3d",
        "ConvTranspose1d",
        "ConvTranspose2d",
        "ConvTranspose3d",
        "BatchNorm1d",
        "BatchNorm2d",
        "BatchNorm3d",
        "LayerNorm",
        "GroupNorm",
        "Embedding",
        "ReLU",
        "ReLU6",
        "LeakyReLU",
        "ELU",
        "GELU",
        "SiLU",
        "Sigmoid",
        "Tanh",
        "Softmax",
        "LogSoftmax",
        "Dropout",
        "Dropout1d",
        "Dropout2d",
        "Dropout3d",
        "Identity",
        "Flatten",
        "Unflatten",
        "MaxPool1d",
        "MaxPool2d",
        "MaxPool3d",
        "AvgPool1d",
        "AvgPool2d",
        "AvgPool3d",
        "AdaptiveAvgPool1d",
        "AdaptiveAvgPool2d",
        "AdaptiveAvgPool3d",
        "LSTM",
        "GRU",
        "RNN",
    ]
)
"""Classes of torch.nn whose ``forward`` uses each input in one operation."""

_NARROWEST, _WIDEST = 16, 64


def input_width(module: nn.Module, *, several_places: bool) -> int:
    """How many parts the gradient of one input may be sent on in: 1 for modules that use their input once.

    Args:
        module: The module.
        several_places: Whether it got one tensor as several arguments.
    """
    if original_class(module) in _USE_ONCE and not module._modules and not several_places:
        return 1
    count = 0
    for count, _ in enumerate(module.modules(), start=1):
        if 4 * count >= _WIDEST:
            break
    return max(_NARROWEST, min(4 * count, _WIDEST))


def note_parts(call: Call, tensors: list[Tensor], input_node: Any) -> None:
    """Let the operations between ``input_node`` and the outputs tell what each sends to the inputs.

    Args:
        call: The call.
        tensors: Its outputs, before the output node.
        input_node: Its input node.
    """
    uses = _uses([tensor.grad_fn for tensor in tensors], input_node)
    counts: dict[int, int] = {}
    for edges in uses.values():
        for _, place in edges:
            group = call.groups.get(place, place)
            counts[group] = counts.get(group, 0) + 1
    for node, edges in uses.items():
        several = [(slot, place) for slot, place in edges if counts[call.groups.get(place, place)] > 1]
        if several:
            node.register_hook(_noting(call, several))


def _uses(starts: list[Any], input_node: Any) -> dict[Any, list[tuple[int, int]]]:
    """For each operation: (place among its inputs, place among the node's tensors) of each input of the call."""
    found: dict[Any, list[tuple[int, int]]] = {}
    first = sequence_number(input_node)
    seen = {input_node, None}
    waiting = [node for node in starts if node is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        inner = input_node_of(node)
        if inner is not None:
            waiting.append(inner)  # an observed call inside: whatever it uses, its own input node passes on
            continue
        for slot, (below, place) in enumerate(node.next_functions):
            if below is input_node:
                found.setdefault(node, []).append((slot, place))
            elif below not in seen and sequence_number(below) >= first:
                waiting.append(below)
    return found


def _noting(call: Call, edges: list[tuple[int, int]]) -> Any:
    def note(grad_inputs: tuple[Tensor | None, ...], grad_outputs: Any) -> None:
        for slot, place in edges:
            grad = grad_inputs[slot]
            if grad is not None:
                note_part(call, place, grad)

    return note
