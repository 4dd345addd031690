"""Defines what a guardian hands to a worker, and what a worker hands back: frozen messages of bytes, without arrays.

The guardian is the board's client: it has the keys, the store and the network. A worker has neither. It gets one job,
which is one round, the choice of one personalized head, or a model and differences to add to it, and gives one outcome.
An outcome is untrusted input: the guardian checks it as it checks a message from the network.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Protocol

from msgspec import Meta

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.storage.round_commit import StoredState
from hushfleet.privacy.charge import Charge, Totals
from hushfleet.wire.format.fields import DeclineCode
from hushfleet.wire.format.messages import RoundPlan

MAX_TEXT_CHARS = 2000
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]


@dataclass(frozen=True)
class HeadJob:
    """The choice of a personalized head with the job's global model.

    :param closed: the number of the last closed round in the model; the model is empty if it has none.
    :param earlier: the personalized head of an earlier task that this one begins with (a packed `KeptModel`), and the
        package of that task; None without one.
    :param unlabelled: whether the images without labels take part.
    """

    closed: int
    earlier: tuple[bytes, bytes] | None
    unlabelled: bool


@dataclass(frozen=True)
class Job:
    """Everything that a worker gets.

    :param config: DEVICE.toml: the places of the data, and what the owner allows.
    :param package: the task package; `graphs`: the ONNX files that it names, in its order.
    :param model: the global model and the method's vectors, little-endian float32.
    :param at: the counted time, unix seconds.
    :param charge: the charge of the round, which the owner allows; None for a head.
    :param membership_list: the membership list that the plan names; `mask_keys`: the keys of this round alone.
    :param state: the device's state; `earlier`: that of the task that this one continues, for a newcomer.
    :param spent: the charges of this task so far.
    :param hides: whether the end is announced at a time that does not depend on the data: then nothing may be declined
        because of them.
    :param nominal_s: the work that the task names, if it was measured before.
    :param worse: the answer to a question about drift.
    :param accelerator: the packed choice for the task; None: not tried yet. `processor_only`: no GPU is used.
    :param trained_samples: digests of the last update's samples; None: the owner lets the device not count new ones.
    :param arrivals: (key of a sample, when it arrived).
    :param blank: train as a device without data: an earlier worker of the round has died, perhaps because of them, and
        a decline would reveal this.
    :param head: None for a round.
    :param features: what is done with the board's file of features, which comes with the job: `kept`, the round takes
        them from it; `make`, they are made, and nothing is trained, unless the file could not be opened; `none`, it is
        not used.
    :param differences: are added to `model`, which has layers of `counts` values, and nothing is trained; none for a
        round and for a head.
    """

    config: DeviceConfig
    package: bytes
    graphs: tuple[bytes, ...]
    plan: RoundPlan
    model: bytes
    at: int
    charge: Charge | None = None
    membership_list: bytes | None = None
    mask_keys: tuple[bytes, ...] = ()
    state: StoredState | None = None
    earlier: StoredState | None = None
    spent: Totals = field(default_factory=Totals)
    hides: bool = False
    nominal_s: float | None = None
    worse: bool | None = None
    accelerator: bytes | None = None
    processor_only: bool = False
    trained_samples: bytes | None = None
    arrivals: tuple[tuple[bytes, int], ...] = ()
    blank: bool = False
    head: HeadJob | None = None
    features: Literal["none", "kept", "make"] = "none"
    differences: tuple[bytes, ...] = ()
    counts: tuple[int, ...] = ()

    def light(self) -> Job:
        """Returns the job without what has megabytes: only what an outcome is compared with."""
        state = None if self.state is None else replace(self.state, own=None, private=b"")
        light = replace(self, package=b"", graphs=(), model=b"", membership_list=None, state=state, earlier=None)
        return replace(light, arrivals=(), trained_samples=None, differences=())


@dataclass(frozen=True)
class Told:
    """A message of a worker that still works. Nothing of it leaves the board.

    :param level: of `logging`; 0 for no line of the log.
    :param nominal_s: it was measured; nothing has been read of the data so far.
    :param accelerator: the packed choice of an accelerator.
    :param data_use: a note for the owner about the data (`board.notes`).
    """

    level: Annotated[int, Meta(ge=0, le=50)] = 0
    text: Text = ""
    nominal_s: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    accelerator: bytes | None = None
    data_use: Text | None = None


@dataclass(frozen=True)
class Finished:
    """A trained round: the update is clipped, noised and encoded, and has zeros in place of its signature.

    :param public_before: the public state before the update.
    :param state: the next state.
    :param failed: what went wrong with the data, for the owner.
    :param samples: digests of the samples, for `Job.trained_samples`; `arrived`: the keys of new ones.
    """

    charge: Charge
    update: bytes
    public_before: bytes
    state: StoredState
    failed: Text | None = None
    samples: bytes = b""
    arrived: tuple[Annotated[bytes, Meta(min_length=16, max_length=16)], ...] = ()


@dataclass(frozen=True)
class HeadChosen:
    """A chosen personalized head.

    :param kept: a packed `KeptModel`.
    :param right: how many of `held_out` samples that never train it gets right.
    """

    kept: bytes
    right: Annotated[int, Meta(ge=0)] = 0
    held_out: Annotated[int, Meta(ge=0)] = 0


@dataclass(frozen=True)
class Applied:
    """The model to which a job's differences lead, in its wire form."""

    model: bytes


@dataclass(frozen=True)
class NeedsFeatures:
    """The file lacks features of the present samples; or, if they were to be made, the attempt has ended."""


@dataclass(frozen=True)
class Failed:
    """The worker declines the job, in words that may be public.

    :param of_task: whether the task cannot be run here at all.
    """

    code: DeclineCode
    reason: Text
    of_task: bool = False


@dataclass(frozen=True)
class Died:
    """The worker ended without an outcome: it was killed, ran out of memory in native code, or had a fault there.

    :param why: in words, for the log and for a decline; it depends on no data.
    """

    why: str


Outcome = Finished | HeadChosen | Applied | NeedsFeatures | Failed | Died


class Workshop(Protocol):
    """Does one job at a time, while the guardian goes on.

    `ChildProcess` does it in a process of its own, as boards do. `InProcess` works in `begin`, for simulations and
    tests; a world with its own clock gives the same outcome later, from its `poll`.
    """

    def begin(self, job: Job) -> None:
        """Starts a job; none is under way. Without `give_up` since then, what an earlier job has loaded may be used
        again. Raises `OSError` if no worker can be started."""

    def poll(self) -> Outcome | None:
        """Returns the outcome of the job, once; None while the worker works, or if there is no job."""

    def told(self) -> list[Told]:
        """Returns what the worker has told since the last call."""

    def give_up(self) -> None:
        """Ends the worker, and its job without an outcome; nothing was spent."""
