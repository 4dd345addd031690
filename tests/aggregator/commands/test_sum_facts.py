"""`hushfleet aggregator` notes at each start who could unmask devices, for the report at the run's end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hushfleet.aggregator.commands.field_run import sum_facts_of
from hushfleet.aggregator.fleet.trust.keys import sum_facts
from hushfleet.aggregator.results.server_sees import SumFacts
from hushfleet.aggregator.storage.list_file import membership_list_file
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.secure.membership_list import MembershipListContent
from hushfleet.wire.format.identity import Identity
from support.desk import make_folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AggregatorStore]:
    with AggregatorStore(tmp_path / "run", durable=False) as made:
        yield made


def test_a_key_that_is_moved_away_during_a_run_is_still_told(store: AggregatorStore, tmp_path: Path) -> None:
    """Rounds were run while it was there."""
    folder = make_folder(tmp_path / "plant")
    first = sum_facts_of(store, sum_facts(folder), membership_list_file(folder.membership_list))
    assert first.keys_in_folder is not None
    assert "operator.key" in first.keys_in_folder
    folder.operator_key.unlink()
    assert sum_facts_of(store, sum_facts(folder), membership_list_file(folder.membership_list)) == first
    with AggregatorStore(tmp_path / "next", durable=False) as another:
        later = sum_facts_of(another, sum_facts(folder), membership_list_file(folder.membership_list))
    assert "operator.key" not in (later.keys_in_folder or ())


def test_without_a_fleet_it_is_whether_somebody_has_signed_the_membership_list(
    store: AggregatorStore, tmp_path: Path
) -> None:
    content = MembershipListContent.of({"a": Identity.generate().public_key})
    file = tmp_path / "roster"
    file.write_bytes(content.signed(Identity.generate()).to_bytes())
    assert sum_facts_of(store, None, membership_list_file(file)) == SumFacts("operator")
    assert sum_facts_of(store, None, None) == SumFacts("aggregator")
    assert sum_facts_of(store, None, membership_list_file(file)) == SumFacts("aggregator"), "an earlier start had none"
