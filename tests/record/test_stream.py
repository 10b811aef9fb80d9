"""Recording to disk while the model runs: whole steps, bounded memory, nothing lost."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookline
from hookline.errors import BudgetError, FormatError, OptionError, QuotaError, SiteError
from hookline.record.event import Event
from hookline.sites import PORTS
from hookline.store import StoredEvent, Writer, verify


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(inplace=True), nn.Linear(10, 10))


VALUE = 5 * 10 * 4
"""Bytes of an output."""


def keys(rec: Any) -> list[tuple[Any, ...]]:
    return [(event.order, event.step, event.path, event.port, event.call, event.backward) for event in rec]


def in_memory(rec: hookline.Recording) -> int:
    return sum(event.nbytes for event in rec.log.in_memory if not isinstance(event, StoredEvent))


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


# ---------------------------------------------------------------- when the disk refuses


def failing_after(good: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first commits succeed, the next one does not."""
    commit, left = Writer.commit, [good]

    def refuse(self: Writer, several: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise FormatError("the disk is full")
        commit(self, several)

    monkeypatch.setattr(Writer, "commit", refuse)


def test_a_disk_that_refuses_ends_the_recording_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    failing_after(1, monkeypatch)
    with (
        pytest.raises(FormatError, match="the disk is full") as caught,
        hookline.record(net, to=tmp_path / "run.hookline") as rec,
    ):
        net(torch.randn(5, 10))
        rec.flush()
        net(torch.randn(5, 10))
        rec.flush()
    assert "what was committed before can be read" in str(getattr(caught.value, "__notes__", caught.value))
    assert len(hookline.load(tmp_path / "run.hookline")) == 4
    assert [event.step for event in rec][:4] == [0] * 4


def test_a_disk_that_refuses_lets_the_model_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = model(), torch.randn(5, 10)
    bare = net(x)
    failing_after(1, monkeypatch)
    with hookline.record(net, to=tmp_path / "run.hookline", on_error="warn") as rec:
        net(x)
        rec.flush()
        net(x)
        with pytest.warns(RuntimeWarning, match="the disk is full The recording ended here"):
            rec.flush()
        for _ in range(3):
            assert torch.equal(net(x), bare)
    assert len(hookline.load(tmp_path / "run.hookline")) == 4


def test_a_folder_that_is_deleted_meanwhile(tmp_path: Path) -> None:
    net = model()
    said = r"run\.hookline: the recording cannot be written \(No such file"
    with pytest.raises(FormatError, match=said), hookline.record(net, to=tmp_path / "run.hookline") as rec:
        net(torch.randn(5, 10))
        rec.flush()
        shutil.rmtree(tmp_path / "run.hookline")
        net(torch.randn(5, 10))
        rec.flush()


def test_a_manifest_that_is_deleted_is_noticed_without_shards(tmp_path: Path) -> None:
    """The open file could still be written to, and nobody would ever read it."""
    with Writer(tmp_path / "run", info={}, modules={}) as writer:
        (tmp_path / "run").rename(tmp_path / "other")
        with pytest.raises(FormatError, match="cannot be written"):
            writer.append([Event(0, 0, "a", "output", 0, 0, None)])


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_quota_ends_with_all_whole_steps_before(tmp_path: Path, on_error: str) -> None:
    net, x, quota = model(), torch.randn(50, 10), 40_000
    place = tmp_path / "run.hookline"

    def run() -> None:
        with hookline.record(net, to=place, quota=quota, on_error=on_error, budget=9_000) as rec:
            for _ in range(20):
                net(x)
                rec.flush()

    if on_error == "raise":
        with pytest.raises(QuotaError, match=r"the quota of 40,000 bytes is reached: .* Raise quota="):
            run()
    else:
        with pytest.warns(RuntimeWarning, match="the quota of 40,000 bytes is reached"):
            run()
    loaded = hookline.load(place)
    steps = list(loaded.steps)
    assert steps == list(range(len(steps))) and 2 <= len(steps) < 20
    assert all(len(loaded.steps[step]) == 4 for step in steps)
    used = sum(path.stat().st_size for path in place.glob("w*/*") if path.name != "end.json")
    assert used <= quota < used + 3 * used // len(steps)
    assert verify(place).problems == []
    named = {
        shard for path in place.glob("w*/manifest.jsonl") for shard in re.findall(r"\d{6}\.safe", path.read_text())
    }
    assert len(list(place.glob("w*/*.safetensors"))) == len(named)


# ---------------------------------------------------------------- steps


def test_a_reader_sees_only_whole_steps(tmp_path: Path) -> None:
    """Each step is larger than the budget, so that its shards are written before it is over."""
    net, x, place = model(), torch.randn(5, 10), tmp_path / "run.hookline"
    stop, seen, wrong = threading.Event(), set[int](), list[Any]()

    def look() -> None:
        while not stop.is_set():
            counts = Counter(event.step for event in hookline.load(place))
            seen.add(len(counts))
            wrong.extend((step, count) for step, count in counts.items() if count != 16)

    with hookline.record(net, ports=PORTS, budget=2 * VALUE, to=place) as rec:
        reader = threading.Thread(target=look)
        reader.start()
        for _ in range(40):
            net(x).sum().backward()
        rec.flush()
        stop.set()
        reader.join()
    assert not wrong and len(seen) > 2
    assert Counter(event.step for event in hookline.load(place)) == dict.fromkeys(range(40), 16)
    assert rec.pressure.waits > 0 and rec.pressure.seconds > 0
    assert hookline.load(place).pressure.waits == rec.pressure.waits


def test_what_is_flushed_can_be_read_at_once(tmp_path: Path) -> None:
    net, place = model(), tmp_path / "run.hookline"
    with hookline.record(net, ports=("output", "grad_output"), to=place) as rec:
        for step in range(5):
            net(torch.randn(5, 10)).sum().backward()
            rec.flush()
            assert list(hookline.load(place).steps) == list(range(step + 1))
            assert len(hookline.load(place)) == 8 * (step + 1)


def test_steps_are_on_disk_without_being_asked_for(tmp_path: Path) -> None:
    net, place = model(), tmp_path / "run.hookline"
    with hookline.record(net, to=place):
        net(torch.randn(5, 10))
        end = time.monotonic() + 20
        while not len(hookline.load(place)) and time.monotonic() < end:
            time.sleep(0.05)
        assert len(hookline.load(place)) == 4


@pytest.mark.parametrize("to", [True, False])
def test_steps_by_hand(tmp_path: Path, to: bool) -> None:
    net = model()
    where = {"to": tmp_path / "run.hookline"} if to else {}
    with hookline.record(net, "0", steps="manual", **where) as rec:
        for _ in range(3):
            for _ in range(2):
                net(torch.randn(5, 10))
            rec.next_step()
    assert [(event.step, event.call) for event in rec] == [(step, call) for step in range(3) for call in range(2)]


def test_a_mark_at_the_head_or_the_tail_of_a_loop_changes_no_number(tmp_path: Path) -> None:
    net = model()
    for place in ("head", "tail", "none"):
        with hookline.record(net, "0") as rec:
            for _ in range(3):
                if place == "head":
                    rec.next_step()
                net(torch.randn(5, 10))
                if place == "tail":
                    rec.next_step()
                    net[0](torch.randn(5, 10))  # belongs to the step that it begins
        found = [event.step for event in rec]
        assert found == ([0, 1, 1, 2, 2, 3] if place == "tail" else [0, 1, 2])


def test_a_quota_counts_what_earlier_runs_have_written(tmp_path: Path) -> None:
    net, x, place = model(), torch.randn(50, 10), tmp_path / "run.hookline"
    ended = 0
    for run in range(6):
        try:
            with hookline.record(net, to=place, quota=60_000, resume=True) as rec:
                for _ in range(3):
                    net(x)
                    rec.flush()
        except QuotaError as error:
            ended += 1
            assert run > 0, "the first run has room"
            used = int(re.findall(r"([\d,]+) are used", str(error))[0].replace(",", ""))
            assert used > 30_000, "what the runs before have written counts"
            assert "of them by earlier runs, and" in str(error) and "another folder" in str(error)
    assert ended >= 3
    assert sum(path.stat().st_size for path in place.glob("w*/*") if path.name != "end.json") <= 60_000
    assert list(hookline.load(place).steps) == list(range(len(hookline.load(place).steps)))


def test_a_resume_with_another_model_says_what_differs(tmp_path: Path) -> None:
    with hookline.record(model(), to=tmp_path / "run"):
        pass
    other = model()
    other[0] = nn.Linear(10, 8)
    with (
        pytest.raises(OptionError, match=r"from another model: \S+ has [\d,]+ parameters there, [\d,]+ here\. Resume"),
        hookline.record(other, to=tmp_path / "run", resume=True),
    ):
        pass


def test_a_recording_of_which_nothing_is_there_yet_says_so(tmp_path: Path) -> None:
    with hookline.record(model(), to=tmp_path / "run"):
        early = hookline.load(tmp_path / "run")
        with pytest.raises(SiteError, match=r"nothing is recorded so far\. Run the model .* another process"):
            _ = early["0"].output


def test_only_a_recording_that_goes_on_has_steps_to_mark(tmp_path: Path) -> None:
    net = model()
    with hookline.record(net, "0") as rec:
        net(torch.randn(5, 10))
        with pytest.raises(OptionError, match=r"^flush\(\) needs record\(\.\.\., to="):
            rec.flush()
    with pytest.raises(OptionError, match=r"^next_step is for a recording that is going on"):
        rec.next_step()
    with pytest.raises(OptionError, match=r'^steps is "forward" or "manual", got 3'):
        hookline.record(net, steps=3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"^quota= is for a recording on disk"):
        hookline.record(net, quota="1GB")
    with pytest.raises(OptionError, match=r"^on_error= is for a recording on disk"):
        hookline.record(net, on_error="warn")
    with pytest.raises(OptionError, match=r"^on_error is"):
        hookline.record(net, to=tmp_path / "x", on_error="ignore")


def test_one_step_of_many(tmp_path: Path) -> None:
    net = model()
    with hookline.record(net, to=tmp_path / "run.hookline") as rec:
        outputs = [net(torch.randn(5, 10)).detach() for _ in range(4)]
    for found in (rec, hookline.load(tmp_path / "run.hookline")):
        assert torch.equal(found.steps[2][""].output, outputs[2])
        assert found.sites == ["(root):output", "0:output", "1:output", "2:output"]
        with pytest.raises(SiteError, match=r"no values of step 9; nearest of the recorded steps: 1, 2, 3\."):
            found.steps[9]


def test_nothing_written_is_held_in_memory(tmp_path: Path) -> None:
    net = model()
    with hookline.record(net, to=tmp_path / "run.hookline") as rec:
        for _ in range(50):
            net(torch.randn(5, 10))
        rec.flush()
        assert rec.log.in_memory == []
        assert len(rec) == 200 and len(rec["1"].calls) == 50


def test_same_bits(tmp_path: Path) -> None:
    def run(record: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.BatchNorm1d(10))
        with record(net):
            for _ in range(5):
                y = net(torch.randn(5, 10, requires_grad=True))
                y.square().sum().backward()
        return [y.detach(), *(p.grad for p in net.parameters()), *net.buffers(), torch.get_rng_state()]

    bare = run(lambda net: contextlib.nullcontext())
    kept = run(lambda net: hookline.record(net, ports=PORTS, to=tmp_path / "run.hookline", budget=500))
    assert all(torch.equal(one, two) for one, two in zip(bare, kept, strict=True))


# ---------------------------------------------------------------- kills, forks, resume

KILLED = """
    import os, signal, sys, torch, hookline
    net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    with hookline.record(net, to=sys.argv[1], budget=2000) as rec:
        for step in range(1000):
            net(torch.full((100,), float(step)))
            if step % 7 == 0:
                rec.flush()
                print(step, flush=True)
"""


def test_what_was_flushed_survives_a_kill(tmp_path: Path) -> None:
    place = tmp_path / "run.hookline"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(5)][-1]
        process.kill()
    loaded = hookline.load(place)
    steps = list(loaded.steps)
    assert steps == list(range(len(steps))) and len(steps) > acknowledged
    for event in loaded:
        assert torch.equal(event.value, torch.full((100,), float(event.step)))
    assert Counter(event.step for event in loaded) == dict.fromkeys(steps, 3)

    net = nn.Sequential(nn.Identity(), nn.Identity())
    with hookline.record(net, to=place, resume=True) as rec:
        assert rec.first_step == len(steps)
        for step in range(rec.first_step, rec.first_step + 3):
            net(torch.full((100,), float(step)))
    both = hookline.load(place)
    assert Counter(event.step for event in both) == dict.fromkeys(range(len(steps) + 3), 3)
    assert [event.value[0].item() for event in both] == [float(s) for s in range(len(steps) + 3) for _ in range(3)]
    assert [event.order for event in both] == sorted({event.order for event in both})
    assert len(rec) == len(both)


def test_resume_begins_where_there_is_nothing_and_refuses_what_is_other(tmp_path: Path) -> None:
    place = tmp_path / "run.hookline"
    with hookline.record(model(), "0", to=place, resume=True) as rec:
        assert rec.first_step == 0
    with pytest.raises(OptionError, match=r"was recorded with other sites: \['0:output'\] there"):
        hookline.record(model(), "1", to=place, resume=True).__enter__()
    with pytest.raises(OptionError, match="was recorded from another model: 0 has 110 parameters there, 12 here"):
        hookline.record(nn.Sequential(nn.Linear(3, 3)), "0", to=place, resume=True).__enter__()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_records_nothing_and_does_not_wait(tmp_path: Path) -> None:
    net, x = model(), torch.randn(5, 10)
    with hookline.record(net, to=tmp_path / "run.hookline", budget=VALUE) as rec:
        net(x)
        child = os.fork()
        if child == 0:
            net(x)
            try:
                rec.flush()
            except OptionError as error:
                os._exit(7 if str(error).startswith("flush() in a forked child: ") else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        net(x)
    assert list(rec.steps) == [0, 1] and len(hookline.load(tmp_path / "run.hookline")) == 8


def test_ranks_write_into_one_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, place, outputs = model(), tmp_path / "run.hookline", []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with hookline.record(net, to=place) as rec:
            outputs.append([net(torch.randn(5, 10)).detach() for _ in range(3)])
        assert len(rec) == 12
    loaded = hookline.load(place)
    assert loaded.writers == [0, 1] and len(loaded[""].calls) == 6
    for rank in range(2):
        part = loaded.select(writers=rank)
        assert all(torch.equal(c.output, y) for c, y in zip(part[""].calls, outputs[rank], strict=True))
    assert loaded.coverage["0:output"].calls == 6 and loaded.coverage.complete
    assert torch.equal(
        loaded.rows("(root):output")[:], torch.cat([y for pair in zip(*outputs, strict=True) for y in pair])
    )
    assert loaded.rows("(root):output").place(7).writer == 1
    with pytest.raises(OptionError, match="exists"):
        hookline.record(net, to=place)


def test_what_does_not_leave_waits_for_the_interpreter(tmp_path: Path) -> None:
    code = """
        import sys, torch, hookline
        net = torch.nn.Sequential(torch.nn.Identity())
        recorder = hookline.record(net, to=sys.argv[1])
        recorder.__enter__()
        net(torch.ones(3))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "run")], check=True, timeout=120)
    assert len(hookline.load(tmp_path / "run")) == 2
