"""The numbers as a page of Markdown, which is also good to read in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from suites import MODES, Attaching, Cell, Plan, Row
from targets import Target
from variants import BARE

__all__ = ["markdown", "origin", "table"]


def markdown(
    about: dict[str, Any], plan: Plan, rows: Sequence[Row], attached: Sequence[Attaching], targets: Sequence[Target]
) -> str:
    """Everything that was measured, as a table for the passes, one for attaching and one for the targets."""
    return "\n".join(
        [
            origin(about),
            "",
            *_explained(plan),
            "",
            *table(["network", "", *MODES], _network_lines(rows)),
            "",
            *table(["attach and remove, us per module", *_counts(attached)], _attach_lines(attached)),
            "",
            *table(["target", "at most", "measured", "met"], map(_target_line, targets)),
        ]
    )


def origin(about: dict[str, Any]) -> str:
    """The machine in one line."""
    return (
        f"{about['processor']}, {about['cores']} cores, {about['system']}, Python {about['python']}, "
        f"torch {about['torch']}, load {about['load']} when it began"
    )


def _explained(plan: Plan) -> list[str]:
    return [
        f"Linear(8, 8): batch 1, 1 thread, {plan.tiny_rounds} rounds of {plan.tiny_calls} passes.",
        f"ResNet-50: its shape with width {plan.width}, batch {plan.batch}, {plan.side} x {plan.side} pixels, "
        f"{plan.threads} thread{'s' * (plan.threads > 1)}, {plan.rounds} rounds of one pass;",
        "in-place ReLU and `+=`; in evaluation mode with no_grad, else in training mode. Hooks are on all 126 modules "
        "without children, 158 calls.",
        "Without in-place: the same with ReLU and `+` that write nothing in place.",
        "Bare: the time of a pass. Others: ratio to the bare model, [quartiles], events in one pass.",
    ]


def _network_lines(rows: Iterable[Row]) -> Iterator[list[str]]:
    shown = ""
    for row in rows:
        yield [row.network if row.network != shown else "", row.variant, *(_cell(row, mode) for mode in MODES)]
        shown = row.network


def _cell(row: Row, mode: str) -> str:
    cell: Cell = row.cells[mode]
    if cell.seconds is None or cell.ratio is None:
        return f"error: {cell.error[:44]}..."
    if row.variant == BARE.name:
        return _time(cell.seconds.median)
    median, low, high = cell.ratio
    return f"{median:.2f} [{low:.2f}, {high:.2f}]" + (f", {cell.events}" if cell.events else "")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} us"


def _counts(attached: Sequence[Attaching]) -> list[str]:
    return [f"{count:,} modules" for count in attached[0].by_modules]


def _attach_lines(attached: Iterable[Attaching]) -> Iterator[list[str]]:
    for way, by_modules in attached:
        yield [way, *(f"{median:.1f} [{low:.1f}, {high:.1f}]" for median, low, high in by_modules.values())]


def _target_line(target: Target) -> list[str]:
    return [target.name, f"{target.limit:.2f}", f"{target.value:.2f}", "yes" if target.met else "NO"]


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table with straight sides."""
    body = [list(line) for line in lines]
    widths = [max(len(line[column]) for line in [header, *body]) for column in range(len(header))]
    for line in [header, ["-" * width for width in widths], *body]:
        yield f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
