"""Values on their way to disk while the model runs: a thread writes them, whole steps at a time, within a budget."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hookline.errors import ArgumentError, HooklineError, OptionError, QuotaError
from hookline.hooks import add_note
from hookline.record.devices import marks, on_device
from hookline.record.held import Held, Pressure, Waiting, complete, sharing, unwritten
from hookline.record.left_out import LeftOut
from hookline.record.log import Log
from hookline.store import Staged, Tail, Writer
from hookline.store.background import use_one_core, wait_out

__all__ = ["BUDGET", "Stream"]

BUDGET = 10**9
"""Bytes that may wait for the disk unless a budget is given."""
_SHARD = 256 << 20
"""Bytes that are written at once, or half the budget where that is less."""
_EVENT = 1 << 10
"""Bytes that an event takes besides its tensors."""
_PATIENCE = 1.0
"""Seconds after which a step that is over is written even if it is small."""


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
        self._writer, self._log, self._tail = writer, log, Tail(writer.folder, number=number)
        self._budget, self._target = budget, max(1, min(_SHARD, budget // 2))
        self._on_error, self._at_the_end = on_error, at_the_end
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._steps: dict[int, Held] = {}
        self._over: set[int] = set()
        self._below = first  # all steps below this number are over
        self._over_since: float | None = None
        self._used = self._held = self._waiters = self._puts = 0
        self._wanted = self._closing = False
        self._together: dict[int, frozenset[int]] = {}  # steps that are committed together or not at all
        self._error: Exception | None = None
        self._told = False
        self._refused = refused
        self._left_out = LeftOut()
        self._started = False
        self._ended = threading.Event()
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
        if os.getpid() != self._pid:
            return False
        self._left_out.warn()
        if self._error is not None:
            self._tell()
        return self._error is None

    def room(self, size: int) -> bool:
        """Set some bytes aside, waiting for the disk if need be; False when the recording has ended meanwhile."""
        if self._at_the_end:
            return True
        size += _EVENT
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
                self._used -= size + _EVENT
                self._changed.notify_all()

    def put(self, event: Any, size: int) -> None:
        """Take an event for which so many bytes were set aside."""
        if self._at_the_end:
            return
        after, size = marks(event), size + _EVENT
        with self._changed:
            held = self._steps.get(event.step)
            if held is None:
                held = self._steps[event.step] = Held(event.step, self._puts)
            held.events.append(Waiting(event, size, after, self._puts))
            self._puts += 1
            held.nbytes += size
            self._held += size
            if self._is_over(event.step):
                self._note_over()
            if self._held >= self._target or self._waiters:
                self._changed.notify_all()
            self._start()

    def step_over(self, *steps: int) -> None:
        """Nothing more of some steps is expected; what comes all the same is committed with what comes then.

        Several are committed together, or not at all.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            if len(steps) > 1:
                self._together |= dict.fromkeys(steps, frozenset(steps))
            for step in steps:
                self._mark_over(step)
            if not self._steps.keys().isdisjoint(steps):
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
            self._changed.wait_for(
                lambda: self._error is not None or all(held.oldest >= end for held in self._steps.values())
            )
        self.takes  # noqa: B018 (raises what went wrong)

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
        if os.getpid() != self._pid:
            return
        try:
            if self._at_the_end:
                self._at_the_end = False
                for event in self._log.in_memory:
                    self.room(event.nbytes)
                    self.put(event, event.nbytes)
            with contextlib.closing(self._writer):
                try:
                    self._close()
                finally:  # also after a KeyboardInterrupt, which comes out once all is written
                    with self._as_failure():
                        self._writer.end(said())
        finally:
            atexit.unregister(self._close_unasked)
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
        try:
            if self._started:
                wait_out(self._ended)
        finally:
            self._drop_unfinished()

    def _close_unasked(self) -> None:
        """The interpreter ends while the recording is open."""
        if os.getpid() == self._pid:
            self._close()
            self._writer.close()

    def _drop_unfinished(self) -> None:
        """Of a step that could not be written as a whole, nothing stays on disk, and the coverage says so."""
        why = ArgumentError(f"not written: {self._error}")
        for held in self._steps.values():
            for event in (*held.stored, *(waiting.event for waiting in held.events)):
                self._refused(event, why)
            self._log.remove(held.stored)
            self._writer.discard(held.staged)

    def _tell(self) -> None:
        with self._changed:
            if self._told or self._error is None:
                return
            self._told = True
            message = (
                f"The recording ended here: what was committed before can be read.{unwritten(self._steps.values())}"
            )
        if self._on_error == "warn":
            warnings.warn(f"{self._error} {message} The model goes on without it.", RuntimeWarning, stacklevel=3)
            return
        add_note(self._error, message)
        raise self._error

    # ------------------------------------------------------------ called by the thread that writes

    def _start(self) -> None:
        if self._started or self._error is not None:
            return
        try:
            threading.Thread(target=self._work, name="hookline-writer", daemon=True).start()
            self._started = True
        except RuntimeError as error:
            self._error = HooklineError(f"{self._writer.folder}: no thread can be started to write it ({error}).")
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            with self._as_failure():
                use_one_core()
                self._write_on()
        finally:
            self._ended.set()

    def _write_on(self) -> None:
        while True:
            with self._changed:
                while not self._is_due() and self._error is None:
                    self._changed.wait(self._patience())  # which may have become shorter when it is notified
                if self._error is not None or (self._closing and not self._steps):
                    return
                over, open_ones = self._job()
            self._write(over, open_ones)

    def _patience(self) -> float | None:
        if self._over_since is None:
            return None
        return max(0.0, self._over_since + _PATIENCE - time.monotonic())

    def _is_due(self) -> bool:
        late = self._over_since is not None and self._patience() == 0.0
        pressed = self._held >= self._target or (self._waiters and self._held)
        return bool(self._closing or self._wanted or late or pressed)

    def _job(self) -> tuple[list[Held], list[Held]]:
        """The steps to commit, and then, where that leaves too much, one of which shards are to be written."""
        self._wanted, self._over_since = False, None
        over = sorted((held for held in self._steps.values() if self._is_over(held.step)), key=lambda held: held.step)
        rest = self._held - sum(held.nbytes for held in over)
        open_ones = [held for held in self._steps.values() if not self._is_over(held.step)]
        if open_ones and (rest >= self._target or not over):
            return over, [max(open_ones, key=lambda held: held.nbytes)]
        return over, []

    def _write(self, over: list[Held], open_ones: list[Held]) -> None:
        whole: list[Held] = []
        try:
            for some in sharing(over, self._together, self._target):
                try:
                    self._stage(some)
                    whole += some
                except QuotaError:  # some of them may still have room
                    for held in some if len(some) > 1 else ():
                        self._stage([held])
                        whole.append(held)
                    raise
        finally:
            self._commit(complete(whole, self._together, self._steps.keys()))
        for held in open_ones:
            self._stage([held])

    def _commit(self, whole: list[Held]) -> None:
        if not whole:
            return
        stored = [event for held in whole for event in held.stored]
        staged = {id(held.staged): held.staged for held in whole}
        # nobody reads the log while the disk is at it, or events would be there twice or not at all
        self._log.settle(lambda: self._writer.commit([*staged.values()]), stored)
        with self._changed:
            for held in whole:
                held.staged, held.stored = Staged(), []
                if held.events:  # it went on meanwhile
                    held.oldest = held.events[0].number
                    self._note_over()
                else:
                    del self._steps[held.step]
                    self._together.pop(held.step, None)
            self._changed.notify_all()

    def _stage(self, some: list[Held]) -> None:
        """Write the shards of what is held of some steps, and let it go from memory."""
        with self._changed:
            taken = [held.events[:] for held in some]
        waiting = [one for events in taken for one in events]
        staged = some[0].staged if len(some) == 1 else Staged()
        with on_device(one.after for one in waiting):
            stored = iter(self._writer.stage(staged, [one.event for one in waiting], self._refuse))
        refused = self._left_out.forget()
        for held, events in zip(some, taken, strict=True):
            kept = [one.event for one in events if id(one.event) not in refused]
            held.staged, found = staged, list(itertools.islice(stored, len(kept)))
            self._log.exchange(kept, found)
            held.stored += found
        self._log.remove(refused.values())
        with self._changed:
            for held, events in zip(some, taken, strict=True):
                nbytes = sum(one.nbytes for one in events)
                del held.events[: len(events)]
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
