"""What the commands that run a script have in common: whose options are whose, and how the script is run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from hookline.cli.parser import Parser, name_of, parser_of
from hookline.errors import OptionError
from hookline.launch import Options, run_module, run_script, take_over

__all__ = ["PORTS", "SITES", "Option", "execute", "parser_for", "split"]

Option = tuple[tuple[str, ...], dict[str, Any]]
"""Names of an option, and what argparse has to know of it."""

SITES: Option = (
    ("--sites",),
    {
        "action": "append",
        "metavar": "PATTERN",
        "help": "modules to record, such as 'layer1.*' or 'encoder.**'; ** is every module, and the default; a "
        "leading ! leaves out, a :port at the end says which port; may be repeated",
    },
)
PORTS: Option = (
    ("--ports",),
    {
        "default": "output",
        "metavar": "PORTS",
        "help": "input, output, grad_input, grad_output, or several with commas between (default: output)",
    },
)


def parser_for(command: ModuleType, options: Sequence[Option]) -> Parser:
    """The options before the script.

    Args:
        command: As for ``parser_of``.
        options: Those that the command has.
    """
    name = name_of(command)
    made = parser_of(command, f"[options] script.py [args...]\n       hookline {name} [options] -m module [args...]")
    for names, settings in options:
        made.add_argument(*names, **settings)
    return made


def split(argv: Sequence[str], options: Sequence[Option]) -> tuple[list[str], list[str]]:
    """Our options, and the program with its own; argparse alone would take some of the program's for ours."""
    takes_value = {name for names, settings in options if "action" not in settings for name in names} | {"--sites"}
    place = 0
    while place < len(argv) and argv[place].startswith("-") and argv[place] not in ("-m", "--"):
        place += 2 if argv[place] in takes_value else 1
    rest = place + 1 if argv[place : place + 1] == ["--"] else place
    return list(argv[:place]), list(argv[rest:])


def execute(program: Sequence[str], options: Options, *, own_process: bool) -> int:
    """Run a program.

    Args:
        program: ``script.py args...`` or ``-m module args...``.
        options: What to record.
        own_process: Whether this process is there for the script alone, so that its world stays to the end.

    Returns:
        Exit status of the script; a script that was interrupted ends this process as it would end its own.

    Raises:
        OptionError: There is none.
    """
    if not program:
        raise OptionError(
            "there is nothing to run; name a script or a module: hookline run train.py, hookline run -m module"
        )
    is_module = program[0] == "-m"
    if is_module and len(program) == 1:
        raise OptionError("-m needs the name of a module: hookline run -m module")
    name, *args = program[1:] if is_module else program
    if not own_process:
        return (run_module if is_module else run_script)(name, args, options)
    status = take_over(name, args, options, is_module=is_module)
    if status == -signal.SIGINT:
        _end_interrupted()
    return status


def _end_interrupted() -> None:
    """End as the interpreter does after a KeyboardInterrupt, whose traceback has been printed already.

    Raises:
        KeyboardInterrupt: Always.
    """
    sys.excepthook = lambda *error: None
    raise KeyboardInterrupt
