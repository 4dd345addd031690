"""`hushfleet devices roster`: a list that boards can check, signed by a key that the aggregator does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.errors import BadInput, BadSignature
from hushfleet.secure.roster import Roster
from hushfleet.wire.format.identity import Identity


def run(*words: object) -> str:
    result = CliRunner().invoke(build_app(), ["devices", *map(str, words)], catch_exceptions=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_a_signed_roster_of_those_who_are_accepted(tmp_path: Path) -> None:
    keys = {name: Identity.from_bytes(bytes([place + 1]) * 32).public_key for place, name in enumerate("abc")}
    for name, key in keys.items():
        run("add", tmp_path, name, "--key", key.hex())
    run("block", tmp_path, "b")
    operator = bytes.fromhex(run("roster-key", tmp_path / "operator.key").split('"')[1])
    run("roster", tmp_path, "--out", tmp_path / "roster.bin", "--sign", tmp_path / "operator.key")
    data = (tmp_path / "roster.bin").read_bytes()
    assert Roster.from_bytes(data, operator=operator).devices == ("a", "c")
    with pytest.raises(BadSignature):
        Roster.from_bytes(data, operator=keys["a"])
    with pytest.raises(BadInput, match="roster-key"):
        run("roster", tmp_path, "--out", tmp_path / "other.bin", "--sign", tmp_path / "nothing.key")
