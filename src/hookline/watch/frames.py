"""Which line of whose code is running."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import NamedTuple

import torch

__all__ = ["NOWHERE", "Where", "where"]

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MODULES = os.path.join(_TORCH, "nn", "modules") + os.sep
_CALLS = os.path.join(_MODULES, "module.py")


class Where(NamedTuple):
    """A place in the source.

    Attributes:
        line: Such as ``"train.py:31 in forward"``; empty if it is not known.
        text: What stands there.
        path: The submodule that was running.
        is_users: Whether it is code of neither torch nor Hookline.
    """

    line: str = ""
    text: str = ""
    path: str = ""
    is_users: bool = False


NOWHERE = Where()


def where(paths: Mapping[int, str], stop: FrameType | None) -> Where:
    """The innermost line outside torch and Hookline; where there is none, the one in a module of torch.

    Args:
        paths: By the id of each module that may be running, its path.
        stop: The frame at which the search ends.
    """
    module, users, torchs = None, None, None
    for frame in _frames(stop):
        file = frame.f_code.co_filename
        if file.startswith((_OURS, "<frozen ")):
            continue
        if module is None:
            module = paths.get(_first_argument(frame))
        if not file.startswith(_TORCH):
            users = users or frame
        elif torchs is None and file.startswith(_MODULES) and file != _CALLS:
            torchs = frame
        if module is not None and users is not None:
            break
    found = users or torchs
    if found is None:
        return Where(path=module or "")
    return Where(_line(found), _text(found), module or "", users is not None)


def _frames(stop: FrameType | None) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not stop:
        yield frame
        frame = frame.f_back


def _first_argument(frame: FrameType) -> int:
    """The id of the object whose method runs; 0 for a function without arguments."""
    code = frame.f_code
    return id(frame.f_locals.get(code.co_varnames[0])) if code.co_argcount else 0


def _line(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    if file.startswith(_TORCH):
        name = "torch/" + file.removeprefix(_TORCH).replace(os.sep, "/")
    else:
        name = os.path.basename(file)
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _text(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()
