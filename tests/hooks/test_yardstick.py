"""What PyTorch documents of its module hooks, held against stock PyTorch and against Hookline.

A test that takes ``api`` runs twice with the same expectation: what stock PyTorch does is the yardstick. A test without
it shows both where Hookline differs on purpose; its name says how.
"""

from __future__ import annotations

import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import hookline
from hookline.errors import HookError, MutationError

from .reference import Computes, equal, leaf, vector

Log = list[Any]


class Api:
    """One set of registration functions: the module first, then the hook."""

    def __init__(self, name: str, functions: dict[str, Callable[..., Any]]) -> None:
        self.name, self.functions = name, functions

    def __call__(self, kind: str, module: nn.Module, hook: Callable[..., Any], **options: Any) -> Any:
        return self.functions[kind](module, hook, **options)


STOCK = Api(
    "PyTorch",
    {
        "forward pre": nn.Module.register_forward_pre_hook,
        "forward": nn.Module.register_forward_hook,
        "backward pre": nn.Module.register_full_backward_pre_hook,
        "backward": nn.Module.register_full_backward_hook,
        "tensor": Tensor.register_hook,
    },
)
OURS = Api(
    "hookline",
    {
        "forward pre": hookline.register_forward_pre_hook,
        "forward": hookline.register_forward_hook,
        "backward pre": hookline.register_backward_pre_hook,
        "backward": hookline.register_backward_hook,
        "tensor": hookline.register_tensor_hook,
    },
)
KINDS = ("forward pre", "forward", "backward pre", "backward")
FORWARD, BACKWARD = KINDS[:2], KINDS[2:]
EVERY = pytest.mark.parametrize("kind", KINDS)

GLOBAL: dict[str, Callable[..., Any]] = {
    "forward pre": torch_module.register_module_forward_pre_hook,
    "forward": torch_module.register_module_forward_hook,
    "backward pre": torch_module.register_module_full_backward_pre_hook,
    "backward": torch_module.register_module_full_backward_hook,
}


@pytest.fixture(params=[STOCK, OURS], ids=lambda api: api.name)
def api(request: pytest.FixtureRequest) -> Api:
    return request.param  # type: ignore[no-any-return]


def scaled(log: Log | None = None) -> Computes:
    """Multiplies by (0.5, -1, 2), and logs its own forward and backward."""

    def forward(weight: Tensor, x: Tensor, scale: float = 1.0) -> Tensor:
        out = x * weight * scale
        if log is not None:
            log.append("module")
            if out.requires_grad:
                out.register_hook(lambda grad: log.append("module's backward"))
        return out

    return Computes(forward)


def note(log: Log, name: Any, returns: Any = None) -> Callable[..., Any]:
    def hook(*_: Any) -> Any:
        log.append(name)
        return returns

    return hook


def plain(value: Any) -> Any:
    """Tensors as lists, tuples of any class as tuples, modules by class: something to compare with ``==``."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return type(value)(map(plain, value)) if type(value) in (tuple, list) else tuple(map(plain, value))
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    return type(value).__name__ if isinstance(value, nn.Module) else value


def keep(log: Log) -> Callable[..., None]:
    """A hook that logs what it is shown after the module."""
    return lambda module, *shown: log.append(plain(shown))


def train(module: nn.Module, x: Tensor | None = None, **kwargs: Any) -> Tensor:
    """One forward and backward with a non-leaf input, so that each API may alias it."""
    x = leaf() if x is None else x
    out: Tensor = module(x * 1, **kwargs)
    out.sum().backward()
    return x


# ---------------------------------------------------------------- when hooks fire


def test_each_kind_fires_once_around_its_half_of_the_work(api: Api) -> None:
    log: Log = []
    module = scaled(log)
    for kind in KINDS:
        api(kind, module, note(log, kind))
    train(module)
    assert log == ["forward pre", "module", "forward", "backward pre", "module's backward", "backward"]


def test_hooks_fire_at_every_call_and_in_every_pass(api: Api) -> None:
    log: Log = []
    module = scaled()
    for kind in KINDS:
        api(kind, module, note(log, kind))
    out = module(leaf() * 1)
    module(leaf() * 1)
    for _ in range(3):
        out.sum().backward(retain_graph=True)
    assert log == [*FORWARD, *FORWARD, *BACKWARD, *BACKWARD, *BACKWARD]


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_makes_no_difference(api: Api, training: bool) -> None:
    log: Log = []
    module = scaled().train(training)
    for kind in KINDS:
        api(kind, module, note(log, kind))
    train(module)
    assert log == list(KINDS)


def test_hooks_of_nested_modules_nest(api: Api) -> None:
    log: Log = []
    model = nn.Sequential(scaled(), nn.Sequential(scaled()))
    for path, module in model.named_modules():
        for kind in KINDS:
            api(kind, module, note(log, (path, kind)))
    train(model)
    assert [path for path, kind in log if kind == "forward pre"] == ["", "0", "1", "1.0"]
    assert [path for path, kind in log if kind == "forward"] == ["0", "1.0", "1", ""]
    assert [path for path, kind in log if kind == "backward pre"] == ["", "1", "1.0", "0"]
    assert [path for path, kind in log if kind == "backward"] == ["1.0", "1", "0", ""]


@EVERY
def test_new_hooks_go_behind_and_prepended_ones_before_all_there_are(api: Api, kind: str) -> None:
    log: Log = []
    module = scaled()
    for name, prepend in [("a", False), ("b", True), ("c", False), ("d", True)]:
        api(kind, module, note(log, name), prepend=prepend)
    train(module)
    assert log == ["d", "b", "a", "c"]


def test_gradients_with_respect_to_the_input_alone_make_the_backward_hooks_fire(api: Api) -> None:
    log: Log = []
    module, x = scaled(), leaf()
    for kind in BACKWARD:
        api(kind, module, keep(log))
    (grad,) = torch.autograd.grad(module(x).sum(), [x])
    assert grad.tolist() == [0.5, -1.0, 2.0]
    assert log == [(([1.0] * 3,),), (([0.5, -1.0, 2.0],), ([1.0] * 3,))]


@pytest.mark.parametrize("how", ["detached output", "no_grad", "inference_mode"])
def test_backward_hooks_do_not_fire_where_no_output_requires_a_gradient(api: Api, how: str) -> None:
    log: Log = []
    module, x = Computes(lambda weight, x: (x * weight).detach() if how == "detached output" else x * weight), leaf()
    for kind in KINDS:
        api(kind, module, note(log, kind))
    if how == "detached output":
        (module(x * 1) + x).sum().backward()
    else:
        with getattr(torch, how)():
            module(x * 1)
    assert log == list(FORWARD)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
def test_where_no_input_requires_a_gradient_the_backward_hook_fires_with_none(api: Api) -> None:
    log: Log = []
    module = scaled()
    api("backward", module, keep(log))
    module(leaf().detach()).sum().backward()
    assert log == [((None,), ([1.0, 1.0, 1.0],))]


def test_where_no_input_requires_a_gradient_pytorch_fires_before_the_modules_backward_and_hookline_after() -> None:
    def order(api: Api) -> Log:
        log: Log = []
        module = scaled(log)
        api("backward", module, note(log, "hook"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module(leaf().detach()).sum().backward()
        return [*log, len(caught)]

    assert order(STOCK) == ["module", "hook", "module's backward", 1]
    assert order(OURS) == ["module", "module's backward", "hook", 0]


@pytest.mark.parametrize("depth", [1, 2])
def test_each_of_many_calls_in_one_graph_has_its_own_pair_of_gradients(api: Api, depth: int) -> None:
    log: Log = []
    module = scaled()
    api("backward", module, keep(log))
    x = leaf() * 1
    for _ in range(depth):
        x = module(x)
    x.sum().backward()
    weight = module.weight.detach()
    expected = [(((weight ** (n + 1)).tolist(),), ((weight**n).tolist(),)) for n in range(depth)]
    assert log == expected


# ---------------------------------------------------------------- what hooks are shown


def test_forward_hooks_are_shown_the_positional_arguments_as_a_tuple(api: Api) -> None:
    log: Log = []
    module = scaled()
    api("forward pre", module, keep(log))
    api("forward", module, keep(log))
    with torch.no_grad():
        module(leaf(), scale=2.0)
    assert log == [(([1.0, -2.0, 3.0],),), (([1.0, -2.0, 3.0],), [1.0, 4.0, 12.0])]


def test_with_kwargs_shows_the_keywords_before_the_output(api: Api) -> None:
    log: Log = []
    module = scaled()
    api("forward pre", module, keep(log), with_kwargs=True)
    api("forward", module, keep(log), with_kwargs=True)
    with torch.no_grad():
        module(leaf(), scale=2.0)
        module(leaf())
    x = [1.0, -2.0, 3.0]
    assert log[:2] == [((x,), {"scale": 2.0}), ((x,), {"scale": 2.0}, [1.0, 4.0, 12.0])]
    assert log[2:] == [((x,), {}), ((x,), {}, [0.5, 2.0, 6.0])]


def test_hooks_with_and_without_keywords_mix_in_their_order(api: Api) -> None:
    log: Log = []
    module = scaled()
    for name in "abcd":
        api("forward pre", module, note(log, name), with_kwargs=name in "bd")
        api("forward", module, note(log, name.upper()), with_kwargs=name in "ac", prepend=name == "c")
    module(leaf(), scale=3.0)
    assert "".join(log) == "abcdCABD"


@EVERY
def test_every_hook_is_shown_the_very_module(api: Api, kind: str) -> None:
    shown: Log = []
    module = scaled()
    api(kind, module, lambda module, *_: shown.append(module))
    train(module)
    assert len(shown) == 1 and shown[0] is module


def test_the_forward_hook_is_shown_what_the_pre_hooks_left(api: Api) -> None:
    log: Log = []
    module = scaled()
    api("forward pre", module, lambda module, args, kwargs: ((args[0] * 2,), {"scale": 10.0}), with_kwargs=True)
    api("forward", module, keep(log), with_kwargs=True)
    with torch.no_grad():
        module(leaf(), scale=1.0)
    assert log == [(([2.0, -4.0, 6.0],), {"scale": 10.0}, [10.0, 40.0, 120.0])]


def test_gradients_come_as_tuples_with_none_in_the_place_of_what_is_no_tensor(api: Api) -> None:
    log: Log = []
    module = Computes(lambda weight, n, x, flag, y: (x * weight, None, y * n, "text"))
    for kind in BACKWARD:
        api(kind, module, keep(log))
    a, _, b, _ = module(3, leaf() * 1, True, leaf() * 1)
    (a + b * 2).sum().backward()
    ones, twos = [1.0] * 3, [2.0] * 3
    assert log == [
        ((ones, None, twos, None),),
        ((None, [0.5, -1.0, 2.0], None, [6.0] * 3), (ones, None, twos, None)),
    ]


@pytest.mark.parametrize("kind", BACKWARD)
def test_the_gradients_are_tuples(api: Api, kind: str) -> None:
    kinds: Log = []
    module = scaled()
    api(kind, module, lambda module, *grads: kinds.extend(isinstance(grad, tuple) for grad in grads))
    train(module)
    assert kinds == [True] * (1 if kind == "backward pre" else 2)


def test_keyword_arguments_have_no_entry_in_grad_input_in_pytorch_and_a_named_one_in_hookline() -> None:
    def shown(api: Api) -> Any:
        log: Log = []
        module = Computes(lambda weight, x, y: x * weight + y * 3)
        api("backward", module, keep(log))
        module(leaf() * 1, y=leaf() * 1).sum().backward()
        return log[0][0]

    assert shown(STOCK) == ([0.5, -1.0, 2.0],)
    assert shown(OURS) == ([0.5, -1.0, 2.0], [3.0] * 3)


# ---------------------------------------------------------------- what hooks may return


RETURNED_BY_PRE_HOOK: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "None": (lambda x: None, [1.0, -2.0, 3.0]),
    "one value": (lambda x: x * 2, [2.0, -4.0, 6.0]),
    "a tuple of one": (lambda x: (x * 2,), [2.0, -4.0, 6.0]),
    "a tuple of two": (lambda x: (x, 5.0), [5.0, -10.0, 15.0]),
    "zero, which is a value": (lambda x: 0, 0.0),
}


@pytest.mark.parametrize("returned", RETURNED_BY_PRE_HOOK)
def test_what_a_forward_pre_hook_returns_is_the_new_input(api: Api, returned: str) -> None:
    function, expected = RETURNED_BY_PRE_HOOK[returned]
    module = Computes(lambda weight, x, scale=1.0: torch.as_tensor(x * scale, dtype=torch.float64))
    api("forward pre", module, lambda module, args: function(args[0]))
    assert module(leaf()).tolist() == expected


def test_a_returned_list_is_one_argument_and_is_not_unpacked(api: Api) -> None:
    module = Computes(lambda weight, pair: type(pair).__name__ + str(len(pair)))
    api("forward pre", module, lambda module, args: [args[0], args[0]])
    assert module(1) == "list2"


def test_a_pre_hook_without_keywords_leaves_those_of_the_call_alone(api: Api) -> None:
    module = scaled()
    api("forward pre", module, lambda module, args: args[0] * 2)
    assert module(leaf(), scale=10.0).tolist() == [10.0, 40.0, 120.0]


def test_a_pre_hook_with_keywords_may_take_add_and_move_arguments(api: Api) -> None:
    module = Computes(lambda weight, x, y=0.0, z=0.0: x + 10 * y + 100 * z)
    api("forward pre", module, lambda module, args, kwargs: (args[:1], {"y": args[1], "z": 3}), with_kwargs=True)
    assert module(1, 2) == 321


def test_a_pre_hook_may_write_into_the_keywords_it_is_shown(api: Api) -> None:
    module = Computes(lambda weight, x, y: x + 10 * y)
    api("forward pre", module, lambda module, args, kwargs: kwargs.update(y=7), with_kwargs=True)
    mine = {"y": 2}
    assert module(1, **mine) == 71 and mine == {"y": 2}


def test_a_pre_hook_may_write_into_the_tensor_it_is_shown(api: Api) -> None:
    module, x = scaled(), vector(1.0, 1.0, 1.0)
    api("forward pre", module, lambda module, args: _doubled(args[0]))
    assert module(x).tolist() == [1.0, -2.0, 4.0] and x.tolist() == [2.0, 2.0, 2.0]


def _doubled(x: Tensor) -> None:
    x.mul_(2)


@pytest.mark.parametrize("returned", [1, "ab", (1,), (1, 2, 3), [(), {}], {"x": 1}], ids=repr)
def test_a_pre_hook_with_keywords_that_returns_no_pair_is_a_runtime_error(api: Api, returned: Any) -> None:
    module = scaled()
    api("forward pre", module, lambda *_: returned, with_kwargs=True)
    with pytest.raises(RuntimeError, match="must return None or"):
        module(leaf())


@pytest.mark.parametrize("returned", [([vector(1, 1, 1)], {}), ((vector(1, 1, 1),), [])], ids=["list", "no dict"])
def test_a_pair_that_is_no_tuple_and_dict_is_taken_on_trust_by_pytorch_and_named_by_hookline(returned: Any) -> None:
    module = scaled()
    hookline.register_forward_pre_hook(module, lambda *_: returned, with_kwargs=True)
    with pytest.raises(HookError, match=r"must return None or the pair \(args: tuple, kwargs: dict\)"):
        module(leaf())
    module = scaled()
    module.register_forward_pre_hook(lambda *_: returned, with_kwargs=True)
    if isinstance(returned[1], dict):
        assert module(leaf()).tolist() == [0.5, -1.0, 2.0]
    else:
        with pytest.raises(TypeError, match="mapping"):
            module(leaf())


@pytest.mark.parametrize("value", [False, 0, "", (), [], {}, "text", (None,)], ids=repr)
def test_anything_but_none_that_a_forward_hook_returns_is_the_new_output(api: Api, value: Any) -> None:
    module = scaled()
    api("forward", module, lambda *_: value)
    assert module(leaf()) is value


def test_forward_hooks_form_a_chain(api: Api) -> None:
    log: Log = []
    module = Computes(lambda weight, x: x + 1)
    for kind, position in (("forward pre", 0), ("forward", 1)):
        api(kind, module, lambda module, *shown, i=position: shown[i] * 10 if i else shown[0][0] * 10)
        api(kind, module, lambda module, *shown, i=position: log.append(shown[i] if i else shown[0][0]))
        api(kind, module, lambda module, *shown, i=position: shown[i] + 5 if i else shown[0][0] + 5)
    assert module(2) == 265 and log == [20, 260]


def test_writing_into_the_input_after_the_call_does_not_reach_the_output(api: Api) -> None:
    module, x = scaled(), vector(1.0, 1.0, 1.0)
    api("forward", module, lambda module, args, output: _doubled(args[0]))
    assert module(x).tolist() == [0.5, -1.0, 2.0] and x.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("kind", BACKWARD)
def test_a_returned_gradient_is_used_from_there_on(api: Api, kind: str) -> None:
    log: Log = []
    module = scaled(log)
    api(kind, module, lambda module, *grads: tuple(grad * 10 for grad in grads[0]))
    api(kind, module, lambda module, *grads: log.append(plain(grads[0])))
    x = train(module)
    assert x.grad.tolist() == [5.0, -10.0, 20.0]
    assert log[-1 if kind == "backward" else 1] == (([5.0, -10.0, 20.0],) if kind == "backward" else ([10.0] * 3,))
    parameter = [1.0, -2.0, 3.0] if kind == "backward" else [10.0, -20.0, 30.0]
    assert module.weight.grad.tolist() == parameter


@pytest.mark.parametrize("kind", BACKWARD)
@pytest.mark.parametrize("entries", [0, 2, 3])
def test_a_wrong_number_of_gradients_is_a_runtime_error(api: Api, kind: str, entries: int) -> None:
    module = scaled()
    api(kind, module, lambda module, *grads: (grads[0][0],) * entries)
    with pytest.raises(RuntimeError):
        train(module)
    assert module.weight.grad is None or kind == "backward"


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
def test_where_no_input_requires_a_gradient_a_hook_may_return_none_only(api: Api) -> None:
    module = scaled()
    handle = api("backward", module, lambda *_: (None,))
    module(leaf().detach()).sum().backward()
    handle.remove()
    api("backward", module, lambda *_: (vector(1, 1, 1),))
    with pytest.raises(RuntimeError):
        module(leaf().detach()).sum().backward()


@pytest.mark.parametrize("kind", BACKWARD)
def test_a_hook_that_writes_into_its_gradient_breaks_the_rule_unnoticed_in_pytorch_and_raises_in_hookline(
    kind: str,
) -> None:
    def write(module: nn.Module, *grads: Any) -> None:
        grads[0][0].mul_(10)

    def run(api: Api) -> Tensor:
        module, x = scaled(), leaf()
        api(kind, module, write)
        (module(x * 1) * vector(1, 1, 1)).sum().backward()
        return x.grad

    assert run(STOCK).tolist() == [5.0, -10.0, 20.0]
    with pytest.raises(MutationError, match="must not modify"):
        run(OURS)


@pytest.mark.parametrize("where", ["the input", "the output"])
def test_writing_in_place_around_a_backward_hook_raises_in_pytorch_and_works_in_hookline(where: str) -> None:
    def run(api: Api | None) -> Any:
        module = Computes(lambda weight, x: (x.mul_(2) if where == "the input" else x) * weight)
        if api is not None:
            api("backward", module, lambda *_: None)
        x = leaf()
        out = module(x * 1)
        if where == "the output":
            out.mul_(2)
        out.sum().backward()
        return x.grad

    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        run(STOCK)
    assert equal(run(OURS), vector(1, -2, 4)) and equal(run(None), vector(1, -2, 4))


def test_forward_and_caller_get_views_in_pytorch_and_tensors_of_their_own_in_hookline() -> None:
    def views(api: Api) -> list[bool]:
        found: list[bool] = []
        module = Computes(lambda weight, x: (found.append(x._is_view()), x * weight)[1])
        api("backward", module, lambda *_: None)
        found.append(module(leaf() * 1)._is_view())
        return found

    assert views(STOCK) == [True, True]
    assert views(OURS) == [False, False]


def test_what_a_forward_hook_adds_of_the_input_counts_as_the_modules_in_pytorch_and_not_in_hookline() -> None:
    def shares(api: Api) -> tuple[Any, Any]:
        log: Log = []
        module, x = scaled(), leaf()
        api("forward", module, lambda module, args, output: output + args[0] * 100)
        api("backward", module, keep(log))
        module(x * 1).sum().backward()
        return log[0][0], x.grad.tolist()

    total = [100.5, 99.0, 102.0]
    assert shares(STOCK) == ((total,), total)
    assert shares(OURS) == (([0.5, -1.0, 2.0],), total)


# ---------------------------------------------------------------- the state around hooks


@pytest.mark.parametrize("mode", ["enable_grad", "no_grad", "inference_mode"])
def test_forward_hooks_run_in_the_grad_mode_of_the_call(api: Api, mode: str) -> None:
    log: Log = []
    module = scaled()
    for kind in FORWARD:
        api(kind, module, lambda *_: log.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled())))
    with getattr(torch, mode)():
        module(leaf())
    assert log == [(mode == "enable_grad", mode == "inference_mode")] * 2


@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_hooks_run_without_grad_unless_the_graph_is_asked_for(api: Api, create_graph: bool) -> None:
    log: Log = []
    module, x = scaled(), leaf()
    for kind in BACKWARD:
        api(kind, module, lambda *_: log.append(torch.is_grad_enabled()))
    h = x * 1
    api("tensor", h, lambda grad: log.append(torch.is_grad_enabled()))
    torch.autograd.grad((module(h) ** 2).sum(), [x], create_graph=create_graph)
    assert log == [create_graph] * 3 and torch.is_grad_enabled()


def test_a_grad_mode_that_a_hook_sets_holds_for_the_call(api: Api) -> None:
    module = scaled()
    api("forward pre", module, lambda *_: torch.set_grad_enabled(False) and None)
    api("forward", module, lambda *_: torch.set_grad_enabled(True) and None)
    assert not module(leaf()).requires_grad and torch.is_grad_enabled()


def test_hooks_may_call_the_module_they_stand_at_and_others(api: Api) -> None:
    log: Log = []
    module, other = scaled(log), Computes(lambda weight, x: (log.append("other"), x)[1])

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if log.count("module") > 2:
            return output
        return module(other(output))  # type: ignore[no-any-return]

    api("forward", module, hook)
    with torch.no_grad():
        assert module(vector(2, 2, 2)).tolist() == [0.25, -2.0, 16.0]
    assert log == ["module", "other", "module", "other", "module"]


def test_hooks_run_in_the_thread_of_the_call(api: Api) -> None:
    log: Log = []
    module = scaled()
    for kind in KINDS:
        api(kind, module, lambda *_: log.append(threading.get_ident()))
    thread = threading.Thread(target=train, args=(module,))
    thread.start()
    thread.join()
    assert len(log) == 4 and set(log) == {thread.ident}


def test_what_hooks_leave_on_the_module_stays(api: Api) -> None:
    module = scaled()
    api("forward pre", module, lambda module, args: setattr(module, "seen", args[0].sum().item()))
    api("forward", module, lambda module, args, output: setattr(module, "extra", nn.Linear(1, 1)))
    module(leaf())
    assert module.seen == 2.0 and list(module._modules) == ["extra"]


# ---------------------------------------------------------------- exceptions, and always_call


class Failure(Exception):
    pass


def fails(*_: Any) -> None:
    raise Failure("as planned")


@EVERY
def test_after_a_hook_that_raises_nothing_else_of_the_call_runs_and_the_next_call_is_whole(api: Api, kind: str) -> None:
    log: Log = []
    module = scaled()
    for name in KINDS:
        api(name, module, note(log, name))
        if name == kind:
            failing = api(kind, module, fails)
        api(name, module, note(log, f"{name} again"))
    whole = [entry for name in KINDS for entry in (name, f"{name} again")]
    with pytest.raises(Failure, match="as planned"):
        train(module)
    assert log == whole[: 2 * KINDS.index(kind) + 1]
    failing.remove()
    log.clear()
    train(module)
    assert log == whole


@pytest.mark.parametrize("where", ["module", "forward pre", "inner module"])
def test_always_called_hooks_run_with_none_when_the_call_raises(api: Api, where: str) -> None:
    log: Log = []
    module = scaled()
    if where == "forward pre":
        api("forward pre", module, fails)
    else:
        inner = Computes(fails)
        module = inner if where == "module" else Computes(lambda weight, x: inner(x))
    api("forward", module, note(log, "never"))
    api("forward", module, lambda module, args, output: log.append(output), always_call=True)
    api("forward", module, note(log, "before"), always_call=True, prepend=True)
    api(
        "forward",
        module,
        lambda module, args, kwargs, output: log.append((len(args), kwargs, output)),
        always_call=True,
        with_kwargs=True,
    )
    with pytest.raises(Failure):
        module(leaf())
    assert log == ["before", None, (1, {}, None)]


def test_an_always_called_hook_cannot_rescue_the_call(api: Api) -> None:
    module = Computes(fails)
    api("forward", module, lambda *_: "rescued", always_call=True)
    with pytest.raises(Failure):
        module(leaf())


def test_an_always_called_hook_runs_once_a_call(api: Api) -> None:
    log: Log = []
    module = scaled()
    api("forward", module, note(log, "first"), always_call=True)
    failing = api("forward", module, fails)
    api("forward", module, note(log, "last"), always_call=True)
    with pytest.raises(Failure):
        module(leaf())
    assert log == ["first", "last"]
    failing.remove()
    module(leaf())
    assert log == ["first", "last"] * 2


def test_an_always_called_hook_that_raises_in_a_sound_call_raises(api: Api) -> None:
    module = scaled()
    api("forward", module, fails, always_call=True)
    with pytest.raises(Failure):
        module(leaf())


def test_after_a_failing_hook_always_called_ones_get_the_output_so_far_in_pytorch_and_none_in_hookline() -> None:
    def shown(api: Api) -> Any:
        log: Log = []
        module = Computes(lambda weight, x: x + 1)
        api("forward", module, fails)
        api("forward", module, lambda module, args, output: log.append(output), always_call=True)
        with pytest.raises(Failure):
            module(1)
        return log

    assert shown(STOCK) == [2]
    assert shown(OURS) == [None]


def test_a_failing_always_called_hook_is_a_warning_in_pytorch_and_a_note_of_the_error_in_hookline() -> None:
    def second(*_: Any) -> None:
        raise KeyError("second")

    module = Computes(fails)
    STOCK("forward", module, second, always_call=True)
    with pytest.warns(UserWarning, match="raised an exception that was silenced.*second"), pytest.raises(Failure):
        module(1)
    module = Computes(fails)
    OURS("forward", module, second, always_call=True)
    with pytest.raises(Failure) as caught:
        module(1)
    assert ["second" in text for text in caught.value.__notes__] == [True]


def test_an_interrupt_passes_always_called_hooks_by_in_pytorch_and_runs_them_in_hookline() -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def ran(api: Api) -> Log:
        log: Log = []
        module = Computes(interrupted)
        api("forward", module, note(log, "ran"), always_call=True)
        with pytest.raises(KeyboardInterrupt):
            module(1)
        return log

    assert ran(STOCK) == []
    assert ran(OURS) == ["ran"]


# ---------------------------------------------------------------- handles


@EVERY
def test_a_removed_hook_does_not_fire_and_removing_again_is_harmless(api: Api, kind: str) -> None:
    log: Log = []
    module = scaled()
    first, middle, last = (api(kind, module, note(log, name)) for name in "abc")
    middle.remove()
    middle.remove()
    train(module)
    last.remove()
    middle.remove()
    train(module)
    first.remove()
    train(module)
    assert log == ["a", "c", "a"]


@EVERY
def test_a_with_block_gives_the_handle_and_removes_at_its_end_also_after_an_exception(api: Api, kind: str) -> None:
    log: Log = []
    module = scaled()
    handle = api(kind, module, note(log, "hook"))
    with handle as inside:
        assert inside is handle
        train(module)
    train(module)
    with pytest.raises(Failure), api(kind, module, note(log, "second")):
        train(module)
        raise Failure
    train(module)
    assert log == ["hook", "second"]


@EVERY
def test_a_handle_that_was_removed_inside_its_block_may_leave_it(api: Api, kind: str) -> None:
    log: Log = []
    module = scaled()
    with api(kind, module, note(log, "a")) as handle, api(kind, module, note(log, "b")):
        handle.remove()
        train(module)
    with handle:
        train(module)
    assert log == ["b"]


def test_every_handle_has_a_number_of_its_own_that_rises(api: Api) -> None:
    modules = [scaled(), scaled()]
    ids = [api(kind, module, fails).id for kind in KINDS for module in modules]
    assert ids == sorted(set(ids))


@EVERY
def test_a_removed_handle_keeps_neither_module_nor_hook_and_outlives_both(api: Api, kind: str) -> None:
    class Hook:
        def __call__(self, *_: Any) -> None: ...

    module, hook = nn.Identity(), Hook()
    handle = api(kind, module, hook)
    gone = [weakref.ref(module), weakref.ref(hook)]
    handle.remove()
    del module, hook
    assert [ref() for ref in gone] == [None, None]
    handle.remove()


@EVERY
def test_the_same_function_twice_fires_twice_and_each_handle_takes_its_own_place(api: Api, kind: str) -> None:
    log: Log = []
    module = scaled()
    hook = note(log, "same")
    handles = [api(kind, module, hook), api(kind, module, note(log, "other")), api(kind, module, hook)]
    train(module)
    handles[0].remove()
    train(module)
    handles[2].remove()
    train(module)
    assert log == ["same", "other", "same", "other", "same", "other"]


@EVERY
def test_a_removed_hook_that_is_registered_again_goes_to_the_end(api: Api, kind: str) -> None:
    log: Log = []
    module = scaled()
    first = note(log, "first")
    handle = api(kind, module, first)
    api(kind, module, note(log, "second"))
    handle.remove()
    api(kind, module, first)
    train(module)
    assert log == ["second", "first"]


@EVERY
def test_one_function_at_two_modules_is_told_which_one(api: Api, kind: str) -> None:
    shown: Log = []
    model = nn.Sequential(scaled(), scaled())
    handles = [api(kind, module, lambda module, *_: shown.append(module)) for module in model]
    train(model)
    forwards = [model[0], model[1]]
    wanted = forwards if kind in FORWARD else forwards[::-1]
    assert all(one is other for one, other in zip(shown, wanted, strict=True))
    handles[0].remove()
    shown.clear()
    train(model)
    assert len(shown) == 1 and shown[0] is model[1]


# ---------------------------------------------------------------- shared modules


def test_a_shared_module_has_one_set_of_hooks_which_fires_at_every_call(api: Api) -> None:
    log: Log = []
    shared = scaled()
    model = nn.Sequential(shared, nn.Sequential(shared), shared)
    api("forward pre", model[0], lambda module, args: log.append(("pre", plain(args[0].detach()))))
    api("forward", model[1][0], lambda module, args, output: log.append(("forward", plain(output))))
    handle = api("backward pre", model[2], lambda module, grads: log.append(("backward pre", plain(grads[0]))))
    model(vector(4, 4, 4).requires_grad_() * 1).sum().backward()
    states = [[4.0, 4.0, 4.0], [2.0, -4.0, 8.0], [1.0, 4.0, 16.0], [0.5, -4.0, 32.0]]
    forwards = [entry for n in range(3) for entry in (("pre", states[n]), ("forward", states[n + 1]))]
    backwards = [("backward pre", g) for g in ([1.0] * 3, [0.5, -1.0, 2.0], [0.25, 1.0, 4.0])]
    assert log == [*forwards, *backwards]
    handle.remove()
    log.clear()
    model(leaf())
    assert len(log) == 6


def test_two_modules_that_share_a_parameter_share_no_hook(api: Api) -> None:
    log: Log = []
    one, other = scaled(), scaled()
    other.weight = one.weight
    for kind in KINDS:
        api(kind, one, note(log, kind))
    train(other)
    assert log == []
    train(one)
    assert log == list(KINDS)


# ---------------------------------------------------------------- hooks that come and go during a call


@EVERY
def test_a_hook_may_remove_itself_and_the_others_still_fire(api: Api, kind: str) -> None:
    log: Log = []
    module = scaled()
    api(kind, module, note(log, "a"))
    handle = api(kind, module, lambda *_: (log.append("once"), handle.remove())[1])
    api(kind, module, note(log, "b"))
    train(module)
    train(module)
    assert log == ["a", "once", "b", "a", "b"]


@EVERY
def test_a_hook_that_removes_one_before_it_changes_the_next_call_only(api: Api, kind: str) -> None:
    log: Log = []
    module = scaled()
    handle = api(kind, module, note(log, "a"))
    api(kind, module, lambda *_: (log.append("b"), handle.remove())[1])
    train(module)
    train(module)
    assert log == ["a", "b", "b"]


@EVERY
def test_a_hook_that_removes_one_behind_it_is_heeded_in_the_next_call_by_pytorch_and_at_once_by_hookline(
    kind: str,
) -> None:
    def order(api: Api) -> str:
        log: Log = []
        module, handles = scaled(), []
        api(kind, module, lambda *_: (log.append("a"), handles[0].remove())[1])
        handles.append(api(kind, module, note(log, "b")))
        train(module)
        train(module)
        return "".join(log)

    assert order(STOCK) == "aba"
    assert order(OURS) == "aa"


@EVERY
@pytest.mark.parametrize("prepend", [False, True])
def test_a_hook_that_registers_one_of_its_kind_is_heeded_from_the_next_call_on(
    api: Api, kind: str, prepend: bool
) -> None:
    log: Log = []
    module, added = scaled(), []

    def register(*_: Any) -> None:
        log.append("a")
        if not added:
            added.append(api(kind, module, note(log, "new"), prepend=prepend))

    api(kind, module, register)
    train(module)
    assert log == ["a"]
    train(module)
    assert log == (["a", "new", "a"] if prepend else ["a", "a", "new"])


@pytest.mark.parametrize("by", ["a pre-hook", "the module"])
def test_a_forward_hook_that_the_call_registers_fires_in_this_call_in_pytorch_and_from_the_next_on_in_hookline(
    by: str,
) -> None:
    def order(api: Api) -> Log:
        log: Log = []

        def register(*_: Any) -> None:
            if not log:
                log.append("registered")
                api("forward", module, note(log, "new"))

        module = Computes(lambda weight, x: register() if by == "the module" else None)
        api("forward pre", module, register if by == "a pre-hook" else lambda *_: None)
        module(1)
        log.append("second call")
        module(1)
        return log

    assert order(STOCK) == ["registered", "new", "second call", "new"]
    assert order(OURS) == ["registered", "second call", "new"]


@pytest.mark.parametrize("kind", BACKWARD)
def test_a_backward_hook_that_comes_after_the_forward_is_not_for_that_call(api: Api, kind: str) -> None:
    log: Log = []
    module = scaled()
    api(kind, module, note(log, "there"))
    out = module(leaf() * 1)
    api(kind, module, note(log, "late"))
    out.sum().backward()
    assert log == ["there"]
    train(module)
    assert log == ["there", "there", "late"]


@pytest.mark.parametrize("kind", BACKWARD)
def test_a_backward_hook_that_is_removed_after_the_forward_still_fires_in_pytorch_and_not_in_hookline(
    kind: str,
) -> None:
    def fired(api: Api) -> Log:
        log: Log = []
        module = scaled()
        handle = api(kind, module, note(log, "removed"))
        out = module(leaf() * 1)
        handle.remove()
        out.sum().backward()
        return log

    assert fired(STOCK) == ["removed"]
    assert fired(OURS) == []


# ---------------------------------------------------------------- hooks on tensors


def test_the_gradient_is_doubled_by_a_tensor_hook_until_it_is_removed(api: Api) -> None:
    v = vector(0, 0, 0).requires_grad_()
    handle = api("tensor", v, lambda grad: grad * 2)
    v.backward(vector(1, 2, 3))
    assert v.grad.tolist() == [2.0, 4.0, 6.0]
    handle.remove()
    handle.remove()
    v.backward(vector(1, 1, 1))
    assert v.grad.tolist() == [3.0, 5.0, 7.0]


def test_tensor_hooks_form_a_chain_in_the_order_of_registration(api: Api) -> None:
    log: Log = []
    x = leaf()
    h = x * 1
    same = keep_gradient(log)
    api("tensor", h, same)
    api("tensor", h, lambda grad: grad * 10)
    api("tensor", h, same)
    api("tensor", h, lambda grad: grad + 1)
    h.sum().backward()
    assert log == [[1.0] * 3, [10.0] * 3] and x.grad.tolist() == [11.0] * 3


def keep_gradient(log: Log) -> Callable[[Tensor], None]:
    return lambda grad: log.append(grad.tolist())


def test_a_tensor_hook_fires_once_a_pass_with_the_sum_of_all_uses(api: Api) -> None:
    log: Log = []
    h = leaf() * 1
    api("tensor", h, keep_gradient(log))
    loss = (h * 2 + h * 3).sum() + h.sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    torch.autograd.grad(loss, [h])
    assert log == [[6.0] * 3] * 3


def test_a_tensor_that_requires_no_gradient_is_a_runtime_error(api: Api) -> None:
    with pytest.raises(RuntimeError, match="require"):
        api("tensor", vector(1, 2), fails)


def test_a_tensor_hook_is_removed_by_its_block_and_by_itself(api: Api) -> None:
    log: Log = []
    x = leaf()
    with api("tensor", x, note(log, "inside")):
        (x * 2).sum().backward()
    handle = api("tensor", x, lambda grad: (log.append("once"), handle.remove())[1])
    for _ in range(2):
        (x * 2).sum().backward()
    assert log == ["inside", "once"]


@pytest.mark.parametrize("wrong", [lambda g: g[:1], lambda g: 5], ids=["shape", "no tensor"])
def test_a_tensor_hook_that_returns_no_gradient_of_that_kind_is_an_error(api: Api, wrong: Any) -> None:
    x = leaf()
    api("tensor", x, wrong)
    with pytest.raises((RuntimeError, TypeError)):
        (x * 2).sum().backward()


def test_a_tensor_hook_stays_with_the_value_that_an_in_place_operation_replaces(api: Api) -> None:
    log: Log = []
    h = leaf() * 1
    api("tensor", h, keep_gradient(log))
    h.mul_(5)
    h.sum().backward()
    assert log == [[5.0] * 3]


def test_tensor_hooks_of_the_input_and_output_stand_outside_the_modules_pair(api: Api) -> None:
    log: Log = []
    module, x = scaled(), leaf()
    for kind in BACKWARD:
        api(kind, module, note(log, kind))
    h = x * 1
    api("tensor", h, note(log, "input"))
    out = module(h)
    api("tensor", out, note(log, "output"))
    api("tensor", x, note(log, "leaf"))
    out.sum().backward()
    assert log == ["output", "backward pre", "backward", "input", "leaf"]


# ---------------------------------------------------------------- PyTorch's global hooks beside per-module ones


@pytest.fixture
def everywhere() -> Iterator[Callable[..., Any]]:
    """Registers hooks of PyTorch's for all modules and takes them away at the end."""
    handles = []

    def register(kind: str, hook: Callable[..., Any], **options: Any) -> Any:
        handles.append(GLOBAL[kind](hook, **options))
        return handles[-1]

    yield register
    for handle in handles:
        handle.remove()
        torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)  # what PyTorch leaves behind


@pytest.mark.parametrize("kind", ["forward pre", "backward pre"])
@pytest.mark.parametrize("prepend", [False, True])
def test_global_hooks_before_the_work_come_first_also_before_prepended_ones(
    api: Api, kind: str, prepend: bool, everywhere: Callable[..., Any]
) -> None:
    log: Log = []
    module = scaled()
    api(kind, module, note(log, "module's"), prepend=prepend)
    everywhere(kind, note(log, "global"))
    train(module)
    assert log == ["global", "module's"]


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_global_hooks_after_the_work_come_before_pytorchs_per_module_ones_and_after_ours(
    kind: str, everywhere: Callable[..., Any]
) -> None:
    log: Log = []
    module = scaled()
    STOCK(kind, module, note(log, "stock"), prepend=True)
    OURS(kind, module, note(log, "ours"))
    everywhere(kind, note(log, "global"))
    train(module)
    assert log == ["ours", "global", "stock"]


def test_all_three_sets_of_hooks_in_one_call_and_pass(everywhere: Callable[..., Any]) -> None:
    log: Log = []
    module = scaled(log)
    for kind in KINDS:
        STOCK(kind, module, note(log, f"stock {kind}"))
        everywhere(kind, note(log, f"global {kind}"))
        OURS(kind, module, note(log, f"our {kind}"))
    train(module)
    assert log == [
        *("global forward pre", "stock forward pre", "our forward pre"),
        "module",
        *("our forward", "global forward", "stock forward"),
        *("global backward pre", "stock backward pre", "our backward pre"),
        "module's backward",
        *("our backward", "global backward", "stock backward"),
    ]


def test_forward_called_directly_passes_pytorchs_hooks_by_and_not_ours(everywhere: Callable[..., Any]) -> None:
    log: Log = []
    module = scaled()
    for kind in KINDS:
        STOCK(kind, module, note(log, "stock"))
        everywhere(kind, note(log, "global"))
        OURS(kind, module, note(log, kind))
    module.forward(leaf() * 1).sum().backward()
    assert log == list(KINDS)


@pytest.mark.parametrize("around", ["global", "stock"])
def test_what_pytorchs_hooks_return_reaches_ours_on_the_way_in_and_not_on_the_way_out(
    around: str, everywhere: Callable[..., Any]
) -> None:
    def register(kind: str, hook: Callable[..., Any]) -> Any:
        return everywhere(kind, hook) if around == "global" else STOCK(kind, module, hook)

    log: Log = []
    module = scaled()
    register("forward pre", lambda module, args: args[0] * 2)
    register("forward", lambda module, args, output: output * 10)
    register("backward pre", lambda module, grads: (grads[0] * 3,))
    register("backward", lambda module, grads, _: (grads[0] * 7,))
    for kind in KINDS:
        OURS(kind, module, keep(log))
    x = leaf()
    out = module(x * 1)
    assert out.tolist() == [10.0, 40.0, 120.0]
    out.sum().backward()
    pre, forward, backward_pre, backward = log
    assert pre == (([2.0, -4.0, 6.0],),) and forward == (([2.0, -4.0, 6.0],), [1.0, 4.0, 12.0])
    assert backward_pre == (([30.0] * 3,),) and backward == (([15.0, -30.0, 60.0],), ([30.0] * 3,))
    assert x.grad.tolist() == [210.0, -420.0, 840.0]


def test_what_our_hooks_return_reaches_pytorchs(everywhere: Callable[..., Any]) -> None:
    log: Log = []
    module = scaled()
    OURS("forward", module, lambda module, args, output: output * 10)
    OURS("backward", module, lambda module, grads, _: (grads[0] * 7,))
    everywhere("forward", lambda module, args, output: log.append(plain(output)))
    everywhere("backward", lambda module, grads, _: log.append(plain(grads)))
    x = train(module)
    assert log == [[5.0, 20.0, 60.0], ([35.0, -70.0, 140.0],)]
    assert x.grad.tolist() == [35.0, -70.0, 140.0]


def test_a_global_hook_fires_once_for_each_module_hooked_or_not(everywhere: Callable[..., Any]) -> None:
    def modules(hooked: bool) -> list[str]:
        model = nn.Sequential(scaled(), nn.Sequential(nn.ReLU(), scaled()))
        if hooked:
            for kind in KINDS:
                OURS(kind, model[1], lambda *_: None)
                OURS(kind, model[1][1], lambda *_: None)
        log: list[str] = []
        handles = [everywhere(kind, lambda module, *_, k=kind: log.append(k + plain(module))) for kind in KINDS]
        train(model)
        for handle in handles:
            handle.remove()
        return log

    assert modules(hooked=True) == modules(hooked=False) != []


def test_global_always_called_hooks_run_beside_ours_when_the_module_raises(everywhere: Callable[..., Any]) -> None:
    log: Log = []
    module = Computes(fails)
    OURS("forward", module, lambda module, args, output: log.append(("ours", output)), always_call=True)
    STOCK("forward", module, lambda module, args, output: log.append(("stock", output)), always_call=True)
    everywhere("forward", lambda module, args, output: log.append(("global", output)), always_call=True)
    everywhere("forward", note(log, "never"))
    with pytest.raises(Failure):
        module(leaf())
    assert log == [("ours", None), ("global", None), ("stock", None)]


def test_a_global_forward_hook_with_keywords_is_shown_those_of_a_hooked_module(everywhere: Callable[..., Any]) -> None:
    log: Log = []
    module = scaled()
    OURS("forward", module, lambda *_: None)
    everywhere("forward", lambda module, args, kwargs, output: log.append(kwargs), with_kwargs=True)
    module(leaf(), scale=2.0)
    assert log == [{"scale": 2.0}]


REGISTRATIONS: dict[str, tuple[Callable[..., Any], Callable[[nn.Module, Any], Any], Callable[[], Any]]] = {
    "buffer": (
        torch_module.register_module_buffer_registration_hook,
        lambda module, value: module.register_buffer("made", value),
        lambda: torch.zeros(1),
    ),
    "parameter": (
        torch_module.register_module_parameter_registration_hook,
        lambda module, value: module.register_parameter("made", value),
        lambda: nn.Parameter(torch.zeros(1)),
    ),
    "parameter by assignment": (
        torch_module.register_module_parameter_registration_hook,
        lambda module, value: setattr(module, "made", value),
        lambda: nn.Parameter(torch.zeros(1)),
    ),
    "module": (
        torch_module.register_module_module_registration_hook,
        lambda module, value: module.add_module("made", value),
        nn.ReLU,
    ),
    "module by assignment": (
        torch_module.register_module_module_registration_hook,
        lambda module, value: setattr(module, "made", value),
        nn.ReLU,
    ),
}


@pytest.mark.parametrize("what", REGISTRATIONS)
@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
def test_registration_hooks_hear_of_what_a_module_gets_and_may_replace_it(what: str, hooked: bool) -> None:
    """Hooking itself registers nothing at a module, so they hear nothing of that."""
    register, give, make = REGISTRATIONS[what]
    log: Log = []
    value, other = make(), make()
    module = scaled()

    def hook(module: nn.Module, name: str, thing: Any) -> Any:
        log.append((module, name, thing))
        return other

    with register(hook):
        handles = [OURS(kind, module, lambda *_: None) for kind in KINDS if hooked]
        give(module, value)
        for handle in handles:
            handle.remove()
    assert len(log) == 1 and all(got is want for got, want in zip(log[0], (module, "made", value), strict=True))
    assert module.made is other


def test_our_hooks_do_not_stop_pytorchs_legacy_backward_hook_nor_its_full_one() -> None:
    """PyTorch refuses the one where the other is; ours are neither."""
    for name in ("register_full_backward_hook", "register_backward_hook"):
        module = scaled()
        OURS("backward", module, lambda *_: None)
        getattr(module, name)(lambda *_: None)
        OURS("backward", module, lambda *_: None)
    with pytest.raises(RuntimeError, match="Cannot use both regular backward hooks and full backward hooks"):
        module.register_full_backward_hook(lambda *_: None)


# ---------------------------------------------------------------- random programs


class Program:
    """Registers, removes and calls at random; the same number gives the same program for each API."""

    def __init__(self, api: Api, number: int) -> None:
        self.api, self.random, self.log, self.handles = api, random.Random(number), [], []
        self.model = nn.Sequential(scaled(), nn.Sequential(scaled(), scaled()), scaled())
        self.model.append(self.model[0])
        self.paths = dict(self.model.named_modules())
        self.count = 0

    def run(self) -> Log:
        for _ in range(self.random.randrange(8, 25)):
            draw = self.random.random()
            if draw < 0.6 or not self.handles:
                self.register()
            elif draw < 0.8:
                self.random.choice(self.handles).remove()
            else:
                self.call()
        self.call()
        return self.log

    def register(self) -> None:
        kind, path = self.random.choice(KINDS), self.random.choice(list(self.paths))
        options = {"prepend": self.random.random() < 0.4}
        if kind in FORWARD:
            options["with_kwargs"] = self.random.random() < 0.3
        if kind == "forward":
            options["always_call"] = self.random.random() < 0.4
        self.count += 1
        behaviour = self.random.choices(["look", "change", "fail once"], [6, 3, 1])[0]
        hook = self.hook(self.count, kind, behaviour, bool(options.get("with_kwargs")))
        self.handles.append(self.api(kind, self.paths[path], hook, **options))

    def hook(self, number: int, kind: str, behaviour: str, with_kwargs: bool) -> Callable[..., Any]:
        left = [behaviour == "fail once"]

        def run(module: nn.Module, *shown: Any) -> Any:
            self.log.append((number, kind, plain(shown)))
            if True in left:
                left.clear()
                raise Failure(str(number))
            if behaviour != "change" or shown[-1] is None:
                return None
            if kind == "forward pre":
                return ((shown[0][0] + number,), shown[1]) if with_kwargs else shown[0][0] + number
            if kind == "forward":
                return shown[-1] * number
            return tuple(grad * number for grad in shown[0])

        return run

    def call(self) -> None:
        x, start = leaf(*(self.random.randrange(1, 5) for _ in range(3))), len(self.log)
        try:
            out = self.model(x * 1)
            out.sum().backward()
            self.log.append(("output", plain(out)))
        except Failure as failure:
            # What an always_call hook is shown after a failure is one of the differences above.
            self.log[start:] = [entry[:2] if entry[1] == "forward" else entry for entry in self.log[start:]]
            self.log.append(("failed", str(failure)))
        self.log.append(("gradients", [plain(t.grad) for t in (x, *self.model.parameters())]))


@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True`` raised an exception")
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_programs_leave_the_same_trace_in_both(first: int) -> None:
    failures = 0
    for number in range(first, first + 10):
        stock, ours = Program(STOCK, number).run(), Program(OURS, number).run()
        failures += any(entry[0] == "failed" for entry in stock)
        assert ours == stock, f"program {number}"
    assert failures, "some of the programs contain a hook that raises"
