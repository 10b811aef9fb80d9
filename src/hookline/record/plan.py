"""Tell before a long run what would be recorded of a step, and how large it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hookline.errors import ArgumentError
from hookline.record.coverage import Coverage
from hookline.record.places import sites_of
from hookline.record.policy import Policy, policy
from hookline.record.recorder import Recorder
from hookline.record.rehearsal import as_before, gradients_aside, leaves_of, own_inputs, random_state
from hookline.record.segment import Mark
from hookline.report.fates import render, sizes
from hookline.sites import Pattern, Site
from hookline.spelling import kind
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
    dtype: torch.dtype | str | None = None,
    reduce: Callable[[Tensor], Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Plan:
    """Run the model once and tell which sites ``record`` would capture, with how many calls and bytes.

    Nothing is kept, and nothing changes: the pass runs on a deep copy, with copies of the inputs, and gradients and
    random state are put back, also those of tensors that ``loss`` brings along. A model that cannot be copied, or has a
    ``forward`` of its own instance, runs itself: its attributes, what stands in lists, dicts and sets there, and the
    values, shapes and gradients of its tensors are put back then, and only what it keeps deeper in objects of its own
    may change. An input that cannot be copied, such as a lock or an open file, goes in as it is. PyTorch's own hooks
    run as in any pass.

    Args:
        model: As for ``record``.
        sites: As for ``record``.
        example_inputs: What the model is called with.
        ports: As for ``record``. For gradients a backward pass runs as well. With ``"input"`` and ``"output"`` alone
            none runs, so a module whose parameters are only used without a call is "not reached" here, where a record
            around a backward pass says "bypassed".
        kwargs: Keyword arguments of the call.
        dtype: As for ``record``.
        reduce: As for ``record``.
        loss: From the output to the scalar at which backward begins; the sum of all floating outputs by default. Sites
            that are not on the way to your own loss differ.

    Returns:
        The plan; ``.nbytes`` is what ``Recording.nbytes`` of one step will be.

    Raises:
        SiteError, ArgumentError, OptionError: As for ``record``. ArgumentError also when the inputs stand in the place
            of the sites, for an input that the pass would use up, such as a generator, and for a loss that gives no
            number.
        Exception: Of the model, or of what could not be put back; all the rest is put back before.
    """
    if any(isinstance(leaf, (Tensor, np.ndarray)) for leaf in flatten(sites)[0]):
        raise ArgumentError(f'sites: got {kind(sites)}; they come before the inputs: hookline.plan(model, "**", x).')
    chosen = policy(keep="all", device=None, dtype=dtype, reduce=reduce, detach=True, budget=None)
    found = sites_of(model, sites, ports)
    wants_gradients = any(site.port.startswith("grad") for site in found)
    with random_state(model), as_before(model) as (running, memo):
        args, named = own_inputs(example_inputs, kwargs, memo)
        recorder = _CountingRecorder(running, found, chosen)
        with recorder:
            output = running(*args, **named)
            if wants_gradients:
                _backward(running, output, loss)
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


def _backward(model: nn.Module, output: Any, loss: Callable[[Any], Tensor] | None) -> None:
    root = _sum(output) if loss is None else loss(output)
    if not isinstance(root, Tensor) or root.numel() != 1:
        shape = f"shape {tuple(root.shape)}" if isinstance(root, Tensor) else type(root).__name__
        raise ArgumentError(f"loss returned {shape}; it must return one number as a tensor.")
    if root.requires_grad:
        own = set(map(id, model.parameters()))  # whose gradients the coverage looks at
        with gradients_aside(leaf for leaf in leaves_of(root) if id(leaf) not in own):
            root.backward()  # type: ignore[no-untyped-call]


def _sum(output: Any) -> Tensor:
    tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum((tensor.abs().sum() if tensor.is_complex() else tensor.sum() for tensor in tensors), torch.zeros(()))
