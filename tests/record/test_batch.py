"""What rows are travels with them: in memory, on disk, through selection, shuffling and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hookline
from hookline.cli.main import main
from hookline.errors import ArgumentError, OptionError, SiteError
from hookline.record import identity

SAMPLES, LENGTH, WIDTH = 4, 6, 5


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.flat = nn.Identity()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(self.embed(ids))
        return self.head(self.flat(x.reshape(-1, WIDTH)).reshape(x.shape).mean(1))


def batches(count: int = 3) -> list[tuple[list[int], Tensor, Tensor]]:
    made = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        tokens = torch.randint(50, (SAMPLES, LENGTH), generator=made)
        mask = torch.rand(SAMPLES, LENGTH, generator=made) < 0.6
        found.append(([100 * number + sample for sample in range(SAMPLES)], tokens, mask))
    return found


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_each_row_of_a_token_is_that_of_its_token(tmp_path: Path, on_disk: bool, masked: bool) -> None:
    net = Tagger()
    where: Any = {"to": tmp_path / "run.hookline", "budget": 500} if on_disk else {}
    with hookline.record(net, ports=("output", "grad_output"), **where) as rec:
        for ids, tokens, mask in batches():
            with rec.batch(ids=ids, tokens=tokens, mask=mask if masked else None) as wanted:
                assert wanted
                loss = net(tokens).sum()
            loss.backward()  # outside: the gradients have the rows of their forward
    found = hookline.load(tmp_path / "run.hookline") if on_disk else rec
    wanted_rows = [
        (ids[sample], place, int(tokens[sample, place]))
        for ids, tokens, mask in batches()
        for sample in range(SAMPLES)
        for place in range(LENGTH)
        if mask[sample, place] or not masked
    ]
    for site in ("mix:output", "flat:output", "mix:grad_output"):
        rows = found.rows(site)
        identity = rows.identity()
        assert list(zip(*(identity[name].tolist() for name in ("id", "position", "token")), strict=True)) == wanted_rows
        assert len(rows) == len(wanted_rows)
    with torch.no_grad():
        expected = net.mix(net.embed(torch.tensor([token for *_, token in wanted_rows])))
    assert torch.allclose(found.rows("mix:output")[:], expected)
    assert torch.equal(found.rows("embed:output")[:], net.embed.weight.detach()[[token for *_, token in wanted_rows]])
    heads = found.rows("head:output")
    assert heads.identity()["id"].tolist() == [100 * n + s for n in range(3) for s in range(SAMPLES)]
    assert set(heads.identity([5, -1, 0])) == {"id"}
    assert heads.identity([5, -1, 0])["id"].tolist() == [101, 203, 0]
    one = found.rows("mix:output").identity(3)
    assert [int(one[name]) for name in ("id", "position", "token")] == list(wanted_rows[3])


def test_shuffled_batches_bring_the_identity_along(tmp_path: Path) -> None:
    net = Tagger()
    with hookline.record(net, ["embed", "mix"], to=tmp_path / "run.hookline") as rec:
        for ids, tokens, mask in batches(8):
            with rec.batch(ids=[f"text {one}" for one in ids], tokens=tokens, mask=mask), torch.no_grad():
                net(tokens)
    seen = []
    loader = torch.utils.data.DataLoader(
        rec.dataset(["embed:output", "mix:output"], shuffle=True, batch_size=7), batch_size=None, num_workers=2
    )
    for batch in loader:
        assert torch.equal(batch["embed:output"], net.embed.weight.detach()[batch["token"]])
        seen += list(zip(batch["id"], batch["position"].tolist(), strict=True))
    assert len(seen) == len(set(seen)) == sum(int(mask.sum()) for *_, mask in batches(8))


def test_reduce_gets_the_rows_and_loses_them_when_it_makes_others() -> None:
    net, (ids, tokens, mask) = Tagger(), batches()[0]
    shapes: list[tuple[int, ...]] = []

    def first(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor[:, :1]

    with hookline.record(net, "mix", reduce=first) as rec, rec.batch(ids=ids, mask=mask):
        net(tokens)
    assert shapes == [(int(mask.sum()), WIDTH)] and rec.rows("mix:output").identity()["id"].numel() == mask.sum()
    with hookline.record(net, "mix", reduce=lambda t: t.mean(0)) as rec, rec.batch(ids=ids, mask=mask):
        net(tokens)
    with pytest.raises(SiteError, match=r"^mix:output, .* has the shape \[5\], its batch was told of 4 ids"):
        rec.rows("mix:output").identity()


def test_the_same_sample_is_never_recorded_twice(tmp_path: Path) -> None:
    net, place = Tagger(), tmp_path / "run.hookline"
    runs = []
    for stop in (2, 5):
        with hookline.record(net, "head", to=place, resume=True) as rec:
            runs.append([])
            for ids, tokens, _ in batches(5)[:stop]:
                with rec.batch(ids=ids) as wanted:
                    runs[-1].append(wanted)
                    net(tokens)  # runs all the same, and is not recorded
    assert runs == [[True, True], [False, False, True, True, True]]
    loaded = hookline.load(place)
    assert loaded.rows("head:output").identity()["id"].tolist() == [100 * n + s for n in range(5) for s in range(4)]
    assert list(loaded.steps) == list(range(5))
    with torch.no_grad():
        expected = torch.cat([net(tokens) for _, tokens, _ in batches(5)])
    assert torch.equal(loaded.rows("head:output")[:], expected)
    with hookline.record(net, "head", to=place, resume=True) as rec, pytest.raises(OptionError) as caught:
        rec.batch(ids=[3, 4]).__enter__()
    assert str(caught.value).startswith("1 of the 2 ids of this batch are recorded already")


def test_what_is_no_identity_is_told() -> None:
    net = Tagger()
    with hookline.record(net) as rec:
        for ids in (3, "text", None):
            with pytest.raises(ArgumentError, match=r"^ids: got .*, wanted one id for each sample"):
                rec.batch(ids=ids)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r"^ids have to be all int or all str, got int, str"):
            rec.batch(ids=[1, "a"])  # type: ignore[list-item]
        with pytest.raises(
            OptionError, match=r"^mask: got torch.int64 of shape \[2, 3\], wanted .* shape \[1, length\]"
        ):
            rec.batch(ids=[1], mask=torch.ones(2, 3, dtype=torch.long))
        with pytest.raises(OptionError, match=r"^tokens and mask need one shape"):
            rec.batch(ids=[1], mask=torch.ones(1, 3).bool(), tokens=torch.ones(1, 4).long())


def test_without_tokens_all_of_a_batch_is_kept_as_it_is() -> None:
    net, (ids, tokens, _) = Tagger(), batches()[0]
    with hookline.record(net, "mix") as rec, rec.batch(ids=torch.tensor(ids)):
        net(tokens)
    assert rec["mix"].output.shape == (SAMPLES, LENGTH, WIDTH)
    assert rec.rows("mix:output").identity()["id"].tolist() == ids


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_rows_are_is_no_site(tmp_path: Path, on_disk: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """It is counted and shown nowhere as a value of the model."""
    net, place = Tagger(), tmp_path / "run.hookline"
    with hookline.record(net, "mix", ports=("input", "output"), **({"to": place} if on_disk else {})) as rec:
        for ids, tokens, mask in batches():
            with rec.batch(ids=ids, tokens=tokens, mask=mask):
                net(tokens)
    if not on_disk:
        rec.save(place)
    lines = [line for path in place.glob("w*/manifest.jsonl") for line in path.read_text().splitlines()]
    assert sum(line.count('"port":"batch"') for line in lines) == 3
    for found in (rec, hookline.load(place)):
        assert found.sites == ["mix:input", "mix:output"] and found.ports == ["input", "output"]
        assert len(found) == len(found.events) == len(list(found)) == 6 and found.paths == ["mix"]
        assert set(found.to_dict()) == {"mix"} and set(found.to_dict()["mix"]) == {"input", "output"}
        assert "batch" not in str(found) and "batch" not in str(found.coverage) and "(root)" not in str(found)
        assert found.nbytes == 2 * sum(int(mask.sum()) for *_, mask in batches()) * WIDTH * 4
        assert {site for site in found.coverage} == {"mix:input", "mix:output"}
    assert main(["show", str(place)]) == main(["show", str(place), "--values"]) == main(["verify", str(place)]) == 0
    out = capsys.readouterr().out
    assert "mix" in out and "batch" not in out and "(root)" not in out and "6 events" in out
    assert hookline.verify(place).events == 6


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_what_rows_are_is_no_line_of_a_table(tmp_path: Path, kind: str) -> None:
    pytest.importorskip(kind)
    net, (ids, tokens, _) = Tagger(), batches()[0]
    with hookline.record(net, to=tmp_path / "run.hookline") as rec, rec.batch(ids=ids, tokens=tokens):
        net(tokens)
    for found in (rec, hookline.load(tmp_path / "run.hookline")):
        frame = found.to_pandas() if kind == "pandas" else found.to_polars()
        assert list(frame["port"]) == ["output"] * 5
        assert list(frame["path"]) == ["embed", "mix", "flat", "head", ""]


def test_one_batch_can_be_used_again() -> None:
    net, (ids, tokens, _) = Tagger(), batches(1)[0]
    with hookline.record(net, "head") as rec:
        batch = rec.batch(ids=ids)
        for _ in range(2):
            with batch as wanted:
                assert wanted
                net(tokens)
        with pytest.raises(ZeroDivisionError), batch:
            raise ZeroDivisionError
        net(tokens)
        batch(lambda: net(tokens))()  # as a decorator
    rows = rec.select(steps=[0, 1]).rows("head:output")
    assert rows.identity()["id"].tolist() == ids * 2
    assert not rec.rows("head:output").have_identity, "the last forward was in no batch"


def test_no_rows_have_an_identity_too() -> None:
    net, (ids, tokens, mask) = Tagger(), batches(1)[0]
    with hookline.record(net, "mix") as rec, rec.batch(ids=ids, tokens=tokens, mask=torch.zeros_like(mask)):
        net(tokens)
    found = rec.rows("mix:output").identity()
    assert sorted(found) == ["id", "position", "token"]
    assert all(column.shape == (0,) and column.dtype == torch.int64 for column in found.values())


def test_what_rows_are_is_kept_at_hand_within_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_AT_HAND", 3000)
    net = Tagger()
    with hookline.record(net, "head") as rec:
        for ids, tokens, _ in batches(8):
            with rec.batch(ids=ids):
                net(tokens)
    rows = rec.rows("head:output")
    want = [one for ids, _, _ in batches(8) for one in ids]
    assert rows.identity()["id"].tolist() == want
    assert rows.identity([31, 0, 5])["id"].tolist() == [want[31], want[0], want[5]]
    assert 2 <= len(rows._identity._kept) <= 4 and rows._identity._nbytes <= 3000


def test_a_misspelt_option_of_a_dataset() -> None:
    net, (_, tokens, _) = Tagger(), batches(1)[0]
    with hookline.record(net, "head") as rec:
        net(tokens)
    with pytest.raises(ArgumentError, match=r"^dataset has no option batchsize=; did you mean batch_size"):
        rec.dataset("head:output", batchsize=3)


def test_a_batch_ends_in_the_thread_in_which_it_began() -> None:
    net, (ids, _, _) = Tagger(), batches(1)[0]
    with hookline.record(net, "head") as rec:
        batch = rec.batch(ids=ids)
        with pytest.raises(OptionError, match="a batch ends in the thread in which it began"):
            batch.__exit__(None, None, None)
        with batch, batch:
            pass
    with pytest.raises(OptionError, match="batch is for a recording that is going on"):
        rec.batch(ids=ids)
