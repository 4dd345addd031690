"""Defines a board's health message, and how each field is shown to people and to other programs.

To add a field, write one entry at the end of `Health`, with its `HealthFormat` and `later(DEFAULT)`. The table, the
page, `/metrics`, Home Assistant and the advice use it. The board reads its value in `edge_client/fleet/health.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_type_hints

from msgspec import Meta

from hushfleet.schema import Checked, Count, later
from hushfleet.wire.format.fields import DeclineCode, Text
from hushfleet.wire.format.topics import Name

SlotState = Literal["none", "good", "trial", "returned"]
ErrorCode = Literal["disk", "link", "graph", "data", "update", "other"]
Freeze = Literal["", "unheard", "older"]


@dataclass(frozen=True)
class Problem:
    """A problem that a person may have to solve.

    :param what: the problem; in field metadata, `{}` stands for the value. `advice`: what to do about it.
    :param urgent: the problem stays until somebody acts.
    """

    what: str
    advice: str
    urgent: bool = False


@dataclass(frozen=True)
class HealthFormat:
    """How a health field is shown.

    :param text: words with `{}` for the value, or a table of words by value; empty: not in the table and the page.
    :param column: the column of the table that has the text.
    :param metric: the name after `hushfleet_board_`, with its unit at the end; empty: no metric.
    :param help: meaning of the metric.
    :param per: units of the field in one unit of the metric; `flag`: the metric is 1 or 0.
    :param limit: the lowest value that raises `alarm`; a flag counts as 0 or 1.
    :param alarm: the alarm of a number or flag; `alarms`: the alarm for each code.
    :param shows_work: whether the value could show how long a board trains; if so, `limits.constant_time` sets it to
        None.
    """

    text: str | Mapping[Any, str] = ""
    column: Literal["health", "release"] = "health"
    metric: str = ""
    help: str = ""
    per: int = 1
    flag: bool = False
    limit: float | None = None
    alarm: Problem | None = None
    alarms: Mapping[str, Problem] = field(default_factory=dict)
    shows_work: bool = False


_LOG = "The board's log has the cause: journalctl -u hushfleet-client."
_FAILED = "had an error since its client started: {}"


@dataclass(frozen=True)
class Health(Checked):
    """A retained message with a board's health. No field depends on the board's images (docs/privacy.md, "Health").

    :param session: the session of the board's `Birth`.
    :param uptime_s: seconds since the client started.
    :param disk_percent: used share, in steps of ten; None: not known, or not reported.
    :param memory_percent: likewise.
    :param temperature_c: the processor's temperature, in steps of five.
    :param throttled: whether the board slows its processor down, because of heat or weak power.
    :param last_decline: a code, never a text.
    :param last_error: a code, never a text.
    :param certificate_end: unix seconds; 0: no certificate.
    :param slot: state of the release that was offered last: `returned` means that it was refused, or failed and was
        undone; `none`: this board takes no releases.
    :param platform: the board's Python, in the form that release manifests use: `cp313-aarch64`.
    :param tried: the version that `slot` describes; empty before the first.
    :param attempt: the `ReleaseOffer.attempt` that `slot` describes; 0 before the first.
    :param accelerator: the choice that a trial on random numbers made for the task; empty if there was no choice.
    :param freeze: a state that has lasted for a week in which the client ran: `unheard`: no new statement of the newest
        release has come; `older`: the board's release is older than the newest. Somebody may hold back messages.
    :param volatile: whether the board's owner lets it run with a state directory that is forgotten without power.
    """

    device: Name
    session: Count
    version: Text
    uptime_s: Annotated[Count, HealthFormat(metric="uptime_seconds", help="of its client")]
    disk_percent: Annotated[
        Annotated[int, Meta(ge=0, le=100)] | None,
        HealthFormat(
            text="disk {} %",
            metric="disk_used_ratio",
            help="in steps of a tenth",
            per=100,
            limit=90,
            alarm=Problem("its disk is {} % full", "Free space on the board's card.", urgent=True),
            shows_work=True,
        ),
    ]
    memory_percent: Annotated[
        Annotated[int, Meta(ge=0, le=100)] | None,
        HealthFormat(
            text="memory {} %", metric="memory_used_ratio", help="in steps of a tenth", per=100, shows_work=True
        ),
    ]
    temperature_c: Annotated[
        Annotated[int, Meta(ge=-100, le=200)] | None,
        HealthFormat(
            text="{} °C",
            metric="temperature_celsius",
            help="of its processor, in steps of five",
            limit=80,
            alarm=Problem("is at {} °C", "Cooling."),
            shows_work=True,
        ),
    ]
    throttled: Annotated[
        bool | None,
        HealthFormat(
            text={True: "slowed down"},
            metric="throttled",
            flag=True,
            help="1 where it is slowed down, for heat or weak power",
            limit=1,
            alarm=Problem("is slowed down, for heat or weak power", "A better power supply, or cooling."),
            shows_work=True,
        ),
    ]
    last_decline: DeclineCode | None
    last_error: Annotated[
        ErrorCode | None,
        HealthFormat(
            alarms=dict.fromkeys(get_args(ErrorCode), Problem(_FAILED, _LOG))
            | {"disk": Problem(_FAILED, "Free space on the board's card, or change the card.")}
        ),
    ]
    certificate_end: Count
    slot: Annotated[
        SlotState,
        HealthFormat(
            text={"trial": "on trial", "returned": "went back"},
            column="release",
            alarms={
                "returned": Problem(
                    "has gone back to its former release", "Its log says why the new one failed", urgent=True
                )
            },
        ),
    ]
    platform: Text = later("")
    tried: Text = later("")
    attempt: Count = later(0)
    accelerator: Annotated[
        Literal["", "cpu", "cuda"], HealthFormat(text={"cuda": "trains on the GPU", "cpu": "trains on the processor"})
    ] = later("")
    freeze: Annotated[
        Freeze,
        HealthFormat(
            text={"unheard": "hears of no newer one", "older": "not the newest"},
            column="release",
            metric="frozen",
            flag=True,
            help="1 where it learns of no newer release, or gets none, for a week",
            alarms={
                "unheard": Problem(
                    "has not been told the newest release for a week",
                    "Is its broker the fleet's? Look at the board's log.",
                    urgent=True,
                ),
                "older": Problem(
                    "has run an older release than the newest for a week",
                    "hushfleet release rollout DIR says why; if it was offered, somebody holds the offer back.",
                    urgent=True,
                ),
            },
        ),
    ] = later("")
    volatile: Annotated[
        bool,
        HealthFormat(
            text={True: "forgets its state"},
            metric="volatile_state",
            flag=True,
            help="1 where its ledger is forgotten without power",
            limit=1,
            alarm=Problem(
                "keeps its ledger where it is forgotten without power",
                "Put its state directory on a partition that lasts, and take device.allow_volatile_state out.",
                urgent=True,
            ),
        ),
    ] = later(False)


SHOWN: Mapping[str, HealthFormat] = {
    name: shown
    for name, kind in get_type_hints(Health, include_extras=True).items()
    for shown in getattr(kind, "__metadata__", ())
    if isinstance(shown, HealthFormat)
}
"""How each field is shown, by its name."""


def described(health: Health, column: str) -> Iterator[str]:
    """Yields the texts of a column of the table; unknown fields have none."""
    for name, shown in SHOWN.items():
        value = getattr(health, name)
        if shown.column == column and value is not None:
            text = shown.text.format(value) if isinstance(shown.text, str) else shown.text.get(value, "")
            if text:
                yield text


def alarms(health: Health) -> Iterator[Problem]:
    """Yields the problems that a person has to solve."""
    for name, shown in SHOWN.items():
        value = getattr(health, name)
        raised = shown.alarms.get(value)
        if shown.limit is not None and value is not None and value >= shown.limit:
            raised = shown.alarm
        if raised is not None:
            yield Problem(raised.what.format(value), raised.advice, raised.urgent)


def metric_value(health: Health, name: str) -> float | None:
    """Returns the value of a field's metric: a number in the metric's unit, 1 or 0 for a text. None: not known."""
    value: int | str | None = getattr(health, name)
    if value is None or isinstance(value, str):
        return None if value is None else bool(value)
    return value if SHOWN[name].per == 1 else value / SHOWN[name].per
