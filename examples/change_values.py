"""Change values inside a pretrained network and see what it makes of them: patch, ablate, steer, scale a gradient.

``hookline.edit`` takes a dict from places to functions of the value there; the network is untouched afterwards. The
pictures are scikit-image's cat and cup of coffee.

    python examples/change_values.py
"""

from __future__ import annotations

import argparse

import torch
from classify_cat import cat_photo, prepare, pretrained  # the example beside this one

import hookline

CAT, COFFEE = 285, 967
"""ImageNet's classes "Egyptian cat" and "espresso"."""

DEEP = "_blocks.10"
"""A block two thirds into the network, of shape (1, 112, 14, 14)."""

FEATURES = "_avg_pooling"
"""What the classifier sees of the picture: 1280 numbers."""


@torch.no_grad()
def shares(model: torch.nn.Module, picture: torch.Tensor) -> torch.Tensor:
    return model(picture)[0].softmax(dim=0)


def show(what: str, share: torch.Tensor) -> None:
    print(f"{what:42} cat {share[CAT]:6.1%}   coffee {share[COFFEE]:6.1%}   winner {int(share.argmax())}")


def main() -> None:
    argparse.ArgumentParser(description="Patch, ablate and steer a pretrained network.").parse_args()
    model = pretrained()
    cat, coffee = prepare(cat_photo()), prepare(cat_photo().with_name("coffee.png"))

    with hookline.record(model, [DEEP, FEATURES]) as rec:
        show("cat", shares(model, cat))
        show("coffee", shares(model, coffee))
    of_cat, of_coffee = rec[FEATURES].calls[0].output, rec[FEATURES].calls[1].output

    # Patch: the cat's run goes on with what the coffee's run had there.
    coffee_inside = rec[DEEP].calls[1].output
    with hookline.edit(model, {DEEP: lambda value: coffee_inside}):
        show(f"cat, {DEEP} from the coffee's run", shares(model, cat))

    def left_half_of_coffee(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([coffee_inside[..., :7], value[..., 7:]], dim=-1)

    with hookline.edit(model, {DEEP: left_half_of_coffee}):
        show("cat, the left half of it", shares(model, cat))

    # Ablate: switch off the twenty features that speak most for the cat.
    weight = model._fc.weight[CAT].detach()
    strongest = (of_cat.flatten() * weight).topk(20).indices

    def without_strongest(value: torch.Tensor) -> torch.Tensor:
        return value.index_fill(1, strongest, 0.0)

    with hookline.edit(model, {FEATURES: without_strongest}):
        show("cat without its 20 strongest features", shares(model, cat))

    # Steer: go from the cat's features towards those of the coffee.
    towards = of_coffee - of_cat
    for amount in (0.25, 0.5, 0.75):
        with hookline.edit(model, {FEATURES: lambda value, amount=amount: value + amount * towards}):
            show(f"cat, {amount:.0%} of the way to the coffee", shares(model, cat))

    # Scale a gradient: the first convolution gets a tenth of it.
    stem = model._conv_stem.weight
    (plain,) = torch.autograd.grad(model(cat)[0, CAT], stem)
    with hookline.edit(model, {"_bn0:grad_input": lambda grad: grad * 0.1}) as edits:
        (scaled,) = torch.autograd.grad(model(cat)[0, CAT], stem)
    print(f"\ngradient of the first weights: norm {plain.norm():.4f}, edited {scaled.norm():.4f}")
    print(f"edits made: {edits.counts}\n")
    show("cat again, with nothing left on the model", shares(model, cat))


if __name__ == "__main__":
    main()
