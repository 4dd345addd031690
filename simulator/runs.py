"""A run that has ended, for scripts and notebooks: frames, plots, the report; and several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from hushfleet.aggregator.results.events import EventTail
from hushfleet.aggregator.results.gains import final_by_device
from hushfleet.aggregator.results.report.comparison import comparison_json, comparison_rows, load_runs
from hushfleet.aggregator.results.report.readable import percent
from hushfleet.aggregator.results.report.verdict import answer, judge, privacy_answer
from hushfleet.aggregator.results.result import Result, renamed
from hushfleet.errors import BadInput
from hushfleet.losses import ACCURACY
from hushfleet.simulator.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

_ACCURACIES = {
    "accuracy_own_common": "own models, common test",
    "accuracy_own_local": "own models, own data",
    "accuracy_global": "global model, common test",
}


class Run:
    """A run that has ended.

    :param folder: with `result.json`, `report.html`, `models/` and more, see `hushfleet.simulator.run_folder`.
    :raises BadInput: there is no result in it.
    """

    def __init__(self, folder: Path | str) -> None:
        self._files = RunFolder(Path(folder))
        self.folder = self._files.path
        self.result = Result.load(self._files.result)

    @property
    def rounds(self) -> pd.DataFrame:
        """One row a round, see `hushfleet.aggregator.results.result.RoundRow`."""
        rows = [self._named(row.model_dump()) for row in self.result.rounds]
        return pd.DataFrame(rows).set_index("round")

    @property
    def devices(self) -> pd.DataFrame:
        """One row a device: accuracies at the end (fractions of 1), what it sent, what it spent. Another score than the
        accuracy has its own name, as `auroc_own`."""
        details = self.result.details
        ends = {
            "accuracy_own": final_by_device(details.accuracy_own_common, len(details.devices)),
            "accuracy_own_local": final_by_device(details.accuracy_own_local, len(details.devices)),
            "accuracy_alone": details.local_only_common,
            "accuracy_alone_local": details.local_only_local,
            "rounds_accepted": details.rounds_accepted,
            "uplink_bytes": details.uplink_bytes,
        }
        known = {name: values for name, values in ends.items() if values}
        frame = pd.DataFrame(self._named(known), index=details.devices)
        spent = self.privacy
        return frame.join(spent[["epsilon_server", "epsilon_release"]]) if len(spent) else frame

    @property
    def privacy(self) -> pd.DataFrame:
        """One row a device: what it has spent at the end, see `hushfleet.aggregator.results.result.PrivacyRow`."""
        rows = pd.DataFrame([row.model_dump() for row in self.result.privacy])
        return rows.set_index("device") if len(rows) else rows

    @property
    def seeds(self) -> pd.DataFrame:
        """One row a seed of a run with several, see `hushfleet.aggregator.results.result.SeedPoint`.

        `run.seeds.agg(["mean", "std"])` gives the mean and the spread.
        """
        rows = pd.DataFrame([row.model_dump() for row in self.result.details.seeds])
        return rows.set_index("seed").dropna(axis="columns", how="all") if len(rows) else rows

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events, oldest first; docs/result.md has the kinds."""
        return EventTail(self._files.events).read()

    @property
    def summary(self) -> str:
        """Whether federating was worth it, and what the privacy of that means: the report's own sentences."""
        headline = judge(self.result)
        return f"{answer(self.result, headline)} {privacy_answer(headline, devices=self.result.devices)}"

    def model(self, which: str = "global") -> dict[str, Tensor]:
        """A trained model of a simulation, as a PyTorch state_dict.

        Example: `net.load_state_dict(run.model("device-3"), strict=False)`

        It holds what was trained: frozen parameters and buffers of a network of your own are as they were. The network
        takes inputs that are normalised as `normalisation` says.

        :param which: "global", or a device's name: the model that it predicts with, whose accuracy `devices` has.
        :raises BadInput: there is no such model.
        """
        import torch

        from hushfleet.simulator.model_files import trained_tensors

        return {name: torch.from_numpy(array.copy()) for name, array in trained_tensors(self._files, which).items()}

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel: the network is given (x - mean) / std, of images in [0, 1].

        :raises BadInput: this is no simulation.
        """
        from hushfleet.simulator.model_files import spec_of

        spec = spec_of(self._files).model
        return spec.mean, spec.std

    def report(self) -> Path:
        """The report, one HTML file that needs nothing else."""
        return self._files.report

    def plot_accuracy(self, ax: Axes | None = None) -> Axes:
        """Accuracy over rounds, means over devices; dashed: each device trained alone."""
        columns, measure = self._named(_ACCURACIES), self.result.details.measure
        frame = _measured(self.rounds[list(columns)].rename(columns=columns))
        axes: Axes = frame.interpolate(limit_area="inside").plot(ax=ax, ylabel=measure, grid=True)
        alone = self.result.local_only.accuracy_own_common
        if alone is not None:
            axes.axhline(alone, linestyle="--", color="gray", label="alone, common test")
        axes.legend()
        return axes

    def plot_devices(self, ax: Axes | None = None) -> Axes:
        """Accuracy of each device on its own data: federated against alone."""
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
            f"<tr><th>{escape(name)}</th><td>{percent(each.federated)}</td><td>{percent(each.alone)}</td></tr>"
            for name, each in judge(self.result).rows
        )
        return (
            f"<p>{escape(self.summary)}</p><table><tr><th>{measure}</th><th>federated</th><th>alone</th></tr>{rows}"
            f'</table><p><a href="{escape(self.report().as_posix())}">report</a></p>'
        )

    def _named(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values with names that begin with the measure of this run."""
        named: dict[str, Any] = renamed(values, ACCURACY, self.result.details.measure.lower())
        return named

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}): {self.summary}"


def _measured(frame: pd.DataFrame) -> pd.DataFrame:
    """Its columns with numbers. Raises `BadInput` where there are none."""
    found = frame.dropna(axis="columns", how="all")
    if found.columns.empty:
        raise BadInput("no such accuracy was measured; devices in the field do not send theirs")
    return found


def open_run(folder: Path | str) -> Run:
    """A run that has ended. Raises `BadInput` where there is none."""
    return Run(folder)


class Comparison:
    """Runs side by side, as `hushfleet compare` shows them.

    :param values: for programs: numbers by run, and the keys in which the tasks differ.
    """

    def __init__(self, results: dict[str, Result]) -> None:
        self.values = comparison_json(results)
        self._head, *self._rows = comparison_rows(results)

    @property
    def frame(self) -> pd.DataFrame:
        """The words of `hushfleet compare`: a row for each thing that is compared, a column for each run."""
        return pd.DataFrame([list(map(str, row[1:])) for row in self._rows],
                            index=[str(row[0]) for row in self._rows], columns=self._head[1:])  # fmt: skip

    def _repr_html_(self) -> str:
        return self.frame.to_html()


def compare(runs: Sequence[Run | Path | str]) -> Comparison:
    """Sets runs side by side.

    Example: `hf.compare([hf.simulate(task, {"privacy.epsilon": e}) for e in (1, 8)])`

    :raises BadInput: a folder has no result.
    """
    return Comparison(load_runs([run.folder if isinstance(run, Run) else Path(run) for run in runs]))
