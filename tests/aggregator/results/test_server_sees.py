"""A report's sentence on what the server sees follows from who signs the list of devices, and where the keys lie."""

from __future__ import annotations

import pytest

from hushfleet.aggregator.report.render import render_report
from hushfleet.aggregator.results.result import SumsInfo
from hushfleet.aggregator.results.server_sees import SumFacts, server_sees
from support.report_samples import sample, told

CASES = [
    (
        SumFacts("operator", ("operator.key", "release.key")),
        "as in this fleet: operator.key and release.key lie in its",
    ),
    (SumFacts("operator", ("root.key",)), "as in this fleet: root.key lies in its folder"),
    (SumFacts("operator", ()), "signs releases; none of them lies in the fleet's folder"),
    (SumFacts("operator"), "unless whoever runs it also holds the operator's key, which signed the list"),
    (SumFacts("aggregator"), "only if it follows the protocol: the devices take its own list"),
    (SumFacts("simulation"), "This is a simulation: one machine is the server and all devices"),
    (None, "only if somebody else signed the list of devices; this result does not say who"),
]


@pytest.mark.parametrize(("facts", "words"), CASES)
def test_words_follow_from_facts(facts: SumFacts | None, words: str) -> None:
    said = server_sees(facts, min_devices=12)
    assert words in said
    assert "nothing but sums of at least 12 devices" in said


@pytest.mark.parametrize(("facts", "words"), CASES)
def test_a_report_says_it_for_its_run(facts: SumFacts | None, words: str) -> None:
    sums = facts and SumsInfo(roster_by=facts.roster_by, keys_in_folder=facts.keys_in_folder, min_devices=12)
    result = sample().but(accounting="secure", trust="secure-sum", sums=sums)
    assert words in told(result, "trust")
    assert words in render_report(result).replace("&#39;", "'")
    assert "nothing but sums" not in told(sample(), "trust"), "without secure aggregation it sees every update"


def test_a_key_that_was_in_the_folder_at_an_earlier_start_is_told() -> None:
    now = SumFacts("operator", ("release.key",))
    assert now.or_worse(None) == now
    assert now.or_worse(SumFacts("operator", ("operator.key",))).keys_in_folder == ("operator.key", "release.key")
    assert SumFacts("operator").or_worse(SumFacts("aggregator")) == SumFacts("aggregator")
