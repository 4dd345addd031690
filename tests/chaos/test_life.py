"""The life of a fleet, from blank boards to a lock-out, through kills at its steps. The long form: `make chaos`."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from chaos.life import Life, Releases
from chaos.life_audit import _ledgers, check_files, check_life
from chaos.life_plan import KINDS, PARTS, STEPS, draw_life
from hushfleet.aggregator.fleet.trust.enrolment import carried_rounds
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.aggregator.storage.charged_keys import ChargedKeys
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.privacy.charge import Charge
from hushfleet.schema import pack
from support.desk import make_folder


def _the_token_holds(life: Life) -> None:
    with FleetRegistry(life.folder.path) as registry:
        registry.add_token(life.devices[0], b"token", expires=time.time() + 60)


def _a_key_is_elsewhere(life: Life) -> None:
    (life.folder.logs / "service.log").write_bytes(life.cards[0].tls.key_file.read_bytes())


def _certificates_change_sides(life: Life) -> None:
    with FleetRegistry(life.folder.path) as registry:
        registry.write("UPDATE certificates SET revoked = 1 - min(revoked, 1)")


def _charges_are_of_other_rounds(life: Life) -> None:
    with ActivityStore(life.folder.aggregator) as register:
        register.write("UPDATE charges SET round = round + 100")


def _the_aggregator_forgets(life: Life) -> None:
    with ActivityStore(life.folder.aggregator) as register:
        register.block(life.devices[life.plan.blocked - 1], "nobody said so")


def _a_seen_charge_is_none(life: Life) -> None:
    with ChargedKeys(life.folder.aggregator / "identity.key") as charged:
        assert charged.rows("SELECT weight FROM charged WHERE weight > 0"), "accepted updates have weights"
        charged.write("DELETE FROM charged")


def _another_release_runs(life: Life) -> None:
    link = life.boards[0].opt / "current"
    link.unlink()
    link.symlink_to("releases/9.9")


FAULTS = (
    (_the_token_holds, "holds still"),
    (_a_key_is_elsewhere, "the TLS key of"),
    (_certificates_change_sides, "revoked certificates"),
    (_charges_are_of_other_rounds, "were counted"),
    (_the_aggregator_forgets, "the aggregator knows"),
    (_a_seen_charge_is_none, "0 charged rounds were seen"),
    (_another_release_runs, "runs 9.9"),
)


@pytest.mark.slow
@pytest.mark.needs("mosquitto")
@pytest.mark.parametrize("seed", [1])
def test_a_fleet_lives_through_a_storm(seed: int, library: Path | None, tmp_path: Path) -> None:
    plan = draw_life(seed, kinds=KINDS if library else ("kill",))
    life = Life(plan, tmp_path, Releases(tmp_path), library)
    life.live()
    assert check_life(life) == []
    assert life.played
    for plant, found in FAULTS:
        plant(life)
        assert any(found in each for each in check_files(life)), f"the audit does not find: {found}"


@pytest.mark.parametrize(("code", "found"), [("disk", False), ("busy", True)])
def test_what_a_full_disk_has_cut_short_may_stay_counted(code: str, found: bool, tmp_path: Path) -> None:
    """Of a decline that says that nothing was committed it is taken back, so what is left then is a fault."""
    folder, name = make_folder(tmp_path / "fleet", boards=1), "greenhouse-01"
    (card,) = cards = [SimpleNamespace(device=name, config=SimpleNamespace(store_path=tmp_path / "store.sqlite"))]
    with AggregatorStore(folder.run) as run:
        run.put("task", b"small")
        run.put_decline(1, name, code=code, reason="")
    charge = Charge("device", "one device's update", "gaussian", 2.0)
    with DeviceStore(card.config.store_path, device=name) as store:
        store.note_enrolled(carried_rounds([("small", 2, pack(charge))]))
    with ActivityStore(folder.aggregator) as register:
        for number in (1, 2):
            register.note_charges("small", number, {name: pack(charge)}, certain=False)
    assert bool(list(_ledgers(SimpleNamespace(folder=folder, cards=cards)))) == found  # type: ignore[arg-type]


def test_the_long_form_strikes_every_part_at_every_step() -> None:
    lives = [draw_life(seed) for seed in range(80)]
    struck = Counter((part, life.troubles[0].step) for life in lives for part in life.troubles[0].targets)
    assert struck.keys() == {(part, step) for part in PARTS for step in STEPS}
    assert {trouble.kind for life in lives for trouble in life.troubles} == set(KINDS)
    assert draw_life(3) == draw_life(3)
