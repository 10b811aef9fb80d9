"""What to record of a run, checked before anything runs."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

from hookline.errors import OptionError, SiteError
from hookline.record.policy import parse_bytes
from hookline.sites import check_ports, match_paths
from hookline.store.remote import refuse_remote

__all__ = ["Options"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What to record of a run.

    Attributes:
        sites: Patterns as in ``hookline.record``, strings only; each root is searched for them.
        ports: What to record where a pattern names no port.
        steps: How many steps to record of each root; None for all.
        every: Record only every such step: 0, every, 2 * every, ...
        output: Folder of the recording.
        overwrite: Take the place of a recording that is there.
        budget: Most bytes that wait in memory for the end of a step, or a text such as ``"2GB"``.
        quiet: Say nothing but warnings.
        dry: Record nothing; stop the script when a model is called a second time, and print what the step would record.

    Raises:
        OptionError, SiteError: A value that cannot be used, or a pattern that cannot be read.
    """

    sites: tuple[str, ...] = ("**",)
    ports: tuple[str, ...] = ("output",)
    steps: int | None = 1
    every: int = 1
    output: str | os.PathLike[str] = "run.hookline"
    overwrite: bool = False
    budget: int | str = "2GB"
    quiet: bool = False
    dry: bool = False

    def __post_init__(self) -> None:
        check_ports(self.ports)
        refuse_remote(self.output, "hookline run")
        parse_bytes(self.budget)
        if self.steps is not None and self.steps < 1:
            raise OptionError(f"steps is a number from 1 on, or None for all; got {self.steps}.")
        if self.every < 1:
            raise OptionError(f"every is a number from 1 on; got {self.every}.")
        if not self.sites:
            raise OptionError('sites: got no pattern; "**" names every module.')
        for pattern in self.sites:
            _check_readable(pattern)

    @property
    def byte_budget(self) -> int:
        """The budget in bytes."""
        return parse_bytes(self.budget)

    @property
    def last_step(self) -> int | None:
        """Number of the last step that is recorded; None when there is no last."""
        return None if self.steps is None else (self.steps - 1) * self.every

    def wants(self, step: int) -> bool:
        """Whether a step is recorded."""
        return step >= 0 and step % self.every == 0 and (self.last_step is None or step <= self.last_step)

    def place(self, environment: Mapping[str, str]) -> Path:
        """Where this process records: under torchrun every rank has a recording of its own, ``run.rank1.hookline``."""
        path = Path(self.output)
        if environment.get("WORLD_SIZE", "1") == "1" or "RANK" not in environment:
            return path
        return path.with_name(f"{path.stem}.rank{environment['RANK']}{path.suffix}")


def _check_readable(pattern: str) -> None:
    """Tell a broken expression now and not after the run; that a pattern matches can only be told then."""
    try:
        match_paths(pattern, [])
    except SiteError as error:
        if isinstance(error.__cause__, (re.error, OverflowError, RecursionError)):
            raise
