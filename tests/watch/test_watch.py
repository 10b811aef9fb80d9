"""Planted faults in small trainings: the producer, call, step, direction and operation; and that nothing is changed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookline.cli.main import main
from hookline.errors import ArgumentError, IncidentError, OptionError
from hookline.watch.incident import Incident
from hookline.watch.watch import IncidentWarning, Watch, watch

WIDTH = 8


class Own(nn.Module):
    """Its own code between two layers."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.code, self.last = nn.Linear(WIDTH, WIDTH), code, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.code(self.first(x)))


class Apply(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x)


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x * 0)


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x * 0)


class Twice(nn.Module):
    """A shared module that is bad on its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Apply(torch.log)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x.abs() + 1) + self.shared(x * 0)


def trained(
    model: nn.Module,
    *,
    steps: int = 4,
    bad_step: int = 0,
    loss: Callable[[Tensor], Tensor] = lambda y: y.pow(2).mean(),
    spoil: Callable[[nn.Module, Tensor], None] = lambda model, x: None,
    **options: Any,
) -> list[Incident]:
    """Incidents of a training of which ``spoil`` spoils one step."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, on_incident="ignore", **options) as found:
        for step in range(steps):
            optimizer.zero_grad()
            x = torch.randn(6, WIDTH)
            if step == bad_step:
                spoil(model, x)
            loss(model(x)).backward()
            optimizer.step()
        assert found.step == steps
    return [incident for incident in found.incidents if incident.rule == "non-finite"]


def only(found: list[Incident]) -> Incident:
    (incident,) = found
    return incident


def with_code(code: Callable[[Tensor], Tensor]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Apply(code), nn.Linear(WIDTH, WIDTH))


FORWARD = {
    "log of zero": (lambda: with_code(lambda x: torch.log(x * 0)), "1:output", "aten.log.default"),
    "division by a zero norm": (lambda: with_code(lambda x: x / (x * 0).norm()), "1:output", "aten.div.Tensor"),
    "overflow of exp": (lambda: with_code(lambda x: torch.exp(x * 1e4)), "1:output", "aten.exp.default"),
    "overflow of float16": (
        lambda: with_code(lambda x: (x.half() * 60000 * 60).float()),
        "1:output",
        "aten.mul.Tensor",
    ),
    "sqrt of less than zero": (lambda: with_code(lambda x: torch.sqrt(-x.abs() - 1)), "1:output", "aten.sqrt.default"),
    "an all-masked row": (
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), Apply(lambda x: x.masked_fill(x < 1e9, -torch.inf)), nn.Softmax(-1)
        ),
        "2:output",
        "aten._softmax.default",
    ),
    "own code of a block": (
        lambda: nn.Sequential(Own(lambda x: torch.log(x * 0)), nn.Linear(WIDTH, WIDTH)),
        "0:output",
        "aten.log.default",
    ),
}


@pytest.mark.parametrize("name", FORWARD)
def test_the_producer_of_a_forward(name: str) -> None:
    make, site, operation = FORWARD[name]
    incident = only(trained(make()))
    assert (str(incident.series), incident.operation) == (site, operation)
    assert (incident.role, incident.direction, incident.step) == ("producer", "forward", 0)
    assert "test_watch.py" in incident.operation_line or operation == "aten._softmax.default"


BACKWARD = {
    "sqrt at zero": (lambda: with_code(lambda x: torch.sqrt(x * 0)), "1:grad_input"),
    "norm at zero in own code": (
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), Own(lambda x: torch.sqrt((x * 0).pow(2).sum(-1, keepdim=True)) + x)
        ),
        "1:grad_input",
    ),
    "a power at zero": (lambda: with_code(lambda x: (x * 0).abs().pow(0.5)), "1:grad_input"),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_the_producer_of_a_backward(name: str) -> None:
    make, site = BACKWARD[name]
    incident = only(trained(make()))
    assert (str(incident.series), incident.role, incident.direction) == (site, "producer", "backward")
    assert incident.operation, incident.evidence.get("zoom_failed")


def test_the_second_call_of_a_shared_module() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice(), nn.Linear(WIDTH, WIDTH))
    incident = only(trained(model))
    assert (str(incident.series), incident.call, incident.operation) == ("1.shared:output", 1, "aten.log.default")


def test_a_weight_that_is_infinite() -> None:
    def spoil(model: Any, x: Tensor) -> None:
        with torch.no_grad():
            model[1].weight[0, 0] = torch.inf

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    incident = only(trained(model, bad_step=2, spoil=spoil))
    assert (str(incident.series), incident.step, incident.role) == ("1.weight:parameter", 2, "producer")
    assert "1 Inf of 64" in incident.message


def test_a_bad_batch() -> None:
    def spoil(model: nn.Module, x: Tensor) -> None:
        x[3, 2] = torch.nan

    incident = only(trained(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), bad_step=1, spoil=spoil))
    assert (incident.series.path, incident.series.port, incident.step) == ("", "input", 1)
    assert "the batch itself holds 1 NaN of 48, in args[0]" in incident.message


def test_a_loss_of_its_own() -> None:
    incident = only(trained(nn.Sequential(nn.Linear(WIDTH, WIDTH)), loss=lambda y: torch.log(y * 0).mean()))
    assert (str(incident.series), incident.direction) == ("(root):loss", "forward")
    incident = only(trained(nn.Sequential(nn.Linear(WIDTH, WIDTH)), loss=lambda y: torch.sqrt(y * 0).mean()))
    assert (incident.role, incident.direction) == ("victim", "backward")
    assert "such as the loss" in incident.message


def test_a_mask_is_no_incident_and_the_reason_is_shown() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask, self.softmax = (
                Apply(lambda x: x.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)),
                nn.Softmax(-1),
            )
            self.project = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.softmax(self.mask(x @ x.T)) @ self.project(x)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, on_incident="raise") as found:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(6, WIDTH)).pow(2).mean().backward()
            optimizer.step()
    assert found.incidents == []
    assert list(found.notes) == ["1.mask:output"] and "masked_fill" in found.notes["1.mask:output"]


def test_a_run_of_bad_steps_is_told_once_and_a_later_one_again() -> None:
    def spoiling(model: nn.Module, x: Tensor) -> None:
        x[0, 0] = torch.nan

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, optimizer, on_incident="ignore") as found:
        for step in range(8):
            optimizer.zero_grad()
            x = torch.randn(6, WIDTH)
            if step in (1, 2, 5):
                spoiling(model, x)
            model(x).pow(2).mean().backward()
            model.zero_grad()
            optimizer.step()
    assert [incident.step for incident in found.incidents if incident.rule == "non-finite"] == [1, 5]


# ---------------------------------------------------------------- what happens to an incident


def test_a_warning_an_error_or_a_call() -> None:
    model = with_code(lambda x: torch.log(x * 0))
    with (
        pytest.warns(IncidentWarning, match=r"step 0: non-finite at 1:output: producer, forward: .* by aten\.log"),
        watch(model),
    ):
        model(torch.ones(2, WIDTH))
    with pytest.raises(IncidentError, match="non-finite at 1:output") as caught, watch(model, on_incident="raise"):
        model(torch.ones(2, WIDTH))
    assert caught.value.incident.series.path == "1"
    told: list[Incident] = []
    with watch(model, on_incident=told.append, zoom=False):
        model(torch.ones(2, WIDTH))
    assert only(told).operation == ""


def test_bad_options() -> None:
    model = nn.Linear(2, 2)
    for options, error, text in [
        ({"every": 0}, OptionError, r"^every is a whole number from 1 on; got 0\."),
        ({"ports": ("outputs",)}, OptionError, r"^ports are of output, .*; got 'outputs'\."),
        ({"on_incident": "stop"}, OptionError, r'^on_incident is "warn"'),
        ({"optimizer": 3}, ArgumentError, r"^optimizer is a torch.optim.Optimizer"),
    ]:
        with pytest.raises(error, match=text):
            watch(model, **options)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^watch takes a torch.nn.Module"):
        watch([model])  # type: ignore[arg-type]


# ---------------------------------------------------------------- steps


def test_steps_are_those_of_the_optimizer_also_with_accumulation() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer) as found:
        for number in range(6):
            model(torch.randn(6, WIDTH)).mean().backward()
            if number % 2:
                optimizer.step()
        assert found.step == 3
    with watch(model) as found:
        for _ in range(4):
            model(torch.randn(6, WIDTH))
        assert found.step == 3
    assert found.step == 4


def test_a_step_that_the_gradient_scaler_leaves_out_is_a_step_and_no_incident() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=2.0**100)
    with watch(model, optimizer, scaler=scaler, on_incident="raise") as found:
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(torch.randn(6, WIDTH)) * 1e9).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert found.step == 5
    assert "update" not in vars(scaler)


# ---------------------------------------------------------------- nothing is changed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.relu(self.norm(self.conv(x))).flatten(1)))


def run(model: nn.Module, *, watched: bool, steps: int) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(7)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    looking = watch(model, optimizer, on_incident="ignore") if watched else None
    if looking is not None:
        looking.start()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.randint(10, (4,)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if looking is not None:
        looking.stop()
        assert len(looking.series) > 20 and looking.step == steps
    return losses, torch.get_rng_state()


def test_the_same_bits_for_200_steps() -> None:
    torch.manual_seed(0)
    bare = Net()
    watched = copy.deepcopy(bare)
    (want, want_state), (got, got_state) = run(bare, watched=False, steps=200), run(watched, watched=True, steps=200)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert torch.equal(want_state, got_state)
    for (name, a), (_, b) in zip(bare.state_dict().items(), watched.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_nothing_stays_behind() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, backward = type(model.conv), torch.autograd.backward
    looking: Watch | None = watch(model, optimizer)
    assert looking is not None
    with looking, pytest.raises(ZeroDivisionError):
        model(torch.randn(2, 1, 8, 8)).sum().backward()
        optimizer.step()
        raise ZeroDivisionError
    assert type(model.conv) is before and torch.autograd.backward is backward
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    gone = weakref.ref(looking)
    looking = None
    gc.collect()
    assert gone() is None


def test_no_activation_outlives_its_step() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[weakref.ref[Any]] = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output.untyped_storage())))
    with watch(model, optimizer):
        model(torch.randn(2, WIDTH)).sum().backward()
        optimizer.step()
        assert seen[0]() is None


@pytest.mark.parametrize("backward", [False, True])
def test_a_bundle_replays_the_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str], backward: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Root() if backward else Logarithm(), nn.Linear(WIDTH, WIDTH))
    incident = only(trained(model, bundles=tmp_path / "bundles"))
    assert incident.bundle == str(tmp_path / "bundles" / "step-000000-rank-0"), incident.evidence.get("bundle_failed")
    assert main(["replay", incident.bundle]) == 0
    assert incident.operation in capsys.readouterr().out


def test_a_bundle_that_cannot_be_written_does_not_end_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    incident = only(trained(with_code(lambda x: torch.log(x * 0)), bundles=tmp_path / "file" / "bundles"))
    assert incident.bundle == "" and "NotADirectoryError" in incident.evidence["bundle_failed"]
