"""Tools that rewrite a model: quantization, TorchScript, torch.fx and torch.export take hooks along or refuse them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import fuse_modules, quantize_dynamic

import hookline
from hookline.errors import ArgumentError, CoverageError, HookError, HooklineError

from .catalogue import BY_DEFINITION, REFUSED, RIGHT, fault

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, .* are deprecated:UserWarning"),
]

IN_PLACE = pytest.mark.parametrize("inplace", [False, True], ids=["copy", "in place"])
REGISTER: dict[str, Callable[..., hookline.Handle]] = {
    "forward": hookline.register_forward_hook,
    "forward pre": hookline.register_forward_pre_hook,
    "backward": hookline.register_backward_hook,
    "backward pre": hookline.register_backward_pre_hook,
}
EVERY_KIND = pytest.mark.parametrize("kind", REGISTER)


@pytest.fixture(autouse=True)
def no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export shows one, and its monitor is a thread that stays."""
    monkeypatch.setattr(torch.hub.tqdm, "monitor_interval", 0, raising=False)


def look(*args: Any) -> None:
    """A hook that changes nothing."""


# ---------------------------------------------------------------- 82, 83: quantization


def conv_net() -> nn.Sequential:
    """Two places to fuse: 0 to 2, and 3.0 with 3.1."""
    inner = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), inner, nn.Flatten()).double()
    nn.init.normal_(model[1].running_mean)
    nn.init.uniform_(model[1].running_var, 0.5, 2.0)
    return model.eval()


PARTS = [["0", "1", "2"], ["3.0", "3.1"]]


@fault(
    82,
    RIGHT,
    "`fuse_modules` works on a recorded model; the coverage names each place where another module stands now",
)
@IN_PLACE
@pytest.mark.parametrize("ports", [("output",), ("input", "output", "grad_input", "grad_output")], ids=["out", "all"])
def test_fusing_a_recorded_model_makes_what_it_makes_of_the_bare_one(ports: tuple[str, ...], inplace: bool) -> None:
    model, x = conv_net(), torch.randn(3, 1, 4, 4, dtype=torch.float64)
    plain = fuse_modules(copy.deepcopy(model), PARTS)
    expected = plain(x)
    with hookline.record(model, ports=ports):
        fused = fuse_modules(model, PARTS, inplace=inplace)
        assert torch.equal(fused(x), expected)
    assert (fused is model) == inplace
    assert [type(module) for module in fused.modules()] == [type(module) for module in plain.modules()]
    assert torch.equal(fused(x), expected)


@fault(82, RIGHT, "")
def test_the_coverage_names_the_modules_that_were_replaced() -> None:
    model = conv_net()
    with hookline.record(model) as rec:
        fuse_modules(model, PARTS, inplace=True)(torch.randn(3, 1, 4, 4, dtype=torch.float64))
    for path in ("0", "1"):
        fate = rec.coverage[f"{path}:output"]
        assert fate.status == "bypassed"
        assert type(model.get_submodule(path)).__name__ in fate.reason and "in its place" in fate.reason
    # These go on inside the fused module; what stands at their path now is another one.
    for path in ("2", "3.0", "3.1"):
        fate = rec.coverage[f"{path}:output"]
        assert type(model.get_submodule(path)).__name__ in fate.reason and "in its place" in fate.reason
    for path in ("(root)", "3", "4"):
        assert rec.coverage[f"{path}:output"] == (f"{path}:output", "captured", 1, "")


@fault(82, RIGHT, "")
def test_strict_names_the_replaced_modules() -> None:
    model = conv_net()
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    place = "0:output: bypassed: a ConvReLU2d was put in its place"
    with pytest.raises(CoverageError, match=place) as raised, hookline.record(model, strict=True):
        fuse_modules(model, PARTS, inplace=True)(x)
    assert "1:output: bypassed" in str(raised.value)


@fault(82, RIGHT, "")
def test_a_fused_copy_has_no_hooks_and_the_original_keeps_its_own() -> None:
    model, x = conv_net(), torch.randn(3, 1, 4, 4, dtype=torch.float64)
    seen: list[str] = []
    for path in ("0", "1", "2", "3.1"):
        hookline.register_forward_hook(model.get_submodule(path), lambda *_, path=path: seen.append(path))
    fuse_modules(model, PARTS)(x)
    assert seen == []
    model(x)
    assert seen == ["0", "1", "2", "3.1"]


@fault(82, RIGHT, "")
def test_what_is_recorded_after_fusing_is_what_the_fused_model_computes() -> None:
    model, x = conv_net(), torch.randn(3, 1, 4, 4, dtype=torch.float64)
    expected = model[2](model[1](model[0](x)))
    fused = fuse_modules(model, PARTS)
    with hookline.record(fused, ["0", "1"], strict=True) as rec:
        fused(x)
    assert torch.allclose(rec["0"].output, expected, rtol=1e-9)
    assert torch.equal(rec["1"].output, rec["0"].output), "an identity now"


def two_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 2))).eval()


@fault(
    83,
    RIGHT,
    "`quantize_dynamic` works on a recorded model, in place and not; the copy is not hooked, in place the coverage "
    "names the modules that were replaced",
)
@IN_PLACE
@pytest.mark.parametrize(
    "types", [{nn.Linear}, {"0"}, {nn.Linear: torch.ao.quantization.default_dynamic_qconfig}], ids=str
)
def test_quantizing_a_recorded_model_makes_what_it_makes_of_the_bare_one(types: Any, inplace: bool) -> None:
    model, x = two_linears(), torch.randn(5, 3)
    plain = quantize_dynamic(copy.deepcopy(model), types)
    with hookline.record(model) as rec:
        quantized = quantize_dynamic(model, types, inplace=inplace)
        assert torch.equal(quantized(x), plain(x))
    assert [type(module) for module in quantized.modules()] == [type(module) for module in plain.modules()]
    if not inplace:
        assert len(rec) == 0 and len(rec.coverage.not_reached) == 5, "a copy is not hooked"
        return
    replaced = [path for path in ("0", "2.0") if "quantized" in type(plain.get_submodule(path)).__module__]
    assert [fate.site for fate in rec.coverage.bypassed] == [f"{path}:output" for path in replaced] != []
    assert all("a Linear was put in its place" in fate.reason for fate in rec.coverage.bypassed)
    assert torch.equal(rec[""].output, plain(x))


@fault(83, RIGHT, "")
def test_a_quantized_copy_of_a_hooked_model_has_no_hooks() -> None:
    model, x = two_linears(), torch.randn(5, 3)
    seen: list[str] = []
    handle = hookline.register_forward_hook(model[0], lambda *_: seen.append("hook"))
    quantized = quantize_dynamic(model, {nn.Linear})
    quantized(x)
    assert seen == []
    model(x)
    assert seen == ["hook"]
    handle.remove()
    assert type(model[0]) is nn.Linear


@fault(83, RIGHT, "")
def test_a_quantized_model_is_recorded_and_edited() -> None:
    model, x = quantize_dynamic(two_linears(), {nn.Linear}), torch.randn(5, 3)
    values = []
    value = x
    for layer in model:
        value = layer(value)
        values.append(value)
    with hookline.record(model, ["*", "2.0"], strict=True) as rec:
        model(x)
    assert all(torch.equal(rec[str(place)].output, value) for place, value in enumerate(values))
    with hookline.edit(model, {"0:output": lambda value: value * 0}):
        assert torch.equal(model(x), model[2](torch.zeros(5, 4)))


@fault(83, RIGHT, "")
def test_strict_names_what_quantization_replaced() -> None:
    model = two_linears()
    with pytest.raises(CoverageError, match="0:output: bypassed") as raised, hookline.record(model, strict=True):
        quantize_dynamic(model, {nn.Linear}, inplace=True)(torch.randn(5, 3))
    assert [fate.site for fate in raised.value.coverage.bypassed] == ["0:output", "2.0:output"]


# ---------------------------------------------------------------- 85, 86, 87, 88: TorchScript and torch.fx


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Net(nn.Module):
    """A root, a module that tracers inline, and one that torch.fx leaves as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inlined = Doubles()
        self.linear = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.inlined(x)) + 1


X = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)


def inside(model: Net, x: Tensor = X) -> Tensor:
    """What the linear module of the bare model gives."""
    return F.linear(x * 2, model.linear.weight.detach().clone(), model.linear.bias.detach().clone())


def by_hand(model: Net, x: Tensor = X) -> Tensor:
    return inside(model, x) + 1


WHERE = ["", "inlined", "linear"]


@fault(85, REFUSED, "`HookError` names the hook; remove it first, or hook the module that calls the script")
@EVERY_KIND
@pytest.mark.parametrize("path", WHERE)
def test_scripting_a_hooked_model_is_refused(path: str, kind: str) -> None:
    model = Net()
    handle = REGISTER[kind](model.get_submodule(path), look)
    with pytest.raises(HookError, match=r"torch\.jit\.script cannot take .* along: look at .*[Rr]emove them first"):
        torch.jit.script(model)
    handle.remove()
    assert torch.equal(torch.jit.script(model)(X), by_hand(model))


@fault(85, REFUSED, "")
@pytest.mark.parametrize("ports", ["output", "grad_input"])
def test_scripting_a_recorded_model_gives_the_script_of_the_plain_one(ports: str) -> None:
    model = Net()
    with hookline.record(model, ports=ports) as rec:
        scripted = torch.jit.script(model)
        assert torch.equal(scripted(X), by_hand(model))
        assert len(rec) == 0
    assert torch.equal(scripted(X), by_hand(model))


@fault(85, REFUSED, "")
def test_scripting_an_edited_model_is_refused() -> None:
    model = Net()
    zeroed = hookline.edit(model, {"inlined:output": lambda value: value * 0})
    with zeroed, pytest.raises(HookError, match=r"torch\.jit\.script cannot take"):
        torch.jit.script(model)
    assert torch.equal(torch.jit.script(model)(X), by_hand(model))


SCRIPTED: dict[str, Callable[[nn.Module], Any]] = {
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, X),
    "freeze": lambda module: torch.jit.freeze(torch.jit.script(module.eval())),
}


@fault(86, REFUSED, "`ArgumentError` at once: it runs outside Python; hook it before, or the module that calls it")
@EVERY_KIND
@pytest.mark.parametrize("made", SCRIPTED)
def test_a_scripted_module_cannot_be_hooked(made: str, kind: str) -> None:
    scripted = SCRIPTED[made](Net())
    with pytest.raises(ArgumentError, match=r"TorchScript.*Hook the Python model before.*or the module that calls"):
        REGISTER[kind](scripted, look)
    assert torch.equal(scripted(X), scripted(X))


@fault(86, REFUSED, "")
@pytest.mark.parametrize("verb", ["record", "edit"])
def test_a_scripted_part_is_refused_by_name_and_the_rest_can_be_observed(verb: str) -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(3, 3).double()), nn.Tanh())
    expected = model(X).detach()

    def start(sites: Any) -> Any:
        return hookline.record(model, sites) if verb == "record" else hookline.edit(model, {sites: look})

    with pytest.raises(HooklineError, match=r'0.*TorchScript.*"!0"'), start("0"):
        pass
    with start("1"):
        assert torch.equal(model(X), expected)
    with hookline.record(model, ["**", "!0"], strict=True) as rec:
        model(X)
    assert torch.equal(rec["1"].output, expected)
    with hookline.record(model) as rec:
        model(X)
    assert [fate.site for fate in rec.coverage.bypassed] == ["0:output"]
    assert "TorchScript" in rec.coverage["0:output"].reason


@fault(86, REFUSED, "")
def test_what_goes_into_and_comes_out_of_a_scripted_part_is_seen_at_its_caller() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scripted = torch.jit.script(Doubles())

        def forward(self, x: Tensor) -> Any:
            return self.scripted(x)

    model = Caller()
    with hookline.record(model, "(root)", ("input", "output")) as rec:
        model(X)
    assert torch.equal(rec[""].input, X) and torch.equal(rec[""].output, 2 * X)


@fault(87, REFUSED, "`HookError` before anything is frozen; remove the hooks first, or hook the module that calls it")
@EVERY_KIND
@pytest.mark.parametrize("path", WHERE)
def test_tracing_a_hooked_model_is_refused(path: str, kind: str) -> None:
    model = Net()
    handle = REGISTER[kind](model.get_submodule(path), look)
    with pytest.raises(HookError, match=r"torch\.jit\.trace cannot take .* along: look at .*[Rr]emove them first"):
        torch.jit.trace(model, X)
    assert torch.equal(model(X), by_hand(model)), "hooks go on in Python"
    handle.remove()
    traced = torch.jit.trace(model, X)
    assert torch.equal(traced(3 * X), by_hand(model, 3 * X))


@fault(87, REFUSED, "")
def test_a_change_that_depends_on_the_value_is_not_frozen() -> None:
    model = Net()
    hookline.register_forward_hook(model.inlined, lambda module, args, output: output * 0 if output.sum() > 0 else None)
    with pytest.raises(HookError, match=r"torch\.jit\.trace"):
        torch.jit.trace(model, X)


@fault(87, REFUSED, "")
@pytest.mark.parametrize("tracer", ["torch.jit.trace", "torch.fx"])
def test_the_trace_of_a_recorded_model_is_that_of_the_plain_one(tracer: str) -> None:
    model = Net()
    with hookline.record(model) as rec:
        # By default torch.jit.trace runs the model in Python as well, to compare.
        by_script = tracer == "torch.jit.trace"
        traced = torch.jit.trace(model, X, check_trace=False) if by_script else torch.fx.symbolic_trace(model)
    assert torch.equal(traced(3 * X), by_hand(model, 3 * X))
    assert [event.path for event in rec] == []
    fate = rec.coverage["inlined:output"]
    assert fate.status == "bypassed" and tracer in fate.reason


@fault(88, REFUSED, "`HookError` for a module that would be inlined; one that is left as a call keeps its hooks")
@EVERY_KIND
@pytest.mark.parametrize("path", ["", "inlined"])
def test_a_symbolic_trace_of_a_hooked_model_is_refused(path: str, kind: str) -> None:
    model = Net()
    handle = REGISTER[kind](model.get_submodule(path), look)
    with pytest.raises(HookError, match=r"torch\.fx cannot take .* along: look at .*[Rr]emove them first"):
        torch.fx.symbolic_trace(model)
    handle.remove()
    assert torch.equal(torch.fx.symbolic_trace(model)(3 * X), by_hand(model, 3 * X))


@fault(88, REFUSED, "")
def test_a_leaf_of_the_trace_keeps_its_hooks() -> None:
    model = Net()
    seen: list[Tensor] = []
    handle = hookline.register_forward_hook(
        model.linear, lambda module, args, output: seen.append(output) or output * 10
    )
    traced = torch.fx.symbolic_trace(model)
    plain = inside(model)
    assert seen == [], "a trace is no call"
    assert torch.equal(traced(X), plain * 10 + 1) and torch.equal(seen[0], plain)
    handle.remove()
    assert torch.equal(traced(X), plain + 1)


@fault(88, REFUSED, "")
def test_a_traced_model_is_hooked_and_recorded() -> None:
    model = Net()
    traced = torch.fx.symbolic_trace(model)
    with hookline.edit(traced, {"(root):output": lambda value: value * 10}), hookline.record(traced) as rec:
        assert torch.equal(traced(X), by_hand(model) * 10)
    assert torch.equal(rec["linear"].output, inside(model))


# ---------------------------------------------------------------- 89, 90: torch.export


STRICT = pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])


class Edited(nn.Module):
    """``Net`` with the changes written into it: those of ``edits`` at one module."""

    def __init__(self, model: Net, path: str, port: str) -> None:
        super().__init__()
        self.model, self.at = copy.deepcopy(model), (path, port)

    def change(self, path: str, port: str, value: Tensor) -> Tensor:
        return 3 * value + 1 if self.at in ((path, port), (path, "both")) else value

    def forward(self, x: Tensor) -> Tensor:
        x = self.change("", "input", x)
        x = self.change("inlined", "output", self.change("inlined", "input", x) * 2)
        linear = self.model.linear
        x = self.change("linear", "output", F.linear(self.change("linear", "input", x), linear.weight, linear.bias))
        return self.change("", "output", x + 1)


def hook_with(by: str, model: nn.Module, path: str, port: str) -> list[Any]:
    """Hook one module with a change to 3 * value + 1."""
    module = model.get_submodule(path)
    kwargs = {"with_kwargs": True} if by == "with_kwargs" else {}
    made: list[Any] = []
    if port in ("input", "both"):

        def before(module: nn.Module, args: Any, *kwargs: Any) -> Any:
            new = (3 * args[0] + 1,)
            return (new, *kwargs) if kwargs else new

        made.append(hookline.register_forward_pre_hook(module, before, **kwargs))
    if port in ("output", "both"):
        made.append(hookline.register_forward_hook(module, lambda *args: 3 * args[-1] + 1, **kwargs))
    return made


def exported(model: nn.Module, strict: bool) -> Any:
    return torch.export.export(model, (X,), strict=strict).module()


@fault(89, RIGHT, "forward hooks and `edit` are taken into the exported program, at the root too")
@STRICT
@pytest.mark.parametrize("port", ["input", "output", "both"])
@pytest.mark.parametrize("path", WHERE)
def test_the_exported_program_contains_the_changes(path: str, port: str, strict: bool) -> None:
    model = Net()
    expected = Edited(model, path, port)
    handles = hook_with("plain", model, path, port)
    program = exported(model, strict)
    assert torch.equal(program(X), expected(X)) and not torch.equal(program(X), by_hand(model))
    for handle in handles:
        handle.remove()
    assert torch.equal(program(3 * X), expected(3 * X)), "also after the hooks are gone"
    assert torch.equal(exported(model, strict)(X), by_hand(model))


@fault(89, RIGHT, "")
@STRICT
@pytest.mark.parametrize("by", ["with_kwargs", "edit"])
@pytest.mark.parametrize("port", ["input", "output"])
def test_other_ways_to_change_are_in_the_program_as_well(port: str, by: str, strict: bool) -> None:
    model = Net()
    expected = Edited(model, "inlined", port)
    if by == "edit":
        with hookline.edit(model, {f"inlined:{port}": lambda value: 3 * value + 1}):
            program = exported(model, strict)
    else:
        hook_with(by, model, "inlined", port)
        program = exported(model, strict)
    assert torch.equal(program(X), expected(X))


@fault(89, RIGHT, "")
def test_several_hooks_are_in_the_program_in_their_order() -> None:
    model = Net()
    plain = inside(model)
    hookline.register_forward_hook(model.linear, lambda module, args, output: output + 5)
    hookline.register_forward_hook(model.linear, lambda module, args, output: output * 10)
    hookline.register_forward_hook(model.linear, lambda module, args, output: output - 7, prepend=True)
    assert torch.equal(exported(model, strict=False)(X), (plain - 7 + 5) * 10 + 1)


@fault(89, RIGHT, "")
@pytest.mark.parametrize("kind", ["backward", "backward pre"])
@pytest.mark.parametrize("path", WHERE)
def test_a_backward_hook_is_refused(path: str, kind: str) -> None:
    model = Net()
    handle = REGISTER[kind](model.get_submodule(path), look)
    with pytest.raises(HookError, match=r"torch\.export cannot take .* along: look at .*[Rr]emove them first"):
        exported(model, strict=False)
    with pytest.raises(Exception, match=r"torch\.export cannot take"):
        exported(model, strict=True)
    handle.remove()
    assert torch.equal(exported(model, strict=False)(X), by_hand(model))


@fault(
    90,
    BY_DEFINITION,
    "the exported program has no Python in it: a hook that observes runs at most while the program is made; `record` "
    "the model itself, which does not change what is exported",
)
@STRICT
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.parametrize("path", WHERE)
def test_a_hook_that_observes_is_not_in_the_program(path: str, strict: bool) -> None:
    model = Net()
    seen: list[int] = []
    hookline.register_forward_hook(model.get_submodule(path), lambda *_: seen.append(0))
    program = exported(model, strict)
    seen.clear()
    assert torch.equal(program(X), by_hand(model))
    assert seen == []
    model(X)
    assert seen == [0]


@fault(90, BY_DEFINITION, "")
@STRICT
@pytest.mark.parametrize("ports", ["output", "grad_input"])
def test_a_recorded_model_is_exported_as_the_plain_one(ports: str, strict: bool) -> None:
    model = Net()
    plain = torch.export.export(Net(), (X,), strict=strict)
    with hookline.record(model, ports=ports) as rec:
        program = torch.export.export(model, (X,), strict=strict)
    assert [node.target for node in program.graph.nodes] == [node.target for node in plain.graph.nodes]
    assert torch.equal(program.module()(X), by_hand(model))
    assert len(rec) == 0 and not rec.coverage.captured


@fault(90, BY_DEFINITION, "")
def test_the_coverage_says_that_the_model_was_exported() -> None:
    model = Net()
    with hookline.record(model) as rec:
        exported(model, strict=False)
    for fate in rec.coverage.values():
        assert fate.status == "bypassed" and "torch.export" in fate.reason


@fault(90, BY_DEFINITION, "")
@STRICT
def test_recording_the_model_gives_what_the_program_computes_on_the_way(strict: bool) -> None:
    model = Net()
    program = exported(model, strict)
    with hookline.record(model, strict=True) as rec:
        model(X)
    assert torch.equal(rec[""].output, program(X))
    assert torch.equal(rec["inlined"].output, 2 * X)
