"""Steps and calls: every call is counted once, and a gradient belongs to the call whose value it is of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.sites import PORTS

from ..threads import in_threads


class Scale(nn.Module):
    """Multiplies by a number, which is the gradient of its input for a gradient of one."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        if fail:
            raise ValueError("asked for")
        return x * self.factor


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scale(2.0), Scale(3.0)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        return self.b(self.a(self.a(x)), fail)


def numbers(rec: hookline.Recording, path: str) -> list[tuple[int, int]]:
    return [(call.step, call.index) for call in rec[path].calls]


# ---------------------------------------------------------------- steps


def test_a_step_is_a_forward_of_the_root_and_calls_are_counted_in_it() -> None:
    model = Twice()
    with hookline.record(model) as rec:
        for _ in range(3):
            model(torch.ones(1))
    assert rec.steps == [0, 1, 2]
    assert numbers(rec, "(root)") == [(0, 0), (1, 0), (2, 0)]
    assert numbers(rec, "a") == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [event.order for event in rec] == list(range(12))
    assert [call.output.item() for call in rec["a"].calls] == [2.0, 4.0] * 3


def test_sub_modules_that_are_called_without_the_root() -> None:
    model = Twice()
    with hookline.record(model) as rec:
        model.a(torch.ones(1))
        model.a.forward(torch.ones(1))
        model(torch.ones(1))
        model.a(torch.ones(1))
        model(torch.ones(1))
    assert numbers(rec, "a") == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]
    assert numbers(rec, "(root)") == [(0, 0), (1, 0)]


def test_the_root_need_not_be_recorded_to_count_steps() -> None:
    model = Twice()
    with hookline.record(model, "b") as rec:
        model(torch.ones(1))
        model(torch.ones(1))
    assert numbers(rec, "b") == [(0, 0), (1, 0)]


def test_a_root_that_calls_itself_stays_in_its_step() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = Scale()

        def forward(self, depth: int, x: Tensor) -> Tensor:
            return self(depth - 1, x) + self(depth - 1, x) if depth else self.leaf(x)

    model = Tree()
    with hookline.record(model, ports=("output", "grad_output")) as rec:
        model(2, torch.ones(1)).backward()
        model(0, torch.ones(1))
    assert numbers(rec, "(root)") == [(0, number) for number in range(7)] + [(1, 0)]
    assert numbers(rec, "leaf") == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    assert [call.output.item() for call in rec["(root)"].calls] == [8.0, 4.0, 2.0, 2.0, 4.0, 2.0, 2.0, 2.0]


def test_a_forward_that_raises_counts_and_the_next_begins_anew() -> None:
    model = Twice()
    with hookline.record(model, ports=("input", "output")) as rec:
        with pytest.raises(ValueError, match="asked for"):
            model(torch.ones(1), fail=True)
        model(torch.ones(1))
        with pytest.raises(ValueError, match="asked for"):
            model.b(torch.ones(1), True)
        model.b(torch.ones(1))
        model(torch.ones(1))
    assert numbers(rec, "(root)") == [(0, 0), (1, 0), (2, 0)]
    assert numbers(rec, "b") == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert [event.port for event in rec["b"].calls[0].events] == ["input"]
    with pytest.raises(hookline.errors.SiteError, match=r"call 0 of step 0 of b has no output: the call did not get"):
        _ = rec["b"].calls[0].output
    assert rec["b"].calls[1].output.item() == 12.0


def test_two_backwards_through_one_call() -> None:
    model = Twice()
    with hookline.record(model, "a", ("grad_output", "grad_input")) as rec:
        y = model(torch.ones(1, requires_grad=True))
        y.backward(torch.ones(1), retain_graph=True)
        y.backward(torch.full((1,), 10.0))
    first, second = ([(e.backward, e.port, e.leaves()[0][1].item()) for e in call.events] for call in rec["a"].calls)
    assert first == [
        (0, "grad_output", 6.0), (0, "grad_input", 12.0), (1, "grad_output", 60.0), (1, "grad_input", 120.0),
    ]  # fmt: skip
    assert second == [
        (0, "grad_output", 3.0), (0, "grad_input", 6.0), (1, "grad_output", 30.0), (1, "grad_input", 60.0),
    ]  # fmt: skip
    assert rec["a"].calls[0].grad_output.item() == 60.0, "of several backwards the last is read"


def test_each_call_has_its_own_backward_number() -> None:
    model = Twice()
    with hookline.record(model, "b", "grad_output") as rec:
        for _ in range(2):
            model(torch.ones(1)).backward()
    assert [(e.step, e.backward) for e in rec] == [(0, 0), (1, 0)]


# ---------------------------------------------------------------- activation checkpointing


class Segments(nn.Module):
    """``count`` checkpointed segments, in each of which ``cell`` runs twice, with another factor in between."""

    def __init__(self, reentrant: bool, count: int = 3) -> None:
        super().__init__()
        self.reentrant, self.count = reentrant, count
        self.cell, self.other = Scale(2.0), Scale(5.0)

    def segment(self, x: Tensor) -> Tensor:
        return self.cell(self.other(self.cell(x)))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = checkpoint(self.segment, x, use_reentrant=self.reentrant)
        return x


def gradients(rec: hookline.Recording, path: str, port: str) -> dict[tuple[int, int, int], float]:
    return {(e.step, e.call, e.backward): e.leaves()[0][1].item() for e in rec if e.path == path and e.port == port}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_calls_are_counted_once_and_keep_their_gradients(reentrant: bool) -> None:
    model = Segments(reentrant)
    with hookline.record(model, ports=PORTS) as rec:
        model(torch.ones(1, requires_grad=True)).backward()
    assert numbers(rec, "cell") == [(0, number) for number in range(6)]
    outputs = [call.output.item() for call in rec["cell"].calls]
    assert outputs == [2.0, 20.0, 40.0, 400.0, 800.0, 8000.0]
    assert [call.grad_output.item() for call in rec["cell"].calls] == [8000.0 / y for y in outputs]
    assert [call.grad_input.item() for call in rec["cell"].calls] == [16000.0 / y for y in outputs]
    assert [call.grad_output.item() for call in rec["other"].calls] == [800.0, 40.0, 2.0]


UNTRACKED = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@UNTRACKED
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_steps_whose_backwards_come_in_another_order(reentrant: bool) -> None:
    """The backward of the first step comes first, after a forward of the second and one that needs no gradient."""
    model = Segments(reentrant, count=1)
    with hookline.record(model, "cell", "grad_output") as rec:
        first = model(torch.ones(1, requires_grad=True))
        second = model(torch.ones(1, requires_grad=True))
        with torch.no_grad():
            model(torch.ones(1))
        (first * 100).backward()
        (second * 1000).backward()
    assert gradients(rec, "cell", "grad_output") == {
        (0, 1, 0): 100.0, (0, 0, 0): 1000.0, (1, 1, 0): 1000.0, (1, 0, 0): 10_000.0,
    }  # fmt: skip


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_and_plain_calls_of_one_module(reentrant: bool) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Scale(2.0)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.cell(x)
            y = self.cell(x)
            y = checkpoint(self.cell, y, use_reentrant=reentrant)
            with torch.no_grad():
                self.cell(x)
            return self.cell(y)

    model = Mixed()
    with hookline.record(model, "cell", ("output", "grad_output")) as rec:
        model(torch.ones(1, requires_grad=True)).backward()
    assert [call.output.item() for call in rec["cell"].calls] == [2.0, 2.0, 4.0, 2.0, 8.0]
    assert gradients(rec, "cell", "grad_output") == {(0, 1, 0): 4.0, (0, 2, 0): 2.0, (0, 4, 0): 1.0}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_and_two_backwards(reentrant: bool) -> None:
    model = Segments(reentrant, count=2)
    with hookline.record(model, "cell", "grad_output") as rec:
        y = model(torch.ones(1, requires_grad=True))
        y.backward(torch.ones(1), retain_graph=True)
        y.backward(torch.full((1,), 10.0))
    calls = [[event.leaves()[0][1].item() for event in call.events] for call in rec["cell"].calls]
    assert calls == [[200.0, 2000.0], [20.0, 200.0], [10.0, 100.0], [1.0, 10.0]]


@UNTRACKED
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_checkpoints_inside_checkpoints(outer: bool, inner: bool) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Scale(2.0)

        def inner(self, x: Tensor) -> Tensor:
            return self.cell(self.cell(x))

        def outer(self, x: Tensor) -> Tensor:
            x = checkpoint(self.inner, self.cell(x), use_reentrant=inner)
            return self.cell(checkpoint(self.inner, x, use_reentrant=inner))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.outer, checkpoint(self.outer, x, use_reentrant=outer), use_reentrant=outer)

    model = Nested()
    with hookline.record(model, "cell", ("output", "grad_output")) as rec:
        model(torch.ones(1, requires_grad=True)).backward()
    assert [call.output.item() for call in rec["cell"].calls] == [2.0 ** (n + 1) for n in range(12)]
    assert [call.grad_output.item() for call in rec["cell"].calls] == [2.0 ** (11 - n) for n in range(12)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recorder_that_ends_before_the_backward(reentrant: bool) -> None:
    model = Segments(reentrant)
    x = torch.ones(1, requires_grad=True)
    with hookline.record(model, ports=PORTS) as rec:
        y = model(x)
    count = len(rec)
    y.backward()
    assert x.grad.item() == 8000.0 and len(rec) == count and rec.ports == ["input", "output"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recorder_that_begins_after_the_forward(reentrant: bool) -> None:
    """The calls that are repeated were not recorded, so there is nothing that their gradients could belong to."""
    model = Segments(reentrant)
    y = model(torch.ones(1, requires_grad=True))
    with hookline.record(model, ports=PORTS) as rec:
        y.backward()
    assert len(rec) == 0


# ---------------------------------------------------------------- several recorders


def test_a_recorder_inside_a_recorder() -> None:
    model = Twice()
    with hookline.record(model, ports=("output", "grad_output")) as outside:
        model(torch.ones(1))
        with hookline.record(model, ["a", "(root)"], ("output", "grad_output")) as inside:
            model(torch.ones(1)).backward()
        model(torch.ones(1))
    assert numbers(outside, "a") == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert numbers(inside, "a") == [(0, 0), (0, 1)]
    assert [call.grad_output.item() for call in inside["a"].calls] == [6.0, 3.0]
    assert [call.grad_output.item() for call in outside["a"].calls[2:4]] == [6.0, 3.0]
    assert type(model) is Twice and "_hookline_tap" not in vars(model)


def test_recorders_that_end_in_another_order() -> None:
    model = Twice()
    one, two = hookline.record(model, "a"), hookline.record(model, ["a", "b"])
    first, second = one.__enter__(), two.__enter__()
    model(torch.ones(1))
    one.close()
    model(torch.ones(1))
    two.close()
    model(torch.ones(1))
    assert (len(first), len(second)) == (2, 6)
    assert type(model.a) is Scale


def test_a_recorder_of_a_part_counts_that_parts_forwards() -> None:
    model = Twice()
    with hookline.record(model.a) as part, hookline.record(model) as whole:
        model(torch.ones(1))
    assert numbers(part, "(root)") == [(0, 0), (1, 0)]
    assert numbers(whole, "a") == [(0, 0), (0, 1)]


# ---------------------------------------------------------------- threads


def test_threads_with_a_model_each() -> None:
    found: dict[int, hookline.Recording] = {}

    def task(number: int) -> Callable[[], None]:
        def run() -> None:
            model = Twice()
            with hookline.record(model, ports=("output", "grad_output")) as rec:
                for _ in range(20):
                    model(torch.full((1,), float(number))).backward()
            found[number] = rec

        return run

    in_threads(task(1), task(2))
    for number, rec in found.items():
        assert len(rec) == 20 * 8 and rec.steps == list(range(20))
        assert {call.output.item() for call in rec["b"].calls} == {12.0 * number}


def test_threads_with_one_model() -> None:
    """Each forward of the root is a step of its own, whichever thread it runs in; nothing is lost or mixed."""
    model = Twice()

    def task(number: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(50):
                torch.autograd.grad(model(torch.full((1,), float(number))), list(model.parameters()))

        return run

    with hookline.record(model, ports=PORTS) as rec:
        in_threads(task(1), task(2), task(3))
    assert rec.steps == list(range(150))
    assert sorted(event.order for event in rec) == list(range(150 * 16))
    for step in rec.steps:
        part = rec.select(steps=step)
        assert numbers(part, "a") == [(step, 0), (step, 1)] and numbers(part, "b") == [(step, 0)]
        x = part["(root)"].args[0].item()
        assert [call.output.item() for call in part["a"].calls] == [2 * x, 4 * x]
        assert [call.grad_output.item() for call in part["a"].calls] == [6.0, 3.0]


def test_one_recorder_in_each_thread_on_one_model() -> None:
    model = Twice()
    recordings: list[hookline.Recording] = []

    def task() -> None:
        for _ in range(20):
            with hookline.record(model, ports=("output", "grad_output")) as rec:
                model(torch.ones(1))
            recordings.append(rec)

    in_threads(task, task)
    assert len(recordings) == 40 and all(len(rec["b"].calls) >= 1 for rec in recordings)
    assert type(model) is Twice and type(model.a) is Scale
