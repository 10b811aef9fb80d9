"""See the steps of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hookline.hooks.handle import Handle

__all__ = ["see_steps"]

Look = Callable[[torch.optim.Optimizer], None]


def see_steps(optimizer: torch.optim.Optimizer, before: Look, after: Look) -> Handle:
    """Call ``before(optimizer)`` and ``after(optimizer)`` around each of its steps, by torch's own hooks.

    Inside ``before`` the gradients are what the optimizer sees: unscaled where a gradient scaler is used.
    """

    def pre(one: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        before(one)

    def post(one: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        after(one)

    handles = optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return Handle(remove)
