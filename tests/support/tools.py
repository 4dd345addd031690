"""Programs that tests need beside Python (`tests/tools.txt`): where they are, and what is said where they are not.

A test asks by `@pytest.mark.needs("mosquitto")`, a fixture by `need("mosquitto")`. Without the tool the test is
skipped. One of pytest's last lines counts such tests and says what to type.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
"""An ordinary user's PATH lacks the folders of servers."""
_SKIPPED = "not installed: "


def _read() -> dict[str, tuple[list[str], list[str]]]:
    """Packages and programs by the tool's name."""
    lines = (Path(__file__).parents[1] / "tools.txt").read_text("utf-8").splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return {name: (packages.split(","), programs.split(",")) for name, packages, programs in rows}


TOOLS = _read()
BROKERS = (pytest.param("mosquitto", marks=pytest.mark.needs("mosquitto")), "amqtt")
"""The kinds of broker, for tests that must hold with each."""


def find(name: str) -> str | None:
    """The path of a tool's program."""
    return next(filter(None, (shutil.which(program, path=SEARCH_PATH) for program in TOOLS[name][1])), None)


def need(*names: str) -> None:
    """Skips the test that runs now where one of the tools is missing."""
    missing = [name for name in names if find(name) is None]
    if missing:
        pytest.skip(_SKIPPED + ", ".join(missing))


def closing_line(reasons: list[str]) -> str | None:
    """What is said after the tests. None where no test was skipped for a tool.

    :param reasons: of all skipped tests, as pytest reports them.
    """
    lists = [reason.partition(_SKIPPED)[2] for reason in reasons if _SKIPPED in reason]
    names = sorted({name for each in lists for name in each.split(", ")})
    if not names:
        return None
    packages = ", ".join(package for name in names for package in TOOLS[name][0])
    return (
        f"{len(lists)} tests were skipped, because this machine lacks {', '.join(names)}. "
        f"To install what they need (Debian's {packages}), type: sudo tests/install_tools.sh"
    )
