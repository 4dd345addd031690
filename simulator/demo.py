"""`hushfleet demo`: run two fleets on this machine with broker, clients and real images, and write a report.

The paper's half: eight boards train FedGLP-ADP, a compact CNN each, and their single updates reveal a lot.
The kit's half: a hundred boards with a dozen images each train a small shared head, updates are opened as sums alone,
and at epsilon_server 2 each board gains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hushfleet.aggregator.broker.programs import BrokerKind
from hushfleet.aggregator.report.options import with_options
from hushfleet.atomic_file import write_whole
from hushfleet.simulator.options import BrokerOption, Out, Resume, RunOptions
from hushfleet.simulator.studies.invert.options import PICTURE, InvertOptions
from hushfleet.user_files import checked_folder, refuse_others

if TYPE_CHECKING:
    from rich.table import Table

    from hushfleet.aggregator.config.task import Task
    from hushfleet.aggregator.report.console import Console
    from hushfleet.aggregator.results.result import Result
    from hushfleet.simulator.engines.fast.workers import Workers

    Attack = tuple[Table, dict[str, bytes]]

BOARDS = "raspberry-pi-zero-2-w,raspberry-pi-5-8gb,jetson-orin-nano"


@dataclass(frozen=True)
class Half:
    """One of the two fleets.

    :param own_processes: number of devices with their own process; 0: all.
    :param short: changes to the task by `--short`.
    :param inverts: whether to reconstruct images from its updates: the server sees updates, of a network on pixels.
    """

    title: str
    task: str
    own_processes: int
    short: tuple[str, ...]
    inverts: bool = False

    def load(self, *, short: bool) -> Task:
        """Reads the task."""
        from hushfleet.aggregator.config.task import load_task

        return load_task(Path(__file__).with_name(self.task), self.short if short else ())


HALVES = {
    "paper": Half("FedGLP-ADP, as the paper", "demo_paper.toml", 0, ("round.rounds=3",), inverts=True),
    "secure": Half("hush, secure aggregation", "demo_secure.toml", 4, ("round.rounds=5",)),
}


@with_options
def demo(
    half: Annotated[Literal["both", "paper", "secure"], typer.Argument(help="Fleet to run. paper: 8 boards, "
"FedGLP-ADP on compact CNNs. secure: 100 boards, sums only, epsilon_server 2.")] = "both",
    out: Out = None,
    short: Annotated[bool, typer.Option("--short", help="Smoke test: 3 and 5 rounds, two images in the picture.")] = False,
    broker: BrokerOption = "auto",
    resume: Resume = False,
) -> None:  # fmt: skip
    """Run two fleets on this machine: broker, aggregator, clients, real images, a report.

    First eight client processes with the profiles of three boards train FedGLP-ADP on scanned digits over MQTT, as
    the paper has it. Then a hundred devices with a dozen images each learn a shared head, four of them in processes of
    their own, and the server opens sums alone. The table shows a board's gain in either, and the privacy
    that it gave away; a picture shows what the server could have seen of a training image.

    Examples:

    `hushfleet demo --out runs/demo`

    The second half alone: `hushfleet demo secure`
    """
    from hushfleet.aggregator.report.comparison import comparison_table, write_comparison
    from hushfleet.aggregator.report.console import Console
    from hushfleet.simulator.command import again_command, interrupted
    from hushfleet.simulator.engines.fast.workers import Workers
    from hushfleet.simulator.run_folder import run_path

    console, folder = Console(), run_path(out, "demo")
    chosen = {name: HALVES[name] for name in HALVES if half in ("both", name)}
    _check_folder(folder, chosen, resume=resume)
    attacks: dict[str, Iterator[Attack]] = {}
    with Workers() as workers:
        results: dict[str, Result] = {}
        for name, each in chosen.items():
            attacks[name] = _attack(each, folder / name, workers, short=short)
            results[name] = _run(each, folder, name, workers, console, broker=broker, short=short, resume=resume)
        try:
            for name, seen in attacks.items():
                for table, files in seen:
                    _add(table, files, results[name], folder / name, console)
        except KeyboardInterrupt:
            raise interrupted(console, again_command(folder)) from None
    if len(results) == 1:
        return
    titled = {each.title: results[name] for name, each in chosen.items()}
    reports = {each.title: f"{name}/report.html" for name, each in chosen.items()}
    write_comparison("Two fleets", titled, reports, folder / "report.html", seen=folder / "paper" / PICTURE)
    console.print(comparison_table(titled, title="what a board gained, and what it gave away"))
    console.print(f"report  {folder / 'report.html'}", highlight=False, markup=False)


def _check_folder(folder: Path, halves: Iterable[str], *, resume: bool) -> None:
    """Raises `BadInput` before any run if one of them cannot start, or if other files are in the folder."""
    from hushfleet.simulator.run_folder import RunFolder, check_new

    has_both = all(RunFolder(folder / name).result.exists() for name in HALVES)
    refuse_others(folder, {*HALVES, "report.html"} if has_both else set(HALVES))
    for name in halves:
        run = RunFolder(checked_folder(folder / name))
        if not (resume and run.task.exists()):
            check_new(run)


def _run(
    half: Half,
    out: Path,
    name: str,
    workers: Workers,
    console: Console,
    *,
    broker: BrokerKind,
    short: bool,
    resume: bool,
) -> Result:
    """Runs one half; with `--resume`, a half that has ended is not run again."""
    from hushfleet.aggregator.results.result import Result
    from hushfleet.simulator.command import run_and_show

    folder = out / name
    if resume and (folder / "result.json").exists():
        return Result.load(folder / "result.json")
    console.rule(half.title)
    options = RunOptions(
        engine="live",
        out=folder,
        resume=resume and (folder / "task.json").exists(),
        broker=broker,
        boards=BOARDS,
        own_processes=half.own_processes,
    )
    return run_and_show(half.load(short=short), options, console, out=out, workers=workers)


def _attack(half: Half, folder: Path, workers: Workers, *, short: bool) -> Iterator[Attack]:
    """Begins to reconstruct images in a worker, beside the rounds of both halves."""
    wanted = half.inverts and not (folder / PICTURE).exists()
    return workers.map(partial(_attacked, images=2 if short else 6), [half.load(short=short)] * wanted)


def _attacked(task: Task, *, images: int) -> Attack:
    """Returns the table and the files, so that this process alone loads PyTorch."""
    from hushfleet.simulator.studies.invert.show import table
    from hushfleet.simulator.studies.invert.study import invert

    seen = invert(task, InvertOptions(images=images))
    return table("what the server could see of a training image", seen.views), seen.files


def _add(table: Table, files: Mapping[str, bytes], result: Result, folder: Path, console: Console) -> None:
    """Adds the images that the server could see to the report."""
    from hushfleet.aggregator.report.render import write_report

    for name, data in files.items():
        write_whole(folder / name, data, durable=True)
    write_report(result, folder / "report.html", seen=folder / PICTURE)
    console.print(table)
