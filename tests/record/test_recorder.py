"""What is recorded is what stood there: values and gradients against a copy of the model in which clones keep every
call apart from its neighbours."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import hookline
from hookline.sites import PORTS

# ---------------------------------------------------------------- the reference


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with every tensor changed; written for these tests alone."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        return PackedSequence(*(mapped(change, part) for part in value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, part) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(change, part) for part in value)
    if isinstance(value, dict):
        return type(value)(**{key: mapped(change, part) for key, part in value.items()})
    if dataclasses.is_dataclass(value):
        parts = {field.name: mapped(change, getattr(value, field.name)) for field in dataclasses.fields(value)}
        return type(value)(**parts)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(lambda tensor: (found.append(tensor), tensor)[1], value)
    return found


class Reference:
    """Runs a copy of a model in which each call gets clones of its inputs and gives clones of its outputs away."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[str, list[tuple[list[Tensor], list[Tensor]]]] = {}
        self.model = copy.deepcopy(model)
        for path, module in self.model.named_modules():
            module.forward = self.isolated(path, module.forward)

    def isolated(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            place = self.calls.setdefault(path, [])
            place.append(([], []))
            number = len(place) - 1
            seen = mapped(torch.clone, (args, list(kwargs.values())))
            passed = mapped(torch.clone, seen)
            output = forward(*passed[0], **dict(zip(kwargs, passed[1], strict=True)))
            own = mapped(torch.clone, output)
            place[number] = (tensors_of(seen), tensors_of(own))
            return mapped(torch.clone, own)

        return run

    def gradients(self, loss: Tensor) -> dict[tuple[str, int, str], list[Tensor | None]]:
        wanted = [t for calls in self.calls.values() for pair in calls for side in pair for t in side]
        tracked = [t for t in wanted if t.requires_grad]
        grads = dict(zip(map(id, tracked), torch.autograd.grad(loss, tracked, allow_unused=True), strict=True))
        return {
            (path, number, port): [grads.get(id(t)) for t in side]
            for path, calls in self.calls.items()
            for number, pair in enumerate(calls)
            for port, side in zip(("grad_input", "grad_output"), pair, strict=True)
        }


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    if len(one) != len(other):
        return False
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def close(one: list[Tensor], other: list[Tensor]) -> bool:
    """For gradients: between clones, autograd adds up the shares of a value in another order."""
    return len(one) == len(other) and all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------- the models


class Residual(nn.Module):
    """A residual block as torchvision writes it: in-place ReLU, and ``+=`` on what a BatchNorm returned."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
        self.bn1, self.bn2 = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(1, 3, 1), Residual(), Residual())
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(3 * 16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.blocks(x).flatten(1)))


class Views(nn.Module):
    """Slices, transposes and chunks go in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.flat, self.fc = Chunk(), nn.Flatten(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.split(self.fc(x.transpose(0, 1)))
        return self.fc(torch.cat([one, two[:, :2].expand(-1, 2)], 1)) + self.flat(x.t()[:, None, :])


class Chunk(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(2, dim=1)


class Shared(nn.Module):
    """One cell that runs sixteen times, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 3)
        self.again = self.cell
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[1], 3)
        for step in range(16):
            h = self.act(self.cell(x[step % 4], h))
        return h


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        out, (h, c) = self.lstm(x)
        out, _ = self.lstm(x * 2, (h, c))
        return out.sum() + c.sum()


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, h = self.gru(pack_sequence([x[:3], x[:2]]))
        return out.data.sum() + h.sum()


class Named(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class State:
    hidden: Tensor
    extra: Any


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As in transformers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Fork(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor, *, scale: Tensor, mask: Any = None) -> Any:
        one, two = self.fc(x) * scale, F.relu(x)
        if self.kind == "dict":
            return {"one": one, "two": [two, {"three": one * 2}]}
        if self.kind == "dataclass":
            return State(one, two)
        if self.kind == "ModelOutput":
            return ModelOutput(one=one, two=(two,), count=3)
        return Named(one, (two, None, "text"))


class Join(nn.Module):
    def forward(self, value: Any, also: Any = None) -> Tensor:
        return sum((number + 1) * tensor.pow(2).sum() for number, tensor in enumerate(tensors_of([value, also])))


class Containers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fork, self.join = Fork(kind), Join()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.fork(x, scale=self.scale, mask=[None, x * 3]), also={"x": x})


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Images, (2, 1, 4, 4)),
    "residual in eval": (lambda: Images().eval(), (2, 1, 4, 4)),
    "dropout in eval is an identity": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Tanh()).eval(), (2, 3)),
    "identity": (lambda: nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.ReLU(inplace=True), nn.Identity()), (2, 3)),
    "views": (Views, (4, 4)),
    "shared": (Shared, (4, 5, 2)),
    "lstm": (Recurrent, (4, 5, 2)),
    "packed": (Packed, (3, 1)),
    "dict": (lambda: Containers("dict"), (3, 2)),
    "dataclass": (lambda: Containers("dataclass"), (3, 2)),
    "ModelOutput": (lambda: Containers("ModelOutput"), (3, 2)),
    "namedtuple": (lambda: Containers("namedtuple"), (3, 2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_value_and_gradient_is_the_one_that_stood_there(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape, requires_grad=True)
    reference = Reference(model)
    torch.manual_seed(1)
    expected = reference.gradients(reference.model(x).sum())
    torch.manual_seed(1)
    with hookline.record(model, ports=PORTS) as rec:
        model(x).sum().backward()
    for path, calls in reference.calls.items():
        assert len(rec[path].calls) == len(calls), path
        for number, (inputs, outputs) in enumerate(calls):
            by_port = {event.port: event for event in rec[path].calls[number].events}
            wanted = {"input": inputs, "output": outputs}
            for port in ("grad_input", "grad_output"):
                wanted[port] = [grad for grad in expected[path, number, port] if grad is not None]
            for port, tensors in wanted.items():
                got = [leaf for _, leaf in by_port[port].leaves()] if port in by_port else []
                assert (close if port.startswith("grad") else same)(got, tensors), (path, number, port)
    assert not {event.path for event in rec} - set(reference.calls)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_computes_the_same_bits(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    plain = twin(x)
    plain.sum().backward()
    torch.manual_seed(1)
    with hookline.record(model, ports=PORTS):
        seen = model(x)
        seen.sum().backward()
    assert torch.equal(plain, seen)
    for (key, one), other in zip(twin.named_parameters(), model.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), key
        assert one.grad is None or torch.equal(one.grad, other.grad), key
    assert same(list(twin.buffers()), list(model.buffers()))


# ---------------------------------------------------------------- which sites


@pytest.mark.parametrize(
    ("sites", "ports", "expected"),
    [
        ("0", "output", {"0:output"}),
        ("0", ("output", "input"), {"0:input", "0:output"}),
        (["0", "1"], ["grad_output"], {"0:grad_output", "1:grad_output"}),
        ("0:grad_input", "output", {"0:grad_input"}),
        (["0:input", "2:grad_output", "1"], ("output",), {"0:input", "1:output", "2:grad_output"}),
        (nn.Linear, iter(["input"]), {"0:input", "2:input"}),
        (lambda path, module: path in "12", "output", {"(root):output", "1:output", "2:output"}),
        (["*:output", "!1"], "input", {"0:output", "2:output"}),
        (
            ["**", "!(root)", "!0:output"],
            ("input", "output"),
            {"0:input", "1:input", "1:output", "2:input", "2:output"},
        ),
        ("re:[02]", "output", {"0:output", "2:output"}),
        (("(root)", ["1"]), "output", {"(root):output", "1:output"}),
    ],
)
def test_sites_and_ports(sites: Any, ports: Any, expected: set[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    with hookline.record(model, sites, ports) as rec:
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert {f"{event.path or '(root)'}:{event.port}" for event in rec} == expected == set(rec.info["sites"])
    assert rec.paths == [path for path in ("", "0", "1", "2") if path in {event.path for event in rec}]


def test_a_module_under_two_names_is_recorded_once_under_the_first() -> None:
    model = Shared()
    with hookline.record(model, "again") as rec:
        model(torch.randn(4, 5, 2))
    assert rec.paths == ["cell"] and rec.modules["cell"].aliases == ("again",)
    assert len(rec["again"].calls) == len(rec["cell"].calls) == len(rec) == 16
