"""With a folder to spill to, a budget bounds what is in memory and nothing is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookline
from hookline.errors import BudgetError, FormatError, OptionError
from hookline.sites import PORTS
from hookline.store import StoredEvent, Writer


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(inplace=True), nn.Linear(10, 10))


VALUE = 5 * 10 * 4
"""Bytes of an output."""


def keys(rec: Any) -> list[tuple[Any, ...]]:
    return [(event.order, event.step, event.path, event.port, event.call, event.backward) for event in rec]


def in_memory(rec: hookline.Recording) -> int:
    return sum(event.nbytes for event in rec if not isinstance(event, StoredEvent))


@pytest.mark.parametrize("budget", [VALUE // 2, VALUE, 3 * VALUE, 10**9])
def test_everything_is_there_in_order_in_memory_and_on_disk(tmp_path: Path, budget: int) -> None:
    net, x = model(), torch.randn(5, 10)
    with hookline.record(net, ports=PORTS) as whole:
        for _ in range(3):
            net(x).sum().backward()
    place = tmp_path / "run.hookline"
    with hookline.record(net, ports=PORTS, budget=budget, to=place) as rec:
        for _ in range(3):
            net(x).sum().backward()
            assert in_memory(rec) <= budget
    loaded = hookline.load(place)
    assert keys(rec) == keys(loaded) == keys(whole)
    for one, two, three in zip(whole, rec, loaded, strict=True):
        for a, b, c in zip(one.leaves(), two.leaves(), three.leaves(), strict=True):
            assert a[0] == b[0] == c[0] and torch.equal(a[1], b[1]) and torch.equal(a[1], c[1])
    assert dict(rec.coverage) == dict(loaded.coverage) == dict(whole.coverage)
    assert torch.equal(rec["1"].calls[2].output, whole["1"].calls[2].output)
    rec.save(tmp_path / "again.hookline")
    assert keys(hookline.load(tmp_path / "again.hookline")) == keys(whole)


def test_it_is_read_while_it_spills(tmp_path: Path) -> None:
    net, x = model(), torch.randn(5, 10)
    with hookline.record(net, "2", budget=2 * VALUE, to=tmp_path / "run.hookline") as rec:
        outputs = []
        for step in range(5):
            outputs.append(net(x + step).detach())
            assert [torch.equal(call.output, y) for call, y in zip(rec["2"].calls, outputs, strict=True)] == [True] * (
                step + 1
            )


def test_what_reduce_makes_is_counted_and_spilled(tmp_path: Path) -> None:
    net = model()
    with hookline.record(net, budget=8, reduce=lambda t: t.mean(), to=tmp_path / "run.hookline") as rec:
        net(torch.randn(5, 10))
    assert len(rec) == len(hookline.load(tmp_path / "run.hookline")) == 4


def test_an_error_in_the_block_keeps_what_was_recorded(tmp_path: Path) -> None:
    net = model()
    with pytest.raises(ZeroDivisionError), hookline.record(net, to=tmp_path / "run.hookline"):
        net(torch.randn(5, 10))
        raise ZeroDivisionError
    assert len(hookline.load(tmp_path / "run.hookline")) == 4


def test_threads_lose_and_double_nothing(tmp_path: Path) -> None:
    net = model()
    with hookline.record(net, budget=2 * VALUE, to=tmp_path / "run.hookline") as rec:
        threads = [threading.Thread(target=lambda: [net(torch.ones(5, 10)) for _ in range(20)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [(event.path, event.step, event.call) for event in hookline.load(tmp_path / "run.hookline")]
    assert len(found) == len(set(found)) == len(rec) == 4 * 60


def test_without_a_folder_the_budget_raises_before_the_value_is_kept() -> None:
    net = model()
    with hookline.record(net, budget=VALUE) as rec, pytest.raises(BudgetError, match=r"Largest sites: 0:output"):
        net(torch.randn(5, 10))
    assert in_memory(rec) <= VALUE


def test_the_last_values_only_are_written_at_the_end(tmp_path: Path) -> None:
    net = model()
    with hookline.record(net, keep="last", budget=4 * VALUE, to=tmp_path / "run.hookline") as rec:
        for _ in range(3):
            y = net(torch.randn(5, 10))
    loaded = hookline.load(tmp_path / "run.hookline")
    assert len(rec) == len(loaded) == 4 and torch.equal(loaded[""].output, y)


def test_a_folder_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    net, place = model(), tmp_path / "run.hookline"
    with hookline.record(net, to=place):
        net(torch.randn(5, 10))
    with pytest.raises(OptionError, match="exists"):
        hookline.record(net, to=place)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FormatError):
        hookline.record(net, to=tmp_path / "file")
    with pytest.raises(OptionError, match=r"^to= writes values to disk, where a graph cannot go"):
        hookline.record(net, to=tmp_path / "other", detach=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run.hookline"]


def test_a_disk_that_refuses_leaves_what_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()

    def refuse(*_: Any) -> None:
        raise FormatError("the disk is full")

    with hookline.record(net, budget=2 * VALUE, to=tmp_path / "run.hookline") as rec:
        monkeypatch.setattr(Writer, "append", refuse)
        with pytest.raises(FormatError, match="the disk is full"):
            net(torch.randn(5, 10))
        assert len(rec) == 2 and in_memory(rec) == 2 * VALUE
        monkeypatch.undo()
        net(torch.randn(5, 10))
    assert len(rec) == len(hookline.load(tmp_path / "run.hookline")) == 6
