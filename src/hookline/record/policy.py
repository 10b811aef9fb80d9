"""What is kept of a value."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookline.errors import ArgumentError, OptionError
from hookline.fp8 import FP8, can_scale, nbytes_of, scaled
from hookline.hooks import snapshot
from hookline.hooks.torch_private import full_batch, transforms_active
from hookline.sites import Site
from hookline.spelling import nearest
from hookline.values import Scaled

__all__ = ["Policy", "parse_bytes", "policy"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

_PACKED = getattr(torch, "float4_e2m1fn_x2", None)
"""Two elements in a byte, which torch calls floating and converts to nothing else; 2.8 and later have it."""

_FLOATING = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a recorder keeps values; see ``hookline.record``."""

    keep: str = "all"
    device: torch.device | None = None
    dtype: torch.dtype | str | None = None
    reduce: Callable[[Tensor], Any] | None = None
    detach: bool = True
    budget: int | None = None

    def capture(self, tensor: Tensor, site: Site) -> Tensor | Scaled:
        """The tensor as it is kept; under vmap the full batch, mapped axes in front.

        Raises:
            ArgumentError: ``reduce`` returned neither a tensor nor a number.
            OptionError: A number is too large for ``dtype="fp8"``.
        """
        if torch.is_inference_mode_enabled() and (tensor.is_inference() or self.dtype is not None):
            with torch.inference_mode(False):  # what is computed in that mode is of no use where gradients are
                return self.capture(snapshot(tensor), site)
        kept = self._as_it_stands(_unwrapped(tensor))
        if self.reduce is not None:
            kept = self._reduced(_unwrapped(kept), self.reduce, site)
        if self._scales(kept):
            return Scaled(*(_unwrapped(part.to(device=self.device, dtype=part.dtype)) for part in scaled(kept)))
        if self.device is not None or self.dtype is not None:
            kept = kept.to(device=self.device, dtype=self._dtype_for(kept))
        return _unwrapped(kept)

    def nbytes(self, tensor: Tensor | Scaled) -> int:
        """Bytes of the tensor as it would be kept without ``reduce``, told before it is; 0 on the meta device."""
        if isinstance(tensor, Scaled):
            return sum(part.numel() * part.element_size() for part in tensor if not part.is_meta)
        if "meta" in (tensor.device.type, self.device and self.device.type):
            return 0
        whole = _unwrapped(tensor)
        return nbytes_of(whole) if self._scales(whole) else whole.numel() * self._dtype_for(tensor).itemsize

    def _scales(self, tensor: Tensor) -> bool:
        return self.dtype == FP8 and can_scale(tensor)

    def _dtype_for(self, tensor: Tensor) -> torch.dtype:
        converts = isinstance(self.dtype, torch.dtype) and tensor.is_floating_point() and tensor.dtype != _PACKED
        return self.dtype if converts else tensor.dtype  # type: ignore[return-value]

    def _as_it_stands(self, tensor: Tensor) -> Tensor:
        return snapshot(tensor) if self.detach or not tensor.requires_grad else tensor.clone()

    def _reduced(self, kept: Tensor, reduce: Callable[[Tensor], Any], site: Site) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            result = reduce(kept)
        if isinstance(result, Tensor):
            return self._as_it_stands(result)
        if isinstance(result, (int, float, complex)):
            return torch.tensor(result, dtype=torch.float64 if isinstance(result, float) else None, device="cpu")
        raise ArgumentError(
            f"reduce returned {type(result).__name__} for a tensor of shape {tuple(kept.shape)} at {site}; "
            "it must return a tensor or a number."
        )


def _unwrapped(tensor: Tensor) -> Tensor:
    """Inside a transform of torch.func everything that is computed is wrapped, and of no use outside."""
    return full_batch(tensor) if transforms_active() else tensor


def policy(
    *,
    keep: str = "all",
    device: Any = None,
    dtype: Any = None,
    reduce: Any = None,
    detach: bool = True,
    budget: int | str | None = None,
) -> Policy:
    """A policy from what a user wrote, checked.

    Raises:
        OptionError, ArgumentError: An option that cannot be used.
    """
    if keep not in ("all", "last"):
        raise OptionError(f'keep is "all" or "last", got {keep!r}.')
    _check_dtype(dtype, detach=detach)
    if reduce is not None and not callable(reduce):
        raise ArgumentError(f"reduce is a function from a tensor to a tensor, got {type(reduce).__name__}: {reduce!r}.")
    size = None if budget is None else parse_bytes(budget)
    return Policy(keep, None if device is None else _usable(device), dtype, reduce, bool(detach), size)


def _check_dtype(dtype: Any, *, detach: bool) -> None:
    if isinstance(dtype, str):
        if dtype != FP8:
            raise OptionError(f'dtype: got "{dtype}", wanted "fp8" or a torch.dtype{_nearest_dtype(dtype)}.')
        if not detach:
            raise OptionError('dtype="fp8" keeps no graph, since eight bits have no gradient; leave detach=False out.')
    elif dtype is not None and not isinstance(dtype, torch.dtype):
        raise ArgumentError(
            f'dtype is a torch.dtype such as torch.float16, or "fp8", got {type(dtype).__name__}: {dtype!r}.'
        )
    elif dtype is not None and not dtype.is_floating_point:
        raise OptionError(f"dtype is for floating values and must be floating itself, got {dtype}.")


def _nearest_dtype(text: str) -> str:
    """The end of a message: what may have been meant by a text."""
    found = [f'"{FP8}"' if name == FP8 else f"torch.{name}" for name in nearest(text, (FP8, *_FLOATING), 2)]
    return f"; nearest: {' or '.join(found)}" if found else ""


def _usable(device: Any) -> torch.device:
    """The device, once something could be put there."""
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise OptionError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


def parse_bytes(size: int | str) -> int:
    """Bytes from a number or a text such as ``"2GB"``, ``"512 MiB"``.

    Raises:
        OptionError: The text is no size, or the size is not positive.
    """
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", size.lower())
        if found is None:
            raise OptionError(f'a size is a number of bytes or a text such as "2GB" or "512MiB", got {size!r}.')
        size = int(float(found[1]) * _UNITS[found[2] or ""])
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise OptionError(f"a size is a positive whole number of bytes, got {size!r}.")
    return size
