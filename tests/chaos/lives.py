"""`python -m chaos.lives --seeds 80`, with `tests` on the path: the life of a small fleet in a storm for each seed."""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from chaos.campaign import parse_seeds
from chaos.life import Life, Releases
from chaos.life_audit import check_life
from chaos.life_plan import KINDS, draw_life
from chaos.machine import build_library
from hushfleet.errors import BadInput, HushfleetError


def lives(
    seeds: Annotated[str, typer.Option(help="How many (80: 0 to 79), a range (40-59), or several (3,17,40-59).")],
    out: Annotated[Path, typer.Option(help="For what is left of lives that failed.")],
) -> None:
    """Blank boards enrol, train, are updated and one is locked out, through kills at every step; then an audit."""
    out = out.resolve()  # boards take relative paths as relative to their file
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        numbers = parse_seeds(seeds)
    except BadInput as error:
        sys.exit(str(error))
    try:
        library = build_library(out / "library")
    except HushfleetError as error:
        library = None
        print(f"no full disks and wrong clocks: {error}")
    releases = Releases(out)
    played, failed = Counter[str](), list[int]()
    for seed in numbers:
        began, home = time.monotonic(), out / f"seed-{seed}"
        life = Life(draw_life(seed, kinds=KINDS if library else ("kill",)), home, releases, library)
        try:
            life.live()
            wrong = check_life(life)
        except HushfleetError as error:
            wrong = [str(error)]
        except Exception:
            wrong = [traceback.format_exc()]
        played += life.played
        print(f"seed {seed}: {'; '.join(wrong) or 'passed'} in {time.monotonic() - began:.0f} s", flush=True)
        if wrong:
            failed.append(seed)
            (home / "plan.json").write_text(json.dumps(asdict(life.plan), indent=1))
        else:
            shutil.rmtree(home)
    summary = {"seeds": len(numbers), "failed": failed, "played": dict(sorted(played.items()))}
    (out / "lives.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{len(numbers) - len(failed)} passed, {len(failed)} failed; what happened: {out}/lives.json")
    sys.exit(bool(failed))


if __name__ == "__main__":
    typer.run(lives)
