"""The number of commands only falls: a new one takes the place of another, or says here why not."""

from __future__ import annotations

from benchmarks.command_tree import command_tree, counts


def test_a_newcomer_finds_few_commands() -> None:
    """Before there were 19, 26 and 56. `fleet set` is the 17th and the 43rd."""
    found = counts(command_tree())
    assert found["hushfleet --help"] <= 17
    assert found["hushfleet fleet --help"] <= 17
    assert found["with sub-commands"] <= 43


def test_what_units_call_is_hidden_and_works() -> None:
    hidden = [" ".join(each.words) for each in command_tree() if each.hidden]
    assert hidden == ["fleet serve", "aggregator", "broker"]


def test_the_first_two_groups_of_a_fleet_are_twelve_commands() -> None:
    tree = [each for each in command_tree() if each.words[0] == "fleet" and len(each.words) == 2 and not each.hidden]
    first = [each.words[1] for each in tree if each.group in ("Make it and let it learn", "Boards, in and out")]
    assert len({*first} - {"set"}) == 12
