"""What writing and reading a recording costs, against raw files and the usual ways to save tensors.

    python bench/store.py                        the whole of it, some minutes, and some 6 GB of disk and of memory
    python bench/store.py --quick                a look whether everything runs, some seconds
    python bench/store.py --check --markdown out.md

The ways take turns, each round in another order; a ratio is taken round by round, and what is shown is its median with
the quartiles. Files are new for each sample, and deleting them is not in the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from measured import Measured, reported
from reading import in_order, random_rows, shuffled
from streaming import streaming
from suites import Plan
from timing import threads
from writing import formats, shards, small

EXPLAINED = f"""
Speeds: the time of the other way by ours, so more is better. Times: ours by that of the other way, or the other way's
by ours where "one append" stands.
Written are float32 tensors, those of a shard 4 MiB each; everything ends with an fsync of each file. The index of the
raw append is written without one. Statistics are those that a recording keeps of each tensor; the other ways have none.
Read are files in the page cache, with one thread. A recording has a value for each step, of 64 rows unless another
number stands there.
Forwards are those of a network of the shape of ResNet-50, batch {Plan.batch}, {Plan.side} x {Plan.side} pixels,
{Plan.threads} threads, no_grad. With to= the disk has everything when the with-block ends, and so have the
other ways at their end; inside the block they only hand it to the system.
""".strip()


def main() -> int:
    return reported("Measure writing and reading recordings on this machine.", EXPLAINED, _measure)


def _measure(quick: bool, folder: Path) -> Iterator[Measured]:
    with threads(1):
        for part in (shards, small, formats, random_rows, in_order, shuffled):
            yield from part(quick, folder)
    yield from streaming(quick, folder)


if __name__ == "__main__":
    raise SystemExit(main())
