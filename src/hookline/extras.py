"""Packages that come with an extra of Hookline and not with Hookline itself."""

from __future__ import annotations

import importlib
from typing import Any

from hookline.errors import HooklineError

__all__ = ["extra"]


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
            f'{what} needs {package}, which cannot be imported ({error}); run: pip install "hookline[{name}]"'
        ) from error
