from __future__ import annotations

import math
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.errors import Malformed
from hushfleet.wire.format.codec import MIN_STEP, Coding
from hushfleet.wire.format.quantized import decode_values, dither, encode_values, max_coded_bytes
from hushfleet.wire.format.symbols import BLOCK, MAX_LEVEL

KEY = bytes(range(16))
ALPHABETS = {1: 255, 2: 16, 3: 6, 4: 4, 5: 3}


def deflated(plain: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return packer.compress(plain) + packer.flush()


def coded(
    mode: int, symbols: list[int], escapes: list[int] = (), *, count: int | None = None, packed: bytes | None = None
) -> bytes:
    """A block of coded values written without the module under test, from the specification."""
    planes = bytes(value >> shift & 255 for shift in (0, 8, 16) for value in escapes)
    packed = deflated(bytes(symbols) + planes) if packed is None else packed
    return struct.pack("<BII", mode, len(escapes) if count is None else count, len(packed)) + packed


def coded_levels(mode: int, levels: list[int]) -> bytes:
    """A block of these levels, one after the other in plain integers."""
    zigzag, alphabet = [2 * q if q >= 0 else -2 * q - 1 for q in levels], ALPHABETS[mode]
    symbols = [min(z, alphabet - 1) for z in zigzag]
    symbols += [0] * (-len(symbols) % mode)
    groups = [symbols[at : at + mode] for at in range(0, len(symbols), mode)]
    packed = [sum(z * alphabet**place for place, z in enumerate(group)) for group in groups]
    return coded(mode, packed, [z for z in zigzag if z >= alphabet - 1])


def slow_philox(key: int, counter: int) -> list[int]:
    """Philox4x64-10 of Salmon et al. 2011, in plain integers: four words for one counter."""
    mask = (1 << 64) - 1
    k0, k1 = key & mask, key >> 64
    x = [counter, 0, 0, 0]
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
        x = [(p1 >> 64) ^ x[1] ^ k0, p1 & mask, (p0 >> 64) ^ x[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return x


def test_dither_is_philox_as_the_specification_writes_it() -> None:
    words = [word for block in range(1, 5) for word in slow_philox(int.from_bytes(KEY, "little"), block)]
    parts = [word >> shift & 0xFFFF for word in words for shift in (0, 16, 32, 48)]
    expected = [(2 * part + 1 - 65536) / 131072 for part in parts]
    assert dither(KEY, 64).tolist() == expected
    assert dither(KEY, 61).tolist() == expected[:61]
    assert dither(KEY, 64).dtype == np.float32


def test_dither_is_uniform_and_symmetric() -> None:
    u = dither(bytes(16), 1 << 18).astype(np.float64)
    assert np.abs(u).max() < 0.5
    assert abs(u.mean()) < 4 / math.sqrt(12 * u.size)
    assert u.var() == pytest.approx(1 / 12, rel=0.01)


def slow_decoding(levels: list[int], steps: list[float]) -> np.ndarray:
    u = dither(KEY, len(levels))
    one = np.float32
    return np.array([one(one(one(q) - u[i]) * one(steps[i])) for i, q in enumerate(levels)], np.float32)


@pytest.mark.parametrize("mode", ALPHABETS)
@pytest.mark.parametrize("size", [5, 10, 11, 12, 13])
def test_all_modes_decode_as_the_specification_says(mode: int, size: int) -> None:
    levels = [0, -1, 1, -2, 2, 7, -8, 126, -127, 127, 128, -(2**20), MAX_LEVEL, -MAX_LEVEL][:size]
    counts, steps = [4, 0, size - 4], [0.1, 9.0, 3.0]
    values = decode_values(coded_levels(mode, levels), Coding(counts, steps, KEY))
    assert values.tobytes() == slow_decoding(levels, [0.1] * 4 + [3.0] * (size - 4)).tobytes()


def test_a_block_of_zeros_is_one_byte_and_what_is_zero_stays_zero_without_dither() -> None:
    x = np.zeros(BLOCK + 1000, np.float32)
    x[BLOCK + 10] = 3.2
    data = encode_values(x, Coding([x.size], [0.5], None))
    assert data[:1] == b"\0"
    assert 1 < len(data) < 60
    decoded = decode_values(data, Coding([x.size], [0.5], None))
    assert decoded.nonzero()[0].tolist() == [BLOCK + 10]
    assert decoded[BLOCK + 10] == 3.0
    dithered = decode_values(b"\0\0", Coding([x.size], [0.5], KEY))
    assert dithered.tobytes() == (-dither(KEY, x.size) * np.float32(0.5)).tobytes()


@pytest.mark.parametrize(("step", "mode"), [(0.05, 1), (1.0, 2), (2.5, 3), (8.0, 4)])
def test_the_smallest_mode_is_taken_and_changes_with_the_values(step: float, mode: int) -> None:
    rng = np.random.default_rng(8)
    x = np.concatenate([rng.standard_normal(BLOCK), 5 * rng.standard_normal(BLOCK)]).astype(np.float32)
    data = encode_values(x, Coding([x.size], [step], KEY))
    levels = np.rint(x / np.float32(step) + dither(KEY, x.size)).astype(int).tolist()
    sizes = [{m: len(coded_levels(m, part)) for m in ALPHABETS} for part in (levels[:BLOCK], levels[BLOCK:])]
    assert data[0] == mode == min(sizes[0], key=lambda m: sizes[0][m])
    (first,) = struct.unpack_from("<I", data, 5)
    assert data[9 + first] == min(sizes[1], key=lambda m: sizes[1][m])
    assert len(data) < 1.02 * sum(min(each.values()) for each in sizes)


def test_memory_beside_the_values_does_not_grow_with_them() -> None:
    x = np.random.default_rng(9).standard_normal(64 * BLOCK).astype(np.float32)
    out = np.empty_like(x)
    peaks = []
    for size in (8 * BLOCK, x.size):
        data = encode_values(x[:size], Coding([size], [1.0], KEY))
        for work in (
            lambda size=size: encode_values(x[:size], Coding([size], [1.0], KEY)),
            lambda size=size, data=data: decode_values(data, Coding([size], [1.0], KEY), out[:size]),
        ):
            tracemalloc.start()
            result = work()
            peaks.append(tracemalloc.get_traced_memory()[1] - (2 * len(result) if isinstance(result, bytes) else 0))
            tracemalloc.stop()
    assert max(peaks) < 24 * BLOCK


@given(
    st.lists(st.floats(-15625.0, 15625.0, width=32), max_size=300),
    st.integers(1, 4),
    st.sampled_from([2e-3, 0.25, 1.0, 7.5, 2.0**30]),
)
def test_decoded_values_are_within_half_a_step(values: list[float], layers: int, step: float) -> None:
    x = np.array(values, np.float32)
    counts = [x.size // layers] * (layers - 1)
    counts.append(x.size - sum(counts))
    steps = [step * (1 + layer) for layer in range(layers)]
    data = encode_values(x, Coding(counts, steps, KEY))
    assert len(data) <= max_coded_bytes(x.size)
    decoded = decode_values(data, Coding(counts, steps, KEY))
    assert decoded.dtype == np.float32
    # rounding of x/step + u in float32 adds up to a few units in the last place of the level
    slack = np.abs(x.astype(np.float64)) * 2.0**-21 + 1e-30
    assert (np.abs(decoded.astype(np.float64) - x) <= 0.5001 * np.repeat(steps, counts) + slack).all()


def test_the_error_is_uniform_and_independent_of_the_values() -> None:
    x = np.random.default_rng(3).standard_normal(200_000).astype(np.float32)
    data = encode_values(x, Coding([x.size], [1.0], KEY))
    error = decode_values(data, Coding([x.size], [1.0], KEY)).astype(np.float64) - x
    assert abs(error.mean()) < 4 * math.sqrt(1 / 12 / x.size)
    assert error.var() == pytest.approx(1 / 12, rel=0.02)
    assert abs(np.corrcoef(error, x)[0, 1]) < 4 / math.sqrt(x.size)


@pytest.mark.parametrize(("step", "bits"), [(0.25, 4.11), (0.5, 3.12), (1.0, 2.19), (2.0, 1.44), (4.0, 0.935)])
def test_bits_a_parameter_stay_near_the_entropy(step: float, bits: float) -> None:
    x = np.random.default_rng(4).standard_normal(400_000).astype(np.float32)
    data = encode_values(x, Coding([x.size], [step], KEY))
    assert 8 * len(data) / x.size < bits
    levels = np.rint(x / np.float32(step) + dither(KEY, x.size))
    shares = np.unique(levels, return_counts=True)[1] / x.size
    entropy = -(shares * np.log2(shares)).sum()
    assert 8 * len(data) / x.size < 1.015 * entropy


def test_the_worst_values_stay_below_the_bound() -> None:
    rng = np.random.default_rng(5)
    for size in (0, 1, 2, 1000, 70_001):
        x = rng.uniform(-MAX_LEVEL + 1, MAX_LEVEL - 1, size).astype(np.float32)
        data = encode_values(x, Coding([size], [1.0], KEY))
        assert len(data) <= max_coded_bytes(size)
        assert decode_values(data, Coding([size], [1.0], KEY)).shape == (size,)


def test_blocks_and_layers_do_not_change_the_result() -> None:
    x = np.random.default_rng(6).standard_normal(200_003).astype(np.float32)
    whole = encode_values(x, Coding([x.size], [0.5], KEY))
    parts = encode_values(x, Coding([1, 65_535, 2, 0, 134_465], [0.5] * 5, KEY))
    assert parts == whole


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_what_cannot_be_quantised_is_refused(bad: float) -> None:
    x = np.array([0.0, bad, 1.0], np.float32)
    with pytest.raises(Malformed, match="cannot be quantised"):
        encode_values(x, Coding([3], [1.0], KEY))


@pytest.mark.parametrize(
    ("counts", "steps", "key"),
    [
        ([2], [1.0], KEY),
        ([3, 0], [1.0], KEY),
        ([4, -1], [1.0, 1.0], KEY),
        ([3], [0.0], KEY),
        ([3], [-1.0], KEY),
        ([3], [math.nan], KEY),
        ([3], [math.inf], KEY),
        ([3], [MIN_STEP / 2], KEY),
        ([3], [1.0], KEY[1:]),
    ],
)
def test_counts_steps_and_key_must_fit(counts: list[int], steps: list[float], key: bytes) -> None:
    with pytest.raises(Malformed):
        encode_values(np.zeros(3, np.float32), Coding(counts, steps, key))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        coded(1, [1, 2, 3])[:4],
        coded(1, [1, 2, 3])[:-1],
        coded(1, [1, 2, 3]) + b"\0",
        coded(1, [1, 2, 3]) + coded(1, [1, 2, 3]),
        coded(0, [1, 2, 3]),
        coded(6, [1, 2, 3]),
        coded(1, [1, 2]),
        coded(1, [1, 2, 3, 4]),
        coded(1, [], packed=deflated(bytes(1 << 26))),
        coded(1, [254, 2, 3]),
        coded(1, [255, 2, 3]),
        coded(1, [255, 2, 3], [300]),
        coded(1, [1, 2, 3], [300]),
        coded(1, [254, 2, 3], [253]),
        coded(1, [254, 2, 3], [2 * MAX_LEVEL + 1]),
        coded(1, [1, 2, 3], count=0xFFFFFFFF),
        coded(2, [0x21, 0x13]),
        coded(2, [0x21, 0x0F]),
        coded(2, [0x21, 0x0F], [14]),
        coded(2, [0x21]),
        coded(3, [216]),
        coded(4, [0b01_00_00_00]),
        coded(1, [], packed=b"\xff" * 20),
        struct.pack("<BII", 1, 0, 0xFFFFFFFF) + deflated(bytes([1, 2, 3])),
    ],
    ids=range(25),
)
def test_coded_values_that_break_a_rule_are_malformed(data: bytes) -> None:
    assert decode_values(coded(1, [1, 2, 3]), Coding([3], [1.0], KEY)).shape == (3,)
    with pytest.raises(Malformed):
        decode_values(data, Coding([3], [1.0], KEY))
