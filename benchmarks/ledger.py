"""Measures what the ledger costs a board in an early round and in a late one, in its real store.

    python -m benchmarks.ledger [--rounds 3,1000]

A round's work is the check of the owner's limits, of a period and over everything, the totals for the worker and for
the second place, the synced commit of a small update, and the look at what was charged before it is sent.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.common import Figures, make_parser, table, write
from hushfleet.edge_client.storage.round_commit import CodedRound, StoredState
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.methods.state import PublicState
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.charge import DEVICE_ADJACENCY, Charge
from hushfleet.privacy.ledger import CountedTime

DAY_S, SIZE, MEASURED = 86400, 64, 5
BUDGET = Budget(delta=1e-5, lifetime=1e6, in_period=1e5, period_s=90 * DAY_S)
CHARGE = Charge("device", DEVICE_ADJACENCY, "gaussian", 3.0)


def measure(folder: Path, rounds: Sequence[int]) -> list[Figures]:
    """Plays a round a day; returns the CPU time of each of `rounds`, the median of it and the four after it."""
    public, spent = PublicState(np.zeros(SIZE, bool), 0).to_bytes(), list[float]()
    state = StoredState(SIZE, public, b"", b"")
    with DeviceStore(folder / "store.sqlite", device="board-1") as store:
        ledger = store.ledger
        ledger.keep_counted(CountedTime(1, 1))
        for number in range(1, max(rounds) + MEASURED):
            at, began = number * DAY_S, time.process_time()
            BUDGET.check(ledger, CHARGE, now=at)
            ledger.totals("task")
            store.commit_coded(CodedRound("task", number, CHARGE, state, bytes(100), public, at=at, package=bytes(32)))
            _ = ledger.charges_of("task", number), ledger.rounds_charged(), ledger.weight()
            spent.append(1e3 * (time.process_time() - began))
    return [{"round": number, "cpu_ms": median(spent[number - 1 : number - 1 + MEASURED])} for number in rounds]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=lambda text: [int(each) for each in text.split(",")], default=[3, 1000])
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hushfleet-ledger-") as folder:
        figures = measure(Path(folder), options.rounds)
    table("A round's work of a board's ledger, CPU ms", figures)
    write(options, {"rounds": figures})


if __name__ == "__main__":
    main()
