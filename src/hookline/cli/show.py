"""Print the table of a recording: shape, dtype and statistics of each site, trouble marked.

hookline show run.hookline
hookline show run.hookline --site 'layer1.**' --port grad_output
hookline show run.hookline --values | less
hookline show run.hookline --coverage
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from hookline.cli.parser import Parser, encodable, parser_of
from hookline.errors import OptionError
from hookline.record import load
from hookline.report.table import WIDTH, render
from hookline.sites import PORTS, check_ports

__all__ = ["main", "parser"]

_NARROWEST = 20


def parser() -> Parser:
    """The options."""
    made = parser_of(sys.modules[__name__], "FILE [options]")
    made.add_argument("file", metavar="FILE", help="a recording, such as run.hookline")
    made.add_argument(
        "--site",
        action="append",
        metavar="PATTERN",
        help="only these modules or sites, such as 'layer1.*' or 'conv1:output'; may be repeated (default: all)",
    )
    made.add_argument("--port", metavar="PORT", help=f"only this port: {', '.join(PORTS)}")
    made.add_argument("--values", action="store_true", help="add the first values of each tensor")
    made.add_argument("--coverage", action="store_true", help="print what became of each site, and why, in its place")
    made.add_argument("--width", type=int, metavar="N", help="columns to use (default: those of the terminal, or 100)")
    return made


def main(argv: Sequence[str], *, own_process: bool) -> int:
    """Print the table.

    Args:
        argv: What stands behind ``hookline show``.
        own_process: Makes no difference here.
    """
    given = parser().parse_args(argv)
    width = _terminal_width() if given.width is None else given.width
    if width < _NARROWEST:
        raise OptionError(f"--width is a number from {_NARROWEST} on; got {width}")
    pattern, recording = _pattern(given.site, given.port), load(given.file)
    if given.coverage:
        text = str((recording if pattern is None else recording.select(pattern)).coverage)
        if "coverage" not in recording.info:
            text = "the coverage is not known: the recording goes on, or its writer was killed"
    else:
        text = render(recording, width=width, site=pattern, values=given.values, color=_color())
    print(encodable(text), flush=True)
    return 0


def _pattern(sites: list[str] | None, port: str | None) -> list[str] | None:
    if port is None:
        return sites
    check_ports(port)
    chosen = sites or []
    if all(site.startswith("!") for site in chosen):
        chosen = ["**", *chosen]
    return [site if site.rpartition(":")[2] in PORTS else f"{site}:{port}" for site in chosen]


def _terminal_width() -> int:
    return max(shutil.get_terminal_size((WIDTH, 24)).columns, _NARROWEST) if sys.stdout.isatty() else WIDTH


def _color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
