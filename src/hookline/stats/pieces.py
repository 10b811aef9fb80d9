"""The values of any tensor as plain ones of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["as_float64", "has_memory", "pieces"]

CHUNK = 1 << 22
"""Elements of an accelerator's tensor that are upcast at a time: 32 MiB in float64."""

CPU_CHUNK = 1 << 16
"""The same on the CPU: 512 KiB, which stay in the cache between the passes."""


def pieces(tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
    """The values of a tensor in strided tensors of a bounded size, and how many times each one counts.

    They are views where that is possible. The zeros that a sparse tensor does not store come as one zero and their
    number: a sparse shape can stand for more elements than fit in any memory.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_nested:
        for part in tensor.unbind():
            yield from pieces(part)
    elif tensor.layout is torch.strided:
        yield from _split(tensor.dequantize() if tensor.is_quantized else tensor)
    else:
        yield from _sparse_pieces(tensor)


def _sparse_pieces(tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
    if tensor.layout is torch.sparse_coo:
        values = tensor.coalesce().values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        values = tensor.values()
    else:
        values = tensor.to_dense()
    yield from _split(values)
    absent = tensor.numel() - values.numel()
    if absent:
        yield torch.zeros(1, dtype=values.dtype, device=values.device), absent


def _split(tensor: Tensor) -> Iterator[tuple[Tensor, int]]:
    size = CPU_CHUNK if tensor.device.type == "cpu" else CHUNK
    if tensor.numel() <= size:
        yield tensor, 1
        return
    count = -(-tensor.numel() // size)
    # Cut across the largest stride: each part is then one run of memory, whatever the order of the dimensions.
    outer, *_ = order = sorted(range(tensor.dim()), key=lambda dim: (tensor.shape[dim] > 1, tensor.stride(dim)))[::-1]
    whole = tensor.permute(order)
    if whole.is_contiguous():
        yield from ((part, 1) for part in torch.split(whole.view(-1), size))
        return
    for part in torch.split(tensor, max(1, tensor.shape[outer] // count), dim=outer):
        yield from _split(part)


def as_float64(tensor: Tensor) -> Tensor:
    """Real values in float64 on the tensor's device, or on the CPU where the device has no float64."""
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    return tensor.to(torch.complex128).abs() if tensor.is_complex() else tensor.to(torch.float64)


def has_memory(tensor: Tensor) -> bool:
    """Whether a strided tensor has values to read: none on the meta device, under a fake mode, or inside torch.func."""
    try:
        return tensor.untyped_storage().device.type != "meta"
    except (RuntimeError, NotImplementedError):
        return False
