"""Each place that says whether a fleet pays says the same sentence, for the boards that are enrolled."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hushfleet.aggregator.commands.main import build_app
from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.fleet import descriptions
from hushfleet.aggregator.fleet.page.render import render_parts
from hushfleet.aggregator.fleet.tasks.next_task import set_task
from hushfleet.aggregator.fleet.tasks.pay import enrolled, pay_of_fleet, told_images
from hushfleet.aggregator.fleet.trust.access import apply
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.fleet.watching.table import table
from hushfleet.aggregator.fleet.watching.watch import FleetWatch
from hushfleet.aggregator.report.verdict import judge
from hushfleet.aggregator.report.words import sentences
from hushfleet.aggregator.results.answers import StatisticRow, WithError
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.errors import BadInput
from hushfleet.simulator.studies.plan.cli import plan
from hushfleet.wire.format.identity import Identity
from support import report_samples
from support.command import hushfleet
from support.desk import make_folder

PLANNED = ["--images", "24", "--epsilon", "2", "--boards", "generic-x86"]
CLASSES = 'class_names = ["a", "b", "c", "d", "e", "f"]'


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    """Plans a task; returns the first sentence and the task's file."""
    import typer

    app = typer.Typer()
    app.command()(plan)

    def made(boards: int, *options: str, name: str = "planned") -> tuple[str, Path]:
        file = tmp_path / f"{name}.toml"
        done = CliRunner().invoke(app, ["--devices", str(boards), *PLANNED, *options, "--out", str(file)])
        assert done.exit_code == 0, done.output
        text = file.read_text().replace('name = "planned"', f'name = "{name}"')
        file.write_text(re.sub(r"class_names = \[.*\]", CLASSES, text))
        return done.output.split(".\n")[0], file

    return made


def enrol(folder: FleetFolder, count: int) -> None:
    with FleetRegistry(folder.path) as registry:
        for number, board in enumerate(registry.boards()[:count]):
            key = Identity.from_bytes(bytes([number]) * 32).public_key
            registry.write("UPDATE boards SET standing = 'enrolled', public_key = ? WHERE id = ?", (key, board.device))


def fleet_of(tmp_path: Path, file: Path, *, boards: int, here: int) -> FleetFolder:
    folder = make_folder(tmp_path / "fleet", boards=boards, task_file=file)
    enrol(folder, here)
    with FleetRegistry(folder.path) as registry:
        apply(folder, registry)
    return folder


@contextlib.contextmanager
def watching(folder: FleetFolder) -> Iterator[FleetWatch]:
    watch = FleetWatch(folder)
    yield watch
    watch.close()


def words(html: str) -> str:
    return unescape(" ".join(re.sub(r"<[^>]+>", " ", html).split()))


def places(folder: FleetFolder, file: Path) -> dict[str, str]:
    """What each place says of the fleet, as one line of text."""
    with watching(folder) as watch:
        view = watch.view()
    shown = io.StringIO()
    Console(file=shown, width=2000).print(table(view))
    result = vars(report_samples)["bare"](vars(report_samples)["sample"]())
    found = pay_of_fleet(load_task(folder.task), folder)
    assert found is not None
    told = result.but(pay=found.in_words, engine="field")
    given = hushfleet("fleet", "task", folder.path, file, "--now")
    return {
        "status": shown.getvalue(),
        "page": words(render_parts(view)["summary"]),
        "json": view.to_json()["pay"],
        "report of the run": sentences(told, judge(told))["answer"],
        "fleet task": given,
        "aggregator": said_by_aggregator(folder),
    }


def said_by_aggregator(folder: FleetFolder) -> str:
    """What `hushfleet aggregator --fleet` says before it looks for a broker; `fleet up` shows it."""
    command = [sys.executable, "-m", "hushfleet.aggregator.commands", "aggregator", "--fleet", str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        told = []
        for line in process.stdout:
            told.append(line)
            if "aggregator key" in line:
                process.kill()
    return "".join(told)


def test_every_place_says_the_sentence_of_the_plan(tmp_path: Path, planned: Any) -> None:
    sentence, file = planned(24, "--classes", "6")
    assert sentence.startswith("It may pay: 24 devices with 24 samples each (assumed), classes alike, at epsilon 2: ")
    folder = fleet_of(tmp_path, file, boards=24, here=24)
    for place, said in places(folder, file).items():
        assert sentence in said, place
        assert len(re.findall(r"\bIt (may |does not )?pays?\b", said)) == 1, f"{place} says no second one"


def test_a_fleet_is_judged_by_its_enrolled_boards(tmp_path: Path, planned: Any) -> None:
    """34 in the task, 24 enrolled: `fleet up` said what 34 would gain, `plan` for 24 "does not pay" (F8)."""
    sentence, file = planned(34, "--classes", "6")
    file.write_text(file.read_text().replace("min_updates = 31", "min_updates = 22\nmin_devices = 24"))
    folder = fleet_of(tmp_path, file, boards=34, here=25)
    with FleetRegistry(folder.path) as registry, ActivityStore(folder.aggregator) as register:
        one, two, *_ = (board.device for board in registry.boards())
        registry.block(one, "stolen")
        assert enrolled(folder) == 24
        register.block(two, "refused")
        apply(folder, registry)
    assert enrolled(folder) == 23
    real = pay_of_fleet(load_task(folder.task), folder)
    assert real is not None
    assert real.in_words.startswith("It may pay: 23 devices with 24 samples each (assumed)")
    assert real.in_words != sentence
    with watching(folder) as watch:
        assert watch.view().pay == real.in_words
        enrol(folder, 34)
        assert watch.view().pay.startswith("It may pay: 33 devices"), "the aggregator's block holds"
    assert real.in_words in said_by_aggregator(folder) or "33 devices" in said_by_aggregator(folder)


def test_a_simulation_of_the_plan_is_the_sentence_of_the_fleet(
    tmp_path: Path, planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan --data` said "It pays", and `fleet up` by the table alone "It may pay"."""
    for name, fewer in (("SEEDS", (0, 1)), ("TIMES", (0.5, 1.0, 2.0))):
        monkeypatch.setattr(f"hushfleet.simulator.studies.plan.own_images.{name}", fewer)
    sentence, file = planned(24, "--data", "digits", "--features", "filters", "--shape", "1,8,8")
    file.write_text(file.read_text().replace(CLASSES, f"class_names = {list('abcdefghij')}"))
    folder = fleet_of(tmp_path, file, boards=24, here=24)
    found = pay_of_fleet(load_task(folder.task), folder)
    assert found is not None
    assert found.in_words == sentence
    assert "measure it with samples like yours" not in sentence


def test_counts_that_boards_told_replace_the_guess(tmp_path: Path, planned: Any) -> None:
    _, file = planned(24, "--classes", "6")
    folder = fleet_of(tmp_path, file, boards=24, here=24)
    assert told_images(folder) is None
    counts = StatisticRow(
        kind="counts",
        devices=24,
        names=["a", "b", "left out"],
        values=[WithError(value=value, error=40) for value in (500.0, 268.0, 9999.0)],
    )
    path = folder.path / "runs" / "ask-counts-1" / "result.json"
    path.parent.mkdir(parents=True)
    result = vars(report_samples)["bare"](vars(report_samples)["sample"]())
    result.but(statistic=counts).save(path)
    assert told_images(folder) == 32
    with watching(folder) as watch:
        assert "24 devices with 32 samples each (told by noised counts)" in watch.view().pay
    unsure = [WithError(value=value, error=200) for value in (500.0, 268.0, 0.0)]
    result.but(statistic=counts.but(values=unsure)).save(path)
    assert told_images(folder) is None, "the noise hides it"


ASKS = "deadline_s = 3600.0\n\n[evaluation]\nshare = {}\n"


def test_a_useless_evaluation_is_refused_with_what_it_needs(tmp_path: Path, planned: Any) -> None:
    """`fleet task` took it, boards paid, and it said "+25.4 +- 175.8 points" (F7)."""
    _, first = planned(24, "--classes", "6")
    _, file = planned(24, "--classes", "6", name="next")
    file.write_text(file.read_text().replace("deadline_s = 3600.0\n", ASKS.format(0.05)))
    folder = fleet_of(tmp_path, first, boards=24, here=24)
    given = CliRunner().invoke(build_app(), ["fleet", "task", str(folder.path), str(file)])
    assert given.exit_code != 0
    assert "[evaluation] with share = 0.05" in (str(given.exception) + given.output), "no markup of the terminal"
    with pytest.raises(
        BadInput, match=r"\[evaluation\] with share = 0.05 tells the gain of 24 devices to ± [4-6]\d"
    ) as why:
        set_task(folder, file)
    needs = r"too much to say whether the fleet pays: it needs 2\d\d devices \(data.devices\); or leave"
    assert re.search(needs, str(why.value))
    folder.task.write_text(file.read_text())
    said = said_by_aggregator(folder)
    assert "[evaluation] with share = 0.05 tells the gain of 24 devices" in said
    assert "aggregator key" not in said, "it ended"


def test_a_useless_evaluation_of_a_former_run_replaces_no_sentence(tmp_path: Path, planned: Any) -> None:
    sentence, file = planned(24, "--classes", "6")
    folder = fleet_of(tmp_path, file, boards=24, here=24)
    log = EventLog(folder.run / "events.jsonl")
    log.write("run", task="planned-1", method="hush", unit="device", delta=1e-5, rounds=3, devices=24)
    for number, std, begins in ((1, 0.9, sentence), (2, 0.01, "It pays: +5.3 to +16.7 points over staying alone, by")):
        log.write("round_open", round=number, cohort_size=24)
        log.write(
            "round_close", round=number, participants=24, uplink_bytes=1, downlink_bytes=1, asked="evaluation",
            answer=[0.86, 0.11, 0.09, 0.8, 0.02], answer_stds=[std] * 5,
        )  # fmt: skip
        with watching(folder) as watch:
            view = watch.view()
        assert view.pay.startswith(begins)
        assert descriptions.sentences(view)["model"].startswith(view.pay)
