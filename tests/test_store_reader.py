"""Reading a recording: lazily, without touching the file, and with a clear error for whatever is wrong with it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from hookline import store
from hookline.record.event import Event

from .stored import HEAD, MANIFEST, SHARD, WRITER, line_by_line, read_all, three_events


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return three_events(tmp_path / "run")


@pytest.fixture
def three_lines(folder: Path) -> Path:
    return line_by_line(folder)


# ---------------------------------------------------------------- lazily


def test_summaries_do_not_touch_the_shard(folder: Path) -> None:
    events = store.open_recording(folder).events
    (folder / SHARD).write_bytes(b"")
    assert [event.summaries()["output"].mean for event in events] == [2.5, 3.5, 4.5]
    assert [event.nbytes for event in events] == [24, 24, 24]


def test_writing_into_a_value_does_not_reach_the_file(folder: Path) -> None:
    before = (folder / SHARD).read_bytes()
    event, other = store.open_recording(folder).events[:2]
    value = event.value
    value.add_(100).relu_()
    value.numpy()[0, 0] = -1
    assert value.tolist() == [[-1, 101, 102], [103, 104, 105]]
    assert other.value.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert (folder / SHARD).read_bytes() == before
    assert store.open_recording(folder).events[0].value.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_value_is_memory_of_its_own(folder: Path) -> None:
    """Not a view of the whole shard, which torch.save and deepcopy would write out for each tensor."""
    first, second = (event.value for event in store.open_recording(folder).events[:2])
    assert first.untyped_storage().nbytes() == 24
    assert not first.requires_grad
    assert not first._is_view() or first._base is not second._base
    first.add_(1)
    assert second._version == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no list of open files")
def test_no_file_stays_open(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    events = store.open_recording(folder).events
    values = [event.value for event in events]
    assert len(os.listdir("/proc/self/fd")) == before
    shutil.rmtree(folder)
    assert values[2].tolist() == events[2].value.tolist() == [[2, 3, 4], [5, 6, 7]]


def test_each_shard_is_mapped_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [], torch.from_file
    monkeypatch.setattr(torch, "from_file", lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs))
    events = store.open_recording(folder).events
    assert not calls
    for event in events:
        assert event.value.shape == event.leaves()[0][1].shape
    assert len(calls) == 1


def test_the_working_directory_may_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    events = store.open_recording("run").events
    with store.Writer("other", info={}, modules={}) as writer:
        monkeypatch.chdir("/")
        writer.append([Event(0, 0, "a", "output", 0, 0, torch.ones(1))])
    assert events[0].value.shape == (2, 3)
    assert len(store.open_recording(folder.parent / "other").events) == 1


def test_the_default_device_does_not_matter(folder: Path) -> None:
    with torch.device("meta"):
        values = [event.value for event in store.open_recording(folder).events]
    assert [value.device.type for value in values] == ["cpu"] * 3


def test_unaligned_data_of_another_writer(folder: Path) -> None:
    data = (folder / SHARD).read_bytes()
    length = int.from_bytes(data[:8], "little") + 1
    (folder / SHARD).write_bytes(
        length.to_bytes(8, "little") + data[8 : 8 + length - 1] + b" " + data[8 + length - 1 :]
    )
    manifest = re.sub(rb',"crc":"[0-9a-f]{8}"', b"", (folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_bytes(manifest.replace(b'"bytes":%d' % len(data), b'"bytes":%d' % (len(data) + 1)))
    assert [event.value[1, 2].item() for event in store.open_recording(folder).events] == [5, 6, 7]


def test_a_line_that_was_being_written_is_ignored(three_lines: Path) -> None:
    folder = three_lines
    assert store.open_recording(folder).torn == ()
    whole = (folder / MANIFEST).read_bytes()
    begins = whole.rindex(b"\n", 0, -1) + 1
    for end in range(begins, len(whole)):
        (folder / MANIFEST).write_bytes(whole[:end])
        parts = store.open_recording(folder)
        assert len(parts.events) == 2
        assert parts.torn == ((folder / MANIFEST,) if end > begins else ())


def test_other_files_do_not_matter(folder: Path) -> None:
    for name in ("notes.txt", "w-x", f"{WRITER}/000009.safetensors", f"{WRITER}/.000010.safetensors.tmp", ".DS_Store"):
        (folder / name).write_text("x")
    (folder / "w00001-a1b2c3").mkdir()
    assert len(read_all(folder)) == 3


def test_a_text_without_checksum_is_accepted(folder: Path) -> None:
    for name in (HEAD, MANIFEST):
        lines = (folder / name).read_bytes()
        (folder / name).write_bytes(re.sub(rb',"crc":"[0-9a-f]{8}"', b"", lines))
    assert len(read_all(folder)) == 3


def test_events_are_sorted_by_order_and_step(tmp_path: Path) -> None:
    places = [(3, 1), (1, 1), (1, 0), (0, 5)]
    events = [Event(order, step, "a", "output", 0, 0, None) for order, step in places]
    store.save(tmp_path / "run", info={}, modules={}, events=events)
    assert [(event.order, event.step) for event in store.open_recording(tmp_path / "run").events] == sorted(places)


def test_no_code_is_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pickle nor eval is reached, whatever the recording holds."""
    for name in ("pickle.loads", "pickle.load", "torch.load", "builtins.eval", "builtins.exec"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("code was run"))
    assert len(read_all(folder)) == 3
