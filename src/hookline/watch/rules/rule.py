"""What a rule is, what it finds, and how a user's function becomes one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hookline.errors import OptionError
from hookline.watch.series import PORTS, Series
from hookline.watch.window import Window

__all__ = ["Check", "Finding", "Rule", "SiteHistory", "rule"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a rule found at the newest step.

    Attributes:
        series: Number of the series in the window; None for the model as a whole.
        message: One sentence.
        evidence: Numbers and names, for JSON.
        severity: Where it differs from that of the rule.
        others: Further series with the same finding, which are not told one by one.
    """

    series: int | None
    message: str
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    severity: str | None = None
    others: tuple[int, ...] = ()


Check = Callable[[Window, "Rule"], Iterable[Finding]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule as data; ``dataclasses.replace(rule, threshold=...)`` makes another one of it.

    Attributes:
        name: As incidents and options have it.
        check: Gives what it finds at the newest step of a window.
        meaning: What a finding says, in one sentence.
        ports: At which ports it looks.
        threshold: From where on it finds; two numbers are a range outside of which it finds.
        window: Steps that it looks at, the newest included.
        severity: ``"error"`` or ``"warning"``.
        cooldown: A finding is told again once it was absent for more than so many steps; None: once only.
    """

    name: str
    check: Check
    meaning: str = ""
    ports: tuple[str, ...] = PORTS
    threshold: float | tuple[float, float] = 0.0
    window: int = 1
    severity: str = "warning"
    cooldown: int | None = 50

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise OptionError(f"a rule's name is a text that is not empty; got {self.name!r}")
        if not callable(self.check):
            raise OptionError(f"{self._says('check')} a function of (window, rule); got {self.check!r:.100}")
        if not _is_count(self.window, 1):
            raise OptionError(f"{self._says('window')} a whole number of at least 1; got {self.window!r}")
        if self.cooldown is not None and not _is_count(self.cooldown, 0):
            raise OptionError(f"{self._says('cooldown')} None or a whole number of at least 0; got {self.cooldown!r}")
        if self.severity not in ("error", "warning"):
            raise OptionError(f'{self._says("severity")} "error" or "warning"; got {self.severity!r}')
        if not isinstance(self.ports, tuple) or not self.ports or not set(self.ports) <= set(PORTS):
            raise OptionError(f"{self._says('ports')} a tuple of some of {PORTS}; got {self.ports!r}")
        self._check_threshold()

    def _check_threshold(self) -> None:
        given = self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)
        numbers = [one for one in given if isinstance(one, int | float) and not isinstance(one, bool) and one >= 0]
        if len(numbers) != len(given) or len(given) > 2 or sorted(numbers) != numbers:
            raise OptionError(
                f"{self._says('threshold')} a number of at least 0, or a range (low, high) of two; "
                f"got {self.threshold!r}"
            )

    def _says(self, field: str) -> str:
        return f"the {field} of rule {self.name!r} is"

    @property
    def limit(self) -> float:
        """The threshold as one number; the upper end of a range."""
        return self.threshold[1] if isinstance(self.threshold, tuple) else self.threshold


class SiteHistory:
    """What a user's rule sees of one series: the steps that have it, oldest first.

    Attributes:
        series: Which one.
        steps: Numbers of those steps, int64, shape (steps,).
    """

    def __init__(self, window: Window, number: int, last: int) -> None:
        self.series: Series = window.series[number]
        self._window, self._number, self._last = window, number, last
        self._there = ~np.isnan(window.field("numel", last)[:, number])
        self.steps: npt.NDArray[np.int64] = window.steps[-len(self._there) :][self._there]

    def __len__(self) -> int:
        return len(self.steps)

    def field(self, name: str) -> npt.NDArray[np.float64]:
        """One of ``hookline.watch.FIELDS``, or ``"rms"`` or ``"absmax"``, shape (steps,), a copy."""
        return self._window.field(name, self._last)[:, self._number][self._there]


def rule(
    name: str,
    function: Callable[[Any], Any],
    *,
    of: str = "series",
    ports: tuple[str, ...] = PORTS,
    window: int = 50,
    severity: str = "warning",
    cooldown: int | None = 50,
) -> Rule:
    """Make a rule of a function.

    Args:
        name: Of the rule.
        function: With ``of="series"``: takes the ``SiteHistory`` of each series that the newest step has, and gives
            None or a message. With ``of="window"``: takes the ``Window``, and gives None, a message or ``Finding``s.
        of: ``"series"`` or ``"window"``.
        ports: Whose series it is asked about.
        window: Steps of which it is told; fewer in the beginning.
        severity: ``"error"`` or ``"warning"``.
        cooldown: As in ``Rule``.

    Raises:
        OptionError: An option cannot be used.
    """
    if not callable(function):
        raise OptionError(f"rule {name!r} takes a function; got {function!r:.100}")
    if of not in ("series", "window"):
        raise OptionError(f'rule {name!r} is of="series" or of="window"; got of={of!r}')
    meaning = (getattr(function, "__doc__", None) or "").strip().split("\n")[0]
    check = _of_series(function) if of == "series" else _of_window(function)
    return Rule(name, check, meaning, ports, window=window, severity=severity, cooldown=cooldown)


def _of_series(function: Callable[[SiteHistory], str | None]) -> Check:
    def check(window: Window, asking: Rule) -> Iterable[Finding]:
        there = window.field("numel", 1)[0]
        for number in window.at(asking.ports).tolist():
            if not math.isnan(there[number]):
                message = function(SiteHistory(window, number, asking.window))
                if message is not None:
                    yield Finding(number, _text(message, asking))

    return check


def _of_window(function: Callable[[Window], Any]) -> Check:
    def check(window: Window, asking: Rule) -> Iterable[Finding]:
        given = function(window)
        if given is None:
            return []
        if isinstance(given, Finding | str):
            given = [given]
        return [one if isinstance(one, Finding) else Finding(None, _text(one, asking)) for one in given]

    return check


def _text(message: object, asking: Rule) -> str:
    if not isinstance(message, str):
        raise OptionError(f"the function of rule {asking.name!r} gives None or a message; got {message!r:.100}")
    return message


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
