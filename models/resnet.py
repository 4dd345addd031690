"""Defines ResNets (He et al., CVPR 2016) for 32x32 images, with GroupNorm (Wu & He, ECCV 2018) in place of BatchNorm.

Batch statistics do not work with averaging over clients with different data (Hsieh et al., ICML 2020), and do not
allow per-sample gradients, so every normalisation is GroupNorm. The first convolution is 3x3 with stride 1, and no
pooling follows it, as usual for images of this size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from hushfleet.models.model import Model
from hushfleet.params import ParamLayout

SOURCE = "He et al., Deep Residual Learning, CVPR 2016; Wu & He, Group Normalization, ECCV 2018"

Tensors = Mapping[str, Tensor]


def resnet18_gn(classes: int = 10) -> Model:
    """Makes ResNet-18 (He et al., CVPR 2016) with group normalisation (Wu, He, ECCV 2018), for images of 32 x 32."""
    return _ResNet((64, 128, 256, 512), blocks=2, groups=32).model("resnet18-gn", classes)


def resnet8_gn(classes: int = 10) -> Model:
    """Makes the network of He et al. for CIFAR-10 with n = 1 and half of its widths, for processor cores."""
    return _ResNet((8, 16, 32), blocks=1, groups=4).model("resnet8-gn", classes)


@dataclass(frozen=True)
class _ResNet:
    """:param widths: channels of each stage; every stage except the first halves the image.
    :param blocks: residual blocks of a stage, with two convolutions each.
    :param groups: the groups of every GroupNorm.
    """

    widths: tuple[int, ...]
    blocks: int
    groups: int

    def model(self, name: str, classes: int) -> Model:
        layout = self._layout(classes)
        return Model(name, SOURCE, (3, 32, 32), classes, layout, (), self._forward, hidden=self._hidden)

    def _each_block(self) -> Iterator[tuple[str, int, int, int]]:
        """Yields name, input channels, output channels and stride of each residual block."""
        channels = self.widths[0]
        for stage, width in enumerate(self.widths, start=1):
            for index in range(self.blocks):
                yield f"stage{stage}.block{index + 1}", channels, width, 2 if index == 0 and stage > 1 else 1
                channels = width

    def _layout(self, classes: int) -> ParamLayout:
        tensors: dict[str, tuple[int, ...]] = {}

        def add_conv(name: str, channels: int, width: int, kernel: int) -> None:
            tensors[f"{name}.weight"] = (width, channels, kernel, kernel)
            tensors[f"{name}_norm.weight"] = (width,)
            tensors[f"{name}_norm.bias"] = (width,)

        add_conv("stem", 3, self.widths[0], 3)
        for block, channels, width, stride in self._each_block():
            add_conv(f"{block}.conv1", channels, width, 3)
            add_conv(f"{block}.conv2", width, width, 3)
            if stride > 1:
                add_conv(f"{block}.shortcut", channels, width, 1)
        tensors["fc.weight"] = (classes, self.widths[-1])
        tensors["fc.bias"] = (classes,)
        return ParamLayout(tuple(tensors), tuple(tensors.values()))

    def _forward(self, t: Tensors, x: Tensor, dropout: Sequence[Tensor]) -> Tensor:
        return F.linear(self._hidden(t, x, dropout), t["fc.weight"], t["fc.bias"])

    def _hidden(self, t: Tensors, x: Tensor, dropout: Sequence[Tensor]) -> Tensor:
        x = F.relu(self._normed_conv(t, "stem", x))
        for block, _, _, stride in self._each_block():
            y = F.relu(self._normed_conv(t, f"{block}.conv1", x, stride))
            y = self._normed_conv(t, f"{block}.conv2", y)
            x = F.relu(y + (self._normed_conv(t, f"{block}.shortcut", x, stride) if stride > 1 else x))
        return x.mean((2, 3))

    def _normed_conv(self, t: Tensors, name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = t[f"{name}.weight"]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        return F.group_norm(x, self.groups, t[f"{name}_norm.weight"], t[f"{name}_norm.bias"])
