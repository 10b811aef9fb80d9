"""The private parts of PyTorch that the engine stands on, one named function each.

Each says which release it needs and what happens without it. ``tests/test_torch_private.py`` fails loudly when PyTorch
changes one of them. Nothing else in Hookline touches ``torch._C`` or an underscore name of torch.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.fx
import torch.utils._python_dispatch
import torch.utils.checkpoint
from torch import Tensor

_C: Any = torch._C
_unsafe_preserve_version_counter: Any = getattr(torch.autograd, "_unsafe_preserve_version_counter")  # noqa: B009
_AUTOGRAD: Any = _C._autograd
_FUNCTORCH: Any = _C._functorch
_FX: Any = getattr(torch.fx, "_symbolic_trace", None)
_ENGINE: Any = torch.autograd.Variable._execution_engine
_DEFAULT_META = _AUTOGRAD.CreationMeta.DEFAULT


def lazy_clone(tensor: Tensor) -> Tensor | None:
    """A copy-on-write clone; differentiable like ``clone``.

    Needs ``Tensor._lazy_clone`` (2.2). None where it is missing or refuses the storage (memory of numpy or of another
    process, sparse and nested layouts, meta-data wrappers); the caller clones.
    """
    try:
        return tensor._lazy_clone()
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return None


def preserve_version(tensor: Tensor) -> AbstractContextManager[Any]:
    """Inside, in-place marks on the tensor leave its version as it was.

    Needs ``torch.autograd._unsafe_preserve_version_counter`` (1.11). No fallback: without it a rebased input would fail
    autograd's own check of saved tensors.
    """
    context: AbstractContextManager[Any] = _unsafe_preserve_version_counter(tensor)
    return context


graph_task_id: Callable[[], int] = _C._current_graph_task_id
"""Number of the backward pass that this thread works on, -1 outside one. Needs 1.12. No fallback."""


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call the function when the current backward pass ends; it is dropped when the pass raises.

    Needs ``Variable._execution_engine.queue_callback`` (0.4). No fallback.
    """
    _ENGINE.queue_callback(function)


transforms_active: Callable[[], bool] = _C._are_functorch_transforms_active
"""Whether a torch.func transform (vmap, grad, jvp) is running. Needs 2.0. No fallback."""


def requires_grad(tensor: Tensor) -> bool:
    """``requires_grad``, also of the tensor inside vmap's wrapper, which says False. Needs 2.0."""
    if tensor.requires_grad:
        return True
    while _FUNCTORCH.is_batchedtensor(tensor):
        tensor = _FUNCTORCH.get_unwrapped(tensor)
        if tensor.requires_grad:
            return True
    return False


def full_batch(tensor: Tensor) -> Tensor:
    """The plain tensor inside the wrappers of vmap and grad, with the mapped axes in front. Needs 2.0."""
    while True:
        if _FUNCTORCH.is_batchedtensor(tensor):
            axis = _FUNCTORCH.maybe_get_bdim(tensor)
            tensor = _FUNCTORCH.get_unwrapped(tensor).movedim(axis, 0)
        elif _FUNCTORCH.is_functorch_wrapped_tensor(tensor):
            tensor = _FUNCTORCH.get_unwrapped(tensor)
        else:
            return tensor


def older_full_batch(tensor: Tensor) -> Tensor:
    """The same for the vmap under ``autograd.grad(is_grads_batched=True)``, which has wrappers of its own.

    Needs ``torch._remove_batch_dim`` and ``torch._C._vmapmode_increment_nesting`` (1.6), which tells the level.
    """
    level = _C._vmapmode_increment_nesting() - 1
    _C._vmapmode_decrement_nesting()
    while level > 0 and _FUNCTORCH.is_legacy_batchedtensor(tensor):
        tensor = torch._remove_batch_dim(tensor, level, 0, 0)
        level -= 1
    return tensor


def refuses_in_place(tensor: Tensor) -> bool:
    """Whether autograd raises on an in-place write: leaves, views of leaves, outputs of split, views made in no_grad.

    Needs ``Tensor._is_view``, ``Tensor._base`` and ``torch._C._autograd._get_creation_meta`` (1.8).
    """
    if tensor.layout != torch.strided:
        return False  # such a tensor has no views that could refuse
    if tensor.is_leaf:
        return True
    if not tensor._is_view():
        return False
    base = tensor._base
    if base is not None and base.is_leaf and base.requires_grad:
        return True
    return _AUTOGRAD._get_creation_meta(tensor) != _DEFAULT_META  # type: ignore[no-any-return]


def copy_creation_meta(tensor: Tensor, alias: Tensor) -> None:
    """Let autograd refuse in-place writes to ``alias`` for the reason for which it refuses them to ``tensor``.

    An alias of a leaf becomes an ordinary view of it, so that writes under ``no_grad`` are legal, as they are for the
    leaf. Needs ``torch._C._autograd._set_creation_meta`` (2.1); without it such writes raise.
    """
    if alias._is_view():
        view = tensor._is_view()
        _AUTOGRAD._set_creation_meta(alias, _AUTOGRAD._get_creation_meta(tensor) if view else _DEFAULT_META)


def is_view(tensor: Tensor) -> bool:
    """Whether autograd treats the tensor as a view. Needs ``Tensor._is_view`` (0.4)."""
    return tensor._is_view()


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that a view is a view of. Needs ``Tensor._base`` (1.0)."""
    return tensor._base if is_view(tensor) else None


def sequence_number(node: Any) -> int:
    """The number that an autograd node got when it was made, rising within a thread. Needs ``_sequence_nr`` (1.8)."""
    number: int = node._sequence_nr()
    return number


def address(tensor: Tensor) -> int | None:
    """Address of a tensor's first element on its device; None for what has no memory of its own.

    Needs ``torch._C._data_address`` (2.1), which leaves a copy-on-write snapshot as it is. Without it ``data_ptr``,
    which makes a copy of one.
    """
    try:
        where: int = _C._data_address(tensor)
    except AttributeError:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    return where + int(tensor.storage_offset()) * tensor.element_size() if where else 0


def openmp_parallel() -> int | None:
    """Address of ``GOMP_parallel`` of the OpenMP library that torch computes with; None where there is none.

    Its threads are torch's own: a second library would have threads that fight them for the cores. Needs libgomp in
    torch's folder ``lib``, as in the wheels for Linux.
    """
    for path in sorted(glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*.so*"))):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # only if torch has loaded it
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def storage_id(tensor: Tensor) -> int | None:
    """A number that two tensors share when they share memory; None for layouts without one storage.

    Needs ``UntypedStorage._cdata`` (2.0).
    """
    try:
        address: int = tensor.untyped_storage()._cdata
        return address
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def storage_bytes(tensor: Tensor) -> int | None:
    """Bytes of the memory that the tensor lies in; None for layouts without one storage. Needs 2.0."""
    try:
        size: int = tensor.untyped_storage().nbytes()
        return size
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def version_probe(tensor: Tensor) -> Tensor:
    """A tensor that shares the version counter of another and none of its memory.

    Setting ``.data`` of an alias exchanges the memory and keeps the counter. Where it is refused, the alias itself.
    """
    alias = tensor.detach()
    try:
        alias.data = torch.empty(0, dtype=alias.dtype, device=alias.device)
    except (RuntimeError, NotImplementedError, TypeError):
        return tensor.detach()
    return alias


def version(tensor: Tensor) -> int | None:
    """How often the tensor's memory was written in place; None for inference tensors, which do not count."""
    if tensor.is_inference():
        return None
    counter: int = tensor._version
    return counter


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` is running. Needs ``torch._C._get_tracing_state`` (1.0)."""
    return _C._get_tracing_state() is not None


def is_early_stop(error: BaseException) -> bool:
    """Whether activation checkpointing ends a recomputation that has given all it was for. Needs 2.1."""
    stop = getattr(torch.utils.checkpoint, "_StopRecomputationError", None)
    return stop is not None and isinstance(error, stop)


def is_scripted(module: torch.nn.Module) -> bool:
    """Whether TorchScript runs the module, outside Python. Needs ``torch.jit.ScriptModule`` (1.0)."""
    return isinstance(module, torch.jit.ScriptModule)


def script_like(wrapper: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Let ``torch.jit.script`` take a wrapper for the built-in function that it wraps.

    Needs ``torch.jit._builtins`` (1.0). Without it, code that uses the function cannot be scripted while it is wrapped.
    """
    builtins: Any = getattr(torch.jit, "_builtins", None)
    if builtins is not None and (name := builtins._find_builtin(function)) is not None:
        builtins._register_builtin(wrapper, name)


def is_symbolic_trace() -> bool:
    """Whether a tracer of ``torch.fx`` is running; also for ``make_fx``, which traces real values.

    Needs ``torch.fx._symbolic_trace`` (1.8). False where it is missing: the trace then drops hooks in silence.
    """
    return bool(getattr(_FX, "_is_fx_tracing_flag", False))


def has_hook(tensor: Tensor, handle: Any) -> bool:
    """Whether the hook of a handle is on this very tensor. Needs ``Tensor._backward_hooks`` (0.4).

    A weak reference to the tensor would tell it too, but ``torch.utils.swap_tensors`` refuses tensors that have one.
    """
    return handle.id in (tensor._backward_hooks or ())


def inner_id(tensor: Tensor) -> int:
    """A number of what ``swap_tensors`` exchanges inside the Python object. Needs ``Tensor._cdata`` (0.4)."""
    number: int = tensor._cdata
    return number


def hook_again(tensor: Tensor) -> None:
    """After ``swap_tensors`` the hooks of a Python object are in its table, and none of them is called: mend that.

    Needs ``Tensor._backward_hooks`` to be settable (0.4).
    """
    tensor._backward_hooks = tensor._backward_hooks


def is_tracing_a_graph() -> bool:
    """Whether ``torch.compile`` or ``torch.export`` is at work in this thread, also between its looks at the code.

    Needs ``torch._guards.TracingContext`` (2.0). False where it is missing.
    """
    context = getattr(sys.modules.get("torch._guards"), "TracingContext", None)
    return context is not None and context.try_get() is not None


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` runs the module: what it returned, or a module on which ``compile()`` was called.

    Needs ``Module._compiled_call_impl`` (2.2); without it the second kind is not told.
    """
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open.

    Needs ``torch.autograd.forward_ad._current_level`` (1.11). True where it is missing: it only saves time.
    """
    return int(getattr(torch.autograd.forward_ad, "_current_level", 0)) >= 0


class DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd while it is entered, in this thread and in the backward passes it starts.

    Needs ``torch.utils._python_dispatch.TorchDispatchMode`` (1.11). No fallback.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap ``__torch_dispatch__`` and import its whole compiler for that (2.6)."""
        return False


def current_node() -> Any:
    """The autograd node whose backward this thread is in, None outside one.

    Needs ``torch._C._current_autograd_node`` (2.1); None where it is missing: operations of a backward pass then have
    no node.
    """
    function = getattr(_C, "_current_autograd_node", None)
    return None if function is None else function()


def nodes_made() -> int:
    """The number that the next autograd node of this thread will have, see ``sequence_number``.

    Needs ``torch._C._autograd._get_sequence_nr`` (2.0). No fallback.
    """
    number: int = _AUTOGRAD._get_sequence_nr()
    return number


def written_arguments(function: Any) -> list[tuple[int, str, bool]]:
    """Place, name and whether it is only written to, of each argument that an operation writes into.

    Needs ``OpOverload._schema`` (1.12). No fallback.
    """
    return [
        (place, argument.name, bool(argument.is_out))
        for place, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
