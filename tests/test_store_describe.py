"""What a recording says of itself: said anew while it is written; and asking for a place before anything is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import store
from hookline.errors import ArgumentError, FormatError, OptionError
from hookline.record.event import Event
from hookline.store import ModuleInfo, Writer, check_free, folders

FIRST = {"": ModuleInfo("Net", 3)}
BOTH = {**FIRST, "Loss/": ModuleInfo("Loss", 0, ("Loss/same",))}


def event(order: int) -> Event:
    return Event(order, 0, "", "output", order, 0, torch.ones(2))


def test_describe_replaces_info_and_modules_and_keeps_the_events(tmp_path: Path) -> None:
    folder = tmp_path / "run.hookline"
    with Writer(folder, info={"a": 1}, modules=FIRST) as writer:
        writer.append([event(0)])
        writer.describe(info={"b": 2}, modules=BOTH)
        writer.append([event(1)])
        info, modules, events, torn, _ = store.open_recording(folder)
    assert (info, modules, torn) == ({"b": 2}, BOTH, ())
    assert list(modules) == list(BOTH)
    assert [one.call for one in events] == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.hookline"]
    store.save(folder, info={}, modules=FIRST, events=[], overwrite=True)


@pytest.mark.parametrize("place", ["write_synced", "os.replace"])
def test_a_description_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, os.strerror(28))

    folder = tmp_path / "run.hookline"
    with Writer(folder, info={"a": 1}, modules=FIRST) as writer:
        with monkeypatch.context() as patch:
            target = os if place == "os.replace" else folders
            patch.setattr(target, place.removeprefix("os."), full)
            with pytest.raises(FormatError, match=r"cannot be written \(No space left on device\)\. Free some space"):
                writer.describe(info={"b": 2}, modules=BOTH)
        assert store.open_recording(folder) == ({"a": 1}, FIRST, [], (), ())
        writer.describe(info={"c": 3}, modules=BOTH)
    assert store.open_recording(folder).info == {"c": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.hookline"]


def test_what_cannot_be_described(tmp_path: Path) -> None:
    with Writer(tmp_path / "run.hookline", info={}, modules=FIRST) as writer:
        with pytest.raises(ArgumentError, match=r"info\['a'\] cannot be written as JSON"):
            writer.describe(info={"a": object()}, modules=BOTH)
        assert store.open_recording(writer.folder).modules == FIRST
    with pytest.raises(OptionError, match=r"this writer is closed\. Describe before the with-block ends\."):
        writer.describe(info={}, modules=BOTH)


def test_a_free_place_and_one_that_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "run.hookline"
    check_free(folder)
    check_free(tmp_path / "missing" / "run.hookline", overwrite=True)
    assert list(tmp_path.iterdir()) == []
    store.save(folder, info={}, modules=FIRST, events=[event(0)])
    check_free(folder, overwrite=True)
    assert len(store.open_recording(folder).events) == 1
    with pytest.raises(OptionError, match="a recording of that name exists"):
        check_free(folder)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_place_where_something_else_stands(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FormatError, match="this is a file, a recording is a folder"):
        check_free(tmp_path / "file", overwrite=overwrite)
    with pytest.raises(FormatError, match="is not a Hookline recording"):
        check_free(tmp_path / "folder", overwrite=overwrite)


def test_a_recording_with_something_else_in_it_may_not_be_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "run.hookline"
    store.save(folder, info={}, modules=FIRST, events=[])
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FormatError, match=r"notes\.txt: this is not part of a recording"):
        check_free(folder, overwrite=True)
