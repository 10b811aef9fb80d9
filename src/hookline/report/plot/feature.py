"""Feature maps: one picture per channel, or one line per channel for one-dimensional maps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hookline.errors import OptionError
from hookline.report.plot.canvas import (
    BAD,
    BLUE,
    GREY,
    FilePath,
    Grid,
    bar_room,
    check_target,
    colour_bar,
    drawing,
    heading,
    load,
    plain,
    short,
    short_ticks,
    smoothing,
)
from hookline.report.plot.reading import Array, index_of, indices, one_tensor, to_array
from hookline.report.text import plural, shape_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["feature_maps"]

_LAYOUTS = ("HW", "CHW", "NCHW", "NHWC", "NCL")
_FEW = 30
"""Non-finite elements up to this number get a ring each: a single pixel would not be seen."""


def feature_maps(  # noqa: PLR0913 - each is a choice about the picture, and all but the first have a default
    value: Any,
    *,
    batch: int = 0,
    channels: int | Sequence[int] = 16,
    layout: str | None = None,
    scale: str = "own",
    cmap: str = "viridis",
    columns: int | None = None,
    title: str | None = None,
    path: FilePath | None = None,
    figure: Figure | None = None,
) -> Figure:
    """Draw the channels of a feature map side by side.

    NaN and Inf are drawn in red, which the colour maps do not have, and counted below the map.

    Args:
        value: A tensor, or a recorded call with one, of shape (N, C, H, W), (C, H, W) or (H, W); any dtype and device.
            One-dimensional maps (N, C, L), drawn as lines, and (N, H, W, C) need ``layout``.
        batch: Which element of the batch.
        channels: How many, from the first, or which ones.
        layout: What the dimensions are: "HW", "CHW", "NCHW", "NHWC" or "NCL"; None to tell by their number.
        scale: "own": each map from its own smallest to its own largest value; "shared": one scale and a colour bar.
        cmap: Name of a matplotlib colour map.
        columns: Maps in a row.
        title: Line above the picture.
        path: Also write a .png or .svg file, such as ``f"maps/{step:06d}.png"``.
        figure: Draw on this figure, which is emptied first, instead of a new one.

    Returns:
        The figure; it belongs to no window and is freed with its last reference.

    Raises:
        ArgumentError: Not a tensor, or several.
        OptionError: A shape, index, name or path that cannot be used; the message says what can.
        HooklineError: matplotlib is not installed.
    """
    matplotlib, target = load(), check_target(path)
    _check_choices(matplotlib, scale, cmap, columns)
    maps = _read(one_tensor(value, "feature_maps"), batch, channels, layout)
    with drawing(target, figure) as made:
        grid = _grid(maps, columns or _columns(len(maps.names), maps.shape), scale, title)
        panels = grid.axes(made)
        limits = _limits(maps.values) if scale == "shared" else None
        for axes, name, values in zip(panels, maps.names, maps.values, strict=True):
            _draw(matplotlib, axes, name, values, limits, cmap)
        if limits and maps.is_image:
            colour_bar(made, grid, panels[0], grid.inner_height)
        heading(made, title, maps.text)
    return made


def _check_choices(matplotlib: Any, scale: str, cmap: str, columns: int | None) -> None:
    if scale not in ("own", "shared"):
        raise OptionError(f'scale must be "own" or "shared"; got {scale!r}')
    if not isinstance(cmap, str) or cmap not in matplotlib.colormaps:
        raise OptionError(f'cmap must be the name of a matplotlib colour map, such as "viridis"; got {cmap!r}')
    if columns is not None and (type(columns) is not int or columns < 1):
        raise OptionError(f"columns must be a whole number of at least 1; got {columns!r}")


# ---------------------------------------------------------------- what to draw


@dataclasses.dataclass(frozen=True)
class _Maps:
    """Values of shape (chosen channels, height, width), or (chosen channels, length), and what they are."""

    values: Array
    names: list[str]
    text: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    @property
    def is_image(self) -> bool:
        return len(self.shape) == 2


def _read(tensor: Tensor, batch: int, channels: int | Sequence[int], layout: str | None) -> _Maps:
    layout = _layout_of(tensor, layout)
    sample, of_batch = _sample(tensor, batch, layout)
    chosen = indices("channels", channels, sample.shape[0])
    if 0 in sample.shape:
        raise OptionError(f"there is nothing to draw: the value has no elements; got shape {_shape(tensor)}")
    count, total, size = len(chosen), sample.shape[0], shape_text(sample[0])
    kind = f"{size} maps" if layout != "NCL" else f"maps of length {size}"
    which = plural(total, "channel") if count == total else f"{count} of {plural(total, 'channel')}"
    values = to_array(sample[chosen])
    if "C" not in layout:
        return _Maps(values, [""], f"one {size} map")
    return _Maps(values, _names(chosen, values), f"{which}, {kind}{of_batch}")


def _names(channels: Sequence[int], values: Array) -> list[str]:
    """Shorter ones in all panels when a name and the range of values do not fit in one line above a map."""
    ranges = [_range_text(_limits(one)) for one in values]
    names = [f"channel {index}" for index in channels]
    fits = all(len(name + limits) <= 26 for name, limits in zip(names, ranges, strict=True))
    return names if fits else [f"ch {index}" for index in channels]


def _sample(tensor: Tensor, batch: int, layout: str) -> tuple[Tensor, str]:
    """The maps of one element of the batch, channels first, and how to say which element it is."""
    if layout[0] != "N":
        if index_of("batch", batch, 1) != 0:
            raise OptionError(f"batch must be 0: a value of layout {layout} has no batch; got {batch}")
        return (tensor if layout == "CHW" else tensor[None]), ""
    if not tensor.shape[0]:
        raise OptionError(f"there is nothing to draw: the batch is empty; got shape {_shape(tensor)}")
    index = index_of("batch", batch, tensor.shape[0])
    sample = tensor[index]
    text = f", batch element {index} of {tensor.shape[0]}" if tensor.shape[0] > 1 else ""
    return (sample.permute(2, 0, 1) if layout == "NHWC" else sample), text


def _layout_of(tensor: Tensor, layout: str | None) -> str:
    if layout is None:
        return _guess(tensor)
    if layout not in _LAYOUTS:
        raise OptionError(f"layout must be one of {', '.join(_LAYOUTS)}; got {layout!r}")
    if len(layout) != tensor.dim():
        raise OptionError(f"layout {layout} has {len(layout)} dimensions; got shape {_shape(tensor)}")
    return layout


def _guess(tensor: Tensor) -> str:
    by_number = {2: "HW", 4: "NCHW"}
    if tensor.dim() in by_number:
        return by_number[tensor.dim()]
    if tensor.dim() == 3:
        channels, height, width = tensor.shape
        if height == width or (channels >= 3 and max(height, width) <= 2 * min(height, width)):
            return "CHW"
        raise OptionError(_ambiguous(tensor))
    wanted = "(N, C, H, W), (C, H, W) or (H, W), and (N, C, L) or (N, H, W, C) with layout="
    advice = "; choose one depth or frame first, as in value[:, :, 0]" if tensor.dim() == 5 else ""
    raise OptionError(f"feature_maps draws shapes {wanted}; got {_shape(tensor)}{advice}")


def _ambiguous(tensor: Tensor) -> str:
    return (
        f"shape {_shape(tensor)} could be maps (C, H, W), one-dimensional maps (N, C, L) or tokens (N, T, D); "
        f'say layout="CHW" or layout="NCL". Tokens are no maps: put them on their grid first, as in '
        f"value{_unfold(tensor.shape[1])}"
    )


def _unfold(tokens: int) -> str:
    """How to put patch tokens back on their grid, with the numbers of this value where they fit a square."""
    for extra in (0, 1, 5):
        side = math.isqrt(max(tokens - extra, 0))
        if side > 1 and side * side == tokens - extra:
            start = f"[:, {extra}:]" if extra else ""
            return f"{start}.transpose(1, 2).unflatten(2, ({side}, {side}))"
    return ".transpose(1, 2).unflatten(2, (height, width))"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


# ---------------------------------------------------------------- where to draw


def _columns(count: int, shape: tuple[int, ...]) -> int:
    """A number of columns that leaves few empty places and makes a picture about twice as wide as high."""
    if count <= 4:
        return count
    if len(shape) == 1 or shape[1] > 2 * shape[0]:
        return 2 if count <= 8 else 3

    def badness(columns: int) -> float:
        rows = -(-count // columns)
        return columns * rows - count + abs(columns / rows - 2)

    return min(range(3, 9), key=badness)


def _grid(maps: _Maps, columns: int, scale: str, title: str | None) -> Grid:
    panel = _panel_size(maps.shape, alone=len(maps.names) == 1)
    bad = not np.isfinite(maps.values).all()
    right = bar_room(*(_limits(maps.values) or (0.0, 1.0))) if scale == "shared" and maps.is_image else 0.12
    margins = (0.12, right, 0.7 if title else 0.5, 0.12)
    gap = (0.14, 0.27)
    if not maps.is_image:
        gap, margins = (0.62, 0.45), (0.6, 0.15, margins[2], 0.3)
    if bad:
        gap, margins = (gap[0], gap[1] + 0.15), (*margins[:3], margins[3] + 0.15)
    return Grid(len(maps.names), columns, panel, gap, margins)


def _panel_size(shape: tuple[int, ...], alone: bool) -> tuple[float, float]:
    """Inches; pixels are square unless a map is more than four times as long as wide."""
    larger = 2.0 if alone else 1.0
    if len(shape) == 1:
        return 2.6 * larger, 0.9 * larger
    ratio = min(max(shape[0] / shape[1], 0.25), 4.0)
    width = (2.6 if ratio < 0.5 else 1.6) * larger
    return width, width * ratio


# ---------------------------------------------------------------- drawing


def _limits(values: Array) -> tuple[float, float] | None:
    """Smallest and largest finite value, None when there is none."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else None


def _draw(matplotlib: Any, axes: Axes, name: str, values: Array, limits: tuple[float, float] | None, cmap: str) -> None:
    own = _limits(values)
    low, high = limits or own or (0.0, 1.0)
    if low == high:  # a constant map is drawn in the middle of the scale
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    if values.ndim == 2:
        _draw_image(matplotlib, axes, values, (low, high), cmap)
    else:
        _draw_line(axes, values, (low, high))
    axes.set_title(name, loc="left", size=7.5, pad=3)
    plain(axes.set_title(_range_text(own), loc="right", size=6.5, pad=3, color=GREY))
    bad = _bad_text(values)
    if bad:
        axes.set_xlabel(bad, size=7, color=BAD, labelpad=2, weight="bold", loc="left")


def _range_text(limits: tuple[float, float] | None) -> str:
    if limits is None:
        return "nothing finite"
    low, high = limits
    if low == high:
        return f"all {short(low)}"
    start, end = short(low), short(high)
    return f"{start} to {end}" if start != end else f"{low:.8g} to {high:.8g}"


def _bad_text(values: Array) -> str:
    counts = (("NaN", int(np.isnan(values).sum())), ("Inf", int(np.isinf(values).sum())))
    return "  ".join(f"{name} {count}" for name, count in counts if count)


def _draw_image(matplotlib: Any, axes: Axes, values: Array, limits: tuple[float, float], cmap: str) -> None:
    colours = matplotlib.colormaps[cmap].with_extremes(bad=BAD)
    bad = ~np.isfinite(values)
    shown = np.ma.masked_array(values, bad)
    sharp = smoothing(values.shape, axes)
    axes.imshow(shown, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto", interpolation=sharp)
    if 0 < bad.sum() <= _FEW:
        rows, columns = np.nonzero(bad)
        axes.scatter(columns, rows, s=30, facecolors="none", edgecolors=BAD, linewidths=0.9, clip_on=False)
    axes.set(xticks=[], yticks=[], xlim=(-0.5, values.shape[1] - 0.5), ylim=(values.shape[0] - 0.5, -0.5))
    axes.spines[:].set_visible(False)


def _draw_line(axes: Axes, values: Array, limits: tuple[float, float]) -> None:
    bad = ~np.isfinite(values)
    axes.plot(np.where(bad, np.nan, values), color=BLUE, linewidth=0.9)
    margin = 0.06 * (limits[1] - limits[0])
    axes.set_ylim(limits[0] - margin, limits[1] + margin)
    axes.set_xlim(-0.5, len(values) - 0.5)
    if bad.any():
        axes.plot(np.nonzero(bad)[0], np.full(bad.sum(), limits[0] - margin), "|", color=BAD, clip_on=False)
    axes.locator_params(nbins=4)
    short_ticks(axes.yaxis)
