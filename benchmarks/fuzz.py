"""Fuzzing of every decoder: inputs that are made to reach new code, a table, and the inputs that broke something.

    python -m benchmarks.fuzz [--inputs 1000000] [--targets message,graph] [--out DIR] [--json docs/figures/fuzz.json]

It needs the extra `fuzz` (atheris, libFuzzer for Python): the mutations are guided by coverage of the kit's code. The
inputs are divided evenly among the targets. A crash is an exception that the decoder does not document, more than 2 GiB
of memory, or an input that takes more than 2 seconds of the processor's time; its input is left in DIR, or shown in
base64 where none is given. Blind edits of the same targets need no extra: tests/benchmarks/test_fuzz.py.
"""

from __future__ import annotations

import argparse
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common import Figures, console, earlier, make_parser, table, write
from benchmarks.processes import ROOT, environment

MEMORY_MIB = 2048
MEMORY_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None  # each input of some targets is a file
INPUT_CPU_S = 2.0
MAX_BYTES = 16384
MOST_CRASHES = 8
ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Refused|Large|Malformed|TooSlow)\b.*$|ERROR: libF.*$", re.M)
LEFT_INPUT = re.compile(r"Test unit written to (\S+)\s+Base64: (\S*)")


class TooSlow(Exception):
    """One input took longer than any may."""


def fuzz(name: str, inputs: int, folder: Path, seed: int) -> Figures:
    """Fuzzes one target in a process of its own, again after each crash, up to `MOST_CRASHES`."""
    made, crashes, figures, cpu_s = 0, [], {}, 0.0
    for turn in range(MOST_CRASHES):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.fuzz", "--child", name]
        command += ["--inputs", str(inputs - made), "--out", str(folder), "--seed", str(seed + turn)]
        began = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as scratch:  # a child that dies leaves its files behind
            variables = environment(TMPDIR=scratch)
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=variables, cwd=ROOT)
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


def child(name: str, inputs: int, folder: Path, seed: int) -> None:
    """Runs libFuzzer on one target; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["hushfleet"], enable_loader_override=False):
        from benchmarks.fuzz_targets import TARGETS
    target = TARGETS[name]

    def test(data: bytes) -> None:
        began = time.process_time()
        target.run(data)
        if (spent := time.process_time() - began) > INPUT_CPU_S:
            raise TooSlow(f"{len(data)} bytes took {spent:.1f} s")

    corpus, seeds = folder / "corpus" / name, folder / "seeds" / name
    for place in (corpus, seeds, folder / "crashes"):
        place.mkdir(parents=True, exist_ok=True)
    for place, data in enumerate(target.seeds()):
        (seeds / str(place)).write_bytes(data)
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all targets together")
    parser.add_argument("--targets", type=lambda text: text.split(","), help="some only, separated by commas")
    parser.add_argument("--out", type=Path, help="where corpora and broken inputs are left")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options.child, options.inputs, options.out, options.seed)
    figures = earlier(options)
    if figures is None:
        from benchmarks.fuzz_targets import TARGETS

        if not find_spec("atheris"):
            parser.error("atheris is not installed: pip install 'hushfleet[fuzz]'")
        names, rows = options.targets or list(TARGETS), []
        with tempfile.TemporaryDirectory(prefix="hushfleet-fuzz-") as forgotten:
            for name in names:
                folder = options.out or Path(forgotten)
                rows.append(fuzz(name, -(-options.inputs // len(names)), folder, options.seed))
                console.print(name, *rows[-1]["crashes"])
        about = {"engine": f"atheris {version('atheris')}", "python": platform.python_version(), "seed": options.seed}
        total, broken = (sum(count) for count in zip(*((r["inputs"], len(r["crashes"])) for r in rows), strict=True))
        figures = {**about, "inputs": total, "crashes": broken, "targets": rows}
    table(f"{figures['inputs']:,} inputs", [{**row, "crashes": len(row["crashes"])} for row in figures["targets"]])
    write(options, figures)
    return 1 if figures["crashes"] else 0


if __name__ == "__main__":
    sys.exit(main())
