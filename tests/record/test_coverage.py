"""What becomes of each site that was asked for is told, with a reason that is true."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.errors import CoverageError
from hookline.record import Coverage, Fate
from hookline.sites import PORTS


class Net(nn.Module):
    """A linear layer, and whatever the function does with it and with a second module."""

    def __init__(self, second: nn.Module, function: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = second
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.first(x))


def fate(
    second: nn.Module,
    function: Callable[[Net, Tensor], Tensor],
    port: str = "output",
    *,
    before: Callable[[], Any] = lambda: None,
    backward: bool = True,
) -> Fate:
    """The fate of the second module at one port after one step."""
    model = Net(second, function)
    before()
    with hookline.record(model, ports=PORTS) as rec:
        y = model(torch.ones(2, 3))
        if backward:
            y.sum().backward()
    assert list(rec.coverage) == rec.info["sites"]
    return rec.coverage[f"second:{port}"]


def linear() -> nn.Module:
    return nn.Linear(3, 3)


# ---------------------------------------------------------------- not called


def test_a_branch_that_is_not_taken() -> None:
    found = fate(linear(), lambda net, h: h)
    assert found == ("second:output", "not reached", 0, "(root) ran 1 time without calling it")


def test_a_dropout_whose_work_another_function_may_do() -> None:
    found = fate(nn.Dropout(), lambda net, h: F.dropout(h, net.second.p))
    assert found[1:] == ("not reached", 0, "(root) ran 1 time without calling it; a fused function may do its work")


def test_a_module_below_one_that_did_not_run() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.aside = nn.Sequential(nn.Sequential(nn.Linear(3, 3)))
    with hookline.record(model, "aside.**") as rec:
        model[0](torch.ones(3))
    assert {found[1:] for found in rec.coverage.values()} == {("not reached", 0, "the model was not called")}
    with hookline.record(model, "**") as rec:
        model[0](torch.ones(3))
        model.aside[0](model[0](torch.ones(3)))
    assert rec.coverage["aside.0.0:output"].status == "captured"
    assert rec.coverage["aside:output"][1:] == ("not reached", 0, "it was not called")


@pytest.mark.parametrize("container", [nn.ModuleList([linear()]), nn.ModuleDict({"a": linear()})], ids=["list", "dict"])
def test_a_container(container: nn.Module) -> None:
    found = fate(container, lambda net, h: next(net.second.children())(h))
    assert found[1:] == ("bypassed", 0, f"a {type(container).__name__} holds others and is never called")


@pytest.mark.parametrize(
    ("second", "function"),
    [
        (linear, lambda net, h: h @ net.second.weight),
        (linear, lambda net, h: torch.einsum("bi,oi->bo", h, net.second.weight)),
        (lambda: nn.Embedding(4, 3), lambda net, h: h @ net.second.weight.t()),
    ],
)
def test_a_parameter_that_a_matrix_product_uses(second: Callable[[], nn.Module], function: Any) -> None:
    found = fate(second(), function)
    assert found[1:] == ("bypassed", 0, "its parameters got gradients, though no recorded call used them")


def test_a_parameter_that_is_used_while_its_gradients_add_up() -> None:
    module = linear()
    module(torch.ones(3)).sum().backward()
    found = fate(module, lambda net, h: h @ net.second.weight)
    assert found.status == "not reached"
    assert found.reason.endswith("its gradients were written to, so its parameters may have been used without a call")


def test_a_gradient_that_comes_after_the_end_is_no_sign_of_use() -> None:
    model = Net(linear(), lambda net, h: h)
    with hookline.record(model) as rec:
        model(torch.ones(3))
    model.second(torch.ones(3)).sum().backward()
    assert rec.coverage["second:output"][1:] == ("not reached", 0, "(root) ran 1 time without calling it")


def test_a_gradient_of_an_earlier_step_is_no_sign_of_use() -> None:
    module = linear()
    module(torch.ones(3)).sum().backward()
    assert fate(module, lambda net, h: h).status == "not reached"


def test_a_tied_parameter_that_another_module_used_is_no_sign_of_use() -> None:
    model = Net(linear(), lambda net, h: h)
    model.second.weight = model.first.weight
    with hookline.record(model) as rec:
        model(torch.ones(3)).sum().backward()
    assert rec.coverage["second:output"].status == "not reached"


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_part() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model[0] = torch.compile(model[0], backend="eager")
    with hookline.record(model) as rec:
        assert {found.reason for found in rec.coverage.values()} == {"the model was not called"}
        model(torch.ones(3))
    reason = "torch.compile compiled 0, and compiled code passes by hooks"
    assert rec.coverage["0._orig_mod:output"][1:] == ("bypassed", 0, reason)


def test_a_function_with_other_settings_or_a_class_that_does_more_is_no_call() -> None:
    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 100

    found = fate(Noisy(3, 3), lambda net, h: F.linear(h, net.second.weight, net.second.bias))
    assert found.status == "bypassed" and found.reason.startswith("linear() used its parameter in (root)")
    conv = nn.Conv1d(3, 3, 3, stride=2, padding=1)
    for settings, status in (({"stride": 2, "padding": (1,)}, "captured"), ({"padding": 1}, "bypassed")):
        convolve = lambda net, h, settings=settings: F.conv1d(h.t(), conv.weight, conv.bias, **settings)  # noqa: E731
        assert fate(conv, convolve).status == status


def test_a_function_that_computes_something_else_with_a_parameter() -> None:
    found = fate(nn.Embedding(4, 3), lambda net, h: F.linear(h, net.second.weight))
    assert found.status == "bypassed"
    assert found.reason.startswith("linear() used its parameter in (root) (test_coverage.py:")
    assert found.reason.endswith("), without calling it")


def test_a_module_that_is_called_and_also_used() -> None:
    table = nn.Embedding(4, 3)
    found = fate(table, lambda net, h: F.linear(h + net.second(torch.tensor([0, 1])), net.second.weight))
    assert found[1:3] == ("captured", 1) and found.reason.startswith("besides, linear() used its parameter in (root)")


@pytest.mark.parametrize("port", PORTS)
def test_a_function_that_computes_what_the_module_would_is_a_call(port: str) -> None:
    found = fate(linear(), lambda net, h: F.linear(h, net.second.weight, net.second.bias), port)
    assert found[1:] == ("captured", 1, "")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_module() -> None:
    assert fate(torch.jit.script(linear()), lambda net, h: net.second(h))[1:] == (
        "bypassed", 0, "TorchScript runs it outside Python"
    )  # fmt: skip


def test_a_module_that_was_exchanged_or_taken_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Tanh())
    with hookline.record(model) as rec:
        model[0] = nn.Identity()
        del model[2]
        model(torch.ones(2, 3))
    assert rec.coverage["0:output"].reason == "an Identity was put in its place while it was recorded"
    assert rec.coverage["2:output"].reason == "it was taken out of the model while it was recorded"
    assert rec.coverage["1:output"][1:] == ("captured", 1, "")
    with hookline.record(model) as rec:
        model(torch.ones(2, 3))
        model[1] = nn.Tanh()
    assert rec.coverage["1:output"][1:3] == ("captured", 1)
    assert rec.coverage["1:output"].reason.endswith(
        "Tanh was put in its place while it was recorded; later calls were not seen"
    )


def test_a_fused_path_that_was_left() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    with torch.no_grad(), hookline.record(layer) as rec:
        layer(torch.ones(1, 2, 4))
    assert rec.coverage["linear1:output"][1:3] == ("captured", 1)
    assert "TransformerEncoderLayer ran its plain path" in rec.coverage["linear1:output"].reason
    with hookline.record(layer) as rec:  # with gradients torch takes the plain path by itself
        layer(torch.ones(1, 2, 4))
    assert rec.coverage["linear1:output"].reason == ""


def test_a_module_that_raises() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(2, 2), nn.ReLU())
    with hookline.record(model, ports=("input", "output")) as rec, pytest.raises(RuntimeError):
        model(torch.ones(2, 3))
    assert rec.coverage["1:input"].status == "captured"
    assert rec.coverage["1:output"][1:] == ("bypassed", 0, "it raised RuntimeError")
    assert rec.coverage["2:output"][1:] == ("not reached", 0, "(root) ran 1 time without calling it")


# ---------------------------------------------------------------- gradients


GRADIENTS: dict[str, tuple[Callable[[Net, Tensor], Tensor], bool, str]] = {
    "no backward": (lambda net, h: net.second(h), False, "no backward pass ran while it was recorded"),
    "detached": (
        lambda net, h: h + net.second(h).detach(), True,
        "no gradient reached its output: no loss that depends on it ran backward, or it was detached on the way",
    ),
    "not on the way": (
        lambda net, h: (net.second(h), h)[1], True,
        "no gradient reached its output: no loss that depends on it ran backward, or it was detached on the way",
    ),
    "no_grad": (
        lambda net, h: h + torch.no_grad()(net.second)(h), True, "it ran under torch.no_grad(), which makes no graph"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_why_no_gradient_came(name: str, port: str) -> None:
    function, backward, reason = GRADIENTS[name]
    assert fate(linear(), function, port, backward=backward)[1:] == ("bypassed", 0, reason)


def test_a_gradient_that_nothing_needs() -> None:
    frozen = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))
    with hookline.record(frozen, ports=("grad_input", "grad_output")) as rec:
        frozen(torch.ones(2, 3)).sum().backward()
    assert rec.coverage["0:grad_output"].reason == "its output requires no gradient"
    assert rec.coverage["1:grad_input"].reason == "none of its arguments requires a gradient"
    assert rec.coverage["1:grad_output"].status == "captured"
    with torch.inference_mode(), hookline.record(frozen, ports="grad_output") as rec:
        frozen(torch.ones(2, 3))
    assert {found.reason for found in rec.coverage.values()} == {
        "it ran in torch.inference_mode(), which makes no graph"
    }


def test_calls_that_got_no_gradient_are_counted() -> None:
    model = nn.Linear(3, 3)
    with hookline.record(model, ports="grad_output") as rec:
        first, _ = model(torch.ones(3)), model(torch.ones(3))
        first.sum().backward()
    assert rec.coverage["(root):grad_output"][1:3] == ("captured", 1)
    assert rec.coverage["(root):grad_output"].reason.startswith("1 of 2 calls missing: no gradient reached its output")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_calls_are_captured_once(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model = Net(block, lambda net, h: checkpoint(net.second, h, use_reentrant=reentrant))
    with hookline.record(model, ports=PORTS, strict=False) as rec:
        model(torch.ones(2, 3)).sum().backward()
    assert {found.calls for found in rec.coverage.captured} == {1}
    assert [found.site for found in rec.coverage.bypassed] == ["(root):grad_input", "first:grad_input"]


# ---------------------------------------------------------------- reading it


def test_several_calls_and_steps_are_counted() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(3, 3), relu, nn.Linear(3, 3), relu)
    with hookline.record(model, keep="last") as rec:
        for _ in range(3):
            model(torch.ones(3))
    assert rec.coverage["1:output"].calls == 6 and rec.coverage["0:output"].calls == 3
    assert rec.coverage.complete and len(rec.coverage.captured) == 4


def test_it_is_told_while_it_is_recorded_saved_and_selected(tmp_path: Path) -> None:
    model = Net(linear(), lambda net, h: h)
    with hookline.record(model) as rec:
        assert {found.reason for found in rec.coverage.values()} == {"the model was not called"}
        model(torch.ones(3))
        live = dict(rec.coverage)
    assert live == dict(rec.coverage)
    rec.save(tmp_path / "run.hookline")
    loaded = hookline.load(tmp_path / "run.hookline")
    assert dict(loaded.coverage) == live
    assert list(loaded.select("first").coverage) == ["first:output"] == list(rec.select("first").coverage)


def test_what_a_file_says_that_is_no_fate_is_left_out() -> None:
    rows: list[Any] = [
        ["a:output", "captured", 1, ""],
        ["b:output", "lost", 1, ""],
        ["c:output"],
        None,
        ["d", "captured", "1", ""],
    ]
    assert list(Coverage.from_json(json.loads(json.dumps(rows)))) == ["a:output"]
    assert len(Coverage.from_json({"a": 1})) == 0


def test_the_text() -> None:
    model = Net(nn.ModuleList([linear()]), lambda net, h: h)
    with hookline.record(model, ports=("input", "output")) as rec:
        model(torch.ones(3))
    assert str(rec.coverage).splitlines() == [
        "coverage of 8 sites: 4 captured (4 calls), 2 not reached, 2 bypassed",
        "  not reached  second.0:input,output  (root) ran 1 time without calling it",
        "  bypassed     second:input,output  a ModuleList holds others and is never called",
    ]
    assert repr(rec.coverage) == "<Coverage of 8 sites: 4 captured, 2 not reached, 2 bypassed>"


# ---------------------------------------------------------------- strict


def test_strict_raises_when_the_block_ends_and_names_the_sites() -> None:
    model = Net(linear(), lambda net, h: h)
    message = r"^1 of 3 sites were not captured: second:output: not reached: \(root\) ran 1 time without calling it\. "
    with pytest.raises(CoverageError, match=message) as caught, hookline.record(model, strict=True):
        model(torch.ones(3))
    assert caught.value.coverage["second:output"].status == "not reached"


def test_a_container_among_others_does_not_count_for_strict() -> None:
    model = Net(nn.ModuleList([linear()]), lambda net, h: net.second[0](h))
    with hookline.record(model, strict=True) as rec:
        model(torch.ones(3))
    assert [found.site for found in rec.coverage.bypassed] == ["second:output"]


def test_strict_is_silent_where_all_is_captured_and_where_the_block_raises() -> None:
    model = Net(linear(), lambda net, h: net.second(h))
    with hookline.record(model, strict=True) as rec:
        model(torch.ones(3))
    assert len(rec) == 3
    with pytest.raises(ZeroDivisionError), hookline.record(model, strict=True):
        raise ZeroDivisionError


@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
@pytest.mark.parametrize("sites", ["**", ["first", "second"]])
def test_a_recording_that_ends_inside_a_forward_gives_true_reasons(port: str, sites: Any) -> None:
    def closing(net: Net, x: Tensor) -> Tensor:
        if net.training:
            recorder.__exit__(None, None, None)
        return net.second(x)

    net = Net(nn.Linear(3, 3), closing)
    recorder = hookline.record(net, sites, port)
    rec = recorder.__enter__()
    net(torch.ones(1, 3, requires_grad=True)).sum().backward()
    assert rec.coverage[f"first:{port}"].reason == "no backward pass ran while it was recorded"
    second = rec.coverage[f"second:{port}"]
    assert second.status == "not reached"
    assert second.reason == "(root) above it had not returned when the recording ended"
    if sites == "**":
        root = rec.coverage[f"(root):{port}"]
        assert (root.status, root.reason) == ("bypassed", "it had not returned when the recording ended")


def test_of_several_calls_only_the_one_that_had_not_returned_is_missing() -> None:
    def closing(net: Net, x: Tensor) -> Tensor:
        if net.training:
            recorder.__exit__(None, None, None)
        return net.second(x)

    net = Net(nn.Linear(3, 3), closing)
    recorder = hookline.record(net, "**", ("output", "grad_output"))
    rec = recorder.__enter__()
    net.eval()(torch.ones(1, 3)).sum().backward()
    net.train()(torch.ones(1, 3))
    fate = rec.coverage["(root):grad_output"]
    assert (fate.calls, fate.reason) == (1, "1 of 2 calls missing: it had not returned when the recording ended")
    assert rec.coverage["second:grad_output"].reason == ""
