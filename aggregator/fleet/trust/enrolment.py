"""Decides which board gets a certificate: `Enroller.answer` is the whole rule, without a network.

A board proves that it has its card's token. The proof covers its id, its identity and its signing request
(`proven_by_token`), so nobody who sees a request can use it for another key. A board whose identity is known
needs no token, because this identity has signed the request. Certificates are renewed this way, even after their end.

A board keeps its TLS key. So a request for a key whose certificate is in the first half of its life gets the same
certificate again: a board that lost power before it stored the certificate then has it, and a replayed request helps
only the owner of the TLS key. A board has certificates for a few TLS keys at most. So a sender that asks once a second
for another key cannot make the registry grow, and takes nothing from the board whose key has a certificate.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple

from hushfleet.aggregator.fleet.trust.authority import Authority, is_fresh, key_digest, read_request
from hushfleet.aggregator.fleet.trust.folder import FleetConfig
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry, RefusedRequest
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.enrolment import TokenBucket
from hushfleet.errors import BadSignature, Malformed
from hushfleet.privacy.charge import Charge
from hushfleet.schema import unpack
from hushfleet.wire.format.chunks import MAX_RANGES
from hushfleet.wire.format.fleet_messages import (
    MAX_CARRIED_BYTES,
    CarriedRounds,
    EnrolAnswer,
    EnrolRequest,
    SpentRound,
    Verdict,
    proven_by_token,
)
from hushfleet.wire.format.identity import verify

PENDING_RETRY_S = 30
REFUSED_RETRY_S = 600
REFUSED_A_SECOND = 1.0  # requests without a token; each is a synced write
MAX_REFUSED_BURST = 50
MAX_TLS_KEYS = 8  # TLS keys of one board with valid certificates
CHARGES_AT_ONCE = 4096  # limits the cost of a request, whatever a board has spent
_RANGE_BYTES, _CARRIED_BYTES = 11, 40  # most bytes as msgpack: a range; `CarriedRounds` without task and charge

log = logging.getLogger("hushfleet.fleet")


class Enroller:
    """Answers requests according to the registry and the policy.

    :param on_granted: called after the registry has a board's new key or certificate.
    :param clock: unix seconds.
    """

    def __init__(
        self,
        config: FleetConfig,
        registry: FleetRegistry,
        register: ActivityStore,
        authority: Authority,
        *,
        on_granted: Callable[[], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._registry, self._register, self._authority = config, registry, register, authority
        self._on_granted, self._clock = on_granted, clock
        self._without_token = TokenBucket(REFUSED_A_SECOND, MAX_REFUSED_BURST, now=clock())
        self._warned = set[str]()

    def answer(self, request: EnrolRequest) -> EnrolAnswer:
        """Answers a request. Its frame must have been signed by the key that it names. Raises `StoreError`."""
        board = self._registry.board(request.device)
        if board is None:
            return _no(request, f"this fleet has no board {request.device}; its operator can add it")
        if board.is_blocked:
            return _no(request, f"{request.device} is locked out: {board.reason}")
        token = self._token_of(request)
        if board.public_key != request.public_key:
            refused = self._why_not(board, has_token=token is not None)
            if refused is not None:
                return self._refuse(request, *refused, has_token=token is not None)
        try:
            key = read_request(request.csr, device=request.device)
        except Malformed as error:
            return _no(request, str(error))
        now, tls_key = self._clock(), key_digest(key)
        held = self._registry.certificates(request.device, request.public_key, tls_key, now=now)
        pem = next((each for each in held if is_fresh(each, now=now)), None)
        if pem is None:
            others = self._registry.tls_keys(request.device, request.public_key, now=now) - {tls_key}
            if len(others) >= MAX_TLS_KEYS:
                return self._refuse_more_keys(request)
            issued = self._authority.sign_client(
                request.device,
                key,
                days=self._config.enrolment.certificate_days,
                now=datetime.datetime.fromtimestamp(now, datetime.UTC),
            )
            pem = issued.pem
            self._registry.grant(board, request.public_key, issued, tls_key=tls_key, token=token, now=now)
            log.info("%s has a certificate, for the key %s", request.device, request.public_key.hex())
            self._on_granted()
        charges = self._register.charges(request.device, after=request.after, at_most=CHARGES_AT_ONCE)
        carried, up_to = carried_part(charges, CHARGES_AT_ONCE)
        return EnrolAnswer(request.device, request.nonce, "granted", pem, "", 0, carried, up_to)

    def names_known_key(self, device: str, frame: bytes) -> bool:
        """Returns whether the frame contains the board's known key, as its request for the next certificate does.

        Nothing is parsed and no signature is checked, because that costs more. Raises `StoreError`.
        """
        board = self._registry.board(device)
        return board is not None and not board.is_blocked and board.public_key is not None and board.public_key in frame

    def _token_of(self, request: EnrolRequest) -> bytes | None:
        """Returns the public key of the token that the request proves; None if it proves none."""
        signed = proven_by_token(
            federation=self._config.federation,
            device=request.device,
            csr=request.csr,
            public_key=request.public_key,
        )
        for key in self._registry.tokens(request.device, now=self._clock()):
            with contextlib.suppress(BadSignature):
                verify(key, signed, request.proof)
                return key
        return None

    def _why_not(self, board: Board, *, has_token: bool) -> tuple[Verdict, str] | None:
        """Says why a board with an unknown key gets no certificate; None if it gets one."""
        policy, device = self._config.enrolment.policy, board.device
        if board.public_key is not None:
            return "pending", (
                f"{device} is known by another key. If its card was written anew, its operator says so: "
                f"hushfleet fleet renew DIR {device} --new-card"
            )
        if policy == "manual":
            return "pending", f"waits for its operator: hushfleet fleet approve DIR {device}"
        if policy == "list":
            return "refused", f"this fleet takes listed keys only: hushfleet fleet approve DIR {device}"
        if not has_token:
            return "refused", (
                f"the token of {device} has expired, was used up, or is another one: write its card anew, or: "
                f"hushfleet fleet approve DIR {device}"
            )
        return None

    def _refuse_more_keys(self, request: EnrolRequest) -> EnrolAnswer:
        reason = (
            f"{request.device} has certificates for {MAX_TLS_KEYS} other TLS keys, and gets one for this key when the "
            "first of them has ended. A board needs one: if it has not made them itself, somebody has its key: "
            f"hushfleet fleet renew DIR {request.device} --new-card"
        )
        if request.device not in self._warned:  # at most one name for each board of the fleet
            self._warned.add(request.device)
            log.warning("%s", reason)
        return EnrolAnswer(request.device, request.nonce, "pending", b"", reason, REFUSED_RETRY_S)

    def _refuse(self, request: EnrolRequest, verdict: Verdict, reason: str, *, has_token: bool) -> EnrolAnswer:
        if has_token or self._without_token.take(self._clock()):
            self._registry.add_refused_request(
                RefusedRequest(request.device, request.public_key, has_token, reason, self._clock())
            )
        retry_s = PENDING_RETRY_S if verdict == "pending" else REFUSED_RETRY_S
        return EnrolAnswer(request.device, request.nonce, verdict, b"", reason, retry_s)


def carried_part(
    charges: Sequence[tuple[str, int, bytes]], at_once: int
) -> tuple[tuple[CarriedRounds, ...], SpentRound | None]:
    """Returns as many of the first charges as fit into one answer, and the last of these if more may follow.

    :param charges: the next charges in the register, at most `at_once`.
    """
    room, count, latest = MAX_CARRIED_BYTES, 0, dict[tuple[str, bytes], int]()
    for task, round, packed in charges:
        before = latest.get((task, packed))
        if before != round - 1:
            room -= _RANGE_BYTES + (0 if before is not None else _CARRIED_BYTES + len(task) + len(packed))
        if room < 0 and count:
            break
        latest[task, packed] = round
        count += 1
    is_all = count == len(charges) < at_once
    return carried_rounds(charges[:count]), None if is_all else charges[count - 1][:2]


def carried_rounds(charges: Iterable[tuple[str, int, bytes]]) -> tuple[CarriedRounds, ...]:
    """Joins the rounds of a task that have the same charge. `ActivityStore.charges` returns such an input."""
    rounds: dict[tuple[str, bytes], list[int]] = {}
    for task, round, packed in charges:
        rounds.setdefault((task, packed), []).append(round)
    carried = []
    for (task, packed), numbers in rounds.items():
        charge = unpack(Charge, packed, what="a charge in the register")
        ranges = _ranges(sorted(numbers))
        for start in range(0, len(ranges), MAX_RANGES):
            carried.append(CarriedRounds(task, tuple(ranges[start : start + MAX_RANGES]), *astuple(charge)))
    return tuple(carried)


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Joins whole numbers to ranges `(start, stop)`.

    :param numbers: in ascending order.
    """
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1] = ranges[-1][0], number + 1
        else:
            ranges.append((number, number + 1))
    return ranges


def _no(request: EnrolRequest, reason: str) -> EnrolAnswer:
    return EnrolAnswer(request.device, request.nonce, "refused", b"", reason, REFUSED_RETRY_S)
