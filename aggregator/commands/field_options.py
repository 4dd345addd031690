"""The options of a run in the field."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from hushfleet.aggregator.report.options import Option

_FILE = {"metavar": "FILE", "exists": True, "dir_okay": False}


DeviceName = StrEnum("DeviceName", ["auto", "cpu", "cuda"])
EnrolmentMode = StrEnum("EnrolmentMode", ["closed", "open"])


@dataclass(frozen=True, kw_only=True)
class AggregatorOptions:
    """A run in the field: its broker, its devices and its files."""

    # fmt: off
    broker: Annotated[str | None, Option(metavar="URL", help="mqtt://host:1883 or mqtts://host:8883.")] = None
    fleet: Annotated[Path | None, Option(metavar="DIR", help="Folder of a fleet, with its task, broker, certificates, "
"key and devices. An unfinished run is resumed.")] = None
    federation: Annotated[str, Option(help="Name of the federation, as in the devices' files.")] = "default"
    devices: Annotated[Path | None, Option(metavar="FILE|RUN", help="Devices that may take part: a TOML list of ids "
"and keys, or the folder of an earlier run. `hushfleet fleet add|block|forget RUN` changes it during the run.")] = None
    membership_list: Annotated[Path | None, Option("--roster", help="Signed list of the devices in secure "
"aggregation, from `hushfleet fleet roster sign`. Default: all accepted devices.", **_FILE)] = None
    enrolment: Annotated[EnrolmentMode, Option(help="`open`: every device that reaches the broker takes part and "
"shares the noise; for labs only.")] = EnrolmentMode.closed
    device: Annotated[DeviceName, Option(help="Processor that holds the sums; auto: cuda where torch finds one. The "
"result is equal bit by bit.")] = DeviceName.auto
    out: Annotated[Path | None, Option(help="Run folder; default: runs/TASK-TIME.")] = None
    resume: Annotated[bool, Option("--resume", help="Resume the run in --out, if there is one.")] = False
    data_dir: Annotated[Path | None, Option(help="Folder with the files of the test set.")] = None
    settings: Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override any key of the task file.")] = None
    identity: Annotated[Path | None, Option(help="This aggregator's key, which devices pin; default: one for each federation in the user's configuration folder.")] = None
    rounds_only: Annotated[bool, Option("--rounds-only", help="No result.json and no report: for a program that makes its own.")] = False
    run_id: Annotated[str | None, Option(help="Last part of the task id; default: random.")] = None
    ca_file: Annotated[Path | None, Option(help="CA that signed the broker's certificate.", **_FILE)] = None
    cert_file: Annotated[Path | None, Option(help="This aggregator's certificate.", **_FILE)] = None
    key_file: Annotated[Path | None, Option(help="Private key of that certificate.", **_FILE)] = None
    username: Annotated[str | None, Option(help="User name for the broker.")] = None
    password_file: Annotated[Path | None, Option(help="File with the password for the broker.", **_FILE)] = None
    # fmt: on
