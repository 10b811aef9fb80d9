"""What the statistics of one tensor cost, against its plain sum and against one torch operation for each of them.

python bench/summaries.py            a minute
python bench/summaries.py --quick    small tensors: see whether it runs
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from measured import Measured, at_least, at_most, reported
from timing import in_turn, ratio, spread, threads, timed
from torch import Tensor

from hookline.stats import native, summarize

EXPLAINED = """
Eight operations are mean, std, min, max, norm and the counts of NaN, Inf and zero, each with .item(). Hookline computes
these and the counts of -Inf and subnormal elements.
""".strip()
SMALL_CALLS = 2000


def main() -> int:
    if not native.available():
        raise SystemExit("The C kernel was not built, so there is nothing to measure: python hatch_build.py says why.")
    return reported("Measure the statistics of tensors on the CPU.", EXPLAINED, _measure)


def _measure(quick: bool, folder: Path) -> Iterator[Measured]:
    size, rounds = (1 << 20, 3) if quick else (64 << 20, 15)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.randn(size // dtype.itemsize, dtype=torch.float32).to(dtype)
        for count in (1, 2):
            with threads(count):
                yield from _against(tensor, count, rounds)
    yield _small(200 if quick else SMALL_CALLS, rounds)


def _against(tensor: Tensor, count: int, rounds: int) -> Iterator[Measured]:
    ways: dict[str, Callable[[], object]] = {"sum": tensor.sum, "ours": lambda: summarize(tensor)}
    name = str(tensor.dtype).removeprefix("torch.")
    what = f"{tensor.nbytes >> 20} MiB of {name}, {count} thread{'s' * (count > 1)}"
    times = in_turn({way: lambda run=run: timed(run) for way, run in ways.items()}, rounds)
    told = f"{spread(times['ours']).median * 1e3:.2f} ms, sum {spread(times['sum']).median * 1e3:.2f} ms"
    bound = at_most(1.6) if tensor.dtype is torch.float32 else None
    yield Measured(f"time of {what}", "tensor.sum()", ratio(times["ours"], times["sum"]), bound, told)
    if tensor.dtype is torch.float32:
        eight = in_turn({"eight": lambda: timed(lambda: _eight(tensor)), "ours": lambda: timed(ways["ours"])}, 3)
        told = f"{spread(eight['eight']).median * 1e3:.0f} ms"
        yield Measured(f"speed of {what}", "eight operations", ratio(eight["eight"], eight["ours"]), at_least(40), told)


def _small(calls: int, rounds: int) -> Measured:
    tensor = torch.randn(1024)

    def many() -> None:
        for _ in range(calls):
            summarize(tensor)

    with threads(1):
        found = [timed(many) / calls * 1e6 for _ in range(rounds)]
    return Measured("time of 4 KiB of float32", "microseconds", spread(found), at_most(10))


def _eight(tensor: Tensor) -> tuple[float, ...]:
    return (
        tensor.mean().item(),
        tensor.std().item(),
        tensor.min().item(),
        tensor.max().item(),
        tensor.norm().item(),
        tensor.isnan().sum().item(),
        tensor.isinf().sum().item(),
        (tensor == 0).sum().item(),
    )


if __name__ == "__main__":
    sys.exit(main())
