"""Reading a recording on disk: random rows, everything in order, and shuffled batches, against raw mapped files.

The files are in the page cache: what is compared is the work of the reader, not the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measured import Measured, at_least, at_most
from timing import in_turn, ratio, spread, timed
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hookline
from hookline.record import Recording, Rows

__all__ = ["in_order", "random_rows", "shuffled"]

SITE = "0:output"
ROWS, LARGE, CHOSEN, RANGE, BATCH = 64, 2048, 2048, 4096, 256
"""Rows of a value, and of a large one; rows that are chosen at random; rows of a range; rows of a batch."""
FEW, FAST, SHUFFLED = at_most(2), at_least(0.8), at_least(0.7)


class _Files(NamedTuple):
    """A recording with one value for each step, and one raw file of the same rows."""

    folder: Path
    raw: Path
    dtype: torch.dtype
    width: int

    def load(self) -> Recording:
        return hookline.load(self.folder)

    def rows(self) -> Rows:
        return self.load().rows(SITE)

    def map(self) -> Tensor:
        """All rows, mapped anew."""
        return torch.from_numpy(np.memmap(self.raw, np.uint8, "c")).view(self.dtype).view(-1, self.width)

    def told(self) -> str:
        size = self.width * self.dtype.itemsize
        return f"rows of {self.width:,} {str(self.dtype).removeprefix('torch.')} ({size:,} bytes)"


def random_rows(quick: bool, folder: Path) -> Iterator[Measured]:
    """2,048 random rows against the same rows of one `numpy.memmap`, which stays mapped."""
    rounds = 3 if quick else 100
    files = _recorded(folder / "random", 512, torch.float32, 4 if quick else 1000)
    rows = files.rows()
    raw = np.memmap(files.raw, np.float32, "r", shape=tuple(rows.shape))
    chosen = np.random.default_rng(0).integers(0, len(raw), CHOSEN)
    assert np.array_equal(rows[chosen].numpy(), raw[chosen])
    times = in_turn(
        {
            "raw": lambda: timed(lambda: raw[chosen]),
            "together": lambda: timed(lambda: rows[chosen]),
            "one by one": lambda: timed(lambda: [rows[row] for row in chosen.tolist()]),
        },
        rounds,
    )
    alone = 1e6 * spread(times["one by one"]).median / CHOSEN
    what = f"time of {CHOSEN:,} random {files.told()}, of {len(rows):,}"
    told = f"{spread(times['together']).median * 1e3:.2f} ms; one row alone {alone:.1f} us"
    yield Measured(what, "numpy.memmap", ratio(times["together"], times["raw"]), FEW, told)


def in_order(quick: bool, folder: Path) -> Iterator[Measured]:
    """Every row in order, each byte summed, against the raw file; both are opened and mapped anew in each round."""
    rounds = 3 if quick else 15
    for count, steps in ((ROWS, 2000), (LARGE, 64)):
        files = _recorded(folder / f"in-order-{count}", 512, torch.float32, 8 if quick else steps, count)
        ways: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
            f"rows.split({RANGE:,})": (
                lambda files=files: _time_of(files.rows(), lambda rows: _sum(rows.split(RANGE))),
                lambda files=files: timed(lambda: _sum(_ranges(files.map(), RANGE))),
            ),
            f"rows[start : start + {RANGE:,}], a copy": (
                lambda files=files: _time_of(files.rows(), lambda rows: _sum(_ranges(rows, RANGE))),
                lambda files=files: timed(lambda: _sum(_ranges(files.map(), RANGE))),
            ),
            "values one by one": (
                lambda files=files: _time_of(files.load(), lambda rec: _sum(event.value for event in rec)),
                lambda files=files, count=count: timed(lambda: _sum(_ranges(files.map(), count))),
            ),
        }
        for name, (ours, raw) in ways.items():
            times = in_turn({"ours": ours, "raw": raw}, rounds)
            what = f"speed of reading in order, {name}, {files.told()}, {count:,} in a value"
            yield _speed(what, "a mapped file", files, times)


def shuffled(quick: bool, folder: Path) -> Iterator[Measured]:
    """Shuffled batches of a `DataLoader` without workers, against batches in order and against plain reading."""
    rounds = 3 if quick else 15
    for width, dtype, steps in ((512, torch.float32, 2000), (4096, torch.bfloat16, 500)):
        files = _recorded(folder / str(dtype), width, dtype, 8 if quick else steps)
        times = in_turn(
            {
                "ours": lambda files=files: _epoch(files, shuffle=True),
                "DataLoader in order": lambda files=files: _epoch(files, shuffle=False),
                f"rows[start : start + {BATCH}] in order": lambda files=files: _time_of(
                    files.rows(), lambda rows: [None for _ in _ranges(rows, BATCH)]
                ),
            },
            rounds,
        )
        for name in times:
            if name != "ours":
                pair = {"ours": times["ours"], "raw": times[name]}
                yield _speed(f"speed of shuffled batches, {files.told()}", name, files, pair, shuffle=True)


def _speed(what: str, against: str, files: _Files, times: dict[str, list[float]], *, shuffle: bool = False) -> Measured:
    size = files.raw.stat().st_size
    ours, raw = (size / spread(times[name]).median / 1e9 for name in ("ours", "raw"))
    bound = SHUFFLED if shuffle else FAST
    return Measured(what, against, ratio(times["raw"], times["ours"]), bound, f"{ours:.2f} GB/s, {raw:.2f} GB/s")


# ---------------------------------------------------------------- the ways


def _time_of(opened: Any, read: Callable[[Any], object]) -> float:
    """Seconds to read what was opened just now, so that its files are not mapped yet."""
    return timed(lambda: read(opened))


def _ranges(rows: Rows | Tensor, size: int) -> Iterator[Tensor]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _sum(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.sum()) for tensor in tensors)


def _epoch(files: _Files, *, shuffle: bool) -> float:
    dataset = files.load().dataset(SITE, shuffle=shuffle, batch_size=BATCH)
    return timed(lambda: [None for _ in DataLoader(dataset, batch_size=None)])


def _recorded(folder: Path, width: int, dtype: torch.dtype, steps: int, count: int = ROWS) -> _Files:
    model = nn.Sequential(nn.Identity())
    with hookline.record(model, "0") as rec:
        for _ in range(steps):
            model(torch.randn(count, width).to(dtype))
    rec.save(folder / "run.hookline")
    files = _Files(folder / "run.hookline", folder / "raw", dtype, width)
    rec.rows(SITE)[:].view(torch.uint8).numpy().tofile(files.raw)
    return files
