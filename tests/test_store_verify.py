"""Looking for damage: `verify` and ``hookline verify`` find every byte that changed, and go on after the first."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch

import hookline
from hookline import store
from hookline.cli.main import main
from hookline.errors import FormatError
from hookline.record.event import Event
from hookline.store import ModuleInfo, Report, Writer, verify

NBYTES = 10 * 4 * 1000
"""Of the tensors of the recording."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two writers, two lines each, the second without a shard."""
    for number in (0, 1):
        modules = {"a": ModuleInfo("Linear", 3)}
        with Writer(tmp_path / "run.hookline", info={"a": 1}, modules=modules, writer=number) as writer:
            writer.append([event(number * 10 + order) for order in range(5)])
            writer.append([Event(number * 10 + 5, 5, "a", "output", 5, 0, None)])
    return tmp_path / "run.hookline"


def event(order: int) -> Event:
    return Event(order, 0, "a", "output", order, 0, torch.arange(1000.0) + order)


def files(folder: Path, ending: str = "*") -> list[Path]:
    return sorted(path for path in folder.rglob(ending) if path.is_file())


def test_a_recording_without_damage(folder: Path) -> None:
    nbytes = sum(path.stat().st_size for path in files(folder, "*.safetensors"))
    assert nbytes > NBYTES
    assert verify(folder) == Report(folders=2, events=12, shards=2, nbytes=nbytes, problems=[], torn=[])


def test_the_checksum_is_that_of_the_file(folder: Path) -> None:
    for manifest in files(folder, "*.jsonl"):
        first, second = map(json.loads, manifest.read_text().splitlines())
        (shard,) = first["shards"]
        data = (manifest.parent / shard["file"]).read_bytes()
        assert (shard["bytes"], shard["crc32c"]) == (len(data), f"{google_crc32c.value(data):08x}")
        assert second["shards"] == []


def test_a_shard_that_is_written_in_many_pieces(tmp_path: Path) -> None:
    big = Event(0, 0, "a", "output", 0, 0, (torch.arange(5_000_000.0), torch.ones(3, dtype=torch.uint8), torch.ones(7)))
    store.save(tmp_path / "run", info={}, modules={}, events=[big])
    assert verify(tmp_path / "run").problems == []


def test_one_flipped_bit_anywhere(folder: Path) -> None:
    """Every 97th byte of each file and its last ones; which bit depends on the place."""
    for path in files(folder):
        whole = path.read_bytes()
        for place in sorted({*range(0, len(whole), 97), *range(len(whole) - 30, len(whole))}):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            report = verify(folder)
            at_the_end = path.suffix == ".jsonl" and place == len(whole) - 1
            assert report.torn == ([path] if at_the_end else []), place
            assert at_the_end or any(str(path) in problem for problem in report.problems), place
        path.write_bytes(whole)
    assert verify(folder).problems == []


def shard(folder: Path) -> Path:
    return files(folder, "*.safetensors")[0]


def cut_the_manifest(folder: Path) -> None:
    manifest = files(folder, "*.jsonl")[0]
    os.truncate(manifest, manifest.stat().st_size - 7)


def take_out_checksums(folder: Path) -> None:
    for path in (folder / "recording.json", files(folder, "*.jsonl")[0]):
        lines = map(json.loads, path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()])
        kept = [{key: value for key, value in line.items() if key != "crc"} for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))


def lie_about_a_shape(folder: Path) -> None:
    """With the right checksum of the line, as somebody else's writer might."""
    manifest = files(folder, "*.jsonl")[0]
    first, second = manifest.read_text().splitlines(keepends=True)
    entry = json.loads(first)
    del entry["crc"]
    entry["events"][1]["tensors"][0].update(shape=[10, 100])
    entry["events"][2]["tensors"][0].update(dtype="int32")
    entry["events"][3]["tensors"][0].update(name="x")
    manifest.write_text(store.format.strict_json.seal(json.dumps(entry)).decode() + second)


DAMAGE: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "a truncated shard": (
        lambda folder: os.truncate(shard(folder), 500),
        ["000000.safetensors: it has 500 bytes, its manifest says "],
    ),
    "a longer shard": (
        lambda folder: os.truncate(shard(folder), 50_000),
        ["000000.safetensors: it has 50000 bytes, its manifest says "],
    ),
    "a missing shard": (
        lambda folder: shard(folder).unlink(),
        ["000000.safetensors: this part of the recording is missing. Copy the whole folder again"],
    ),
    "a shard full of zeros": (
        lambda folder: shard(folder).write_bytes(bytes(shard(folder).stat().st_size)),
        ["000000.safetensors: its checksum is ", "000000.safetensors: it is not valid JSON"],
    ),
    "a missing manifest": (
        lambda folder: files(folder, "*.jsonl")[0].unlink(),
        ["manifest.jsonl: this part of the recording is missing, its shards are there"],
    ),
    "no recording.json to speak of": (
        lambda folder: (folder / "recording.json").write_text("[]"),
        ["recording.json: a JSON object was expected, it has a list"],
    ),
    "no checksums": (
        take_out_checksums,
        ["recording.json: it has no checksum", "line 1: it has no checksum", "line 2: it has no checksum"],
    ),
    "another shape, dtype and name": (
        lie_about_a_shape,
        ["is F32 [1000], its manifest says F32 [10, 100]", "its manifest says I32 [1000]", "has no tensor named 'x'"],
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, wanted = DAMAGE[name]
    damage(folder)
    report = verify(folder)
    assert len(report.problems) == len(wanted)
    for problem, words in zip(report.problems, wanted, strict=True):
        assert words in problem
    assert main(["verify", str(folder)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == report.problems
    assert last.endswith(f": {len(wanted)} problem{'s' if len(wanted) > 1 else ''} found")


def test_the_search_goes_on(folder: Path) -> None:
    shutil.copy(folder / "recording.json", shard(folder))
    files(folder, "*.safetensors")[1].unlink()
    (folder / "recording.json").write_text("{")
    assert len(verify(folder).problems) == 3


def test_a_torn_last_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut_the_manifest(folder)
    manifest = files(folder, "*.jsonl")[0]
    report = verify(folder)
    assert (report.problems, report.torn, report.events) == ([], [manifest], 11)
    assert store.open_recording(folder).torn == (manifest,)
    assert main(["verify", str(folder)]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"{manifest}: its last line is unfinished and does not count: an append was cut off or goes on"
    assert last.endswith("2 writer folders, 11 events, 2 shards, 40.9 kB: no problem found")


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder.parent)
    assert main(["verify", "run.hookline"]) == 0
    out = capsys.readouterr()
    assert out.out == "run.hookline: 2 writer folders, 12 events, 2 shards, 40.9 kB: no problem found\n"
    assert not out.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["verify"], "the following arguments are required: DIR. See: hookline help verify"),
        (["verify", "missing.hookline"], "missing.hookline: there is no recording of that name. Check the path."),
        (["verify", "a", "b"], "unrecognized arguments: b"),
    ],
)
def test_mistakes(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is not a Hookline recording"):
        verify(tmp_path)


def test_a_disk_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("hookline.store.shard.header.read", refuse)
    assert [problem.partition(": ")[2] for problem in verify(folder).problems] == [
        "it cannot be read ([Errno 5] Input/output error). Check its disk."
    ] * 2


def test_what_a_recorder_writes(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    with hookline.record(model) as rec:
        model(torch.ones(4, 2)).sum().backward()
    rec.save(tmp_path / "run.hookline")
    report = verify(tmp_path / "run.hookline")
    assert (report.problems, report.events) == ([], len(hookline.load(tmp_path / "run.hookline")))
