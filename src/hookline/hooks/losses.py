"""See the tensors from which backward passes begin, while somebody wants to."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookline.hooks.handle import Handle

__all__ = ["see_losses"]

_lock = threading.Lock()
_listeners: tuple[Callable[[tuple[Tensor, ...]], None], ...] = ()
_original: Callable[..., None] | None = None
_patched: Callable[..., None] | None = None


def see_losses(look: Callable[[tuple[Tensor, ...]], None]) -> Handle:
    """Call ``look(tensors)`` before each ``loss.backward()`` and ``torch.autograd.backward(tensors)``.

    ``torch.autograd.backward`` is replaced while there is somebody to call; ``torch.autograd.grad`` is not seen.
    """
    global _listeners
    with _lock:
        _listeners = (*_listeners, look)
        if len(_listeners) == 1:
            _put_in()
    return Handle(lambda: _forget(look))


def _forget(look: Callable[[tuple[Tensor, ...]], None]) -> None:
    global _listeners
    with _lock:
        _listeners = tuple(other for other in _listeners if other is not look)
        if not _listeners:
            _take_out()


def _put_in() -> None:
    global _original, _patched
    original: Any = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            seen = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
            for look in _listeners:
                look(seen)
            tensors = tensors if isinstance(tensors, Tensor) else seen
        original(tensors, *args, **kwargs)

    _original, _patched = original, backward
    torch.autograd.backward = backward


def _take_out() -> None:
    """A patch that somebody has put on top of ours stays; ours below it tells nobody any more."""
    if torch.autograd.backward is _patched and _original is not None:
        torch.autograd.backward = _original
