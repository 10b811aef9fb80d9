"""Which dtypes each format and library outside Hookline can hold without changing a value."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.errors import OptionError
from hookline.store.dtypes import STORAGE

__all__ = ["BF16", "FORMATS", "check_bf16", "convert", "refuse", "target_of"]

FORMATS = ("npz", "parquet", "zarr", "safetensors")
BF16 = ("float32", "uint16")
"""What bfloat16 can become where there is no such type: each value exactly, or its bits."""

_WHOLE = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_PLAIN = {"bool", *_WHOLE, "float16", "float32", "float64"}
_EXACT = {
    "npz": _PLAIN | {"complex64", "complex128"},
    "zarr": _PLAIN | {"complex64", "complex128"},
    "parquet": _PLAIN,
    "safetensors": set(STORAGE),
}


def check_bf16(bf16: str | None) -> None:
    """Complain about an option that is none.

    Raises:
        OptionError: It is neither None, ``"float32"`` nor ``"uint16"``.
    """
    if bf16 is not None and bf16 not in BF16:
        raise OptionError(f'bf16: got {bf16!r}, wanted "float32" (every value stays exact) or "uint16" (the bits).')


def target_of(dtype: str, to: str, bf16: str | None) -> str | None:
    """The dtype in which a tensor of some dtype is written; None where the format has no exact form of it."""
    wanted = bf16 if dtype == "bfloat16" and bf16 is not None else dtype
    return wanted if wanted in _EXACT[to] else None


def refuse(where: str, dtype: str, to: str) -> OptionError:
    """The error for a dtype that a format has no exact form of."""
    if dtype == "bfloat16":
        advice = (
            'Pass bf16="float32" (every value stays exact) or bf16="uint16" (the bits), or to="safetensors", which '
            "has it"
        )
    else:
        able = " or ".join(f'to="{name}"' for name in FORMATS if dtype in _EXACT[name])
        advice = f"Pass {able}, which keeps it, or leave the site out"
        if getattr(torch, dtype).is_floating_point:
            advice += ", or record with dtype=torch.float32"
    return OptionError(f"{where}: {to} has no exact type for {dtype}. {advice}.")


def convert(tensor: Tensor, dtype: str, target: str) -> Tensor:
    """The tensor in the dtype that `target_of` said, detached and plain."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if dtype == target:
        return tensor
    return tensor.contiguous().view(torch.uint16) if target == "uint16" else tensor.float()
