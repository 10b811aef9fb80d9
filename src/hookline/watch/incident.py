"""A finding of a watch, with its evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hookline.errors import FormatError
from hookline.watch.series import Series

__all__ = ["Incident"]


@dataclasses.dataclass(frozen=True)
class Incident:
    """A finding of a watch.

    Attributes:
        rule: Name of the rule, such as ``"non-finite"``.
        severity: ``"error"`` or ``"warning"``.
        step: Step in which it was found.
        series: What it is about.
        message: What was found, in one sentence.
        call: Number of the module's call in the step.
        rank: Number of the process.
        role: ``"producer"``: what went in was finite. ``"victim"``: it was not. Empty for other rules.
        direction: ``"forward"``, ``"backward"`` or ``"update"``; empty where that means nothing.
        evidence: Summaries, shapes, dtypes, source line and the like, for JSON.
        operation: First operation that made a non-finite value, such as ``"aten.log.default"``; empty if not known.
        operation_line: Where it was called, such as ``"train.py:31 in forward"``.
        bundle: Folder of what ``hookline replay`` needs, relative to that of the run; empty if there is none.
        time: Seconds since 1970.
    """

    rule: str
    severity: str
    step: int
    series: Series
    message: str
    call: int = 0
    rank: int = 0
    role: str = ""
    direction: str = ""
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    operation: str = ""
    operation_line: str = ""
    bundle: str = ""
    time: float = 0.0

    def __str__(self) -> str:
        where = f"{self.series}, call {self.call}" if self.call else str(self.series)
        role = f"{self.role}, {self.direction}: " if self.role else ""
        made = f" by {self.operation}" if self.operation else ""
        line = f" at {self.operation_line}" if self.operation_line else ""
        return f"step {self.step}: {self.rule} at {where}: {role}{self.message}{made}{line}"

    def to_json(self) -> dict[str, Any]:
        """As one object for JSON; numbers in ``evidence`` must be finite or texts."""
        return dataclasses.asdict(self) | {"series": list(self.series), "evidence": dict(self.evidence)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Incident:
        """Read what ``to_json`` gave.

        Raises:
            FormatError: A field is missing or of another type.
        """
        try:
            series = fields["series"]
            if not isinstance(series, list) or len(series) != 5 or not all(isinstance(part, str) for part in series):
                raise FormatError(f"an incident's series is five texts; got {series!r:.100}")
            given = {name: fields[name] for name in _TYPES}
        except (KeyError, TypeError) as error:
            raise FormatError(f"an incident lacks the field {error}") from error
        for name, value in given.items():
            if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
                raise FormatError(f"an incident's {name} is a {_TYPES[name]}; got {value!r:.100}")
        return cls(series=Series(*series), **given)


_TYPES: dict[str, Any] = {
    "rule": str, "severity": str, "step": int, "message": str, "call": int, "rank": int, "role": str, "direction": str,
    "evidence": dict, "operation": str, "operation_line": str, "bundle": str, "time": (int, float),
}  # fmt: skip
