"""SIGTERM while a script runs: finish the recording, then die of the signal, as Python does by default."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["Sigterm"]


class Sigterm:
    """Takes the place of the default action; a handler that the script installs takes the place of this one.

    A forked child has the default action again, from its first moment on.

    Args:
        finish: Called before the process dies, never while a section that it must not interrupt is running.

    Attributes:
        pid: The process to which the recording belongs.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self.pid = os.getpid()
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._arrived = False

    def install(self) -> None:
        """Only the main thread may set handlers, and one that is set already is somebody else's."""
        if threading.current_thread() is threading.main_thread() and _handler() is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)
            _look_after_forks()

    def uninstall(self) -> None:
        """Harmless when the script has put a handler of its own there."""
        if threading.current_thread() is threading.main_thread() and _handler() == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @contextlib.contextmanager
    def not_now(self) -> Iterator[None]:
        """A section that one thread runs at a time and the signal does not interrupt; it may be nested."""
        before: int | None = None
        try:
            with self._lock:
                before, self._owner = self._owner, threading.get_ident()
                try:
                    yield
                finally:
                    self._owner = before
        finally:
            # The signal is only ever put off for a section of the main thread, where handlers run.
            if self._arrived and before is None and threading.current_thread() is threading.main_thread():
                self._die()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._owner == threading.get_ident() and os.getpid() == self.pid:
            self._arrived = True
        else:
            self._die()

    def _die(self) -> None:
        """The recording belongs to the process that began it."""
        if os.getpid() == self.pid:
            self._finish()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _handler() -> object:
    return signal.getsignal(signal.SIGTERM)


# ---------------------------------------------------------------- forks

_fork = threading.local()


@functools.cache
def _look_after_forks() -> None:
    """Once in a process, since Python never takes such functions back; they do nothing without a handler of ours."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def _handler_is_ours() -> bool:
    return isinstance(getattr(_handler(), "__self__", None), Sigterm)


def _before_fork() -> None:
    """Python drops a signal that a handler is waiting for while it forks, so let it wait in the system."""
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if _handler_is_ours() else None


def _after_fork() -> None:
    if _fork.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _after_fork_in_child() -> None:
    if _handler_is_ours():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork()
