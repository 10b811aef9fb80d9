"""The last steps as arrays: order, growth, and calls that merge as ``hookline.stats.merge`` has it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hookline.stats import Summary, merge, summarize
from hookline.watch.series import FIELDS, Frame, Series, absmax, rms
from hookline.watch.window import Window

from .collecting import row

SERIES = [Series(f"layer{number}", "output") for number in range(6)]


def frame(step: int, rows: list[tuple[int, list[float]]], **extra: object) -> Frame:
    calls: dict[int, int] = {}
    numbers = [number for number, _ in rows]
    call = [calls.setdefault(number, 0) for number in numbers]
    values = np.array([values for _, values in rows]).reshape(-1, len(FIELDS))
    return Frame(step, 0.0, np.array(numbers, np.int32), np.array(call, np.int32), values, dict(extra))


def constant(value: float, numel: int = 4) -> list[float]:
    return row(torch.full((numel,), value))


def tensors(seed: int) -> list[Tensor]:
    """Of many sizes and magnitudes, some with elements that are not finite, some empty."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(int(torch.randint(1, 6, (), generator=generator))):
        size = int(torch.randint(0, 40, (), generator=generator))
        scale = 10.0 ** float(torch.randint(-30, 30, (), generator=generator))
        one = torch.randn(size, generator=generator, dtype=torch.float64) * scale + float(torch.randn(()) * scale * 100)
        if size > 3 and bool(torch.randint(0, 2, (), generator=generator)):
            one[:3] = torch.tensor([math.nan, math.inf, -math.inf])
        if size > 6:
            one[3:6] = 0.0
        made.append(one)
    return made


@pytest.mark.parametrize("seed", range(40))
def test_calls_merge_as_summaries_do(seed: int) -> None:
    torch.manual_seed(seed)
    calls = {number: tensors(100 * seed + number) for number in (4, 0, 2)}
    # the calls of the modules come in turn, as they do in a model
    rows = [(n, row(calls[n][turn])) for turn in range(6) for n in calls if turn < len(calls[n])]
    window = Window(3)
    window.add(frame(0, rows), SERIES)
    for number, parts in calls.items():
        wanted = merge(summarize(part) for part in parts)
        got = dict(zip(FIELDS, window.values()[-1, number], strict=True))
        for field in dataclasses.fields(Summary):
            want = getattr(wanted, field.name)
            scale = max(abs(wanted.max), abs(wanted.min)) if math.isfinite(wanted.max) else 0.0
            near = pytest.approx(want, rel=1e-9, abs=1e-12 * scale, nan_ok=True)
            assert got[field.name] == near, (field.name, number)
        everything = torch.cat(parts)
        assert got["neg_inf"] == int(torch.isneginf(everything).sum())
        finite = everything[everything.isfinite()]
        if finite.numel():
            root = float(torch.linalg.vector_norm(finite)) / math.sqrt(finite.numel())
            assert window.field("rms")[-1, number] == pytest.approx(root, rel=1e-12)
            assert window.field("absmax")[-1, number] == float(finite.abs().max())
    for number in (1, 3, 5):
        assert np.isnan(window.values()[-1, number]).all()


@pytest.mark.parametrize("value", [1e300, 1e-300])
def test_squares_of_merged_calls_stay_in_range(value: float) -> None:
    window = Window(1)
    x = torch.full((4,), value, dtype=torch.float64)
    window.add(frame(0, [(0, row(x)), (0, row(x))]), SERIES)
    assert window.field("l2")[-1, 0] == pytest.approx(value * math.sqrt(8))
    assert window.field("rms")[-1, 0] == pytest.approx(value)


def test_the_oldest_step_goes_and_the_newest_is_last() -> None:
    window = Window(4)
    for step in range(11):
        window.add(frame(10 * step, [(1, constant(float(step)))], lr=step), SERIES)
        kept = list(range(max(0, step - 3), step + 1))
        assert window.steps.tolist() == [10 * one for one in kept]
        assert window.field("mean")[:, 1].tolist() == kept and len(window) == len(kept) and window.count == step + 1
        assert window.values()[:, 1, FIELDS.index("mean")].tolist() == kept
        assert [extra["lr"] for extra in window.extra()] == kept
        for last in (1, 2, 3, 4, 9):
            assert window.field("max", last)[:, 1].tolist() == kept[-last:]
            assert window.values(last).shape == (len(kept[-last:]), 6, len(FIELDS))
            assert [extra["lr"] for extra in window.extra(last)] == kept[-last:]


def test_a_window_of_one_step_and_one_of_none() -> None:
    window = Window(1)
    assert len(window) == 0 and window.steps.tolist() == [] and window.field("rms").shape == (0, 0)
    for step in range(3):
        window.add(frame(step, [(0, constant(step))], number=step), SERIES[:1])
    assert (
        window.steps.tolist() == [2] and window.field("mean").tolist() == [[2.0]] and window.extra() == [{"number": 2}]
    )


def test_series_that_come_later_were_not_there_before() -> None:
    window = Window(3)
    window.add(frame(0, [(0, constant(1))]), SERIES[:1])
    window.add(frame(1, [(2, constant(3)), (0, constant(2))]), SERIES[:3])
    window.add(frame(2, []), SERIES[:3])
    window.add(frame(3, [(1, constant(5))]), SERIES)
    nan = math.nan
    wanted = [[2, nan, 3, nan, nan, nan], [nan] * 6, [nan, 5, nan, nan, nan, nan]]
    np.testing.assert_array_equal(window.field("mean"), wanted)
    assert window.series == SERIES


def test_what_is_asked_of_the_series_follows_their_number() -> None:
    series = [
        Series("a", "output", "", "ReLU"), Series("a", "parameter", "weight"), Series("b", "update", "weight"),
        Series("a", "update", "weight"), Series("b", "output", "", "Linear"), Series("b", "parameter", "weight"),
    ]  # fmt: skip
    window = Window(2)
    window.add(frame(0, [(0, constant(1))]), series[:4])
    assert window.at(("output",)).tolist() == [0] and window.at(("update", "parameter")).tolist() == [1, 2, 3]
    assert window.partners(("update",), "parameter").tolist() == [-1, 1]
    window.add(frame(1, [(0, constant(1))]), series)
    assert window.at(("output",)).tolist() == [0, 4]
    assert window.at(("output",), frozenset({"Linear"})).tolist() == [4]
    assert window.partners(("update",), "parameter").tolist() == [5, 1]


def test_what_a_window_gives_cannot_be_written() -> None:
    window = Window(2)
    window.add(frame(0, [(0, constant(1))]), SERIES)
    for array in (window.steps, window.values(), window.field("mean"), window.field("rms", 1)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7


def test_rms_and_absmax_count_finite_elements() -> None:
    x = torch.tensor([3.0, -4.0, math.nan, math.inf])
    values = np.array([row(x), row(torch.tensor([math.nan])), row(torch.zeros(0))])
    np.testing.assert_allclose(rms(values), [math.sqrt(12.5), math.nan, math.nan])
    np.testing.assert_array_equal(absmax(values), [4.0, math.nan, math.nan])
