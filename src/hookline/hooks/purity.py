"""What a module may do with the tensors that it is given, besides computing."""

from __future__ import annotations

from torch import nn

from hookline.hooks.token import original_class

__all__ = ["is_torchs_own", "may_write_inputs"]


def may_write_inputs(module: nn.Module) -> bool:
    """False for torch's own modules without children, which write into their input only with ``inplace=True``.

    For these the arguments need no snapshot; all others are taken to write.
    """
    if module._modules or module.__dict__.get("inplace", False):
        return True
    return not is_torchs_own(module)


def is_torchs_own(module: nn.Module) -> bool:
    """Whether the module's class is one of ``torch.nn``, none of which keeps its inputs or outputs on itself."""
    return original_class(module).__module__.startswith("torch.nn.modules.")
