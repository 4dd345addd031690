"""One model: the client under each method, and PyTorch, alive at the same time and asked in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.board.case import write_case
from benchmarks.board.talk import Answer, Child
from hushfleet.models import get_model

Figures = dict[str, Any]


def measure_model(
    name: str, methods: Sequence[str], folder: Path, *, batch: int, samples: int, turns: int, say: Callable[[str], None]
) -> Figures:
    """Of the turns' medians and rounds, the quickest; times in CPU milliseconds, and on the wall beside them."""
    model = get_model(name)
    cases = [write_case(folder / name / each, model, each, batch=batch, samples=samples) for each in methods]
    with Child("benchmarks.board.pytorch", [name, *(str(case.folder) for case in cases)]) as torch:
        plain_round = _quickest([torch.ask("plain round") for _ in range(1 + turns)][1:])
        plain_peak = torch.ask("peak")["mib"]
        by_method: dict[str, Figures] = {}
        for number, (method, case) in enumerate(zip(methods, cases, strict=True)):
            say(f"{name}, {method}")
            with ExitStack() as stack:
                client = stack.enter_context(Child("benchmarks.board.client", [str(case.folder)]))
                asked: dict[str, Callable[[], Answer]] = {
                    "ours": lambda client=client: client.ask("steps"),
                    "PyTorch in our loop": lambda number=number: torch.ask("steps", number),
                    "plain PyTorch": lambda: torch.ask("plain steps"),
                }
                steps: dict[str, list[Answer]] = {side: [] for side in asked}
                for _ in range(turns):
                    for side, ask in asked.items():
                        steps[side].append(ask())
                trained_mib = client.ask("peak")["mib"]
                rounds = [client.ask("round") for _ in range(1 + turns)][1:]  # the first has no state yet
                by_method[method] = {
                    "start": client.ready,
                    "step": {side: _quickest(answers) for side, answers in steps.items()},
                    "round": _quickest(rounds),
                    "trained_peak_mib": trained_mib,
                    "round_peak_mib": client.ask("peak")["mib"],
                }
    plain = {"round": plain_round, "peak_mib": plain_peak, "import_mib": torch.ready["mib"]}
    return {"model": name, "parameters": model.layout.size, "plain PyTorch": plain, "methods": by_method}


def _quickest(answers: Sequence[Answer]) -> Answer:
    """By CPU time, which does not count what else the machine does."""
    return min(answers, key=lambda answer: answer["cpu_ms"])
