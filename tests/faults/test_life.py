"""Removal, copies and files: a hook that is gone leaves nothing, and a copy of a hooked model is not hooked."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim.swa_utils import AveragedModel

import hookline
from hookline.errors import BudgetError

from ..hooks.reference import equal
from .catalogue import RIGHT, fault

Register = Callable[..., hookline.Handle]
Remove = Callable[[], Any]

REGISTER: dict[str, Register] = {
    "forward pre": hookline.register_forward_pre_hook,
    "forward pre, keywords": functools.partial(hookline.register_forward_pre_hook, with_kwargs=True),
    "forward": hookline.register_forward_hook,
    "forward, keywords": functools.partial(hookline.register_forward_hook, with_kwargs=True),
    "forward, always called": functools.partial(hookline.register_forward_hook, always_call=True),
    "forward, both": functools.partial(hookline.register_forward_hook, with_kwargs=True, always_call=True),
    "forward, prepended": functools.partial(hookline.register_forward_hook, prepend=True),
    "backward pre": hookline.register_backward_pre_hook,
    "backward": hookline.register_backward_hook,
}
PORTS = ("input", "output", "grad_input", "grad_output")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))
        self.note = "kept"

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.act(self.one(x))) * self.scale


def computed(model: nn.Module, x: Tensor) -> Tensor:
    """What ``Net`` computes, without calling it."""
    with torch.no_grad():
        hidden = torch.relu(x @ model.one.weight.T + model.one.bias)
        return (hidden @ model.two.weight.T + model.two.bias) * model.scale


class Failure(Exception):
    pass


def fail(*_: Any) -> None:
    raise Failure("as planned")


def noting(log: list[Any], name: Any = 1) -> Callable[..., None]:
    return lambda *_: log.append(name)


def train_step(model: nn.Module) -> Tensor:
    output = model(torch.ones(2, 3, requires_grad=True))
    output.square().sum().backward()
    return output


def traces(model: nn.Module) -> list[Any]:
    """All that a model's modules hold: classes and attributes, with the contents of their tables."""
    return [
        (type(module), {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()})
        for module in model.modules()
    ]


def torch_tables() -> dict[str, Any]:
    """What torch holds for all modules, and what it computes with."""
    found = {name: dict(value) for name, value in vars(torch_module).items() if isinstance(value, dict)}
    names = [name for name in dir(F) if callable(getattr(F, name))]
    found["functions"] = {name: getattr(F, name) for name in names}
    found["forwards"] = {
        name: value.__dict__["forward"]
        for name, value in vars(nn).items()
        if isinstance(value, type) and "forward" in value.__dict__
    }
    return found


# ---------------------------------------------------------------- 45: removal leaves nothing


@fault(45, RIGHT, "no table of PyTorch is used; after removal module, class and torch are as they were")
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("kind", REGISTER)
def test_a_removed_hook_leaves_nothing_behind(kind: str, used: bool) -> None:
    model = Net()
    before = traces(model)
    handles = [REGISTER[kind](module, noting([])) for module in model.modules()]
    if used:
        train_step(model)
        model.zero_grad()
        for parameter in model.parameters():
            parameter.grad = None
    for handle in handles:
        handle.remove()
        handle.remove()
    assert traces(model) == before
    assert equal(model(torch.ones(2, 3)).detach(), computed(model, torch.ones(2, 3)))


@fault(45, RIGHT, "")
def test_removed_hooks_and_recorders_leave_nothing_in_torch() -> None:
    gc.collect()
    model, tables = Net(), torch_tables()
    with contextlib.ExitStack() as stack:
        for register in REGISTER.values():
            for module in model.modules():
                stack.enter_context(register(module, noting([])))
        stack.enter_context(hookline.record(model, ports=PORTS))
        train_step(model)
    assert torch_tables() == tables


@fault(45, RIGHT, "")
def test_hooks_are_in_no_table_of_torch_while_they_are_there() -> None:
    model = Net()
    shared = {name: value for name, value in torch_tables().items() if name.startswith("_global_")}
    own = [{key: dict(value) for key, value in vars(module).items() if "hooks" in key} for module in model.modules()]
    with contextlib.ExitStack() as stack:
        for register in REGISTER.values():
            for module in model.modules():
                stack.enter_context(register(module, noting([])))
        assert {name: value for name, value in torch_tables().items() if name.startswith("_global_")} == shared
        assert [
            {key: dict(value) for key, value in vars(module).items() if "hooks" in key} for module in model.modules()
        ] == own


@fault(45, RIGHT, "")
@pytest.mark.parametrize("kind", REGISTER)
def test_a_removed_hook_is_freed_although_the_graph_of_its_call_lives(kind: str) -> None:
    class Probe:
        def __call__(self, *_: Any) -> None:
            pass

    model, probe = Net(), Probe()
    freed = weakref.ref(probe)
    handle = REGISTER[kind](model.one, probe)
    output = model(torch.ones(2, 3, requires_grad=True))
    del probe
    assert freed() is not None
    handle.remove()
    assert freed() is None
    output.sum().backward()


@fault(45, RIGHT, "")
def test_a_hook_leaves_with_others_before_and_after_it_in_place() -> None:
    module, log = nn.Linear(3, 3), []
    first, middle, last = (hookline.register_forward_hook(module, noting(log, name)) for name in "abc")
    middle.remove()
    module(torch.ones(1, 3))
    assert log == ["a", "c"]
    last.remove()
    first.remove()
    assert type(module) is nn.Linear


@fault(45, RIGHT, "")
@pytest.mark.parametrize("tied", [False, True])
def test_a_hooked_model_that_is_freed_by_the_garbage_collector_leaves_nothing_behind(tied: bool) -> None:
    gc.collect()
    tables = torch_tables()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if tied:
        model[1].weight = model[0].weight
    for module in model.modules():
        hookline.register_forward_hook(module, noting([]))
    train_step(model)
    model.itself = [model]
    freed = weakref.ref(model[0])
    del model, module
    gc.collect()
    assert freed() is None
    assert torch_tables() == tables


# ---------------------------------------------------------------- 47: a probe that raises


@fault(47, RIGHT, "a handle and a recorder are context managers that remove at their end, whatever is raised")
@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("kind", REGISTER)
def test_a_handle_in_a_with_block_is_removed_when_the_probe_raises(kind: str, error: type[BaseException]) -> None:
    model, log = Net(), []
    before = traces(model)

    def probe() -> None:
        with REGISTER[kind](model.one, noting(log)):
            model(torch.ones(1, 3))
            raise error

    with pytest.raises(error):
        probe()
    assert traces(model) == before
    log.clear()
    train_step(model)
    assert log == []


@fault(47, RIGHT, "")
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("where", ["wrong shape", "hook", "backward"])
def test_a_handle_is_removed_when_the_model_raises(where: str, kind: str) -> None:
    model, log = Net(), []
    before = traces(model)
    with pytest.raises((RuntimeError, Failure)), contextlib.ExitStack() as stack:
        stack.enter_context(REGISTER[kind](model.one, noting(log)))
        if where == "hook":
            stack.enter_context(hookline.register_forward_hook(model.two, fail))
        if where == "backward":
            stack.enter_context(hookline.register_backward_hook(model.two, fail))
        model(torch.ones(1, 99 if where == "wrong shape" else 3)).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    assert traces(model) == before
    log.clear()
    model(torch.ones(1, 3))
    assert log == []


@fault(47, RIGHT, "")
@pytest.mark.parametrize("where", ["wrong shape", "hook", "block", "reduce", "budget"])
def test_a_recorder_is_gone_when_the_probe_raises_and_what_it_had_stays(where: str) -> None:
    model = Net()
    before = traces(model)
    hook = contextlib.nullcontext() if where != "hook" else hookline.register_forward_hook(model.two, fail)
    options: dict[str, Any] = {"reduce": {"reduce": fail}, "budget": {"budget": 40}}.get(where, {})
    with pytest.raises((RuntimeError, Failure, BudgetError)), hook, hookline.record(model, "one", **options) as rec:
        model.two(model.one(torch.ones(2, 99 if where == "wrong shape" else 3)))
        model.one(torch.ones(2, 3))
        fail()
    assert traces(model) == before
    count = len(rec)
    assert count == {"wrong shape": 0, "hook": 1, "block": 2, "reduce": 0, "budget": 1}[where]
    model(torch.ones(2, 3))
    assert len(rec) == count


@fault(47, RIGHT, "")
def test_edits_are_gone_when_the_probe_raises() -> None:
    model, x = Net(), torch.ones(2, 3)
    before = traces(model)
    with pytest.raises(Failure), hookline.edit(model, {"one": lambda value: value * 0, "two": fail}):
        model(x)
    assert traces(model) == before
    assert equal(model(x).detach(), computed(model, x))


# ---------------------------------------------------------------- 50, 51: copies


def by_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy in a list": lambda model: copy.deepcopy([model, model])[1],
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": by_file,
    "AveragedModel": lambda model: AveragedModel(model).module,
}


@fault(50, RIGHT, "a copy is not hooked")
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_not_hooked_and_computes_with_its_own_weights(how: str, kind: str) -> None:
    model, x, log = Net(), torch.ones(2, 3), []
    for module in model.modules():
        REGISTER[kind](module, noting(log))
    twin = COPIES[how](model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(-3)
    output = train_step(twin)
    assert log == []
    assert equal(output.detach(), computed(twin, x)) and not equal(output.detach(), computed(model, x))
    assert [type(module) for module in twin.modules()] == [Net, nn.Linear, nn.ReLU, nn.Linear]
    assert all(mine is not theirs for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True))
    train_step(model)
    assert len(log) == 4


@fault(50, RIGHT, "")
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_that_is_made_while_a_recorder_is_on_writes_nothing_into_the_recording(how: str) -> None:
    model, x = Net(), torch.randn(2, 3)
    with hookline.record(model, ports=PORTS) as rec:
        model(x).sum().backward()
        count, kept = len(rec), rec["two"].output.clone()
        twin = COPIES[how](model)
        for _ in range(3):
            twin(torch.zeros(2, 3)).sum().backward()
        assert len(rec) == count
    hidden = torch.relu(x @ model.one.weight.T + model.one.bias)
    assert equal(kept, (hidden @ model.two.weight.T + model.two.bias).detach()) and equal(rec["two"].output, kept)
    assert traces(twin)[0][1].keys() == traces(model)[0][1].keys()


@fault(50, RIGHT, "")
def test_a_copy_of_an_edited_model_is_not_edited() -> None:
    model, x = Net(), torch.ones(2, 3)
    with hookline.edit(model, {"one": lambda value: value * 0, "two:grad_input": lambda grad: grad * 0}):
        twin = copy.deepcopy(model)
        assert equal(twin(x).detach(), computed(model, x)) and not equal(model(x).detach(), computed(model, x))


@fault(50, RIGHT, "")
def test_a_copy_can_be_recorded_by_itself() -> None:
    model, log = Net(), []
    hookline.register_forward_hook(model.one, noting(log))
    twin = copy.deepcopy(model)
    with hookline.record(twin, "one") as rec:
        model(torch.ones(2, 3))
        assert log == [1] and len(rec) == 0
        twin(torch.ones(2, 3))
    assert log == [1] and len(rec) == 1


@fault(50, RIGHT, "")
def test_a_shallow_copy_of_a_hooked_module_is_not_hooked() -> None:
    module, log = nn.Linear(3, 2), []
    hookline.register_forward_hook(module, noting(log))
    twin = copy.copy(module)
    twin(torch.ones(1, 3))
    assert log == [] and type(twin) is nn.Linear and twin.weight is module.weight


@fault(51, RIGHT, "a copy is not hooked, so nothing remains to be removed from it")
@pytest.mark.parametrize("first", ["copy", "remove"])
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("how", COPIES)
def test_no_hook_is_on_the_copy_once_the_handle_has_removed_it(how: str, kind: str, first: str) -> None:
    model, log = Net(), []
    handle = REGISTER[kind](model.one, noting(log))
    if first == "remove":
        handle.remove()
    twin = COPIES[how](model)
    handle.remove()
    train_step(twin)
    train_step(model)
    assert log == [] and type(twin.one) is type(model.one) is nn.Linear


@fault(51, RIGHT, "")
@pytest.mark.parametrize("how", COPIES)
def test_a_handle_removes_the_hook_of_the_original_also_after_the_copy_is_hooked(how: str) -> None:
    model, log = Net(), []
    handle = hookline.register_forward_hook(model.one, noting(log, "model"))
    twin = COPIES[how](model)
    hookline.register_forward_hook(twin.one, noting(log, "twin"))
    handle.remove()
    model(torch.ones(1, 3))
    twin(torch.ones(1, 3))
    assert log == ["twin"]


@fault(51, RIGHT, "")
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda handle: pickle.loads(pickle.dumps(handle))])
def test_a_copied_handle_removes_nothing(copied: Callable[[hookline.Handle], hookline.Handle]) -> None:
    model, log = Net(), []
    handle = hookline.register_forward_hook(model.one, noting(log))
    copied(handle).remove()
    model(torch.ones(1, 3))
    handle.remove()
    model(torch.ones(1, 3))
    assert log == [1]


# ---------------------------------------------------------------- 52: values that are kept, and copies


@fault(52, RIGHT, "`record` keeps its values outside the model, which can be copied while it records and after")
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("how", COPIES)
def test_a_recorded_model_can_be_copied_while_the_graph_lives_and_after(how: str, detach: bool) -> None:
    model, x, twins = Net(), torch.randn(2, 3), []
    state = copy.deepcopy(model.state_dict())
    with hookline.record(model, ports=PORTS, detach=detach) as rec:
        output = model(x)
        twins.append(COPIES[how](model))
        output.sum().backward()
        twins.append(COPIES[how](model))
    twins.append(COPIES[how](model))
    for twin in twins:
        assert equal(dict(twin.state_dict()), dict(state))
        assert equal(twin(x).detach(), computed(model, x))
        assert [vars(module).keys() for module in twin.modules()] == [vars(module).keys() for module in model.modules()]
    assert rec["one"].output.shape == (2, 4)


@fault(52, RIGHT, "")
def test_a_recording_puts_no_value_on_the_model() -> None:
    model = Net()
    before = [vars(module).keys() for module in model.modules()]
    with hookline.record(model, ports=PORTS):
        train_step(model)
        held = [value for module in model.modules() for value in vars(module).values()]
        assert not any(isinstance(value, (Tensor, hookline.Recording)) for value in held)
    assert [vars(module).keys() for module in model.modules()] == before


@fault(52, RIGHT, "")
def test_a_recording_is_copied_and_pickled_apart_from_the_model() -> None:
    model, x = Net(), torch.randn(2, 3)
    with hookline.record(model, "two") as rec:
        model(x)
    twin = copy.deepcopy(rec)
    assert equal(twin["two"].output, rec["two"].output)
    twin["two"].output.zero_()
    assert equal(rec["two"].output, computed(model, x))


# ---------------------------------------------------------------- 53: hooks that cannot be pickled


class Unpicklable:
    def method(self, *_: Any) -> None:
        pass

    def __call__(self, *_: Any) -> None:
        pass

    def __reduce__(self) -> Any:
        raise TypeError("not for files")


def local() -> Callable[..., None]:
    def hook(*_: Any) -> None:
        pass

    return hook


HOOKS: dict[str, Callable[[], Callable[..., None]]] = {
    "lambda": lambda: lambda *_: None,
    "local function": local,
    "partial of a lambda": lambda: functools.partial(lambda *_: None),
    "method of what cannot be pickled": lambda: Unpicklable().method,
    "object that cannot be pickled": Unpicklable,
    "method of a generator": lambda: (lambda steps: lambda *_: next(steps))(iter([None] * 9)),
}


@fault(53, RIGHT, "files hold the model without its hooks")
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_model_with_any_hook_is_pickled_as_the_model_without(hook: str, kind: str) -> None:
    model = Net()
    before = pickle.dumps(model)
    for module in model.modules():
        REGISTER[kind](module, HOOKS[hook]())
    hooked = pickle.dumps(model)
    assert b"hookline" not in hooked
    twin, wanted = pickle.loads(hooked), pickle.loads(before)
    assert [type(module) for module in twin.modules()] == [type(module) for module in wanted.modules()]
    assert equal(dict(twin.state_dict()), dict(wanted.state_dict())) and twin.note == "kept"
    assert [vars(module).keys() for module in twin.modules()] == [vars(module).keys() for module in wanted.modules()]


@fault(53, RIGHT, "")
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("how", ["hook", "record", "edit"])
def test_every_protocol_saves_a_model_that_is_observed(how: str, protocol: int) -> None:
    model, x, file = Net(), torch.randn(2, 3), io.BytesIO()
    with {
        "hook": lambda: hookline.register_backward_hook(model.one, lambda *_: None),
        "record": lambda: hookline.record(model, ports=PORTS),
        "edit": lambda: hookline.edit(model, {"one": lambda value: value * 0}),
    }[how]():
        train_step(model)
        torch.save(model, file, pickle_protocol=protocol)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert type(twin) is Net and equal(twin(x).detach(), computed(model, x))


@fault(53, RIGHT, "")
def test_a_saved_state_has_nothing_of_the_hooks() -> None:
    model, file = Net(), io.BytesIO()
    before = list(model.state_dict())
    hookline.register_forward_hook(model.one, lambda *_: None)
    with hookline.record(model, ports=PORTS):
        train_step(model)
        assert list(model.state_dict()) == before
        torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = Net()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert equal(dict(fresh.state_dict()), dict(model.state_dict()))


# ---------------------------------------------------------------- 108: forward, patched and copied


@fault(108, RIGHT, "a copy is not hooked, and its `forward` is its own")
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("how", COPIES)
def test_the_forward_of_a_copy_is_its_own(how: str, kind: str) -> None:
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    with REGISTER[kind](module, lambda *_: None):
        twin = COPIES[how](module)
        with torch.no_grad():
            twin.weight.fill_(2)
            twin.bias.fill_(1)
            module.weight.zero_()
        assert "forward" not in vars(twin) and "forward" not in vars(module)
        assert twin.forward.__self__ is twin
        wanted = (2 * x.sum(1, keepdim=True) + 1).expand(4, 2)
        torch.testing.assert_close(twin(x).detach(), wanted)
        torch.testing.assert_close(twin.forward(x).detach(), wanted)


def doubled(self: nn.Module, x: Tensor) -> Tensor:
    return type(self).forward(self, x) * 2


@fault(108, RIGHT, "")
@pytest.mark.parametrize("when", ["before the hook", "after the hook"])
def test_a_method_that_a_user_put_in_the_place_of_forward_belongs_to_the_copy(when: str) -> None:
    module, x, log = nn.Linear(3, 2), torch.randn(4, 3), []
    if when == "before the hook":
        module.forward = types.MethodType(doubled, module)
    hookline.register_forward_hook(module, noting(log))
    if when == "after the hook":
        module.forward = types.MethodType(doubled, module)
    module(x)
    assert log == [1]
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.fill_(2)
        twin.bias.fill_(1)
    torch.testing.assert_close(twin(x).detach(), 2 * (2 * x.sum(1, keepdim=True) + 1).expand(4, 2))
    assert log == [1] and type(twin) is nn.Linear and vars(twin)["forward"].__self__ is twin


@fault(108, RIGHT, "")
def test_a_module_with_a_wrapped_forward_is_copied_as_without_hooks() -> None:
    """The wrapper of a user keeps what it has closed over, as it does in a plain copy."""
    module, x, log = nn.Tanh(), torch.randn(4, 3), []
    old = module.forward
    module.forward = functools.wraps(old)(lambda value: old(value) + 1)
    plain = copy.deepcopy(module)
    hookline.register_forward_hook(module, noting(log))
    twin = copy.deepcopy(module)
    assert vars(twin).keys() == vars(plain).keys()
    assert vars(twin)["forward"] is vars(plain)["forward"]
    assert equal(twin(x), plain(x)) and log == []
