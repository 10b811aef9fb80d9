"""Values on their way to the disk: they wait in memory for the end of a step, within a budget."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hookline.errors import ArgumentError
from hookline.launch.apart import run_apart
from hookline.launch.messages import Messages
from hookline.launch.sigterm import Sigterm
from hookline.record import Event
from hookline.record.left_out import LeftOut
from hookline.record.segment import Mark
from hookline.report.text import size_text
from hookline.sites import Site
from hookline.store import ModuleInfo, Writer

__all__ = ["Sink"]


class Sink:
    """Collects events of all roots and writes them; whatever goes wrong ends the recording and not the script.

    Args:
        folder: The recording, an absolute path.
        budget: Most bytes that wait.
        overwrite: Take the place of a recording that is there.
        messages: Where to say what went wrong.
        sigterm: What must not interrupt the writing.
        refused: Gets each event that cannot be stored, which is left out.

    Attributes:
        events: Number of events that were written.
        steps: Numbers of their steps.
    """

    def __init__(
        self,
        folder: Path,
        budget: int,
        overwrite: bool,
        messages: Messages,
        sigterm: Sigterm,
        refused: Callable[[Any, ArgumentError], None],
    ) -> None:
        self.events = 0
        self.steps: set[int] = set()
        self._folder = folder
        self._budget = budget
        self._overwrite = overwrite
        self._messages = messages
        self._sigterm = sigterm
        self._open = True
        self._writer: Writer | None = None
        self._waiting: list[Event] = []
        self._held: Counter[Site] = Counter()
        self._total = 0
        self._left_out = LeftOut(messages.warn)
        self._refused = refused
        self._order = itertools.count()

    @property
    def is_open(self) -> bool:
        """Whether values are taken; never in a forked child, since the recording belongs to its parent."""
        return self._open and os.getpid() == self._sigterm.pid

    @property
    def exists(self) -> bool:
        """Whether there is a recording on disk."""
        return self._writer is not None

    def describe(self, info: Mapping[str, Any], modules: Mapping[str, ModuleInfo]) -> None:
        """Say what is recorded; the first time makes the recording, each later time replaces what was said."""
        with self._sigterm.not_now(), self._or_stop():
            if self._writer is None:
                self._writer = Writer(self._folder, info=info, modules=modules, overwrite=self._overwrite)
            else:
                self._writer.describe(info=info, modules=modules)

    def has_room(self, site: Site, size: int) -> bool:
        """Set room for some bytes aside; when there is none, the recording ends."""
        if not self.is_open:
            return False
        if self._total + size > self._budget:
            self.stop(self._full(site, size))
            return False
        self._held[site] += size
        self._total += size
        return True

    def put(self, site: Site, mark: Mark, backward: int, value: Any) -> None:
        """Take a value; ``mark`` is its step and its call."""
        if self.is_open:
            event = Event(next(self._order), mark[0], site.path, site.port, mark[1], backward, value)
            self._waiting.append(event)

    def flush(self) -> None:
        """Write what waits."""
        if not self._waiting or os.getpid() != self._sigterm.pid:
            return
        with self._sigterm.not_now(), self._or_stop():
            run_apart(self._write)

    def stop(self, why: str) -> None:
        """End the recording before the script ends; what it has so far stays."""
        if self.is_open:
            self._open = False
            self._messages.warn(
                f"{why.rstrip('.')}. The recording ends here and keeps what it has; the script goes on."
            )
            self.flush()

    def close(self) -> None:
        """Write what waits and take no more."""
        self.flush()
        self._open = False
        if self._writer is not None:
            self._writer.close()

    @contextlib.contextmanager
    def _or_stop(self) -> Any:
        try:
            yield
        except Exception as error:
            self.stop(str(error))

    def _write(self) -> None:
        events = self._waiting[:]  # other threads may add to the list meanwhile
        try:
            if self._writer is not None:
                self._writer.append(events, self._refuse)
                refused = self._left_out.forget()
                written = [event for event in events if id(event) not in refused]
                self.events += len(written)
                self.steps.update(event.step for event in written)
        finally:
            del self._waiting[: len(events)]
            self._held.clear()
            self._total = 0

    def _refuse(self, event: Any, error: ArgumentError) -> None:
        self._left_out(event, error)
        self._refused(event, error)

    def _full(self, site: Site, size: int) -> str:
        names = ", ".join(f"{where} {size_text(count)}" for where, count in self._held.most_common(3)) or "none"
        return (
            f"{site} needs {size_text(size)}, and of the budget of {size_text(self._budget)} for a step "
            f"{size_text(self._total)} are taken; largest sites: {names}. Choose less with --sites or --ports, or "
            "raise --budget"
        )
