"""Many seeds, some at a time; a campaign that was broken off can go on."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from chaos.machine import build_library
from chaos.trial import Outcome, TrialRunner
from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.results.events import EventTail
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.simulator.run_folder import Simulation, begin, go_on

MAX_SEEDS = 100_000
INTERRUPTED, FAILED = 130, 1


def parse_seeds(text: str) -> list[int]:
    """`200` is seeds 0 to 199, `40-59` those from 40 to 59, `3,17,40-59` all of these. Raises `BadInput`."""
    seeds: list[int] = []
    try:
        for part in [f"0-{int(text) - 1}"] if text.isdecimal() else text.split(","):
            first, _, last = part.partition("-")
            seeds += range(int(first), int(last or first) + 1)
    except ValueError:
        seeds = []
    if not seeds or len(seeds) > MAX_SEEDS:
        raise BadInput(
            f"--seeds {text!r}: give how many seeds (200), a range (40-59), one (17-17) or several (3,17,40-59)"
        )
    return list(dict.fromkeys(seeds))


def chaos_task(task: Task) -> Task:
    """The task with a round that waits for whoever is struck, so that every run has the calm run's participants."""
    plain = task.to_plain()
    plain.pop("scenario", None)
    half = max(1, task.data.devices // 2)
    plain["round"] |= {"quorum": 1.0, "min_updates": half, "cohort_size": 0, "deadline_s": 600.0}
    return parse_task(plain)


@dataclass(frozen=True)
class Campaign:
    """Seeds of one task, in a folder.

    :param folder: holds `prepared`, `outcomes.jsonl`, `chaos.json`, and the run folders of seeds that failed.
    :param jobs: runs at a time; 0 is one for each core.
    """

    folder: Path
    seeds: Sequence[int]
    jobs: int = 0

    def prepare(self, task: Task, *, data_dir: Path | None, resume: bool) -> Simulation:
        """Raises `BadInput` for a folder that holds a campaign already, or with `resume` one of another task."""
        prepared = self.folder / "prepared"
        if not resume:
            return begin(chaos_task(task), prepared, data_dir=data_dir)
        simulation = go_on(prepared, data_dir=data_dir)
        if simulation.task != chaos_task(task):
            raise BadInput(f"the campaign in {self.folder} is of another task; choose another --out")
        return simulation

    def done(self) -> list[Outcome]:
        """Of an earlier command in this folder, those of its seeds that are asked for and passed."""
        lines = EventTail(self.folder / "outcomes.jsonl").read()
        outcomes = {line["seed"]: Outcome(**line) for line in lines}
        return [outcomes[seed] for seed in self.seeds if seed in outcomes and outcomes[seed].passed]

    def library(self) -> tuple[Path | None, str]:
        """What machines need, or why there is none."""
        try:
            return build_library(self.folder / "library"), ""
        except HushfleetError as error:
            return None, f"no power cuts, full disks or clock jumps: {error}"

    def run(self, simulation: Simulation) -> Iterator[Outcome]:
        """What is not done yet, as it becomes ready; each is noted before it is given."""
        done = {outcome.seed for outcome in self.done()}
        jobs = self.jobs or len(os.sched_getaffinity(0))
        prepared = (simulation.folder.path, simulation.data_dir, self.library()[0])
        executor = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
        try:
            left = [seed for seed in self.seeds if seed not in done]
            runs = [executor.submit(_run, seed, self.folder / f"seed-{seed}", prepared) for seed in left]
            for run in as_completed(runs):
                outcome = run.result()
                with (self.folder / "outcomes.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
                yield outcome
        finally:
            executor.shutdown(cancel_futures=True)


def run_campaign(
    task: Task,
    campaign: Campaign,
    console: Console,
    *,
    data_dir: Path | None,
    resume: bool,
    again: str,
    replay: str,
) -> None:
    """Runs it, prints the table and how to replay what failed; exits with 1 if anything did, with 130 on Ctrl-C.

    In a terminal a bar shows how far it is; a pipe or a file gets a line for each seed.

    :param again: what to type to go on; :param replay: what to type for single seeds, without them.
    """
    began = time.monotonic()
    with console.status("loading data, exporting and checking the model's graphs"):
        simulation = campaign.prepare(task, data_dir=data_dir, resume=resume)
    if missing := campaign.library()[1]:
        console.print(missing, style="yellow", highlight=False)
    outcomes, path = campaign.done(), campaign.folder / "chaos.json"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        with bar:
            shown = bar.add_task("", total=len(campaign.seeds), completed=len(outcomes))
            for outcome in campaign.run(simulation):
                outcomes.append(outcome)
                failed = sum(not each.passed for each in outcomes)
                bar.update(shown, advance=1, description=f"{len(outcomes) - failed} passed, {failed} failed")
                if not outcome.passed or not console.is_terminal:
                    style = None if outcome.passed else "red"
                    console.print(escape(outcome.line), style=style, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(f"\n[bold]interrupted[/]; go on with:\n  {escape(again)}", highlight=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        path.write_text(json.dumps(summary(outcomes, seconds=time.monotonic() - began), indent=1) + "\n")
    console.print(_table(outcomes))
    console.print(f"summary  {path}", highlight=False)
    wrong = [outcome.seed for outcome in outcomes if not outcome.passed]
    for seed in wrong:
        words = f"seed {seed} failed; its files are in {campaign.folder / f'seed-{seed}'}; replay it with\n  "
        words += f"{replay} --seeds {seed}-{seed}"
        console.print(escape(words), highlight=False, soft_wrap=True)
    if wrong:
        raise typer.Exit(FAILED)


def summary(outcomes: Sequence[Outcome], *, seconds: float) -> dict[str, Any]:
    """For `chaos.json`: totals, how often each trouble happened, and a line for each seed."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.seed)
    happened = sum((Counter(outcome.played) for outcome in ordered), Counter[str]())
    return {
        "seeds": len(ordered),
        "passed": sum(outcome.passed for outcome in ordered),
        "failed": [outcome.seed for outcome in ordered if not outcome.passed],
        "seconds": round(seconds, 1),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "happened": dict(sorted(happened.items())),
        "field_noise": sum(outcome.field_noise for outcome in ordered),
        "tampered": dict(sorted(Counter(how for outcome in ordered for how in outcome.tampering).items())),
        "slow_links": sum(outcome.slow_links for outcome in ordered),
        "hostile": sum(outcome.bad_updates > 0 for outcome in ordered),
        "bad_updates": sum(outcome.bad_updates for outcome in ordered),
        "runs": [asdict(outcome) for outcome in ordered],
    }


def _table(outcomes: Sequence[Outcome]) -> Table:
    """What happened, in how many runs, and how many of them failed."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("trouble", "runs", "times", "failed"):
        shown.add_column(heading, justify="left" if heading == "trouble" else "right")
    rows = [(kind, [each for each in outcomes if kind in each.played])
            for kind in sorted({kind for each in outcomes for kind in each.played})]  # fmt: skip
    rows += [
        ("slow links", [each for each in outcomes if each.slow_links]),
        ("messages tampered with", [each for each in outcomes if each.tampering]),
        ("hostile member", [each for each in outcomes if each.bad_updates]),
        ("noise as in the field", [each for each in outcomes if each.field_noise]),
        ("all", list(outcomes)),
    ]
    for kind, those in rows:
        times = sum(each.played.get(kind, 0) for each in those)
        failed = sum(not each.passed for each in those)
        shown.add_row(kind, str(len(those)), str(times or ""), str(failed))
    return shown


@cache
def _runner(prepared: Path, data_dir: Path | None, library: Path | None) -> TrialRunner:
    return TrialRunner(go_on(prepared, data_dir=data_dir), library=library)


def _run(seed: int, folder: Path, prepared: tuple[Path, Path | None, Path | None]) -> Outcome:
    """In a worker. The folder of a run that failed stays."""
    runner = _runner(*prepared)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        outcome = runner.run(seed, folder)
    except Exception:
        return Outcome.of(runner.plan(seed), wrong=[traceback.format_exc()])
    if outcome.passed:
        shutil.rmtree(folder)
    else:
        (folder / "plan.json").write_text(json.dumps(asdict(runner.plan(seed)), indent=1))
    return outcome
