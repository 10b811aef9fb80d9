"""One hook on the gradients of several tensors, by backward pass."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hookline.errors import ArgumentError, OptionError
from hookline.hooks.handle import Handle
from hookline.hooks.tap import Entry
from hookline.hooks.tensor import register_tensor_hook
from hookline.hooks.torch_private import at_end_of_backward, graph_task_id
from hookline.hooks.user_hooks import call_hook, check_callable

__all__ = ["register_multi_grad_hook"]


def register_multi_grad_hook(tensors: Sequence[Tensor], hook: Callable[[Any], None], *, mode: str = "all") -> Handle:
    """Call ``hook`` once for each backward pass that computes the gradient of one of several tensors.

    Passes are told apart also when they run at the same time in several threads, and a tensor may be a leaf, under
    ``torch.autograd.grad`` as well, an intermediate, a view, or what backward starts at.

    Args:
        tensors: Tensors that require a gradient, at least one.
        hook: With ``mode="all"`` called at the end of the pass as ``hook(grads)``, a tuple with one entry for each
            tensor, None where no gradient came. With ``mode="any"`` called as ``hook(grad)`` with the first that comes.
            What it returns is not used.
        mode: ``"all"`` or ``"any"``.

    Returns:
        A handle; ``handle.remove()`` takes the hook away.

    Raises:
        ArgumentError: ``tensors`` is no sequence of tensors, or ``hook`` cannot be called.
        OptionError: There is no tensor, or no such mode.
        HookError: One of the tensors requires no gradient.
    """
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise ArgumentError(f"tensors is a list or tuple of tensors, got {type(tensors).__name__}.")
    if not tensors:
        raise OptionError("tensors is empty; pass at least one tensor that requires a gradient.")
    if mode not in ("all", "any"):
        raise OptionError(f'mode is "all" or "any", got {mode!r}.')
    check_callable(hook)
    entry = Entry(hook, site=f"{len(tensors)} tensors")
    collector = _Collector(entry, len(tensors), first_only=mode == "any")
    handles: list[Handle] = []

    def remove() -> None:
        entry.alive = False
        for handle in handles:
            handle.remove()

    try:
        for index, tensor in enumerate(tensors):
            arrived: Any = functools.partial(collector.arrived, index)
            arrived.__qualname__ = entry.name  # for the messages
            handles.append(register_tensor_hook(tensor, arrived))
    except BaseException:
        remove()
        raise
    return Handle(remove)


class _Pass:
    """The gradients of one backward pass so far."""

    def __init__(self, count: int) -> None:
        self.grads: list[Tensor | None] = [None] * count


class _Collector:
    """Gathers the gradients of each pass; a pass that raises is forgotten with the callback that holds its state."""

    def __init__(self, entry: Entry, count: int, *, first_only: bool) -> None:
        self._entry = entry
        self._count = count
        self._first_only = first_only
        self._passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def arrived(self, index: int, grad: Tensor) -> None:
        task = graph_task_id()
        with self._lock:
            found = self._passes.get(task)
            state = _Pass(self._count) if found is None else found
            self._passes[task] = state
            state.grads[index] = grad
        if found is None:
            at_end_of_backward(functools.partial(self._ended, task, state))
            if self._first_only and self._entry.alive:
                call_hook(self._entry, "multi-gradient hook", grad)

    def _ended(self, task: int, state: _Pass) -> None:
        with self._lock:
            self._passes.pop(task, None)
        if not self._first_only and self._entry.alive:
            call_hook(self._entry, "multi-gradient hook", tuple(state.grads))
