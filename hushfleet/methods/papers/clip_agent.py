"""Proximal policy optimisation of a clip norm: the server's agent of ACDP-pFSD, Section 4.3 and Algorithm 2.

Schulman, Wolski, Dhariwal, Radford, Klimov: "Proximal Policy Optimization Algorithms", 2017, Eq. (7), with the critic's
one-step loss of ACDP-pFSD's Algorithm 2, line 32. An actor gives mean and deviation of a normal variable u, the action;
the clip norm is C_0 k^tanh(u), between C_0 / k and C_0 k. The ratio of two policies is the ratio of u's densities,
because the map from u to the clip norm cancels.

The agent's whole state is an `AgentState`, which is stored as NumPy arrays by name: a killed server continues with the
same bits. The arithmetic uses PyTorch in float64 on one thread. PyTorch is imported inside the functions, because
devices use the device half of the same method and may not have PyTorch.

Reading: the paper describes the agent only in Algorithm 2. Networks of two hidden layers of 32 tanh units, the
clipping of ratios at 0.2 and Adam are usual. The step size of 3e-3 and 20 passes are larger than usual, because there
is only one experience per round. The discount of 0.9 looks about ten rounds ahead.
Reading: "sample experiences U" takes all of the full buffer, which is then emptied: PPO learns from the actions of its
own last policies.
Reading: the action range is not stated; C_0 is the task's clip norm, the paper's fixed one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hushfleet.array_api import np, one_torch_thread
from hushfleet.learning.optim import Adam

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN = 32
_SHAPES = ((HIDDEN, 2), (HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (1, HIDDEN), (1,))
_INITIAL_STD = 0.6  # of u: in two of three cases tanh(u) is then within 0.54 of the middle
_SEED_STREAM = 0x434C4950

Arrays: TypeAlias = "dict[str, np.ndarray]"


class AgentNetwork(NamedTuple):
    """The flat weights of a network, and Adam's moments of their gradients; float64 `[n]` each."""

    weights: np.ndarray
    first: np.ndarray
    second: np.ndarray

    @classmethod
    def of(cls, weights: np.ndarray) -> AgentNetwork:
        """Returns a network with these weights, float64 `[n]`, and moments of 0."""
        return cls(weights, np.zeros_like(weights), np.zeros_like(weights))


@dataclass(frozen=True)
class AgentState:
    """The state of the agent before a round.

    :param state: mean accuracy and loss of the previous round, `[2]`; NaN before the first.
    :param actor: its last entry is the logarithm of the policy's standard deviation.
    :param updates: gradient steps so far.
    :param experiences: rows (s, u, log pi(u), r, s'), `[n, 7]`.
    :param action: u of this round, and `log_density`: log pi(u).
    """

    seed: int
    round: int
    state: np.ndarray
    actor: AgentNetwork
    critic: AgentNetwork
    updates: int
    experiences: np.ndarray
    action: float = 0.0
    log_density: float = 0.0

    def to_arrays(self) -> Arrays:
        """Returns the state as named arrays, as `from_arrays` reads them."""
        arrays: Arrays = {}
        for name, value in vars(self).items():
            if isinstance(value, AgentNetwork):
                arrays |= {name: value.weights, f"{name}.first": value.first, f"{name}.second": value.second}
            else:
                arrays[name] = np.asarray(value)
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> AgentState:
        """Reads the arrays of `to_arrays`."""
        found: dict[str, Any] = {field.name: arrays[field.name] for field in fields(cls)}
        found |= {name: found[name].item() for name in ("seed", "round", "updates", "action", "log_density")}
        for name in ("actor", "critic"):
            found[name] = AgentNetwork(arrays[name], arrays[f"{name}.first"], arrays[f"{name}.second"])
        return cls(**found)


@dataclass(frozen=True)
class ClipAgent:
    """The agent of ACDP-pFSD: PPO on one action, the clip norm of a round.

    :param clip_norm: C_0, the middle of the range.
    :param clip_range: k.
    :param buffer: experiences between two updates, |D_P|.
    :param passes: gradient steps of an update, M.
    """

    clip_norm: float
    clip_range: float
    buffer: int
    passes: int = 20
    learning_rate: float = 3e-3
    discount: float = 0.9
    ratio_bound: float = 0.2
    random_rounds: int = 2  # Algorithm 2, line 1

    def begin(self, seed: int) -> AgentState:
        """Returns the agent before round 1, with that round's action drawn."""
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_SEED_STREAM,)))
        actor, critic = _initial_weights(rng), _initial_weights(rng)
        actor[-HIDDEN - 1 :] *= 0.01  # the mean begins near the middle of the range
        actor = np.append(actor, math.log(_INITIAL_STD))
        networks = AgentNetwork.of(actor), AgentNetwork.of(critic)
        return self._act(AgentState(seed, 1, np.full(2, np.nan), *networks, updates=0, experiences=np.empty((0, 7))))

    def clip_norm_of(self, agent: AgentState) -> float:
        """Returns the clip norm of the drawn action."""
        return float(self.clip_norm * self.clip_range ** math.tanh(agent.action))

    def observe(self, agent: AgentState, accuracy: float, loss: float) -> AgentState:
        """Returns the agent after a round with these mean reports, with the next round's action drawn.

        The experience is (s, u, log pi(u), r, s'); the reward r is the decrease of the loss plus the increase of the
        accuracy, Eqs. (11) to (13).
        """
        before, after = agent.state, np.array([accuracy, loss])
        experiences = agent.experiences
        if agent.round > self.random_rounds:
            reward = (before[1] - after[1]) + (after[0] - before[0])
            row = np.concatenate([before, [agent.action, agent.log_density, reward], after])
            experiences = np.vstack([experiences, row])
        agent = replace(agent, round=agent.round + 1, state=after, experiences=experiences)
        return self._act(self._learn(agent) if len(experiences) >= self.buffer else agent)

    def _act(self, agent: AgentState) -> AgentState:
        """Draws u: at random in the first rounds, then by the policy."""
        rng = np.random.default_rng(np.random.SeedSequence(agent.seed, spawn_key=(_SEED_STREAM, agent.round)))
        if agent.round <= self.random_rounds:  # uniform in the logarithm of the clip norm
            return replace(agent, action=math.atanh(rng.uniform(-0.99, 0.99)), log_density=0.0)
        import torch

        with torch.no_grad(), one_torch_thread():
            weights = torch.from_numpy(agent.actor.weights)
            mean = _network(weights, torch.from_numpy(agent.state[None]))[0]
            std = torch.exp(weights[-1])
            u = mean + std * rng.standard_normal()
            return replace(agent, action=float(u), log_density=float(_log_density(u, mean, std)))

    def _learn(self, agent: AgentState) -> AgentState:
        """Runs Algorithm 2, lines 28 to 33, on the whole buffer."""
        import torch

        with one_torch_thread():
            rows = torch.from_numpy(agent.experiences)
            before, action, density, reward, after = rows[:, :2], rows[:, 2], rows[:, 3], rows[:, 4], rows[:, 5:]
            trained = [_Trainable(net, agent.updates, self.learning_rate) for net in (agent.actor, agent.critic)]
            actor, critic = (each.weights for each in trained)
            with torch.no_grad():
                ahead = reward + self.discount * _network(critic, after)
                advantage = ahead - _network(critic, before)
                # usual in PPO: rewards are small, and their scale has no meaning
                advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
            for _ in range(self.passes):
                ratio = torch.exp(_log_density(action, _network(actor, before), torch.exp(actor[-1])) - density)
                bounded = ratio.clamp(1 - self.ratio_bound, 1 + self.ratio_bound)
                trained[0].step(-torch.minimum(ratio * advantage, bounded * advantage).mean())
                with torch.no_grad():
                    target = reward + self.discount * _network(critic, after)
                trained[1].step(((target - _network(critic, before)) ** 2).mean())
        actor_after, critic_after = (AgentNetwork(each.array, each.adam.first, each.adam.second) for each in trained)
        updates = agent.updates + self.passes
        return replace(agent, actor=actor_after, critic=critic_after, updates=updates, experiences=np.empty((0, 7)))


def trimmed_mean(values: Sequence[float]) -> float:
    """Returns the mean of the values between the 10th and the 80th percentile; percentiles are the nearest values.

    >>> trimmed_mean([0.0, 1.0, 1.0, 1.0, 9.0])
    0.75
    """
    low, high = np.percentile(values, [10, 80], method="nearest")
    return float(np.mean([value for value in values if low <= value <= high]))


def _initial_weights(rng: np.random.Generator) -> np.ndarray:
    """Returns PyTorch's default for a linear layer: uniform within one over the root of the number of its inputs."""
    parts, inputs = [], 0
    for shape in _SHAPES:
        inputs = shape[1] if len(shape) == 2 else inputs
        parts.append(rng.uniform(-1, 1, math.prod(shape)) / math.sqrt(inputs))
    return np.concatenate(parts)


def _network(weights: Tensor, states: Tensor) -> Tensor:
    """Returns the values `[n]` of states `[n, 2]` by a flat network; it ignores entries beyond the network."""
    layers, start = [], 0
    for shape in _SHAPES:
        layers.append(weights[start : start + math.prod(shape)].reshape(shape))
        start += math.prod(shape)
    hidden = (states @ layers[0].T + layers[1]).tanh()
    hidden = (hidden @ layers[2].T + layers[3]).tanh()
    return (hidden @ layers[4].T + layers[5])[:, 0]


def _log_density(u: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Returns the log density of the normal distribution, without the constant."""
    return -(((u - mean) / std) ** 2) / 2 - std.log()


class _Trainable:
    """A copy of a network's weights, as array and tensor in the same memory, and an Adam that continues its state.

    It uses the devices' Adam, because importing PyTorch's optimizers takes seconds.
    """

    def __init__(self, network: AgentNetwork, steps: int, learning_rate: float) -> None:
        import torch

        self.array = network.weights.copy()
        self.weights = torch.from_numpy(self.array).requires_grad_()
        self.adam = Adam(learning_rate)
        self.adam.steps, self.adam.first, self.adam.second = steps, network.first.copy(), network.second.copy()

    def step(self, loss: Tensor) -> None:
        import torch

        (gradient,) = torch.autograd.grad(loss, self.weights)
        self.adam.step(self.array, gradient.numpy())
