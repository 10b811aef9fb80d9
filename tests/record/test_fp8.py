"""``dtype="fp8"``: eight bits and a scale for each row, and how far that is from what the model had."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hookline
from hookline.errors import BudgetError, OptionError, SiteError
from hookline.record import Recording, Rows
from hookline.sites import PORTS
from hookline.values import Fields

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Passes(nn.Module):
    """Returns what it gets, whatever that is."""

    def forward(self, value: Any) -> Any:
        return value


def kept(*values: Any, **options: Any) -> Recording:
    model = nn.Sequential(Passes())
    with hookline.record(model, "0", dtype="fp8", **options) as rec:
        for value in values:
            model(value)
    return rec


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))


def decoded(data: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The numbers of ``float8_e4m3fn`` bits, by its definition: a sign, 4 bits of exponent, 3 of mantissa."""
    bits = data.contiguous().view(torch.uint8).numpy().astype(int)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    return np.where((bits & 127) == 127, np.nan, np.where(bits >> 7, -size, size))


@pytest.fixture(params=["memory", "saved", "streamed"])
def place(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def recorded(place: str, tmp_path: Path) -> Any:
    """Records in each of the ways in which a recording can be had."""

    def record(*values: Any, **options: Any) -> Recording:
        if place == "streamed":
            kept(*values, to=tmp_path / "run.hookline", **options)
            return hookline.load(tmp_path / "run.hookline")
        rec = kept(*values, **options)
        if place == "memory":
            return rec
        rec.save(tmp_path / "run.hookline")
        return hookline.load(tmp_path / "run.hookline")

    return record


# ---------------------------------------------------------------- how far off

shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3)
exponents = st.floats(-30, 30)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FLOATS), shapes, exponents, st.floats(0, 12), st.integers(0, 2**31))
def test_an_element_is_off_by_half_a_step_at_most(
    dtype: torch.dtype, shape: list[int], exponent: float, spread: float, seed: int
) -> None:
    """Half of the last of 3 mantissa bits is 2**-4 of an element; below 2**-6 steps are 2**-9, of the scale."""
    draw = np.random.default_rng(seed)
    numbers = draw.standard_normal(shape) * 10 ** (exponent + spread * draw.uniform(-1, 0, shape))
    x = torch.from_numpy(numbers).to(dtype)
    x[~x.isfinite()] = 0
    value = kept(x)["0"].output
    data, scale = decoded(value.data), value.scale.double().numpy()
    assert value.data.shape == x.shape and scale.shape == (*shape[:-1], 1)
    exact = x.double().numpy()
    assert (np.abs(exact - data * scale) <= 2**-4 * np.abs(exact) + 2**-10 * scale).all()
    back = hookline.dequantize(value)
    assert (
        back.dtype == torch.float32 and (np.abs(exact - back.numpy()) <= 2**-4 * np.abs(exact) + 2**-10 * scale).all()
    )


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FLOATS), st.lists(st.floats(width=16), min_size=1, max_size=8))
def test_a_row_with_infinities_and_nan_keeps_its_other_elements(dtype: torch.dtype, numbers: list[float]) -> None:
    x = torch.tensor(numbers, dtype=dtype)
    value = kept(x)["0"].output
    data, scale = decoded(value.data), value.scale.item()
    for element, code in zip(x.tolist(), data, strict=True):
        if math.isfinite(element):
            assert abs(element - code * scale) <= 2**-4 * abs(element) + 2**-10 * scale
        else:
            assert math.isnan(code)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_element_of_each_row_is_448_scales(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -3.5, 2.0], [0.25, 0.125, 0.0], [0.0, 0.0, -0.0]], dtype=dtype)
    value = kept(x)["0"].output
    assert torch.equal(value.scale, torch.tensor([[3.5 / 448], [0.25 / 448], [1.0]]))
    assert np.array_equal(np.abs(decoded(value.data)).max(1), [448, 448, 0])
    # 1 / 3.5 * 448 is a number of the format, 128, and so is 2 / 3.5 * 448
    assert np.array_equal(decoded(value.data)[0], [128, -448, 256])


@pytest.mark.parametrize("size", [1e-45, 1e-42, 2e-40, 1e-38, 5e-36, 6e-36, 3e38])
def test_the_scale_is_a_normal_number_at_either_end(size: float) -> None:
    x = torch.tensor([size, -size / 2, size / 3])
    value = kept(x)["0"].output
    scale = value.scale.item()
    assert scale >= 2**-126 and abs(scale - max(size / 448, 2**-126)) <= 2**-20 * scale
    exact = x.double().numpy()
    assert (np.abs(exact - decoded(value.data) * scale) <= 2**-4 * np.abs(exact) + 2**-10 * scale).all()


def test_float64_beyond_any_scale_is_refused_and_up_to_there_right() -> None:
    x = torch.tensor([[1e41, -1e40], [1e-300, 0.0]], dtype=torch.float64)
    value = kept(x)["0"].output
    off = np.abs(x.numpy() - decoded(value.data) * value.scale.double().numpy())
    assert (off <= 2**-4 * np.abs(x.numpy()) + 2**-10 * value.scale.double().numpy()).all()
    with pytest.raises(OptionError, match=r'dtype="fp8" reaches numbers up to 1.52e\+41.* has 1e\+42.*torch.float64'):
        kept(torch.tensor([1e42], dtype=torch.float64))


def test_half_precision_does_not_compute_in_half_precision() -> None:
    """65504 / 448 * 448 and the smallest float16 are out of the reach of their own dtype."""
    for x in (torch.tensor([65504.0, -65504.0]).half(), torch.tensor([6e-8, 1.2e-7]).half()):
        back = hookline.dequantize(kept(x)["0"].output)
        assert (x.float() - back).abs().max() <= 2**-4 * x.float().abs().max()


# ---------------------------------------------------------------- what is kept


def test_what_is_not_floating_or_has_no_dimension_stays_as_it_is(recorded: Any) -> None:
    x = torch.randn(2, 3)
    given = {
        "x": x, "n": x.argmax(-1), "mask": x > 0, "wave": torch.complex(x, x), "loss": x.double().mean(),
        "narrow": x.to(torch.float8_e5m2), "sparse": x.to_sparse(), "text": "a", "none": None, "list": [x, (x,)],
    }  # fmt: skip
    value = recorded(given)["0"].output
    assert type(value["x"]) is Fields and value["x"].type_name == "fp8" and list(value["x"]) == ["data", "scale"]
    assert {name: value[name].dtype for name in ("n", "mask", "wave", "loss", "narrow", "sparse")} == {
        name: given[name].dtype for name in ("n", "mask", "wave", "loss", "narrow", "sparse")
    }
    assert torch.equal(value["loss"], given["loss"]) and torch.equal(value["n"], given["n"])
    back = hookline.dequantize(value)
    assert list(back) == list(given) and back["text"] == "a" and back["none"] is None
    for one in (back["x"], back["list"][0], back["list"][1][0]):
        assert torch.equal(one, value["x"].data.float() * value["x"].scale)
    assert back["loss"] is value["loss"] or torch.equal(back["loss"], value["loss"])


def test_the_value_has_the_same_form_after_loading(tmp_path: Path) -> None:
    x = torch.randn(4, 5)
    rec = kept({"a": x, "b": [x * 2]})
    rec.save(tmp_path / "run.hookline")
    live, loaded = rec["0"].output, hookline.load(tmp_path / "run.hookline")["0"].output
    assert type(live["a"]) is type(loaded["a"]) is Fields and live["a"].type_name == loaded["a"].type_name
    for one, other in ((live["a"], loaded["a"]), (live["b"][0], loaded["b"][0])):
        assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8))
        assert torch.equal(one.scale, other.scale)


def test_a_structure_of_the_model_that_looks_alike_is_not_mistaken() -> None:
    """Only a pair of the right dtypes and shapes under this name counts."""
    data, scale = torch.ones(2, 3).to(torch.float8_e4m3fn), torch.full((2, 1), 2.0)
    assert torch.equal(hookline.dequantize(Fields("fp8", {"data": data, "scale": scale})), torch.full((2, 3), 2.0))
    others = [
        Fields("Output", {"data": data, "scale": scale}), Fields("fp8", {"data": data, "scale": scale[:1]}),
        Fields("fp8", {"data": data.float(), "scale": scale}), Fields("fp8", {"data": data, "scale": 1.0}),
        {"data": data, "scale": scale},
    ]  # fmt: skip
    for other in others:
        found = hookline.dequantize(other)
        assert type(found) is type(other) and found["data"] is other["data"]
    model = nn.Sequential(Passes())
    with hookline.record(model, "0") as rec:
        model(Fields("Output", {"data": data, "scale": scale}))
    assert rec.rows("0:output", leaf="output.data").dtype == torch.float8_e4m3fn
    with pytest.raises(SiteError, match="no tensor at"):
        rec.rows("0:output", leaf="output")


def test_outputs_gradients_and_random_numbers_are_those_of_the_bare_model() -> None:
    bare = net()
    watched, x = copy.deepcopy(bare), torch.randn(6, 8)
    results = []
    for model, watch in ((bare, False), (watched, True)):
        torch.manual_seed(3)
        given = x.clone().requires_grad_()
        recorder = hookline.record(model, ports=PORTS, dtype="fp8") if watch else None
        if recorder is not None:
            recorder.__enter__()
        out = model(given)
        out.square().sum().backward()
        if recorder is not None:
            recorder.__exit__(None, None, None)
        results.append([out.detach(), given.grad, *(p.grad for p in model.parameters()), torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_gradients_are_kept_in_eight_bits_too() -> None:
    model, x = net(), torch.randn(6, 8)
    with hookline.record(model, "3", PORTS) as exact:
        torch.manual_seed(1)
        model(x).square().sum().backward()
    with hookline.record(model, "3", PORTS, dtype="fp8") as rec:
        torch.manual_seed(1)
        model(x).square().sum().backward()
    assert {event.port for event in rec} == set(PORTS)
    for event, other in zip(rec, exact, strict=True):
        (_, back), (_, true) = (next(iter(leaves)) for leaves in (_leaves(event), other.leaves()))
        scale = true.abs().amax(-1, keepdim=True) / 448
        assert back.dtype == torch.float32 and ((back - true).abs() <= true.abs() / 16 + scale / 1000).all()


def _leaves(event: Any) -> list[tuple[str, Tensor]]:
    value = hookline.dequantize(event.value)
    while not isinstance(value, Tensor):
        value = value[0]
    return [("", value)]


def test_later_writes_do_not_reach_what_was_kept() -> None:
    x = torch.ones(2, 3)
    model = nn.Sequential(Passes())
    with hookline.record(model, "0", dtype="fp8") as rec:
        model(x)
        x.zero_()
    assert torch.equal(hookline.dequantize(rec["0"].output), torch.ones(2, 3))


def test_it_works_in_inference_mode_and_under_vmap() -> None:
    model, x = nn.Sequential(Passes()), torch.randn(5, 3)
    with hookline.record(model, "0", dtype="fp8") as rec:
        with torch.inference_mode():
            model(x)
        torch.func.vmap(model)(x)
        torch.func.grad(lambda t: model(t).square().sum())(x)
    values = [call.output for call in rec["0"].calls]
    assert len(values) == 3
    for value in values:
        assert type(value.data) is Tensor and not value.data.is_inference()
        back = hookline.dequantize(value).reshape(5, 3)
        assert ((back - x).abs() <= x.abs() / 16 + 1e-2).all()


def test_reduce_and_keep_last_and_device() -> None:
    x = torch.randn(2, 4, 6)
    assert kept(x, reduce=lambda t: t.mean(1))["0"].output.scale.shape == (2, 1)
    assert kept(x, reduce=lambda t: t.norm().item())["0"].output.dtype == torch.float64
    rec = kept(x, x * 2, keep="last", budget=48 + 32)
    assert len(rec) == 1 and torch.equal(hookline.dequantize(rec["0"].output), _by_hand(x * 2))
    meta = kept(x, device="meta")
    assert meta["0"].output.data.is_meta and meta["0"].output.scale.is_meta and meta.nbytes == 0


# ---------------------------------------------------------------- options and sizes


@pytest.mark.parametrize(
    ("dtype", "near"),
    [("FP8", '; nearest: "fp8".'), ("fp-8", '"fp8"'), ("bf16", "torch.bfloat16"), ("torch.float16", "torch.float16")],
)
def test_another_text_is_refused_with_the_nearest(dtype: str, near: str) -> None:
    with pytest.raises(OptionError) as caught:
        hookline.record(net(), dtype=dtype)
    assert f'got "{dtype}", wanted "fp8" or a torch.dtype' in str(caught.value) and near in str(caught.value)
    with pytest.raises(OptionError):
        hookline.plan(net(), "**", torch.randn(2, 8), dtype=dtype)


def test_a_graph_cannot_be_kept() -> None:
    with pytest.raises(OptionError, match=r"keeps no graph.*leave detach=False out"):
        hookline.record(net(), dtype="fp8", detach=False)


def test_sizes_are_told_before_and_kept_within_the_budget(tmp_path: Path) -> None:
    model, x = net(), torch.randn(6, 8)
    with hookline.record(model, ports=PORTS, dtype="fp8") as rec:
        model(x).sum().backward()
    planned = hookline.plan(model, "**", x, ports=PORTS, dtype="fp8")
    assert planned.nbytes == rec.nbytes
    assert planned.sites["0:output"].nbytes == 6 * 16 + 6 * 4
    rec.save(tmp_path / "run.hookline")
    assert hookline.load(tmp_path / "run.hookline").nbytes == rec.nbytes
    reduced = {"ports": ("output",), "reduce": lambda t: t[:2], "dtype": "fp8"}
    assert hookline.plan(model, "0", x, **reduced).nbytes == 2 * 16 + 2 * 4
    kept(torch.randn(3, 10), budget=42)
    with pytest.raises(BudgetError):
        kept(torch.randn(3, 10), budget=41)
    with pytest.raises(BudgetError):
        kept(torch.randn(3, 10), budget=41, reduce=lambda t: t * 2)


def test_resume_wants_the_same_form(tmp_path: Path) -> None:
    kept(torch.randn(2, 3), to=tmp_path / "run.hookline")
    kept(torch.randn(2, 3), to=tmp_path / "run.hookline", resume=True)
    rec = hookline.load(tmp_path / "run.hookline")
    assert rec.info["kept"]["dtype"] == "fp8" and len(rec.rows("0:output")) == 4
    with (
        pytest.raises(OptionError, match="other ways of keeping values"),
        hookline.record(nn.Sequential(Passes()), "0", to=tmp_path / "run.hookline", resume=True),
    ):
        pass


# ---------------------------------------------------------------- rows


def _by_hand(x: Tensor) -> Tensor:
    """Eight bits and back, by searching the nearest of all 256 numbers of the format; ties go to the even code."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = torch.from_numpy(decoded(codes.view(torch.float8_e4m3fn))).nan_to_num(1e9)
    scale = (x.abs().amax(-1, keepdim=True) / 448).where(x.abs().amax(-1, keepdim=True) > 0, torch.ones(()))
    off = (numbers - (x / scale).double()[..., None]).abs() + (codes & 1) * 1e-12
    return (numbers[off.argmin(-1)].float() * scale).reshape(x.shape)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 3, 4)], ids=str)
def test_rows_are_float32(recorded: Any, place: str, shape: tuple[int, ...]) -> None:
    steps = [torch.randn(size, *shape) * 10**size for size in (3, 1, 5)]
    rows, expected = recorded(*steps).rows("0:output"), torch.cat([_by_hand(x) for x in steps])
    assert isinstance(rows, Rows) and rows.dtype == torch.float32 and rows.shape == expected.shape
    assert rows.leaf == "output" and rows.nbytes == expected.numel() * 4
    for index in (
        slice(None),
        slice(2, 5),
        slice(None, None, -2),
        [7, 0, 3, 3],
        expected.flatten(1)[:, 0] > 0,
        slice(3, 3),
    ):
        found = rows[index]
        wanted = expected[list(range(9))[index]] if isinstance(index, slice) else expected[index]
        assert found.dtype == torch.float32 and torch.equal(found, wanted)
    assert torch.equal(rows[4], expected[4]) and torch.equal(rows[-1], expected[-1])
    assert torch.equal(torch.stack(list(rows)), expected)
    assert [part.tolist() for part in rows.split(4)] == [part.tolist() for part in expected.split(4)]
    assert np.array_equal(np.asarray(rows), expected.numpy())
    assert torch.equal(torch.from_dlpack(rows), expected)
    if place != "memory":  # torch cannot pickle tensors in eight bits
        assert torch.equal(pickle.loads(pickle.dumps(rows))[1:4], expected[1:4])
    assert rows.place(3)[:4] == (1, 0, 0, 0)
    assert rows.origins() == [(0, 0, 0, 3), (1, 0, 0, 1), (2, 0, 0, 5)]


def test_rows_of_values_with_one_dimension_share_a_scale(recorded: Any) -> None:
    steps = [torch.randn(size) * 10**size for size in (3, 1, 5)]
    rows, expected = recorded(*steps).rows("0:output"), torch.cat([_by_hand(x) for x in steps])
    assert rows.shape == (9,)
    for index in (slice(None), slice(2, 5), [7, 0, 3, 3], expected > 0, slice(3, 3)):
        assert torch.equal(rows[index], expected[index])
    assert torch.equal(rows[4], expected[4]) and torch.equal(torch.stack(list(rows)), expected)
    with pytest.raises(IndexError):
        rows[9]


def test_several_tensors_and_those_as_they_are_kept(recorded: Any) -> None:
    x = torch.randn(3, 4)
    rec = recorded({"a": x, "n": x.argmax(-1)})
    assert torch.equal(rec.rows("0:output", leaf="output['a']")[:], _by_hand(x))
    assert torch.equal(rec.rows("0:output", leaf="output['n']")[:], x.argmax(-1))
    assert rec.rows("0:output", leaf="output['a'].data").dtype == torch.float8_e4m3fn
    assert rec.rows("0:output", leaf="output['a'].scale").shape == (3, 1)
    with pytest.raises(OptionError, match=r"one of \"output\['a'\]\", \"output\['n'\]\"\."):
        rec.rows("0:output")


def test_calls_with_and_without_a_dimension_do_not_mix(recorded: Any) -> None:
    rec = recorded(torch.randn(3), torch.randn(()))
    with pytest.raises(OptionError, match="rows need one"):
        rec.rows("0:output")
    assert len(rec.select("0", steps=0).rows("0:output")) == 3


def test_reading_a_row_reads_the_bytes_of_that_row_alone(tmp_path: Path) -> None:
    """Every byte but those of the row is damaged on disk, and the row is still right."""
    x = torch.randn(64, 32)
    kept(x, to=tmp_path / "run.hookline")
    (shard,) = (tmp_path / "run.hookline").rglob("*.safetensors")
    event = hookline.load(tmp_path / "run.hookline").events[0]
    (memory, data), (_, scale) = event.span(0), event.span(1)
    spare = bytes(memory[data + 7 * 32 : data + 8 * 32]), bytes(memory[scale + 28 : scale + 32])
    raw = bytearray(shard.read_bytes())
    assert len(raw) == len(memory), "the span counts from the beginning of the file"
    for begin, size in ((data, x.numel()), (scale, 64 * 4)):
        raw[begin : begin + size] = b"\x7f" * size
    raw[data + 7 * 32 : data + 8 * 32], raw[scale + 28 : scale + 32] = spare
    shard.write_bytes(raw)
    rows = hookline.load(tmp_path / "run.hookline").rows("0:output")
    assert torch.equal(rows[7], _by_hand(x)[7]) and rows[6].isnan().all()


def test_batches_have_identity_and_float32(recorded: Any, tmp_path: Path) -> None:
    x = torch.randn(3, 4, 8)
    model = nn.Sequential(Passes())
    with hookline.record(model, "0", dtype="fp8", to=tmp_path / "b.hookline") as rec:
        tokens = torch.arange(12).view(3, 4)
        batch = rec.batch(ids=[5, 6, 7], tokens=tokens, mask=tokens % 3 > 0)
        with batch:
            model(x)
    chosen = (torch.arange(12) % 3 > 0).nonzero().flatten()
    rows = hookline.load(tmp_path / "b.hookline").rows("0:output")
    assert torch.equal(rows[:], _by_hand(x.view(12, 8)[chosen]))
    assert torch.equal(rows.identity()["token"], chosen) and rows.have_identity
    batches = hookline.load(tmp_path / "b.hookline").dataset("0:output", batch_size=3, shuffle=True)
    for batch in batches:
        assert batch["0:output"].dtype == torch.float32
        assert torch.equal(batch["0:output"], _by_hand(x.view(12, 8)[batch["token"]]))


def test_the_kinds_of_rows_are_those_of_data_and_scale() -> None:
    model = nn.Sequential(Passes())
    with hookline.record(model, "0", dtype="fp8") as rec, rec.batch(ids=[1, 2, 3]):
        model((torch.randn(3, 4), torch.randn(3), torch.randn(2, 3), torch.arange(3)))
    assert rec.events[0].rows() == {
        "output[0].data": "samples", "output[0].scale": "samples", "output[1].data": "samples", "output[3]": "samples",
    }  # fmt: skip
    assert rec.rows("0:output", leaf="output[1]").identity()["id"].tolist() == [1, 2, 3]


# ---------------------------------------------------------------- what else reads a recording


def test_statistics_are_of_data_and_scale_as_they_are_kept(recorded: Any) -> None:
    x = torch.randn(3, 4)
    event = recorded(x).events[0]
    found = event.summaries()
    assert list(found) == ["output.data", "output.scale"]
    data, scale = decoded(event.value.data), event.value.scale
    assert found["output.data"].max == data.max() and math.isclose(found["output.data"].mean, data.mean(), rel_tol=1e-6)
    assert found["output.scale"].max == scale.max().item()


def test_plots_draw_what_the_model_had() -> None:
    model, x = net(), torch.randn(6, 8)
    with hookline.record(model, "3", "grad_output", dtype="fp8") as rec:
        model(x).sum().backward()
    pytest.importorskip("matplotlib")
    from hookline.report.plot.flow import _layers

    (layer,) = _layers(rec, "grad_output")
    assert layer.largest == layer.median == 1.0 and layer.summary.numel == 24, "all of these gradients are 1"
    from hookline.report.plot.reading import one_tensor

    tensor = one_tensor(rec["3"].grad_output, "feature_maps")
    assert tensor.dtype == torch.float32 and torch.equal(tensor, torch.ones(6, 4))


@pytest.mark.parametrize("to", ["parquet", "zarr"])
def test_formats_of_rows_get_float32(recorded: Any, to: str, tmp_path: Path, zarr: Any) -> None:
    pytest.importorskip("pyarrow")
    x = torch.randn(3, 2, 4)
    model = nn.Sequential(nn.Identity())
    with hookline.record(model, "0", dtype="fp8", to=tmp_path / "run") as rec:
        for step, value in enumerate((x, x * 3)):
            with rec.batch(ids=[3 * step, 3 * step + 1, 3 * step + 2]):
                model(value)
    hookline.load(tmp_path / "run").export(tmp_path / "out", to)
    expected = torch.cat([_by_hand(x), _by_hand(x * 3)]).numpy()
    if to == "parquet":
        import pyarrow.parquet

        (file,) = (tmp_path / "out").iterdir()
        assert file.name == "0.output.parquet"
        table = pyarrow.parquet.read_table(file)
        found = np.array(table["value"].to_pylist(), dtype=np.float32).reshape(6, 2, 4)
        assert table["id"].to_pylist() == list(range(6))
    else:
        found = zarr.open_group(str(tmp_path / "out"), mode="r")["0.output"]["value"][:]
    assert found.dtype == np.float32 and np.array_equal(found, expected)


def test_safetensors_has_data_and_scale_and_npz_refuses(recorded: Any, tmp_path: Path) -> None:
    import safetensors.torch

    x = torch.randn(3, 4)
    rec = recorded(x)
    rec.export(tmp_path / "out.safetensors", "safetensors")
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    names = sorted(found)
    assert [name.rpartition("/")[2] for name in names] == ["output.data", "output.scale"]
    assert torch.equal(found[names[0]].float() * found[names[1]], _by_hand(x))
    with pytest.raises(OptionError, match="npz has no exact type for float8_e4m3fn"):
        rec.export(tmp_path / "out.npz", "npz")


def test_rows_can_be_computed_again(tmp_path: Path) -> None:
    model, x = net().eval(), torch.randn(6, 8)
    with hookline.record(model, dtype="fp8", to=tmp_path / "run.hookline"):
        model(x)
    found = hookline.verify(tmp_path / "run.hookline", model=model, inputs=[x], rows=1000)
    assert found and found.recomputed and not found.problems
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    assert hookline.verify(tmp_path / "run.hookline", model=model, inputs=[x], rows=1000).mismatches
