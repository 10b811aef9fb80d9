"""Kills and cuts: what an append that returned has written is there, and of the others nothing or all."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from hookline import store
from hookline.errors import ArgumentError, FormatError
from hookline.record.event import Event
from hookline.store import Writer, appender, folders, planned, verify
from hookline.store import format as layout

from .appends import appends, finish, start

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs fork and signals")

# ---------------------------------------------------------------- between the shard and the line


def event(order: int, size: int = 4) -> Event:
    return Event(order, order, "a", "output", 0, 0, torch.full((size,), float(order)))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("place", ["lines", "rename"])
def test_an_error_between_shard_and_line(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planned, "SHARD_BYTES", 100)
    with Writer(tmp_path / "run", info={}, modules={}) as writer:
        writer.append(map(event, range(3)))
        before = files(tmp_path)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(*((appender.Appender, "_write_lines") if place == "lines" else (os, "replace")), fail)
            writer.append(map(event, range(3, 30)))
        assert files(tmp_path) == before
        written = writer.append(map(event, range(3, 30)))
    assert [one.value[0].item() for one in written] == [*range(3, 30)]
    assert [one.value[0].item() for one in store.open_recording(tmp_path / "run").events] == [*range(30)]
    assert verify(tmp_path / "run").problems == []
    assert not [name for name in files(tmp_path) if "tmp" in name or "/." in name]


def test_an_interrupt_at_any_line_of_an_append(tmp_path: Path) -> None:
    """Ctrl-C comes between any two lines of the appender: the append is there or not, and nothing of it is missing."""
    folder, left = tmp_path / "run", 0
    done: list[float] = []

    def interrupt(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != appender.__file__:
            return None
        if what == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return interrupt

    before, interrupted = sys.gettrace(), True
    with Writer(folder, info={}, modules={}) as writer:
        # a trace function also interrupts where Python lets no signal in, between taking a lock and the with-block
        writer._appender._one_at_a_time = contextlib.nullcontext()
        for stop_at in range(1, 1000):
            order, left = stop_at * 10, stop_at
            try:
                sys.settrace(interrupt)
                writer.append([event(order), event(order + 1)])
                interrupted = False
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            found = [one.value[0].item() for one in store.open_recording(folder).events]
            assert found in (done, [*done, order, order + 1]), stop_at
            done = found
            if not interrupted:
                break
    assert 20 < stop_at < 999
    assert found[-1] == order + 1
    assert verify(folder).problems == []


EXITS = """
    def leave(*args, **kwargs):
        os._exit(9)

    def half(self, lines, *_):
        os.write(self._manifest.fileno(), lines[0][: len(lines[0]) // 2])
        os._exit(9)

    def append(folder, target, name, change):
        with Writer(folder, info={}, modules={}) as writer:
            writer.append(whole(0))
            setattr(target, name, change)
            writer.append(whole(1))

    exits = {
        "data": (tensors.Stage, "flush", leave),
        "rename": (os, "replace", leave),
        "lines": (appender.Appender, "_write_lines", leave),
        "half": (appender.Appender, "_write_lines", half),
    }
    for name, where in exits.items():
        child = fork(lambda: append(f"{sys.argv[1]}/{name}", *where))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
"""


def test_an_exit_between_shard_and_line(tmp_path: Path) -> None:
    finish(start(EXITS, tmp_path))
    left = {}
    for name in ("data", "rename", "lines", "half"):
        folder = tmp_path / name
        assert appends(folder) == {"a": [0]}
        report = verify(folder)
        assert (report.problems, report.events, len(report.torn)) == ([], 2, int(name == "half"))
        left[name] = sorted(path.name for path in folder.rglob("*.safetensors*"))
        with Writer(folder, info={}, modules={}, writer=1) as writer:
            writer.append([Event(100, 4, "b", "output", call, 0, torch.full((3989,), 4.0)) for call in range(3)])
        assert appends(folder) == {"a": [0], "b": [4]}
        store.save(folder, info={}, modules={}, events=[], overwrite=True)
        assert store.open_recording(folder).events == []
    assert left["data"] == left["rename"] == [".000001.safetensors.tmp", "000000.safetensors"]
    assert left["lines"] == left["half"] == ["000000.safetensors", "000001.safetensors"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no list of open files")
def test_what_is_waited_for_before_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of the machine cannot be made here; what protects from it is the order of these calls."""
    calls: list[str] = []

    def logged(name: str, real: Any) -> Any:
        def call(target: Any, *rest: Any) -> Any:
            path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else Path(target)
            calls.append(f"{name} {path.name.partition('-')[0]}")
            return real(target, *rest)

        return call

    monkeypatch.setattr(planned, "SHARD_BYTES", 16)
    with Writer(tmp_path / "run", info={}, modules={}) as writer:
        real = appender.write_all
        monkeypatch.setattr(
            appender, "write_all", lambda file, data: logged("write", lambda _: real(file, data))(file.name)
        )
        for name in ("fsync", "replace"):
            monkeypatch.setattr(os, name, logged(name, getattr(os, name)))
        writer.append(map(event, range(2)))
    assert calls == [
        *("fsync .000000.safetensors.tmp", "replace .000000.safetensors.tmp"),
        *("fsync .000001.safetensors.tmp", "replace .000001.safetensors.tmp"),
        *("fsync w00000", "write manifest.jsonl", "fsync manifest.jsonl"),
    ]


def test_two_writers_of_one_number_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither sees the other in time; no file is written by both."""
    folder = tmp_path / "run"
    with Writer(folder, info={}, modules={}) as first:
        monkeypatch.setattr(folders, "parts_of", lambda *_: [])
        with Writer(folder, info={}, modules={}) as second:
            for order in range(6):
                (first if order % 2 else second).append([event(order)])
    assert [one.order for one in store.open_recording(folder).events] == [*range(6)]
    assert len(list(folder.glob("w00000-*"))) == 2


# ---------------------------------------------------------------- one append, one line


def lines_of(folder: Path) -> list[bytes]:
    (manifest,) = folder.glob("w*/manifest.jsonl")
    return manifest.read_bytes().splitlines(keepends=True)


def test_an_append_is_one_line_whatever_shards_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "SHARD_BYTES", 100)
    store.save(tmp_path / "run", info={}, modules={}, events=map(event, range(20)))
    (line,) = lines_of(tmp_path / "run")
    assert line.count(b'"crc32c"') == len(list(tmp_path.glob("run/w*/*.safetensors"))) == 4


def test_an_append_that_needs_too_long_a_line_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_LINE", 2000)
    with Writer(tmp_path / "run", info={}, modules={}) as writer:
        written = writer.append([*map(event, range(20)), Event(20, 0, "b", "output", 0, 0, None)])
        before = files(tmp_path)
        with pytest.raises(ArgumentError, match=r"need a manifest line of \d+ bytes, at most 2000 are"):
            writer.append([event(21), Event(22, 0, "b", "output", 0, 0, "x" * 2000)])
        assert files(tmp_path) == before
        writer.append([event(21)])
    found = lines_of(tmp_path / "run")
    assert 3 < len(found) < 20
    assert max(map(len, found)) <= 2000
    events = store.open_recording(tmp_path / "run").events
    assert [one.order for one in events] == [*range(22)]
    assert [one.value[0].item() for one in events if one.path == "a"] == [*range(20), 21]
    assert [str(one._where) for one in events[:21]] == [str(one._where) for one in written]
    assert verify(tmp_path / "run").problems == []


# ---------------------------------------------------------------- cut off anywhere


LAST = 4096


@pytest.fixture(scope="module")
def eight_lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each of the files that are cut is longer than what is cut off."""
    folder = tmp_path_factory.mktemp("cut") / "run"
    with Writer(folder, info={"text": "x" * LAST}, modules={}) as writer:
        for number in range(8):
            writer.append([event(number * 2, 600), event(number * 2 + 1, 600)])
    return folder


@pytest.mark.parametrize("pattern", ["recording.json", "w*/manifest.jsonl", "w*/000003.safetensors"])
def test_a_file_that_is_cut_off_anywhere(pattern: str, eight_lines: Path, tmp_path: Path) -> None:
    """At every byte of its last 4 KiB: a FormatError, or the events of the whole lines before, each right."""
    folder = tmp_path / "run"
    shutil.copytree(eight_lines, folder)
    (path,) = folder.glob(pattern)
    whole = path.read_bytes()
    assert len(whole) > LAST
    outcomes = set()
    for end in range(len(whole) - 1, len(whole) - LAST - 1, -1):
        os.truncate(path, end)
        try:
            parts = store.open_recording(folder)
            found = [one.value for one in parts.events]
        except FormatError as error:
            assert str(path) in str(error)
            outcomes.add("refused")
            continue
        lines = whole[:end].count(b"\n") if path.suffix == ".jsonl" else 8
        assert len(found) == lines * 2
        assert all(torch.equal(value, torch.full((600,), float(order))) for order, value in enumerate(found))
        assert parts.torn == ((path,) if path.suffix == ".jsonl" and whole[end - 1 : end] != b"\n" else ())
        outcomes.add(lines)
    first = whole[:-LAST].count(b"\n")
    # without the newline at its end, recording.json still says it all
    wanted = {".jsonl": {*range(first, 8)}, ".json": {"refused", 8}, ".safetensors": {"refused"}}
    assert outcomes == wanted[path.suffix]
    assert path.suffix != ".jsonl" or 0 < first < 4


# ---------------------------------------------------------------- killed

KILLS = 50

KILLED = """
    def write(folder, pipe):
        with Writer(folder, info={}, modules={}) as writer:
            for number in range(10**6):
                os.write(pipe, f"begin {number}\\n".encode())
                writer.append(whole(number))
                os.write(pipe, f"done {number}\\n".encode())

    chance = random.Random(0)
    for kill in range(int(sys.argv[2])):
        read_end, write_end = os.pipe()
        child = fork(lambda: write(f"{sys.argv[1]}/{kill}", write_end))
        os.close(write_end)
        said = os.read(read_end, 100)
        time.sleep(chance.random() * 0.06)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(read_end, 10000):
            said += more
        os.close(read_end)
        words = said.decode().split()
        last = {"begin": -1, "done": -1}
        last.update(zip(words[::2], words[1::2]))
        print(last["begin"], last["done"])
"""


def test_killed_at_random_moments(tmp_path: Path) -> None:
    lines = finish(start(KILLED, tmp_path, KILLS)).splitlines()
    assert len(lines) == KILLS
    returned = 0
    for kill, line in enumerate(lines):
        begun, done = map(int, line.split())
        numbers = appends(tmp_path / str(kill)).get("a", [])
        assert numbers == [*range(len(numbers))]
        assert done <= len(numbers) - 1 <= begun
        assert verify(tmp_path / str(kill)).problems == []
        returned += done + 1
    assert returned > KILLS, "hardly an append returned before the kills"
