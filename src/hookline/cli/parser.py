"""A parser whose mistakes are one line, and whose help is the docstring of a command; and text for any stdout."""

from __future__ import annotations

import argparse
import inspect
import sys
from types import ModuleType
from typing import Any, NoReturn

from hookline.errors import OptionError

__all__ = ["Parser", "encodable", "parser_of"]


class Parser(argparse.ArgumentParser):
    """Raises OptionError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the command line.

        Raises:
            OptionError: Always.
        """
        raise OptionError(f"{message}. See: hookline help {self.prog.rpartition(' ')[2]}")

    def print_help(self, file: Any = None) -> None:
        """Print the help at once, so that a reader who has stopped reading is noticed here."""
        print(self.format_help(), end="", file=file, flush=True)


def parser_of(command: ModuleType, usage: str) -> Parser:
    """A parser without options for the command that a module holds.

    Args:
        command: Its docstring is the help.
        usage: What stands behind the name of the command.
    """
    name = name_of(command)
    return Parser(
        prog=f"hookline {name}",
        usage=f"hookline {name} {usage}",
        description=inspect.cleandoc(command.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def name_of(command: ModuleType) -> str:
    """How the command is called."""
    return command.__name__.rpartition(".")[2]


def encodable(text: str) -> str:
    """The text with a question mark for what stdout cannot say."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
