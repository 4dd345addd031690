"""The head that a device has chosen for itself, as it lies in the store. It never leaves it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hushfleet.config.schema import Checked
from hushfleet.config.spec import Digest, TaskId
from hushfleet.model.own_head import HeadChoice, OwnHead


@dataclass(frozen=True)
class KeptHead(Checked):
    """A linear model's own head.

    :param global_digest: SHA-256 of the global model that it was chosen with, as it travels.
    :param values: the flat vector, `d` little-endian float32 values.
    """

    task: TaskId
    global_digest: Digest
    choice: HeadChoice
    values: bytes

    @classmethod
    def of(cls, head: OwnHead, *, task: str, global_digest: bytes) -> KeptHead:
        return cls(task, global_digest, head.choice, head.params.astype("<f4", copy=False).tobytes())

    @property
    def params(self) -> np.ndarray:
        """float32 `[d]`."""
        return np.frombuffer(self.values, "<f4").astype(np.float32, copy=False)
