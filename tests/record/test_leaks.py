"""A thousand repeats of record and backward leave no tensor, no memory and nothing for the garbage collector."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.errors import BudgetError

PORTS = ("input", "output", "grad_input", "grad_output")
REPEATS = 1000
WIDTH = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.drop = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.5).eval()

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        return {"out": self.drop(self.act(self.linear(x))) * scale, "seen": [x, None]}


class Net(nn.Module):
    """Writes in place, a residual, a dict as output, and one module that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x)["out"]
        h = h + self.block(h, scale=0.5)["out"]
        h += x
        return self.head(h)


class Small(nn.Module):
    """As few modules as show the same, so that a thousand repeats are quick."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.ReLU(inplace=True), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x * 2))


def a_batch() -> Tensor:
    return torch.ones(2, WIDTH, requires_grad=True)


def train(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


def nothing(*_: Any) -> None:
    return None


class Stop(Exception):
    """Raised by the programs below."""


def stop(*_: Any) -> None:
    raise Stop


# ---------------------------------------------------------------- what is repeated: (model, batch)


def all_ports(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", PORTS) as recording:
        train(model, x)
    assert {event.port for event in recording} == set(PORTS)


def outputs(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model) as recording:
        train(model, x)
    assert recording["head"].output.shape == (2, 1)


def last_values(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", PORTS, keep="last") as recording:
        train(model, x)
        train(model, x)
    assert len(recording) == 4 * len(list(model.modules())), "of two steps and of all calls one value at each site"


def with_graph(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", detach=False) as recording:
        loss = model(x).sum()
    (loss + recording["head"].output.square().sum()).backward()


def reduced(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", PORTS, reduce=torch.mean, dtype=torch.float64, budget="1MB") as recording:
        train(model, x)
    assert recording["head"].output.shape == ()


def strict(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", PORTS, strict=True) as recording:
        train(model, x)
    assert recording.coverage.complete and "head" in str(recording)


def second_order(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", PORTS):
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()


def without_backward(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", PORTS):
        model(x)


def without_gradients(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad(), hookline.record(model, "**", PORTS):
        model(x)


def checkpointed(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", PORTS) as recording:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert recording["head"].grad_output is not None


def checkpointed_with_reentry(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", PORTS) as recording:
        checkpoint(model, x, use_reentrant=True).sum().backward()
    assert recording["head"].grad_output is not None


def nested(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", PORTS), hookline.record(model, "block.*", PORTS):
        train(model, x)


def negated(value: Any) -> Any:
    return {**value, "out": -value["out"]} if isinstance(value, dict) else -value


def edited(model: nn.Module, x: Tensor) -> None:
    changes = {"block:output": negated, "block:grad_output": nothing, "head:grad_input": torch.neg}
    with hookline.edit(model, changes) as edits:
        train(model, x)
    assert all(edits.counts[site] > 0 for site in changes if changes[site] is not nothing)


def hooked(model: nn.Module, x: Tensor) -> None:
    handles = []
    for module in model.modules():
        for register in REGISTER:
            handles.append(register(module, nothing))
    train(model, x)
    for handle in handles:
        handle.remove()


def hooked_tensor(model: nn.Module, x: Tensor) -> None:
    h = x * 1
    with hookline.register_tensor_hook(h, nothing):
        train(model, h)


REGISTER: tuple[Callable[..., Any], ...] = (
    hookline.register_forward_pre_hook,
    hookline.register_forward_hook,
    hookline.register_backward_pre_hook,
    hookline.register_backward_hook,
)


# ---------------------------------------------------------------- the same with an exception on the way


def raises_in_the_block(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", PORTS):
        train(model, x)
        raise Stop


def raises_in_a_forward(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", PORTS), hookline.register_forward_pre_hook(model.head, stop):
        train(model, x)


def raises_in_a_backward(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", PORTS), hookline.register_backward_hook(model.block, stop):
        train(model, x)


def raises_in_a_reduction(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", PORTS, reduce=stop):
        train(model, x)


def raises_in_an_edit(model: nn.Module, x: Tensor) -> None:
    with hookline.edit(model, {"head:output": stop}):
        train(model, x)


def passes_its_budget(model: nn.Module, x: Tensor) -> None:
    with hookline.record(model, "**", PORTS, budget=100):
        train(model, x)


FINE = (
    all_ports,
    outputs,
    last_values,
    with_graph,
    reduced,
    strict,
    second_order,
    without_backward,
    without_gradients,
    checkpointed,
    checkpointed_with_reentry,
    nested,
    edited,
    hooked,
    hooked_tensor,
)
RAISING = (
    raises_in_the_block,
    raises_in_a_forward,
    raises_in_a_backward,
    raises_in_a_reduction,
    raises_in_an_edit,
    passes_its_budget,
)


def once(program: Callable[[nn.Module, Tensor], None], model: nn.Module) -> None:
    """One repeat, with an exception or without."""
    if program not in RAISING:
        return program(model, a_batch())
    with pytest.raises((Stop, BudgetError)):
        program(model, a_batch())
    return None


# ---------------------------------------------------------------- counting


@pytest.fixture(autouse=True)
def set_aside() -> Iterator[None]:
    """Take what is there already out of the collector's sight, which makes it quick."""
    gc.collect()
    gc.freeze()
    yield
    gc.enable()
    gc.set_debug(0)
    gc.garbage.clear()
    gc.unfreeze()


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


linux = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not tell its memory so")


@pytest.mark.parametrize("program", [*FINE, *RAISING])
def test_repeats_leave_as_many_tensors_and_objects_as_one(program: Callable[..., None]) -> None:
    model = Net()
    for _ in range(10):
        once(program, model)
    before, things = tensors(), len(gc.get_objects())
    for _ in range(50):
        once(program, model)
    assert tensors() == before
    assert len(gc.get_objects()) - things < 25, "an object for every repeat would be fifty"


@linux
@pytest.mark.parametrize("program", [all_ports, last_values, edited, hooked, checkpointed, raises_in_a_forward])
def test_a_thousand_repeats_do_not_grow(program: Callable[..., None]) -> None:
    """Python takes its memory by arenas of 1 MiB, one of which alone is more than the bound: it may fall into a round,
    but a leak is in every round, also in the number of blocks that are taken from arenas.
    """
    model = Small()
    for _ in range(100):
        once(program, model)
    rounds = []
    while len(rounds) < 3:
        before, blocks, bytes_before = tensors(), sys.getallocatedblocks(), resident()
        for _ in range(REPEATS):
            once(program, model)
        assert tensors() == before
        rounds.append((resident() - bytes_before, sys.getallocatedblocks() - blocks))
        if rounds[-1][0] < 1000 * REPEATS and rounds[-1][1] < REPEATS // 2:
            return
    pytest.fail(f"a kilobyte or half a block for every repeat of each round: {rounds}")


@linux
def test_large_values_of_many_recordings_do_not_stay() -> None:
    """Each repeat keeps 24 MB; one that stayed would show."""
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.ReLU(inplace=True))
    x = torch.ones(1000, 1000, requires_grad=True)

    def repeat(times: int) -> None:
        for _ in range(times):
            with hookline.record(model, "**", ("output", "grad_output")):
                model(x).sum().backward()
            x.grad = model[0].weight.grad = None

    repeat(3)
    before = resident()
    repeat(15)
    assert resident() - before < 24e6


@linux
def test_a_long_recording_that_keeps_the_last_values_does_not_grow() -> None:
    model = Small()
    with hookline.record(model, "**", PORTS, keep="last") as recording:
        for _ in range(100):
            train(model, a_batch())
        before, bytes_before = tensors(), resident()
        for _ in range(REPEATS):
            train(model, a_batch())
        assert tensors() == before and len(recording) == 12
        assert resident() - bytes_before < 1000 * REPEATS


# ---------------------------------------------------------------- no cycle


def garbage_of(program: Callable[..., None]) -> list[str]:
    """What is left of ten repeats in cycles, of torch's tensors and modules and of Hookline's objects."""
    model = Net()
    # A class is a cycle by nature. Hooks on another model keep the classes of observed modules alive.
    other = Net()
    handles = [register(module, nothing) for module in other.modules() for register in REGISTER]
    program(model, a_batch())  # torch and Python make things once
    gc.collect()
    gc.disable()
    for _ in range(10):
        program(model, a_batch())
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    assert handles
    return [name for thing in gc.garbage if (name := _of_interest(thing))]


def _of_interest(thing: Any) -> str:
    kind = type(thing)
    ours = kind.__module__.startswith("hookline") or str(getattr(thing, "__module__", "")).startswith("hookline")
    return repr(thing)[:100] if ours or issubclass(kind, (Tensor, nn.Module, torch.autograd.Function)) else ""


@pytest.mark.parametrize("program", FINE)
def test_nothing_is_left_for_the_collector(program: Callable[..., None]) -> None:
    assert garbage_of(program) == []


@pytest.mark.parametrize("program", RAISING)
def test_an_exception_leaves_nothing_for_the_collector(program: Callable[..., None]) -> None:
    def quiet(model: nn.Module, x: Tensor) -> None:
        try:
            program(model, x)
        except (Stop, BudgetError):
            pass
        else:
            raise AssertionError("it was to raise")

    assert garbage_of(quiet) == []


def test_the_garbage_is_looked_for_in_the_right_way() -> None:
    def careless(model: nn.Module, x: Tensor) -> None:
        with hookline.record(model) as recording:
            x.myself = (x, recording)  # type: ignore[attr-defined]

    assert any("Recording" in name for name in garbage_of(careless))


# ---------------------------------------------------------------- the graph


class Mark:
    """Dies with the node of the graph that carries it."""


def a_graph() -> tuple[Tensor, weakref.ref[Mark]]:
    """The start of a graph, whose result nothing else keeps, and what tells when the graph is gone."""
    h, mark = a_batch().exp(), Mark()
    h.grad_fn.metadata["mark"] = mark  # type: ignore[union-attr]
    return h, weakref.ref(mark)


@pytest.mark.parametrize("ports", [("output",), ("grad_output",), PORTS])
@pytest.mark.parametrize("keep", ["all", "last"])
def test_the_graph_is_freed_when_the_user_drops_the_loss(ports: tuple[str, ...], keep: str) -> None:
    model = Net()
    gc.disable()
    with hookline.record(model, "**", ports, keep=keep) as recording:
        for backward in (True, False):
            h, mark = a_graph()
            tensor = weakref.ref(h)
            loss = model(h).sum()
            del h
            assert mark() is not None
            if backward:
                loss.backward()
            del loss
            assert mark() is None and tensor() is None
    assert len(recording) > 0


def test_the_graph_lives_as_long_as_a_value_that_was_kept_with_it() -> None:
    model = Net()
    gc.disable()
    with hookline.record(model, "head", detach=False) as recording:
        h, mark = a_graph()
        model(h)
        del h
    assert mark() is not None
    del recording
    assert mark() is None


@pytest.mark.parametrize("program", [train, all_ports, edited, hooked])
def test_hooks_that_are_still_there_hold_no_graph(program: Callable[..., None]) -> None:
    model = Net()
    for module in model.modules():
        for register in REGISTER:
            register(module, nothing)
    gc.disable()
    h, mark = a_graph()
    program(model, h)
    assert mark() is not None
    del h
    assert mark() is None
