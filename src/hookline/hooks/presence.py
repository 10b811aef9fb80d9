"""What is put into torch while anything is observed anywhere: in with the first tap, out with the last."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import nn

from hookline.hooks import functional, fused
from hookline.hooks.tap import Tap
from hookline.hooks.torch_private import is_tracing_a_graph

__all__ = ["owns", "tap_begins", "tap_ends"]

_lock = threading.RLock()
_taps: dict[int, weakref.ref[Tap]] = {}


def tap_begins(tap: Tap, module: nn.Module) -> None:
    """One more module is observed."""
    key = id(tap)
    with _lock:
        _taps[key] = weakref.ref(tap, lambda _: _is_gone(key))
        if len(_taps) == 1:
            fused.put_in()
            functional.put_in()
        for parameter in module._parameters.values():
            if parameter is not None:
                functional.add(tap, parameter)


def owns(tap: Tap, parameter: Any) -> None:
    """A tapped module has this parameter, perhaps in the place of another."""
    with _lock:
        functional.add(tap, parameter)


def tap_ends(tap: Tap) -> None:
    """One module less is observed; after the last one torch is as it was."""
    _forget(id(tap), keep=False)


def _is_gone(key: int) -> None:
    """The garbage collector may run in the middle of a compilation, which looks at torch's functions: not then."""
    _forget(key, keep=is_tracing_a_graph())


def _forget(key: int, *, keep: bool) -> None:
    with _lock:
        _taps.pop(key, None)
        functional.forget(key)
        if not _taps and not keep:
            functional.take_out()
            fused.take_out()
