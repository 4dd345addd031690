"""Methods of other packages and of files: how they are found, and that no name from the network runs a file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet import methods
from hushfleet.errors import BadInput, Malformed
from hushfleet.methods import ALLOWED_FILE, METHODS, allow_file, find_method, make_method, offer, title_of
from hushfleet.methods.local import Penalty, Sgd
from hushfleet.methods.method import TrainingConfig, published
from hushfleet.methods.server import ClosedRound
from hushfleet.methods.stages import LayerBounds, Transform
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import PrivacySpec

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "fedbabu.py"
PRIVACY = PrivacySpec("device", "strict", 1.0, 1.0, 1e-5)
LAYOUT = ParamLayout(("a.weight", "b.weight"), ((2,), (2,)))


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED_FILE, "")


def test_a_method_of_an_installed_package_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("theirs", "hushfleet.methods.papers.ditto:ditto", methods.GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry] if group == methods.GROUP else [])
    assert find_method("theirs") is methods.METHODS["ditto"]
    assert "theirs" in methods.all_names()
    assert make_method("theirs", {"lambda_": 0.5}, PRIVACY, LAYOUT, rounds=1).config.lambda_ == 0.5
    not_one = EntryPoint("theirs", "hushfleet.methods.state:PublicState", methods.GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [not_one])
    with pytest.raises(BadInput, match="is not a method"):
        find_method("theirs")


def test_a_board_imports_the_method_that_it_runs_and_no_other() -> None:
    code = (
        "import sys; from hushfleet.methods import METHODS, find_method; find_method('hush')\n"
        "print({name for name in METHODS if f'hushfleet.methods.{name.replace(chr(45), chr(95))}' in sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "{'hush'}\n"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("zzz", ": "),
        ("fedporx", r" \(did you mean 'fedprox'\?\): "),
        ("fedyogi", r" \(write name = 'fedopt', server_optimizer = 'yogi'\): "),
    ],
)
def test_a_name_that_nobody_has_says_what_to_install(name: str, hint: str) -> None:
    with pytest.raises(BadInput, match=f"'{name}'{hint}must be one of acdp-pfsd.*on each board: pip install PACKAGE"):
        find_method(name)


def test_settings_that_are_no_fields_of_a_dataclass_are_refused() -> None:
    class Mine(TrainingConfig):
        rate: float = 0.5

    with pytest.raises(BadInput, match=r"Mine is no dataclass.* no settings of 'mine': write @dataclass\(frozen=True"):
        published("mine", Mine, source="x", summary="y")


def test_a_penalty_changes_the_gradient_in_place() -> None:
    class Returned(Penalty):
        def add(self, context: Any, params: Any, gradient: Any) -> Any:
            return gradient + params

    with pytest.raises(BadInput, match=r"Returned\.add: must change `gradient` in place"):
        Sgd(penalties=(Returned(),)).add_penalties(None, np.ones(2), np.zeros(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "hook"), [(Penalty().add, "add"), (Transform().change, "change"), (LayerBounds().bounds, "bounds")]
)
def test_a_part_without_its_hook_says_which(call: Callable[..., Any], hook: str) -> None:
    with pytest.raises(NotImplementedError, match=f"(Penalty|Transform|LayerBounds) has no {hook}\\("):
        call(None, None, None)


@pytest.mark.parametrize("name", ["scaffold", "fednova", "apfl"])
def test_plain_steps_refuse_the_settings_that_were_given(name: str) -> None:
    given = {"weight_decay": 0.1, "schedule": "cosine"}
    with pytest.raises(Malformed, match=r"method\.weight_decay = 0\.1 and schedule = 'cosine': must be left out"):
        make_method(name, given, PRIVACY, LAYOUT, rounds=1)


def test_a_method_with_the_ranges_of_earlier_versions_is_told_how_to_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "old.py"
    file.write_text("from hushfleet.methods.method import published, within\n")
    monkeypatch.setenv(ALLOWED_FILE, f"{file}:old")
    with pytest.raises(BadInput, match=r"write Annotated\[float, Meta\(ge=0, lt=1\)\] = 0\.9"):
        find_method(f"{file}:old")


def test_a_file_runs_only_where_just_this_one_is_allowed() -> None:
    name = f"{EXAMPLE}:fedbabu"
    with pytest.raises(BadInput, match=r"runs in simulations only.*On boards it must be installed"):
        find_method(name)
    assert allow_file(name) == name
    method = make_method(name, {}, PRIVACY, LAYOUT, rounds=1)
    assert method.init_state().public.mask.tolist() == [False, False, True, True]
    with pytest.raises(BadInput, match="runs in simulations only"):
        find_method(f"{EXAMPLE.with_name('another.py')}:fedbabu")


def test_tables_and_reports_call_a_method_by_its_own_name() -> None:
    assert title_of(allow_file(f"{EXAMPLE}:fedbabu")) == "fedbabu"
    assert title_of(offer(METHODS["fedavg"])) == "fedavg"
    assert title_of("fedglp-adp") == "fedglp-adp"


def test_processes_that_a_simulation_starts_may_run_it_too() -> None:
    name = allow_file(f"{EXAMPLE}:fedbabu")
    script = f"from hushfleet.methods import find_method; print(find_method({name!r}).name)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "fedbabu"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fedbabu", "must be like path/to/file.py:NAME"),
        ("nowhere/fedbabu.py:fedbabu", "cannot read"),
        (f"{EXAMPLE}:FedBABUConfig", "is not a method"),
        (f"{EXAMPLE}:absent", r"fedbabu\.py has no 'absent'"),
    ],
)
def test_what_cannot_be_a_method_says_why(name: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        allow_file(name)


@pytest.mark.parametrize(
    ("text", "said"), [("x = 1\nx = (", "line 2, .*SyntaxError"), ("\n\n1 / 0\n", "line 3, .*ZeroDivisionError")]
)
def test_a_file_that_cannot_be_imported_says_where(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(BadInput, match=said):
        allow_file(f"{tmp_path}/broken.py:mine")


def test_a_server_half_from_outside_moves_the_model_along_its_velocity() -> None:
    name = allow_file(f"{EXAMPLE.with_name('fedavgm.py')}:fedavgm")
    server = make_method(name, {"momentum_server": 0.5}, PRIVACY, LAYOUT, rounds=3).server
    state, model, seen = server.initial(0), np.zeros(2), []
    for sums in ([2.0, 0.0], [2.0, 4.0], [0.0, 0.0]):  # of two devices
        after = server.aggregate(state, model, np.array(sums), np.array([2.0, 2.0]))
        state = server.advance(state, ClosedRound(1, model, after, (), None, None))
        seen.append((model := after).tolist())
    assert seen == [[1.0, 0.0], [2.5, 2.0], [3.25, 3.0]]
