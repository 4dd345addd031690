"""What devices of the fast engine carry: records that are whole or dropped, and arrays in two places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.results.columns import columns_of, rows_of
from hushfleet.durations import Period
from hushfleet.errors import StoreError
from hushfleet.privacy.charge import DEVICE_ADJACENCY, Charge
from hushfleet.simulator.cohort_store import ChargeKind, CohortStore, StateRow, StateSlots

CHARGES = [Charge("device", DEVICE_ADJACENCY, "gaussian", noise) for noise in (0.5, 1.0)]
ROUNDS = st.lists(st.dictionaries(st.integers(0, 5), st.integers(0, 1), max_size=6), max_size=8)


def row(round: int, kind: int, *, window: bool) -> StateRow:
    charge = ChargeKind(CHARGES[kind], Period(round, round + 1) if window else None)
    arrays = (("own", "<f4", (round,)),) if kind else ()
    return StateRow(charge, bytes([round]) * 32, round, round % 2, arrays, b"s" * kind, bool(kind))


@given(rounds=ROUNDS, window=st.booleans(), torn=st.integers(0, 40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_device_carries_what_its_rounds_have_left(
    tmp_path: Path, rounds: list[dict[int, int]], window: bool, torn: int
) -> None:
    path = tmp_path / "devices" / "cohort.bin"
    path.unlink(missing_ok=True)
    store = CohortStore.open(path, closed=0)
    for number, devices in enumerate(rounds, start=1):
        store.append(number, {device: row(number, kind, window=window) for device, kind in devices.items()})
    closed = max(0, len(rounds) - 1)
    read, whole = CohortStore.read(path), path.read_bytes()
    path.write_bytes(whole + b"\x50\x00\x00\x00"[:torn] + bytes(max(0, torn - 4)))
    again, earlier = CohortStore.open(path, closed=len(rounds)), len(path.read_bytes())
    assert earlier == len(whole)
    for device in range(6):
        kinds = [(n, each[device]) for n, each in enumerate(rounds, start=1) if device in each]
        assert store.has(device) == bool(kinds)
        found = store.carried(device)
        assert read.carried(device) == again.carried(device) == found
        listed = [(number, kind.charge, digest) for number, kind, digest in read.entries(device)]
        assert listed == [(number, CHARGES[kind], bytes([number]) * 32) for number, kind in kinds]
        if found is None:
            continue
        last, kind = kinds[-1]
        assert dict(found.totals.kinds) == {
            charge: count for place, charge in enumerate(CHARGES) if (count := sum(k == place for _, k in kinds))
        }
        assert found.totals.rounds == len(kinds)
        assert found.totals.window == (Period(last, last + 1) if window else None)
        expected = row(last, kind, window=window)
        assert (found.round, found.participations, found.slot) == (last, expected.participations, expected.slot)
        assert (found.arrays, found.small, found.left_out) == (expected.arrays, expected.small, expected.left_out)
    before = CohortStore.open(path, closed=closed)
    assert {device for device in range(6) if before.has(device)} == {d for each in rounds[:closed] for d in each}


def test_a_personalized_head_is_kept_with_its_device(tmp_path: Path) -> None:
    store = CohortStore.open(tmp_path / "cohort.bin", closed=0)
    store.append(1, {3: row(1, 0, window=False), 4: row(1, 0, window=False)})
    CohortStore.open(tmp_path / "cohort.bin", closed=1).append_heads(1, {4: b"head"})
    heads = [each.head for device in (3, 4) if (each := CohortStore.read(tmp_path / "cohort.bin").carried(device))]
    assert heads == [b"", b"head"]


@pytest.mark.parametrize("shape", [(), (3,), (1000, 2)])
@pytest.mark.parametrize("dtype", ["<f4", "<f8", "|u1"])
def test_arrays_of_devices_stay_apart(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    slots, rng = StateSlots(tmp_path), np.random.default_rng(1)
    arrays = {key: (100 * rng.random(shape)).astype(dtype) for key in [(0, 0), (0, 1), (1, 0), (900, 1)]}
    for (device, slot), array in arrays.items():
        slots.write(device, slot, "own", array, round=7 + slot)
    for (device, slot), array in arrays.items():
        found = slots.read(device, slot, "own", dtype, shape, round=7 + slot)
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
        with pytest.raises(StoreError, match="does not hold own of round 6"):  # a worker that seemed dead wrote it
            slots.read(device, slot, "own", dtype, shape, round=6)
    (file,) = tmp_path.iterdir()
    assert 512 * file.stat().st_blocks < 100_000, "places that are not used take no room"
    for device, slot in ((900, 0), (901, 0)):
        with pytest.raises(StoreError, match="does not hold own"):
            slots.read(device, slot, "own", dtype, shape, round=7)
    with pytest.raises(StoreError, match="cannot be read"):
        slots.read(0, 0, "residual", dtype, shape, round=7)


VALUES = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2))


@given(rows=st.lists(st.dictionaries(st.sampled_from("abc"), VALUES), max_size=6))
def test_columns_give_their_rows_back(rows: list[dict[str, object]]) -> None:
    assert rows_of(columns_of(rows), len(rows)) == rows
