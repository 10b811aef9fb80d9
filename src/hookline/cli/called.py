"""A function that an option names as ``FILE.py:FUNCTION``."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hookline.errors import OptionError

__all__ = ["called"]

_MODULE = "__hookline_option__"
"""Name of the file among the imported modules while it is used."""


@contextlib.contextmanager
def called(text: str, option: str, example: str) -> Iterator[Callable[[], Any]]:
    """The function; while it and what it makes are used, its file is a module that finds its neighbours.

    Args:
        text: What was given to the option.
        option: Its name, for messages.
        example: What could have been given.

    Raises:
        OptionError: There is no such file or function.
    """
    file, _, name = text.rpartition(":")
    if not (file.endswith(".py") and name):
        raise OptionError(f"{option} is FILE.py:FUNCTION, such as {example}; got {text}")
    if not os.path.isfile(file):
        raise OptionError(f"{option}: there is no file {file}. Working folder: {os.getcwd()}")
    spec = importlib.util.spec_from_file_location(_MODULE, os.path.abspath(file))
    assert spec is not None and spec.loader is not None
    module, before = importlib.util.module_from_spec(spec), list(sys.path)
    sys.modules[_MODULE] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    try:
        spec.loader.exec_module(module)
        if not callable(function := getattr(module, name, None)):
            raise OptionError(f"{option}: {file} has no function {name}")
        yield function
    finally:
        sys.path[:] = before
        del sys.modules[_MODULE]
