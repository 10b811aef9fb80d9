"""How much memory a recording of 4 GiB takes that may keep 256 MB and writes the rest to disk.

    python bench/memory.py            some minutes, and somewhat more than 4 GiB of disk
    python bench/memory.py --quick    64 MiB: see whether it runs

The forwards run twice, recorded and bare, each time in a process of its own; what is compared is the peak of each
from the first forward to the end of the recording, as Linux counts it (VmHWM).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from measured import Measured, at_most, reported
from timing import spread
from torch import nn

import hookline

BUDGET, BESIDES = 256, 150
"""Megabytes: what may be kept, and what may be needed besides."""
MODULES, ROWS, WIDTH = 8, 2048, 1024
"""Modules, and the shape of the output of each: 8 MiB."""
FORWARD = MODULES * ROWS * WIDTH * 4
"""Bytes that a forward gives."""
EXPLAINED = f"""
Each module gives {FORWARD // MODULES >> 20} MiB; recorded with budget="{BUDGET}MB" and to=. Peaks are counted from
what there is after a first forward, in megabytes of 10^6 bytes.
""".strip()


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "--peak-of":
        way, forwards, folder = sys.argv[2:]
        print(json.dumps(_peak(way, int(forwards), Path(folder))))
        return 0
    return reported("Measure the memory of a recording that goes to disk.", EXPLAINED, _measure)


def _measure(quick: bool, folder: Path) -> Iterator[Measured]:
    forwards, rounds = (64 << 20 if quick else 4 << 30) // FORWARD, 1 if quick else 3
    needed, free = forwards * FORWARD * 1.1, shutil.disk_usage(folder).free
    if free < needed:
        raise SystemExit(
            f"{folder}: {needed / 1e9:.1f} GB of disk are needed, {free / 1e9:.1f} GB are free. Free some space, or "
            "set TMPDIR to a folder on another disk."
        )
    peaks: dict[str, list[float]] = {"bare": [], "recorded": []}
    for _ in range(rounds):
        for way, found in peaks.items():
            found.append(_in_process(way, forwards, folder / "run"))
    more = [mine - theirs for mine, theirs in zip(peaks["recorded"], peaks["bare"], strict=True)]
    told = ", ".join(f"{way} {spread(found).median:.0f} MB" for way, found in peaks.items())
    what = f"peak memory of recording {forwards * FORWARD >> 20:,} MiB"
    yield Measured(what, "the bare forwards, MB more", spread(more), at_most(BUDGET + BESIDES), told)


def _in_process(way: str, forwards: int, folder: Path) -> float:
    """Peak of a fresh process, in megabytes."""
    command = [sys.executable, __file__, "--peak-of", way, str(forwards), str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    shutil.rmtree(folder, ignore_errors=True)
    return float(json.loads(done.stdout)) / 1e6


def _peak(way: str, forwards: int, folder: Path) -> int:
    """How far the resident memory of this process grows while it runs forwards, in bytes."""
    model = nn.Sequential(*(nn.Tanh() for _ in range(MODULES)))
    x = torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        model(x)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status("VmRSS")  # what the imports have taken is not the same in each process
        inside = contextlib.nullcontext()
        if way == "recorded":
            inside = hookline.record(model, "*", budget=f"{BUDGET}MB", to=folder / "run.hookline")
        with inside:
            for _ in range(forwards):
                model(x)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """Bytes of an entry of the status of this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    raise SystemExit(main())
