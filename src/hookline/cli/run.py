"""Run a script, unchanged, and record the models that it calls.

  hookline run train.py --lr 0.1
  hookline run --ports output,grad_output --steps 3 train.py
  hookline run --sites 'encoder.**' --sites '!**.dropout' -m package.train --lr 0.1

The script runs as it would under python: what comes after its name is its own, and so is the exit status. Every model
that it calls is recorded from its first call on; a model is a module whose call is not inside the call of another one.
A step is one call of the model. The first model's modules have their plain paths; those of the next one, a loss for
instance, begin with the name of its class: CrossEntropyLoss/, then CrossEntropyLoss#2/.

A step is on disk before the next one begins, so a script that is killed leaves a recording that can be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hookline.cli.parser import Parser
from hookline.cli.program import PORTS, SITES, Option, execute, parser_for, split
from hookline.errors import OptionError
from hookline.launch import Options

__all__ = ["main", "parser"]

_OPTIONS: tuple[Option, ...] = (
    SITES,
    PORTS,
    (
        ("--steps",),
        {
            "default": "1",
            "metavar": "N",
            "help": "how many steps to record of each model; all or 0 for every one (default: 1)",
        },
    ),
    (
        ("--every",),
        {"type": int, "default": 1, "metavar": "K", "help": "record steps 0, K, 2K and so on (default: 1)"},
    ),
    (
        ("-o", "--output"),
        {"default": "run.hookline", "metavar": "FOLDER", "help": "where to record (default: run.hookline)"},
    ),
    (
        ("--budget",),
        {
            "default": "2GB",
            "metavar": "SIZE",
            "help": "most memory for the values of a step; when they need more, the recording ends and the script goes "
            "on (default: 2GB)",
        },
    ),
    (("--overwrite",), {"action": "store_true", "help": "replace a recording of that name"}),
    (("--quiet",), {"action": "store_true", "help": "say nothing but warnings"}),
)


def parser() -> Parser:
    """The options before the script."""
    return parser_for(sys.modules[__name__], _OPTIONS)


def main(argv: Sequence[str], *, own_process: bool) -> int:
    """Run what the command line names.

    Args:
        argv: What stands behind ``hookline run``.
        own_process: Whether this process is there for the script alone, so that its world stays to the end.

    Returns:
        Exit status of the script; a script that was interrupted ends this process as it would end its own.
    """
    before, program = split(argv, _OPTIONS)
    return execute(program, _options(parser().parse_args(before)), own_process=own_process)


def _options(given: argparse.Namespace) -> Options:
    return Options(
        sites=tuple(given.sites or ["**"]),
        ports=tuple(given.ports.split(",")),
        steps=_steps(given.steps),
        every=given.every,
        output=given.output,
        overwrite=given.overwrite,
        budget=given.budget,
        quiet=given.quiet,
    )


def _steps(text: str) -> int | None:
    if text in ("all", "0"):
        return None
    if not text.isdecimal():
        raise OptionError(f"--steps is a number or all; got {text!r}.")
    return int(text)
