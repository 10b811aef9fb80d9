"""After a recording nothing is left on the model, and what is not held any more is freed at once."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.errors import BudgetError
from hookline.sites import PORTS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.act(self.one(x)))


@pytest.fixture
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def traces(model: nn.Module) -> list[Any]:
    return [(type(module), {**vars(module), "_modules": None}) for module in model.modules()]


# ---------------------------------------------------------------- the model is as before


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
@pytest.mark.parametrize("where", ["in the block", "in the forward", "in the backward"])
def test_nothing_is_left_after_an_exception_anywhere(error: BaseException, where: str) -> None:
    model = Net()
    before = traces(model)

    def stop(*_: Any) -> None:
        raise error

    with pytest.raises(type(error)), contextlib.ExitStack() as users, hookline.record(model, ports=PORTS) as rec:
        if where == "in the forward":
            users.enter_context(hookline.register_forward_pre_hook(model.two, stop))
        if where == "in the backward":
            users.enter_context(hookline.register_backward_pre_hook(model.one, stop))
        model(torch.randn(2, 3)).sum().backward()
        raise error
    assert traces(model) == before
    assert rec["one"].output.shape == (2, 4) and ("grad_output" in rec.ports) == (where != "in the forward")


def test_the_hooks_of_others_stay_in_their_order() -> None:
    model, order = Net(), []
    for name in "ab":
        model.one.register_forward_hook(lambda *_, name=name: order.append(name))
    with hookline.record(model, ports=PORTS):
        model.one.register_forward_hook(lambda *_: order.append("c"))
        model(torch.randn(2, 3))
    model(torch.randn(2, 3))
    assert order == list("abcabc")


def test_a_hook_of_the_user_survives_the_recorder() -> None:
    model, seen = Net(), []
    handle = hookline.register_forward_hook(model.one, lambda *_: seen.append(1))
    with hookline.record(model):
        model(torch.randn(2, 3))
    model(torch.randn(2, 3))
    handle.remove()
    model(torch.randn(2, 3))
    assert len(seen) == 2 and type(model.one) is nn.Linear


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_meanwhile_is_not_recorded(copied: Any) -> None:
    model = Net()
    with hookline.record(model, "one") as rec:
        twin = copied(model)
        twin.act(torch.ones(1))
        twin(torch.randn(2, 3)) if copied is not copy.copy else None
        assert len(rec) == 0 and type(twin) is Net
    assert list(twin.state_dict()) == list(model.state_dict())


# ---------------------------------------------------------------- memory


def values_of(rec: hookline.Recording) -> list[weakref.ref[Tensor]]:
    return [weakref.ref(leaf) for event in rec for _, leaf in event.leaves()]


@pytest.mark.parametrize("alive", ["nothing", "loss", "output", "checkpoint"])
def test_a_dropped_recording_frees_its_tensors_at_once(alive: str, without_gc: None) -> None:
    model, x = Net(), torch.randn(2, 3, requires_grad=True)
    with hookline.record(model, ports=PORTS) as rec:
        out = checkpoint(model, x, use_reentrant=True) if alive == "checkpoint" else model(x)
        loss = out.sum()
        loss.backward(retain_graph=True)
    values = values_of(rec)
    assert len(values) == 16 and all(value() is not None for value in values)
    if alive == "nothing":
        del out, loss
    elif alive == "output":
        del loss
    del rec
    assert not any(value() is not None for value in values)


def test_a_recorder_frees_the_model_and_itself(without_gc: None) -> None:
    model = Net()
    recorder = hookline.record(model, ports=PORTS, budget="1MB", keep="last")
    with recorder as rec:
        loss = model(torch.randn(2, 3)).sum()
        loss.backward()
    gone = [weakref.ref(model), weakref.ref(recorder)]
    del model, recorder, loss
    assert [ref() for ref in gone] == [None, None] and len(rec) > 0


def test_a_recorder_that_was_never_entered_is_freed(without_gc: None) -> None:
    model = Net()
    gone = [weakref.ref(hookline.record(model)), weakref.ref(hookline.edit(model, {"one": torch.relu}))]
    assert [ref() for ref in gone] == [None, None]


def test_a_graph_that_was_recorded_is_freed_with_its_loss(without_gc: None) -> None:
    """Also in the middle of the recording: kept values hold no graph."""
    model = Net()
    inputs: list[weakref.ref[Tensor]] = []
    with hookline.record(model, ports=PORTS) as rec:
        for _ in range(3):
            x = torch.randn(2, 3, requires_grad=True)
            y = x * 2
            inputs.append(weakref.ref(y))
            model(y).sum().backward()
            del x, y
        assert [ref() for ref in inputs] == [None] * 3
    assert len(rec) == 48


def test_keep_last_frees_what_it_replaces(without_gc: None) -> None:
    model = Net()
    with hookline.record(model, ports=PORTS, keep="last") as rec:
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
        first = values_of(rec)
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
        assert not any(value() is not None for value in first)


def living_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def test_two_hundred_repeats_leave_no_tensor_behind() -> None:
    model, x = Net(), torch.randn(2, 3, requires_grad=True)

    def once(checkpointed: bool) -> None:
        with hookline.record(model, ports=PORTS) as rec:
            out = checkpoint(model, x, use_reentrant=True) if checkpointed else model(x)
            out.sum().backward()
        assert len(rec) == 16
        with pytest.raises(BudgetError), hookline.record(model, "one", budget=1):
            model(x)

    once(checkpointed=True)
    once(checkpointed=False)
    before = living_tensors()
    for number in range(200):
        once(checkpointed=number % 2 == 0)
    assert living_tensors() == before


def test_a_long_recording_with_keep_last_does_not_grow() -> None:
    model, x = Net(), torch.randn(2, 3)
    with hookline.record(model, ports=PORTS, keep="last"):
        model(x).sum().backward()
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(300):
            model(x).sum().backward()
        gc.collect()
        assert len(gc.get_objects()) - before < 50
