"""Hooks under torch.func and forward-mode differentiation: the same numbers, and the hooks see theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import hookline

from .reference import equal

# Torch's own forward-mode formulas are still scripted, and its linearize warns of its own graph.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]

PORTS = ("input", "output", "grad_input", "grad_output")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(5, 3, dtype=torch.float64)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(model, parameters, (x,)).pow(2).sum()


def call(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def _outer_autograd(model: nn.Module, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    vmap(model)(x).sum().backward()
    return x.grad, [parameter.grad for parameter in model.parameters()]


def _dual(model: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(x.clone().requires_grad_(), torch.ones_like(x)))
        primal, tangent = forward_ad.unpack_dual(output)
        return primal.detach(), tangent.detach()


def _vjp(model: nn.Module, x: Tensor) -> Any:
    output, pull = vjp(model, x)
    return output.detach(), pull(torch.ones_like(output))[0].detach()


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "functional_call": lambda model, x: functional_call(model, parameters_of(model), (x,)),
    "grad of parameters": lambda model, x: grad(loss, 1)(model, parameters_of(model), x),
    "grad of input": lambda model, x: grad(loss, 2)(model, parameters_of(model), x),
    "grad and value": lambda model, x: grad_and_value(loss, 1)(model, parameters_of(model), x),
    "vmap": lambda model, x: vmap(model)(x).detach(),
    "vmap of vmap": lambda model, x: vmap(vmap(model))(x.expand(2, 5, 3)).detach(),
    "vmap along another axis": lambda model, x: vmap(model, in_dims=1)(x.t()).detach(),
    "vmap of grad": lambda model, x: vmap(grad(loss, 1), (None, None, 0))(model, parameters_of(model), x),
    "vmap of grad of input": lambda model, x: vmap(grad(loss, 2), (None, None, 0))(model, parameters_of(model), x),
    "vmap inside autograd": _outer_autograd,
    "jacrev": lambda model, x: jacrev(model)(x[0]).detach(),
    "jacfwd": lambda model, x: jacfwd(model)(x[0]).detach(),
    "hessian": lambda model, x: hessian(lambda x: model(x).pow(2).sum())(x[0]).detach(),
    "vjp": _vjp,
    "jvp": lambda model, x: [part.detach() for part in jvp(model, (x,), (torch.ones_like(x),))],
    "linearize": lambda model, x: linearize(model, x)[1](torch.ones_like(x)).detach(),
    "forward mode": _dual,
    "vmap over models": lambda model, x: vmap(lambda p, x: functional_call(model, p, (x,)), (0, None))(
        {name: torch.stack([p, p * 2]) for name, p in parameters_of(model).items()}, x
    ),
}
WITHOUT_BACKWARD = {"functional_call", "vmap", "vmap of vmap", "vmap along another axis", "vmap over models"}
FORWARD_MODE = {"jvp", "linearize", "forward mode", "jacfwd"}


def _hook_everything(model: nn.Module, seen: dict[str, int]) -> None:
    def counting(kind: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            seen[kind] = seen.get(kind, 0) + 1

        return hook

    for module in model.modules():
        hookline.register_forward_pre_hook(module, counting("forward pre"))
        hookline.register_forward_hook(module, counting("forward"))
        hookline.register_backward_pre_hook(module, counting("backward pre"))
        hookline.register_backward_hook(module, counting("backward"))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_hooks_change_no_number_and_run(name: str) -> None:
    transform, seen = TRANSFORMS[name], {}
    bare = transform(network(), batch())
    model = network()
    _hook_everything(model, seen)
    observed = transform(model, batch())
    assert equal(observed, bare)
    modules = len(list(model.modules()))
    assert seen["forward pre"] == seen["forward"] >= modules
    if name not in WITHOUT_BACKWARD | FORWARD_MODE:
        assert seen["backward pre"] >= modules and seen["backward"] >= modules


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_recording_changes_no_number(name: str) -> None:
    transform = TRANSFORMS[name]
    bare = transform(network(), batch())
    model = network()
    with hookline.record(model, "**", ports=PORTS) as recording:
        observed = transform(model, batch())
    assert equal(observed, bare)
    outputs = [event for event in recording if event.port == "output"]
    assert {event.path for event in outputs} == {path for path, _ in model.named_modules()}
    for event in recording:
        for _, tensor in event.leaves():
            assert torch.isfinite(tensor).all(), "a kept value is a plain tensor that can be used after the transform"


# ---------------------------------------------------------------- the values that are seen


def expected_events(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Outputs and gradients of ``loss``, worked out by plain autograd on clones."""
    first, activation, last = model
    x = x.clone().requires_grad_()
    a = first(x)
    b = activation(a)
    c = last(b)
    grads = torch.autograd.grad(c.pow(2).sum(), (x, a, b, c))
    values = {"0": a, "1": b, "2": c}
    arriving = dict(zip(("in", "0", "1", "2"), grads, strict=True))
    return {f"{path}:output": value.detach() for path, value in values.items()} | {
        "0:grad_input": arriving["in"],
        "0:grad_output": arriving["0"],
        "1:grad_input": arriving["0"],
        "1:grad_output": arriving["1"],
        "2:grad_input": arriving["1"],
        "2:grad_output": arriving["2"],
    }


@pytest.mark.parametrize("name", ["grad of input", "vmap of grad of input"])
def test_values_and_gradients_under_a_transform_are_those_of_plain_autograd(name: str) -> None:
    model, x = network(), batch()
    with hookline.record(model, ["0", "1", "2"], ports=("output", "grad_input", "grad_output")) as recording:
        TRANSFORMS[name](model, x)
    expected = expected_events(network(), x)
    found = {f"{event.path}:{event.port}": event.leaves()[0][1] for event in recording}
    assert found.keys() == expected.keys()
    for site, value in expected.items():
        torch.testing.assert_close(found[site], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("in_dims", "turned"), [(0, lambda x: x), (1, lambda x: x.t())])
def test_a_kept_value_under_vmap_is_the_full_batch_with_the_mapped_axis_in_front(
    in_dims: int, turned: Callable[[Tensor], Tensor]
) -> None:
    model, x = network(), batch()
    with hookline.record(model, "0") as recording:
        vmap(model, in_dims=in_dims)(turned(x))
    assert recording["0"].output.shape == (5, 4)
    torch.testing.assert_close(recording["0"].output, model[0](x).detach())


def test_outer_gradients_of_a_vmapped_call_are_those_of_the_whole_batch() -> None:
    model, x = network(), batch().requires_grad_()
    with hookline.record(model, "2", ports=("grad_output",)) as recording:
        vmap(model)(x).pow(2).sum().backward()
    torch.testing.assert_close(recording["2"].grad_output, 2 * model(x).detach())


def test_a_hook_edits_gradients_under_a_transform() -> None:
    model, x = network(), batch()
    bare = grad(loss, 2)(model, parameters_of(model), x)
    with hookline.register_backward_hook(model, lambda module, grads, _: (grads[0] * 10,)):
        assert equal(grad(loss, 2)(model, parameters_of(model), x), bare * 10)
        each = vmap(grad(loss, 2), (None, None, 0))(model, parameters_of(model), x)
    torch.testing.assert_close(each, bare * 10)


def test_a_hook_edits_values_under_a_transform() -> None:
    model, x = network(), batch()
    bare = vmap(model)(x)
    with hookline.register_forward_hook(model, lambda module, args, output: output + 1):
        assert equal(vmap(model)(x), bare + 1)


def test_a_tangent_passes_through_the_hooks() -> None:
    model, x = network(), batch()
    expected = jvp(model, (x,), (torch.ones_like(x),))[1].detach()
    _hook_everything(model, {})
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(x, torch.ones_like(x)))
        assert torch.equal(forward_ad.unpack_dual(output).tangent.detach(), expected)


def test_in_place_modules_run_under_transforms_as_without_hooks() -> None:
    def run(observed: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
        if observed:
            _hook_everything(model, {})
        x = batch()
        return (
            grad(loss, 2)(model, parameters_of(model), x),
            vmap(grad(loss, 1), (None, None, 0))(model, parameters_of(model), x),
            vmap(model)(x).detach(),
        )

    assert equal(run(observed=True), run(observed=False))


def test_a_transform_inside_an_observed_module_is_the_modules_own_business() -> None:
    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return vmap(grad(lambda x: self.inner(x).pow(2).sum()))(x)

    def run(observed: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model, x = Score(), batch().requires_grad_()
        if observed:
            _hook_everything(model, {})
        output = model(x)
        output.sum().backward()
        return output.detach(), x.grad, model.inner.weight.grad

    assert equal(run(observed=True), run(observed=False))


def test_a_module_with_a_parametrized_functional_call_sees_the_given_weights() -> None:
    model, x, seen = network(), batch(), []
    hookline.register_forward_hook(model[0], lambda module, args, output: seen.append(output.detach()))
    zeros = {name: torch.zeros_like(parameter) for name, parameter in parameters_of(model).items()}
    functional_call(model, zeros, (x,))
    assert equal(seen[0], torch.zeros(5, 4, dtype=torch.float64))
