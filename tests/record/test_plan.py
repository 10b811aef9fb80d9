"""A plan says what a step will record, to the byte, and leaves everything as it was."""

from __future__ import annotations

import copy
import functools
import random
import runpy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.errors import ArgumentError, OptionError, SiteError
from hookline.sites import PORTS

EXAMPLES = Path(__file__).parents[2] / "examples"


class Net(nn.Module):
    """Statistics, random numbers of three kinds, a counter, several outputs, one of them of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 4)
        self.drop = nn.Dropout()
        self.relu = nn.ReLU(inplace=True)
        self.unused = nn.Linear(1, 1)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: Tensor | float = 1.0) -> dict[str, Tensor]:
        self.calls += 1
        noise = random.random() + float(np.random.rand())
        h = self.relu(self.drop(self.relu(self.linear(self.norm(x)))))
        return {"h": h * scale + noise, "top": h.argmax(1)}


def state_of(model: Net) -> list[Any]:
    tensors = [tensor.detach().clone() for tensor in model.state_dict(keep_vars=True).values()]
    python = [random.getstate(), model.calls, model.training, [p.grad for p in model.parameters()]]
    return [*tensors, torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1].astype("int64")), python]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("ports", [("output",), ("input", "output"), PORTS], ids=str)
@pytest.mark.parametrize("input_grad", [True, False])
def test_the_bytes_are_those_of_a_step_and_nothing_moves(ports: tuple[str, ...], input_grad: bool) -> None:
    model, x = Net(), torch.randn(5, 3, requires_grad=input_grad)
    before = state_of(model)
    plan = hookline.plan(model, "**", x, ports=ports, kwargs={"scale": torch.tensor(2.0)})
    assert same(state_of(model), before) and x.grad is None
    assert not any("hookline" in name for module in model.modules() for name in vars(module))
    with hookline.record(model, ports=ports) as rec:
        output = model(x, scale=torch.tensor(2.0))
        output["h"].sum().backward()
    assert plan.nbytes == rec.nbytes > 0
    assert dict(plan.coverage) == dict(rec.coverage)
    for text, site in plan.sites.items():
        events = [event for event in rec if f"{event.path or '(root)'}:{event.port}" == text]
        assert site.nbytes == sum(event.nbytes for event in events)
        assert site[:3] == rec.coverage[text][:3] and site.reason == rec.coverage[text].reason


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.bfloat16}, {"reduce": lambda t: t.sum(0)}, {"reduce": lambda t: 1.0}],
    ids=["dtype", "tensor", "number"],
)
def test_what_is_made_of_the_values_counts(options: dict[str, Any]) -> None:
    model, x = Net(), torch.randn(5, 3)
    plan = hookline.plan(model, ["linear", "norm"], x, **options)
    with hookline.record(model, ["linear", "norm"], **options) as rec:
        model(x)
    assert plan.nbytes == rec.nbytes > 0


def test_a_model_that_cannot_be_copied_runs_itself_and_keeps_its_buffers() -> None:
    model, x = Net(), torch.randn(5, 3)
    model.lock = threading.Lock()
    with pytest.raises(TypeError):
        copy.deepcopy(model)
    before = state_of(model)[:-1]
    assert hookline.plan(model, "linear", x).nbytes == 5 * 4 * 4
    assert same(state_of(model)[:-1], before)


def test_a_loss_of_ones_own_decides_where_gradients_come() -> None:
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    both = nn.Sequential(nn.Linear(3, 3))
    both.forward = lambda x: (model[0](x), model[1](x))
    both.heads = model
    plan = hookline.plan(both, "heads.*", torch.ones(1, 3), ports="grad_output", loss=lambda output: output[1].sum())
    assert [site.status for site in plan.sites.values()] == ["bypassed", "captured"] and plan.nbytes == 8
    with pytest.raises(ArgumentError, match=r"^loss returned shape \(1, 2\); it must return one number as a tensor\.$"):
        hookline.plan(both, "heads.*", torch.ones(1, 3), ports="grad_output", loss=lambda output: output[0])


class Writes(nn.Module):
    """Writes over a parameter, a buffer and its input, and runs a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, max_norm=0.1)
        self.average = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.linear = nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, index: Tensor, x: Tensor) -> Tensor:
        self.count = self.count + 1
        with torch.no_grad():
            self.average.add_(1)
        with torch.enable_grad():
            self.linear(x.detach()).sum().backward()
        return checkpoint(self.linear, self.table(index) + F.relu_(x * 1) + x.detach().mul_(2), use_reentrant=True)


@pytest.mark.parametrize("can_be_copied", [True, False])
def test_a_model_that_writes_to_all_that_it_has_is_as_before(can_be_copied: bool) -> None:
    model, index, x = Writes(), torch.tensor([0, 1]), torch.randn(2, 4, requires_grad=True)
    if not can_be_copied:
        model.lock = threading.Lock()
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    given = x.detach().clone()
    plan = hookline.plan(model, "**", index, x, ports=PORTS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(x, given) and x.grad is None and plan.coverage["table:grad_output"].status == "captured"


def test_a_lazy_model_stays_lazy() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 1))
    assert hookline.plan(model, "0", torch.randn(2, 3, 4, 4)).nbytes == 2 * 4 * 16 * 4
    assert isinstance(model[0], nn.LazyConv2d) and model(torch.randn(1, 5, 2, 2)).shape == (1, 4, 2, 2)
    norm = nn.Sequential(nn.LazyBatchNorm2d())  # which torch cannot copy
    with pytest.raises(OptionError, match="call it once first"):
        hookline.plan(norm, "0", torch.randn(2, 3, 4, 4))
    assert isinstance(norm[0], nn.LazyBatchNorm2d)


def test_mistakes_are_told_before_anything_runs() -> None:
    model = Net()
    with pytest.raises(SiteError, match="nearest"):
        hookline.plan(model, "liner", torch.ones(5, 3))
    assert model.calls == 0


def test_the_text() -> None:
    plan = hookline.plan(nn.Sequential(nn.Linear(3, 64), nn.ReLU()), "*", torch.ones(8, 3))
    assert str(plan).splitlines() == [
        "  0:output  1 call       2 KiB",
        "  1:output  1 call       2 KiB",
        "a step records 4 KiB (4,096 bytes)",
        "coverage of 2 sites: 2 captured (2 calls), 0 not reached, 0 bypassed",
    ]
    assert repr(plan) == "<Plan of 2 sites: 4,096 bytes a step>"


# ---------------------------------------------------------------- real models


@pytest.fixture(autouse=True)
def no_progress_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress bar of transformers would start a thread that stays."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


def picture_network() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    names = runpy.run_path(str(EXAMPLES / "classify_cat.py"))
    return names["pretrained"](), (names["prepare"](names["cat_photo"]()),), {}


def sentence_encoder() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    names = runpy.run_path(str(EXAMPLES / "sentence_similarity.py"))
    model = transformers.AutoModel.from_pretrained(names["model_folder"]())
    return model.eval(), (), {"input_ids": torch.tensor([[101, 7592, 2088, 102]])}


def voice_encoder() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    names = runpy.run_path(str(EXAMPLES / "speaker_lstm.py"))
    return names["pretrained"](), (torch.rand(2, 40, 40),), {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [picture_network, sentence_encoder, voice_encoder])
@pytest.mark.parametrize("ports", [("output",), PORTS], ids=["output", "all"])
def test_the_bytes_of_a_real_model(make: Callable[[], Any], ports: tuple[str, ...]) -> None:
    model, args, kwargs = make()
    plan = hookline.plan(model, "**", *args, ports=ports, kwargs=kwargs)
    with hookline.record(model, ports=ports) as rec:
        output = model(*args, **kwargs)
        if len(ports) > 1:
            leaves = [leaf for leaf in (output.values() if isinstance(output, dict) else [output])]
            functools.reduce(torch.add, [leaf.sum() for leaf in leaves if leaf.requires_grad]).backward()
    assert plan.nbytes == rec.nbytes > 0
    assert dict(plan.coverage) == dict(rec.coverage)
