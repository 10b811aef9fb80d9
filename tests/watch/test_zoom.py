"""The zoom names the operation, the line and the submodule in which a non-finite value arises, and changes nothing."""

from __future__ import annotations

import json
import math
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.watch.surroundings import autocast_state, random_state
from hookline.watch.zoom import Zoom, zoom

INF, NAN = math.inf, math.nan


class Apply(nn.Module):
    """Calls a function, as a line of somebody's ``forward`` would."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self.function(*args, **kwargs)


class Case(NamedTuple):
    module: nn.Module
    args: tuple[Any, ...]
    operation: str
    text: str
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - never written to
    node: str = ""
    """In a backward pass; the gradient that arrives is all ones."""


def log_of_zero(x: Tensor) -> Tensor:
    y = x * 2
    return y.log() + 1


def unit_length(x: Tensor) -> Tensor:
    length = x.norm(dim=-1, keepdim=True)
    return x / length


def masked_softmax(x: Tensor, mask: Tensor) -> Tensor:
    scores = x.masked_fill(mask, -INF)
    return torch.softmax(scores, -1)


def difference_of_masked(x: Tensor) -> Tensor:
    y = x.masked_fill(x > -9, -INF)
    return y - y.max()


def product_of_halves(x: Tensor) -> Tensor:
    return x @ x.T


def exponential(x: Tensor) -> Tensor:
    grown = x.exp()
    return grown * 0


def times_infinity(x: Tensor) -> Tensor:
    return x * INF


def arc(x: Tensor) -> Tensor:
    return torch.acos(x)


def area(x: Tensor) -> Tensor:
    return torch.atanh(x)


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.sub_(1).sqrt_()
    return y


def into_empty_memory(x: Tensor) -> Tensor:
    y = torch.full_like(x, NAN)[:0].new_empty(x.shape)
    y.copy_(x)
    return y.reciprocal_()


def through_where(x: Tensor) -> Tensor:
    safe = torch.where(x > 0, x.log(), 0.0)
    return safe.sum() + torch.rsqrt(x).sum()


def root(x: Tensor) -> Tensor:
    return torch.sqrt(x)


def power(x: Tensor) -> Tensor:
    return x**0.5


def root_of_variance(x: Tensor) -> Tensor:
    return torch.sqrt(((x - x.mean(0)) ** 2).mean(0))


def distance(x: Tensor) -> Tensor:
    return (x * x).sum(-1).sqrt()


def sigmoid_by_hand(x: Tensor) -> Tensor:
    e = torch.exp(-x)
    return 1 / (1 + e)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad - 1)


def attention(mask: bool) -> Case:
    query = torch.randn(1, 3, 4)
    padding = torch.full((1, 3), mask)
    module = nn.MultiheadAttention(4, 2, batch_first=True)
    case = Case(module, (query, query, query), "aten._softmax.default", "attn_output", {"key_padding_mask": padding})
    return case


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


FORWARD: dict[str, Callable[[], Case]] = {
    "log of 0": lambda: Case(Apply(log_of_zero), (torch.tensor([1.0, 0.0]),), "aten.log.default", "return y.log() + 1"),
    "division by a norm of 0": lambda: Case(
        Apply(unit_length), (torch.zeros(2, 3),), "aten.div.Tensor", "return x / length"
    ),
    "layer norm of equal values with eps=0": lambda: Case(
        nn.LayerNorm(4, eps=0.0), (torch.ones(2, 4),), "aten.native_layer_norm.default", "return F.layer_norm("
    ),
    "softmax of a row that is all masked": lambda: Case(
        Apply(masked_softmax),
        (torch.randn(2, 2), torch.tensor([[True, True], [False, True]])),
        "aten._softmax.default",
        "return torch.softmax(scores, -1)",
    ),
    "-inf less -inf": lambda: Case(
        Apply(difference_of_masked), (torch.zeros(3),), "aten.sub.Tensor", "return y - y.max()"
    ),
    "matrix product in float16": lambda: Case(
        Apply(product_of_halves), (torch.full((2, 2), 300.0).half(),), "aten.mm.default", "return x @ x.T"
    ),
    "exp, of which a NaN is made": lambda: Case(
        Apply(exponential), (torch.tensor([100.0]),), "aten.exp.default", "grown = x.exp()"
    ),
    "0 times infinity": lambda: Case(
        Apply(times_infinity), (torch.zeros(2),), "aten.mul.Tensor", "return x * INF"
    ),
    "acos": lambda: Case(Apply(arc), (torch.tensor([1.5]),), "aten.acos.default", "return torch.acos(x)"),
    "atanh": lambda: Case(Apply(area), (torch.tensor([1.0]),), "aten.atanh.default", "return torch.atanh(x)"),
    "in place": lambda: Case(Apply(in_place), (torch.zeros(2),), "aten.sqrt_.default", "y.sub_(1).sqrt_()"),
    "in place, in memory that was not initialized": lambda: Case(
        Apply(into_empty_memory), (torch.zeros(2),), "aten.reciprocal_.default", "return y.reciprocal_()"
    ),
    "what torch.where takes away is not it": lambda: Case(
        Apply(through_where),
        (torch.tensor([0.0, 1.0]),),
        "aten.rsqrt.default",
        "return safe.sum() + torch.rsqrt(x).sum()",
    ),
    "attention of which every key is padding": lambda: attention(mask=True),
}  # fmt: skip

BACKWARD: dict[str, Callable[[], Case]] = {
    "sqrt at 0": lambda: Case(
        Apply(root), (leaf(0.0, 1.0),), "aten.div.Tensor", "return torch.sqrt(x)", node="SqrtBackward0"
    ),
    "power at 0": lambda: Case(
        Apply(power), (leaf(0.0),), "aten.pow.Tensor_Scalar", "return x**0.5",
        node="PowBackward0",
    ),
    "variance of equal values": lambda: Case(
        Apply(root_of_variance),
        (torch.ones(4, 2, requires_grad=True),),
        "aten.div.Tensor",
        "return torch.sqrt(((x - x.mean(0)) ** 2).mean(0))",
        node="SqrtBackward0",
    ),
    "distance of 0": lambda: Case(
        Apply(distance), (torch.zeros(2, 3, requires_grad=True),), "aten.div.Tensor", "return (x * x).sum(-1).sqrt()",
        node="SqrtBackward0",
    ),
    "the backward of somebody's own function": lambda: Case(
        Apply(Double.apply), (leaf(1.0),), "aten.div.Tensor", "return grad / (grad - 1)", node="DoubleBackward"
    ),
}  # fmt: skip


def line_of(text: str) -> int:
    """Number of the line of this file that holds just this text."""
    lines = Path(__file__).read_text("utf-8").splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.strip() == text]
    return number


def ones_like(output: Any) -> tuple[Tensor, ...]:
    return tuple(torch.ones_like(one) for one in (output if isinstance(output, tuple) else (output,)))


def is_finite(values: Any) -> bool:
    return all(bool(one.isfinite().all()) for one in values)


@pytest.mark.parametrize("name", FORWARD)
def test_the_operation_and_line_of_a_fault_in_forward(name: str) -> None:
    case = FORWARD[name]()
    output = case.module(*case.args, **case.kwargs)
    assert not is_finite(output if isinstance(output, tuple) else (output,)), "there is a fault to be found"
    found = zoom(case.module, case.args, case.kwargs)
    assert found.reproduced, found.reason
    assert (found.operation, found.direction, found.cause) == (case.operation, "forward", "")
    assert case.text in found.text
    if found.line.startswith("test_zoom.py"):
        assert found.line.split()[0] == f"test_zoom.py:{line_of(case.text)}"
    else:
        assert found.line.startswith("torch/nn/modules/")
    assert not found.outputs[0].summary.finite
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize("name", BACKWARD)
def test_the_operation_and_line_of_a_fault_in_backward(name: str) -> None:
    case = BACKWARD[name]()
    output = case.module(*case.args)
    grads = torch.autograd.grad(output, case.args, torch.ones_like(output))
    assert is_finite((output,)) and not is_finite(grads), "forward is fine, backward is not"
    assert not zoom(case.module, case.args, {}).reproduced
    found = zoom(case.module, case.args, {}, grad_outputs=ones_like(output))
    assert found.reproduced, found.reason
    assert (found.operation, found.direction, found.node) == (case.operation, "backward", case.node)
    assert found.text == case.text and found.line.split()[0] == f"test_zoom.py:{line_of(case.text)}"
    json.dumps(found.to_json(), allow_nan=False)


def test_a_backward_that_fails_for_an_overflow_in_forward_names_that() -> None:
    x = leaf(-200.0)
    output = sigmoid_by_hand(x)
    (grad,) = torch.autograd.grad(output, x)
    assert output.item() == 0 and grad.isnan(), "1 / inf is finite, its gradient is not"
    found = zoom(Apply(sigmoid_by_hand), (x,), {}, grad_outputs=(torch.ones(1),))
    assert (found.operation, found.direction, found.text) == ("aten.exp.default", "forward", "e = torch.exp(-x)")


def test_the_norm_of_zeros_has_a_gradient() -> None:
    """Inside, torch divides by 0 and takes the NaN away again."""
    x = torch.zeros(3, requires_grad=True)
    found = zoom(Apply(lambda x: x.norm()), (x,), {}, grad_outputs=(torch.ones(()),))
    assert not found.reproduced and found.reason == "all that came out was finite this time"


def test_operation_that_a_node_belongs_to() -> None:
    found = zoom(Apply(root), (leaf(0.0),), {}, grad_outputs=(torch.ones(1),))
    assert found.forward_operation == "aten.sqrt.default"
    assert [(one.name, one.shape, one.dtype) for one in found.inputs] == [
        ("self", (1,), "float32"),
        ("other", (1,), "float32"),
    ]
    assert [one.summary.max for one in found.inputs] == [1.0, 0.0] and found.outputs[0].summary.inf == 1


def test_what_an_in_place_operation_was_given_is_from_before_it() -> None:
    found = zoom(Apply(in_place), (torch.zeros(2),), {})
    assert found.inputs[0].summary.mean == -1.0 and found.outputs[0].summary.nan == 2


def test_inputs_and_outputs_in_words() -> None:
    text = str(zoom(Apply(log_of_zero), (torch.tensor([[1.0, 0.0]]),), {}))
    assert text.splitlines() == [
        f"aten.log.default at test_zoom.py:{line_of('return y.log() + 1')} in log_of_zero",
        "  return y.log() + 1",
        "  in  self: 1x2 float32, min 0, max 2, mean 1",
        f"  out output: 1x2 float32, min {math.log(2):.4g}, max {math.log(2):.4g}, mean {math.log(2):.4g}, 1 Inf of 2",
    ]


# ---------------------------------------------------------------- causes


def test_a_parameter_that_is_infinite() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data[0, 0] = INF
    found = zoom(model, (torch.ones(1, 2),), {})
    assert found.reproduced and (found.cause, found.operation, found.path) == ("parameter 1.weight", "", "1")
    assert found.inputs[0].summary.inf == 1
    assert str(found).startswith("parameter 1.weight is not finite; first used at torch/nn/modules/linear.py:")


def test_a_parameter_that_is_not_used_is_no_cause() -> None:
    embedding = nn.Embedding(3, 2)
    embedding.weight.data[2] = NAN
    assert not zoom(embedding, (torch.tensor([0, 1]),), {}).reproduced
    found = zoom(nn.Sequential(embedding, Apply(lambda x: x / 0)), (torch.tensor([0, 1]),), {})
    assert found.operation == "aten.div.Tensor"
    assert zoom(embedding, (torch.tensor([2]),), {}).cause == "parameter weight"


def test_an_input_and_a_buffer_that_are_not_finite() -> None:
    assert zoom(nn.Linear(2, 2), (torch.tensor([[1.0, NAN]]),), {}).cause == "input args[0]"
    named = Apply(lambda x, scale: x * scale)
    assert zoom(named, (torch.ones(2),), {"scale": torch.tensor(INF)}).cause == "input kwargs['scale']"
    norm = nn.BatchNorm1d(2).eval()
    norm.running_var[0] = NAN
    assert zoom(norm, (torch.ones(2, 2),), {}).cause == "buffer running_var"
    assert zoom(nn.Identity(), (torch.tensor([NAN]),), {}).cause == "input args[0]"


def test_a_gradient_that_was_not_finite_before() -> None:
    found = zoom(nn.Linear(2, 2), (torch.ones(1, 2),), {}, grad_outputs=(torch.tensor([[1.0, NAN]]),))
    assert found.reproduced and found.cause == "grad_outputs[0]"


def test_a_tensor_that_is_neither_parameter_nor_buffer() -> None:
    module = Apply(lambda x: x)
    module.scale = torch.tensor(NAN)
    module.function = module_scale
    assert zoom(module, (torch.ones(2),), {"scale": module.scale}).cause == "input kwargs['scale']"
    hidden = torch.tensor(NAN)
    assert "did not make" in zoom(Apply(lambda x: x + hidden), (torch.ones(2),), {}).cause


def module_scale(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


def test_memory_that_was_read_before_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        found = zoom(Apply(lambda x: x + torch.empty(2)), (torch.ones(2),), {})
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.operation == "aten.empty.memory_format" and "before anything was written" in found.reason


def test_nan_that_is_given_as_a_number() -> None:
    found = zoom(Apply(lambda x: torch.full_like(x, NAN) + x), (torch.ones(2),), {})
    assert found.operation == "aten.full_like.default" and found.reason == "NaN was given to it as a number"


# ---------------------------------------------------------------- masks


def causal(x: Tensor) -> Tensor:
    mask = torch.full((3, 3), -INF).triu(1)
    return torch.softmax(x + mask, -1)


@pytest.mark.parametrize(
    "function",
    [
        causal,
        lambda x: torch.softmax(torch.where(x > 9, x, torch.tensor(-INF)).index_fill(1, torch.tensor([0]), 0.0), -1),
        lambda x: torch.logsumexp(x.masked_fill(torch.eye(3).bool(), -INF), -1),
        lambda x: x.masked_fill(torch.eye(3).bool(), -INF).max(-1).values,
        lambda x: torch.log_softmax(x.masked_fill(torch.eye(3).bool(), -INF), -1).exp(),
    ],
)
def test_a_mask_is_no_fault(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 3, requires_grad=True)
    output = function(x)
    assert is_finite((output, *torch.autograd.grad(output.sum(), x)))
    found = zoom(Apply(function), (x,), {}, grad_outputs=(torch.ones_like(output),))
    assert not found.reproduced and found.reason == "all that came out was finite this time"


def test_a_mask_that_comes_out_is_named() -> None:
    found = zoom(Apply(lambda x: x.masked_fill(x > 0, -INF) * 2), (torch.ones(2),), {})
    assert not found.reproduced
    (mask,) = found.masks
    assert mask.operation == "aten.masked_fill.Scalar" and mask.line.startswith("test_zoom.py:")
    assert found.reason == f"the only non-finite values are infinities written on purpose, by {mask}"


def test_a_mask_among_the_arguments_or_buffers_is_named() -> None:
    mask = torch.tensor([0.0, -INF])
    found = zoom(Apply(lambda x, mask: x + mask), (torch.ones(2), mask), {})
    assert not found.reproduced and [str(one) for one in found.masks] == ["input args[1]"]


def test_a_mask_by_the_side_of_a_fault() -> None:
    found = zoom(Apply(lambda x: (causal(x), x / 0)), (torch.ones(3, 3),), {})
    assert found.operation == "aten.div.Tensor" and [one.operation for one in found.masks] == ["aten.full.default"]


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_with_some_padding_is_no_fault(need_weights: bool) -> None:
    query = torch.randn(1, 3, 4)
    module = nn.MultiheadAttention(4, 2, batch_first=True)
    kwargs = {"key_padding_mask": torch.tensor([[False, True, True]]), "need_weights": need_weights}
    assert is_finite((module(query, query, query, **kwargs)[0],))
    assert not zoom(module, (query, query, query), kwargs).reproduced


# ---------------------------------------------------------------- where in the module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(2, 2), Apply(log_of_zero)])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[1].forward(self.inner[0](x) * 0)


def test_path_of_the_submodule_also_when_its_forward_is_called_directly() -> None:
    found = zoom(nn.Sequential(nn.Identity(), Block()), (torch.ones(1, 2),), {})
    assert found.path == "1.inner.1"


def test_path_in_backward() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Identity(), Apply(root)))
    found = zoom(model, (torch.zeros(2, requires_grad=True),), {}, grad_outputs=(torch.ones(2),))
    assert found.path == "1.1" and found.node == "SqrtBackward0"


def test_recurrent_network() -> None:
    lstm = nn.LSTM(3, 4)
    model = nn.ModuleDict({"lstm": lstm})
    model.forward = lambda x: Apply(unit_length)(lstm(x)[0] * 0)  # type: ignore[method-assign]
    assert not zoom(lstm, (torch.randn(2, 1, 3),), {}).reproduced
    found = zoom(nn.Sequential(Apply(lambda x: lstm(x)[0]), Apply(lambda x: 1 / (x * 0))), (torch.randn(2, 1, 3),), {})
    assert found.operation == "aten.reciprocal.default" and found.path == "1"
    lstm.weight_hh_l0.data[0, 0] = NAN
    assert zoom(lstm, (torch.randn(2, 1, 3),), {}).cause == "parameter weight_hh_l0"


def test_batch_norm_of_equal_values() -> None:
    """Their variance is 0, so the gradient is divided by the root of eps."""
    norm, grad = nn.BatchNorm1d(2, eps=1e-45), torch.tensor([[1e30, 2e30], [-1e30, 0.0]])
    x = torch.ones(2, 2, requires_grad=True)
    output = norm(x)
    assert is_finite((output,)) and not is_finite(torch.autograd.grad(output, x, grad))
    before = {name: one.clone() for name, one in norm.named_buffers()}
    found = zoom(norm, (x,), {}, grad_outputs=(grad,))
    assert (found.operation, found.node) == ("aten.native_batch_norm_backward.default", "NativeBatchNormBackward0")
    assert found.forward_operation == "aten.native_batch_norm.default"
    assert all(torch.equal(before[name], one) for name, one in norm.named_buffers())


def test_a_checkpointed_segment() -> None:
    def segment(x: Tensor) -> Tensor:
        return torch.sqrt(x * 0)

    module = Apply(lambda x: checkpoint(segment, x * 1, use_reentrant=False))
    found = zoom(module, (torch.ones(2, requires_grad=True),), {}, grad_outputs=(torch.ones(2),))
    assert (found.node, found.text) == ("SqrtBackward0", "return torch.sqrt(x * 0)")


def test_a_compiled_module_runs_as_it_was_written() -> None:
    compiled = torch.compile(Apply(log_of_zero), backend="eager")
    compiled(torch.ones(2))
    found = zoom(compiled, (torch.zeros(2),), {})
    assert (found.operation, found.text, found.path) == ("aten.log.default", "return y.log() + 1", "_orig_mod")


def test_fused_attention_is_one_operation() -> None:
    query = torch.randn(1, 2, 3, 4) * 1e30
    found = zoom(Apply(lambda q: nn.functional.scaled_dot_product_attention(q, q, q)), (query,), {})
    assert found.operation.startswith("aten._scaled_dot_product_") and found.inputs[0].name == "query"


# ---------------------------------------------------------------- random numbers and casts


def test_the_same_elements_are_dropped() -> None:
    seen: list[Tensor] = []
    model = nn.Sequential(nn.Dropout(0.5), Apply(lambda x: seen.append(x.detach().clone()) or 1 / x))
    rng = torch.get_rng_state()
    model(torch.ones(64))
    torch.randn(3)
    found = zoom(model, (torch.ones(64),), {}, rng=rng)
    assert found.operation == "aten.reciprocal.default" and found.path == "1"
    assert torch.equal(*seen), "bit for bit"
    assert found.inputs[0].summary.zeros == int((seen[0] == 0).sum())


def test_states_by_device() -> None:
    rng = random_state()
    first = nn.Dropout(0.5)(torch.ones(32))
    seen: list[Tensor] = []
    zoom(nn.Sequential(nn.Dropout(0.5), Apply(lambda x: seen.append(x.clone()) or x)), (torch.ones(32),), {}, rng=rng)
    assert torch.equal(first, seen[0])


def test_casts_of_now_and_casts_that_are_given() -> None:
    large = torch.full((2, 2), 300.0)
    module = Apply(product_of_halves)
    assert not zoom(module, (large,), {}).reproduced
    with torch.autocast("cpu", dtype=torch.float16):
        now, casts = zoom(module, (large,), {}), autocast_state()
    later = zoom(module, (large,), {}, autocast=casts)
    assert now.operation == later.operation == "aten.mm.default"
    assert later.outputs[0].dtype == "float16"


# ---------------------------------------------------------------- nothing is changed


class Counting(nn.Module):
    """Keeps what a careless module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.calls = 0
        self.seen: list[Tensor] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor, cache: dict[str, Any]) -> Tensor:
        self.calls += 1
        cache["calls"] = self.calls
        x.mul_(2)
        self.last = self.drop(self.norm(self.linear(x)))
        self.seen.append(self.last)
        with torch.no_grad():
            self.linear.bias.add_(1)
        return self.last / 0


def bits(model: nn.Module) -> dict[str, tuple[bytes, int]]:
    return {
        name: (one.detach().numpy().tobytes(), one._version) for name, one in model.state_dict(keep_vars=True).items()
    }


@pytest.mark.parametrize("backward", [False, True])
def test_nothing_is_changed(backward: bool) -> None:
    model, cache = Counting(), {"calls": 0, "mask": torch.ones(1)}
    x = torch.ones(4, 3)
    state = torch.get_rng_state()
    model(x.clone(), dict(cache)).sum().backward()
    torch.set_rng_state(state)
    before, last, grads = bits(model), model.last, [one.grad for one in model.parameters()]
    given, written, python, numpy = x.clone(), x._version, random.getstate(), np.random.get_state()[1].tobytes()
    copies = [one.clone() for one in grads if one is not None]
    arrived = (torch.ones(4, 3),) if backward else None
    found = zoom(model, (x, cache), {}, grad_outputs=arrived)
    assert found.operation == "aten.div.Tensor" and found.text == "return self.last / 0"
    assert bits(model) == before and model.last is last and len(model.seen) == model.calls == 1
    assert [id(one.grad) for one in model.parameters()] == [id(one) for one in grads]
    assert [one.numpy().tobytes() for one in copies] == [one.numpy().tobytes() for one in grads if one is not None]
    assert torch.equal(x, given) and x._version == written and cache["calls"] == 0
    assert random.getstate() == python and np.random.get_state()[1].tobytes() == numpy
    assert torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), state)


def test_inside_a_forward_the_pass_goes_on_as_before() -> None:
    def run(look: bool) -> tuple[Tensor, list[Tensor], list[Zoom]]:
        torch.manual_seed(5)
        seen: list[Zoom] = []
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3), nn.Linear(3, 1))
        if look:
            hookline.register_forward_hook(
                model[1],
                lambda module, args, output: seen.append(zoom(nn.Sequential(module, Apply(log_of_zero)), args, {})),
            )
        output = model(torch.ones(2, 3))
        output.sum().backward()
        return output, [one.grad for one in model.parameters() if one.grad is not None], seen

    (plain, plain_grads, _), (watched, grads, seen) = run(False), run(True)
    assert len(seen) == 1 and seen[0].operation == "aten.log.default"
    assert torch.equal(plain, watched) and all(map(torch.equal, plain_grads, grads))


def test_inside_a_backward_hook() -> None:
    seen: list[Zoom] = []
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    x = torch.zeros(2, requires_grad=True)
    hookline.register_backward_hook(
        model[0],
        lambda module, grad_input, grad_output: seen.append(zoom(Apply(root), (x,), {}, grad_outputs=(torch.ones(2),))),
    )
    model(torch.ones(2, 3)).sum().backward()
    assert [one.node for one in seen] == ["SqrtBackward0"] and x.grad is None


def test_without_gradients_and_in_inference_mode() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = torch.zeros(2)
            assert zoom(Apply(log_of_zero), (x,), {}).operation == "aten.log.default"
    with torch.no_grad():
        found = zoom(Apply(root), (torch.zeros(2, requires_grad=True),), {}, grad_outputs=(torch.ones(2),))
    assert found.node == "SqrtBackward0"


def test_gradients_by_number_of_the_output_that_wants_one() -> None:
    module = Apply(lambda x: (torch.arange(2), x * 2, [torch.sqrt(x)]))
    x = torch.zeros(2, requires_grad=True)
    assert not zoom(module, (x,), {}, grad_outputs={0: torch.ones(2)}).reproduced
    assert zoom(module, (x,), {}, grad_outputs={1: torch.ones(2)}).node == "SqrtBackward0"
    assert zoom(module, (x,), {}, grad_outputs=(None, None, torch.ones(2))).node == "SqrtBackward0"


def test_hooks_of_the_user_run_in_the_copy_and_ours_do_not() -> None:
    module, ours = Apply(lambda x: x), []
    hookline.register_forward_hook(module, lambda *call: ours.append(call))
    module.register_forward_hook(lambda module, args, output: output / 0)
    found = zoom(module, (torch.ones(2),), {})
    assert found.operation == "aten.div.Tensor" and ours == []


# ---------------------------------------------------------------- what cannot be done


def test_a_module_that_refuses_to_be_copied() -> None:
    module = Apply(log_of_zero)
    module.lock = threading.Lock()
    found = zoom(module, (torch.zeros(2),), {})
    assert not found.reproduced and found.reason.startswith("it cannot be copied: TypeError: cannot pickle")
    assert str(found) == f"not reproduced: {found.reason}"


def test_a_module_larger_than_the_limit() -> None:
    found = zoom(nn.Linear(100, 100), (torch.zeros(1, 100),), {}, limit=40_000)
    assert found == Zoom(reason="its parameters and arguments have 40,800 bytes, more than the limit of 40,000"), (
        "(100 * 100 + 100 + 100) * 4 bytes"
    )


def test_a_forward_that_raises() -> None:
    def fails(x: Tensor) -> Tensor:
        if not x.log().isfinite().all():
            raise ValueError("not finite")
        raise KeyError("other")

    assert zoom(Apply(fails), (torch.ones(2),), {}).reason == "KeyError: 'other'"
    found = zoom(Apply(fails), (torch.zeros(2),), {})
    assert found.reproduced and found.operation == "aten.log.default"
    assert found.reason == "then its forward raised ValueError: not finite"


def test_gradients_of_the_wrong_number_or_shape() -> None:
    x = torch.zeros(2, requires_grad=True)
    assert "2 gradients were given" in zoom(Apply(root), (x,), {}, grad_outputs=(None, None)).reason
    assert "RuntimeError" in zoom(Apply(root), (x,), {}, grad_outputs=(torch.ones(3),)).reason
    assert "no gradient arrives" in zoom(Apply(root), (torch.ones(2),), {}, grad_outputs=(torch.ones(2),)).reason


def test_a_module_that_needs_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch.distributed puts in its own
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert zoom(wrapped, (torch.ones(1, 2),), {}).reason == (
            "it is a DistributedDataParallel, which other processes take part in"
        )

        def summed(x: Tensor) -> Tensor:
            torch.distributed.all_reduce(x)
            return x / 0

        assert "it needs other processes, for c10d" in zoom(Apply(summed), (torch.ones(2),), {}).reason
    finally:
        torch.distributed.destroy_process_group()


def test_output_is_bitwise_that_of_the_module() -> None:
    """What the trace does between the operations leaves their results alone."""
    seen: list[Tensor] = []
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 2),
        Apply(lambda x: seen.append(x.detach().clone()) or x),
    )  # fmt: skip
    x = torch.randn(3, 1, 6, 6)
    plain = model(x)
    with torch.no_grad():
        model[1].running_mean.zero_(), model[1].running_var.fill_(1)
    assert not zoom(model, (x,), {}).reproduced
    assert len(seen) == 2 and torch.equal(plain, seen[1])
