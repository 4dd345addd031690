"""The command `hushfleet`: what it imports, what it lists and completes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from hushfleet.aggregator.commands.main import build_app, load_command

END = "<end of a command>"
IMPORTED = f"""
END = {END!r}
import contextlib, json, sys
from hushfleet.aggregator.commands.main import main
*others, last = json.loads(sys.argv[1])
try:
    for words in others:
        sys.argv = ["hushfleet", *words]
        with contextlib.suppress(SystemExit):
            main()
        print(END)
    sys.argv = ["hushfleet", *last]
    main()
finally:
    heavy = ("numpy", "torch", "onnxruntime", "cryptography", "jinja2", "paho", "plotly", "sqlite3")
    print("imported", *(name for name in heavy if name in sys.modules))
"""
NAMES = sorted(typer.main.get_command(build_app()).commands)
GROUPS = {name: getattr(load_command(name), "commands", {}) for name in NAMES}


def typed(*commands: list[str], **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The commands in a process of their own, and what they imported."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, json.dumps(commands)],
        capture_output=True, text=True, check=False, env=os.environ | environment,
    )  # fmt: skip
    return done, done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [(["--help"], 0, "simulate"), (["--version"], 0, "hushfleet"), (["simulat"], 2, "simulate")],
)
def test_what_is_not_called_is_not_imported(words: list[str], code: int, said: str) -> None:
    done, imported = typed(words)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert imported == []


def test_a_command_imports_what_does_the_work_when_it_is_called() -> None:
    """The sub-commands of a group are in its modules, so what they need would be imported for the group's help."""
    done, imported = typed(*([name, "--help"] for name in NAMES))
    assert done.returncode == 0, done.stderr
    helps = dict(zip(NAMES, done.stdout.split(END), strict=True))
    listed = [(name, sub) for name, subs in GROUPS.items() for sub, each in subs.items() if not each.hidden]
    assert len(listed) > 20
    assert all(sub in helps[name] for name, sub in listed)
    assert imported == []


@pytest.mark.parametrize(
    ("words", "at", "said"),
    [("hushfleet ", 1, {"simulate", "fleet"}), ("hushfleet sim", 1, {"simulate"}),
     ("hushfleet simulate --own", 2, {"--own-processes"}), ("hushfleet fleet re", 2, {"renew", "resume"})],
)  # fmt: skip
def test_the_shell_completes_names_and_options(words: str, at: int, said: set[str]) -> None:
    asked = {"_HUSHFLEET_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
    done, imported = typed([], **asked)
    assert said <= set(done.stdout.split()), done.stderr
    assert imported == []


def test_a_wrong_table_and_the_list_of_tables_load_no_pytorch() -> None:
    done, imported = typed(["reproduce", "fedglp-adp", "--table", "99"])
    assert (done.returncode, "fedglp-adp has no table 99 here; it has --table 1" in done.stderr) == (2, True)
    assert not {"torch", "numpy"} & set(imported)
    done, imported = typed(["reproduce", "fedglp-adp", "--list"])
    assert "Table 2, readings" in done.stdout
    assert not {"torch", "plotly"} & set(imported)


def test_a_wrong_value_is_told_without_pydantics_words() -> None:
    done, _ = typed(["simulate", "x", "--engine", "foo"])
    assert "Error: Invalid value for '--engine': 'foo' is not one of 'fast', 'live', 'ray'" in done.stderr


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from hushfleet.aggregator.commands import main
def command():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise {raised}("after Ctrl-C") from None
main.build_app = lambda: command
main.main()
"""


def interrupted(raised: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", INTERRUPTED.replace("{raised}", raised)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("raised", ["SystemError", "ImportError"])
def test_ctrl_c_that_compiled_code_makes_another_error_of_is_still_told_by_the_exit_code(raised: str) -> None:
    done = interrupted(raised)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_fault_in_what_follows_a_ctrl_c_is_told() -> None:
    done = interrupted("TypeError")
    assert done.returncode == 1
    assert "TypeError: after Ctrl-C" in done.stderr


IN_A_CALLBACK = """
import os, signal, time, weakref
signal.signal(signal.SIGINT, signal.default_int_handler)
from hushfleet.aggregator.commands import main
class Kept: pass
def command():
    kept = Kept()
    reference = weakref.ref(kept, lambda _: os.kill(os.getpid(), signal.SIGINT) or sum(range(1000)))
    del kept
    time.sleep(60)
main.build_app = lambda: command
main.main()
"""


def test_ctrl_c_in_a_callback_that_cannot_raise_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_CALLBACK], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is not here")
def test_a_full_disk_is_one_clear_paragraph() -> None:
    """The operating system names no file where writing fails, unlike where opening does."""
    command = [sys.executable, "-m", "hushfleet.aggregator.commands", "boards"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert "error: No space left on device; free some space" in done.stderr
    assert "Traceback" not in done.stderr


NO_MEMORY = """
import sys
from hushfleet.aggregator.commands import main

def build_app():
    raise MemoryError("Unable to allocate 8.00 GiB")

main.build_app = build_app
main.main()
"""


def test_too_little_memory_is_one_clear_paragraph() -> None:
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error: this machine has too little memory for that: Unable to allocate 8.00 GiB" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    (tmp_path / "jinja2.py").write_text("raise ModuleNotFoundError(\"No module named 'jinja2'\", name='jinja2')")
    done, _ = typed(["compare", "a", "b"], PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "error: this needs the package 'jinja2'; install it with" in done.stderr


def older(folder: Path, name: str, version: str, code: str = "") -> dict[str, str]:
    """An environment in which this version of a package seems to be installed, with this code."""
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / f"{name}.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


def test_a_package_that_is_too_old_is_named_with_both_versions(tmp_path: Path) -> None:
    done, _ = typed(["compare", "a", "b"], **older(tmp_path, "jinja2", "3.0", "raise AttributeError('a word')"))
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    said = " ".join(done.stderr.split())
    assert "error: AttributeError: a word. jinja2 3.0 is installed and 3.1 or newer is needed" in said
    assert "type: pip install 'jinja2>=3.1'" in said


GRAPH = """
from hushfleet.aggregator.commands import main
from hushfleet.errors import GraphRefused
def command():
    raise GraphRefused("PyTorch cannot write its gradient")
main.build_app = lambda: command
main.main()
"""


def test_a_graph_that_an_old_exporter_cannot_write_is_told_as_such(tmp_path: Path) -> None:
    environment = os.environ | older(tmp_path, "onnxscript", "0.5.0")
    said = [
        subprocess.run([sys.executable, "-c", GRAPH], capture_output=True, text=True, check=False, env=env)
        for env in (os.environ, environment)
    ]
    assert [each.returncode for each in said] == [1, 1]
    assert said[0].stderr == "error: PyTorch cannot write its gradient\n"
    assert "gradient. onnxscript 0.5.0 is installed and" in said[1].stderr


@pytest.mark.parametrize("name", NAMES)
def test_the_list_has_every_command_with_its_text(name: str) -> None:
    listed = typer.main.get_command(build_app()).commands[name]
    assert len(listed.help) > 10
    assert load_command(name).name == name


@pytest.mark.parametrize(
    "environment", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "LC_ALL": "C"}]
)
def test_output_that_lacks_a_character_gets_another(environment: dict[str, str]) -> None:
    """A run of an hour ended in a traceback, without a result, where the terminal had no sign for infinity."""
    text = "epsilon \u221e, 12\u00a0%, \u00b11, \u4f60"
    program = (
        "from hushfleet.output import take_all_characters\n"
        f"take_all_characters(); import sys; print({text!a}); print({text!a}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    assert done.stdout == done.stderr == "epsilon inf, 12 %, +-1, ?\n"


@pytest.mark.parametrize("words", [["hushfleet.aggregator.commands", "report"], ["hushfleet.edge_client", "status"]])
def test_the_commands_take_all_characters(words: list[str]) -> None:
    asked = [sys.executable, "-m", *words, "\u221e.toml"]
    said = subprocess.run(
        asked, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert (said.returncode, "Traceback" in said.stderr) == (2, False)
    assert "inf.toml" in said.stderr
