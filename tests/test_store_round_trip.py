"""What is written to a recording comes back with the same bits, types and names."""

from __future__ import annotations

import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from hookline import store
from hookline.errors import ArgumentError
from hookline.record.event import Event
from hookline.store import ModuleInfo, StoredEvent
from hookline.values import Arguments, Fields, Opaque, walk

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *FP8, *WHOLE, torch.bool, *COMPLEX]
RARE = ["complex32", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16", "int4", "uint1"]


def event(value: Any, order: int = 0, path: str = "layer", port: str = "output", **where: int) -> Event:
    place = {"step": 0, "call": 0, "backward": 0, **where}
    return Event(order, place["step"], path, port, place["call"], place["backward"], value, {})


def round_trip(folder: Path, *values: Any, port: str = "output") -> list[StoredEvent]:
    events = [event(value, order, port=port) for order, value in enumerate(values)]
    store.save(folder, info={}, modules={}, events=events, overwrite=True)
    return store.open_recording(folder).events


def bits(tensor: Tensor) -> list[int]:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype.itemsize == 1:
        plain = plain.view(torch.uint8)  # torch copies no int4
    plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8).tolist()


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Every bit pattern may occur: NaNs with a payload, subnormal numbers, negative zeros."""
    count = math.prod(shape)
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    data = torch.randint(0, 256, (max(1, count * dtype.itemsize),), dtype=torch.uint8)
    return data[: count * dtype.itemsize].clone().view(dtype).view(shape)


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right), (left, right)
    if isinstance(left, Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert bits(left) == bits(right)
    elif isinstance(left, dict):
        assert [(type(key), key) for key in left] == [(type(key), key) for key in right]
        assert getattr(left, "type_name", None) == getattr(right, "type_name", None)
        for one, other in zip(left.values(), right.values(), strict=True):
            assert_same(one, other)
    elif isinstance(left, (tuple, list)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert repr(left) == repr(right)  # so that nan is nan and -0.0 is not 0.0


# ---------------------------------------------------------------- the property

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
KEYS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
NAMES = st.text(max_size=8)
SHAPES = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    tensor = random_bits(draw(st.sampled_from(DTYPES)), *draw(SHAPES))
    change = draw(st.sampled_from(["none", "transposed", "expanded", "strided", "conj", "grad"]))
    if change == "transposed":
        return tensor.movedim(0, -1) if tensor.dim() else tensor
    if change == "expanded":
        return tensor.unsqueeze(0).expand(2, *tensor.shape)
    if change == "strided" and tensor.dim():
        return tensor[::2]
    if change == "conj" and tensor.is_complex():
        return tensor.conj() if draw(st.booleans()) else tensor.conj().imag
    return tensor.requires_grad_() if change == "grad" and tensor.dtype in FLOATS else tensor


def containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(values, max_size=3)
    return (
        some
        | some.map(tuple)
        | st.dictionaries(KEYS, values, max_size=3)
        | st.builds(Fields, NAMES, st.dictionaries(NAMES, values, max_size=3))
    )


KEPT = st.recursive(tensors() | SCALARS | st.builds(Opaque, NAMES), containers, max_leaves=12)
CALLS = st.builds(Arguments, st.lists(KEPT, max_size=3).map(tuple), st.dictionaries(NAMES, KEPT, max_size=2))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(KEPT, max_size=4), CALLS)
def test_every_kept_value_comes_back(values: list[Any], call: Arguments) -> None:
    with tempfile.TemporaryDirectory() as parent, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hypothesis draws floats that numpy warns about in its own repr
        found = round_trip(Path(parent, "run.hookline"), *values, call, port="input")
        for stored, value in zip(found, [*values, call], strict=True):
            assert_same(stored.value, value)
            leaves = [(path, leaf) for path, leaf in walk(value, "args") if isinstance(leaf, Tensor)]
            assert [path for path, _ in stored.leaves()] == [path for path, _ in leaves]
            assert [bits(leaf) for _, leaf in stored.leaves()] == [bits(leaf) for _, leaf in leaves]


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_bits_of_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = random_bits(dtype, 5, 7)
    (found,) = round_trip(tmp_path / "run", tensor)
    assert_same(found.value, tensor)
    assert found.nbytes == 35 * dtype.itemsize
    assert not found.conversions()


@pytest.mark.parametrize("name", RARE)
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_rare_dtypes_of_this_torch(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip("not in this torch")
    tensor = random_bits(dtype, 6)
    found, strided, empty = round_trip(tmp_path / "run", tensor, tensor[::2], tensor[:0])
    assert_same(found.value, tensor)
    assert_same(strided.value, tensor[::2])
    assert_same(empty.value, tensor[:0])


def test_elements_of_all_sizes_mixed_stay_aligned(tmp_path: Path) -> None:
    values = [random_bits(dtype, size) for size in (1, 3, 0) for dtype in DTYPES]
    for stored, value in zip(round_trip(tmp_path / "run", *values), values, strict=True):
        assert_same(stored.value, value)
        assert stored.value.data_ptr() % value.dtype.itemsize == 0


def test_tensors_that_share_memory_come_back_apart(tmp_path: Path) -> None:
    tensor = torch.arange(6.0)
    first, second, third = [found.value for found in round_trip(tmp_path / "run", tensor, tensor, tensor[2:4])]
    first.zero_()
    assert second.tolist() == tensor.tolist()
    assert third.tolist() == [2.0, 3.0]


def test_a_tensor_larger_than_the_stage(tmp_path: Path) -> None:
    tensor = torch.randint(-(2**31), 2**31 - 1, (5, 1000, 1001), dtype=torch.int32)
    plain, turned = [found.value for found in round_trip(tmp_path / "run", tensor, tensor.permute(2, 0, 1))]
    assert torch.equal(plain, tensor)
    assert torch.equal(turned, tensor.permute(2, 0, 1))


def test_a_snapshot_stays_a_snapshot(tmp_path: Path) -> None:
    """Saving must not make every copy-on-write snapshot real: that would double the memory."""
    tensor = torch.randn(1000)
    snapshot = tensor._lazy_clone()
    (found,) = round_trip(tmp_path / "run", snapshot)
    assert torch._C._is_cow_tensor(snapshot)
    assert torch.equal(found.value, tensor)


def test_the_recording_of_a_recording(tmp_path: Path) -> None:
    value = ({"a": torch.randn(2, 3)}, [None, 2.5, torch.tensor(True)])
    first = round_trip(tmp_path / "first", value)
    store.save(tmp_path / "second", info={}, modules={}, events=first)
    (second,) = store.open_recording(tmp_path / "second").events
    assert_same(second.value, value)


def test_saving_over_the_recording_that_is_being_read(tmp_path: Path) -> None:
    tensor = torch.randn(3)
    first = round_trip(tmp_path / "run", tensor)
    store.save(tmp_path / "run", info={}, modules={}, events=first, overwrite=True)
    assert_same(store.open_recording(tmp_path / "run").events[0].value, tensor)


# ---------------------------------------------------------------- what is not plain


def test_shape_only(tmp_path: Path) -> None:
    (found,) = round_trip(tmp_path / "run", {"a": torch.empty(2, 3, dtype=torch.int16, device="meta")})
    assert found.value["a"].device.type == "meta"
    assert (found.value["a"].shape, found.value["a"].dtype) == ((2, 3), torch.int16)
    assert found.nbytes == 0
    (writer,) = (tmp_path / "run").glob("w00000-*")
    assert list(writer.iterdir()) == [writer / "manifest.jsonl"]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "mkldnn"])
def test_other_layouts_are_stored_dense_and_say_so(layout: str, tmp_path: Path) -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    sparse = {"sparse_coo": dense.to_sparse, "sparse_csr": dense.to_sparse_csr, "mkldnn": dense.to_mkldnn}[layout]()
    (found,) = round_trip(tmp_path / "run", (sparse,))
    assert_same(found.value[0], dense)
    assert found.conversions() == {"output[0]": layout}


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_whose_dense_form_is_huge_keeps_its_shape(tmp_path: Path) -> None:
    huge = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.tensor([1.0]), (10**6, 10**6))
    (found,) = round_trip(tmp_path / "run", huge)
    assert found.value.device.type == "meta"
    assert found.value.shape == (10**6, 10**6)
    assert found.conversions() == {"output": "sparse_coo"}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_keep_the_box_around_them(layout: torch.layout, tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)
    (found,) = round_trip(tmp_path / "run", nested)
    assert found.value.device.type == "meta"
    assert found.value.shape == (2, 4, 3)
    assert found.conversions() == {"output": "nested"}


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_quantized_tensors_are_stored_as_the_numbers_they_stand_for(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.25, 0, torch.quint8)
    (found,) = round_trip(tmp_path / "run", quantized)
    assert_same(found.value, torch.tensor([0.5, 1.0]))
    assert found.conversions() == {"output": "quint8"}


class Named(torch.Tensor):
    """A subclass in Python only."""


class Wrapper(torch.Tensor):
    """A subclass without memory of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0])
        raise RuntimeError("not this one")


class Local(Wrapper):
    """Like a DTensor."""

    def to_local(self) -> Tensor:
        return torch.ones(2)


def test_tensor_subclasses(tmp_path: Path) -> None:
    named = torch.tensor([1.0, 2.0]).as_subclass(Named)
    values = named, Wrapper(torch.ones(3)), Local(torch.ones(4)), torch.nn.Parameter(torch.ones(2))
    plain, wrapper, local, parameter = round_trip(tmp_path / "run", *values)
    assert_same(plain.value, torch.tensor([1.0, 2.0]))
    assert (wrapper.value.device.type, wrapper.value.shape) == ("meta", (3,))
    assert_same(local.value, torch.ones(2))
    assert_same(parameter.value, torch.ones(2))
    origins = [found.conversions().get("output") for found in (plain, wrapper, local, parameter)]
    assert origins == ["Named", "Wrapper", "Local", None]


def test_a_tensor_inside_vmap_keeps_its_shape(tmp_path: Path) -> None:
    def keep(x: Tensor) -> Tensor:
        round_trip(tmp_path / "run", x)
        return x

    torch.func.vmap(keep)(torch.ones(2, 3))
    (found,) = store.open_recording(tmp_path / "run").events
    assert (found.value.device.type, found.value.shape) == ("meta", (3,))


# ---------------------------------------------------------------- scalars, names, heads


NUMBERS = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 2**63, -(10**100), 0, True, 1.0]


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_numbers_that_json_has_no_form_for(number: float, tmp_path: Path) -> None:
    (found,) = round_trip(tmp_path / "run", [number, {number: 1}, -(10**5000)])
    assert found.value[2] == -(10**5000)
    value, (key,) = found.value[0], found.value[1]
    for back in (value, key):
        assert type(back) is type(number)
        assert back == number or (math.isnan(back) and math.isnan(number))
    assert math.copysign(1, value) == math.copysign(1, number)


def test_summaries_come_back(tmp_path: Path) -> None:
    live = Event(0, 0, "layer", "output", 0, 0, (torch.tensor([1.0, math.nan, math.inf]), torch.tensor([])))
    store.save(tmp_path / "run", info={}, modules={}, events=[live])
    (found,) = store.open_recording(tmp_path / "run").events
    assert repr(found.summaries()) == repr(live.summaries())
    assert list(found.summaries()) == ["output[0]", "output[1]"]
    assert found.summaries()["output[0]"].nan == 1
    assert math.isnan(found.summaries()["output[1]"].mean)


@pytest.mark.parametrize(
    "path", ["", "a.b", "a/b", "ä·層", 'it\'s "q"', "\n\u2028\0", "\ud800", "x" * 5000, "../../etc"]
)
def test_names_of_modules(path: str, tmp_path: Path) -> None:
    modules = {path: ModuleInfo("Linear", 12, ("other",)), "child": ModuleInfo("ReLU", 0)}
    store.save(tmp_path / "run", info={}, modules=modules, events=[event(torch.ones(2), path=path)])
    parts = store.open_recording(tmp_path / "run")
    assert list(parts.modules.items()) == list(modules.items())
    assert parts.events[0].path == path
    assert_same(parts.events[0].value, torch.ones(2))


def test_info_comes_back(tmp_path: Path) -> None:
    info = {"torch": "2.13", "sites": ["a", "b:input"], "nested": {"x": None, "y": 1.5}, "ü": True}
    store.save(tmp_path / "run", info=info, modules={}, events=[])
    assert store.open_recording(tmp_path / "run") == (info, {}, [], (), ())


@pytest.mark.parametrize("bad", [math.nan, {1, 2}, torch.ones(1)], ids=["nan", "set", "tensor"])
def test_info_that_is_not_json(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"info\['bad'\] cannot be written as JSON: .* Pass strings, finite numbers"
    ):
        store.save(tmp_path / "run", info={"fine": 1, "bad": bad}, modules={}, events=[])
    assert not list(tmp_path.iterdir())


def test_the_files_are_stock_safetensors_files(tmp_path: Path) -> None:
    value = (torch.randn(2, 2, dtype=torch.bfloat16), {"k": torch.arange(3)})
    events = [
        event(value, 0, path=""),
        event(torch.ones(2), 1, "a.b", "grad_output", step=3, call=2, backward=1),
        event(torch.zeros(1), 2, "a.b", "grad_output", step=3, call=2, backward=1),
        event(torch.tensor([1 + 2j], dtype=torch.complex128), 3, "c"),
    ]
    store.save(tmp_path / "run", info={}, modules={}, events=events)
    (shard,) = tmp_path.glob("run/w00000-*/000000.safetensors")
    with safe_open(shard, "pt") as file:
        assert set(file.keys()) == {
            "0/(root):output/0/output[0]",
            "0/(root):output/0/output[1]['k']",
            "3/a.b:grad_output/2.b1/output",
            "3/a.b:grad_output/2.b1/output~2",
            "0/c:output/0/output",
        }
        assert torch.equal(file.get_tensor("0/(root):output/0/output[0]"), value[0])
        assert torch.equal(file.get_tensor("3/a.b:grad_output/2.b1/output~2"), torch.zeros(1))
        assert torch.equal(file.get_tensor("0/c:output/0/output"), torch.tensor([[1.0, 2.0]], dtype=torch.float64))
        assert file.metadata() == {"format": "pt"}
