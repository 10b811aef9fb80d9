"""Run a function out of reach of what the script has set for its thread."""

from __future__ import annotations

from collections.abc import Callable

from hookline.store.background import Background

__all__ = ["run_apart"]


def run_apart(function: Callable[[], None]) -> None:
    """Call the function in a thread of its own and wait for it.

    Modes belong to a thread: what we compute is not faked by FakeTensorMode, counted by a FLOP counter, or put on the
    script's default device, and it runs with gradients and autocast as in a fresh process.

    Raises:
        Exception: What the function raises.
    """
    Background(function).result()
