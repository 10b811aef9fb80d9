"""Scripts under a recorder, in this process: what is recorded, and that the script's world is its own."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookline
from hookline.errors import ArgumentError, FormatError, OptionError, SiteError
from hookline.hooks.roots import RootCalls
from hookline.launch import Options, run_module, run_script, session
from hookline.record import Recording

from .spoken import without_coverage

NET = """
    import sys, torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 2, 3)
            self.fc = nn.Linear(8, 3)

        def forward(self, x):
            return self.fc(self.conv1(x).flatten(1))
"""
X = "torch.ones(1, 1, 4, 4)"


class Ran:
    """A script that was run."""

    def __init__(self, status: int, folder: Path) -> None:
        self.status = status
        self.folder = folder

    @property
    def recording(self) -> Recording:
        return hookline.load(self.folder)

    @property
    def keys(self) -> list[tuple[str, str, int, int]]:
        return [(event.path, event.port, event.step, event.call) for event in self.recording]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def run(text: str, *args: str, net: bool = True, **options: Any) -> Ran:
        head = textwrap.dedent(NET) if net else ""
        Path("script.py").write_text(head + textwrap.dedent(text))
        given = Options(**{"output": "run.hookline", "overwrite": True, **options})
        return Ran(run_script("script.py", args, given), tmp_path / "run.hookline")

    return run


# ---------------------------------------------------------------- what is recorded


def test_every_output_of_the_first_step_is_recorded_by_default(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    ran = run(f"net = Net()\nfor _ in range(3):\n    out = net({X})\nprint(out.tolist())")
    assert ran.status == 0
    assert ran.keys == [("conv1", "output", 0, 0), ("fc", "output", 0, 0), ("", "output", 0, 0)]
    assert list(ran.recording.modules) == ["", "conv1", "fc"]
    printed = capfd.readouterr()
    assert torch.equal(ran.recording[""].output, torch.tensor(eval(printed.out)))
    size = sum(path.stat().st_size for path in ran.folder.rglob("*.*"))
    assert without_coverage(printed.err) == f"hookline: 3 events of 1 step -> run.hookline ({size / 1000:.1f} kB)\n"
    assert ran.recording.info["script"] == "script.py"


def test_steps_and_every_choose_steps(run: Any) -> None:
    text = f"net = Net()\nfor _ in range(7):\n    net({X})"
    assert run(text, steps=2).recording.steps == [0, 1]
    assert run(text, steps=2, every=3).recording.steps == [0, 3]
    assert run(text, steps=None, every=3).recording.steps == [0, 3, 6]
    assert run(text, steps=None).recording.steps == list(range(7))


def test_gradients_of_a_step_are_recorded_also_when_they_come_after_the_next_forward(run: Any) -> None:
    ran = run(f"net = Net()\n(net({X}) + net(2 * {X})).sum().backward()", ports=("grad_output",))
    assert {(path, step) for path, _, step, _ in ran.keys} == {("", 0), ("fc", 0), ("conv1", 0)}
    assert torch.equal(ran.recording[""].grad_output, torch.ones(1, 3))


def test_a_step_with_gradients_is_on_disk_before_the_next_one_begins(
    run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    text = f"""
        import hookline
        net = Net()
        net({X}).sum().backward()
        class Look(nn.Module):
            def forward(self, x):
                print(hookline.load("run.hookline").steps)
                return x
        net.fc = nn.Sequential(net.fc, Look())
        net({X})
        """
    ran = run(text, steps=None, sites=("conv1",), ports=("output", "grad_output"))
    assert (ran.status, ran.recording.steps, capfd.readouterr().out) == (0, [0, 1], "[0]\n")


def test_a_step_without_gradients_is_on_disk_when_its_call_ends(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    text = f"""
        import hookline
        net = Net()
        for _ in range(3):
            net({X})
            print(hookline.load("run.hookline").steps)
        """
    run(text, steps=2)
    assert capfd.readouterr().out == "[0]\n[0, 1]\n[0, 1]\n"


def test_memory_holds_one_step_only(run: Any) -> None:
    text = "net = nn.Identity()\nfor _ in range(20):\n    net(torch.ones(1000))"
    assert run(text, steps=None, budget="5kB").recording.steps == list(range(20))


def test_ports_and_sites_are_chosen(run: Any) -> None:
    text = f"net = Net()\nnet({X}).sum().backward()"
    assert run(text, sites=("fc:input", "conv*")).keys == [("conv1", "output", 0, 0), ("fc", "input", 0, 0)]
    both = run(text, sites=("fc",), ports=("output", "grad_output"))
    assert both.keys == [("fc", "output", 0, 0), ("fc", "grad_output", 0, 0)]
    assert run(text, sites=("!conv1",)).keys == [("fc", "output", 0, 0), ("", "output", 0, 0)]


def test_the_bits_of_a_training_are_the_same(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    text = f"""
        torch.manual_seed(3)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net({X} + torch.rand(1)).square().sum().backward()
            optimizer.step()
        print([p.tolist() for p in net.parameters()], torch.rand(1).item())
        """
    run(text, ports=("input", "output", "grad_input", "grad_output"), steps=2, quiet=True)
    recorded = capfd.readouterr()
    exec(textwrap.dedent(NET) + textwrap.dedent(text), {"__name__": "plain"})
    assert capfd.readouterr().out == recorded.out
    assert recorded.err == ""


# ---------------------------------------------------------------- several roots


def test_further_roots_have_the_prefix_of_their_class(run: Any) -> None:
    text = f"""
        net, a, b = Net(), nn.Linear(3, 1), nn.Linear(3, 1)
        loss = nn.MSELoss()
        out = net({X})
        loss(a(out), b(out)).backward()
        """
    ran = run(text, ports=("output", "grad_output"), sites=("(root)",))
    assert [key[:2] for key in ran.keys] == [
        ("", "output"),
        ("Linear/", "output"),
        ("Linear#2/", "output"),
        ("MSELoss/", "output"),
        ("MSELoss/", "grad_output"),
        ("Linear/", "grad_output"),
        ("Linear#2/", "grad_output"),
        ("", "grad_output"),
    ] or {key[:2] for key in ran.keys[5:7]} == {("Linear/", "grad_output"), ("Linear#2/", "grad_output")}
    assert [event.order for event in ran.recording] == list(range(8))
    assert {path: info.type_name for path, info in ran.recording.modules.items()} == {
        "": "Net",
        "Linear/": "Linear",
        "Linear#2/": "Linear",
        "MSELoss/": "MSELoss",
    }
    assert ran.recording.info["roots"] == {"": "Net", "Linear/": "Linear", "Linear#2/": "Linear", "MSELoss/": "MSELoss"}


def test_paths_below_a_further_root_and_their_aliases_have_its_prefix(run: Any) -> None:
    text = f"""
        class Twin(Net):
            def __init__(self):
                super().__init__()
                self.same = self.fc
        first, twin = Net(), Twin()
        first({X})
        twin({X})
        """
    ran = run(text)
    assert "Twin/conv1" in ran.recording.modules
    assert ran.recording.modules["Twin/fc"].aliases == ("Twin/same",)
    assert ran.recording["Twin/same"].output.shape == (1, 3)


def test_a_pattern_with_a_prefix_means_that_root_alone(run: Any) -> None:
    text = f"first, second = Net(), Net()\nfirst({X})\nsecond({X})"
    assert run(text, sites=("conv1", "Net/fc")).keys == [
        ("conv1", "output", 0, 0),
        ("Net/conv1", "output", 0, 0),
        ("Net/fc", "output", 0, 0),
    ]


def test_a_loss_that_is_made_anew_for_each_use_is_one_root(run: Any) -> None:
    text = f"""
        net = Net()
        for _ in range(4):
            nn.MSELoss()(net({X}), torch.zeros(1, 3)).backward()
        """
    ran = run(text, steps=3, ports=("output", "grad_output"))
    assert set(ran.recording.modules) == {"", "conv1", "fc", "MSELoss/"}
    losses = [key[1:3] for key in ran.keys if key[0] == "MSELoss/"]
    assert losses == [(port, step) for step in range(3) for port in ("output", "grad_output")]


def test_modules_with_parameters_are_never_taken_for_one_another(run: Any) -> None:
    ran = run(f"for _ in range(3):\n    Net()({X})", sites=("(root)",))
    assert list(ran.recording.modules) == ["", "Net/", "Net#2/"]


def test_there_is_a_limit_to_the_number_of_roots(
    run: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "MOST_ROOTS", 2)
    ran = run("nets = [nn.Linear(1, 1) for _ in range(5)]\nfor net in nets:\n    net(torch.ones(1))")
    assert list(ran.recording.modules) == ["", "Linear/"]
    assert (
        "hookline: warning: 2 modules that the script calls by themselves are recorded; 3 more are not. "
        "Choose with --sites." in capfd.readouterr().err
    )


def test_a_module_that_is_a_root_and_part_of_one_is_recorded_once_for_each_call(run: Any) -> None:
    text = f"""
        net = Net()
        net.conv1({X})
        net({X})
        net.conv1({X})
        """
    assert run(text, steps=None).keys == [
        ("", "output", 0, 0),
        ("Net/conv1", "output", 0, 0),
        ("Net/fc", "output", 0, 0),
        ("Net/", "output", 0, 0),
        ("", "output", 1, 0),
    ]


def test_a_class_that_overrides_call_is_a_root(run: Any) -> None:
    text = f"""
        class Odd(Net):
            def __call__(self, x, scale):
                return super().__call__(x * scale)
        print(Odd()({X}, 2).shape)
        """
    assert run(text, sites=("(root)", "fc")).keys == [("fc", "output", 0, 0), ("", "output", 0, 0)]


def test_threads_have_roots_of_their_own(run: Any) -> None:
    text = f"""
        import threading
        net, other = Net(), Net()
        class Slow(nn.Module):
            def forward(self, x):
                thread = threading.Thread(target=lambda: other({X}))
                thread.start()
                thread.join()
                return x
        net.fc = nn.Sequential(net.fc, Slow())
        net({X})
        """
    ran = run(text, sites=("(root)",))
    assert ran.keys == [("Net/", "output", 0, 0), ("", "output", 0, 0)]


def test_models_die_when_the_script_lets_go_of_them(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    text = f"""
        import weakref
        for _ in range(3):
            net = Net()
            net({X}).sum().backward()
            gone = weakref.ref(net)
            del net
            print(gone() is None)
        """
    run(text, ports=("output", "grad_output"))
    assert capfd.readouterr().out == "True\n" * 3


def test_nothing_stays_on_a_model_after_its_last_step(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    text = f"net = Net()\nfor _ in range(2):\n    net({X})\n    print(type(net) is Net and type(net.fc) is nn.Linear)"
    run(text)
    assert capfd.readouterr().out == "True\nTrue\n"


def test_nothing_stays_on_a_model_when_the_last_gradients_have_come(
    run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    text = f"""
        net = Net()
        for _ in range(4):
            net({X}).sum().backward()
            print(type(net) is Net and type(net.fc) is nn.Linear)
        """
    run(text, steps=2, ports=("output", "grad_output"))
    assert capfd.readouterr().out == "False\nFalse\nTrue\nTrue\n"


def test_a_recomputed_checkpoint_is_no_root(run: Any) -> None:
    text = f"""
        from torch.utils.checkpoint import checkpoint
        class Saving(Net):
            def forward(self, x):
                return self.fc(checkpoint(self.conv1, x, use_reentrant=False).flatten(1))
        Saving()({X}).sum().backward()
        """
    ran = run(text, ports=("output", "grad_output"))
    assert list(ran.recording.modules) == ["", "conv1", "fc"]
    assert sorted(ran.keys) == sorted(
        (p, port, 0, 0) for p in ("", "conv1", "fc") for port in ("output", "grad_output")
    )


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_compiled_traced_and_scripted_models_run_as_before(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    text = """
        import torch.fx
        net = Net()
        x = torch.ones(1, 1, 4, 4)
        expected = net(x)
        counts = []
        compiled = torch.compile(net, backend=lambda graph, _: counts.append(graph) or graph.forward, fullgraph=True)
        print(torch.equal(compiled(x), expected), len(counts))
        print(torch.equal(torch.fx.symbolic_trace(net)(x), expected))
        print(torch.equal(torch.jit.trace(net, x)(x), expected))
        print(torch.equal(torch.jit.script(net)(x), expected))
        """
    ran = run(text)
    printed = capfd.readouterr()
    assert printed.out == "True 1\nTrue\nTrue\nTrue\n"
    assert ran.status == 0
    assert ran.keys[:3] == [("conv1", "output", 0, 0), ("fc", "output", 0, 0), ("", "output", 0, 0)]


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_a_scripted_part_is_left_out_and_told(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    ran = run(f"net = Net()\nnet.fc = torch.jit.script(net.fc)\nnet({X})")
    assert ran.keys == [("conv1", "output", 0, 0), ("", "output", 0, 0)]
    assert "\nhookline: bypassed fc:output TorchScript runs it outside Python\n" in capfd.readouterr().err


def test_what_the_script_sets_for_its_thread_does_not_reach_the_writing(
    run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.utils.flop_counter import FlopCounterMode
        net = Net()
        with FlopCounterMode(display=False) as flops, torch.device("meta"):
            for _ in range(3):
                net(torch.ones(1, 1, 4, 4, device="cpu"))
        print(flops.get_total_flops())
        with FakeTensorMode():
            fake = Net()
            for _ in range(2):
                fake(torch.ones(1, 1, 4, 4))
        with torch.inference_mode():
            net(torch.ones(1, 1, 4, 4))
        """
    ran = run(text, steps=None, ports=("output", "grad_output"))
    printed = capfd.readouterr()
    assert printed.out == f"{3 * (2 * 2 * 9 * 4 + 2 * 8 * 3)}\n"
    assert "warning" not in printed.err
    assert len([key for key in ran.keys if not key[0].startswith("Net/")]) == 4 * 3
    summaries = [event.summaries()["output"] for event in ran.recording.select("fc")]
    assert len({(summary.mean, summary.l2) for summary in summaries}) == 1 and summaries[0].numel == 3


def test_a_value_that_cannot_be_stored_is_left_out(
    run: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from hookline.store import planned

    plan = planned._plan

    def picky(event: Any, *rest: Any) -> Any:
        if event.path == "fc":
            raise ArgumentError("fc:output, call 0 of step 0: too odd")
        return plan(event, *rest)

    monkeypatch.setattr(planned, "_plan", picky)
    ran = run(f"net = Net()\nfor _ in range(2):\n    net({X})", steps=2)
    assert [(path, step) for path, _, step, _ in ran.keys] == [("conv1", 0), ("", 0), ("conv1", 1), ("", 1)]
    said = capfd.readouterr().err
    assert "hookline: coverage of 3 sites: 2 captured (4 calls), 0 not reached, 1 bypassed\n" in said
    assert "bypassed fc:output 2 values left out: fc:output, call 0 of step 0: too odd\n" in said
    assert (
        ran.recording.coverage["fc:output"].status == "bypassed" and ran.recording.coverage["conv1:output"].calls == 2
    )
    first, last = without_coverage(said).splitlines()
    assert first == "hookline: warning: a value is left out: fc:output, call 0 of step 0: too odd"
    assert last.startswith("hookline: 4 events of 2 steps")


# ---------------------------------------------------------------- what cannot be recorded


def test_a_script_without_a_module_leaves_no_recording(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    ran = run("print('hello')", net=False)
    assert ran.status == 0
    assert not ran.folder.exists()
    assert capfd.readouterr().err == "hookline: no module was called, so there is no recording.\n"


def test_a_pattern_that_matches_nowhere_is_told_with_the_nearest_name(
    run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = run(f"Net()({X})\nsys.exit(3)", sites=("conv2", "fc", "!fcc"))
    assert ran.status == 3
    assert ran.keys == [("fc", "output", 0, 0)]
    first, second, last = without_coverage(capfd.readouterr().err).splitlines()
    assert first.startswith('hookline: warning: no module "conv2" in the 3 paths; nearest: "conv1"')
    assert second.startswith('hookline: warning: no module "fcc" in the 3 paths; nearest: "fc"')
    assert last.startswith("hookline: 1 event of 1 step -> run.hookline (")


def test_when_no_pattern_matches_there_is_no_recording(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    ran = run(f"Net()({X})", sites=("conv2",))
    assert ran.status == 0 and not ran.folder.exists()
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "hookline: no module that was called has a chosen site, so there is no recording."


def test_a_full_budget_ends_the_recording_and_not_the_script(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    text = """
        net = nn.Sequential(nn.Linear(1, 100), nn.Linear(100, 1000), nn.Linear(1000, 100))
        for _ in range(3):
            net(torch.ones(1, 1))
        print(type(net) is nn.Sequential)
        """
    ran = run(text, budget=2000, steps=None)
    assert ran.status == 0
    assert ran.keys == [("0", "output", 0, 0)]
    printed = capfd.readouterr()
    assert printed.out == "True\n"
    warning, result = without_coverage(printed.err).splitlines()
    assert warning == (
        "hookline: warning: 1:output needs 4 kB, and of the budget of 2 kB for a step 400 bytes are taken; largest "
        "sites: 0:output 400 bytes. Choose less with --sites or --ports, or raise --budget. "
        "The recording ends here and keeps what it has; the script goes on."
    )
    assert result.startswith("hookline: 1 event of 1 step -> run.hookline (")


def test_the_coverage_of_a_recording_that_ended_early_claims_nothing_of_later_calls(
    run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    text = """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.wide, self.late, self.head = (nn.Linear(1, n) for n in (1, 1000, 1, 1))

            def forward(self, x, late):
                y = self.head(self.wide(self.first(x)).sum()[None])
                return self.late(y) if late else y

        net = Net()
        for step in range(3):
            net(torch.ones(1, 1), step == 2).sum().backward()
        """
    run(text, budget=2000, steps=None)
    lines = capfd.readouterr().err.splitlines()
    missed = {line.split()[2] for line in lines if line.endswith("the recording had ended by then")}
    assert missed == {"(root):output", "wide:output", "head:output"}
    assert any("not reached" in line and "late:output" in line for line in lines)


def test_a_full_disk_ends_the_recording_and_not_the_script(
    run: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from hookline.store import Writer

    append, done = Writer.append, []

    def full(self: Writer, events: Any, refused: Any = None) -> None:
        if done:
            raise FormatError("run.hookline: the recording cannot be written (No space left on device). Free some.")
        done.append(append(self, events))

    monkeypatch.setattr(Writer, "append", full)
    ran = run(f"net = Net()\nfor _ in range(5):\n    net({X})\nsys.exit(4)", steps=None)
    assert ran.status == 4
    assert ran.recording.steps == [0]
    warning = capfd.readouterr().err.splitlines()[0]
    assert "No space left on device" in warning
    assert warning.endswith("The recording ends here and keeps what it has; the script goes on.")


def test_a_place_that_is_taken_is_told_before_the_script_starts(run: Any) -> None:
    run(f"Net()({X})")
    with pytest.raises(
        OptionError, match=r"a recording run\.hookline exists already\. Choose another name with -o, or"
    ):
        run("open('started', 'w')", overwrite=False)
    Path("folder").mkdir()
    with pytest.raises(FormatError, match="is not a Hookline recording"):
        run("open('started', 'w')", output="folder", overwrite=True)
    assert not Path("started").exists()


def test_overwrite_replaces_a_recording_once_there_is_something_to_record(run: Any) -> None:
    run(f"Net()({X})")
    assert run("pass").keys[0][0] == "conv1"
    assert run("nn.ReLU()(torch.ones(1))").keys == [("", "output", 0, 0)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ports": ("outptu",)}, OptionError, 'unknown port: got "outptu".*nearest: "output"'),
        ({"steps": 0}, OptionError, "steps is a number from 1 on, or None for all; got 0"),
        ({"every": 0}, OptionError, "every is a number from 1 on; got 0"),
        ({"budget": "much"}, OptionError, 'a size is a number of bytes or a text such as "2GB"'),
        ({"sites": ()}, OptionError, 'sites: got no pattern; "\\*\\*" names every module'),
        ({"sites": ("re:(",)}, SiteError, 'the pattern "re:\\(" cannot be read'),
    ],
)
def test_options_are_checked_before_anything_runs(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Options(**options)


def test_each_rank_under_torchrun_has_a_recording_of_its_own(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not run(f"Net()({X})").folder.exists()
    assert len(hookline.load("run.rank1.hookline")) == 3
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run(f"Net()({X})").folder.exists()


# ---------------------------------------------------------------- the script's world


def test_the_script_is_main(run: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Path("neighbour.py").write_text("word = 'here'")
    text = """
        import pickle, neighbour
        copied = pickle.loads(pickle.dumps(Net()))
        print(type(copied) is Net, Net.__module__, __name__, sys.modules["__main__"].Net is Net)
        print(__file__, sys.argv, sys.path[0], __spec__, __package__, neighbour.word)
        """
    before = sys.argv, list(sys.path), sys.modules["__main__"], nn.Module.__call__, signal.getsignal(signal.SIGTERM)
    assert run(text, "--lr", "1").status == 0
    assert before == (sys.argv, sys.path, sys.modules["__main__"], nn.Module.__call__, signal.getsignal(signal.SIGTERM))
    sys.modules.pop("neighbour")
    assert capfd.readouterr().out.splitlines() == [
        "True __main__ __main__ True",
        f"{tmp_path}/script.py ['script.py', '--lr', '1'] {tmp_path} None None here",
    ]


def test_the_output_stays_where_it_was_when_the_script_changes_the_working_folder(run: Any, tmp_path: Path) -> None:
    home = os.getcwd()
    try:
        ran = run(f"import os\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\nNet()({X})")
    finally:
        os.chdir(home)
    assert len(ran.recording) == 3
    assert not (tmp_path / "elsewhere" / "run.hookline").exists()


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(None)", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit(-1)", 255, ""),
        ("sys.exit(True)", 1, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("raise SystemExit(3)", 3, ""),
    ],
)
def test_the_exit_status_is_the_scripts_own(
    run: Any, capfd: pytest.CaptureFixture[str], ending: str, status: int, said: str
) -> None:
    ran = run(f"nn.ReLU()(torch.ones(1))\n{ending}", quiet=True)
    assert ran.status == status
    assert len(ran.recording) == 1
    assert capfd.readouterr().err == said


def test_a_traceback_has_no_frames_of_ours(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    text = f"""
        class Bad(Net):
            def forward(self, x):
                try:
                    return self.fc(x)
                except RuntimeError as error:
                    raise ValueError("wrong shape") from error
        Bad()({X})
        """
    ran = run(text, ports=("output", "grad_output"))
    said = capfd.readouterr().err
    assert ran.status == 1
    assert os.path.dirname(hookline.__file__) not in said
    assert "RuntimeError: mat1 and mat2 shapes" in said
    assert "The above exception was the direct cause" in said
    assert without_coverage(said).splitlines()[-2] == "ValueError: wrong shape"
    assert without_coverage(said).splitlines()[-1].startswith("hookline: 0 events of 0 steps -> run.hookline")


def test_a_syntax_error_looks_as_under_python(run: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ran = run("x = (", net=False, quiet=True)
    assert ran.status == 1
    assert capfd.readouterr().err.splitlines() == [
        f'  File "{tmp_path}/script.py", line 1',
        "    x = (",
        "        ^",
        "SyntaxError: '(' was never closed",
    ]


def test_the_excepthook_of_the_script_is_called(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    hook = sys.excepthook
    try:
        ran = run("sys.excepthook = lambda kind, error, where: print('mine:', error)\n1 / 0", quiet=True)
    finally:
        sys.excepthook = hook
    assert ran.status == 1
    assert capfd.readouterr() == ("mine: division by zero\n", "")


def test_an_excepthook_that_fails_is_reported_with_the_error(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    hook = sys.excepthook
    try:
        ran = run("def hook(*error):\n    raise OSError('gone')\nsys.excepthook = hook\n1 / 0", quiet=True)
    finally:
        sys.excepthook = hook
    said = capfd.readouterr().err
    assert ran.status == 1
    assert said.startswith("Error in sys.excepthook:\n") and "OSError: gone" in said
    assert said.endswith("ZeroDivisionError: division by zero\n")


def test_an_interrupt_is_told_from_an_exit_status(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    ran = run(f"Net()({X})\nraise KeyboardInterrupt", quiet=True)
    assert ran.status == -signal.SIGINT
    assert capfd.readouterr().err.endswith("raise KeyboardInterrupt\nKeyboardInterrupt\n")
    assert len(ran.recording) == 3


def test_a_handler_for_sigterm_that_the_script_installs_stays(run: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)").status == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.py", r"the script absent\.py cannot be read \(No such file or directory\)\. Working folder: /"),
        (".", r"\. is a folder: name a script in it, or a module with -m\."),
    ],
)
def test_a_script_that_is_not_there(tmp_path: Path, monkeypatch: Any, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=message):
        run_script(name)


# ---------------------------------------------------------------- modules


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    Path("some_pkg").mkdir()
    Path("some_pkg/__init__.py").write_text("")
    Path("some_pkg/near.py").write_text("word = 'near'")
    Path("some_pkg/broken.py").write_text("import not_there_at_all")
    Path("some_pkg/namespace").mkdir()
    Path("some_pkg/train.py").write_text(
        "import sys, torch\nfrom . import near\ntorch.nn.ReLU()(torch.ones(1))\n"
        "print(__name__, __package__, __spec__.name, sys.argv, near.word, sys.path[0])"
    )
    Path("some_pkg/__main__.py").write_text("print('package', __spec__.name)")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("some_pkg")]:
        del sys.modules[name]


def test_a_module_runs_as_under_python_m(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_module("some_pkg.train", ["a"], Options(quiet=True)) == 0
    assert run_module("some_pkg", [], Options(quiet=True, output="other")) == 0
    assert capfd.readouterr() == (
        f"__main__ some_pkg some_pkg.train ['{package}/some_pkg/train.py', 'a'] near {package}\n"
        "package some_pkg.__main__\n",
        "",
    )
    assert len(hookline.load("run.hookline")) == 1
    assert hookline.load("run.hookline").info["script"] == "-m some_pkg.train"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some_pkg.trian", "there is no module some_pkg.trian. Modules are looked for in the working folder, /"),
        ("absent_pkg.train", "there is no module absent_pkg.train "),
        ("some_pkg.near.deeper", "there is no module some_pkg.near.deeper "),
        (".train", "there is no module .train "),
        ("some_pkg.namespace", "the package some_pkg.namespace cannot be run: it has no __main__"),
    ],
)
def test_a_module_that_is_not_there(package: Path, name: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        run_module(name)
    assert str(caught.value).startswith(message)


def test_a_module_that_imports_something_missing_has_a_traceback(
    package: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_module("some_pkg.broken", [], Options(quiet=True)) == 1
    assert capfd.readouterr().err.endswith("ModuleNotFoundError: No module named 'not_there_at_all'\n")


# ---------------------------------------------------------------- root calls


def test_only_the_outermost_call_of_each_thread_is_told() -> None:
    seen: list[Any] = []
    inner = nn.ReLU()
    outer = nn.Sequential(inner)
    original = vars(nn.Module)["__call__"]
    with RootCalls(seen.append) as calls:
        outer(torch.ones(1))
        inner(torch.ones(1))
        thread = threading.Thread(target=outer, args=(torch.ones(1),))
        thread.start()
        thread.join()
        assert calls.current is None
    assert seen == [outer, inner, outer]
    assert vars(nn.Module)["__call__"] is original


def test_a_patch_on_top_of_ours_stays_and_ours_is_silent() -> None:
    seen: list[Any] = []
    original = nn.Module.__call__
    calls = RootCalls(seen.append)
    calls.__enter__()
    ours = nn.Module.__call__

    def theirs(self: nn.Module, *args: Any) -> Any:
        return ours(self, *args)

    nn.Module.__call__ = theirs  # type: ignore[method-assign]
    try:
        calls.__exit__()
        assert nn.Module.__call__ is theirs
        nn.ReLU()(torch.ones(1))
        assert seen == []
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def test_a_call_that_fails_is_over() -> None:
    seen: list[Any] = []
    net = nn.Linear(1, 1)
    with RootCalls(seen.append) as calls:
        with pytest.raises(RuntimeError):
            net(torch.ones(2))
        assert calls.current is None
        net(torch.ones(1))
    assert seen == [net, net]


# ---------------------------------------------------------------- planning


TWO_MODELS = f"""
    net, loss = Net(), nn.MSELoss()
    net.aside = nn.ModuleList([nn.Linear(1, 1)])
    for step in range(3):
        print("step", step)
        out = net({X})
        loss(out, torch.zeros_like(out)).backward()
    """


def test_a_plan_has_the_bytes_of_the_first_step_and_stops_the_script(
    run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    ports = ("output", "grad_output")
    planned = run(TWO_MODELS, ports=ports, dry=True)
    said = capfd.readouterr()
    assert planned.status == 0 and not planned.folder.exists()
    assert said.out.startswith("step 0\nstep 1\n  (root):output ") and "step 2" not in said.out
    recorded = run(TWO_MODELS, ports=ports)
    size = sum(event.nbytes for event in recorded.recording)
    assert f"({size:,} bytes)\n" in said.out
    coverage = str(recorded.recording.coverage).splitlines()
    assert said.out.splitlines()[-len(coverage) :] == coverage
    assert "  not reached  aside.0:output,grad_output  (root) ran 1 time without calling it" in coverage


def test_a_plan_of_a_script_that_fails_has_its_status(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    planned = run(f"net = Net()\nnet({X})\nraise ValueError('no data')", dry=True)
    said = capfd.readouterr()
    assert planned.status == 1 and "ValueError: no data" in said.err and "a step records" in said.out


def test_a_plan_of_a_script_without_a_model_says_so(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("x = 1", dry=True).status == 0
    assert capfd.readouterr().err == "hookline: no module was called, so there is nothing to plan.\n"


def test_a_plan_whose_patterns_name_nothing_stops_at_the_second_call_of_the_first_model(
    run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    text = f"""
        relu, net = nn.ReLU(), Net()
        for step in range(3):
            print("step", step)
            relu(relu(net({X})))
    """
    assert run(text, sites=("fcc",), dry=True).status == 2
    said = capfd.readouterr()
    assert said.out == "step 0\nstep 1\n"
    warning, last = said.err.splitlines()
    assert warning.startswith("hookline: warning: ") and '"fcc"' in warning and '"fc"' in warning
    assert last == "hookline: no module that was called has a chosen site, so there is nothing to plan."


def test_a_plan_waits_for_a_later_model_while_the_first_is_not_called_again(
    run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    text = f"""
        relu, net, head = nn.ReLU(), Net(), nn.Sequential(nn.Linear(3, 2))
        for step in range(3):
            print("step", step)
            head(net(relu(relu({X}))))
    """
    assert run(text, sites=("0",), dry=True).status == 0
    said = capfd.readouterr()
    assert said.out.startswith("step 0\nstep 1\n  0:output  1 call ") and "step 2" not in said.out


@pytest.mark.parametrize(("end", "status"), [("", 2), ("sys.exit(0)", 2), ("sys.exit(5)", 5), ("1 / 0", 1)])
def test_a_plan_of_a_script_that_ends_before_any_match_fails(
    run: Any, capfd: pytest.CaptureFixture[str], end: str, status: int
) -> None:
    assert run(f"Net()({X})\n{end}", sites=("fcc",), dry=True).status == status
    assert '"fc"' in capfd.readouterr().err


def test_a_run_whose_patterns_name_nothing_keeps_the_status_of_the_script(run: Any) -> None:
    assert run(f"net = Net()\nnet({X})\nnet({X})", sites=("fcc",)).status == 0


def test_gradients_that_came_when_the_budget_was_full(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    text = """
        net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        for _ in range(4):
            net(torch.randn(16, 8)).sum().backward()
        """
    run(text, budget="5kB", ports=("grad_output",), steps=None)
    missed = [line for line in capfd.readouterr().err.splitlines() if "bypassed" in line and ":grad_output" in line]
    assert missed and all(line.endswith("the recording had ended by then") for line in missed)


def test_calls_in_steps_that_are_not_recorded_are_not_counted(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    text = """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0

            def forward(self, x):
                self.calls += 1
                return self.a(x) if self.calls % 2 else self.b(x)

        net = Net()
        for _ in range(6):
            net(torch.randn(16, 8))
        """
    run(text, every=2, steps=None)
    assert "not reached  b:output  (root) ran 3 times without calling it" in " ".join(
        line.replace("hookline: ", "") for line in capfd.readouterr().err.splitlines()
    ).replace("not reached b:output (root)", "not reached  b:output  (root)")
