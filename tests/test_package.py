"""What is installed: one name in everybody's environment, all of our packages and data below it."""

from __future__ import annotations

import doctest
import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hushfleet.aggregator.results.result import Result

ROOT = Path(__file__).resolve().parents[1]
BUILT_OF = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
NESTED = ("aggregator", "edge_client", "firmware_profiles", "models", "simulator")

# In the folder of a user who has packages with the names of our folders.
BESIDE = """
import aggregator, models, simulator
import hushfleet.aggregator, hushfleet.models, hushfleet.simulator
from hushfleet.firmware_profiles import load_board

for ours, theirs in ((hushfleet.aggregator, aggregator), (hushfleet.models, models), (hushfleet.simulator, simulator)):
    assert theirs.OF == "the user", theirs
    assert ours is not theirs
    print(ours.__file__)
assert load_board("generic-x86").memory_mib
"""

SMALL = """
name = "small"
[model]
name = "linear"
[method]
name = "dp-fedavg"
[privacy]
noise_multiplier = 1.0
clip_norm = 1.0
delta = 1e-3
[data]
name = "digits"
devices = 2
[round]
rounds = 1
"""

TYPED = """
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

import hushfleet as hf
from hushfleet.wire.format.spec import PrivacySpec
from hushfleet.methods.local import Sgd
from hushfleet.methods.method import CLIP_AND_NOISE
from hushfleet.methods.personal import Head


class Net(nn.Module):
    def __init__(self, classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(input_shape[0], 8), nn.BatchNorm1d(8), nn.Linear(8, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def network(classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return hf.with_group_norm(Net(classes, input_shape))


@dataclass(frozen=True, kw_only=True)
class Settings(hf.TrainingConfig):
    head_layers: int = 1


@hf.published("mine", Settings, source="mine", summary="the last layers stay at home")
def mine(config: Settings, privacy: PrivacySpec, rounds: int) -> hf.Method:
    return hf.Method(Head(config.head_layers), Sgd(), CLIP_AND_NOISE)


def names(runs: list[hf.Run]) -> Iterator[str]:
    for run in runs:
        yield from (str(name) for name in run.devices.index)


x, y = np.zeros((60, 6), np.float32), np.arange(60) % 3
data = hf.Data(x, y, class_names=("a", "b", "c"))
task: hf.Task = hf.task({"name": "mine", "data": {"devices": 3}}, {"round.rounds": 2})
for event in hf.events(task, out="a", model=network, data=(x, y), method=mine):
    print(event["event"].upper())
run = hf.simulate(task, model=Net, data=data, method=mine, out="b", quiet=True)
best: float = float(run.devices["accuracy_own"].max())
print(best, run.rounds.shape, run.privacy.columns, run.summary.upper(), run.report().name, run.result.devices + 1)
run.plot_accuracy().set_title("accuracy")
comparison: hf.Comparison = hf.compare([run, hf.open_run("a")])
print(comparison.frame.shape, list(names([run])))
print(hf.privacy.epsilon(4.0, rounds=20, delta=0.1).server + hf.privacy.noise_multiplier(2, rounds=20, delta=0.01))
print(sorted(hf.methods.all_names())[0].upper(), hf.models.model_names()[0].upper())
"""


def installed_name(path: Path) -> str:
    """Where a file of the checkout is once it is installed."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts if parts[0] == "hushfleet" else ("hushfleet", *parts))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as an index would have both; what the build said is beside it.

    From a copy of the checkout, so that nothing is written into that.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_of_the_checkout(folder / "source")
    (source / "tests").mkdir()
    shutil.copy(__file__, source / "tests")
    archive = folder / _build("sdist", source, folder)
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    return folder / _build("wheel", next((folder / "unpacked").iterdir()), folder)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, since an installation writes into it."""
    return copy_of_the_checkout(tmp_path_factory.mktemp("checkout") / "source")


def copy_of_the_checkout(source: Path) -> Path:
    source.mkdir()
    for name in BUILT_OF:
        shutil.copy(ROOT / name, source)
    for name in ("hushfleet", *NESTED):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    return source


def _build(kind: str, source: Path, out: Path) -> str:
    """The name of the file that was made in `out`."""
    build = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (out / "build.txt").write_text(done.stdout + done.stderr)
    return done.stdout.splitlines()[-1]


def test_the_wheel_has_every_package_and_data_file(wheel: Path) -> None:
    every = [path for name in ("hushfleet", *NESTED) for path in (ROOT / name).rglob("*")]
    files = [path for path in every if path.is_file() and path.parent.name != "__pycache__"]
    assert len(files) > 200
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == {installed_name(path) for path in files}
    assert "absent from the `packages`" not in (wheel.parent / "build.txt").read_text()


def test_the_source_distribution_has_no_tests_that_cannot_run(wheel: Path) -> None:
    (source,) = (wheel.parent / "unpacked").iterdir()
    made = {"PKG-INFO", "setup.cfg", "hushfleet.egg-info", "build"}
    assert {path.name for path in source.iterdir()} - made == {*BUILT_OF, "hushfleet", *NESTED}


def test_an_image_is_built_of_the_package_alone() -> None:
    """A fleet in the checkout (`./fleets` in the Containerfile's own words) has keys."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert lines[1] == "*"
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert let_in == {*BUILT_OF, "constraints.txt", "hushfleet", *NESTED}


def constraints() -> str:
    return (ROOT / "constraints.txt").read_text("utf-8")


def test_every_pin_has_the_hashes_of_its_files() -> None:
    """Else pip would refuse to install anything (tests/attacks/test_install_another_file_of_a_pinned_version.py)."""
    hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})\b", constraints())
    pins = re.findall(r"^[A-Za-z0-9._-]+==[^ ]+ \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", constraints(), re.M)
    lines = constraints().splitlines()
    assert sum(pin.count("\n") for pin in pins) == len([line for line in lines if not line.startswith("#")])
    assert len(pins) > 150
    assert len(set(hashes)) == len(hashes) == constraints().count("--hash")


def test_every_package_that_is_installed_for_the_tests_is_pinned() -> None:
    """But PyTorch, which is installed first (`TORCH` of the Makefile), with what it needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = {canonicalize_name(name) for name in re.findall(r"^([^# ]+)==", constraints(), re.M)}
    waiting = [Requirement("hushfleet[docs,test]")]
    seen = set[tuple[str, str]]()
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        for extra in {"", *need.extras}:
            if (name, extra) in seen or name == "torch":
                continue
            seen.add((name, extra))
            if name == "hushfleet":
                texts = project["optional-dependencies"][extra] if extra else project["dependencies"]
            else:
                texts = importlib.metadata.requires(name) or []
            found = map(Requirement, texts)
            waiting += [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]
    assert {name for name, _ in seen} - pinned == {"hushfleet"}


def test_a_users_own_packages_with_the_names_of_our_folders(wheel: Path, tmp_path: Path) -> None:
    installed, user = tmp_path / "installed", tmp_path / "user"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    for name in NESTED:
        (user / name).mkdir(parents=True)
        (user / name / "__init__.py").write_text('OF = "the user"\n')
    paths = f"import sys; sys.path[:0] = [{str(user)!r}, {str(installed)!r}]\n"
    done = subprocess.run([sys.executable, "-c", paths + BESIDE], cwd=user, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(installed) for line in done.stdout.splitlines())
    assert sorted(path.name for path in installed.iterdir() if path.is_dir() and "." not in path.name) == [
        "bin",
        "hushfleet",
    ]


@pytest.fixture(scope="module")
def home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, away from the checkout; other packages are this environment's."""
    return environment_with(str(wheel), home=tmp_path_factory.mktemp("installed") / "environment")


def environment_with(*what: str, home: Path) -> Path:
    """:param what: the last words of `pip install`; other packages, setuptools among them, are this environment's."""
    venv.create(home, with_pip=False)
    (_site(home) / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", *what], check=True, capture_output=True)
    return home


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment after `pip install -e .`."""
    return environment_with("-e", str(checkout), home=tmp_path_factory.mktemp("editable") / "environment")


def _site(home: Path) -> Path:
    return next(home.glob("lib/python*/site-packages"))


@pytest.fixture(scope="module")
def strict_errors(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[str]]:
    """What `mypy --strict` finds in a user's script, and in the same script with wrong types, in an environment."""
    folder = tmp_path_factory.mktemp("scripts")  # and mypy's cache of other packages
    (folder / "mine.py").write_text(TYPED)
    (folder / "wrong.py").write_text(TYPED.replace(".upper()", ".uper()"))

    def errors(home: Path) -> list[str]:
        python = str(home / "bin" / "python")
        mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "mine.py", "wrong.py"]
        done = subprocess.run(mypy, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if ": error: " in line]

    return errors


@pytest.mark.slow
@pytest.mark.parametrize("installed", ["home", "editable"])
def test_a_users_script_is_checked_by_strict_mypy(
    installed: str, strict_errors: Callable[[Path], list[str]], request: pytest.FixtureRequest
) -> None:
    """Against the installed package; what is not typed there, or not shipped as typed, is an error of the script."""
    errors = strict_errors(request.getfixturevalue(installed))
    # a run's summary, and names of methods and networks, on one line; an event's fields may be anything
    assert len(errors) == 2, errors
    assert all(line.startswith("wrong.py:") and '"str" has no attribute "uper"' in line for line in errors), errors


@pytest.mark.slow
def test_without_our_links_an_editable_installation_has_no_types(
    editable: Path, strict_errors: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    """As it was: no package was found, and all of it was `Any`."""
    links = _site(editable) / "hushfleet_types.pth"
    links.rename(tmp_path / links.name)
    try:
        before = " ".join(strict_errors(editable))
    finally:
        (tmp_path / links.name).rename(links)
    assert 'Cannot find implementation or library stub for module named "hushfleet"' in before
    assert "uper" not in before


def test_an_editable_installation_runs_the_checkout_and_sees_its_new_files(
    editable: Path, checkout: Path, tmp_path: Path
) -> None:
    """Not the links: they have other paths, and a new module of `hushfleet/` itself is missing there."""
    new = {checkout / "models" / "new.py": "hushfleet.models.new", checkout / "hushfleet" / "new.py": "hushfleet.new"}
    for path in new:
        path.write_text("")
    program = f"import importlib; print(*(importlib.import_module(name).__file__ for name in {list(new.values())}))"
    for folder in (tmp_path, checkout):
        python = [str(editable / "bin" / "python"), "-c", program]
        done = subprocess.run(python, cwd=folder, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(path) for path in new]
    links = checkout / "build" / "links" / "hushfleet"
    assert (links / "models" / "new.py").exists(), "type checkers see a new file of a folder at once"
    assert not (links / "new.py").exists()
    setup = [sys.executable, "setup.py", "--quiet", "links"]
    subprocess.run(setup, cwd=checkout, check=True, capture_output=True)
    assert (links / "new.py").exists()
    for path in new:
        path.unlink()
    subprocess.run(setup, cwd=checkout, check=True, capture_output=True)
    assert not (links / "new.py").is_symlink()


def test_a_fleet_runs_from_the_wheel_in_an_environment_of_its_own(home: Path, tmp_path: Path) -> None:
    """A broker, the aggregator and two boards."""
    python = home / "bin" / "python"
    (tmp_path / "small.toml").write_text(SMALL)
    words = ["simulate", "small.toml", "--engine", "live", "--workers", "1", "--no-local-only", "--out", "run"]
    done = subprocess.run(
        [home / "bin" / "hushfleet", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row.participants for row in Result.load(tmp_path / "run" / "result.json").rounds] == [2]
    where = [python, "-c", "import hushfleet.edge_client; print(hushfleet.edge_client.__file__)"]
    assert str(_site(home)) in subprocess.run(where, cwd=tmp_path, capture_output=True, text=True, check=True).stdout


def test_nothing_is_looked_up_by_a_folders_name() -> None:
    """It would work in a checkout, and nowhere else."""
    looked_up = re.compile(r'(?:files\(|import_module\(|"-m", )"(?:{})\b'.format("|".join(NESTED)))
    files = [path for name in ("hushfleet", *NESTED) for path in (ROOT / name).rglob("*.py")]
    assert [path.name for path in files if looked_up.search(path.read_text("utf-8"))] == []


def modules_with_examples() -> list[str]:
    files = [path for name in ("hushfleet", *NESTED) for path in sorted((ROOT / name).rglob("*.py"))]
    return [
        installed_name(path).removesuffix(".py").replace("/", ".")
        for path in files
        if ">>> " in path.read_text("utf-8")
    ]


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_in_docstrings(module: str) -> None:
    tried = doctest.testmod(importlib.import_module(module))
    assert tried.attempted > 0
    assert tried.failed == 0
