"""Backward hooks and what happens to a graph: partial passes, threads, calls, layouts, errors, higher orders."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import hookline

from ..hooks.reference import Computes, close, equal, isolated_calls, leaf, vector
from .catalogue import BY_DEFINITION, RIGHT, fault

# What torch says of create_graph, of its scripted forward-mode formulas, of complex and of sparse tensors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]

WEIGHT, ONES = vector(0.5, -1.0, 2.0), vector(1, 1, 1)


def scaled() -> Computes:
    return Computes(lambda weight, x: x * weight)


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def hooked(module: nn.Module) -> list[tuple[Any, Any]]:
    """(grad_input, grad_output) of every event of a module from here on."""
    seen: list[tuple[Any, Any]] = []
    hookline.register_backward_hook(module, lambda module, *grads: seen.append(tuple(map(tuple, grads))))
    return seen


# ---------------------------------------------------------------- inputs without gradients

WITHOUT_INPUT_GRADIENT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(3, 2), lambda: torch.ones(4, 3)),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)),
        lambda: torch.ones(4, 3),
    ),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), lambda: torch.randn(2, 1, 5, 5)),
    "embedding": (lambda: nn.Embedding(5, 2), lambda: torch.tensor([0, 3])),
    "embedding and recurrent": (
        lambda: nn.Sequential(nn.Embedding(5, 2), nn.GRU(2, 3)),
        lambda: torch.tensor([[0, 3]]),
    ),
}


@fault(15, RIGHT, "called once the module's own backward is done")
@pytest.mark.parametrize(("make", "draw"), WITHOUT_INPUT_GRADIENT.values(), ids=WITHOUT_INPUT_GRADIENT)
def test_without_input_gradients_the_hook_comes_after_the_backward_of_the_module(make: Any, draw: Any) -> None:
    module, order = make(), []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda grad, name=name: order.append(name))
    hookline.register_backward_pre_hook(module, lambda *_: order.append("before"))
    hookline.register_backward_hook(module, lambda *_: order.append("after"))
    output = module(draw())
    (output if isinstance(output, Tensor) else output[0]).square().sum().backward()
    assert order[0] == "before" and order[-1] == "after"
    assert sorted(order[1:-1]) == sorted(name for name, _ in module.named_parameters())


@fault(15, RIGHT, "")
@pytest.mark.parametrize("needs_grad", [False, True])
def test_hooks_of_nested_modules_nest_like_brackets(needs_grad: bool) -> None:
    """What a timer or a stack of names needs."""
    model, open_now, closed = nn.Sequential(network(), nn.Sequential(nn.Linear(2, 1))).double(), [], []

    def begin(path: str) -> Callable[..., None]:
        return lambda *_: open_now.append(path)

    def end(path: str) -> Callable[..., None]:
        return lambda *_: closed.append((open_now.pop(), path))

    for path, module in model.named_modules():
        hookline.register_backward_pre_hook(module, begin(path))
        hookline.register_backward_hook(module, end(path))
    model(torch.ones(2, 3, dtype=torch.float64, requires_grad=needs_grad)).sum().backward()
    assert not open_now and len(closed) == len(list(model.modules()))
    assert [begun for begun, _ in closed] == [ended for _, ended in closed]


# ---------------------------------------------------------------- passes for the parameters alone


def by_grad(loss: Tensor, parameters: list[Tensor]) -> list[Any]:
    return list(torch.autograd.grad(loss, parameters))


def by_inputs(loss: Tensor, parameters: list[Tensor]) -> list[Any]:
    loss.backward(inputs=parameters)
    return [parameter.grad for parameter in parameters]


@fault(17, RIGHT, "called at the end of the pass, with `grad_output`, and None where the pass computes no gradient")
@pytest.mark.parametrize("derive", [by_grad, by_inputs])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_pass_for_the_parameters_alone_is_an_event(derive: Any, dtype: torch.dtype) -> None:
    model = network(dtype)
    bare, x = copy.deepcopy(model), torch.randn(5, 3, dtype=dtype, requires_grad=True)
    seen = {path: hooked(module) for path, module in model.named_modules()}
    grads = derive(model(x).abs().sum(), list(model.parameters()))

    points = [x]
    for layer in bare:
        points.append(layer(points[-1]))
    loss = points[-1].abs().sum()
    arrives = torch.autograd.grad(loss, points[1:], retain_graph=True)
    assert equal(grads, list(torch.autograd.grad(loss, list(bare.parameters()))))
    first, second, third = arrives
    assert equal(
        seen,
        {
            "": [((None,), (third,))],
            "0": [((None,), (first,))],
            "1": [((first,), (second,))],
            "2": [((second,), (third,))],
        },
    )
    assert x.grad is None


@fault(17, RIGHT, "")
def test_a_pass_for_some_parameters_is_an_event_of_the_modules_that_it_comes_through() -> None:
    model, x = network(), torch.randn(5, 3, dtype=torch.float64)
    seen = {path: hooked(module) for path, module in model.named_modules()}
    torch.autograd.grad(model(x).sum(), model[2].weight)
    ones = torch.ones(5, 2, dtype=torch.float64)
    assert equal(seen, {"": [((None,), (ones,))], "0": [], "1": [], "2": [((None,), (ones,))]})


def _parameters_only(y: Tensor, module: nn.Module) -> None:
    torch.autograd.grad((y * 7).sum(), module.weight, retain_graph=True)


def _stops_in_the_middle(y: Tensor, module: nn.Module) -> None:
    def fail(grad: Tensor) -> None:
        raise InterruptedError

    handle = module.weight.register_hook(fail)
    with pytest.raises(InterruptedError):
        (y * 7).sum().backward(retain_graph=True)
    handle.remove()


@fault(18, RIGHT, "each pass has gradients of its own, and nothing is left when it ends or raises")
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("earlier", [_parameters_only, _stops_in_the_middle])
def test_what_an_earlier_pass_left_does_not_show_up_later(earlier: Any, times: int) -> None:
    module, x = scaled(), leaf()
    seen = hooked(module)
    y = module(x * 1)
    for _ in range(times):
        earlier(y, module)
    seen.clear()
    (y * 2).sum().backward()
    assert equal(seen, [((2 * WEIGHT,), (2 * ONES,))])


@fault(18, RIGHT, "")
def test_a_gradient_that_comes_to_the_inputs_by_another_way_is_no_event() -> None:
    """The module keeps its input, and a later loss uses it without the module's output."""
    kept: list[Tensor] = []
    module, x = Computes(lambda weight, x: (kept.append(x), x * weight)[1]), leaf()
    seen = hooked(module)
    y = module(x * 1)
    torch.autograd.grad((y * 7).sum(), module.weight, retain_graph=True)
    assert equal(seen, [((None,), (7 * ONES,))])
    (kept[0] * 5).sum().backward()
    assert len(seen) == 1 and equal(x.grad, 5 * ONES)


# ---------------------------------------------------------------- torch.func and forward mode


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss_of(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(model, parameters, (x,)).pow(2).sum()


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda model, x: grad(loss_of, 1)(model, parameters_of(model), x),
    "grad of the input": lambda model, x: grad(loss_of, 2)(model, parameters_of(model), x),
    "vjp": lambda model, x: vjp(model, x)[1](torch.ones(5, 2, dtype=x.dtype))[0].detach(),
    "jacrev": lambda model, x: jacrev(model)(x[0]).detach(),
    "hessian": lambda model, x: hessian(lambda x: model(x).pow(2).sum())(x[0]).detach(),
    "one gradient a sample": lambda model, x: vmap(grad(loss_of, 1), (None, None, 0))(model, parameters_of(model), x),
    "autograd's jacobian": lambda model, x: torch.autograd.functional.jacobian(model, x),
}


@fault(21, RIGHT, "the same numbers as without a hook, and the hook is called")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transforms_give_the_same_numbers(name: str, in_place: bool, dtype: torch.dtype) -> None:
    model, x = network(dtype), torch.randn(5, 3, dtype=dtype)
    if in_place:
        model[1] = nn.SELU(inplace=True)
    bare = copy.deepcopy(model)
    seen = [hooked(module) for module in model.modules()]
    assert equal(TRANSFORMS[name](model, x), TRANSFORMS[name](bare, x))
    assert all(seen)


@fault(21, RIGHT, "")
def test_a_hook_under_grad_gets_the_gradients_of_plain_autograd() -> None:
    model, x = network(), torch.randn(5, 3, dtype=torch.float64)
    bare, found = copy.deepcopy(model), []
    hookline.register_backward_hook(model, lambda module, *grads: found.extend(g[0].detach() for g in grads))
    grad(loss_of, 2)(model, parameters_of(model), x)
    wanted = x.clone().requires_grad_()
    y = bare(wanted)
    expected = torch.autograd.grad(y.pow(2).sum(), (wanted, y))
    assert close([g.clone() for g in found], expected)


def _dual(model: nn.Module, x: Tensor, tangent: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x.clone().requires_grad_(), tangent))).tangent.detach()


def _dual_keyword(model: nn.Module, x: Tensor, tangent: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(
            model(input=forward_ad.make_dual(x.clone().requires_grad_(), tangent))
        ).tangent.detach()


FORWARD_MODE: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "dual": _dual,
    "dual keyword": _dual_keyword,
    "jvp": lambda model, x, tangent: jvp(model, (x,), (tangent,))[1].detach(),
    "jacfwd": lambda model, x, tangent: torch.stack(
        [jacfwd(model)(row).detach() @ along for row, along in zip(x, tangent, strict=True)]
    ),
}


@fault(22, RIGHT, "the tangent passes through")
@pytest.mark.parametrize("derive", FORWARD_MODE.values(), ids=FORWARD_MODE)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tangent_passes_through_hooked_modules(derive: Any, in_place: bool, dtype: torch.dtype) -> None:
    model, x, tangent = network(dtype), torch.randn(5, 3, dtype=dtype), torch.randn(5, 3, dtype=dtype)
    if in_place:
        model[1] = nn.Hardtanh(inplace=True)
    first, second = model[0], model[2]
    hidden = first(x)
    slope = (hidden.abs() < 1).to(dtype) if in_place else 1 - hidden.tanh().square()
    expected = ((tangent @ first.weight.t()) * slope @ second.weight.t()).detach()
    for module in model.modules():
        hooked(module)
    assert torch.allclose(derive(model, x, tangent), expected, rtol=1e-5, atol=1e-6)


TWO_INPUTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]] = {
    "product": (lambda x, y: x * y, lambda x, y, dx, dy: dx * y + x * dy),
    "two outputs": (lambda x, y: (x * 2, y * 3), lambda x, y, dx, dy: 2 * dx),
    "in place": (lambda x, y: x.mul_(y), lambda x, y, dx, dy: dx * y + x * dy),
    "overwritten": (lambda x, y: x.copy_(y * 3), lambda x, y, dx, dy: 3 * dy),
    "a part in place": (
        lambda x, y: [x[:2].mul_(y[:2]), x][1],
        lambda x, y, dx, dy: torch.cat([(dx * y + x * dy)[:2], dx[2:]]),
    ),
}


@fault(22, RIGHT, "")
@pytest.mark.parametrize(("function", "closed"), TWO_INPUTS.values(), ids=TWO_INPUTS)
@pytest.mark.parametrize("moving", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("view", [False, True])
def test_inputs_with_and_without_a_tangent_go_in_together(function: Any, closed: Any, moving: Any, view: bool) -> None:
    module = Computes(lambda weight, x, y: function(x, y))
    hooked(module)
    values, along = (vector(1, 2, 3), vector(4, 5, 6)), (vector(1, 10, 100), vector(7, 8, 9))
    moved = [a if moves else torch.zeros_like(a) for a, moves in zip(along, moving, strict=True)]
    with forward_ad.dual_level():
        x, y = (
            forward_ad.make_dual(v.requires_grad_(), a) if moves else v.requires_grad_()
            for v, a, moves in zip((v.clone() for v in values), along, moving, strict=True)
        )
        output = module((x * 1)[:] if view else x * 1, y * 1)
        tangent = forward_ad.unpack_dual(output if isinstance(output, Tensor) else output[0]).tangent
        found = torch.zeros(3, dtype=torch.float64) if tangent is None else tangent.detach().clone()
    assert close((found,), (closed(*values, *moved),))


# ---------------------------------------------------------------- threads


@fault(27, RIGHT, "each thread's pass has gradients of its own")
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("parameters_too", [False, True])
def test_threads_on_one_graph_do_not_mix(count: int, parameters_too: bool) -> None:
    """All threads stand between the output and the input of the call at the same time."""
    barrier = threading.Barrier(count)

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            barrier.wait(10)
            return grad

    module, x = Computes(lambda weight, x: Waits.apply(x * weight)), leaf()
    seen = hooked(module)
    y = module(x)

    def go(factor: int) -> None:
        wanted = module.weight if parameters_too and factor % 2 else x
        torch.autograd.grad(y, wanted, factor * ONES, retain_graph=True)

    threads = [threading.Thread(target=go, args=(factor,)) for factor in range(1, count + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen.sort(key=lambda event: float(event[1][0][0]))
    wanted = [(None if parameters_too and f % 2 else f * WEIGHT, f * ONES) for f in range(1, count + 1)]
    assert equal(seen, [((grad_input,), (grad_output,)) for grad_input, grad_output in wanted])


# ---------------------------------------------------------------- several calls of one module


class Loop(nn.Module):
    """One module, run again and again on its own output, with a shortcut."""

    def __init__(self, times: int, inner: nn.Module) -> None:
        super().__init__()
        self.times, self.inner = times, inner

    def forward(self, x: Tensor) -> Tensor:
        for step in range(self.times):
            x = x + (step + 1) * self.inner(x)
        return x


@fault(42, RIGHT, "`record` numbers the calls: `rec['shared'].calls[2].grad_input`")
@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 3), lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh())])
def test_a_recording_tells_the_calls_of_a_shared_module_apart(times: int, make: Any) -> None:
    model, x = Loop(times, make().double()), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    expected = isolated_calls(model, lambda model: model(x).square().sum())
    with hookline.record(model, "**", ports=("grad_input", "grad_output")) as rec:
        model(x).square().sum().backward()
    for path, wanted in expected.items():
        calls = rec[path].calls
        assert len(calls) == len(wanted)
        for call, (grad_input, grad_output) in zip(calls, wanted, strict=True):
            assert close((call.grad_input, call.grad_output), (*grad_input, *grad_output), 1e-9)


@fault(42, RIGHT, "")
def test_the_calls_keep_their_numbers_in_whatever_order_their_gradients_come() -> None:
    module, x = scaled(), leaf()
    with hookline.record(module, "", ports=("output", "grad_output")) as rec:
        outputs = [module(x) for _ in range(3)]
        for factor, place in ((10, 1), (20, 0), (30, 2)):
            (outputs[place] * factor).sum().backward()
    found = {event.step: event.value for event in rec if event.port == "grad_output"}
    assert equal(found, {0: 20 * ONES, 1: 10 * ONES, 2: 30 * ONES})


# ---------------------------------------------------------------- nested and sparse tensors


@fault(80, RIGHT, "gradients that are jagged as well")
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(3, 2), lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Sigmoid]
)
@pytest.mark.parametrize("as_keyword", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_jagged_tensor_goes_through(make: Any, as_keyword: bool, dtype: torch.dtype) -> None:
    module, parts = make().to(dtype), [torch.randn(rows, 3, dtype=dtype, requires_grad=True) for rows in (2, 4, 1)]
    outputs = [copy.deepcopy(module)(part) for part in parts]
    expected = torch.autograd.grad(sum(output.square().sum() for output in outputs), parts + outputs)
    jagged = torch.nested.nested_tensor([part.detach() for part in parts], layout=torch.jagged, requires_grad=True)
    seen: list[tuple[Tensor, Tensor]] = []
    hookline.register_backward_hook(module, lambda module, ins, outs: seen.append((ins[0], outs[0])))
    output = module(input=jagged) if as_keyword else module(jagged)
    output.values().square().sum().backward()
    assert len(seen) == 1 and all(grad.is_nested and grad.layout == torch.jagged for grad in seen[0])
    found = [part for grad in seen[0] for part in grad.unbind()]
    assert close(found, expected, 1e-5)


def sparse_step(module: nn.Module, index: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
    run(module, index).square().sum().backward()
    found = next(module.parameters()).grad
    assert found is not None
    return found


@fault(81, RIGHT, "sparse gradients arrive as they are")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_table_with_sparse_gradients_keeps_them(kind: Any, dtype: torch.dtype) -> None:
    options = {"mode": "sum"} if kind is nn.EmbeddingBag else {}
    module, index = kind(6, 2, sparse=True, **options).to(dtype), torch.tensor([[0, 4], [4, 1]])
    bare = copy.deepcopy(module)
    seen = hooked(module)
    module(index).square().sum().backward()
    bare(index).square().sum().backward()
    assert module.weight.grad.is_sparse and equal(module.weight.grad.to_dense(), bare.weight.grad.to_dense())
    assert equal(seen, [((None,), (2 * bare(index).detach(),))])


@fault(81, RIGHT, "")
@pytest.mark.parametrize("factor", [None, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sparse_gradient_comes_to_a_module(factor: float | None, dtype: torch.dtype) -> None:
    """What the module makes is the table of an embedding; the hook may replace the gradient."""
    module, table, found = Computes(lambda weight, x: x.clone()), torch.ones(4, 2, dtype=dtype, requires_grad=True), []

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        found.extend((grad_input[0], grad_output[0]))
        return None if factor is None else (grad_input[0] * factor,)

    hookline.register_backward_hook(module, hook)
    F.embedding(torch.tensor([3, 1, 3]), module(table), sparse=True).sum().backward()
    uses = torch.tensor([0, 1, 0, 2], dtype=dtype)[:, None].expand(4, 2)
    assert all(grad.is_sparse for grad in found) and equal([grad.to_dense() for grad in found], [uses, uses])
    assert table.grad is not None and equal(table.grad.to_dense(), uses * (factor or 1))


@fault(81, RIGHT, "")
def test_a_recording_holds_a_sparse_gradient() -> None:
    module, table = nn.Identity(), torch.ones(4, 2, requires_grad=True)
    with hookline.record(module, "", ports=("grad_input", "grad_output")) as rec:
        F.embedding(torch.tensor([3, 1, 3]), module(table * 1), sparse=True).sum().backward()
    uses = torch.tensor([0.0, 1, 0, 2])[:, None].expand(4, 2)
    for kept in (rec[""].grad_input, rec[""].grad_output):
        assert kept.is_sparse and equal(kept.to_dense(), uses)
    assert "grad_output" in str(rec)


# ---------------------------------------------------------------- writes into a view


class Overwrites(torch.autograd.Function):
    """Writes the second argument over the first, and says in its backward that the first has no gradient."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, source: Tensor) -> Tensor:
        ctx.mark_dirty(target)
        return target.copy_(source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def _assigns(target: Tensor, source: Tensor) -> Tensor:
    target[...] = source
    return target


OVERWRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy": lambda target, source: target.copy_(source),
    "assignment": _assigns,
    "no output": lambda target, source: [target.copy_(source), None][1],
    "through a view of it": lambda target, source: target.view(-1).copy_(source.view(-1)),
    "a function of its own": Overwrites.apply,
    "a function of its own, no output": lambda target, source: [Overwrites.apply(target, source), None][1],
}


@fault(105, RIGHT, "a hooked module that writes into a view leaves the rest of the base its gradient")
@pytest.mark.parametrize("write", OVERWRITES.values(), ids=OVERWRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_the_base_of_an_overwritten_view_keeps_its_gradient(write: Any, dtype: torch.dtype) -> None:
    module = Computes(lambda weight, *args: write(*args))
    start, source = (torch.ones(size, dtype=dtype, requires_grad=True) for size in (4, 2))
    seen = hooked(module)
    base = start * 2
    module(base[:2], source * 1)
    factors = torch.tensor([1, 2, 3, 4], dtype=dtype)
    (base * factors).sum().real.backward()
    assert equal(start.grad, torch.tensor([0, 0, 6, 8], dtype=dtype)) and equal(source.grad, factors[:2])
    assert len(seen) == 1 and equal(seen[0][0][1], factors[:2])


# ---------------------------------------------------------------- parameters' gradients in a hook


class Tied(nn.Module):
    """Uses its own weight twice, and a parametrized one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x @ self.weight) @ self.weight.t() + x


WITH_PARAMETERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (4, 3)),
    "sequence": (network, (4, 3)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True)), (2, 1, 5, 5)),
    "recurrent": (lambda: nn.LSTM(3, 2), (4, 2, 3)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), (3, 2, 4)),
    "tied": (Tied, (4, 3)),
}


@fault(
    107,
    RIGHT,
    "`parameter.grad` is there when the hook is called; that of a module with several calls at its last event",
)
@pytest.mark.parametrize(("make", "shape"), WITH_PARAMETERS.values(), ids=WITH_PARAMETERS)
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("earlier", [0, 2])
def test_the_gradients_of_the_parameters_are_there_when_the_hook_is_called(
    make: Any, shape: tuple[int, ...], needs_grad: bool, earlier: int
) -> None:
    module, found = make().double(), []
    bare, x = copy.deepcopy(module), torch.randn(shape, dtype=torch.float64, requires_grad=needs_grad)

    def run(module: nn.Module) -> list[Any]:
        output = module(x * 1)
        (output if isinstance(output, Tensor) else output[0]).square().sum().backward()
        return [None if p.grad is None else p.grad.clone() for p in module.parameters()]

    for _ in range(earlier):
        run(bare), run(module)
    hookline.register_backward_hook(
        module, lambda module, *_: found.extend(None if p.grad is None else p.grad.clone() for p in module.parameters())
    )
    run(module)
    assert equal(found, run(bare)) and all(grad is not None for grad in found)


@fault(107, RIGHT, "")
@pytest.mark.parametrize("needs_grad", [False, True])
def test_every_module_of_a_model_finds_its_gradients(needs_grad: bool) -> None:
    model, found = network(), {}
    bare, x = copy.deepcopy(model), torch.randn(4, 3, dtype=torch.float64, requires_grad=needs_grad)
    for path, module in model.named_modules():
        hookline.register_backward_hook(
            module, lambda module, *_, path=path: found.update({path: [p.grad for p in module.parameters()]})
        )
    model(x).square().sum().backward()
    bare(x).square().sum().backward()
    assert equal(found, {path: [p.grad for p in module.parameters()] for path, module in bare.named_modules()})


@fault(107, RIGHT, "")
def test_the_last_event_of_a_shared_module_finds_the_sum_of_its_calls() -> None:
    module, x, found = scaled(), leaf(), []
    hookline.register_backward_hook(module, lambda module, *_: found.append(module.weight.grad))
    module(module(x * 1)).sum().backward()
    assert found[0] is None, "the sum is added up when the last of its parts has come"
    assert equal(found[1], 2 * x.detach() * WEIGHT)


# ---------------------------------------------------------------- autograd's own errors


def _input_is_written(module: nn.Module, x: Tensor) -> None:
    h = x * 1
    y = module(h)
    h.add_(1)
    y.sum().backward()


def _output_is_written(module: nn.Module, x: Tensor) -> None:
    y = module(x * 1)
    y.mul_(2)
    y.sum().backward()


def _output_is_written_through_a_view(module: nn.Module, x: Tensor) -> None:
    y = module(x * 1)
    y[1:].zero_()
    y.sum().backward()


def _weight_is_written(module: nn.Module, x: Tensor) -> None:
    y = module(x * 1)
    with torch.no_grad():
        module.weight.add_(1)
    y.sum().backward()


def _a_second_time(module: nn.Module, x: Tensor) -> None:
    y = module(x * 1)
    y.sum().backward()
    y.sum().backward()


MODIFIED = "modified by an inplace operation"
ERRORS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[nn.Module, Tensor], None], str]] = {
    "sigmoid": (lambda w, x: x.sigmoid(), _output_is_written, MODIFIED),
    "tanh": (lambda w, x: x.tanh(), _output_is_written, MODIFIED),
    "exp": (lambda w, x: x.exp(), _output_is_written, MODIFIED),
    "softmax": (lambda w, x: x.softmax(0), _output_is_written, MODIFIED),
    "through a view": (lambda w, x: x.exp(), _output_is_written_through_a_view, MODIFIED),
    "input": (lambda w, x: x * x, _input_is_written, MODIFIED),
    "input of a product": (lambda w, x: x * w, _input_is_written, MODIFIED),
    "weight": (lambda w, x: x * w, _weight_is_written, MODIFIED),
    "inside": (lambda w, x: [h := x.exp(), h.mul_(2)][1], lambda m, x: m(x * 1).sum().backward(), MODIFIED),
    "leaf": (lambda w, x: x.mul_(2), lambda m, x: m(x).sum().backward(), "a leaf Variable that requires grad"),
    "view of a leaf": (lambda w, x: x.mul_(2), lambda m, x: m(x[1:]).sum().backward(), "a view of a leaf Variable"),
    "one of several views": (lambda w, x: x.mul_(2), lambda m, x: m((x * 1).chunk(3)[0]).sum().backward(), "is a view"),
    "freed": (lambda w, x: x * x, _a_second_time, "backward through the graph a second time"),
}


@fault(109, RIGHT, "autograd's own error, as without a hook")
@pytest.mark.parametrize(("function", "run", "message"), ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("observed", [False, True])
def test_autograds_own_error_comes(function: Any, run: Any, message: str, nested: bool, observed: bool) -> None:
    inner = Computes(function)
    module = Computes(lambda weight, x: inner(x)) if nested else inner
    module.inner, module.weight = (inner, inner.weight) if nested else (None, inner.weight)
    x = leaf()
    for each in (module, inner) if observed else ():
        hooked(each)
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match=message) as caught:
        run(module, x)
    assert type(caught.value) is RuntimeError and not getattr(caught.value, "__notes__", [])
    assert equal(x.detach(), before)


# ---------------------------------------------------------------- lifetime and higher orders


@contextmanager
def no_collector() -> Iterator[None]:
    """What goes away in here does so without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _backward(loss: Tensor, leaves: list[Tensor]) -> None:
    loss.backward(create_graph=True)
    for each in leaves:
        each.grad = None


def _grad(loss: Tensor, leaves: list[Tensor]) -> None:
    torch.autograd.grad(loss, leaves, create_graph=True)


def _penalty(loss: Tensor, leaves: list[Tensor]) -> None:
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    for each in leaves:
        each.grad = None


def hooked_detached(module: nn.Module) -> None:
    kept: list[Tensor] = []
    hookline.register_backward_hook(module, lambda module, *grads: kept.extend(g[0].detach() for g in grads))


@fault(110, RIGHT, "the graph goes away with the last tensor that holds it, without the garbage collector")
@pytest.mark.parametrize("derive", [_backward, _grad, _penalty])
@pytest.mark.parametrize("way", ["bare", "hook", "pre-hook", "record"])
def test_the_graph_of_create_graph_goes_away(derive: Any, way: str) -> None:
    model, x = network(), torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    for module in model.modules():
        if way == "hook":
            hooked_detached(module)
        elif way == "pre-hook":
            hookline.register_backward_pre_hook(module, lambda *_: None)

    def step() -> weakref.ref[Tensor]:
        h = (x * 1).exp()
        derive(model(h).pow(2).sum(), [x, *model.parameters()])
        return weakref.ref(h)

    with no_collector():
        if way == "record":
            with hookline.record(model, "**", ports=("output", "grad_input", "grad_output")) as rec:
                gone = step()
            assert rec["2"].grad_output is not None
        else:
            gone = step()
        assert gone() is None


@fault(
    115,
    RIGHT,
    "one event, with the gradients of the first pass; the second is one only where it comes to the module's output",
)
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("nested", [False, True])
def test_a_double_backward_is_one_event(order: int, nested: bool) -> None:
    inner, x = Computes(lambda weight, x: x**4), leaf()
    module = nn.Sequential(inner) if nested else inner
    seen = hooked(module)
    derived, value = module(x), x.detach()
    for _ in range(order):
        (derived,) = torch.autograd.grad(derived.sum(), x, create_graph=True)
    assert torch.allclose(derived, {2: 12 * value**2, 3: 24 * value}[order])
    assert equal([tuple(g[0].detach() for g in event) for event in seen], [(4 * value**3, ONES)])


@fault(115, RIGHT, "")
def test_a_gradient_penalty_is_an_event_only_of_modules_whose_output_it_comes_to() -> None:
    """The penalty depends on the slope of the tanh, hence on what the first layer has put out."""

    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        penalty = (first.norm(dim=1) - 1).square().mean()
        return first, penalty

    model = network()
    bare = copy.deepcopy(model)
    seen = {path: hooked(module) for path, module in model.named_modules()}
    first, penalty = run(model)
    assert [len(events) for events in seen.values()] == [1] * 4 and equal(seen[""][0][0][0], first)
    penalty.backward()
    expected, expected_penalty = run(bare)
    expected_penalty.backward()
    assert equal(first, expected)
    assert equal([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])
    assert {path: len(events) for path, events in seen.items()} == {"": 1, "0": 2, "1": 1, "2": 1}

    hidden = bare[0](torch.ones(2, 3, dtype=torch.float64)).detach().requires_grad_()
    slopes = (1 - hidden.tanh().square()) * bare[2].weight.sum(0)
    (arrives,) = torch.autograd.grad(((slopes @ bare[0].weight).norm(dim=1) - 1).square().mean(), hidden)
    assert close(seen["0"][1][1], (arrives,)) and close(seen["0"][1][0], (arrives @ bare[0].weight,))


@fault(
    116,
    BY_DEFINITION,
    "`grad_input` is the gradient that the pass computes, with the second-order part; a pass for each of loss and "
    "penalty gives the parts",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_penalty_in_one_pass_or_in_two(dtype: torch.dtype) -> None:
    """The module is x^3, the loss the sum of its outputs, the penalty that of the squares of its gradient, 9 x^4."""
    value = torch.tensor([1.0, 2.0], dtype=dtype)
    first_order, second_order, ones = 3 * value**2, 36 * value**3, torch.ones(2, dtype=dtype)

    module = Computes(lambda weight, x: x**3)
    seen = hooked(module)

    def prepared() -> tuple[Tensor, Tensor, Tensor]:
        x = value.clone().requires_grad_()
        loss = module(x).sum()
        penalty = torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
        seen.clear()
        return x, loss, penalty

    x, loss, penalty = prepared()
    (loss + penalty).backward()
    assert equal(seen, [((first_order + second_order,), (ones,))]) and equal(x.grad, first_order + second_order)

    x, loss, penalty = prepared()
    loss.backward(retain_graph=True)
    assert equal(seen, [((first_order,), (ones,))])
    (part,) = torch.autograd.grad(penalty, x)
    assert equal(part, second_order) and len(seen) == 1


@fault(116, BY_DEFINITION, "")
def test_the_second_order_part_is_in_grad_output_too_where_the_loss_is_not_linear() -> None:
    """The module is y = x^3, the loss sum y^2 = x^6 with the gradient g = 2 y * 3 x^2, the penalty sum g^2."""
    module, x, value = Computes(lambda weight, x: x**3), leaf(), leaf().detach()
    seen = hooked(module)
    loss = module(x).square().sum()
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    seen.clear()
    torch.autograd.grad(loss, x, retain_graph=True)
    (loss + g.square().sum()).backward()
    (alone,), (both,) = (zip(*event, strict=True) for event in seen)
    assert close(alone, (6 * value**5, 2 * value**3))
    assert close(both, (6 * value**5 + 360 * value**9, 2 * value**3 + 72 * value**7))
