"""Repair: every commit that is whole is in the new recording, what is not is named, and the old one stays as it is."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hookline
from hookline import store
from hookline.cli.main import main
from hookline.errors import FormatError, OptionError
from hookline.record.event import Event
from hookline.store import ModuleInfo, Writer, repair, verify

COMMITS = 4
MODULES = {"a": ModuleInfo("Linear", 3), "b": ModuleInfo("ReLU", 0)}


def value(order: int) -> torch.Tensor:
    return torch.arange(200.0) + order


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two writers of four commits; each commit has two events of one step, and a shard."""
    for number in (0, 1):
        with Writer(tmp_path / "run.hookline", info={"note": "mine"}, modules=MODULES, writer=number) as writer:
            for step in range(COMMITS):
                first = (number * COMMITS + step) * 2
                places = [(first, "a"), (first + 1, "b")]
                writer.append([Event(order, step, path, "output", number, 0, value(order)) for order, path in places])
    return tmp_path / "run.hookline"


def files(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted(path for path in folder.rglob(pattern) if path.is_file())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in files(folder)}


def manifest(folder: Path, writer: int = 0) -> Path:
    return files(folder, "manifest.jsonl")[writer]


def shard(folder: Path, number: int, writer: int = 0) -> Path:
    return manifest(folder, writer).parent / f"{number:06d}.safetensors"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.unlink()  # a hard link would reach another recording
    path.write_bytes(data)


def lines(folder: Path) -> list[bytes]:
    return manifest(folder).read_bytes().splitlines(keepends=True)


def orders(folder: Path) -> list[int]:
    """The events of a recording, each of which has to hold its own value."""
    events = hookline.load(folder).events
    assert all(torch.equal(event.value, value(event.order)) for event in events)
    return [event.order for event in events]


def without(*gone: int) -> list[int]:
    """Numbers of all events but those of some commits of the first writer."""
    return [order for order in range(4 * COMMITS) if order // 2 not in gone]


# ---------------------------------------------------------------- nothing was lost


def test_a_sound_recording(folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    done = repair(folder, tmp_path / "new")
    assert done == (8, 16, [], [])
    assert contents(tmp_path / "new") == contents(folder) == before
    for path in files(folder, "*.safetensors"):
        assert os.path.samefile(path, tmp_path / "new" / path.relative_to(folder))
    assert verify(tmp_path / "new").problems == []


def test_a_disk_without_hard_links(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    repair(folder, tmp_path / "new")
    assert contents(tmp_path / "new") == contents(folder)
    assert not any(os.path.samefile(path, tmp_path / "new" / path.relative_to(folder)) for path in files(folder))


def test_leftovers(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a killed writer leaves behind is no loss."""
    place = manifest(folder)
    with place.open("ab") as file:
        file.write(b'{"shards":[{"file":"000004.sa')
    (place.parent / "000004.safetensors").write_bytes(b"anything")
    (place.parent / ".000005.safetensors.tmp").write_bytes(b"")
    assert main(["repair", str(folder), "-o", str(tmp_path / "new")]) == 0
    name = place.parent.name
    assert capsys.readouterr().out.splitlines() == [
        f"left out: {name}/.000005.safetensors.tmp: an unfinished shard",
        f"left out: {name}/manifest.jsonl: its last line, which is unfinished",
        f"left out: {name}/000004.safetensors: no line names this shard",
        "new: 8 commits with 16 events saved, nothing lost",
    ]
    assert orders(tmp_path / "new") == without()
    assert len(files(tmp_path / "new")) == 1 + 2 + 8
    assert verify(tmp_path / "new").torn == []


def test_checksums_that_were_taken_out_are_put_back(folder: Path, tmp_path: Path) -> None:
    for path in (folder / "recording.json", manifest(folder)):
        texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        kept = [{key: entry for key, entry in json.loads(text).items() if key != "crc"} for text in texts]
        path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    assert len(verify(folder).problems) == 1 + COMMITS
    assert repair(folder, tmp_path / "new") == (8, 16, [], [])
    assert verify(tmp_path / "new").problems == []
    assert orders(tmp_path / "new") == without() and hookline.load(tmp_path / "new").info == {"note": "mine"}


# ---------------------------------------------------------------- something was


def rewrite(folder: Path, number: int, line: bytes) -> None:
    found = lines(folder)
    found[number] = line
    manifest(folder).write_bytes(b"".join(found))


HELD = "it held 2 events of step 1 at a:output, b:output"

DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit of a shard": (
        lambda folder: flip(shard(folder, 1), -1),
        f"WRITER/manifest.jsonl, line 2: WRITER/000001.safetensors: its checksum is SUM, its manifest says SUM; {HELD}",
    ),
    "a truncated shard": (
        lambda folder: os.truncate(shard(folder, 1), 100),
        f"WRITER/manifest.jsonl, line 2: WRITER/000001.safetensors: it has 100 bytes, its manifest says SIZE; {HELD}",
    ),
    "a missing shard": (
        lambda folder: shard(folder, 1).unlink(),
        f"WRITER/manifest.jsonl, line 2: WRITER/000001.safetensors: this part of the recording is missing; {HELD}",
    ),
    "a line that can still be read": (
        lambda folder: rewrite(folder, 1, lines(folder)[1].replace(b'"call":0', b'"call":7')),
        f"WRITER/manifest.jsonl, line 2: its checksum is not that of its text; {HELD}, as far as can be told",
    ),
    "a line of garbage": (
        lambda folder: rewrite(folder, 1, b"\x00\xff garbage\n"),
        "WRITER/manifest.jsonl, line 2: it is not valid JSON (",
    ),
    "a shard that is a link": (
        lambda folder: (shard(folder, 1).unlink(), shard(folder, 1).symlink_to(shard(folder, 0))),
        "WRITER/manifest.jsonl, line 2: WRITER/000001.safetensors: it is a link, which could lead out of the "
        f"recording; {HELD}",
    ),
    "a shard that two lines name": (
        lambda folder: rewrite(folder, 1, lines(folder)[0]),
        "WRITER/manifest.jsonl, line 2: it names the shard 000000.safetensors, which an earlier line names; "
        "it held 2 events of step 0 at a:output, b:output, as far as can be told",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_one_damaged_commit(name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, wanted = DAMAGE[name]
    size = shard(folder, 1).stat().st_size
    damage(folder)
    before = contents(folder)
    done = repair(folder, tmp_path / "new")
    assert (done.commits, done.events) == (7, 14) and len(done.lost) == 1
    writer, said = manifest(folder).parent.name, done.lost[0]
    for part in wanted.replace("WRITER", writer).replace("SIZE", str(size)).split("SUM"):
        assert part in said
    assert contents(folder) == before
    assert orders(tmp_path / "new") == without(1)
    assert verify(tmp_path / "new").problems == []
    assert len(files(tmp_path / "new", "*.safetensors")) == 7
    assert main(["repair", str(folder), "-o", str(tmp_path / "again")]) == 1
    *listed, last = capsys.readouterr().out.splitlines()
    assert listed[0] == f"lost: {said}" and last == "again: 7 commits with 14 events saved, 1 thing lost"


def test_garbage_says_that_it_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, 1, b"garbage\n")
    done = repair(folder, tmp_path / "new")
    assert done.lost[0].endswith("; what it held cannot be read")
    assert done.left_out == [f"{manifest(folder).parent.name}/000001.safetensors: no line names this shard"]


@pytest.mark.parametrize("text", [b"", b"{", b"[]\n", b'{"format":"hookline","version":2,"crc":"00000000"}\n', None])
def test_what_the_recording_says_of_itself(text: bytes | None, folder: Path, tmp_path: Path) -> None:
    (folder / "recording.json").unlink()
    if text is not None:
        (folder / "recording.json").write_bytes(text)
    done = repair(folder, tmp_path / "new")
    assert (done.commits, done.events) == (8, 16)
    (said,) = done.lost
    assert said.startswith("recording.json: ") and "A new one was made from the events: it names the sites, but" in said
    rec = hookline.load(tmp_path / "new")
    assert rec.paths == ["a", "b"] and rec.info["sites"] == ["a:output", "b:output"]
    assert "was damaged" in rec.info["repaired"]
    assert orders(tmp_path / "new") == without() and verify(tmp_path / "new").problems == []


def test_a_writer_without_its_manifest(folder: Path, tmp_path: Path) -> None:
    name = manifest(folder).parent.name
    manifest(folder).unlink()
    done = repair(folder, tmp_path / "new")
    assert done.lost == [f"{name}: it has no manifest.jsonl, so 4 shards cannot be read"]
    assert orders(tmp_path / "new") == list(range(8, 16))
    assert not (tmp_path / "new" / name).exists()


def test_a_writer_that_is_a_link(folder: Path, tmp_path: Path) -> None:
    old = manifest(folder).parent
    old.rename(tmp_path / old.name)
    old.symlink_to(tmp_path / old.name)
    done = repair(folder, tmp_path / "new")
    assert done.lost == [f"{old.name}: it is not a plain folder, so it was not followed"] and done.events == 8


def test_a_line_that_is_too_long(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines(folder)
    monkeypatch.setattr("hookline.store.format.MAX_LINE", 2000)
    manifest(folder).write_bytes(b"".join([*found[:2], b"x" * 9000 + b"\n", *found[2:]]))
    done = repair(folder, tmp_path / "new")
    name = manifest(folder).parent.name
    assert done.lost == [f"{name}/manifest.jsonl, line 3: it has more than 2000 bytes; what it held cannot be read"]
    assert orders(tmp_path / "new") == without()


def test_a_disk_that_fails(folder: Path, tmp_path: Path) -> None:
    """A manifest that cannot be read ends the search in that writer alone."""
    place = manifest(folder)
    place.unlink()
    place.mkdir()
    (said,) = repair(folder, tmp_path / "new").lost
    assert said == (
        f"{place.parent.name}/manifest.jsonl, from line 1 on: it is not a plain file; what it held cannot be read"
    )
    assert orders(tmp_path / "new") == list(range(8, 16))


def test_all_is_lost(folder: Path, tmp_path: Path) -> None:
    for path in files(folder, "*.safetensors"):
        path.write_bytes(b"")
    done = repair(folder, tmp_path / "new")
    assert (done.commits, done.events, len(done.lost)) == (0, 0, 8)
    assert len(hookline.load(tmp_path / "new")) == 0 and verify(tmp_path / "new").problems == []


def test_many_sites_are_cut_short(tmp_path: Path) -> None:
    with Writer(tmp_path / "run", info={}, modules={}) as writer:
        writer.append([Event(order, order % 3, f"m{order}", "output", 0, 0, value(order)) for order in range(9)])
    shard(tmp_path / "run", 0).write_bytes(b"")
    (said,) = repair(tmp_path / "run", tmp_path / "new").lost
    shown = ", ".join(f"m{number}:output" for number in range(5))
    assert said.endswith(f"; it held 9 events of 3 steps from 0 to 2 at {shown} and 4 more sites")


def test_any_flipped_bit(folder: Path, tmp_path: Path) -> None:
    """Wherever it is: the rest is saved, right and without a complaint."""
    pick = random.Random(5)
    for number in range(60):
        path = pick.choice(files(folder))
        whole = path.read_bytes()
        flip(path, pick.randrange(len(whole)))
        new = tmp_path / f"new{number}"
        done = repair(folder, new)
        head = path.name == "recording.json"
        # a newline that is gone joins two lines, or makes the last one an unfinished one
        assert done.events == 16 if head else 12 <= done.events <= 14, path
        assert done.lost or done.left_out
        assert len(orders(new)) == done.events and verify(new).problems == []
        path.write_bytes(whole)
    assert repair(folder, tmp_path / "last") == (8, 16, [], [])


# ---------------------------------------------------------------- refused


def test_places_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    (tmp_path / "taken").mkdir()
    with pytest.raises(OptionError, match="taken: something of that name exists and was left as it is"):
        repair(folder, tmp_path / "taken")
    with pytest.raises(OptionError, match=r"run\.hookline: something of that name exists"):
        repair(folder, folder)
    with pytest.raises(OptionError, match=r"lies in the recording that is repaired\. Choose a name outside of"):
        repair(folder, folder / "inner" / "new")
    for missing in ("missing", "taken"):
        with pytest.raises(FormatError, match=r"there is no recording of that name|is not a Hookline recording"):
            repair(tmp_path / missing, tmp_path / "new")
    assert contents(tmp_path) == before and sorted(os.listdir(tmp_path)) == ["run.hookline", "taken"]


def test_another_version_is_not_damage(folder: Path, tmp_path: Path) -> None:
    entry = json.loads((folder / "recording.json").read_bytes())
    entry |= {"version": 3}
    del entry["crc"]
    body = json.dumps(entry)[:-1].encode()
    (folder / "recording.json").write_bytes(body + b',"crc":"%08x"}\n' % zlib.crc32(body))
    with pytest.raises(FormatError, match="has format version 3, this Hookline reads up to 2"):
        repair(folder, tmp_path / "new")
    assert os.listdir(tmp_path) == ["run.hookline"]


def test_nothing_is_left_after_an_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("shutil.copyfile", refuse)
    with pytest.raises(FormatError, match=r"new: the new recording cannot be written \(.*No space left"):
        repair(folder, tmp_path / "new")
    assert os.listdir(tmp_path) == ["run.hookline"]
    assert store.verify(folder).problems == []
