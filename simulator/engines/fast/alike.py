"""Plays the rounds of a chunk's clients. If they are alike, compiled code trains a group of them in one call and
releases their updates in another, and what they have in common is computed once, by the code of a single device.

The rows and the sum are those of one device after the other, to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hushfleet.aggregator.payloads.exact_sum import SCALE_BITS, SMALL
from hushfleet.aggregator.rounds.server_half import ServerRound
from hushfleet.array_api import Array
from hushfleet.edge_client.storage.declines import Declined
from hushfleet.edge_client.worker.metrics import own_metrics, tested_fields
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.errors import Malformed, PrivacyError
from hushfleet.learning.draws import Inputs
from hushfleet.learning.own_samples import LoadedSamples
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.local_round import LocalRound, OneClient, Trained
from hushfleet.methods.personal import Personal
from hushfleet.methods.privatize import Bounds
from hushfleet.methods.stages import ClipLayers, ClipWhole, Gaussian, LayerBounds, ScaleWhole
from hushfleet.methods.state import DeviceState, PublicState, RoundContext
from hushfleet.models.native.noise import begun, library
from hushfleet.models.native.release import Released, add_scaled
from hushfleet.privacy.noise import SeededNoise, stream_seed
from hushfleet.schema import pack
from hushfleet.simulator.cohort_store import ChargeKind, StateRow
from hushfleet.simulator.engines.fast.chunks import (
    ChunkAnswer,
    Client,
    ClientChunk,
    ClientRow,
    device_of,
    keeps_own,
    one_by_one,
    trainer_for,
)
from hushfleet.simulator.engines.fast.compiled_release import covers, released_rows
from hushfleet.simulator.engines.fast.device import OWN, committed
from hushfleet.simulator.engines.fast.partial_sum import PartialSum
from hushfleet.simulator.engines.fast.runtimes import compiled_addition
from hushfleet.simulator.engines.fast.sums import SummedRound
from hushfleet.wire.format.update import UpdateHeader, assembled, dither_key_of
from hushfleet.wire.format.update_values import Summed

_GROUP_BYTES = 1 << 20
"""About what the models of a group take: they stay in the cache."""
_KEY = msgspec.msgpack.encode("device")


class ClientKind(NamedTuple):
    """Clients with the same limits, charges and number of updates, and what they have in common.

    :param bounds: of the clipping; `stds`: of the noise.
    :param packed: the header before and after the device's name.
    :param line: the metrics.
    """

    context: RoundContext
    bounds: Bounds
    stds: Array
    charge: ChargeKind
    header: UpdateHeader
    packed: tuple[bytes, bytes]
    line: dict[str, object]

    @property
    def public(self) -> PublicState:
        """The state before the round."""
        return self.context.state.public

    def header_of(self, device: str) -> tuple[UpdateHeader, bytes]:
        """Returns the header of a device, and the blob without values."""
        header, (before, after) = object.__new__(UpdateHeader), self.packed
        header.__dict__.update(self.header.__dict__, device=device)  # nothing else is to be checked again
        return header, assembled(before + msgspec.msgpack.encode(device) + after, b"", b"", None)


def released_alike(chunk: ClientChunk) -> bool:
    """Returns whether the updates of a round may be clipped, noised and quantised as arrays.

    They may if all clients send the same entries, clipped and noised once, and if nothing that they keep depends on the
    sent values.
    """
    method, spec = chunk.run.method, chunk.run.spec
    stages, personal = method.parts.stages, type(method.parts.personal)
    if [type(stage) for stage in stages[:1]] not in ([ClipWhole], [ScaleWhole], [ClipLayers]) or len(stages) != 2:
        return False
    clip, noise = stages
    remembers = isinstance(clip, ClipLayers) and type(clip.bounds).remember is not LayerBounds.remember
    follows = personal.next_mask is not Personal.next_mask or personal.remember is not Personal.remember
    is_noised = isinstance(noise, Gaussian) and noise.beside is None and method.noise_multiplier(RoundTerms()) > 0
    plain = chunk.summed and not method.by_record and not method.server.weighs and spec.privacy.secure is None
    return plain and is_noised and not remembers and not follows and spec.wire.codec in ("quantized", "float32")


def train(chunk: ClientChunk) -> ChunkAnswer:
    """Trains the devices, or only does the rest of their round: clip, noise, encode, add."""
    run, plan = chunk.run, chunk.plan
    run.secure = None
    published = run.global_params(plan)
    server = ServerRound(run.method, run.method.split(published)[0], chunk.server)
    total = PartialSum(run.method.layout.size, server.weight, like=chunk.like) if chunk.summed else None
    together = None if total is None else clients_of(chunk, published, total)
    rows, size = list[ClientRow](), 1 if together is None else together.at_once
    for first in range(0, len(chunk.clients), size):
        clients = chunk.clients[first : first + size]
        found = None if together is None else together.rows(first, clients)
        rows += one_by_one(chunk, first, clients, published, total) if found is None else found
    secure = run.secure.total if isinstance(run.secure, SummedRound) else None
    return ChunkAnswer(rows, secure if total is None else total.sum)


def clients_of(chunk: ClientChunk, published: np.ndarray, total: PartialSum) -> AlikeClients | None:
    """Returns a chunk's clients if they can be played together: also their training then has nothing between two
    gradients, and their choices depend on no private state."""
    run, parts = chunk.run, chunk.run.method.parts
    alike = (
        not chunk.trained
        and not run.spec.asks(chunk.plan.round)
        and released_alike(chunk)
        and run.spec.continues is None
        and not run.spec.data_window_s
        and parts.own_training is None
        and type(parts.personal).choose is Personal.choose
        and type(parts.personal).begin is Personal.begin
        and not run.method.init_state().private
        and hasattr(run.gradient, "descend")
        and compiled_addition() is not None
    )
    return AlikeClients(chunk, published, total) if alike else None


@dataclass
class AlikeClients:
    """Plays groups of a chunk's clients.

    :param published: as for `DeviceRound.run`.
    :param total: takes the sum of their updates.
    """

    chunk: ClientChunk
    published: np.ndarray
    total: PartialSum
    _kinds: dict[Any, ClientKind] = field(default_factory=dict)

    @property
    def at_once(self) -> int:
        """The number of clients in a group."""
        return max(1, _GROUP_BYTES // (4 * self.chunk.run.method.layout.size))

    def rows(self, first: int, clients: Sequence[Client]) -> list[ClientRow] | None:
        """Plays clients; returns None, without any effect on the sum, if each must be played alone.

        :param first: the first client's number in the chunk.
        """
        began, run, plan = time.monotonic(), self.chunk.run, self.chunk.plan
        try:
            kinds = [self._kind(client) for client in clients]
            kind, keys = kinds[0], [dither_key_of(plan.task, plan.round, client.device) for client in clients]
            if any(each.stds is not kind.stds for each in kinds) or not covers(run.spec.wire, kind.bounds, kind.stds):
                return None
            trained = [self._local(client, each) for client, each in zip(clients, kinds, strict=True)]
            if not trained[0].in_one_call:
                return None
            ends, updates = self._descended(trained)
            mask = kind.public.mask if kind.public.keeps_any else None
            if mask is not None:
                updates[:, mask] = 0
            found = released_rows(
                run.spec.wire, kind.context, updates, kind.bounds, kind.stds, self._noise(clients), b"".join(keys), mask
            )
        except (PrivacyError, Declined, Malformed):
            return None  # only those who must decline, or send noise alone, do so
        if found is None or not self._added(found, kind.public):
            return None
        lines = [self._line(*each) for each in zip(clients, kinds, trained, ends, strict=True)]
        counts = kind.public.counts(run.method.layout)
        train_s, rows = float(f"{(time.monotonic() - began) / len(clients):.3f}"), list[ClientRow]()
        for place, (client, each, end, line) in enumerate(zip(clients, kinds, ends, lines, strict=True)):
            self.total.begin(first + place)
            header, data = each.header_of(client.device)
            size = self.total.coded_size(header, counts, partial(found.levels.__getitem__, place))
            state = self._state(client, each, end, sha256(data).digest())
            summed = Summed(header, found.measured[place], len(data) + size)
            rows.append(ClientRow(client.device, None, data, summed, state, line | {"train_s": train_s}))
        return rows

    def _kind(self, client: Client) -> ClientKind:
        """Returns the kind of a client; its own code finds that of the first one. Raises why it must decline."""
        carried = client.carried
        known = None if carried is None else (id(carried.totals), carried.participations)
        key = client.epsilon_limit, client.preference, known
        if key not in self._kinds:
            self._kinds[key] = self._kind_of_first(client)
        return self._kinds[key]

    def _kind_of_first(self, client: Client) -> ClientKind:
        method, store = self.chunk.run.method, device_of(self.chunk, client)
        round = DeviceRound(trainer_for(self.chunk, client, None), self.chunk.plan)
        charge, zeros = ChargeKind(round.charge, None), np.zeros(method.layout.size, np.float32)
        model, vectors = method.split(self.published)
        context = RoundContext(method.setting(round.terms), DeviceState(store.public), model, model, vectors=vectors)
        found = list[tuple[Bounds, Array]]()

        def release(context: RoundContext, values: Array, bounds: Any, stds: Array, *_: object) -> Array:
            found.append((bounds, stds))
            return values

        noised = method.privatize(context, zeros, SeededNoise(0, 0, 0), release)
        header = round.header(noised, context.state, store.public.counts(method.layout))
        name = _KEY + msgspec.msgpack.encode(client.device)
        before, after = pack(header).split(name)
        line = own_metrics(round, Trained(context, zeros, zeros, 0.0), noised, {}, train_s=0)
        return ClientKind(context, *found[0], charge, header, (before + _KEY, after), line)

    def _local(self, client: Client, kind: ClientKind) -> OneClient:
        """Returns the training of a client, before its first step."""
        run, state = self.chunk.run, kind.context.state
        if run.method.parts.reads_own:
            state = device_of(self.chunk, client).load_state(run.spec.task) or state
        samples = LoadedSamples(run.train(client.device), run.gradient, run.inference)
        number = run.spec.training_number(self.chunk.plan.round)
        local = LocalRound(run.method, state, self.published, kind.context.setting.terms, samples, number)
        order = SeededRandomness(self.chunk.seed, client.index).order(self.chunk.plan.round)
        inputs = Inputs(run.spec.model.dropout, run.spec.augment)
        return OneClient(local, run.method.training, inputs, order)

    def _descended(self, trained: Sequence[OneClient]) -> tuple[np.ndarray, np.ndarray]:
        """Trains; returns the models after it and their changes, float32 `[n, d]` each."""
        starts = [each.round.context.start for each in trained]
        ends, descents = np.stack(starts), [each.descent() for each in trained]
        updates = np.empty_like(ends)
        if any(each.batches for each in descents):
            losses = trained[0].gradient.descend(descents, ends)  # type: ignore[attr-defined]
            for each, loss, descent in zip(trained, losses.tolist(), descents, strict=True):
                each.loss_sum, each.seen = loss, sum(map(len, descent.batches))
        for update, end, start in zip(updates, ends, starts, strict=True):
            np.subtract(end, start, out=update)
        return ends, updates

    def _noise(self, clients: Sequence[Client]) -> np.ndarray:
        """Returns the streams of the clients' noise, as `NativeNoise` begins them."""
        seeds = [stream_seed(self.chunk.seed, client.index, self.chunk.plan.round) for client in clients]
        return begun(library(), np.array([seed.generate_state(2, np.uint64) for seed in seeds]))

    def _added(self, found: Released, public: PublicState) -> bool:
        """Adds the updates to the sum; returns False if their values are too large for it."""
        peaks = [max(each.peaks, default=0.0) for each in found.measured]
        if max(peaks) * 2.0**SCALE_BITS >= SMALL:
            return False
        added = np.zeros(found.values.shape[1], np.int64)
        add_scaled(added, found.values, 2.0**SCALE_BITS)
        shared = public.shared if public.keeps_any else None
        if shared is not None:
            sent, added = added, np.zeros(shared.size, np.int64)
            added[shared] = sent
        bound = int(sum(peaks) * 2.0**SCALE_BITS) + len(peaks)
        self.total.sum.add_total(added, len(peaks), shared, bound=bound)
        return True

    def _line(self, client: Client, kind: ClientKind, trained: OneClient, end: np.ndarray) -> dict[str, object]:
        """Returns the metrics of a client, but for the time that it took."""
        run = self.chunk.run
        tested = tested_fields(run.tested(client.device, end)) if self.chunk.evaluate else {}
        return kind.line | {"loss": trained.loss} | tested

    def _state(self, client: Client, kind: ClientKind, own: np.ndarray, digest: bytes) -> StateRow:
        """Returns what the client keeps."""
        kept = keeps_own(self.chunk, client)
        return committed(
            client.index,
            client.carried,
            self.chunk.run.slots,
            {OWN: own} if kept else {},
            round=self.chunk.plan.round,
            charge=kind.charge,
            digest=digest,
            participations=kind.public.participations + 1,
            left_out=not kept,
        )
