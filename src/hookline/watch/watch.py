"""The with-block around a training."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline.errors import ArgumentError, IncidentError, OptionError
from hookline.hooks import Attached, Call, Handle, Observer, see_losses, unreachable
from hookline.record.ranks import rank
from hookline.sites import Pattern, resolve
from hookline.watch.cases import Case, bundled
from hookline.watch.clock import Clock, Scaler
from hookline.watch.incident import Incident
from hookline.watch.measure import is_finite, measure, scaled
from hookline.watch.observer import ModuleWatch
from hookline.watch.parameters import Parameters
from hookline.watch.rules import DEFAULT, Engine, Rule
from hookline.watch.series import PORTS, Frame, Series
from hookline.watch.session import Session
from hookline.watch.window import Window

__all__ = ["IncidentWarning", "Watch", "watch"]

Models = nn.Module | Mapping[str, nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class IncidentWarning(RuntimeWarning):
    """A watch has found something."""


def watch(  # noqa: PLR0913 - one option for each thing that can be chosen, all of them with a default
    model: Models,
    optimizer: Optimizers = None,
    *,
    every: int = 1,
    parameters_every: int = 10,
    sites: Pattern = "**",
    ports: str | Iterable[str] = ("output", "grad_output", "parameter", "parameter_grad", "update"),
    rules: Iterable[Rule] = DEFAULT,
    on_incident: str | Callable[[Incident], object] = "warn",
    scaler: Any = None,
    zoom: bool = True,
    bundles: str | os.PathLike[str] | None = None,
) -> Watch:
    """Watch a training: statistics of every step, and incidents with their origin.

    Args:
        model: The module that trains, or several by name: ``{"generator": g, "discriminator": d}``. A loss that is a
            module can be one of them, so that its faults are told by its name.
        optimizer: Its steps are the steps of the watch, those of the last one where there are several. Without one,
            each forward of the model is a step.
        every: Measure only each such step. The others cost next to nothing, and nothing is found in them.
        parameters_every: Measure parameters and updates in each such measured step. An update is computed from at
            most 65,536 elements of a parameter, evenly spread.
        sites: Which modules, as for ``hookline.record``.
        ports: Of ``"output"``, ``"grad_output"``, ``"parameter"``, ``"parameter_grad"`` and ``"update"``.
        rules: What counts as an incident; see ``hookline.watch.rules.DEFAULT``.
        on_incident: ``"warn"``, ``"raise"`` an ``IncidentError``, ``"ignore"``, or a function that gets the incident.
            A non-finite value is told at the moment it is seen, everything else at the end of its step.
        scaler: The ``torch.amp.GradScaler`` of the training. Gradients are then told without its scale, and a step that
            it leaves out because of an overflow is no incident.
        bundles: Folder for what ``hookline replay`` needs to run the module of a non-finite value once more, a folder
            for each. None for none.
        zoom: Run the module in which a non-finite value arose once more, on a copy, to name the operation.

    Returns:
        A watch: a with-block, or ``start()`` and ``stop()``.

    Raises:
        ArgumentError, OptionError, SiteError: An argument cannot be used.
    """
    models = _models(model)
    optimizers = _optimizers(optimizer)
    chosen = (ports,) if isinstance(ports, str) else tuple(ports)
    unknown = [port for port in chosen if port not in PORTS or port == "loss"]
    if unknown or not chosen:
        raise OptionError(f"ports are of {', '.join(PORTS[:-1])}; got {', '.join(map(repr, unknown)) or 'none'}.")
    for name, number in (("every", every), ("parameters_every", parameters_every)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise OptionError(f"{name} is a whole number from 1 on; got {number!r}.")
    if not callable(on_incident) and on_incident not in ("warn", "raise", "ignore"):
        raise OptionError(f'on_incident is "warn", "raise", "ignore" or a function; got {on_incident!r}.')
    options = _Options(every, parameters_every, chosen, tuple(rules), on_incident, scaler, zoom, bundles)
    return Watch(_modules(models, sites), models, optimizers, options)


class _Options(NamedTuple):
    """What ``watch`` was told, checked."""

    every: int
    parameters_every: int
    ports: tuple[str, ...]
    rules: tuple[Rule, ...]
    on_incident: str | Callable[[Incident], object]
    scaler: Any
    zoom: bool
    bundles: str | os.PathLike[str] | None


class Watch:
    """Watches from ``start`` to ``stop``; see ``watch``.

    Attributes:
        incidents: What was found so far.
        step: Number of the step that is under way.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        models: dict[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        options: _Options,
    ) -> None:
        self.incidents: list[Incident] = []
        self._modules, self._models, self._optimizers = modules, models, optimizers
        self._every, self._parameters_every = options.every, options.parameters_every
        self._ports = options.ports
        self._engine = Engine(options.rules)
        self._on_incident = options.on_incident
        self._bundles = None if options.bundles is None else Path(options.bundles)
        self._rank = rank()
        self._session = Session(self._non_finite)
        self._window = Window(self._engine.size)
        self._parameters = Parameters(modules, options.ports)
        self._clock = Clock(optimizers, self._before_update, self._after_update, self._end_step)
        self._scaler = Scaler(options.scaler, self._scale_updated)
        self._attached = Attached()
        self._losses: Handle | None = None
        self._session.origins.zooms = options.zoom
        self._updated = False
        self._skipped_in_a_row = 0
        self._scale = 1.0

    # ------------------------------------------------------------ start and stop

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.stop()

    def start(self) -> None:
        """Put observers at the modules and hooks at the optimizers.

        Raises:
            OptionError: It has started already.
        """
        if self._attached:
            raise OptionError("this watch is running; call hookline.watch(...) again for another one.")
        try:
            if not self._optimizers:
                for model in self._models.values():
                    self._attached.add(model, _RootWatch(self))
            output, gradients = "output" in self._ports, "grad_output" in self._ports
            for path, module in self._modules.items():
                if (output or gradients) and not unreachable(module):
                    observer = ModuleWatch(self._session, path, module, output=output, gradients=gradients)
                    self._attached.add(module, observer)
            self._losses = see_losses(self._loss)
            self._clock.start()
            self._scaler.start()
        except BaseException:
            self.stop()
            raise
        self._session.origins.scaled_backward = lambda: self._scaler.is_on and self._skipped_in_a_row < _PATIENCE
        self._begin_step()

    def stop(self) -> None:
        """Remove everything; harmless a second time."""
        if self._attached and self._session.has_rows and not self._optimizers:
            self._end_step(False)
        self._scaler.stop()
        self._clock.stop()
        if self._losses is not None:
            self._losses.remove()
        self._attached.remove()
        self._session.drop()

    # ------------------------------------------------------------ what happens in a step

    @property
    def step(self) -> int:
        """Number of the step that is under way."""
        return self._session.step

    @property
    def series(self) -> list[Series]:
        """What was measured so far."""
        return self._session.series

    @property
    def notes(self) -> dict[str, str]:
        """Non-finite values that are no incident, by site, and why."""
        return dict(self._session.origins.notes)

    def _begin_step(self) -> None:
        self._session.measures = self._session.step % self._every == 0
        self._updated = False
        if self._session.measures:
            self._scale = self._scaler.scale

    def _loss(self, tensors: tuple[Tensor, ...]) -> None:
        """A backward pass begins."""
        session = self._session
        if not session.measures or not session.has_rows:
            return
        for tensor in tensors:
            if tensor.numel() == 1 and tensor.is_floating_point():
                row = scaled(measure(tensor.detach()), 1 / self._scale)
                session.add_row(session.series_of("", "loss", "", "", tensor.dtype), row)
                if not is_finite(row):
                    session.origins.loss(row)

    def _measures_updates(self) -> bool:
        return self._session.step // self._every % self._parameters_every == 0

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._updated = True
        if self._session.measures:
            self._parameters.before_update(self._session, optimizer, updates=self._measures_updates())

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._session.measures:
            self._parameters.after_update(self._session, updates=self._measures_updates())

    def _scale_updated(self) -> None:
        """The gradient scaler has looked at the step; without an update it was left out."""
        if not self._updated:
            self._end_step(True)

    def _end_step(self, skipped: bool) -> None:
        session = self._session
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        extra: dict[str, Any] = {"skipped": True} if skipped else {}
        if self._optimizers:
            extra["lr"] = [group["lr"] for one in self._optimizers for group in one.param_groups]
            extra["lr"] = [float(rate) for rate in extra["lr"]]
        if self._scaler.is_on:
            extra["scale"] = self._scale
        measured = session.measures
        frame = session.end(extra, gradient_factor=1 / self._scale)
        self._begin_step()
        if measured:
            self._look(frame)

    def _look(self, frame: Frame) -> None:
        self._window.add(frame, self._session.series)
        for found in self._engine.check(self._window):
            self._tell(dataclasses.replace(found, rank=self._rank, time=frame.time))

    # ------------------------------------------------------------ incidents

    def _non_finite(self, incident: Incident, case: Case | None) -> None:
        incident = dataclasses.replace(incident, rank=self._rank)
        if case is not None and self._bundles is not None:
            incident = bundled(incident, case, self._bundles)
        self._tell(incident)

    def _tell(self, incident: Incident) -> None:
        self.incidents.append(incident)
        if callable(self._on_incident):
            self._on_incident(incident)
        elif self._on_incident == "raise":
            raise IncidentError(str(incident), incident)
        elif self._on_incident == "warn":
            warnings.warn(str(incident), IncidentWarning, stacklevel=2)


_PATIENCE = 10
"""Steps that a gradient scaler may leave out in a row before their overflow is an incident."""


class _RootWatch(Observer):
    """Stands at the root where there is no optimizer: each of its forwards that is not inside another begins a step."""

    def __init__(self, owner: Watch) -> None:
        self._owner: Watch | None = owner

    def let_go(self) -> None:
        """Forget the watch."""
        self._owner = None

    def begin(self, call: Call) -> None:
        """A forward begins."""
        owner = self._owner
        if owner is None or call.recomputed or owner._session.stack.calls:
            return
        if owner._session.begun or owner._session.has_rows:
            owner._end_step(False)
        owner._session.begun = True


# ---------------------------------------------------------------- arguments


def _models(model: Models) -> dict[str, nn.Module]:
    models = {"": model} if isinstance(model, nn.Module) else model
    if not isinstance(models, Mapping) or not models:
        raise ArgumentError(f"watch takes a torch.nn.Module, or several by name; got {type(model).__name__}.")
    for name, one in models.items():
        if not isinstance(one, nn.Module) or not isinstance(name, str):
            raise ArgumentError(f"watch takes modules by name; got {type(one).__name__} at {name!r}.")
    return dict(models)


def _optimizers(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    found: Any = () if optimizer is None else optimizer
    found = (found,) if isinstance(found, torch.optim.Optimizer) else found
    if not isinstance(found, (list, tuple)):
        raise ArgumentError(
            f"optimizer is a torch.optim.Optimizer, a list of them or None; got {type(found).__name__}."
        )
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise ArgumentError(
                f"optimizer is a torch.optim.Optimizer or a list of them; got {type(one).__name__} in it."
            )
    return tuple(found)


def _modules(models: dict[str, nn.Module], sites: Pattern) -> dict[str, nn.Module]:
    """The watched modules by path; those of a named model begin with its name."""
    root = models[""] if list(models) == [""] else nn.ModuleDict(models)
    by_path = dict(root.named_modules())
    if list(models) != [""]:
        by_path.pop("", None)
    chosen = dict.fromkeys(site.path for site in resolve(root, sites, ("output",)))
    return {path: by_path[path] for path in chosen if path in by_path}
