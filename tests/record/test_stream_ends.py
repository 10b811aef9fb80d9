"""Recording to disk: how steps share shards, what is whole after an end of any kind, and what does not hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import hookline
from hookline.errors import HooklineError, QuotaError
from hookline.record import stream
from hookline.record.event import Event
from hookline.record.groups import Groups
from hookline.record.held import Held, complete, sharing
from hookline.store import Staged


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("w*/*.safetensors"))


# ---------------------------------------------------------------- shards


def test_small_steps_share_a_shard(tmp_path: Path) -> None:
    net, begun = model(), time.monotonic()
    with hookline.record(net, to=tmp_path / "run") as rec, torch.no_grad():
        for step in range(2000):
            net(torch.full((1, 4), float(step)))
        rec.flush()
    assert len(shards(tmp_path / "run")) <= 3 + 2 * (time.monotonic() - begun), "one a second, and one for each flush"
    rows = hookline.load(tmp_path / "run").rows("0:output")
    assert len(rows) == 2000
    with torch.no_grad():
        assert torch.equal(rows[1234], net[0](torch.full((1, 4), 1234.0))[0])


def held(step: int, nbytes: int, staged: bool = False) -> Held:
    found = Held(step, 0)
    found.nbytes = nbytes
    if staged:
        found.staged = type("Full", (Staged,), {"nbytes": 10})()
    return found


def steps_of(groups: list[list[Held]]) -> list[list[int]]:
    return [[one.step for one in some] for some in groups]


def test_which_steps_share_one() -> None:
    over = [held(0, 40), held(1, 40), held(2, 40), held(3, 500), held(4, 1), held(5, 1, staged=True), held(6, 1)]
    assert steps_of([*sharing(over, {}, 100)]) == [[0, 1], [2], [3], [4], [5], [6]]
    together = dict.fromkeys((1, 2, 3), frozenset((1, 2, 3)))
    assert steps_of([*sharing(over, together, 100)]) == [[0, 1, 2, 3], [4], [5], [6]]
    assert [*sharing([], {}, 100)] == []


def test_steps_that_belong_together_are_left_out_together() -> None:
    one, two, three, four = (held(step, 1) for step in range(4))
    three.staged = two.staged  # they share a shard
    together = dict.fromkeys((2, 9), frozenset((2, 9)))
    assert complete([one, two, three, four], together, {0, 1, 2, 3, 9}) == [one, four]
    assert complete([one, two, three, four], together, {0, 1, 2, 3}) == [one, two, three, four]


def test_steps_of_a_batch_are_over_with_it() -> None:
    told: list[tuple[int, ...]] = []
    groups, a, b = Groups(lambda *steps: told.append(steps)), object(), object()
    groups.step_over(0)
    groups.begin(a, 1)
    groups.step_over(1)
    groups.begin(a, 2)
    assert told == [(0,)]
    groups.batch_over(a)
    assert told == [(0,)], "its last step goes on, with gradients"
    groups.begin(b, 3)
    groups.step_over(2)
    assert told == [(0,), (1, 2)]
    groups.begin(a, 3)  # one step in two batches
    groups.step_over(3)
    groups.batch_over(b)
    assert told == [(0,), (1, 2)]
    groups.batch_over(a)
    assert told[2:] == [(3,)]
    groups.batch_over(a)
    groups.begin(None, 4)
    groups.step_over(4)
    assert told[3:] == [(4,)]


# ---------------------------------------------------------------- ends

TWO_FORWARDS = """
import os, sys, time
import torch
from torch import nn
import hookline

net = nn.Linear(4, 4)
with hookline.record(net, to=sys.argv[1], resume=True) as rec, torch.no_grad():
    for sample in range(3):
        with rec.batch(ids=[sample]) as wanted:
            if wanted:
                net(torch.full((1, 4), float(sample)))
                if len(sys.argv) > 2 and sample == 1:
                    time.sleep(2.5)  # longer than a step that is over waits
                    os.kill(os.getpid(), 9)
                net(torch.full((1, 4), sample + 0.5))
"""


def test_a_batch_that_a_kill_has_cut_is_recorded_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWO_FORWARDS, str(tmp_path / "run")]
    killed = subprocess.run([*command, "kill"], check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    rows = hookline.load(tmp_path / "run").rows(":output")
    assert rows.identity()["id"].tolist() == [0, 0], "nothing of a batch that has not ended"
    subprocess.run(command, check=True, timeout=120)
    assert hookline.load(tmp_path / "run").rows(":output").identity()["id"].tolist() == [0, 0, 1, 1, 2, 2]


INTERRUPTED = """
import sys, threading, time, signal, os
import torch
from torch import nn
import hookline
from hookline.store import writer

real = writer.Writer.stage
def slow(self, *args):
    found = real(self, *args)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(1)
    return found
writer.Writer.stage = slow

net = nn.Linear(4, 4)
try:
    with hookline.record(net, to=sys.argv[1]), torch.no_grad():
        for step in range(5):
            net(torch.full((1, 4), float(step)))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_ctrl_c_at_the_end_waits_until_all_is_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "run")]
    done = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
    rec = hookline.load(tmp_path / "run")
    assert list(rec.steps) == [0, 1, 2, 3, 4]
    assert rec.coverage and [*tmp_path.glob("run/w*/end.json")], "the coverage is written as well"


def test_dropped_values_are_not_called_captured(tmp_path: Path) -> None:
    """A step larger than half the budget is staged; then the quota is reached before it is whole."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    size = 64 * 64 * 4
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        options = {"budget": 2 * size, "quota": 4 * size, "on_error": "warn"}
        with hookline.record(net, "*", to=tmp_path / "run", **options) as rec:
            net(torch.randn(64, 64))
    assert any("Dropped, of steps that are not whole: " in str(one.message) for one in told)
    written = hookline.load(tmp_path / "run")
    assert len(written) == 0
    for found in (rec.coverage, written.coverage):
        assert sum(fate.calls for fate in found.values()) == 0
        assert "left out" in str(found)


# ---------------------------------------------------------------- what does not hang


def test_a_budget_counts_what_an_event_takes_besides_its_tensors(tmp_path: Path) -> None:
    net = nn.Linear(1, 1)
    with hookline.record(net, to=tmp_path / "run", budget="100kB") as rec, torch.no_grad():
        for _ in range(1000):
            net(torch.ones(1, 1))
            assert sum(isinstance(event, Event) for event in rec.log.in_memory) <= 100
    assert rec.pressure.waits > 0
    assert len(hookline.load(tmp_path / "run")) == 1000


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_without_a_thread_the_recording_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: str) -> None:
    real = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "hookline-writer":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    net = model()

    def run() -> None:
        with hookline.record(net, to=tmp_path / "run", budget=100, on_error=on_error), torch.no_grad():
            for _ in range(5):
                net(torch.ones(1, 4))

    if on_error == "raise":
        with pytest.raises(HooklineError, match="no thread can be started to write it"):
            run()
    else:
        with pytest.warns(RuntimeWarning, match="no thread can be started to write it"):
            run()
    assert len(hookline.load(tmp_path / "run")) == 0


def test_a_thread_that_dies_early_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("no cores")

    monkeypatch.setattr(stream, "use_one_core", fail)
    net = model()
    with pytest.raises(ValueError, match="no cores"), hookline.record(net, to=tmp_path / "run") as rec:
        net(torch.ones(1, 4))
        rec.flush()


def test_room_is_given_back_when_a_value_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hookline.record import recorder

    net, real, fails = nn.Linear(4, 4), recorder.Event, [True]

    def event(*args: object, **options: object) -> object:
        if fails[0]:
            raise MemoryError("none left")
        return real(*args, **options)

    monkeypatch.setattr(recorder, "Event", event)
    with hookline.record(net, to=tmp_path / "run", budget=2000), torch.no_grad():
        for _ in range(5):
            with pytest.raises(MemoryError):
                net(torch.ones(1, 4))
        fails[0] = False
        net(torch.ones(1, 4))
    assert len(hookline.load(tmp_path / "run")) == 1


def test_a_quota_in_the_middle_keeps_the_steps_before(tmp_path: Path) -> None:
    net = nn.Linear(64, 64)
    with pytest.raises(QuotaError), hookline.record(net, to=tmp_path / "run", quota=100_000), torch.no_grad():
        for _ in range(20):
            net(torch.randn(64, 64))
    steps = list(hookline.load(tmp_path / "run").steps)
    assert steps == [*range(len(steps))] and 3 <= len(steps) <= 6
