"""The with-block that installs, keeps the values and removes itself."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from hookline.errors import OptionError
from hookline.hooks import Handle, add_note, attach, original_class, unreachable
from hookline.record.budget import Budget
from hookline.record.coverage import Coverage
from hookline.record.event import Event
from hookline.record.evidence import Evidence, coverage_of
from hookline.record.observer import ModuleObserver
from hookline.record.places import modules_at, sites_of
from hookline.record.policy import Policy, policy
from hookline.record.recording import Recording, module_info
from hookline.record.segment import Mark
from hookline.record.spill import Spill, spill_to
from hookline.record.steps import StepObserver, Steps
from hookline.sites import PORTS, Pattern, Site, canonical_paths, label
from hookline.store import ModuleInfo
from hookline.values import Structure, keep

__all__ = ["Recorder", "record"]


def record(  # noqa: PLR0913 - one option for each thing that can be chosen, all of them with a default
    model: nn.Module,
    sites: Pattern = "**",
    ports: str | Iterable[str] = ("output",),
    *,
    keep: str = "all",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    reduce: Callable[[Tensor], Any] | None = None,
    detach: bool = True,
    budget: int | str | None = None,
    to: str | os.PathLike[str] | None = None,
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
        dtype: Convert floating values to this dtype; their own by default.
        reduce: Keep ``reduce(tensor)``, a tensor or a number, in the place of each tensor, such as
            ``lambda t: t.mean((2, 3))``.
        detach: Keep values without their graph. With False a value can be used in a loss, and costs a copy.
        budget: Most bytes to keep in memory, such as ``"2GB"``. When one value more would pass it, what is kept goes to
            the folder ``to``, or ``BudgetError`` is raised before the value is kept; always with ``keep="last"``.
        to: Folder that holds the recording when the with-block has ended, such as ``"run.hookline"``.
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
        FormatError: The folder ``to`` cannot be written. What is in memory stays.
        CoverageError: At the end of the with-block, with ``strict=True``.
    """
    chosen = policy(keep=keep, device=device, dtype=dtype, reduce=reduce, detach=detach, budget=budget)
    found = sites_of(model, sites, ports)
    return Recorder(model, found, chosen, spill=None if to is None else spill_to(to, chosen), strict=strict)


class Recorder:
    """Installs at ``__enter__``, removes at ``__exit__``; see ``record``.

    Attributes:
        recording: What was recorded so far.
        steps: The step that each thread is in.
        wanted: Says of a step whether its values are kept; every step by default.
        on_step: Called with the number of a step when the next one begins, and at the end.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: list[Site],
        policy: Policy,
        *,
        spill: Spill | None = None,
        strict: bool = False,
    ) -> None:
        modules = modules_at(model, sites)
        self.model: nn.Module | None = model
        self.sites = sites
        self.policy = policy
        self.steps = Steps()
        self.wanted: Callable[[int], bool] = lambda step: True
        self.on_step: Callable[[int], None] = lambda step: None
        self.recording = Recording(modules=_described(model, modules), info=_info(model, sites))
        self.evidence = {path: Evidence(module) for path, module in modules.items()}
        self._modules = {path: weakref.ref(module) for path, module in modules.items()}
        self._model_ref = weakref.ref(model)
        self._spill = spill
        self._strict = strict
        self._budget = None if policy.budget is None else Budget(policy.budget, last_only=policy.keep == "last")
        self._handles: list[Handle] = []
        self._observers: list[StepObserver | ModuleObserver] = []
        self._orders = itertools.count()
        self._replacing = threading.Lock()
        self._final: Coverage | None = None

    @property
    def step(self) -> int:
        """Number of the root's newest forward, -1 before the first."""
        return self.steps.latest

    def __enter__(self) -> Recording:
        if self.model is None or self._handles:
            raise OptionError("a recorder records once; call hookline.record(...) again for another recording.")
        try:
            self._install(self.model)
        except BaseException:
            self.close()
            raise
        self.recording.watched_by(self)
        return self.recording

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()
        if self._spill is not None:
            try:
                self._spill.finish(self.recording)
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
        if not unreachable(model):
            self._attach(model, StepObserver(self._begin_step))
        for path, module in modules_at(model, self.sites).items():
            if not unreachable(module):
                self._attach(module, ModuleObserver(self, path, by_path[path], self.evidence[path]))

    def _attach(self, module: nn.Module, observer: StepObserver | ModuleObserver) -> None:
        self._observers.append(observer)
        self._handles.append(attach(module, "observer", observer))

    def close(self) -> None:
        """Remove everything from the model; harmless a second time."""
        handles, self._handles = self._handles, []
        for handle in reversed(handles):
            handle.remove()
        for observer in self._observers:
            observer.let_go()
        self._observers.clear()
        self.model = None
        if handles:
            self._final = self.coverage()
            self.recording.watched_by(None, coverage=self._final.to_json())
            self.on_step(self.step)

    def coverage(self) -> Coverage:
        """The fate of every site so far; what happens to the model after the end is none of it."""
        if self._final is not None:
            return self._final
        modules = {path: ref() for path, ref in self._modules.items()}
        forwards = sum(map(self.wanted, range(self.steps.latest + 1)))
        return coverage_of(self._model_ref(), self.sites, modules, self.evidence, forwards)

    def name_of(self, module: nn.Module | None) -> str | None:
        """How a module is called in messages; None for one that is not recorded."""
        if module is None:
            return None
        return next((label(path) for path, ref in self._modules.items() if ref() is module), None)

    def _begin_step(self) -> None:
        before = self.steps.begin()
        if before >= 0:
            self.on_step(before)

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
            BudgetError: It would pass the budget, and there is no folder to spill to.
            FormatError: The folder cannot be written.
        """
        if not self.wanted(mark[0]):
            return False
        try:
            kept = self._captured(site, leaves)
        except Exception as error:
            add_note(error, f"Raised while {site} was kept, call {mark[1]} of step {mark[0]}.")
            raise
        step, call = mark
        value = keep(structure, kept)
        event = Event(next(self._orders), step, site.path, site.port, call, backward, value)
        self._add(site, event)
        if self._spill is not None and self._budget is not None and event.nbytes > self._budget.limit:
            self._spill.write(self.recording)
            self._budget.clear()
        return True

    def _captured(self, site: Site, leaves: list[Any]) -> list[Any]:
        if self._budget is None:
            return self._as_kept(site, leaves)
        if self.policy.reduce is not None:  # only the results tell how large they are
            kept = self._as_kept(site, leaves)
            self._make_room(self._budget, site, self._nbytes(kept))
            return kept
        size = self._nbytes(leaves)
        self._make_room(self._budget, site, size)
        try:
            return self._as_kept(site, leaves)
        except BaseException:
            self._budget.give_back(site, size)
            raise

    def _make_room(self, budget: Budget, site: Site, size: int) -> None:
        if self._spill is not None and not budget.has_room(size) and self._spill.write(self.recording):
            budget.clear()
            size = min(size, budget.limit)  # what is larger alone follows at once
        budget.spend(site, size)

    def _as_kept(self, site: Site, leaves: list[Any]) -> list[Any]:
        return [self.policy.capture(leaf, site) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def _nbytes(self, leaves: list[Any]) -> int:
        return sum(self.policy.nbytes(leaf) for leaf in leaves if isinstance(leaf, Tensor))

    def _add(self, site: Site, event: Event) -> None:
        if self.policy.keep == "all":
            self.recording.add(event)
            return
        with self._replacing:
            gone = self.recording.drop(site.path, site.port)
            self.recording.add(event)
        if gone is not None and self._budget is not None:
            self._budget.give_back(site, gone.nbytes)

    def take(self) -> list[Event]:
        """Remove and return the events so far, for a sink that has written them elsewhere."""
        if self._budget is not None:
            self._budget.clear()
        return self.recording.take()


def _described(model: nn.Module, modules: dict[str, nn.Module]) -> dict[str, ModuleInfo]:
    aliases: dict[str, list[str]] = {}
    for alias, path in canonical_paths(model).items():
        if alias != path:
            aliases.setdefault(path, []).append(alias)
    return {path: module_info(module, tuple(aliases.get(path, ()))) for path, module in modules.items()}


def _info(model: nn.Module, sites: list[Site]) -> dict[str, Any]:
    seen = {site.port for site in sites}
    return {
        "hookline": _version(),
        "torch": str(torch.__version__),
        "model": original_class(model).__name__,
        "sites": [str(site) for site in sites],
        "ports": [port for port in PORTS if port in seen],
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@functools.cache
def _version() -> str:
    try:
        return version("hookline")
    except PackageNotFoundError:
        return "unknown"
