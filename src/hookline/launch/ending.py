"""How a program ends: its exit status, and the traceback of an exception that it did not catch, as under Python."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType

from hookline.launch.program import NotFound

__all__ = ["call"]

_HERE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
"""The folder of the package; frames of code in it are not the program's."""


def call(program: Callable[[], None]) -> int:
    """Call the program and report what it raises as the interpreter would.

    Returns:
        The exit status, 0 to 255; ``-signal.SIGINT`` for a KeyboardInterrupt that it did not catch.

    Raises:
        NotFound: There is no program.
    """
    try:
        program()
    except NotFound:
        raise
    except SystemExit as error:
        return _status(error.code)
    except KeyboardInterrupt as error:
        _report(error)
        return -signal.SIGINT
    except BaseException as error:
        _report(error)
        return 1
    return 0


def _status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _report(error: BaseException) -> None:
    """Hand the error to ``sys.excepthook``, which may be the program's own."""
    _hide_our_frames(error)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as second:
        print("Error in sys.excepthook:", file=sys.stderr)
        _hide_our_frames(second)
        sys.__excepthook__(type(second), second, second.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)


def _hide_our_frames(error: BaseException) -> None:
    """Leave our frames out of the traceback, also of the errors that led to this one."""
    seen: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen[id(one)] = one
            one.__traceback__ = _without_our_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    kept = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_HERE):
            kept.append(traceback)
        traceback = traceback.tb_next
    result = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result
