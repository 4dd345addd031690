"""[scenario] of the task file: what it accepts, what it says when it does not, and that it survives a run folder."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.errors import BadInput

EVERYTHING: dict[str, Any] = {
    "late": [{"devices": 2, "at_s": 10.0}, {"devices": ["device-3"], "at_round": 3}],
    "drop_out": [{"devices": ["device-1", "device-4"], "at_round": 2, "for_s": 5}],
    "crash": [{"process": "aggregator", "at_round": 4, "for_s": 1.0}, {"process": "broker", "at_s": 0, "for_s": 0.5}],
    "outage": [{"devices": "all", "at_s": 30.0, "for_s": 10.0}],
    "day": [{"devices": 4, "period_s": 60.0, "share": 0.6}],
    "slow_disk": [{"devices": 1, "write_mb_s": 0.2}],
    "out_of_memory": [{"devices": 1, "memory_mib": 40}],
}


def task(scenario: Any, **data: Any) -> Task:
    plain: dict[str, Any] = {
        "name": "try",
        "model": {"name": "digits-cnn"},
        "method": {"name": "fedglp-adp"},
        "data": {"name": "digits", **data},
    }
    return parse_task(plain if scenario is None else {**plain, "scenario": scenario}, where="try.toml")


def test_every_kind_of_entry_is_read_and_none_is_the_default() -> None:
    section = task(EVERYTHING).scenario
    assert (section.late[0].devices, section.late[0].at_s, section.late[0].at_round) == (2, 10.0, None)
    assert (section.late[1].devices, section.late[1].at_s, section.late[1].at_round) == (("device-3",), None, 3)
    assert (section.drop_out[0].devices, section.drop_out[0].for_s) == (("device-1", "device-4"), 5.0)
    assert [(crash.process, crash.at_s) for crash in section.crash] == [("aggregator", None), ("broker", 0.0)]
    assert section.outage[0].devices == "all"
    assert (section.day[0].period_s, section.day[0].share) == (60.0, 0.6)
    assert section.slow_disk[0].write_mb_s == 0.2
    assert section.out_of_memory[0].memory_mib == 40
    calm = task(None).scenario
    assert calm == task({}).scenario
    assert not any(vars(calm).values())


@pytest.mark.parametrize("scenario", [None, EVERYTHING])
def test_it_is_the_same_after_a_run_folders_json(scenario: Any) -> None:
    begun = task(scenario)
    text = json.dumps(begun.to_plain())
    again = parse_task(json.loads(text))
    assert again == begun
    # what --resume compares
    assert again.to_plain() == begun.to_plain()


def test_the_whole_section_can_be_set_on_the_command_line() -> None:
    entry = 'scenario.crash=[{process = "broker", at_s = 1, for_s = 2}]'
    plain = task(EVERYTHING).to_plain()
    changed = parse_task(plain, (entry,)).scenario
    assert [(crash.process, crash.at_s, crash.for_s) for crash in changed.crash] == [("broker", 1.0, 2.0)]
    assert changed.late == task(EVERYTHING).scenario.late


LATE = {"devices": 1, "at_s": 1}
DROP = {"devices": 1, "at_s": 1, "for_s": 1}
CRASH = {"process": "broker", "at_s": 1, "for_s": 1}
DAY = {"devices": 1, "period_s": 60, "share": 0.5}
HOW_MANY = r"must be how many \(1 or more\), a list of names such as \['device-3'\], or 'all'"


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        (5, "scenario = 5: "),
        ({"night": []}, "scenario: unknown field 'night'"),
        ({"late": LATE}, "scenario.late = .*: must be tables, each with its heading in double brackets"),
        ({"late": 5}, "scenario.late = 5: "),
        ({"late": [{**LATE, "for_s": 1}]}, r"scenario.late\[0\]: unknown field 'for_s'"),
        ({"late": [{"at_s": 1}]}, r"scenario.late\[0\]: missing field `devices`"),
        ({"late": [{"devices": 1}]}, r"scenario.late\[0\]: needs at_s \(seconds .*\) or at_round \(when"),
        ({"late": [LATE, {**LATE, "at_round": 2}]}, r"scenario.late\[1\].at_s = 1 and at_round = 2: give one of"),
        ({"late": [{**LATE, "at_s": -1}]}, r"scenario.late\[0\].at_s = -1: must be in .0, 2592000."),
        ({"late": [{**LATE, "at_s": math.nan}]}, r"scenario.late\[0\].at_s = nan: "),
        ({"late": [{**LATE, "at_s": math.inf}]}, r"scenario.late\[0\].at_s = inf: "),
        ({"late": [{"devices": 1, "at_round": 0}]}, r"scenario.late\[0\].at_round = 0: must be in .1, 1000000."),
        ({"late": [{**LATE, "devices": 0}]}, rf"scenario.late\[0\].devices = 0: {HOW_MANY}"),
        ({"late": [{**LATE, "devices": True}]}, rf"scenario.late\[0\].devices = True: {HOW_MANY}"),
        ({"late": [{**LATE, "devices": 1.5}]}, rf"scenario.late\[0\].devices = 1.5: {HOW_MANY}"),
        ({"late": [{**LATE, "devices": "device-1"}]}, rf"scenario.late\[0\].devices = 'device-1': {HOW_MANY}"),
        ({"late": [{**LATE, "devices": []}]}, rf"scenario.late\[0\].devices = \[\]: {HOW_MANY}"),
        ({"late": [{**LATE, "devices": ["a", 1]}]}, rf"scenario.late\[0\].devices = \['a', 1\]: {HOW_MANY}"),
        ({"late": [{**LATE, "devices": ["a/b"]}]}, rf"scenario.late\[0\].devices = \['a/b'\]: {HOW_MANY}"),
        ({"late": [{**LATE, "devices": ["a", "a"]}]}, r"scenario.late\[0\].devices = .*: must be names, each once"),
        (
            {"drop_out": [{**DROP, "devices": ["broker"]}]},
            r"scenario.drop_out\[0\]: 'broker' is not a device; .*\[\[scenario.crash\]\]",
        ),
        ({"drop_out": [LATE]}, r"scenario.drop_out\[0\]: missing field `for_s`"),
        ({"outage": [{**DROP, "for_s": 0}]}, r"scenario.outage\[0\].for_s = 0: must be in .0, 2"),
        ({"crash": [{**CRASH, "process": "device-1"}]}, r"scenario.crash\[0\].process = 'device-1': .*'broker'"),
        ({"crash": [{**CRASH, "devices": 1}]}, r"scenario.crash\[0\]: unknown field 'devices'"),
        ({"day": [{**DAY, "period_s": 0.5}]}, r"scenario.day\[0\].period_s = 0.5: must be in .1, 2"),
        ({"day": [{**DAY, "share": 1}]}, r"scenario.day\[0\].share = 1: must be in .0, 1[)]"),
        ({"day": [{**DAY, "share": 0}]}, r"scenario.day\[0\].share = 0: must be in .0, 1[)]"),
        ({"slow_disk": [{"devices": 1, "write_mb_s": 0}]}, r"scenario.slow_disk\[0\].write_mb_s = 0: must be in .0, 1"),
        ({"out_of_memory": [{"devices": 1, "memory_mib": 0}]}, r"scenario.out_of_memory\[0\].memory_mib = 0: "),
        ({"out_of_memory": [{"devices": 1, "memory_mib": 1.5}]}, r"scenario.out_of_memory\[0\].memory_mib = 1.5: "),
    ],
)
def test_errors_name_the_key_the_value_and_what_is_accepted(scenario: Any, said: str) -> None:
    with pytest.raises(BadInput, match=f"try.toml: {said}"):
        task(scenario)
