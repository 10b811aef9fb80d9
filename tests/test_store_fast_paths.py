"""The fast ways of the store give the same bytes as the plain ones."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hookline.store import tensors
from hookline.store.dump import dump_event
from hookline.store.format import EventLine, TensorLine

COUNT = st.integers(0, 2**63 - 1)
SUMMARY = st.fixed_dictionaries(
    {name: COUNT for name in ("numel", "nan", "inf", "neg_inf", "zeros", "subnormal")}
    | {name: st.floats() for name in ("mean", "std", "min", "max", "l2")}
)
TENSOR = st.builds(
    TensorLine,
    st.text(),
    st.text(),
    st.sampled_from(["float32", "bits8"]),
    st.lists(COUNT, max_size=3).map(tuple),
    st.none() | SUMMARY,
    st.booleans(),
    st.none() | st.text(),
    st.none() | st.sampled_from(["samples", "tokens"]),
)
STRUCTURE = st.sampled_from([{"t": 0}, {"tuple": [{"t": 0}, {"v": "é\u2028"}]}, {"t": 0, "x": 1}])
EVENT = st.builds(
    EventLine,
    COUNT,
    COUNT,
    st.text(),
    st.sampled_from(["input", "grad_output"]),
    COUNT,
    COUNT,
    st.none() | st.just("000001.safetensors"),
    STRUCTURE,
    st.lists(TENSOR, max_size=3).map(tuple),
    st.none() | COUNT,
)


@given(EVENT)
def test_the_text_of_an_event_is_that_of_a_json_encoder(line: EventLine) -> None:
    tensors = []
    for tensor in line.tensors:
        entry: dict[str, Any] = {name: getattr(tensor, name) for name in ("name", "path", "dtype", "shape", "summary")}
        if tensor.summary is not None:
            entry["summary"] = {key: _finite(value) for key, value in tensor.summary.items()}
        if not tensor.data:
            entry["data"] = False
        if tensor.converted_from is not None:
            entry["converted_from"] = tensor.converted_from
        if tensor.rows is not None:
            entry["rows"] = tensor.rows
        tensors.append(entry)
    names = ["order", "step", "path", "port", "call", "backward", "batch", "shard", "structure"]
    if line.batch is None:
        names.remove("batch")
    plain = {name: getattr(line, name) for name in names} | {"tensors": tensors}
    assert dump_event(line) == json.dumps(plain, allow_nan=False, separators=(",", ":"))


def _finite(value: int | float) -> Any:
    return value if math.isfinite(value) else {"float": str(value)}


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 30), st.integers(0, 30))
def test_the_stage_writes_the_bytes_one_behind_the_other(sizes: list[int], stage: int, small: int) -> None:
    found = _Kept()
    values = [torch.arange(size, dtype=torch.uint8) + number for number, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "_STAGE", stage)
        patch.setattr(tensors, "_SMALL", small)
        gathered = tensors.Stage(found, sum(sizes))
        for value in values:
            gathered.add(value)
        gathered.flush()
    assert found.data == b"".join(bytes(value.tolist()) for value in values)


def test_small_snapshots_stay_copy_on_write() -> None:
    kept = torch.arange(4.0)
    snapshot = kept._lazy_clone()
    found = _Kept()
    stage = tensors.Stage(found, 16)
    stage.add(snapshot)
    stage.flush()
    assert torch.frombuffer(bytearray(found.data), dtype=torch.float32).tolist() == [0, 1, 2, 3]
    assert torch._C._is_cow_tensor(snapshot)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.float8_e4m3fn])
def test_small_tensors_of_any_stride_are_written_in_row_major_order(dtype: torch.dtype) -> None:
    values: list[Tensor] = [
        torch.arange(6).reshape(2, 3).t().to(dtype),
        torch.ones(()).to(dtype),
        torch.ones(0).to(dtype),
    ]
    found = _Kept()
    stage = tensors.Stage(found, 7 * dtype.itemsize)
    for value in values:
        stage.add(value)
    stage.flush()
    expected = torch.tensor([0, 3, 1, 4, 2, 5, 1]).to(dtype)
    assert found.data == bytes(expected.view(torch.uint8).tolist())


class _Kept:
    """A file in memory that takes three bytes at a time."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: memoryview, /) -> int:
        self.data += bytes(data[:3])
        return min(3, len(data))
