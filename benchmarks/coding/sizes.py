"""Bits a parameter against the entropy, and bytes of whole updates against other ways to send them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.coding.alternatives import entropy_bytes, lossless_ways, qsgd
from benchmarks.coding.updates import Update
from hushfleet.aggregator.observe.metrics import eq20_bytes
from hushfleet.config.spec import WireSpec
from hushfleet.wire.format import codec
from hushfleet.wire.format.identity import Identity

STEPS = sorted({0.25, 0.5, 1.0, 2.0, WireSpec().step})
RELATIVE_STEPS = sorted({0.01, 0.05, 0.25, WireSpec().relative_step})
IDENTITY = Identity.from_bytes(bytes(32))


def bits_against_entropy(update: Update) -> Iterator[dict[str, Any]]:
    """The coded values alone, without header and signature, at each step."""
    steps = STEPS if update.noised else RELATIVE_STEPS
    for step in steps:
        header = update.header_for(_stepped(update, step))
        key, sent = header.dither_key, np.empty_like(update.values)
        coded = codec.encode_values(
            update.values, counts=update.counts, steps=header.steps, dither_key=key, sent=sent
        )
        levels = _levels(sent, header.steps, update.counts, key)
        limit = entropy_bytes(levels, update.counts)
        yield {
            "step": step,
            "bits": 8 * len(coded) / update.values.size,
            "entropy_bits": 8 * limit / update.values.size,
            "above_entropy": len(coded) / limit - 1,
        }


def payloads(update: Update, *, json: bool = True) -> dict[str, Any]:
    """Bytes of one whole update by each codec and each other way; lossy ones with what they add to the variance."""
    references = {
        "Eq. (20)": eq20_bytes([update.values.size], update.size),
        "float32, all parameters": 4 * update.size,
    }
    rows = {name: {"bytes": size} for name, size in references.items()}
    for name, wire in _ours(update):
        encoded = update.encoded(wire, IDENTITY)
        rows[name] = {"bytes": len(encoded.data), "added_variance": _added(update, encoded.sent)}
    for name, way in lossless_ways().items():
        if name == "JSON" and not json:
            continue
        rows[name] = {"bytes": None if way.encode is None else len(way.encode(update.values))}
    other = qsgd(update.values, np.random.default_rng(0))
    added = _added(update, other.values)
    rows["QSGD-8, fixed length"] = {"bytes": other.fixed_bytes, "added_variance": added}
    rows["QSGD-8, Elias code"] = {"bytes": other.elias_bytes, "added_variance": added}
    for row in rows.values():
        row["times_below_eq20"] = references["Eq. (20)"] / row["bytes"] if row["bytes"] else None
    return rows


def _ours(update: Update) -> Iterator[tuple[str, WireSpec]]:
    yield "ours, float32", WireSpec(codec="float32")
    yield "ours, float16", WireSpec(codec="float16")
    for step in STEPS if update.noised else RELATIVE_STEPS:
        yield ours_at(step), _stepped(update, step)
    if update.noised:
        yield "ours, one-bit", WireSpec(codec="one-bit")


def ours_at(step: float) -> str:
    """The name of the row."""
    return f"ours, step {step:g}"


def _stepped(update: Update, step: float) -> WireSpec:
    return WireSpec(step=step) if update.noised else WireSpec(relative_step=step)


def _added(update: Update, sent: np.ndarray) -> float | None:
    """Mean squared error in units of the noise's variance, or of the mean square where there is no noise."""
    error = np.square((sent - update.values).astype(np.float64))
    of = update.header.noise_stds if update.noised else update.rms
    scale = np.repeat(np.square(of), update.counts)
    return float((error[scale > 0] / scale[scale > 0]).mean())


def _levels(sent: np.ndarray, steps: Sequence[float], counts: Sequence[int], key: bytes) -> np.ndarray:
    """Whole numbers `[k]`, back from x' = (q - u) * step."""
    levels = sent / np.repeat(np.asarray(steps, np.float32), counts).astype(np.float64)
    return np.rint(levels + codec.dither(key, sent.size)).astype(np.int64)
