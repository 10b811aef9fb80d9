"""Recording to disk where something is unusual: another rank, a run that goes on, a value that nobody can store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookline
from hookline.store import StoredEvent


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))


VALUE = 5 * 10 * 4
"""Bytes of an output."""


# ---------------------------------------------------------------- which process


@pytest.mark.parametrize("budget", [10**9, VALUE])
def test_values_on_their_way_say_which_process_they_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """With the small budget, the input of a call is staged while its gradient is still in memory."""
    monkeypatch.setenv("RANK", "3")
    net = model()
    with hookline.record(net, ports=("input", "grad_output"), budget=budget, to=tmp_path / "run.hookline") as rec:
        for step in range(2):
            net(torch.randn(5, 10)).sum().backward()
            kinds = {isinstance(event, StoredEvent) for event in rec.log.in_memory}
            assert kinds == ({True, False} if budget == VALUE else {False})
            assert rec.writers == [3] and len(rec.select(writers=3)) == len(rec) == 8 * (step + 1)
            assert len(rec["1"].calls) == step + 1
            assert rec.rows("1:input").place(5 * step).writer == 3
            if step == 0:
                rec.flush()
    assert {event.writer for event in hookline.load(tmp_path / "run.hookline")} == {3}
