"""Pictures: what is drawn against numpy, what is written to disk, and what is refused."""

from __future__ import annotations

import gc
import itertools
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hookline.errors import ArgumentError, HooklineError, OptionError, SiteError
from hookline.report import plot

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from .stored import PlainEvent  # noqa: E402

NAN, INF = float("nan"), float("inf")
PNG, SVG = b"\x89PNG\r\n\x1a\n", b"<?xml"


@pytest.fixture(autouse=True)
def matplotlib_is_left_alone() -> Iterator[None]:
    before = dict(matplotlib.rcParams)
    yield
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules


def image(axes: Axes) -> np.ma.MaskedArray:
    (found,) = axes.get_images()
    data = found.get_array()
    assert data is not None
    return data


def panels(figure: Figure) -> list[Axes]:
    """All axes but colour bars."""
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]


def bars(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]


def titles(axes: Axes) -> tuple[str, str]:
    return axes.get_title(loc="left"), axes.get_title(loc="right")


def heading(figure: Figure) -> str:
    return figure.texts[-1].get_text()


def event(path: str, value: Any, port: str = "grad_output", order: int = 0) -> PlainEvent:
    return PlainEvent(path, value, port, order=order)


def recording(*events: PlainEvent, paths: tuple[str, ...] = ()) -> SimpleNamespace:
    for order, one in enumerate(events):
        one.order = order
    modules = {path: SimpleNamespace(type_name="Linear", parameters=0, aliases=()) for path in paths}
    return SimpleNamespace(events=list(events), modules=modules, info={"model": "Net"})


# ---------------------------------------------------------------- feature maps


def test_each_channel_is_drawn_as_it_is() -> None:
    x = torch.randn(2, 5, 6, 7)
    figure = plot.feature_maps(x, batch=1)
    assert len(figure.axes) == 5
    for channel, axes in enumerate(figure.axes):
        want = x[1, channel].double().numpy()
        np.testing.assert_array_equal(image(axes), want)
        assert axes.get_images()[0].get_clim() == (want.min(), want.max())
        name, limits = titles(axes)
        assert name == f"channel {channel}"
        assert [float(end) for end in limits.split(" to ")] == pytest.approx([want.min(), want.max()], rel=5e-3)
    assert heading(figure) == "5 channels, 6x7 maps, batch element 1 of 2"


@pytest.mark.parametrize(
    ("channels", "want"),
    [(3, [0, 1, 2]), (99, list(range(20))), ([7, 0, -1], [7, 0, 19]), (range(2, 4), [2, 3]), (torch.tensor([5]), [5])],
)
def test_channels(channels: Any, want: list[int]) -> None:
    x = torch.randn(1, 20, 3, 3)
    figure = plot.feature_maps(x, channels=channels)
    assert [titles(axes)[0] for axes in panels(figure)] == [f"channel {index}" for index in want]
    for axes, index in zip(panels(figure), want, strict=True):
        np.testing.assert_array_equal(image(axes), x[0, index].numpy())


def test_sixteen_channels_unless_asked() -> None:
    figure = plot.feature_maps(torch.randn(1, 64, 4, 4))
    assert len(figure.axes) == 16
    assert heading(figure) == "16 of 64 channels, 4x4 maps"


def test_shared_scale_has_one_colour_bar() -> None:
    x = torch.randn(1, 3, 4, 4)
    figure = plot.feature_maps(x, scale="shared")
    assert len(bars(figure)) == 1
    limits = {axes.get_images()[0].get_clim() for axes in panels(figure)}
    assert limits == {(float(x.min()), float(x.max()))}


READINGS: list[tuple[tuple[int, ...], str | None, int, tuple[int, ...]]] = [
    ((2, 3, 4, 5), None, 3, (4, 5)),
    ((3, 4, 5), None, 3, (4, 5)),
    ((1, 28, 28), None, 1, (28, 28)),
    ((4, 5), None, 1, (4, 5)),
    ((2, 4, 5, 3), "NHWC", 3, (4, 5)),
    ((1, 80, 700), "CHW", 1, (80, 700)),
]


@pytest.mark.parametrize(("shape", "layout", "count", "size"), READINGS)
def test_how_a_shape_is_read(shape: tuple[int, ...], layout: str | None, count: int, size: tuple[int, ...]) -> None:
    figure = plot.feature_maps(torch.randn(shape), layout=layout)
    assert [image(axes).shape for axes in figure.axes] == [size] * count


def test_channels_last_values_go_where_they_belong() -> None:
    x = torch.randn(1, 4, 5, 3)
    figure = plot.feature_maps(x, layout="NHWC", channels=[2])
    np.testing.assert_array_equal(image(figure.axes[0]), x[0, :, :, 2].numpy())


def test_one_dimensional_maps_are_lines() -> None:
    x = torch.randn(2, 3, 50)
    figure = plot.feature_maps(x, layout="NCL", batch=1, scale="shared")
    assert len(figure.axes) == 3
    for channel, axes in enumerate(figure.axes):
        np.testing.assert_array_equal(axes.lines[0].get_ydata(), x[1, channel].numpy())
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert heading(figure) == "3 channels, maps of length 50, batch element 1 of 2"


def test_nan_and_inf_are_drawn_apart_and_counted() -> None:
    x = torch.randn(1, 3, 8, 8)
    x[0, 0, 2, 3], x[0, 0, 5:] = NAN, INF
    x[0, 1] = NAN
    first, second, third = plot.feature_maps(x).axes
    np.testing.assert_array_equal(image(first).mask, ~np.isfinite(x[0, 0].numpy()))
    assert first.xaxis.label.get_text() == "NaN 1  Inf 24"
    assert (titles(second)[1], second.xaxis.label.get_text()) == ("nothing finite", "NaN 64")
    assert third.xaxis.label.get_text() == ""
    bad = first.get_images()[0].get_cmap()(np.ma.masked_all(1))[0]
    assert tuple(bad) not in {tuple(colour) for colour in matplotlib.colormaps["viridis"](range(256))}


def test_a_single_bad_pixel_of_a_large_map_gets_a_ring() -> None:
    x = torch.zeros(1, 1, 100, 100)
    x[0, 0, 30, 40] = NAN
    (rings,) = plot.feature_maps(x).axes[0].collections
    np.testing.assert_array_equal(rings.get_offsets(), [[40, 30]])


def test_bad_elements_of_a_line_are_marked() -> None:
    x = torch.randn(1, 1, 30)
    x[0, 0, 4:6] = NAN
    line, marks = plot.feature_maps(x, layout="NCL").axes[0].lines
    assert np.isnan(np.asarray(line.get_ydata())).sum() == 2
    np.testing.assert_array_equal(marks.get_xdata(), [4, 5])


@pytest.mark.parametrize("value", [0.0, 2.5, -1e-30, 1e30])
@pytest.mark.parametrize("scale", ["own", "shared"])
def test_a_constant_map(value: float, scale: str) -> None:
    axes = plot.feature_maps(torch.full((1, 1, 3, 3), value), scale=scale).axes[0]
    low, high = axes.get_images()[0].get_clim()
    assert low < image(axes)[0, 0] < high
    assert titles(axes)[1] == f"all {value:.3g}".replace("e+", "e")


KINDS: dict[str, Callable[[], Tensor]] = {
    "bfloat16": lambda: torch.randn(1, 2, 3, 3).bfloat16(),
    "float8": lambda: torch.randn(1, 2, 3, 3).to(torch.float8_e4m3fn),
    "uint8": lambda: torch.randint(0, 255, (1, 2, 3, 3), dtype=torch.uint8),
    "int64": lambda: torch.randint(-5, 5, (1, 2, 3, 3)),
    "bool": lambda: torch.rand(1, 2, 3, 3) > 0.5,
    "requires grad": lambda: torch.randn(1, 2, 3, 3, requires_grad=True) * 2,
    "non-contiguous": lambda: torch.randn(3, 3, 2, 1).permute(3, 2, 0, 1),
    "huge": lambda: torch.randn(1, 2, 3, 3).double() * 1e300,
}


@pytest.mark.parametrize("make", list(KINDS.values()), ids=list(KINDS))
def test_every_kind_of_tensor(make: Callable[[], Tensor], tmp_path: Path) -> None:
    x = make()
    figure = plot.feature_maps(x, path=tmp_path / "x.png")
    np.testing.assert_array_equal(image(figure.axes[1]), x[0, 1].detach().double().numpy())


def test_complex_is_drawn_by_magnitude() -> None:
    figure = plot.feature_maps(torch.full((1, 1, 2, 2), 3 + 4j))
    assert (image(figure.axes[0]) == 5).all()


@pytest.mark.parametrize("value", [SimpleNamespace(output=torch.ones(1, 2, 3, 3)), (torch.ones(1, 2, 3, 3), None, 3)])
def test_a_call_or_a_value_with_one_tensor(value: Any) -> None:
    assert len(plot.feature_maps(value).axes) == 2


@pytest.mark.cuda
def test_cuda() -> None:
    x = torch.randn(1, 2, 3, 3)
    np.testing.assert_array_equal(image(plot.feature_maps(x.cuda()).axes[0]), x[0, 0].numpy())


# ---------------------------------------------------------------- feature maps: refusals

X = torch.zeros(2, 4, 6, 6)
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (X, {"batch": 2}, OptionError, "batch 2 is out of range: there are 2, so 0 to 1 or -2 to -1"),
    (X, {"batch": 0.0}, ArgumentError, "batch must be whole numbers; got 0.0"),
    (X[0], {"batch": 1}, OptionError, "batch 1 is out of range"),
    (X, {"channels": [4]}, OptionError, "channels 4 is out of range: there are 4, so 0 to 3"),
    (X, {"channels": 0}, OptionError, "channels must be at least 1, or a list of numbers; got 0"),
    (X, {"channels": []}, OptionError, "channels must name at least one of 0 to 3"),
    (X, {"channels": True}, ArgumentError, "channels must be a number or a list of numbers; got bool"),
    (X, {"channels": "all"}, ArgumentError, "channels must be a number or a list of numbers; got str"),
    (X, {"scale": "global"}, OptionError, 'scale must be "own" or "shared"; got \'global\''),
    (X, {"cmap": "viridiss"}, OptionError, "cmap must be the name of a matplotlib colour map.*got 'viridiss'"),
    (X, {"columns": 0}, OptionError, "columns must be a whole number of at least 1; got 0"),
    (X, {"layout": "NCHW!"}, OptionError, "layout must be one of HW, CHW, NCHW, NHWC, NCL; got 'NCHW!'"),
    (X, {"layout": "CHW"}, OptionError, r"layout CHW has 3 dimensions; got shape \(2, 4, 6, 6\)"),
    (torch.zeros(3), {}, OptionError, r"draws shapes \(N, C, H, W\), \(C, H, W\) or \(H, W\).*got \(3,\)"),
    (torch.zeros(1, 2, 3, 4, 5), {}, OptionError, r"got \(1, 2, 3, 4, 5\); choose one depth or frame first"),
    (torch.zeros(1, 0, 3, 3), {}, OptionError, r"no elements; got shape \(1, 0, 3, 3\)"),
    (torch.zeros(0, 3, 3, 3), {}, OptionError, r"the batch is empty; got shape \(0, 3, 3, 3\)"),
    (torch.zeros(1, 3, 0, 3), {}, OptionError, r"no elements; got shape \(1, 3, 0, 3\)"),
    (torch.zeros(1, 2, 3, 3, device="meta"), {}, OptionError, "dtype torch.float32 on meta cannot be read"),
    ("picture", {}, ArgumentError, r"feature_maps takes a torch.Tensor, or a call with an output; got str"),
    ((X, [X]), {}, ArgumentError, r"got 2 tensors: value\[0\] \(2x4x6x6\), value\[1\]\[0\] \(2x4x6x6\); pass one"),
]


@pytest.mark.parametrize(("value", "options", "error", "message"), REFUSED)
def test_refused(value: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    figure = Figure()
    figure.text(0, 0, "still here")
    with pytest.raises(error, match=message):
        plot.feature_maps(value, figure=figure, **options)
    assert len(figure.texts) == 1  # nothing is drawn, and what was there is not wiped


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ((1, 197, 768), "value[:, 1:].transpose(1, 2).unflatten(2, (14, 14))"),
        ((8, 64, 384), "value.transpose(1, 2).unflatten(2, (8, 8))"),
        ((2, 77, 768), "value.transpose(1, 2).unflatten(2, (height, width))"),
    ],
)
def test_tokens_are_refused_with_the_way_out(shape: tuple[int, ...], advice: str) -> None:
    tokens = torch.randn(shape)
    with pytest.raises(OptionError, match=r'say layout="CHW" or layout="NCL"') as caught:
        plot.feature_maps(tokens)
    assert str(caught.value).endswith(advice)
    if "height" not in advice:
        plot.feature_maps(eval(advice, {"value": tokens}))


# ---------------------------------------------------------------- histograms


def heights(axes: Axes) -> tuple[np.ndarray, np.ndarray]:
    (steps,) = axes.patches
    data = steps.get_data()  # type: ignore[attr-defined]
    return data.values, data.edges


def test_counts_agree_with_numpy() -> None:
    x = torch.randn(40, 50)
    (axes,) = plot.histogram(x, bins=20).axes
    counts, edges = np.histogram(x.double().numpy(), bins=20)
    np.testing.assert_array_equal(heights(axes)[0], counts)
    np.testing.assert_allclose(heights(axes)[1], edges)
    assert axes.get_yscale() == "log"
    assert plot.histogram(x, log=False).axes[0].get_yscale() == "linear"


def test_a_panel_per_name() -> None:
    named = {"conv": torch.randn(9), "[b] $x$": (torch.ones(2), torch.zeros(3)), "ids": torch.arange(5)}
    figure = plot.histogram(named)
    assert [titles(axes)[0] for axes in figure.axes] == ["conv", "[b] $x$[0]", "[b] $x$[1]", "ids"]


def test_what_no_bar_can_show_is_written() -> None:
    axes = plot.histogram(torch.tensor([0.0, 0.0, 1.0, 3.0, NAN, INF])).axes[0]
    facts, bad = (text.get_text() for text in axes.texts)
    assert facts == "mean 1   std 1.22   zeros 33 %"
    assert bad == "NaN 1 Inf 1"
    assert heights(axes)[0].sum() == 4


@pytest.mark.parametrize(
    ("value", "text"),
    [(torch.tensor([NAN]), "no finite value"), (torch.empty(0), "no elements"),
     (torch.empty(2, device="meta"), "values cannot be read")],
)  # fmt: skip
def test_nothing_to_count(value: Tensor, text: str) -> None:
    (axes,) = plot.histogram(value).axes
    assert text in [found.get_text() for found in axes.texts]
    assert not axes.patches


@pytest.mark.parametrize("value", [0.0, 1.0, -1e20, 1e300, 3e-300])
def test_histogram_of_a_constant(value: float) -> None:
    counts, edges = heights(plot.histogram(torch.full((7,), value, dtype=torch.float64)).axes[0])
    assert counts.sum() == counts.max() == 7
    assert (np.diff(edges) > 0).all()


@pytest.mark.parametrize("values", [[1.0, 1.0 + 2**-52], [-1e307, 1e307], [5e-324, 1e-323], [2.0**62, 2.0**62 + 512]])
def test_histogram_of_a_hard_range(values: list[float]) -> None:
    counts, _ = heights(plot.histogram(torch.tensor(values, dtype=torch.float64)).axes[0])
    assert counts.sum() == 2


def test_a_large_tensor_is_counted_in_pieces() -> None:
    x = torch.randn(300_000).half()
    counts, _ = heights(plot.histogram(x, bins=10).axes[0])
    np.testing.assert_array_equal(counts, np.histogram(x.double().numpy(), bins=10)[0])


def test_implicit_zeros_of_a_sparse_tensor_are_counted() -> None:
    sparse = torch.sparse_coo_tensor([[1], [2]], [3.0], (1000, 1000), check_invariants=True)
    counts, _ = heights(plot.histogram(sparse, bins=3).axes[0])
    assert counts.tolist() == [999_999, 0, 1]


def test_a_recording_has_a_panel_per_site_over_all_calls() -> None:
    parts = [torch.randn(5), torch.randn(7) + 3]
    rec = recording(event("b", parts[0], "output"), event("a", torch.ones(2), "output"), event("b", parts[1], "output"),
                    event("b", torch.ones(4)), event("a", None), paths=("a", "b"))  # fmt: skip
    figure = plot.histogram(rec, bins=8)
    assert [titles(axes)[0] for axes in figure.axes] == ["a:output", "b:output", "b:grad_output"]
    np.testing.assert_array_equal(heights(figure.axes[1])[0], np.histogram(torch.cat(parts).double(), bins=8)[0])
    assert [titles(axes)[0] for axes in plot.histogram(rec, site="b:output").axes] == ["b"]


def test_histogram_refusals() -> None:
    with pytest.raises(ArgumentError, match="a mapping from names to tensors or a recording; got dict without"):
        plot.histogram({"a": 3})
    with pytest.raises(OptionError, match="bins must be a whole number from 1 to 10000; got 0"):
        plot.histogram(torch.ones(2), bins=0)
    with pytest.raises(OptionError, match="401 tensors are too many for one picture of 400; choose some with site="):
        plot.histogram({str(index): torch.ones(1) for index in range(401)})
    with pytest.raises(OptionError, match="site= chooses sites of a recording"):
        plot.histogram(torch.ones(2), site="a")
    with pytest.raises(SiteError, match="the recording holds no tensor there"):
        plot.histogram(recording(event("a", None), paths=("a",)))


# ---------------------------------------------------------------- gradient flow


def layer_lines(axes: Axes) -> dict[str, np.ndarray]:
    """(value, row) of every mark, by its name in the legend."""
    return {str(line.get_label()): np.stack([line.get_xdata(), line.get_ydata()], 1) for line in axes.lines}


def test_median_and_largest_per_layer_in_model_order() -> None:
    grads = {f"layer{index}": torch.randn(30) * 10.0 ** (index - 3) for index in range(5)}
    more = torch.randn(11)
    events = [*(event(path, grad) for path, grad in reversed(grads.items())), event("layer0", more)]
    (axes,) = plot.gradient_flow(recording(*events, paths=("", *grads))).axes
    marks = layer_lines(axes)
    sizes = [np.abs(grad.double().numpy()) for grad in grads.values()]
    sizes[0] = np.concatenate([sizes[0], np.abs(more.double().numpy())])
    np.testing.assert_allclose(marks["median"], [[np.median(size), row] for row, size in enumerate(sizes)])
    np.testing.assert_allclose(marks["largest"], [[size.max(), row] for row, size in enumerate(sizes)])
    assert [label.get_text() for label in axes.get_yticklabels()] == list(grads)
    assert axes.yaxis_inverted()
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "size of grad_output, log scale"


def test_zero_and_non_finite_layers_are_marked() -> None:
    bad = torch.tensor([1.0, NAN, 2.0, INF])
    rec = recording(event("a", torch.zeros(3)), event("b", bad), event("c", torch.tensor([NAN])),
                    event("d", torch.tensor([0.0, 0.0, 0.0, 5.0])))  # fmt: skip
    figure = plot.gradient_flow(rec)
    (axes,) = figure.axes
    marks = layer_lines(axes)
    assert marks["all zero"][:, 1].tolist() == [0]
    assert marks["median"].tolist() == [[1.5, 1]]
    assert marks["median is 0"][:, 1].tolist() == [3]
    assert marks["largest"].tolist() == [[2.0, 1], [5.0, 3]]
    assert [text.get_text() for text in axes.texts] == ["NaN 1 Inf 1", "NaN 1"]
    assert len(axes.patches) == 2
    legend = axes.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["median", "median is 0", "largest", "all zero", "NaN or Inf"]
    assert heading(figure) == "grad_output of 4 layers, first layer at the top, 1 all zero, 2 with NaN or Inf"


def test_linear_scale_and_other_port() -> None:
    rec = recording(event("a", torch.ones(3), "grad_input"), event("a", torch.zeros(3), "output"))
    (axes,) = plot.gradient_flow(rec, port="grad_input", log=False).axes
    assert (axes.get_xscale(), axes.get_xlabel()) == ("linear", "size of grad_input")


@pytest.mark.parametrize("value", [0.0, NAN])
def test_nothing_but_trouble(value: float, tmp_path: Path) -> None:
    plot.gradient_flow(recording(event("a", torch.full((3,), value))), path=tmp_path / "x.png")


def test_150_layers_stay_readable() -> None:
    paths = [f"encoder.layers.{index}.self_attention.output_projection.linear" for index in range(150)]
    events = [event(path, torch.randn(4) * 10.0 ** (index % 11 - 9)) for index, path in enumerate(paths)]
    events[71] = event(paths[71], torch.tensor([NAN]))
    figure = plot.gradient_flow(recording(*events))
    FigureCanvasAgg(figure).draw()
    labels = [label for label in figure.axes[0].get_yticklabels() if label.get_text()]
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 + 1 for low, high in itertools.pairwise(boxes))  # none touches the next
    assert all(box.x0 > 0 for box in boxes)  # none is cut off
    assert 50 <= len(labels) < 150
    assert any("71.self_attention" in label.get_text() or "…" in label.get_text() for label in labels)
    assert figure.get_figheight() < 20


def test_a_large_gradient_has_the_exact_maximum() -> None:
    grad = torch.zeros(3_000_001)
    grad[1_234_567] = -7.0
    (axes,) = plot.gradient_flow(recording(event("a", grad))).axes
    assert layer_lines(axes)["largest"].tolist() == [[7.0, 0]]


def test_gradient_flow_refusals() -> None:
    message = 'no grad_output; recorded: input, output. Record it with hookline.record(model, ports=("grad_output",))'
    rec = recording(event("a", torch.ones(1), "output"), event("a", torch.ones(1), "input"), event("a", (None,)))
    rec.events.pop()
    with pytest.raises(SiteError, match=re.escape(message)):
        plot.gradient_flow(rec)
    with pytest.raises(SiteError, match="recorded: nothing"):
        plot.gradient_flow(recording())
    with pytest.raises(OptionError, match='port must be "grad_output" or "grad_input"; got \'output\''):
        plot.gradient_flow(rec, port="output")


# ---------------------------------------------------------------- attention

TOKENS = ["[CLS]", "a$b", "Ġthe", "line\nbreak", "averylongtokenindeed"]


def test_heads_share_a_scale_from_zero() -> None:
    w = torch.randn(2, 3, 5, 5).softmax(-1)
    figure = plot.attention(w, batch=1, tokens=TOKENS)
    assert len(panels(figure)) == 3
    assert len(bars(figure)) == 1
    for head, axes in enumerate(panels(figure)):
        np.testing.assert_array_equal(image(axes), w[1, head].double().numpy())
        assert axes.get_images()[0].get_clim() == (0.0, float(w[1].max()))
        assert titles(axes)[0] == f"head {head}"
    want = ["[CLS]", "a$b", "Ġthe", "line\\nbreak", "averyl…nindeed"]
    first, second, _ = panels(figure)
    assert [label.get_text() for label in first.get_yticklabels()] == want
    assert [label.get_text() for label in first.get_xticklabels()] == want
    assert second.get_yticklabels() == []  # only at the outer side
    assert heading(figure) == "3 heads, 5x5 weights: queries down, keys across, batch element 1 of 2"


@pytest.mark.parametrize(("shape", "count"), [((5, 5), 1), ((3, 5, 5), 3), ((1, 4, 5, 7), 4)])
def test_attention_shapes(shape: tuple[int, ...], count: int) -> None:
    assert len(panels(plot.attention(torch.rand(shape)))) == count


def test_heads_can_be_chosen() -> None:
    figure = plot.attention(torch.rand(8, 3, 3), heads=[6, 1])
    assert [titles(axes)[0] for axes in panels(figure)] == ["head 6", "head 1"]
    assert heading(figure).startswith("2 of 8 heads")


def test_keys_alone_are_labelled_when_queries_differ() -> None:
    (axes,) = panels(plot.attention(torch.rand(2, 5), tokens=TOKENS))
    assert len(axes.get_xticklabels()) == 5
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"]


def test_many_tokens_are_thinned_and_nan_is_told() -> None:
    w = torch.rand(1, 200, 200)
    w[0, 3] = NAN
    figure = plot.attention(w, tokens=[f"t{index}" for index in range(200)])
    (axes,) = panels(figure)
    assert 20 < len(axes.get_xticklabels()) < 100
    assert titles(axes)[1] == "NaN or Inf 200"


@pytest.mark.parametrize(
    ("weights", "options", "error", "message"),
    [
        (torch.rand(3), {}, OptionError, r"draws shapes \(N, heads, queries, keys\).*got \(3,\)"),
        (torch.rand(2, 0), {}, OptionError, r"no elements; got shape \(2, 0\)"),
        (-torch.rand(3, 3), {}, OptionError, r"must not be below 0; the smallest is -0\.\d+: .*softmax\(-1\)"),
        (torch.rand(3, 3), {"tokens": ["a"]}, OptionError, "tokens: got 1 labels, wanted one for each of the 3 keys"),
        (torch.rand(3, 3), {"tokens": "abc"}, ArgumentError, "tokens must be a list of strings, one per key; got str"),
        (torch.rand(3, 3), {"tokens": [1, 2, 3]}, ArgumentError, "tokens must be a list of strings"),
        (torch.rand(2, 3, 3), {"heads": [2]}, OptionError, "heads 2 is out of range: there are 2, so 0 to 1"),
        (torch.rand(1, 2, 3, 3), {"batch": 1}, OptionError, "batch 1 is out of range"),
        (torch.rand(3, 3), {"columns": -1}, OptionError, "columns must be a whole number of at least 1; got -1"),
        (None, {}, ArgumentError, "attention takes a torch.Tensor, or a call with an output; got NoneType"),
    ],
)
def test_attention_refusals(weights: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plot.attention(weights, **options)


# ---------------------------------------------------------------- all pictures

GRADIENT = recording(event("a", torch.randn(9)), event("b$_", torch.zeros(9)))
PICTURES: dict[str, Callable[..., Figure]] = {
    "feature_maps": lambda **options: plot.feature_maps(torch.randn(1, 4, 8, 8), scale="shared", **options),
    "tiny values": lambda **options: plot.feature_maps(torch.randn(900, 4, 4) * 1e-10, channels=[888, 9], **options),
    "lines": lambda **options: plot.feature_maps(torch.randn(1, 4, 8), layout="NCL", **options),
    "histogram": lambda **options: plot.histogram(torch.randn(100), **options),
    "gradient_flow": lambda **options: plot.gradient_flow(GRADIENT, **options),
    "attention": lambda **options: plot.attention(torch.rand(3, 5, 5), tokens=["層", *TOKENS[1:]], **options),
}
every_picture = pytest.mark.parametrize("draw", list(PICTURES.values()), ids=list(PICTURES))


@every_picture
def test_files_are_whole_and_repeatable(draw: Callable[..., Figure], tmp_path: Path) -> None:
    for name, magic in (("a.png", PNG), ("b.SVG", SVG)):
        torch.manual_seed(0)
        draw(path=tmp_path / name, title="Layer $1$ [bold]")
        first = (tmp_path / name).read_bytes()
        assert first.startswith(magic)
        torch.manual_seed(0)
        draw(path=str(tmp_path / name), title="Layer $1$ [bold]")  # over the old one
        assert (tmp_path / name).read_bytes() == first
    assert sorted(os.listdir(tmp_path)) == ["a.png", "b.SVG"]


@every_picture
def test_paths_are_checked_before_anything_is_drawn(draw: Callable[..., Figure], tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for path, message in (
        ("x.jpg", r"x\.jpg': the name must end in \.png or \.svg; got '\.jpg'"),
        ("x", r"must end in \.png or \.svg; got ''"),
        ("none/x.png", r"there is no folder '.*none'; create it first"),
        ("folder.png", "it is a folder; give the name of a file"),
    ):
        figure = Figure()
        figure.text(0, 0, "still here")
        with pytest.raises(OptionError, match=message):
            draw(path=tmp_path / path, figure=figure)
        assert len(figure.texts) == 1
    with pytest.raises(ArgumentError, match=r"path must be a file name or a pathlib\.Path; got int"):
        draw(path=3)
    assert os.listdir(tmp_path) == ["folder.png"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.png"
    target.write_bytes(b"old")

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        plot.histogram(torch.ones(3), path=target)
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.png"]


@every_picture
def test_a_figure_is_drawn_again(draw: Callable[..., Figure]) -> None:
    figure = draw()
    count = len(figure.axes)
    assert draw(figure=figure, title="second") is figure
    assert len(figure.axes) == count
    assert figure.texts[0].get_text() == "second"


@every_picture
@pytest.mark.filterwarnings("ignore:Glyph .* missing from")  # one of the tokens is Chinese
def test_no_text_touches_another_or_the_edge(draw: Callable[..., Figure]) -> None:
    figure = draw(title="A title")
    FigureCanvasAgg(figure).draw()
    texts = set(figure.findobj(matplotlib.text.Text)) - _labels_beyond_the_limits(figure)
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_visible() and text.get_text()]
    for index, (name, box) in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, name
        for other, its in boxes[index + 1 :]:
            overlaps = min(box.x1, its.x1) - max(box.x0, its.x0) > 1 and min(box.y1, its.y1) - max(box.y0, its.y0) > 1
            assert not overlaps, f"{name!r} and {other!r}"


def _labels_beyond_the_limits(figure: Figure) -> set[Any]:
    """Tick labels that exist but are not drawn."""
    hidden: set[Any] = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        drawn = {label for tick in axis._update_ticks() for label in (tick.label1, tick.label2)}
        hidden |= set(axis.findobj(matplotlib.text.Text)) - drawn - {axis.label, axis.offsetText}
    return hidden


@every_picture
def test_figures_are_freed(draw: Callable[..., Figure], tmp_path: Path) -> None:
    alive = [weakref.ref(draw(path=tmp_path / "x.png")) for _ in range(3)]
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


@pytest.mark.same_rng
def test_the_value_is_only_read() -> None:
    x = torch.ones(1, 2, 3, 3, requires_grad=True)
    y = x * 2
    version = y._version
    with torch.inference_mode():
        plot.feature_maps(y)
    plot.histogram(y)
    assert y._version == version
    y.sum().backward()


def test_the_users_settings_do_not_spoil_a_picture(tmp_path: Path) -> None:
    with matplotlib.rc_context({"text.usetex": True, "axes.grid": True, "savefig.bbox": "tight", "font.size": 40}):
        figure = plot.feature_maps(torch.randn(1, 2, 4, 4), path=tmp_path / "x.png")
    assert figure.axes[0].title.get_usetex() is False
    assert figure.texts[0].get_fontsize() == 8


def test_from_another_thread(tmp_path: Path) -> None:
    thread = threading.Thread(target=lambda: plot.histogram(torch.ones(3), path=tmp_path / "x.png"))
    thread.start()
    thread.join()
    assert (tmp_path / "x.png").exists()


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    for draw in PICTURES.values():
        with pytest.raises(HooklineError, match=r'run: pip install "matplotlib>='):
            draw()


def test_importing_the_plots_does_not_import_matplotlib() -> None:
    code = "import sys, hookline.report.plot; print([name for name in sys.modules if name.startswith('matplotlib')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
