"""Trainings that go well give no finding."""

from __future__ import annotations

import pytest

from hookline.watch.rules import DEFAULT, Engine
from hookline.watch.window import Window

from .collecting import frames
from .healthy import ALL


def check(name: str, seed: int) -> None:
    training = ALL[name](seed)
    engine = Engine(DEFAULT)
    window, told, losses = Window(engine.size), [], []
    for frame, series in frames(training):
        window.add(frame, series)
        told += engine.check(window)
        losses.append(frame.values[-1][1])
    assert [str(one) for one in told] == []
    assert len(losses) >= 60 and training.steps == len(losses)
    if name != "gan":  # where the two keep each other in balance
        assert sum(losses[-5:]) < sum(losses[:5]), "the training is not healthy: its loss does not fall"


@pytest.mark.parametrize("name", ["char_lstm", "cnn_bfloat16", "mlp"])
def test_a_healthy_training_gives_no_finding(name: str) -> None:
    check(name, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ALL)
def test_no_seed_gives_a_finding(name: str, seed: int) -> None:
    check(name, seed)
