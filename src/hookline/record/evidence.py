"""What a recorder notices of each module, and the fate of its sites that follows from it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hookline.hooks import original_class, unreachable
from hookline.hooks.running import running
from hookline.hooks.torch_private import is_compiled, version
from hookline.record.coverage import BYPASSED, CAPTURED, NOT_REACHED, Coverage, Fate
from hookline.report.text import plural
from hookline.sites import Site, label

__all__ = ["Evidence", "coverage_of", "leave_out"]


class Evidence:
    """What was noticed of one module; threads add to it.

    Attributes:
        calls: Calls that began, in the steps that are recorded and without recomputations.
        failed: Those of them that raised, with the name of the last error.
        no_grad, inference: Those that ran under ``torch.no_grad`` and ``torch.inference_mode``.
        wants_grad: Those with an output that requires a gradient.
        input_wants_grad: Those with an argument that requires one.
        captured: Calls of which a value was kept, by port.
        empty: Calls whose value held no tensor, by port.
        refused: Ports of which a value came that was not kept, since the recording had ended.
        left_out: By port, how many values could not be stored, of how many calls, and why the first could not.
        used_by: How a function used a parameter without calling the module.
        fused: The class above whose fused path was left for this one.
        tracer: The tracer that looked at a call.
    """

    def __init__(self, module: nn.Module) -> None:
        self.gradients_before = _gradients(module)
        self.lock = threading.Lock()
        self.calls = self.failed = self.no_grad = self.inference = 0
        self.wants_grad = self.input_wants_grad = 0
        self.error = ""
        self.captured: dict[str, int] = {}
        self.empty: dict[str, int] = {}
        self.refused: set[str] = set()
        self.left_out: dict[str, tuple[int, int, str]] = {}
        self.used_by = ""
        self.fused = ""
        self.tracer = ""

    def begin(self) -> None:
        """A call begins."""
        with self.lock:
            self.calls += 1
            if not torch.is_grad_enabled():
                self.no_grad += 1
                self.inference += torch.is_inference_mode_enabled()

    def ended(self, output_wants: bool, input_wants: bool) -> None:
        """A call has given its output."""
        with self.lock:
            self.wants_grad += output_wants
            self.input_wants_grad += input_wants

    def fail(self, error: BaseException) -> None:
        """A call has raised."""
        with self.lock:
            self.failed += 1
            self.error = type(error).__name__

    def keep(self, port: str, *, empty: bool) -> None:
        """The first value of a call was kept at a port."""
        counts = self.empty if empty else self.captured
        with self.lock:
            counts[port] = counts.get(port, 0) + 1

    def leave_out(self, port: str, backward: int, error: Exception) -> None:
        """A value cannot be stored."""
        with self.lock:
            values, calls, why = self.left_out.get(port, (0, 0, ""))
            self.left_out[port] = values + 1, calls + (backward == 0), why or str(error)

    def use(self, function: str, user: str | None) -> None:
        """A function used a parameter of the module, which was not called."""
        if not self.used_by:
            self.used_by = f"{function}() used its parameter{'' if user is None else f' in {user}'}{_place()}"


def leave_out(evidence: Mapping[str, Evidence], event: Any, error: Exception) -> None:
    """A value cannot be stored."""
    evidence[event.path].leave_out(event.port, event.backward, error)


def _place() -> str:
    """File and line of the code that is running, outside torch and outside Hookline."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "hookline.")) and name != "torch":
            return f" ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def coverage_of(
    model: nn.Module | None,
    sites: Iterable[Site],
    modules: Mapping[str, nn.Module | None],
    evidence: Mapping[str, Evidence],
    forwards: int,
) -> Coverage:
    """The fate of every site.

    Args:
        model: The root; None when it is gone.
        sites: What was asked for.
        modules: The module of each path, as it was when the recording began; None for one that is gone.
        evidence: What was noticed, by path.
        forwards: Forwards of the root in the steps that are recorded.
    """
    return Coverage(map(_Judge(model, modules, evidence, forwards).fate, sites))


class _Judge:
    """Decides site by site; the arguments are those of ``coverage_of``."""

    def __init__(
        self,
        model: nn.Module | None,
        modules: Mapping[str, nn.Module | None],
        evidence: Mapping[str, Evidence],
        forwards: int,
    ) -> None:
        self._model = model
        self._now = {} if model is None else dict(model.named_modules(remove_duplicate=False))
        self._modules = modules
        self._evidence = evidence
        self._forwards = forwards
        self._inside = {id(tap.module()) for tap in running()}  # of calls of this thread that have not returned
        self._any_call = any(seen.calls for seen in evidence.values())
        self._any_gradient = any(
            seen.captured.get(port) for seen in evidence.values() for port in ("grad_output", "grad_input")
        )

    def fate(self, site: Site) -> Fate:
        seen = self._evidence[site.path]
        captured = min(seen.captured.get(site.port, 0), seen.calls)
        is_gradient = site.port.startswith("grad")
        if not captured and not is_gradient and seen.empty.get(site.port):
            captured = min(seen.empty[site.port], seen.calls)
        left_out = seen.left_out.get(site.port)
        if left_out is not None:
            captured = max(0, captured - left_out[1])
        if captured:
            return Fate(str(site), CAPTURED, captured, self._note(site, seen, captured))
        if seen.calls == 0:
            status, reason = self._not_called(site.path, seen)
            return Fate(str(site), status, 0, reason)
        if left_out is not None:
            return Fate(str(site), BYPASSED, 0, _left_out(left_out))
        return Fate(str(site), BYPASSED, 0, self._missing(site, seen, seen.calls))

    # ------------------------------------------------------------ it ran

    def _note(self, site: Site, seen: Evidence, captured: int) -> str:
        """What has to be known of a site that was captured."""
        notes = []
        left_out = seen.left_out.get(site.port, (0, 0, ""))
        if left_out[0]:
            notes.append(_left_out(left_out))
        missing = seen.calls - captured - left_out[1]
        if missing > 0:
            notes.append(f"{missing} of {plural(seen.calls, 'call')} missing: {self._missing(site, seen, missing)}")
        if replaced := self._replaced(site.path):
            notes.append(f"{replaced}; later calls were not seen")
        if seen.fused:
            notes.append(f"{seen.fused} ran its plain path in the place of the fused one, which calls no sub-module")
        if seen.used_by:
            notes.append(f"besides, {seen.used_by}")
        return "; ".join(notes)

    def _missing(self, site: Site, seen: Evidence, missing: int) -> str:
        return self._no_gradient(site, seen, missing) if site.port.startswith("grad") else self._failed(seen)

    def _is_inside(self, path: str) -> bool:
        """Whether this thread is in a call of the module: the recording ends there."""
        module = self._modules.get(path) if path in self._modules else self._now.get(path)
        return module is not None and id(module) in self._inside

    def _failed(self, seen: Evidence) -> str:
        return f"it raised {seen.error}" if seen.failed else _ENDED

    def _no_gradient(self, site: Site, seen: Evidence, missing: int) -> str:
        if seen.failed == seen.calls:
            return self._failed(seen)
        if site.port in seen.refused:
            return _ENDED
        if missing - seen.failed == 1 and self._is_inside(site.path):
            return _CUT
        if seen.inference == seen.calls:
            return "it ran in torch.inference_mode(), which makes no graph"
        if seen.no_grad == seen.calls:
            return "it ran under torch.no_grad(), which makes no graph"
        if seen.wants_grad == 0:
            return "its output requires no gradient"
        if site.port == "grad_input" and seen.input_wants_grad == 0:
            return "none of its arguments requires a gradient"
        if not self._any_gradient and not seen.empty.get(site.port):
            return "no backward pass ran while it was recorded"
        if site.port == "grad_input" and (seen.captured.get("grad_output") or seen.empty.get("grad_input")):
            return "no gradient came through it to its arguments"
        return "no gradient reached its output: no loss that depends on it ran backward, or it was detached on the way"

    # ------------------------------------------------------------ it did not run

    def _not_called(self, path: str, seen: Evidence) -> tuple[str, str]:
        module = self._modules.get(path)
        if module is not None and (hidden := unreachable(module)):
            return BYPASSED, hidden
        if self._forwards == 0 and not self._any_call and not (seen.used_by or seen.tracer):
            return NOT_REACHED, self._replaced(path) or "the model was not called"
        for reason in self._passed_by(path, seen):
            if reason:
                return BYPASSED, reason
        changed = [] if module is None else self._changed_gradients(module, seen)
        if None in changed:
            return BYPASSED, "its parameters got gradients, though no recorded call used them"
        reason = self._above(path, module)
        if changed:
            reason += "; its gradients were written to, so its parameters may have been used without a call"
        return NOT_REACHED, reason

    def _passed_by(self, path: str, seen: Evidence) -> Iterable[str | None]:
        yield seen.used_by and f"{seen.used_by}, without calling it"
        yield seen.tracer and f"{seen.tracer} looked at it; what was traced runs without it"
        yield self._replaced(path)
        yield self._compiled(path)

    def _changed_gradients(self, module: nn.Module, seen: Evidence) -> list[object]:
        """The gradients that parameters had before, where they have others now; not those that a called module has."""
        now = zip(module.parameters(recurse=False), _gradients(module), seen.gradients_before, strict=False)
        return [
            before
            for parameter, gradient, before in now
            if gradient not in (None, before) and id(parameter) not in self._of_called
        ]

    @functools.cached_property
    def _of_called(self) -> set[int]:
        """Ids of the parameters of the modules that were called."""
        called = (self._modules.get(path) for path, seen in self._evidence.items() if seen.calls)
        return {
            id(parameter) for module in called if module is not None for parameter in module.parameters(recurse=False)
        }

    def _replaced(self, path: str) -> str:
        """Whether something else stands where the module stood."""
        now = self._now.get(path)
        if self._model is None or (now is not None and now is self._modules.get(path)):
            return ""
        if now is not None:
            name = original_class(now).__name__
            return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name} was put in its place while it was recorded"
        return "it was taken out of the model while it was recorded"

    def _compiled(self, path: str) -> str:
        names = path.split(".") if path else []
        for end in range(len(names), -1, -1):
            above = self._now.get(".".join(names[:end]))
            if above is not None and is_compiled(above):
                return f"torch.compile compiled {label('.'.join(names[:end]))}, and compiled code passes by hooks"
        return ""

    def _above(self, path: str, module: nn.Module | None) -> str:
        """What the nearest module above that can be called has done."""
        names = path.split(".")
        for end in range(len(names) - 1, -1, -1):
            above = ".".join(names[:end])
            calls = self._calls_of(above)
            if calls is None:
                continue
            if calls == 0:
                return f"{label(above)} above it did not run"
            if calls == 1 and self._is_inside(above):
                return f"{label(above)} above it had not returned when the recording ended"
            fused = "; a fused function may do its work" if isinstance(module, _DROPOUTS) else ""
            return f"{label(above)} ran {plural(calls, 'time')} without calling it{fused}"
        return "it was not called"

    def _calls_of(self, path: str) -> int | None:
        """None where that is not known, or a container that nothing calls."""
        if path == "":
            return self._forwards or None
        module = self._modules.get(path)
        if path not in self._evidence or module is None or unreachable(module):
            return None
        return self._evidence[path].calls


def _left_out(left_out: tuple[int, int, str]) -> str:
    return f"{plural(left_out[0], 'value')} left out: {left_out[2]}"


_ENDED = "the recording had ended by then"
_CUT = "it had not returned when the recording ended"
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _gradients(module: nn.Module) -> tuple[tuple[int, int | None] | None, ...]:
    """Of each of the module's own parameters, which gradient it has, and how often that was written."""
    gradients = (
        None if nn.parameter.is_lazy(parameter) else parameter.grad for parameter in module.parameters(recurse=False)
    )
    return tuple(None if gradient is None else (id(gradient), version(gradient)) for gradient in gradients)
