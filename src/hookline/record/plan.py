"""Tell before a long run what would be recorded of a step, and how large it is."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hookline.errors import ArgumentError
from hookline.record.coverage import Coverage
from hookline.record.places import refuse_unreachable
from hookline.record.policy import Policy, policy
from hookline.record.recorder import Recorder
from hookline.record.segment import Mark
from hookline.report.fates import render, sizes
from hookline.sites import Pattern, Site, resolve
from hookline.values import Structure, flatten

__all__ = ["Plan", "PlannedSite", "plan"]


class PlannedSite(NamedTuple):
    """What a step would record at one site.

    Attributes:
        site: The site, such as ``"layer1.0.conv1:output"``.
        status: ``"captured"``, ``"not reached"`` or ``"bypassed"``.
        calls: How many calls would be captured.
        nbytes: Bytes of their values.
        reason: As in ``rec.coverage``.
    """

    site: str
    status: str
    calls: int
    nbytes: int
    reason: str


class Plan:
    """What a step would record; ``print`` shows it.

    Attributes:
        coverage: What would become of every site.
        sites: A ``PlannedSite`` for each site, by site.
    """

    def __init__(self, coverage: Coverage, nbytes: Mapping[str, int]) -> None:
        self.coverage = coverage
        self.sites = {
            fate.site: PlannedSite(fate.site, fate.status, fate.calls, nbytes.get(fate.site, 0), fate.reason)
            for fate in coverage.values()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of a step."""
        return sum(site.nbytes for site in self.sites.values())

    def __repr__(self) -> str:
        return f"<Plan of {len(self.sites)} sites: {self.nbytes:,} bytes a step>"

    def __str__(self) -> str:
        return "\n".join([sizes(self.sites.values()), render(self.coverage.values())])


def plan(
    model: nn.Module,
    sites: Pattern = "**",
    *example_inputs: Any,
    ports: str | Iterable[str] = ("output",),
    kwargs: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    reduce: Callable[[Tensor], Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Plan:
    """Run the model once and tell which sites ``record`` would capture, with how many calls and bytes.

    Nothing is kept, and nothing changes: parameters, their gradients, buffers and random state are as before. The pass
    runs on a deep copy that shares the parameters; a model that cannot be copied runs itself, and only what it keeps in
    Python attributes may change then.

    Args:
        model: As for ``record``.
        sites: As for ``record``.
        example_inputs: What the model is called with; they get no gradients.
        ports: As for ``record``. For gradients a backward pass runs as well.
        kwargs: Keyword arguments of the call.
        dtype: As for ``record``.
        reduce: As for ``record``.
        loss: From the output to the scalar at which backward begins; the sum of all floating outputs by default. Sites
            that are not on the way to your own loss differ.

    Returns:
        The plan; ``.nbytes`` is what ``Recording.nbytes`` of one step will be.

    Raises:
        SiteError, ArgumentError, OptionError: As for ``record``.
    """
    chosen = policy(keep="all", device=None, dtype=dtype, reduce=reduce, detach=True, budget=None)
    found = resolve(model, sites, ports)
    refuse_unreachable(model, sites, found)
    wants_gradients = any(site.port.startswith("grad") for site in found)
    with _nothing_moves(model):
        copied = _copy_of(model)
        recorder = _CountingRecorder(copied, found, chosen)
        with recorder:
            output = copied(*example_inputs, **dict(kwargs or {}))
            if wants_gradients:
                _backward(copied, (example_inputs, kwargs), output, loss)
    return Plan(recorder.recording.coverage, recorder.nbytes)


class _CountingRecorder(Recorder):
    """Numbers the calls and counts the bytes, by site, and keeps nothing."""

    def __init__(self, model: nn.Module, sites: list[Site], policy: Policy) -> None:
        super().__init__(model, sites, policy)
        self.nbytes: dict[str, int] = {}

    def put(self, site: Site, mark: Mark, backward: int, structure: Structure, leaves: list[Any]) -> bool:
        """Count the value."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self.policy.reduce is None:
            size = sum(self.policy.nbytes(tensor) for tensor in tensors)
        else:
            kept = [self.policy.capture(tensor, site) for tensor in tensors]
            size = sum(tensor.numel() * tensor.element_size() for tensor in kept if not tensor.is_meta)
        self.nbytes[str(site)] = self.nbytes.get(str(site), 0) + size
        return True


def _copy_of(model: nn.Module) -> nn.Module:
    """A copy with the same parameters, so that it needs memory for buffers only.

    The model itself where it cannot be copied, or where a ``forward`` of an instance would lead back from the copy.
    """
    if any("forward" in vars(module) for module in model.modules()):
        return model
    shared = {id(parameter): parameter for parameter in model.parameters()}
    try:
        return copy.deepcopy(model, dict(shared))
    except Exception:  # whatever the model holds: a lock, an open file, a tensor with a graph
        return model


@contextlib.contextmanager
def _nothing_moves(model: nn.Module) -> Iterator[None]:
    """Buffers and random state afterwards as before."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {tensor.device.index for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=sorted(index for index in devices if index is not None)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        with torch.no_grad():
            for buffer, before in buffers:
                if not buffer.is_meta and not torch.equal(buffer, before):
                    buffer.copy_(before)


def _backward(model: nn.Module, inputs: Any, output: Any, loss: Callable[[Any], Tensor] | None) -> None:
    """A backward pass that reaches what ``backward()`` would, and adds to no ``.grad``."""
    root = _sum(output) if loss is None else loss(output)
    if not isinstance(root, Tensor) or root.numel() != 1:
        shape = f"shape {tuple(root.shape)}" if isinstance(root, Tensor) else type(root).__name__
        raise ArgumentError(f"loss returned {shape}; it must return one number as a tensor.")
    leaves = [*model.parameters(), *(leaf for leaf in flatten(inputs)[0] if isinstance(leaf, Tensor))]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if root.requires_grad and wanted:
        torch.autograd.grad(root, wanted, allow_unused=True)


def _sum(output: Any) -> Tensor:
    tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum((tensor.abs().sum() if tensor.is_complex() else tensor.sum() for tensor in tensors), torch.zeros(()))
