"""Compares a secure sum with Flower's SecAgg+: bytes and CPU time of a device, a committee member and the server.

    python -m benchmarks.secure_sum [--quick] [--peers-python PYTHON] [--json FILE]

Ours: one device masks, one member answers, the server takes updates and opens the sum; work that does not depend on the
device is measured once and counted for all. A device's key exchanges are included in its time, although it keeps the
keys between rounds; the roster is included in its bytes, although it is sent once. Flower runs its own client code and
its server's functions, with --shares neighbours per client, in a separate environment (`pip install flwr`), given by
--peers-python. On both sides float32 values are rounded to integers, and neither adds noise; the download of the model
and the transport's bytes are not counted. The number of committee members that may be missing depends on the cell's
drop-outs, at least 5 %.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from benchmarks.common import Figures, make_parser, table, write
from benchmarks.processes import figures_of
from hushfleet.config.spec import BlobRef, SecureSpec
from hushfleet.secure.agreement import KeyAgreement
from hushfleet.secure.committee import DROP_OUT, committee_rule
from hushfleet.secure.masking import Masked
from hushfleet.secure.member_answer import AnswerHeader, encode_answer
from hushfleet.secure.prime_field import add_into, from_bytes, to_bytes
from hushfleet.secure.roster import Roster
from hushfleet.secure.secure_round import SecureRound
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import RoundPlan, SecurePlan, encode_message
from hushfleet.wire.format.update import UpdateHeader, decode_masked, encode_masked

CLIENTS = (10, 100, 500, 1_000)
SIZES = (5_130, 100_000, 1_000_000)
T = TypeVar("T")
DROP_OUTS = (0.0, 0.05, 0.2)
BITS = 16


def timed(work: Callable[[], T], least_s: float = 0.1) -> tuple[T, float]:
    """Returns the function's result and the shortest of its times, in seconds of processor time."""
    began, shortest = time.process_time(), float("inf")
    while True:
        start = time.process_time()
        found = work()
        shortest = min(shortest, time.process_time() - start)
        if time.process_time() - began > least_s:
            return found, shortest


def rounded(values: np.ndarray, prime: int) -> np.ndarray:
    """Returns stochastically rounded values, as in Flower."""
    whole = np.floor(values * 64 + np.random.default_rng().random(len(values), np.float32)).astype(np.int32)
    return (whole % prime).astype(np.uint32)


def ours(clients: int, size: int, drop_out: float, honest_fraction: float) -> Figures:
    identities = {f"device-{index:05d}": Identity.generate() for index in range(clients)}
    roster = Roster.of({name: identity.public_key for name, identity in identities.items()})
    blob = roster.to_bytes()
    lost = round(drop_out * clients)
    spec = SecureSpec(BITS, max(2, clients - lost), 1, honest_fraction)
    secure_plan = SecurePlan(BlobRef(hashlib.sha256(blob).digest(), len(blob)), 1.0)
    plan = RoundPlan("benchmark", 1, 20, "open", bytes(32), 4 * size, {}, 1, 600.0, secure=secure_plan)
    secure = SecureRound(spec, plan, roster, size=size)
    secure.rule = committee_rule(clients, honest_fraction=honest_fraction, drop_out=max(drop_out, DROP_OUT))
    rule, prime, values = secure.rule, secure.prime, np.full(size, 0.125, np.float32)
    member = secure.members[0]
    device = next(name for name in reversed(secure.devices) if name != member)
    header = UpdateHeader(
        plan.task, 1, device, "masked", size, (), (1.0,), (1.0,), bytes(16), 1, 1.0, 1.0, clients
    )  # fmt: skip

    def upload() -> bytes:
        masked = secure.masked(KeyAgreement(identities[device]), device, rounded(values, prime))
        data = to_bytes(masked.values, BITS) + to_bytes(masked.corrections.reshape(-1), BITS)
        return encode_masked(header, data, identity=identities[device])

    sent, device_s = timed(upload)
    included = secure.pack_included(secure.devices[: clients - lost])
    asked = replace(plan, phase="unmask", secure=replace(secure_plan, included=included))

    def answer() -> bytes:
        made = secure.answer(KeyAgreement(identities[member]), member, included)
        answered = AnswerHeader.of(plan.task, 1, member, included, BITS)
        return encode_answer(answered, made, identity=identities[member])

    answered, member_s = timed(answer)
    zeros = np.zeros((rule.may_miss, secure.width), np.uint32)
    total = Masked(np.zeros(size, np.uint32), zeros)

    def take() -> None:
        _, section = decode_masked(sent, public_key=identities[device].public_key)
        taken = from_bytes(section, BITS)
        add_into(total.values, taken[:size], prime)
        add_into(total.corrections, taken[size:].reshape(zeros.shape), prime)

    _, take_s = timed(take)
    nothing = np.zeros(secure.width, np.uint32)  # the sum of no masks needs as much work as any other
    answers = dict.fromkeys(secure.members[: rule.members - min(rule.may_miss, lost)], nothing)
    empty = Masked(np.zeros(size, np.uint32), np.zeros_like(zeros))
    _, open_s = timed(lambda: secure.opened(empty, answers))
    down = len(blob) + len(encode_message(plan, federation="demo", identity=identities[member]))
    return {
        "members": rule.members,
        "missing": rule.may_miss,
        "packed": rule.packed,
        "device_s": device_s,
        "member_s": device_s + member_s,
        "server_s": (clients - lost) * take_s + open_s,
        "up": len(sent),
        "member_up": len(sent) + len(answered),
        "down": down,
        "member_down": down + len(encode_message(asked, federation="demo", identity=identities[member])),
    }


def flower(clients: int, size: int, drop_out: float, options: argparse.Namespace) -> Figures:
    job = {"clients": clients, "size": size, "drop_out": drop_out, "shares": options.shares, "threshold": 0.6}
    command = [options.peers_python, "-m", "benchmarks.frameworks.flower_secure_sum", json.dumps(job)]
    return figures_of(command, timeout_s=300)


def ratios(own: Figures, peer: Figures) -> Figures:
    """Returns our costs divided by Flower's. A member's bytes and time include its work as a device."""
    if "missing" in peer:
        return {}
    of_peer = peer["up"] + peer["down"]
    return {
        "bytes": (own["up"] + own["down"]) / of_peer,
        "member_bytes": (own["member_up"] + own["member_down"]) / of_peer,
        "cpu": own["device_s"] / peer["device_s"],
        "member_cpu": own["member_s"] / peer["device_s"],
        "server_cpu": own["server_s"] / peer["server_s"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    numbers = {"type": lambda text: tuple(map(int, text.split(",")))}
    parser.add_argument("--clients", **numbers, default=CLIENTS)
    parser.add_argument("--sizes", **numbers, default=SIZES)
    parser.add_argument("--honest-fraction", type=float, default=0.9)
    parser.add_argument("--shares", type=int, default=51, help="Flower's neighbours of a client, itself counted")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter that has flwr")
    parser.add_argument("--quick", action="store_true", help="10 and 100 clients, 5,130 values")
    options = parser.parse_args(arguments)
    if options.quick:
        options.clients, options.sizes = (10, 100), (5_130,)
    cells = []
    for size in options.sizes:
        for clients in options.clients:
            for drop_out in DROP_OUTS:
                own = ours(clients, size, drop_out, options.honest_fraction)
                peer = flower(clients, size, drop_out, options)
                cell = {"values": size, "clients": clients, "drop_out": drop_out}
                cells.append({**cell, "ours": own, "flower": peer, "ratios": ratios(own, peer)})
    shown = [
        {
            **{key: cell[key] for key in ("values", "clients", "drop_out")},
            "kB": (cell["ours"]["up"] + cell["ours"]["down"]) / 1e3,
            "ms": 1e3 * cell["ours"]["device_s"],
            "member ms": 1e3 * cell["ours"]["member_s"],
            "server s": cell["ours"]["server_s"],
            "Flower kB": (cell["flower"].get("up", 0) + cell["flower"].get("down", 0)) / 1e3,
            "Flower ms": 1e3 * cell["flower"].get("device_s", 0.0),
            "Flower server s": cell["flower"].get("server_s", 0.0),
            **cell["ratios"],
        }
        for cell in cells
    ]
    table("A round of secure sums", shown)
    write(options, {"cells": cells, "honest_fraction": options.honest_fraction, "shares": options.shares})


if __name__ == "__main__":
    main()
