"""Say what a step of a script would record, before a long run.

  hookline plan train.py --lr 0.1
  hookline plan --sites 'encoder.**' --ports output,grad_output train.py

The script runs as it is, with everything that it does, to the point where it calls its model for the second time, and
is stopped there; nothing is recorded. What is printed: calls and bytes of each site in that step, and the sites of
which nothing would be captured, with the reasons. The exit status is 0, or that of a script that fails before, or 2
when no pattern has matched by the time the script ends or calls its first model once more, where it is stopped too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hookline.cli.parser import Parser
from hookline.cli.program import PORTS, SITES, Option, execute, parser_for, split
from hookline.launch import Options

__all__ = ["main", "parser"]

_OPTIONS: tuple[Option, ...] = (SITES, PORTS)


def parser() -> Parser:
    """The options before the script."""
    return parser_for(sys.modules[__name__], _OPTIONS)


def main(argv: Sequence[str], *, own_process: bool) -> int:
    """Run the first step of what the command line names.

    Args:
        argv: What stands behind ``hookline plan``.
        own_process: As for ``hookline run``.
    """
    before, program = split(argv, _OPTIONS)
    given = parser().parse_args(before)
    options = Options(sites=tuple(given.sites or ["**"]), ports=tuple(given.ports.split(",")), dry=True)
    return execute(program, options, own_process=own_process)
