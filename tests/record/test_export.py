"""A recording in the formats of others: each file is read with its own library and compared with the inputs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

import hookline
from hookline.cli.main import main
from hookline.errors import ArgumentError, FormatError, HooklineError, OptionError, SiteError
from hookline.extras import pip_line
from hookline.record import Recording, columns
from hookline.record.exact import FORMATS
from hookline.store import remote_shard
from hookline.store.remote import Remote

SIZES = (3, 1, 0, 5)
EXACT = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint32, torch.float16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]


class Passes(nn.Module):
    """Returns what it gets, whatever that is."""

    def forward(self, value: Any) -> Any:
        return value


def values_of(dtype: torch.dtype, shape: tuple[int, ...] = (2, 3)) -> list[Tensor]:
    made = [torch.randn(size, *shape) * 3 for size in SIZES]
    return [value > 0 if dtype == torch.bool else value.abs().to(dtype) for value in made]


def recorded(*values: Any, **options: Any) -> Recording:
    model = nn.Sequential(Passes())
    with hookline.record(model, "0", **options) as rec:
        for value in values:
            model(value)
    return rec


def npz(path: Path) -> dict[str, Any]:
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}


def bits(tensor: Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def nothing_left(folder: Path) -> bool:
    return not [name for name in os.listdir(folder) if "hookline-" in name]


# ---------------------------------------------------------------- every format, read back


@pytest.mark.parametrize("dtype", [*EXACT, *COMPLEX], ids=str)
def test_npz(dtype: torch.dtype, place: Any, tmp_path: Path) -> None:
    values = values_of(dtype)
    place(recorded(*values)).export(tmp_path / "out.npz", "npz")
    found = npz(tmp_path / "out.npz")
    assert list(found) == [f"{step}/0:output/0/output" for step in range(len(SIZES))]
    for array, value in zip(found.values(), values, strict=True):
        assert array.dtype == value.numpy().dtype and array.shape == value.shape
        assert array.tobytes() == value.numpy().tobytes()


@pytest.mark.parametrize("dtype", [*EXACT, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_safetensors(dtype: torch.dtype, place: Any, tmp_path: Path) -> None:
    values = values_of(dtype)
    place(recorded(*values)).export(tmp_path / "out.safetensors", "safetensors")
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert sorted(found) == [f"{step}/0:output/0/output" for step in range(len(SIZES))]
    for step, value in enumerate(values):
        tensor = found[f"{step}/0:output/0/output"]
        assert tensor.dtype == dtype and tensor.shape == value.shape
        assert np.array_equal(bits(tensor), bits(value))
    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize(
    ("dtype", "other"),
    [(torch.complex64, torch.float32), (torch.complex32, torch.float16), (torch.float8_e8m0fnu, torch.uint8)],
)
def test_a_dtype_that_lies_in_safetensors_as_another(dtype: torch.dtype, other: torch.dtype, tmp_path: Path) -> None:
    value = torch.rand(4, 3).to(dtype)
    recorded(value).export(tmp_path / "out", "safetensors")
    tensor = safetensors.torch.load_file(tmp_path / "out")["0/0:output/0/output"]
    assert tensor.dtype == other and np.array_equal(bits(tensor), bits(value))
    with safetensors.safe_open(tmp_path / "out", "pt") as file:
        about = json.loads(file.metadata()["hookline.dtypes"])
    assert about == {"0/0:output/0/output": str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (1,), ()], ids=str)
def test_parquet(
    dtype: torch.dtype, shape: tuple[int, ...], place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(columns, "PART_BYTES", 40)
    values = values_of(dtype, shape)
    rec = place(recorded(*values))
    rec.export(tmp_path / "out", "parquet")
    assert os.listdir(tmp_path / "out") == ["0.output.parquet"]
    file = parquet.ParquetFile(tmp_path / "out" / "0.output.parquet")
    table = file.read()
    about = {key.decode(): text.decode() for key, text in table.schema.metadata.items()}
    name = str(dtype).removeprefix("torch.")
    assert about.pop("hookline.shape") == json.dumps(list(shape))
    assert about == {"hookline.site": "0:output", "hookline.leaf": "output", "hookline.dtype": name}
    whole = torch.cat(values)
    flat = table["value"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    assert flat.dtype == whole.numpy().dtype and flat.tobytes() == whole.numpy().tobytes()
    wanted = [(step, 0, 0, row) for step, size in enumerate(SIZES) for row in range(size)]
    assert list(zip(*(table[name].to_pylist() for name in ("step", "call", "backward", "row")), strict=True)) == wanted
    rows = max(1, 40 // (dtype.itemsize * whole[0].numel()))
    assert file.num_row_groups == -(-len(whole) // rows)
    assert rec.rows("0:output").to_arrow().equals(table)


def test_parquet_is_read_by_polars(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    pytest.importorskip("pyarrow")
    values = values_of(torch.float32)
    recorded(*values).export(tmp_path / "out", "parquet")
    frame = polars.read_parquet(tmp_path / "out" / "*.parquet")
    assert np.array_equal(frame["value"].to_numpy().reshape(-1, 2, 3), torch.cat(values).numpy())


@pytest.mark.parametrize("dtype", [*EXACT, *COMPLEX], ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 2)], ids=str)
def test_zarr(
    dtype: torch.dtype, shape: tuple[int, ...], place: Any, tmp_path: Path, zarr: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "PART_BYTES", 40)
    values = values_of(dtype, shape)
    place(recorded(*values)).export(tmp_path / "out.zarr", "zarr")
    group = zarr.open_group(tmp_path / "out.zarr", mode="r")
    assert group.metadata.zarr_format == 3 and sorted(group) == ["0.output"]
    site, whole = group["0.output"], torch.cat(values)
    value = site["value"][:]
    assert value.dtype == whole.numpy().dtype and value.shape == whole.shape
    assert value.tobytes() == whole.numpy().tobytes()
    assert site["step"][:].tolist() == [step for step, size in enumerate(SIZES) for _ in range(size)]
    assert site["row"][:].tolist() == [row for size in SIZES for row in range(size)]
    assert not site["call"][:].any() and not site["backward"][:].any()
    assert dict(site.attrs) == {"site": "0:output", "leaf": "output", "dtype": str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("to", FORMATS)
def test_calls_and_backward_passes(to: str, tmp_path: Path, zarr: Any) -> None:
    """A module that runs twice in a step; two backward passes, whose gradients are those of the loss by hand."""
    pytest.importorskip("pyarrow")
    layer = nn.Identity()
    model, x = nn.Sequential(layer, nn.Tanh(), layer), torch.randn(4, 2, requires_grad=True)
    with hookline.record(model, "0", ports=("output", "grad_output")) as rec:
        out = model(x)
        for factor in (1.0, 3.0):
            (out * factor).sum().backward(retain_graph=True)
    out = tmp_path / "out"
    rec.export(out, to, sites="0:grad_output")
    slope = 1 - torch.tanh(x.detach()) ** 2
    wanted = {"0/0:grad_output/1/output": torch.ones(4, 2), "0/0:grad_output/0/output": slope}
    wanted |= {"0/0:grad_output/1.b1/output": torch.full((4, 2), 3.0), "0/0:grad_output/0.b1/output": 3 * slope}
    if to in ("npz", "safetensors"):
        found = npz(out) if to == "npz" else safetensors.torch.load_file(out)
        assert set(found) == set(wanted)
        for name, value in wanted.items():
            torch.testing.assert_close(torch.as_tensor(found[name]), value)
        return
    if to == "parquet":
        table = pytest.importorskip("pyarrow.parquet").read_table(out / "0.grad_output.parquet")
        places = list(zip(table["call"].to_pylist(), table["backward"].to_pylist(), strict=True))
        value = np.array(table["value"].to_pylist())
    else:
        group = zarr.open_group(out, mode="r")["0.grad_output"]
        places = list(zip(group["call"][:].tolist(), group["backward"][:].tolist(), strict=True))
        value = group["value"][:]
    assert places == [pair for pair in ((1, 0), (0, 0), (1, 1), (0, 1)) for _ in range(4)]
    torch.testing.assert_close(torch.as_tensor(value, dtype=torch.float32), torch.cat(list(wanted.values())))


# ---------------------------------------------------------------- what rows are, and who wrote them

LENGTH = 3


def told(numbers: range, ids: Any, *, masked: bool, place: Any = None) -> tuple[Recording, list[Any]]:
    """A recording of tokens and of samples, and of each row of tokens id, position, token and value."""
    model, wanted = nn.Sequential(Passes()), []
    where: Any = {} if place is None else {"to": place}
    with hookline.record(model, "0", **where) as rec:
        for number in numbers:
            tokens, values = torch.arange(6).view(2, LENGTH) + 10 * number, torch.randn(2, LENGTH, 4)
            mask = torch.tensor([[True, False, True], [False, False, number % 2 == 0]])
            mask = mask if masked else torch.ones(2, LENGTH, dtype=torch.bool)
            with rec.batch(ids=[ids(2 * number), ids(2 * number + 1)], tokens=tokens, mask=mask):
                model((values, values.sum((1, 2))))
            wanted += [
                (ids(2 * number + sample), position, int(tokens[sample, position]), values[sample, position].tolist())
                for sample in range(2)
                for position in range(LENGTH)
                if mask[sample, position]
            ]
    return rec, wanted


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ids", [int, lambda number: f"text \u20ac {number}"], ids=["int", "str"])
@pytest.mark.parametrize("to", ["parquet", "zarr", "arrow"])
def test_what_rows_are(
    to: str, ids: Any, masked: bool, place: Any, tmp_path: Path, zarr: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(columns, "PART_BYTES", 48)
    made, wanted = told(range(4), ids, masked=masked)
    rec = place(made)
    if to == "zarr":
        rec.export(tmp_path / "out", "zarr")
        group = zarr.open_group(tmp_path / "out", mode="r")
        tokens, samples = ({name: array[:].tolist() for name, array in group[f"0.output.{n}"].arrays()} for n in (0, 1))
    elif to == "parquet":
        rec.export(tmp_path / "out", "parquet")
        tokens, samples = (parquet.read_table(tmp_path / "out" / f"0.output.{n}.parquet").to_pydict() for n in (0, 1))
    else:
        tokens, samples = (rec.rows("0:output", leaf=f"output[{n}]").to_arrow().to_pydict() for n in (0, 1))
    place_names = ["step", "call", "backward", "row", "writer"]
    assert sorted(tokens) == sorted([*place_names, "id", "position", "token", "value"])
    assert sorted(samples) == sorted([*place_names, "id", "value"])
    assert list(zip(*(tokens[name] for name in ("id", "position", "token", "value")), strict=True)) == wanted
    assert samples["id"] == [ids(number) for number in range(8)] and samples["writer"] == [0] * 8
    assert set(map(type, tokens["id"])) == {type(ids(0))} and set(map(type, tokens["token"])) == {int}


@pytest.mark.parametrize("to", ["parquet", "zarr"])
def test_what_is_known_of_some_rows_only(to: str, tmp_path: Path, zarr: Any) -> None:
    """Tokens, then samples of which nobody told more, then rows of which nothing is known."""
    parquet = pytest.importorskip("pyarrow.parquet")
    model = nn.Sequential(Passes())
    with hookline.record(model, "0") as rec:
        with rec.batch(ids=[7, 8], mask=[[1, 1], [0, 1]]):
            model(torch.randn(2, 2, 5))
        with rec.batch(ids=[9]):
            model(torch.randn(1, 5))
        model(torch.randn(2, 5))
    with pytest.raises(SiteError, match="is not known"):
        rec.rows("0:output").identity()
    rec.export(tmp_path / "out", to)
    ids, positions = [7, 7, 8, 9, None, None], [0, 1, 1, None, None, None]
    if to == "parquet":
        table = parquet.read_table(tmp_path / "out" / "0.output.parquet")
        assert table["id"].to_pylist() == ids and table["position"].to_pylist() == positions
        assert "token" not in table.column_names
    else:
        group = zarr.open_group(tmp_path / "out", mode="r")["0.output"]
        for name, wanted in (("id", ids), ("position", positions)):
            assert group[f"{name}_known"][:].tolist() == [one is not None for one in wanted]
            known = group[name][:][group[f"{name}_known"][:]].tolist()
            assert known == [one for one in wanted if one is not None]
        assert "token" not in group
    part = rec.select(steps=[0, 1])
    with pytest.raises(SiteError, match=r"^0:output, output: of some rows id, position are known, of others id\."):
        part.rows("0:output").identity()


@pytest.mark.parametrize("to", ["parquet", "zarr"])
@pytest.mark.parametrize(
    ("ids", "said"),
    [([[1], ["a"]], "id is a number in some steps and a string in others"), ([["\ud800"]], "has to hold")],
)
def test_ids_that_no_column_can_hold(to: str, ids: list[Any], said: str, tmp_path: Path, zarr: Any) -> None:
    pytest.importorskip("pyarrow")
    model = nn.Sequential(Passes())
    with hookline.record(model, "0") as rec:
        for some in ids:
            with rec.batch(ids=some):
                model(torch.randn(1, 2))
    with pytest.raises(OptionError, match=said):
        rec.export(tmp_path / "out", to)
    assert os.listdir(tmp_path) == []


def of_two_writers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Recording, dict[int, list[Any]]]:
    wanted = {}
    for rank in (3, 11):
        monkeypatch.setenv("RANK", str(rank))
        _, wanted[rank] = told(range(rank, rank + 2), int, masked=True, place=folder)
    return hookline.load(folder), wanted


@pytest.mark.parametrize("to", FORMATS)
def test_the_parts_of_two_writers(to: str, tmp_path: Path, zarr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their steps, sites and calls are the same: a name says the writer, a row has it."""
    pytest.importorskip("pyarrow")
    rec, wanted = of_two_writers(tmp_path / "run", monkeypatch)
    out = tmp_path / "out"
    rec.export(out, to)
    if to in ("npz", "safetensors"):
        found = npz(out) if to == "npz" else safetensors.torch.load_file(out)
        names = [f"w{rank}/{step}/0:output/0/output[{n}]" for rank in wanted for step in (0, 1) for n in (0, 1)]
        assert sorted(found) == sorted(names)
        for rank, rows in wanted.items():
            parts = [found[f"w{rank}/{step}/0:output/0/output[0]"].tolist() for step in (0, 1)]
            assert parts[0] + parts[1] == [value for *_, value in rows]
        rec.select(writers=11).export(tmp_path / "one", to)
        one = npz(tmp_path / "one") if to == "npz" else safetensors.torch.load_file(tmp_path / "one")
        assert sorted(one) == [f"{step}/0:output/0/output[{n}]" for step in (0, 1) for n in (0, 1)]
        return
    if to == "parquet":
        table = pytest.importorskip("pyarrow.parquet").read_table(out / "0.output.0.parquet").to_pydict()
    else:
        group = zarr.open_group(out, mode="r")["0.output.0"]
        table = {name: array[:].tolist() for name, array in group.arrays()}
    for rank, rows in wanted.items():
        here = [place for place, writer in enumerate(table["writer"]) if writer == rank]
        columns_of = [[table[name][place] for place in here] for name in ("id", "position", "token", "value")]
        assert list(zip(*columns_of, strict=True)) == rows
    assert len(table["writer"]) == sum(map(len, wanted.values()))


def test_a_recording_of_two_writers_is_saved_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders and steps of the writers are the same numbers; each row keeps its own writer and sample."""
    rec, wanted = of_two_writers(tmp_path / "run", monkeypatch)
    rec.save(tmp_path / "again")
    again = hookline.load(tmp_path / "again")
    assert again.writers == [3, 11] and len(again) == 4 and hookline.verify(tmp_path / "again")
    for rank, expected in wanted.items():
        rows = again.select(writers=rank).rows("0:output", leaf="output[0]")
        told_now = [rows.identity()[name].tolist() for name in ("id", "position", "token")]
        assert list(zip(*told_now, rows[:].tolist(), strict=True)) == expected


# ---------------------------------------------------------------- bfloat16 and what has no exact type


@pytest.mark.parametrize("to", ["npz", "parquet", "zarr"])
@pytest.mark.parametrize("bf16", ["float32", "uint16"])
def test_bfloat16(to: str, bf16: str, place: Any, tmp_path: Path, zarr: Any) -> None:
    pytest.importorskip("pyarrow")
    value = torch.cat([torch.randn(5, 2), torch.tensor([[float("nan"), float("-inf")], [-0.0, 1e-40]])]).bfloat16()
    place(recorded(value)).export(tmp_path / "out", to, bf16=bf16)
    if to == "npz":
        (found,) = npz(tmp_path / "out").values()
    elif to == "zarr":
        found = zarr.open_group(tmp_path / "out", mode="r")["0.output/value"][:]
    else:
        table = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "out")
        found = table["value"].combine_chunks().flatten().to_numpy().reshape(7, 2)
        assert table.schema.metadata[b"hookline.dtype"] == b"bfloat16"
    number = bits(value).view(np.uint16).reshape(7, 2)  # a bfloat16 is the upper half of a float32
    wanted = number if bf16 == "uint16" else (number.astype(np.uint32) << 16).view(np.float32)
    assert found.dtype == bf16 and found.tobytes() == wanted.tobytes()


def test_bfloat16_is_refused_and_offered(place: Any, tmp_path: Path) -> None:
    rec = place(recorded(torch.randn(2), torch.randn(2).bfloat16()))
    for to in ("npz", "parquet", "zarr"):
        with pytest.raises(OptionError) as error:
            rec.export(tmp_path / "out", to)
        assert str(error.value) == (
            f'0:output, output, call 0 of step 1: {to} has no exact type for bfloat16. Pass bf16="float32" (every '
            'value stays exact) or bf16="uint16" (the bits), or to="safetensors", which has it.'
        )
        assert not (tmp_path / "out").exists() and nothing_left(tmp_path)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize(
    ("dtype", "to", "advice"),
    [
        (
            torch.float8_e4m3fn,
            "npz",
            'Pass to="safetensors", which keeps it, or leave the site out, or record with dtype=',
        ),
        (torch.float8_e5m2fnuz, "zarr", 'Pass to="safetensors", which keeps it, or leave'),
        (torch.complex32, "npz", 'Pass to="safetensors", which keeps it, or leave the site out.'),
        (torch.complex64, "parquet", 'Pass to="npz" or to="zarr" or to="safetensors", which keeps it'),
    ],
)
def test_a_dtype_without_an_exact_type(dtype: torch.dtype, to: str, advice: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as error:
        recorded(torch.rand(2).to(dtype)).export(tmp_path / "out", to)
    name = str(dtype).removeprefix("torch.")
    assert str(error.value).startswith(
        f"0:output, output, call 0 of step 0: {to} has no exact type for {name}. {advice}"
    )
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- values of all kinds


@pytest.mark.parametrize("to", ["npz", "safetensors"])
def test_values_of_many_tensors(to: str, place: Any, tmp_path: Path) -> None:
    """Scalars, empty ones, and names that could lead out of a folder."""
    names = ["../../x", "a/../b", "ü\n%", "..", "C:\\x", "x\0y", "x"]
    values = {name: torch.randn(2) + number for number, name in enumerate(names)}
    value = (torch.tensor(1.5), torch.empty(0, 4), [torch.tensor(True)], values)
    place(recorded(value)).export(tmp_path / "out", to)
    found = npz(tmp_path / "out") if to == "npz" else safetensors.torch.load_file(tmp_path / "out")
    assert len(found) == 3 + len(names)
    start = "0/0:output/0/output"
    assert found[f"{start}[0]"].shape == () and float(found[f"{start}[0]"]) == 1.5
    assert found[f"{start}[1]"].shape == (0, 4) and bool(found[f"{start}[2][0]"]) is True
    for name, wanted in values.items():
        assert sum(np.array_equal(np.asarray(array), wanted.numpy()) for array in found.values()) == 1, name
    if to == "npz":
        assert all(part not in (".", "..") and part.isprintable() for name in found for part in name.split("/"))
        assert not any("\\" in name for name in found)
        assert np.array_equal(found[f"{start}[3]['a/%2E%2E/b']"], values["a/../b"].numpy())


def test_a_site_with_several_tensors_has_several_tables(place: Any, tmp_path: Path, zarr: Any) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    values = [{"a": torch.randn(3, 2), "../b": (torch.randn(4),), "A": torch.randn(1, 1)} for _ in range(2)]
    rec = place(recorded(*values))
    rec.export(tmp_path / "tables", "parquet")
    names = ["0.output...%2Fb.0", "0.output.A~2", "0.output.a"]
    assert sorted(os.listdir(tmp_path / "tables")) == [f"{name}.parquet" for name in names]
    rec.export(tmp_path / "out.zarr", "zarr")
    group = zarr.open_group(tmp_path / "out.zarr", mode="r")
    for name, wanted in [
        ("0.output...%2Fb.0", torch.cat([value["../b"][0] for value in values])),
        ("0.output.A~2", torch.cat([value["A"] for value in values])),
        ("0.output.a", torch.cat([value["a"] for value in values])),
    ]:
        assert np.array_equal(group[name]["value"][:], wanted.numpy())
        table = parquet.read_table(tmp_path / "tables" / f"{name}.parquet")
        assert np.array_equal(np.array(table["value"].to_pylist()).reshape(wanted.shape), wanted.numpy())
    assert group["0.output.a"].attrs["leaf"] == "output['a']"


@pytest.mark.parametrize("to", FORMATS)
def test_modules_with_odd_names(to: str, tmp_path: Path, zarr: Any) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    model, x = nn.Sequential(), torch.randn(3, 2)
    names = ["a/b", "ü \u20ac", "x" * 300, "%2F"]
    for name in names:
        model.add_module(name, nn.Identity())
    with hookline.record(model) as rec:
        model(x)
    out = tmp_path / "out"
    rec.export(out, to)
    if to in ("npz", "safetensors"):
        found = npz(out) if to == "npz" else safetensors.torch.load_file(out)
        assert "0/a/b:output/0/output" in found
    elif to == "parquet":
        tables = {parquet.read_table(file).schema.metadata[b"hookline.site"].decode(): file for file in out.iterdir()}
        assert set(tables) == {f"{name}:output" for name in [*names, "(root)"]}
        found = {site: parquet.read_table(file)["value"].to_pylist() for site, file in tables.items()}
        assert tables["a/b:output"].name == "a%2Fb.output.parquet"
    else:
        found = {name: site["value"][:] for name, site in zarr.open_group(out, mode="r").groups()}
        assert "a%2Fb.output" in found
    assert len(found) == 5
    for array in found.values():
        assert np.array_equal(np.asarray(array, dtype=np.float32), x.numpy())


@pytest.mark.parametrize("to", ["npz", "safetensors"])
def test_tensors_that_are_not_plain(to: str, tmp_path: Path) -> None:
    """A conjugate view, a transposed one, and a sparse tensor, which is written dense as on disk."""
    x = torch.randn(3, 2, dtype=torch.complex64)
    sparse = torch.eye(3).to_sparse()
    recorded((x.conj().T, torch.randn(3, 4).T, sparse)).export(tmp_path / "out", to)
    found = npz(tmp_path / "out") if to == "npz" else safetensors.torch.load_file(tmp_path / "out")
    first, _, dense = (np.asarray(found[f"0/0:output/0/output[{number}]"]) for number in range(3))
    wanted = x.conj().T.resolve_conj().contiguous()
    assert np.array_equal(first, (wanted if to == "npz" else torch.view_as_real(wanted)).numpy())
    assert np.array_equal(dense, np.eye(3, dtype=np.float32))


def test_a_sparse_tensor_has_no_rows(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rec = recorded(torch.eye(3).to_sparse())
    with pytest.raises(
        OptionError, match=r"a tensor that is not plain has no rows in parquet\. Save the recording and"
    ):
        rec.export(tmp_path / "out", "parquet")
    rec.save(tmp_path / "run.hookline")
    hookline.load(tmp_path / "run.hookline").export(tmp_path / "out", "parquet")
    table = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "out")
    assert table["value"].to_pylist() == np.eye(3).tolist()


def test_values_that_were_not_recorded(tmp_path: Path) -> None:
    rec = recorded(torch.empty(3, device="meta"))
    with pytest.raises(OptionError, match=r"^0:output, output, call 0 of step 0: only dtype and shape were recorded"):
        rec.export(tmp_path / "out", "npz")


@pytest.mark.parametrize("to", ["npz", "safetensors", "parquet", "zarr"])
def test_an_object_store_is_asked_once_for_each_tensor(
    to: str, tmp_path: Path, zarr: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("pyarrow")
    url = f"memory://export/{to}.hookline"
    rec = recorded(*(torch.randn(5, 7) for _ in range(6)))
    rec.save(url)
    rec.export(tmp_path / "wanted", to)
    asked, read = list[int](), Remote.read

    def count(place: Remote, begin: int, end: int) -> bytes:
        asked.append(end - begin)
        return read(place, begin, end)

    back = hookline.load(url)
    monkeypatch.setattr(Remote, "read", count)
    monkeypatch.setattr(remote_shard, "_KEPT", 0)
    remote_shard.recent.forget()
    back.export(tmp_path / "out", to)
    assert asked.count(5 * 7 * 4) == 6
    if to in ("npz", "safetensors"):
        assert (tmp_path / "out").read_bytes() == (tmp_path / "wanted").read_bytes()


def test_values_of_a_recording_on_disk_that_were_not_recorded(tmp_path: Path) -> None:
    recorded(torch.randn(3), torch.empty(3, device="meta")).save(tmp_path / "run.hookline")
    with pytest.raises(OptionError, match=r"^0:output, output, call 0 of step 1: only dtype and shape were recorded"):
        hookline.load(tmp_path / "run.hookline").export(tmp_path / "out", "npz")
    assert nothing_left(tmp_path) and not (tmp_path / "out").exists()


def test_values_with_a_graph(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    model, x = nn.Sequential(nn.Linear(2, 3)), torch.randn(4, 2)
    with hookline.record(model, "0", detach=False) as rec:
        out = model(x)
    rec.export(tmp_path / "out.npz", "npz")
    assert np.array_equal(next(iter(npz(tmp_path / "out.npz").values())), out.detach().numpy())
    rec.export(tmp_path / "out", "parquet")
    table = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "out")
    assert np.array_equal(np.array(table["value"].to_pylist(), dtype=np.float32), out.detach().numpy())


def test_an_export_leaves_snapshots_as_they_are(tmp_path: Path) -> None:
    """It reads a copy-on-write snapshot; the model that writes afterwards does not reach the file."""
    model, x = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), torch.randn(5, 3)
    wanted = x.clone()
    with hookline.record(model, "0") as rec:
        model[0](x)
        model(x)
    x.zero_()
    rec.export(tmp_path / "out", "npz")
    assert all(np.array_equal(array, wanted.numpy()) for array in npz(tmp_path / "out").values())


# ---------------------------------------------------------------- all or nothing


@pytest.mark.parametrize("to", FORMATS)
def test_something_of_that_name_exists(to: str, tmp_path: Path) -> None:
    rec = recorded(torch.randn(2, 2))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(OptionError, match=f"{name}: something of that name exists and was left as it is"):
            rec.export(tmp_path / name, to)
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "link"] and not os.listdir(tmp_path / "folder")


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_after_an_error(
    to: str, error: BaseException, tmp_path: Path, zarr: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second tensor, or part of the rows, cannot be read."""
    pytest.importorskip("pyarrow")
    rec = recorded(torch.randn(4, 2), torch.randn(4, 2))
    seen: list[int] = []

    def fail(tensor: Tensor, *args: Any) -> Tensor:
        seen.append(len(os.listdir(tmp_path)))
        if len(seen) > 1:
            raise error
        return tensor

    monkeypatch.setattr(columns, "PART_BYTES", 16)
    monkeypatch.setattr(columns, "convert", fail)
    monkeypatch.setattr(sys.modules["hookline.record.export"]._Leaf, "data", lambda leaf: fail(leaf.event.leaf(0)))
    with pytest.raises(FormatError if isinstance(error, OSError) else KeyboardInterrupt) as raised:
        rec.export(tmp_path / "out", to)
    assert seen == [1, 1] and os.listdir(tmp_path) == []
    if isinstance(error, OSError):
        assert "out: it cannot be written (No space left on device). Nothing was left behind." in str(raised.value)


@pytest.mark.parametrize("to", FORMATS)
def test_the_disk_has_all_of_it_before_it_gets_its_name(
    to: str, tmp_path: Path, zarr: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    rec, synced, named = recorded(torch.randn(4, 2), torch.randn(4, 2)), [], []
    real_sync, real_rename = os.fsync, os.rename

    def sync(handle: int) -> None:
        real_sync(handle)
        synced.append(os.fstat(handle).st_ino)

    def rename(old: Any, new: Any) -> None:
        everything = [Path(old), *Path(old).rglob("*")]
        assert {path.stat().st_ino for path in everything} <= set(synced)
        named.append(len(everything))
        synced.clear()
        real_rename(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    rec.export(tmp_path / "out", to)
    assert len(named) == 1 and (named[0] > 1) == (tmp_path / "out").is_dir()
    assert synced == [tmp_path.stat().st_ino]

    def refuse(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(FormatError, match=r"it cannot be written \(Input/output error\)"):
        rec.export(tmp_path / "other", to)
    assert os.listdir(tmp_path) == ["out"]


def test_parents_are_made_and_a_place_that_cannot_be(tmp_path: Path) -> None:
    rec = recorded(torch.randn(2))
    rec.export(tmp_path / "a" / "b" / "out.npz", "npz")
    assert len(npz(tmp_path / "a" / "b" / "out.npz")) == 1
    with pytest.raises(FormatError, match="out: it cannot be written"):
        rec.export(tmp_path / "a" / "b" / "out.npz" / "out", "npz")


def test_two_exports_are_the_same_bytes(tmp_path: Path) -> None:
    rec = recorded(torch.randn(2, 3), torch.randn(3))
    for to in ("npz", "safetensors"):
        for name in ("a", "b"):
            rec.export(tmp_path / f"{name}.{to}", to)
        assert (tmp_path / f"a.{to}").read_bytes() == (tmp_path / f"b.{to}").read_bytes()


# ---------------------------------------------------------------- mistakes


def test_options(tmp_path: Path) -> None:
    rec = recorded(torch.randn(2, 2))
    with pytest.raises(OptionError, match=r'^to: got \'npy\', wanted one of "npz", .*; nearest: "npz"'):
        rec.export(tmp_path / "out", "npy")
    with pytest.raises(
        OptionError, match=r'^bf16: got \'int\', wanted "float32" \(every value stays exact\) or "uint16"'
    ):
        rec.export(tmp_path / "out", "npz", bf16="int")
    with pytest.raises(SiteError, match='no module "1"'):
        rec.export(tmp_path / "out", "npz", sites="1")
    with pytest.raises(SiteError, match="there is no tensor to export"):
        rec.export(tmp_path / "out", "npz", sites="0:input")
    with pytest.raises(SiteError, match="there is no tensor to export"):
        recorded().export(tmp_path / "out", "npz")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("to", ["parquet", "zarr"])
def test_rows_that_do_not_fit_together(to: str, tmp_path: Path) -> None:
    for other in (torch.randn(2, 4), torch.randn(2, 3).double()):
        with pytest.raises(OptionError, match=r"^0:output, output: call 0 of step 1 has torch.float.*; rows need one"):
            recorded(torch.randn(2, 3), other).export(tmp_path / "out", to)
    assert os.listdir(tmp_path) == []


def test_rows_without_elements(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rec = recorded(torch.empty(3, 0))
    with pytest.raises(OptionError, match=r"^0:output, output: its rows have 0 elements, a list in Parquet has 1 to"):
        rec.export(tmp_path / "out", "parquet")
    assert rec.rows("0:output").to_arrow()["value"].to_pylist() == [[], [], []]


@pytest.mark.parametrize(
    ("call", "package", "name"),
    [
        (lambda rec, out: rec.export(out, "parquet"), "pyarrow", "parquet"),
        (lambda rec, out: rec.export(out, "zarr"), "zarr", "zarr"),
        (lambda rec, out: rec.rows("0:output").to_arrow(), "pyarrow", "parquet"),
        (lambda rec, out: rec.to_pandas(), "pandas", "pandas"),
        (lambda rec, out: rec.to_polars(), "polars", "polars"),
    ],
)
def test_a_missing_package(call: Any, package: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [known for known in sys.modules if known.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(HooklineError) as error:
        call(recorded(torch.randn(2)), tmp_path / "out")
    assert f"needs {package}, which cannot be imported (" in str(error.value)
    assert str(error.value).endswith(f"run: {pip_line(name)}") and "hookline" not in pip_line(name)
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- hand-off in memory


def test_dlpack(place: Any) -> None:
    values = values_of(torch.float32)
    rows = place(recorded(*values)).rows("0:output")
    assert rows.__dlpack_device__() == torch.zeros(1).__dlpack_device__()
    assert np.array_equal(np.from_dlpack(rows), torch.cat(values).numpy())
    assert torch.equal(torch.from_dlpack(rows), torch.cat(values))
    with pytest.raises(BufferError, match="0:output: rows of several values are always copied"):
        rows.__dlpack__(copy=False)


def test_arrow_and_bfloat16() -> None:
    pytest.importorskip("pyarrow")
    value = torch.randn(4, 3).bfloat16()
    rows = recorded(value).rows("0:output")
    with pytest.raises(OptionError, match=r"^0:output, output: parquet has no exact type for bfloat16\. Pass bf16="):
        rows.to_arrow()
    assert rows.to_arrow(bf16="float32")["value"].to_pylist() == value.float().tolist()


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_frames(kind: str, place: Any) -> None:
    package = pytest.importorskip(kind)
    x = torch.randn(4, 3)
    x[0, 0], x[1, 1], x[2] = float("nan"), float("inf"), 0
    rec = place(recorded(x, (x.bfloat16(), torch.tensor(3)), {"a": torch.empty(0)}, "no tensor"))
    frame = rec.to_pandas() if kind == "pandas" else rec.to_polars()
    assert type(frame) is package.DataFrame and frame.shape == (4, 22)
    table = {name: list(frame[name]) for name in frame.columns}
    assert table["step"] == [0, 1, 1, 2] and table["order"] == [0, 1, 1, 2]
    assert table["path"] == ["0"] * 4 and table["port"] == ["output"] * 4
    assert table["leaf"] == ["output", "output[0]", "output[1]", "output['a']"]
    assert table["dtype"] == ["float32", "bfloat16", "int64", "float32"]
    assert table["shape"] == ["4x3", "4x3", "scalar", "0"]
    assert table["numel"] == [12, 12, 1, 0] and table["nbytes"] == [48, 24, 8, 0]
    assert table["nan"] == [1, 1, 0, 0] and table["inf"] == [1, 1, 0, 0] and table["zeros"] == [3, 3, 0, 0]
    assert table["neg_inf"] == table["subnormal"] == [0] * 4
    finite = x[x.isfinite()].double()
    for name, wanted in [
        ("mean", finite.mean()),
        ("std", finite.std(correction=0)),
        ("min", finite.min()),
        ("max", finite.max()),
        ("l2", finite.norm()),
    ]:
        assert table[name][0] == pytest.approx(float(wanted), rel=1e-12)
        assert table[name][2] == (0 if name == "std" else 3)
    dtypes = [str(dtype).lower() for dtype in frame.dtypes]
    assert [dtypes[place] for place in (0, 1, 4, 5, 6, 10, *range(16, 22))] == ["int64"] * 12
    assert dtypes[11:16] == ["float64"] * 5


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_a_frame_of_nothing_and_of_a_nested_tensor(kind: str) -> None:
    pytest.importorskip(kind)
    empty, nested = recorded(), recorded(torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]))
    frames = [rec.to_pandas() if kind == "pandas" else rec.to_polars() for rec in (empty, nested)]
    assert [frame.shape for frame in frames] == [(0, 22), (1, 22)]
    assert list(frames[0].dtypes) == list(frames[1].dtypes)
    assert list(frames[1]["shape"]) == ["nested"] and list(frames[1]["numel"]) == [5]


def test_a_frame_of_a_recording_on_disk_touches_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("polars")
    recorded(torch.randn(3), torch.randn(2)).save(tmp_path / "run.hookline")
    rec = hookline.load(tmp_path / "run.hookline")
    for shard in tmp_path.rglob("*.safetensors"):
        shard.unlink()
    assert list(rec.to_polars()["nbytes"]) == [12, 8]


# ---------------------------------------------------------------- the command


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    value = torch.randn(4, 2).bfloat16()
    recorded(value, value).save("run.hookline")
    assert main(["export", "run.hookline", "--to", "npz", "-o", "out.npz"]) == 2
    assert 'has no exact type for bfloat16. Pass bf16="float32"' in capsys.readouterr().err
    assert main(["export", "run.hookline", "--to", "npz", "-o", "out.npz", "--bf16", "float32", "--sites", "0"]) == 0
    out = capsys.readouterr()
    size = os.path.getsize("out.npz")
    assert not out.out and out.err == f"hookline: 2 tensors -> out.npz ({size} bytes)\n"
    assert all(np.array_equal(array, value.float().numpy()) for array in npz(Path("out.npz")).values())
    assert main(["export", "run.hookline", "--to", "npz", "-o", "out.npz", "--bf16", "float32"]) == 2
    assert "something of that name exists" in capsys.readouterr().err
    assert main(["export", "run.hookline", "--to", "csv", "-o", "x"]) == 2
    assert "to: got 'csv', wanted one of" in capsys.readouterr().err


def test_numpy_says_what_to_do() -> None:
    with pytest.raises(ArgumentError, match=r"NumPy has no torch.bfloat16"):
        np.asarray(recorded(torch.randn(2).bfloat16()).rows("0:output"))
