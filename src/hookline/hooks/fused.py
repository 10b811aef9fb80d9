"""Keep torch's fused transformer kernel from passing by observed modules.

In evaluation, ``nn.TransformerEncoderLayer`` computes with one kernel and calls none of its sub-modules, unless
hooks of PyTorch's own sit on one of them; ``nn.MultiheadAttention`` does the like with ``out_proj``. While anything is
observed anywhere, ``forward`` of these classes is wrapped: a module with an observed sub-module runs its plain path,
every other one as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hookline.hooks.tap import Tap
from hookline.hooks.token import TOKEN

__all__ = ["put_in", "take_out"]

_CLASSES: tuple[Any, ...] = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
_originals: dict[type, Callable[..., Any]] = {}


def put_in() -> None:
    """Wrap ``forward`` of the classes; harmless a second time."""
    if not _originals:
        for cls in _CLASSES:
            _originals[cls] = cls.__dict__["forward"]
            cls.forward = _plain_where_observed(cls.__dict__["forward"])


def take_out() -> None:
    """The classes are as they were."""
    while _originals:
        cls, forward = _originals.popitem()
        cls.forward = forward  # type: ignore[attr-defined]


def _plain_where_observed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        enabled = torch.backends.mha.get_fastpath_enabled()
        if not enabled or self.training or torch.compiler.is_compiling() or not (below := _taps_below(self)):
            return forward(self, *args, **kwargs)
        if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in self.parameters()):
            _tell(below, type(self).__name__)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return forward(self, *args, **kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)

    return wrapper


def _taps_below(module: nn.Module) -> list[Tap]:
    return [below.__dict__[TOKEN] for below in module.modules() if below is not module and TOKEN in below.__dict__]


def _tell(taps: list[Tap], fused: str) -> None:
    for tap in taps:
        for observer in tap.observers:
            observer.plain_path(fused)
