"""Processes that append to a recording at once or are killed at it, and what can be read of it then."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hookline import store

SHARED = """
    import os, random, signal, sys, time, traceback, torch
    from hookline.record.event import Event
    from hookline.store import ModuleInfo, Writer, appender, shard, tensors

    torch.set_num_threads(1)

    def whole(number, path="a"):
        # one append: as many events as its number says, with sizes that depend on it
        place = lambda part: (number * 10 + part, number, path, "output", part, 0)
        size, parts = 1 + number * 997 % 5000, range(2 + number % 3)
        return [Event(*place(part), torch.full((size,), float(number))) for part in parts]

    def fork(work):
        child = os.fork()
        if child == 0:
            try:
                work()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        return child
"""


def start(text: str, *args: object) -> subprocess.Popen[str]:
    """A Python of its own, so that what it forks has no threads of other tests."""
    code = textwrap.dedent(SHARED) + textwrap.dedent(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def appends(folder: Path) -> dict[str, list[int]]:
    """The appends that can be read, by path; each has to be whole and every element right."""
    return whole_appends(store.open_recording(folder).events)


def whole_appends(events: Iterable[Any]) -> dict[str, list[int]]:
    """The numbers of the appends that these events are of, by path."""
    parts: dict[tuple[str, int], list[int]] = defaultdict(list)
    for event in events:
        assert event.value.shape == (1 + event.step * 997 % 5000,)
        assert bool((event.value == float(event.step)).all())
        parts[event.path, event.step].append(event.call)
    found: dict[str, list[int]] = defaultdict(list)
    for (path, number), calls in parts.items():
        assert sorted(calls) == [*range(2 + number % 3)], "half an append, or a doubled one"
        found[path].append(number)
    return {path: sorted(numbers) for path, numbers in found.items()}
