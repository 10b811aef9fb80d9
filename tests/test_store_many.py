"""Four processes write into one recording while a reader looks on: whole appends only, no row lost or doubled."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hookline
from hookline.record import Recording
from hookline.store import verify

from .appends import finish, start, whole_appends

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs fork")

WRITERS, APPENDS, FOLDERS = 4, 80, 30

AT_ONCE = """
    writers, folders = int(sys.argv[1]), sys.argv[3:]
    modules = {path: ModuleInfo("Linear", 3) for path in ("a", *(f"rank{rank}" for rank in range(writers)))}

    def write(rank):
        os.close(close)
        os.read(begin, 1)  # ends when the parent closes the other end, for all at the same moment
        for folder in folders:
            with Writer(folder, info={"n": 1}, modules=modules, writer=rank) as writer:
                for number in range(int(sys.argv[2])):
                    writer.append(appended(number, rank))
        os._exit(0)

    begin, close = os.pipe()

    children = [fork(lambda: write(rank)) for rank in range(writers)]
    os.close(close)
    for pid in children:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""

EACH_A_PATH = """
    def appended(number, rank):
        return whole(number, f"rank{rank}")
"""

ALL_THE_SAME_SITE = """
    def appended(number, rank):
        # what the ranks of a training record: the same module, the same steps, other values
        rows = torch.arange(6.0).view(3, 2) + 1000 * number + 10 * rank
        return [Event(number * 2 + call, number, "a", "output", call, 0, rows + 100 * call) for call in (0, 1)]
"""


def writing(appended: str, appends: int, *folders: Path) -> subprocess.Popen[str]:
    return start(appended + AT_ONCE, WRITERS, appends, *folders)


def seen_while(process: subprocess.Popen[str], folder: Path) -> Iterator[Recording]:
    """What a reader finds, again and again until all have written; the last one is from after that."""
    while process.poll() is None:
        if folder.exists():
            yield hookline.load(folder)
    finish(process)
    yield hookline.load(folder)


def is_growing(seen: list[int], most: int) -> bool:
    """Whether the reader saw something on the way, and never less than before."""
    return seen == sorted(seen) and any(0 < count < most for count in seen) and seen[-1] == most


def test_four_writers_and_a_reader_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run.hookline"
    seen = []
    for rec in seen_while(writing(EACH_A_PATH, APPENDS, folder), folder):
        found = whole_appends(rec)
        assert all(numbers == [*range(len(numbers))] for numbers in found.values())
        seen.append(sum(map(len, found.values())))
    assert is_growing(seen, WRITERS * APPENDS), seen
    assert found == {f"rank{rank}": [*range(APPENDS)] for rank in range(WRITERS)}
    assert rec.info == {"n": 1} and [*rec.modules] == ["a", *found]
    assert verify(folder).problems == []
    assert list(tmp_path.iterdir()) == [folder]


def test_rows_of_one_site_from_four_writers(tmp_path: Path) -> None:
    """The ranks record the same site: of each, all rows of its first appends, once each and from where they say."""
    folder = tmp_path / "run.hookline"
    seen = []
    for rec in seen_while(writing(ALL_THE_SAME_SITE, APPENDS, folder), folder):
        if not len(rec):
            continue
        rows = rec.rows("a:output")
        data = rows[:]
        assert torch.equal(data[:, 1], data[:, 0] + 1)
        first = data[:, 0].long().tolist()
        counts = [sum(number // 10 % 10 == rank for number in first) for rank in range(WRITERS)]
        assert sorted(first) == sorted(number for rank in range(WRITERS) for number in rows_of(rank, counts[rank] // 6))
        places = [rows.place(index) for index in range(len(rows))]
        assert [number - number // 10 % 10 * 10 for number in first] == [
            1000 * place.step + 100 * place.call + 2 * place.row for place in places
        ]
        batches = rec.dataset("a:output", batch_size=100, shuffle=True, seed=len(seen))
        given = torch.cat([batch["row"] for batch in batches])
        assert torch.equal(given.sort().values, torch.arange(len(rows)))
        assert torch.equal(torch.cat([batch["a:output"] for batch in batches]), data[given])
        seen.append(len(rows))
    assert is_growing(seen, WRITERS * APPENDS * 6), seen
    assert verify(folder).problems == []


def rows_of(rank: int, appends: int) -> list[int]:
    """First elements of the rows of the first appends of a rank."""
    return [
        1000 * step + 100 * call + 10 * rank + 2 * row for step in range(appends) for call in (0, 1) for row in range(3)
    ]


def test_four_writers_that_come_at_the_same_moment(tmp_path: Path) -> None:
    """One of them makes the folder and the others join it, whoever is first; nothing else is left behind."""
    folders = [tmp_path / f"{number}.hookline" for number in range(FOLDERS)]
    finish(writing(EACH_A_PATH, 2, *folders))
    for folder in folders:
        assert whole_appends(hookline.load(folder)) == {f"rank{rank}": [0, 1] for rank in range(WRITERS)}
        report = verify(folder)
        assert (report.folders, report.events, report.shards) == (WRITERS, WRITERS * (2 + 3), WRITERS * 2)
        assert (report.problems, report.torn) == ([], [])
    assert sorted(tmp_path.iterdir()) == sorted(folders)
