"""A hook on the gradient of a parameter that goes by the parameter's name, and not by the tensor of the day."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from hookline.errors import ArgumentError, HookError, SiteError
from hookline.hooks.attach import attach, check_module
from hookline.hooks.call import Call
from hookline.hooks.handle import Handle
from hookline.hooks.tap import Entry, Observer
from hookline.hooks.tensor import run_tensor_hook
from hookline.hooks.torch_private import has_hook, hook_again, inner_id
from hookline.hooks.user_hooks import check_callable
from hookline.spelling import nearest_clause

__all__ = ["register_parameter_hook"]


def register_parameter_hook(module: nn.Module, name: str, hook: Callable[[Tensor], Tensor | None]) -> Handle:
    """Call ``hook(grad)`` every time the gradient of a parameter is computed.

    It is the gradient of one backward pass, over all uses of the parameter and before it is added to ``.grad``; also
    under ``torch.autograd.grad``. The hook goes by the name: it follows when the module gets another tensor there, by
    ``load_state_dict(assign=True)``, a lazy parameter that gets its shape, or a wrapper that exchanges tensors at each
    call. The tensor that the module has when it is called is the one that counts.

    Args:
        module: The module, or one above it.
        name: As in ``named_parameters()`` of that module: ``"weight"``, ``"layer1.0.conv1.weight"``.
        hook: Returns None, or a gradient of the same shape, dtype and device that is used from there on. It must not
            write into its argument.

    Returns:
        A handle; ``handle.remove()`` takes the hook away.

    Raises:
        ArgumentError: ``module`` is no module that runs in Python, or ``hook`` cannot be called.
        SiteError: There is no such parameter.
        HookError: The parameter requires no gradient.
    """
    if not isinstance(module, nn.Module):  # a container will do: its parameters have gradients all the same
        check_module(module)
    check_callable(hook)
    owner, own_name = _owner(module, name)
    watch = _ParameterWatch(own_name, Entry(hook, site=f"{type(owner).__name__}.{own_name}"))
    watch.hold(owner._parameters[own_name])
    attached = attach(owner, "observer", watch)

    def remove() -> None:
        attached.remove()
        watch.remove()

    return Handle(remove)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the parameter itself, and the name that it has there."""
    if not isinstance(name, str):
        raise ArgumentError(
            f'a parameter is named by a string such as "weight", got {type(name).__name__}: {name!r:.60}'
        )
    path, _, own_name = name.rpartition(".")
    owner = dict(module.named_modules(remove_duplicate=False)).get(path)
    parameter = None if owner is None else owner._parameters.get(own_name)
    if owner is None or parameter is None:
        raise SiteError(_no_parameter(module, owner, name))
    if not parameter.requires_grad:
        raise HookError(
            f"no gradient is computed for {type(owner).__name__}.{own_name}: it does not require one. Call "
            "requires_grad_() on it first."
        )
    return owner, own_name


def _no_parameter(module: nn.Module, owner: nn.Module | None, name: str) -> str:
    own_name = name.rpartition(".")[2]
    if owner is not None and own_name in getattr(owner, "parametrizations", ()):
        path = f"{name.removesuffix(own_name)}parametrizations.{own_name}"
        behind = ", ".join(
            f'"{path}.{known}"' for known in owner.get_submodule(f"parametrizations.{own_name}")._parameters
        )
        return (
            f'"{name}" of {type(module).__name__} is computed by a parametrization from {behind}, which can be hooked. '
            f'For the gradient of what it computes call register_backward_pre_hook on the module "{path}".'
        )
    names = [known for known, _ in module.named_parameters(remove_duplicate=False)]
    return f'{type(module).__name__} has no parameter "{name}"{nearest_clause(name, names)}. See named_parameters().'


class _ParameterWatch(Observer):
    """Keeps the hook on the tensor that stands under a name."""

    def __init__(self, name: str, entry: Entry) -> None:
        self._name = name
        self._entry = entry
        self._held: dict[int, tuple[Any, int]] = {}
        self._lock = threading.Lock()

    def begin(self, call: Call) -> None:
        """A call begins: it uses the tensor that the module has now."""
        module = call.module()
        if module is not None:
            self.hold(module._parameters.get(self._name))

    def on_parameter(self, name: str, value: Any) -> None:
        """The module has got another parameter."""
        if name == self._name:
            self.hold(value)

    def hold(self, tensor: Tensor | None) -> None:
        """Put the hook on a tensor, once."""
        if tensor is None or nn.parameter.is_lazy(tensor) or not tensor.requires_grad:
            return
        with self._lock:
            held = self._held.get(id(tensor))
            if held is not None and has_hook(tensor, held[0]):
                if held[1] != inner_id(tensor):
                    hook_again(tensor)
                    self._held[id(tensor)] = held[0], inner_id(tensor)
                return
            entry = self._entry

            def run(grad: Tensor) -> Tensor | None:
                return run_tensor_hook(entry, grad) if entry.alive else None

            self._held = {key: kept for key, kept in self._held.items() if kept[0].hooks_dict_ref() is not None}
            handle = tensor.register_hook(unserializable_hook(run))  # type: ignore[no-untyped-call]
            self._held[id(tensor)] = handle, inner_id(tensor)

    def remove(self) -> None:
        """Take the hook off every tensor."""
        self._entry.alive = False
        with self._lock:
            for handle, _ in self._held.values():
                handle.remove()
            self._held.clear()
