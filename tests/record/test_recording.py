"""Reading a recording: one set of tests for a live one and for the same one saved and loaded."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline
from hookline.errors import SiteError
from hookline.record import Event
from hookline.sites import PORTS
from hookline.store import ModuleInfo
from hookline.values import Arguments, Fields, Opaque


@dataclasses.dataclass
class State:
    hidden: Tensor
    note: Any


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Any:
        return State(x * self.weight, [x, {"scale": scale, "tool": object()}])


class Model(nn.Module):
    """``cell`` runs three times in a step, ``never`` not at all; ``alias`` is ``cell``; the last call has a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        self.cell = Cell()
        self.layers = nn.ModuleDict({"alias": self.cell, "out": nn.Bilinear(2, 2, 1)})
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for scale in (None, None, torch.ones(1)):
            state = self.cell(h) if scale is None else self.cell(h, scale=scale)
            h = state.hidden
        return self.layers["out"](h, x)


class Run:
    """A recording, and what must stand in it."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model, self.x = Model(), torch.randn(2, 4, 2, requires_grad=True)
        with hookline.record(self.model, ports=("input", "output", "grad_output")) as self.rec:
            for step in range(2):
                self.model(self.x[step]).sum().backward()
        self.h = [F.linear(x, self.model.embed.weight, self.model.embed.bias).detach() for x in self.x]


@pytest.fixture(scope="module")
def run() -> Run:
    return Run()


@pytest.fixture(params=["live", "saved"])
def rec(request: pytest.FixtureRequest, run: Run, tmp_path: Path) -> hookline.Recording:
    if request.param == "live":
        return run.rec
    run.rec.save(tmp_path / "run.hookline")
    return hookline.load(tmp_path / "run.hookline")


# ---------------------------------------------------------------- what there is


def test_modules_in_the_order_of_the_model(rec: hookline.Recording) -> None:
    assert rec.paths == list(rec.modules) == ["", "embed", "cell", "layers", "layers.out", "never"]
    assert rec.modules["cell"] == ModuleInfo("Cell", 2, ("layers.alias",))
    assert rec.modules[""] == ModuleInfo("Model", 6 + 2 + 5 + 6, ())
    assert rec.modules["layers"].parameters == 2 + 5


def test_numbers_of_the_recording(rec: hookline.Recording, run: Run) -> None:
    per_step = 3 * (1 + 1 + 3 + 1)
    assert len(rec) == len(rec.events) == len(list(rec)) == 2 * per_step
    assert rec.steps == [0, 1] and rec.ports == ["input", "output", "grad_output"]
    floats = [16 + 8, 16, 16, 8, 8, 8]
    assert rec.nbytes == sum(event.nbytes for event in rec) > sum(floats)
    assert rec["embed"].events[0].nbytes == 4 * 8


def test_info(rec: hookline.Recording) -> None:
    assert rec.info["model"] == "Model" and rec.info["torch"] == str(torch.__version__)
    assert rec.info["ports"] == ["input", "output", "grad_output"]
    assert rec.info["sites"][:4] == ["(root):input", "(root):output", "(root):grad_output", "embed:input"]
    assert set(rec.info) == {"hookline", "torch", "model", "sites", "ports", "created", "coverage"}


def test_events_in_the_order_in_which_they_came(rec: hookline.Recording) -> None:
    events = list(rec)
    assert [event.order for event in events] == list(range(len(events)))
    assert [(event.path, event.port, event.call) for event in events[:10]] == [
        ("", "input", 0), ("embed", "input", 0), ("embed", "output", 0), ("cell", "input", 0), ("cell", "output", 0),
        ("cell", "input", 1), ("cell", "output", 1), ("cell", "input", 2), ("cell", "output", 2),
        ("layers.out", "input", 0),
    ]  # fmt: skip
    backward = [(event.path, event.call) for event in events if event.step == 1 and event.port == "grad_output"]
    assert backward == [("", 0), ("layers.out", 0), ("cell", 2), ("cell", 1), ("cell", 0), ("embed", 0)]
    assert all(isinstance(event.backward, int) and event.backward == 0 for event in events)


@pytest.mark.parametrize("path", ["", "(root)", "embed", "cell", "layers.alias", "layers", "never"])
def test_what_is_in_a_recording(rec: hookline.Recording, path: str) -> None:
    assert path in rec


@pytest.mark.parametrize("path", ["x", "embed.weight", "Embed", 3, None])
def test_what_is_not_in_a_recording(rec: hookline.Recording, path: Any) -> None:
    assert path not in rec


# ---------------------------------------------------------------- one module


def test_a_module_that_ran_once_in_one_step(rec: hookline.Recording, run: Run) -> None:
    first = rec.select(steps=0)
    assert torch.equal(first["embed"].output, run.h[0]) and torch.equal(first["embed"].input, run.x[0])
    assert first["embed"].args[0].equal(run.x[0]) and first["embed"].kwargs == {}
    assert first["embed"].type_name == "Linear" and len(first["embed"]) == 1
    assert first["(root)"].grad_output.tolist() == [[1.0]] * 4


def test_calls_in_the_order_of_steps_and_calls(rec: hookline.Recording, run: Run) -> None:
    calls = rec["cell"].calls
    assert [(call.step, call.index) for call in calls] == [(s, c) for s in range(2) for c in range(3)]
    for call in calls:
        expected = run.h[call.step] * run.model.cell.weight.detach() ** (call.index + 1)
        assert torch.allclose(call.output.hidden, expected)
    assert rec["layers.alias"].path == "cell" and len(rec["layers.alias"].calls) == 6


def test_gradients_belong_to_their_calls(rec: hookline.Recording, run: Run) -> None:
    weight, out = run.model.cell.weight.detach(), run.model.layers["out"]
    for call in rec["cell"].calls:
        last = torch.einsum("bj,kij->bi", run.x[call.step], out.weight).detach()
        assert torch.allclose(call.grad_output.hidden, last * weight ** (2 - call.index))
        assert call.grad_output.note == [None, {"scale": None, "tool": None}]


def test_nested_values_keep_their_form(rec: hookline.Recording) -> None:
    output = rec["cell"].calls[2].output
    assert type(output) is Fields and output.type_name == "State" and list(output) == ["hidden", "note"]
    assert type(output.note) is list and output.note[1]["tool"] == Opaque("object")
    assert output.note[1]["scale"].tolist() == [1.0] and rec["cell"].calls[0].output.note[1]["scale"] is None
    assert [path for path, _ in rec["cell"].calls[2].events[1].leaves()] == [
        "output.hidden", "output.note[0]", "output.note[1]['scale']",
    ]  # fmt: skip


def test_arguments(rec: hookline.Recording, run: Run) -> None:
    one, *_, with_keyword = rec["cell"].calls[:3]
    assert torch.equal(one.input, run.h[0])
    assert isinstance(with_keyword.input, Arguments) and with_keyword.input.kwargs["scale"].tolist() == [1.0]
    assert list(with_keyword.kwargs) == ["scale"] and len(with_keyword.args) == 1
    several = rec["layers.out"].calls[0]
    assert type(several.input) is tuple and torch.equal(several.input[1], run.x[0]) and len(several.args) == 2
    assert [path for path, _ in several.events[0].leaves()] == ["args[0]", "args[1]"]
    assert [path for path, _ in with_keyword.events[0].leaves()] == ["args[0]", "kwargs['scale']"]


def test_summaries(rec: hookline.Recording, run: Run) -> None:
    summary = rec["embed"].events[1].summaries()["output"]
    values = run.h[0].double()
    assert summary.numel == 8 and summary.nan == summary.inf == 0
    assert summary.mean == pytest.approx(values.mean().item()) and summary.max == values.max().item()
    assert summary.std == pytest.approx(values.std(correction=0).item())
    assert list(rec["layers.out"].events[0].summaries()) == ["args[0]", "args[1]"]


def test_reprs(rec: hookline.Recording) -> None:
    assert repr(rec) == "<Recording of Model: 36 events at 6 modules, 2 steps>"
    assert repr(rec["cell"]) == "<cell Cell: 6 calls, 18 values>"
    assert repr(rec["(root)"].calls[1]) == "<call 0 of step 1 of (root): input, output, grad_output>"


def test_print_is_a_table(rec: hookline.Recording) -> None:
    text = str(rec)
    assert "embed" in text and "Bilinear" in text and "4x2" in text and "grad_output" in text


def test_to_dict(rec: hookline.Recording, run: Run) -> None:
    found = rec.to_dict()
    assert list(found) == ["", "embed", "cell", "layers.out"] and list(found["cell"]) == [
        "input",
        "output",
        "grad_output",
    ]
    assert len(found["cell"]["output"]) == 6 and torch.equal(found["embed"]["output"][1], run.h[1])


# ---------------------------------------------------------------- select


def test_select_modules_and_steps(rec: hookline.Recording) -> None:
    part = rec.select(["embed", "layers.**"])
    assert part.paths == ["embed", "layers", "layers.out"] and len(part) == 12 and part.info == rec.info
    assert len(rec.select("cell", steps=1)) == 9 and len(rec.select("cell", steps=[0, 1])) == 18
    assert rec.select(steps=range(1, 9)).steps == [1]
    assert len(rec.select()) == len(rec) and rec.select() is not rec
    assert part["embed"].calls[0].output.equal(rec["embed"].calls[0].output)


def test_select_ports(rec: hookline.Recording) -> None:
    part = rec.select("cell:grad_output")
    assert part.paths == ["cell"] and part.ports == ["grad_output"] and len(part) == 6
    assert rec.select(["**:input", "!cell"]).ports == ["input"]


def test_select_says_what_it_does_not_find(rec: hookline.Recording) -> None:
    with pytest.raises(SiteError, match=r'no module "embedd" in the 6 paths; nearest: "embed"'):
        rec.select("embedd")
    with pytest.raises(SiteError, match=r'the pattern "conv\*" matches none of the 6 paths'):
        rec.select("conv*")
    with pytest.raises(SiteError, match=r"^steps: got 7, 9, of which there are no values; there are 0, 1\."):
        rec.select(steps=[7, 9])
    with pytest.raises(SiteError, match=r"^writers: got 3, of which there are no values; there are 0\."):
        rec.select(writers=3)


# ---------------------------------------------------------------- what the errors say


def test_an_unknown_path(rec: hookline.Recording) -> None:
    message = r'^"layers.outt" was not recorded; nearest of the 6 recorded modules: "layers.out"'
    with pytest.raises(SiteError, match=message):
        _ = rec["layers.outt"]
    with pytest.raises(LookupError, match="none is close"):
        _ = rec["qqqqqqqqq"]
    with pytest.raises(SiteError, match=r"^a recording is read by module path, got int: 0\.$"):
        _ = rec[0]  # type: ignore[index]
    with pytest.raises(SiteError, match=r"got list: \['embed'\]"):
        _ = rec[["embed"]]  # type: ignore[index]


def test_several_calls(rec: hookline.Recording) -> None:
    message = r"^cell has 6 calls with a recorded output; say which: \.calls\[0\]\.output to \.calls\[5\]\.output\.$"
    with pytest.raises(SiteError, match=message):
        _ = rec["cell"].output
    with pytest.raises(SiteError, match=r"^\(root\) has 2 calls with a recorded grad_output"):
        _ = rec[""].grad_output


def test_a_port_that_was_not_asked_for(rec: hookline.Recording) -> None:
    message = (
        r"^embed has no grad_input: it was not asked for\. Recorded there: input, output, grad_output\. "
        r'Ask for it with record\(\.\.\., ports=\("grad_input", \.\.\.\)\)\.$'
    )
    with pytest.raises(SiteError, match=message):
        _ = rec["embed"].grad_input
    with pytest.raises(SiteError, match=r"^call 1 of step 0 of cell has no grad_input: it was not asked for"):
        _ = rec["cell"].calls[1].grad_input


def test_a_module_that_did_not_run(rec: hookline.Recording) -> None:
    message = (
        r"^never has no output: it did not run while it was recorded\. "
        r"A container such as nn\.ModuleList never runs itself\.$"
    )
    with pytest.raises(SiteError, match=message):
        _ = rec["never"].output
    assert rec["never"].calls == () and rec["never"].events == [] and len(rec["never"]) == 0


def test_a_module_that_no_gradient_reached(rec: hookline.Recording) -> None:
    message = r"^never has no grad_output: no gradient reached it\. Call backward\(\) inside the with-block, on a loss"
    with pytest.raises(SiteError, match=message):
        _ = rec["never"].grad_output


# ---------------------------------------------------------------- large ones


@pytest.mark.parametrize("paths", [1, 1000])
def test_a_hundred_thousand_events_are_found_at_once(paths: int) -> None:
    """Two thousand look-ups search once, not each time; processor time, since other programs run as well."""
    count, value = 100_000, torch.zeros(1)
    events = [Event(n, 0, f"m{n % paths}", "output", n // paths, 0, value) for n in range(count)]
    modules = {f"m{n}": ModuleInfo("Linear", 0) for n in range(paths)}
    rec = hookline.Recording(modules=modules, info={}, events=events)
    start = time.process_time()
    for _ in range(10):  # what a search through all events costs, and each look-up would cost 200 of
        assert sum(event.path == "m0" for event in events) == count // paths
    searched = time.process_time() - start
    gc.disable()  # it looks at all objects of the test session, again and again
    try:
        start = time.process_time()
        for n in range(2000):
            path = f"m{n % paths}"
            assert path in rec and rec[path].calls[n // paths].output is value
        assert time.process_time() - start < 10 * searched
    finally:
        gc.enable()


def test_a_recording_whose_info_says_nothing() -> None:
    """Such as one that another program has written."""
    for sites in (None, "text", [1, None], {}):
        event = Event(0, 0, "elsewhere", "output", 0, 0, torch.ones(1))
        rec = hookline.Recording(modules={"a": ModuleInfo("A", 0)}, info={"sites": sites}, events=[event])
        assert len(rec) == 1 and rec.to_dict()["elsewhere"]["output"][0].item() == 1.0
        with pytest.raises(SiteError, match=r"^a has no output: it was not asked for\. Recorded there: nothing"):
            _ = rec["a"].output


def test_a_module_whose_name_is_that_of_the_root() -> None:
    model = nn.Module()
    model.add_module("(root)", nn.Linear(1, 1))
    with hookline.record(model, ports=PORTS) as rec:
        model.get_submodule("(root)")(torch.ones(1))
    assert rec["(root)"].type_name == "Linear" and rec[""].type_name == "Module"


def test_a_record_grows_with_the_recording() -> None:
    model = nn.Linear(2, 2)
    with hookline.record(model) as rec:
        record = rec["(root)"]
        for count in range(3):
            assert len(record.calls) == len(record.events) == len(rec) == count
            model(torch.ones(2))
    assert len(record.calls) == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rec: pickle.loads(pickle.dumps(rec))])
def test_a_recording_can_be_copied(run: Run, copied: Any) -> None:
    twin = copied(run.rec)
    assert len(twin) == len(run.rec) and twin.modules == run.rec.modules
    run_output, twin_output = run.rec["embed"].calls[1].output, twin["embed"].calls[1].output
    assert torch.equal(run_output, twin_output) and run_output is not twin_output
