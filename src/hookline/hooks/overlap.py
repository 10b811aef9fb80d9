"""Outputs of one call that share elements with each other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hookline.hooks.torch_private import storage_id

__all__ = ["overlapping"]


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """Places of the tensors that share elements with another one of them.

    A module that returns both ``h`` and ``h.view(-1)`` gives two outputs whose aliases have separate histories, so a
    write to one of them has to raise. Halves of one tensor, ``h[:, :2]`` and ``h[:, 2:]``, share memory but no element.
    """
    by_storage: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        storage = storage_id(tensor)
        if storage is not None:
            by_storage.setdefault(storage, []).append(place)
    found: set[int] = set()
    for places in by_storage.values():
        for i, first in enumerate(places):
            for second in places[i + 1 :]:
                if share_elements(tensors[first], tensors[second]):
                    found |= {first, second}
    return found


def share_elements(a: Tensor, b: Tensor) -> bool:
    """Exact for boxes cut out of one tensor; True where the strides differ, which cannot be told apart cheaply."""
    if not a.numel() or not b.numel():
        return False
    if a.stride() != b.stride():
        return True
    axes = sorted((a.stride(d), a.size(d), b.size(d)) for d in range(a.dim()) if a.stride(d) > 0)
    return _boxes_meet(int(b.storage_offset() - a.storage_offset()), axes)


def _boxes_meet(distance: int, axes: list[tuple[int, int, int]]) -> bool:
    """Whether steps along the axes, coarsest last, lead over the distance and stay inside both boxes."""
    if not axes:
        return distance == 0
    stride, size_a, size_b = axes[-1]
    low = distance // stride
    return any(
        -size_b < steps < size_a and _boxes_meet(distance - steps * stride, axes[:-1]) for steps in (low, low + 1)
    )
