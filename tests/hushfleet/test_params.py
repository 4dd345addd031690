"""Layouts of the flat vector against slow slicing, and against what the network may send."""

from __future__ import annotations

import math

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.errors import Malformed
from hushfleet.params import MAX_PARAMS, MAX_TENSORS, ParamLayout

LAYOUT = ParamLayout(
    ("conv.weight", "conv.bias", "scale", "block.fc.weight"), ((2, 1, 3), (2,), (), (4, 2))
)  # 6 + 2 + 1 + 8

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> ParamLayout:
    names, shapes = [], []
    for layer in range(draw(st.integers(1, 5))):
        for tensor in range(draw(st.integers(1, 3))):
            names.append(f"layer{layer}.t{tensor}")
            shapes.append(draw(SHAPES))
    return ParamLayout(tuple(names), tuple(shapes))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 62) | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def test_layers_are_modules_and_cover_the_vector() -> None:
    assert LAYOUT.size == 17
    assert LAYOUT.sizes == (6, 2, 1, 8)
    assert [tuple(span) for span in LAYOUT.layers] == [("conv", 0, 8), ("scale", 8, 9), ("block.fc", 9, 17)]
    assert [span.size for span in LAYOUT.layers] == [8, 1, 8]
    assert LAYOUT.slices["conv.bias"] == slice(6, 8)


@given(layout=layouts(), changed=st.lists(st.integers(0, 999), max_size=3))
def test_layers_are_alike_up_to_the_first_that_differs(layout: ParamLayout, changed: list[int]) -> None:
    vectors = [np.zeros(layout.size, np.float32) for _ in range(1 + len(changed))]
    for vector, entry in zip(vectors[1:], changed, strict=True):
        vector[entry % layout.size] = 1
    expected = 0
    for layer in layout.layers:
        if any(vector[entry] for vector in vectors for entry in range(layer.start, layer.stop)):
            break
        expected += 1
    assert layout.layers_alike(vectors) == expected


@given(layout=layouts(), lead=st.lists(st.integers(1, 3), max_size=2))
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_unflatten_gives_what_slow_slicing_gives(framework: str, layout: ParamLayout, lead: list[int]) -> None:
    values = np.arange(math.prod(lead) * layout.size, dtype=np.float32).reshape(*lead, layout.size)
    vector = values.copy() if framework == "numpy" else torch.from_numpy(values.copy())
    tensors = layout.unflatten(vector)
    assert tuple(tensors) == layout.names
    for row in np.ndindex(*lead):
        entries = iter(values[row].tolist())
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            tensor = np.asarray(tensors[name])[row]
            assert tensor.shape == shape
            assert [float(tensor[place]) for place in np.ndindex(*shape)] == [
                next(entries) for _ in range(math.prod(shape))
            ]
        assert next(entries, None) is None


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_unflattened_tensors_are_views(make) -> None:
    vector = make(17)
    LAYOUT.unflatten(vector)["conv.bias"][:] = 5
    assert np.flatnonzero(np.asarray(vector)).tolist() == [6, 7]


@pytest.mark.parametrize(
    ("names", "shapes", "said"),
    [
        ((), (), "at least one"),
        (("a", "b"), ((1,),), "one shape for each"),
        (("a", "a"), ((1,), (2,)), "repeat"),
        (("a.w", "b.w", "a.b"), ((1,), (1,), (1,)), "adjacent"),
    ],
)
def test_impossible_layouts_are_refused(names: tuple, shapes: tuple, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ParamLayout(names, shapes)


@given(layouts())
def test_the_wire_form_comes_back(layout: ParamLayout) -> None:
    sent = msgpack.unpackb(msgpack.packb(layout.to_wire()))
    again = ParamLayout.from_wire(sent)
    assert again == layout
    assert again.digest == layout.digest


def test_the_digest_tells_layouts_apart() -> None:
    turned = ParamLayout(LAYOUT.names, ((1, 2, 3), *LAYOUT.shapes[1:]))
    renamed = ParamLayout(("conv.kernel", *LAYOUT.names[1:]), LAYOUT.shapes)
    assert len({LAYOUT.digest, turned.digest, renamed.digest}) == 3


def test_layouts_at_the_caps_are_accepted() -> None:
    assert ParamLayout.from_wire([["a", [MAX_PARAMS]]]).size == MAX_PARAMS
    assert len(ParamLayout.from_wire([[f"t{i}", [1]] for i in range(MAX_TENSORS)]).names) == MAX_TENSORS
    assert ParamLayout.from_wire([["a", [1] * 8]]).shapes == ((1,) * 8,)


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        "ab",
        [["a"]],
        [["a", [1], 2]],
        [["a", [0]]],
        [["a", [-1]]],
        [["a", [1.0]]],
        [["a", [True]]],
        [["a", ["1"]]],
        [["a", 3]],
        [["a", "12"]],
        [["a", ""]],
        [["a", b"\x02\x03"]],
        [[b"a", [1]]],
        [["a", [1] * 9]],
        [["a", [MAX_PARAMS + 1]]],
        [["a", [1 << 20, 1 << 20, 1 << 20]]],
        [["a", [1 << 27]], ["b", [1 << 27]], ["c", [1]]],
        [["a", [1]], ["a", [1]]],
        [["a.w", [1]], ["b.w", [1]], ["a.b", [1]]],
        [[f"t{i}", [1]] for i in range(MAX_TENSORS + 1)],
    ],
    ids=lambda data: repr(data)[:40],
)
def test_malformed_layouts_are_refused(data: object) -> None:
    with pytest.raises(Malformed):
        ParamLayout.from_wire(data)


@given(PLAIN | st.lists(st.tuples(st.text(max_size=3), PLAIN).map(list), max_size=4))
@settings(max_examples=300)
def test_random_data_is_a_layout_or_malformed(data: object) -> None:
    try:
        layout = ParamLayout.from_wire(data)
    except Malformed:
        return
    assert layout.to_wire() == data
