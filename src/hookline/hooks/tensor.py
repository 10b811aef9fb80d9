"""A hook on the gradient of one tensor, as the tensor is when the hook is registered."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from hookline.errors import ArgumentError, HookError
from hookline.hooks.handle import Handle
from hookline.hooks.tap import Entry
from hookline.hooks.torch_private import base_of, graph_task_id, sequence_number, version, version_probe
from hookline.hooks.user_hooks import ShownGradients, call_hook, check_callable, replaced_gradients

__all__ = ["register_tensor_hook", "run_tensor_hook"]


def register_tensor_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Handle:
    """Call ``hook(grad)`` every time the gradient of ``tensor`` is computed.

    It is the gradient of the value that the tensor has now: an in-place operation later makes a new value, and the
    hook stays with the old one, also when the tensor is a view, where PyTorch loses the hook.

    Args:
        tensor: An input, output or intermediate that requires a gradient.
        hook: Returns None, or a gradient of the same shape, dtype and device that is used from there on. It must not
            write into its argument.

    Returns:
        A handle; ``handle.remove()`` takes the hook away.

    Raises:
        ArgumentError: ``tensor`` is no tensor, or ``hook`` cannot be called.
        HookError: The tensor requires no gradient, so that none will ever be computed.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"a tensor hook is put on a torch.Tensor, got {type(tensor).__name__}: {tensor!r:.60}")
    check_callable(hook)
    if not tensor.requires_grad:
        raise HookError(
            f"no gradient is computed for this tensor of shape {tuple(tensor.shape)}: it does not require one. Call "
            "requires_grad_() on it before it is used, or hook it where gradients are enabled."
        )
    entry = Entry(hook, site=f"tensor of shape {tuple(tensor.shape)}")
    base = base_of(tensor)
    if base is None or base.grad_fn is None:
        return Handle(tensor.register_hook(lambda grad: run_tensor_hook(entry, grad)).remove)  # type: ignore[no-untyped-call]
    return Handle(_ViewHook(entry, tensor, base).remove)


def run_tensor_hook(entry: Entry, grad: Tensor) -> Tensor | None:
    """The gradient that the hook gives in the place of this one; None where it leaves it."""
    shown = ShownGradients([grad], None, "tensor")
    result = call_hook(entry, "tensor hook", shown.shown[0])
    shown.check(entry, "tensor hook", "grad")
    if result is None:
        return None
    return replaced_gradients(entry, "tensor hook", "grad", [result], shown)[0]


class _ViewHook:
    """A hook on a view of a base that may be written to later.

    Such a write gives the base a new history from which the view's old node is cut off, so that a hook there is never
    called. What arrives at the base's old node then holds the gradient of the view's old value in the view's place.
    """

    def __init__(self, entry: Entry, view: Tensor, base: Tensor) -> None:
        self.entry = entry
        self.view = weakref.ref(view)
        node = base.grad_fn
        assert node is not None
        # The node holds this hook, so the hook does not hold the node: its number is enough to know it again.
        self.node_number, self.output_nr = sequence_number(node), base.output_nr
        self.probe = version_probe(view)
        self.version = version(self.probe)
        self.shape, self.stride = view.shape, view.stride()
        # A real view of a complex base counts in reals.
        self.is_part_of_complex = base.is_complex() and not view.is_complex()
        self.offset = view.storage_offset() - base.storage_offset() * (2 if self.is_part_of_complex else 1)
        self.is_conj, self.is_neg = view.is_conj(), view.is_neg()
        self.base_shape, self.base_stride = base.shape, base.stride()
        self.called_in = -1
        at_view = view.register_hook(self.at_view)  # type: ignore[no-untyped-call]
        self.handles = [at_view, node.register_prehook(self.at_base)]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def at_view(self, grad: Tensor) -> Tensor | None:
        self.called_in = graph_task_id()
        return run_tensor_hook(self.entry, grad)

    def at_base(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        total = grads[self.output_nr]
        if total is None or self.called_in == graph_task_id() or not self._cut_off():
            return None
        whole = torch.empty_strided(self.base_shape, self.base_stride, dtype=total.dtype, device=total.device)
        whole.copy_(total)
        units = torch.view_as_real(whole) if self.is_part_of_complex else whole
        part = units.as_strided(self.shape, self.stride, self.offset)
        new = run_tensor_hook(self.entry, self.as_seen(part))
        if new is None:
            return None
        part.copy_(self.as_seen(new))
        return (*grads[: self.output_nr], whole, *grads[self.output_nr + 1 :])

    def as_seen(self, grad: Tensor) -> Tensor:
        """From the gradient of the memory to that of the view, and back: a view may be a conjugate or a negative."""
        if self.is_conj:
            grad = grad.conj().resolve_conj()
        return grad.neg() if self.is_neg else grad

    def _cut_off(self) -> bool:
        view = self.view()
        if view is None:
            return version(self.probe) != self.version
        base = base_of(view)
        return base is None or base.grad_fn is None or sequence_number(base.grad_fn) != self.node_number
