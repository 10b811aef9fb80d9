"""Whole networks with every module observed: the same bits as without, and as many events as there are calls."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hookline

from .reference import equal, leaves_of

# ---------------------------------------------------------------- the networks


class Block(nn.Module):
    def __init__(self, channels: int, inplace: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=inplace)  # one module, called twice
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(0.1)  # an identity in evaluation
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.norm1(self.conv1(x)))
        h = self.drop(self.norm2(self.conv2(h)))
        if self.inplace:
            h += x
        else:
            h = h + x
        return self.relu(h)


def resnet(inplace: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace),
        Block(8, inplace),
        Block(8, inplace),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8, 5),
    )


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(3 + 4 * i), nn.ReLU(inplace=True), nn.Conv2d(3 + 4 * i, 4, 3, padding=1))
            for i in range(3)
        )
        self.norm = nn.BatchNorm2d(15)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return F.relu(self.norm(torch.cat(features, 1)), inplace=True).mean((2, 3))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.lstm = nn.LSTM(6, 7, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(7, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        output, (hidden, cell) = self.lstm(self.embed(tokens))
        return self.head(hidden[-1]) + output.mean() + cell.sum()


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(3, True), Block(3, True)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.mean((2, 3))


def image() -> Tensor:
    return torch.randn(2, 3, 6, 6)


def tokens() -> Tensor:
    return torch.randint(0, 10, (2, 5))


def sequence() -> Tensor:
    return torch.randn(2, 4, 8)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "resnet with in-place relu": (lambda: resnet(True), image),
    "resnet": (lambda: resnet(False), image),
    "densenet with in-place relu": (DenseNet, image),
    "lstm": (Tagger, tokens),
    "transformer": (transformer, sequence),
    "checkpoint without reentry": (lambda: Checkpointed(False), image),
    "checkpoint with reentry": (lambda: Checkpointed(True), image),
}


def _cases() -> list[Any]:
    return [
        pytest.param(name, training, input_grad, id=f"{name}-{'train' if training else 'eval'}-{input_grad}")
        for name in MODELS
        for training in (True, False)
        for input_grad in (True, False)
        # Torch itself gives no gradient to a reentrant checkpoint none of whose inputs requires one.
        if input_grad or name != "checkpoint with reentry"
    ]


# ---------------------------------------------------------------- one training step, and what is compared


@dataclasses.dataclass
class Step:
    """Everything that a training step leaves."""

    output: Tensor
    loss: Tensor
    parameter_grads: dict[str, Tensor | None]
    input_grad: Tensor | None
    buffers: dict[str, Tensor]
    rng: Tensor


def make(name: str, training: bool, input_grad: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, make_input = MODELS[name]
    model, x = build().train(training), make_input()
    if x.is_floating_point():
        x.requires_grad_(input_grad)
    return model, x


def train_step(model: nn.Module, x: Tensor) -> Step:
    torch.manual_seed(1)
    output = model(x)
    loss = (output * torch.arange(output.shape[-1])).sum()
    loss.backward()
    return Step(
        output.detach(),
        loss.detach(),
        {name: parameter.grad for name, parameter in model.named_parameters()},
        x.grad,
        dict(model.named_buffers()),
        torch.get_rng_state(),
    )


def assert_same_bits(observed: Step, bare: Step) -> None:
    for field in dataclasses.fields(Step):
        assert equal(getattr(observed, field.name), getattr(bare, field.name)), field.name


def callable_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All but lists, which are never called and take no hook."""
    return [(path, module) for path, module in model.named_modules() if not isinstance(module, nn.ModuleList)]


@dataclasses.dataclass
class Calls:
    """How often each module ran: first time round, in a recomputation, and with a result that wants a gradient."""

    begun: Counter[str]
    ended: Counter[str]
    first: Counter[str]
    differentiable: Counter[str]


def count_calls(name: str, training: bool, input_grad: bool) -> tuple[Calls, Step]:
    """Counted with PyTorch's own forward hooks on a model of its own."""
    model, x = make(name, training, input_grad)
    calls = Calls(Counter(), Counter(), Counter(), Counter())
    for path, module in model.named_modules():
        # Attention computes with the weight of out_proj once a call and never calls it, so PyTorch's hooks miss it.
        paths = [path, f"{path}.out_proj"] if isinstance(module, nn.MultiheadAttention) else [path]
        module.register_forward_pre_hook(lambda *_, paths=paths: calls.begun.update(paths))
        module.register_forward_hook(lambda *seen, paths=paths: [_count(calls, p, seen[-1]) for p in paths] and None)
    return calls, train_step(model, x)


def _count(calls: Calls, path: str, output: Any) -> None:
    calls.ended[path] += 1
    if torch._C._current_graph_task_id() == -1:
        calls.first[path] += 1
        # The first round of a reentrant checkpoint runs without gradients and gets them in its second one.
        if not torch.is_grad_enabled() or any(isinstance(t, Tensor) and t.requires_grad for t in leaves_of(output)):
            calls.differentiable[path] += 1


# ---------------------------------------------------------------- the tests


@pytest.mark.parametrize(("name", "training", "input_grad"), _cases())
def test_hooks_on_every_module_change_no_bit_and_see_every_call(name: str, training: bool, input_grad: bool) -> None:
    calls, bare = count_calls(name, training, input_grad)
    model, x = make(name, training, input_grad)
    seen: dict[str, Counter[str]] = {kind: Counter() for kind in ("pre", "forward", "backward pre", "backward")}
    handles = []
    for path, module in callable_modules(model):
        handles += [
            hookline.register_forward_pre_hook(module, lambda *_, p=path: seen["pre"].update([p])),
            hookline.register_forward_hook(module, lambda *_, p=path: seen["forward"].update([p])),
            hookline.register_backward_pre_hook(module, lambda *_, p=path: seen["backward pre"].update([p])),
            hookline.register_backward_hook(module, lambda *_, p=path: seen["backward"].update([p])),
        ]
    assert_same_bits(train_step(model, x), bare)
    assert seen["pre"] == calls.begun
    assert seen["forward"] == calls.ended
    assert seen["backward pre"] == calls.differentiable
    assert seen["backward"] == calls.differentiable
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(("name", "training", "input_grad"), _cases())
def test_a_recording_of_every_module_changes_no_bit_and_has_every_call(
    name: str, training: bool, input_grad: bool
) -> None:
    calls, bare = count_calls(name, training, input_grad)
    model, x = make(name, training, input_grad)
    with hookline.record(model, "**", ports=("input", "output", "grad_input", "grad_output")) as recording:
        assert_same_bits(train_step(model, x), bare)
    found = {port: Counter(e.path for e in recording if e.port == port) for port in ("input", "output")}
    grads = {port: Counter(e.path for e in recording if e.port == port) for port in ("grad_input", "grad_output")}
    assert found == {"input": calls.first, "output": calls.first}
    assert grads == {"grad_input": calls.differentiable, "grad_output": calls.differentiable}


@pytest.mark.parametrize("name", MODELS)
def test_two_steps_under_hooks_train_to_the_same_bits(name: str) -> None:
    def train(hooked: bool) -> list[Tensor]:
        model, x = make(name, training=True, input_grad=True)
        if hooked:
            for _, module in callable_modules(model):
                hookline.register_forward_hook(module, lambda *_: None)
                hookline.register_backward_hook(module, lambda *_: None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            train_step(model, x)
            optimizer.step()
        return [value.detach() for value in (*model.parameters(), *model.buffers())]

    assert equal(train(True), train(False))


@pytest.fixture
def plain_attention() -> Iterator[None]:
    """Torch's fused encoder kernel calls no sub-module, so an observed encoder takes the plain path, to other bits."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"checkpoint with reentry"}))
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.usefixtures("plain_attention")
def test_without_gradients_the_output_has_the_same_bits(name: str, mode: Callable[[], Any]) -> None:
    outputs = []
    for hooked in (False, True):
        model, x = make(name, training=False, input_grad=False)
        fired: list[int] = []
        if hooked:
            for _, module in callable_modules(model):
                hookline.register_forward_hook(module, lambda *_: None)
                hookline.register_backward_hook(module, lambda *_, fired=fired: fired.append(1))
        with mode():
            outputs.append(model(x))
        assert not fired
    assert equal(*outputs)


def test_an_observed_encoder_in_evaluation_runs_every_module_and_comes_close_to_the_fused_kernel() -> None:
    model, x = make("transformer", training=False, input_grad=False)
    forward = nn.TransformerEncoderLayer.forward
    with torch.no_grad():
        fused = model(x)
        with hookline.record(model) as recording:
            plain = model(x)
        after = model(x)
    assert {event.path for event in recording} >= {"layers.0.linear1", "layers.1.self_attn", "layers.0.dropout"}
    assert torch.allclose(fused, plain, atol=1e-5)
    assert equal(fused, after), "after removal the fused kernel runs again"
    assert nn.TransformerEncoderLayer.forward is forward
