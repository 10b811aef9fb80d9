"""Gradient flow: how large the gradients are, layer by layer, and where they vanish, explode or stop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hookline.errors import OptionError, SiteError
from hookline.fp8 import has_scaled, whole_leaves
from hookline.report.plot.canvas import (
    BAD,
    BLUE,
    INK,
    ORANGE,
    FilePath,
    Grid,
    check_target,
    drawing,
    heading,
    inches,
    load,
    plain,
    short_ticks,
)
from hookline.report.plot.reading import Array
from hookline.report.text import plural, printable, shorten, trouble_text
from hookline.sites import PORTS, label
from hookline.stats.compute import summarize
from hookline.stats.pieces import as_float64, pieces
from hookline.stats.summary import Summary, merge

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["gradient_flow"]

_GRADIENT_PORTS = ("grad_output", "grad_input")
_SAMPLE = 1 << 20
"""About how many elements of a layer the median is taken of; where there are more, of every n-th."""

_LONGEST_LABEL = 34
_LABEL_INCHES = 0.125
"""Height that a label needs, so that no two touch."""


def gradient_flow(
    recording: Any,
    *,
    port: str = "grad_output",
    log: bool = True,
    title: str | None = None,
    path: FilePath | None = None,
    figure: Figure | None = None,
) -> Figure:
    """Draw the median and the largest size of the gradient at each layer, in model order from top to bottom.

    Layers whose gradient is zero everywhere, or is somewhere NaN or infinite, have marks of their own.

    Args:
        recording: What was recorded, in memory or on disk; all calls and steps of a layer count together.
        port: "grad_output", the gradient that arrives at a layer's output, or "grad_input", what it passes on.
        log: Whether sizes are on a logarithmic scale.
        title: Line above the picture.
        path: Also write a .png or .svg file.
        figure: Draw on this figure, which is emptied first, instead of a new one.

    Returns:
        The figure; it belongs to no window and is freed with its last reference. Of a layer with more than a
        million elements the median is that of every n-th; the largest is exact.

    Raises:
        OptionError: The port is no gradient, or the path cannot be used.
        SiteError: The recording holds no gradient; the message says how to record them.
        HooklineError: matplotlib is not installed.
    """
    load()
    target = check_target(path)
    if port not in _GRADIENT_PORTS:
        raise OptionError(f'port must be "grad_output" or "grad_input"; got {port!r}')
    layers = _layers(recording, port)
    with drawing(target, figure) as made:
        axes = _axes(made, layers, title)
        _draw(axes, layers, log)
        axes.set_xlabel(f"size of {port}{', log scale' if log else ''}")
        heading(made, title, _summary_line(layers, port))
    return made


# ---------------------------------------------------------------- what to draw


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One layer: sizes are over the finite elements, NaN when there is none."""

    name: str
    median: float
    largest: float
    summary: Summary


def _layers(recording: Any, port: str) -> list[_Layer]:
    found: dict[str, list[Any]] = {}
    for event in recording.events:
        if event.port == port and event.leaves():
            found.setdefault(event.path, []).append(event)
    if not found:
        raise SiteError(_no_gradient(recording, port))
    known = [path for path in recording.modules if path in found]
    return [_layer(path, found[path]) for path in dict.fromkeys([*known, *found])]


def _no_gradient(recording: Any, port: str) -> str:
    seen = {event.port for event in recording.events}
    ports = ", ".join(name for name in PORTS if name in seen) or "nothing"
    return (
        f"the recording holds no {port}; recorded: {ports}. Record it with "
        f'hookline.record(model, ports=("{port}",)) and call backward() inside the with-block'
    )


def _layer(path: str, events: Sequence[Any]) -> _Layer:
    summary = merge(summary for event in events for summary in _summaries(event))
    every = max(1, summary.numel // _SAMPLE)
    sizes = np.concatenate([_sizes(tensor, every) for event in events for _, tensor in whole_leaves(event)])
    median = float(np.median(sizes)) if sizes.size else math.nan
    return _Layer(printable(label(path)), median, max(abs(summary.min), abs(summary.max)), summary)


def _summaries(event: Any) -> Iterable[Summary]:
    """Of what the model had, which those of data and scale do not tell."""
    if has_scaled(event.value):
        return [summarize(tensor) for _, tensor in whole_leaves(event)]
    return event.summaries().values()  # type: ignore[no-any-return]


def _sizes(tensor: torch.Tensor, every: int) -> Array:
    """Magnitudes of the finite ones among every n-th element."""
    found = [np.zeros(0)]
    with torch.no_grad():
        for piece, times in pieces(tensor):
            part = as_float64(piece.reshape(-1)[::every]).abs().cpu().numpy()
            found.append(np.repeat(part, max(times // every, 1)))
    sizes: Array = np.concatenate(found)
    return sizes[np.isfinite(sizes)]


# ---------------------------------------------------------------- drawing


def _axes(figure: Figure, layers: Sequence[_Layer], title: str | None) -> Axes:
    height = max(_row_inches(len(layers)) * len(layers), 0.8)
    longest = max(len(shorten(layer.name, _LONGEST_LABEL)) for layer in layers)
    margins = (0.3 + 0.06 * longest, 0.2, 0.8 if title else 0.6, 0.5)
    axes = Grid(1, 1, (6.0, height), (0.0, 0.0), margins).axes(figure)[0]
    axes.set_ylim(len(layers) - 0.5, -0.5)
    return axes


def _row_inches(count: int) -> float:
    """Inches per layer: less for many, but a picture of 150 layers may be long."""
    return 0.19 if count <= 40 else max(0.07, 0.19 - 0.001 * (count - 40))


def _draw(axes: Axes, layers: Sequence[_Layer], log: bool) -> None:
    low, high = _range(layers, log)
    axes.set_xscale("log" if log else "linear")
    axes.set_xlim(low, high)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.minorticks_off()
    axes.tick_params(axis="y", length=0)
    _draw_sizes(axes, layers, low if log else -math.inf)
    labelled = _label(axes, layers)
    _draw_trouble(axes, layers, labelled)
    if not log:
        short_ticks(axes.xaxis)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=5, frameon=False, handletextpad=0.3,
                    columnspacing=1.4, borderaxespad=0.1)  # fmt: skip


def _range(layers: Sequence[_Layer], log: bool) -> tuple[float, float]:
    """Ends of the axis, with room on the left for the marks of zeros and on the right for counts of NaN."""
    sizes = [size for layer in layers for size in (layer.median, layer.largest) if size > 0]
    low, high = (min(sizes), max(sizes)) if sizes else (1e-3, 1.0)
    if not log:
        return -0.06 * high, 1.25 * high
    decades = max(math.log10(high) - math.log10(low), 2.0)
    middle = (math.log10(high) + math.log10(low)) / 2
    ends = middle - 0.59 * decades, middle + 0.66 * decades
    # The smallest and largest normal floats; past them matplotlib finds no ticks.
    return 10 ** max(ends[0], -307.0), 10 ** min(ends[1], 307.0)


def _draw_sizes(axes: Axes, layers: Sequence[_Layer], floor: float) -> None:
    rows = [row for row, layer in enumerate(layers) if layer.largest > 0]
    largest = [layers[row].largest for row in rows]
    medians = [layers[row].median for row in rows]
    shown = [median if median > 0 else floor if floor > 0 else 0.0 for median in medians]
    for row, start, end, median in zip(rows, shown, largest, medians, strict=True):
        axes.hlines(row, start, end, color="#c4c4c4", linewidth=1.0, zorder=1, linestyle="-" if median > 0 else ":")
    above = [(median, row) for median, row in zip(medians, rows, strict=True) if median > 0]
    below = [(place, row) for place, row, median in zip(shown, rows, medians, strict=True) if not median > 0]
    size = 4.5 if len(layers) <= 80 else 3.2
    for points, colour, fill, text in ((above, BLUE, BLUE, "median"), (below, BLUE, "white", "median is 0")):
        if points:
            axes.plot(*zip(*points, strict=True), "o", ms=size, color=colour, mfc=fill, label=text, clip_on=False)
    if rows:
        axes.plot(largest, rows, "D", ms=size, color=ORANGE, label="largest")


def _draw_trouble(axes: Axes, layers: Sequence[_Layer], labelled: Sequence[int]) -> None:
    """In places of their own, whatever the axis shows: zeros at its left end, NaN and Inf at its right end."""
    across = axes.get_yaxis_transform()
    zero = [row for row, layer in enumerate(layers) if layer.summary.all_zero]
    if zero:
        axes.plot([0.012] * len(zero), zero, "x", ms=5, mew=1.3, color=INK, transform=across, label="all zero")
    bad = [row for row, layer in enumerate(layers) if not layer.summary.finite]
    for row in bad:
        axes.axhspan(row - 0.5, row + 0.5, color=BAD, alpha=0.1, linewidth=0)
    for row in (row for row in bad if row in labelled):
        text = axes.text(0.993, row, trouble_text(layers[row].summary), transform=across, size=6.5, color=BAD)
        plain(text).set(ha="right", va="center", weight="bold")
    if bad:
        axes.plot([], [], "s", ms=6, color=BAD, alpha=0.35, label="NaN or Inf")


def _label(axes: Axes, layers: Sequence[_Layer]) -> list[int]:
    """Names as many layers as there is room for, those in trouble first, and tells which."""
    apart = max(1, math.ceil(_LABEL_INCHES * len(layers) / inches(axes)[1]))
    troubled = [row for row, layer in enumerate(layers) if layer.summary.all_zero or not layer.summary.finite]
    chosen: list[int] = []
    for row in [*troubled, *range(0, len(layers), apart), len(layers) - 1]:
        if all(abs(row - other) >= apart for other in chosen):
            chosen.append(row)
    axes.set_yticks(sorted(chosen), [shorten(layers[row].name, _LONGEST_LABEL) for row in sorted(chosen)])
    for tick, row in zip(axes.get_yticklabels(), sorted(chosen), strict=True):
        plain(tick).set_color(BAD if not layers[row].summary.finite else INK)
    return chosen


def _summary_line(layers: Sequence[_Layer], port: str) -> str:
    zero = sum(layer.summary.all_zero for layer in layers)
    bad = sum(not layer.summary.finite for layer in layers)
    parts = [f"{port} of {plural(len(layers), 'layer')}, first layer at the top"]
    parts += [f"{zero} all zero"] * bool(zero) + [f"{bad} with NaN or Inf"] * bool(bad)
    return ", ".join(parts)
