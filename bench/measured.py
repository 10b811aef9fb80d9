"""Ratios with a bound in one direction or the other, and the command line of the scripts that print them."""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from machine import machine
from table import origin, table
from timing import Spread

__all__ = ["Bound", "Measured", "at_least", "at_most", "reported"]

Measure = Callable[[bool, Path], Iterable["Measured"]]
"""Measures, given whether to be quick and an empty folder."""


class Bound(NamedTuple):
    """What a ratio should be: at least ``limit`` when ``least``, else at most."""

    limit: float
    least: bool

    def met(self, value: float) -> bool:
        return value >= self.limit if self.least else value <= self.limit

    def __str__(self) -> str:
        return f"at {'least' if self.least else 'most'} {self.limit:g}"


class Measured(NamedTuple):
    """One line of the table.

    Attributes:
        what: What was measured.
        against: What it is a ratio to.
        value: The ratio, or another number in the unit that ``against`` names.
        bound: Its target; None for a line that only tells.
        told: The same in units.
    """

    what: str
    against: str
    value: Spread
    bound: Bound | None = None
    told: str = ""

    @property
    def met(self) -> bool:
        return self.bound is None or self.bound.met(self.value.median)

    def cells(self) -> list[str]:
        median, low, high = self.value
        verdict = "" if self.bound is None else "yes" if self.met else "NO"
        numbers = f"{median:.2f} [{low:.2f}, {high:.2f}]"
        return [self.what, self.against, numbers, str(self.bound or ""), verdict, self.told]


def at_least(limit: float) -> Bound:
    return Bound(limit, least=True)


def at_most(limit: float) -> Bound:
    return Bound(limit, least=False)


def reported(description: str, explained: str, measure: Measure) -> int:
    """Read the options, measure, print and write the table; the status of the script.

    The files lie in a folder under the temporary directory, which TMPDIR chooses, and are deleted.
    """
    options = _parser(description).parse_args()
    about = machine()
    gc.freeze()  # what the imports have made need not be searched before each sample
    found = []
    with tempfile.TemporaryDirectory(prefix="hookline-bench-") as folder:
        disk = shutil.disk_usage(folder)
        for line in measure(options.quick, Path(folder)):
            print(f"measured {line.what}", file=sys.stderr)
            found.append(line)
    header = ["what", "against", "median [quartiles]", "target", "met", ""]
    where = f"Files under {tempfile.gettempdir()}, {disk.free / 1e9:.0f} GB free."
    text = "\n".join([origin(about), "", where, explained, "", *table(header, [line.cells() for line in found])])
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text + "\n", "utf-8")
    return int(options.check and not all(line.met for line in found))


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="little data and few rounds: see whether it runs")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a target is missed")
    parser.add_argument("--markdown", type=Path, help="write what is printed into this file")
    return parser
