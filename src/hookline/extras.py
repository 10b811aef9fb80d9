"""Packages that come with an extra of Hookline and not with Hookline itself."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

from hookline.errors import HooklineError

__all__ = ["extra", "pip_line"]


def extra(module: str, name: str, what: str) -> Any:
    """A module of an optional package.

    Args:
        module: Its name, such as ``"pyarrow.parquet"``.
        name: The extra that brings it, such as ``"parquet"``.
        what: What needs it, for the message.

    Raises:
        HooklineError: It cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise HooklineError(
            f"{what} needs {package}, which cannot be imported ({error}); run: {pip_line(name)}"
        ) from error


def pip_line(name: str) -> str:
    """The command that installs what an extra brings, wherever Hookline itself came from."""
    marked = re.compile(rf"""extra\s*==\s*['"]{re.escape(name)}['"]""")
    try:
        wanted = [one.partition(";")[0].strip() for one in requires("hookline") or () if marked.search(one)]
    except PackageNotFoundError:
        wanted = []
    return "pip install " + " ".join(f'"{one}"' for one in wanted or [f"hookline[{name}]"])
