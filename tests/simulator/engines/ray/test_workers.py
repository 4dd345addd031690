"""The Ray engine: the fast engine's bits, whoever of driver and workers dies.

One local Ray with two workers serves the whole file; other drivers join it by its address, as they would a cluster.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.results.events import EventLog
from hushfleet.errors import BadInput, HushfleetError, LedgerError
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.local_only import train_local_only
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.engines.ray import workers as ray_workers
from hushfleet.simulator.engines.ray.fingerprint import code_digest, differences, fingerprint
from hushfleet.simulator.engines.ray.workers import RayWorkers, work
from hushfleet.simulator.results import read_metrics
from hushfleet.simulator.run_folder import begin

pytestmark = pytest.mark.slow

OBJECT_STORE_BYTES = 200 << 20  # /dev/shm is small in containers

# Joins the Ray of this file; with a number, it dies before that update is handed to the aggregator.
DRIVER = r"""
import os, signal, sys
from pathlib import Path

from hushfleet.aggregator.results.events import EventLog
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.ray.workers import RayWorkers
from hushfleet.simulator.run_folder import go_on

address, folder, workers, dies_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
handed = 0


def hook(frame, event, argument):
    global handed
    if event == "call" and frame.f_code.co_name == "deliver":
        handed += 1
        if handed == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


simulation = go_on(folder, data_dir=None)
with RayWorkers(workers, address=address) as pool, EventLog(simulation.folder.events) as events:
    sys.setprofile(hook)
    run_rounds(simulation, pool, events)
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[RayWorkers]:
    with RayWorkers(2, object_store_bytes=OBJECT_STORE_BYTES) as pool:
        # Workers cannot import a test file.
        pool._ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield pool


def run(simulation: Any, pool: Any) -> Any:
    with EventLog(simulation.folder.events) as events:
        run_rounds(simulation, pool, events)
    return simulation


def metrics_of(simulation: Any) -> dict[str, Any]:
    """All that devices measured, but the time it took."""
    names = [device.name for device in simulation.fleet.devices]
    return {
        name: {
            round: {key: value for key, value in line.items() if key != "train_s"}
            for round, line in read_metrics(simulation, name).items()
        }
        for name in names
    }


# the same as the fast engine


def test_secure_aggregation_are_those_of_the_fast_engine(
    pool: RayWorkers, runs: Any, short_task: Any, audit: Any, tmp_path: Path
) -> None:
    task = short_task(
        method={"name": "dp-fedavg"},
        privacy={"accounting": "secure", "delta": 1e-5},
        round={"rounds": 2, "cohort_size": 5, "min_updates": 4},
    )
    fast = runs.fast(begin(task, tmp_path / "fast", data_dir=None))
    simulation = run(begin(task, tmp_path / "run", data_dir=None), pool)
    assert audit.models(simulation) == audit.models(fast)
    assert len(set(audit.models(simulation).values())) == 3, "it learned in each round"
    assert metrics_of(simulation) == metrics_of(fast)


# map


def slow_first(number: int) -> int:
    time.sleep(0.2 if number == 0 else 0.0)
    return number * 10


def test_outcomes_come_in_order_and_little_is_asked_for_ahead(pool: RayWorkers) -> None:
    asked = []

    def numbers() -> Iterator[int]:
        for number in itertools.count():
            asked.append(number)
            yield number

    outcomes = pool.map(slow_first, numbers())
    assert [next(outcomes) for _ in range(30)] == [number * 10 for number in range(30)]
    assert 30 <= len(asked) <= 30 + ray_workers.AHEAD * pool.count
    outcomes.close()
    assert list(pool.map(slow_first, [])) == []
    assert list(pool.map(slow_first, [3, 1, 2])) == [30, 10, 20]


def fail(number: int) -> None:
    if number == 2:
        raise LedgerError("round 2 was charged before")


def test_what_a_job_raises_arrives_as_it_is(pool: RayWorkers) -> None:
    outcomes = pool.map(fail, range(5))
    assert [next(outcomes), next(outcomes)] == [None, None]
    with pytest.raises(LedgerError, match=r"^round 2 was charged before$"):
        next(outcomes)


@dataclass(frozen=True)
class Somewhere:
    path: Path


def test_a_node_must_see_the_run_folder() -> None:
    with pytest.raises(BadInput, match=r"does not see /nowhere"):
        work(str, Somewhere(Path("/nowhere")), fingerprint())
    assert work(str, Somewhere(Path("/")), fingerprint()) == "Somewhere(path=PosixPath('/'))"


def test_there_is_one_ray_in_a_process(pool: RayWorkers) -> None:
    with pytest.raises(BadInput, match="close those workers first"):
        RayWorkers(1)


# deaths: last, as every new worker takes seconds


def strike(function: Callable[[Any], Any], marks: Path, job: Any) -> Any:
    """Kills a worker before its job, a chunk of devices, and another one, or the same, after its job."""
    first = job.clients[0].device

    def die_once(moment: str) -> None:
        try:
            (marks / f"{first} {moment}").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    victim = (job.plan.round, first)
    if victim == (1, "device-0"):
        die_once("before")
    answer = function(job)
    if victim == (2, "device-4"):
        die_once("after")
    return answer


@dataclass(frozen=True)
class Struck:
    """Workers of which some are killed."""

    pool: RayWorkers
    marks: Path

    @property
    def count(self) -> int:
        return self.pool.count

    def map(self, function: Callable[[Any], Any], items: Any) -> Any:
        return self.pool.map(partial(strike, function, self.marks), items)


def test_workers_that_are_killed_change_nothing(
    pool: RayWorkers, runs: Any, calm: Any, audit: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    simulation = run(runs.copy(tmp_path / "run"), Struck(pool, marks))
    assert {path.name for path in marks.iterdir()} == {"device-0 before", "device-4 after"}
    assert audit.models(simulation) == audit.models(calm)
    assert len(set(audit.models(simulation).values())) == 4, "it learned in each round"
    assert metrics_of(simulation) == metrics_of(calm)
    assert all("accuracy_own_local" in line for line in metrics_of(calm)["device-3"].values())
    audit.check(simulation)
    shown = capfd.readouterr()
    assert shown.err == ""
    assert len(shown.out.splitlines()) <= 4, "of each: that it died, and that its job is done again"
    assert list(train_local_only(simulation, pool)) == list(train_local_only(calm, Workers(1)))


def test_a_driver_that_is_killed_goes_on_in_another_one(
    pool: RayWorkers, runs: Any, calm: Any, audit: Any, tmp_path: Path
) -> None:
    simulation = runs.copy(tmp_path / "run")
    address = pool._ray.get_runtime_context().gcs_address

    def drive(*, workers: int, dies_at: int) -> None:
        command = [sys.executable, "-c", DRIVER, address, simulation.folder.path, str(workers), str(dies_at)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == (-signal.SIGKILL if dies_at else 0), done.stderr[-3000:]
        assert done.stderr == ""

    drive(workers=2, dies_at=4)  # in the second of three rounds of five, whose chunks have four devices and one
    assert len(audit.events(simulation, "update")) == 5 + 4
    with pytest.raises(AssertionError):
        audit.check(simulation)
    drive(workers=1, dies_at=0)
    assert audit.models(simulation) == audit.models(calm)
    assert metrics_of(simulation) == metrics_of(calm)
    audit.check(simulation)


def test_a_job_that_always_kills_its_worker_is_given_up(pool: RayWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_work", pool._work.options(max_retries=0))
    with pytest.raises(HushfleetError, match="fewer --workers"):
        next(pool.map(lambda _: os.kill(os.getpid(), signal.SIGKILL), [1]))


# joining


def test_a_cluster_that_is_not_there_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"127\.0\.0\.1:1.*ray start --head"):
        ray_workers._check_address("127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(BadInput, match="ray start --head"):
        ray_workers._check_address("auto")
    for wrong in ("ray://head:10001", "head", "head:port"):
        with pytest.raises(BadInput, match="HOST:PORT"):
            ray_workers._check_address(wrong)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=r"pip install 'hushfleet\[ray\]'"):
        RayWorkers(2)


# on a node


def test_a_node_with_other_code_refuses() -> None:
    other = {**fingerprint(), "numpy": "1.0", "onnxruntime": ""}
    with pytest.raises(BadInput, match=r"has numpy: .* instead of 1\.0; onnxruntime: .* same versions on all nodes"):
        work(len, "abc", other)
    assert work(len, "abc", fingerprint()) == 3
    assert differences({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == [
        "a: none instead of 1",
        "b: 3 instead of 2",
        "c: 4 instead of none",
    ]


def test_the_compiler_counts_where_nodes_compile() -> None:
    own = fingerprint(compiled=True)
    assert set(own) - set(fingerprint()) == {"compiler"}
    assert work(len, "abc", own) == 3
    with pytest.raises(BadInput, match=r"has compiler: .* instead of another one"):
        work(len, "abc", {**own, "compiler": "another one"})


def test_the_digest_is_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hushfleet.simulator.engines.ray.fingerprint.PACKAGES", ("dig_here",))
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "dig_here"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").touch()

    def digest() -> str:
        return code_digest.__wrapped__()

    seen = [digest()]
    for change in (
        lambda: (package / "deep" / "a.c").write_text("int a;"),
        lambda: (package / "deep" / "a.c").write_text("int b;"),
        lambda: (package / "deep" / "a.c").rename(package / "a.c"),
    ):
        change()
        seen.append(digest())
    assert len(set(seen)) == 4
    (package / "note.txt").touch()
    assert digest() == seen[-1]
