"""Tells the present name of a command that was called by an earlier one, and what to use in place of one that went."""

from __future__ import annotations

import sys

from hushfleet.errors import BadInput

OLD_NAMES = {
    "devices list": "fleet status",
    "devices add": "fleet add",
    "devices forget": "fleet forget",
    "devices block": "fleet block",
    "devices membership list": "fleet roster export",
    "devices": "fleet",
    "fleet list": "fleet status",
    "fleet show": "fleet status",
    "fleet page": "fleet status --page",
    "fleet report": "report",
    "fleet bundle": "release make",
    "fleet sign": "release sign",
    "fleet release": "release add",
    "fleet rollout": "release rollout",
    "fleet release-key show": "release keys",
    "fleet release-key sign": "release sign",
    "fleet release-key import": "release add",
    "fleet release-key": "release",
}
"""Names of 0.3, longer ones before their beginnings. Their arguments are those of the present names."""

GONE = {
    "release rotate": "hushfleet release keys DIR --new names a new key, and --key others",
    "fleet release-key rotate": "hushfleet release keys DIR --new names a new key, and --key others",
    "fleet test": 'write path = "FOLDER" into [data] of the task: the report then says how right the model is there',
    "flash --writer": "cards have cloud-init's format; another system is installed by hushfleet push",
}
"""Commands and options that went after 0.3, and what to use."""


def renamed(words: list[str]) -> list[str]:
    """Returns the words of a command with its present name; says so on stderr if they begin with an old one.

    Raises `BadInput` for a command or an option that went.
    """
    for old, instead in GONE.items():
        *command, last = old.split()
        rest = words[len(command) :] if words[: len(command)] == command else []
        if last in (word.partition("=")[0] for word in (rest if last.startswith("-") else rest[:1])):
            raise BadInput(f"`hushfleet {old}` went after 0.3; {instead}")
    for old, new in OLD_NAMES.items():
        before = old.split()
        if words[: len(before)] == before:
            said = f"`hushfleet {old}` is now `hushfleet {new}`; the old name goes after 0.4"
            print(said, file=sys.stderr)
            return [*new.split(), *words[len(before) :]]
    return words
