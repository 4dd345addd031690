"""Provides the functions of `import hushfleet as hf` for scripts and notebooks; they run the commands' own code.

import hushfleet as hf

run = hf.simulate("tasks/digits-hush.toml", {"privacy.epsilon": 2})
run.devices.plot.scatter("accuracy_alone", "accuracy_own")
run.report()
"""

from __future__ import annotations

import copy
import ctypes
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hushfleet import methods
from hushfleet.aggregator.config.sections import DataSection
from hushfleet.aggregator.config.task import Task, load_task, parse_task
from hushfleet.aggregator.report.notebook import run_console
from hushfleet.aggregator.results.events import EventTail
from hushfleet.data.arrays import Data
from hushfleet.data.conversion import READ, converted
from hushfleet.data.form import ANY_FORM
from hushfleet.errors import BadInput, HushfleetError, format_value
from hushfleet.learning import own_metrics
from hushfleet.learning.own_metrics import Metric, Metrics
from hushfleet.methods.method import Published
from hushfleet.output import say, take_all_characters
from hushfleet.paths import in_file, is_offered
from hushfleet.refusals import meant
from hushfleet.schema import read_file
from hushfleet.simulator.closed_round import OnRound, Round
from hushfleet.simulator.engines.fast.loaded_run import loaded_run
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.options import RunOptions
from hushfleet.simulator.run import opened, run
from hushfleet.simulator.run_folder import RunFolder, run_path, save_data
from hushfleet.simulator.runs import Comparison, Run, compare, open_run
from hushfleet.toml_text import toml_value

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "Comparison",
    "Data",
    "Run",
    "Task",
    "Workers",
    "compare",
    "events",
    "open_run",
    "script",
    "simulate",
    "task",
]

TaskSource = Task | Path | str | Mapping[str, Any]
_LOOK_EVERY_S = 0.1
_RETRY_S = 0.001
_preparing = threading.Lock()
"""Threads take turns: PyTorch traces one network at a time, and two runs must not find the same free folder."""


def task(source: TaskSource, changes: Mapping[str, Any] | None = None) -> Task:
    """Reads a task: from a file, from a dict with the same sections, or from another task.

    Example: `hf.task("tasks/digits-hush.toml", {"privacy.epsilon": 2})`

    :param changes: new values by key.
    :raises BadInput: names the key, its value, and the allowed values.
    """
    overrides = tuple(f"{key}={_toml(value)}" for key, value in (changes or {}).items())
    if isinstance(source, Task):
        source = source.to_plain()
    if isinstance(source, Mapping):
        return parse_task(copy.deepcopy(dict(source)), overrides)
    return load_task(Path(source), overrides)


@contextmanager
def script(arguments: Sequence[str] | None = None) -> Iterator[dict[str, str]]:
    """Gives a script's arguments as changes of a task; what Hushfleet refuses ends the script with a sentence.

    Example: `with hf.script() as changes: hf.simulate("task.toml", changes)`, for `python run.py round.rounds=5`

    :param arguments: each `KEY=VALUE`; None: those of the command line.
    """
    try:
        given = sys.argv[1:] if arguments is None else arguments
        if wrong := [each for each in given if "=" not in each]:
            raise BadInput(f"{wrong[0]!r}: give KEY=VALUE, with a key of the task, such as round.rounds=5")
        yield dict(each.split("=", 1) for each in given)
    except HushfleetError as error:
        say(f"error: {error}", error=True)
        sys.exit(error.exit_code)


def simulate(
    source: TaskSource,
    changes: Mapping[str, Any] | None = None,
    *,
    model: str | nn.Module | Callable[..., nn.Module] | None = None,
    data: Any = None,
    method: str | Published | None = None,
    loss: str | Callable[[Tensor, Tensor], Tensor] | None = None,
    metrics: Metrics | Sequence[Metric | str] | None = None,
    on_round: OnRound | None = None,
    workers: int | Workers = 0,
    keep: bool = True,
    quiet: bool = False,
    **options: Any,
) -> Run:
    """Runs a fleet on this machine, as `hushfleet simulate` does, and returns the run.

    Example: `hf.simulate(task, {"data.devices": 10}, model=Net, data=(x, y))` with a `torch.nn.Module` and arrays

    :param source: task, as for `task`; the same for `changes`.
    :param model: replaces `model.name`: a name, `FILE.py:NAME`, or a network, or a class or function that makes one
        (`hushfleet.models.module.model_of`).
    :param data: replaces `data.name`: (x, y) arrays, a table with named columns, `Data`, a PyTorch or Hugging Face data
        set (`hushfleet.data.conversion.as_data`); `data.label_column` and the like name the columns. It is written into
        the run folder; a resumed run reads it from there. If it contains the device of each sample, this is the
        partition, and the number of devices if the task has none.
    :param method: replaces `method.name`: a name, `FILE.py:NAME`, or a `Published`. Only this process knows a
        `Published`, so everything is then computed in this process.
    :param loss: replaces `model.loss`: a name, `FILE.py:NAME`, or a function of logits `[B, C]` and targets that
        returns one loss for each sample, float32 `[B]`.
    :param metrics: replaces `model.metrics`: functions of logits `[n, C]` and labels `[n]` by name, or a list
        of functions and of `FILE.py:NAME` (`hushfleet.learning.own_metrics`). Functions run in this process alone.
    :param on_round: called with each closed round (`hushfleet.simulator.closed_round.Round`) and its model before
        the next round begins; if it returns False, no further round opens. An exception leaves the run, which
        `resume=True` continues. Not with `engine="live"`.
    :param workers: number of processes, as the option; or `Workers`, whose processes stay for further runs.
    :param keep: False if only the result is wanted: the folder is a temporary one, and no report is written.
    :param quiet: print nothing.
    :param options: fields of `hushfleet.simulator.options.RunOptions`, which are the options of `hushfleet simulate`,
        such as `out`, `engine`, `seeds` and `resume`.
    :raises BadInput: names the value, and says what to do.
    """
    take_all_characters()
    if not keep:
        if options.get("out") is not None:
            raise BadInput(f"keep=False keeps no folder; leave out={str(options['out'])!r} out, or take report=False")
        parts: dict[str, Any] = {"model": model, "data": data, "method": method, "loss": loss}
        parts |= {"metrics": metrics, "on_round": on_round}
        with tempfile.TemporaryDirectory(prefix="hushfleet-") as out:
            how = {**options, "out": Path(out) / "run", "report": False, "workers": workers, "quiet": quiet}
            return simulate(source, changes, **parts, **how)
    pool = workers if isinstance(workers, Workers) else None
    asked_for = _run_options({**options, "workers": workers if pool is None else pool.count})
    if on_round is not None and asked_for.engine == "live":
        raise BadInput(
            "on_round does nothing with engine='live', whose aggregator is another process; take 'fast' or 'ray'"
        )
    with _preparing:
        changed = {**(changes or {}), **_named("model.name", model), **_named("method.name", method)}
        changed |= _named("model.loss", loss)
        if metrics is not None:
            changed["model.metrics"] = own_metrics.offer(metrics)
        offered = ["method"] * isinstance(method, Published)
        offered += ["metric"] * any(map(is_offered, changed.get("model.metrics", ())))
        if offered:
            if asked_for.engine != "fast" or asked_for.workers > 1:
                instead = (
                    "put it into a file" if asked_for.engine != "fast" else "leave workers= out, or put it into a file"
                )
                raise BadInput(
                    f"a {offered[0]} of a Python program runs in its process alone; {instead} and give 'FILE.py:NAME'"
                )
            asked_for = replace(asked_for, workers=1)
        if data is not None:
            # With a placeholder for the path, because the run folder depends on the task's name.
            changed |= {"data.path": "data.npz"}
            brought, read = _own_data(data, task(source, changed | {"data.name": "table"}))
            changed |= {"data.name": "arrays", **read}
            if brought.train_device is not None:
                changed |= {"data.partition": "given", **_number_of_devices(brought, source, changed)}
        asked = task(source, changed)
        files = RunFolder(run_path(asked_for.out, asked.name).absolute())
        if data is not None:
            if not asked_for.resume:
                save_data(brought, files)
            asked = task(asked, {"data.path": str(files.data)})
        console = run_console(quiet=quiet)
        simulation = opened(asked, files, asked_for, console)
    loaded_run.cache_clear()  # the folder may have contained another run, and the name may have meant another method
    if pool is not None:
        pool.begin(files.path, asked_for.device)
    run(simulation, asked_for, console=console, workers=pool, on_round=on_round)
    return Run(files.path)


def _own_data(data: Any, asked: Task) -> tuple[Data, dict[str, Any]]:
    """Converts a program's data by the words of the task, and returns the keys that are thereby done."""
    form = asked.data.form
    if isinstance(data, Data):
        return data, {}
    done = {f"data.{key}": getattr(ANY_FORM, key) for key in READ if getattr(form, key)}
    return converted(data, form, asked.targets.columns(asked.class_names)), done


def _number_of_devices(data: Data, source: TaskSource, changes: Mapping[str, Any]) -> dict[str, int]:
    """Returns the number of devices that the data name, unless the task says a number."""
    if isinstance(source, Task):  # it does not keep whether its file had the key
        said = source.data.devices != DataSection.devices
    else:
        plain = source if isinstance(source, Mapping) else read_file(Path(source))
        said = "devices" in plain.get("data", {})
    return {} if said or "data.devices" in changes else {"data.devices": len(np.unique(np.asarray(data.train_device)))}


def _run_options(options: Mapping[str, Any]) -> RunOptions:
    """Makes options from keyword arguments; paths may be strings. Raises `BadInput` for an unknown option."""
    known = list(dict.fromkeys((*_ARGUMENTS, *(field.name for field in fields(RunOptions)))))
    if unknown := sorted(options.keys() - {field.name for field in fields(RunOptions)}):
        asked = unknown[0]
        if key := _KEYS.get(asked):
            raise BadInput(f'simulate has no option {asked}: it is a key of the task, changes={{"{key}": ...}}')
        raise BadInput(f"simulate has no option {asked}{meant(asked, known)}; it has {', '.join(known)}")
    paths = {name: Path(options[name]) for name in ("out", "data_dir") if options.get(name) is not None}
    return RunOptions(**{**options, **paths})


_ARGUMENTS = tuple(simulate.__kwdefaults__ or ())
_KEYS = {"devices": "data.devices", "rounds": "round.rounds", "seed": "seed"}
"""The options of the command line that are keys of a task."""


def events(
    source: TaskSource, changes: Mapping[str, Any] | None = None, *, out: Path | str, **options: Any
) -> Iterator[dict[str, Any]]:
    """Simulates as `simulate` does, and yields the events when they happen. Get the run afterwards by `open_run(out)`.

    An event `round_close` has the `Round` with its model as `event["closed"]`, and the next round begins when the
    loop asks for the next event; not with `engine="live"`. Leaving the loop ends the run as Ctrl-C does; `resume=True`
    continues it.

    Example: `for event in hf.events(task, out="runs/a"): print(event["event"])`

    :param changes: as for `task`.
    :param options: options of `simulate`.
    """
    failed: list[BaseException] = []
    closed = dict[int, Round]()
    news, goes_on = threading.Event(), threading.Event()
    given = options.pop("on_round", None)

    def on_round(round: Round) -> object:
        answer = None if given is None else given(round)
        goes_on.clear()
        closed[round.number] = round
        news.set()
        while not goes_on.wait(_LOOK_EVERY_S):  # an interruption is noticed between two waits
            pass
        return answer

    def work() -> None:
        try:
            stepped: OnRound | None = None if options.get("engine") == "live" else on_round
            simulate(source, changes, out=out, quiet=True, on_round=stepped, **options)
        except BaseException as error:  # it is raised again in the caller's thread
            failed.append(error)
        news.set()

    reader = EventTail(RunFolder(Path(out)).events)
    if reader.path.exists():
        reader.offset = reader.path.stat().st_size  # skips the events of the earlier part of a resumed run
    thread = threading.Thread(target=work, name="simulate", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            news.wait(_LOOK_EVERY_S)
            news.clear()
            for event in reader.read():
                steps = event["event"] == "round_close" and options.get("engine") != "live"
                while steps and event["round"] not in closed and thread.is_alive():
                    news.wait(_LOOK_EVERY_S)  # the event is written before the function is called
                    news.clear()
                yield event | ({"closed": closed.pop(event["round"])} if steps and closed else {})
                if steps:
                    goes_on.set()
        if failed:
            raise failed[0]
        yield from reader.read()
    finally:
        goes_on.set()
        _interrupt(thread)


def _interrupt(thread: threading.Thread) -> None:
    """Raises KeyboardInterrupt in the thread, as Ctrl-C does in the main thread, and waits until it has ended."""
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
    ident, raised = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
    # CPython gives a new thread its parent's number until it runs: it would be interrupted instead of its parent, which
    # would wait for its start forever. So this waits until no thread is starting; nothing runs between check and call.
    starting = vars(threading).get("_limbo")
    while thread.is_alive() and (starting or not interrupt(ident, raised)):
        time.sleep(_RETRY_S)
    thread.join()


def _named(key: str, given: Any) -> dict[str, str]:
    """Returns the task key and its value for a model, method or loss given as an argument."""
    if given is None:
        return {}
    if isinstance(given, Published):
        name = methods.offer(given)
    elif not isinstance(given, str):
        from hushfleet.models import module, own_loss  # import PyTorch

        name = own_loss.offer(given) if key == "model.loss" else module.offer(given)
    elif in_file(given):
        name = methods.allow_file(given) if key == "method.name" else str(Path(given).absolute())
    else:
        name = given
    return {key: name}


def _toml(value: Any) -> str:
    plain = _plain(value)
    if isinstance(plain, str | Path):
        return str(plain)
    with suppress(TypeError, ValueError):  # Python writes no integer of thousands of digits
        if isinstance(plain, int | float | list):
            return toml_value(plain)
    raise BadInput(
        f"{format_value(value)} cannot be a value of a task: give a number, a word, true or false, or a list of them"
    )


def _plain(value: Any) -> Any:
    """Converts NumPy's types to Python's, and tuples to lists."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
