"""A recording as a table: what ``print(rec)`` shows. It fits the width that it is given, whatever the names are."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import Any, Literal

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hookline.report.rows import Row, collect, select_events
from hookline.report.text import ABSENT, number, plural, printable, shorten, size_text, trouble_text
from hookline.sites import PORTS, Pattern, label

__all__ = ["render", "table"]

WIDTH = 100
"""Terminal cells of a table that is not told how wide it may be."""

_RULE = Box("    \n    \n -  \n    \n    \n    \n    \n    \n", ascii=True)
"""A line below the header and nothing else; rich's own boxes use characters that not every output can encode."""

_BAD, _ZERO, _QUIET = "bold red", "yellow", "dim"

_GIVING_WAY: tuple[tuple[str, int], ...] = (
    ("type", 12), ("path", 32), ("type", 8), ("path", 20), ("type", 0), ("dtype", 0), ("calls", 0), ("std", 0),
    ("min", 0), ("path", 12), ("shape", 0), ("max", 0), ("mean", 0), ("non-finite", 0),
)  # fmt: skip
"""What gives way when the width is too small, in this order, and the least that is left of it; 0 leaves it out.

A path below 20 cells names nothing any more, so other columns go first. The port is part of the name and stays.
"""


def table(recording: Any, *, site: Pattern | None = None, values: bool = False) -> Table:
    """A table with one row per site, in model order, that fits where it is printed.

    A row gives type, port, calls, shape, dtype and the statistics of all elements of all calls together. A value with
    several tensors has a row for each. What is the same in every row is said once, in the title.

    Args:
        recording: What was recorded, in memory or on disk.
        site: Only these sites; a pattern such as ``"layer*.conv1"`` or ``"**:grad_output"``.
        values: Whether to add the first values of each tensor below its row.

    Raises:
        SiteError: The pattern names nothing that the recording has.
    """
    return _FittedTable(_Report(recording, site, values))


def render(
    recording: Any,
    *,
    width: int = WIDTH,
    site: Pattern | None = None,
    values: bool = False,
    color: bool = False,
) -> str:
    """The table as text: what ``print(rec)`` shows.

    Args:
        recording: What was recorded, in memory or on disk.
        width: Terminal cells that no line passes.
        site: Only these sites; a pattern such as ``"layer*.conv1"`` or ``"**:grad_output"``.
        values: Whether to add the first values of each tensor below its row.
        color: Whether to add terminal colours; without them trouble is marked by ``!`` and ``0`` before the path.

    Returns:
        Lines without a line break at the end.

    Raises:
        SiteError: The pattern names nothing that the recording has.
    """
    made = _Report(recording, site, values).table(width)
    console = Console(
        file=io.StringIO(), width=width, color_system="standard" if color else None, force_terminal=color,
        no_color=not color, markup=False, emoji=False, highlight=False, legacy_windows=False, _environ={},
    )  # fmt: skip
    with console.capture() as capture:
        console.print(made)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


# ---------------------------------------------------------------- columns


@dataclasses.dataclass
class _Column:
    header: str
    cells: list[Text]
    justify_right: bool = False

    def __post_init__(self) -> None:
        self.natural_width = max(cell_len(self.header), *(cell.cell_len for cell in self.cells))
        self.width = self.natural_width

    @property
    def is_the_same_everywhere(self) -> bool:
        return len({cell.plain for cell in self.cells}) == 1


_Cell = Callable[[Row], Text]


def _numbers(field: str) -> _Cell:
    return lambda row: Text(number(getattr(row.summary, field)))


_COLUMNS: tuple[tuple[str, _Cell], ...] = (
    ("", lambda row: _mark(row)),
    ("path", lambda row: Text(printable(row.name))),
    ("type", lambda row: Text(printable(row.type_name) or ABSENT, style=_QUIET)),
    ("port", lambda row: Text(row.port)),
    ("calls", lambda row: Text(str(row.events))),
    ("shape", lambda row: Text(row.shape or _why_no_shape(row))),
    ("dtype", lambda row: Text(row.dtype or ABSENT)),
    ("mean", _numbers("mean")),
    ("std", _numbers("std")),
    ("min", _numbers("min")),
    ("max", _numbers("max")),
    ("non-finite", lambda row: _trouble(row)),
)
_RIGHT = frozenset({"calls", "mean", "std", "min", "max"})


def _mark(row: Row) -> Text:
    if not row.summary.finite:
        return Text("!", style=_BAD)
    return Text("0", style=_ZERO) if row.summary.all_zero else Text("")


def _trouble(row: Row) -> Text:
    if not row.summary.finite:
        return Text(trouble_text(row.summary), style=_BAD)
    return Text("all zero", style=_ZERO) if row.summary.all_zero else Text("")


def _why_no_shape(row: Row) -> str:
    if row.sightings:
        return ABSENT
    return "no gradient" if row.port.startswith("grad") else "no tensor"


# ---------------------------------------------------------------- the whole


class _Report:
    """Decides which columns there are and how wide, and then puts the table together."""

    def __init__(self, recording: Any, site: Pattern | None, values: bool) -> None:
        self.recording = recording
        self.values = values
        self.events = select_events(recording, site)
        self.rows = collect(self.events, recording.modules, values)

    def table(self, width: int) -> Table:
        if not self.rows:
            said = _nothing_there(self.recording.events) if self.recording.events else _nothing(self.recording)
            return _sentence("\n".join([said, *_notes(self.recording)]))
        columns = [_Column(name, [cell(row) for row in self.rows], name in _RIGHT) for name, cell in _COLUMNS]
        same = [c for c in columns if c.header in ("port", "calls", "dtype") and c.is_the_same_everywhere]
        columns = [c for c in columns if c not in same and any(cell.plain for cell in c.cells)]
        title, caption = self._title(same), "\n".join([self._caption(width), *_notes(self.recording)])
        columns, gap = _fit(columns, width)
        _widen(columns, gap, width, min(width, max(map(cell_len, [*title.splitlines(), *caption.splitlines()]))))
        made = self._with_values(columns, gap) if self.values else _grid(columns, gap, range(len(self.rows)))
        made.title, made.title_style = Text(title, no_wrap=True, overflow="ellipsis"), "bold"
        made.caption, made.caption_style = Text(caption), ""
        made.title_justify = made.caption_justify = "left"
        return made

    def _with_values(self, columns: Sequence[_Column], gap: int) -> Table:
        """A list of one-row tables of the same column widths, since a cell cannot reach over several columns."""
        made = Table(box=None, show_header=False, padding=0, pad_edge=False)
        made.add_column(no_wrap=True, overflow="crop")
        made.add_row(_grid(columns, gap, ()))
        for index, row in enumerate(self.rows):
            made.add_row(_grid(columns, gap, [index], header=False))
            first = row.sightings[0].values if row.sightings else ""
            if first:
                made.add_row(Text(f"    {first}", style=_QUIET, overflow="ellipsis"))
        return made

    def _title(self, same: Sequence[_Column]) -> str:
        steps = len({event.step for event in self.events})
        size = size_text(sum(event.nbytes for event in self.events))
        name = printable(str(self.recording.info.get("model") or "Recording"))
        first = f"{name}: {plural(steps, 'step')}, {plural(len(self.events), 'event')}, {size}"
        return "\n".join([first, *self._in_every_row(same)])

    def _in_every_row(self, same: Sequence[_Column]) -> list[str]:
        texts = {"port": "port {}", "calls": "{} calls", "dtype": "{}"}
        said = [texts[c.header].format(c.cells[0].plain) for c in same if c.cells[0].plain != ABSENT]
        return [f"in every row: {', '.join(said)}".replace("1 calls", "1 call")] if said else []

    def _caption(self, width: int) -> str:
        counts = (
            (self._sites(lambda row: not row.summary.finite), "with non-finite values"),
            (self._sites(lambda row: row.summary.all_zero), "all zero"),
            (self._sites(lambda row: row.unreadable), "without readable values"),
        )
        texts: list[str] = []
        for sites, what in counts:
            if sites:
                texts.append(f"{len(sites)} {what}" if texts else f"{plural(len(sites), 'site')} {what}")
        text = ", ".join(texts) or "every value is finite, no site is all zero"
        return text + self._first(width - len(text)) if counts[0][0] else text

    def _sites(self, wanted: Callable[[Row], bool]) -> set[tuple[str, str]]:
        return {(row.path, row.port) for row in self.rows if wanted(row)}

    def _first(self, width: int) -> str:
        """Where the trouble began: the first in time, which is seldom the first in the model."""
        seen = [(s.order, s.step, row) for row in self.rows for s in row.sightings if not s.summary.finite]
        _, step, row = min(seen, key=lambda item: item[:2])
        start, end = "; first: ", f":{row.port} in step {step}"
        return start + shorten(printable(label(row.path)), max(20, width - len(start + end))) + end


class _FittedTable(Table):
    """The table for ``WIDTH``, made anew for where it is printed: rich would cut digits off the numbers instead."""

    def __init__(self, report: _Report) -> None:
        super().__init__()
        self.__dict__.update(report.table(WIDTH).__dict__)
        self._report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._report.table(options.max_width)


def _nothing(recording: Any) -> str:
    count = len(recording.modules)
    of = f" of the {plural(count, 'module')}" if count else ""
    advice = "run the model, and backward() for gradients, inside the with-block"
    return f"Nothing was recorded: no chosen site{of} was reached; {advice}."


def _nothing_there(events: Sequence[Any]) -> str:
    """A pattern names modules of the recording, and of none of them what it asks for."""
    ports = {event.port for event in events}
    found = ", ".join(port for port in PORTS if port in ports)
    return f"Nothing was recorded there; ports that were: {found}. Choose one of them, or record again with others."


def _notes(recording: Any) -> list[str]:
    """What has to be known of how it was written; what a file says of it may be anything."""
    torn, (waits, seconds) = recording.info.get("torn"), recording.pressure
    names = [printable("/".join(name.split("/")[-2:])) for name in map(str, torn)] if isinstance(torn, list) else []
    where = ", ".join(names)
    notes = [f"unfinished last line, not read: {where} (its writer was killed, or is at it)"] if names else []
    if waits > 0:
        notes.append(f"the model waited {plural(waits, 'time')} for the disk, {seconds:.1f} s in all")
    return notes


def _sentence(text: str) -> Table:
    made = Table(box=None, show_header=False, padding=0, pad_edge=False)
    made.add_column()
    made.add_row(Text(text))
    return made


# ---------------------------------------------------------------- layout


def _grid(columns: Sequence[_Column], gap: int, rows: Sequence[int], header: bool = True) -> Table:
    made = Table(box=_RULE, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0), show_header=header)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.justify_right else "left"
        made.add_column(Text(column.header), justify=justify, width=column.width, no_wrap=True, overflow="ellipsis")
    for index in rows:
        made.add_row(*(_cut(column, index) for column in columns))
    return made


def _cut(column: _Column, index: int) -> Text:
    """A path loses its middle; rich cuts the end off everything else."""
    cell = column.cells[index]
    return Text(shorten(cell.plain, column.width), style=cell.style) if column.header == "path" else cell


def _fit(columns: Sequence[_Column], width: int) -> tuple[list[_Column], int]:
    """Columns that fit side by side, and the gap between them."""
    kept = list(columns)
    gap = 2 if _total(kept, 2) <= width else 1
    for header, least in _GIVING_WAY:
        excess = _total(kept, gap) - width
        if excess <= 0:
            break
        kept = [column for column in kept if least or column.header != header]
        for column in kept:
            if column.header == header:
                column.width = min(column.width, max(least, column.width - excess))
    return kept, gap


def _total(columns: Sequence[_Column], gap: int) -> int:
    return sum(column.width for column in columns) + gap * (len(columns) - 1)


def _widen(columns: Sequence[_Column], gap: int, width: int, title: int) -> None:
    """Gives the path what is left of the width and of use, and fills up to the title, which rich would wrap."""
    for column in columns:
        if column.header == "path":
            column.width = min(column.natural_width, column.width + width - _total(columns, gap))
            column.width += max(0, title - _total(columns, gap))
