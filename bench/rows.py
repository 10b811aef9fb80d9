"""What 2,048 random rows of a recording on disk cost, against the same rows of one raw `numpy.memmap`.

    python bench/rows.py            some seconds
    python bench/rows.py --quick    see whether it runs

The files are in the page cache: what is compared is the work of the reader, not the disk. The recording has a value
for each step, one behind the other in one shard; the raw file is one array of the same rows.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from timing import in_turn, ratio, timed
from torch import nn

import hookline
from hookline.record import Rows

ROWS, WIDTH, CHOSEN = 64, 512, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure random rows of a recording on disk.")
    parser.add_argument("--quick", action="store_true", help="few steps and rounds: see whether it runs")
    quick = parser.parse_args().quick
    steps, rounds = (4, 3) if quick else (1000, 100)
    with tempfile.TemporaryDirectory() as folder:
        rows, raw = _recorded(Path(folder), steps)
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
    together, alone = ratio(times["together"], times["raw"]), float(np.median(times["one by one"]))
    print(
        f"{CHOSEN:,} random rows of {4 * WIDTH:,} bytes, of {steps * ROWS:,}: {together.median:.2f} "
        f"[{together.low:.2f}, {together.high:.2f}] times a raw numpy.memmap; target: at most 2"
    )
    print(f"one row alone: {1e6 * alone / CHOSEN:.1f} us; medians of {rounds} rounds")


def _recorded(folder: Path, steps: int) -> tuple[Rows, np.memmap]:
    model = nn.Sequential(nn.Identity())
    with hookline.record(model, "0") as rec:
        for _ in range(steps):
            model(torch.randn(ROWS, WIDTH))
    rec.save(folder / "run.hookline")
    rows = hookline.load(folder / "run.hookline").rows("0:output")
    rec.rows("0:output")[:].numpy().tofile(folder / "raw")
    return rows, np.memmap(folder / "raw", dtype=np.float32, mode="r", shape=tuple(rows.shape))


if __name__ == "__main__":
    main()
