"""How quick coding and decoding are on one core, and how much memory they take beside the values."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.coding.alternatives import lossless_ways
from benchmarks.coding.sizes import IDENTITY, STEPS, ours_at
from benchmarks.coding.updates import Update
from benchmarks.machine import quickest_s
from hushfleet.config.spec import WireSpec
from hushfleet.wire.format.update import decode_update

SLOW = ("JSON",)
"""Ways of which one turn is enough to see that they are slow."""


class Case(NamedTuple):
    """:param encode: gives the bytes; :param decode: is given them."""

    name: str
    encode: Callable[[], bytes]
    decode: Callable[[bytes], object]


def speeds(update: Update, *, turns: int) -> list[dict[str, Any]]:
    """Of each codec and each other way, in turns; whole updates of ours, with header, SHA-256 and signature."""
    cases = [*_ours(update), *_others(update.values)]
    best = {case.name: [np.inf, np.inf] for case in cases}
    coded = {case.name: case.encode() for case in cases}
    for turn in range(turns):
        for case in cases:
            if turn and case.name in SLOW:
                continue
            data = coded[case.name]
            for side, work in enumerate((case.encode, lambda case=case, data=data: case.decode(data))):
                best[case.name][side] = min(best[case.name][side], quickest_s(work, turns=1))
    size_mb = 1e-6 * update.values.nbytes
    return [
        {
            "name": case.name,
            "encode_mb_s": size_mb / best[case.name][0],
            "decode_mb_s": size_mb / best[case.name][1],
            "encode_extra_memory": _extra_memory(case.encode, update.values.nbytes),
            "decode_extra_memory": _extra_memory(
                lambda case=case: case.decode(coded[case.name]), update.values.nbytes
            ),
        }
        for case in cases
    ]


def _ours(update: Update) -> list[Case]:
    wires = [WireSpec(codec="float32"), WireSpec(codec="float16"), WireSpec(codec="one-bit")]
    names = [f"ours, {wire.codec}" for wire in wires]
    wires += [WireSpec(step=step) for step in STEPS]
    names += [ours_at(step) for step in STEPS]

    def decode(data: bytes) -> object:
        return decode_update(data, public_key=IDENTITY.public_key, counts=update.counts)

    return [
        Case(name, lambda wire=wire: update.encoded(wire, IDENTITY).data, decode)
        for name, wire in zip(names, wires, strict=True)
    ]


def _others(values: np.ndarray) -> list[Case]:
    copy = np.empty_like(values)

    def copied() -> bytes:
        np.copyto(copy, values)
        return b""

    others = [
        Case(name, lambda way=way: way.encode(values), way.decode)
        for name, way in lossless_ways().items()
        if way.encode is not None
    ]
    return [Case("memory copy", copied, lambda _: np.copyto(copy, values)), *others]


def _extra_memory(work: Callable[[], object], vector_bytes: int) -> float:
    """Peak of what Python and NumPy allocate during `work`, what it returns included, in vectors of float32."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / vector_bytes
    finally:
        tracemalloc.stop()
