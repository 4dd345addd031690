"""Fuzzing of every decoder: inputs that are made to reach new code, a table, and the inputs that broke something.

    python -m benchmarks.fuzz [--inputs 1000000] [--targets message,graph] [--out DIR] [--json docs/figures/fuzz.json]

It needs the extra `fuzz` (atheris, libFuzzer for Python): the mutations are guided by coverage of the kit's code. The
inputs are divided evenly among the targets. A crash is an exception that the decoder does not document, more than 2 GiB
of memory, or an input that takes more than 2 seconds of the processor's time; its input is left in DIR, or shown in
base64 where none is given. Blind edits of the same targets need no extra: tests/benchmarks/test_fuzz.py.
"""

from __future__ import annotations

import argparse
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

MEMORY_MIB = 2048
MEMORY_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None  # each input of some targets is a file
INPUT_CPU_S = 2.0
MAX_BYTES = 16384
PACKAGES = ("hushfleet", "edge_client", "aggregator", "simulator")


def one(name: str, inputs: int, folder: Path, seed: int) -> dict[str, object]:
    """Fuzzes one target in a process of its own, again after each crash, up to eight."""
    made, crashes, figures, cpu_s = 0, [], {}, 0.0
    for turn in range(8):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.fuzz", "--child", name]
        command += ["--inputs", str(inputs - made), "--out", str(folder), "--seed", str(seed + turn)]
        began = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as scratch:  # a child that dies leaves its files behind
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", env=os.environ | {"TMPDIR": scratch}
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
        crashes.append({"input": _left_input(text), "error": _error(text)})
    spent = {"inputs": made, "inputs_per_s": round(made / max(cpu_s, 0.1)), "cpu_s": round(cpu_s, 1)}
    return {"target": name, **spent, **figures, "crashes": crashes}


_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Refused|Large|Malformed|TooSlow)\b.*$|ERROR: libF.*$", re.M)


def _error(text: str) -> str:
    found = _ERROR.findall(text)
    return found[0][:300] if found else text[-300:]


def _left_input(text: str) -> str:
    found = re.findall(r"Test unit written to (\S+)\s+Base64: (\S*)", text)
    return " ".join([Path(found[-1][0]).name, found[-1][1]]) if found else ""


class TooSlow(Exception):
    """One input took longer than any may."""


def child(name: str, inputs: int, folder: Path, seed: int) -> None:
    import atheris

    with atheris.instrument_imports(include=list(PACKAGES), enable_loader_override=False):
        from benchmarks.fuzz.targets import TARGETS
    target = TARGETS[name]

    def test(data: bytes) -> None:
        began = time.process_time()
        target.run(data)
        if time.process_time() - began > INPUT_CPU_S:
            raise TooSlow(f"{len(data)} bytes took {time.process_time() - began:.1f} s")

    corpus, seeds = folder / "corpus" / name, folder / "seeds" / name
    for place in (corpus, seeds, folder / "crashes"):
        place.mkdir(parents=True, exist_ok=True)
    for place, data in enumerate(target.seeds()):
        (seeds / str(place)).write_bytes(data)
    longest = max(MAX_BYTES, *(len(data) for data in target.seeds()))
    atheris.Setup(
        [
            sys.argv[0], f"-runs={inputs}", f"-seed={seed + 1}", f"-max_len={longest}", f"-rss_limit_mb={MEMORY_MIB}",
            "-timeout=60", "-print_final_stats=1", f"-artifact_prefix={folder}/crashes/{name}-",
            str(corpus), str(seeds),
        ],
        test,
    )  # fmt: skip
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all targets together")
    parser.add_argument("--targets", default="", help="some only, separated by commas")
    parser.add_argument("--out", type=Path, default=None, help="where corpora and broken inputs are left")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.inputs, args.out, args.seed)
        return 0
    from benchmarks.fuzz.targets import TARGETS

    if not find_spec("atheris"):
        parser.error("atheris is not installed: pip install 'hushfleet[fuzz]'")

    names = [name for name in args.targets.split(",") if name] or list(TARGETS)
    rows = []
    print("| target | inputs | inputs/s | edges | corpus | crashes |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="hushfleet-fuzz-") as forgotten:
        for name in names:
            row = one(name, -(-args.inputs // len(names)), args.out or Path(forgotten), args.seed)
            rows.append(row)
            shown = [f"{row['inputs']:,}", f"{row['inputs_per_s']:,}", row["edges"], row["corpus"], len(row["crashes"])]
            print("|", " | ".join(map(str, [name, *shown])), "|", flush=True)
            for crash in row["crashes"]:
                print(f"    {crash['input']}: {crash['error']}", flush=True)
    total = sum(row["inputs"] for row in rows)
    broken = sum(len(row["crashes"]) for row in rows)
    where = f"; corpora and broken inputs are in {args.out}" if args.out else ""
    print(f"{total:,} inputs, {broken} crashes{where}")
    if args.json:
        about = {"engine": f"atheris {version('atheris')}", "python": platform.python_version(), "seed": args.seed}
        made = {**about, "inputs": total, "crashes": broken, "targets": rows}
        args.json.write_text(json.dumps(made, indent=1) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
