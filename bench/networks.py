"""The networks that are measured, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ResNet50", "chain", "leaves", "pictures"]

DEPTHS = (3, 4, 6, 3)
EXPANSION = 4


class ResNet50(nn.Module):
    """The shape of ResNet-50: 126 modules without children, which one forward calls 158 times.

    ``inplace`` chooses between ``ReLU(inplace=True)`` with ``out += shortcut``, as networks are written, and a twin
    that writes nothing in place, on which PyTorch's own full backward hooks work.
    """

    def __init__(self, *, inplace: bool, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=inplace)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layers = nn.ModuleList()
        incoming = width
        for level, depth in enumerate(DEPTHS):
            channels = width * 2**level
            for block in range(depth):
                stride = 2 if level > 0 and block == 0 else 1
                self.layers.append(Bottleneck(incoming, channels, stride=stride, inplace=inplace))
                incoming = channels * EXPANSION
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(incoming, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for block in self.layers:
            x = block(x)
        return self.fc(self.avgpool(x).flatten(1))


class Bottleneck(nn.Module):
    def __init__(self, incoming: int, channels: int, *, stride: int, inplace: bool) -> None:
        super().__init__()
        outgoing = channels * EXPANSION
        self.conv1, self.bn1 = nn.Conv2d(incoming, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3, self.bn3 = nn.Conv2d(channels, outgoing, 1, bias=False), nn.BatchNorm2d(outgoing)
        self.relu = nn.ReLU(inplace=inplace)
        self.shortcut = None
        if stride != 1 or incoming != outgoing:
            self.shortcut = nn.Sequential(
                nn.Conv2d(incoming, outgoing, 1, stride=stride, bias=False), nn.BatchNorm2d(outgoing)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        shortcut = x if self.shortcut is None else self.shortcut(x)
        if self.relu.inplace:
            out += shortcut
        else:
            out = out + shortcut
        return self.relu(out)


def chain(modules: int) -> nn.Sequential:
    """So many modules in one row, for measuring how long it takes to attach to them."""
    return nn.Sequential(*(nn.Identity() for _ in range(modules)))


def leaves(model: nn.Module) -> list[nn.Module]:
    """The modules without children."""
    return [module for module in model.modules() if not any(module.children())]


def pictures(batch: int, side: int) -> Tensor:
    """Random pictures, shape (batch, 3, side, side)."""
    return torch.randn(batch, 3, side, side)
