"""Fuzzing of every decoder: inputs that are made to reach new code, a table, and the inputs that broke something.

    python -m benchmarks.fuzz [--inputs 1000000] [--targets message,graph] [--out DIR] [--json docs/figures/fuzz.json]

With the extra `fuzz` (atheris, libFuzzer for Python) the mutations are guided by coverage of the kit's code; without
it they are blind edits of real inputs, and the JSON says so. The inputs are divided evenly among the targets. A crash
is an exception that the decoder does not document, more than 2 GiB of memory, or an input that takes more than 2
seconds of the processor's time; its input is left in DIR.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

MEMORY_MIB = 2048
INPUT_CPU_S = 2.0
MAX_BYTES = 16384
PACKAGES = ("hushfleet", "edge_client", "aggregator", "simulator")


def one(name: str, inputs: int, folder: Path, seed: int) -> dict[str, object]:
    """Fuzzes one target in a process of its own, again after each crash, up to eight."""
    left, crashes, figures = inputs, [], {}
    for turn in range(8):
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.fuzz", "--child", name, "--inputs", str(left)]
        command += ["--out", str(folder), "--seed", str(seed + turn)]
        began = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        cpu_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - began
        text = done.stdout + done.stderr
        rounds = re.findall(r"#(\d+)\s+\S+\s+cov: (\d+) ft: (\d+) corp: (\d+)", text)
        done_now = int(rounds[-1][0]) if rounds else 0
        left -= done_now
        figures["cpu_s"] = round(figures.get("cpu_s", 0) + cpu_s, 1)
        if rounds:
            figures |= {"edges": int(rounds[-1][1]), "features": int(rounds[-1][2]), "corpus": int(rounds[-1][3])}
        if done.returncode == 0:
            break
        crashes.append({"input": _left_input(text), "error": _error(text)})
    made = inputs - left if crashes else inputs
    rate = round(made / max(figures["cpu_s"], 0.1))
    return {"target": name, "inputs": made, "inputs_per_s": rate, **figures, "crashes": crashes}


_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Refused|Large|Malformed|TooSlow)\b.*$|ERROR: libF.*$", re.M)


def _error(text: str) -> str:
    found = _ERROR.findall(text)
    return found[0][:300] if found else text[-300:]


def _left_input(text: str) -> str:
    found = re.findall(r"Test unit written to (\S+)", text)
    return Path(found[-1]).name if found else ""


class TooSlow(Exception):
    """One input took longer than any may."""


def child(name: str, inputs: int, folder: Path, seed: int) -> None:
    guided = find_spec("atheris") is not None
    if guided:
        import atheris

        with atheris.instrument_imports(include=list(PACKAGES), enable_loader_override=False):
            from benchmarks.fuzz.targets import TARGETS
    else:
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
    if not guided:
        _blindly(test, target.seeds(), inputs, folder / "crashes" / f"{name}-{seed}", seed)
        return
    longest = max(MAX_BYTES, *(len(data) for data in target.seeds()))
    atheris.Setup(
        [
            sys.argv[0], f"-runs={inputs}", f"-seed={seed + 1}", f"-max_len={longest}", f"-rss_limit_mb={MEMORY_MIB}",
            "-timeout=60", "-verbosity=1", f"-artifact_prefix={folder}/crashes/{name}-", str(corpus), str(seeds),
        ],
        test,
    )  # fmt: skip
    atheris.Fuzz()


def _blindly(test: object, seeds: list[bytes], inputs: int, crash: Path, seed: int) -> None:
    from benchmarks.fuzz.mutate import mutated

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MIB << 21, resource.RLIM_INFINITY))
    rng = random.Random(seed)
    for turn in range(inputs):
        data = mutated(rng.choice(seeds), rng)
        try:
            test(data)
        except BaseException:
            crash.write_bytes(data)
            print(f"#{turn} CRASH cov: 0 ft: 0 corp: {len(seeds)}", f"Test unit written to {crash}", sep="\n")
            raise
    print(f"#{inputs} DONE cov: 0 ft: 0 corp: {len(seeds)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all targets together")
    parser.add_argument("--targets", default="", help="some only, separated by commas")
    parser.add_argument("--out", type=Path, default=None, help="where corpora and broken inputs are left")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = args.out or Path(tempfile.mkdtemp(prefix="hushfleet-fuzz-"))
    if args.child:
        child(args.child, args.inputs, folder, args.seed)
        return 0
    from benchmarks.fuzz.targets import TARGETS

    names = [name for name in args.targets.split(",") if name] or list(TARGETS)
    rows = []
    print("| target | inputs | inputs/s | edges | corpus | crashes |\n|---|---|---|---|---|---|")
    for name in names:
        row = one(name, -(-args.inputs // len(names)), folder, args.seed)
        rows.append(row)
        shown = [f"{row['inputs']:,}", f"{row['inputs_per_s']:,}", row.get("edges", ""), row.get("corpus", "")]
        print("|", " | ".join(map(str, [name, *shown, len(row["crashes"])])), "|", flush=True)
        for crash in row["crashes"]:
            print(f"    {crash['input']}: {crash['error']}", flush=True)
    total = sum(row["inputs"] for row in rows)
    broken = sum(len(row["crashes"]) for row in rows)
    print(f"{total:,} inputs, {broken} crashes; corpora and broken inputs are in {folder}")
    if args.json:
        engine = "atheris (coverage-guided)" if find_spec("atheris") else "blind edits of real inputs"
        about = {"engine": engine, "python": platform.python_version(), "seed": args.seed}
        made = {**about, "inputs": total, "crashes": broken, "targets": rows}
        args.json.write_text(json.dumps(made, indent=1) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
