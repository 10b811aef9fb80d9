"""``hookline.verify``: rows that are computed again, against recordings that are right and that were made wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline
from hookline import store
from hookline.cli.main import main
from hookline.errors import ArgumentError, FormatError, OptionError
from hookline.record.event import Event


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(6, 2)).eval()


def batches(count: int = 3) -> list[Tensor]:
    torch.manual_seed(4)
    return [torch.randn(5 + number, 4) for number in range(count)]


def write(folder: Path, model: nn.Module, inputs: list[Any], **options: Any) -> Path:
    with hookline.record(model, **options) as rec:
        for x in inputs:
            model(x)
    rec.save(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "run.hookline", net(), batches(), ports=("input", "output"))


def change(folder: Path, new: Path, site: str, step: int, spoil: Any) -> Path:
    """A copy in which the values of a site in one step are others; its checksums are right."""
    rec = hookline.load(folder)
    events = []
    for event in rec:
        here = f"{event.path}:{event.port}" == site and event.step == step
        value = spoil(event.value) if here else event.value
        events.append(Event(event.order, event.step, event.path, event.port, event.call, event.backward, value))
    store.save(new, info=rec.info, modules=rec.modules, events=events)
    return new


def test_without_a_model_it_is_the_search_for_damage(folder: Path) -> None:
    found = hookline.verify(folder)
    assert found and found.recomputed is None and found.mismatches == found.problems == []
    assert (found.folders, found.events, found.shards) == (1, 30, 1)
    shard = next(folder.rglob("*.safetensors"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    again = hookline.verify(folder)
    assert not again and len(again.problems) == 1 and "its checksum is" in again.problems[0]
    assert again.problems == store.verify(folder).problems
    with pytest.raises(FormatError, match="there is no recording of that name"):
        hookline.verify(folder / "other")


def test_every_row_comes_out_the_same(folder: Path) -> None:
    found = hookline.verify(folder, model=net(), inputs=batches(), rows=10**6)
    assert found.recomputed == (5 + 6 + 7) * 10  # rows of the batches, at two ports of four layers and the root
    assert found and str(found).endswith("180 rows recomputed: no problem and 0 different rows found")
    assert hookline.verify(folder, model=net(), inputs=batches()).recomputed == 100


@pytest.mark.same_rng
def test_the_model_is_left_alone(folder: Path) -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    inputs, state = batches(), torch.manual_seed(0).get_state()
    hookline.verify(folder, model=model, inputs=inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_rows_that_were_changed(folder: Path, tmp_path: Path) -> None:
    def spoil(value: Tensor) -> Tensor:
        value = value.clone()
        value[2, 1] += 0.25
        value[4] = float("nan")
        return value

    wrong = change(folder, tmp_path / "wrong", "3:output", 1, spoil)
    assert hookline.verify(wrong)
    found = hookline.verify(wrong, model=net(), inputs=batches(), rows=10**6)
    assert not found and found.problems == []
    assert [mismatch[:5] for mismatch in found.mismatches] == [
        ("3:output", 1, 0, 2, "output"),
        ("3:output", 1, 0, 4, "output"),
    ]
    assert found.mismatches[0].difference == pytest.approx(0.25, rel=1e-6)
    assert math.isnan(found.mismatches[1].difference)
    first, second, last = str(found).splitlines()
    assert first == "3:output, output, step 1, call 0, row 2: differs by up to 0.25"
    assert second == "3:output, output, step 1, call 0, row 4: differs by up to nan"
    assert last.endswith("no problem and 2 different rows found")


def test_the_same_bits_and_a_tolerance(folder: Path, tmp_path: Path) -> None:
    nudged = change(folder, tmp_path / "nudged", "3:output", 0, lambda value: value * (1 + 1e-5))
    every = {"model": net(), "inputs": batches(), "rows": 10**6}
    assert len(hookline.verify(nudged, **every).mismatches) == 5
    assert hookline.verify(nudged, **every, tolerance=(1e-4, 0.0))
    assert not hookline.verify(nudged, **every, tolerance=(1e-7, 0.0))
    signs = change(folder, tmp_path / "signs", "1:output", 0, lambda value: torch.where(value == 0, -0.0, value))
    (first, *_) = hookline.verify(signs, **every).mismatches
    assert first.difference == 0 and str(first).endswith("differs in its bits alone")
    assert hookline.verify(signs, **every, tolerance=(0.0, 0.0))


def test_the_seed_repeats_the_choice(folder: Path, tmp_path: Path) -> None:
    wrong = change(folder, tmp_path / "wrong", ":output", 2, lambda value: value + 1)
    chosen = [
        hookline.verify(wrong, model=net(), inputs=batches(), rows=60, seed=seed).mismatches for seed in (0, 0, 1)
    ]
    assert chosen[0] == chosen[1] != chosen[2]


def test_other_parameters(folder: Path) -> None:
    other = net()
    with torch.no_grad():
        other[3].bias += 1
    found = hookline.verify(folder, model=other, inputs=batches(), rows=10**6)
    assert {mismatch.site for mismatch in found.mismatches} == {"3:output", "(root):output"}


class Calls(nn.Module):
    """Twice through one layer, with keywords, a nested value and a tensor without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        return {"out": (self.layer(self.layer(x) * scale), x.sum()), "mask": x > 0}


def test_calls_keywords_and_nested_values(tmp_path: Path) -> None:
    model, inputs = Calls(), [{"x": torch.randn(4, 3), "scale": torch.rand(3)} for _ in range(2)]
    with hookline.record(model, ports=("input", "output")) as rec:
        for given in inputs:
            model(**given)
    rec.save(tmp_path / "run.hookline")
    found = hookline.verify(tmp_path / "run.hookline", model=model, inputs=inputs, rows=1000)
    # x and scale (3 rows) and the layer's two calls at both ports; out, sum and mask
    assert found and found.recomputed == 2 * ((4 + 3) + 4 * 4 + (4 + 1 + 4))
    with hookline.record(model, "layer") as rec:
        model(inputs[0]["x"], scale=inputs[0]["scale"])
    rec.save(tmp_path / "one.hookline")

    def twice(value: Tensor) -> Tensor:
        return value * 2

    spoiled = change(tmp_path / "one.hookline", tmp_path / "two.hookline", "layer:output", 0, twice)
    found = hookline.verify(spoiled, model=model, inputs=inputs, rows=1000)
    assert [(mismatch.call, mismatch.row) for mismatch in found.mismatches] == [
        (c, r) for c in (0, 1) for r in range(4)
    ]


def test_a_tuple_of_arguments_and_a_mapping_of_steps(tmp_path: Path) -> None:
    model = nn.Bilinear(2, 3, 4)
    pair = torch.randn(5, 2), torch.randn(5, 3)
    with hookline.record(model) as rec:
        model(torch.randn(1, 2), torch.randn(1, 3)), model(*pair)
    rec.select(steps=1).save(tmp_path / "run.hookline")
    found = hookline.verify(tmp_path / "run.hookline", model=model, inputs={1: pair})
    assert found and found.recomputed == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64])
def test_values_that_were_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    write(tmp_path / "run", net(), batches(), dtype=dtype)
    found = hookline.verify(tmp_path / "run", model=net(), inputs=batches(), rows=1000)
    assert found and found.recomputed == 18 * 5
    wrong = change(tmp_path / "run", tmp_path / "wrong", "0:output", 0, lambda value: torch.zeros(5, 6).to(dtype))
    assert len(hookline.verify(wrong, model=net(), inputs=batches(), rows=1000).mismatches) == 5


class Flattens(nn.Module):
    """Its values begin with (samples, length), samples * length, or samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.flat, self.head = nn.Embedding(20, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.flat(x.reshape(-1, 4)).reshape(x.shape).sum(1))


TOKENS = [torch.randint(20, (3, 5), generator=torch.Generator().manual_seed(step)) for step in range(3)]
MASKS = [torch.rand(3, 5, generator=torch.Generator().manual_seed(9 + step)) < 0.5 for step in range(3)]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("length", [5, 1])
def test_rows_of_chosen_tokens(masked: bool, dtype: torch.dtype | None, length: int, tmp_path: Path) -> None:
    model, inputs = Flattens(), [tokens[:, :length] for tokens in TOKENS]
    masks = [mask[:, :length] if masked else torch.ones(3, length).bool() for mask in MASKS]
    with hookline.record(model, to=tmp_path / "run", ports=("input", "output"), dtype=dtype) as rec:
        for tokens, mask in zip(inputs, masks, strict=True):
            with rec.batch(ids=["a", "b", "c"], tokens=tokens, mask=mask):
                model(tokens)
    found = hookline.verify(tmp_path / "run", model=model, inputs=inputs, rows=10**6)
    chosen = int(sum(mask.sum() for mask in masks))
    # inputs of the root, the embedding and flat, outputs of these two; then what head gets and gives and the root
    # gives, which are samples; of one token each they are as many as tokens
    assert found.problems == [] and found.recomputed == 5 * chosen + 3 * (chosen if length == 1 else 3 * 3) and found
    with torch.no_grad():
        model.flat.bias += 1
    wrong = hookline.verify(tmp_path / "run", model=model, inputs=inputs, rows=10**6)
    assert {mismatch.site for mismatch in wrong.mismatches} == {
        "flat:output",
        "head:input",
        "head:output",
        "(root):output",
    }
    flat = [(mismatch.step, mismatch.row) for mismatch in wrong.mismatches if mismatch.site == "flat:output"]
    assert flat == [(step, row) for step, mask in enumerate(masks) for row in range(int(mask.sum()))]


def test_one_wrong_token_among_the_chosen(tmp_path: Path) -> None:
    """The same tokens in other places are other rows; one that differs is told by its number."""
    model = Flattens()
    with hookline.record(model, "embed", to=tmp_path / "run") as rec, rec.batch(ids=[1, 2, 3], mask=MASKS[0]):
        model(TOKENS[0])
    places = MASKS[0].flatten().nonzero().flatten().tolist()
    other = TOKENS[0].clone().flatten()
    other[places[2]] = (other[places[2]] + 1) % 20
    other[[place for place in range(15) if place not in places]] = 0  # not chosen
    found = hookline.verify(tmp_path / "run", model=model, inputs=[other.view(3, 5)], rows=1000)
    assert found.problems == [] and [mismatch.row for mismatch in found.mismatches] == [2]
    found = hookline.verify(tmp_path / "run", model=model, inputs=[TOKENS[0][:, :1]], rows=1000)
    assert "recorded [" in found.problems[0] and found.recomputed == 0


def test_a_dtype_that_no_option_makes(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", nn.Sequential(nn.Identity()), [torch.arange(4)], sites="0")
    found = hookline.verify(folder, model=nn.Sequential(nn.Identity()), inputs=[torch.arange(4.0)])
    assert found.recomputed == 0 and found.problems == [
        "0:output, output, step 0, call 0: recorded torch.int64, recomputed torch.float32. Pass the model that was "
        "recorded."
    ]


def test_the_inputs_of_several_writers(
    checked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has steps 0 and 1 of its own; what one got is never compared with what another kept."""
    model, given = net(), {rank: [torch.randn(4, 4) for _ in range(2)] for rank in (0, 2)}
    for rank, inputs in given.items():
        monkeypatch.setenv("RANK", str(rank))
        with hookline.record(model, "3", to="ranks") as rec:
            for x in inputs:
                model(x)
        assert rec.writers == [rank]
    monkeypatch.delenv("RANK")
    assert hookline.verify("ranks").folders == 2
    with pytest.raises(
        OptionError, match=r"parts of the writers 0, 2, which count their own steps\. Pass writer=0, and"
    ):
        hookline.verify("ranks", model=model, inputs=given[0])
    with pytest.raises(OptionError, match=r"writer: got 1, the recording has values of the writers 0, 2\."):
        hookline.verify("ranks", model=model, inputs=given[0], writer=1)
    for rank, inputs in given.items():
        found = hookline.verify("ranks", model=model, inputs=inputs, rows=1000, writer=rank)
        assert found and found.recomputed == 8
        other = hookline.verify("ranks", model=model, inputs=given[2 - rank], rows=1000, writer=rank)
        assert len(other.mismatches) == 8
    (checked / "code" / "ranks.py").write_text("import torch\ndef one(): return torch.nn.Identity(), []\n")
    assert main(["verify", "ranks", "--recompute", "code/ranks.py:one"]) == 2
    assert "Pass --writer 0" in capsys.readouterr().err
    assert main(["verify", "run.hookline", "--recompute", "code/check.py:both", "--writer", "0"]) == 0
    assert main(["verify", "run.hookline", "--recompute", "code/check.py:both", "--writer", "3"]) == 2
    assert "writer: got 3" in capsys.readouterr().err


def test_values_that_were_reduced(tmp_path: Path) -> None:
    write(tmp_path / "run", net(), batches(), reduce=lambda value: value.mean(1), sites="0")
    found = hookline.verify(tmp_path / "run", model=net(), inputs=batches(), rows=1000)
    assert found.recomputed == 0 and not found
    assert found.problems[0] == (
        "0:output, output, step 0, call 0: recorded [5], recomputed [5, 6]. Was it recorded with reduce=, which cannot "
        "be repeated here, or from other inputs?"
    )


def test_what_cannot_be_compared(folder: Path, tmp_path: Path) -> None:
    found = hookline.verify(folder, model=net()[:3], inputs=batches()[:2], rows=1000)
    assert "3: the model has no such module. Pass the model that was recorded." in found.problems
    assert "step 2: inputs has nothing for it. Pass what the model was called with in each step." in found.problems
    assert found.problems.count("3: the model has no such module. Pass the model that was recorded.") == 1

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.runs = nn.Identity(), True

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if self.runs else x

    model = Skips()
    write(tmp_path / "skips", model, [torch.randn(2)])
    model.runs = False
    found = hookline.verify(tmp_path / "skips", model=model, inputs=[torch.randn(2)])
    assert any(
        problem.startswith("layer:output, output, step 0, call 0: this call did not happen again.")
        for problem in found.problems
    )


def test_gradients_and_nothing(tmp_path: Path) -> None:
    model, x = net(), batches()[0]
    with hookline.record(model, ports="grad_output") as rec:
        model(x).sum().backward()
    rec.save(tmp_path / "run")
    found = hookline.verify(tmp_path / "run", model=model, inputs=[x])
    assert found.recomputed == 0
    assert found.problems == ["nothing can be recomputed: there are no rows of inputs or outputs with values."]


def test_damage_and_rows_together(folder: Path) -> None:
    shard = next(folder.rglob("*.safetensors"))
    shard.write_bytes(bytes(shard.stat().st_size))
    found = hookline.verify(folder, model=net(), inputs=batches())
    assert not found and found.recomputed == 0 and found.problems == store.verify(folder).problems


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": nn.Identity()}, OptionError, "model= and inputs= go together"),
        ({"inputs": []}, OptionError, "model= and inputs= go together"),
        (
            {"model": 3, "inputs": []},
            ArgumentError,
            r"the model must be a torch\.nn\.Module; got an object of type int",
        ),
        (
            {"model": nn.Identity(), "inputs": torch.ones(2)},
            ArgumentError,
            "inputs: got an object of type Tensor, wanted a list",
        ),
        ({"writer": 0}, OptionError, "writer: got 0, wanted the number of a process, together with model= and"),
        ({"model": nn.Identity(), "inputs": [], "writer": "0"}, OptionError, "writer: got '0', wanted the number"),
        ({"model": nn.Identity(), "inputs": [], "rows": 0}, OptionError, "rows: got 0, wanted a whole number from 1"),
        ({"tolerance": 0.1}, OptionError, r"tolerance: got 0\.1, wanted \(relative, absolute\)"),
        ({"tolerance": (1, -1)}, OptionError, r"tolerance: got \(1, -1\), wanted"),
    ],
)
def test_mistakes(folder: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hookline.verify(folder, **options)


# ---------------------------------------------------------------- the command

CHECK = """
import torch
from beside import SEED

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)

def both():
    model = Net()
    torch.manual_seed(1)
    return model.eval(), [torch.randn(8, 4) for _ in range(2)]

def wrong():
    model, inputs = both()
    return model, [x + 1 for x in inputs]

number = 3
"""


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "beside.py").write_text("SEED = 7\n")
    (tmp_path / "code" / "check.py").write_text(CHECK)
    torch.manual_seed(7)
    layer = nn.Linear(4, 2)
    model = nn.Module()
    model.layer = layer
    model.forward = lambda x: model.layer(x)  # type: ignore[method-assign]
    torch.manual_seed(1)
    write(tmp_path / "run.hookline", model, [torch.randn(8, 4) for _ in range(2)], sites="layer")
    return tmp_path


def test_the_command(checked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "run.hookline", "--recompute", "code/check.py:both"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run.hookline: 1 writer folder, 2 events, 1 shard, ")
    assert out.endswith("16 rows recomputed: no problem and 0 different rows found\n")
    assert main(["verify", "run.hookline", "--recompute", "code/check.py:wrong", "-n", "5", "--seed", "2"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all(line.startswith("layer:output, output, step ") for line in lines)
    assert last.endswith("5 rows recomputed: no problem and 5 different rows found")
    argv = ["verify", "run.hookline", "--recompute", "code/check.py:wrong", "--tolerance", "0,1000"]
    assert main(argv) == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["code/check.py"], "--recompute is FILE.py:FUNCTION, such as check.py:model_and_inputs; got code/check.py"),
        (["check.py:both"], "--recompute: there is no file check.py. Working folder: "),
        (["code/check.py:none"], "--recompute: code/check.py has no function none"),
        (["code/check.py:number"], "--recompute: code/check.py has no function number"),
        (["code/check.py:Net"], "--recompute: code/check.py:Net returned Net, wanted (model, inputs)"),
        (["code/check.py:both", "--tolerance", "1e-5"], "--tolerance is two numbers, such as 1e-5,1e-8; got 1e-5"),
        (["code/check.py:both", "-n", "0"], "rows: got 0, wanted a whole number from 1 on."),
    ],
)
def test_mistakes_on_the_command_line(
    checked: Path, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "run.hookline", "--recompute", *argv]) == 2
    assert said in capsys.readouterr().err
