"""Watch the feature maps of one layer while a small network trains.

The task is made here: tell apart horizontal, vertical and slanting stripes in noise. Every few steps one training step
runs inside ``hookline.record``, and what passed is drawn: the maps of the second convolution, always of the same image,
and how large the gradient is at each layer. The network computes and learns exactly as it would without.

    python examples/feature_maps_during_training.py --out training
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import nn

import hookline
from hookline.report import plot


def stripes(count: int, side: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of shape (count, 1, side, side) and which of three ways the stripes run."""
    ways = torch.arange(count) % 3
    angle = ways * (math.pi / 4)
    down, across = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    place = torch.cos(angle)[:, None, None] * down + torch.sin(angle)[:, None, None] * across
    phase = 2 * math.pi * torch.rand(count, 1, 1)
    images = torch.sin(place * (2 * math.pi / 6) + phase) + 0.7 * torch.randn(count, side, side)
    return images[:, None], ways


class StripeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 8, kernel_size=3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 12, kernel_size=3, padding=1), nn.BatchNorm2d(12)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(12, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm1(self.conv1(images)))
        x = self.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean(dim=(2, 3)))


def draw(rec: hookline.Recording, step: int, folder: Path) -> None:
    title = f"conv2 at step {step}"
    plot.feature_maps(rec["conv2"].output, batch=1, channels=12, title=title, path=folder / f"maps-{step:04d}.png")
    title = f"gradients at step {step}"
    plot.gradient_flow(rec, title=title, path=folder / f"gradient-flow-{step:04d}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw feature maps and gradients while a small network trains.")
    parser.add_argument("--out", type=Path, default=Path("training"), help="folder for the pictures (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="training steps (%(default)s)")
    parser.add_argument("--every", type=int, default=30, help="steps between two pictures (%(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    images, ways = stripes(192)
    model = StripeNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def train() -> tuple[float, float]:
        """One step; returns the loss and the share of right answers."""
        optimizer.zero_grad()
        scores = model(images)
        loss = nn.functional.cross_entropy(scores, ways)
        loss.backward()
        optimizer.step()
        return loss.item(), (scores.argmax(dim=1) == ways).float().mean().item()

    for step in range(options.steps + 1):
        if step % options.every:
            train()
            continue
        with hookline.record(model, ports=("output", "grad_output")) as rec:
            loss, right = train()
        draw(rec, step, options.out)
        flow = rec["conv2"].grad_output.norm().item()
        print(f"step {step:4}  loss {loss:.3f}  right {right:4.0%}  gradient at conv2 {flow:.1e}")
    print(f"pictures are in {options.out}")


if __name__ == "__main__":
    main()
