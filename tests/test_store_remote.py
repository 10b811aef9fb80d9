"""Recordings on an object store: against a server that speaks S3, in a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hookline
from hookline import store
from hookline.errors import FormatError, HooklineError, OptionError, QuotaError
from hookline.launch.options import Options
from hookline.record.event import Event
from hookline.store import format as layout
from hookline.store import remote, remote_shard, remote_writer, strict_json
from hookline.store.remote import Remote

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto.server")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals")

BUCKET = "s3://runs"


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        # tests of other modules may come in between, and then another server
        remote._file_systems.clear()
        s3fs.S3FileSystem.clear_instance_cache()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until it has answered once: the first request imports what speaks S3, which takes its time on a new machine."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        time.sleep(0.05)
    answer = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    answer.request("GET", "/")
    assert answer.getresponse().status < 500, "the server did not start"


@pytest.fixture(autouse=True)
def credentials(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server,
    }.items():
        monkeypatch.setenv(name, value)
    with contextlib.suppress(FileExistsError):
        remote._file_system(BUCKET).mkdir("runs")
    yield
    remote_shard.recent.forget()


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"{BUCKET}/{request.node.name}/run.hookline".replace("[", "-").replace("]", "")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


def run(made: nn.Module, steps: range, **options: Any) -> Any:
    with torch.no_grad(), hookline.record(made, **options) as rec:
        for step in steps:
            made(torch.full((3, 4), float(step)))
    return rec


def event(order: int, size: int = 4) -> Event:
    return Event(order, order, "a", "output", 0, 0, torch.full((size,), float(order)))


def objects(url: str) -> dict[str, bytes]:
    files = remote._file_system(url)
    return {name: files.cat_file(name) for name in files.find(url)}


def same(one: Any, other: Any) -> None:
    assert [(e.order, e.step, e.path, e.port) for e in one] == [(e.order, e.step, e.path, e.port) for e in other]
    for mine, theirs in zip(one, other, strict=True):
        assert mine.value.dtype == theirs.value.dtype
        assert torch.equal(mine.value, theirs.value)


# ---------------------------------------------------------------- the same as on a disk


def test_it_reads_as_the_one_on_disk(url: str, tmp_path: Path) -> None:
    run(model(), range(4), to=url)
    run(model(), range(4), to=tmp_path / "run.hookline")
    local = hookline.load(tmp_path / "run.hookline")
    same(hookline.load(url), local)
    assert store.verify(url).problems == []
    local.save(f"{url}.saved")
    same(hookline.load(f"{url}.saved"), local)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.int64])
def test_every_bit_comes_back(dtype: torch.dtype, url: str) -> None:
    values = [torch.randint(0, 2, (3, 5)).to(dtype), torch.empty(0, 3, dtype=dtype), torch.ones((), dtype=dtype)]
    events = [Event(order, 0, "a", "output", order, 0, value) for order, value in enumerate(values)]
    store.save(url, info={}, modules={}, events=events)
    for found, value in zip(store.open_recording(url).events, values, strict=True):
        assert found.value.dtype == dtype
        assert found.value.shape == value.shape
        assert found.value.contiguous().view(-1).view(torch.uint8).tolist() == value.view(-1).view(torch.uint8).tolist()


def test_a_value_is_memory_of_its_own(url: str) -> None:
    store.save(url, info={}, modules={}, events=[event(1)])
    (found,) = store.open_recording(url).events
    found.value.zero_()
    assert found.value.tolist() == [1.0] * 4


def test_a_copy_on_disk_is_a_recording(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the manifest was cut into several."""
    monkeypatch.setattr(remote_writer, "LONGEST", 1000)
    with store.Writer(url, info={}, modules={}) as writer:
        for order in range(12):
            writer.append([event(order)])
    names = sorted(name.rpartition("/")[2] for name in objects(url) if "manifest" in name)
    assert names[:2] == ["manifest-000001.jsonl", "manifest-000002.jsonl"]
    copy = tmp_path / "run.hookline"
    for name, data in objects(url).items():
        place = copy / name.partition("/run.hookline/")[2]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    for found in (url, copy):
        assert [one.value[0].item() for one in store.open_recording(found).events] == [*range(12)]
        assert store.verify(found).problems == []
    done = store.repair(copy, tmp_path / "new.hookline")
    assert (done.commits, done.lost) == (12, [])
    same(store.open_recording(tmp_path / "new.hookline").events, store.open_recording(url).events)
    next(copy.glob("w*/manifest-000001.jsonl")).unlink()
    with pytest.raises(FormatError, match=r"manifest-000001\.jsonl: this part of the recording is missing"):
        store.open_recording(copy)
    assert "manifest-000001.jsonl: this part of the recording is missing" in store.verify(copy).problems[0]


def test_the_commands(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    from hookline.cli.main import main

    run(model(), range(2), to=url)
    assert main(["verify", url]) == 0
    assert "no problem found" in capsys.readouterr().out
    assert main(["show", url]) == 0
    assert "Sequential" in capsys.readouterr().out
    assert main(["repair", url, "-o", "new"]) == 2
    assert "works on a disk only" in capsys.readouterr().err


# ---------------------------------------------------------------- writers


def test_several_writers(url: str) -> None:
    script = (
        "import sys, torch; from hookline import store; from hookline.record.event import Event\n"
        "number = int(sys.argv[2])\n"
        "with store.Writer(sys.argv[1], info={}, modules={}, writer=number) as writer:\n"
        "    for step in range(3):\n"
        "        writer.append([Event(step, step, 'a', 'output', 0, 0, torch.tensor([float(number)]))])\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, url, str(number)]) for number in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    found = sorted((e.writer, e.step, e.value.item()) for e in store.open_recording(url).events)
    assert found == [(number, step, float(number)) for number in range(2) for step in range(3)]
    with pytest.raises(OptionError, match="a recording of that name exists"):
        store.Writer(url, info={}, modules={}, writer=1)


def test_a_reader_during_the_run_sees_whole_steps(url: str) -> None:
    made, seen = model(), []
    with torch.no_grad(), hookline.record(made, to=url) as rec:
        for step in range(4):
            made(torch.full((3, 4), float(step)))
            if step % 2:
                rec.flush()
            found = [e.step for e in store.open_recording(url).events]
            seen.append(len(set(found)))
            assert all(found.count(one) == 4 for one in set(found))
    assert seen[1] == 2
    assert seen[3] == 4


def test_after_a_kill_every_acknowledged_step_is_there(url: str) -> None:
    script = (
        "import sys, torch; from hookline import store; from hookline.record.event import Event\n"
        "writer = store.Writer(sys.argv[1], info={}, modules={})\n"
        "for step in range(10000):\n"
        "    writer.append([Event(2 * step + k, step, 'a', 'output', k, 0, torch.tensor([step, k])) for k in (0, 1)])\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, url], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(5):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    told = 5 + len(process.stdout.readlines())
    process.stdout.close()
    process.wait()
    found = [(e.step, e.value.tolist()) for e in store.open_recording(url).events]
    steps = len(found) // 2
    assert told <= steps <= told + 1
    assert found == [(step, [step, k]) for step in range(steps) for k in (0, 1)]
    assert store.verify(url).problems == []


def test_resume(url: str, tmp_path: Path) -> None:
    run(model(), range(2), to=url)
    run(model(), range(2, 4), to=url, resume=True)
    run(model(), range(4), to=tmp_path / "run.hookline")
    same(hookline.load(url), hookline.load(tmp_path / "run.hookline"))


def test_a_commit_whose_answer_is_lost(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the manifest arrived or not, what it may name stays, and the next commit counts alone."""
    put = Remote.put

    def lose(place: Remote, data: bytes, *, new: bool = False) -> None:
        put(place, data, new=new)
        if "manifest" in place.name:
            raise FormatError("no answer")

    with store.Writer(url, info={}, modules={}) as writer:
        writer.append([event(0)])
        with monkeypatch.context() as patch, pytest.raises(FormatError, match="no answer"):
            patch.setattr(Remote, "put", lose)
            writer.append([event(1)])
        assert [e.order for e in store.open_recording(url).events] == [0]
        writer.append([event(2)])
    assert [e.order for e in store.open_recording(url).events] == [0, 2]
    assert store.verify(url).problems == []


def test_the_quota(url: str) -> None:
    with (
        store.Writer(url, info={}, modules={}, quota=20_000) as writer,
        pytest.raises(QuotaError, match="the quota of"),
    ):
        for order in range(100):
            writer.append([event(order, 1000)])
    found = [e.order for e in store.open_recording(url).events]
    assert found == [*range(len(found))]
    with (
        store.Writer(url, info={}, modules={}, quota=20_000, again=True) as writer,
        pytest.raises(QuotaError, match="the quota of"),
    ):
        for order in range(100, 103):
            writer.append([event(order, 1000)])
    assert 0 < sum(map(len, objects(url).values())) <= 20_000


def test_a_failed_save_leaves_nothing(url: str) -> None:
    def events() -> Iterator[Event]:
        yield event(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(url, info={}, modules={}, events=events())
    assert objects(url) == {}


@pytest.mark.parametrize("error", [FormatError, FileExistsError], ids=["no answer", "asked again"])
def test_a_save_whose_last_answer_is_lost_is_whole(
    error: type[Exception], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``recording.json`` has arrived; a client that asks again finds it in its way."""
    put = Remote.put

    def lose(place: Remote, data: bytes, *, new: bool = False) -> None:
        put(place, data, new=new)
        if place.name == layout.HEAD:
            raise error("no answer")

    monkeypatch.setattr(Remote, "put", lose)
    told = pytest.raises(FormatError, match="with it the recording is complete")
    with told if error is FormatError else contextlib.nullcontext():
        store.save(url, info={}, modules={}, events=[event(0), event(1)])
    assert [e.value.tolist() for e in store.open_recording(url).events] == [[0.0] * 4, [1.0] * 4]
    assert store.verify(url).problems == []


def test_a_save_that_another_was_faster_than(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put = Remote.put

    def late(place: Remote, data: bytes, *, new: bool = False) -> None:
        if place.name == layout.HEAD:
            put(place, layout.dump_head({"theirs": 1}, {}))
        put(place, data, new=new)

    monkeypatch.setattr(Remote, "put", late)
    with pytest.raises(OptionError, match="a recording of that name exists"):
        store.save(url, info={}, modules={}, events=[event(0)])
    monkeypatch.undo()
    assert [name.rpartition("/")[2] for name in objects(url)] == [layout.HEAD]
    assert store.open_recording(url).info == {"theirs": 1}


def test_what_was_made_for_nothing_is_taken_back(url: str) -> None:
    """What comes next begins anew, with sites of its own; a recording that somebody has joined stays."""
    writer = store.Writer(url, info={"sites": ["a:output"]}, modules={})
    writer.take_back()
    assert objects(url) == {}
    first = store.Writer(url, info={"sites": ["b:output"]}, modules={})
    with pytest.raises(OptionError, match=r"with other sites: .*b:output.* there, .*a:output.* here"):
        store.Writer(url, info={"sites": ["a:output"]}, modules={}, writer=1)
    with store.Writer(url, info={"sites": ["b:output"]}, modules={}, writer=1) as second:
        first.take_back()
        second.append([event(0)])
    parts = store.open_recording(url)
    assert parts.info == {"sites": ["b:output"]} and [e.order for e in parts.events] == [0]


@pytest.mark.parametrize("when", ["before it is deleted", "after it is deleted"])
def test_it_is_joined_while_it_is_taken_back(when: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is second sees what the first has done, and ``recording.json`` is there in the end."""
    first, delete, put = store.Writer(url, info={"mine": 1}, modules={}), Remote.delete, Remote.put

    def join() -> None:
        with store.Writer(url, info={"mine": 1}, modules={}, writer=1) as second:
            second.append([event(0)])

    def meanwhile(place: Remote) -> None:
        if place.name == layout.HEAD:
            monkeypatch.undo()
            join()
        delete(place)

    def taken_back(place: Remote, data: bytes, *, new: bool = False) -> None:
        monkeypatch.undo()
        first.take_back()
        put(place, data, new=new)

    with monkeypatch.context():
        if when.startswith("before"):
            monkeypatch.setattr(Remote, "delete", meanwhile)
            first.take_back()
        else:
            monkeypatch.setattr(Remote, "put", taken_back)
            join()
    parts = store.open_recording(url)
    assert parts.info == {"mine": 1} and [e.order for e in parts.events] == [0]


def test_a_start_that_fails_leaves_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put = Remote.put

    def refuse(place: Remote, data: bytes, *, new: bool = False) -> None:
        if place.name == layout.MANIFEST:
            raise FormatError("refused")
        put(place, data, new=new)

    monkeypatch.setattr(Remote, "put", refuse)
    with pytest.raises(FormatError, match="refused"):
        store.Writer(url, info={}, modules={})
    assert objects(url) == {}


# ---------------------------------------------------------------- damage


def test_verify_finds_any_flipped_byte(url: str) -> None:
    store.save(url, info={}, modules={}, events=[event(1)])
    shard = next(name for name in objects(url) if name.endswith(".safetensors"))
    good = objects(url)[shard]
    for place in (len(good) - 1, 9):
        bad = bytearray(good)
        bad[place] ^= 1
        remote._file_system(url).pipe_file(shard, bytes(bad))
        assert "its checksum is" in store.verify(url).problems[0]


@pytest.mark.parametrize("size", [1 << 20, 1 << 62])
def test_a_hostile_size_takes_no_memory(size: int, url: str) -> None:
    store.save(url, info={}, modules={}, events=[event(1)])
    name = next(name for name in objects(url) if "manifest" in name)
    line = strict_json.unseal(objects(url)[name], name)
    line["shards"][0]["bytes"] = size
    line["events"][0]["tensors"][0]["shape"] = [size // 8]
    text = strict_json.seal(strict_json.COMPACT.encode({key: line[key] for key in ("shards", "events")}))
    remote._file_system(url).pipe_file(name, text)
    with pytest.raises(FormatError, match=r"000000\.safetensors: it has \d+ bytes, its manifest says"):
        store.open_recording(url)


def test_a_missing_shard(url: str) -> None:
    store.save(url, info={}, modules={}, events=[event(1)])
    remote._file_system(url).rm_file(next(name for name in objects(url) if name.endswith(".safetensors")))
    with pytest.raises(FormatError, match="this part of the recording is missing"):
        store.open_recording(url)


# ---------------------------------------------------------------- rows


def test_a_dataset_through_workers(url: str, tmp_path: Path) -> None:
    run(model(), range(6), to=url)
    run(model(), range(6), to=tmp_path / "run.hookline")
    found = []
    for place in (url, tmp_path / "run.hookline"):
        rows = hookline.load(place).rows("2:output")
        assert torch.equal(rows[[0, 17, 5]], torch.stack([rows[0], rows[17], rows[5]]))
        loader = DataLoader(rows, batch_size=4, num_workers=2 if place is url else 0)
        found.append(torch.cat([*loader]))
    assert torch.equal(*found)
    assert len(found[0]) == 18


def test_requests_are_few(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    read = Remote.read
    monkeypatch.setattr(Remote, "read", lambda place, begin, end: asked.append(place) or read(place, begin, end))
    modules = {"a": store.ModuleInfo("Linear", 0)}
    store.save(url, info={}, modules=modules, events=[event(order, 1000) for order in range(5)])
    rows = hookline.load(url).rows("a:output")
    asked.clear()
    assert [rows[number].item() for number in (1, 2, 3, 4001, 4002)] == [0.0, 0.0, 0.0, 4.0, 4.0]
    assert len(asked) == 3  # the header of the shard, and two values


# ---------------------------------------------------------------- errors


def test_what_is_there_already(url: str) -> None:
    rec = run(model(), range(1), to=url)
    for attempt in (lambda: hookline.record(model(), to=url), lambda: rec.save(url)):
        with pytest.raises(OptionError, match=r"run\.hookline: a recording of that name exists"):
            attempt()
    with pytest.raises(OptionError, match="overwrite=True works on a disk only"):
        rec.save(url, overwrite=True)
    with pytest.raises(OptionError, match="export works on a disk only"):
        rec.export(f"{url}.npz", "npz")
    remote._file_system(url).pipe_file(f"{url}.other/notes.txt", b"mine")
    with pytest.raises(FormatError, match="they are not a Hookline recording"):
        rec.save(f"{url}.other")


def test_what_is_not_there(url: str) -> None:
    with pytest.raises(FormatError, match=r"run\.hookline: there is no recording of that name"):
        hookline.load(url)
    with pytest.raises(FormatError, match=r"s3://no-such-bucket/run.*its bucket does not exist.*Make the bucket first"):
        run(model(), range(1)).save("s3://no-such-bucket/run.hookline")
    with pytest.raises(OptionError, match=r"pass the path alone, without file://"):
        hookline.load("file:///tmp/run.hookline")


def test_the_store_refuses_or_is_lost(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, told in (
        (PermissionError("Access Denied"), "the store refuses .*Check the credentials"),
        (ConnectionError("gone"), "the store cannot be reached .*Check the URL, the network"),
    ):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(remote._file_system(url), "ls", fail)
            patch.setattr(remote._file_system(url), "info", fail)
            with pytest.raises(FormatError, match=f"run.hookline.*{told}"):
                hookline.load(url)
    made = model()
    with pytest.warns(RuntimeWarning, match="cannot be reached"), torch.no_grad():  # noqa: SIM117
        with hookline.record(made, to=url, on_error="warn") as rec:
            made(torch.ones(3, 4))
            rec.flush()
            monkeypatch.setattr(remote._file_system(url), "pipe_file", fail)
            made(torch.ones(3, 4))
            rec.flush()
            made(torch.ones(3, 4))
    assert [e.step for e in store.open_recording(url).events] == [0] * 4


def test_a_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_file_systems", {})
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(HooklineError, match=r'pip install "fsspec>=[^ ]+" "s3fs>='):
        hookline.load("s3://runs/x.hookline")


def test_the_names_of_manifests() -> None:
    assert layout.manifest_name(0) == layout.MANIFEST
    found = layout.LATER_MANIFEST.fullmatch(layout.manifest_name(12))
    assert found is not None
    assert int(found[1]) == 12


def test_a_script_records_on_a_disk_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"^s3://runs/x: hookline run works on a disk only"):
        Options(output="s3://runs/x")
    assert not list(tmp_path.iterdir())
