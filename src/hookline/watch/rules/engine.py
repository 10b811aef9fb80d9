"""Asks all rules about each step, and says each finding once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from hookline.errors import ArgumentError, OptionError
from hookline.spelling import name_of
from hookline.watch.incident import Incident
from hookline.watch.rules.rule import Finding, Rule
from hookline.watch.series import Series
from hookline.watch.window import Window

__all__ = ["Engine"]


class Engine:
    """Asks the rules at each step.

    Args:
        rules: Whose names differ.

    Attributes:
        size: Steps that the window needs.

    Raises:
        ArgumentError: One of them is no rule.
        OptionError: Two have one name.
    """

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        for one in self.rules:
            if not isinstance(one, Rule):
                hint = f'; write rule("name", {name_of(one)})' if callable(one) else ""
                raise ArgumentError(f"rules are Rule of hookline.watch.rules; got {one!r:.100}{hint}")
        names = [one.name for one in self.rules]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise OptionError(
                f"each rule has a name of its own; twice there: {', '.join(twice)}. To change a rule, put "
                "dataclasses.replace(rule, ...) in its place"
            )
        self.size = max((one.window for one in self.rules), default=1)
        self._seen: dict[str, dict[int | None, int]] = {name: {} for name in names}
        self._failed: set[str] = set()

    def check(self, window: Window) -> list[Incident]:
        """What is to be told about the newest step; call, rank and time are for the caller to fill in.

        An exception in a rule becomes a finding, once for each rule, and the others are asked nevertheless.

        Args:
            window: With the newest step in it; of at least ``size`` steps.

        Raises:
            OptionError: The window is too short.
        """
        if window.size < self.size:
            raise OptionError(f"the rules look at {self.size} steps; the window keeps {window.size}")
        if not len(window):
            return []
        told: list[Incident] = []
        for one in self.rules:
            try:
                found = list(one.check(window, one))
                fresh = [finding for finding in found if self._is_fresh(one, finding, window.count)]
                told += [_told(one, finding, window) for finding in _few(fresh)]
            except Exception as error:
                told += self._failure(one, error, window)
        return told

    def _is_fresh(self, asking: Rule, finding: Finding, now: int) -> bool:
        """Whether neither it nor one of those that it stands for was found a short time ago."""
        seen = self._seen[asking.name]
        keys = (finding.series, *finding.others)
        before = [seen[key] for key in keys if key in seen]
        seen.update(dict.fromkeys(keys, now))
        if asking.cooldown is None:
            return not before
        return not before or now - max(before) - 1 > asking.cooldown

    def _failure(self, asking: Rule, error: Exception, window: Window) -> list[Incident]:
        if asking.name in self._failed:
            return []
        self._failed.add(asking.name)
        message = f"the rule {asking.name!r} raised {type(error).__name__}: {error}; told once"
        evidence = {"error": type(error).__name__}
        return [Incident(asking.name, "error", int(window.steps[-1]), _MODEL, message, evidence=evidence)]


_MODEL = Series("", "output")
_MOST = 8
"""Findings of one rule in one step that are told one by one: what is wrong everywhere is not said 800 times."""
_DIRECTION = {"output": "forward", "loss": "forward", "grad_output": "backward", "parameter_grad": "backward"}


def _few(findings: list[Finding]) -> list[Finding]:
    """The first ones; the last of them stands for those that are left out."""
    if len(findings) <= _MOST:
        return findings
    rest = (number for one in findings[_MOST:] for number in (one.series, *one.others) if number is not None)
    last = findings[_MOST - 1]
    return [*findings[: _MOST - 1], dataclasses.replace(last, others=(*last.others, *rest))]


def _told(asking: Rule, finding: Finding, window: Window) -> Incident:
    series = _MODEL if finding.series is None else window.series[finding.series]
    evidence = {name: _for_json(value) for name, value in finding.evidence.items()}
    if finding.others:
        evidence["others"] = len(finding.others)
        evidence["other_series"] = [str(window.series[number]) for number in finding.others[:5]]
    return Incident(
        asking.name,
        finding.severity or asking.severity,
        int(window.steps[-1]),
        series,
        finding.message,
        direction="" if finding.series is None else _DIRECTION.get(series.port, "update"),
        evidence=evidence,
    )


def _for_json(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
