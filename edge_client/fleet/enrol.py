"""Enrols a board in its fleet: the board asks for a certificate until it has one, and later for the next one.

After an answer, the ledger first gets the charges of earlier cards of this id. Then the certificate is stored, and then
the token is deleted. This order makes a crash harmless: a board without a certificate asks again. The charges may come
in several answers. They are written to the ledger when all have arrived, so that a part is never taken for the whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hushfleet.edge_client.board.config import DeviceConfig, FleetSection
from hushfleet.edge_client.board.notes import Kind
from hushfleet.edge_client.fleet.tls_identity import TlsIdentity
from hushfleet.edge_client.rate_limits import Backoff, RejectedMessages
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import LinkLost, Malformed, StoreError, WireError
from hushfleet.version import __version__
from hushfleet.wire.format.fields import NONCE_BYTES
from hushfleet.wire.format.fleet_messages import (
    CarriedRounds,
    EnrolAnswer,
    EnrolRequest,
    SpentRound,
    proven_by_token,
    token_seed,
)
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import decode_as, encode_message
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Delivery, Link, LinkDown, LinkUp

FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 300.0
MOST_RETRY_S = 3600.0
LONGEST_SLEEP_S = 1.0

_log = logging.getLogger("hushfleet.edge")


class CertificateRequest:
    """Asks for a certificate over any link: the agent's own link for the next one, another link for the first one.

    :param clock: monotonic seconds.
    """

    def __init__(
        self, config: DeviceConfig, store: DeviceStore, tls: TlsIdentity, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert config.fleet is not None
        self._config, self._store, self._tls, self._clock = config, store, tls, clock
        self._fleet: FleetSection = config.fleet
        self._service = config.service_key
        self._federation = config.device.federation
        self._nonce = os.urandom(NONCE_BYTES)
        self._request: bytes | None = None
        self._carried: list[CarriedRounds] = []
        self._after: SpentRound | None = None
        self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S, now=clock())
        self.standing = "asked, and not answered yet"  # shown to people
        self.granted = False

    @property
    def due_at(self) -> float:
        """The time of the next request, on the monotonic clock."""
        return self._backoff.due_at

    def connected(self) -> None:
        """Asks again at once: an earlier request may be lost."""
        self._backoff.reset(self._clock())

    def frame(self) -> bytes:
        """Makes the request to send now. Raises `StoreError` if the board's key cannot be made."""
        self._backoff.tried(self._clock())
        if self._request is None:
            self._request = self._tls.request()
        public_key = self._store.identity.public_key
        request = EnrolRequest(
            device=self._tls.device,
            csr=self._request,
            public_key=public_key,
            proof=self._proof(self._request, public_key),
            nonce=self._nonce,
            board=self._config.device.board,
            version=__version__,
            after=self._after,
        )
        return encode_message(request, self._store.identity, federation=self._federation)

    def take(self, payload: bytes) -> None:
        """Handles an answer, which may be forged. Raises a `WireError` if it is not valid, or `StoreError`."""
        answer = decode_as(EnrolAnswer, payload, federation=self._federation, public_key=self._service)
        if answer.device != self._tls.device:
            raise Malformed(f"an answer for {answer.device} came to this board")
        if answer.nonce != self._nonce:
            return  # it answers an earlier request
        if answer.verdict != "granted":
            before, self.standing = self.standing, f"no certificate yet ({answer.verdict}): {answer.reason}"
            if self.standing != before:
                _log.warning("%s", self.standing)
            self._backoff.due_at = self._clock() + min(max(answer.retry_s, 1), MOST_RETRY_S)
            return
        if not self._store.is_enrolled:  # otherwise its own ledger has the charges
            carried = self._all_carried(answer)
            if carried is None:
                return
            self._store.note_enrolled(carried)
        self._tls.keep(answer.certificate)
        self._erase_token()
        self.granted = True
        _log.info("this board has a certificate of its fleet")

    def _all_carried(self, answer: EnrolAnswer) -> list[CarriedRounds] | None:
        """Returns the earlier charges when their last part has arrived, else None.

        Raises `Malformed` if the parts are not in ascending order.
        """
        if answer.up_to is None and self._after is None:
            return [*answer.carried]
        if answer.up_to is not None and answer.up_to <= (self._after or ("", -1)):
            raise Malformed(f"the spent privacy up to {answer.up_to} came after that up to {self._after}")
        carried = [*self._carried, *answer.carried]
        self._nonce = os.urandom(NONCE_BYTES)  # no part is taken twice
        if answer.up_to is None:
            self._carried, self._after = [], None  # if the disk is full, all parts are requested again
            return carried
        self._carried, self._after = carried, answer.up_to
        self._backoff.reset(self._clock())
        return None

    def _erase_token(self) -> None:
        if self._fleet.token_file is not None:
            with contextlib.suppress(OSError):  # it was used, and is no longer valid
                Path(self._fleet.token_file).unlink(missing_ok=True)

    def _proof(self, request: bytes, public_key: bytes) -> bytes:
        token = read_token(self._fleet.token_file)
        if token is None:
            return b""
        key = Identity.from_bytes(token_seed(hashlib.sha256(token).digest()))
        return key.sign(
            proven_by_token(federation=self._federation, device=self._tls.device, csr=request, public_key=public_key)
        )


def enrol(
    enrolment: CertificateRequest,
    connect: Callable[[], Link],
    topics: Topics,
    device: str,
    stop: threading.Event,
    *,
    alive: Callable[[], None] = lambda: None,
    waits_for: Callable[[Kind, str], None] = lambda kind, words: None,
    patience_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Asks over its own link until a certificate is granted. Returns False if `stop` is set or `patience_s` ends first.

    :param connect: makes a link to the address that answers boards without a certificate.
    :param alive: called repeatedly, to show that the loop is alive.
    :param waits_for: called repeatedly with the kind of thing that the board waits for, and a description.
    """
    rejected, link, up = RejectedMessages(clock), connect(), False
    down = "no connection yet"
    give_up = clock() + patience_s
    link.subscribe(topics.answer(device))
    link.open()
    try:
        while not (stop.is_set() or enrolment.granted or clock() > give_up):
            alive()
            waits_for("certificate", f"a certificate of the fleet: {enrolment.standing if up else down}")
            event = link.receive(max(0.0, min(LONGEST_SLEEP_S, enrolment.due_at - clock()) if up else LONGEST_SLEEP_S))
            if isinstance(event, LinkUp):
                up = True
                enrolment.connected()
            elif isinstance(event, LinkDown):
                up, down = False, f"where certificates are given cannot be reached: {event.reason}"
                _log.warning("%s", down)
            try:
                if isinstance(event, Delivery):
                    enrolment.take(event.payload)
                if up and not enrolment.granted and clock() >= enrolment.due_at:
                    link.publish(topics.request(device), enrolment.frame())
            except LinkLost:
                up = False
            except WireError as error:
                rejected.add(topics.answer(device), error)
            except StoreError as error:
                _log.error("%s", error)
    finally:
        link.close()
    return enrolment.granted


def read_token(file: str | None) -> bytes | None:
    """Reads the card's token, without surrounding white space. Returns None if there is none (any more)."""
    if file is None:
        return None
    try:
        return Path(file).read_bytes().strip() or None
    except OSError:
        return None
