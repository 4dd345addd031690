"""The words of a report, of every verdict, in one file. Other tests look at verdicts and numbers.

After a change of the templates, write the file again, and read the difference:
HUSHFLEET_WRITE_WORDS=1 python -m pytest tests/aggregator/report/test_words.py
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from hushfleet.aggregator.report.page import Facts
from hushfleet.aggregator.report.sections import SECTIONS, ShownRun
from hushfleet.aggregator.report.verdict import judge
from hushfleet.aggregator.report.words import SENTENCES, Words
from hushfleet.aggregator.results.answers import StatisticRow, WithError, evaluation_of
from hushfleet.aggregator.results.result import (
    Lifetime,
    LocalOnly,
    LostRounds,
    PersonalizedHead,
    Rerun,
    Result,
    SumsInfo,
    TimelineRow,
    WireInfo,
)
from support.report_samples import bare, sample

FILE = Path(__file__).with_name("words.txt")
MIXED = PersonalizedHead(images=12, shared=0.75, pulled=0.25, alone=0.0)
EVALUATION = evaluation_of([0.8, 0.1, -0.05, 0.7, 0.05], [0.01] * 5, round=4, devices=50)
LIFETIME = Lifetime(epsilon_server=3.5, exchange_server=7.7, delta=1e-6, period="2 of 8 this year")


def runs() -> Iterator[tuple[str, Result]]:
    """Runs that need each of the sentences."""
    base, sweeps = sample(), {"gain": ((6.0, 0.02),), "no sure gain": ((6.0, -0.02),), "no point": ((60.0, 0.3),)}
    yield "better, one device", sample(1)
    yield "worse, unlike classes", sample(own=0.6, epsilon_server=5.0)
    yield "too close, given partition", sample(4, own=0.7001, epsilon_server=0.5).but(partition="given")
    yield "learned nothing", sample(own=0.2, own_local=0.2)
    yield "nothing on the common test", sample(own=0.2)
    nothing = sample().with_details(label_counts=[[7, 2, 1]] * 2, accuracy_own_common=[[0.9, 0.9]] * 3)
    yield "a global model that learned nothing", nothing
    yield "no noise", sample(epsilon_server=math.inf, epsilon_release=math.inf).but(noise_multiplier=0.0)
    for name, sweep in sweeps.items():
        yield f"sweep: {name}", sample(epsilon_server=500.0, sweep=sweep)
    heads = sample(3, epsilon_server=5.0).with_details(own_heads=[MIXED] * 3, local_test_images=[100] * 3)
    yield "personalized heads", heads
    yield "a choice of heads, unlabelled", heads.with_details(own_heads=[PersonalizedHead(images=5, unlabelled=7)] * 3)
    unsure = sample(sweep=sweeps["no sure gain"]).details.privacy_sweep
    worse = heads.with_details(local_only_local=[0.99, 0.5, 0.5], privacy_sweep=unsure)
    yield "personalized heads, one worse than alone", worse.but(privacy=sample(3, epsilon_server=500.0).privacy)
    yield "not measured alone", base.but(local_only=LocalOnly()).with_details(local_only_common=[], local_only_local=[])
    yield "field", bare(base).but(engine="field", federation="plants", recorded_at="2026-11-26T12:43:10Z")
    yield "field, evaluated", base.but(engine="field", evaluations=[EVALUATION])
    yield "field, pays", base.but(engine="field", evaluations=[EVALUATION], pay="It pays, for 9 months")
    yield (
        "field, lifetime",
        base.but(privacy=[row.but(lifetime=LIFETIME, exchange_server=25.0) for row in base.privacy]),
    )
    values = [WithError(value=0.3, error=0.02), WithError(value=0.7, error=0.05)]
    for kind in ("counts", "histogram"):
        yield kind, base.but(statistic=StatisticRow(kind=kind, devices=9, names=["leaf", "root"], values=values))
    for boards, epsilon in ((0, 0.0), (1, 1.5), (5, 2.25)):
        yield (
            f"lost rounds, {boards} boards",
            base.but(lost_rounds=LostRounds(rounds=2, boards=boards, epsilon=epsilon)),
        )
    yield "no model", base.but(rounds=[row.but(participants=0) for row in base.rounds])
    raw = {"raw_values": ["clip norms", "masks"], "noised_server": 3.0, "noised_release": 1.0}
    infinite = sample(epsilon_server=math.inf, epsilon_release=math.inf)
    yield "raw values", infinite.but(privacy=[row.but(**raw) for row in infinite.privacy])
    private = sample(epsilon_server=2.0)
    yield "records", private.but(privacy=[row.but(unit="record") for row in private.privacy])
    yield "a large delta", sample(10, delta=0.1, epsilon_server=2.0)
    yield "as published", base.but(accounting="as-published")
    sums = SumsInfo(roster_by="operator", keys_in_folder=(), min_devices=2)
    rounds = [row.but(suspected_wraps=2 * (row.round == 2), answer_bytes=100, snr_db=None) for row in base.rounds]
    secure = base.but(
        accounting="secure", trust="secure-sum", assumption="if 9 of 10 are honest", sums=sums, rounds=rounds
    )
    yield "secure aggregation", secure
    rows = [
        TimelineRow(round=n, opened_s=n, closed_s=n + 1, accepted=2 - n % 2, late=n % 2, declined=1) for n in (1, 2, 3)
    ]
    yield "late and declined", base.with_details(timeline=rows, decline_reasons={"memory": "too small", "busy": ""})
    silent = [row.but(snr_db=None) for row in base.rounds]
    yield "one bit", base.but(rounds=silent, wire=WireInfo(codec="one-bit", step_unit="noise"))
    rms = WireInfo(codec="quantized", step=0.05, step_unit="rms")
    yield "no noise in updates", infinite.but(rounds=silent, wire=rms)
    fewer = [row.but(downlink_bytes=1000) for row in base.rounds]
    yield "differences of models", base.but(rounds=fewer)
    yield "no signal", base.but(rounds=silent, wire=None)
    yield "a score", base.with_details(score="within 0.5 of the target", chance=[0.3, 0.2])
    yield "an AUROC", base.with_details(measure="AUROC", score="ranked", chance=[0.5, 0.5])
    made = Rerun(command="hushfleet simulate t.toml --out x", task="seed = 7", digests={"test images": "ab12"})
    yield "made again", base.but(rerun=made, method="hush", seed=None)


def words() -> Iterator[str]:
    seen = set[str]()
    for name, result in runs():
        headline = judge(result)
        told, shown = Words(result, headline), ShownRun(result, headline)
        lines = [f"{each}: {text}" for each in (*SENTENCES, "facts") if (text := told.told(each))]
        lines += [f"under: {shown.told('under')}", *(f"tile: {shown.told('tile', row)}" for row in headline.rows[:1])]
        for section in SECTIONS:
            if (found := section.of(shown)) is not None:
                texts = [found.title, found.lead]
                for part in found.parts:
                    texts += [getattr(part, each, "") for each in ("title", "lead", "note")]
                    texts += getattr(part, "sentences", [])
                    texts += [f"{name}: {value}" for name, value in part.rows] if isinstance(part, Facts) else []
                lines += [f"{section.anchor}: {text}" for text in texts if text]
        yield f"== {name}"
        yield from (line for line in lines if line not in seen)
        seen.update(lines)


def test_the_words_of_every_verdict_are_those_that_were_read() -> None:
    text = "\n".join(words()).replace("\N{NO-BREAK SPACE}", " ") + "\n"
    if os.environ.get("HUSHFLEET_WRITE_WORDS"):
        FILE.write_text(text)
    assert text.splitlines() == FILE.read_text().splitlines()
