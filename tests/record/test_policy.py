"""Options of a recorder: which values are kept, in which form, and how many bytes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline
from hookline.errors import ArgumentError, BudgetError, OptionError
from hookline.record.policy import parse_bytes
from hookline.sites import PORTS


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


class Pieces(nn.Module):
    """Returns tensors of several dtypes."""

    def forward(self, x: Tensor) -> Any:
        return {"x": x, "half": x.half(), "index": x.argmax(-1), "mask": x > 0, "wave": torch.complex(x, x)}


# ---------------------------------------------------------------- keep


def test_keep_last_holds_the_newest_value_of_each_port() -> None:
    model, x = net(), torch.randn(5, 2, 3)
    with hookline.record(model, ports=("output", "grad_output"), keep="last") as rec:
        for step in range(5):
            model(x[step]).sum().backward()
    assert len(rec) == 8 and rec.steps == [4]
    assert torch.equal(rec["0"].output, F.linear(x[4], model[0].weight, model[0].bias).detach())
    assert torch.equal(rec["2"].grad_output, torch.ones(2, 2))
    assert [event.order for event in rec] == list(range(32, 40))


def test_keep_last_of_a_module_that_runs_often() -> None:
    """The last output is that of the last call; the last gradient to come is that of the first call."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = self.cell(x)
            return x

    model = Loop()
    with hookline.record(model, "cell", ("output", "grad_output"), keep="last") as rec:
        out = model(torch.randn(3, requires_grad=True))
        out.sum().backward()
    assert torch.equal(rec["cell"].output, out.detach())
    assert [(event.port, event.call) for event in rec] == [("output", 3), ("grad_output", 0)]


def test_keep_all_is_the_default() -> None:
    model = net()
    with hookline.record(model, "0") as rec:
        model(torch.randn(2, 3))
        model(torch.randn(2, 3))
    assert len(rec["0"].calls) == 2


# ---------------------------------------------------------------- device, dtype


def test_dtype_converts_floating_values_alone() -> None:
    model, x = Pieces(), torch.randn(2, 3)
    with hookline.record(model, dtype=torch.float64) as rec:
        model(x)
    kept = rec["(root)"].output
    assert {name: t.dtype for name, t in kept.items()} == {
        "x": torch.float64, "half": torch.float64, "index": torch.int64, "mask": torch.bool, "wave": torch.complex64,
    }  # fmt: skip
    assert torch.equal(kept["x"], x.double()) and torch.equal(kept["half"], x.half().double())


def test_what_is_converted_in_inference_mode_is_of_use_outside() -> None:
    model, x = net(), torch.randn(2, 3)
    with hookline.record(model, "0", ("input",), dtype=torch.float64) as rec, torch.inference_mode():
        model(x)
    value = rec["0"].input
    assert not value.is_inference() and torch.equal(value, x.double())


def test_dtype_is_used_for_gradients_as_well() -> None:
    model = net()
    with hookline.record(model, ports=PORTS, dtype=torch.bfloat16) as rec:
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert {leaf.dtype for event in rec for _, leaf in event.leaves()} == {torch.bfloat16}
    assert rec.nbytes == sum(leaf.numel() * 2 for event in rec for _, leaf in event.leaves())


def test_device_says_where_values_are_kept() -> None:
    model = net()
    with hookline.record(model, device="meta") as rec:
        out = model(torch.randn(2, 3))
    assert rec["2"].output.is_meta and rec["2"].output.shape == out.shape and not out.is_meta
    with hookline.record(model, device=torch.device("cpu")) as rec:
        model(torch.randn(2, 3))
    assert rec["2"].output.device.type == "cpu" and torch._C._is_cow_tensor(rec["2"].output)


# ---------------------------------------------------------------- reduce


def test_reduce_keeps_a_tensor_or_a_number() -> None:
    model, x = nn.Sequential(nn.Conv2d(1, 3, 1)), torch.randn(2, 1, 4, 4)
    with hookline.record(model, "0", reduce=lambda t: t.mean((2, 3))) as rec:
        out = model(x).detach()
    assert torch.equal(rec["0"].output, out.mean((2, 3)))
    with hookline.record(model, "0", reduce=lambda t: t.norm().item()) as rec:
        model(x)
    assert rec["0"].output.shape == () and rec["0"].output.item() == out.norm().item()
    with hookline.record(model, "0", reduce=lambda t: bool(t.isnan().any())) as rec:
        model(x)
    assert rec["0"].output.item() is False
    with hookline.record(model, "0", reduce=Tensor.numel) as rec:
        model(x)
    assert rec["0"].output.item() == 96 and rec["0"].output.dtype == torch.int64


def test_reduce_goes_with_dtype_and_every_port() -> None:
    model = net()
    with hookline.record(model, ports=PORTS, reduce=lambda t: t.float().mean(), dtype=torch.float16) as rec:
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert {leaf.dtype for event in rec for _, leaf in event.leaves()} == {torch.float16}
    assert rec["2"].grad_output.item() == 1.0 and len(rec) == 16


def test_what_reduce_does_to_its_argument_reaches_nobody() -> None:
    model, x = net(), torch.randn(2, 3)
    expected = model(x)
    with hookline.record(model, reduce=lambda t: t.zero_()) as rec:
        assert torch.equal(model(x), expected)
    assert torch.equal(rec["0"].output, torch.zeros(2, 4))


def test_a_reduced_view_does_not_hold_the_whole_value() -> None:
    model = nn.Identity()
    with hookline.record(model, reduce=lambda t: t[0, :2]) as rec:
        model(torch.randn(100, 100))
    assert rec["(root)"].output.untyped_storage().nbytes() == 8


def test_reduce_makes_no_graph() -> None:
    model, weight = net(), torch.ones(2, requires_grad=True)
    with hookline.record(model, "2", reduce=lambda t: (t * weight).sum()) as rec:
        model(torch.randn(2, 3))
    assert not rec["2"].output.requires_grad


def test_a_wrong_result_of_reduce_names_the_site() -> None:
    model = net()
    message = r"reduce returned str for a tensor of shape \(2, 4\) at 0:output; it must return a tensor or a number"
    with hookline.record(model, reduce=lambda t: "text") as rec, pytest.raises(ArgumentError, match=message) as caught:
        model(torch.randn(2, 3))
    assert caught.value.__notes__ == ["Raised while 0:output was kept, call 0 of step 0."]
    assert len(rec) == 0 and type(model[0]) is nn.Linear


def test_an_exception_in_reduce_reaches_the_user_with_the_site() -> None:
    def reduce(tensor: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    model = net()
    with hookline.record(model, "2", "grad_output", reduce=reduce) as rec:
        loss = model(torch.randn(2, 3)).sum()
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            loss.backward()
    assert caught.value.__notes__ == ["Raised while 2:grad_output was kept, call 0 of step 0."]
    assert len(rec) == 0 and type(model[2]) is nn.Linear
    model(torch.randn(2, 3)).sum().backward()


# ---------------------------------------------------------------- detach


def test_values_with_their_graph_can_be_used_in_a_loss() -> None:
    model, x = net(), torch.randn(2, 3)
    with hookline.record(model, "0", detach=False) as rec:
        model(x)
    rec["0"].output.pow(2).sum().backward()
    weight, bias = (p.detach().clone().requires_grad_() for p in (model[0].weight, model[0].bias))
    expected = torch.autograd.grad(F.linear(x, weight, bias).pow(2).sum(), [weight, bias])
    assert torch.equal(model[0].weight.grad, expected[0]) and torch.equal(model[0].bias.grad, expected[1])
    assert torch.equal(rec["0"].output.detach(), F.linear(x, weight, bias).detach()), "the in-place ReLU reached it"


def test_values_with_their_graph_go_with_dtype_and_reduce() -> None:
    model, x = net(), torch.randn(2, 3)
    with hookline.record(model, "0", detach=False, dtype=torch.float64, reduce=lambda t: t.sum(1)) as rec:
        model(x)
    kept = rec["0"].output
    assert kept.requires_grad and kept.dtype == torch.float64 and kept.shape == (2,)
    kept.sum().backward()
    assert torch.allclose(model[0].weight.grad, x.sum(0).expand(4, 3))


def test_values_with_their_graph_under_no_grad_have_none() -> None:
    model = net()
    with torch.no_grad(), hookline.record(model, ports=("input", "output"), detach=False) as rec:
        model(torch.randn(2, 3))
    assert not any(leaf.requires_grad for event in rec for _, leaf in event.leaves())
    assert torch._C._is_cow_tensor(rec["2"].output)


def test_values_with_their_graph_can_be_saved(tmp_path: Any) -> None:
    model = net()
    with hookline.record(model, detach=False) as rec:
        model(torch.randn(2, 3))
    rec.save(tmp_path / "run.hookline")
    assert torch.equal(hookline.load(tmp_path / "run.hookline")["2"].output, rec["2"].output.detach())


def test_without_detach_the_model_computes_the_same_bits() -> None:
    model, x = net(), torch.randn(2, 3)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with hookline.record(model, ports=PORTS, detach=False):
        model(x).sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


# ---------------------------------------------------------------- budget


def test_the_budget_is_checked_before_a_value_is_kept() -> None:
    model, x = net(), torch.randn(10, 3)
    sizes = {"0": 160, "1": 160, "2": 80}
    with hookline.record(model, ["0", "1", "2"], budget=330) as rec, pytest.raises(BudgetError) as caught:
        model(x)
    assert str(caught.value) == (
        "the budget of 330 bytes is full: 320 bytes are kept, 2:output would add 80 bytes. "
        "Largest sites: 0:output 160 bytes, 1:output 160 bytes. "
        'Record fewer sites, pass reduce=, dtype= or keep="last", or raise budget=.'
    )
    assert [event.path for event in rec] == ["0", "1"] and rec.nbytes == sizes["0"] + sizes["1"]
    with hookline.record(model, ["0", "1", "2"], budget=sum(sizes.values())) as rec:
        model(x)
    assert rec.nbytes == 400


def test_nothing_is_allocated_for_a_value_that_does_not_fit() -> None:
    """The conversion would take two terabytes."""

    class Huge(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.expand(10**12)

    model = Huge()
    message = r"\(root\):output would add 2 TB\. Largest sites: none yet\."
    with hookline.record(model, budget="1GB", dtype=torch.float16), pytest.raises(BudgetError, match=message):
        model(torch.ones(1))


def test_the_model_and_the_recording_go_on_after_the_budget_is_full() -> None:
    model, x = net(), torch.randn(10, 3)
    with hookline.record(model, ["0", "2"], budget=250) as rec:
        model(x)
        for _ in range(3):
            with pytest.raises(BudgetError, match="240 bytes are kept"):
                model(x)
        assert len(rec) == 2 and "2 events" in str(rec)
    assert model(x).shape == (10, 2) and rec["0"].output.shape == (10, 4)


def test_keep_last_gives_the_memory_back() -> None:
    model, x = net(), torch.randn(10, 3)
    with hookline.record(model, "**", ("output", "grad_output"), keep="last", budget=2 * (160 + 160 + 80 + 80)) as rec:
        for _ in range(50):
            model(x).sum().backward()
    assert rec.nbytes == 960
    with hookline.record(model, "0", keep="last", budget=170) as rec:
        for rows in (10, 1, 5, 10):
            model(x[:rows])
        with pytest.raises(BudgetError, match=r"160 bytes are kept, 0:output would add 176"):
            model(torch.randn(11, 3))
        model(x)
    assert rec["0"].output.shape == (10, 4)


def test_all_tensors_of_one_value_count_together() -> None:
    """Also with keep="last": one leaf of a value does not make room for another one."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, x + 2

    model = Two()
    with hookline.record(model, keep="last", budget=100) as rec:
        for _ in range(3):
            with pytest.raises(BudgetError, match=r"0 bytes are kept, \(root\):output would add 160"):
                model(torch.randn(20))
        for _ in range(3):
            model(torch.randn(12))
    assert rec.nbytes == 96


def test_gradients_count() -> None:
    model, x = net(), torch.randn(10, 3)
    with hookline.record(model, "0", ("output", "grad_output"), budget=200) as rec:
        loss = model(x).sum()
        with pytest.raises(BudgetError, match="0:grad_output would add 160"):
            loss.backward()
    assert rec.ports == ["output"]
    model(x).sum().backward()


def test_the_budget_counts_bytes_as_they_are_kept() -> None:
    x = torch.randn(4, 5)
    for dtype, size in ((None, 80 + 40 + 32 + 20 + 160), (torch.float16, 40 + 40 + 32 + 20 + 160)):
        model = Pieces()
        with hookline.record(model, dtype=dtype, budget=size) as rec:
            model(x)
        assert rec.nbytes == size
        with hookline.record(model, dtype=dtype, budget=size - 1), pytest.raises(BudgetError):
            model(x)


def test_the_budget_counts_what_reduce_leaves() -> None:
    model = nn.Identity()
    with hookline.record(model, reduce=lambda t: t.mean(), budget=10) as rec:
        model(torch.randn(100))
        model(torch.randn(100))
        with pytest.raises(BudgetError, match=r"\(root\):output would add 4"):
            model(torch.randn(100))
    assert len(rec) == 2


def test_the_budget_counts_the_full_batch_under_vmap() -> None:
    model = nn.Identity()
    with hookline.record(model, budget=100), pytest.raises(BudgetError, match="would add 120"):
        torch.vmap(model)(torch.randn(10, 3))


def test_bytes_of_a_value_that_could_not_be_kept_are_given_back() -> None:
    model = nn.Identity()
    with hookline.record(model, budget=100, reduce=lambda t: t if t.sum() > 0 else None) as rec:
        for _ in range(5):
            with pytest.raises(ArgumentError):
                model(torch.zeros(20))
        model(torch.ones(20))
    assert rec.nbytes == 80


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1), (123456789, 123456789), ("5", 5), ("5b", 5), ("1kB", 1000), ("1 KiB", 1024), ("2MB", 2_000_000),
        ("2mib", 2 * 2**20), ("1.5GB", 1_500_000_000), (" 1.5 GiB ", 3 * 2**29), ("1T", 10**12), ("1TiB", 2**40),
    ],
)  # fmt: skip
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "2 XB", "-1", "GB", "1i", "1ib", "1e9", "1,000", "2GBs", "٣٣x"])
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(OptionError, match='a size is a number of bytes or a text such as "2GB" or "512MiB", got '):
        parse_bytes(text)


@pytest.mark.parametrize("size", [0, -1, "0", "0.5", 1e9, True, None, [1]])
def test_numbers_that_are_no_size(size: Any) -> None:
    with pytest.raises(OptionError, match="a size is a positive whole number of bytes, got "):
        parse_bytes(size)
