"""What all tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.params import ParamLayout
from hushfleet.spec import BlobRef, ModelSpec, PrivacySpec, TaskSpec, WireSpec
from simulator.audit.device import Subject


@pytest.fixture(scope="session", autouse=True)
def _own_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keys that a test makes stay out of the user's configuration folder."""
    folder = tmp_path_factory.mktemp("config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def audited() -> Callable[..., Subject]:
    """A task package of a small network for `simulator.audit`, by method and what its privacy section has."""
    layout = ParamLayout(("body.weight", "body.bias", "head.weight", "head.bias"), ((9, 12), (9,), (10, 24), (10,)))
    graph = BlobRef(bytes(32), 1)
    model = ModelSpec("tiny", layout, (1, 6, 6), tuple("abcdefghij"), (0.5,), (0.25,), (), graph, graph)
    initial = np.random.default_rng(1).normal(0, 0.1, layout.size).astype(np.float32)

    def make(method: str = "dp-fedavg", *, seed: int = 0, codec: str = "quantized", **privacy: Any) -> Subject:
        usual = {"unit": "device", "accounting": "strict", "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 1e-3}
        settings = {"optimizer": "sgd", "learning_rate": 0.1, "batch_size": 8}
        protection = PrivacySpec(**{**usual, **privacy})
        spec = TaskSpec("audit-00000000", 10, method, settings, protection, WireSpec(codec), model, memory_mib=1)
        return Subject(spec, initial, 4, seed)

    return make
