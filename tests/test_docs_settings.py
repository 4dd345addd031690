"""docs/settings.md, which is made from the fields of the schemas."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_reference_of_settings_is_what_the_code_says() -> None:
    """After a change of a setting, run `python docs/settings_page.py`. A setting without a description has no page."""
    spec = importlib.util.spec_from_file_location("settings_page", DOCS / "settings_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "settings.md").read_text("utf-8") == module.page()
