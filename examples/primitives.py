"""The five kinds of hooks, each printing what it sees: shape, dtype, first values and statistics.

They have the signatures of PyTorch's own and go on working where those do not: the network below has an in-place ReLU
and a residual ``+=``, on which ``torch.nn.Module.register_full_backward_hook`` raises or shows overwritten values.

    python examples/primitives.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import hookline
from hookline.report.describe import describe


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, kernel_size=3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.mix = nn.Conv2d(4, 4, kernel_size=1)
        self.head = nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.conv(images))
        mixed = self.mix(x)
        mixed += x
        return self.head(mixed.mean(dim=(2, 3)))


def main() -> None:
    argparse.ArgumentParser(description="Print what each of the five kinds of hooks sees.").parse_args()
    torch.manual_seed(0)
    model = Network()
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    names = {module: name for name, module in model.named_modules()}

    def before(module: nn.Module, args: Any) -> None:
        print(describe(args, f"{names[module]} input"))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        print(describe(output, f"{names[module]} output"))

    def backward_begins(module: nn.Module, grad_output: Any) -> None:
        print(describe(grad_output, f"{names[module]} grad_output"))

    def backward(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        print(describe(grad_input, f"{names[module]} grad_input"))

    def at_tensor(grad: torch.Tensor) -> None:
        print(describe(grad, "gradient of the images"))

    handles = [hookline.register_tensor_hook(images, at_tensor)]
    for module in (model.conv, model.relu, model.mix, model.head):
        handles += [
            hookline.register_forward_pre_hook(module, before),
            hookline.register_forward_hook(module, after),
            hookline.register_backward_pre_hook(module, backward_begins),
            hookline.register_backward_hook(module, backward),
        ]

    print("---- forward")
    loss = model(images).logsumexp(dim=1).sum()
    print("\n---- backward")
    loss.backward()

    for handle in handles:
        handle.remove()
    model(images).sum().backward()
    print("\nafter handle.remove() another forward and backward printed nothing")


if __name__ == "__main__":
    main()
