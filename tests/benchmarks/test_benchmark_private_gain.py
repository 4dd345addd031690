"""The fleets of `benchmarks/private_gain.py`."""

from __future__ import annotations

from benchmarks.private_gain import MOST_TRAIN, fleets


def test_every_fleet_has_enough_images_of_its_classes() -> None:
    classes = {"fashion-mnist": 10, "emnist": 26, "cifar10": 10}
    of = {"digits": 1200 / 10, **{data: MOST_TRAIN[data] / count for data, count in classes.items()}}
    for fleet in fleets(quick=False):
        assert fleet.devices * fleet.images <= fleet.classes * of[fleet.data]
