"""The paper that all pictures are drawn on: style, exact placing in inches, and writing without half a file."""

from __future__ import annotations

import contextlib
import io
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.errors import ArgumentError, HooklineError, OptionError
from hookline.extras import pip_line
from hookline.report.text import printable, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

__all__ = [
    "BAD",
    "BLUE",
    "GREY",
    "INK",
    "ORANGE",
    "FilePath",
    "Grid",
    "bar_room",
    "check_target",
    "colour_bar",
    "drawing",
    "heading",
    "inches",
    "load",
    "plain",
    "short",
    "short_ticks",
    "smoothing",
]

FilePath = str | os.PathLike[str]

# Okabe and Ito's colours, which people with any kind of colour blindness can tell apart.
BLUE, ORANGE, BAD = "#0072B2", "#E69F00", "#D00000"
INK, GREY = "#222222", "#767676"

_FORMATS = {".png": "png", ".svg": "svg"}
_PIXELS_PER_INCH = 150

_LEAST_WIDTH = 3.4
"""Inches that a figure is wide at least, so that the line above the panels fits."""

_STYLE: dict[str, Any] = {
    "axes.edgecolor": "#9a9a9a",
    "axes.facecolor": "white",
    "axes.formatter.use_mathtext": False,
    "axes.grid": False,
    "axes.labelcolor": INK,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.autolayout": False,
    "figure.constrained_layout.use": False,
    "figure.edgecolor": "white",
    "figure.facecolor": "white",
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, so pictures look the same everywhere
    "font.size": 8,
    "image.interpolation": "nearest",
    "image.origin": "upper",
    "legend.fontsize": 8,
    "savefig.bbox": None,
    "savefig.transparent": False,
    "svg.hashsalt": "hookline",
    "text.color": INK,
    "text.usetex": False,
    "xtick.color": "#555555",
    "xtick.labelsize": 7,
    "xtick.major.size": 2.5,
    "xtick.major.width": 0.6,
    "xtick.minor.visible": False,
    "ytick.color": "#555555",
    "ytick.labelsize": 7,
    "ytick.major.size": 2.5,
    "ytick.major.width": 0.6,
    "ytick.minor.visible": False,
}


def load() -> Any:
    """The matplotlib package with the modules that are used here.

    Raises:
        HooklineError: It is not installed; it is an optional extra.
    """
    try:
        import matplotlib
        import matplotlib.colors
        import matplotlib.figure
        import matplotlib.ticker
    except ImportError as error:
        raise HooklineError(
            f"pictures need matplotlib, which cannot be imported ({error}); run: {pip_line('plot')}"
        ) from error
    return matplotlib


def check_target(path: FilePath | None) -> Path | None:
    """The file to write, checked before anything is drawn.

    Raises:
        ArgumentError: Neither a path nor None.
        OptionError: The ending is neither .png nor .svg, the folder does not exist, or the path is a folder.
    """
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise ArgumentError(f"path must be a file name or a pathlib.Path; got {type(path).__name__}")
    target = Path(path)
    if target.suffix.lower() not in _FORMATS:
        raise OptionError(f"cannot write {str(target)!r}: the name must end in .png or .svg; got {target.suffix!r}")
    if not target.parent.is_dir():
        raise OptionError(f"cannot write {str(target)!r}: there is no folder {str(target.parent)!r}; create it first")
    if target.is_dir():
        raise OptionError(f"cannot write {str(target)!r}: it is a folder; give the name of a file")
    return target


@contextlib.contextmanager
def drawing(target: Path | None, figure: Figure | None = None) -> Iterator[Figure]:
    """A figure to draw on, in our style, which is written at the end when nothing went wrong.

    Args:
        target: Where to write, None for nowhere.
        figure: Draw on this one, which is emptied first, instead of a new one.
    """
    matplotlib = load()
    with matplotlib.rc_context(_STYLE):
        if figure is None:
            made = matplotlib.figure.Figure()
        else:
            made = figure
            made.clear()
        yield made
        if target is not None:
            _write(made, target)


def _write(figure: Figure, target: Path) -> None:
    """Draws in memory and renames a finished file, so that a reader never sees half a picture."""
    picture = io.BytesIO()
    kind = _FORMATS[target.suffix.lower()]
    metadata = {"Date": None} if kind == "svg" else None  # the same values give the same bytes
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure.savefig(picture, format=kind, dpi=_PIXELS_PER_INCH, facecolor="white", metadata=metadata)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(picture.getvalue())
        unfinished.replace(target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


# ---------------------------------------------------------------- placing


class Grid:
    """Panels of one size, in rows, placed by inches from the top left corner.

    Attributes:
        columns: Panels in a row.
        rows: Number of rows.
        size: Width and height of the figure in inches.
    """

    def __init__(
        self, count: int, columns: int, panel: tuple[float, float], gap: tuple[float, float], margins: Margins
    ) -> None:
        self.count, self.columns, self.rows = count, columns, -(-count // columns)
        self._panel, self._gap, self._margins = panel, gap, margins
        left, right, top, bottom = margins
        self.size = (
            max(left + columns * panel[0] + (columns - 1) * gap[0] + right, _LEAST_WIDTH),
            top + self.rows * panel[1] + (self.rows - 1) * gap[1] + bottom,
        )

    @property
    def inner_height(self) -> float:
        """Inches from the top of the first panel to the foot of the last."""
        return self.size[1] - self._margins[2] - self._margins[3]

    @property
    def inner_right(self) -> float:
        """Inches from the left of the figure to the right of the last column."""
        return self._margins[0] + self.columns * self._panel[0] + (self.columns - 1) * self._gap[0]

    def axes(self, figure: Figure) -> list[Axes]:
        """Gives the figure its size and one axes for each panel."""
        figure.set_size_inches(*self.size)
        return [self._place(figure, *divmod(index, self.columns)) for index in range(self.count)]

    def _place(self, figure: Figure, row: int, column: int) -> Axes:
        left = self._margins[0] + column * (self._panel[0] + self._gap[0])
        top = self._margins[2] + row * (self._panel[1] + self._gap[1])
        return self.box(figure, left, top, *self._panel)

    def box(self, figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
        """Further axes, all in inches."""
        across, down = self.size
        return figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))

    def is_lowest(self, index: int) -> bool:
        """Whether there is no panel below."""
        return index + self.columns >= self.count


Margins = tuple[float, float, float, float]
"""Left, right, top and bottom, in inches."""


def bar_room(low: float, high: float) -> float:
    """Inches to keep free on the right for a colour bar; numbers that differ late need more."""
    return 1.0 if high - low < 1e-3 * max(abs(low), abs(high)) else 0.75


def colour_bar(figure: Figure, grid: Grid, panel: Axes, height: float) -> None:
    """The scale of a panel's image, right of all panels; ``height`` in inches, but never more than three."""
    top = (1 - panel.get_position().y1) * grid.size[1]
    axes = grid.box(figure, grid.inner_right + 0.12, top, 0.12, min(height, 3.0))
    axes.set_label("<colorbar>")
    figure.colorbar(panel.images[0], cax=axes).outline.set_visible(False)
    short_ticks(axes.yaxis, most=9)


def heading(figure: Figure, title: str | None, line: str) -> None:
    """A title and below it, smaller, what the picture shows; top left, 0.45 inches high, without a title 0.25."""
    width, height = figure.get_size_inches()
    if title:
        shown = shorten(printable(title), int(width / 0.095))
        plain(figure.text(0.12 / width, 1 - 0.11 / height, shown, size=10, weight="bold", va="top"))
    shown, top = shorten(line, int(width / 0.063)), 0.31 if title else 0.11
    plain(figure.text(0.12 / width, 1 - top / height, shown, size=8, color=GREY, va="top"))


def plain(text: Text) -> Text:
    """A text whose dollar signs are dollar signs: names of modules and tokens are not formulas."""
    text.set_parse_math(False)
    return text


def short(value: float) -> str:
    """Three significant digits, for labels: ``-1.2``, ``3.1e-5``; five of whole numbers."""
    if 1e3 <= abs(value) < 1e5:
        return f"{value:.0f}"
    return _without_zeros(f"{value:.3g}")


def _without_zeros(text: str) -> str:
    """``1e-5`` for ``1e-05``."""
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def smoothing(shape: tuple[int, ...], axes: Axes) -> str:
    """How to resample an image: sharp pixels when they are enlarged, averages when many share a point of the paper."""
    width, height = inches(axes)
    many = shape[0] > height * _PIXELS_PER_INCH or shape[1] > width * _PIXELS_PER_INCH
    return "hanning" if many else "nearest"


def inches(axes: Axes) -> tuple[float, float]:
    """Width and height of a panel."""
    return axes.bbox.width / axes.figure.dpi, axes.bbox.height / axes.figure.dpi


def short_ticks(axis: Any, most: int = 7) -> None:
    """Numbers that stand alone; matplotlib would put their common factor where a title may be.

    Args:
        axis: Of which the numbers are.
        most: Digits that there is room for.
    """

    def text(value: float, _: object) -> str:
        low, high = axis.get_view_interval()
        return _tick_text(value, low, high, most).replace("-", "\u2212")

    axis.set_major_formatter(text)


def _tick_text(value: float, low: float, high: float, most: int) -> str:
    """As many digits as it takes to tell two ticks apart, but never more than there is room for."""
    largest, apart = max(abs(low), abs(high)), abs(high - low) / 4
    digits = math.ceil(math.log10(largest / apart)) + 1 if apart > 0 else 3
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.{min(max(digits, 6), most)}g}"
    return _without_zeros(f"{0.0 if abs(value) < apart * 1e-6 else value:.{min(max(digits, 3), 4)}g}")
