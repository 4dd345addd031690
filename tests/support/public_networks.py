"""Small configurations of public networks, built without downloads: those of timm, torchvision and transformers.

timm and transformers are in the extra `networks`. As a program, this prints the rows of the table in docs/own.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from hushfleet.data.torchvision_sets import import_torchvision
from hushfleet.models.module import with_group_norm

CLASSES, VOCABULARY = 4, 50
SHAPES = {"vectors": (12, 1, 1), "series": (3, 1, 16), "images": (3, 16, 16), "tokens": (12, 1, 1)}


class Public(NamedTuple):
    """A network: the package that publishes it, the kind of its data, and what makes it."""

    package: str
    data: str
    make: Callable[[], nn.Module]


class Logits(nn.Module):
    """A classifier of transformers: what it is given has a name, and its answer has fields."""

    def __init__(self, inner: nn.Module, given: str, answer: str, turned: bool) -> None:
        super().__init__()
        self.inner, self.given, self.answer, self.turned = inner, given, answer, turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = {self.given: x.mT if self.turned else x}
        if self.given == "input_ids":
            given["attention_mask"] = torch.ones_like(x)
        return getattr(self.inner(**given), self.answer)


class Transposed(nn.Module):
    """`[B, C, T]` as `[B, T, C]`, which transformers take."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mT


def _hf(name: str, given: str, answer: str = "logits", *, turned: bool = False, **sizes: Any) -> nn.Module:
    """:param name: of the configuration and of the network, with a `*` between their common start and their ends."""
    import_torchvision()
    import transformers

    start, _, end = name.partition("*")
    config = getattr(transformers, f"{start}Config")(**{"num_labels": CLASSES, **sizes})
    return Logits(getattr(transformers, f"{start}For{end}")(config), given, answer, turned)


def _text(name: str, **sizes: Any) -> nn.Module:
    """A classifier of texts."""
    width = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    places = {"vocab_size": VOCABULARY, "max_position_embeddings": 20, "pad_token_id": 0}
    return _hf(f"{name}*SequenceClassification", "input_ids", **{**width, **places, **sizes})


def _timm(path: str, **sizes: Any) -> nn.Module:
    """:param path: `module.Class` below `timm.models`."""
    import_torchvision()
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"timm.models.{module}"), name)(in_chans=3, num_classes=CLASSES, **sizes)


def _vit(path: str = "vision_transformer.VisionTransformer", **more: Any) -> nn.Module:
    return _timm(path, img_size=16, patch_size=4, embed_dim=16, depth=1, num_heads=2, **more)


def _mixer(block: str, **more: Any) -> nn.Module:
    import_torchvision()
    mixers = importlib.import_module("timm.models.mlp_mixer")
    kinds = {name: getattr(mixers, kind) for name, kind in {"block_layer": block, **more}.items()}
    kinds |= {"mlp_ratio": 4} if block == "ResBlock" else {}
    return mixers.MlpMixer(CLASSES, 16, patch_size=4, num_blocks=1, embed_dim=16, **kinds)


def _resnet() -> nn.Module:
    import_torchvision()
    block = importlib.import_module("timm.models.resnet").BasicBlock
    return _timm("resnet.ResNet", block=block, layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), stem_width=8)


def _torchvision(make: Callable[[Any], nn.Module]) -> nn.Module:
    return with_group_norm(make(import_torchvision().models))


def _frozen(network: nn.Module, head: str) -> nn.Module:
    network.requires_grad_(False)
    network.get_submodule(head).requires_grad_(True)
    return network


def _convnext(models: Any) -> nn.Module:
    block = models.convnext.CNBlockConfig
    return models.ConvNeXt([block(8, 16, 1), block(16, None, 1)], 0.1, num_classes=CLASSES)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    body = nn.TransformerEncoder(layer, 1)
    return nn.Sequential(Transposed(), nn.Linear(3, 16), body, nn.Flatten(), nn.Linear(256, CLASSES))


_PATCHES: dict[str, Any] = {"context_length": 16, "patch_length": 4, "patch_stride": 4, "num_input_channels": 3}
_PATCHES |= {"d_model": 8, "num_targets": CLASSES, "scaling": None, "turned": True}
_SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
_SPECTRUM: dict[str, Any] = {
    "patch_size": 2,
    "frequency_stride": 1,
    "time_stride": 2,
    "max_length": 16,
    "num_mel_bins": 3,
}
_DISTIL: dict[str, Any] = {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
_GPT: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 20, "n_embd": 16, "n_layer": 1, "n_head": 2}

_GROUPS = [f"{name}_groups" for name in ("q", "k", "v", "post_attention", "intermediate", "output")]

_TORCH: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "MLP": ("vectors", lambda: import_torchvision().ops.MLP(12, [16, CLASSES], dropout=0.1)),
    "TransformerEncoder": ("series", _encoder),
    "Swin": (
        "images",
        partial(
            _torchvision,
            lambda of: of.swin_transformer.SwinTransformer([2, 2], 8, [2], [2], [2, 2], num_classes=CLASSES),
        ),
    ),
    "ConvNeXt": ("images", partial(_torchvision, _convnext)),
    "MobileNetV2": (
        "images",
        partial(_torchvision, lambda of: of.MobileNetV2(CLASSES, 0.25, [[1, 8, 1, 1], [2, 8, 1, 2]])),
    ),
    "DenseNet": ("images", partial(_torchvision, lambda of: of.DenseNet(4, (1, 1), 8, num_classes=CLASSES))),
}
_TIMM: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "VisionTransformer": ("images", _vit),
    "VisionTransformer with dropout of all kinds": (
        "images",
        partial(_vit, drop_path_rate=0.2, attn_drop_rate=0.1, proj_drop_rate=0.1),
    ),
    "VisionTransformer, body frozen": ("images", lambda: _frozen(_vit(), "head")),
    "DeiT": ("images", partial(_vit, "deit.VisionTransformerDistilled")),
    "BEiT": ("images", partial(_vit, "beit.Beit")),
    "CaiT": ("images", partial(_vit, "cait.Cait", depth_token_only=1)),
    "MLP-Mixer": ("images", partial(_mixer, "MixerBlock")),
    "ResMLP": ("images", partial(_mixer, "ResBlock", norm_layer="Affine")),
    "PoolFormer": ("images", partial(_timm, "metaformer.MetaFormer", depths=(1, 1), dims=(8, 16))),
    "ResNet": ("images", lambda: with_group_norm(_resnet())),
    "ConvMixer": (
        "images",
        lambda: with_group_norm(_timm("convmixer.ConvMixer", dim=16, depth=1, kernel_size=3, patch_size=4)),
    ),
}
_TRANSFORMERS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "PatchTSMixer": (
        "series",
        partial(
            *(_hf, "PatchTSMixer*TimeSeriesClassification", "past_values", "prediction_outputs"),
            **_PATCHES,
            num_layers=1,
            norm_mlp="LayerNorm",
        ),
    ),
    "PatchTST": (
        "series",
        partial(
            *(_hf, "PatchTST*Classification", "past_values", "prediction_logits"),
            **_PATCHES,
            num_hidden_layers=1,
            num_attention_heads=2,
            ffn_dim=16,
            norm_type="layernorm",
        ),
    ),
    "AST": ("series", partial(_hf, "AST*AudioClassification", "input_values", turned=True, **_SMALL, **_SPECTRUM)),
    "ViT": (
        "images",
        partial(_hf, "ViT*ImageClassification", "pixel_values", image_size=16, patch_size=4, **_SMALL),
    ),
    "BERT": ("tokens", partial(_text, "Bert")),
    "BERT, body frozen": ("tokens", lambda: _frozen(_text("Bert"), "inner.classifier")),
    "RoBERTa": ("tokens", partial(_text, "Roberta")),
    "ALBERT": ("tokens", partial(_text, "Albert", embedding_size=8)),
    "ELECTRA": ("tokens", partial(_text, "Electra", embedding_size=8)),
    "MPNet": ("tokens", partial(_text, "MPNet")),
    "SqueezeBERT": ("tokens", partial(_text, "SqueezeBert", embedding_size=16, **dict.fromkeys(_GROUPS, 1))),
    "DistilBERT": (
        "tokens",
        partial(_hf, "DistilBert*SequenceClassification", "input_ids", max_position_embeddings=20, **_DISTIL),
    ),
    "GPT-2": ("tokens", partial(_hf, "GPT2*SequenceClassification", "input_ids", pad_token_id=0, **_GPT)),
}
NETWORKS = {
    name: Public(package, *found)
    for package, table in (("torchvision", _TORCH), ("timm", _TIMM), ("transformers", _TRANSFORMERS))
    for name, found in table.items()
}


if __name__ == "__main__":
    for name, (package, data, make) in NETWORKS.items():
        size = sum(value.numel() for value in make().parameters() if value.requires_grad)
        print(f"| {name} | {package} | {data} | {size:,} |")
