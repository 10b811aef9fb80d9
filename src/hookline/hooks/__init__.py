"""The engine: the only room that touches torch's classes and autograd machinery."""

from __future__ import annotations

from hookline.hooks.arrivals import origin_key, when_gradients_arrive
from hookline.hooks.attach import NEVER_CALLED, Attached, attach, check_module, unreachable
from hookline.hooks.call import Call
from hookline.hooks.handle import Handle
from hookline.hooks.losses import see_losses
from hookline.hooks.multi_grad import register_multi_grad_hook
from hookline.hooks.optimizers import see_steps
from hookline.hooks.parameter import register_parameter_hook
from hookline.hooks.register import (
    register_backward_hook,
    register_backward_pre_hook,
    register_forward_hook,
    register_forward_pre_hook,
)
from hookline.hooks.snapshot import snapshot
from hookline.hooks.tap import Entry, Observer
from hookline.hooks.tensor import register_tensor_hook
from hookline.hooks.token import original_class
from hookline.hooks.user_hooks import add_note, call_hook

__all__ = [
    "NEVER_CALLED",
    "Attached",
    "Call",
    "Entry",
    "Handle",
    "Observer",
    "add_note",
    "attach",
    "call_hook",
    "check_module",
    "origin_key",
    "original_class",
    "register_backward_hook",
    "register_backward_pre_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_multi_grad_hook",
    "register_parameter_hook",
    "register_tensor_hook",
    "see_losses",
    "see_steps",
    "snapshot",
    "unreachable",
    "when_gradients_arrive",
]
