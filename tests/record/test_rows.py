"""The rows of a site as one array: in memory and on disk, against a plain concatenation."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hookline
from hookline.errors import ArgumentError, OptionError, SiteError
from hookline.record import Recording
from hookline.store import remote_shard
from hookline.store.remote import Remote

SIZES = (3, 1, 0, 5, 2)


def recorded(dtype: torch.dtype = torch.float32) -> tuple[Recording, Tensor]:
    """A recording of five steps, and its rows by hand."""
    values = [(torch.arange(size * 4).reshape(size, 2, 2) + 100 * step).to(dtype) for step, size in enumerate(SIZES)]
    model = nn.Sequential(nn.Identity())
    with hookline.record(model) as rec:
        for value in values:
            model(value)
    return rec, torch.cat(values)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
)
def test_every_way_to_index(place: Any, dtype: torch.dtype) -> None:
    rec, want = recorded(dtype)
    rows = place(rec).rows("0:output")
    assert (len(rows), rows.shape, rows.dtype, rows.nbytes) == (11, want.shape, dtype, want.nbytes)
    for index in (0, 3, 10, -1, -11, np.int64(4)):
        assert torch.equal(rows[index], want[int(index)])
    for part in (slice(None), slice(2, 9), slice(4, 4), slice(9, 2), slice(-3, None), slice(0, 11, 3)):
        assert torch.equal(rows[part], want[part])
    assert torch.equal(rows[::-2], want[torch.arange(10, -1, -2)])
    numbers = [10, 0, 4, 4, -1, 3]
    for several in (numbers, np.array(numbers), torch.tensor(numbers)):
        assert torch.equal(rows[several], want[numbers])
    mask = [number % 3 == 0 for number in range(11)]
    assert torch.equal(rows[mask], want[mask]) and torch.equal(rows[torch.tensor(mask)], want[mask])
    assert torch.equal(rows[[]], want[:0])
    with pytest.raises(ArgumentError, match=r"rows have one index, got 2\. For several rows write rows\[\[3, 1, 4\]\]"):
        rows[1, 2]
    assert torch.equal(torch.stack(list(rows)), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_rows_in_order(place: Any, dtype: torch.dtype) -> None:
    rec, want = recorded(dtype)
    rows = place(rec).rows("0:output")
    for size in (1, 2, 3, 5, 11, 100):
        parts = list(rows.split(size))
        assert [len(part) for part in parts] == [len(part) for part in want.split(size)]
        assert torch.equal(torch.cat(parts), want)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ArgumentError, match=r"^0:output: split takes a whole number of rows from 1 on, got "):
            next(rows.split(wrong))


def test_rows_in_order_are_not_copied_where_they_lie_in_one_piece(tmp_path: Path) -> None:
    model = nn.Identity()
    with hookline.record(model) as rec:
        for _ in range(4):
            model(torch.randn(3, 8))
    rec.save(tmp_path / "run.hookline")
    for rows, size in ((hookline.load(tmp_path / "run.hookline").rows(":output"), 12), (rec.rows(":output"), 3)):
        once, again = list(rows.split(size)), list(rows.split(size))
        assert [part.data_ptr() for part in once] == [part.data_ptr() for part in again]
        assert rows[:].data_ptr() != once[0].data_ptr()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-11, 10)))
def test_any_numbers(numbers: list[int]) -> None:
    rec, want = recorded()
    assert torch.equal(rec.rows("0:output")[numbers], want[torch.tensor(numbers, dtype=torch.int64)])


def test_a_row_knows_where_it_comes_from(place: Any) -> None:
    rows = place(recorded()[0]).rows("0:output")
    want = [(step, 0, 0, row, 0) for step, size in enumerate(SIZES) for row in range(size)]
    assert [rows.place(index) for index in range(11)] == want
    assert rows.place(-1) == (4, 0, 0, 1, 0)


def test_writing_to_rows_reaches_nothing_else(place: Any) -> None:
    rec, want = recorded()
    rows = place(rec).rows("0:output")
    for index in (0, slice(0, 3), slice(0, 0), [0, 1], slice(None)):
        rows[index].fill_(-1)
    for row in rows:
        row.fill_(-1)
    assert torch.equal(rows[:], want)


def test_numpy(place: Any) -> None:
    rec, want = recorded()
    rows = place(rec).rows("0:output")
    assert np.array_equal(np.asarray(rows), want.numpy())
    assert np.asarray(rows, dtype=np.float64).dtype == np.float64
    with pytest.raises(ArgumentError, match=r"^0:output: NumPy has no torch.bfloat16\. Convert first"):
        np.asarray(recorded(torch.bfloat16)[0].rows("0:output"))


def test_reading_rows_does_not_make_a_snapshot_real() -> None:
    """Whose memory is shared with the model until one of them writes; a pointer to it would end that."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with hookline.record(model, "0") as rec, torch.no_grad():
        for _ in range(2):
            model(torch.randn(32, 64))
    kept = [event.value for event in rec]
    assert all(map(torch._C._is_cow_tensor, kept))
    rows = rec.rows("0:output")
    assert torch.equal(rows[[40, 1, 63, 1]], torch.cat(kept)[[40, 1, 63, 1]])
    assert torch.equal(rows[10:50], torch.cat(kept)[10:50]) and torch.equal(rows[5], kept[0][5])
    assert all(map(torch._C._is_cow_tensor, kept))


def test_a_data_loader_shuffles_them(place: Any) -> None:
    rec, want = recorded()
    loader = DataLoader(
        place(rec).rows("0:output"), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    found = torch.cat(list(loader))
    assert not torch.equal(found, want)
    assert torch.equal(found.flatten(1).unique(dim=0), want.flatten(1).unique(dim=0))


def test_values_without_dimensions_are_rows(place: Any) -> None:
    model = nn.Sequential(nn.Identity())
    with hookline.record(model, "0", reduce=lambda value: value.mean()) as rec:
        for number in range(4):
            model(torch.full((3,), float(number)))
    rows = place(rec).rows("0:output")
    assert rows.shape == (4,) and torch.equal(rows[[3, 0]], torch.tensor([3.0, 0.0]))


class Two(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": x + 1, "b": x[:, 0]}


def test_one_of_several_tensors(place: Any) -> None:
    model, x = Two(), torch.ones(2, 3)
    with hookline.record(model) as rec:
        model(x), model(x * 2)
    found = place(rec)
    paths = [path for path, _ in found.events[0].leaves()]
    assert torch.equal(found.rows("(root):output", leaf=paths[0])[:], torch.cat([x + 1, x * 2 + 1]))
    assert torch.equal(found.rows("(root):output", leaf=paths[1])[:], torch.cat([x[:, 0], x[:, 0] * 2]))
    with pytest.raises(OptionError, match="its values hold several tensors; say which by leaf=, one of "):
        found.rows("(root):output")
    with pytest.raises(SiteError, match=r'\(root\):output has no tensor at "c"; there are '):
        found.rows("(root):output", leaf="c")


def test_gradients_are_rows_too(place: Any) -> None:
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
    with hookline.record(model, "0:grad_output") as rec:
        (model(x) * torch.arange(8.0).reshape(4, 2)).sum().backward()
    assert torch.equal(place(rec).rows("0:grad_output")[:], torch.arange(8.0).reshape(4, 2))


def test_rows_that_do_not_fit_together(place: Any) -> None:
    model = nn.Sequential(nn.Identity())
    with hookline.record(model) as rec:
        model(torch.ones(2, 3)), model(torch.ones(2, 4))
    message = (
        r"0:output, output: call 0 of step 1 has torch.float32 \[2, 4\], call 0 of step 0 has .* \[2, 3\]; rows need"
    )
    found = place(rec)
    with pytest.raises(OptionError, match=message):
        found.rows("0:output")
    assert found.select(steps=1).rows("0:output").shape == (2, 4)


def test_what_is_not_there(place: Any) -> None:
    found = place(recorded()[0])
    rows = found.rows("0:output")
    for index in (11, -12, [0, 11], torch.tensor([-12])):
        with pytest.raises(IndexError, match=r"row -?1[12] of 0:output: there are 11 rows"):
            rows[index]
    with pytest.raises(IndexError, match="the mask has 2 entries for 11 rows"):
        rows[[True, False]]
    for wrong in ("a", 1.5, None, [1.5], [[1]], True, {}):
        with pytest.raises(ArgumentError, match="as an index; wanted a row number"):
            rows[wrong]
    with pytest.raises(SiteError, match="0 has no input: it was not asked for"):
        found.rows("0:input")
    with pytest.raises(SiteError, match="was not recorded; nearest"):
        found.rows("1:output")
    with pytest.raises(SiteError, match="no port"):
        found.rows("0")


def test_values_of_other_layouts_give_the_same_rows() -> None:
    """Rows are copied as bytes where memory is plain, and by torch where one of the values is not."""
    plain = torch.arange(24.0).reshape(4, 2, 3)
    values = [
        plain,
        plain.transpose(1, 2).contiguous().transpose(1, 2) + 0,
        plain.flip(0)[::2],
        plain[:, :1].expand(4, 2, 3),
    ]
    for others in (values, [value.to(torch.complex64).conj() * 1j for value in values]):
        model = nn.Sequential(nn.Identity())
        with hookline.record(model, "0") as rec:
            for value in others:
                model(value)
        want = torch.cat(others)
        for numbers in ([13, 0, 5, 9, 13], list(range(14)), [2]):
            assert torch.equal(rec.rows("0:output")[numbers], want[numbers])


def test_rows_without_bytes() -> None:
    model = nn.Sequential(nn.Identity())
    with hookline.record(model, "0") as rec:
        model(torch.empty(3, 0)), model(torch.empty(2, 0))
    assert rec.rows("0:output")[[4, 0]].shape == (2, 0)


def test_several_shards(tmp_path: Path) -> None:
    model, want = nn.Sequential(nn.Identity()), []
    with hookline.record(model, "0", budget=500, to=tmp_path / "run.hookline"):
        for step in range(20):
            want.append(torch.full((step % 4, 8), step, dtype=torch.float64))
            model(want[-1])
    back = hookline.load(tmp_path / "run.hookline")
    assert len(list(tmp_path.rglob("*.safetensors"))) > 2
    rows, whole = back.rows("0:output"), torch.cat(want)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(1))
    assert torch.equal(rows[order], whole[order])
    assert [rows.place(row).step for row in range(len(whole))] == whole[:, 0].int().tolist()


@pytest.mark.parametrize("kept", [4 << 20, 1 << 19], ids=["several values", "less than a value"])
def test_rows_of_an_object_store_keep_the_last_values_alone(
    kept: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value is asked for once where rows are read in order, and then gives way."""
    pytest.importorskip("fsspec")
    url = f"memory://rows/{request.node.callspec.id}.hookline".replace(" ", "-")
    model, shape = nn.Sequential(nn.Identity()), (16, 16 << 10)  # a MiB
    with hookline.record(model, "0") as rec:
        for step in range(24):
            model(torch.arange(16.0)[:, None].expand(shape) + 100 * step)
    rec.save(url)
    del rec
    monkeypatch.setattr(remote_shard, "_KEPT", kept)
    rows, asked, read = hookline.load(url).rows("0:output"), list[int](), Remote.read
    rows[0]  # reads the header of the shard
    remote_shard.recent.forget()

    def count(place: Remote, begin: int, end: int) -> bytes:
        asked.append(end - begin)
        return read(place, begin, end)

    monkeypatch.setattr(Remote, "read", count)
    tracemalloc.start()
    try:
        for number in range(len(rows)):
            assert rows[number].unique().tolist() == [number % 16 + 100 * (number // 16)]
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        remote_shard.recent.forget()
    assert used < max(kept, 1 << 20) + (1 << 20)
    assert asked == [1 << 20] * 24


def test_rows_are_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        rows = recorded()[0].rows("0:output")
        rows[0], rows[[3, 1]]
        gone = weakref.ref(rows)
        del rows
        assert gone() is None
    finally:
        gc.enable()
