"""The with-block that installs, keeps the values and removes itself."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.hooks import Attached, add_note, unreachable
from hookline.record.about import described, info_of
from hookline.record.batch import Batch, CurrentBatch, chosen_rows, kinds_of
from hookline.record.budget import Budget
from hookline.record.coverage import Coverage
from hookline.record.event import Event
from hookline.record.evidence import Evidence, coverage_of, leave_out
from hookline.record.groups import Groups
from hookline.record.held import Pressure
from hookline.record.observer import ModuleObserver
from hookline.record.places import modules_at, sites_of
from hookline.record.policy import Policy, policy
from hookline.record.recording import Recording
from hookline.record.segment import Mark
from hookline.record.steps import StepEnd, StepObserver, Steps
from hookline.record.stream import Stream
from hookline.record.target import Target, target_of
from hookline.sites import Pattern, Site, label
from hookline.values import Scaled, Structure, keep

__all__ = ["Recorder", "record"]


def record(  # noqa: PLR0913 - one option for each thing that can be chosen, all of them with a default
    model: nn.Module,
    sites: Pattern = "**",
    ports: str | Iterable[str] = ("output",),
    *,
    keep: str = "all",
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    reduce: Callable[[Tensor], Any] | None = None,
    detach: bool = True,
    budget: int | str | None = None,
    to: str | os.PathLike[str] | None = None,
    quota: int | str | None = None,
    on_error: str = "raise",
    resume: bool = False,
    steps: str = "forward",
    strict: bool = False,
) -> Recorder:
    """Record values at places of a model while a with-block runs.

    Args:
        model: The module whose sub-modules are watched. Its forwards count the steps.
        sites: Which modules. A path (``"layer1.0.conv1"``); a glob per path level, ``*`` for one level and ``**`` for
            any depth; ``"re:..."``; a module class; a function ``(path, module) -> bool``; a list of these, in which a
            leading ``!`` excludes. A text may name its port: ``"layer1:grad_output"``.
        ports: ``"input"``, ``"output"``, ``"grad_input"``, ``"grad_output"``, one or several. Outputs and inputs add no
            autograd node; ``grad_output`` adds one after each call, ``grad_input`` one before and one after.
        keep: ``"all"`` calls of all steps, or only the ``"last"`` value of each site.
        device: Where to keep values; where they are by default.
        dtype: Convert floating values to this dtype; their own by default. ``"fp8"`` keeps each as ``float8_e4m3fn``
            data with a float32 scale for each row along the last dimension, as ``kept.data`` and ``kept.scale``, which
            ``rec.rows`` and ``hookline.dequantize`` multiply. The error is at most 1/16 of an element plus 1/1024 of
            the scale; what is not finite becomes NaN. Tensors without a dimension stay as they are.
        reduce: Keep ``reduce(tensor)``, a tensor or a number, in the place of each tensor, such as
            ``lambda t: t.mean((2, 3))``.
        detach: Keep values without their graph. With False a value can be used in a loss, and costs a copy.
        budget: Most bytes to keep in memory, such as ``"2GB"``. With ``to``, most bytes that wait for the disk,
            ``"1GB"`` unless given: the model waits where the disk is slower. Without it, or with ``keep="last"``,
            ``BudgetError`` is raised before one value more would be kept.
        to: Folder to record into, such as ``"run.hookline"``. Values go there while the model runs, whole steps at a
            time, and ``rec`` reads them from there.
        quota: Most bytes that this process may write, such as ``"50GB"``; with ``resume`` those of earlier runs
            count. When one step more would pass it, the recording ends with all steps before, as ``on_error`` says.
        on_error: What to do when the disk refuses or the quota is reached: ``"raise"``, or ``"warn"`` once and let the
            model go on without the recording. What was committed can be read in both cases.
        resume: Go on with the recording at ``to``, if there is one, after its last step; see ``Recording.first_step``
            and ``Recording.batch``.
        steps: What begins a step: a ``"forward"`` of the model, or with ``"manual"`` only ``rec.next_step()``.
        strict: Raise ``CoverageError`` at the end of the with-block when a site was not captured. A container that a
            pattern names among others does not count.

    Returns:
        A recorder; ``with record(...) as rec`` gives the ``Recording``. Values are copy-on-write snapshots: they cost
        a copy only when the model writes over them, or when they are a small part of a large tensor, which would
        otherwise be kept as a whole.

    Raises:
        SiteError: A pattern names nothing in the model, or just a module whose calls cannot be seen.
        OptionError, ArgumentError: An argument cannot be used, or there is a recording at ``to``.
        BudgetError: Inside the with-block, when the budget is full.
        FormatError, QuotaError: Inside the with-block or at its end, with ``on_error="raise"``.
        CoverageError: At the end of the with-block, with ``strict=True``.
    """
    chosen = policy(keep=keep, device=device, dtype=dtype, reduce=reduce, detach=detach, budget=budget)
    found = sites_of(model, sites, ports)
    target = target_of(to, chosen, quota=quota, on_error=on_error, resume=resume)
    return Recorder(model, found, chosen, target=target, steps=steps, strict=strict)


class Recorder:
    """Installs at ``__enter__``, removes at ``__exit__``; see ``record``.

    Attributes:
        recording: What was recorded so far.
        steps: The step that each thread is in.
        wanted: Says of a step whether its values are kept; every step by default.
        on_step: Called with the number of a step when the next one begins, and at the end.
        noticed_from: First of the steps that ``evidence`` is about; those of an earlier run do not count.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: list[Site],
        policy: Policy,
        *,
        target: Target | None = None,
        steps: str = "forward",
        strict: bool = False,
    ) -> None:
        if steps not in ("forward", "manual"):
            raise OptionError(f'steps is "forward" or "manual", got {steps!r}.')
        modules = modules_at(model, sites)
        self.model: nn.Module | None = model
        self.sites = sites
        self.policy = policy
        self.steps = Steps(by_hand=steps == "manual")
        self.wanted: Callable[[int], bool] = lambda step: True
        self.on_step: Callable[[int], None] = lambda step: None
        self.noticed_from = 0
        self.recording = Recording(modules=described(model, modules), info=info_of(model, sites))
        self.evidence = {path: Evidence(module) for path, module in modules.items()}
        self._modules = {path: weakref.ref(module) for path, module in modules.items()}
        self._model_ref = weakref.ref(model)
        self._target = target
        self._stream: Stream | None = None
        self._with_gradients = any(site.port.startswith("grad") for site in sites)
        self._batches = CurrentBatch()
        self._groups = Groups(lambda *steps: None)
        self._strict = strict
        streams = target is not None and policy.keep == "all"
        last_only = policy.keep == "last"
        self._budget = None if policy.budget is None or streams else Budget(policy.budget, last_only=last_only)
        self._attached = Attached()
        self._orders = itertools.count()
        self._replacing = threading.Lock()
        self._final: Coverage | None = None

    @property
    def step(self) -> int:
        """Number of the root's newest forward, -1 before the first."""
        return self.steps.latest

    def __enter__(self) -> Recording:
        if self.model is None or self._attached:
            raise OptionError("a recorder records once; call hookline.record(...) again for another recording.")
        if self._target is not None:
            refused = functools.partial(leave_out, self.evidence)
            self._stream = self._target.open(self.model, self.recording, self.policy, refused)
            self._groups = Groups(self._stream.step_over)
            self.noticed_from = self._target.first_step
            self.steps.start_at(self.noticed_from)
            self._orders = itertools.count(self._target.first_order)
        try:
            self._install(self.model)
        except BaseException:
            self.close()
            if self._stream is not None:
                self._stream.take_back()
            raise
        self.recording.watched_by(self)
        return self.recording

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()
        if self._stream is not None:
            try:
                self._stream.finish(self._said)
            except Exception as second:
                if error is None:
                    raise
                add_note(error, f"The recording could not be written either: {second}")
        if self._strict and error is None:
            self.recording.coverage.check()

    def _install(self, model: nn.Module) -> None:
        by_path: dict[str, list[Site]] = {}
        for site in self.sites:
            by_path.setdefault(site.path, []).append(site)
        steps = StepObserver(self._begin_step)
        if not unreachable(model):
            self._attached.add(model, steps)
        for path, module in modules_at(model, self.sites).items():
            if not unreachable(module):
                self._attached.add(module, ModuleObserver(self, path, by_path[path], self.evidence[path]))
        if self._stream is not None and not unreachable(model):
            self._attached.add(model, StepEnd(steps, self._end_step))

    def close(self) -> None:
        """Remove everything from the model; harmless a second time."""
        was_attached = self._attached.remove()
        self.model = None
        if was_attached:
            self._final = self.coverage()
            self.recording.watched_by(None, coverage=self._final.to_json())
            self.on_step(self.step)

    def coverage(self) -> Coverage:
        """The fate of every site so far; what happens to the model after the end is none of it."""
        if self._final is not None:
            return self._final
        modules = {path: ref() for path, ref in self._modules.items()}
        forwards = sum(map(self.wanted, range(self.noticed_from, self.steps.latest + 1)))
        return coverage_of(self._model_ref(), self.sites, modules, self.evidence, forwards)

    def name_of(self, module: nn.Module | None) -> str | None:
        """How a module is called in messages; None for one that is not recorded."""
        if module is None:
            return None
        return next((label(path) for path, ref in self._modules.items() if ref() is module), None)

    def _begin_step(self) -> bool:
        """A forward of the model begins; returns whether it counts."""
        if self.passes_over:
            return False
        own, before = self.steps.own, self.steps.begin()
        if before >= 0:
            self.on_step(before)
        if own is not None and own is not self.steps.current:
            self._groups.step_over(own.number)
        self._groups.begin(self.batch, self.steps.current.number)
        return True

    def _end_step(self) -> None:
        """It has ended, and with it the step where no gradients are wanted."""
        if not self._with_gradients and not self.steps.by_hand:
            self._groups.step_over(self.steps.current.number)

    def next_step(self) -> None:
        """The step of this thread is over; its next call begins another one."""
        self._groups.step_over(self.steps.end())

    def flush(self) -> None:
        """Return when everything so far is on disk.

        Raises:
            OptionError: The recording goes into memory, or only its last values are kept.
        """
        if self._stream is None or self.policy.keep == "last":
            raise OptionError('flush() needs record(..., to="run.hookline") and keep="all".')
        self._stream.flush()

    @property
    def pressure(self) -> Pressure:
        """How often, and how many seconds, the model has waited for the disk."""
        return Pressure(0, 0.0) if self._stream is None else self._stream.pressure

    @property
    def first_step(self) -> int:
        """Number of the first step."""
        return self.steps.first

    @property
    def batch(self) -> Batch | None:
        """What the rows of this thread's calls are."""
        return self._batches.value

    @property
    def passes_over(self) -> bool:
        """Whether this thread runs what is recorded already."""
        return self._batches.passes_over

    @contextlib.contextmanager
    def in_batch(self, batch: Batch) -> Iterator[bool]:
        """Give the calls of this thread their rows; says whether they are recorded.

        Raises:
            OptionError: Some of the samples are recorded already and others not.
        """
        batch.order, batch.step = next(self._orders), max(self.step, self.first_step)
        with self._batches.inside(batch, set() if self._target is None else self._target.ids) as wanted:
            try:
                yield wanted
            finally:
                self._groups.batch_over(batch)

    def _said(self) -> dict[str, Any]:
        waits, seconds = self.pressure
        self._final = None  # values may have been left out since
        self._final = self.coverage()
        said = {"coverage": self._final.to_json(), "waits": waits, "waited_s": round(seconds, 3)}
        self.recording.info |= said
        return said

    def put(self, site: Site, mark: Mark, backward: int, structure: Structure, leaves: list[Any]) -> bool:
        """Keep one value of one call; observers do this.

        Args:
            site: Where it stands.
            mark: Step and call.
            backward: Number of the backward pass through that call.
            structure: How the leaves are nested.
            leaves: Tensors and others, in order.

        Returns:
            Whether it was wanted.

        Raises:
            BudgetError: It would pass the budget.
            FormatError, QuotaError: The recording on disk cannot go on.
        """
        if not self.wanted(mark[0]) or (self._stream is not None and not self._stream.takes):
            return False
        step, call, batch = mark
        try:
            if batch is not None:
                leaves, kinds = chosen_rows(batch, leaves, detach=self.policy.detach)
            captured = self._captured(site, leaves)
        except Exception as error:
            add_note(error, f"Raised while {site} was kept, call {call} of step {step}.")
            raise
        if captured is None:
            return False
        kept, size = captured
        try:
            value, writer = keep(structure, kept), 0 if self._target is None else self._target.number
            event = Event(next(self._orders), step, site.path, site.port, call, backward, value, writer=writer)
            if batch is not None:  # also where no row is one of its own, since its ids are recorded with this
                event.batch, event.kinds = batch, kinds_of(batch, kinds, kept)
            self._add(site, event)
        except BaseException:
            self._give_back(site, size)
            raise
        if self._stream is not None:
            self._stream.put(event, size)
        return True

    def _captured(self, site: Site, leaves: list[Any]) -> tuple[list[Any], int] | None:
        """The leaves as they are kept, and their bytes; None when the recording has ended."""
        if self._budget is None and self._stream is None:
            return self._as_kept(site, leaves), 0
        if self.policy.reduce is not None:  # only the results tell how large they are
            kept = self._as_kept(site, leaves)
            size = self._nbytes(kept)
            return (kept, size) if self._has_room(site, size) else None
        size = self._nbytes(leaves)
        if not self._has_room(site, size):
            return None
        try:
            return self._as_kept(site, leaves), size
        except BaseException:
            self._give_back(site, size)
            raise

    def _has_room(self, site: Site, size: int) -> bool:
        if self._budget is not None:
            self._budget.spend(site, size)
        return self._stream is None or self._stream.room(size)

    def _give_back(self, site: Site, size: int) -> None:
        if self._budget is not None:
            self._budget.give_back(site, size)
        if self._stream is not None:
            self._stream.give_back(size)

    def _as_kept(self, site: Site, leaves: list[Any]) -> list[Any]:
        return [self.policy.capture(leaf, site) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def _nbytes(self, leaves: list[Any]) -> int:
        return sum(self.policy.nbytes(leaf) for leaf in leaves if isinstance(leaf, (Tensor, Scaled)))

    def _add(self, site: Site, event: Event) -> None:
        if self.policy.keep == "all":
            self.recording.log.add(event)
            return
        with self._replacing:
            gone = self.recording.log.drop(site.path, site.port)
            self.recording.log.add(event)
        if gone is not None and self._budget is not None:
            self._budget.give_back(site, gone.nbytes)
