"""Is a recording what it was when it was written, and is it what the model computes?"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hookline import store
from hookline.errors import ArgumentError, FormatError, OptionError
from hookline.fp8 import FP8, scaled_places
from hookline.record.load import load
from hookline.record.recorder import record
from hookline.record.recording import Recording
from hookline.report.text import plural, size_text
from hookline.sites import Site, canonical_paths, label
from hookline.spelling import kind
from hookline.store.format import TOKENS

__all__ = ["Mismatch", "Verification", "verify"]

_PORTS = ("input", "output")
Tolerance = tuple[float, float]
Inputs = Sequence[Any] | Mapping[int, Any]


class Mismatch(NamedTuple):
    """A row that is not what the model computes.

    Attributes:
        site: Such as ``"h.3:output"``.
        step: Step.
        call: Number of the call of the module in that step.
        row: Index along the first dimension of the value.
        leaf: Value path of the tensor.
        difference: Largest distance of two elements, in their unit; 0.0 where only bits differ, as of 0.0 and -0.0; NaN
            where one of the two is NaN.
    """

    site: str
    step: int
    call: int
    row: int
    leaf: str
    difference: float

    def __str__(self) -> str:
        differs = f"differs by up to {self.difference:.3g}" if self.difference else "differs in its bits alone"
        return f"{self.site}, {self.leaf}, step {self.step}, call {self.call}, row {self.row}: {differs}"


@dataclasses.dataclass(frozen=True)
class Verification:
    """What ``hookline.verify`` found. It is true when nothing is wrong; ``print`` it.

    Attributes:
        folders: Folders of writers: one for each attempt of each writer.
        events: Events that can be read.
        shards: Shards that they name.
        nbytes: Bytes of these shards.
        recomputed: Rows that were computed again and compared; None without a model.
        problems: One line for each thing that is damaged or could not be compared.
        mismatches: The rows that came out otherwise, in the order of steps.
        torn: Manifests with an unfinished last line: an append was cut off or goes on; that is no damage.
    """

    folders: int
    events: int
    shards: int
    nbytes: int
    recomputed: int | None
    problems: list[str]
    mismatches: list[Mismatch]
    torn: list[str]

    def __bool__(self) -> bool:
        return not self.problems and not self.mismatches

    def __str__(self) -> str:
        torn = (
            f"{manifest}: its last line is unfinished and does not count: an append was cut off or goes on"
            for manifest in self.torn
        )
        lines = [*self.problems, *map(str, self.mismatches), *torn, self.summary]
        return "\n".join(" ".join(line.split()) for line in lines)

    @property
    def summary(self) -> str:
        """One line: what was looked at, and how much is wrong."""
        counts = {"writer folder": self.folders, "event": self.events, "shard": self.shards}
        seen = ", ".join([*(plural(count, noun) for noun, count in counts.items()), size_text(self.nbytes)])
        found = plural(len(self.problems), "problem") if self.problems else "no problem"
        if self.recomputed is None:
            return f"{seen}: {found} found"
        differ = plural(len(self.mismatches), "different row")
        return f"{seen}, {plural(self.recomputed, 'row')} recomputed: {found} and {differ} found"


def verify(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    inputs: Inputs | None = None,
    rows: int = 100,
    seed: int = 0,
    tolerance: Tolerance | None = None,
    writer: int | None = None,
) -> Verification:
    """Look for damage in a recording, and compute some of it again.

    Every byte is read and compared with its checksums, as ``hookline verify`` does. With a model and its inputs, some
    random rows of inputs and outputs are computed again without gradients and compared bit for bit. The model runs as
    it is: call ``model.eval()`` before, or dropout and batch statistics come out otherwise. Gradients are not computed.

    Args:
        path: The recording, such as ``"run.hookline"``.
        model: What was recorded, with the same parameters.
        inputs: By number of the step, what the model was called with: a tuple of arguments, a dict of keyword
            arguments, or the only argument.
        rows: How many rows to compute again; all when there are fewer.
        seed: Repeats the choice of the rows.
        tolerance: Relative and absolute, as of ``torch.isclose``; none by default. The same bits are only to be
            expected from the same kernels: of the same machine, batch size and release of PyTorch.
        writer: Number of the process, such as its rank, that got ``inputs``; needed where there were several, since
            each counts its own steps. Rows of the others are not computed.

    Returns:
        What is wrong: ``problems`` and ``mismatches``.

    Raises:
        FormatError: There is no recording of that name.
        OptionError, ArgumentError: An argument cannot be used, ``model`` and ``inputs`` are not given together, or
            ``writer`` is needed.
    """
    _check(model, inputs, rows, tolerance, writer)
    if model is not None:
        with contextlib.suppress(FormatError):  # the search tells it
            _part_of(load(path), writer)
    found = store.verify(path)
    problems = list(found.problems)
    mismatches: list[Mismatch] = []
    recomputed = None
    if model is not None and inputs is not None:
        again = _Again(model, inputs, tolerance, problems, mismatches)
        try:
            again.compare(_part_of(load(path), writer), rows, seed)
        except FormatError as error:
            if str(error) not in problems:
                problems.append(str(error))
        recomputed = again.compared
    torn = [str(manifest) for manifest in found.torn]
    return Verification(*found[:4], recomputed, problems, mismatches, torn)


def _part_of(recording: Recording, writer: int | None) -> Recording:
    """What one process recorded: the steps of several have the same numbers, and other inputs."""
    there = recording.writers
    if writer is None and len(there) < 2:
        return recording
    shown = ", ".join(map(str, there)) or "none"
    if writer is None:
        raise OptionError(
            f"the recording has parts of the writers {shown}, which count their own steps. Pass writer={there[0]}, and "
            "the inputs of that process."
        )
    if writer not in there:
        raise OptionError(f"writer: got {writer}, the recording has values of the writers {shown}.")
    return recording.select(writers=writer)


def _check(model: Any, inputs: Any, rows: Any, tolerance: Any, writer: Any) -> None:
    if (model is None) != (inputs is None):
        raise OptionError("model= and inputs= go together: pass both to compute rows again, or none of them.")
    if model is not None and not isinstance(model, nn.Module):
        raise ArgumentError(f"the model must be a torch.nn.Module; got {kind(model)}.")
    if inputs is not None and (isinstance(inputs, (Tensor, str)) or not hasattr(inputs, "__getitem__")):
        raise ArgumentError(f"inputs: got {kind(inputs)}, wanted a list with the arguments of each step, such as [x].")
    if writer is not None and (type(writer) is not int or model is None):
        raise OptionError(f"writer: got {writer!r}, wanted the number of a process, together with model= and inputs=.")
    if type(rows) is not int or rows < 1:
        raise OptionError(f"rows: got {rows!r}, wanted a whole number from 1 on.")
    if tolerance is not None:
        pair = isinstance(tolerance, (tuple, list)) and len(tolerance) == 2
        if not pair or not all(isinstance(part, (int, float)) and part >= 0 for part in tolerance):
            raise OptionError(f"tolerance: got {tolerance!r}, wanted (relative, absolute), such as (1e-5, 1e-8).")


class _Chosen(NamedTuple):
    """Rows of one tensor of an event."""

    event: Any
    place: int
    leaf: str
    rows: list[int]

    @property
    def where(self) -> str:
        site = Site(self.event.path, self.event.port)
        return f"{site}, {self.leaf}, step {self.event.step}, call {self.event.call}"


class _Again:
    """Computes rows of a recording again.

    Attributes:
        compared: How many rows were compared so far.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        tolerance: Tolerance | None,
        problems: list[str],
        mismatches: list[Mismatch],
    ) -> None:
        self.compared = 0
        self._model, self._inputs, self._tolerance = model, inputs, tolerance
        self._problems, self._mismatches = problems, mismatches
        self._known = canonical_paths(model)

    def compare(self, recording: Recording, rows: int, seed: int) -> None:
        """Compute some rows again, step by step."""
        chosen = self._choose(recording, rows, seed)
        for step in sorted(chosen):
            wanted = [some for some in chosen[step] if self._has(some.event.path)]
            if wanted and (there := self._run(step, wanted)) is not None:
                for some in wanted:
                    self._compare(some, there.get((self._known[some.event.path], some.event.port, some.event.call)))

    def _choose(self, recording: Recording, rows: int, seed: int) -> dict[int, list[_Chosen]]:
        """Random rows, by step."""
        tensors = list(_tensors(recording))
        ends = np.cumsum([count for *_, count in tensors], dtype=np.int64)
        total = int(ends[-1]) if tensors else 0
        if not total:
            self._note("nothing can be recomputed: there are no rows of inputs or outputs with values.")
            return {}
        numbers = np.random.default_rng(seed).choice(total, min(rows, total), replace=False)
        found: dict[int, _Chosen] = {}
        for number in sorted(numbers.tolist()):
            index = int(np.searchsorted(ends, number, side="right"))
            event, place, leaf, count = tensors[index]
            chosen = found.setdefault(index, _Chosen(event, place, leaf, []))
            chosen.rows.append(number - int(ends[index]) + count)
        by_step: dict[int, list[_Chosen]] = {}
        for chosen in found.values():
            by_step.setdefault(chosen.event.step, []).append(chosen)
        return by_step

    def _has(self, path: str) -> bool:
        if path not in self._known:
            self._note(f"{label(path)}: the model has no such module. Pass the model that was recorded.")
        return path in self._known

    def _run(self, step: int, wanted: Sequence[_Chosen]) -> dict[tuple[str, str, int], Any] | None:
        """The events of one forward pass, by path, port and call; None where it has no input."""
        try:
            given = self._inputs[step]
        except (IndexError, KeyError):
            self._note(f"step {step}: inputs has nothing for it. Pass what the model was called with in each step.")
            return None
        args, kwargs = _arguments(given)
        # the label, since an empty pattern within a list would be the root too, but reads as a slip
        sites = sorted({f"{label(self._known[some.event.path])}:{some.event.port}" for some in wanted})
        layouts = (some.event.layouts() for some in wanted)
        in_eight_bits = any(scaled_places(some.event, layout) for some, layout in zip(wanted, layouts, strict=True))
        with torch.no_grad(), record(self._model, sites, dtype=FP8 if in_eight_bits else None) as again:
            self._model(*args, **kwargs)
        return {(event.path, event.port, event.call): event for event in again.events}

    def _compare(self, some: _Chosen, event: Any) -> None:
        if event is None:
            self._note(f"{some.where}: this call did not happen again. Does a step have one forward of the model?")
            return
        leaves, stored = dict(event.leaves()), some.event.leaf(some.place)
        if some.leaf not in leaves:
            self._note(f"{some.where}: no tensor came out there, but at {', '.join(leaves) or 'none'}.")
            return
        fresh = _same_rows(leaves[some.leaf].detach(), stored, some)
        if fresh.dtype != stored.dtype and not (fresh.is_floating_point() and stored.is_floating_point()):
            self._note(
                f"{some.where}: recorded {stored.dtype}, recomputed {fresh.dtype}. Pass the model that was recorded."
            )
            return
        if fresh.shape != stored.shape:
            self._note(
                f"{some.where}: recorded {list(stored.shape)}, recomputed {list(fresh.shape)}. Was it recorded with "
                "reduce=, which cannot be repeated here, or from other inputs?"
            )
            return
        fresh = fresh.to(stored.dtype).cpu().resolve_conj().resolve_neg().contiguous()
        for row in some.rows:
            self._compare_row(some, row, stored[row] if stored.dim() else stored, fresh[row] if fresh.dim() else fresh)

    def _compare_row(self, some: _Chosen, row: int, stored: Tensor, fresh: Tensor) -> None:
        self.compared += 1
        if _same_bits(stored, fresh) or (self._tolerance is not None and _close(fresh, stored, *self._tolerance)):
            return
        event, site = some.event, str(Site(some.event.path, some.event.port))
        difference = _difference(stored, fresh)
        self._mismatches.append(Mismatch(site, event.step, event.call, row, some.leaf, difference))

    def _note(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.append(problem)


def _same_rows(fresh: Tensor, stored: Tensor, some: _Chosen) -> Tensor:
    """The rows of the chosen tokens, where ``rec.batch`` had these recorded; else the tensor as it is.

    It has the axes (samples, length), or one of samples * length; which, the shape of a stored row tells.
    """
    if some.event.rows().get(some.leaf) != TOKENS:
        return fresh
    told = some.event.batch.value
    try:
        samples, sample, position = len(told["ids"]), told["sample"], told["position"]
        last = max(sample.tolist(), default=0), max(position.tolist(), default=0)
    except (AttributeError, LookupError, TypeError) as error:
        raise FormatError(f"{some.where}: what its rows are is damaged ({error!r}). Record again.") from error
    shape, row = tuple(fresh.shape), tuple(stored.shape[1:])
    if shape[:1] == (samples,) and shape[2:] == row and len(shape) > 1:
        length, flat = shape[1], fresh.reshape(samples * shape[1], *row)
    elif shape[1:] == row and samples and shape[0] % samples == 0:
        length, flat = shape[0] // samples, fresh
    else:
        return fresh
    if last[0] >= samples or last[1] >= length:  # from other inputs
        return fresh
    return flat[(sample * length + position).to(flat.device)]


def _tensors(recording: Recording) -> Iterator[tuple[Any, int, str, int]]:
    """Event, place, value path and number of rows of each tensor that can be computed again."""
    for event in recording:
        if event.port not in _PORTS or not event.nbytes:
            continue
        layouts = event.layouts()
        for place, (path, _, shape) in enumerate(layouts):
            has_data = len(layouts) == 1 or not event.leaf(place).is_meta
            if has_data and math.prod(shape):
                yield event, place, path, shape[0] if shape else 1


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, dict):
        return (), given
    return (given if isinstance(given, tuple) else (given,)), {}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _close(fresh: Tensor, stored: Tensor, rtol: float, atol: float) -> bool:
    a, b = _wide(fresh), _wide(stored)
    return a is not None and b is not None and torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def _difference(a: Tensor, b: Tensor) -> float:
    wide, other = _wide(a), _wide(b)
    if wide is None or other is None:
        return math.nan
    same = (wide == other) | (wide.isnan() & other.isnan())
    return float((wide - other).abs().masked_fill(same, 0).max())


def _wide(tensor: Tensor) -> Tensor | None:
    """In the widest type; None for a dtype that torch stores but cannot compute with."""
    try:
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    except (RuntimeError, NotImplementedError):
        return None
