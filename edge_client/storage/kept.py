"""Defines the values that a board keeps in its store besides rounds: personalized models, accelerator, newest
roster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hushfleet.array_api import np
from hushfleet.learning.head_choice import HeadChoice
from hushfleet.schema import Checked, Count, later
from hushfleet.wire.format.spec import Digest, TaskId

if TYPE_CHECKING:
    from hushfleet.learning.personalized_head import DeviceHead
    from hushfleet.secure.membership_list import MembershipList

Accelerator = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class KeptModel(Checked):
    """The model of a task with which the device predicts. It never leaves the store.

    :param global_digest: SHA-256 of the global model that it was made with, in its wire form.
    :param choice: the choice of a personalized head; None for another model, which is kept as the state of its task or,
        if it is shared as a whole, as a blob.
    :param values: the head's flat vector, little-endian float32; empty for another model.
    :param package: SHA-256 of the task package.
    :param round: the last closed round in the global model; 0 if there is none, or if it is unknown.
    :param shared: the shared head that the choice began with, little-endian float32; empty if the round is 0.
    """

    task: TaskId
    global_digest: Digest
    choice: HeadChoice | None = None
    values: bytes = b""
    package: Digest | None = later(None)
    round: Count = later(0)
    shared: bytes = later(b"")

    @classmethod
    def of(cls, head: DeviceHead, **about: Any) -> KeptModel:
        """:param about: the other fields."""
        return cls(choice=head.choice, values=head.params.astype("<f4", copy=False).tobytes(), **about)

    @property
    def params(self) -> np.ndarray:
        """float32 `[d]`."""
        return np.frombuffer(self.values, "<f4").astype(np.float32, copy=False)


@dataclass(frozen=True)
class ChosenAccelerator(Checked):
    """The place where a task's gradients are computed, chosen by a trial without any image of the board.

    :param task: digest of the task package that it was chosen for.
    :param runtime: the version of ONNX Runtime.
    :param chosen: the choice, which the fleet may know.
    :param reason: the reason, for people on the board.
    :param failed: why the processor took over later. It may depend on the number of images, and stays on the board.
    """

    task: Digest
    runtime: str
    chosen: Accelerator
    reason: str
    failed: str | None = None

    @property
    def used(self) -> Accelerator:
        return "cpu" if self.failed is not None else self.chosen


@dataclass(frozen=True)
class MembershipListMark(Checked):
    """The newest membership list that the operator has signed, kept so that no older one is accepted.

    :param digest: digest of everything that was signed.
    :param name: the name for people.
    :param devices: number of devices in it.
    """

    number: Count
    digest: Digest
    name: str
    devices: Count

    @staticmethod
    def scope(federation: str, operator: bytes) -> str:
        """Returns the name under which a mark is stored.

        :param operator: its public key.
        """
        return f"{federation} {operator.hex()}"

    @classmethod
    def of(cls, membership_list: MembershipList) -> MembershipListMark:
        return cls(membership_list.number, membership_list.digest(), membership_list.name, len(membership_list.devices))
