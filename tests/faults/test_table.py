"""docs/faults.md is what the tests say, and every kind has its decision."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .catalogue import KINDS

ROOT = Path(__file__).parents[2]
LATER = {*range(91, 104), 114}
"""Kinds of compiled code and of several processes."""

ROWS = {
    int(cells[1]): cells[3].strip()
    for line in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \d+ \|", line)
    for cells in [re.split(r"(?<!\\)\|", line)]
}


def test_the_page_is_what_the_tests_say() -> None:
    command = [sys.executable, "-m", "tests.faults.table", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"docs/faults.md is not up to date: make faults\n{done.stderr}"


def test_the_page_has_every_kind() -> None:
    assert sorted(ROWS) == sorted(KINDS) == list(range(1, 117))


@pytest.mark.parametrize("number", KINDS)
def test_a_kind_is_decided(number: int) -> None:
    assert ROWS[number] != "not yet" or number in LATER
