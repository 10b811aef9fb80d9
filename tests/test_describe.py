"""A value in a few lines."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from hookline.report.describe import describe
from hookline.values import Opaque

NAN, INF = float("nan"), float("inf")


def test_a_tensor_in_three_lines() -> None:
    x = (torch.arange(24.0).reshape(2, 3, 4) / 8).requires_grad_()
    assert describe(x, "hidden").splitlines() == [
        "hidden: tensor f32 2x3x4, cpu, requires grad, 96 bytes",
        "  [0, 0.1250, 0.2500, 0.3750, 0.5000, 0.6250, ...]",
        "  mean 1.438  std 0.8653  min 0  max 2.875  l2 8.220  zeros 1 of 24",
    ]


def test_what_is_unusual_is_told() -> None:
    y = (torch.ones(2, 3, requires_grad=True) * 2).T
    first = describe(y).splitlines()[0]
    assert re.fullmatch(r"value: tensor f32 3x2, cpu, strides 1x3, requires grad \(\w+Backward0\), 24 bytes", first)
    assert describe(torch.nn.Parameter(torch.ones(1))).startswith("value: Parameter f32 1, cpu, requires grad")
    assert "sparse_coo" in describe(torch.eye(3).to_sparse())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_where_the_first_bad_element_is(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 3, 4)
    x[1, 0, 2], x[1, 2] = NAN, INF
    text = describe(x.to(dtype))
    assert text.splitlines()[-1] == "  ! NaN 1 Inf 4 of 24, the first at [1, 0, 2]"


def test_nested_values_by_value_path() -> None:
    value = ((torch.ones(2), {"mask": torch.tensor([True])}), 3, None, "text" * 30, Opaque("Cache"), object())
    lines = [line for line in describe(value, "args").splitlines() if not line.startswith(" ")]
    assert lines == [
        "args[0][0]: tensor f32 2, cpu, 8 bytes",
        "args[0][1]['mask']: tensor bool 1, cpu, 1 byte",
        "args[1]: 3",
        "args[2]: None",
        f"args[3]: {'text' * 15!r}... (120 characters)",
        "args[4]: Cache (not kept)",
        "args[5]: object",
    ]


@pytest.mark.parametrize(
    ("value", "last"),
    [
        (torch.empty(0, 3), "  no elements"),
        (torch.empty(3, device="meta"), "  values cannot be read"),
        ([], "value: empty list"),
        ([torch.ones(1)] * 50, "... and 10 values more"),
        (torch.tensor(NAN), "  ! NaN 1 of 1"),
    ],
)
def test_corner_cases(value: Any, last: str) -> None:
    assert describe(value).splitlines()[-1] == last


def test_nothing_finite() -> None:
    assert describe(torch.tensor([NAN, INF])).splitlines()[1:3] == ["  [nan, inf]", "  no finite element"]


def test_complex_and_half() -> None:
    assert "[1+2j, 0-1.500j]" in describe(torch.tensor([1 + 2j, -1.5j]))
    assert "[65504]" in describe(torch.tensor([65504.0]).half())


@pytest.mark.same_rng
def test_leaves_no_trace() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    version = y._version
    describe({"y": y})
    assert y._version == version
    assert torch.is_grad_enabled()
    with torch.inference_mode():
        assert describe(torch.ones(1)).startswith("value: tensor")
