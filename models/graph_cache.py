"""Exported graphs on disk, under a key of everything that decides what is in them.

An export takes seconds; the same network exported by the same versions gives the same graphs. The key covers
the network's description, the source of this package's exporting code and the versions of PyTorch and ONNX,
so nothing ever needs to be invalidated by hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import onnx
import onnxruntime
import torch

from hushfleet.graphs import session
from hushfleet.model.objectives import CROSS_ENTROPY, Objective
from hushfleet.models import checks, losses, model, torch_gradient
from hushfleet.models.model import Model

DIGEST_BYTES = 32


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hushfleet" / "graphs"


def content_key(network: Model, objective: Objective = CROSS_ENTROPY) -> str:
    """Hex digest of whatever the exported graphs depend on."""
    digest = hashlib.sha256()
    for module in (torch, onnx, onnxruntime, numpy):
        _add(digest, f"{module.__name__} {module.__version__}")
    for name in ("tracing", "decompositions"):
        _add(digest, Path(__file__).with_name(f"{name}.py").read_text("utf-8"))  # slow to import
    code: Any = inspect.getmodule(network.function)
    for part in (checks, losses, model, torch_gradient, code):
        _add(digest, inspect.getsource(part))
    _add(digest, inspect.getsource(session))
    _add(digest, network.layout.digest)
    _add(digest, repr(objective))
    _add(digest, repr((network.name, network.input_shape, network.classes, network.dropout)))
    _add(digest, repr(getattr(network.function, "layers", None)))  # a function's text is in its module
    return digest.hexdigest()


def _add(digest: hashlib._Hash, text: str) -> None:
    data = text.encode()
    digest.update(len(data).to_bytes(8, "big") + data)


class GraphCache:
    """Files `<key>.<name>.onnx`, each led by the SHA-256 of its content: a torn file is no file."""

    def __init__(self, directory: Path | None, *, key: str) -> None:
        self.directory = directory or default_cache_dir()
        self.key = key

    def path(self, name: str) -> Path:
        return self.directory / f"{self.key[:32]}.{name}.onnx"

    def read(self, names: Sequence[str]) -> dict[str, bytes] | None:
        """All the named graphs, or None if one of them is missing or damaged."""
        graphs = {}
        for name in names:
            try:
                data = self.path(name).read_bytes()
            except OSError:
                return None
            digest, graph = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
            if hashlib.sha256(graph).digest() != digest:
                return None
            graphs[name] = graph
        return graphs

    def write(self, graphs: Mapping[str, bytes]) -> None:
        """Each file appears whole or not at all; where nothing can be written, exports take longer."""
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            for name, graph in graphs.items():
                handle, temporary = tempfile.mkstemp(dir=self.directory, prefix=".", suffix=".part")
                try:
                    with os.fdopen(handle, "wb") as file:
                        file.write(hashlib.sha256(graph).digest() + graph)
                    os.replace(temporary, self.path(name))
                except BaseException:
                    Path(temporary).unlink(missing_ok=True)
                    raise
