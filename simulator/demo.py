"""`hushfleet demo`: the main job in one command, on real images, with a report worth looking at.

Two halves. The paper's: eight boards train FedGLP-ADP, a compact CNN each, and whoever sees their updates learns a lot.
The kit's own: a hundred boards with a dozen images each train a small shared head, the server sees nothing but sums, and
at epsilon_server 2 each board gains.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hushfleet.aggregator.broker import BrokerKind
from hushfleet.simulator.cli import BrokerOption, Out, Resume
from hushfleet.simulator.options import RunOptions

if TYPE_CHECKING:
    from rich.console import Console

    from hushfleet.aggregator.results.result import Result

BOARDS = ("raspberry-pi-zero-2-w", "raspberry-pi-5-8gb", "jetson-orin-nano")


@dataclass(frozen=True)
class Half:
    """One of the two fleets.

    :param own_processes: devices with a process of their own; 0: all.
    :param short: what `--short` changes of the task.
    """

    title: str
    task: str
    own_processes: int
    short: tuple[str, ...]


HALVES = {
    "paper": Half("FedGLP-ADP, as the paper", "demo_paper.toml", 0, ("round.rounds=3",)),
    "secure": Half("hush, secure sums", "demo_secure.toml", 8, ("round.rounds=5",)),
}


def register(app: typer.Typer) -> None:
    @app.command()
    def demo(
        half: Annotated[Literal["both", "paper", "secure"], typer.Argument(help="paper: 8 boards, FedGLP-ADP on compact CNNs. secure: 100 boards, sums only, epsilon_server 2.")] = "both",
        out: Out = None,
        short: Annotated[bool, typer.Option("--short", help="3 and 5 rounds: a smoke test.")] = False,
        broker: BrokerOption = "auto",
        resume: Resume = False,
    ) -> None:  # fmt: skip
        """Run two fleets on this machine: broker, aggregator, clients, real images, a report.

        First eight client processes with the profiles of three boards train FedGLP-ADP on scanned digits over MQTT, as
        the paper has it. Then a hundred devices with a dozen images each, eight of them in processes of their own, learn a
        shared head, and the aggregator sees nothing but sums. The table says what a board gained by either, and what it
        gave away.

        Examples:

        `hushfleet demo --out runs/demo`

        `hushfleet demo secure` the second half alone
        """
        from rich.console import Console

        from hushfleet.aggregator.results.report.comparison import comparison_table, write_comparison
        from hushfleet.simulator.run_folder import run_path

        console, folder = Console(), run_path(out, "demo")
        chosen = {name: HALVES[name] for name in HALVES if half in ("both", name)}
        results = {
            each.title: _run(each, folder / name, broker, short, resume, console) for name, each in chosen.items()
        }
        if len(results) == 1:
            return
        reports = {each.title: f"{name}/report.html" for name, each in chosen.items()}
        write_comparison("Two fleets", results, reports, folder / "report.html")
        console.print(comparison_table(results, title="what a board gained, and what it gave away"))
        console.print(f"report  {folder / 'report.html'}", highlight=False)


def _run(half: Half, folder: Path, broker: BrokerKind, short: bool, resume: bool, console: Console) -> Result:
    """A half that has ended is not run again by `--resume`."""
    from hushfleet.aggregator.results.result import Result
    from hushfleet.simulator.boards import FleetMix
    from hushfleet.simulator.command import overridden, run_and_show

    if resume and (folder / "result.json").exists():
        return Result.load(folder / "result.json")
    console.rule(half.title)
    task = overridden(Path(__file__).with_name(half.task), half.short if short else ())
    options = RunOptions(engine="live", broker=broker, own_processes=half.own_processes)
    mix = FleetMix.in_turn(BOARDS, task.data.devices)
    again = resume and (folder / "task.json").exists()
    return run_and_show(task, folder, options, console, mix=mix, resume=again)
