"""Run a function out of reach of what the script has set for its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hookline.record.stream import wait_out

__all__ = ["run_apart"]


def run_apart(function: Callable[[], None]) -> None:
    """Call the function in a thread of its own and wait for it.

    Modes belong to a thread: what we compute is not faked by FakeTensorMode, counted by a FLOP counter, or put on the
    script's default device, and it runs with gradients and autocast as in a fresh process.

    Raises:
        Exception: What the function raises.
    """
    errors: list[BaseException] = []
    thread = threading.Thread(target=_guarded, args=(function, errors), name="hookline", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads, or the interpreter is shutting down
        return function()
    wait_out(thread)
    if errors:
        raise errors[0]


def _guarded(function: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        function()
    except BaseException as error:
        errors.append(error)
