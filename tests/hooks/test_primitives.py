"""The registration functions: when hooks run, what they are shown, what they may return, and how they go away.

Each test holds for hookline what PyTorch documents of its own module hooks, or the better behaviour that is promised.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline
from hookline import Handle
from hookline.errors import ArgumentError, HookError, HooklineError

from .reference import Computes, equal, leaf, vector

WEIGHT = vector(0.5, -1.0, 2.0)
REGISTER: dict[str, Callable[..., Handle]] = {
    "forward pre": hookline.register_forward_pre_hook,
    "forward": hookline.register_forward_hook,
    "backward pre": hookline.register_backward_pre_hook,
    "backward": hookline.register_backward_hook,
}


def scaled() -> Computes:
    return Computes(lambda weight, x: x * weight)


def double() -> Computes:
    return Computes(lambda weight, x: x * 2)


def logging(log: list[str], name: str) -> Callable[..., None]:
    return lambda *_: log.append(name)


# ---------------------------------------------------------------- when hooks run


def test_hooks_run_in_the_order_of_the_kinds() -> None:
    log: list[str] = []
    module = Computes(lambda weight, x: (log.append("module"), x * weight)[1])
    for kind in reversed(REGISTER):
        REGISTER[kind](module, logging(log, kind))
    module(leaf()).sum().backward()
    assert log == ["forward pre", "module", "forward", "backward pre", "backward"]


@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_of_a_kind_run_as_they_were_registered_and_prepended_ones_before(kind: str) -> None:
    log: list[str] = []
    module = scaled()
    for name in ("first", "second"):
        REGISTER[kind](module, logging(log, name))
    for name in ("before", "before that"):
        REGISTER[kind](module, logging(log, name), prepend=True)
    module(leaf()).sum().backward()
    assert log == ["before that", "before", "first", "second"]


def test_pytorchs_own_hooks_of_every_kind_run_around_ours() -> None:
    log: list[str] = []
    module = scaled()
    for kind in REGISTER:
        REGISTER[kind](module, logging(log, f"our {kind}"))
    module.register_forward_pre_hook(logging(log, "stock forward pre"))
    module.register_forward_hook(logging(log, "stock forward"))
    module.register_full_backward_pre_hook(logging(log, "stock backward pre"))
    module.register_full_backward_hook(logging(log, "stock backward"))
    module(leaf() * 1).sum().backward()
    assert log == [
        *("stock forward pre", "our forward pre", "our forward", "stock forward"),
        *("stock backward pre", "our backward pre", "our backward", "stock backward"),
    ]


def test_pytorchs_hooks_keep_their_order_among_themselves() -> None:
    def order(hooked: bool) -> list[str]:
        log: list[str] = []
        module = scaled()
        if hooked:
            for register in REGISTER.values():
                register(module, lambda *_: None)
        for name in ("a", "b"):
            module.register_forward_pre_hook(logging(log, f"{name} pre"), prepend=name == "b")
            module.register_forward_hook(logging(log, f"{name} forward"))
            module.register_full_backward_hook(logging(log, f"{name} backward"))
            module.register_full_backward_pre_hook(logging(log, f"{name} backward pre"), prepend=name == "b")
        module(leaf() * 1).sum().backward()
        return log

    assert order(hooked=True) == order(hooked=False)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
def test_pytorchs_legacy_backward_hook_lives_next_to_ours() -> None:
    module, seen = scaled(), []
    hookline.register_backward_hook(module, lambda module, grad_input, grad_output: seen.append(("ours", grad_input)))
    module.register_backward_hook(lambda module, grad_input, grad_output: seen.append(("legacy", grad_output)))
    module(leaf() * 1).sum().backward()
    assert sorted(name for name, _ in seen) == ["legacy", "ours"]
    assert equal(tuple(dict(seen)["ours"]), (WEIGHT,))


def test_forward_called_directly_is_seen() -> None:
    log: list[str] = []
    module = scaled()
    for kind in REGISTER:
        REGISTER[kind](module, logging(log, kind))
    module.forward(leaf()).sum().backward()
    assert log == list(REGISTER)


def test_a_shared_module_runs_its_hooks_at_every_call() -> None:
    module, seen = scaled(), []
    hookline.register_backward_hook(module, lambda module, grad_input, grad_output: seen.append(grad_input[0]))
    model = nn.Sequential(module, module)
    model(leaf()).sum().backward()
    assert equal(seen, [WEIGHT, WEIGHT * WEIGHT])


def test_a_module_that_calls_itself_runs_its_hooks_for_each_level() -> None:
    class Power(nn.Module):
        def forward(self, x: Tensor, times: int) -> Tensor:
            return x if times == 0 else self(x * 2, times - 1)

    module, forwards, backwards = Power(), [], []
    hookline.register_forward_hook(module, lambda module, args, output: forwards.append(args[1]))
    hookline.register_backward_hook(module, lambda module, grads, _: backwards.append(grads[0]))
    module(leaf(), 2).sum().backward()
    assert forwards == [0, 1, 2]
    assert equal(backwards, [vector(1, 1, 1), vector(2, 2, 2), vector(4, 4, 4)])


@pytest.mark.parametrize("kind", ["backward pre", "backward"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_backward_hook_runs_where_gradients_are_off(kind: str, mode: Callable[[], Any]) -> None:
    module, seen = scaled(), []
    REGISTER[kind](module, lambda *_: seen.append(1))
    with mode():
        output = module(leaf())
    assert not output.requires_grad and not seen


def test_a_hook_that_is_registered_during_a_call_runs_from_the_next_call_on() -> None:
    module, log = double(), []

    def register(module: nn.Module, args: Any) -> None:
        if not log:
            hookline.register_forward_hook(module, logging(log, "late"))
            log.append("registered")

    hookline.register_forward_pre_hook(module, register)
    module(leaf())
    assert log == ["registered"]
    module(leaf())
    assert log == ["registered", "late"]


# ---------------------------------------------------------------- what hooks are shown


def test_hooks_are_shown_the_module_itself_and_the_callers_tensors() -> None:
    module, x, shown = double(), leaf(), []
    hookline.register_forward_pre_hook(module, lambda *seen: shown.append(seen))
    hookline.register_forward_hook(module, lambda *seen: shown.append(seen))
    output = module(x)
    (pre_module, pre_args), (post_module, post_args, post_output) = shown
    assert pre_module is post_module is module
    assert pre_args[0] is x and post_args[0] is x
    assert post_output is output


def test_keywords_are_shown_to_hooks_that_ask_for_them() -> None:
    module, shown = Computes(lambda weight, x, scale: x * scale), []
    hookline.register_forward_pre_hook(module, lambda module, args: shown.append(args))
    hookline.register_forward_pre_hook(module, lambda module, args, kwargs: shown.append(kwargs), with_kwargs=True)
    hookline.register_forward_hook(module, lambda module, args, output: shown.append(args))
    hookline.register_forward_hook(module, lambda module, args, kwargs, output: shown.append(kwargs), with_kwargs=True)
    module(leaf(), scale=3)
    assert [len(args) for args in shown[::2]] == [1, 1]
    assert shown[1::2] == [{"scale": 3}, {"scale": 3}]


def test_a_call_with_keywords_only_gives_named_gradients() -> None:
    module, seen = Computes(lambda weight, x: x * weight), []
    hookline.register_backward_hook(module, lambda module, grads, _: seen.append((grads.paths, grads[0])))
    module(x=leaf()).sum().backward()
    ((paths, grad),) = seen
    assert paths == ("kwargs['x']",) and equal(grad, WEIGHT)


def test_a_forward_hook_sees_the_input_as_it_was_passed() -> None:
    module, seen = Computes(lambda weight, x: x.relu_()), []
    hookline.register_forward_hook(module, lambda module, args, output: seen.append((args[0], output)))
    x = leaf() * 1
    module(x)
    ((shown, output),) = seen
    assert equal(shown.detach(), vector(1, -2, 3)) and equal(output.detach(), vector(1, 0, 3))
    assert equal(x.detach(), vector(1, 0, 3))


def test_gradients_are_named_and_plain_tuples_else() -> None:
    module, seen = Computes(lambda weight, x, y: (x * y, [x])), []
    hookline.register_backward_hook(module, lambda module, *grads: seen.extend(grads))
    first, (second,) = module(leaf() * 1, y=leaf() * 1)
    (first + second).sum().backward()
    grad_input, grad_output = seen
    assert isinstance(grad_input, tuple) and isinstance(grad_output, tuple)
    assert grad_input.paths == ("args[0]", "kwargs['y']")
    assert grad_output.paths == ("output[0]", "output[1][0]")


# ---------------------------------------------------------------- what a forward pre-hook may return


@pytest.mark.parametrize(
    ("returned", "scale"),
    [
        (lambda x: None, 1),
        (lambda x: x * 5, 5),
        (lambda x: (x * 5,), 5),
    ],
)
def test_a_forward_pre_hook_replaces_the_arguments(returned: Callable[[Tensor], Any], scale: int) -> None:
    module, x = double(), leaf()
    hookline.register_forward_pre_hook(module, lambda module, args: returned(args[0]))
    assert equal(module(x), x * scale * 2)


def test_a_list_from_a_forward_pre_hook_is_one_argument() -> None:
    module = Computes(lambda weight, pair: pair[0] + pair[1])
    hookline.register_forward_pre_hook(module, lambda module, args: [args[0], args[0] * 2])
    assert equal(module(leaf()), leaf() * 3)


def test_each_forward_pre_hook_gets_what_the_one_before_has_returned() -> None:
    module = double()
    hookline.register_forward_pre_hook(module, lambda module, args: args[0] + 1)
    hookline.register_forward_pre_hook(module, lambda module, args: args[0] * 10)
    assert equal(module(leaf()), (leaf() + 1) * 10 * 2)


def test_a_forward_pre_hook_replaces_keywords() -> None:
    module = Computes(lambda weight, x, scale: x * scale)
    hookline.register_forward_pre_hook(
        module, lambda module, args, kwargs: (args, {"scale": kwargs["scale"] * 7}), with_kwargs=True
    )
    assert equal(module(leaf(), scale=3), leaf() * 21)


@pytest.mark.parametrize("returned", [5, (1,), (1, 2), ((), ()), [(), {}], {"x": 1}])
def test_a_wrong_pair_from_a_forward_pre_hook_is_an_error(returned: Any) -> None:
    def wrong(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return returned

    module = double()
    hookline.register_forward_pre_hook(module, wrong, with_kwargs=True)
    with pytest.raises(HookError) as caught:
        module(leaf())
    message = str(caught.value)
    assert "wrong at Computes:input" in message
    assert f"returned {type(returned).__name__}" in message
    assert "must return None or the pair (args: tuple, kwargs: dict)" in message


def test_a_replaced_argument_gets_its_own_gradient() -> None:
    module, seen, x = scaled(), [], leaf()
    hookline.register_forward_pre_hook(module, lambda module, args: args[0] * 5)
    hookline.register_backward_hook(module, lambda module, grads, _: seen.append(grads[0]))
    module(x).sum().backward()
    assert equal(seen, [WEIGHT]) and equal(x.grad, 5 * WEIGHT)


# ---------------------------------------------------------------- what a forward hook may return


def test_a_forward_hook_replaces_the_output_for_the_next_hook_and_the_caller() -> None:
    module, seen = double(), []
    hookline.register_forward_hook(module, lambda module, args, output: output + 1)
    hookline.register_forward_hook(module, lambda module, args, output: seen.append(output))
    output = module(leaf())
    assert equal(output, leaf() * 2 + 1) and equal(seen, [output])


def test_a_forward_hook_may_return_a_value_of_any_kind() -> None:
    module = double()
    hookline.register_forward_hook(module, lambda module, args, output: {"y": output, "n": 3})
    output = module(leaf())
    assert set(output) == {"y", "n"} and equal(output["y"], leaf() * 2)


def test_the_gradient_of_a_replaced_output_is_shown_as_it_arrives_there() -> None:
    module, seen, x = scaled(), [], leaf()
    hookline.register_forward_hook(module, lambda module, args, output: output * 5)
    hookline.register_backward_hook(module, lambda module, *grads: seen.append(grads))
    (module(x) * 3).sum().backward()
    ((grad_input, grad_output),) = seen
    assert equal(tuple(grad_input), (15 * WEIGHT,)) and equal(tuple(grad_output), (vector(3, 3, 3),))
    assert equal(x.grad, 15 * WEIGHT)


def test_a_forward_hook_that_writes_into_the_output_changes_it() -> None:
    module, seen, x = scaled(), [], leaf()
    hookline.register_forward_hook(module, lambda module, args, output: [output.mul_(5), None][1])
    hookline.register_backward_hook(module, lambda module, *grads: seen.append(grads))
    output = module(x)
    (output * 3).sum().backward()
    assert equal(output.detach(), x.detach() * WEIGHT * 5) and equal(x.grad, 15 * WEIGHT)
    assert len(seen) == 1 and equal(tuple(seen[0][1]), (vector(3, 3, 3),))


def test_an_output_of_none_is_shown_and_stays() -> None:
    module, seen = Computes(lambda weight, x: None), []
    hookline.register_forward_hook(module, lambda module, args, output: seen.append(output))
    hookline.register_backward_hook(module, lambda *_: seen.append("backward"))
    assert module(leaf()) is None and seen == [None]


# ---------------------------------------------------------------- always_call


class Failure(Exception):
    pass


def fail(*_: Any) -> None:
    raise Failure("as planned")


@pytest.mark.parametrize("where", ["module", "forward pre", "forward"])
def test_always_call_runs_a_hook_when_the_call_raises(where: str) -> None:
    seen: list[Any] = []
    module = Computes(fail) if where == "module" else double()
    if where != "module":
        REGISTER[where](module, fail)
    hookline.register_forward_hook(module, lambda *_: seen.append("never"))
    hookline.register_forward_hook(module, lambda module, args, output: seen.append(output), always_call=True)
    hookline.register_forward_hook(
        module, lambda module, args, kwargs, output: seen.append(kwargs), always_call=True, with_kwargs=True
    )
    with pytest.raises(Failure):
        module(leaf())
    assert seen == [None, {}]


def test_an_always_called_hook_runs_once() -> None:
    module, seen = double(), []
    hookline.register_forward_hook(module, lambda *_: seen.append("first"), always_call=True)
    hookline.register_forward_hook(module, fail)
    hookline.register_forward_hook(module, lambda *_: seen.append("last"), always_call=True)
    with pytest.raises(Failure):
        module(leaf())
    assert seen == ["first", "last"]


def test_always_call_changes_nothing_where_nothing_raises() -> None:
    module = double()
    hookline.register_forward_hook(module, lambda module, args, output: output + 1, always_call=True)
    assert equal(module(leaf()), leaf() * 2 + 1)


def test_a_failing_always_called_hook_hides_nothing() -> None:
    def second(*_: Any) -> None:
        raise KeyError("second")

    module = Computes(fail)
    hookline.register_forward_hook(module, second, always_call=True)
    with pytest.raises(Failure) as caught:
        module(leaf())
    assert any("second" in note and "KeyError" in note for note in caught.value.__notes__)


# ---------------------------------------------------------------- what a backward hook may return


@pytest.mark.parametrize(
    "returned",
    [lambda grads: (grads[0] * 10,), lambda grads: [grads[0] * 10], lambda grads: grads[0] * 10],
    ids=["tuple", "list", "tensor"],
)
def test_a_backward_hook_replaces_this_calls_share_of_the_gradient(returned: Callable[[Any], Any]) -> None:
    module, x = scaled(), leaf()
    hookline.register_backward_hook(module, lambda module, grad_input, grad_output: returned(grad_input))
    h = x * 1
    (h * 5 + module(h)).sum().backward()
    assert equal(x.grad, 5 + 10 * WEIGHT)


def test_each_backward_hook_gets_what_the_one_before_has_returned() -> None:
    module, x = scaled(), leaf()
    hookline.register_backward_hook(module, lambda module, grads, _: (grads[0] + 1,))
    hookline.register_backward_hook(module, lambda module, grads, _: (grads[0] * 10,))
    module(x).sum().backward()
    assert equal(x.grad, (WEIGHT + 1) * 10)


@pytest.mark.parametrize(
    "returned",
    [lambda grads: (grads[0] * 10,), lambda grads: [grads[0] * 10], lambda grads: grads[0] * 10],
    ids=["tuple", "list", "tensor"],
)
def test_a_backward_pre_hook_replaces_the_gradient_of_the_output(returned: Callable[[Any], Any]) -> None:
    module, x, seen = scaled(), leaf(), []
    hookline.register_backward_pre_hook(module, lambda module, grads: returned(grads))
    hookline.register_backward_pre_hook(module, lambda module, grads: (grads[0] + 1,))
    hookline.register_backward_hook(module, lambda module, _, grads: seen.append(grads[0]))
    module(x).sum().backward()
    assert equal(seen, [vector(11, 11, 11)])
    assert equal(x.grad, 11 * WEIGHT) and equal(module.weight.grad, 11 * x.detach())


def test_none_in_the_place_of_a_gradient_cuts_it_off() -> None:
    module, x = scaled(), leaf()
    hookline.register_backward_hook(module, lambda *_: (None,))
    module(x).sum().backward()
    assert x.grad is None and equal(module.weight.grad, x.detach())


def _grad_of(register: Callable[..., Handle], returned: Callable[[Any], Any]) -> None:
    def wrong(module: nn.Module, *grads: Any) -> Any:
        return returned(grads[0])

    module = Computes(lambda weight, x, n, y: (x * weight + y, x.argmax()))
    register(module, wrong)
    module(leaf(), torch.tensor(1), y=leaf())[0].sum().backward()


_BACKWARD = {"grad_input": hookline.register_backward_hook, "grad_output": hookline.register_backward_pre_hook}


@pytest.mark.parametrize("port", _BACKWARD)
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda g: (g[0],), r"returned 1 gradients for {port}, which has {count} entries; return one for each"),
        (lambda g: (*g, None), r"returned {more} gradients for {port}, which has {count} entries"),
        (
            lambda g: (g[0][:1], *g[1:]),
            r"returned shape \(1,\), torch.float64 on cpu for {port}\[0\]; wanted shape",
        ),
        (lambda g: (g[0].float(), *g[1:]), r"returned shape \(3,\), torch.float32 on cpu for {port}\[0\]; wanted .*64"),
        (lambda g: (5, *g[1:]), r"returned int 5 for {port}\[0\]; wanted a tensor or None"),
        (lambda g: (g[0], g[0], *g[2:]), r"returned a gradient for {port}\[1\], where no gradient flows; wanted None"),
        (lambda g: g[0], r"returned one tensor for {port}, which has {count} entries; return a tuple of {count}"),
        (lambda g: 5, r"returned int 5; it must return None or a tuple in the place of {port}"),
        (lambda g: "abc", r"returned str 'abc'; it must return None or a tuple in the place of {port}"),
    ],
)
def test_a_wrong_gradient_is_an_error_that_says_what_was_got_and_wanted(
    port: str, returned: Callable[[Any], Any], message: str
) -> None:
    count = {"grad_input": 3, "grad_output": 2}[port]
    pattern = message.replace("{port}", port).replace("{count}", str(count)).replace("{more}", str(count + 1))
    with pytest.raises(HookError, match=rf"wrong at Computes:{port} {pattern}"):
        _grad_of(_BACKWARD[port], returned)


def test_a_gradient_for_an_input_that_needs_none_is_an_error() -> None:
    module = scaled()
    hookline.register_backward_hook(module, lambda *_: (torch.ones(3, dtype=torch.float64),))
    with pytest.raises(HookError, match=r"returned a gradient.*(none is needed|no gradient flows)"):
        module(leaf().detach()).sum().backward()


# ---------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize("kind", REGISTER)
def test_only_modules_can_be_hooked(kind: str) -> None:
    with pytest.raises(ArgumentError, match=r"a hook is put on a torch\.nn\.Module, got Tensor"):
        REGISTER[kind](torch.ones(1), fail)


@pytest.mark.parametrize("kind", REGISTER)
def test_only_functions_can_be_hooks(kind: str) -> None:
    module = double()
    with pytest.raises(ArgumentError, match="a hook is a function, got int: 5"):
        REGISTER[kind](module, 5)
    assert type(module) is Computes


def test_the_errors_are_also_the_errors_that_people_catch() -> None:
    assert issubclass(ArgumentError, (HooklineError, TypeError)) and issubclass(HookError, RuntimeError)


# ---------------------------------------------------------------- removal


@pytest.mark.parametrize("kind", REGISTER)
def test_a_removed_hook_does_not_run_and_removing_twice_is_harmless(kind: str) -> None:
    module, log = scaled(), []
    gone = REGISTER[kind](module, logging(log, "gone"))
    REGISTER[kind](module, logging(log, "stays"))
    gone.remove()
    gone.remove()
    module(leaf()).sum().backward()
    assert log == ["stays"]


@pytest.mark.parametrize("kind", REGISTER)
def test_the_same_function_registered_twice_is_removed_once_at_a_time(kind: str) -> None:
    module, log = scaled(), []
    hook = logging(log, "hook")
    first, _ = REGISTER[kind](module, hook), REGISTER[kind](module, hook)
    first.remove()
    module(leaf()).sum().backward()
    assert log == ["hook"]


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_may_remove_itself(kind: str) -> None:
    module, log = scaled(), []
    handle = REGISTER[kind](module, lambda *_: (log.append("once"), handle.remove())[1])
    for _ in range(2):
        module(leaf()).sum().backward()
    assert log == ["once"] and type(module) is Computes


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_that_an_earlier_one_removes_does_not_run_any_more(kind: str) -> None:
    module, log, handles = scaled(), [], []
    REGISTER[kind](module, lambda *_: handles[0].remove())
    handles.append(REGISTER[kind](module, logging(log, "removed during the call")))
    module(leaf()).sum().backward()
    assert log == []


@pytest.mark.parametrize("kind", ["backward pre", "backward"])
def test_a_hook_removed_between_forward_and_backward_does_not_run(kind: str) -> None:
    module, log, x = scaled(), [], leaf()
    handle = REGISTER[kind](module, logging(log, "late"))
    output = module(x)
    handle.remove()
    output.sum().backward()
    assert log == [] and equal(x.grad, WEIGHT)


@pytest.mark.parametrize("kind", REGISTER)
def test_a_handle_is_a_context_manager_that_removes_also_after_an_exception(kind: str) -> None:
    module, log = scaled(), []
    with REGISTER[kind](module, logging(log, "inside")) as handle:
        assert isinstance(handle, Handle)
        module(leaf()).sum().backward()
    with pytest.raises(Failure), REGISTER[kind](module, logging(log, "inside")):
        raise Failure
    module(leaf()).sum().backward()
    assert log == ["inside"] and type(module) is Computes


def test_handles_have_ids_of_their_own() -> None:
    module = double()
    assert len({hookline.register_forward_hook(module, fail).id for _ in range(5)}) == 5


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda handle: pickle.loads(pickle.dumps(handle))])
def test_a_copy_of_a_handle_removes_nothing(copied: Callable[[Handle], Handle]) -> None:
    module, log = double(), []
    handle = hookline.register_forward_hook(module, logging(log, "stays"))
    twin = copied(handle)
    assert isinstance(twin, Handle)
    twin.remove()
    module(leaf())
    assert log == ["stays"]


def test_a_handle_outlives_its_module() -> None:
    handle = hookline.register_forward_hook(double(), fail)
    handle.remove()


# ---------------------------------------------------------------- kinds of modules


def test_a_lazy_module_is_hooked_before_it_knows_its_shape() -> None:
    module, seen = nn.LazyLinear(2), []
    hookline.register_forward_hook(module, lambda module, args, output: seen.append(tuple(output.shape)))
    hookline.register_backward_hook(module, lambda module, grads, _: seen.append(tuple(grads[0].shape)))
    module(torch.ones(4, 3, requires_grad=True)).sum().backward()
    assert seen == [(4, 2), (4, 3)]
    assert isinstance(module, nn.Linear) and not isinstance(module, nn.LazyLinear)


def test_an_instance_with_a_forward_of_its_own_is_hooked_around_that() -> None:
    module, seen = nn.Linear(3, 3), []
    old = module.forward
    module.forward = lambda x: old(x) * 0 + 7  # as accelerate and many notebooks do
    handle = hookline.register_forward_hook(module, lambda module, args, output: seen.append(output))
    output = module(torch.ones(1, 3))
    handle.remove()
    assert equal(seen, [output]) and equal(output, torch.full((1, 3), 7.0))
    assert equal(module(torch.ones(1, 3)), output) and "forward" in module.__dict__


def test_a_forward_that_is_patched_while_hooks_are_attached_is_still_seen() -> None:
    module, seen = nn.Linear(3, 3), []
    handle = hookline.register_forward_hook(module, lambda module, args, output: seen.append(output))
    module.forward = lambda x: x * 7
    output = module(torch.ones(1, 3))
    assert equal(seen, [output]) and equal(output, torch.full((1, 3), 7.0))
    handle.remove()
    assert type(module) is nn.Linear and equal(module(torch.ones(1, 3)), output)


def test_a_patch_that_calls_the_old_forward_runs_the_hooks_once() -> None:
    module, seen = double(), []
    hookline.register_forward_hook(module, lambda module, args, output: seen.append(output))
    old = module.forward
    module.forward = lambda x: old(x) + 1
    output = module(leaf())
    assert equal(output, leaf() * 2 + 1)
    assert equal(seen, [output])


def test_a_class_whose_forward_is_patched_while_hooks_are_attached_runs_the_new_one() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    module, seen = Model(), []
    hookline.register_forward_hook(module, lambda module, args, output: seen.append(output))
    Model.forward = lambda self, x: x * 7  # type: ignore[method-assign]
    assert equal(module(leaf()), leaf() * 7) and len(seen) == 1
