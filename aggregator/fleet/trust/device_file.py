"""Makes DEVICE.toml of a board of the fleet, for its card or for `hushfleet push`."""

from __future__ import annotations

import copy
from pathlib import PurePosixPath
from typing import Any

from hushfleet.aggregator.config.sections import DataSection
from hushfleet.aggregator.fleet.trust import keys
from hushfleet.aggregator.fleet.trust.folder import FleetConfig, FleetFolder
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.identity_file import load_or_create
from hushfleet.data.form import TABLES, OwnData, may_be_images
from hushfleet.toml_text import to_toml

STATE_DIR = "/var/lib/hushfleet"
DATA = {"kind": "folder", "path": "/var/lib/hushfleet-images"}
"""The section `data` if fleet.toml has none."""
LIMITS: dict[str, Any] = {"epsilon_server": 8.0, "delta": 1e-5}
"""The limits that `fleet init` writes into fleet.toml."""
CA_FILE = "/etc/hushfleet/ca.pem"


def kind_of(data: DataSection) -> OwnData:
    """Returns the kind of the boards' data that a task is made for."""
    if data.form.sample_rate:
        return "sound"
    if data.name in TABLES:
        return "csv"
    return "arrays" if data.name == "arrays" and not may_be_images(data.shape) else "folder"


def fits(data: DataSection, kind: str) -> bool:
    """Returns whether boards with data of a kind can train a task on them."""
    wanted = kind_of(data)
    tables_fit = kind != "folder" or wanted == "folder" or may_be_images(data.shape)
    return tables_fit if "sound" not in (kind, wanted) else kind == wanted


def card_limits(config: FleetConfig) -> dict[str, Any]:
    """Returns the section `limits` of the cards. The limits of secure aggregation are on the card as well as in the
    membership list, so they also bind those who sign membership lists later."""
    sums = config.secure_sums
    given: dict[str, Any] = config.device.get("limits", {})
    return {"honest_fraction": sums.honest_fraction, "min_devices": sums.min_devices, **given}


def device_toml(
    folder: FleetFolder,
    board: Board,
    *,
    state_dir: str = STATE_DIR,
    ca_file: str = CA_FILE,
) -> str:
    """Returns the text of the file. In each section, the values of fleet.toml's `[device]` override the values here."""
    plain: dict[str, Any] = {
        "device": {
            "id": board.device,
            "state_dir": state_dir,
            "federation": folder.config.federation,
            "board": board.board,
        },
        "broker": {
            "url": folder.broker_url,
            "ca_file": ca_file,
            "server_key": load_or_create(folder.aggregator / "identity.key").public_key.hex(),
        },
        "fleet": {
            "operator_key": keys.operator_public(folder).hex(),
            "service_key": keys.service(folder).public_key.hex(),
            "enrol_url": folder.enrolment_url,
            "token_file": str(PurePosixPath(state_dir) / "enrol.token"),
        },
        "limits": card_limits(folder.config),
    }
    for section, values in {"data": DATA, **copy.deepcopy(folder.config.device)}.items():
        plain.setdefault(section, {}).update(values)
    return (
        f"# {board.device}, a board of the fleet {folder.config.federation}. docs/field.md explains every key.\n\n"
        + to_toml(plain)
    )
