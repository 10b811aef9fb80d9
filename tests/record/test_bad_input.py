"""Wrong input gives one clear error each, before anything is put on the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hookline
from hookline.errors import ArgumentError, HooklineError, OptionError, SiteError


@pytest.fixture
def model() -> Iterator[nn.Sequential]:
    """A model that must be as it was, whatever was asked of it."""
    made = nn.Sequential()
    made.add_module("conv", nn.Conv2d(1, 1, 1))
    made.add_module("norm", nn.BatchNorm2d(1))
    before = [(type(module), dict(vars(module))) for module in made.modules()]
    yield made
    for module, (kind, attributes) in zip(made.modules(), before, strict=True):
        assert type(module) is kind and vars(module) == attributes


WRONG: dict[str, tuple[dict[str, Any], type[HooklineError], str]] = {
    "unknown site": ({"sites": "cnv"}, SiteError, r'no module "cnv" in Sequential; nearest: "conv"'),
    "unknown site beside a good one": ({"sites": ["conv", "nrm"]}, SiteError, r'no module "nrm".*nearest: "norm"'),
    "pattern without a match": ({"sites": "block*.conv"}, SiteError, r'"block\*\.conv" matches none of the 3 modules'),
    "class without a match": ({"sites": nn.Linear}, SiteError, r"no Linear among the 3 modules of Sequential"),
    "nothing is left": ({"sites": ["conv", "!conv"]}, SiteError, r"nothing is left of 1 sites"),
    "empty list": ({"sites": []}, SiteError, r"an empty list names no module"),
    "bad expression": ({"sites": "re:("}, SiteError, r'the pattern "re:\(" cannot be read'),
    "number as a site": ({"sites": 3}, ArgumentError, r"a pattern is a string, .* got an object of type int"),
    "module as a site": ({"sites": nn.ReLU()}, ArgumentError, r"object of type ReLU; name it by its path or its class"),
    "wrong port": ({"ports": "outputs"}, OptionError, r'unknown port: got "outputs".*nearest: "output"'),
    "wrong port in a tuple": ({"ports": ("output", 3)}, OptionError, r"unknown port: got an object of type int"),
    "wrong port in a site": ({"sites": "conv:outptu"}, SiteError, r'"conv:outptu": unknown port.*nearest: "output"'),
    "no port": ({"ports": ()}, OptionError, r"ports: got none"),
    "number as ports": ({"ports": 1}, ArgumentError, r"ports: got an object of type int"),
    "keep": ({"keep": "first"}, OptionError, r"^keep is \"all\" or \"last\", got 'first'\.$"),
    "keep of a wrong kind": ({"keep": ["all"]}, OptionError, r"^keep is \"all\" or \"last\", got \['all'\]"),
    "budget text": ({"budget": "plenty"}, OptionError, r'^a size is .* "2GB" or "512MiB", got \'plenty\'\.$'),
    "budget of nothing": ({"budget": 0}, OptionError, r"^a size is a positive whole number of bytes, got 0\.$"),
    "budget as a float": ({"budget": 1e9}, OptionError, r"positive whole number of bytes, got 1000000000\.0"),
    "dtype as text": (
        {"dtype": "float16"},
        OptionError,
        r'^dtype: got "float16", wanted "fp8" or a torch\.dtype; nearest:',
    ),
    "dtype as a number": (
        {"dtype": 16},
        ArgumentError,
        r'^dtype is a torch\.dtype such as .*, or "fp8", got int: 16\.$',
    ),
    "dtype of whole numbers": ({"dtype": torch.int8}, OptionError, r"must be floating itself, got torch\.int8"),
    "unknown device": ({"device": "gpu"}, OptionError, r"^device 'gpu' cannot be used: "),
    "device of a wrong kind": ({"device": [1]}, OptionError, r"^device \[1\] cannot be used: "),
    "reduce": (
        {"reduce": "mean"},
        ArgumentError,
        r"^reduce is a function from a tensor to a tensor, got str: 'mean'\.$",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_each_wrong_argument_of_record_is_one_clear_error(model: nn.Sequential, what: str) -> None:
    arguments, kind, message = WRONG[what]
    with pytest.raises(kind, match=message) as caught:
        hookline.record(model, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_is_not_there(model: nn.Sequential) -> None:
    with pytest.raises(OptionError, match=r"^device 'cuda' cannot be used: "):
        hookline.record(model, device="cuda")


@pytest.mark.parametrize("wrong", [None, 3, "model", nn.Linear, lambda x: x, [nn.Linear(1, 1)]])
def test_a_model_that_is_no_module(wrong: Any) -> None:
    advice = "; make an instance of it" if wrong is nn.Linear else ""
    for call in (lambda: hookline.record(wrong), lambda: hookline.edit(wrong, {"": torch.relu})):
        with pytest.raises(ArgumentError, match=rf"^the model must be a torch\.nn\.Module; got .*{advice}$"):
            call()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_part_that_is_asked_for_by_name_is_refused_and_otherwise_told_as_bypassed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.trace(nn.Linear(2, 2), torch.ones(2)), nn.ReLU())
    message = r'^nothing can be seen at "1": TorchScript runs it outside Python\. .* or leave it out: "!1"\.$'
    for refused in (lambda: hookline.record(model, ["0", "1"]), lambda: hookline.edit(model, {"1": torch.relu})):
        with pytest.raises(SiteError, match=message):
            refused()
    with hookline.record(model) as rec:
        model(torch.ones(2))
    assert [event.path for event in rec] == ["0", "2", ""]
    assert rec.coverage["1:output"][1:] == ("bypassed", 0, "TorchScript runs it outside Python")


CONTAINERS: dict[str, Callable[[], nn.Module]] = {
    "ModuleList": lambda: nn.ModuleList([nn.ReLU(), nn.ReLU()]),
    "ModuleDict": lambda: nn.ModuleDict({"a": nn.ReLU()}),
    "ParameterList": lambda: nn.ParameterList([torch.ones(1)]),
    "ParameterDict": lambda: nn.ParameterDict({"a": torch.ones(1)}),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_that_is_never_called(name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.held = CONTAINERS[name]()
    message = rf'^nothing can be seen at "held": a {name} holds others and is never called\. '
    for pattern in ("held", "held:output", ["0", "held"], type(model.held)):
        with pytest.raises(SiteError, match=message):
            hookline.record(model, pattern)
        with pytest.raises(SiteError, match=message):
            hookline.edit(model, {pattern if isinstance(pattern, type | str) else tuple(pattern): torch.relu})
    with hookline.record(model, ["**", "!(root)"]) as rec:
        model[0](torch.ones(2))
    assert [(fate.site, fate.status) for fate in rec.coverage.bypassed] == [("held:output", "bypassed")]


@pytest.mark.parametrize("room", ["recorder", "edit"])
def test_nothing_is_attached_when_one_module_refuses(
    model: nn.Sequential, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be found out only when it is tried, after others were attached."""
    module = sys.modules["hookline.hooks.attach" if room == "recorder" else "hookline.record.edit"]
    attach = module.attach  # type: ignore[attr-defined]

    def refuse_norm(target: nn.Module, *rest: Any) -> Any:
        if target is model.norm:
            assert "_hookline_tap" in vars(model.conv)
            raise ArgumentError("no")
        return attach(target, *rest)

    monkeypatch.setattr(module, "attach", refuse_norm)
    made = hookline.record(model) if room == "recorder" else hookline.edit(model, {"**": torch.relu})
    with pytest.raises(ArgumentError, match=r"^no$"):
        made.__enter__()


def test_a_recorder_is_used_once(model: nn.Sequential) -> None:
    recorder = hookline.record(model)
    with recorder:
        with pytest.raises(OptionError, match=r"a recorder records once; call hookline\.record\(\.\.\.\) again"):
            recorder.__enter__()
        assert type(model) is not nn.Sequential
    with pytest.raises(OptionError, match="a recorder records once"):
        recorder.__enter__()
    recorder.close()


def test_a_module_that_is_gone_when_the_block_begins() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    recorder, edits = hookline.record(model), hookline.edit(model, {"1": torch.relu})
    del model[1]
    for made in (recorder, edits):
        with pytest.raises(
            SiteError, match=r'^"1" was taken out of the model since its sites were chosen; choose them'
        ):
            made.__enter__()
    assert type(model) is nn.Sequential and type(model[0]) is nn.Linear
