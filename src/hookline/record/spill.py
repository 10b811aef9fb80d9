"""A folder that takes what the memory does not hold, and in the end the whole recording."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from hookline.errors import OptionError
from hookline.record.policy import Policy
from hookline.store import StoredEvent, Writer, check_free

if TYPE_CHECKING:
    from hookline.record.recording import Recording

__all__ = ["Spill", "spill_to"]


def spill_to(folder: str | os.PathLike[str], policy: Policy) -> Spill:
    """A folder for a recorder.

    Raises:
        OptionError: A recording is there already, or what is kept cannot be put on disk.
        FormatError: Something else stands there.
    """
    if not policy.detach:
        raise OptionError("to= writes values to disk, where a graph cannot go; leave detach=False out, or to=.")
    check_free(folder)
    return Spill(folder, only_at_the_end=policy.keep == "last")


class Spill:
    """Writes events to disk and exchanges them in the recording for what reads them from there.

    Args:
        folder: The recording on disk; made when the first event is written.
        only_at_the_end: Whether a value may still be replaced before the recording ends, so that none can be written.
    """

    def __init__(self, folder: str | os.PathLike[str], *, only_at_the_end: bool) -> None:
        self._folder = os.path.abspath(folder)
        self._only_at_the_end = only_at_the_end
        self._writer: Writer | None = None
        self._lock = threading.Lock()

    def write(self, recording: Recording) -> bool:
        """Write what is in memory; afterwards the recording reads it from disk. Returns whether it could be.

        Raises:
            FormatError: The disk refuses. The recording is as before.
        """
        if self._only_at_the_end:
            return False
        with self._lock:
            events = self._in_memory(recording)
            recording.exchange(events, self._open(recording).append(events))
        return True

    def finish(self, recording: Recording) -> None:
        """Write the rest, and what is known of the recording; it keeps in memory what is there.

        Raises:
            FormatError: The disk refuses. What was written before stays readable.
        """
        with self._lock:
            writer = self._open(recording)
            try:
                writer.append(self._in_memory(recording))
                writer.describe(info=recording.info, modules=recording.modules)
            finally:
                writer.close()

    def _in_memory(self, recording: Recording) -> list[Any]:
        return [event for event in recording.events if not isinstance(event, StoredEvent)]

    def _open(self, recording: Recording) -> Writer:
        if self._writer is None:
            self._writer = Writer(self._folder, info=recording.info, modules=recording.modules)
        return self._writer
