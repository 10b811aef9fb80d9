"""Making, joining and replacing a recording."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import store
from hookline.errors import ArgumentError, FormatError, OptionError
from hookline.record.event import Event
from hookline.store import ModuleInfo, Writer, folders, planned

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


# ---------------------------------------------------------------- the plain way


def test_append_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "missing" / "parents" / "run.hookline"
    with Writer(folder, info={"a": 1}, modules=MODULES) as writer:
        assert store.open_recording(folder) == ({"a": 1}, MODULES, [], (), ())
        writer.append([event(0), event(1)])
        assert read(folder) == [0, 1]
        writer.append([])
        writer.append(iter([event(2)]))
        assert read(folder) == [0, 1, 2]
    (own,) = (path.name for path in folder.iterdir() if path.is_dir())
    assert re.fullmatch("w00000-[0-9a-f]{6}", own)
    assert sorted(files(folder)) == [
        "recording.json",
        f"{own}/000000.safetensors",
        f"{own}/000001.safetensors",
        f"{own}/manifest.jsonl",
    ]
    assert list(folder.parent.iterdir()) == [folder], "no temporary folder is left"


def test_a_large_flush_is_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "SHARD_BYTES", 100)
    save(tmp_path / "run", *range(10))  # 16 bytes each
    assert len(list(tmp_path.glob("run/w00000-*/*.safetensors"))) == 2
    assert read(tmp_path / "run") == [*range(10)]


def test_a_tensor_is_made_dense_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of an event that begins another shard."""
    made, dense = list[int](), planned.stored

    def count(tensor: torch.Tensor) -> Any:
        made.append(int(tensor.sum()))
        return dense(tensor)

    monkeypatch.setattr(planned, "SHARD_BYTES", 100)
    monkeypatch.setattr(planned, "stored", count)
    events = [Event(step, step, "a", "output", 0, 0, (torch.eye(4) * (step + 1)).to_sparse()) for step in range(5)]
    with Writer(tmp_path / "run", info={}, modules=MODULES) as writer:
        writer.append(events)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 5
    assert made == [4, 8, 12, 16, 20]
    assert [found.value.sum().item() for found in store.open_recording(tmp_path / "run").events] == made


def test_many_names_are_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "SHARD_NAMES", 400)
    save(tmp_path / "run", *range(10))
    assert len(list(tmp_path.glob("run/w00000-*/*.safetensors"))) == 4
    assert read(tmp_path / "run") == [*range(10)]


def test_appending_from_several_threads(tmp_path: Path) -> None:
    with Writer(tmp_path / "run", info={}, modules=MODULES) as writer, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda order: writer.append([event(order)]), range(20)))
    assert read(tmp_path / "run") == [*range(20)]


def test_a_file_system_that_cannot_sync_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def sync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(handle)

    monkeypatch.setattr(os, "fsync", sync)
    by_writer(tmp_path / "run", 0, 1)
    assert read(tmp_path / "run") == [0, 1]


def test_closed(tmp_path: Path) -> None:
    with Writer(tmp_path / "run", info={}, modules={}) as writer:
        pass
    writer.close()
    with pytest.raises(OptionError, match=r"run: this writer is closed\. Append before the with-block ends"):
        writer.append([event(0)])


def test_a_negative_writer(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"writer has to be a number from 0 on, got -1\. Pass the rank"):
        Writer(tmp_path / "run", info={}, modules={}, writer=-1)


# ---------------------------------------------------------------- several writers


def test_writers_join_and_the_reader_unites_them(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with (
        Writer(folder, info={"first": 1}, modules=MODULES, writer=3) as second,
        Writer(folder, info={"first": 2}, modules=MODULES, writer=0) as first,
    ):
        for order in range(6):
            (first if order % 2 else second).append([event(order)])
    parts = store.open_recording(folder)
    assert read(folder) == [0, 1, 2, 3, 4, 5]
    assert parts.info == {"first": 1}
    names = sorted(path.name for path in folder.iterdir())
    assert re.fullmatch(r"recording\.json w00000-[0-9a-f]{6} w00003-[0-9a-f]{6}", " ".join(names))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"sites": ["b:output"]}, r"with other sites: \['a:output'\] there, \['b:output'\] here\. Choose another name"),
        ({"structure": "ff"}, "with other modules or parameters: ee there, ff here"),
    ],
    ids=["sites", "structure"],
)
def test_what_joins_is_of_the_same(other: dict[str, Any], said: str, again: bool, tmp_path: Path) -> None:
    folder, info = tmp_path / "run", {"sites": ["a:output"], "structure": "ee", "host": "first"}
    Writer(folder, info=info, modules=MODULES).close()
    before = files(folder)
    with pytest.raises(OptionError, match=said):
        Writer(folder, info=info | other, modules=MODULES, writer=1, again=again)
    assert files(folder) == before
    for number, known in enumerate([info | {"host": "second"}, {"sites": ["a:output"]}, {}], start=1):
        Writer(folder, info=known, modules=MODULES, writer=number, again=again).close()
    assert len(files(folder)) == len(before) + 3


def test_one_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process makes the recording between the look and the rename."""
    folder, make = tmp_path / "run", folders.make_draft

    def slow(*arguments: Any) -> Path:
        monkeypatch.undo()
        draft = make(*arguments)
        Writer(folder, info={}, modules=MODULES, writer=1).close()
        return draft

    monkeypatch.setattr(folders, "make_draft", slow)
    with Writer(folder, info={}, modules=MODULES) as writer:
        writer.append([event(0)])
    assert read(folder) == [0]
    assert list(tmp_path.iterdir()) == [folder]


def test_overwriting_one_writers_part(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save(folder, 0, 1)
    for orders in ([2], [3, 4]):
        with Writer(folder, info={}, modules=MODULES, writer=1, overwrite=True) as writer:
            writer.append(map(event, orders))
    assert read(folder) == [0, 1, 3, 4]
    assert list(tmp_path.iterdir()) == [folder]


# ---------------------------------------------------------------- what stands there already


Make = Callable[..., None]


def by_writer(folder: Path, *orders: int, **options: Any) -> None:
    with Writer(folder, info={}, modules=MODULES, **options) as writer:
        writer.append(map(event, orders))


@pytest.fixture(params=[save, by_writer], ids=["save", "Writer"])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def test_an_existing_recording_is_not_replaced_unasked(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save(folder, 0)
    before = files(folder)
    wanted = f"{folder}: a recording of that name exists. Choose another name, or pass overwrite=True."
    with pytest.raises(OptionError, match=f"^{re.escape(wanted)}$"):
        make(folder, 1)
    assert files(tmp_path) == {f"run/{name}": data for name, data in before.items()}


def test_overwrite(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    by_writer(folder, 0, 1, writer=0)
    by_writer(folder, 2, writer=1)
    reading = store.open_recording(folder).events[0].value
    make(folder, 7, overwrite=True)
    assert read(folder) == [7]
    assert reading.tolist() == [0.0] * 4, "who reads the old one keeps it"
    assert list(tmp_path.iterdir()) == [folder]


def test_overwrite_of_nothing(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "run", 7, overwrite=True)
    assert read(tmp_path / "run") == [7]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("content", [None, "thesis.txt", "w00000-a1b2c3"])
def test_a_foreign_folder_is_left_alone(make: Make, content: str | None, overwrite: bool, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    if content is not None:
        (folder / content).write_text("years of work")
    before = files(tmp_path)
    wanted = (
        f"{folder}: this folder exists and is not a Hookline recording (it has no recording.json). "
        "Choose another name; the folder was left as it is."
    )
    with pytest.raises(FormatError, match=f"^{re.escape(wanted)}$"):
        make(folder, 0, overwrite=overwrite)
    assert files(tmp_path) == before
    assert folder.is_dir()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_foreign_file_is_left_alone(make: Make, overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("years of work")
    with pytest.raises(FormatError, match=r"run: this is a file, a recording is a folder\. Choose another name"):
        make(tmp_path / "run", 0, overwrite=overwrite)
    assert files(tmp_path) == {"run": b"years of work"}


@pytest.mark.parametrize("head", ["{}", '{"format": "other", "version": 1}', "not json", "[]"])
def test_a_foreign_recording_json(make: Make, head: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recording.json").write_text(head)
    with pytest.raises(FormatError, match=re.escape(str(tmp_path / "run" / "recording.json"))):
        make(tmp_path / "run", 0, overwrite=True)
    assert files(tmp_path) == {"run/recording.json": head.encode()}


@pytest.mark.parametrize("name", ["notes.txt", "{own}/notes.txt", "plots/a.png", "{own}/deep/000000.x"])
def test_overwrite_does_not_delete_what_somebody_put_into_a_recording(make: Make, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save(folder, 0)
    (own,) = folder.glob("w00000-*")
    name = name.format(own=own.name)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("mine")
    before = files(folder)
    with pytest.raises(
        FormatError, match=r"is not part of a recording, and overwrite=True would delete it. Move it else"
    ):
        make(folder, 1, overwrite=True)
    assert files(folder) == before
    assert list(tmp_path.iterdir()) == [folder]


def test_a_link_to_a_recording_is_followed(tmp_path: Path) -> None:
    save(tmp_path / "real", 0)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OptionError):
        save(tmp_path / "link", 1)
    save(tmp_path / "link", 1, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert read(tmp_path / "link") == read(tmp_path / "real") == [1]


def test_a_link_inside_a_recording_is_not_deleted(tmp_path: Path) -> None:
    save(tmp_path / "run", 0)
    (tmp_path / "data").mkdir()
    (tmp_path / "run" / "w00001-a1b2c3").symlink_to(tmp_path / "data")
    with pytest.raises(FormatError, match="w00001-a1b2c3: this is not part of a recording"):
        save(tmp_path / "run", 1, overwrite=True)


# ---------------------------------------------------------------- events that cannot be stored


def test_an_event_that_cannot_be_stored(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    bad = {
        r"a:output, call 0 of step 0: a object cannot be stored. Put hookline.values.Opaque in its place": object(),
        r"a dict key of type tuple cannot be stored. Use strings, numbers or None": {(1, 2): 3},
        r"a value is nested deeper than 128 levels. Record a part of it": cyclic,
    }
    with Writer(folder, info={}, modules=MODULES) as writer:
        writer.append([event(0)])
        for words, value in bad.items():
            with pytest.raises(ArgumentError, match=words):
                writer.append([event(1), Event(0, 0, "a", "output", 0, 0, value, {})])
        for words, wrong in {"'out' is no port": {"port": "out"}, "step is -1": {"step": -1}}.items():
            with pytest.raises(ArgumentError, match=words):
                writer.append([dataclasses.replace(event(1), **wrong)])
        assert read(folder) == [0]
        writer.append([event(1)])
    assert read(folder) == [0, 1]


def test_an_event_that_contradicts_itself(tmp_path: Path) -> None:
    class Odd(Event):
        def leaves(self) -> list[Any]:
            return []

    with pytest.raises(ArgumentError, match=r"its value has 1 tensors, its leaves\(\) are 0. Make Odd.leaves\(\) give"):
        store.save(tmp_path / "run", info={}, modules={}, events=[Odd(0, 0, "", "input", 0, 0, torch.ones(1))])
