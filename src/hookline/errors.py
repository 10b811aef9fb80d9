"""Every error that Hookline raises.

HooklineError
├── SiteError       (LookupError)   a path, pattern or port that names nothing, or a value that was not recorded
├── ArgumentError   (TypeError)     an argument of the wrong kind: a hook that cannot be called, a model that is none
├── OptionError     (ValueError)    an argument of the right kind with a value that cannot be used
├── HookError       (RuntimeError)  a hook gave back something that cannot stand in the place of what it got
│   └── MutationError               a hook wrote into a gradient that it was only shown
├── SharedMemoryError (RuntimeError)  an in-place write that autograd cannot follow through an observed call
├── CoverageError   (RuntimeError)  with strict=True, a site that was asked for was not captured
├── IncidentError   (FloatingPointError)  a watch with on_incident="raise" has found something
├── BudgetError     (MemoryError)   keeping one more value would pass the byte budget
├── QuotaError      (OSError)       writing one more value would pass the quota on disk
└── FormatError     (ValueError)    a recording on disk is missing, truncated, foreign or inconsistent

Each has a second parent from the standard library, so that an ``except LookupError`` that people already have works.
The message says what was wrong, what was got and wanted, and what to do next.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArgumentError",
    "BudgetError",
    "CoverageError",
    "FormatError",
    "HookError",
    "HooklineError",
    "IncidentError",
    "MutationError",
    "OptionError",
    "QuotaError",
    "SharedMemoryError",
    "SiteError",
]


class HooklineError(Exception):
    """Parent of every error that Hookline raises."""


class SiteError(HooklineError, LookupError):
    """A path, pattern or port names nothing, or a value was not recorded."""


class ArgumentError(HooklineError, TypeError):
    """An argument is of the wrong kind."""


class OptionError(HooklineError, ValueError):
    """An argument is of the right kind, but its value cannot be used."""


class HookError(HooklineError, RuntimeError):
    """A hook gave back something that cannot take the place of what it was given."""


class MutationError(HookError):
    """A hook wrote into a gradient that it was only shown."""


class SharedMemoryError(HooklineError, RuntimeError):
    """An in-place write reached a tensor along a way that autograd cannot follow through an observed call."""


class CoverageError(HooklineError, RuntimeError):
    """A site that was asked for was not captured.

    Attributes:
        coverage: The fate of every site.
    """

    def __init__(self, message: str, coverage: Any = None) -> None:
        super().__init__(message)
        self.coverage = coverage


class IncidentError(HooklineError, FloatingPointError):
    """A watch with ``on_incident="raise"`` has found something.

    Attributes:
        incident: What it has found.
    """

    def __init__(self, message: str, incident: Any = None) -> None:
        super().__init__(message)
        self.incident = incident


class BudgetError(HooklineError, MemoryError):
    """Keeping one more value would pass the byte budget."""


class QuotaError(HooklineError, OSError):
    """Writing one more value would pass the quota on disk."""


class FormatError(HooklineError, ValueError):
    """A recording on disk is missing, truncated, foreign or inconsistent."""
