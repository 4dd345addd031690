"""Whatever a device or a stranger sends, nothing changes but a count (`support.field`)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate, Refusal
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.wire.format.chunks import split
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import (
    Ack,
    Decline,
    Missing,
    Offer,
    Refused,
    Want,
    encode_message,
)
from hushfleet.wire.format.update import UpdateHeader
from hushfleet.wire.format.update_values import encode_update
from support.field import CHUNK_BYTES, Field

MakeField = Callable[..., Field]


def refused_by_code(field: Field, name: str, update: Any, code: str) -> None:
    before = field.state()
    answer = field.deliver(name, update.data)
    assert isinstance(answer, Refused), answer
    assert answer.code == code, answer
    assert field.state() == before
    assert field.refusals()[name][code] >= 1


def test_an_update_with_nan(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    update = field.fleet.update("dev-0")
    values = update.values.copy()
    values[3] = 1.0
    good = field.fleet.devices.sign("dev-0", update.header, values, update.counts).data
    at = good.index(values.tobytes()) + 12
    forged = good[:at] + np.float32("nan").tobytes() + good[at + 4 : -64]
    forged += field.fleet.devices.identities["dev-0"].sign(forged)
    update.encoded = update.encoded._replace(data=forged)
    refused_by_code(field, "dev-0", update, "non-finite")


def test_a_zero_update_that_declares_noise(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    update = field.fleet.update("dev-0")
    silent = field.fleet.devices.sign("dev-0", update.header, np.zeros_like(update.values), update.counts)
    refused_by_code(field, "dev-0", silent, "below-noise")


def test_an_update_with_the_wrong_mask_digest(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    update = field.fleet.update("dev-0")
    other = field.fleet.devices.sign("dev-0", update.header, update.values, update.counts, public_digest=bytes(16))
    refused_by_code(field, "dev-0", other, "state-unknown")
    attached = field.fleet.devices.sign(
        "dev-0", update.header, update.values, update.counts, public_digest=bytes(16),
        public=field.fleet.prepared.method.init_state().public.to_bytes(),
    )  # fmt: skip
    refused_by_code(field, "dev-0", attached, "malformed")


def test_a_replayed_round(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    first = field.fleet.update("dev-0")
    for name in field.fleet.names:
        field.deliver(name, first.data if name == "dev-0" else field.fleet.update(name).data)
    assert field.plan.round == 2
    before = field.state()
    field.offer("dev-0", first.data, round=2)  # as if it were an update of the open round
    field.push("dev-0", first.data)
    (answer,) = field.answers("dev-0")
    assert (type(answer), answer.code, answer.round) == (Refused, "late", 2)
    assert field.state() == before
    relabelled = field.fleet.devices.sign("dev-0", first.header, first.values, first.counts, round=7)
    assert field.deliver("dev-0", relabelled.data).code == "late"
    assert field.state() == before


def test_an_update_under_another_devices_id(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    stolen = field.fleet.update("dev-0")
    refused_by_code(field, "dev-1", stolen, "bad-signature")
    own_key = field.fleet.devices.sign("dev-1", stolen.header, stolen.values, stolen.counts)
    refused_by_code(field, "dev-1", own_key, "bad-signature")
    assert isinstance(field.deliver("dev-1", field.fleet.update("dev-1").data), Ack)


def test_another_key_for_a_known_device(make_field: MakeField) -> None:
    field = make_field(min_devices=3)
    field.join("dev-0")
    thief = Identity.generate()
    before = field.state()
    for state, session in (("ready", 9), ("lost", 9), ("lost", 1)):
        field.send("dev-0", field.birth("dev-0", state=state, session=session, identity=thief), "state", thief)
    field.send("dev-0", Decline("tiny-0001", 1, "error", ""), identity=thief)
    field.run()
    assert field.state() == before
    assert field.refusals() == {"dev-0": {"bad-signature": 4}}
    (event,) = [e for e in iterate_events(field.events.path) if e["event"] == "refused"]
    assert (event["device"], event["code"], event["count"]) == ("dev-0", "bad-signature", 4)


def test_the_key_of_one_device_for_another(make_field: MakeField) -> None:
    """One board under two names would count twice in a round."""
    field = make_field(min_devices=3)
    field.join("dev-0")
    field.join("dev-1", identity=field.fleet.devices.identities["dev-0"])
    assert set(field.coordinator.present) == {"dev-0"}
    assert sum(counts["bad-signature"] for counts in field.refusals().values()) == 1
    field.join("dev-1")
    assert set(field.coordinator.present) == {"dev-0", "dev-1"}


def test_a_device_that_is_not_in_the_cohort(make_field: MakeField) -> None:
    field = make_field(min_devices=2)
    field.join("dev-0")
    field.join("dev-1")
    field.join("dev-2")
    plan = field.plan
    assert "dev-2" not in plan.cohort
    assert field.deliver("dev-2", field.fleet.devices.update("dev-2", plan).data).code == "not-in-cohort"


def test_an_offer_that_is_too_large(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    before = field.state()
    field.offer("dev-0", b"x", size=field.fleet.engine.checks.max_bytes + 1)
    (answer,) = field.answers("dev-0")
    assert (type(answer), answer.code) == (Refused, "malformed")
    field.push("dev-0", b"x")
    assert field.state() == before


def test_a_flood_of_chunks(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    before = field.state()
    rng = np.random.default_rng(0)
    for index in range(2000):
        blob = rng.bytes(3000)
        field.push("dev-1" if index % 2 else "dev-0", blob, [index % 3])
        if index % 100 == 0:
            field.run(steps=120)
    field.run(steps=200)
    assert field.state() == before
    counted = field.refusals()
    assert counted["dev-0"]["malformed"] == counted["dev-1"]["malformed"] == 999, "the last may be offered yet"
    assert field.kinds().count("refused") < 100
    assert field.coordinator._uploads._transfers._open == {}
    assert isinstance(field.deliver("dev-0", field.fleet.update("dev-0").data), Ack)


def test_chunks_of_wrong_content_only_cost_time(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    data = field.fleet.update("dev-0").data
    offer = field.offer("dev-0", data)
    poison = bytearray(next(split(b"\0" * len(data), CHUNK_BYTES, [0], digest=offer.digest)))
    field.links["dev-1"].publish(field.topics.chunk("dev-0"), bytes(poison))
    field.push("dev-0", data)
    field.run(1.5)
    assert field.answers("dev-0") == [Missing("tiny-0001", 1, offer.digest, ())]
    field.push("dev-0", data)
    assert [type(answer) for answer in field.answers("dev-0")] == [Ack]


def test_a_flood_of_wants_is_bounded(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    digest = field.plan.global_digest
    field.links["dev-1"].subscribe(field.topics.blob(digest))
    for _ in range(300):
        field.send("dev-0", Want(digest, 1024, ()))
        field.run(0.1, steps=4)
    field.send("dev-0", Want(bytes(32), 1024, ()))
    field.send("dev-0", Want(digest, 99, ()))
    field.send("dev-0", Want(digest, 1024, ((0, 5),)))  # as after a forged chunk: all of it, within the same bound
    field.run(1)
    frames = [d for d in field.inbox["dev-1"] if d.topic == field.topics.blob(digest)]
    assert len(frames) == 6
    assert field.refusals() == {"dev-0": {"malformed": 1}}


def test_headers_that_do_not_amount_to_the_tasks_mechanism(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    update = field.fleet.update("dev-0")
    header: UpdateHeader = update.header
    stds, norms = np.array(header.noise_stds), np.array(header.clip_norms)
    cases = {
        "less noise than its clip norms demand": {"noise_stds": tuple(stds / 2)},
        "larger clip norms than its noise allows": {"clip_norms": tuple(norms * 2)},
        "larger clip norms and noise than the task's": {"clip_norms": tuple(norms * 9), "noise_stds": tuple(stds * 9)},
        "one layer without noise": {"noise_stds": (0.0, stds[1])},
        "another multiplier": {"multiplier_server": header.multiplier_server * 2},
        "another split": {"noise_split": 2},
        "noise that drowns everything": {"noise_stds": tuple(stds * 100)},
    }
    for what, changes in cases.items():
        forged = field.fleet.devices.sign("dev-0", header, update.values, update.counts, **changes)
        answer = field.deliver("dev-0", forged.data)
        assert (type(answer), answer.code) == (Refused, "out-of-bounds"), what
    loud = field.fleet.devices.sign("dev-0", header, update.values * 3, update.counts)
    assert field.deliver("dev-0", loud.data).code == "out-of-bounds"
    assert field.fleet.store.updates(1) == []


def test_shapes_that_do_not_fit(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    update = field.fleet.update("dev-0")
    identity = field.fleet.devices.identities["dev-0"]
    for counts, stds in (([200, 52], update.header.noise_stds), ([100, 100, 56], (*update.header.noise_stds, 1.0))):
        header = UpdateHeader(
            **{
                **{name: getattr(update.header, name) for name in update.header.__dataclass_fields__},
                "value_count": sum(counts),
                "noise_stds": stds,
                "clip_norms": (0.1,) * len(stds),
            }
        )
        data = encode_update(header, update.values[: sum(counts)], counts=counts, identity=identity).data
        answer = field.deliver("dev-0", data)
        assert isinstance(answer, Refused)
        assert answer.code in ("wrong-shape", "out-of-bounds")
    assert field.fleet.store.updates(1) == []


def test_thousands_of_broken_messages_change_nothing(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    field.run()
    rng = random.Random(7)
    update = field.fleet.update("dev-0", advance=False)
    plan_bytes = field.hub.retained[field.topics.round]
    state_bytes = field.hub.retained[field.topics.state("dev-0")]
    identity = field.fleet.devices.identities["dev-0"]
    offered = Offer("tiny-0001", 1, hashlib.sha256(update.data).digest(), len(update.data))
    offer = encode_message(offered, identity, federation="default")
    seeds = [plan_bytes, state_bytes, offer, next(split(update.data, CHUNK_BYTES)), update.data, b"", b"HF", b"HC"]
    topics = [field.topics.state("dev-0"), field.topics.msg("dev-0"), field.topics.chunk("dev-0")]
    topics += [field.topics.state("dev-9"), field.topics.msg("dev-9"), field.topics.chunk("dev-9")]
    before = field.state()
    intruder = field.hub.link("intruder")
    intruder.open()
    for count in range(10_000):
        payload = mutated(rng.choice(seeds), rng)
        if payload in seeds:
            continue
        intruder.publish(rng.choice(topics), payload)
        if count % 30 == 0:
            field.run(steps=40)
    field.run(steps=100)
    assert field.state() == before
    counted = field.refusals()
    assert sum(counted["dev-0"].values()) > 1000
    assert sum(counted["unknown"].values()) > 1000
    assert set(counted) == {"dev-0", "unknown"}, "names of strangers are not collected"
    assert field.kinds().count("refused") < 200
    assert isinstance(field.deliver("dev-0", update.data), Ack)


def test_ten_thousand_broken_updates_that_are_properly_signed(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    rng = random.Random(8)
    update = field.fleet.update("dev-0", advance=False)
    public = field.fleet.prepared.method.init_state().public.to_bytes()
    attached = field.fleet.devices.sign("dev-0", update.header, update.values, update.counts, public=public)
    identity = field.fleet.devices.identities["dev-0"]
    checks, before = field.fleet.engine.checks, field.state()
    codes = set()
    for _ in range(10_000):
        body = mutated(rng.choice((update.data, attached.data))[:-64], rng)
        data = body + identity.sign(body)
        try:
            sent = CheckedUpdate("dev-0", data)
            checks.authenticate(sent, public_key=identity.public_key)
            checks.check(sent, field.plan)
        except Refusal as refusal:
            codes.add(refusal.code)
        else:
            codes.add("sound")  # changed bits of a value may be a sound update: it is the device's own word
    assert {"malformed", "out-of-bounds", "state-unknown", "sound"} <= codes
    assert field.state() == before


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few flipped, cut, doubled or inserted bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + rng.randint(1, 40)]
            case 2:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                changed[at:at] = changed[at : at + rng.randint(1, 40)]
    return bytes(changed)
