"""The size and the manners of the code, as CONTRIBUTING.md describes them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "src").rglob("*.py"))}
PYTHON = SOURCE | {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("tests", "examples", "bench")
    for path in sorted((ROOT / folder).rglob("*.py"))
}

LONGEST_FILE = 400
LONGEST_FUNCTION = 60
"""Lines of a function, its docstring not counted. Most have about ten."""

NAMES_THAT_SAY_NOTHING = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}


@pytest.mark.parametrize("name", SOURCE)
def test_a_file_is_short(name: str) -> None:
    lines = len(SOURCE[name].read_text("utf-8").splitlines())
    assert lines <= LONGEST_FILE, f"{name} has {lines} lines; cut it at a noun"


@pytest.mark.parametrize("name", SOURCE)
def test_a_function_is_short(name: str) -> None:
    functions = [node for node in ast.walk(_tree(name)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {node.name: _length(node) for node in functions if _length(node) > LONGEST_FUNCTION}
    assert not long, f"{name} has functions of more than {LONGEST_FUNCTION} lines: {long}"


@pytest.mark.parametrize("name", SOURCE)
def test_nothing_is_left_for_later(name: str) -> None:
    found = re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b.*", SOURCE[name].read_text("utf-8"))
    assert not found, f"{name} leaves work for later: {found}"


@pytest.mark.parametrize("name", SOURCE)
def test_a_name_says_what_is_inside(name: str) -> None:
    words = set(re.split(r"[/_.]", name))
    assert not words & NAMES_THAT_SAY_NOTHING, f"{name}: name the file after the thing it holds"


@pytest.mark.parametrize("name", PYTHON)
def test_a_file_starts_with_what_it_is_for(name: str) -> None:
    assert ast.get_docstring(_tree(name)), f"{name} needs a docstring as its first statement"


def _tree(name: str) -> ast.Module:
    return ast.parse(PYTHON[name].read_text("utf-8"), filename=name)


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return function.end_lineno - body[0].lineno + 1 if body else 0
