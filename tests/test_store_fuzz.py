"""Damaged and hostile recordings: the right values or a FormatError, never another error and never a wrong number."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hookline import store
from hookline.errors import FormatError
from hookline.record.event import Event
from hookline.store import ModuleInfo, StoredParts, Writer
from hookline.values import Arguments, Fields, Opaque

TRIALS = 400


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two writers, several shards, every kind of node and some dtypes."""
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.randn(2, 3, generator=generator),
        (torch.tensor(1.5), [None, True, "text", float("nan"), -(2**70)]),
        Fields(
            "Output",
            {"logits": torch.ones(3, dtype=torch.bfloat16), "rest": {1: torch.arange(2), "k": Opaque("Cache")}},
        ),
        {"meta": torch.empty(2, 2, device="meta"), "none": None},
        torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128),
    ]
    modules = {"": ModuleInfo("Net", 7), "a.b": ModuleInfo("Linear", 3, ("c",))}
    for number in (0, 1):
        with Writer(folder, info={"sites": ["*"], "n": 1}, modules=modules, writer=number) as writer:
            call = Event(
                number, 0, "", "input", 0, 0, Arguments((torch.zeros(2),), {"mask": torch.tensor([True, False])})
            )
            writer.append([call])
            writer.append([Event(10 + i, i, "a.b", "grad_output", 0, 1, value) for i, value in enumerate(values)])
    return folder


def plain(value: Any) -> Any:
    """Something that can be compared: tensors by bits, everything else by its text."""
    if isinstance(value, torch.Tensor):
        data = None if value.device.type == "meta" else bytes(value.contiguous().view(-1).view(torch.uint8).tolist())
        return str(value.dtype), tuple(value.shape), data
    if isinstance(value, dict):
        return (
            type(value),
            getattr(value, "type_name", None),
            [(repr(key), plain(child)) for key, child in value.items()],
        )
    if isinstance(value, (tuple, list)):
        return type(value), [plain(child) for child in value]
    return repr(value)


def read(folder: Path) -> tuple[Any, list[Any]]:
    parts: StoredParts = store.open_recording(folder)
    events = []
    for event in parts.events:
        place = (event.order, event.step, event.path, event.port, event.call, event.backward, event.nbytes)
        leaves = [(path, plain(leaf)) for path, leaf in event.leaves()]
        events.append((place, plain(event.value), leaves, repr(event.summaries()), event.conversions()))
    return (parts.info, parts.modules), events


def without_data(found: Any) -> Any:
    if isinstance(found, (tuple, list)):
        return [without_data(child) for child in found]
    return None if isinstance(found, bytes) else found


def damage(data: bytes, chance: random.Random) -> tuple[bytes, int]:
    """One of several accidents, and the first byte that it touches."""
    place = chance.randrange(len(data))
    kind = chance.choice(["flip", "flip", "byte", "run", "cut", "insert", "drop", "zero"])
    if kind == "flip":
        return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :], place
    if kind == "byte":
        return data[:place] + chance.randbytes(1) + data[place + 1 :], place
    if kind == "run":
        return data[:place] + chance.randbytes(min(9, len(data) - place)) + data[place + 9 :], place
    if kind == "insert":
        return data[:place] + chance.randbytes(3) + data[place:], place
    if kind == "zero":
        return data[:place] + bytes(len(data) - place), place
    return (data[:place] if kind == "cut" else data[:place] + data[place + 1 :]), place


@pytest.mark.parametrize("seed", range(4))
def test_accidents(seed: int, original: Path, tmp_path: Path) -> None:
    chance = random.Random(seed)
    head, events = read(original)
    names = sorted(path.relative_to(original) for path in original.rglob("*") if path.is_file())
    refused = 0
    for _ in range(TRIALS // 4):
        folder = tmp_path / "run"
        shutil.copytree(original, folder)
        path = folder / chance.choice(names)
        whole = path.read_bytes()
        changed, place = damage(whole, chance)
        path.write_bytes(changed)
        try:
            found_head, found = read(folder)
        except FormatError as error:
            assert str(folder) in str(error)
            refused += 1
        else:
            in_data = path.suffix == ".safetensors" and place >= 8 + int.from_bytes(whole[:8], "little")
            assert found_head == head
            assert_some_of(found, events, with_data=not in_data)
        shutil.rmtree(folder)
    assert refused > TRIALS // 4 // 3


def assert_some_of(found: list[Any], events: list[Any], *, with_data: bool) -> None:
    """The end of one manifest may be missing, as after a crash; what is there is right."""
    wanted = iter(events if with_data else without_data(events))
    for event in found if with_data else without_data(found):
        assert event in wanted


# ---------------------------------------------------------------- on purpose

HOSTILE: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**62, 2**63, 2**64, 10**300, 0.5, -0.0, 1e308),
    *("", "x", "nan", "../x", "/etc/passwd", "000001.safetensors", "float64", "bool", "F64", "U8", "\0", "\ud800"),
    *([], {}, [[]], [{}], [0, 0], [0, 24], {"t": 0}, {"tuple": []}),
    *({"v": {"float": "1e5"}}, {"int": "0x"}, {"float": "nan"}, {"dict": [[{"float": "nan"}, {"v": 1}]]}),
    *({"fields": "__class__", "items": [["__dict__", {"v": 1}]]}, {"args": [], "kwargs": [["self", {"v": 1}]]}),
]


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a JSON tree."""
    for key, child in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(child, (dict, list)):
            yield from places(child)


def spoil(tree: Any, chance: random.Random) -> None:
    """Put something else into one place, take it out, or exchange two."""
    spots = list(places(tree))
    container, key = chance.choice(spots)
    other, other_key = chance.choice(spots)
    kind = chance.randrange(8)
    if kind == 0:
        del container[key]
    elif kind == 1:
        container[key] = json.loads(json.dumps(other[other_key]))
    elif kind == 2 and isinstance(container, dict):
        container[chance.choice(["t", "v", "dict", "data", "dtype", "converted_from", "é"])] = container.pop(key)
    else:
        container[key] = chance.choice(HOSTILE)


def spoil_file(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        start = 8 + int.from_bytes(data[:8], "little")
        tree = json.loads(data[8:start])
        spoil(tree, chance)
        text = json.dumps(tree).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])
        return
    lines = data.splitlines() if path.suffix == ".jsonl" else [data]
    number = chance.randrange(len(lines))
    tree = json.loads(lines[number])
    tree.pop("crc", None)
    spoil(tree, chance)
    lines[number] = json.dumps(tree).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")


@pytest.mark.parametrize("seed", range(4))
def test_malice(seed: int, original: Path, tmp_path: Path) -> None:
    """Valid JSON with wrong content may say something else, but it never gets beyond a FormatError."""
    chance = random.Random(seed)
    names = sorted(path.relative_to(original) for path in original.rglob("*") if path.is_file())
    refused = 0
    for _ in range(TRIALS // 4):
        folder = tmp_path / "run"
        shutil.copytree(original, folder)
        for _ in range(chance.choice([1, 1, 3])):
            spoil_file(folder / chance.choice(names), chance)
        try:
            read(folder)
        except FormatError as error:
            assert str(folder) in str(error)
            refused += 1
        shutil.rmtree(folder)
    assert refused > TRIALS // 4 // 3
