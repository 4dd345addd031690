"""What must hold of a fleet after its life, whatever happened in it. Sentences about what does not; none is good."""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Iterator

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from chaos.life import NEW, OLD, ROUNDS, Life, after
from hushfleet.aggregator.commands.of_fleet import members_of
from hushfleet.aggregator.fleet.software.rollout import board_rollouts, current
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.rounds.charge_book import BEFORE_TRAINING
from hushfleet.aggregator.storage.charged_keys import ChargedKeys
from hushfleet.aggregator.storage.identity_file import load_or_create
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.store_check import ROUNDING
from hushfleet.secure.membership_list import MembershipList
from hushfleet.wire.link.interface import LinkDown, LinkEvent, LinkUp
from hushfleet.wire.link.mqtt import MqttLink
from support.desk import Board


def check_life(life: Life) -> list[str]:
    """Its boards are switched off; the brokers are started once more."""
    return [*life.wrong, *check_files(life), *_doors(life)]


def check_files(life: Life) -> list[str]:
    """What nothing need run for."""
    return [*_identities(life), *_releases(life), *_ledgers(life), *_seen(life), *_secrets(life)]


def _identities(life: Life) -> Iterator[str]:
    operator = load_or_create(life.folder.operator_key).public_key
    membership_list = MembershipList.from_bytes(life.folder.membership_list.read_bytes(), operator=operator)
    with FleetRegistry(life.folder.path) as registry, members_of(life.folder) as register:
        for card in life.cards:
            row, known = registry.board(card.device), register.device(card.device)
            is_out = card.device == life.devices[life.plan.blocked]
            with DeviceStore(card.config.store_path, device=card.device, inspect=True) as store:
                key = store.identity.public_key
            if (row.standing, row.public_key) != ("blocked" if is_out else "enrolled", key):
                yield f"{card.device} is {row.standing}, with {'its' if row.public_key == key else 'another'} key"
            if known is None or known.is_blocked != is_out or known.public_key != (None if is_out else key):
                yield f"the aggregator knows {card.device} as {known}"
            if (card.device in membership_list.devices) == is_out:
                yield f"the membership list {'names' if is_out else 'lacks'} {card.device}"
            if registry.tokens(card.device, now=time.time()):
                yield f"the token of {card.device} holds still"
            issued = registry.rows("SELECT public_key, pem, revoked FROM certificates WHERE id = ?", (card.device,))
            keys = {_public(pem) for _, pem, _ in issued}
            if {own for own, _, _ in issued} != {key} or keys != {_public(card.tls.certificate_file.read_bytes())}:
                yield f"{card.device} has certificates for {len(keys)} keys"
            if any(bool(revoked) != is_out for _, _, revoked in issued):
                yield f"of {card.device} the revoked certificates are {[revoked for _, _, revoked in issued]}"


def _public(pem: bytes) -> bytes:
    key = x509.load_pem_x509_certificate(pem).public_key()
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _releases(life: Life) -> Iterator[str]:
    with FleetRegistry(life.folder.path) as registry:
        rollout = current(registry)
        assert rollout is not None
        outcomes = {board.device: board.outcome for board in board_rollouts(registry, rollout, now=time.time())}
    if rollout.state == "stopped" and not rollout.reason:
        yield "the roll-out has stopped without a reason"
    if life.plan.is_good and set(outcomes.values()) != {"good"}:
        yield f"a good release has come to {outcomes}: {rollout.reason}"
    if not life.plan.is_good and rollout.state != "stopped":
        yield f"a bad release goes on, {outcomes}"
    for board in life.boards:
        state = board.slots("show")
        runs = (board.opt / "current").resolve().name
        if state.good not in (OLD, NEW) or runs not in (state.good, state.trial):
            yield f"{board.home.name} runs {runs}, and has {state}"
        if not life.plan.is_good and state.good != OLD:
            yield f"{board.home.name} has taken the bad release"


def _ledgers(life: Life) -> Iterator[str]:
    """What the aggregator has counted is in the boards' ledgers, each round once.

    A round stays counted, too, of a board whose decline does not say that nothing was committed, as on a full disk.
    """
    with AggregatorStore(life.folder.run) as run:
        task = (run.get("task") or b"").decode()
        unsure = {(device, task, number) for number, device, code, _ in run.declines() if code not in BEFORE_TRAINING}
    with members_of(life.folder) as register:
        for card in life.cards:
            with DeviceStore(card.config.store_path, device=card.device, inspect=True) as store:
                entries = [(entry.task, entry.round) for entry in store.ledger.entries()]
            counted = {(task, number) for task, number, _ in register.charges(card.device)}
            missing = {each for each in counted - set(entries) if (card.device, *each) not in unsure}
            if len(entries) != len(set(entries)) or missing:
                yield f"the ledger of {card.device} has {entries}, {sorted(counted)} were counted"
            if len(counted) != ROUNDS:
                yield f"of {card.device} {len(counted)} rounds were counted, not {ROUNDS}"


def _seen(life: Life) -> Iterator[str]:
    """What the aggregator would tell a board of its charges has each accepted update, and nothing that it lacks."""
    with AggregatorStore(life.folder.run) as run:
        accepted = dict.fromkeys(life.devices, 0) | Counter(row.device for row in run.charges())
    with ChargedKeys(life.folder.aggregator / "identity.key") as charged:
        for card in life.cards:
            with DeviceStore(card.config.store_path, device=card.device, inspect=True) as store:
                ledger, seen = store.ledger, charged.of(store.identity.public_key)
                rounds = 0 if seen is None else seen.rounds
                if not accepted[card.device] <= rounds <= ledger.rounds_charged():
                    yield f"of {card.device} {rounds} charged rounds were seen, of {ledger.rounds_charged()}"
                if seen is not None and seen.weight > ledger.weight() * (1 + ROUNDING):
                    yield f"of {card.device} the sum {seen.weight} was seen, of {ledger.weight()}"


def _secrets(life: Life) -> Iterator[str]:
    """Private keys and tokens of boards are in no file but theirs."""
    secrets = {}
    for card, token in zip(life.cards, life.tokens, strict=True):
        body = b"".join(card.tls.key_file.read_bytes().splitlines()[1:-1])
        secrets[f"the TLS key of {card.device}"] = (card.device, [body, base64.b64decode(body)[36:68]])
        secrets[f"the token of {card.device}"] = (card.device, [token.strip()])
    for file in life.home.rglob("*"):
        if not file.is_file() or "opt" in file.parts:
            continue
        data, owner = file.read_bytes(), file.relative_to(life.home).parts[0]
        for name, (device, forms) in secrets.items():
            if owner != device and any(form in data or form in data.replace(b"\n", b"") for form in forms):
                yield f"{name} is in {file.relative_to(life.home)}"


def _first(link: MqttLink) -> LinkEvent | None:
    """Whether it comes up; a broker that refuses a certificate says so when the connection stands already."""
    give_up = time.monotonic() + 10.0
    while time.monotonic() < give_up:
        if isinstance(event := link.receive(1.0), LinkUp | LinkDown):
            return event
    return None


def _doors(life: Life) -> Iterator[str]:
    """The brokers' own answer: who is in connects, who is out does not, and a used token opens nothing."""
    with after(life):
        for number, card in enumerate(life.cards):
            link = card.link()
            is_up = isinstance(_first(link), LinkUp)
            link.close()
            if is_up == (number == life.plan.blocked):
                yield f"{card.device} can{'' if is_up else 'not'} connect"
        number = (life.plan.blocked + 1) % len(life.cards)
        thief = Board(life.folder, life.home / "thief", life.devices[number], token=life.tokens[number].decode())
        try:
            if thief.enrol(patience_s=2.0):
                yield "a token served twice"
        finally:
            thief.store.close()
