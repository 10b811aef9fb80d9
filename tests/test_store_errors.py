"""What is wrong with a recording is said: which file, what, and what to do."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import store
from hookline.errors import FormatError
from hookline.store import shard, strict_json
from hookline.store.format import TensorLine

from .stored import HEAD, MANIFEST, NAME, SHARD, WRITER, line_by_line, read_all, three_events


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return three_events(tmp_path / "run")


@pytest.fixture
def three_lines(folder: Path) -> Path:
    return line_by_line(folder)


# ---------------------------------------------------------------- errors: the folder


def complaint(folder: Path) -> str:
    with pytest.raises(FormatError) as caught:
        read_all(folder)
    assert caught.value.__cause__ is None or isinstance(caught.value.__cause__, (OSError, RuntimeError))
    return str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    assert complaint(tmp_path / "run") == f"{tmp_path / 'run'}: there is no recording of that name. Check the path."


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    wanted = f"{tmp_path / 'run'}: this is not a folder, a recording is one. Pass the folder, such as run.hookline."
    assert complaint(tmp_path / "run") == wanted


def test_a_file_of_a_recording(folder: Path) -> None:
    assert complaint(folder / HEAD).endswith(
        "this is not a folder, a recording is one. Pass the folder, such as run.hookline."
    )


def test_a_foreign_folder(tmp_path: Path) -> None:
    wanted = (
        f"{tmp_path}: this folder is not a Hookline recording (it has no recording.json). "
        "Pass a folder that Hookline wrote, such as run.hookline."
    )
    assert complaint(tmp_path) == wanted


def test_a_writers_folder(folder: Path) -> None:
    assert complaint(folder / WRITER).endswith(f"(it has no recording.json). Pass its parent, {folder}.")


# ---------------------------------------------------------------- errors: one file

DAMAGED = strict_json.DAMAGED


def change_head(folder: Path, **entries: Any) -> None:
    head = json.loads((folder / HEAD).read_text())
    del head["crc"]
    (folder / HEAD).write_text(json.dumps({**head, **entries}))


def change_line(folder: Path, number: int = 1, tensor: dict[str, Any] | None = None, **entries: Any) -> None:
    """Change an event of the one line."""

    def change(commit: dict[str, Any]) -> None:
        commit["events"][number].update(entries)
        if tensor is not None:
            commit["events"][number]["tensors"][0].update(tensor)

    change_commit(folder, change)


def change_commit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    commit = json.loads((folder / MANIFEST).read_text())
    commit.pop("crc", None)
    change(commit)
    (folder / MANIFEST).write_text(json.dumps(commit) + "\n")


def change_shard(folder: Path, **entries: Any) -> None:
    change_commit(folder, lambda commit: commit["shards"][0].update(entries))


def say_the_size(folder: Path) -> None:
    """Make the manifest name the size that the shard has by now."""
    change_shard(folder, bytes=(folder / SHARD).stat().st_size)


def change_header(folder: Path, change: Callable[[dict[str, Any]], None], length: int | None = None) -> None:
    data = (folder / SHARD).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    change(header)
    text = json.dumps(header).encode()
    (folder / SHARD).write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data[start:])
    say_the_size(folder)


def change_entry(folder: Path, **entries: Any) -> None:
    change_header(folder, lambda header: header[NAME].update(entries))


def cut(folder: Path, count: int) -> None:
    """Truncate the shard, and have the manifest name the new size."""
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - count)
    say_the_size(folder)


def resize(folder: Path, count: int) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size + count)


def link(path: Path) -> None:
    target = path.parents[1] / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


UPDATE = "Update Hookline: pip install --upgrade hookline."
HEADS = {
    "the recording has format version 4, this Hookline reads up to 3. " + UPDATE: dict(version=4),
    "the recording has the old format version 2, this Hookline reads 3. Record again, under another": dict(version=2),
    "no Hookline recording: its \"format\" is 'other'. Pass a folder that Hookline wrote.": dict(format="other"),
    '"version" has to be a whole number from 0 to 2**63 - 1, it is True': dict(version=True),
    '"modules" has to be a list, it is an object. ' + DAMAGED: dict(modules={}),
    "module 0: an object was expected, it has 3. " + DAMAGED: dict(modules=[3]),
    'module 0: "aliases" has to be a list, it is missing. ' + DAMAGED: dict(modules=[{}]),
    '"info" has to be an object, it is null. ' + DAMAGED: dict(info=None),
    "two modules have the same path": dict(modules=[dict(path="a", type_name="A", parameters=1, aliases=[])] * 2),
    '"aliases" has to be a list of strings': dict(modules=[dict(path="a", type_name="A", parameters=1, aliases=[1])]),
    '"parameters" has to be a whole number': dict(modules=[dict(path="a", type_name="A", parameters=-1, aliases=[])]),
}


@pytest.mark.parametrize("words", HEADS)
def test_recording_json(words: str, folder: Path) -> None:
    change_head(folder, **HEADS[words])
    assert complaint(folder).startswith(str(folder / HEAD))
    assert words in complaint(folder)


NO_SHARD = '"shard" has to be a name like 000000.safetensors, it is '
LINES: dict[str, dict[str, Any]] = {
    '"order" has to be a whole number from 0 to 2**63 - 1, it is -1. ' + DAMAGED: dict(order=-1),
    '"call" has to be a whole number from 0 to 2**63 - 1, it is True. ' + DAMAGED: dict(call=True),
    '"step" has to be a whole number from 0 to 2**63 - 1, it is 9223372036854775808. ' + DAMAGED: dict(step=2**63),
    '"path" has to be a string, it is null. ' + DAMAGED: dict(path=None),
    "\"port\" has to be one of input, output, grad_input, grad_output, it is 'weight'. " + DAMAGED: dict(port="weight"),
    NO_SHARD + "'../../etc/passwd'": dict(shard="../../etc/passwd"),
    NO_SHARD + "'/etc/passwd'": dict(shard="/etc/passwd"),
    NO_SHARD + "'000000.safetensors\\x00'": dict(shard="000000.safetensors\0"),
    NO_SHARD + "'000000.safetensors\\n'": dict(shard="000000.safetensors\n"),
    NO_SHARD + "'../w00000-a1b2c3/000000.safetensors'": dict(shard="../w00000-a1b2c3/000000.safetensors"),
    NO_SHARD + "'.000000.safetensors.tmp'": dict(shard=".000000.safetensors.tmp"),
    "its shard '000001.safetensors' is none of those of its line": dict(shard="000001.safetensors"),
    'it has tensors with data, but no "shard"': dict(shard=None),
    '"tensors" has to be a list, it is an object': dict(tensors={}),
    '"tensors" has to be a list of objects, it has null': dict(tensors=[None]),
    "unknown dtype 'quint8'. " + UPDATE: dict(tensor={"dtype": "quint8"}),
    "unknown dtype '__class__'. " + UPDATE: dict(tensor={"dtype": "__class__"}),
    '"shape" has to be a list of whole numbers from 0 on, it has -1': dict(tensor={"shape": [-1]}),
    '"shape" has to be a list of whole numbers from 0 on, it has 2.0': dict(tensor={"shape": [2.0]}),
    '"shape" is larger than any memory': dict(tensor={"shape": [0, 2**40, 2**40]}),
    '"data" has to be true or false': dict(tensor={"data": 1}),
    '"numel" has to be a whole number from 0 to 2**63 - 1, it is missing': dict(tensor={"summary": {}}),
    '"summary" has to be an object or null, it is 3': dict(tensor={"summary": 3}),
    '"summary" counts more NaN, infinite, zero and subnormal elements than 6, its "numel"': dict(
        tensor={
            "summary": {"numel": 6, "nan": 3, "inf": 3, "neg_inf": 0, "zeros": 0, "subnormal": 1}
            | dict.fromkeys(("mean", "std", "min", "max", "l2"), 0.5)
        }
    ),
    '"summary" counts more -inf than infinite elements, 2 and 1': dict(
        tensor={
            "summary": {"numel": 6, "nan": 3, "inf": 1, "neg_inf": 2, "zeros": 0, "subnormal": 0}
            | dict.fromkeys(("mean", "std", "min", "max", "l2"), 0.5)
        }
    ),
    'its "structure" names tensor 1, which is not there or is used twice': dict(structure={"t": 1}),
    'its "structure" names tensor True, which is not there or is used twice': dict(structure={"t": True}),
    'its "structure" names tensor 0, which': dict(structure={"tuple": [{"t": 0}, {"t": 0}]}),
    'its "structure" has no place for tensor 0': dict(structure={"v": 1}),
    'a node of "structure" has to be an object with entries, it is a list': dict(structure={"tuple": [[]]}),
    "its \"structure\" has a node of the unknown kind 'eval'": dict(structure={"eval": "1"}),
    '"tuple" has to be a list, it is 3': dict(structure={"tuple": 3}),
    '"dict" of a structure has to hold pairs of key and node, it has a list': dict(structure={"dict": [[1]]}),
    '"dict" of a structure has a key twice': dict(structure={"dict": [[1, {"t": 0}], [True, {"v": 0}]]}),
    "a string, number, true, false or null was expected, it has a list": dict(structure={"dict": [[[], {"t": 0}]]}),
    "the names of fields and keyword arguments have to be": dict(structure={"fields": "A", "items": [[1, {"t": 0}]]}),
    '"kwargs" has to be a list, it is missing': dict(structure={"args": []}),
    '"opaque" has to be a string, it is null': dict(structure={"opaque": None}),
}


@pytest.mark.parametrize("words", LINES)
def test_manifest(words: str, folder: Path) -> None:
    change_line(folder, **LINES[words])
    assert complaint(folder).startswith(f"{folder / MANIFEST}, line 1, event 1: ")
    assert words in complaint(folder)


NO_FILE = '"file" has to be a name like 000000.safetensors, it is '
COMMITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    '"shards" has to be a list, it is an object. ' + DAMAGED: lambda commit: commit.update(shards={}),
    '"shards" has to be a list of objects, it has 3': lambda commit: commit.update(shards=[3]),
    '"events" has to be a list, it is missing': lambda commit: commit.pop("events"),
    "event 0: an object was expected, it has null": lambda commit: commit.update(events=[None]),
    NO_FILE + "'../../etc/passwd'": lambda commit: commit["shards"][0].update(file="../../etc/passwd"),
    NO_FILE + "'manifest.jsonl'": lambda commit: commit["shards"][0].update(file="manifest.jsonl"),
    NO_FILE + "'00000.safetensors'": lambda commit: commit["shards"][0].update(file="00000.safetensors"),
    NO_FILE + "'000000.safetensors\\n'": lambda commit: commit["shards"][0].update(file="000000.safetensors\n"),
    NO_FILE + "null": lambda commit: commit["shards"][0].pop("file"),
    '"bytes" has to be a whole number from 0 to 2**63 - 1, it is -1': lambda c: c["shards"][0].update(bytes=-1),
    '"crc32c" has to be 8 hexadecimal digits, it is 7': lambda commit: commit["shards"][0].update(crc32c=7),
    "\"crc32c\" has to be 8 hexadecimal digits, it is 'ABCDEF01'": lambda c: c["shards"][0].update(crc32c="ABCDEF01"),
    "it names a shard twice": lambda commit: commit.update(shards=commit["shards"] * 2),
    "its shard 000000.safetensors has 71 bytes, its tensors need 72": lambda c: c["shards"][0].update(bytes=71),
}


@pytest.mark.parametrize("words", COMMITS)
def test_commit(words: str, folder: Path) -> None:
    change_commit(folder, COMMITS[words])
    assert complaint(folder).startswith(f"{folder / MANIFEST}, line 1")
    assert words in complaint(folder)


def test_a_shard_that_two_lines_name(folder: Path) -> None:
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes() * 2)
    wanted = "line 2: it names the shard 000000.safetensors, which an earlier line names"
    assert complaint(folder) == f"{folder / MANIFEST}, {wanted}. {DAMAGED}"


def deep(levels: int) -> dict[str, Any]:
    node: dict[str, Any] = {"t": 0}
    for _ in range(levels):
        node = {"list": [node]}
    return node


def test_depth_of_a_structure(folder: Path) -> None:
    change_line(folder, structure=deep(128))
    assert len(read_all(folder)) == 3
    change_line(folder, 2, structure=deep(129))
    assert 'its "structure" is nested deeper than 128 levels' in complaint(folder)


@pytest.mark.parametrize("text", ["[" * 10**6, '{"a":' * 10**5])
def test_depth_of_json(text: str, folder: Path) -> None:
    (folder / MANIFEST).write_text(text + "\n")
    assert complaint(folder) == f"{folder / MANIFEST}, line 1: its JSON is nested too deeply. {DAMAGED}"


BAD_TEXT = {
    b'{"a": NaN}\n': "line 1: it is not valid JSON (NaN is not JSON)",
    b'{"a": -Infinity}\n': "line 1: it is not valid JSON (-Infinity is not JSON)",
    b'{"order": ' + b"9" * 5000 + b"}\n": "line 1: it is not valid JSON (Exceeds the limit",
    b'{"order": 1e999}\n': 'line 1: "shards" has to be a list, it is missing',
    b"\xff\xfe\n": "line 1: it is not valid JSON ('utf-8' codec",
    b"\0\0\n": "line 1: it is not valid JSON (",
    b"\n": "line 1: it is not valid JSON (",
    b"[]\n": "line 1: a JSON object was expected, it has a list",
}


@pytest.mark.parametrize("text", BAD_TEXT, ids=lambda text: repr(text[:20]))
def test_text_of_a_manifest(text: bytes, folder: Path) -> None:
    (folder / MANIFEST).write_bytes(text)
    assert BAD_TEXT[text] in complaint(folder)


def test_a_number_that_was_changed(three_lines: Path) -> None:
    """It would be valid JSON; the checksum tells."""
    folder = three_lines
    text = (folder / MANIFEST).read_text().replace('"order":1', '"order":7')
    (folder / MANIFEST).write_text(text)
    wanted = f'line 2: its checksum is not that of its text. {DAMAGED} If you edited it, take out its "crc".'
    assert complaint(folder).endswith(wanted)


def test_a_line_that_is_there_twice(folder: Path) -> None:
    """One with a shard is told by its shard; one without would double its events."""
    line = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).write_bytes(line * 2)
    assert complaint(folder).startswith(f"{folder / MANIFEST}, line 2: it names the shard 000000.safetensors, which an")
    empty = strict_json.seal('{"shards":[],"events":[]}')
    (folder / MANIFEST).write_bytes(line + empty * 2)
    wanted = "line 3: it is the same as an earlier line, so that its events would be there twice. " + DAMAGED
    assert complaint(folder) == f"{folder / MANIFEST}, {wanted}"


def test_a_broken_line_in_the_middle(three_lines: Path) -> None:
    folder = three_lines
    lines = (folder / MANIFEST).read_bytes().splitlines(keepends=True)
    (folder / MANIFEST).write_bytes(lines[0] + lines[1][:50] + b"\n" + lines[2])
    assert f"{folder / MANIFEST}, line 2: it is not valid JSON" in complaint(folder)


def test_an_endless_line_is_not_read_into_memory(folder: Path) -> None:
    os.truncate(folder / MANIFEST, 1 << 36)  # 64 GiB of zeros that take no room on the disk
    assert complaint(folder).startswith(f"{folder / MANIFEST}: a line has more than 67108864 bytes")
    os.truncate(folder / HEAD, 1 << 36)
    assert complaint(folder).startswith(f"{folder / HEAD}: it has 68719476736 bytes, at most 268435456 are read")


# ---------------------------------------------------------------- errors: shards

TENSOR = f"{SHARD}, tensor '{NAME}': "
SHARDS: dict[str, Callable[[Path], Any]] = {
    f"{SHARD}: this part of the recording is missing. Copy the whole folder again": lambda f: (f / SHARD).unlink(),
    f"{SHARD}: it is a link, which could lead out of the recording. Copy the": lambda f: link(f / SHARD),
    f"{MANIFEST}: it is a link, which could lead out of": lambda f: link(f / MANIFEST),
    "run/recording.json: it is a link, which could lead out of": lambda f: link(f / HEAD),
    "w00000-a1b2c3: this is not a plain folder. Copy the recording with its links": lambda f: link(f / WRITER),
    f"{SHARD}: it is not a plain file. Copy the whole": lambda f: ((f / SHARD).unlink(), (f / SHARD).mkdir()),
    f"{MANIFEST}: it is not a plain file. Copy the": lambda f: ((f / MANIFEST).unlink(), os.mkfifo(f / MANIFEST)),
    f"{SHARD}: its tensors need 72 bytes, the file has 71. It is truncated. {DAMAGED}": lambda f: cut(f, 1),
    f"{SHARD}: it has 391 bytes, its manifest says 392. It is truncated. {DAMAGED}": lambda f: resize(f, -1),
    f"{SHARD}: it has 393 bytes, its manifest says 392. {DAMAGED}": lambda f: resize(f, 1),
    f"{SHARD}: it has 5 bytes, its manifest says 392. It is truncated. {DAMAGED}": lambda f: os.truncate(f / SHARD, 5),
    f"{SHARD}: its header should have 999999999 bytes, the file has ": lambda f: change_header(f, len, 999999999),
    f"{SHARD}: its header should have 18446744073709551615 bytes": lambda f: change_header(f, len, 2**64 - 1),
    f"{SHARD}: it is not valid JSON": lambda f: change_header(f, len, 30),
    f"{SHARD}: it has no tensor named '{NAME}', which": lambda f: change_header(f, lambda h: h.update(x=h.pop(NAME))),
    f"{SHARD}: its tensors need 72 bytes, the file has 99": lambda f: cut(f, -27),
    f"{TENSOR}its shape and dtype need 24 bytes, its offsets are 0 and 25": lambda f: change_entry(
        f, data_offsets=[0, 25]
    ),
    f"{TENSOR}its shape and dtype need 24 bytes, its offsets are 24 and 0": lambda f: change_entry(
        f, data_offsets=[24, 0]
    ),
    f"{TENSOR}its shape and dtype need 24 bytes, its offsets are -24 and 0": lambda f: change_entry(
        f, data_offsets=[-24, 0]
    ),
    f'{TENSOR}"data_offsets" has to be a pair of whole numbers': lambda f: change_entry(f, data_offsets=[0, True]),
    f'{TENSOR}"shape" is larger than any memory': lambda f: change_entry(f, shape=[2**62, 2**62]),
    f"{TENSOR}unknown dtype 'F7'. {UPDATE}": lambda f: change_entry(f, dtype="F7"),
    f"{SHARD}: tensor '{NAME}' is I32 [2, 3], its manifest says F32 [2, 3]": lambda f: change_entry(f, dtype="I32"),
    f"{SHARD}: tensor '{NAME}' is F32 [6], its manifest says F32 [2, 3]": lambda f: change_entry(f, shape=[6]),
    f"{SHARD}: two tensors overlap or leave a hole at byte 0": lambda f: change_entry(f, data_offsets=[24, 48]),
    f"{TENSOR}an object was expected, it has null": lambda f: change_header(f, lambda h: h.update({NAME: None})),
}


@pytest.mark.parametrize("words", SHARDS)
def test_files(words: str, folder: Path) -> None:
    SHARDS[words](folder)
    assert words in complaint(folder)


def test_a_shard_that_is_exchanged_after_opening(folder: Path) -> None:
    events = store.open_recording(folder).events
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).unlink()
    (folder / SHARD).write_bytes(data)
    with pytest.raises(FormatError, match=r"it was changed since the recording was opened\. Open the recording again"):
        events[0].value  # noqa: B018


def test_a_dtype_that_this_torch_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "_DTYPES", {})
    assert re.search(r"torch \S+ has no dtype float32. Update PyTorch to read this recording", complaint(folder))
    line = TensorLine("a", "output", "float32", (1,), None, data=False)
    with pytest.raises(FormatError, match="has no dtype float32"):
        shard.meta_tensor(line, "place")


def test_a_folder_that_may_not_be_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    wanted = f"{folder}: it cannot be read ([Errno 13] Permission denied). Check its permissions and its disk."
    assert complaint(folder) == wanted


def test_a_disk_that_fails_while_a_shard_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shard.header, "read", refuse)
    assert complaint(folder) == f"{folder / SHARD}: it cannot be read ([Errno 5] Input/output error). Check its disk."


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    assert complaint(folder) == f"{folder / HEAD}: it cannot be read (Permission denied). Check its permissions."


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (
            errno.ENOMEM,
            "The process has too many mapped files: raise vm.max_map_count, or read fewer steps at a time, each part "
            "with hookline.load(...).select(steps=...).",
        ),
        (errno.ENODEV, "Open the recording again."),
    ],
)
def test_a_shard_that_cannot_be_mapped(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str) -> None:
    said = f"unable to mmap 132 bytes from file <{folder / SHARD}>: {os.strerror(code)} ({code})"

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch, "from_file", refuse)
    assert complaint(folder) == f"{folder / SHARD}: it cannot be mapped into memory ({said}). {advice}"
