"""Loads networks that others have trained: of torchvision, or of timm, an extra. Weights are never downloaded here.

The person who agrees to the licence must download them. If weights are missing, the error says which file to put where.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from hushfleet.at_need import at_need
from hushfleet.data.torchvision_sets import import_torchvision
from hushfleet.errors import BadInput
from hushfleet.models.onnx_nodes import OPSET, without_traces

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:  # takes seconds to import, and kept features need none
    torch = at_need("torch")

TORCHVISION, TIMM = "torchvision:", "timm:"
_TORCHVISION_LICENCE = "torchvision's terms: the weights may have those of the data that they were trained on"


@dataclass(frozen=True, eq=False)
class Pretrained:
    """A network with its weights.

    :param mean: of each channel, for the normalisation of its input.
    :param std: of each channel, likewise.
    :param digest: SHA-256 of the file of weights, in hex.
    :param about: the licence and the size of the weights, for people.
    """

    name: str
    network: nn.Module
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digest: str
    about: str


def find(name: str, weights: Path | None) -> Pretrained:
    """Returns the network `torchvision:NAME` or `timm:NAME`. Raises `BadInput`.

    :param weights: the file of weights; None: the package's own download folder.
    """
    try:
        if name.startswith(TORCHVISION):
            return _of_torchvision(name.removeprefix(TORCHVISION), weights)
        return _of_timm(name.removeprefix(TIMM), weights)
    except ImportError as error:
        package = name.partition(":")[0]
        needed = "hushfleet[timm]" if package == "timm" else package
        raise BadInput(f"model.features = {name!r} needs {package} ({error}): pip install '{needed}'") from error


def _of_torchvision(name: str, weights: Path | None) -> Pretrained:
    models = import_torchvision().models
    if name not in models.list_models(module=models):
        raise BadInput(
            f"model.features = {TORCHVISION + name!r}: torchvision has no classifier of that name; one for boards is "
            "mobilenet_v3_small"
        )
    default = models.get_model_weights(name).DEFAULT
    cache = Path(torch.hub.get_dir()) / "checkpoints" / default.url.rpartition("/")[2]
    path = _there(TORCHVISION + name, weights, cache, f"{default.url} ({default.meta['_file_size']:.1f} MB)")
    network, norm = models.get_model(name), default.transforms()
    try:
        network.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    except Exception as error:  # of pickle, zipfile and PyTorch
        raise BadInput(f"{path} does not hold the weights of {TORCHVISION}{name}: {error}") from error
    return _pretrained(network, norm.mean, norm.std, path, TORCHVISION + name, _TORCHVISION_LICENCE)


def _of_timm(name: str, weights: Path | None) -> Pretrained:
    import_torchvision()  # timm imports it
    import timm
    from huggingface_hub import try_to_load_from_cache

    if not timm.is_model(name):
        close = ", ".join(timm.list_models(f"{name.partition('_')[0]}*")[:5])
        raise BadInput(
            f"model.features = {TIMM + name!r}: timm has no network of that name; it has {close or 'others'}"
        )
    known = timm.get_pretrained_cfg(name)
    if known is None or not known.hf_hub_id:
        raise BadInput(f"model.features = {TIMM + name!r}: timm has no weights of that network; choose another")
    file = known.hf_hub_filename or "model.safetensors"
    cached = try_to_load_from_cache(known.hf_hub_id, file)
    place = Path(cached) if isinstance(cached, str) else None
    path = _there(TIMM + name, weights, place, f"https://huggingface.co/{known.hf_hub_id}/resolve/main/{file}")
    try:
        network = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(path), "source": ""})
    except Exception as error:  # of safetensors, pickle, zipfile and PyTorch
        raise BadInput(f"{path} does not hold the weights of {TIMM}{name}: {error}") from error
    return _pretrained(network, known.mean, known.std, path, TIMM + name, known.license or "unknown, ask its author")


def _there(name: str, weights: Path | None, cached: Path | None, origin: str) -> Path:
    """Returns the file of weights. Raises `BadInput` that says which file to put where."""
    path = weights or cached
    if path is not None and path.is_file():
        return path
    if weights is not None:
        raise BadInput(f"model.weights = {str(weights)!r} is not a file; fetch {origin}")
    place = "" if cached is None else f"put it at {cached}, or "
    raise BadInput(
        f"model.features = {name!r}: its weights are not on this machine, and nothing is downloaded unasked. Fetch "
        f"{origin}, and {place}name the file: model.weights = {origin.partition(' ')[0].rpartition('/')[2]!r}"
    )


def _pretrained(
    network: nn.Module, mean: tuple[float, ...], std: tuple[float, ...], path: Path, name: str, licence: str
) -> Pretrained:
    count = sum(each.numel() for each in network.parameters())
    about = f"{name}: {count / 1e6:.1f} million weights, {path.stat().st_size / 1e6:.1f} MB; licence: {licence}"
    return Pretrained(name, network.eval(), mean, std, hashlib.sha256(path.read_bytes()).hexdigest(), about)


def export(given: Pretrained, image_shape: tuple[int, int, int]) -> bytes:
    """Returns the ONNX file, pixels in [0, 1] to logits, with an open batch size. Raises `BadInput`."""
    from hushfleet.models.tracing import quiet  # takes seconds to import

    class OnPixels(torch.nn.Module):
        """The network on pixels in [0, 1]."""

        mean: Tensor
        std: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.network = given.network
            self.register_buffer("mean", torch.tensor(given.mean)[:, None, None])
            self.register_buffer("std", torch.tensor(given.std)[:, None, None])

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.network((x - self.mean) / self.std)
            return logits

    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    try:
        with quiet(), torch.no_grad():
            exported = torch.onnx.export(
                OnPixels().eval(),
                (torch.rand(3, *image_shape),),
                dynamo=True,
                external_data=False,
                opset_version=OPSET,
                input_names=["x"],
                output_names=["logits"],
                dynamic_shapes=({0: batch},),
            )
    except Exception as error:  # from PyTorch's tracer, or because the network takes other images
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise BadInput(f"{given.name} cannot be exported for images of {image_shape}: {reason}") from error
    assert exported is not None  # not None with `dynamo=True` and without a file
    model: onnx.ModelProto = without_traces(exported.model_proto)
    return model.SerializeToString(deterministic=True)
