"""A bundle gives the same module, arguments and first operation again, in another process, and runs no training."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import os
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hookline.cli.main import main
from hookline.errors import BudgetError, FormatError, OptionError
from hookline.watch import bundle as bundle_module
from hookline.watch.bundle import describe, load_bundle, write_bundle
from hookline.watch.surroundings import random_state

SCRIPT = '''\
"""A training whose loss becomes NaN."""

from __future__ import annotations

import dataclasses
import sys
from typing import TypeVar

import torch
from torch import nn

from blocks import Head
from parts.inner import scaled

EPS = 1e-6
SIZES = [4, 4 * 1]
T = TypeVar("T")
if torch.cuda.is_available():
    raise SystemExit("not to be executed")
try:
    import fast_kernels_that_nobody_has as kernels
except ImportError:
    kernels = None


@dataclasses.dataclass
class Config:
    width: int = SIZES[0]
    dtype: torch.dtype = torch.float32


class Net(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(config.width, config.width)
        self.rnn = nn.LSTM(config.width, config.width)
        self.drop = nn.Dropout(0.5)
        self.act = torch.relu
        self.head = Head()

    def forward(self, x, scale=None):
        x = self.drop(self.act(self.linear(x)))
        return self.head(self.rnn(x)[0] * 0 + scaled(x, EPS) * scale["value"][0])


print("training starts")
torch.manual_seed(0)
model = Net(Config())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

if __name__ == "__main__":
    from hookline.watch.bundle import write_bundle
    from hookline.watch.surroundings import random_state

    x, scale = torch.randn(2, 3, 4), {"value": [torch.tensor(1.0), None]}
    rng = random_state()
    output = model(x, scale=scale)
    print(int((output == float("-inf")).sum()), output.isnan().any().item())
    write_bundle(sys.argv[1], model, (x,), {"scale": scale}, rng=rng, incident={"message": "it broke", "step": 7})
'''
BLOCKS = """\
import torch
from torch import nn


class Head(nn.Module):
    def forward(self, x):
        return torch.log(x)
"""
INNER = "def scaled(x, eps):\n    return x * (1 + eps) / (1 + eps)\n"


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Settings:
    name: str
    inner: Any = None


class Cell(nn.Module):
    """Has an attribute of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(2, 2)
        self.other = self.tied
        self.parameter = nn.Parameter(torch.tensor([1.0, 2.0]).half(), requires_grad=False)
        self.nothing = None
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("passing", torch.ones(2, 2).t(), persistent=False)
        self.plain = {"numbers": (1, 2.5, -math.inf, 2**70, True, None), 3: [1 + 2j, b"\x00\xff"], len: {1, 2}}
        self.things = [
            torch.float16,
            torch.device("cpu"),
            torch.Size([2, 3]),
            nn.functional.gelu,
            torch.tanh,
        ]
        self.color = Color.RED
        self.settings = Settings("a", Settings("b", Pair(1, torch.ones(2))))
        self.ordered = collections.OrderedDict(b=1, a=frozenset({"x"}))
        self.listed = [self.tied]
        self.reference = weakref.ref(self.parameter)
        self.image = torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(x) / 0


def made_of(module: nn.Module, folder: Path, *args: Any, **kwargs: Any) -> Any:
    return load_bundle(write_bundle(folder / "bundle", module, args, kwargs)).module


# ---------------------------------------------------------------- another process


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A bundle that a script wrote, moved away from it; and what the script printed."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "blocks.py").write_text(BLOCKS)
    (folder / "parts").mkdir()
    (folder / "parts" / "inner.py").write_text(INNER)
    done = subprocess.run([sys.executable, "train.py", "bundle"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    moved = tmp_path_factory.mktemp("elsewhere") / "bundle"
    os.rename(folder / "bundle", moved)
    for name in ("train.py", "blocks.py", "parts/inner.py"):
        (folder / name).unlink()
    return moved, done.stdout


def test_a_script_is_replayed_and_does_not_train(
    recorded: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, printed = recorded
    assert printed.startswith("training starts\n")
    count, has_nan = printed.splitlines()[1].split()
    assert main(["replay", str(folder), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "training starts" not in out + err
    told = json.loads(out)
    assert told["incident"] == {"message": "it broke", "step": 7}
    zoomed = told["zoom"]
    assert (zoomed["operation"], zoomed["path"], zoomed["line"]) == (
        "aten.log.default",
        "head",
        "blocks.py:7 in forward",
    )
    assert zoomed["text"] == "return torch.log(x)"
    # the same elements were dropped
    assert has_nan == "False" and zoomed["outputs"][0]["summary"]["inf"] == int(count) > 0


def test_text_of_a_replay(recorded: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded[0])]) == 0
    first, second, third, *values = capsys.readouterr().out.splitlines()
    assert (first, second) == ("step 7: it broke", "aten.log.default at blocks.py:7 in forward, in head")
    assert third == "  return torch.log(x)" and [line.split()[0] for line in values] == ["in", "out"]


def test_the_script_in_the_bundle_replays_it(recorded: tuple[Path, str], tmp_path: Path) -> None:
    command = [sys.executable, str(recorded[0] / "replay.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "aten.log.default at blocks.py:7 in forward" in done.stdout, done.stderr


def test_what_lies_in_a_bundle(recorded: tuple[Path, str]) -> None:
    folder = recorded[0]
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "bundle.json", "tensors.safetensors", "replay.py",
        "source/train.py", "source/blocks.py", "source/parts/inner.py",
    }  # fmt: skip
    about = describe(folder)
    assert about["left_out"] == [] and about["environment"]["torch"] == torch.__version__


def test_loading_leaves_imports_as_they_were(recorded: tuple[Path, str]) -> None:
    path, meta, modules = list(sys.path), list(sys.meta_path), set(sys.modules)
    module = load_bundle(recorded[0]).module
    assert (sys.path, sys.meta_path) == (path, meta) and "blocks" not in sys.modules
    assert set(sys.modules) - modules <= {"parts"}
    assert type(module).__name__ == "Net" and type(module).__module__ == "__main__"


def test_an_older_module_of_the_same_name_stays(recorded: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = type(sys)("blocks")
    monkeypatch.setitem(sys.modules, "blocks", mine)
    assert load_bundle(recorded[0]).replay().reproduced
    assert sys.modules["blocks"] is mine


# ---------------------------------------------------------------- round trip


def test_every_kind_of_attribute_comes_back(tmp_path: Path) -> None:
    before = Cell().eval()
    before.tied.train()
    after = made_of(before, tmp_path, torch.ones(1, 2))
    assert type(after).__qualname__ == "Cell" and not after.training and after.tied.training
    assert str(after.color) == "Color.RED"
    for name in ("plain", "things", "ordered", "nothing"):
        assert getattr(after, name) == getattr(before, name)
    assert type(after.ordered) is collections.OrderedDict and list(after.ordered) == ["b", "a"]
    assert after.settings.name == "a" and after.settings.inner.inner.left == 1
    assert torch.equal(after.settings.inner.inner.right, torch.ones(2))
    assert after.other is after.tied is after.listed[0] and after.reference() is after.parameter
    assert torch.equal(after.image, before.image) and after.image.stride() == before.image.stride()
    assert list(after.state_dict()) == list(before.state_dict())
    for (name, old), (_, new) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert torch.equal(old, new) and old.dtype == new.dtype and old.requires_grad == new.requires_grad, name
    for (name, old), (_, new) in zip(before.named_buffers(), after.named_buffers(), strict=True):
        assert torch.equal(old, new) and old.stride() == new.stride(), name


@pytest.mark.parametrize(
    ("module", "args"),
    [
        (nn.LSTM(3, 4, num_layers=2, bidirectional=True), (torch.randn(2, 1, 3),)),
        (nn.GRU(3, 4), (torch.randn(2, 1, 3),)),
        (nn.TransformerEncoderLayer(4, 2, 8, 0.0, activation="gelu", batch_first=True), (torch.randn(1, 3, 4),)),
        (nn.MultiheadAttention(4, 2), (torch.randn(3, 1, 4),) * 3),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(True), nn.Flatten()), (torch.randn(2, 1, 5, 5),)),
        (nn.ModuleDict({"a": nn.ParameterList([torch.ones(2)])}), ()),
    ],
)
def test_modules_of_torch_compute_the_same_bits(module: nn.Module, args: tuple[Tensor, ...], tmp_path: Path) -> None:
    made = made_of(module, tmp_path, *args)
    assert str(made) == str(module)
    if args:
        old, new = module(*args), made(*args)
        assert torch.equal(old[0] if isinstance(old, tuple) else old, new[0] if isinstance(new, tuple) else new)


def test_a_hooked_module_is_stored_as_its_own_class(tmp_path: Path) -> None:
    import hookline

    module = nn.Linear(2, 2)
    with hookline.record(module):
        assert type(made_of(module, tmp_path, torch.ones(1, 2))) is nn.Linear


def test_arguments_gradients_and_random_numbers_come_back(tmp_path: Path) -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    rng = random_state()
    folder = write_bundle(
        tmp_path / "b",
        Root(),
        (x, Pair(1, [x])),
        {"key": {"a": (None, "b")}},
        grad_outputs={0: torch.ones(2, 3)},
        rng=rng,
    )
    found = load_bundle(folder)
    assert found.args[0] is found.args[1].right[0] and found.args[0].requires_grad
    assert found.args[1]._fields == Pair._fields and found.kwargs == {"key": {"a": (None, "b")}}
    assert torch.equal(found.grad_outputs[0], torch.ones(2, 3)) and torch.equal(found.rng["cpu"], rng["cpu"])
    zoomed = found.replay()
    assert (zoomed.direction, zoomed.node) == ("backward", "SqrtBackward0"), zoomed.reason


class Root(nn.Module):
    def forward(self, x: Tensor, pair: Pair, key: Any) -> Tensor:
        return torch.sqrt(x)


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x


def test_casts_are_those_of_then(tmp_path: Path) -> None:
    large = torch.full((2, 2), 300.0)
    assert not load_bundle(write_bundle(tmp_path / "plain", Product(), (large,), {})).replay().reproduced
    with torch.autocast("cpu", dtype=torch.float16):
        folder = write_bundle(tmp_path / "half", Product(), (large,), {})
    assert load_bundle(folder).replay().operation == "aten.mm.default"
    assert not torch.is_autocast_enabled("cpu")


# ---------------------------------------------------------------- what cannot be stored


def test_what_cannot_be_stored_is_listed_and_the_state_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Cell()
    module.tied.function = lambda x: x
    module.generator = torch.Generator()
    folder = write_bundle(tmp_path / "b", module, (torch.ones(1, 2),), {})
    about = describe(folder)
    assert about["module"] is None and about["left_out"] == [
        "module.tied.function: the function "
        "test_what_cannot_be_stored_is_listed_and_the_state_is_kept.<locals>.<lambda> cannot be imported by name",
        "module.generator: a torch._C.Generator cannot be stored",
    ]
    assert main(["replay", str(folder)]) == 2
    assert "Give one by --module FILE.py:FUNCTION" in capsys.readouterr().err
    (tmp_path / "model.py").write_text(
        textwrap.dedent(
            """
            from torch import nn

            class Cell(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.tied = nn.Linear(2, 2)

                def forward(self, x):
                    return self.tied(x) / 0

            def make():
                return Cell()

            def other():
                import torch
                return nn.Linear(2, 2), (torch.ones(1, 2),)

            def wrong():
                return 3
            """
        )
    )
    assert main(["replay", str(folder), "--module", f"{tmp_path}/model.py:make"]) == 0
    assert "aten.div.Tensor at model.py:" in capsys.readouterr().out
    given = nn.Module()
    given.tied = nn.Linear(2, 2)
    made = load_bundle(folder, lambda: given).module
    assert made is given and torch.equal(given.tied.weight, module.tied.weight)
    assert main(["replay", str(folder), "--module", f"{tmp_path}/model.py:other"]) == 1
    assert capsys.readouterr().out == "not reproduced: all that came out was finite this time\n"
    for wrong, message in (
        ("model.py:wrong", "wanted; got int"),
        ("model.py:missing", "has no function missing"),
        ("gone.py:make", "there is no file"),
        ("model", "--module is FILE.py:FUNCTION"),
    ):
        assert main(["replay", str(folder), "--module", f"{tmp_path}/{wrong}"]) == 2
        assert message in capsys.readouterr().err


def test_a_module_with_hooks_of_its_own_is_left_out(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_hook(lambda *call: None)
    about = describe(write_bundle(tmp_path / "b", module, (torch.ones(1, 2),), {}))
    assert about["left_out"] == ["module.0: it has hooks of its own (_forward_hooks)"]


def test_arguments_that_cannot_be_stored(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b", nn.Linear(2, 2), (torch.ones(1, 2), object()), {})
    with pytest.raises(OptionError, match=r"the arguments could not be stored \(arguments: a builtins.object cannot"):
        load_bundle(folder)


def test_bytes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_module, "LIMIT", 100)
    about = describe(write_bundle(tmp_path / "b", nn.Linear(5, 5), (torch.ones(1, 5),), {}))
    assert about["left_out"] == ["module: with its arguments it has 140 bytes, more than the limit of 100"]
    with pytest.raises(BudgetError, match="have 104 bytes, the limit of a bundle is 100"):
        write_bundle(tmp_path / "c", nn.ReLU(), (torch.ones(26),), {})
    assert not (tmp_path / "c").exists()


def test_nothing_is_left_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle_module, "write_synced", full)
    with pytest.raises(OSError, match="No space left"):
        write_bundle(tmp_path / "b", nn.ReLU(), (torch.ones(2),), {})
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is there already"):
        write_bundle(tmp_path, nn.ReLU(), (torch.ones(2),), {})


def test_writing_changes_nothing(tmp_path: Path) -> None:
    module, x = Cell(), torch.ones(1, 2)
    before = [(one.clone(), one._version) for one in (*module.parameters(), *module.buffers(), x)]
    state = torch.get_rng_state()
    write_bundle(tmp_path / "b", module, (x,), {})
    after = [*module.parameters(), *module.buffers(), x]
    assert all(torch.equal(a, b) and b._version == n for (a, n), b in zip(before, after, strict=True))
    assert torch.equal(state, torch.get_rng_state())


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about.update(format="other"), "This is no bundle of Hookline"),
        (lambda about: about.update(version=99), "it has version 99, this Hookline reads 1"),
        (lambda about: about["environment"].pop("threads"), '"threads" of the environment is missing'),
        (
            lambda about: about["environment"].update(default_dtype="load"),
            '"default_dtype" of the environment is no dtype',
        ),
        (lambda about: about.update(autocast=[1]), '"autocast" is damaged'),
        (lambda about: about.pop("sources"), '"sources" is missing or of another type'),
        (lambda about: about.update(sources={"a": "../../a.py"}), "the source of a lies outside the bundle"),
        (lambda about: about.update(sources={"a": "a.py"}), "source/a.py is missing"),
        (lambda about: about.update(module={"pickle": 1}), "there is no node of the kind 'pickle'"),
        (lambda about: about.update(module={"t": 99, "grad": False, "device": "cpu"}), "is damaged"),
        (lambda about: about.update(module={"module": "os:system", "number": 0}), "os:system is no class of modules"),
        (lambda about: about.update(module={"import": "nowhere:thing"}), "nowhere:thing cannot be imported"),
        (
            lambda about: about.update(module={"import": "torch:nothing_such"}),
            "torch:nothing_such is not defined there",
        ),
        (lambda about: about.update(module=[1]), "a node has to be an object with entries, it is a list"),
    ],
)
def test_a_damaged_bundle_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    folder = write_bundle(tmp_path / "b", nn.ReLU(), (torch.ones(2),), {})
    about = json.loads((folder / "bundle.json").read_text())
    change(about)
    (folder / "bundle.json").write_text(json.dumps(about))
    with pytest.raises(FormatError) as error:
        load_bundle(folder)
    assert message in str(error.value)


def test_files_that_are_missing_or_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_bundle(tmp_path / "b", nn.ReLU(), (torch.ones(2),), {})
    file = folder / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(FormatError, match="it cannot be read"):
        load_bundle(folder)
    (folder / "bundle.json").unlink()
    assert main(["replay", str(folder)]) == 2
    assert "is no bundle: bundle.json cannot be read" in capsys.readouterr().err
