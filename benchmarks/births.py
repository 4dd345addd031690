"""What births cost the aggregator: of strangers under closed enrolment, and of devices that it knows.

    python -m benchmarks.births [--births 100000] [--known 10000] [--folder DIR]

strangers   Each birth names another device and is signed by its own key. All after the first ones are dropped unread.
known       Births of known devices, committed for many at once, and, for comparison, each in a transaction of its own,
            as every birth was before. Synced to the disk of --folder, which decides the latter figure.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: the repository's root is not on the path then
    sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from hushfleet.aggregator.devices.enrolment import BATCH_S, Enrolment
from hushfleet.aggregator.devices.register import DeviceRegister, KnownDevice
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import BadSignature
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Birth, encode_message

ALONE = 200


def main(arguments: Sequence[str] | None = None) -> None:
    options = _arguments(arguments)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.folder) as scratch:
        figures = measure(Path(scratch), births=options.births, known=options.known)
    table = Table("births", "number", "seconds", "ms each", "of it processor", box=None)
    for what, row in figures.items():
        table.add_row(
            what, f"{row['births']:,}", f"{row['seconds']:.2f}", f"{row['ms_each']:.4f}", f"{row['cpu_ms_each']:.4f}"
        )
    console = Console()
    console.print(table)
    alone = figures["known, one transaction each"]["ms_each"]
    for what in ("strangers", "known, together"):
        console.print(f"{what}: {alone / figures[what]['ms_each']:.0f} times cheaper", highlight=False)


def measure(folder: Path, *, births: int, known: int) -> dict[str, dict[str, float]]:
    """Name -> births, seconds, and ms each by the clock and of the processor."""
    with AggregatorStore(folder) as store, DeviceRegister(folder) as register:
        names = [f"known-{index}" for index in range(known)]
        register.add(KnownDevice(name, pinned=True) for name in names)
        enrolment = Enrolment(store, register)
        few = min(ALONE, known // 2)
        return {
            "strangers": _timed(enrolment, [f"stranger-{index}" for index in range(births)], together=True),
            "known, one transaction each": _timed(enrolment, names[:few], together=False),
            "known, together": _timed(enrolment, names[few:], together=True),
        }


def _timed(enrolment: Enrolment, names: Sequence[str], *, together: bool) -> dict[str, float]:
    payloads = [_birth(name) for name in names]
    settled_at = began = time.perf_counter()
    cpu_began = time.process_time()
    for name, payload in zip(names, payloads, strict=True):
        try:
            enrolment.take(name, payload, federation="default")
        except BadSignature:
            continue
        if not together or time.perf_counter() - settled_at >= BATCH_S:
            enrolment.settle()
            settled_at = time.perf_counter()
    enrolment.settle()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    each = 1000 / len(names)
    return {"births": len(names), "seconds": seconds, "ms_each": each * seconds, "cpu_ms_each": each * cpu}


def _birth(name: str) -> bytes:
    identity = Identity.generate()
    birth = Birth(name, 1, "ready", "pi-4", "0.1.0", identity.public_key, 900)
    return encode_message(birth, identity, federation="default")


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--births", type=int, default=100_000, help="of strangers")
    parser.add_argument("--known", type=int, default=10_000, help="devices that are known")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the system's temporary folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
