"""See a module's parameter where a function of torch.nn.functional uses it without calling the module.

``nn.MultiheadAttention`` computes with ``out_proj.weight`` and never calls ``out_proj``; tied embeddings and layers
written by hand do the like. While anything is observed, the functions of ``torch.nn.functional`` that take weights are
wrapped: one that gets the weight and the bias of an observed module, and is the one that this module uses, is a call of
it. Any other use of an observed module's parameter is told to its observers.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from hookline.hooks.call import run
from hookline.hooks.running import running
from hookline.hooks.tap import Tap
from hookline.hooks.token import original_class
from hookline.hooks.torch_private import script_like

__all__ = ["add", "forget", "put_in", "take_out"]


class _Kind(NamedTuple):
    """A function that computes what a module class does, and where its parameters stand among the arguments."""

    name: str
    classes: tuple[type[nn.Module], ...]
    weight: int = 1
    bias: int | None = 2
    settings: tuple[tuple[str, int, Any], ...] = ()
    """Attributes of the module that the function takes as well, their places, and what it takes by default."""


_CONV = (("stride", 3, 1), ("padding", 4, 0), ("dilation", 5, 1), ("groups", 6, 1))
_CONV_TRANSPOSE = (("stride", 3, 1), ("padding", 4, 0), ("output_padding", 5, 0), ("groups", 6, 1), ("dilation", 7, 1))
_EMBEDDING = (
    ("padding_idx", 2, None),
    ("max_norm", 3, None),
    ("norm_type", 4, 2.0),
    ("scale_grad_by_freq", 5, False),
    ("sparse", 6, False),
)
_BATCH_NORM = (
    ("running_mean", 1, None),
    ("running_var", 2, None),
    ("training", 5, False),
    ("momentum", 6, 0.1),
    ("eps", 7, 1e-5),
)
_KINDS = (
    _Kind("linear", (nn.Linear,)),
    _Kind("embedding", (nn.Embedding,), bias=None, settings=_EMBEDDING),
    _Kind("conv1d", (nn.Conv1d,), settings=_CONV),
    _Kind("conv2d", (nn.Conv2d,), settings=_CONV),
    _Kind("conv3d", (nn.Conv3d,), settings=_CONV),
    _Kind("conv_transpose1d", (nn.ConvTranspose1d,), settings=_CONV_TRANSPOSE),
    _Kind("conv_transpose2d", (nn.ConvTranspose2d,), settings=_CONV_TRANSPOSE),
    _Kind("conv_transpose3d", (nn.ConvTranspose3d,), settings=_CONV_TRANSPOSE),
    _Kind("layer_norm", (nn.LayerNorm,), 2, 3, (("normalized_shape", 1, None), ("eps", 4, 1e-5))),
    _Kind("group_norm", (nn.GroupNorm,), 2, 3, (("num_groups", 1, None), ("eps", 4, 1e-5))),
    _Kind("batch_norm", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), 3, 4, _BATCH_NORM),
    _Kind("prelu", (nn.PReLU,), bias=None),
)
_HAND_OVER = "handle_torch_function"
_SHOWS = frozenset(("locals", "vars", "exec", "eval", "f_locals", "_getframe", "currentframe", "stack"))
"""Names in the code of a function that may hold the dict of its own locals."""

_owners: dict[int, list[weakref.ref[Tap]]] = {}
"""By the id of a parameter, the taps of the modules that have it; an id may outlive its parameter."""
_parameters: dict[int, set[int]] = {}
"""By the id of a tap, the ids of the parameters under which it stands in ``_owners``."""
_wrapped: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""The functions and what stands in their place, made once: TorchScript knows functions by their id for good."""


def add(tap: Tap, parameter: Any) -> None:
    """Look out for a parameter of a tapped module. The lock of ``presence`` is held."""
    known = _parameters.setdefault(id(tap), set())
    if id(parameter) not in known:
        known.add(id(parameter))
        ref = weakref.ref(tap)  # which may collect garbage, and that forgets taps and their lists
        _owners[id(parameter)] = [*_owners.get(id(parameter), ()), ref]


def forget(tap_id: int) -> None:
    """Look out for the parameters of a tap no longer. The lock of ``presence`` is held."""
    for key in _parameters.pop(tap_id, ()):
        # Taps that die together take each other's entries along, since their references are dead already.
        _owners[key] = [ref for ref in _owners.get(key, ()) if (tap := ref()) is not None and id(tap) != tap_id]
        if not _owners[key]:
            del _owners[key]


def put_in() -> None:
    """Wrap the functions; harmless a second time."""
    _wrap(_HAND_OVER, _naming_originals)  # first in and last out: other threads may be calling
    for kind in _KINDS:
        _wrap(kind.name, functools.partial(_watching, kind))


def _wrap(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    now = getattr(functional, name)
    original, ours = _wrapped.get(name, (None, None))
    if now is not ours and now is not original:
        ours = make(now)
        _wrapped[name] = now, ours
    setattr(functional, name, ours)


def take_out() -> None:
    """Put the functions back; one that somebody else has wrapped meanwhile stays, and finds nothing to look for."""
    for name, (original, ours) in reversed(_wrapped.items()):
        if getattr(functional, name) is ours:
            setattr(functional, name, original)


def _naming_originals(hand_over: Callable[..., Any]) -> Callable[..., Any]:
    """A function in Python hands itself to ``__torch_function__`` by its global name, which is the wrapper's now.

    Subclasses of Tensor and function modes have tables by function, in which only the original stands.
    """

    @functools.wraps(hand_over)
    def wrapper(public_api: Any, *args: Any, **kwargs: Any) -> Any:
        original, ours = _wrapped.get(getattr(public_api, "__name__", ""), (None, None))
        return hand_over(public_api if ours is None or public_api is not ours else original, *args, **kwargs)

    return wrapper


def _watching(kind: _Kind, function: Callable[..., Any]) -> Callable[..., Any]:
    owners, at, compiling, attributed = _owners, kind.weight, torch.compiler.is_compiling, _attributed

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return function(*args, **kwargs)
        weight = args[at] if len(args) > at else kwargs.get("weight")
        taps = owners.get(id(weight))
        return function(*args, **kwargs) if taps is None else attributed(kind, function, taps, weight, args, kwargs)

    # torch.jit.script reads the text of the wrapped function and looks its names up in the globals of this one.
    names = getattr(function, "__globals__", wrapper.__globals__)
    made = types.FunctionType(wrapper.__code__, names, kind.name, None, wrapper.__closure__)
    functools.update_wrapper(made, function)
    script_like(made, function)
    return made


def _attributed(
    kind: _Kind,
    function: Callable[..., Any],
    taps: list[weakref.ref[Tap]],
    weight: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a function that uses the parameter of a tapped module: as a call of that module where it is one."""
    inside = running()
    if inside and len(taps) == 1 and taps[0]() is inside[-1]:  # nearly always: the module's own call
        return function(*args, **kwargs)
    found = _others_that_own(taps, weight)
    if found and _is_own_use(sys._getframe(2), weight):
        return function(*args, **kwargs)
    for tap, module in found:
        if _computes_as(kind, module) and _is_a_call_of(kind, module, weight, args, kwargs):
            return _as_call(tap, module, function, args, kwargs)
    user = inside[-1] if inside else None
    for tap, _ in found:
        for observer in tap.observers:
            observer.passed_by(kind.name, None if user is None else user.module())
    return function(*args, **kwargs)


def _others_that_own(taps: list[weakref.ref[Tap]], weight: Any) -> list[tuple[Tap, nn.Module]]:
    """The tapped modules that have this parameter; none while one of them is running, since it is its own use."""
    inside = running()
    found = []
    for ref in tuple(taps):
        tap = ref()
        module = None if tap is None else tap.module()
        if tap is None or module is None or all(own is not weight for own in module._parameters.values()):
            continue
        if any(tap is other for other in inside):
            return []
        found.append((tap, module))
    return found


def _is_own_use(frame: FrameType, weight: Any) -> bool:
    """Whether the function that called is a method of a module that has the parameter itself, observed or not."""
    code = frame.f_code
    if "self" not in code.co_varnames + code.co_cellvars + code.co_freevars:
        return False
    names = frame.f_locals
    caller = names.get("self")
    if type(names) is dict and code.co_flags & inspect.CO_OPTIMIZED and _SHOWS.isdisjoint(code.co_names):
        names.clear()  # before Python 3.13 the frame keeps this copy, and with it every tensor that it had, to its end
    return isinstance(caller, nn.Module) and any(own is weight for own in caller._parameters.values())


def _computes_as(kind: _Kind, module: nn.Module) -> bool:
    """Whether the module's ``forward`` is that of the class, and does nothing but call the function."""
    forward: Any = getattr(original_class(module), "forward", None)
    plain = any(forward is getattr(cls, "forward", None) for cls in kind.classes)
    plain = plain and "forward" not in module.__dict__
    return plain and getattr(module, "padding_mode", "zeros") == "zeros"


def _same_settings(kind: _Kind, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for name, place, default in kind.settings:
        own, given = getattr(module, name), _argument(args, kwargs, place, name, default)
        if name == "padding_idx":  # the function counts from the end too, the module has counted already
            own, given = (_from_the_start(index, module) for index in (own, given))
        if not _same(own, given):
            return False
    return True


def _from_the_start(index: Any, module: nn.Module) -> Any:
    return index + len(cast("Tensor", module.weight)) if isinstance(index, int) and index < 0 else index


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _same(own: Any, given: Any) -> bool:
    """Whether a module's setting is the one that a function got; one number stands for as many as there are."""
    if isinstance(own, Tensor) or isinstance(given, Tensor):
        return own is given
    if isinstance(own, tuple):
        numbers = tuple(given) if isinstance(given, list | tuple) else (given,)
        return own == (numbers * len(own) if len(numbers) == 1 else numbers)
    return bool(own == given)


def _is_a_call_of(kind: _Kind, module: nn.Module, weight: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of the module would use the same parameters."""
    if bool(args) == ("input" in kwargs) or module._parameters.get("weight") is not weight:
        return False
    if kind.bias is not None:
        bias = _argument(args, kwargs, kind.bias, "bias", None)
        if bias is not module._parameters.get("bias"):
            return False
    return _same_settings(kind, module, args, kwargs)


def _as_call(
    tap: Tap, module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The input is the argument of the call; everything else is as the function got it."""
    rest = {name: value for name, value in kwargs.items() if name != "input"}

    def forward(_: nn.Module, input: Any) -> Any:
        return function(input, *args[1:], **rest)

    return run(tap, forward, module, args[:1] or (kwargs["input"],), {})
