"""Packages that are older than Hushfleet needs."""

from __future__ import annotations

from importlib import metadata

import pytest

from hushfleet import needs
from hushfleet.edge_client.__main__ import main as edge_main


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of packages; the others are not installed."""
    versions: dict[str, str] = {}
    asked = [
        "numpy>=2.1", "tomli>=2; python_version < '3.11'", 'typer>=0.19; extra == "server"',
        'ray>=2.60; extra == "ray"', 'flwr[simulation]==1.42.0; extra == "peers"', 'hushfleet[edge]; extra == "server"',
    ]  # fmt: skip

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(needs, "requires", lambda name: asked)
    monkeypatch.setattr(needs, "version", version)
    return versions


@pytest.mark.parametrize("there", ["2.1", "2.1.0", "2.1.3", "2.10", "3.0.0rc1", "2.1.0+cpu"])
def test_the_least_version_and_newer_ones_are_not_too_old(there: str, installed: dict[str, str]) -> None:
    installed["numpy"] = there
    assert needs.too_old() == ""


@pytest.mark.parametrize("there", ["2.0.9", "2", "1.26.4", "2.0.9+cpu"])
def test_an_older_one_is_named(there: str, installed: dict[str, str]) -> None:
    installed |= {"numpy": there, "typer": "0.18", "ray": "2.55.1", "flwr": "1.0"}
    assert needs.too_old() == (
        f"numpy {there} is installed and 2.1 or newer is needed, typer 0.18 is installed and 0.19 or newer is needed; "
        "type: pip install 'numpy>=2.1' 'typer>=0.19'"
    )


def test_a_release_of_a_board_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(needs, "requires", requires)
    assert needs.too_old() == ""


def test_what_is_installed_here_is_new_enough() -> None:
    assert needs.too_old() == ""


def test_a_board_says_so(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def status(options: object) -> int:
        raise AttributeError("a word")

    monkeypatch.setitem(edge_main.__globals__["_COMMANDS"], "status", status)
    with pytest.raises(AttributeError):
        edge_main(["status", "device.toml"])
    installed["numpy"] = "1.26"
    assert edge_main(["status", "device.toml"]) == 1
    assert capsys.readouterr().err.startswith("error: AttributeError: a word. numpy 1.26 is installed and 2.1 or newer")
