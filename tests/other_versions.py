"""Prints what pip lays over the packages of .venv: `lowest`, our lowest versions, or `peers` or `networks`, that extra.

`make test-lowest`, `make test-peers` and `make test-networks` run some tests with it.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
SHARED = ("hushfleet", "torch", "torchvision")  # gigabytes; those of .venv fit each other


def lowest() -> list[str]:
    """Returns the lowest versions of what the commands import, without amqtt, which wants a newer typer than we do."""
    needs = map(Requirement, [*PROJECT["dependencies"], *EXTRAS["edge"], *EXTRAS["server-without-amqtt"]])
    here = (need for need in needs if need.name not in SHARED and (need.marker is None or need.marker.evaluate()))
    return [f"{need.name}{need.specifier}".replace(">=", "==") for need in here]


if __name__ == "__main__":
    print(*(lowest() if sys.argv[1] == "lowest" else EXTRAS[sys.argv[1]]))
