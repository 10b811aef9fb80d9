"""The commands, as a shell sees them: exit status, stdout and stderr."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import hookline
from hookline.cli import plot as plot_command
from hookline.cli import run as run_command
from hookline.cli.main import COMMANDS, main
from hookline.cli.program import split

from .spoken import without_coverage

SOURCE = str(Path(hookline.__file__).parents[1])
NET = """
    import os, sys, torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(1, 2, 3)
            self.fc = nn.Linear(8, 3)

        def forward(self, x):
            return self.fc(self.conv1(x).flatten(1))

    x = torch.ones(1, 1, 4, 4)
"""
HOOKLINE = ("-m", "hookline")
"""What a shell knows as hookline, when it is started by its module."""


def process(*args: str, cwd: Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    # One thread: a forked child hangs in torch's others, under plain Python too.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE, "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, input=given
    )


def script(folder: Path, text: str, *, net: bool = True, name: str = "script.py") -> str:
    (folder / name).write_text((textwrap.dedent(NET) if net else "") + textwrap.dedent(text))
    return name


# ---------------------------------------------------------------- hookline run, in a process of its own

WORLD = """
    import atexit, os, signal, sys, warnings
    atexit.register(print, "at exit")
    print(__name__, __file__, __package__, __spec__ and __spec__.name, __doc__, sorted(globals()))
    print(type(__builtins__), type(__loader__), __loader__.name)
    print(sys.argv, sys.path[0], os.getcwd(), sys.stdin.read(), sys.excepthook is sys.__excepthook__)
    print(sys.modules["__main__"].__dict__ is globals(), sys.flags.dev_mode, len(sys.warnoptions))
    import neighbour
    def fail():
        try:
            neighbour.fail()
        except ZeroDivisionError as error:
            raise ValueError("no way") from error
    if __name__ == "__main__":
        fail()
"""


@pytest.mark.parametrize("before", [["pkg/script.py"], ["-m", "pkg.script"]])
def test_the_world_of_a_script_is_that_of_python(tmp_path: Path, before: list[str]) -> None:
    (tmp_path / "pkg").mkdir()
    script(tmp_path / "pkg", WORLD, net=False)
    fail = "def fail():\n    1 / 0\n"
    (tmp_path / "pkg" / "neighbour.py").write_text(fail)
    (tmp_path / "neighbour.py").write_text(fail)
    command = [*before, "--steps", "9", "--", "-m", "x"]
    expected = process(*command, cwd=tmp_path, given="given")
    got = process(*HOOKLINE, "run", "--steps", "2", *command, cwd=tmp_path, given="given")
    assert got.stdout == expected.stdout
    assert got.returncode == expected.returncode == 1
    *traceback, last = got.stderr.splitlines(keepends=True)
    assert "".join(traceback) == _without_runpy(expected.stderr)
    assert last == "hookline: no module was called, so there is no recording.\n"


def _without_runpy(traceback: str) -> str:
    """``python -m`` shows the two frames of runpy, which are not the script's either."""
    return re.sub(r'  File "<frozen runpy>", line \d+, in \w+\n', "", traceback)


def test_an_interrupt_ends_the_process_as_python_ends_it(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
        import atexit, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
        net = Net()
        atexit.register(lambda: print("at exit", net(x).shape))
        net(x)
        signal.raise_signal(signal.SIGINT)
        """,
    )
    got = process(*HOOKLINE, "run", "--steps", "all", name, "--steps", "9", cwd=tmp_path)
    assert got.returncode == -signal.SIGINT
    assert got.stdout == "at exit torch.Size([1, 3])\n"
    *_, error, result = without_coverage(got.stderr).splitlines()
    assert error == "KeyboardInterrupt" and "hookline" not in got.stderr.split("KeyboardInterrupt")[0]
    assert result.startswith("hookline: 6 events of 2 steps -> run.hookline (")
    assert hookline.load(tmp_path / "run.hookline").steps == [0, 1]


def test_sigterm_kills_the_script_after_what_was_recorded_is_written(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
        import signal
        class Stop(nn.Module):
            def forward(self, x):
                if seen:
                    os.kill(os.getpid(), signal.SIGTERM)
                seen.append(x)
                return x
        seen = []
        net = Net()
        net.fc = nn.Sequential(Stop(), net.fc)
        try:
            net(x), net(x)
        finally:
            print("unreached", flush=True)
        """,
    )
    got = process(*HOOKLINE, "run", "--steps", "all", name, cwd=tmp_path)
    assert got.returncode == -signal.SIGTERM
    assert got.stdout == ""
    keys = [(event.path, event.step) for event in hookline.load(tmp_path / "run.hookline")]
    assert keys == [("conv1", 0), ("fc.0", 0), ("fc.1", 0), ("fc", 0), ("", 0), ("conv1", 1)]
    assert without_coverage(got.stderr).startswith("hookline: 6 events of 2 steps -> run.hookline (")


def test_steps_are_readable_after_os_exit_and_the_status_is_the_scripts(tmp_path: Path) -> None:
    name = script(tmp_path, "net = Net()\nfor _ in range(3):\n    net(x).sum().backward()\nos._exit(5)")
    entry = "import sys; from hookline.cli.main import main; sys.exit(main())"
    options = ["--steps", "all", "--ports", "output,grad_output", "-o", "out/kept"]
    got = process("-c", entry, "run", *options, name, cwd=tmp_path)
    assert (got.returncode, got.stderr) == (5, "")
    keys = [(event.port, event.step) for event in hookline.load(tmp_path / "out" / "kept")]
    assert keys == [(port, step) for step in range(2) for port in ["output"] * 3 + ["grad_output"] * 3]


def test_other_processes_and_threads_of_the_script(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
        import atexit, multiprocessing, pickle, signal, threading, time
        from concurrent.futures import ThreadPoolExecutor
        from torch.utils.data import DataLoader

        class Rows:
            def __len__(self):
                return 2
            def __getitem__(self, index):
                return nn.Identity()(torch.ones(2))

        def work(queue):
            net = pickle.loads(pickle.dumps(Net()))
            queue.put([type(net).__module__, list(net(x).shape)])

        if __name__ == "__main__":
            net = Net()
            net(x)
            for method in ("spawn", "fork"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                child = context.Process(target=work, args=(queue,))
                child.start()
                print(method, queue.get(timeout=60))
                child.join()
                print(child.exitcode)
            child = context.Process(target=time.sleep, args=(60,))
            child.start()
            child.terminate()
            child.join()
            print("terminated", child.exitcode)
            print(len(list(DataLoader(Rows(), num_workers=1))))
            if os.fork() == 0:
                net(x)
                sys.exit(0)
            os.wait()
            pool = ThreadPoolExecutor(1)
            pool.submit(net, x)
            threading.Timer(0.1, net, [x]).start()
            atexit.register(net, x)
        """,
    )
    got = process(*HOOKLINE, "run", "--steps", "all", "--sites", "(root)", name, cwd=tmp_path)
    assert got.returncode == 0, got.stderr
    assert got.stdout.splitlines() == [
        "spawn ['__mp_main__', [1, 3]]",
        "0",
        "fork ['__main__', [1, 3]]",
        "0",
        f"terminated -{signal.SIGTERM:d}",
        "2",
    ]
    assert re.fullmatch(r"hookline: 4 events of 4 steps -> run\.hookline \(.*\)\n", without_coverage(got.stderr))
    assert [(event.path, event.step) for event in hookline.load(tmp_path / "run.hookline")] == [
        ("", 0),
        ("", 1),
        ("", 2),
        ("", 3),
    ]


def test_a_plan_of_a_misspelt_site_stops_and_fails(tmp_path: Path) -> None:
    name = script(tmp_path, "net = Net()\nfor step in range(3):\n    print(step)\n    net(x)")
    got = process(*HOOKLINE, "plan", "--sites", "cnov1", name, cwd=tmp_path)
    assert (got.returncode, got.stdout) == (2, "0\n1\n") and '"conv1"' in got.stderr


# ---------------------------------------------------------------- the commands, in this process


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Two(nn.Module):
    """Gives two tensors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mean((2, 3)), x


@pytest.fixture
def recorded(folder: Path) -> str:
    """A recording of two steps with gradients, and of a module that gives two tensors."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 1), Two())
    with hookline.record(net, ports=("output", "grad_output")) as rec:
        for _ in range(2):
            sum(out.sum() for out in net(torch.rand(1, 1, 6, 6))).backward()
    rec.save("run.hookline")
    return "run.hookline"


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a command says when it fails."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hookline: error: ") and err.count("\n") == 1
    return err.removeprefix("hookline: error: ").rstrip("\n")


def test_run_in_process_returns_the_status(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script(folder, "print(sys.argv)\nNet()(x)\nsys.exit(4)")
    assert main(["run", "--steps", "2", "--sites", "fc", "--sites", "conv1:input", "script.py", "--steps", "9"]) == 4
    assert capsys.readouterr().out == "['script.py', '--steps', '9']\n"
    found = [(event.path, event.port) for event in hookline.load("run.hookline")]
    assert found == [("conv1", "input"), ("fc", "output")]
    assert main(["run", "--overwrite", "--quiet", "--", "script.py", "-o", "x"]) == 4
    assert capsys.readouterr() == ("['script.py', '-o', 'x']\n", "")
    assert main(["run", "--output=other", "--quiet", "-m", "script", "-o", "x"]) == 4
    assert capsys.readouterr().out == f"['{folder}/script.py', '-o', 'x']\n"
    sys.modules.pop("script", None)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "there is nothing to run; name a script or a module: hookline run train.py, hookline run -m module"),
        (["-m"], "-m needs the name of a module: hookline run -m module"),
        (["--step", "1", "s.py"], "unrecognized arguments: --step. See: hookline help run"),
        (["--steps"], "argument --steps: expected one argument. See: hookline help run"),
        (["--steps", "many", "s.py"], "--steps is a number or all; got 'many'."),
        (["--every", "0", "s.py"], "every is a number from 1 on; got 0."),
        (["--every", "x", "s.py"], "argument --every: invalid int value: 'x'. See: hookline help run"),
        (["--ports", "outptu", "s.py"], 'unknown port: got "outptu", wanted one of "input", "output"'),
        (["--budget", "2 apples", "s.py"], "a size is a number of bytes or a text such as"),
        (["--sites", "re:(", "s.py"], 'the pattern "re:(" cannot be read'),
        (["absent.py", "-x"], "the script absent.py cannot be read (No such file or directory). Working folder: /"),
        (["-m", "not.there"], "there is no module not.there (No module named 'not')"),
    ],
)
def test_mistakes_with_run(folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert fails(capsys, "run", *argv).startswith(said)


def test_run_refuses_a_name_that_is_taken(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    script(Path(), "print('started')", net=False)
    assert fails(capsys, "run", "script.py") == (
        "a recording run.hookline exists already. Choose another name with -o, or replace it with --overwrite."
    )


def test_run_knows_which_of_its_options_take_a_value() -> None:
    for names, settings in run_command._OPTIONS:
        _, program = split([names[-1], "s.py", "t.py"], run_command._OPTIONS)
        flag = settings.get("action") == "store_true"
        assert program == (["s.py", "t.py"] if flag else ["t.py"])


# ---------------------------------------------------------------- show


def test_show_prints_the_table(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    from hookline.report.table import render

    assert main(["show", recorded]) == 0
    assert capsys.readouterr().out == render(hookline.load(recorded)) + "\n"
    assert main(["show", recorded, "--width", "60", "--values", "--site", "0", "--site", "2:output"]) == 0
    wanted = render(hookline.load(recorded), width=60, values=True, site=["0", "2:output"])
    assert capsys.readouterr().out == wanted + "\n"


def test_show_chooses_a_port(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", recorded, "--port", "grad_output"])
    assert "port grad_output" in capsys.readouterr().out
    main(["show", recorded, "--port", "output", "--site", "!0", "--site", "!(root)"])
    assert re.findall(r"^(\S+) +(?:\S+ +)?\S*(?:Conv2d|ReLU)", capsys.readouterr().out, re.MULTILINE) == ["1", "2"]


def test_show_says_which_ports_there_are(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", recorded, "--port", "grad_input"])
    said = " ".join(capsys.readouterr().out.split())
    wanted = (
        "Nothing was recorded there; ports that were: output, grad_output. Choose one of them, or record again with"
    )
    assert said == f"{wanted} others."


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["absent"], "there is no recording of that name. Check the path."),
        ([], "the following arguments are required: FILE. See: hookline help show"),
        (["run.hookline", "--site", "fc"], 'no module "fc"'),
        (["run.hookline", "--port", "grad"], 'unknown port: got "grad"'),
        (["run.hookline", "--width", "3"], "--width is a number from 20 on; got 3"),
    ],
)
def test_mistakes_with_show(recorded: str, capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert said in fails(capsys, "show", *argv)


class Terminal:
    """A stdout that is a terminal."""

    encoding = "ascii"

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        text.encode("ascii")
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_colour_is_for_terminals_that_want_it(recorded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for no_color in ("", "1"):
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setenv("NO_COLOR", no_color)
            patch.setenv("COLUMNS", "70")
            patch.setattr(sys, "stdout", terminal)
            assert main(["show", recorded]) == 0
        shown[no_color] = terminal.text
    assert "\x1b[" in shown[""] and "\x1b[" not in shown["1"]
    assert max(map(len, shown["1"].splitlines())) <= 70


def test_a_reader_that_stops_early_is_no_error(recorded: str, folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        command = [sys.executable, *HOOKLINE, "show", recorded]
        got = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": SOURCE}, timeout=120
        )
    assert got.stderr == b""
    assert got.returncode == 141


# ---------------------------------------------------------------- plot


def test_plot_draws_each_kind(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    cases = [
        (["--site", "0", "--step", "1"], "0:output, call 0 of step 1"),
        (["--site", "0", "--step", "1", "--kind", "feature-maps", "--channels", "1", "--scale", "shared"], "0:output"),
        (["--site", "2:grad_output", "--step", "0", "--call", "0", "--batch", "0"], "2:grad_output"),
        (["--site", "3", "--step", "0", "--value", "output[1]"], "3:output"),
        (["--site", "3", "--step", "0", "--value", "output[0]", "--layout", "HW"], "3:output"),
        ([], "gradient flow"),
        (["--kind", "gradient_flow", "--site", "[02]"], "gradient flow"),
        (["--kind", "histogram", "--site", "**:grad_output"], "histogram"),
        (["--kind", "attention", "--site", "1", "--step", "0"], "1:output"),
    ]
    for number, (options, what) in enumerate(cases):
        assert main(["plot", recorded, *options, "-o", f"{number}.png"]) == 0
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"hookline: {what}") and err.endswith(f" -> {number}.png\n")
        assert Path(f"{number}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--site", "0"], "0:output was recorded in 2 steps; choose with --step: 0, 1"),
        (["--site", "[02]", "--step", "0"], "[02] names 2 sites; name one of them: 0:output, 2:output"),
        (["--site", "0:input"], "0:input was not recorded; see: hookline show run.hookline"),
        (["--site", "9"], 'no module "9"'),
        (["--site", "3", "--step", "0"], "3:output has 2 tensors; choose one with --value: output[0], output[1]"),
        (["--site", "0", "--step", "0", "--value", "x"], "0:output has no tensor x; it has output"),
        (["--site", "3", "--step", "0", "--value", "output[0]", "--layout", "NCL"], "layout NCL has 3 dimensions; got"),
        (["--site", "0", "--step", "5"], "nothing was recorded of step 5; there is step 0, 1"),
        (["--kind", "attention"], "this kind of picture needs a site: pass --site, such as --site layer1.0.conv1"),
        (["--kind", "pie"], "--kind is one of feature_maps, histogram, gradient_flow, attention; got pie"),
    ],
)
def test_mistakes_with_plot(recorded: str, capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    pytest.importorskip("matplotlib")
    assert fails(capsys, "plot", recorded, "-o", "x.png", *argv).startswith(said)
    assert not Path("x.png").exists()


def test_plot_needs_to_know_where(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, "plot", recorded) == (
        "the following arguments are required: -o/--output. See: hookline help plot"
    )
    assert "cannot write 'maps.gif'" in fails(capsys, "plot", recorded, "--site", "0", "--step", "0", "-o", "maps.gif")


# ---------------------------------------------------------------- help


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"hookline (\d+\.\d+\.\d+\S*|\(not installed\))\n", capsys.readouterr().out)


def test_help_is_the_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert main(argv) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2]
        assert f"hookline {name}" in texts[0]
        assert main(["help", name]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: hookline {name} ")
        assert (command.__doc__ or "").strip().splitlines()[0] in text
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["shwo"],
            "there is no command shwo; nearest: show. The commands are run, plan, show, plot, export, verify, repair, "
            "replay; see: hookline --help",
        ),
        (
            ["help", "polt"],
            "there is no command polt; nearest: plot. The commands are run, plan, show, plot, export, verify, repair, "
            "replay",
        ),
        (["--verbose"], "there is no command --verbose. The commands are"),
    ],
)
def test_an_unknown_command(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert fails(capsys, *argv).startswith(said)


def test_a_script_without_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script(folder, "")
    assert fails(capsys, "script.py", "--lr", "1") == "script.py is no command; to run it: hookline run script.py"


def test_plot_kinds_are_those_of_the_report() -> None:
    assert set(plot_command._KINDS) == set(hookline.report.plot.__all__)  # type: ignore[attr-defined]
