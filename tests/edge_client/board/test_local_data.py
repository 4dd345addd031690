"""Sensor values on a board: .npz and CSV files that fit a task, and words for those that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hushfleet.config.spec import BlobRef, ModelSpec
from hushfleet.edge_client.board.config import DataSection
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.errors import BadInput
from hushfleet.model.params import ParamLayout

SERIES = np.arange(24, dtype=float).reshape(4, 2, 3)


@pytest.fixture
def model() -> ModelSpec:
    layout, graph = ParamLayout(("w",), ((2,),)), BlobRef(bytes(32), 1)
    return ModelSpec("own", layout, (2, 1, 3), ("sit", "walk"), (1.0, 2.0), (4.0, 5.0), (), graph, graph)


def samples(kind: Any, path: Any, model: ModelSpec) -> Any:
    return LocalData(DataSection(kind, str(path)), model).samples()


def test_arrays_and_csv_of_the_same_values_are_the_same_samples(tmp_path, model):
    np.savez(tmp_path / "d.npz", x=SERIES, y=[0, 1, 1, 0])
    np.savez(tmp_path / "named.npz", x=SERIES, y=["sit", "walk", "walk", "sit"])
    lines = [
        f"{label},{','.join(map(str, row))}"
        for label, row in zip(("sit", "walk", "walk", "sit"), SERIES.reshape(4, -1), strict=True)
    ]
    (tmp_path / "d.csv").write_text("\n".join(["label,a0,a1,a2,b0,b1,b2", *lines]))
    expected = (SERIES[:, :, None] - [[[1.0]], [[2.0]]]) / [[[4.0]], [[5.0]]]
    for kind, name in (("arrays", "d.npz"), ("arrays", "named.npz"), ("csv", "d.csv")):
        found = samples(kind, tmp_path / name, model)
        np.testing.assert_allclose(found.x, expected, rtol=1e-6)
        assert found.y.tolist() == [0, 1, 1, 0]


def test_a_vector_is_an_image_of_one_pixel(tmp_path, model):
    np.savez(tmp_path / "d.npz", x=SERIES[:, :, 0], y=[0, 1, 1, 0])
    assert samples("arrays", tmp_path / "d.npz", replace(model, input_shape=(2, 1, 1))).x.shape == (4, 2, 1, 1)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": SERIES}, "lacks the array 'y'; it needs 'x' and 'y'"),
        ({"x": SERIES[:, :1], "y": [0] * 4}, r"samples of \[1, 1, 3\], the task wants \[2, 1, 3\]"),
        ({"x": SERIES, "y": [0, 1, 2, 0]}, "labels 0 to 2; there are 0 to 1"),
        ({"x": SERIES, "y": ["run"] * 4}, "'run' of sample 0 is none of sit, walk"),
        ({"x": SERIES, "y": [0]}, r"shape \[1\]; it must be \[4\]"),
        ({"x": np.where(SERIES == 7, np.inf, SERIES), "y": [0] * 4}, "first of them number 1"),
        ({"x": SERIES[:0], "y": np.zeros(0, int)}, "holds no samples"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_in_words(tmp_path, model, arrays, said):
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(BadInput, match=said):
        samples("arrays", tmp_path / "d.npz", model)


def test_csv_that_does_not_fit_is_refused_in_words(tmp_path, model):
    (tmp_path / "d.csv").write_text("label,a,b\nsit,1,2\n")
    with pytest.raises(BadInput, match="2 columns of values, the task wants 6: 2 x 1 x 3"):
        samples("csv", tmp_path / "d.csv", model)
