"""What the accounting for the coverage costs: `record` with it and without it, in turn, on a ResNet-50-shaped forward.

    python bench/accounting.py            two minutes
    python bench/accounting.py --quick    see whether it runs

Without it means: nothing is counted at calls and values, no function of torch.nn.functional is wrapped, and no coverage
is worked out at the end. The whole with-block is in the time, with attaching and removing.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from networks import ResNet50, pictures
from suites import QUICK, Plan
from timing import in_turn, ratio, threads, timed

import hookline
from hookline.hooks import functional
from hookline.record import evidence, recorder
from hookline.record.coverage import Coverage


@contextlib.contextmanager
def no_accounting() -> Iterator[None]:
    """Inside, a recorder notices nothing for the coverage."""
    nothing = dict.fromkeys(("begin", "ended", "keep"), lambda *_, **__: None)
    with (
        mock.patch.multiple(evidence.Evidence, **nothing),
        mock.patch.multiple(functional, put_in=lambda: None, add=lambda tap, parameter: None),
        mock.patch.object(recorder, "coverage_of", lambda *_: Coverage([])),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the accounting for the coverage costs.")
    parser.add_argument("--quick", action="store_true", help="small network and few rounds: see whether it runs")
    plan = QUICK if parser.parse_args().quick else Plan()
    rounds = 3 if plan is QUICK else 60
    model, batch = ResNet50(inplace=True, width=plan.width).eval(), pictures(plan.batch, plan.side)

    def recorded() -> None:
        with torch.no_grad(), hookline.record(model):
            model(batch)

    def without() -> float:
        with no_accounting():
            return timed(recorded)

    with threads(plan.threads):
        recorded()
        times = in_turn({"with": lambda: timed(recorded), "without": without}, rounds)
    found = ratio(times["with"], times["without"])
    print(f"record with the accounting: {found.median:.3f} [{found.low:.3f}, {found.high:.3f}] times record without it")
    print(f"medians of {rounds} rounds; target: at most 1.02")


if __name__ == "__main__":
    main()
