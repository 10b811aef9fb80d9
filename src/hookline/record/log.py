"""The events of a recording: in memory, and on disk where they went."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Log"]


class Log:
    """Events by their place; recorders and their threads add to it while others read.

    What a stream has committed is forgotten, and fetched from disk only when somebody reads: a long run needs no
    memory for what it has written.
    """

    def __init__(self) -> None:
        self._events: dict[int, Any] = {}  # by id, so that several threads can add without a common counter
        self._by_path: dict[str, dict[int, Any]] = {}
        self._newest: dict[tuple[str, str], Any] = {}
        self._changes: dict[str, int] = {}
        self._in_order = True
        self._lock = threading.RLock()
        self._fetch: Callable[[], Iterable[Any]] | None = None
        self._stale = False

    def __getstate__(self) -> dict[str, Any]:
        return {"events": self.events}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Log.__init__(self)
        for event in state["events"]:
            self.add(event)

    # ------------------------------------------------------------ reading

    @property
    def events(self) -> list[Any]:
        """Every event, in order."""
        with self._lock:
            self._catch_up()
            return self._sorted(self._events)

    def of(self, path: str) -> list[Any]:
        """The events of a module, in order."""
        with self._lock:
            self._catch_up()
            return self._sorted(self._by_path.get(path, {}))

    def changes(self, path: str) -> int:
        """A number that is another one whenever the events of a module have changed."""
        self._catch_up()
        return self._changes.get(path, 0)

    def __len__(self) -> int:
        self._catch_up()
        return len(self._events)

    @property
    def in_memory(self) -> list[Any]:
        """The events that are not committed."""
        return self._sorted(self._events)

    def _sorted(self, events: dict[int, Any]) -> list[Any]:
        with self._lock:
            found = list(events.values())
        return found if self._in_order else sorted(found, key=operator.attrgetter("order"))

    def _catch_up(self) -> None:
        if self._stale:
            with self._lock:
                if self._fetch is not None:
                    for event in self._fetch():
                        self.add(event)
                    self._in_order = False
                self._stale = False

    # ------------------------------------------------------------ writing

    def add(self, event: Any) -> None:
        """Add an event."""
        self._events[id(event)] = event
        self._by_path.setdefault(event.path, {})[id(event)] = event
        self._newest[event.path, event.port] = event
        self._changed(event.path)

    def exchange(self, old: Iterable[Any], new: Iterable[Any]) -> None:
        """Put events in the place of others, such as events on disk."""
        with self._lock:
            self._in_order = False
            for event, other in zip(old, new, strict=True):
                self.add(other)
                self._remove(event)

    def fetch_from(self, fetch: Callable[[], Iterable[Any]]) -> None:
        """There are more events, on disk; ``fetch`` gives at each call those that it has not given before."""
        with self._lock:
            self._fetch, self._stale = fetch, True

    def settle(self, commit: Callable[[], None], events: Iterable[Any]) -> None:
        """Make events part of the recording on disk by ``commit``, and forget them; nobody reads in between."""
        with self._lock:
            commit()
            self.remove(events)
            self._stale = True

    def remove(self, events: Iterable[Any]) -> None:
        """Remove events."""
        with self._lock:
            for event in events:
                self._remove(event)

    def drop(self, path: str, port: str) -> Any:
        """Remove and return the newest event of a site, None where there is none."""
        event = self._newest.get((path, port))
        if event is not None:
            self._remove(event)
        return event

    def _remove(self, event: Any) -> None:
        if id(event) not in self._events:
            return
        del self._events[id(event)]  # the id may come again once the event is gone
        place = event.path, event.port
        del self._by_path[event.path][id(event)]
        if self._newest.get(place) is event:
            del self._newest[place]
        self._changed(event.path)

    def _changed(self, path: str) -> None:
        self._changes[path] = self._changes.get(path, 0) + 1
