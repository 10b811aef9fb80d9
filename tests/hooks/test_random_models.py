"""Random networks of all kinds of blocks: the same bits as without hooks, and each call's own gradients.

The reference runs a copy of the network in which every call of every module is cloned in and cloned out, so that no
other use of a tensor can reach into a call's gradients, and in which nothing is computed in place.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookline

from .reference import close, equal, isolated_calls

WIDTH = 4
Grads = tuple["Tensor | None", ...]


# ---------------------------------------------------------------- blocks: (batch, WIDTH) in, (batch, WIDTH) out


@dataclasses.dataclass
class Pair:
    first: Tensor
    second: Tensor
    note: str = "not a tensor"


class Leaf(nn.Module):
    """One of torch's own modules; ``inplace`` is what the reference leaves out."""

    def __init__(self, draw: random.Random, inplace: bool) -> None:
        super().__init__()
        self.inner = draw.choice(
            [
                lambda: nn.Linear(WIDTH, WIDTH),
                lambda: nn.Tanh(),
                lambda: nn.LayerNorm(WIDTH),
                lambda: nn.Identity(),
                lambda: nn.Dropout(0.5).eval(),
                lambda: nn.BatchNorm1d(WIDTH),
            ]
        )()

    def forward(self, x: Tensor) -> Tensor:
        # An identity of a tensor with uses of its own is the one case in which sums are rounded in another order.
        return self.inner(x * 1)


class InPlaceRelu(nn.Module):
    def __init__(self, draw: random.Random, inplace: bool) -> None:
        super().__init__()
        self.linear, self.relu = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=inplace)
        self.drop = nn.Dropout(0.5).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.drop(self.linear(x)))


class Residual(nn.Module):
    def __init__(self, branch: nn.Module, inplace: bool) -> None:
        super().__init__()
        self.branch, self.inplace = branch, inplace

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x) * 1.5
        if self.inplace:
            y += x
            return y
        return y + x


class Twice(nn.Module):
    """One module, called two times."""

    def __init__(self, shared: nn.Module, inplace: bool) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.shared(x) * 0.5 + x)


class Views(nn.Module):
    """Halves of a tensor that are written to one by one, as in gated units."""

    def __init__(self, draw: random.Random, inplace: bool) -> None:
        super().__init__()
        self.linear, self.unflatten, self.flatten = nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (2, -1)), nn.Flatten()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        y = self.unflatten(self.linear(x))
        gate, value = y[:, 0], y[:, 1]
        if self.inplace:
            gate.mul_(2).sigmoid_()
            return self.flatten(y * 1) + torch.cat([gate, value], 1)
        gate = (gate * 2).sigmoid()
        return self.flatten(torch.stack([gate, value], 1)) + torch.cat([gate, value], 1)


class Named(nn.Module):
    """Dicts and dataclasses between two modules."""

    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.linear(x)
            return {"pair": Pair(y.tanh(), x * y), "list": [y, None], "unused": y * 3, "count": 2}

    class Takes(nn.Module):
        def forward(self, values: dict[str, Any], *, scale: Tensor, unused: Any = None) -> Pair:
            pair = values["pair"]
            return Pair(pair.first * scale + pair.second, values["list"][0])

    def __init__(self, draw: random.Random, inplace: bool) -> None:
        super().__init__()
        self.makes, self.takes = self.Makes(), self.Takes()

    def forward(self, x: Tensor) -> Tensor:
        output = self.takes(self.makes(x), scale=x, unused=torch.arange(3))
        return output.first + output.second.detach()


class Cell(nn.Module):
    """An LSTM cell over three steps; the hidden state depends on the cell state."""

    def __init__(self, draw: random.Random, inplace: bool) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, cell = self.cell(x)
        hidden, cell = self.cell(x * 0.5, (hidden, cell))
        hidden, cell = self.cell(hidden, (hidden, cell))
        return hidden + cell


class Recurrent(nn.Module):
    def __init__(self, draw: random.Random, inplace: bool) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output, state = self.gru(x[:, None].expand(-1, 3, -1))
        return output[:, -1] * 0.5 + state[-1]


class Several(nn.Module):
    """Outputs that share memory, and one that nobody uses."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.linear(x)
            first, second = y.chunk(2, 1)
            return first, second, y.argmax(1), y

    def __init__(self, draw: random.Random, inplace: bool) -> None:
        super().__init__()
        self.parts = self.Parts()
        self.whole = draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        first, second, index, whole = self.parts(x)
        y = first * second + index[:, None]
        return y + whole[:, :WIDTH] if self.whole else y


class WritesIntoInput(nn.Module):
    """A module that writes into what it gets; its caller goes on with that."""

    class Writes(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.inplace = inplace

        def forward(self, x: Tensor) -> Tensor:
            return F.leaky_relu(x, 0.1, inplace=self.inplace)

    def __init__(self, draw: random.Random, inplace: bool) -> None:
        super().__init__()
        self.linear, self.writes, self.inplace = nn.Linear(WIDTH, WIDTH), self.Writes(inplace), inplace
        self.returned = draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * 1
        y = self.writes(h)
        # In place, h has become y: which of the two the caller uses is the same.
        return y if self.returned or not self.inplace else h


class Parallel(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x) * 0.5


class Detour(nn.Module):
    """Part of the network gets no gradient."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.detach()) * 0.1


SIMPLE = (Leaf, Leaf, InPlaceRelu, Views, Named, Cell, Recurrent, Several, WritesIntoInput)


def grown(draw: random.Random, depth: int, inplace: bool) -> nn.Module:
    kind = draw.choice(("simple", "sequence", "sequence", "residual", "twice", "parallel", "detour"))
    if depth == 0 or kind == "simple":
        return draw.choice(SIMPLE)(draw, inplace)
    if kind == "sequence":
        return nn.Sequential(*(grown(draw, depth - 1, inplace) for _ in range(draw.randint(1, 3))))
    if kind == "parallel":
        return Parallel(grown(draw, depth - 1, inplace), grown(draw, depth - 1, inplace))
    inner = grown(draw, depth - 1, inplace)
    return {"residual": lambda: Residual(inner, inplace), "twice": lambda: Twice(inner, inplace)}.get(
        kind, lambda: Detour(inner)
    )()


def network(seed: int, inplace: bool = True) -> nn.Module:
    """The same network for the same seed, with or without in-place operations."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), grown(random.Random(seed), 3, inplace)).double()


def make_input(seed: int) -> Tensor:
    torch.manual_seed(seed + 1)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    return x.requires_grad_(seed % 3 != 0)


def loss_of(output: Tensor) -> Tensor:
    return (output * torch.arange(1, WIDTH + 1)).pow(2).sum()


# ---------------------------------------------------------------- one network, three runs


def step(model: nn.Module, x: Tensor) -> list[Any]:
    output = model(x)
    loss = loss_of(output)
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [output.detach(), loss.detach(), x.grad, grads, list(model.buffers()), torch.get_rng_state()]


def gradients_seen(model: nn.Module) -> tuple[dict[str, list[tuple[Grads, Grads]]], Callable[[], None]]:
    """Hook every module; returns (grad_input, grad_output) of each event by path, and what removes the hooks."""
    seen: dict[str, list[tuple[Grads, Grads]]] = {path: [] for path, _ in model.named_modules()}
    handles = [
        hookline.register_backward_hook(
            module, lambda module, *grads, path=path: seen[path].append((tuple(grads[0]), tuple(grads[1])))
        )
        for path, module in model.named_modules()
    ]
    for module in model.modules():
        handles.append(hookline.register_forward_hook(module, lambda *_: None))
    return seen, lambda: [handle.remove() for handle in handles] and None


def check(seed: int) -> None:
    bare = step(network(seed), make_input(seed))
    model, x = network(seed), make_input(seed)
    seen, remove = gradients_seen(model)
    observed = step(model, x)
    remove()
    assert equal(observed, bare), f"seed {seed}: other bits with hooks"
    expected = isolated_calls(network(seed, inplace=False), lambda model: loss_of(model(make_input(seed))))
    for path, calls in expected.items():
        reached = [call for call in calls if any(grad is not None for grad in call[1])]
        assert len(seen[path]) == len(reached), f"seed {seed}: {path} has {len(seen[path])} events of {len(reached)}"
        _compare(f"seed {seed}: {path}", seen[path], reached)


def _compare(where: str, events: list[tuple[Grads, Grads]], calls: list[tuple[Grads, Grads]]) -> None:
    """Each event is that of one call; backward passes see the calls in an order of their own."""
    left = list(calls)
    for grad_input, grad_output in events:
        match = [call for call in left if close(grad_output, call[1]) and close(grad_input, call[0])]
        assert match, f"{where}: an event that is no call's: {grad_input}, {grad_output}; wanted one of {left}"
        left.remove(match[0]) if len(left) == 1 else left.pop(next(i for i, c in enumerate(left) if c is match[0]))


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_ten_random_networks(first: int) -> None:
    for seed in range(first, first + 10):
        check(seed)


def test_an_identity_of_a_tensor_with_later_uses_comes_out_to_the_order_of_summation() -> None:
    """The one case in which bits may differ: the identity's gradient is added after those of the later uses."""

    def run(observed: bool) -> Tensor:
        torch.manual_seed(0)
        identity, cell = nn.Identity(), nn.LSTMCell(WIDTH, WIDTH).double()
        if observed:
            hookline.register_backward_hook(identity, lambda *_: None)
        x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
        h = x * 1
        y = identity(h)
        hidden, state = cell(h)
        hidden, state = cell(h * 0.5, (hidden, state))
        ((y + hidden * 0.5) * 1.5 + h).sin().sum().backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(run(observed=True), run(observed=False), rtol=1e-13, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 1100, 50))
def test_fifty_more_random_networks(first: int) -> None:
    for seed in range(first, first + 50):
        check(seed)


@pytest.mark.parametrize("seed", range(0, 100, 7))
def test_a_recording_of_a_random_network_changes_no_bit(seed: int) -> None:
    bare = step(network(seed), make_input(seed))
    model, x = network(seed), make_input(seed)
    with hookline.record(model, "**", ports=("input", "output", "grad_input", "grad_output")) as recording:
        observed = step(model, x)
    assert equal(observed, bare) and len(recording) > 0


@pytest.mark.parametrize("seed", range(0, 100, 7))
def test_hooks_on_a_random_half_of_the_modules_change_no_bit(seed: int) -> None:
    bare = step(network(seed), make_input(seed))
    model, x, draw = network(seed), make_input(seed), random.Random(seed)
    for module in model.modules():
        if draw.random() < 0.5:
            draw.choice((hookline.register_backward_hook, hookline.register_backward_pre_hook))(module, lambda *_: None)
    assert equal(step(model, x), bare)
