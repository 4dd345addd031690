"""One set of commands lets boards in and out, of a fleet and of a run without one, and takes many ids."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry, RefusedRequest
from hushfleet.aggregator.storage.activity import RefusedBirth
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.errors import BadInput
from hushfleet.wire.format.identity import Identity
from support import report_samples
from support.command import hushfleet
from support.desk import make_folder

NAMES = [f"greenhouse-{number:02d}" for number in range(1, 5)]
KEYS = {name: Identity.from_bytes(bytes([number + 1]) * 32).public_key for number, name in enumerate(NAMES)}
States = Callable[[], dict[str, str]]


called = partial(hushfleet, "fleet")


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    folder = make_folder(tmp_path / "greenhouse", boards=4)
    with FleetRegistry(folder.path) as registry:
        for name in NAMES[:3]:
            registry.add_refused_request(RefusedRequest(name, KEYS[name], False, "waits for approval", time.time()))
    return folder


@pytest.fixture(params=["fleet", "run"])
def place(request: pytest.FixtureRequest, folder: FleetFolder, tmp_path: Path) -> Iterator[tuple[Path, States]]:
    """A folder in which three boards ask to be let in, and what becomes of them."""
    if request.param == "fleet":
        with FleetRegistry(folder.path) as registry:
            yield folder.path, lambda: {row.device: row.standing for row in registry.boards()}
    else:
        with DeviceRegister(tmp_path / "run") as register:
            register.put_refused_births([RefusedBirth(name, KEYS[name], 1, 0.0) for name in NAMES[:3]])
            register.add([Board(NAMES[3], public_key=KEYS[NAMES[3]])])
            yield tmp_path / "run", lambda: {row.device: row.standing for row in register.devices()}


def test_many_boards_at_once(place: tuple[Path, States], tmp_path: Path) -> None:
    path, states = place
    said = called("approve", path, "greenhouse-*")
    assert all(f"{name} is let in with the key {KEYS[name].hex()}" in said for name in NAMES[:3])
    assert NAMES[3] not in said, "it does not ask"
    listed = tmp_path / "ids.txt"
    listed.write_text(f"# stolen\n{NAMES[1]}\n\n  {NAMES[2]}\n")
    assert f"locked out: {NAMES[0]} {NAMES[1]} {NAMES[2]};" in called("block", path, NAMES[0], "--file", listed)
    assert [states()[name] for name in NAMES[:3]] == ["blocked"] * 3
    assert called("unblock", path, "*").splitlines()[0] == f"no longer locked out: {' '.join(NAMES[:3])}"
    assert "blocked" not in states().values()
    assert f"forgotten: {NAMES[0]} {NAMES[2]}" in called("forget", path, NAMES[0], "*-03", NAMES[0])
    assert NAMES[0] not in states()
    assert NAMES[2] not in states()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["approve", NAMES[0], "greenhouse-1"], "there is no board 'greenhouse-1' in .*; did you mean greenhouse-0"),
        (["approve", NAMES[0], NAMES[3]], "no board with such a key|known by another key"),
        (["unblock", NAMES[0]], "is not locked out; it is "),
        (["forget", NAMES[0], "shed-*"], r"'shed-\*' matches no board of .* that this is for; see: hushfleet fleet"),
        (["unblock", "greenhouse-*"], "matches no board"),
        (["block"], "name the boards: ids, patterns"),
    ],
)
def test_nothing_is_changed_unless_all_can_be(place: tuple[Path, States], words: list[str], said: str) -> None:
    path, states = place
    before = states()
    with pytest.raises(BadInput, match=said):
        called(words[0], path, *words[1:])
    assert states() == before
    assert NAMES[0] in called("status", path)


def test_new_cards_for_many(folder: FleetFolder) -> None:
    called("approve", folder.path, *NAMES[:2])
    said = called("renew", folder.path, *NAMES[:2], "--new-card")
    assert f"flash --fleet {folder.path} --device {NAMES[0]} --device {NAMES[1]}" in said
    with FleetRegistry(folder.path) as registry:
        assert [row.public_key for row in registry.boards()] == [None] * 4


def test_a_run_has_no_cards_and_a_fleets_run_no_boards(tmp_path: Path, folder: FleetFolder) -> None:
    called("add", tmp_path / "run", "one")
    with pytest.raises(BadInput, match="knows no cards: use fleet forget and fleet approve"):
        called("renew", tmp_path / "run", "one", "--new-card")
    run = folder.path / "runs" / "small"
    run.mkdir(parents=True)
    (run / "aggregator.sqlite").touch()
    for verb in ("add", "block"):
        with pytest.raises(BadInput, match="name the fleet's folder"):
            called(verb, run, "one")
    assert not DeviceRegister.exists(run)


def test_boards_are_named_one_by_one(folder: FleetFolder) -> None:
    key = Identity.generate().public_key
    called("add", folder.path, "shed-1", "--board", "generic-x86", "--place", "behind", "--key", key.hex())
    with FleetRegistry(folder.path) as registry:
        row = registry.board("shed-1")
    assert (row.board, row.place, row.public_key) == ("generic-x86", "behind", key)
    for wrong in (("a", "b", "--board", "generic-x86", "--key", key.hex()), ("c",), ("c", "--count", "1")):
        with pytest.raises(BadInput):
            called("add", folder.path, *wrong)


def test_status_has_what_a_list_and_a_single_board_need(folder: FleetFolder) -> None:
    shown = called("status", folder.path)
    assert f"with no token and the key {KEYS[NAMES[0]].hex()[:16]}: waits" in shown
    one = called("status", folder.path, "*-01")
    assert f"key {KEYS[NAMES[0]].hex()}: waits for approval" in one
    assert NAMES[1] not in one
    assert called("status", folder.path, "--page").startswith("https://")
    assert KEYS[NAMES[0]].hex() in called("status", folder.path, "--json")


def test_one_command_reports_on_fleets_and_runs(folder: FleetFolder) -> None:
    with pytest.raises(BadInput, match=r"no task of .* has ended yet; its boards, .*: hushfleet fleet status"):
        hushfleet("report", folder.path)
    result = vars(report_samples)["bare"](vars(report_samples)["sample"]())
    for name in ("one", "two"):
        result.save(folder.path / "runs" / name / "result.json")
    assert "report.html" in hushfleet("report", folder.path).replace("\n", "")
    assert "runs/two/report.html" in (folder.path / "report.html").read_text()
    assert (folder.path / "runs" / "two" / "report.html").exists()


LOADED = """
import sys
from hushfleet.aggregator.commands.main import main
try:
    main()
finally:
    heavy = ("asyncio", "jinja2", "matplotlib", "onnx", "onnxruntime", "paho", "pandas", "plotly", "scipy", "torch")
    print("loaded", *(name for name in heavy if name in sys.modules))
"""


def test_a_status_loads_what_it_shows(folder: FleetFolder) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, "fleet", "status", str(folder.path)], capture_output=True, text=True, check=True
    )
    assert NAMES[0] in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded"
