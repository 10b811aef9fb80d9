"""Where a non-finite value comes from: which call, or which parameter, or the batch, or the loss.

The first non-finite value of a step counts. The calls around it are asked, from the inside out, whether what went in
was finite: the innermost one of which that is true has made it, in its own code where the calls inside it are clear.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hookline.sites import label
from hookline.stats import Summary, summarize
from hookline.values import flatten_call, paths_of
from hookline.watch.cases import Case
from hookline.watch.frames import where
from hookline.watch.incident import Incident
from hookline.watch.measure import INF, NAN, NEG_INF, Row, counts, counts_of, told
from hookline.watch.running import Running
from hookline.watch.series import Series
from hookline.watch.zoom import Zoom, zoom

if TYPE_CHECKING:
    from hookline.watch.session import Session

__all__ = ["Origins"]

RULE = "non-finite"


class Origins:
    """Says once, of a run of steps with non-finite values, where the first one came from.

    Args:
        session: What is measured.
        tell: Gets the incident and what is to be replayed.

    Attributes:
        zooms: Whether a module is run once more to name the operation.
        notes: Values that are not finite and no incident, by site, and why.
        scaled_backward: Says whether a non-finite gradient is left to the gradient scaler.
    """

    def __init__(self, session: Session, tell: Callable[[Incident, Case | None], None]) -> None:
        self._session = session
        self._tell = tell
        self.zooms = True
        self._masks: set[tuple[str, str]] = set()
        self.notes: dict[str, str] = {}
        self.scaled_backward: Callable[[], bool] = lambda: False
        self._told = False
        self._found = False

    def begin(self) -> None:
        """A step begins. After one without a non-finite value the next such value is told again."""
        if not self._found:
            self._told = False
        self._found = False

    # ------------------------------------------------------------ forward

    def forward(self, running: Running, place: str, tensor: Tensor, row: Row) -> None:
        """A call has returned a non-finite value."""
        if self._found:
            return
        only_negative = not row[NAN] and row[INF] == row[NEG_INF]
        state = _inputs(running)
        if only_negative and ((running.path, place) in self._masks or state.kind == "masked"):
            return
        found = self._blame(running, state)
        if only_negative and found.zoom is not None and not found.zoom.reproduced and found.zoom.masks:
            self._masks.add((running.path, place))
            first = found.zoom.masks[0]
            self.notes[f"{label(running.path)}:output{place}"] = f"-inf written on purpose, by {first}"
            return
        self._found = True
        series = found.series(place, tensor.dtype)
        evidence = {"seen_at": str(Series(running.path, "output", place)), "value": told(row)} | found.evidence
        self._say(series, found, "forward", evidence, row)

    def _blame(self, running: Running, state: _State) -> _Blame:
        above, at = state, running
        masked: Running | None = None
        while above.kind in ("non-finite", "masked"):
            if above.kind == "masked" and masked is None:
                masked = at
            if at.parent is None:
                break
            at = at.parent
            above = _inputs(at)
        if above.kind == "non-finite" and masked is None:
            return _of_batch(at, above)
        if above.kind in ("non-finite", "masked"):
            assert masked is not None
            at, above = masked, _inputs(masked)
        return _of_call(at, above, own_code=at is not running, zooms=self.zooms)

    # ------------------------------------------------------------ backward

    def backward(self, running: Running, place: str, key: Any, row: Row) -> None:
        """A non-finite gradient has arrived at the output of a call."""
        if self._found or self.scaled_backward():
            return
        self._found = True
        users = [user for user in self._session.users(key) if user.finite_grads] if key is not None else []
        reached = [user for user in users if user.arrived]
        candidates = sorted(reached, key=_depth, reverse=True) or _ancestors(running)
        evidence = {"seen_at": str(Series(running.path, "grad_output", place)), "value": told(row)}
        found: _Blame | None = None
        for candidate in candidates[:4]:
            blame = _of_backward(candidate, candidate not in reached, zooms=self.zooms)
            if found is None or (blame.zoom is not None and blame.zoom.reproduced):
                found = blame
            if blame.zoom is not None and blame.zoom.reproduced:
                break
        if found is None:
            message = (
                f"the gradient that arrives at the output of {label(running.path)} is not finite: it comes from what "
                "is computed after it, such as the loss"
            )
            found = _Blame(running, message, role="victim")
        self._say(found.series("", None, "grad_output"), found, "backward", evidence | found.evidence, row)

    def parameter(self, path: str, name: str, type_name: str, dtype: torch.dtype, row: Row) -> None:
        """The gradient of a parameter is not finite, and those of all outputs were."""
        if self._found or self.scaled_backward():
            return
        self._found = True
        message = f"the gradient of {name} holds {counts(row)}, though those of all watched outputs were finite"
        series = Series(path, "parameter_grad", name, type_name, str(dtype).removeprefix("torch."))
        self._say(series, _Blame(None, message), "backward", {"value": told(row)}, row)

    def loss(self, row: Row) -> None:
        """The loss is not finite."""
        if self._found or self.scaled_backward():
            return
        self._found = True
        message = f"the loss is {_kind(row)}, though all watched outputs were finite: its own code made it"
        self._say(Series("", "loss", "", "", ""), _Blame(None, message), "forward", {"value": told(row)}, row)

    def _say(self, series: Series, found: _Blame, direction: str, evidence: dict[str, Any], row: Row) -> None:
        if self._told:
            return
        self._told = True
        message = found.message or f"finite went in, {counts(row)} came out"
        zoomed, call = found.zoom, found.running
        if zoomed is not None and zoomed.reproduced:
            evidence |= {"zoom": zoomed.to_json()}
        elif zoomed is not None:
            evidence |= {"zoom_failed": zoomed.reason}
        incident = Incident(
            rule=RULE,
            severity="error",
            step=self._session.step,
            series=series,
            message=message,
            call=0 if call is None else call.number,
            role=found.role,
            direction=direction,
            evidence=evidence,
            operation=zoomed.operation if zoomed is not None and zoomed.reproduced else "",
            operation_line=zoomed.line if zoomed is not None and zoomed.reproduced else "",
            time=time.time(),
        )
        self._tell(incident, None if call is None else Case(call, direction == "backward"))


# ---------------------------------------------------------------- what went in


class _State(NamedTuple):
    """What went into a call.

    ``told`` has layout and summary of each tensor for JSON, ``first`` is the place of the first one that is not finite
    and ``counts`` says what it holds. ``kind`` is ``"finite"``, ``"masked"`` (nothing but -inf), ``"non-finite"`` or
    ``"overwritten"``.
    """

    kind: str
    told: dict[str, dict[str, Any]]
    first: str = ""
    counts: str = ""


def _inputs(running: Running) -> _State:
    args, kwargs = running.held or (running.args, running.kwargs)
    leaves, structure = flatten_call(args, kwargs)
    told: dict[str, dict[str, Any]] = {}
    kind, first, held = "finite", "", ""
    for place, leaf in zip(paths_of(structure), leaves, strict=True):
        if not isinstance(leaf, Tensor):
            continue
        one = summarize(leaf)
        dtype = str(leaf.dtype).removeprefix("torch.")
        told[place] = {"shape": list(leaf.shape), "dtype": dtype, "device": str(leaf.device)} | one.to_dict()
        if one.nan or one.inf > one.neg_inf:
            kind, first, held = "non-finite", first or place, held or counts_of(one)
        elif one.inf and kind == "finite":
            kind = "masked"
    if kind != "finite" and running.overwritten():
        kind = "overwritten"
    return _State(kind, told, first, held)


def _bad_parameter(module: nn.Module | None) -> tuple[str, Summary] | None:
    for name, tensor in () if module is None else (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        found = summarize(tensor)
        if not found.finite:
            return name, found
    return None


# ---------------------------------------------------------------- who it was


class _Blame(NamedTuple):
    running: Running | None
    message: str = ""
    zoom: Zoom | None = None
    evidence: dict[str, Any] = {}  # noqa: RUF012 - never written to
    role: str = "producer"
    port: str = ""
    name: str = ""

    def series(self, place: str, dtype: torch.dtype | None, port: str = "output") -> Series:
        running = self.running
        assert running is not None
        path, type_name = running.path, running.type_name
        inside = self.zoom.path if self.zoom is not None and self.zoom.reproduced else ""
        if inside and self.port in ("", "grad_input"):
            module = running.module()
            path = f"{path}.{inside}" if path else inside
            with contextlib.suppress(AttributeError):
                type_name = type(module.get_submodule(inside)).__name__ if module is not None else ""
            place = ""
        if self.port == "parameter" and "." in self.name:
            inner, _, own = self.name.rpartition(".")
            return Series(f"{path}.{inner}" if path else inner, self.port, own, "", "")
        told = "" if dtype is None else str(dtype).removeprefix("torch.")
        return Series(path, self.port or port, self.name or place, type_name, told)


def _of_call(running: Running, state: _State, *, own_code: bool, zooms: bool) -> _Blame:
    evidence = _described(running, state)
    module = running.module()
    bad = _bad_parameter(module)
    if bad is not None:
        name, found = bad
        message = f"{name} itself holds {counts_of(found)}; what went in was finite"
        return _Blame(running, message, None, evidence | {name: found.to_dict()}, port="parameter", name=name)
    zoomed: Zoom | None = None
    if module is not None and zooms:
        zoomed = zoom(module, running.args, running.kwargs, rng=running.rng, autocast=running.autocast)
    message = ""
    if own_code and not (zoomed is not None and zoomed.reproduced and zoomed.path):
        message = "its own code made it, between the modules that it calls"
    if state.kind == "overwritten":
        message = "its input was overwritten in place, so whether that was finite is not known"
    return _Blame(running, message, zoomed, evidence)


def _of_batch(running: Running, state: _State) -> _Blame:
    message = f"the batch itself holds {state.counts}, in {state.first}"
    return _Blame(running, message, None, _described(running, state), port="input", name=state.first)


def _of_backward(running: Running, own_code: bool, *, zooms: bool) -> _Blame:
    state = _inputs(running)
    evidence = _described(running, state)
    module = running.module()
    zoomed: Zoom | None = None
    if module is not None and running.held is not None and running.grads and zooms:
        args, kwargs = running.held
        zoomed = zoom(module, args, kwargs, grad_outputs=running.grads, rng=running.rng, autocast=running.autocast)
    message = "the gradient of its output was finite, what it sent on was not"
    if own_code:
        message = "the gradient of its output was finite, what its own code made of it was not"
    return _Blame(running, message, zoomed, evidence, port="grad_input")


def _depth(running: Running) -> int:
    depth, at = 0, running.parent
    while at is not None:
        depth, at = depth + 1, at.parent
    return depth


def _ancestors(running: Running) -> list[Running]:
    """The calls around it whose gradients have come and were finite, innermost first."""
    found, at = [], running.parent
    while at is not None:
        if at.arrived and at.finite_grads:
            found.append(at)
        at = at.parent
    return found


# ---------------------------------------------------------------- words


def _described(running: Running, state: _State) -> dict[str, Any]:
    return {"inputs": state.told, "called_at": _line(), "module": running.type_name}


def _line() -> str:
    """The source line outside torch and Hookline that is running."""
    found = where({}, None)
    if not found.is_users:
        return ""
    return f"{found.line}: {found.text}" if found.text else found.line


def _kind(row: Row) -> str:
    return "NaN" if row[NAN] else "-Inf" if row[NEG_INF] else "Inf"
