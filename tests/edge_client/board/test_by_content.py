"""A board refuses, in words, settings by which one sample would decide about others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hushfleet.data.form import SampleForm
from hushfleet.edge_client.board.by_content import check_by_content
from hushfleet.edge_client.board.config import DeviceConfig, OwnDataSection
from hushfleet.errors import BadInput
from hushfleet.wire.format.spec import PrivacySpec, TaskSpec
from support.device import config, make_bench, package  # noqa: F401
from support.edge import Bench, Package

RECORD = PrivacySpec("record", "strict", 1.0, 4.0, 1e-5, sample_rate=0.5, batches=2)
DAY = 86400


@pytest.mark.parametrize(
    ("settings", "of_records", "of_windows"),
    [
        ({"kind": "folder"}, None, None),
        ({"kind": "folder", "keep": "90d"}, None, None),
        ({"kind": "folder", "max_mib": 9}, "one large file would decide which others are deleted", None),
        ({"kind": "csv"}, None, None),
        ({"kind": "csv", "max_mib": 9}, "one large file would decide", "one large file would decide"),
        ({"kind": "csv", "keep": "90d"}, "the last line of a CSV file would decide how long all others stay", None),
        ({"kind": "csv", "path": "folder"}, "no columns are named", "no columns are named"),
        ({"kind": "csv", "path": "folder", "columns": ("a", "b")}, None, None),
        ({"kind": "arrays"}, "it is not said what its values are", "it is not said what its values are"),
        ({"kind": "arrays", "values": "pixels"}, None, None),
    ],
)
def test_what_is_refused(
    package: Package,  # noqa: F811
    tmp_path: Path,
    settings: dict[str, Any],
    of_records: str | None,
    of_windows: str | None,
) -> None:
    (tmp_path / "folder").mkdir()
    section = OwnDataSection(**{**settings, "path": str(tmp_path / settings.get("path", "file"))})
    plain = package.spec
    for spec, words in (
        (plain, None),
        (replace(plain, privacy=RECORD), of_records),
        (replace(plain, data_window_s=DAY), of_windows),
    ):
        if words is None:
            check_by_content(section, spec)
        else:
            with pytest.raises(BadInput, match=words):
                check_by_content(section, spec)


def test_the_task_may_say_it_for_all_boards(package: Package, tmp_path: Path) -> None:  # noqa: F811
    model = replace(package.spec.model, form=SampleForm(("a", "b"), values="numbers"))
    spec = replace(package.spec, privacy=RECORD, model=model)
    check_by_content(OwnDataSection("arrays", "x.npz"), spec)
    check_by_content(OwnDataSection("csv", str(tmp_path)), spec)
    assert TaskSpec.from_bytes(spec.to_bytes()) == spec


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("folder", "data.max_mib = 9: one large file would decide"),
        ("sound", "data.kind = 'sound': the task needs kind 'folder' of images, or a table, not 'sound'"),
    ],
)
def test_a_board_declines_and_says_why(
    make_bench: Callable[..., Bench],  # noqa: F811
    package: Package,  # noqa: F811
    config: DeviceConfig,  # noqa: F811
    tmp_path: Path,
    kind: Any,
    why: str,
) -> None:
    """By its settings alone, which are no private data, and before anything is charged."""
    data = OwnDataSection(kind, str(tmp_path / "images"), max_mib=9)
    bench = make_bench(package.with_spec(privacy=RECORD), replace(config, data=data))
    bench.server.open_round(1)
    bench.until(lambda: bool(bench.server.declines))
    [decline] = bench.server.declines
    assert (decline.code, why in decline.reason) == ("error", True)
    assert bench.store.ledger.entries() == []
