"""Hooks and recordings around checkpointing, saved tensors, vmap, inference mode, autocast and gradient scaling."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

import hookline

from ..hooks.reference import close, isolated, isolated_calls
from .catalogue import BY_DEFINITION, RIGHT, fault

BOTH = pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
PORTS = ("input", "output", "grad_input", "grad_output")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


class Block(nn.Module):
    """A checkpointed part between two others."""

    def __init__(self, inner: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.before = nn.Linear(3, 3, dtype=torch.float64)
        self.inner = inner
        self.after = nn.Linear(3, 3, dtype=torch.float64)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if self.reentrant is None:
            return self.after(self.inner(x))
        return self.after(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def plain(model: Block) -> Block:
    """A copy that runs without checkpointing."""
    other = copy.deepcopy(model)
    other.reentrant = None
    return other


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


# ---------------------------------------------------------------- 66: a parameter in a nested pass


class Shared(nn.Module):
    """One weight, used outside and inside a checkpointed part: w * (w * x)."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.scale = Scale()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.scale, self.scale(x), use_reentrant=self.reentrant)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


@fault(
    66,
    BY_DEFINITION,
    "`use_reentrant=True` runs a backward pass inside the other, and `register_parameter_hook` gives one gradient a "
    "pass, which add up; `use_reentrant=False` is one pass and gives one",
)
@pytest.mark.parametrize(("reentrant", "expected"), [(False, [12.0]), (True, [6.0, 6.0])])
def test_a_parameter_in_a_nested_pass(reentrant: bool, expected: list[float]) -> None:
    # w^2 x at w = 3, x = 2: the derivative is 12, half of it from each of the two uses.
    model = Shared(reentrant)
    seen: list[float] = []
    hookline.register_parameter_hook(model, "scale.weight", lambda grad: seen.append(grad.item()))
    model(torch.tensor([2.0], dtype=torch.float64, requires_grad=True)).sum().backward()
    assert seen == expected
    assert model.scale.weight.grad is not None and model.scale.weight.grad.item() == 12.0


@fault(66, BY_DEFINITION, "")
@BOTH
def test_an_edit_of_a_parameters_gradient_is_right_in_either_kind(reentrant: bool) -> None:
    model = Shared(reentrant)
    hookline.register_parameter_hook(model, "scale.weight", lambda grad: grad * 10)
    model(torch.tensor([2.0], dtype=torch.float64, requires_grad=True)).sum().backward()
    assert model.scale.weight.grad is not None and model.scale.weight.grad.item() == 120.0


@fault(66, BY_DEFINITION, "")
@BOTH
def test_a_parameter_of_a_checkpointed_part_alone_has_one_gradient(reentrant: bool) -> None:
    model = Block(layers(), reentrant)
    reference = plain(model)
    seen: dict[str, list[Tensor]] = {}
    for name, _ in model.named_parameters():
        hookline.register_parameter_hook(model, name, lambda grad, name=name: seen.setdefault(name, []).append(grad))
    x = drawn(2, 3)
    model(x).square().sum().backward()
    reference(x).square().sum().backward()
    assert {name: len(grads) for name, grads in seen.items()} == dict.fromkeys(dict(model.named_parameters()), 1)
    for name, parameter in reference.named_parameters():
        assert close(seen[name], [parameter.grad]), name


# ---------------------------------------------------------------- 69, 70: what autograd saves


@contextlib.contextmanager
def packing(seen: list[Tensor]) -> Iterator[None]:
    with saved_tensors_hooks(lambda tensor: seen.append(tensor.detach()) or tensor, lambda tensor: tensor):
        yield


def is_one_of(tensor: Tensor, values: list[Tensor]) -> bool:
    return any(value.shape == tensor.shape and torch.equal(value, tensor) for value in values)


@fault(
    69,
    BY_DEFINITION,
    "autograd takes the innermost pair alone; recorders do nest, and each sees every value, also those that are saved",
)
def test_of_nested_pairs_the_inner_one_is_called_and_nested_recorders_see_everything() -> None:
    model, x = layers(), drawn(2, 3)
    outer: list[Tensor] = []
    inner: list[Tensor] = []
    with (
        hookline.record(model, ports=("input", "output")) as first,
        packing(outer),
        packing(inner),
        hookline.record(model, ports=("input", "output")) as second,
    ):
        model(x).sum().backward()
    assert not outer and inner
    for rec in (first, second):
        values = [leaf for event in rec for _, leaf in event.leaves()]
        parameters = [view for parameter in model.parameters() for view in (parameter.detach(), parameter.detach().t())]
        assert len(values) == 8, "input and output of four modules"
        assert all(is_one_of(tensor, [*values, *parameters]) for tensor in inner)


@fault(69, BY_DEFINITION, "")
@pytest.mark.parametrize("ports", [("output",), PORTS], ids=["outputs", "gradients"])
def test_recording_saves_nothing_more_and_takes_no_pair_away(ports: tuple[str, ...]) -> None:
    model, x = layers(), drawn(2, 3)
    bare: list[Tensor] = []
    recorded: list[Tensor] = []
    with packing(bare):
        model(x).sum().backward()
    with packing(recorded), hookline.record(model, ports=ports):
        model(x).sum().backward()
    assert len(recorded) == len(bare) > 0
    assert all(torch.equal(one, other) for one, other in zip(recorded, bare, strict=True))


@fault(69, BY_DEFINITION, "")
def test_a_recording_is_right_where_saved_tensors_live_elsewhere() -> None:
    model, x = layers(), drawn(2, 3)
    expected = isolated_calls(model, lambda bare: bare(x).square().sum())
    with save_on_cpu(), hookline.record(model, ports=("grad_input", "grad_output")) as rec:
        model(x).square().sum().backward()
    for path, [(grad_input, grad_output)] in expected.items():
        assert close(grad_input, [rec[path].grad_input]) and close(grad_output, [rec[path].grad_output])


@fault(
    70,
    BY_DEFINITION,
    "a block that is checkpointed saves nothing inside; `record` sees every value of it, once",
)
def test_what_a_checkpointed_block_does_not_save_is_recorded() -> None:
    model, x = Block(layers(), reentrant=False), drawn(2, 3)
    saved: list[Tensor] = []
    with packing(saved), hookline.record(model, "inner.**", ("input", "output")) as rec:
        model(x).sum().backward()
    reference = plain(model)
    value = reference.before(x)
    inside = []
    for place, layer in enumerate(reference.inner):
        assert torch.equal(rec[f"inner.{place}"].input, value)
        value = layer(value)
        assert torch.equal(rec[f"inner.{place}"].output, value)
        inside.append(value.detach())
    assert not any(is_one_of(tensor, inside[:2]) for tensor in saved), (
        "the output of the tanh is what plain autograd saves"
    )
    plainly: list[Tensor] = []
    with packing(plainly):
        reference(x)
    assert is_one_of(inside[1], plainly)


@fault(70, BY_DEFINITION, "")
@BOTH
def test_the_gradients_inside_a_checkpointed_block_are_recorded_as_well(reentrant: bool) -> None:
    model, x = Block(layers(), reentrant), drawn(2, 3)
    expected = isolated_calls(plain(model), lambda bare: bare(x).square().sum())
    with packing([]), hookline.record(model, ports=PORTS) as rec:
        model(x).square().sum().backward()
    for path, [(grad_input, grad_output)] in expected.items():
        assert close(grad_input, [rec[path].grad_input]) and close(grad_output, [rec[path].grad_output]), path


# ---------------------------------------------------------------- 71, 72, 112: recomputation


@fault(
    71,
    BY_DEFINITION,
    "a hook runs again, or what it changes would be missing in the recomputation; `record` counts a call once",
)
@BOTH
def test_a_hook_runs_again_and_a_recording_counts_once(reentrant: bool) -> None:
    model, x = Block(layers(), reentrant), drawn(2, 3)
    calls: list[int] = []
    hookline.register_forward_hook(model.inner[0], lambda *_: calls.append(0))
    with hookline.record(model) as rec:
        model(x).sum().backward()
    assert len(calls) == 2
    assert [len(rec[path]) for path in rec.paths] == [1] * 7
    assert [event.call for event in rec] == [0] * 7


@fault(71, BY_DEFINITION, "")
@BOTH
@pytest.mark.parametrize("where", ["inner", "inner.0", "inner.1", "inner.2"])
@pytest.mark.parametrize("port", ["input", "output", "both gradients"])
def test_a_change_in_a_checkpointed_block_is_in_the_recomputation(port: str, where: str, reentrant: bool) -> None:
    model, x = Block(layers(), reentrant), drawn(2, 3)
    expected = plain(model)
    change(expected.get_submodule(where), port)
    expected(x).square().sum().backward()
    sites = {"both gradients": ["grad_input", "grad_output"]}.get(port, [port])
    with hookline.edit(model, {f"{where}:{site}": lambda value: value * 2 for site in sites}):
        model(x).square().sum().backward()
    assert close(gradients(model), gradients(expected))


class Doubled(torch.autograd.Function):
    """An identity that doubles the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def change(module: nn.Module, port: str) -> None:
    """Rewrite a module by hand: what goes in or comes out twice as large, or the gradients at both ends."""
    forward = module.forward
    if port == "input":
        module.forward = lambda x: forward(2 * x)
    elif port == "output":
        module.forward = lambda x: 2 * forward(x)
    else:
        module.forward = lambda x: Doubled.apply(forward(Doubled.apply(x)))


@fault(71, BY_DEFINITION, "")
@BOTH
def test_a_forward_hook_that_changes_the_output_gives_the_right_gradients(reentrant: bool) -> None:
    model, x = Block(layers(), reentrant), drawn(2, 3)
    expected = plain(model)
    change(expected.inner[1], "output")
    expected(x).square().sum().backward()
    hookline.register_forward_hook(model.inner[1], lambda module, args, output: output * 2)
    model(x).square().sum().backward()
    assert close(gradients(model), gradients(expected))


@fault(71, BY_DEFINITION, "")
@BOTH
@pytest.mark.parametrize("segments", [1, 2, 3])
def test_each_of_several_segments_is_counted_once(segments: int, reentrant: bool) -> None:
    model, x = nn.Sequential(*(layers() for _ in range(3))), drawn(2, 3)
    expected = isolated_calls(model, lambda bare: bare(x).square().sum())
    with hookline.record(model, "*.**", ("output", "grad_output")) as rec:
        checkpoint_sequential(model, segments, x, use_reentrant=reentrant).square().sum().backward()
    for path in rec.paths:
        assert len(rec[path]) == 1, path
        assert close(expected[path][0][1], [rec[path].grad_output]), path


@fault(71, BY_DEFINITION, "")
@BOTH
def test_a_module_that_runs_twice_inside_and_once_outside_has_three_calls(reentrant: bool) -> None:
    linear, x = nn.Linear(3, 3, dtype=torch.float64), drawn(2, 3)
    values: list[Tensor] = []
    value = x
    for _ in range(3):
        value = linear(value)
        values.append(value)
    values[-1].square().sum().backward()
    with hookline.record(linear, "(root)") as rec:
        checkpoint(
            lambda x: linear.forward(linear.forward(x)), linear(x), use_reentrant=reentrant
        ).square().sum().backward()
    assert len(rec[""].calls) == 3
    assert all(torch.equal(call.output, value) for call, value in zip(rec[""].calls, values, strict=True))


@fault(71, BY_DEFINITION, "")
@BOTH
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_nested_checkpoint_is_counted_once(reentrant: bool) -> None:
    model, x = Block(Block(layers(), reentrant), reentrant), drawn(2, 3)
    reference = plain(model)
    reference.inner.reentrant = None
    expected = isolated_calls(reference, lambda bare: bare(x).square().sum())
    with hookline.record(model, ports=("output", "grad_output")) as rec:
        model(x).square().sum().backward()
    for path in rec.paths:
        assert len(rec[path]) == 1, path
        assert close(expected[path][0][1], [rec[path].grad_output]), path


@fault(72, RIGHT, "`record` and `register_backward_hook` give the gradients, through the recomputation")
@pytest.mark.parametrize("by", ["record", "hook"])
@pytest.mark.parametrize("path", ["inner", "inner.0", "inner.1", "inner.2"])
def test_gradients_inside_a_reentrant_checkpoint(path: str, by: str) -> None:
    model, x = Block(layers(), reentrant=True), drawn(2, 3)
    [(grad_input, grad_output)] = isolated_calls(plain(model), lambda bare: bare(x).square().sum())[path]
    seen: list[tuple[Any, Any]] = []
    if by == "record":
        with hookline.record(model, path, ("output", "grad_input", "grad_output")) as rec:
            model(x).square().sum().backward()
        seen.append(((rec[path].grad_input,), (rec[path].grad_output,)))
        assert not rec[path].output.requires_grad
    else:
        hookline.register_backward_hook(
            model.get_submodule(path), lambda module, grads_in, grads_out: seen.append((grads_in, grads_out))
        )
        model(x).square().sum().backward()
    assert len(seen) == 1
    assert close(seen[0][0], grad_input) and close(seen[0][1], grad_output)


@fault(72, RIGHT, "")
def test_a_gradient_of_a_reentrant_checkpoint_belongs_to_the_call_that_it_repeats() -> None:
    linear, x = nn.Linear(3, 3, dtype=torch.float64), drawn(2, 3)
    reference = copy.deepcopy(linear)
    with hookline.record(linear, "(root)", ("output", "grad_output")) as rec:
        first = checkpoint(linear, x, use_reentrant=True)
        second = checkpoint(linear, first, use_reentrant=True)
        (second * 5).sum().backward()
    one = reference(x)
    two = reference(one)
    expected = torch.autograd.grad((two * 5).sum(), [one, two])
    assert [call.step for call in rec[""].calls] == [0, 1]
    assert close([call.grad_output for call in rec[""].calls], expected)
    assert all(torch.equal(call.output, value) for call, value in zip(rec[""].calls, [one, two], strict=True))


@fault(72, RIGHT, "")
def test_a_change_of_a_gradient_inside_a_reentrant_checkpoint_is_used() -> None:
    model, x = Block(layers(), reentrant=True), drawn(2, 3)
    expected = plain(model)
    change(expected.inner[1], "both gradients")
    expected(x).square().sum().backward()
    with hookline.edit(model, {f"inner.1:{port}": lambda grad: grad * 2 for port in ("grad_input", "grad_output")}):
        model(x).square().sum().backward()
    assert close(gradients(model), gradients(expected))


class Last(nn.Module):
    """A recomputation stops inside its last module, once it has what the backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.last = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@fault(112, RIGHT, "`always_call` hooks are not called for a recomputation that stops early")
@BOTH
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("with_kwargs", [False, True])
@pytest.mark.parametrize("path", ["", "first", "last"])
def test_an_always_call_hook_never_gets_none(path: str, with_kwargs: bool, early: bool, reentrant: bool) -> None:
    model, x = Last(), drawn(2, 3)
    bare = copy.deepcopy(model)
    outputs: list[Any] = []
    hookline.register_forward_hook(
        model.get_submodule(path), lambda *args: outputs.append(args[-1]), always_call=True, with_kwargs=with_kwargs
    )
    with set_checkpoint_early_stop(early):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    expected = bare.first(x) if path == "first" else bare(x)
    assert 1 <= len(outputs) <= 2
    assert all(output is not None and torch.equal(output, expected) for output in outputs)


@fault(112, RIGHT, "")
@BOTH
def test_an_always_call_hook_still_hears_of_a_failure(reentrant: bool) -> None:
    model = Last()
    outputs: list[Any] = []
    hookline.register_forward_hook(model, lambda module, args, output: outputs.append(output), always_call=True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        checkpoint(model, drawn(2, 5), use_reentrant=reentrant)
    assert outputs == [None]


@fault(112, RIGHT, "")
def test_a_failure_in_the_recomputation_itself_is_heard_of() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    outputs: list[Any] = []
    fail: list[bool] = []

    def broken(x: Tensor) -> Tensor:
        if fail:
            raise ValueError("broken")
        return x.tanh()

    model[1].forward = broken
    hookline.register_forward_hook(model, lambda module, args, output: outputs.append(output), always_call=True)
    loss = checkpoint(model, drawn(2, 3), use_reentrant=False).sum()
    fail.append(True)
    with pytest.raises(ValueError, match="broken"):
        loss.backward()
    assert len(outputs) == 2 and outputs[0] is not None and outputs[1] is None


# ---------------------------------------------------------------- 73, 74: vmap


def matrix() -> nn.Linear:
    return nn.Linear(3, 2, dtype=torch.float64)


def by_hand(module: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias).detach()


VMAPS: dict[str, Callable[[Callable[..., Tensor], Tensor], Tensor]] = {
    "vmap": lambda module, x: torch.func.vmap(module)(x),
    "in_dims": lambda module, x: torch.func.vmap(module, in_dims=1)(x.transpose(0, 1)),
    "out_dims": lambda module, x: torch.func.vmap(module, out_dims=1)(x).transpose(0, 1),
    "nested": lambda module, x: torch.func.vmap(torch.func.vmap(module))(x),
    "under grad": lambda module, x: torch.func.grad(lambda x: torch.func.vmap(module)(x).sum())(x),
    "of grad": lambda module, x: torch.func.vmap(torch.func.grad(lambda x: module(x).sum()))(x),
}


@fault(73, RIGHT, "`record` keeps the whole batch, an ordinary tensor")
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("kind", VMAPS)
def test_a_value_that_was_recorded_under_vmap_is_the_whole_batch(kind: str, detach: bool) -> None:
    module, x = matrix(), torch.randn(5, 4, 3, dtype=torch.float64)
    with hookline.record(module, ports=("input", "output"), detach=detach) as rec:
        VMAPS[kind](module, x)
    assert torch.equal(rec[""].input, x)
    assert torch.allclose(rec[""].output * 1, by_hand(module, x), rtol=1e-12)
    assert "5x4x2" in str(rec)


@fault(73, RIGHT, "")
def test_a_value_from_vmap_can_be_used_in_training() -> None:
    module, x = matrix(), torch.randn(5, 3, dtype=torch.float64)
    with hookline.record(module) as rec:
        torch.func.vmap(module)(x)
    probe = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    probe(rec[""].output).sum().backward()
    assert probe.weight.grad is not None
    assert torch.allclose(probe.weight.grad, by_hand(module, x).sum(0, keepdim=True), rtol=1e-12)


@fault(73, RIGHT, "")
def test_chunks_of_a_vmap_are_calls() -> None:
    module, x = matrix(), torch.randn(5, 3, dtype=torch.float64)
    with hookline.record(module) as rec:
        torch.func.vmap(module, chunk_size=2)(x)
    assert [len(call.output) for call in rec[""].calls] == [2, 2, 1]
    assert torch.allclose(torch.cat([call.output for call in rec[""].calls]), by_hand(module, x), rtol=1e-12)


@fault(73, RIGHT, "")
def test_an_ensemble_by_vmap_over_the_parameters() -> None:
    members = [matrix() for _ in range(4)]
    stacked, _ = torch.func.stack_module_state(members)
    base, x = copy.deepcopy(members[0]), torch.randn(5, 3, dtype=torch.float64)
    with hookline.record(base) as rec:
        torch.func.vmap(lambda parameters: torch.func.functional_call(base, parameters, (x,)))(stacked)
    expected = torch.stack([by_hand(member, x) for member in members])
    assert rec[""].output.shape == (4, 5, 2)
    assert torch.allclose(rec[""].output, expected, rtol=1e-12)


@fault(73, RIGHT, "")
def test_an_edit_under_vmap_changes_every_sample() -> None:
    module, x = matrix(), torch.randn(5, 3, dtype=torch.float64)
    expected = 2 * by_hand(module, x)
    with hookline.edit(module, {"(root):output": lambda value: value * 2}):
        assert torch.allclose(torch.func.vmap(module)(x), expected, rtol=1e-12)


@fault(74, RIGHT, "`register_backward_hook` gets the gradients of the whole batch")
@pytest.mark.parametrize("kind", ["vmap", "in_dims", "out_dims", "nested"])
@pytest.mark.parametrize("by", ["hook", "pre-hook", "record"])
def test_a_backward_hook_of_a_module_under_vmap(by: str, kind: str) -> None:
    module = matrix()
    x = torch.randn(5, 4, 3, dtype=torch.float64, requires_grad=True)
    grad_input, grad_output = isolated(copy.deepcopy(module), (x,), {}, lambda output: output.square().sum())
    seen: list[Any] = []
    if by == "hook":
        hookline.register_backward_hook(module, lambda module, grads_in, grads_out: seen.append((grads_in, grads_out)))
    elif by == "pre-hook":
        hookline.register_backward_pre_hook(module, lambda module, grads_out: seen.append((grad_input, grads_out)))
    with hookline.record(module, ports=("grad_input", "grad_output")) as rec:
        VMAPS[kind](module, x).square().sum().backward()
    if by == "record":
        seen.append(((rec[""].grad_input,), (rec[""].grad_output,)))
    assert len(seen) == 1
    assert close(seen[0][0], grad_input) and close(seen[0][1], grad_output)


@fault(74, RIGHT, "")
@pytest.mark.parametrize("kind", ["of grad", "under grad"])
def test_gradients_inside_a_gradient_transform_are_changed_and_recorded(kind: str) -> None:
    module = matrix()
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    of_input = module.weight.detach().sum(0).expand(5, 4, 3)
    hookline.register_backward_hook(module, lambda module, grads_in, grads_out: (grads_in[0] * 10,))
    with hookline.record(module, ports=("grad_input", "grad_output")) as rec:
        result = VMAPS[kind](module, x)
    assert torch.allclose(result, of_input * 10, rtol=1e-12)
    assert torch.allclose(rec[""].grad_input, result, rtol=1e-12), "as the hook has left it"
    assert torch.equal(rec[""].grad_output * 1, torch.ones(5, 4, 2, dtype=torch.float64))


@fault(74, RIGHT, "")
def test_what_a_backward_hook_returns_under_vmap_is_used() -> None:
    module = matrix()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    hookline.register_backward_hook(module, lambda module, grads_in, grads_out: tuple(grad * 10 for grad in grads_in))
    torch.func.vmap(module)(x).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, 10 * module.weight.sum(0).expand(5, 3), rtol=1e-12)


JACOBIANS: dict[str, Callable[[Callable[..., Tensor], Tensor], Any]] = {
    "is_grads_batched": lambda module, x: torch.autograd.grad(
        module(x), x, torch.eye(2, dtype=torch.float64), is_grads_batched=True
    )[0],
    "vectorize": lambda module, x: torch.autograd.functional.jacobian(module, x, vectorize=True),
    "jacrev": lambda module, x: torch.func.jacrev(module)(x),
}


@fault(74, RIGHT, "")
@pytest.mark.parametrize("by", ["hook", "record"])
@pytest.mark.parametrize("kind", JACOBIANS)
def test_a_backward_pass_of_many_gradients_at_once(kind: str, by: str) -> None:
    module = matrix()
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    shapes: list[Any] = []
    if by == "hook":
        hookline.register_backward_hook(module, lambda module, grads_in, grads_out: shapes.append(len(grads_out)))
        assert torch.equal(JACOBIANS[kind](module, x), module.weight)
        assert shapes == [1]
        return
    with hookline.record(module, ports=("grad_input", "grad_output")) as rec:
        assert torch.equal(JACOBIANS[kind](module, x), module.weight)
    assert torch.equal(rec[""].grad_output * 1, torch.eye(2, dtype=torch.float64))
    assert torch.equal(rec[""].grad_input * 1, module.weight)


# ---------------------------------------------------------------- 75: inference mode


@fault(75, RIGHT, "`record` keeps a value that can be used in training")
@pytest.mark.parametrize("port", ["input", "output"])
@pytest.mark.parametrize("options", [{}, {"detach": False}, {"dtype": torch.float32}, {"keep": "last"}], ids=str)
@pytest.mark.parametrize("inside", [True, False], ids=["recorded inside", "entered inside"])
def test_a_value_from_inference_mode_is_used_in_training(inside: bool, options: dict[str, Any], port: str) -> None:
    module = nn.Sequential(matrix(), nn.Tanh(), nn.Linear(2, 3, dtype=torch.float64))
    x = torch.randn(4, 3, dtype=torch.float64)
    recorder = hookline.record(module, "2", port, **options)
    if inside:
        with torch.inference_mode(), recorder as rec:
            module(x)
    else:
        with recorder as rec, torch.inference_mode():
            module(x)
    value = rec["2"].input if port == "input" else rec["2"].output
    expected = torch.tanh(by_hand(module[0], x))
    expected = by_hand(module[2], expected) if port == "output" else expected
    expected = expected.to(value.dtype)
    probe = nn.Linear(value.shape[-1], 1, bias=False, dtype=value.dtype)
    probe(value).sum().backward()
    assert torch.equal(value, expected)
    assert probe.weight.grad is not None and torch.allclose(probe.weight.grad, expected.sum(0, keepdim=True))
    (value.clone().requires_grad_() * 3).sum().backward()


@fault(75, RIGHT, "")
def test_a_value_from_inference_mode_may_be_written_to_later_by_the_model() -> None:
    module = nn.Sequential(matrix(), nn.ReLU(inplace=True))
    x = torch.randn(4, 3, dtype=torch.float64)
    with torch.inference_mode(), hookline.record(module, "0") as rec:
        module(x)
    value = rec["0"].output
    assert torch.equal(value, by_hand(module[0], x)) and bool((value < 0).any())
    probe = nn.Linear(2, 1, dtype=torch.float64)
    probe(value).sum().backward()


@fault(75, RIGHT, "")
def test_a_value_that_was_reduced_in_inference_mode_is_used_in_training() -> None:
    module, x = matrix(), torch.randn(4, 3, dtype=torch.float64)
    with torch.inference_mode(), hookline.record(module, reduce=lambda value: value.mean(0)) as rec:
        module(x)
    probe = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    probe(rec[""].output).sum().backward()
    assert probe.weight.grad is not None
    assert torch.allclose(probe.weight.grad, by_hand(module, x).mean(0, keepdim=True), rtol=1e-12)


# ---------------------------------------------------------------- 76, 77: mixed precision


def scaled_pass(model: nn.Module, x: Tensor, scaler: torch.amp.GradScaler) -> None:
    loss = model(x).square().sum()
    scaler.scale(loss).backward()


@fault(
    76,
    BY_DEFINITION,
    "a hook gets the gradient that autograd computes; divided by `scaler.get_scale()`, a power of two, it is the "
    "unscaled one to the last bit",
)
@pytest.mark.parametrize("scale", [2.0, 1024.0, 65536.0])
@pytest.mark.parametrize("by", ["backward hook", "backward pre-hook", "tensor", "parameter", "record"])
def test_a_scaled_gradient_divided_by_the_scale_is_exact(by: str, scale: float) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    reference, x = copy.deepcopy(model), torch.randn(5, 3)
    expected = unscaled(reference, x, by)
    seen: list[Tensor] = []
    hook_at(model, by, seen.append)
    with hookline.record(model, "2", "grad_output") as rec:
        scaled_pass(model, x, scaler)
    if by == "record":
        seen.append(rec["2"].grad_output)
    assert len(seen) == 1
    assert torch.equal(seen[0], expected * scale), "what autograd computes"
    assert torch.equal(seen[0] / scaler.get_scale(), expected)


def hook_at(model: nn.Sequential, by: str, note: Callable[[Tensor], None]) -> None:
    if by == "backward hook":
        hookline.register_backward_hook(model[2], lambda module, grads_in, grads_out: note(grads_in[0]))
    elif by == "backward pre-hook":
        hookline.register_backward_pre_hook(model[2], lambda module, grads_out: note(grads_out[0]))
    elif by == "tensor":
        hookline.register_tensor_hook(model[2].bias, note)
    elif by == "parameter":
        hookline.register_parameter_hook(model, "2.weight", note)


def unscaled(model: nn.Sequential, x: Tensor, by: str) -> Tensor:
    """The gradient there without any scaling."""
    hidden = model[1](model[0](x))
    output = model[2](hidden)
    wanted = {"backward hook": hidden, "tensor": model[2].bias, "parameter": model[2].weight}.get(by, output)
    return torch.autograd.grad(output.square().sum(), wanted)[0]


@fault(76, BY_DEFINITION, "")
def test_a_gradient_that_a_hook_changes_is_unscaled_by_the_scaler_as_any_other() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = nn.Linear(3, 2)
    x = torch.randn(5, 3)
    expected = torch.autograd.grad(model(x).square().sum(), model.weight)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hookline.register_parameter_hook(model, "weight", lambda grad: grad * 4)
    before = model.weight.detach().clone()
    scaled_pass(model, x, scaler)
    scaler.unscale_(optimizer)
    assert model.weight.grad is not None and torch.equal(model.weight.grad, expected * 4)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before - expected * 4)


@fault(76, BY_DEFINITION, "")
def test_an_overflow_by_the_scale_is_seen_as_it_is() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0**20)
    with hookline.record(model, ports="grad_output") as rec:
        scaled_pass(model, torch.full((1, 1), 2.0**20), scaler)
    assert torch.isinf(rec[""].grad_output).all()


@fault(77, RIGHT, "hooks and `record` get the dtype of the computation, and the gradients of it")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_values_and_gradients_have_the_dtype_of_the_computation(dtype: torch.dtype) -> None:
    module = nn.Linear(3, 2)
    x = torch.randn(4, 3, requires_grad=True)
    seen: dict[str, Any] = {}
    hookline.register_forward_hook(module, lambda module, args, output: seen.update(input=args[0], output=output))
    hookline.register_backward_hook(
        module, lambda module, grads_in, grads_out: seen.update(grad_input=grads_in[0], grad_output=grads_out[0])
    )
    hookline.register_parameter_hook(module, "weight", lambda grad: seen.update(weight=grad))
    with torch.autocast("cpu", dtype=dtype), hookline.record(module, ports=PORTS) as rec:
        output = module(x)
    output.float().square().sum().backward()
    expected = F.linear(x.detach().to(dtype), module.weight.detach().to(dtype), module.bias.detach().to(dtype))
    assert torch.equal(seen["output"], expected) and expected.dtype == seen["output"].dtype == dtype
    assert torch.equal(seen["input"], x) and seen["input"].dtype == torch.float32
    assert torch.equal(seen["grad_output"], (2 * expected.float()).to(dtype)) and seen["grad_output"].dtype == dtype
    assert seen["grad_input"].dtype == torch.float32 and torch.equal(seen["grad_input"], x.grad)
    assert seen["weight"].dtype == torch.float32 and torch.equal(seen["weight"], module.weight.grad)
    assert torch.equal(rec[""].output, expected) and rec[""].output.dtype == dtype
    assert torch.equal(rec[""].input, x)


@fault(77, RIGHT, "")
def test_a_recording_under_autocast_has_the_bits_of_the_bare_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))
    bare, x = copy.deepcopy(model), torch.randn(5, 3)
    dtypes: list[torch.dtype] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = x
        for layer in bare:
            value = layer(value)
            dtypes.append(value.dtype)
        expected = value.float().square().sum()
    expected.backward()
    with hookline.record(model, ports=PORTS) as rec:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().sum()
        loss.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(bare), strict=True))
    assert [rec[str(place)].output.dtype for place in range(4)] == dtypes and torch.bfloat16 in dtypes
    for place in range(4):
        assert rec[str(place)].grad_output.dtype == rec[str(place)].output.dtype


@fault(77, RIGHT, "")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hook_that_returns_another_dtype_is_honoured(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Identity())
    seen: list[torch.dtype] = []
    hookline.register_forward_hook(model[0], lambda module, args, output: output.to(dtype))
    hookline.register_forward_pre_hook(model[1], lambda module, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(torch.randn(2, 3))
    assert seen == [dtype] and output.dtype == dtype


@fault(77, RIGHT, "")
@BOTH
def test_autocast_around_a_checkpoint_is_the_same_in_the_recomputation(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3, requires_grad=True)
    dtypes: list[torch.dtype] = []
    hookline.register_forward_hook(model[0], lambda module, args, output: dtypes.append(output.dtype))
    with hookline.record(model, "*", ("output", "grad_output")) as rec:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = checkpoint(model, x, use_reentrant=reentrant)
        output.float().sum().backward()
    assert dtypes == [torch.bfloat16] * 2
    assert [rec[path].grad_output.dtype for path in rec.paths] == [torch.bfloat16] * 3
