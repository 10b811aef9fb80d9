"""The classification, detection and segmentation models of torchvision, with random weights."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from .architectures import Builder, Case

try:
    import torchvision
except (ImportError, RuntimeError):  # RuntimeError: a build for another torch
    torchvision = None

needs_torchvision = pytest.mark.skipif(torchvision is None, reason="torchvision is not installed for this torch")
TINY: dict[str, Builder] = {}
FULL: dict[str, Builder] = {}

HUGE = {"vit_h_14", "vit_l_16", "vit_l_32", "regnet_y_128gf"}
"""Several copies of these do not fit into the memory of a small machine."""

LEAST_SIZE = {"inception_v3": 299, "maxvit_t": 224} | dict.fromkeys(("vit_b_16", "vit_b_32"), 224)
CLASSES = 3


def tiny(builder: Builder) -> Builder:
    TINY[builder.__name__] = builder
    return builder


def classifying(model: Any, size: int = 32) -> Case:
    return Case(model, {}, (torch.randn(2, 3, size, size),))


# ---------------------------------------------------------------- classification, tiny


@tiny
def resnet() -> Case:
    models = torchvision.models
    return classifying(models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES))


@tiny
def resnext() -> Case:
    models = torchvision.models
    block = models.resnet.Bottleneck
    return classifying(models.ResNet(block, [1, 1, 1, 1], num_classes=CLASSES, groups=4, width_per_group=4))


@tiny
def densenet() -> Case:
    model = torchvision.models.DenseNet(4, (2, 2), 8, drop_rate=0.1, num_classes=CLASSES, memory_efficient=True)
    return classifying(model)


@tiny
def convnext() -> Case:
    block = torchvision.models.convnext.CNBlockConfig
    model = torchvision.models.ConvNeXt([block(8, 16, 1), block(16, None, 2)], 0.3, num_classes=CLASSES)
    return classifying(model)


@tiny
def vision_transformer() -> Case:
    return classifying(torchvision.models.VisionTransformer(32, 16, 2, 2, 16, 24, dropout=0.1, num_classes=CLASSES))


@tiny
def swin() -> Case:
    model = torchvision.models.SwinTransformer([4, 4], 8, [1, 2], [1, 2], [4, 4], num_classes=CLASSES)
    return classifying(model)


@tiny
def swin_v2() -> Case:
    v2 = torchvision.models.swin_transformer
    parts = {"block": v2.SwinTransformerBlockV2, "downsample_layer": v2.PatchMergingV2}
    return classifying(v2.SwinTransformer([4, 4], 8, [1, 2], [1, 2], [4, 4], num_classes=CLASSES, **parts))


@tiny
def maxvit() -> Case:
    model = torchvision.models.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 8, 0.3, num_classes=CLASSES)
    return classifying(model)


@tiny
def mobilenet_v2() -> Case:
    settings = [[1, 8, 1, 1], [6, 8, 2, 2]]
    model = torchvision.models.MobileNetV2(CLASSES, 0.25, inverted_residual_setting=settings)
    return classifying(model)


@tiny
def mobilenet_v3() -> Case:
    row = torchvision.models.mobilenetv3.InvertedResidualConfig
    rows = [row(8, 3, 16, 8, True, "RE", 2, 1, 1.0), row(8, 5, 16, 8, False, "HS", 1, 1, 1.0)]
    return classifying(torchvision.models.MobileNetV3(rows, 16, num_classes=CLASSES))


@tiny
def mnasnet() -> Case:
    return classifying(torchvision.models.MNASNet(0.1, CLASSES))


@tiny
def shufflenet_v2() -> Case:
    return classifying(torchvision.models.ShuffleNetV2([1, 2, 1], [4, 8, 8, 16, 32], num_classes=CLASSES))


@tiny
def squeezenet() -> Case:
    return classifying(torchvision.models.SqueezeNet("1_1", CLASSES))


@tiny
def regnet() -> Case:
    shape = torchvision.models.regnet.BlockParams([1, 2], [8, 16], [4, 8], [1.0, 1.0], [2, 2], 0.25)
    return classifying(torchvision.models.RegNet(shape, CLASSES, stem_width=8))


@tiny
def efficientnet() -> Case:
    row = torchvision.models.efficientnet.MBConvConfig
    rows = [row(1, 3, 1, 8, 8, 1, 1.0, 1.0), row(4, 3, 2, 8, 16, 2, 1.0, 1.0)]
    return classifying(torchvision.models.EfficientNet(rows, 0.2, 0.3, num_classes=CLASSES))


# ---------------------------------------------------------------- everything that torchvision lists, at its own size


def get(name: str, **more: Any) -> Any:
    if name in ("googlenet", "inception_v3"):
        more["init_weights"] = False
    return torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **more)


def classification(name: str) -> Case:
    return classifying(get(name), LEAST_SIZE.get(name, 64))


def segmentation(name: str) -> Case:
    return classifying(get(name, weights_backbone=None), 64)


def detection(name: str) -> Case:
    """Pictures of unlike sizes with a box or two; in train mode the model gives a dict of losses."""
    sizes = {} if name.startswith("ssd") else {"min_size": 64, "max_size": 96}
    model = get(name, weights_backbone=None, **sizes)
    return Case(model, {}, ([torch.rand(3, 64, 64), torch.rand(3, 64, 80)], [target(1), target(2)]))


def target(boxes: int) -> dict[str, Tensor]:
    corner = torch.rand(boxes, 2) * 20
    keypoints = torch.cat([corner[:, None] + torch.rand(boxes, 17, 2) * 20, torch.ones(boxes, 17, 1)], -1)
    return {
        "boxes": torch.cat([corner, corner + 20 + torch.rand(boxes, 2) * 20], 1),
        "labels": torch.ones(boxes, dtype=torch.long),
        "masks": torch.ones(boxes, 64, 64, dtype=torch.uint8),
        "keypoints": keypoints,
    }


def _list() -> None:
    models = torchvision.models
    kinds = [(models, classification), (models.segmentation, segmentation), (models.detection, detection)]
    for module, build in kinds:
        for name in models.list_models(module, exclude=HUGE):
            FULL[name] = functools.partial(build, name)


if torchvision is not None:
    _list()
