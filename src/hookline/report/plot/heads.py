"""Attention weights: one picture per head, with the tokens at its sides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hookline.errors import ArgumentError, OptionError
from hookline.report.plot.canvas import (
    BAD,
    INK,
    FilePath,
    Grid,
    Margins,
    bar_room,
    check_target,
    colour_bar,
    drawing,
    heading,
    inches,
    load,
    plain,
    smoothing,
)
from hookline.report.plot.reading import Array, index_of, indices, one_tensor, to_array
from hookline.report.text import plural, printable, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["attention"]

_LONGEST_LABEL = 14
_LABEL_INCHES = 0.115
"""Room that one token's label needs beside the picture."""


def attention(
    weights: Any,
    *,
    batch: int = 0,
    heads: int | Sequence[int] | None = None,
    tokens: Sequence[str] | None = None,
    columns: int | None = None,
    title: str | None = None,
    path: FilePath | None = None,
    figure: Figure | None = None,
) -> Figure:
    """Draw attention weights: a row for each query, a column for each key, all heads on one scale from 0.

    Args:
        weights: After the softmax, of shape (N, heads, queries, keys), (heads, queries, keys) or (queries, keys); a
            tensor, or a recorded call whose output is one.
        batch: Which element of the batch.
        heads: How many, from the first, or which ones; None for all.
        tokens: One label per key; it also labels the queries when there are as many.
        columns: Heads in a row.
        title: Line above the picture.
        path: Also write a .png or .svg file.
        figure: Draw on this figure, which is emptied first, instead of a new one.

    Returns:
        The figure; it belongs to no window and is freed with its last reference.

    Raises:
        ArgumentError: Not a tensor, or several, or tokens that are no strings.
        OptionError: A shape, index, label count or path that cannot be used, or weights below 0.
        HooklineError: matplotlib is not installed.
    """
    load()
    target = check_target(path)
    if columns is not None and (type(columns) is not int or columns < 1):
        raise OptionError(f"columns must be a whole number of at least 1; got {columns!r}")
    shown = _read(weights, batch, heads)
    labels = _labels(tokens, shown.values.shape[1:])
    with drawing(target, figure) as made:
        grid = _grid(shown, labels, columns or _columns(len(shown.heads)), title)
        panels = grid.axes(made)
        for index, axes in enumerate(panels):
            _draw(axes, shown, index)
            _label(axes, labels, left=index % grid.columns == 0, below=grid.is_lowest(index))
        colour_bar(made, grid, panels[0], inches(panels[0])[1])
        heading(made, title, shown.text)
    return made


# ---------------------------------------------------------------- what to draw


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Weights of shape (chosen heads, queries, keys), and what they are."""

    values: Array
    heads: list[int]
    text: str

    @property
    def largest(self) -> float:
        finite = self.values[np.isfinite(self.values)]
        return float(finite.max()) if finite.size and finite.max() > 0 else 1.0


_Labels = tuple[list[str] | None, list[str] | None]
"""Of queries and of keys; None where numbers do."""


def _read(weights: Any, batch: int, heads: int | Sequence[int] | None) -> _Heads:
    tensor = one_tensor(weights, "attention")
    shape = tuple(tensor.shape)
    if not 2 <= len(shape) <= 4:
        wanted = "(N, heads, queries, keys), (heads, queries, keys) or (queries, keys)"
        raise OptionError(f"attention draws shapes {wanted}; got {shape}")
    if 0 in shape:
        raise OptionError(f"there is nothing to draw: the weights have no elements; got shape {shape}")
    index = index_of("batch", batch, shape[0] if len(shape) == 4 else 1)
    sample = tensor[index] if len(shape) == 4 else tensor if len(shape) == 3 else tensor[None]
    chosen = indices("heads", heads, sample.shape[0])
    values = to_array(sample[chosen])
    if (values < 0).any():
        advice = "these look like scores before the softmax; pass weights.softmax(-1)"
        raise OptionError(f"attention weights must not be below 0; the smallest is {np.nanmin(values):.4g}: {advice}")
    which = f"{len(chosen)} of " if len(chosen) < sample.shape[0] else ""
    text = f"{which}{plural(sample.shape[0], 'head')}, {shape[-2]}x{shape[-1]} weights: queries down, keys across"
    return _Heads(values, chosen, f"{text}, batch element {index} of {shape[0]}" if len(shape) == 4 else text)


def _labels(tokens: Sequence[str] | None, shape: tuple[int, ...]) -> _Labels:
    if tokens is None:
        return None, None
    if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
        raise ArgumentError(f"tokens must be a list of strings, one per key; got {type(tokens).__name__}")
    queries, keys = shape
    if len(tokens) != keys:
        raise OptionError(f"tokens: got {len(tokens)} labels, wanted one for each of the {keys} keys")
    made = [shorten(printable(token), _LONGEST_LABEL) for token in tokens]
    return (made if queries == keys else None), made


# ---------------------------------------------------------------- drawing


def _columns(count: int) -> int:
    return count if count <= 3 else 4 if count % 4 == 0 or count > 6 else 3


def _grid(shown: _Heads, labels: _Labels, columns: int, title: str | None) -> Grid:
    queries, keys = shown.values.shape[1:]
    single = len(shown.heads) == 1
    width = min(max(3.0 if single else 1.55, _LABEL_INCHES * keys if labels[1] else 0.0), 6.0)
    ratio = min(max(queries / keys, 0.25), 4.0)
    top = 0.72 if title else 0.52
    margins: Margins = (0.2 + _label_room(labels[0]), bar_room(0.0, 1.0), top, 0.2 + _label_room(labels[1]))
    return Grid(len(shown.heads), columns, (width, width * ratio), (0.18, 0.32), margins)


def _label_room(labels: list[str] | None) -> float:
    return 0.064 * max(map(len, labels)) if labels else 0.14


def _draw(axes: Axes, shown: _Heads, index: int) -> None:
    matplotlib = load()
    values = shown.values[index]
    bad = ~np.isfinite(values)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad=BAD)
    masked, sharp = np.ma.masked_array(values, bad), smoothing(values.shape, axes)
    axes.imshow(masked, cmap=colours, vmin=0.0, vmax=shown.largest, aspect="auto", interpolation=sharp)
    axes.spines[:].set_visible(False)
    axes.set_title(f"head {shown.heads[index]}", loc="left", size=7.5, pad=3)
    if bad.any():
        axes.set_title(f"NaN or Inf {bad.sum()}", loc="right", size=6.5, pad=3, color=BAD, weight="bold")


def _label(axes: Axes, labels: _Labels, left: bool, below: bool) -> None:
    """Token labels at the outer sides only; numbers of the first and last where there are none or no room for all."""
    rows, columns = axes.get_images()[0].get_array().shape  # type: ignore[union-attr]
    width, height = inches(axes)
    _ticks(axes.yaxis, labels[0], rows, height / rows, left)
    _ticks(axes.xaxis, labels[1], columns, width / columns, below)
    axes.tick_params(length=0, pad=2, labelsize=6.5, labelcolor=INK)
    if labels[1]:
        axes.tick_params(axis="x", labelrotation=90)


def _ticks(axis: Any, labels: list[str] | None, count: int, inches: float, shown: bool) -> None:
    if not shown:
        axis.set_ticks([])
        return
    if labels is None:
        axis.set_ticks(sorted({0, count - 1}))
        return
    every = math.ceil(_LABEL_INCHES / inches - 0.01)  # the size comes back from the figure slightly rounded
    axis.set_ticks(range(0, count, every), labels[::every])
    for text in axis.get_ticklabels():
        plain(text)
