"""`hushfleet fleet roster export`: a list that boards can check, signed by a key that the aggregator does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.errors import BadSignature
from hushfleet.secure.membership_list import MembershipList
from hushfleet.wire.format.identity import Identity


def run(*words: object) -> str:
    result = CliRunner().invoke(build_app(), [*map(str, words)], catch_exceptions=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_a_signed_membership_list_of_those_who_are_accepted(tmp_path: Path) -> None:
    devices, key, out = tmp_path / "run", tmp_path / "operator.key", tmp_path / "signed"
    keys = {name: Identity.from_bytes(bytes([place + 1]) * 32).public_key for place, name in enumerate("abc")}
    for name, public in keys.items():
        run("fleet", "add", devices, name, "--key", public.hex())
    run("fleet", "block", devices, "b")
    operator = bytes.fromhex(run("fleet", "key", key).strip())
    run("fleet", "roster", "export", devices, "--out", tmp_path / "list", "--federation", "shed", "--min-devices", 2)
    assert MembershipList.from_bytes((tmp_path / "list").read_bytes()).signature == b""
    said = run("fleet", "roster", "sign", tmp_path / "list", "--key", key, "--out", out, "--yes")
    assert f"added        c  {keys['c'].hex()}" in said
    membership_list = MembershipList.from_bytes(out.read_bytes(), operator=operator)
    assert (membership_list.devices, membership_list.federation, membership_list.min_devices) == (("a", "c"), "shed", 2)
    with pytest.raises(BadSignature):
        MembershipList.from_bytes(out.read_bytes(), operator=keys["a"])


def test_a_sum_of_more_devices_than_a_membership_list_has_is_refused(tmp_path: Path) -> None:
    run("fleet", "add", tmp_path / "run", "a", "--key", Identity.generate().public_key.hex())
    assert "--min-devices" in run(
        "fleet", "roster", "export", tmp_path / "run", "--out", tmp_path / "list", "--min-devices", 100_001
    )
    assert not (tmp_path / "list").exists()
