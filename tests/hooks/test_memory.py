"""Nothing of a call outlives it: no graph, no tensor, no module, and no cycle that only the collector could break."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.hooks import snapshot

from .reference import Computes, leaf


@pytest.fixture(autouse=True, scope="module")
def _set_aside() -> Iterator[None]:
    """Take everything that is there already out of the collector's sight, which makes it quick."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What dies in the test dies because nothing refers to it any more."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Traced:
    """Stands in a graph in the place of a saved tensor, and tells when the graph is gone."""


class Traces(torch.autograd.Function):
    alive: ClassVar[list[weakref.ref[Traced]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.saved = Traced()
        Traces.alive.append(weakref.ref(ctx.saved))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    Traces.alive.clear()
    yield
    Traces.alive.clear()


def graphs_alive() -> int:
    return sum(ref() is not None for ref in Traces.alive)


def tensors_alive() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def observe(model: nn.Module) -> None:
    for module in model.modules():
        hookline.register_forward_pre_hook(module, lambda *_: None)
        hookline.register_forward_hook(module, lambda *_: None)
        hookline.register_backward_pre_hook(module, lambda *_: None)
        hookline.register_backward_hook(module, lambda *_: None)


def keeps_output() -> nn.Module:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x * 2
            return self.kept

    return Keeps()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 3).double(),
    "identity": nn.Identity,
    "dropout in evaluation": lambda: nn.Dropout(0.5).eval(),
    "view": lambda: nn.Unflatten(-1, (3, 1)),
    "relu in place": lambda: nn.ReLU(inplace=True),
    "several outputs": lambda: Computes(lambda weight, x: (x * weight, [x * 2])),
    "two views of one tensor": lambda: Computes(lambda weight, x: (lambda h: (h, h.view(3, 1)))(x * weight)),
    "chunks": lambda: Computes(lambda weight, x: (x * weight).chunk(3)),
    "writes into its input": lambda: Computes(lambda weight, x: x.mul_(2)),
    "writes and returns nothing": lambda: Computes(lambda weight, x: [x.mul_(2), x.sum()][1]),
    "lstm": lambda: nn.LSTM(3, 3).double(),
    "checkpoint": lambda: Computes(lambda weight, x: checkpoint(torch.sin, x * weight, use_reentrant=False)),
    "keeps its output": keeps_output,
    "sequence": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(True), nn.Flatten(0), nn.Dropout(0.1)).double(),
}


def warm_up(name: str) -> None:
    """Torch itself keeps the first graph of a checkpoint in the process."""
    run(name, MODULES[name](), 1)
    Traces.alive.clear()


def run(name: str, module: nn.Module, times: int, backward: bool = True) -> None:
    for _ in range(times):
        x = leaf()[None] if name in ("lstm", "sequence") else leaf()
        y = module(Traces.apply(x))
        if backward:
            loss_of(y).backward()
        del x, y


def loss_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.sum()
    return torch.stack([loss_of(part) for part in output]).sum()


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.usefixtures("no_collector")
def test_the_graph_of_a_step_is_gone_when_the_step_is(name: str, backward: bool) -> None:
    warm_up(name)
    module = MODULES[name]()
    observe(module)
    run(name, module, 5, backward)
    assert graphs_alive() == (1 if name == "keeps its output" else 0), "at most what the module itself has kept"


@pytest.mark.usefixtures("no_collector")
def test_the_graph_is_gone_after_a_backward_that_raises() -> None:
    module = Computes(lambda weight, x: x * weight)
    observe(module)

    def failing(grad: Tensor) -> None:
        raise KeyError

    for _ in range(5):
        h = Traces.apply(leaf())
        h.register_hook(failing)
        with pytest.raises(KeyError):
            module(h).sum().backward()
        del h
    gc.collect()  # the exception itself and its frames are a cycle of pytest's
    assert graphs_alive() == 0


@pytest.mark.usefixtures("no_collector")
def test_second_order_graphs_are_gone() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Flatten(0)).double()
    observe(module)
    for _ in range(5):
        x = leaf()[None].detach().requires_grad_()
        (grad,) = torch.autograd.grad(module(Traces.apply(x)).sum(), x, create_graph=True)
        grad.pow(2).sum().backward()
        module.zero_grad()
        del x, grad
    assert graphs_alive() == 0


@pytest.mark.usefixtures("no_collector")
def test_gradients_are_freed_while_the_pass_goes_on() -> None:
    """Kept to the end, they would be as large as all activations of the model together."""
    arrived: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            fresh = grad.clone()
            arrived.append(weakref.ref(fresh))
            alive.append(sum(ref() is not None for ref in arrived))
            return fresh

    modules = [Computes(lambda weight, x: x * weight + x.sin()) for _ in range(10)]
    h = leaf()
    for module in modules:
        observe(module)
        h = Counts.apply(module(h))
    h.sum().backward()
    assert len(alive) == 10 and max(alive) <= 2


@pytest.mark.usefixtures("no_collector")
def test_a_module_that_keeps_its_output_is_freed() -> None:
    for register in (hookline.register_backward_hook, hookline.register_forward_hook):
        module = keeps_output()
        register(module, lambda *_: None)
        y = module(Traces.apply(leaf()))
        (y + module.kept).sum().backward()
        ref = weakref.ref(module)
        del module, y
        assert ref() is None and graphs_alive() == 0


@pytest.mark.usefixtures("no_collector")
def test_handles_keep_no_module_and_hooks_keep_none_either() -> None:
    module = nn.Linear(3, 3)
    handles = [hookline.register_forward_hook(module, print), hookline.register_backward_hook(module, print)]
    ref = weakref.ref(module)
    del module
    assert ref() is None
    for handle in handles:
        handle.remove()


@pytest.mark.usefixtures("no_collector")
def test_a_removed_hook_is_freed() -> None:
    class Hook:
        def __call__(self, *_: Any) -> None:
            pass

    module = nn.Linear(3, 3)
    for register in (
        hookline.register_forward_pre_hook,
        hookline.register_forward_hook,
        hookline.register_backward_pre_hook,
        hookline.register_backward_hook,
    ):
        hook = Hook()
        ref = weakref.ref(hook)
        handle = register(module, hook)
        module(torch.ones(1, 3, requires_grad=True)).sum().backward()
        del hook
        assert ref() is not None
        handle.remove()
        assert ref() is None


def test_two_hundred_steps_leave_as_many_tensors_as_one() -> None:
    model = nn.Sequential(
        nn.Linear(3, 8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5).eval(),
        nn.Unflatten(1, (2, 4)),
        nn.Flatten(),
        nn.Linear(8, 2),
    ).double()
    observe(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(leaf()[None]).sum().backward()
        optimizer.step()

    step()
    gc.collect()
    gc.disable()
    try:
        before = tensors_alive()
        for _ in range(200):
            step()
        assert tensors_alive() == before
    finally:
        gc.enable()


def test_two_hundred_calls_of_an_identity_on_one_tensor_leave_nothing_on_it() -> None:
    """A feature that is computed once and used again and again must not collect hooks of ours."""
    h = leaf() * 1
    modules = [nn.Identity(), nn.Flatten(0), nn.Dropout(0.5).eval()]
    for module in modules:
        observe(module)
        module(h)
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(200):
            for module in modules:
                module(h).sum().backward(retain_graph=True)
        grown = len(gc.get_objects()) - before
    finally:
        gc.enable()
    assert grown < 200, f"{grown} objects are left by 600 calls"


@pytest.mark.usefixtures("no_collector")
def test_recorded_values_are_freed_with_the_recording() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Flatten(0)).double()
    with hookline.record(model, ports=("input", "output", "grad_input", "grad_output")) as recording:
        model(Traces.apply(leaf()[None])).sum().backward()
    assert graphs_alive() == 0, "kept values are detached"
    refs = [weakref.ref(tensor) for event in recording for _, tensor in event.leaves()]
    assert len(refs) >= 12
    del recording
    gc.collect()
    assert [ref() for ref in refs if ref() is not None] == []


def test_a_snapshot_of_a_small_part_does_not_hold_the_whole() -> None:
    whole = torch.zeros(1000, 1000)
    assert snapshot(whole[0, :1]).untyped_storage().nbytes() <= 8


def test_a_snapshot_copies_nothing_until_somebody_writes() -> None:
    x = torch.zeros(1000)
    kept = snapshot(x)
    assert torch._C._data_address(kept) == torch._C._data_address(x)
    x.add_(1)
    assert torch._C._data_address(kept) != torch._C._data_address(x)
    assert kept.sum() == 0 and x.sum() == 1000


def test_keys_of_a_users_dict_are_not_kept() -> None:
    module = Computes(lambda weight, x, key: {key: x * weight})
    paths: list[Any] = []
    hookline.register_backward_hook(module, lambda module, _, grads: paths.append(grads.paths))
    key = nn.Linear(1, 1)
    module(leaf(), key)[key].sum().backward()
    ref = weakref.ref(key)
    assert len(paths) == 1
    del key
    gc.collect()
    assert ref() is None


def test_keys_that_are_equal_and_not_the_same_keep_their_names() -> None:
    module = Computes(lambda weight, x, key: {key: x * weight})
    paths: list[Any] = []
    hookline.register_backward_hook(module, lambda module, _, grads: paths.extend(grads.paths))
    for key in (1, True, 1.0):
        module(leaf(), key)[key].sum().backward()
    assert paths == ["output[1]", "output[True]", "output[1.0]"]
