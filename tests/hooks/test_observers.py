"""Observers: what recorders are made of. They see what the hooks have left, and nothing of theirs reaches the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline
from hookline.hooks import Call, Observer, attach

from .reference import Computes, equal, leaf, vector

WEIGHT = vector(0.5, -1.0, 2.0)
ONES = vector(1, 1, 1)


class Log(Observer):
    """Writes down what it sees of the ports it was asked for."""

    def __init__(self, *ports: str) -> None:
        self.sees_input = "input" in ports
        self.sees_output = "output" in ports
        self.sees_grad_input = "grad_input" in ports
        self.sees_grad_output = "grad_output" in ports
        self.seen: list[tuple[str, Any]] = []
        self.calls: list[Call] = []

    def begin(self, call: Call) -> None:
        self.calls.append(call)

    def on_input(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen.append(("input", args[0]))

    def on_output(self, call: Call, output: Any) -> None:
        self.seen.append(("output", output))

    def on_failure(self, call: Call, error: BaseException) -> None:
        self.seen.append(("failure", error))

    def on_grad_output(self, call: Call, grads: tuple[Any, ...]) -> None:
        self.seen.append(("grad_output", grads[0]))

    def on_grad_input(self, call: Call, grads: tuple[Any, ...]) -> None:
        self.seen.append(("grad_input", grads[0]))


def scaled() -> Computes:
    return Computes(lambda weight, x: x * weight)


def test_an_observer_sees_the_ports_it_asks_for_in_their_order() -> None:
    module, log, x = scaled(), Log("input", "output", "grad_input", "grad_output"), leaf()
    attach(module, "observer", log)
    output = module(x)
    output.sum().backward()
    assert [port for port, _ in log.seen] == ["input", "output", "grad_output", "grad_input"]
    assert log.seen[0][1] is x and equal(log.seen[1][1], output)
    assert equal([log.seen[2][1], log.seen[3][1]], [ONES, WEIGHT])


@pytest.mark.parametrize("port", ["input", "output", "grad_input", "grad_output"])
def test_an_observer_sees_nothing_else(port: str) -> None:
    module, log = scaled(), Log(port)
    attach(module, "observer", log)
    module(leaf()).sum().backward()
    assert [name for name, _ in log.seen] == [port]


@pytest.mark.parametrize("ports", [("input",), ("output",), ("input", "output"), ()])
def test_an_observer_of_values_leaves_the_graph_alone(ports: tuple[str, ...]) -> None:
    module = scaled()
    name = module(leaf()).grad_fn.name()
    attach(module, "observer", Log(*ports))
    output = module(leaf())
    assert output.grad_fn.name() == name


def test_observers_come_after_the_hooks_in_both_directions() -> None:
    module, log, x = scaled(), Log("input", "output", "grad_input", "grad_output"), leaf()
    attach(module, "observer", log)
    hookline.register_forward_pre_hook(module, lambda module, args: args[0] * 2)
    hookline.register_forward_hook(module, lambda module, args, output: output + 1)
    hookline.register_backward_pre_hook(module, lambda module, grads: (grads[0] * 10,))
    hookline.register_backward_hook(module, lambda module, grads, _: (grads[0] + 100,))
    output = module(x)
    output.sum().backward()
    seen = dict(log.seen)
    assert equal(seen["input"], x * 2) and equal(seen["output"], output)
    assert equal(seen["grad_output"], 10 * ONES) and equal(seen["grad_input"], 10 * WEIGHT + 100)
    assert equal(x.grad, 2 * (10 * WEIGHT + 100))


def test_an_observer_hears_of_a_failure_of_the_module_and_of_hooks() -> None:
    def fail(*_: Any) -> None:
        raise KeyError("as planned")

    for module, hook in ((Computes(fail), None), (scaled(), hookline.register_forward_hook)):
        log = Log("input", "output")
        attach(module, "observer", log)
        if hook is not None:
            hook(module, fail)
        with pytest.raises(KeyError) as caught:
            module(leaf())
        assert [port for port, _ in log.seen] == ["input", "failure"]
        assert log.seen[-1][1] is caught.value


def test_removing_an_observer_stops_it_also_between_forward_and_backward() -> None:
    module, log, x = scaled(), Log("output", "grad_input", "grad_output"), leaf()
    handle = attach(module, "observer", log)
    output = module(x)
    handle.remove()
    output.sum().backward()
    module(x)
    assert [port for port, _ in log.seen] == ["output"] and equal(x.grad, WEIGHT)
    assert type(module) is Computes


def test_a_call_says_what_it_is() -> None:
    module, log = scaled(), Log("grad_output")
    attach(module, "observer", log)
    output = module(leaf())
    with torch.no_grad():
        module(leaf())
    first, second = log.calls
    assert first.module() is module and first.type_name == "Computes"
    assert (first.with_grad, second.with_grad) == (True, False)
    assert not first.recomputed
    for passes in (1, 2):
        output.sum().backward(retain_graph=True)
        assert first.backwards == passes


def test_a_recomputation_is_marked() -> None:
    module, log = scaled(), Log("output")
    attach(module, "observer", log)
    torch.utils.checkpoint.checkpoint(module, leaf() * 1, use_reentrant=True).sum().backward()
    assert [call.recomputed for call in log.calls] == [False, True]


# ---------------------------------------------------------------- hooks that keep what they are shown


def keeping(observe: bool) -> tuple[Any, ...]:
    """A forward hook keeps a feature, and the loss is made of it and of what comes after, as in distillation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
    features: list[Tensor] = []
    if observe:
        for module in model.modules():
            hookline.register_backward_hook(module, lambda *_: None)
        hookline.register_forward_hook(model[0], lambda module, args, output: features.append(output * 1))
    else:
        model[0].register_forward_hook(lambda module, args, output: features.append(output * 1))
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    (model(x).sum() + features[0].pow(2).sum()).backward()
    return x.grad, *(parameter.grad for parameter in model.parameters())


def test_a_feature_that_a_hook_keeps_may_be_used_in_the_loss() -> None:
    assert equal(keeping(observe=True), keeping(observe=False))


def test_the_gradient_of_a_kept_feature_counts_as_one_of_the_output() -> None:
    module, features, seen = scaled(), [], []
    hookline.register_forward_hook(module, lambda module, args, output: features.append(output))
    hookline.register_backward_hook(module, lambda module, _, grads: seen.append(grads[0]))
    (module(leaf()) * 2 + features[0] * 5).sum().backward()
    assert equal(seen, [7 * ONES])


REPLACED: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Tensor], Tensor]] = {
    "the input": (lambda args, output: args[0], lambda output: output, 3 * ONES),
    "a view": (lambda args, output: output.view(3, 1), lambda output: output, (3 * ONES).view(3, 1)),
    "a part": (lambda args, output: output[1:], lambda output: output, 3 * vector(1, 1)),
    "in a dict": (lambda args, output: {"y": output}, lambda output: output["y"], 3 * ONES),
    "next to another": (lambda args, output: (output, output * 2), lambda output: output[0], 3 * ONES),
}


@pytest.mark.parametrize("how", REPLACED)
def test_the_gradient_of_what_a_hook_put_in_the_place_of_the_output_is_seen(how: str) -> None:
    replace, pick, expected = REPLACED[how]

    def run(observed: bool) -> tuple[Any, list[Tensor]]:
        module, x, seen = scaled(), leaf(), []
        register = hookline.register_forward_hook if observed else type(module).register_forward_hook
        register(module, lambda module, args, output: replace(args, output))
        if observed:
            hookline.register_backward_hook(module, lambda module, _, grads: seen.append(grads[0]))
        (pick(module(x * 1)) * 3).sum().backward()
        return (x.grad, module.weight.grad), seen

    bare, _ = run(observed=False)
    observed, seen = run(observed=True)
    assert equal(observed, bare)
    assert equal(seen, [expected])
