"""Reads finished runs for scripts and notebooks: data frames, plots, the report, and a comparison of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from msgspec import to_builtins

from hushfleet.aggregator.report.comparison import comparison, comparison_json, load_runs
from hushfleet.aggregator.report.readable import MINUS, NARROW, percent
from hushfleet.aggregator.report.verdict import judge
from hushfleet.aggregator.report.words import sentences
from hushfleet.aggregator.results.events import EventTail
from hushfleet.aggregator.results.gains import final_by_device
from hushfleet.aggregator.results.result import Result, RoundRow, renamed
from hushfleet.errors import BadInput
from hushfleet.losses import ACCURACY
from hushfleet.simulator.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

_ACCURACIES = {
    "accuracy_own_common": "personalized models, common test",
    "accuracy_own_local": "personalized models, own data",
    "accuracy_global": "global model, common test",
}


class Run:
    """A run. If it is still going on, or was interrupted, it has the rounds that had closed when it was opened.

    :param folder: folder with `result.json`, `report.html`, `models/` and more, see `hushfleet.simulator.run_folder`.
    :raises BadInput: there is no run in the folder.
    """

    def __init__(self, folder: Path | str) -> None:
        self._files = RunFolder(Path(folder))
        self.folder = self._files.path
        self.finished = self._files.result.exists() or not self._files.task.exists()
        """Whether the run has ended: all that it leaves is there."""
        if self.finished:
            self.result = Result.load(self._files.result)
        else:
            from hushfleet.simulator.so_far import result_so_far

            self.result = result_so_far(self._files)

    @property
    def rounds(self) -> pd.DataFrame:
        """One row per round, see `hushfleet.aggregator.results.result.RoundRow`."""
        rows = [_flat(self._named(to_builtins(row))) for row in self.result.rounds]
        names = self._named(_flat(dict.fromkeys(RoundRow.__struct_fields__)))  # also if no round has closed
        return pd.DataFrame(
            rows, columns=list(dict.fromkeys([*names, *(key for row in rows for key in row)]))
        ).set_index("round")

    @property
    def devices(self) -> pd.DataFrame:
        """One row per device: its name in the data, final accuracies (fractions of 1), bytes sent, privacy spent.

        A score other than the accuracy has its own name, such as `auroc_own`.
        """
        details = self.result.details
        ends = {
            "name": details.device_names,
            "accuracy_own": final_by_device(details.accuracy_own_common, len(details.devices)),
            "accuracy_own_local": final_by_device(details.accuracy_own_local, len(details.devices)),
            "accuracy_alone": details.local_only_common,
            "accuracy_alone_local": details.local_only_local,
            "rounds_accepted": details.rounds_accepted,
            "uplink_bytes": details.uplink_bytes,
            **{f"{name}_own_local": values for name, values in details.metrics_own.items()},
        }
        known = {name: values for name, values in ends.items() if values}
        frame = pd.DataFrame(self._named(known), index=details.devices)
        spent = self.privacy
        return frame.join(spent[["epsilon_server", "epsilon_release"]]) if len(spent) else frame

    @property
    def privacy(self) -> pd.DataFrame:
        """One row per device: privacy spent at the end, see `hushfleet.aggregator.results.result.PrivacyRow`."""
        rows = pd.DataFrame([to_builtins(row) for row in self.result.privacy])
        return rows.set_index("device") if len(rows) else rows

    @property
    def seeds(self) -> pd.DataFrame:
        """One row per seed of a run with several seeds, see `hushfleet.aggregator.results.result.SeedPoint`.

        `run.seeds.agg(["mean", "std"])` computes the mean and the spread.
        """
        rows = pd.DataFrame([_flat(to_builtins(row)) for row in self.result.details.seeds])
        return rows.set_index("seed").dropna(axis="columns", how="all") if len(rows) else rows

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events, oldest first; docs/result.md lists their kinds."""
        return EventTail(self._there.events).read()

    @property
    def summary(self) -> str:
        """The report's own sentences: is federating worth it, and what does its privacy mean?"""
        if not self.finished:
            return f"The run has not ended: {len(self.result.rounds)} rounds have closed."
        told = sentences(self.result, judge(self.result))
        return f"{told['answer']} {told['privacy']}"

    def model(self, which: str = "global") -> dict[str, Tensor]:
        """Returns a trained model of a simulation, as a PyTorch state_dict.

        Example: `net.load_state_dict(run.model("device-3"), strict=False)`

        It contains only trained parameters, not the frozen parameters and buffers of your own network. The network
        needs inputs that are normalised by `normalisation`.

        :param which: "global", or a device's name: the model with which it predicts; `devices` has its accuracy.
        :raises BadInput: there is no such model.
        """
        import torch

        from hushfleet.simulator.model_files import trained_tensors

        files = self._there
        closed = None if self.finished else max((row.round for row in self.result.rounds), default=0)
        tensors = trained_tensors(files, which, closed=closed)
        return {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel: the network's input is (x - mean) / std, for pixels x in [0, 1],
        and for other values as they are in the data.

        :raises BadInput: this is no simulation.
        """
        from hushfleet.simulator.model_files import spec_of

        spec = spec_of(self._there).model
        return spec.mean, spec.std

    def report(self) -> Path:
        """Returns the path of the report, one self-contained HTML file. Raises `BadInput` if it was not written."""
        if not self._there.report.exists():
            raise BadInput(f"{self.folder} has no report: `hushfleet report {self.folder}` writes it after the run")
        return self._files.report

    def plot_accuracy(self, ax: Axes | None = None) -> Axes:
        """Plots accuracy over rounds, as means over devices; dashed: each device trained alone."""
        columns, measure = self._named(_ACCURACIES), self.result.details.measure
        frame = _measured(self.rounds[list(columns)].rename(columns=columns))
        axes: Axes = frame.interpolate(limit_area="inside").plot(ax=ax, ylabel=measure, grid=True)
        local_only = self.result.local_only.accuracy_own_common
        if local_only is not None:
            axes.axhline(local_only, linestyle="--", color="gray", label="alone, common test")
        axes.legend()
        return axes

    def plot_devices(self, ax: Axes | None = None) -> Axes:
        """Plots the accuracy of each device on its own data: federated against alone."""
        shown = self._named({"accuracy_alone_local": "alone", "accuracy_own_local": "federated"})
        frame = self.devices.rename(columns=shown)
        columns = [name for name in shown.values() if name in frame]
        axes: Axes = _measured(frame[columns]).plot.bar(
            ax=ax, ylabel=f"{self.result.details.measure}, own data", grid=True
        )
        return axes

    def _repr_html_(self) -> str:
        measure = escape(self.result.details.measure)
        rows = "".join(
            f"<tr><th>{escape(row.name)}</th><td>{percent(row.found.federated)}</td><td>{percent(row.found.local_only)}</td></tr>"
            for row in judge(self.result).rows
        )
        path = self._files.report
        link = f'<p><a href="{escape(path.as_posix())}">report</a></p>' if path.exists() else ""
        head = f"<tr><th>{measure}</th><th>federated</th><th>alone</th></tr>"
        return f"<p>{escape(self.summary)}</p><table>{head}{rows}</table>{link}"

    @property
    def _there(self) -> RunFolder:
        if not self.folder.exists():
            raise BadInput("the run was not kept (keep=False), and has nothing but its result")
        return self._files

    def _named(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns the values with "accuracy" in their names replaced by the measure of this run."""
        named: dict[str, Any] = renamed(values, ACCURACY, self.result.details.measure.lower())
        return named

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}): {self.summary}"


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a round, or a seed, with a column for each of the task's own metrics."""
    of_global, own = (row.pop(key) or {} for key in ("metrics", "metrics_own"))
    named = {f"{name}_global": value for name, value in of_global.items()}
    return row | named | {f"{name}_own_local": value for name, value in own.items()}


def _measured(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the frame's columns with numbers. Raises `BadInput` if there are none."""
    found = frame.dropna(axis="columns", how="all")
    if found.columns.empty:
        raise BadInput("no such accuracy was measured; devices in the field do not send theirs")
    return found


def open_run(folder: Path | str) -> Run:
    """Opens a run: a finished one, or one that is going on in another process, with its rounds so far (`Run.finished`).

    :raises BadInput: there is none.
    """
    return Run(folder)


class Comparison:
    """Runs side by side, as `hushfleet compare` shows them.

    :param values: values for programs: numbers by run, and the keys in which the tasks differ.
    """

    def __init__(self, results: dict[str, Result]) -> None:
        self.values = comparison_json(results)
        self._table = comparison(results)

    @property
    def frame(self) -> pd.DataFrame:
        """The table of `hushfleet compare`: a row for each compared quantity, a column for each run."""
        rows = [list(map(str, row)) for row in self._table.rows]
        return pd.DataFrame(rows, columns=list(self._table.head)).set_index("").rename_axis(None)

    def to_latex(self) -> str:
        """Returns the frame as a LaTeX table, with commands in place of signs that not every LaTeX has."""
        table: str = self.frame.to_latex(escape=True)
        return table.translate(_IN_LATEX)

    def __repr__(self) -> str:
        return self.frame.to_string()

    def _repr_html_(self) -> str:
        return self.frame.to_html()


_IN_LATEX = str.maketrans({NARROW: "~", MINUS: "$-$", "\N{INFINITY}": r"$\infty$", "±": r"$\pm$"})
Runs = Sequence[Run | Path | str]


def compare(runs: Runs | Mapping[str, Run | Path | str | Runs]) -> Comparison:
    """Compares runs side by side.

    Example: `hf.compare([hf.simulate(task, {"privacy.epsilon": e}) for e in (1, 8)])`

    :param runs: the columns have the names of their folders, or those of a dict, such as
        `{"FedAvg": run, "MOON": [first_seed, second_seed]}`.
    :raises BadInput: a folder has no result.
    """
    if not isinstance(runs, Mapping):
        return Comparison(_loaded(runs))
    results: dict[str, Result] = {}
    for name, given in runs.items():
        found = _loaded([given] if isinstance(given, Run | Path | str) else given)
        results |= {f"{name}, {folder}" if at else name: each for at, (folder, each) in enumerate(found.items())}
    return Comparison(results)


def _loaded(runs: Runs) -> dict[str, Result]:
    held = {run.folder: run.result for run in runs if isinstance(run, Run) and not run.folder.exists()}
    return load_runs([run.folder if isinstance(run, Run) else Path(run) for run in runs], held)
