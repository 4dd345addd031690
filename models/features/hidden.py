"""What the last layer of a network is given, as features: the other layers are fixed, and nobody sends them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy
import torch
from torch import Tensor

from hushfleet.config.spec import MAX_GRAPH_BYTES
from hushfleet.errors import BadInput
from hushfleet.model.params import ParamLayout
from hushfleet.models.export import bake, content_key
from hushfleet.models.features import synthetic
from hushfleet.models.features.graph import Graph
from hushfleet.models.model import Model

_MOST = 512
_PUBLIC_IMAGES = 3000


@dataclass(frozen=True, eq=False)
class Hidden:
    """All but the last layer of `model`, on images that are normalised as the network's are.

    :param params: float32 `[d]`, of the whole network.
    :param mean: per channel, subtracted from public images' pixels in [0, 1].
    :param std: per channel, divided by afterwards.
    """

    model: Model
    params: np.ndarray = field(repr=False)
    mean: Sequence[float]
    std: Sequence[float]

    def __post_init__(self) -> None:
        """Raises `BadInput` for a network that has no such layer, or is too large for boards."""
        if self.model.hidden is None:
            raise BadInput(f"model.name = {self.model.name!r} has no fixed part: leave out model.share")
        if self._body.layout.size * 4 > MAX_GRAPH_BYTES:
            raise BadInput(
                f"model.name = {self.model.name!r}: its fixed layers have {self._body.layout.size * 4 >> 20} MiB, "
                f"and a graph at most {MAX_GRAPH_BYTES >> 20} MiB; take a smaller network"
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.model.input_shape

    @property
    def kept(self) -> int:
        last = self.model.layout.layers[-1].name
        inputs = self.model.layout.shapes[self.model.layout.names.index(f"{last}.weight")][1]
        return min(inputs, _MOST)

    @property
    def key(self) -> str:
        """Of all that the features depend on."""
        digest = hashlib.sha256(self.params.tobytes()).hexdigest()
        return f"{content_key(self.model)} {digest} {list(self.mean)} {list(self.std)}"

    def public_images(self) -> np.ndarray:
        """What to whiten by, float64 `[n, C, H, W]`."""
        mean, std = (np.reshape(each, (-1, 1, 1)) for each in (self.mean, self.std))
        images: np.ndarray = (synthetic.mixed(_PUBLIC_IMAGES, self.image_shape) - mean) / std
        return images

    def __call__(self, x: Tensor) -> Tensor:
        """`[n, C, H, W]` -> `[n, F]`, in the type of `x`."""
        tensors = {name: torch.from_numpy(each).to(x) for name, each in self._tensors.items()}
        return self._body.forward(tensors, x)

    def add(self, graph: Graph, x: str) -> str:
        """The same as ONNX nodes; the name of their result."""
        from hushfleet.models.tracing import export_inference  # takes seconds to import

        size = self._body.layout.size
        return graph.network(bake(export_inference(self._body), self._body.layout, self.params[:size]), x)

    @cached_property
    def _body(self) -> Model:
        """The network without its last layer; its "logits" are features."""
        model, layout = self.model, self.model.layout
        assert model.hidden is not None
        count = sum(name.rpartition(".")[0] != layout.layers[-1].name for name in layout.names)
        shorter = ParamLayout(layout.names[:count], layout.shapes[:count])
        return replace(model, layout=shorter, dropout=(), function=model.hidden, hidden=None)

    @cached_property
    def _tensors(self) -> dict[str, np.ndarray]:
        tensors: dict[str, np.ndarray] = self._body.layout.unflatten(self.params[: self._body.layout.size])
        return tensors


def read_weights(path: Path, layout: ParamLayout) -> np.ndarray:
    """float32 `[d]` of a safetensors file, as runs keep their global models. Raises `BadInput`.

    The last layer may be missing, or have another shape: it is not used.
    """
    try:
        tensors = safetensors.numpy.load(path.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise BadInput(f"model.weights = {str(path)!r} cannot be read: {error}") from error
    params = np.zeros(layout.size, np.float32)
    for name, view in layout.unflatten(params).items():
        if name.rpartition(".")[0] == layout.layers[-1].name:
            continue
        found = tensors.get(name)
        if found is None or found.shape != view.shape or found.dtype != np.float32 or not np.isfinite(found).all():
            raise BadInput(
                f"model.weights = {str(path)!r} does not fit: {name!r} must be finite float32 {list(view.shape)}"
            )
        view[...] = found
    return params
