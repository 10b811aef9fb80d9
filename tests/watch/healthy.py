"""Little trainings that go well, on which a watch must find nothing: each a model, its optimizers and a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

TEXT = (
    """the rain in spain stays mainly in the plain, and the quick brown fox jumps over the lazy dog. a watched pot
never boils; a watched training does, now and then, and it is good to know which of its layers was the first to. """
    * 4
)
LETTERS = sorted(set(TEXT))


@dataclass
class Training:
    """A training in steps.

    Attributes:
        name: Of the training.
        model: All of it; a pair of networks is one module with two children.
        optimizers: All of them; each steps at least once in each step.
        step: Does one step of the outer loop, from the data to the optimizers, and gives the loss, detached.
        steps: How many steps it is meant for.
    """

    name: str
    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    step: Callable[[int], Tensor]
    steps: int = 100


Make = Callable[[int], Training]
ALL: dict[str, Make] = {}


def training(make: Make) -> Make:
    """Enter a function of a seed into the list."""
    ALL[make.__name__] = make
    return make


def digits(count: int, generator: torch.Generator, size: int = 12) -> tuple[Tensor, Tensor]:
    """Pictures of ten fixed shapes, moved and noisy, shape (count, 1, size, size), and which shape each is."""
    shapes = torch.randn(10, 4, 4, generator=torch.Generator().manual_seed(7))
    large = F.interpolate(shapes[:, None], size=size, mode="bilinear")
    labels = torch.randint(10, (count,), generator=generator)
    shifts = torch.randint(-1, 2, (count,), generator=generator).tolist()
    moved = torch.stack([large[label].roll(shift, -1) for label, shift in zip(labels.tolist(), shifts, strict=True)])
    return moved + 0.3 * torch.randn(moved.shape, generator=generator), labels


def letters(count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pieces of a text as numbers, shape (count, length), and the letters that follow."""
    text = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    starts = torch.randint(len(TEXT) - length - 1, (count,), generator=generator).tolist()
    pieces = torch.stack([text[start : start + length + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


def supervised(
    name: str,
    model: nn.Module,
    optimizer: Optimizer,
    batch: Callable[[], tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    **more: Any,
) -> Training:
    """A training of one model; ``warmup`` steps, gradients of ``accumulate`` batches, ``clip`` and ``autocast``."""
    warmup, accumulate = more.get("warmup", 0), more.get("accumulate", 1)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1)))

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(accumulate):
            x, y = batch()
            with torch.autocast("cpu", torch.bfloat16, enabled=more.get("autocast", False)):
                out = model(x)
            part = loss(out.float(), y) / accumulate
            part.backward()
            total += part.detach()
        if "clip" in more:
            nn.utils.clip_grad_norm_(model.parameters(), more["clip"])
        optimizer.step()
        schedule.step()
        return total

    return Training(name, model, (optimizer,), step, more.get("steps", 100))


def _start(seed: int) -> torch.Generator:
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed + 1)


# ---------------------------------------------------------------- pictures


def small_cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


@training
def cnn(seed: int) -> Training:
    """Batch norm, SGD with momentum and a warmup."""
    data, model = _start(seed), small_cnn()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    return supervised("cnn", model, optimizer, lambda: digits(32, data), warmup=10)


@training
def cnn_bfloat16(seed: int) -> Training:
    """The same under autocast to bfloat16, with AdamW."""
    data, model = _start(seed), small_cnn()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    return supervised("cnn_bfloat16", model, optimizer, lambda: digits(32, data), autocast=True, steps=60)


class Residual(nn.Module):
    """A block whose last norm begins with a scale of zero, so that it begins as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu2(x + self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x))))))


@training
def residual(seed: int) -> Training:
    """Three residual blocks that begin as the identity."""
    data = _start(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Residual(8), nn.MaxPool2d(2), Residual(8),
        Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return supervised("residual", model, optimizer, lambda: digits(32, data), warmup=5)


@training
def accumulated(seed: int) -> Training:
    """Four batches to a step, and a layer norm."""
    data = _start(seed)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(144, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(),
        nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    return supervised("accumulated", model, optimizer, lambda: digits(8, data), accumulate=4)


@training
def mlp(seed: int) -> Training:
    """ReLU, dropout and Adam."""
    data = _start(seed)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(144, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = Adam(model.parameters(), lr=1e-3)
    return supervised("mlp", model, optimizer, lambda: digits(32, data), steps=150)


@training
def memorizes(seed: int) -> Training:
    """Twenty pictures learned by heart, until the loss is next to nothing."""
    data = _start(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    batch = digits(20, data)
    return supervised("memorizes", model, Adam(model.parameters(), lr=3e-3), lambda: batch, steps=200)


@training
def autoencoder(seed: int) -> Training:
    """A sigmoid at the end, and no labels."""
    data = _start(seed)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 64), nn.ReLU(),
        nn.Linear(64, 144), nn.Sigmoid(),
    )  # fmt: skip

    def batch() -> tuple[Tensor, Tensor]:
        pictures, _ = digits(32, data)
        return torch.sigmoid(pictures), torch.sigmoid(pictures).flatten(1)

    return supervised("autoencoder", model, Adam(model.parameters(), lr=2e-3), batch, F.binary_cross_entropy)


# ---------------------------------------------------------------- texts


class Attention(nn.Module):
    """Causal self-attention with the scores masked by -inf."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.softmax, self.out = nn.Softmax(-1), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = self.softmax(scores.masked_fill(mask, -math.inf))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer of a transformer, the norms in front."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, 4)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CharTransformer(nn.Module):
    """Predicts the next letter."""

    def __init__(self, width: int = 32, layers: int = 2, length: int = 24) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(len(LETTERS), width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


@training
def char_transformer(seed: int) -> Training:
    """Pre-norm transformer, AdamW with a warmup and clipped gradients."""
    data, model = _start(seed), CharTransformer()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    return supervised("char_transformer", model, optimizer, lambda: letters(16, 24, data), warmup=10, clip=1.0)


class StockEncoder(nn.Module):
    """torch's own encoder layers, the norms behind, and a mean over the letters."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


@training
def encoder(seed: int) -> Training:
    """Post-norm encoder that tells whether a piece holds the letter t."""
    data, model = _start(seed), StockEncoder()

    def batch() -> tuple[Tensor, Tensor]:
        x, _ = letters(32, 16, data)
        return x, (x == LETTERS.index("t")).any(1).long()

    return supervised("encoder", model, Adam(model.parameters(), lr=1e-3), batch)


class CharLSTM(nn.Module):
    """Predicts the next letter, by torch's LSTM."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(len(LETTERS), 16), nn.LSTM(16, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.lstm(self.embed(x))
        return self.head(out).transpose(1, 2)


@training
def char_lstm(seed: int) -> Training:
    """RMSprop and clipped gradients."""
    data, model = _start(seed), CharLSTM()
    return supervised("char_lstm", model, RMSprop(model.parameters(), lr=3e-3), lambda: letters(16, 20, data), clip=1.0)


# ---------------------------------------------------------------- a pair


class Pair(nn.Module):
    """A generator of points on a ring and a critic of them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(
            nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid()
        )


@training
def gan(seed: int) -> Training:
    """Two optimizers, each of which steps once in a step of the loop."""
    data, pair = _start(seed), Pair()
    of_critic = Adam(pair.critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_generator = Adam(pair.generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)

    def step(number: int) -> Tensor:
        angle = 2 * math.pi * torch.rand(64, 1, generator=data)
        real = torch.cat((angle.cos(), angle.sin()), 1)
        fake = pair.generator(torch.randn(64, 4, generator=data))
        of_critic.zero_grad()
        judged = F.binary_cross_entropy(pair.critic(real), ones)
        judged = judged + F.binary_cross_entropy(pair.critic(fake.detach()), zeros)
        judged.backward()
        of_critic.step()
        of_generator.zero_grad()
        F.binary_cross_entropy(pair.critic(fake), ones).backward()
        of_generator.step()
        return judged.detach()

    return Training("gan", pair, (of_critic, of_generator), step, 150)
