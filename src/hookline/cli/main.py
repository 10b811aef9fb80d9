"""Hooks for PyTorch: record and look at every value and gradient in a model.

  hookline run train.py          run a script, unchanged, and record the models that it calls
  hookline plan train.py         say what a step would record
  hookline show run.hookline     print what was recorded
  hookline plot run.hookline     draw it
  hookline export run.hookline   write it for NumPy, Parquet, Zarr or safetensors
  hookline verify run.hookline   look for damage in it
  hookline repair run.hookline   make a new one of what is whole in it
  hookline replay BUNDLE         run the module of an incident once more
  hookline help COMMAND          options and examples of a command
  hookline --version             the version

The exit status is that of the script for run and plan, 1 for damage that verify found, for what repair could not save
or replay not reproduce, and 2 for a mistake in what was asked for.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from hookline.cli import export, plan, plot, repair, replay, run, show, verify
from hookline.cli.parser import name_of
from hookline.errors import HooklineError, OptionError
from hookline.sites import nearest

__all__ = ["COMMANDS", "main"]

COMMANDS: tuple[ModuleType, ...] = (run, plan, show, plot, export, verify, repair, replay)

_MISTAKE = 2
_BROKEN_PIPE = 141
"""What a shell shows for a program that died of SIGPIPE, as most programs do."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``hookline``.

    Args:
        argv: What stands behind ``hookline``; None for the command line of this process, which then is the script's
            when one is run.

    Returns:
        Exit status: that of the script for ``run``, 1 for damage that ``verify`` found, 2 for a mistake in what
            was asked for.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        return _dispatch(given, own_process=argv is None)
    except (HooklineError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _broken_pipe()
        print(f"hookline: error: {' '.join(str(error).split())}", file=sys.stderr)
        return _MISTAKE


def _dispatch(argv: list[str], *, own_process: bool) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        argv = ["help"]
    if argv[0] == "--version":
        print(f"hookline {_version()}", flush=True)
        return 0
    if argv[0] == "help":
        return _help(argv[1:])
    status: int = _command(argv[0]).main(argv[1:], own_process=own_process)
    return status


def _command(name: str) -> ModuleType:
    commands = {name_of(command): command for command in COMMANDS}
    if name in commands:
        return commands[name]
    if name.endswith(".py") and os.path.exists(name):
        raise OptionError(f"{name} is no command; to run it: hookline run {name}")
    near = nearest(name, commands)
    hint = f"; nearest: {near[0]}" if near else ""
    raise OptionError(f"there is no command {name}{hint}. The commands are {', '.join(commands)}; see: hookline --help")


def _help(names: Sequence[str]) -> int:
    if not names:
        print((__doc__ or "").strip(), flush=True)
        return 0
    _command(names[0]).parser().print_help()
    return 0


def _broken_pipe() -> int:
    """Whoever reads our output has seen enough; what is still in the buffer must not complain at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _BROKEN_PIPE


def _version() -> str:
    with contextlib.suppress(PackageNotFoundError):
        return version("hookline")
    return "(not installed)"
