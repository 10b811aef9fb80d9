"""Look for damage: read every byte of a recording and compare it with its checksums.

  hookline verify run.hookline
  hookline verify run.hookline --recompute check.py:model_and_inputs -n 1000

One line for each thing that is wrong, and one that sums up. The exit status is 0 when nothing is wrong, 1 when
something is, and 2 when there is no recording of that name. An append that was cut off when its process was killed is
no damage: the recording ends before it, and a line says so.

With --recompute, random rows of inputs and outputs are computed again and compared bit for bit. The function returns
(model, inputs): the model as it was recorded, in eval mode if it was, and a list with the arguments of each step: a
tuple, a dict of keyword arguments, or the only argument. Its file is run; the recording runs nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hookline.cli.called import called
from hookline.cli.parser import Parser, encodable, parser_of
from hookline.errors import OptionError
from hookline.record import verify as look

__all__ = ["main", "parser"]

_WRONG = 1


def parser() -> Parser:
    """The options."""
    made = parser_of(sys.modules[__name__], "DIR [options]")
    made.add_argument("folder", metavar="DIR", help="a recording, such as run.hookline")
    made.add_argument(
        "--recompute", metavar="FILE.py:FUNCTION", help="compute rows again with the (model, inputs) that it returns"
    )
    made.add_argument("-n", "--rows", type=int, default=100, metavar="N", help="how many rows (default: 100)")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="repeats the choice of the rows (default: 0)")
    made.add_argument(
        "--writer",
        type=int,
        metavar="N",
        help="number of the writer that got the inputs, which is its rank; needed where several recorded",
    )
    made.add_argument(
        "--tolerance", metavar="RTOL,ATOL", help="relative and absolute, such as 1e-5,1e-8 (default: the same bits)"
    )
    return made


def main(argv: Sequence[str], *, own_process: bool) -> int:
    """Print what is wrong with a recording.

    Args:
        argv: What stands behind ``hookline verify``.
        own_process: Makes no difference here.

    Returns:
        Exit status: 1 when something is wrong.
    """
    given = parser().parse_args(argv)
    folder = given.folder
    if given.recompute is None:
        found = look(folder)
    else:
        tolerance = _tolerance(given)
        with called(given.recompute, "--recompute", "check.py:model_and_inputs") as function:
            model, inputs = _pair(function(), given.recompute)
            options = {"rows": given.rows, "seed": given.seed, "tolerance": tolerance, "writer": given.writer}
            try:
                found = look(folder, model=model, inputs=inputs, **options)
            except OptionError as error:
                raise OptionError(re.sub(r"\bwriter=(\d+)", r"--writer \1", str(error))) from error
    *lines, summary = str(found).split("\n")
    for line in lines:
        print(encodable(line))
    print(encodable(f"{Path(folder).name or folder}: {summary}"), flush=True)
    return 0 if found else _WRONG


def _tolerance(given: argparse.Namespace) -> tuple[float, float] | None:
    if given.tolerance is None:
        return None
    try:
        relative, absolute = map(float, given.tolerance.split(","))
    except ValueError:
        raise OptionError(f"--tolerance is two numbers, such as 1e-5,1e-8; got {given.tolerance}") from None
    return relative, absolute


def _pair(returned: Any, text: str) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise OptionError(f"--recompute: {text} returned {type(returned).__name__}, wanted (model, inputs)")
    return returned
