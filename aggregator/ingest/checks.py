"""The checks that an update passes before it may change anything.

Two purposes. The sums must stay sound whatever is sent: identity, round, shape, finite values, and a norm
that fits the clip norm and noise that the update itself declares. And the privacy that is printed must be
what was done: the declared clip norms and noise must amount to the task's mechanism, and an update that is
quieter than its own noise is refused, since a device without noise must not be counted as a protected one.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hushfleet.aggregator.ingest.decoding import Decoded, Refusal
from hushfleet.aggregator.ingest.norm_test import check_bounded, check_noised
from hushfleet.aggregator.storage.store import AggregatorStore, UpdateRow
from hushfleet.config.spec import TaskSpec
from hushfleet.errors import BadSignature, WireError
from hushfleet.methods.state import PublicState, RoundTerms
from hushfleet.methods.task_method import TaskMethod
from hushfleet.secure.committee import MOST_MEMBERS
from hushfleet.wire.format.forms import added_variance, steps_for
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import SIGNED, UpdateFormat, UpdateHeader, max_update_bytes, read_public

_TOLERANCE = 1e-6
MOST_PARTS = 1 + MOST_MEMBERS // 8
"""A masked update is so many times as long as its values, at most: each member that may be missing costs a part."""


@dataclass(frozen=True)
class Admitted:
    """An authenticated update of the open round with a sound header, not decoded yet.

    :param data: the signed blob.
    :param payload: the digest of its header and values.
    :param shared: bool `[d]`, True where a value was sent.
    :param public: the device's public state before this update.
    :param counts: how many values were sent of each layer.
    :param reach: the most that the norm of the whole signal can be; where there is noise, in units of it.
    """

    header: UpdateHeader
    data: bytes
    payload: bytes
    shared: np.ndarray
    public: PublicState
    counts: tuple[int, ...]
    reach: float = math.inf


@dataclass(frozen=True)
class Verdict:
    """What became of an update.

    :param code: `accepted`, `duplicate`, or a refusal code of docs/wire.md.
    :param acknowledged: the update is in the store, from this call or an earlier one.
    :param faults: where this is the round's first refusal for which the device itself is to blame: in how many rounds
        that has happened.
    :param held: SHA-256 of the update that the store has of this device and round.
    :param of: what the device had sent: its update, or its answer as a member of a committee.
    """

    code: str
    reason: str = ""
    acknowledged: bool = False
    header: UpdateHeader | None = None
    counts: tuple[int, ...] = ()
    snr_db: float | None = None
    faults: int = 0
    held: bytes | None = None
    of: Literal["update", "answer"] = "update"


class UpdateChecks:
    """The checks of one task's updates; each raises `Refusal`.

    :param update_format: another than the field's FOR SIMULATION ONLY.
    """

    def __init__(self, spec: TaskSpec, method: TaskMethod, update_format: UpdateFormat = SIGNED) -> None:
        self.spec = spec
        self.method = method
        self.update_format = update_format
        self.layout = spec.model.layout
        values = self.layout.size * (MOST_PARTS if spec.privacy.secure is not None else 1)
        self.max_bytes = max_update_bytes(values)
        self.newcomer = method.init_state().public

    def held(self, store: AggregatorStore, device: str) -> PublicState:
        """The public state that the aggregator holds of a device."""
        stored = store.public_state(device)
        return self.newcomer if stored is None else PublicState.from_bytes(stored, size=self.layout.size)

    def counts(self, shared: np.ndarray) -> tuple[int, ...]:
        """How many entries of `shared`, bool `[d]`, are True in each layer."""
        return tuple(int(np.count_nonzero(shared[s.start : s.stop])) for s in self.layout.layers)

    def authenticate(self, device: str, data: bytes, *, public_key: bytes | None) -> tuple[UpdateHeader, bytes]:
        """The header, and the digest of the payload, of an update that `device` signed.

        A refusal here says nothing about the device, since anyone may have sent the bytes: none is final.
        """
        if public_key is None:
            raise Refusal("unknown-device", f"{device} was never seen; it must announce itself first", final=False)
        if len(data) > self.max_bytes:
            raise Refusal("malformed", f"{len(data)} bytes are above the cap of {self.max_bytes}", final=False)
        try:
            header, payload = self.update_format.authenticate(data, public_key=public_key)
        except BadSignature as error:
            raise Refusal("bad-signature", str(error), final=False) from error
        except WireError as error:
            raise Refusal("malformed", str(error), final=False) from error
        if header.device != device:
            raise Refusal("bad-signature", f"the update names {header.device}, but {device} sent it", final=False)
        return header, payload

    def check_header(
        self, header: UpdateHeader, data: bytes, *, payload: bytes, plan: RoundPlan, held: PublicState
    ) -> Admitted:
        """What can be checked without the values.

        :param data: authenticated.
        :param payload: its digest, as `authenticate` gives it.
        :param held: the public state that the aggregator holds of the device.
        """
        reach = self._check_declared(header, plan)
        public = held
        if held.digest() != header.public_digest:
            public = self._attached(data, header)
            if public.participations >= plan.round:
                raise Refusal(
                    "malformed", f"{public.participations} participations are not possible before round {plan.round}"
                )
        shared = ~public.mask
        counts = self.counts(shared)
        if header.value_count != sum(counts):
            raise Refusal("wrong-shape", f"{header.value_count} values, but the mask leaves {sum(counts)} to be sent")
        return Admitted(header, data, payload, shared, public, counts, reach)

    def check_terms(self, header: UpdateHeader, plan: RoundPlan) -> None:
        """What every header must say, whatever its values are: codec, layers, the round's noise multiplier, a report
        within its bounds."""
        layers = len(self.layout.layers)
        if header.codec != self.spec.wire.codec:
            raise Refusal("malformed", f"codec {header.codec}, but the task says {self.spec.wire.codec}")
        if len(header.noise_stds) != layers or header.value_count > self.layout.size:
            raise Refusal(
                "wrong-shape",
                f"{header.value_count} values in {len(header.noise_stds)} layers; the model has "
                f"{self.layout.size} in {layers}",
            )
        terms = RoundTerms(plan.noise_split, plan.controls)
        charge, multiplier = self.method.charge(terms), header.multiplier_server
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
        limit = self.method.cost(terms).report_limit
        if any(abs(number) > limit * (1 + _TOLERANCE) for number in header.report):
            raise Refusal("out-of-bounds", f"a report of {max(map(abs, header.report)):g}; the round allows {limit:g}")

    def check_values(self, admitted: Admitted, decoded: Decoded) -> UpdateRow:
        """Holds the values to what the header declares of them; gives what the store keeps of the update."""
        header, layers = admitted.header, self.layout.layers
        if any(header.noise_stds):
            check_noised(header, decoded, admitted.counts, reach=admitted.reach, layers=layers)
        else:
            check_bounded(
                header,
                decoded,
                bound=admitted.reach,
                largest=self.method.reach,
                rounding=self.spec.wire.relative_step / 2,
                layers=layers,
            )
        sent_bytes = self.update_format.sent_bytes(admitted.data)
        return row_of(admitted, math.fsum(decoded.squares), sent_bytes=sent_bytes)

    def _check_declared(self, header: UpdateHeader, plan: RoundPlan) -> float:
        """The header against the task: codec, layers, and clip norms and noise that make its mechanism.

        Gives `Admitted.reach`.
        """
        terms = RoundTerms(plan.noise_split, plan.controls)
        charge, cost, multiplier = self.method.charge(terms), self.method.cost(terms), header.multiplier_server
        self.check_terms(header, plan)
        if charge.unit == "record":
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
        """Whole-vector clipping gives every layer the same bound; layered bounds compose by their squares.

        :param multiplier: of the values' own noise.
        """
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
                f"clip norms {_shown(norms)} with noise {_shown(stds)} do not make the noise multiplier "
                f"{multiplier:g} at clip norm {clip_norm:g}",
            )
        loudest = limit * multiplier * math.sqrt(len(stds)) * (1 + _TOLERANCE)
        if stds.max() > loudest:
            raise Refusal("out-of-bounds", f"noise {_shown(stds)} is louder than the task's {loudest:g}")
        allowed = steps_for(self.spec.wire, noise_stds=header.noise_stds, layer_rms=())
        if any(step > most * (1 + _TOLERANCE) for step, most in zip(header.steps, allowed, strict=True)):
            raise Refusal("out-of-bounds", "a quantisation step, or a sign's magnitude, is above what the task allows")

    def _attached(self, data: bytes, header: UpdateHeader) -> PublicState:
        """The public state that travels with the update, if its digest is the one in the header."""
        try:
            section = read_public(data)
            if section is None:
                raise Refusal(
                    "state-unknown", "another public state of this device is held; send it along", final=False
                )
            public = PublicState.from_bytes(section, size=self.layout.size)
        except WireError as error:
            raise Refusal("malformed", f"the attached public state does not parse: {error}") from error
        if public.digest() != header.public_digest:
            raise Refusal("malformed", "the attached public state is not the one that the header names")
        return public


def row_of(admitted: Admitted, square: float, *, sent_bytes: int) -> UpdateRow:
    """:param square: squared norm of all values; what noise and codec do not explain of it is signal."""
    header, counts = admitted.header, admitted.counts
    noise = math.fsum(k * std**2 for k, std in zip(counts, header.noise_stds, strict=True))
    steps = header.steps or (0.0,) * len(counts)
    added = math.fsum(
        k * added_variance(header.codec, step=step, noise_std=std)
        for k, std, step in zip(counts, header.noise_stds, steps, strict=True)
    )
    return UpdateRow(
        device=header.device,
        digest=hashlib.sha256(admitted.data).digest(),
        payload_digest=admitted.payload,
        size=sent_bytes,
        shared=sum(counts),
        # signs are all of one size, which says nothing of the signal
        signal_square=0.0 if header.codec == "one-bit" else square - noise - added,
        noise_square=noise,
        noise_variance=math.fsum(2 * k * std**4 for k, std in zip(counts, header.noise_stds, strict=True)),
    )


def _shown(values: np.ndarray) -> str:
    return f"{values.min():.4g} to {values.max():.4g}"
