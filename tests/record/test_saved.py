"""Values on disk: a recording is saved and loaded; and one layer's output is written while the model runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hookline
from hookline.errors import FormatError, OptionError
from hookline.sites import PORTS


class Net(nn.Module):
    """What the question is usually asked about: a chosen layer inside a model."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.classifier = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def expected_conv(model: Net, x: Tensor) -> Tensor:
    conv = model.features[0]
    return torch.nn.functional.conv2d(x, conv.weight, conv.bias).detach()


# ---------------------------------------------------------------- a chosen layer's output, on the way and back


def test_record_save_load(tmp_path: Path) -> None:
    model, x = Net(), torch.randn(2, 1, 6, 6)
    with hookline.record(model, "features.0") as rec:
        model(x)
    rec.save(tmp_path / "run.hookline")
    back = hookline.load(tmp_path / "run.hookline")
    assert torch.equal(back["features.0"].output, expected_conv(model, x))


def test_a_hook_that_writes_during_the_forward(tmp_path: Path) -> None:
    """The plain way: the file is there before the forward is over, with the value before the in-place ReLU."""
    model, x, file = Net(), torch.randn(2, 1, 6, 6), tmp_path / "conv.pt"
    seen: list[bool] = []

    def write(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        torch.save(output.detach(), file)

    model.classifier.register_forward_pre_hook(lambda module, args: seen.append(file.exists()))
    with hookline.register_forward_hook(model.features[0], write):
        model(x)
    assert seen == [True]
    back = torch.load(file, weights_only=True)
    assert torch.equal(back, expected_conv(model, x)) and not back.requires_grad
    file.unlink()
    model(x)
    assert not file.exists(), "the hook was removed"


def test_a_hook_that_writes_each_call_to_a_file_of_its_own(tmp_path: Path) -> None:
    model, x = Net(), torch.randn(3, 2, 1, 6, 6)

    def write(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        save_file({"output": output.detach().contiguous()}, tmp_path / f"call-{len(os.listdir(tmp_path))}.safetensors")

    with hookline.register_forward_hook(model.features[0], write):
        for batch in x:
            model(batch)
    assert sorted(os.listdir(tmp_path)) == [f"call-{number}.safetensors" for number in range(3)]
    for number, batch in enumerate(x):
        back = load_file(tmp_path / f"call-{number}.safetensors")["output"]
        assert torch.equal(back, expected_conv(model, batch))


def test_the_files_can_be_read_with_safetensors_alone(tmp_path: Path) -> None:
    model, x = Net(), torch.randn(2, 1, 6, 6)
    with hookline.record(model, ["features.0", "classifier"]) as rec:
        out = model(x)
    rec.save(tmp_path / "run.hookline")
    (manifest,) = (tmp_path / "run.hookline").glob("w00000-*/manifest.jsonl")
    (commit,) = map(json.loads, manifest.read_text().splitlines())
    lines, writer = commit["events"], manifest.parent
    assert [(line["path"], line["port"], line["call"]) for line in lines] == [
        ("features.0", "output", 0), ("classifier", "output", 0),
    ]  # fmt: skip
    found = []
    for line in lines:
        with safe_open(writer / line["shard"], "pt") as file:
            found.append(file.get_tensor(line["tensors"][0]["name"]))
    assert torch.equal(found[0], expected_conv(model, x)) and torch.equal(found[1], out.detach())


def test_a_value_alone_goes_through_torch_save(tmp_path: Path) -> None:
    model, x = Net(), torch.randn(2, 1, 6, 6)
    with hookline.record(model, "features.0") as rec:
        model(x)
    torch.save(rec["features.0"].output, tmp_path / "value.pt")
    assert torch.equal(torch.load(tmp_path / "value.pt", weights_only=True), expected_conv(model, x))


# ---------------------------------------------------------------- what comes back is what was there


class Odd(nn.Module):
    def forward(self, x: Tensor, *, flag: bool = True) -> Any:
        base = torch.arange(24.0).view(4, 6)
        return {
            "bf16": x.bfloat16(), "fp8": x.to(torch.float8_e4m3fn), "int": x.long(), "bool": x > 0,
            "complex": torch.complex(x, -x), "double": x.double(), "scalar": x.sum(), "empty": x[:0],
            "transposed": base.t(), "strided": base[::2, 1::2], "expanded": x[:1].expand(3, 2),
            7: (1, 2.5, None, "text", float("nan")), "list": [x, [x]],
        }  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and same_bits(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one != one)


def same_bits(one: Tensor, other: Tensor) -> bool:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*raw)


def test_every_dtype_and_form_comes_back_bit_by_bit(tmp_path: Path) -> None:
    model, x = Odd(), torch.tensor([[1.5, -2.0], [float("inf"), 0.0], [-0.0, 3.0]])
    with hookline.record(model, ports=("input", "output")) as rec:
        model(x, flag=False)
    rec.save(tmp_path / "run.hookline")
    back = hookline.load(tmp_path / "run.hookline")
    assert same(rec["(root)"].output, back["(root)"].output)
    assert same(rec["(root)"].args, back["(root)"].args) and back["(root)"].kwargs == {"flag": False}


def test_loaded_values_can_be_changed_without_reaching_the_file(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with hookline.record(model) as rec:
        model(torch.ones(2))
    rec.save(tmp_path / "run.hookline")
    back = hookline.load(tmp_path / "run.hookline")
    back["(root)"].output.zero_()
    assert torch.equal(hookline.load(tmp_path / "run.hookline")["(root)"].output, rec["(root)"].output)


def test_save_and_load_again_and_select(tmp_path: Path) -> None:
    """A loaded recording is a recording: it can be cut and saved like a live one."""
    model = Net()
    with hookline.record(model, ports=PORTS) as rec:
        for _ in range(3):
            model(torch.randn(1, 1, 6, 6, requires_grad=True)).sum().backward()
    rec.save(tmp_path / "one")
    hookline.load(tmp_path / "one").select("features.*", steps=[1, 2]).save(tmp_path / "two")
    back = hookline.load(tmp_path / "two")
    wanted = [event for event in rec if event.path.startswith("features.") and event.step > 0]
    assert len(back) == len(wanted) == 2 * 3 * 4 and back.steps == [1, 2]
    for event, other in zip(wanted, back, strict=True):
        assert (event.order, event.step, event.path, event.port) == (other.order, other.step, other.path, other.port)
        assert same(event.value, other.value) and event.nbytes == other.nbytes
        assert event.summaries() == other.summaries()
    assert str(back).replace("two", "") == str(rec.select("features.*", steps=[1, 2]))


def test_an_empty_recording(tmp_path: Path) -> None:
    model = Net()
    with hookline.record(model) as rec:
        pass
    rec.save(tmp_path / "run.hookline")
    back = hookline.load(tmp_path / "run.hookline")
    assert len(back) == 0 and back.paths == rec.paths and back.steps == [] and "Nothing was recorded" in str(back)


def test_a_recording_is_saved_while_it_is_made(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with hookline.record(model) as rec:
        for count in range(1, 4):
            model(torch.ones(2))
            rec.save(tmp_path / "run.hookline", overwrite=True)
            assert len(hookline.load(tmp_path / "run.hookline")) == count


# ---------------------------------------------------------------- refusals


@pytest.fixture
def rec() -> hookline.Recording:
    model = nn.Linear(2, 2)
    with hookline.record(model) as rec:
        model(torch.ones(2))
    return rec


def test_a_recording_is_not_overwritten_unasked(rec: hookline.Recording, tmp_path: Path) -> None:
    rec.save(tmp_path / "run.hookline")
    with pytest.raises(OptionError, match=r"a recording of that name exists.*or pass overwrite=True"):
        rec.save(tmp_path / "run.hookline")
    rec.select(steps=[]).save(tmp_path / "run.hookline", overwrite=True)
    assert len(hookline.load(tmp_path / "run.hookline")) == 0
    assert os.listdir(tmp_path) == ["run.hookline"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_place_below_a_file(rec: hookline.Recording, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FormatError, match=r"the recording cannot be written .*Choose a folder that you may write to"):
        rec.save(tmp_path / "file" / "run.hookline", overwrite=overwrite)
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_a_folder_without_permission(rec: hookline.Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(FormatError, match=r"the recording cannot be written \(Permission denied\)"):
        rec.save(tmp_path / "run.hookline")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["missing", "file", "other folder", "cut", "emptied"])
def test_what_cannot_be_loaded(rec: hookline.Recording, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "run.hookline"
    if kind == "file":
        place.write_bytes(b"pickle")
    elif kind == "other folder":
        place.mkdir()
    elif kind != "missing":
        rec.save(place)
        shard = next(place.glob("*/*.safetensors"))
        shard.unlink() if kind == "emptied" else os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(FormatError, match=r"run\.hookline"):
        _ = hookline.load(place)["(root)"].output
    if place.is_dir():
        shutil.rmtree(place)
