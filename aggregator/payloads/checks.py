"""Checks each update before it may change anything.

The checks have two purposes. First, the sums must stay correct for any input: identity, round, shape, finite values,
and a norm that fits the clip norm and noise that the update itself declares. Second, the reported privacy must be
true: the declared clip norms and noise must give the task's mechanism, and an update with a norm below its declared
noise is refused, because a device without noise must not count as a protected one.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import numpy as np

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate, Refusal
from hushfleet.aggregator.payloads.decoding import decode, spread
from hushfleet.aggregator.payloads.norm_check import check_bounded, check_noised
from hushfleet.aggregator.storage.store import AggregatorStore, UpdateRow
from hushfleet.errors import BadSignature, StoreError, WireError
from hushfleet.methods.cost import Cost, RoundTerms
from hushfleet.methods.question import RoundRules
from hushfleet.methods.state import PublicState
from hushfleet.methods.task_method import TaskMethod
from hushfleet.privacy.charge import Charge
from hushfleet.secure.committee import MOST_MEMBERS
from hushfleet.wire.format.codecs import codec_of, steps_for
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.spec import TaskSpec
from hushfleet.wire.format.update import UpdateHeader, max_update_bytes, read_public
from hushfleet.wire.format.update_values import SIGNED, UpdateFormat

_TOLERANCE = 1e-6
MOST_PARTS = 1 + MOST_MEMBERS // 8
"""A masked update is at most this many times as long as its values: each member that may be missing costs a part."""


class Agreed(NamedTuple):
    """The terms that a round sets for every device, and what they cost each."""

    terms: RoundTerms
    cost: Cost
    charge: Charge


class UpdateChecks:
    """The checks of one task's updates. Each raises `Refusal`.

    :param store: holds the public states of the devices.
    :param update_format: a format other than the field's is FOR SIMULATION ONLY.
    """

    def __init__(
        self, spec: TaskSpec, method: TaskMethod, store: AggregatorStore, update_format: UpdateFormat = SIGNED
    ) -> None:
        self.spec = spec
        self.method = method
        self.update_format = update_format
        self.layout = spec.model.layout
        self._store = store
        secure, values = spec.privacy.secure, self.layout.size
        values = values if secure is None else secure.length(values) * MOST_PARTS
        self.max_bytes = max_update_bytes(values)
        self._last_read = self.newcomer = method.init_state().public
        self._last_sent: tuple[np.ndarray, np.ndarray, tuple[int, ...]] | None = None
        self._agreed: Agreed | None = None
        self._last_declared: tuple[object, ...] = ()  # what `_check_noise` has found right

    def agreed(self, plan: RoundPlan) -> Agreed:
        """Returns the terms of a plan with their cost and charge, which are computed once for all its updates."""
        terms = terms_of(plan)
        if self._agreed is None or self._agreed.terms != terms:
            self._agreed = Agreed(terms, self.method.cost(terms), self.method.charge(terms))
        return self._agreed

    def held(self, device: str) -> PublicState:
        """Returns the public state that the aggregator holds for a device."""
        stored = self._store.public_state(device)
        return self.newcomer if stored is None else self.read_state(stored)

    def read_state(self, data: bytes) -> PublicState:
        """Reads a device's public state; most have that of the device before, or its mask. Raises `Malformed`."""
        if data != self._last_read.to_bytes():
            self._last_read = PublicState.from_bytes(data, size=self.layout.size, like=self._last_read)
        return self._last_read

    def sent_by(self, public: PublicState) -> np.ndarray:
        """Returns the entries that a device sends in this state, bool `[d]`."""
        shared: np.ndarray = ~public.mask
        return shared

    def state_after(self, public: PublicState, values: np.ndarray) -> PublicState:
        """Returns the public state after an update with these values, float32 `[d]`."""
        return self.method.advance_public(public, values)

    def counts(self, shared: np.ndarray) -> tuple[int, ...]:
        """Counts the entries of `shared`, bool `[d]`, that are True in each layer."""
        return tuple(int(np.count_nonzero(shared[s.start : s.stop])) for s in self.layout.layers)

    def authenticate(self, update: CheckedUpdate, *, public_key: bytes | None) -> None:
        """Reads the header of an update that its device signed.

        A refusal here proves nothing about the device, because anyone may have sent the bytes: none is final.
        """
        device, data = update.device, update.data
        if public_key is None:
            raise Refusal("unknown-device", f"{device} was never seen; it must announce itself first", final=False)
        if len(data) > self.max_bytes:
            raise Refusal("malformed", f"{len(data)} bytes are above the cap of {self.max_bytes}", final=False)
        try:
            header, digest = self.update_format.authenticate(data, public_key=public_key)
        except BadSignature as error:
            raise Refusal("bad-signature", str(error), final=False) from error
        except WireError as error:
            raise Refusal("malformed", str(error), final=False) from error
        if header.device != device:
            raise Refusal("bad-signature", f"the update names {header.device}, but {device} sent it", final=False)
        update.header, update.task, update.round, update.digest = header, header.task, header.round, digest

    def check(self, update: CheckedUpdate, plan: RoundPlan) -> None:
        """Checks an authenticated update of a plain sum, decodes it, and computes the row that the store keeps."""
        header = update.header
        bound = self._check_declared(header, plan)
        self._find_state(update, plan)
        self._find_sent(update, update.before)
        counts = update.counts
        if header.value_count != sum(counts):
            raise Refusal("wrong-shape", f"{header.value_count} values, but the mask leaves {sum(counts)} to be sent")
        decode(update, update_format=self.update_format)
        if any(header.noise_stds):
            check_noised(update, bound=bound, layers=self.layout.layers)
        else:
            rounding = self.spec.wire.relative_step / 2
            check_bounded(update, bound=bound, largest=self.method.reach, rounding=rounding, layers=self.layout.layers)
        update.after = self._after(update)
        update.row = self._row(update)

    def _after(self, update: CheckedUpdate) -> PublicState:
        if update.summed is None:
            return self.state_after(update.before, update.values)
        after = update.summed.after
        return update.before.after(update.before.mask) if after is None else self.read_state(after)

    def stored(self, device: str, round: int) -> CheckedUpdate:
        """Reads an accepted update of the open round again. Raises `StoreError` if its bytes are lost."""
        found, row = self._store.update_data(round, device), self._store.device(device)
        if found is None or row is None:
            raise StoreError(f"the update of {device} in round {round} has lost its bytes")
        update = CheckedUpdate(device, found[0])
        self.authenticate(update, public_key=row.public_key)
        self._find_sent(update, self.read_state(found[1]))
        values = self.update_format.values(update.header, update.data, counts=update.counts)
        update.values = spread(values, update.shared)
        return update

    def check_terms(self, header: UpdateHeader, plan: RoundPlan) -> None:
        """Checks the parts of a header that do not depend on the values: codec, layers, the round's noise multiplier,
        and a report within its bounds."""
        layers = len(self.layout.layers)
        if header.codec != self.spec.wire.codec:
            raise Refusal("malformed", f"codec {header.codec}, but the task says {self.spec.wire.codec}")
        if len(header.noise_stds) != layers or header.value_count > self.layout.size:
            raise Refusal(
                "wrong-shape",
                f"{header.value_count} values in {len(header.noise_stds)} layers; the model has "
                f"{self.layout.size} in {layers}",
            )
        agreed, multiplier = self.agreed(plan), header.multiplier_server
        charge = agreed.charge
        fits = math.isclose(multiplier, charge.noise_multiplier, rel_tol=_TOLERANCE)
        most = (self.method.max_preference or 0.0) * charge.noise_multiplier
        chosen = 0 < multiplier <= most * (1 + _TOLERANCE)
        if header.noise_split != charge.noise_split or not (fits or chosen):
            above = f", and devices may choose up to {most:g}" if most else ""
            raise Refusal(
                "out-of-bounds",
                f"noise multiplier {multiplier:g} split by {header.noise_split}; the round has "
                f"{charge.noise_multiplier:g} split by {charge.noise_split}{above}",
            )
        limit = agreed.cost.report_limit
        if any(abs(number) > limit * (1 + _TOLERANCE) for number in header.report):
            raise Refusal("out-of-bounds", f"a report of {max(map(abs, header.report)):g}; the round allows {limit:g}")

    def _check_declared(self, header: UpdateHeader, plan: RoundPlan) -> float:
        """Checks the header against the task: codec, layers, and clip norms and noise that give its mechanism.

        Returns the bound on the norm of the whole signal, in units of the noise if there is any.
        """
        self.check_terms(header, plan)
        agreed, multiplier = self.agreed(plan), header.multiplier_server
        cost = agreed.cost
        if agreed.charge.unit == "record":
            if any(header.noise_stds):
                raise Refusal("out-of-bounds", "noise on the update is declared, but the task noises gradients")
            return math.inf
        if multiplier > 0:
            of_values = cost.values_multiplier if cost.reports else multiplier
            self._check_noise(header, of_values, cost.bound)
            return (1 + _TOLERANCE) / of_values
        if any(header.noise_stds):
            raise Refusal("out-of-bounds", "noise is declared, but the task adds none")
        if max(header.clip_norms) > cost.bound * (1 + _TOLERANCE):
            raise Refusal(
                "out-of-bounds", f"clip norm {max(header.clip_norms):g}, but the round clips to {cost.bound:g}"
            )
        return cost.bound

    def _check_noise(self, header: UpdateHeader, multiplier: float, clip_norm: float) -> None:
        """Checks clip norms and noise: whole-vector clipping has one bound for all layers; layered bounds add squared.

        :param multiplier: noise multiplier of the values only.
        """
        declared = header.clip_norms, header.noise_stds, header.steps, multiplier, clip_norm
        if declared == self._last_declared:
            return
        norms, stds = np.array(header.clip_norms), np.array(header.noise_stds)
        limit = clip_norm * (1 + _TOLERANCE)
        if not (stds > 0).all():
            raise Refusal("out-of-bounds", "a layer without noise is declared, but the task demands noise")
        with np.errstate(over="ignore"):
            whole = norms.max() <= limit and norms.max() * multiplier <= stds.min() * (1 + _TOLERANCE)
            layered = (
                math.sqrt(np.square(norms).sum()) <= limit
                and multiplier * math.sqrt(np.square(norms / stds).sum()) <= 1 + _TOLERANCE
            )
        if not (whole or layered):
            raise Refusal(
                "out-of-bounds",
                f"clip norms {_range(norms)} with noise {_range(stds)} do not make the noise multiplier "
                f"{multiplier:g} at clip norm {clip_norm:g}",
            )
        loudest = limit * multiplier * math.sqrt(len(stds)) * (1 + _TOLERANCE)
        if stds.max() > loudest:
            raise Refusal("out-of-bounds", f"noise {_range(stds)} is louder than the task's {loudest:g}")
        allowed = steps_for(self.spec.wire, noise_stds=header.noise_stds, layer_rms=())
        if any(step > most * (1 + _TOLERANCE) for step, most in zip(header.steps, allowed, strict=True)):
            raise Refusal("out-of-bounds", "a quantisation step, or a sign's magnitude, is above what the task allows")
        self._last_declared = declared

    def _find_sent(self, update: CheckedUpdate, public: PublicState) -> None:
        """Finds the entries that a device sends in this state; devices with one mask share the array."""
        if self._last_sent is None or self._last_sent[0] is not public.mask:
            shared = self.sent_by(public)
            self._last_sent = public.mask, shared, self.counts(shared)
        _, update.shared, update.counts = self._last_sent

    def _find_state(self, update: CheckedUpdate, plan: RoundPlan) -> None:
        """Finds the device's public state: the held one, or the attached one that the header names."""
        update.before = held = self.held(update.device)
        if held.digest() == update.header.public_digest:
            return
        try:
            section = read_public(update.data)
            if section is None:
                raise Refusal(
                    "state-unknown",
                    "the aggregator holds another public state of this device; attach it to the update",
                    final=False,
                )
            public = self.read_state(section)
        except WireError as error:
            raise Refusal("malformed", f"the attached public state does not parse: {error}") from error
        if public.digest() != update.header.public_digest:
            raise Refusal("malformed", "the attached public state is not the one that the header names")
        if public.participations >= plan.round:
            reason = f"{public.participations} participations are not possible before round {plan.round}"
            raise Refusal("malformed", reason)
        update.before = public

    def _row(self, update: CheckedUpdate) -> UpdateRow:
        """Returns the row for the store: the part of the squared norm that noise and codec do not explain is signal."""
        header, counts = update.header, update.counts
        codec = codec_of(header.codec)
        noise = math.fsum(k * std**2 for k, std in zip(counts, header.noise_stds, strict=True))
        steps = header.steps or (0.0,) * len(counts)
        added = math.fsum(
            k * codec.added_variance(step, std) for k, std, step in zip(counts, header.noise_stds, steps, strict=True)
        )
        return UpdateRow(
            device=update.device,
            digest=hashlib.sha256(update.data).digest(),
            payload_digest=update.digest,
            size=self.update_format.sent_bytes(update.data),
            shared=sum(counts),
            signal_square=math.fsum(update.squares) - noise - added if codec.keeps_norm else 0.0,
            noise_square=noise,
            noise_variance=math.fsum(2 * k * std**4 for k, std in zip(counts, header.noise_stds, strict=True)),
        )


class AnswerChecks(UpdateChecks):
    """The checks of answers to a question: answers have their own vectors, and do not change a device's public state.

    :param training: the checks of the same task's updates.
    """

    def __init__(self, rules: RoundRules, training: UpdateChecks, store: AggregatorStore) -> None:
        super().__init__(rules.spec, rules.method, store, training.update_format)
        self._training = training
        self.max_bytes = training.max_bytes = max(self.max_bytes, training.max_bytes)

    def held(self, device: str) -> PublicState:
        return self._training.held(device)

    def read_state(self, data: bytes) -> PublicState:
        return self._training.read_state(data)

    def sent_by(self, public: PublicState) -> np.ndarray:
        return np.ones(self.layout.size, bool)

    def state_after(self, public: PublicState, values: np.ndarray) -> PublicState:
        return public


def terms_of(plan: RoundPlan) -> RoundTerms:
    """Returns the terms that the round sets for every device; only a device itself knows its own preference."""
    return RoundTerms(plan.noise_split, plan.controls)


def _range(values: np.ndarray) -> str:
    return f"{values.min():.4g} to {values.max():.4g}"
