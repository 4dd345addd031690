"""The status page in a real headless Chromium."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hushfleet.aggregator.fleet.page.server import PageServer
from hushfleet.aggregator.fleet.view import FleetView
from support.browser import Tab, tab
from support.fleet_views import a_view

__all__ = ["tab"]
pytestmark = pytest.mark.needs("chromium")


@pytest.mark.slow
def test_the_page_is_live_safe_and_fits_a_telephone(tab: Tab) -> None:
    shown: list[FleetView] = [a_view()]
    with PageServer(lambda: shown[-1], "token", host="127.0.0.1", port=0) as server:
        tab.do("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
        tab.do("Page.navigate", url=f"http://localhost:{server.port}/?token=token")
        tab.until("document.getElementById('live')?.textContent === 'live'")
        assert tab.value("location.search") == "", "the token has left the address"
        assert tab.value("document.cookie") == "", "no script sees the cookie"
        assert tab.value("document.title") == "greenhouse - Hushfleet", "no text from a board has run"
        assert tab.value("document.querySelectorAll('img, section script').length") == 0
        assert tab.value("document.documentElement.scrollWidth") <= 390
        assert tab.value("getComputedStyle(document.querySelector('.boards thead')).display") == "none"
        assert tab.value("document.querySelector('time').textContent").endswith("ago")
        shown.append(replace(shown[0], boards=(replace(shown[0].boards[0], device="greenhouse-new"),)))
        tab.until("document.querySelector('.boards td b').textContent === 'greenhouse-new'")
        tab.do("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
        assert tab.value("document.documentElement.scrollWidth") <= 1200
        assert tab.value("getComputedStyle(document.querySelector('.boards thead')).display") != "none"
        assert tab.refused == [], "the content security policy stopped nothing of ours"
    tab.until("document.getElementById('live').textContent.startsWith('not live')")
