"""Recording to disk where something is unusual: another rank, a run that goes on, a value that nobody can store."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookline
from hookline import hooks, store
from hookline.record import recorder
from hookline.record.event import Event
from hookline.store import StoredEvent, Writer


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


# ---------------------------------------------------------------- a run that goes on


def test_the_coverage_of_a_run_that_goes_on_is_of_this_run(tmp_path: Path) -> None:
    net, place = model(), tmp_path / "run.hookline"
    with hookline.record(net, "0", to=place):
        for _ in range(3):
            net(torch.randn(5, 10))
    with hookline.record(net, "0", to=place, resume=True) as rec:
        assert rec.first_step == 3
        assert rec.coverage["0:output"] == ("0:output", "not reached", 0, "the model was not called")
        net[2](torch.randn(5, 10))
        assert rec.coverage["0:output"].reason == "the model was not called"
    assert rec.coverage["0:output"].reason == "the model was not called"
    with hookline.record(net, "0", to=place, resume=True) as rec:
        for _ in range(2):
            net(torch.randn(5, 10))
        assert rec.coverage["0:output"] == ("0:output", "captured", 2, "")


def test_a_module_that_does_not_run_is_told_with_the_forwards_of_this_run(tmp_path: Path) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Identity(), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    net, place = Skips(), tmp_path / "run.hookline"
    for times in (3, 2):
        with hookline.record(net, "unused", to=place, resume=True) as rec:
            for _ in range(times):
                net(torch.ones(2))
        assert rec.coverage["unused:output"].reason == f"(root) ran {times} times without calling it"


# ---------------------------------------------------------------- a recording that could not begin


def attach_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The observers of the third module cannot be put there."""
    left = [2]

    def attach(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no hooks here")
        return hooks.attach(*args)

    monkeypatch.setattr(recorder, "attach", attach)


def open_files(folder: Path) -> list[str]:
    links = Path("/proc/self/fd").iterdir() if os.path.exists("/proc/self/fd") else ()
    return [name for link in links if (name := os.path.realpath(link)).startswith(str(folder.resolve()) + os.sep)]


@pytest.mark.parametrize("resume", [True, False])
def test_what_could_not_begin_leaves_no_file_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    net, place, streams = model(), tmp_path / "run.hookline", list[weakref.ref[Any]]()
    with monkeypatch.context() as patch:
        attach_fails(patch)
        made = hookline.record(net, to=place, resume=resume)
        with pytest.raises(RuntimeError, match="no hooks here"):
            made.__enter__()
        streams.append(weakref.ref(made._stream))
    assert list(tmp_path.iterdir()) == [] and open_files(tmp_path) == []
    del made
    gc.collect()
    assert streams[0]() is None, "the interpreter would still close it at its end"
    with hookline.record(net, to=place, resume=resume):
        net(torch.randn(5, 10))
    assert len(hookline.load(place)) == 4 and store.verify(place).problems == []


def test_what_could_not_begin_leaves_the_parts_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, place = model(), tmp_path / "run.hookline"
    with hookline.record(net, to=place):
        net(torch.randn(5, 10))
    before = sorted(path.name for path in place.rglob("*"))
    for rank, resume in (("1", False), ("0", True)):
        with monkeypatch.context() as patch:
            patch.setenv("RANK", rank)
            attach_fails(patch)
            with pytest.raises(RuntimeError, match="no hooks here"):
                hookline.record(net, to=place, resume=resume).__enter__()
        assert sorted(path.name for path in place.rglob("*")) == before and open_files(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["run.hookline"]


def test_a_recording_that_others_have_joined_stays(tmp_path: Path) -> None:
    first = Writer(tmp_path / "run.hookline", info={}, modules={})
    with Writer(tmp_path / "run.hookline", info={}, modules={}, writer=1) as other:
        first.take_back()
        other.append([Event(0, 0, "a", "output", 0, 0, torch.ones(2), writer=1)])
    assert hookline.load(tmp_path / "run.hookline").writers == [1]
    kept = Writer(tmp_path / "run.hookline", info={}, modules={}, writer=2)
    kept.append([Event(0, 0, "a", "output", 0, 0, torch.ones(2), writer=2)])
    kept.take_back()
    assert hookline.load(tmp_path / "run.hookline").writers == [1, 2]


# ---------------------------------------------------------------- threads


def test_a_flush_does_not_wait_for_what_other_threads_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the disk has a step, the other thread has begun another one, until the flush has returned."""
    net, x, place = model(), torch.ones(5, 10), tmp_path / "run.hookline"
    returned, ran, found, commit = threading.Event(), threading.Event(), list[int](), Writer.commit

    def commit_and_wait(self: Writer, several: Any) -> None:
        commit(self, several)
        ran.clear()
        assert returned.is_set() or ran.wait(60)

    def run() -> None:
        while not returned.is_set():
            net(x)
            ran.set()
            time.sleep(0.002)
        ran.set()

    def run_and_flush() -> None:
        for _ in range(5):
            net(x)
        with rec.log._lock:
            own = {event.order for event in rec.log.in_memory}
        rec.flush()
        found.append(len(own - {event.order for event in hookline.load(place)}))
        returned.set()

    monkeypatch.setattr(Writer, "commit", commit_and_wait)
    with hookline.record(net, to=place) as rec:
        other, own = threading.Thread(target=run), threading.Thread(target=run_and_flush)
        other.start()
        assert ran.wait(60)
        own.start()
        in_time = returned.wait(10)
        returned.set()
        for thread in (own, other):
            thread.join()
    assert in_time and found == [0]
    steps = Counter(event.step for event in hookline.load(place))
    assert steps == dict.fromkeys(range(len(steps)), 4)


def test_a_flush_waits_for_what_is_staged(tmp_path: Path) -> None:
    """The shards of a step that goes on are on disk, and no line names them before the flush."""
    net, place = model(), tmp_path / "run.hookline"
    with hookline.record(net, "0", budget=VALUE, steps="manual", to=place) as rec:
        for _ in range(3):
            net(torch.ones(5, 10))
        assert len(hookline.load(place)) == 0 and len(list(place.glob("w*/*.safetensors"))) > 0
        for count in (3, 4):
            rec.flush()
            assert len(hookline.load(place)) == count
            net(torch.ones(5, 10))
