"""One suite for the events of every recording: live ones, saved ones, and saved ones that were saved again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import store
from hookline.record.event import Event
from hookline.stats.compute import summarize
from hookline.stats.summary import Summary
from hookline.values import Arguments, Fields, Opaque

MASK = torch.tensor([True, False])
CALL = Arguments((torch.arange(6.0).view(2, 3), [torch.tensor(1.0), 7]), {"mask": MASK, "cache": Opaque("Cache")})
OUTPUT = (torch.ones(2, dtype=torch.bfloat16), Fields("State", {"hidden": torch.zeros(0, 3), "steps": 3}))

LIVE = [
    Event(0, 0, "", "input", 0, 0, CALL),
    Event(1, 0, "encoder.0", "output", 2, 0, OUTPUT),
    Event(2, 0, "encoder.0", "grad_output", 2, 1, (None, Fields("State", {"hidden": torch.ones(0, 3), "steps": None}))),
    Event(3, 1, "encoder.0", "grad_input", 0, 0, Arguments((torch.tensor([1.0]),), {})),
    Event(4, 1, "head", "output", 0, 0, None),
]
PATHS = [
    ["args[0]", "args[1][0]", "kwargs['mask']"],
    ["output[0]", "output[1].hidden"],
    ["output[1].hidden"],
    ["args[0]"],
    [],
]


def live(folder: Path) -> list[Any]:
    return list(LIVE)


def saved(folder: Path) -> list[Any]:
    store.save(folder / "once", info={}, modules={}, events=LIVE)
    return list(store.open_recording(folder / "once").events)


def appended(folder: Path) -> list[Any]:
    with store.Writer(folder / "run", info={}, modules={}) as writer:
        for event in LIVE:
            writer.append([event])
    return list(store.open_recording(folder / "run").events)


def saved_again(folder: Path) -> list[Any]:
    store.save(folder / "twice", info={}, modules={}, events=saved(folder))
    return list(store.open_recording(folder / "twice").events)


@pytest.fixture(params=[live, saved, appended, saved_again], ids=lambda make: make.__name__)
def events(request: pytest.FixtureRequest, tmp_path: Path) -> list[Any]:
    make: Callable[[Path], list[Any]] = request.param
    return make(tmp_path)


def test_where(events: list[Any]) -> None:
    found = [(e.order, e.step, e.path, e.port, e.call, e.backward) for e in events]
    assert found == [
        (0, 0, "", "input", 0, 0),
        (1, 0, "encoder.0", "output", 2, 0),
        (2, 0, "encoder.0", "grad_output", 2, 1),
        (3, 1, "encoder.0", "grad_input", 0, 0),
        (4, 1, "head", "output", 0, 0),
    ]


def test_values(events: list[Any]) -> None:
    call = events[0].value
    assert type(call) is Arguments
    assert torch.equal(call.args[0], torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]))
    assert call.args[1][1] == 7
    assert call.kwargs["mask"].tolist() == [True, False]
    assert call.kwargs["cache"] == Opaque("Cache")
    state = events[1].value[1]
    assert (state.type_name, state.steps, state.hidden.shape) == ("State", 3, (0, 3))
    assert events[2].value[0] is None
    assert events[4].value is None


def test_leaves(events: list[Any]) -> None:
    assert [[path for path, _ in event.leaves()] for event in events] == PATHS
    for event in events:
        assert isinstance(event.leaves(), list)
        assert all(isinstance(leaf, torch.Tensor) for _, leaf in event.leaves())
    assert [leaf.dtype for _, leaf in events[1].leaves()] == [torch.bfloat16, torch.float32]


def test_summaries(events: list[Any]) -> None:
    assert [list(event.summaries()) for event in events] == PATHS
    for event in events:
        for path, leaf in event.leaves():
            assert type(event.summaries()[path]) is Summary
            assert repr(event.summaries()[path]) == repr(summarize(leaf))
    assert events[0].summaries()["args[0]"].mean == 2.5


def test_bytes(events: list[Any]) -> None:
    assert [event.nbytes for event in events] == [6 * 4 + 4 + 2, 2 * 2, 0, 4, 0]


def test_text_of_a_stored_event(tmp_path: Path) -> None:
    found = saved(tmp_path)
    assert repr(found[0]) == "<StoredEvent 0: (root):input, call 0 of step 0>"
    assert repr(found[2]) == "<StoredEvent 2: encoder.0:grad_output, call 2 of step 0>"
