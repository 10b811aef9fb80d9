"""Look for damage: read every byte of a recording and compare it with its checksums.

  hookline verify run.hookline

One line for each thing that is wrong, and one that sums up. The exit status is 0 when nothing is wrong, 1 when
something is, and 2 when there is no recording of that name. An append that was cut off when its process was killed is
no damage: the recording ends before it, and a line says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hookline.cli.parser import Parser, encodable, parser_of
from hookline.report.text import plural, size_text
from hookline.store import Report
from hookline.store import verify as look

__all__ = ["main", "parser"]

_DAMAGED = 1


def parser() -> Parser:
    """The options."""
    made = parser_of(sys.modules[__name__], "DIR")
    made.add_argument("folder", metavar="DIR", help="a recording, such as run.hookline")
    return made


def main(argv: Sequence[str], *, own_process: bool) -> int:
    """Print what is wrong with a recording.

    Args:
        argv: What stands behind ``hookline verify``.
        own_process: Makes no difference here.

    Returns:
        Exit status: 1 when something is wrong.
    """
    folder = parser().parse_args(argv).folder
    report = look(folder)
    for problem in report.problems:
        print(encodable(" ".join(problem.split())))
    for manifest in report.torn:
        print(
            encodable(f"{manifest}: its last line is unfinished and does not count: an append was cut off or goes on")
        )
    print(encodable(f"{Path(folder).name or folder}: {_summary(report)}"), flush=True)
    return _DAMAGED if report.problems else 0


def _summary(report: Report) -> str:
    counts = {"writer": report.writers, "event": report.events, "shard": report.shards}
    listed = [*(plural(count, noun) for noun, count in counts.items()), size_text(report.nbytes)]
    found = plural(len(report.problems), "problem") if report.problems else "no problem"
    return f"{', '.join(listed)}: {found} found"
