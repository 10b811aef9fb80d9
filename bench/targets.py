"""What the numbers should be, and whether they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from suites import Attaching, Row
from timing import spread
from variants import BACKWARD_HOOKS, RECORD_BOTH, RECORD_OUTPUTS, STOCK_BACKWARD

__all__ = ["Target", "judged"]


class Target(NamedTuple):
    """A bound on one number.

    Attributes:
        name: What is bounded.
        limit: The largest value that is good.
        value: What was measured.
    """

    name: str
    limit: float
    value: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def judged(rows: Sequence[Row], attached: Sequence[Attaching]) -> list[Target]:
    """The targets with their measured values."""
    table = {(row.network, row.variant): row.cells for row in rows}
    outputs, both = (table["ResNet-50", variant.name] for variant in (RECORD_OUTPUTS, RECORD_BOTH))
    tiny = {variant: table["Linear(8, 8)", variant.name] for variant in (BACKWARD_HOOKS, STOCK_BACKWARD)}
    hooks, stock = (cells["forward + backward"].samples for cells in tiny.values())
    stock_ratio = spread([mine / theirs for mine, theirs in zip(hooks, stock, strict=True)]).median
    record = "ResNet-50, record all outputs"
    return [
        Target(f"{record}, no_grad: x bare forward", 1.08, outputs["forward, no_grad"].ratio.median),
        Target(f"{record}, with grad: x bare forward", 1.08, outputs["forward"].ratio.median),
        Target(f"{record} and gradients: x bare pass", 1.12, both["forward + backward"].ratio.median),
        Target("Linear(8, 8), backward hooks: x PyTorch's full backward hooks", 1.5, stock_ratio),
        *_linear(attached),
    ]


def _linear(attached: Sequence[Attaching]) -> Iterable[Target]:
    """Attaching is linear when a module of the longest row takes no more than a module of the shortest."""
    for way, by_modules in attached:
        if not way.startswith("hookline"):
            continue
        counts = sorted(by_modules)
        few, many = counts[0], counts[-1]
        grown = by_modules[many].median / by_modules[few].median
        yield Target(f"{way}: time per module, {many:,} modules to {few:,}", 1.5, grown)
