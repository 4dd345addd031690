"""Those who should not be there: a stranger who tampers with copies of messages, and a member who sends bad updates.

Both know all that a broker without an access list tells anyone. Neither speaks on the retained topics of others: who
may write there can keep devices and aggregator apart for ever, which no protocol helps against.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from chaos.plan import Tampering
from chaos.tap import Listener
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import WireError
from hushfleet.simulator.run_folder import Simulation
from hushfleet.simulator.world.live import FEDERATION
from hushfleet.wire.format.chunks import parse_frame, split
from hushfleet.wire.format.messages import (
    Birth,
    Decline,
    Message,
    Offer,
    RoundPlan,
    ServerState,
    Want,
    decode_message,
    encode_message,
)
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.format.update import UpdateHeader, attach_public
from hushfleet.wire.format.update_values import encode_masked, encode_update

_SHARE = 0.15  # of messages that are tampered with
_MOST = 60  # then the stranger goes away: who forges for ever can hold up a transfer for ever
_HELD = 6
_PAUSE_S = 0.02


class Trespasser(Listener):
    """One who makes messages up, and remembers which."""

    def __init__(self, name: str, filters: list[str]) -> None:
        super().__init__(name, filters)
        self.forged: set[bytes] = set()


class Stranger(Trespasser):
    """Repeats, reorders, cuts and forges copies of updates, offers, answers and models on their way.

    :param rng: of its own; its choices depend on it and on what comes.
    """

    def __init__(self, tampering: tuple[Tampering, ...], rng: random.Random) -> None:
        topics = Topics(FEDERATION)
        everyone = topics.down("x").replace("/x/", "/+/")
        anything = topics.blob(bytes(32)).rpartition("/")[0] + "/+"
        super().__init__("stranger", [topics.all_msgs, topics.all_chunks, everyone, anything])
        self._tampering = tampering
        self._rng = rng
        self._left = _MOST
        self._held: list[tuple[str, bytes]] = []
        self._own: set[tuple[str, bytes]] = set()

    def hear(self, topic: str, payload: bytes) -> None:
        if self._left == 0 or self._rng.random() >= _SHARE or payload in self.forged or (topic, payload) in self._own:
            return
        self._left -= 1
        how = self._rng.choice(self._tampering)
        if how == "repeat":
            self._repeat(topic, payload)
        elif how == "reorder":
            self._held.append((topic, payload))
            if len(self._held) >= _HELD:
                self._rng.shuffle(self._held)
                for each in self._held:
                    self._repeat(*each)
                self._held.clear()
        elif how == "truncate":
            self._forge(topic, payload[: self._rng.randrange(len(payload))] if payload else b"\0")
        else:
            self._forge(topic, self._altered(payload))

    def _repeat(self, topic: str, payload: bytes) -> None:
        self._own.add((topic, payload))
        for _ in range(self._rng.choice([1, 1, 2])):
            self.say(topic, payload)

    def _forge(self, topic: str, payload: bytes) -> None:
        self.forged.add(payload)
        self.say(topic, payload)

    def _altered(self, payload: bytes) -> bytes:
        """A chunk with other bytes and a right checksum; any other message with a wrong byte."""
        try:
            chunk = parse_frame(payload)
        except WireError:
            place = self._rng.randrange(max(1, len(payload)))
            return payload[:place] + bytes([255 - payload[place]]) + payload[place + 1 :] if payload else b"\0"
        blob = self._rng.randbytes(chunk.size)
        (frame,) = split(blob, chunk.chunk_bytes, (chunk.index,), digest=chunk.digest)
        return frame


class HostileMember(Trespasser):
    """A device of the cohort that answers each plan with bad updates, all signed, and then declines the round.

    :param device: its name; its store gives it a key as any device has one.
    """

    def __init__(self, simulation: Simulation, device: str, rng: random.Random) -> None:
        topics = Topics(FEDERATION)
        super().__init__(device, [topics.server, topics.round, topics.all_chunks])
        with DeviceStore(simulation.folder.device(device).store, device=device) as store:
            self._identity = store.identity
        self._spec = simulation.prepared.spec
        self._method = simulation.prepared.method
        self._device = device
        self._rng = rng
        self._server_key: bytes | None = None
        self._heard: dict[bytes, list[bytes]] = {}
        self._others: list[bytes] = []
        self._plans: SimpleQueue[RoundPlan | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._answer_plans, name=device, daemon=True)
        self.sent = 0

    def attach(self, url: str) -> None:
        super().attach(url)
        self._thread.start()

    def close(self) -> None:
        super().close()
        self._plans.put(None)

    def greet(self) -> None:
        birth = Birth(
            device=self._device, session=1, state="ready", board="generic-x86", version="0",
            public_key=self._identity.public_key, memory_mib=1024,
        )  # fmt: skip
        self.say(self.topics.state(self._device), self._signed(birth), retain=True)

    def hear(self, topic: str, payload: bytes) -> None:
        try:
            parsed = self.topics.parse(topic)
            if parsed.kind == "server":
                server = decode_message(payload, federation=FEDERATION)
                self._server_key = server.public_key if isinstance(server, ServerState) else None
            elif parsed.kind == "chunk" and parsed.device != self._device:
                self._overhear(payload)
            elif parsed.kind == "round" and self._server_key is not None:
                plan = decode_message(payload, federation=FEDERATION, public_key=self._server_key)
                if isinstance(plan, RoundPlan) and plan.phase == "open" and self._takes_part(plan):
                    self._plans.put(plan)
        except WireError:
            return

    def _takes_part(self, plan: RoundPlan) -> bool:
        """The plan of secure aggregation names nobody; all of the membership list are drawn."""
        return plan.secure is not None or self._device in plan.cohort

    def _overhear(self, payload: bytes) -> None:
        """Keeps small updates of others, to replay them as its own."""
        chunk = parse_frame(payload)
        frames = self._heard.setdefault(chunk.digest, [])
        frames.append(payload)
        if len({parse_frame(frame).index for frame in frames}) == chunk.count and len(self._others) < 4:
            ordered = {parse_frame(frame).index: parse_frame(frame).payload for frame in frames}
            self._others.append(b"".join(bytes(ordered[index]) for index in range(chunk.count)))

    def _answer_plans(self) -> None:
        for plan in iter(self._plans.get, None):
            if not self._plans.empty():
                continue  # there is a newer one
            for size, data in self._bad_updates(plan):
                self._send(plan, data, size)
                time.sleep(_PAUSE_S)
            for message in (
                Want(self._rng.randbytes(32), 1 << 20, ()),
                Decline(plan.task, max(0, plan.round - 1), "error", "a round that is over"),
                Decline(plan.task, plan.round, "busy", "no wish"),
            ):
                self._tell(message)

    def _bad_updates(self, plan: RoundPlan) -> Iterator[tuple[int, bytes]]:
        """(announced size, bytes): each must be refused."""
        layers = len(self._spec.model.layout.layers)
        made: list[Callable[[], bytes]] = [
            lambda: self._update(plan, round=plan.round + 1),
            lambda: self._update(plan, round=0),
            lambda: self._update(plan, task="another-task-1"),
            lambda: self._update(plan, multiplier_server=0.0),
            lambda: self._update(plan, noise_split=1 << 20),
            lambda: self._update(plan, noise_stds=(0.0,) * layers),
            lambda: self._update(plan, clip_norms=(math.inf,) * layers),
            lambda: self._update(plan, public_digest=self._rng.randbytes(16)),
            lambda: self._update(plan, loudness=1e6),
            lambda: self._update(plan)[:-1] + b"\0",
            lambda: self._rng.randbytes(5000),
            *((lambda data=data: data) for data in self._others),
            *((lambda data=data: attach_public(data, None, identity=self._identity)) for data in self._others),
        ]
        self._rng.shuffle(made)
        for make in made[:8]:
            data = make()
            yield len(data), data
        yield 1 << 30, self._rng.randbytes(2000)  # more is announced than a device may send

    def _update(self, plan: RoundPlan, *, loudness: float = 50.0, **lies: Any) -> bytes:
        """A well-formed update with a lie in its header, or values that are far above what the header says.

        Of secure aggregation, whose values nobody can judge, there are too few of them.
        """
        layout = self._spec.model.layout
        counts = [span.size for span in layout.layers]
        ones = (1.0,) * len(counts)
        header = UpdateHeader(
            task=plan.task,
            round=plan.round,
            device=self._device,
            codec=self._spec.wire.codec,
            value_count=layout.size,
            steps=() if plan.secure else ones,
            noise_stds=ones,
            clip_norms=ones,
            public_digest=self._method.init_state().public.digest(),
            rounds_charged=plan.round,
            epsilon_server=1.0,
            multiplier_server=self._spec.privacy.noise_multiplier,
            noise_split=plan.noise_split,
        )
        header, values = replace(header, **lies), np.full(layout.size, loudness, np.float32)
        if plan.secure:
            return encode_masked(header, values[1:].tobytes(), identity=self._identity)
        return encode_update(header, values, counts=counts, identity=self._identity).data

    def _send(self, plan: RoundPlan, data: bytes, size: int) -> None:
        frames = list(split(data, self._spec.wire.chunk_bytes))
        self.forged.update(frames)
        self.sent += 1
        digest = parse_frame(frames[0]).digest
        self._tell(Offer(plan.task, plan.round, digest, size))
        self._rng.shuffle(frames)
        for frame in frames:
            self.say(self.topics.chunk(self._device), frame)

    def _tell(self, message: Message) -> None:
        self.say(self.topics.msg(self._device), self._signed(message))

    def _signed(self, message: Message) -> bytes:
        return encode_message(message, self._identity, federation=FEDERATION)
