"""Editing: a change at any of the four ports goes where it should, is counted, and is gone afterwards."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.errors import ArgumentError, HookError, OptionError, SiteError
from hookline.sites import PORTS, Site
from hookline.values import Arguments, walk


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.act(self.one(x)))


class Heads(nn.Module):
    """Gets a keyword and returns a nested value."""

    def forward(self, x: Tensor, y: Tensor, *, scale: float = 1.0) -> Any:
        return Pair(x * y, {"scaled": x * scale, "text": "kept"})


class Pair(NamedTuple):
    product: Any
    rest: Any


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = Heads()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        product, rest = self.heads(x, y, scale=2.0)
        return product + rest["scaled"]


def clean(model: nn.Module) -> bool:
    return all(
        "hookline" not in repr(vars(m)) and "__hookline_original__" not in vars(type(m)) for m in model.modules()
    )


# ---------------------------------------------------------------- the four ports


def test_output() -> None:
    model, x = Net(), torch.randn(5, 3)
    with hookline.edit(model, {"one": lambda value: value + 1}) as edits:
        out = model(x)
    expected = model.two(F.relu(model.one(x) + 1))
    assert torch.equal(out, expected) and edits.counts == {"one:output": 1}
    assert not torch.equal(model(x), expected) and clean(model)


def test_input() -> None:
    model, x = Net(), torch.randn(5, 3)
    with hookline.edit(model, {"two:input": lambda value: value * 0}) as edits:
        out = model(x)
    assert torch.equal(out, model.two.bias.expand(5, 2)) and edits.counts == {"two:input": 1}


def test_grad_output() -> None:
    model, x = Net(), torch.randn(5, 3)
    model(x).sum().backward()
    expected = [p.grad * factor for p, factor in zip(model.parameters(), (3, 3, 1, 1), strict=True)]
    model.zero_grad()
    with hookline.edit(model, {"one:grad_output": lambda grad: grad * 3}) as edits:
        model(x).sum().backward()
    assert all(torch.allclose(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    assert edits.counts == {"one:grad_output": 1}


def test_grad_input() -> None:
    model, x = Net(), torch.randn(5, 3)
    model(x).sum().backward()
    expected = [p.grad * factor for p, factor in zip(model.parameters(), (-2, -2, 1, 1), strict=True)]
    model.zero_grad()
    with hookline.edit(model, {"two:grad_input": lambda grad: grad * -2}) as edits:
        model(x).sum().backward()
    assert all(torch.allclose(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    assert edits.counts == {"two:grad_input": 1}


@pytest.mark.parametrize("port", PORTS)
def test_none_keeps_the_value(port: str) -> None:
    model, x = Net(), torch.randn(5, 3)
    expected = model(x)
    expected.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    seen: list[Any] = []
    with hookline.edit(model, {f"two:{port}": seen.append}) as edits:
        out = model(x)
        out.sum().backward()
    assert len(seen) == 1 and edits.counts == {f"two:{port}": 0}
    assert torch.equal(out, expected) and all(
        torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True)
    )


def test_a_change_is_shown_what_a_recording_shows() -> None:
    model, x = Outer(), torch.randn(3, requires_grad=True)
    shown: dict[str, Any] = {}
    sites = [f"{path}:{port}" for path in ("(root)", "heads") for port in PORTS]
    changes = {site: lambda value, site=site: shown.update({site: value}) for site in sites}
    with hookline.record(model, ports=PORTS) as rec, hookline.edit(model, changes):
        model(x, torch.ones(3)).sum().backward()
    for path in ("(root)", "heads"):
        assert torch.equal(first(shown[f"{path}:input"]), first(rec[path].input))
        assert torch.equal(first(shown[f"{path}:output"]), first(rec[path].output))
        assert torch.equal(first(shown[f"{path}:grad_output"]), first(rec[path].grad_output))
        assert torch.equal(first(shown[f"{path}:grad_input"]), first(rec[path].grad_input))
    assert isinstance(shown["heads:input"], Arguments) and shown["heads:input"].kwargs == {"scale": 2.0}
    assert type(shown["(root):input"]) is tuple and type(shown["heads:output"]) is Pair
    assert shown["heads:grad_output"].paths == ("output.product", "output.rest['scaled']", "output.rest['text']")
    assert shown["heads:grad_input"].paths == ("args[0]", "args[1]", "kwargs['scale']")


def first(value: Any) -> Tensor:
    return next(leaf for _, leaf in walk(value) if isinstance(leaf, Tensor))


def test_nested_outputs_and_arguments() -> None:
    model, x, y = Outer(), torch.randn(3), torch.randn(3)

    def swap_heads(value: Pair) -> Pair:
        return value._replace(product=value.product * 0)

    with hookline.edit(model, {"heads": swap_heads}):
        assert torch.equal(model(x, y), x * 2)
    with hookline.edit(model, {"heads:input": lambda call: (call.args[::-1], {"scale": 0.0})}):
        assert torch.equal(model(x, y), x * y)
    with hookline.edit(model, {"(root):input": lambda args: [args[1], args[1]]}):
        assert torch.equal(model(x, y), y * y + 2 * y)


def test_gradients_of_several_leaves() -> None:
    model = Outer()
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with hookline.edit(model, {"heads:grad_input": lambda grads: (grads[0] * 10, None, None)}):
        model(x, y).sum().backward()
    assert torch.allclose(x.grad, (y.detach() + 2) * 10) and y.grad is None
    x.grad = None
    with hookline.edit(model, {"heads:grad_output": lambda grads: (grads[0] * 0, *grads[1:])}):
        model(x, y).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


# ---------------------------------------------------------------- several


def test_changes_at_one_site_run_in_order() -> None:
    model, x = Net(), torch.randn(5, 3)
    changes = {"two": lambda value: value + 1, "two:output": lambda value: value * 10, "t*": lambda value: -value}
    with hookline.edit(model, changes) as edits:
        out = model(x)
    assert torch.equal(out, -((model(x) + 1) * 10)) and edits.counts == {"two:output": 3}


@pytest.mark.parametrize("port", ["grad_input", "grad_output"])
def test_changes_of_a_gradient_run_in_order(port: str) -> None:
    model, x = nn.Identity(), torch.ones(1, requires_grad=True)
    with hookline.edit(model, {Site("", port): lambda grad: grad + 1, f"**:{port}": lambda grad: grad * 10}):
        model(x).backward()
    assert x.grad.item() == 20.0


def test_edits_inside_edits() -> None:
    model, x = Net(), torch.randn(5, 3)
    plain = model(x)
    with hookline.edit(model, {"two": lambda value: value + 1}):
        with hookline.edit(model, {"two": lambda value: value * 2}):
            assert torch.equal(model(x), (plain + 1) * 2)
        assert torch.equal(model(x), plain + 1)
    assert torch.equal(model(x), plain)


def test_patterns_classes_and_tuples_name_sites() -> None:
    model, x = Net(), torch.randn(5, 3)
    with hookline.edit(
        model, {nn.Linear: lambda value: value * 0, ("act:input", "act"): lambda value: value + 1}
    ) as edits:
        out = model(x)
    assert torch.equal(out, torch.zeros(5, 2))
    assert edits.counts == {"one:output": 1, "two:output": 1, "act:input": 1, "act:output": 1}


def test_counts_go_up_with_each_call_and_read_afterwards() -> None:
    model = Net()
    edits = hookline.edit(model, {"one": lambda value: value if value.sum() > 0 else None})
    with edits:
        for sign in (1, -1, 1):
            with torch.no_grad():
                model.one.bias.fill_(sign * 100.0)
            model(torch.randn(2, 3))
    assert edits.counts == {"one:output": 2}


# ---------------------------------------------------------------- what edits are for


def test_activation_patching() -> None:
    """The activations of one input, put into the run of another."""
    model, clean_x, corrupt_x = Net(), torch.randn(5, 3), torch.randn(5, 3)
    with hookline.record(model, "act") as source:
        clean_out = model(clean_x)
    with hookline.edit(model, {"act": lambda value: source["act"].output}):
        patched = model(corrupt_x)
    assert torch.equal(patched, clean_out)

    def patch_two_units(value: Tensor) -> Tensor:
        return torch.cat([source["act"].output[:, :2], value[:, 2:]], 1)

    with hookline.edit(model, {"act": patch_two_units}):
        patched = model(corrupt_x)
    mixed = torch.cat([F.relu(model.one(clean_x))[:, :2], F.relu(model.one(corrupt_x))[:, 2:]], 1)
    assert torch.equal(patched, model.two(mixed))


def test_steering_reaches_the_gradients_of_what_it_adds() -> None:
    model, x = Net(), torch.randn(5, 3)
    direction = torch.zeros(4, requires_grad=True)
    with hookline.edit(model, {"act": lambda value: value + direction}):
        model(x).sum().backward()
    assert torch.allclose(direction.grad, model.two.weight.detach().sum(0) * 5)


def test_gradient_clipping_at_a_site() -> None:
    model, x = Net(), torch.randn(5, 3)
    with (
        hookline.edit(model, {"one:grad_output": lambda grad: grad.clamp(-0.01, 0.01)}),
        hookline.record(model, "one", "grad_output") as rec,
    ):
        (model(x).sum() * 100).backward()
    assert rec["one"].grad_output.abs().max().item() == pytest.approx(0.01)
    assert torch.allclose(model.one.bias.grad, rec["one"].grad_output.sum(0))


@pytest.mark.parametrize("record_first", [True, False])
def test_a_recorder_sees_the_edited_value(record_first: bool) -> None:
    model, x = Net(), torch.randn(5, 3)
    changes = {
        "one:input": lambda value: value * 2, "one": lambda value: value + 1,
        "two:grad_output": lambda grad: grad * 3, "two:grad_input": lambda grad: grad + 5,
    }  # fmt: skip
    recorder, edits = hookline.record(model, ports=PORTS), hookline.edit(model, changes)
    one, two = (recorder, edits) if record_first else (edits, recorder)
    with one as first_made, two as second_made:
        model(x).sum().backward()
    rec = first_made if record_first else second_made
    assert torch.equal(rec["one"].input, x * 2)
    assert torch.equal(rec["one"].output, (F.linear(x * 2, model.one.weight, model.one.bias) + 1).detach())
    assert torch.equal(rec["two"].grad_output, torch.full((5, 2), 3.0))
    assert torch.allclose(rec["two"].grad_input, (torch.full((5, 2), 3.0) @ model.two.weight).detach() + 5)


def test_an_edit_inside_a_checkpoint_is_there_in_the_repetition_too() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=True)

    model, x = Checkpointed(), torch.randn(3, requires_grad=True)
    with hookline.edit(model, {"inner": lambda value: value * 2}):
        model(x).sum().backward()
    assert torch.allclose(x.grad, 2 * (1 - x.detach().tanh() ** 2))


# ---------------------------------------------------------------- what goes wrong


def test_a_change_that_cannot_be_called() -> None:
    message = (
        r"^the change at 'one' is a function of the value, got Tensor; for a constant pass `lambda value: constant`\.$"
    )
    model = Net()
    with pytest.raises(ArgumentError, match=message):
        hookline.edit(model, {"one": torch.zeros(4)})  # type: ignore[dict-item]


def test_changes_that_are_no_dict_or_empty() -> None:
    with pytest.raises(ArgumentError, match=r"^changes is a dict from site to function, got list\.$"):
        hookline.edit(Net(), ["one"])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r'^there is nothing to change: pass \{"site": function\}\.$'):
        hookline.edit(Net(), {})


def test_an_unknown_site() -> None:
    with pytest.raises(SiteError, match=r'no module "onee" in Net; nearest: "one"'):
        hookline.edit(Net(), {"two": torch.relu, "onee": torch.relu})
    with pytest.raises(SiteError, match=r'"one:grad_inputt": unknown port'):
        hookline.edit(Net(), {"one:grad_inputt": torch.relu})
    with pytest.raises(ArgumentError, match=r"the model must be a torch.nn.Module; got an object of type int"):
        hookline.edit(3, {"one": torch.relu})  # type: ignore[arg-type]


def test_a_gradient_of_the_wrong_form() -> None:
    model, x = Net(), torch.randn(5, 3)
    for port, change, message in (
        ("grad_output", lambda grad: grad[:1], r"at two:grad_output returned shape \(1, 2\), .* wanted shape \(5, 2\)"),
        ("grad_input", lambda grad: grad.double(), r"at two:grad_input returned .*float64.* wanted .*float32"),
        ("grad_output", lambda grad: "text", r"at two:grad_output returned str 'text'; it must return None or a tuple"),
        ("grad_output", lambda grad: (grad, grad), r"at two:grad_output returned 2 gradients .* has 1 entries"),
    ):
        with hookline.edit(model, {f"two:{port}": change}):
            loss = model(x).sum()
            with pytest.raises(HookError, match=message):
                loss.backward()
    assert clean(model)


def test_a_change_must_not_write_into_a_gradient() -> None:
    model = Net()
    with hookline.edit(model, {"two:grad_output": lambda grad: grad.mul_(2)}):
        loss = model(torch.randn(5, 3)).pow(2).sum()
        with pytest.raises(HookError, match=r"at two:grad_output wrote into grad_output\[0\] in place"):
            loss.backward()


@pytest.mark.parametrize("wrong", [torch.zeros(2, 3), (torch.zeros(3),), ((1, 2), 3), "ab"])
def test_arguments_of_the_wrong_form(wrong: Any) -> None:
    """A tensor has a first and a second row as well; it is no pair of args and kwargs."""
    model, x = Outer(), torch.randn(3)
    message = (
        r"^the change at heads:input returned \w+; the call has keyword arguments, so it must return None or the pair"
    )
    with hookline.edit(model, {"heads:input": lambda call: wrong}), pytest.raises(HookError, match=message):
        model(x, x)
    message = (
        r"^the change at \(root\):input returned Tensor; the call has several arguments, so it must return None or a"
    )
    with hookline.edit(model, {"(root):input": lambda args: args[0]}), pytest.raises(HookError, match=message):
        model(x, x)
    assert clean(model)


@pytest.mark.parametrize("port", PORTS)
def test_an_exception_in_a_change_says_where(port: str) -> None:
    def change(value: Any) -> Any:
        raise KeyError("mine")

    model = Net()
    with pytest.raises(KeyError, match="mine") as caught, hookline.edit(model, {f"two:{port}": change}):
        model(torch.randn(5, 3)).sum().backward()
    (note,) = caught.value.__notes__
    assert note.endswith(f"at two:{port}.") and "test_an_exception_in_a_change_says_where.<locals>.change" in note
    assert clean(model)


def test_edits_end_with_their_block_and_are_used_once() -> None:
    model, x = Net(), torch.randn(5, 3)
    plain = model(x)
    edits = hookline.edit(model, {"one": lambda value: value * 0, "two:grad_output": lambda grad: grad * 0})
    assert torch.equal(model(x), plain), "nothing happens before the with-block"
    with pytest.raises(ZeroDivisionError), edits:
        raise ZeroDivisionError
    assert torch.equal(model(x), plain) and clean(model) and pickle.loads(pickle.dumps(model)) is not None
    with pytest.raises(OptionError, match=r"^edits are used once; call hookline\.edit\(\.\.\.\) again\.$"):
        edits.__enter__()
    edits.close()


def test_a_gradient_that_arrives_after_the_block_is_not_changed() -> None:
    model, x = Net(), torch.randn(5, 3)
    with hookline.edit(model, {"two:grad_output": lambda grad: grad * 0}) as edits:
        loss = model(x).sum()
    loss.backward()
    assert torch.equal(model.two.bias.grad, torch.full((2,), 5.0)) and edits.counts == {"two:grad_output": 0}
