"""Hooks for PyTorch that never miss, never lie and never linger.

The primitives have PyTorch's own signatures; ``record`` keeps values, ``edit`` changes them, ``load`` reads a recording
from disk and ``verify`` looks for damage in it, ``watch`` says where a training went wrong, ``plot`` draws,
``describe`` prints one value. Importing the package changes nothing in torch.
"""

from __future__ import annotations

from hookline.hooks import (
    Handle,
    register_backward_hook,
    register_backward_pre_hook,
    register_forward_hook,
    register_forward_pre_hook,
    register_multi_grad_hook,
    register_parameter_hook,
    register_tensor_hook,
)
from hookline.record import Recording, dequantize, edit, load, plan, record, verify
from hookline.report import describe, plot
from hookline.watch.watch import watch

__all__ = [
    "Handle",
    "Recording",
    "dequantize",
    "describe",
    "edit",
    "load",
    "plan",
    "plot",
    "record",
    "register_backward_hook",
    "register_backward_pre_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_multi_grad_hook",
    "register_parameter_hook",
    "register_tensor_hook",
    "verify",
    "watch",
]
