"""What the encoders write, a reader that knows docs/wire.md alone reads with the same bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.methods.state import PublicState
from hushfleet.wire.format.chunks import parse_frame, split
from hushfleet.wire.format.difference import apply_difference, encode_difference
from hushfleet.wire.format.identity import Identity, verify
from hushfleet.wire.format.update import UpdateHeader
from hushfleet.wire.format.update_values import decode_update, encode_update
from support import independent_reader

DEVICE = Identity.from_bytes(bytes(range(32)))
SEEDS = st.integers(0, 1 << 32)
COUNTS = st.lists(st.integers(0, 400), min_size=1, max_size=6)
SPREADS = st.floats(-3, 5)  # ten to this, in steps: from blocks of zeros over every mode to many escapes


def random_values(seed: int, counts: list[int], spread: float) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(sum(counts)) * 10**spread).astype(np.float32)


def both_read(codec: str, values: np.ndarray, counts: list[int], *, seed: int, public: bytes = b"") -> None:
    generator, layers = np.random.default_rng(seed), len(counts)
    steps = 2.0 ** generator.uniform(-3, 3, layers) if codec in ("quantized", "one-bit") else ()
    noise, clip_norms, report = generator.uniform(0, 9, layers), (math.inf,) * layers, (0.5, -1.0)[: seed % 3]
    header = UpdateHeader(
        f"task-{seed}", seed % 1000, "pi-1", codec, sum(counts), steps, noise, clip_norms, bytes(16), 3, math.inf, 1.25,
        2, report,
    )  # fmt: skip
    data = encode_update(header, values, counts=counts, identity=DEVICE, public=public).data
    decoded, read = decode_update(data, public_key=DEVICE.public_key, counts=counts), independent_reader.update(data)
    assert independent_reader.values(read, counts).tobytes() == decoded.values.tobytes()
    assert read.fields.get("report", []) == list(header.report)
    assert read.public_state == public
    verify(DEVICE.public_key, read.signed, read.signature)


@pytest.mark.parametrize("codec", ["quantized", "one-bit", "float16", "float32"])
@given(SEEDS, COUNTS, SPREADS, st.binary(max_size=9))
def test_updates(codec: str, seed: int, counts: list[int], spread: float, public: bytes) -> None:
    values = np.clip(random_values(seed, counts, spread), -60_000, 60_000)  # for float16
    both_read(codec, values, counts, seed=seed, public=public)


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 200_001])
def test_updates_of_several_blocks(size: int) -> None:
    counts = [size // 3, 0, size - size // 3]
    both_read("quantized", random_values(size, counts, 0.5), counts, seed=size)


@given(SEEDS, COUNTS, SPREADS, st.lists(st.booleans(), min_size=6, max_size=6))
def test_differences(seed: int, counts: list[int], spread: float, changes: list[bool]) -> None:
    """Layers without a change among the others, the first and the last too."""
    base, moves = random_values(seed, counts, 0), random_values(seed + 1, counts, spread)
    target = base + moves * np.repeat(changes[: len(counts)], counts)
    steps = 2.0 ** np.random.default_rng(seed).uniform(-3, 3, len(counts))
    made = encode_difference(base, target.astype(np.float32), task="t", round=1, counts=counts, steps=steps)
    assert independent_reader.difference(made.data, base, counts).tobytes() == made.result.tobytes()
    assert apply_difference(made.data, base, task="t", counts=counts).tobytes() == made.result.tobytes()


def test_a_difference_of_several_blocks_leaves_out_a_layer_between() -> None:
    counts = [60_000, 70_000, 60_000]
    base, moves = random_values(1, counts, 0), random_values(2, counts, 0.5)
    moves[60_000:130_000] = 0
    made = encode_difference(base, base + moves, task="t", round=1, counts=counts, steps=[0.1, 0.2, 0.3])
    assert independent_reader.difference(made.data, base, counts).tobytes() == made.result.tobytes()


@given(st.binary(min_size=1, max_size=300), st.integers(1, 64))
def test_chunks(blob: bytes, chunk_bytes: int) -> None:
    for frame in split(blob, chunk_bytes):
        chunk, (digest, size, start, payload) = parse_frame(frame), independent_reader.chunk(frame)
        assert (digest, size, start) == (chunk.digest, len(blob), chunk.index * chunk_bytes)
        assert payload == bytes(chunk.payload) == blob[start : start + chunk_bytes]


@given(SEEDS, st.integers(0, 300), st.integers(0, 1 << 31))
def test_public_states(seed: int, size: int, participations: int) -> None:
    mask = np.random.default_rng(seed).random(size) < 0.3
    state = PublicState(mask, participations)
    read = independent_reader.public_state(state.to_bytes(), size)
    assert (read[0], read[1].tolist(), read[2]) == (participations, mask.tolist(), state.digest())
