"""Faults planted into real little trainings: the right rule at the right series and step, and nothing else first."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from hookline.watch.incident import Incident
from hookline.watch.rules import DEFAULT, Engine
from hookline.watch.window import Window

from .collecting import frames
from .healthy import Training, digits, supervised


def found(training: Training, steps: int) -> list[Incident]:
    engine = Engine(DEFAULT)
    window = Window(engine.size)
    told: list[Incident] = []
    for frame, series in frames(training, steps):
        window.add(frame, series)
        told += engine.check(window)
    return told


def of(rule: str, told: list[Incident]) -> list[tuple[int, str]]:
    return [(one.step, str(one.series)) for one in told if one.rule == rule]


def pictures(model: nn.Module, optimizer: torch.optim.Optimizer, change: Callable[[int, Tensor], Tensor]) -> Training:
    data, count = torch.Generator().manual_seed(1), iter(range(10**6))

    def batch() -> tuple[Tensor, Tensor]:
        x, y = digits(32, data)
        return change(next(count), x), y

    return supervised("pictures", model, optimizer, batch)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    return pictures(model, optimizer, lambda number, x: x)


def mlp(activation: Callable[[], nn.Module], layers: int = 2, width: int = 32) -> nn.Sequential:
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), activation())]
    return nn.Sequential(nn.Flatten(), nn.Linear(144, width), activation(), *hidden, nn.Linear(width, 10))


def test_a_learning_rate_of_1000_explodes_after_the_first_step() -> None:
    model = mlp(nn.ReLU)
    again = copy.deepcopy(model)
    told = found(plain(model, SGD(model.parameters(), lr=1e3)), 4)
    exploding = [one for one in told if one.rule == "exploding"]
    assert exploding[0].step == 1 and exploding[0].severity == "error"
    assert exploding[0].series.port == "output" and exploding[0].direction == "forward"
    before, after = rms_of_outputs_around_a_step(again, lr=1e3)
    first = next(path for path in before if after[path] > 1e3 * before[path])
    assert exploding[0].series.path == first
    assert exploding[0].evidence["ratio"] == pytest.approx(after[first] / before[first], rel=1e-4)


def rms_of_outputs_around_a_step(model: nn.Sequential, lr: float) -> tuple[dict[str, float], dict[str, float]]:
    """By a plain loop over the layers, on the batches of ``plain``."""
    data, both = torch.Generator().manual_seed(1), []
    for _ in range(2):
        x, y = digits(32, data)
        rms = {}
        for path, layer in model.named_children():
            x = layer(x)
            rms[path] = x.detach().double().square().mean().sqrt().item()
        F.cross_entropy(x, y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
                parameter.grad = None
        both.append(rms)
    return both[0], both[1]


def test_a_relu_behind_a_bias_of_minus_100_is_dead() -> None:
    model = mlp(nn.ReLU)
    nn.init.constant_(model[3].bias, -100.0)
    told = found(plain(model, Adam(model.parameters(), lr=1e-3)), 15)
    assert of("dead", told) == [(9, "4:output")]
    stuck = {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert {name.partition(":")[0] for _, name in of("no-gradient", told)} == stuck | {"5.weight"}


def test_a_parameter_that_is_not_in_use_has_no_gradient() -> None:
    class Unused(nn.Linear):
        def __init__(self) -> None:
            super().__init__(144, 10)
            self.scale = nn.Parameter(torch.ones(3))

    model = nn.Sequential(nn.Flatten(), Unused())
    told = found(plain(model, SGD(model.parameters(), lr=0.1)), 8)
    assert of("no-gradient", told) == [(4, "1.scale:parameter_grad")]
    assert "had no gradient" in told[0].message and len(told) == 1


def test_a_group_with_a_learning_rate_of_zero_is_frozen() -> None:
    model = mlp(nn.ReLU)
    groups = [
        {"params": model[1].parameters(), "lr": 0.0},
        {"params": [*model[3].parameters(), *model[5].parameters()]},
    ]
    told = found(plain(model, SGD(groups, lr=0.05)), 15)
    assert sorted(of("frozen", told)) == [(9, "1.bias:update"), (9, "1.weight:update")]
    assert {one.rule for one in told} == {"frozen"}


def test_a_bfloat16_parameter_whose_updates_round_to_nothing_is_frozen() -> None:
    model = mlp(nn.ReLU).bfloat16()
    nn.init.constant_(model[1].weight, 1 / 64)
    training = pictures(model, SGD(model.parameters(), lr=1e-7), lambda number, x: x.bfloat16())
    told = found(training, 12)
    assert (9, "1.weight:update") in of("frozen", told)


@pytest.mark.parametrize(("activation", "path"), [(nn.Sigmoid, "2"), (nn.Tanh, "2")])
def test_a_saturated_layer(activation: Callable[[], nn.Module], path: str) -> None:
    model = mlp(activation)
    with torch.no_grad():
        model[1].weight *= 1e4
    told = found(plain(model, SGD(model.parameters(), lr=0.05)), 15)
    assert of("saturated", told) == [(9, f"{path}:output")]


def test_a_softmax_of_one_hot_rows_is_saturated() -> None:
    class Sharp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.softmax, self.out = nn.Linear(144, 32), nn.Softmax(-1), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.softmax(self.scores(x.flatten(1)) * 1e5))

    model = Sharp()
    told = found(plain(model, SGD(model.parameters(), lr=1e-3)), 12)
    assert of("saturated", told) == [(9, "softmax:output")]


def test_thirty_layers_of_sigmoids_vanish() -> None:
    model = mlp(nn.Sigmoid, layers=30)
    told = found(plain(model, SGD(model.parameters(), lr=0.05)), 15)
    (step, name), *_ = of("vanishing", told)
    assert step == 9
    model[1].weight.grad = None
    output: list[Tensor] = []
    x = digits(32, torch.Generator().manual_seed(5))[0]
    for layer in model:  # the gradients once more, by hand
        x = layer(x)
        if x.requires_grad:
            x.retain_grad()
        output.append(x)
    F.cross_entropy(x, torch.zeros(32, dtype=torch.long)).backward()
    rms = [0.0 if one.grad is None else one.grad.square().mean().sqrt().item() for one in output]
    path = int(name.partition(":")[0])
    assert name.endswith(":grad_output")
    below = [number for number, one in enumerate(rms) if one < 1e-8 * max(rms)]
    assert abs(path - max(below)) <= 2  # other weights and another batch: within a layer and its activation
    vanishing = next(one for one in told if one.rule == "vanishing")
    assert vanishing.evidence["others"] >= path - 4


def test_a_bad_batch_is_a_spike_of_its_step() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 10))
    change = lambda number, x: x * 1e4 if number == 40 else x  # noqa: E731
    told = found(pictures(model, SGD(model.parameters(), lr=1e-6), change), 45)
    assert (40, "0:output") in of("spike", told) and {step for step, _ in of("spike", told)} == {40}
    assert of("loss-spike", told) == [(40, "(root):loss")]
    assert min(one.step for one in told) == 40


class Half(nn.Module):
    """A product in float16 that comes close to 65504, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Linear(144, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.scale(x.flatten(1).half()).float() / 1e4)


def test_float16_close_to_its_largest_number() -> None:
    model = Half()
    model.scale.half()
    with torch.no_grad():
        model.scale.weight.fill_(0.0)
        model.scale.bias.fill_(40000.0)
    told = found(plain(model, SGD(model.out.parameters(), lr=1e-3)), 5)
    assert of("overflow-risk", told) == [(0, "scale:output")]
    assert told[0].evidence == {"absmax": 40000.0, "largest": 65504.0}


def test_float16_gradients_below_the_smallest_normal_number() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 10)).half()
    data = torch.Generator().manual_seed(2)

    def batch() -> tuple[Tensor, Tensor]:
        x, y = digits(32, data)
        return x.half(), y

    loss = lambda out, y: F.cross_entropy(out, y) * 1e-4  # noqa: E731
    told = found(supervised("half", model, SGD(model.parameters(), lr=1.0), batch, loss), 8)
    assert (4, "1:grad_output") in of("underflow-risk", told)


@pytest.mark.parametrize(("rate", "decay", "side"), [(0.5, 3.0, "above 0.2"), (1e-10, 0.0, "below 1e-07")])
def test_updates_out_of_proportion(rate: float, decay: float, side: str) -> None:
    model = mlp(nn.Tanh)
    told = found(plain(model, AdamW(model.parameters(), lr=rate, weight_decay=decay)), 25)
    ratios = [one for one in told if one.rule == "update-ratio"]
    assert {one.step for one in ratios} >= {19} and all(side in one.message for one in ratios)
    assert {one.series.place for one in ratios} >= {"weight"}
    for one in ratios:
        assert one.evidence["ratio"] == pytest.approx(
            one.evidence["update_rms"] / max(one.evidence["parameter_rms"], 1e-2)
        )


def test_a_layer_that_is_cut_off_by_and_by_vanishes_against_its_past() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.out, self.count = nn.Linear(144, 16), nn.Linear(144, 16), nn.Linear(16, 10), 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            x = x.flatten(1)
            return self.out(self.one(x) + self.two(x) * (1.0 if self.count <= 30 else 1e-6))

    model = Cut()
    told = found(plain(model, SGD(model.parameters(), lr=0.01)), 40)
    assert of("vanishing", told) == [(32, "two:grad_output"), (32, "two.weight:parameter_grad")]
