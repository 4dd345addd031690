"""What all tests share."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis
import numpy as np
import pytest

from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import BlobRef, ModelSpec, PrivacySpec, TaskSpec, WireSpec

sys.path.insert(0, str(Path(__file__).parent))  # for `support`
from support.tools import closing_line, need

# Each commit of a store waits for a disk, and none where files lie in memory; with TMPDIR=/tmp they lie on the disk.
_MEMORY = Path("/dev/shm")
_room = os.statvfs(_MEMORY if _MEMORY.is_dir() else "/")
if _MEMORY.is_dir() and _room.f_bavail * _room.f_frsize > 8 << 30 and not _room.f_flag & os.ST_NOEXEC:
    os.environ.setdefault("TMPDIR", str(_MEMORY))  # of children, too
    tempfile.tempdir = None

# How long an example takes says how busy the machine is, and no test is about that. `.ci/run` draws the same examples
# each time, so that a change is refused for its own faults; `make test` searches on.
_SAME_DRAWS = "HUSHFLEET_SAME_DRAWS" in os.environ
hypothesis.settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=_SAME_DRAWS,
)
hypothesis.settings.load_profile("any machine")
if _SAME_DRAWS:  # draws contain constants of the modules that are loaded: those depend on which tests ran before
    patch("hypothesis.internal.conjecture.providers.is_local_module_file", return_value=False).start()
# Other versions of packages and of Python are seen by a few examples; the search is that of `make test`.
hypothesis.settings.register_profile("few", hypothesis.settings.get_profile("any machine"), max_examples=10)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Ten thousand tests stay in memory: the garbage collector does not walk through them again and again."""
    gc.disable()
    yield
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: a long one at the end would leave the other workers without work."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(tryfirst=True)  # before fixtures are set up, which start what may be missing
def pytest_runtest_setup(item: pytest.Item) -> None:
    need(*(name for mark in item.iter_markers("needs") for name in mark.args))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = [
        report.longrepr[2] for report in terminalreporter.getreports("skipped") if isinstance(report.longrepr, tuple)
    ]
    if (line := closing_line(reasons)) is not None:
        terminalreporter.write_line(line, yellow=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Where `.ci/run` has installed all that tests need, a test that is skipped hides a fault, but for what it cannot
    install, or does not: a GPU, and two of the brokers.

    What a test has logged must be UTF-8, or pytest-xdist ends the whole run: some log names of files that are not."""
    report = (yield).get_result()
    report.sections = [(head, said.encode(errors="backslashreplace").decode()) for head, said in report.sections]
    is_skipped = report.skipped and not hasattr(report, "wasxfail")
    may_lack = any(name in str(report.longrepr) for name in ("CUDA", "RabbitMQ", "aedes"))
    if is_skipped and os.environ.get("HUSHFLEET_NO_SKIPS") and not may_lack:
        report.outcome, report.longrepr = "failed", f"skipped, where nothing may be: {report.longrepr}"


@pytest.fixture(scope="session", autouse=True)
def _own_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keys that a test makes stay out of the user's configuration folder."""
    folder = tmp_path_factory.mktemp("config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield folder


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes fleets of `support.fleet`: an aggregator's rounds, and devices that sign what it is given."""
    from support.fleet import Fleet  # with PyTorch, which many tests do without

    fleets: list[Fleet] = []

    def make(**settings: Any) -> Fleet:
        fleets.append(Fleet(tmp_path / f"run-{len(fleets)}", **settings))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.store.close()


@pytest.fixture
def make_field(make_fleet: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Makes benches of `support.field`: a coordinator and scripted devices."""
    from support.field import CHUNK_BYTES, Field

    def make(
        *,
        chaos: Any = None,
        closed: bool = True,
        charges: bool = False,
        limits: dict[str, Any] | None = None,
        given: bool = False,
        **settings: Any,
    ) -> Field:
        settings.setdefault("wire", {"chunk_bytes": CHUNK_BYTES, "codec": "float32"})
        return Field(
            make_fleet(**settings), tmp_path, chaos=chaos, closed=closed, charges=charges, limits=limits, given=given
        )

    return make


@pytest.fixture(scope="session")
def audited() -> Callable[..., Any]:
    """A task package of a small network for `audit`, by method and what its privacy section has."""
    from hushfleet.simulator.studies.audit.subject import Subject

    graph = BlobRef(bytes(32), 1)

    def make(method: str = "dp-fedavg", *, seed: int = 0, codec: str = "quantized", **privacy: Any) -> Any:
        usual = {"unit": "device", "accounting": "strict", "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 1e-3}
        usual["noise_split"] = 4
        settings = {"optimizer": "sgd", "learning_rate": 0.1, "batch_size": 8}
        shapes = {"body.weight": (9, 12), "body.bias": (9,), "head.weight": (10, 24), "head.bias": (10,)}
        shapes |= {"norm.weight": (9,)} if method == "fedbn" else {}
        layout = ParamLayout(tuple(shapes), tuple(shapes.values()))
        model = ModelSpec("tiny", layout, (1, 6, 6), tuple("abcdefghij"), (0.5,), (0.25,), (), graph, graph)
        initial = np.random.default_rng(1).normal(0, 0.1, layout.size).astype(np.float32)
        protection = PrivacySpec(**{**usual, **privacy})
        spec = TaskSpec("audit-00000000", 10, method, settings, protection, WireSpec(codec), model, memory_mib=1)
        return Subject(spec, initial, 4, seed)

    return make
