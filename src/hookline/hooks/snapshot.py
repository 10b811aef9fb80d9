"""Keep a value as it stands, at no cost until somebody writes over it."""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.hooks.torch_private import full_batch, lazy_clone, older_full_batch, storage_bytes, transforms_active

__all__ = ["alike", "snapshot"]


def snapshot(tensor: Tensor) -> Tensor:
    """The tensor as it is now, detached; later in-place writes to the original do not reach it.

    Copy-on-write where the storage allows it, else a clone; always a clone for parameters, whose memory others hold on
    to (optimizers, buckets, captured graphs), and for small parts of a large storage. Under vmap the full batch, mapped
    axes in front.

    Args:
        tensor: Any shape, dtype and device.

    Returns:
        Shape, dtype and device of ``tensor``, no graph.
    """
    if transforms_active():
        return full_batch(full_batch(tensor).detach().clone())  # a running transform wraps whatever is made
    if tensor.is_inference():
        with torch.inference_mode(False):  # the kept value is to be of use where gradients are computed
            return _copied(tensor)
    try:
        alias = tensor.detach()
    except RuntimeError:  # the older vmap, of is_grads_batched and vectorize=True, has no rule for it
        alias = tensor = older_full_batch(tensor)
    return alias.clone() if tensor.is_leaf and tensor.requires_grad else _copied(alias)


def _copied(tensor: Tensor) -> Tensor:
    made = None if tensor.is_quantized or _is_small_part(tensor) else lazy_clone(tensor)
    return _cloned(tensor) if made is None else made


def _cloned(tensor: Tensor) -> Tensor:
    try:
        return tensor.clone()
    except RuntimeError:  # torch has none for quint4x2 and quint2x4
        if not tensor.is_quantized:
            raise
        made, memory = tensor.detach(), tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
        return made.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _is_small_part(tensor: Tensor) -> bool:
    """Whether a copy-on-write clone would hold, and copy, much more memory than the tensor has."""
    held = storage_bytes(tensor)
    return held is not None and held > 2 * tensor.numel() * tensor.element_size()


def alike(tensor: Tensor) -> Tensor:
    """A stand-in with the same value and graph that may be written to without reaching the original."""
    if tensor.is_quantized or transforms_active() or (torch.is_grad_enabled() and tensor.requires_grad):
        return _cloned(tensor)
    made = lazy_clone(tensor)
    return tensor.clone() if made is None else made
