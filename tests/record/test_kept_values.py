"""A kept value stays as it was, whoever writes over its memory later, and costs no copy unless somebody does; in every
mode that torch has."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline
from hookline.sites import PORTS

# ---------------------------------------------------------------- the value of that moment


class Writer(nn.Module):
    """Writes over what its child returned, in one of the ways that there are."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.child, self.write = nn.Linear(3, 3), write

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x)
        self.write(y)
        return y


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "relu_": torch.relu_,
    "+=": lambda y: y.add_(1),
    "a slice": lambda y: y[:, 1:].zero_(),
    "a view": lambda y: y.view(-1).mul_(3),
    "a transpose": lambda y: y.t().copy_(torch.zeros(3, 2)),
    "detach": lambda y: y.detach().zero_(),
    ".data": lambda y: y.data.fill_(7),
    "set .data": lambda y: setattr(y, "data", torch.zeros(2, 3)),
    "index": lambda y: y.__setitem__((0, 0), 5.0),
    "out=": lambda y: torch.add(y.detach(), 1, out=y.detach()),
    "numpy": lambda y: y.detach().numpy().fill(3.0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_a_kept_value_stays_when_the_model_writes_over_it(write: str, grad: bool) -> None:
    model, x = Writer(WRITES[write]), torch.randn(2, 3)
    expected = F.linear(x, model.child.weight, model.child.bias).detach()
    with torch.set_grad_enabled(grad), hookline.record(model, "child", ("input", "output")) as rec:
        final = model(x)
    assert torch.equal(rec["child"].output, expected)
    assert torch.equal(rec["child"].input, x)
    assert not torch.equal(final, expected)


def test_a_kept_input_stays_when_the_caller_writes_over_it() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    before = x.clone()
    with torch.no_grad(), hookline.record(model, "(root)", "input") as rec:
        model(x)
        x.zero_()
    assert torch.equal(rec["(root)"].input, before)


def test_writing_into_a_kept_value_does_not_reach_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with torch.no_grad(), hookline.record(model) as rec:
        out = model(torch.randn(2, 3))
    before = out.clone()
    rec["(root)"].output.zero_()
    assert torch.equal(out, before) and not torch.equal(rec["1"].output, torch.zeros(2, 3))


def test_no_copy_is_made_unless_somebody_writes() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    seen: list[int] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(torch._C._data_address(output)))
    with torch.no_grad(), hookline.record(model, ports=("input", "output")) as rec:
        out = model(x)
    kept = rec["1"].output
    assert torch._C._is_cow_tensor(kept)
    assert torch._C._data_address(kept) == torch._C._data_address(out)
    assert torch._C._data_address(rec["0"].output) == torch._C._data_address(rec["1"].input) == seen[0]
    assert torch._C._data_address(rec["0"].input) == torch._C._data_address(x)
    out.zero_()
    assert torch._C._data_address(kept) != torch._C._data_address(out)
    assert not torch.equal(kept, out)


def test_memory_of_numpy_is_copied_since_it_cannot_be_shared() -> None:
    array, model = np.ones((2, 3), dtype=np.float32), nn.Linear(3, 3)
    with hookline.record(model, "(root)", "input") as rec:
        model(torch.from_numpy(array))
    array[:] = 0
    assert torch.equal(rec["(root)"].input, torch.ones(2, 3))


def test_a_small_part_of_a_large_tensor_does_not_keep_the_rest() -> None:
    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, 0]

    model = First()
    with hookline.record(model) as rec:
        model(torch.randn(4, 100, 2))
    kept = rec["(root)"].output
    assert kept.untyped_storage().nbytes() == kept.nbytes == 4 * 2 * 4


# ---------------------------------------------------------------- gradients stay


def test_gradients_stay_when_the_optimizer_and_others_write() -> None:
    """What an optimizer does is written out: to import torch.optim takes longer than all other tests of this file."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    with hookline.record(model, ports=("output", "grad_input", "grad_output")) as rec:
        x = torch.randn(4, 3, requires_grad=True)
        loss = model(x).pow(2).sum()
        loss.backward()
        before = {id(event): [leaf.clone() for _, leaf in event.leaves()] for event in rec}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        x.grad.mul_(100)
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), [p.grad for p in model.parameters()], alpha=-0.5)
        model.zero_grad(set_to_none=False)
    for event in rec:
        assert all(torch.equal(*pair) for pair in zip(before[id(event)], (t for _, t in event.leaves()), strict=True))
    assert len(rec) == len(before) == 12


def test_gradients_are_kept_although_they_accumulate_in_place() -> None:
    """autograd adds the second gradient of a value into the first one's memory where it can."""
    model = nn.Linear(2, 2)
    x = torch.randn(3, 2, requires_grad=True)
    with hookline.record(model, ports="grad_input") as rec:
        (model(x).sum() + (model(x) * 10).sum() + x.pow(2).sum()).backward()
    first, second = (call.grad_input for call in rec["(root)"].calls)
    share = model.weight.detach().sum(0).expand(3, 2)
    assert torch.allclose(first, share) and torch.allclose(second, share * 10)
    assert torch.allclose(x.grad, share * 11 + 2 * x.detach())


def test_a_parameter_that_is_returned_as_it_is() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.weight

    model = Table()
    with hookline.record(model, ports=("input", "output", "grad_output")) as rec:
        (model() * 2).sum().backward()
        with torch.no_grad():
            model.weight.zero_()
    record = rec["(root)"]
    assert record.output.tolist() == [1.0] * 3 and record.grad_output.tolist() == [2.0] * 3
    assert type(record.output) is Tensor and record.input == () and record.args == () and record.kwargs == {}


# ---------------------------------------------------------------- modes


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    model, x = net(), torch.randn(2, 3)
    expected = F.linear(x, model[0].weight, model[0].bias).detach()
    with mode(), hookline.record(model, ports=PORTS) as rec:
        model(x)
    assert torch.equal(rec["0"].output, expected) and torch.equal(rec["1"].output, expected.relu())
    assert rec.ports == ["input", "output"]
    assert not rec["0"].output.requires_grad
    assert str(rec)


def test_under_autocast() -> None:
    model, x = net(), torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16), hookline.record(model, ports=PORTS) as rec:
        model(x).sum().backward()
    assert rec["0"].output.dtype == rec["0"].grad_output.dtype == torch.bfloat16
    assert rec["0"].input.dtype == torch.float32
    plain = F.linear(x.bfloat16(), model[0].weight.bfloat16(), model[0].bias.bfloat16())
    assert torch.equal(rec["0"].output, plain)


def test_vmap_keeps_the_whole_batch() -> None:
    model, x = net(), torch.randn(5, 2, 3)
    with hookline.record(model, ports=("input", "output")) as rec:
        out = torch.vmap(model, in_dims=1)(x)
    assert out.shape == (2, 5, 2)
    assert torch.equal(rec["(root)"].input, x.movedim(1, 0))
    assert torch.allclose(rec["0"].output, F.linear(x.movedim(1, 0), model[0].weight, model[0].bias))
    assert torch.equal(rec["(root)"].output, out)


def test_gradients_of_each_sample_by_torch_func() -> None:
    """Inside torch.func.grad everything is wrapped; what is kept is plain, has memory and goes through numpy."""
    model, x = net(), torch.randn(5, 3)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (sample,)).pow(2).sum()

    with hookline.record(model, "2", ("output", "grad_output")) as rec:
        grads = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    out = model(x).detach()
    assert np.allclose(rec["2"].output.numpy(), out.numpy(), atol=1e-6)
    assert np.allclose(rec["2"].grad_output.numpy(), 2 * out.numpy(), atol=1e-6)
    assert torch.allclose(grads["2.bias"], 2 * out)


def test_reduce_and_graphs_go_with_vmap() -> None:
    model, x = nn.Tanh(), torch.randn(5, 3, requires_grad=True)
    with hookline.record(model, reduce=lambda t: t.sum().item()) as rec:
        torch.vmap(model)(x)
    assert rec["(root)"].output.item() == pytest.approx(x.tanh().sum().item())
    with hookline.record(model, detach=False) as rec:
        torch.vmap(model)(x)
    rec["(root)"].output.sum().backward()
    assert torch.allclose(x.grad, 1 - x.detach().tanh() ** 2)


def test_a_reduced_number_is_no_victim_of_the_default_device() -> None:
    model = nn.Identity()
    with torch.device("meta"), hookline.record(model, reduce=lambda t: 1.5) as rec:
        model(torch.randn(2, device="cpu"))
    assert rec["(root)"].output.item() == 1.5


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = net()
    with hookline.record(model, ports=PORTS) as rec:
        model(torch.randn(2, 3, device="meta")).sum().backward()
    assert rec["0"].output.is_meta and rec["0"].output.shape == (2, 4)
    assert rec["0"].grad_output.shape == (2, 4)
    assert rec.nbytes == 0 and "2x4" in str(rec)


def test_lazy_modules() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    with hookline.record(model, ports=("output", "grad_output")) as rec:
        model(torch.randn(2, 3)).sum().backward()
    assert rec["0"].output.shape == rec["0"].grad_output.shape == (2, 4)
    assert type(model[0]) is nn.Linear


def test_complex_sparse_and_empty_values() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.complex(x, x), x.to_sparse(), x[:0], torch.tensor(3), x > 0

    model, x = Odd(), torch.tensor([[0.0, 2.0]])
    with hookline.record(model) as rec:
        model(x)
    imaginary, sparse, empty, number, mask = rec["(root)"].output
    assert imaginary.tolist() == [[0j, 2 + 2j]] and sparse.to_dense().tolist() == [[0.0, 2.0]]
    assert empty.shape == (0, 2) and number.item() == 3 and mask.tolist() == [[False, True]]


# ---------------------------------------------------------------- size


def seconds_to_attach(count: int) -> float:
    model = nn.Sequential(*(nn.Identity() for _ in range(count)))
    gc.disable()  # it looks at all objects of the test session, again and again
    try:
        start = time.perf_counter()
        with hookline.record(model, ports=PORTS):
            pass
        return time.perf_counter() - start
    finally:
        gc.enable()


def test_ten_thousand_modules_take_ten_times_as_long_as_a_thousand() -> None:
    seconds_to_attach(100)
    small, large = min(seconds_to_attach(1000) for _ in range(3)), seconds_to_attach(10_000)
    assert large < 40 * small, (small, large)


def _of(dtype: torch.dtype) -> Tensor:
    """A tensor of a dtype, made of known bytes."""
    if dtype is torch.quint4x2:
        scales, zeros = torch.rand(4) + 0.1, torch.zeros(4)
        return torch.quantize_per_channel(torch.rand(4, 4), scales, zeros, 0, dtype)
    if dtype is torch.quint2x4:
        return torch._empty_affine_quantized([4, 4], scale=0.1, zero_point=0, dtype=dtype)  # type: ignore[attr-defined]
    if dtype in (torch.quint8, torch.qint8, torch.qint32):
        return torch.quantize_per_tensor(torch.rand(4, 4), 0.1, 0, dtype)
    return torch.zeros(4, 4 * dtype.itemsize, dtype=torch.uint8).view(dtype)


DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.untyped_storage().tolist())


@pytest.mark.filterwarnings(
    "ignore:.*quantized tensor creation", "ignore:ComplexHalf support", "ignore:a value is left"
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"dtype": torch.float16, "device": "cpu"}, {"dtype": "fp8"}, {"budget": "1MB"}]
)
def test_a_model_runs_with_a_value_of_any_dtype(tmp_path: Path, dtype: torch.dtype, options: Any) -> None:
    made, model = _of(dtype), nn.Sequential(nn.Identity(), nn.Identity())
    bits = _bits(made)
    for to in (None, tmp_path / "run.hookline"):
        with hookline.record(model, "*", ("input", "output"), to=to, **options) as rec:
            assert model(made) is made
        assert _bits(made) == bits
        for fate in rec.coverage.values():
            assert fate.status == "captured" or "left out" in fate.reason
    with hookline.record(model, "0") as rec:
        model(made)
    kept = rec["0"].output
    assert (kept.dtype, kept.shape, _bits(kept)) == (dtype, made.shape, bits)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
@pytest.mark.parametrize("dtype", [torch.quint4x2, torch.quint2x4])
def test_a_hook_gets_a_value_that_torch_cannot_clone(dtype: torch.dtype) -> None:
    seen: list[Tensor] = []
    made, model = _of(dtype), nn.ReLU(inplace=True)
    model.forward = lambda x: x  # type: ignore[method-assign]
    with hookline.register_forward_hook(model, lambda module, args, output: seen.append(args[0])):
        assert model(made) is made
    assert seen[0].dtype is dtype and _bits(seen[0]) == _bits(made)
