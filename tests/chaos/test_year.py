"""A fleet's year, from the first card to December (`chaos.year`): afterwards every ledger is exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer
from click.testing import CliRunner

from chaos.year import LIMITS, Year
from chaos.year_audit import STOLEN, check_year, oracle, play
from hushfleet.aggregator.commands.main import build_app
from hushfleet.aggregator.fleet.watching.departed import NOT_BOUNDED, departed
from hushfleet.errors import BadInput
from hushfleet.privacy.protection import guess_rate


@pytest.fixture(scope="module")
def small_year(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Year]:
    folder = tmp_path_factory.mktemp("year")
    year = Year(folder, boards=5, every_days=14)
    play(year, folder)
    yield year
    year.close()


def test_after_a_year_every_ledger_is_exact_and_nobody_is_over_a_limit(small_year: Year) -> None:
    check_year(small_year)


def test_what_remains_of_a_board_that_has_left_is_what_the_server_knows(small_year: Year) -> None:
    """It was stolen in spring. The fleet is in autumn, whose task continues that of summer, and this that of spring."""
    folder, stolen = small_year.desk.folder, small_year.names[STOLEN]
    folder.task.write_text(folder.task.read_text().replace('name = "small"', 'name = "autumn"'))
    entries = small_year.cards[stolen].entries
    found = departed(folder, stolen)
    assert (found.how, found.unit, found.delta) == ("locked out: stolen", "device", LIMITS["delta"])
    book = small_year.server.register.charges(stolen)
    assert found.server == pytest.approx(oracle([entry.charge for entry in entries]), rel=1e-4)
    (row,) = found.tasks.rows
    task, charged, in_models, spent, stated, use = row
    assert (task, use) == ("spring", "in use: autumn continues them")
    assert int(charged) == len(book) == len(entries) >= int(in_models) > 0
    assert float(spent) == pytest.approx(found.server, rel=1e-2)
    assert float(stated) == pytest.approx(found.server, rel=1e-2)
    assert sum(int(each[2]) for each in found.periods.rows) == len(entries)
    assert len(found.periods.rows) == 2, "of January to March, and of April"
    assert 0 < found.release < found.server, "readers of models have the noise of others in the way"
    said = " ".join(found.sentences)
    assert f"guessed right at most {100 * guess_rate(found.server, found.delta):.1f} %" in said
    for member in (small_year.names[0], "nobody"):
        with pytest.raises(BadInput, match="is in the fleet" if member != "nobody" else "was never in"):
            departed(folder, member)
    done = CliRunner().invoke(typer.main.get_command(build_app()), ["report", str(folder.path), "--departed", stolen])
    assert done.exit_code == 0, done.output
    html = (folder.path / f"departed-{stolen}.html").read_text()
    assert all(each in done.output.replace("\n", " ") for each in NOT_BOUNDED[-1:])
    assert "in use: autumn continues them" in html
    folder.task.write_text(folder.task.read_text().replace('name = "autumn"', 'name = "spring"'))
    assert departed(folder, stolen).tasks.rows[0][-1] == "in use: the fleet's present task"
    small_year.desk.registry.forget(stolen)
    assert departed(folder, stolen).how == "forgotten"
    assert departed(folder, stolen).server == found.server
