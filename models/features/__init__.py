"""Makes fixed feature extractors without private data, as ONNX graphs for boards: images in, one vector each out."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hushfleet.at_need import at_need
from hushfleet.data.form import SAMPLE_RATE
from hushfleet.data.samples import Samples
from hushfleet.errors import BadInput, GraphRefused, format_value
from hushfleet.learning.graph_features import check_features
from hushfleet.learning.graph_session import open_session
from hushfleet.models.export import content_key
from hushfleet.models.features import backbone, classifier, pretrained, speech, whitening
from hushfleet.models.features.backbone import FeatureExtractor
from hushfleet.models.features.filters import Filters
from hushfleet.models.features.hidden import hidden_graph
from hushfleet.models.features.log_mel import LogMel
from hushfleet.models.features.public import PublicDirections
from hushfleet.models.features.scattering import Scattering
from hushfleet.models.features.speech import Speech
from hushfleet.models.features.unit_norm import UnitNorm
from hushfleet.models.features.whitening import Whitening
from hushfleet.models.model import Model
from hushfleet.models.onnx_nodes import Graph
from hushfleet.user_files import read_cached, user_cache_dir, write_cached
from hushfleet.wire.format.spec import LOG_MEL, MAX_SIDE, SOUND, UNIT_NORM, Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hushfleet.models import checks
else:  # with PyTorch, which takes seconds to import, and kept features need none
    torch = at_need("torch")
    checks = at_need("hushfleet.models.checks")

_PACKAGES = ("torch", "onnx", "onnxruntime", "numpy")
_CODE = "../onnx_nodes filters hidden log_mel pretrained scattering "
_CODE += "speech synthetic unit_norm whitening"

RawFeatures = Filters | Scattering | Speech
"""Features before whitening: the same function in PyTorch and as ONNX nodes, and the images to fit the whitening."""
_BATCH = 100


class Asked(NamedTuple):
    """The features that a task asks for; fields as the parameters of `get_features`."""

    name: str
    image_shape: Shape
    weights: Path | None
    standardised: bool
    cache_dir: Path | None
    sample_rate: int
    coarse: bool


@dataclass(frozen=True)
class Features:
    """A kind of fixed features.

    :param named: the form of its name in `model.features`, for people.
    :param has_name: whether a name is one of this kind.
    :param make: makes them.
    """

    named: str
    has_name: Callable[[str], bool]
    make: Callable[[Asked], FeatureExtractor]


def _whitened(name: str, kind: type[RawFeatures]) -> Features:
    def make(asked: Asked) -> FeatureExtractor:
        raw = kind(asked.image_shape)
        graph = _kept(lambda: make_graph(raw, fit(raw)), repr(raw), asked.cache_dir)
        return FeatureExtractor(asked.image_shape, graph, raw.kept + 1, raw.kept + 1, has_order=True)

    return Features(name, name.__eq__, make)


def _unit_norm(asked: Asked) -> FeatureExtractor:
    scaled = UnitNorm(asked.image_shape, asked.standardised)
    make = partial(_compared, asked.image_shape, scaled.count, scaled, scaled.add)
    graph = _kept(make, repr(scaled), asked.cache_dir)
    return FeatureExtractor(asked.image_shape, graph, scaled.count, scaled.count)


def _pretrained(asked: Asked) -> FeatureExtractor:
    network = pretrained.find(asked.name, asked.weights)
    key = f"{asked.name} {network.digest} {asked.image_shape}"
    exported = _kept(lambda: pretrained.export(network, asked.image_shape), key, asked.cache_dir)
    made = backbone.from_bytes(exported, asked.image_shape, what=f"model.features = {asked.name!r}")
    return replace(made, about=network.about)


def _speech(asked: Asked) -> FeatureExtractor:
    if asked.sample_rate != speech.SAMPLE_RATE:
        raise BadInput(
            f"model.features = {speech.NAME!r} takes sound at {speech.SAMPLE_RATE} Hz; data.sample_rate = "
            f"{asked.sample_rate}"
        )
    return replace(_whitened(speech.NAME, Speech).make(asked), about=speech.about())


def _log_mel(asked: Asked) -> FeatureExtractor:
    made, graph = LogMel.of(asked.image_shape, asked.sample_rate, coarse=asked.coarse), Graph()
    data = graph.to_bytes(graph.node("Flatten", made.add(graph, "x"), axis=1), asked.image_shape, made.count)
    return FeatureExtractor(asked.image_shape, data, made.count, made.count, shape=made.shape)


FEATURES = (
    _whitened("filters", Filters),
    _whitened("scattering", Scattering),
    Features(speech.NAME, speech.NAME.__eq__, _speech),
    Features(LOG_MEL, LOG_MEL.__eq__, _log_mel),
    Features(UNIT_NORM, UNIT_NORM.__eq__, _unit_norm),
    Features("torchvision:NAME", lambda name: name.startswith(pretrained.TORCHVISION), _pretrained),
    Features("timm:NAME", lambda name: name.startswith(pretrained.TIMM), _pretrained),
    Features(
        "sound:FILE.onnx",
        lambda name: name.startswith(SOUND) and name.endswith(".onnx"),
        lambda asked: backbone.of_sound(Path(asked.name.removeprefix(SOUND)), asked.image_shape, asked.sample_rate),
    ),
    Features(
        "an .onnx file",
        lambda name: name.endswith(".onnx"),
        lambda asked: backbone.from_file(Path(asked.name), asked.image_shape),
    ),
)
"""All kinds of features; to add one, write its value."""


def find_features(name: str) -> Features:
    """Returns the kind of features that has this name. Raises `BadInput` if there is none."""
    for kind in FEATURES:
        if kind.has_name(name):
            return kind
    known = ", ".join(kind.named for kind in FEATURES[:-1])
    raise BadInput(f"model.features = {format_value(name)}: must be one of {known}, or {FEATURES[-1].named}")


def get_features(
    name: str,
    image_shape: Shape,
    *,
    directions: int | None = None,
    public: Samples | None = None,
    weights: Path | None = None,
    standardised: bool = False,
    cache_dir: Path | None = None,
    sample_rate: int = SAMPLE_RATE,
    coarse: bool = False,
) -> FeatureExtractor:
    """Returns the extractor of that name, of one of the kinds in `FEATURES`.

    Whitening takes half a minute, and an export some seconds, so what needs them is made once and cached.

    :param directions: how many leading principal components a shared head takes, scaled to norm 1 by
        themselves; None, or the number of all of them: all features.
    :param public: samples that determine these directions and the features' mean, in place of the features' own order.
    :param weights: the file of a package's network; None: the package's own download folder.
    :param standardised: for `unit-norm`: whether the task's mean and deviation scale the values.
    :param sample_rate: Hz, of sound.
    :param coarse: as in `LogMel.of`.
    :param cache_dir: default `$XDG_CACHE_HOME/hushfleet/graphs`, or `~/.cache/hushfleet/graphs`.
    :raises BadInput: there is none of that name, or it does not take such images.
    :raises GraphRefused: a device would refuse the graph, or its results differ from PyTorch's.
    """
    made = find_features(name).make(Asked(name, image_shape, weights, standardised, cache_dir, sample_rate, coarse))
    if public is not None:
        if made.shape is not None:
            raise BadInput(f"model.features = {name!r} keeps the form of a sample: leave model.public out")
        found = PublicDirections.of(_values(made, public))
        white = found.projection(directions)
        with_public = _extended(made, partial(found.add, white=white), white.count, made.count + 1)
        return _checked(with_public, f"model.features = {name!r} with model.public")
    if directions is None or (made.has_order and directions >= made.count - 1):
        return _checked(made, f"model.features = {name!r}")
    if not made.has_order:
        cure = "leave model.directions out" if name.endswith(".onnx") else "take another network"
        raise BadInput(
            f"model.directions = {directions}: the {made.count - 1} outputs of {name!r} have no order. It would "
            f"come from a classifier, a linear layer (Gemm, or MatMul and Add) of at least {classifier.LEAST + 1} "
            f"classes, with nothing but a softmax or a sigmoid behind it; export the network with it, or {cure}"
        )
    leading = partial(whitening.add_leading, directions=directions)
    both = _extended(made, leading, directions + 1, made.count)
    return _checked(both, f"model.features = {name!r} with model.directions = {directions}")


def _extended(made: FeatureExtractor, add: Callable[[Graph, str], str], shared: int, own: int) -> FeatureExtractor:
    graph = whitening.extended(made.graph, add, made.image_shape, shared + own)
    return replace(made, graph=graph, count=shared + own, shared=shared)


def _values(made: FeatureExtractor, samples: Samples) -> np.ndarray:
    session = open_session(made.graph)
    parts = [samples.take(slice(first, first + _BATCH)).x for first in range(0, len(samples), _BATCH)]
    return np.concatenate([session.run(["features"], {"x": x})[0] for x in parts])


def hidden_features(model: Model, params: np.ndarray, *, cache_dir: Path | None = None) -> FeatureExtractor:
    """Returns the input of a network's last layer as features, for images with the network's normalisation.

    :param params: float32 `[d]`, of the whole network.

    Raises the same errors as `get_features`.
    """
    key = f"{content_key(model)} {hashlib.sha256(params.tobytes()).hexdigest()}"
    graph = _kept(lambda: hidden_graph(model, params), key, cache_dir)
    what = f"model.name = {model.name!r}"
    return _checked(backbone.from_bytes(graph, model.input_shape, what=what, projected=False), what)


def _checked(made: FeatureExtractor, what: str) -> FeatureExtractor:
    if made.shape is None and made.count > MAX_SIDE:
        raise BadInput(f"{what}: an image has {made.count} features, and devices take at most {MAX_SIDE}")
    check_features(made.graph, made.spec)
    return made


def _kept(make: Callable[[], bytes], key: str, cache_dir: Path | None) -> bytes:
    path = (cache_dir or user_cache_dir() / "graphs") / f"{_content_key(key)}.features.onnx"
    data = read_cached(path)
    if data is None:
        data = make()
        with contextlib.suppress(OSError):  # if nothing can be written, it is made again each time
            write_cached(path, data)
    return data


def fit(raw: RawFeatures) -> Whitening:
    """Fits the whitening of `raw` on its public images."""
    images = torch.from_numpy(raw.public_images())
    with torch.no_grad():
        values = [raw(images[first : first + _BATCH]).numpy() for first in range(0, len(images), _BATCH)]
    return Whitening.fit(np.concatenate(values), raw.kept)


def make_graph(raw: RawFeatures, white: Whitening) -> bytes:
    """Returns the ONNX file of both, compared with PyTorch on random images. Raises `GraphRefused`."""
    return _compared(
        raw.image_shape,
        white.count,
        lambda x: white(raw(x)),
        lambda graph, x: white.add(graph, raw.add(graph, x)),
    )


def _compared(
    shape: Shape, count: int, function: Callable[[Tensor], Tensor], add: Callable[[Graph, str], str]
) -> bytes:
    """Returns the ONNX file of the nodes that `add` adds, compared with `function`. Raises `GraphRefused`."""
    made = Graph()
    data = made.to_bytes(add(made, "x"), shape, count)
    session, rng = open_session(data), np.random.default_rng(0)
    for size in checks.CHECKED_BATCHES:
        x = rng.random((size, *shape), np.float32)
        with torch.no_grad():
            expected = function(torch.from_numpy(x)).numpy()
        error = checks.relative_error(session.run(["features"], {"x": x})[0], expected)
        if error > checks.MAX_RELATIVE_ERROR:
            raise GraphRefused(f"the features as ONNX differ from PyTorch's by {error:.1e}, on a batch of {size}")
    return data


def _content_key(key: str) -> str:
    """Returns the hex digest of everything that determines the graph: `key`, the code and the package versions."""
    parts = [f"{package} {version(package)}" for package in _PACKAGES]
    parts += [(Path(__file__).parent / f"{name}.py").read_text("utf-8") for name in _CODE.split()]
    return hashlib.sha256("\0".join([*parts, key]).encode()).hexdigest()[:32]
