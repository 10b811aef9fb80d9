"""Summaries against numpy in float64 and exact fractions, for every dtype, layout and size."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from torch import Tensor

from hookline.errors import ArgumentError, FormatError
from hookline.stats import Summary, compute, merge, native, summarize, summarize_all
from hookline.stats import pieces as pieces_module
from hookline.stats.pieces import pieces

NAN, INF = math.nan, math.inf
NUMBERS = ("mean", "std", "min", "max", "l2")
COUNTS = ("numel", "nan", "inf", "neg_inf", "zeros", "subnormal")


@pytest.fixture(autouse=True, params=["kernel", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Everything holds with the C kernel and in plain torch operations."""
    if request.param == "plain":
        monkeypatch.setattr(native, "_kernel", None)
    else:
        assert native.available(), "the kernel was not built: python hatch_build.py says why"
    return str(request.param)


def expected(values: Any, smallest: float = 0.0) -> Summary:
    """The definition, by numpy; ``smallest`` is the smallest normal number of the dtype."""
    x = np.asarray(values)
    x = np.abs(x) if np.iscomplexobj(x) else x.astype(np.float64)
    x = x.ravel()
    f = x[np.isfinite(x)]
    numbers = (f.mean(), f.std(), f.min(), f.max(), np.sqrt((f * f).sum())) if f.size else (NAN,) * 5
    counts = (np.isnan(x), np.isinf(x), x == -INF, x == 0, (np.abs(x) < smallest) & (x != 0))
    return Summary(x.size, *(float(number) for number in numbers), *(int(count.sum()) for count in counts))


def assert_close(got: Summary, want: Summary, rel: float = 1e-12) -> None:
    for name in COUNTS:
        assert getattr(got, name) == getattr(want, name), name
    for name in NUMBERS:
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=rel, abs=1e-300, nan_ok=True), name


# ---------------------------------------------------------------- values


def test_counts_and_statistics_over_the_finite_elements() -> None:
    got = summarize(torch.tensor([3.0, NAN, 0.0, INF, -1.0, -INF, -0.0, 2.0]))
    assert (got.numel, got.nan, got.inf, got.zeros) == (8, 1, 2, 2)
    assert (got.min, got.max) == (-1.0, 3.0)
    assert got.mean == pytest.approx(0.8, rel=1e-15)
    assert got.l2 == pytest.approx(math.sqrt(14))
    assert got.std == pytest.approx(math.sqrt(14 / 5 - 0.8**2))  # the divisor is the number of finite elements
    assert not got.finite
    assert not got.all_zero


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8, *UNSIGNED, *SIGNED, torch.bool], ids=str)
def test_every_real_dtype(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0, 3.0], [100.0, 7.0, 0.0]]).to(dtype)
    assert_close(summarize(tensor), expected([[float(v) for v in row] for row in tensor.to(torch.float64).tolist()]))


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8], ids=str)
def test_nan_in_every_float_dtype(dtype: torch.dtype) -> None:
    got = summarize(torch.tensor([1.0, NAN, 2.0]).to(dtype))
    assert (got.nan, got.inf, got.mean) == (1, 0, 1.5)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2], ids=str)
def test_inf_in_every_float_dtype_that_has_it(dtype: torch.dtype) -> None:
    got = summarize(torch.tensor([1.0, INF, 2.0]).to(dtype))
    assert (got.nan, got.inf, got.mean) == (0, 1, 1.5)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_counts_by_magnitude(dtype: torch.dtype) -> None:
    values = [3 + 4j, 0j, complex(NAN, 1.0), complex(INF, NAN), -5j]
    assert_close(summarize(torch.tensor(values, dtype=dtype)), expected([5.0, 0.0, NAN, INF, 5.0]))


def test_half_complex() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that ComplexHalf is experimental
        tensor = torch.tensor([3 + 4j, 0j]).to(torch.complex32)
        assert_close(summarize(tensor), expected([5.0, 0.0]))


def test_largest_magnitude_of_complex64_does_not_overflow() -> None:
    assert summarize(torch.tensor([3e38 + 3e38j])).max == pytest.approx(3e38 * math.sqrt(2), rel=1e-6)


def test_integers_do_not_overflow() -> None:
    big = summarize(torch.full((1000,), 2**62, dtype=torch.int64))
    assert (big.mean, big.std) == (2.0**62, 0.0)
    assert big.l2 == pytest.approx(2.0**62 * math.sqrt(1000), rel=1e-15)
    assert summarize(torch.tensor([2**64 - 1], dtype=torch.uint64)).max == 2.0**64


def test_float16_squares_do_not_overflow() -> None:
    assert summarize(torch.full((4,), 60000.0, dtype=torch.float16)).l2 == 2 * 60000.0


def test_boolean_mean_is_the_share_of_true() -> None:
    got = summarize(torch.tensor([True, False, True, True]))
    assert (got.mean, got.min, got.max, got.zeros) == (0.75, 0.0, 1.0, 1)


# ---------------------------------------------------------------- nothing, one, all the same


def test_empty_has_no_statistics() -> None:
    got = summarize(torch.empty(0, 3))
    assert (got.numel, got.nan, got.inf, got.zeros) == (0, 0, 0, 0)
    assert all(math.isnan(getattr(got, name)) for name in NUMBERS)
    assert got.finite
    assert not got.all_zero


def test_scalar() -> None:
    assert summarize(torch.tensor(-3.0)) == Summary(1, -3.0, 0.0, -3.0, -3.0, 3.0, 0, 0, 0, 0, 0)


def test_nothing_finite() -> None:
    got = summarize(torch.tensor([NAN, INF, -INF]))
    assert (got.nan, got.inf) == (1, 2)
    assert all(math.isnan(getattr(got, name)) for name in NUMBERS)


def test_all_zero() -> None:
    got = summarize(torch.zeros(2, 3))
    assert got.all_zero
    assert (got.mean, got.std, got.l2) == (0.0, 0.0, 0.0)
    assert not summarize(torch.tensor([0.0, NAN])).all_zero


@pytest.mark.parametrize("count", [1000, 200_000])
@pytest.mark.parametrize("value", [0.1, 1e-30, 3e38])
def test_a_constant_has_no_deviation_at_all(value: float, count: int) -> None:
    tensor = torch.full((count,), value)
    got = summarize(tensor)
    assert got.std == 0.0
    assert got.mean == got.min == got.max == tensor[0].item()


# ---------------------------------------------------------------- hard numbers


@pytest.mark.parametrize("scale", [1e300, 1e200, 1e-200, 1e-300])
def test_squares_that_leave_float64(scale: float) -> None:
    got = summarize(torch.tensor([3.0, 4.0], dtype=torch.float64) * scale)
    assert got.l2 == pytest.approx(5 * scale, rel=1e-14)
    assert got.mean == pytest.approx(3.5 * scale, rel=1e-14)
    assert got.std == pytest.approx(0.5 * scale, rel=1e-14)


def test_both_ends_of_float64() -> None:
    top = np.finfo(np.float64).max
    got = summarize(torch.tensor([top, -top], dtype=torch.float64))
    assert (got.mean, got.min, got.max) == (0.0, -top, top)
    assert got.std == pytest.approx(top, rel=1e-14)
    tiny = summarize(torch.tensor([5e-324, 5e-324], dtype=torch.float64))
    assert (tiny.mean, tiny.std) == (5e-324, 0.0)


def test_norm_of_float32_is_computed_in_float64() -> None:
    assert summarize(torch.full((3,), 3e38)).l2 == pytest.approx(math.sqrt(3) * float(np.float32(3e38)), rel=1e-14)


@pytest.mark.parametrize(("mean", "step"), [(1e9, 1e-3), (1e12, 0.5), (-1e15, 1.0)])
def test_small_deviation_around_a_large_mean(mean: float, step: float) -> None:
    values = [mean + step * (index % 7) for index in range(100_000)]
    exact_mean = sum(map(Fraction, values)) / len(values)
    exact_variance = sum((Fraction(value) - exact_mean) ** 2 for value in values) / len(values)
    got = summarize(torch.tensor(values, dtype=torch.float64))
    assert got.std == pytest.approx(math.sqrt(exact_variance), rel=1e-8)
    assert got.mean == pytest.approx(float(exact_mean), rel=1e-15)


@settings(max_examples=60, deadline=None)
@given(nps.arrays(np.float64, nps.array_shapes(max_dims=3, max_side=8), elements=st.floats(-1e6, 1e6, width=32)))
def test_any_values_agree_with_numpy(values: np.ndarray) -> None:
    got, want = summarize(torch.from_numpy(values)), expected(values)
    largest = float(np.abs(values).max())
    assert got.mean == pytest.approx(want.mean, rel=1e-12, abs=1e-14 * largest)
    assert got.std == pytest.approx(want.std, rel=1e-9, abs=1e-14 * largest)
    assert got.l2 == pytest.approx(want.l2, rel=1e-12, abs=1e-200)
    assert (got.min, got.max, got.zeros) == (want.min, want.max, want.zeros)


# ---------------------------------------------------------------- memory and chunks


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "CPU_CHUNK", 50)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 3),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "strided": lambda x: x[:, ::2, :, 1::3],
    "expanded": lambda x: x[:1].expand(5, -1, -1, -1),
    "flipped": lambda x: x.flip(2),
    "one long row": lambda x: x.reshape(1, -1),
}


@pytest.mark.parametrize("view", list(VIEWS.values()), ids=list(VIEWS))
@pytest.mark.usefixtures("small_chunks")
def test_chunks_of_any_view(view: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 4, 5, 7, dtype=torch.float64)
    x[0, 0, 0, :3] = torch.tensor([NAN, INF, 0.0])
    tensor = view(x)
    assert_close(summarize(tensor), expected(tensor.numpy()), rel=1e-12)


@pytest.mark.usefixtures("small_chunks")
def test_pieces_are_small_views_that_hold_every_element_once() -> None:
    x = torch.arange(840).reshape(3, 4, 5, 14).transpose(1, 3)
    found = list(pieces(x))
    assert all(piece.numel() <= 50 and times == 1 for piece, times in found)
    assert {piece.untyped_storage().data_ptr() for piece, _ in found} == {x.untyped_storage().data_ptr()}
    assert sorted(v for piece, _ in found for v in piece.flatten().tolist()) == list(range(840))


def test_a_large_tensor_is_never_upcast_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_kernel", None)
    seen: list[int] = []
    real = compute.as_float64
    monkeypatch.setattr(compute, "as_float64", lambda piece: seen.append(piece.numel()) or real(piece))
    summarize(torch.ones(1 << 20, dtype=torch.float16))
    assert sum(seen) == 1 << 20
    assert max(seen) <= pieces_module.CPU_CHUNK < 1 << 20


# ---------------------------------------------------------------- layouts

DENSE = torch.tensor([[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, -3.0], [0.0, 0.0, 0.0, 0.0], [5.0, 0.0, 0.0, NAN]])
SPARSE: dict[str, Callable[[], Tensor]] = {
    "coo": DENSE.to_sparse,
    "csr": DENSE.to_sparse_csr,
    "csc": DENSE.to_sparse_csc,
    "bsr": lambda: DENSE.to_sparse_bsr((2, 2)),
    "bsc": lambda: DENSE.to_sparse_bsc((2, 2)),
    "mkldnn": DENSE.to_mkldnn,
}


@pytest.mark.parametrize("make", list(SPARSE.values()), ids=list(SPARSE))
def test_sparse_counts_as_what_it_stands_for(make: Callable[[], Tensor]) -> None:
    if make == DENSE.to_mkldnn and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without mkldnn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that sparse layouts are in beta
        tensor = make()
    assert_close(summarize(tensor), expected(DENSE.numpy()))


def test_duplicate_entries_of_a_sparse_tensor_add_up() -> None:
    tensor = torch.sparse_coo_tensor([[0, 0], [1, 1]], [2.0, 5.0], (2, 2), check_invariants=True)
    assert_close(summarize(tensor), expected([0.0, 7.0, 0.0, 0.0]))


def test_a_sparse_shape_larger_than_any_memory() -> None:
    tensor = torch.sparse_coo_tensor([[1], [2]], [3.0], (10**7, 10**7), check_invariants=True)
    got = summarize(tensor)
    assert (got.numel, got.zeros, got.max) == (10**14, 10**14 - 1, 3.0)
    assert got.mean == pytest.approx(3e-14, rel=1e-12)
    assert got.std == pytest.approx(3e-7, rel=1e-6)
    assert got.l2 == 3.0


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch announces that nested tensors are in prototype
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested(layout: torch.layout) -> None:
    tensor = torch.nested.nested_tensor([torch.ones(2, 3), 2 * torch.ones(1, 3)], layout=layout)
    assert_close(summarize(tensor), expected([1.0] * 6 + [2.0] * 3))


def _quantized(per_channel: bool) -> Tensor:
    values = torch.tensor([[0.0, 0.5], [1.0, -2.0]])
    if per_channel:
        return torch.quantize_per_channel(values, torch.tensor([0.5, 0.5]), torch.tensor([0, 0]), 0, torch.qint8)
    return torch.quantize_per_tensor(values, 0.5, 0, torch.qint8)


@pytest.mark.parametrize("per_channel", [False, True])
def test_quantized(per_channel: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in recent releases, but models that use it are around
        tensor = _quantized(per_channel)
    assert_close(summarize(tensor), expected([0.0, 0.5, 1.0, -2.0]))


# ---------------------------------------------------------------- values that cannot be read


def _fake() -> Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


UNREADABLE: dict[str, Callable[[], Tensor]] = {
    "meta": lambda: torch.empty(3, device="meta"),
    "fake": _fake,
    "sub-byte": lambda: torch.empty(3, dtype=torch.uint4),
}


@pytest.mark.parametrize("make", list(UNREADABLE.values()), ids=list(UNREADABLE))
def test_unreadable_values_are_unknown(make: Callable[[], Tensor]) -> None:
    got = summarize(make())
    assert (got.numel, got.nan, got.inf, got.zeros) == (3, 0, 0, 0)
    assert all(math.isnan(getattr(got, name)) for name in NUMBERS)
    assert not got.all_zero


def test_inside_vmap_only_the_size_is_known() -> None:
    seen: list[Summary] = []

    def look(x: Tensor) -> Tensor:
        seen.append(summarize(x))
        return x

    torch.func.vmap(look)(torch.ones(2, 3))
    assert seen[0].numel == 3
    assert math.isnan(seen[0].mean)


def test_an_error_of_the_device_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_kernel", None)

    def fail() -> Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(Tensor, "amin", lambda *_, **__: fail())
    with pytest.raises(RuntimeError, match="device-side assert"):
        summarize(torch.ones(3))


def test_only_tensors() -> None:
    with pytest.raises(ArgumentError, match=r"summarize takes a torch\.Tensor; got list"):
        summarize([1.0])  # type: ignore[arg-type]


# ---------------------------------------------------------------- a guest in somebody's process


@pytest.mark.same_rng
def test_leaves_no_trace() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    version = y._version
    summarize(y)
    assert (y._version, torch.is_grad_enabled()) == (version, True)
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0, 2.0]


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mode", list(MODES.values()), ids=list(MODES))
def test_same_result_in_every_mode(mode: Callable[[], Any]) -> None:
    x = torch.tensor([0.1, 0.2, 0.4])
    with mode():
        got = summarize(x)
    assert_close(got, expected(x.numpy()))


def test_inference_tensors_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.tensor([1.0, 3.0])
    assert summarize(x).mean == 2.0


def test_default_dtype_does_not_matter() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        got = summarize(torch.full((5,), 1e200, dtype=torch.float64))
    finally:
        torch.set_default_dtype(before)
    assert got.max == 1e200


def test_parameters_and_subclasses() -> None:
    class Own(Tensor):
        pass

    assert summarize(torch.nn.Parameter(torch.ones(2))).mean == 1.0
    assert summarize(torch.ones(2).as_subclass(Own)).mean == 1.0


@pytest.mark.cuda
def test_cuda_agrees_with_the_cpu() -> None:
    x = torch.randn(100_000)
    x[:3] = torch.tensor([NAN, INF, 0.0])
    for dtype in (*FLOATS, *FLOAT8):
        assert_close(summarize(x.to(dtype).cuda()), summarize(x.to(dtype)), rel=1e-10)


# ---------------------------------------------------------------- merge


@settings(max_examples=40, deadline=None)
@given(
    nps.arrays(np.float64, st.integers(1, 40), elements=st.sampled_from([NAN, INF, 0.0, 1.5, -2.0, 1e3, 7e-3])),
    st.lists(st.integers(0, 40), max_size=4),
)
def test_parts_merge_to_the_whole(values: np.ndarray, cuts: list[int]) -> None:
    parts = [summarize(torch.from_numpy(part)) for part in np.split(values, sorted(cuts))]
    got, want = merge(parts), expected(values)
    assert got.std == pytest.approx(want.std, rel=1e-9, abs=1e-12, nan_ok=True)
    assert got.mean == pytest.approx(want.mean, rel=1e-9, abs=1e-12, nan_ok=True)
    assert_close(dataclasses.replace(got, std=want.std, mean=want.mean), want, rel=1e-9)


def test_merge_of_nothing() -> None:
    assert merge([]).numel == 0


def test_merge_of_means_that_cannot_be() -> None:
    """A file may hold them: without a finite element, or infinite."""
    right = summarize(torch.tensor([1.0, 3.0]))
    nobodys = dataclasses.replace(right, nan=2)
    endless = [dataclasses.replace(right, mean=mean) for mean in (math.inf, -math.inf)]
    assert merge([nobodys, right, *endless]) == dataclasses.replace(right, numel=8, nan=2)
    assert math.isnan(merge([nobodys, nobodys]).mean)


def test_merge_does_not_overflow() -> None:
    got = merge([summarize(torch.full((2,), v, dtype=torch.float64)) for v in (1e300, -1e300)])
    assert (got.mean, got.std) == (0.0, 1e300)
    assert got.l2 == pytest.approx(2e300)


# ---------------------------------------------------------------- to and from JSON


@pytest.mark.parametrize("values", [[1.0, 2.5], [NAN], [], [INF, 0.0], [1e300]])
def test_json_round_trip(values: list[float]) -> None:
    summary = summarize(torch.tensor(values, dtype=torch.float64))
    text = json.dumps(summary.to_dict(), allow_nan=False)
    assert repr(Summary.from_dict(json.loads(text))) == repr(summary)


def test_json_words() -> None:
    fields = Summary(4, NAN, INF, -INF, 1.0, 2.0, 1, 2, 1, 0, 0).to_dict()
    assert (fields["mean"], fields["std"], fields["min"], fields["max"]) == ("nan", "inf", "-inf", 1.0)


GOOD = Summary(4, 1.0, 0.5, 0.0, 2.0, 3.0, 0, 0, 0, 1, 0).to_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numel": -1}, "'numel' must be a whole number of at least 0; got -1"),
        ({"numel": 4.0}, r"'numel' must be a whole number of at least 0; got 4\.0"),
        ({"nan": True}, "'nan' must be a whole number"),
        ({"mean": "many"}, "'mean' must be a number, 'nan', 'inf' or '-inf'; got 'many'"),
        ({"mean": True}, "'mean' must be a number"),
        ({"mean": None}, "'mean' must be a number"),
        ({"mean": [1.0]}, "'mean' must be a number"),
        ({"mean": NAN}, "'mean' must be a number"),
        ({"mean": 10**400}, "'mean' must be a number"),
        ({"zeros": 5}, "more NaN, Inf, zero and subnormal elements than its numel"),
        ({"neg_inf": 1}, "more -Inf than Inf elements"),
        ({"extra": 1}, r"missing \[\], unknown \['extra'\]"),
    ],
)
def test_from_dict_tells_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Summary.from_dict({**GOOD, **change})


def test_from_dict_needs_every_field() -> None:
    with pytest.raises(FormatError, match=r"missing \['l2'\], unknown \[\]"):
        Summary.from_dict({name: value for name, value in GOOD.items() if name != "l2"})
    with pytest.raises(FormatError, match="got list"):
        Summary.from_dict([])  # type: ignore[arg-type]


def test_from_dict_takes_whole_numbers_for_statistics() -> None:
    assert Summary.from_dict({**GOOD, "mean": 1}) == Summary.from_dict(GOOD)


# ---------------------------------------------------------------- many at once


@st.composite
def some_tensors(draw: st.DrawFn) -> list[Tensor]:
    """Tensors of a few sizes and dtypes, some of them in another layout, with values of every magnitude."""
    number = st.floats(width=32) | st.floats(-2, 2, width=16) | st.sampled_from([0.0, 1e-40, 1e30, 1e4])
    found = []
    for _ in range(draw(st.integers(0, 12))):
        size = draw(st.sampled_from([1, 2, 7, 300, 5000]))
        values = draw(st.lists(number, min_size=1, max_size=min(size, 7)))
        tensor = torch.tensor(values, dtype=torch.float32).repeat(size // len(values) + 1)[:size]
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int32]))
        tensor = tensor.nan_to_num(0, 0, 0).clamp(-1e9, 1e9).to(dtype) if dtype is torch.int32 else tensor.to(dtype)
        found.append(draw(st.sampled_from([tensor, tensor[::2], tensor[:0], tensor.view(-1, 1).t()])))
    return found


@settings(max_examples=200, deadline=None)
@given(some_tensors())
def test_many_at_once_give_the_same_bits_as_one_by_one(tensors: list[Tensor]) -> None:
    got, want = summarize_all(tensors), [summarize(tensor) for tensor in tensors]
    assert [repr(one) for one in got] == [repr(one) for one in want]


def test_many_at_once_where_some_cannot_be_read() -> None:
    tensors = [torch.ones(3), torch.ones(3, device="meta"), torch.eye(3).to_sparse(), torch.ones(3), torch.ones(0)]
    assert [one.numel for one in summarize_all(tensors)] == [3, 3, 9, 3, 0]
    assert [one.zeros for one in summarize_all(tensors)] == [0, 0, 6, 0, 0]
    with pytest.raises(ArgumentError, match=r"^summarize takes a torch\.Tensor; got int"):
        summarize_all([torch.ones(3), 3])  # type: ignore[list-item]


@pytest.mark.parametrize("threads", [1, 2])
def test_many_at_once_do_not_depend_on_their_neighbours(threads: int) -> None:
    """A row among 128 others and alone, random values of each size up to what is taken together."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size in (3, 64, 511, 512, 1000, 4096):
            rows = torch.randn(128, size)
            assert summarize_all(list(rows)) == [summarize(row) for row in rows]
    finally:
        torch.set_num_threads(before)


def test_statistics_do_not_make_a_snapshot_real() -> None:
    for dtype in (torch.float32, torch.float64):
        tensors = [torch._lazy_clone(torch.randn(size, dtype=dtype)) for size in (5, 5, 100_000)]
        summarize_all(tensors)
        assert all(map(torch._C._is_cow_tensor, tensors))
