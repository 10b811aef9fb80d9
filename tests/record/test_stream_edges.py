"""Recording to disk where something is unusual: another rank, a run that goes on, a value that nobody can store."""

from __future__ import annotations

import gc
import json
import os
import sys
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
from hookline.cli.main import main
from hookline.errors import ArgumentError, CoverageError, OptionError
from hookline.record.event import Event
from hookline.store import StoredEvent, Writer
from hookline.store.dtypes import STORAGE


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
    left, room = [2], sys.modules["hookline.hooks.attach"]  # hooks.attach is the function
    real = hooks.attach

    def attach(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no hooks here")
        return real(*args)

    monkeypatch.setattr(room, "attach", attach)


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


# ---------------------------------------------------------------- what nobody can store


@pytest.fixture
def unknown_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of torch's dtypes has no form in a recording, such as a later torch may have."""
    monkeypatch.delitem(STORAGE, "bits8")


class Odd(nn.Module):
    """Gives elements of that dtype where the input begins with 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(4, dtype=torch.uint8).view(torch.bits8) if x[0] == 1 else x


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.odd = nn.Identity(), Odd()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.odd(x)
        return self.plain(x)


@pytest.mark.usefixtures("unknown_dtype")
@pytest.mark.parametrize("keep", ["all", "last"])
def test_a_value_that_cannot_be_stored_is_left_out(tmp_path: Path, keep: str) -> None:
    net, place = Mixed(), tmp_path / "run.hookline"
    said = r"a value is left out: odd:output, .* of dtype bits8 cannot be stored\. Cast it before it is kept"
    with pytest.warns(RuntimeWarning, match=said) as warned, hookline.record(net, keep=keep, to=place) as rec:
        for first in (0, 1, 1, 0, 1):
            net(torch.full((2,), float(first)))
    assert len(warned) == 1
    for found in (rec, hookline.load(place)):
        assert len(found["plain"].calls) == len(found[""].calls) == (5 if keep == "all" else 1)
        if keep == "all":
            assert [(event.step, event.value.tolist()) for event in found if event.path == "odd"] == [
                (0, [0.0, 0.0]),
                (3, [0.0, 0.0]),
            ]
            fate = found.coverage["odd:output"]
            assert fate[:3] == ("odd:output", "captured", 2)
            assert fate.reason.startswith("3 values left out: odd:output, call 0 of step 1: a tensor of dtype bits8")
        assert found.coverage["plain:output"] == ("plain:output", "captured", 5, "")
    assert store.verify(place).problems == []


@pytest.mark.usefixtures("unknown_dtype")
def test_a_site_without_any_value_that_can_be_stored_was_not_captured(tmp_path: Path) -> None:
    net, place = Mixed(), tmp_path / "run.hookline"
    said = "a value is left out: odd:output"
    with pytest.warns(RuntimeWarning, match=said), hookline.record(net, "odd", to=place) as rec:
        net(torch.ones(2))
        rec.flush()
        assert len(rec) == 0 and rec.coverage["odd:output"].status == "bypassed"
    assert rec.coverage["odd:output"].reason.startswith("1 value left out: odd:output, call 0 of step 0: a tensor of")
    with (
        pytest.warns(RuntimeWarning, match=said),
        pytest.raises(CoverageError, match="1 value left out: odd:output"),
        hookline.record(net, "odd", to=tmp_path / "strict.hookline", strict=True),
    ):
        net(torch.ones(2))


@pytest.mark.usefixtures("unknown_dtype")
def test_in_memory_every_value_is_kept() -> None:
    net = Mixed()
    with hookline.record(net) as rec:
        net(torch.ones(2))
    assert rec["odd"].output.dtype == torch.bits8 and rec.coverage["odd:output"].reason == ""


def test_the_rows_of_others_are_never_left_out(tmp_path: Path) -> None:
    """A batch that cannot be stored is an error, or its values would name nothing."""
    batch = Event(0, 0, "", "batch", 0, 0, {"ids": object()})
    event = Event(1, 0, "a", "output", 0, 0, torch.ones(2), batch=batch, kinds=("samples",))
    with Writer(tmp_path / "run.hookline", info={}, modules={}) as writer:
        with pytest.raises(ArgumentError, match="cannot be stored"):
            writer.append([event], lambda event, error: None)
        assert writer.append([Event(2, 0, "a", "output", 0, 0, object())], lambda event, error: None) == []
    assert len(hookline.load(tmp_path / "run.hookline")) == 0


# ---------------------------------------------------------------- what has to be known of how it was written


def shown(place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["show", str(place)]) == 0
    return capsys.readouterr().out


def test_an_unfinished_line_and_waits_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net, quiet, place = model(), tmp_path / "quiet.hookline", tmp_path / "run.hookline"
    with hookline.record(net, to=quiet):
        net(torch.randn(5, 10))
    assert "waited" not in shown(quiet, capsys) and "unfinished" not in shown(quiet, capsys)
    with hookline.record(net, budget=VALUE, to=place) as rec:
        for _ in range(3):
            net(torch.randn(5, 10))
    waits, seconds = json.loads(next(place.glob("w*/end.json")).read_text())["waits"], rec.pressure.seconds
    assert waits > 1
    said = f"the model waited {waits} times for the disk, {seconds:.1f} s in all"
    assert str(rec).splitlines()[-1] == shown(place, capsys).splitlines()[-1] == said
    (manifest,) = place.glob("w*/manifest.jsonl")
    with manifest.open("ab") as file:
        file.write(b'{"shards": [')
    torn = f"unfinished last line, not read: {manifest.parent.name}/manifest.jsonl (its writer was killed, or is at it)"
    assert shown(place, capsys).splitlines()[-2:] == [torn, said]
    hookline.load(place).save(tmp_path / "copy.hookline")
    assert "unfinished" not in shown(tmp_path / "copy.hookline", capsys)


def test_a_recording_without_values_is_shown_with_its_unfinished_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Writer(tmp_path / "run.hookline", info={"waits": "many", "waited_s": None}, modules={}) as writer:
        (writer.part / "manifest.jsonl").write_bytes(b"{")
    text = shown(tmp_path / "run.hookline", capsys)
    assert text.startswith("Nothing was recorded") and "\nunfinished last line, not read: w00000-" in text


@pytest.mark.parametrize("text", ["", "one", "-1", "1.5", "\u0661"])
def test_a_rank_that_is_no_number(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", text)
    with pytest.raises(OptionError, match=r"^the environment has RANK=.*; wanted a whole number from 0 on\."):
        hookline.record(nn.Linear(2, 2), to=tmp_path / "run")


@pytest.mark.parametrize("first", [0, 1])
def test_any_process_may_be_the_first(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    for rank in (first, 1 - first):
        monkeypatch.setenv("RANK", str(rank))
        with hookline.record(model, to=tmp_path / "run"):
            model(torch.full((1, 2), float(rank)))
    assert hookline.load(tmp_path / "run").writers == [0, 1]
    for rank in (0, 1):  # neither takes the place of what it has recorded
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(OptionError, match="a recording of that name exists"):
            hookline.record(model, to=tmp_path / "run")
