"""The agent that chooses clip norms: what it learns, what it forgets when it is killed, and its first steps by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hushfleet.aggregator.rounds.server_half import server_state_from_bytes, server_state_to_bytes
from hushfleet.methods.papers.clip_agent import HIDDEN, AgentState, ClipAgent, _network, trimmed_mean


def play(agent: ClipAgent, best: float, rounds: int, *, seed: int = 0) -> list[float]:
    """The clip norms of a run whose loss falls the faster the nearer they are to `best`."""
    state, loss, chosen = agent.begin(seed), 2.0, []
    for _ in range(rounds):
        chosen.append(agent.clip_norm_of(state))
        loss *= 1 - 0.03 * math.exp(-(math.log(chosen[-1] / best) ** 2))
        state = agent.observe(state, 0.5, loss)
    return chosen


@pytest.mark.parametrize("best", [0.4, 2.5])
def test_it_finds_the_better_side_of_its_range(best: float) -> None:
    agent = ClipAgent(1.0, 4.0, buffer=5, passes=10, learning_rate=1e-2)
    chosen = play(agent, best, 80)
    assert all(0.25 <= each <= 4.0 for each in chosen)
    missed = np.abs(np.log(np.array(chosen) / best))
    assert missed[-20:].mean() < 0.5 * missed[:20].mean()
    assert chosen[:10] == play(agent, best, 10)
    assert chosen[:2] != play(agent, best, 2, seed=1)


def test_a_killed_agent_goes_on_with_the_same_bits() -> None:
    agent = ClipAgent(1.0, 4.0, buffer=2, passes=3)
    calm, killed = agent.begin(3), agent.begin(3)
    for number in range(9):
        report = (0.1 * number, 2.0 - 0.2 * number)
        calm, killed = agent.observe(calm, *report), agent.observe(killed, *report)
        killed = AgentState.from_arrays(server_state_from_bytes(server_state_to_bytes(killed.to_arrays())))
    assert calm.updates == 9  # rounds 3 to 8 of nine fill the buffer three times, and the ninth begins another
    for name, array in calm.to_arrays().items():
        np.testing.assert_array_equal(array, killed.to_arrays()[name])


def test_the_first_two_actions_are_random_and_experiences_begin_in_the_third_round() -> None:
    agent = ClipAgent(2.0, 4.0, buffer=100)
    state = agent.begin(0)
    reports = [(0.1, 2.0), (0.2, 1.5), (0.25, 1.4), (0.5, 1.6)]
    for accuracy, loss in reports[:2]:
        assert state.log_density == 0
        state = agent.observe(state, accuracy, loss)
    assert len(state.experiences) == 0
    for accuracy, loss in reports[2:]:
        action, density = state.action, state.log_density
        assert agent.clip_norm_of(state) == pytest.approx(2.0 * 4.0 ** math.tanh(action))
        state = agent.observe(state, accuracy, loss)
        assert state.experiences[-1, 2:4].tolist() == [action, density]
    # loss 1.5 -> 1.4 and accuracy 0.2 -> 0.25: 0.15; then -0.2 + 0.25
    np.testing.assert_allclose(state.experiences[:, 4], [0.15, 0.05], rtol=1e-12)
    np.testing.assert_array_equal(state.experiences[:, :2], reports[1:3])
    np.testing.assert_array_equal(state.experiences[:, 5:], reports[2:])


def learned(action: float, density: float | None = None) -> tuple[AgentState, AgentState]:
    """An agent before and after one step on two like experiences, of which the one with `action` paid."""
    agent = ClipAgent(1.0, 4.0, buffer=2, passes=1)
    state = replace(agent.begin(0), round=5, state=np.array([0.5, 1.0]))
    mean, std = _policy(state)
    other = 2 * mean - action  # as likely as `action`
    likely = -(((action - mean) / std) ** 2) / 2 - math.log(std) if density is None else density
    rows = [[0.5, 1.0, action, likely, 1.0, 0.5, 1.0], [0.5, 1.0, other, likely, 0.0, 0.5, 1.0]]
    before = replace(state, experiences=np.array(rows))
    return before, agent._learn(before)


def _policy(state: AgentState) -> tuple[float, float]:
    weights = torch.from_numpy(state.actor.weights)
    return float(_network(weights, torch.tensor([[0.5, 1.0]], dtype=torch.float64))), float(weights[-1].exp())


def test_a_step_moves_towards_what_paid_by_the_size_of_an_adam_step() -> None:
    for action in (-0.4, 0.4):
        before, after = learned(action)
        assert (_policy(after)[0] - _policy(before)[0]) * action > 0
        # Adam's first step is the step size against each gradient's sign; its bias is last but one
        assert after.actor.weights[-2] - before.actor.weights[-2] == pytest.approx(
            math.copysign(3e-3, action), rel=1e-3
        )
    assert len(after.experiences) == 0


def test_adam_goes_on_where_the_last_update_stopped() -> None:
    before, after = learned(0.4)
    again = ClipAgent(1.0, 4.0, buffer=2, passes=1)._learn(replace(after, experiences=before.experiences))
    assert again.updates == 2
    # gradients of nearly one size make steps of one size; moments that met a fresh count would make it 1.34 times that
    assert again.actor.weights[-2] - after.actor.weights[-2] == pytest.approx(3e-3, rel=0.05)


def test_a_ratio_beyond_its_bound_pulls_no_further() -> None:
    """Of the better action the ratio is e^5, above 1.2; the other's e^5 is not bounded, since it should fall."""
    before, after = learned(0.4, density=-5.0 - math.log(0.6))
    weights = torch.tensor(before.actor.weights, requires_grad=True)
    rows = torch.from_numpy(before.experiences)
    value = _network(weights, rows[:, :2])
    ratio = torch.exp(-(((rows[:, 2] - value) / weights[-1].exp()) ** 2) / 2 - weights[-1] - rows[:, 3])
    assert float(ratio.min().detach()) > 1.2
    (-(1.2 * 1.0 + ratio[1] * -1.0) / 2).backward()  # advantages of two, normalised: 1 and -1
    expected = -3e-3 * np.sign(weights.grad.numpy())
    moved = after.actor.weights - before.actor.weights
    certain = np.abs(weights.grad.numpy()) > 1e-4
    np.testing.assert_allclose(moved[certain], expected[certain], rtol=1e-3)
    assert certain.sum() > HIDDEN


def test_the_critic_moves_towards_reward_and_discounted_value() -> None:
    before, after = learned(0.4)
    state = torch.tensor([[0.5, 1.0]], dtype=torch.float64)
    value = [float(_network(torch.from_numpy(each.critic.weights), state)) for each in (before, after)]
    target = 0.5 + 0.9 * value[0]  # mean reward of 1 and 0
    assert abs(target - value[1]) < abs(target - value[0])


def test_the_mean_between_the_10th_and_80th_percentile() -> None:
    values = [100.0, *range(1, 10), -50.0]  # eleven: percentiles 10 and 80 are the values at 1 and 8
    assert trimmed_mean(values) == pytest.approx(sum(range(1, 9)) / 8)
    assert trimmed_mean([3.0]) == 3.0
    assert trimmed_mean([1.0, 2.0]) == 1.5
