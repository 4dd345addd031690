"""What births cost the aggregator: of strangers under closed enrolment, and of devices that it knows.

    python -m benchmarks.births [--births 100000] [--known 10000] [--folder DIR]

strangers   Each birth names another device and is signed by its own key. All after the first ones are dropped unread.
known       Births of known devices, committed for many at once, and, for comparison, each in a transaction of its own.
            Synced to the disk of --folder, which decides the latter figure.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.common import Figures, earlier, make_parser, table, write
from hushfleet.aggregator.devices.enrolment import BATCH_S, Enrolment
from hushfleet.aggregator.devices.register import DeviceRegister, KnownDevice
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import BadSignature
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Birth, encode_message

ALONE = 200


def measure(folder: Path, *, births: int, known: int) -> list[Figures]:
    """Births, seconds, and ms each by the clock and of the processor."""
    with AggregatorStore(folder) as store, DeviceRegister(folder) as register:
        names, few = [f"known-{index}" for index in range(known)], min(ALONE, known // 2)
        register.add(KnownDevice(name, pinned=True) for name in names)
        enrolment = Enrolment(store, register)
        strangers = [f"stranger-{index}" for index in range(births)]
        return [
            {"births": "strangers", **_timed(enrolment, strangers, together=True)},
            {"births": "known, one transaction each", **_timed(enrolment, names[:few], together=False)},
            {"births": "known, together", **_timed(enrolment, names[few:], together=True)},
        ]


def _timed(enrolment: Enrolment, names: Sequence[str], *, together: bool) -> Figures:
    payloads = []
    for name in names:
        identity = Identity.generate()
        birth = Birth(name, 1, "ready", "pi-4", "0.1.0", identity.public_key, 900)
        payloads.append(encode_message(birth, identity, federation="default"))
    settled_at = began = time.perf_counter()
    cpu_began = time.process_time()
    for name, payload in zip(names, payloads, strict=True):
        with suppress(BadSignature):  # a stranger
            enrolment.take(name, payload, federation="default")
            if not together or time.perf_counter() - settled_at >= BATCH_S:
                enrolment.settle()
                settled_at = time.perf_counter()
    enrolment.settle()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    each = 1000 / len(names)
    return {"number": len(names), "seconds": seconds, "ms_each": each * seconds, "cpu_ms_each": each * cpu}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--births", type=int, default=100_000, help="of strangers")
    parser.add_argument("--known", type=int, default=10_000, help="devices that are known")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the system's temporary folder")
    options = parser.parse_args(arguments)
    figures = earlier(options)
    if figures is None:
        with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.folder) as scratch:
            figures = {"rows": measure(Path(scratch), births=options.births, known=options.known)}
    table("Births", figures["rows"])
    write(options, figures)


if __name__ == "__main__":
    main()
