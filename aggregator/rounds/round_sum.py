"""What a round makes of its updates: how one is read, what it is added to, and what comes of all of them.

There are two ways: `plain_sum.PlainSum` sees every update, `secure_sum.SecureSum` opens their sum alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

import numpy as np

from hushfleet.aggregator.storage.store import AggregatorStore, ChargeRow, UpdateRow
from hushfleet.methods.state import PublicState
from hushfleet.privacy.mechanism import Charge
from hushfleet.wire.format.update import UpdateHeader


class Sound(NamedTuple):
    """An update that has passed all checks and is not committed yet.

    :param counts: how many values were sent of each layer.
    :param before, after: the device's public state, without and with it.
    :param add: adds it to the sums; called once it is committed.
    """

    header: UpdateHeader
    data: bytes
    row: UpdateRow
    counts: tuple[int, ...]
    before: PublicState
    after: PublicState
    add: Callable[[], None]


class Answers(NamedTuple):
    """Of a committee: its members, how many of them answered, and the bytes of their answers together."""

    members: int = 0
    answers: int = 0
    size: int = 0


class RoundSum(Protocol):
    """The sum of one open round. Nothing in it depends on the order in which updates came."""

    @property
    def cohort(self) -> Collection[str]:
        """Who takes part."""
        ...

    @property
    def count(self) -> int:
        """How many updates were added."""
        ...

    def read(self, header: UpdateHeader, data: bytes, *, payload: bytes) -> Sound:
        """Checks an authenticated update. Raises `Refusal`.

        :param payload: the digest of its header and values.
        """
        ...

    def resume(self) -> list[str]:
        """Adds what the store has of the round, after a restart; of which devices."""
        ...

    @property
    def answers(self) -> Answers:
        """Of the committee of a secure sum."""
        ...

    @property
    def suspected_wraps(self) -> int:
        """How many values of a secure sum may have wrapped around, once `open` was True; see `Ring`."""
        ...

    def open(self) -> bool:
        """Whether the sum is known. What was found is kept."""
        ...

    @property
    def reports(self) -> list[tuple[float, ...]]:
        """What devices reported beside their values, in the order of their names."""
        ...

    @property
    def noise_stds(self) -> list[float]:
        """Standard deviation of the noise of the aggregate, in each layer."""
        ...

    def aggregated(self) -> np.ndarray:
        """The new global vector before it is coded, float32 `[d]`, once `open` was True."""
        ...


def commit(store: AggregatorStore, sound: Sound, charge: Charge) -> None:
    """Update, the device's next public state and its charge in one transaction. Raises `StoreFull`."""
    header, after = sound.header, sound.after
    device, row = header.device, store.device(header.device)
    known = row is not None and row.public_digest == header.public_digest
    # packing a mask takes longer than reading it, so what is there is copied
    before = (store.public_state(device) if known else None) or sound.before.to_bytes()
    with store.transaction():
        store.put_update(header.round, sound.row, data=sound.data, public_before=before)
        store.put_public_state(device, digest=after.digest(), state=after.to_bytes())
        store.put_charge(
            ChargeRow(
                round=header.round,
                device=device,
                unit=charge.unit,
                adjacency=charge.adjacency,
                noise_multiplier=header.multiplier_server,
                noise_split=charge.noise_split,
                sample_rate=charge.sample_rate,
                steps=charge.steps,
                device_rounds=header.rounds_charged,
                device_epsilon=header.epsilon_server,
                raw="\n".join(charge.raw),
            )
        )
