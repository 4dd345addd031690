"""The fleets of `benchmarks/private_gain.py`."""

from __future__ import annotations

from benchmarks.private_gain import MOST_TRAIN, fleets


def test_every_fleet_has_enough_images_of_its_classes() -> None:
    of = {"digits": 1200 / 10, "fashion-mnist": MOST_TRAIN["fashion-mnist"] / 10, "emnist": MOST_TRAIN["emnist"] / 26}
    for fleet in fleets(quick=False):
        assert fleet.devices * fleet.images <= fleet.classes * of[fleet.data]
