"""`hushfleet push` with an ssh that runs everything here: what reaches the board, and what stays on it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.aggregator.fleet.registry import FleetRegistry
from hushfleet.aggregator.fleet.releases import Release
from hushfleet.errors import BadInput, HushfleetError
from support.desk import make_folder

BOARD = "greenhouse-01"
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" = -p ] && shift; shift; done
echo "$1" >> "$FAKE/hosts"; shift
PATH="$FAKE/board:$PATH" exec sh -c "$*"
"""
BOARD_COMMANDS = {  # what the board's own commands say; nothing is installed on this machine
    "uname": "echo x86_64",
    "id": "echo 1000",
    "sudo": """
echo "$@" > "$FAKE/ran"
stat -c %a "$(dirname "$2")/.." > "$FAKE/mode"
cp -R "$(dirname "$2")" "$FAKE/seen"
exit ${FAKE_FAILS:-0}""",
}


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "fake"
    script(folder / "bin" / "ssh", SSH)
    for name, text in BOARD_COMMANDS.items():
        script(folder / "board" / name, text)
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "board-tmp"))
    (tmp_path / "board-tmp").mkdir()
    return folder


def run(*words: object) -> Any:
    outcome = CliRunner().invoke(build_app(), ["push", *map(str, words)])
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    return outcome


def test_a_running_board_gets_what_a_card_has_and_keeps_nothing_else(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "fleet")
    data = b"a release"
    (folder.releases / "small.hfr").write_bytes(data)
    release = Release("1.0", "any", "small.hfr", b"", hashlib.sha256(data).digest(), len(data))
    monkeypatch.setattr("hushfleet.aggregator.commands.push.release_for", lambda *_: release)
    words = ("me@board.local", "--fleet", folder.path, "--device", BOARD, "--ssh", "-p 2222")
    assert "it enrols by itself" in run(*words).output
    assert set((fake / "hosts").read_text().split()) == {"me@board.local"}
    seen = fake / "seen"
    assert (seen / "release.hfr").read_bytes() == b"a release"
    assert len((seen / "enrol.token").read_text().strip()) >= 32
    assert (fake / "mode").read_text() == "700\n", "nobody else on the board reads the token"
    assert f'id = "{BOARD}"' in (seen / "device.toml").read_text()
    assert (fake / "ran").read_text().split()[0] == "sh"
    assert list((tmp_path / "board-tmp").iterdir()) == [], "nothing is left on either side"
    with FleetRegistry(folder.path) as registry:
        assert len(registry.tokens(BOARD, now=0.0)) == 1
        registry.write("UPDATE boards SET board = 'raspberry-pi-4-4gb' WHERE id = 'greenhouse-02'")
    with pytest.raises(BadInput, match=r"x86_64.*aarch64"):
        run("me@board.local", "--fleet", folder.path, "--device", "greenhouse-02")
    monkeypatch.setenv("FAKE_FAILS", "3")
    with pytest.raises(HushfleetError, match=r"failed \(3\)"):
        run(*words, "--force")
    assert list((tmp_path / "board-tmp").iterdir()) == []


def test_an_option_is_no_destination(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    with pytest.raises(BadInput, match="no destination"):
        run("--fleet", folder.path, "--device", BOARD, "--", "-oProxyCommand=true")
