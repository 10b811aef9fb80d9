"""Work in a thread of its own, which is waited for whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Background", "wait_out"]

_T = TypeVar("_T")


class Background(Generic[_T]):
    """A function that runs beside its caller from now on; at once, where no thread can be started.

    Modes belong to a thread: none that the caller is in reaches the function, and it runs with gradients and autocast
    as in a fresh process.
    """

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function = function
        self._results: list[_T] = []
        self._errors: list[BaseException] = []
        self._thread: threading.Thread | None = threading.Thread(target=self._work, name="hookline", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads, or the interpreter is shutting down
            self._thread = None
            self._work()

    def _work(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._errors.append(error)

    def wait(self) -> None:
        """Return when it has ended, well or not."""
        if self._thread is not None:
            wait_out(self._thread)

    def result(self) -> _T:
        """What it returned, or an error that it raised."""
        self.wait()
        if self._errors:
            raise self._errors[0]
        return self._results[0]


def wait_out(thread: threading.Thread) -> None:
    """Wait for the end of a thread, interrupted or not: what is half written must be whole before anybody goes on."""
    try:
        thread.join()
    except BaseException:  # a KeyboardInterrupt
        thread.join()
        raise
