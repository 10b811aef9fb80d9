"""The documentation keeps up with the code: its Python blocks run, and every command and option is in it."""

from __future__ import annotations

import json
import re
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from hookline.cli.main import COMMANDS
from hookline.cli.parser import name_of

ROOT = Path(__file__).parents[1]
COMMAND_LINE = ROOT / "docs" / "reference" / "command-line.md"
PAGES = {
    path.relative_to(ROOT).as_posix(): path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}

BLOCK = re.compile(r"(?P<skip><!-- no-run: (?P<reason>\S[^\n]*?) -->\s*)?^```python\n(?P<code>.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """A ```python block of a page; ``line`` is that of its first statement."""

    line: int
    code: str
    skip: str | None


def blocks(text: str) -> list[Block]:
    """The Python blocks of a page; one after the comment ``<!-- no-run: reason -->`` is marked to be skipped."""
    return [
        Block(text.count("\n", 0, found.start("code")) + 1, found["code"], found["reason"])
        for found in BLOCK.finditer(text)
    ]


@pytest.mark.parametrize("page", [name for name, path in PAGES.items() if blocks(path.read_text("utf-8"))])
def test_the_blocks_of_a_page_run_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one namespace and in an empty folder, as a reader would who types them one after the other."""
    monkeypatch.chdir(tmp_path)
    namespace = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", namespace)
    for block in blocks(PAGES[page].read_text("utf-8")):
        if block.skip is None:
            # The empty lines in front make a traceback point at the line of the page.
            code = compile("\n" * (block.line - 1) + block.code, PAGES[page], "exec")
            exec(code, vars(namespace))


def test_a_block_is_found_and_skipped_with_a_reason() -> None:
    text = "# Page\n\n```python\na = 1\n```\n\n<!-- no-run: needs a GPU -->\n```python\nb\n```\n\n```bash\nc\n```\n"
    assert blocks(text) == [Block(4, "a = 1\n", None), Block(9, "b\n", "needs a GPU")]


def test_the_reader_of_the_format_takes_the_first_manifest_first(tmp_path: Path) -> None:
    names = ["manifest.jsonl", "manifest-000001.jsonl", "manifest-999999.jsonl", "manifest-1000000.jsonl"]
    (tmp_path / "w00000-a1b2c3").mkdir()
    (tmp_path / "recording.json").write_bytes(sealed(format="hookline", version=3))
    for name in names:
        event = {"order": 0, "step": 0, "shard": None, "path": name}
        (tmp_path / "w00000-a1b2c3" / name).write_bytes(sealed(shards=[], events=[event]))
    reader = ModuleType("reader")
    exec(blocks(PAGES["docs/format.md"].read_text("utf-8"))[0].code, vars(reader))
    assert [event["path"] for event, _ in reader.read(tmp_path)] == names


def sealed(**entries: Any) -> bytes:
    body = json.dumps(entries)[:-1].encode()
    return body + b',"crc":"%08x"}\n' % zlib.crc32(body)


def options_of(command: ModuleType) -> list[str]:
    """Every long option of a command, as its own parser has them."""
    actions = command.parser()._actions
    return [name for action in actions for name in action.option_strings if name.startswith("--") and name != "--help"]


@pytest.mark.parametrize("command", COMMANDS, ids=name_of)
def test_every_command_and_option_is_documented(command: ModuleType) -> None:
    section = section_of(name_of(command))
    missing = [option for option in options_of(command) if f"`{option}" not in section]
    assert not missing, f"docs/reference/command-line.md says nothing of {missing} under 'hookline {name_of(command)}'"


def section_of(command: str) -> str:
    """What stands under the heading of a command, up to the next heading."""
    found = re.search(rf"^## hookline {command}$(.*?)(?=^## |\Z)", COMMAND_LINE.read_text("utf-8"), re.M | re.S)
    assert found, f"docs/reference/command-line.md has no heading '## hookline {command}'"
    return found[1]
