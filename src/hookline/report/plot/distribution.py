"""Histograms: of one tensor, of several by name, or of every site of a recording."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hookline.errors import ArgumentError, OptionError, SiteError
from hookline.report.plot.canvas import (
    BAD,
    BLUE,
    GREY,
    FilePath,
    Grid,
    check_target,
    drawing,
    heading,
    load,
    plain,
    short,
    short_ticks,
)
from hookline.report.plot.reading import Array
from hookline.report.rows import Row, collect, select_events
from hookline.report.text import plural, printable, shorten, trouble_text
from hookline.sites import Pattern
from hookline.stats.compute import summarize
from hookline.stats.pieces import as_float64, pieces
from hookline.stats.summary import Summary
from hookline.values import walk

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["histogram"]

_MOST = 400
"""Panels in one picture."""


def histogram(
    value: Any,
    *,
    bins: int = 64,
    log: bool = True,
    site: Pattern | None = None,
    title: str | None = None,
    path: FilePath | None = None,
    figure: Figure | None = None,
) -> Figure:
    """Draw how the finite values of each tensor are distributed, one panel per tensor, each with its own range.

    Shares of zeros and counts of NaN and Inf are written into the panel, since no bar can show them.

    Args:
        value: A tensor, a mapping from names to tensors, any value that holds tensors, or a recording; of a recording,
            each site has one panel over all its calls.
        bins: Bars per panel.
        log: Whether the counts are on a logarithmic scale, on which rare large values can be seen.
        site: Only these sites of a recording.
        title: Line above the picture.
        path: Also write a .png or .svg file.
        figure: Draw on this figure, which is emptied first, instead of a new one.

    Returns:
        The figure; it belongs to no window and is freed with its last reference.

    Raises:
        ArgumentError: There is no tensor in the value.
        OptionError: An option or path that cannot be used, or more tensors than one picture can hold.
        SiteError: The recording has no such site, or nothing was recorded.
        HooklineError: matplotlib is not installed.
    """
    load()
    target = check_target(path)
    if type(bins) is not int or not 1 <= bins <= 10_000:
        raise OptionError(f"bins must be a whole number from 1 to 10000; got {bins!r}")
    samples = _samples(value, site)
    if len(samples) > _MOST:
        raise OptionError(f"{len(samples)} tensors are too many for one picture of {_MOST}; choose some with site=")
    with drawing(target, figure) as made:
        grid = _grid(len(samples), title)
        for index, (axes, sample) in enumerate(zip(grid.axes(made), samples, strict=True)):
            _draw(axes, sample, bins, log)
            if index % grid.columns == 0:
                axes.set_ylabel("count", size=7, color=GREY)
        heading(made, title, f"{plural(len(samples), 'tensor')}, counts on a {'log' if log else 'linear'} scale")
    return made


# ---------------------------------------------------------------- what to draw


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Tensors that are counted together. They are read anew each time, so that a recording stays on disk."""

    name: str
    summary: Summary
    tensors: Callable[[], Iterable[Tensor]]


def _samples(value: Any, site: Pattern | None) -> list[_Sample]:
    if hasattr(value, "events") and hasattr(value, "modules"):
        return _recorded(value, site)
    if site is not None:
        raise OptionError("site= chooses sites of a recording; the value is none")
    if not isinstance(value, (Tensor, Mapping)) and hasattr(value, "output"):
        value = value.output
    named = [pair for name, part in _parts(value) for pair in walk(part, name)]
    samples = [_sample(name, leaf) for name, leaf in named if isinstance(leaf, Tensor)]
    if not samples:
        wanted = "a torch.Tensor, a mapping from names to tensors or a recording"
        raise ArgumentError(f"histogram takes {wanted}; got {type(value).__name__} without a tensor")
    return samples


def _sample(name: str, tensor: Tensor) -> _Sample:
    return _Sample(name, summarize(tensor), lambda: [tensor])


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    return ((str(name), part) for name, part in value.items()) if isinstance(value, Mapping) else [("", value)]


def _recorded(recording: Any, site: Pattern | None) -> list[_Sample]:
    events = select_events(recording, site)
    rows = [row for row in collect(events, recording.modules) if row.sightings]
    if not rows:
        raise SiteError("the recording holds no tensor there; print(recording) shows what it holds")
    ports = {row.port for row in rows}
    return [_Sample(_name(row, len(ports) > 1), row.summary, _reader(row, events)) for row in rows]


def _name(row: Row, with_port: bool) -> str:
    return f"{row.name}:{row.port}" if with_port else row.name


def _reader(row: Row, events: Iterable[Any]) -> Callable[[], Iterator[Tensor]]:
    wanted = {(sighting.order, sighting.value_path) for sighting in row.sightings}

    def tensors() -> Iterator[Tensor]:
        for event in events:
            if (event.path, event.port) == (row.path, row.port):
                yield from (tensor for value_path, tensor in event.leaves() if (event.order, value_path) in wanted)

    return tensors


def _count(sample: _Sample, bins: int) -> tuple[Array, Array]:
    """Counts, shape (bins,), and edges, shape (bins + 1,), of the finite values, a chunk at a time."""
    edges = _edges(sample.summary.min, sample.summary.max, bins)
    counts = np.zeros(bins)
    with torch.no_grad():
        for piece, times in (pair for tensor in sample.tensors() for pair in pieces(tensor)):
            values = as_float64(piece).cpu().numpy().ravel()
            counts += times * np.histogram(values[np.isfinite(values)], bins=edges)[0]
    return counts, edges


def _edges(low: float, high: float, bins: int) -> Array:
    """Edges that are all different: around a constant, or between neighbouring floats, the range is made wider."""
    least = 2 * bins * float(np.spacing(max(abs(low), abs(high))))
    if high - low <= least:
        half = 0.5 if least < 1e-3 else 1e3 * least
        low, high = low - half, high + half
    # Not linspace from low to high - low: that difference may be too large for a float.
    share = np.linspace(0.0, 1.0, bins + 1)
    return low * (1 - share) + high * share


# ---------------------------------------------------------------- drawing


def _grid(count: int, title: str | None) -> Grid:
    columns = min(count, 4) if count != 4 else 2
    panel = (5.6, 2.6) if count == 1 else (2.9, 1.5) if count <= 4 else (2.1, 1.05)
    return Grid(count, columns, panel, gap=(0.5, 0.58), margins=(0.62, 0.2, 0.82 if title else 0.62, 0.35))


def _draw(axes: Axes, sample: _Sample, bins: int, log: bool) -> None:
    summary = sample.summary
    plain(axes.set_title(shorten(printable(sample.name), 34), loc="left", size=7.5, pad=11 if _facts(summary) else 3))
    axes.tick_params(labelsize=6.5)
    _write_facts(axes, summary)
    if math.isnan(summary.mean):
        axes.set(xticks=[], yticks=[])
        plain(axes.text(0.5, 0.45, _why_empty(summary), transform=axes.transAxes, ha="center", color=GREY))
        return
    counts, edges = _count(sample, bins)
    axes.stairs(counts, edges, fill=True, color=BLUE)
    axes.set_xlim(edges[0], edges[-1])
    axes.xaxis.offsetText.set_fontsize(6.5)
    axes.locator_params(axis="x", nbins=4)
    if edges[-1] - edges[0] > 1e-3 * max(abs(edges[0]), abs(edges[-1])):  # else only a common offset makes sense
        short_ticks(axes.xaxis)
    if log:
        axes.set_yscale("log")
        axes.set_ylim(0.7, max(float(counts.max()) * 1.8, 2.0))
        axes.minorticks_off()
    else:
        axes.locator_params(axis="y", nbins=4, integer=True)
        short_ticks(axes.yaxis)


def _write_facts(axes: Axes, summary: Summary) -> None:
    """Between the name and the bars, and the counts of NaN and Inf at the end of the same line."""
    above: dict[str, Any] = {"xycoords": "axes fraction", "xytext": (0, 2.5), "textcoords": "offset points"}
    plain(axes.annotate(_facts(summary), (0.0, 1.0), color=GREY, size=6.5, **above))
    if not summary.finite:
        text = axes.annotate(trouble_text(summary), (1.0, 1.0), color=BAD, size=6.5, weight="bold", **above)
        plain(text).set_horizontalalignment("right")


def _facts(summary: Summary) -> str:
    if math.isnan(summary.mean):
        return ""
    zeros = f"   zeros {_percent(summary.zeros / summary.numel)}" if summary.zeros else ""
    return f"mean {short(summary.mean)}   std {short(summary.std)}{zeros}"


def _percent(share: float) -> str:
    return "<1 %" if share < 0.005 else f"{share:.0%}".replace("%", " %")


def _why_empty(summary: Summary) -> str:
    if not summary.numel:
        return "no elements"
    return "no finite value" if summary.nan + summary.inf else "values cannot be read"
