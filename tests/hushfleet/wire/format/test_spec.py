"""The task package: round trip, ranges, and bytes from anybody."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.errors import Malformed, TooLarge
from hushfleet.params import ParamLayout
from hushfleet.schema import to_plain
from hushfleet.wire.format.question import QuestionSpec
from hushfleet.wire.format.spec import (
    MAX_GRAPH_BYTES,
    MAX_SPEC_BYTES,
    BlobRef,
    DropoutSpec,
    ModelSpec,
    PrivacySpec,
    SecureSpec,
    TaskSpec,
    WireSpec,
)

SPEC = TaskSpec(
    task="digits-0a1b2c3d",
    rounds=20,
    method="fedglp-adp",
    method_config={"learning_rate": 1e-3, "glp": True, "nested": {"a": [1, 2.5, None]}},
    privacy=PrivacySpec(unit="device", accounting="strict", clip_norm=0.5, noise_multiplier=3.975, delta=0.1),
    wire=WireSpec(step=0.25),
    model=ModelSpec(
        name="digits-cnn",
        layout=ParamLayout(("fc.weight", "fc.bias"), ((2, 64), (2,))),
        input_shape=(1, 8, 8),
        class_names=("zero", "one"),
        mean=(0.25,),
        std=(0.5,),
        dropout=(DropoutSpec((128,), 0.5), DropoutSpec((), 0.0)),
        gradient=BlobRef.of(b"gradient"),
        inference=BlobRef.of(b"inference"),
    ),
    memory_mib=64,
)


def plain() -> dict[str, Any]:
    return msgpack.unpackb(SPEC.to_bytes())


def test_the_package_comes_back_as_it_was() -> None:
    again = TaskSpec.from_bytes(SPEC.to_bytes())
    assert again == SPEC
    assert again.to_bytes() == SPEC.to_bytes()
    assert again.model.layout.layers == SPEC.model.layout.layers


def test_a_blob_is_named_by_its_sha256() -> None:
    # SHA-256 of "abc", FIPS 180-2.
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert BlobRef.of(b"abc") == BlobRef(bytes.fromhex(expected), 3)
    with pytest.raises(ValueError, match="must be 32 bytes"):
        BlobRef(b"abc", 3)


def test_privacy_without_noise_needs_no_bound_but_noise_does() -> None:
    free = PrivacySpec(unit="device", accounting="strict", clip_norm=math.inf, noise_multiplier=0.0, delta=0.1)
    assert free.clip_norm == math.inf
    with pytest.raises(ValueError, match="clip_norm = inf: must be finite"):
        replace(free, noise_multiplier=1.0)


def test_values_at_the_edge_of_their_ranges_are_accepted() -> None:
    assert replace(SPEC, rounds=1_000_000, memory_mib=0).rounds == 1_000_000
    secure = replace(SPEC.privacy, accounting="secure", clip_norm=1.0, noise_split=1, secure=SecureSpec(16, 2, 2))
    summed = replace(SPEC, privacy=secure, wire=WireSpec(codec="masked"), rounds=10_000)
    assert summed.rounds == 10_000
    with pytest.raises(ValueError, match="rounds = 10001: must be at most 10000"):
        replace(summed, rounds=10_001)
    assert WireSpec(step=16.0, relative_step=1.0, chunk_bytes=1024).step == 16.0
    assert WireSpec(chunk_bytes=1 << 19).chunk_bytes == 1 << 19
    assert replace(SPEC.model, gradient=BlobRef(bytes(32), MAX_GRAPH_BYTES)).gradient.size == MAX_GRAPH_BYTES


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("version", 2, "version = 2: must be 1; update this device"),
        ("task", "Upper", "task = 'Upper'"),
        ("task", "a/b", "task = 'a/b'"),
        ("task", "a" * 97, "task ="),
        ("task", "a\n", "task ="),
        ("rounds", 0, "rounds = 0"),
        ("rounds", 1_000_001, "rounds = 1000001"),
        ("rounds", 1.0, "rounds = 1.0: expected an integer"),
        ("memory_mib", -1, "memory_mib = -1"),
        ("method_config", [], r"method_config = \[\]: expected a table"),
        ("privacy.unit", "sample", "unit = 'sample': must be one of 'device', 'record'"),
        ("privacy.accounting", "none", "accounting = 'none': must be one of"),
        ("privacy.clip_norm", 0, "clip_norm = 0: must be positive"),
        ("privacy.clip_norm", math.inf, "clip_norm = inf"),
        ("privacy.clip_norm", math.nan, "clip_norm = nan: must be positive"),
        ("privacy.noise_multiplier", -0.5, "noise_multiplier = -0.5"),
        ("privacy.noise_multiplier", math.inf, "noise_multiplier = inf"),
        ("privacy.delta", 0, "delta = 0: must be between 0 and 1"),
        ("privacy.delta", 1, "delta = 1:"),
        ("wire.codec", "zip", "codec = 'zip': must be one of"),
        ("wire.step", 0, "wire.step = 0: must be in"),
        ("wire.step", 16.5, "step = 16.5"),
        ("wire.relative_step", 1.5, "relative_step = 1.5"),
        ("wire.chunk_bytes", 1023, "chunk_bytes = 1023"),
        ("wire.chunk_bytes", (1 << 19) + 1, "chunk_bytes ="),
        ("model.input_shape", [8, 8], "input_shape = .*a list of length 3, got 2"),
        ("model.input_shape", [1, 8, 0], r"input_shape\[2\] = 0"),
        ("model.input_shape", [1, 4097, 8], r"input_shape\[1\] = 4097"),
        ("model.input_shape", [1, 8, (1 << 20) + 1], r"input_shape\[2\] = 1048577"),
        ("model.input_shape", [3, 8, 8], "mean, std = 1: must be 3 values"),
        ("model.class_names", ["one"], "class_names = .*at least two classes"),
        ("model.mean", [], "mean, std = 0"),
        ("model.mean", [math.inf], r"mean\[0\] = inf: must be a finite"),
        ("model.std", [0.0], r"std\[0\] = 0.0: must be positive and finite"),
        ("model.std", [math.inf], r"std\[0\] = inf: must be positive and finite"),
        ("model.dropout", [{"shape": [3], "rate": 1}], "rate = 1: must be in"),
        ("model.dropout", [{"shape": [0], "rate": 0.5}], r"shape\[0\] = 0"),
        ("model.gradient", {"digest": bytes(31), "size": 5}, "digest ="),
        ("model.gradient", {"digest": bytes(32), "size": 0}, "size = 0"),
        ("model.gradient", {"digest": bytes(32), "size": MAX_GRAPH_BYTES + 1}, "graph size ="),
        ("model.layout", [["fc.weight", [1 << 29]]], "layout"),
    ],
)
def test_values_out_of_range_are_malformed_and_named(path: str, value: object, said: str) -> None:
    data = plain()
    *tables, last = path.split(".")
    table = data
    for name in tables:
        table = table[name]
    table[last] = value
    with pytest.raises(Malformed, match=said):
        TaskSpec.from_bytes(msgpack.packb(data))


def test_packages_above_the_cap_are_refused_unread() -> None:
    with pytest.raises(TooLarge, match=f"{MAX_SPEC_BYTES + 1} bytes, above the cap"):
        TaskSpec.from_bytes(b"\xc1" * (MAX_SPEC_BYTES + 1))
    with pytest.raises(Malformed, match="not msgpack"):
        TaskSpec.from_bytes(b"\xc1" * MAX_SPEC_BYTES)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xdf\xff\xff\xff\xff",  # a map that announces 2^32 - 1 entries
        b"\xc6\xff\xff\xff\xff",  # bytes of 4 GiB
        b"\x91" * 100_000,  # a list in a list in a list ...
        b"\x81\x90\x00",  # a map whose key is a list
        b"\x81\x01\x00",  # a map whose key is a number
        b"\x81\xa1\xff\x00",  # a key that is not UTF-8
        b"\xd4\x05\x00",  # an extension type
        SPEC.to_bytes()[:-1],
        SPEC.to_bytes() + b"\x00",
    ],
    ids=["empty", "map-bomb", "bin-bomb", "deep", "list-key", "int-key", "not-utf8", "ext", "short", "trailing"],
)
def test_bytes_that_are_no_package_are_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        TaskSpec.from_bytes(data)


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        TaskSpec.from_bytes(data)


@given(edits=st.lists(st.tuples(st.integers(0, len(SPEC.to_bytes()) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=500)
def test_mutated_packages_are_malformed_or_valid(edits: list[tuple[int, int]]) -> None:
    data = bytearray(SPEC.to_bytes())
    for place, byte in edits:
        data[place] = byte
    try:
        spec = TaskSpec.from_bytes(bytes(data))
    except Malformed:
        return
    assert TaskSpec.from_bytes(spec.to_bytes()) == spec


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3)


@given(data=st.data(), value=SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=2), SCALARS))
@settings(max_examples=500)
def test_a_wrong_value_anywhere_is_malformed_or_valid(data: st.DataObject, value: object) -> None:
    """One place of a valid package, at any depth, gets a random value."""
    tree = copy.deepcopy(plain())
    node: Any = tree
    while True:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = data.draw(st.sampled_from(keys))
        inner = node[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            node[key] = value
            break
        node = inner
    try:
        spec = TaskSpec.from_bytes(msgpack.packb(tree))
    except Malformed:
        return
    assert TaskSpec.from_bytes(spec.to_bytes()).to_bytes() == spec.to_bytes()


def test_rounds_that_ask_are_counted_apart_from_those_of_training() -> None:
    for training in range(1, 12):
        for every in range(1, training + 1):
            rounds = training + math.ceil(training / every)
            spec = replace(SPEC, rounds=rounds, question=QuestionSpec("evaluation", every + 1, 8.0, held_out=0.2))
            trains = [round for round in range(1, rounds + 1) if not spec.asks(round)]
            assert [spec.training_number(round) for round in trains] == list(range(1, training + 1))
            assert (spec.training_rounds, spec.last_training_round) == (training, trains[-1])
            assert spec.asks(rounds)
    assert TaskSpec.from_bytes(spec.to_bytes()) == spec
    statistic = replace(SPEC, rounds=1, question=QuestionSpec("counts", 1, 8.0, most=40))
    assert (statistic.training_rounds, statistic.last_training_round, statistic.asks(1)) == (0, 0, True)
    assert statistic.local_only().question is None
    for question in (QuestionSpec("counts", 2, 8.0), QuestionSpec("evaluation", 1, 8.0)):
        with pytest.raises(Malformed, match="question"):
            TaskSpec.from_bytes(packed(rounds=question.every, question=question))


def packed(**changes: Any) -> bytes:
    """The bytes of a package that no honest aggregator makes."""
    plain = msgpack.unpackb(SPEC.to_bytes())
    return msgpack.packb({**plain, **{name: to_plain(value) for name, value in changes.items()}})
