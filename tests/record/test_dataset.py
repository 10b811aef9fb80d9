"""Batches of a recording: every row once, in an order that a seed repeats, over ranks and workers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hookline
from hookline.errors import OptionError, SiteError
from hookline.record import Recording

SIZES = [3, 1, 0, 5, 2, 7, 7, 1]
TOTAL = sum(SIZES)


def recorded(sizes: list[int]) -> Recording:
    """Row number n holds n in the input and 2n in the output."""
    model = nn.Sequential(Double())
    with hookline.record(model, "0", ("input", "output")) as rec:
        for rows in torch.arange(float(sum(sizes)))[:, None].split(sizes):
            model(rows)
    return rec


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.fixture(params=["memory", "disk"])
def rec(request: pytest.FixtureRequest, tmp_path: Path) -> Recording:
    found = recorded(SIZES)
    if request.param == "memory":
        return found
    found.save(tmp_path / "run.hookline")
    return hookline.load(tmp_path / "run.hookline")


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch["row"]]


def test_the_order_of_the_recording(rec: Recording) -> None:
    batches = rec.dataset("0:output", batch_size=4)
    assert len(batches) == 7 and numbers(batches) == list(range(TOTAL))
    assert [len(batch["row"]) for batch in batches] == [4] * 6 + [2]
    assert repr(batches) == "<7 batches of 4 rows of 0:output>"
    with pytest.raises(IndexError, match="batch 7: there are 7"):
        batches[7]


def test_sites_stay_together(rec: Recording) -> None:
    for batch in rec.dataset(["0:input", "0:output"], batch_size=4, shuffle=True):
        assert torch.equal(batch["0:input"][:, 0], batch["row"].float())
        assert torch.equal(batch["0:output"], batch["0:input"] * 2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(any),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_row_once_over_all_ranks(sizes: list[int], batch: int, window: int, world: int, shuffle: bool) -> None:
    found, options = recorded(sizes), {"batch_size": batch, "window": window, "shuffle": shuffle, "seed": 3}
    ranks = [found.dataset("0:output", rank=rank, world_size=world, **options) for rank in range(world)]
    assert sorted(itertools.chain(*map(numbers, ranks))) == list(range(sum(sizes)))
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
    even = [found.dataset("0:output", rank=rank, world_size=world, drop_last=True, **options) for rank in range(world)]
    rows = list(itertools.chain(*map(numbers, even)))
    assert len(set(rows)) == len(rows) == sum(sizes) // (batch * world) * batch * world
    assert len(set(map(len, even))) == 1


def test_a_seed_and_an_epoch_decide_the_order(rec: Recording) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        batches = rec.dataset("0:output", batch_size=4, shuffle=True, seed=seed)
        batches.set_epoch(epoch)
        return numbers(batches)

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert all(sorted(order(seed, 5)) == list(range(TOTAL)) for seed in range(5))


def test_a_window_bounds_how_far_rows_are_mixed() -> None:
    """Each window of the order holds whole values that follow each other in the permuted order."""
    found = recorded([5] * 40).dataset("0:output", batch_size=20, shuffle=True, window=20)
    for batch in found:
        assert sorted({number // 5 for number in batch["row"].tolist()}) == sorted(
            number // 5 for number in batch["row"].tolist() if number % 5 == 0
        )
    assert len({number // 5 for number in found[0]["row"].tolist()}) == 4


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_same_batches(rec: Recording, context: str, workers: int) -> None:
    batches = rec.dataset(["0:input", "0:output"], batch_size=4, shuffle=True, seed=1)
    want = list(batches)
    loader = DataLoader(batches, batch_size=None, num_workers=workers, multiprocessing_context=context)
    found = list(loader)
    assert len(found) == len(want)
    assert all(torch.equal(one[name], two[name]) for one, two in zip(found, want, strict=True) for name in two)


def test_going_on_where_a_training_has_stopped(rec: Recording) -> None:
    def made() -> Any:
        return rec.dataset("0:output", batch_size=4, shuffle=True, seed=2, rank=1, world_size=2)

    batches = made()
    batches.set_epoch(3)
    whole = [batch["row"].tolist() for batch in batches]
    state = batches.state_dict(2)
    again = made()
    again.load_state_dict(state)
    assert [batch["row"].tolist() for batch in again] == whole[2:] and len(again) == len(whole) - 2
    twice = made()
    twice.load_state_dict(again.state_dict(1))
    assert [batch["row"].tolist() for batch in twice] == whole[3:]
    again.set_epoch(3)
    assert [batch["row"].tolist() for batch in again] == whole
    with pytest.raises(OptionError, match="the state was taken with seed=2, this dataset has 5: its "):
        rec.dataset("0:output", batch_size=4, seed=5).load_state_dict(state)


def test_the_rank_of_torchrun(rec: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert numbers(rec.dataset("0:output", batch_size=4)) == [
        *range(4, 8), *range(12, 16), *range(20, 24)
    ]  # fmt: skip


def test_sites_with_other_rows_are_refused() -> None:
    model = nn.Sequential(nn.Identity(), nn.Flatten(0, 1))
    with hookline.record(model, "*") as rec:
        model(torch.ones(2, 3))
    message = (
        r"0:output and 1:output have no rows in common order: call 0 of step 0 with 2 rows of the first stands against"
    )
    with pytest.raises(OptionError, match=message):
        rec.dataset(["0:output", "1:output"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: got 0, wanted a whole number from 1 on"),
        ({"window": 2.5}, "window: got 2.5"),
        ({"rank": 0}, "rank and world_size go together"),
        ({"rank": 2, "world_size": 2}, "rank has to be from 0 to world_size - 1, got rank=2, world_size=2"),
    ],
)
def test_options_that_cannot_be_used(rec: Recording, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        rec.dataset("0:output", **options)


def test_no_site_or_one_that_is_not_there(rec: Recording) -> None:
    with pytest.raises(OptionError, match="sites: got none"):
        rec.dataset([])
    with pytest.raises(SiteError, match="was not recorded"):
        rec.dataset("1:output")
