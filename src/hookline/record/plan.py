"""Tell before a long run what would be recorded of a step, and how large it is."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hookline.errors import ArgumentError, OptionError
from hookline.record.coverage import Coverage
from hookline.record.places import sites_of
from hookline.record.policy import Policy, policy
from hookline.record.recorder import Recorder
from hookline.record.segment import Mark
from hookline.report.fates import render, sizes
from hookline.sites import Pattern, Site
from hookline.values import Structure, flatten, rebuild

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

    Nothing is kept, and nothing changes: the pass runs on a deep copy, with copies of the inputs, and random state is
    put back. A model that cannot be copied, or has a ``forward`` of its own instance, runs itself: parameters,
    gradients and buffers are put back then, and only what it keeps in Python attributes may change. PyTorch's own
    hooks run as in any pass.

    Args:
        model: As for ``record``.
        sites: As for ``record``.
        example_inputs: What the model is called with.
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
    found = sites_of(model, sites, ports)
    wants_gradients = any(site.port.startswith("grad") for site in found)
    args, named = _own_inputs(example_inputs, kwargs)
    with _random_state(model), _as_before(model) as running:
        recorder = _CountingRecorder(running, found, chosen)
        with recorder:
            output = running(*args, **named)
            if wants_gradients:
                _backward(output, loss)
    return Plan(recorder.recording.coverage, recorder.nbytes)


class _CountingRecorder(Recorder):
    """Numbers the calls and counts the bytes, by site, and keeps nothing."""

    def __init__(self, model: nn.Module, sites: list[Site], policy: Policy) -> None:
        super().__init__(model, sites, policy)
        self.nbytes: Counter[str] = Counter()

    def put(self, site: Site, mark: Mark, backward: int, structure: Structure, leaves: list[Any]) -> bool:
        """Count the value."""
        kept = leaves if self.policy.reduce is None else self._as_kept(site, leaves)
        self.nbytes[str(site)] += self._nbytes(kept)
        return True


def _own_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """Copies of the tensors, which the model may write to and backward gives gradients to."""
    given = args, dict(kwargs or {})
    leaves, structure = flatten(given)
    own = [_own(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return rebuild(given, structure, own)  # type: ignore[no-any-return]


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _random_state(model: nn.Module) -> Iterator[None]:
    """The random state of Python, NumPy and torch afterwards as before."""
    devices = {tensor.device.index for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=sorted(index for index in devices if index is not None)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def _as_before(model: nn.Module) -> Iterator[nn.Module]:
    """A copy to run; the model itself where it cannot be copied, with its tensors afterwards as before.

    A ``forward`` of an instance would lead back from the copy to the model.
    """
    copied = None
    if not any("forward" in vars(module) for module in model.modules()):
        with contextlib.suppress(Exception):  # whatever the model holds: a lock, an open file, a tensor with a graph
            copied = copy.deepcopy(model)
    if copied is not None:
        for parameter in copied.parameters():
            parameter.grad = None
        yield copied
        return
    if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise OptionError("this lazy model cannot be copied, and a dry pass would give it shapes; call it once first.")
    kept = [_Kept(module, name, tensor) for module in model.modules() for name, tensor in _tensors_of(module)]
    try:
        for one in kept:
            one.tensor.grad = None
        yield model
    finally:
        for one in kept:
            one.put_back()


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return ((name, tensor) for name, tensor in named if not tensor.is_meta)


class _Kept:
    """A parameter or buffer of a module, its value and its gradient."""

    def __init__(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        self.module, self.name, self.tensor = module, name, tensor
        self.value, self.grad = tensor.detach().clone(), tensor.grad if tensor.is_leaf else None

    def put_back(self) -> None:
        if getattr(self.module, self.name, None) is not self.tensor:
            setattr(self.module, self.name, self.tensor)
        if not torch.equal(self.tensor, self.value):
            with torch.no_grad():
                self.tensor.copy_(self.value)
        self.tensor.grad = self.grad


def _backward(output: Any, loss: Callable[[Any], Tensor] | None) -> None:
    root = _sum(output) if loss is None else loss(output)
    if not isinstance(root, Tensor) or root.numel() != 1:
        shape = f"shape {tuple(root.shape)}" if isinstance(root, Tensor) else type(root).__name__
        raise ArgumentError(f"loss returned {shape}; it must return one number as a tensor.")
    if root.requires_grad:
        root.backward()  # type: ignore[no-untyped-call]


def _sum(output: Any) -> Tensor:
    tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum((tensor.abs().sum() if tensor.is_complex() else tensor.sum() for tensor in tensors), torch.zeros(()))
