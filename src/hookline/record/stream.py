"""Values on their way to disk while the model runs: a thread writes them, whole steps at a time, within a budget."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hookline.errors import ArgumentError, OptionError
from hookline.hooks import add_note
from hookline.record.devices import marks, on_device
from hookline.record.left_out import LeftOut
from hookline.record.log import Log
from hookline.report.text import plural
from hookline.store import Staged, Tail, Writer
from hookline.store.background import use_one_core, wait_out

__all__ = ["BUDGET", "Pressure", "Stream"]

BUDGET = 10**9
"""Bytes that may wait for the disk unless a budget is given."""
_SHARD = 256 << 20
"""Bytes that are written at once, or half the budget where that is less."""
_PATIENCE = 1.0
"""Seconds after which a step that is over is written even if it is small."""


class Pressure(NamedTuple):
    """How often, and how many seconds in all, the model has waited for the disk."""

    waits: int
    seconds: float


class _Waiting(NamedTuple):
    """An event in memory, with the bytes set aside for it, what has to come before, and how many came before."""

    event: Any
    nbytes: int
    after: Any
    number: int


class _Held:
    """What is held of one step; ``oldest`` is the number of the first of it that is not committed."""

    def __init__(self, oldest: int) -> None:
        self.oldest = oldest
        self.events: list[_Waiting] = []
        self.nbytes = 0
        self.staged = Staged()
        self.stored: list[Any] = []


class Stream:
    """Writes the events of a recording in a thread of its own.

    A step is committed as a whole when it is over: when its thread begins another one, or at once where no gradients
    are asked for. Of a step that is larger than half the budget, shards are written before that; no reader sees them.
    The order in which values leave memory is that of the steps.

    Args:
        writer: Where to write.
        log: The events; those that are committed are forgotten there and fetched from disk.
        number: Number of the writer.
        first: Number of the first step.
        budget: Most bytes that wait.
        on_error: ``"raise"`` or ``"warn"``, when the disk refuses or the quota is reached.
        at_the_end: Whether a value may still be replaced before the recording ends, so that none is written earlier.
        refused: Gets each event that cannot be stored, which is left out.
    """

    def __init__(
        self,
        writer: Writer,
        log: Log,
        *,
        number: int,
        first: int,
        budget: int,
        on_error: str,
        at_the_end: bool,
        refused: Callable[[Any, ArgumentError], None],
    ) -> None:
        self._writer = writer
        self._log = log
        self._tail = Tail(writer.folder, number=number)
        self._budget = budget
        self._target = max(1, min(_SHARD, budget // 2))
        self._on_error = on_error
        self._at_the_end = at_the_end
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._steps: dict[int, _Held] = {}
        self._over: set[int] = set()
        self._below = first  # all steps below this number are over
        self._over_since: float | None = None
        self._used = self._held = self._waiters = self._puts = 0
        self._wanted = self._closing = self._busy = False
        self._error: Exception | None = None
        self._told = False
        self._refused = refused
        self._warnings: list[str] = []  # for a thread of the model, where a filter may make errors of them
        self._left_out = LeftOut(self._warnings.append)
        self._thread: threading.Thread | None = None
        self.pressure = Pressure(0, 0.0)
        log.fetch_from(self._tail.new)
        atexit.register(self._close_unasked)

    # ------------------------------------------------------------ called by the threads of the model

    @property
    def takes(self) -> bool:
        """Whether values are taken: not after an error, which is told once, and not in a forked child.

        Raises:
            HooklineError: What has ended the recording, with ``on_error="raise"``.
        """
        while self._warnings and os.getpid() == self._pid:
            warnings.warn(self._warnings.pop(0), RuntimeWarning, stacklevel=2)
        if self._error is not None:
            self._tell()
        return self._error is None and os.getpid() == self._pid

    def room(self, size: int) -> bool:
        """Set some bytes aside, waiting for the disk if need be; False when the recording has ended meanwhile."""
        if self._at_the_end:
            return True
        with self._changed:
            if self._used and self._used + size > self._budget:
                self._wait_for_room(size)
            self._used += size
        return self._error is None

    def _wait_for_room(self, size: int) -> None:
        begun = time.perf_counter()
        self._waiters += 1
        try:
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not self._used or self._used + size <= self._budget or self._error is not None
            )
        finally:
            self._waiters -= 1
        waits, seconds = self.pressure
        self.pressure = Pressure(waits + 1, seconds + time.perf_counter() - begun)

    def give_back(self, size: int) -> None:
        """Some bytes that were set aside are not needed."""
        if not self._at_the_end:
            with self._changed:
                self._used -= size
                self._changed.notify_all()

    def put(self, event: Any, size: int) -> None:
        """Take an event for which so many bytes were set aside."""
        if self._at_the_end:
            return
        after = marks(event)
        with self._changed:
            held = self._steps.setdefault(event.step, _Held(self._puts))
            held.events.append(_Waiting(event, size, after, self._puts))
            self._puts += 1
            held.nbytes += size
            self._held += size
            if self._is_over(event.step):
                self._note_over()
            if self._held >= self._target or self._waiters:
                self._changed.notify_all()
            self._start()

    def step_over(self, step: int) -> None:
        """Nothing more of a step is expected; what comes all the same is committed with what comes then."""
        with self._changed:
            self._mark_over(step)
            if step in self._steps:
                self._note_over()

    def _mark_over(self, step: int) -> None:
        if not self._is_over(step):
            self._over.add(step)
        while self._below in self._over:
            self._over.remove(self._below)
            self._below += 1

    def _is_over(self, step: int) -> bool:
        return step < self._below or step in self._over

    def _note_over(self) -> None:
        if self._over_since is None:
            self._over_since = time.monotonic()
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when everything that is here now is committed, whatever other threads add meanwhile.

        Raises:
            HooklineError: What has ended the recording, with ``on_error="raise"``.
            OptionError: This is a forked child; its parent has the recording.
        """
        if os.getpid() != self._pid:
            raise OptionError("flush() in a forked child: only the process that has opened the recording writes to it.")
        with self._changed:
            end, self._wanted = self._puts, bool(self._steps)
            self._all_over()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or not self._holds_any_before(end))
        self.takes  # noqa: B018 (raises what went wrong)

    def _holds_any_before(self, number: int) -> bool:
        return any(held.oldest < number for held in self._steps.values())

    def _all_over(self) -> None:
        for step in self._steps:
            self._mark_over(step)

    def finish(self, said: Callable[[], Mapping[str, Any]]) -> None:
        """Write the rest, and what is known at the end.

        Args:
            said: Gives what is known.

        Raises:
            HooklineError: What has ended the recording, if it was not raised before and ``on_error="raise"``.
        """
        atexit.unregister(self._close_unasked)
        if os.getpid() != self._pid:
            return
        if self._at_the_end:
            self._at_the_end = False
            for event in self._log.in_memory:
                self.room(event.nbytes)
                self.put(event, event.nbytes)
        self._close()
        with contextlib.closing(self._writer), self._as_failure():
            self._writer.end(said())
        self.takes  # noqa: B018 (raises what went wrong)

    def take_back(self) -> None:
        """There is nothing to record after all."""
        atexit.unregister(self._close_unasked)
        if os.getpid() == self._pid:
            self._close()
            self._writer.take_back()

    def _close(self) -> None:
        with self._changed:
            self._closing = True
            self._all_over()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            wait_out(thread)
        self._drop_unfinished()

    def _close_unasked(self) -> None:
        """The interpreter ends while the recording is open."""
        if os.getpid() == self._pid:
            self._close()
            self._writer.close()

    def _drop_unfinished(self) -> None:
        """Of a step that could not be written as a whole, nothing stays on disk."""
        for held in self._steps.values():
            self._log.remove(held.stored)
            self._writer.discard(held.staged)

    def _tell(self) -> None:
        if self._told or self._error is None:
            return
        self._told = True
        waiting = sum(len(held.events) for held in self._steps.values())
        rest = f" {plural(waiting, 'value')} that were not written stay in memory." if waiting else ""
        message = f"The recording ended here: what was committed before can be read.{rest}"
        if self._on_error == "warn":
            warnings.warn(f"{self._error} {message} The model goes on without it.", RuntimeWarning, stacklevel=3)
            return
        add_note(self._error, message)
        raise self._error

    # ------------------------------------------------------------ called by the thread that writes

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="hookline-writer", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        use_one_core()
        while True:
            with self._changed:
                while not self._is_due() and self._error is None:
                    self._changed.wait(self._patience())  # which may have become shorter when it is notified
                if self._error is not None or (self._closing and not self._steps):
                    return
                over, open_ones = self._job()
                self._busy = True
            with self._as_failure():
                self._write(over, open_ones)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _patience(self) -> float | None:
        if self._over_since is None:
            return None
        return max(0.0, self._over_since + _PATIENCE - time.monotonic())

    def _is_due(self) -> bool:
        late = self._over_since is not None and self._patience() == 0.0
        pressed = self._held >= self._target or (self._waiters and self._held)
        return bool(self._closing or self._wanted or late or pressed)

    def _job(self) -> tuple[list[_Held], list[_Held]]:
        """The steps to commit, and then, where that leaves too much, one of which shards are to be written."""
        self._wanted, self._over_since = False, None
        numbers = sorted(step for step in self._steps if self._is_over(step))
        over = [self._steps[step] for step in numbers]
        rest = self._held - sum(held.nbytes for held in over)
        open_ones = [held for step, held in self._steps.items() if not self._is_over(step)]
        if open_ones and (rest >= self._target or not over):
            return over, [max(open_ones, key=lambda held: held.nbytes)]
        return over, []

    def _write(self, over: list[_Held], open_ones: list[_Held]) -> None:
        whole: list[_Held] = []
        try:
            for held in over:
                self._stage(held)
                whole.append(held)
        finally:
            self._commit(whole)
        for held in open_ones:
            self._stage(held)

    def _commit(self, whole: list[_Held]) -> None:
        if not whole:
            return
        stored = [event for held in whole for event in held.stored]
        self._log.settle(lambda: self._writer.commit([held.staged for held in whole]), stored)
        with self._changed:
            for step in [step for step, held in self._steps.items() if held in whole]:
                held = self._steps[step]
                held.staged, held.stored = Staged(), []
                if held.events:  # it went on meanwhile
                    held.oldest = held.events[0].number
                    self._note_over()
                else:
                    del self._steps[step]
            self._changed.notify_all()

    def _stage(self, held: _Held) -> None:
        """Write the shards of what is held of a step, and let it go from memory."""
        with self._changed:
            taken, nbytes = held.events[:], held.nbytes
        events = [waiting.event for waiting in taken]
        with on_device(waiting.after for waiting in taken):
            stored = self._writer.stage(held.staged, events, self._refuse)
        kept, refused = self._left_out.without(events)
        self._log.exchange(kept, stored)
        self._log.remove(refused)
        held.stored += stored
        with self._changed:
            del held.events[: len(taken)]
            held.nbytes -= nbytes
            self._held -= nbytes
            self._used -= nbytes
            self._changed.notify_all()

    def _refuse(self, event: Any, error: ArgumentError) -> None:
        self._left_out(event, error)
        self._refused(event, error)

    @contextlib.contextmanager
    def _as_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
