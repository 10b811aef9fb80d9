"""See every call of a module by giving the instance a subclass of its own class, whose ``forward`` passes by the tap.

This sees ``module.forward(x)`` as well as ``module(x)``; copies and pickles of the module are of the original class.
See docs/decisions/0001-class-swap.md for the other ways that were measured.
"""

from __future__ import annotations

import abc
import contextlib
import copyreg
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from hookline.errors import ArgumentError
from hookline.hooks.call import run
from hookline.hooks.presence import owns
from hookline.hooks.running import running
from hookline.hooks.token import ORIGINAL, TOKEN, original, original_class
from hookline.hooks.traced import refuse_tracing

if TYPE_CHECKING:
    from hookline.hooks.tap import Tap

__all__ = ["swap", "unswap"]

# Weak on both sides: a key that is held would keep a class beyond the collection that takes its tapped class away.
_tapped: weakref.WeakKeyDictionary[type, weakref.WeakValueDictionary[bool, type]] = weakref.WeakKeyDictionary()


def swap(module: nn.Module, tap: Tap) -> None:
    """Let the calls of the module pass by the tap."""
    cls = type(module)
    if ORIGINAL not in cls.__dict__:
        own_forward = "forward" in module.__dict__
        try:
            object.__setattr__(module, "__class__", _subclass(cls, own_forward))
        except TypeError as error:
            raise ArgumentError(
                f"{cls.__name__} cannot be hooked: its class cannot be subclassed ({error}). "
                "Hook the module that calls it instead."
            ) from error
    module.__dict__[TOKEN] = tap


def unswap(module: nn.Module) -> None:
    """Give the module its own class back."""
    module.__dict__.pop(TOKEN, None)
    if ORIGINAL in type(module).__dict__:
        _hand_back_properties(type(module), original_class(module))
        object.__setattr__(module, "__class__", original_class(module))


def _subclass(cls: type, own_forward: bool) -> type:
    known = _tapped.setdefault(cls, weakref.WeakValueDictionary())
    made = known.get(own_forward)
    if made is None:
        made = known[own_forward] = _make_subclass(cls, own_forward)
    return made


def _make_subclass(cls: type, own_forward: bool) -> type:
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        ORIGINAL: cls,
        "forward": _OwnForward(cls) if own_forward else _passing_by(cls),
        "__reduce_ex__": _reduce_as_original(cls),
        "__setattr__": _noticing_changes(cls),
        "__prepare_scriptable__": _refuse_scripting(cls),
    }
    if hasattr(cls, "__deepcopy__"):
        body["__deepcopy__"] = _deepcopy_as_original(cls)
    if hasattr(cls, "recompile"):
        body["recompile"] = _recompile_the_original(cls)
    bases: tuple[type, ...] = (cls,)
    if any("__init_subclass__" in base.__dict__ for base in cls.__mro__[:-1]):
        bases = (_QuietSubclass, cls)
    return _new_class(type(cls))(_equal_to_original(type(cls)), cls.__name__, bases, body)  # type: ignore[no-any-return]


_equal: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def _equal_to_original(metaclass: Any) -> Any:
    """A metaclass whose classes compare and hash like the class that they stand for.

    ``type(module) == nn.Linear`` and tables by class, such as those of quantization, go on as before; ``is`` does not.
    """
    if metaclass.__eq__ is not type.__eq__ or metaclass.__hash__ is not type.__hash__:
        return metaclass
    known = _equal.get(metaclass)
    made = None if known is None else known()
    if made is None:
        made = _make_equal(metaclass)
        _equal[metaclass] = weakref.ref(made)
    return made


def _make_equal(metaclass: Any) -> Any:
    body = {"__eq__": _same_original, "__hash__": lambda cls: type.__hash__(original(cls)), ORIGINAL: metaclass}
    return type.__new__(type(metaclass), metaclass.__name__, (metaclass,), body)


def _same_original(cls: type, other: object) -> Any:
    return original(cls) is original(other) if isinstance(other, type) else NotImplemented


def _new_class(metaclass: Any) -> Callable[..., Any]:
    """The constructor of Python's own metaclass; one written by a user is passed by, since it may keep a registry."""
    own: Any = abc.ABCMeta if issubclass(metaclass, abc.ABCMeta) else type
    return own.__new__  # type: ignore[no-any-return]


class _QuietSubclass:
    """Keeps a class's own ``__init_subclass__``, often a registry, from hearing of the tapped class."""

    def __init_subclass__(cls) -> None:
        pass


def _noticing_changes(cls: Any) -> Callable[..., None]:
    """Notices when the module gets another ``forward``, or another class, while it is tapped."""

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name == "forward" and TOKEN in self.__dict__:
            object.__setattr__(self, "__class__", _subclass(cls, True))
            self.__dict__["forward"] = value
        elif name == "__class__" and TOKEN in self.__dict__:
            own_forward = "forward" in self.__dict__
            object.__setattr__(self, "__class__", _subclass(_as_meant(value, self), own_forward))
        else:
            cls.__setattr__(self, name, value)
            if isinstance(value, nn.Parameter) and (tap := self.__dict__.get(TOKEN)) is not None:
                owns(tap, value)
                for observer in tap.observers:
                    observer.on_parameter(name, value)

    return __setattr__


def _refuse_scripting(cls: Any) -> Callable[..., Any]:
    """What torch.jit.script asks of each module first."""

    def __prepare_scriptable__(self: Any) -> Any:
        if (tap := self.__dict__.get(TOKEN)) is not None:
            refuse_tracing(tap, self, "torch.jit.script")
        prepare = getattr(cls, "__prepare_scriptable__", None)
        return self if prepare is None else prepare(self)

    return __prepare_scriptable__


def _hand_back_properties(tapped: Any, cls: Any) -> None:
    """The parametrized tensors that torch.nn.utils.parametrize has added meanwhile belong to the module's own class."""
    if cls.__name__.startswith("Parametrized"):
        for name, value in vars(tapped).items():
            if isinstance(value, property) and name not in vars(cls):
                setattr(cls, name, value)


def _as_meant(new: Any, module: Any) -> Any:
    """The class that a module would have got without Hookline.

    Lazy modules, parametrizations and FSDP2 give a module another class, which the last two derive from the one that it
    has, the tapped one. Removing the last parametrization sets the first base of the class, one level too few.
    """
    if any(ORIGINAL in base.__dict__ for base in new.__bases__):
        new.__bases__ = tuple(map(original, new.__bases__))
        return _with_own_metaclass(new)
    elif new.__name__.startswith("Parametrized") and "parametrizations" not in module._modules:
        return new.__bases__[0]
    return new


def _with_own_metaclass(new: Any) -> Any:
    """The class made anew without the metaclass that it has from the tapped one; a metaclass cannot be exchanged."""
    metaclass = type(new).__dict__.get(ORIGINAL)
    if metaclass is None:
        return new
    body = {name: value for name, value in vars(new).items() if name not in ("__dict__", "__weakref__")}
    return _new_class(metaclass)(metaclass, new.__name__, new.__bases__, body | {"__qualname__": new.__qualname__})


def _passing_by(cls: Any) -> Callable[..., Any]:
    token, run_call = TOKEN, run

    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        tap = self.__dict__.get(token)
        if tap is None or "forward" in self.__dict__:  # with an own forward, this is the old one that it calls
            return cls.forward(self, *args, **kwargs)
        return run_call(tap, cls.forward, self, args, kwargs)

    # torch.jit.script reads the text of the wrapped function and looks its names up in the globals of this one.
    names = getattr(inspect.unwrap(cls.forward), "__globals__", forward.__globals__)
    made = types.FunctionType(forward.__code__, names, "forward", None, forward.__closure__)
    return functools.wraps(cls.forward)(made)


class _OwnForward:
    """``forward`` of an instance that carries one of its own, as accelerate and many notebooks do."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self._of_the_class()
        own = module.__dict__.get("forward")
        inner = self.cls.forward.__get__(module, owner) if own is None else own
        tap = module.__dict__.get(TOKEN)
        if tap is None:
            return inner

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(tap, lambda _, *a, **k: inner(*a, **k), module, args, kwargs)

        return forward

    def _of_the_class(self) -> Callable[..., Any]:
        """``type(module).forward``: a call of the module, unless it is its own ``forward`` that calls it."""
        plain = self.cls.forward

        @functools.wraps(plain)
        def forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            tap = module.__dict__.get(TOKEN)
            if tap is None or tap in running():
                return plain(module, *args, **kwargs)
            return run(tap, plain, module, args, kwargs)

        return forward

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__["forward"] = value

    def __delete__(self, module: Any) -> None:
        try:
            del module.__dict__["forward"]
        except KeyError:
            raise AttributeError("forward") from None


@contextlib.contextmanager
def _as_itself(module: Any) -> Iterator[None]:
    """Inside, the module has its own class and no tap, so that what its class makes of it names neither."""
    tapped, tap = type(module), module.__dict__.pop(TOKEN, None)
    object.__setattr__(module, "__class__", original_class(module))
    try:
        yield
    finally:
        object.__setattr__(module, "__class__", tapped)
        if tap is not None:
            module.__dict__[TOKEN] = tap


def _reduce_as_original(cls: Any) -> Callable[..., Any]:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        with _as_itself(self):
            reduced = cls.__reduce_ex__(self, protocol)
            if not isinstance(reduced, tuple):
                return reduced
            # The state is often the very __dict__, to which the tap comes back.
            parts = [dict(part) if part is self.__dict__ else part for part in reduced]
            if len(parts) > 2 and isinstance(parts[2], tuple):
                parts[2] = tuple(dict(part) if part is self.__dict__ else part for part in parts[2])
        if parts[0] is copyreg.__newobj__ and len(parts[1]) == 1:  # type: ignore[attr-defined]
            # pickle refuses that one for a class that is not the object's own; this one makes the same object.
            parts[:2] = copyreg._reconstructor, (*parts[1], object, None)  # type: ignore[attr-defined]
        return tuple(parts)

    return __reduce_ex__


def _deepcopy_as_original(cls: Any) -> Callable[..., Any]:
    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        with _as_itself(self):
            return cls.__deepcopy__(self, memo)

    return __deepcopy__


def _recompile_the_original(cls: Any) -> Callable[..., Any]:
    """A torch.fx graph module writes ``forward`` into its class, which must be its own."""

    def recompile(self: Any) -> Any:
        with _as_itself(self):
            return cls.recompile(self)

    return recompile
