"""`--policy quorum=0.8,deadline_s=300`: the task's round section with some keys exchanged."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace

from hushfleet.aggregator.config.task import RoundSection
from hushfleet.errors import BadInput

_KEYS = ("cohort_size", "min_devices", "quorum", "min_updates", "deadline_s")
AS_IN_TASK = "as in the task"


def read_policies(texts: Sequence[str], rules: RoundSection) -> dict[str, RoundSection]:
    """Each policy's text, tidied up, and what it makes of the task's rules; without any, the rules as they are.

    Raises `BadInput` for a key that no policy has or a value out of its range.
    """
    return {AS_IN_TASK if not _pairs(text) else ",".join(_pairs(text)): _policy(text, rules) for text in texts or [""]}


def _pairs(text: str) -> list[str]:
    return [pair.strip() for pair in text.split(",") if pair.strip()]


def _policy(text: str, rules: RoundSection) -> RoundSection:
    changed: dict[str, float] = {}
    for pair in _pairs(text):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if key not in _KEYS or not equals:
            raise BadInput(f"--policy {text!r}: {pair!r} is not KEY=VALUE with one of {', '.join(_KEYS)}")
        try:
            changed[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise BadInput(f"--policy {text!r}: {key} = {value!r} is not a number") from error
    try:
        return replace(rules, **changed)
    except ValueError as error:
        raise BadInput(f"--policy {text!r}: {error}") from error
