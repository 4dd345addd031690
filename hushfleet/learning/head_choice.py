"""Describes which head a device has chosen for itself, and why: in its store, and for its owner."""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.schema import Checked, Count, Fraction

UNLABELLED_BELOW = 20.0
"""The value of r from which on images without labels do not help."""


@dataclass(frozen=True)
class HeadChoice(Checked):
    """A device's choice of its head, and the reasons. It is private, like the images that determined it.

    :param images: the number of images.
    :param shared: the weight of the shared head in the mixture; `pulled`: the weight of the heads pulled to it;
        `alone`: the weight of the head trained alone.
    :param right: how many of the images the mixture got right in the cross-validation; likewise `right_shared` for the
        shared head, and `right_alone` for the one trained alone.
    :param unlabelled: the number of images without labels that determine half of the head; the fields above describe
        the other half.
    """

    images: Count = 0
    shared: Fraction = 1.0
    pulled: Fraction = 0.0
    alone: Fraction = 0.0
    right: Count = 0
    right_shared: Count = 0
    right_alone: Count = 0
    unlabelled: Count = 0

    @property
    def plain(self) -> str:
        """`62 % the fleet's model, 30 % the fleet's model fitted to own samples, 8 % trained alone`."""
        if not self.images:
            return "the fleet's model"
        parts = {
            "the fleet's model": self.shared,
            "the fleet's model fitted to own samples": self.pulled,
            "trained alone": self.alone,
        }
        told = ", ".join(f"{100 * part:.0f} % {what}" for what, part in parts.items())
        return told + f"; and {self.unlabelled} samples without labels" * bool(self.unlabelled)

    @property
    def text(self) -> str:
        """Describes the choice, and how many of the own samples each part gets right."""
        if not self.images:
            return f"{self.plain} (there are no own samples)"
        return (
            f"{self.plain} (own samples right, cross-validated: {self.right} of {self.images}; the fleet's model "
            f"{self.right_shared}, trained alone {self.right_alone})"
        )


def takes_unlabelled(signal: float | None, classes: int) -> bool:
    """Returns whether images without labels improve the head.

    :param signal: `TaskSpec.signal`.

    >>> takes_unlabelled(10.0, 10), takes_unlabelled(50.0, 10)
    (True, False)
    """
    return signal is not None and signal * min(1.0, 10 / classes) < UNLABELLED_BELOW
