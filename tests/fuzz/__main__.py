"""Fuzzing of every decoder, guided by coverage: a table, and the inputs that broke something.

    PYTHONPATH=tests python -m fuzz [--inputs 1000000] [--targets message,graph] [--out DIR] [--json fuzz.json]

It needs the extra `fuzz` (atheris, libFuzzer for Python). The inputs are divided evenly among the targets. A crash is
an exception that the decoder does not document, more than 2 GiB of memory, or an input that takes more than 2 seconds
of the processor's time; its input is left in DIR, or shown in base64 where none is given. `test_fuzz.py` makes random
edits of the same targets' inputs and needs no extra.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

MEMORY_MIB = 2048
MEMORY_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None  # each input of some targets is a file
INPUT_CPU_S = 2.0
MAX_BYTES = 16384
MOST_CRASHES = 8
ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Refused|Large|Malformed|TooSlow)\b.*$|ERROR: libF.*$", re.M)
LEFT_INPUT = re.compile(r"Test unit written to (\S+)\s+Base64: (\S*)")
COLUMNS = ("target", "inputs", "inputs_per_s", "edges", "corpus", "crashes")


class TooSlow(Exception):
    """One input took longer than any may."""


def fuzz_target(name: str, inputs: int, folder: Path, seed: int) -> dict[str, Any]:
    """Fuzzes one target in a process of its own, again after each crash, up to `MOST_CRASHES`."""
    made, crashes, figures, cpu_s = 0, [], {}, 0.0
    for turn in range(MOST_CRASHES):
        command = [sys.executable, "-W", "ignore", "-m", "fuzz", "--child", name]
        command += ["--inputs", str(inputs - made), "--out", str(folder.absolute()), "--seed", str(seed + turn)]
        began = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as scratch:  # a child that dies leaves its files behind
            environment = {**os.environ, "TMPDIR": scratch, "OMP_NUM_THREADS": "1"}
            place = Path(__file__).parents[1]
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", env=environment, cwd=place, check=False
            )
        cpu_s += sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - began
        text = done.stdout + done.stderr
        ran = re.search(r"stat::number_of_executed_units: (\d+)", text)
        rounds = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", text)
        if not ran or not rounds:
            raise SystemExit(f"{name}: the fuzzer does not say what it ran, or saw no code of the kit:\n{text[-2000:]}")
        made += int(ran[1])
        figures = dict(zip(("edges", "features", "corpus"), map(int, rounds[-1]), strict=True))
        if done.returncode == 0:
            break
        path, base64 = (LEFT_INPUT.findall(text) or [("", "")])[-1]
        error = (ERROR.findall(text) or [text[-300:]])[0][:300]
        crashes.append({"input": f"{Path(path).name} {base64}", "error": error})
    spent = {"inputs": made, "inputs_per_s": round(made / max(cpu_s, 0.1)), "cpu_s": round(cpu_s, 1)}
    return {"target": name, **spent, **figures, "crashes": crashes}


def run_libfuzzer(name: str, inputs: int, folder: Path, seed: int) -> None:
    """Runs libFuzzer on one target; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["hushfleet"], enable_loader_override=False):
        from fuzz.targets import TARGETS
    target = TARGETS[name]

    def test(data: bytes) -> None:
        began = time.process_time()
        target.run(data)
        if (spent := time.process_time() - began) > INPUT_CPU_S:
            raise TooSlow(f"{len(data)} bytes took {spent:.1f} s")

    corpus, seeds = folder / "corpus" / name, folder / "seeds" / name
    for place in (corpus, seeds, folder / "crashes"):
        place.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.seeds()):
        (seeds / str(number)).write_bytes(data)
    settings = {
        "runs": inputs,
        "seed": seed + 1,
        "max_len": max(MAX_BYTES, *(len(data) for data in target.seeds())),
        "rss_limit_mb": MEMORY_MIB,
        "timeout": 60,
        "print_final_stats": 1,
        "artifact_prefix": f"{folder}/crashes/{name}-",
    }
    words = [f"-{option}={value}" for option, value in settings.items()]
    atheris.Setup([sys.argv[0], *words, str(corpus), str(seeds)], test)
    atheris.Fuzz()


def fuzz(
    inputs: Annotated[int, typer.Option(help="Of all targets together.")] = 1_000_000,
    targets: Annotated[str, typer.Option(help="Some only, separated by commas.")] = "",
    out: Annotated[Path | None, typer.Option(help="Where corpora and broken inputs are left.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    seed: int = 1,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Fuzzes every decoder that reads bytes from elsewhere."""
    if not find_spec("atheris"):
        sys.exit("atheris is not installed: pip install 'hushfleet[fuzz]'")
    if child:
        run_libfuzzer(child, inputs, out or Path(), seed)
    from fuzz.targets import TARGETS

    names, rows, table = targets.split(",") if targets else list(TARGETS), [], Table(*COLUMNS)
    with tempfile.TemporaryDirectory(prefix="hushfleet-fuzz-") as forgotten:
        for name in names:
            rows.append(fuzz_target(name, -(-inputs // len(names)), out or Path(forgotten), seed))
            print(name, *rows[-1]["crashes"])
            table.add_row(*(str(rows[-1][column]) for column in COLUMNS[:-1]), str(len(rows[-1]["crashes"])))
    Console().print(table)
    broken = sum(len(row["crashes"]) for row in rows)
    if json_file:
        about = {"engine": f"atheris {version('atheris')}", "python": platform.python_version(), "seed": seed}
        figures = {**about, "inputs": sum(row["inputs"] for row in rows), "crashes": broken, "targets": rows}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    raise typer.Exit(1 if broken else 0)


if __name__ == "__main__":
    typer.run(fuzz)
