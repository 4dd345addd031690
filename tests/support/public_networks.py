"""Small configurations of public networks, built without downloads: timm's, torchvision's, and those of transformers.

timm and transformers are in the extra `networks`; what needs a package that is not there is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from hushfleet.data.torchvision_sets import import_torchvision
from hushfleet.models.module import with_group_norm

CLASSES, TOKENS = 4, 50
SHAPES = {"vectors": (12, 1, 1), "series": (3, 1, 16), "images": (3, 16, 16), "tokens": (12, 1, 1)}


class Public(NamedTuple):
    """A network: who publishes it, the kind of data, and what makes it."""

    package: str
    data: str
    make: Callable[[], nn.Module]


class Logits(nn.Module):
    """A classifier of transformers: what it is given has a name, and its answer a field."""

    def __init__(self, inner: nn.Module, given: str, prepare: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.given, self.prepare = inner, given, prepare

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.inner(**{self.given: self.prepare(x)})
        return found.prediction_outputs if hasattr(found, "prediction_outputs") else found.logits


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _hf(
    name: str, given: str = "input_ids", prepare: Any = _same, *, kind: str = "SequenceClassification", **sizes: Any
) -> nn.Module:
    import_torchvision()
    import transformers

    config = getattr(transformers, f"{name}Config")(num_labels=CLASSES, **sizes)
    return Logits(getattr(transformers, f"{name}For{kind}")(config), given, prepare)


def _timm(name: str, *, norm: bool = False, **sizes: Any) -> nn.Module:
    import_torchvision()
    import timm

    made = timm.create_model(name, pretrained=False, num_classes=CLASSES, in_chans=3, **sizes)
    return with_group_norm(made) if norm else made


def _torchvision(make: Callable[[Any], nn.Module]) -> nn.Module:
    return with_group_norm(make(import_torchvision().models))


def _frozen(network: nn.Module, head: str) -> nn.Module:
    network.requires_grad_(False)
    network.get_submodule(head).requires_grad_(True)
    return network


_TEXT = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_PLACES = {"max_position_embeddings": 20, "pad_token_id": 0}
_VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


def _vit(**more: Any) -> nn.Module:
    import_torchvision()
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**_VIT, in_chans=3, num_classes=CLASSES, **more)


NETWORKS: dict[str, Public] = {
    # vectors
    "MLP": Public("torchvision", "vectors", lambda: import_torchvision().ops.MLP(12, [16, CLASSES], dropout=0.1)),
    # series
    "PatchTSMixer": Public(
        "transformers",
        "series",
        lambda: _hf(
            "PatchTSMixer",
            "past_values",
            lambda x: x.mT,
            kind="TimeSeriesClassification",
            context_length=16,
            patch_length=4,
            patch_stride=4,
            num_input_channels=3,
            d_model=8,
            num_layers=1,
            num_targets=CLASSES,
            norm_mlp="LayerNorm",
            scaling=None,
        ),
    ),
    "PatchTST": Public(
        "transformers",
        "series",
        lambda: _hf(
            "PatchTST",
            "past_values",
            lambda x: x.mT,
            kind="Classification",
            context_length=16,
            patch_length=4,
            patch_stride=4,
            num_input_channels=3,
            d_model=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            ffn_dim=16,
            num_targets=CLASSES,
            norm_type="layernorm",
            use_cls_token=True,
            scaling=None,
        ),
    ),
    "AST": Public(
        "transformers",
        "series",
        lambda: _hf(
            "AST",
            "input_values",
            lambda x: x.mT,
            kind="AudioClassification",
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            patch_size=2,
            frequency_stride=1,
            time_stride=2,
            max_length=16,
            num_mel_bins=3,
        ),
    ),
    "Transformer": Public(
        "torch",
        "series",
        lambda: nn.Sequential(
            Transposed(),
            nn.Linear(3, 16),
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), 1),
            nn.Flatten(),
            nn.Linear(256, CLASSES),
        ),
    ),
    # images
    "ViT (timm)": Public("timm", "images", _vit),
    "ViT, stochastic depth": Public(
        "timm", "images", lambda: _vit(drop_path_rate=0.2, qkv_bias=True, attn_drop_rate=0.1, proj_drop_rate=0.1)
    ),
    "ViT, frozen body": Public("timm", "images", lambda: _frozen(_vit(), "head")),
    "ViT (transformers)": Public(
        "transformers",
        "images",
        lambda: _hf(
            "ViT",
            "pixel_values",
            kind="ImageClassification",
            image_size=16,
            patch_size=4,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
        ),
    ),
    "DeiT": Public(
        "timm",
        "images",
        lambda: _timm("deit_tiny_distilled_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=1, num_heads=2),
    ),
    "BEiT": Public(
        "timm",
        "images",
        lambda: _timm("beit_base_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=1, num_heads=2),
    ),
    "CaiT": Public(
        "timm",
        "images",
        lambda: _timm(
            "cait_xxs24_224", img_size=16, patch_size=4, embed_dim=16, depth=1, depth_token_only=1, num_heads=2
        ),
    ),
    "Swin": Public(
        "torchvision",
        "images",
        lambda: _torchvision(
            lambda m: m.swin_transformer.SwinTransformer([2, 2], 8, [1], [2], [2, 2], num_classes=CLASSES)
        ),
    ),
    "MLP-Mixer": Public(
        "timm", "images", lambda: _timm("mixer_s16_224", img_size=16, patch_size=4, embed_dim=16, num_blocks=1)
    ),
    "gMLP": Public(
        "timm", "images", lambda: _timm("gmlp_ti16_224", img_size=16, patch_size=4, embed_dim=16, num_blocks=1)
    ),
    "ResMLP": Public(
        "timm", "images", lambda: _timm("resmlp_12_224", img_size=16, patch_size=4, embed_dim=16, num_blocks=1)
    ),
    "PoolFormer": Public(
        "timm", "images", lambda: _timm("poolformer_s12", layers=(1, 1), embed_dims=(8, 16), downsamples=(False, True))
    ),
    "ConvMixer": Public(
        "timm", "images", lambda: _timm("convmixer_768_32", norm=True, dim=16, depth=1, patch_size=4, kernel_size=3)
    ),
    "ConvNeXt": Public(
        "torchvision",
        "images",
        lambda: import_torchvision().models.ConvNeXt(
            [
                import_torchvision().models.convnext.CNBlockConfig(8, 16, 1),
                import_torchvision().models.convnext.CNBlockConfig(16, None, 1),
            ],
            0.1,
            num_classes=CLASSES,
        ),
    ),
    "ResNet": Public(
        "torchvision",
        "images",
        lambda: _torchvision(
            lambda m: m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=64)
        ),
    ),
    "SqueezeNet": Public(
        "torchvision",
        "images",
        lambda: nn.Sequential(
            nn.Upsample(scale_factor=2), import_torchvision().models.squeezenet1_1(num_classes=CLASSES)
        ),
    ),
    "MobileNetV2": Public(
        "torchvision",
        "images",
        lambda: _torchvision(lambda m: m.MobileNetV2(CLASSES, 0.25, [[1, 8, 1, 1], [2, 8, 1, 2]])),
    ),
    "DenseNet": Public(
        "torchvision", "images", lambda: _torchvision(lambda m: m.DenseNet(4, (1, 1), 8, num_classes=CLASSES))
    ),
    "ShuffleNetV2": Public(
        "torchvision", "images", lambda: _torchvision(lambda m: m.ShuffleNetV2([1, 1, 1], [8, 16, 16, 16, 32], CLASSES))
    ),
    # tokens
    "BERT": Public("transformers", "tokens", lambda: _hf("Bert", **_TEXT, **_PLACES)),
    "BERT, frozen body": Public(
        "transformers", "tokens", lambda: _frozen(_hf("Bert", **_TEXT, **_PLACES), "inner.classifier")
    ),
    "DistilBERT": Public(
        "transformers",
        "tokens",
        lambda: _hf(
            "DistilBert", vocab_size=TOKENS, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=20
        ),
    ),
    "RoBERTa": Public("transformers", "tokens", lambda: _hf("Roberta", **_TEXT, **_PLACES)),
    "ALBERT": Public("transformers", "tokens", lambda: _hf("Albert", embedding_size=8, **_TEXT, **_PLACES)),
    "ELECTRA": Public("transformers", "tokens", lambda: _hf("Electra", embedding_size=8, **_TEXT, **_PLACES)),
    "FNet": Public(
        "transformers", "tokens", lambda: _hf("FNet", **{k: v for k, v in _TEXT.items() if "heads" not in k}, **_PLACES)
    ),
    "GPT-2": Public(
        "transformers",
        "tokens",
        lambda: _hf("GPT2", vocab_size=TOKENS, n_positions=20, n_embd=16, n_layer=1, n_head=2, pad_token_id=None),
    ),
    "DeBERTa": Public("transformers", "tokens", lambda: _hf("Deberta", **_TEXT, **_PLACES)),
    "MPNet": Public("transformers", "tokens", lambda: _hf("MPNet", **_TEXT, **_PLACES)),
}


class Transposed(nn.Module):
    """`[B, C, T]` as `[B, T, C]`, which networks of tokens take."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mT
