"""Tell of root calls: the calls of modules that no other module's call surrounds.

``nn.Module.__call__`` is replaced while a with-block runs, since nothing else sees the call of a model that nobody has
pointed at. A call of ``model.forward(x)`` itself passes by; then the modules that it calls are the roots.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hookline.hooks.torch_private import graph_task_id

__all__ = ["RootCalls"]

_has_cuda: Callable[[], bool] = torch.cuda.is_initialized
_is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


class _Thread(threading.local):
    """What one thread is at."""

    root: nn.Module | None = None


class RootCalls:
    """While the with-block runs, calls ``before(module)`` and ``after(module)`` around every root call, in its thread.

    No root calls are those inside a backward pass, which are recomputations of activation checkpointing, those that
    ``torch.compile``, ``torch.jit.trace`` or a CUDA graph follow, and those of the replicas of ``nn.DataParallel``.

    Args:
        before: May put listeners at the module; an exception of it is raised by the call.
        after: The call has returned or raised.
    """

    def __init__(
        self, before: Callable[[nn.Module], None], after: Callable[[nn.Module], None] = lambda module: None
    ) -> None:
        self._before = before
        self._after = after
        self._thread = _Thread()
        self._original: Callable[..., Any] | None = None
        self._patched: Callable[..., Any] | None = None

    @property
    def current(self) -> nn.Module | None:
        """The module whose root call this thread is in."""
        return self._thread.root

    def __enter__(self) -> RootCalls:
        self._original = nn.Module.__call__
        self._patched = self._patch(self._original)
        nn.Module.__call__ = self._patched  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        self._before = self._after = lambda module: None
        # A patch that somebody has put on top of ours stays; ours below it tells nobody any more.
        if nn.Module.__call__ is self._patched and self._original is not None:
            nn.Module.__call__ = self._original  # type: ignore[method-assign]

    def _patch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        thread = self._thread

        @functools.wraps(original)
        def __call__(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # is_compiling comes first: torch.compile folds it, and so never looks at the rest.
            if torch.compiler.is_compiling() or thread.root is not None or not _may_be_root(module):
                return original(module, *args, **kwargs)
            thread.root = module
            try:
                self._before(module)
                return original(module, *args, **kwargs)
            finally:
                thread.root = None
                self._after(module)

        return __call__


def _may_be_root(module: nn.Module) -> bool:
    captured = _has_cuda() and torch.cuda.is_current_stream_capturing()
    return not (captured or _is_tracing() or graph_task_id() != -1 or "_is_replica" in module.__dict__)
