"""ResNet-18 (He et al., CVPR 2016) for 32x32 images, with GroupNorm (Wu & He, ECCV 2018) for BatchNorm.

Batch statistics neither survive averaging over clients with different data (Hsieh et al., ICML 2020) nor
allow per-sample gradients, so every normalisation is GroupNorm with 32 groups. The first convolution is 3x3
with stride 1 and no pooling follows it, as usual for images of this size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import functional as F

from hushfleet.model.params import ParamLayout
from hushfleet.models.model import Model

WIDTHS = (64, 128, 256, 512)
BLOCKS_PER_STAGE = 2
GROUPS = 32

Tensors = Mapping[str, Tensor]


def resnet18_gn(classes: int = 10) -> Model:
    source = "He et al., Deep Residual Learning, CVPR 2016; Wu & He, Group Normalization, ECCV 2018"
    return Model("resnet18-gn", source, (3, 32, 32), classes, _layout(classes), (), _forward, hidden=_hidden)


def _blocks() -> list[tuple[str, int, int, int]]:
    """Name, channels in, channels out and stride of each residual block."""
    blocks, channels = [], WIDTHS[0]
    for stage, width in enumerate(WIDTHS, start=1):
        for index in range(BLOCKS_PER_STAGE):
            stride = 2 if index == 0 and stage > 1 else 1
            blocks.append((f"stage{stage}.block{index + 1}", channels, width, stride))
            channels = width
    return blocks


def _layout(classes: int) -> ParamLayout:
    tensors: dict[str, tuple[int, ...]] = {}

    def add_conv(name: str, channels: int, width: int, kernel: int) -> None:
        tensors[f"{name}.weight"] = (width, channels, kernel, kernel)
        tensors[f"{name}_norm.weight"] = (width,)
        tensors[f"{name}_norm.bias"] = (width,)

    add_conv("stem", 3, WIDTHS[0], 3)
    for block, channels, width, stride in _blocks():
        add_conv(f"{block}.conv1", channels, width, 3)
        add_conv(f"{block}.conv2", width, width, 3)
        if stride > 1:
            add_conv(f"{block}.shortcut", channels, width, 1)
    tensors["fc.weight"] = (classes, WIDTHS[-1])
    tensors["fc.bias"] = (classes,)
    return ParamLayout(tuple(tensors), tuple(tensors.values()))


def _forward(t: Tensors, x: Tensor, dropout: Sequence[Tensor]) -> Tensor:
    return F.linear(_hidden(t, x, dropout), t["fc.weight"], t["fc.bias"])


def _hidden(t: Tensors, x: Tensor, dropout: Sequence[Tensor]) -> Tensor:
    x = F.relu(_normed_conv(t, "stem", x))
    for block, _, _, stride in _blocks():
        y = F.relu(_normed_conv(t, f"{block}.conv1", x, stride))
        y = _normed_conv(t, f"{block}.conv2", y)
        x = F.relu(y + (_normed_conv(t, f"{block}.shortcut", x, stride) if stride > 1 else x))
    return x.mean((2, 3))


def _normed_conv(t: Tensors, name: str, x: Tensor, stride: int = 1) -> Tensor:
    weight = t[f"{name}.weight"]
    x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
    return F.group_norm(x, GROUPS, t[f"{name}_norm.weight"], t[f"{name}_norm.bias"])
