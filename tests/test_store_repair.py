"""Repair: every commit that is whole is in the new recording, what is not is named, and the old one stays as it is."""

from __future__ import annotations

import json
import os
import random
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hookline
from hookline import store
from hookline.cli.main import main
from hookline.errors import FormatError, OptionError, SiteError
from hookline.record.batch import Batch
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
    return sorted(event.order for event in events)


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


@pytest.mark.parametrize("text", [b"", b"{", b"[]\n", b'{"format":"hookline","version":3,"crc":"00000000"}\n', None])
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


def cut_up(folder: Path) -> Path:
    """The lines of the first writer in a manifest each, as on an object store; the folder of that writer."""
    found = lines(folder)
    for number, line in enumerate(found):
        name = "manifest.jsonl" if number == 0 else f"manifest-{number:06d}.jsonl"
        (manifest(folder).parent / name).write_bytes(line)
    assert orders(folder) == without()
    return manifest(folder).parent


@pytest.mark.parametrize("gone", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
def test_manifests_that_are_gone(gone: tuple[int, ...], folder: Path, tmp_path: Path) -> None:
    """What the others name is saved; load and verify name the first that is gone, be it the first of all."""
    writer = cut_up(folder)
    names = ["manifest.jsonl", *(f"manifest-{number:06d}.jsonl" for number in (1, 2, 3))]
    for number in gone:
        (writer / names[number]).unlink()
    said = f"{writer.name}/{names[gone[0]]}: this part of the recording is missing. Copy the whole recording again; "
    with pytest.raises(FormatError, match=re.escape(said) + ".*`hookline repair`"):
        hookline.load(folder)
    (problem,) = verify(folder).problems
    assert said in problem
    before = contents(folder)
    done = repair(folder, tmp_path / "new")
    gaps = {
        (0, 1): "manifest.jsonl to manifest-000001.jsonl: they are",
        (1, 2): "manifest-000001.jsonl to manifest-000002.jsonl: they are",
        (0, 1, 2): "manifest.jsonl to manifest-000002.jsonl: they are",
    }
    wanted = [gaps[gone]] if gone in gaps else [f"{names[number]}: it is" for number in gone]
    assert done.lost == [f"{writer.name}/{gap} missing; what it held cannot be read" for gap in wanted]
    assert done.left_out == [f"{writer.name}/{number:06d}.safetensors: no line names this shard" for number in gone]
    assert orders(tmp_path / "new") == without(*gone) and verify(tmp_path / "new").problems == []
    assert contents(folder) == before


def test_a_number_that_no_manifest_has_takes_no_time(folder: Path, tmp_path: Path) -> None:
    writer = manifest(folder).parent
    (writer / "manifest-999999999999.jsonl").write_bytes(b"")
    (writer / "manifest-0000001.jsonl").write_bytes(b"")  # no name that Hookline gives
    done = repair(folder, tmp_path / "new")
    assert done.lost == [
        f"{writer.name}/manifest-000001.jsonl to manifest-999999999998.jsonl: they are missing; what it held cannot be "
        "read"
    ]
    assert orders(tmp_path / "new") == without()


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


def test_a_cut_off_line_before_another_manifest_is_lost(folder: Path, tmp_path: Path) -> None:
    """A writer begins a manifest when the one before is complete, so its cut-off end was part of the recording."""
    place = manifest(folder)
    whole = lines(folder)
    (place.parent / "manifest-000001.jsonl").write_bytes(b"".join(whole[3:]))
    place.write_bytes(b"".join(whole[:3])[:-9])
    done = repair(folder, tmp_path / "new")
    assert [said.partition(": ")[2] for said in done.left_out] == ["no line names this shard"]
    assert [said.partition(":")[0] for said in done.lost] == [f"{place.parent.name}/manifest.jsonl, line 3"]
    assert len(orders(tmp_path / "new")) == done.events == 14


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
        place = pick.randrange(len(whole))
        flip(path, place)
        new = tmp_path / f"new{number}"
        done = repair(folder, new)
        head = path.name == "recording.json"
        # A line whose checksum is no checksum any more is taken as one without: nothing of it is lost.
        if path.suffix == ".jsonl" and b'"crc"' in whole[max(0, place - 20) : place + 8]:
            assert 14 <= done.events <= 16, (path, done)
        else:
            # a newline that is gone joins two lines, or makes the last one an unfinished one
            assert done.events == 16 if head else 12 <= done.events <= 14, (path, done)
            assert done.lost or done.left_out
        assert len(orders(new)) == done.events and verify(new).problems == []
        path.write_bytes(whole)
    assert repair(folder, tmp_path / "last") == (8, 16, [], [])


# ---------------------------------------------------------------- what rows are


def of_batch(orders: range, batch: Batch) -> list[Event]:
    """Events whose rows are those of a batch; each row of a value holds the number of the event."""
    kinds = ("tokens" if "sample" in batch.value else "samples",)
    count = batch.count(kinds[0])
    return [
        Event(
            order, batch.step, "a", "output", order, 0, torch.full((count, 2), float(order)), batch=batch, kinds=kinds
        )
        for order in orders
    ]


def batch_of(order: int, step: int, *ids: Any, **options: Any) -> Batch:
    batch = Batch(list(ids), **options)
    batch.order, batch.step = order, step
    return batch


def rewrite_line(folder: Path, number: int) -> None:
    rewrite(folder, number, lines(folder)[number].replace(b'"call":', b'"Call":'))


@pytest.fixture
def parted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight events of one batch over several lines, of which only the first says what the rows are."""
    batch = batch_of(100, 3, "x", "y", tokens=[[1, 2, 3], [4, 5, 6]], mask=[[1, 0, 1], [0, 1, 0]])
    monkeypatch.setattr("hookline.store.format.MAX_LINE", 1800)
    with Writer(tmp_path / "run", info={"sites": ["a:output"]}, modules=MODULES) as writer:
        writer.append(of_batch(range(8), batch))
    monkeypatch.undo()
    said = [line.count(b'"port":"batch"') for line in lines(tmp_path / "run")]
    assert said == [1, *[0] * (len(said) - 1)] and len(said) > 2
    return tmp_path / "run"


def test_events_whose_rows_a_lost_line_said(parted: Path, tmp_path: Path) -> None:
    """They are kept without it, each line says so, and nothing else of them is another."""
    first, *others = (line.count(b'"port":"output"') for line in lines(parted))
    rewrite_line(parted, 0)
    done = repair(parted, tmp_path / "new")
    name = manifest(parted).parent.name
    assert (done.commits, done.events) == (len(others), 8 - first)
    assert done.lost[0].startswith(f"{name}/manifest.jsonl, line 1: its checksum is not that of its text; it held ")
    assert done.lost[0].endswith(
        f"it held {first} event{'s' * (first > 1)} of step 3 at a:output and what the rows of 1 batch are, as far as "
        "can be told"
    )
    assert done.lost[1:] == [
        f"{name}/manifest.jsonl, line {number}: what the rows of {count} event{'s' * (count > 1)} of step 3 at "
        "a:output are, since a lost line said it; they were kept"
        for number, count in enumerate(others, start=2)
    ]
    rec = hookline.load(tmp_path / "new")
    assert sorted(event.order for event in rec) == list(range(first, 8)) and verify(tmp_path / "new").problems == []
    assert torch.equal(rec.rows("a:output")[:][:, 0], torch.arange(first, 8.0).repeat_interleave(3))
    with pytest.raises(SiteError, match="are is not known"):
        rec.rows("a:output").identity()


def test_what_rows_are_is_taken_from_a_later_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come after the one that says what their rows are; those of which none says it stay as they are."""
    one, other = batch_of(100, 3, 7, 8), batch_of(200, 4, 9)
    with Writer(tmp_path / "run", info={}, modules=MODULES) as writer:
        monkeypatch.setattr("hookline.store.format.MAX_LINE", 1500)
        writer.append(of_batch(range(6), one))
        monkeypatch.undo()
        writer.append(of_batch(range(6, 8), other))
        writer.append(of_batch(range(8, 10), one))
    texts = lines(tmp_path / "run")
    first, *others = (line.count(b'"port":"output"') for line in texts)
    assert [line.count(b'"port":"batch"') for line in texts] == [1, *[0] * (len(texts) - 3), 1, 1] and len(texts) > 4
    rewrite_line(tmp_path / "run", 0)
    done = repair(tmp_path / "run", tmp_path / "new")
    assert (done.commits, done.events, len(done.lost)) == (len(others), 10 - first, 1)
    assert lines(tmp_path / "new") == [*texts[-2:], *texts[1:-2]]
    assert ids_of(tmp_path / "new") == {order: [9] if order in (6, 7) else [7, 8] for order in range(first, 10)}
    assert verify(tmp_path / "new").problems == []


def ids_of(folder: Path) -> dict[int, list[int] | None]:
    """By order of each event, what its rows are."""
    events = hookline.load(folder).events
    return {event.order: None if event.batch is None else event.batch.value["ids"].tolist() for event in events}


def resealed(line: bytes, change: Callable[[list[Any]], list[Any]]) -> bytes:
    """A line with other events and the right checksum."""
    entry = json.loads(line)
    del entry["crc"]
    entry["events"] = change(entry["events"])
    body = json.dumps(entry, separators=(",", ":")).encode()[:-1]
    return body + b',"crc":"%08x"}\n' % zlib.crc32(body)


def test_lines_that_wait_for_each_other(tmp_path: Path) -> None:
    """Nothing that Hookline writes; both are kept, and the loss is told once."""
    one, other = batch_of(100, 0, 1, 2), batch_of(200, 0, 3, 4)
    with Writer(tmp_path / "run", info={}, modules=MODULES) as writer:
        writer.append(of_batch(range(2), one))
        writer.append(of_batch(range(2, 4), other))
    for number, order in ((0, 200), (1, 100)):
        first, *rest = json.loads(lines(tmp_path / "run")[number])["events"]
        turned = [{**event, "batch": order} for event in rest] + [first]
        rewrite(tmp_path / "run", number, resealed(lines(tmp_path / "run")[number], lambda _, turned=turned: turned))
    assert len(verify(tmp_path / "run").problems) == 1
    with pytest.raises(FormatError, match="should stand in event 200, which is not there"):
        hookline.load(tmp_path / "run")
    done = repair(tmp_path / "run", tmp_path / "new")
    assert (done.commits, done.events, len(done.lost)) == (2, 4, 1)
    found = {
        event.order: event.batch and event.batch.value["ids"].tolist() for event in hookline.load(tmp_path / "new")
    }
    assert found == {0: None, 1: None, 2: [1, 2], 3: [1, 2]} and verify(tmp_path / "new").problems == []


# ---------------------------------------------------------------- what a recorder has written


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(9, 3)
        self.never = torch.nn.Identity()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens)


TOKENS = [torch.tensor([[step, 1, 2], [3, step, 5]]) for step in range(4)]


def record(folder: Path, model: torch.nn.Module, steps: range) -> list[bool]:
    wanted = []
    with hookline.record(model, ["embed", "never"], to=folder, resume=folder.exists()) as rec:
        for step in steps:
            with rec.batch(ids=[10 * step, 10 * step + 1], tokens=TOKENS[step]) as new, torch.no_grad():
                wanted.append(new)
                model(TOKENS[step])
            rec.flush()
    return wanted


@pytest.fixture
def model(tmp_path: Path) -> Tagger:
    made = Tagger()
    record(tmp_path / "run", made, range(3))
    return made


def test_a_sound_recording_of_a_recorder(model: Tagger, tmp_path: Path) -> None:
    place = tmp_path / "run"
    done = repair(place, tmp_path / "new")
    assert done == (3, 3, [], []) and contents(tmp_path / "new") == contents(place)
    assert any(name.endswith("end.json") for name in contents(place))
    assert repair(tmp_path / "new", tmp_path / "newer") == done


def test_it_goes_on_after_a_repair(model: Tagger, tmp_path: Path) -> None:
    """What was lost is recorded once more, and what is there is not."""
    flip(shard(tmp_path / "run", 1), -1)
    done = repair(tmp_path / "run", tmp_path / "new")
    assert (done.commits, done.events) == (2, 2)
    (said,) = done.lost
    assert said.endswith("; it held 1 event of step 1 at embed:output and what the rows of 1 batch are")
    rec = hookline.load(tmp_path / "new")
    assert rec.info == hookline.load(tmp_path / "run").info and rec.info["weights"] and rec.info["environment"]
    assert rec.coverage["embed:output"].calls == 3 and rec.coverage["never:output"].status == "not reached"
    assert record(tmp_path / "new", model, range(4)) == [False, True, False, True]
    rows = hookline.load(tmp_path / "new").rows("embed:output")
    told = rows.identity()
    assert told["id"].tolist() == [10 * step + place // 3 for step in (0, 2, 1, 3) for place in range(6)]
    assert told["token"].tolist() == torch.stack([TOKENS[step] for step in (0, 2, 1, 3)]).flatten().tolist()
    assert torch.equal(rows[:], model.embed.weight.detach()[told["token"]])
    assert verify(tmp_path / "new").problems == []


def test_without_its_recording_json_it_is_read_and_not_gone_on_with(model: Tagger, tmp_path: Path) -> None:
    (tmp_path / "run" / "recording.json").unlink()
    done = repair(tmp_path / "run", tmp_path / "new")
    assert (done.commits, done.events, len(done.lost)) == (3, 3, 1)
    rec = hookline.load(tmp_path / "new")
    assert rec.info["sites"] == ["embed:output", "never:output"] and rec.paths == ["embed", "never"]
    assert rec.sites == ["embed:output"] and rec.coverage["never:output"].status == "not reached"
    assert rec.rows("embed:output").identity()["id"].tolist()[::3] == [0, 1, 10, 11, 20, 21]
    before = contents(tmp_path / "new")
    with pytest.raises(OptionError, match=r"was repaired without its recording\.json.* record into another folder"):
        record(tmp_path / "new", model, range(1))
    assert contents(tmp_path / "new") == before


def test_the_end_of_a_writer(model: Tagger, tmp_path: Path) -> None:
    (end,) = files(tmp_path / "run", "end.json")
    text, name = end.read_bytes(), end.parent.name
    flip(end, len(text) // 2)
    (end.parent / ".end.json.tmp").write_bytes(b"{")
    assert ["end.json" in problem for problem in verify(tmp_path / "run").problems] == [True]
    done = repair(tmp_path / "run", tmp_path / "new")
    assert done[:2] == (3, 3) and done.left_out == [f"{name}/.end.json.tmp: an unfinished end.json"]
    assert done.lost == [
        f"{name}/end.json: its checksum is not that of its text; what became of each site, and how long the model "
        "waited for this writer, cannot be read"
    ]
    assert files(tmp_path / "new", "*end.json*") == [] and verify(tmp_path / "new").problems == []
    assert len(hookline.load(tmp_path / "new")) == 3
    entry = {key: value for key, value in json.loads(text).items() if key != "crc"}
    end.write_text(json.dumps(entry))
    assert ["it has no checksum" in problem for problem in verify(tmp_path / "run").problems] == [True]
    assert repair(tmp_path / "run", tmp_path / "sealed").lost == [] and verify(tmp_path / "sealed").problems == []
    assert hookline.load(tmp_path / "sealed").coverage["embed:output"].calls == 3
    manifest(tmp_path / "run").unlink()
    done = repair(tmp_path / "run", tmp_path / "none")
    assert done.lost == [f"{name}: it has no manifest.jsonl, so 3 shards cannot be read"]


def test_any_flipped_bit_of_what_a_recorder_wrote(model: Tagger, tmp_path: Path) -> None:
    """Whatever it hits: the new recording opens, is sound, and each row has its own sample or none."""
    pick = random.Random(7)
    for number in range(60):
        path = pick.choice(files(tmp_path / "run"))
        whole = path.read_bytes()
        place = pick.randrange(len(whole))
        flip(path, place)
        new = tmp_path / f"new{number}"
        done = repair(tmp_path / "run", new)
        assert done.lost or done.left_out
        rec = hookline.load(new)
        assert len(rec) == done.events and verify(new).problems == [] and not any("batch" in site for site in rec.sites)
        for event in rec:
            assert event.batch.value["ids"].tolist() == [10 * event.step, 10 * event.step + 1]
            assert torch.equal(event.value, model.embed.weight.detach()[TOKENS[event.step].flatten()])
        path.write_bytes(whole)


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
    entry |= {"version": 4}
    del entry["crc"]
    body = json.dumps(entry)[:-1].encode()
    (folder / "recording.json").write_bytes(body + b',"crc":"%08x"}\n' % zlib.crc32(body))
    with pytest.raises(FormatError, match="has format version 4, this Hookline reads up to 3"):
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
