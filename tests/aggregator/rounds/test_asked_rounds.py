"""Rounds that ask: boards and the engine without a network, with masks; silent members, and answers that lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.payloads.prepare import PreparedTask, prepare
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.data.samples import Samples
from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.storage.declines import Declined
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.errors import PrivacyError
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.prime_field import to_bytes
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.update import UpdateHeader, read_header
from hushfleet.wire.format.update_values import encode_masked, encode_update

NAMES = [f"board-{number}" for number in range(10)]
MOST = 20


class Asked:
    """A task that asks for counts, an engine, and ten boards with their stores."""

    def __init__(self, folder: Path, accounting: str, **privacy: Any) -> None:
        plain = {
            "name": "asked",
            "model": {"name": "linear"},
            "method": {"name": "dp-fedavg"},
            "privacy": {"accounting": accounting, "delta": 1e-5, "clip_norm": 1.0, **privacy},
            "data": {"name": "digits", "devices": len(NAMES), "limit": 200},
            "round": {"rounds": 1, "min_updates": 6},
            "statistic": {"kind": "counts", "most": MOST},
        }
        self.prepared: PreparedTask = prepare(parse_task(plain), run_id="test")
        self.store, self.now = AggregatorStore(folder / "aggregator", durable=False), 1000.0
        self.identities = {name: Identity.from_bytes(bytes([number + 1]) * 32) for number, name in enumerate(NAMES)}
        for name, identity in self.identities.items():
            self.store.add_device(name, public_key=identity.public_key, board="test")
        clock = lambda: self.now  # noqa: E731
        self.engine = RoundEngine(self.store, self.prepared, clock=clock, monotonic=clock)
        self.membership_list = MembershipList.of(
            {name: identity.public_key for name, identity in self.identities.items()}
        )
        self.engine.open_round(NAMES, membership_list=self.membership_list)
        self.boards = {name: self._board(folder / name, name, number) for number, name in enumerate(NAMES)}

    def _board(self, path: Path, name: str, number: int) -> Trainer:
        spec = self.prepared.spec
        return Trainer(
            device=name,
            store=DeviceStore(path, device=name, durable=False, identity=self.identities[name]),
            spec=spec,
            method=self.prepared.method,
            gradient=None,  # type: ignore[arg-type]  # nothing here trains
            logits_of=None,  # type: ignore[arg-type]
            samples=lambda: samples_of(number),
            left_out=lambda: number % 2,
            randomness=SeededRandomness(1, number),
            limits=LimitsSection.of_simulation(spec.privacy),
        )

    def round_of(self, name: str) -> DeviceRound:
        assert self.engine.plan is not None
        return DeviceRound(self.boards[name], self.engine.plan, self.membership_list)

    def answer(self, name: str) -> bytes:
        return self.round_of(name).run(self.engine.model.published).data

    def accept(self, name: str, data: bytes) -> str:
        return self.engine.accept(name, data).code


def samples_of(number: int) -> Samples:
    """Board n has n + 1 samples of class 0 and two of class 3."""
    labels = np.array([0] * (number + 1) + [3, 3], np.int64)
    return Samples(np.zeros((len(labels), 1, 8, 8), np.uint8), labels, (0.0,), (1.0,))


def counts_of(names: list[str]) -> np.ndarray:
    """What these boards have, and have left out, together."""
    found = np.zeros(11)
    for name in names:
        number = NAMES.index(name)
        found[[0, 3, 10]] += number + 1, 2, number % 2
    return found


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Asked]:
    return lambda *arguments, **privacy: Asked(tmp_path, *arguments, **privacy)


def test_a_masked_sum_opens_without_a_silent_board_and_a_silent_member(make: Callable[..., Asked]) -> None:
    asked = make("secure", noise_multiplier=0.0)
    there, members = NAMES[:-1], asked.round_of(NAMES[0]).secure.members
    for name in there:
        assert asked.accept(name, asked.answer(name)) == "accepted"
    asked.engine.decline(NAMES[-1], "busy", "", round=1)
    assert not asked.engine.should_close(asked.now)
    assert asked.engine.plan is not None
    assert asked.engine.plan.phase == "unmask"
    silent = next(name for name in members if name in there)
    for name in members:
        if name in there and name != silent:
            entry = asked.round_of(name).answer()
            assert entry is not None
            assert asked.accept(name, entry.data) == "accepted"
    asked.now += 1000
    assert asked.engine.should_close(asked.now)
    summary = asked.engine.close()
    assert summary.participants == 9
    assert np.array(summary.answer) * MOST * 9 == pytest.approx(counts_of(there), abs=0.1)
    assert summary.float32_bytes == 9 * 4 * len(summary.answer), "no model was sent"


def test_each_answer_is_charged_once_and_never_noised_again(make: Callable[..., Asked]) -> None:
    asked = make("strict", epsilon=1.0)
    name = NAMES[0]
    first, again = asked.answer(name), asked.answer(name)
    assert first == again
    (entry,) = asked.boards[name].store.ledger.entries()
    question = asked.prepared.spec.question
    assert question is not None
    assert entry.charge.noise_multiplier == question.noise_multiplier
    assert asked.boards[name].store.ledger.epsilon_server(delta=1e-5) == pytest.approx(1.0, rel=1e-3)


def test_a_board_whose_owner_allows_less_answers_nothing(make: Callable[..., Asked]) -> None:
    asked = make("strict", epsilon=1.0)
    board = asked.boards[NAMES[0]]
    for limits in (replace(board.limits, epsilon_server=0.9), replace(board.limits, min_noise_multiplier=50.0)):
        board.limits = limits
        with pytest.raises((PrivacyError, Declined)):
            asked.answer(NAMES[0])
    assert board.store.ledger.entries() == []


def forged(asked: Asked, name: str, values: np.ndarray, **changes: Any) -> bytes:
    header: UpdateHeader = replace(read_header(asked.answer(name)), **changes)
    counts = [values.size]
    return encode_update(header, values.astype(np.float32), counts=counts, identity=asked.identities[name]).data


def test_answers_that_no_honest_board_sends_are_refused(make: Callable[..., Asked]) -> None:
    """One without noise is not among them: of eleven values chance may make a norm of zero, nearly."""
    asked = make("strict", epsilon=1.0)
    honest = asked.answer(NAMES[0])
    std = read_header(honest).noise_stds[0]
    rng = np.random.default_rng(2)
    lies = {
        "out-of-bounds": [np.full(11, 50 * std), rng.normal(size=11) * std * 9],
        "wrong-shape": [np.zeros(10), np.zeros(12), rng.normal(size=610) * std],
    }
    for code, forgeries in lies.items():
        for values in forgeries:
            data = forged(asked, NAMES[0], values, value_count=len(values))
            assert asked.accept(NAMES[0], data) == code, values[:3]
    good = forged(asked, NAMES[0], np.arange(11) * std / 4)
    at = good.index(np.float32(std / 4).tobytes())
    for odd in (np.nan, np.inf, -np.inf):
        bad = good[:at] + np.float32(odd).tobytes() + good[at + 4 : -64]
        assert asked.accept(NAMES[0], bad + asked.identities[NAMES[0]].sign(bad)) == "non-finite"
    assert asked.engine.accepted == 0
    less = forged(asked, NAMES[0], np.arange(11) * std / 4, multiplier_server=0.1)
    assert asked.accept(NAMES[0], less) == "out-of-bounds"


def test_random_bytes_are_refused_and_change_nothing(make: Callable[..., Asked]) -> None:
    asked, rng = make("strict", epsilon=1.0), np.random.default_rng(3)
    honest = asked.answer(NAMES[0])
    for _ in range(200):
        data = bytearray(honest)
        for place in rng.integers(0, len(data), rng.integers(1, 5)):
            data[place] ^= int(rng.integers(1, 256))
        signed = bytes(data[:-64])
        signed += asked.identities[NAMES[0]].sign(signed)
        code = asked.accept(NAMES[0], signed)
        assert code
        if code == "accepted":  # a lie within the noise is possible, and has an honest answer's size
            return
    assert asked.engine.accepted == 0


def test_a_masked_answer_of_any_size_opens_nothing_absurd(make: Callable[..., Asked]) -> None:
    """Whoever lies in secure aggregation spoils the sum, and nobody is told a number that no honest boards can give."""
    asked = make("secure", noise_multiplier=0.0)
    for name in NAMES[:-1]:
        asked.accept(name, asked.answer(name))
    liar, secure = NAMES[-1], asked.round_of(NAMES[-1]).secure
    header, prime = read_header(asked.answer(liar)), secure.prime
    lie = secure.masked(secure.keys(asked.boards[liar].agreement, liar), np.full(11, prime // 3, np.uint32))
    flat = np.concatenate([lie.values, lie.corrections.reshape(-1)])
    data = encode_masked(header, to_bytes(flat, secure.spec.bits), identity=asked.identities[liar])
    assert asked.accept(liar, data) == "accepted", "nobody sees what it is"
    assert not asked.engine.should_close(asked.now)
    for name in secure.members:
        entry = asked.round_of(name).answer()
        assert entry is not None
        asked.accept(name, entry.data)
    for _ in range(5):
        asked.now += 1000
        if asked.engine.should_close(asked.now):
            break
    summary = asked.engine.close()
    assert summary.participants == 0
    assert list(summary.answer) == []
