"""The table of a recording: what is in it, that it fits, and that no name can spoil it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hookline.errors import SiteError
from hookline.report.rows import collect, select_events
from hookline.report.table import render, table
from hookline.report.text import dtype_text, first_values, number, printable, shape_text, shorten, size_text

from .stored import PlainEvent

NAN, INF = float("nan"), float("inf")


def event(path: str, value: Any, port: str = "output", step: int = 0) -> PlainEvent:
    return PlainEvent(path, value, port, step)


def recording(events: list[PlainEvent], modules: Mapping[str, str]) -> SimpleNamespace:
    for order, one in enumerate(events):
        one.order = order
    found = {path: SimpleNamespace(type_name=name, parameters=0, aliases=()) for path, name in modules.items()}
    return SimpleNamespace(events=events, modules=found, info={"model": "Net"}, pressure=(0, 0.0))


def row(text: str, name: str) -> str:
    """The only line whose path is ``name``."""
    (found,) = [line for line in text.splitlines() if re.match(rf"([!0 ] {{1,2}})?{re.escape(name)} ", line)]
    return found


MODULES = {"": "Net", "conv": "Conv2d", "bn": "BatchNorm2d", "relu": "ReLU", "fc": "Linear"}


@pytest.fixture
def simple() -> SimpleNamespace:
    torch.manual_seed(1)
    events = [event(path, torch.randn(1, 4, 3, 3)) for path in ("relu", "conv", "bn", "fc")]
    return recording(events, MODULES)


# ---------------------------------------------------------------- content


def test_one_row_per_site_in_model_order(simple: SimpleNamespace) -> None:
    lines = render(simple).splitlines()
    assert [line.split()[0] for line in lines[4:-1]] == ["conv", "bn", "relu", "fc"]
    assert lines[0] == "Net: 1 step, 4 events, 576 bytes"
    assert lines[1] == "in every row: port output, 1 call, f32"
    assert lines[2].split() == ["path", "type", "shape", "mean", "std", "min", "max"]
    assert set(lines[3]) == {"-", " "}
    assert lines[-1] == "every value is finite, no site is all zero"


def test_statistics_with_four_digits() -> None:
    values = np.array([0.5, -1.25, 3.0, 12345.678])
    text = render(recording([event("fc", torch.from_numpy(values))], MODULES))
    mean, std = f"{values.mean():.0f}", f"{values.std():.0f}"
    assert row(text, "fc").split() == ["fc", "Linear", "4", mean, std, "-1.250", "1.235e4"]


def test_calls_combine_exactly() -> None:
    parts = [torch.randn(n, dtype=torch.float64) * 10**n + n for n in (2, 3, 5)]
    rows = collect([event("fc", part, step=step) for step, part in enumerate(parts)], {})
    together = torch.cat(parts).numpy()
    (found,) = rows
    assert found.events == 3
    assert found.summary.numel == 10
    assert found.summary.mean == pytest.approx(together.mean(), rel=1e-12)
    assert found.summary.std == pytest.approx(together.std(), rel=1e-12)
    assert found.summary.l2 == pytest.approx(np.linalg.norm(together), rel=1e-12)
    assert (found.summary.min, found.summary.max) == (together.min(), together.max())


def test_different_shapes_and_dtypes_are_marked() -> None:
    events = [event("fc", torch.ones(1, 3, 224, 224)), event("fc", torch.ones(1, 3, 64, 64).bfloat16())]
    text = render(recording([*events, event("conv", torch.ones(2, dtype=torch.int64))], MODULES))
    assert row(text, "fc").split()[:7] == ["fc", "Linear", "2", "1x3x224x224", "…", "f32", "…"]
    assert row(text, "conv").split()[:5] == ["conv", "Conv2d", "1", "2", "i64"]


def test_a_value_with_several_tensors_has_a_row_for_each() -> None:
    lstm = (torch.ones(5, 2, 8), (torch.zeros(1, 2, 8), torch.full((1, 2, 8), 2.0)))
    text = render(recording([event("lstm", lstm), event("fc", [torch.ones(3)])], {"": "Net", "lstm": "LSTM"}))
    for name, shape in (("output[0]", "5x2x8"), ("output[1][0]", "1x2x8"), ("output[1][1]", "1x2x8")):
        assert row(text, f"lstm {name}").split(name)[1].split()[:2] == ["LSTM", shape]
    assert row(text, "fc").split()[:3] == ["fc", "\u2013", "3"]  # a single tensor needs no value path


def test_ports_are_a_column_when_there_are_several() -> None:
    ports = ("grad_output", "output", "input")
    text = render(recording([event("fc", torch.ones(2), port) for port in ports], MODULES))
    assert [line.split()[2] for line in text.splitlines()[4:-1]] == ["input", "output", "grad_output"]
    assert "port" in text.splitlines()[2].split()


def test_values_without_tensors_are_told() -> None:
    text = render(recording([event("fc", None), event("fc", (None,), "grad_output")], MODULES))
    assert "no tensor" in text
    assert "no gradient" in text


def test_paths_that_the_recording_has_no_module_for_come_last() -> None:
    text = render(recording([event("extra", torch.ones(1)), event("fc", torch.ones(1))], MODULES))
    assert [line.split()[0] for line in text.splitlines()[4:-1]] == ["fc", "extra"]


def test_the_root_is_shown_as_such() -> None:
    assert row(render(recording([event("", torch.ones(3))], MODULES)), "(root)")


def test_statistics_only() -> None:
    one = event("fc", torch.tensor([1.0, 3.0]))
    one.leaves = list
    assert row(render(recording([one], MODULES)), "fc").split() == ["fc", "Linear", "\u2013", "2", "1", "1", "3"]


# ---------------------------------------------------------------- trouble


def test_trouble_stands_out_without_colour() -> None:
    bad, zero = torch.ones(2, 6), torch.zeros(3)
    bad[0, :2], bad[1, 0] = NAN, INF
    events = [event("bn", torch.tensor([INF])), event("conv", bad), event("relu", zero), event("fc", torch.ones(2))]
    text = render(recording(events, MODULES))
    assert row(text, "conv").startswith("!  conv")
    assert row(text, "conv").endswith("NaN 2 Inf 1")
    assert row(text, "relu").startswith("0  relu")
    assert row(text, "relu").endswith("all zero")
    assert row(text, "fc").startswith("   fc")
    assert text.splitlines()[-1] == "2 sites with non-finite values, 1 all zero; first: bn:output in step 0"


def test_all_zero_alone() -> None:
    assert render(recording([event("fc", torch.zeros(2))], MODULES)).endswith("1 site all zero")


def test_the_first_is_the_first_in_time() -> None:
    bad = torch.tensor([NAN])
    events = [event("fc", torch.ones(1)), event("relu", bad, step=3), event("conv", bad)]
    assert "; first: relu:output in step 3" in render(recording(events, MODULES))


def test_unreadable_values_are_not_called_finite() -> None:
    text = render(recording([event("fc", torch.empty(2, device="meta"))], MODULES))
    assert text.endswith("1 site without readable values")


def test_colour_only_when_asked(simple: SimpleNamespace) -> None:
    simple.events.append(event("fc", torch.tensor([NAN])))
    assert "\x1b[" not in render(simple)
    coloured = render(simple, color=True)
    assert "\x1b[1;31m" in coloured  # bold red
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert [line.rstrip() for line in plain.splitlines()] == render(simple).splitlines()


# ---------------------------------------------------------------- values


def test_first_values_below_each_row() -> None:
    events = [event("conv", torch.arange(24.0).reshape(2, 3, 4) / 8), event("fc", torch.tensor([True, False]))]
    lines = render(recording(events, MODULES), values=True).splitlines()
    assert lines[5] == "    [0, 0.1250, 0.2500, 0.3750, 0.5000, 0.6250, ...]"
    assert lines[7] == "    [True, False]"
    assert len(lines) == 9


def test_rows_with_values_are_the_rows_without(simple: SimpleNamespace) -> None:
    with_values = [line for line in render(simple, values=True).splitlines() if not line.startswith("    ")]
    assert with_values == render(simple).splitlines()


STARTS: dict[str, tuple[Callable[[], Tensor], list[Any]]] = {
    "transposed": (lambda: torch.arange(12).reshape(3, 4).T, [0, 4, 8, 1, 5, 9]),
    "channels last": (lambda: torch.arange(16.0).reshape(1, 2, 2, 4).mT.contiguous().mT, [*range(6)]),
    "narrow": (lambda: torch.arange(6).reshape(3, 2), [*range(6)]),
    "scalar": (lambda: torch.tensor(7), [7]),
    "empty": (lambda: torch.empty(0, 3), []),
    "no rows, many columns": (lambda: torch.empty(3, 0), []),
    "bfloat16": (lambda: torch.ones(2, dtype=torch.bfloat16), [1.0, 1.0]),
    "float8": (lambda: torch.ones(2).to(torch.float8_e4m3fn), [1.0, 1.0]),
    "complex": (lambda: torch.tensor([1 + 2j]), [1 + 2j]),
    "sparse": (lambda: torch.eye(2).to_sparse(), [1.0, 1.0]),
    "meta": (lambda: torch.empty(3, device="meta"), []),
}


@pytest.mark.parametrize("case", list(STARTS.values()), ids=list(STARTS))
def test_first_values(case: tuple[Callable[[], Tensor], list[Any]]) -> None:
    make, want = case
    assert first_values(make()) == want


# ---------------------------------------------------------------- fit


def wide() -> SimpleNamespace:
    """Everything at its widest: long paths, all ports, many shapes, negative exponents, trouble."""
    path = "module.encoder.transformer_blocks.10.self_attention.query_projection"
    value = torch.tensor([[-1.234567e-5] * 224] * 224).reshape(1, 1, 224, 224)
    bad = torch.cat([value.flatten() * 3, torch.tensor([NAN] * 1234 + [INF] * 567)]).double()
    events = [event(path, value), event(path, bad, "grad_output"), event(path, value, "input")]
    return recording(events, {path: "NonDynamicallyQuantizableLinear"})


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_never_wider_than_asked(width: int, values: bool) -> None:
    lines = render(wide(), width=width, values=values).splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if re.match(r"[! ] {1,2}mod", line)]
    assert [line[0] for line in rows] == [" ", " ", "!"]
    assert len(lines) == 4 + 3 + (3 if values else 0) + 1 + (width < 80)  # only the last line is wrapped if it must be


def test_a_long_path_is_shortened_at_a_dot() -> None:
    assert "module…query_projection " in render(wide(), width=100)


def test_all_of_the_path_is_shown_when_there_is_room() -> None:
    assert "module.encoder.transformer_blocks.10.self_attention.query_projection" in render(wide(), width=200)


def test_columns_line_up(simple: SimpleNamespace) -> None:
    lines = render(simple).splitlines()[2:-1]
    ends = {len(line) for line in lines}
    assert len(ends) == 1  # the last column is numbers, aligned right
    types = ["Conv2d", "BatchNorm2d", "ReLU", "Linear"]
    assert len({line.index(name) for line, name in zip(lines[2:], types, strict=True)}) == 1


def test_a_long_title_of_a_narrow_table_is_not_wrapped() -> None:
    text = render(recording([event("a", torch.zeros(1))], {"a": "B"}))
    assert text.splitlines()[0] == "Net: 1 step, 1 event, 4 bytes"


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["[bold]x", "[/]", "[red]a[/red]", ":smile:", "a\\[b", "$x$", "%s {0}"])
def test_names_are_no_markup(name: str) -> None:
    text = render(recording([event(name, torch.ones(1))], {name: f"T{name}"}))
    assert row(text, name).startswith(f"{name} ")
    assert f"  T{name} " in text


@pytest.mark.parametrize(("name", "shown"), [("a\nb", r"a\nb"), ("\x1b[31mred", r"\x1b[31mred"), ("\ud800", r"\ud800")])
def test_names_stay_on_their_line(name: str, shown: str) -> None:
    text = render(recording([event(name, torch.ones(1))], {name: "T"}))
    assert shown in text
    assert len(text.splitlines()) == 6
    text.encode()


def test_wide_characters_count_twice() -> None:
    lines = render(recording([event("層" * 60, torch.ones(1))], {})).splitlines()
    assert max(len(line) + line.count("層") for line in lines) <= 100


def test_the_text_can_be_written_to_a_windows_file(simple: SimpleNamespace) -> None:
    simple.events += [event("fc", torch.tensor([NAN])), event("a" * 200, torch.ones(1)), event("fc", None, "input")]
    render(simple, values=True).encode("cp1252")


# ---------------------------------------------------------------- site=


def test_site_filter(simple: SimpleNamespace) -> None:
    simple.events.append(event("fc", torch.ones(1), "grad_output"))
    text = render(simple, site="fc:grad_output")
    assert "port grad_output" in text
    assert len(text.splitlines()) == 6
    assert text.startswith("Net: 1 step, 1 event, 4 bytes")


PORTS = ("input", "output", "grad_input", "grad_output")


@pytest.mark.parametrize(
    ("pattern", "want"),
    [
        ("a", {f"a:{port}" for port in PORTS}),
        ("a:output", {"a:output"}),
        (["a:output", "b.c:grad_output"], {"a:output", "b.c:grad_output"}),
        (["**:output", "!a"], {"b.c:output", "b:output", ":output"}),
        (["a", ["b.*"], "!a:output"], {"a:input", "a:grad_input", "a:grad_output", *(f"b.c:{p}" for p in PORTS)}),
        (["!a", "!b.**", "!(root):output"], {":input", ":grad_input", ":grad_output"}),
        ("re:b.*:output", {"b:output", "b.c:output"}),
    ],
)
def test_which_sites_a_pattern_chooses(pattern: Any, want: set[str]) -> None:
    events = [event(path, torch.ones(1), port) for path in ("", "a", "b", "b.c") for port in PORTS]
    chosen = select_events(recording(events, {"": "N", "a": "A", "b": "B", "b.c": "C"}), pattern)
    assert {f"{one.path}:{one.port}" for one in chosen} == want


def test_a_site_that_is_not_there(simple: SimpleNamespace) -> None:
    with pytest.raises(SiteError, match=r'no module "convv".*nearest: "conv"'):
        render(simple, site="convv")


# ---------------------------------------------------------------- nothing, and the Table itself


def test_nothing_recorded() -> None:
    text = render(recording([], MODULES), width=400)
    assert text == (
        "Nothing was recorded: no chosen site of the 5 modules was reached; run the model, and backward() for "
        "gradients, inside the with-block."
    )


def test_table_is_a_rich_table_with_columns(simple: SimpleNamespace) -> None:
    made = table(simple)
    assert isinstance(made, Table)
    assert made.row_count == 4
    assert [str(column.header) for column in made.columns] == ["path", "type", "shape", "mean", "std", "min", "max"]


@pytest.mark.parametrize("width", [70, 160])
def test_table_fits_where_it_is_printed(width: int) -> None:
    console = Console(width=width, force_terminal=False, color_system=None, _environ={})
    with console.capture() as capture:
        console.print(table(wide()))
    assert [line.rstrip() for line in capture.get().splitlines()] == render(wide(), width=width).splitlines()


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (-0.0, "0"), (1.0, "1"), (65504.0, "65504"), (-3.0, "-3"), (1e7, "1.000e7"), (0.12345, "0.1235"),
        (0.1, "0.1000"), (123.456, "123.5"), (1234.56, "1235"), (9999.96, "1.000e4"), (12345.6, "1.235e4"),
        (0.001, "0.001000"), (0.00099994, "9.999e-4"), (-1.5e-10, "-1.500e-10"), (1e300, "1.000e300"),
        (INF, "inf"), (-INF, "-inf"), (NAN, "\u2013"),
    ],
)  # fmt: skip
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float64, "f64"), (torch.int64, "i64"),
        (torch.uint8, "u8"), (torch.bool, "bool"), (torch.complex64, "c64"), (torch.float8_e4m3fn, "f8e4m3fn"),
        (torch.quint8, "qu8"), (torch.qint32, "qi32"),
    ],
)  # fmt: skip
def test_dtype_names(dtype: torch.dtype, text: str) -> None:
    assert dtype_text(dtype) == text


def test_shapes() -> None:
    assert [shape_text(torch.empty(size)) for size in ([1, 6, 7], [0, 3], [])] == ["1x6x7", "0x3", "scalar"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (1_170_000, "1.2 MB"),
        (999_960, "1 MB"),
        (2e9, "2 GB"),
        (5e18, "5000 PB"),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("text", "width", "want"),
    [
        ("layer1.conv", 11, "layer1.conv"),
        ("encoder.layers.10.attention.query", 30, "enco…layers.10.attention.query"),
        ("abcdefghij", 7, "abc…hij"),
        ("abcdefghij", 2, "…"),
        ("abcdefghij", 0, ""),
    ],
)
def test_shorten(text: str, width: int, want: str) -> None:
    assert shorten(text, width) == want


def test_printable_keeps_what_can_be_shown() -> None:
    assert printable("é層 a_b\t\u202e") == "é層 a_b\\t\\u202e"
