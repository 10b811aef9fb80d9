"""A disk that refuses, a Ctrl-C, a kill: what was acknowledged can be read, and nothing half-written stays."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import store
from hookline.errors import FormatError
from hookline.record.event import Event
from hookline.store import ModuleInfo, Writer

resource = pytest.importorskip("resource")
MODULES = {"": ModuleInfo("Net", 3), "a": ModuleInfo("Linear", 3)}


def event(order: int, size: int = 4) -> Event:
    return Event(order, order, "a", "output", 0, 0, torch.full((size,), float(order)))


def read(folder: Path) -> list[float]:
    """The number in each tensor of a recording; every element is looked at."""
    found = []
    for stored in store.open_recording(folder).events:
        (number,) = set(stored.value.tolist())
        assert number == stored.order == stored.step
        found.append(number)
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save(folder: Path, *orders: int, **options: Any) -> None:
    store.save(folder, info={}, modules=MODULES, events=map(event, orders), **options)


Make = Callable[..., None]


def by_writer(folder: Path, *orders: int, **options: Any) -> None:
    with Writer(folder, info={}, modules=MODULES, **options) as writer:
        writer.append(map(event, orders))


@pytest.fixture(params=[save, by_writer], ids=["save", "Writer"])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


# ---------------------------------------------------------------- a disk that refuses


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC], ids=os.strerror)
def test_a_place_that_cannot_be_written_to(make: Make, number: int, tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    advice = (
        "Free some space or choose another disk" if number == errno.ENOSPC else "Choose a folder that you may write"
    )
    wanted = f"{tmp_path / 'run'}: the recording cannot be written ({os.strerror(number)}). {advice}"
    with pytest.raises(FormatError, match=f"^{re.escape(wanted)}") as caught:
        make(tmp_path / "run", 0)
    assert isinstance(caught.value.__cause__, OSError)
    assert not list(tmp_path.iterdir())


def test_a_parent_that_is_a_file(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match="file/run: the recording cannot be written"):
        make(tmp_path / "file" / "run", 0)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to let a file grow beyond a size, much as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_disk_fills_up_in_a_shard(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Writer(folder, info={}, modules=MODULES) as writer:
        writer.append([event(0)])
        with (
            largest_file(100_000),
            pytest.raises(FormatError, match=r"run: the recording cannot be written .* Free some"),
        ):
            writer.append([event(1, 10), event(2, 10**6)])
        assert read(folder) == [0]
        assert len(list(folder.glob("w00000-*/*0*"))) == 1, "the half shard is gone"
        writer.append([event(1)])
    assert read(folder) == [0, 1]


def test_the_disk_fills_up_in_the_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Writer(folder, info={}, modules=MODULES) as writer:
        writer.append(map(event, range(20)))
        (manifest,) = folder.glob("w00000-*/manifest.jsonl")
        size = manifest.stat().st_size
        with largest_file(size + 700), pytest.raises(FormatError, match="What was appended before is complete"):
            writer.append([event(20, 1), event(21, 1), event(22, 1)])
        assert read(folder) == [*range(20)]
        writer.append([event(20)])
    assert read(folder) == [*range(21)]


def test_the_disk_fills_up_in_a_save(tmp_path: Path) -> None:
    save(tmp_path / "run", 0)
    with largest_file(100_000), pytest.raises(FormatError, match="run: the recording cannot be written"):
        store.save(tmp_path / "run", info={}, modules={}, events=[event(0, 10**6)], overwrite=True)
    assert read(tmp_path / "run") == [0]
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, RuntimeError])
@pytest.mark.parametrize("old", [False, True])
def test_a_save_that_is_interrupted_leaves_what_was_there(stop: type[BaseException], old: bool, tmp_path: Path) -> None:
    if old:
        save(tmp_path / "run", 5)

    def some() -> Iterator[Event]:
        yield event(0)
        raise stop

    with pytest.raises(stop):
        store.save(tmp_path / "run", info={}, modules={}, events=some(), overwrite=old)
    assert list(tmp_path.iterdir()) == ([tmp_path / "run"] if old else [])
    assert not old or read(tmp_path / "run") == [5]


@pytest.mark.parametrize("place", ["rename", "fsync"])
def test_a_save_that_is_interrupted_while_it_is_put_in_place(place: str, tmp_path: Path, monkeypatch: Any) -> None:
    """At whichever call Ctrl-C comes, the name holds the old recording or the new one, whole."""
    real = getattr(os, place)
    for stop_at in range(1, 12):
        save(tmp_path / "run", 5, **({"overwrite": True} if stop_at > 1 else {}))
        calls = 0

        def interrupted(*arguments: Any, stop_at: int = stop_at) -> None:
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise KeyboardInterrupt
            real(*arguments)

        monkeypatch.setattr(os, place, interrupted)
        done = True
        try:
            save(tmp_path / "run", 6, overwrite=True)
        except KeyboardInterrupt:
            done = False
        monkeypatch.undo()
        assert read(tmp_path / "run") in ([[6]] if done else [[5], [6]])
        assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_an_interrupted_append_is_taken_back(tmp_path: Path, monkeypatch: Any) -> None:
    folder, real, calls = tmp_path / "run", os.fsync, 0

    def interrupted(handle: int) -> None:
        nonlocal calls
        calls += 1
        real(handle)
        if calls == stop_at:
            raise KeyboardInterrupt

    with Writer(folder, info={}, modules=MODULES) as writer:
        writer.append([event(0)])
        for stop_at in (1, 2, 3):  # noqa: B007 (read in interrupted)
            calls = 0
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(os, "fsync", interrupted)
                writer.append([event(1), event(2)])
            assert read(folder) == [0]
        writer.append([event(1)])
    assert read(folder) == [0, 1]
    assert len(list(folder.glob("w00000-*/*0*"))) == 2


# ---------------------------------------------------------------- killed

WRITING = """
    import os, signal, sys, time, torch
    from hookline.record.event import Event
    from hookline.store import Writer

    def write(folder, pipe):
        with Writer(folder, info={}, modules={}) as writer:
            for order in range(10**6):
                tensor = torch.full((1 << 18,), float(order))
                writer.append([Event(order, order, "a", "output", 0, 0, tensor)])
                os.write(pipe, b"x")

    torch.set_num_threads(1)
    for number in range(6):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            write(f"{sys.argv[1]}/{number}", write_end)
        os.close(write_end)
        acknowledged = len(os.read(read_end, 1))
        time.sleep(0.05 + number * 0.0037)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(read_end, 1000):
            acknowledged += len(more)
        print(acknowledged)
"""


def test_killed_while_appending(tmp_path: Path) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", textwrap.dedent(WRITING), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    for number, line in enumerate(done.stdout.split()):
        found = read(tmp_path / str(number))
        assert len(found) >= int(line) > 0
        assert found == [*range(len(found))]
    assert number == 5
