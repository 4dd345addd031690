"""Provides the functions of `import hushfleet as hf` for scripts and notebooks; they run the commands' own code.

import hushfleet as hf

run = hf.simulate("tasks/digits-hush.toml", {"privacy.epsilon": 2})
run.devices.plot.scatter("accuracy_alone", "accuracy_own")
run.report()
"""

from __future__ import annotations

import copy
import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hushfleet import methods
from hushfleet.aggregator.config.task import Task, load_task, parse_task
from hushfleet.aggregator.report.notebook import run_console
from hushfleet.aggregator.results.events import EventTail
from hushfleet.data.arrays import Data
from hushfleet.data.conversion import READ, converted
from hushfleet.data.form import ANY_FORM
from hushfleet.errors import BadInput, format_value
from hushfleet.methods.method import Published
from hushfleet.output import take_all_characters
from hushfleet.paths import in_file
from hushfleet.simulator.engines.fast.loaded_run import loaded_run
from hushfleet.simulator.options import RunOptions
from hushfleet.simulator.run import opened, run
from hushfleet.simulator.run_folder import RunFolder, run_path, save_data
from hushfleet.simulator.runs import Comparison, Run, compare, open_run
from hushfleet.toml_text import toml_value

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Comparison", "Data", "Run", "Task", "compare", "events", "open_run", "simulate", "task"]

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


def simulate(
    source: TaskSource,
    changes: Mapping[str, Any] | None = None,
    *,
    model: str | nn.Module | Callable[..., nn.Module] | None = None,
    data: Any = None,
    method: str | Published | None = None,
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
        partition.
    :param method: replaces `method.name`: a name, `FILE.py:NAME`, or a `Published`. Only this process knows a
        `Published`, so everything is then computed in this process.
    :param quiet: print nothing.
    :param options: fields of `hushfleet.simulator.options.RunOptions`, which are the options of `hushfleet simulate`,
        such as `out`, `engine`, `seeds` and `resume`.
    :raises BadInput: names the value, and says what to do.
    """
    take_all_characters()
    asked_for = _run_options(options)
    with _preparing:
        changed = {**(changes or {}), **_named("model", model), **_named("method", method)}
        if isinstance(method, Published):
            if asked_for.engine != "fast" or asked_for.workers > 1:
                raise BadInput(
                    "a method of a Python program runs in its process alone; give method='FILE.py:NAME' instead"
                )
            asked_for = replace(asked_for, workers=1)
        if data is not None:
            # With a placeholder for the path, because the run folder depends on the task's name.
            changed |= {"data.path": "data.npz"}
            own, read = _own_data(data, task(source, changed | {"data.name": "table"}))
            changed |= {"data.name": "arrays", **read}
            changed |= {} if own.train_device is None else {"data.partition": "given"}
        asked = task(source, changed)
        files = RunFolder(run_path(asked_for.out, asked.name).absolute())
        if data is not None:
            if not asked_for.resume:
                save_data(own, files)
            asked = task(asked, {"data.path": str(files.data)})
        console = run_console(quiet=quiet)
        simulation = opened(asked, files, asked_for, console)
    loaded_run.cache_clear()  # the folder may have contained another run, and the name may have meant another method
    run(simulation, asked_for, console=console)
    return Run(files.path)


def _own_data(data: Any, asked: Task) -> tuple[Data, dict[str, Any]]:
    """Converts a program's data by the words of the task, and returns the keys that are thereby done."""
    form = asked.data.form
    if isinstance(data, Data):
        return data, {}
    done = {f"data.{key}": getattr(ANY_FORM, key) for key in READ if getattr(form, key)}
    return converted(data, form, asked.targets.columns(asked.class_names)), done


def _run_options(options: Mapping[str, Any]) -> RunOptions:
    """Makes options from keyword arguments; paths may be strings. Raises `BadInput` for an unknown option."""
    known = [field.name for field in fields(RunOptions)]
    if unknown := options.keys() - set(known):
        raise BadInput(f"simulate has no option {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    paths = {name: Path(options[name]) for name in ("out", "data_dir") if options.get(name) is not None}
    return RunOptions(**{**options, **paths})


def events(source: TaskSource, *, out: Path | str, **options: Any) -> Iterator[dict[str, Any]]:
    """Simulates as `simulate` does, and yields the events when they happen. Get the run afterwards by `open_run(out)`.

    Leaving the loop ends the run as Ctrl-C does; `resume=True` continues it.

    Example: `for event in hf.events(task, out="runs/a"): print(event["event"])`

    :param options: options of `simulate`.
    """
    failed: list[BaseException] = []

    def work() -> None:
        try:
            simulate(source, out=out, quiet=True, **options)
        except BaseException as error:  # it is raised again in the caller's thread
            failed.append(error)

    reader = EventTail(RunFolder(Path(out)).events)
    if reader.path.exists():
        reader.offset = reader.path.stat().st_size  # skips the events of the earlier part of a resumed run
    thread = threading.Thread(target=work, name="simulate", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_LOOK_EVERY_S)
            yield from reader.read()
        if failed:
            raise failed[0]
        yield from reader.read()
    finally:
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


def _named(section: str, given: Any) -> dict[str, str]:
    """Returns the task key and its value for a model or method given as an argument."""
    if given is None:
        return {}
    if isinstance(given, Published):
        name = methods.offer(given)
    elif not isinstance(given, str):
        from hushfleet.models.module import offer  # imports PyTorch

        name = offer(given)
    elif in_file(given):
        name = methods.allow_file(given) if section == "method" else str(Path(given).absolute())
    else:
        name = given
    return {f"{section}.name": name}


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
