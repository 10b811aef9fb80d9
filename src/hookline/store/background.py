"""Work in a thread of its own, which is waited for whatever happens."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

__all__ = ["Background", "use_one_core", "wait_out"]

_T = TypeVar("_T")


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()  # which looks through the libraries of the process


def use_one_core() -> None:
    """Compute on this thread alone from now on, and leave the cores to others; their threads stay as they are.

    A second pool of threads for what this thread computes would make those of a model that is running wait.
    """
    torch.get_num_threads()  # or PyTorch would set the number anew at its first computation in this thread
    with contextlib.suppress(Exception):  # of a library that cannot be asked; it would only be slower
        _controller().limit(limits=1, user_api="openmp")  # of OpenMP, whose numbers belong to a thread


class Background(Generic[_T]):
    """A function that runs beside its caller from now on; at once, where no thread can be started.

    Modes belong to a thread: none that the caller is in reaches the function, and it runs with gradients and autocast
    as in a fresh process.

    Args:
        function: What to run.
        one_core: Whether it computes on its own thread alone; see ``use_one_core``.
    """

    def __init__(self, function: Callable[[], _T], *, one_core: bool = False) -> None:
        self._function = function
        self._results: list[_T] = []
        self._errors: list[BaseException] = []
        self._ended = threading.Event()
        try:
            threading.Thread(target=self._work, args=(one_core,), name="hookline", daemon=True).start()
        except RuntimeError:  # no more threads, or the interpreter is shutting down
            self._work(one_core=False)

    def _work(self, one_core: bool) -> None:
        try:
            if one_core:
                use_one_core()
            self._results.append(self._function())
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Return when it has ended, well or not."""
        wait_out(self._ended)

    def result(self) -> _T:
        """What it returned, or an error that it raised."""
        self.wait()
        if self._errors:
            raise self._errors[0]
        return self._results[0]


def wait_out(ended: threading.Event) -> None:
    """Wait for the end of a thread, interrupted or not: what is half written must be whole before anybody goes on.

    Not by ``Thread.join``: before Python 3.13, one that was interrupted takes the thread for ended ever after.
    """
    interrupt: BaseException | None = None
    while not ended.is_set():
        try:
            ended.wait()
        except BaseException as error:  # a KeyboardInterrupt
            interrupt = error
    if interrupt is not None:
        raise interrupt
