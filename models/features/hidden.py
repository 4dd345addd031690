"""Exports a network without its last layer as an ONNX file: the other layers are fixed, and no device sends them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from hushfleet.errors import BadInput, GraphRefused
from hushfleet.learning.graph_session import open_session
from hushfleet.models.export import bake
from hushfleet.models.model import Model
from hushfleet.params import ParamLayout


def without_last(model: Model) -> Model:
    """Returns the network up to the input of its last layer, `[B, F]` in place of logits. Raises `BadInput`."""
    if model.hidden is None:
        raise BadInput(f"model.name = {model.name!r} has no layers below its last one: leave out model.share")
    layout = model.layout
    last = layout.layers[-1]
    count = sum(place.start < last.start for place in layout.slices.values())
    shorter = ParamLayout(layout.names[:count], layout.shapes[:count])
    return replace(model, layout=shorter, dropout=(), function=model.hidden, hidden=None)


def hidden_graph(model: Model, params: np.ndarray) -> bytes:
    """Returns the ONNX file, `x` float32 `[batch, C, H, W]` -> `logits` float32 `[batch, F]`, compared with PyTorch.

    :param params: float32 `[d]`, of the whole network.

    Raises `BadInput` for a network without other layers, and `GraphRefused` if the file's results differ.
    """
    import torch  # takes seconds, like the next ones

    from hushfleet.models.checks import CHECKED_BATCHES, MAX_RELATIVE_ERROR, random_batch, relative_error
    from hushfleet.models.tracing import export_inference

    body = without_last(model)
    own = params[: body.layout.size]
    data = bake(export_inference(body), body.layout, own)
    session, rng = open_session(data), np.random.default_rng(0)
    tensors = body.layout.unflatten(torch.from_numpy(own.copy()))
    for size in CHECKED_BATCHES:
        x, _, _ = random_batch(body, size, rng)
        with torch.no_grad():
            expected = body.forward(tensors, torch.from_numpy(x)).numpy()
        error = relative_error(session.run(["logits"], {"x": x})[0], expected)
        if error > MAX_RELATIVE_ERROR:
            raise GraphRefused(f"{model.name} without its last layer differs as ONNX by {error:.1e} from PyTorch")
    return data


def read_weights(path: Path, layout: ParamLayout) -> np.ndarray:
    """Reads float32 `[d]` from a safetensors file, the format of a run's global models. Raises `BadInput`.

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
