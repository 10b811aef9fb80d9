"""Recordings of several processes, whose calls may differ: nothing of one is taken for that of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline
from hookline.errors import ArgumentError, OptionError, SiteError


class Uneven(nn.Module):
    """Calls its middle a number of times, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.b = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.a(x)
        for _ in range(times):
            x = self.c(x)
        return self.b(x)


def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> hookline.Recording:
    net = Uneven()
    for rank, times in ((1, 1), (0, 3)):
        monkeypatch.setenv("RANK", str(rank))
        with hookline.record(net, to=folder) as rec:
            for step in range(4):
                ids = [100 * rank + 10 * step + row for row in range(3)]
                with rec.batch(ids=ids):
                    net(torch.tensor(ids, dtype=torch.float32)[:, None], times)
    monkeypatch.delenv("RANK")
    return hookline.load(folder)


def test_batches_of_several_sites_do_not_mix_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rec = recorded(tmp_path / "run", monkeypatch)
    seen = []
    for shuffle in (False, True):
        for batch in rec.dataset(["a:output", "b:output"], batch_size=5, shuffle=shuffle, rank=0, world_size=1):
            assert torch.equal(batch["a:output"], batch["b:output"])
            assert batch["a:output"].flatten().tolist() == batch["id"].tolist()
            seen += batch["id"].tolist()
    assert sorted(seen) == sorted(
        2 * [100 * rank + 10 * step + row for rank in (0, 1) for step in range(4) for row in range(3)]
    )
    with pytest.raises(OptionError, match="no rows in common order: call 1 of step 0 with 3 rows of"):
        rec.dataset(["c:output", "b:output"])


def test_a_data_frame_says_whose_value_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = recorded(tmp_path / "run", monkeypatch).to_pandas()
    assert frame[frame.path == "a"].writer.tolist() == [0, 1] * 4


# ---------------------------------------------------------------- what rows are


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12, dtype=torch.int32).view(2, 3, 2).to(torch.uint16),
        torch.arange(6, dtype=torch.int64).view(2, 3).to(torch.uint64),
        torch.eye(3)[:2].to_sparse(),
        torch.ones(2, 3).to_mkldnn(),
        torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
        torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged),
        torch.tensor(1.0),
    ],
    ids=["uint16", "uint64", "sparse", "mkldnn", "nested", "jagged", "scalar"],
)
def test_a_batch_takes_any_tensor(value: Any, tmp_path: Path) -> None:
    net = nn.Identity()
    with hookline.record(net, to=tmp_path / "run") as rec, rec.batch(ids=[5, 6], mask=[[1, 0, 1], [0, 0, 1]]):
        net(value)
    (event,) = hookline.load(tmp_path / "run")
    if value.dtype in (torch.uint16, torch.uint64):
        kept = value.to(torch.int64).flatten(0, 1)[[0, 2, 5]]
        assert torch.equal(event.value.to(torch.int64), kept) and event.rows() == {"output": "tokens"}
    else:
        assert event.rows() == {} and event.batch.value["ids"].tolist() == [5, 6]


def test_samples_are_known_as_recorded_where_no_row_is_theirs(tmp_path: Path) -> None:
    net, wanted = nn.Identity(), []
    for _ in range(2):
        with hookline.record(net, to=tmp_path / "run", reduce=lambda t: t.mean(), resume=True) as rec:
            for sample in range(3):
                with rec.batch(ids=[sample]) as wants:
                    wanted.append(wants)
                    net(torch.ones(1, 2))
    assert wanted == [True] * 3 + [False] * 3
    assert len(hookline.load(tmp_path / "run")) == 3


def test_ids_that_do_not_fit(tmp_path: Path) -> None:
    net = nn.Identity()
    with hookline.record(net, to=tmp_path / "run") as rec:
        for ids, message in (([2**63], "int64"), ([torch.tensor(1)], r"tolist\(\)"), ([1, "a"], "all int or all str")):
            with pytest.raises(ArgumentError, match=message):
                rec.batch(ids=ids)
        for tokens in ([[1], [2, 3]], [["a"], ["b"]]):
            with pytest.raises(ArgumentError, match=r"^tokens: got .* list, wanted whole numbers or bools, a line"):
                rec.batch(ids=[1, 2], tokens=tokens)
        with rec.batch(ids=[1, 2, 3]):
            net(torch.ones(8, 2))
        with rec.batch(ids=["a"]):
            net(torch.ones(1, 2))
        with rec.batch(ids=[]):
            net(torch.ones(0, 2))
        with rec.batch(ids=[7]):
            net(torch.ones(1, 2))
    found = hookline.load(tmp_path / "run")
    with pytest.raises(SiteError, match=r"call 0 of step 0 has the shape \[8, 2\], its batch was told of 3 ids"):
        found.rows(":output").identity()
    with pytest.raises(SiteError, match="id is a number in some steps and a string in others"):
        found.select(steps=[1, 3]).rows(":output").identity()


def test_an_existing_recording_is_refused_with_what_can_be_done(tmp_path: Path) -> None:
    net = nn.Identity()
    for overwritten in (False, True):
        if overwritten:
            with pytest.raises(OptionError, match=r"a recording of that name exists\. Choose another .*: resume=True"):
                hookline.record(net, to=tmp_path / "run")
        else:
            with hookline.record(net, to=tmp_path / "run"):
                net(torch.ones(1))
