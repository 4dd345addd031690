"""Stores the global model on disk: one safetensors file per round, which is complete or absent.

A file is written under a temporary name, synced and renamed, and the folder is synced, before the transaction that
names it. A crash in between leaves a file that nothing names; the repeated close replaces it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from hushfleet.atomic_file import write_whole
from hushfleet.errors import StoreError
from hushfleet.params import ParamLayout

KEPT = 3


class Checkpoints:
    """The checkpoints in a folder.

    :param vectors: names of the vectors that are published with the model: they have its layout and are behind it.
    :param about: metadata of the model in each file, in addition to its round and layout.
    :param durable: False leaves syncing to the operating system, for simulations only.
    """

    def __init__(
        self,
        folder: Path,
        layout: ParamLayout,
        *,
        vectors: Sequence[str] = (),
        about: Mapping[str, Any] | None = None,
        durable: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self.layout = layout
        self._prefixes = ["", *(f"{name}/" for name in vectors)]
        self._about = {"layout": layout.digest, **(about or {})}
        self.durable = durable

    def path(self, round: int) -> Path:
        """Returns the file of the global model after `round` rounds; 0 is the first model."""
        return self.folder / f"global-{round}.safetensors"

    def write(self, round: int, params: np.ndarray) -> None:
        """Writes `params` float32 `[(1 + vectors) d]`, and replaces a file that a crashed close may have left."""
        tensors = {name: np.asarray(view, order="C") for name, view in self._tensors(params)}  # keeps 0-d ones
        # one key only: safetensors writes several in an order that changes from run to run
        about = json.dumps({"round": round, **self._about})
        data = safetensors.numpy.save(tensors, {"hushfleet": about})
        write_whole(self.path(round), data, durable=self.durable)

    def read(self, round: int) -> np.ndarray:
        """Returns the global model float32 `[d]`, and the vectors behind it.

        Raises `StoreError` if the file is missing, damaged or of another model.
        """
        path = self.path(round)
        params = np.empty(self.layout.size * len(self._prefixes), np.float32)
        try:
            tensors = safetensors.numpy.load(path.read_bytes())
        except OSError as error:
            raise StoreError(f"the checkpoint {path} cannot be read: {error.strerror}") from error
        except safetensors.SafetensorError as error:
            raise StoreError(f"the checkpoint {path} is damaged: {error}") from error
        for name, view in self._tensors(params):
            tensor = tensors.get(name)
            if tensor is None or tensor.shape != view.shape or tensor.dtype != np.float32:
                raise StoreError(f"the checkpoint {path} is of another model: {name!r} does not fit")
            view[...] = tensor
        return params

    def _tensors(self, params: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Yields named views into `params`."""
        parts = zip(self._prefixes, params.reshape(len(self._prefixes), self.layout.size), strict=True)
        return ((prefix + name, view) for prefix, part in parts for name, view in self.layout.unflatten(part).items())

    def drop_old(self, newest: int) -> None:
        """Keeps the first model and the last `KEPT` models after round `newest` is closed."""
        if newest - KEPT > 0:
            self.path(newest - KEPT).unlink(missing_ok=True)
